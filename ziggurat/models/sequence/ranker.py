"""SequenceRanker: how will a user answer to each candidate, from what they did: HSTU and STU as rankers.

    question  [ context | e_1  e_2 … e_L | c_1  c_2 … c_k ]      one sequence for the k candidates of a question
                 history: item + action      candidate: item + "unknown action"
                                 layers over events (models/sequence/layers)
              a candidate sees context, history and itself; never another candidate
                                                  x_1  x_2 … x_k
    logits    z = MLP( LN(x_c) ⊙ item(v_c) )      v_c: the candidate's vector, one logit for each label

A sample is a candidate, and neighbours in a batch that have one question share a pass over its history
(`ranker_inputs.py`): k candidates cost L + k rows in place of k (L + 1). A score depends neither on the number nor the
order of the candidates, nor on who else is in the batch: HSTU divides by n = context + longest history + 1.

| published               | layers | positions  | time_buckets | actions | encoders | clock        | context          |
|-------------------------|--------|------------|--------------|---------|----------|--------------|------------------|
| HSTU's layers as ranker | hstu   | from_start | 0 (its bias) | added   | sums     | none         | none             |
| DLRMv3, DLRMv4          | stu    | from_end   | 2,048        | mapped  | networks | hour_and_day | of the request   |

The paper's ranker has two rows for an event, item and action in turn; that of DLRMv3 one, the sum of both, which halves
the length (Zhai et al., arXiv 2402.17152, section 2.2; `modules/dlrm_hstu.py` of meta-recsys/generative-recommenders).
Tasks are the labels: cross-entropy for binary ones, squared error for numbers, each the mean over its samples.

Cost of a question: that of the layers for C + L + k rows, and the two small networks for k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Annotated, ClassVar, Literal, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.arguments import check_arguments
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.events import HISTORY, HISTORY_LENGTHS, HISTORY_TIMES, PIECE_STARTS, of_history
from ziggurat.features.inputs import InputSpec
from ziggurat.features.items import Items
from ziggurat.features.jagged import offsets_of
from ziggurat.models.contract.growth import times
from ziggurat.models.contract.losses import LossSums
from ziggurat.models.contract.model import Embedded, Model, Outputs, Unpooled
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.sequence.cut import Cutting
from ziggurat.models.sequence.layers.hstu import PositionTimeBias
from ziggurat.models.sequence.layers.places import AskedAt, join_lists, moved_places
from ziggurat.models.sequence.layers.preset import LayerPreset, StacksLayers
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.models.sequence.next_item import Positions
from ziggurat.models.sequence.next_item_inputs import check_one_history, question_times
from ziggurat.models.sequence.next_item_pieces import places_and_lengths, positions_of, spans_of
from ziggurat.models.sequence.ranker_inputs import (
    check_candidate_inputs,
    longest_question,
    minute_buckets,
    moments_of_questions,
    questions_of,
)
from ziggurat.models.sequence.ranker_pieces import (
    BEGAN,
    CANDIDATES,
    FOLLOWING,
    NUM_CONTEXT,
    NUM_TARGETS,
    began_at,
    context_rows,
    cut_questions,
    questions_or_pieces,
    questions_to_cut,
)
from ziggurat.models.sequence.ranker_thinning import shortened_questions
from ziggurat.models.sequence.stochastic_length import NEVER_THINNED
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.attention.problem import AttentionMask
from ziggurat.ops.dropout import dropout
from ziggurat.ops.repeat import expand_lists
from ziggurat.ops.to_device import to_device
from ziggurat.precision.products import Linear
from ziggurat.typed import Count, CountOrNone, Dim, DimOrDefault, Fraction, PositiveFloat, Range, checked

MAX_LAYERS = 4  # of a model that grows; more makes it wider
_FIRST, _QUESTION, _TIMES, _ASKED = "first", "question", "times", "asked"
_CLOCK_DIM = 4  # cosine and sine of the hour, and of the day
_LONGEST = "longest"  # (longest sequence, 0) of a batch on a GPU: its shape is what the host knows


class ActionInput(StrEnum):
    """Ways in which actions enter an event."""

    ADDED = "added"  # tables of D columns, added to the item
    MAPPED = "mapped"  # narrow tables side by side, through a linear map


class EventEncoders(StrEnum):
    """Ways in which vectors of tables become an event, a token of context, and the candidate's part of the head."""

    SUMS = "sums"  # features of an item added; context plus a vector of its place
    NETWORKS = "networks"  # a small network for ids, for side information, for actions; a linear map a context feature


class Clock(StrEnum):
    """Choices of what the head is told of the moment of a question."""

    NONE = "none"
    HOUR_AND_DAY = "hour_and_day"  # hour of the day and day of the week (UTC), each as a point on a circle


@dataclass(frozen=True, kw_only=True)
@checked
class SequenceRankerConfig(StacksLayers):
    """Settings of the model `SequenceRanker`.

    Args:
        embedding_dim: D, columns of the tables and numbers of an event.
        layers: which published layer.
        num_layers: how many of them.
        num_heads: of each layer.
        dropout: share that is dropped in training in layers, and of events unless `input_dropout` says another one.
        input_dropout: share that is dropped in training of context, events and candidates before the layers; -1: of
            events and candidates alone, as `dropout`.
        encoders: how vectors of tables become events, context and the head's candidate.
        encoder_dim: hidden units of the networks of events; 0: D; unused with `sums`.
        clock: what the head is told of the moment; with `per_minute`.
        positions: what is added to an event for where it stands.
        bias: what HSTU adds to its scores; unused by other layers.
        asked: the time that an event of a history is asked at; for HSTU's bias by time.
        time_buckets: vectors for √minutes between an event and the question; 0: none.
        per_minute: units of the log's times in a minute, for `time_buckets` and `clock`.
        actions: how what was done enters an event.
        action_dim: columns of the tables of actions; unused with `added`.
        max_attention_length: events before itself that an event sees; 0: all.
        stochastic_length: α; histories of more than N^(α/2) events are mostly thinned to so many in training; 2: never.
        head_dim: hidden units of the networks of candidates and of logits; 0: D.
        task_weights: what the loss of each label counts, in their order; () for 1 each.
        embedding: tables: optimizer, kernel, starting weights.
    """

    reads: ClassVar[Reads] = Reads.CANDIDATES

    kind: Literal["sequence_ranker"] = "sequence_ranker"
    embedding_dim: Dim = 64
    layers: LayerPreset = LayerPreset.STU
    num_layers: Count = 2
    num_heads: Count = 2
    dropout: Fraction = 0.1
    input_dropout: Annotated[float, Range(-1, 1, open="most")] = -1.0
    encoders: EventEncoders = EventEncoders.SUMS
    encoder_dim: DimOrDefault = 0
    clock: Clock = Clock.NONE
    positions: Positions = Positions.FROM_END
    bias: PositionTimeBias = PositionTimeBias.POSITION_AND_TIME
    asked: AskedAt = AskedAt.NEXT
    time_buckets: CountOrNone = 2048
    per_minute: Count = 60
    actions: ActionInput = ActionInput.ADDED
    action_dim: Dim = 8
    max_attention_length: CountOrNone = 0
    stochastic_length: Annotated[float, Range(1, 2)] = 2.0
    head_dim: DimOrDefault = 0
    task_weights: tuple[PositiveFloat, ...] = ()
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        self.layer_settings(where=self.kind)

    @classmethod
    def smallest(cls) -> Self:
        """See `Grows`."""
        return cls(
            embedding_dim=16,
            layers=LayerPreset.HSTU,
            num_layers=1,
            num_heads=1,
            positions=Positions.FROM_START,
            time_buckets=0,
        )

    def deeper(self) -> Self | None:
        """Add a layer, up to 4."""
        return replace(self, num_layers=self.num_layers + 1) if self.num_layers < MAX_LAYERS else None

    def wider(self, factor: float) -> Self:
        """Widen events, in steps of as many numbers as there are heads, and so their tables: both have D columns."""
        head_dim = times(self.embedding_dim // self.num_heads, factor)
        return replace(self, embedding_dim=self.num_heads * head_dim)

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """D columns for every table, `action_dim` for those of mapped actions.

        Raises:
            ConfigError: a mapped action shares its table with an item or with context.
        """
        columns = {table.name: self.embedding_dim for table in inputs.tables}
        if self.actions is ActionInput.ADDED or inputs.items is None:
            return columns
        names = _action_lists(inputs, items=inputs.items)
        narrow = {spec.table for spec in inputs.jagged if spec.name in names}
        wide = {spec.table for spec in (*inputs.single, *inputs.jagged) if spec.name not in names}
        if both := sorted(narrow & wide):
            raise ConfigError(
                expected="tables of their own for actions that are mapped",
                found=f"{', '.join(both)}, which an item or context shares",
                where="model.actions = mapped",
                ways_out=("--model.actions added", "give the action a table of its own in the schema"),
            )
        return columns | dict.fromkeys(narrow, self.action_dim)

    def build(
        self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None
    ) -> SequenceRanker:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return SequenceRanker(self, inputs=inputs, embeddings=embeddings)

    def make_stack(self, *, num_context: int, max_length: int) -> SequenceStack:
        """The layers over context, histories of at most so many events, and candidates, which count as one event."""
        settings = self.layer_settings(where=self.kind)
        layers = [settings.make(max_length=num_context + max_length + 1) for _ in range(self.num_layers)]
        mask = AttentionMask(context=num_context, max_attention_length=self.max_attention_length)
        return SequenceStack(layers, mask=mask, asked=self.asked)


def _action_lists(inputs: InputSpec, *, items: Items) -> list[str]:
    """The lists of what was done: neither items nor what is known of them."""
    of_items = {HISTORY, *(of_history(name) for name in items.features)}
    return [spec.name for spec in inputs.sequences if spec.name not in of_items]


def _alone(embedded: Embedded) -> dict[str, Tensor]:
    """Return the entries of `further` if each sample is a question of its own, and all happened at one time."""
    samples_B = torch.arange(len(embedded.fields), device=embedded.fields.device)
    times_N = samples_B.new_zeros(len(embedded.sequences[HISTORY].values))
    return {_FIRST: samples_B, _QUESTION: samples_B, _TIMES: times_N, _ASKED: torch.zeros_like(samples_B)}


class SwishNorm(nn.Module):
    """The gated activation x ⊙ σ(LN(x)) of DLRMv3.

    Args:
        dim: numbers of x.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, inputs_BH: Float[Tensor, "B H"]) -> Float[Tensor, "B H"]:
        """The gated input."""
        return inputs_BH * self.norm(inputs_BH).sigmoid()


def small_network(num_inputs: int, *, hidden: int, dim: int) -> nn.Sequential:
    """Return the network of DLRMv3 that makes an event of vectors: LN(W₂ Swish(W₁ x + b₁) + b₂).

    Args:
        num_inputs: numbers of x.
        hidden: units between the two maps.
        dim: numbers of the result.
    """
    return nn.Sequential(Linear(num_inputs, hidden), SwishNorm(hidden), Linear(hidden, dim), nn.LayerNorm(dim))


def clock_of(asked_B: Int64[Tensor, "B"], *, per_minute: int) -> Float[Tensor, "B 4"]:
    """Return cosine and sine of the hour of the day, then of the day of the week, in whole hours and days (UTC).

    Args:
        asked_B: moments, counted from 1970.
        per_minute: units of them in a minute.
    """
    hours_B = torch.div(asked_B, 60 * per_minute, rounding_mode="floor")
    # In whole numbers up to here: FP32 would put a moment of today into another hour.
    shares = (hours_B.remainder(24) / 24, torch.div(hours_B, 24, rounding_mode="floor").remainder(7) / 7)
    angles = [share * (2 * math.pi) for share in shares]
    return torch.stack([each for angle in angles for each in (angle.cos(), angle.sin())], dim=1).float()


class SequenceRanker(Model):
    """Logits of candidates behind histories, one for each label.

    Attributes:
        stack: the layers.

    Raises:
        SchemaError: the data was not made of events with labels.
    """

    reads_slices = True
    slice_modules = ("stack (a history once for the candidates of a question)",)
    exploits_repeats = ("lookups", "layers over events")
    told_of_samples = ()

    @check_arguments
    def __init__(self, config: SequenceRankerConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        items = check_candidate_inputs(inputs)
        self._fields = [spec.name for spec in inputs.fields]
        self._item_fields = [name for name in self._fields if name in items.features]
        self._item_id = items.id
        self._context = [name for name in self._fields if name not in items.features]
        self._item_lists = [HISTORY, *(of_history(name) for name in self._item_fields if name != items.id)]
        self._actions = _action_lists(inputs, items=items)
        self.joined_lists = ((*self._item_lists, *self._actions, HISTORY_TIMES),)
        lists = [spec.name for spec in inputs.jagged]
        single = [spec.name for spec in inputs.single]
        self._list_places = [lists.index(name) for name in (*self._item_lists, *self._actions)]
        self._context_places = [single.index(name) for name in self._context]
        dim = config.embedding_dim
        length = next(spec.max_length for spec in inputs.jagged if spec.name == HISTORY)
        self._longest = length
        if config.task_weights and len(config.task_weights) != len(inputs.labels):
            raise ConfigError(
                expected=f"a weight for each of {len(inputs.labels)} labels",
                found=f"task_weights = {config.task_weights}",
                where="sequence_ranker settings",
                ways_out="task_weights = " + ", ".join("1.0" for _ in inputs.labels),
            )
        self.stack = config.make_stack(num_context=len(self._context), max_length=length)
        width = len(self._actions) * config.action_dim if config.actions is ActionInput.MAPPED else dim
        self.unknown_action = nn.Parameter(torch.empty(width)) if self._actions else None
        is_mapped = config.actions is ActionInput.MAPPED and bool(self._actions)
        has_networks = config.encoders is EventEncoders.NETWORKS
        sizes = {"hidden": config.encoder_dim or dim, "dim": dim}
        num_sides = len(self._item_fields) - 1
        self.action_map = Linear(width, dim) if is_mapped else nn.Identity()
        if has_networks and self._actions:
            self.action_map = small_network(width, **sizes)
        self.item_encoder = small_network(dim, **sizes) if has_networks else None
        self.side_encoder = small_network(num_sides * dim, **sizes) if has_networks and num_sides else None
        self.context_maps = nn.ModuleList(Linear(dim, dim, bias=False) for _ in (self._context if has_networks else ()))
        self.context_places = nn.Parameter(torch.empty(len(self._context), dim)) if self._context else None
        has_positions = config.positions is not Positions.NONE
        # One more than events: the place behind them, where all candidates stand.
        self.positions = nn.Embedding(length + 1, dim) if has_positions else None
        self.time_vectors = nn.Embedding(config.time_buckets, dim) if config.time_buckets else None
        hidden = config.head_dim or dim
        self.clock_map = Linear(dim + _CLOCK_DIM, dim) if config.clock is Clock.HOUR_AND_DAY else None
        self.norm = nn.LayerNorm(dim)
        # What describes an item stands side by side for networks, and is added up otherwise.
        width_of_items = len(self._item_fields) * dim if has_networks else dim
        self.item_network = small_network(width_of_items, hidden=hidden, dim=dim)
        self.head = nn.Sequential(Linear(dim, hidden), SwishNorm(hidden), Linear(hidden, len(inputs.labels)))
        for weight in (self.unknown_action, self.context_places):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)
        for vectors in (self.positions, self.time_vectors):
            if vectors is not None:
                nn.init.trunc_normal_(vectors.weight, std=0.02)
        if has_networks:
            self._start_as_published()

    def _start_as_published(self) -> None:
        """Draw the weights beside the layers as DLRMv3 and DLRMv4 do."""
        networks = (self.item_encoder, self.side_encoder, self.action_map, self.item_network, self.head, self.clock_map)
        for network in networks:
            for module in () if network is None else network.modules():
                if isinstance(module, Linear):
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.bias)
        for module in self.context_maps:
            assert isinstance(module, Linear)
            nn.init.xavier_normal_(module.weight)
        if self.context_places is not None:
            nn.init.zeros_(self.context_places)
        if self.unknown_action is not None:
            nn.init.normal_(self.unknown_action, std=0.1)
        for vectors in (self.positions, self.time_vectors):
            if vectors is not None:
                bound = vectors.num_embeddings**-0.5
                nn.init.uniform_(vectors.weight, -bound, bound)

    # ------------------------------------------------------------------------------------------------------ contract

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Return which samples belong to one question, when its events happened, and when it is asked."""
        check_one_history(batch, dict(zip(self.joined_lists[0], self._list_places, strict=False)))
        kept = batch.on_host or batch
        places = {"lists": self._list_places, "single": self._context_places}
        first_Q, question_B, of_pieces = questions_or_pieces(kept, **places)
        asked, offsets_Q1 = moments_of_questions(kept, first_Q, place=self._list_places[0])
        times_N, asked_Q = question_times(asked, offsets_Q1)
        told = {_FIRST: first_Q, _QUESTION: question_B, _TIMES: times_N, _ASKED: asked_Q}
        told |= places_and_lengths(asked) | of_pieces
        # In host memory all along: nothing to send, and sizes may be asked for.
        if kept is batch:
            return told
        longest = len(self._context) + longest_question(offsets_Q1, question_B)
        sent = {name: to_device(value, batch.dense.device) for name, value in told.items()}
        # Its values are not read: compiled networks see the number as a shape, which may differ from batch to batch.
        return sent | {_LONGEST: batch.dense.new_empty(longest, 0)}

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """One pass over each question, then the logits of its candidates; 0 for samples that carry events alone."""
        # Where nobody called `further`, each sample is a question of its own.
        named = embedded.named or _alone(embedded)
        dim = self.config.embedding_dim
        fields = dict(zip(self._fields, embedded.fields.split(dim, dim=1), strict=True))
        of_items = [fields[name].float() for name in self._item_fields]
        size = len(of_items[0])
        first_Q = named[_FIRST]
        question_M = named[_QUESTION]
        # Pieces have samples that carry events alone; candidates are the others.
        is_cut = PIECE_STARTS in named
        if is_cut:
            of_items = [each[named[CANDIDATES]] for each in of_items]
            question_M = question_M[named[CANDIDATES]]
        lists = [self._of_questions(embedded.sequences[name], named) for name in self._item_lists]
        history_ND = self._encoded([values.float() for values, _ in lists])
        candidates_MD = self._encoded(self._id_first(of_items))
        offsets_Q1 = lists[0][1]
        # As in `next_item`.
        scale = math.sqrt(dim)
        num_Q = torch.zeros_like(first_Q).index_add_(0, question_M, torch.ones_like(question_M))
        history_ND = history_ND * scale
        candidates_MD = candidates_MD * scale
        if self.unknown_action is not None:
            done_NA = self._done([self._of_questions(embedded.sequences[name], named)[0] for name in self._actions])
            # Networks are summed before the factor, as published; the mapped sum of tables has none.
            by = scale if self.item_encoder is not None else 1.0
            history_ND = history_ND + self.action_map(done_NA) * by
            candidates_MD = candidates_MD + self.action_map(self.unknown_action) * by
        named = named | {_QUESTION: question_M}
        history_ND, candidates_MD = self._placed(history_ND, candidates_MD, named, offsets_Q1)
        context_XD = history_ND.new_zeros(0, dim)
        if self.context_places is not None:
            tokens = [fields[name][first_Q].float() for name in self._context]
            if self.context_maps:
                tokens = [tokens_map(each) for tokens_map, each in zip(self.context_maps, tokens, strict=True)]
            context_QCD = torch.stack(tokens, dim=1)
            context_XD = context_rows(context_QCD * scale + self.context_places, named)
            if self.config.input_dropout >= 0:
                context_XD = dropout(context_XD, p=self.config.input_dropout, training=self.training)
        parts = (context_XD, history_ND, candidates_MD)
        states_MD = self._candidate_states(parts, named, offsets_Q1, num_Q)
        if self.clock_map is not None:
            moments_M4 = clock_of(named[_ASKED][question_M], per_minute=self.config.per_minute)
            states_MD = self.clock_map(torch.cat([states_MD, moments_M4.to(states_MD.dtype)], dim=1))
        states_MD = self.norm(states_MD)
        read = torch.cat(of_items, dim=1) if self.item_encoder is not None else reduce(torch.add, of_items)
        logits_ML = self.head(states_MD * self.item_network(read)).float()
        if is_cut:
            # Back to a row for each sample; those that carry events alone get 0.
            logits_ML = logits_ML.new_zeros(size, logits_ML.shape[1]).index_copy(0, named[CANDIDATES], logits_ML)
        return self.as_outputs(logits_ML)

    def shortened(self, batch: Batch, *, draw: StepDraw) -> Batch:
        """Stochastic length: long histories thinned at random, for all candidates of a question alike."""
        alpha = self.config.stochastic_length
        if alpha >= NEVER_THINNED:
            return batch
        questions = questions_of(batch, lists=self._list_places, single=self._context_places)
        how = {"draw": draw, "alpha": alpha, "longest": self._longest}
        return shortened_questions(batch, lists=self._list_places, questions=questions, **how)

    def cutting(self, batch: Batch) -> Cutting:
        """The questions of a batch, and how they are cut; see `ranker_pieces.py`."""
        first_Q, _ = questions_of(batch, lists=self._list_places, single=self._context_places)
        questions = questions_to_cut(batch, self.inputs, first_Q=first_Q, num_context=len(self._context))
        return cut_questions(questions, self.inputs)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """The labels' losses, each times the weight of its task."""
        sums = super().loss(outputs, batch)
        weights = self.config.task_weights
        if not weights:
            return sums
        # The denominators stay: a weight scales a task's loss, not the number of its samples.
        totals = [total * weight for total, weight in zip(sums.total.unbind(), weights, strict=True)]
        return replace(sums, total=torch.stack(totals))

    # ------------------------------------------------------------------------------------------------------- details

    def _of_questions(self, lists: Unpooled, named: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The lists of the questions' first samples."""
        first_Q = named[_FIRST]
        # On a GPU the host knows it by the shape of the times, one for each event of a question.
        num_rows = len(named[_TIMES]) if _LONGEST in named else None
        if lists.inverse is not None:
            return expand_lists(lists.values, lists.offsets, lists.inverse[first_Q], num_rows=num_rows)
        if len(first_Q) == len(lists.offsets) - 1:
            return lists.values, lists.offsets
        return expand_lists(lists.values, lists.offsets, first_Q, num_rows=num_rows)

    def _id_first(self, of_items: list[Tensor]) -> list[Tensor]:
        """Put the vectors of the item's id before those of side information, as lists have them."""
        at = self._item_fields.index(self._item_id)
        return [of_items[at], *of_items[:at], *of_items[at + 1 :]]

    def _encoded(self, vectors: list[Float[Tensor, "N D"]]) -> Float[Tensor, "N D"]:
        """Make one vector of those of an item's id and its side information, the id's first."""
        if self.item_encoder is None:
            return reduce(torch.add, vectors)
        encoded_ND = self.item_encoder(vectors[0]).float()
        if self.side_encoder is None:
            return encoded_ND
        return encoded_ND + self.side_encoder(torch.cat(vectors[1:], dim=1)).float()

    def _done(self, actions: list[Float[Tensor, "N A"]]) -> Float[Tensor, "N A"]:
        """Combine the vectors of all actions of each event."""
        if self.config.actions is ActionInput.MAPPED:
            return torch.cat(actions, dim=1).float()
        return reduce(torch.add, actions).float()

    def _placed(
        self, history_ND: Tensor, candidates_BD: Tensor, named: dict[str, Tensor], offsets_Q1: Int64[Tensor, "Q+1"]
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "B D"]]:
        """Events and candidates with their positions and times; all candidates stand behind the history."""
        lengths_Q = offsets_Q1.diff()
        total = len(history_ND)
        if self.positions is not None:
            from_end = self.config.positions is Positions.FROM_END
            # From the end, place 0 is that of the candidates, so events begin at 1.
            places_N = positions_of(offsets_Q1, named, total=total, from_start=not from_end) + int(from_end)
            behind_Q = torch.zeros_like(lengths_Q) if from_end else named.get(HISTORY_LENGTHS, lengths_Q)
            history_ND = history_ND + self.positions(places_N)
            candidates_BD = candidates_BD + self.positions(behind_Q)[named[_QUESTION]]
        if self.time_vectors is not None:
            asked_N = named[_ASKED].repeat_interleave(lengths_Q, output_size=total)
            sizes = {"per_minute": self.config.per_minute, "num_buckets": self.config.time_buckets}
            history_ND = history_ND + self.time_vectors(minute_buckets(named[_TIMES], asked_N, **sizes))
            # A candidate is asked about now: the bucket of no time.
            candidates_BD = candidates_BD + self.time_vectors.weight[0]
        p = self.config.dropout if self.config.input_dropout < 0 else self.config.input_dropout
        training = self.training
        return dropout(history_ND, p=p, training=training), dropout(candidates_BD, p=p, training=training)

    def _candidate_states(
        self,
        parts: tuple[Tensor, Tensor, Tensor],
        named: dict[str, Tensor],
        offsets_Q1: Int64[Tensor, "Q+1"],
        num_Q: Int64[Tensor, "Q"],
    ) -> Float[Tensor, "B D"]:
        """Return the layers' output for candidates; context, history and candidates of a question form one sequence."""
        context_XD, history_ND, candidates_BD = parts
        counts_Q = named.get(NUM_CONTEXT, torch.full_like(num_Q, len(self._context)))
        of_context = offsets_of(counts_Q)
        of_candidates = offsets_of(num_Q)
        known_ND, known_Q1 = join_lists(context_XD, history_ND, offsets=(of_context, offsets_Q1))
        events_ND, joined_Q1 = join_lists(known_ND, candidates_BD, offsets=(known_Q1, of_candidates))
        began_Q = named[BEGAN] if BEGAN in named else began_at(named[_TIMES], named[_ASKED], offsets_Q1)
        began_N = began_Q.repeat_interleave(counts_Q, output_size=len(context_XD))
        times_N, _ = join_lists(began_N, named[_TIMES], offsets=(of_context, offsets_Q1))
        asked_B = named[_ASKED].repeat_interleave(num_Q, output_size=len(candidates_BD))
        times_N, _ = join_lists(times_N, asked_B, offsets=(known_Q1, of_candidates))
        asking = {"num_targets": named.get(NUM_TARGETS, num_Q), "last": named.get(FOLLOWING)}
        longest = len(named[_LONGEST]) if _LONGEST in named else None
        places = self.stack.places_of(joined_Q1, times=times_N, spans=spans_of(named), longest=longest, **asking)
        states_ND = self.stack(events_ND, places=places)
        # Candidates of a question stand behind its context and history.
        behind_Q = joined_Q1[:-1] + known_Q1.diff()
        return states_ND[moved_places(of_candidates, behind_Q, total=len(candidates_BD))]
