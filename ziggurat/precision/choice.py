"""What `precision auto` means on this machine: decided once, kept, and the same at every start.

BF16 changes the numbers of a run, so a decision that hangs on a stopwatch must not be taken anew at each start: two
equal commands would give two models. It is taken once for a machine, a version of torch and a device, and kept in the
cache folder, as the choice of lookup kernels is (`ops/lookup/choose.py`):

    speedup  =  median over turns of BF16's rate / FP32's (`ops/machine/matmul_rate.py`)
    BF16     if speedup >= 1.3 in the median of three measurements
             five further measurements count too where they are near 1.3 (1.1 to 1.5), so that noise does not decide

What was kept stands, whatever a later measurement says; delete the file, whose path is in the reason, to decide anew.
Of two processes that decide at the same time the first one to finish decides for both. A run writes the precision
that it had into its config.json, and goes on with it when it is resumed, here or elsewhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import statistics
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ziggurat.cache import cache_folder
from ziggurat.errors import ConfigError
from ziggurat.files import Format
from ziggurat.files.first_kept import keep_first
from ziggurat.ops.machine.matmul_rate import MatmulRates, measure_ratio
from ziggurat.precision.precision import Precision

MIN_BF16_SPEEDUP = 1.3
_NEAR = (1.1, 1.5)
_EMULATED = 0.3  # no noise makes 1.3 of this: one measurement, which takes seconds there, is enough
_MEASUREMENTS, _MORE_MEASUREMENTS = 3, 5
CHOICE = Format(name="ziggurat.precision_choice", what="a kept choice of precision")


def resolve_precision(
    wanted: Precision,
    *,
    device: torch.device,
    folder: Path | None = None,
    measure: Callable[[], MatmulRates] | None = None,
) -> tuple[Precision, str]:
    """Resolve the precision to compute in, with the reason for the start-up report.

    Args:
        wanted: AUTO takes the decision that was kept, or measures; others stay as they are.
        device: of the model.
        folder: where decisions are kept; the cache folder's `precision` unless given.
        measure: one measurement; tests give another.

    Raises:
        ConfigError: the device does not have the precision that was asked for.
    """
    if missing := wanted.lacks(device):
        raise ConfigError(
            expected=f"for precision {wanted}, {missing}",
            found=f"device {device.type}",
            where="training settings, precision",
            ways_out=("--training.precision fp32", "--device cuda, on a machine that has a GPU"),
        )
    if not wanted.is_measured:
        return wanted, "as asked"
    path = (folder or cache_folder() / "precision") / f"choice-{_fingerprint(device)}.json"
    return _kept(path) or _decide(path, measure or (lambda: measure_ratio(device=str(device))))


@contextlib.contextmanager
def whole_products() -> Iterator[None]:
    """Let products of FP32 matrices read all bits of them within, whatever a run that trains in TF32 has asked for."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def _decide(path: Path, measure: Callable[[], MatmulRates]) -> tuple[Precision, str]:
    rates = [measure()]
    if rates[0].ratio > _EMULATED:
        rates += [measure() for _ in range(_MEASUREMENTS - 1)]
    if any(_NEAR[0] <= each.ratio <= _NEAR[1] for each in rates):
        rates += [measure() for _ in range(_MORE_MEASUREMENTS)]
    speedup = statistics.median(each.ratio for each in rates)
    chosen = Precision.BF16 if speedup >= MIN_BF16_SPEEDUP else Precision.FP32
    answer = {
        "precision": chosen.value,
        "fp32_gflop_per_s": statistics.median(each.fp32 for each in rates),
        "bf16_gflop_per_s": statistics.median(each.bf16 for each in rates),
        "speedup": speedup,
        "measurements": len(rates),
    }
    try:
        kept = keep_first(path, answer, file_format=CHOICE, read=lambda: _kept(path))
    except OSError as error:
        return chosen, f"measured here: {_rates(answer)}; the decision could not be kept ({error})"
    if kept is not None and kept[0] is not chosen:  # another process was first
        return kept
    return chosen, f"measured here: {_rates(answer)}; kept for the next starts ({path})"


def _kept(path: Path) -> tuple[Precision, str] | None:
    """Return the decision that was taken before, if it can be read."""
    try:
        answer = CHOICE.read(path)
        chosen = Precision(answer["precision"])
        reason = f"decided before for this machine: {_rates(answer)} ({path})"
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if chosen.is_measured else (chosen, reason)


def _rates(answer: dict[str, str | float | int]) -> str:
    fp32 = float(answer["fp32_gflop_per_s"])
    bf16 = float(answer["bf16_gflop_per_s"])
    return f"FP32 {fp32:.0f}, BF16 {bf16:.0f} GFLOP/s, {float(answer['speedup']):.2f} times"


def _fingerprint(device: torch.device) -> str:
    """Fingerprint what a decision holds for: processor or GPU, its instructions, and the version of torch."""
    return hashlib.sha256("\n".join(_machine_lines(device)).encode()).hexdigest()[:20]


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return what measured times hold for, by name: the machine and the versions."""
    torch_version, *machine = _machine_lines(device)
    try:
        of_package = version("ziggurat-rec")
    except PackageNotFoundError:  # it runs from its sources
        of_package = "not installed"
    return {"ziggurat": of_package, "torch": torch_version, "machine": ", ".join(machine)}


def _machine_lines(device: torch.device) -> list[str]:
    lines = [torch.__version__, device.type, platform.machine()]
    if device.type == "cuda":
        lines.append(torch.cuda.get_device_name(device))
    else:
        lines += [torch.backends.cpu.get_cpu_capability(), cpu_name()]
    return lines


def cpu_name() -> str:
    """Return the name of the processor, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
