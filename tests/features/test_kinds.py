"""Kinds of feature: one list of them, which files, configs and messages follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import polars as pl
import pytest

from ziggurat.config import from_json, to_json
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import CheckpointError, ConfigError, SchemaError
from ziggurat.features.inputs import SingleSpec, VectorSpec
from ziggurat.features.kinds import Cells, Feature, IdLists, Parsed, RequestReader
from ziggurat.features.kinds.feature import Encoded, Fitted
from ziggurat.features.labels import Label
from ziggurat.features.schema import Categorical, Dense, MultiHot, Schema, Table, schema_to_json, table_of
from ziggurat.features.schema_io import schema_from_toml, schema_to_toml


@dataclass(frozen=True, kw_only=True)
class Pair(Feature):
    """Two numbers that a column has side by side."""

    kind: Literal["pair"] = "pair"
    scale: float = 1.0

    def spec(self) -> VectorSpec:
        return VectorSpec(name=self.name, dim=2)

    def parse(self, cells: Cells) -> Parsed:
        return cells.vectors(2) * self.scale

    def of_request(self, value: Any, read: RequestReader) -> Any:
        return read.numbers(value)

    def request_type(self) -> Any:
        raise NotImplementedError


@pytest.fixture
def pair() -> Iterator[type[Pair]]:
    yield Feature.add(Pair)
    del Feature._kinds["pair"]


def test_a_kind_of_ones_own_is_read_from_toml_and_json(pair: type[Pair]) -> None:
    schema = Schema(features=(Dense(name="x"), pair(name="at", column="place", scale=2.0)))
    text = schema_to_toml(schema)
    assert 'kind = "pair"\ncolumn = "place"\nscale = 2.0' in text
    assert schema_from_toml(text, "test") == schema
    assert from_json(Schema, to_json(schema), where="test") == schema
    assert schema.to_state()["features"][1] == {"kind": "pair", "name": "at", "column": "place", "scale": 2.0}


def test_a_kind_that_nobody_imported_is_refused_with_the_way_to_import_it(pair: type[Pair]) -> None:
    schema = Schema(features=(pair(name="at"),))
    text = schema_to_toml(schema)
    data = to_json(schema)
    del Feature._kinds["pair"]
    for read in (lambda: schema_from_toml(text, "test"), lambda: from_json(Schema, data, where="test")):
        with pytest.raises((SchemaError, ConfigError), match="ziggurat --extension MODULE"):
            read()
    Feature.add(pair)


def test_a_file_names_the_module_of_a_kind_that_nobody_imported(pair: type[Pair], tmp_path: Path) -> None:
    schema = Schema(features=(Dense(name="x"), pair(name="at")))
    data = schema_to_json(schema)
    assert data["features"][0] == to_json(schema.features[0]), "a kind of the package is known to everybody"
    assert from_json(Schema, data, where="test") == schema
    chunk = RawChunk.of(pl.DataFrame({"x": [1.0], "at": [[1.0, 2.0]]}))
    fitted = Preprocessing.fit(schema, [chunk])
    save_preprocessing(fitted, tmp_path / "fitted")
    assert load_preprocessing(tmp_path / "fitted").fingerprint == fitted.fingerprint
    del Feature._kinds["pair"]
    for read in (
        lambda: from_json(Schema, data, where="test"),
        lambda: load_preprocessing(tmp_path / "fitted"),
    ):
        with pytest.raises(
            (ConfigError, CheckpointError), match=r"'pair', written by tests.features.test_kinds:Pair"
        ) as refused:
            read()
        assert refused.value.ways_out == (
            f"ziggurat --extension {__name__} …, or in Python import {__name__}, which adds this kind of feature",
        )
    Feature.add(pair)


def test_two_kinds_of_one_name_are_refused(pair: type[Pair]) -> None:
    assert Feature.add(pair) is pair, "the same class may be listed again, as by a cell that runs twice"

    @dataclass(frozen=True, kw_only=True)
    class Other(Pair):
        pass

    with pytest.raises(ConfigError, match=r"both named 'pair'"):
        Feature.add(Other)
    assert Feature.kinds()["pair"] is pair


def kind_of_my_own(**parts: Any) -> Any:
    """A kind from outside, with parts left out or other than they should be."""
    whole = {"spec": Pair.spec, "parse": Pair.parse, "of_request": Pair.of_request, "request_type": Pair.request_type}
    names = {name: part for name, part in (whole | parts).items() if part is not None}
    annotations = {"kind": Literal["mine"]}
    cls = type("Mine", (Feature,), {"kind": "mine", "__annotations__": annotations, "__module__": __name__, **names})
    return dataclass(frozen=True, kw_only=True)(cls)


def list_of_my_own() -> Any:
    """A kind of lists that does not say whether their order means something."""

    @dataclass(frozen=True, kw_only=True)
    class Words(IdLists):
        kind: Literal["mine"] = "mine"

    return Words


@pytest.mark.parametrize(
    ("parse", "found", "way"),
    [
        (
            lambda self, cells: np.ma.masked_less(np.array([1, 5]), 3),
            "a masked array (2,) of int64",
            "return np.ma.filled(values.astype(np.float64), np.nan)",
        ),
        (
            lambda self, cells: np.ma.masked_less(np.array([[1.0], [5.0]], dtype=np.float32), 3),
            "a masked array (2, 1) of float32",
            "return np.ma.filled(values.astype(np.float64), np.nan)",
        ),
        (lambda self, cells: None, "a NoneType", "return values.astype(np.float64)"),
    ],
)
def test_a_kind_that_parses_another_form_is_named_and_told_what_to_return(parse: Any, found: str, way: str) -> None:
    chunk = RawChunk.of(pl.DataFrame({"at": [[1.0, 2.0], [3.0, 4.0]]}))
    with pytest.raises(SchemaError, match=r"Mine\.parse, feature 'at'") as refused:
        Preprocessing.fit(Schema(features=(kind_of_my_own(parse=parse)(name="at"),)), [chunk])
    assert refused.value.found == found
    assert refused.value.ways_out[0].startswith(way)


def test_a_kind_of_lists_that_parses_nothing_is_told_of_lists_and_the_way_out_parses_them() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Words(IdLists):
        kind: Literal["mine"] = "mine"
        is_ordered: ClassVar[bool] = False

        def parse(self, cells: Cells) -> Parsed:
            del cells
            return None  # type: ignore[return-value]

    @dataclass(frozen=True, kw_only=True)
    class Mended(Words):
        def parse(self, cells: Cells) -> Parsed:
            return cells.id_lists(self, keep_last=False)

    frame = pl.DataFrame({"at": [["a"], ["a", "b"]]})
    with pytest.raises(SchemaError, match=r"Words\.parse, feature 'at'") as refused:
        Preprocessing.fit(Schema(features=(Words(name="at"),)), [RawChunk.of(frame)])
    assert refused.value.ways_out[0] == "return cells.id_lists(self, keep_last=False) for the lists of the column"
    fitted = Preprocessing.fit(Schema(features=(Mended(name="at"),)), [RawChunk.of(frame)])
    assert fitted.batch(frame).jagged.offsets.tolist() == [0, 1, 3]


def test_no_cell_is_to_blame_for_a_kind_that_calls_its_cells_wrongly() -> None:
    kind = kind_of_my_own(parse=lambda self, cells: cells.vectors(dimensions=2))
    chunk = RawChunk.of(pl.DataFrame({"at": [[1.0, 2.0]]}))
    with pytest.raises(SchemaError, match="TypeError") as refused:
        Preprocessing.fit(Schema(features=(kind(name="at"),)), [chunk])
    assert "test_kinds.py:" in refused.value.where
    assert "row" not in refused.value.where
    assert len(refused.value.ways_out) == 1
    assert refused.value.ways_out[0].startswith("correct the kind")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kind_of_my_own(spec=None, parse=None), "no parse, no spec"),
        (lambda: kind_of_my_own(spec=lambda self: "two numbers"), "'two numbers'"),
        (lambda: kind_of_my_own(spec=lambda self: VectorSpec(name="other", dim=2)), "name of the feature"),
        (lambda: kind_of_my_own(spec=lambda self: self.width), "AttributeError"),
        (lambda: kind_of_my_own(spec=lambda self: SingleSpec(name=self.name, table=self.name)), "table_name ''"),
        (lambda: kind_of_my_own(table_name=lambda self: self.name), "write @property above"),
        (lambda: list_of_my_own(), r"is_ordered[^$]*where: .*Words in .*test_kinds\.py"),
        (lambda: kind_of_my_own(kind="my kind"), "a word of letters"),
        (lambda: type("Mine", (Pair,), {"kind": "mine"}), "@dataclass"),
    ],
)
def test_a_kind_that_is_half_written_is_refused_where_it_is_added(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Feature.add(make())
    assert "mine" not in Feature.kinds()
    assert Feature.add(kind_of_my_own())
    del Feature._kinds["mine"]


@pytest.mark.parametrize("row", [-1, 1_000_000])
def test_rows_that_a_table_does_not_have_are_refused_where_they_are_encoded(row: int) -> None:
    kind = kind_of_my_own(
        spec=lambda self: SingleSpec(name=self.name, table=self.name),
        table_name=property(lambda self: self.name),
        parse=lambda self, cells: cells.ids(),
        encode=lambda self, parsed, fitted: np.full(2, row, dtype=np.int32),
    )
    chunk = RawChunk.of(pl.DataFrame({"at": ["a", "b"]}))
    preprocessing = Preprocessing.fit(Schema(features=(kind(name="at"),)), [chunk])
    with pytest.raises(SchemaError, match=r"rows of table 'at', from 0 to") as refused:
        preprocessing.encode(chunk)
    assert str(row) in refused.value.found
    assert "encode, feature 'at'" in refused.value.where


def test_what_is_no_feature_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"features\[0\]"):
        Schema(features=(Table(name="x"),))  # type: ignore[arg-type]


def test_tables_follow_from_the_features() -> None:
    buckets = Dense(name="x", transform="criteo_buckets", min_count=7)  # type: ignore[arg-type]
    schema = Schema(
        features=(buckets, Dense(name="y", min_count=5), Categorical(name="z", table="y"), MultiHot(name="l"))
    )
    assert [table_of(each) for each in schema.features] == ["x", "", "y", "l"]
    assert (schema.table("x").min_count, schema.table("y").min_count) == (7, 1)


@dataclass(frozen=True, kw_only=True)
class Fragile(Pair):
    """Cannot read "bad", and forgets one division by zero."""

    kind: Literal["fragile"] = "fragile"

    def parse(self, cells: Cells) -> Parsed:
        return np.array([{"bad": None, "zero": 0.0}.get(text, 1.0) / 1.0 for text in cells.series])

    def encode(self, parsed: Parsed, fitted: Fitted) -> Encoded:
        with np.errstate(divide="ignore"):
            return np.stack([parsed, 1.0 / np.asarray(parsed)], axis=1).astype(np.float32)


@pytest.mark.parametrize(
    ("cell", "found", "where"),
    [
        (
            "bad",
            "TypeError: unsupported operand",
            "Fragile.parse, feature 'at'; frame, row 37, column 'place'",
        ),
        ("zero", "[ 0. inf] for row 37 of the data", "Fragile.encode, feature 'at'"),
    ],
)
def test_a_kind_that_raises_or_encodes_nan_is_named_with_its_feature_and_row(cell: str, found: str, where: str) -> None:
    schema = Schema(features=(Fragile(name="at", column="place"),), labels=(Label(name="like"),))
    cells = ["good"] * 100
    cells[37] = cell
    frame = pl.DataFrame({"place": cells, "like": [0, 1] * 50})

    def encoded() -> object:
        return Preprocessing.fit(schema, [RawChunk.of(frame)]).encode(RawChunk.of(frame))

    with pytest.raises(SchemaError) as caught:
        encoded()
    assert found in caught.value.found
    assert where in caught.value.where


def test_a_kind_that_transforms_what_nothing_was_learned_of_is_told_what_is_missing() -> None:
    def transformed(self: Feature, parsed: Parsed, fitted: Fitted) -> Encoded:
        return fitted.transformed(parsed[:, 0].astype(np.float64))

    schema = Schema(
        features=(kind_of_my_own(parse=lambda self, cells: cells.vectors(2), encode=transformed)(name="at"),)
    )
    preprocessing = Preprocessing(schema, vocabularies={}, numbers={})
    with pytest.raises(SchemaError, match="no fitted_numbers"):
        preprocessing.batch(pl.DataFrame({"at": [[1.0, 2.0]]}))
