"""What begins anew in a window of data: the warm-up of the rate, and what row-wise Adagrad has summed up."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ziggurat as zg
from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, TableOptimizerKind
from ziggurat.errors import ConfigError
from ziggurat.models import DLRMConfig, MLPConfig, build_model
from ziggurat.training.config import Decay, Precision, ScheduleConfig, TrainingConfig
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.step.schedule import learning_rate_factor
from ziggurat.training.trainer import Trainer

MODEL = DLRMConfig(embedding_dim=4, bottom=MLPConfig(hidden_dims=(8,)), top=MLPConfig(hidden_dims=(8,)))
CONFIG = TrainingConfig(
    precision=Precision.FP32, log_every=1, loader=LoaderConfig(batch_size=50, shuffle_buffer_rows=200)
)
WINDOWS = [tiny_dataset(200, seed=seed) for seed in range(3)]


def trainer_in(folder: Path, config: TrainingConfig, *, model: DLRMConfig = MODEL) -> Trainer:
    return Trainer(build_model(model, WINDOWS[0].inputs, seed=3), config=config, train=WINDOWS[0], folder=folder)


class Rates(Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        assert made.line is not None
        self.found.append(float(made.line["lr"]) / trainer.config.learning_rate)  # type: ignore[arg-type]


def test_decays_without_an_end_are_their_formulas() -> None:
    def factors(decay: Decay, **settings: float) -> list[float]:
        config = ScheduleConfig(decay=decay, decay_steps=10, warmup_steps=4, **settings)  # type: ignore[arg-type]
        at = (0, 3, 4, 14, 34, 84)
        return [learning_rate_factor(config, step=step, total_steps=0, reductions=0, learning_rate=1.0) for step in at]

    assert factors(Decay.INVERSE_SQRT) == pytest.approx([0.25, 1.0, 1.0, math.sqrt(0.5), 0.5, 1 / 3])
    assert factors(Decay.HALVING) == pytest.approx([0.25, 1.0, 1.0, 0.5, 0.125, 2.0**-8])
    assert factors(Decay.HALVING, final_factor=0.2) == pytest.approx([0.25, 1.0, 1.0, 0.6, 0.3, 0.2 + 0.8 * 2.0**-8])


def test_every_window_but_the_first_warms_up_again_also_when_it_is_resumed_inside(tmp_path: Path) -> None:
    schedule = ScheduleConfig(warmup_steps=2, rewarm_steps=3)
    config = replace(CONFIG, schedule=schedule)
    expected = [1 / 2, 1, 1, 1, *[1 / 3, 2 / 3, 1, 1] * 2]
    rates = Rates()
    trainer = trainer_in(tmp_path / "whole", config)
    with trainer.over_windows(hooks=[rates]):
        for number, window in enumerate(WINDOWS, start=1):
            for _ in trainer.steps(window, number=number):
                pass
    assert rates.found == pytest.approx(expected)
    rates = Rates()
    trainer = trainer_in(tmp_path / "cut", config)
    with trainer.over_windows(hooks=[rates]):
        for _ in trainer.steps(WINDOWS[0], number=1):
            pass
        for made in trainer.steps(WINDOWS[1], number=2):
            if made.step == 5:
                trainer.save()
                break
    again = trainer_in(tmp_path / "cut", config)
    assert again.restore()
    with again.over_windows(hooks=[rates]):
        for number in (2, 3):
            for _ in again.steps(WINDOWS[number - 1], number=number):
                pass
    assert rates.found == pytest.approx(expected)


def test_adagrad_forgets_a_share_once_a_window(tmp_path: Path) -> None:
    config = replace(CONFIG, forget=0.75)
    trainer = trainer_in(tmp_path / "run", config)

    def sums() -> dict[str, torch.Tensor]:
        assert trainer.step.table_optimizer is not None
        state = trainer.step.table_optimizer.state_dict()
        return {name: value.clone() for name, value in state.items() if name.endswith(".sum")}

    with trainer.over_windows():
        for number, window in enumerate(WINDOWS[:2], start=1):
            before = sums()
            steps = trainer.steps(window, number=number)
            next(steps)
            after = sums()
            for name, value in before.items():
                kept = value * (1.0 if number == 1 else 0.25)
                untouched = after[name] == kept
                assert untouched.any() or number == 1
                assert bool((after[name] >= kept).all())
            # The begin of a window that is resumed inside was made before its checkpoint.
            trainer.save()
            trainer.store.wait()
            if number == 2:
                again = trainer_in(tmp_path / "run", config)
                again.restore()
                again._take(window, valid=None, number=2)
                again._stand()
                assert again.step.table_optimizer is not None
                state = again.step.table_optimizer.state_dict()
                assert all(torch.equal(state[name], value) for name, value in after.items())
            for _ in steps:
                pass


def test_what_has_no_sums_or_no_second_window_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("polars", reason="a whole run has a source of rows")
    for kind in (TableOptimizerKind.SGD, TableOptimizerKind.SPARSE_ADAM, TableOptimizerKind.ADAM_DENSE):
        model = replace(MODEL, embedding=EmbeddingConfig(optimizer=kind))
        with pytest.raises(ConfigError, match="rowwise_adagrad"):
            trainer_in(tmp_path / kind.value, replace(CONFIG, forget=0.5), model=model)
    frame = {"user": ["ann", "bob"] * 200, "bought": [1, 0, 0, 1] * 100}
    run = zg.table_run(zg.LogisticRegressionConfig(), zg.inspect_file(frame).schema)
    for training in (
        replace(run.training, forget=0.5),
        replace(run.training, schedule=replace(run.training.schedule, rewarm_steps=5)),
    ):
        with pytest.raises(ConfigError, match="batch run has one"):
            zg.train_run(replace(run, training=training), folder=tmp_path / "batch", data=frame)
