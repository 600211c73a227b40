"""The error of formats: as in a table that independent code measured, and never below Theorem 1 of the paper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.numerics.qsnr import Spread, decibels, lower_bound, measure_qsnr, noise_ratios

# dB of 10,000 vectors of 1,024 numbers, by independent code: σ of one, one a vector, one a number.
TABLE = {
    "bf16": (55.6, 55.6, 55.6),
    "mx9": (46.5, 46.6, 45.0),
    "msfp16": (42.8, 43.0, 40.8),
    "mxint8": (41.7, 42.0, 39.2),
    "int8": (42.1, 42.1, 36.8),
    "fp8_e4m3_tensor": (31.5, 31.5, 31.5),
    "fp8_e4m3_row": (31.6, 31.6, 31.7),
    "fp8_e4m3_128": (31.8, 31.8, 32.3),
    "mxfp8_e4m3": (30.7, 30.5, 29.8),
    "mxfp6_e2m3": (30.9, 31.0, 29.9),
    "mxfp6_e3m2": (25.4, 25.3, 25.2),
    "mx6": (28.3, 28.4, 26.9),
    "mxfp8_e5m2": (25.4, 25.3, 25.2),
    "fp8_e5m2_tensor": (25.6, 25.6, 25.6),
    "mxfp4": (18.8, 18.7, 17.6),
    "mx4": (15.7, 15.8, 14.8),
}
BOUNDED = ("mx9", "mx6", "mx4", "msfp16", "msfp12", "mxint8")


def check_table(num_vectors: int) -> None:
    """Compare all rows with what is measured now."""
    formats = [BlockFormat.named(name) for name in TABLE]
    for column, spread in enumerate(Spread):
        found = measure_qsnr(formats, spread=spread, num_vectors=num_vectors)
        off = {
            str(format): (round(value, 2), TABLE[str(format)][column])
            for format, value in zip(formats, found, strict=True)
            if abs(value - TABLE[str(format)][column]) > 0.2
        }
        assert not off, spread


def test_the_table_on_fewer_vectors() -> None:
    check_table(1_500)


@pytest.mark.slow
def test_the_table() -> None:
    check_table(10_000)


def test_distances_between_formats() -> None:
    mx9, e4m3, msfp16 = measure_qsnr([BlockFormat.named(each) for each in ("mx9", "fp8_e4m3_tensor", "msfp16")])
    assert mx9 - e4m3 >= 15.0
    assert mx9 - msfp16 >= 3.5


def adversarial_blocks(format: BlockFormat, count: int, generator: torch.Generator) -> Tensor:
    """Return blocks that lose as much as they can: one large number, and others half-way between two codes."""
    k1 = format.k1
    assert isinstance(k1, int)
    step = 2.0 ** (1 - (format.element.bits - 1))
    lower = step * 2.0**-format.max_second
    x = (torch.randint(0, 2, (count, k1), generator=generator) + 0.4999) * lower
    x[:, 1 : format.k2] = 0.4999 * step
    x[:, 0] = torch.where(torch.rand(count, generator=generator) < 0.5, 1.0, 1.9999)
    x[:, 0] -= torch.rand(count, generator=generator) * step * (x[:, 0] > 1.5)
    dropped = torch.rand(x.shape, generator=generator) < torch.rand(count, 1, generator=generator)
    dropped[:, 0] = False
    return torch.where(dropped, 0.0, x) * torch.exp2(torch.randint(-100, 100, (count, 1), generator=generator))


def check_bound(count: int) -> None:
    """Compare random and adversarial blocks with Theorem 1."""
    generator = torch.Generator().manual_seed(7)
    for name in BOUNDED:
        format = BlockFormat.named(name)
        bound = lower_bound(format, 10**6)
        least = []
        for _ in range(max(1, count // 50_000)):
            rows = min(count, 50_000) // 2
            random = torch.randn(rows, format.k1, generator=generator)
            random *= torch.exp(3 * torch.randn(rows, format.k1, generator=generator))
            for x in (random, adversarial_blocks(format, rows, generator)):
                least.append(decibels(float(noise_ratios(x, quantise(x, format, 1)).max())))
        assert min(least) >= bound, name
        assert min(least) < bound + 6, f"{name}: these blocks do not come near the bound"


def test_no_block_falls_below_the_bound_of_the_paper() -> None:
    check_bound(20_000)


def test_the_bound_ends_where_scales_end() -> None:
    generator = torch.Generator().manual_seed(3)
    # With magnitudes from one up to two, so that the binade of each block is known.
    x = 1 + torch.rand(1_000, 16, generator=generator)
    for name in ("mx9", "mx6", "mx4"):
        format = BlockFormat.named(name)
        bound = lower_bound(format, 16)
        for exponent, is_bounded in ((-126, True), (-127, True), (-140, False)):
            # In FP64, because the product of a subnormal power of two is rounded in FP32.
            rows = (x.double() * 2.0**exponent).float()
            found = decibels(float(noise_ratios(rows, quantise(rows, format, 1)).max()))
            assert (found >= bound) is is_bounded, (name, exponent)


@pytest.mark.slow
def test_none_of_a_million_blocks_falls_below_the_bound() -> None:
    check_bound(1_000_000)


def test_the_bound_of_the_papers_formats() -> None:
    found = [lower_bound(BlockFormat.named(name), 1024) for name in ("mx9", "mx6", "mx4")]
    assert found == pytest.approx([34.7, 16.7, 4.6], abs=0.06)
    with pytest.raises(ConfigError, match="binade of their largest"):
        lower_bound(BlockFormat.named("mxfp4"), 32)
