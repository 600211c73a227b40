"""QNN: layers of quadratic neurons, x ⊙ (R maps of x), that teach themselves by two passes (Li et al., 2505.17999).

    x₀ = flatten(X)        H = dropout(ReLU(norm(W x + b))),  W (R·d × d): R rows of d numbers
                           x' = dropout(Σ_r P x ⊙ H_r + x)                P x = x with one head
    x_L ─► Linear ─► logits

"Revisiting Feature Interactions from the Perspective of Quadratic Neural Networks for Click-through Rate Prediction",
arXiv 2505.17999: QNN-α, called T26 in the authors' code. A layer is a product of its input with R activated maps of it
(a Khatri-Rao product, summed over its rows), so orders double with each layer, and the activation stands inside of the
product. With H heads the numbers of x are put in the order of heads for the product, as the authors do: P is that
permutation.

*Self-ensemble.* In training the network is run twice, with other units dropped, and the two are taught by the labels
through their mean probability p, and each by p (`contract/self_distillation.py`):

    loss = BCE(p, label) + BCE(σ(y₁), p*) + BCE(σ(y₂), p*)            p = (σ(y₁) + σ(y₂)) / 2          * as a constant

Without dropout both passes are the same, and one is made. Scores are those of one pass without dropout.

The passes differ from the first dropout on, so the first map and its norm are computed once for both.

Cost: 2·R·d² FLOPs a sample and layer with d = F·D for F fields, in training twice that but for the first layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.models.blocks.closing_maps import linear_maps
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig, Normalization, initialise
from ziggurat.models.blocks.output_biases import biases_of
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.losses import LossSums, at_least_fp32, numbers_of_labels
from ziggurat.models.contract.model import Embedded, Outputs
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Floats, Integers
from ziggurat.models.contract.self_distillation import STUDENTS, add_self_distillation
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.dropout import dropout, relu_dropout_sum
from ziggurat.precision.products import Linear
from ziggurat.typed import Count, Dim, Fraction, checked


@dataclass(frozen=True, kw_only=True)
@checked
class QNNConfig:
    """Settings of the model `QNN`.

    Args:
        embedding_dim: D, width of every field.
        num_layers: L, quadratic layers.
        num_rows: R, maps in each of them.
        num_heads: H; divides D.
        norm: before the activation: none or batch.
        dropout: of the maps, and after each layer; 0 for no second pass.
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.QNNConfig(), small_inputs(), seed=0)).__name__
        'QNN'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_layers", 1, 4),
        Integers("num_rows", 1, 16, log=True),
        Choices("norm", ("none", "batch")),
        Floats("dropout", 0.0, 0.4),
    )

    kind: Literal["qnn"] = "qnn"
    embedding_dim: Dim = 16
    num_layers: Count = 4
    num_rows: Count = 5
    num_heads: Count = 1
    norm: Normalization = Normalization.NONE
    dropout: Fraction = 0.1
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="QNN settings")
        if self.embedding_dim % self.num_heads:
            raise ConfigError(
                expected="num_heads that divides embedding_dim",
                found=f"num_heads = {self.num_heads}, embedding_dim = {self.embedding_dim}",
                where="QNN settings",
                ways_out=("set num_heads = 1", f"set embedding_dim = {self.num_heads * 8}"),
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> QNN:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return QNN(self, inputs=inputs, embeddings=embeddings)


def largest_start(config: QNNConfig) -> float:
    """Return the standard deviation of the numbers of fields with which logits have one of about 0.2.

    A layer multiplies a number with 1 and R activated maps of all of them. Small numbers have small maps; those of a
    norm are ReLU(N(0, 1)), 0.4 in the mean.
    """
    growth = 1.0 + 0.4 * config.num_rows if config.norm is Normalization.BATCH else 1.5
    return 0.3 / growth**config.num_layers


class QuadraticLayer(nn.Module):
    """Σ_r P x ⊙ dropout(ReLU(norm(W_r x + b_r))) + x.

    Args:
        num_fields: n.
        config: D, R, H, norm and dropout.
    """

    def __init__(self, num_fields: int, *, config: QNNConfig) -> None:
        super().__init__()
        width = num_fields * config.embedding_dim
        self.config = config
        self.num_fields = num_fields
        # One hidden layer is W, norm, ReLU and dropout, of all rows at once.
        rows = MLPConfig(hidden_dims=(config.num_rows * width,), normalization=config.norm, dropout=config.dropout)
        self.rows = MLP(width, config=rows)

    def forward(
        self, inputs_Bd: Float[Tensor, "B d"], shared_BX: Float[Tensor, "B X"] | None = None
    ) -> Float[Tensor, "B d"]:
        """Apply the layer.

        Args:
            inputs_Bd: x.
            shared_BX: norm(W x + b), where two passes have it from `before_dropout`.
        """
        config = self.config
        # (B, H, R, d / H): every head has its R rows.
        shape = (config.num_heads, config.num_rows, -1)
        # The sum first: x is the same for all rows.
        if self.training and config.dropout:
            maps_BX = self._normed(inputs_Bd) if shared_BX is None else shared_BX
            sums_BHh = relu_dropout_sum(
                maps_BX.unflatten(1, shape), p=config.dropout, training=True, in_place=shared_BX is None
            )
        else:
            sums_BHh = self.rows(inputs_Bd).unflatten(1, shape).sum(dim=2)
        turned_Bd = inputs_Bd
        if config.num_heads > 1:
            turned_Bd = inputs_Bd.unflatten(1, (self.num_fields, config.num_heads, -1)).transpose(1, 2).flatten(1)
        return torch.addcmul(inputs_Bd, turned_Bd, sums_BHh.flatten(1))

    def before_dropout(self, inputs_Bd: Float[Tensor, "B d"]) -> Float[Tensor, "B X"]:
        """Return norm(W x + b), which two passes over the same x share; the norm's statistics are moved twice."""
        return self._normed(inputs_Bd, num_passes=2)

    def _normed(self, inputs_Bd: Tensor, *, num_passes: int = 1) -> Tensor:
        maps_BX = self.rows.layers[0](inputs_Bd)
        for norm in self.rows.norms:
            maps_BX = norm(maps_BX, num_passes) if isinstance(norm, BatchNorm) else norm(maps_BX)
        return maps_BX


class QNN(RankingModel):
    """Layers of quadratic neurons, trained by two passes that teach each other."""

    def __init__(self, config: QNNConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self.stack = StackedInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        num_fields = self.stack.num_fields
        self.layers = nn.ModuleList(QuadraticLayer(num_fields, config=config) for _ in range(config.num_layers))
        self.output = Linear(num_fields * config.embedding_dim, len(inputs.labels))
        self.is_binary = [label.task.has_positives for label in inputs.labels]
        initialise([child for child in self.children() if child is not embeddings], config.init)
        self.stack.dense.limit_start(largest_start(config))

    def output_biases(self) -> Sequence[Tensor]:
        """See `Model.output_biases`."""
        return biases_of([self.output])

    def closing_maps(self) -> Sequence[nn.Linear]:
        """See `Model.closing_maps`: none where training makes two passes, whose logits are joined."""
        return () if self.config.dropout else linear_maps([self.output])

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """One pass, or in training with dropout the mean of two, which are then named as well."""
        flat_Bd = self.stack(embedded.dense, embedded.fields, self.vectors_of(embedded)).flatten(1)
        if not self.training or not self.config.dropout:
            return self.as_outputs(self._pass(flat_Bd))
        # Up to the first dropout both passes compute the same.
        lowest = self.layers[0]
        assert isinstance(lowest, QuadraticLayer)
        shared_BX = lowest.before_dropout(flat_Bd)
        first_BL = self._pass(flat_Bd, shared_BX)
        second_BL = self._pass(flat_Bd, shared_BX)
        # FP32 at least: passes are compared with their mean in the loss.
        first_BL = at_least_fp32(first_BL)
        second_BL = at_least_fp32(second_BL)
        mean_BL = (first_BL + second_BL) / 2
        is_binary_L = numbers_of_labels(self.is_binary, mean_BL) > 0
        mean_BL = torch.where(is_binary_L, logit_of_mean(first_BL, second_BL), mean_BL)
        return self.as_outputs(mean_BL, dict(zip(STUDENTS, (first_BL, second_BL), strict=True)))

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """One pass, or in training the mean of two."""
        return self.forward_dense(Embedded(dense=dense_BN, fields=fields_BX, vectors=vectors)).logits

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Cross-entropy of the mean, with the gradients of the terms by which the passes teach each other."""
        sums = super().loss(outputs, batch)
        if STUDENTS[0] not in outputs.named:
            return sums
        return add_self_distillation(sums, outputs, batch, inputs=self.inputs)

    def _pass(self, flat_Bd: Tensor, shared_BX: Tensor | None = None) -> Tensor:
        hidden_Bd = flat_Bd
        for number, layer in enumerate(self.layers):
            hidden_Bd = layer(hidden_Bd, shared_BX if number == 0 else None)
            hidden_Bd = dropout(hidden_Bd, p=self.config.dropout, training=self.training)
        return self.output(hidden_Bd)


def logit_of_mean(first: Tensor, second: Tensor) -> Tensor:
    """Return the logit of the mean of two probabilities, from their logits, without 0 or 1 on the way.

    ln(p / (1 − p)) with p = (σ(a) + σ(b)) / 2 is ln(σ(a) + σ(b)) − ln(σ(−a) + σ(−b)).
    """
    positive = torch.logaddexp(F.logsigmoid(first), F.logsigmoid(second))
    negative = torch.logaddexp(F.logsigmoid(-first), F.logsigmoid(-second))
    return positive - negative
