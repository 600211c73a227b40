"""FCN, called DCNv3 before: two cross networks side by side, one whose orders double and one whose orders grow by one.

    X ─► x₀ ─┬─► exponential: x_{l+1} = x_l ⊙ f_l(x_l) + x_l  ─► Linear ─► z₁ ─┐
             └─► linear:      x_{l+1} = x₀ ⊙ f_l(x_l) + x_l   ─► Linear ─► z₂ ─┴─► (z₁ + z₂) / 2 ─► logits

    f(x) = [ H | H' ] + b,  H = W x,  W (d/2 × d)          the second half of a layer's numbers is made of the first:
           H' = H ⊙ ReLU(LN(H))     self_mask              DCNv3: noise is masked, half of the matrix is spared
           H' = LN(H)               norm                   FCN
           H' = γ ⊙ H + β           scale                  FCN

Li et al., "FCN: Fusing Exponential and Linear Cross Network for Click-Through Rate Prediction", arXiv 2407.13349 (its
first versions are titled DCNv3), KDD 2026. Products of high order are explicit here, so there is no deep network.

*Heads.* Each feature has `num_heads` vectors of d columns; each head is crossed by the same weights, and its logits are
averaged. *Halves.* x₀ has the first halves of all vectors, then the second halves, so that H meets the ones and H' the
others. *Loss.* Each network that is worse than the mean of both is taught beside it (`blocks/branch_supervision.py`).

Cost: d² FLOPs a sample, layer and head, half of DCNv2's, with d = F·D for F fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.branch_supervision import BranchSupervision
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.losses import LossSums, at_least_fp32, in_label_units, loss_sums, numbers_of_labels
from ziggurat.models.contract.model import Embedded, Outputs
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Floats, Integers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.dropout import dropout
from ziggurat.precision.products import Linear
from ziggurat.typed import Count, Dim, Fraction, checked


class SecondHalf(StrEnum):
    """Ways to make the second half of a cross layer's numbers of the first."""

    SELF_MASK = "self_mask"
    NORM = "norm"
    SCALE = "scale"


class Supervision(StrEnum):
    """Choices of what teaches the two networks."""

    TRI = "tri"  # the loss of their mean, and of each that is worse than it
    NONE = "none"  # the loss of their mean


@dataclass(frozen=True, kw_only=True)
@checked
class FCNConfig:
    """Settings of the model `FCN`.

    Args:
        embedding_dim: D, columns of each vector; even.
        num_heads: vectors of each feature; tables have as many times D columns.
        exponential_layers: cross layers of the network whose orders double.
        linear_layers: cross layers of the network whose orders grow by one.
        second_half: how half of a layer's numbers are made of the other.
        dropout: after each cross layer.
        supervision: whether each network has a loss of its own where it is behind.
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.FCNConfig(), small_inputs(), seed=0)).__name__
        'FCN'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_heads", 1, 2),
        Integers("exponential_layers", 1, 5),
        Integers("linear_layers", 1, 5),
        Choices("second_half", ("self_mask", "norm", "scale")),
        Floats("dropout", 0.0, 0.4),
    )

    kind: Literal["fcn"] = "fcn"
    embedding_dim: Dim = 16
    num_heads: Count = 1
    exponential_layers: Count = 4
    linear_layers: Count = 4
    second_half: SecondHalf = SecondHalf.SELF_MASK
    dropout: Fraction = 0.1
    supervision: Supervision = Supervision.TRI
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="FCN settings")
        if self.embedding_dim % 2:
            raise ConfigError(
                expected="an even embedding_dim: a cross layer makes one half of its numbers of the other",
                found=f"embedding_dim = {self.embedding_dim}",
                where="FCN settings",
                ways_out=(f"set embedding_dim = {self.embedding_dim + 1}", "take dcn_v2, which takes any"),
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else a vector for each head."""
        return inputs.table_columns(self.embedding_dim * self.num_heads)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> FCN:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return FCN(self, inputs=inputs, embeddings=embeddings)


def largest_start(num_layers: int) -> float:
    """Return the standard deviation of the numbers of fields with which logits have one of about 0.2.

    A layer multiplies a number with 1 + b + a half, b between 0 and 1 and the half about 1: with 2, say, at most.

    Args:
        num_layers: of the deeper network.
    """
    return 0.3 / 2.0**num_layers


class HalfCross(nn.Module):
    """f(x) = [ W x | half made of W x ] + b.

    Args:
        dim: d, even.
        second_half: how the second half is made.
    """

    def __init__(self, dim: int, *, second_half: SecondHalf) -> None:
        super().__init__()
        half = dim // 2
        self.second_half = second_half
        self.map = Linear(dim, half, bias=False)
        self.bias = nn.Parameter(torch.empty(dim))
        # Scale and shift: of the norm, or of the plain numbers.
        self.norm = nn.LayerNorm(half) if second_half is not SecondHalf.SCALE else None
        self.scale = nn.Parameter(torch.ones(half)) if self.norm is None else None
        self.shift = nn.Parameter(torch.zeros(half)) if self.norm is None else None
        self.initialise_own(Init.TORCH)

    def initialise_own(self, init: Init) -> None:
        """Start b between 0 and 1, as the authors do, whatever the setting."""
        del init
        nn.init.uniform_(self.bias)

    def forward(self, inputs_BHd: Float[Tensor, "B H d"]) -> Float[Tensor, "B H d"]:
        """Return the factor of the anchor."""
        first_BHh = self.map(inputs_BHd)
        if self.norm is None:
            assert self.scale is not None
            assert self.shift is not None
            second_BHh = self.scale * first_BHh + self.shift
        elif self.second_half is SecondHalf.SELF_MASK:
            second_BHh = first_BHh * F.relu(self.norm(first_BHh))
        else:
            second_BHh = self.norm(first_BHh)
        return torch.cat([first_BHh, second_BHh], dim=2) + self.bias


class HalfCrossNet(nn.Module):
    """Cross layers whose anchor is x₀ or their own input, and a map to logits.

    Args:
        dim: d.
        num_layers: cross layers.
        is_exponential: whether each layer multiplies with its own input, so that orders double.
        config: second half and dropout.
        num_labels: L.
    """

    def __init__(self, dim: int, *, num_layers: int, is_exponential: bool, config: FCNConfig, num_labels: int) -> None:
        super().__init__()
        self.is_exponential = is_exponential
        self.dropout = config.dropout
        self.layers = nn.ModuleList(HalfCross(dim, second_half=config.second_half) for _ in range(num_layers))
        self.output = Linear(dim, num_labels)

    def forward(self, inputs_BHd: Float[Tensor, "B H d"]) -> Float[Tensor, "B L"]:
        """Return logits, the mean over heads."""
        crossed_BHd = inputs_BHd
        for layer in self.layers:
            anchor_BHd = crossed_BHd if self.is_exponential else inputs_BHd
            crossed_BHd = torch.addcmul(crossed_BHd, anchor_BHd, layer(crossed_BHd))
            crossed_BHd = dropout(crossed_BHd, p=self.dropout, training=self.training)
        # The output is linear: the mean of the heads' logits is that of their mean.
        return self.output(crossed_BHd.mean(dim=1))


class FCN(RankingModel):
    """An exponential and a linear cross network, fused by the mean of their logits."""

    def __init__(self, config: FCNConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self.stack = StackedInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim * config.num_heads,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        dim = self.stack.num_fields * config.embedding_dim
        num_labels = len(inputs.labels)
        self.exponential = HalfCrossNet(
            dim, num_layers=config.exponential_layers, is_exponential=True, config=config, num_labels=num_labels
        )
        self.linear = HalfCrossNet(
            dim, num_layers=config.linear_layers, is_exponential=False, config=config, num_labels=num_labels
        )
        self.supervision = BranchSupervision() if config.supervision is Supervision.TRI else None
        initialise([child for child in self.children() if child is not embeddings], config.init)
        self.stack.dense.limit_start(largest_start(max(config.exponential_layers, config.linear_layers)))

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The mean of both networks, and each of them, named."""
        fields_BFX = self.stack(embedded.dense, embedded.fields, self.vectors_of(embedded))
        # (B, n, H·D) to (B, H, d): the first halves of all vectors of a head, then the second halves.
        halves_BFH2D = fields_BFX.unflatten(2, (self.config.num_heads, 2, -1))
        inputs_BHd = halves_BFH2D.permute(0, 2, 3, 1, 4).flatten(2)
        # FP32 at least: the networks are compared with their mean in the loss.
        first_BL = at_least_fp32(self.exponential(inputs_BHd))
        second_BL = at_least_fp32(self.linear(inputs_BHd))
        named = {
            name: in_label_units(logits_BL, inputs=self.inputs)
            for name, logits_BL in (("exponential", first_BL), ("linear", second_BL))
        }
        return self.as_outputs((first_BL + second_BL) / 2, named if self.supervision is not None else None)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The mean of both networks."""
        return self.forward_dense(Embedded(dense=dense_BN, fields=fields_BX, vectors=vectors)).logits

    def output_biases(self) -> Sequence[Tensor]:
        """See `Model.output_biases`: none, as two networks are averaged, each of which is taught by itself."""
        return ()

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """The loss of the mean, with the gradients of those of the networks that are behind it."""
        sums = super().loss(outputs, batch)
        # Not where a loss is only looked at, which one rank may do alone.
        if self.supervision is None or not self.training:
            return sums
        branches = [
            loss_sums(outputs.named[name], batch.labels, batch.weights, inputs=self.inputs).total
            for name in ("exponential", "linear")
        ]
        importance_L = numbers_of_labels([label.weight for label in self.inputs.labels], sums.total)
        total_L = self.supervision(sums.total, branches, sums.weight, importance_L=importance_L)
        return LossSums(total=total_L, weight=sums.weight)
