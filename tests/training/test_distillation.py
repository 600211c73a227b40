"""Students: losses against their equations, the served network untouched, ranks, checkpoints, refusals."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ziggurat as zg
from tests.training.rank_runs import dense_weights_after
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.inputs import ExtraSpec, InputSpec
from ziggurat.models import MODEL_CONFIGS
from ziggurat.models.contract.reads import Reads
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.distillation import DistilConfig, DistilHead, Student, teach

NONE = float("nan")


def inputs_of(*, num_labels: int = 1, names: tuple[str, ...] = ("teacher",)) -> InputSpec:
    dim = num_labels if num_labels > 1 else 0
    extras = tuple(ExtraSpec(name=name, dim=dim) for name in names)
    return dataclasses.replace(small_inputs(num_labels=num_labels), extras=extras)


def batch_of(inputs: InputSpec, size: int = 24, *, seed: int = 0) -> zg.Batch:
    """A batch whose first rows have no teacher, and whose last one has no label."""
    batch = random_batch(inputs, size, seed=seed)
    extras = {name: value.sigmoid() for name, value in batch.extras.items()}
    for value in extras.values():
        value[: size // 4] = NONE
    labels = batch.labels.clone()
    labels[-1, 0] = NONE
    return dataclasses.replace(batch, extras=extras, labels=labels)


def taught(inputs: InputSpec, **settings: object) -> tuple[zg.Model, Student]:
    model = zg.build_model(zg.DNNConfig(embedding_dim=4), inputs, seed=3)
    student = teach(model, DistilConfig(**settings), seed=5)  # pyright: ignore[reportArgumentType]
    assert student is not None
    return model.train(), student


def gradients(model: zg.Model, loss: Tensor) -> dict[str, Tensor]:
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: value for name, value in zip(named, found, strict=True) if value is not None}


def by_the_equations(model: Any, student: Any, batch: zg.Batch) -> Tensor:
    """The loss as the paper writes it, in plain torch, sample by sample and teacher by teacher."""
    config = student.config
    model.train()
    embedded = model.embed(batch)
    network = model.heads.networks[0]
    x = model.flat(embedded.dense, embedded.fields, embedded.vectors)
    for layer in network.layers:
        x = layer(x).relu()
    z = network.output(x)
    total = torch.zeros(z.shape[1])
    for sample in range(batch.batch_size):
        for label in range(z.shape[1]):
            y = batch.labels[sample, label]
            if y.isnan():
                continue
            loss = F.binary_cross_entropy_with_logits(z[sample, label], y)
            for index, teacher in enumerate(student.teachers):
                p = batch.extras[teacher.extra].view(batch.batch_size, -1)[sample, label]
                if p.isnan():
                    continue
                if config.head is DistilHead.SINGLE_HEAD:
                    loss = loss + config.loss_weight * F.binary_cross_entropy_with_logits(z[sample, label], p)
                    continue
                head = student.heads[index][0]
                beta = config.gradient_scaling
                scaled = beta * x[sample] + (1 - beta) * x[sample].detach()
                scaled_p = torch.minimum(config.label_scaling * p, torch.ones(()))
                of_teacher = F.binary_cross_entropy_with_logits(head(scaled)[label], scaled_p)
                loss = loss + config.loss_weight * of_teacher
                if config.adapter:
                    adapter = student.adapters[index][label]
                    adapted = adapter(p.view(1))[0]
                    loss = loss + F.binary_cross_entropy_with_logits(adapted, y)
                    second = student.adapter_heads[index][0](x[sample])[label]
                    loss = loss + F.binary_cross_entropy_with_logits(second, adapted.sigmoid().detach())
            total = total + loss * F.one_hot(torch.tensor(label), z.shape[1])
    return (total / (~batch.labels.isnan()).sum(dim=0)).mean()


@pytest.mark.parametrize("num_labels", [1, 2])
@pytest.mark.parametrize("names", [("teacher",), ("old", "older")])
@pytest.mark.parametrize(
    "settings",
    [
        {"head": "single-head", "loss_weight": 0.5},
        {"head": "aux-head"},
        {"head": "aux-head", "loss_weight": 10.0, "label_scaling": 1.7, "gradient_scaling": 20.0},
        {"head": "aux-head", "loss_weight": 2.0, "gradient_scaling": 0.3, "adapter": True},
    ],
)
def test_losses_have_the_gradients_of_the_equations(
    settings: dict[str, object], names: tuple[str, ...], num_labels: int
) -> None:
    inputs = inputs_of(num_labels=num_labels, names=names)
    model, student = taught(inputs, **settings)
    batch = batch_of(inputs)
    found = gradients(model, student.loss(model.dense_outputs(model.embed(batch)), batch).mean())
    wanted = gradients(model, by_the_equations(model, student, batch))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_heads_start_at_the_mean_of_their_targets_and_adapters_at_that_of_the_labels() -> None:
    """Else the first gradients of a head say what share is positive, and go into the network that serves."""
    model = zg.build_model(zg.DNNConfig(embedding_dim=4), inputs_of(num_labels=2, names=("old", "new")), seed=3)
    served = model.closing_maps()[0].bias
    with torch.no_grad():
        served.copy_(torch.tensor([-2.0, -3.0]))
    config = DistilConfig(head=DistilHead.AUX_HEAD, adapter=True)
    student = teach(model, config, seed=5, mean_targets={"new": (0.3, 1.0)})
    assert student is not None
    old, new = (heads[0].bias for heads in student.heads)  # pyright: ignore[reportIndexIssue]
    assert torch.equal(old, served)
    torch.testing.assert_close(new.sigmoid(), torch.tensor([0.3, 0.9999]), rtol=1e-4, atol=1e-5)
    for index in range(2):
        assert torch.equal(student.adapter_heads[index][0].bias, served)  # pyright: ignore[reportIndexIssue]
        adapters = student.adapters[index].children()
        assert [float(each[-1].bias.detach()) for each in adapters] == [-2.0, -3.0]  # pyright: ignore[reportIndexIssue]


def test_a_teacher_of_one_label_moves_the_start_of_its_head_alone() -> None:
    spec = (ExtraSpec(name="teacher"),)
    inputs = dataclasses.replace(inputs_of(num_labels=2), extras=spec)
    name = inputs.labels[1].name
    model = zg.build_model(zg.DNNConfig(embedding_dim=4), inputs, seed=3)
    config = DistilConfig(head=DistilHead.AUX_HEAD, teachers=(f"teacher={name}",))
    student = teach(model, config, seed=5, mean_targets={"teacher": (0.25,)})
    assert student is not None
    bias = student.heads[0][0].bias  # pyright: ignore[reportIndexIssue]
    assert torch.equal(bias[0], model.closing_maps()[0].bias[0])
    assert float(bias[1].sigmoid().detach()) == pytest.approx(0.25)


def test_the_reported_loss_is_that_of_the_labels() -> None:
    inputs = inputs_of()
    model, student = taught(inputs, head="aux-head", adapter=True)
    batch = batch_of(inputs)
    outputs = model.dense_outputs(model.embed(batch))
    sums = student.loss(outputs, batch)
    torch.testing.assert_close(sums.total, model.loss(outputs, batch).total, rtol=0, atol=0)
    assert torch.equal(sums.weight, model.loss_weight(batch))


def test_shares_of_taught_rows_and_clipped_scores_are_counted() -> None:
    inputs = inputs_of()
    model, student = taught(inputs, head="aux-head", label_scaling=4.0)
    batch = batch_of(inputs, 40)
    batch.extras["teacher"][10:] = torch.tensor([0.1, 0.2, 0.3] * 10)
    for _ in range(2):
        student.loss(model.dense_outputs(model.embed(batch)), batch)
    facts = student.facts()
    assert facts["teacher_share"] == pytest.approx(0.75)
    assert facts["distil_clip_rate"] == pytest.approx(1 / 3)
    assert student.facts() == {}


def test_evaluation_and_state_of_the_served_network_are_those_without_a_teacher() -> None:
    inputs = inputs_of()
    model, _ = taught(inputs, head="aux-head", adapter=True)
    plain = zg.build_model(zg.DNNConfig(embedding_dim=4), inputs, seed=3)
    served = {name: value for name, value in model.state_dict().items() if not name.startswith("student.")}
    assert served.keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in served.items())
    assert len(model.state_dict()) > len(served)
    batch = dataclasses.replace(batch_of(inputs), extras={})  # a request has no teacher
    assert torch.equal(model.eval()(batch), plain.eval()(batch))


def test_a_batch_in_parts_and_an_empty_one_add_up() -> None:
    inputs = inputs_of()
    model, student = taught(inputs, head="aux-head", adapter=True, gradient_scaling=3.0)
    batch = batch_of(inputs)
    parts = [batch.rows(0, 7), batch.rows(7, 7), batch.rows(7, 24)]
    whole = student.terms(model.dense_outputs(model.embed(batch)), batch)
    added = sum(student.terms(model.dense_outputs(model.embed(part)), part) for part in parts)
    torch.testing.assert_close(added, whole)


def test_a_copy_of_a_student_reads_its_own_representation() -> None:
    inputs = inputs_of()
    model, _ = taught(inputs, head="aux-head")
    copied = copy.deepcopy(model).train()
    batch = batch_of(inputs)
    one, other = (each.dense_outputs(each.embed(batch)).named["student.head.0"] for each in (model, copied))
    assert torch.equal(one, other)


def test_the_network_of_a_student_is_one_graph() -> None:
    inputs = inputs_of()
    model, _ = taught(inputs, head="aux-head", adapter=True)
    batch = batch_of(inputs)
    embedded = model.embed(batch)
    compiled = torch.compile(model.trained_dense, fullgraph=True, backend="eager")
    found, wanted = compiled(embedded), model.trained_dense(embedded)
    assert found.named.keys() == wanted.named.keys()
    for name, value in wanted.named.items():
        torch.testing.assert_close(found.named[name], value)


REFUSED = {"logistic_regression", "finalnet", "finalmlp", "esmm", "fm", "afn", "fcn", "qnn"}


@pytest.mark.parametrize("kind", [each for each in MODEL_CONFIGS if each.reads is Reads.SAMPLES])
def test_models_have_a_final_representation_or_are_refused_by_name(kind: type) -> None:
    inputs = inputs_of(num_labels=2)
    try:
        model = zg.build_model(kind(), inputs, seed=0)
    except ConfigError:
        pytest.skip("wants other inputs")
    if model.finds_items or kind.kind in REFUSED:
        with pytest.raises(ConfigError, match=type(model).__name__):
            teach(model, DistilConfig(head=DistilHead.AUX_HEAD), seed=0)
        return
    student = teach(model, DistilConfig(head=DistilHead.AUX_HEAD, adapter=True), seed=0)
    assert student is not None
    batch = batch_of(inputs)
    outputs = model.train().dense_outputs(model.embed(batch))
    assert outputs.named["student.head.0"].shape == (24, 2)
    student.loss(outputs, batch).mean().backward()
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="label_scaling"):
        DistilConfig(head=DistilHead.SINGLE_HEAD, label_scaling=2.0).check()
    with pytest.raises(ConfigError, match="loss_weight"):
        DistilConfig(loss_weight=2.0).check()
    model = zg.build_model(zg.DNNConfig(embedding_dim=4), inputs_of(), seed=0)
    with pytest.raises(ConfigError, match=r"did you mean 'teacher'"):
        teach(model, DistilConfig(head=DistilHead.AUX_HEAD, teachers=("techer",)), seed=0)
    with pytest.raises(ConfigError, match="label0"):
        teach(model, DistilConfig(head=DistilHead.AUX_HEAD, teachers=("teacher=click",)), seed=0)
    with pytest.raises(ConfigError, match="without extra columns"):
        teach(zg.build_model(zg.DNNConfig(), small_inputs(), seed=0), DistilConfig(head=DistilHead.AUX_HEAD), seed=0)
    two = zg.build_model(zg.DNNConfig(), inputs_of(num_labels=2), seed=0)
    with pytest.raises(ConfigError, match="label1"):
        teach(two, DistilConfig(head=DistilHead.AUX_HEAD, teachers=("teacher=label1",)), seed=0)


def test_a_score_that_is_no_probability_is_refused() -> None:
    inputs = inputs_of()
    model, student = taught(inputs, head="single-head")
    batch = batch_of(inputs)
    batch.extras["teacher"][20] = -1.5
    with pytest.raises(DataError, match=r"-1\.5"):
        student.loss(model.dense_outputs(model.embed(batch)), batch)


def trained_weights(world_size: int, rank: int, dense: DenseParallelism) -> dict[str, Tensor]:
    """Weights after three steps on the same global batches."""
    inputs = inputs_of(names=("old", "older"))
    embedding = zg.EmbeddingConfig(kernel=KernelChoice.TORCH)
    model = zg.build_model(zg.DNNConfig(embedding_dim=4, embedding=embedding), inputs, seed=3)
    settings = DistilConfig(head=DistilHead.AUX_HEAD, adapter=True, gradient_scaling=3.0, label_scaling=1.5)
    student = teach(model, settings, seed=5)
    assert student is not None
    batches = [batch_of(inputs, 24, seed=number) for number in range(3)]
    return dense_weights_after(model, loss=student.loss, batches=batches, rank=rank, world_size=world_size, dense=dense)


def on_ranks(rank: int, world_size: int, dense: DenseParallelism) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in trained_weights(world_size, rank, dense).items()}


@pytest.mark.parametrize("dense", [DenseParallelism.DDP, DenseParallelism.FSDP])
def test_two_ranks_learn_what_one_device_does(dense: DenseParallelism) -> None:
    wanted = trained_weights(1, 0, dense)
    assert any(name.startswith("student.adapters.") for name in wanted)
    for found in run_ranks(on_ranks, 2, 2, dense):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(torch.tensor(found[name]), value.flatten(), rtol=1e-4, atol=1e-6)
