"""EDCN: a cross and a deep network that meet after every layer, and read their inputs through gates (CIKM 2021).

    X ─► regulation 0 ─┬─► cross ─► x_1 ─┐             ┌─► regulation 1 ─┬─► cross ─► x_2 ─┐
                       └─► deep ──► h_1 ─┴─► bridge b_1 ┘                 └─► deep ──► h_2 ─┴─► bridge b_2 ─► …

    cross_l(x)      = x₀ (x · w_l) + c_l + x                                     DCN's, x₀ as regulation 0 gives it
    deep_l(h)       = ReLU(W_l h + b_l), dropout
    bridge          = x ⊙ h  or  x + h  or  ReLU(W [x | h] + b)  or  a(x) ⊙ x + a'(h) ⊙ h,  a = softmax(V ReLU(W x + b))
    regulation_l(b) = (g ⊙ b, g' ⊙ b)       g_f = softmax_f(γ / τ): one number a field, for cross and for deep network

    logits = Linear([x_L | h_L | b_L])

Chen et al., "Enhancing Explicit and Implicit Feature Interactions via Information Sharing for Parallel Deep CTR
Models". Two networks side by side, as in DCN, know nothing of each other before the last layer, and read exactly the
same input: the bridge tells each what the other found, the gates let them read the fields differently. All widths are
n·d.

The published gates sum to 1, so they make all numbers n times smaller before every layer, and deep layers start at
almost nothing; by default they are n times as large here (`gates`). As in FuxiCTR regulation may end in batch
normalisation of each number (`norm = batch`), which divides them out again but for its ε. FuxiCTR's cross layers leave
x out of the sum, and BARS's figures are of that (`residual = false`).

Cost: 2·(n·d)² FLOPs a sample and layer for the deep network; the cross layers need 2·n·d.
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
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.closing_maps import linear_maps
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.field_norm import field_norm
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig, Normalization, initialise
from ziggurat.models.blocks.output_biases import biases_of
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Floats, Integers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig, TowerModuleKind
from ziggurat.precision.products import Linear
from ziggurat.typed import Count, Dim, Fraction, checked


class Bridge(StrEnum):
    """Ways in which cross and deep network share what a layer found."""

    PRODUCT = "product"
    SUM = "sum"
    CONCAT = "concat"
    ATTENTION = "attention"


class Gates(StrEnum):
    """Sizes of the gates of the fields."""

    MEAN_ONE = "mean_one"  # n times the softmax: a field passes as it is until a gate has learned
    SUM_ONE = "sum_one"  # the softmax, as published


@dataclass(frozen=True, kw_only=True)
@checked
class EDCNConfig:
    """Settings of the model `EDCN`.

    Args:
        embedding_dim: d, width of every field.
        num_layers: layers of both networks.
        bridge: how the networks share what a layer found.
        temperature: τ of the gates' softmax.
        regulation: whether the networks read their inputs through gates.
        gates: whether gates of all fields have the mean 1, or the sum 1 as published.
        norm: of what the gates give: none or batch.
        residual: whether a cross layer adds its input.
        dropout: after each layer of the deep network.
        numeric: how numbers enter: `bottom_mlp`, or `fields`: raw numbers in the products of every layer, which diverge
            where columns of numbers are many.
        bottom: hidden layers of the bottom MLP.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.EDCNConfig(), small_inputs(), seed=0)).__name__
        'EDCN'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_layers", 1, 5),
        Choices("bridge", ("product", "sum", "concat", "attention")),
        Floats("temperature", 0.5, 20.0, log=True),
        Choices("norm", ("none", "batch")),
    )

    kind: Literal["edcn"] = "edcn"
    embedding_dim: Dim = 16
    num_layers: Count = 3
    bridge: Bridge = Bridge.PRODUCT
    temperature: float = 1.0
    regulation: bool = True
    gates: Gates = Gates.MEAN_ONE
    norm: Normalization = Normalization.NONE
    residual: bool = True
    dropout: Fraction = 0.0
    numeric: NumericInput = NumericInput.BOTTOM_MLP
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=lambda: TowerModuleConfig(kind=TowerModuleKind.CROSS))

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="EDCN settings")
        if self.norm not in (Normalization.NONE, Normalization.BATCH):
            raise ConfigError(
                expected="norm = batch or none, the published forms",
                found=f"norm = {self.norm.value}",
                where="EDCN settings",
                ways_out=("set norm = batch", "set norm = none"),
            )
        if not self.temperature > 0:
            raise ConfigError(
                expected="a temperature above 0, which divides what the softmax of the gates reads",
                found=f"temperature = {self.temperature}",
                where="EDCN settings",
                ways_out=("set temperature = 1", "set regulation = false for no gates"),
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else d."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> EDCN:
        """The model on tables of these columns."""
        return EDCN(self, inputs=inputs, embeddings=embeddings, towers=towers)


class Regulation(nn.Module):
    """Gates of fields: one weight a field, softmax over fields, and a norm or none.

    Args:
        num_fields: n.
        dim: d.
        config: τ, size of the gates, norm.
    """

    def __init__(self, num_fields: int, *, dim: int, config: EDCNConfig) -> None:
        super().__init__()
        self.temperature = config.temperature
        self.scale = num_fields if config.gates is Gates.MEAN_ONE else 1
        self.strengths = nn.Parameter(torch.ones(num_fields))
        self.norm = field_norm(config.norm, num_fields, dim=dim, eps=1e-5)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F D"]:
        """Scale the fields."""
        gates_F = self.scale * (self.strengths / self.temperature).softmax(dim=0)
        return self.norm(fields_BFD * gates_F.unsqueeze(1))


class CrossLayer(nn.Module):
    """DCN's cross layer, x₀ (x · w) + c, and x where it is residual (arXiv 1708.05123).

    Args:
        dim: width.
        residual: whether x is added.
    """

    def __init__(self, dim: int, *, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.weight = Linear(dim, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, first_Bd: Float[Tensor, "B d"], inputs_Bd: Float[Tensor, "B d"]) -> Float[Tensor, "B d"]:
        """Cross the input of the layer with the first one."""
        crossed_Bd = first_Bd * self.weight(inputs_Bd) + self.bias
        return crossed_Bd + inputs_Bd if self.residual else crossed_Bd


class BridgeModule(nn.Module):
    """Join what cross and deep network found in a layer.

    Args:
        kind: how.
        dim: width of both, and of the result.
    """

    def __init__(self, kind: Bridge, *, dim: int) -> None:
        super().__init__()
        self.kind = kind
        self.concat = Linear(2 * dim, dim) if kind is Bridge.CONCAT else None
        # One hidden layer as wide as its input, and a closing map without bias, for each of the two.
        hidden = MLPConfig(hidden_dims=(dim,))
        num_attended = 2 if kind is Bridge.ATTENTION else 0
        self.attention = nn.ModuleList(
            MLP(dim, config=hidden, output_dim=dim, output_bias=False) for _ in range(num_attended)
        )

    def forward(self, crossed_Bd: Float[Tensor, "B d"], hidden_Bd: Float[Tensor, "B d"]) -> Float[Tensor, "B d"]:
        """Return the shared representation."""
        match self.kind:
            case Bridge.PRODUCT:
                return crossed_Bd * hidden_Bd
            case Bridge.SUM:
                return crossed_Bd + hidden_Bd
            case Bridge.CONCAT:
                assert self.concat is not None
                return F.relu(self.concat(torch.cat([crossed_Bd, hidden_Bd], dim=1)))
            case Bridge.ATTENTION:
                both = (crossed_Bd, hidden_Bd)
                first_Bd, second_Bd = (
                    network(each_Bd).softmax(dim=1) * each_Bd
                    for network, each_Bd in zip(self.attention, both, strict=True)
                )
                return first_Bd + second_Bd


class EDCN(RankingModel):
    """A cross and a deep network with a bridge after every layer and gates before it."""

    def __init__(
        self,
        config: EDCNConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        self.config = config
        self.stack = StackedInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim if towers is None else towers.dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        num_fields = self.stack.num_fields
        dim = self.stack.dim
        width = num_fields * dim
        hidden = MLPConfig(hidden_dims=(width,), dropout=config.dropout)
        self.cross = nn.ModuleList(CrossLayer(width, residual=config.residual) for _ in range(config.num_layers))
        self.deep = nn.ModuleList(MLP(width, config=hidden) for _ in range(config.num_layers))
        self.bridges = nn.ModuleList(BridgeModule(config.bridge, dim=width) for _ in range(config.num_layers))
        # Two for each layer: of what the cross network reads, and of what the deep network does.
        num_gates = 2 * config.num_layers if config.regulation else 0
        self.gates = nn.ModuleList(Regulation(num_fields, dim=dim, config=config) for _ in range(num_gates))
        self.output = Linear(3 * width, len(inputs.labels))
        # Tables and towers draw from streams of the seed of their own.
        initialise([child for child in self.children() if child not in (embeddings, towers)], config.init)

    def output_biases(self) -> Sequence[Tensor]:
        """See `Model.output_biases`."""
        return biases_of([self.output])

    def closing_maps(self) -> Sequence[nn.Linear]:
        """See `Model.closing_maps`."""
        return linear_maps([self.output])

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Layer by layer, then one map of both networks and their last bridge."""
        fields_BFD = self.stack(dense_BN, fields_BX, vectors)
        shape = fields_BFD.shape[1:]
        shared_Bd = fields_BFD.flatten(1)
        first_Bd = crossed_Bd = hidden_Bd = shared_Bd
        for layer, (cross, deep, bridge) in enumerate(zip(self.cross, self.deep, self.bridges, strict=True)):
            crossed_Bd = self._regulated(2 * layer, shared_Bd, shape)
            hidden_Bd = self._regulated(2 * layer + 1, shared_Bd, shape)
            if layer == 0:
                first_Bd = crossed_Bd
            crossed_Bd = cross(first_Bd, crossed_Bd)
            hidden_Bd = deep(hidden_Bd)
            shared_Bd = bridge(crossed_Bd, hidden_Bd)
        return self.output(torch.cat([crossed_Bd, hidden_Bd, shared_Bd], dim=1))

    def _regulated(self, gate: int, inputs_Bd: Tensor, shape: torch.Size) -> Tensor:
        if not len(self.gates):
            return inputs_Bd
        return self.gates[gate](inputs_Bd.unflatten(1, shape)).flatten(1)
