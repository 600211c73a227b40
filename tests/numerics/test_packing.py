"""The bits of block formats: as many as promised, where they belong, and back to the same numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.numerics.tensors import hard_numbers, same_bits
from ziggurat.numerics import BlockFormat, Scope, quantise
from ziggurat.numerics.packing import Packed, pack, row_bits, unpack, unpack_reference

ALL = pytest.mark.parametrize("format", BlockFormat.listed(), ids=str)


@ALL
@pytest.mark.parametrize("shape", [(6, 64), (5, 37), (3, 1), (2, 3, 129), (40,)])
def test_packed_numbers_are_those_of_quantise(format: BlockFormat, shape: tuple[int, ...]) -> None:
    x = hard_numbers(format, *shape)
    for axis in {0, -1}:
        assert same_bits(unpack(pack(x, format, axis)), quantise(x, format, axis))


@ALL
def test_nan_is_packed(format: BlockFormat) -> None:
    x = torch.randn(4, 90)
    x[1, 17] = torch.nan
    assert same_bits(unpack(pack(x, format, 1)), quantise(x, format, 1))


@pytest.mark.parametrize(
    ("name", "num_bytes"), [("mx9", 1152), ("mx6", 768), ("mx4", 512), ("mxfp8_e4m3", 1056), ("mxfp4", 544)]
)
def test_bytes_of_1024_numbers(name: str, num_bytes: int) -> None:
    packed = pack(torch.randn(3, 1024), BlockFormat.named(name), 1)
    assert packed.rows.shape == (3, num_bytes)
    assert packed.rows.numel() * 8 == 3 * 1024 * BlockFormat.named(name).bits_per_element


@ALL
@pytest.mark.parametrize("n", [1, 31, 64, 200])
def test_rows_take_the_bits_that_are_counted(format: BlockFormat, n: int) -> None:
    x = torch.randn(2, n)
    numbers = 2 * n if format.k1 is Scope.TENSOR else n
    assert pack(x, format, 1).rows.shape[1] == -(-row_bits(format, numbers) // 8)


def test_the_bits_of_a_block_of_mx9() -> None:
    x = torch.zeros(16)
    x[0], x[1], x[3] = 1.0, -0.5, 0.25
    row = pack(x, BlockFormat.named("mx9"), 0).rows[0].tolist()
    assert len(row) == 18
    assert row[0] == 127  # 2^0
    assert row[1] == 0b11111110  # all pairs but the first lie at least one binade lower
    assert row[2:6] == [64, 128 + 32, 0, 32]


def test_the_bits_of_integers_in_twos_complement() -> None:
    x = torch.zeros(32)
    x[0], x[1] = 1.0, -1 / 64
    assert pack(x, BlockFormat.named("mxint8"), 0).rows[0, :3].tolist() == [127, 64, 255]


def test_the_codes_of_fp8_are_those_of_torch() -> None:
    x = torch.randn(1, 300)
    for name, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        assert torch.equal(pack(x, BlockFormat.named(name), 1).rows, x.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_nothing_is_packed_to_nothing(shape: tuple[int, int]) -> None:
    packed = pack(torch.zeros(shape), BlockFormat.named("mx9"), 1)
    assert packed.rows.numel() == 0
    assert unpack(packed).shape == shape


def test_fields_that_cross_bytes() -> None:
    format = dataclasses.replace(BlockFormat.named("mx6"), d1=7, k1=10)
    x = torch.randn(4, 33)
    assert same_bits(unpack(pack(x, format, 1)), quantise(x, format, 1))


@pytest.mark.parametrize("format", [each for each in BlockFormat.listed() if each.has_power_of_two_scales], ids=str)
@pytest.mark.parametrize("n", [16, 40, 83])
def test_any_bytes_are_unpacked_as_by_the_reference(format: BlockFormat, n: int) -> None:
    """Scales at both ends of their range and codes that no number is packed to, in whole blocks and shorter ones."""
    draw = torch.Generator().manual_seed(n)
    rows = torch.randint(0, 256, (500, -(-row_bits(format, n) // 8)), dtype=torch.uint8, generator=draw)
    rows[:9, 0] = torch.tensor([0, 1, 2, 126, 127, 128, 253, 254, 255])
    packed = Packed(rows=rows, format=format, shape=torch.Size((500, n)), axis=1)
    assert same_bits(unpack(packed), unpack_reference(packed))
