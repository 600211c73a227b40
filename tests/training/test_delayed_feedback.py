"""Losses of delayed feedback: their equations written with loops, and what they learn where the truth is known."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import ziggurat as zg
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.label_state import LABEL_STATE, LabelState
from ziggurat.models.contract.losses import labelled_weights
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.delayed_feedback import (
    DelayedConfig,
    DelayedFeedback,
    correct_labels,
    losses_of_delays,
)
from ziggurat.training.delayed_losses import DelayChances, DelayedLoss, DelayedRows

KNOWN, ASSUMED, CORRECTED, CONFIRMED = LabelState
LOSSES = [loss for loss in DelayedLoss if loss is not DelayedLoss.NONE]


def sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z))


def by_hand(loss: DelayedLoss, z: float, v: int, state: LabelState, *, d: float, r: float) -> float:
    """Equations (2) to (6) for one row; f, d and r are probabilities."""
    f = sigmoid(z)
    if_positive = -math.log(f)
    if_negative = -math.log(1.0 - f)
    r = r if state is ASSUMED else 1.0
    match loss:
        case DelayedLoss.NONE:
            return if_positive if v else if_negative
        case DelayedLoss.FNW:
            return (1 + f) * if_positive if v else (1 - f) * (1 + f) * if_negative
        case DelayedLoss.FNC:
            return -math.log(f / (1 + f)) if v else -math.log(1 / (1 + f))
        case DelayedLoss.ES_DFM:
            return (1 + d) * if_positive if v else (1 + d) * r * if_negative
        case DelayedLoss.DEFUSE:
            if v:
                return if_positive if state is CORRECTED else (1 + d) * if_positive
            fake = 1 - r
            return (1 - fake) * (1 + d) * if_negative + fake * d * if_positive
        case _:
            raise AssertionError(loss)


ROWS = st.lists(
    st.tuples(
        st.floats(-6, 6),
        st.sampled_from([(1, KNOWN), (0, KNOWN), (0, ASSUMED), (1, CORRECTED)]),
        st.floats(-5, 5),
        st.floats(-5, 5),
    ),
    min_size=0,
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(rows=ROWS, loss=st.sampled_from(list(DelayedLoss)))
def test_losses_are_their_equations(
    rows: list[tuple[float, tuple[int, LabelState], float, float]], loss: DelayedLoss
) -> None:
    states = torch.tensor([float(state.number) for _, (_, state), _, _ in rows])
    beside = torch.tensor([[d, r] for _, _, d, r in rows], dtype=torch.float64).view(-1, 2)
    of_loss = DelayedRows(
        logits=torch.tensor([z for z, _, _, _ in rows], dtype=torch.float64),
        labels=torch.tensor([float(v) for _, (v, _), _, _ in rows], dtype=torch.float64),
        states=states,
        chances=DelayChances.of(beside, states),
    )
    found = loss.of_rows(of_loss)
    expected = [by_hand(loss, z, v, state, d=sigmoid(d), r=sigmoid(r)) for z, (v, state), d, r in rows]
    assert found.tolist() == pytest.approx(expected, rel=1e-9)


def test_the_network_beside_learns_from_rows_whose_label_is_certain_alone() -> None:
    logits = torch.tensor([[0.3, -0.7]] * 4, dtype=torch.float64)
    states = torch.tensor([float(state.number) for state in LabelState])
    found = losses_of_delays(logits, states).tolist()
    d, r = sigmoid(0.3), sigmoid(-0.7)
    corrected = -math.log(d) - math.log(1 - r)
    confirmed = -math.log(1 - d) - math.log(r)
    assert found == pytest.approx([-math.log(1 - d), 0.0, corrected, confirmed])


@dataclasses.dataclass(frozen=True)
class Click:
    """A kind of click: chances of a positive within the observation, one behind it, and a negative known at once."""

    observed: float
    late: float
    certain: float

    @property
    def p(self) -> float:
        return self.observed + self.late

    @property
    def r(self) -> float:
        """Chance that an assumed negative is one."""
        real = 1.0 - self.p - self.certain
        return real / (real + self.late)

    def rows(self) -> list[tuple[float, int, LabelState]]:
        """The rows that a click is trained as: how often on average, label, state."""
        real = 1.0 - self.p - self.certain
        found = [(self.observed, 1, KNOWN), (self.late, 0, ASSUMED), (self.late, 1, CORRECTED)]
        return [*found, (real, 0, ASSUMED), (self.certain, 0, KNOWN)]


OBSERVED = [Click(0.2, 0.1, 0.0), Click(0.02, 0.3, 0.3), Click(0.5, 0.05, 0.2), Click(0.001, 0.02, 0.0)]
NOT_OBSERVED = [Click(0.0, 0.1, 0.0), Click(0.0, 0.6, 0.0), Click(0.0, 0.01, 0.0)]


def gradient_of(loss: DelayedLoss, click: Click, z: float) -> float:
    """The mean gradient of the rows of a click at a logit, with the true d and r."""
    logit = torch.tensor([z], dtype=torch.float64, requires_grad=True)
    beside = torch.tensor([[click.late, click.r]], dtype=torch.float64).logit()
    total = torch.zeros((), dtype=torch.float64)
    for share, v, state in click.rows():
        states = torch.tensor([float(state.number)])
        chances = DelayChances.of(beside, states)
        label = torch.tensor([float(v)], dtype=torch.float64)
        one = loss.of_rows(DelayedRows(logits=logit, labels=label, states=states, chances=chances))
        total = total + share * one.sum()
    total.backward()
    assert logit.grad is not None
    return float(logit.grad)


@pytest.mark.parametrize("loss", [DelayedLoss.ES_DFM, DelayedLoss.DEFUSE])
@pytest.mark.parametrize("click", [*OBSERVED, *NOT_OBSERVED])
def test_the_mean_gradient_is_that_of_the_true_label_times_the_rows_of_a_click(loss: DelayedLoss, click: Click) -> None:
    for z in (-5.0, -1.0, 0.0, 2.0):
        of_true_label = sigmoid(z) - click.p
        assert gradient_of(loss, click, z) == pytest.approx((1.0 + click.late) * of_true_label, rel=1e-9)


@pytest.mark.parametrize("click", NOT_OBSERVED)
def test_fake_negative_weights_point_to_the_truth_from_everywhere(click: Click) -> None:
    for z in (-5.0, -1.0, 0.0, 2.0):
        f = sigmoid(z)
        expected = (1.0 + f) * (1.0 - f) * (f - click.p)
        assert gradient_of(DelayedLoss.FNW, click, z) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "clicks"),
    [
        (DelayedLoss.FNW, NOT_OBSERVED),
        (DelayedLoss.FNC, NOT_OBSERVED),
        (DelayedLoss.ES_DFM, OBSERVED + NOT_OBSERVED),
        (DelayedLoss.DEFUSE, OBSERVED + NOT_OBSERVED),
    ],
)
def test_each_loss_is_still_at_the_true_probability_alone(loss: DelayedLoss, clicks: list[Click]) -> None:
    for click in clicks:
        low, high = -20.0, 20.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if gradient_of(loss, click, middle) < 0 else (low, middle)
        assert sigmoid(low) == pytest.approx(click.p, rel=1e-6)


def test_without_weights_the_biased_share_is_learned() -> None:
    click = OBSERVED[0]
    biased = click.p / (1.0 + click.late)
    assert gradient_of(DelayedLoss.NONE, click, math.log(biased / (1 - biased))) == pytest.approx(0.0, abs=1e-12)


def inputs_and_batch(size: int = 24, *, seed: int = 0) -> tuple[zg.DLRMConfig, Batch]:
    inputs = small_inputs()
    batch = random_batch(inputs, batch_size=size, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    states = torch.randint(0, 4, (size,), generator=rng).float()
    labels = batch.labels.clone()
    labels[:, 0] = torch.where(
        states == ASSUMED.number, 0.0, torch.where(states == CORRECTED.number, 1.0, labels[:, 0])
    )
    labels[:, 0] = torch.where(states == CONFIRMED.number, 0.0, labels[:, 0])
    return zg.DLRMConfig(embedding_dim=4), dataclasses.replace(batch, labels=labels, extras={LABEL_STATE: states})


def model_with(loss: DelayedLoss, config: zg.DLRMConfig) -> tuple[zg.Model, DelayedFeedback]:
    model = zg.build_model(config, small_inputs(), seed=0)
    made = correct_labels(model, DelayedConfig(loss=loss), seed=0)
    assert made is not None
    return model, made


@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_of_a_batch_is_the_sum_of_its_rows(loss: DelayedLoss) -> None:
    config, batch = inputs_and_batch()
    model, made = model_with(loss, config)
    if made.network is not None:
        torch.nn.init.normal_(made.network[-1].weight)  # type: ignore[arg-type]
    model.train()
    outputs = model.dense_outputs(model.embed(batch))
    sums = made.loss(outputs, batch)
    weights = labelled_weights(batch.labels, batch.weights, inputs=model.inputs)[:, 0].tolist()
    beside = outputs.named["delayed.logits"].tolist() if made.network is not None else [[0.0, 0.0]] * len(weights)
    expected = 0.0
    for row, state in enumerate(batch.extras[LABEL_STATE].tolist()):
        if state == CONFIRMED.number or not weights[row]:
            continue
        d, r = (sigmoid(each) for each in beside[row])
        z = float(outputs.logits[row, 0].detach())
        value = by_hand(loss, z, int(batch.labels[row, 0]), list(LabelState)[int(state)], d=d, r=r)
        expected += weights[row] * value * model.inputs.labels[0].weight
    assert float(sums.total[0].detach()) == pytest.approx(expected, rel=1e-4)
    plain = model.loss(outputs, batch)
    assert torch.equal(sums.weight, plain.weight)
    assert sums.total[1:].tolist() == pytest.approx(plain.total[1:].tolist(), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_rows_has_a_loss_of_nothing_and_gradients_of_zero(loss: DelayedLoss) -> None:
    model, made = model_with(loss, zg.DLRMConfig(embedding_dim=4))
    model.train()
    batch = Batch.empty(model.inputs)
    sums = made.loss(model.dense_outputs(model.embed(batch)), batch)
    assert sums.total.sum() == 0.0
    sums.total.sum().backward()
    for parameter in made.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_weights_in_a_loss_carry_no_gradient_into_the_network_beside() -> None:
    logit = torch.tensor([0.4, -0.2, 1.0], requires_grad=True)
    beside = torch.zeros(3, 2, requires_grad=True)
    for loss in (DelayedLoss.ES_DFM, DelayedLoss.DEFUSE):
        states = torch.tensor([0.0, 1.0, 2.0])
        chances = DelayChances.of(beside, states)
        labels = torch.tensor([1.0, 0.0, 1.0])
        loss.of_rows(DelayedRows(logits=logit, labels=labels, states=states, chances=chances)).sum().backward()
    assert beside.grad is None
    assert logit.grad is not None


def test_the_network_beside_changes_no_score_and_no_starting_weight() -> None:
    config, batch = inputs_and_batch()
    plain = zg.build_model(config, small_inputs(), seed=0)
    model, made = model_with(DelayedLoss.ES_DFM, config)
    served = {name: value for name, value in model.state_dict().items() if not name.startswith("student.")}
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in served.items())
    assert torch.equal(model.eval()(batch), plain.eval()(batch))
    assert "weights that are not served" in made.lines()["delayed labels"]


def test_batches_that_do_not_say_what_is_known_are_refused() -> None:
    config, batch = inputs_and_batch()
    model, made = model_with(DelayedLoss.FNW, config)
    outputs = model.dense_outputs(model.embed(batch))
    with pytest.raises(ConfigError, match=r"without 'label\.state'"):
        made.loss(outputs, dataclasses.replace(batch, extras={}))


def test_positives_that_weigh_more_are_refused() -> None:
    inputs = small_inputs()
    labels = tuple(dataclasses.replace(label, positive_weight=3.0) for label in inputs.labels)
    model = zg.build_model(zg.DLRMConfig(embedding_dim=4), dataclasses.replace(inputs, labels=labels), seed=0)
    with pytest.raises(ConfigError, match="positive_weight = 3"):
        correct_labels(model, DelayedConfig(loss=DelayedLoss.FNW), seed=0)


def test_the_log_says_what_the_rows_were_and_what_the_network_beside_thinks() -> None:
    config, batch = inputs_and_batch()
    model, made = model_with(DelayedLoss.DEFUSE, config)
    model.train()
    made.loss(model.dense_outputs(model.embed(batch)), batch)
    facts = made.facts()
    states = batch.extras[LABEL_STATE]
    assert facts["assumed_share"] == pytest.approx(float((states == ASSUMED.number).float().mean()))
    assert facts["corrected_share"] == pytest.approx(float((states == CORRECTED.number).float().mean()))
    assert facts["delayed_mean"] == pytest.approx(sigmoid(-3.9), rel=1e-4)
    assert made.facts() == {}


@pytest.mark.parametrize("name", ["es-dfm", "es_dfm"])
def test_a_dash_stands_for_an_underscore(name: str) -> None:
    assert DelayedConfig(loss=name).loss is DelayedLoss.ES_DFM  # type: ignore[arg-type]
