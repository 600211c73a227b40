"""A seal for Parquet files: checksums over every byte, inside the file, invisible to other readers.

Problem: Parquet's page checksums cover the values of a page, but neither the page's header nor the footer. Of 27,000
files with one flipped bit each, 5 were read without any error and with wrong values, although all page checksums had
been verified (a changed offset, encoding or type in the metadata).

Idea: Parquet is read from its end, by offsets, so bytes between the last row group and the footer disturb nobody.
There we put CRC-32s of the body in blocks of 1 MiB, and a SHA-256 over these and the footer:

    PAR1 │ row groups … │ crc crc … crc │ body bytes, count │ SHA-256 │ "ZIGSEAL1" │ footer │ length │ PAR1
         └── body ─────┘ └──────────────────── seal ───────────────────────────┘

A flipped bit in the body breaks its block's CRC, one in the seal or the footer breaks the SHA-256 (or the footer's
length, or the magic number). If it hits the seal's own magic number, the file counts as not sealed, and is unharmed.

Files that Ziggurat keeps for long are sealed: fetched data sets and synthetic ones.

The blocks of a row group are verified when it is read. Cost: 1 ms a MB; 4 bytes a MB and 56 bytes in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ziggurat.errors import DataError
from ziggurat.files.stores import DataPath, OpenedFile

_MAGIC = b"ZIGSEAL1"
_PARQUET_MAGIC = b"PAR1"
_BLOCK_BYTES = 1 << 20
_COUNTS = struct.Struct("<QQ")  # bytes of the body, number of blocks
_TAIL_BYTES = _COUNTS.size + 32 + len(_MAGIC)


def seal_parquet(path: str | Path) -> None:
    """Add a seal to a Parquet file that was just written. In place, so do it before the file gets its final name.

    Raises:
        DataError: not a Parquet file.
        OSError: the file cannot be written.
    """
    path = Path(path)
    with path.open("r+b") as file:
        body_bytes, size = _footer_start(file, path)
        crcs = np.array([_block_crc(file, i, body_bytes) for i in range(_num_blocks(body_bytes))], dtype="<u4")
        footer = _read_at(file, body_bytes, size - body_bytes)
        covered = crcs.tobytes() + _COUNTS.pack(body_bytes, len(crcs))
        digest = hashlib.sha256(covered + footer).digest()
        file.seek(body_bytes)
        # Readers find the footer from the end of the file, so what stands before it disturbs none of them.
        file.write(covered + digest + _MAGIC + footer)
        file.flush()
        os.fsync(file.fileno())


def is_sealed_and_whole(path: str | Path) -> bool:
    """Return whether a file has a seal, and every byte is as it was written."""
    try:
        seal = Seal.find(Path(path))
        if seal is None:
            return False
        seal.check(0, seal.body_bytes, what="the file")
    except (DataError, OSError):
        return False
    return True


@dataclass
class Seal:
    """The verified seal of an open file; `check` verifies parts of its body on demand.

    Args:
        path: the file, for errors.
        body_bytes: bytes that the blocks cover.
        crcs: CRC-32 of each block of 1 MiB.
        file: the file, open, where it lies in a store; a file of this machine is opened when it is needed.
    """

    path: DataPath
    body_bytes: int
    crcs: np.ndarray
    file: OpenedFile | None = None
    _checked: set[int] = field(default_factory=set)

    @staticmethod
    def find(path: DataPath, *, file: OpenedFile | None = None) -> Seal | None:
        """The seal of a file, or None if it has none.

        Args:
            path: the file.
            file: the same, open, if it lies in a store.

        Raises:
            DataError: the seal or the footer is damaged.
        """
        with _open(path, file) as opened:
            footer_start, size = _footer_start(opened, path)
            tail_start = footer_start - _TAIL_BYTES
            if tail_start < 0:
                return None
            tail = _read_at(opened, tail_start, _TAIL_BYTES)
            if not tail.endswith(_MAGIC):
                return None
            body_bytes, num_blocks = _COUNTS.unpack_from(tail)
            crc_start = tail_start - 4 * num_blocks
            footer = _read_at(opened, footer_start, size - footer_start)
            # Counts that do not fit the file are damage too: the digest below then differs.
            covered = b""
            if crc_start == body_bytes and num_blocks == _num_blocks(body_bytes):
                covered = _read_at(opened, crc_start, 4 * num_blocks) + tail[: _COUNTS.size]
        if hashlib.sha256(covered + footer).digest() != tail[_COUNTS.size : _COUNTS.size + 32]:
            raise _broken(f"{path}, footer", "the footer or the seal differs from what was written")
        return Seal(path, body_bytes, np.frombuffer(covered[: 4 * num_blocks], dtype="<u4"), file)

    def check(self, start: int, stop: int, *, what: str) -> None:
        """Verify the blocks that overlap bytes `start` to `stop`, which are `what`; each block is read once.

        Raises:
            DataError: a block is damaged; names its bytes.
        """
        with _open(self.path, self.file) as opened:
            for block in range(start // _BLOCK_BYTES, -(-min(stop, self.body_bytes) // _BLOCK_BYTES)):
                if block in self._checked:
                    continue
                if _block_crc(opened, block, self.body_bytes) != int(self.crcs[block]):
                    first = block * _BLOCK_BYTES
                    found = f"bytes {first:,} … {first + _BLOCK_BYTES:,} differ from what was written"
                    raise _broken(f"{self.path}, {what}", found)
                self._checked.add(block)


def _open(path: DataPath, file: OpenedFile | None) -> contextlib.AbstractContextManager[OpenedFile]:
    """The file for reading; one that is open already stays so."""
    return contextlib.nullcontext(file) if file is not None else path.open("rb")


def _num_blocks(body_bytes: int) -> int:
    return -(-body_bytes // _BLOCK_BYTES)


def _block_crc(file: OpenedFile | io.BufferedRandom, block: int, body_bytes: int) -> int:
    start = block * _BLOCK_BYTES
    return zlib.crc32(_read_at(file, start, min(_BLOCK_BYTES, body_bytes - start)))


def _footer_start(file: OpenedFile | io.BufferedRandom, path: DataPath) -> tuple[int, int]:
    """Return where the footer begins, and the bytes of the file."""
    size = file.seek(0, io.SEEK_END)
    end = _read_at(file, max(0, size - 8), 8)
    start = size - 8 - int.from_bytes(end[:4], "little") if len(end) == 8 else -1
    if start < len(_PARQUET_MAGIC) or not end.endswith(_PARQUET_MAGIC):
        raise DataError(
            expected=f"a Parquet file, which ends with {_PARQUET_MAGIC.decode()!r}",
            found=f"{size:,} bytes that end with {end[-4:].hex(' ') or 'nothing'}",
            where=f"{path}, footer",
            ways_out=("copy or write the file again: it is damaged or was cut short", "check that it is Parquet"),
        )
    return start, size


def _read_at(file: OpenedFile | io.BufferedRandom, start: int, num_bytes: int) -> bytes:
    file.seek(start)
    return file.read(max(num_bytes, 0))


def _broken(where: object, found: str) -> DataError:
    return DataError(
        expected="a sealed Parquet file as it was written",
        found=found,
        where=str(where),
        ways_out="copy or write the file again: it is damaged",
    )
