"""A store that misbehaves as told: an fsspec file system over memory, under `flaky://`."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


@dataclass
class Faults:
    """What goes wrong; everything off by default.

    Args:
        drop_after: a connection breaks after so many bytes; 0 for never.
        most: bytes that the store ever serves of an object, whatever it says of its size; 0 for all.
        on_read: called with the position before each read; may raise, or change objects.
        flip: this many reads have their first byte changed.
        failing_lists: so many listings time out.
        etag: what the store says of the bytes' MD5: "md5", or "opaque" for something else of that form.
    """

    drop_after: int = 0
    most: int = 0
    on_read: Callable[[int], None] | None = None
    flip: int = 0
    failing_lists: int = 0
    etag: str = ""
    lists: int = 0
    opened: int = 0
    reads: list[tuple[int, int]] = field(default_factory=list)


class FlakyFile(io.RawIOBase):
    """One connection."""

    def __init__(self, content: bytes, faults: Faults) -> None:
        super().__init__()
        self._content, self._faults, self._position, self._served = content, faults, 0, 0
        faults.opened += 1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + {0: 0, 1: self._position, 2: len(self._content)}[whence]
        return self._position

    def read(self, num_bytes: int | None = -1) -> bytes:
        faults = self._faults
        if faults.on_read is not None:
            faults.on_read(self._position)
        stop = len(self._content) if num_bytes is None or num_bytes < 0 else self._position + num_bytes
        if faults.most:
            stop = min(stop, max(self._position, faults.most))
        if faults.drop_after:
            if self._served >= faults.drop_after:
                raise ConnectionResetError("the peer closed the connection")
            stop = min(stop, self._position + faults.drop_after - self._served)
        data = self._content[self._position : stop]
        faults.reads.append((self._position, len(data)))
        self._position += len(data)
        self._served += len(data)
        if faults.flip and data:
            faults.flip -= 1
            data = bytes([data[0] ^ 1]) + data[1:]
        return data


class FlakyFileSystem(MemoryFileSystem):
    """`flaky://`; what it does wrong stands in `faults`."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012  as in its parent
    pseudo_dirs = [""]  # noqa: RUF012
    faults = Faults()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://", 1))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **options)
        if path not in self.store:
            raise FileNotFoundError(path)
        return FlakyFile(self.store[path].getvalue(), self.faults)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found = super().info(path, **options)
        if self.faults.etag and found["type"] == "file":
            content = self.store[self._strip_protocol(path)].getvalue()
            key = b"" if self.faults.etag == "md5" else b"with a key"
            found["ETag"] = f'"{hashlib.md5(key + content, usedforsecurity=False).hexdigest()}"'
        return found

    def find(self, *arguments: Any, **options: Any) -> Any:
        self._count_list()
        return super().find(*arguments, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._count_list()
        return super().ls(path, detail=detail, **options)

    def _count_list(self) -> None:
        self.faults.lists += 1
        if self.faults.failing_lists:
            self.faults.failing_lists -= 1
            raise TimeoutError("the listing took too long")


def put(path: str, content: bytes) -> str:
    """An object of the store, written past its faults; returns its URL."""
    fsspec.filesystem("flaky").pipe(f"/{path}", content)
    return f"flaky://{path}"
