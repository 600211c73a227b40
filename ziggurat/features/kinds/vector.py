"""Vector: a pretrained vector a row, which reaches the model as it is."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from ziggurat.errors import SchemaError
from ziggurat.features.inputs import VectorSpec
from ziggurat.features.kinds.feature import Cells, ColumnType, Feature, Parsed, RequestReader
from ziggurat.plain import JSON
from ziggurat.typed import Dim, checked


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Vector(Feature):
    """A pretrained vector a row: a (fixed-size) list column of `dim` floats, or texts of them. Null becomes zeros.

    In a file of texts a vector is written "[0.1, 0.2]", "0.1 0.2", "0.1|0.2" or "0.1;0.2".

    Example:
        >>> zg.Vector(name="title", dim=384).dim
        384
    """

    kind: Literal["vector"] = "vector"
    dim: Dim

    json_schema: ClassVar[dict[str, JSON]] = {"type": ["array", "null"], "items": {"type": "number"}}

    def spec(self) -> VectorSpec:
        """Return `dim` numbers a sample."""
        return VectorSpec(name=self.name, dim=self.dim)

    def parse(self, cells: Cells) -> Parsed:
        """Return a vector a row."""
        return cells.vectors(self.dim)

    def of_request(self, value: object, read: RequestReader) -> list[float | None]:
        """Return the numbers of the list."""
        return read.numbers(value)

    def request_type(self) -> ColumnType:
        """Return lists of 64-bit floats."""
        import polars as pl

        return pl.List(pl.Float64)
