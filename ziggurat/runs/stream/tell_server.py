"""Tell a running server of a version that was published, or ask it until it has followed by itself.

    --server films.sock               its admin socket: POST /admin/swap {"export": "exports/live"}
    --server http://127.0.0.1:8080    GET /readyz, until it says the version: the server follows the folder by polling

A swap is asked for through the admin socket alone, which the file system guards (`serving/server/admin_socket.py`): no
port takes it, so a URL can only be asked. Both are done in a thread, while training goes on; how long it took from the
publication to the first answer with the version is said. A server that is gone, or that refuses, is said and no error:
it follows the folder when it is back. A stream that ends waits half a minute for the answer to its last version.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ziggurat.errors import ConfigError
from ziggurat.serving.export.published_folder import Publication

_TIMEOUT_S = 60.0  # to load a version and swap
_PAUSE_S = 0.2
_CLOSE_S = 30.0


class _SocketConnection(http.client.HTTPConnection):
    """HTTP through a socket in the file system."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class ServerToTell:
    """A server that is told of versions, one after the other, in a thread.

    Args:
        server: path of its admin socket, or its URL.
        folder: the published folder, which is named to it.
        say: says what became of it.
    """

    def __init__(self, server: str, *, folder: Path, say: Callable[[str], None]) -> None:
        self.check(server)
        self._server = server
        self._folder = folder
        self._say = say
        self._waiting: queue.SimpleQueue[tuple[Publication, float] | None] = queue.SimpleQueue()
        self._newest: Publication | None = None
        self._problem = ""  # of the latest trial
        self._has_given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tell the server", daemon=True)
        self._thread.start()

    @staticmethod
    def check(server: str) -> None:
        """Refuse what is neither a socket nor a URL; where nothing is yet, a server may come later.

        Raises:
            ConfigError: it is neither.
        """
        if "://" in server:
            found = _wrong_url(server)
            if not found:
                return
        else:
            try:
                if stat.S_ISSOCK(Path(server).stat().st_mode):
                    return
                found = "something else"
            except FileNotFoundError:
                return
            except OSError as problem:
                found = problem.strerror or str(problem)
        raise ConfigError(
            expected="the admin socket of a server, or its URL",
            found=found,
            where=f"--server {server}",
            ways_out=(
                "ziggurat serve FOLDER --server.admin-socket live.sock, and here --server live.sock",
                "its URL, which is asked until it has the version: --server http://127.0.0.1:8080",
                "leave --server out: a server follows its published folder by itself",
            ),
        )

    def tell(self, publication: Publication) -> None:
        """Tell the server of a version; returns at once."""
        self._newest = publication
        self._waiting.put((publication, time.monotonic()))

    def close(self) -> None:
        """Wait until the server has answered, within bounds; say it where it has not."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self._has_given_up.set()
            if self._newest is not None:
                reason = f" ({self._problem})" if self._problem else ""
                self._warn(self._newest, f"the stream ended before{reason}")

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            publication, since = entry
            problem = self._told(publication, until=since + _TIMEOUT_S)
            if self._has_given_up.is_set():  # and has said so
                return
            if problem:
                self._warn(publication, problem)
            else:
                self._say(f"served     version {publication.number}, {time.monotonic() - since:.1f} s after it")

    def _warn(self, publication: Publication, problem: str) -> None:
        self._say(f"warning: {self._server} does not answer with version {publication.number}: {problem}")

    def _told(self, publication: Publication, *, until: float) -> str:
        """Tell or ask until the server has the version; return what is in the way, or ""."""
        problem = "no time was left"
        self._problem = ""
        while time.monotonic() < until:
            try:
                with self._connection() as connection:
                    if _asked(connection, "GET", "/readyz")[1].get("version") == publication.version:
                        return ""
                    problem = "it serves another version"
                    if not _is_url(self._server):
                        body: dict[str, object] = {"export": str(self._folder.absolute())}
                        status, answer = _asked(connection, "POST", "/admin/swap", body)
                        problem = str(answer.get("error", {}).get("found", "")) if status != 200 else problem
                        # Another swap is under way, perhaps to this very version; all else will not change by waiting.
                        if status not in (200, 409) or (status == 409 and "under way" not in problem):
                            return problem or f"status {status}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = str(error) or type(error).__name__
            self._problem = problem
            # Not of the queue, in which the end of the stream is an entry too.
            if self._newest is not publication:
                return f"a later version came first ({problem})"
            if self._has_given_up.wait(_PAUSE_S):
                return problem
        return problem

    @contextlib.contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        place = urlsplit(self._server) if _is_url(self._server) else None
        if place is None:
            connection: http.client.HTTPConnection = _SocketConnection(self._server)
        elif place.scheme == "https":
            connection = http.client.HTTPSConnection(place.hostname or "", place.port, timeout=_TIMEOUT_S)
        else:
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=_TIMEOUT_S)
        with contextlib.closing(connection):
            yield connection


def _wrong_url(server: str) -> str:
    """Return what is wrong with the URL of a server, or ""."""
    if not _is_url(server):
        return f"a URL of {server.partition('://')[0]!r}"
    try:
        parts = urlsplit(server)
        _ = parts.port  # which is read, and may be none, when it is asked for
    except ValueError as error:
        return f"a URL that cannot be read: {error}"
    return "" if parts.hostname else "a URL without a host"


def _is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


def _asked(
    connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, object] | None = None
) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    return response.status, answer if isinstance(answer, dict) else {}
