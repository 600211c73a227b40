"""Heads: from a representation of a sample to one logit a label.

    SHARED     x ──► MLP ──► Linear(h, L)                 SEPARATE     x ──┬─► MLP ──► Linear(h, 1)   label 0
                                                                           └─► MLP ──► Linear(h, 1)   label 1

Shared heads cost one network whatever the number of labels, and let a rich label teach a poor one (Caruana 1997);
separate heads keep labels that pull in different directions apart. Below the heads everything, embeddings and
interaction, is shared in both. With one label the two are the same network.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.mlp import MLP, MLPConfig


class HeadSharing(StrEnum):
    """Choices of what labels have in common above the interaction."""

    SHARED = "shared"  # one network with an output for each label
    SEPARATE = "separate"  # a network for each label


class Heads(nn.Module):
    """One logit for each of L labels.

    Args:
        input_dim: width of the representation.
        config: hidden layers of each network.
        num_labels: L.
        sharing: one network, or one a label.
    """

    def __init__(self, input_dim: int, *, config: MLPConfig, num_labels: int, sharing: HeadSharing) -> None:
        super().__init__()
        outputs = [num_labels] if sharing is HeadSharing.SHARED else [1] * num_labels
        self.networks = nn.ModuleList(MLP(input_dim, config=config, output_dim=output) for output in outputs)

    def forward(self, inputs_BI: Float[Tensor, "B I"]) -> Float[Tensor, "B L"]:
        """Logits in the order of the labels."""
        if len(self.networks) == 1:
            return self.networks[0](inputs_BI)
        return torch.cat([network(inputs_BI) for network in self.networks], dim=1)


def heads_if_hidden(input_dim: int, *, config: MLPConfig, num_labels: int, sharing: HeadSharing) -> Heads | None:
    """The deep part of a model that does without where it has no hidden layer; see `Heads`."""
    return Heads(input_dim, config=config, num_labels=num_labels, sharing=sharing) if config.hidden_dims else None
