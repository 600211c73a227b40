"""Wukong: a stack of factorization machine layers, made to grow (Zhang et al., arXiv 2403.02545, ICML 2024).

    X₀ (n, d): all inputs as fields       one layer, X (n_i, d) in, X' (n_F + n_L, d) out:
      │
      ├─► layer 1   orders 1 … 2          X ─┬─► FMB: reshape(MLP(LN(X (Xᵀ Y)))) ── n_F fields ─┐
      ├─► layer 2          1 … 4             ├─► LCB: W_L X ─────────────────────── n_L fields ─┴► + ─► LN ─► X'
      ├─► …                                  └─► residual: X, or R X where n_i ≠ n_F + n_L ──────┘
      ▼
    flatten ─► MLP ─► logits

Each layer doubles the order of the products that its output can hold, so l layers reach order 2^l. The first layer
contracts n fields to n_F + n_L, usually far fewer; the layers above cost the same however many features there are.

As published: LN over d after the sum; the fields of the FMB stand before those of the LCB; LCB and R have no bias. What
the paper leaves open: Y starts like a linear layer; the closing layer of the FMB's MLP is linear; numbers enter as
`numeric` says (the paper: a bottom MLP). Beyond the paper's default: the plain X Xᵀ and an attentive Y (both in the
paper's text), several embeddings a feature, widths of their own for each layer, dropout on X₀, and batch norms in place
of layer norms and on X₀ (`field_norm.py`: what strongly penalised tables need).

To make it larger (section 3.8): first more layers, then n_F, n_L, rank and the FMB's MLP together; n_L alone does
little.

Cost of a layer, FLOPs a sample forward: 4·n_i·k·d (FM) + 2·(n_i·k·h + … + h·n_F·d) (MLP) + 2·n_i·n_L·d (LCB)
+ 2·n_i·(n_F + n_L)·d where R is needed. The MLP is the largest part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self, cast

from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.field_norm import field_norm, norm_of_sum, shift_of
from ziggurat.models.blocks.fieldwise import FieldMix
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.interactions.factorization_machine import (
    AttentiveFactorizationMachine,
    FactorizationMachine,
    FactorizationMachineBlock,
    FMKind,
    PlainFactorizationMachine,
)
from ziggurat.models.blocks.mlp import Init, MLPConfig, Normalization, forgets_constants, initialise
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.blocks.without_gradient import without_gradient
from ziggurat.models.contract.growth import times, widened
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.ops.dropout import dropout
from ziggurat.ops.interactions.fm_norm import FMKernel
from ziggurat.typed import Dim, checked

MAX_LAYERS = 8  # growth stops there


@dataclass(frozen=True, kw_only=True)
@checked
class WukongConfig:
    """Settings of the model `Wukong`.

    Args:
        embedding_dim: d, width of every field.
        embeddings_per_feature: a table has this many times d columns, and gives as many fields; see `StackedInputs`.
        num_layers: l, layers of products.
        num_fm: n_F, fields out of the factorization machine block: one number for all layers, or one a layer.
        num_linear: n_L, fields out of the linear compression block: one number for all layers, or one a layer; 0 for
            none.
        rank: k, columns of Y: one number for all layers, or one a layer. Unused by the plain form.
        fm: plain X Xᵀ, optimised X (Xᵀ Y), or with an attentive Y.
        attention: hidden layers of the MLP that makes an attentive Y.
        num_attention_fields: fields that this MLP reads, after linear compression.
        kernel: what computes products and their norm: `torch`, `triton`, one fused kernel for CUDA devices (needs
            fm = optimized and norm = layer), or `auto`, the faster one as measured on the GPU.
        mlp: hidden layers of each block's MLP.
        numeric: how numbers enter: `bottom_mlp` or `fields`.
        bottom: hidden layers of the bottom MLP.
        num_bottom_fields: fields that the bottom MLP gives.
        input_dropout: probability of zeroing a number of X₀.
        norm_eps: ε of the norms.
        norm: in the layers: `layer`, as published, `batch`, or `block`; see `field_norm.py` and `block_norm.py`.
        input_norm: of X₀: none, as published, `layer`, `batch` or `block`.
        head: hidden layers of the final MLP.
        heads: one final MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers. Kind `fm` is made for Wukong.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.WukongConfig(), small_inputs(), seed=0)).__name__
        'Wukong'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_layers", 1, 5),
        Integers("num_fm", 4, 32, log=True),
        Integers("num_linear", 4, 32, log=True),
        Integers("rank", 4, 32, log=True),
        *layers("mlp", width=(64, 512), depth=(1, 3)),
        *layers("head", width=(64, 1024), depth=(1, 3)),
    )

    kind: Literal["wukong"] = "wukong"
    embedding_dim: Dim = 16
    embeddings_per_feature: int = 1
    num_layers: int = 3
    num_fm: tuple[int, ...] = (16,)
    num_linear: tuple[int, ...] = (16,)
    rank: tuple[int, ...] = (24,)
    fm: FMKind = FMKind.OPTIMIZED
    attention: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(64,)))
    num_attention_fields: int = 4
    kernel: FMKernel = FMKernel.AUTO
    mlp: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 256)))
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
        check_stackable(self.numeric, where="Wukong settings")
        sizes = {"num_fm": self.num_fm, "num_linear": self.num_linear, "rank": self.rank}
        wrong = {
            name: given
            for name, given in sizes.items()
            if len(given) not in (1, self.num_layers) or min(given) < (0 if name == "num_linear" else 1)
        }
        counts = self.num_layers, self.embeddings_per_feature, self.num_bottom_fields, self.num_attention_fields
        if wrong or min(counts) < 1:
            raise ConfigError(
                expected="num_layers, embeddings_per_feature, num_bottom_fields and num_attention_fields of 1 or more; "
                "num_fm, rank (1 or more) and num_linear (0 or more) with one number, or one a layer",
                found=f"{counts}; {wrong or sizes}, {self.num_layers} layers",
                where="Wukong settings",
                ways_out="correct the number",
            )
        if not 0.0 <= self.input_dropout < 1.0 or self.norm_eps <= 0:
            raise ConfigError(
                expected="0 <= input_dropout < 1, norm_eps above 0",
                found=f"input_dropout = {self.input_dropout}, norm_eps = {self.norm_eps}",
                where="Wukong settings",
                ways_out="correct the number",
            )
        if self.kernel is FMKernel.TRITON and (self.fm, self.norm) != (FMKind.OPTIMIZED, Normalization.LAYER):
            raise ConfigError(
                expected="fm = optimized and norm = layer with kernel = triton",
                found=f"fm = {self.fm}, norm = {self.norm}",
                where="Wukong settings",
                ways_out="set model.kernel = torch",
            )
        if self.norm is Normalization.NONE:
            raise ConfigError(
                expected="norm = layer, batch or block: products of small numbers vanish without one",
                found="norm = none",
                where="Wukong settings",
                ways_out=("leave norm = layer, as published", "set norm = batch", "set norm = block"),
            )

    def layer(self, index: int) -> tuple[int, int, int]:
        """(n_F, n_L, k) of one layer."""
        return tuple(given[index if len(given) > 1 else 0] for given in (self.num_fm, self.num_linear, self.rank))  # pyright: ignore[reportReturnType]

    @classmethod
    def smallest(cls) -> Self:
        """See `Grows`. In one pass over half a million rows batch norms learn more than the paper's layer norms."""
        return cls(
            embedding_dim=8,
            num_layers=1,
            num_fm=(4,),
            num_linear=(4,),
            rank=(4,),
            mlp=MLPConfig(hidden_dims=(16,)),
            head=MLPConfig(hidden_dims=(32,)),
            norm=Normalization.BATCH,
            input_norm=Normalization.BATCH,
            numeric=NumericInput.FIELDS,
        )

    def deeper(self) -> Self | None:
        """Add a layer, up to 8 (section 3.8: the number of layers first); sizes that stand once a layer do not grow."""
        is_equal = {len(self.num_fm), len(self.num_linear), len(self.rank)} == {1}
        return replace(self, num_layers=self.num_layers + 1) if is_equal and self.num_layers < MAX_LAYERS else None

    def wider(self, factor: float) -> Self:
        """Enlarge n_F, n_L, the rank k and the MLP of every layer together (section 3.8)."""
        return replace(
            self,
            num_fm=tuple(times(size, factor) for size in self.num_fm),
            # 0 stands for no linear compression.
            num_linear=tuple(times(size, factor) if size else 0 for size in self.num_linear),
            rank=tuple(times(size, factor) for size in self.rank),
            mlp=widened(self.mlp, factor),
        )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: `embeddings_per_feature` vectors."""
        return inputs.table_columns(self.embedding_dim * self.embeddings_per_feature)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> Wukong:
        """The model on tables of these columns."""
        return Wukong(self, inputs=inputs, embeddings=embeddings, towers=towers)


class WukongLayer(nn.Module):
    """LN(concat(FMB(X), LCB(X)) + residual(X)).

    Args:
        num_fields: n_i, fields that come in.
        dim: d.
        config: of the model.
        index: which layer this is.
    """

    def __init__(self, num_fields: int, *, dim: int, config: WukongConfig, index: int) -> None:
        super().__init__()
        num_fm, num_linear, rank = config.layer(index)
        self.num_outputs = num_fm + num_linear
        self.fm = FactorizationMachineBlock(
            _products(config, num_fields=num_fields, dim=dim, rank=rank),
            # The plain form gives n numbers a field, the others k.
            num_products=num_fields * (num_fields if config.fm is FMKind.PLAIN else rank),
            num_outputs=num_fm,
            dim=dim,
            mlp=config.mlp,
            norm_eps=config.norm_eps,
            norm=config.norm,
        )
        self.linear = FieldMix(num_fields, num_outputs=num_linear, dim=dim) if num_linear else None
        same = num_fields == self.num_outputs
        self.residual = None if same else FieldMix(num_fields, num_outputs=self.num_outputs, dim=dim)
        self.norm = field_norm(config.norm, self.num_outputs, dim=dim, eps=config.norm_eps)
        if config.norm is Normalization.BATCH:  # the mean over the batch takes it out again
            without_gradient(self.fm.mlp.output_bias)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B M D"]:
        """X_{i+1}: n_F + n_L fields."""
        # Products first, as published: the order of fields is part of the model.
        parts = [self.fm(fields_BFD)]
        if self.linear is not None:
            parts.append(self.linear(fields_BFD))
        kept_BMD = fields_BFD if self.residual is None else self.residual(fields_BFD)
        return norm_of_sum(self.norm, parts, kept_BMD)


def _products(config: WukongConfig, *, num_fields: int, dim: int, rank: int) -> nn.Module:
    match config.fm:
        case FMKind.PLAIN:
            return PlainFactorizationMachine(num_fields, dim=dim)
        case FMKind.OPTIMIZED:
            return FactorizationMachine(num_fields, dim=dim, rank=rank, kernel=config.kernel)
        case FMKind.ATTENTIVE:
            return AttentiveFactorizationMachine(
                num_fields,
                dim=dim,
                rank=rank,
                num_compressed=config.num_attention_fields,
                attention=config.attention,
            )


class Wukong(RankingModel):
    """A stack of factorization machine layers, made to grow."""

    def __init__(
        self,
        config: WukongConfig,
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
        self.input_norm = field_norm(config.input_norm, num_fields, dim=self.stack.dim, eps=config.norm_eps)
        for index in range(config.num_layers):
            layer = WukongLayer(num_fields, dim=self.stack.dim, config=config, index=index)
            self.layers.append(layer)
            num_fields = layer.num_outputs
        if forgets_constants(config.head):
            without_gradient(shift_of(cast(WukongLayer, self.layers[-1]).norm))
        self.heads = Heads(
            num_fields * self.stack.dim, config=config.head, num_labels=len(inputs.labels), sharing=config.heads
        )
        initialise([self.stack, self.layers, self.heads], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """All layers, then the final MLP."""
        fields_BFD = self.input_norm(self.stack(dense_BN, fields_BX, vectors))
        fields_BFD = dropout(fields_BFD, p=self.config.input_dropout, training=self.training)
        for layer in self.layers:
            fields_BFD = layer(fields_BFD)
        return self.heads(fields_BFD.flatten(1))
