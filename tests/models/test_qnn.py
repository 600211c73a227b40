"""QNN against its equations, and its two passes against the three losses written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.models.as_written import INPUTS, Given, assert_as_written
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Task
from ziggurat.models import Embedded, Normalization, QNNConfig, build_model, qnn
from ziggurat.models.contract.losses import loss_sums
from ziggurat.models.qnn import logit_of_mean
from ziggurat.ops.dropout import dropout
from ziggurat.testing.batches import random_batch

D = 4
NUM_FIELDS = 6
QNN = QNNConfig(embedding_dim=D, num_layers=2, num_rows=3, dropout=0.0)


def normal(parts: Given, name: str, values: torch.Tensor) -> torch.Tensor:
    deviation = (values.var(dim=0, unbiased=False) + 1e-5).sqrt()
    return (values - values.mean(dim=0)) / deviation * parts[f"{name}.weight"] + parts[f"{name}.bias"]


def written(parts: Given, config: QNNConfig) -> torch.Tensor:
    x = parts.stacked(D).flatten(1)
    width = NUM_FIELDS * D
    of_head = D // config.num_heads
    for layer in range(config.num_layers):
        hidden = parts.linear(f"layers.{layer}.rows.layers.0", x)
        if config.norm is Normalization.BATCH:
            hidden = normal(parts, f"layers.{layer}.rows.norms.0", hidden)
        hidden = hidden.clamp(min=0)
        fields = x.view(-1, NUM_FIELDS, D)
        products = torch.zeros_like(x)
        place = 0
        for head in range(config.num_heads):
            own = fields[:, :, head * of_head : (head + 1) * of_head].flatten(1)
            at = slice(head * own.shape[1], (head + 1) * own.shape[1])
            for _ in range(config.num_rows):
                products[:, at] = products[:, at] + own * hidden[:, place : place + own.shape[1]]
                place += own.shape[1]
        assert place == config.num_rows * width
        x = products + x
    return parts.linear("output", x)


@pytest.mark.parametrize("changes", [{}, {"num_heads": 2}, {"norm": Normalization.BATCH}, {"num_rows": 1}], ids=str)
def test_logits_and_gradients_are_those_of_the_equations(changes: dict[str, object]) -> None:
    config = dataclasses.replace(QNN, **changes)
    assert_as_written(config, lambda parts: written(parts, config))


@pytest.mark.parametrize("importance", [1.0, 3.0])
def test_two_passes_are_taught_by_the_papers_three_losses(importance: float) -> None:
    """Gradients of all weights, with weights of samples and a missing label.

    The weight of a label in the schema multiplies all three losses.
    """
    labels = tuple(dataclasses.replace(label, weight=importance) for label in INPUTS.labels)
    inputs = dataclasses.replace(INPUTS, has_weights=True, labels=labels)
    model = build_model(dataclasses.replace(QNN, dropout=0.3), inputs, seed=0)
    batch = random_batch(inputs, 32)
    batch.labels[3, 0] = torch.nan
    embedded = Embedded(dense=batch.dense, fields=torch.randn(32, 3 * D) * 0.3, vectors=batch.vectors)
    torch.manual_seed(4)
    outputs = model.forward_dense(embedded)
    reported = model.loss(outputs, batch)
    plain = loss_sums(outputs.logits, batch.labels, batch.weights, inputs=inputs)
    assert torch.equal(reported.total, plain.total)
    reported.mean().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()

    torch.manual_seed(4)
    outputs = model.forward_dense(embedded)
    first, second = (outputs.named[name].sigmoid() for name in ("first", "second"))
    assert not torch.equal(first, second)  # other units were dropped
    mean = (first + second) / 2
    torch.testing.assert_close(outputs.logits.sigmoid(), mean)
    known = batch.labels.isnan().logical_not()
    weights = batch.weights.unsqueeze(1) * known
    losses = F.binary_cross_entropy(mean, batch.labels.nan_to_num(), reduction="none")
    for each in (first, second):
        losses = losses + F.binary_cross_entropy(each, mean.detach(), reduction="none")
    (importance * (losses * weights).sum(dim=0) / weights.sum(dim=0)).mean().backward()
    for name, weight in model.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"num_heads": 2}, {"norm": Normalization.BATCH}, {"norm": Normalization.LAYER}], ids=str
)
def test_what_two_passes_share_is_what_each_computes(changes: dict[str, object]) -> None:
    """The same units are dropped, so logits, gradients and the statistics of norms are those of two whole passes."""
    config = dataclasses.replace(QNN, dropout=0.3, **changes)
    models = [build_model(config, INPUTS, seed=0) for _ in range(2)]
    batch = random_batch(INPUTS, 32)
    embedded = Embedded(dense=batch.dense, fields=torch.randn(32, 3 * D) * 0.3, vectors=batch.vectors)
    found: list[list[torch.Tensor]] = []
    for model, shares in zip(models, (True, False), strict=True):
        assert isinstance(model, qnn.QNN)
        torch.manual_seed(4)
        if shares:
            named = model.forward_dense(embedded).named
            passes = [named["first"], named["second"]]
        else:
            flat = model.stack(embedded.dense, embedded.fields, embedded.vectors).flatten(1)
            passes = []
            for _ in range(2):
                hidden = flat
                for layer in model.layers:
                    # The MLP of the rows: a linear map, its norm, ReLU and dropout.
                    rows = layer.rows(hidden).unflatten(1, (config.num_heads, config.num_rows, -1)).sum(dim=2)
                    turned = hidden.unflatten(1, (NUM_FIELDS, config.num_heads, -1)).transpose(1, 2).flatten(1)
                    hidden = dropout(hidden + turned * rows.flatten(1), p=0.3, training=True)
                passes.append(model.output(hidden))
        assert not torch.equal(*passes)
        (passes[0].square().sum() + passes[1].sum()).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found.append([*(each.detach() for each in passes), *gradients, *model.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=3e-5)


def test_without_dropout_or_in_evaluation_one_pass_is_made() -> None:
    batch = random_batch(INPUTS, 8)
    for model in (
        build_model(QNN, INPUTS, seed=0),
        build_model(dataclasses.replace(QNN, dropout=0.3), INPUTS, seed=0).eval(),
    ):
        assert model.outputs_of(batch).named == {}
    assert build_model(dataclasses.replace(QNN, dropout=0.3), INPUTS, seed=0).outputs_of(batch).named.keys() == {
        "first",
        "second",
    }


def test_a_number_is_the_mean_of_both_passes() -> None:
    labels = tuple(dataclasses.replace(label, task=Task.REGRESSION) for label in INPUTS.labels)
    inputs = dataclasses.replace(INPUTS, labels=labels)
    outputs = build_model(dataclasses.replace(QNN, dropout=0.3), inputs, seed=0).outputs_of(random_batch(inputs, 8))
    torch.testing.assert_close(outputs.logits, (outputs.named["first"] + outputs.named["second"]) / 2)


def test_the_logit_of_a_mean_is_exact_where_probabilities_are_0_or_1() -> None:
    first = torch.tensor([0.0, 200.0, -200.0, 90.0, -3.0], dtype=torch.float64)
    second = torch.tensor([0.0, 200.0, -200.0, -90.0, 1.0], dtype=torch.float64)
    found = logit_of_mean(first, second)
    mean = (first.sigmoid()[-1] + second.sigmoid()[-1]) / 2
    torch.testing.assert_close(found, torch.stack([*found.new_tensor([0.0, 200.0, -200.0, 0.0]), torch.logit(mean)]))


def test_heads_that_do_not_divide_are_refused_with_ways_out_that_work() -> None:
    with pytest.raises(ConfigError, match="num_heads = 3") as caught:
        QNNConfig(embedding_dim=16, num_heads=3)
    assert "set embedding_dim = 24" in str(caught.value)
    QNNConfig(embedding_dim=24, num_heads=3)
    QNNConfig(embedding_dim=16, num_heads=1)
