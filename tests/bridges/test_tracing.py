"""Traces of requests: the spans of an answer and their order in time, the caller's trace, what is not sampled."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.server.fake import FakeAnswerer
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.config import ServerConfig

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk: make test-bridges")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    found, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBased(ALWAYS_ON))
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    yield exporter
    exporter.clear()


def ask(
    *bodies: Any, path: str = "/recommend", answerer: Any = None, trace_parent: str = "", traced: bool = True
) -> list[int]:
    """The statuses of requests that come at once."""
    headers = [(b"traceparent", trace_parent.encode())] if trace_parent else []

    async def one(app: ServerApp, body: Any) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await app(scope, receive, send)
        return sent[0]["status"]

    async def together() -> list[int]:
        app = ServerApp(answerer=answerer or FakeAnswerer(), config=ServerConfig(trace=traced, deadline_ms=9000))
        app.engine.start()
        statuses = await asyncio.gather(*(one(app, body) for body in bodies))
        await app.engine.close()
        return statuses

    return asyncio.run(together())


def tree(spans: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in spans.get_finished_spans()}


def test_an_answer_is_a_trace_of_its_stages_in_the_trace_of_the_caller(spans: Any, loaded: Any) -> None:
    parent = f"00-{TRACE}-{CALLER}-01"
    assert ask({"user": {"user_id": "3"}}, answerer=loaded, trace_parent=parent) == [200]
    found = tree(spans)
    stages = ["user vectors", "search", "ranker"]
    assert list(found) == ["read", "queue", *stages, "batch", "answer", "POST /recommend"]
    whole, batch = found["POST /recommend"], found["batch"]
    assert {format(span.context.trace_id, "032x") for span in found.values()} == {TRACE}
    assert format(whole.parent.span_id, "016x") == CALLER
    for name in ("read", "queue", "batch", "answer"):
        assert found[name].parent.span_id == whole.context.span_id
    for name in stages:
        assert found[name].parent.span_id == batch.context.span_id
    ordered = [found[name] for name in ("read", "queue", "batch", "answer")]
    assert whole.start_time <= ordered[0].start_time
    for before, after in itertools.pairwise(ordered):
        assert before.start_time <= before.end_time == after.start_time
    assert ordered[-1].end_time == whole.end_time
    assert batch.start_time <= found["user vectors"].start_time <= found["ranker"].end_time <= batch.end_time
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["ziggurat.version"] == loaded.version
    assert batch.attributes["ziggurat.batch.requests"] == 1


def test_requests_of_one_batch_have_each_their_trace(spans: Any) -> None:
    assert ask(*[{"user": {"user_id": "u1"}}] * 5, answerer=FakeAnswerer(base_s=0.05)) == [200] * 5
    finished = spans.get_finished_spans()
    assert len({span.context.trace_id for span in finished}) == 5
    sizes = sorted(span.attributes["ziggurat.batch.requests"] for span in finished if span.name == "batch")
    assert sizes[-1] > 1
    assert sum(1 / size for size in sizes) == pytest.approx(round(sum(1 / size for size in sizes)))


def test_refused_and_failed_requests_say_so(spans: Any) -> None:
    assert ask({"user": 3}, {"user": {"user_id": "raise"}}, {"user": {"user_id": "u1"}}) == [400, 500, 200]
    whole = [span for span in spans.get_finished_spans() if span.name == "POST /recommend"]
    codes = {span.attributes["http.response.status_code"]: span.status.status_code for span in whole}
    assert codes == {400: trace.StatusCode.UNSET, 500: trace.StatusCode.ERROR, 200: trace.StatusCode.UNSET}
    spans.clear()
    assert ask({"user": {}, "items": ["3"]}, path="/rank") == [200]
    assert "POST /rank" in tree(spans)


def test_what_is_not_sampled_or_not_asked_for_is_not_recorded(spans: Any, loaded: Any) -> None:
    assert ask({"user": {"user_id": "3"}}, answerer=loaded, trace_parent=f"00-{TRACE}-{CALLER}-00") == [200]
    assert ask({"user": {"user_id": "3"}}, answerer=loaded, traced=False) == [200]
    assert not spans.get_finished_spans()
