"""The catalogue of an export: one row an item, found by id; and what is known of users, found in the same way.

    items/catalogue.parquet    raw columns of the items, and "events:", how often each was in the data
    items/items.json           which column is the id, which are columns of features
    users/users.parquet        raw columns of users, as they were last; the most active user first
    users/seen.safetensors     offsets (U + 1) and items: numbers of catalogue rows, of each user the latest first

Ids are compared by their canonical texts (`data/preprocess/values/cells.py`), so 17, 17.0 and "17" are one user.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
from jaxtyping import Int64
from polars.exceptions import PolarsError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ziggurat.config import from_json, to_json
from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.preprocess.values.vocabulary import Ids, Vocabulary
from ziggurat.errors import ExportError, RequestError
from ziggurat.features.events import HISTORY, HISTORY_TIMES
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.files import Format
from ziggurat.files.tensors import load_tensors
from ziggurat.ops.written_decimals import frame_with_decimals
from ziggurat.plain import as_group
from ziggurat.serving.export.export_folder import WAYS_OUT, ExportFolder, damaged
from ziggurat.serving.plain_values import plain
from ziggurat.serving.request_rows import canonical_id

_MANY = 200
_MAX_KEPT = 100_000  # found ids, about 10 MB
EVENTS = "events:"  # column of the catalogue: rows of the data that have the item
GONE = "gone:"  # column of the catalogue of merged changes: whether the item was deleted
CATALOGUE_FILE, ITEMS_FILE = "items/catalogue.parquet", "items/items.json"
USERS_FILE, SEEN_FILE = "users/users.parquet", "users/seen.safetensors"
ITEMS = Format(name="ziggurat.export_items", what="the items of an export", error=ExportError, ways_out=WAYS_OUT)


class NumberOfId:
    """Finds the number of a row by its id.

    A vocabulary looks thousands up at once, but takes 0.1 ms for one; so texts that were found are kept in a dict.

    Args:
        ids: canonical texts, each once.
    """

    def __init__(self, ids: pl.Series) -> None:
        self.ids = ids
        self._found = Vocabulary(ids, pl.zeros(len(ids), dtype=pl.Int64, eager=True))
        self._kept: dict[str, int] = {}

    def numbers(self, ids: Sequence[object], *, column: str = "id") -> Int64[np.ndarray, " N"]:
        """Numbers of ids of any type that JSON has; -1 for an id that is not there, or is missing.

        Raises:
            RequestError: a value is no id; names the column.
        """
        kept = self._kept
        # Texts alone: as keys of a dict, 1 and True are equal, and they are different ids.
        found = [kept.get(each, -1) if type(each) is str else -1 for each in ids]
        if -1 not in found:
            return np.array(found, dtype=np.int64)
        numbers = self.looked_up([canonical_id(each, column=column) for each in ids])
        # Emptied at once: what is asked often is soon there again.
        if len(kept) + len(ids) > _MAX_KEPT:
            kept.clear()
        kept.update(
            (each, int(n)) for each, n in zip(ids[:_MAX_KEPT], numbers, strict=False) if n >= 0 and type(each) is str
        )
        return numbers

    def looked_up(self, texts: Sequence[str | None]) -> Int64[np.ndarray, " N"]:
        """Numbers of canonical texts, without what is kept."""
        rows = self._found.rows(Ids.of(pl.Series(list(texts), dtype=pl.String))).astype(np.int64)
        # Reserved rows (padding, unknown, missing) become −1.
        return np.maximum(rows - NUM_RESERVED_ROWS, -1)


@dataclass(frozen=True, kw_only=True)
class ItemColumns:
    """The meanings of the columns of a catalogue.

    Args:
        id: the column of the item's id.
        features: columns that models read; that of the id belongs to them.
    """

    id: str
    features: tuple[str, ...]


class ItemCatalogue:
    """The items of an export.

    Args:
        frame: one row an item.
        columns: what its columns mean.
        gone: mask of the items that were deleted: their rows and numbers stay, their ids are not found.
    """

    def __init__(self, frame: pl.DataFrame, *, columns: ItemColumns, gone: np.ndarray | None = None) -> None:
        ids = _texts_of_ids(frame, columns.id)
        self.columns = columns
        self.events = frame[EVENTS].to_numpy() if EVENTS in frame.columns else np.zeros(frame.height, dtype=np.int64)
        self.frame = frame_with_decimals(frame.drop(EVENTS, strict=False))
        self.ids = ids.alias("id").rechunk()
        self._by_id = NumberOfId(self.ids)
        self.gone = np.zeros(frame.height, dtype=bool) if gone is None else gone

    def __len__(self) -> int:
        """Rows, those of deleted items included."""
        return self.frame.height

    def num_items(self) -> int:
        """Items that are there."""
        return self.frame.height - int(self.gone.sum())

    def changed(self, numbers: Int64[Tensor, "M"], *, rows: pl.DataFrame, gone: Sequence[int]) -> ItemCatalogue:
        """The catalogue after a change; this one stays as it is.

        Args:
            numbers: items that are new or have changed; the new ones follow the last number.
            rows: theirs.
            gone: numbers of items that are deleted, also such that only get a number.
        """
        size = max(self.frame.height, int(numbers.max()) + 1 if len(numbers) else 0)
        # For each number its row in the old frame, or in the new rows behind it.
        place = np.arange(size)
        place[numbers.numpy()] = np.arange(self.frame.height, self.frame.height + len(numbers))
        is_gone = np.concatenate([self.gone, np.zeros(size - self.frame.height, dtype=bool)])
        is_gone[numbers.numpy()] = False
        is_gone[list(gone)] = True
        changed = ItemCatalogue(pl.concat([self.frame, rows])[place], columns=self.columns, gone=is_gone)
        changed.events = np.concatenate([self.events, np.zeros(size - self.frame.height, dtype=self.events.dtype)])
        return changed

    def find(self, ids: Sequence[object], *, column: str = "id") -> Int64[np.ndarray, " N"]:
        """Numbers of items by their ids; -1 where there is none, or it was deleted."""
        found = self._by_id.numbers(ids, column=column)
        # −1 reads the last item here, so `found >= 0` decides as well.
        return np.where(self.gone[found] & (found >= 0), -1, found) if self.gone.any() else found

    def rows_ever(self, ids: Sequence[str]) -> Int64[np.ndarray, " N"]:
        """Numbers of items by their canonical ids, those of deleted ones included; -1 where there was none."""
        return self._by_id.looked_up(ids)

    def numbers(self, ids: Sequence[str]) -> Int64[Tensor, "N"]:
        """Numbers of items by their ids.

        Raises:
            RequestError: there is no item of one of the ids.
        """
        found = self.find(ids)
        absent = np.flatnonzero(found < 0)
        if len(absent):
            more = f", and {len(absent) - 1:,} more" if len(absent) > 1 else ""
            raise RequestError(
                expected=f"ids of items in the catalogue (column {self.columns.id!r}, {self.num_items():,} items)",
                found=f"{ids[int(absent[0])]!r:.80}{more}",
                where="request, items",
                ways_out=("correct the id", "give the item by its columns", "export again with the new items"),
            )
        return torch.from_numpy(found)

    def known(self, ids: Sequence[str]) -> Int64[Tensor, "N"]:
        """Numbers of those ids that are in the catalogue."""
        found = self.find(ids)
        return torch.from_numpy(found[found >= 0])

    def notes(self, ids: Sequence[str]) -> tuple[str, ...]:
        """Return notes for somebody who excludes items: that there is no item of some of the ids."""
        absent = np.flatnonzero(self.find(ids) < 0).tolist() if ids else []
        if not absent:
            return ()
        more = f", nor of {len(absent) - 1:,} more of the excluded ids" if len(absent) > 1 else ""
        return (f"exclude: there is no item of the id {ids[absent[0]]!r:.80}{more}",)

    def ids_at(self, numbers: Int64[Tensor, "n"]) -> list[str]:
        """The ids of some items."""
        if len(numbers) > _MANY:
            return self.ids.gather(numbers.numpy()).to_list()
        ids = self.ids  # a gather takes half a millisecond before it begins
        return [ids[number] for number in numbers.tolist()]

    def row(self, number: int) -> dict[str, object]:
        """The raw columns of an item."""
        return self.frame.row(number, named=True)

    def completed(
        self, items: Mapping[int, Mapping[str, object]], *, columns: Collection[str]
    ) -> dict[int, Mapping[str, object]]:
        """Items by their columns; of those whose id is here, the columns that they leave out are as they stand here.

        Args:
            items: raw columns, by any key.
            columns: that may be completed.
        """
        ids = [canonical_id(item.get(self.columns.id), column=self.columns.id) for item in items.values()]
        numbers = self.find(ids)
        own = self.frame.select(name for name in columns if name in self.frame.columns)
        rows = iter(own[numbers[numbers >= 0].tolist()].rows(named=True))
        return {
            place: {**as_group(plain(next(rows))), **item} if number >= 0 else item
            for (place, item), number in zip(items.items(), numbers.tolist(), strict=True)
        }

    def save(self, folder: Path) -> None:
        """Write it into the folder of an export."""
        (folder / "items").mkdir(parents=True, exist_ok=True)
        more = [pl.Series(EVENTS, self.events), *([pl.Series(GONE, self.gone)] if self.gone.any() else [])]
        self.frame.with_columns(more).write_parquet(folder / CATALOGUE_FILE)
        ITEMS.write(folder / ITEMS_FILE, to_json(self.columns))

    @staticmethod
    def load(export: ExportFolder) -> ItemCatalogue:
        """Read it from an export; raises ExportError."""
        path = export.file(ITEMS_FILE)
        columns = from_json(ItemColumns, ITEMS.read(path), where=str(path), error=ExportError)
        frame = read_parquet(export.file(CATALOGUE_FILE))
        if absent := [name for name in (columns.id, *columns.features) if name not in frame.columns]:
            raise damaged(export.path / CATALOGUE_FILE, expected=f"columns {columns.features}", found=f"no {absent}")
        gone = frame[GONE].to_numpy() if GONE in frame.columns else None
        return ItemCatalogue(frame.drop(GONE, strict=False), columns=columns, gone=gone)


def _texts_of_ids(frame: pl.DataFrame, column: str) -> pl.Series:
    """Return the canonical texts of a column of ids; raises ExportError for values that are none."""
    ids = canonical_text(frame[column])
    if ids is None:
        raise ExportError(
            expected=f"ids in column {column!r}",
            found=f"values of the type {frame[column].dtype}",
            where="items or users of the export",
            ways_out=WAYS_OUT,
        )
    return ids


def sample_numbers(total: int, most: int) -> Int64[Tensor, "n"]:
    """Numbers of some of so many, the same ones each time."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:most]


class KnownUsers:
    """The known users of an export: their columns as they were last, and the items that they have had.

    Args:
        frame: one row a user, the most active first.
        id_column: the column of the user's id.
        offsets: (U + 1,) where the items of each user begin.
        items: numbers of items, of each user the latest first.
    """

    def __init__(self, frame: pl.DataFrame, *, id_column: str, offsets: Int64[Tensor, "U+1"], items: Tensor) -> None:
        ids = _texts_of_ids(frame, id_column)
        self.frame = frame_with_decimals(frame)
        self.id_column = id_column
        self.ids = ids.rechunk()
        self.offsets = offsets
        self.items = items
        self._by_id = NumberOfId(self.ids)

    def number(self, user: Mapping[str, object]) -> int:
        """The number of a user; -1 for one who is not known, or a request without id."""
        return int(self._by_id.numbers([user.get(self.id_column)], column=self.id_column)[0])

    def row(self, number: int) -> dict[str, object]:
        """The raw columns of a user, as they were last."""
        return self.frame.row(number, named=True)

    def seen(self, user: Mapping[str, object]) -> Int64[Tensor, "N"]:
        """Numbers of the items that a user has had, the latest first; none for an unknown one."""
        number = self.number(user)
        if number < 0:
            return torch.empty(0, dtype=torch.int64)
        first, last = self.offsets[number : number + 2].tolist()
        return self.items[first:last].long()

    def save(self, folder: Path) -> None:
        """Write it into the folder of an export."""
        (folder / "users").mkdir(parents=True, exist_ok=True)
        self.frame.write_parquet(folder / USERS_FILE)
        save_file({"offsets": self.offsets, "items": self.items}, str(folder / SEEN_FILE), {"id": self.id_column})

    @staticmethod
    def load(export: ExportFolder, *, id_column: str, num_items: int) -> KnownUsers:
        """Read it from an export; raises ExportError where the lists do not fit."""
        frame = read_parquet(export.file(USERS_FILE))
        path = export.file(SEEN_FILE)
        try:
            tensors = load_tensors(path)
            offsets = tensors["offsets"]
            items = tensors["items"]
        except (SafetensorError, KeyError) as error:
            raise damaged(path, expected="lists of items in the format safetensors", found=str(error)[:200]) from error
        fits = offsets.dtype == torch.int64 and offsets.shape == (frame.height + 1,) and items.dim() == 1
        fits = fits and int(offsets[0]) == 0 and int(offsets[-1]) == len(items) and bool((offsets.diff() >= 0).all())
        if not fits or (len(items) and not 0 <= int(items.min()) <= int(items.max()) < num_items):
            raise damaged(path, expected=f"lists of {frame.height:,} users, of {num_items:,} items", found="others")
        if id_column not in frame.columns:
            raise damaged(export.path / USERS_FILE, expected=f"a column {id_column!r}", found=", ".join(frame.columns))
        return KnownUsers(frame, id_column=id_column, offsets=offsets, items=items)


def user_notes(user: Mapping[str, object], *, users: KnownUsers | None) -> tuple[str, ...]:
    """Return notes for somebody who asks for a user: that nobody has the id of the request.

    Args:
        user: columns of the request.
        users: what the export knows, or None: then nothing is said.
    """
    name = None if users is None else user.get(users.id_column)
    if users is None or name is None or users.number(user) >= 0:
        return ()
    return (f"user: {users.id_column} {name!r:.80} is none of the known users; what the request says counts alone",)


def had_before(
    user: Mapping[str, object], *, users: KnownUsers | None, catalogue: ItemCatalogue
) -> list[Int64[Tensor, "_"]]:
    """Numbers of items that somebody has had: as the export knows it, and as a history in the request says.

    Args:
        user: columns of the request.
        users: what the export knows, or None.
        catalogue: whose items are numbered.
    """
    found = [] if users is None else [users.seen(user)]
    told = user.get(HISTORY) if HISTORY_TIMES in user else None
    if isinstance(told, list):
        found.append(catalogue.known([str(each) for each in told if each is not None]))
    return found


def read_parquet(path: Path) -> pl.DataFrame:
    """A frame from a Parquet file of an export; raises ExportError."""
    try:
        return pl.read_parquet(io.BytesIO(path.read_bytes()))
    except (PolarsError, OSError) as error:
        raise damaged(path, expected="a table in Parquet", found=str(error)[:200]) from error
