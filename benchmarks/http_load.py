"""A load generator for HTTP on this machine: requests at random times, each timed from when it was due.

Arrivals are a Poisson process: they do not wait for answers, as users do not wait for each other. A request's time
begins when it was due, not when a connection was free for it, so that a server that stops for a second is charged for
all that came meanwhile (a generator that waits for answers before it asks again would hide them).

Connections stay open and are reused; more are opened while all are in use. A connection that the server closed between
two requests is replaced, and the request sent again, as every HTTP client does; that is counted in `Shots.resent`.

    shots = await fire(Target(port=8080, path="/recommend", bodies=(b"{…}",)), rate=500, seconds=5)
    shots.percentile(99), shots.count(200)
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ziggurat.errors import ConfigError

_TIMER_S = 0.0015
FAILED = 0  # status of a request without an answer


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is asked of which server.

    Args:
        port: on this machine.
        bodies: one after the other; () for GET.
        headers: further ones, each with its line end.
        host: an address of this machine.
    """

    port: int
    path: str = "/recommend"
    bodies: Sequence[bytes] = ()
    headers: bytes = b""
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if not ipaddress.ip_address(self.host).is_loopback:
            raise ConfigError(
                expected="an address of this machine (127.0.0.1)",
                found=self.host,
                where="load generator",
                ways_out="put load on servers of your own alone, on this machine",
            )

    def requests(self) -> list[bytes]:
        """The bytes of each request."""
        head = f" {self.path} HTTP/1.1\r\nhost: localhost\r\n".encode() + self.headers
        if not self.bodies:
            return [b"GET" + head + b"\r\n"]
        return [b"POST" + head + b"content-length: %d\r\n\r\n" % len(body) + body for body in self.bodies]


@dataclass(kw_only=True)
class Shot:
    """One request: when it was due, how long it took, and what came."""

    due: float
    seconds: float = 0.0
    status: int = FAILED
    body: bytes = b""


@dataclass(kw_only=True)
class Shots:
    """All requests of a run.

    Args:
        shots: in the order of their ends.
        resent: requests that were sent again since the server had closed an idle connection.
        seconds: from the first to the last moment.
    """

    shots: list[Shot] = field(default_factory=list)
    resent: int = 0
    seconds: float = 0.0

    def count(self, *statuses: int) -> int:
        """How many were answered so."""
        return sum(shot.status in statuses for shot in self.shots)

    @property
    def statuses(self) -> dict[int, int]:
        """Answers by status."""
        return dict(Counter(shot.status for shot in self.shots))

    def percentile(self, share: float, *, status: int = 200) -> float:
        """Seconds within which a share (in per cent) of the requests with this status was answered; NaN for none."""
        times = sorted(shot.seconds for shot in self.shots if shot.status == status)
        return times[min(len(times) - 1, int(len(times) * share / 100))] if times else float("nan")


class _Connection(asyncio.Protocol):
    """One connection with at most one request on its way."""

    def __init__(self, gun: _Gun) -> None:
        self.gun = gun
        self.transport: asyncio.Transport | None = None
        self.shot: Shot | None = None
        self.request = b""
        self.used = False
        self._parts = bytearray()
        self._needed = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def send(self, shot: Shot, request: bytes) -> None:
        assert self.transport is not None
        self.shot, self.request = shot, request
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parts += data
        if self._needed < 0:
            end = self._parts.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._parts[:end]).lower()
            mark = head.find(b"content-length: ")
            length = int(head[mark + 16 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
            self._needed = end + 4 + length
            self._closing = b"\r\nconnection: close" in head
            self._status, self._body_at = int(head[9:12]), end + 4
        if len(self._parts) < self._needed:
            return
        shot, self.shot, self.used = self.shot, None, True
        body = bytes(self._parts[self._body_at : self._needed])
        self._parts, self._needed = bytearray(), -1
        if self._closing:
            self.transport.close()  # type: ignore[union-attr]
        if shot is not None:
            self.gun.answered(self, shot, self._status, body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.gun.lost(self)


class _Gun:
    def __init__(self, target: Target, *, connections: int, keep: Callable[[bytes], bytes]) -> None:
        self.target, self.most, self.keep = target, connections, keep
        self.result = Shots()
        self.idle: list[_Connection] = []
        self.open = 0
        self.waiting: deque[tuple[Shot, bytes]] = deque()
        self.outstanding = 0
        self.ended = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()

    def due(self, shot: Shot, request: bytes) -> None:
        self.outstanding += 1
        self._send(shot, request)

    def _send(self, shot: Shot, request: bytes) -> None:
        while self.idle:
            connection = self.idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                connection.send(shot, request)
                return
        self.waiting.append((shot, request))
        if self.open < self.most:
            self.open += 1
            task = asyncio.get_running_loop().create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), self.target.host, self.target.port)
        except OSError:
            self.open -= 1
            if self.waiting:
                self._end(self.waiting.popleft()[0], FAILED, b"refused")
            return
        self._free(connection)

    def _free(self, connection: _Connection) -> None:
        if connection.transport is None or connection.transport.is_closing():
            return
        if self.waiting:
            connection.send(*self.waiting.popleft())
        else:
            self.idle.append(connection)

    def answered(self, connection: _Connection, shot: Shot, status: int, body: bytes) -> None:
        self._end(shot, status, self.keep(body))
        self._free(connection)

    def lost(self, connection: _Connection) -> None:
        self.open -= 1
        if connection in self.idle:
            self.idle.remove(connection)
        shot, connection.shot = connection.shot, None
        if shot is not None and connection.used and not connection._parts:
            self.result.resent += 1
            self._send(shot, connection.request)
        elif shot is not None:
            self._end(shot, FAILED, b"lost")
        elif self.waiting:
            self._send(*self.waiting.popleft())

    def _end(self, shot: Shot, status: int, body: bytes) -> None:
        shot.seconds, shot.status, shot.body = time.perf_counter() - shot.due, status, body
        self.outstanding -= 1
        self.result.shots.append(shot)
        self.ended.set()


async def fire(
    target: Target,
    *,
    rate: float,
    seconds: float,
    connections: int = 256,
    seed: int = 0,
    keep: Callable[[bytes], bytes] = lambda body: b"",
) -> Shots:
    """Put load on a server and wait for the last answer.

    Args:
        target: what is asked of which server.
        rate: requests a second, on average.
        seconds: how long requests are due.
        connections: open at once, at most.
        seed: of the times.
        keep: what of a body is kept.
    """
    gun, draws = _Gun(target, connections=connections, keep=keep), random.Random(seed)
    requests = target.requests()
    begin = time.perf_counter()
    due, number = begin + draws.expovariate(rate), 0
    while due < begin + seconds:
        if (early := due - time.perf_counter()) > _TIMER_S:
            await asyncio.sleep(early - _TIMER_S)
        while time.perf_counter() < due:
            await asyncio.sleep(0)  # timers of an event loop have a resolution of a millisecond
        if number % 32 == 0:
            await asyncio.sleep(0)
        gun.due(Shot(due=due), requests[number % len(requests)])
        number += 1
        due += draws.expovariate(rate)
    give_up = time.perf_counter() + 30
    while gun.outstanding and time.perf_counter() < give_up:
        await asyncio.sleep(0.005)
    gun.result.seconds = time.perf_counter() - begin
    for connection in gun.idle:
        if connection.transport is not None:
            connection.transport.close()
    return gun.result


async def keep_asking(target: Target, *, in_flight: int, seconds: float) -> Shots:
    """The most that a server answers: so many requests are always on their way.

    Args:
        target: what is asked of which server.
        in_flight: requests at once.
        seconds: how long.
    """
    gun = _Gun(target, connections=in_flight, keep=lambda body: b"")
    requests, number, begin = target.requests(), 0, time.perf_counter()
    while time.perf_counter() < begin + seconds:
        while gun.outstanding < in_flight:
            gun.due(Shot(due=time.perf_counter()), requests[number % len(requests)])
            number += 1
        gun.ended.clear()
        await gun.ended.wait()
    gun.result.seconds = time.perf_counter() - begin
    while gun.outstanding:
        await asyncio.sleep(0.002)
    for connection in gun.idle:
        if connection.transport is not None:
            connection.transport.close()
    return gun.result
