"""A few made rows for every recipe: each data set that recipes name has its columns, small, with nothing fetched.

    movielens-1m, -histories, -events   one Parquet file with the columns of all three
    beauty-events, yambda-*, frappe, gowalla   Parquet files as their own `fetch` leaves them
    census-income, aliexpress-nl        the same: with two labels
    criteo-*                            tab-separated text; lists of ids in Parquet where the schema asks for lists
    table_*                             clicks with histories, an event log, or questions: what the model needs

`files_of` writes them once into a folder and says which belong to a recipe's config; a data set that it does not know
is an error, so a new recipe has to bring its rows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

import ziggurat as zg
from tests.end_to_end.test_two_tower import SCHEMA as CLICKS
from tests.end_to_end.test_two_tower import events as clicks
from tests.runs.scores.test_candidate_scores import SCHEMA as QUESTIONS
from tests.runs.scores.test_candidate_scores import events as questions
from tests.runs.scores.test_next_items import SCHEMA as WATCHED
from tests.runs.scores.test_next_items import events as watched
from ziggurat.data.datasets import aliexpress, census, criteo, frappe, yambda
from ziggurat.data.datasets.movielens_histories import HISTORIES, LIKED
from ziggurat.data.histories import with_histories
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.source import FileFormat
from ziggurat.features.schema import MultiHot
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.next_item import NEXT_ITEM_TABLE_RECIPES
from ziggurat.recipes.run_config import DatasetConfig, RunConfig

PAIRS = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
    labels=(zg.Label(name="click"),),
    group="user",
    items=zg.Items(id="item"),
)
OF_EVENTS = tuple(recipe.__name__ for recipe in NEXT_ITEM_TABLE_RECIPES)
MAX_HASHED_ROWS = 500


def with_rows(name: str, *, folder: Path) -> RunConfig:
    """The config of a recipe on made rows, split as the recipe splits.

    Args:
        name: of the recipe.
        folder: where the rows are, or will be.
    """
    if name.startswith("table_"):
        of_model = {"table_sequence_ranker": "questions", "table_lightgcn": "pairs"}
        table = of_model.get(name, "watched" if name in OF_EVENTS else "clicks")
        config = recipe_named(name, schema=zg.read_schema(_schema_of(table, folder)))
        by = {"clicks": SplitBy.TIME, "questions": SplitBy.WINDOWS}.get(table, config.data.split.by)  # pairs: RANDOM
        split = dataclasses.replace(config.data.split, by=by) if table != "clicks" else SplitConfig(by=by)
        files = dataclasses.replace(config.data, train=(str(folder / f"{table}.parquet"),), split=split)
        return dataclasses.replace(config, data=files)
    config = recipe_named(name)
    data = config.dataset.name
    if data == "synthetic":
        return dataclasses.replace(config, dataset=dataclasses.replace(config.dataset, rows=1500))
    split = config.data.split
    if split.by is SplitBy.FILES:  # a file for each part, where there is one
        split = SplitConfig(by=SplitBy.RANDOM)
    files = dataclasses.replace(config.data, train=(str(_file_of(config, folder)),), split=split)
    return dataclasses.replace(config, dataset=DatasetConfig(), data=files, table_schema=_few_rows(config))


def _schema_of(table: str, folder: Path) -> Path:
    path = folder / f"{table}.toml"
    if not path.exists():
        frames: dict[str, Callable[[], pl.DataFrame]] = {
            "watched": lambda: watched(users=40, seed=0),
            "questions": lambda: questions(users=20, seed=0),
            "clicks": lambda: clicks(300),
            "pairs": lambda: clicks(300),
        }
        frames[table]().write_parquet(folder / f"{table}.parquet")
        if table in ("clicks", "pairs"):
            zg.write_schema(CLICKS if table == "clicks" else PAIRS, path, comments=None)
        else:
            path.write_text({"watched": WATCHED, "questions": QUESTIONS}[table])
    return path


def _file_of(config: RunConfig, folder: Path) -> Path:
    data = config.dataset.name
    if data.startswith("movielens-1m"):
        return _kept(folder / "ratings.parquet", lambda path: ratings().write_parquet(path))
    if data == "beauty-events":
        return _kept(folder / "beauty.parquet", lambda path: beauty().write_parquet(path))
    if data.startswith("yambda"):
        return _kept(folder / "yambda.parquet", _write_yambda)
    if data == "gowalla":
        return _kept(folder / "gowalla.parquet", lambda path: visits().write_parquet(path))
    if data == "frappe":
        return _kept(folder / "frappe.parquet", lambda path: frappe_rows().write_parquet(path))
    if data == census.NAME:
        return _kept(folder / "census.parquet", lambda path: people().write_parquet(path))
    if data in aliexpress.NAMES:
        return _kept(folder / "aliexpress.parquet", lambda path: shown().write_parquet(path))
    assert set(criteo.CATEGORICAL) <= {each.name for each in config.table_schema.features}, f"no rows for {data!r}"
    if config.data.format is FileFormat.CRITEO:
        return _kept(folder / "criteo.tsv", _write_criteo)
    return _kept(folder / "criteo_lists.parquet", lambda path: criteo_lists(config).write_parquet(path))


def _kept(path: Path, write: Callable[[Path], object]) -> Path:
    if not path.exists():
        write(path)
    return path


def _few_rows(config: RunConfig) -> zg.Schema:
    """The recipe's schema with small hashed tables (MLPerf's have 278 million rows), for people of few events."""
    tables = tuple(
        dataclasses.replace(table, num_rows=min(table.num_rows, MAX_HASHED_ROWS)) if table.num_rows else table
        for table in config.table_schema.tables
    )
    events = config.table_schema.events
    if events is not None:
        events = dataclasses.replace(events, min_history=min(events.min_history, 10))
    return dataclasses.replace(config.table_schema, tables=tables, events=events)


def ratings(*, users: int = 30, films: int = 25) -> pl.DataFrame:
    """The columns of MovieLens-1M and of its histories; user after user, each in the order of time."""
    rng, rows = random.Random(0), []
    for user in range(users):
        for place, film in enumerate(rng.sample(range(films), rng.randint(6, 14))):
            likes = (film + user) % 3 > 0
            rows.append((user, f"f{film}", rng.randint(4, 5) if likes else rng.randint(1, 3), 50_000 * place + user))
    frame = pl.DataFrame(rows, schema=["user_id", "movie_id", "rating", "timestamp"], orient="row")
    user, film = frame["user_id"], frame["movie_id"].str.strip_prefix("f").cast(pl.Int32)
    frame = frame.with_columns(
        gender=pl.when(user % 2 == 0).then(pl.lit("F")).otherwise(pl.lit("M")),
        age=user % 5,
        occupation=user % 7,
        zip_code=(user % 4).cast(pl.String),
        title=pl.lit("a film"),
        year=1980 + film % 9,
        genres=pl.Series([[f"g{number % 4}", f"g{number % 3}"] for number in film]),
    )
    for each in HISTORIES:
        frame = with_histories(frame, each, liked=LIKED)
    return frame


def visits(*, users: int = 30, places: int = 25) -> pl.DataFrame:
    """Users and the places where they were."""
    rng = random.Random(0)
    pairs = [(user, place) for user in range(users) for place in rng.sample(range(places), rng.randint(4, 9))]
    return pl.DataFrame(pairs, schema=["user_id", "item_id"], orient="row").with_columns(visited=pl.lit(1, pl.Int8))


def beauty(*, users: int = 40, items: int = 20) -> pl.DataFrame:
    """Who took what, in which place of the own list."""
    rng, rows = random.Random(1), []
    for user in range(users):
        first = rng.randrange(items)
        rows += [(user, (first + place) % items, place) for place in range(rng.randint(5, 10))]
    return pl.DataFrame(rows, schema=["user_id", "item_id", "place"], orient="row")


def _write_yambda(path: Path) -> None:
    """Days of listens of a few people, through the data set's own conversion."""
    raw, cache = path.parent / "yambda_raw", path.parent / "yambda_cache"
    raw.mkdir()
    for name, frame in yambda.made_yambda(users=12, tracks=30, days=5).items():
        frame.write_parquet(raw / f"{name}.parquet")
    path.write_bytes(yambda.fetch_yambda(source=raw, cache=cache).read_bytes())


def people(num_rows: int = 400) -> pl.DataFrame:
    """Rows of Census-Income as its `fetch` leaves them."""
    rng = np.random.default_rng(0)
    numbers = {name: pl.Series(rng.integers(0, 50, num_rows), dtype=pl.Float32) for name in census.NUMBERS}
    categories = {name: rng.choice(["a", "b", "c"], num_rows) for name in census.CATEGORIES}
    age = numbers["age"].to_numpy()
    income = (rng.random(num_rows) < age / 100).astype(np.int8)
    never_married = (rng.random(num_rows) < 0.8 - age / 100).astype(np.int8)
    return pl.DataFrame({**numbers, **categories, "income": income, "never_married": never_married})


def shown(num_rows: int = 400) -> pl.DataFrame:
    """Rows of AliExpress as its `fetch` leaves them."""
    rng = np.random.default_rng(0)
    categories = {name: pl.Series(rng.integers(0, 9, num_rows), dtype=pl.Int32) for name in aliexpress.CATEGORIES}
    numbers = {name: pl.Series(rng.random(num_rows), dtype=pl.Float32) for name in aliexpress.NUMBERS}
    click = (rng.random(num_rows) < 0.4).astype(np.int8)
    conversion = click * (rng.random(num_rows) < 0.3).astype(np.int8)
    searches = np.arange(num_rows) // 10
    return pl.DataFrame({"search_id": searches, **categories, **numbers, "click": click, "conversion": conversion})


def frappe_rows(num_rows: int = 400) -> pl.DataFrame:
    """Who uses which app in which context."""
    rng = np.random.default_rng(2)
    columns = {name: rng.integers(0, 6, num_rows) for name in ("user", "item", *frappe.CONTEXT)}
    label = (columns["user"] + columns["item"]) % 3 == 0
    return pl.DataFrame({"label": label.astype(np.int8), **columns})


def _criteo_columns(num_rows: int) -> pl.DataFrame:
    rng = np.random.default_rng(3)
    columns: dict[str, pl.Series] = {"label": pl.Series(rng.integers(0, 4, num_rows) == 0).cast(pl.Int8)}
    for name in criteo.DENSE:
        kept = pl.Series(rng.random(num_rows) < 0.9)
        values = pl.Series(rng.geometric(0.2, num_rows))
        columns[name] = pl.select(pl.when(kept).then(values)).to_series()
    for name in criteo.CATEGORICAL:
        columns[name] = pl.Series([f"{value:08x}" for value in rng.integers(0, 12, num_rows)])
    return pl.DataFrame(columns)


def _write_criteo(path: Path, *, num_rows: int = 400) -> None:
    _criteo_columns(num_rows).write_csv(path, separator="\t", include_header=False, null_value="")


def criteo_lists(config: RunConfig, *, num_rows: int = 200) -> pl.DataFrame:
    """Criteo with lists of ids, of the lengths that the schema allows."""
    frame = _criteo_columns(num_rows)
    for feature in config.table_schema.features:
        if isinstance(feature, MultiHot):
            ids = frame[feature.name].to_list()
            length = min(feature.max_length or 1, 5)
            lists = [[ids[(row + place) % num_rows] for place in range(length)] for row in range(num_rows)]
            frame = frame.with_columns(pl.Series(feature.name, lists))
    return frame
