r"""Pictures on the disk, and the name that each has in a table.

    images embed shop/            shop/shoes/17.jpg  ─►  "shoes/17.jpg"     relative to the folder that was named
    images embed a.jpg new/*.png  new/b.png          ─►  "b.png"            the file's own name

Every file of a folder is taken for a picture, whatever its name ends in: one that is none is refused with its reason
when it is read, so nothing is left out without a word. For the same reason a folder behind a link, which is not
followed (it may lead back up), and a folder that cannot be listed stand among the pictures. Left out are the files that
the command itself writes, where they lie in the folder (given again, it would take them for pictures), and those that a
killed process of ours left half written.
Names come in the order of their texts, so that the same folder gives the same rows. Bytes of a name that are no UTF-8
are written out (`\xff`). Memory: names and paths of all files.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from ziggurat.errors import DataError, MissingFileError
from ziggurat.files import is_temporary


@dataclass(frozen=True)
class FoundPicture:
    """A file that should hold a picture.

    Args:
        name: its id in tables.
        path: of the file.
    """

    name: str
    path: Path


def find_pictures(places: Sequence[str | Path], *, without: Sequence[str | Path] = ()) -> list[FoundPicture]:
    """Return the files of folders, and files that were named, in the order of their names.

    Args:
        places: folders, files or globs.
        without: files and folders below the places that hold no pictures, since the command itself writes them.

    Raises:
        MissingFileError: a place is not there, or a folder has no file.
        DataError: two files would have one name.
    """
    found: dict[str, Path] = {}
    own = {os.path.realpath(each) for each in without}
    for picture in (each for place in places for each in _of_place(place, own)):
        earlier = found.setdefault(picture.name, picture.path)
        if earlier.absolute() != picture.path.absolute():
            raise DataError(
                expected="a name of its own for each picture",
                found=f"{picture.name!r} twice: {earlier} and {picture.path}",
                where=", ".join(map(str, places)),
                ways_out=("name the folder above both", "embed them one after the other, into two files"),
            )
    return [FoundPicture(name, found[name]) for name in sorted(found)]


def _of_place(place: str | Path, own: Set[str]) -> Iterator[FoundPicture]:
    text = os.fspath(place)
    is_pattern = glob.has_magic(text) and not os.path.lexists(text)
    paths = [Path(each) for each in sorted(glob.glob(text, recursive=True))] if is_pattern else [Path(text)]
    num_files = 0
    for path in paths:
        if path.is_dir():
            for each in _files_below(path, own):
                num_files += 1
                yield FoundPicture(_name(each.relative_to(path)), each)
        elif os.path.lexists(path) and os.path.realpath(path) not in own:
            num_files += 1
            yield FoundPicture(_name(Path(path.name)), path)
    if not num_files:
        raise MissingFileError(
            expected="pictures: a folder with files, files, or a glob",
            found="no file",
            where=text,
            ways_out="correct the path, or put pictures there",
        )


def _files_below(folder: Path, own: Set[str]) -> Iterator[Path]:
    unlisted: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=lambda error: unlisted.append(Path(error.filename))):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        here = os.path.realpath(root)
        folders[:] = sorted(name for name in folders if name not in links and os.path.join(here, name) not in own)
        for name in (*links, *names):
            if os.path.join(here, name) not in own and not is_temporary(name):
                yield Path(root, name)
    yield from unlisted


def _name(path: Path) -> str:
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")
