"""A catalogue has what was last seen of each item, whatever the chunks; and a wrong one is named."""

import polars as pl
import pytest

from ziggurat.data.catalogue import catalogue_of, read_catalogue
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import DataError, SchemaError
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Dense, Label, MultiHot, Schema, Sequence, Vector, column_of

SCHEMA = Schema(
    features=(
        Categorical(name="user"),
        Sequence(name="history", table="item"),
        Dense(name="age"),
        Vector(name="taste", dim=2),
        Categorical(name="item"),
        Dense(name="price"),
        MultiHot(name="tags", column="labels"),
    ),
    labels=(Label(name="like"),),
    time="t",
    group="user",
    items=Items(id="item", features=("price", "tags")),
)


def _events() -> pl.DataFrame:
    return pl.DataFrame(
        {
            "user": ["a", "b", "a", "b", "c"],
            "history": [["1"], [], ["2"], ["1"], []],
            "age": [20, 30, 20, 30, 40],
            "taste": [[0.0, 1.0]] * 5,
            "item": [7.0, 9.0, 7.0, None, 9.0],
            "price": [1.0, 2.0, 3.0, 4.0, 5.0],
            "labels": [["x"], ["y"], ["z"], [], ["w"]],
            "t": [30, 10, 20, 5, 10],
            "like": [1, 0, 1, 0, 1],
            "colour": ["red", "blue", "green", "black", "white"],
        }
    )


def test_the_last_in_time_counts_and_of_equal_times_the_last_row(tmp_path):
    _events().write_parquet(tmp_path / "a.parquet")
    found = catalogue_of(RawSource(tmp_path / "a.parquet"), schema=SCHEMA, keep=("colour",))
    assert found.columns == ["item", "price", "labels", "colour"]
    assert found.rows() == [(7.0, 1.0, ["x"], "red"), (9.0, 5.0, ["w"], "white")]


def test_files_in_another_order_give_the_same_catalogue(tmp_path):
    events = _events().with_columns(pl.Series("t", [1, 2, 3, 4, 5]))
    for number in range(5):
        events[number : number + 1].write_parquet(tmp_path / f"{number}.parquet")
    ordered = catalogue_of(RawSource([tmp_path / f"{n}.parquet" for n in range(5)]), schema=SCHEMA)
    mixed = catalogue_of(RawSource([tmp_path / f"{n}.parquet" for n in (4, 2, 0, 3, 1)]), schema=SCHEMA)
    assert ordered.rows() == mixed.rows() == [(7.0, 3.0, ["z"]), (9.0, 5.0, ["w"])]


def _with_columns_of(frame: pl.DataFrame, *, features: tuple[str, ...]) -> pl.DataFrame:
    """The frame with empty columns for all features but these."""
    wanted = {column_of(feature) for feature in SCHEMA.features if feature.name in features}
    absent = {column_of(feature) for feature in SCHEMA.features} - wanted
    return frame.select(*sorted(wanted), *(pl.lit(None).alias(name) for name in sorted(absent)))


def test_items_alone_and_users_alone_can_be_encoded():
    events = _events()
    fitted = Preprocessing.fit(SCHEMA, [RawChunk.of(events)])
    items = _with_columns_of(events, features=SCHEMA.items.features)
    batch, whole = fitted.batch(items), fitted.batch(events)
    names = [spec.name for spec in fitted.inputs.single]
    assert batch.single[names.index("item")].equal(whole.single[names.index("item")])
    assert batch.single[names.index("user")].tolist() == [2] * 5  # missing
    assert batch.jagged.lengths(num_features=2)[0].tolist() == [0] * 5
    users = _with_columns_of(events, features=("user", "history", "age", "taste"))
    assert fitted.batch(users).single[names.index("item")].tolist() == [2] * 5


def test_a_catalogue_file_keeps_all_columns_and_refuses_doubles(tmp_path):
    items = pl.DataFrame({"item": ["9", "7.0"], "price": [1.0, 2.0], "labels": [["x"], []], "maker": ["m", "n"]})
    items.write_parquet(tmp_path / "items.parquet")
    found = read_catalogue(RawSource(tmp_path / "items.parquet"), schema=SCHEMA)
    assert found["item"].to_list() == ["7.0", "9"]
    assert found["maker"].to_list() == ["n", "m"]
    pl.concat([items, items.with_columns(item=pl.Series(["7", "8"]))]).write_parquet(tmp_path / "items.parquet")
    with pytest.raises(DataError, match="each item once"):
        read_catalogue(RawSource(tmp_path / "items.parquet"), schema=SCHEMA)
    items.with_columns(item=pl.Series(["7", ""])).write_parquet(tmp_path / "items.parquet")
    with pytest.raises(DataError, match="an id"):
        read_catalogue(RawSource(tmp_path / "items.parquet"), schema=SCHEMA)
    items.drop("price").write_parquet(tmp_path / "items.parquet")
    with pytest.raises(SchemaError, match="price"):
        read_catalogue(RawSource(tmp_path / "items.parquet"), schema=SCHEMA)


def test_a_schema_without_items_is_named(tmp_path):
    _events().write_parquet(tmp_path / "a.parquet")
    schema = Schema(features=(Categorical(name="item"),))
    with pytest.raises(SchemaError, match="which features describe the item"):
        catalogue_of(RawSource(tmp_path / "a.parquet"), schema=schema)
