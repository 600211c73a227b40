"""Heads: from a representation of a sample to one logit a label.

    SHARED     x ──► MLP ──► Linear(h, L)                 SEPARATE     x ──┬─► MLP ──► Linear(h, 1)   label 0
                                                                           └─► MLP ──► Linear(h, 1)   label 1

Shared heads cost one network whatever the number of labels, and let a rich label teach a poor one (Caruana 1997);
separate heads keep labels that pull in different directions apart. Below the heads everything, embeddings and
interaction, is shared in both. With one label the two are the same network.

Separate heads may read a representation of each label's own (MMoE, PLE). Labels that happen one after another are a
funnel: what the networks compute are then conditional logits (`funnel.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.funnel import funnel_logits
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
        is_funnel: whether labels happen one after another, in their order.
    """

    def __init__(
        self,
        input_dim: int,
        *,
        config: MLPConfig,
        num_labels: int,
        sharing: HeadSharing,
        is_funnel: bool = False,
    ) -> None:
        super().__init__()
        outputs = [num_labels] if sharing is HeadSharing.SHARED else [1] * num_labels
        self.networks = nn.ModuleList(MLP(input_dim, config=config, output_dim=output) for output in outputs)
        self.is_funnel = is_funnel

    def forward(self, inputs: Float[Tensor, "B I"] | Sequence[Float[Tensor, "B I"]]) -> Float[Tensor, "B L"]:
        """Return logits in the order of the labels.

        Args:
            inputs: the representation of the samples; of separate heads also one for each label.
        """
        of_each = [inputs] * len(self.networks) if isinstance(inputs, Tensor) else inputs
        logits = [network(inputs_BI) for network, inputs_BI in zip(self.networks, of_each, strict=True)]
        logits_BL = logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)
        return funnel_logits(logits_BL) if self.is_funnel else logits_BL


def heads_if_hidden(input_dim: int, *, config: MLPConfig, num_labels: int, sharing: HeadSharing) -> Heads | None:
    """The deep part of a model that does without where it has no hidden layer; see `Heads`."""
    return Heads(input_dim, config=config, num_labels=num_labels, sharing=sharing) if config.hidden_dims else None
