"""Un-pooled lists are those of one device, whatever the placement: vectors, masks, gradients, updates."""

from __future__ import annotations

import pytest

from tests.parallel.test_parity import TOWERS, build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.errors import BoundsError
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import assert_same_sequences
from ziggurat.testing.ranks import run_ranks

NAMES = ("tags", "words", "genres")


def check(rank: int, plans: list[object], cuts: list[int] | None, ranks_per_host: int) -> None:
    """Several plans, one after the other, in one group of processes."""
    del rank
    for plan in plans:
        assert_same_sequences(
            lambda: build(towers=None, optimizer="rowwise_adagrad"),
            from_json(Plan, plan, where="test"),
            batch=random_batch(inputs(), 11, seed=2),
            names=NAMES,
            cuts=cuts,
            ranks_per_host=ranks_per_host,
        )


@pytest.mark.parametrize(("world_size", "cuts"), [(1, None), (2, None), (4, None), (4, [0, 0, 11]), (2, [11])])
def test_every_placement(world_size: int, cuts: list[int] | None) -> None:
    run_ranks(check, world_size, [to_json(placed(world_size, kind)) for kind in Placement], cuts, 0)


def test_with_towers_and_hosts() -> None:
    plans = [to_json(placed(4, kind, TOWERS, 2)) for kind in Placement]
    run_ranks(check, 4, plans, None, 2)


def refused(rank: int, plan: object) -> str:
    del rank
    chosen, topology = from_json(Plan, plan, where="test"), Topology.create()
    model = build(towers=None, optimizer="sgd")
    parallelize(model, chosen, topology)
    batch = random_batch(inputs(), 6)
    batch.jagged.values[-1] = 40  # the table has rows 0 to 39
    try:
        model.embeddings.sequence(batch, "words")
    except BoundsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", list(Placement))
def test_a_row_outside_of_the_table_is_named(kind: Placement) -> None:
    (text,) = run_ranks(refused, 1, to_json(placed(1, kind)))
    assert "row 40" in text
    assert "feature 'words'" in text
