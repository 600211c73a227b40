"""MMoE: multi-gate mixture of experts (Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
Mixture-of-Experts", KDD 2018).

    x ──┬─► expert 1 ─┐
        ├─► …         ├─► gate of label 1 ─► f_1 ─► MLP ─► logit 1
        └─► expert E ─┘─► gate of label 2 ─► f_2 ─► MLP ─► logit 2

    f_k(x) = Σ_i softmax(W_k x)_i · e_i(x)

Labels that agree use the same experts, labels that pull in different directions use others: what is shared is learned,
and no longer all or nothing. One expert is the *shared bottom* (Caruana 1997), and needs no gate.

Cost: E·2·d·h FLOPs a sample for the first layers of experts (d = width of x), L·2·d·E for the gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.features.labels import Label
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.experts import Experts, Gate, check_experts
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.funnel import check_funnel, refuse_unknown_steps
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import Init, MLPConfig, initialise
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class MMoEConfig:
    """Settings of the model `MMoE`.

    Args:
        embedding_dim: D, columns of each table.
        num_experts: E; 1 is a shared bottom.
        expert: hidden layers of each expert.
        gate: hidden layers of each gate; none, as in the paper, for a linear map.
        head: hidden layers of each label's own network.
        funnel: labels happen one after another, in their order; see `blocks/funnel.py`.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.MMoEConfig(), small_inputs(), seed=0)).__name__
        'MMoE'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_experts", 1, 12),
        *layers("expert", width=(32, 512), depth=(1, 3)),
        *layers("head", width=(16, 256), depth=(1, 2)),
    )

    kind: Literal["mmoe"] = "mmoe"
    embedding_dim: Dim = 16
    num_experts: int = 8
    expert: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 128)))
    gate: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=()))
    head: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(64,)))
    funnel: bool = False
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)

    def __post_init__(self) -> None:
        check_experts(self.expert, counts={"num_experts": self.num_experts}, where="MMoE settings")

    def check_labels(self, labels: Sequence[Label]) -> None:
        """Refuse labels of a schema that are no funnel, where they are to be one."""
        if self.funnel:
            refuse_unknown_steps(labels, where="model.funnel = true, model mmoe")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> MMoE:
        """The model on tables of these columns."""
        return MMoE(self, inputs=inputs, embeddings=embeddings, towers=towers)


class MMoE(RankingModel):
    """Experts for all labels, a gate and a network for each.

    Raises:
        ConfigError: a funnel is asked for, and a label is not binary.
    """

    def __init__(
        self,
        config: MMoEConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        if config.funnel:
            check_funnel(inputs, where="model.funnel = true, model mmoe")
        self.config = config
        self.flat = FlatInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim if towers is None else towers.dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        width = self.flat.output_dim
        self.experts = Experts(width, config=config.expert, num_experts=config.num_experts)
        # One expert is weighted by 1: no gate would learn anything.
        num_gates = len(inputs.labels) if config.num_experts > 1 else 0
        self.gates = nn.ModuleList(
            Gate(width, config=config.gate, num_experts=config.num_experts) for _ in range(num_gates)
        )
        self.heads = Heads(
            self.experts.output_dim,
            config=config.head,
            num_labels=len(inputs.labels),
            sharing=HeadSharing.SEPARATE,
            is_funnel=config.funnel,
        )
        initialise([self.flat, self.experts, self.gates, self.heads], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Mix the experts for each label."""
        inputs_BI = self.flat(dense_BN, fields_BX, vectors)
        experts_BEH = self.experts(inputs_BI)
        if not self.gates:
            return self.heads(experts_BEH[:, 0])
        return self.heads([gate(inputs_BI, experts_BEH) for gate in self.gates])
