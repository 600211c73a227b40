"""The next-item model against plain torch: its losses, what a state may know, and what items are ranked by."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, MomentsSpec, SingleSpec, TableSpec
from ziggurat.features.items import Items
from ziggurat.features.jagged import moments_group, offsets_of
from ziggurat.features.schema import Outcomes, Pooling
from ziggurat.models import NextItem, NextItemConfig, build_model
from ziggurat.models.retrieval.encoders import VectorLength
from ziggurat.models.sequence.layers.places import AskedAt
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.models.sequence.next_item import Positions
from ziggurat.models.sequence.next_item_loss import Candidates, NextItemLoss, NextItemNegatives, next_item_losses
from ziggurat.testing.batches import small_inputs

NUM_ITEMS, LENGTH = 9, 6


def lists(*names: str, table: str) -> tuple[JaggedSpec, ...]:
    return tuple(
        JaggedSpec(name=name, table=table, pooling=Pooling.NONE, ordered=True, max_length=LENGTH) for name in names
    )


INPUTS = InputSpec(
    single=(SingleSpec(name="item", table="item"), SingleSpec(name="kind", table="kind")),
    jagged=(
        *lists("history", table="item"),
        *lists("history_kind", table="kind"),
        *lists("history_action", table="action"),
        JaggedSpec(name="earlier", table="item", pooling=Pooling.NONE),
    ),
    moments=(MomentsSpec(name="history_times", max_length=LENGTH), MomentsSpec(name="asked_at", max_length=1)),
    tables=(
        TableSpec(name="item", num_rows=NUM_ITEMS + 3),
        TableSpec(name="kind", num_rows=6),
        TableSpec(name="action", num_rows=5),
    ),
    labels=(LabelSpec(name="next_item", outcomes=Outcomes.POSITIVE_ONLY),),
    has_weights=True,
    has_groups=True,
    items=Items(id="item", features=("item", "kind")),
)
SMALL = NextItemConfig(embedding_dim=8, num_layers=2, num_negatives=5, dropout=0.0)


def batch_of(lengths: list[int], *, seed: int = 0) -> Batch:
    """Histories of these lengths; an item's kind is 3 + row mod 3."""
    generator = torch.Generator().manual_seed(seed)
    sizes, count = torch.tensor(lengths), len(lengths)
    rows = torch.randint(3, NUM_ITEMS + 3, (int(sizes.sum()) + count,), generator=generator)
    history, target = rows[:-count], rows[-count:]
    actions = torch.randint(1, 5, (len(history),), generator=generator)
    times = torch.randint(1, 100_000, (len(rows),), generator=generator)
    empty = torch.zeros(count, dtype=torch.int64)
    return Batch(
        dense=torch.empty(count, 0),
        single=torch.stack([target, 3 + target % 3]),
        jagged=JaggedRows(
            torch.cat([history, 3 + history % 3, actions]), offsets_of(torch.cat([sizes, sizes, sizes, empty]))
        ),
        sequences={
            "history_times": moments_group(1_600_000_000 + times[:-count].cumsum(0), offsets_of(sizes)),
            "asked_at": moments_group(1_700_000_000 + times[-count:], torch.arange(count + 1)),
        },
        labels=torch.ones(count, 1),
        weights=torch.rand(count, generator=generator) + 0.5,
        groups=torch.arange(count) + 1,
        row_ids=torch.arange(count),
    )


def built(**settings: Any) -> NextItem:
    model = build_model(dataclasses.replace(SMALL, **settings), INPUTS, seed=0)
    assert isinstance(model, NextItem)
    model.observe([batch_of([6, 6, 6, 6, 0, 1], seed=5)])
    return model


@pytest.mark.parametrize("layers", list(LayerPreset))
def test_a_state_knows_nothing_of_what_comes_later(layers: LayerPreset) -> None:
    model = built(layers=layers, asked=AskedAt.OWN)
    batch, changed = batch_of([6, 3]), batch_of([6, 3])
    values = changed.jagged.values
    values[4:6] = values[4:6] % NUM_ITEMS + 3  # the last two events of the first history
    changed.single[0, 0] = values[4]
    changed.sequences["history_times"].values["time"][4:6] += 10**8
    changed.sequences["asked_at"].values["time"][0] += 10**9
    states, others = (model.forward_dense(model.embed(each)).named["states"] for each in (batch, changed))
    assert torch.equal(states[:4], others[:4])
    assert torch.equal(states[6:], others[6:])
    assert not torch.allclose(states[4:6], others[4:6])


def test_a_question_knows_when_it_is_asked_and_only_then() -> None:
    batch, later = batch_of([4]), batch_of([4])
    later.sequences["asked_at"].values["time"] += 10**9
    untold = moments_group(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))
    nobody = dataclasses.replace(batch, sequences=batch.sequences | {"asked_at": untold})
    with torch.no_grad():
        for asked, differs in ((AskedAt.NEXT, True), (AskedAt.OWN, False)):
            model = built(asked=asked)
            users = [model.user_vectors(each) for each in (batch, later, nobody)]
            assert torch.equal(users[0], users[1]) is not differs
            assert torch.equal(users[0], users[2]) is not differs


def test_vectors_of_items_are_dropped_in_training_alone() -> None:
    """As events, as answers and as wrong answers; what an evaluation ranks is whole."""
    batch = batch_of([6, 3])
    plain, model = (built(length=VectorLength.FREE, item_dropout=share) for share in (0.0, 0.5))
    whole = plain.forward_dense(plain.embed(batch)).named
    model.train()
    torch.manual_seed(0)
    dropped = model.forward_dense(model.embed(batch)).named
    for name in ("answers", "candidates"):
        kept = dropped[name] != 0
        # One of many numbers is 0 of itself: none. Half of them go, and what stays is twice as large.
        assert 0.3 < kept.float().mean() < 0.7
        if name == "answers":
            assert torch.allclose(dropped[name][kept], 2 * whole[name][kept])
    assert not torch.allclose(dropped["states"], whole["states"])
    model.eval()
    with torch.no_grad():
        assert torch.equal(model.user_vectors(batch), plain.user_vectors(batch))
        assert torch.equal(model.item_vectors(batch), plain.item_vectors(batch))


@pytest.mark.parametrize("length", list(VectorLength))
@pytest.mark.parametrize("negatives", list(NextItemNegatives))
@pytest.mark.parametrize("loss", list(NextItemLoss))
@pytest.mark.parametrize("questions_per_draw", [0, 2, 4])
def test_losses_are_those_of_plain_torch(
    loss: NextItemLoss, negatives: NextItemNegatives, length: VectorLength, questions_per_draw: int
) -> None:
    settings: dict[str, Any] = {"loss": loss, "negatives": negatives, "length": length}
    model = built(**settings, temperature=0.5, questions_per_draw=questions_per_draw)
    batch = batch_of([5, 0, 1, 3])
    outputs = model.forward_dense(model.embed(batch))
    sums = model.loss(outputs, batch)
    rows = outputs.named["candidate_rows"].tolist()
    counts = model.item_counts.clamp(min=1).double() / int(model.item_counts.sum())
    per_draw = questions_per_draw if questions_per_draw and negatives is not NextItemNegatives.ALL else 9
    size = NUM_ITEMS if negatives is NextItemNegatives.ALL else 5
    assert len(rows) == size * -(-9 // per_draw)
    per_draw = -(-9 // (len(rows) // size))  # shared out evenly
    expected = {
        NextItemNegatives.IN_BATCH: lambda row: size * counts[row],
        NextItemNegatives.MIXED: lambda row: size // 2 * counts[row] + (size - size // 2) / NUM_ITEMS,
    }.get(negatives)
    states, total, weight, at = outputs.named["states"], 0.0, 0.0, 0
    history, offsets = model.lists_of(batch, "history")
    for sample in range(batch.batch_size):
        mine = [*history[offsets[sample] : offsets[sample + 1]].tolist(), int(batch.single[0, sample])]
        for answer in mine[1:]:
            drawn = rows[at // per_draw * size :][:size]
            scores = {row: score(model, states[at], row) for row in {answer, *drawn}}
            if loss is NextItemLoss.SOFTMAX and expected is not None:
                scores = {row: value - math.log(expected(row)) for row, value in scores.items()}
            wrong = [scores[row] for row in drawn if row != answer]
            if loss is NextItemLoss.SOFTMAX:
                part = torch.logsumexp(torch.stack([scores[answer], *wrong]), 0) - scores[answer]
            else:
                alpha = min(1.0, size / (NUM_ITEMS - 1))
                beta = alpha * (model.config.gbce_t * (1 - 1 / alpha) + 1 / alpha)
                logs = [torch.log1p(-torch.sigmoid(each)) for each in wrong]
                part = -(beta * torch.log(torch.sigmoid(scores[answer])) + sum(logs, torch.zeros(()))) / (1 + size)
            assert batch.weights is not None
            total, weight, at = (
                total + float(part * batch.weights[sample]),
                weight + float(batch.weights[sample]),
                at + 1,
            )
    torch.testing.assert_close(sums.total.item(), total, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(sums.weight.item(), weight, rtol=1e-6, atol=1e-6)
    assert torch.equal(sums.weight, model.loss_weight(batch))


@pytest.mark.parametrize("log_q", [False, True])
def test_gradients_of_the_softmax_are_those_of_autograd(log_q: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    states, answers, vectors = (torch.randn(n, 4, generator=generator).double() for n in (7, 7, 10))
    rows_P, rows = (torch.randint(3, 6, (n,), generator=generator) for n in (7, 10))
    q = torch.rand(6, generator=generator).double().log() if log_q else None
    leaves = [each.requires_grad_() for each in (states, answers, vectors)]

    def ours(states: Tensor, answers: Tensor, vectors: Tensor) -> Tensor:
        candidates = Candidates(vectors=vectors, rows=rows, num_draws=2, log_q=q)
        scale = torch.full((1,), 3.0, dtype=torch.float64)
        return next_item_losses(states, answers, rows_P, candidates=candidates, scale=scale, loss=NextItemLoss.SOFTMAX)

    assert torch.autograd.gradcheck(ours, leaves)


def score(model: NextItem, state: Tensor, row: int) -> Tensor:
    vector = model.embeddings.table("item")[row] + model.embeddings.table("kind")[int(model.item_sides[0, row])]
    if model.config.length is VectorLength.UNIT:
        vector = vector / vector.norm().clamp(min=1e-6)
    return (state.detach() @ vector).double() / model.config.temperature


def test_items_are_ranked_by_what_the_training_events_say_of_them() -> None:
    model = built()
    assert int(model.item_counts.sum()) == 25 + 6
    seen = model.item_counts.nonzero().squeeze(1)
    assert torch.equal(model.item_sides[0, seen], 3 + seen % 3)
    batch = batch_of([2, 3])
    with torch.no_grad():
        outputs = model.forward_dense(model.embed(batch))
        items = model.item_vectors(batch)
        torch.testing.assert_close(items, outputs.named["item"])
        wanted = (model.user_vectors(batch) * items).sum(dim=1) / model.config.temperature
        torch.testing.assert_close(outputs.logits[:, 0], wanted)
        assert not model.user_vectors(batch_of([0]))[0].any()


@pytest.mark.parametrize("positions", list(Positions))
def test_positions_count_from_where_they_say(positions: Positions) -> None:
    """A longer history before the same events changes what is counted from its start alone, without other positions."""
    model = built(positions=positions, layers=LayerPreset.STU, max_attention_length=1, num_layers=1)
    batch = batch_of([5])
    values = batch.jagged.values
    shorter = torch.cat([values[at * 5 + 1 : at * 5 + 5] for at in range(3)])
    short = dataclasses.replace(
        batch,
        jagged=JaggedRows(shorter, offsets_of(torch.tensor([4, 4, 4, 0]))),
        sequences=batch.sequences
        | {"history_times": moments_group(batch.sequences["history_times"].values["time"][1:], torch.tensor([0, 4]))},
    )
    with torch.no_grad():
        same = torch.allclose(model.user_vectors(batch), model.user_vectors(short), atol=1e-6)
    assert same is (positions is not Positions.FROM_START)


def test_other_data_and_impossible_settings_are_refused() -> None:
    with pytest.raises(SchemaError, match="made of events"):
        build_model(SMALL, small_inputs(), seed=0)
    for settings in (
        {"num_heads": 3},
        {"temperature": math.inf},
        {"gbce_t": 2.0},
        {"dropout": 1.0},
        {"item_dropout": 1.0},
    ):
        with pytest.raises(ConfigError):
            dataclasses.replace(SMALL, **settings)
