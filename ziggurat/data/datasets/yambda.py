"""Yambda: what people heard on a music service, as flat files, and the event log that is made of them.

    FOLDER/listens.parquet   uid · item_id · timestamp · is_organic · played_ratio_pct · track_length_seconds
    FOLDER/likes.parquet     uid · item_id · timestamp · is_organic
    FOLDER/dislikes.parquet  the same                                    ──►  events.parquet

`events.parquet` has all of them: uid, item_id, timestamp (seconds, int64), is_organic, played_ratio_pct, `event` and
`listen_plus`. A listen is `listen_plus` if half of the track or more was played, else `skip`; `listen_plus` is 1 or 0
for it, and null for likes and dislikes, which are therefore history and never candidates. At one moment listens stand
before likes, and likes before dislikes.

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

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import is_complete, require_file, write_dataset
from ziggurat.data.raw.parquet_seal import is_sealed_and_whole, seal_parquet
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Label, Schema
from ziggurat.files import replacing_folder

NAME, MADE = "yambda-events", "yambda-made"
FILE = "events.parquet"
HALF = 50  # percent of a track, from which on a listen counts
POOLS = ("listen_plus", "like", "skip")
DAY_S = 86_400
_COMMON = ("uid", "item_id", "timestamp", "is_organic")
_FILES = {"listens": (*_COMMON, "played_ratio_pct"), "likes": _COMMON, "dislikes": _COMMON}
_WAYS = (
    "put listens.parquet, likes.parquet and dislikes.parquet of Yambda (flat, any size; yandex/yambda on the Hugging "
    "Face hub) into one folder, then: --dataset.source FOLDER",
    "to try it out without them: ziggurat train yambda_stu_toy",
)


def yambda_schema(*, share: int, candidates: int) -> Schema:
    """Tracks to rank by what a person heard, liked and skipped: each its own share of the history; windows of a day.

    Args:
        share: events of each of the three pools.
        candidates: listens that are asked together.
    """
    return Schema(
        features=(
            Categorical(name="item_id"),
            Categorical(name="event"),
            Categorical(name="listener", column="uid"),
        ),
        labels=(Label(name="listen_plus"),),
        group="uid",
        time="timestamp",
        items=Items(id="item_id"),
        events=Events(
            actions=("event",),
            context=("listener",),
            max_length=len(POOLS) * share,
            candidates=candidates,
            pool_by="event",
            pools=POOLS,
            window=DAY_S,
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
        for name in _FILES
    }
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths.values()]
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
    for name, path in paths.items():
        frame = _checked(path, columns=_FILES[name])
        columns = {column: each.cast(pl.Int32) for column, each in (none | told[name]).items() if column != "event"}
        plain = [pl.col(column).cast(pl.Int64) for column in _COMMON]
        frames.append(frame.select(*plain, told[name]["event"].alias("event"), **columns))
    try:
        # Streamed: the whole log need not fit into memory.
        pl.concat(frames).sink_parquet(out)
    except pl.exceptions.PolarsError as error:
        raise DataError(
            expected="files of Yambda that can be read, with whole numbers",
            found=str(error).splitlines()[0],
            where=", ".join(map(str, paths.values())),
            ways_out=_WAYS,
        ) from error


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
    folder = cache_folder(cache) / MADE
    if not is_complete(folder):
        frames = {f"{name}.parquet": frame for name, frame in made_yambda().items()}
        write_dataset(folder, frames, origin="made by this package", members={}, notes="Made up: free to use.\n")
    return fetch_yambda(source=folder, cache=cache)


def made_yambda(*, users: int = 1000, tracks: int = 400, days: int = 10, seed: int = 0) -> dict[str, pl.DataFrame]:
    """Frames of Yambda's form by the name of their file: people hear on what they like, and skip the rest.

    Args:
        users: how many people; each hears some ten tracks a day.
        tracks: in eight styles, of which a person likes two.
        days: of the log.
        seed: of everything.
    """
    random = np.random.Generator(np.random.PCG64(seed))
    counts = random.poisson(10 * days, users) + 1
    uid = np.repeat(np.arange(users, dtype=np.uint32), counts)
    total = len(uid)
    item = (random.zipf(1.3, total) - 1).clip(max=10**6) % tracks
    moment = random.integers(0, days * DAY_S // 5, total) * 5  # seconds, rounded to five as the real ones
    tastes = np.stack([random.permutation(8)[:2] for _ in range(users)])
    is_liked = (tastes[uid] == (item % 8)[:, None]).any(axis=1)
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
    frames = {"listens": listens.sort("uid", "timestamp", maintain_order=True)}
    chance = random.random(total)
    marks = {"likes": is_liked & is_heard & (chance < 0.15), "dislikes": ~is_liked & ~is_heard & (chance < 0.05)}
    for name, chosen in marks.items():
        some = listens.filter(pl.Series(chosen)).with_columns(timestamp=pl.col("timestamp") + 5)
        frames[name] = some.select("uid", "timestamp", "item_id", "is_organic").sort("uid", "timestamp")
    return frames
