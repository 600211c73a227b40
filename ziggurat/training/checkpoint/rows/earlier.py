"""What a checkpoint takes from the one before it: files with rows, by hard link. It writes what was changed since.

    step 100   rows-100                                  all rows that were ever changed
    step 200   rows-100 ── link    rows-200              those that were changed since
    step 300   rows-100 ── link    rows-200 ── link    rows-300
    step 400                                 rows-400    all again: what is overridden was half of what lives

Each folder is complete by itself: a link is the file, under one more name. Deleting the folder of step 100 takes that
name away and nothing else; a copy of a folder is a copy of its files.

The files of one step are a *generation*. A generation is kept or left as a whole, whatever ranks wrote it, so ranks and
placements may be others than those before. `num_kept` decides how many: all, unless more than a third of the bytes
would be overridden, or there are too many. Rows of a generation that is left are written again, as they are now: their
ids are read, their numbers come from the tables. So merging takes a mark for each row and no more memory.

The price: checkpoints that share a file share its damage. So a file is read, and its SHA-256 compared, each time
that it is linked: a damaged one is not taken on, all rows are written again from the tables, and older checkpoints are
deleted only behind that. A load checks every file, too; `--training.checkpoint.rows all` writes checkpoints that share
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TypedDict

import numpy as np

from ziggurat.config import to_json
from ziggurat.embeddings.storage import TablePart
from ziggurat.training.checkpoint import retention
from ziggurat.training.checkpoint.errors import DamagedCheckpointError, writing
from ziggurat.training.checkpoint.files import link
from ziggurat.training.checkpoint.manifest import Manifest, rows_file_step
from ziggurat.training.checkpoint.rows.sparse import (
    RowsToSave,
    SparseTensor,
    entries_from_json,
    entry_of,
    rows_to_save,
    table_places,
)
from ziggurat.training.checkpoint.storage import CheckpointReader, Taken

_log = logging.getLogger(__name__)
MAX_GENERATIONS = 32
MAX_OVERRIDDEN = 0.5  # bytes of rows that are overridden, beside each byte of one that is not


class SavedRows(StrEnum):
    """The rows of tables on a disk that a checkpoint writes."""

    CHANGED = "changed"  # since the checkpoint before; the files of that one are linked
    ALL = "all"  # that were ever changed; no checkpoint shares a file with another


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The rows that a checkpoint takes from an earlier one.

    Args:
        step: of the earlier checkpoint; -1: it takes nothing, and writes all rows that were ever changed.
        kept: generations whose files are linked.
        merged: generations whose rows are written again.
        why: nothing is taken; "" where there is no earlier checkpoint, or merging is what was decided.
    """

    step: int = -1
    kept: tuple[int, ...] = field(default=())
    merged: tuple[int, ...] = field(default=())
    why: str = ""


class Offer(TypedDict):
    """Rows that a rank has, as JSON for the coordinator.

    Args:
        entries: the manifest's entries of its tables, by name.
        last: names of the checkpoints that its rows were last compared with.
        changed_bytes: of rows that were ever changed.
        unsaved_bytes: of rows that were changed since the last checkpoint.
    """

    entries: dict[str, object]
    last: list[str]
    changed_bytes: int
    unsaved_bytes: int


class RowsOfRank:
    """The rows that one rank saves, from the offer to the checkpoint that has its name.

    Args:
        sparse: tables on a disk, by name.
        step: of the checkpoint.
        rank: of this process.
    """

    def __init__(self, sparse: Mapping[str, TablePart], *, step: int, rank: int) -> None:
        self._sparse = sparse
        self._places = table_places(sparse, step=step, rank=rank)
        self._distinct = tuple(dict.fromkeys(self._places.values()))

    def offer(self) -> Offer:
        """Return what the coordinator has to know of this rank's rows."""
        changed = unsaved = 0
        for place in self._distinct:
            row_bytes = 8 + 4 * place.storage.disk.width
            changed += row_bytes * len(place.storage.changed_rows(place.rows))
            unsaved += row_bytes * len(place.storage.unsaved_rows(place.rows))
        return {
            "entries": {name: to_json(entry_of(part)) for name, part in self._sparse.items()},
            "last": sorted({place.storage.disk.unsaved.last(place.rows) for place in self._distinct}),
            "changed_bytes": changed,
            "unsaved_bytes": unsaved,
        }

    def to_save(self, earlier: Earlier, *, folder: Path) -> RowsToSave:
        """Return this rank's rows to write, with those of merged generations, which count as changed from now on."""
        if earlier.kept and earlier.merged:
            reader = CheckpointReader(retention.step_folder(folder, earlier.step), step=earlier.step)
            for stored in _stored(reader.manifest, earlier.merged):
                self._change(reader, stored)
        return rows_to_save(self._sparse, self._places, whole=not earlier.kept)

    def saved(self, name: str) -> None:
        """The checkpoint has its own name on the disk."""
        for place in self._distinct:
            place.storage.saved(place.rows, name=name)

    def _change(self, reader: CheckpointReader, stored: str) -> None:
        names = {name for name, entry in reader.manifest.sparse.items() if stored in {p.stored for p in entry.parts}}
        mine = dict.fromkeys(place for name, place in self._places.items() if name in names)
        for ids in reader.ids_of(stored) if mine else ():
            for place in mine:
                rows = np.unique(ids.numpy()) - place.shift
                place.storage.disk.unsaved.change(rows[(rows >= place.rows.start) & (rows < place.rows.stop)])


def name_of(reader: CheckpointReader) -> str:
    """Return the name that tables keep of a checkpoint: its step, and the hash of its manifest."""
    return f"{reader.manifest.step}:{reader.manifest_sha256()}"


def num_kept(generations: Sequence[int], *, new: int, live: int) -> int:
    """Return how many generations a checkpoint keeps, from the first on.

    Args:
        generations: bytes of the rows of each, oldest first.
        new: bytes of the rows that were changed since.
        live: bytes of all rows that were ever changed, each once.
    """
    if sum(generations) + new > (1 + MAX_OVERRIDDEN) * live:
        return 0
    if len(generations) < MAX_GENERATIONS:
        return len(generations)
    behind = new
    found = len(generations)
    for index in reversed(range(len(generations))):  # the first that is at most twice what comes behind it
        found = index if generations[index] <= 2 * behind else found
        behind += generations[index]
    return found


def choose(folder: Path, offers: Sequence[Offer], *, step: int, rows: SavedRows) -> Earlier:
    """Decide what the checkpoint of `step` takes from the last one, and link it into its partial folder.

    Args:
        folder: of all checkpoints.
        offers: of all ranks that have tables on a disk.
        step: of the checkpoint.
        rows: what was asked for.

    Raises:
        CheckpointError: the system refuses to link, and would refuse to write.
    """
    last = {name for offer in offers for name in offer["last"]}
    if rows is SavedRows.ALL or len(last) != 1 or last == {""}:
        return Earlier()
    (name,) = last
    base = int(name.split(":")[0])
    reader = CheckpointReader(retention.step_folder(folder, base), step=base)
    into = retention.partial_folder(retention.step_folder(folder, step))
    try:
        found = _taken_from(reader, name=name, offers=offers, into=into, step=step)
    except DamagedCheckpointError as error:
        found = Earlier(why=f"{error.where}: expected {error.expected}, found {error.found}")
    if found.why:
        message = "checkpoint of step %d holds all rows of tables on a disk again, and shares none: %s"
        _log.warning(message, step, found.why)
    return found


def _taken_from(reader: CheckpointReader, *, name: str, offers: Sequence[Offer], into: Path, step: int) -> Earlier:
    """Link and return what is taken from a checkpoint, or return why nothing is taken."""
    why = _why_not(reader, name=name, offers=offers)
    if why:
        return Earlier(why=why)
    found = _kept(reader, offers=offers, step=step)
    if not found.kept:
        return found
    files = _files(reader.manifest, found.kept)
    reader.verify((*files, *_files(reader.manifest, found.merged)))
    why = _linked(files, reader=reader, into=into)
    return Earlier(why=why) if why else found


def with_earlier(
    sparse: Mapping[str, SparseTensor], manifest: Manifest, kept: Sequence[int]
) -> dict[str, SparseTensor]:
    """Return the manifest's entries of names: the parts that were kept, and those of this checkpoint over them."""
    stored = set(_stored(manifest, kept))
    return {
        name: replace(entry, parts=(*(p for p in manifest.sparse[name].parts if p.stored in stored), *entry.parts))
        for name, entry in sparse.items()
    }


def taken(manifest: Manifest, kept: Sequence[int]) -> Taken:
    """Return the tensors and files that a manifest has of generations."""
    names = {f"{stored}.{what}" for stored in _stored(manifest, kept) for what in ("ids", "numbers")}
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name in names}
    return Taken(tensors=tensors, files={name: manifest.files[name] for name in _files(manifest, kept)})


def _why_not(reader: CheckpointReader, *, name: str, offers: Sequence[Offer]) -> str:
    """Say why nothing can be taken from a checkpoint."""
    if not reader.folder.is_dir():
        return f"{reader.folder} is gone"
    if name_of(reader) != name:
        return f"{reader.folder} is another checkpoint than the one that the rows were compared with"
    manifest = reader.manifest
    now = {name: entry for offer in offers for name, entry in entries_from_json(offer["entries"]).items()}
    before = {name: replace(entry, parts=()) for name, entry in manifest.sparse.items()}
    if now != before:
        others = sorted(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
        return f"tables on the disk are others than in {reader.folder}: {', '.join(others[:4])}"
    where = {chunk.file for stored in _stored(manifest, None) for chunk in manifest.tensors[f"{stored}.ids"].chunks}
    if any(rows_file_step(file) is None for file in where):
        return f"an older release wrote {reader.folder}, with rows and other tensors in one file"
    return ""


def _kept(reader: CheckpointReader, *, offers: Sequence[Offer], step: int) -> Earlier:
    manifest = reader.manifest
    num_bytes = dict[int, int]()
    for stored in _stored(manifest, None):
        for what in ("ids", "numbers"):
            for chunk in manifest.tensors[f"{stored}.{what}"].chunks:
                generation = rows_file_step(chunk.file)
                assert generation is not None
                num_bytes[generation] = num_bytes.get(generation, 0) + chunk.num_bytes
    generations = sorted(num_bytes)
    new, live = (sum(offer[what] for offer in offers) for what in ("unsaved_bytes", "changed_bytes"))
    kept = num_kept([num_bytes[each] for each in generations], new=new, live=live)
    kept = min(kept, sum(each < step for each in generations))  # files of this step are written anew
    return Earlier(step=manifest.step, kept=tuple(generations[:kept]), merged=tuple(generations[kept:]))


def _stored(manifest: Manifest, generations: Sequence[int] | None) -> list[str]:
    """Return the prefixes of the names of the tensors of some generations; None for all."""
    found = dict.fromkeys(part.stored for entry in manifest.sparse.values() for part in entry.parts)
    if generations is None:
        return list(found)
    return [it for it in found if rows_file_step(manifest.tensors[f"{it}.ids"].chunks[0].file) in generations]


def _files(manifest: Manifest, generations: Sequence[int]) -> list[str]:
    return [name for name in manifest.files if rows_file_step(name) in generations]


def _linked(files: Sequence[str], *, reader: CheckpointReader, into: Path) -> str:
    """Give verified files of a checkpoint one more name each; why that is not possible, with none of them left."""
    for number, name in enumerate(files):
        with writing(into / name):
            why = link(reader.folder / name, into / name)
        if why:
            for other in files[:number]:
                (into / other).unlink()
            return f"no hard links and no shared extents (reflink) in {into.parent}: {why}"
    return ""
