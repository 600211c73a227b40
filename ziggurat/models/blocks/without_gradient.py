"""Weights whose gradient is zero by construction do not learn.

    softmax_j(⟨q_i, k_j + b⟩) = softmax_j(⟨q_i, k_j⟩)         norm(W x + b) = norm(W x), the norm over a batch
    norm(W (x + b)) = norm(W x)                               layer norm(x_f + b_f) = layer norm(x_f), b_f one number

The gradient of such a b is 0; what is computed is what rounding leaves of a sum, some 1e-9. Optimizers that divide by
the size of the gradients before (Adam, Adagrad) make steps of full size of it: b walks at random, otherwise on every
machine and number of ranks. It changes no score, but no two runs have the same weights, and what reads weights (norms,
weight decay, comparisons) reads noise.

They stay where they are, so checkpoints of before load: there they have walked, which changes no score either.
"""

from __future__ import annotations

from torch import Tensor


def without_gradient(weight: Tensor | None) -> None:
    """Let a weight stay as it was drawn or loaded; None: there is none."""
    if weight is not None:
        weight.requires_grad_(False)
