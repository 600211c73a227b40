"""Every guess on a zoo of columns, with its reason; and what is guessed can be trained on as it is."""

import ast
import gzip
import re
import shlex
import subprocess
import tempfile
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from polars.testing.parametric import dataframes

from ziggurat.cli.main import main
from ziggurat.data.inspect.column_facts import measure
from ziggurat.data.inspect.column_rules import find_separator, guess_feature, words
from ziggurat.data.inspect.inspect_file import Inspection, inspect_file
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.cells import Faults
from ziggurat.data.preprocess.values.parsing import parse_label
from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ConfigError, DataError, MissingFileError, SchemaError, ZigguratError
from ziggurat.features.labels import MissingLabel
from ziggurat.features.schema import (
    Categorical,
    Dense,
    Feature,
    Label,
    MultiHot,
    NumericTransform,
    Schema,
    Sequence,
    Task,
    Vector,
)
from ziggurat.features.schema_io import read_schema, write_schema
from ziggurat.testing.data import shared_data

ROWS = 600
RNG = np.random.default_rng(0)
USERS = RNG.integers(1, 40, ROWS)
LABEL = RNG.random(ROWS) < 0.4
CLICKS = (RNG.random(ROWS) < 0.3).astype(int)
GENRES = ("Action", "Comedy", "Drama", "Horror", "Romance", "Sci-Fi")


def zoo() -> dict[str, object]:
    """A table with every kind of column, as a user would have it."""
    items = RNG.integers(1000, 1100, ROWS)
    return {
        "row_id": np.arange(ROWS) + 7,
        "user_id": USERS,
        "item_id": items,
        "click": CLICKS,
        "event_time": 1_700_000_000 + RNG.integers(0, 10**6, ROWS),
        "session_id": [f"s{user}-{n // 60}" for n, user in enumerate(USERS)],
        "sample_weight": RNG.random(ROWS),
        "price": np.round(np.exp(RNG.normal(3, 2, ROWS)), 2),
        "temperature": RNG.normal(15, 5, ROWS),
        "num_views": RNG.poisson(30, ROWS),
        "depth": RNG.geometric(0.3, ROWS) - 1,
        "balance": RNG.integers(-50, 50, ROWS),
        "weekday": RNG.integers(0, 7, ROWS),
        "shelf": RNG.integers(0, 500, ROWS),
        "is_new": RNG.random(ROWS) < 0.5,
        "country": RNG.choice(["de", "fr", "it", None], ROWS).tolist(),
        "genres": [list(RNG.choice(GENRES, RNG.integers(0, 4), replace=False)) for _ in range(ROWS)],
        "tags": ["|".join(RNG.choice(GENRES, RNG.integers(1, 4), replace=False)) for _ in range(ROWS)],
        "recent_item_ids": [RNG.choice(items, RNG.integers(0, 9)).tolist() for _ in range(ROWS)],
        "image": RNG.normal(size=(ROWS, 8)).tolist(),
        "prices_seen": [RNG.random(RNG.integers(1, 5)).tolist() for _ in range(ROWS)],
        "url": [f"https://example.com/page/{n}" for n in range(ROWS)],
        "payload": ['{"a": 1}', '{"b": [2]}'] * (ROWS // 2),
        "constant": ["x"] * ROWS,
        "empty": pl.Series([None] * ROWS, dtype=pl.String),
        "day": [datetime(2024, 1, 1) + timedelta(days=int(n)) for n in RNG.integers(0, 60, ROWS)],
        "will_buy_code": np.where(CLICKS == 1, RNG.integers(10, 20, ROWS), RNG.integers(20, 30, ROWS)),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("zoo") / "zoo.parquet"
    pl.DataFrame(zoo(), strict=False).write_parquet(file)
    return file


@pytest.fixture(scope="module")
def inspection(path: Path) -> Inspection:
    return inspect_file(path)


EXPECTED: dict[str, tuple[Feature | str, str]] = {
    "row_id": ("left out", "every row has its own value"),
    "user_id": (Categorical(name="user_id"), "also the group of GAUC"),
    "item_id": (Categorical(name="item_id"), "the name says id"),
    "click": ("label", "the name says so"),
    "event_time": ("time", "seconds since 1970"),
    "session_id": ("session", "hardly come back"),
    "sample_weight": ("weight", "of the sample, by the name"),
    "price": (Dense(name="price", transform=NumericTransform.LOG1P_STANDARDISE), "the extremes are far out"),
    "temperature": (Dense(name="temperature", transform=NumericTransform.STANDARDISE), "numbers with fractions"),
    "num_views": (Dense(name="num_views", transform=NumericTransform.STANDARDISE), "the name says views"),
    "depth": (Dense(name="depth", transform=NumericTransform.STANDARDISE), "small values are the frequent ones"),
    "balance": (Dense(name="balance", transform=NumericTransform.STANDARDISE), "below zero"),
    "weekday": (Categorical(name="weekday"), "the name says weekday"),
    "shelf": (Categorical(name="shelf"), "without the shape of counts"),
    "is_new": (Categorical(name="is_new"), "true or false"),
    "country": (Categorical(name="country"), "% null"),
    "genres": (MultiHot(name="genres"), "6 distinct ids in all 600 rows"),
    "tags": (MultiHot(name="tags", separator="|"), "text with '|' between ids"),
    "recent_item_ids": (Sequence(name="recent_item_ids", table="item_id"), "shares the table of item_id: 100%"),
    "image": (Vector(name="image", dim=8), "every list has 8 numbers"),
    "prices_seen": ("left out", "unlike length (1 to 4)"),
    "url": ("left out", "every row has its own value"),
    "payload": ("left out", "looks like JSON"),
    "constant": ("left out", "it is constant"),
    "empty": ("left out", "it is empty"),
    "day": ("left out", "derive hour or weekday"),
    "will_buy_code": ("left out", "alone orders 'click' with AUC"),
}


@pytest.mark.parametrize("column", list(EXPECTED))
def test_zoo(inspection: Inspection, path: Path, column: str):
    expected, reason = EXPECTED[column]
    guess = next(line for line in inspection.columns if line.column == column)
    assert reason in guess.explanation
    assert inspection.explanations[column] == guess.explanation
    if isinstance(expected, str):
        assert guess.becomes == expected
        assert column not in {feature.name for feature in inspection.schema.features}
    else:
        assert guess.becomes.startswith(expected.kind)
        found = inspection.schema.feature(column)
        if isinstance(found, Dense) and isinstance(expected, Dense):
            # A missing number counts as the usual one, whether these rows lack any or a later one will.
            middle = pl.read_parquet(path, columns=[column])[column].quantile(0.5)
            expected = replace(expected, missing=float(f"{middle:.10g}"))
            assert "; missing ones would count as " in guess.explanation
        assert found == expected


def test_zoo_roles_warnings_and_table(inspection: Inspection, path: Path):
    schema = inspection.schema
    assert schema.labels == (Label(name="click"),)
    assert (schema.group, schema.time, schema.session) == ("user_id", "event_time", "session_id")
    assert schema.weight == "sample_weight"
    assert [warning for warning in inspection.warnings if warning.startswith("'will_buy_code' was left out")]
    table = inspection.table()
    assert table[0] == ("column", "type", "becomes", "distinct", "nulls", "examples", "why")
    assert [line[0] for line in table[1:]] == pl.read_parquet(path).columns
    assert table[2][2] == "categorical, group"


def test_what_is_guessed_can_be_fitted_and_encoded_from_every_format(
    inspection: Inspection, path: Path, tmp_path: Path
):
    frame = pl.read_parquet(path)
    nested = [name for name, dtype in frame.schema.items() if dtype.is_nested()]
    text = frame.drop(nested)
    text.write_csv(tmp_path / "zoo.csv")
    text.write_csv(tmp_path / "zoo.tsv", separator="\t")
    (tmp_path / "zoo.csv.gz").write_bytes(gzip.compress((tmp_path / "zoo.csv").read_bytes()))
    for file in (path, tmp_path / "zoo.csv", tmp_path / "zoo.tsv", tmp_path / "zoo.csv.gz"):
        found = inspection if file == path else inspect_file(file)
        if file != path:
            assert [(f.name, f.kind) for f in found.schema.features] == [
                (f.name, f.kind) for f in inspection.schema.features if f.name not in nested
            ]
            assert (found.schema.labels, found.schema.group) == (inspection.schema.labels, "user_id")
        schema = read_schema(write_schema(found.schema, tmp_path / "my.toml", comments=found.explanations))
        assert schema == found.schema
        chunks = list(RawSource(file).frames(columns=schema.columns))
        preprocessing = Preprocessing.fit(schema, chunks)
        assert sum(preprocessing.encode(chunk).num_rows for chunk in chunks) == ROWS


# --------------------------------------------------------------------------------------------------------- single cases


@pytest.mark.parametrize(
    ("name", "values", "kind"),
    [
        ("customer", RNG.zipf(1.3, 3000) % 300 + 1, Categorical),  # who comes first buys most
        ("gid", RNG.zipf(1.3, 12_000) % 300 + 1, Categorical),  # nearly every one of 300 is there: no counts
        ("seen", RNG.zipf(1.3, 3000), Dense),  # counts have gaps
        ("depth", RNG.geometric(0.1, 3000), Dense),  # or are few
    ],
)
def test_ids_written_as_floats_are_ids(name: str, values: np.ndarray, kind: type[Feature]):
    """`17.0`, as programs write ids of a column that has empty cells."""
    texts = [f"{value}.0" if place % 200 else None for place, value in enumerate(values)]
    facts = measure(pl.Series(name, texts), from_text=True, num_rows=len(texts))
    assert isinstance(guess_feature(facts).feature, kind)


def _inspect(tmp_path: Path, **columns: object) -> Inspection:
    """A table of these columns beside a label and an id."""
    size = len(next(iter(columns.values())))  # pyright: ignore[reportArgumentType]
    base = {"label": LABEL[:size], "shop_id": np.arange(size) % 5}
    pl.DataFrame(base | columns, strict=False).write_parquet(tmp_path / "t.parquet")
    return inspect_file(tmp_path / "t.parquet")


def _becomes(inspection: Inspection, column: str) -> str:
    return next(line.becomes for line in inspection.columns if line.column == column)


def test_ratings_become_likes(tmp_path: Path):
    for scale, start in (((1, 2, 3, 4, 5), 4.0), ((0.5, 1.5, 3.0, 4.0, 5.0), 4.0), (tuple(range(1, 11)), 8.0)):
        pl.DataFrame({"user_id": USERS, "rating": RNG.choice(scale, ROWS)}).write_parquet(tmp_path / "r.parquet")
        schema = inspect_file(tmp_path / "r.parquet").schema
        assert schema.labels == (Label(name="like", column="rating", positive_from=start),)


def test_a_rating_beside_a_label_is_an_outcome(tmp_path: Path):
    found = _inspect(tmp_path, rating=RNG.integers(1, 6, ROWS))
    assert found.schema.labels == (Label(name="label"),)
    assert _becomes(found, "rating") == "left out"
    assert any("rating" in warning for warning in found.warnings)


def test_several_outcomes_are_several_labels_and_history_is_none(tmp_path: Path):
    found = _inspect(tmp_path, conversion=CLICKS, click=1 - CLICKS % 2, clicks_before=CLICKS, liked=CLICKS * 2 - 1)
    assert [label.name for label in found.schema.labels] == ["label", "click", "conversion", "liked"]
    assert found.schema.labels[3].positive_from == 1
    assert _becomes(found, "clicks_before") == "categorical"


def test_other_labels(tmp_path: Path):
    def labels(**columns: object) -> tuple[Label, ...]:
        pl.DataFrame({"user": USERS, **columns}).write_parquet(tmp_path / "l.parquet")
        return inspect_file(tmp_path / "l.parquet").schema.labels

    assert labels(target=RNG.normal(size=ROWS)) == (Label(name="target", task=Task.REGRESSION),)
    assert labels(is_churned=CLICKS) == (Label(name="is_churned"),)  # the only 0/1 column
    assert labels(a=CLICKS, b=1 - CLICKS) == ()
    answers = ["yes" if click else "no" for click in CLICKS]
    assert labels(label=answers) == (Label(name="label", positive="yes", negative="no"),)
    assert labels(is_mobile=1 - CLICKS, **{"Bought?": answers}) == (
        Label(name="Bought?", positive="yes", negative="no"),
    )
    assert labels(is_mobile=1 - CLICKS, clue=answers) == (Label(name="clue", positive="yes", negative="no"),)


ANSWERS = {"user": [f"u{n % 7}" for n in range(60)], "price": [n % 9 for n in range(60)]}


@pytest.mark.parametrize(
    ("values", "positive", "label"),
    [
        (["lost", "won", "drawn"], "won", Label(name="answer", positive="won")),
        (["no", "yes"], "no", Label(name="answer", positive="no", negative="yes")),
        ([1, 2, 5], "5", Label(name="answer", positive="5")),
        ([True, False], "false", Label(name="answer", positive="false", negative="true")),
    ],
)
def test_the_positive_of_a_label_is_named(values: list[object], positive: str, label: Label) -> None:
    found = inspect_file({**ANSWERS, "answer": [*values] * (60 // len(values))}, label="answer", positive=positive)
    assert found.schema.labels == (label,)
    chunk = RawChunk.of(pl.DataFrame({"answer": values}))
    parsed = parse_label(label, chunk.frame["answer"], Faults(chunk=chunk))
    assert parsed.tolist() == [float(str(value).lower() == positive) for value in values]


def test_each_way_out_of_a_label_of_three_texts_works() -> None:
    table = {**ANSWERS, "answer": ["lost", "won it's", "drawn"] * 20}
    with pytest.raises(DataError) as refused:
        inspect_file(table, label="answer")
    positives = 0
    for way in refused.value.ways_out:
        name, _, value = way.partition(": ")[2].partition("=")
        positives += name == "positive"
        named = {"label": "answer", name: ast.literal_eval(value)}
        assert len(inspect_file(table, label=named["label"], positive=named.get("positive", "")).schema.labels) == 1
    assert positives == 3
    with pytest.raises(DataError, match='positive="won it\'s"'):
        inspect_file(table, label="answer", positive="won its")
    with pytest.raises(SchemaError, match='label="answer"'):
        inspect_file(table, positive="drawn")
    with pytest.raises(SchemaError) as refused:
        inspect_file(table, label="answer", session="answer")
    assert refused.value.where.startswith("label and session, in")


def test_each_way_out_of_a_label_of_three_texts_works_when_it_is_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "inspect", str(tmp_path / "t.csv"), "--label", "answer"]
    pl.DataFrame({**ANSWERS, "answer": ["lost", "won it's", "drawn"] * 20}).write_csv(tmp_path / "t.csv")
    assert main(command) == 2
    ways = re.findall(r"\d\. .*?: (--.*)", capsys.readouterr().err)
    assert sum("--positive" in way for way in ways) == 3
    for way in ways:
        assert main([*command, *shlex.split(way)]) == 0


def test_the_positive_of_a_file_of_texts_is_the_text_of_the_file(tmp_path: Path) -> None:
    rows = "".join(f"u{n % 7},{'TRUE' if n % 3 else 'FALSE'}\n" for n in range(60))
    (tmp_path / "t.csv").write_text("user,kept\n" + rows)
    found = inspect_file(tmp_path / "t.csv", label="kept", positive="FALSE")
    assert found.schema.labels == (Label(name="kept", positive="FALSE", negative="TRUE"),)
    chunk = next(RawSource(tmp_path / "t.csv").frames())
    bare = Faults(chunk=chunk)
    parse_label(Label(name="kept"), pl.Series("kept", ["drawn", "won"]), bare)
    assert bare.found[0].ways_out[:2] == (
        'in the [[label]] of the schema: positive = "drawn", negative = "won"',
        'in the [[label]] of the schema: positive = "won", negative = "drawn"',
    )


def test_without_label_a_warning_says_so(tmp_path: Path):
    pl.DataFrame({"user": USERS}).write_parquet(tmp_path / "u.parquet")
    found = inspect_file(tmp_path / "u.parquet")
    assert found.warnings[0].startswith("no label found")
    assert "Note: no label found" in found.explanations[""]


@pytest.mark.parametrize(
    ("name", "values", "becomes"),
    [
        ("created_at", [datetime(2024, 1, 1, hour=n % 24) for n in range(ROWS)], "time"),
        ("ts", 1_700_000_000_000 + np.arange(ROWS), "time"),
        ("timestamp", np.arange(ROWS) % 100, "time"),
        ("date", [f"2024-01-{n % 28 + 1:02d}" for n in range(ROWS)], "time"),
        ("created", [f"2024-01-02T03:04:{n % 60:02d}Z" for n in range(ROWS)], "time"),
        ("when", [f"{n % 28 + 1:02d}.03.2024 03:{n % 60:02d}" for n in range(ROWS)], "time"),
        ("when", [f"3/{n % 28 + 1}/2024 3:{n % 60:02d} PM" for n in range(ROWS)], "time"),
        ("when", [f"2024-03-01T03:35:{n % 60:02d}.250+01:00" for n in range(ROWS)], "time"),
        ("version", [f"{n % 9}.1.20" for n in range(ROWS)], "categorical"),
        ("amount", 1_700_000_000 + RNG.integers(0, 99, ROWS), "dense"),
    ],
)
def test_time(tmp_path: Path, name: str, values: object, becomes: str):
    found = _inspect(tmp_path, **{name: values})
    assert _becomes(found, name) == becomes
    assert found.schema.time == (name if becomes == "time" else "")


def test_times_in_two_units_are_said(tmp_path: Path):
    seconds = 1_700_000_000 + np.arange(ROWS)
    mixed = _inspect(tmp_path, timestamp=np.where(np.arange(ROWS) % 2, seconds, 1000 * seconds))
    assert mixed.schema.time == "timestamp"
    assert "'timestamp': times in seconds and milliseconds, by their sizes; a split" in " ".join(mixed.warnings)
    assert not any("times in" in warning for warning in _inspect(tmp_path, timestamp=seconds).warnings)


def test_a_wrong_label_is_answered_with_the_nearest_and_values_are_no_header(tmp_path: Path):
    (tmp_path / "a.csv").write_text("user,click\n1,0\n2,1\n")
    with pytest.raises(ZigguratError, match='label="click"'):
        inspect_file(tmp_path / "a.csv", label="clik")
    (tmp_path / "b.txt").write_text("1 1 2 3\n2 4 5\n")
    with pytest.raises(DataError, match="names that look like values"):
        inspect_file(tmp_path / "b.txt")


def test_order_of_day_and_month_is_said_and_never_guessed_in_silence(tmp_path: Path):
    shown = _inspect(tmp_path, when=[f"3/{n % 28 + 1}/2024" for n in range(ROWS)])
    assert "month first, as they show" in next(each.reason for each in shown.columns if each.column == "when")
    assert shown.settings() == ()
    unclear = _inspect(tmp_path, when=[f"0{n % 9 + 1}/03/2024 10:00" for n in range(ROWS)])
    assert any("whether the day or the month stands first" in warning for warning in unclear.warnings)
    assert unclear.settings() == ("--data.split.date-order", "day_first")
    points = _inspect(tmp_path, when=[f"0{n % 9 + 1}.03.2024 10:00" for n in range(ROWS)])
    assert not any("stands first" in warning for warning in points.warnings)


def test_zones_that_only_some_dates_name_are_said(tmp_path: Path):
    zones = ("+02:00", " UTC", "")
    mixed = _inspect(tmp_path, when=[f"2024-03-{n % 28 + 1:02} 10:00:00{zones[n % 3]}" for n in range(ROWS)])
    assert any(warning.startswith("'when': some dates name a time zone") for warning in mixed.warnings)
    for zone in ("", "+02:00"):
        alike = _inspect(tmp_path, when=[f"2024-03-{n % 28 + 1:02} 10:00:00{zone}" for n in range(ROWS)])
        assert not any("time zone" in warning for warning in alike.warnings)


def test_leaks_by_value_by_order_and_by_absence(tmp_path: Path):
    label = LABEL
    found = _inspect(
        tmp_path,
        dwell_s=np.where(label, RNG.random(ROWS) + 1.0, RNG.random(ROWS)),
        order_value=[float(n) / 7 if flag else None for n, flag in enumerate(label)],
        status=np.where(label, "done", "open"),
        hint=RNG.normal(size=ROWS) + 3.0 * label,
        rare_id=RNG.permutation(ROWS) // 2 + 10**6,
    )
    assert [_becomes(found, name) for name in ("dwell_s", "order_value", "status")] == ["left out"] * 3
    assert _becomes(found, "hint") == "dense"
    assert any(warning.startswith("'hint': ") and "beforehand" in warning for warning in found.warnings)
    # Ids seen twice each carry no information, and memory of their labels must not look like any.
    assert not any("rare_id" in warning for warning in found.warnings)


def test_text_that_is_almost_numbers(tmp_path: Path):
    cells = ["NULL" if n % 50 == 0 else str(n % 90 + 0.5) for n in range(ROWS)]
    zips = [f"{n % 40:05d}" for n in range(ROWS)]
    big = [str(2**60 + n % 40) for n in range(ROWS)]
    truth = ["True" if n % 2 else "False" for n in range(ROWS)]
    label = [str(int(flag)) for flag in LABEL]
    frame = pl.DataFrame({"label": label, "speed": cells, "plz": zips, "big": big, "seen": truth})
    frame.write_csv(tmp_path / "t.csv")
    found = inspect_file(tmp_path / "t.csv")
    assert found.schema.feature("speed").kind == "dense"
    assert "also written 'NULL'" in found.explanations["speed"]
    assert [_becomes(found, name) for name in ("plz", "big", "seen")] == ["categorical"] * 3
    assert "00000" in found.explanations["plz"]
    assert str(2**60) in found.explanations["big"]


def test_whole_numbers_that_pandas_made_floats(tmp_path: Path):
    found = _inspect(tmp_path, brand_id=[float(n % 90) if n % 7 else None for n in range(ROWS)])
    assert _becomes(found, "brand_id") == "categorical"
    assert "90 distinct whole numbers" in found.explanations["brand_id"]


@pytest.mark.parametrize(
    ("suffix", "texts"),
    [
        (".csv", ["1000000164.25", "6247.70", "6.8e-08"]),
        (".parquet", ["1000000164.25", "6247.7", "0.000000068"]),
    ],
)
def test_examples_are_shown_as_the_file_says_them(tmp_path: Path, suffix: str, texts: list[str]):
    num = 50
    columns = {
        "large": [1000000164.25 + place for place in range(num)],
        "price": [6247.7 + place for place in range(num)],
        "small": [6.8e-8 * (1 + place) for place in range(num)],
        "click": [0, 1] * (num // 2),
    }
    path = tmp_path / f"t{suffix}"
    if suffix == ".csv":
        rows = zip(*columns.values(), strict=True)
        lines = [f"{large},{price:.2f},{small:.1e},{click}" for large, price, small, click in rows]
        path.write_text("\n".join(["large,price,small,click", *lines]))
    else:
        pl.DataFrame(columns).write_parquet(path)
    found = {each.column: each for each in inspect_file(path).columns}
    assert [found[name].examples[0] for name in ("large", "price", "small")] == texts
    assert "from 1000000164 to 1000000213" in found["large"].reason


def test_missing_numbers_count_as_the_median_and_infinite_ones_are_warned_of(tmp_path: Path):
    values = [None if n % 3 == 0 else 100.0 + RNG.normal() for n in range(ROWS)]
    values[1] = float("inf")
    found = _inspect(tmp_path, degrees=values)
    feature = found.schema.feature("degrees")
    assert isinstance(feature, Dense)
    assert feature.missing == pytest.approx(100, abs=1)
    assert any("infinite" in warning for warning in found.warnings)


def test_separators():
    genres = pl.Series(["|".join(RNG.choice(GENRES, RNG.integers(1, 4), replace=False)) for _ in range(300)]).unique()
    assert find_separator(genres) == "|"
    for separator in (";", ",", ", ", " "):
        assert find_separator(genres.str.replace_all("|", separator, literal=True)) == separator
    titles = pl.Series([f"{a}, {b} of the {c} ({1900 + n % 100})" for n, (a, b, c) in enumerate(_titles(400))])
    assert find_separator(titles) == ""
    assert find_separator(pl.Series(["a", "b|c"])) == ""


def _titles(count: int) -> list[tuple[str, str, str]]:
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return [tuple("".join(RNG.choice(letters, 6)) for _ in range(3)) for _ in range(count)]  # pyright: ignore[reportReturnType]


def test_words_of_names():
    assert words("userID_v2") == ["user", "id", "v2"]
    assert words("HTTPCode") == ["http", "code"]
    assert words("last.seen-at") == ["last", "seen", "at"]


# ------------------------------------------------------------------------------------------------------ large and small


def test_a_large_parquet_file_is_sampled_from_all_over_and_counted_exactly(tmp_path: Path):
    size = 50_000
    frame = pl.DataFrame(
        {
            "label": np.arange(size) % 2,
            "user_id": np.arange(size) // 100,  # sorted: the first 1,000 rows hold ten users
            "value": [None if n < size // 2 else n / 3 for n in range(size)],
        }
    )
    frame.write_parquet(tmp_path / "big.parquet", row_group_size=7000)
    found = inspect_file(tmp_path / "big.parquet", sample_rows=1000)
    assert (found.num_rows, found.num_sampled) == (50_000, 1000)
    assert "500 distinct whole numbers in all 50,000 rows" in found.explanations["user_id"]
    assert "50.0% null" in found.explanations["value"]
    assert found.schema.feature("value").kind == "dense"


def test_a_large_text_file_is_read_from_its_beginning_and_its_rows_estimated(tmp_path: Path):
    size = 20_000
    frame = pl.DataFrame({"label": np.arange(size) % 2, "item": np.arange(size) % 77})
    frame.write_csv(tmp_path / "big.csv")
    found = inspect_file(tmp_path / "big.csv", sample_rows=500)
    assert found.num_sampled == 500
    assert found.num_rows == pytest.approx(size, rel=0.1)
    assert "in 500 rows read" in found.explanations["item"]
    assert "about" in found.explanations[""]


def test_files_that_cannot_be_inspected_are_named(tmp_path: Path):
    with pytest.raises(MissingFileError, match=r"none\.parquet"):
        inspect_file(tmp_path / "none.parquet")
    (tmp_path / "x.docx").write_text("hello\n")
    with pytest.raises(ConfigError, match=r"x\.docx"):
        inspect_file(tmp_path / "x.docx")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet"):
        inspect_file(tmp_path / "bad.parquet")
    (tmp_path / "values.csv").write_text("1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match="names that look like values: 1, 2, 3"):
        inspect_file(tmp_path / "values.csv")
    (tmp_path / "header.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="rows to look at"):
        inspect_file(tmp_path / "header.csv")
    pl.DataFrame({"a": pl.Series([], dtype=pl.Int64)}).write_parquet(tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="rows to look at"):
        inspect_file(tmp_path / "empty.parquet")
    pl.DataFrame({"label": [0, 1] * 20, "k": ["x"] * 40}).write_parquet(tmp_path / "poor.parquet")
    with pytest.raises(DataError, match="it is constant"):
        inspect_file(tmp_path / "poor.parquet")


def test_damage_in_a_large_parquet_file_is_an_error(tmp_path: Path):
    size = 30_000
    pl.DataFrame({"label": np.arange(size) % 2, "x": RNG.random(size)}).write_parquet(
        tmp_path / "d.parquet", row_group_size=3000, compression="zstd"
    )
    data = bytearray((tmp_path / "d.parquet").read_bytes())
    data[1000 : len(data) - 6000] = b"\xff" * (len(data) - 7000)
    (tmp_path / "d.parquet").write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"d\.parquet"):
        inspect_file(tmp_path / "d.parquet", sample_rows=1000)


def test_ten_rows_do(tmp_path: Path):
    pl.DataFrame({"user": [f"u{n}" for n in range(10)], "click": [0, 1] * 5}).write_parquet(tmp_path / "t.parquet")
    schema = inspect_file(tmp_path / "t.parquet").schema
    assert schema.features == (Categorical(name="user"),)


def test_criteo_without_header():
    found = inspect_file(shared_data("criteo_sample") / "criteo_first10k.tsv.gz")
    kinds = {feature.name: feature.kind for feature in found.schema.features}
    assert found.schema.labels == (Label(name="label"),)
    assert all(kinds[f"C{number}"] == "categorical" for number in range(1, 27))
    assert sum(kinds[f"I{number}"] == "dense" for number in range(1, 14)) >= 12


def test_trivago_has_lists_in_text_a_session_and_a_time():
    found = inspect_file(shared_data("trivago_sessions") / "trivago_val_100k.parquet")
    schema = found.schema
    assert (schema.group, schema.session, schema.time) == ("user_id", "session_id", "timestamp")
    assert schema.feature("impressions") == MultiHot(name="impressions", separator="|")
    assert schema.feature("city").kind == "categorical"  # "Marseille, France" is one city
    assert found.warnings[0].startswith("no label found")


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    dataframes(
        min_cols=1,
        max_cols=5,
        min_size=1,
        max_size=40,
        allow_null=True,
        allowed_dtypes=[
            *(pl.Int8, pl.Int64, pl.UInt64, pl.Float32, pl.Float64, pl.Boolean, pl.String, pl.Categorical, pl.Binary),
            *(pl.Date, pl.Datetime, pl.Time, pl.Duration, pl.Decimal, pl.List, pl.Array, pl.Struct, pl.Null),
        ],
    )
)
def test_any_table_is_guessed_or_refused_in_words(frame: pl.DataFrame):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        try:
            frame.write_parquet(path)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
            return  # types that polars cannot write
        try:
            found = inspect_file(path)
        except ZigguratError:
            return
        written = write_schema(found.schema, Path(folder) / "s.toml", comments=found.explanations)
        assert read_schema(written) == found.schema
        # Rows may be bad (an infinity, a list of another length), but the types must be those guessed.
        chunks = list(RawSource(path).frames(columns=found.schema.columns))
        bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=Path(folder) / "bad")
        Preprocessing.fit(found.schema, chunks, bad_rows=bad_rows)


def test_a_file_may_be_wide_and_a_schema_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ziggurat.features.schema_checks.MAX_FEATURES", 30)
    wide = pl.DataFrame({f"c{i}": [1, 2] for i in range(31)})
    wide.write_parquet(tmp_path / "wide.parquet")
    with pytest.raises(SchemaError, match="at most 30 columns to look at"):
        inspect_file(tmp_path / "wide.parquet")
    with pytest.raises(SchemaError, match="at most 30 features"):
        Schema(features=tuple(Categorical(name=name) for name in wide.columns))
    assert Preprocessing.fit(Schema(features=(Categorical(name="c7"),)), [RawChunk.of(wide)]).inputs


def test_a_bar_in_some_texts_is_asked_about(tmp_path: Path):
    frame = pl.DataFrame({"kind": ["garden", "house|kitchen", "bath", "book|gift"] * 30, "label": [0, 0, 1, 1, 1] * 24})
    frame.write_csv(tmp_path / "t.csv")
    (note,) = [each for each in inspect_file(tmp_path / "t.csv").warnings if each.startswith("'kind'")]
    assert "'house|kitchen'" in note
    assert 'separator = "|"' in note
    frame.with_columns(pl.col("kind").str.replace_all("|", "-", literal=True)).write_csv(tmp_path / "t.csv")
    assert not any("'kind'" in each for each in inspect_file(tmp_path / "t.csv").warnings)


def test_ids_of_more_digits_than_a_float_has_are_ids(tmp_path: Path) -> None:
    """As floats, hundreds of different ids are one number; as 64-bit integers, those above 2^63 are nulls."""
    ids = [10_000_000_000_000_000_000 + 37 * (number % 90) for number in range(ROWS)]
    frame = pl.DataFrame(
        {
            "unsigned": pl.Series(ids, dtype=pl.UInt64),
            "exact": pl.Series([Decimal(each) for each in ids], dtype=pl.Decimal(38, 0)),
            "x": RNG.random(ROWS).astype(np.float32),
            "label": LABEL,
        }
    )
    frame.write_parquet(tmp_path / "rows.parquet")
    frame.write_csv(tmp_path / "rows.csv")
    for name in ("rows.parquet", "rows.csv"):
        found = inspect_file(tmp_path / name)
        features = {feature.name: feature for feature in found.schema.features}
        assert isinstance(features["unsigned"], Categorical), name
        assert isinstance(features["exact"], Categorical), name
        assert isinstance(features["x"], Dense), name
        for column in ("unsigned", "exact"):
            facts = measure(frame[column], from_text=False, num_rows=ROWS)
            assert (facts.num_distinct, facts.null_share) == (90, 0.0)


def _rows(num_rows: int = 400) -> pl.DataFrame:
    rng = np.random.default_rng(3)
    return pl.DataFrame(
        {
            "user_id": rng.integers(0, 40, num_rows),
            "item_id": rng.integers(0, 30, num_rows),
            "click": rng.integers(0, 2, num_rows),
        }
    )


def _inspected(frame: pl.DataFrame, folder: Path) -> Inspection:
    frame.write_csv(folder / "t.csv")
    return inspect_file(folder / "t.csv")


def test_a_label_that_is_known_of_some_rows_keeps_the_others(tmp_path: Path) -> None:
    buys = pl.when(pl.col("click") == 1).then(pl.col("item_id") % 2)
    found = _inspected(_rows().with_columns(buy=buys), tmp_path)
    assert {label.name: label.missing for label in found.schema.labels} == {
        "click": MissingLabel.BAD_ROW,
        "buy": MissingLabel.LEFT_OUT,
    }
    assert any("'buy' is known of" in warning for warning in found.warnings)
    config = DataConfig(train=(str(tmp_path / "t.csv"),))
    data = prepare(config, schema=found.schema, folder=tmp_path / "prepared")
    assert sum(split.rows for split in data.summary.splits.values()) == 400


def test_further_outcomes_and_weights_are_named(tmp_path: Path) -> None:
    frame = _rows().with_columns(love=pl.col("click").reverse(), like=pl.col("click"), premium=1 - pl.col("click"))
    found = _inspected(frame.drop("click").with_columns(weight=pl.int_range(400) % 7 + 0.5), tmp_path)
    assert [label.name for label in found.schema.labels] == ["love", "like"]
    flags = _rows().with_columns(premium=pl.col("click").reverse(), is_new=pl.col("click").shuffle(1))
    found = _inspected(flags, tmp_path)
    (note,) = (warning for warning in found.warnings if "0 or 1" in warning)
    assert note.startswith("'premium': 0 or 1, as the label 'click' is")
    found = _inspected(_rows().with_columns(weight=pl.int_range(400) % 7 + 0.5), tmp_path)
    assert any('weight = "weight" under [roles]' in warning for warning in found.warnings)


def test_minus_one_among_ids_is_a_mark(tmp_path: Path) -> None:
    marked = pl.when(pl.int_range(400) % 9 == 0).then(-1).otherwise(1000 + pl.col("item_id") * 37)
    found = _inspected(_rows().with_columns(thing=marked), tmp_path)
    assert found.schema.feature("thing").kind == "categorical"
    assert any("'thing': -1 stands in 11.2% of the rows" in warning for warning in found.warnings)
    found = _inspected(_rows().with_columns(change=pl.col("item_id") - 9), tmp_path)
    assert found.schema.feature("change").kind == "dense"
    assert not any("-1 stands" in warning for warning in found.warnings)


def test_a_cell_with_a_line_end_stays_in_its_line(tmp_path: Path) -> None:
    found = _inspected(_rows().with_columns(note=pl.Series(["a\nb", "c\r\nd"] * 200)), tmp_path)
    (line,) = (column for column in found.columns if column.column == "note")
    assert line.examples == ("a\\nb", "c\\r\\nd")
    read_schema(_written(found, tmp_path))


def _written(found: Inspection, folder: Path) -> Path:
    write_schema(found.schema, folder / "t.toml", comments=found.explanations)
    return folder / "t.toml"


@pytest.mark.parametrize("prefix", ["", "u"])
def test_a_file_without_a_header_is_named_with_the_line_that_adds_one(prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "it's.csv"
    frame = _rows().with_columns(user_id=prefix + pl.col("user_id").cast(pl.String))
    frame = frame.with_columns(item_id=(prefix and "i") + pl.col("item_id").cast(pl.String))
    frame.write_csv(path, include_header=False)
    with pytest.raises(DataError, match="names that look like values") as raised:
        inspect_file(path)
    command = raised.value.ways_out[0].partition(": ")[2]
    command = command.replace("column_1,column_2,column_3", "user_id,item_id,click")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert inspect_file(tmp_path / "data.csv").schema.labels == (Label(name="click"),)
    assert inspect_file(tmp_path / "data.csv").num_rows == 400


def test_names_that_are_numbers_are_names_where_the_file_shows_it_or_somebody_says_so(tmp_path: Path) -> None:
    found = _inspected(_rows().rename({"user_id": "101", "item_id": "121"}), tmp_path)
    assert {feature.name for feature in found.schema.features} == {"101", "121"}
    _rows().rename({"user_id": "101", "item_id": "121", "click": "100"}).write_csv(tmp_path / "t.csv")
    with pytest.raises(DataError, match='label="100"'):
        inspect_file(tmp_path / "t.csv")
    assert inspect_file(tmp_path / "t.csv", label="100").schema.labels == (Label(name="100"),)


def test_a_header_that_comes_again_is_named_with_the_line_that_takes_it_out(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    text = _rows().write_csv()
    path.write_text(text + text)
    with pytest.raises(DataError, match="the same line again as row 400") as raised:
        inspect_file(path)
    subprocess.run(raised.value.ways_out[0].partition(": ")[2], shell=True, check=True, cwd=tmp_path)
    assert inspect_file(tmp_path / "data.csv").num_rows == 800


def test_rows_without_a_label_are_put_aside_by_the_command_that_is_printed(tmp_path: Path):
    draw = np.random.default_rng(0)
    columns = {"shop": [f"s{row % 7}" for row in range(400)], "price": draw.random(400), "y": draw.integers(0, 2, 400)}
    frame = pl.DataFrame(columns)
    whole = tmp_path / "whole.parquet"
    frame.write_parquet(whole)
    assert inspect_file(whole, label="y").settings() == ()
    holes = tmp_path / "holes.parquet"
    frame.with_columns(y=pl.when(pl.col("shop") == "s3").then(None).otherwise(pl.col("y"))).write_parquet(holes)
    assert inspect_file(holes, label="y").settings() == ("--data.bad-rows", "quarantine")


def test_the_way_out_of_a_bad_row_is_no_quarantine(tmp_path: Path) -> None:
    """`ziggurat data inspect` has no flag for one, and proposed it."""
    path = tmp_path / "cut.csv"
    path.write_text("user,price,bought\n" + "ann,1.5,1\nbob,2,0\n" * 50 + "ann,1")
    with pytest.raises(DataError) as refused:
        inspect_file(path, label="bought")
    assert refused.value.ways_out
    assert not any("quarantine" in way for way in refused.value.ways_out)
