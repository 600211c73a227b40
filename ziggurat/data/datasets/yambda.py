"""Yambda: what people heard on a music service, as flat files, and the event log that is made of them.

    FOLDER/listens.parquet   uid · item_id · timestamp · is_organic · played_ratio_pct · track_length_seconds
    FOLDER/likes.parquet     uid · item_id · timestamp · is_organic
    FOLDER/dislikes.parquet  the same
    FOLDER/artist_item_mapping.parquet   artist_id · item_id
    FOLDER/album_item_mapping.parquet    album_id · item_id              ──►  events.parquet

`events.parquet` has all of them: uid, item_id, timestamp (seconds, int64), is_organic, played_ratio_pct, `event`,
`listen_plus`, `artist_id`, `album_id` and seven crosses. A listen is `listen_plus` if half of the track or more was
played, else `skip`; `listen_plus` is 1 or 0 for it, and null for likes and dislikes, which are therefore history and
never candidates. At one moment listens stand before likes, and likes before dislikes.

A track without an artist or album has 0, one with several has that of the last row of the file: as the reference does.
A cross is one number for a combination of what is known when a track is asked about: who, which track, artist, album,
at which hour of the day (UTC), by themselves or led to it (`is_organic`). Numbers below 2³¹ (people) and 2²⁷ (the rest)
never share one; the tables of crosses hash them.

The files come in three sizes (50m, 500m, 5b listens and more), and are the user's own: none is fetched. They are
converted in a stream, so memory is bounded whatever the size, and once for each state of the files. `made_yambda` makes
small files of the same form, with tastes that can be learned.

Source: Ploshkin et al., "Yambda-5B", arXiv 2505.22238. What MLPerf's DLRMv4 makes of it: mlcommons/training,
`recommendation`.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import polars as pl
from jaxtyping import Bool

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import is_complete, require_file, write_dataset
from ziggurat.data.raw.parquet_seal import is_sealed_and_whole, seal_parquet
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, Schema, Table
from ziggurat.features.tables import Encoding
from ziggurat.files import replacing_folder

NAME = "yambda-events"
MADE = "yambda-made"
FILE = "events.parquet"
HALF = 50  # percent of a track, from which on a listen counts
POOLS = ("listen_plus", "like", "skip")
STYLES = 8  # of the made data
DAY_S = 86_400
HOUR_S = 3_600
# Name, what is crossed, and rows of the table in the reference.
CROSSES = (
    ("user_x_artist", ("uid", "artist_id"), 100_000_000),
    ("user_x_album", ("uid", "album_id"), 40_000_000),
    ("user_x_hour", ("uid", "hour"), 24_000_000),
    ("item_x_hour", ("item_id", "hour"), 40_000_000),
    ("artist_x_hour", ("artist_id", "hour"), 32_000_000),
    ("user_x_is_organic", ("uid", "is_organic"), 2_000_000),
    ("user_x_artist_x_hour", ("uid", "artist_id", "hour"), 40_000_000),
)
REACH = 20_000  # events before a question, among which the reference looks for a history
_FORM = 2  # raise it when the same files become other events
_SIZES = {"hour": 24, "is_organic": 2}  # of what a cross appends; ids have the size below
_ID_SIZE = 1 << 27
_COMMON = ("uid", "item_id", "timestamp", "is_organic")
_FILES = {"listens": (*_COMMON, "played_ratio_pct"), "likes": _COMMON, "dislikes": _COMMON}
_MAPPINGS = {"artist_item_mapping": "artist_id", "album_item_mapping": "album_id"}
_WAYS = (
    "put listens.parquet, likes.parquet and dislikes.parquet of Yambda (flat, any size; yandex/yambda on the Hugging "
    "Face hub) into one folder, with artist_item_mapping.parquet and album_item_mapping.parquet, then: "
    "--dataset.source FOLDER",
    "to try it out without them: ziggurat train yambda_stu_toy",
)


def yambda_schema(*, share: int, people: int = 1_000_000) -> Schema:
    """Tracks to rank by what a person heard, liked and skipped: each its own share of the history; windows of a day.

    A question has one candidate, since its crosses are context and belong to it alone. Who has fewer events than a
    whole history before a listen is not asked about it.

    Args:
        share: events of each of the three pools.
        people: how many there are; tables of crosses have the rows of the reference for a million, and as many less.
    """
    crosses = [(name, max(1, num_rows * people // 1_000_000)) for name, _, num_rows in CROSSES]
    length = len(POOLS) * share
    return Schema(
        features=(
            Categorical(name="item_id"),
            Categorical(name="artist_id"),
            Categorical(name="album_id"),
            Categorical(name="event"),
            Categorical(name="listener", column="uid"),
            *(Categorical(name=name) for name, _ in crosses),
        ),
        tables=tuple(Table(name=name, encoding=Encoding.HASHING, num_rows=rows) for name, rows in crosses),
        labels=(Label(name="listen_plus"),),
        group="uid",
        time="timestamp",
        items=Items(id="item_id", features=("item_id", "artist_id", "album_id")),
        events=Events(
            actions=("event",),
            context=("listener", *(name for name, _ in crosses)),
            max_length=length,
            candidates=1,
            pool_by="event",
            pools=POOLS,
            window=DAY_S,
            min_history=length,
            reach=REACH,
        ),
    )


def fetch_yambda(*, source: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None) -> Path:
    """The events of the files of Yambda, made in the cache once for each state of the files.

    Args:
        source: the folder with the files.
        cache: the cache folder; see `cache_folder`.

    Raises:
        MissingFileError: no source, or a file is absent.
        DataError: a file lacks a column, has one of another type, or cannot be read.
    """
    if source is None:
        raise MissingFileError(
            expected="a folder with the files of Yambda: they are not fetched",
            found="no source",
            where=f"data set {NAME}",
            ways_out=_WAYS,
        )
    folder = Path(source).expanduser()
    paths = {
        name: require_file(folder / f"{name}.parquet", expected=f"the {name} of Yambda", ways_out=_WAYS)
        for name in (*_FILES, *_MAPPINGS)
    }
    facts: list[object] = [_FORM]
    facts += [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths.values()]
    target = cache_folder(cache) / NAME / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    if _is_sealed(target / FILE):
        return target / FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(target, error=DataError) as temporary:
        _convert(paths, temporary / FILE)
        seal_parquet(temporary / FILE)
    return target / FILE


def _is_sealed(path: Path) -> bool:
    """Return whether converted events are there, as they were written: every byte is read."""
    return path.exists() and is_sealed_and_whole(path)


def _convert(paths: dict[str, Path], out: Path) -> None:
    ratio = pl.col("played_ratio_pct")
    heard = pl.when(ratio >= HALF).then(pl.lit("listen_plus")).when(ratio < HALF).then(pl.lit("skip"))
    told = {
        "listens": {"event": heard, "listen_plus": (ratio >= HALF).cast(pl.Int8), "played_ratio_pct": ratio},
        "likes": {"event": pl.lit("like")},
        "dislikes": {"event": pl.lit("dislike")},
    }
    # Likes and dislikes have no label: they are history, and never candidates.
    none = {"listen_plus": pl.lit(None, pl.Int8), "played_ratio_pct": pl.lit(None)}
    frames = []
    for name in told:
        frame = _checked(paths[name], columns=_FILES[name])
        columns = {column: each.cast(pl.Int32) for column, each in (none | told[name]).items() if column != "event"}
        plain = [pl.col(column).cast(pl.Int64) for column in _COMMON]
        frames.append(frame.select(*plain, told[name]["event"].alias("event"), **columns))
    events = pl.concat(frames)
    for name, column in _MAPPINGS.items():
        mapping = _checked(paths[name], columns=("item_id", column))
        plain = mapping.select(pl.col("item_id", column).cast(pl.Int64))
        known = plain.unique(subset="item_id", keep="last", maintain_order=True)
        # In the order of the log: events of one moment stay as they stand.
        events = events.join(known, on="item_id", how="left", maintain_order="left")
        events = events.with_columns(pl.col(column).fill_null(0))
    events = events.with_columns(cross_of(parts).alias(name) for name, parts, _ in CROSSES)
    try:
        # Streamed: the whole log need not fit into memory.
        events.sink_parquet(out)
    except pl.exceptions.PolarsError as error:
        raise DataError(
            expected="files of Yambda that can be read, with whole numbers",
            found=str(error).splitlines()[0],
            where=", ".join(map(str, paths.values())),
            ways_out=_WAYS,
        ) from error


def cross_of(parts: tuple[str, ...]) -> pl.Expr:
    """Return one number for each combination of these columns, as digits of a number with mixed bases.

    Args:
        parts: of `CROSSES`.
    """
    columns = {"hour": pl.col("timestamp") // HOUR_S % 24}
    number = pl.lit(0, pl.Int64)
    for part in parts:
        number = number * _SIZES.get(part, _ID_SIZE) + columns.get(part, pl.col(part))
    return number


def _checked(path: Path, *, columns: tuple[str, ...]) -> pl.LazyFrame:
    frame = pl.scan_parquet(path)
    try:
        types = frame.collect_schema()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise DataError(
            expected="a Parquet file of Yambda", found=str(error).splitlines()[0], where=str(path), ways_out=_WAYS
        ) from error
    wrong = [name for name in columns if name not in types]
    wrong += [f"{name} as {types[name]}" for name in columns if name in types and not types[name].is_integer()]
    if wrong:
        raise DataError(
            expected=f"columns {', '.join(columns)}, whole numbers",
            found=f"{'no ' if wrong[0] in columns else ''}{', '.join(wrong)}, among {', '.join(types.names()[:20])}",
            where=str(path),
            ways_out=_WAYS,
        )
    return frame


def fetch_made(*, cache: str | os.PathLike[str] | None = None) -> Path:
    """The events of small made files of Yambda's form.

    Args:
        cache: the cache folder; see `cache_folder`.

    Raises:
        DataError: the cache cannot be written.
    """
    # Of its own for each form: files of an earlier one lack what later ones have.
    folder = cache_folder(cache) / f"{MADE}-{_FORM}"
    if not is_complete(folder):
        frames = {f"{name}.parquet": frame for name, frame in made_yambda().items()}
        write_dataset(folder, frames, origin="made by this package", members={}, notes="Made up: free to use.\n")
    return fetch_yambda(source=folder, cache=cache)


def made_yambda(*, users: int = 1000, tracks: int = 400, days: int = 10, seed: int = 0) -> dict[str, pl.DataFrame]:
    """Frames of Yambda's form by the name of their file: people hear on what they like, and skip the rest.

    An artist has ten tracks, on two albums, all of one style. Of every 50 tracks one has no artist and no album, and
    one has a guest as well, who stands before the artist.

    Args:
        users: how many people; each hears some ten tracks a day.
        tracks: in eight styles, of which a person likes two.
        days: of the log.
        seed: of everything.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    listens, is_liked = _made_listens(random, users=users, tracks=tracks, days=days)
    is_heard = listens["played_ratio_pct"].to_numpy() >= HALF
    total = len(is_heard)
    frames = {"listens": listens.sort("uid", "timestamp", maintain_order=True)}
    chance = random.random(total)
    marks = {"likes": is_liked & is_heard & (chance < 0.15), "dislikes": ~is_liked & ~is_heard & (chance < 0.05)}
    for name, chosen in marks.items():
        some = listens.filter(pl.Series(chosen)).with_columns(timestamp=pl.col("timestamp") + 5)
        frames[name] = some.select("uid", "timestamp", "item_id", "is_organic").sort("uid", "timestamp")
    return frames | _made_mappings(tracks)


def best_made_auc(*, users: int = 1000, tracks: int = 400, days: int = 10, seed: int = 0) -> float:
    """Return the AUC on the last day of `made_yambda` of who knows what everybody likes: nobody can do better.

    Whether a track is heard is drawn with one of two chances, by whether it is liked, so that this is all there is to
    know.

    Args:
        users: as of `made_yambda`, like the others.
        tracks: see there.
        days: see there.
        seed: see there.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    listens, is_liked = _made_listens(random, users=users, tracks=tracks, days=days)
    is_last = listens["timestamp"].to_numpy() >= (days - 1) * DAY_S
    liked = is_liked[is_last]
    is_heard = listens["played_ratio_pct"].to_numpy()[is_last] >= HALF
    of_heard = liked[is_heard].mean()
    of_skipped = liked[~is_heard].mean()
    # Two scores alone: pairs in the right order, and half of those that are equal.
    return float((1 + of_heard - of_skipped) / 2)


def _made_listens(
    random: np.random.Generator, *, users: int, tracks: int, days: int
) -> tuple[pl.DataFrame, Bool[np.ndarray, " N"]]:
    """Return listens in the order of the people, and whether each track is of a style that its listener likes."""
    counts = random.poisson(10 * days, users) + 1
    uid = np.repeat(np.arange(users, dtype=np.uint32), counts)
    total = len(uid)
    item = (random.zipf(1.3, total) - 1).clip(max=10**6) % tracks
    moment = random.integers(0, days * DAY_S // 5, total) * 5  # seconds, rounded to five as the real ones
    tastes = np.stack([random.permutation(STYLES)[:2] for _ in range(users)])
    is_liked = (tastes[uid] == (item % STYLES)[:, None]).any(axis=1)
    is_heard = random.random(total) < np.where(is_liked, 0.85, 0.25)
    ratio = np.where(is_heard, random.integers(HALF, 101, total), random.integers(0, HALF, total))
    listens = pl.DataFrame(
        {
            "uid": uid,
            "timestamp": moment.astype(np.uint32),
            "item_id": item.astype(np.uint32),
            "is_organic": random.integers(0, 2, total).astype(np.uint8),
            "played_ratio_pct": ratio.astype(np.uint16),
            "track_length_seconds": random.integers(60, 400, total).astype(np.uint32),
        }
    )
    return listens, is_liked


def _made_mappings(tracks: int) -> dict[str, pl.DataFrame]:
    item = np.arange(tracks)
    # The number of a track in its style, ten of which are one artist's.
    place = item // STYLES
    artist = 1 + item % STYLES + STYLES * (place // 10)
    album = 2 * artist + place // 5 % 2
    is_known = item % 50 != 49
    is_shared = item % 50 == 7
    guest = 1 + (item + 1) % STYLES
    artists = np.concatenate([guest[is_shared], artist[is_known]])
    of_artists = np.concatenate([item[is_shared], item[is_known]])
    columns = {
        "artist_item_mapping": {"artist_id": artists, "item_id": of_artists},
        "album_item_mapping": {"album_id": album[is_known], "item_id": item[is_known]},
    }
    return {name: pl.DataFrame(found).cast(pl.UInt32) for name, found in columns.items()}
