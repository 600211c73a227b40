"""Choose between implementations of one operation by measurement, on this GPU and for this shape; the answer is kept.

A kernel of ours is not faster than torch's operations because it is ours: the norm of Wukong's products took six times
as long by Triton as by torch on an H200. So the first call of a shape times both on numbers of its own, and the faster
one serves that shape from then on:

    first call ──► known to this process? ──► kept in the cache folder? ──► time in turns ──► keep

Measurements differ from run to run, and implementations agree only up to rounding, so an answer is kept in the cache
folder (`kernels/`) and given again for the same GPU, versions, source of the kernel and shape: the same run repeats bit
for bit. Of two processes that measure at the same time the first decides for both. Delete the file to measure anew.
Sizes of batches are rounded up to powers of two, 8,192 at most.

Nothing is measured while a CUDA graph is captured, since that would end the capture: the first implementation serves
then, unless an answer is kept. Scratch numbers come from a generator of their own, so no draw of the run changes.

Cost: some 20 calls of each implementation at the first batch of a shape on a machine: milliseconds, and what compiling
the kernel takes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.resources
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ziggurat.cache import cache_folder
from ziggurat.files import Format
from ziggurat.files.first_kept import keep_first
from ziggurat.ops.kernel_choice import power_of_two

MEASURED = Format(name="ziggurat.measured_choice", what="a kept choice between implementations")
MAX_SAMPLES = 8192  # of a batch that is timed: 27 fields of 128 columns are 113 MB of it, more than a cache holds
_ROUNDS = 5
_CALLS = 3  # of a round
_CYCLES_PER_S = 2e9  # of a GPU, about
_MIN_SLEEP_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The implementation that serves a shape.

    Args:
        name: of the implementation.
        times_ms: the smallest milliseconds of a call of each, by name; {} where nothing was measured.
        reason: why it was chosen, for people.
    """

    name: str
    times_ms: Mapping[str, float]
    reason: str

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time_ms:.3f} ms" for name, time_ms in self.times_ms.items())
        return f"{self.name}: {self.reason}" + (f" ({times})" if times else "")


_answers: dict[tuple[str, str, torch.device], Answer] = {}


def fastest(
    what: str,
    contestants: Mapping[str, Callable[[], object]],
    *,
    shape: str,
    kernels: str,
    device: torch.device,
    folder: Path | None = None,
    least_gain: float = 1.0,
) -> Answer:
    """Return the fastest of some implementations for a shape; measured when first asked for.

    Args:
        what: the operation, in letters that a file name may have: "dots".
        contestants: what runs each implementation once, by its name; the first serves where nothing can be measured.
        shape: everything that the times depend on, beside the machine.
        kernels: the module whose source the answer is for.
        device: where.
        folder: where answers are kept; the cache folder's `kernels` unless given.
        least_gain: the first serves unless another is so many times as fast.
    """
    asked = (what, shape, device)
    if asked in _answers and folder is None:
        return _answers[asked]
    lines = [what, shape, machine_line(device), source_hash(kernels)]
    if least_gain > 1:
        lines.append(f"{least_gain:g} times as fast")
    fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]
    path = (folder or cache_folder() / "kernels") / f"{what}-{fingerprint}.json"
    answer = _kept(path, contestants)
    if answer is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Answer(name=next(iter(contestants)), times_ms={}, reason="a CUDA graph is being captured")
    answer = answer or _measured(path, contestants, shape=shape, device=device, least_gain=least_gain)
    # Answers in a folder that was named are asked of it each time.
    if folder is None:
        _answers[asked] = answer
    return answer


def answers() -> dict[str, Answer]:
    """Return what this process has asked for so far, by operation and shape."""
    return {f"{what}, {shape}": answer for (what, shape, _), answer in _answers.items()}


def kept_line(device: torch.device, *, folder: Path | None = None) -> str:
    """Say which implementations were the fastest on a device, with its present versions, and how often; for doctor.

    Args:
        device: a GPU.
        folder: where answers are kept; the cache folder's `kernels` unless given.
    """
    folder = folder or cache_folder() / "kernels"
    counts: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("*-*.json")):
        try:
            kept = MEASURED.read(path)
            is_mine = kept["machine"] == machine_line(device)
            what = path.stem.rpartition("-")[0]
            name = str(kept["name"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # another kind of answer, or damaged: measured again when it is asked for
        if is_mine:
            counts.setdefault(what, {})[name] = counts.get(what, {}).get(name, 0) + 1
    texts = [
        f"{what}: {', '.join(f'{name} for {count} shapes' for name, count in found.items())}"
        for what, found in counts.items()
    ]
    return "; ".join(texts) or "none yet: the first batch of a shape is timed"


def timed_size(batch_size: int) -> int:
    """Return the samples that are timed for batches of a size: few sizes, so that few are measured."""
    return min(power_of_two(batch_size), MAX_SAMPLES)


def times_in_turns(contestants: Mapping[str, Callable[[], object]], *, device: torch.device) -> dict[str, float]:
    """Return the smallest milliseconds of a call of each contestant, round by round, after one round to warm up."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(1 + _ROUNDS):
        for name, work in contestants.items():
            found[name].append(_milliseconds(work, device))
    # The smallest: other work on the machine can only add to a time.
    return {name: min(times[1:]) for name, times in found.items()}


def _those_that_run(
    contestants: Mapping[str, Callable[[], object]],
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Run each contestant once; return those that could, and why the others could not.

    A launch may ask for more registers or shared memory than a GPU has.
    """
    able: dict[str, Callable[[], object]] = {}
    reasons: dict[str, str] = {}
    for name, work in contestants.items():
        try:
            work()
        # Of any kind: what a compiler or driver raises is not known here, and another contestant serves.
        except Exception as error:
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            able[name] = work
    return able, reasons


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin_s = time.perf_counter()
        for _ in range(_CALLS):
            work()
        return 1e3 * (time.perf_counter() - begin_s) / _CALLS
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    work()
    # How long a call keeps the host alone: the sleep below has to cover the launches of all calls.
    host_s = time.perf_counter() - start_s
    torch.cuda.synchronize(device)
    # The GPU sleeps until the host has launched everything: otherwise short kernels are timed by their launches.
    torch.cuda._sleep(int(_CYCLES_PER_S * (_MIN_SLEEP_S + 2 * _CALLS * host_s)))
    begin.record()
    for _ in range(_CALLS):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / _CALLS


def _measured(
    path: Path,
    contestants: Mapping[str, Callable[[], object]],
    *,
    shape: str,
    device: torch.device,
    least_gain: float,
) -> Answer:
    first = next(iter(contestants))
    able, reasons = _those_that_run(contestants)
    if len(able) < 2:
        return Answer(name=next(iter(able), first), times_ms={}, reason=f"the others do not run here: {reasons}")
    times_ms = times_in_turns(able, device=device)
    name = min(times_ms, key=lambda each: times_ms[each])
    reason = f"fastest, measured just now ({shape})"
    if first in able and name != first and times_ms[first] < least_gain * times_ms[name]:
        reason = f"{name} is less than {least_gain:g} times as fast, measured just now ({shape})"
        name = first
    if reasons:
        reason += f"; what does not run here: {reasons}"
    answer = {"name": name, "times_ms": times_ms, "shape": shape, "machine": machine_line(device)}
    try:
        kept = keep_first(path, answer, file_format=MEASURED, read=lambda: _kept(path, contestants))
    except OSError as error:
        reason += f"; the answer could not be kept ({error})"
    else:
        if kept is not None and kept.name != name:  # another process was first
            return kept
    return Answer(name=name, times_ms=times_ms, reason=reason)


def _kept(path: Path, contestants: Mapping[str, object]) -> Answer | None:
    """Read the answer of an earlier measurement; None if there is none, or it is of no use."""
    try:
        kept = MEASURED.read(path)
        name = str(kept["name"])
        times_ms = dict(kept["times_ms"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # measured again
    if name not in contestants:
        return None
    return Answer(name=name, times_ms=times_ms, reason=f"fastest when measured before ({path})")


@functools.cache
def machine_line(device: torch.device) -> str:
    """Name the device and the versions that times depend on."""
    versions = [f"torch {torch.__version__}"]
    try:
        versions.append(f"triton {importlib.metadata.version('triton')}")
    except importlib.metadata.PackageNotFoundError:
        versions.append("no triton")
    if device.type != "cuda" or not torch.cuda.is_available():
        return " ".join([device.type, *versions])
    facts = torch.cuda.get_device_properties(device)
    return " ".join([facts.name, f"CUDA {torch.version.cuda}", *versions])


@functools.cache
def source_hash(module: str) -> str:
    """Return a hash of a module's source."""
    # Read and not imported: kernels import triton, which may not be here.
    package, _, name = module.rpartition(".")
    return hashlib.sha256(importlib.resources.files(package).joinpath(f"{name}.py").read_bytes()).hexdigest()
