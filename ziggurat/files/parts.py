"""Finished parts of one result, kept in a folder until they are joined: work that is killed goes on behind the last.

    lists.parquet.parts/
      asked.json              the question that the parts answer: what they were made of, with which settings
      part-000003.parquet     a part, whole or not there
      part-000003.json        its size and SHA-256: with this note it counts
      .lock                   held by the one process that makes them

A part that differs from its note is made anew, and that is said. Parts of another question are thrown away, and that is
said. Only files with our names, in a folder with our `asked.json`, are ever removed: a folder of that name with
anything else in it is somebody else's, and refused.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.errors import FileError, ZigguratError
from ziggurat.files.formats import Format, sha256_of
from ziggurat.files.locking import FileLock
from ziggurat.files.reading import read_bytes
from ziggurat.files.writing import write_bytes, writing_to

_ASKED_NAME = "asked.json"
_OURS = re.compile(  # and what a process that was killed while it wrote one of them has left
    r"asked\.json|part-\d{6}\.(parquet|json)|\.lock|\.(asked\.json|part-\d{6}\.(parquet|json))\.\d+\.[0-9a-f]{8}\.tmp"
)
_MAX_PART_BYTES = 1 << 34


def parts_of(target: Path) -> Path:
    """Return the folder in which the parts of a file are kept until it is whole."""
    return target.with_name(target.name + ".parts")


class PartsFolder:
    """The folder of finished parts; a context manager, held by one process at a time.

    Args:
        folder: of the parts.
        question: that they answer, in plain data.
        what: the result in a word or two for people: "lists".
        asked: format of the question's file.
        note: format of the notes.
        say: called with lines for people.
    """

    def __init__(
        self,
        folder: Path,
        *,
        question: Mapping[str, object],
        what: str,
        asked: Format,
        note: Format,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._question = dict(question)
        self._what = what
        self._asked = asked
        self._note = note
        self._say = say
        self._lock = FileLock(folder / ".lock")
        self.num_parts = 0

    def __enter__(self) -> PartsFolder:
        """Take up the folder, or make it.

        Raises:
            FileError: it is somebody else's, in use, or cannot be made.
        """
        self._refuse_other_content()
        with writing_to(self._folder, FileError):
            if not self._is_taken():
                raise FileError(
                    expected=f"one process at a time that makes these {self._what}",
                    found=f"another one that does: {self._lock.holder()}",
                    where=str(self._folder),
                    ways_out=("wait until it ends, or end it", "choose another file: --out FILE"),
                )
        try:
            self._take_up()
        # After Ctrl-C, too: the process may live on, and the folder must not stay locked.
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._lock.release()

    def _is_taken(self) -> bool:
        """Make the folder, and take its lock unless another process has it."""
        while True:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self.no_place(str(error)) from error
            try:
                return self._lock.take()
            except FileNotFoundError:
                # The process that joined the parts before has removed the folder in this moment: made again.
                if self._folder.exists():
                    raise

    def check_place(self) -> None:
        """Refuse a folder in which nothing can be written, before any work is done.

        Raises:
            FileError: it, or the nearest folder above it that is there, is none or may not be written to.
        """
        place = next(each for each in (self._folder, *self._folder.parents) if each.exists())
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise self.no_place("a file" if not place.is_dir() else f"no permission to write in {place}")

    def no_place(self, found: str) -> FileError:
        """Return the error for a folder that cannot be written to."""
        return FileError(
            expected=f"a folder in which {self._what} can be written",
            found=found,
            where=str(self._folder.parent),
            ways_out=("choose another file: --out FILE", "correct the permissions of the folder"),
        )

    def read(self, number: int) -> bytes | None:
        """Return a part that is there as it was written, else None; counts it as one of the result."""
        self.num_parts = max(self.num_parts, number + 1)
        path = self._path(number)
        if not path.exists() and not self._note_of(number).exists():
            return None
        try:
            return self.checked(number)
        except ZigguratError as error:
            self._say(f"part {number} is damaged, and made anew: {error.found}")
            return None

    def write(self, number: int, content: bytes) -> None:
        """Keep a part, then its note, with which it counts.

        Args:
            number: of the part, from 0.
            content: in memory, so that the digest is of what was meant, whatever the disk makes of it.
        """
        write_bytes(self._path(number), content)
        self._note.write(self._note_of(number), {"bytes": len(content), "digest": sha256_of(content)})

    def checked(self, number: int) -> bytes:
        """Return a part, compared with its note.

        Raises:
            ZigguratError: it is not there, or differs.
        """
        note = self._note.read(self._note_of(number))
        path = self._path(number)
        content = read_bytes(path, what=f"a part of {self._what}", max_bytes=_MAX_PART_BYTES)
        if sha256_of(content) != note["digest"]:
            raise FileError(
                expected=f"a part of {self._what} with SHA-256 {note['digest']}",
                found=f"{len(content):,} bytes with SHA-256 {sha256_of(content)}",
                where=str(path),
                ways_out=f"give the command again, which makes it anew; or delete it: rm {pasted(path)}",
            )
        # The bytes that were compared, and not the path, which may change between two reads.
        return content

    def remove(self) -> None:
        """Remove what is ours, and the folder if nothing else is in it."""
        self._remove_files()
        self._lock.release()
        with contextlib.suppress(OSError):  # what somebody else put there stays
            self._folder.rmdir()

    def _take_up(self) -> None:
        asked = self._folder / _ASKED_NAME
        if asked.exists():
            if self._asked.read(asked) == self._question:
                self._say(f"going on with the parts in {self._folder}")
                return
            self._say(f"the parts in {self._folder} answer another question, and are made anew")
            self._remove_files()
        self._asked.write(asked, self._question)

    def _remove_files(self) -> None:
        for path in self._folder.iterdir():
            # The lock is still held, and another process would take a new file of its name for a free one.
            if _OURS.fullmatch(path.name) and path.name != self._lock.path.name:
                path.unlink(missing_ok=True)

    def _refuse_other_content(self) -> None:
        if not self._folder.exists():
            return
        foreign: list[str] = []
        if self._folder.is_dir():
            foreign = sorted(path.name for path in self._folder.iterdir() if not _OURS.fullmatch(path.name))
        problem = ""
        if not self._folder.is_dir():
            problem = "a file"
        elif foreign:
            problem = f"a folder with something else in it: {', '.join(foreign[:3])}"
        elif any(self._folder.glob("part-*")):
            try:
                self._asked.read(self._folder / _ASKED_NAME)
            except ZigguratError as error:
                problem = f"parts that do not say what they answer: {error.found}"
        if problem:
            raise FileError(
                expected=f"no folder of this name, or one with parts of {self._what} that were begun",
                found=problem,
                where=str(self._folder),
                ways_out=("choose another file: --out FILE", "give that folder another name"),
            )

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.parquet"

    def _note_of(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.json"
