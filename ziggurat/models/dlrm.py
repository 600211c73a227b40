"""DLRM: dot products between all pairs of fields (Naumov et al., arXiv 1906.00091).

    numbers ──► bottom MLP ──► z ──┬──────────────────────────┐
    table 1 ──► e_1 ───────────────┤  ⟨z,e_1⟩ ⟨z,e_2⟩ ⟨e_1,e_2⟩ … ──► concat ──► top MLP ──► logit
    table 2 ──► e_2 ───────────────┘

    logit = top([z, ⟨x_i, x_j⟩ for i < j]),   x = (z, e_1, …, e_F, projected pretrained vectors)

With `top_start = sum_of_pairs` the top MLP starts as a factorisation machine beside what is drawn:

    u_0, u_1 = relu(±Σ_{i<j} ⟨x_i, x_j⟩),  then relu(±(u_0 − u_1)) in every layer,  logit = u_0 − u_1 + drawn

so every product reaches the logit with a weight of 1 from the first step on. Behind drawn weights alone its gradient is
small and its sign a matter of luck: on tables of few rows the model then stands for hundreds of steps where single
features have brought it, and with some seeds never leaves (docs/experiments/2026-11-26-first-model-of-few-rows.md).

With `interaction = cat` the fields go to the top MLP as they are (FuxiCTR's `interaction_op="cat"`, the best choice of
the BARS runs on sets without numbers). Sizes and activations follow the paper's code and TorchRec: every layer of the
bottom MLP is activated, also its last to D; z itself joins the products on their way up. With towers, e_1 … are the
fields that leave the tower modules, and D is theirs.

Cost: the dot products take 2·F²·D FLOPs a sample, the first top layer 2·(D + F(F−1)/2)·h, usually the largest part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import DenseInputs, NumericInput
from ziggurat.models.blocks.dot import PairwiseDot
from ziggurat.models.blocks.fields import FieldAlignment
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.interactions.second_order import largest_start
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig, initialise, padding_columns
from ziggurat.models.contract.growth import widened
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.typed import Dim, checked


class Interaction(StrEnum):
    """Interactions between the fields."""

    DOT = "dot"  # all pairwise dot products
    CAT = "cat"  # none: the fields side by side


class TopStart(StrEnum):
    """Choices of what the top MLP computes before training."""

    DRAWN = "drawn"  # what its drawn weights make of its input
    SUM_OF_PAIRS = "sum_of_pairs"  # the same, plus the sum of all dot products


@dataclass(frozen=True, kw_only=True)
@checked
class DLRMConfig:
    """Settings of the model `DLRM`.

    Args:
        embedding_dim: D, columns of each table and width of each field.
        interaction: dot products, or plain concatenation.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP; a closing layer to D is added. Unused unless numeric is bottom_mlp.
        top: hidden layers of the top MLP; a closing layer to the logits is added.
        top_start: whether the top MLP starts with the sum of all dot products, in two units of each hidden layer.
            Unused with plain concatenation, which has no products, and with a hidden layer of a single unit.
        heads: one top MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.DLRMConfig(), small_inputs(), seed=0)).__name__
        'DLRM'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Choices("interaction", ("dot", "cat")),
        *layers("top", width=(64, 1024), depth=(1, 5)),
    )

    kind: Literal["dlrm"] = "dlrm"
    embedding_dim: Dim = 16
    interaction: Interaction = Interaction.DOT
    numeric: NumericInput = NumericInput.BOTTOM_MLP
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    top: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    top_start: TopStart = TopStart.DRAWN
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)

    @classmethod
    def smallest(cls) -> Self:
        """See `Grows`."""
        return cls(embedding_dim=8, numeric=NumericInput.FIELDS, top=MLPConfig(hidden_dims=(48, 48)))

    def deeper(self) -> Self | None:
        """Return None: dots of pairs have no layers."""
        return None

    def wider(self, factor: float) -> Self:
        """Widen the top MLP and, where there are numbers, the bottom MLP."""
        return replace(self, top=widened(self.top, factor), bottom=widened(self.bottom, factor))

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> DLRM:
        """The model on tables of these columns."""
        return DLRM(self, inputs=inputs, embeddings=embeddings, towers=towers)


class DLRM(RankingModel):
    """Dot products between all pairs of fields, between a bottom MLP for numbers and a top MLP."""

    def __init__(
        self,
        config: DLRMConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        dim = config.embedding_dim if towers is None else towers.dim
        self.config = config
        self.dense_inputs = DenseInputs(inputs, dim=dim, numeric=config.numeric, bottom=config.bottom)
        self.alignment = FieldAlignment(self.field_dims, dim=dim)
        num_fields = self.dense_inputs.num_numeric_fields + len(self.field_dims) + self.dense_inputs.num_vector_fields
        beside = self.dense_inputs.num_beside
        self.dot: PairwiseDot | None = None
        if config.interaction is Interaction.DOT:
            if num_fields == 1 and self.dense_inputs.bottom is None:
                raise ConfigError(
                    expected="two fields or more, because a dot product takes two",
                    found="one field, which would have no influence on the logit",
                    where="DLRM with interaction = dot",
                    ways_out=("set model.interaction = cat", "use the DNN model", "add features to the schema"),
                )
            self.dot = PairwiseDot(num_fields, dim=dim)
            # z goes up beside the products; without a bottom MLP there is none.
            passed_on = dim if self.dense_inputs.bottom is not None else 0
            top_dim = beside + passed_on + self.dot.num_pairs
        else:
            top_dim = beside + num_fields * dim
        # The row is written anew anyway, so its zeros cost nothing, and the first product is faster.
        self.top_padding = padding_columns(top_dim) if config.top.hidden_dims else 0
        self.top = Heads(top_dim, config=config.top, num_labels=len(inputs.labels), sharing=config.heads)
        initialise([self.dense_inputs, self.alignment, self.top], config.init)
        if config.top_start is TopStart.SUM_OF_PAIRS and self.dot is not None:
            self.dense_inputs.limit_start(largest_start(num_fields, dim=dim))
            for network in self.top.networks:
                if isinstance(network, MLP):
                    _pass_sum(network, num_inputs=self.dot.num_pairs)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Bottom MLP, interaction, top MLP."""
        numbers_BX = self.dense_inputs.numbers(dense_BN)
        beside = [numbers_BX] if self.dense_inputs.num_beside else []
        numeric = [numbers_BX] if self.dense_inputs.num_numeric_fields else []
        flat = [*numeric, *self.alignment(fields_BX), *self.dense_inputs.vectors(vectors)]
        if self.dot is None:
            return self.top(torch.cat([*beside, *flat], dim=1))
        padding = 0 if fields_BX.is_meta else self.top_padding  # no work where FLOPs are counted (`model_cost.py`)
        if not flat:
            return self.top(F.pad(numbers_BX, (0, padding)))
        passed = self.alignment.dim if self.dense_inputs.bottom is not None else 0  # the bottom MLP's field goes first
        row_BW = self.dot.row(flat, passed=passed, padding=padding)
        return self.top(torch.cat([*beside, row_BW], dim=1) if beside else row_BW)


def _pass_sum(network: MLP, *, num_inputs: int) -> None:
    """Let an MLP start as what it is plus the sum of its last inputs.

    Two units of each hidden layer carry the sum and its negative: a(s) − a(−s) is s for ReLU, GELU, SiLU and hard
    swish, so the next layer reads the whole sum as the difference of the two.
    """
    hidden = [layer for layer in network.layers if isinstance(layer, nn.Linear)]
    # A single unit cannot carry both signs through ReLU: the MLP stays as it was drawn.
    output = network.output
    if output is None or any(layer.out_features < 2 for layer in hidden):
        return
    with torch.no_grad():
        for index, layer in enumerate(hidden):
            # Two units are taken from what was drawn: nothing else reaches them.
            layer.weight[:2] = 0.0
            if layer.bias is not None:
                layer.bias[:2] = 0.0
            for unit, sign in ((0, 1.0), (1, -1.0)):
                if index == 0:
                    layer.weight[unit, layer.in_features - num_inputs :] = sign
                else:
                    layer.weight[unit, 0] = sign
                    layer.weight[unit, 1] = -sign
        if hidden:
            output.weight[:, 0] = 1.0
            output.weight[:, 1] = -1.0
        else:
            output.weight[:, output.in_features - num_inputs :] = 1.0
