"""What travels: exact formats, row-wise scales, unbiased stochastic rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.parallel.wire import Rounding, Wire, WireFormat

STEP = {WireFormat.BF16: 2.0**-8, WireFormat.FP16: 2.0**-11, WireFormat.INT8: 1 / 254, WireFormat.FP8: 2.0**-4}


@pytest.mark.parametrize("wire_format", list(WireFormat))
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 5), width=st.sampled_from([1, 3, 16]), seed=st.integers(0, 99))
def test_round_trip_is_within_half_a_step(wire_format: WireFormat, rows: int, width: int, seed: int) -> None:
    numbers = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 5 - 2)
    wire = Wire(wire_format, width)
    buffer = wire.encode(numbers)
    assert buffer.dtype == wire.dtype
    assert buffer.numel() == wire.num_items(numbers.numel())
    found = wire.decode(buffer).view(rows, width)
    if wire_format is WireFormat.FP32:
        assert torch.equal(found, numbers)
        return
    largest = numbers.abs().amax(dim=1, keepdim=True) if rows else numbers
    by_row = wire_format in (WireFormat.INT8,)
    limit = STEP[wire_format] * (largest if by_row else numbers.abs() + largest * 2.0**-9)
    assert bool(((found - numbers).abs() <= 1.001 * limit + 1e-7).all())


def test_rows_do_not_share_a_scale() -> None:
    numbers = torch.tensor([[1e6, -1e6], [1e-3, 2e-3]])
    found = Wire(WireFormat.INT8, 2).decode(Wire(WireFormat.INT8, 2).encode(numbers)).view(2, 2)
    assert torch.allclose(found, numbers, rtol=0.01)


@pytest.mark.parametrize("wire_format", [WireFormat.BF16, WireFormat.FP16, WireFormat.INT8, WireFormat.FP8])
def test_stochastic_rounding_is_right_on_average(wire_format: WireFormat) -> None:
    torch.manual_seed(0)
    # Between two steps of every format; the row's largest number sets the scale.
    row = torch.tensor([1.0, 0.7037, -0.3011, 0.00731])
    rows = row.repeat(40_000, 1)
    nearest = Wire(wire_format, 4).decode(Wire(wire_format, 4).encode(rows)).view(-1, 4).mean(dim=0)
    wire = Wire(wire_format, 4, Rounding.STOCHASTIC)
    mean = wire.decode(wire.encode(rows)).view(-1, 4).mean(dim=0)
    spread = STEP[wire_format] * 2 / 40_000**0.5 * 5
    assert bool(((mean - row).abs() <= spread).all()), (mean, row)
    assert float((nearest - row).abs().max()) > float((mean - row).abs().max())


@pytest.mark.parametrize("wire_format", list(WireFormat))
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives_as_not_finite(wire_format: WireFormat, rounding: Rounding, bad: float) -> None:
    wire = Wire(wire_format, 4, rounding)
    found = wire.decode(wire.encode(torch.tensor([1.0, bad, 2.0, 3.0])))
    assert not bool(found.isfinite().all())


def test_what_fp16_cannot_hold_is_not_hidden() -> None:
    assert not bool(Wire(WireFormat.FP16, 1).decode(Wire(WireFormat.FP16, 1).encode(torch.tensor([1e6]))).isfinite())
