"""MMoE, PLE and ESMM against their equations, written as loops over samples."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ziggurat as zg
from tests.models.test_zoo import array, build, mlp, parts
from ziggurat.errors import ConfigError
from ziggurat.features.labels import MissingLabel
from ziggurat.features.schema import Task
from ziggurat.models import ESMMConfig, MLPConfig, MMoEConfig, ModelConfig, PEPNetConfig, PLEConfig, build_model
from ziggurat.models.blocks.funnel import conditional_logits, funnel_logits
from ziggurat.models.contract.losses import loss_of
from ziggurat.testing.batches import random_batch, small_inputs

EXPERT = MLPConfig(hidden_dims=(6, 4))
HEAD = MLPConfig(hidden_dims=(5,))
NONE = MLPConfig(hidden_dims=())
TWO = small_inputs(num_dense=2, num_single=2, num_jagged=1, num_labels=2)
THREE = small_inputs(num_dense=2, num_single=2, num_jagged=1, num_labels=3)


def mixture(x: np.ndarray, gate, experts: list[np.ndarray]) -> np.ndarray:
    weights = np.exp(mlp(x, gate.network))
    weights /= weights.sum()
    return sum(weight * expert for weight, expert in zip(weights, experts, strict=True))


@pytest.mark.parametrize("gate", [NONE, EXPERT])
@pytest.mark.parametrize("num_experts", [1, 3])
def test_mmoe(num_experts: int, gate: MLPConfig) -> None:
    config = MMoEConfig(embedding_dim=4, num_experts=num_experts, expert=EXPERT, gate=gate, head=HEAD)
    model = build(config, TWO)
    dense, fields = parts(model)
    found = model.interact(dense, fields, {})
    for sample, x in enumerate(array(model.flat(dense, fields, {}))):
        experts = [mlp(x, network) for network in model.experts.networks]
        for label in range(2):
            mixed = mixture(x, model.gates[label], experts) if num_experts > 1 else experts[0]
            # Weights of a mixture are FP32.
            assert found[sample, label].item() == pytest.approx(mlp(mixed, model.heads.networks[label])[0], rel=1e-5)


@pytest.mark.parametrize("num_levels", [1, 2, 3])
def test_ple(num_levels: int) -> None:
    config = PLEConfig(
        embedding_dim=4, num_levels=num_levels, num_own_experts=2, num_shared_experts=3, expert=EXPERT, head=HEAD
    )
    model = build(config, THREE)
    dense, fields = parts(model)
    found = model.interact(dense, fields, {})
    for sample, x in enumerate(array(model.flat(dense, fields, {}))):
        own = [x] * 3
        shared = x
        for level in model.levels:
            of_labels = [[mlp(own[label], network) for network in level.own[label].networks] for label in range(3)]
            of_all = [mlp(shared, network) for network in level.shared.networks]
            own = [mixture(own[label], level.gates[label], of_labels[label] + of_all) for label in range(3)]
            if level.shared_gate is not None:
                shared = mixture(shared, level.shared_gate, [*of_labels[0], *of_labels[1], *of_labels[2], *of_all])
        for label in range(3):
            expected = mlp(own[label], model.heads.networks[label])[0]
            assert found[sample, label].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        ESMMConfig(embedding_dim=4, deep=EXPERT),
        MMoEConfig(embedding_dim=4, expert=EXPERT, head=HEAD, funnel=True),
        PLEConfig(embedding_dim=4, expert=EXPERT, head=HEAD, funnel=True),
        PEPNetConfig(embedding_dim=4, deep=EXPERT, funnel=True),
    ],
)
def test_a_label_of_a_funnel_is_a_product(config: ModelConfig) -> None:
    model = build_model(config, THREE, seed=1)
    batch = random_batch(THREE, 64, seed=4)
    logits = model(batch)
    chances = logits.double().sigmoid()
    assert (chances[:, 1:] <= chances[:, :-1]).all()
    if isinstance(config, ESMMConfig):
        steps = [
            network(model.flat(batch.dense, model.embeddings(batch), batch.vectors)) for network in model.heads.networks
        ]
        expected = torch.cat(steps, dim=1).double().sigmoid().cumprod(dim=1)
        torch.testing.assert_close(chances, expected, rtol=1e-5, atol=1e-7)
    loss_of(logits, batch.labels, inputs=THREE).backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@given(st.lists(st.floats(-60, 60), min_size=2, max_size=4))
def test_logits_of_a_funnel_are_exact_where_chances_are_tiny_and_near_one(steps: list[float]) -> None:
    conditional = torch.tensor([steps], dtype=torch.float32, requires_grad=True)
    found = funnel_logits(conditional)
    assert found.isfinite().all()
    log_chance = torch.nn.functional.logsigmoid(conditional.detach().double()).cumsum(dim=1)
    expected = log_chance - torch.log(-torch.expm1(log_chance))
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-5)
    found.sum().backward()
    assert conditional.grad is not None
    assert conditional.grad.isfinite().all()


@given(st.lists(st.floats(1e-6, 0.999), min_size=2, max_size=4))
def test_a_funnel_starts_at_the_shares_of_its_labels(shares: list[float]) -> None:
    falling = sorted(shares, reverse=True)
    logits = [math.log(share / (1 - share)) for share in falling]
    found = funnel_logits(torch.tensor([conditional_logits(logits)], dtype=torch.float64))
    # Labels that are as likely as the one before start 1e-4 below it.
    np.testing.assert_allclose(found.sigmoid()[0].double(), falling, rtol=5e-4)


def test_a_funnel_of_numbers_is_refused() -> None:
    inputs = small_inputs(num_labels=2)
    number = dataclasses.replace(inputs.labels[1], task=Task.REGRESSION)
    inputs = dataclasses.replace(inputs, labels=(inputs.labels[0], number))
    for config in (ESMMConfig(embedding_dim=4), PLEConfig(embedding_dim=4, funnel=True), PEPNetConfig(funnel=True)):
        with pytest.raises(ConfigError, match="not binary: label1"):
            build_model(config, inputs, seed=0)
    assert build_model(PLEConfig(embedding_dim=4), inputs, seed=0)(random_batch(inputs, 3)).shape == (3, 2)


def test_nothing_to_mix_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts = 0"):
        MMoEConfig(num_experts=0)
    with pytest.raises(ConfigError, match="one expert or more"):
        PLEConfig(expert=NONE)


def test_a_funnel_of_steps_that_are_known_of_some_rows_is_refused() -> None:
    pytest.importorskip("polars", reason="recipes read public data by polars")
    click = zg.Label(name="click")
    buy = zg.Label(name="buy", missing=MissingLabel.LEFT_OUT)
    funnels = (ESMMConfig(), MMoEConfig(funnel=True), PLEConfig(funnel=True), PEPNetConfig(funnel=True))
    for model in (*funnels, MMoEConfig()):
        for labels in ((click, buy), (click, dataclasses.replace(buy, missing=MissingLabel.BAD_ROW))):
            schema = zg.Schema(features=(zg.Dense(name="price"),), labels=labels)
            config = zg.table_run(model, schema)
            if model in funnels and labels[1] is buy:
                with pytest.raises(ConfigError, match='missing = "left_out" of buy'):
                    config.check()
            else:
                config.check()
