"""FinalMLP: two MLPs that see different selections of the features, fused by a bilinear form (arXiv 2304.00902).

    x₀ ─┬─ ⊙ gate₁ ─► MLP₁ ─► h₁ ─┐
        │                         ├─► w_x · h₁ + w_y · h₂ + Σ_heads h₁ᵀ W h₂ + b ─► logits
        └─ ⊙ gate₂ ─► MLP₂ ─► h₂ ─┘

    gate_i = 2 · sigmoid(MLP(context_i))       context_i: second embeddings of chosen features, or a learned vector

The two streams start alike; what makes them differ is their context, usually something of the user for one and of the
item for the other (BARS on Frappe: `user` and `item`; on Criteo: all numbers, and one category). The embeddings that a
gate reads are its own, as in FuxiCTR: extra columns of the features' tables (`extra_columns.py`), and for numbers a
vector x_n · v_n each.

Cost: 2·|x₀|·h a stream, 2·|context|·g + 2·g·|x₀| a gate; the fusion: `blocks/interactions/bilinear.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericFields, NumericInput
from ziggurat.models.blocks.extra_columns import ExtraColumns
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.interactions.bilinear import BilinearFusion
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig, initialise
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Choices, Dimension, Integers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.typed import Dim, checked


class Selection(StrEnum):
    """Choices of whether features are selected by gates."""

    NONE = "none"
    GATES = "gates"


@dataclass(frozen=True, kw_only=True)
@checked
class FinalMLPConfig:
    """Settings of the model `FinalMLP`.

    Args:
        embedding_dim: D, columns of each table; those of context features have D more for each gate that reads them.
        first: hidden layers of the first stream.
        second: hidden layers of the second stream.
        selection: gates before the streams, or none.
        gate: hidden layers of each gate's MLP.
        first_context: names of the features that the first gate reads: numbers, or features with an embedding; () for a
            learned vector.
        second_context: those of the second gate.
        num_heads: H of the bilinear form; divides the last layers of both streams.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.FinalMLPConfig(), small_inputs(), seed=0)).__name__
        'FinalMLP'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        Integers("first.width", 80, 800, step=80),  # which every number of heads below divides
        Integers("first.depth", 1, 3),
        Integers("second.width", 80, 800, step=80),
        Integers("second.depth", 1, 3),
        Choices("num_heads", ("1", "2", "5", "10", "20")),
        Choices("selection", ("gates", "none")),
        Integers("gate.width", 64, 800, log=True, only=("selection", ("gates",))),
    )

    kind: Literal["finalmlp"] = "finalmlp"
    embedding_dim: Dim = 16
    first: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 256)))
    second: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 256)))
    selection: Selection = Selection.GATES
    gate: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(64,)))
    first_context: tuple[str, ...] = ()
    second_context: tuple[str, ...] = ()
    num_heads: int = 1
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def __post_init__(self) -> None:
        if not self.first.hidden_dims or not self.second.hidden_dims:
            raise ConfigError(
                expected="a hidden layer or more in both streams",
                found=f"{self.first.hidden_dims} and {self.second.hidden_dims}",
                where="FinalMLP settings",
                ways_out="set first.hidden_dims and second.hidden_dims",
            )

    @property
    def contexts(self) -> tuple[tuple[str, ...], ...]:
        """Names that each gate reads; () without gates."""
        return (self.first_context, self.second_context) if self.selection is Selection.GATES else ()

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: a vector, and another for each gate that reads one of its features."""
        extra = context_columns(self, inputs)
        columns = inputs.table_columns(self.embedding_dim)
        return {name: width + extra.get(name, 0) for name, width in columns.items()}

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> FinalMLP:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return FinalMLP(self, inputs=inputs, embeddings=embeddings)


def context_columns(config: FinalMLPConfig, inputs: InputSpec) -> dict[str, int]:
    """Extra columns of each table: D for every gate that reads one of its features.

    Raises:
        ConfigError: a gate reads a feature that does not exist or has neither a number nor an embedding.
    """
    table_of = {each.name: each.table for each in inputs.fields}
    extra = dict.fromkeys(table_of.values(), 0)
    for names in config.contexts:
        unknown = sorted(set(names) - set(table_of) - set(inputs.dense))
        if unknown:
            raise ConfigError(
                expected=f"names of features: {', '.join((*inputs.dense, *table_of))}",
                found=", ".join(unknown),
                where="FinalMLP, model.first-context and model.second-context",
                ways_out="correct the names",
            )
        # A set: features that share a table share its extra columns for this gate.
        for table in {table_of[name] for name in names if name in table_of}:
            extra[table] += config.embedding_dim
    return extra


class ContextGate(nn.Module):
    """A gate 2 · sigmoid(MLP(context)): a number from 0 to 2 for each column of x₀.

    Args:
        names: of the context's features.
        inputs: all features.
        starts: first of the gate's D extra columns in the rows of each field, counted from the extra columns of all
            fields; for the fields among `names`.
        output_dim: width of x₀.
        config: D, the MLP.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        inputs: InputSpec,
        starts: dict[str, int],
        output_dim: int,
        config: FinalMLPConfig,
    ) -> None:
        super().__init__()
        self.dim = config.embedding_dim
        self.numbers = [index for index, name in enumerate(inputs.dense) if name in names]
        self.starts = [starts[each.name] for each in inputs.fields if each.name in names]
        self.numeric = NumericFields(len(self.numbers), dim=self.dim) if self.numbers else None
        # A context for all samples alike, where no feature is named.
        self.learned = None if names else nn.Parameter(torch.zeros(1, self.dim))
        width = self.dim * max(1, len(self.numbers) + len(self.starts))
        self.mlp = MLP(width, config=config.gate, output_dim=output_dim, output_bias=config.gate.bias)

    def forward(self, dense_BN: Float[Tensor, "B N"], extra_BE: Float[Tensor, "B E"]) -> Float[Tensor, "B d"]:
        """The gate of every sample (one row for all, where the context is a learned vector)."""
        if self.learned is not None:
            # Times 2: a gate whose MLP says 0 passes everything as it is.
            return 2.0 * self.mlp(self.learned).sigmoid()
        parts = [] if self.numeric is None else [self.numeric(dense_BN[:, self.numbers]).flatten(1)]
        parts += [extra_BE[:, start : start + self.dim] for start in self.starts]
        return 2.0 * self.mlp(torch.cat(parts, dim=1)).sigmoid()


class FinalMLP(RankingModel):
    """Two MLPs that see different selections of the features, fused by a bilinear form."""

    def __init__(self, config: FinalMLPConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        extra = context_columns(config, inputs)
        self.columns = ExtraColumns(self.field_dims, extra_dims=[extra[each.table] for each in inputs.fields])
        self.flat = FlatInputs(
            inputs,
            field_dims=self.columns.main_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        dim = self.flat.output_dim
        starts = _starts(config, inputs)
        self.gates = nn.ModuleList(
            ContextGate(names, inputs=inputs, starts=gate_starts, output_dim=dim, config=config)
            for names, gate_starts in zip(config.contexts, starts, strict=True)
        )
        self.first = MLP(dim, config=config.first)
        self.second = MLP(dim, config=config.second)
        self.fusion = BilinearFusion(
            self.first.output_dim,
            self.second.output_dim,
            num_heads=config.num_heads,
            num_labels=len(inputs.labels),
        )
        initialise([self.flat, self.gates, self.first, self.second, self.fusion], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Gates, streams, fusion."""
        main_BX, extra_BE = self.columns(fields_BX)
        flat_Bd = self.flat(dense_BN, main_BX, vectors)
        # Without gates both streams see everything.
        seen = [flat_Bd * gate(dense_BN, extra_BE) for gate in self.gates] or [flat_Bd, flat_Bd]
        return self.fusion(self.first(seen[0]), self.second(seen[1]))


def _starts(config: FinalMLPConfig, inputs: InputSpec) -> list[dict[str, int]]:
    """Return for each gate where its columns begin in the extra columns of all fields, by field."""
    table_of = {each.name: each.table for each in inputs.fields}
    read = [{table_of[name] for name in names if name in table_of} for names in config.contexts]
    starts: list[dict[str, int]] = [{} for _ in config.contexts]
    column = 0
    for each in inputs.fields:
        for gate, tables in enumerate(read):
            if each.table in tables:
                starts[gate][each.name] = column
                column += config.embedding_dim
    return starts
