"""Moments: a list of times a row, which models of histories read beside the events."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from ziggurat.config import JSON, to_json
from ziggurat.errors import SchemaError
from ziggurat.features.date_order import DateOrder
from ziggurat.features.inputs import MomentsSpec
from ziggurat.features.kinds.feature import Cells, ColumnType, Encoded, Feature, Fitted, Parsed, RequestReader
from ziggurat.typed import Length, checked


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Moments(Feature):
    """A list of times a row, latest last: whole numbers of 64 bits, kept exactly, with no table and no embedding.

    Lists longer than `max_length` keep their last times. `seen` is the earliest and the latest time of training, where
    that is known: a time of another unit, by its size, is then a bad row. Dates, also in text, count microseconds;
    `date_order` says what stands first in those like 01/03/2024, which under AUTO are no times.
    """

    kind: Literal["moments"] = "moments"
    max_length: Length = 1000
    seen: tuple[int, ...] = ()
    date_order: DateOrder = DateOrder.AUTO

    holds_times: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.seen and (len(self.seen) != 2 or self.seen[0] > self.seen[1]):
            raise SchemaError(
                expected="the earliest and the latest time that training has seen, or nothing",
                found=f"seen = {list(self.seen)}",
                where=f"moments {self.name!r}",
                ways_out=("seen = [978300760, 1046454590]", "leave it out"),
            )

    def spec(self) -> MomentsSpec:
        """Return a list of times a sample."""
        return MomentsSpec(name=self.name, max_length=self.max_length)

    def parse(self, cells: Cells) -> Parsed:
        """Return the last times of each list."""
        return cells.times(max_length=self.max_length, seen=self.seen, date_order=self.date_order)

    def encode(self, parsed: Parsed, fitted: Fitted) -> Encoded:
        """Return the times, and the length of each list."""
        del fitted
        return parsed.values, parsed.lengths

    def of_request(self, value: object, read: RequestReader) -> list[int | None]:
        """Return the times of the list."""
        return read.times(value, feature=self.name, seen=self.seen, date_order=self.date_order)

    def request_type(self) -> ColumnType:
        """Return lists of 64-bit whole numbers."""
        import polars as pl

        return pl.List(pl.Int64)

    @property
    def seen_times(self) -> tuple[int, ...]:
        """The earliest and the latest time of training."""
        return self.seen

    def with_seen_times(self, seen: tuple[int, ...]) -> Feature:
        """Return the feature with these as the earliest and the latest time of training."""
        return replace(self, seen=seen)

    @property
    def seen_date_order(self) -> DateOrder:
        """The order in which training has read dates."""
        return self.date_order

    def with_seen_date_order(self, order: DateOrder) -> Feature:
        """Return the feature that reads dates in this order."""
        return replace(self, date_order=order)

    def state(self) -> dict[str, JSON]:
        """Return plain data without what was seen: that is of the data, whose files count anyway."""
        state = {name: value for name, value in to_json(self).items() if name != "seen"}
        if self.date_order is DateOrder.AUTO:
            del state["date_order"]  # as before there was one
        return state
