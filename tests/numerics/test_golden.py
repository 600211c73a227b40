"""Numbers that other libraries rounded (golden/README.md), to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.numerics.tensors import same_bits
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.numerics.packing import pack, unpack

CASTS = np.load(Path(__file__).parent / "golden" / "casts.npz", allow_pickle=False)
NAMES = [name for name in CASTS.files if name != "x"]


@pytest.mark.parametrize("name", NAMES)
def test_casts_of_other_libraries(name: str) -> None:
    x = torch.from_numpy(CASTS["x"])
    expected = torch.from_numpy(CASTS[name])
    format = BlockFormat.named(name)
    found = quantise(x, format, 1)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())  # they make 0 of -0 where an integer is multiplied
    assert same_bits(unpack(pack(x, format, 1)), found)


def test_all_of_the_two_families_are_there() -> None:
    assert len(NAMES) == 3 + 5 * 4
