"""Event logs in the file form of S3-Rec (Zhou et al., CIKM 2020): one line a user, its items in order, no times.

    1 1 2 3 4 5                    user 1 had items 1, 2, 3, 4, 5
    2 6 7 8 9 10 4 11

`beauty-events` is Amazon Beauty in that form, as published figures have it: 22,363 users, 12,101 items of five events
and more, 198,502 events. It states no licence, so there is no default download: the file is the user's own. An event's
time is its place in the line, which says what came before what, and nothing about how long ago: biases by time have
nothing to learn from it.

Parquet: user_id int32 · item_id int32 · place int64.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import kept_dataset, read_plain_or_gzip, verify, write_dataset
from ziggurat.errors import DataError
from ziggurat.features.events import Events
from ziggurat.features.items import Items
from ziggurat.features.schema import Categorical, Schema

NAME = "beauty-events"
FILE = "events.parquet"
_MEMBER = "Beauty.txt"
_SHA256 = "226cce9c3105299ca0db9615d7d3fb32b3175e90da43100ae352599f0f0107b8"
_WAYS = ("get Beauty.txt of S3-Rec (the folder data of its repository), then: --dataset.source PATH/Beauty.txt",)
TERMS = """
Terms: none stated by S3-Rec; the reviews behind it are for research. Do not redistribute.
Cite: Kun Zhou et al. S3-Rec: Self-Supervised Learning for Sequential Recommendation with Mutual Information
Maximization. CIKM 2020. Julian McAuley et al. Image-based Recommendations on Styles and Substitutes. SIGIR 2015.
"""


def fetch_beauty(*, source: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None) -> Path:
    """The events of Amazon Beauty as Parquet.

    Args:
        source: `Beauty.txt`, plain or packed (.gz), or a folder with it; None takes what is in the cache.
        cache: the cache folder; see `cache_folder`.

    Raises:
        MissingFileError: nothing cached and no source, or no such file.
        DataError: another file than the published one, or the cache cannot be written.
    """
    folder = cache_folder(cache) / NAME
    if source is None:
        return (
            kept_dataset(folder, why="the file states no licence, so there is no default download", ways_out=_WAYS)
            / FILE
        )
    path = Path(source).expanduser()
    path = path / _MEMBER if path.is_dir() else path
    data = verify(read_plain_or_gzip(path, ways_out=_WAYS), sha256=_SHA256, where=str(path))
    events = read_s3rec(data, where=str(path))
    write_dataset(folder, {FILE: events}, origin="Beauty.txt of S3-Rec", members={_MEMBER: _SHA256}, notes=TERMS)
    return folder / FILE


def beauty_schema() -> Schema:
    """Users, items and places; histories of 50, as published figures have them."""
    return Schema(
        features=(Categorical(name="item_id"),),
        group="user_id",
        time="place",
        items=Items(id="item_id"),
        events=Events(max_length=50),
    )


def read_s3rec(data: bytes, *, where: str) -> pl.DataFrame:
    """The events of a file in this form, user by user.

    Args:
        data: its bytes.
        where: named in errors.

    Raises:
        DataError: a line has no item, or something that is no whole number of 0 to 2^31 - 1.
    """
    users = []
    items = []
    lengths = []
    for number, line in enumerate(data.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        is_right = len(words) > 1 and all(word.isdigit() and int(word) < 2**31 for word in words)
        if not is_right:
            raise DataError(
                expected="a user and its items as whole numbers, separated by spaces: 1 17 4 11",
                found=repr(line[:60].decode(errors="replace")),
                where=f"{where}, line {number}",
                ways_out=(
                    "take the file as it was published",
                    "read other logs as tables: docs/guides/long-histories.md",
                ),
            )
        users.append(int(words[0]))
        items.extend(int(word) for word in words[1:])
        lengths.append(len(words) - 1)
    if not users:
        raise DataError(
            expected="lines of a user and its items", found="none", where=where, ways_out="correct the path"
        )
    counts = np.array(lengths)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return pl.DataFrame(
        {
            "user_id": np.repeat(np.array(users, np.int32), counts),
            "item_id": np.array(items, np.int32),
            "place": places.astype(np.int64),
        }
    )
