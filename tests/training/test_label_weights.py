"""Learned weights of labels: the loss against its equation, where they end, ranks, runs, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

import ziggurat as zg
from tests.training.rank_runs import dense_weights_after
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Task
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.delayed_feedback import DelayedConfig
from ziggurat.training.delayed_losses import DelayedLoss
from ziggurat.training.distillation import DistilConfig
from ziggurat.training.label_weights import LabelWeights, LearnedWeights, weigh_labels

INPUTS = small_inputs(num_labels=3)
INPUTS = dataclasses.replace(
    INPUTS, labels=(*INPUTS.labels[:2], dataclasses.replace(INPUTS.labels[2], task=Task.REGRESSION))
)


def weighed(model: zg.Model) -> LearnedWeights:
    made = weigh_labels(model, LabelWeights.UNCERTAINTY)
    assert made is not None
    return made


def model_of() -> zg.Model:
    embedding = zg.EmbeddingConfig(kernel=KernelChoice.TORCH)
    return zg.build_model(zg.MMoEConfig(embedding_dim=4, embedding=embedding), INPUTS, seed=3).train()


def test_the_loss_is_its_equation_and_what_is_reported_is_the_plain_mean() -> None:
    model = model_of()
    made = weighed(model)
    batch = random_batch(INPUTS, 40, seed=1)
    batch.labels[:25, 1] = math.nan
    with torch.no_grad():
        made.log_variances.copy_(torch.tensor([0.3, -0.7, 1.1]))
    outputs = model.dense_outputs(model.embed(batch))
    plain = model.loss(outputs, batch)
    sums = made.loss(outputs, batch)
    torch.testing.assert_close(sums.total, plain.total)
    assert torch.equal(sums.weight, plain.weight)
    assert sums.weight.tolist() == [40.0, 15.0, 40.0]
    found = torch.autograd.grad(sums.mean(), [made.log_variances, outputs.logits], retain_graph=True)
    numbers = made.log_variances.detach().clone().requires_grad_()
    means = plain.total / plain.weight
    wanted = torch.autograd.grad(((-numbers).exp() * means + numbers / 2).mean(), [numbers, outputs.logits])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert made.facts() == pytest.approx(
        {"weight of label0": math.exp(-0.3), "weight of label1": math.exp(0.7), "weight of label2": math.exp(-1.1)}
    )


def test_weights_end_where_every_label_counts_the_same() -> None:
    model = model_of()
    made = weighed(model)
    batch = random_batch(INPUTS, 40, seed=1)
    outputs = model.dense_outputs(model.embed(batch))
    outputs = dataclasses.replace(outputs, logits=outputs.logits.detach(), named={})
    optimizer = torch.optim.SGD([made.log_variances], lr=1.0)
    for _ in range(300):
        optimizer.zero_grad()
        made.loss(made.outputs_beside(outputs, None), batch).mean().backward()  # pyright: ignore[reportArgumentType]
        optimizer.step()
    plain = model.loss(outputs, batch)
    torch.testing.assert_close((-made.log_variances).exp(), 0.5 / (plain.total / plain.weight), rtol=1e-3, atol=0)


def test_a_batch_without_samples_has_gradients_of_zero() -> None:
    model = model_of()
    made = weighed(model)
    batch = random_batch(INPUTS, 0)
    made.loss(model.dense_outputs(model.embed(batch)), batch).mean().backward()
    assert made.log_variances.grad is not None
    assert not made.log_variances.grad.any()


def test_the_served_network_is_that_of_before() -> None:
    plain = model_of()
    model = model_of()
    weighed(model)
    batch = random_batch(INPUTS, 20)
    assert torch.equal(model.eval()(batch), plain.eval()(batch))
    assert {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()} == {
        "student.log_variances"
    }


def trained_weights(world_size: int, rank: int, dense: DenseParallelism) -> dict[str, Tensor]:
    """Weights after three steps on the same global batches."""
    model = model_of()
    made = weighed(model)
    batches = [random_batch(INPUTS, 24, seed=number) for number in range(3)]
    weights = dense_weights_after(model, loss=made.loss, batches=batches, rank=rank, world_size=world_size, dense=dense)
    assert set(made.facts()) == {"weight of label0", "weight of label1", "weight of label2"}
    return weights


def on_ranks(rank: int, world_size: int, dense: DenseParallelism) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in trained_weights(world_size, rank, dense).items()}


@pytest.mark.parametrize("dense", [DenseParallelism.DDP, DenseParallelism.FSDP])
def test_two_ranks_learn_what_one_device_does(dense: DenseParallelism) -> None:
    wanted = trained_weights(1, 0, dense)
    assert wanted["student.log_variances"].abs().min() > 0.01
    for found in run_ranks(on_ranks, 2, 2, dense):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name]), value.flatten(), rtol=1e-4, atol=1e-6)


def run_config(folder: Path, **changes: object) -> zg.RunConfig:
    rng = np.random.default_rng(0)
    users = rng.integers(0, 20, 400)
    frame = pl.DataFrame({"user": users, "click": (users + rng.integers(0, 9, 400)) % 2, "like": users % 3 == 0})
    frame.write_parquet(folder / "rows.parquet")
    schema = zg.Schema(features=(zg.Categorical(name="user"),), labels=(zg.Label(name="click"), zg.Label(name="like")))
    run = zg.table_run(zg.MMoEConfig(embedding_dim=4), schema)
    data = dataclasses.replace(run.data, train=(str(folder / "rows.parquet"),))
    training = dataclasses.replace(run.training, epochs=4, seed=1, threads=1)
    given = {"data": data, "training": training, "label_weights": LabelWeights.UNCERTAINTY, **changes}
    return dataclasses.replace(run, **given)  # pyright: ignore[reportArgumentType]


def test_a_run_that_was_stopped_goes_on_to_the_same_weights_and_is_scored_without_them(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    zg.train_run(config, folder=tmp_path / "whole")
    half = dataclasses.replace(config, training=dataclasses.replace(config.training, epochs=2))
    zg.train_run(half, folder=tmp_path / "run")
    zg.train_run(config, folder=tmp_path / "run", resume=True)
    frame = pl.read_parquet(tmp_path / "rows.parquet")
    scores = [zg.load_run(tmp_path / name).scores(frame) for name in ("whole", "run")]
    np.testing.assert_array_equal(*scores)
    given = dataclasses.replace(config, label_weights=LabelWeights.GIVEN)
    zg.train_run(given, folder=tmp_path / "given")
    assert not np.array_equal(zg.load_run(tmp_path / "given").scores(frame), scores[0])


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.check()
    schema = config.table_schema
    one = dataclasses.replace(schema, labels=schema.labels[:1])
    with pytest.raises(ConfigError, match="1 label"):
        dataclasses.replace(config, table_schema=one).check()
    heavy = dataclasses.replace(schema, labels=(schema.labels[0], dataclasses.replace(schema.labels[1], weight=3.0)))
    with pytest.raises(ConfigError, match="like = 3"):
        dataclasses.replace(config, table_schema=heavy).check()
    with pytest.raises(ConfigError, match="label_weights uncertainty with"):
        dataclasses.replace(config, delayed=DelayedConfig(loss=DelayedLoss.FNC, label="like")).check()
    with pytest.raises(ConfigError, match="label_weights uncertainty with"):
        dataclasses.replace(config, distil=DistilConfig(head="single-head")).check()  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="plain and label_weights uncertainty"):
        zg.train_run(config, folder=tmp_path / "run", loss=plain)
    assert not (tmp_path / "run").exists()


def plain(outputs: zg.Outputs, batch: zg.Batch) -> zg.LossSums:
    raise AssertionError("refused before it is called")
