"""The lookups of a step, sorted by row, without the host waiting for anything.

    lookup n         0  1  2  3  4  5           sorted   1  3 | 0  2  5 | 4
    row r_n          7  3  7  3  9  7           row      3  3 | 7  7  7 | 9
    source s_n       where in the gradients     starts   0      2        5  6        count 3, on the device

The sort is stable, so a run of equal rows keeps the order of the batch. Padding and rows outside their tables get a
number behind all rows, and belong to no run. A run of more than `LONG_RUN` lookups is cut into chunks of `CHUNK`,
counted from its own begin: the bits of its sum depend on its own gradients, not on what else is in the batch.

How many runs and chunks there are stays on the device. Arrays are as long as they could have to be: N lookups have N
runs at most, and N / CHUNK + N / LONG_RUN chunks.

Cost: a radix sort of 32-bit rows (64-bit ones beyond 2^31 rows) with their positions, two prefix sums, and about 40
bytes a lookup beside: at D = 128 a tenth of what the gradients and weights are. It needs ids alone, no gradients, so
it is made a step early where the batch is known (`sorted_reads.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from ziggurat.ops.kernel_choice import kernels_of, power_of_two
from ziggurat.ops.lookup.layout import LookupLayout, Lookups
from ziggurat.ops.lookup.sorted_reads import Read
from ziggurat.ops.lookup.triton.device_layout import DeviceLayout
from ziggurat.ops.machine.launches import tile_rows

UPDATE_KERNELS = "ziggurat.ops.lookup.triton.update_kernels"
LONG_RUN = 256  # lookups of a run that one program sums by itself
CHUNK = 256  # lookups of a piece of a longer one
_LANE_NUMBERS = 2048  # FP32 numbers that a program holds while it sums a chunk; like CHUNK it is the order of a sum
_BLOCK = 512  # lookups that a program sorts out
_MOST_32 = 2**31 - 1


@dataclass(frozen=True)
class Runs:
    """Lookups sorted by row.

    Args:
        rows: of the storage; those of no run are behind.
        sources: where the gradient of each begins, in units of `align` numbers.
        starts: of each run, and the end of the last.
        count: runs.
        chunk_ends: how many chunks there are up to each run; None if no run can be long.
        align: what all sources are multiples of.
        firsts: where the gradients of each part that was sorted begin among those of all.
    """

    rows: Shaped[Tensor, "N"]
    sources: Shaped[Tensor, "N"]
    starts: Int32[Tensor, "N+1"]
    count: Int32[Tensor, "1"]
    chunk_ends: Int32[Tensor, "N"] | None
    align: int
    firsts: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        made = (self.rows, self.sources, self.starts, self.count)
        return made if self.chunk_ends is None else (*made, self.chunk_ends)

    @property
    def num_lookups(self) -> int:
        """N."""
        return len(self.rows)

    @property
    def most_chunks(self) -> int:
        """The largest possible number of chunks."""
        return self.num_lookups // CHUNK + self.num_lookups // LONG_RUN + 1


def sort_runs(
    parts: Sequence[Read], layouts: Sequence[DeviceLayout], *, firsts: Sequence[int], flag: Int32[Tensor, "1"]
) -> Runs:
    """Sort the lookups of some parts, one after the other.

    Args:
        parts: that read one storage, with or without their gradients (B, T).
        layouts: of each part.
        firsts: where the gradients of each part begin among those of all.
        flag: becomes 1 if a row is outside its table.
    """
    device = flag.device
    total = sum(_num_lookups(part.layout, part.lookups) for part in parts)
    last = max((slot.first_row + slot.num_rows for part in parts for slot in part.layout.slots), default=0)
    none = _MOST_32 if last < _MOST_32 else 2**63 - 1
    align = min(each.align for each in layouts)
    sizes = [part.lookups.batch_size * part.layout.width for part in parts]
    numbers = max(first + size for first, size in zip(firsts, sizes, strict=True))
    rows = torch.empty(total, dtype=torch.int32 if none == _MOST_32 else torch.int64, device=device)
    wide = numbers // align > _MOST_32
    sources = torch.empty(total, dtype=torch.int64 if wide else torch.int32, device=device)
    begin = 0
    for part, layout, first in zip(parts, layouts, firsts, strict=True):
        size = _num_lookups(part.layout, part.lookups)
        arrays = rows[begin : begin + size], sources[begin : begin + size], flag
        _flatten(part, layout, arrays, numbers=(first, none, align))
        begin += size
    rows, order = torch.sort(rows, stable=True)
    return _cut(rows, order, sources, none=none, align=align, firsts=firsts)


def chunk_sums(runs: Runs, vectors: Float[Tensor, "M"], *, dim: int) -> Float[Tensor, "chunks D"] | None:
    """The sums of long runs, each in the place of its first chunk; None if no run can be long."""
    if runs.chunk_ends is None:
        return None
    kernels = kernels_of(UPDATE_KERNELS)
    num = runs.num_lookups
    partials = torch.empty(runs.most_chunks, dim, device=vectors.device)
    sizes: dict[str, Any] = {
        "dim": dim,
        "padded_dim": power_of_two(dim, least=1),
        "tile": chunk_lanes(dim),
        "steps": num.bit_length(),
    }
    grid = (runs.most_chunks,)
    kernels.partials_kernel[grid](
        vectors, runs.sources, runs.starts, runs.chunk_ends, partials, num, align=runs.align, chunk=CHUNK, **sizes
    )
    kernels.combine_kernel[grid](runs.chunk_ends, partials, num, **sizes)
    return partials


def chunk_lanes(dim: int) -> int:
    """Members of a chunk that are read at a time; lane t sums members t, t + lanes, …"""
    return min(32, tile_rows(dim, numbers=_LANE_NUMBERS))


def _num_lookups(layout: LookupLayout, lookups: Lookups) -> int:
    """Lookups of a part, those of other storages' lists among them: how many are its own, the device alone knows."""
    listed = lookups.values.numel() if layout.jagged and lookups.batch_size else 0
    return len(layout.single) * lookups.batch_size + listed


def _flatten(
    part: Read,
    layout: DeviceLayout,
    arrays: tuple[Tensor, Tensor, Tensor],
    *,
    numbers: tuple[int, int, int],
) -> None:
    """Write row and source of each lookup of a part."""
    kernels = kernels_of(UPDATE_KERNELS)
    lookups = part.lookups
    size = part.lookups.batch_size
    rows, sources, flag = arrays
    first, none, align = numbers
    width = part.layout.width
    num_single = len(part.layout.single)
    if num_single and size:
        kernels.flatten_single_kernel[(-(-size // _BLOCK), num_single)](
            layout.slots, lookups.single, rows, sources, flag, size, width, first, none, align=align, samples=_BLOCK
        )
    num_values = lookups.values.numel()
    num_offsets = lookups.offsets.numel()
    if part.layout.jagged and size and num_values:
        begin = num_single * size
        kernels.flatten_lists_kernel[(-(-num_values // _BLOCK),)](
            layout.slots,
            layout.slot_of_list,
            lookups.values,
            lookups.offsets,
            rows[begin:],
            sources[begin:],
            flag,
            size,
            num_offsets,
            num_values,
            width,
            first,
            none,
            len(layout.slot_of_list),
            steps=num_offsets.bit_length(),
            align=align,
            block=_BLOCK,
        )


def _cut(rows: Tensor, order: Tensor, sources: Tensor, *, none: int, align: int, firsts: Sequence[int]) -> Runs:
    """Find the runs of sorted rows, and the chunks of the long ones."""
    kernels = kernels_of(UPDATE_KERNELS)
    num = len(rows)
    begins = rows != none
    begins[1:] &= rows[1:] != rows[:-1]
    runs = begins.cumsum(0, dtype=torch.int32)
    starts = torch.empty(num + 1, dtype=torch.int32, device=rows.device)
    in_order = torch.empty_like(sources)
    grid = (-(-num // _BLOCK),)
    kernels.starts_kernel[grid](rows, order, sources, runs, starts, in_order, num, none, block=_BLOCK)
    chunk_ends = None
    if num > LONG_RUN:
        chunks = torch.empty(num, dtype=torch.int32, device=rows.device)
        kernels.chunks_kernel[grid](starts, runs[-1:], chunks, num, long_run=LONG_RUN, chunk=CHUNK, block=_BLOCK)
        chunk_ends = chunks.cumsum(0, dtype=torch.int32)
    return Runs(rows, in_order, starts, runs[-1:], chunk_ends, align, tuple(firsts))
