"""Steps of next-item models whose histories are divided, with sharded tables and data parallelism, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.sequence.test_next_item import INPUTS, batch_of
from tests.parallel.context.attention_cases import differences
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.errors import ConfigError, TopologyError
from ziggurat.features.events import HISTORY, PIECE_LENGTHS, PIECE_STARTS
from ziggurat.features.jagged import offsets_of
from ziggurat.models import DNNConfig, NextItemConfig, build_model
from ziggurat.models.sequence.layers.hstu import HSTULayer, hstu_research
from ziggurat.models.sequence.layers.places import AskedAt
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.models.sequence.layers.softmax_block import SoftmaxBlock, sasrec
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.models.sequence.next_item import Positions
from ziggurat.models.sequence.next_item_loss import NextItemNegatives
from ziggurat.ops.attention.problem import Spans
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.context.attention import ContextAttention
from ziggurat.parallel.context.choice import Passing
from ziggurat.parallel.context.histories import remember_spread, score_spread, share_of_candidates
from ziggurat.parallel.context.pieces import Pieces, head_and_tail
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Placement, Plan, TablePlacement
from ziggurat.testing.batches import small_inputs
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

# All items are candidates: drawn ones depend on the rank that draws.
MODEL = NextItemConfig(
    embedding_dim=8,
    num_layers=2,
    dropout=0.0,
    negatives=NextItemNegatives.ALL,
    temperature=0.5,
    embedding=EmbeddingConfig(kernel=KernelChoice.TORCH),
)
PLAN = Plan(
    world_size=4,
    tables=(
        TablePlacement(table="item", placement=Placement.ROW_WISE, ranks=(0, 1, 2, 3)),
        TablePlacement(table="kind", placement=Placement.TABLE_WISE, ranks=(1,)),
        TablePlacement(table="action", placement=Placement.DATA_PARALLEL, ranks=(0, 1, 2, 3)),
    ),
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"layers": LayerPreset.HSTU.value},
    {"layers": LayerPreset.STU.value, "positions": Positions.FROM_END.value, "max_attention_length": 2},
    {"layers": LayerPreset.SASREC.value},
)


def check(rank: int, model_json: Any) -> None:
    """Several models and ways to run, one after the other, in one group of processes."""
    plan = from_json(Plan, to_json(PLAN), where="test")
    batch = batch_of([4, 6, 0, 1, 2, 5, 3])
    ways = [(2, DenseParallelism.DDP, Passing.KEYS), (4, DenseParallelism.DDP, Passing.QUERIES)]
    for number, variant in enumerate(VARIANTS):
        config = from_json(NextItemConfig, model_json | variant, where="test")
        size, dense, passing = (2, DenseParallelism.FSDP, Passing.AUTO) if number == 1 else ways[number % 2]
        assert_same_as_single_device(
            lambda config=config: build_model(config, INPUTS, seed=3),
            plan,
            batch=batch,
            config=ParallelConfig(dense=dense, passing=passing),
            context=size,
            tolerance=Tolerance(others=5e-6),
        )
    # Its messages never wait behind others of the step, of which 64 may be under way.
    topology, model = Topology.create(context_size=4), build_model(MODEL, INPUTS, seed=3)
    parallelize(model, plan, topology)
    assert isinstance(model.stack.attention, ContextAttention)
    assert model.stack.attention.group.process_group is not topology.world.process_group
    with pytest.raises(TopologyError, match="--context"):
        Topology.create(context_size=3)
    topology = Topology.create(context_size=2)
    assert topology.context.ranks == ((0, 1), (2, 3))[rank // 2]
    inputs = small_inputs()
    tables = tuple(
        TablePlacement(table=table.name, placement=Placement.DATA_PARALLEL, ranks=(0, 1, 2, 3))
        for table in inputs.tables
    )
    dnn = build_model(DNNConfig(embedding_dim=4), inputs, seed=0)
    with pytest.raises(ConfigError, match="DNN, which does not"):
        parallelize(dnn, Plan(world_size=4, tables=tables), topology)


def check_scores() -> None:
    """Candidates behind histories on four ranks score as behind remembered ones on one device."""
    topology = Topology.create(context_size=4)
    me, generator = topology.context.position, torch.Generator().manual_seed(1)
    lengths, counts = torch.tensor([9, 0, 40, 1]), torch.tensor([5, 3, 0, 7])
    begins, firsts = offsets_of(lengths), offsets_of(counts)
    events, candidates = (torch.randn(int(each.sum()), 8, generator=generator) for each in (lengths, counts))
    times = torch.randint(0, 10**6, (len(events),), generator=generator)
    asked_at = torch.tensor([10**6, 5, 7, 10**5])
    for layer in (HSTULayer(hstu_research(dim=8, num_heads=2, max_length=64)), SoftmaxBlock(sasrec(dim=8))):
        own = {"times": times} if isinstance(layer, HSTULayer) else {}
        asked = {"asked_at": asked_at} if own else {}
        torch.manual_seed(2)
        for weight in layer.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        stack = SequenceStack([layer.eval(), layer], asked=AskedAt.OWN)
        with torch.no_grad():
            _, kept = stack.remember(events, offsets=begins, **own)
            wanted = stack.score(candidates, offsets=firsts, histories=kept, **asked)
            with pytest.raises(ConfigError, match="reach over ranks"):
                remember_spread(stack, events, places=stack.places_of(begins))
            mine = head_and_tail(lengths, rank=me, num_ranks=4)
            rows = mine.rows_within(Pieces(torch.zeros(2, 4, dtype=torch.int64), lengths.repeat(2, 1))) % len(events)
            starts = mine.starts.reshape(-1)
            spans = Spans(query_starts=starts, key_starts=starts, lengths=lengths.repeat(2))
            for passing in Passing:
                stack.attention = ContextAttention(topology.context, traffic=Traffic(topology), passing=passing)
                places = stack.places_of(mine.offsets, times=times[rows] if own else None, spans=spans)
                _, spread = remember_spread(stack, events[rows], places=places)
                share = share_of_candidates(counts, rank=me, num_ranks=4)
                at = Pieces(share[:1], (share[1] - share[0])[None]).rows_within(
                    Pieces(torch.zeros(1, 4, dtype=torch.int64), counts[None])
                )
                found = score_spread(stack, candidates[at], counts=counts, histories=spread, **asked)
                torch.testing.assert_close(found, wanted[at], rtol=1e-5, atol=1e-5)


def check_all(rank: int, model_json: Any) -> list[tuple[int, str, float, float]]:
    """Attention alone on two and on four ranks, then whole steps: in one group of processes."""
    found = differences(rank, list(range(4)), 2) + differences(rank, list(range(4, 8)), 4)
    check_scores()
    check(rank, model_json)
    return found


def test_divided_histories_are_those_of_one_device() -> None:
    for of_rank in run_ranks(check_all, 4, to_json(MODEL), timeout_s=180):
        for seed, passing, forward, backward in of_rank:
            assert forward < 1e-6, (seed, passing, forward)
            assert backward < 1e-5, (seed, passing, backward)


def test_pieces_ask_what_the_history_asks() -> None:
    model = build_model(MODEL, INPUTS, seed=3)
    batch = batch_of([4, 6, 0, 1])
    lengths = model.history_lengths(batch)
    assert lengths.tolist() == [4, 6, 0, 1]
    asked, answers = [], []
    for rank in range(2):
        cut = head_and_tail(lengths, rank=rank, num_ranks=2)
        pieces = model.pieces_of(batch, starts=cut.starts, counts=cut.counts)
        rows, offsets = model.lists_of(pieces, HISTORY)
        assert torch.equal(offsets.diff(), cut.counts.reshape(-1))
        assert torch.equal(pieces.extras[PIECE_STARTS], cut.starts.reshape(-1))
        assert torch.equal(pieces.extras[PIECE_LENGTHS], lengths.repeat(2))
        assert not model.lists_of(pieces, "earlier")[0].numel()
        for piece, count in enumerate(cut.counts.reshape(-1).tolist()):
            if count:
                asked.append((piece % 4, rows[offsets[piece]].item()))
                times = pieces.sequences["asked_at"]
                answers.append((pieces.single[:, piece].tolist(), times.values["time"][times.offsets[piece]].item()))
    whole, begins = model.lists_of(batch, HISTORY)
    moments = batch.sequences["history_times"].values["time"]
    later = {int(at): number for number, at in enumerate(moments)}
    ends = batch.sequences["asked_at"].values["time"].tolist()
    for (sample, first), (item, when) in zip(asked, answers, strict=True):
        assert first in whole[begins[sample] : begins[sample + 1]]
        if when in later:  # what follows is an event of the history itself
            at = later[when]
            assert item == [int(whole[at]), 3 + int(whole[at]) % 3]
            assert begins[sample] < at < begins[sample + 1]
        else:
            assert when == ends[sample]
            assert item == batch.single[:, sample].tolist()
