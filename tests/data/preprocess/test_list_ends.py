"""Lists that were filled up, and ids with spaces: the same ids as without, wherever the lists come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.list_ends import find_padding, has_spaces, without_padding
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.features.schema import Categorical, Label, MultiHot, Schema, Sequence, Spaces
from ziggurat.features.schema_io import schema_from_toml, schema_to_toml


@given(st.lists(st.lists(st.sampled_from(["0", "1", "2", None]), max_size=6), max_size=6))
def test_padding_is_taken_from_the_ends_alone(lists):
    values = pl.Series([each for row in lists for each in row], dtype=pl.String)
    lengths = np.array([len(row) for row in lists], dtype=np.int64)
    left, left_lengths = without_padding(values, lengths, padding="0")
    expected = []
    for row in lists:
        kept = list(row)
        while kept and kept[0] == "0":
            kept.pop(0)
        while kept and kept[-1] == "0":
            kept.pop()
        expected.append(kept)
    assert left_lengths.tolist() == [len(row) for row in expected]
    assert left.to_list() == [each for row in expected for each in row]


@pytest.mark.parametrize(
    ("lists", "padding"),
    [
        ([[1, 2, 0], [3, 0, 0], [4, 5, 6]], "0"),
        ([[0, 0, 1], [0, 2, 3]], "0"),
        ([["a", "[PAD]"], ["a", "b"]], "[PAD]"),
        ([[1, -1], [2, 3]], "-1"),
        ([[1, 0, 2], [3, 0, 0]], ""),  # 0 stands among others, so it is an id
        ([[1, 0], [3]], ""),  # of unlike lengths
        ([[0, 0], [0, 0]], ""),
        ([[1, 2], [3, 4]], ""),
    ],
)
def test_padding_is_found_where_it_fills_lists_up(lists, padding):
    assert find_padding(pl.Series(lists)) == padding


def _table(*, padded: bool, spaces: bool) -> pl.DataFrame:
    histories = [[1 + (row * step) % 19 for step in range(1, 1 + row % 5)] for row in range(400)]
    genres = [["Drama", "Comedy", "Action"][: 1 + row % 3] for row in range(400)]
    between = " | " if spaces else "|"
    return pl.DataFrame(
        {
            "user_id": [row % 40 for row in range(400)],
            "item_id": [1 + row % 19 for row in range(400)],
            "hist_items": [each + [0] * (6 - len(each)) if padded else each for each in histories],
            "genres": [(between if row % 2 else "|").join(each) for row, each in enumerate(genres)],
            "click": [row // 2 % 2 for row in range(400)],
        }
    )


def test_inspect_finds_padding_and_spaces_and_the_same_is_prepared_as_without(tmp_path: Path):
    _table(padded=True, spaces=True).write_parquet(tmp_path / "t.parquet")
    found = inspect_file(tmp_path / "t.parquet")
    history = found.schema.feature("hist_items")
    genres = found.schema.feature("genres")
    assert isinstance(history, Sequence)
    assert isinstance(genres, MultiHot)
    assert (history.padding, genres.separator, genres.spaces) == ("0", "|", Spaces.STRIP)
    assert any("filled up to 6 with '0'" in warning for warning in found.warnings)
    assert any("ids have spaces around them" in warning for warning in found.warnings)
    assert schema_from_toml(schema_to_toml(found.schema), where="t") == found.schema
    plain = Preprocessing.fit(found.schema, [RawChunk.of(_table(padded=False, spaces=False))])
    awkward = Preprocessing.fit(found.schema, [RawChunk.of(_table(padded=True, spaces=True))])
    assert plain.fingerprint == awkward.fingerprint
    request = {"hist_items": [[3, 4, 0, 0]], "genres": ["Comedy | Drama"], "user_id": [1], "item_id": [2]}
    short = {**request, "hist_items": [[3, 4]], "genres": ["Comedy|Drama"]}
    assert awkward.batch(request).jagged.values.tolist() == awkward.batch(short).jagged.values.tolist()


def test_training_says_it_of_a_schema_that_does_not(tmp_path: Path):
    _table(padded=True, spaces=True).write_parquet(tmp_path / "t.parquet")
    features = (Categorical(name="user_id"), Sequence(name="hist_items"), MultiHot(name="genres", separator="|"))
    schema = Schema(features=features, labels=(Label(name="click"),))
    config = DataConfig(train=(str(tmp_path / "t.parquet"),))
    warnings = prepare(config, schema=schema, folder=tmp_path / "prepared").summary.warnings
    assert any("'hist_items' are filled up with '0'" in warning and 'padding = "0"' in warning for warning in warnings)
    assert any("'genres' begin or end with spaces" in warning and 'spaces = "strip"' in warning for warning in warnings)
    said = (features[0], Sequence(name="hist_items", padding="0"))
    said = (*said, MultiHot(name="genres", separator="|", spaces=Spaces.STRIP))
    schema = Schema(features=said, labels=schema.labels)
    warnings = prepare(config, schema=schema, folder=tmp_path / "said").summary.warnings
    assert not any("padding" in warning or "spaces" in warning for warning in warnings)


def test_keys_of_lists_are_younger_than_trained_runs():
    state = Schema(features=(Sequence(name="a"), MultiHot(name="b"))).to_state()
    assert not any({"padding", "spaces"} & set(each) for each in state["features"])
    assert Schema(features=(Sequence(name="a", padding="0"),)).to_state()["features"][0]["padding"] == "0"
    assert has_spaces(pl.Series([["a", " b"]]))
    assert not has_spaces(pl.Series([["a b"], None, []], dtype=pl.List(pl.String)))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_dates_with_and_without_a_zone_are_said_in_training(suffix: str, tmp_path: Path):
    times = [f"2024-01-{1 + row // 24:02}T{row % 24:02}:00:00" + ("Z" if row % 2 else "") for row in range(400)]
    frame = _table(padded=False, spaces=False).select("user_id", "click").with_columns(time=pl.Series(times))
    path = tmp_path / f"t.{suffix}"
    {"csv": frame.write_csv, "jsonl": frame.write_ndjson, "parquet": frame.write_parquet}[suffix](path)
    schema = Schema(features=(Categorical(name="user_id"),), labels=(Label(name="click"),), time="time")
    warnings = prepare(DataConfig(train=(str(path),)), schema=schema, folder=tmp_path / "p").summary.warnings
    assert any("column 'time': 200 of 400 dates name no time zone, and others do" in warning for warning in warnings)
