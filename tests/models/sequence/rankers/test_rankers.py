"""Rankers of a history against padded twins, and what holds for all of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from tests.models.sequence.rankers import padded
from tests.models.sequence.rankers.histories import (
    BST,
    DIEN,
    HISTORY,
    INPUTS,
    MODELS,
    ONETRANS,
    RANKMIXER,
    TRANSACT,
    histories,
)
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.batches.samples import take_samples
from ziggurat.features.jagged import FeatureGroup
from ziggurat.features.schema import Pooling
from ziggurat.models import DNNConfig, EventPosition, HistoryInput, build_model, flops_per_sample, num_parameters
from ziggurat.models.costs.length_cost import LOOKUP_FLOPS, length_cost

LENGTHS = [3, 0, 6, 1, 2, 5]
VARIANTS: list[Any] = [
    (padded.bst, BST, {}),
    (padded.bst, BST, {"output": "target", "positions": "order", "mask": "causal"}),
    (padded.bst, BST, {"output": "mean", "positions": "none", "num_heads": 3}),
    (padded.bst, BST, {"output": "sum", "position_dim": 8}),
    (padded.transact, TRANSACT, {}),
    (padded.transact, TRANSACT, {"fusion": "late", "pooled": "none", "latest": 8}),
    (padded.transact, TRANSACT, {"latest": 0}),
    *(
        (lambda model, batch: padded.dien(model, batch)[0], DIEN, {"evolution": e, "attention": a, "sums": s})
        for e, a, s in (("augru", "bilinear", "none"), ("agru", "dot", "added"), ("aigru", "mlp", "none"))
    ),
    (lambda model, batch: padded.dien(model, batch)[0], DIEN, {"weights": "plain"}),
    (padded.rankmixer, RANKMIXER, {}),
    (padded.rankmixer, RANKMIXER, {"num_experts": 3, "num_layers": 1}),
    (padded.onetrans, ONETRANS, {}),
    (padded.onetrans, ONETRANS, {"pyramid": "none", "tokenizer": "pieces", "positions": "order"}),
    (padded.onetrans, ONETRANS, {"num_layers": 1, "positions": "none"}),
]


def made(config: Any, changes: dict[str, Any] | None = None, *, seed: int = 0) -> Any:
    """A model whose norms and biases are no ones and zeros."""
    given = from_json(type(config), to_json(config) | (changes or {}), where="test")
    model = build_model(given, INPUTS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 or name.endswith("bias"):
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize(("twin", "config", "changes"), VARIANTS)
def test_a_ranker_is_its_padded_twin(twin: Any, config: Any, changes: dict[str, Any]) -> None:
    model, batch = made(config, changes).eval(), histories(LENGTHS)
    wanted, found = twin(model, batch), model(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.arange(found.numel()).view_as(found).remainder(5) - 1.5
    learning = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    parameters = [(name, weight) for name, weight in learning if not name.startswith("embeddings")]
    ours, theirs = (
        torch.autograd.grad((each * weights).sum(), [weight for _, weight in parameters], allow_unused=True)
        for each in (found, wanted)
    )
    for (name, weight), one, other in zip(parameters, ours, theirs, strict=True):
        zeros = torch.zeros_like(weight)
        one, other = (zeros if each is None else each for each in (one, other))
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("changes", [{}, {"auxiliary_score": "mlp", "auxiliary_over": "sum", "alpha": 0.3}])
def test_the_auxiliary_loss_is_that_of_the_paper(changes: dict[str, Any]) -> None:
    model, batch = made(DIEN, changes | {"negatives": ["others", "other_brands"]}), histories(LENGTHS)
    lists = [padded.rows_of(model, batch, name) for name in ("others", "other_brands")]
    _, losses_B = padded.dien(model, batch, [torch.cat(parts, dim=1) for parts in zip(*lists, strict=True)])
    outputs = model.forward_dense(model.embed(batch))
    torch.testing.assert_close(outputs.named["auxiliary"], losses_B, rtol=1e-4, atol=1e-5)
    plain = dataclasses.replace(outputs, named={})
    added = model.loss(outputs, batch).mean() - model.loss(plain, batch).mean()
    assert batch.weights is not None
    wanted = (losses_B * batch.weights).sum() / batch.weights.sum() * model.config.alpha
    torch.testing.assert_close(added, wanted, rtol=1e-4, atol=1e-5)
    assert "auxiliary" not in model.eval().forward_dense(model.embed(batch)).named


def test_drawn_negatives_are_events_of_the_batch() -> None:
    model, batch = made(DIEN), histories(LENGTHS)
    drawn = model.embed(batch).named["negatives"]
    assert len(drawn) == sum(LENGTHS)
    assert drawn.max() < sum(LENGTHS)
    assert len(drawn.unique()) > 3
    model.loss(model.forward_dense(model.embed(batch)), batch).mean().backward()
    assert all(weight.grad is not None for _, weight in model.named_parameters())


def test_hidden_events_are_as_if_they_had_not_happened() -> None:
    model, batch = made(TRANSACT, {"time_window": 30_000}), histories(LENGTHS)
    torch.manual_seed(3)
    embedded = model.embed(batch)
    hidden = embedded.named["hidden_events"]
    assert 0 < int(hidden.sum()) < sum(LENGTHS)
    found = model.forward_dense(embedded).logits
    torch.testing.assert_close(found, padded.transact(model, batch, hidden=hidden), rtol=1e-4, atol=1e-5)
    assert not model.eval().embed(batch).named
    hides = {int(model.train().embed(batch).named["hidden_events"].sum()) for _ in range(8)}
    assert len(hides) > 2  # drawn anew in each step


def test_gates_of_experts_cost_in_training_alone() -> None:
    model, batch = made(RANKMIXER, {"num_experts": 3, "penalty": 0.5}), histories(LENGTHS)
    outputs = model.forward_dense(model.embed(batch))
    added = model.loss(outputs, batch).mean() - model.loss(dataclasses.replace(outputs, named={}), batch).mean()
    assert batch.weights is not None
    wanted = 0.5 * (outputs.named["penalty"] * batch.weights).sum() / batch.weights.sum()
    assert wanted.detach() > 0.01
    torch.testing.assert_close(added, wanted, rtol=1e-4, atol=1e-5)
    model.eval()
    torch.testing.assert_close(model.loss(outputs, batch).mean() + added, model.train().loss(outputs, batch).mean())


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.kind)
def test_a_sample_does_not_depend_on_the_others(config: Any) -> None:
    model, batch = made(config).eval(), histories(LENGTHS)
    together = model(batch)
    alone = torch.cat([model(batch.rows(b, b + 1)) for b in range(len(LENGTHS))])
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)
    assert model(batch.rows(0, 0)).shape == (0, 2)
    assert model(histories([0, 0])).isfinite().all()
    assert num_parameters(model).dense == sum(
        weight.numel() for name, weight in model.named_parameters() if not name.startswith("embeddings.")
    )


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.kind)
def test_no_input_of_the_dense_network_is_always_empty(config: Any) -> None:
    # torch.export would make a constant of such an input's size, and refuse to leave it open.
    embedded = made(config).eval().embed(histories(LENGTHS))
    assert {name: len(each) for name, each in embedded.named.items() if len(each) < 2} == {}


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.kind)
def test_autocast_changes_little(config: Any) -> None:
    model, batch = made(config), histories(LENGTHS)
    exact = model.eval()(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.train()
        outputs = model.forward_dense(model.embed(batch))
        model.loss(outputs, batch).mean().backward()
        rounded = model.eval()(batch)
    assert (rounded.float() - exact).abs().max() < 0.05 * (1 + exact.abs().max())
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.kind)
def test_shared_histories_give_the_same(config: Any) -> None:
    base = histories([3, 0, 4, 1, 2, 5])
    kept = torch.tensor([0, 0, 2, 2, 2, 5])
    plain = take_samples(base, kept)
    short = deduplicate(plain, [FeatureGroup(jagged=(0, 1, 2, 3, 4))])
    assert short.repeated
    model = made(config).eval()
    torch.testing.assert_close(model(short), model(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.kind)
def test_a_ranker_compiles_as_one_graph_and_keeps_its_settings(config: Any) -> None:
    assert from_json(type(config), json.loads(json.dumps(to_json(config))), where="test") == config
    model = made(config).eval()
    torch.compiler.reset()
    network = torch.compile(model.forward_dense, fullgraph=True, dynamic=False, backend="eager")
    for seed, lengths in enumerate(([3, 0, 2, 1], [2, 2, 5, 6], [6, 1, 0, 4])):
        batch = histories(lengths, seed=seed)
        embedded = model.embed(batch)
        for each in (*(each.values for each in embedded.sequences.values()), *embedded.named.values()):
            if each.shape[0] not in (4, 5):
                torch._dynamo.maybe_mark_dynamic(each, 0)
        torch.testing.assert_close(network(embedded).logits, model(batch))


@pytest.mark.parametrize(
    "config",
    [pytest.param(each, marks=() if each is BST else pytest.mark.slow, id=each.kind) for each in MODELS],
)
def test_cost_grows_with_the_history(config: Any) -> None:
    model = made(config)
    one, two, five = (flops_per_sample(model, lengths={"brands": length}) for length in (1, 2, 5))
    assert five.forward > two.forward > one.forward > 0
    assert five.backward > two.backward > one.backward
    cost, source = length_cost(model)
    assert "counted" in source
    found = {each.name: (each.per_event - 4 * LOOKUP_FLOPS, each.per_square) for each in cost.lists}
    assert found["items"][0] > 0  # the network; that of the three lists together
    if config.kind != "onetrans":  # whose pyramid leaves less than the square
        assert (found["items"][1] > 0) == (config.kind in ("bst", "transact"))
    assert {each: terms for each, terms in found.items() if any(terms)}.keys() == {"items"}


def shortened(batch: Batch, name: str) -> Batch:
    """A batch whose first list of this name lacks a row."""
    names, size = [spec.name for spec in INPUTS.jagged], batch.batch_size
    lists = [batch.jagged.of(at, batch_size=size) for at in range(len(names))]
    own = lists[names.index(name)]
    lists[names.index(name)] = JaggedRows(own.values[1:], (own.offsets - 1).clamp(min=0))
    return dataclasses.replace(batch, jagged=JaggedRows.joined(lists))


def test_onetrans_hands_over_no_tensor_that_is_always_empty() -> None:
    model = made(ONETRANS)
    named = model.further(histories([3, 6, 1]))
    assert "kept_1" in named
    assert all(len(each) for each in named.values()), "a program of torch.export would know no other size"


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.kind)
def test_lists_that_are_no_history_are_refused(config: Any) -> None:
    model, batch = made(config), histories(LENGTHS)
    with pytest.raises(DataError, match=r"as many rows in 'brands' as in 'items'[\s\S]*sample 0"):
        model(shortened(batch, "brands"))
    with pytest.raises(DataError, match="at most 6 events"):
        model(histories([7, 1]))
    for history, words in (
        (HistoryInput(lists=("nobody",), targets=("item",)), "nobody"),
        (HistoryInput(lists=("items", "others")), "another says too"),
        (HistoryInput(lists=("items",), actions=("tags",)), "max_length"),
        (HistoryInput(lists=("items",), actions=("gone",)), "gone"),
        (HistoryInput(lists=("items",), times="price"), "no feature 'price'"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_model(dataclasses.replace(config, history=history), INPUTS, seed=0)


def test_times_are_asked_for_by_name() -> None:
    untimed = dataclasses.replace(HISTORY, times="", asked_at="")
    assert not build_model(dataclasses.replace(BST, history=untimed), INPUTS, seed=0).positions.by_time  # type: ignore[union-attr]
    for config in (BST, ONETRANS):
        timed: Any = dataclasses.replace(config, history=untimed, positions=EventPosition.TIME)
        with pytest.raises(ConfigError, match=r"--model\.history\.times"):
            build_model(timed, INPUTS, seed=0)
    with pytest.raises(ConfigError, match="time_window"):
        dataclasses.replace(TRANSACT, history=untimed, time_window=5)
    batch = histories([2, 1])
    with pytest.raises(DataError, match="seen_at"):
        made(BST)(dataclasses.replace(batch, sequences={}))
    times = {"seen_at": histories([1, 1]).sequences["seen_at"], "now": batch.sequences["now"]}
    with pytest.raises(DataError, match="a time for each event"):
        made(BST)(dataclasses.replace(batch, sequences=times))


def test_without_the_time_of_a_question_the_latest_event_is_now() -> None:
    model = made(BST, {"history": to_json(dataclasses.replace(HISTORY, asked_at=""))})
    batch = histories([3, 0, 2])
    ages = model.embed(batch).named["ages"]
    assert ages[2] == ages[4] == 0
    times = batch.sequences["seen_at"].values["time"]
    assert ages[0] == times[2] - times[0]


def test_settings_that_cannot_be_are_refused() -> None:
    for config, changes in (
        (BST, {"num_heads": 7}),
        (TRANSACT, {"latest": 0, "pooled": "none"}),
        (RANKMIXER, {"token_dim": 7}),
        (ONETRANS, {"token_dim": 9}),
        (DIEN, {"negatives": ["others"]}),
        (DIEN, {"negatives": ["tags", "acts"]}),
    ):
        with pytest.raises(ConfigError):
            made(config, changes)
    with pytest.raises(ConfigError, match="a target for each list"):
        HistoryInput(lists=("items",), targets=("item", "brand"))
    unread = tuple(
        dataclasses.replace(each, pooling=Pooling.NONE) if each.name == "tags" else each for each in INPUTS.jagged
    )
    for config in (*MODELS, DNNConfig(), dataclasses.replace(RANKMIXER, pooling="schema")):
        with pytest.raises(ConfigError, match="tags"):
            build_model(config, dataclasses.replace(INPUTS, jagged=unread), seed=0)
