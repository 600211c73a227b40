"""What travels: exact formats, a scale for each field, unbiased stochastic rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.parallel.exchange.wire import Rounding, Wire, WireFormat, decode_pieces, encode_pieces

STEP = {WireFormat.BF16: 2.0**-8, WireFormat.FP16: 2.0**-11, WireFormat.INT8: 1 / 254, WireFormat.FP8: 2.0**-4}

ROUNDED = [
    (wire_format, rounding)
    for wire_format in WireFormat
    for rounding in Rounding
    if rounding is Rounding.NEAREST or wire_format.rounds_at_random
]


def round_trip(wire: Wire, numbers: torch.Tensor) -> torch.Tensor:
    """What arrives."""
    return wire.decode(wire.encode(numbers), count=numbers.numel())


@pytest.mark.parametrize("wire_format", [WireFormat.FP32, *STEP])
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 5), width=st.sampled_from([1, 3, 16]), seed=st.integers(0, 99))
def test_round_trip_is_within_half_a_step(wire_format: WireFormat, rows: int, width: int, seed: int) -> None:
    numbers = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5 - 2)
    wire = Wire(wire_format, (width,))
    buffer = wire.encode(numbers)
    assert buffer.dtype == wire.carried(numbers.dtype)
    assert buffer.numel() == wire.num_items(numbers.numel())
    found = wire.decode(buffer, count=numbers.numel()).view(rows, width)
    if wire_format is WireFormat.FP32:
        assert torch.equal(found, numbers)
        return
    largest = numbers.abs().amax(dim=1, keepdim=True) if rows else numbers
    by_row = wire_format in (WireFormat.INT8,)
    limit = STEP[wire_format] * (largest * (1 + 2.0**-7) if by_row else numbers.abs() + largest * 2.0**-9)
    assert bool(((found - numbers).abs() <= 1.001 * limit + 1e-7).all())


def test_rows_do_not_share_a_scale() -> None:
    numbers = torch.tensor([[1e6, -1e6], [1e-3, 2e-3]])
    found = round_trip(Wire(WireFormat.INT8, (2,)), numbers).view(2, 2)
    assert torch.allclose(found, numbers, rtol=0.01)


@pytest.mark.parametrize("wire_format", [WireFormat.BF16, WireFormat.FP16, WireFormat.INT8, WireFormat.FP8])
def test_stochastic_rounding_is_right_on_average(wire_format: WireFormat) -> None:
    torch.manual_seed(0)
    # Between two steps of every format; the row's largest number sets the scale.
    row = torch.tensor([1.0, 0.7037, -0.3011, 0.00731])
    rows = row.repeat(40_000, 1)
    nearest = round_trip(Wire(wire_format, (4,)), rows).view(-1, 4).mean(dim=0)
    wire = Wire(wire_format, (4,), Rounding.STOCHASTIC)
    mean = round_trip(wire, rows).view(-1, 4).mean(dim=0)
    spread = STEP[wire_format] * 2 / 40_000**0.5 * 5
    assert bool(((mean - row).abs() <= spread).all()), (mean, row)
    assert float((nearest - row).abs().max()) > float((mean - row).abs().max())


@pytest.mark.parametrize(("wire_format", "rounding"), ROUNDED, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives_as_not_finite(wire_format: WireFormat, rounding: Rounding, bad: float) -> None:
    wire = Wire(wire_format, (4,), rounding)
    found = round_trip(wire, torch.tensor([1.0, bad, 2.0, 3.0]))
    assert not bool(found.isfinite().all())


def test_what_fp16_cannot_hold_is_not_hidden() -> None:
    assert not bool(round_trip(Wire(WireFormat.FP16, (1,)), torch.tensor([1e6])).isfinite())


# -------------------------------------------------------------------------------------- format × what is computed in

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "many-ranks.md"
COMPUTED = {"FP64": torch.float64, "FP32": torch.float32, "BF16": torch.bfloat16, "FP16": torch.float16}
TRAVELS = {**COMPUTED, "bytes": torch.uint8}


def documented() -> list[tuple[WireFormat, str, str, str, str]]:
    """Rows of the guide's table; "any" stands for every type."""
    lines = GUIDE.read_text().split("| format | computed in |")[1].splitlines()[2:]
    rows = []
    for line in lines[: lines.index("")]:
        wire_format, computed, travels, num_bytes, arrives = (cell.strip(" `") for cell in line.strip("|").split("|"))
        sources = COMPUTED if computed == "any" else (computed,)
        rows += [(WireFormat(wire_format), source, travels, num_bytes, arrives) for source in sources]
    return rows


def test_the_guide_names_every_format_and_type() -> None:
    named = [row[:2] for row in documented()]
    wanted = [(wire_format, source) for wire_format in WireFormat for source in COMPUTED]
    assert sorted(named, key=str) == sorted(wanted, key=str)


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize(("wire_format", "computed", "travels", "num_bytes", "arrives"), documented(), ids=str)
def test_what_travels_is_what_the_guide_says(
    wire_format: WireFormat, computed: str, travels: str, num_bytes: str, arrives: str, rounding: Rounding
) -> None:
    if (wire_format, rounding) not in ROUNDED:
        rounding = Rounding.NEAREST
    *eighths, whole = num_bytes.split("/8")  # of formats in blocks, which fill whole ones here
    widths = (32, 64) if eighths else (16, 9)
    dtype, wire = COMPUTED[computed], Wire(wire_format, widths, rounding)
    values = torch.randn(40, sum(widths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[0, :2] = torch.tensor([1e-9, 99_840.0]) if dtype is not torch.float16 else torch.tensor([1e-7, 60_000.0])
    values = values.to(dtype)
    buffer = wire.encode(values)
    found = wire.decode(buffer, count=values.numel(), dtype=dtype).view(values.shape)
    scaled_bytes = 1 + 2 * 2 / 25 if num_bytes == "1 + 2/width" else float(whole or 0)
    wanted_bytes = float(eighths[0]) / 8 if eighths else scaled_bytes
    assert buffer.dtype == TRAVELS[travels] == wire.carried(dtype)
    filled = 30 if wire.packs_rows else 0
    assert 0 <= round(buffer.numel() * buffer.element_size() - wanted_bytes * values.numel(), 6) <= filled
    assert wire.bytes_per_number(dtype) == pytest.approx(wanted_bytes)
    assert torch.equal(found, values) == (arrives == "exact") == wire.is_exact(dtype)


@pytest.mark.parametrize("wire_format", [WireFormat.FP32, WireFormat.BF16])
def test_small_and_large_numbers_of_bf16_survive(wire_format: WireFormat) -> None:
    numbers = torch.tensor([1e-9, 99_840.0, -3e38, 1e-40], dtype=torch.bfloat16)
    assert bool((numbers != 0).all())
    for rounding in Rounding:
        wire = Wire(wire_format, (4,), rounding)
        assert torch.equal(wire.decode(wire.encode(numbers), count=4, dtype=torch.bfloat16), numbers)


@pytest.mark.parametrize("wire_format", [WireFormat.FP16, WireFormat.INT8, WireFormat.FP8])
def test_bf16_numbers_are_rounded_without_bias_where_asked(wire_format: WireFormat) -> None:
    torch.manual_seed(0)
    # Below half a step, where steps no longer shrink: to nearest it vanishes.
    small = {WireFormat.FP16: 2.0**-27, WireFormat.INT8: 2.0**-12, WireFormat.FP8: 2.0**-20}[wire_format]
    rows = torch.tensor([1.0, small], dtype=torch.bfloat16).repeat(200_000, 1)
    nearest, stochastic = (Wire(wire_format, (2,), rounding) for rounding in Rounding)
    assert float(round_trip(nearest, rows).view(-1, 2)[:, 1].abs().max()) == 0.0
    mean = float(round_trip(stochastic, rows).view(-1, 2)[:, 1].double().mean())
    assert mean == pytest.approx(small, rel=0.2)


def test_fields_have_scales_of_their_own() -> None:
    """16 and 9 numbers are two scales, not 25 (a scale for each number costs more than FP32)."""
    wire = Wire(WireFormat.INT8, (16, 9, 9, 16))
    rows = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([1e-6, 1.0, 1e4, 1e-3]).repeat_interleave(torch.tensor(wire.widths))
    found = round_trip(wire, rows * sizes).view(30, 50)
    assert bool(((found - rows * sizes).abs() <= 0.02 * sizes).all())
    assert wire.num_items(rows.numel()) == 1504 + 240  # multiples of 16: 30 · 50 numbers, 30 · 4 scales of 2 bytes
    assert wire.bytes_per_number(torch.float32) < 1.2


def test_a_description_says_what_truly_travels() -> None:
    fp32, int8 = Wire(WireFormat.FP32, (16,)), Wire(WireFormat.INT8, (16,))
    assert fp32.describe(torch.float32) == "fp32: 4 bytes a number, exact"
    assert fp32.describe(torch.bfloat16) == "bf16, because numbers are computed in BF16: 2 bytes a number, exact"
    assert int8.describe(torch.bfloat16) == "int8: 1.12 bytes a number, rounded"


@pytest.mark.parametrize("wire_format", [WireFormat.INT8, WireFormat.FP8])
def test_numbers_and_scales_of_every_rank_begin_at_multiples_of_16_bytes(wire_format: WireFormat) -> None:
    wires, sizes = [Wire(wire_format, (3, 4)), Wire(wire_format, (5,)), Wire(wire_format, (1,))], [21, 0, 9]
    numbers = torch.randn(30, generator=torch.Generator().manual_seed(0))
    message = encode_pieces(wires, numbers, sizes=sizes)
    assert [wire.num_items(size) for wire, size in zip(wires, sizes, strict=True)] == [32 + 16, 0, 16 + 32]
    assert message.numel() == 96
    assert not message[21:32].any()  # what fills up says nothing
    found = decode_pieces(wires, message, sizes=sizes, dtype=torch.float32)
    assert [len(each) for each in found] == sizes
    torch.testing.assert_close(torch.cat(found), numbers, rtol=0.07, atol=0.02)
