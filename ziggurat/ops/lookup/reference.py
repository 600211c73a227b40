"""The reference kernel: torch operations alone, on any device. It defines what the faster kernels compute.

Forward. All single fields are one `index_select` in the concatenated storage; all lists are one `embedding_bag`.

Backward. The lookups of a step are written as pairs (row, source), where source is the vector of the output gradient
that belongs to the lookup. A *stable* sort by row brings equal rows together without changing their order, so that
each segment is summed in the order of the batch:

    row     7 3 7 3 9          sorted   3 3 | 7 7 | 9
    source  0 1 2 3 4                   1 3 | 0 2 | 4        g_3 = G[1] + G[3]   g_7 = G[0] + G[2]   g_9 = G[4]

Summing segments of gathered vectors is again an embedding bag (the gradient is the table, the sources are the rows),
the fastest segment sum that torch has on a CPU. Cost: O(N log N) for N lookups, in practice a radix sort; memory
O(N + U·D). Nothing depends on the number of rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.lookup.gradient import prepare_gradient
from ziggurat.ops.lookup.kernel import (
    GradientPart,
    KernelChoice,
    KernelSetting,
    Step,
    SummedGradient,
)
from ziggurat.ops.lookup.layout import LookupLayout, Lookups, check_rows, list_of_values, mean_scale, padding_mask
from ziggurat.ops.lookup.sorted_reads import PlannedRead, Read, SortedReads, sorted_before
from ziggurat.ops.table_optimizers import TouchedRows


class TorchKernel:
    """Lookup and exact update in plain torch."""

    choice = KernelChoice.TORCH

    def why_not(self, setting: KernelSetting) -> str:
        """Never a reason: the reference serves everything."""
        del setting
        return ""

    def lookup(
        self, weight: Float[Tensor, "R D"], *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """See `LookupKernel.lookup`."""
        check_rows(layout, lookups)
        size = lookups.batch_size
        dim = layout.dim
        if size == 0 or not layout.slots:
            return
        if layout.single and not layout.jagged and layout.is_dense_block and out.dtype == weight.dtype:
            rows = single_rows(layout, lookups).t().reshape(-1)
            # The commonest case, gathered straight into the output: no block in between, no copy.
            torch.index_select(weight, 0, rows, out=out.view(-1, dim))
            return

        def added(rows: Tensor, offsets: Tensor) -> Tensor:
            return F.embedding_bag(rows, weight, offsets, mode="sum", include_last_offset=True)

        pool_fields(layout, lookups, out=out, take=lambda rows: weight.index_select(0, rows), add=added)

    def prepare(
        self, grad: Float[Tensor, "B T"], *, layouts: Sequence[LookupLayout], lookups: Lookups, dtype: torch.dtype
    ) -> Float[Tensor, "B T"]:
        """See `LookupKernel.prepare`."""
        return prepare_gradient(grad, layouts=layouts, lookups=lookups, dtype=dtype)

    def sum_gradients(self, parts: Sequence[GradientPart]) -> SummedGradient:
        """See `LookupKernel.sum_gradients`."""
        rows, sources = _sorted(parts)
        unique_rows, counts = torch.unique_consecutive(rows, return_counts=True)
        # Segments of sources, gathered and summed, are an embedding bag over the gradient.
        starts = counts.cumsum(0) - counts
        sums = F.embedding_bag(sources, _vectors(parts), starts, mode="sum")
        for part in parts:
            # Padding is in the sums, where lists read it, and must not move: it stays zeros.
            keep = ~padding_mask(part.layout, unique_rows)
            if not bool(keep.all()):
                unique_rows = unique_rows[keep]
                sums = sums[keep]
        return SummedGradient(rows=unique_rows, sums=sums)

    def apply(
        self, weight: Float[Tensor, "R D"], *, state: dict[str, Tensor], gradient: SummedGradient, step: Step
    ) -> None:
        """See `LookupKernel.apply`."""
        if step.applies is not None:
            _apply_if(weight, state=state, gradient=gradient, step=step, applies=step.applies)
            return
        rows = gradient.rows
        kind = step.rule.kind
        change = kind.checked_change(_touched(weight, state=state, gradient=gradient, step=step))
        for key, numbers in change.state.items():
            state[key].index_copy_(0, rows, numbers)
        # Rows are distinct, so each gets one addition: no order to fix.
        weight.index_add_(0, rows, change.direction, alpha=1.0 if change.factor is None else float(change.factor))

    def update(
        self, weight: Float[Tensor, "R D"], *, state: dict[str, Tensor], parts: Sequence[GradientPart], step: Step
    ) -> None:
        """See `LookupKernel.update`."""
        # Both mean a host that does not wait for the device, and so cannot know how many rows are distinct.
        is_late = step.applies is not None or parts[0].lookups.are_checked
        summed = sums_of_fixed_size(parts) if is_late else self.sum_gradients(parts)
        self.apply(weight, state=state, gradient=summed, step=step)

    def sorted_reads(self, reads: Sequence[PlannedRead]) -> SortedReads | None:
        """See `SortsAhead.sorted_reads`."""
        made = _sorted(reads)
        return SortedReads(by=self.choice, reads=tuple(reads), made=made, tensors=made) if len(made[0]) else None


def pool_fields(
    layout: LookupLayout,
    lookups: Lookups,
    *,
    out: Float[Tensor, "B T"],
    take: Callable[[Tensor], Tensor],
    add: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Write the fields of a layout into their columns.

    Args:
        layout: fields of one storage.
        lookups: of one sample at least, right ones.
        out: columns of all layouts.
        take: the vectors (N, D) of rows (N,) of the storage.
        add: the sums (L, D) of lists of rows (N,) that begin and end at offsets (L + 1,).
    """
    size = lookups.batch_size
    dim = layout.dim
    blocks = []
    if layout.single:
        blocks.append(take(single_rows(layout, lookups).t().reshape(-1)).view(size, -1, dim))
    if layout.jagged:
        rows, lengths_JB = jagged_rows(layout, lookups)
        bags = add(rows, F.pad(lengths_JB.reshape(-1).cumsum(0), (1, 0))).view(-1, size, dim)
        # Checked lookups bring the lists of other layouts along (`jagged_rows`).
        if len(bags) > len(layout.jagged):
            bags = bags[layout.numbers_on(bags.device).jagged]
        blocks.append(bags.transpose(0, 1))
    pooled_BFD = torch.cat(blocks, dim=1)
    # After the sum, as `FieldKind.MEAN` says.
    if layout.has_mean:
        pooled_BFD = pooled_BFD * mean_scale(layout, lookups, dtype=pooled_BFD.dtype).unsqueeze(-1)
    if layout.is_dense_block:
        out.view(size, -1, dim).copy_(pooled_BFD)
        return
    for position, slot in enumerate(layout.slots):
        out[:, slot.column : slot.column + dim] = pooled_BFD[:, position]


def sums_of_fixed_size(parts: Sequence[GradientPart]) -> SummedGradient:
    """`sum_gradients` with as many rows as lookups, of which the host need not know how many are distinct.

    Segment k of the sorted rows begins at the first place whose segment is k, or beyond the last place where there are
    fewer segments: such a bag is empty, its sum zero, and its row is made row 0 of the storage, which is padding.
    """
    rows, sources = _sorted(parts)
    vectors = _vectors(parts)
    if not len(rows):
        return SummedGradient(rows=rows, sums=vectors.new_zeros(0, vectors.shape[1]))
    # The first row always begins a segment.
    is_new = torch.ones_like(rows, dtype=torch.bool)
    torch.ne(rows[1:], rows[:-1], out=is_new[1:])
    segments = is_new.cumsum(0)
    places = torch.arange(len(rows), device=rows.device)
    # Segments are counted from 1, as `cumsum` gives them.
    starts = torch.searchsorted(segments, places + 1)
    sums = F.embedding_bag(sources, vectors, starts, mode="sum")
    is_padding = starts == len(rows)
    distinct = rows[starts.clamp(max=len(rows) - 1)]
    for part in parts:
        is_padding |= padding_mask(part.layout, distinct)
    return SummedGradient(
        rows=distinct.masked_fill(is_padding, 0), sums=sums.masked_fill_(is_padding.unsqueeze(1), 0.0)
    )


def _apply_if(
    weight: Tensor, *, state: dict[str, Tensor], gradient: SummedGradient, step: Step, applies: Tensor
) -> None:
    """Apply a rule where a device decides whether it applies; rows may repeat a padding row."""
    rows = gradient.rows
    touched = _touched(weight, state=state, gradient=gradient, step=step)
    change = step.rule.kind.checked_change(touched)
    # Read before anything is written: a row that stands here twice is padding, and both copies write the same.
    before = touched.weight()
    moved = change.direction if change.factor is None else change.direction * change.factor
    weight.index_copy_(0, rows, torch.where(applies, before + moved, before))
    for key, numbers in change.state.items():
        state[key].index_copy_(0, rows, torch.where(applies, numbers, touched.state[key]))


def _touched(weight: Tensor, *, state: dict[str, Tensor], gradient: SummedGradient, step: Step) -> TouchedRows:
    """Return the rows of a summed gradient as rules see them."""
    rows = gradient.rows
    rule = step.rule
    grad = gradient.sums
    # A scale that is a tensor of the device is multiplied by unseen; 1.0 changes no bit.
    if isinstance(step.scale, Tensor) or step.scale != 1.0:
        grad = grad * step.scale
    if rule.weight_decay and rule.kind.decays_gradient:
        # Of the touched rows alone: rows that are not in the batch do not decay.
        grad = grad + rule.weight_decay * weight[rows]
    known = {key: state[key][rows] for key in rule.kind.state_keys}
    return TouchedRows(grad=grad, state=known, step=step, weight=lambda: weight[rows])


def single_rows(layout: LookupLayout, lookups: Lookups) -> Int64[Tensor, "S B"]:
    """Storage rows of the single fields of a layout."""
    numbers = layout.numbers_on(lookups.single.device)
    indices = [slot.index for slot in layout.single]
    if indices == list(range(len(lookups.single))):
        return lookups.single + numbers.single_first_rows
    return lookups.single[numbers.single] + numbers.single_first_rows


def jagged_rows(layout: LookupLayout, lookups: Lookups) -> tuple[Int64[Tensor, "N"], Int64[Tensor, "J B"]]:
    """Storage rows of the lists of a layout, feature-major, and the lists' lengths.

    With `are_checked` lookups the lists of other layouts stay where they are, as rows of padding: how many rows they
    have is not known to a host that does not wait.
    """
    device = lookups.values.device
    lengths_JB = lookups.offsets.diff().view(-1, lookups.batch_size)
    if lookups.are_checked:
        first_rows = layout.lists_on(device, num_lists=len(lengths_JB))[0]
        shift = first_rows[list_of_values(lookups, step=lookups.batch_size)]
        # Lists of other layouts become padding of a table of this one.
        return torch.where(shift >= 0, lookups.values + shift, layout.jagged[0].first_row), lengths_JB
    first_rows = torch.full((len(lengths_JB),), -1, dtype=torch.int64)
    for slot in layout.jagged:
        first_rows[slot.index] = slot.first_row
    shift = torch.repeat_interleave(first_rows.to(device), lengths_JB.sum(dim=1))
    if len(layout.jagged) == len(lengths_JB):
        return lookups.values + shift, lengths_JB
    # How many rows these are is asked of the device, which unchecked lookups may do.
    mine = shift >= 0
    return lookups.values[mine] + shift[mine], lengths_JB[[slot.index for slot in layout.jagged]]


def rows_of(layout: LookupLayout, lookups: Lookups) -> Int64[Tensor, "N"]:
    """Every row of the storage that a lookup reads, any number of times each."""
    single = single_rows(layout, lookups).reshape(-1) if layout.single else lookups.values.new_empty(0)
    return torch.cat([single, jagged_rows(layout, lookups)[0]]) if layout.jagged else single


def _sorted(parts: Sequence[Read]) -> tuple[Int64[Tensor, "N"], Int64[Tensor, "N"]]:
    """Every lookup of some parts, sorted by row: the row, and the index of its gradient vector among those of all."""
    ahead = sorted_before(parts, by=TorchKernel.choice)
    if ahead is not None:
        return ahead.made
    flattened = []
    first_source = 0
    for part in parts:
        rows, sources = _flatten(part)
        # Zero is not added: it would copy the commonest case, one part.
        flattened.append((rows, sources + first_source if first_source else sources))
        # One vector a field and sample, in the order of `_vectors`.
        first_source += part.lookups.batch_size * len(part.layout.slots)
    # Stable, so that equal rows keep the order of the batch and their sums the same bits.
    rows, order = torch.sort(_cat([rows for rows, _ in flattened]), stable=True)
    return rows, _cat([sources for _, sources in flattened])[order]


def _flatten(part: Read) -> tuple[Int64[Tensor, "N"], Int64[Tensor, "N"]]:
    """Every lookup of a part as (storage row, index of its gradient vector)."""
    layout = part.layout
    lookups = part.lookups
    device = part.lookups.single.device
    size = lookups.batch_size
    num_fields = len(layout.slots)
    # Vectors are sample after sample, field after field: that of (b, f) is b · F + f.
    samples = torch.arange(size, device=device) * num_fields
    rows = []
    sources = []
    num_single = len(layout.single)
    if num_single:
        fields = torch.arange(num_single, device=device).unsqueeze(1)
        rows.append(single_rows(layout, lookups).reshape(-1))
        sources.append((samples + fields).reshape(-1))
    if layout.jagged and size:
        values, lengths_JB = jagged_rows(layout, lookups)
        fields = torch.arange(num_single, num_fields, device=device).unsqueeze(1)
        rows.append(values)
        if lookups.are_checked:  # with the lists of other layouts, whose rows are padding here
            fields = layout.lists_on(device, num_lists=len(lengths_JB))[1].unsqueeze(1)
            sources.append((samples + fields).reshape(-1)[list_of_values(lookups)])
        else:
            sources.append(torch.repeat_interleave((samples + fields).reshape(-1), lengths_JB.reshape(-1)))
    nothing = samples.new_empty(0)
    return _cat(rows or [nothing]), _cat(sources or [nothing])


def _vectors(parts: Sequence[GradientPart]) -> Float[Tensor, "V D"]:
    """The gradient vectors of some parts, one after the other."""
    return _cat([_vectors_of(part) for part in parts])


def _vectors_of(part: GradientPart) -> Float[Tensor, "B*F D"]:
    layout = part.layout
    if layout.is_dense_block:
        vectors = part.grad.view(-1, layout.dim)
    else:
        # Columns of this layout lie apart where others write into the same output.
        vectors = torch.cat([part.grad[:, slot.column : slot.column + layout.dim] for slot in layout.slots], dim=1)
        vectors = vectors.view(-1, layout.dim)
    if vectors.dtype == torch.bfloat16:  # of a kernel that reads it as it comes: sums are FP32
        vectors = vectors.float()
    return vectors


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
