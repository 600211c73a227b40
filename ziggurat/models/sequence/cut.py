"""CutsHistories: what a model must be able to do so that one history may lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Int64
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.models.sequence.layers.stack import SequenceStack


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """One rank's part of each of Q sequences: S intervals of their events.

    Args:
        starts: position of the first event.
        counts: events; may be 0.
        are_last: for each of the S sets, whether its intervals are the ends of all sequences.
    """

    starts: Int64[Tensor, "S Q"]
    counts: Int64[Tensor, "S Q"]
    are_last: Sequence[bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class Cutting:
    """The sequences of a batch, and how they are cut.

    Args:
        lengths: events of each sequence that the stack sees.
        pieces: the pieces of some chunks as samples, set after set, in each set sequence after sequence. Losses of all
            pieces are together those of the batch. Their extras have `PIECE_SETS` and `PIECE_HOMES`; each sequence has
            a sample in every set, also where its piece is empty.
    """

    lengths: Int64[Tensor, "Q"]
    pieces: Callable[[Chunks], Batch]


@runtime_checkable
class CutsHistories(Protocol):
    """A model over histories, with a stack of layers over their events, that may compute on pieces of them.

    Attributes:
        stack: the layers; nothing else of the model looks at more than one event.
        told_of_samples: names in `Outputs.named` of what evaluations read, a row a sample.
    """

    stack: SequenceStack
    told_of_samples: tuple[str, ...]

    def cutting(self, batch: Batch) -> Cutting:
        """The sequences of a batch, and how they are cut.

        Args:
            batch: whole samples, in host memory; in training as `shortened` gave it.
        """
        ...
