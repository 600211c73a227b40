"""A wire format from outside the package: its numbers, its bytes, and ranks that are one device up to it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.parallel.test_parity import build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.models import Model
from ziggurat.numerics import BlockFormat
from ziggurat.parallel.exchange.wire import Rounding, Wire, WireConfig
from ziggurat.parallel.exchange.wire_formats import InBlocks, PackedRows, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import ROW_WISE
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks


@pytest.fixture(scope="module")
def four_bits() -> Iterator[PackedRows]:
    """The format, listed while these tests run."""
    yield importlib.import_module("examples.extensions.four_bits").FOUR_BITS
    del WireFormat._members["four_bits"]


def test_it_takes_four_bits_and_a_scale_a_field(four_bits: PackedRows) -> None:
    wire = Wire(four_bits, (16, 5))
    assert wire.bytes_per_number(torch.float32) == (11 + 4) / 21
    sizes = torch.tensor([1.0] * 16 + [1e4] * 5)
    rows = torch.randn(40, 21, generator=torch.Generator().manual_seed(0)) * sizes
    found = wire.decode(wire.encode(rows), count=rows.numel()).view(40, 21)
    for error, field in zip((found - rows).abs().split([16, 5], dim=1), rows.split([16, 5], dim=1), strict=True):
        assert bool((error <= 0.5 / 7 * (1 + 2.0**-7) * field.abs().amax(dim=1, keepdim=True)).all())
    assert 0 < float((found - rows).abs()[:, :16].max()) < 1.0


def test_at_random_it_is_right_on_average(four_bits: PackedRows) -> None:
    torch.manual_seed(0)
    row = torch.tensor([1.0, 0.05, -0.3011])
    rows = row.repeat(40_000, 1)
    wire = Wire(four_bits, (3,), Rounding.STOCHASTIC)
    mean = wire.decode(wire.encode(rows), count=rows.numel()).view(-1, 3).mean(dim=0)
    torch.testing.assert_close(mean, row, rtol=0.0, atol=5 * 0.5 / 7 / 40_000**0.5 * 2)


def made() -> Model:
    """A model whose tables have 8 columns."""
    return build(towers=None, optimizer="rowwise_adagrad")


def check_ranks(rank: int, plan_json: str) -> list[int]:
    """Compare a step with one device; return the bytes of values by an FP32 wire and by the format."""
    importlib.import_module("examples.extensions.four_bits")  # every rank lists it
    plan = from_json(Plan, plan_json, where="test")
    counted = []
    for name in ("fp32", "four_bits"):
        wire = from_json(WireConfig, {"between_towers": name}, where="test")
        model = made()
        parallel = parallelize(model, plan, Topology.create(), config=ParallelConfig(wire=wire))
        model(random_batch(inputs(), 16, seed=rank)).sum().backward()
        rows = parallel.traffic.report()
        counted.append(sum(int(str(row["bytes"])) for row in rows if row["purpose"] == "embeddings forward"))
    assert_same_as_single_device(
        made,
        plan,
        batch=random_batch(inputs(), 13, seed=1),
        config=ParallelConfig(wire=wire),
        # Half a step is 1/14 of the largest number; Adagrad divides gradients of one row by their own size.
        tolerance=Tolerance(fields=0.15, others=0.3),
    )
    return counted


def test_ranks_are_one_device_up_to_the_format(four_bits: PackedRows) -> None:
    assert to_json(WireConfig(between_towers=four_bits))["between_towers"] == "four_bits"
    for as_computed, in_four_bits in run_ranks(check_ranks, 2, to_json(placed(2, ROW_WISE))):
        assert in_four_bits == as_computed * (8 // 2 + 2) // (8 * 4)  # 16 samples: nothing is filled up


def broken(**changed: object) -> WireFormat:
    """A format like int8 whose answers are others."""
    int8 = type(cast("PackedRows", WireFormat.INT8))
    return type("Broken", (int8,), {"name": "broken", **changed})()


def forgets_nan(self: PackedRows, rows_RC: Tensor, *, widths: tuple[int, ...], at_random: bool) -> tuple[Tensor, ...]:
    int8 = cast("PackedRows", WireFormat.INT8)
    return int8.encode_rows(rows_RC.nan_to_num(0.0, 1.0, -1.0), widths=widths, at_random=at_random)


def shares_a_scale(
    self: PackedRows, rows_RC: Tensor, *, widths: tuple[int, ...], at_random: bool
) -> tuple[Tensor, ...]:
    int8 = cast("PackedRows", WireFormat.INT8)
    codes, scales = int8.encode_rows(rows_RC, widths=(sum(widths),), at_random=at_random)
    return codes, scales.repeat(1, len(widths))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"row_bytes": lambda self, widths: (sum(widths), len(widths))}, "as `row_bytes` says"),
        ({"encode_rows": forgets_nan}, "arrive as not finite"),
        ({"encode_rows": shares_a_scale}, "does not depend on its neighbours"),
    ],
)
def test_formats_that_break_a_promise_are_refused_when_they_are_listed(changed: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as failure:
        WireFormat.add(broken(**changed))
    assert expected in failure.value.expected
    assert "broken" not in WireFormat._members


def test_the_formats_of_the_package_keep_the_promises() -> None:
    packed = [each for each in WireFormat if isinstance(each, PackedRows)]
    for each in packed:
        each.try_out()


def test_the_formats_of_the_guide_keep_their_promises() -> None:
    guide = Path("docs/guides/extending.md").read_text()
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "WireFormat" in each)
    (line,) = re.findall(r"`(WireFormat\.add\(InBlocks.*)`", guide)
    known = dict(WireFormat._members)
    written: dict[str, object] = {"InBlocks": InBlocks, "BlockFormat": BlockFormat}
    try:
        exec(f"{code}\n{line}", written)
        wire = Wire(WireFormat("hundredths"), (16, 5))
        rows = torch.randn(40, 21, generator=torch.Generator().manual_seed(0))
        found = wire.decode(wire.encode(rows), count=rows.numel()).view(40, 21)
        assert float((found - rows).abs().max()) <= 0.00501
        assert Wire(WireFormat("msfp16"), (16,)).bytes_per_number(torch.float32) == 1 + 1 / 16
    finally:
        WireFormat._members.clear()
        WireFormat._members.update(known)
