"""Masks of bits: the kernel does what the reference does, and the layout is the one that is written down."""

from __future__ import annotations

import pytest
import torch

from ziggurat.ops import bitmask
from ziggurat.ops.bitmask import (
    count,
    count_reference,
    full_mask,
    mask_of_rows,
    num_words,
    pack_mask,
    pack_mask_reference,
    rows_of_mask,
    rows_of_mask_reference,
    unpack_mask,
    unpack_mask_reference,
)
from ziggurat.ops.cpp_build import CppLibrary

SIZES = (0, 1, 63, 64, 65, 1000)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)])
def test_the_kernel_does_what_the_reference_does(n: int, leading: tuple[int, ...]) -> None:
    flags = torch.rand(*leading, n) < 0.3
    words = pack_mask(flags)
    assert words.shape == (*leading, num_words(n))
    assert torch.equal(words, pack_mask_reference(flags))
    assert torch.equal(unpack_mask(words, n), flags)
    assert torch.equal(unpack_mask_reference(words, n), flags)
    assert torch.equal(count(words), flags.sum(-1))
    assert torch.equal(count_reference(words), flags.sum(-1))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_rows_are_the_numbers_of_the_set_bits(n: int, share: float) -> None:
    flags = torch.rand(n) < share
    words, rows = pack_mask(flags), flags.nonzero().view(-1)
    assert torch.equal(rows_of_mask(words), rows)
    assert torch.equal(rows_of_mask_reference(words), rows)
    assert torch.equal(rows_of_mask(words, limit=3), rows[:3])
    assert torch.equal(rows_of_mask_reference(words, limit=3), rows[:3])
    assert torch.equal(mask_of_rows(torch.cat([rows, rows]), n=n), words)


def test_the_first_item_is_the_least_significant_bit_of_the_first_word() -> None:
    words = mask_of_rows(torch.tensor([0, 3, 63, 64]), n=70)
    assert words.tolist() == [(1 << 0 | 1 << 3) - (1 << 63), 1]
    assert full_mask(70).tolist() == [-1, (1 << 6) - 1]
    assert full_mask(64).tolist() == [-1]
    assert len(full_mask(0)) == 0


def test_the_kernel_says_whether_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bitmask.bitmask_kernel() == "C++ on the CPU"
    monkeypatch.setattr(bitmask, "_LIBRARY", CppLibrary.missing("no compiler"))
    assert "no compiler" in bitmask.bitmask_kernel()
    flags = torch.rand(2, 100) < 0.5
    assert torch.equal(unpack_mask(pack_mask(flags), 100), flags)


def test_masks_that_are_not_contiguous_are_read_right() -> None:
    flags = (torch.rand(130, 4) < 0.5).t()
    words = pack_mask(flags).t().contiguous().t()
    assert torch.equal(unpack_mask(words, 130), flags)
    assert torch.equal(count(words), flags.sum(-1))
    assert torch.equal(rows_of_mask(words[1]), flags[1].nonzero().view(-1))
