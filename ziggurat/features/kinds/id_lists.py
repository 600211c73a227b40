"""IdLists: what both kinds of lists of ids have in common: how cells are divided, filled up, cut and pooled."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from ziggurat.config import JSON, to_json
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import JaggedSpec
from ziggurat.features.kinds.feature import Cells, ColumnType, Encoded, Feature, Fitted, Parsed, RequestReader
from ziggurat.features.pooling import Pooling
from ziggurat.typed import Length

if TYPE_CHECKING:
    import polars as pl


class Spaces(StrEnum):
    """Ways to treat spaces around the ids of a list."""

    KEEP = "keep"  # they are part of the ids
    STRIP = "strip"


@dataclass(frozen=True, kw_only=True)
class IdLists(Feature):
    """A list of ids a row; a list column, or text split at `separator`.

    Attributes:
        is_ordered: the order means something, the latest id last, so a list that is cut keeps its last ids; each kind
            says it.
    """

    table: str = ""
    separator: str = ""
    max_length: Length = 1000
    pooling: Pooling = Pooling.MEAN
    padding: str = ""
    spaces: Spaces = Spaces.KEEP

    is_ordered: ClassVar[bool]
    json_schema: ClassVar[dict[str, JSON]] = {
        "type": ["array", "string", "null"],
        "items": {"type": ["string", "number", "boolean", "null"]},
    }

    @property
    def id_lists(self) -> IdLists:
        """The feature itself."""
        return self

    @property
    def table_name(self) -> str:
        """The table that the schema names, or one of the feature's own name."""
        return self.table or self.name

    def spec(self) -> JaggedSpec:
        """Return any number of rows a sample."""
        return JaggedSpec(
            name=self.name,
            table=self.table_name,
            pooling=self.pooling,
            ordered=self.is_ordered,
            max_length=self.max_length,
        )

    def parse(self, cells: Cells) -> Parsed:
        """Return the ids of each list, at most `max_length`."""
        return cells.id_lists(self, keep_last=self.is_ordered)

    def encode(self, parsed: Parsed, fitted: Fitted) -> Encoded:
        """Return the rows of the ids, and the length of each list."""
        return fitted.rows(parsed.values), parsed.lengths

    def of_request(self, value: object, read: RequestReader) -> list[str | None] | None:
        """Return the texts of the ids of the list."""
        return read.ids(value, separator=self.separator)

    def request_type(self) -> ColumnType:
        """Return lists of texts."""
        import polars as pl

        return pl.List(pl.String)

    @classmethod
    def try_out(cls) -> None:
        """Refuse a kind that does not say whether the order of its lists means something."""
        if not isinstance(getattr(cls, "is_ordered", None), bool):
            # Python's own error, in `spec` below, would name this file in place of the kind's.
            file = getattr(sys.modules.get(cls.__module__), "__file__", None)
            raise ConfigError(
                expected="is_ordered, True or False, in a kind of lists of ids",
                found="none" if not hasattr(cls, "is_ordered") else repr(cls.is_ordered),
                where=f"{cls.__module__}.{cls.__qualname__}" + (f" in {file}" if file else ""),
                ways_out=(
                    "is_ordered = False: the ids of a list are a set, as the words of a text or the genres of a film",
                    "is_ordered = True: the latest id is the last, so a list that is cut keeps its last ids",
                ),
            )
        super().try_out()

    def divided(self, series: pl.Series) -> pl.Series:
        """Return the lists of a raw column of texts, where `separator` divides them; else the column."""
        import polars as pl

        is_text = bool(self.separator) and series.dtype == pl.String
        return series.set(series == "", None).str.split(self.separator) if is_text else series

    def pooled(self) -> Feature:
        """Return the feature with its embeddings added up, where they were not pooled at all."""
        return replace(self, pooling=Pooling.SUM) if self.pooling is Pooling.NONE else self

    def state(self) -> dict[str, JSON]:
        """Return plain data; settings younger than the first release count only where they are used."""
        state = to_json(self)
        if not self.padding:
            del state["padding"]
        if self.spaces is Spaces.KEEP:
            del state["spaces"]
        return state
