"""The export folder on disk: one manifest that proves every other file, written whole or not at all.

    exports/films/
      export.json                 what it was made from, and size and SHA-256 of every other file
      ranker/model.json           config of the model, towers, precision of the tables
      ranker/weights.safetensors  all weights
      ranker/preprocessing/       schema, vocabularies and statistics, as fitted
      ranker/dense.pt2            the dense network as `torch.export` sees it; for other programs, never read here
      encoder/…                   the same without dense.pt2 for the model of users and items, if there is one
      items/catalogue.parquet     one row an item: its raw columns
      items/items.json            settings of the index, and what its tensors mean
      items/index.safetensors     vectors and attributes, as the index searches them
      users/…                     what is known of users: their last columns, and what they have had
      chain.json                  how an answer is put together: candidates, value model, column of the user
      golden.json                 requests with their answers, to compare with

Trust runs in one direction: export.json carries the checksum of its own content, and those of all files. `open_export`
reads every byte once and compares; a flipped bit, a cut, swapped or missing file is an `ExportError` that names it.
Files are regular files below the folder, opened without following links; a name in the manifest is plain letters in at
most four parts, so that nothing outside can be named. What the manifest does not list is never opened. Checksums prove
that nothing changed by accident; they are no signature: who may write the folder may replace all of it.

*version* of an export: 16 hex digits of the checksums of its files. Equal content has equal versions.

Cost of opening: SHA-256 of all files, about 1.5 GB/s a core.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from safetensors import SafetensorError

from ziggurat.commands import pasted
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError, ExportError, FileError, ZigguratError
from ziggurat.files import Format, digest_of, left_behind, remove, replacing_folder, ways_to_write
from ziggurat.files.formats import Content
from ziggurat.serving.export.other_folders import is_damaged_export, no_export
from ziggurat.serving.export.published_folder import is_published, pointer_identity, served_folder
from ziggurat.typed import CountOrNone

MANIFEST_NAME = "export.json"
WAYS_OUT = ("copy the folder again, or restore it", "make it again: ziggurat export RUN --out FOLDER")
EXPORT = Format(name="ziggurat.export", what="the manifest of an export", error=ExportError, ways_out=WAYS_OUT)
MAX_FILES = 10_000
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MAX_PARTS = 4
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """The properties that a file must have to count as intact."""

    bytes: CountOrNone
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A run that a part of the export was made from.

    Args:
        part: "ranker" or "encoder".
        run: name of the run's folder.
        model: its kind.
        step: of the checkpoint.
        config: digest of its whole configuration.
        preprocessing: fingerprint of what was fitted.
    """

    part: str
    run: str
    model: str
    step: int
    config: str
    preprocessing: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of export.json.

    Args:
        version_of_content: 16 hex digits of the checksums of all files.
        created: UTC time in ISO format, for people.
        made_with: versions of Ziggurat, torch and Python that wrote it.
        sources: the runs that it was made from.
        facts: what was found when it was made, for people: parity with the runs, sizes.
        files: by name, with "/" between folders.
    """

    version_of_content: str
    created: str
    made_with: dict[str, str] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    facts: dict[str, object] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExportFolder:
    """An export whose files were all found to be as they were written.

    Args:
        path: of the folder, without symbolic links.
        manifest: what export.json says.
    """

    path: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    @property
    def version(self) -> str:
        """16 hex digits that change with any file."""
        return self.manifest.version_of_content

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name, or a folder with files."""
        return name in self.manifest.files or any(file.startswith(f"{name}/") for file in self.manifest.files)

    def file(self, name: str) -> Path:
        """The path of a file that the manifest lists.

        Raises:
            ExportError: it lists none of that name.
        """
        if name not in self.manifest.files:
            raise damaged(self.path / MANIFEST_NAME, expected=f"a file {name!r}", found="none")
        return self.path / name

    def read(self, name: str, form: Format) -> Content:
        """The content of a JSON file."""
        return form.read(self.file(name))


@contextmanager
def replacing_export(path: str | Path) -> Iterator[Path]:
    """A temporary folder to fill and seal, which becomes the export when the block ends without an error.

    What killed exports to the same path left is deleted first, but for sealed ones where there is no export: one of
    them may be the older one, which had stepped aside.

    Args:
        path: of the export; an older export there is replaced.

    Raises:
        ConfigError: `path` is a file, or a folder with something else in it.
        FileError: the system refuses.
    """
    folder = Path(path)
    _refuse_other_content(folder)
    for each in left_behind(folder):
        if folder.exists() or not (each / MANIFEST_NAME).exists():
            remove(each)
    with replacing_folder(folder) as temporary:
        try:
            yield temporary
        except (OSError, SafetensorError) as error:
            if isinstance(error, ZigguratError):
                raise
            raise FileError(
                expected="room and permission to write the export",
                found=str(error)[:300],
                where=str(folder),
                ways_out=(*ways_to_write(error, folder)[:1], "choose another folder: --out FOLDER"),
            ) from error
        assert (temporary / MANIFEST_NAME).exists(), "sealed"


def seal_export(
    folder: Path,
    *,
    sources: Sequence[Source],
    facts: Mapping[str, object],
    made_with: Mapping[str, str],
    known: Mapping[str, FileEntry] | None = None,
) -> ExportFolder:
    """Write the manifest of all files in a folder, over an older one.

    Args:
        folder: what `replacing_export` gave.
        sources: the runs that it was made from.
        facts: what was found when it was made; plain data.
        made_with: versions.
        known: entries of files that are links to those of another export; they are not read here, but by whoever opens
            this one.
    """
    known = known or {}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in names:
        if name not in known:
            (folder / name).chmod(0o644)  # who serves an export may be another user than who made it
    # Not of the manifest, which cannot hold the digest of itself.
    files = {name: known.get(name) or _entry(folder / name) for name in names if name != MANIFEST_NAME}
    manifest = Manifest(
        version_of_content=_version_of(files),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        made_with=dict(made_with),
        sources=tuple(sources),
        facts=dict(facts),
        files=files,
    )
    EXPORT.write(folder / MANIFEST_NAME, _to_json(manifest))
    return ExportFolder(path=folder, manifest=manifest)


def open_export(path: str | Path, *, only: Collection[str] | None = None) -> ExportFolder:
    """Read the manifest of an export and check every file that it lists.

    Args:
        path: of the folder; may be a symbolic link to one (`current → v17`), but nothing in it may be. Of a published
            folder the current version is read.
        only: files to check, for who reads no others; None: all.

    Raises:
        MissingFileError: there is no export.
        ExportError: a file is damaged, missing, or no regular file; or a newer Ziggurat wrote it; names the file.
    """
    export = read_manifest(path)
    for name, entry in export.manifest.files.items():
        if only is None or name in only:
            _check_file(export.path, name, entry)
    return export


def read_manifest(path: str | Path) -> ExportFolder:
    """An export whose manifest is in order; its files are not looked at.

    Raises:
        MissingFileError: there is no export; says what is there.
        ExportError: the manifest is damaged or lost, or a newer Ziggurat wrote it.
    """
    given = Path(path)
    # Once, here: a link or a pointer that is changed while files are read would mix two exports.
    folder = served_folder(Path(os.path.realpath(given)))
    is_manifest_there = os.path.lexists(folder / MANIFEST_NAME)
    if not folder.is_dir() or not (is_manifest_there or is_damaged_export(folder)):
        raise no_export(given)
    with _opened(folder / MANIFEST_NAME):
        pass  # a regular file, and no link
    where = str(folder / MANIFEST_NAME)
    manifest = from_json(Manifest, EXPORT.read(where), where=where, error=ExportError)
    if len(manifest.files) > MAX_FILES:
        raise damaged(where, expected=f"at most {MAX_FILES:,} files", found=f"{len(manifest.files):,}")
    for name, entry in manifest.files.items():
        _check_name(name, where=where)
        if not _DIGEST.fullmatch(entry.sha256):
            raise damaged(where, expected=f"the SHA-256 of {name}", found=f"{entry.sha256!r:.80}")
    if manifest.version_of_content != _version_of(manifest.files):
        raise damaged(
            where, expected=f"version {_version_of(manifest.files)}", found=f"{manifest.version_of_content!r:.80}"
        )
    return ExportFolder(path=folder, manifest=manifest)


def damaged(where: str | Path, *, expected: str, found: str) -> ExportError:
    """The error for a file of an export that is not as it was written."""
    return ExportError(expected=expected, found=found, where=str(where), ways_out=WAYS_OUT)


def _to_json(manifest: Manifest) -> dict[str, object]:
    files = {name: to_json(entry) for name, entry in manifest.files.items()}
    return {
        "version_of_content": manifest.version_of_content,
        "created": manifest.created,
        "made_with": manifest.made_with,
        "sources": [to_json(source) for source in manifest.sources],
        "facts": manifest.facts,
        "files": files,
    }


def _check_name(name: str, *, where: str) -> None:
    parts = name.split("/")
    if len(parts) > _MAX_PARTS or not all(_PART.fullmatch(part) for part in parts) or name == MANIFEST_NAME:
        raise damaged(where, expected="names of files below the folder, in plain letters", found=f"{name!r:.120}")


def _check_file(folder: Path, name: str, entry: FileEntry) -> None:
    place = folder
    for part in name.split("/")[:-1]:
        place /= part
        # A link could lead out of the folder, to a file of the system that the server may read.
        if place.is_symlink():
            raise damaged(place, expected="a folder", found="a symbolic link")
    path = folder / name
    with _opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        # Before its bytes are read: most damage is a copy that was cut short.
        if size != entry.bytes:
            raise damaged(path, expected=f"{entry.bytes:,} bytes", found=f"{size:,} bytes")
        digest = hashlib.sha256()
        block = memoryview(bytearray(min(_BLOCK_BYTES, max(size, 1))))
        read = 0
        # No further than its size: a file that grows must not be read for ever.
        while (count := os.readv(descriptor, [block])) and read <= size:
            digest.update(block[:count])
            read += count
    if digest.hexdigest() != entry.sha256:
        raise damaged(path, expected=f"SHA-256 {entry.sha256}", found=f"SHA-256 {digest.hexdigest()}")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file; a link, pipe, folder or device is refused without waiting for it."""
    try:
        if path.is_symlink():
            raise damaged(path, expected="a regular file", found="a symbolic link")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise damaged(path, expected="a file of an export", found="no such file") from None
    except OSError as problem:
        if isinstance(problem, ExportError):
            raise
        raise damaged(path, expected="a file that can be read", found=problem.strerror or str(problem)) from problem
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise damaged(path, expected="a regular file", found="a folder, pipe or device")
        yield descriptor
    except OSError as problem:
        if isinstance(problem, ExportError):
            raise
        raise damaged(path, expected="a file that can be read", found=problem.strerror or str(problem)) from problem
    finally:
        os.close(descriptor)


def identity_of(path: Path) -> object:
    """Return what changes when an export's path leads to another folder, or its files are replaced; None: no folder."""
    try:
        real = path.resolve(strict=True)
        if is_published(real):
            return pointer_identity(real)
        # Names and times of the files, too: an export may be replaced under the path that it has.
        return str(real), sorted((each.name, each.stat().st_mtime_ns) for each in real.iterdir() if each.is_file())
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that no file can have
        return None


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _version_of(files: dict[str, FileEntry]) -> str:
    # Of contents alone: the same files make the same version wherever and whenever they were exported.
    return digest_of({name: entry.sha256 for name, entry in files.items()})[:16]


def _refuse_other_content(folder: Path) -> None:
    if not folder.exists() or (folder.is_dir() and ((folder / MANIFEST_NAME).is_file() or not any(folder.iterdir()))):
        return
    # Nothing can be made in a file: a folder beside it is named.
    free = folder / "export" if folder.is_dir() else folder.with_name(f"{folder.name}_export")
    raise ConfigError(
        expected="a folder that does not exist yet, or an older export to replace",
        found="a folder with other files" if folder.is_dir() else "a file",
        where=str(folder),
        ways_out=(f"--out {pasted(free)}", "name another folder"),
    )
