"""Requests that no client should send: no 500, no crash, no memory kept."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest

from tests.serving.server import fuzz
from tests.serving.server.fake import FakeAnswerer
from tests.serving.server.test_connections import GOOD, send, serving
from tests.serving.server.test_processes import rss
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.config import ServerConfig

USER = {"user_id": "u1"}
FULL = {"user": USER, "k": 3, "filter": "genres:Drama", "exclude": ["3"], "exclude_seen": True, "explain": True}
GOOD_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/recommend", FULL),
    ("/rank", {"user": USER, "items": ["3", {"item_id": "5"}, "9"]}),
    ("/history", {"user": USER}),
    ("/explain", {"request": FULL, "item": "3"}),
]


def ask(number: int, *, seed: int) -> Any:
    async def whole() -> Any:
        app = ServerApp(answerer=FakeAnswerer(), config=ServerConfig())
        app.engine.start()
        try:
            return await fuzz.over_asgi(app, fuzz.bodies(GOOD_REQUESTS, number, seed=seed))
        finally:
            await app.engine.close()

    return asyncio.run(whole())


def test_changed_requests_are_answered_or_refused_in_four_parts() -> None:
    statuses = ask(400, seed=1)
    assert set(statuses) == {200, 400}, statuses
    assert min(statuses.values()) > 20, "some must pass, else nothing is tried"


def spoilt(number: int, *, seed: int) -> Any:
    async def body(port: int, server: Any) -> Any:
        found = await fuzz.over_sockets(port, GOOD_REQUESTS, number, seed=seed)
        return found, (await send(port, GOOD))[0]

    return serving(body, seconds=600, receive_timeout_s=0.3)


def test_spoilt_http_is_refused_and_the_next_request_is_answered() -> None:
    statuses, after = spoilt(100, seed=2)
    assert after == 200
    assert not [status for status in statuses if status >= 500], statuses
    assert statuses[200]
    assert statuses[400]


@pytest.mark.slow
def test_a_hundred_thousand_changed_requests_keep_no_memory() -> None:
    total: Any = ask(5000, seed=0)
    gc.collect()
    before = rss([os.getpid()])
    for seed in range(1, 20):
        total += ask(5000, seed=seed)
    gc.collect()
    grown = rss([os.getpid()]) - before
    print(f"{sum(total.values()):,} requests: {dict(total)}, memory grew by {grown / 2**20:.1f} MiB")
    assert set(total) == {200, 400}
    assert grown < 16 << 20


@pytest.mark.slow
def test_ten_thousand_spoilt_requests() -> None:
    statuses, after = spoilt(10_000, seed=3)
    print(dict(statuses))
    assert after == 200
    assert not [status for status in statuses if status >= 500], statuses
