"""Files that are either whole and on disk, or not there: hashing while writing, fsync, strict opening.

A write is durable in four steps, and any of them may fail with a full or broken disk:

    write + hash ──► fsync(file) ──► read back from the disk and hash again ──► fsync(folder)

Reading back drops the pages from the cache first (where the system allows), so that it asks the disk rather than
memory; a checkpoint is published, and an older one deleted, only after that. Files are read with O_NOFOLLOW and must
be regular files of exactly the expected size, so a symbolic link, a pipe or a device in a checkpoint is refused.

Tensors lie in the safetensors format (https://github.com/huggingface/safetensors): eight bytes of header length, a
JSON header, then the bytes of each tensor. The header needs only shapes, so it is written before any data.

Cost: one SHA-256 for writing, one for reading back (about 1.5 GB/s a core with SHA instructions), both outside of
Python's lock; memory is one block of 8 MiB.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint.errors import damaged, reading, writing

BLOCK_BYTES = 8 << 20
_LARGE_BYTES = 1 << 30  # a file that takes a second to read
_MIN_SHARE = 1000  # a thousandth of it must be there
_MAX_PIECES = 10_000
_FICLONE = 0x40049409
_NO_LINKS = (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EINVAL)

DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
CODE_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """The exact size and the SHA-256 in hexadecimal that a file must have to count as intact."""

    size_bytes: int
    sha256: str


class DurableFile:
    """A new file that hashes what is written to it; `finish` makes it durable and verifies it.

    Args:
        path: must not exist yet.

    Raises:
        CheckpointError: from any method, if the system refuses; names the path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, in blocks, so that a short write or a slow disk never holds more than one block."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self._hash.update(block)
            with writing(self._path):
                while block:
                    block = block[os.write(self._descriptor, block) :]
        self._size_bytes += len(view)

    def finish(self) -> FileRecord:
        """Flush to the disk, close, read back; returns what the file must be from now on."""
        with writing(self._path):
            os.fsync(self._descriptor)
            # Forget the pages, so that reading back asks the disk. Only advice: some file systems ignore it.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        self.close()
        record = FileRecord(size_bytes=self._size_bytes, sha256=self._hash.hexdigest())
        verify_file(self._path, record)
        return record

    def close(self) -> None:
        """Close without the promise of `finish`. Harmless to repeat."""
        if self._descriptor >= 0:
            descriptor = self._descriptor
            self._descriptor = -1
            with writing(self._path):
                os.close(descriptor)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(CheckpointError):  # an error worth telling is already on its way
            self.close()


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a small file durably and verify it."""
    with DurableFile(path) as file:
        file.write(data)
        return file.finish()


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: a rename is only on disk after this."""
    with writing(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def link(source: Path, target: Path) -> str:
    """One more name for a file, or a copy that shares its extents; why there is neither."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        refused = error.strerror or str(error)
    else:
        return ""
    try:
        with source.open("rb") as one, target.open("xb") as other:
            fcntl.ioctl(other.fileno(), _FICLONE, one.fileno())
            os.fsync(other.fileno())
    except OSError:
        with suppress(OSError):
            target.unlink()
        return refused
    return ""


def why_no_links(folder: Path) -> str:
    """Say why files of this folder cannot be linked, or return "" if they can. Nothing is left behind."""
    source, target = (folder / f".link-{what}-{os.getpid()}" for what in ("from", "to"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        source.write_bytes(b"1")
        return link(source, target)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for path in (source, target):
            with suppress(OSError):
                path.unlink()


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A read-only descriptor of a regular file; a link, pipe, folder or device raises `DamagedCheckpointError`."""
    with reading(path):
        if path.is_symlink():
            raise damaged(path, expected="a regular file", found="a symbolic link")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise damaged(path, expected="a regular file", found="a folder, pipe or device")
            yield descriptor
        finally:
            os.close(descriptor)


def verify_file(path: Path, record: FileRecord) -> None:
    """Read the whole file and compare size and SHA-256; raises `DamagedCheckpointError` naming it."""
    with open_regular(path) as descriptor:
        check_size(path, descriptor, record)
        _refuse_holes(path, descriptor, record)
        digest = hashlib.sha256()
        block = memoryview(bytearray(min(BLOCK_BYTES, max(record.size_bytes, 1))))
        while count := os.readv(descriptor, [block]):
            digest.update(block[:count])
    if digest.hexdigest() != record.sha256:
        raise damaged(path, expected=f"SHA-256 {record.sha256}", found=f"SHA-256 {digest.hexdigest()}")


def check_size(path: Path, descriptor: int, record: FileRecord) -> None:
    """Compare the size alone; raises `DamagedCheckpointError` naming the file."""
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes != record.size_bytes:
        raise damaged(path, expected=f"{record.size_bytes} bytes", found=f"{size_bytes} bytes")


def _refuse_holes(path: Path, descriptor: int, record: FileRecord) -> None:
    """Refuse a large file of which the disk has nearly nothing, before an hour is spent on reading zeros.

    An interrupted copy, or `truncate`, leaves such files. Weights are no zeros; a file system that packs the zeros of
    an optimizer's state away still has the weights.
    """
    if record.size_bytes < _LARGE_BYTES:
        return
    there = 0
    position = 0
    with suppress(OSError):  # ENXIO: no data after `position`
        for _ in range(_MAX_PIECES):
            first = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, first, os.SEEK_HOLE)
            there += position - first
            if there * _MIN_SHARE >= record.size_bytes:
                break
    os.lseek(descriptor, 0, os.SEEK_SET)
    if there * _MIN_SHARE < record.size_bytes:
        raise damaged(
            path, expected=f"{record.size_bytes} bytes on the disk", found=f"{there} bytes; the rest are holes"
        )


def read_small_file(path: Path, *, max_bytes: int) -> bytearray:
    """The bytes of a file that must not be larger than `max_bytes`."""
    with open_regular(path) as descriptor:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > max_bytes:
            raise damaged(path, expected=f"at most {max_bytes} bytes", found=f"{size_bytes} bytes")
        return read_exactly(path, descriptor, start=0, num_bytes=size_bytes)


def read_exactly(path: Path, descriptor: int, *, start: int, num_bytes: int) -> bytearray:
    """`num_bytes` bytes from `start`; a file that ends earlier is damaged."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    done = 0
    with reading(path):
        while done < num_bytes:
            count = os.preadv(descriptor, [view[done : done + BLOCK_BYTES]], start + done)
            if count == 0:
                raise damaged(path, expected=f"{num_bytes} bytes from byte {start}", found=f"the end after {done}")
            done += count
    return data


def safetensors_header(entries: Sequence[tuple[str, torch.dtype, Sequence[int], int]]) -> bytes:
    """The start of a safetensors file for (name, dtype, shape, bytes) in the order of the data.

    Padded with spaces to a multiple of eight bytes, so that the data that follows is aligned.
    """
    header: dict[str, object] = {}
    start = 0
    for name, dtype, shape, num_bytes in entries:
        assert name not in header, name
        offsets = [start, start + num_bytes]
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": offsets}
        start += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, a block at a time, wherever it lives and however it is strided.

    A contiguous tensor in host memory is not copied at all.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if tensor.is_contiguous() and tensor.device.type == "cpu":
        yield _bytes_of(tensor)
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, tensor.shape[0], step):
        yield _bytes_of(tensor[start : start + step].to("cpu").contiguous())


def _bytes_of(tensor: Tensor) -> memoryview:
    # Dimensions of size 1 may have any stride in a contiguous tensor, and `view` would refuse them.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
