"""StoreReader: the bytes of an object in a store, through broken connections, and never those of two objects.

Problem: a store on the other side of a network drops connections, answers with half of what was asked for, and may
replace an object while it is read. Readers that take what comes give fewer rows, or rows of two versions, and say
nothing.

Idea: the size and the version (ETag, generation, time of change) are asked for before the first byte. A read goes on
at the byte where the last one ended until it has all its bytes; a failure waits twice as long each time, opens the
object again, and looks whether it is still the same. It is looked at once more behind the last byte of a file, every
64 MiB, and wherever the caller asks for it (`verify`): rows that were given before that come with an error after them.

    open: size, version ─► part ─► part ─✗ wait, open, same version? ─► rest of the part ─► … ─► same version? ─► done

A file that is read from its first byte to its last is compared with its MD5, where the store says one (S3: the ETag
of an object that was sent in one piece). An ETag that only looks like an MD5 (objects encrypted with keys of KMS) is
told by reading the object again: two equal readings are no fault of the wire.

Large reads are made in parts of 4 MiB over several connections. Memory: 16 MiB for a file that is read in order.
"""

from __future__ import annotations

import hashlib
import io
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from ziggurat.errors import DataError, MissingFileError, ZigguratError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 8  # without a byte between them: half a minute
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 16.0
_PART_BYTES = 4 << 20
_CONNECTIONS = 4
_FIRST_WINDOW_BYTES, _WINDOW_BYTES = 256 << 10, 16 << 20
_VERIFY_BYTES = 64 << 20
_OURS = (ZigguratError, TypeError, AttributeError, NameError, AssertionError)  # no fault of the store
_MD5 = re.compile(r"[0-9a-f]{32}")
_REFUSED = re.compile(r"ACCESS_DENIED|FORBIDDEN|NO_SUCH_BUCKET|INVALID_ACCESS|SIGNATURE|UNAUTHORIZED", re.I)


@dataclass(frozen=True, kw_only=True)
class Version:
    """Facts by which an object is recognised.

    Args:
        num_bytes: its size.
        tag: changes whenever the object is written; "" where the store says nothing of the kind.
        md5: of its bytes, as far as the store says one; "" otherwise.
    """

    num_bytes: int
    tag: str
    md5: str = ""


class Opened(Protocol):
    """An object of a store, open: as much of a file of pyarrow as reading asks for."""

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Return so many bytes from a place on."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


@dataclass
class StoreAccess:
    """Access to one object.

    Args:
        where: its URL, for errors.
        look: asks the store for its version.
        open: opens it, and says which version that is.
        tags: what is known of the store's ETags; shared by all its objects.
    """

    where: str
    look: Callable[[], Version]
    open: Callable[[], tuple[Opened, Version]]
    tags: TagsOfStore


@dataclass
class TagsOfStore:
    """Record of whether a store's ETags were found to be no MD5s."""

    are_no_md5: bool = False


def wait_before(attempt: int) -> float:
    """Seconds before an attempt, the second one being number 1."""
    # The first attempt is not waited for.
    return min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S)


def pause(seconds: float) -> None:
    """Wait; a name of its own so that a test need not."""
    time.sleep(seconds)


def asked(call: Callable[[], T], *, where: str, what: str) -> T:
    """The answer of a store, asked again while the connection fails.

    Raises:
        MissingFileError: there is nothing of that name.
        DataError: the store refuses, or it does not answer.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except _OURS:
            raise
        except Exception as error:  # a store's package raises what it likes
            refuse_at_once(error, where=where)
            if attempt == ATTEMPTS:
                raise unreachable(error, where=where, what=what) from error
            _log.warning(
                "%s: %s failed (%s); attempt %d of %d follows", where, what, _said(error), attempt + 1, ATTEMPTS
            )
            pause(wait_before(attempt))
    raise AssertionError  # not reached: the last attempt returns or raises


def refuse_at_once(error: Exception, *, where: str) -> None:
    """Raise for what no second attempt will mend."""
    if isinstance(error, FileNotFoundError):
        raise MissingFileError(
            expected="a data file", found="nothing there", where=where, ways_out=("correct the URL", "list the store")
        ) from error
    if isinstance(error, PermissionError) or _REFUSED.search(str(error)):
        raise DataError(
            expected="a store that lets us read",
            found=_said(error),
            where=where,
            ways_out=(
                "give credentials as the store's own tools take them: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS",
                "for a public bucket of S3: ?anonymous=true behind the URL",
                "check the bucket's name and region (AWS_REGION)",
            ),
        ) from error


def unreachable(error: Exception | str, *, where: str, what: str) -> DataError:
    """The error after the last attempt."""
    return DataError(
        expected=f"a store that answers: {what}",
        found=f"{_said(error)}, {ATTEMPTS} times one after the other",
        where=where,
        ways_out=(
            "try again when the store answers",
            "check the address (AWS_ENDPOINT_URL) and the network",
            "copy the files to this machine",
        ),
    )


class StoreReader(io.RawIOBase):
    """An object as a file that can be read and sought.

    Args:
        access: how it is reached.
        in_order: it will be read from its first byte to its last, and is read ahead; its MD5 is compared.

    Raises (here and while reading):
        MissingFileError: no such object.
        DataError: the store gives up, serves fewer bytes than it says, or the object changed.
    """

    def __init__(self, access: StoreAccess, *, in_order: bool = False) -> None:
        super().__init__()
        self._access = access
        self._in_order = in_order
        # Opened and looked at in one, so that the version is that of the very file.
        self._file, self.version = asked(access.open, where=access.where, what="open the object")
        self._position = 0
        self._window = b""
        self._window_start = 0
        self._window_bytes = _FIRST_WINDOW_BYTES
        # A checksum of the store's own, not one for security.
        self._digest = hashlib.md5(usedforsecurity=False)
        self._hashed = 0
        self._unverified = 0
        self._pool: ThreadPoolExecutor | None = None

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Position of the next byte."""
        return self._position

    def size(self) -> int:
        """Bytes of the object."""
        return self.version.num_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.version.num_bytes}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, num_bytes: int | None = -1) -> bytes:
        """Exactly so many bytes, or those to the end."""
        left = max(0, self.version.num_bytes - self._position)
        wanted = left if num_bytes is None or num_bytes < 0 else min(num_bytes, left)
        # Only what is read in order is read ahead; others jump about.
        data = self._from_window(wanted) if self._in_order else self._fetch(self._position, self._position + wanted)
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        """All bytes to the end."""
        return self.read()

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer."""
        # Readers in front of this one may give memory of any shape: its bytes are what counts.
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def verify(self) -> None:
        """Raise if the object is not the one that was opened."""
        self._unverified = 0
        self._compare(asked(self._access.look, where=self._access.where, what="look at the object"))

    def _compare(self, now: Version) -> None:
        if now != self.version:
            raise DataError(
                expected=f"an object that stays as it is while it is read: {_described(self.version)}",
                found=f"another one: {_described(now)}",
                where=self._access.where,
                ways_out=(
                    "read it again when nothing writes to it any more",
                    "write new data under new names, or read one version of the object",
                ),
            )

    def close(self) -> None:
        """Let go of the connections."""
        if not self.closed and self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _from_window(self, wanted: int) -> bytes:
        parts: list[bytes] = []
        position = self._position
        stop = self._position + wanted
        while position < stop:
            offset = position - self._window_start
            # Behind a seek the window may lie elsewhere.
            if not 0 <= offset < len(self._window):
                end = min(position + max(self._window_bytes, stop - position), self.version.num_bytes)
                self._window = self._fetch(position, end)
                self._window_start = position
                offset = 0
                # A look at the beginning of a file stays cheap; whoever reads on gets long reads.
                self._window_bytes = min(self._window_bytes * 4, _WINDOW_BYTES)
            parts.append(self._window[offset : offset + stop - position])
            position += len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fetch(self, start: int, stop: int) -> bytes:
        """Bytes from the store, in parts, checked as the module says."""
        places = [(place, min(place + _PART_BYTES, stop)) for place in range(start, stop, _PART_BYTES)]
        if len(places) > 1:
            # Made once and late: many files are small, and need no threads.
            self._pool = self._pool or ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="store")
            data = b"".join(self._pool.map(lambda place: self._part(*place), places))
        else:
            data = self._part(start, stop) if places else b""
        self._unverified += len(data)
        # A digest grows in order alone: after a seek it stays where it is, and nothing is compared at the end.
        if self._in_order and start == self._hashed:
            self._digest.update(data)
            self._hashed = stop
        at_end = self._in_order and stop == self.version.num_bytes
        if at_end or self._unverified > _VERIFY_BYTES:
            self.verify()
        if at_end and self._hashed == stop:
            self._compare_checksum()
        return data

    def _part(self, start: int, stop: int) -> bytes:
        """Bytes of one read, gone on with at the byte where it broke."""
        parts: list[bytes] = []
        position = start
        failures = 0
        # What a store gives may be shorter than what was asked for.
        while position < stop:
            try:
                data = bytes(self._file.read_at(stop - position, position))
                # It counts only where nothing came: the end of an answer before the end of the object.
                problem: Exception | str = f"the store served {position:,} of {self.version.num_bytes:,} bytes"
            except _OURS:
                raise
            except Exception as error:  # a store's package raises what it likes
                refuse_at_once(error, where=f"{self._access.where}, byte {position:,}")
                data = b""
                problem = error
            parts.append(data)
            position += len(data)
            if data:
                # A single byte is progress: only failures in a row count.
                failures = 0
                continue
            failures += 1
            if failures == ATTEMPTS:
                raise unreachable(problem, where=f"{self._access.where}, byte {position:,}", what="read the object")
            self._again(problem, position=position, failures=failures)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _again(self, problem: Exception | str, *, position: int, failures: int) -> None:
        """Open the object again; it must be the same."""
        where = self._access.where
        said = _said(problem)
        _log.warning(
            "%s: reading broke at byte %d (%s); goes on there, attempt %d", where, position, said, failures + 1
        )
        pause(wait_before(failures))
        # The old connection may be the fault, so it is not used again.
        self._file, version = asked(self._access.open, where=where, what="open the object")
        self._compare(version)

    def _compare_checksum(self) -> None:
        stated = self.version.md5
        found = self._digest.hexdigest()
        if not stated or stated == found or self._access.tags.are_no_md5:
            return
        # Equal bytes twice are no fault of the wire: then what the store stated was no MD5.
        again = hashlib.md5(usedforsecurity=False)
        for start in range(0, self.version.num_bytes, _PART_BYTES):
            again.update(self._part(start, min(start + _PART_BYTES, self.version.num_bytes)))
        if again.hexdigest() == found:
            _log.info("%s: the store's ETags are no MD5s (encrypted objects?): not compared", self._access.where)
            self._access.tags.are_no_md5 = True
            return
        raise DataError(
            expected=f"bytes with the MD5 that the store says: {stated}",
            found=f"{found}, and {again.hexdigest()} when they were read again",
            where=self._access.where,
            ways_out=(
                "read it again: something between the store and here changes bytes",
                "copy the file by another way",
            ),
        )


def version_of(num_bytes: int, *, tag: str, etag: str = "") -> Version:
    """A version; an ETag of 32 hex digits is an MD5 until it is found to be none."""
    # Stores write ETags in quotes.
    plain = etag.strip('"').lower()
    return Version(num_bytes=num_bytes, tag=tag, md5=plain if _MD5.fullmatch(plain) else "")


def _described(version: Version) -> str:
    return f"{version.num_bytes:,} bytes, version {version.tag or 'unknown'}"


def _said(problem: Exception | str) -> str:
    text = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
    # In one line, since errors of stores hold whole pages.
    return " ".join(text.split())[:300]
