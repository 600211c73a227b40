"""Choose a kernel by measurement, on this machine and for this shape.

Which kernel is fastest depends on the processor (FBGEMM's took 2 ms for a step on a Zen 4 and 12 ms for the same on a
Zen 3), the number of threads, the dims, the batch size and the list lengths; no table of rules stays right. So `auto`
runs each kernel that is exact for the setting on a synthetic batch of the real shape: lookup, then update, on scratch
tables of at most 2^22 numbers each dim, with rows drawn from a Zipf law as ids in logs are. The smallest of five
times counts: other work on the machine can only add to a time.

Measurements differ from run to run, and kernels agree only up to rounding, so a first answer is kept in the cache
folder and given again for the same machine, versions, threads and shape: the same run repeats bit for bit. Delete the
file to measure anew. Batches too small to matter are not measured: C++ if it can be built, else torch. Nor are tables
in few bits: C++ alone reads and writes their rows where they lie; for every other kernel torch decodes them first.
On CUDA devices Triton's kernel and torch's are timed alike, where Triton can be imported.

    lookups · dim < 2^15   no measurement
    otherwise              1 + 5 rounds, a few milliseconds a kernel each; importing FBGEMM takes most of a second
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.cache import cache_folder
from ziggurat.errors import ConfigError, MissingDependencyError
from ziggurat.files import Format
from ziggurat.files.first_kept import keep_first
from ziggurat.ops.lookup.cpp import CppKernel
from ziggurat.ops.lookup.cpp_library import library_fingerprint
from ziggurat.ops.lookup.fbgemm import FbgemmKernel
from ziggurat.ops.lookup.kernel import (
    GradientPart,
    KernelChoice,
    KernelSetting,
    LookupKernel,
    Step,
    UpdateRule,
    state_shapes,
)
from ziggurat.ops.lookup.layout import LookupLayout, Lookups
from ziggurat.ops.lookup.reference import TorchKernel
from ziggurat.ops.lookup.triton import TritonKernel
from ziggurat.ops.lookup.triton.kernel import LOOKUP_KERNELS
from ziggurat.ops.lookup.triton.runs import UPDATE_KERNELS
from ziggurat.ops.machine.launches import launch_line
from ziggurat.ops.machine.measured_choice import machine_line, source_hash
from ziggurat.ops.table_optimizers import PLAIN_RULE

CHOICE = Format(name="ziggurat.kernel_choice", what="a kept choice of kernel")
# Numbers of an output: with fewer of them every kernel is done before the difference matters.
_SMALL = 2**15
# Of all tables of a dim together: 16 MiB of FP32.
_SCRATCH_NUMBERS = 2**22
_REPEATS = 5
_Makers = tuple[tuple[KernelChoice, Callable[[], LookupKernel]], ...]
_ON_CPU: _Makers = (
    (KernelChoice.CPP, CppKernel),
    (KernelChoice.TORCH, TorchKernel),
    (KernelChoice.FBGEMM, FbgemmKernel),
)
_ON_CUDA: _Makers = ((KernelChoice.TRITON, TritonKernel), (KernelChoice.TORCH, TorchKernel))
_MAKERS: dict[KernelChoice, Callable[[], LookupKernel]] = dict((*_ON_CPU, *_ON_CUDA))


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of a batch, for measuring.

    Args:
        batch_size: samples.
        list_length: mean rows of a jagged field's list.
    """

    batch_size: int = 2048
    list_length: float = 8.0


@dataclass(frozen=True, kw_only=True)
class ChosenKernel:
    """A kernel, and why it was chosen.

    Args:
        kernel: the kernel.
        reason: in words, for the start-up report.
        times_s: smallest seconds of lookup and update of those that were measured, by name.
        not_eligible: why others were not, by name.
        launches: of Triton's kernels: which entry of their table is used, and where it was measured.
    """

    kernel: LookupKernel
    reason: str
    times_s: dict[str, float] = field(default_factory=dict)
    not_eligible: dict[str, str] = field(default_factory=dict)
    launches: str = ""


def choose_kernel(
    choice: KernelChoice, *, setting: KernelSetting, shape: BatchShape, folder: Path | None = None
) -> ChosenKernel:
    """The kernel that was asked for, or the fastest exact one.

    Args:
        choice: a kernel, or `auto`.
        setting: what it has to serve.
        shape: of the batches to come.
        folder: where measurements are kept; the cache folder's `kernels` unless given.

    Raises:
        MissingDependencyError: the kernel that was asked for is not available here.
        ConfigError: it is available, but not exact for the setting.
    """
    chosen = _chosen(choice, setting, shape, folder)
    if chosen.kernel.choice is KernelChoice.TRITON:
        return dataclasses.replace(chosen, launches=launch_line(setting.device))
    return chosen


def _chosen(choice: KernelChoice, setting: KernelSetting, shape: BatchShape, folder: Path | None) -> ChosenKernel:
    if choice is not KernelChoice.AUTO:
        return ChosenKernel(kernel=_asked_for(choice, setting), reason="as configured")
    makers = _ON_CPU if setting.device.type == "cpu" else _ON_CUDA
    lookups = sum(
        shape.batch_size * (len(layout.single) + shape.list_length * len(layout.jagged)) * layout.dim
        for layout in setting.layouts
    )
    reason = _why_not_measured(setting, lookups=lookups)
    if reason:
        eligible, reasons = _eligible(setting, makers[:2])
        return ChosenKernel(kernel=eligible[0], reason=reason, not_eligible=reasons)
    path = (folder or cache_folder() / "kernels") / f"choice-{_fingerprint(setting, shape)}.json"
    return _kept(path, setting, makers) or _measured(path, setting, shape, makers)


def _why_not_measured(setting: KernelSetting, *, lookups: float) -> str:
    """Say why the first kernel that serves a setting is taken without measuring, or return "" if it is measured."""
    if setting.device.type != "cpu":
        if len(_eligible(setting, _ON_CUDA)[0]) == 1:
            return f"the only one that serves these tables on {setting.device.type!r} devices"
        if setting.has_few_bits:
            return "rows in few bits: Triton reads them where they lie; torch decodes them"
    elif setting.has_few_bits:
        return "rows in few bits: C++ reads them where they lie; torch decodes them where there is no C++"
    return f"batches too small to measure on {setting.device.type!r} devices" if lookups < _SMALL else ""


def kernel_diagnosis() -> dict[str, str]:
    """Each kernel and whether it can be used here, for `ziggurat doctor`; builds the C++ one if need be."""
    lines = {}
    for choice, make in _MAKERS.items():
        start = time.perf_counter()
        try:
            make()
        except MissingDependencyError as error:
            lines[choice.value] = f"not available: {error.found}"
        else:
            lines[choice.value] = f"available (loaded in {time.perf_counter() - start:.1f} s)"
    return lines


def is_available(choice: KernelChoice) -> bool:
    """Return whether a kernel can be used here at all; build the C++ one if need be."""
    try:
        _MAKERS[choice]()
    except MissingDependencyError:
        return False
    return True


def _asked_for(choice: KernelChoice, setting: KernelSetting) -> LookupKernel:
    kernel = _MAKERS[choice]()
    reason = kernel.why_not(setting)
    if reason:
        raise ConfigError(
            expected=f"a setting that kernel {choice.value!r} serves exactly",
            found=reason,
            where="EmbeddingConfig.kernel",
            ways_out=('choose kernel = "auto" or "torch"', "change the setting that is named"),
        )
    return kernel


def _eligible(setting: KernelSetting, makers: _Makers) -> tuple[list[LookupKernel], dict[str, str]]:
    kernels = []
    reasons = {}
    for choice, make in makers:
        try:
            kernel = make()
        except MissingDependencyError as error:
            reasons[choice.value] = error.found
            continue
        reason = kernel.why_not(setting)
        if reason:
            reasons[choice.value] = reason
        else:
            kernels.append(kernel)
    return kernels, reasons


def _kept(path: Path, setting: KernelSetting, makers: _Makers) -> ChosenKernel | None:
    """The answer of an earlier measurement, if it is there and still possible."""
    try:
        kept = CHOICE.read(path)
        choice = KernelChoice(kept["kernel"])
        times = dict(kept["times_s"])
        reasons = dict(kept["not_eligible"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # measured again
    # What was fastest may be gone since: a package or a compiler that was removed.
    eligible, _ = _eligible(setting, tuple(maker for maker in makers if maker[0] is choice))
    if not eligible:
        return None
    reason = f"fastest when measured before ({path})"
    return ChosenKernel(kernel=eligible[0], reason=reason, times_s=times, not_eligible=reasons)


def _measured(path: Path, setting: KernelSetting, shape: BatchShape, makers: _Makers) -> ChosenKernel:
    kernels, reasons = _eligible(setting, makers)
    times = measure(kernels, setting=setting, shape=shape)
    fastest = min(kernels, key=lambda kernel: times[kernel.choice.value])
    answer = {"kernel": fastest.choice.value, "times_s": times, "not_eligible": reasons}
    reason = "fastest, measured just now"
    try:
        kept = keep_first(path, answer, file_format=CHOICE, read=lambda: _kept(path, setting, makers))
    except OSError as error:
        reason += f"; the answer could not be kept ({error})"
    else:
        if kept is not None and kept.kernel.choice is not fastest.choice:  # another process was first
            return kept
    return ChosenKernel(kernel=fastest, reason=reason, times_s=times, not_eligible=reasons)


def measure(kernels: list[LookupKernel], *, setting: KernelSetting, shape: BatchShape) -> dict[str, float]:
    """Smallest seconds of lookup and update on scratch tables, for each kernel by name; kernels take turns."""
    generator = torch.Generator().manual_seed(0)
    problems = [
        _Problem.make(layout, rule=setting.rule, shape=shape, generator=generator).on(setting.device)
        for layout in setting.layouts
        if layout.slots
    ]
    seconds: dict[str, list[float]] = {kernel.choice.value: [] for kernel in kernels}
    for _ in range(1 + _REPEATS):
        # In turns, so that a slow moment of the machine does not fall on one kernel alone.
        for kernel in kernels:
            start = time.perf_counter()
            for problem in problems:
                problem.run(kernel)
            if setting.device.type == "cuda":
                # Launches return at once: without this the time of asking is measured, not that of computing.
                torch.cuda.synchronize(setting.device)
            seconds[kernel.choice.value].append(time.perf_counter() - start)
    # The first round also makes what a kernel makes once: buffers, plans, pages of memory.
    return {name: min(values[1:]) for name, values in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """A scratch storage and one batch for it."""

    layout: LookupLayout
    lookups: Lookups
    weight: Tensor
    state: dict[str, Tensor]
    grad: Tensor
    step: Step

    @staticmethod
    def make(layout: LookupLayout, *, rule: UpdateRule, shape: BatchShape, generator: torch.Generator) -> _Problem:
        tables = list(dict.fromkeys(slot.table for slot in layout.slots))
        cap = max(8, _SCRATCH_NUMBERS // layout.dim // len(tables))
        sizes = {slot.table: min(slot.num_rows, cap) for slot in layout.slots}
        first_rows = {}
        total = 0
        for table in tables:
            first_rows[table] = total
            total += sizes[table]
        slots = tuple(
            dataclasses.replace(slot, first_row=first_rows[slot.table], num_rows=sizes[slot.table])
            for slot in layout.slots
        )
        scratch = dataclasses.replace(layout, slots=slots)
        if rule.kind.is_dense:  # its tables are summed and copied; SGD costs about as much
            rule = UpdateRule(kind=PLAIN_RULE)
        shapes = state_shapes(rule.kind, num_rows=total, dim=layout.dim)
        return _Problem(
            layout=scratch,
            lookups=synthetic_lookups(scratch, shape=shape, generator=generator),
            weight=torch.zeros(total, layout.dim),
            state={name: torch.zeros(size) for name, size in shapes.items()},
            grad=torch.randn(shape.batch_size, layout.width, generator=generator),
            step=Step(rule=rule, learning_rate=1e-3),
        )

    def on(self, device: torch.device) -> _Problem:
        """The same problem on a device."""
        if device.type == "cpu":
            return self
        moved = {name: getattr(self.lookups, name).to(device) for name in ("single", "values", "offsets")}
        return dataclasses.replace(
            self,
            lookups=dataclasses.replace(self.lookups, **moved),
            weight=self.weight.to(device),
            state={name: each.to(device) for name, each in self.state.items()},
            grad=self.grad.to(device),
        )

    def run(self, kernel: LookupKernel) -> None:
        out = self.weight.new_empty(self.lookups.batch_size, self.layout.width)
        kernel.lookup(self.weight, layout=self.layout, lookups=self.lookups, out=out)
        part = GradientPart(layout=self.layout, lookups=self.lookups, grad=self.grad)
        kernel.update(self.weight, state=self.state, parts=[part], step=self.step)


def synthetic_lookups(layout: LookupLayout, *, shape: BatchShape, generator: torch.Generator) -> Lookups:
    """Rows drawn from a Zipf law of exponent 1, the small rows most often, as fitted vocabularies have them."""

    def draw(count: int, num_rows: int) -> Tensor:
        # n^u with a uniform u has a density of 1 / row: Zipf's law.
        return (num_rows ** torch.rand(count, generator=generator)).long().clamp_(max=num_rows - 1)

    size = shape.batch_size
    single = torch.zeros(layout.num_single, size, dtype=torch.int64)
    for slot in layout.single:
        single[slot.index] = draw(size, slot.num_rows)
    by_index = {slot.index: slot for slot in layout.jagged}
    lengths = []
    values = []
    for index in range(layout.num_jagged):
        # Uniform from nothing to twice the mean.
        longest = 2 * shape.list_length if index in by_index else 0.0
        lengths.append((torch.rand(size, generator=generator) * longest).round().long())
        if index in by_index:
            values.append(draw(int(lengths[-1].sum()), by_index[index].num_rows))
    zero = torch.zeros(1, dtype=torch.int64)
    return Lookups(
        batch_size=size,
        single=single,
        values=torch.cat(values) if values else zero[:0],
        offsets=torch.cat([zero, torch.cat(lengths).cumsum(0)]) if lengths else zero,
    )


def _fingerprint(setting: KernelSetting, shape: BatchShape) -> str:
    """Everything that the answer depends on: machine, versions, threads, shape."""
    fbgemm = ""
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        try:
            fbgemm += f"{name} {importlib.metadata.version(name)} "
        except importlib.metadata.PackageNotFoundError:
            continue
    lines = [_device_fingerprint(setting.device), fbgemm, str(torch.get_num_threads()), str(setting.rule), str(shape)]
    for layout in setting.layouts:
        lines.append(f"{layout.dim} {layout.width} {layout.packed.tolist()}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]


def _device_fingerprint(device: torch.device) -> str:
    """Describe what times on a device depend on: for the CPU also the kernel that was compiled for it."""
    if device.type == "cpu":
        return library_fingerprint()
    return f"{machine_line(device)} {source_hash(LOOKUP_KERNELS)} {source_hash(UPDATE_KERNELS)}"
