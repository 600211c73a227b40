"""GDCN: a cross network whose layers have gates, beside or below a deep network (Wang et al., CIKM 2023).

    parallel     x₀ ─┬─► gated cross ─► c ─┐              stacked      x₀ ─► gated cross ─► deep ─► logits     GDCN-S
                     └─► deep ────────► h ─┴─► Linear     cross_only   x₀ ─► gated cross ─► Linear ─► logits   GCN
                                             GDCN-P
    gated cross: x_{l+1} = x₀ ⊙ (W_l x_l + b_l) ⊙ σ(G_l x_l) + x_l

"Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction", arXiv 2311.04635: plain cross layers get
worse from some depth on, since every order adds all of its products; the gates (`blocks/cross.py`) let each sample take
those that help it. Structures and inputs are those of DCNv2 (`cross_and_deep.py`). The paper's second idea, columns of
each field by its importance, is the width that a schema gives a table (`embedding_dim`).

Cost a sample and cross layer: 4·d² FLOPs, twice DCNv2's, with d = F·D for F fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.cross import GatedCrossNet
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.heads import HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers, layers
from ziggurat.models.cross_and_deep import CrossAndDeep, Structure, check_structure
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig, TowerModuleKind
from ziggurat.typed import Count, Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class GDCNConfig:
    """Settings of the model `GDCN`.

    Args:
        embedding_dim: D, columns of each table.
        structure: parallel (GDCN-P), stacked (GDCN-S) or cross_only (GCN).
        num_layers: gated cross layers; the highest degree of products is one more.
        deep: hidden layers of the deep network; unused for cross_only.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one deep network for all labels, or one each (the cross network is always shared).
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.GDCNConfig(), small_inputs(), seed=0)).__name__
        'GDCN'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Choices("structure", ("parallel", "stacked")),
        Integers("num_layers", 1, 8),
        *layers("deep", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["gdcn"] = "gdcn"
    embedding_dim: Dim = 16
    structure: Structure = Structure.PARALLEL
    num_layers: Count = 3
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(400, 400, 400)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=lambda: TowerModuleConfig(kind=TowerModuleKind.CROSS))

    def __post_init__(self) -> None:
        check_structure(self, where="GDCN settings")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> GDCN:
        """The model on tables of these columns."""
        return GDCN(self, inputs=inputs, embeddings=embeddings, towers=towers)


class GDCN(CrossAndDeep):
    """A gated cross network, beside or below a deep network."""

    def __init__(
        self,
        config: GDCNConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(
            config,
            make_cross=lambda dim: GatedCrossNet(dim, num_layers=config.num_layers),
            inputs=inputs,
            embeddings=embeddings,
            towers=towers,
        )
        self.config = config
