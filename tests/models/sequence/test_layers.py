"""Layers over sequences against dense padded ones, and remembered histories against the full forward."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.models.sequence.dense_layers import dense_bias, dense_hstu, dense_mask, dense_softmax
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.jagged import offsets_of
from ziggurat.models.contract.model import Unpooled
from ziggurat.models.sequence.layers.hstu import (
    HSTULayer,
    HSTULayerConfig,
    HSTUOutput,
    PositionTimeBias,
    hstu_nvidia,
    hstu_research,
    stu,
)
from ziggurat.models.sequence.layers.layer import SequenceLayer
from ziggurat.models.sequence.layers.places import AskedAt, SequencePlaces, asked_times, cut_lists, join_lists
from ziggurat.models.sequence.layers.softmax_block import SoftmaxBlock, ligr, pointwise, sasrec
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.ops.attention.problem import AttentionForm, AttentionMask, JaggedLayout
from ziggurat.ops.repeat import expand_lists

LENGTHS, TARGETS = [7, 0, 1, 12], [2, 0, 0, 5]
DIM, HEADS = 12, 2
VARIANTS = ("research", "stu", "nvidia", "sasrec", "ligr", "relu")
BLOCKS = {
    "sasrec": sasrec,
    "ligr": ligr,
    "relu": functools.partial(pointwise, weights=AttentionForm.RELU, max_length=16),
    "silu": functools.partial(pointwise, weights=AttentionForm.SILU, max_length=16),
}


def layer_of(variant: str) -> SequenceLayer:
    """A layer whose weights are all drawn, so that none is hidden by zeros or ones."""
    heads = {"dim": DIM, "num_heads": HEADS, "dropout": 0.0}
    if variant in BLOCKS:
        layer: SequenceLayer = SoftmaxBlock(BLOCKS[variant](**heads))
    else:
        config = {
            "research": lambda: hstu_research(max_length=16, **heads),
            "stu": lambda: stu(max_length=16, head_dim=5, **heads),
            "nvidia": lambda: hstu_nvidia(max_length=16, head_dim=5, **heads),
        }[variant]()
        layer = HSTULayer(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4)
    return layer


def times_of(total: int) -> Tensor:
    return torch.randint(0, 10**6, (total,), generator=torch.Generator().manual_seed(4)).sort().values


def dense(layer: SequenceLayer, events: Tensor, places: SequencePlaces, variant: str) -> Tensor:
    """The padded layer on the same events, cut to jagged rows again."""
    weights = {name: value.detach().double() for name, value in layer.state_dict().items()}
    rule = places.layout.rule
    mask = dense_mask(LENGTHS, TARGETS, context=rule.context, reach=rule.max_attention_length)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]

    def padded(rows: Tensor) -> Tensor:
        out = rows.new_zeros(len(LENGTHS), max(LENGTHS), *rows.shape[1:])
        out[inside] = rows
        return out

    if variant in BLOCKS:
        return dense_softmax(padded(events.double()), weights, variant=variant, heads=HEADS, mask=mask)[inside]
    assert places.key_times is not None
    assert places.query_times is not None
    history = torch.tensor(LENGTHS) - torch.tensor(TARGETS)
    positions = torch.minimum(torch.arange(max(LENGTHS)).expand(len(LENGTHS), -1), history[:, None])
    bias = dense_bias(weights, padded(places.key_times), padded(places.query_times), positions)
    sizes = (6, 6) if variant == "research" else (5, 5)
    options = {"variant": variant, "heads": HEADS, "sizes": sizes, "n": 16, "mask": mask, "bias": bias}
    return dense_hstu(padded(events.double()), weights, **options)[inside]


@pytest.mark.parametrize("mask", [None, AttentionMask(context=2), AttentionMask(max_attention_length=3)])
@pytest.mark.parametrize("variant", [*VARIANTS, "silu"])
def test_layers_equal_dense_padded_ones(variant: str, mask: AttentionMask | None) -> None:
    layer = layer_of(variant)
    offsets, num_targets = offsets_of(torch.tensor(LENGTHS)), torch.tensor(TARGETS)
    total = int(offsets[-1])
    events = torch.randn(total, DIM, generator=torch.Generator().manual_seed(5))
    places = SequenceStack([layer], mask=mask).places_of(offsets, times=times_of(total), num_targets=num_targets)
    expected = dense(layer, events, places, variant)
    torch.testing.assert_close(layer(events, places=places).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_equal_those_of_fp64(variant: str) -> None:
    offsets = offsets_of(torch.tensor(LENGTHS))
    events, times = torch.randn(int(offsets[-1]), DIM), times_of(int(offsets[-1]))
    found = []
    for dtype in (torch.float32, torch.float64):  # the kernel, and autograd through the reference
        layer = layer_of(variant).to(dtype)
        places = SequenceStack([layer]).places_of(offsets, times=times, num_targets=torch.tensor(TARGETS))
        layer(events.to(dtype), places=places).square().sum().backward()
        found.append([weight.grad.double() for weight in layer.parameters() if weight.grad is not None])
    assert len(found[0]) == len([weight for weight in layer_of(variant).parameters() if weight.requires_grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 + 1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("with_times", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_remembered_histories_give_what_the_full_forward_gives(variant: str, with_times: bool) -> None:
    if variant == "research" and not with_times:
        pytest.skip("this layer needs times")
    stack = SequenceStack([layer_of(variant), layer_of(variant)], mask=AttentionMask(max_attention_length=6))
    lengths, candidates = torch.tensor([5, 0, 1, 7]), torch.tensor([3, 2, 0, 4])
    offsets, behind = offsets_of(lengths), offsets_of(candidates)
    generator = torch.Generator().manual_seed(6)
    events, asked = (torch.randn(int(total[-1]), DIM, generator=generator) for total in (offsets, behind))
    times, asked_at = (times_of(len(events)), torch.full((4,), 2 * 10**6)) if with_times else (None, None)
    both, joined = join_lists(events, asked, offsets=(offsets, behind))
    all_times = None
    if times is not None and asked_at is not None:
        all_times, _ = join_lists(times, asked_at.repeat_interleave(candidates), offsets=(offsets, behind))
    full = stack(both, places=stack.places_of(joined, times=all_times, num_targets=candidates))
    position = torch.arange(len(both)) - joined[:-1].repeat_interleave(joined.diff())
    is_candidate = position >= lengths.repeat_interleave(joined.diff())

    outputs, whole = stack.remember(events, offsets=offsets, times=times)
    torch.testing.assert_close(outputs, full[~is_candidate], rtol=1e-5, atol=1e-5)
    first = torch.tensor([2, 0, 0, 6])
    early = position[~is_candidate] < first.repeat_interleave(lengths)
    part_times = (None, None) if times is None else (times[early], times[~early])
    _, grown = stack.remember(events[early], offsets=offsets_of(first), times=part_times[0])
    grown = stack.extend(events[~early], offsets=offsets_of(lengths - first), histories=grown, times=part_times[1])
    for histories in (whole, grown):
        for micro_batch in (0, 1, 3):
            options = {"histories": histories, "asked_at": asked_at, "micro_batch": micro_batch}
            found = stack.score(asked, offsets=behind, **options)
            torch.testing.assert_close(found, full[is_candidate], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["stu", "sasrec"])
def test_histories_that_samples_share_are_encoded_once(variant: str) -> None:
    """Encoded slices, candidates behind them, and gradients are those of one history a sample."""
    lengths, inverse = torch.tensor([5, 0, 9]), torch.tensor([2, 0, 0, 1, 2, 2])
    offsets, generator = offsets_of(lengths), torch.Generator().manual_seed(6)
    values = torch.randn(int(offsets[-1]), DIM, generator=generator)
    candidates = torch.randn(len(inverse), DIM, generator=generator)
    times, asked_at = times_of(len(values)), torch.full((3,), 10**6)
    found = []
    for is_plain in (True, False):
        stack, leaf = SequenceStack([layer_of(variant), layer_of(variant)]), values.clone().requires_grad_()
        history, moments, asked = Unpooled(values=leaf, offsets=offsets, inverse=inverse), times, asked_at
        numbers = torch.arange(len(inverse)) if is_plain else inverse
        if is_plain:
            history, asked = history.expanded(), asked_at[inverse]
            spread, _ = expand_lists(times.unsqueeze(1).double(), offsets, inverse)
            moments = spread.squeeze(1).long()
        encoded = stack.encode(history, times=moments).expanded().values
        _, remembered = stack.remember(history.values, offsets=history.offsets, times=moments)
        scored = stack.score_samples(candidates, inverse=numbers, histories=remembered, asked_at=asked)
        (encoded.square().sum() + scored.square().sum()).backward()
        found.append([encoded, scored, leaf.grad, *(each.grad for each in stack.parameters() if each.requires_grad)])
    for wanted, given in zip(*found, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4 * float(wanted.detach().abs().max() + 1))


def test_more_candidates_than_the_bias_has_positions_stand_at_one_position() -> None:
    stack = SequenceStack([layer_of("research")])
    _, histories = stack.remember(torch.randn(15, DIM), offsets=torch.tensor([0, 15]), times=times_of(15))
    candidate = torch.randn(1, DIM).expand(40, DIM)
    found = stack.score(
        candidate, offsets=torch.tensor([0, 40]), histories=histories, asked_at=torch.tensor([2 * 10**6])
    )
    torch.testing.assert_close(found, found[:1].expand_as(found))


def test_an_output_does_not_depend_on_who_else_is_in_the_batch() -> None:
    layer = layer_of("stu")
    events = torch.randn(9, DIM)
    alone = layer(events[:4], places=SequencePlaces(layout=JaggedLayout(offsets=torch.tensor([0, 4]))))
    together = layer(events, places=SequencePlaces(layout=JaggedLayout(offsets=torch.tensor([0, 4, 9]))))
    torch.testing.assert_close(together[:4], alone, rtol=1e-6, atol=1e-6)


def test_dropout_is_a_function_of_the_seed() -> None:
    layer = HSTULayer(stu(dim=DIM, max_length=8, num_heads=1, head_dim=4, dropout=0.5))
    places = SequencePlaces(layout=JaggedLayout(offsets=torch.tensor([0, 6])))
    events = torch.randn(6, DIM)
    torch.manual_seed(1)
    first = layer(events, places=places)
    torch.manual_seed(1)
    assert torch.equal(layer(events, places=places), first)
    assert not torch.equal(layer(events, places=places), first)
    layer.eval()
    assert torch.equal(layer(events, places=places), layer(events, places=places))


def test_output_of_normed_parts_reads_them() -> None:
    config = HSTULayerConfig(
        dim=4, qk_dim=3, value_dim=2, max_length=4, bias=PositionTimeBias.NONE, output=HSTUOutput.PARTS_OF_NORMED
    )
    layer = HSTULayer(config)
    gathered, u, events = torch.randn(5, 1, 2), torch.randn(5, 2), torch.randn(5, 4)
    normal = torch.nn.functional.layer_norm(gathered.flatten(1), (2,), eps=1e-6)
    expected = events + layer.output(torch.cat([u, normal, u * normal], dim=1))
    torch.testing.assert_close(layer.finish(events, gathered, u), expected)


def test_an_event_is_asked_at_the_time_of_the_next_one() -> None:
    offsets, times = torch.tensor([0, 3, 3, 4]), torch.tensor([1, 5, 9, 2])
    assert asked_times(times, offsets=offsets, asked=AskedAt.NEXT).tolist() == [5, 9, 9, 2]
    assert asked_times(times, offsets=offsets, asked=AskedAt.OWN).tolist() == [1, 5, 9, 2]
    last = torch.tensor([11, 12, 13])
    assert asked_times(times, offsets=offsets, asked=AskedAt.NEXT, last=last).tolist() == [5, 9, 11, 13]
    with pytest.raises(DataError, match="int64"):
        asked_times(times.float(), offsets=offsets, asked=AskedAt.NEXT)


def test_lists_are_joined_and_cut_one_by_one() -> None:
    first, second = torch.tensor([1, 2, 3]), torch.tensor([10, 20])
    values, offsets = join_lists(first, second, offsets=(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 2, 2])))
    assert values.tolist() == [1, 2, 10, 20, 3]
    assert offsets.tolist() == [0, 3, 4, 5]
    assert cut_lists(values, offsets=offsets, keep=torch.tensor([1, 0, 1])).tolist() == [1, 3]


def test_what_cannot_follow_remembered_histories_is_refused() -> None:
    stack = SequenceStack([layer_of("stu")], mask=AttentionMask(context=1))
    _, histories = stack.remember(torch.randn(3, DIM), offsets=torch.tensor([0, 3]))
    with pytest.raises(ConfigError, match="context"):
        stack.extend(torch.randn(1, DIM), offsets=torch.tensor([0, 1]), histories=histories)
    with pytest.raises(DataError, match="1 histories"):
        stack.score(torch.randn(2, DIM), offsets=torch.tensor([0, 1, 2]), histories=histories)
    with pytest.raises(DataError, match="times"):
        stack.score(torch.randn(2, DIM), offsets=torch.tensor([0, 2]), histories=histories, asked_at=torch.tensor([5]))
    with pytest.raises(ConfigError, match="heads"):
        sasrec(dim=10, num_heads=3)
