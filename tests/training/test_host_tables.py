"""Runs whose tables lie on the host: the bits of tables on the device, and steps that nobody waits for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tests.training.test_late_steps import MODEL, _Listed, settings
from tests.training.tiny import tiny_dataset, tiny_inputs
from ziggurat.embeddings import EmbeddingConfig, KernelChoice, TableOptimizer
from ziggurat.embeddings.storage.host import HostStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import BoundsError
from ziggurat.features.batch import Batch
from ziggurat.models import DNNConfig, ModelConfig, build_model
from ziggurat.models.contract.model import Model
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.pretend_queues import record_waits
from ziggurat.training.config import NonFinite
from ziggurat.training.feed import Feed
from ziggurat.training.step.results import LateResult
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.trainer import Trainer

CPU = torch.device("cpu")


def model_on(device: torch.device, *, num_places: int, config: ModelConfig = MODEL, inputs: object = None) -> Model:
    """A model with tables on the device (0 places), or on the host."""
    tables = TablesConfig(device_memory="10%") if num_places else TablesConfig()
    found = inputs or tiny_inputs()
    model = build_model(config, found, seed=0, draw_tables=False, make_storage=tables.make_storage(seed=0))  # type: ignore[arg-type]
    model = model.to(device)
    model.embeddings.tables.draw(0)
    for storage in model.embeddings.tables.in_host:
        storage.num_places = num_places
    return model


def run(device: torch.device, folder: Path, *, num_places: int, kind: TableOptimizerKind, clip: float) -> Trainer:
    config = dataclasses.replace(MODEL, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=kind))
    model = model_on(device, num_places=num_places, config=config)
    changes = {"non_finite": NonFinite.SKIP, "epochs": 3, "log_every": 2, "evaluate_every": 3, "clip_norm": clip}
    valid = tiny_dataset(40, seed=1)
    trainer = Trainer(
        model, config=settings(**changes), train=tiny_dataset(120, nan_row=70), valid=valid, folder=folder
    )
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("kind", "clip"), [(TableOptimizerKind.ROWWISE_ADAGRAD, 0.0), (TableOptimizerKind.SPARSE_ADAM, 0.2)]
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_run_with_tables_on_the_host_is_that_of_tables_on_the_device(
    kind: TableOptimizerKind, clip: float, on_gpu: bool, tmp_path: Path
) -> None:
    def both(device: torch.device) -> list[dict[str, torch.Tensor]]:
        found = []
        for places in (0, 32):
            trainer = run(device, tmp_path / str(places), num_places=places, kind=kind, clip=clip)
            assert trainer.step.waits == ("" if on_gpu else "the CPU computes")
            model, optimizer = trainer.model, trainer.step.table_optimizer
            assert isinstance(optimizer, TableOptimizer)
            tables = model.embeddings.tables
            state = {name: tables.view(name).cpu() for name in tables.places}
            state |= {key: rows.read(0, rows.num_rows).cpu() for key, rows in optimizer.state_rows().items()}
            dense = {name: value.cpu() for name, value in model.named_parameters()}
            found.append(state | dense | {"steps": torch.tensor(optimizer.num_steps)})
        return found

    if on_gpu:
        with pretend_cuda() as cuda:
            device, host = both(cuda)
    else:
        device, host = both(CPU)
    assert device.keys() == host.keys()
    for name, value in device.items():
        assert torch.equal(value, host[name]), name
    logs = [[json.loads(each) for each in (tmp_path / str(n) / "metrics.jsonl").open()] for n in (0, 32)]
    for one, other in zip(*logs, strict=True):
        assert {k: v for k, v in one.items() if k != "timing"} == {k: v for k, v in other.items() if k != "timing"}
    rates = [each["timing"]["device_hit_rate"] for each in logs[1] if "device_hit_rate" in each.get("timing", {})]
    assert rates
    assert 0 < max(rates) <= 1


def test_no_step_waits_once_its_batch_was_announced() -> None:
    inputs = small_inputs(num_jagged=2)
    config = DNNConfig(embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
    with pretend_cuda() as cuda:
        model = model_on(cuda, num_places=32, config=config, inputs=inputs)
        model.train()
        step = TrainStep(model, settings())
        assert step.waits == ""
        storage = model.embeddings.tables.storage(0)
        assert isinstance(storage, HostStorage)
        batches = [random_batch(inputs, 9, seed=seed) for seed in range(8)]
        feed = Feed(_Listed(batches), config=settings(), rank=0, world_size=1, gather=lambda said: [said])
        made: list[LateResult] = []
        with record_waits() as waits:
            for fed in feed.epoch(device=cuda, empty=Batch.empty(inputs)):
                result = step(fed.batch, upcoming=fed.upcoming)
                assert isinstance(result, LateResult)
                made.append(result)
                if len(made) == 2:
                    waits.clear()
                if len(made) > 1:
                    assert made[-2].read().finite
        assert waits == []
        found = storage.facts()
        assert 0 < found.hits < found.rows, "rows came and went"


def test_a_row_that_nobody_announced_changes_nothing_and_is_told_a_step_later() -> None:
    inputs = tiny_inputs()
    with pretend_cuda() as cuda:
        model = model_on(cuda, num_places=32)
        step = TrainStep(model, settings())
        batch = random_batch(inputs, 4, seed=0)
        assert step(batch.to(cuda)).finite
        before = {name: value.cpu() for name, value in model.named_parameters()}
        begun = batch.to(cuda)
        model.embeddings.begin(begun)
        model.embeddings.begin = lambda batch: None  # type: ignore[method-assign]
        rows = model.embeddings.tables.storage(0)
        assert isinstance(rows, HostStorage)
        rows.held.map.index_fill_(0, begun.single[0], -1)
        late = step(begun)
        assert all(torch.equal(value.cpu(), before[name]) for name, value in model.named_parameters())
        with pytest.raises(BoundsError, match=r"--tables\.device-memory ''"):
            assert late.finite
