"""MultiHot: a list of ids a row, order without meaning."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from ziggurat.errors import SchemaError
from ziggurat.features.kinds.id_lists import IdLists
from ziggurat.typed import checked


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class MultiHot(IdLists):
    """A list of ids a row, order without meaning; a list column, or text split at `separator`.

    Lists longer than `max_length` keep their first ids. Pooled inside the lookup, unless `pooling` is none. An id
    `padding` at the ends of a list fills it up, and is none of its ids.

    Example:
        >>> zg.MultiHot(name="tags", separator="|").kind
        'multi_hot'
    """

    kind: Literal["multi_hot"] = "multi_hot"

    is_ordered: ClassVar[bool] = False
