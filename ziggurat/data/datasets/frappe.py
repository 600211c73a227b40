"""Frappe: which app does a person use in a context; 10 categorical features, 288,609 rows in train, valid and test.

    label int8 · user · item · daytime · weekday · isweekend · homework · cost · weather · country · city   (all int32)

The log of 96,203 uses (Baltrunas et al., arXiv:1505.03014) was turned into a click prediction task by NFM (He and Chua,
SIGIR 2017): two negatives for each use, with the same user and context and an app that the user never used; 7:2:1 at
random. BARS publishes it as Frappe_x1. Two kinds of source:

- a folder with Frappe_x1's `train.csv`, `valid.csv` and `test.csv`: taken as they are;
- a folder with `Mobile_Frappe.zip` (the log) and NFM's `frappe.validation.libfm` and `frappe.test.libfm`, plain or
  packed: valid and test are exactly those of Frappe_x1 (compared by md5 in its CSV form). Of train, the 67,604 positive
  rows are exact: all uses less the held out ones. The 134,423 negative rows have exactly the users and contexts of
  Frappe_x1 (two for each use, less the held out ones), but their apps were never published apart from that file; they
  are drawn again by the published rule, uniformly among the apps that the user never used. Metrics are comparable, not
  equal.

Ids are those of the libfm files: users 0 … 956, items 957 … 5038, then each context column in order of appearance.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import numpy as np
import polars as pl

from ziggurat.cache import cache_folder
from ziggurat.data.datasets.fetch import (
    kept_dataset,
    open_archive,
    read_member,
    read_plain_or_gzip,
    require_file,
    verify,
    write_dataset,
)
from ziggurat.errors import DataError
from ziggurat.features.schema import Categorical, Label, Schema
from ziggurat.files import sha256_of

NAME = "frappe"
SPLITS = ("train", "valid", "test")
CONTEXT = ("daytime", "weekday", "isweekend", "homework", "cost", "weather", "country", "city")
COLUMNS = ("label", "user", "item", *CONTEXT)
NUM_ITEMS = 4082
FIRST_ITEM = 957
NUM_TRAIN = (67_604, 134_423)  # positive, negative
# The libfm files number the values of all columns one after the other; here those of each context begin.
_FIRST_CONTEXT = (5039, 5046, 5053, 5055, 5058, 5060, 5069, 5149)
_LOG_SHA256 = "409edc12f4e2153c5dd58ae171938735911d9b0f70961d5f1086b241656b2cb5"
_LIBFM = {
    "valid": ("frappe.validation.libfm", "fdf4be563a7dd9b15f7a6e8b32671e90e6e7a2a2bd3af4e10bf13c5ad7e76e9e"),
    "test": ("frappe.test.libfm", "a2ebaef3a9af8e55f8bb0d08bc4923965e42e43760ebd7635ac2f8c5db99e097"),
}
_CSV_MD5 = {
    "train": "ba7306e6c4fc19dd2cd84f2f0596d158",
    "valid": "88d51bf2173505436d3a8f78f2a59da8",
    "test": "3470f6d32713dc5f7715f198ca7c612a",
}
TERMS = """
Terms: research purposes; acknowledge the data set in publications; do not redistribute it without separate permission;
do not try to deanonymise it; no commercial or revenue-bearing use without permission.
Cite: Linas Baltrunas, Karen Church, Alexandros Karatzoglou, Nuria Oliver. Frappe: Understanding the Usage and
Perception of Mobile App Recommendations In-The-Wild. arXiv:1505.03014, 2015.
Task: Xiangnan He and Tat-Seng Chua. Neural Factorization Machines for Sparse Predictive Analytics. SIGIR 2017.
"""
_WAYS = (
    "put Frappe_x1's train.csv, valid.csv and test.csv (reczoo on the Hugging Face hub) into one folder, "
    "then: ziggurat data fetch frappe --source FOLDER",
    "or Mobile_Frappe.zip, frappe.validation.libfm and frappe.test.libfm (plain or .gz)",
)


def fetch_frappe(
    *,
    source: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    seed: int = 2021,
) -> Path:
    """The folder with train.parquet, valid.parquet and test.parquet.

    Args:
        source: a folder as the module says; None takes what is in the cache.
        cache: the cache folder; see `cache_folder`.
        seed: of the redrawn negatives; without meaning for the CSV source.

    Raises:
        MissingFileError: nothing cached and no source, or a file of the source is missing.
        DataError: a checksum differs, or the cache cannot be written.
    """
    folder = cache_folder(cache) / NAME
    if source is None:
        return kept_dataset(
            folder, why="Frappe may not be redistributed, so there is no default download", ways_out=_WAYS
        )
    path = require_file(source, expected="a folder with the files of Frappe", ways_out=_WAYS)
    if all((path / f"{split}.csv").is_file() for split in SPLITS):
        frames, members = _from_csv(path)
        origin = "Frappe_x1 as published by BARS"
    else:
        frames, members = _from_log(path, seed=seed)
        origin = f"Mobile_Frappe.zip and NFM's libfm files; negatives of train redrawn with seed {seed}"
    files = {f"{split}.parquet": frames[split] for split in SPLITS}
    return write_dataset(folder, files, origin=origin, members=members, notes=TERMS)


def frappe_schema() -> Schema:
    """Return the schema as BARS has it: ten categorical features, every id kept (min_count 1), nothing else."""
    return Schema(features=tuple(Categorical(name=name) for name in COLUMNS[1:]), labels=(Label(name="label"),))


def _from_csv(folder: Path) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    frames = {}
    members = {}
    for split in SPLITS:
        path = folder / f"{split}.csv"
        data = path.read_bytes()
        _verify_csv(data, split, where=str(path))
        frames[split] = pl.read_csv(data, schema=_types())
        members[path.name] = sha256_of(data)
    return frames, members


def _from_log(folder: Path, *, seed: int) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
    archive_path = require_file(folder / "Mobile_Frappe.zip", expected="the log of Frappe", ways_out=_WAYS)
    with open_archive(archive_path, expected="Mobile_Frappe.zip") as archive:
        log = read_member(archive, "frappe/frappe.csv")
    verify(log, sha256=_LOG_SHA256, where=f"{archive_path}, member frappe/frappe.csv")
    members = {"Mobile_Frappe.zip/frappe.csv": _LOG_SHA256}
    frames = {}
    for split, (name, sha256) in _LIBFM.items():
        data = read_plain_or_gzip(folder / name, ways_out=_WAYS)
        frames[split] = _parse_libfm(verify(data, sha256=sha256, where=f"{folder}/{name}"))
        members[name] = sha256
        _verify_csv(_as_csv(frames[split]), split, where=f"{folder}/{name}, in the form of {split}.csv")
    frames["train"] = _rebuild_train(_positives(log), pl.concat([frames["valid"], frames["test"]]), seed=seed)
    return frames, members


def _parse_libfm(data: bytes) -> pl.DataFrame:
    """Rows of `±1 id:1 id:1 …` as the columns of the task."""
    text = data.decode().replace(":1 ", ",").replace(":1", "").replace("-1 ", "0,").replace("1 ", "1,")
    return pl.read_csv(io.StringIO(text), schema=_types(), has_header=False)


def _types() -> dict[str, type[pl.DataType]]:
    return {name: pl.Int8 if name == "label" else pl.Int32 for name in COLUMNS}


def _as_csv(frame: pl.DataFrame) -> bytes:
    return frame.write_csv(line_terminator="\r\n").encode()


def _verify_csv(data: bytes, split: str, *, where: str) -> None:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != _CSV_MD5[split]:
        raise DataError(
            expected=f"md5 {_CSV_MD5[split]}, as BARS publishes it for {split}.csv of Frappe_x1",
            found=f"md5 {found} ({len(data):,} bytes)",
            where=where,
            ways_out=("download the file again, and leave it as it is (it has CRLF line ends)", _WAYS[0]),
        )


def _positives(log: bytes) -> pl.DataFrame:
    """The uses of the log with the ids of the libfm files."""
    frame = pl.read_csv(log, separator="\t", infer_schema=False)
    columns = [pl.col("user").cast(pl.Int32), pl.col("item").cast(pl.Int32) + FIRST_ITEM]
    for name, first in zip(CONTEXT, _FIRST_CONTEXT, strict=True):
        # They were numbered in the order in which they appear in the log.
        values = frame[name].unique(maintain_order=True)
        ids = pl.Series(range(first, first + len(values)), dtype=pl.Int32)
        columns.append(pl.col(name).replace_strict(values, ids, return_dtype=pl.Int32))
    return frame.select(columns)


def _rebuild_train(uses: pl.DataFrame, held: pl.DataFrame, *, seed: int) -> pl.DataFrame:
    """Positives: uses less held out ones, as multisets. Negatives: two for each use less held out ones, items drawn."""
    positive = _minus(uses, held.filter(pl.col("label") == 1).select(uses.columns)).sort(uses.columns)
    contexts = ["user", *CONTEXT]
    negative = _minus(
        pl.concat([uses, uses]).select(contexts), held.filter(pl.col("label") == 0).select(contexts)
    ).sort(contexts)
    generator = np.random.PCG64(seed)
    items = _draw_unused(generator, negative["user"].to_numpy(), uses)
    train = pl.concat(
        [
            positive.with_columns(label=pl.lit(1, pl.Int8)).select(COLUMNS),
            negative.with_columns(label=pl.lit(0, pl.Int8), item=pl.Series(items)).select(COLUMNS),
        ]
    )
    assert (positive.height, negative.height) == NUM_TRAIN  # the sources were verified
    return train[np.argsort(generator.random_raw(train.height), kind="stable")]


def _minus(left: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame:
    """Multiset difference: as many copies of a row as `left` has more than `right`."""
    keys = left.columns
    copy = pl.int_range(pl.len()).over(keys).alias("copy")
    return left.with_columns(copy).join(right.with_columns(copy), on=[*keys, "copy"], how="anti").drop("copy")


def _draw_unused(generator: np.random.PCG64, users: np.ndarray, uses: pl.DataFrame) -> np.ndarray:
    """An item for each of `users`, uniform among those the user never used: draw, redraw what was used.

    Raw 64-bit numbers of PCG64 are used, since NumPy promises their stream for ever (not that of its distributions).
    """
    used = np.unique(uses["user"].to_numpy().astype(np.int64) * NUM_ITEMS + (uses["item"].to_numpy() - FIRST_ITEM))
    items = np.zeros(len(users), dtype=np.int64)
    open_rows = np.arange(len(users))
    while open_rows.size:
        high = generator.random_raw(open_rows.size) >> np.uint64(32)
        # 32 random bits as a fraction, times the number of items, rounded down.
        items[open_rows] = ((high * np.uint64(NUM_ITEMS)) >> np.uint64(32)).astype(np.int64)
        keys = users[open_rows].astype(np.int64) * NUM_ITEMS + items[open_rows]
        place = np.minimum(np.searchsorted(used, keys), used.size - 1)
        open_rows = open_rows[used[place] == keys]
    return (items + FIRST_ITEM).astype(np.int32)
