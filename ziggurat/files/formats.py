"""Formats: JSON files with a name, a version, migrations from older versions, and a checksum.

    {"format": "ziggurat.plan", "version": 1, "world_size": 4, …, "sha256": "…"}

See the package's docstring for what each key means.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from ziggurat.errors import DataError, FileError, MissingFileError, ZigguratError
from ziggurat.files.reading import MAX_BYTES, WAYS_OUT, parse_json, read_bytes
from ziggurat.files.writing import write_bytes
from ziggurat.plain import JSON

# The content of a file, in the layout of one version: each reader knows its own, and no type holds them all.
Content: TypeAlias = Any
Migration = Callable[[Content], Content]


class Seal(StrEnum):
    """Choices of whether a file must carry its checksum."""

    REQUIRED = "required"  # only Ziggurat writes it
    EDITABLE = "editable"  # people write it, too: without a checksum it is taken as it is


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of JSON file: its name, its version, and how older versions become this one.

    Args:
        name: stands in the file: "ziggurat.plan". Never changes.
        what: for people: "a plan".
        version: of the layout as it is written now.
        newest: a later layout that is read too, of the few files that an earlier Ziggurat would misread (`write` with
            `version`); all others stay readable by it. 0: none.
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
    newest: int = 0
    migrations: Mapping[int, Migration] = field(default_factory=dict)
    seal: Seal = Seal.REQUIRED
    error: type[ZigguratError] = DataError
    missing: type[ZigguratError] = MissingFileError
    ways_out: tuple[str, ...] = WAYS_OUT
    max_bytes: int = MAX_BYTES

    def write(
        self,
        path: str | os.PathLike[str],
        content: object,
        *,
        error: type[ZigguratError] = FileError,
        version: int | None = None,
    ) -> Path:
        """Write `content`, a dict or a list of plain data, atomically; `version`: see `newest`."""
        return write_bytes(path, self.encode(content, version=version), error=error)

    def read(self, path: str | os.PathLike[str]) -> Content:
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

    def version_of(self, path: str | os.PathLike[str]) -> int:
        """Return the version that a file which `read` takes was written in; 0 where it does not say."""
        data = json.loads(Path(path).read_bytes())
        return int(data.get("version", 0)) if isinstance(data, dict) else 0

    def encode(self, content: object, *, version: int | None = None) -> bytes:
        """The bytes of a file."""
        version = self.version if version is None else version
        body = content if isinstance(content, dict) else {"content": content}
        assert not body.keys() & {"format", "version", "sha256"}, f"{self.name} uses a key of the format itself"
        data = json.loads(json.dumps({"format": self.name, "version": version, **body}))  # as it will be read
        data["sha256"] = digest_of(data)
        try:
            return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
        except UnicodeEncodeError:  # a file name that is not UTF-8
            return (json.dumps(data, indent=1) + "\n").encode("utf-8")

    def decode(self, text: bytes | str, *, where: str) -> Content:
        """Decode what `encode` was given, from its bytes or those of an older version."""
        data = parse_json(text, where=where, what=f"{self.what}, in JSON", error=self.error, ways_out=self.ways_out)
        if not (isinstance(data, dict) and isinstance(data.get("format"), str)):
            # A file with our checksum had our format, too, unless version 0 wrote it: without one it is damaged.
            if 0 not in self.migrations and isinstance(data, dict) and "sha256" in data:
                raise self._refusal(f"{self.what} with its format", "a sha256, and no format", where)
            return self._migrated(data, 0, where)
        if data["format"] != self.name:
            raise self._refusal(f"{self.what} (format {self.name!r})", f"format {data['format']!r:.80}", where)
        version = data.get("version")
        # Not isinstance: to Python, true is an int.
        if type(version) is not int or version < 1:
            raise self._refusal("a version, counted from 1", f"version {version!r:.80}", where)
        newest = max(self.version, self.newest)
        if version > newest:
            raise self.error(
                expected=f"{self.what} of version {newest} or older",
                found=f"version {version}: a newer Ziggurat wrote it",
                where=where,
                ways_out=("update Ziggurat", *self.ways_out),
            )
        # Before any migration: the checksum is that of the layout as it was written.
        self._check_seal(data, where)
        body = {key: value for key, value in data.items() if key not in ("format", "version", "sha256")}
        return self._migrated(body["content"] if body.keys() == {"content"} else body, version, where)

    def _check_seal(self, data: dict[str, JSON], where: str) -> None:
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

    def _migrated(self, content: Content, version: int, where: str) -> Content:
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


def check_version(
    data: dict[str, object], version: int, *, where: str, what: str, error: type[ZigguratError] = DataError
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


def sha256_of(content: bytes | Path) -> str:
    """Hexadecimal SHA-256 of bytes, or of a file, which is read in blocks."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(data: object) -> str:
    """SHA-256 of plain data, in whatever order its keys stand: the fingerprint of settings, a plan, a manifest."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
