"""Columns of a wide matrix to and from narrow ones: the kernel does what the reference does."""

from __future__ import annotations

import pytest
import torch

from ziggurat.ops.columns import ColumnMoves, Columns, join_reference, split_reference

COLUMNS = (Columns(1, 0, 0, 3), Columns(0, 2, 3, 1), Columns(0, 0, 4, 2), Columns(2, 0, 6, 0), Columns(1, 3, 6, 5))
WIDTHS, WIDE = (3, 8, 0), 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_join_and_split_are_those_of_the_reference(dtype: torch.dtype, rows: int) -> None:
    parts = [torch.randn(rows, width).to(dtype) for width in WIDTHS]
    expected, wide = torch.zeros(rows, WIDE, dtype=dtype), torch.zeros(rows, WIDE, dtype=dtype)
    join_reference(COLUMNS, wide=expected, parts=parts)
    ColumnMoves(COLUMNS).join(parts, out=wide)
    assert torch.equal(wide, expected)
    assert torch.equal(wide[:, 4:6], parts[0][:, :2])
    back, expected_back = ([torch.zeros_like(part) for part in parts] for _ in range(2))
    ColumnMoves(COLUMNS).split(wide, out=back)
    split_reference(COLUMNS, wide=wide, parts=expected_back)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(back, expected_back, strict=True))
    assert torch.equal(back[1], parts[1])


def test_matrices_that_the_kernel_does_not_serve_take_the_reference() -> None:
    parts = [torch.randn(width, 4).t() for width in WIDTHS]  # columns lie together
    wide = torch.zeros(4, WIDE)
    ColumnMoves(COLUMNS).join(parts, out=wide)
    assert torch.equal(wide[:, 6:], parts[1][:, 3:])
