"""Batch normalisation of a stack of fields: an alternative to layer norms inside Wukong.

    x_{b,f,c} ← γ_{f,c} · (x_{b,f,c} − mean_b) / sqrt(var_b + ε) + β_{f,c}          for every column c of every field f

A layer norm divides a field by its own length, so a sample whose embedding is short, because its id is rare and a
penalty pulls it to zero, looks as certain as one whose embedding is long. Batch normalisation divides by a length that
is common to all samples, and the difference stays. In front of the first layer it also brings embeddings of 1e-3 to
numbers of order one, so that linear terms do not vanish beside what the norms inside the layers have enlarged.

Batches of fewer than two samples use the running statistics, as in `batch_norm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.models.blocks.block_norm import BlockNorm
from ziggurat.models.blocks.mlp import Normalization
from ziggurat.ops.interactions.fields import sum_norm


class FieldBatchNorm(nn.Module):
    """Normalises each of F·D numbers over the batch.

    Args:
        num_fields: F.
        dim: D.
        eps: ε.
    """

    def __init__(self, num_fields: int, *, dim: int, eps: float) -> None:
        super().__init__()
        self.norm = BatchNorm(num_fields * dim, eps=eps)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F D"]:
        """The same shape."""
        return self.norm(fields_BFD.flatten(1)).view_as(fields_BFD)


def field_norm(kind: Normalization, num_fields: int, *, dim: int, eps: float) -> nn.Module:
    """Return a norm of a stack of fields.

    Each field over its own columns (layer), each number over the batch, blocks of 256 columns of all fields side by
    side, or none.
    """
    match kind:
        case Normalization.LAYER:
            return nn.LayerNorm(dim, eps=eps)
        case Normalization.BATCH:
            return FieldBatchNorm(num_fields, dim=dim, eps=eps)
        case Normalization.BLOCK:
            return BlockNorm(eps=eps, num_dims=2)
        case Normalization.NONE:
            return nn.Identity()


def shift_of(norm: nn.Module) -> nn.Parameter | None:
    """Return the β of a norm, which is added to what it has normalised; None where it has none."""
    inside = norm.norm if isinstance(norm, FieldBatchNorm) else norm
    shift = getattr(inside, "bias", None)
    return shift if isinstance(shift, nn.Parameter) else None


def norm_of_sum(
    norm: nn.Module, parts: Sequence[Float[Tensor, "B _ D"]], kept_BMD: Float[Tensor, "B M D"]
) -> Float[Tensor, "B M D"]:
    """Compute norm(concat(parts) + kept), in one operation where it is a layer norm (`ops/interactions/fields.py`)."""
    if isinstance(norm, nn.LayerNorm):
        return sum_norm(parts, kept_BMD, weight_D=norm.weight, bias_D=norm.bias, eps=norm.eps)
    return norm((parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)) + kept_BMD)
