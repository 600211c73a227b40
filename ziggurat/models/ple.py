"""PLE: progressive layered extraction (Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning
Model for Personalized Recommendations", RecSys 2020).

    level 1    x ─► experts of label 1 ─┐
               x ─► shared experts ─────┼─► gate of label 1 (own and shared experts) ─► x_1
               x ─► experts of label 2 ─┤   gate of label 2 (own and shared experts) ─► x_2
                                        └─► shared gate     (all experts)            ─► x_s
    level 2    the same on x_1, x_s, x_2; the last level has no shared gate
    above      x_k ─► MLP ─► logit k

A gate reads the input of its own experts: x_k that of label k, x_s the shared one. Other than in MMoE, the experts of a
label get no other label's gradient at the last level, so that a label which learns fast does not take over what another
one needs (the *seesaw*). One level is the paper's CGC (customised gate control).

Cost: at each level (L·own + shared) experts, and gates of 2·in·(own + shared) FLOPs a label and sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
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
class PLEConfig:
    """Settings of the model `PLE`.

    Args:
        embedding_dim: D, columns of each table.
        num_levels: levels of experts; 1 is CGC.
        num_shared_experts: of each level.
        num_own_experts: of each level and label.
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
        >>> type(zg.build_model(zg.PLEConfig(), small_inputs(), seed=0)).__name__
        'PLE'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("num_levels", 1, 3),
        Integers("num_shared_experts", 1, 4),
        Integers("num_own_experts", 1, 4),
        *layers("expert", width=(32, 512), depth=(1, 2)),
        *layers("head", width=(16, 256), depth=(1, 2)),
    )

    kind: Literal["ple"] = "ple"
    embedding_dim: Dim = 16
    num_levels: int = 2
    num_shared_experts: int = 2
    num_own_experts: int = 2
    expert: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256,)))
    gate: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=()))
    head: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(64,)))
    funnel: bool = False
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)

    def __post_init__(self) -> None:
        counts = {
            "num_levels": self.num_levels,
            "num_shared_experts": self.num_shared_experts,
            "num_own_experts": self.num_own_experts,
        }
        check_experts(self.expert, counts=counts, where="PLE settings")

    def check_labels(self, labels: Sequence[Label]) -> None:
        """Refuse labels of a schema that are no funnel, where they are to be one."""
        if self.funnel:
            refuse_unknown_steps(labels, where="model.funnel = true, model ple")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> PLE:
        """The model on tables of these columns."""
        return PLE(self, inputs=inputs, embeddings=embeddings, towers=towers)


class ExtractionLevel(nn.Module):
    """Own and shared experts, mixed for each label, and for the level above.

    Args:
        input_dim: width of every input.
        num_labels: L.
        config: experts and gates.
        is_last: without the shared gate, whose output nobody would read.
    """

    def __init__(self, input_dim: int, *, num_labels: int, config: PLEConfig, is_last: bool) -> None:
        super().__init__()
        num_own = config.num_own_experts
        num_shared = config.num_shared_experts
        self.own = nn.ModuleList(
            Experts(input_dim, config=config.expert, num_experts=num_own) for _ in range(num_labels)
        )
        self.shared = Experts(input_dim, config=config.expert, num_experts=num_shared)
        self.gates = nn.ModuleList(
            Gate(input_dim, config=config.gate, num_experts=num_own + num_shared) for _ in range(num_labels)
        )
        num_all = num_labels * num_own + num_shared
        self.shared_gate = None if is_last else Gate(input_dim, config=config.gate, num_experts=num_all)
        self.output_dim = self.shared.output_dim

    def forward(
        self, own: list[Float[Tensor, "B I"]], shared_BI: Float[Tensor, "B I"]
    ) -> tuple[list[Float[Tensor, "B H"]], Float[Tensor, "B H"]]:
        """Return the inputs of the level above: one for each label, and the shared one, which the last level leaves."""
        own_experts = [experts(inputs_BI) for experts, inputs_BI in zip(self.own, own, strict=True)]
        shared_BEH = self.shared(shared_BI)
        mixed = [
            gate(inputs_BI, torch.cat([experts_BEH, shared_BEH], dim=1))
            for gate, inputs_BI, experts_BEH in zip(self.gates, own, own_experts, strict=True)
        ]
        if self.shared_gate is None:
            return mixed, shared_BI
        return mixed, self.shared_gate(shared_BI, torch.cat([*own_experts, shared_BEH], dim=1))


class PLE(RankingModel):
    """Levels of own and shared experts, and a network for each label.

    Raises:
        ConfigError: a funnel is asked for, and a label is not binary.
    """

    def __init__(
        self,
        config: PLEConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        if config.funnel:
            check_funnel(inputs, where="model.funnel = true, model ple")
        self.config = config
        self.flat = FlatInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim if towers is None else towers.dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        self.levels = nn.ModuleList()
        width = self.flat.output_dim
        for index in range(config.num_levels):
            is_last = index == config.num_levels - 1
            level = ExtractionLevel(width, num_labels=len(inputs.labels), config=config, is_last=is_last)
            self.levels.append(level)
            width = level.output_dim
        self.heads = Heads(
            width,
            config=config.head,
            num_labels=len(inputs.labels),
            sharing=HeadSharing.SEPARATE,
            is_funnel=config.funnel,
        )
        initialise([self.flat, self.levels, self.heads], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Extract level by level, then say each label."""
        shared_BI = self.flat(dense_BN, fields_BX, vectors)
        own = [shared_BI] * len(self.inputs.labels)
        for level in self.levels:
            own, shared_BI = level(own, shared_BI)
        return self.heads(own)
