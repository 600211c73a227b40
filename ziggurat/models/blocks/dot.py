"""Pairwise dot products of the fields of a sample: the interaction of DLRM.

    fields x_0 … x_{F−1}, D numbers each   ──►   ⟨x_i, x_j⟩ for i < j: F(F−1)/2 numbers

Z = X Xᵀ is symmetric and its diagonal is no interaction, so only the part above the diagonal goes on (arXiv 1906.00091,
section 2.1.3; `itself=False` there). How it is computed is the business of `ops/interactions/dot.py`: C++ on the CPU,
or torch's own operations, which define it.

Cost: 2·F²·D FLOPs a sample forward and as much backward (twice as much without the symmetry).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.interactions.dot import PairPlaces, pair_places, pairwise_dot
from ziggurat.ops.interactions.dot_interaction import DotShape, dot_interaction
from ziggurat.precision.products import DenseProducts


class PairwiseDot(DenseProducts):
    """All F(F−1)/2 dot products between F fields of D numbers.

    Args:
        num_fields: F, two or more for any pairs to come out.
        dim: D; only used to count FLOPs.

    Attributes:
        num_pairs: P = F(F−1)/2.
    """

    pair_places: Tensor
    full_places: Tensor

    def __init__(self, num_fields: int, *, dim: int) -> None:
        super().__init__()
        self.num_fields = num_fields
        self.dim = dim
        self.num_pairs = num_fields * (num_fields - 1) // 2
        # Buffers, so that they follow the model to a device; not saved, since F says what they are.
        places = pair_places(num_fields)
        self.register_buffer("pair_places", places.pairs, persistent=False)
        self.register_buffer("full_places", places.full, persistent=False)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B P"]:
        """Products in the order (0,1), (0,2), …, (1,2), …; in the dtype of autocast where that is on."""
        fields_BFD = fields_BFD.to(_computed_in(fields_BFD))
        if not self.arithmetic.is_native:
            products_BFF = self.arithmetic.matmul(fields_BFD, fields_BFD.mT)
            return products_BFF.flatten(1).index_select(1, self.pair_places)
        return pairwise_dot(fields_BFD, places=PairPlaces(self.pair_places, self.full_places))

    def row(self, pieces: Sequence[Float[Tensor, "B X"]], *, passed: int = 0, padding: int = 0) -> Float[Tensor, "B W"]:
        """`[passed | pairs | zeros]`, the input of the network above, from fields that lie apart.

        Args:
            pieces: F·D columns together, fields side by side.
            passed: columns of the first piece that go on before the pairs.
            padding: columns of zeros after the pairs.
        """
        if not self.arithmetic.is_native:
            flat_BX = torch.cat(list(pieces), dim=1)
            pairs_BP = self(flat_BX.unflatten(1, (self.num_fields, self.dim)))
            return torch.cat([flat_BX[:, :passed], pairs_BP, flat_BX.new_zeros(len(flat_BX), padding)], dim=1)
        shape = DotShape(self.num_fields, self.dim, passed=passed, padding=padding)
        places = PairPlaces(self.pair_places, self.full_places)
        return dot_interaction(pieces, shape=shape, dtype=_computed_in(*pieces), places=places)


def _computed_in(*inputs: Tensor) -> torch.dtype:
    """The dtype of autocast where that is on, else the widest of the inputs."""
    device_type = inputs[0].device.type
    # The meta device has no autocast, and asking for it is an error.
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return functools.reduce(torch.promote_types, (each.dtype for each in inputs))
