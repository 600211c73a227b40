"""What uvicorn lacks for a server under attack or under way to its end: limits of time and size, and a kind drain.

`Connection` (uvicorn's httptools protocol with limits):

- *receiving*: from the first byte of a request (or from the connection's begin) the whole request must be there within
  `receive_timeout_s`, however steadily bytes trickle in; else 408 and the end. A client that sends one byte a second
  ("slow loris") holds a connection for that long, not for ever.
- *sending*: a client that does not take its answer loses its connection after `send_timeout_s`.
- request line and headers together: 431 beyond `max_header_bytes`; no more than `max_connections` connections.
- a body in chunks: 413 when what stands between its bytes, which the app never sees (extensions of chunks, RFC 9112,
  7.1.1), grows beyond `max_header_bytes`.
- headers that say two things, or whom a page in a browser deceives: `hosts.py`.
- a connection of the admin socket is marked as one, for the routes that answer nobody else.

`DrainingServer` (uvicorn's server, ending differently). uvicorn closes idle connections at once when it ends: a request
that was on its way on one of them is lost. Here the listener's last connections are accepted first, then each
connection ends after its next answer (`Connection: close`) or when it was idle for `linger_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import select
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ziggurat.errors import RequestError
from ziggurat.serving.server.admin_socket import ADMIN
from ziggurat.serving.server.arrivals import note_arrival
from ziggurat.serving.server.config import BACKLOG, ServerConfig
from ziggurat.serving.server.hosts import Hosts, WrongHead, shown
from ziggurat.serving.server.responses import encode, error_json

if TYPE_CHECKING:  # its files are chosen by the environment, so that it is imported after that is set
    from prometheus_client import Counter

_ACCEPTED_AT_ONCE = 16  # connections a worker takes before another one gets a turn
_LAST_TURNS = 1000  # of the event loop at the end, as long as connections wait
_SETTLE_S = 0.05  # asyncio accepts a connection some turns before its protocol has it, and drops it if closed between
_UPGRADE = re.compile(rb"\r\nupgrade[ \t]*:", re.IGNORECASE)
_HEADERS_TOO_LARGE = (b"431 Request Header Fields Too Large", "headers too large")
_HEAD_FRAME = 64  # bytes of a head that are neither path nor header: method, version, line ends
_CHUNK_FRAME = 24  # bytes of a chunk that need no reason: 16 digits of its size, two line ends, some to spare
_CHUNK_WAYS = ("send chunks without extensions", "send Content-Length instead of Transfer-Encoding: chunked")
_WAYS = ("send the whole request at once", "see the limits under /info")
_TOO_LARGE_FOR_PARSER = "Content-Length overflow"  # the parser's words for a size that 64 bits do not hold
_BODY_WAYS = ("send fewer bytes: see the limits under /info",)
_TEXT_WAYS = (
    "end lines with \\r\\n, write a header's name and its colon without a space, and leave control characters out",
    "send one header Content-Length, of digits alone, or Transfer-Encoding: chunked, and not both",
    "speak HTTP, without TLS, which a proxy in front of the server may end",
)
_log = logging.getLogger("ziggurat.server")


def _without_upgrade(data: bytes) -> bytes:
    """The begin of a request without its wish for another protocol, whose parser would leave out the body.

    RFC 9110, 7.8: a server may ignore Upgrade. Clients offer HTTP/2 so (curl --http2, Java's by default).
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-ignored-upgrade:", head) + end + rest


def _wrong_text(error: BaseException | None) -> str:
    """Return what the parser finds wrong, in its words, which name the header; "" where it says nothing."""
    return str(error) if isinstance(error, httptools.HttpParserError) else ""


class CountsClosed(Protocol):
    """Figures of a server or of a shard, as far as connections add to them."""

    @property
    def closed(self) -> Counter:
        """The connections that were closed, by reason."""
        ...


class Connection(HttpToolsProtocol):
    """One client's connection with limits of time and size; made by `uvicorn_config`."""

    limits: ServerConfig
    metrics: CountsClosed
    hosts: Hosts
    draining = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to count the time of the first request."""
        super().connection_made(transport)
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._header_bytes = 0  # of path and headers, as the parser gave them
        self._head_read = 0  # of a head that is not there whole, which the parser keeps to itself
        self._between_chunks = 0
        self._in_trailer = False
        self._message = 0
        self._in_message = self._has_headers = False
        self._has_cycle = False  # the message that is being received will be answered by the app
        self._refusal: bytes | None = None  # of a request, until those before it are answered
        self._wrong_head: WrongHead | None = None
        self._socket = transport.get_extra_info("socket")
        # Only the operator's socket is one of the file system.
        self._is_admin = self._socket.family == socket.AF_UNIX
        # Whoever fills the port must not shut out the operator, whose own connections are few.
        if len(self.connections) > self.limits.max_connections and not self._is_admin:
            self._refuse(b"503 Service Unavailable", "too many connections", b"retry-after: 1\r\n")
            return
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._received()
        self._sent()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Let uvicorn parse, and count the bytes of headers that are not there whole."""
        # Bytes that arrive behind a refusal belong to nobody.
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._receiving is None and self.idle:
            self._expect_request()  # bytes that begin no message, such as empty lines, take time too
        if self.idle:
            data = _without_upgrade(data)
            if len(data) > self.limits.max_header_bytes:  # the body alone, so that what is no body of it is counted
                head, end, rest = data.partition(b"\r\n\r\n")
                self._parse(head + end)
                data = rest
        # In pieces, so that what is beside the body is counted before the parser has swallowed all of it.
        while self._in_chunks and len(data) > self.limits.max_header_bytes:
            self._parse(data[: self.limits.max_header_bytes])
            data = data[self.limits.max_header_bytes :]
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Let uvicorn parse some bytes, unless the connection was refused, and count those that it keeps to itself."""
        if not data or self.transport.is_closing() or self._refusal is not None:
            return
        # As it was before these bytes: the parser may end this message, and begin others, while it reads them.
        message = self._message
        is_body = self._in_chunks
        was_in_message = self._in_message
        super().data_received(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._in_message and not self._has_headers:
            # Bytes of the message before, in the same piece, are none of this head.
            is_of_head = self._message == message + (0 if was_in_message else 1)
            self._head_read += len(data) if is_of_head else 0
            if self._head_read > self.limits.max_header_bytes + _HEAD_FRAME:
                self._refuse(*_HEADERS_TOO_LARGE)
        elif not is_body or self._message != message:
            self._between_chunks = 0
        elif self._in_message:
            self._between_chunks += len(data)
            if self._between_chunks > self.limits.max_header_bytes and self._in_trailer:
                self._refuse(*_HEADERS_TOO_LARGE)
            elif self._between_chunks > self.limits.max_header_bytes:
                found = f"more than {self.limits.max_header_bytes:,} bytes beside the body, in extensions of its chunks"
                reason = "chunk extensions too large"
                self._refuse(b"413 Content Too Large", reason, found=found, ways_out=_CHUNK_WAYS)

    @property
    def _in_chunks(self) -> bool:
        """True if the body that is being received comes in chunks."""
        return self._in_message and self._has_headers and any(name == b"transfer-encoding" for name, _ in self.headers)

    def on_chunk_header(self) -> None:
        """The line with the size of a chunk is there: bytes follow, or, behind the last one, trailers."""
        # The line of a chunk's size has to be there: only what is beside it and the body counts.
        self._between_chunks -= _CHUNK_FRAME
        self._in_trailer = True

    def on_body(self, body: bytes) -> None:
        """A part of the body is there."""
        self._between_chunks -= len(body)
        self._in_trailer = False
        super().on_body(body)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether the connection stays open, for the answer to what it sent before."""
        # Half a request will never be whole, and without a request no answer is due.
        if self._in_message or self.idle:
            return False
        # The answer that is under way is still written, and nothing comes after it.
        self.cycle.keep_alive = False
        return True

    def on_message_begin(self) -> None:
        """A request begins: it has its own time."""
        self._in_message = True
        self._message += 1
        self._has_headers = False
        self._has_cycle = False
        self._header_bytes = 0
        self._head_read = 0
        # The timer of the connection's begin, or of empty lines, gives way to that of this request.
        self._received()
        self._expect_request()
        super().on_message_begin()
        # Marked in the scope, which is all that the app sees of a connection.
        if self._is_admin:
            self.scope[ADMIN] = True  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        """A part of the path is there."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header is there whole, or a trailer behind a body in chunks, which is none (RFC 9110, 6.5.1)."""
        # The colon, the space and the line end come with each header.
        self._count(len(name) + len(value) + 4)
        if not self._has_headers:
            super().on_header(name, value)

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self.limits.max_header_bytes:
            raise ValueError("headers too large")  # the parser stops, and uvicorn asks for a 400

    def on_headers_complete(self) -> None:
        """All headers are there: if they are in order, the request goes to the app."""
        self._has_headers = True
        self._header_bytes = 0
        assert self.parser is not None
        self._wrong_head = self.hosts.wrong_head(
            self.parser.get_http_version(), self.url, self.headers, is_admin=self._is_admin
        )
        if self._wrong_head is not None:
            raise ValueError(self._wrong_head.found)  # the parser stops, and uvicorn asks for a 400
        super().on_headers_complete()
        self._has_cycle = True
        # It came while the server was ending: it is answered, and is the last one of its connection.
        if self.draining and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """It is there whole."""
        self._received()
        self._in_message = False
        note_arrival(self.scope, self._socket)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and headers beyond the limit, in four parts."""
        if self._header_bytes > self.limits.max_header_bytes:
            self._refuse(*_HEADERS_TOO_LARGE)
        elif self._wrong_head is not None:
            wrong = self._wrong_head
            self._refuse(wrong.status, "wrong headers", found=wrong.found, ways_out=wrong.ways_out)
        else:
            why = _wrong_text(sys.exc_info()[1])  # uvicorn calls this where it caught the parser's error
            is_too_large = why == _TOO_LARGE_FOR_PARSER
            status = b"413 Content Too Large" if is_too_large else b"400 Bad Request"
            # The parser knows no name of a header that it cannot read, but of the one before.
            is_in_header = why.startswith("Invalid header") and not self._has_headers and bool(self.headers)
            behind = f", behind header {shown(self.headers[-1][0])}" if is_in_header else ""
            found = f"not HTTP/1.1: {why}{behind}" if why else ""
            self._refuse(status, "not HTTP/1.1", found=found, ways_out=_BODY_WAYS if is_too_large else _TEXT_WAYS)

    def drain(self) -> None:
        """End after the next answer."""
        self.draining = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    @property
    def idle(self) -> bool:
        """True if nothing is being received or answered."""
        return not self._in_message and (self.cycle is None or self.cycle.response_complete)

    # ---- time to receive

    def _expect_request(self) -> None:
        self._receiving = self.loop.call_later(self.limits.receive_timeout_s, self._receive_timeout)

    def _received(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _receive_timeout(self) -> None:
        self._receiving = None
        if not self.transport.is_closing():
            self._refuse(b"408 Request Timeout", "request not received in time")

    # ---- time to send

    def pause_writing(self) -> None:
        """The client takes its answer slowly: begin to count."""
        super().pause_writing()
        if self._sending is None:
            self._sending = self.loop.call_later(self.limits.send_timeout_s, self._send_timeout)

    def resume_writing(self) -> None:
        """The client took it."""
        super().resume_writing()
        self._sent()

    def _sent(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _send_timeout(self) -> None:
        self.metrics.closed.labels("answer not taken in time").inc()
        # Aborted, not closed: closing waits for bytes that this client does not take.
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, and one with an answer that nobody takes soon after."""
        self._close()

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
        # Bytes that are still to be written get that long; then the connection goes all the same.
        self.loop.call_later(self.limits.send_timeout_s, self.transport.abort)

    def _refuse(
        self, status: bytes, reason: str, extra: bytes = b"", *, found: str = "", ways_out: tuple[str, ...] = _WAYS
    ) -> None:
        """Answer without the app, unless an answer is under way, and close; requests before it are answered first.

        Args:
            status: with its phrase.
            reason: for the metrics.
            extra: headers.
            found: what was wrong, where `reason` does not say it.
            ways_out: of the error.
        """
        self._received()
        self.metrics.closed.labels(reason).inc()
        is_own = self._in_message and self._has_cycle
        if is_own and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()  # it waits for the requests before it, and is not answered by the app
            must_wait = True
        else:
            # An answer to an earlier request is on its way, and a refusal must not overtake it.
            must_wait = not is_own and self.cycle is not None and not self.cycle.response_complete
        if must_wait or self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            error = RequestError(
                expected="a request of HTTP/1.1 within the server's limits",
                found=found or reason,
                where="connection",
                ways_out=ways_out,
            )
            body = encode(error_json(error))
            head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (status, len(body))
            refusal = head + extra + b"connection: close\r\n\r\n" + body
            if must_wait:
                self._refusal = refusal
                self._in_message = False  # nothing more is read
                return
            self.transport.write(refusal)
        self._close()

    def on_response_complete(self) -> None:
        """An answer is written: the next request has its turn, or what was refused behind the last one."""
        # Asked before uvicorn takes the next one off the line.
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self._refusal is not None and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self._close()


def uvicorn_config(
    app: ASGIApp, *, config: ServerConfig, metrics: CountsClosed, has_key: bool = False
) -> uvicorn.Config:
    """Settings of uvicorn for an app of ours.

    Args:
        app: the ASGI app.
        config: limits and timeouts.
        metrics: counts the connections that are closed.
        has_key: requests need an API key.
    """
    shared = {"limits": config, "metrics": metrics, "hosts": Hosts.of(config, has_key=has_key)}
    # uvicorn makes the protocol itself, with arguments of its own: what is ours comes with the class.
    protocol = type("LimitedConnection", (Connection,), shared)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        log_level="error",  # each connection that is refused is counted in /metrics, not logged
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]
        backlog=_ACCEPTED_AT_ONCE,
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that loses no request when it ends.

    Args:
        config: of uvicorn, by `uvicorn_config`.
        limits: how long it lingers and drains.
        listener: the socket to accept from; it may be shared with other processes.
        admin: the admin socket, likewise; None where there is none.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        limits: ServerConfig,
        listener: socket.socket,
        admin: socket.socket | None = None,
    ) -> None:
        super().__init__(config)
        self.limits = limits
        self.listener = listener
        self.listeners = [listener] if admin is None else [listener, admin]

    def closed_to_new(self) -> None:
        """Called when no connection is accepted any more; for subclasses."""

    def out_of_time(self) -> None:
        """Called when `drain_s` is over and requests are not answered yet; for subclasses."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and let the kernel keep more connections than asyncio takes at once."""
        await super().startup(sockets=self.listeners)
        # Called once more, since asyncio's own call has set a shorter backlog.
        self.listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the worker or the test that runs this server."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept what waits, answer what came, close the rest."""
        for _ in range(_LAST_TURNS):
            # Nobody waits to be accepted any more.
            if not select.select(self.listeners, [], [], 0)[0]:
                break
            # One turn of the loop, in which asyncio accepts what is there.
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        for listener in self.listeners:
            loop.remove_reader(listener.fileno())  # no more; asyncio drops the last ones if it is closed right now
        await asyncio.sleep(_SETTLE_S)
        for server in self.servers:
            server.close()
        self.closed_to_new()
        for connection in self._connections():
            connection.drain()
        begin = loop.time()
        while self._connections() and loop.time() - begin < self.limits.drain_s:
            if loop.time() - begin >= self.limits.linger_s:
                for connection in self._connections():
                    if connection.idle and not connection.transport.is_closing():
                        connection._close()
            await asyncio.sleep(0.01)
        if self._connections():
            self.out_of_time()
            await asyncio.sleep(_SETTLE_S)  # for the answers of who waited for something else than a computation
        for connection in self._connections():
            _log.warning("a request was not answered within drain_s = %g s", self.limits.drain_s)
            connection.transport.abort()
        await self.lifespan.shutdown()

    def _connections(self) -> list[Connection]:
        """Return the connections that are open now; a copy, since each that ends takes itself out of uvicorn's set."""
        return [each for each in self.server_state.connections if isinstance(each, Connection)]
