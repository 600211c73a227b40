"""SequenceLayer: the seam between a layer over events and what runs many of them.

A layer is three steps, of which only the middle one looks at other events:

    x ── project ──► queries, keys, values (and a rest) ── attend ──► a ── finish ──► x'

So the keys and values of a history can be kept, and later events, or candidates, attend to them without computing the
history again (`cached.py`). `forward` is the three in a row.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from ziggurat.models.sequence.layers.places import SequencePlaces
from ziggurat.precision.products import DenseProducts


class Projected(NamedTuple):
    """A layer's projections of events before attention: jagged rows, heads apart.

    Args:
        q: queries.
        k: keys.
        v: values.
        rest: what `finish` needs besides, row by row.
    """

    q: Float[Tensor, "N H d"]
    k: Float[Tensor, "N H d"]
    v: Float[Tensor, "N H dv"]
    rest: Float[Tensor, "N R"]


class SequenceLayer(DenseProducts):
    """A layer over sequences of events, jagged in and jagged out."""

    native_products = "attention multiplies queries, keys and values inside its kernel"

    @abstractmethod
    def project(self, events_ND: Float[Tensor, "N D"]) -> Projected:
        """Queries, keys and values of events, each on its own."""

    @abstractmethod
    def attend(
        self, q: Float[Tensor, "M H d"], k: Float[Tensor, "N H d"], v: Float[Tensor, "N H dv"], places: SequencePlaces
    ) -> Float[Tensor, "M H dv"]:
        """Attend from queries to the keys and values of their sequences."""

    @abstractmethod
    def finish(
        self, events_MD: Float[Tensor, "M D"], gathered: Float[Tensor, "M H dv"], rest: Float[Tensor, "M R"]
    ) -> Float[Tensor, "M D"]:
        """The events as the next layer takes them."""

    def forward(self, events_ND: Float[Tensor, "N D"], *, places: SequencePlaces) -> Float[Tensor, "N D"]:
        """All events of all sequences through the layer.

        Args:
            events_ND: vectors of the events, sequence after sequence.
            places: where sequences begin, and the times of the events.
        """
        projected = self.project(events_ND)
        gathered = self.attend(projected.q, projected.k, projected.v, places)
        return self.finish(events_ND, gathered, projected.rest)
