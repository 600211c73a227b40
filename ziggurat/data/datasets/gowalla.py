"""Gowalla check-ins as the public split of papers on graphs of users and items: train.txt and test.txt of LightGCN.

    0 0 1 2 3 4        one line a user: the user, then the places where the user was, each once

29,858 users, 40,981 places, 810,128 pairs to train on and 217,242 to test (a fifth of each user's). It states no
licence, so there is no default download: the files are the user's own. Other libraries have a Gowalla of another split.

Parquet, train and test: user_id int32 · item_id int32 · visited int8, which is 1.
"""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import kept_dataset, read_plain_or_gzip, require_file, verify, write_dataset
from ziggurat.data.datasets.s3rec import read_s3rec
from ziggurat.features.items import Items
from ziggurat.features.labels import Label, Outcomes
from ziggurat.features.schema import Categorical, Schema

NAME = "gowalla"
SPLITS = ("train", "test")
_SHA256 = {
    "train": "0f086326b28a56c2e6dcb81d86ee72d4ccb7eed3a8d26788392356d8f51111cc",
    "test": "099a2a73924e4b754dc6efd730d764f492321b53c38eb93298850c83acf57be3",
}
_WAYS = (
    "get train.txt and test.txt of LightGCN's repository (data/gowalla) into one folder, then: --dataset.source FOLDER",
)
TERMS = """
Terms: none stated; the check-ins behind it are for research. Do not redistribute.
Cite: Xiangnan He et al. LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation. SIGIR 2020.
Eunjoon Cho et al. Friendship and Mobility: User Movement in Location-Based Social Networks. KDD 2011.
"""


def fetch_gowalla(*, source: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder with train.parquet and test.parquet.

    Args:
        source: a folder with `train.txt` and `test.txt`, plain or packed (.gz); None takes what is in the cache.
        cache: the cache folder; see `cache_folder`.

    Raises:
        MissingFileError: nothing cached and no source, or a file of the source is missing.
        DataError: another file than the published one, or the cache cannot be written.
    """
    folder = cache_folder(cache) / NAME
    if source is None:
        why = "the files state no licence, so there is no default download"
        return kept_dataset(folder, why=why, ways_out=_WAYS)
    path = require_file(source, expected="a folder with train.txt and test.txt", ways_out=_WAYS)
    frames = {}
    members = {}
    for split in SPLITS:
        file = path / f"{split}.txt"
        data = verify(read_plain_or_gzip(file, ways_out=_WAYS), sha256=_SHA256[split], where=str(file))
        pairs = read_s3rec(data, where=str(file)).select("user_id", "item_id")
        frames[f"{split}.parquet"] = pairs.with_columns(pl.lit(1, pl.Int8).alias("visited"))
        members[f"{split}.txt"] = _SHA256[split]
    return write_dataset(folder, frames, origin="the split of LightGCN", members=members, notes=TERMS)


def gowalla_schema() -> Schema:
    """Users and places; each row is a place where the user was."""
    return Schema(
        features=(Categorical(name="user_id"), Categorical(name="item_id")),
        labels=(Label(name="visited", outcomes=Outcomes.POSITIVE_ONLY),),
        group="user_id",
        items=Items(id="item_id"),
    )
