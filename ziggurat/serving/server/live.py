"""Items that change while a server runs: a journal beside the export, which every worker follows.

    POST /admin/items ─► worker: try, write exports/films.changes/VERSION/00000003.json, apply ─► {"version": "…+3", …}
                                         │
    other workers, spares, later ones ◄──┘  read what is new twice a second, and when they load

A change is whole in the journal before anybody applies it, and its number is taken by one worker alone (a link that
must not exist), so every process has the same changes in the same order, after any crash. For up to half a second two
workers may answer from two states; each answer says from which, by the number behind its version. A new version of the
export begins with a journal of its own, which is empty.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from ziggurat.errors import ExportError
from ziggurat.files import Format
from ziggurat.serving.answering.live_items import ChangedItems, ItemChanges, change_items, folded
from ziggurat.serving.server.reading import refused

FOLLOW_S = 0.5
_MOST_CHANGES = 10_000
_WAYS = ("remove the file, and with it this change and those behind it", "export again")
CHANGE = Format(name="ziggurat.item_change", what="a change of items", error=ExportError, ways_out=_WAYS)


class LiveItems:
    """A recommender whose items follow a journal.

    Args:
        recommender: with `change_items`.
        folder: of the journal; made when the first change comes.
    """

    def __init__(self, recommender: Any, *, folder: Path) -> None:
        self.recommender, self.folder = recommender, folder
        self._lock = threading.Lock()

    @staticmethod
    def of(answerer: Any) -> LiveItems | None:
        """The live items of an answerer that can change them; None for another one."""
        if not hasattr(answerer, "change_items") or answerer.chain.catalogue is None:
            return None
        path: Path = answerer.export.path
        return LiveItems(answerer, folder=path.with_name(f"{path.name}.changes") / answerer.export.version)

    def follow(self) -> int:
        """Apply what is new in the journal; returns the number of changes in all.

        Raises:
            ExportError: a file of the journal is damaged; names it.
        """
        with self._lock:
            return self._follow()

    def change(self, changes: ItemChanges) -> ChangedItems:
        """Write a change into the journal and apply it.

        Raises:
            RequestError: it cannot be done; nothing is then.
            RefusedRequestError: the journal is full, or cannot be written.
        """
        with self._lock:
            while True:
                number = self._follow() + 1
                change_items(self.recommender.chain, changes)  # what cannot be applied must not be written
                if number > _MOST_CHANGES:
                    raise _unwritable(self.folder, f"{_MOST_CHANGES:,} changes already", "export again")
                if self._write(changes, number):
                    return self.recommender.change_items(changes, number=number)

    def _follow(self) -> int:
        there: int = self.recommender.num_changes
        new = []
        while (path := self._path(there + 1 + len(new))).exists():
            new.append(ItemChanges.from_json(CHANGE.read(path), where=str(path)))
        if new:
            id_column = self.recommender.chain.catalogue.columns.id
            self.recommender.change_items(folded(new, id_column=id_column), number=there + len(new))
        return there + len(new)

    def _write(self, changes: ItemChanges, number: int) -> bool:
        """Whether the number was still free."""
        mine = self.folder / f"new-{os.getpid()}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            CHANGE.write(mine, changes.to_json())
            try:
                os.link(mine, self._path(number))
            except FileExistsError:
                return False
            finally:
                mine.unlink()
            descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise _unwritable(self.folder, problem.strerror or str(problem), "let the server write there") from problem
        return True

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.json"


def _unwritable(folder: Path, found: str, way: str) -> Exception:
    return refused(
        409, expected="a journal that takes a change", found=found, where=str(folder), ways_out=(way, "export again")
    )
