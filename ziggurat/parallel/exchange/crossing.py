"""Crossing: embeddings of a batch on their way over the last hop, one message for each part of them.

A plain batch crosses in one message. One with slices (`features/batches/repeats.py`) crosses in several: samples
with what is plain, and the slices of each group. They are joined on this side, where slices become samples:

    leg 0   (B, ·)   ──► hop ──────────────────►┐
    leg 1   (U₀, ·)  ──► hop ──► inverse ──────►├──► join ──► (B, X)
    leg 2   (U₁, ·)  ──► hop ──► inverse ──────►┘

A training step in one graph calls `arrive`. A pipeline cuts the graph at the hop: it takes the values as leaves, joins
them, computes, sends their gradients back, and goes on below the hop when they are needed (`parallel/pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.parallel.exchange.blocks import BlockExchange, Transfer


@dataclass(frozen=True)
class Leg:
    """One message of a crossing.

    Args:
        hop: what it travels by.
        token: ties what arrives to what was sent, in the autograd graph.
        transfer: that is under way.
    """

    hop: BlockExchange
    token: Tensor
    transfer: Transfer


@dataclass(frozen=True)
class Crossing:
    """Embeddings of a batch on their way.

    Args:
        legs: the messages.
        join: makes the fields of samples of what arrives, differentiably.
    """

    legs: Sequence[Leg]
    join: Callable[[list[Tensor]], Tensor]

    def arrive(self) -> Tensor:
        """Wait, and join: all in one graph."""
        return self.join([leg.hop.finish(leg.token, leg.transfer) for leg in self.legs])

    def land(self) -> list[Tensor]:
        """Wait; what arrives, as leaves of a graph above the hop. `join` makes fields of them."""
        return [leg.hop.receive_values(leg.transfer).detach().requires_grad_() for leg in self.legs]

    def send_gradients(self, values: Sequence[Tensor]) -> None:
        """Send the gradients of what `land` gave; zeros where the loss read nothing."""
        for leg, value in zip(self.legs, values, strict=True):
            leg.hop.send_gradient(leg.transfer, torch.zeros_like(value) if value.grad is None else value.grad)

    def backward(self) -> None:
        """Take the gradients that the others sent, and go on below the hop."""
        tokens = [leg.token for leg in self.legs]
        torch.autograd.backward(tokens, [token.new_empty(0) for token in tokens])
