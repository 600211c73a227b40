"""Formats in blocks on the wire: the numbers of the format, its exact bits, and no block over two fields."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ziggurat.config import from_json, override, to_json
from ziggurat.errors import ConfigError
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.parallel.exchange.wire import Rounding, Wire, WireConfig, WireFormat, decode_pieces, encode_pieces
from ziggurat.parallel.exchange.wire_formats import InBlocks

IN_BLOCKS = [each for each in WireFormat if isinstance(each, InBlocks)]


def rows_of(widths: tuple[int, ...], *, num_rows: int = 7) -> torch.Tensor:
    """Columns of which each field has a size of its own."""
    sizes = torch.tensor([10.0 ** (3 * (index % 3) - 3) for index in range(len(widths))])
    drawn = torch.randn(num_rows, sum(widths), generator=torch.Generator().manual_seed(1))
    return drawn * sizes.repeat_interleave(torch.tensor(widths))


@pytest.mark.parametrize("wire_format", IN_BLOCKS, ids=str)
@pytest.mark.parametrize("widths", [(16, 16, 5), (1,), (40, 3, 3, 16)])
def test_each_field_arrives_as_the_format_holds_it(wire_format: InBlocks, widths: tuple[int, ...]) -> None:
    rows = rows_of(widths)
    wire = Wire(wire_format, widths)
    message = wire.encode(rows)
    assert message.dtype is torch.uint8
    assert message.numel() == wire.num_items(rows.numel())
    found = wire.decode(message, count=rows.numel()).view(rows.shape)
    fields = rows.split(list(widths), dim=1)
    wanted = torch.cat([quantise(field.contiguous(), wire_format.format, axis=1) for field in fields], dim=1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("name", "bits"), [("mx9", 9), ("mx6", 6), ("mx4", 4), ("mxfp8", 8.25), ("mxfp4", 4.25)])
def test_whole_blocks_take_the_bits_of_the_format(name: str, bits: float) -> None:
    wire = Wire(WireFormat(name), (32, 64))
    assert wire.bytes_per_number(torch.float32) == bits / 8
    assert wire.encode(torch.zeros(16, 96)).numel() == 16 * 96 * bits / 8
    assert wire.describe(torch.bfloat16) == f"{name}: {bits / 8:.3g} bytes a number, rounded"


def test_messages_for_several_ranks_are_taken_apart_again() -> None:
    wires = [Wire(WireFormat.MX9, (16, 3)), Wire(WireFormat.MX9, ()), Wire(WireFormat.MX9, (8,)), wire_of_five()]
    sizes = [38, 0, 24, 0]
    numbers = torch.randn(62, generator=torch.Generator().manual_seed(0))
    message = encode_pieces(wires, numbers, sizes=sizes)
    assert message.numel() == 48 + 32  # 2 rows of 18 + 5 bytes and 3 of 10, to multiples of 16
    found = decode_pieces(wires, message, sizes=sizes, dtype=torch.bfloat16)
    assert [len(each) for each in found] == sizes
    torch.testing.assert_close(torch.cat(found).float(), numbers, rtol=0.0, atol=0.03)


def wire_of_five() -> Wire:
    """A sender without rows."""
    return Wire(WireFormat.MX9, (5,))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_block_alone(bad: float) -> None:
    rows = torch.ones(2, 36)
    rows[0, 20] = bad
    wire = Wire(WireFormat.MX9, (32, 4))
    found = wire.decode(wire.encode(rows), count=72).view(2, 36)
    assert bool(found[0, 16:32].isnan().all())
    found[0, 16:32] = 1.0
    assert torch.equal(found, torch.ones(2, 36))


def test_rounding_at_random_is_refused_by_name() -> None:
    for hop in ("in_tower", "between_towers"):
        with pytest.raises(ConfigError) as failure:
            WireConfig(backward_rounding=Rounding.STOCHASTIC, **{hop: WireFormat.MX6})
        assert failure.value.found == "mx6, which rounds to the nearest"
        assert hop in failure.value.where
        # Both ways out, as they would be typed.
        for way in failure.value.ways_out:
            name, value = way.removeprefix("--parallel.wire.").split(" ")
            settings = {hop: "mx6", "backward_rounding": "stochastic"} | {name.replace("-", "_"): value}
            assert from_json(WireConfig, settings, where="test") == override(WireConfig(), settings)


def test_formats_that_cannot_travel_are_refused() -> None:
    for name, found in (("bf16", "bf16, of which none do"), ("fp8_e4m3_tensor", "fp8_e4m3_tensor, of which all")):
        with pytest.raises(ConfigError) as failure:
            InBlocks(BlockFormat.named(name))
        assert failure.value.found.startswith(found)
    InBlocks(BlockFormat.named("mx9"))


def test_any_other_block_format_is_one_line() -> None:
    for name in ("msfp16", "int8", "vsq8", "mxfp4_rceil"):
        wire_format = InBlocks(BlockFormat.named(name))
        wire_format.try_out()
        rows = rows_of((16, 5))
        wire = Wire(wire_format, (16, 5))
        found = wire.decode(wire.encode(rows), count=rows.numel()).view(rows.shape)
        assert torch.equal(found[:, :16], quantise(rows[:, :16].contiguous(), wire_format.format, axis=1))


def test_every_format_is_one_object_that_files_call_by_its_name() -> None:
    for wire_format in WireFormat:
        for other in (copy.deepcopy(wire_format), pickle.loads(pickle.dumps(wire_format))):
            assert other is wire_format
        config = WireConfig(in_tower=wire_format)
        assert to_json(config)["in_tower"] == wire_format.name
        assert from_json(WireConfig, to_json(config), where="test") == config
    assert to_json(WireConfig()) == {"in_tower": "fp32", "between_towers": "fp32", "backward_rounding": "nearest"}
