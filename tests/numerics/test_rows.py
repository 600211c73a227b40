"""Rows of tables in block formats: written and read again, right on average, in updates and on a few columns."""

from __future__ import annotations

import math

import pytest
import torch

from tests.embeddings import test_low_precision as on_tables
from tests.ops.row_formats import test_row_formats as on_rows
from ziggurat.config import from_json
from ziggurat.embeddings import TableOptimizerKind
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.numerics.rows import RowsInBlocks
from ziggurat.ops.row_formats import RowFormat

BOTH = pytest.mark.parametrize(
    "row_format", [RowsInBlocks(BlockFormat.named(name)) for name in ("mx9", "mx6")], ids=str
)


@BOTH
def test_they_keep_the_promises_of_row_formats(row_format: RowsInBlocks) -> None:
    row_format.try_out()
    assert row_format.row_bytes(64) == 64 * row_format.format.bits_per_element / 8


@BOTH
@pytest.mark.parametrize("dim", [1, 7, 16, 65])
@pytest.mark.parametrize("at_random", [False, True])
def test_rows_that_were_read_are_written_back_to_the_same_numbers(
    row_format: RowsInBlocks, dim: int, at_random: bool
) -> None:
    draw = torch.Generator().manual_seed(dim)
    values = torch.randn(500, dim, generator=draw) * torch.exp2(torch.randint(-9, 9, (500, 1), generator=draw))
    words = on_rows.noise_of(500).words(torch.arange(500), step=4) if at_random else None
    kept = row_format.encode(values, words_N=words)
    read = row_format.decode(kept, dim=dim)
    assert torch.equal(row_format.encode(read), kept)
    if not at_random:
        assert torch.equal(read, quantise(values, row_format.format, 1))
    step = values.abs().amax(dim=1, keepdim=True) * 2.0 ** (2 - row_format.format.element.bits)
    assert bool(((read - values).abs() <= step).all())
    # Noise chooses among the two numbers that enclose each: what the format holds is not moved.
    assert torch.equal(row_format.encode(read, words_N=words), kept)


@BOTH
def test_rounding_at_random_is_right_on_average(row_format: RowsInBlocks) -> None:
    on_rows.test_rounding_at_random_is_right_on_average(row_format)


@BOTH
def test_what_is_not_finite_is_nan_in_its_block(row_format: RowsInBlocks) -> None:
    values = torch.ones(3, 20)
    values[0, 3] = math.inf
    values[1, 17] = math.nan
    for words in (None, on_rows.noise_of(3).words(torch.arange(3), step=1)):
        read = row_format.decode(row_format.encode(values, words_N=words), dim=20)
        assert bool(read[0, :16].isnan().all())
        assert bool(read[1, 16:].isnan().all())
        read[0, :16] = 1.0
        read[1, 16:] = 1.0
        assert torch.equal(read, torch.ones(3, 20))


@BOTH
def test_an_update_is_the_rule_on_decoded_rows_rounded_once(row_format: RowsInBlocks) -> None:
    kind = TableOptimizerKind("rowwise_adagrad")
    on_tables.test_an_update_is_the_rule_on_decoded_rows_rounded_once(row_format, kind)


def test_formats_that_would_not_come_back_are_refused() -> None:
    for name in ("int8", "bf16"):
        with pytest.raises(ConfigError, match=name):
            RowsInBlocks(BlockFormat.named(name))
    RowsInBlocks(BlockFormat.named("msfp16")).try_out()


def test_settings_take_one_that_was_listed() -> None:
    listed = RowFormat.add(RowsInBlocks(BlockFormat.named("mx9")))
    try:
        assert from_json(TablesConfig, {"weights": "mx9"}, where="test").weights is listed
        assert RowFormat.add(RowsInBlocks(BlockFormat.named("mx9"))) is listed
    finally:
        del RowFormat._members["mx9"]
