"""RowFile: a file of rows that nobody else can see, with direct I/O where the system has it.

The file has no name (`O_TMPFILE`; where the file system lacks it, the name is removed at once). It is room for rows
that do not fit memory, and no more: what has to outlive the process is in checkpoints. So a process that is killed at
any instant leaves nothing behind, and two runs never meet in a folder.

Direct I/O (`O_DIRECT`) goes past the page cache: the memory that a table on disk takes is what its cache was given, and
no limit on memory is met by accident. Where a file system refuses it, pages are dropped after use instead
(`posix_fadvise`), which is advice; `is_direct` says which.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import weakref
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from ziggurat.errors import FileError
from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.row_file import reference
from ziggurat.ops.row_file.reference import RowLayout

NUM_THREADS = 8  # requests that wait for the disk at once
_SOURCE = CppSource(
    path=Path(__file__).parents[1] / "csrc" / "disk" / "row_file.cpp",
    flags=("-pthread",),
    without="go on without: Python reads and writes rows one by one, a few thousand a second",
)
_WAYS_OUT = {
    errno.ENOSPC: ("free space on this disk; the run goes on from its last checkpoint: --resume",),
    errno.EDQUOT: ("free space within the quota; the run goes on from its last checkpoint: --resume",),
    errno.EROFS: ("mount the file system for writing",),
    errno.EACCES: ("give this user write access to the folder",),
    errno.EFBIG: ("raise the limit on file sizes (ulimit -f), or choose a file system for larger files",),
    errno.ENOENT: ("make the folder, or mount the disk that it lies on",),
    errno.ENOTDIR: ("name a folder",),
}


class RowFile:
    """A sparse file of rows of equal size.

    Args:
        folder: on the disk that shall hold it; must exist.
        num_rows: R.
        payload_bytes: of a row's numbers, a multiple of four.
        num_threads: that wait for the disk at once.

    Raises:
        FileError: the file cannot be made; names the folder.

    Attributes:
        layout: where rows lie.
        is_direct: whether the page cache is left out.
    """

    def __init__(
        self, folder: str | Path, *, num_rows: int, payload_bytes: int, num_threads: int = NUM_THREADS
    ) -> None:
        assert payload_bytes > 0
        assert payload_bytes % 4 == 0
        self.folder = Path(folder)
        self.num_rows = num_rows
        self.layout = RowLayout(payload_bytes)
        self._num_threads = num_threads
        try:
            self._descriptor, self.is_direct = _nameless(self.folder)
            os.ftruncate(self._descriptor, self.layout.file_bytes(num_rows))
        except OSError as error:
            raise self._error(error, "make a file for rows of tables") from error
        # Closed with the object, also where nobody calls `close`; never twice, since its number may be reused.
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def read(self, rows_N: Int64[np.ndarray, "N"]) -> tuple[UInt8[np.ndarray, "N P"], UInt8[np.ndarray, "N"]]:
        """The numbers of rows, and the `RowState` of each.

        Args:
            rows_N: sorted, each once.

        Raises:
            FileError: the disk refuses.
        """
        rows_N = np.ascontiguousarray(rows_N, dtype=np.int64)
        library = None if why_not_cpp() else _LIBRARY.or_none()
        try:
            if library is None:
                return reference.read_rows(self._descriptor, self.layout, rows_N)
            out = np.empty((len(rows_N), self.layout.payload_bytes), dtype=np.uint8)
            states = np.empty(len(rows_N), dtype=np.uint8)
            where = self._descriptor, *self._shape(), rows_N.ctypes.data, len(rows_N)
            code = library.ziggurat_read_rows(*where, out.ctypes.data, states.ctypes.data, self._num_threads)
            _raise(code)
        except OSError as error:
            raise self._error(error, "read rows of tables") from error
        self._forget()
        return out, states

    def write(self, rows_N: Int64[np.ndarray, "N"], payload_NP: UInt8[np.ndarray, "N P"]) -> None:
        """Write rows; one thread at a time.

        Args:
            rows_N: sorted, each once.
            payload_NP: their numbers.

        Raises:
            FileError: the disk refuses; some of the rows may be written.
        """
        rows_N = np.ascontiguousarray(rows_N, dtype=np.int64)
        payload_NP = np.ascontiguousarray(payload_NP)
        assert payload_NP.shape == (len(rows_N), self.layout.payload_bytes), payload_NP.shape
        library = None if why_not_cpp() else _LIBRARY.or_none()
        try:
            if library is None:
                reference.write_rows(self._descriptor, self.layout, rows_N, payload_NP)
                return
            where = self._descriptor, *self._shape(), rows_N.ctypes.data, len(rows_N)
            _raise(library.ziggurat_write_rows(*where, payload_NP.ctypes.data, self._num_threads))
        except OSError as error:
            raise self._error(error, "write rows of tables") from error
        self._forget()

    @property
    def disk_bytes(self) -> int:
        """The bytes of the disk that the file takes now."""
        # Blocks of stat are 512 bytes, whatever the file system's are.
        return 512 * os.fstat(self._descriptor).st_blocks

    def close(self) -> None:
        """Give the disk back. Harmless to repeat."""
        self._close()

    def _shape(self) -> tuple[int, int, int, int]:
        layout = self.layout
        return layout.payload_bytes, layout.row_bytes, layout.rows_per_unit, layout.unit_bytes

    def _forget(self) -> None:
        if not self.is_direct:
            # The kernel would keep what was read, and a table on disk is to take no more memory than its cache.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _error(self, error: OSError, what: str) -> FileError:
        ways_out = _WAYS_OUT.get(error.errno or 0, ("look for disk errors in the system log (dmesg)",))
        return FileError(
            expected=f"to {what}",
            found=error.strerror or str(error),
            where=str(self.folder),
            ways_out=(*ways_out, "name a folder on another disk: --tables.disk FOLDER"),
        )


def why_not_cpp() -> str:
    """Say why C++ cannot be used here, or return "" if it can."""
    return _LIBRARY.reason


def _nameless(folder: Path) -> tuple[int, bool]:
    """A file without a name, and whether I/O of it is direct."""
    direct = getattr(os, "O_DIRECT", 0) if not why_not_cpp() else 0  # Python's buffers are not aligned
    temporary = getattr(os, "O_TMPFILE", 0)
    for flags in dict.fromkeys((direct, 0)):
        if temporary:
            try:
                return os.open(folder, os.O_RDWR | os.O_CLOEXEC | temporary | flags, 0o600), bool(flags)
            except OSError as error:
                # What kernels and file systems without O_TMPFILE, or without O_DIRECT, answer.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                    raise
        # For a name that nobody has; it cannot open with O_DIRECT, so the file is opened a second time.
        handle, name = tempfile.mkstemp(dir=folder, prefix=".tables-")
        try:
            os.close(handle)
            return os.open(name, os.O_RDWR | os.O_CLOEXEC | flags), bool(flags)
        except OSError as error:
            if error.errno != errno.EINVAL or not flags:
                raise
        finally:
            # At once, also where the second opening failed: a process that is killed leaves no name.
            os.unlink(name)
    raise AssertionError("unreachable")


def _raise(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


def _declare(library: ctypes.CDLL) -> None:
    read = library.ziggurat_read_rows
    write = library.ziggurat_write_rows
    read.restype = write.restype = c_int64
    read.argtypes = [c_int, *[c_int64] * 4, c_void_p, c_int64, c_void_p, c_void_p, c_int64]
    write.argtypes = [c_int, *[c_int64] * 4, c_void_p, c_int64, c_void_p, c_int64]


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
