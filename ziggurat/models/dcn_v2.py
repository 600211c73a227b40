"""DCNv2: a cross network for explicit products of features, beside or below a deep network (arXiv 2008.13535).

    parallel     x₀ ─┬─► cross ─► c ─┐                        stacked     x₀ ─► cross ─► deep ─► logit
                     └─► deep ──► h ─┴─► Linear ─► logit      cross_only  x₀ ─► cross ─► Linear ─► logit

    cross: x_{l+1} = x₀ ⊙ (W_l x_l + b_l) + x_l               W_l full (d × d), or low rank U_l V_l, or a mixture

x₀ is everything a sample carries, flat (`flat_inputs.py`); `cross_and_deep.py` has the structures. Numbers enter as
fields (x_n · w_n) by default, as in BARS, so that crossing sees vectors of the same size everywhere; `concat` is the
paper's way. Every best DCNv2 of BARS is parallel and full rank; TorchRec's DLRM-DCNv2 of MLPerf is stacked and low
rank, on top of a bottom MLP.

Cost a sample and cross layer: 2·d² FLOPs full, 4·d·r low rank, with d = F·D for F fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Literal, Self

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.cross import CrossNet, CrossNetMix, LowRankCrossNet
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.heads import HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig
from ziggurat.models.contract.growth import widened
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers, layers
from ziggurat.models.cross_and_deep import CrossAndDeep, Structure, check_structure
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig, TowerModuleKind
from ziggurat.typed import Dim, checked

MAX_CROSS_LAYERS = 4  # growth stops there


class CrossKind(StrEnum):
    """Form of the cross layers' weight matrix."""

    FULL = "full"
    LOW_RANK = "low_rank"
    MIXTURE = "mixture"  # of low-rank experts


@dataclass(frozen=True, kw_only=True)
@checked
class CrossConfig:
    """Settings of DCNv2's cross network.

    Args:
        num_layers: cross layers; the highest degree of products is one more.
        kind: full rank, low rank, or a mixture of low-rank experts.
        rank: r, for low_rank and mixture.
        num_experts: E, for mixture.
        bias: whether layers have a b_l.
    """

    num_layers: int = 3
    kind: CrossKind = CrossKind.FULL
    rank: int = 32
    num_experts: int = 4
    bias: bool = True

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.rank < 1 or self.num_experts < 1:
            raise ConfigError(
                expected="num_layers, rank and num_experts of 1 or more",
                found=f"num_layers = {self.num_layers}, rank = {self.rank}, num_experts = {self.num_experts}",
                where="cross network settings",
                ways_out=("correct the number", "use the DNN model for no cross layers"),
            )


@dataclass(frozen=True, kw_only=True)
@checked
class DCNv2Config:
    """Settings of the model `DCNv2`.

    Args:
        embedding_dim: D, columns of each table.
        structure: see `Structure`.
        cross: the cross network.
        deep: hidden layers of the deep network; unused for cross_only.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one deep network for all labels, or one each (the cross network is always shared).
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.DCNv2Config(), small_inputs(), seed=0)).__name__
        'DCNv2'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Choices("structure", ("parallel", "stacked")),
        Integers("cross.num_layers", 1, 6),
        Choices("cross.kind", ("full", "low_rank", "mixture")),
        Integers("cross.rank", 8, 128, log=True, only=("cross.kind", ("low_rank", "mixture"))),
        Integers("cross.num_experts", 2, 4, only=("cross.kind", ("mixture",))),
        *layers("deep", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["dcn_v2"] = "dcn_v2"
    embedding_dim: Dim = 16
    structure: Structure = Structure.PARALLEL
    cross: CrossConfig = field(default_factory=CrossConfig)
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=lambda: TowerModuleConfig(kind=TowerModuleKind.CROSS))

    def __post_init__(self) -> None:
        check_structure(self, where="DCNv2 settings")

    @classmethod
    def smallest(cls) -> Self:
        """See `Grows`."""
        return cls(embedding_dim=8, cross=CrossConfig(num_layers=1), deep=MLPConfig(hidden_dims=(8, 8)))

    def deeper(self) -> Self | None:
        """Add a cross layer, up to 4: more never helped in the search of the Wukong paper (appendix A)."""
        if self.cross.num_layers >= MAX_CROSS_LAYERS:
            return None
        return replace(self, cross=replace(self.cross, num_layers=self.cross.num_layers + 1))

    def wider(self, factor: float) -> Self:
        """Widen the deep network: a cross layer is as wide as its input."""
        return replace(self, deep=widened(self.deep, factor))

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> DCNv2:
        """The model on tables of these columns."""
        return DCNv2(self, inputs=inputs, embeddings=embeddings, towers=towers)


class DCNv2(CrossAndDeep):
    """A cross network for explicit products of features, beside or below a deep network."""

    def __init__(
        self,
        config: DCNv2Config,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(
            config,
            make_cross=lambda dim: _build_cross(config.cross, dim=dim),
            inputs=inputs,
            embeddings=embeddings,
            towers=towers,
        )
        self.config = config


def _build_cross(config: CrossConfig, *, dim: int) -> CrossNet | LowRankCrossNet | CrossNetMix:
    match config.kind:
        case CrossKind.FULL:
            return CrossNet(dim, num_layers=config.num_layers, bias=config.bias)
        case CrossKind.LOW_RANK:
            return LowRankCrossNet(dim, num_layers=config.num_layers, rank=config.rank, bias=config.bias)
        case CrossKind.MIXTURE:
            return CrossNetMix(
                dim,
                num_layers=config.num_layers,
                rank=config.rank,
                num_experts=config.num_experts,
                bias=config.bias,
            )
