"""Traces of requests for OpenTelemetry: where the time of an answer went. Off unless `trace` is set.

    POST /recommend ─┬─ read           the request arrives and is parsed
                     ├─ queue          it waits for its batch
                     ├─ batch ─┬─ user vectors
                     │         ├─ search
                     │         ├─ over_arch
                     │         └─ ranker
                     └─ answer         it is written

A trace that comes with a request (W3C `traceparent`) goes on in it. The stages of a batch are those of all its
requests, so each of them that is recorded has them in its trace, with the number of requests that were computed
together. A request that the sampler leaves out costs one call.

`ziggurat serve` sends spans by OTLP over HTTP, as OpenTelemetry's own variables say (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, …). `ServerApp` under another ASGI server takes the tracer provider of its
process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ziggurat.errors import MissingDependencyError
from ziggurat.serving.answering.stages import Stage

if TYPE_CHECKING:  # an option: without opentelemetry nothing is traced
    from opentelemetry.context import Context  # pyright: ignore[reportMissingImports]
    from opentelemetry.trace import Span, Tracer  # pyright: ignore[reportMissingImports]
    from starlette.types import Scope

    from ziggurat.serving.answers import Ranked, Recommendations

_NAME = "ziggurat.server"
_ERROR = 500  # statuses from here on are the server's fault
_FLUSH_MS = 2000
_PACKAGES = {
    "opentelemetry.trace": "opentelemetry-api",
    "opentelemetry.sdk.trace": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
}


class Watch:
    """One request that is recorded.

    Args:
        span: of the request, started.
        tracer: makes the spans of its parts.
    """

    def __init__(self, span: Span, *, tracer: Tracer) -> None:
        self._span = span
        self._tracer = tracer
        self._begin = self._queued = self._batch_begin = self._computed = time.time_ns()
        self._batch: dict[str, str | int] = {}
        self._stages: Sequence[Stage] = ()

    def queue(self) -> None:
        """Note that the request is read, and waits for its batch."""
        self._queued = time.time_ns()

    def batch(self, begin_ns: int, *, stages: Sequence[Stage], about: Mapping[str, str | int]) -> None:
        """Note that its batch was computed just now.

        Args:
            begin_ns: when the batch started.
            stages: of the batch.
            about: how many requests and candidates, and the effort.
        """
        self._batch_begin = begin_ns
        self._computed = time.time_ns()
        self._stages = tuple(stages)
        self._batch = {f"ziggurat.batch.{name}": value for name, value in about.items()}

    def end(self, status: int, *, answer: Recommendations | Ranked | None = None) -> None:
        """Note that the answer is written."""
        from opentelemetry import trace  # pyright: ignore[reportMissingImports]

        now = time.time_ns()
        parent = trace.set_span_in_context(self._span)
        if self._queued != self._begin:
            self._part("read", self._begin, self._queued, parent)
        if self._batch:
            self._part("queue", self._queued, self._batch_begin, parent)
            batch = self._tracer.start_span("batch", parent, start_time=self._batch_begin, attributes=self._batch)
            inside = trace.set_span_in_context(batch)
            for each in self._stages:
                self._part(each.name, each.begin_ns, each.end_ns, inside)
            batch.end(self._computed)
            self._part("answer", self._computed, now, parent)
        self._span.set_attribute("http.response.status_code", status)
        if answer is not None:
            self._span.set_attribute("ziggurat.version", answer.version)
            self._span.set_attribute("ziggurat.degraded", list(answer.degraded))
        if status >= _ERROR:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end(now)

    def _part(self, name: str, begin_ns: int, end_ns: int, parent: Context) -> None:
        self._tracer.start_span(name, parent, start_time=begin_ns).end(end_ns)


class Tracing:
    """Begins the trace of each request.

    Raises:
        MissingDependencyError: opentelemetry-api is not there.
    """

    def __init__(self) -> None:
        try:
            from opentelemetry import propagate, trace  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing("opentelemetry-api", error) from error
        self._tracer = trace.get_tracer(_NAME)
        self._extract = propagate.extract
        self._server = trace.SpanKind.SERVER

    def begin(self, scope: Scope) -> Watch | None:
        """Return a watch that records a request of ASGI; None if the request is not sampled."""
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        method = scope["method"]
        path = scope["path"]
        about = {"http.request.method": method, "url.path": path, "http.route": path}
        span = self._tracer.start_span(f"{method} {path}", self._extract(carrier), kind=self._server, attributes=about)
        if span.is_recording():
            return Watch(span, tracer=self._tracer)
        span.end()
        return None


def export_traces() -> None:
    """Send the spans of this process by OTLP, unless it has a tracer provider already; call after a fork.

    Raises:
        MissingDependencyError: the SDK or the exporter is not there.
    """
    try:
        from opentelemetry import trace  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]

        if isinstance(trace.get_tracer_provider(), TracerProvider):
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing("opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http", error) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "ziggurat")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def check_export() -> None:
    """Raise MissingDependencyError where `export_traces` would; loads no more than it must."""
    from importlib.util import find_spec

    for name, package in _PACKAGES.items():
        try:
            found = find_spec(name)
        except ModuleNotFoundError:  # a package around it is missing
            found = None
        if found is None:
            raise _missing(package, None)


def flush_traces() -> None:
    """Send what was recorded, before this process ends."""
    from opentelemetry import trace  # pyright: ignore[reportMissingImports]

    flush = getattr(trace.get_tracer_provider(), "force_flush", None)
    if flush is not None:
        flush(_FLUSH_MS)


def _missing(package: str, error: ImportError | None) -> MissingDependencyError:
    return MissingDependencyError(
        expected=f"{package}, since traces are asked for",
        found="no such package" if error is None else f"{error}",
        where="--server.trace",
        ways_out=(
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
            "serve without --server.trace",
        ),
    )
