"""The supervisor's answer to connections that no worker takes: 503 at once, instead of silence and a reset.

While a server ends, and while none of its workers serves, the kernel goes on accepting connections for it. Here the
supervisor takes them, answers 503 with Retry-After to whatever they ask, and closes them when the client has read that.
`GET /livez` is 200: the process runs. Nothing is parsed beyond that, and nothing waits: all sockets are non-blocking,
each has seconds, and there are few of them at once.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time

from ziggurat.errors import UnavailableError
from ziggurat.serving.server.responses import encode, error_json

_MAX_CONNECTIONS = 64  # connections at once; more wait in the kernel
_TIMEOUT_S = 2.0  # for a request, and for its client to close

_BUSY = encode(
    error_json(
        UnavailableError(
            expected="a worker that takes requests",
            found="none: the server ends, or its workers are being started",
            where="server",
            ways_out=("ask again in a second", "ask another server"),
        )
    )
)


def _answer(status: bytes, body: bytes, extra: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (status, len(body))
    return head + extra + b"connection: close\r\n\r\n" + body


_UNAVAILABLE = _answer(b"503 Service Unavailable", _BUSY, b"retry-after: 1\r\n")
_ALIVE = _answer(b"200 OK", b'{"live":true}')


class StandIn:
    """Answers the connections of a listener in the place of its workers, while it is `on`.

    Args:
        listener: non-blocking; shared with the workers.
        selector: of the supervisor; keys of ours have this object as their data.
    """

    def __init__(self, *, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        self._listener = listener
        self._selector = selector
        self._deadlines: dict[socket.socket, float] = {}
        self._answered: set[socket.socket] = set()
        self._is_on = False

    def turn(self, *, on: bool) -> None:
        """Accept the connections of the listener, or leave them to the workers; and close those past their deadline."""
        wanted = on and len(self._deadlines) < _MAX_CONNECTIONS
        if wanted != self._is_on:
            self._is_on = wanted
            if wanted:
                self._selector.register(self._listener, selectors.EVENT_READ, self)
            else:
                self._selector.unregister(self._listener)
        now = time.monotonic()
        for connection in [each for each, deadline in self._deadlines.items() if deadline < now]:
            if connection in self._answered:
                self._close(connection)
                continue
            # The time may have passed while this process was stopped: what came meanwhile has not been read yet.
            self._read(connection)
            self._answer_silent(connection)
            if connection in self._deadlines:
                self._deadlines[connection] = now + _TIMEOUT_S

    def handle_ready(self, ready: object) -> None:
        """Accept or read from a socket that the selector found ready."""
        if ready is self._listener:
            self._accept()
        elif isinstance(ready, socket.socket) and ready in self._deadlines:
            self._read(ready)

    def end(self) -> None:
        """Answer what waits in the kernel, and close."""
        self.turn(on=False)
        self._accept()
        end = time.monotonic() + 0.2
        while self._deadlines and time.monotonic() < end:
            for key, _ in self._selector.select(0.02):
                if key.data is self:
                    self.handle_ready(key.fileobj)
        for connection in list(self._deadlines):
            self._answer_silent(connection)
            self._close(connection)

    def close_inherited(self) -> None:
        """Close the connections in a child of the supervisor, which does not own them."""
        for connection in self._deadlines:
            connection.close()

    def _accept(self) -> None:
        while len(self._deadlines) < _MAX_CONNECTIONS:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no connection waits, or another process was faster
                return
            connection.setblocking(False)
            self._deadlines[connection] = time.monotonic() + _TIMEOUT_S
            self._selector.register(connection, selectors.EVENT_READ, self)

    def _answer_silent(self, connection: socket.socket) -> None:
        """Answer 503 to a client that has sent nothing before its deadline."""
        if connection in self._deadlines and connection not in self._answered:
            with contextlib.suppress(OSError):  # it has closed the connection meanwhile
                self._send(connection, _UNAVAILABLE)

    def _send(self, connection: socket.socket, answer: bytes) -> None:
        self._answered.add(connection)
        connection.send(answer)
        # Only the sending half: the client closes when it has read the answer.
        connection.shutdown(socket.SHUT_WR)

    def _read(self, connection: socket.socket) -> None:
        """Answer the first bytes of a client; then read until it closes, since a reset would take the answer away."""
        try:
            data = connection.recv(65536)
            if data and connection not in self._answered:
                self._send(connection, _ALIVE if data.startswith(b"GET /livez ") else _UNAVAILABLE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # a reset: the client reads no answer any more
            data = b""
        if not data:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        del self._deadlines[connection]
        self._answered.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()
