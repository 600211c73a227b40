"""The closing maps of a network: the linear maps that make logits of its final representation.

    … ─► final representation x ─► closing map ─► logits          what training computes of x beside the logits
                                 └► further heads                 (`training/distillation.py`) finds x here

A model names the maps and nothing else: their input is the final representation, and their outputs, in order, are the
logits of the labels. Where labels have networks of their own, each has a map and a representation.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ziggurat.models.blocks.heads import Heads
from ziggurat.models.blocks.mlp import MLP


def closing_maps_of(model: nn.Module) -> list[nn.Linear]:
    """Return those of the heads of a model; none where it has several or none, or logits are of products (a funnel)."""
    heads = [module for module in model.modules() if isinstance(module, Heads)]
    if len(heads) != 1 or heads[0].is_funnel:
        return []
    outputs = [network.output for network in heads[0].networks if isinstance(network, MLP)]
    return linear_maps(outputs)


def linear_maps(modules: Iterable[nn.Module | None]) -> list[nn.Linear]:
    """Return the modules that are linear maps, in their order."""
    return [module for module in modules if isinstance(module, nn.Linear)]
