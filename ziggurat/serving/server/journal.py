"""The files of changed items: a journal that is folded into merged items, so that it does not grow without bound.

    films.changes/VERSION/
      00000124.json        a change, whole
      00000125.json        the next one
      merged-00000123/     the items after 123 changes (`answering/merged_items.py`); 1 to 123 are gone
      lock                 held by who writes a change, or deletes files
      merging              held by who merges, so that one process does

After a crash at any point there are the changes before the one that was being written, or that one, too; and the items
that were merged last, or those that were being merged, too. What a dead process left behind is deleted with the next
merge. Locks are the kernel's: they end with the process that holds them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ziggurat.errors import ExportError, MissingFileError
from ziggurat.files import Format, sync
from ziggurat.serving.answering.live_items import ItemChanges

_WAYS = ("remove the file, and with it this change and those behind it", "export again")
CHANGE = Format(name="ziggurat.item_change", what="a change of items", error=ExportError, ways_out=_WAYS)
_CHANGE_NAME = re.compile(r"(\d{8,})\.json")
_MERGED_NAME = re.compile(r"merged-(\d{8,})")
_LEFT_BEHIND = re.compile(r"\..*\.tmp|new-\d+\.json")


class Journal:
    """The changes of one version of an export, on disk.

    Args:
        folder: made when the first change comes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after(self, number: int) -> list[ItemChanges]:
        """The changes behind a number, up to the first that is not there.

        Raises:
            ExportError: a file is damaged; names it.
        """
        found: list[ItemChanges] = []
        while (path := self.path(number + 1 + len(found))).exists():
            try:
                found.append(ItemChanges.from_json(CHANGE.read(path), where=str(path)))
            except MissingFileError:  # merged meanwhile
                break
        return found

    def write(self, changes: ItemChanges, number: int) -> bool:
        """Write a change; whether its number was still free. Under `locked`."""
        mine = self.folder / f"new-{os.getpid()}.json"
        CHANGE.write(mine, changes.to_json())
        try:
            os.link(mine, self.path(number))
        except FileExistsError:
            return False
        finally:
            mine.unlink()
        sync(self.folder)
        return True

    def merged(self) -> int:
        """How many changes are in the latest merged items; 0 where none are."""
        return max((int(found[1]) for name in self._names() if (found := _MERGED_NAME.fullmatch(name))), default=0)

    def forget(self, number: int) -> None:
        """Delete what merged items have made superfluous, and what dead processes left. Under `locked` and `alone`."""
        for name in sorted(self._names()):
            change, merged = _CHANGE_NAME.fullmatch(name), _MERGED_NAME.fullmatch(name)
            path = self.folder / name
            if (change and int(change[1]) <= number) or _LEFT_BEHIND.fullmatch(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            elif merged and int(merged[1]) < number:
                shutil.rmtree(path, ignore_errors=True)
        sync(self.folder)

    def num_bytes(self) -> int:
        """Bytes of the changes that are not merged."""
        sizes = 0
        for name in self._names():
            if _CHANGE_NAME.fullmatch(name):
                try:
                    sizes += (self.folder / name).stat().st_size
                except FileNotFoundError:
                    continue
        return sizes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes or deletes meanwhile; waits for it. Makes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._held("lock", fcntl.LOCK_EX):
            yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether nobody else merges, and will not meanwhile; does not wait."""
        with self._held("merging", fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine:
            yield is_mine

    @contextmanager
    def _held(self, name: str, how: int) -> Iterator[bool]:
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, how)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def path(self, number: int) -> Path:
        """The file of a change."""
        return self.folder / f"{number:08d}.json"

    def merged_path(self, number: int) -> Path:
        """The folder of merged items."""
        return self.folder / f"merged-{number:08d}"

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
