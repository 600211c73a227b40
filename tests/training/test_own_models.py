"""Models, losses and sources of one's own: what cannot train is refused in four parts before a weight moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError, DataError, ZigguratError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models import Embedded, LossSums, Model, Outputs
from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.models.contract.losses import labelled_weights
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.config import EarlyStopConfig, TrainingConfig
from ziggurat.training.trainer import Trainer

INPUTS = small_inputs()
Gives = Callable[[Tensor], Any]


class Own(Model):
    """A linear model that returns whatever a test wants of its logits (B, L)."""

    def __init__(self, inputs: InputSpec, gives: Gives, *, norm: nn.Module | None = None) -> None:
        super().__init__(inputs, embeddings=EmbeddingTables(inputs, EmbeddingConfig(dim=4), seed=0))
        self.top = nn.Linear(len(inputs.dense) + sum(self.field_dims), len(inputs.labels))
        self.norm = norm or nn.Identity()
        self.gives = gives

    def forward_dense(self, embedded: Embedded) -> Outputs:
        return self.gives(self.norm(self.top(torch.cat([embedded.dense, embedded.fields], dim=1))))


def as_they_are(logits: Tensor) -> Outputs:
    return Outputs(logits=logits)


class Listed:
    """A source of given batches."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to go back to."""


def trainer_of(folder: Path, *, model: Model | None = None, batches: Any = None, **given: Any) -> Trainer:
    model = model or Own(INPUTS, as_they_are)
    batches = [random_batch(model.inputs, 6, seed=seed) for seed in (0, 1)] if batches is None else batches
    config = given.pop("config", TrainingConfig(epochs=1, threads=1))
    return Trainer(model, config=config, train=Listed(batches), folder=folder, **given)


def refused(trainer: Callable[[], Trainer]) -> ZigguratError:
    """The error of a training that must not begin; no weight may have moved."""

    def train_and_look() -> None:
        made = trainer()
        before = {name: value.clone() for name, value in made.model.state_dict().items()}
        try:
            made.fit()
        finally:
            for name, value in made.model.state_dict().items():
                assert torch.equal(value, before[name]), name

    with pytest.raises(ZigguratError) as caught:
        train_and_look()
    assert all((caught.value.expected, caught.value.found, caught.value.where, caught.value.ways_out))
    return caught.value


LOGITS: dict[str, tuple[Gives, str, str, Gives]] = {
    "a tensor": (lambda it: it, "a tensor of shape (6, 1)", "zg.Outputs(logits=logits)", as_they_are),
    "(B,)": (
        lambda it: Outputs(logits=it.squeeze(1)),
        "shape (6,)",
        "logits.unsqueeze(1)",
        lambda it: Outputs(logits=it.squeeze(1).unsqueeze(1)),
    ),
    "(1, B)": (lambda it: Outputs(logits=it.T), "shape (1, 6)", "logits.T", lambda it: Outputs(logits=it.T.T)),
    "a tensor (B,)": (lambda it: it.squeeze(1), "a tensor of shape (6,)", "logits.unsqueeze(1)", as_they_are),
    "a dict": (lambda it: {"logits": it}, "dict", "zg.Outputs(logits=…", as_they_are),
    "two logits": (
        lambda it: Outputs(logits=torch.cat([it, it], dim=1)),
        "shape (6, 2)",
        "len(inputs.labels)",
        as_they_are,
    ),
}


@pytest.mark.parametrize("name", LOGITS)
def test_a_network_that_gives_no_logits_is_refused_before_training_and_its_way_out_trains(
    name: str, tmp_path: Path
) -> None:
    gives, found, way_out, mended = LOGITS[name]
    error = refused(lambda: trainer_of(tmp_path / "refused", model=Own(INPUTS, gives)))
    assert isinstance(error, ConfigError)
    assert error.found == found
    assert way_out in error.ways_out[0]
    assert trainer_of(tmp_path / "mended", model=Own(INPUTS, mended)).fit().steps == 2


def losses_of(outputs: Outputs, batch: Batch) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.logits, batch.labels, reduction="none")


def weighted(outputs: Outputs, batch: Batch) -> LossSums:
    """As the error's way out says."""
    losses = losses_of(outputs, batch)
    weights = torch.ones_like(losses) if batch.weights is None else batch.weights.unsqueeze(1).expand_as(losses)
    return LossSums(total=(losses * weights).sum(dim=0), weight=weights.sum(dim=0))


def detached(outputs: Outputs, batch: Batch) -> LossSums:
    return weighted(Outputs(logits=outputs.logits.detach()), batch)


def scalar_sums(outputs: Outputs, batch: Batch) -> LossSums:
    sums = weighted(outputs, batch)
    return LossSums(total=sums.total.sum(), weight=sums.weight.sum())


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda outputs, batch: losses_of(outputs, batch).mean(), "a tensor of shape ()"),
        (lambda outputs, batch: losses_of(outputs, batch).mean().item(), "float"),
        (detached, "a total without gradient"),
        (scalar_sums, "total (), weight ()"),
    ],
)
def test_a_loss_that_loses_weights_or_gradients_is_refused_before_training(
    loss: Any, found: str, tmp_path: Path
) -> None:
    error = refused(lambda: trainer_of(tmp_path / "refused", loss=loss))
    assert error.found == found
    assert trainer_of(tmp_path / "mended", loss=weighted).fit().steps == 2


WEIGHTED = dataclasses.replace(small_inputs(), has_weights=True)


def unweighted(outputs: Outputs, batch: Batch) -> LossSums:
    return weighted(outputs, dataclasses.replace(batch, weights=None))


def test_a_loss_that_ignores_the_weights_of_samples_is_refused_and_its_ways_out_train(tmp_path: Path) -> None:
    def by_the_schema(outputs: Outputs, batch: Batch) -> LossSums:
        weights = labelled_weights(batch.labels, batch.weights, inputs=WEIGHTED)
        return LossSums(total=(losses_of(outputs, batch) * weights).sum(dim=0), weight=weights.sum(dim=0))

    error = refused(lambda: trainer_of(tmp_path / "refused", model=Own(WEIGHTED, as_they_are), loss=unweighted))
    assert isinstance(error, ConfigError)
    assert error.found == "[6.0], as if each sample weighed 1"
    assert trainer_of(tmp_path / "weighted", model=Own(WEIGHTED, as_they_are), loss=weighted).fit().steps == 2
    model = Own(WEIGHTED, as_they_are)
    assert trainer_of(tmp_path / "by the schema", model=model, loss=by_the_schema).fit().steps == 2
    assert trainer_of(tmp_path / "none", loss=unweighted).fit().steps == 2


def test_a_loss_may_divide_by_all_samples_where_a_label_is_missing(tmp_path: Path) -> None:
    batch = random_batch(INPUTS, 6)
    batch.labels[2] = float("nan")

    def by_all(outputs: Outputs, batch: Batch) -> LossSums:
        known = ~batch.labels.isnan()
        losses = losses_of(outputs, dataclasses.replace(batch, labels=batch.labels.nan_to_num())) * known
        return LossSums(total=losses.sum(dim=0), weight=losses.new_full((1,), len(losses)))

    assert trainer_of(tmp_path, batches=[batch], loss=by_all).fit().steps == 1


def test_a_loss_that_ignores_the_weight_of_positives_is_refused(tmp_path: Path) -> None:
    labels = tuple(dataclasses.replace(each, positive_weight=3.0) for each in INPUTS.labels)
    inputs = dataclasses.replace(INPUTS, labels=labels)
    error = refused(lambda: trainer_of(tmp_path, model=Own(inputs, as_they_are), loss=weighted))
    assert error.ways_out[-1] == "train without weights: leave positive_weight out of the schema"


@pytest.mark.parametrize(
    ("change", "found", "where"),
    [
        (lambda it: {"labels": 2 * it.labels}, "2", "label 'label0'"),
        (lambda it: {"labels": it.labels.squeeze(1)}, "shape (6,)", "batch.labels"),
        (lambda it: {"labels": it.labels[:, :0]}, "shape (6, 0)", "batch.labels"),
        (lambda it: {"weights": it.weights.unsqueeze(1)}, "shape (6, 1)", "batch.weights"),
        (lambda it: {"weights": -torch.ones(6)}, "-1", "batch.weights, sample 0"),
        (lambda it: {"weights": torch.full((6,), float("nan"))}, "nan", "batch.weights, sample 0"),
        (lambda it: {"single": it.single + 1000}, "row 10", "feature 'single0'"),
    ],
)
def test_batches_of_ones_own_are_checked_before_they_train(
    change: Callable[[Batch], dict[str, Any]], found: str, where: str, tmp_path: Path
) -> None:
    good = random_batch(WEIGHTED, 6)
    good = dataclasses.replace(good, labels=torch.ones_like(good.labels))
    bad = dataclasses.replace(good, **change(good))
    model = Own(WEIGHTED, as_they_are)
    error = refused(lambda: trainer_of(tmp_path / "refused", model=model, batches=[bad]))
    assert error.found.startswith(found)
    assert error.where.startswith(where)
    with pytest.raises(ZigguratError):  # the same batch to evaluate on
        trainer_of(tmp_path / "valid", model=model, batches=[good], valid=[bad]).fit()
    assert trainer_of(tmp_path / "mended", model=model, batches=[good], valid=[good]).fit().steps == 1


def test_a_source_that_yields_something_else_is_refused(tmp_path: Path) -> None:
    error = refused(lambda: trainer_of(tmp_path, batches=[torch.zeros(3)]))
    assert (error.found, error.where) == ("Tensor", "training data, Listed")


def test_batch_norm_of_torch_with_a_last_batch_of_one_is_refused_before_the_first_step(tmp_path: Path) -> None:
    train = tiny_dataset(33)

    def trainer(norm: nn.Module, batch_size: int, name: str) -> Trainer:
        model = Own(train.inputs, as_they_are, norm=norm)
        settings = TrainingConfig(epochs=1, threads=1)
        config = dataclasses.replace(settings, loader=dataclasses.replace(settings.loader, batch_size=batch_size))
        return Trainer(model, config=config, train=train, folder=tmp_path / name)

    error = refused(lambda: trainer(nn.BatchNorm1d(1), 8, "refused"))
    assert "33 rows in batches of 8" in error.where
    assert trainer(BatchNorm(1), 8, "ours").fit().steps == 5
    assert trainer(nn.BatchNorm1d(1), 11, "another").fit().steps == 3
    lone = [random_batch(INPUTS, 4), random_batch(INPUTS, 1)]  # nobody knew how long a source's batches are
    with pytest.raises(ConfigError, match="BatchNorm1d"):
        trainer_of(tmp_path / "source", model=Own(INPUTS, as_they_are, norm=nn.BatchNorm1d(1)), batches=lone).fit()


class OwnLoss(Own):
    """Trains on logits (B,), which its own loss reads."""

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        return super().loss(Outputs(logits=outputs.logits.unsqueeze(1)), batch)


def test_logits_that_only_an_own_loss_reads_are_refused_by_evaluation(tmp_path: Path) -> None:
    model = OwnLoss(INPUTS, lambda it: Outputs(logits=it.squeeze(1)))
    assert trainer_of(tmp_path / "alone", model=model).fit().steps == 2
    with pytest.raises(ConfigError, match=r"shape \(6,\)"):
        trainer_of(tmp_path / "valid", model=model, valid=[random_batch(INPUTS, 6)]).fit()


class Said:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, what: str, *, total: int | None) -> None: ...

    def update(self, done: int, *, note: str = "") -> None: ...

    def say(self, text: str) -> None:
        self.lines.append(text)

    def detail(self, text: str) -> None: ...

    def end(self) -> None: ...


def test_one_class_in_validation_lets_training_go_on_past_its_patience_and_says_so(tmp_path: Path) -> None:
    batch = random_batch(INPUTS, 6)
    one_class = dataclasses.replace(batch, labels=torch.ones_like(batch.labels))
    said = Said()
    config = TrainingConfig(epochs=5, threads=1, early_stop=EarlyStopConfig(metric="auc", patience=1))
    result = trainer_of(tmp_path / "auc", valid=[one_class], config=config, progress=said).fit()
    assert (result.steps, result.best_step, result.stopped_early) == (10, 0, False)
    (line,) = [line for line in said.lines if line.startswith("warning")]
    assert "auc is undefined" in line
    assert "--training.early-stop.metric log_loss" in line
    config = dataclasses.replace(config, early_stop=EarlyStopConfig(metric="log_loss", patience=1))
    assert trainer_of(tmp_path / "loss", valid=[one_class], config=config).fit().best_step > 0


def test_training_rows_without_any_weight_are_refused(tmp_path: Path) -> None:
    train = tiny_dataset(40)
    inputs = dataclasses.replace(train.inputs, has_weights=True)
    settings = TrainingConfig(epochs=1, threads=1)

    def trainer(weight: float) -> Trainer:
        weights = pa.array([weight] * 40, type=pa.float32())
        data = MemoryDataset(train._table.append_column("weight:", weights), inputs)
        return Trainer(Own(inputs, as_they_are), config=settings, train=data, folder=tmp_path / str(weight))

    with pytest.raises(DataError, match="each has the weight 0"):
        trainer(0.0)
    assert trainer(0.5).fit().steps == 1
