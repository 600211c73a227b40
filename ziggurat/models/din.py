"""DIN: a history is summed with weights that depend on what is to be scored (Zhou et al., arXiv 1706.06978).

    history e_1 … e_T ─┬─► score_t = MLP([q, e_t, q − e_t, q ⊙ e_t])          q: the target, in the history's table
    target  q ─────────┘   pooled  = Σ_t score_t e_t                          in place of the history's mean
                                        │
    all fields, numbers, vectors ───────┴─► x₀ ─► MLP ─► logits

A user has many interests and a target touches few of them: a plain mean blurs what attention picks out. The weights are
no probabilities (`weights = plain`): their sum says how strong the interest is. `softmax` makes them one.

`Dice` is the paper's activation: p·x + (1 − p)·α·x with p = sigmoid(batch-normalised x), ReLU's kink moved to where the
data is. Here the attention MLP sees the positions inside the histories alone; FuxiCTR pads them and lets the padding
count in Dice's statistics.

A history is looked up once, un-pooled, whatever pooling the schema names; the attention is part of the dense network.
One history attends to one target; several histories attend each to its own. What was done with an event (`actions`) has
no counterpart in a target: it is summed with the scores of its event, Σ_t score_t a_t, those of the first history.

The first layer W = [W_q | W_e | W_d | W_p] is computed in three parts, (W_q + W_d) q once a sample, (W_e − W_d) e_t
once an event, and W_p (q ⊙ e_t): half the products of the written form, and no tensor of four times the keys' size.
Where samples share a history (`Batch.repeated`), the middle part is computed once for all of them.

Cost of a history: 2·2D·h + … FLOPs a position of it; `flops_per_sample` counts one position.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.blocks.without_gradient import without_gradient
from ziggurat.models.contract.model import Embedded, Outputs, Unpooled
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.sequence.rankers.history import History, HistoryInput, pairs_of, refuse_unread
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.dropout import dropout
from ziggurat.ops.repeat import ListCopies
from ziggurat.precision.products import DenseProducts, Linear
from ziggurat.typed import Dim, checked


class AttentionActivation(StrEnum):
    """Elementwise function in the attention network."""

    DICE = "dice"
    RELU = "relu"


class AttentionWeights(StrEnum):
    """Choices of what the scores of a history's positions become."""

    PLAIN = "plain"  # themselves
    SOFTMAX = "softmax"  # positive, with sum 1 over the history


@dataclass(frozen=True, kw_only=True)
@checked
class DINConfig:
    """Settings of the model `DIN`.

    Args:
        embedding_dim: D, columns of each table.
        histories: names of the list features that are pooled by attention; () for every ordered one that shares its
            table with a feature of one row a sample.
        actions: lists that say what was done with the events of the histories, which then are the same events.
        targets: for each history, the feature it attends to; () for the first that shares its table.
        attention_dims: hidden layers of the attention networks.
        attention_activation: after each of them.
        attention_dropout: probability of zeroing a hidden unit of them.
        weights: plain or softmax.
        deep: hidden layers of the MLP.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
    """

    reads: ClassVar[Reads] = Reads.A_HISTORY

    kind: Literal["din"] = "din"
    embedding_dim: Dim = 16
    histories: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    attention_dims: tuple[int, ...] = (64,)
    attention_activation: AttentionActivation = AttentionActivation.DICE
    attention_dropout: float = 0.0
    weights: AttentionWeights = AttentionWeights.PLAIN
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 128, 64)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        wrong_targets = self.targets and len(self.targets) != len(self.histories)
        if wrong_targets or any(width < 1 for width in self.attention_dims) or not 0 <= self.attention_dropout < 1:
            raise ConfigError(
                expected="a target for each history, attention_dims of 1 or more, 0 <= attention_dropout < 1",
                found=f"{self.histories}, {self.targets}, {self.attention_dims}, {self.attention_dropout}",
                where="DIN settings",
                ways_out="correct the setting",
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def unpooled(self, inputs: InputSpec) -> tuple[str, ...]:
        """Histories and actions: attention pools them, whatever the schema says."""
        return (*(name for name, _ in _pairs(self, inputs)), *self.actions)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> DIN:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return DIN(self, inputs=inputs, embeddings=embeddings)


class Dice(nn.Module):
    """p·x + (1 − p)·α·x with p = sigmoid(batch-normalised x), α learned from 0.

    Args:
        dim: number of units.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        # As FuxiCTR's Dice has them.
        self.norm = BatchNorm(dim, affine=False, eps=1e-9, momentum=0.01)
        # From 0: what lies below the kink is cut off at first, as by ReLU.
        self.alpha = nn.Parameter(torch.zeros(dim))

    def forward(self, inputs_PH: Float[Tensor, "P H"]) -> Float[Tensor, "P H"]:
        """Positions as samples; fewer than two leave the running statistics alone."""
        p_PH = self.norm(inputs_PH).sigmoid()
        return inputs_PH * (p_PH + (1 - p_PH) * self.alpha)


class TargetAttention(DenseProducts):
    """Σ_t score_t e_t over a history, the scores by an MLP from history and target.

    Args:
        dim: D.
        config: hidden layers, activation, weights.
    """

    def __init__(self, dim: int, *, config: DINConfig) -> None:
        super().__init__()
        self.config = config
        widths = (4 * dim, *config.attention_dims)
        self.layers = nn.ModuleList(Linear(wide, narrow) for wide, narrow in itertools.pairwise(widths))
        has_dice = config.attention_activation is AttentionActivation.DICE
        self.dice = nn.ModuleList(Dice(width) for width in config.attention_dims if has_dice)
        self.output = Linear(widths[-1], 1)
        if config.weights is AttentionWeights.SOFTMAX:
            without_gradient(self.output.bias)  # one number, added to all scores of a history

    def forward(self, target_BD: Float[Tensor, "B D"], history: Unpooled) -> Float[Tensor, "B D"]:
        """The weighted sum; zeros for an empty history."""
        copies = history.copies()
        keys_PD = copies.of_events(history.values)
        scores_P = self._scores(target_BD, history.values, keys_PD, copies=copies)
        return weighted_sums(scores_P, keys_PD, copies.samples, num_samples=target_BD.shape[0])

    def scores(self, target_BD: Float[Tensor, "B D"], history: Unpooled) -> Float[Tensor, "N"]:
        """The weight of each event of lists, one a sample."""
        return self._scores(target_BD, history.values, history.values, copies=history.copies())

    def _scores(self, target_BD: Tensor, keys_ND: Tensor, keys_PD: Tensor, *, copies: ListCopies) -> Tensor:
        hidden_PH = self._first_layer(target_BD, keys_ND, keys_PD, copies=copies)
        for index, layer in enumerate(self.layers):
            hidden_PH = layer(hidden_PH) if index else hidden_PH
            hidden_PH = self.dice[index](hidden_PH) if len(self.dice) else hidden_PH.relu()
            hidden_PH = dropout(hidden_PH, p=self.config.attention_dropout, training=self.training)
        # Without hidden layers the first product is the output layer's.
        scores_PO = self.output(hidden_PH) if len(self.layers) else hidden_PH
        scores_P = scores_PO.squeeze(1).to(keys_PD.dtype)
        if self.config.weights is AttentionWeights.SOFTMAX:
            return softmax_of_lists(scores_P, copies.samples, num_samples=target_BD.shape[0])
        return scores_P

    def _first_layer(self, target_BD: Tensor, keys_ND: Tensor, keys_PD: Tensor, *, copies: ListCopies) -> Tensor:
        """The first layer: what depends on the history, and on the target, alone is computed once for each."""
        first = cast(Linear, self.layers[0] if len(self.layers) else self.output)
        linear = first.arithmetic.linear
        # W as it is written for [q, e, q − e, q ⊙ e].
        of_query, of_key, of_difference, of_product = first.weight.chunk(4, dim=1)
        from_query_BH = linear(target_BD, of_query + of_difference, first.bias)
        # No bias: the target's part has added it.
        from_key_NH = linear(keys_ND, of_key - of_difference)
        products_PD = copies.of_samples(target_BD) * keys_PD
        # (W_q + W_d) q once a sample, (W_e − W_d) e once an event of a slice: copies share it.
        apart_PH = copies.of_events(from_key_NH) + copies.of_samples(from_query_BH)
        return linear(products_PD, of_product) + apart_PH


def weighted_sums(
    weights_P: Float[Tensor, "P"], values_PD: Float[Tensor, "P D"], samples_P: Int64[Tensor, "P"], *, num_samples: int
) -> Float[Tensor, "B D"]:
    """Σ_t w_t v_t over the positions of each sample; zeros where there are none."""
    sums_BD = values_PD.new_zeros(num_samples, values_PD.shape[1])
    return sums_BD.index_add(0, samples_P, weights_P.unsqueeze(1) * values_PD)


def softmax_of_lists(
    scores_P: Float[Tensor, "P"], samples_P: Int64[Tensor, "P"], *, num_samples: int
) -> Float[Tensor, "P"]:
    """Softmax over the positions of each sample."""
    highest_B = scores_P.new_full((num_samples,), -torch.inf)
    # Detached: a softmax does not depend on what is taken from all scores, so no gradient goes this way.
    highest_B = highest_B.scatter_reduce(0, samples_P, scores_P.detach(), "amax")
    # −∞ stays only where a sample has no position, and then nobody reads it.
    powers_P = (scores_P - highest_B[samples_P]).exp()
    return powers_P / scores_P.new_zeros(num_samples).index_add(0, samples_P, powers_P)[samples_P]


class DIN(RankingModel):
    """An MLP over embeddings and histories, which are summed with weights that depend on the candidate."""

    reads_sequences = True
    reads_slices = True
    slice_modules = ("attentions (what depends on the history alone)",)

    def __init__(self, config: DINConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self.pairs = _pairs(config, inputs)
        columns = config.table_columns(inputs)
        self.history: History | None = None
        if config.actions:
            names, targets = zip(*self.pairs, strict=True)
            read = HistoryInput(lists=names, targets=targets, actions=config.actions)
            self.history = History(read, inputs=inputs, columns=columns, model="DIN")
            self.joined_lists = (self.history.joined,)
        else:
            refuse_unread({name for name, _ in self.pairs}, inputs, model="DIN")
        dims = {spec.name: columns[spec.table] for spec in inputs.lookups}
        self.attentions = nn.ModuleList(TargetAttention(dims[target], config=config) for _, target in self.pairs)
        self.flat = FlatInputs(
            inputs,
            field_dims=tuple(dims.values()),
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        num_labels = len(inputs.labels)
        self.heads = Heads(self.flat.output_dim, config=config.deep, num_labels=num_labels, sharing=config.heads)
        initialise([self.attentions, self.flat, self.heads], config.init)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Nothing; refuses actions that are no part of the histories."""
        if self.history is not None:
            self.history.offsets_of(batch)
        return {}

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """Attention, then the MLP on x₀."""
        return self.as_outputs(self.interact(embedded.dense, self.attended(embedded), self.vectors_of(embedded)))

    def attended(self, embedded: Embedded) -> Float[Tensor, "B X"]:
        """One embedding for each feature, in the order of `inputs.lookups`, the histories pooled by attention."""
        names = [spec.name for spec in self.inputs.fields]
        found = dict(zip(names, embedded.fields.split(self.field_dims, dim=1), strict=True))
        # Actions belong to the events of the first history alone.
        first = self.pairs[0][0] if self.config.actions else ""
        for (name, target), attention in zip(self.pairs, self.attentions, strict=True):
            if name == first:
                found |= self._with_actions(name, found[target], attention, embedded=embedded)
            else:
                found[name] = attention(found[target], embedded.sequences[name])
        return torch.cat([found[spec.name] for spec in self.inputs.lookups], dim=1)

    def _with_actions(
        self, name: str, target_BD: Float[Tensor, "B D"], attention: nn.Module, *, embedded: Embedded
    ) -> dict[str, Tensor]:
        """A history and what was done with its events, summed with the same weights."""
        history = embedded.sequences[name].expanded()
        weights_N = cast(TargetAttention, attention).scores(target_BD, history)
        samples_N = history.copies().samples
        lists = {name: history} | {each: embedded.sequences[each].expanded() for each in self.config.actions}
        return {
            each: weighted_sums(weights_N, values.values, samples_N, num_samples=target_BD.shape[0])
            for each, values in lists.items()
        }

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The MLP on x₀."""
        return self.heads(self.flat(dense_BN, fields_BX, vectors))


def _pairs(config: DINConfig, inputs: InputSpec) -> list[tuple[str, str]]:
    """Every (history, target) pair."""
    where = "DIN, model.histories and model.targets"
    return pairs_of(config.histories, config.targets, inputs=inputs, where=where)
