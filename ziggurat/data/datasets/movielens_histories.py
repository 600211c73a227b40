"""MovieLens-1M with histories: each rating with the movies that its user had liked before it (rating of 4 or more).

    movielens-1m/ratings.parquet ──► `history`: up to 20 titles, strictly before, the latest last ─┐
                                     `recent`: the last 5 of them                                 ─┴─► ratings.parquet

What a user liked is all that is known of most users of the test period, who came after the training period. The file
is made of `movielens-1m` (fetched if it is not there), whose columns it has, and lies beside it in the cache.
"""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import is_complete, write_dataset
from ziggurat.data.datasets.movielens import FILE, TERMS, fetch_movielens
from ziggurat.data.histories import HistoryConfig, with_histories
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, MultiHot, Schema, Sequence
from ziggurat.files import sha256_of

NAME = "movielens-1m-histories"
LIKED = pl.col("rating") >= 4
HISTORIES = tuple(
    HistoryConfig(user="user_id", item="movie_id", time="timestamp", name=name, max_length=length)
    for name, length in (("history", 20), ("recent", 5))
)


def fetch_histories(
    *, source: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None
) -> Path:
    """The Parquet file of ratings with histories, made in the cache if it is not there.

    Args:
        source: of MovieLens-1M, as `fetch_movielens` takes it.
        cache: the cache folder; see `cache_folder`.

    Raises:
        MissingFileError, MissingDependencyError, DataError: as `fetch_movielens`.
    """
    folder = cache_folder(cache) / NAME
    if source is not None or not is_complete(folder):
        ratings = fetch_movielens(source=source, cache=cache)
        frame = pl.read_parquet(ratings)
        for each in HISTORIES:
            frame = with_histories(frame, each, liked=LIKED)
        members = {f"movielens-1m/{FILE}": sha256_of(ratings)}
        write_dataset(folder, {FILE: frame}, origin="movielens-1m, of this package", members=members, notes=TERMS)
    return folder / FILE


def histories_schema() -> Schema:
    """Like = rating >= 4; users by what they liked before, movies by id, year and genres.

    `recent` is the end of the history once more: what somebody liked last says most of what comes next. The user's id
    is the group and no feature: most users of the test period are new.
    """
    who = ("gender", "age", "occupation")
    return Schema(
        features=(
            *(Sequence(name=each.name, table="movie_id", max_length=each.max_length) for each in HISTORIES),
            *(Categorical(name=name) for name in who),
            Categorical(name="movie_id"),
            Categorical(name="year"),
            MultiHot(name="genres"),
        ),
        labels=(Label(name="like", column="rating", positive_from=4.0),),
        group="user_id",
        time="timestamp",
        items=Items(id="movie_id", features=("movie_id", "year", "genres")),
    )
