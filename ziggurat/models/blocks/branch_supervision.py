"""Losses of the networks of a model beside that of their mean, each weighed by how much worse it is (Tri-BCE of FCN).

    loss = L + w₁ L₁ + w₂ L₂           w_k = max(0, L_k − L)           L of the mean, L_k of network k, means of a batch

A network that is behind the mean of both is taught by itself; one that is ahead is left alone. As in the authors' code
the weights have gradients too. They depend on the mean loss of the whole batch, so on ranks the sums are those of all
of them (`whole_batch.py`); a label that nobody in the batch has adds nothing.

FCN: Li et al., arXiv 2407.13349. The terms enter the loss by their gradient alone, so that what is reported stays the
loss of the labels, comparable with other models'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.whole_batch import WholeBatch


class BranchSupervision(WholeBatch, nn.Module):
    """Adds the losses of networks that are behind their mean; without weights of its own."""

    def forward(
        self,
        total_L: Float[Tensor, "L"],
        branches: Sequence[Float[Tensor, "L"]],
        weight_L: Float[Tensor, "L"],
        *,
        importance_L: Float[Tensor, "L"],
    ) -> Float[Tensor, "L"]:
        """Return numerators with the terms; collective on many ranks.

        Args:
            total_L: numerator of each label's mean loss, of the mean of the networks.
            branches: the same of each network.
            weight_L: denominators.
            importance_L: weights of the labels in the schema, v_l, which are part of every numerator.
        """
        totals_KL = torch.stack([total_L, *branches])
        # FP64: a weight is the difference of two means.
        sums_KL = torch.cat([totals_KL, weight_L.unsqueeze(0)]).double()
        if self.world_sum is not None:
            sums_KL = self.world_sum(sums_KL.flatten()).view_as(sums_KL)
        number_L = sums_KL[-1]
        # Without v_l: a network is as far behind as its loss says, whatever the label counts.
        means_KL = sums_KL[:-1] / torch.where(number_L > 0, number_L * importance_L, 1.0)
        behind_KL = (means_KL[1:] - means_KL[:1]).clamp(min=0.0).to(total_L.dtype)
        terms_L = (behind_KL * totals_KL[1:]).sum(dim=0)
        # Adds 0 and its gradient: what is reported stays the loss of the labels.
        return total_L + (terms_L - terms_L.detach())
