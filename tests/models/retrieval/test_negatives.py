"""Drawn negatives and the OverArch: their loss is that of plain Python, and what is missing is named."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.models.retrieval.test_two_tower import CONFIG, inputs
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models import Correction, build_model
from ziggurat.models.contract.negatives import CANDIDATES, DrawnLayout, NegativesConfig, NegativesKind
from ziggurat.models.retrieval.over_arch import OverArchConfig, OverArchKind, OverArchLearning
from ziggurat.testing.batches import random_batch

DRAWN = (NegativesKind.UNIFORM, NegativesKind.MIXED, NegativesKind.MINED)


def drawn_batch(spec: InputSpec, num_samples: int, *, block: int, drawn: int, seed: int) -> Batch:
    """Samples and drawn items as a run would lay them out, some drawn items struck out."""
    layout = DrawnLayout.of_samples(num_samples, block=block, drawn=drawn)
    batch = random_batch(spec, layout.num_rows, seed=seed)
    places = layout.drawn_items().reshape(-1)
    batch.labels[places], batch.weights[places], batch.groups[places] = math.nan, 0.0, 0
    candidates = batch.single[1].clone()
    candidates[places[np.random.default_rng(seed).random(len(places)) < 0.2]] = -1
    return dataclasses.replace(batch, extras={CANDIDATES: candidates})


def over_arch_score(model, user: list[float], item: list[float]) -> float:
    """φ of one pair, from the formulas alone."""
    over = model.over_arch
    u, x = torch.tensor(user, dtype=torch.float64), torch.tensor(item, dtype=torch.float64)
    named = {name: value.detach().double() for name, value in over.named_parameters()}
    if over.config.kind is OverArchKind.MLP:
        hidden = named["of_user.weight"] @ u + named["of_user.bias"] + named["of_item.weight"] @ x
        hidden = (hidden + (u * x) @ named["of_product"]).clamp(min=0)
        return float(u @ x + named["out"] @ hidden)
    d, deltas = over.config.component_dim, []
    users = named["user_components.weight"] @ u + named["user_components.bias"]
    items = named["item_components.weight"] @ x + named["item_components.bias"]
    for h in items.split(d):
        deltas += [f @ h / (f.norm() * h.norm()) for f in users.split(d)]
    delta = torch.stack(deltas)
    hidden = torch.nn.functional.silu(named["gate_in.weight"] @ delta + named["gate_in.bias"])
    gate = named["gate_out.weight"] @ hidden + named["gate_out.bias"]
    of_user = named["user_gate.weight"] @ u + named["user_gate.bias"]
    gate = gate + of_user * (named["item_gate.weight"] @ x + named["item_gate.bias"])
    return float(u @ x + named["amount"][0] * (gate.softmax(0) @ delta))


def naive_loss(model, outputs, batch: Batch, *, counts: np.ndarray) -> tuple[list, list]:
    """Numerators and denominators, block by block, sample by sample, candidate by candidate."""
    config = model.config
    n, m, kind = config.negatives_block, config.negatives.extra_samples, config.negatives.kind
    users, items = outputs.named["user"].tolist(), outputs.named["item"].tolist()
    groups, labels, weights = batch.groups.tolist(), batch.labels.tolist(), batch.weights.tolist()
    rows, tau = batch.extras[CANDIDATES].tolist(), math.exp(model.log_temperature.item())
    num_items, totals, denominators = int((counts[3:] > 0).sum()), [0.0] * 2, [0.0] * 2
    for first in range(0, batch.batch_size, n + m):
        end = min(first + n + m, batch.batch_size)
        own, drawn = range(first, end - m), range(end - m, end)
        likes = {k: any(y > 0 and weights[k] > 0 for y in labels[k]) for k in own}

        def log_q(j: int, own=own, drawn=drawn) -> float:
            if config.correction is Correction.NONE or kind is NegativesKind.UNIFORM:
                return 0.0
            expected = len(own) * max(counts[rows[j]], 1) / max(counts.sum(), 1)
            if kind is NegativesKind.MIXED:
                return math.log(expected + m / max(num_items, 1))
            return 0.0 if j in drawn else math.log(expected)

        for b in own:
            liked = {rows[k] for k in own if likes[k] and groups[k] == groups[b] and (groups[b] != 0 or k == b)}
            taken = drawn if kind is NegativesKind.UNIFORM else [*own, *drawn]
            others = [j for j in taken if j != b and rows[j] >= 0 and rows[j] != rows[b] and rows[j] not in liked]
            dots = {
                j: sum(u * v for u, v in zip(users[b], items[j], strict=True)) / tau - log_q(j) for j in [b, *others]
            }
            loss = math.log(sum(math.exp(s - dots[b]) for s in dots.values()))
            if model.over_arch is not None:
                raw = {j: dots[j] + log_q(j) for j in dots}
                found = sorted(raw, key=lambda j: -raw[j])[: config.over_arch.hardest]
                if b in found:
                    again = {j: over_arch_score(model, users[b], items[j]) / tau - log_q(j) for j in found}
                    loss += config.over_arch.weight * math.log(sum(math.exp(s - again[b]) for s in again.values()))
            for index in range(2):
                y = 0.0 if math.isnan(labels[b][index]) else labels[b][index]
                totals[index] += weights[b] * y * loss
                denominators[index] += weights[b] * y
    return totals, denominators


@pytest.mark.parametrize("seed", range(18))
def test_loss_is_that_of_plain_python(seed):
    rng = np.random.default_rng(seed)
    block, drawn, size = int(rng.integers(2, 7)), int(rng.integers(1, 5)), int(rng.integers(1, 20))
    over_arch = OverArchConfig(
        kind=rng.choice(list(OverArchKind)), hidden=5, user_components=2, item_components=3, component_dim=4,
        hardest=int(rng.integers(1, 12)), weight=0.5, learning=rng.choice(list(OverArchLearning)),
    )  # fmt: skip
    config = dataclasses.replace(
        CONFIG,
        negatives_block=block,
        negatives=NegativesConfig(kind=DRAWN[seed % 3], num_drawn=drawn),
        over_arch=over_arch,
        correction=rng.choice(list(Correction)),
        temperature=float(rng.choice([0.3, 1.0])),
    )
    spec = inputs()
    model = build_model(config, spec, seed=seed)
    history = random_batch(spec, 50, seed=seed + 100)
    model.observe(iter([history]))
    if model.over_arch is not None:  # at the start nothing of it counts
        with torch.no_grad():
            for name, value in model.over_arch.named_parameters():
                value.add_(torch.randn(value.shape) * (name in ("amount", "out")))
    batch = drawn_batch(spec, size, block=block, drawn=drawn, seed=seed)
    outputs = model.forward_dense(model.embed(batch))
    sums = model.loss(outputs, batch)
    counts = np.bincount(history.single[1].numpy(), minlength=9)
    totals, denominators = naive_loss(model, outputs, batch, counts=counts)
    assert sums.total.tolist() == pytest.approx(totals, rel=1e-4, abs=1e-5)
    assert sums.weight.tolist() == pytest.approx(denominators, rel=1e-5, abs=1e-6)
    assert model.loss_weight(batch).tolist() == pytest.approx(sums.weight.tolist())
    places = DrawnLayout(batch.batch_size, block, drawn).drawn_items().reshape(-1)
    assert not outputs.named["user"][places].any()
    sums.mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", [OverArchKind.MLP, OverArchKind.MIXTURE_OF_LOGITS])
def test_on_top_leaves_the_encoders_alone(kind):
    def gradients(over_arch: OverArchConfig) -> dict[str, torch.Tensor]:
        model = build_model(dataclasses.replace(CONFIG, over_arch=over_arch), inputs(), seed=1)
        model.observe([random_batch(inputs(), 50)])
        with torch.no_grad():
            for name, value in () if model.over_arch is None else model.over_arch.named_parameters():
                value.add_(1.0 * (name in ("amount", "out")))
        batch = random_batch(inputs(), 10, seed=2)
        model.loss(model.forward_dense(model.embed(batch)), batch).mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    alone = gradients(OverArchConfig())
    on_top = gradients(OverArchConfig(kind=kind, learning=OverArchLearning.ON_TOP))
    together = gradients(OverArchConfig(kind=kind))
    assert all(torch.equal(on_top[name], alone[name]) for name in alone)
    assert all(on_top[name].any() for name in on_top if name.startswith("over_arch"))
    assert any(not torch.equal(together[name], alone[name]) for name in alone)


def test_layout_adds_up():
    for size, block, drawn in [(0, 4, 3), (1, 4, 3), (4, 4, 3), (9, 4, 1), (12, 4, 5)]:
        layout = DrawnLayout.of_samples(size, block=block, drawn=drawn)
        expected, number = [], size
        for first in range(0, size, block):
            expected += range(first, min(first + block, size))
            expected += range(number, number + drawn)
            number += drawn
        assert layout.order().tolist() == expected
        assert layout.num_samples == size


def test_a_batch_that_nobody_drew_for_is_named():
    model = build_model(
        dataclasses.replace(CONFIG, negatives=NegativesConfig(kind=NegativesKind.MIXED, num_drawn=2)), inputs(), seed=0
    )
    batch = random_batch(inputs(), 10)
    with pytest.raises(ConfigError, match="2 items were drawn for"):
        model.loss(model.forward_dense(model.embed(batch)), batch)
    with pytest.raises(ConfigError, match="num_drawn"):
        NegativesConfig(kind=NegativesKind.MIXED, num_drawn=0)
