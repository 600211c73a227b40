"""A log of what users did is recognised without a label, and the command that is suggested trains on its schema."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import MISSING_TEXTS, Categorical, Label, Outcomes, Schema
from ziggurat.features.schema_io import read_schema
from ziggurat.training.records.run_folder import RunFolder, read_evaluation

QUICK = ["--training.epochs", "3", "--model.embedding-dim", "16", "--training.threads", "1"]
NUM_ITEMS = 60


def walks(*, users: int, least: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """User, place and item of rows: everybody walks through the items in steps of 1 or 2, so the next is one of two."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(least, most, users)
    user = np.repeat(np.arange(users), lengths)
    place = np.concatenate([np.arange(length) for length in lengths])
    steps = np.concatenate([np.cumsum(draw.integers(1, 3, length)) for length in lengths])
    item = (np.repeat(draw.integers(0, NUM_ITEMS, users), lengths) + steps) % NUM_ITEMS
    return user, place, item


def like_movielens_without_rating() -> pl.DataFrame:
    user, place, item = walks(users=120, least=12, most=24)
    year = 1950 + item // 10
    rows = pl.DataFrame({"user_id": user + 1, "movie_id": item + 1, "timestamp": 978_300_000 + user * 500 + place * 60})
    return rows.with_columns(release=pl.Series(year).cast(pl.String)).sample(fraction=1.0, shuffle=True, seed=1)


def playlists() -> pl.DataFrame:
    user, place, item = walks(users=120, least=8, most=20)
    return pl.DataFrame(
        {
            "playlist_id": [f"p{number}" for number in user],
            "pos": place,
            "track_uri": [f"spotify:track:{number}" for number in item],
            "artist_name": [f"artist {number // 6}" for number in item],
        }
    )


def sessions() -> pl.DataFrame:
    user, place, item = walks(users=300, least=4, most=9)
    event = np.where(np.arange(len(user)) % 9 == 0, "addtocart", "view")
    times = 1_600_000_000_000 + user * 100_000 + place * 1000
    return pl.DataFrame({"session_id": 100_000 + user, "ts": times, "itemid": item, "event": event})


LOGS: dict[str, tuple[Callable[[], pl.DataFrame], str, Schema]] = {
    "movielens": (
        like_movielens_without_rating,
        "table_hstu",
        Schema(
            features=(Categorical(name="movie_id"), Categorical(name="release")),
            items=Items(id="movie_id", features=("movie_id", "release")),
            events=Events(),
            missing_texts=MISSING_TEXTS,
            group="user_id",
            time="timestamp",
        ),
    ),
    "playlists": (
        playlists,
        "table_sasrec",
        Schema(
            features=(Categorical(name="track_uri"), Categorical(name="artist_name")),
            items=Items(id="track_uri", features=("track_uri", "artist_name")),
            events=Events(),
            missing_texts=MISSING_TEXTS,
            group="playlist_id",
            time="pos",
        ),
    ),
    "sessions": (
        sessions,
        "table_hstu",
        Schema(
            features=(Categorical(name="itemid"), Categorical(name="event")),
            items=Items(id="itemid", features=("itemid",)),
            events=Events(actions=("event",)),
            missing_texts=MISSING_TEXTS,
            group="session_id",
            time="ts",
        ),
    ),
}


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_user_item_and_order_are_found(tmp_path: Path, name: str, suffix: str) -> None:
    make, recipe, schema = LOGS[name]
    path = tmp_path / f"log.{suffix}"
    getattr(make(), f"write_{suffix}")(path)
    found = inspect_file(path)
    assert (found.schema, found.recipe) == (schema, recipe)
    for word in ("[events]", "[items]", "positive_only", recipe, "table_sasrec", "table_hstu", "table_two_tower"):
        assert word in found.warnings[0]
    assert {line.column for line in found.columns} == set(make().columns)


@pytest.mark.parametrize("name", LOGS)
def test_the_suggested_command_trains_on_the_written_schema_and_finds_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    make, recipe, schema = LOGS[name]
    make().write_csv("log.csv")
    assert main(["data", "inspect", "log.csv", "--write-schema", "log.toml"]) == 0
    assert read_schema("log.toml") == schema
    command = capsys.readouterr().out.strip().splitlines()[-1].strip()
    assert command == f"ziggurat train {recipe} --data.train log.csv --schema log.toml"
    assert main([*shlex.split(command)[1:], *QUICK, "--out", "run"]) == 0
    recall = read_evaluation(RunFolder(Path("run")).evaluation("test"))["metrics"]["full_recall@10"]
    assert recall > 2 * 10 / NUM_ITEMS


def test_pairs_without_an_order_need_a_column_that_says_that_they_were_chosen(tmp_path: Path) -> None:
    user, _, item = walks(users=120, least=8, most=20)
    pairs = pl.DataFrame({"user": user, "artist_id": item, "plays": 1 + (user + item) % 90})
    pairs.write_csv(tmp_path / "pairs.csv")
    found = inspect_file(tmp_path / "pairs.csv")
    chosen = Label(name="chosen", column="plays", positive_from=1.0, outcomes=Outcomes.POSITIVE_ONLY)
    assert found.recipe == "table_two_tower"
    assert found.schema.labels == (chosen,)
    assert found.schema.items == Items(id="artist_id")
    pairs.drop("plays").write_csv(tmp_path / "bare.csv")
    bare = inspect_file(tmp_path / "bare.csv")
    assert bare.recipe == ""
    assert bare.warnings[0].startswith("no label found: name it")


def test_a_table_with_a_label_or_a_named_one_is_a_table_of_samples(tmp_path: Path) -> None:
    log = like_movielens_without_rating()
    rated = log.with_columns(rating=1 + pl.col("movie_id") % 5)
    rated.write_csv(tmp_path / "rated.csv")
    assert inspect_file(tmp_path / "rated.csv").recipe == ""
    assert inspect_file(tmp_path / "rated.csv").schema.events is None
    log.with_columns(won=pl.col("movie_id") % 2).write_csv(tmp_path / "won.csv")
    assert inspect_file(tmp_path / "won.csv", label="won").schema.events is None


def test_a_position_that_stands_twice_in_a_list_is_no_order(tmp_path: Path) -> None:
    playlists().with_columns(pos=pl.col("pos") // 3).write_csv(tmp_path / "log.csv")
    assert inspect_file(tmp_path / "log.csv").recipe == ""
