"""CutsHistories: what a model must be able to do so that one history may lie on several ranks."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Int64
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.models.sequence.layers.stack import SequenceStack


@runtime_checkable
class CutsHistories(Protocol):
    """A model whose samples are histories, with a stack of layers over their events, that may train on pieces of them.

    Attributes:
        stack: the layers; nothing else of the model looks at more than one event.
    """

    stack: SequenceStack

    def history_lengths(self, batch: Batch) -> Int64[Tensor, "B"]:
        """Events of each history of a batch."""
        ...

    def pieces_of(self, batch: Batch, *, starts: Int64[Tensor, "S B"], counts: Int64[Tensor, "S B"]) -> Batch:
        """Pieces of the histories as S·B samples, whose losses are together those of the histories."""
        ...
