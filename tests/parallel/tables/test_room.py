"""Ranks of one machine share its memory: what they need together is compared with it, with the same words on all."""

from __future__ import annotations

import pytest
import torch

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.embeddings.room import TableUse, bytes_of
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, SingleSpec, TableSpec
from ziggurat.parallel.tables import room
from ziggurat.parallel.tables.shards import cut_tables, share_of
from ziggurat.parallel.topology import Axis, RankGroup, Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement

INPUTS = InputSpec(
    single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
    tables=(TableSpec(name="user", num_rows=1000), TableSpec(name="item", num_rows=10)),
)
PLAN = Plan(
    world_size=2,
    tables=(
        TablePlacement(table="user", placement=Placement.ROW_WISE, ranks=(0, 1)),
        TablePlacement(table="item", placement=Placement.DATA_PARALLEL, ranks=(0, 1)),
    ),
)
CONFIG = EmbeddingConfig(dim=8)
NEED = 4 * (501 * 9 + 10 * 9)  # of rank 1, whose rows have a padding row in front


def check(monkeypatch: pytest.MonkeyPatch, *, machines: tuple[int, int], free: int) -> list[str]:
    """The errors of both ranks, each of which tells the other what it needs."""
    shards = cut_tables(PLAN, INPUTS, dim=8)
    shares = [share_of(rank, inputs=INPUTS, shards=shards) for rank in range(2)]
    needs = [bytes_of(room.sizes_of(share, CONFIG).values(), use=TableUse.TRAINING) for share in shares]
    rows = [[machines[rank], rank, needs[rank], free, 2**40] for rank in range(2)]
    monkeypatch.setattr(room, "_gathered", lambda told: rows)
    errors = []
    for rank in range(2):
        group = RankGroup((0, 1), rank)
        topology = Topology(rank=rank, tower_size=2, hosts=(0, 0), order=(0, 1), axes=dict.fromkeys(Axis, group))
        try:
            room.check_room_of_ranks(shares, config=CONFIG, topology=topology, device=torch.device("cpu"))
        except ConfigError as error:
            errors.append(str(error))
    return errors


def test_ranks_of_one_machine_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = check(monkeypatch, machines=(7, 7), free=2 * NEED - 100)
    assert first == second
    assert "rank 1" in first
    assert "table 'user': 501 rows × 8" in first
    assert "on the other ranks of that machine" in first
    assert "memory of ranks 0, 1" in first


def test_ranks_of_two_machines_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch, machines=(7, 8), free=NEED) == []
    (first, _) = check(monkeypatch, machines=(7, 8), free=NEED - 1)
    assert "memory of rank 1" in first
