"""The routes, their limits and their errors, without sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from prometheus_client import values

from tests.runs.stream.test_stream_runs import config_of, events
from tests.serving.server.fake import FakeAnswerer
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import DataError, MissingDependencyError
from ziggurat.runs.stream.publish import PublishConfig
from ziggurat.runs.stream.run import stream_run
from ziggurat.serving.answers import Answerer, Column, Info, RankRequest, RecommendRequest
from ziggurat.serving.export.published_folder import Publication, read_pointer
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.server.admin_socket import ADMIN as BY_ADMIN_SOCKET
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.guidance import Examples
from ziggurat.serving.server.metrics import Metrics, share_metrics
from ziggurat.serving.server.processes.worker import Loaded
from ziggurat.serving.server.tracing import Tracing, check_export, export_traces

USER = {"user": {"user_id": "u1"}}
PARTS = {"kind", "expected", "found", "where", "ways_out"}


def talk(
    body: Callable[[httpx.AsyncClient], Awaitable[Any]],
    *,
    answerer: Answerer | None = None,
    is_admin: bool = False,
    swap: Any = None,
    api_key: str = "",
    **settings: Any,
) -> Any:
    async def whole() -> Any:
        app = ServerApp(
            answerer=answerer or FakeAnswerer(),
            config=ServerConfig(**{"deadline_ms": 5000.0} | settings),
            swap=swap,
            api_key=api_key,
        )
        app.engine.start()

        async def by_admin(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {BY_ADMIN_SOCKET: True}, receive, send)

        transport = httpx.ASGITransport(app=by_admin if is_admin else app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as http:
            try:
                return await body(http)
            finally:
                await app.engine.close()

    return asyncio.run(whole())


def ask(method: str, path: str, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return talk(lambda http: http.request(method, path, headers=headers), **more)


def post(path: str, content: Any, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return talk(lambda http: http.post(path, content=raw, headers=headers), **more)


def get(path: str, **more: Any) -> httpx.Response:
    return talk(lambda http: http.get(path), **more)


def test_recommendations_name_their_version() -> None:
    answer = post("/recommend", USER | {"k": 2, "filter": "genres:Drama", "explain": True})
    assert answer.status_code == 200
    assert answer.headers["x-export-version"] == "v1"
    assert [item["id"] for item in answer.json()["items"]] == ["0", "1"]
    assert answer.json() | {"items": []} == {"items": [], "version": "v1", "degraded": [], "plan": "u1"}


def test_a_whole_number_may_be_written_with_a_point() -> None:
    assert len(post("/recommend", USER | {"k": 2.0}).json()["items"]) == 2
    assert post("/explain", {"request": USER | {"k": 2.0}, "item": "3"}).status_code == 200
    assert [post("/recommend", USER | {"k": k}).status_code for k in (2.5, 0.0, 1e300)] == [400, 400, 400]


def test_a_ranking_is_ordered() -> None:
    answer = post("/rank", USER | {"items": ["3", "9", "5"]})
    assert [(item["id"], item["position"]) for item in answer.json()["items"]] == [("9", 1), ("5", 2), ("3", 0)]


@pytest.mark.parametrize(
    ("path", "content", "status", "where"),
    [
        ("/recommend", b"", 400, "body"),
        ("/recommend", b"{", 400, "body"),
        ("/recommend", b"\xff", 400, "body"),
        ("/recommend", b"[" * 100_000, 400, "body"),
        ("/recommend", b'{"user": ' * 100_000, 400, "body"),
        ("/recommend", b'{"user": {}, "user": {}}', 400, "body"),
        ("/recommend", b'{"user": {}, "k": ' + b"9" * 5000 + b"}", 400, "body"),
        ("/recommend", b'{"user": {}, "k": NaN}', 400, ""),
        ("/recommend", b'{"user": {"user_id": NaN}}', 400, "NaN or Infinity"),
        ("/recommend", b'{"user": {"user_id": [1, -Infinity]}}', 400, "NaN or Infinity"),
        ("/rank", b'{"user": {}, "items": [{"item_id": NaN}]}', 400, "NaN or Infinity"),
        ("/recommend", [], 400, "request"),
        ("/recommend", {"user": 3}, 400, "user"),
        ("/recommend", USER | {"k": 0}, 400, "k"),
        ("/recommend", USER | {"k": "3"}, 400, "k"),
        ("/recommend", USER | {"k": 1001}, 400, "'k'"),
        ("/recommend", USER | {"exclude": ["3"] * 5001}, 400, "'exclude'"),
        ("/recommend", USER | {"fliter": ""}, 400, "fliter"),
        ("/recommend", USER | {"filter": "genres:"}, 400, "column 1 of the filter"),
        ("/recommend", {"user": {"age": 3}}, 400, "user"),
        ("/recommend", {"user": {"user_id": "poison"}}, 400, "user_id"),
        ("/rank", USER | {"items": []}, 400, "items"),
        ("/rank", USER | {"items": ["3"] * 5001}, 400, "'items'"),
        ("/rank", USER | {"items": ["no"]}, 400, "items"),
        ("/rank", USER, 400, "items"),
        ("/recommend", b" " * (1 << 20) + b"{}", 413, "body"),
        ("/history", {"user": 3}, 400, "body"),
        ("/explain", {"item": "3"}, 400, "body"),
        ("/explain", {"item": "3", "request": USER | {"filter": "genres:"}}, 400, "column 1 of the filter"),
        ("/explain", {"item": "3", "request": {"usr": {}}}, 400, "usr"),
    ],
)
def test_a_bad_request_is_answered_in_four_parts(path: str, content: Any, status: int, where: str) -> None:
    answer = post(path, content)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == PARTS
    assert where in error["where"] + error["found"], error
    assert error["ways_out"]


@pytest.mark.parametrize(("text", "column"), [("tagz:t1", 1), ("price:>=1 AND (", 16)])
def test_a_mistake_in_a_filter_of_an_export_points_at_its_column(loaded: Any, text: str, column: int) -> None:
    user = {"user": {"user_id": 3}, "filter": text}
    for path, content in (("/recommend", user), ("/explain", {"request": user, "item": "i3"})):
        answer = post(path, content, answerer=loaded, deadline_ms=5000)
        error = answer.json()["error"]
        assert (answer.status_code, error["kind"], error.keys()) == (400, "FilterError", PARTS)
        assert f"column {column} of the filter" in error["where"]


@pytest.mark.parametrize(
    ("path", "content", "expected", "way_out"),
    [
        ("/recommend", {}, "a value for 'user'", 'for example: {"user":{"user_id":"u1"},"k":10}'),
        ("/rank", USER, "a value for 'items'", 'for example: {"user":{"user_id":"u1"},"items":[{"item_id":"7"}]}'),
        ("/rank", USER | {"items": [3]}, "the id of an item", '"items":[{"item_id":"7"}]}'),
        ("/recommend", USER | {"k": 0}, "1 to 1,000", "ask for at least one"),
        ("/recommend", USER | {"k": 2000}, "1 to 1,000", "ask for fewer"),
        ("/rank", USER | {"items": []}, "1 to 5,000 items", "ask for at least one"),
        ("/rank", USER | {"items": ["3"] * 5001}, "1 to 5,000 items", "ask for fewer"),
    ],
)
def test_errors_have_bounds_and_examples_of_this_server(path: str, content: Any, expected: str, way_out: str) -> None:
    error = post(path, content).json()["error"]
    assert expected in error["expected"]
    assert any(way_out in each for each in error["ways_out"]), error
    assert "movie_id" not in str(error)
    assert not any(each.startswith("add ") and " = " in each for each in error["ways_out"]), "JSON, not TOML"


def test_the_method_that_is_meant_is_shown_for_the_address_that_was_asked() -> None:
    for host, shown in (("shop.example:81", "shop.example:81"), ("a'; rm -rf x", "HOST:PORT")):
        error = talk(lambda http, host=host: http.get("/recommend", headers={"Host": host})).json()["error"]
        assert error["ways_out"] == [f"""curl -s {shown}/recommend -d '{{"user":{{"user_id":"u1"}},"k":10}}'"""]


def test_examples_are_short_and_have_the_id() -> None:
    columns = (
        *(Column(name=f"c{number}", kind="dense", example=0.5) for number in range(100)),
        Column(name="item_id", kind="categorical", example="7"),
    )
    examples = Examples.of(dataclasses.replace(FakeAnswerer().info(), item_columns=columns))
    assert '"item_id":"7"' in examples.items
    assert len(examples.items) < 300


def test_a_body_in_chunks_is_refused_when_it_is_too_long() -> None:
    sent = []

    async def chunks() -> Any:
        for _ in range(1000):
            sent.append(1)
            yield b" " * 1024

    answer = talk(lambda http: http.post("/recommend", content=chunks()), max_body_bytes=4096)
    assert answer.status_code == 413
    assert len(sent) < 20


def test_compressed_bodies_are_refused() -> None:
    answer = post("/recommend", b"\x1f\x8b\x00", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "gzip" in answer.json()["error"]["found"]


@pytest.mark.parametrize("text", ["0", "-5", "soon", "nan", "inf", "1e99", "9" * 30])
def test_impossible_deadlines_are_refused(text: str) -> None:
    assert post("/recommend", USER, headers={"X-Deadline-Ms": text}).status_code == 400


def test_a_mistake_in_the_answerer_is_500_and_tells_nothing_of_it() -> None:
    answer = post("/recommend", {"user": {"user_id": "raise"}})
    assert answer.status_code == 500
    assert "a defect" not in answer.text
    assert answer.json()["error"].keys() == PARTS


def test_errors_of_data_are_the_request_s() -> None:
    class Strict(FakeAnswerer):
        def check(self, request: RecommendRequest | RankRequest) -> int:
            raise DataError(expected="a number", found="text", where="column age", ways_out="send a number")

    answer = post("/recommend", USER, answerer=Strict())
    assert (answer.status_code, answer.json()["error"]["kind"]) == (400, "DataError")


def test_overload_is_503_with_retry_after() -> None:
    async def body(http: httpx.AsyncClient) -> list[httpx.Response]:
        asked = [asyncio.ensure_future(http.post("/recommend", json=USER)) for _ in range(6)]
        return list(await asyncio.gather(*asked))

    assert [answer.status_code for answer in talk(body, answerer=FakeAnswerer(base_s=0.05))] == [200] * 6
    answers = talk(body, answerer=FakeAnswerer(base_s=0.1), max_queue=2)
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused
    for answer in refused:
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"].keys() == PARTS
        assert any("start it with --" in way for way in answer.json()["error"]["ways_out"])


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_other_methods_and_paths_are_named(method: str) -> None:
    answer = talk(lambda http: http.request(method, "/recommend"))
    assert answer.status_code == 405
    assert answer.json()["error"].keys() == PARTS
    answer = talk(lambda http: http.request(method, "/recommendations"))
    assert answer.status_code == 404
    assert "/recommend" in answer.json()["error"]["expected"]


class _RanksAlone(FakeAnswerer):
    """An export of a ranker without a catalogue."""

    def info(self) -> Info:
        return dataclasses.replace(super().info(), can_recommend=False, item_id="", filters={}, num_items=0)


def test_routes_that_an_export_does_not_answer_are_not_named() -> None:
    stranger = get("/recommendations", answerer=_RanksAlone(), swap=swapped).json()["error"]
    assert stranger["expected"].startswith("one of POST /rank, GET /livez")
    assert "admin" not in stranger["expected"]
    operator = post("/admin/items", {}, answerer=_RanksAlone(), swap=swapped, is_admin=True).json()["error"]
    assert operator["expected"].startswith("one of POST /admin/swap, POST /rank, ")
    assert "no catalogue whose items could change" in operator["ways_out"][1]


def test_an_export_says_what_it_lacks_of_another_one() -> None:
    whole = Loaded.of(FakeAnswerer().info())
    ranks = Loaded.of(_RanksAlone().info())
    assert ranks.lacks(whole) == ["/recommend", "/items", "filters by 'genres'"]
    assert whole.lacks(ranks) == []
    info = dataclasses.replace(FakeAnswerer().info(), labels=(), user_columns=(), item_columns=())
    assert Loaded.of(info).lacks(whole) == ["scores for 'like'", "the user's 'user_id'", "the item's 'item_id'"]


def test_a_key_is_asked_for() -> None:
    for headers in ({}, {"X-Api-Key": "another"}, {"Authorization": "Bearer "}, {"Authorization": b"Bearer geh\xe9im"}):
        answer = post("/recommend", USER, headers=headers, api_key="geheim")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    for headers in ({"X-Api-Key": "geheim"}, {"Authorization": "Bearer geheim"}):
        assert post("/recommend", USER, headers=headers, api_key="geheim").status_code == 200
    assert [get(path, api_key="geheim").status_code for path in ("/metrics", "/users", "/openapi.json")] == [401] * 3
    assert [get(path, api_key="geheim").status_code for path in ("/livez", "/readyz", "/")] == [200] * 3


def test_metrics_count_answers() -> None:
    async def body(http: httpx.AsyncClient) -> str:
        for content in (USER, USER, {"user": 3}):
            await http.post("/recommend", json=content)
        return (await http.get("/metrics")).text

    text = talk(body)
    assert 'ziggurat_requests_total{route="/recommend",status="200"} 2.0' in text
    assert 'ziggurat_requests_total{route="/recommend",status="400"} 1.0' in text
    assert 'ziggurat_answers_total{effort="full"} 2.0' in text


def test_figures_of_workers_lie_in_files_that_a_full_disk_cannot_take_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    share_metrics(folder=tmp_path, slot=3)
    reserved = {path.name for path in tmp_path.iterdir()}
    metrics = Metrics()
    for status in (200, 400, 503):
        metrics.answered("/recommend", status, 0.1)
    files = {path.name: path.stat() for path in tmp_path.iterdir()}
    assert set(files) == reserved, "none is made later, without blocks behind it"
    assert all(each.st_blocks * 512 >= each.st_size > 0 for each in files.values())

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    with pytest.raises(OSError, match=r"counter_4\.db"):
        share_metrics(folder=tmp_path, slot=4)


def test_traces_without_their_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opentelemetry", "opentelemetry.trace", "opentelemetry.sdk", "opentelemetry.sdk.trace"):
        monkeypatch.setitem(sys.modules, name, None)
    for begin in (Tracing, export_traces, check_export):
        with pytest.raises(MissingDependencyError, match="pip install opentelemetry-sdk"):
            begin()
    assert get("/readyz").status_code == 200, "without traces nothing is missed"


def test_a_request_that_waited_in_vain_is_counted_once() -> None:
    async def body(http: httpx.AsyncClient) -> str:
        first = asyncio.ensure_future(http.post("/recommend", json=USER))
        await asyncio.sleep(0.02)
        late = await http.post("/recommend", json=USER, headers={"X-Deadline-Ms": "20"})
        assert ((await first).status_code, late.status_code) == (200, 503)
        return (await http.get("/metrics")).text

    text = talk(body, answerer=FakeAnswerer(base_s=0.1))
    assert "ziggurat_expired_total 1.0" in text
    assert "ziggurat_shed_total 0.0" in text


def references(data: Any) -> set[str]:
    if isinstance(data, dict):
        here = {data["$ref"]} if "$ref" in data else set()
        return here.union(*(references(each) for each in data.values()))
    return set().union(*(references(each) for each in data)) if isinstance(data, list) else set()


def test_the_description_holds_together_and_its_examples_are_answered() -> None:
    async def body(http: httpx.AsyncClient) -> tuple[Any, list[int]]:
        data = (await http.get("/openapi.json")).json()
        statuses = []
        for path in ("/recommend", "/rank", "/items", "/history", "/explain"):
            examples = data["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"]
            for example in examples.values():
                statuses.append((await http.post(path, json=example["value"])).status_code)
        for path, operations in data["paths"].items():
            if "get" in operations:
                statuses.append((await http.get(path.replace("{id}", "3"))).status_code)
        return data, statuses

    data, statuses = talk(body)
    assert data["openapi"].startswith("3.1")
    for reference in references(data):
        place = data
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    assert set(data["components"]["schemas"]["RecommendRequest"]["properties"]) == set(
        RecommendRequest.__dataclass_fields__
    )
    assert set(data["components"]["schemas"]["RankRequest"]["properties"]) == set(RankRequest.__dataclass_fields__)
    assert statuses == [200] * len(statuses)
    assert len(statuses) > 6


@pytest.mark.parametrize("admin", [True, False])
def test_every_route_stands_in_the_description(admin: bool) -> None:
    config = ServerConfig(admin=admin)
    app = ServerApp(answerer=FakeAnswerer(), config=config, swap=swapped, change=lambda changes: pytest.fail("asked"))
    routes = {(path, "post") for path in ("/recommend", "/rank")}
    for route in app._starlette.routes:
        path = route.path.replace("{id:path}", "{id}")  # type: ignore[attr-defined]
        routes |= {(path, method.lower()) for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    described = json.loads(app._openapi)["paths"]
    assert {(path, method) for path, operations in described.items() for method in operations} == routes
    assert ("/admin/items" in described) == ("/admin/swap" in described) == admin


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert set(links) <= {"page.js", "page.css", "openapi.json", "metrics", "#answer", "data:,"}
    assert {"page.js", "page.css"} <= set(links)
    assert [get(f"/{name}").status_code for name in ("page.js", "page.css")] == [200, 200]
    script = (Path(__file__).parents[3] / "ziggurat/serving/server/page/page.js").read_text()
    assert "innerHTML" not in script, "text of a catalogue is no HTML"
    assert not re.search(r"https?://", script)


def test_the_word_nan_is_no_number() -> None:
    assert post("/recommend", {"user": {"user_id": "NaN, Infinity"}}).status_code == 200


class AnyItem(FakeAnswerer):
    def item(self, id: str) -> dict[str, Any]:
        return {"item_id": id, "title": "A title", "cost": 3}


@pytest.mark.parametrize("id", ["a\nb", "a\n", "\n", "a/b", "ä", "a?b", "a b\r\n"])
def test_an_item_of_any_id_is_shown(id: str) -> None:
    answer = get("/items/" + quote(id, safe=""), answerer=AnyItem())
    assert (answer.status_code, answer.json()["id"]) == (200, id)


def test_columns_that_are_not_to_be_shown_are_not() -> None:
    shown = {"answerer": AnyItem(), "show_columns": "item_id, title"}
    assert get("/items/3", **shown).json()["columns"] == {"item_id": "3", "title": "A title"}
    assert "cost" not in post("/items", {"ids": ["3"]}, **shown).text
    assert "cost" not in post("/history", USER, **shown).text
    assert get("/items/3", answerer=AnyItem()).json()["columns"]["cost"] == 3


def test_what_the_page_reads() -> None:
    assert get("/users").json() == {"users": ["u1", "u2"]}
    assert get("/items/3").json() == {"id": "3", "columns": {"item_id": 3, "title": "Item 3"}}
    several = post("/items", {"ids": ["3", "nobody"]}).json()["items"]
    assert several == [{"id": "3", "columns": {"item_id": 3, "title": "Item 3"}}, {"id": "nobody", "columns": {}}]
    assert post("/items", {"ids": ["3"] * 1001}).status_code == post("/items", {"ids": [3]}).status_code == 400
    unknown = get("/items/nobody")
    assert (unknown.status_code, unknown.json()["error"].keys()) == (404, PARTS)
    assert [item["id"] for item in post("/history", USER).json()["items"]] == ["3", "4"]
    assert "3 passes" in post("/explain", {"request": USER, "item": "3"}).json()["explanation"]
    assert get("/info").json()["limits"]["max_k"] == 1000


ADMIN = {"Content-Type": "application/json"}


async def swapped(path: str, accept_loss: bool) -> str:
    return f"version of {path}{' with a loss' if accept_loss else ''}"


def test_a_swap_is_asked_for_through_the_admin_socket() -> None:
    answer = post("/admin/swap", {"export": "e2"}, is_admin=True, swap=swapped)
    assert answer.json() == {"version": "version of e2"}
    with_key = post("/admin/swap", {"export": "e2"}, is_admin=True, swap=swapped, api_key="secret")
    assert with_key.status_code == 200, "who may open the socket needs no key"
    assert post("/admin/swap", {"export": "e2"}, is_admin=True).status_code == 404, "no supervisor, no swap"
    assert post("/admin/swap", {"export": "e2"}, is_admin=True, swap=swapped, admin=False).status_code == 404
    lossy = post("/admin/swap", {"export": "e2", "accept_loss": True}, is_admin=True, swap=swapped)
    assert lossy.json() == {"version": "version of e2 with a loss"}
    for bad in ({"path": "e2"}, {"export": "e2", "accept_loss": 1}, {"export": "a" * 5000}, []):
        assert post("/admin/swap", bad, is_admin=True, swap=swapped).status_code == 400


@pytest.mark.parametrize("headers", [{}, ADMIN, ADMIN | {"Host": "localhost"}, {"Authorization": "Bearer secret"}])
def test_a_swap_is_refused_through_a_port(headers: dict[str, str]) -> None:
    answer = post("/admin/swap", {"export": "e2"}, headers=headers, swap=swapped)
    assert answer.status_code == 403
    assert "curl --unix-socket" in answer.json()["error"]["ways_out"][0]


@pytest.mark.parametrize("path", ["/recommend", "/rank"])
@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS"])
def test_nothing_of_the_export_is_shown_before_the_key(path: str, method: str) -> None:
    refused = ask(method, path, api_key="secret")
    assert (refused.status_code, "u1" in refused.text) == (401, False)
    told = ask(method, path, api_key="secret", headers={"Authorization": "bearer secret"})
    assert (told.status_code, told.headers["allow"]) == (405, "POST")
    assert ask(method, path, api_key="secret", headers={"Authorization": "Basic secret"}).status_code == 401


@pytest.mark.parametrize("golden", [8, 0])
def test_the_example_of_an_export_without_a_catalogue_is_answered_as_it_stands(tmp_path: Path, golden: int) -> None:
    """As a stream publishes it: no column has an example of its own."""
    events(300, days=2).write_parquet(tmp_path / "a.parquet")
    stream_run(
        config_of(tmp_path / "a.parquet"),
        folder=tmp_path / "run",
        stream=StreamConfig(by="day"),
        publish=PublishConfig(folder=str(tmp_path / "live"), golden=golden),
    )
    answerer = Recommender.load(tmp_path / "live")
    refused = post("/rank", {"user": {}}, answerer=answerer)
    assert refused.status_code == 400
    (example,) = [way for way in refused.json()["error"]["ways_out"] if way.startswith("for example: ")]
    body = json.loads(example.removeprefix("for example: "))
    assert body["user"].keys() == {"user", "item", "age"}
    answered = post("/rank", body, answerer=answerer)
    assert answered.status_code == 200
    assert 0 < answered.json()["items"][0]["score"] < 1
    described = get("/openapi.json", answerer=answerer).json()
    examples = described["paths"]["/rank"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    for each in examples.values():
        assert post("/rank", each["value"], answerer=answerer).status_code == 200
    # And what it says of itself, as a version of a published folder.
    ready = get("/readyz", answerer=answerer).json()["published"]
    assert (ready["number"], ready["window"]) == (2, "2000-05-02")
    assert ready["watermark"].startswith("2000-05-02 ")
    assert ready["age_s"] >= 0
    assert get("/info", answerer=answerer).json()["published"]["number"] == 2
    figures = get("/metrics", answerer=answerer).text
    assert "ziggurat_published_version 2.0" in figures
    of_window = read_pointer(tmp_path / "live").newest.metrics
    assert ready["metrics"] == pytest.approx(of_window)
    assert f'ziggurat_published_window_metric{{metric="ne"}} {of_window["ne"]}' in figures
    at = re.search(r"^ziggurat_published_watermark_seconds (\S+)", figures, re.MULTILINE)
    assert at is not None
    assert 957_225_600 <= float(at[1]) < 957_312_000  # of 2000-05-02


def test_a_version_without_a_metric_does_not_keep_the_one_of_the_version_before() -> None:
    metrics = Metrics()
    info = FakeAnswerer().info()
    first = Publication(number=1, version="a" * 16, run="b" * 16, window=1, name="w1", step=1, metrics={"ne": 0.9})
    metrics.show_published(dataclasses.replace(info, published=first))
    assert 'ziggurat_published_window_metric{metric="ne"} 0.9' in metrics.page()[0].decode()
    metrics.show_published(dataclasses.replace(info, published=dataclasses.replace(first, number=2, metrics={})))
    assert 'ziggurat_published_window_metric{metric="ne"} NaN' in metrics.page()[0].decode()
