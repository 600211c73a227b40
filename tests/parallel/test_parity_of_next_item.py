"""Models of events on several ranks as on one device: histories, candidates and positions, questions that are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.models.sequence import test_ranker
from tests.models.sequence.test_next_item import INPUTS, batch_of
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.models import NextItemConfig, build_model
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.models.sequence.next_item_loss import NextItemNegatives
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

# All items are candidates: drawn ones depend on the rank that draws.
MODEL = NextItemConfig(
    embedding_dim=8,
    num_layers=1,
    dropout=0.0,
    negatives=NextItemNegatives.ALL,
    temperature=0.5,
    embedding=EmbeddingConfig(kernel=KernelChoice.TORCH),
)
PLAN = Plan(
    world_size=2,
    tables=(
        TablePlacement(table="item", placement=Placement.ROW_WISE, ranks=(0, 1)),
        TablePlacement(table="kind", placement=Placement.TABLE_WISE, ranks=(1,)),
        TablePlacement(table="action", placement=Placement.DATA_PARALLEL, ranks=(0, 1)),
    ),
)


def check(rank: int, plan_json: Any, model_json: Any) -> None:
    """Several ways to run, one after the other, in one group of processes."""
    del rank
    plan = from_json(Plan, plan_json, where="test")
    model = from_json(NextItemConfig, model_json, where="test")
    batch = batch_of([4, 6, 0, 1, 2, 5, 3])
    for layers in (LayerPreset.HSTU, LayerPreset.SASREC):
        for dense, num_parts in ((DenseParallelism.DDP, 1), (DenseParallelism.FSDP, 2)):
            config = from_json(NextItemConfig, to_json(model) | {"layers": layers.value}, where="test")
            assert_same_as_single_device(
                lambda config=config: build_model(config, INPUTS, seed=3),
                plan,
                batch=batch,
                config=ParallelConfig(dense=dense),
                num_parts=num_parts,
                tolerance=Tolerance(fields=1e-6, others=3e-6),
            )

    tables = (*plan.tables, TablePlacement(table="country", placement=Placement.TABLE_WISE, ranks=(0,)))
    candidates = test_ranker.batch_of([(4, 3), (0, 1), (6, 4), (1, 2)])  # a rank's share ends inside a question
    for settings in (*test_ranker.VARIANTS[:2], test_ranker.VARIANTS[3]):
        for dense, num_parts in ((DenseParallelism.DDP, 1), (DenseParallelism.FSDP, 2)):
            ranker = replace(test_ranker.SMALL, num_layers=1, embedding=model.embedding, **settings)
            assert_same_as_single_device(
                lambda ranker=ranker: build_model(ranker, test_ranker.INPUTS, seed=3),
                replace(plan, tables=tables),
                batch=candidates,
                config=ParallelConfig(dense=dense),
                num_parts=num_parts,
                tolerance=Tolerance(fields=1e-6, others=3e-6),
            )


def test_models_of_events_equal_one_device() -> None:
    run_ranks(check, 2, to_json(PLAN), to_json(MODEL))
