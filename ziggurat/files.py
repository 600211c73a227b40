"""Files: the only writer of formats. Written whole or not at all, checksummed, versioned; read within bounds.

Every small file of Ziggurat is JSON with three keys of its own beside the content:

    {"format": "ziggurat.plan", "version": 1, "world_size": 4, …, "sha256": "…"}

- *format* tells what it is, so that a plan given where towers were asked for is named as what it is.
- *version* is that of the layout. A `Format` has migrations, version → function: `{0: f}` turns version 0 (files
  without a version: those of the first release, and those that people write by hand) into version 1. A newer version
  than ours is an error that says so.
- *sha256* covers all the rest, whatever its spelling (canonical JSON). A file that people may edit (`Seal.EDITABLE`)
  may go without; where the key stands, it must be right. Files that only Ziggurat writes must have it.

Writing is atomic: temporary file in the same folder → fsync → rename → fsync of the folder. After a crash or a full
disk there is the old file or the new one. `replacing` does the same for large files, `replacing_folder` for folders.

Reading is bounded: a regular file (no pipe, no device: opened without blocking), of at most so many bytes, nested at
most so deep, with numbers that a computer can hold, and without a key that occurs twice. What goes wrong is an error
in four parts of the kind that the caller names, never a traceback, a hang or a machine without memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from ziggurat.errors import DataError, FileError, MissingFileError, ZigguratError

MAX_BYTES = 64 << 20  # of a small file
MAX_DEPTH = 64
MAX_DIGITS = 400  # more than any double needs when it is written out
_BLOCK_BYTES = 1 << 20
_LONG_TOML_KEY = re.compile(r"(?:[\w-]{1,64}[ \t]{0,4}\.[ \t]{0,4}){64}")  # MAX_DEPTH
_WAYS_OUT = ("check the path", "restore the file from a copy")


class Seal(StrEnum):
    """Whether a file must carry its checksum."""

    REQUIRED = "required"  # only Ziggurat writes it
    EDITABLE = "editable"  # people write it, too: without a checksum it is taken as it is


# ---------------------------------------------------------------------------------------------------------- reading


def read_bytes(
    path: str | os.PathLike[str],
    *,
    what: str = "a file",
    max_bytes: int = MAX_BYTES,
    error: type[ZigguratError] = DataError,
    missing: type[ZigguratError] = MissingFileError,
    ways_out: str | tuple[str, ...] = _WAYS_OUT,
) -> bytes:
    """The bytes of a small regular file. Neither a pipe without a writer nor `/dev/zero` can hold it up.

    Args:
        path: the file; symbolic links are followed.
        what: for people: "a plan in JSON".
        max_bytes: a larger file is refused before it is read.
        error: the kind of error.
        missing: that for a file that does not exist.
        ways_out: of that error.

    Raises:
        missing: there is no such file.
        error: it is a folder, pipe or device, too large, or cannot be read.
    """
    where = os.fspath(path)

    def refuse(expected: str, found: str) -> ZigguratError:
        return error(expected=expected, found=found, where=where, ways_out=ways_out)

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise missing(expected=what, found="no such file", where=where, ways_out=ways_out) from None
    except (OSError, ValueError) as problem:  # ValueError: a zero byte in the name
        raise refuse(f"{what}, readable", _text_of(problem)) from problem
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise refuse(f"{what}, in a regular file", _kind_of(status.st_mode))
        if status.st_size > max_bytes:
            raise refuse(f"{what}, of at most {max_bytes:,} bytes", f"{status.st_size:,} bytes")
        blocks, size = [], 0
        while block := os.read(descriptor, _BLOCK_BYTES):
            blocks.append(block)
            size += len(block)
            if size > max_bytes:  # it grows while it is read, or lies in /proc
                raise refuse(f"{what}, of at most {max_bytes:,} bytes", "more")
        return b"".join(blocks)
    except OSError as problem:
        if isinstance(problem, ZigguratError):
            raise
        raise refuse(f"{what}, readable", _text_of(problem)) from problem
    finally:
        os.close(descriptor)


def read_text(path: str | os.PathLike[str], **options: Any) -> str:
    """Read a small file as UTF-8 text, with the limits of `read_bytes`; other bytes are an error of the same kind."""
    content = read_bytes(path, **options)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise options.get("error", DataError)(
            expected=f"{options.get('what', 'a file')}, encoded as UTF-8",
            found=str(problem),
            where=os.fspath(path),
            ways_out=options.get("ways_out", _WAYS_OUT),
        ) from problem


def read_json(path: str | os.PathLike[str], **options: Any) -> Any:
    """The plain data in a JSON file of any layout, within bounds; see `read_bytes` for the options."""
    return parse_json(read_bytes(path, **options), where=os.fspath(path), **_parse_options(options))


def read_toml(path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """The plain data in a TOML file, within bounds; see `read_bytes` for the options."""
    return parse_toml(read_text(path, **options), where=os.fspath(path), **_parse_options(options))


def parse_json(
    content: bytes | bytearray | str,
    *,
    where: str,
    what: str = "valid JSON",
    error: type[ZigguratError] = DataError,
    ways_out: str | tuple[str, ...] = _WAYS_OUT,
) -> Any:
    """JSON text to plain data: no key twice, nothing nested too deep, no number out of reach."""
    try:
        text = content if isinstance(content, str) else bytes(content).decode("utf-8")
        data = json.loads(text, object_pairs_hook=_no_doubles, parse_int=_whole_number, parse_float=_number)
        _check_depth(data)
    except (ValueError, RecursionError) as problem:
        raise error(expected=what, found=_why(problem), where=where, ways_out=ways_out) from None
    return data


def parse_toml(
    text: str,
    *,
    where: str,
    what: str = "valid TOML",
    error: type[ZigguratError] = DataError,
    ways_out: str | tuple[str, ...] = _WAYS_OUT,
) -> dict[str, Any]:
    """TOML text to plain data, within the same bounds as `parse_json`."""
    try:
        if _LONG_TOML_KEY.search(text):  # tomllib takes quadratic time for them
            raise ValueError(f"a key of more than {MAX_DEPTH} parts")
        data = tomllib.loads(text, parse_float=_number)
        _check_depth(data)
    except (ValueError, RecursionError) as problem:
        raise error(expected=what, found=_why(problem), where=where, ways_out=ways_out) from None
    return data


def _parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("max_bytes", "missing")}


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {name!r:.80} occurs twice")
    return result


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _number(text: str) -> float:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    value = float(text)
    if math.isinf(value) and "inf" not in text:  # TOML spells infinity; 1e999 is a slip
        raise ValueError(f"{text:.80} is larger than a double can hold")
    return value


def _check_depth(data: Any) -> None:
    """Without recursion: level by level. Also looks for whole numbers that no field can hold (TOML has no hook)."""
    level, depth = [data], 0
    while level:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif type(item) is int and item.bit_length() > 4 * MAX_DIGITS:
                raise ValueError(f"a number of more than {MAX_DIGITS} digits")
        level, depth = below, depth + 1


def _why(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return f"nested more than {MAX_DEPTH} deep"
    if "integer string conversion" in str(problem):
        return f"a number of more than {MAX_DIGITS} digits"
    return str(problem)[:400]


def _text_of(problem: Exception) -> str:
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem)


def _kind_of(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


# ---------------------------------------------------------------------------------------------------------- writing


def write_bytes(path: str | os.PathLike[str], content: bytes, *, error: type[ZigguratError] = FileError) -> Path:
    """Write a file so that a crash leaves the old one or the new one; makes the folder; returns the path.

    Raises:
        error: the system refuses (no room, no permission, a folder of that name); the old file is left as it was.
    """
    with replacing(path, error=error) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def write_text(path: str | os.PathLike[str], text: str, *, error: type[ZigguratError] = FileError) -> Path:
    """`write_bytes` of UTF-8 text."""
    return write_bytes(path, text.encode("utf-8"), error=error)


@contextmanager
def replacing(path: str | os.PathLike[str], *, error: type[ZigguratError] = FileError) -> Iterator[Path]:
    """A temporary path in the folder of `path`, which takes the place of `path` if the block ends without an error.

    What is written there is flushed to the disk before and after the rename. A device or a pipe (`/dev/stdout`) is
    written to directly, for nothing can be put in its place.
    """
    given = Path(path)
    with _told(given, error):
        target = Path(os.path.realpath(given))  # through a symbolic link, which stays
        direct = target.exists() and not (target.is_file() or target.is_dir())
        target.parent.mkdir(parents=True, exist_ok=True)
    if direct:
        with _told(given, error):
            yield target
        return
    temporary = temporary_beside(target)
    try:
        with _told(given, error):
            yield temporary
            sync(temporary)
            os.replace(temporary, target)
            sync(target.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: str | os.PathLike[str], *, error: type[ZigguratError] = FileError) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends without an error; replaces a folder that was there."""
    folder = Path(path)
    temporary = temporary_beside(folder)
    try:
        with _told(folder, error):
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, folder: Path) -> None:
    """Flush a temporary folder's files to the disk and rename it: after a power cut it is whole or absent."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    if folder.exists():  # a folder with content cannot be renamed over: the old one steps aside first
        old = temporary_beside(folder)
        folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(folder)
    sync(folder.parent)


def temporary_beside(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f".{path.name[:120]}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _told(path: Path, error: type[ZigguratError]) -> Iterator[None]:
    try:
        yield
    except ZigguratError:
        raise
    except OSError as problem:
        raise error(
            expected=f"to write {path.name}",
            found=_text_of(problem),
            where=str(path),
            ways_out=("free space on this disk, or correct the permissions of the folder", "choose another path"),
        ) from problem


def check_version(
    data: dict[str, Any], version: int, *, where: str, what: str, error: type[ZigguratError] = DataError
) -> None:
    """Take `version` out of a TOML file that people write; a newer one than ours is refused, none means ours."""
    found = data.pop("version", version)
    if type(found) is not int or not 1 <= found <= version:
        newer = type(found) is int and found > version
        raise error(
            expected=f"{what} of version {version} or older",
            found=f"version {found!r:.40}" + (": a newer Ziggurat wrote it" if newer else ""),
            where=where,
            ways_out=("update Ziggurat",) if newer else (f"write version = {version}, or nothing",),
        )


# -------------------------------------------------------------------------------------------------------- checksums


def sha256_of(content: bytes | Path) -> str:
    """Hexadecimal SHA-256 of bytes, or of a file, which is read in blocks."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(data: Any) -> str:
    """SHA-256 of plain data, in whatever order its keys stand: the fingerprint of settings, a plan, a manifest."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------- formats

Migration = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of JSON file: its name, its version, and how older versions become this one.

    Args:
        name: stands in the file: "ziggurat.plan". Never changes.
        what: for people: "a plan".
        version: of the layout as it is written now.
        migrations: version → function that turns the content of that version into that of the next. 0 is a file
            without `format`; where migrations lack it, such a file is taken as version 1 (the layout was the same).
        seal: whether a checksum must be there.
        error: the kind of error for a file that cannot be used.
        missing: the kind of error for one that does not exist.
        ways_out: of that error, the likeliest first.
        max_bytes: of a file.
    """

    name: str
    what: str
    version: int = 1
    migrations: Mapping[int, Migration] = field(default_factory=dict)
    seal: Seal = Seal.REQUIRED
    error: type[ZigguratError] = DataError
    missing: type[ZigguratError] = MissingFileError
    ways_out: tuple[str, ...] = _WAYS_OUT
    max_bytes: int = MAX_BYTES

    def write(self, path: str | os.PathLike[str], content: Any, *, error: type[ZigguratError] = FileError) -> Path:
        """Write `content`, a dict or a list of plain data, atomically."""
        return write_bytes(path, self.encode(content), error=error)

    def read(self, path: str | os.PathLike[str]) -> Any:
        """The content, in the present layout, whatever version wrote it.

        Raises:
            MissingFileError: there is no such file.
            self.error: it is damaged, of another format, or of a newer version.
        """
        text = read_bytes(
            path,
            what=self.what,
            max_bytes=self.max_bytes,
            error=self.error,
            missing=self.missing,
            ways_out=self.ways_out,
        )
        return self.decode(text, where=os.fspath(path))

    def encode(self, content: Any) -> bytes:
        """The bytes of a file."""
        body = content if isinstance(content, dict) else {"content": content}
        assert not body.keys() & {"format", "version", "sha256"}, f"{self.name} uses a key of the format itself"
        data = json.loads(json.dumps({"format": self.name, "version": self.version, **body}))  # as it will be read
        data["sha256"] = digest_of(data)
        try:
            return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
        except UnicodeEncodeError:  # a file name that is not UTF-8
            return (json.dumps(data, indent=1) + "\n").encode("utf-8")

    def decode(self, text: bytes | str, *, where: str) -> Any:
        """What `encode` was given, from its bytes or those of an older version."""
        data = parse_json(text, where=where, what=f"{self.what}, in JSON", error=self.error, ways_out=self.ways_out)
        if not (isinstance(data, dict) and isinstance(data.get("format"), str)):
            if 0 not in self.migrations and isinstance(data, dict) and "sha256" in data:
                raise self._refusal(f"{self.what} with its format", "a sha256, and no format", where)
            return self._migrated(data, 0, where)
        if data["format"] != self.name:
            raise self._refusal(f"{self.what} (format {self.name!r})", f"format {data['format']!r:.80}", where)
        version = data.get("version")
        if type(version) is not int or version < 1:
            raise self._refusal("a version, counted from 1", f"version {version!r:.80}", where)
        if version > self.version:
            raise self.error(
                expected=f"{self.what} of version {self.version} or older",
                found=f"version {version}: a newer Ziggurat wrote it",
                where=where,
                ways_out=("update Ziggurat", *self.ways_out),
            )
        self._check_seal(data, where)
        body = {key: value for key, value in data.items() if key not in ("format", "version", "sha256")}
        return self._migrated(body["content"] if body.keys() == {"content"} else body, version, where)

    def _check_seal(self, data: dict[str, Any], where: str) -> None:
        if "sha256" not in data:
            if self.seal is Seal.REQUIRED:
                raise self._refusal(f"{self.what} with its sha256", "none", where)
            return
        found = digest_of({key: value for key, value in data.items() if key != "sha256"})
        if data["sha256"] == found:
            return
        edited = ('if you changed it on purpose, delete its line "sha256"',) if self.seal is Seal.EDITABLE else ()
        raise self.error(
            expected=f"{self.what} as it was written, with sha256 {data['sha256']!r:.80}",
            found=f"other content, with sha256 {found!r}",
            where=where,
            ways_out=(*edited, *self.ways_out),
        )

    def _migrated(self, content: Any, version: int, where: str) -> Any:
        try:
            for step in range(version, self.version):
                content = self.migrations[step](content) if step in self.migrations else content
        except ZigguratError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
            raise self._refusal(
                f"{self.what} of version {version}", f"{type(problem).__name__}: {problem}"[:200], where
            ) from problem
        return content

    def _refusal(self, expected: str, found: str, where: str) -> ZigguratError:
        return self.error(expected=expected, found=found, where=where, ways_out=self.ways_out)
