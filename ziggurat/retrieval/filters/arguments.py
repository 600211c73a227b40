"""What callers give to a filter index, checked before C++ follows it: orders, positions, spans of words."""

from __future__ import annotations

import torch
from torch import Tensor

from ziggurat.errors import BoundsError, ConfigError


def check_order(order: Tensor, *, n: int) -> None:
    """Refuse what is no order of n items."""
    is_order = order.shape == (n,) and order.dtype == torch.int64
    if is_order and torch.equal(order.sort().values.cpu(), torch.arange(n)):
        return
    raise ConfigError(
        expected=f"an order of {n:,} items: int64, each number from 0 to {n - 1:,} once",
        found=f"{order.dtype} of shape {tuple(order.shape)}" + (" with other numbers" if is_order else ""),
        where="FilterIndex.build, argument 'order'",
        ways_out=("give the `order` of the vector index", "give None if positions are lines of the table"),
    )


def check_positions(positions: Tensor, *, n: int, query: int | None = None) -> None:
    """Refuse numbers that are no positions; of exclusions, -1 is passed over."""
    lowest = 0 if query is None else -1
    is_list = positions.dim() == 1 and not positions.dtype.is_floating_point and positions.dtype != torch.bool
    least, most = (int(positions.min()), int(positions.max())) if is_list else (0, 0)
    if not is_list or least < lowest or most >= n:
        shown = f"{least if least < lowest else most:,}" if is_list else f"shape {tuple(positions.shape)}"
        raise BoundsError(
            expected=f"positions from 0 to {n - 1:,}, in one row",
            found=f"{shown} ({positions.dtype})",
            where="a filter index" if query is None else f"exclude, query {query}",
            ways_out="give positions, not ids or numbers of the catalogue",
        )


def check_spans(spans: Tensor | None, *, words: int) -> None:
    """Refuse spans that do not lie within a mask."""
    if spans is None or spans.numel() == 0:
        return
    is_table = spans.dim() == 2 and spans.shape[1] == 2 and spans.dtype == torch.int64 and spans.device.type == "cpu"
    if not is_table or int(spans.min()) < 0 or int(spans.max()) > words:
        raise BoundsError(
            expected=f"spans of words: first and last + 1, from 0 to {words:,}, int64 of shape (S, 2)",
            found=f"{spans.dtype} of shape {tuple(spans.shape)}" + (" with other numbers" if is_table else ""),
            where="FilterIndex.masks, argument 'spans'",
            ways_out="divide positions by 64",
        )
