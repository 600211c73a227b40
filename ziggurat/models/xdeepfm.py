"""xDeepFM: a compressed interaction network beside an MLP and a linear term (Lian et al., arXiv 1803.05170).

    table of f ──► [ e_f | w_f ]                      logit = Σ_f w_f + ⟨v, numbers⟩ + b        first order
                     │                                      + ⟨u, CIN(X)⟩ + b'                  orders 2 … layers + 1
                     └─► X (n, d)                           + MLP(flatten(X))                   the rest

The network's products are of whole columns of fields, kept apart by column until they are summed at the end:
`blocks/interactions/compressed.py`. The first-order weights are extra columns of the tables (`extra_columns.py`).

Cost: 2·d·n·H_k·H_{k+1} FLOPs a sample for each layer of the CIN, usually several times the MLP's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.extra_columns import ExtraColumns, FirstOrder
from ziggurat.models.blocks.heads import HeadSharing, heads_if_hidden
from ziggurat.models.blocks.interactions.compressed import CompressedInteraction, largest_start
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.precision.products import Linear
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class XDeepFMConfig:
    """Settings of the model `xDeepFM`.

    Args:
        embedding_dim: d, width of every field; tables have one column a label more.
        cin: feature maps of each layer of the compressed interaction network.
        deep: hidden layers of the MLP; () for none.
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.XDeepFMConfig(), small_inputs(), seed=0)).__name__
        'XDeepFM'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Choices("cin", ("16", "32", "64", "16,16", "32,32", "64,64", "32,32,32")),
        *layers("deep", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["xdeepfm"] = "xdeepfm"
    embedding_dim: Dim = 16
    cin: tuple[int, ...] = (16, 16)
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="xDeepFM settings")
        if not self.cin or min(self.cin) < 1:
            raise ConfigError(
                expected="cin of one layer or more, each with 1 feature map or more",
                found=f"cin = {self.cin}",
                where="xDeepFM settings",
                ways_out=("set model.cin = 16,16", "take deepfm or dnn for none"),
            )

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: a vector, and a first-order weight for each label."""
        return inputs.table_columns(self.embedding_dim, extra=len(inputs.labels))

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> XDeepFM:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return XDeepFM(self, inputs=inputs, embeddings=embeddings)


class XDeepFM(RankingModel):
    """A compressed interaction network beside an MLP and a linear term."""

    def __init__(self, config: XDeepFMConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        num_labels = len(inputs.labels)
        # A first-order weight for each label stands behind the vector in the same row: one lookup for both.
        self.columns = ExtraColumns(self.field_dims, extra_dims=[num_labels] * len(self.field_dims))
        self.first_order = FirstOrder(inputs)
        self.stack = StackedInputs(
            inputs,
            field_dims=self.columns.main_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        num_fields = self.stack.num_fields
        dim = self.stack.dim
        self.cin = CompressedInteraction(num_fields, dim=dim, layer_dims=config.cin)
        self.cin_output = Linear(self.cin.output_dim, num_labels)
        self.deep = heads_if_hidden(num_fields * dim, config=config.deep, num_labels=num_labels, sharing=config.heads)
        initialise([child for child in self.children() if child is not embeddings], config.init)
        self.stack.dense.limit_start(largest_start(dim))

    def closing_maps(self) -> Sequence[nn.Linear]:
        """See `Model.closing_maps`: those of the deep part, else that of the compressed interactions."""
        return super().closing_maps() or [self.cin_output]

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The sum of the three terms."""
        main_BX, weights_BE = self.columns(fields_BX)
        fields_BFD = self.stack(dense_BN, main_BX, vectors)
        logits_BL = self.first_order(dense_BN, weights_BE, vectors) + self.cin_output(self.cin(fields_BFD))
        return logits_BL if self.deep is None else logits_BL + self.deep(fields_BFD.flatten(1))
