"""Norm of fixed blocks of a row, without weights and without a mean, which few bits hold well.

    y_i = x_i / sqrt(mean of x² over the block of i + ε)          blocks of 256 columns, one after the other

A layer norm subtracts a mean, which cancels digits, and reads its whole row. Here a block needs nothing but itself, so
that a kernel of products in few bits can norm its own tile, in training as in serving. A row of fewer than 512 columns
is one block; the last block of a wider one takes the columns that are left over too, so that no block is narrow.

Reference: LoKA, arXiv 2605.10886 ("Mods": BlockNorm). Cost: each number is read once and written once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

BLOCK_WIDTH = 256


class BlockNorm(nn.Module):
    """Divides each block of 256 columns by its root mean square.

    Args:
        eps: ε.
        num_dims: trailing dims that make up a row: 2 for fields, whose columns lie side by side.
    """

    def __init__(self, *, eps: float, num_dims: int = 1) -> None:
        super().__init__()
        self.eps = eps
        self.num_dims = num_dims

    def forward(self, inputs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The same shape."""
        rows = inputs.flatten(-self.num_dims)
        width = rows.shape[-1]
        if width % BLOCK_WIDTH == 0:
            return self._by_256(rows).view(inputs.shape)
        # The last block takes what is left over, too.
        start = max(width // BLOCK_WIDTH - 1, 0) * BLOCK_WIDTH
        last = F.rms_norm(rows[..., start:], (width - start,), eps=self.eps)
        if start == 0:
            return last.view(inputs.shape)
        return torch.cat([self._by_256(rows[..., :start]), last], dim=-1).view(inputs.shape)

    def _by_256(self, rows: Float[Tensor, "*B C"]) -> Float[Tensor, "*B C"]:
        blocks = rows.unflatten(-1, (-1, BLOCK_WIDTH))
        return F.rms_norm(blocks, (BLOCK_WIDTH,), eps=self.eps).flatten(-2)

    def extra_repr(self) -> str:
        """Show the settings in the text of a model."""
        return f"eps={self.eps}"
