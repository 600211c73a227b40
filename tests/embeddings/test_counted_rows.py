"""Initial rows that count have one value, whoever makes them: numpy on the host, or torch where the table lies."""

from __future__ import annotations

import pytest
import torch

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.embeddings.config import InitialDraw, TableInit
from ziggurat.embeddings.counted_rows import counted_pieces, counted_rows
from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage import MemoryStorage
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.pretend_queues import record_waits

CPU = torch.device("cpu")


@pytest.mark.parametrize("init", list(TableInit))
@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_bits_are_those_of_numpy(init: TableInit, seed: int) -> None:
    config = EmbeddingConfig(init=init, init_std=0.3, init_draw=InitialDraw.ROWS)
    initial = InitialRows(
        table=f"t{seed}", shape=(3_000_000_000, 9), config=config, seed=seed, first_column=2, num_columns=5
    )
    generator = torch.Generator().manual_seed(seed)
    rows = torch.cat([torch.arange(3000), torch.randint(3_000_000_000, (5000,), generator=generator)])
    assert torch.equal(counted_rows(initial, rows), initial.take(rows))


def test_pieces_of_a_part_are_the_part() -> None:
    config = EmbeddingConfig(init=TableInit.NORMAL, init_draw=InitialDraw.ROWS)
    initial = InitialRows(table="user", shape=(10_000, 600), config=config, seed=1, first_row=100)
    pieces = list(counted_pieces(initial, range(0, 8000), device=CPU))
    assert len(pieces) == 2
    assert [first for first, _ in pieces] == [0, len(pieces[0][1])]
    assert torch.equal(torch.cat([values[:, :3] for _, values in pieces]), initial.take(torch.arange(8000))[:, :3])


def test_a_device_draws_its_tables_itself() -> None:
    config = EmbeddingConfig(init_draw=InitialDraw.ROWS)
    initial = InitialRows(table="user", shape=(500, 4), config=config, seed=1)
    with pretend_cuda() as cuda:
        storage = MemoryStorage(500, 4, device=cuda)
        with record_waits() as waits:
            storage.draw(0, 500, initial=initial)
        assert not waits
        assert torch.equal(storage.weight.cpu(), initial.take(torch.arange(500)))
