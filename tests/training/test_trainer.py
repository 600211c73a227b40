"""The trainer learns, resumes bit for bit, stops early with the best weights, and survives NaN."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.errors import CheckpointError, ConfigError, FileError, NumericsError
from ziggurat.models import DCNv2Config, DLRMConfig, MLPConfig, RankingModel, build_model
from ziggurat.training.checkpoint import CheckpointConfig
from ziggurat.training.config import (
    Better,
    Decay,
    EarlyStopConfig,
    NonFinite,
    Precision,
    ScheduleConfig,
    TrainingConfig,
)
from ziggurat.training.metrics.accumulator import MetricFunction
from ziggurat.training.records.log import MetricsFile
from ziggurat.training.report.progress import NoProgress
from ziggurat.training.trainer import FitResult, Trainer

SMALL = DLRMConfig(
    embedding_dim=8,
    bottom=MLPConfig(hidden_dims=(16,)),
    top=MLPConfig(hidden_dims=(32,), dropout=0.1),
)
CONFIG = TrainingConfig(
    epochs=3,
    learning_rate=0.01,
    table_learning_rate=0.1,
    precision=Precision.FP32,
    log_every=7,
    checkpoint_every=5,
    loader=LoaderConfig(batch_size=64, shuffle_buffer_rows=200),
    checkpoint=CheckpointConfig(keep=2),
)


class KilledError(Exception):
    """Stands for kill -9 inside one process."""


class KillAt(NoProgress):
    """Raises at the n-th progress update, which comes right after a training step."""

    def __init__(self, updates: int) -> None:
        self.left = updates

    def update(self, done: int, *, note: str = "") -> None:
        self.left -= 1
        if self.left == 0:
            raise KilledError


class Phases(NoProgress):
    """Keeps the name of each phase that was shown, once for each run of updates under it."""

    def __init__(self) -> None:
        self.what = ""
        self.shown: list[str] = []

    def begin(self, what: str, *, total: int | None) -> None:
        del total
        self.what = what

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        del done, note, total
        if self.shown[-1:] != [self.what]:
            self.shown.append(self.what)


def make(
    folder: Path,
    *,
    config: TrainingConfig = CONFIG,
    train: MemoryDataset | None = None,
    kill: int = 0,
    metrics: dict[str, MetricFunction] | None = None,
) -> Trainer:
    train = train or tiny_dataset(1000)
    model = build_model(SMALL, train.inputs, seed=3)
    progress = KillAt(kill) if kill else None
    valid = tiny_dataset(300, seed=1)
    return Trainer(model, config=config, train=train, valid=valid, folder=folder, progress=progress, metrics=metrics)


def log_of(folder: Path) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if name != "timing"} for record in records]


def assert_same_weights(one: RankingModel, two: RankingModel) -> None:
    left, right = one.state_dict(), two.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_learns_and_writes_its_log(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    before = trainer.evaluate(trainer.valid).metrics["auc"]
    result = trainer.fit()
    after = trainer.evaluate(trainer.valid, split="valid").metrics["auc"]
    assert after > max(0.75, before + 0.1)
    assert result.steps == 3 * 16
    kinds = [record["kind"] for record in log_of(tmp_path)]
    assert kinds.count("valid") == 3
    assert kinds.count("train") == 48 // 7
    assert json.loads((tmp_path / "evaluations" / "valid.json").read_text())["metrics"]["auc"] == after


@pytest.mark.parametrize("validates", [True, False])
def test_each_epoch_is_shown_by_its_number(validates: bool, tmp_path: Path) -> None:
    train = tiny_dataset(1000)
    phases = Phases()
    valid = tiny_dataset(300, seed=1) if validates else None
    model = build_model(SMALL, train.inputs, seed=3)
    Trainer(model, config=CONFIG, train=train, valid=valid, folder=tmp_path, progress=phases).fit()
    epochs = [each for each in phases.shown if each.startswith("epoch")]
    assert list(dict.fromkeys(epochs)) == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    steps_of_epoch = phases.shown.index("epoch 2/3")
    assert "epoch 1/3" not in phases.shown[steps_of_epoch:]


@pytest.mark.parametrize("kills", [(1,), (16,), (17, 33), (5, 6, 40), (47,), (48,)])
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, kills: tuple[int, ...]) -> None:
    whole = make(tmp_path / "whole")
    expected = whole.fit()
    done = 0
    for kill in kills:
        trainer = make(tmp_path / "cut", kill=kill - done)
        with pytest.raises(KilledError):
            trainer.fit(resume=(tmp_path / "cut").exists())
        trainer.store.wait()
        done = max(trainer.store.steps(), default=0)
    last = make(tmp_path / "cut")
    result = last.fit(resume=True)
    assert (result.steps, result.best_step, result.best_value) == (
        expected.steps,
        expected.best_step,
        expected.best_value,
    )
    assert_same_weights(last.model, whole.model)
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    assert (tmp_path / "cut" / "ledger.bin").read_bytes() == (tmp_path / "whole" / "ledger.bin").read_bytes()


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.fit()
    again = make(tmp_path)
    result = again.fit(resume=True)
    assert result.steps == 48
    assert result.samples_per_s == 0
    assert_same_weights(first.model, again.model)


def test_more_epochs_go_on_where_the_run_ended(tmp_path: Path) -> None:
    make(tmp_path / "two", config=replace(CONFIG, epochs=2)).fit()
    longer = make(tmp_path / "two")
    longer.fit(resume=True)
    whole = make(tmp_path / "whole")
    whole.fit()
    assert log_of(tmp_path / "two") == log_of(tmp_path / "whole")
    assert_same_weights(longer.model, whole.model)


def test_an_end_between_evaluations_takes_no_tie_from_the_run_that_goes_on(tmp_path: Path) -> None:
    """All metrics are equal: the best evaluation is the first of a run that is never stopped, and of no other."""
    metrics = {"same": lambda scores, labels, weights: 0.5}
    stop = EarlyStopConfig(metric="same", better=Better.HIGHER, patience=0)
    config = replace(CONFIG, epochs=1, evaluate_every=8, early_stop=stop, checkpoint=CheckpointConfig(keep=0))
    whole = make(tmp_path / "whole", config=config, metrics=metrics)
    assert whole.fit().best_step == 8
    best = []
    for end in (4, 11, 0):
        stopped = make(tmp_path / "stopped", config=replace(config, max_steps=end), metrics=metrics)
        best.append(stopped.fit(resume=bool(best)).best_step)
    assert best == [4, 8, 8]
    assert_same_weights(stopped.model, whole.model)
    assert [each["step"] for each in stopped.position.evaluations] == [4, 8, 11, 16]


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    whole.fit()
    cut = make(tmp_path / "cut", kill=23)
    with pytest.raises(KilledError):
        cut.fit()
    cut.store.wait()
    newest = max((tmp_path / "cut" / "checkpoints").glob("*/*.safetensors"))
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    newest.write_bytes(damaged)
    said: list[str] = []
    last = make(tmp_path / "cut")
    last.progress.say = said.append  # type: ignore[method-assign]
    last.fit(resume=True)
    assert any("damaged checkpoint" in text and newest.name in text for text in said)
    assert_same_weights(last.model, whole.model)
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def test_a_log_that_cannot_be_closed_does_not_hide_what_ended_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise CheckpointError(expected="room", found="none", where="a disk", ways_out="make some")

    def refuse(self: MetricsFile) -> None:
        raise FileError(expected="room", found="none", where="the log", ways_out="make some")

    trainer = make(tmp_path / "run")
    monkeypatch.setattr(trainer.store, "save", full)
    monkeypatch.setattr(MetricsFile, "close", refuse)
    with pytest.raises(CheckpointError, match="a disk"):
        trainer.fit()


def test_a_full_disk_under_the_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    records = MetricsFile(tmp_path / "metrics.jsonl")
    records.append({"kind": "train", "step": 1, "loss": 0.5})
    with pytest.raises(FileError, match="No space left on device") as caught:
        records.close()
    assert caught.value.where == str(tmp_path / "metrics.jsonl")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make(tmp_path).fit()
    with pytest.raises(ConfigError, match="a run that was started before") as caught:
        make(tmp_path).fit()
    assert "--resume" not in str(caught.value)  # no config, so the command line could not go on with it
    (tmp_path / "config.json").write_text('{"recipe": "mine"}')
    with pytest.raises(ConfigError, match="--resume"):
        make(tmp_path).fit()


def test_nan_stops_names_the_tensor_dumps_the_batch_and_touches_no_weight(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoint_every=1, epochs=1)
    trainer = make(tmp_path, config=config, train=tiny_dataset(1000, nan_row=500))
    with pytest.raises(NumericsError) as caught:
        trainer.fit()
    assert "no weight was changed" in str(caught.value)
    assert caught.value.ways_out[-1] == "skip such batches: --training.non-finite skip, then --resume"
    (dump,) = (tmp_path / "non_finite").iterdir()
    from safetensors.torch import load_file

    batch = load_file(dump)
    assert 500 in batch["row_ids"].tolist()
    assert batch["dense"].isnan().sum() == 1
    for name, value in trainer.model.state_dict().items():
        assert value.isfinite().all(), name
    trainer.store.wait()
    last = make(tmp_path, config=config, train=tiny_dataset(1000, nan_row=500))
    with pytest.raises(NumericsError):
        last.fit(resume=True)
    assert_same_weights(last.model, trainer.model)


@pytest.mark.parametrize("rates", [(1e30, 0.1), (0.01, 1e30)])
def test_skipping_is_no_way_out_where_the_weights_are_the_reason(rates: tuple[float, float], tmp_path: Path) -> None:
    config = replace(CONFIG, learning_rate=rates[0], table_learning_rate=rates[1])
    with pytest.raises(NumericsError) as caught:
        make(tmp_path / "stop", config=config).fit()
    assert [way.split()[0] for way in caught.value.ways_out] == ["lower", "clip"]
    with pytest.raises(NumericsError, match="evaluation"):
        make(tmp_path / "skip", config=replace(config, non_finite=NonFinite.SKIP)).fit()


def test_nan_is_skipped_if_asked_and_counted(tmp_path: Path) -> None:
    config = replace(CONFIG, non_finite=NonFinite.SKIP)
    trainer = make(tmp_path, config=config, train=tiny_dataset(1000, nan_row=500))
    result = trainer.fit()
    assert result.skipped == 3  # the row comes once an epoch
    assert sum(record["kind"] == "skipped" for record in log_of(tmp_path)) == 3
    for name, value in trainer.model.state_dict().items():
        assert value.isfinite().all(), name


def test_batch_norm_statistics_survive_a_skipped_batch(tmp_path: Path) -> None:
    from ziggurat.models import Normalization

    train = tiny_dataset(640, nan_row=7)
    config = DCNv2Config(embedding_dim=4, deep=MLPConfig(hidden_dims=(8,), normalization=Normalization.BATCH))
    model = build_model(config, train.inputs, seed=0)
    training = replace(CONFIG, epochs=1, non_finite=NonFinite.SKIP)
    Trainer(model, config=training, train=train, folder=tmp_path).fit()
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_early_stop_restores_the_best_weights(tmp_path: Path) -> None:
    early = EarlyStopConfig(metric="auc", patience=2)
    config = replace(CONFIG, epochs=40, learning_rate=0.05, table_learning_rate=0.5, early_stop=early)
    trainer = make(tmp_path, config=config)
    result = trainer.fit()
    assert result.stopped_early
    assert result.steps < 40 * 16
    assert result.best_step == result.steps - 2 * 16
    assert trainer.evaluate(trainer.valid).metrics["auc"] == result.best_value
    assert result.best_step in trainer.store.steps()


def test_plateau_lowers_the_rate_at_each_evaluation_without_improvement(tmp_path: Path) -> None:
    schedule = ScheduleConfig(decay=Decay.PLATEAU, plateau_factor=0.1)
    config = replace(CONFIG, epochs=12, schedule=schedule, early_stop=EarlyStopConfig(min_delta=1.0))
    result: FitResult = make(tmp_path, config=config).fit()
    rates = [record["lr"] for record in log_of(tmp_path) if record["kind"] == "train"]
    assert result.best_step == 16
    assert max(rates) == pytest.approx(0.01)
    assert min(rates) == pytest.approx(1e-6)


def test_a_log_line_has_the_rate_of_its_own_step(tmp_path: Path) -> None:
    schedule = ScheduleConfig(warmup_steps=2, decay=Decay.LINEAR)
    config = replace(CONFIG, max_steps=6, log_every=1, schedule=schedule)
    make(tmp_path, config=config, train=tiny_dataset(400)).fit()
    rates = [record["lr"] for record in log_of(tmp_path) if record["kind"] == "train"]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.01 * 2 / 3, 0.01 / 3, 0.0])


def test_a_run_goes_on_from_a_checkpoint_before_its_first_update(tmp_path: Path) -> None:
    train = tiny_dataset(64, nan_row=7)  # one batch an epoch, skipped each time
    config = replace(CONFIG, non_finite=NonFinite.SKIP, checkpoint_every=1)
    with pytest.raises(KilledError):
        make(tmp_path, config=config, train=train, kill=2).fit()
    again = make(tmp_path, config=config, train=train)
    assert again.fit(resume=True).steps == 3
    optimizer = again.step.dense_optimizer
    assert optimizer is not None
    assert all(float(value.abs().sum()) == 0.0 for parts in optimizer.state.values() for value in parts.values())
    assert_same_weights(again.model, build_model(SMALL, train.inputs, seed=3))  # pyright: ignore[reportArgumentType]


def test_unknown_metric_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    config = replace(CONFIG, early_stop=EarlyStopConfig(metric="acu"))
    with pytest.raises(ConfigError, match="auc"):
        make(tmp_path, config=config).fit()


def test_max_steps_ends_a_run(tmp_path: Path) -> None:
    result = make(tmp_path, config=replace(CONFIG, max_steps=10)).fit()
    assert result.steps == 10


@pytest.mark.parametrize("max_steps", [10, 16, 8])  # inside of the epoch of 16 steps, at its end, and passed already
def test_fit_makes_no_step_where_steps_of_ones_own_have_reached_the_limit(tmp_path: Path, max_steps: int) -> None:
    trainer = make(tmp_path, config=replace(CONFIG, max_steps=max_steps))
    for made in trainer.steps():
        if made.step == max(max_steps, 10):
            break
    result = trainer.fit()
    assert result.steps == trainer.position.step == max(max_steps, 10)
    assert [entry["step"] for entry in trainer.position.evaluations] == [result.steps]
    assert trainer.store.steps()[-1] == result.steps
    assert result.end.startswith("max-steps reached")
    again = make(tmp_path, config=replace(CONFIG, max_steps=max_steps))
    assert again.fit(resume=True).steps == result.steps
    assert len(again.position.evaluations) == 1


def test_a_run_that_goes_on_with_fewer_steps_than_it_has_makes_none(tmp_path: Path) -> None:
    killed = make(tmp_path, config=replace(CONFIG, max_steps=14), kill=12)
    with pytest.raises(KilledError):
        killed.fit()
    killed.store.wait()
    again = make(tmp_path, config=replace(CONFIG, max_steps=5))
    assert again.store.steps()[-1] == 10
    assert again.fit(resume=True).steps == 10
    assert [entry["step"] for entry in again.position.evaluations] == [10]


def test_fit_makes_no_step_where_patience_is_out(tmp_path: Path) -> None:
    trainer = make(tmp_path, config=replace(CONFIG, early_stop=EarlyStopConfig(patience=1)))
    for made in trainer.steps():
        if made.step == 3:
            break
    trainer.validate()
    trainer.validate()  # of the same weights: no better
    assert trainer.fit().steps == 3


def test_a_window_behind_the_limit_of_steps_has_none(tmp_path: Path) -> None:
    config = replace(CONFIG, max_steps=10)
    other = tiny_dataset(500, seed=5)
    trainer = make(tmp_path, config=config)
    assert trainer.fit().steps == 10
    assert trainer.fit(train=other).steps == 10
    assert [entry["step"] for entry in trainer.position.evaluations] == [10]
    again = make(tmp_path, config=config)
    assert [again.fit(resume=True).steps, again.fit(train=other, resume=True).steps] == [10, 10]
    assert again.position.window == 1


def test_one_sample_and_no_sample_at_all(tmp_path: Path) -> None:
    for rows in (0, 1):
        train = tiny_dataset(rows)
        model = build_model(SMALL, train.inputs, seed=0)
        result = Trainer(model, config=CONFIG, train=train, folder=tmp_path / str(rows)).fit()
        assert result.steps == 3 * rows


def test_one_class_only_in_validation_never_stops_training(tmp_path: Path) -> None:
    train = tiny_dataset(200)
    valid = tiny_dataset(50, seed=1)
    column = valid._table.schema.get_field_index("label:click")
    import pyarrow as pa

    ones = pa.array([1.0] * 50, type=pa.float32())
    valid._table = valid._table.set_column(column, "label:click", ones)
    model = build_model(SMALL, train.inputs, seed=0)
    result = Trainer(model, config=CONFIG, train=train, valid=valid, folder=tmp_path).fit()
    assert result.steps == 12
    assert result.best_step == 0  # AUC of one class is undefined: no evaluation is better than another


def test_several_labels(tmp_path: Path) -> None:
    train = tiny_dataset(500, labels=("click", "buy"))
    valid = tiny_dataset(200, seed=1, labels=("click", "buy"))
    model = build_model(SMALL, train.inputs, seed=0)
    config = replace(CONFIG, early_stop=EarlyStopConfig(metric="auc/buy"))
    trainer = Trainer(model, config=config, train=train, valid=valid, folder=tmp_path)
    trainer.fit()
    assert {"auc/click", "auc/buy"} <= trainer.evaluate(valid).metrics.keys()
