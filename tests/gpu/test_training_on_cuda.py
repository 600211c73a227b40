"""Training on a GPU that is there: what `tests/training/test_late_steps.py` shows on one that is pretended.

Needs torch, pyarrow, numpy, jaxtyping and safetensors: neither polars nor FBGEMM, no compiled kernels, no data
(`make test-gpu`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
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
from ziggurat.models import AFNConfig, ModelConfig, build_model
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.rounding import move_by_units
from ziggurat.training.config import NonFinite
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.trainer import Trainer
from ziggurat.training.upload import Upload

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]
# Each test has a twin on the CPU, which runs with the versions of GPU machines, too (`make test-bare`).
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(torch.device("cuda", 0), id="cuda", marks=on_a_gpu),
]

# But AFN, whose ln |x| has the derivative 1 / x: with small numbers in tables roundings grow until no batches are calm.
CALM_MODELS = tuple(config for config in CLICK_MODELS if not isinstance(config, AFNConfig))


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Inside, torch raises where the host waits for the GPU; nothing on the CPU."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True)
class Trained:
    """Losses and weights of six steps."""

    losses: torch.Tensor
    weights: dict[str, torch.Tensor]

    def apart(self, other: Trained) -> tuple[float, float]:
        """Return the largest differences: of losses, relative, and of weights."""
        weights = max(float((other.weights[name] - value).abs().max()) for name, value in self.weights.items())
        return float(((other.losses - self.losses) / self.losses).abs().max()), weights


def six_steps(
    config: ModelConfig,
    device: torch.device,
    *,
    first_seed: int,
    kernel: KernelChoice = KernelChoice.TORCH,
    moved: tuple[int, int] = (0, 0),
) -> Trained:
    """Train a model for six steps on a device.

    Args:
        config: of the model.
        device: to train on.
        first_seed: of the six batches.
        kernel: of its tables.
        moved: seed and units in the last place by which all weights are moved before.
    """
    inputs = small_inputs(num_jagged=2, num_labels=2)
    batches = [random_batch(inputs, 33, seed=first_seed + number) for number in range(6)]
    chosen = dataclasses.replace(config, embedding=EmbeddingConfig(kernel=kernel))  # pyright: ignore
    model = build_model(chosen, inputs, seed=0, draw_tables=False).to(device)
    model.embeddings.tables.draw(0)
    move_by_units(model, seed=moved[0], units=moved[1])
    model.eval()  # without dropout, whose generators differ
    step = TrainStep(model, settings(clip_norm=1.0))
    upload = Upload(device, is_beside=device.type == "cuda")
    results = [step(upload.start(batch)()) for batch in batches[:3]]
    with no_waits(device):
        results += [step(upload.start(batch)()) for batch in batches[3:]]
    numbers = {name: value.cpu() for name, value in model.state_dict().items() if value.is_floating_point()}
    return Trained(torch.tensor([float(result.loss) for result in results]), numbers)


@functools.cache
def calm_steps(config: ModelConfig) -> tuple[int, Trained, float, float]:
    """Return batches on which rounding stays rounding: their first seed, the CPU's steps, and how far rounding is seen.

    A ReLU whose input lies within rounding of zero has another derivative on another device, and Adam's first updates
    have the size of the learning rate however small a gradient is: with the first batches, weights of Wukong that are
    moved by one unit in the last place are 1e-2 apart after six steps, on one CPU. So batches are taken on which runs
    whose weights were moved by 8 units, more than a device rounds, stay together.
    """
    for first_seed in range(0, 600, 6):
        plain = six_steps(config, CPU, first_seed=first_seed)
        apart = []
        for seed in range(3):
            apart.append(plain.apart(six_steps(config, CPU, first_seed=first_seed, moved=(seed, 8))))
            if apart[-1][0] > 1e-5 or apart[-1][1] > 1e-3:
                break
        else:
            losses, weights = (max(each) for each in zip(*apart, strict=True))
            return first_seed, plain, losses, weights
    raise AssertionError(f"no batches on which {config.kind} is calm")


@pytest.mark.parametrize("config", CALM_MODELS, ids=lambda config: config.kind)
@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.AUTO])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_equal_the_cpus_and_never_wait(config: ModelConfig, kernel: KernelChoice, device: torch.device) -> None:
    """The twin on the CPU trains weights that were moved by one unit, as a device does that rounds otherwise."""
    if device.type == "cpu" and kernel is not KernelChoice.TORCH:
        pytest.skip("kernels of the CPU have tests of their own")
    first_seed, plain, losses, weights = calm_steps(config)
    moved = (99, 1) if device.type == "cpu" else (0, 0)
    found = plain.apart(six_steps(config, device, first_seed=first_seed, kernel=kernel, moved=moved))
    assert found[0] <= 2 * losses + 1e-6
    assert found[1] <= 2 * weights + 1e-5


@pytest.mark.parametrize("kind", list(TableOptimizerKind))
@pytest.mark.parametrize("device", DEVICES)
def test_a_run_is_resumed_on_the_gpu_and_back(kind: TableOptimizerKind, device: torch.device, tmp_path: Path) -> None:
    """Rounding is measured, not guessed: runs whose weights were moved by 8 units say how far apart two devices may be.

    Nothing is validated: a run that stops evaluates where the whole one does not, and with equal metrics its `fit`
    would leave the weights of an earlier step.
    """

    def trainer(folder: str, place: torch.device, max_steps: int, *, moved: tuple[int, int] = (0, 0)) -> Trainer:
        tables = EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=kind)
        model = build_model(dataclasses.replace(MODEL, embedding=tables), tiny_inputs(), seed=0).to(place)
        move_by_units(model, seed=moved[0], units=moved[1])
        config = settings(max_steps=max_steps, epochs=9, clip_norm=0.5, non_finite=NonFinite.SKIP)
        return Trainer(model, config=config, folder=tmp_path / folder, train=tiny_dataset(200, nan_row=70))

    def found(folder: str, made: Trainer) -> Trained:
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        losses = torch.tensor([line["loss"] for line in lines if line["kind"] == "train"])
        values = {name: each.cpu() for name, each in made.model.state_dict().items() if each.is_floating_point()}
        return Trained(losses, values)

    whole = trainer("whole", CPU, 12)
    whole.fit()
    plain = found("whole", whole)
    for step, place in ((4, CPU), (9, device), (12, CPU)):
        moving = trainer("moving", place, step)
        moving.fit(resume=step > 4)
    noise = []
    for seed in range(3):
        other = trainer(f"noise{seed}", CPU, 12, moved=(seed, 8))
        other.fit()
        noise.append(plain.apart(found(f"noise{seed}", other)))
    losses, weights = (max(each) for each in zip(*noise, strict=True))
    apart = plain.apart(found("moving", moving))
    assert apart[0] <= 2 * losses + 1e-6
    assert apart[1] <= 2 * weights + 1e-5
    assert losses < 1e-3  # or the comparison says nothing
    assert moving.position.skipped == whole.position.skipped > 0
    if device.type == "cpu":
        assert apart == (0.0, 0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_steps_give_the_same_bits(device: torch.device) -> None:
    inputs = small_inputs(num_jagged=2)
    found = []
    for _ in range(2):
        config = dataclasses.replace(MODEL, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
        model = build_model(config, inputs, seed=0).to(device)
        step = TrainStep(model, settings())
        for seed in range(5):
            step(random_batch(inputs, 500, seed=seed).to(device))
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_outside_its_table_does_not_stop_the_device(device: torch.device) -> None:
    inputs = small_inputs()
    model = build_model(MODEL, inputs, seed=0).to(device)
    step, batch = TrainStep(model, settings()), random_batch(inputs, 9)
    single = batch.single.clone()
    single[0, 4] = 1 << 40
    with pytest.raises(BoundsError, match="sample 4"):
        step(dataclasses.replace(batch, single=single).to(device)).read()
    assert step(batch.to(device)).finite


@pytest.mark.parametrize("init", list(TableInit))
@pytest.mark.parametrize("device", DEVICES)
def test_initial_rows_have_the_bits_of_the_cpu(init: TableInit, device: torch.device) -> None:
    config = EmbeddingConfig(init=init, init_draw=InitialDraw.ROWS)
    initial = InitialRows(table="user", shape=(1_000_000, 24), config=config, seed=3)
    rows = torch.cat([torch.arange(5000), torch.arange(990_000, 1_000_000)])
    assert torch.equal(counted_rows(initial, rows.to(device)).cpu(), initial.take(rows))
