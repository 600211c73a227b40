"""BST: a transformer over history and candidate, each with its position (Chen et al., arXiv 1905.06874).

    e_t = [items of event t, p_t]      e_* = [the candidate, p_*]         p: a vector for how long ago, or for the order
    x   = Block(e_1 … e_n, e_*)        LN(y + F(y)) of y = LN(e + MH(e)), every row sees every other; F: leaky ReLU
    x₀  = [fields, numbers, vectors, out]   ──►   MLP   ──►   logits

    out   all      x_*, x_n, …, x_1 side by side, zeros where a history is shorter than n
          target   x_*          mean, sum   of all rows, the candidate's too

n is the length that the schema gives the history, never that of a batch. By `time`, p is that of the bucket
⌊ln(max(1, t_* − t_t)) / 0.301⌋: the paper embeds t_* − t_t and leaves buckets open. p stands beside the items, as in
the paper, and is not added to them.

The width of F is left open by the paper; four times an event is the original transformer's. Dropout stands behind
attention and inside and behind F, not on weights of attention.

Cost of a history of T events, E numbers each, forward: 24·E² for every row, and 4·E·(T + 1)² FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.contract.model import Embedded, Outputs, Unpooled
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.sequence.layers.places import SequencePlaces
from ziggurat.models.sequence.layers.softmax_block import FeedForward, SoftmaxBlock, encoder
from ziggurat.models.sequence.rankers.history import (
    AGES,
    EventPosition,
    History,
    HistoryInput,
    HistoryRankerConfig,
    PositionVectors,
    append_rows,
    from_latest,
    longest_with,
    offsets_with,
)
from ziggurat.ops.attention.problem import AttentionMask, JaggedLayout
from ziggurat.typed import Count, CountOrNone, Dim, DimOrDefault, Fraction, checked


class BSTOutput(StrEnum):
    """Choice of the transformer's rows that enter the MLP."""

    ALL = "all"  # side by side, the candidate first, then the latest event: as published
    TARGET = "target"  # the candidate's
    MEAN = "mean"
    SUM = "sum"


class BSTMask(StrEnum):
    """Choice of the events that an event sees."""

    ALL = "all"  # as published
    CAUSAL = "causal"  # those before it; the candidate sees all


@dataclass(frozen=True, kw_only=True)
@checked
class BSTConfig(HistoryRankerConfig):
    """Settings of the model `BST`.

    Args:
        embedding_dim: D, columns of each table.
        history: which lists are the history.
        positions: what an event is told of where it stands.
        position_dim: numbers of a position's vector; 0: D.
        age_buckets: of positions by time; the last one stands for everything longer.
        num_layers: transformer blocks.
        num_heads: of each; they share an event's numbers, its position's too.
        feed_forward_dim: hidden units of each block's network; 0: four times an event.
        dropout: share that is dropped in training, inside the blocks.
        mask: which events an event sees.
        output: what of the transformer's rows enters the MLP.
        deep: hidden layers of the MLP.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one MLP for all labels, or one each.
        init: starting weights of the MLPs; transformer blocks start as those of the original one.
        embedding: tables: optimizer, kernel, starting weights.
    """

    reads: ClassVar[Reads] = Reads.A_HISTORY

    kind: Literal["bst"] = "bst"
    embedding_dim: Dim = 16
    history: HistoryInput = field(default_factory=HistoryInput)
    positions: EventPosition = EventPosition.AUTO
    position_dim: DimOrDefault = 0
    age_buckets: Count = 64
    num_layers: Count = 1
    num_heads: Count = 8
    feed_forward_dim: CountOrNone = 0
    dropout: Fraction = 0.0
    mask: BSTMask = BSTMask.ALL
    output: BSTOutput = BSTOutput.ALL
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(1024, 512, 256)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def model_class(self) -> type[BST]:
        """The class of the model."""
        return BST


class BST(RankingModel):
    """An MLP over embeddings and what a transformer makes of history and candidate."""

    reads_sequences = True

    def __init__(self, config: BSTConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self.history = History(config.history, inputs=inputs, columns=config.table_columns(inputs), model="BST")
        self.joined_lists = (self.history.joined,)
        width = self.history.event_dim
        self.positions = None
        if config.positions is not EventPosition.NONE:
            dim = config.position_dim or config.embedding_dim
            self.positions = PositionVectors(
                config.positions, history=self.history, dim=dim, num_buckets=config.age_buckets
            )
            width += dim
        block = encoder(
            dim=width,
            num_heads=config.num_heads,
            hidden_dim=config.feed_forward_dim or 4 * width,
            feed_forward=FeedForward.LEAKY_RELU,
            dropout=config.dropout,
        )
        self.layers = nn.ModuleList(SoftmaxBlock(block) for _ in range(config.num_layers))
        # With as much context as a history has events, every row of it sees all of them.
        self.mask = AttentionMask(context=self.history.max_length + 1 if config.mask is BSTMask.ALL else 0)
        num_rows = self.history.max_length + 1 if config.output is BSTOutput.ALL else 1
        self.flat = FlatInputs(
            inputs,
            field_dims=(*self.field_dims, num_rows * width),
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        self.heads = Heads(
            self.flat.output_dim, config=config.deep, num_labels=len(inputs.labels), sharing=config.heads
        )
        initialise([self.flat, self.heads], config.init)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """The ages of events, where the history has times."""
        return self.history.further(batch)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The transformer, then the MLP on x₀."""
        fields_BX = torch.cat([embedded.fields, self.encoded(embedded)], dim=1)
        return self.as_outputs(self.interact(embedded.dense, fields_BX, self.vectors_of(embedded)))

    def encoded(self, embedded: Embedded) -> Float[Tensor, "B O"]:
        """Return the transformer's encoding of history and candidate."""
        events = self.history.events(embedded)
        candidate_BE = self.history.candidate(embedded)
        values_NE = events.values
        if self.positions is not None:
            values_NE = torch.cat([values_NE, self.positions(events, embedded.named.get(AGES))], dim=1)
            candidate_BE = torch.cat([candidate_BE, self.positions.of_candidate(candidate_BE.shape[0])], dim=1)
        joined_ME, places_N, places_B1 = append_rows(values_NE, candidate_BE.unsqueeze(1), lists=events)
        longest = longest_with(events, num_rows=1)
        layout = JaggedLayout(offsets=offsets_with(events, num_rows=1), mask=self.mask, longest=longest)
        for layer in self.layers:
            joined_ME = layer(joined_ME, places=SequencePlaces(layout=layout))
        candidate_BE = joined_ME[places_B1.squeeze(1)]
        if self.config.output is BSTOutput.TARGET:
            return candidate_BE
        return self._joined(candidate_BE, joined_ME[places_N], events)

    def _joined(
        self, candidate_BE: Float[Tensor, "B E"], events_NE: Float[Tensor, "N E"], events: Unpooled
    ) -> Float[Tensor, "B O"]:
        """All rows side by side, or their sum or mean."""
        if self.config.output is not BSTOutput.ALL:
            sums_BE = candidate_BE.index_add(0, events.samples, events_NE)
            lengths_B1 = events.offsets.diff().unsqueeze(1)
            return sums_BE if self.config.output is BSTOutput.SUM else sums_BE / (lengths_B1 + 1)
        length = self.history.max_length
        # By place counted from the latest event: slots of shorter histories stay zeros at the end.
        slots_N = events.samples * length + from_latest(events)
        rows = events_NE.new_zeros(candidate_BE.shape[0] * length, events_NE.shape[1])
        rows = rows.index_copy(0, slots_N, events_NE).view(candidate_BE.shape[0], length * events_NE.shape[1])
        return torch.cat([candidate_BE, rows], dim=1)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The MLP on x₀."""
        return self.heads(self.flat(dense_BN, fields_BX, vectors))
