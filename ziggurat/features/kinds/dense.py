"""Dense: a number a row, transformed by what the training rows have taught; or a row of a table, by its bucket."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from ziggurat.errors import SchemaError
from ziggurat.features.inputs import NumberSpec, SingleSpec
from ziggurat.features.kinds.feature import Cells, ColumnType, Encoded, Feature, Fitted, Parsed, RequestReader
from ziggurat.features.kinds.numbers import FittedNumbers
from ziggurat.features.tables import Table
from ziggurat.features.transforms import USUAL, NumericTransform
from ziggurat.plain import JSON
from ziggurat.typed import Buckets, Count, Float32, checked


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Dense(Feature):
    """A feature that is a number. Infinities are bad rows.

    Null and NaN become `missing` before the transform. A transform that makes rows of a table (`quantile_buckets`,
    `criteo_buckets`) gives them the row of missing numbers instead, and `missing` has no effect.

    Example:
        >>> zg.Dense(name="price", missing=1.0).kind
        'dense'
    """

    kind: Literal["dense"] = "dense"
    transform: NumericTransform = USUAL
    missing: Float32 = 0.0
    num_buckets: Buckets = 64
    min_count: Count = 1  # for transforms that make ids

    reads_numbers: ClassVar[bool] = True
    json_schema: ClassVar[dict[str, JSON]] = {"type": ["number", "string", "boolean", "null"]}

    @property
    def table_name(self) -> str:
        """The feature's own name where numbers become rows."""
        return self.name if self.transform.makes_rows else ""

    @property
    def owns_table(self) -> bool:
        """True where numbers become rows: they are buckets, and no ids of another column."""
        return self.transform.makes_rows

    @property
    def num_rows(self) -> int | None:
        """The buckets between quantiles; buckets that are ids are counted."""
        return self.num_buckets if self.transform.is_bucketed else None

    def doubts(self) -> list[str]:
        """Say where `missing` has no effect."""
        if self.missing == 0.0 or not self.transform.makes_rows:
            return []
        return [
            f"missing = {self.missing:g} of feature {self.name!r} has no effect: transform {self.transform} gives "
            "missing numbers a row of their own; take it out of the schema, or choose a transform that makes a number"
        ]

    def default_table(self) -> Table:
        """Return a table that keeps buckets seen `min_count` times."""
        return Table(name=self.name, min_count=self.min_count)

    def spec(self) -> NumberSpec | SingleSpec:
        """Return a number, or a row where numbers become rows."""
        if self.transform.makes_rows:
            return SingleSpec(name=self.name, table=self.name)
        return NumberSpec(name=self.name)

    def parse(self, cells: Cells) -> Parsed:
        """Return numbers, or the buckets that are ids."""
        numbers = cells.numbers()
        return cells.ids_of_buckets(numbers) if self.transform.makes_ids else numbers

    @property
    def fitted_numbers(self) -> FittedNumbers:
        """Its own numbers."""
        return self

    def encode(self, parsed: Parsed, fitted: Fitted) -> Encoded:
        """Return transformed numbers, or rows."""
        if self.transform.makes_ids:
            return fitted.rows(parsed)
        if self.transform.is_bucketed:
            return fitted.bucket_rows(parsed)
        return fitted.transformed(parsed)

    def of_request(self, value: object, read: RequestReader) -> float | None:
        """Return the number."""
        return read.number(value)

    def request_type(self) -> ColumnType:
        """Return 64-bit floats."""
        import polars as pl

        return pl.Float64
