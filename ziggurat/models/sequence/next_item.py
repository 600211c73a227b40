"""NextItem: what will a user do next, from what they did: SASRec, gSASRec, eSASRec, HSTU, STU as one model.

    history   e_1   e_2  …  e_L          event: item (and its side information), action, position
              │     │       │
              └─ layers over events, causal (models/sequence/layers) ─┐
              x_1   x_2  …  x_L                                       │
    answer    v_2   v_3  …  v_{L+1}      x_i is to find v_{i+1} among all items: by inner product, over τ

One pass over a history answers all its questions: an event sees itself and what was before, nothing later. In training
each is one (`next_item_loss.py`); an evaluation asks the last one alone. Items have one vector, as event and as answer
(both of length 1 with `length = unit`), which needs nothing but the item, so all items are ranked by their vectors as
those of `two_tower` are.

With `asked = next` a question knows when its answer happens, as in the research code of HSTU; the biases by time then
see how long ago each event is. With `own` it knows the time of its latest event alone.

| published          | layers          | loss    | negatives | length |
|--------------------|-----------------|---------|-----------|--------|
| SASRec             | sasrec          | gbce, gbce_t = 0 | uniform, 1 | free |
| gSASRec            | sasrec          | gbce    | uniform, 256 | free |
| eSASRec            | ligr            | softmax | uniform   | free   |
| HSTU               | hstu            | softmax | uniform   | unit   |

Item side information and actions are looked up in their own tables and added. What is known of each item is kept with
the model (`item_sides`, from the training events), so that drawn items have theirs.

Cost an event: that of the layers, and 2·C·D FLOPs in training for C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.arguments import check_arguments
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.events import EARLIER, HISTORY, HISTORY_TIMES, of_history
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.models.contract.losses import LossSums, labelled_weights
from ziggurat.models.contract.model import Embedded, Model, Outputs, Unpooled
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.retrieval.encoders import VectorLength
from ziggurat.models.sequence.cut import Cutting
from ziggurat.models.sequence.layers.hstu import PositionTimeBias
from ziggurat.models.sequence.layers.places import AskedAt
from ziggurat.models.sequence.layers.preset import LayerPreset, StacksLayers
from ziggurat.models.sequence.layers.softmax_block import SoftmaxBlock
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.models.sequence.next_item_inputs import (
    answers_of,
    check_event_inputs,
    check_one_history,
    last_of_each,
    question_times,
)
from ziggurat.models.sequence.next_item_loss import (
    Candidates,
    NextItemLoss,
    NextItemNegatives,
    draw_candidates,
    draws_of,
    gbce_calibration,
    log_expected,
    next_item_losses,
)
from ziggurat.models.sequence.next_item_pieces import (
    cut_histories,
    places_and_lengths,
    positions_of,
    shortened_histories,
    spans_of,
)
from ziggurat.models.sequence.stochastic_length import NEVER_THINNED, thinned_rows
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.attention.problem import AttentionMask
from ziggurat.ops.dropout import dropout
from ziggurat.ops.unit_length import unit_length
from ziggurat.typed import Count, CountOrNone, Dim, Fraction, PositiveFloat, Range, checked

_TIMES, _ASKED, _ACTIONS = "times", "asked", "actions"
_CANDIDATES, _ROWS = "candidates", "candidate_rows"


class Positions(StrEnum):
    """Choices of what is added to an event for its position."""

    NONE = "none"
    FROM_START = "from_start"  # a learned vector for the first event of a history, the second, …
    FROM_END = "from_end"  # counted back from the last one


@dataclass(frozen=True, kw_only=True)
@checked
class NextItemConfig(StacksLayers):
    """Settings of the model `NextItem`.

    Args:
        embedding_dim: D, columns of each table and numbers of an event.
        layers: which published layer.
        num_layers: how many of them.
        num_heads: of each layer.
        dropout: share that is dropped in training, of events and in layers.
        item_dropout: share that is dropped in training of the vectors of items, as events and as answers.
        positions: what is added to an event for where it stands.
        bias: what HSTU adds to its scores; unused by other layers.
        asked: the time that a question knows; for HSTU's bias by time.
        max_attention_length: events before itself that an event sees; 0: all.
        stochastic_length: α; histories of more than N^(α/2) events are mostly thinned to so many in training; 2: never.
        loss: softmax or gbce; see `next_item_loss.py`.
        negatives: which items an answer is told apart from.
        num_negatives: how many; unused with `all`.
        questions_per_draw: questions in a row that share one draw of negatives; 0: all of a batch; unused with `all`.
        gbce_t: 0 for plain BCE, 1 for scores that are fully calibrated.
        length: of vectors of questions and answers: unit or free.
        temperature: what scores are divided by. With free vectors 1 is usual.
        embedding: tables: optimizer, kernel, starting weights.
    """

    finds_items: ClassVar[bool] = True

    reads: ClassVar[Reads] = Reads.NEXT_ITEMS

    kind: Literal["next_item"] = "next_item"
    embedding_dim: Dim = 64
    layers: LayerPreset = LayerPreset.HSTU
    num_layers: Count = 2
    num_heads: Count = 1
    dropout: Fraction = 0.2
    item_dropout: Fraction = 0.0
    positions: Positions = Positions.FROM_START
    bias: PositionTimeBias = PositionTimeBias.POSITION_AND_TIME
    asked: AskedAt = AskedAt.NEXT
    max_attention_length: CountOrNone = 0
    stochastic_length: Annotated[float, Range(1, 2)] = 2.0
    loss: NextItemLoss = NextItemLoss.SOFTMAX
    negatives: NextItemNegatives = NextItemNegatives.UNIFORM
    num_negatives: Count = 128
    questions_per_draw: CountOrNone = 128
    gbce_t: Annotated[float, Range(0, 1)] = 0.75
    length: VectorLength = VectorLength.UNIT
    temperature: PositiveFloat = 0.05
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        self.layer_settings(where=self.kind)
        if not math.isfinite(self.temperature):
            raise ConfigError(
                expected="a finite temperature",
                found=str(self.temperature),
                where="next_item settings",
                ways_out="temperature = 0.05",
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """D columns for every table: the vectors of an event are added."""
        return {table.name: self.embedding_dim for table in inputs.tables}

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> NextItem:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return NextItem(self, inputs=inputs, embeddings=embeddings)


class NextItem(Model):
    """A vector for each moment of a history, near those of the items that come next.

    Attributes:
        stack: the layers.
        item_counts: (rows of the item's table,) training events with this item; zeros until `observe`.
        item_sides: (sides, rows of the item's table) what is known of each item; zeros until `observe`.

    Raises:
        SchemaError: the data was not made of events ([events] in the schema).
    """

    observes = True
    finds_items = True
    looks_up_drawn_rows = True
    told_of_samples = ("user",)

    @check_arguments
    def __init__(self, config: NextItemConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        items = check_event_inputs(inputs)
        names = [spec.name for spec in inputs.single]
        self._item = names.index(items.id)
        self._sides = [index for index, name in enumerate(names) if name in items.features and name != items.id]
        self._side_lists = [of_history(names[index]) for index in self._sides]
        others = (HISTORY, EARLIER, *self._side_lists)
        self._actions = [spec.name for spec in inputs.sequences if spec.name not in others]
        self._lists = {spec.name: at for at, spec in enumerate(inputs.jagged) if spec.name != EARLIER}
        self.joined_lists = ((HISTORY, *self._side_lists, *self._actions, HISTORY_TIMES),)
        history = next(spec for spec in inputs.jagged if spec.name == HISTORY)
        self.max_length = history.max_length
        self._table = history.table
        dim = config.embedding_dim
        length = self.max_length
        self.positions = nn.Embedding(length, dim) if config.positions is not Positions.NONE else None
        self.stack = SequenceStack(
            [config.layer_settings(where=config.kind).make(max_length=length) for _ in range(config.num_layers)],
            mask=AttentionMask(max_attention_length=config.max_attention_length),
            asked=config.asked,
        )
        has_norms_before = any(isinstance(layer, SoftmaxBlock) for layer in self.stack.layers)
        # Blocks that norm before their sublayers leave the sum of the last one unnormed.
        self.norm = nn.LayerNorm(dim, eps=1e-8) if has_norms_before else nn.Identity()
        if self.positions is not None:
            nn.init.trunc_normal_(self.positions.weight, std=0.02)
        num_rows = inputs.table(self._table).num_rows
        self.register_buffer("item_counts", torch.zeros(num_rows, dtype=torch.int64))
        self.register_buffer("item_sides", torch.zeros(len(self._sides), num_rows, dtype=torch.int64))
        self.item_counts: Tensor
        self.item_sides: Tensor

    @property
    def has_observed(self) -> bool:
        """True once events were counted."""
        return bool(self.item_counts.any())

    def observe(self, batches: Iterable[Batch]) -> None:
        """Count the items of the training events, and keep what is known of each of them: of its last event."""
        counts = torch.zeros_like(self.item_counts)
        sides = torch.zeros_like(self.item_sides)
        for batch in batches:
            batch = batch.expanded()
            rows = torch.cat([self.lists_of(batch, HISTORY)[0], batch.single[self._item]]).to(counts.device)
            counts += torch.bincount(rows, minlength=len(counts))
            for number, index in enumerate(self._sides):
                listed, _ = self.lists_of(batch, of_history(self.inputs.single[index].name))
                sides[number, rows] = torch.cat([listed, batch.single[index]]).to(sides.device)
        self.item_counts.copy_(counts)
        self.item_sides.copy_(sides)

    # ------------------------------------------------------------------------------------------------------ contract

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Return times of events and of questions for what comes next; with gradients on also candidates of a loss."""
        check_one_history(batch, self._lists)
        on_host = None if batch.on_host is None else self.lists_of(batch.on_host, HISTORY)[1]
        times, asked = question_times(batch, self.lists_of(batch, HISTORY)[1], on_host=on_host)
        named: dict[str, Tensor] = {_TIMES: times, _ASKED: asked, **places_and_lengths(batch)}
        if not torch.is_grad_enabled():
            return named
        # Gradients are on: a loss will be asked for, and needs wrong answers beside the right ones.
        rows_C = self._draw(batch)
        if batch.batch_size:
            return named | {_CANDIDATES: self._items_at(rows_C), _ROWS: rows_C}
        # Nothing is asked, so nothing is looked up: where a run is resumed, tables hold nothing yet.
        nothing_CD = F.pad(self._items_at(rows_C[:0]), (0, 0, 0, len(rows_C)))
        return named | {_CANDIDATES: nothing_CD, _ROWS: rows_C}

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The logit is the score of what came next; `named` has what the loss reads."""
        history = embedded.sequences[HISTORY].expanded()
        offsets_B1 = history.offsets
        dim = self.config.embedding_dim
        listed = [embedded.sequences[name].expanded().values for name in (HISTORY, *self._side_lists)]
        items_ND = reduce(torch.add, listed).float()
        target_BD = reduce(torch.add, embedded.fields.split(dim, dim=1)).float()
        states_ND = self._sized(self._states(self._thinned(items_ND), embedded, history))
        user_BD = last_of_each(states_ND, offsets_B1)
        item_BD = self._sized(target_BD)
        scale_1 = item_BD.new_full((1,), 1.0 / self.config.temperature)
        named = {"user": user_BD, "item": item_BD, "scale": scale_1}
        if _ROWS in embedded.named:
            answers_ND = self._sized(self._thinned(answers_of(items_ND, target_BD, offsets_B1)))
            named |= {"states": states_ND, "answers": answers_ND, _ROWS: embedded.named[_ROWS]}
            named |= {_CANDIDATES: self._sized(self._thinned(embedded.named[_CANDIDATES].float()))}
        return Outputs(logits=(user_BD * item_BD).sum(dim=1, keepdim=True) * scale_1, named=named)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """The sum over all questions of the histories, each with the weight of its sample."""
        assert _CANDIDATES in outputs.named, "a loss is asked for where gradients are on"
        batch = batch.expanded()
        named = outputs.named
        config = self.config
        rows_N, offsets_B1 = self.lists_of(batch, HISTORY)
        answers_N = answers_of(rows_N, batch.single[self._item], offsets_B1)
        num_draws = self._num_draws(len(rows_N))
        # Draws are equally large, one after the other.
        size = len(named[_ROWS]) // num_draws
        candidates = Candidates(
            vectors=named[_CANDIDATES],
            rows=named[_ROWS],
            num_draws=num_draws,
            log_q=log_expected(self.item_counts, num_candidates=size, negatives=config.negatives),
            calibration=gbce_calibration(
                num_candidates=size, num_items=len(self.item_counts) - NUM_RESERVED_ROWS, t=config.gbce_t
            ),
        )
        losses_N = next_item_losses(
            named["states"], named["answers"], answers_N, candidates=candidates, scale=named["scale"], loss=config.loss
        )
        lengths_B = offsets_B1.diff()
        weights_B1 = self._weights(batch)
        # An answer that training knows no item for is no question: nothing is to be found.
        is_known_N = (answers_N >= NUM_RESERVED_ROWS).float()
        weights_N = weights_B1[:, 0].repeat_interleave(lengths_B, output_size=len(rows_N)) * is_known_N
        # Not a product alone: 0 · ∞ would be NaN.
        total = torch.where(weights_N > 0, losses_N, 0.0) * weights_N
        return LossSums(total=total.sum().reshape(1), weight=weights_N.sum().reshape(1))

    def loss_weight(self, batch: Batch) -> Float[Tensor, "L"]:
        """The weight of all questions of the histories."""
        batch = batch.expanded()
        rows_N, offsets_B1 = self.lists_of(batch, HISTORY)
        answers_N = answers_of(rows_N, batch.single[self._item], offsets_B1)
        weights_N = self._weights(batch)[:, 0].repeat_interleave(offsets_B1.diff(), output_size=len(rows_N))
        return (weights_N * (answers_N >= NUM_RESERVED_ROWS)).sum().reshape(1)

    def shortened(self, batch: Batch, *, draw: StepDraw) -> Batch:
        """Stochastic length: long histories thinned at random, so that events ask for the next one that remains."""
        alpha = self.config.stochastic_length
        if alpha >= NEVER_THINNED:
            return batch
        batch = batch.expanded()
        offsets_B1 = self.lists_of(batch, HISTORY)[1]
        kept_N = thinned_rows(offsets_B1, batch.row_ids, draw=draw, alpha=alpha, longest=self.max_length)
        return shortened_histories(batch, self.inputs, kept_N=kept_N)

    def cutting(self, batch: Batch) -> Cutting:
        """The histories of a batch, and how they are cut; see `next_item_pieces.py`."""
        return cut_histories(batch, self.inputs)

    # --------------------------------------------------------------------------------------------- items and users

    def user_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """The vectors of the questions of a batch, FP32: what each history leads to; zeros for an empty one."""
        return self.outputs_of(batch).named["user"]

    def item_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """The vectors of the items of a batch, FP32, each with what the training events say of it."""
        return self.vectors_of_items(batch.single[self._item])

    def vectors_of_items(self, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """The vectors of items by their rows in the item's table."""
        return self._sized(self._items_at(rows_N))

    # ----------------------------------------------------------------------------------------------------- details

    def _states(self, items_ND: Float[Tensor, "N D"], embedded: Embedded, history: Unpooled) -> Float[Tensor, "N D"]:
        """x_i of every event."""
        total = len(items_ND)
        named = embedded.named
        offsets_B1 = history.offsets
        # As in SASRec's code and the original transformer.
        events_ND = items_ND * math.sqrt(self.config.embedding_dim)
        for name in self._actions:
            events_ND = events_ND + embedded.sequences[name].expanded().values
        if self.positions is not None:
            from_start = self.config.positions is Positions.FROM_START
            places_N = positions_of(offsets_B1, named, total=total, from_start=from_start)
            events_ND = events_ND + self.positions(places_N)
        events_ND = dropout(events_ND, p=self.config.dropout, training=self.training)
        known = {"times": named.get(_TIMES, offsets_B1.new_zeros(total)), "last": named.get(_ASKED)}
        places = self.stack.places_of(offsets_B1, spans=spans_of(named), longest=history.longest, **known)
        return self.norm(self.stack(events_ND, places=places))

    def _thinned(self, items_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """Drop numbers of items' vectors in training: each place of an item loses its own."""
        return dropout(items_ND, p=self.config.item_dropout, training=self.training)

    def _sized(self, vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        vectors = vectors.float()
        return unit_length(vectors, eps=1e-6) if self.config.length is VectorLength.UNIT else vectors

    def _items_at(self, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """Look up the rows of items: their own row, and those of what is known of them."""
        found_ND = self._vectors_of(self._table, rows_N)
        for number, index in enumerate(self._sides):
            found_ND = found_ND + self._vectors_of(self.inputs.single[index].table, self.item_sides[number, rows_N])
        return found_ND

    def _vectors_of(self, table: str, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        # As in `Model.unpooled`: lookups are not rounded by autocast.
        with torch.autocast(rows_N.device.type, enabled=False):
            return self.embeddings.vectors(table, rows_N)

    def lists_of(self, batch: Batch, name: str) -> tuple[Int64[Tensor, "N"], Int64[Tensor, "B+1"]]:
        """Rows of a list feature, and where each sample's begin."""
        position = [spec.name for spec in self.inputs.jagged].index(name)
        lists, _ = batch.lists(position)
        # An empty batch has one offset for all features: a slice of it is none's.
        return (lists.values, lists.offsets) if batch.batch_size else (lists.values[:0], lists.offsets[:1] * 0)

    def _draw(self, batch: Batch) -> Int64[Tensor, "C"]:
        """Rows of the candidates."""
        history_N = self.lists_of(batch, HISTORY)[0]
        return draw_candidates(
            torch.cat([history_N, batch.single[self._item]]),
            num_rows=len(self.item_counts),
            negatives=self.config.negatives,
            num_negatives=self.config.num_negatives,
            num_draws=self._num_draws(len(history_N)),
        )

    def _num_draws(self, num_questions: int) -> int:
        config = self.config
        return draws_of(num_questions, negatives=config.negatives, questions_per_draw=config.questions_per_draw)

    def _weights(self, batch: Batch) -> Float[Tensor, "B 1"]:
        # A label that is missing counts nothing.
        known_B1 = torch.where(batch.labels.isnan(), 0.0, batch.labels).float()
        return labelled_weights(batch.labels, batch.weights, inputs=self.inputs) * known_B1
