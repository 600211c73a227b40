"""Requests that no client should send, by the thousand: bodies of wrong JSON, wrong types, wrong HTTP."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

Good = Sequence[tuple[str, dict[str, Any]]]
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    -0.0,
    "",
    "\x00",
    "genres:Drama AND",
    "((((",
    "𝒳" * 50,
    "a" * 5000,
    [],
    {},
    [[]],
    {"": {}},
    ["3"] * 100,
    [None, 3, "x", {"item_id": 3}],
    "17",
    "genres:Drama AND NOT year:1995..1999",
    "\ud800",
    "'; DROP TABLE items; --",
)


def change(value: Any, draws: random.Random) -> Any:
    """A value with something changed at a random place in it."""
    chance = draws.random()
    if chance < 0.3 or not isinstance(value, dict | list) or not value:
        return draws.choice(ODD)
    if isinstance(value, list):
        place = draws.randrange(len(value))
        return [change(each, draws) if index == place else each for index, each in enumerate(value)]
    name = draws.choice(sorted(value))
    if chance < 0.4:
        return {key: each for key, each in value.items() if key != name}
    if chance < 0.5:
        return value | {draws.choice(("users", "", "k ", "filter\x00", name * 2)): draws.choice(ODD)}
    return value | {name: change(value[name], draws)}


def spoil(content: bytes, draws: random.Random) -> bytes:
    """Bytes with some cut, doubled, or changed."""
    spoiled = bytearray(content)
    for _ in range(draws.randrange(1, 4)):
        place = draws.randrange(len(spoiled) + 1)
        kind = draws.randrange(4)
        if kind == 0:
            del spoiled[place : place + draws.randrange(1, 20)]
        elif kind == 1:
            spoiled[place:place] = bytes(draws.randrange(256) for _ in range(draws.randrange(1, 8)))
        elif kind == 2:
            spoiled[place:place] = spoiled[: draws.randrange(1, 40)]
        elif place < len(spoiled):
            spoiled[place] ^= 1 << draws.randrange(8)
    return bytes(spoiled)


WORDS = ("AND", "OR", "NOT", "IN", "IS MISSING", "(", ")", ":", "..", ">=", "<", ",", '"', "tags", "price", "t1", "9.5")
STRANGE = (0, 9, 34, 39, 92, 0x2028, 0x1F600)


def odd_filter(draws: random.Random) -> str:
    """Text that may be a filter: words of the language in any order, some of them spoilt."""
    text = draws.choice((" ", " ", "")).join(draws.choice(WORDS) for _ in range(draws.randrange(1, 12)))
    for _ in range(draws.randrange(2)):
        place = draws.randrange(len(text) + 1)
        text = text[:place] + chr(draws.choice((*STRANGE, draws.randrange(32, 127)))) + text[place:]
    return text


def bodies(good: Good, number: int, *, seed: int) -> list[tuple[str, bytes]]:
    """Paths and bodies: good requests, changed as data or as bytes."""
    draws = random.Random(seed)
    found = []
    for _ in range(number):
        path, data = draws.choice(good)
        for _ in range(draws.randrange(3)):
            data = change(data, draws)
        if isinstance(data, dict) and "filter" in data and draws.random() < 0.3:
            data = data | {"filter": odd_filter(draws)}
        content = json.dumps(data).encode()
        if draws.random() < 0.2:
            content = spoil(content, draws)
        found.append((path, content))
    return found


async def over_asgi(app: Any, requests: Sequence[tuple[str, bytes]]) -> Counter[int]:
    """Ask an app without sockets; the statuses."""
    statuses: Counter[int] = Counter()
    for path, content in requests:
        sent: list[Any] = []

        async def receive(content: bytes = content) -> Any:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": [], "client": ("127.0.0.1", 1), "scheme": "http", "root_path": "", "http_version": "1.1"}
        await app(scope, receive, send)
        status = sent[0]["status"]
        statuses[status] += 1
        body = json.loads(sent[1]["body"])
        assert status == 200 or set(body["error"]) == {"kind", "expected", "found", "where", "ways_out"}, content
    return statuses


async def over_sockets(port: int, good: Good, number: int, *, seed: int) -> Counter[int]:
    """Ask a server with spoilt HTTP; the statuses, 0 where it closed the connection without one."""
    draws = random.Random(seed)
    statuses: Counter[int] = Counter()
    for _ in range(number):
        path, data = draws.choice(good)
        content = json.dumps(data).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        extra = draws.choice(
            ("", "X-Deadline-Ms: 50\r\n", "Transfer-Encoding: chunked\r\n", "Expect: 100-continue\r\n")
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            whole = (head + extra + "\r\n").encode() + content
            writer.write(spoil(whole, draws) if draws.random() < 0.8 else whole)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(16), 10)
        except ConnectionError:
            answer = b""
        finally:
            writer.close()
        parts = answer.split()
        statuses[int(parts[1]) if len(parts) > 1 else 0] += 1
    return statuses
