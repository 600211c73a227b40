"""PEPNet: gates that know the domain scale the features, gates that know user and item scale the hidden units.

    x ─► ⊙ δ(domain, x) ─► o ─┬─► ⊙ δ₁ ─► layer 1 ─► ⊙ δ₂ ─► … ─► linear ─► logit of label 1      networks of
                              └─► ⊙ δ₁ ─► layer 1 ─► ⊙ δ₂ ─► … ─► linear ─► logit of label 2      each label
                                    δ_l(prior, o): one gate unit a layer, other columns for each label

    gate unit    δ(z) = 2 · sigmoid(W' ReLU(W z + b) + b')          from 0 to 2 for each column
    EPNet        o    = δ(domain | x) ⊙ x
    PPNet        h'   = f((δ_l(prior | o) ⊙ h) W_l + b_l)

Chang et al., "PEPNet: Parameter and Embedding Personalized Network for Infusing with Personalized Prior Information",
KDD 2023, arXiv 2302.01115. *Domain* is what tells pages or countries apart (and counts of user and item there), *prior*
what tells people and things apart (user, item, author). One model then serves several domains and labels whose share of
the rows and whose habits differ, without a network for each. Gates read x and o without giving them a gradient, so what
features mean is learned by the networks alone; the named features they read learn from both.

Cost: a gate unit of width g with n outputs has 2·g·(in + n) FLOPs a sample; EPNet has n = |x|, the unit below a layer
of L labels n = L·(width of that layer's input).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.labels import Label
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.funnel import check_funnel, refuse_unknown_steps
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import MLP, Activation, Init, MLPConfig, initialise
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.search_space import Dimension, Integers, layers
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@checked
class PEPNetConfig:
    """Settings of the model `PEPNet`.

    Args:
        embedding_dim: D, columns of each table.
        domain: names of the features that tell domains apart, which EPNet reads: numbers, or features with an
            embedding; () for no EPNet.
        prior: names of the features that tell users and items apart, which PPNet reads beside all others; () for none
            beside them.
        deep: hidden layers of each label's own network.
        gate_dim: g, hidden units of every gate unit.
        funnel: labels happen one after another, in their order; see `blocks/funnel.py`.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> type(zg.build_model(zg.PEPNetConfig(), small_inputs(), seed=0)).__name__
        'PEPNet'
    """

    reads: ClassVar[Reads] = Reads.SAMPLES
    search: ClassVar[tuple[Dimension, ...]] = (
        Integers("embedding_dim", 8, 32, step=2),
        *layers("deep", width=(32, 512), depth=(1, 3)),
        Integers("gate_dim", 16, 256, log=True),
    )

    kind: Literal["pepnet"] = "pepnet"
    embedding_dim: Dim = 16
    domain: tuple[str, ...] = ()
    prior: tuple[str, ...] = ()
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 128, 64)))
    gate_dim: Dim = 64
    funnel: bool = False
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def check_labels(self, labels: Sequence[Label]) -> None:
        """Refuse labels of a schema that are no funnel, where they are to be one."""
        if self.funnel:
            refuse_unknown_steps(labels, where="model.funnel = true, model pepnet")

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D.

        Raises:
            ConfigError: a gate reads a feature that does not exist or has neither a number nor an embedding.
        """
        for setting, names in (("domain", self.domain), ("prior", self.prior)):
            known = (*inputs.dense, *(each.name for each in inputs.fields))
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ConfigError(
                    expected=f"names of features: {', '.join(known)}",
                    found=", ".join(unknown),
                    where=f"PEPNet, model.{setting}",
                    ways_out=("correct the names", f"leave model.{setting} out"),
                )
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> PEPNet:
        """The model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return PEPNet(self, inputs=inputs, embeddings=embeddings)


class GateUnit(nn.Module):
    """A number from 0 to 2 for each column of what it scales.

    Args:
        names: features that it reads, each once.
        context_dim: width of what it reads beside them, without giving it a gradient.
        inputs: all features.
        field_dims: numbers of each field.
        hidden_dim: g.
        output_dim: columns that it scales.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        context_dim: int,
        inputs: InputSpec,
        field_dims: Sequence[int],
        hidden_dim: int,
        output_dim: int,
    ) -> None:
        super().__init__()
        self.numbers = [index for index, name in enumerate(inputs.dense) if name in names]
        starts = [sum(field_dims[:index]) for index in range(len(field_dims))]
        self.columns = [
            slice(start, start + width)
            for each, start, width in zip(inputs.fields, starts, field_dims, strict=True)
            if each.name in names
        ]
        width = context_dim + len(self.numbers) + sum(each.stop - each.start for each in self.columns)
        self.network = MLP(width, config=MLPConfig(hidden_dims=(hidden_dim,)), output_dim=output_dim)

    def forward(
        self, dense_BN: Float[Tensor, "B N"], fields_BX: Float[Tensor, "B X"], context_BC: Float[Tensor, "B C"]
    ) -> Float[Tensor, "B O"]:
        """Return the gate of every sample."""
        named = [fields_BX[:, each] for each in self.columns]
        if self.numbers:
            named.append(dense_BN[:, self.numbers])
        # Times 2: a gate whose network says 0 passes everything as it is.
        return 2.0 * self.network(torch.cat([*named, context_BC.detach()], dim=1)).sigmoid()


class LabelLayer(nn.Module):
    """One hidden layer of the network of each label.

    Args:
        input_dim: width of every input.
        config: the layer.
        num_labels: L.
    """

    def __init__(self, input_dim: int, *, config: MLPConfig, num_labels: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(MLP(input_dim, config=config) for _ in range(num_labels))

    def forward(self, hidden: list[Float[Tensor, "B H"]]) -> list[Float[Tensor, "B O"]]:
        """Return the hidden units of each label, from those below."""
        return [network(each_BH) for network, each_BH in zip(self.networks, hidden, strict=True)]


class PEPNet(RankingModel):
    """A network for each label, whose inputs and hidden units gates scale by domain, user and item.

    Raises:
        ConfigError: a funnel is asked for, and a label is not binary.
    """

    def __init__(self, config: PEPNetConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        if config.funnel:
            check_funnel(inputs, where="model.funnel = true, model pepnet")
        self.config = config
        self.flat = FlatInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        num_labels = len(inputs.labels)
        width = self.flat.output_dim

        def gate_unit(names: tuple[str, ...], *, output_dim: int) -> GateUnit:
            return GateUnit(
                names,
                context_dim=width,
                inputs=inputs,
                field_dims=self.field_dims,
                hidden_dim=config.gate_dim,
                output_dim=output_dim,
            )

        self.domain_gate = gate_unit(config.domain, output_dim=width) if config.domain else None
        widths = (width, *config.deep.hidden_dims)
        # One below each layer, that of the logits included.
        self.gates = nn.ModuleList(gate_unit(config.prior, output_dim=num_labels * below) for below in widths)
        self.layers = nn.ModuleList(
            LabelLayer(below, config=replace(config.deep, hidden_dims=(above,)), num_labels=num_labels)
            for below, above in zip(widths, config.deep.hidden_dims, strict=False)
        )
        self.heads = Heads(
            widths[-1],
            config=MLPConfig(hidden_dims=(), activation=Activation.IDENTITY),
            num_labels=num_labels,
            sharing=HeadSharing.SEPARATE,
            is_funnel=config.funnel,
        )
        initialise([self.flat, self.domain_gate or nn.Identity(), self.gates, self.layers, self.heads], config.init)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Scale the features by domain, then every layer's input by user and item, for each label."""
        flat_Bd = self.flat(dense_BN, fields_BX, vectors)
        if self.domain_gate is not None:
            flat_Bd = self.domain_gate(dense_BN, fields_BX, flat_Bd) * flat_Bd
        gates = [gate(dense_BN, fields_BX, flat_Bd) for gate in self.gates]
        hidden = [flat_Bd] * len(self.inputs.labels)
        for gate_BO, layer in zip(gates, self.layers, strict=False):
            hidden = layer(_scaled(hidden, gate_BO))
        return self.heads(_scaled(hidden, gates[-1]))


def _scaled(hidden: list[Float[Tensor, "B H"]], gate_BO: Float[Tensor, "B O"]) -> list[Float[Tensor, "B H"]]:
    """Return what the network of each label reads: its hidden units times its columns of a gate."""
    return [part_BH * each_BH for part_BH, each_BH in zip(gate_BO.chunk(len(hidden), dim=1), hidden, strict=True)]
