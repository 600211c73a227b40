"""The lookups of a step, sorted by row, without the host waiting for anything.

    lookup n         0  1  2  3  4  5           sorted   1  3 | 0  2  5 | 4
    row r_n          7  3  7  3  9  7           row      3  3 | 7  7  7 | 9
    source s_n       where in the gradients     starts   0      2        5  6        count 3, on the device

The sort is stable, so a run of equal rows keeps the order of the batch. Padding and rows outside their tables get a
number behind all rows, and belong to no run. A run of more than `LONG_RUN` lookups is cut into chunks of `CHUNK`,
counted from its own begin: the bits of its sum depend on its own gradients, not on what else is in the batch.

How many runs and chunks there are stays on the device. Arrays are as long as they could have to be: N lookups have N
runs at most, and N / CHUNK + N / LONG_RUN chunks.

Sorted rows are read twice: to count the runs and chunks that begin in each block, and, once the counts of all blocks
are summed up, to write them. Whether a run is long is seen at its first lookup: the one LONG_RUN further has its row.

Cost: a radix sort of 32-bit rows (64-bit ones beyond 2^31 rows) with their positions, and about 30 bytes a lookup
beside. It needs ids alone, no gradients, so it is made a step early where the batch is known (`sorted_reads.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from ziggurat.ops.kernel_choice import kernels_of, power_of_two
from ziggurat.ops.lookup.layout import LookupLayout, Lookups
from ziggurat.ops.lookup.sorted_reads import Read
from ziggurat.ops.lookup.triton.device_layout import DeviceLayout
from ziggurat.ops.machine.launches import tile_rows

UPDATE_KERNELS = "ziggurat.ops.lookup.triton.update_kernels"
LONG_RUN = 32  # lookups of a run that one program sums by itself, one after the other, while those beside it wait
CHUNK = 256  # lookups of a piece of a longer one
_LANE_NUMBERS = 2048  # FP32 numbers that a program holds while it sums a chunk; like CHUNK it is the order of a sum
_BLOCK = 512  # lookups that a program sorts out
_MAX_PROGRAMS = 4096  # that sum chunks: they fill any GPU, and most steps have fewer chunks than there could be
_MAX_32 = 2**31 - 1


@dataclass(frozen=True)
class Chunks:
    """The chunks of long runs.

    Args:
        first: of each long run; what stands at short runs means nothing.
        pieces: of each chunk its first lookup and where it ends; in the first of a run how many the run has, else 0.
        count: chunks.
        long_run: lookups of the longest run that has none.
    """

    first: Int32[Tensor, "N"]
    pieces: Int32[Tensor, "chunks 3"]
    count: Int32[Tensor, "1"]
    long_run: int


@dataclass(frozen=True)
class Runs:
    """Lookups sorted by row.

    Args:
        rows: of each run, in the storage.
        sources: where the gradient of each lookup begins, in units of `align` numbers.
        starts: of each run, and the end of the last.
        count: runs.
        chunks: of long runs; None if no run can be long.
        align: what all sources are multiples of.
        firsts: where the gradients of each part that was sorted begin among those of all.
    """

    rows: Shaped[Tensor, "N"]
    sources: Shaped[Tensor, "N"]
    starts: Int32[Tensor, "N+1"]
    count: Int32[Tensor, "1"]
    chunks: Chunks | None
    align: int
    firsts: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        made = (self.rows, self.sources, self.starts, self.count)
        return made if self.chunks is None else (*made, self.chunks.first, self.chunks.pieces, self.chunks.count)

    @property
    def num_lookups(self) -> int:
        """N."""
        return len(self.sources)


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
    # Behind all rows: sorting brings what belongs to no run to the end. A radix sort of 32 bits is half the work.
    none = _MAX_32 if last < _MAX_32 else 2**63 - 1
    # All alignments are powers of two, so the smallest divides every source.
    align = min(each.align for each in layouts)
    sizes = [part.lookups.batch_size * part.layout.width for part in parts]
    numbers = max(first + size for first, size in zip(firsts, sizes, strict=True))
    rows = torch.empty(total, dtype=torch.int32 if none == _MAX_32 else torch.int64, device=device)
    wide = numbers // align > _MAX_32
    dtype = torch.int64 if wide else torch.int32
    # Then a lookup's number says where its gradient is, and no array of sources is written, sorted and read.
    alone = len(parts) == 1 and not parts[0].layout.jagged and total <= _MAX_32
    sources = None if alone else torch.empty(total, dtype=dtype, device=device)
    begin = 0
    for part, layout, first in zip(parts, layouts, firsts, strict=True):
        size = _num_lookups(part.layout, part.lookups)
        own = None if sources is None else sources[begin : begin + size]
        _flatten(part, layout, (rows[begin : begin + size], own, flag), numbers=(first, none, align))
        begin += size
    # Stable: a run is summed in the order of the batch.
    rows, order = torch.sort(rows, stable=True)
    places = _Places(
        sources=sources,
        sorted_sources=torch.empty(total, dtype=dtype, device=device),
        slots=layouts[0].slots,
        batch_size=parts[0].lookups.batch_size,
        width=parts[0].layout.width,
        first=firsts[0],
        align=align,
    )
    return _cut(rows, order, places, none=none, firsts=firsts)


def chunk_sums(runs: Runs, vectors: Float[Tensor, "M"], *, dim: int) -> Float[Tensor, "chunks D"] | None:
    """The sums of long runs, each in the place of its first chunk; None if no run can be long."""
    chunks = runs.chunks
    if chunks is None:
        return None
    kernels = kernels_of(UPDATE_KERNELS)
    # As many as there could be; the kernels fill those that there are.
    partials = torch.empty(len(chunks.pieces), dim, device=vectors.device)
    sizes: dict[str, int] = {"dim": dim, "padded_dim": power_of_two(dim, least=1), "tile": chunk_lanes(dim)}
    grid = (min(len(chunks.pieces), _MAX_PROGRAMS),)
    kernels.partials_kernel[grid](
        vectors, runs.sources, chunks.pieces, chunks.count, partials, align=runs.align, **sizes
    )
    # After all chunks are summed: launches of one stream run one after the other.
    kernels.combine_kernel[grid](chunks.pieces, chunks.count, partials, **sizes)
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
    arrays: tuple[Tensor, Tensor | None, Tensor],
    *,
    numbers: tuple[int, int, int],
) -> None:
    """Write the row of each lookup of a part, and its source where that is asked for."""
    kernels = kernels_of(UPDATE_KERNELS)
    lookups = part.lookups
    size = part.lookups.batch_size
    rows, sources, flag = arrays
    first, none, align = numbers
    width = part.layout.width
    num_single = len(part.layout.single)
    if num_single and size:
        kernels.flatten_single_kernel[(-(-size // _BLOCK), num_single)](
            layout.slots,
            lookups.single,
            rows,
            # A launch needs a tensor; it is not written.
            rows if sources is None else sources,
            flag,
            size,
            width,
            first,
            none,
            align=align,
            samples=_BLOCK,
            has_sources=sources is not None,
        )
    num_values = lookups.values.numel()
    num_offsets = lookups.offsets.numel()
    if part.layout.jagged and size and num_values:
        assert sources is not None
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


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Say where the gradient of each lookup begins.

    Args:
        sources: of lookups in their first order; None where all are of single fields of one part: then lookup n is of
            field n / batch_size.
        sorted_sources: to be written.
        slots: of the first part.
        batch_size: of the first part.
        width: of its gradient.
        first: where that begins.
        align: what all sources are multiples of.
    """

    sources: Tensor | None
    sorted_sources: Tensor
    slots: Tensor
    batch_size: int
    width: int
    first: int
    align: int


def _cut(rows: Tensor, order: Tensor, places: _Places, *, none: int, firsts: Sequence[int]) -> Runs:
    """Find the runs of sorted rows, and the chunks of the long ones."""
    kernels = kernels_of(UPDATE_KERNELS)
    num = len(rows)
    has_long = num > LONG_RUN
    blocks = -(-num // _BLOCK)
    # No batch of so few lookups can have a long run: its kernels are then compiled without them.
    sizes: dict[str, int] = {"has_long": has_long, "long_run": LONG_RUN, "chunk": CHUNK, "block": _BLOCK}
    # Only places where long runs begin are written, and read.
    lasts = torch.empty(num, dtype=torch.int32, device=rows.device)
    counts = torch.empty(1 + has_long, blocks, dtype=torch.int32, device=rows.device)
    # Three bits of the distance a step: the search reads seven places at a time.
    kernels.count_kernel[(blocks,)](rows, counts, lasts, num, none, steps=-(-num.bit_length() // 3), **sizes)
    # Row 0: runs up to each block; row 1: chunks.
    ends = counts.cumsum(1, dtype=torch.int32)
    starts = torch.empty(num + 1, dtype=torch.int32, device=rows.device)
    rows_of_runs = torch.empty_like(rows)
    chunks = None
    if has_long:
        # A run's last chunk may be short: one more for each long run that there could be.
        most_chunks = num // CHUNK + num // (LONG_RUN + 1) + 1
        chunks = Chunks(
            first=torch.empty(num, dtype=torch.int32, device=rows.device),
            pieces=torch.empty(most_chunks, 3, dtype=torch.int32, device=rows.device),
            # Views of the device's counts: nobody reads them on the host.
            count=ends[1, -1:],
            long_run=LONG_RUN,
        )
    kernels.cut_kernel[(blocks,)](
        rows,
        order,
        order if places.sources is None else places.sources,
        places.slots,
        ends,
        lasts,
        starts,
        rows_of_runs,
        places.sorted_sources,
        # Pointers that are not read.
        starts if chunks is None else chunks.first,
        starts if chunks is None else chunks.pieces,
        num,
        none,
        places.batch_size,
        places.width,
        places.first,
        has_sources=places.sources is not None,
        align=places.align,
        **sizes,
    )
    return Runs(
        rows=rows_of_runs,
        sources=places.sorted_sources,
        starts=starts,
        count=ends[0, -1:],
        chunks=chunks,
        align=places.align,
        firsts=tuple(firsts),
    )
