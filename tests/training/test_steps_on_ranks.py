"""TrainStep on ranks: precisions, parts, optimizers, and models that one device has no trouble with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.models.own_model import OwnConfig
from tests.parallel.test_parity import TOWERS, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.models import DLRMConfig, MLPConfig, ModelConfig, build_model
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, Towers
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint import CheckpointStore, Match
from ziggurat.training.config import DenseOptimizer, Precision, TrainingConfig
from ziggurat.training.state import snapshot_tensors
from ziggurat.training.step.train_step import TrainStep

SIZE = 16
TABLES = EmbeddingConfig(kernel=KernelChoice.TORCH)
MLP = MLPConfig(hidden_dims=(7,))
DLRM = DLRMConfig(embedding_dim=8, bottom=MLP, top=MLP, embedding=TABLES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """How to train two steps."""

    dense: DenseParallelism = DenseParallelism.DDP
    num_parts: int = 1
    precision: Precision = Precision.FP32
    optimizer: DenseOptimizer = DenseOptimizer.SGD


def two_steps(model_config: ModelConfig, way: Way, plan: Plan | None, *, towers: Towers | None = None) -> Any:
    """Losses, and the dense weights after the second step; on one device without a plan."""
    model = build_model(model_config, inputs(), seed=3, towers=towers)
    parallel, rank, world = None, 0, 1
    if plan is not None:
        topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=2)
        settings = ParallelConfig(dense=way.dense, num_parts=way.num_parts)
        parallel, rank, world = parallelize(model, plan, topology, config=settings), topology.rank, plan.world_size
    config = TrainingConfig(
        precision=way.precision,
        optimizer=way.optimizer,
        learning_rate=0.05,
        table_learning_rate=0.05,
        clip_norm=0.0,
        loader=LoaderConfig(batch_size=SIZE // world),
    )
    step = TrainStep(model, config, parallel=parallel)
    losses = []
    for seed in range(2):
        batch = random_batch(inputs(), SIZE, seed=seed)
        losses.append(step(batch.rows(rank * SIZE // world, (rank + 1) * SIZE // world)).loss)
    weights = {}
    for name, weight in model.named_parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        weights[name] = whole.detach().numpy().copy()
    return losses, weights


def on_ranks(rank: int, plan: Any, cases: list[Any]) -> Any:
    del rank
    models = {"dlrm": DLRM, "own": OwnConfig(embedding=TABLES)}
    results = []
    for name, way, towers in cases:
        groups = TOWERS if towers else None
        results.append(
            two_steps(
                models[name], from_json(Way, way, where="test"), from_json(Plan, plan, where="test"), towers=groups
            )
        )
    return results


def run(plan: Plan, *cases: tuple[str, Way, bool]) -> list[Any]:
    """What the first rank found, for each case."""
    return run_ranks(on_ranks, plan.world_size, to_json(plan), [(n, to_json(way), t) for n, way, t in cases])[0]


def assert_close(found: Any, wanted: Any, *, limit: float = 2e-6) -> None:
    np.testing.assert_allclose(found[0], wanted[0], rtol=limit, atol=limit)
    for name, weight in found[1].items():
        np.testing.assert_allclose(weight, wanted[1][name], rtol=limit, atol=limit, err_msg=name)


def test_sharded_weights_in_bf16_and_parts_are_those_of_one_part():
    """Autocast must not keep the first part's weights for the second, whose weights FSDP gathers anew."""
    ways = [
        Way(dense=dense, num_parts=parts, precision=Precision.BF16)
        for dense in (DenseParallelism.FSDP, DenseParallelism.HSDP)
        for parts in (1, 2)
    ]
    found = run(placed(4, Placement.TABLE_WISE), *(("dlrm", way, False) for way in ways))
    one_device = two_steps(DLRM, Way(precision=Precision.BF16), None)
    for result in found:
        assert_close(result, one_device, limit=2e-3)


def test_all_optimizers_with_sharded_weights():
    ways = [Way(dense=DenseParallelism.FSDP, optimizer=optimizer) for optimizer in DenseOptimizer]
    found = run(placed(2, Placement.TABLE_WISE), *(("dlrm", way, False) for way in ways))
    for way, result in zip(ways, found, strict=True):
        assert_close(result, two_steps(DLRM, way, None), limit=1e-5)


def test_one_rank_in_parts_divides_by_the_weight_of_the_batch():
    (found,) = run(placed(1, Placement.TABLE_WISE), ("dlrm", Way(num_parts=3), False))
    assert_close(found, two_steps(DLRM, Way(), None))


def test_an_own_model_with_weights_that_no_sample_uses():
    """Its towers, its loss, a weight of its own and one without any gradient, replicated, sharded and in parts."""
    own = OwnConfig(embedding=TABLES)
    cases = [
        ("own", Way(dense=dense, num_parts=parts), towers)
        for dense, parts in ((DenseParallelism.DDP, 1), (DenseParallelism.DDP, 2), (DenseParallelism.FSDP, 1))
        for towers in (False, True)
    ]
    flat, towers = (two_steps(own, Way(), None, towers=groups) for groups in (None, TOWERS))
    found = run(placed(4, Placement.TABLE_WISE, TOWERS, 2), *cases)
    for (_, _, has_towers), result in zip(cases, found, strict=True):
        assert_close(result, towers if has_towers else flat)


def save_and_load_after_evaluations(rank: int, dense: str, folder: str) -> None:
    """Runs on every rank: weights are saved, loaded and trained where an evaluation has left them gathered."""
    topology = Topology.create(ranks_per_host=2)
    model = build_model(OwnConfig(embedding=TABLES), inputs(), seed=3)
    settings = ParallelConfig(dense=DenseParallelism(dense))
    parallel = parallelize(model, placed(2, Placement.TABLE_WISE), topology, config=settings)
    batch = random_batch(inputs(), 5, seed=rank)
    with torch.no_grad():
        first = model(batch).clone()
    step = TrainStep(model, TrainingConfig(precision=Precision.FP32), parallel=parallel)
    parts = {name: weight.detach() for name, weight in step.dense_named.items()}
    assert all(isinstance(part, DTensor) for part in parts.values())
    saved = {name: part.to_local().clone() for name, part in parts.items() if isinstance(part, DTensor)}
    store = CheckpointStore(folder)
    with torch.no_grad():
        assert torch.equal(model(batch), first)
    store.save(1, tensors=snapshot_tensors(step), state={})
    assert step(batch).finite
    with torch.no_grad():
        assert not torch.equal(model(batch), first)
    store.load(1, into={f"model.{name}": weight for name, weight in model.state_dict().items()}, match=Match.SUBSET)
    for name, part in parts.items():
        assert isinstance(part, DTensor)
        assert torch.equal(part.to_local(), saved[name]), name
    with torch.no_grad():
        assert torch.equal(model(batch), first)


@pytest.mark.parametrize("dense", ["fsdp", "hsdp"])
def test_weights_that_an_evaluation_has_gathered_are_saved_loaded_and_trained(tmp_path: Path, dense: str):
    """Weights of the model itself, beside those of its layers."""
    run_ranks(save_and_load_after_evaluations, 2, dense, str(tmp_path))


def test_a_loss_weight_that_is_not_the_losses_is_refused():
    """Denominators travel ahead of the loss: they must be what the loss divides by."""
    assert run_ranks(wrong_weight, 1) == ["make the loss a method of the model, and override loss_weight beside it"]


def wrong_weight(rank: int) -> str:
    del rank
    try:
        two_steps(OwnConfig(embedding=TABLES, scale=2.0), Way(num_parts=2), placed(1, Placement.TABLE_WISE))
    except Exception as error:
        return str(error.ways_out[0])  # type: ignore[attr-defined]
    return ""


def test_own_models_compile_and_train_on_one_device():
    wanted = two_steps(OwnConfig(embedding=TABLES), Way(), None)
    assert wanted[0][1] < wanted[0][0] + 1.0
    assert torch.isfinite(torch.tensor(wanted[0])).all()
