"""Squeeze and excitation of fields: each field is scaled by how much all fields say that it matters (SENET).

    z_f = mean of x_f            A = ReLU(W₂ ReLU(W₁ z))            out_f = A_f · x_f

W₁ (r, n) and W₂ (n, r) without bias, r = n / reduction. FiBiNET's form (Huang, Zhang and Zhang, arXiv 1905.09433,
equations 3 to 6) of the network of images (Hu et al., arXiv 1709.01507), which ends in a sigmoid: by ReLU a field may
be left out.

Cost: 4·n·r FLOPs a sample.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.precision.products import Linear


class SqueezeExcitation(nn.Module):
    """Scale each field by one number that all fields decide.

    Args:
        num_fields: n.
        reduction: n / r, rounded down to r of 1 or more.
    """

    def __init__(self, num_fields: int, *, reduction: int) -> None:
        super().__init__()
        width = max(1, num_fields // reduction)
        self.squeeze = Linear(num_fields, width, bias=False)
        self.excite = Linear(width, num_fields, bias=False)

    def forward(self, fields_BFD: Float[Tensor, "B F D"]) -> Float[Tensor, "B F D"]:
        """The same shape."""
        scales_BF = F.relu(self.excite(F.relu(self.squeeze(fields_BFD.mean(dim=2)))))
        return fields_BFD * scales_BF.unsqueeze(2)
