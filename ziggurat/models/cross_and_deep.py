"""A cross network beside or below a deep network: what DCNv2 and GDCN share.

    parallel     x₀ ─┬─► cross ─► c ─┐                        stacked     x₀ ─► cross ─► deep ─► logits
                     └─► deep ──► h ─┴─► Linear ─► logits     cross_only  x₀ ─► cross ─► Linear ─► logits

x₀ is everything a sample carries, flat (`flat_inputs.py`). The cross network is shared by all labels, also where each
has a deep network of its own. Wang et al., arXiv 1708.05123 (parallel) and 2008.13535, section 3 (stacked).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.closing_maps import linear_maps
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig, initialise
from ziggurat.models.blocks.output_biases import biases_of
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.precision.products import Linear


class Structure(StrEnum):
    """Ways to combine cross and deep network."""

    PARALLEL = "parallel"
    STACKED = "stacked"
    CROSS_ONLY = "cross_only"


class CrossAndDeepConfig(Protocol):
    """The settings that a model with a cross and a deep network has, beside those of its cross network."""

    @property
    def embedding_dim(self) -> int:
        """D, columns of each table."""
        ...

    @property
    def structure(self) -> Structure:
        """Return the way in which cross and deep network are combined."""
        ...

    @property
    def deep(self) -> MLPConfig:
        """Hidden layers of the deep network."""
        ...

    @property
    def numeric(self) -> NumericInput:
        """Return the way in which numbers enter."""
        ...

    @property
    def bottom(self) -> MLPConfig:
        """Hidden layers of the bottom MLP."""
        ...

    @property
    def heads(self) -> HeadSharing:
        """One deep network for all labels, or one each."""
        ...

    @property
    def init(self) -> Init:
        """Starting weights of the dense network."""
        ...


def check_structure(config: CrossAndDeepConfig, *, where: str) -> None:
    """Refuse settings of a deep network that the structure has no use for, or lacks.

    Raises:
        ConfigError: separate heads without a deep network, or a deep network without layers beside the cross network.
    """
    if config.structure is Structure.CROSS_ONLY and config.heads is HeadSharing.SEPARATE:
        raise ConfigError(
            expected="heads = shared with structure = cross_only, which has no deep network to separate",
            found="heads = separate",
            where=where,
            ways_out=("set structure = parallel or stacked", "set heads = shared"),
        )
    if config.structure is Structure.PARALLEL and not config.deep.hidden_dims:
        raise ConfigError(
            expected="at least one hidden layer in the deep network of structure = parallel",
            found="deep.hidden_dims = ()",
            where=where,
            ways_out=("set deep.hidden_dims", "set structure = cross_only"),
        )


class CrossAndDeep(RankingModel):
    """The base of models with a cross network; a subclass brings which one.

    Args:
        config: of the model.
        make_cross: makes the cross network on x₀ of so many numbers, which gives as many.
        inputs: names and sizes of the features.
        embeddings: the tables.
        towers: groups of features behind tower modules; None for a flat model.
    """

    def __init__(
        self,
        config: CrossAndDeepConfig,
        *,
        make_cross: Callable[[int], nn.Module],
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        self.structure = config.structure
        self.flat = FlatInputs(
            inputs,
            field_dims=self.field_dims,
            dim=config.embedding_dim if towers is None else towers.dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        dim = self.flat.output_dim
        num_labels = len(inputs.labels)
        self.cross = make_cross(dim)
        self.deep = nn.ModuleList()
        self.stacked: Heads | None = None
        if config.structure is Structure.STACKED:
            self.stacked = Heads(dim, config=config.deep, num_labels=num_labels, sharing=config.heads)
            outputs = []
        elif config.structure is Structure.CROSS_ONLY:
            outputs = [Linear(dim, num_labels)]
        else:
            # One network with an output for each label, or a network for each.
            num_networks = num_labels if config.heads is HeadSharing.SEPARATE else 1
            self.deep.extend(MLP(dim, config=config.deep) for _ in range(num_networks))
            width = dim + config.deep.hidden_dims[-1]
            outputs = [Linear(width, num_labels // num_networks) for _ in range(num_networks)]
        self.outputs = nn.ModuleList(outputs)
        # Tables and towers draw from streams of the seed of their own.
        initialise([child for child in self.children() if child not in (embeddings, towers)], config.init)

    def output_biases(self) -> Sequence[Tensor]:
        """See `Model.output_biases`."""
        return biases_of(self.outputs) or super().output_biases()

    def closing_maps(self) -> Sequence[nn.Linear]:
        """See `Model.closing_maps`."""
        return linear_maps([*self.outputs]) or super().closing_maps()

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """Cross and deep network on x₀."""
        flat_Bd = self.flat(dense_BN, fields_BX, vectors)
        # Shared by all labels, also where each has a deep network of its own.
        crossed_Bd = self.cross(flat_Bd)
        if self.stacked is not None:
            return self.stacked(crossed_Bd)
        if self.structure is Structure.CROSS_ONLY:
            return self.outputs[0](crossed_Bd)
        logits = [
            output(torch.cat([crossed_Bd, deep(flat_Bd)], dim=1))
            for deep, output in zip(self.deep, self.outputs, strict=True)
        ]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)
