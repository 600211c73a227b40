"""More learned numbers for each row than its vector: kept as extra columns of the same table.

    table of feature f:   [ e_f : D columns | extra : E columns ]        one lookup, one row of D + E numbers

DeepFM needs a first-order weight w_f beside the vector e_f, FinalMLP a second vector of some features for its gates.
Tables of their own would double the lookups. With an optimizer that treats every number alone (dense Adam, SGD) wider
rows are exactly the same model and the same training as two tables. Row-wise Adagrad has one step size a row, so there
w_f and e_f share it: a difference in training, not in the model.

    logit += Σ_f w_f + ⟨v, numbers⟩ + b           the first-order term: a logistic regression, one w a label
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.mlp import start_sum_low
from ziggurat.precision.products import Linear


class ExtraColumns(nn.Module):
    """Cuts looked-up rows into vectors and extra columns.

    Args:
        field_dims: columns of each field, extra ones included.
        extra_dims: how many of them, at the end, are extra.

    Attributes:
        main_dims: columns of each field's vector.
    """

    def __init__(self, field_dims: Sequence[int], *, extra_dims: Sequence[int]) -> None:
        super().__init__()
        self.field_dims = tuple(field_dims)
        self.extra_dims = tuple(extra_dims)
        self.main_dims = tuple(all_ - extra for all_, extra in zip(field_dims, extra_dims, strict=True))
        assert all(columns > 0 for columns in self.main_dims), "a table narrower than its extra columns"
        self.sizes = [size for pair in zip(self.main_dims, self.extra_dims, strict=True) for size in pair]
        # All fields alike: then two views of one matrix do, and nothing is split into pieces.
        self.is_regular = len(set(self.field_dims)) == 1 and len(set(self.extra_dims)) == 1

    def forward(self, fields_BX: Float[Tensor, "B X"]) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B E"]]:
        """Vectors side by side, and extra columns side by side."""
        # No fields: of no columns both parts are the same.
        if not self.field_dims:
            return fields_BX, fields_BX
        if self.is_regular:
            fields_BFW = fields_BX.unflatten(1, (-1, self.field_dims[0]))
            width = self.main_dims[0]
            return fields_BFW[:, :, :width].flatten(1), fields_BFW[:, :, width:].flatten(1)
        pieces = fields_BX.split(self.sizes, dim=1)
        return torch.cat(pieces[::2], dim=1), torch.cat(pieces[1::2], dim=1)


class FirstOrder(nn.Module):
    """Σ_f w_f + ⟨v, numbers⟩ + b for each label, from the extra columns of the fields, numbers and vectors.

    Args:
        inputs: the features; one extra column a label in every field.
    """

    def __init__(self, inputs: InputSpec) -> None:
        super().__init__()
        self.num_labels = len(inputs.labels)
        self.vector_names = tuple(spec.name for spec in inputs.vectors)
        width = len(inputs.dense) + sum(spec.dim for spec in inputs.vectors)
        self.linear = Linear(width, self.num_labels, bias=False) if width else None
        self.bias = nn.Parameter(torch.zeros(self.num_labels))
        if self.linear is not None:
            start_sum_low(self.linear)

    def forward(
        self, dense_BN: Float[Tensor, "B N"], weights_BE: Float[Tensor, "B E"], vectors: dict[str, Tensor]
    ) -> Float[Tensor, "B L"]:
        """The term; `weights_BE` holds L numbers a field."""
        weights_BFL = weights_BE.unflatten(1, (-1, self.num_labels)) if weights_BE.shape[1] else None
        logits_BL = self.bias.expand(dense_BN.shape[0], -1)
        if weights_BFL is not None:
            logits_BL = logits_BL + weights_BFL.sum(dim=1)
        if self.linear is not None:
            numbers_BN = torch.cat([dense_BN, *(vectors[name] for name in self.vector_names)], dim=1)
            logits_BL = logits_BL + self.linear(numbers_BN)
        return logits_BL
