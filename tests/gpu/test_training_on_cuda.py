"""Training on a GPU that is there: what `tests/training/test_late_steps.py` shows on one that is pretended.

Needs torch, pyarrow, numpy, jaxtyping and safetensors: neither polars nor FBGEMM, no compiled kernels, no data
(`make test-gpu`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training.test_late_steps import CLICK_MODELS, CPU, MODEL, settings
from tests.training.tiny import tiny_dataset, tiny_inputs
from ziggurat.embeddings import EmbeddingConfig, KernelChoice, TableOptimizerKind
from ziggurat.embeddings.config import InitialDraw, TableInit
from ziggurat.embeddings.counted_rows import counted_rows
from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.errors import BoundsError
from ziggurat.models import ModelConfig, build_model
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.config import NonFinite
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.trainer import Trainer
from ziggurat.training.upload import Upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Inside, torch raises where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("config", CLICK_MODELS, ids=lambda config: config.kind)
@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.AUTO])
def test_steps_equal_the_cpus_and_never_wait(config: ModelConfig, kernel: KernelChoice) -> None:
    inputs, cuda = small_inputs(num_jagged=2, num_labels=2), torch.device("cuda", 0)
    batches = [random_batch(inputs, 33, seed=seed) for seed in range(6)]
    losses, weights = [], []
    for device in (CPU, cuda):
        chosen = EmbeddingConfig(kernel=kernel if device.type == "cuda" else KernelChoice.TORCH)
        model = build_model(dataclasses.replace(config, embedding=chosen), inputs, seed=0, draw_tables=False)  # pyright: ignore
        model.to(device).embeddings.tables.draw(0)
        model.eval()  # without dropout, whose generators differ
        step = TrainStep(model, settings(clip_norm=1.0))
        upload = Upload(device, is_beside=True)
        results = [step(upload.start(batch)()) for batch in batches[:3]]
        torch.cuda.synchronize()
        with no_waits():
            results += [step(upload.start(batch)()) for batch in batches[3:]]
        losses.append([result.loss for result in results])
        weights.append({name: value.cpu() for name, value in model.state_dict().items()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", list(TableOptimizerKind))
def test_a_run_is_resumed_on_the_gpu_and_back(kind: TableOptimizerKind, tmp_path: Path) -> None:
    def trainer(folder: str, device: str, max_steps: int) -> Trainer:
        tables = EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=kind)
        model = build_model(dataclasses.replace(MODEL, embedding=tables), tiny_inputs(), seed=0).to(device)
        config = settings(max_steps=max_steps, epochs=9, clip_norm=0.5, non_finite=NonFinite.SKIP)
        data = {"train": tiny_dataset(200, nan_row=70), "valid": tiny_dataset(64, seed=1)}
        return Trainer(model, config=config, folder=tmp_path / folder, **data)

    whole = trainer("cpu", "cpu", 12)
    whole.fit()
    for step, device in ((4, "cpu"), (9, "cuda"), (12, "cpu")):
        moving = trainer("moving", device, step)
        moving.fit(resume=step > 4)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(moving.model.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)
    logs = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("cpu", "moving")
    ]
    losses = [[line["loss"] for line in log if line["kind"] == "train"] for log in logs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert moving.position.skipped == whole.position.skipped > 0


def test_the_same_steps_give_the_same_bits() -> None:
    inputs = small_inputs(num_jagged=2)
    found = []
    for _ in range(2):
        config = dataclasses.replace(MODEL, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
        model = build_model(config, inputs, seed=0).to("cuda")
        step = TrainStep(model, settings())
        for seed in range(5):
            step(random_batch(inputs, 500, seed=seed).to("cuda"))
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


def test_a_row_outside_its_table_does_not_stop_the_device() -> None:
    inputs = small_inputs()
    model = build_model(MODEL, inputs, seed=0).to("cuda")
    step, batch = TrainStep(model, settings()), random_batch(inputs, 9)
    single = batch.single.clone()
    single[0, 4] = 1 << 40
    with pytest.raises(BoundsError, match="sample 4"):
        step(dataclasses.replace(batch, single=single).to("cuda")).read()
    assert step(batch.to("cuda")).finite


@pytest.mark.parametrize("init", list(TableInit))
def test_initial_rows_have_the_bits_of_the_cpu(init: TableInit) -> None:
    config = EmbeddingConfig(init=init, init_draw=InitialDraw.ROWS)
    initial = InitialRows(table="user", shape=(1_000_000, 24), config=config, seed=3)
    rows = torch.cat([torch.arange(5000), torch.arange(990_000, 1_000_000)])
    assert torch.equal(counted_rows(initial, rows.cuda()).cpu(), initial.take(rows))
