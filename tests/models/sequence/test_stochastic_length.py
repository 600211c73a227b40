"""Stochastic length: which histories are thinned, how often, to how many events."""

from __future__ import annotations

import dataclasses

import torch

from tests.models.sequence.test_next_item import batch_of, built
from ziggurat.features.batch import Batch
from ziggurat.features.batches.samples import take_samples
from ziggurat.features.events import HISTORY, HISTORY_LENGTHS, HISTORY_PLACES
from ziggurat.features.jagged import offsets_of
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.sequence.next_item import Positions
from ziggurat.models.sequence.stochastic_length import thinned_rows


def test_long_histories_are_thinned_as_often_as_the_equation_says() -> None:
    lengths = torch.tensor([0, 1, 10, 50, 63, 64, 100, 256]).repeat(500)
    offsets, keys, draw = offsets_of(lengths), torch.arange(len(lengths)), StepDraw(0, 0)
    kept = thinned_rows(offsets, keys, draw=draw, alpha=1.5, longest=256)  # M = 64, N^α = 4096
    counts = torch.stack([each.sum() for each in kept.split(lengths.tolist())]).view(500, 8)
    assert (counts[:, :6] == lengths[:6]).all()
    shares = (counts == lengths[:8]).double().mean(dim=0)
    assert abs(float(shares[6]) - 4096 / 100**2) < 0.08
    assert abs(float(shares[7]) - 4096 / 256**2) < 0.04
    assert set(counts[:, 6].tolist()) == {64, 100}
    assert set(counts[:, 7].tolist()) == {64, 256}
    # Each place of a thinned history is as likely as any other.
    often = torch.stack([each for each in kept.split(lengths.tolist()) if len(each) == 256]).double().mean(dim=0)
    assert float(often.min()) > 0.15
    assert float(often.max()) < 0.50
    assert thinned_rows(offsets, keys, draw=draw, alpha=2.0, longest=256).all()
    assert not len(thinned_rows(torch.tensor([0]), keys[:0], draw=draw, alpha=1.5, longest=256))


def test_a_sample_is_thinned_by_seed_step_and_row_alone() -> None:
    lengths, rows = torch.tensor([256, 0, 10, 100, 256, 64]), torch.tensor([7, 8, 9, 10, 11, 12])
    how = {"alpha": 1.5, "longest": 256}
    found = thinned_rows(offsets_of(lengths), rows, draw=StepDraw(0, 5), **how)
    counts = [int(each.sum()) for each in found.split(lengths.tolist())]
    assert set(counts[:1] + counts[3:5]) <= {64, 100, 256}
    assert [counts[at] for at in (1, 2, 5)] == [0, 10, 64]
    some = torch.tensor([4, 0])  # another rank's batch, in another order
    again = thinned_rows(offsets_of(lengths[some]), rows[some], draw=StepDraw(0, 5), **how)
    parts = found.split(lengths.tolist())
    assert torch.equal(again, torch.cat([parts[4], parts[0]]))
    drawn = [thinned_rows(offsets_of(lengths), rows, draw=StepDraw(0, step), **how) for step in range(200)]
    shares = [float(each[:256].sum() == 256) for each in drawn]
    assert abs(sum(shares) / 200 - 4096 / 256**2) < 0.06
    often = torch.stack([each[:256] for each in drawn if each[:256].sum() == 64]).double().mean(dim=0)
    assert 0.08 < float(often.min()) < float(often.max()) < 0.45


def test_next_item_asks_events_of_a_thinned_history_for_the_next_one_that_remains() -> None:
    batch, draw = batch_of([6, 3, 0, 1]), StepDraw(0, 1)
    assert built().shortened(batch, draw=draw) is batch
    model = built(stochastic_length=1.0, positions=Positions.FROM_END)  # two of six events
    found = model.shortened(batch, draw=draw)
    (before, begins), (rows, offsets) = (model.lists_of(each, HISTORY) for each in (batch, found))
    assert offsets.diff().tolist() == [2, 2, 0, 1]
    assert found.extras[HISTORY_LENGTHS].tolist() == [6, 3, 0, 1]
    places = found.sequences[HISTORY_PLACES].values["time"]
    at = places + begins[:-1].repeat_interleave(offsets.diff())
    assert torch.equal(rows, before[at])
    for name in ("history_kind", "history_action"):
        assert torch.equal(model.lists_of(found, name)[0], model.lists_of(batch, name)[0][at])
    times = batch.sequences["history_times"].values["time"]
    assert torch.equal(found.sequences["history_times"].values["time"], times[at])
    # It is the batch that has these events alone, but for the positions, which are those of the whole.
    bare = dataclasses.replace(
        found, extras={}, sequences={k: v for k, v in found.sequences.items() if k != HISTORY_PLACES}
    )
    assert model.positions is not None
    with torch.no_grad():
        assert not torch.equal(model(found), model(bare))
        model.positions.weight.fill_(0.5)
        torch.testing.assert_close(model(found), model(bare))
    sums = model.loss(model.forward_dense(model.embed(bare)), bare)
    assert torch.equal(model.loss_weight(found), sums.weight)
    assert sums.weight < model.loss_weight(batch)
    assert model.shortened(Batch.empty(model.inputs), draw=draw).batch_size == 0
    last = take_samples(batch, torch.tensor([1]))
    assert torch.equal(model.lists_of(model.shortened(last, draw=draw), HISTORY)[0], rows[2:4])
