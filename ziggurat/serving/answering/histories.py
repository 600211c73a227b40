"""Histories of vectors in an export: a table from users to the last vectors that a teacher has logged of them.

    request {"user": "ann"}  ──► ann in the table? ──► her packed vectors ──► the feature that no client sends
             with vectors    ────────────────────────► those of the request

The table is a snapshot: the vectors of the side table when the export was made, which are those of before any later
request. A user that it does not know has no history, as in training. It grows old until an export is made anew;
`newest` says how old it is. A request may bring vectors of its own, the latest first, as lists of numbers, which count
before the table; an empty list says that there are none.

    ranker/histories/NAME/table.json     column of the user, time of the newest example, watermark of the newest version
    ranker/histories/NAME/keys.npy       (U,) digest of each user, in order
    ranker/histories/NAME/words.npy      (U, W) packed vectors, mapped and not loaded

Cost: 8 + 4·W bytes a user on the disk, W = 1 + L · row words; a request reads one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from jaxtyping import Int32, UInt64

from ziggurat.config import from_json
from ziggurat.data.preprocess.values.parsing import words_of_lists
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.teachers.history import keys_of
from ziggurat.data.teachers.join import joined_histories
from ziggurat.errors import ExportError
from ziggurat.features.kinds import TeacherHistory
from ziggurat.features.schema import Schema, column_of
from ziggurat.files import Format
from ziggurat.serving.export.export_folder import WAYS_OUT, ExportFolder, damaged

HISTORIES = "histories"
TABLE = Format(
    name="ziggurat.export_histories",
    what="the histories of an export",
    error=ExportError,
    ways_out=WAYS_OUT,
)
_TABLE_FILE = "table.json"


@dataclass(frozen=True, kw_only=True)
class SnapshotFacts:
    """The facts about a table of histories.

    Args:
        key: raw column of the user.
        users: in the table.
        newest: time of the newest example, in seconds since 1970 or as the time column counts.
        watermark: of the newest version that wrote vectors.
        is_calendar: whether both are in seconds since 1970.
    """

    key: str
    users: int
    newest: float
    watermark: float
    is_calendar: bool


@dataclass(frozen=True, kw_only=True)
class HistorySnapshot:
    """The packed vectors of users, for one feature.

    Args:
        feature: which.
        facts: of the table.
        keys: digests of the users, in order.
        words: of each.
    """

    feature: TeacherHistory
    facts: SnapshotFacts
    keys: UInt64[np.ndarray, " U"]
    words: Int32[np.ndarray, "U W"]

    def of_users(self, keys_N: UInt64[np.ndarray, " N"]) -> Int32[np.ndarray, "N W"]:
        """Return the packed vectors of users; none of those that the table does not know."""
        if not len(self.keys):
            return np.zeros((len(keys_N), self.words.shape[1]), dtype=np.int32)
        at_N = np.searchsorted(self.keys, keys_N).clip(max=len(self.keys) - 1)
        return np.where((self.keys[at_N] == keys_N)[:, None], self.words[at_N], 0)


@dataclass(frozen=True, kw_only=True)
class HistorySnapshots:
    """The tables of a model of an export; without any, requests bring their vectors."""

    snapshots: tuple[HistorySnapshot, ...] = field(default=())

    @staticmethod
    def load(export: ExportFolder, part: str, *, schema: Schema) -> HistorySnapshots:
        """Map the tables of a part of an export.

        Raises:
            ExportError: files do not go together.
        """
        found: list[HistorySnapshot] = []
        for feature in joined_histories(schema):
            folder = f"{part}/{HISTORIES}/{feature.name}"
            if not export.has(folder):
                continue
            file = export.file(f"{folder}/{_TABLE_FILE}")
            facts = from_json(SnapshotFacts, TABLE.read(file).get("facts"), where=str(file), error=ExportError)
            keys, words = (
                np.load(export.file(f"{folder}/{name}.npy"), mmap_mode="r", allow_pickle=False)
                for name in ("keys", "words")
            )
            if words.shape != (len(keys), feature.history.words):
                raise damaged(
                    file, expected=f"{len(keys):,} users of {feature.history.words} words", found=str(words.shape)
                )
            found.append(HistorySnapshot(feature=feature, facts=facts, keys=keys, words=words))
        return HistorySnapshots(snapshots=tuple(found))

    def added_to(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return rows with the vectors of their users, where they have none of their own.

        Args:
            frame: raw columns; one without the column of the user stays as it is.
        """
        for each in self.snapshots:
            column = column_of(each.feature)
            if each.facts.key not in frame.columns:
                continue
            given = frame[column] if column in frame.columns else pl.Series(column, [None] * frame.height)
            if not given.null_count():
                continue
            words_NW = each.of_users(keys_of(RawChunk.of(frame), each.facts.key))
            is_given_N = given.is_not_null().to_numpy()
            if is_given_N.any():
                own_KW = words_of_lists(given.drop_nulls(), each.feature.history)
                words_NW[is_given_N] = own_KW
            series = pl.Series(column, words_NW, dtype=pl.Array(pl.Int32, words_NW.shape[1]))
            frame = frame.with_columns(series)
        return frame


def write_snapshot(
    folder: Path,
    feature: TeacherHistory,
    *,
    facts: SnapshotFacts,
    keys: UInt64[np.ndarray, " U"],
    words: Iterable[Int32[np.ndarray, "V W"]],
) -> Mapping[str, object]:
    """Write the table of a feature into the folder of a part of an export; return what is said of it.

    Args:
        folder: of the part.
        feature: which.
        facts: of the table.
        keys: digests of users, in order.
        words: packed vectors of them, in pieces.
    """
    place = folder / HISTORIES / feature.name
    place.mkdir(parents=True)
    np.save(place / "keys.npy", keys)
    shape = (len(keys), feature.history.words)
    if len(keys):
        target = np.lib.format.open_memmap(place / "words.npy", mode="w+", dtype=np.int32, shape=shape)
        first = 0
        for part in words:
            target[first : first + len(part)] = part
            first += len(part)
        target.flush()
    else:
        np.save(place / "words.npy", np.empty(shape, dtype=np.int32))
    content = {name: getattr(facts, name) for name in ("key", "users", "newest", "watermark", "is_calendar")}
    TABLE.write(place / _TABLE_FILE, {"facts": content})
    return {**content, "bytes": (place / "words.npy").stat().st_size}
