"""Which events each rank has and needs, against masks written out."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from ziggurat.ops.attention.problem import AttentionMask, JaggedLayout, parts_of, visible
from ziggurat.parallel.context.pieces import Histories, Pieces, head_and_tail


def _histories(seed: int) -> tuple[Histories, list[Tensor], random.Random]:
    """Random histories, and what sees what in each of them."""
    draw = random.Random(seed)
    lengths = torch.tensor([draw.choice([0, 1, 2, 5, 17, draw.randint(0, 60)]) for _ in range(draw.randint(0, 4))])
    lengths = lengths.to(torch.int64)
    targets = torch.tensor([draw.randint(0, int(length)) for length in lengths], dtype=torch.int64)
    targets = targets if draw.random() < 0.6 else torch.zeros_like(targets)
    mask = AttentionMask(context=draw.choice([0, 0, 1, 4]), max_attention_length=draw.choice([0, 1, 5, 20]))
    sees = []
    for length, num in zip(lengths.tolist(), targets.tolist(), strict=True):
        layout = JaggedLayout(offsets=torch.tensor([0, length]), num_targets=torch.tensor([num]), mask=mask)
        sees.append(visible(parts_of(layout)[0], mask=mask).dense(length))
    return Histories(lengths, targets, mask), sees, draw


def _random_pieces(lengths: Tensor, draw: random.Random) -> Pieces:
    sets = draw.randint(1, 3)
    edges = [sorted(draw.randint(0, int(length)) for _ in range(2 * sets)) for length in lengths]
    table = torch.tensor(edges, dtype=torch.int64).view(len(edges), sets, 2)
    return Pieces(table[..., 0].T, (table[..., 1] - table[..., 0]).T)


def _positions(pieces: Pieces, history: int) -> set[int]:
    found: set[int] = set()
    for start, count in zip(pieces.starts[:, history].tolist(), pieces.counts[:, history].tolist(), strict=True):
        found |= set(range(start, start + count))
    return found


def test_heads_and_tails_are_every_event_once_and_equal_work() -> None:
    lengths = torch.tensor([0, 1, 2, 7, 64, 1000])
    for num_ranks in (1, 2, 3, 4):
        pieces = [head_and_tail(lengths, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        for history, length in enumerate(lengths.tolist()):
            positions = sorted(at for each in pieces for at in _positions(each, history))
            assert positions == list(range(length))
        histories = Histories(lengths)
        work = [sum(histories.pairs(rows, keys) for keys in pieces) for rows in pieces]
        assert sum(work) == int((lengths * (lengths + 1) // 2).sum())
        assert max(work) < 1.02 * sum(work) / num_ranks + 10


def test_what_is_needed_and_counted_is_what_masks_say() -> None:
    for seed in range(200):
        histories, sees, draw = _histories(seed)
        rows, keys = (_random_pieces(histories.lengths, draw) for _ in range(2))
        needed, asking = histories.keys_needed(keys, by=rows), histories.rows_that_see(rows, keys)
        for history, seen in enumerate(sees):
            end = int(histories.ends[history])
            ours, theirs = (sorted(_positions(each, history)) for each in (rows, keys))
            among = [at for at in theirs if at < end]
            expected = {j for i in ours for j in among if seen[i, j] and (i < end or i != j)}
            assert expected <= _positions(needed, history), seed
            assert {i for i in ours for j in among if seen[i, j]} <= _positions(asking, history), seed
        one, other = (Pieces(each.starts[:1], each.counts[:1]) for each in (rows, keys))
        count = sum(
            bool(seen[i, j])
            for history, seen in enumerate(sees)
            for i in _positions(one, history)
            for j in _positions(other, history)
            if j < int(histories.ends[history])
        )
        assert histories.pairs(one, other) == count, seed


def test_nothing_is_sent_that_nobody_needs() -> None:
    """Causal: a rank needs the heads of the others, and tails before its own; with a short reach, little."""
    lengths = torch.tensor([80])
    pieces = [head_and_tail(lengths, rank=rank, num_ranks=4) for rank in range(4)]
    needed = [[Histories(lengths).keys_needed(keys, by=rows).num_rows for keys in pieces] for rows in pieces]
    assert needed == [[20, 20, 20, 20], [10, 20, 20, 20], [10, 10, 20, 20], [10, 10, 10, 20]]
    near = Histories(lengths, mask=AttentionMask(max_attention_length=2))
    assert [near.keys_needed(keys, by=pieces[0]).num_rows for keys in pieces] == [20, 2, 0, 0]
    assert [near.rows_that_see(pieces[0], keys).num_rows for keys in pieces] == [20, 2, 0, 0]


def test_rows_of_a_cut_stand_where_its_events_do() -> None:
    outer = Pieces(torch.tensor([[0, 5], [10, 20]]), torch.tensor([[4, 3], [2, 6]]))
    inner = outer.cut(torch.tensor([[2, 0], [0, 22]]), torch.tensor([[9, 7], [1, 24]]))
    assert inner.counts.tolist() == [[2, 2], [0, 2]]
    assert inner.rows_within(outer).tolist() == [2, 3, 4, 5, 11, 12]
