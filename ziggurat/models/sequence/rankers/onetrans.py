"""OneTrans: one causal transformer over the events of a history and the fields of a sample (arXiv 2510.26104).

    S tokens    s_1 … s_n      events, each through one shared network, and where it stands
    NS tokens   f_1 … f_T      numbers, fields, vectors: x₀ through one network, cut into T   (auto_split)
                               or x₀ cut into T pieces, each through its own map              (pieces)

    X = [s_1 … s_n, f_1 … f_T]       Z = X + W_o MHA(RMS(X))       X' = Z + FFN(RMS(Z))       causal

    Q, K, V and FFN   S tokens share one set of weights; each NS token has a set of its own
    pyramid           layer l of L asks for the latest ⌈n (L − l) / L⌉ events and all NS tokens, and only these go on

    f of the last layer ──► RMS ──► side by side ──► MLP ──► logits

An event sees earlier events; a field sees all events of its layer and the fields before it. Sequence and fields so meet
in every layer, where other rankers squeeze a history into one vector first. Events do not depend on the candidate.

The paper has one token for each event, by networks that differ for each kind of behaviour; here a history is one list
of events whose `actions` say their kind, sorted by time. A learned vector by order or age is added to events
(`positions`); the paper leaves open which. W_o is shared by all tokens. The schedule of the pyramid is linear as in the
paper, in shares of the longest history, a constant of the model; it ends at no events, since logits read fields alone.

Cost of a layer with M events kept of N, forward: (2·N·2 + 2·M·2)·D² for the maps of events, 4·M·D·F for their network,
the same for T fields, and 4·D for every pair that sees each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import offsets_of
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import MLP, Activation, Init, MLPConfig, initialise
from ziggurat.models.contract.model import Embedded, Outputs, Unpooled
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.sequence.rankers.history import (
    AGES,
    EventPosition,
    History,
    HistoryInput,
    HistoryRankerConfig,
    PositionVectors,
    append_rows,
    longest_with,
    offsets_with,
)
from ziggurat.models.sequence.rankers.rankmixer import TokenLinear
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.problem import AttentionForm, JaggedLayout
from ziggurat.ops.dropout import dropout
from ziggurat.precision.products import DenseProducts, Linear
from ziggurat.typed import Count, Dim, Fraction, checked

_KEPT, _OFFSETS = "kept_{}", "kept_offsets_{}"


class Tokenizer(StrEnum):
    """Ways to turn numbers, fields and vectors into tokens."""

    AUTO_SPLIT = "auto_split"  # one network for all, whose result is cut: as published
    PIECES = "pieces"  # neighbours share a token, each token has its own map


class Pyramid(StrEnum):
    """Choice of how many events go on from layer to layer."""

    LINEAR = "linear"  # fewer in each layer: as published
    NONE = "none"  # all; none after the last layer in both, since nobody reads them


@dataclass(frozen=True, kw_only=True)
@checked
class OneTransConfig(HistoryRankerConfig):
    """Settings of the model `OneTrans`.

    Args:
        embedding_dim: columns of each table.
        history: which lists are the history.
        positions: what an event is told of where it stands.
        age_buckets: of positions by time; the last one stands for everything longer.
        token_dim: D, a multiple of the heads.
        num_tokens: T, tokens of what is no event.
        tokenizer: how they are made.
        num_layers: L, how many layers.
        num_heads: of attention.
        expansion: hidden units of a token's network for each number of a token.
        pyramid: how many events go on from layer to layer.
        dropout: share that is dropped in training, behind attention and inside networks.
        deep: hidden layers of the MLP.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
    """

    reads: ClassVar[Reads] = Reads.A_HISTORY

    kind: Literal["onetrans"] = "onetrans"
    embedding_dim: Dim = 16
    history: HistoryInput = field(default_factory=HistoryInput)
    positions: EventPosition = EventPosition.AUTO
    age_buckets: Count = 64
    token_dim: Dim = 64
    num_tokens: Count = 8
    tokenizer: Tokenizer = Tokenizer.AUTO_SPLIT
    num_layers: Count = 4
    num_heads: Count = 4
    expansion: Count = 4
    pyramid: Pyramid = Pyramid.LINEAR
    dropout: Fraction = 0.0
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=()))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        if self.token_dim % self.num_heads:
            raise ConfigError(
                expected="a token_dim that the heads share equally",
                found=f"token_dim = {self.token_dim}, num_heads = {self.num_heads}",
                where="OneTrans settings",
                ways_out=f"--model.token-dim {self.token_dim + -self.token_dim % self.num_heads}",
            )

    def model_class(self) -> type[OneTrans]:
        """The class of the model."""
        return OneTrans

    def kept(self, layer: int, *, length: int) -> int:
        """Latest events of a history that a layer gives to the next, at most.

        Args:
            layer: from 1 on.
            length: of the longest history.
        """
        if layer == self.num_layers:
            return 0  # nobody reads them
        if self.pyramid is Pyramid.NONE:
            return length
        # ⌈length · (L − l) / L⌉.
        return -(-length * (self.num_layers - layer) // self.num_layers)


class MixedLinear(nn.Module):
    """A linear map that events share, and one for each other token.

    Args:
        config: of the model.
        input_dim: numbers of a token.
        output_dim: numbers that it becomes.
        has_events: False where no event comes, and nothing is shared.
    """

    def __init__(self, config: OneTransConfig, *, input_dim: int, output_dim: int, has_events: bool = True) -> None:
        super().__init__()
        self.output_dim = output_dim
        self.shared = Linear(input_dim, output_dim) if has_events else None
        self.own = TokenLinear(config.num_tokens, input_dim=input_dim, output_dim=output_dim)

    def forward(
        self, events_ND: Float[Tensor, "N D"], fields_BTD: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "N O"], Float[Tensor, "B T O"]]:
        """Events and other tokens through their maps."""
        mapped_BTO = self.own(fields_BTD)
        if self.shared is None:
            return mapped_BTO.new_zeros(0, self.output_dim), mapped_BTO
        return self.shared(events_ND), mapped_BTO


class OneTransLayer(DenseProducts):
    """Causal attention over events and fields, and their networks, behind norms and beside residuals.

    Args:
        config: of the model.
        is_last: True for the layer whose events nobody reads.
    """

    native_products = "attention multiplies queries, keys and values inside its kernel"

    def __init__(self, config: OneTransConfig, *, is_last: bool) -> None:
        super().__init__()
        self.config = config
        dim = config.token_dim
        hidden = config.expansion * config.token_dim
        self.norm_attention = nn.RMSNorm(dim, eps=1e-6)
        self.norm_feed = nn.RMSNorm(dim, eps=1e-6)
        self.query = MixedLinear(config, input_dim=dim, output_dim=dim, has_events=not is_last)
        self.key = MixedLinear(config, input_dim=dim, output_dim=dim)
        self.value = MixedLinear(config, input_dim=dim, output_dim=dim)
        self.output = Linear(dim, dim)
        self.wide = MixedLinear(config, input_dim=dim, output_dim=hidden, has_events=not is_last)
        self.narrow = MixedLinear(config, input_dim=hidden, output_dim=dim, has_events=not is_last)

    def forward(
        self, events: Unpooled, fields_BTD: Float[Tensor, "B T D"], *, kept: tuple[Tensor, Tensor] | None
    ) -> tuple[Unpooled, Float[Tensor, "B T D"]]:
        """The latest events and all fields as the next layer takes them.

        Args:
            events: that came in.
            fields_BTD: that came in.
            kept: which events go on, and their offsets; None: all.
        """
        normed_ND = self.norm_attention(events.values)
        normed_BTD = self.norm_attention(fields_BTD)
        going = events if kept is None else events.picked(*kept)
        # Queries of what goes on alone; keys and values of all that came in.
        asked_MD = normed_ND if kept is None else normed_ND[kept[0]]
        q, places_M, places_BT = self._joined(self.query, asked_MD, normed_BTD, lists=going)
        k, _, _ = self._joined(self.key, normed_ND, normed_BTD, lists=events)
        v, _, _ = self._joined(self.value, normed_ND, normed_BTD, lists=events)
        num_tokens = fields_BTD.shape[1]
        layout = JaggedLayout(
            offsets=offsets_with(events, num_rows=num_tokens),
            query_offsets=None if kept is None else offsets_with(going, num_rows=num_tokens),
            longest=longest_with(events, num_rows=num_tokens),
        )
        scale = (self.config.token_dim // self.config.num_heads) ** -0.5
        found = jagged_attention(q, k, v, layout=layout, form=AttentionForm.SOFTMAX, scale=scale)
        found = self._drop(self.output(found.flatten(1)))
        # The residual is of what goes on, so both have M rows.
        events_MD = going.values + found[places_M]
        fields_BTD = fields_BTD + found[places_BT]
        wide_MH, wide_BTH = self.wide(self.norm_feed(events_MD), self.norm_feed(fields_BTD))
        fed_MD, fed_BTD = self.narrow(self._drop(F.gelu(wide_MH)), self._drop(F.gelu(wide_BTH)))
        events_MD = events_MD + self._drop(fed_MD)
        fields_BTD = fields_BTD + self._drop(fed_BTD)
        return replace(going, values=events_MD), fields_BTD

    def _joined(
        self, maps: MixedLinear, events_ND: Tensor, fields_BTD: Tensor, *, lists: Unpooled
    ) -> tuple[Float[Tensor, "M H d"], Int64[Tensor, "N"], Int64[Tensor, "B T"]]:
        """Mapped tokens as one jagged tensor, heads apart; and where events and fields stand in it."""
        mapped_ND, mapped_BTD = maps(events_ND, fields_BTD)
        joined_MD, places_N, places_BT = append_rows(mapped_ND, mapped_BTD, lists=lists)
        return joined_MD.unflatten(1, (self.config.num_heads, -1)), places_N, places_BT

    def _drop(self, inner: Tensor) -> Tensor:
        return dropout(inner, p=self.config.dropout, training=self.training)


class OneTrans(RankingModel):
    """One transformer over a history and everything else that a sample carries."""

    reads_sequences = True

    def __init__(self, config: OneTransConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        dim = config.token_dim
        num_tokens = config.num_tokens
        self.history = History(config.history, inputs=inputs, columns=config.table_columns(inputs), model="OneTrans")
        self.joined_lists = (self.history.joined,)
        once = MLPConfig(hidden_dims=(dim,), activation=Activation.GELU)
        self.events = MLP(self.history.event_dim, config=once, output_dim=dim)
        self.positions = None
        if config.positions is not EventPosition.NONE:
            self.positions = PositionVectors(
                config.positions, history=self.history, dim=dim, num_buckets=config.age_buckets
            )
        self.flat = FlatInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        width = self.flat.output_dim
        # Rounded up: the last piece is filled with `padding` zeros.
        piece = -(-width // num_tokens)
        is_auto = config.tokenizer is Tokenizer.AUTO_SPLIT
        self.padding = 0 if is_auto else piece * num_tokens - width
        self.auto = MLP(width, config=once, output_dim=num_tokens * dim) if is_auto else None
        self.pieces = None if is_auto else TokenLinear(num_tokens, input_dim=piece, output_dim=dim)
        lasts = [number == config.num_layers for number in range(1, config.num_layers + 1)]
        self.layers = nn.ModuleList(OneTransLayer(config, is_last=is_last) for is_last in lasts)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        num_labels = len(inputs.labels)
        self.heads = Heads(num_tokens * dim, config=config.deep, num_labels=num_labels, sharing=config.heads)
        initialise([each for each in self.children() if each is not self.embeddings], config.init)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """The ages of events, and which of them go on from layer to layer."""
        named = self.history.further(batch)
        offsets_B1 = self.history.offsets_of(batch)
        length = self.history.max_length
        lengths_B = self.history.lengths_of(batch)
        for number in range(1, self.config.num_layers + 1):
            most = self.config.kept(number, length=length)
            # None or all: there is nothing to choose.
            if most in (0, length):
                continue
            lengths_B = lengths_B.clamp(max=most)
            kept_B1 = offsets_of(offsets_B1.diff().clamp(max=most))
            # Ends of old and new lists lie this far apart: the latest events are kept.
            shift_B = offsets_B1[1:] - kept_B1[1:]
            # Counted on the host; the offsets are on the device.
            rows_M = torch.arange(int(lengths_B.sum()), device=kept_B1.device)
            named[_KEPT.format(number)] = rows_M + shift_B.repeat_interleave(kept_B1.diff(), output_size=len(rows_M))
            # The next layer chooses among what this one kept.
            named[_OFFSETS.format(number)] = offsets_B1 = kept_B1
        return named

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """All layers, then the MLP on the tokens of what is no event."""
        events = self.history.events(embedded)
        named = embedded.named
        values_ND = self.events(events.values).float()  # residuals stay in FP32 under autocast
        if self.positions is not None:
            values_ND = values_ND + self.positions(events, named.get(AGES))
        events = replace(events, values=values_ND)
        fields_BTD = self._tokens(embedded.dense, embedded.fields, self.vectors_of(embedded)).float()
        for number, layer in enumerate(self.layers, start=1):
            kept = None
            if not self.config.kept(number, length=self.history.max_length):
                # Not handed over with the batch: torch.export takes a size of 0 for a constant.
                kept = events.offsets[:0], torch.zeros_like(events.offsets)
            elif _KEPT.format(number) in named:
                kept = named[_KEPT.format(number)], named[_OFFSETS.format(number)]
            events, fields_BTD = layer(events, fields_BTD, kept=kept)
        return self.as_outputs(self.heads(self.norm(fields_BTD).flatten(1)))

    def _tokens(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Float[Tensor, "B T D"]:
        flat_BX = self.flat(dense_BN, fields_BX, vectors)
        if self.auto is not None:
            return self.auto(flat_BX).unflatten(1, (self.config.num_tokens, -1))
        assert self.pieces is not None
        return self.pieces(F.pad(flat_BX, (0, self.padding)).unflatten(1, (self.config.num_tokens, -1)))

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Logits of samples without events."""
        none = Unpooled(
            values=fields_BX.new_zeros(0, self.config.token_dim),
            offsets=torch.zeros(len(fields_BX) + 1, dtype=torch.int64, device=fields_BX.device),
        )
        tokens_BTD = self._tokens(dense_BN, fields_BX, vectors)
        for layer in self.layers:
            _, tokens_BTD = layer(none, tokens_BTD, kept=None)
        return self.heads(self.norm(tokens_BTD).flatten(1))
