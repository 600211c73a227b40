"""DHEN: in every layer several kinds of interaction side by side (Zhang et al., arXiv 2203.11014).

    X (n, d) ─┬─► module 1 ── u_1 (l, d) ─┐
              ├─► module 2 ── u_2 (l, d) ─┼─ ensemble ─┐          X' = LN(ensemble_i(u_i) + shortcut(X))
              ├─► …                       ┘            + ─► LN ─► X'
              └─► shortcut: X, or W X where the number of fields changes

    dot            reshape(W_m MLP([⟨x_i, x_j⟩ for i < j]))            equation 3 ("AdvancedDLRM")
    attention      W TransformerLayer(X)                                equation 4
    convolution    W Conv2d(X), X as an image of n × d                  equation 5
    linear         W X                                                  equation 6
    cross          W (Xᵀ X) + b                                         equation 7
    fm             reshape(MLP(LN(flatten(X (Xᵀ Y)))))                  not in the paper: Wukong's block

    ensemble       concat (k·l fields)  |  sum  |  weighted sum Σ α_i u_i, α learned from 1

No single interaction is best on all data, and their order matters: N layers of k modules hold k^N compositions. With
modules = fm, linear and concat it is Wukong. The paper leaves the insides of its modules open; each file in
`blocks/interactions/` says what was chosen. Its best pair: attention and linear; dot and linear for depth.

Cost: the sum of the modules', see each; the shortcut 2·n·n'·d FLOPs a sample where it is a product.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.field_norm import field_norm, norm_of_sum, shift_of
from ziggurat.models.blocks.fieldwise import FieldMix
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.interactions.column_cross import ColumnCross
from ziggurat.models.blocks.interactions.convolution import FieldConvolution
from ziggurat.models.blocks.interactions.dot_block import DotBlock
from ziggurat.models.blocks.interactions.factorization_machine import FactorizationMachine, FactorizationMachineBlock
from ziggurat.models.blocks.interactions.self_attention import AttentionConfig, TransformerLayer
from ziggurat.models.blocks.mlp import Init, MLPConfig, Normalization, forgets_constants, initialise
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.blocks.without_gradient import without_gradient
from ziggurat.models.contract.growth import times, widened
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.ops.dropout import dropout
from ziggurat.typed import Dim, checked


class DHENModule(StrEnum):
    """The kinds of interaction that a DHEN layer can hold; the module docstring has their equations."""

    DOT = "dot"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    LINEAR = "linear"
    CROSS = "cross"
    FM = "fm"


class Ensemble(StrEnum):
    """Ways to make one stack of fields from the outputs of the modules."""

    CONCAT = "concat"
    SUM = "sum"
    WEIGHTED_SUM = "weighted_sum"


MAX_LAYERS = 8  # growth stops there


@dataclass(frozen=True, kw_only=True)
@checked
class DHENConfig:
    """Settings of the model `DHEN`.

    Args:
        embedding_dim: d, width of every field.
        embeddings_per_feature: a table has this many times d columns, and gives as many fields; see `StackedInputs`.
        num_layers: N, layers.
        modules: kinds of interaction in every layer, each once.
        ensemble: concat, sum or weighted sum.
        num_outputs: l, fields out of each module: one number for all layers, or one a layer.
        mlp: hidden layers of the MLP in `dot` and `fm`.
        attention: of the transformer layer; its dim is that of queries, keys and values. `residual` and `layer_norm`
            are always on in a transformer layer, and unused here.
        attention_hidden_dim: width of the transformer layer's feed-forward network.
        num_channels: C of `convolution`.
        kernel_size: of `convolution`, odd.
        fm_rank: k of `fm`.
        numeric: how numbers enter: `bottom_mlp` or `fields`.
        bottom: hidden layers of the bottom MLP.
        num_bottom_fields: fields that the bottom MLP gives.
        input_dropout: probability of zeroing a number of X₀.
        norm_eps: ε of the norms.
        norm: after each layer and before the MLPs of `dot` and `fm`: `layer`, as published, `batch` or `block`;
            see `field_norm.py` and `block_norm.py`. The transformer layer keeps its layer norms.
        input_norm: of X₀: none, as published, `layer`, `batch` or `block`.
        head: hidden layers of the final MLP.
        heads: one final MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.DHENConfig(), small_inputs(), seed=0)).__name__
        'DHEN'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_layers", 1, 5),
        Choices("modules", ("dot,linear", "dot,cross", "fm,linear", "dot,linear,cross", "dot,attention,linear")),
        Choices("ensemble", ("concat", "sum", "weighted_sum")),
        Integers("num_outputs", 4, 32, log=True),
        *layers("mlp", width=(64, 512), depth=(1, 3)),
        *layers("head", width=(64, 1024), depth=(1, 3)),
    )

    kind: Literal["dhen"] = "dhen"
    embedding_dim: Dim = 16
    embeddings_per_feature: int = 1
    num_layers: int = 3
    modules: tuple[DHENModule, ...] = (DHENModule.DOT, DHENModule.LINEAR)
    ensemble: Ensemble = Ensemble.CONCAT
    num_outputs: tuple[int, ...] = (16,)
    mlp: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 256)))
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    attention_hidden_dim: int = 64
    num_channels: int = 2
    kernel_size: int = 3
    fm_rank: int = 24
    numeric: NumericInput = NumericInput.BOTTOM_MLP
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    num_bottom_fields: int = 1
    input_dropout: float = 0.0
    norm_eps: float = 1e-5
    norm: Normalization = Normalization.LAYER
    input_norm: Normalization = Normalization.NONE
    head: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 128)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="DHEN settings")
        counts = {
            name: getattr(self, name)
            for name in (
                *("num_layers", "embeddings_per_feature", "num_bottom_fields"),
                *("attention_hidden_dim", "num_channels", "kernel_size", "fm_rank"),
            )
        }
        if min(counts.values()) < 1 or self.kernel_size % 2 == 0:
            raise _refused("counts of 1 or more, and an odd kernel_size", f"{counts}")
        if len(self.num_outputs) not in (1, self.num_layers) or min(self.num_outputs) < 1:
            raise _refused("num_outputs of 1 or more, one for all layers or one a layer", f"{self.num_outputs}")
        if not self.modules or len(set(self.modules)) < len(self.modules):
            raise _refused("modules: one kind or more, each once", ", ".join(self.modules) or "none")
        if not 0.0 <= self.input_dropout < 1.0 or self.norm_eps <= 0:
            found = f"input_dropout = {self.input_dropout}, norm_eps = {self.norm_eps}"
            raise _refused("0 <= input_dropout < 1, norm_eps above 0", found)
        if self.norm is Normalization.NONE:
            raise _refused("norm = layer, batch or block: products of small numbers vanish without one", "norm = none")

    @classmethod
    def smallest(cls) -> Self:
        """See `Grows`; batch norms as of Wukong, for the same reason."""
        return cls(
            embedding_dim=8,
            num_layers=1,
            num_outputs=(4,),
            mlp=MLPConfig(hidden_dims=(16,)),
            head=MLPConfig(hidden_dims=(32,)),
            norm=Normalization.BATCH,
            input_norm=Normalization.BATCH,
            numeric=NumericInput.FIELDS,
        )

    def deeper(self) -> Self | None:
        """Add a layer, up to 8: DHEN is made of layers that are stacked (arXiv 2203.11014)."""
        is_equal = len(self.num_outputs) == 1
        return replace(self, num_layers=self.num_layers + 1) if is_equal and self.num_layers < MAX_LAYERS else None

    def wider(self, factor: float) -> Self:
        """Enlarge what each module gives and its MLP together, as of Wukong: the paper names no rule for widths."""
        return replace(
            self,
            num_outputs=tuple(times(size, factor) for size in self.num_outputs),
            mlp=widened(self.mlp, factor),
            fm_rank=times(self.fm_rank, factor),
            attention_hidden_dim=times(self.attention_hidden_dim, factor),
        )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: `embeddings_per_feature` vectors."""
        return inputs.table_columns(self.embedding_dim * self.embeddings_per_feature)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> DHEN:
        """The model on tables of these columns."""
        return DHEN(self, inputs=inputs, embeddings=embeddings, towers=towers)


def _refused(expected: str, found: str) -> ConfigError:
    return ConfigError(expected=expected, found=found, where="DHEN settings", ways_out="correct the setting")


class DHENLayer(nn.Module):
    """LN(ensemble of modules + shortcut).

    Args:
        num_fields: n, fields that come in.
        num_outputs: l, fields out of each module.
        dim: d.
        config: of the model.
    """

    def __init__(self, num_fields: int, *, num_outputs: int, dim: int, config: DHENConfig) -> None:
        super().__init__()
        self.ensemble = config.ensemble
        self.num_outputs = num_outputs * (len(config.modules) if config.ensemble is Ensemble.CONCAT else 1)
        self.parts = nn.ModuleDict(
            {
                kind.value: _build_module(kind, config, num_fields=num_fields, num_outputs=num_outputs, dim=dim)
                for kind in config.modules
            }
        )
        # From 1: training begins with the plain sum.
        weighted = config.ensemble is Ensemble.WEIGHTED_SUM
        self.scales = nn.Parameter(torch.ones(len(config.modules))) if weighted else None
        same = num_fields == self.num_outputs
        # X itself where it fits; a product only where the number of fields changes.
        self.shortcut = None if same else FieldMix(num_fields, num_outputs=self.num_outputs, dim=dim)
        self.norm = field_norm(config.norm, self.num_outputs, dim=dim, eps=config.norm_eps)
        for part in self.parts.values():
            _freeze_constants(part, norm=config.norm)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B M D"]:
        """Compute the next stack X' from the stack X."""
        outputs = [part(fields_BFD) for part in self.parts.values()]
        if self.scales is not None:
            outputs = [scale * output for scale, output in zip(self.scales, outputs, strict=True)]
        if self.ensemble is not Ensemble.CONCAT:
            # One output: `norm_of_sum` takes a list of parts that stand side by side.
            outputs = [torch.stack(outputs).sum(dim=0)]
        kept_BMD = fields_BFD if self.shortcut is None else self.shortcut(fields_BFD)
        return norm_of_sum(self.norm, outputs, kept_BMD)


def _freeze_constants(part: nn.Module, *, norm: Normalization) -> None:
    """Let biases stay that the norm behind a module takes out again; see `without_gradient.py`."""
    # The interaction itself, before the map that mixes its fields.
    first = part[0] if isinstance(part, nn.Sequential) else part
    # One number for all columns of a field: a layer norm takes it out, too. A norm of blocks subtracts no mean.
    if isinstance(first, FieldConvolution) and norm is not Normalization.BLOCK:
        without_gradient(first.convolution.bias)
    if norm is not Normalization.BATCH:
        return
    if isinstance(first, ColumnCross):
        without_gradient(first.bias)
    elif isinstance(first, TransformerLayer):
        without_gradient(shift_of(first.norm))
    elif isinstance(first, DotBlock | FactorizationMachineBlock):
        without_gradient(first.mlp.output_bias)


def _build_module(kind: DHENModule, config: DHENConfig, *, num_fields: int, num_outputs: int, dim: int) -> nn.Module:
    match kind:
        case DHENModule.DOT:
            if num_fields < 2:
                raise _refused("two fields or more, because a dot product takes two", f"{num_fields}")
            return DotBlock(
                num_fields,
                num_outputs=num_outputs,
                dim=dim,
                mlp=config.mlp,
                norm_eps=config.norm_eps,
                norm=config.norm,
            )
        case DHENModule.ATTENTION:
            layer = TransformerLayer(
                num_fields,
                dim=dim,
                config=config.attention,
                hidden_dim=config.attention_hidden_dim,
                norm_eps=config.norm_eps,
            )
            return nn.Sequential(layer, FieldMix(num_fields, num_outputs=num_outputs, dim=dim))
        case DHENModule.CONVOLUTION:
            layer = FieldConvolution(
                num_fields, dim=dim, num_channels=config.num_channels, kernel_size=config.kernel_size
            )
            mixed = num_fields * config.num_channels
            return nn.Sequential(layer, FieldMix(mixed, num_outputs=num_outputs, dim=dim))
        case DHENModule.LINEAR:
            return FieldMix(num_fields, num_outputs=num_outputs, dim=dim)
        case DHENModule.CROSS:
            return ColumnCross(num_fields, num_outputs=num_outputs, dim=dim)
        case DHENModule.FM:
            return FactorizationMachineBlock(
                FactorizationMachine(num_fields, dim=dim, rank=config.fm_rank),
                num_products=num_fields * config.fm_rank,
                num_outputs=num_outputs,
                dim=dim,
                mlp=config.mlp,
                norm_eps=config.norm_eps,
                norm=config.norm,
            )


class DHEN(RankingModel):
    """A stack of layers that each hold several kinds of interaction side by side."""

    def __init__(
        self,
        config: DHENConfig,
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
            num_bottom_fields=config.num_bottom_fields,
        )
        self.layers = nn.ModuleList()
        num_fields = self.stack.num_fields
        dim = self.stack.dim
        self.input_norm = field_norm(config.input_norm, num_fields, dim=dim, eps=config.norm_eps)
        for index in range(config.num_layers):
            num_outputs = config.num_outputs[index if len(config.num_outputs) > 1 else 0]
            layer = DHENLayer(num_fields, num_outputs=num_outputs, dim=dim, config=config)
            self.layers.append(layer)
            num_fields = layer.num_outputs
        norms = [self.input_norm, *(layer.norm for layer in self.layers)]
        # A batch norm removes a constant that linear maps have carried there from the norm before.
        if config.norm is Normalization.BATCH and set(config.modules) <= {DHENModule.LINEAR, DHENModule.CONVOLUTION}:
            for norm in norms[:-1]:  # nothing but linear maps lies between a norm and the next one
                without_gradient(shift_of(norm))
        # The MLP's own norm would take the last shift out again.
        if forgets_constants(config.head):
            without_gradient(shift_of(norms[-1]))
        self.heads = Heads(num_fields * dim, config=config.head, num_labels=len(inputs.labels), sharing=config.heads)
        initialise([self.stack, self.layers, self.heads], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """All layers, then the final MLP."""
        fields_BFD = self.input_norm(self.stack(dense_BN, fields_BX, vectors))
        fields_BFD = dropout(fields_BFD, p=self.config.input_dropout, training=self.training)
        for layer in self.layers:
            fields_BFD = layer(fields_BFD)
        return self.heads(fields_BFD.flatten(1))
