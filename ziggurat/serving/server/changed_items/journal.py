"""The files of changed items: a journal that is folded into merged items, so that it does not grow without bound.

    films.changes/VERSION/
      00000124.json        a change, whole
      00000125.json        the next one
      merged-00000123/     the items after 123 changes (`answering/merged_items.py`); 1 to 123 are gone
      lock                 locked by a process that writes a change, or deletes files
      merging              locked by the one process that merges

After a crash at any point there are the changes before the one that was being written, or that one, too; and the items
that were merged last, or those that were being merged, too. What a dead process left behind is deleted with the next
merge. Locks are the kernel's: they end with the process that holds them.

Changes have numbers without a gap, and each builds on those before it. A change that is missing and not merged, while
later ones are there or a running server has made it, is damage: no crash leaves that.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ziggurat.errors import ExportError, MissingFileError, ZigguratError
from ziggurat.files import Format, sync
from ziggurat.serving.answering.live_items import ItemChanges

_WAYS = ("put the file back from a copy",)
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
        """The changes behind a number, up to the last that is there or the first that is merged already.

        Args:
            number: of the last change that the caller has made.

        Raises:
            ExportError: a file is damaged, or missing before others; names it.
        """
        found: list[ItemChanges] = []
        while (path := self.path(number + 1 + len(found))).exists():
            try:
                found.append(ItemChanges.from_json(CHANGE.read(path), where=str(path)))
            except MissingFileError:  # merged meanwhile
                break
            except ZigguratError as error:
                ways = (*error.ways_out, *self._ways_back(number + 1 + len(found)))
                raise ExportError(
                    expected=error.expected, found=error.found, where=error.where, ways_out=ways
                ) from None
        self._check_whole(number, last=number + len(found))
        return found

    def _check_whole(self, number: int, *, last: int) -> None:
        """Raise ExportError where change `number`, or one before changes that are there, is neither there nor merged.

        Args:
            number: of a change that was made; 0 for none.
            last: of the changes behind it, the last that is there.
        """
        if number and self._is_lost(number):
            raise ExportError(
                expected=f"change {number:,} of items, which this server has made",
                found="no such file, and no merged items with it",
                where=str(self.path(number)),
                ways_out=(*_WAYS, "start the server again: it makes the changes that are there"),
            )
        later = [each for each in self._numbers() if each > last + 1]
        missing = last + 1
        if later and self._is_lost(missing):
            behind = f"change {later[0]:,}" if len(later) == 1 else f"changes {later[0]:,} to {later[-1]:,}"
            raise ExportError(
                expected=f"change {missing:,} of items before {behind}, or merged items with it",
                found="no such file: changes that build on it cannot be made",
                where=str(self.path(missing)),
                ways_out=(*_WAYS, *self._ways_back(missing)),
            )

    def _is_lost(self, number: int) -> bool:
        """Return whether a change is neither there nor merged; look twice, since a listing may miss what is renamed."""
        return not self.path(number).exists() and all(self.merged() < number for _ in range(2))

    def _ways_back(self, number: int) -> tuple[str, ...]:
        """List ways back to the state before a change: all later ones, which build on it, go with it."""
        names = [self.path(each).stem for each in self._numbers() if each >= number]
        which = names[0] if len(names) == 1 else f"{{{names[0]}..{names[-1]}}}" if names else ""
        remove = f"rm -f {shlex.quote(str(self.folder))}/{which}.json"
        back = f"stop the server and, in bash, `{remove}`: the items are then as they were before change {number:,}"
        return (*([back] if names else []), "export again")

    def write(self, changes: ItemChanges, number: int) -> bool:
        """Write a change; whether its number was still free. Under `locked`."""
        # Beside its place, since a link does not lead to another file system.
        temporary = self.folder / f"new-{os.getpid()}.json"
        CHANGE.write(temporary, changes.to_json())
        try:
            # A link fails where the number is taken; a rename would replace the change that has it.
            os.link(temporary, self.path(number))
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        # The name must be on the disk before anybody applies the change.
        sync(self.folder)
        return True

    def merged(self) -> int:
        """Count the changes in the latest merged items; 0 where none are merged."""
        return max((int(found[1]) for name in self._names() if (found := _MERGED_NAME.fullmatch(name))), default=0)

    def forget(self, number: int) -> None:
        """Delete what merged items have made superfluous, and what dead processes left. Under `locked` and `alone`."""
        for name in sorted(self._names()):
            change = _CHANGE_NAME.fullmatch(name)
            merged = _MERGED_NAME.fullmatch(name)
            path = self.folder / name
            if (change and int(change[1]) <= number) or _LEFT_BEHIND.fullmatch(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            elif merged and int(merged[1]) < number:
                shutil.rmtree(path, ignore_errors=True)
        sync(self.folder)

    def num_bytes(self) -> int:
        """Bytes of the changes that are not merged."""
        sizes = 0
        for number in self._numbers():
            try:
                sizes += self.path(number).stat().st_size
            except FileNotFoundError:  # merged meanwhile
                continue
        return sizes

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the journal against writes and deletions by others; waits for the lock, and makes the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked("lock", fcntl.LOCK_EX):
            yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Lock the journal against merges by others, without waiting; yields whether the lock was free."""
        with self._locked("merging", fcntl.LOCK_EX | fcntl.LOCK_NB) as is_locked:
            yield is_locked

    @contextmanager
    def _locked(self, name: str, how: int) -> Iterator[bool]:
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, how)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            # It frees the lock, too; a killed process frees it in the same way.
            os.close(descriptor)

    def path(self, number: int) -> Path:
        """The file of a change."""
        return self.folder / f"{number:08d}.json"

    def merged_path(self, number: int) -> Path:
        """The folder of merged items."""
        return self.folder / f"merged-{number:08d}"

    def _numbers(self) -> list[int]:
        """Return the numbers of the changes that are there, in order."""
        return sorted(int(found[1]) for name in self._names() if (found := _CHANGE_NAME.fullmatch(name)))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
