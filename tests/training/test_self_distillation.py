"""Self-distillation: the official loop on images, the formula, resume, ranks, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ziggurat as zg
from tests.training.rank_runs import Case, as_data, stored, train
from tests.training.test_trainer import KillAt, KilledError
from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.embeddings.contract import Embeddings
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import LabelSpec
from ziggurat.features.tasks import Task
from ziggurat.models import DLRMConfig, MLPConfig, Normalization, build_model
from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.runs.stream.run import stream_run
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.ranks import RankFailure, run_ranks
from ziggurat.training.config import (
    Compile,
    DenseOptimizer,
    Precision,
    SelfDistil,
    SelfDistilConfig,
    StepGraphs,
    TrainingConfig,
)
from ziggurat.training.step.self_distillation import _VIEWS, _kept
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.trainer import Trainer

SMC2 = SelfDistilConfig(method=SelfDistil.SMC2)
SMC3 = SelfDistilConfig(method=SelfDistil.SMC3)
MODEL = DLRMConfig(
    embedding_dim=4,
    bottom=MLPConfig(hidden_dims=(8,)),
    top=MLPConfig(hidden_dims=(16,), dropout=0.1, normalization=Normalization.BATCH),
)
CONFIG = TrainingConfig(
    epochs=2,
    learning_rate=0.05,
    precision=Precision.FP32,
    checkpoint_every=5,
    log_every=1,
    self_distil=SMC3,
    loader=LoaderConfig(batch_size=64, shuffle_buffer_rows=200),
)


def make(folder: Path, *, kill: int = 0, config: TrainingConfig = CONFIG) -> Trainer:
    data = tiny_dataset(1000)
    model = build_model(MODEL, data.inputs, seed=3)
    progress = KillAt(kill) if kill else None
    return Trainer(model, config=config, train=data, valid=tiny_dataset(300, seed=1), folder=folder, progress=progress)


class Pictures(zg.Model):
    """A small convolutional network on pictures of four patches; each patch is a row of a table that stays."""

    def __init__(self, inputs: zg.InputSpec, *, embeddings: Embeddings) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.filters = nn.Conv2d(1, 4, 3, stride=2)
        self.norm = BatchNorm(4 * 3 * 3)
        self.top = nn.Linear(4 * 3 * 3, len(inputs.labels))

    def forward_dense(self, embedded: zg.Embedded) -> zg.Outputs:
        patches = embedded.fields.view(-1, 2, 2, 4, 4)
        pictures = patches.permute(0, 1, 3, 2, 4).reshape(-1, 1, 8, 8)
        return zg.Outputs(logits=self.top(self.norm(self.filters(pictures).relu().flatten(1))))


def pictures_model() -> Pictures:
    inputs = small_inputs(num_dense=0, num_single=4, num_jagged=0)
    torch.manual_seed(5)
    return Pictures(inputs, embeddings=zg.EmbeddingTables(inputs, EmbeddingConfig(dim=16), seed=0))


def without_patches(fields: Tensor, batch: Batch, *, step: int, share: float) -> Tensor:
    """The augmentation of the second channel, a picture at a time: patches are gone."""
    fields = fields.clone()
    hashes = StepDraw(0, step).hashes(batch.row_ids.numpy(), purposes_P=(1 << 32) + np.arange(4))
    for patch in range(4):
        for sample, found in enumerate(hashes[patch]):
            kept = int(found) >= int(share * 2.0**64)
            fields[sample, 16 * patch : 16 * patch + 16] *= (1.0 / (1.0 - share)) if kept else 0.0
    return fields


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_a_network_learns_as_by_the_queue_of_logits_of_the_official_code(temperature: float) -> None:
    """The loop of JiuTiannn-SMC, SMC-2.py, in its order: channel B is one batch ahead, its logits wait in a queue."""
    steps = 12
    batches = [random_batch(small_inputs(num_dense=0, num_single=4, num_jagged=0), 16, seed=s) for s in range(steps)]
    ours = pictures_model()
    network = copy.deepcopy(ours)
    settings = replace(SMC2, temperature=temperature, field_dropout=0.25)
    config = TrainingConfig(
        learning_rate=0.1,
        table_learning_rate=0.0,
        optimizer=DenseOptimizer.SGD,
        precision=Precision.FP32,
        self_distil=settings,
    )
    step = TrainStep(ours, config)
    assert step.self_distillation is not None

    dense = [weight for name, weight in network.named_parameters() if not name.startswith("embeddings.")]
    optimizer = torch.optim.SGD(dense, lr=0.1, fused=True)
    queue: list[Tensor] = []
    weights_before = [weight.detach().clone() for weight in dense]
    for t, batch in enumerate(batches):
        if t + 1 < steps:
            with torch.no_grad():
                ahead = network.embed(batches[t + 1])
                fields = without_patches(ahead.fields, batches[t + 1], step=t + 1, share=0.25)
                running = copy.deepcopy(network.norm.state_dict())
                queue.append(network.forward_dense(replace(ahead, fields=fields)).logits)
                network.norm.load_state_dict(running)
        z = network(batch)
        labels_loss = F.binary_cross_entropy_with_logits(z, batch.labels, reduction="none").sum()
        loss = labels_loss
        if t > 0:
            soft = torch.sigmoid(queue.pop(0) / temperature)
            a = torch.tensor(0.9 * (1.0 - math.cos(math.pi * t / steps)) / 2.0)  # FP32, as the loss is
            views_loss = F.binary_cross_entropy_with_logits(z / temperature, soft, reduction="none").sum()
            loss = (1.0 - a) * labels_loss + a * views_loss
        optimizer.zero_grad()
        (loss / 16).backward()

        step.self_distillation.begin(step=t, total_steps=steps)
        result = step(batch)
        assert result.loss == pytest.approx(float(labels_loss.detach()) / 16, rel=1e-6)
        optimizer.step()
        assert torch.equal(ours(batch), network(batch)), t
    own = dict(ours.named_parameters())
    for (name, _), weight, before in zip(
        [each for each in network.named_parameters() if not each[0].startswith("embeddings.")],
        dense,
        weights_before,
        strict=True,
    ):
        assert torch.equal(own[name], weight), name
        assert not torch.equal(weight, before)
    torch.testing.assert_close(ours.norm.state_dict(), network.norm.state_dict(), rtol=0.0, atol=0.0)


def test_the_gradient_is_that_of_the_mixture_and_the_loss_that_of_the_labels() -> None:
    inputs = replace(
        small_inputs(num_labels=2),
        labels=(LabelSpec(name="a", weight=2.0), LabelSpec(name="b", positive_weight=3.0)),
        has_weights=True,
    )
    batch = random_batch(inputs, 12)
    batch.labels[3, 0] = float("nan")
    model = build_model(DLRMConfig(embedding_dim=4), inputs, seed=0)
    step = TrainStep(model, replace(CONFIG, self_distil=replace(SMC2, temperature=2.0, ramp_steps=4)))
    own = step.self_distillation
    assert own is not None
    own.weight = 0.3
    targets = torch.rand(12, 2)
    own._targets_BL = targets
    outputs = zg.Outputs(logits=torch.randn(12, 2, requires_grad=True))
    plain = model.loss(outputs, batch)
    mixed = own.mixed(plain, outputs, batch)
    assert torch.equal(mixed.total, plain.total)
    assert torch.equal(mixed.weight, plain.weight)

    total = torch.zeros(())
    assert batch.weights is not None
    for label in range(2):
        sums = torch.zeros(())
        for sample in range(12):
            y = batch.labels[sample, label]
            if y.isnan():
                continue
            weight = batch.weights[sample] * (3.0 if label == 1 and y == 1 else 1.0) * (2.0 if label == 0 else 1.0)
            z = outputs.logits[sample, label]
            of_label = F.binary_cross_entropy_with_logits(z, y)
            of_view = F.binary_cross_entropy_with_logits(z / 2.0, targets[sample, label])
            sums = sums + weight * (0.7 * of_label + 0.3 * of_view)
        total = total + sums / plain.weight[label] / 2
    (expected,) = torch.autograd.grad(total, outputs.logits)
    (found,) = torch.autograd.grad(mixed.mean(), outputs.logits)
    torch.testing.assert_close(found, expected)


def test_the_log_says_how_much_second_views_count_and_how_far_they_agree(tmp_path: Path) -> None:
    trainer = make(tmp_path, config=replace(CONFIG, self_distil=replace(SMC2, ramp_steps=10)))
    trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    shares = [line["self_distil_weight"] for line in steps]
    expected = [0.9 * (1 - math.cos(math.pi * min(step / 10, 1.0))) / 2 for step in range(len(steps))]
    assert shares == pytest.approx(expected)
    assert "self_distil_agreement" not in steps[0]
    assert all(0.5 < line["self_distil_agreement"] < 1.0 for line in steps[1:])


@pytest.mark.parametrize("kill", [7, 16])
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, kill: int) -> None:
    whole = make(tmp_path / "whole")
    whole.fit()
    cut = make(tmp_path / "cut", kill=kill)
    with pytest.raises(KilledError):
        cut.fit()
    cut.store.wait()
    last = make(tmp_path / "cut")
    last.fit(resume=True)
    expected = whole.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in last.model.state_dict().items())
    other = make(tmp_path / "other", config=replace(CONFIG, self_distil=SMC2))
    other.fit()
    assert any(not torch.equal(expected[name], tensor) for name, tensor in other.model.state_dict().items())


def test_two_ranks_learn_as_one_device(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"self_distil": replace(SMC3, alpha=0.8), "epochs": 2}
    alone = train(0, 1, as_data(Case()), str(tmp_path / "one"), changes)
    both = run_ranks(train, 2, 2, as_data(Case()), str(tmp_path / "two"), changes, timeout_s=240.0)
    assert both[0] == both[1]
    assert both[0]["auc"] == pytest.approx(alone["auc"], abs=1e-4)
    one, two = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=2e-4, atol=2e-4, err_msg=name)
    plain = train(0, 1, as_data(Case()), str(tmp_path / "plain"), {"epochs": 2})
    assert plain["log_loss"] != alone["log_loss"]


@pytest.mark.parametrize(
    ("case", "found"),
    [
        (Case(dense=DenseParallelism.FSDP), "parts of weights"),
        (Case(num_parts=2, towers=True, tower_size=1), "in 2 parts"),
    ],
)
def test_ranks_with_parts_are_refused(tmp_path: Path, case: Case, found: str) -> None:
    with pytest.raises(RankFailure, match=found):
        run_ranks(train, 2, 2, as_data(case), str(tmp_path), {"self_distil": SMC2}, timeout_s=240.0)


class OwnDenominators(Pictures):
    """A model whose loss counts positives."""

    def loss_weight(self, batch: Batch) -> Tensor:
        return (batch.labels == 1).float().sum(dim=0)


def test_what_cannot_learn_from_itself_is_refused() -> None:
    model = pictures_model()
    for config, found in (
        (replace(CONFIG, compile=Compile.DEFAULT), "training.compile default"),
        (replace(CONFIG, step_graph=StepGraphs.ON), "step-graph on"),
    ):
        with pytest.raises(ConfigError, match=found):
            TrainStep(model, config)
    inputs = model.inputs
    with pytest.raises(ConfigError, match="denominators of its own"):
        TrainStep(OwnDenominators(inputs, embeddings=model.embeddings), CONFIG)
    numbers = replace(inputs, labels=(LabelSpec(name="stars", task=Task.REGRESSION),))
    with pytest.raises(ConfigError, match="labels that are numbers: stars"):
        TrainStep(build_model(DLRMConfig(embedding_dim=4), numbers, seed=0), CONFIG)
    taught = build_model(DLRMConfig(embedding_dim=4), inputs, seed=0)
    taught.student = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="logged scores of teachers"):
        TrainStep(taught, CONFIG)
    step = TrainStep(model, CONFIG)
    batch = random_batch(inputs, 4)
    with pytest.raises(ConfigError, match="a step without it"):
        step(batch)
    assert step.self_distillation is not None
    with pytest.raises(ConfigError, match="does not know how many batches"):
        step.self_distillation.begin(step=0, total_steps=0)


def test_a_stream_says_how_long_the_weight_rises(tmp_path: Path) -> None:
    rows = [{"x": "ab"[row % 2], "y": int(row % 3 == 0), "day": f"2026-01-{1 + row // 40:02}"} for row in range(80)]
    pl.DataFrame(rows).write_parquet(tmp_path / "rows.parquet")
    schema = zg.Schema(features=(zg.Categorical(name="x"),), labels=(zg.Label(name="y"),), time="day")
    config = zg.table_run(zg.LogisticRegressionConfig(), schema)
    training = replace(config.training, self_distil=SMC2, log_every=1)
    config = replace(config, data=replace(config.data, train=(str(tmp_path / "rows.parquet"),)), training=training)
    stream = StreamConfig(by="day")
    with pytest.raises(ConfigError, match="ramp_steps = 0"):
        stream_run(config, folder=tmp_path / "refused", stream=stream)
    config = replace(config, training=replace(training, self_distil=replace(SMC2, ramp_steps=1)))
    stream_run(config, folder=tmp_path / "run", stream=stream)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["self_distil_weight"] for line in lines if line["kind"] == "train"] == [0.0, 0.9]


@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 2, 8)])
def test_fields_are_left_out_as_a_whole_and_the_others_are_larger(dims: tuple[int, ...]) -> None:
    model = build_model(DLRMConfig(embedding_dim=4), small_inputs(), seed=0)
    step = TrainStep(model, replace(CONFIG, self_distil=replace(SMC2, field_dropout=0.4, ramp_steps=4)))
    own = step.self_distillation
    assert own is not None
    batch = random_batch(small_inputs(), 50)
    fields = torch.randn(50, sum(dims))
    draw = StepDraw(1, 2)
    own._model = cast(Any, SimpleNamespace(field_dims=dims))
    found = own._some_fields(fields, batch, view=0, draw=draw)
    kept = _kept(batch.row_ids, num_fields=len(dims), share=0.4, draw=draw, purpose=_VIEWS)
    assert 0 < int(kept.sum()) < kept.numel()
    begin = 0
    for field, dim in enumerate(dims):
        factor = (kept[:, field] / 0.6).unsqueeze(1)
        assert torch.equal(found[:, begin : begin + dim], fields[:, begin : begin + dim] * factor)
        begin += dim
