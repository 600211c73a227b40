"""Batches that are dealt anew, to balance ranks or divide histories, bring no order of collectives that stops a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.sequence.test_next_item import INPUTS, batch_of
from tests.parallel.context.test_context_on_ranks import MODEL, PLAN
from tests.training.rank_runs import Case, trainer_of
from tests.training.test_balanced_ranks import COST
from ziggurat.config import from_json, to_json
from ziggurat.data.balance.partition import Balance
from ziggurat.models import build_model
from ziggurat.parallel.context.choice import Passing
from ziggurat.parallel.context.deal import ContextDeal
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Placement, Plan
from ziggurat.testing.collectives import Collective, check_order, on_gpus, recorded_collectives
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

CONTEXTS = {
    f"context {size}, {passing.value}": (size, passing) for size, passing in ((2, Passing.KEYS), (4, Passing.QUERIES))
}
BALANCED = {
    "variable sizes": {"balance": Balance.VARIABLE, "balance_cost": COST, "balance_shares": (1.0, 3.0, 1.0, 1.0)},
    "zigzag": {"balance": Balance.ZIGZAG},
    "karmarkar_karp": {"balance": Balance.KARMARKAR_KARP},
}


def divided(plan: Plan, *, size: int, passing: Passing, rank: int) -> None:
    """Two steps whose histories are divided, samples of another number on every rank."""
    topology, model = Topology.create(context_size=size), build_model(MODEL, INPUTS, seed=3)
    parallel = parallelize(model, plan, topology, config=ParallelConfig(passing=passing))
    deal = ContextDeal(model, topology=topology, traffic=parallel.traffic)
    step = TrainStep(model, TrainingConfig(precision=Precision.FP32, clip_norm=1.0), parallel=parallel)
    lengths = ([4, 6, 0, 1, 2, 5, 3][: 7 - 2 * rank], [3] * rank)
    batches = [deal(batch_of(each)) for each in lengths]
    for batch, upcoming in zip(batches, [batches[1], None], strict=True):
        assert step(batch, upcoming=upcoming).finite
    step.settle()


def record(rank: int, folder: str) -> dict[str, list[Collective]]:
    """Runs on every rank."""
    plan, found = from_json(Plan, to_json(PLAN), where="test"), dict[str, list[Collective]]()
    for name, (size, passing) in CONTEXTS.items():
        with recorded_collectives() as mine, on_gpus():
            divided(plan, size=size, passing=passing, rank=rank)
        found[name] = list(mine)
    for name, changes in BALANCED.items():
        settings: dict[str, Any] = {**changes, "max_steps": 4, "checkpoint_every": 3}
        with recorded_collectives() as mine, on_gpus():
            trainer = trainer_of(Case(placement=Placement.ROW_WISE), Path(folder) / name, world_size=4, **settings)
            trainer.fit()
        found[name] = list(mine)
    return found


def test_collectives_of_dealt_batches_have_one_order_on_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(record, 4, str(tmp_path), timeout_s=240.0)
    for name in (*CONTEXTS, *BALANCED):
        by_rank = [each[name] for each in found]
        places = {each.where.split("/")[0] for each in by_rank[0]}
        assert "context" in places if name in CONTEXTS else {"balance", "training", "tables"} & places, places
        check_order(by_rank)
