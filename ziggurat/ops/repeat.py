"""Rows for slices become rows for samples, as late as possible; gradients of samples are summed for slices.

    forward    out[b] = values[inverse[b]]                       a copy: the same bits as without slices
    backward   g[u]   = Σ_{b: inverse[b] = u} dL/dout[b]         in the order of the samples, in float32

Torch's own backward of indexing adds in an order that depends on the device (atomics), or row by row. Here samples are
sorted by slice once and one bag of rows is summed for each slice: the same bits on every repeat, at the speed of a
pooled lookup. Summing in this order differs from summing over samples and lists at once by float32 rounding alone
(relative error below B · 2⁻²⁴ of Σ|g|).

Lists of vectors expand in the same way (`expand_lists`): all samples of a slice have lists of its length, so positions
in the slice's list correspond one to one, and no positions have to be sorted.

Cost: forward one copy of the output; backward one read of its gradient, and sorting B numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from ziggurat.ops.function_ctx import Ctx


def expand(values_UD: Float[Tensor, "U D"], inverse_B: Int64[Tensor, "B"]) -> Float[Tensor, "B D"]:
    """`values_UD[inverse_B]`, with a deterministic gradient."""
    return _Expand.apply(values_UD, inverse_B, None)


def expand_lists(
    values_ND: Float[Tensor, "N D"],
    offsets_U1: Int64[Tensor, "U+1"],
    inverse_B: Int64[Tensor, "B"],
    *,
    num_rows: int | None = None,
) -> tuple[Float[Tensor, "M D"], Int64[Tensor, "B+1"]]:
    """The lists of samples from those of slices, with a deterministic gradient; vectors and offsets.

    Args:
        values_ND: of slices.
        offsets_U1: where the lists of slices begin.
        inverse_B: the slice of each sample.
        num_rows: M, where the host knows it; else it waits for a GPU to say.
    """
    at_M, offsets_B1 = _positions(offsets_U1, inverse_B, num_rows=num_rows)
    return _Expand.apply(values_ND, at_M, (offsets_U1, inverse_B, offsets_B1)), offsets_B1


@dataclass(frozen=True)
class ListCopies:
    """Events of samples' lists, as copies of the events of slices' lists: both ways, as often as needed.

    What is computed of a slice's event is spread to its copies, and so is what is computed of a sample; places are
    found once. Without `inverse` every list is a sample's own, and spreading does nothing.

    Args:
        samples: (P,) the sample of each event.
        offsets: (B + 1,) where the lists of samples begin.
        events: (P,) the slice's event of each event; None where lists are not shared.
        bags: events in the order of the slices' events, and where the copies of each begin; None as well.
    """

    samples: Int64[Tensor, "P"]
    offsets: Int64[Tensor, "B+1"]
    events: Int64[Tensor, "P"] | None = None
    bags: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(
        offsets_U1: Int64[Tensor, "U+1"],
        inverse_B: Int64[Tensor, "B"] | None,
        *,
        num_events: int,
        num_rows: int | None = None,
    ) -> ListCopies:
        """The copies that samples have of the lists of slices.

        Args:
            offsets_U1: where the lists of slices begin.
            inverse_B: the slice of each sample; None for one list a sample.
            num_events: of all lists of slices together.
            num_rows: of all lists of samples together, where the host knows it; else it waits for a GPU to say.
        """
        lengths_U = offsets_U1.diff()
        if inverse_B is None:
            samples_B = torch.arange(lengths_U.shape[0], device=lengths_U.device)
            return ListCopies(samples_B.repeat_interleave(lengths_U, output_size=num_events), offsets_U1)
        events_P, offsets_B1 = _positions(offsets_U1, inverse_B, num_rows=num_rows)
        samples_B = torch.arange(len(inverse_B), device=inverse_B.device)
        samples_P = samples_B.repeat_interleave(offsets_B1.diff(), output_size=len(events_P))
        sizes = num_events, len(events_P)
        return ListCopies(samples_P, offsets_B1, events_P, _by_position((offsets_U1, inverse_B, offsets_B1), *sizes))

    def of_events(self, values_ND: Float[Tensor, "N D"]) -> Float[Tensor, "P D"]:
        """Copy the values of a slice's events to each of their copies; the gradient is summed in the copies' order."""
        return values_ND if self.events is None else _Gather.apply(values_ND, self.events, self.bags)

    def of_samples(self, values_BD: Float[Tensor, "B D"]) -> Float[Tensor, "P D"]:
        """Copy the values of each sample to each of its events."""
        if self.events is None:
            return values_BD[self.samples]
        positions_P = torch.arange(len(self.samples), device=self.samples.device)
        return _Gather.apply(values_BD, self.samples, (positions_P, self.offsets[:-1]))


def sum_slices(
    grad_BD: Float[Tensor, "B D"], inverse_B: Int64[Tensor, "B"], *, num_slices: int
) -> Float[Tensor, "U D"]:
    """Sums of the rows of each slice, in the order of the rows; zeros for a slice that has none."""
    order_B, offsets_U = _by_slice(inverse_B, num_slices)
    return _sum_bags(grad_BD, order_B, offsets_U)


def _positions(offsets_U1: Tensor, inverse_B: Tensor, *, num_rows: int | None) -> tuple[Tensor, Tensor]:
    """Return for each position of the samples' lists the position of the slices' lists that it copies; and offsets."""
    lengths_B = offsets_U1.diff()[inverse_B]
    offsets_B1 = lengths_B.new_zeros(len(lengths_B) + 1)
    # Behind a zero: offsets begin with it.
    torch.cumsum(lengths_B, 0, out=offsets_B1[1:])
    num_rows = int(offsets_B1[-1]) if num_rows is None else num_rows
    at_M = torch.arange(num_rows, device=offsets_B1.device)
    # From the place in the sample's list to that in its slice's.
    at_M += (offsets_U1[inverse_B] - offsets_B1[:-1]).repeat_interleave(lengths_B, output_size=len(at_M))
    return at_M, offsets_B1


def _by_slice(inverse_B: Tensor, num_slices: int) -> tuple[Tensor, Tensor]:
    """Samples sorted by slice, and where each slice begins."""
    # Stable, so that each slice sums its samples in their order.
    sorted_B, order_B = torch.sort(inverse_B, stable=True)
    return order_B, torch.searchsorted(sorted_B, torch.arange(num_slices, device=inverse_B.device))


def _sum_bags(rows: Tensor, order: Tensor, offsets: Tensor) -> Tensor:
    if not len(order) or not len(offsets) or not rows.shape[1]:
        return rows.new_zeros(len(offsets), rows.shape[1])
    # In FP32 whatever the rows are: a slice may have many samples.
    summed = F.embedding_bag(order, rows.float().contiguous(), offsets, mode="sum")
    return summed.to(rows.dtype)


def _by_position(lists: tuple[Tensor, Tensor, Tensor], num_events: int, num_copies: int) -> tuple[Tensor, Tensor]:
    """Return for each position of the slices' lists the positions of its copies in the samples' lists, and offsets."""
    offsets_U1, inverse_B, offsets_B1 = lists
    device = offsets_U1.device
    num_slices = len(offsets_U1) - 1
    order_B, first_U = _by_slice(inverse_B, num_slices)
    slices_N = torch.arange(num_slices, device=device).repeat_interleave(offsets_U1.diff(), output_size=num_events)
    # Samples of each event's slice.
    copies_N = F.pad(first_U, (0, 1), value=len(order_B)).diff()[slices_N]
    offsets_N = copies_N.cumsum(0) - copies_N
    positions_M = torch.arange(num_events, device=device).repeat_interleave(copies_N, output_size=num_copies)
    # Which of the copies of its event each is, from 0.
    copy_M = torch.arange(num_copies, device=device) - offsets_N[positions_M]
    slice_M = slices_N[positions_M]
    samples_M = order_B[first_U[slice_M] + copy_M]
    # Where the sample's list begins, and how far into the list the event stands.
    return offsets_B1[samples_M] + positions_M - offsets_U1[slice_M], offsets_N


class _ExpandCtx(Ctx, Protocol):
    saved: tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None, int]


class _Expand(torch.autograd.Function):
    """Rows by index; the gradient is a sum over bags."""

    @staticmethod
    def forward(ctx: _ExpandCtx, values: Tensor, index: Tensor, lists: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        # No saved tensors: these are integers, which have no gradient and no versions to guard.
        ctx.saved = (index, lists, len(values))
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: _ExpandCtx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        index, lists, num_rows = ctx.saved
        # Sorted here and not in the forward pass: evaluations never need it.
        bags = _by_slice(index, num_rows) if lists is None else _by_position(lists, num_rows, len(index))
        return _sum_bags(grad, *bags), None, None


class _GatherCtx(Ctx, Protocol):
    bags: tuple[Tensor, Tensor]


class _Gather(torch.autograd.Function):
    """Rows by index, where the bags that the gradient is summed by are known."""

    @staticmethod
    def forward(ctx: _GatherCtx, values: Tensor, index: Tensor, bags: tuple[Tensor, Tensor]) -> Tensor:
        ctx.bags = bags
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx: _GatherCtx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _sum_bags(grad, *ctx.bags), None, None
