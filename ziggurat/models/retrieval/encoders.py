"""UserEncoder and ItemEncoder: the features of one side, through an interaction, to one vector.

    numbers, fields, pretrained vectors of the item ──► interaction ──► (B, D) ──► length 1, if asked for

What stands inside is the dense network of a ranking model: it gives as many "logits" as the vector has columns. So
every interaction of this package can serve as an encoder, with its own options at their defaults. The lookups are not
an encoder's: all features are looked up together, and each encoder reads the columns of its own side.

Towers stand below the encoders as below any interaction, if no tower mixes the two sides.

Cost: that of the two dense networks; the item's is paid once an item when vectors are written ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec, VectorSpec
from ziggurat.models.autoint import AutoIntConfig
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.models.contract.model import Embedded
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.dcn_v2 import DCNv2Config
from ziggurat.models.dlrm import DLRMConfig
from ziggurat.models.dnn import DNNConfig
from ziggurat.models.finalmlp import FinalMLPConfig
from ziggurat.models.masknet import MaskNetConfig
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.wukong import WukongConfig
from ziggurat.typed import checked

_SHORTEST = 1e-6  # a shorter vector is divided by this instead of its length, so that gradients stay finite


class EncoderInteraction(StrEnum):
    """Networks that combine the features of one side."""

    DNN = "dnn"  # an MLP over all of them side by side
    DCN_V2 = "dcn_v2"
    DLRM = "dlrm"
    MASKNET = "masknet"
    AUTOINT = "autoint"
    FINALMLP = "finalmlp"
    WUKONG = "wukong"


class VectorLength(StrEnum):
    """Choices of whether vectors are brought to one length."""

    UNIT = "unit"  # 1: the inner product is a cosine
    FREE = "free"  # as they come: a long item vector is one that many users like


@dataclass(frozen=True, kw_only=True)
@checked
class EncoderConfig:
    """Settings of one encoder.

    Args:
        interaction: what combines the features; its own options have their defaults.
        hidden: hidden layers of its MLPs.
    """

    interaction: EncoderInteraction = EncoderInteraction.DNN
    hidden: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(256, 128)))


@dataclass(frozen=True)
class SideColumns:
    """The columns of `Embedded` that belong to one side.

    Args:
        dense: runs of columns of the numbers.
        fields: runs of columns of the fields.
        field_dims: numbers of each field of this side, in order.
        vectors: pretrained vectors of this side.
        num_dense: its numbers.
    """

    dense: tuple[slice, ...]
    fields: tuple[slice, ...]
    field_dims: tuple[int, ...]
    vectors: tuple[VectorSpec, ...]
    num_dense: int

    @property
    def is_empty(self) -> bool:
        """True if no feature belongs to it."""
        return not (self.num_dense or self.field_dims or self.vectors)


def side_of(
    inputs: InputSpec, *, names: Collection[str], field_dims: Sequence[int], towers: TowerLayer | None = None
) -> SideColumns:
    """The side of a model that these features form.

    Args:
        inputs: of the whole model.
        names: of the features of this side.
        field_dims: numbers of each pooled field of the model.
        towers: below the encoders, if any.

    Raises:
        ConfigError: a tower has features of both sides.
    """
    if towers is None:
        fields = [(spec.name in names, (dim,)) for spec, dim in zip(inputs.fields, field_dims, strict=True)]
    else:
        fields = [
            (_is_of_side(tower, number, names), towers.module(number).output_field_dims)
            for number, tower in enumerate(towers.towers.towers)
        ]
    taken: list[tuple[bool, int]] = [(mine, dim) for mine, dims in fields for dim in dims]
    return SideColumns(
        dense=_runs([(name in names, 1) for name in inputs.dense]),
        fields=_runs(taken),
        field_dims=tuple(dim for mine, dim in taken if mine),
        vectors=tuple(spec for spec in inputs.vectors if spec.name in names),
        num_dense=sum(name in names for name in inputs.dense),
    )


class Encoder(nn.Module):
    """The network of one side; `UserEncoder` and `ItemEncoder` are the two.

    Args:
        config: which interaction, and its hidden layers.
        side: the columns it reads.
        dim: numbers of each field (columns of the tables, or what towers make of them).
        output_dim: D, columns of the vector.
        length: whether vectors have length 1.
    """

    num_vectors = 1

    def __init__(
        self, config: EncoderConfig, *, side: SideColumns, dim: int, output_dim: int, length: VectorLength
    ) -> None:
        super().__init__()
        self.config = config
        self.side = side
        self.length = length
        self.network = _network(config, side=side, dim=dim, output_dim=output_dim)

    def forward(self, embedded: Embedded) -> Float[Tensor, "B VD"]:
        """The vectors of all samples, FP32; several of a sample stand side by side."""
        side = self.side
        vectors = {spec.name: embedded.vectors[spec.name] for spec in side.vectors}
        dense_BN = _take(embedded.dense, side.dense)
        fields_BX = _take(embedded.fields, side.fields)
        # FP32 before lengths are taken: BF16 knows a number to two or three digits.
        vectors_BD = self.network.interact(dense_BN, fields_BX, vectors).float()
        if self.length is not VectorLength.UNIT:
            return vectors_BD
        if self.num_vectors == 1:
            return F.normalize(vectors_BD, dim=1, eps=_SHORTEST)
        # Each vector by itself: they are compared one at a time.
        return F.normalize(vectors_BD.unflatten(1, (self.num_vectors, -1)), dim=2, eps=_SHORTEST).flatten(1)


class UserEncoder(Encoder):
    """The network of user and moment: who asks, what they liked before, when and where.

    Args:
        num_vectors: V of each user, one for each task; the last layer is theirs, what is below they share.
        others: see `Encoder`.
    """

    def __init__(self, config: EncoderConfig, *, num_vectors: int = 1, output_dim: int, **others: Any) -> None:
        super().__init__(config, output_dim=num_vectors * output_dim, **others)
        self.num_vectors = num_vectors


class ItemEncoder(Encoder):
    """The network of the item: what is known of it before anybody asks."""


def _network(config: EncoderConfig, *, side: SideColumns, dim: int, output_dim: int) -> RankingModel:
    """The dense network of a ranking model with an output for each column of the vector."""
    # Inputs that say sizes alone: a field of each width, and a label for each column of the vector.
    tables = tuple(TableSpec(name=str(i), num_rows=1, embedding_dim=each) for i, each in enumerate(side.field_dims))
    inputs = InputSpec(
        dense=tuple(map(str, range(side.num_dense))),
        single=tuple(SingleSpec(name=table.name, table=table.name) for table in tables),
        vectors=side.vectors,
        tables=tables,
        labels=tuple(LabelSpec(name=str(column)) for column in range(output_dim)),
    )
    shapes = EmbeddingTables(inputs, EmbeddingConfig(dim=dim), seed=None)  # open tables: shapes, and no memory
    model = _model_config(config, dim=dim).build(inputs, embeddings=shapes, towers=None)
    # The model's own tables look up; here only the network is wanted, and its weights in checkpoints.
    del model.embeddings
    return model


def _model_config(
    config: EncoderConfig, *, dim: int
) -> DNNConfig | DCNv2Config | DLRMConfig | MaskNetConfig | AutoIntConfig | FinalMLPConfig | WukongConfig:
    hidden = config.hidden
    numeric = NumericInput.FIELDS
    match config.interaction:
        case EncoderInteraction.DNN:
            return DNNConfig(embedding_dim=dim, deep=hidden, numeric=numeric)
        case EncoderInteraction.DCN_V2:
            return DCNv2Config(embedding_dim=dim, deep=hidden, numeric=numeric)
        case EncoderInteraction.DLRM:
            return DLRMConfig(embedding_dim=dim, top=hidden, numeric=numeric)
        case EncoderInteraction.MASKNET:
            return MaskNetConfig(embedding_dim=dim, deep=hidden, numeric=numeric)
        case EncoderInteraction.AUTOINT:
            return AutoIntConfig(embedding_dim=dim, deep=hidden, numeric=numeric)
        case EncoderInteraction.FINALMLP:
            return FinalMLPConfig(embedding_dim=dim, first=hidden, second=hidden, numeric=numeric)
        case EncoderInteraction.WUKONG:
            return WukongConfig(embedding_dim=dim, mlp=hidden, head=hidden, numeric=numeric)


def _is_of_side(tower: Sequence[str], number: int, names: Collection[str]) -> bool:
    mine = [name for name in tower if name in names]
    if mine and len(mine) < len(tower):
        others = [name for name in tower if name not in names]
        raise ConfigError(
            expected="towers of user features alone or of item features alone: the two meet in an inner product only",
            found=f"{', '.join(mine[:5])} together with {', '.join(others[:5])}",
            where=f"towers, tower {number}",
            ways_out=(
                "divide the towers by side",
                "give user and item features tables of their own: those that share a table share a tower",
                "train without towers",
            ),
        )
    return bool(mine)


def _runs(columns: Sequence[tuple[bool, int]]) -> tuple[slice, ...]:
    """Neighbouring columns that are wanted, as slices."""
    found: list[slice] = []
    start = 0
    for wanted, width in columns:
        if wanted and found and found[-1].stop == start:
            found[-1] = slice(found[-1].start, start + width)
        elif wanted:
            found.append(slice(start, start + width))
        start += width
    return tuple(found)


def _take(columns_BX: Tensor, slices: Sequence[slice]) -> Tensor:
    if not slices:
        return columns_BX[:, :0]
    parts = [columns_BX[:, each] for each in slices]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
