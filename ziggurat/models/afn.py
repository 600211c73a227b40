"""AFN and AFN+: products of learned powers of fields, and an MLP with embeddings of its own beside them (AAAI 2020).

    table of f ──► [ e_f | e'_f ]
                     │      └─► X' (n, d) ─► flatten ─► MLP ─► z' ─┐
                     │                                              ├─► Linear ─► logits         AFN+
                     └─► X (n, d) ─► logarithmic neurons (m, d) ─► flatten ─► MLP ─► z ─┘

Cheng, Shen and Huang, "Adaptive Factorization Network: Learning Adaptive-Order Feature Interactions", arXiv 1909.03276:
`blocks/interactions/logarithmic.py`. AFN learns how many fields a product has, where cross layers are given an order;
it needs embeddings that are no factor of an MLP, so AFN+ has two vectors a row. The second is extra columns of the same
table (`extra_columns.py`): one lookup serves both. Without `beside` it is AFN, whose logits are z.

With several labels each network has an output for each of them, and the closing map reads all.

Cost: 2·n·m·d FLOPs a sample for the neurons, 2·m·d·h for the first layer above them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.closing_maps import linear_maps
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.extra_columns import ExtraColumns
from ziggurat.models.blocks.interactions.logarithmic import LogarithmicNeurons
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig, initialise
from ziggurat.models.blocks.output_biases import biases_of
from ziggurat.models.blocks.stacked_inputs import StackedInputs, check_stackable
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.precision.products import Linear
from ziggurat.typed import Count, Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class AFNConfig:
    """Settings of the model `AFN`.

    Args:
        embedding_dim: d, width of every field; tables have twice as many columns unless `beside` is empty.
        num_neurons: m, logarithmic neurons.
        deep: hidden layers above the neurons.
        beside: hidden layers of the MLP beside them; () for AFN without "+".
        numeric: how numbers enter: `fields` or `bottom_mlp`.
        bottom: hidden layers of the bottom MLP.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.AFNConfig(), small_inputs(), seed=0)).__name__
        'AFN'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_neurons", 64, 1536, log=True),
        *layers("deep", width=(64, 1024), depth=(1, 4)),
        *layers("beside", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["afn"] = "afn"
    embedding_dim: Dim = 16
    num_neurons: Count = 1000
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(400,)))
    beside: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(400, 400, 400)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        check_stackable(self.numeric, where="AFN settings")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: a vector, and a second one for the MLP beside."""
        extra = self.embedding_dim if self.beside.hidden_dims else 0
        return inputs.table_columns(self.embedding_dim, extra=extra)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> AFN:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return AFN(self, inputs=inputs, embeddings=embeddings)


class AFN(RankingModel):
    """Products of learned powers of fields; with an MLP on embeddings of its own beside them AFN+."""

    def __init__(self, config: AFNConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        num_labels = len(inputs.labels)
        dim = config.embedding_dim
        has_beside = len(config.beside.hidden_dims) > 0
        extra = dim if has_beside else 0
        self.columns = ExtraColumns(self.field_dims, extra_dims=[extra] * len(self.field_dims))
        self.stack = self._stack(self.columns.main_dims)
        num_fields = self.stack.num_fields
        self.neurons = LogarithmicNeurons(num_fields, num_neurons=config.num_neurons, dim=dim)
        self.deep = MLP(config.num_neurons * dim, config=config.deep, output_dim=num_labels)
        self.stack_beside: StackedInputs | None = None
        self.beside: MLP | None = None
        self.output: Linear | None = None
        if has_beside:
            self.stack_beside = self._stack(self.columns.extra_dims)
            self.beside = MLP(num_fields * dim, config=config.beside, output_dim=num_labels)
            self.output = Linear(2 * num_labels, num_labels)
        initialise([child for child in self.children() if child is not embeddings], config.init)

    def _stack(self, field_dims: Sequence[int]) -> StackedInputs:
        config = self.config
        return StackedInputs(
            self.inputs,
            field_dims=field_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )

    def output_biases(self) -> Sequence[Tensor]:
        """See `Model.output_biases`."""
        return biases_of([self.deep.output if self.output is None else self.output])

    def closing_maps(self) -> Sequence[nn.Linear]:
        """See `Model.closing_maps`: AFN's; what AFN+ adds up are two logits, and no representation."""
        return linear_maps([self.deep.output]) if self.output is None else ()

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The neurons and what is above them; with the MLP beside, a map of both."""
        main_BX, extra_BX = self.columns(fields_BX)
        neurons_BMD = self.neurons(self.stack(dense_BN, main_BX, vectors))
        logits_BL = self.deep(neurons_BMD.flatten(1))
        if self.stack_beside is None or self.beside is None or self.output is None:
            return logits_BL
        beside_BL = self.beside(self.stack_beside(dense_BN, extra_BX, vectors).flatten(1))
        return self.output(torch.cat([logits_BL, beside_BL], dim=1))
