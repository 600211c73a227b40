"""Experts: small networks that labels share, each label mixing them by a gate of its own.

    e_i(x) = MLP_i(x)                      i = 1 … E
    g(x)   = softmax(MLP(x))               E weights of a sample, which add up to 1
    f(x)   = Σ_i g_i(x) e_i(x)

Source: Jacobs et al., "Adaptive Mixtures of Local Experts", 1991; for several labels Ma et al., KDD 2018 (`mmoe.py`)
and Tang et al., RecSys 2020 (`ple.py`).
Cost: E networks of the experts, and 2·in·E FLOPs a sample for a gate without hidden layers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.models.blocks.mlp import MLP, MLPConfig


class Experts(nn.Module):
    """Networks on one input.

    Args:
        input_dim: width of the input.
        config: hidden layers of each expert; the last one is what it says.
        num_experts: E, 1 or more.
    """

    def __init__(self, input_dim: int, *, config: MLPConfig, num_experts: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(MLP(input_dim, config=config) for _ in range(num_experts))
        self.output_dim = config.hidden_dims[-1]

    def forward(self, inputs_BI: Float[Tensor, "B I"]) -> Float[Tensor, "B E H"]:
        """Return what each expert says."""
        return torch.stack([network(inputs_BI) for network in self.networks], dim=1)


class Gate(nn.Module):
    """Weights of experts by sample.

    Args:
        input_dim: width of the input.
        config: hidden layers of the gate; none for a linear map.
        num_experts: E.
    """

    def __init__(self, input_dim: int, *, config: MLPConfig, num_experts: int) -> None:
        super().__init__()
        self.network = MLP(input_dim, config=config, output_dim=num_experts)

    def forward(self, inputs_BI: Float[Tensor, "B I"], experts_BEH: Float[Tensor, "B E H"]) -> Float[Tensor, "B H"]:
        """Return the weighted sum of experts."""
        # In FP32 and elementwise: a sum over a handful of experts is no product that a precision should round.
        weights_BE = self.network(inputs_BI).float().softmax(dim=1)
        return (weights_BE.unsqueeze(2).to(experts_BEH.dtype) * experts_BEH).sum(dim=1)


def check_experts(expert: MLPConfig, *, counts: dict[str, int], where: str) -> None:
    """Refuse experts without layers, and none at all.

    Args:
        expert: hidden layers of each.
        counts: settings that count something, each to be 1 or more.
        where: names the settings.

    Raises:
        ConfigError: there is nothing to mix.
    """
    too_few = {name: count for name, count in counts.items() if count < 1}
    if expert.hidden_dims and not too_few:
        return
    found = ", ".join(f"{name} = {count}" for name, count in too_few.items()) or "expert.hidden_dims = ()"
    raise ConfigError(
        expected="one expert or more, each with a hidden layer or more",
        found=found,
        where=where,
        ways_out=("expert.hidden_dims = (256,)" if not too_few else f"{next(iter(too_few))} = 1", "take the model dnn"),
    )
