"""LightGCN: its vectors, loss and gradients are those of plain torch; a factorisation answers as it does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ziggurat.embeddings import TableOptimizer, TableOptimizerKind
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.items import Items
from ziggurat.models import LayerDtype, LightGCNConfig, PairSampling, build_model
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.graph.lightgcn import NEGATIVES
from ziggurat.ops.graph.propagation import layer_average_reference
from ziggurat.testing.batches import random_batch

USERS, ITEMS = 12, 9


def inputs(**changes) -> InputSpec:
    spec = InputSpec(
        single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
        tables=(TableSpec(name="user", num_rows=USERS), TableSpec(name="item", num_rows=ITEMS)),
        labels=(LabelSpec(name="took"),),
        has_weights=True,
        has_groups=True,
        items=Items(id="item"),
    )
    return dataclasses.replace(spec, **changes)


def observed(config: LightGCNConfig, *, seed: int = 0, size: int = 40):
    """A model, and the batch that its graph was made of."""
    spec = inputs()
    model = build_model(config, spec, seed=seed)
    batch = random_batch(spec, size, seed=seed)
    model.observe([batch])
    return model, batch


def drawn(model, batch: Batch, *, step: int = 0) -> Batch:
    return model.shortened(batch, draw=StepDraw(seed=1, step=step))


def edges(batch: Batch) -> set[tuple[int, int]]:
    is_positive = (batch.labels[:, 0] > 0) & (batch.weights > 0) & (batch.single >= 3).all(dim=0)
    return set(zip(batch.single[0][is_positive].tolist(), batch.single[1][is_positive].tolist(), strict=True))


@pytest.mark.parametrize("optimizer", [TableOptimizerKind.ADAM_DENSE, TableOptimizerKind.SPARSE_ADAM])
@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_loss_and_gradients_are_those_of_plain_torch(num_layers, optimizer):
    config = LightGCNConfig(embedding_dim=16, num_layers=num_layers, l2=0.3)
    config = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, optimizer=optimizer))
    model, batch = observed(config)
    assert {(int(r), int(c) - USERS) for r, c in _pairs(model.graph) if r < USERS} == edges(batch)
    batch = drawn(model, batch)
    tables = [model.embeddings.table(name).clone().requires_grad_() for name in ("user", "item")]
    x = torch.cat(tables)
    means = layer_average_reference(model.graph, x, num_layers=num_layers)
    users, items = batch.single
    negatives = batch.extras[NEGATIVES]
    nodes = torch.stack([users, items + USERS, negatives + USERS])
    user, item, negative = means[nodes]
    losses = F.softplus((user * negative).sum(1) - (user * item).sum(1)) + 0.15 * x[nodes].square().sum((0, 2))
    weights = batch.labels[:, 0] * batch.weights * (batch.single >= 3).all(dim=0)
    wanted = (losses * weights).sum() / weights.sum()
    found = model.loss(model.forward_dense(model.embed(batch)), batch)
    assert torch.equal(model.loss_weight(batch), found.weight)
    torch.testing.assert_close(found.mean(), wanted)
    wanted.backward()
    found.mean().backward()
    if optimizer is TableOptimizerKind.ADAM_DENSE:
        gradients = [model.embeddings.tables.parameter(name).grad for name in ("user", "item")]
    else:
        gradients = _recorded(model)
    for gradient, table in zip(gradients, tables, strict=True):
        torch.testing.assert_close(gradient, table.grad, rtol=1e-4, atol=1e-6)


def _pairs(graph):
    return zip(graph.rows_of_edges().tolist(), graph.columns.tolist(), strict=True)


def _recorded(model) -> list[torch.Tensor]:
    """Gradients of both tables, which plain descent at rate 1 shows."""
    embeddings = model.embeddings
    embeddings.config = dataclasses.replace(embeddings.config, optimizer=TableOptimizerKind.SPARSE_ADAM)
    parts = embeddings.recorded[0]
    summed = embeddings.kernel.sum_gradients(parts)
    dense = torch.zeros(embeddings.tables.storage(0).num_rows, 16).index_add(0, summed.rows, summed.sums)
    return [dense[embeddings.tables.places[name].rows] for name in ("user", "item")]


def test_answers_are_vectors_of_the_present_weights():
    model, batch = observed(LightGCNConfig(embedding_dim=16))
    model.embed(drawn(model, batch))  # a step begins: what was kept is of weights before
    means = layer_average_reference(
        model.graph, torch.cat([model.embeddings.table(n) for n in ("user", "item")]), num_layers=3
    )
    has_edges = model.graph.offsets.diff() > 0
    with torch.no_grad():
        users, items = model.user_vectors(batch), model.item_vectors(batch)
        scores = model(batch)
    known = has_edges[batch.single[0]]
    torch.testing.assert_close(users[known], means[batch.single[0]][known])
    known = has_edges[batch.single[1] + USERS]
    torch.testing.assert_close(items[known], means[batch.single[1] + USERS][known])
    torch.testing.assert_close(scores[:, 0], (users * items).sum(1))


def test_who_has_no_edge_has_the_mean_vector():
    model, batch = observed(LightGCNConfig(embedding_dim=16))
    model.embed(drawn(model, batch))
    kept = model.state_dict()["propagated_users"].view(torch.float32)
    has_edges = (model.graph.offsets.diff() > 0)[:USERS]
    assert not has_edges[1]
    torch.testing.assert_close(kept[1], kept[has_edges].mean(0))
    assert not kept[0].any()


def test_a_loaded_model_answers_without_a_graph():
    model, batch = observed(LightGCNConfig(embedding_dim=16))
    model.embed(drawn(model, batch))
    other = build_model(model.config, inputs(), seed=5)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other.user_vectors(batch), model.user_vectors(batch))
        assert torch.equal(other(batch), model(batch))


def test_a_factorisation_answers_as_the_model_does():
    model, batch = observed(LightGCNConfig(embedding_dim=16))
    model.embed(drawn(model, batch))
    simpler = model.for_answers()
    other = build_model(simpler.config, inputs(), seed=5)
    assert other.for_answers() is None
    for name, vectors in simpler.tables.items():
        other.embeddings.table(name).copy_(vectors)
    with torch.no_grad():
        assert torch.equal(other.user_vectors(batch), model.user_vectors(batch))
        assert torch.equal(other.item_vectors(batch), model.item_vectors(batch))
    assert not [name for name in other.state_dict() if name.startswith("propagated")]


def test_negatives_follow_from_seed_step_and_sample():
    model, batch = observed(LightGCNConfig(embedding_dim=16))
    first = drawn(model, batch).extras[NEGATIVES]
    assert torch.equal(first, drawn(model, batch).extras[NEGATIVES])
    assert torch.equal(first[10:20], drawn(model, batch.rows(10, 20)).extras[NEGATIVES])
    assert not torch.equal(first, drawn(model, batch, step=1).extras[NEGATIVES])


def test_negatives_are_not_what_the_user_took():
    rng = np.random.default_rng(0)
    spec = inputs(tables=(TableSpec(name="user", num_rows=50), TableSpec(name="item", num_rows=60)))
    model = build_model(LightGCNConfig(embedding_dim=16), spec, seed=0)
    batch = random_batch(spec, 800, seed=0)
    model.observe([batch])
    found = [drawn(model, batch, step=int(step)).extras[NEGATIVES] for step in rng.integers(0, 1000, 5)]
    items = torch.cat(found)
    taken = edges(batch)
    users = batch.single[0].repeat(5)
    assert not {(u, i) for u, i in zip(users.tolist(), items.tolist(), strict=True)} & taken
    assert int(items.min()) == 3
    assert int(items.max()) == 59
    counts = torch.bincount(items, minlength=60)[3:]
    assert float(counts.max()) < 2 * float(counts.float().mean())


@pytest.mark.parametrize("num_free", [0, 1, 3])
def test_negatives_of_a_user_who_took_nearly_all_are_the_others(num_free):
    spec = inputs(tables=(TableSpec(name="user", num_rows=8), TableSpec(name="item", num_rows=53)))
    model = build_model(LightGCNConfig(embedding_dim=16), spec, seed=0)
    batch = random_batch(spec, 50, seed=0)
    batch.single[0] = 4
    batch.single[1] = 3 + torch.randperm(50, generator=torch.Generator().manual_seed(1))
    batch.labels.fill_(1.0)
    batch.weights.fill_(1.0)
    free = batch.single[1][:num_free].tolist()
    model.observe([batch.rows(num_free, 50)])
    # A neighbour with few items, whose pairs lie beside.
    batch.single[0, -1] = 3
    found = torch.cat([drawn(model, batch, step=step).extras[NEGATIVES][:-1] for step in range(20)])
    if num_free:
        assert sorted(set(found.tolist())) == sorted(free)
        assert int(torch.bincount(found)[free].min()) > 0.8 * len(found) / num_free
    else:
        assert torch.equal(found, batch.single[1][:-1].repeat(20))


def test_a_user_who_took_all_items_teaches_the_penalty_alone():
    spec = inputs()
    model = build_model(LightGCNConfig(embedding_dim=16, l2=0.0), spec, seed=0)
    batch = random_batch(spec, ITEMS - 3, seed=0)
    batch.single[0] = 5
    batch.single[1] = torch.arange(3, ITEMS)
    batch.labels.fill_(1.0)
    model.observe([batch])
    loss = model.loss(model.forward_dense(model.embed(drawn(model, batch))), batch).mean()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(np.log(2), abs=1e-6)
    for name in ("user", "item"):
        assert float(model.embeddings.tables.parameter(name).grad.abs().max()) < 1e-6


def test_pairs_of_users_are_drawn_uniformly_over_users_and_then_over_their_items():
    model, batch = observed(LightGCNConfig(embedding_dim=4, pairs=PairSampling.USERS))
    taken: dict[int, set[int]] = {}
    for user, item in edges(batch):
        taken.setdefault(user, set()).add(item)
    counts: dict[tuple[int, int], int] = {}
    num_steps = 1000
    for step in range(num_steps):
        other = drawn(model, batch, step=step)
        assert bool((other.labels == 1).all())
        for user, item, negative in zip(*other.single.tolist(), other.extras[NEGATIVES].tolist(), strict=True):
            assert item in taken[user]
            assert negative not in taken[user] or len(taken[user]) == ITEMS - 3
            counts[user, item] = counts.get((user, item), 0) + 1
    total = num_steps * batch.batch_size
    for user, items in taken.items():
        for item in items:
            expected = total / len(taken) / len(items)
            assert abs(counts.get((user, item), 0) - expected) < 6 * expected**0.5
    again = drawn(model, batch, step=3)
    halves = [batch.rows(0, 20), batch.rows(20, 40)]
    of_ranks = torch.cat([drawn(model, half, step=3).single for half in halves], dim=1)
    assert torch.equal(of_ranks, again.single)


def test_sampled_edges_change_from_step_to_step():
    model, batch = observed(LightGCNConfig(embedding_dim=16, edge_width=1), size=200)
    whole, _ = observed(LightGCNConfig(embedding_dim=16), size=200)
    losses = [
        model.loss(model.forward_dense(model.embed(drawn(model, batch, step=s))), drawn(model, batch, step=s))
        for s in (0, 1)
    ]
    assert not torch.equal(losses[0].total, losses[1].total)
    losses[0].mean().backward()
    with torch.no_grad():  # answers take all edges
        whole.embed(drawn(whole, batch))
        whole._is_stale = True
        torch.testing.assert_close(model.user_vectors(batch), whole.user_vectors(batch))


def test_layers_in_bf16_train():
    model, batch = observed(LightGCNConfig(embedding_dim=16, layers_in=LayerDtype.BF16))
    exact, _ = observed(LightGCNConfig(embedding_dim=16))
    batch = drawn(model, batch)
    found, wanted = (m.loss(m.forward_dense(m.embed(batch)), batch).mean() for m in (model, exact))
    assert 0 < abs(float(found.detach()) - float(wanted.detach())) < 1e-3
    found.backward()


def test_a_step_lowers_the_loss():
    config = LightGCNConfig(embedding_dim=16)
    config = dataclasses.replace(
        config, embedding=dataclasses.replace(config.embedding, optimizer=TableOptimizerKind.SPARSE_ADAM)
    )
    model, batch = observed(config)
    batch = drawn(model, batch)
    optimizer = TableOptimizer(model.embeddings)
    losses = []
    for _ in range(20):
        loss = model.loss(model.forward_dense(model.embed(batch)), batch).mean()
        loss.backward()
        optimizer.step(0.05)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_an_empty_batch_is_a_step():
    model, _ = observed(LightGCNConfig(embedding_dim=16))
    batch = Batch.empty(inputs())
    for each in (batch, drawn(model, batch)):
        loss = model.loss(model.forward_dense(model.embed(each)), each).mean()
        loss.backward()
        assert float(loss) == 0


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_loss_without_negatives_is_refused():
    model, batch = observed(LightGCNConfig(embedding_dim=16))
    with pytest.raises(ConfigError, match="negatives were drawn"):
        model.loss(model.forward_dense(model.embed(batch)), batch)


def test_sampled_edges_without_layers_are_refused():
    with pytest.raises(ConfigError, match="edge_width = 4 and num_layers = 0"):
        LightGCNConfig(num_layers=0, edge_width=4)


def test_a_step_without_a_graph_is_refused():
    spec = inputs()
    model = build_model(LightGCNConfig(embedding_dim=16), spec, seed=0)
    assert not model.has_observed
    with pytest.raises(ConfigError, match="observed its training data"):
        model.embed(drawn(model, random_batch(spec, 5)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dense": ("age",)}, "one categorical feature"),
        (
            {"single": (SingleSpec(name="user", table="item"), SingleSpec(name="item", table="item"))},
            "tables of their own",
        ),
        ({"items": None}, "which features describe the item"),
    ],
)
def test_other_features_are_refused(changes, match):
    with pytest.raises(SchemaError, match=match):
        build_model(LightGCNConfig(embedding_dim=16), inputs(**changes), seed=0)
