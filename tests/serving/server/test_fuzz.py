"""Requests that no client should send: no 500, no crash, no memory kept."""

from __future__ import annotations

import asyncio
import gc
import os
from typing import Any

import pytest

import ziggurat as zg
from tests.serving.server import fuzz
from tests.serving.server.fake import FakeAnswerer
from tests.serving.server.processes.test_processes import rss
from tests.serving.server.test_connections import GOOD, send, serving
from tests.serving.shop import Shop
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


SHOP_USER = {"user_id": "3", "age": 30}
SHOP_FULL = FULL | {"user": SHOP_USER, "filter": "tags:t1 AND NOT price:>9 OR title:new", "exclude": ["i3"]}
SHOP_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/recommend", SHOP_FULL),
    ("/recommend", {"user": SHOP_USER, "filter": "price:2..8"}),
    ("/rank", {"user": SHOP_USER, "items": ["i3", {"item": "i5", "price": 2.5, "tags": ["t1"]}, "i9"]}),
    ("/history", {"user": SHOP_USER}),
    ("/explain", {"request": SHOP_FULL, "item": "i3"}),
]


def ask(number: int, *, seed: int, answerer: Any = None, good: fuzz.Good = GOOD_REQUESTS) -> Any:
    async def whole() -> Any:
        app = ServerApp(answerer=answerer or FakeAnswerer(), config=ServerConfig(deadline_ms=10_000, degrade=False))
        app.engine.start()
        try:
            return await fuzz.over_asgi(app, fuzz.bodies(good, number, seed=seed))
        finally:
            await app.engine.close()

    return asyncio.run(whole())


def test_changed_requests_are_answered_or_refused_in_four_parts() -> None:
    statuses = ask(400, seed=1)
    assert set(statuses) == {200, 400}, statuses
    assert min(statuses.values()) > 20, "some must pass, else nothing is tried"


def test_changed_requests_and_filters_of_an_export_are_answered_or_refused(shop: Shop) -> None:
    statuses = ask(150, seed=2, answerer=zg.Recommender.load(shop.export, check=False), good=SHOP_REQUESTS)
    assert set(statuses) == {200, 400}, statuses
    assert min(statuses.values()) > 10, "some must pass, else nothing is tried"


def spoilt(number: int, *, seed: int) -> Any:
    async def body(port: int, server: Any) -> Any:
        found = await fuzz.over_sockets(port, GOOD_REQUESTS, number, seed=seed)
        return found, (await send(port, GOOD))[0]

    return serving(body, seconds=600, receive_timeout_s=0.3)


def test_spoilt_http_is_refused_and_the_next_request_is_answered() -> None:
    statuses, after = spoilt(100, seed=2)
    assert after == 200
    # 501 is the answer to a transfer coding that a server does not know (RFC 9112, 6.1).
    assert not [status for status in statuses if status >= 500 and status != 501], statuses
    assert statuses[200]
    assert statuses[400]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fake", "export"])
def test_a_hundred_thousand_changed_requests_keep_no_memory(kind: str, request: pytest.FixtureRequest) -> None:
    answerer, good = None, GOOD_REQUESTS
    if kind == "export":
        shop: Shop = request.getfixturevalue("shop")
        answerer, good = zg.Recommender.load(shop.export, check=False), SHOP_REQUESTS
    total: Any = ask(10_000, seed=0, answerer=answerer, good=good)
    gc.collect()
    before = rss([os.getpid()])
    for seed in range(1, 10):
        total += ask(10_000, seed=seed, answerer=answerer, good=good)
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
    # 501 is the answer to a transfer coding that a server does not know (RFC 9112, 6.1).
    assert not [status for status in statuses if status >= 500 and status != 501], statuses
