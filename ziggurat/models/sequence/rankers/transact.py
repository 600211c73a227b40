"""TransAct: a transformer over what a user just did, each action beside the candidate (Xia et al., arXiv 2306.00248).

    u_t = [action_t, items of event t, q]        q: the candidate, the same beside every event (early fusion)
    z   = Block(Block(u_1 … u_n))                LN(y + F(y)) of y = LN(u + MH(u)), no positions; F: ReLU, 32 units
    out = [W max_t z_t, z_n, z_{n-1}, …]         the K latest rows, zeros where a history is shorter than K
    x₀  = [fields, numbers, vectors, out]   ──►   cross layers of DCNv2   ──►   MLP   ──►   logits

Random time window: in each training step T is drawn from 0 … `time_window`, and events younger than T are hidden: other
rows do not see them, and the output has none of them, as if the step had been asked T earlier. So the model does not
lean on the last minutes alone, and what it recommends stays diverse. Evaluation sees all events. The released code
leaves the rows of hidden events in the output and never hides the latest one; FuxiCTR puts zeros in their place.

The paper reads the last 100 actions, hides up to 24 hours, and takes K = 10; its released code has two layers of two
heads and 32 hidden units. `time_window` counts in the unit of the times, which only the data knows: 86400 for seconds.
How many cross layers follow is not published.

Cost of a history of T events, E numbers each (the candidate's among them), forward: T·(8·E² + 4·E·F) and 4·E·T² FLOPs
for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.cross import CrossNet
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
    History,
    HistoryInput,
    HistoryRankerConfig,
    from_latest,
    longest_with,
)
from ziggurat.ops.attention.problem import AttentionMask, JaggedLayout
from ziggurat.ops.to_device import to_device
from ziggurat.precision.products import Linear
from ziggurat.typed import Count, CountOrNone, Dim, Fraction, checked

_HIDDEN = "hidden_events"


class CandidateFusion(StrEnum):
    """Choice of where the candidate joins the events."""

    EARLY = "early"  # beside every event, below the transformer: as published
    LATE = "late"  # above it, in x₀ alone


class PooledRows(StrEnum):
    """Choice of whether the maximum over all rows is part of the output."""

    MAX = "max"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
@checked
class TransActConfig(HistoryRankerConfig):
    """Settings of the model `TransAct`.

    Args:
        embedding_dim: D, columns of each table.
        history: which lists are the history; its actions say what was done.
        fusion: where the candidate meets the events.
        time_window: the widest random window of training, in the unit of the times; 0: no event is hidden.
        num_layers: transformer blocks.
        num_heads: of each; they share an event's numbers, the candidate's too.
        feed_forward_dim: hidden units of each block's network.
        dropout: share that is dropped in training, inside the blocks.
        latest: K, the latest rows that enter x₀.
        pooled: whether the maximum over all rows does.
        num_cross_layers: of DCNv2, on x₀.
        deep: hidden layers of the MLP.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one MLP for all labels, or one each.
        init: starting weights of cross layers and MLPs; transformer blocks start as those of the original one.
        embedding: tables: optimizer, kernel, starting weights.
    """

    reads: ClassVar[Reads] = Reads.A_HISTORY

    kind: Literal["transact"] = "transact"
    embedding_dim: Dim = 16
    history: HistoryInput = field(default_factory=HistoryInput)
    fusion: CandidateFusion = CandidateFusion.EARLY
    time_window: CountOrNone = 0
    num_layers: Count = 2
    num_heads: Count = 2
    feed_forward_dim: Count = 32
    dropout: Fraction = 0.1
    latest: CountOrNone = 10
    pooled: PooledRows = PooledRows.MAX
    num_cross_layers: CountOrNone = 3
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        has_output = self.latest or self.pooled is not PooledRows.NONE
        if not has_output or (self.time_window and not self.history.times):
            raise ConfigError(
                expected="latest rows or their maximum as output, and times where there is a time window",
                found=f"latest = {self.latest}, pooled = {self.pooled.value}, time_window = {self.time_window}, "
                f"times = {self.history.times!r}",
                where="TransAct settings",
                ways_out=("--model.latest 10", "--model.history.times FEATURE", "--model.time-window 0"),
            )

    def model_class(self) -> type[TransAct]:
        """The class of the model."""
        return TransAct


class TransAct(RankingModel):
    """Cross layers and an MLP over embeddings and what a transformer makes of a user's latest actions."""

    reads_sequences = True

    def __init__(self, config: TransActConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self.history = History(config.history, inputs=inputs, columns=config.table_columns(inputs), model="TransAct")
        self.joined_lists = (self.history.joined,)
        is_early = config.fusion is CandidateFusion.EARLY
        width = self.history.event_dim + (self.history.target_dim if is_early else 0)
        block = encoder(
            dim=width,
            num_heads=config.num_heads,
            hidden_dim=config.feed_forward_dim,
            feed_forward=FeedForward.RELU,
            dropout=config.dropout,
        )
        self.layers = nn.ModuleList(SoftmaxBlock(block) for _ in range(config.num_layers))
        self.mask = AttentionMask(context=self.history.max_length + 1)  # every event sees all
        has_maximum = config.pooled is PooledRows.MAX
        self.pooled = Linear(width, width) if has_maximum else None
        self.flat = FlatInputs(
            inputs,
            field_dims=(*self.field_dims, (config.latest + has_maximum) * width),
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        self.cross = CrossNet(self.flat.output_dim, num_layers=config.num_cross_layers)
        self.heads = Heads(
            self.flat.output_dim, config=config.deep, num_labels=len(inputs.labels), sharing=config.heads
        )
        initialise([*([] if self.pooled is None else [self.pooled]), self.flat, self.cross, self.heads], config.init)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Return how many of the latest events of each sample a training step hides."""
        named = self.history.further(batch)
        if not self.training or not self.config.time_window:
            return {}
        # One window for the whole step, drawn on the host.
        window = torch.randint(self.config.time_window + 1, ())
        offsets_B1 = self.history.offsets_of(batch)
        is_hidden_N = named[AGES] < to_device(window, named[AGES].device)
        hidden_B1 = nn.functional.pad(is_hidden_N.cumsum(0), (1, 0))[offsets_B1]
        return {_HIDDEN: hidden_B1.diff()}

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The transformer, then cross layers and the MLP on x₀."""
        fields_BX = torch.cat([embedded.fields, self.encoded(embedded)], dim=1)
        return self.as_outputs(self.interact(embedded.dense, fields_BX, self.vectors_of(embedded)))

    def encoded(self, embedded: Embedded) -> Float[Tensor, "B O"]:
        """Encode the events that are not hidden with the transformer."""
        events = self.history.events(embedded)
        hidden_B = embedded.named.get(_HIDDEN)
        rows_NE = events.values
        samples_N = events.samples
        if self.config.fusion is CandidateFusion.EARLY:
            rows_NE = torch.cat([rows_NE, self.history.target(embedded)[samples_N]], dim=1)
        # Hidden events are the latest ones: as "targets" of the mask nobody else sees them.
        layout = JaggedLayout(
            offsets=events.offsets, num_targets=hidden_B, mask=self.mask, longest=longest_with(events, num_rows=0)
        )
        for layer in self.layers:
            rows_NE = layer(rows_NE, places=SequencePlaces(layout=layout))
        places_N = from_latest(events)
        if hidden_B is not None:
            places_N = places_N - hidden_B[samples_N]
        parts = [] if self.pooled is None else [self.pooled(self._maximum(rows_NE, places_N, events))]
        if self.config.latest:
            parts.append(self._latest(rows_NE, places_N, events))
        return torch.cat(parts, dim=1)

    def _maximum(
        self, rows_NE: Float[Tensor, "N E"], places_N: Int64[Tensor, "N"], events: Unpooled
    ) -> Float[Tensor, "B E"]:
        """The maximum of the rows of each sample; zeros where nothing is left of a history."""
        num_samples = events.offsets.shape[0] - 1
        width = rows_NE.shape[1]
        # Hidden events have places below zero.
        seen_NE = rows_NE.masked_fill((places_N < 0).unsqueeze(1), -torch.inf)
        highest_BE = seen_NE.new_full((num_samples, width), -torch.inf)
        highest_BE = highest_BE.scatter_reduce(0, events.samples.unsqueeze(1).expand(-1, width), seen_NE, "amax")
        return highest_BE.masked_fill(highest_BE == -torch.inf, 0.0)

    def _latest(
        self, rows_NE: Float[Tensor, "N E"], places_N: Int64[Tensor, "N"], events: Unpooled
    ) -> Float[Tensor, "B K"]:
        """The K latest rows side by side, the latest first; zeros beyond a history's first event."""
        latest = self.config.latest
        num_samples = events.offsets.shape[0] - 1
        is_kept_N = (places_N >= 0) & (places_N < latest)
        slots_N = torch.where(is_kept_N, events.samples * latest + places_N, num_samples * latest)
        # One slot more takes the rows that are not kept, and is cut off.
        kept = rows_NE.new_zeros(num_samples * latest + 1, rows_NE.shape[1])
        kept = kept.index_add(0, slots_N, rows_NE.masked_fill(~is_kept_N.unsqueeze(1), 0.0))
        return kept[:-1].view(num_samples, latest * rows_NE.shape[1])

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Cross layers, then the MLP, on x₀."""
        return self.heads(self.cross(self.flat(dense_BN, fields_BX, vectors)))
