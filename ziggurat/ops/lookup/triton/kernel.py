"""The Triton kernel: embedding tables on CUDA devices, behind the interface that all kernels share.

    lookup    one launch for all fields of a storage; a row outside its table sets a flag on the device
    update    lookups sorted by row (`runs.py`), runs summed in FP32 and applied, a tile of runs a program: each row
              of weights and state is read once and written once, and nothing of the size of a table is touched

**Deterministic**: no atomic additions. A run of at most 32 lookups is summed in the order of the batch; a longer one
in chunks of 256 whose sums are added in order. Sums across the threads of a program follow a tree that is written
down, so neither the width of reads nor a launch decides their order. The bits of a row's update depend on its own
gradients alone: they are the same on every repeat, with other tables beside it, and on the rank where a plan puts its
table.

Nothing in an update waits for the device: counts of rows stay there, and learning rate, scale, step number and whether
the step applies at all may be tensors there (`Step`). A lookup of rows that nobody checked before waits for its flag.

Gradients in BF16 are read as they come (`prepare`). Rows may be FP32, or the upper halves that BF16 storages keep
(int16); those are rounded by the noise of `ops/row_formats/noise.py`, to the bits of its reference. Lookups read rows
in INT8 and INT4 as well, to the numbers of `ops/row_formats/codes.py`; such a row begins at a multiple of 4 bytes.

Bytes of an update at D columns, for N lookups of U rows: N·D gradients, 2·U·D weights, N·~40 of sorting.
Small tables need no kernel of their own: a table of 3 rows is 3 long runs, in N / 256 programs. (Products with a matrix
of counts would save the sort of 4-byte rows and write partial sums of rows × D for each block: more bytes from D = 32.)

`docs/guides/gpus.md` has what an H200 measured of it, `docs/guides/gpu-tables.md` what is to be measured. Triton's
interpreter holds it to the reference, and compilation for sm_90 shows neither spills nor narrow loads
(`make test-triton`).

Sources: sorted runs and partial segments: Zhu et al. (FBGEMM's table-batched embeddings), arXiv 2101.05615, and
torch's EmbeddingBackwardKernel; Triton: Tillet, Kung and Cox, MAPL 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int32, Shaped
from torch import Tensor

from ziggurat.errors import DataError, MissingDependencyError
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, kernels_or_reason, power_of_two
from ziggurat.ops.lookup.gradient import are_finite_sums, largest_summand, prepare_gradient
from ziggurat.ops.lookup.kernel import (
    GradientPart,
    KernelChoice,
    KernelSetting,
    LookupKernel,
    Step,
    SummedGradient,
)
from ziggurat.ops.lookup.layout import LookupLayout, Lookups, check_rows
from ziggurat.ops.lookup.reference import sums_of_fixed_size
from ziggurat.ops.lookup.sorted_reads import PlannedRead, Read, SortedReads, sorted_before
from ziggurat.ops.lookup.triton.apply import RuleTarget, SumTarget, apply_runs, apply_sums
from ziggurat.ops.lookup.triton.device_layout import DeviceLayout, Kept, origins_of
from ziggurat.ops.lookup.triton.runs import UPDATE_KERNELS, Runs, sort_runs
from ziggurat.ops.machine.launches import Launch, LaunchPart, launches_on, tile_rows
from ziggurat.ops.row_formats import PLAIN
from ziggurat.ops.row_formats.noise import RowNoise
from ziggurat.ops.row_formats.row_format import NUMBERS, RowFormat

LOOKUP_KERNELS = "ziggurat.ops.lookup.triton.lookup_kernels"
_MAX_FIELDS = 65_535  # of a grid of CUDA
BOUNDED = Launch(numbers=4096, warps=4)  # of the check of gradients: 8 reads of 16 bytes of a thread are on their way


class TritonKernel:
    """Lookup and exact update by Triton.

    Args:
        launches: of its kernels; those of the device's family unless given (`ops/machine/launches.py`).

    Raises:
        MissingDependencyError: the package triton is not there.
    """

    choice = KernelChoice.TRITON

    def __init__(self, *, launches: Mapping[LaunchPart, Launch] | None = None) -> None:
        reason = kernels_or_reason(UPDATE_KERNELS)[1]
        if reason:
            raise MissingDependencyError(
                expected="the package triton",
                found=reason,
                where="EmbeddingConfig.kernel",
                ways_out=('choose kernel = "auto" or "torch"', "ACCELERATOR=cuda make setup installs it"),
            )
        self._kept = Kept()
        self._launches = launches

    def why_not(self, setting: KernelSetting) -> str:
        """See `LookupKernel.why_not`."""
        if setting.device.type != "cuda" and not is_interpreted():
            return f"the tables are on {setting.device.type!r}, and it runs on CUDA devices"
        if setting.device.type == "cuda" and not torch.cuda.is_available():
            return "no CUDA device"
        if setting.dtype != torch.float32:
            return f"the tables are {setting.dtype}, and it works in float32"
        most = max((len(layout.slots) for layout in setting.layouts), default=0)
        if most > _MAX_FIELDS:
            return f"a storage has {most} fields, and a launch has {_MAX_FIELDS}"
        kind = setting.rule.kind
        return "" if kind.triton_rule or kind.is_dense else f"it does not know the rule of {kind}"

    def lookup(
        self,
        weight: Shaped[Tensor, "R D"],
        *,
        layout: LookupLayout,
        lookups: Lookups,
        out: Float[Tensor, "B T"],
        row_format: RowFormat = PLAIN,
    ) -> None:
        """See `LookupKernel.lookup`; the weights may be upper halves in int16, or (R, W) codes and their ends."""
        size = lookups.batch_size
        dim = layout.dim
        if size == 0 or not layout.slots:
            return
        _check_shapes(layout, lookups)
        placed = self._placed(layout, weight.device)
        # A kernel cannot raise: it sets this, and the host asks once it is done.
        flag = _no_flag(weight.device)
        launch = self._launch(LaunchPart.LOOKUP, weight.device)
        tile = tile_rows(dim, numbers=launch.numbers)
        kernels_of(LOOKUP_KERNELS).lookup_kernel[(-(-size // tile), len(layout.slots))](
            weight,
            placed.slots,
            lookups.single,
            lookups.values,
            lookups.offsets,
            out,
            flag,
            size,
            lookups.offsets.numel(),
            lookups.values.numel(),
            # Where there is room behind the rows of lists, the device alone knows how many there are.
            lookups.values.numel() if lookups.filled is None else 0,
            layout.width,
            dim=dim,
            padded_dim=power_of_two(dim, least=2),
            align=placed.align,
            samples=tile,
            has_lists=bool(layout.jagged),
            unroll=launch.reads_ahead,
            num_warps=launch.warps,
            row_format=row_format.triton_layout,
            row_bytes=row_format.row_bytes(dim),
            # Codes are decoded as the reference does it: product and sum rounded one by one.
            enable_fp_fusion=row_format.triton_layout == NUMBERS,
        )
        _refuse_flagged(flag, [(layout, lookups)])

    def prepare(
        self, grad: Float[Tensor, "B T"], *, layouts: Sequence[LookupLayout], lookups: Lookups, dtype: torch.dtype
    ) -> Float[Tensor, "B T"]:
        """See `LookupKernel.prepare`; BF16 stays BF16 where nothing has to be divided."""
        if dtype != torch.float32:
            return prepare_gradient(grad, layouts=layouts, lookups=lookups, dtype=dtype)
        means = [layout for layout in layouts if layout.has_mean]
        if not means or not lookups.batch_size:
            # Half of the bytes, and the sums are FP32 all the same.
            return (grad if grad.dtype == torch.bfloat16 else grad.to(dtype)).contiguous()
        # A copy, even of FP32: the means are divided in place, and the gradient is autograd's.
        prepared = grad.to(dtype, memory_format=torch.contiguous_format, copy=True)
        for layout in means:
            placed = self._placed(layout, grad.device)
            launch = self._launch(LaunchPart.LOOKUP, grad.device)
            tile = tile_rows(layout.dim, numbers=launch.numbers)
            kernels_of(LOOKUP_KERNELS).divide_means_kernel[(-(-lookups.batch_size // tile), len(layout.slots))](
                placed.slots,
                lookups.offsets,
                prepared,
                lookups.batch_size,
                layout.width,
                dim=layout.dim,
                padded_dim=power_of_two(layout.dim, least=1),
                align=placed.align,
                samples=tile,
                num_warps=launch.warps,
            )
        return prepared

    def are_finite_sums(self, parts: Sequence[GradientPart]) -> Bool[Tensor, ""]:
        """`gradient.are_finite_sums` in one pass over each gradient: the same verdict."""
        # Programs only ever write false, so it does not matter which comes first.
        verdict = torch.ones((), dtype=torch.bool, device=parts[0].grad.device)
        for part in parts:
            layout = part.layout
            lookups = part.lookups
            if not lookups.batch_size or not layout.slots:
                continue
            _check_shapes(layout, lookups)
            placed = self._placed(layout, part.grad.device)
            tile = tile_rows(layout.dim, numbers=BOUNDED.numbers)
            kernels_of(UPDATE_KERNELS).bounded_kernel[(-(-lookups.batch_size // tile), len(layout.slots))](
                placed.slots,
                lookups.single,
                lookups.offsets,
                part.grad,
                verdict,
                lookups.batch_size,
                layout.width,
                largest_summand(part, parts),
                dim=layout.dim,
                padded_dim=power_of_two(layout.dim, least=1),
                align=placed.align,
                samples=tile,
                has_lists=bool(layout.jagged),
                num_warps=BOUNDED.warps,
            )
        return verdict

    def sum_gradients(self, parts: Sequence[GradientPart]) -> SummedGradient:
        """See `LookupKernel.sum_gradients`; waits for the device to know how many rows there are."""
        flag = _no_flag(parts[0].grad.device)
        runs, summed = self._summed(parts, flag)
        if not runs:
            return summed
        _refuse_flagged(flag, [(part.layout, part.lookups) for part in parts])
        # The one wait of this function.
        count = int(runs.count)
        return SummedGradient(rows=summed.rows[:count], sums=summed.sums[:count])

    def sums_of_fixed_size(self, parts: Sequence[GradientPart]) -> SummedGradient:
        """`sum_gradients` without waiting: as many rows as lookups, those behind the distinct ones row 0 with zeros."""
        return self._summed(parts, _no_flag(parts[0].grad.device))[1]

    def apply(
        self,
        weight: Shaped[Tensor, "R D"],
        *,
        state: dict[str, Tensor],
        gradient: SummedGradient,
        step: Step,
        noise: RowNoise | None = None,
    ) -> None:
        """See `LookupKernel.apply`; weights that are upper halves are rounded by `noise`, or to the nearest."""
        if len(gradient.rows):
            target = self._target(weight, state, step, noise)
            launch = self._launch(LaunchPart.UPDATE, weight.device)
            apply_sums(target, gradient.sums.contiguous(), rows=gradient.rows, launch=launch)

    def update(
        self,
        weight: Shaped[Tensor, "R D"],
        *,
        state: dict[str, Tensor],
        parts: Sequence[GradientPart],
        step: Step,
        noise: RowNoise | None = None,
    ) -> None:
        """See `LookupKernel.update`; weights that are upper halves are rounded by `noise`, or to the nearest.

        Rows outside their tables are left out: the lookup that comes before an update refuses them.
        """
        runs, vectors = self._runs(parts, _no_flag(weight.device))
        if runs:
            launch = self._launch(LaunchPart.UPDATE, weight.device)
            target = self._target(weight, state, step, noise)
            apply_runs(target, vectors, runs=runs, dim=weight.shape[1], launch=launch)

    def _summed(self, parts: Sequence[GradientPart], flag: Int32[Tensor, "1"]) -> tuple[Runs | None, SummedGradient]:
        runs, vectors = self._runs(parts, flag)
        num = runs.num_lookups if runs else 0
        dim = parts[0].layout.dim
        # Distinct rows are at most as many as lookups; how many there are the host does not know yet.
        rows = torch.empty(num, dtype=torch.int64, device=flag.device)
        sums = torch.empty(num, dim, device=flag.device)
        if runs:
            launch = self._launch(LaunchPart.UPDATE, flag.device)
            apply_runs(SumTarget(sums=sums, rows=rows), vectors, runs=runs, dim=dim, launch=launch)
        return runs, SummedGradient(rows=rows, sums=sums)

    def sorted_reads(self, reads: Sequence[PlannedRead]) -> SortedReads | None:
        """See `SortsAhead.sorted_reads`."""
        used = [read for read in reads if _is_used(read)]
        first = 0
        firsts = []
        for read in used:
            firsts.append(first)
            # Where each gradient would begin if all lay one after the other, as `_runs` puts them.
            first += read.lookups.batch_size * read.layout.width
        if not used:
            return None
        made = self._sorted(used, firsts=firsts, flag=_no_flag(used[0].lookups.single.device))
        return SortedReads(by=self.choice, reads=tuple(reads), made=made, tensors=made.tensors)

    def _runs(self, parts: Sequence[GradientPart], flag: Int32[Tensor, "1"]) -> tuple[Runs | None, Tensor]:
        """The sorted lookups of some parts, and the gradients of all of them, flat; no runs where nothing was read."""
        used = [part for part in parts if _is_used(part)]
        if not used:
            return None, parts[0].grad
        # Layouts of one output share its gradient: it is there once, and all their sources point into it.
        distinct = {part.grad.data_ptr(): part.grad for part in used}
        places = {}
        first = 0
        for pointer, grad in distinct.items():
            places[pointer] = first
            first += grad.numel()
        flat = [grad.reshape(-1) for grad in distinct.values()]
        vectors = flat[0] if len(flat) == 1 else torch.cat(flat)
        firsts = [places[part.grad.data_ptr()] for part in used]
        ahead = sorted_before(parts, by=self.choice)
        # Sorting ahead supposed a gradient of its own for each part; shared ones lie elsewhere.
        if ahead is not None and ahead.made.firsts == tuple(firsts):
            return ahead.made, vectors
        return self._sorted(used, firsts=firsts, flag=flag), vectors

    def _sorted(self, used: Sequence[Read], *, firsts: Sequence[int], flag: Int32[Tensor, "1"]) -> Runs:
        for read in used:
            _check_shapes(read.layout, read.lookups)
        placed = [self._placed(read.layout, flag.device) for read in used]
        return sort_runs(used, placed, firsts=firsts, flag=flag)

    def _launch(self, part: LaunchPart, device: torch.device) -> Launch:
        return (launches_on(device) if self._launches is None else self._launches)[part]

    def _placed(self, layout: LookupLayout, device: torch.device) -> DeviceLayout:
        return self._kept.get(layout, device, DeviceLayout.of)

    def _target(self, weight: Tensor, state: dict[str, Tensor], step: Step, noise: RowNoise | None) -> RuleTarget:
        origins = None if noise is None else self._kept.get(noise, weight.device, origins_of)
        return RuleTarget(weight=weight, state=state, step=step, origins=origins)


def finite_without_waiting(kernel: LookupKernel, parts: Sequence[GradientPart]) -> Bool[Tensor, ""]:
    """`are_finite_sums` by Triton where it is the kernel, else by torch."""
    return kernel.are_finite_sums(parts) if isinstance(kernel, TritonKernel) else are_finite_sums(parts)


def sums_without_waiting(kernel: LookupKernel, parts: Sequence[GradientPart]) -> SummedGradient:
    """`sums_of_fixed_size` by Triton where it is the kernel, else by the reference."""
    return kernel.sums_of_fixed_size(parts) if isinstance(kernel, TritonKernel) else sums_of_fixed_size(parts)


def _is_used(read: Read) -> bool:
    """Return whether anything is read at all."""
    layout = read.layout
    lookups = read.lookups
    return bool(lookups.batch_size and (layout.single or (layout.jagged and lookups.values.numel())))


def _no_flag(device: torch.device) -> Int32[Tensor, "1"]:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _refuse_flagged(flag: Int32[Tensor, "1"], lookups: Sequence[tuple[LookupLayout, Lookups]]) -> None:
    """Wait for the flag of a kernel, and raise what the reference says of rows that it refused."""
    # In this order: where rows were checked before, nobody waits for the flag.
    if all(each.are_checked for _, each in lookups) or not int(flag):
        return
    for layout, each in lookups:
        check_rows(layout, each)
    raise AssertionError("the kernel refused rows that the reference accepts")


def _check_shapes(layout: LookupLayout, lookups: Lookups) -> None:
    """Raise if tensors are smaller than the kernels read."""
    size = lookups.batch_size
    single = lookups.single
    values = lookups.values
    offsets = lookups.offsets
    dtypes = {single.dtype, values.dtype}
    if (
        single.shape[0] < layout.num_single
        or single.shape[1] != size
        or offsets.numel() <= layout.num_jagged * size
        or len(dtypes) != 1
        or not {*dtypes, offsets.dtype} <= {torch.int32, torch.int64}
    ):
        raise DataError(
            expected=f"int32 or int64 rows of shape ({layout.num_single}, {size}) and values of the same type, "
            f"{layout.num_jagged * size + 1} offsets",
            found=f"{single.dtype} rows of shape {tuple(single.shape)}, {values.dtype} values, {offsets.numel()} "
            f"offsets",
            where="batch.single, batch.jagged",
            ways_out="check batches made by hand with ziggurat.features.batch.validate_batch",
        )
