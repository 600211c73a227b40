"""RankMixer: few wide tokens, mixed without a parameter, each with a network of its own (arXiv 2507.15551).

    x₀ ──► T pieces of equal size ──► Proj_1 … Proj_T ──► X (T, D)             x₀: numbers, fields, histories, vectors

    S  = LN(Mix(X) + X)          Mix: every token is cut into T heads; new token h has head h of all tokens
    X' = LN(FFN(S) + S)          FFN_t(s) = W₂ᵗ GELU(W₁ᵗ s + b₁ᵗ) + b₂ᵗ, a network for each token
    ──► … L layers ──► mean over tokens ──► MLP ──► logits

        tokens  a [a1 a2]        Mix   [a1 b1]
                b [b1 b2]  ──►         [a2 b2]

Mix only moves numbers: it costs nothing, and adds no score that a softmax would have to learn between features of
unlike spaces. A token sees a subspace of its own (FFN_t), and after mixing a part of everything.

    experts > 1     FFN_t(s) = Σ_e G_te(s) FFN_te(s),   G_t(s) = ReLU(R_t s + c_t)       loss + λ · mean_t Σ_e G_te

ReLU routing lets each token choose how many experts it has; λ makes it choose few. All experts are computed, as in
training in the paper; its second router for inference and its schedule of λ are not part of this model. With experts
side by side one FFN of E·k·D units computes them: G scales the units of each expert.

A history is a field of x₀: pooled as the schema says, or by target attention as in DIN (`pooling = attention`).
Features stand in x₀ in the order of the schema, so neighbours there share a token, as in the paper's groups of one
meaning.

Cost of a layer, forward: 4·T·k·D²·E FLOPs a sample, in two products of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.fieldwise import BatchedLinear
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.contract.growth import times, widened
from ziggurat.models.contract.losses import LossSums, add_sample_losses
from ziggurat.models.contract.model import Embedded, Outputs
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers
from ziggurat.models.din import AttentionActivation, AttentionWeights, DINConfig, TargetAttention
from ziggurat.models.sequence.rankers.history import History, HistoryInput
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.ops.dropout import dropout
from ziggurat.precision.products import DenseProducts
from ziggurat.typed import Count, Dim, FloatOrZero, Fraction, checked

_PENALTY = "penalty"


MAX_LAYERS = 4  # growth stops there


class HistoryPooling(StrEnum):
    """Ways in which a history becomes a field."""

    SCHEMA = "schema"  # as its features say: mean or sum
    ATTENTION = "attention"  # by target attention, as in DIN


@dataclass(frozen=True, kw_only=True)
@checked
class RankMixerConfig:
    """Settings of the model `RankMixer`.

    Args:
        embedding_dim: columns of each table.
        history: which lists are the history; unused with pooling = schema.
        pooling: how a history becomes a field.
        attention_dims: hidden layers, with ReLU, of target attention.
        num_tokens: T; as many heads.
        token_dim: D, a multiple of T.
        num_layers: L, how many layers.
        expansion: k, hidden units of a token's network for each number of a token.
        num_experts: of each token; 1: no routing.
        penalty: λ of the gates of experts.
        dropout: share of hidden units that is dropped in training.
        deep: hidden layers of the MLP.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.
    """

    reads: ClassVar[Reads] = Reads.PERHAPS_A_HISTORY
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Choices("num_tokens", ("2", "4", "8")),
        Integers("token_dim", 32, 256, step=8),  # which every number of tokens above divides
        Integers("num_layers", 1, 4),
        Choices("expansion", ("1", "2", "4")),
    )

    kind: Literal["rankmixer"] = "rankmixer"
    embedding_dim: Dim = 16
    history: HistoryInput = field(default_factory=HistoryInput)
    pooling: HistoryPooling = HistoryPooling.SCHEMA
    attention_dims: tuple[Dim, ...] = (64,)
    num_tokens: Count = 8
    token_dim: Dim = 128
    num_layers: Count = 2
    expansion: Count = 4
    num_experts: Count = 1
    penalty: FloatOrZero = 1e-3
    dropout: Fraction = 0.0
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=()))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)

    def __post_init__(self) -> None:
        if self.token_dim % self.num_tokens:
            raise ConfigError(
                expected="a token_dim that the heads, as many as tokens, share equally",
                found=f"token_dim = {self.token_dim}, num_tokens = {self.num_tokens}",
                where="RankMixer settings",
                ways_out=f"--model.token-dim {self.token_dim + -self.token_dim % self.num_tokens}",
            )

    @classmethod
    def smallest(cls) -> Self:
        """See `Grows`."""
        return cls(embedding_dim=8, num_tokens=4, token_dim=24, num_layers=1, expansion=2)

    def deeper(self) -> Self | None:
        """Add a layer, up to 4."""
        return replace(self, num_layers=self.num_layers + 1) if self.num_layers < MAX_LAYERS else None

    def wider(self, factor: float) -> Self:
        """Widen the tokens, in steps of as many numbers as there are heads; their number and k stay."""
        heads = times(self.token_dim // self.num_tokens, factor)
        return replace(self, token_dim=self.num_tokens * heads, deep=widened(self.deep, factor))

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else `embedding_dim`."""
        return inputs.table_columns(self.embedding_dim)

    def unpooled(self, inputs: InputSpec) -> tuple[str, ...]:
        """The lists of the history, where attention pools them."""
        return self.history.names(inputs, model="RankMixer") if self.pooling is HistoryPooling.ATTENTION else ()

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> RankMixer:
        """The model on tables of these columns."""
        return RankMixer(self, inputs=inputs, embeddings=embeddings, towers=towers)


class TokenLinear(nn.Module):
    """A linear map with bias for each token.

    Args:
        num_tokens: T.
        input_dim: numbers of a token.
        output_dim: numbers that it becomes.
    """

    def __init__(self, num_tokens: int, *, input_dim: int, output_dim: int) -> None:
        super().__init__()
        self.maps = BatchedLinear(num_tokens, input_dim=input_dim, output_dim=output_dim)
        self.bias = nn.Parameter(torch.zeros(num_tokens, output_dim))

    def forward(self, tokens_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T O"]:
        """Each token through its own map."""
        mapped_BTO = self.maps(tokens_BTD.flatten(1))
        # The bias in the dtype of the product: added in FP32 it would lift the result out of autocast's dtype.
        return mapped_BTO + self.bias.to(mapped_BTO.dtype)


class TokenNetworks(DenseProducts):
    """A feed-forward network for each token, or several that ReLU gates add up.

    Args:
        config: of the model.
    """

    def __init__(self, config: RankMixerConfig) -> None:
        super().__init__()
        self.config = config
        tokens = config.num_tokens
        dim = config.token_dim
        experts = config.num_experts
        hidden = config.expansion * dim
        self.wide = TokenLinear(tokens, input_dim=dim, output_dim=experts * hidden)
        self.narrow = BatchedLinear(tokens, input_dim=experts * hidden, output_dim=dim)
        # One for each expert, since its gate scales what it adds.
        self.bias = nn.Parameter(torch.zeros(tokens, experts, dim))
        self.router = TokenLinear(tokens, input_dim=dim, output_dim=experts) if experts > 1 else None

    def forward(
        self, tokens_BTD: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T E"] | None]:
        """Return the outputs of the networks, and their gates."""
        hidden_BTH = dropout(F.gelu(self.wide(tokens_BTD)), p=self.config.dropout, training=self.training)
        if self.router is None:
            return self.narrow(hidden_BTH.flatten(1)) + self.bias.squeeze(1), None
        gates_BTE = self.router(tokens_BTD).relu()
        # Gates scale hidden units, so one wide product computes all experts (module text).
        hidden_BTEH = hidden_BTH.unflatten(2, (self.config.num_experts, -1)) * gates_BTE.unsqueeze(3)
        # Each expert's bias times its gate: an expert that is off adds nothing.
        biases_TBD = self.arithmetic.matmul(gates_BTE.transpose(0, 1), self.bias.to(gates_BTE.dtype))
        return self.narrow(hidden_BTEH.flatten(1)) + biases_TBD.transpose(0, 1), gates_BTE


class RankMixerLayer(nn.Module):
    """Token mixing and the tokens' networks, each with a residual and a norm.

    Args:
        config: of the model.
    """

    def __init__(self, config: RankMixerConfig) -> None:
        super().__init__()
        self.networks = TokenNetworks(config)
        self.norm_mixed = nn.LayerNorm(config.token_dim)
        self.norm_out = nn.LayerNorm(config.token_dim)

    def forward(
        self, tokens_BTD: Float[Tensor, "B T D"]
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T E"] | None]:
        """The tokens as the next layer takes them, and the gates of experts."""
        mixed_BTD = self.norm_mixed(mix_tokens(tokens_BTD) + tokens_BTD)
        found_BTD, gates_BTE = self.networks(mixed_BTD)
        return self.norm_out(found_BTD + mixed_BTD), gates_BTE


def mix_tokens(tokens_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """Token h of the result: head h of all T tokens side by side, each token cut into T heads."""
    num_tokens = tokens_BTD.shape[1]
    # (B, token, head, d) to (B, head, token, d): as many heads as tokens, so the shape is the same again.
    return tokens_BTD.unflatten(2, (num_tokens, -1)).transpose(1, 2).flatten(2)


class RankMixer(RankingModel):
    """A stack of token mixing and token networks over everything that a sample carries."""

    reads_sequences = True

    def __init__(
        self,
        config: RankMixerConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        self.config = config
        self.history, self.attention = _history(config, inputs, has_towers=towers is not None)
        self.joined_lists = () if self.history is None else (self.history.joined,)
        dim = config.embedding_dim if towers is None else towers.dim
        pooled = () if self.history is None else (self.history.event_dim,)
        self.flat = FlatInputs(
            inputs, field_dims=(*self.field_dims, *pooled), dim=dim, numeric=config.numeric, bottom=config.bottom
        )
        piece = -(-self.flat.output_dim // config.num_tokens)
        # Zeros that fill the last token's piece.
        self.padding = piece * config.num_tokens - self.flat.output_dim
        self.tokens = TokenLinear(config.num_tokens, input_dim=piece, output_dim=config.token_dim)
        self.layers = nn.ModuleList(RankMixerLayer(config) for _ in range(config.num_layers))
        num_labels = len(inputs.labels)
        self.heads = Heads(config.token_dim, config=config.deep, num_labels=num_labels, sharing=config.heads)
        initialise([each for each in self.children() if each not in (self.embeddings, self.towers)], config.init)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Nothing; refuses lists that are no history."""
        if self.history is not None:
            self.history.offsets_of(batch)
        return {}

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The tokens through all layers; with experts also their penalty for each sample."""
        fields_BX = embedded.fields
        if self.history is not None and self.attention is not None:
            candidate_BE = self.history.candidate(embedded)
            fields_BX = torch.cat([fields_BX, self.attention(candidate_BE, self.history.events(embedded))], dim=1)
        logits_BL, gates_B = self._mixed(embedded.dense, fields_BX, self.vectors_of(embedded))
        return self.as_outputs(logits_BL, {} if gates_B is None else {_PENALTY: gates_B})

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """The labels' losses, and in training λ times the gates of experts."""
        sums = super().loss(outputs, batch)
        # Evaluations report the labels' losses alone.
        if _PENALTY not in outputs.named or not self.training:
            return sums
        losses_B = self.config.penalty * outputs.named[_PENALTY]
        return add_sample_losses(sums, losses_B, labels_BL=batch.labels, weights_B=batch.weights, inputs=self.inputs)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Logits of everything that a sample carries, its histories as fields."""
        return self._mixed(dense_BN, fields_BX, vectors)[0]

    def _mixed(
        self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "B L"], Float[Tensor, "B"] | None]:
        """Logits, and the gates of experts: their sum, as a mean over tokens and layers."""
        flat_BX = F.pad(self.flat(dense_BN, fields_BX, vectors), (0, self.padding))
        tokens_BTD = self.tokens(flat_BX.unflatten(1, (self.config.num_tokens, -1)))
        gates: list[Tensor] = []
        for layer in self.layers:
            tokens_BTD, gates_BTE = layer(tokens_BTD)
            gates += [] if gates_BTE is None else [gates_BTE.float().sum(dim=2).mean(dim=1)]
        return self.heads(tokens_BTD.mean(dim=1)), torch.stack(gates).mean(dim=0) if gates else None


def _history(
    config: RankMixerConfig, inputs: InputSpec, *, has_towers: bool
) -> tuple[History | None, TargetAttention | None]:
    """Return the modules that read and pool the history; None where the schema says how it is pooled."""
    if config.pooling is HistoryPooling.SCHEMA:
        if inputs.sequences:
            raise ConfigError(
                expected="lists that the schema pools, or pooling = attention",
                found=f"pooling = none for {', '.join(spec.name for spec in inputs.sequences)}",
                where="features of the schema, model RankMixer",
                ways_out=("--model.pooling attention", "set pooling = mean or sum in the schema"),
            )
        return None, None
    if has_towers:
        raise ConfigError(
            expected="pooling = schema with towers: a candidate inside a tower cannot attend to a history",
            found="pooling = attention",
            where="RankMixer settings",
            ways_out=("--model.pooling schema: towers hold pooled histories", "leave the towers out"),
        )
    history = History(config.history, inputs=inputs, columns=config.table_columns(inputs), model="RankMixer")
    as_din = DINConfig(
        attention_dims=config.attention_dims,
        attention_activation=AttentionActivation.RELU,
        weights=AttentionWeights.PLAIN,
    )
    return history, TargetAttention(history.event_dim, config=as_din)
