"""Connections that do not behave: slow, endless, malformed, deaf. On a real socket, in this process."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.serving.server.fake import FakeAnswerer
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.connections import DrainingServer, uvicorn_config
from ziggurat.serving.server.hosts import Hosts
from ziggurat.serving.server.serve import bind

BODY = b'{"user": {"user_id": "u1"}, "k": 2}'
HEAD = b"POST /recommend HTTP/1.1\r\nHost: localhost\r\n"
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


Body = Callable[[int, DrainingServer], Awaitable[Any]]


def serving(body: Body, *, answerer: FakeAnswerer | None = None, seconds: float = 20, **settings: Any) -> Any:
    async def whole() -> Any:
        config = ServerConfig(**{"linger_s": 0.0, "deadline_ms": 5000.0} | settings)
        app = ServerApp(answerer=answerer or FakeAnswerer(), config=config)
        listener = bind("127.0.0.1", 0)
        port = listener.getsockname()[1]
        wrapped = uvicorn_config(app, config=config, metrics=app.metrics)
        server = DrainingServer(wrapped, limits=config, listener=listener)
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.001)
        try:
            return await asyncio.wait_for(body(port, server), seconds)
        finally:
            server.should_exit = True
            await task

    return asyncio.run(whole())


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(first.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", "0")))


async def send(port: int, content: bytes) -> tuple[int, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    try:
        return await answer_of(reader)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "begin", [b"", b"\r\n", b"PO", HEAD, HEAD + b"Content-Length: 50\r\n\r\n{", GOOD + b"\r\n", GOOD + b"POST /r"]
)
def test_a_request_that_trickles_in_ends_in_time(begin: bytes) -> None:
    """One byte every 50 ms, for ever: the time counts from the request's begin, not from the last byte."""

    async def body(port: int, server: DrainingServer) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        start = time.monotonic()
        writer.write(begin)
        if begin.startswith(GOOD):
            assert (await answer_of(reader))[0] == 200
        read = asyncio.ensure_future(reader.read())
        while not read.done():
            try:
                writer.write(b"\r\n" if begin in (b"\r\n", GOOD + b"\r\n") else b" ")
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0.05)
        took = time.monotonic() - start
        writer.close()
        if not read.exception():
            assert read.result() == b"" or b" 408 " in read.result() or b" 400 " in read.result()
        return took

    assert serving(body, receive_timeout_s=0.4, keep_alive_s=5) < 2.0


def test_idle_connections_end() -> None:
    async def body(port: int, server: DrainingServer) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD)
        await answer_of(reader)
        rest = await reader.read()
        writer.close()
        return rest

    assert serving(body, receive_timeout_s=5, keep_alive_s=0.2) == b""


def test_ways_out_of_a_wrong_head_are_about_what_is_wrong() -> None:
    hosts = Hosts(names=None)
    gzip = hosts.wrong_head("1.1", b"/rank", [(b"host", b"a"), (b"transfer-encoding", b"gzip")], is_admin=False)
    assert gzip is not None
    assert "Host" not in " ".join(gzip.ways_out)
    no_host = hosts.wrong_head("1.1", b"/rank", [], is_admin=False)
    assert no_host is not None
    assert no_host.ways_out == ("send one header Host, as HTTP/1.1 demands",)


@pytest.mark.parametrize("parameters", ["limit=-1", "limit=99999999999999999999", "k"])
@pytest.mark.parametrize(
    "request_line", [b"GET /users", b"GET /info", b"GET /items/7", b"POST /items", b"POST /recommend"]
)
def test_parameters_that_nothing_reads_are_refused(request_line: bytes, parameters: str) -> None:
    content = request_line + f"?{parameters} HTTP/1.1\r\nHost: localhost\r\n".encode()
    content += b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY if b"POST" in request_line else b"\r\n"

    async def body(port: int, server: DrainingServer) -> Any:
        return await send(port, content)

    status, _, answer = serving(body)
    assert status == 400
    assert json.loads(answer)["error"]["found"] == f"?{parameters}"


def test_another_method_is_shown_the_port_that_was_asked() -> None:
    async def body(port: int, server: DrainingServer) -> Any:
        return port, await send(port, b"DELETE /rank HTTP/1.1\r\nHost: localhost\r\n\r\n")

    port, (status, _, answer) = serving(body)
    assert status == 405
    assert f"curl -s localhost:{port}/rank" in json.loads(answer)["error"]["ways_out"][0]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),  # TLS
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 40_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", 431),
        (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", 413),
        (HEAD + b"Content-Length: 1000000000\r\n\r\n", 413),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n", 400),
        (b"CONNECT localhost:1 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /livez HTTP/1.0\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),
        (b"GET /livez\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: localhost:80@evil.example\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: \r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET http://evil.example/livez HTTP/1.1\r\nHost: localhost\r\n\r\n", 421),
        (b"GET /livez HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nHost: 10.0.0.3\r\n\r\n", 200),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /recommend HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
        (HEAD + b"Connection: Upgrade\r\nUPGRADE: h2c\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY, 200),
    ],
)
def test_what_is_no_request_gets_a_status(content: bytes, status: int) -> None:
    async def body(port: int, server: DrainingServer) -> tuple[Any, Any]:
        return await send(port, content), await send(port, GOOD)

    bad, good = serving(body)
    assert bad[0] == status
    if status != 200:
        assert json.loads(bad[2])["error"]["ways_out"]
    assert good[0] == 200


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("content", "status", "found"),
    [
        (CHUNKED + b"Content-Length: 2\r\n\r\n{}", 400, "Content-Length can't be present with Transfer-Encoding"),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n", 400, "Duplicate Content-Length"),
        (HEAD + b"Content-Length: +2\r\n\r\n", 400, "Invalid character in Content-Length"),
        (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", 413, "Content-Length overflow"),
        (CHUNKED + b"\r\n-5\r\n", 400, "Invalid character in chunk size"),
        (CHUNKED + b"\r\nffffffffffffffffff\r\n", 400, "Chunk size overflow"),
        (b"GET /livez HTTP/1.1\nHost: localhost\n\n", 400, "Expected CRLF after version"),
        (HEAD + b"A: b\0c\r\n\r\n", 400, "Invalid header value char, behind header 'host'"),
        (HEAD + b"A : b\r\n\r\n", 400, "Invalid header token"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "Invalid method encountered"),
    ],
)
def test_what_is_no_request_is_told_what_is_wrong(content: bytes, status: int, found: str) -> None:
    async def body(port: int, server: DrainingServer) -> Any:
        return await send(port, content)

    got, _, answer = serving(body)
    error = json.loads(answer)["error"]
    assert (got, error["found"]) == (status, f"not HTTP/1.1: {found}")
    assert "the whole request at once" not in error["ways_out"][0]


@pytest.mark.parametrize(("more", "status"), [(b"5000", 200), (b"1", 400)])
def test_two_deadlines_are_one_or_refused(more: bytes, status: int) -> None:
    deadlines = HEAD + b"X-Deadline-Ms: 5000\r\nX-Deadline-Ms: " + more + b"\r\n"

    async def body(port: int, server: DrainingServer) -> Any:
        return await send(port, deadlines + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)

    got, _, answer = serving(body)
    assert got == status
    if status == 400:
        assert json.loads(answer)["error"]["found"] == "'1' and '5000'"


def test_a_deadline_of_less_than_a_microsecond_is_told_as_it_was_given() -> None:
    async def body(port: int, server: DrainingServer) -> Any:
        return await send(port, HEAD + b"X-Deadline-Ms: 0.0001\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)

    got, _, answer = serving(body)
    assert got == 503
    assert json.loads(answer)["error"]["expected"] == "an answer within 0.0001 ms"


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET /livez HTTP/1.1\r\nHost: evil.example\r\n\r\n", 421),
        (b"GET /livez HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (CHUNKED + b"\r\nZZ\r\n", 400),
        (HEAD, 408),
    ],
)
@pytest.mark.parametrize("num_before", [1, 2])
def test_requests_before_one_that_is_refused_get_their_own_answers(
    content: bytes, status: int, num_before: int
) -> None:
    async def body(port: int, server: DrainingServer) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GOOD * num_before + content)
        found = [(await answer_of(reader))[0] for _ in range(num_before + 1)]
        assert await reader.read() == b"", "the connection ends behind a refusal"
        writer.close()
        return found

    slow = FakeAnswerer(base_s=0.3)
    assert serving(body, answerer=slow, receive_timeout_s=0.1, degrade=False) == [200] * num_before + [status]


def head_of(num_bytes: int) -> bytes:
    """A request whose line and headers have this many bytes."""
    begin = GOOD.partition(b"\r\n\r\n")[0]
    names = [b"X-%03d: " % number for number in range(200)]
    left = num_bytes - len(begin) - 4 - sum(len(name) + 2 for name in names)
    values = [b"a" * (left // 200)] * 199 + [b"a" * (left - 199 * (left // 200))]
    lines = [name + value for name, value in zip(names, values, strict=True)]
    return b"\r\n".join([begin, *lines, b"", BODY])


@pytest.mark.parametrize("step", [100, 1000, 16_000, 100_000])
def test_a_head_is_counted_once_in_however_many_pieces_it_comes(step: int) -> None:
    """30,000 of 32,768 bytes are answered, 33,000 are 431: alone, and behind a request with a longer body."""
    long = HEAD + b"Content-Length: %d\r\n\r\n" % (len(BODY) + 60_000) + BODY + b" " * 60_000

    async def status_of_last(port: int, contents: list[bytes]) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        read = asyncio.ensure_future(last_status(reader, len(contents)))
        content = b"".join(contents)
        for first in range(0, len(content), step):
            if not read.done():
                writer.write(content[first : first + step])
                await asyncio.sleep(0.0005)
        try:
            return await read
        finally:
            writer.close()

    async def last_status(reader: asyncio.StreamReader, num_answers: int) -> int:
        return [(await answer_of(reader))[0] for _ in range(num_answers)][-1]

    async def body(port: int, server: DrainingServer) -> list[int]:
        return [
            await status_of_last(port, [*before, head_of(num_bytes)])
            for before in ([], [long])
            for num_bytes in (30_000, 33_000)
        ]

    assert serving(body) == [200, 431, 200, 431]


def test_the_begin_of_a_head_behind_the_end_of_a_body_is_not_counted_with_it() -> None:
    """One piece has the end of a body of 60 kB and the first bytes of the next request."""
    long = HEAD + b"Content-Length: %d\r\n\r\n" % (len(BODY) + 60_000) + BODY + b" " * 60_000

    async def body(port: int, server: DrainingServer) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(long[:1000])
        await asyncio.sleep(0.05)
        writer.write(long[1000:] + GOOD[:20])
        await asyncio.sleep(0.05)
        writer.write(GOOD[20:])
        found = [(await answer_of(reader))[0] for _ in range(2)]
        writer.close()
        return found

    assert serving(body) == [200, 200]


def test_connections_beyond_the_limit_are_told() -> None:
    async def body(port: int, server: DrainingServer) -> list[int]:
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.05)
        statuses = [(await send(port, GOOD))[0]]
        for _, writer in open_ones:
            writer.close()
        await asyncio.sleep(0.05)
        return [*statuses, (await send(port, GOOD))[0]]

    assert serving(body, max_connections=3) == [503, 200]


def test_a_client_that_does_not_read_loses_its_connection() -> None:
    async def body(port: int, server: DrainingServer) -> int:
        content = b'{"user": {}, "k": 1000}'
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content
        _reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        start = time.monotonic()
        while not writer.transport.is_closing():
            assert time.monotonic() - start < 60
            writer.write(request * 20)
            await asyncio.sleep(0.02)
        return len(server.server_state.connections)

    assert serving(body, send_timeout_s=0.3, max_k=1000) == 0


def test_a_drain_answers_what_came_and_what_is_on_its_way() -> None:
    async def body(port: int, server: DrainingServer) -> list[Any]:
        idle = await asyncio.open_connection("127.0.0.1", port)
        idle[1].write(GOOD)
        assert (await answer_of(idle[0]))[1].get("connection") != "close"
        in_work = asyncio.ensure_future(send(port, GOOD))
        await asyncio.sleep(0.05)
        waiting = await asyncio.open_connection("127.0.0.1", port)
        server.should_exit = True
        await asyncio.sleep(0.25)
        idle[1].write(GOOD)  # sent before its client could know
        waiting[1].write(GOOD)
        answers = [await in_work, await answer_of(idle[0]), await answer_of(waiting[0])]
        idle[1].close()
        waiting[1].close()
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset
            await send(port, GOOD)
        return answers

    answers = serving(body, answerer=FakeAnswerer(base_s=0.2), linger_s=1.0, deadline_ms=3000)
    assert [answer[0] for answer in answers] == [200, 200, 200]
    assert [answer[1].get("connection") for answer in answers[1:]] == ["close", "close"]


def test_a_drain_answers_connections_that_were_accepted_a_moment_ago() -> None:
    async def body(port: int, server: DrainingServer) -> list[bytes]:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        for client in clients:
            client.sendall(GOOD)
        await server.shutdown()  # in the turn in which the kernel has them, and nobody else
        server.shutdown = AsyncMock()
        answers = []
        for client in clients:
            client.setblocking(False)  # the answer is there already, or a process that ended now would lose it
            answers.append(client.recv(100))
            client.close()
        return answers

    assert [answer[:15] for answer in serving(body)] == [b"HTTP/1.1 200 OK"] * 5


def test_a_drain_closes_idle_connections_after_a_while() -> None:
    async def body(port: int, server: DrainingServer) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        server.should_exit = True
        start = time.monotonic()
        await reader.read()
        writer.close()
        return time.monotonic() - start

    assert serving(body, linger_s=0.3) < 3


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (CHUNKED + b"\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n", 200),
        (CHUNKED + b"\r\n5\r\n" + BODY[:5] + b"\r\n%x;a=b\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n\r\n", 200),
        (CHUNKED + b"Trailer: X-A\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nX-A: 1\r\n\r\n", 200),
        # A trailer is no header: it changes neither the deadline nor who asks.
        (CHUNKED + b"\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nX-Deadline-Ms: 0\r\nHost: evil\r\n\r\n", 200),
        (CHUNKED + b"\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nX-A: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (CHUNKED + b"\r\n-5\r\n", 400),
        (CHUNKED + b"\r\n" + b"f" * 17 + b"\r\n", 400),
    ],
)
def test_bodies_in_chunks_and_what_follows_them(content: bytes, status: int) -> None:
    async def body(port: int, server: DrainingServer) -> tuple[Any, Any]:
        return await send(port, content), await send(port, GOOD)

    answer, good = serving(body)
    assert (answer[0], good[0]) == (status, 200)


@pytest.mark.parametrize("at_once", [True, False])
def test_extensions_of_chunks_are_bounded_as_headers_are(at_once: bool) -> None:
    """200 KB beside a body of 35 bytes, in one extension or in one for each byte, in one write or in many."""
    one = b"%x;%b\r\n%b\r\n0\r\n\r\n" % (len(BODY), b"a" * 200_000, BODY)
    many = b"".join(b"1;%b\r\n%c\r\n" % (b"a" * 6000, each) for each in BODY) + b"0\r\n\r\n"

    async def body(port: int, server: DrainingServer) -> list[Any]:
        found = []
        for content in (one, many):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                read = asyncio.ensure_future(answer_of(reader))
                step = len(content) if at_once else 4096
                writer.write(CHUNKED + b"\r\n")
                for first in range(0, len(content), step):
                    if not read.done():
                        writer.write(content[first : first + step])
                        await asyncio.sleep(0.002)
                found.append(await read)
            finally:
                writer.close()
        plain = b"".join(b"1\r\n%c\r\n" % each for each in BODY + b" " * 20_000) + b"0\r\n\r\n"
        found.append(await send(port, CHUNKED + b"\r\n" + plain))  # many chunks, none with an extension
        found.append(
            await send(port, HEAD + b"Content-Length: %d\r\n\r\n" % (len(BODY) + 200_000) + BODY + b" " * 200_000)
        )
        return found

    *refused, chunks, length = serving(body)
    for status, _, content in refused:
        error = json.loads(content)["error"]
        assert status == 413
        assert error["found"] == "more than 32,768 bytes beside the body, in extensions of its chunks"
        assert error["ways_out"][0] == "send chunks without extensions"
    assert (chunks[0], length[0]) == (200, 200)


def test_requests_behind_a_long_body_in_chunks_are_answered() -> None:
    long = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY) + 100_000, BODY + b" " * 100_000)

    async def body(port: int, server: DrainingServer) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((CHUNKED + b"\r\n" + long) * 3 + GOOD * 3)
        found = [(await answer_of(reader))[0] for _ in range(6)]
        writer.close()
        return found

    assert serving(body) == [200] * 6


def test_a_request_behind_one_in_chunks_with_a_trailer_is_answered_for_itself() -> None:
    async def body(port: int, server: DrainingServer) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        first = CHUNKED + b"\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\nX-A: 1\r\n\r\n"
        writer.write(first + GOOD.replace(BODY, BODY.replace(b"2", b"1")))
        answers = [await answer_of(reader) for _ in range(2)]
        writer.close()
        return [len(json.loads(answer[2])["items"]) for answer in answers]

    assert serving(body) == [2, 1]


def test_a_client_that_waits_for_leave_to_send_gets_it() -> None:
    """`Expect: 100-continue`, as curl sends it before bodies of more than a mebibyte, and Java before any."""

    async def body(port: int, server: DrainingServer) -> tuple[bytes, int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        leave = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.write(BODY)
        answer = await answer_of(reader)
        writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 1000000000\r\n\r\n")
        refused = await answer_of(reader)
        writer.close()
        return leave, answer[0], refused[0]

    leave, answered, refused = serving(body)
    assert leave.startswith(b"HTTP/1.1 100 ")
    assert (answered, refused) == (200, 413), "no leave for what is too long"


def test_pipelined_requests_are_answered_in_order() -> None:
    async def body(port: int, server: DrainingServer) -> list[int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        parts = [b'{"user": {}, "k": %d}' % k for k in (1, 2, 3)]
        writer.write(b"".join(HEAD + b"Content-Length: %d\r\n\r\n" % len(part) + part for part in parts))
        answers = [await answer_of(reader) for _ in parts]
        writer.close()
        return [len(json.loads(answer[2])["items"]) for answer in answers]

    assert serving(body) == [1, 2, 3]
