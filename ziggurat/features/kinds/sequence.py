"""Sequence: a list of ids a row in order of time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from ziggurat.errors import SchemaError
from ziggurat.features.kinds.id_lists import IdLists
from ziggurat.typed import Length, checked


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Sequence(IdLists):
    """A list of ids a row in order of time, latest last. Lists longer than `max_length` keep their last ids.

    An id `padding` at the ends of a list fills it up, and is none of its ids.

    Example:
        >>> zg.Sequence(name="history", table="item", max_length=50).kind
        'sequence'
    """

    kind: Literal["sequence"] = "sequence"
    max_length: Length = 100

    is_ordered: ClassVar[bool] = True
