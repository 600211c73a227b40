"""A published folder: versions of one export side by side, and one pointer that says which of them is served.

    exports/live/
      published.json      the pointer: which version is current, and what each version is
      versions/000007/    an export (`export_folder.py`): complete by itself, never changed
      versions/000008/
      publisher.lock      while a stream publishes here

A version is written under a temporary name, checked, and renamed; then the pointer is replaced in one step. Who reads
the pointer first and the version after it never sees half of one. Files of a version that are those of the version
before are hard links, so a folder may be deleted without harm to those after it.

*Rolled back*: the pointer leads to an older version, and is held there: versions that are published later wait for
somebody to release it. A stream says so with each of them. Whatever reads an export by its path (`open_export`, and
with it `Recommender.load`, the verbs and the server) takes a published folder too, and reads its current version.

*In use*: a server locks the manifest of the version that it serves (`flock`, shared), and the lock ends with the
process, however it ends. A version that is locked, current, or among the newest is not removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from ziggurat.commands import pasted
from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError, ExportError, FileError, MissingFileError, ZigguratError
from ziggurat.files import Format, is_temporary, locked, refuse_url, remove_left_behind, take_away, writing_to
from ziggurat.plain import JSON
from ziggurat.typed import Count, CountOrNone

POINTER_NAME = "published.json"
PUBLISHED_FACTS = "published"  # among the facts of an export's manifest: as which version it was written
VERSIONS = "versions"
PUBLISHER_LOCK = "publisher.lock"
_LOCK = "published.lock"
_MANIFEST = "export.json"
_PATIENCE_S = 20.0  # the pointer is locked while a small file is written
_POLL_S = 0.02
_NUMBER = re.compile(r"\d{6,}")
_LEFT = re.compile(r"\.\d{6,}\.\d{1,9}\.[0-9a-f]{8}\.tmp")
T = TypeVar("T")

POINTER = Format(
    name="ziggurat.published",
    what="the pointer of a published folder",
    error=ExportError,
    ways_out=("restore the file from a copy", "publish into another folder: --publish FOLDER"),
)


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A version of a published folder.

    Args:
        number: of the version, from 1 on; never used twice.
        version: 16 hex digits of its content, as answers carry them.
        run: which stream it came from; 16 hex digits that a stream draws once.
        window: number of the newest window that was trained.
        name: of that window.
        step: of the weights.
        watermark: time of the newest row that was trained; "" where the schema has no time.
        deltas: how many deltas lie over its base; 0: it is written whole.
        rows: of tables that were written: those that changed since the version before, or all.
        new_bytes: of files that no version before has.
        created: UTC time in ISO format.
        seconds: from the end of training on the window to readers that could see the version.
        cpu_s: of the stream's first process meanwhile, which say more than seconds on a machine that is shared.
        metrics: of the window, by the weights before it was trained; by their average where that is published.
    """

    number: Count
    version: str
    run: str
    window: CountOrNone
    name: str
    step: CountOrNone
    watermark: str = ""
    deltas: CountOrNone = 0
    rows: CountOrNone = 0
    new_bytes: CountOrNone = 0
    created: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0
    metrics: dict[str, float | None] = field(default_factory=dict)

    def text(self) -> str:
        """Return number, window and watermark for people."""
        rows = f", rows up to {self.watermark}" if self.watermark else ""
        return f"version {self.number}, window {self.name}{rows}"

    @property
    def created_s(self) -> float | None:
        """Seconds since 1970 at which it was written; None where that is not known."""
        return _seconds_of(self.created)

    @property
    def watermark_s(self) -> float | None:
        """The watermark in seconds since 1970; None where there is none, or times are those of no calendar."""
        return _seconds_of(self.watermark)

    def facts(self, *, now_s: float) -> dict[str, JSON]:
        """Return what is said of it to those who ask a server, as plain data.

        Args:
            now_s: seconds since 1970.

        Returns:
            number; window, its name; watermark; created; metrics of the window; and where they are known, the seconds
            from created and watermark till now: `age_s` and `watermark_age_s`.
        """
        known = {"age_s": self.created_s, "watermark_age_s": self.watermark_s}
        ages: dict[str, JSON] = {name: round(now_s - at, 3) for name, at in known.items() if at is not None}
        return {
            "number": self.number,
            "window": self.name,
            "watermark": self.watermark,
            "created": self.created,
            "metrics": dict(self.metrics),
            **ages,
        }


def _seconds_of(text: str) -> float | None:
    """Return a date as seconds since 1970, in UTC where it names no zone; None of what is no date."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def publication_of(facts: Mapping[str, Any], *, where: str) -> Publication | None:
    """Return the version as which an export was published, from the facts of its manifest; None of any other export.

    Args:
        facts: of the manifest.
        where: it lies, for errors.

    Raises:
        ExportError: the facts are damaged.
    """
    found = facts.get(PUBLISHED_FACTS)
    return None if found is None else from_json(Publication, found, where=where, error=ExportError)


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """The content of published.json.

    Args:
        current: number of the version that is read.
        last: the highest number that was given.
        held: the current version stays although newer ones are published: it was rolled back to.
        versions: those that are there, in order.
    """

    current: Count
    last: Count
    held: bool = False
    versions: tuple[Publication, ...] = ()

    def version(self, number: int) -> Publication | None:
        """Return a version by its number; None where it is not there."""
        return next((each for each in self.versions if each.number == number), None)

    @property
    def newest(self) -> Publication:
        """Return the version that was published last."""
        return self.versions[-1]


def is_published(folder: Path) -> bool:
    """Return whether a folder is a published one: it has a pointer."""
    return os.path.lexists(folder / POINTER_NAME)


def is_version(folder: Path) -> bool:
    """Return whether a folder is a version of a published one, which nobody changes."""
    return (
        folder.parent.name == VERSIONS
        and _NUMBER.fullmatch(folder.name) is not None
        and is_published(folder.parent.parent)
    )


def version_folder(folder: Path, number: int) -> Path:
    """Return the folder of a version."""
    return folder / VERSIONS / f"{number:06}"


def read_pointer(folder: Path) -> Pointer:
    """Read the pointer of a published folder.

    Raises:
        MissingFileError: there is none.
        ExportError: it is damaged, or names a version that it does not list.
    """
    where = str(folder / POINTER_NAME)
    pointer = from_json(Pointer, POINTER.read(where), where=where, error=ExportError)
    if pointer.version(pointer.current) is None:
        raise ExportError(
            expected=f"version {pointer.current} among those that it lists",
            found=", ".join(str(each.number) for each in pointer.versions) or "none",
            where=where,
            ways_out=POINTER.ways_out,
        )
    return pointer


def served_folder(folder: Path) -> Path:
    """Return the folder to read: the current version of a published folder, any other folder itself.

    Raises:
        ExportError: the pointer is damaged, or the version that it leads to is gone.
    """
    if not is_published(folder):
        return folder
    pointer = read_pointer(folder)
    path = version_folder(folder, pointer.current)
    if path.is_dir():
        return path
    raise ExportError(
        expected=f"version {pointer.current}, to which {POINTER_NAME} leads",
        found="no such folder",
        where=str(path),
        ways_out=("restore the folder from a copy", *_ways_back(folder, pointer, but=pointer.current)),
    )


def _ways_back(folder: Path, pointer: Pointer, *, but: int) -> list[str]:
    """Return commands that lead readers to the newest versions that are there."""
    there = [each for each in pointer.versions if each.number != but]
    there = [each for each in there if (version_folder(folder, each.number) / _MANIFEST).is_file()]
    command = f"ziggurat rollback {pasted(folder)}"
    newest = [f"{command} --to {NEWEST}"] if pointer.newest in there else []
    others = [each for each in there if each.number != pointer.newest.number][-2:]
    return newest + [f"{command} --to {each.number}" for each in others]


def change_pointer(folder: Path, change: Callable[[Pointer | None], Pointer]) -> Pointer:
    """Replace the pointer in one step, one process at a time.

    Args:
        folder: the published folder.
        change: makes the new pointer of the present one, which is None before the first version.

    Raises:
        FileError: another process holds the pointer, or the system refuses.
    """

    def busy(holder: str) -> FileError:
        return FileError(
            expected="the pointer, which one process at a time may change",
            found=f"another one that does: {holder}",
            where=str(folder / _LOCK),
            ways_out=("wait until it ends, or end it",),
        )

    with locked(folder / _LOCK, busy=busy, patience_s=_PATIENCE_S):
        pointer = change(read_pointer(folder) if is_published(folder) else None)
        POINTER.write(folder / POINTER_NAME, to_json(pointer))
    return pointer


def roll_back(folder: str | Path, *, to: str = "") -> tuple[Pointer, Pointer]:
    """Let readers of a published folder have another version, and hold it there; or release it.

    Args:
        folder: the published folder.
        to: number of a version, or its hex digits; "": the one before the current one; "newest": the newest one, and
            versions that are published from now on are current at once again.

    Returns:
        The pointer before and after.

    Raises:
        ConfigError: no published folder, or no such version.
        ExportError: a file of that version is damaged; or the pointer is damaged, or gone while versions are there.
    """
    from ziggurat.serving.export.export_folder import open_export  # which asks this module where to read

    path = Path(folder)
    if not is_published(path):
        gone = _gone_pointer(path)
        if gone is not None:
            raise gone
        raise ConfigError(
            expected="a folder that a stream publishes into",
            found=f"a folder without {POINTER_NAME}" if path.is_dir() else "no such folder",
            where=str(path),
            ways_out=("check the path", f"publish into it: ziggurat stream RECIPE … --publish {pasted(path)}"),
        )
    asked = read_pointer(path)
    chosen = _chosen(asked, to=to, where=str(path))
    before: list[Pointer] = []

    def change(pointer: Pointer | None) -> Pointer:
        assert pointer is not None, "looked at above"
        before.append(pointer)
        # What was published since was checked by who published it.
        to_lead_to = pointer.newest if to == NEWEST else _chosen(pointer, to=str(chosen.number), where=str(path))
        return replace(pointer, current=to_lead_to.number, held=to != NEWEST)

    version = version_folder(path, chosen.number)
    lease = Lease(version)
    try:
        # All of its files, before anybody is sent there. That takes as long as reading them, and a stream that
        # publishes meanwhile needs the pointer: it is not held yet.
        try:
            open_export(version)
        except ZigguratError as error:
            ways = ("restore the folder from a copy", *_ways_back(path, asked, but=chosen.number))
            raise ExportError(expected=error.expected, found=error.found, where=error.where, ways_out=ways) from error
        after = change_pointer(path, change)
    finally:
        lease.release()
    return before[0], after


NEWEST = "newest"


def _chosen(pointer: Pointer, *, to: str, where: str) -> Publication:
    versions = pointer.versions
    if to == NEWEST:
        return pointer.newest
    if not to:
        earlier = [each for each in versions if each.number < pointer.current]
        if earlier:
            return earlier[-1]
        found = f"version {pointer.current}, the oldest one that is kept"
    else:
        fits = [each for each in versions if to in (each.version, str(each.number), f"{each.number:06}")]
        if fits:
            return fits[-1]
        found = f"{to!r:.80}, and versions {', '.join(str(each.number) for each in versions)}"
    raise ConfigError(
        expected="a version before the current one" if not to else "number or hex digits of a version that is kept",
        found=found,
        where=where,
        ways_out=(
            *(f"--to {each.number}: {each.name}" for each in versions[-3:]),
            "keep more of them: ziggurat stream … --publish-keep 16",
        ),
    )


def refuse_other_folder(folder: str | Path) -> None:
    """Refuse a folder that nobody can publish into, before anything is written.

    Args:
        folder: as it was given.

    Raises:
        ConfigError: no folder, a URL, a file, or a folder of something else.
        ExportError: its pointer is damaged, or gone while versions are there.
    """
    path = Path(folder)
    if not str(folder):
        raise ConfigError(
            expected="a folder to publish into",
            found="an empty text",
            where="--publish",
            ways_out=("--publish exports/live", "leave --publish out"),
        )
    refuse_url(folder, error=ConfigError)
    if is_published(path):
        try:
            read_pointer(path)
        except ExportError as error:
            error.ways_out = (*error.ways_out, f"mv {pasted(path)} {pasted(_aside(path, 'damaged'))}")
            raise
        return
    if not path.exists():
        file = next((each for each in path.absolute().parents if each.exists() and not each.is_dir()), None)
        if file is None:
            return
        raise ConfigError(
            expected="a folder, or a path where one can be made",
            found=f"{file}, a file",
            where=f"--publish {path}",
            ways_out=("--publish exports/live",),
        )
    names = os.listdir(path) if path.is_dir() else []
    if POINTER_NAME in names:  # the first version of another stream came meanwhile
        refuse_other_folder(folder)
        return
    # A pointer that is being written, or was when its process was killed, has a temporary name.
    others = sorted(set(names) - {VERSIONS, PUBLISHER_LOCK, _LOCK})
    others = [name for name in others if not (is_temporary(name) and name.startswith(f".{POINTER_NAME}."))]
    if not path.is_dir() or others:
        raise ConfigError(
            expected="a folder that does not exist yet, or one that is published into",
            found=f"a folder with {', '.join(others[:3])}" if others else "a file",
            where=f"--publish {path}",
            ways_out=("--publish exports/live",),
        )
    gone = _gone_pointer(path)
    if gone is not None:
        raise gone


def _gone_pointer(folder: Path) -> ExportError | None:
    """Return the error of a folder that has versions and no pointer; None of any other folder."""
    left = [name for name in _listed(folder / VERSIONS) if not _LEFT.fullmatch(name)]
    # Behind the versions: of those that are there a pointer that comes meanwhile speaks by now.
    if is_published(folder):
        return None
    # What a publisher leaves that was killed before its first pointer is the one version of number 1.
    first = version_folder(folder, 1)
    if not left or (left == [first.name] and (first / _MANIFEST).is_file()):
        return None
    return ExportError(
        expected=f"{POINTER_NAME} beside versions, which says what they are",
        found=f"none, and {', '.join(left[:3])} in {VERSIONS}",
        where=str(folder),
        ways_out=(
            f"restore {POINTER_NAME} from a copy",
            "publish into another folder: --publish FOLDER",
            f"mv {pasted(folder / VERSIONS)} {pasted(_aside(folder, VERSIONS))}",
        ),
    )


def _aside(folder: Path, name: str) -> Path:
    """Return a path beside a folder for what is moved away from it."""
    # The path "." has no name of its own.
    folder = folder if folder.name else folder.absolute()
    return folder.with_name(f"{folder.name}-{name}")


def versions_there(folder: Path) -> list[Path]:
    """Return the folders of the versions that are complete, whether the pointer names them or not; in order."""
    names = [name for name in _listed(folder / VERSIONS) if _NUMBER.fullmatch(name)]
    return [folder / VERSIONS / name for name in names if (folder / VERSIONS / name / _MANIFEST).is_file()]


class PointerState(StrEnum):
    """State of the pointer of a published folder."""

    GOOD = "good"
    DAMAGED = "damaged"
    GONE = "gone"


def is_followed(folder: Path) -> bool:
    """Return whether readers follow a folder: it has a pointer, or versions, whose pointer may come back."""
    return is_published(folder) or (folder / VERSIONS).is_dir()


def pointer_state(folder: Path) -> tuple[PointerState, ZigguratError | None]:
    """Return whether readers can follow a folder, and why not; a folder without versions is followed otherwise.

    Args:
        folder: published or not.
    """
    if not is_followed(folder):
        return PointerState.GOOD, None
    if not is_published(folder):
        error = MissingFileError(
            expected=f"{POINTER_NAME}, which leads to a version",
            found="no such file",
            where=str(folder / POINTER_NAME),
            ways_out=f"restore {POINTER_NAME} from a copy",
        )
        return PointerState.GONE, error
    try:
        read_pointer(folder)
    except ZigguratError as error:
        return PointerState.DAMAGED, error
    return PointerState.GOOD, None


def _listed(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


@contextlib.contextmanager
def publishing(folder: Path) -> Iterator[None]:
    """Hold the right to publish into a folder, which is made; and remove what a killed publisher left.

    Raises:
        ConfigError: something else is in the folder, or another process publishes there.
        ExportError: its pointer is damaged or gone.
    """
    refuse_other_folder(folder)
    with writing_to(folder / PUBLISHER_LOCK, FileError):
        (folder / VERSIONS).mkdir(parents=True, exist_ok=True)

    def busy(holder: str) -> ConfigError:
        return ConfigError(
            expected="one process at a time that publishes into a folder",
            found=f"another one that does: {holder}",
            where=str(folder),
            ways_out=("wait until it ends, or end it", "publish into another folder: --publish exports/other"),
        )

    with locked(folder / PUBLISHER_LOCK, busy=busy, patience_s=_PATIENCE_S):
        _remove_left(folder)
        yield


def _remove_left(folder: Path) -> None:
    """Remove versions that a killed publisher began and nobody was ever sent to; nothing that has another name."""
    remove_left_behind(folder / POINTER_NAME)
    pointer = read_pointer(folder) if is_published(folder) else None
    listed = () if pointer is None else {each.number for each in pointer.versions}
    last = 0 if pointer is None else pointer.last
    # A publisher that was killed before the pointer moved leaves one version. More of them are those of a newer
    # pointer, in the place of which an older copy was put: they stay.
    keeps_newer = newest_number(folder) > last + 1
    for entry in os.scandir(folder / VERSIONS):
        is_begun = _LEFT.fullmatch(entry.name) is not None
        is_unlisted = _NUMBER.fullmatch(entry.name) is not None and int(entry.name) not in listed
        if not entry.is_dir(follow_symlinks=False) or not (is_begun or is_unlisted):
            continue
        if is_unlisted and keeps_newer and int(entry.name) > last:
            continue
        path = Path(entry.path)
        if is_begun:
            shutil.rmtree(path, ignore_errors=True)
        # A version that is not listed was pruned or never pointed to. One that a server still holds stays until then.
        elif (path / _MANIFEST).is_file():
            with _unused(path) as is_unused:
                if is_unused:
                    take_away(path)


def newest_number(folder: Path) -> int:
    """Return the highest number of a version that lies in a published folder, listed or not; 0 where none does."""
    names = [name for name in _listed(folder / VERSIONS) if _NUMBER.fullmatch(name)]
    # A folder of such a name with nothing of ours in it is no version.
    return max((int(name) for name in names if (folder / VERSIONS / name / _MANIFEST).is_file()), default=0)


def prune(folder: Path, *, keep: int) -> list[int]:
    """Remove the oldest versions beyond a number; never the current one, nor one that a server holds.

    Args:
        folder: the published folder, whose right to publish is held.
        keep: how many stay at least.

    Returns:
        Numbers of those that are gone.
    """
    gone: list[int] = []
    held = contextlib.ExitStack()

    def without(pointer: Pointer | None) -> Pointer:
        assert pointer is not None, "something was published"
        for each in pointer.versions[:-keep]:
            version = version_folder(folder, each.number)
            if each.number != pointer.current and held.enter_context(_unused(version)):
                gone.append(each.number)
        return replace(pointer, versions=tuple(each for each in pointer.versions if each.number not in gone))

    if len(read_pointer(folder).versions) <= keep:
        return []
    # Until the versions are gone nobody else can hold one: who wants to waits, and finds it gone.
    with held:
        # The list first: whoever reads it afterwards is sent to none of those that go.
        change_pointer(folder, without)
        for number in gone:
            take_away(version_folder(folder, number))  # what cannot be removed now is removed at the next start
    return gone


def in_use(version: Path) -> bool:
    """Return whether a server on this machine holds a version."""
    with _unused(version) as is_unused:
        return not is_unused


@contextlib.contextmanager
def _unused(version: Path) -> Iterator[bool]:
    """Keep others from holding a version while the block runs; yields False where somebody holds it already."""
    try:
        descriptor = os.open(version / _MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks, which cannot say that it is not
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


class Lease:
    """A version that is not removed while this object, or a process that inherited it, holds it.

    Args:
        version: its folder; any other folder is not held.
    """

    def __init__(self, version: Path) -> None:
        self._descriptor = -1
        self._is_locked = False
        if not is_version(version):
            return
        manifest = version / _MANIFEST
        with contextlib.suppress(OSError):  # without locks there, the number of kept versions is all that protects it
            self._descriptor = os.open(manifest, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            is_locked = self._lock()
            # It may have been taken away while this waited: what is held then has no name, or that of another one.
            self._is_locked = is_locked and os.path.samestat(os.fstat(self._descriptor), os.lstat(manifest))
        if not self._is_locked:
            self.release()

    @property
    def is_held(self) -> bool:
        """False of what is no version, or is gone, and where the file system has no locks."""
        return self._is_locked

    def _lock(self) -> bool:
        """Lock the manifest, and wait for a publisher that looks whether anybody holds it, or removes the version.

        Raises:
            OSError: there are no locks.
        """
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    return False
                time.sleep(_POLL_S)
            else:
                return True

    def release(self) -> None:
        """Give it back, also where processes that were forked meanwhile have the same descriptor."""
        self._is_locked = False
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
        self._descriptor = -1


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[Path]:
    """Hold the version that a published folder leads to while the block runs, and yield its folder; any other as it is.

    Raises:
        ExportError: as `served_folder`.
    """
    place = served_folder(folder)
    lease = Lease(place)
    # Between the pointer and the lock, newer versions may have come and this one gone.
    while is_version(place) and not lease.is_held and (now := served_folder(folder)) != place:
        place = now
        lease = Lease(place)
    try:
        yield place
    finally:
        lease.release()


def pointer_identity(folder: Path) -> object:
    """Return what changes when a published folder leads elsewhere; None while that cannot be read."""
    try:
        pointer = read_pointer(folder)
    except (ZigguratError, OSError):
        return None
    current = pointer.version(pointer.current)
    return str(folder), pointer.current, "" if current is None else current.version
