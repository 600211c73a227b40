"""Which attributes items have, of which kind: what filters are checked against, the same for every segment of an index.

    kind        columns                                   in a filter
    text        String, Categorical, Enum                 genres:Drama   lang IN (de, en)
    boolean     Boolean                                   in_stock:true
    integer     Int8 … Int64, UInt8 … UInt64              year:1995..1999   year:>=1990
    number      Float32, Float64 (NaN is missing)         price:<9.99
    date        Date: days since 1970                     released:1999-12..2000-01
    datetime    Datetime: microseconds since 1970 (UTC)   seen_at:>=2024-05-01T12:00

A list of texts or of integers is an attribute of which an item has several values: `genres:Drama` holds if one of them
is Drama. Floats in a list are most often a vector, so such columns are left out unless they are named.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import polars as pl

from ziggurat.errors import ConfigError, DataError
from ziggurat.typed import checked, nearest


class AttributeKind(enum.StrEnum):
    """The kind of an attribute's values."""

    TEXT = "text"
    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    DATE = "date"
    DATETIME = "datetime"

    @property
    def is_ordered(self) -> bool:
        """True if values can be compared, and ranges make sense."""
        return self not in (AttributeKind.TEXT, AttributeKind.BOOLEAN)


@dataclass(frozen=True, kw_only=True)
@checked
class Attribute:
    """One attribute of items.

    Args:
        name: of its column.
        kind: what its values are.
        many: whether an item can have several values.
        zone: time zone in which a filter's times are read, if the column has one.
        float32: whether numbers have the precision of float32, so that a filter's 0.1 must be rounded to it.
    """

    name: str
    kind: AttributeKind
    many: bool = False
    zone: str = ""
    float32: bool = False

    def describe(self) -> str:
        """The kind in words, for messages."""
        words = {AttributeKind.TEXT: "texts" if self.many else "text", AttributeKind.BOOLEAN: "true or false"}
        return words.get(self.kind, f"{self.kind.value}s" if self.many else self.kind.value)


@dataclass(frozen=True, kw_only=True)
@checked
class FilterSchema:
    """The attributes that filters can use.

    Args:
        attributes: in the order of the columns.
    """

    attributes: tuple[Attribute, ...]

    def __post_init__(self) -> None:
        names = [attribute.name for attribute in self.attributes]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    expected="one attribute of each name",
                    found=f"{name!r} {names.count(name)} times",
                    where="FilterSchema",
                    ways_out="rename one of them",
                )

    @property
    def names(self) -> list[str]:
        """The names of the attributes."""
        return [attribute.name for attribute in self.attributes]

    @classmethod
    def of_frame(cls, items: pl.DataFrame, *, attributes: tuple[str, ...] = ()) -> tuple[FilterSchema, dict[str, str]]:
        """Derive the schema from the columns of a catalogue.

        Args:
            items: a line an item.
            attributes: the columns to use; all that can be used if none is named.

        Returns:
            The schema, and the columns that were left out, each with the reason.

        Raises:
            ConfigError: a named column does not exist, or cannot be used.
        """
        found = []
        left_out = {}
        for name in attributes or items.columns:
            if name not in items.columns:
                raise ConfigError(
                    expected="columns of the items as attributes",
                    found=f"{name!r}, which is no column",
                    where="FilterConfig, setting 'attributes'",
                    ways_out=nearest(name, items.columns, instead="remove it"),
                )
            attribute = _attribute(name, items.schema[name], is_named=bool(attributes))
            if isinstance(attribute, Attribute):
                found.append(attribute)
            elif attributes:
                raise ConfigError(
                    expected="attributes of text, numbers, dates, truths, or lists of texts or numbers",
                    found=f"column {name!r} of {items.schema[name]}: {attribute}",
                    where="FilterConfig, setting 'attributes'",
                    ways_out=("remove it", "turn the column into one of these kinds"),
                )
            else:
                left_out[name] = attribute
        return cls(attributes=tuple(found)), left_out

    def cast(self, items: pl.DataFrame) -> pl.DataFrame:
        """The attributes of further items, as this schema has them: texts, and numbers for everything ordered.

        Raises:
            DataError: a column is not there, or its values are of another kind.
        """
        lacking = [name for name in self.names if name not in items.columns]
        if lacking:
            raise DataError(
                expected=f"the columns {', '.join(self.names)}",
                found=f"no column {', '.join(map(repr, lacking))}",
                where="the attributes of items",
                ways_out="add it; null where the value is missing",
            )
        return pl.DataFrame([_cast(items[attribute.name], attribute) for attribute in self.attributes])


_INTEGERS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64)
_TEXTS = (pl.String, pl.Categorical, pl.Enum)


def _attribute(name: str, dtype: pl.DataType, *, is_named: bool) -> Attribute | str:
    """The attribute of a column, or why it cannot be one."""
    many = isinstance(dtype, pl.List | pl.Array)
    inner = dtype.inner if isinstance(dtype, pl.List | pl.Array) else dtype
    if isinstance(inner, (*_TEXTS, pl.Null)):  # without any value it can be anything
        return Attribute(name=name, kind=AttributeKind.TEXT, many=many)
    if isinstance(inner, _INTEGERS):
        return Attribute(name=name, kind=AttributeKind.INTEGER, many=many)
    if isinstance(inner, pl.Float32 | pl.Float64):
        if many and not is_named:
            return "floats in a list are taken for a vector; name the column to filter by it"
        is_single = isinstance(inner, pl.Float32)
        return Attribute(name=name, kind=AttributeKind.NUMBER, many=many, float32=is_single)
    if many:
        return f"no lists of {inner}"
    if isinstance(inner, pl.Boolean):
        return Attribute(name=name, kind=AttributeKind.BOOLEAN)
    if isinstance(inner, pl.Date):
        return Attribute(name=name, kind=AttributeKind.DATE)
    if isinstance(inner, pl.Datetime):
        return Attribute(name=name, kind=AttributeKind.DATETIME, zone=inner.time_zone or "")
    return f"no filters by {inner}"


def _cast(column: pl.Series, attribute: Attribute) -> pl.Series:
    found = _attribute(attribute.name, column.dtype, is_named=True)
    kinds = {attribute.kind} | ({AttributeKind.INTEGER} if attribute.kind is AttributeKind.NUMBER else set())
    is_null = column.dtype == pl.Null or (column.dtype == pl.List(pl.Null))
    is_same = isinstance(found, Attribute) and found.kind in kinds and found.many == attribute.many
    if isinstance(found, Attribute) and bool(found.zone) != bool(attribute.zone):
        is_same = False
    if not (is_same or is_null):
        raise DataError(
            expected=f"{attribute.describe()} in column {attribute.name!r}",
            found=f"a column of {column.dtype}",
            where="the attributes of items",
            ways_out="give the column the type that it had when the index was built",
        )
    inner = {AttributeKind.TEXT: pl.String, AttributeKind.NUMBER: pl.Float64, AttributeKind.BOOLEAN: pl.Boolean}
    to = inner.get(attribute.kind, pl.Int64)
    if attribute.kind is AttributeKind.DATETIME and not is_null:
        column = column.cast(pl.Datetime("us", attribute.zone or None))
    elif attribute.float32 and not is_null:
        # Further items are rounded as those were that the index was built of.
        column = column.cast(pl.List(pl.Float32) if attribute.many else pl.Float32)
    try:
        return column.cast(pl.List(to) if attribute.many else to)
    except pl.exceptions.InvalidOperationError as problem:  # a UInt64 above what Int64 holds
        raise DataError(
            expected=f"values of column {attribute.name!r} that 64 bits hold",
            found=str(problem).splitlines()[0][:200],
            where="the attributes of items",
            ways_out=("turn the column into text if it holds ids: cast(pl.String)", "remove the values"),
        ) from problem
