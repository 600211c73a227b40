"""The ranker of candidates against padded plain torch: what a score depends on, and what computing it once changes."""

from __future__ import annotations

import dataclasses
import datetime
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.sequence.test_next_item import INPUTS as NEXT_INPUTS
from tests.models.sequence.test_next_item import LENGTH, NUM_ITEMS, lists
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.events import HISTORY_LENGTHS, HISTORY_PLACES
from ziggurat.features.inputs import InputSpec, LabelSpec, MomentsSpec, SingleSpec, TableSpec
from ziggurat.features.items import Items
from ziggurat.features.jagged import FeatureGroup, moments_group, offsets_of
from ziggurat.features.schema import Task
from ziggurat.models import SequenceRanker, SequenceRankerConfig, build_model
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.sequence.layers.hstu import HSTULayer
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.models.sequence.next_item import Positions
from ziggurat.models.sequence.ranker import ActionInput, Clock, EventEncoders
from ziggurat.ops.lookup import KernelChoice
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.pretend_queues import record_waits

INPUTS = InputSpec(
    single=(
        SingleSpec(name="item", table="item"),
        SingleSpec(name="kind", table="kind"),
        SingleSpec(name="country", table="country"),
    ),
    jagged=(
        *lists("history", table="item"),
        *lists("history_kind", table="kind"),
        *lists("history_action", table="action"),
    ),
    moments=(MomentsSpec(name="history_times", max_length=LENGTH), MomentsSpec(name="asked_at", max_length=1)),
    tables=(
        TableSpec(name="item", num_rows=NUM_ITEMS + 3),
        TableSpec(name="kind", num_rows=6),
        TableSpec(name="action", num_rows=5),
        TableSpec(name="country", num_rows=5),
    ),
    labels=(LabelSpec(name="like"), LabelSpec(name="share", task=Task.REGRESSION)),
    has_groups=True,
    items=Items(id="item", features=("item", "kind")),
)
SMALL = SequenceRankerConfig(embedding_dim=8, num_layers=2, dropout=0.0, time_buckets=64)


def batch_of(questions: list[tuple[int, int]], *, seed: int = 0) -> Batch:
    """Questions of (history, candidates) so long."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    lengths, candidates = (torch.tensor(each, dtype=torch.int64) for each in zip(*questions, strict=True))
    histories = [drawn(3, NUM_ITEMS + 3, length) for length in lengths.tolist()]
    actions = [drawn(1, 5, length) for length in lengths.tolist()]
    times = [1_600_000_000 + drawn(1, 900, length).cumsum(0) for length in lengths.tolist()]
    of_question = torch.arange(len(questions)).repeat_interleave(candidates)
    size = len(of_question)
    target = drawn(3, NUM_ITEMS + 3, size)
    asked = 1_600_010_000 + drawn(1, 900, len(questions))

    def of_samples(values: list[Tensor]) -> Tensor:
        return torch.cat([values[at] for at in of_question.tolist()] or [lengths[:0]])

    rows = of_samples(histories)
    sizes = lengths[of_question]
    return Batch(
        dense=torch.empty(size, 0),
        single=torch.stack([target, 3 + target % 3, drawn(1, 5, len(questions))[of_question]]),
        jagged=JaggedRows(torch.cat([rows, 3 + rows % 3, of_samples(actions)]), offsets_of(sizes.repeat(3))),
        sequences={
            "history_times": moments_group(of_samples(times), offsets_of(sizes)),
            "asked_at": moments_group(asked[of_question], torch.arange(size + 1)),
        },
        labels=torch.stack([torch.rand(size, generator=generator).round(), torch.rand(size, generator=generator)], 1),
        groups=of_question + 1,
        row_ids=torch.arange(size),
    )


def built(**settings: Any) -> SequenceRanker:
    model = build_model(dataclasses.replace(SMALL, **settings), INPUTS, seed=0)
    assert isinstance(model, SequenceRanker)
    return model


VARIANTS: list[dict[str, Any]] = [
    {"layers": LayerPreset.STU, "actions": ActionInput.MAPPED},
    {"layers": LayerPreset.HSTU, "positions": Positions.FROM_START, "time_buckets": 0},
    {"layers": LayerPreset.HSTU_NVIDIA, "positions": Positions.NONE, "max_attention_length": 2},
    {"actions": ActionInput.MAPPED, "encoders": EventEncoders.NETWORKS, "encoder_dim": 5, "clock": Clock.HOUR_AND_DAY},
    {"encoders": EventEncoders.NETWORKS, "positions": Positions.FROM_START, "time_buckets": 0},
]


def padded_logits(model: SequenceRanker, batch: Batch, sample: int) -> Tensor:
    """The logits of one sample, alone: one dense matrix of scores a layer, no shared history."""
    config, tables = model.config, model.embeddings
    count, dim = len(batch.labels), config.embedding_dim

    def listed(at: int) -> Tensor:
        first, last = batch.jagged.offsets[at * count + sample : at * count + sample + 2].tolist()
        return batch.jagged.values[first:last]

    item, kind, country = batch.single[:, sample].tolist()
    moments = batch.sequences["history_times"]
    times = moments.values["time"][moments.offsets[sample] : moments.offsets[sample + 1]]
    asked = int(batch.sequences["asked_at"].values["time"][sample])
    history = tables.table("item")[listed(0)] + tables.table("kind")[listed(1)]
    candidate = tables.table("item")[item] + tables.table("kind")[kind]
    assert model.unknown_action is not None
    assert model.context_places is not None
    whole, at = len(history), list(range(len(history)))
    if HISTORY_PLACES in batch.sequences:  # thinned: positions are those of the whole history
        places = batch.sequences[HISTORY_PLACES]
        at = places.values["time"][places.offsets[sample] : places.offsets[sample + 1]].tolist()
        whole = int(batch.extras[HISTORY_LENGTHS][sample])
    if config.encoders is EventEncoders.NETWORKS:
        item_map, side_map = model.item_encoder, model.side_encoder
        assert item_map is not None
        assert side_map is not None
        of_event = item_map(tables.table("item")[listed(0)]) + side_map(tables.table("kind")[listed(1)])
        of_target = item_map(tables.table("item")[item]) + side_map(tables.table("kind")[kind])
        done, unknown = model.action_map(tables.table("action")[listed(2)]), model.action_map(model.unknown_action)
        rows, target = (of_event + done) * math.sqrt(dim), (of_target + unknown) * math.sqrt(dim)
    else:
        rows = history * math.sqrt(dim) + model.action_map(tables.table("action")[listed(2)])
        target = candidate * math.sqrt(dim) + model.action_map(model.unknown_action)
    if model.positions is not None:
        places = [whole - place if config.positions is Positions.FROM_END else place for place in (*at, whole)]
        rows, target = rows + model.positions.weight[places[:-1]], target + model.positions.weight[places[-1]]
    if model.time_vectors is not None:
        buckets = [min(63, math.isqrt(max(0, (asked - moment) // 60))) for moment in times.tolist()]
        rows, target = rows + model.time_vectors.weight[buckets], target + model.time_vectors.weight[0]
    token = tables.table("country")[country]
    if config.encoders is EventEncoders.NETWORKS:
        token = model.context_maps[0](token)
        candidate = torch.cat([tables.table("item")[item], tables.table("kind")[kind]])
    token = token * math.sqrt(dim) + model.context_places[0]
    events = torch.cat([token.unsqueeze(0), rows, target.unsqueeze(0)])
    length = len(history)
    first = int(times[0]) if length else asked
    own = [first, *times.tolist(), asked]
    of_query = [*own[1 : length + 1], own[length], asked]  # asked at the next event's time, the last one at its own
    for layer in model.stack.layers:
        assert isinstance(layer, HSTULayer)
        events = dense_layer(layer, events, own=own, asked=of_query, window=config.max_attention_length)
    state = events[-1]
    if model.clock_map is not None:
        when = datetime.datetime.fromtimestamp(asked, datetime.UTC)
        days = (when.date() - datetime.date(1970, 1, 1)).days
        turns = (when.hour / 24, days % 7 / 7)
        told = [wave(2 * math.pi * turn) for turn in turns for wave in (math.cos, math.sin)]
        state = model.clock_map(torch.cat([state, torch.tensor(told)]))
    state = model.norm(state)
    return model.head(state * model.item_network(candidate))


def dense_layer(layer: HSTULayer, events: Tensor, *, own: list[int], asked: list[int], window: int) -> Tensor:
    """One HSTU layer over context, history and one candidate: all context stands at position 0."""
    parts, size = layer.project(events), len(events)
    bias = torch.zeros(size, size)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for i in range(size):
        for j in range(size):
            is_context = i == 0 and j < size - 1
            seen[i, j] = i == j or is_context or (j < i and (not window or i - j <= window or i - window <= 0))
            if layer.w_pos is not None:
                bias[i, j] += layer.w_pos[j - i + (len(layer.w_pos) - 1) // 2]
            if layer.w_time is not None:
                bucket = int(math.log(max(1, abs(asked[i] - own[j]))) / 0.301)
                bias[i, j] += layer.w_time[min(bucket, len(layer.w_time) - 1)]
    scale = 1.0 if layer.config.scale.value == "one" else layer.config.qk_dim**-0.5
    scores = torch.einsum("ihd,jhd->hij", parts.q, parts.k) * scale + bias
    weights = torch.where(seen, F.silu(scores), 0.0) / layer.config.max_length
    return layer.finish(events, torch.einsum("hij,jhd->ihd", weights, parts.v), parts.rest)


QUESTIONS = [(6, 3), (0, 2), (1, 1), (4, 4)]


@pytest.mark.parametrize("settings", VARIANTS)
def test_logits_are_those_of_each_sample_alone(settings: dict[str, Any]) -> None:
    model, batch = built(**settings), batch_of(QUESTIONS)
    once = deduplicate(batch, [FeatureGroup(jagged=(0, 1, 2))])
    alone = torch.stack([padded_logits(model, batch, sample) for sample in range(batch.batch_size)])
    for given in (batch, once):
        embedded = model.embed(given)
        assert embedded.named["first"].tolist() == [0, 3, 5, 6]
        torch.testing.assert_close(model.forward_dense(embedded).logits, alone, rtol=1e-4, atol=2e-6)
    mixed = torch.randperm(batch.batch_size, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(batch.take(mixed)), alone[mixed], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_a_batch_on_a_gpu_has_the_logits_of_the_cpu_and_its_host_is_asked_for_sizes(settings: dict[str, Any]) -> None:
    batch, model = batch_of([(3, 2), (0, 1), (5, 3)]), built(**settings)
    short = deduplicate(batch, [FeatureGroup(jagged=(0, 1, 2))])
    expected = model(batch)
    with pretend_cuda() as cuda:
        model = model.to(cuda)
        for each in (batch, short, batch.take(torch.arange(0))):
            arrived = each.to(cuda)
            with record_waits() as waits:
                told = model.further(arrived)
            assert waits == []
            assert len(told["longest"]) == (1 + 5 + 3 if each.batch_size else 1)
            torch.testing.assert_close(model(arrived).cpu(), expected[: each.batch_size], rtol=1e-4, atol=1e-5)


def test_gradients_do_not_depend_on_what_is_computed_once() -> None:
    batch, found = batch_of(QUESTIONS), []
    for given in (batch, deduplicate(batch, [FeatureGroup(jagged=(0, 1, 2))]), batch.take(torch.arange(9, -1, -1))):
        model = built(actions=ActionInput.MAPPED)
        sums = model.loss(model.forward_dense(model.embed(given)), given)
        sums.mean().backward()
        found.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    for others in found[1:]:
        assert len(others) == len(found[0])
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_candidates_do_not_see_each_other_and_share_a_history_only_if_all_of_it_is_equal() -> None:
    model, batch = built(), batch_of([(4, 3)])
    before = model(batch)
    other = dataclasses.replace(batch, single=batch.single.clone())
    other.single[0, 1] = other.single[0, 1] % NUM_ITEMS + 3
    changed = model(other)
    assert not torch.equal(changed[1], before[1])
    torch.testing.assert_close(changed[[0, 2]], before[[0, 2]], rtol=0, atol=1e-6)
    for name in ("history_times", "asked_at"):
        moments = batch.sequences[name]
        times = moments.values["time"].clone()
        times[-1] += 10**6
        apart = dataclasses.replace(batch, sequences=batch.sequences | {name: moments_group(times, moments.offsets)})
        assert model.embed(apart).named["first"].tolist() == [0, 2]
        assert not torch.equal(model(apart)[2], before[2])
        torch.testing.assert_close(model(apart)[:2], before[:2], rtol=0, atol=1e-6)


def test_events_context_and_candidates_are_dropped_before_the_layers_by_a_share_of_their_own() -> None:
    batch = batch_of([(6, 1), (3, 1)])
    plain = built(encoders=EventEncoders.NETWORKS, dropout=0.5, input_dropout=0.0, num_layers=1)
    seen: list[Tensor] = []
    plain.stack.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    plain(batch)
    plain.train()(batch)
    assert torch.equal(seen[0], seen[1])
    dropped = built(encoders=EventEncoders.NETWORKS, dropout=0.0, input_dropout=0.5, num_layers=1).train()
    dropped.stack.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    dropped(batch)
    kept = seen[2] != 0
    torch.testing.assert_close(seen[2], torch.where(kept, 2 * seen[0], 0.0))
    assert 0 < kept[:2].float().mean() < 1  # the context of both
    assert 0.3 < kept.float().mean() < 0.7


def test_an_empty_batch_has_no_logits_and_its_loss_a_gradient() -> None:
    model, batch = built(), batch_of(QUESTIONS).rows(0, 0)
    outputs = model.forward_dense(model.embed(batch))
    assert outputs.logits.shape == (0, 2)
    model.loss(outputs, batch).mean().backward()


def test_tasks_have_weights() -> None:
    batch = batch_of(QUESTIONS)
    plain, weighed = built(), built(task_weights=(2.0, 0.5))
    outputs = plain.forward_dense(plain.embed(batch))
    expected, found = plain.loss(outputs, batch), weighed.loss(outputs, batch)
    assert torch.equal(found.weight, expected.weight)
    torch.testing.assert_close(found.total, expected.total * torch.tensor([2.0, 0.5]))
    with pytest.raises(ConfigError, match="a weight for each of 2 labels"):
        built(task_weights=(1.0,))


@pytest.mark.parametrize("settings", VARIANTS)
def test_training_thins_the_history_of_a_question_for_all_of_its_candidates(settings: dict[str, Any]) -> None:
    batch, draw = batch_of(QUESTIONS), StepDraw(0, 1)
    assert built(**settings).shortened(batch, draw=draw) is batch
    model = built(stochastic_length=1.0, **settings)  # M = √6: two events
    thin = model.shortened(batch, draw=draw)
    assert thin.lists(0)[0].offsets.diff().tolist() == [2] * 3 + [0] * 2 + [1] + [2] * 4
    assert thin.extras[HISTORY_LENGTHS].tolist() == [6] * 3 + [0] * 2 + [1] + [4] * 4
    embedded = model.embed(thin)
    assert embedded.named["first"].tolist() == [0, 3, 5, 6]
    # What remains are events of the whole with all that is known of them.
    places, offsets = thin.sequences[HISTORY_PLACES], batch.lists(0)[0].offsets
    at = places.values["time"] + offsets[:-1].repeat_interleave(places.offsets.diff())
    for position in range(3):
        assert torch.equal(thin.lists(position)[0].values, batch.lists(position)[0].values[at])
    times = batch.sequences["history_times"].values["time"]
    assert torch.equal(thin.sequences["history_times"].values["time"], times[at])
    alone = torch.stack([padded_logits(model, thin, sample) for sample in range(batch.batch_size)])
    torch.testing.assert_close(model.forward_dense(embedded).logits, alone, rtol=1e-4, atol=2e-6)
    assert not torch.allclose(alone[:3], model(batch)[:3])


def test_a_thinned_question_depends_on_seed_step_and_itself_alone() -> None:
    model, draw = built(stochastic_length=1.0), StepDraw(0, 1)
    batch = batch_of([(6, 3), (0, 2), (5, 3), (6, 4)])
    thin = model.shortened(batch, draw=draw)
    wanted, size = model(thin), batch.batch_size
    # Kept once for all candidates; cut inside questions; with other rows; in another order.
    once = model.shortened(deduplicate(batch, [FeatureGroup(jagged=(0, 1, 2))]), draw=draw)
    assert once.repeated[0].num_slices == 4
    assert torch.equal(once.expanded().jagged.values, thin.jagged.values)
    two = deduplicate(batch, [FeatureGroup(single=(1,), jagged=(0,)), FeatureGroup(jagged=(2,))])
    for given in (once, model.shortened(two, draw=draw)):
        torch.testing.assert_close(model(given), wanted, rtol=0, atol=0)
    parts = [model.shortened(batch.rows(first, last), draw=draw) for first, last in ((0, 2), (2, 7), (7, 7), (7, size))]
    torch.testing.assert_close(torch.cat([model(part) for part in parts]), wanted, rtol=1e-5, atol=1e-6)
    assert set(parts[2].extras) == set(parts[0].extras)
    moved = dataclasses.replace(batch, row_ids=batch.row_ids + 100).take(torch.arange(size - 1, -1, -1))
    torch.testing.assert_close(model(model.shortened(moved, draw=draw)).flip(0), wanted, rtol=1e-5, atol=1e-6)
    others = [model.shortened(batch, draw=StepDraw(0, step)).jagged.values for step in range(2, 6)]
    assert any(not torch.equal(other, thin.jagged.values) for other in others)


def test_questions_that_share_a_slice_are_thinned_apart() -> None:
    model = built(stochastic_length=1.0)
    batch = batch_of([(6, 2)])
    asked = moments_group(torch.tensor([1_600_020_000, 1_600_030_000]), torch.arange(3))
    apart = deduplicate(
        dataclasses.replace(batch, sequences=batch.sequences | {"asked_at": asked}), [FeatureGroup(jagged=(0, 1, 2))]
    )
    assert apart.repeated[0].num_slices == 1
    found = [model.shortened(apart, draw=StepDraw(0, step)) for step in range(8)]
    assert all(each.repeated[0].num_slices == 2 for each in found)
    assert any(len(set(map(tuple, each.lists(0)[0].values.view(2, 2).tolist()))) == 2 for each in found)


def test_other_data_and_impossible_settings_are_refused() -> None:
    with pytest.raises(SchemaError, match="labels of candidates"):
        build_model(SMALL, NEXT_INPUTS, seed=0)
    with pytest.raises(ConfigError, match="heads share"):
        dataclasses.replace(SMALL, num_heads=3)
    shared = dataclasses.replace(INPUTS, jagged=(*INPUTS.jagged[:2], *lists("history_action", table="item")))
    config = dataclasses.replace(SMALL, actions=ActionInput.MAPPED)
    with pytest.raises(ConfigError, match="tables of their own"):
        build_model(config, shared, seed=0)


def test_kernels_of_tables_give_the_same_logits() -> None:
    batch = batch_of(QUESTIONS)
    found = []
    for kernel in (KernelChoice.TORCH, KernelChoice.AUTO):
        model = built(embedding=dataclasses.replace(SMALL.embedding, kernel=kernel), actions=ActionInput.MAPPED)
        found.append(model(batch))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
