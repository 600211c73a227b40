"""A real server in processes of its own for tests: `running(config)` gives its address; it ends with the test."""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[3]
# Importing what a server needs takes seconds of a processor; a fork of a process that has it, a tenth of one.
_FORKS = multiprocessing.get_context("forkserver")


class ServerProcess(Protocol):
    """The first process of a server, as `subprocess` has it."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ForkedProcess:
    """A process of the fork server that serves the fake answerer, in the words of `subprocess`.

    Args:
        arguments: of `fake.py`.
        log: to which its errors go.
        environment: of the process.
    """

    def __init__(self, arguments: list[str], *, log: Path, environment: dict[str, str]) -> None:
        self._said, says = _FORKS.Pipe(duplex=False)
        self._process = _FORKS.Process(target=_serve_fake, args=(arguments, str(log), environment, says))
        self._process.start()
        says.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def first_line(self) -> str:
        """Return what it says first; "" where it ends before."""
        with open(os.dup(self._said.fileno())) as said:
            return said.readline().strip()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the fake server", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self._said.close()


def _serve_fake(arguments: list[str], log: str, environment: dict[str, str], says: Connection) -> None:
    """Be what `python -m tests.serving.server.fake` is, in a process of the fork server."""
    from tests.serving.server import fake

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    os.dup2(says.fileno(), 1)
    says.close()
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["fake", *arguments]
    fake.main()


class UnixConnection(http.client.HTTPConnection):
    """HTTP through a socket in the file system."""

    def __init__(self, path: str, *, timeout_s: float = 20.0) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


@dataclass(kw_only=True)
class Running:
    """A server and where it is."""

    process: ServerProcess
    port: int
    folder: Path
    log: Path

    @property
    def admin_socket(self) -> str:
        """The path that the server named at its start."""
        found = re.search(r"admin routes: curl --unix-socket (\S+)", self.log.read_text())
        assert found
        return found[1]

    def admin(self, path: str, data: Any) -> tuple[int, Any]:
        """Ask through the admin socket."""
        connection = UnixConnection(self.admin_socket)
        try:
            connection.request("POST", path, json.dumps(data))
            answer = connection.getresponse()
            return answer.status, json.load(answer)
        finally:
            connection.close()

    def post(self, path: str, data: Any, **headers: str) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(data).encode(),
            headers={"Content-Type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as problem:
            return problem.code, json.load(problem)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as problem:
            return problem.code, problem.read().decode()

    def recommend(self, **fields: Any) -> tuple[int, Any]:
        return self.post("/recommend", {"user": {"user_id": "u1"}, "k": 3} | fields)

    @property
    def private_copy(self) -> Path:
        """Where the server's own copy of the first export is."""
        (found,) = self.folder.glob(".ziggurat-served-*/*/export")
        return found

    @property
    def workers(self) -> list[int]:
        """Process ids of the supervisor's children."""
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def workers_left(self) -> bool:
        """Whether a process that was started for this server's folder still runs: one whose errors go into its log."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if os.path.samefile(entry / "fd/2", self.log):
                        return True
        return False


def write_export(folder: Path, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fake.json").write_text(json.dumps({"version": "v1"} | settings))
    return folder


@contextlib.contextmanager
def running(
    folder: Path, *, export: dict[str, Any] | None = None, accepted: Path | None = None, **settings: Any
) -> Iterator[Running]:
    """Start a server of the fake answerer, and end it with the block.

    Args:
        folder: for the export, the settings and the log.
        export: what its answerer is like; see `fake.py`.
        accepted: file to which its processes write who accepted which connection; None for no such file.
        settings: of the server.
    """
    place = write_export(folder / "export", **(export or {}))
    config = folder / "config.json"
    config.write_text(json.dumps({"port": 0, "linger_s": 0.3, "deadline_ms": 5000} | settings))
    log = folder / "log.txt"
    log.write_text("")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = [str(place), str(config)]
    if accepted is not None:
        arguments.append(str(accepted))
    process = ForkedProcess(arguments, log=log, environment=environment)
    try:
        address = process.first_line()
        assert address, log.read_text()
        yield Running(process=process, port=int(address.rpartition(":")[2]), folder=folder, log=log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        process.close()


def wait_until(true: Any, *, seconds: float = 60.0) -> None:
    """Wait until something is so; fail after some seconds: many, as machines are busy, and what comes is there soon."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
