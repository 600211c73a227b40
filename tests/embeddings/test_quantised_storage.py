"""Tables in few bits: errors within half a step of a row, lookups as from the decoded table, padding exact."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.embeddings.embedding_inputs import MIXED, make_batch
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.embeddings.storage import QuantisedStorage, TablePrecision
from ziggurat.embeddings.storage.quantised import decode, encode
from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import TableOptimizerKind

FEW_BITS = [TablePrecision.BF16, TablePrecision.INT8, TablePrecision.INT4]


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 17])
@pytest.mark.parametrize("precision", FEW_BITS)
def test_rows_come_back_within_half_a_step(precision: TablePrecision, dim: int) -> None:
    draw = torch.Generator().manual_seed(dim)
    rows = torch.randn(200, dim, generator=draw) * torch.rand(200, 1, generator=draw) ** 8
    rows[0], rows[1], rows[2] = 0.0, 3.25, -1e30
    parts = encode(rows, precision)
    found = decode(parts, dim=dim).numpy().astype(np.float64)
    exact = rows.numpy().astype(np.float64)
    if precision is TablePrecision.BF16:
        bound = np.abs(exact) * 2.0**-8
    else:
        steps = (exact.max(1) - exact.min(1)) / (2**precision.bits - 1)
        bound = (steps / 2 + 1e-6 * np.abs(exact).max(1))[:, None]
    assert (np.abs(found - exact) <= bound).all()
    assert (found[0] == 0).all()
    assert (found[1] == 3.25).all()


def test_no_rows_are_no_parts() -> None:
    for precision in FEW_BITS:
        assert decode(encode(torch.empty(0, 5), precision), dim=5).shape == (0, 5)


@pytest.mark.parametrize("precision", FEW_BITS)
def test_lookups_are_those_of_the_decoded_table(precision: TablePrecision) -> None:
    config = EmbeddingConfig(dim=6)
    few = EmbeddingTables(MIXED, config, make_storage=functools.partial(QuantisedStorage, precision=precision))
    plain = EmbeddingTables(MIXED, config)
    for table in MIXED.tables:
        plain.tables.rows(table.name).write(0, few.tables.view(table.name))
    batch = make_batch(MIXED, size=50, seed=3)
    with torch.no_grad():
        torch.testing.assert_close(few(batch), plain(batch), rtol=0, atol=1e-6)
    assert few.tables.storage(0).num_bytes < plain.tables.storage(0).num_bytes


def test_training_is_refused() -> None:
    storage = QuantisedStorage(4, 2, precision=TablePrecision.INT8)
    with pytest.raises(ConfigError, match="reading"):
        storage.add_state(TableOptimizerKind.ROWWISE_ADAGRAD)


def test_rows_are_replaced() -> None:
    storage = QuantisedStorage(5, 3, precision=TablePrecision.INT8)
    storage.write(1, torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]]))
    storage.scatter(torch.tensor([4]), torch.tensor([[0.0, 0.5, 1.0]]))
    expected = torch.tensor([[0, 0, 0], [1, 2, 3], [4, 4, 4], [0, 0, 0], [0, 0.5, 1]])
    torch.testing.assert_close(storage.read(0, 5), expected, rtol=0, atol=4e-3)
    torch.testing.assert_close(storage.gather(torch.tensor([4, 1])), expected[[4, 1]], rtol=0, atol=4e-3)
