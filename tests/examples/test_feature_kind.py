"""A kind of feature from outside the package: read from files and requests, trained, exported, served, and on ranks."""

from __future__ import annotations

import datetime
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import DataError, RequestError, SchemaError
from ziggurat.features.kinds import Feature, IdLists
from ziggurat.models import build_model
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.serving.request_rows import frame_of
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.records.run_folder import RunFolder, read_evaluation

MODULE = "examples.extensions.time_of_day"


@pytest.fixture
def time_of_day() -> Iterator[Any]:
    """The class, listed while a test runs: others of this process ask for all that are listed."""
    yield Feature.add(importlib.import_module(MODULE).TimeOfDay)
    del Feature._kinds["time_of_day"]


def lists_of(feature: Feature, values: list[Any], dtype: Any = None) -> list[Any]:
    schema = zg.Schema(features=(feature,))
    chunk = RawChunk.of(pl.DataFrame({"at": pl.Series(values, dtype=dtype)}))
    return Preprocessing.fit(schema, [chunk]).encode(chunk)["at"].to_pylist()


def encoded(feature: Feature, values: list[Any], dtype: Any = None) -> np.ndarray:
    return np.array(lists_of(feature, values, dtype))


def clock(*hours: float | None) -> np.ndarray:
    angles = [None if hour is None else 2 * math.pi * hour / 24 for hour in hours]
    return np.array([[0.0, 0.0] if angle is None else [math.sin(angle), math.cos(angle)] for angle in angles])


@pytest.mark.parametrize(
    ("values", "dtype", "hours"),
    [
        (["00:00", "6:00", " 17:30:36 ", "2026-01-31 23:15", "", None, "12.5"], pl.String,
         [0, 6, 17.51, 23.25, None, None, 12.5]),
        ([datetime.time(17, 30), None], pl.Time, [17.5, None]),
        ([datetime.datetime(2026, 1, 31, 23, 15), None], pl.Datetime("us"), [23.25, None]),
        ([17.5, 24.0, None], pl.Float32, [17.5, 24, None]),
        ([None, None], pl.Null, [None, None]),
    ],
)  # fmt: skip
def test_every_way_of_writing_a_time_is_a_place_on_the_clock(
    values: list[Any], dtype: Any, hours: list[Any], time_of_day: Any
) -> None:
    assert np.allclose(encoded(time_of_day(name="at"), values, dtype), clock(*hours), atol=1e-6)


def test_numbers_may_count_minutes(time_of_day: Any) -> None:
    assert np.allclose(
        encoded(time_of_day(name="at", per_day=1440), [0, 90, 1439]), clock(0, 1.5, 1439 / 60), atol=1e-6
    )


@pytest.mark.parametrize("wrong", ["25:00", "12:61", "noon", "-1", "24.5"])
def test_what_is_no_time_is_a_bad_row_with_its_place(wrong: str, time_of_day: Any) -> None:
    with pytest.raises(DataError, match="a time like 17:30") as refused:
        encoded(time_of_day(name="at"), ["12:00", wrong])
    assert wrong in str(refused.value)
    with pytest.raises(SchemaError, match="List"):
        encoded(time_of_day(name="at"), [[1], [2]])


def test_requests_are_read_as_files_are(time_of_day: Any) -> None:
    schema = zg.Schema(features=(time_of_day(name="at"),))
    frame = frame_of([{"at": "17:30"}, {"at": 17.5}, {"at": None}, {}], schema)
    preprocessing = Preprocessing.fit(schema, [RawChunk.of(frame)])
    found = preprocessing.batch(frame).vectors["at"].numpy()
    assert np.allclose(found, clock(17.5, 17.5, None, None), atol=1e-6)
    with pytest.raises(RequestError, match="at"):
        frame_of([{"at": [1]}], schema)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("encode", lambda self, parsed, fitted: parsed, r"encode, feature 'at'"),
        ("encode", lambda self, parsed, fitted: np.zeros((len(parsed), 3), np.float32), r"encode, feature 'at'"),
        ("encode", lambda self, parsed, fitted: None, r"NoneType None"),
        ("encode", lambda self, parsed, fitted: 7, r"int 7"),
        ("encode", lambda self, parsed, fitted: (), r"a tuple of 0"),
        ("encode", lambda self, parsed, fitted: (parsed, None), r"NoneType None"),
        ("encode", lambda self, parsed, fitted: np.array(None), r"object in 0 dimensions"),
        ("encode", lambda self, parsed, fitted: np.ma.masked_array(parsed, mask=True), r"MaskedArray"),
        ("encode", lambda self, parsed, fitted: (np.zeros(3, np.int32), np.ones(2, np.int64)), r"add up to 2"),
        ("encode", lambda self, parsed, fitted: (np.zeros(2, np.int32), np.ones(2)), r"lengths of float64"),
        ("parse", lambda self, cells: cells.refuse(-1, expected="a time"), r"a row from 0 to 1"),
        ("parse", lambda self, cells: cells.refuse(2, expected="a time"), r"a row from 0 to 1"),
        ("parse", lambda self, cells: cells.series, r"parse, feature 'at'"),
        ("parse", lambda self, cells: np.zeros(1), r"parse, feature 'at'"),
    ],
)
def test_a_kind_that_breaks_its_promise_is_refused(part: str, value: Any, message: str, time_of_day: Any) -> None:
    damaged = type("Damaged", (time_of_day,), {part: value})
    with pytest.raises(SchemaError, match=message):
        encoded(damaged(name="at"), ["12:00", "13:00"])


def visits(num_rows: int) -> pl.DataFrame:
    """Visits that end in a click around midnight and seldom at noon, whoever comes; some without a time."""
    draw = np.random.default_rng(0)
    minutes = draw.integers(0, 1440, num_rows)
    click = draw.random(num_rows) < 0.5 + 0.4 * np.cos(2 * np.pi * minutes / 1440)
    texts = [None if i % 50 == 7 else f"{m // 60:02}:{m % 60:02}" for i, m in enumerate(minutes.tolist())]
    user = draw.integers(0, 20, num_rows)
    item = draw.integers(0, 12, num_rows)
    return pl.DataFrame({"user": user, "item": item, "at": texts, "click": click.astype(np.int8)})


def test_the_command_line_trains_predicts_exports_and_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_of_day: Any
) -> None:
    """A straight line through the hours says nothing of them; through the circle it does."""
    schema = zg.Schema(
        features=(zg.Categorical(name="user"), zg.Categorical(name="item"), time_of_day(name="at")),
        labels=(zg.Label(name="click"),),
        items=zg.Items(id="item", features=("item",)),
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    zg.write_schema(schema, "my.toml")
    assert 'kind = "time_of_day"' in Path("my.toml").read_text()
    visits(4_000).write_csv("visits.csv")
    known = ["--extension", MODULE]
    given = ["--data.train", "visits.csv", "--schema", "my.toml", "--out", "runs/a", "--threads", "1"]
    settings = ["--model.embedding-dim", "4", "--epochs", "3", "--training.loader.batch-size", "64"]
    assert main([*known, "train", "table_dlrm", *given, *settings]) == 0
    assert read_evaluation(RunFolder(Path("runs/a")).evaluation("test"))["metrics"]["auc"] > 0.72
    assert main([*known, "evaluate", "runs/a", "visits.csv"]) == 0
    assert main([*known, "predict", "runs/a", "visits.csv", "--out", "scores.csv"]) == 0
    scores = pl.read_csv("scores.csv")["click"].to_numpy()
    assert main([*known, "export", "runs/a", "--out", "export", "--allow"]) == 0
    recommender = zg.Recommender.load(Path("export"))
    rows = visits(4_000).select("user", "at").head(5).to_dicts()
    for row, item, score in zip(rows, visits(4_000)["item"].head(5).to_list(), scores, strict=False):
        (ranked,) = recommender.rank(row, [str(item)]).items
        assert abs(ranked.tasks["click"] - score) < 1e-4


def check_ranks(rank: int) -> None:
    """Runs on every rank, whose process imports the kind before it reads a schema."""
    time_of_day = importlib.import_module(MODULE).TimeOfDay
    schema = zg.Schema(features=(zg.Categorical(name="user"), time_of_day(name="at")), labels=(zg.Label(name="click"),))
    chunk = RawChunk.of(visits(40))
    preprocessing = Preprocessing.fit(schema, [chunk])
    batch = preprocessing.batch(chunk.frame, with_labels=True)
    table = TablePlacement(table="user", placement=Placement.ROW_WISE, ranks=(0, 1, 2, 3))
    embedding = EmbeddingConfig(kernel=KernelChoice.TORCH)
    config = zg.DLRMConfig(embedding_dim=4, embedding=embedding)
    assert_same_as_single_device(
        lambda: build_model(config, preprocessing.inputs, seed=3),
        Plan(world_size=4, tables=(table,)),
        batch=batch,
        tolerance=Tolerance(fields=1e-6, others=3e-6),
    )


def test_four_ranks_equal_one_device() -> None:
    run_ranks(check_ranks, 4)


def words_kind(parse: Any, base: type[Feature] = IdLists) -> Any:
    """Return a kind of lists of one's own that reads texts; not listed."""
    own: dict[str, Any] = {
        "__annotations__": {"kind": Literal["words"]},
        "__module__": "tests.words",
        "kind": "words",
        "is_ordered": False,
        "parse": parse,
        "encode": lambda self, parsed, fitted: (fitted.rows(parsed.values), parsed.lengths),
        "of_request": lambda self, value, read: read.id(value),
        "request_type": lambda self: pl.String,
        "spec": lambda self: zg.MultiHot(name=self.name, max_length=2).spec(),
        "table_name": property(lambda self: self.name),
    }
    return dataclass(frozen=True, kw_only=True)(type("Words", (base,), own))


def words_of(cells: Any) -> pl.Series:
    return cells.series.cast(pl.String).str.to_lowercase().str.extract_all(r"\w+")


TEXTS = ["Alien", "The Thing", None, "the alien thing"]


@pytest.mark.parametrize("keeps_last", [False, True])
@pytest.mark.parametrize("base", [IdLists, Feature])
def test_lists_that_a_kind_makes_itself_are_looked_up_as_those_of_a_column(
    base: type[Feature], keeps_last: bool
) -> None:
    def parse(self: Any, cells: Any) -> Any:
        settings = zg.MultiHot(name=self.name, max_length=2)
        return cells.id_lists(settings, keep_last=keeps_last, lists=words_of(cells))

    kind = words_kind(parse, base)
    found = lists_of(kind(name="at"), TEXTS, pl.String)
    lists = [["alien"], ["the", "thing"], None, ["alien", "thing"] if keeps_last else ["the", "alien"]]
    wanted = lists_of(zg.MultiHot(name="at"), lists, pl.List(pl.String))
    assert found == wanted


@pytest.mark.parametrize(
    ("made", "part", "way"),
    [
        (lambda cells: words_of(cells).to_list(), "a list", True),
        (lambda cells: words_of(cells), "a Series", True),
        (lambda cells: (np.zeros(4, np.int64), np.ones(4, np.int64)), "a tuple", True),
        (lambda cells: {"values": [], "lengths": []}, "a dict", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("base", [IdLists, Feature])
def test_other_lists_are_refused_with_the_way_that_makes_them_lists_of_ids(
    base: type[Feature], made: Any, part: str, way: bool
) -> None:
    with pytest.raises(SchemaError) as refused:
        lists_of(words_kind(lambda self, cells: made(cells), base)(name="at"), TEXTS, pl.String)
    text = str(refused.value)
    assert part in text
    assert "tests.words.Words.parse, feature 'at'" in text
    settings = "self" if base is IdLists else "zg.MultiHot(name=self.name)"
    told = f"return cells.id_lists({settings}, keep_last=True, lists=pl.Series(values, dtype=pl.List(pl.String)))"
    assert (told in text) is way
    if not way:
        return

    def parse(self: Any, cells: Any) -> Any:  # the way out, taken
        lists = pl.Series(words_of(cells).to_list(), dtype=pl.List(pl.String))
        return cells.id_lists(self if base is IdLists else zg.MultiHot(name=self.name), keep_last=True, lists=lists)

    assert len(lists_of(words_kind(parse, base)(name="at"), TEXTS, pl.String)) == 4


@pytest.mark.parametrize(
    ("lists", "found"),
    [
        ([["alien"]] * 4, "a list"),
        (pl.Series(["alien"] * 4), "4 values of String"),
        (pl.Series([["alien"]] * 3), "3 values of List(String)"),
        (pl.Series([[1.5]] * 4), "4 values of List(Float64)"),
        (pl.Series([[["alien"]]] * 4), "4 values of List(List(String))"),
    ],
)
def test_lists_of_another_form_are_refused_where_they_are_given(lists: Any, found: str) -> None:
    def parse(self: Any, cells: Any) -> Any:
        return cells.id_lists(self, keep_last=True, lists=lists)

    with pytest.raises(SchemaError, match=r"a list of ids .* for each of 4 rows") as refused:
        lists_of(words_kind(parse)(name="at"), TEXTS, pl.String)
    assert found in str(refused.value)
    assert "argument 'lists' of cells.id_lists" in str(refused.value)
