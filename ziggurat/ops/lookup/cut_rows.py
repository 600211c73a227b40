"""Row-wise Adagrad of tables of which only some columns are here: the update in two halves.

The rule keeps one number a row, the sum of mean squared gradients over *all* columns
(`ops/table_optimizers/rowwise_adagrad.py`), so whoever holds other columns of the row has to be asked in between:

    summed gradient ──► `cut_rows`: rows of one table, their gradient, Σ g² over the columns here
                          … the other holders' Σ g² …
                        `apply_cut`: a ← a + total / D,  w ← w − η g / (√a + ε)

The second half is written as a plain gradient step with g / (√a + ε), which every kernel has. With `total` equal to its
own Σ g² and D its own columns it is the rule itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.ops.lookup.kernel import (
    GradientPart,
    LookupKernel,
    Step,
    SummedGradient,
    UpdateRule,
)
from ziggurat.ops.table_optimizers import PLAIN_RULE
from ziggurat.ops.to_device import to_device

PLAIN_STEP = Step(rule=UpdateRule(kind=PLAIN_RULE), learning_rate=1.0)


@dataclass(frozen=True)
class CutRows:
    """Distinct rows of one table in this step.

    Args:
        rows: of the table, increasing.
        grad: their gradients, scaled, with weight decay.
        squares: Σ g² over the columns here.
    """

    rows: Int64[Tensor, "U"]
    grad: Float[Tensor, "U D"]
    squares: Float[Tensor, "U"]


def in_order(gradient: SummedGradient) -> SummedGradient:
    """The same with rows increasing; a copy only where they are not."""
    rows = gradient.rows
    if rows.numel() < 2 or bool((rows[1:] > rows[:-1]).all()):
        return gradient
    rows, order = torch.sort(rows)
    return SummedGradient(rows=rows, sums=gradient.sums[order])


def spans_of(gradient: SummedGradient, tables: Sequence[tuple[int, int]]) -> list[slice]:
    """Return the slice of each table's rows in a storage's gradient; a device is read once for all tables.

    Args:
        gradient: of the storage, rows increasing (`in_order`).
        tables: first row of each in the storage, and how many it has.
    """
    edges = torch.tensor([[first, first + num_rows] for first, num_rows in tables], dtype=torch.int64).view(-1, 2)
    # One copy to the host for all tables: each copy waits for the device.
    places = torch.searchsorted(gradient.rows, to_device(edges, gradient.rows.device))
    return [slice(first, last) for first, last in places.tolist()]


def num_lookups(parts: Sequence[GradientPart], table: str) -> int:
    """Count a table's rows that some parts read, equal ones each time; use the host's counts alone if it has them."""
    reads = [(part.lookups, slot) for part in parts for slot in part.layout.slots if slot.table == table]
    return sum(lookups.num_rows(slot) for lookups, slot in reads)


def rows_of_tables(
    gradient: SummedGradient, tables: Sequence[tuple[int, int]], *, most: Sequence[int]
) -> list[SummedGradient]:
    """The rows of each table among those of a storage's gradient, as many as it looked up: no host waits for a count.

    Args:
        gradient: of the storage, as `sums_of_fixed_size` gives it: rows distinct, but for row 0 with zeros.
        tables: first row of each in the storage, and how many it has.
        most: lookups of each.

    Returns:
        Of each table its rows, increasing; behind them the table's padding row, with zeros.
    """
    device = gradient.rows.device
    num = gradient.rows.numel()
    last = max((first + num_rows for first, num_rows in tables), default=0)
    rows, order = torch.sort(gradient.rows.masked_fill(gradient.rows == 0, last))  # what is no row comes last
    found = []
    for (first, num_rows), count in zip(tables, most, strict=True):
        # A count that stays on the device.
        begin = (rows < first).sum()
        # As many places as lookups: the host does not know how many of them are distinct.
        places = (begin + torch.arange(count, device=device)).clamp(max=max(num - 1, 0))
        # Places beyond the table's rows belong to the next table, or to nobody.
        is_mine = (rows[places] < first + num_rows) & (begin + torch.arange(count, device=device) < num)
        sums = torch.where(is_mine.unsqueeze(1), gradient.sums[order[places]], 0.0)
        # The padding row takes what is left over: its zeros change nothing, however often they are added.
        found.append(SummedGradient(rows=torch.where(is_mine, rows[places], first), sums=sums))
    return found


def cut_rows(
    gradient: SummedGradient,
    *,
    first_row: int,
    span: slice,
    scale: float = 1.0,
    decayed: Callable[[Tensor], Tensor] | None = None,
) -> CutRows:
    """The part of a storage's gradient that belongs to one table.

    Args:
        gradient: of the storage, rows increasing (`in_order`).
        first_row: of the table in its storage.
        span: of the table's rows; see `spans_of`.
        scale: of the gradient.
        decayed: what weight decay adds for rows of the storage, λ times their weights; None: nothing.
    """
    rows = gradient.rows[span] - first_row
    grad = gradient.sums[span]
    if scale != 1.0:
        grad = grad * scale
    if decayed is not None:
        grad = grad + decayed(rows + first_row)
    # Σ g² after scale and decay, which the rule sees as one gradient.
    return CutRows(rows, grad, grad.square().sum(dim=1))


def apply_cut(
    kernel: LookupKernel,
    cut: CutRows,
    *,
    weight: Float[Tensor, "R D"],
    accumulator: Float[Tensor, "R"],
    mean_square: Float[Tensor, "U"],
    step: Step,
) -> None:
    """Update the rows of one table, in place.

    Args:
        kernel: of the table.
        cut: rows and gradients.
        weight: of the table; columns that are here.
        accumulator: one number a row.
        mean_square: of the gradient over all columns of the table, here or elsewhere.
        step: learning rate and ε; the scale is in the gradients already.
    """
    # Rows are distinct but for padding, of which all copies write the same.
    accumulated = accumulator[cut.rows] + mean_square
    accumulator.index_copy_(0, cut.rows, accumulated)
    kernel.apply(weight, state={}, gradient=plain_gradient(cut, accumulated=accumulated, step=step), step=PLAIN_STEP)


def plain_gradient(cut: CutRows, *, accumulated: Float[Tensor, "U"], step: Step) -> SummedGradient:
    """η g / (√a + ε) for every row: what a plain gradient step with learning rate 1 (`PLAIN_STEP`) then applies."""
    factor = step.learning_rate / (accumulated.sqrt() + step.rule.eps)
    return SummedGradient(rows=cut.rows, sums=cut.grad * factor.unsqueeze(1))
