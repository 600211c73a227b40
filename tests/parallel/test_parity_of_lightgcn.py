"""LightGCN on several ranks as on one device: rows from wherever they lie, and their gradients back there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.models.graph.test_lightgcn import drawn, inputs
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig, TableInit, TableOptimizerKind
from ziggurat.features.batch import Batch
from ziggurat.models import LightGCNConfig, Model, build_model
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

TABLES = EmbeddingConfig(
    optimizer=TableOptimizerKind.SPARSE_ADAM, init=TableInit.NORMAL, init_std=0.3, kernel=KernelChoice.TORCH
)
MODEL = LightGCNConfig(embedding_dim=8, num_layers=2, l2=0.1, embedding=TABLES)
PLACEMENTS = {
    Placement.TABLE_WISE: ((0,), (1,)),
    Placement.ROW_WISE: ((0, 1), (0, 1)),
    Placement.COLUMN_WISE: ((0, 1), (0, 1)),
    Placement.DATA_PARALLEL: ((0, 1), (0, 1)),
}


def plan_of(kind: Placement) -> Plan:
    ranks = PLACEMENTS[kind]
    return Plan(
        world_size=2,
        tables=(
            TablePlacement(table="user", placement=kind, ranks=ranks[0]),
            TablePlacement(table="item", placement=kind, ranks=ranks[1]),
        ),
    )


def built(config: LightGCNConfig) -> Model:
    model = build_model(config, inputs(), seed=3)
    model.observe([some_batch(400, seed=2)])
    assert bool((model.graph.offsets.diff()[[*range(3, 12), *range(15, 21)]] > 0).all())
    return model


def some_batch(size: int, *, seed: int) -> Batch:
    """Samples of users and items with rows of their own; answers of others are means of all."""
    batch = random_batch(inputs(), size, seed=seed)
    batch.single.clamp_(min=3)
    return batch


def check(rank: int, plan_json: Any, model_json: Any) -> None:
    """Several models, one after the other, in one group of processes."""
    del rank
    plan = from_json(Plan, plan_json, where="test")
    model = from_json(LightGCNConfig, model_json, where="test")
    for num_layers, edge_width in ((2, 0), (0, 0), (2, 3)):
        config = replace(model, num_layers=num_layers, edge_width=edge_width)
        batch = drawn(built(config), some_batch(13, seed=1))
        assert_same_as_single_device(
            lambda config=config: built(config),
            plan,
            batch=batch,
            config=ParallelConfig(dense=DenseParallelism.DDP),
            tolerance=Tolerance(fields=1e-6, others=3e-6),
        )


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_ranks_equal_one_device(kind: Placement) -> None:
    run_ranks(check, 2, to_json(plan_of(kind)), to_json(MODEL))
