"""TwoTower: its loss is that of plain Python, its vectors know one side only, and what does not fit is named."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from ziggurat.embeddings import TableOptimizer
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec, VectorSpec
from ziggurat.features.items import Items
from ziggurat.features.schema import Pooling, Task
from ziggurat.models import (
    Correction,
    EncoderConfig,
    EncoderInteraction,
    MLPConfig,
    Temperature,
    TowerModuleConfig,
    TowerModuleKind,
    TwoTowerConfig,
    UserVectors,
    VectorLength,
    build_model,
)
from ziggurat.models.contract.negatives import NegativesConfig, NegativesKind
from ziggurat.models.retrieval.over_arch import OverArchConfig, OverArchKind
from ziggurat.plan import Towers
from ziggurat.testing.batches import random_batch

MLP = MLPConfig(hidden_dims=(8,))
CONFIG = TwoTowerConfig(
    embedding_dim=4, output_dim=6, user=EncoderConfig(hidden=MLP), item=EncoderConfig(hidden=MLP), negatives_block=5
)


def inputs(**changes) -> InputSpec:
    """User 0, history (the items' table), age, taste; item 1, its genres, price and picture."""
    rows = {"user": 7, "item": 9, "genre": 5}
    spec = InputSpec(
        dense=("age", "price", "hour"),
        single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
        jagged=(JaggedSpec(name="history", table="item"), JaggedSpec(name="genres", table="genre")),
        vectors=(VectorSpec(name="taste", dim=3), VectorSpec(name="picture", dim=2)),
        tables=tuple(TableSpec(name=name, num_rows=number) for name, number in rows.items()),
        labels=(LabelSpec(name="like"), LabelSpec(name="buy")),
        has_weights=True,
        has_groups=True,
        items=Items(id="item", features=("genres", "price", "picture")),
    )
    return dataclasses.replace(spec, **changes)


def naive_loss(model, outputs, batch: Batch, *, block: int, counts: np.ndarray | None) -> tuple[list, list]:
    """Numerators and denominators, sample by sample and candidate by candidate."""
    users, items = outputs.named["user"].tolist(), outputs.named["item"].tolist()
    rows, groups = batch.single[1].tolist(), batch.groups.tolist()
    labels, weights, tau = batch.labels.tolist(), batch.weights.tolist(), math.exp(model.log_temperature.item())
    num_labels = len(labels[0])
    likes = [any(y > 0 and w > 0 for y in labels[k]) for k, w in enumerate(weights)]
    totals, denominators = [0.0] * num_labels, [0.0] * num_labels
    for b in range(batch.batch_size):
        first = b // block * block
        own = range(first, min(first + block, batch.batch_size))
        liked = {rows[k] for k in own if likes[k] and groups[k] == groups[b] and (groups[b] != 0 or k == b)}
        scores = {}
        for j in own:
            if j == b or (rows[j] != rows[b] and rows[j] not in liked):
                q = max(counts[rows[j]], 1) / max(counts.sum(), 1) if counts is not None else 1.0
                scores[j] = sum(u * v for u, v in zip(users[b], items[j], strict=True)) / tau - math.log(q)
        loss = math.log(sum(math.exp(s - scores[b]) for s in scores.values()))
        for index in range(num_labels):
            y = 0.0 if math.isnan(labels[b][index]) else labels[b][index]
            totals[index] += weights[b] * y * loss
            denominators[index] += weights[b] * y
    return totals, denominators


@pytest.mark.parametrize("seed", range(12))
def test_loss_is_that_of_plain_python(seed):
    rng = np.random.default_rng(seed)
    block, size = int(rng.integers(2, 7)), int(rng.integers(0, 20))
    config = dataclasses.replace(
        CONFIG,
        negatives_block=block,
        correction=rng.choice(list(Correction)),
        length=rng.choice(list(VectorLength)),
        temperature_is=rng.choice(list(Temperature)),
        temperature=float(rng.choice([0.3, 1.0])),
    )
    spec = inputs()
    model = build_model(config, spec, seed=seed)
    history = [random_batch(spec, 50, seed=seed + 100)]
    model.observe(iter(history))
    counts = np.bincount(history[0].single[1].numpy(), minlength=9)
    assert model.item_counts.tolist() == counts.tolist()
    batch = random_batch(spec, size, seed=seed)
    batch.labels[rng.random((size, 2)) < 0.2] = math.nan
    batch.weights[rng.random(size) < 0.2] = 0.0
    outputs = model.forward_dense(model.embed(batch))
    sums = model.loss(outputs, batch)
    log_q = counts if config.correction is Correction.LOG_Q else None
    totals, denominators = naive_loss(model, outputs, batch, block=block, counts=log_q)
    assert sums.total.tolist() == pytest.approx(totals, rel=1e-4, abs=1e-5)
    assert sums.weight.tolist() == pytest.approx(denominators, rel=1e-5, abs=1e-6)
    assert model.loss_weight(batch).tolist() == sums.weight.tolist()
    sums.mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def changed(batch: Batch, *, side: str) -> Batch:
    """The batch with other features on one side."""
    other = random_batch(inputs(), batch.batch_size, seed=99)
    mine = {"user": ([0, 2], 0, "taste"), "item": ([1], 1, "picture")}[side]
    dense, single = batch.dense.clone(), batch.single.clone()
    dense[:, mine[0]], single[mine[1]] = other.dense[:, mine[0]], other.single[mine[1]]
    vectors = batch.vectors | {mine[2]: other.vectors[mine[2]]}
    return dataclasses.replace(batch, dense=dense, single=single, vectors=vectors)


@pytest.mark.parametrize("interaction", list(EncoderInteraction))
def test_each_vector_depends_on_its_own_side_alone_and_every_weight_learns(interaction):
    encoder = EncoderConfig(interaction=interaction, hidden=MLP)
    model = build_model(dataclasses.replace(CONFIG, user=encoder, item=encoder), inputs(), seed=1)
    batch = random_batch(inputs(), 10, seed=2)
    with torch.no_grad():
        users, items = model.user_vectors(batch), model.item_vectors(batch)
        assert torch.equal(users, model.user_vectors(changed(batch, side="item")))
        assert torch.equal(items, model.item_vectors(changed(batch, side="user")))
        assert not torch.equal(users, model.user_vectors(changed(batch, side="user")))
        assert not torch.equal(items, model.item_vectors(changed(batch, side="item")))
        assert torch.allclose(users.norm(dim=1), torch.ones(10))
        logits = model(batch)
    assert users.shape == items.shape == (10, 6)
    assert users.dtype == torch.float32
    assert torch.allclose(logits, ((users * items).sum(1) / 0.1).unsqueeze(1).expand(-1, 2), atol=1e-5)
    model.observe([batch])
    model.loss(model.forward_dense(model.embed(batch)), batch).mean().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert not unused


def test_it_learns_who_likes_what():
    """Users like the item of their own number; after some steps each finds it among all."""
    spec = inputs(dense=(), vectors=(), jagged=(), has_weights=False, has_groups=False, labels=(LabelSpec(name="l"),))
    spec = dataclasses.replace(spec, items=Items(id="item"))
    model = build_model(dataclasses.replace(CONFIG, negatives_block=4), spec, seed=0)
    dense, tables = torch.optim.Adam(model.parameters(), lr=0.005), TableOptimizer(model.embeddings)
    batch = random_batch(spec, 4, seed=0)
    batch = dataclasses.replace(batch, single=torch.tensor([[3, 4, 5, 6], [3, 4, 5, 6]]), labels=torch.ones(4, 1))
    model.observe([batch])
    for _ in range(150):
        dense.zero_grad()
        model.loss(model.forward_dense(model.embed(batch)), batch).mean().backward()
        dense.step()
        tables.step(0.05)
    with torch.no_grad():
        best = (model.user_vectors(batch) @ model.item_vectors(batch).T).argmax(dim=1)
    assert best.tolist() == [0, 1, 2, 3]


def test_what_does_not_fit_is_named():
    with pytest.raises(SchemaError, match="which features describe the item"):
        build_model(CONFIG, inputs(items=None), seed=0)
    everything = Items(id="item", features=("user", "history", "age", "hour", "taste", "genres", "price", "picture"))
    with pytest.raises(SchemaError, match="user or the moment"):
        build_model(CONFIG, inputs(items=everything), seed=0)
    with pytest.raises(SchemaError, match="binary labels"):
        build_model(CONFIG, inputs(labels=(LabelSpec(name="stars", task=Task.REGRESSION),)), seed=0)
    unpooled = (JaggedSpec(name="history", table="item", pooling=Pooling.NONE), inputs().jagged[1])
    with pytest.raises(ConfigError, match="lists that are pooled"):
        build_model(CONFIG, inputs(jagged=unpooled), seed=0)
    with pytest.raises(ConfigError, match="no negatives"):
        dataclasses.replace(CONFIG, negatives_block=1)


def test_towers_stay_on_one_side():
    linear = TowerModuleConfig(kind=TowerModuleKind.LINEAR, compression=2.0)
    config = dataclasses.replace(CONFIG, tower_module=linear)
    own = tuple(dataclasses.replace(each, table=each.name) for each in inputs().jagged)
    tables = (*inputs().tables[:2], *(TableSpec(name=each.name, num_rows=9) for each in own))
    spec = inputs(jagged=own, tables=tables)
    apart = Towers(towers=(("item", "genres"), ("history", "user")))
    model = build_model(config, spec, seed=0, towers=apart)
    batch = random_batch(spec, 5)
    other = dataclasses.replace(batch, single=torch.stack([batch.single[0].flip(0), batch.single[1]]))
    with torch.no_grad():
        assert torch.equal(model.item_vectors(batch), model.item_vectors(other))
        assert not torch.equal(model.user_vectors(batch), model.user_vectors(other))
    with pytest.raises(ConfigError, match="user features alone or of item features alone"):
        build_model(config, spec, seed=0, towers=Towers(towers=(("item", "user"), ("history", "genres"))))


def test_a_vector_for_each_task_has_the_loss_of_its_own_label() -> None:
    config = dataclasses.replace(CONFIG, user_vectors=UserVectors.PER_TASK)
    model, batch = build_model(config, inputs(), seed=1), random_batch(inputs(), batch_size=13, seed=2)
    model.observe([batch])
    outputs = model.forward_dense(model.embed(batch))
    both = outputs.named["user"].detach()
    assert both.shape == (13, 12)
    torch.testing.assert_close(both.view(13, 2, 6).norm(dim=2), torch.ones(13, 2))
    torch.testing.assert_close(model.task_vectors(batch).detach(), both.view(13, 2, 6))
    torch.testing.assert_close(model.user_vectors(batch).detach(), both.view(13, 2, 6).mean(1))
    sums, counts = model.loss(outputs, batch), model.item_counts.numpy()
    for label in range(2):
        mine = both[:, 6 * label : 6 * (label + 1)]
        of_label = dataclasses.replace(outputs, named={"user": mine, "item": outputs.named["item"].detach()})
        totals, weights = naive_loss(model, of_label, batch, block=5, counts=counts)
        assert sums.total[label].item() == pytest.approx(totals[label], rel=1e-5)
        assert sums.weight[label].item() == pytest.approx(weights[label], rel=1e-5)
        logits = (mine * outputs.named["item"].detach()).sum(1) / config.temperature
        torch.testing.assert_close(outputs.logits[:, label].detach(), logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"over_arch": OverArchConfig(kind=OverArchKind.MLP)},
        {"negatives": NegativesConfig(kind=NegativesKind.MINED)},
    ],
)
def test_what_needs_one_vector_of_a_user_refuses_one_a_task(changes) -> None:
    with pytest.raises(ConfigError, match="per_task"):
        dataclasses.replace(CONFIG, user_vectors=UserVectors.PER_TASK, **changes)
