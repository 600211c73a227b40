"""Reads: what the rows of a schema have to be for a model; recipes, checks and studies ask its config.

    reads: ClassVar[Reads] = Reads.A_HISTORY            in the class of a config

A config of the user's own may leave it out: then nothing is refused, and the model sees what the schema gives.
"""

from __future__ import annotations

from enum import StrEnum


class Reads(StrEnum):
    """Choices of what a model learns from."""

    SAMPLES = "samples"  # rows with a label
    PERHAPS_A_HISTORY = "samples, and histories where there are some"
    A_HISTORY = "samples with a sequence"
    ITEMS = "samples whose schema has [items]"
    PAIRS = "a user and an item, whose schema has [items]"
    NEXT_ITEMS = "events without labels"
    CANDIDATES = "events with labels"

    @property
    def is_of_events(self) -> bool:
        """True for models that a schema needs [events] for, unless its histories were made by hand."""
        return self in (Reads.NEXT_ITEMS, Reads.CANDIDATES)

    @property
    def learns_from_events(self) -> bool:
        """True for models that learn from what [events] make: a history."""
        return self.is_of_events or self in (Reads.A_HISTORY, Reads.PERHAPS_A_HISTORY)

    @property
    def is_any_row(self) -> bool:
        """True for models that any table of rows with a label will do for."""
        return self in (Reads.SAMPLES, Reads.PERHAPS_A_HISTORY)

    @property
    def wanted(self) -> str:
        """Say what a table must have beside rows with a label, to end a sentence; "" for nothing."""
        return _WANTED.get(self, "")


_WANTED = {
    Reads.A_HISTORY: " with a sequence",
    Reads.ITEMS: " whose schema has [items]",
    Reads.PAIRS: " of users and items, whose schema has [items]",
    Reads.CANDIDATES: " whose schema has [events] and a [[label]]",
}


def reads_of(model: object) -> Reads | None:
    """Return what a config, or its class, says that its model reads; None where it says nothing."""
    return getattr(model, "reads", None)


def finds_items(model: object) -> bool:
    """Return whether a config says that its model finds items among all, and is judged by full ranking."""
    return getattr(model, "finds_items", False)


def ranks_rows(model: object) -> bool:
    """Return whether a model ranks the rows of a table, as far as its config says."""
    reads = reads_of(model)
    if reads is None:
        return not finds_items(model)
    return reads.is_any_row or reads is Reads.A_HISTORY


def is_linear(model: object) -> bool:
    """Return whether a config says that its model is a sum of weights: a floor for other models."""
    return getattr(model, "is_linear", False)
