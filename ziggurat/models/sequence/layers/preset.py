"""LayerPreset: published layers over events by name, and LayerSettings: what makes one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ziggurat.errors import ConfigError
from ziggurat.models.sequence.layers.hstu import HSTULayer, PositionTimeBias, hstu_nvidia, hstu_research, stu
from ziggurat.models.sequence.layers.layer import SequenceLayer
from ziggurat.models.sequence.layers.softmax_block import SoftmaxBlock, ligr, pointwise, sasrec
from ziggurat.ops.attention.problem import AttentionForm


class LayerPreset(StrEnum):
    """Published layers that the model can stack."""

    HSTU = "hstu"  # research code of the paper: bias by position and time
    STU = "stu"  # DLRMv3 and DLRMv4
    HSTU_NVIDIA = "hstu_nvidia"
    SASREC = "sasrec"
    RELU_ATTENTION = "relu_attention"  # SASRec's with ReLU(s) / n in place of softmax: a control
    SILU_ATTENTION = "silu_attention"  # … with SiLU(s) / n
    LIGR = "ligr"


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings of the layers that a model stacks.

    Args:
        preset: which published layer.
        dim: D, numbers of an event.
        num_heads: of the layer.
        dropout: share that is dropped in training.
        bias: what HSTU adds to its scores; unused by other layers.
        where: whose settings they are, for the error.
    """

    preset: LayerPreset
    dim: int
    num_heads: int
    dropout: float
    bias: PositionTimeBias
    where: str

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            shared = self.num_heads * -(-self.dim // self.num_heads)
            raise ConfigError(
                expected="an embedding_dim that the heads share equally",
                found=f"embedding_dim = {self.dim}, num_heads = {self.num_heads}",
                where=f"{self.where} settings",
                ways_out=(f"embedding_dim = {shared}", "fewer heads"),
            )

    def make(self, *, max_length: int) -> SequenceLayer:
        """One layer over sequences of at most so many events."""
        sizes = {"dim": self.dim, "num_heads": self.num_heads, "dropout": self.dropout}
        head_dim = self.dim // self.num_heads
        match self.preset:
            case LayerPreset.SASREC:
                return SoftmaxBlock(sasrec(**sizes))
            case LayerPreset.RELU_ATTENTION | LayerPreset.SILU_ATTENTION:
                form = AttentionForm.RELU if self.preset is LayerPreset.RELU_ATTENTION else AttentionForm.SILU
                return SoftmaxBlock(pointwise(weights=form, max_length=max_length, **sizes))
            case LayerPreset.LIGR:
                return SoftmaxBlock(ligr(**sizes))
            case LayerPreset.STU:
                return HSTULayer(stu(max_length=max_length, head_dim=head_dim, **sizes))
            case LayerPreset.HSTU_NVIDIA:
                return HSTULayer(hstu_nvidia(max_length=max_length, head_dim=head_dim, **sizes))
            case LayerPreset.HSTU:
                return HSTULayer(replace(hstu_research(max_length=max_length, **sizes), bias=self.bias))


class StacksLayers:
    """Settings shared by models that stack these layers; a config derives from this class.

    Attributes:
        layers: which published layer.
        embedding_dim: D, numbers of an event.
        num_heads: of each layer.
        dropout: share that is dropped in training.
        bias: what HSTU adds to its scores.
    """

    layers: LayerPreset
    embedding_dim: int
    num_heads: int
    dropout: float
    bias: PositionTimeBias

    def layer_settings(self, *, where: str) -> LayerSettings:
        """Return the model's settings of its layers; refuse heads that do not share D."""
        return LayerSettings(
            preset=self.layers,
            dim=self.embedding_dim,
            num_heads=self.num_heads,
            dropout=self.dropout,
            bias=self.bias,
            where=where,
        )
