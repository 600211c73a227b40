"""InFlight: embeddings of a batch that are in flight over the last hop, one message for each part of them.

A plain batch travels in one message. One with slices (`features/batches/repeats.py`) travels in several: samples
with what is plain, and the slices of each group. The receiver joins them, where slices become samples:

    message 0   (B, ·)   ──► hop ──────────────────►┐
    message 1   (U₀, ·)  ──► hop ──► inverse ──────►├──► join ──► (B, X)
    message 2   (U₁, ·)  ──► hop ──► inverse ──────►┘

A training step in one graph calls `wait`. A pipeline cuts the graph at the hop: it takes the values as leaves, joins
them, computes, sends their gradients back, and goes on below the hop when they are needed (`parallel/pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.parallel.exchange.blocks import BlockExchange, Transfer


@dataclass(frozen=True)
class Message:
    """One message of embeddings in flight.

    Args:
        hop: the exchange that it travels through.
        token: ties what arrives to what was sent, in the autograd graph.
        transfer: its pending transfer.
    """

    hop: BlockExchange
    token: Tensor
    transfer: Transfer


@dataclass(frozen=True)
class InFlight:
    """Embeddings of a batch in flight.

    Args:
        messages: one for each part.
        join: makes the fields of samples of what arrives, differentiably.
    """

    messages: Sequence[Message]
    join: Callable[[list[Tensor]], Tensor]

    def wait(self) -> Tensor:
        """Wait, and return the fields of samples, all in one graph."""
        return self.join([message.hop.finish(message.token, message.transfer) for message in self.messages])

    def receive(self) -> list[Tensor]:
        """Wait, and return the values as leaves of a graph above the hop; `join` makes fields of them."""
        return [message.hop.receive_values(message.transfer).detach().requires_grad_() for message in self.messages]

    def send_gradients(self, values: Sequence[Tensor]) -> None:
        """Send the gradients of the values of `receive`; zeros where the loss read nothing."""
        for message, value in zip(self.messages, values, strict=True):
            message.hop.send_gradient(message.transfer, torch.zeros_like(value) if value.grad is None else value.grad)

    def backward(self) -> None:
        """Receive the gradients that the other ranks sent, and continue the backward pass below the hop."""
        tokens = [message.token for message in self.messages]
        torch.autograd.backward(tokens, [token.new_empty(0) for token in tokens])
