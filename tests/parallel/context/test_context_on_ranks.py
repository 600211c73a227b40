"""Steps of next-item models whose histories are divided, with sharded tables and data parallelism, as on one device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.models.sequence import test_ranker
from tests.models.sequence.test_next_item import INPUTS, batch_of
from tests.parallel.context.attention_cases import differences
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.errors import ConfigError, DataError, TopologyError
from ziggurat.features.events import HISTORY, PIECE_HOMES, PIECE_LENGTHS, PIECE_STARTS
from ziggurat.features.jagged import offsets_of
from ziggurat.models import DNNConfig, NextItemConfig, build_model
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.sequence.cut import Chunks
from ziggurat.models.sequence.layers.hstu import HSTULayer, hstu_research
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.models.sequence.layers.softmax_block import SoftmaxBlock, sasrec
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.models.sequence.next_item import Positions
from ziggurat.models.sequence.next_item_loss import NextItemNegatives
from ziggurat.ops.attention.problem import AttentionMask, Spans
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.context.attention import ContextAttention
from ziggurat.parallel.context.choice import ContextRates, Passing, Travelling
from ziggurat.parallel.context.extending import extend_spread, share_of_events
from ziggurat.parallel.context.histories import remember_spread, score_spread, share_of_candidates
from ziggurat.parallel.context.pieces import Pieces, head_and_tail
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.batches import small_inputs
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.team import Team

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
COUNTRY = TablePlacement(table="country", placement=Placement.TABLE_WISE, ranks=(0,))
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
    check_rankers(plan)
    check_answers(rank, plan)
    # Its messages never wait behind others of the step.
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


def check_rankers(plan: Plan) -> None:
    """Whole questions are cut, and samples without candidates carry events."""
    plan = replace(plan, tables=(*plan.tables, COUNTRY))
    batch = test_ranker.batch_of([(4, 3), (0, 1), (6, 4), (1, 2), (6, 1), (3, 5)])
    for number, settings in enumerate(test_ranker.VARIANTS):
        ranker = replace(test_ranker.SMALL, embedding=MODEL.embedding, **settings)
        if number:  # histories of two of their events
            thin = build_model(replace(ranker, stochastic_length=1.0), test_ranker.INPUTS, seed=3)
            batch = thin.shortened(batch, draw=StepDraw(0, number))
        assert_same_as_single_device(
            lambda ranker=ranker: build_model(ranker, test_ranker.INPUTS, seed=3),
            plan,
            batch=batch,
            context=(4, 2, 4, 4, 2)[number],
            tolerance=Tolerance(others=5e-6),
        )


def check_answers(rank: int, plan: Plan) -> None:
    """Evaluations divide histories: every rank gets the answers of its own samples."""
    questions = test_ranker.batch_of([(4, 3), (0, 1), (6, 4), (1, 2), (3, 5)])  # cut inside one; a rank has none
    ranker = replace(test_ranker.SMALL, embedding=MODEL.embedding)
    cases = ((MODEL, INPUTS, batch_of([4, 6, 0, 1, 2]), 2), (ranker, test_ranker.INPUTS, questions, 4))
    for config, inputs, batch, size in cases:
        single, many = (build_model(config, inputs, seed=3).eval() for _ in range(2))
        tables = (*plan.tables, COUNTRY)[: len(inputs.tables)]
        parallelize(many, replace(plan, tables=tables), Topology.create(context_size=size))
        cuts = [0, 2, 2, batch.batch_size - 1, batch.batch_size]
        mine = slice(cuts[rank], cuts[rank + 1])
        attention = many.stack.attention
        with torch.no_grad():
            found, wanted = many.outputs_of(batch.rows(mine.start, mine.stop)), single.outputs_of(batch)
        torch.testing.assert_close(found.logits, wanted.logits[mine], rtol=1e-6, atol=1e-6)
        if config is MODEL:
            torch.testing.assert_close(found.named["user"], wanted.named["user"][mine], rtol=1e-6, atol=1e-6)
        first = rank // size * size
        turns = sum(cuts[other] < cuts[other + 1] for other in range(first, first + size))
        assert sum(attention.chosen.values()) == 2 * turns  # in each layer, for each rank that brings samples


def _rows(pieces: Pieces, lengths: Tensor) -> Tensor:
    """Where the events of pieces stand among those of whole histories."""
    outer = Pieces(torch.zeros_like(pieces.starts), lengths.repeat(pieces.num_sets, 1))
    return pieces.rows_within(outer) % max(1, int(lengths.sum()))


def check_scores(size: int) -> None:
    """Candidates behind histories on several ranks, also after new events, score as behind those of one device."""
    topology = Topology.create(context_size=size)
    me, generator = topology.context.position, torch.Generator().manual_seed(1)
    lengths, counts = torch.tensor([9, 0, 40, 1]), torch.tensor([5, 3, 0, 7])
    news = [torch.tensor(each) for each in ([3, 2, 0, 9], [1, 1, 1, 0], [1, 0, 1, 1])]
    begins, firsts = offsets_of(lengths), offsets_of(counts)

    def drawn(sizes: Tensor) -> Tensor:
        return torch.randn(int(sizes.sum()), 8, generator=generator)

    events, candidates, further = drawn(lengths), drawn(counts), [drawn(each) for each in news]
    times = torch.randint(0, 10**6, (len(events),), generator=generator)
    later = [torch.randint(10**6, 10**7, (len(each),), generator=generator) for each in further]
    asked_at = torch.tensor([10**7, 5, 7, 10**6])
    for layer in (HSTULayer(hstu_research(dim=8, num_heads=2, max_length=64)), SoftmaxBlock(sasrec(dim=8))):
        is_timed = isinstance(layer, HSTULayer)
        torch.manual_seed(2)
        for weight in layer.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        stack = SequenceStack([layer.eval(), layer], mask=AttentionMask(max_attention_length=0 if is_timed else 12))
        asked = {"asked_at": asked_at} if is_timed else {}
        with torch.no_grad():
            kept, wanted = stack.remember(events, offsets=begins, **({"times": times} if is_timed else {}))[1], []
            for number in range(4):
                wanted.append(stack.score(candidates, offsets=firsts, histories=kept, **asked))
                if number < 3:
                    own = {"times": later[number]} if is_timed else {}
                    kept = stack.extend(further[number], offsets=offsets_of(news[number]), histories=kept, **own)
            with pytest.raises(ConfigError, match="reach over ranks"):
                remember_spread(stack, events, places=stack.places_of(begins))
            mine = head_and_tail(lengths, rank=me, num_ranks=size)
            rows, starts = _rows(mine, lengths), mine.starts.reshape(-1)
            spans = Spans(query_starts=starts, key_starts=starts, lengths=lengths.repeat(2))
            after = torch.minimum(begins[:-1] + mine.starts + mine.counts, begins[1:] - 1).clamp(min=0).reshape(-1)
            own = {"times": times[rows], "last": times[after]} if is_timed else {}
            share = share_of_candidates(counts, rank=me, num_ranks=size)
            at = _rows(Pieces(share[:1], (share[1] - share[0])[None]), counts)
            passing = (Passing.QUERIES, Passing.KEYS, Passing.AUTO)[(is_timed + size) % 3]
            stack.attention = ContextAttention(topology.context, traffic=Traffic(topology), passing=passing)
            _, spread = remember_spread(stack, events[rows], places=stack.places_of(mine.offsets, spans=spans, **own))
            for number in range(4):
                found = score_spread(stack, candidates[at], counts=counts, histories=spread, **asked)
                torch.testing.assert_close(found, wanted[number][at], rtol=1e-5, atol=1e-5)
                if number < 3:
                    new = _rows(share_of_events(news[number], rank=me, num_ranks=size), news[number])
                    given = {"times": later[number][new]} if is_timed else {}
                    sizes = {"counts": news[number], "histories": spread}
                    with pytest.raises(DataError, match="new events"):
                        extend_spread(stack, further[number][:0], **(sizes | {"counts": news[number] + 5}))
                    spread = extend_spread(stack, further[number][new], **sizes, **given)
            # Events that come one by one leave no further pieces.
            assert max(each.num_sets for each in spread.pieces) <= 4


def check_kept_rates(rank: int) -> None:
    """Two groups that each divide histories keep their own rates, in a checkpoint that is the same on every rank."""
    topology = Topology.create(context_size=2)
    attention = ContextAttention(topology.context, traffic=Traffic(topology), passing=Passing.AUTO)
    model: Any = SimpleNamespace(stack=SimpleNamespace(attention=attention))
    team = Team(cast(Any, SimpleNamespace(topology=topology)))
    assert team.context_rates(model) == {}
    always = dict.fromkeys(Travelling, 1.0)
    own, other = (ContextRates(flops_per_s=each, bytes_per_s=(each,), always_s=always) for each in (rank // 2 + 1, 9))
    attention.use_rates(own)
    kept = team.context_rates(model)
    assert all(each == kept for each in team.gather(kept))
    attention.use_rates(other)
    team.restore_context_rates(model, kept)
    assert attention.rates == own


def check_all(rank: int, model_json: Any) -> list[tuple[int, str, float, float]]:
    """Attention alone on two and on four ranks, then whole steps: in one group of processes."""
    found = differences(rank, list(range(4)), 2) + differences(rank, list(range(4, 8)), 4)
    check_scores(2)
    check_scores(4)
    check_kept_rates(rank)
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
    cutting = model.cutting(batch)
    lengths = cutting.lengths
    assert lengths.tolist() == [4, 6, 0, 1]
    asked, answers = [], []
    for rank in range(2):
        cut = head_and_tail(lengths, rank=rank, num_ranks=2)
        pieces = cutting.pieces(Chunks(starts=cut.starts, counts=cut.counts, are_last=(False, rank == 0)))
        assert pieces.extras[PIECE_HOMES].tolist() == [-1] * 4 + ([0, 1, 2, 3] if rank == 0 else [-1] * 4)
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
