"""Categorical: one id a row, looked up in a table."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from ziggurat.errors import SchemaError
from ziggurat.features.inputs import SingleSpec
from ziggurat.features.kinds.feature import Cells, ColumnType, Encoded, Feature, Fitted, Parsed, RequestReader
from ziggurat.plain import JSON
from ziggurat.typed import checked


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Categorical(Feature):
    """One id a row: string, integer, boolean or categorical column. `table` defaults to one of its own.

    Example:
        >>> zg.Categorical(name="item", table="items").kind
        'categorical'
    """

    kind: Literal["categorical"] = "categorical"
    table: str = ""

    is_id: ClassVar[bool] = True
    json_schema: ClassVar[dict[str, JSON]] = {"type": ["string", "number", "boolean", "null"]}

    @property
    def table_name(self) -> str:
        """The table that the schema names, or one of the feature's own name."""
        return self.table or self.name

    def spec(self) -> SingleSpec:
        """Return one row a sample."""
        return SingleSpec(name=self.name, table=self.table_name)

    def parse(self, cells: Cells) -> Parsed:
        """Return an id a row."""
        return cells.ids()

    def encode(self, parsed: Parsed, fitted: Fitted) -> Encoded:
        """Return the rows of the ids."""
        return fitted.rows(parsed)

    def of_request(self, value: object, read: RequestReader) -> str | None:
        """Return the text of the id."""
        return read.id(value)

    def request_type(self) -> ColumnType:
        """Return texts."""
        import polars as pl

        return pl.String
