"""Towers under BF16 autocast: an FP32 wire loses nothing, and costs what BF16 costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel.test_parity import TOWERS, build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import TableOptimizer
from ziggurat.features.batch import Batch
from ziggurat.models import Model, Outputs, TowerModuleConfig, TowerModuleKind
from ziggurat.models.contract.losses import loss_sums
from ziggurat.models.towers.layer import build_tower_module
from ziggurat.parallel.exchange.wire import Rounding, WireConfig, WireFormat
from ziggurat.parallel.parallelize import Parallel, ParallelConfig, parallelize
from ziggurat.parallel.pipeline import Pipeline
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.report.ranks import rank_sections

BATCH, GLOBAL_BATCH = 64, 65_536  # gradients are as small as in a batch of 65,536
TABLE = "user"


def share_of_loss(outputs: Outputs, samples: Batch) -> Tensor:
    return loss_sums(outputs.logits, samples.labels, None, inputs=inputs()).mean(torch.tensor(float(GLOBAL_BATCH)))


def table_gradient(precision: torch.dtype) -> Tensor:
    """On one device: what one step of plain SGD takes from the table."""
    model, batch = build(towers=TOWERS, optimizer="sgd"), random_batch(inputs(), BATCH, seed=1)
    before = model.embeddings.tables.view(TABLE).clone()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16):
        share_of_loss(model.forward_dense(model.embed(batch)), batch).backward()
    TableOptimizer(model.embeddings).step(GLOBAL_BATCH)
    return before - model.embeddings.tables.view(TABLE)


def parallel_model(plan: Plan, wire: WireConfig) -> tuple[Model, Parallel]:
    model = build(towers=TOWERS, optimizer="sgd")
    topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=1)
    return model, parallelize(model, plan, topology, config=ParallelConfig(wire=wire))


def gradient_on_ranks(rank: int, plan_json: Any, num_parts: int) -> dict[str, Any]:
    """The same on two ranks, a tower group each, under BF16; and what was sent and said."""
    plan, batch = from_json(Plan, plan_json, where="test"), random_batch(inputs(), BATCH, seed=1)
    local = batch.rows(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    reports: dict[str, Any] = {}
    for name, wire in (("default", WireConfig()), ("int8", WireConfig(between_towers=WireFormat.INT8))):
        model, parallel = parallel_model(plan, wire)
        pipeline = Pipeline(model, parallel, num_parts=num_parts)
        tables: Any = model.embeddings.tables
        shard = next((shard for shard in tables.mine.rows.shards if shard.table == TABLE), None)
        before = None if shard is None else tables.part(shard).clone()
        pipeline.step(local, loss_of=share_of_loss, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
        parallel.table_optimizer(model).step(GLOBAL_BATCH)
        gradient = None if shard is None or before is None else (before - tables.part(shard)).numpy()
        lines = rank_sections(parallel, overlaps=[], compute=torch.bfloat16)["Ranks"]
        sent = {row["purpose"]: row["bytes"] for row in parallel.traffic.report()}
        reports[name] = {"gradient": gradient, "sent": sent, "lines": lines}
    return reports


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_default_wire_under_bf16_loses_nothing(num_parts: int) -> None:
    exact = table_gradient(torch.float32)
    plain = error(table_gradient(torch.bfloat16), exact)
    plan = placed(2, Placement.TABLE_WISE, TOWERS, 1)
    results = run_ranks(gradient_on_ranks, 2, to_json(plan), num_parts)
    gradients = [each["default"]["gradient"] for each in results if each["default"]["gradient"] is not None]
    assert len(gradients) == 1
    assert 0.0 < plain < 0.05
    assert error(torch.from_numpy(gradients[0]), exact) < 1.5 * plain
    assert bool((torch.from_numpy(gradients[0]) == 0).eq(exact == 0).all()), "a gradient vanished on the way"
    # DLRM, D = 8, compression 2: each of the 6 fields leaves its group as 4 numbers of BF16.
    fields_of = [3, 3]  # of the towers (item, genres), (user) and (tags, shop), (words)
    for rank, each in enumerate(results):
        assert each["default"]["sent"]["inter-group all-to-all forward"] == BATCH // 2 * fields_of[rank] * 4 * 2
        assert each["default"]["sent"]["inter-group all-to-all backward"] == BATCH // 2 * fields_of[1 - rank] * 4 * 2
        assert each["int8"]["sent"]["inter-group all-to-all forward"] == BATCH // 2 * fields_of[rank] * (4 + 2)
        said = each["default"]["lines"]
        assert said["wire in a tower group"] == "fp32: 4 bytes a number, exact, gradients too"
        assert said["wire between towers"] == (
            "bf16, because numbers are computed in BF16: 2 bytes a number, exact, gradients too"
        )
        assert each["int8"]["lines"]["wire between towers"] == "int8: 1.5 bytes a number, rounded, gradients nearest"


def test_stochastic_gradients_are_said() -> None:
    wire = WireConfig(between_towers=WireFormat.BF16, backward_rounding=Rounding.STOCHASTIC)
    _, parallel = parallel_model(placed(1, Placement.TABLE_WISE, TOWERS, 1), wire)
    lines = rank_sections(parallel, overlaps=[], compute=torch.float32)["Ranks"]
    assert lines["wire between towers"] == "bf16: 2 bytes a number, rounded, gradients stochastic"


@pytest.mark.parametrize("kind", list(TowerModuleKind))
@pytest.mark.parametrize("field_dims", [(8,), (8, 8), (8, 6, 4)])
@pytest.mark.parametrize(("c", "p"), [(1, 0), (0, 2), (2, 1)])
def test_every_tower_of_a_model_computes_in_one_type(
    kind: TowerModuleKind, field_dims: tuple[int, ...], c: int, p: int
) -> None:
    """Members of a peer group send each other what they computed: all must compute the same type."""
    is_identity = kind is TowerModuleKind.IDENTITY
    shape = {} if is_identity else {"compression": 2.0, "c": c, "p": p}
    module = build_tower_module(TowerModuleConfig(kind=kind, **shape), field_dims=field_dims, dim=8, tower=0, seed=0)
    for rows in (0, 3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = module(torch.randn(rows, sum(field_dims), requires_grad=True))
        assert found.dtype == (torch.float32 if is_identity else torch.bfloat16)
