"""Rows of few bits: written and read again, right on average, rounded by counted noise that a plain program repeats."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
import torch

from ziggurat.ops.row_formats import RowFormat, RowNoise, RowOrigin

ROUNDED = [RowFormat.BF16, RowFormat.INT8, RowFormat.INT4]
_WORD = 2**32 - 1


def noise_of(num_rows: int, *, seed: int = 3) -> RowNoise:
    return RowNoise([RowOrigin(table="a", first_row=0, num_rows=num_rows)], seed=seed)


@pytest.mark.parametrize("row_format", ROUNDED)
def test_rows_that_were_read_are_written_back_to_the_same_numbers(row_format: RowFormat) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(300)
    for dim in (2, 7, 16, 65):
        for scale in (1e-6, 1e-3, 1.0, 300.0):
            shift = float(torch.randint(-2, 3, (), generator=generator)) * 10 * scale
            values = torch.randn(300, dim, generator=generator) * scale + shift
            for words in (None, noise_of(300).words(rows, step=4)):
                kept = row_format.encode(values, words_N=words)
                assert (tuple(kept.shape), kept.dtype) == ((300, row_format.width(dim)), row_format.dtype)
                assert kept[0].nbytes == row_format.row_bytes(dim)
                read = row_format.decode(kept, dim=dim)
                assert torch.equal(row_format.decode(row_format.encode(read), dim=dim), read)
                assert torch.equal(row_format.decode(kept[3:4], dim=dim), read[3:4]), "one row, at an odd byte"
                has_codes = row_format.keeps_rows_whole
                step = (values.amax(1) - values.amin(1)) / row_format.most if has_codes else torch.zeros(300)
                allowed = step * 1.01 + values.abs().amax(1) * (2**-10 if has_codes else 2**-7) + 2**-23
                assert bool(((read - values).abs().amax(1) <= allowed).all())


def test_split_numbers_keep_every_bit_and_read_as_the_nearest() -> None:
    values = torch.randn(500, 8, generator=torch.Generator().manual_seed(2)) * 2.0 ** torch.arange(-60, 60, 15)
    values[0, :5] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    split = RowFormat.SPLIT_BF16
    upper, lower = split.encode_trained(values, words_N=None)
    joined = split.decode_trained(upper, lower, dim=8)
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))
    assert torch.equal(split.encode(values), upper)
    read = split.decode(upper, dim=8)
    finite = values.isfinite()
    assert bool(((read - values).abs() <= values.abs() * 2**-8)[finite].all())


@pytest.mark.parametrize("row_format", ROUNDED)
def test_rounding_at_random_is_right_on_average(row_format: RowFormat) -> None:
    count = 20_000
    values = torch.randn(16, generator=torch.Generator().manual_seed(5)) * 0.05
    words = noise_of(count).words(torch.arange(count), step=1)
    read = row_format.decode(row_format.encode(values.expand(count, 16), words_N=words), dim=16).double()
    error = read.mean(0) - values
    assert bool((error.abs() <= 4.5 * read.std(0) / math.sqrt(count) + 1e-12).all()), error


@pytest.mark.parametrize("row_format", ROUNDED)
def test_many_tiny_updates_add_up_at_random_and_are_lost_to_the_nearest(row_format: RowFormat) -> None:
    start = torch.linspace(-1.0, 1.0, 16).expand(64, 16)
    rows, noise = torch.arange(64), noise_of(64)
    moved: list[torch.Tensor] = []
    tiny = 5e-5 * torch.ones(64, 16)
    tiny[:, ::2] *= -1.0
    for at_random in (True, False):
        kept = row_format.encode(start)
        for step in range(150):
            words = noise.words(rows, step=step) if at_random else None
            kept = row_format.encode(row_format.decode(kept, dim=16) + tiny, words_N=words)
        moved.append(row_format.decode(kept, dim=16) - row_format.decode(row_format.encode(start), dim=16))
    wanted = 150 * tiny[0]
    assert bool(((moved[0].mean(0) - wanted).abs() < 0.25 * wanted.abs() + 4 * moved[0].std(0) / 8)[1:-1].all())
    assert float(moved[0].mean(0)[1:-1].dot(wanted[1:-1])) > 0.8 * float(wanted[1:-1].dot(wanted[1:-1]))
    assert float(moved[1].abs().max()) < 2e-3, "the nearest value is the old one, every time"


def test_rows_that_are_not_finite_read_as_nan_and_large_ends_are_cut() -> None:
    values = torch.tensor([[0.0, 1.0, math.inf], [math.nan, 0.0, 0.0], [0.0, 0.0, 0.0], [7e4, -1e9, 0.0]])
    for row_format in (RowFormat.INT8, RowFormat.INT4):
        for words in (None, noise_of(4).words(torch.arange(4), step=1)):
            read = row_format.decode(row_format.encode(values, words_N=words), dim=3)
            assert bool(read[:2].isnan().all())
            assert not bool(read[2].any())
            assert read[3, :2].tolist() == [65504.0, -65504.0]
    for words in (None, noise_of(4).words(torch.arange(4), step=1)):
        read = RowFormat.BF16.decode(RowFormat.BF16.encode(values, words_N=words), dim=3)
        assert read[0].tolist() == [0.0, 1.0, math.inf]
        assert bool(read[1, 0].isnan())


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def plain_noise(seed: int, table: str, *, step: int, row: int, column: int) -> int:
    golden = 0x9E3779B97F4A7C15
    key = int.from_bytes(hashlib.sha256(f"rounding/{seed}/{table}".encode()).digest()[:8], "little")
    word = mix64((mix64((key + step * golden) % 2**64) + row * golden) % 2**64) & _WORD
    z = (word + (column + 1) * 0x9E3779B9) & _WORD
    z = (z ^ z >> 16) * 0x7FEB352D & _WORD
    z = (z ^ z >> 15) * 0x846CA68B & _WORD
    return z ^ z >> 16


def test_noise_is_that_of_a_plain_program_wherever_a_row_lies() -> None:
    values = torch.randn(3, 8, generator=torch.Generator().manual_seed(8))
    parts = [  # rows 10 … of table b behind 4 rows of a; a part that begins at column 3
        RowOrigin(table="a", first_row=0, num_rows=4),
        RowOrigin(table="b", first_row=4, num_rows=6, table_row=10),
    ]
    words = RowNoise(parts, seed=9).words(torch.tensor([4, 7, 3]), step=12)
    kept = RowFormat.BF16.encode(values, words_N=words)
    for position, (table, row) in enumerate([("b", 10), ("b", 13), ("a", 3)]):
        for column in range(8):
            (bits,) = struct.unpack("I", struct.pack("f", float(values[position, column])))
            wanted = (bits + (plain_noise(9, table, step=12, row=row, column=column) >> 16)) >> 16
            assert int(kept[position, column]) & 0xFFFF == wanted
    shifted = RowNoise([RowOrigin(table="a", first_row=0, num_rows=4, table_column=3)], seed=9)
    whole = RowFormat.BF16.encode(values[2:], words_N=words[2:])
    part = RowFormat.BF16.encode(values[2:, 3:], words_N=shifted.words(torch.tensor([3]), step=12))
    assert torch.equal(part, whole[:, 3:])


@pytest.mark.parametrize("row_format", [RowFormat.INT8, RowFormat.INT4])
def test_rounding_is_right_on_average_but_within_a_step_of_fp16_of_an_end(row_format: RowFormat) -> None:
    """What the guide says: rows around 0 are right; a row one step of FP16 wide is pulled together."""
    generator = torch.Generator().manual_seed(0)
    count = 20_000
    words = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    wide = torch.randn(16, generator=generator) * 0.05
    narrow = 1 + torch.rand(16, generator=generator) * 1e-3
    for row, is_right in ((wide, True), (narrow, False)):
        rows = row_format.decode(row_format.encode(row.expand(count, -1).contiguous(), words_N=words), dim=16)
        errors = (rows - row).double()
        z = errors.mean(0) / (errors.std(0) / count**0.5 + 1e-30)
        assert (float(z.abs().max()) < 5) is is_right
        ends = z[[int(row.argmin()), int(row.argmax())]]
        assert float(ends.abs().max()) < 5  # each end itself is right
        assert is_right or float(errors.mean(0).abs().max()) < 0.26 * 2**-10
