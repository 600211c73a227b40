"""Work on a file of many columns grows with their number, not with its square."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.names import doubled
from ziggurat.features.inputs import InputSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Categorical, Dense, Label, Schema


def looks_at_all_columns(monkeypatch: pytest.MonkeyPatch, *, num_columns: int) -> int:
    """How often fitting and encoding ask polars for something about all columns: each such look takes their number."""
    names = [f"c{i}" for i in range(num_columns)]
    texts = {name: ["a", "b", "a", None] for name in names}
    numbers = {f"d{i}": [1.0, 2.0, None, 3.0] for i in range(num_columns)}
    chunk = RawChunk.of(pl.DataFrame({**texts, **numbers, "click": [0, 1, 0, 1]}))
    features = (*(Categorical(name=name) for name in texts), *(Dense(name=name) for name in numbers))
    schema = Schema(features=features, labels=(Label(name="click"),))
    count = 0

    def counted(known: Any) -> property:
        def look(frame: pl.DataFrame) -> Any:
            nonlocal count
            count += frame.width > num_columns
            return known.fget(frame)

        return property(look)

    with monkeypatch.context() as patch:
        for name in ("columns", "dtypes", "schema"):
            patch.setattr(pl.DataFrame, name, counted(getattr(pl.DataFrame, name)))
        Preprocessing.fit(schema, [chunk]).encode(chunk)
    return count


def test_each_feature_costs_no_look_at_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (looks_at_all_columns(monkeypatch, num_columns=count) for count in (3, 30))
    assert many == few


def test_tables_are_found_by_name() -> None:
    class Counted(str):
        compared = 0

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

    names = [f"t{i}" for i in range(100)]
    tables = tuple(TableSpec(name=name, num_rows=5 + index) for index, name in enumerate(names))
    inputs = InputSpec(single=tuple(SingleSpec(name=name, table=name) for name in names), tables=tables)
    assert [inputs.table(Counted(name)).num_rows for name in names] == [5 + index for index in range(100)]
    assert Counted.compared <= 2 * len(names)
    with pytest.raises(KeyError):
        inputs.table("absent")


def test_doubled_names_are_found_in_order() -> None:
    assert doubled(["b", "a", "c", "b", "a"]) == ["a", "b"]
