"""Averaged weights: the formula, evaluation with them, resume bit for bit, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.test_trainer import KillAt, KilledError, assert_same_weights
from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, TableOptimizerKind
from ziggurat.errors import ConfigError
from ziggurat.models import DLRMConfig, MLPConfig, Normalization, build_model
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.config import AverageOver, EarlyStopConfig, Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.step.weight_average import WeightAverage, weight_average
from ziggurat.training.trainer import Trainer

MODEL = DLRMConfig(
    embedding_dim=4,
    bottom=MLPConfig(hidden_dims=(8,)),
    top=MLPConfig(hidden_dims=(16,), dropout=0.1, normalization=Normalization.BATCH),
    embedding=EmbeddingConfig(optimizer=TableOptimizerKind.ADAM_DENSE),
)
CONFIG = TrainingConfig(
    epochs=4,
    learning_rate=0.05,
    weight_average=0.9,
    precision=Precision.FP32,
    checkpoint_every=5,
    early_stop=EarlyStopConfig(patience=3),
    loader=LoaderConfig(batch_size=64, shuffle_buffer_rows=200),
)


def make(folder: Path, *, kill: int = 0, config: TrainingConfig = CONFIG) -> Trainer:
    train = tiny_dataset(1000)
    model = build_model(MODEL, train.inputs, seed=3)
    progress = KillAt(kill) if kill else None
    return Trainer(model, config=config, train=train, valid=tiny_dataset(300, seed=1), folder=folder, progress=progress)


def test_the_average_is_the_formula() -> None:
    train = tiny_dataset(640)
    model = build_model(MODEL, train.inputs, seed=3)
    step = TrainStep(model, CONFIG)
    assert step.average is not None
    means = {name: tensor.clone().double() for name, tensor in model.state_dict().items()}
    for count, batch in enumerate(Loader(train, config=CONFIG.loader).batches(epoch=0)):
        step(batch)
        factor = min(0.9, (1 + count) / (10 + count))
        for name, tensor in model.state_dict().items():
            means[name] = factor * means[name] + (1 - factor) * tensor if tensor.is_floating_point() else tensor.clone()
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with step.average.in_place():
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor.double(), means[name].double(), rtol=1e-4, atol=1e-6)
    assert all(torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(step.average.mean[name], live[name]) for name in live)


def test_the_best_averaged_weights_are_kept(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    fit = trainer.fit()
    assert fit.best_value == trainer.evaluate(trainer.valid).metrics["auc"]
    plain = make(tmp_path / "plain", config=replace(CONFIG, weight_average=0.0))
    plain.fit()
    lines = (tmp_path / "metrics.jsonl").read_text(), (tmp_path / "plain" / "metrics.jsonl").read_text()
    assert lines[0] != lines[1]


@pytest.mark.parametrize("kill", [7, 16, 40])
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, kill: int) -> None:
    whole = make(tmp_path / "whole")
    expected = whole.fit()
    cut = make(tmp_path / "cut", kill=kill)
    with pytest.raises(KilledError):
        cut.fit()
    cut.store.wait()
    last = make(tmp_path / "cut")
    result = last.fit(resume=True)
    assert (result.best_step, result.best_value) == (expected.best_step, expected.best_value)
    assert_same_weights(last.model, whole.model)
    again = make(tmp_path / "cut")
    again.fit(resume=True)
    assert_same_weights(again.model, whole.model)


FUSED = replace(MODEL, embedding=EmbeddingConfig())


def test_of_fused_tables_the_rows_stay_and_a_checkpoint_has_them(tmp_path: Path) -> None:
    train = tiny_dataset(640)
    model = build_model(FUSED, train.inputs, seed=3)
    trainer = Trainer(model, config=replace(CONFIG, epochs=1), train=train, folder=tmp_path)
    for _ in trainer.steps():
        pass
    trainer.save()
    average = trainer.step.average
    assert average is not None
    live = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dense = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    assert set(average.mean) == dense & live.keys() < live.keys()
    saved = CheckpointStore(tmp_path / "checkpoints").load().tensors
    with average.in_place():
        for name, tensor in model.state_dict().items():
            assert torch.equal(saved[f"model.{name}"], tensor)
            assert name in dense or torch.equal(tensor, live[name])
        assert any(not torch.equal(tensor, live[name]) for name, tensor in model.state_dict().items())
    again = Trainer(
        build_model(FUSED, train.inputs, seed=9), config=replace(CONFIG, epochs=1), train=train, folder=tmp_path
    )
    again.restore()
    assert all(torch.equal(tensor, live[name]) for name, tensor in again.model.state_dict().items())


@pytest.mark.parametrize("model_config", [MODEL, FUSED])
def test_the_average_of_a_window_is_the_plain_mean_of_its_steps(tmp_path: Path, model_config: DLRMConfig) -> None:
    config = replace(CONFIG, weight_average=0.0, average_over=AverageOver.WINDOW, checkpoint_every=0)
    windows = [tiny_dataset(200, seed=seed) for seed in range(3)]
    model = build_model(model_config, windows[0].inputs, seed=3)
    trainer = Trainer(model, config=config, train=windows[0], folder=tmp_path)
    average = trainer.step.average
    assert average is not None
    with trainer.over_windows():
        for number, window in enumerate(windows, start=1):
            seen: list[dict[str, torch.Tensor]] = []
            for _ in trainer.steps(window, number=number):
                seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            assert len(seen) == 4
            for name, mean in average.mean.items():
                if mean.is_floating_point():
                    expected = torch.stack([state[name].double() for state in seen]).mean(0)
                    torch.testing.assert_close(mean.double(), expected, rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(mean, seen[-1][name])


def test_what_cannot_be_averaged_is_refused() -> None:
    train = tiny_dataset(64)
    model = build_model(MODEL, train.inputs, seed=0)
    with pytest.raises(ConfigError, match="many ranks"):
        weight_average(model, CONFIG, fused=False, is_spread=True)
    with pytest.raises(ConfigError, match="one average"):
        TrainingConfig(weight_average=0.9, average_over=AverageOver.WINDOW)
    with pytest.raises(ConfigError, match="from 0 to below 1"):
        TrainingConfig(weight_average=1.0)


@pytest.mark.parametrize("over", list(AverageOver))
def test_a_device_that_decides_itself_averages_alike(over: AverageOver) -> None:
    inputs = tiny_dataset(1).inputs
    one, other = (WeightAverage(build_model(MODEL, inputs, seed=3), decay=0.9, over=over) for _ in range(2))
    for step in range(12):
        for average in (one, other):
            for tensor in average.live.values():
                tensor.detach().add_(step + 1)
        one.update()
        other.update_where(torch.tensor(False))
        other.update_where(torch.tensor(True))
    assert one.count == other.count == 12
    for name, tensor in one.mean.items():
        torch.testing.assert_close(other.mean[name], tensor, rtol=1e-5, atol=1e-5)
