"""The routes of a server as an ASGI app: any ASGI server can run it, ours adds timeouts, draining and processes.

    POST /recommend   {"user": {…}, "k": 10, "filter": "…"}  → items, version, degraded, notes
    POST /rank        {"user": {…}, "items": ["17", …]}      → the items with their scores
    GET  /livez       200 while the process runs             GET /readyz   200 while it takes requests, else 503
    GET  /metrics     for Prometheus                         GET /openapi.json   made from the export's columns
    GET  /            the web page; /info /users /items/ID, POST /items /history /explain: what it reads
    POST /admin/swap  {"export": "exports/films-2"}: another version, through the admin socket alone
    POST /admin/items {"upsert": [{…}], "delete": ["17"]}: other items, through the admin socket alone

An error is JSON, {"error": {"kind", "expected", "found", "where", "ways_out"}}, with a status of 4xx if the request is
to blame and 503 with Retry-After if the server has no time. The version that answered stands in every answer and in the
header X-Export-Version.

The two first routes have a way of their own through the app (`_ask`): a refusal under overload must cost microseconds,
so it is made before routing, parsing and errors, from bytes that are ready.
"""

from __future__ import annotations

import functools
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ziggurat.errors import (
    BoundsError,
    DataError,
    FilterError,
    RequestError,
    SchemaError,
    UnavailableError,
    ZigguratError,
)
from ziggurat.serving.answering.live_items import ChangedItems, ItemChanges
from ziggurat.serving.answers import Answerer, Ranked, Recommendations, export_version
from ziggurat.serving.export.published_folder import PointerState
from ziggurat.serving.server.admin_socket import is_admin
from ziggurat.serving.server.arrivals import arrival
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.guidance import Examples, curl, shown
from ziggurat.serving.server.hosts import is_local
from ziggurat.serving.server.metrics import Metrics
from ziggurat.serving.server.openapi import description
from ziggurat.serving.server.pages import page_routes
from ziggurat.serving.server.queue.engine import Engine, OverloadError, ways_to_more_time
from ziggurat.serving.server.queue.engine import Request as Question
from ziggurat.serving.server.reading import (
    ClientDisconnected,
    RefusedRequestError,
    check_admin,
    check_query,
    header,
    read_body,
    read_deadline,
    read_json,
    read_rank,
    read_recommend,
    read_swap,
    refused,
)
from ziggurat.serving.server.responses import encode, error_json, json_response
from ziggurat.serving.server.shards.front import shards_of
from ziggurat.serving.server.tracing import Tracing, Watch

_log = logging.getLogger("ziggurat.server")
Swap = Callable[[str, bool], Awaitable[str]]
Change = Callable[[ItemChanges], ChangedItems]
Answer = Recommendations | Ranked
_READ = {"/recommend": read_recommend, "/rank": read_rank}
_OPEN = ("/livez", "/readyz", "/", "/page.js", "/page.css")  # without an API key
_OTHERS = ("/openapi.json", "/info", "/users", "/items/ID", "POST /items, /history, /explain", "GET /")
_LARGE = 32 << 10  # bytes of a body that is parsed beside the event loop


class ServerApp:
    """The ASGI app of one answerer.

    Args:
        answerer: the export that answers.
        config: limits and deadlines.
        api_key: if given, requests must bring it (Authorization: Bearer KEY, or X-Api-Key: KEY).
        swap: loads the export of a path, also one that answers less where that is accepted, and returns its version;
            without it, or where the config has no `admin`,
            /admin/swap is not there.
        change: changes items; without it, or where the config has no `admin`, /admin/items is not there.
        prepare_thread: called first in the thread that computes.
    """

    def __init__(
        self,
        *,
        answerer: Answerer,
        config: ServerConfig,
        api_key: str = "",
        swap: Swap | None = None,
        change: Change | None = None,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.answerer = answerer
        self.metrics = Metrics()
        self.info = answerer.info()
        examples = Examples.of(self.info)
        self._examples = {"/recommend": examples.recommend, "/rank": examples.rank, "/admin/items": examples.items}
        self.engine = Engine(answerer=answerer, config=config, metrics=self.metrics, prepare_thread=prepare_thread)
        # Made once: a refusal under load must not cost the making of its text.
        self._shed = _shed_body(config)
        self.draining = False
        self.pointer: str = PointerState.GOOD  # of the folder that is followed, as the supervisor says
        self._tracing = Tracing() if config.trace else None
        self._shards = shards_of(answerer)
        if self._shards is not None:
            self._shards.observe = self.metrics.shard_asked
        self._change = change if config.admin else None
        self._key = api_key.encode()
        self._swap = swap if config.admin else None
        described = {"can_swap": self._swap is not None, "can_change": self._change is not None}
        self._openapi = encode(description(self.info, config=config, has_key=bool(api_key), **described))
        self._starlette = Starlette(
            routes=[
                Route("/livez", self._live),
                Route("/readyz", self._ready),
                Route("/metrics", self._metrics),
                Route("/openapi.json", self._describe),
                *self._admin_routes(),
                *page_routes(answerer=answerer, config=config),
            ],
            exception_handlers={
                ZigguratError: _error_response,
                ClientDisconnected: _error_response,
                404: self._not_found,
                405: self._not_found,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope["path"]
        # Before the body is read, so that its arrival counts.
        started = time.monotonic()
        if path in _READ:
            watch = self._tracing.begin(scope) if self._tracing is not None else None
            status = await self._ask(path, scope, receive, send, watch)
            self.metrics.answered(path, status, time.monotonic() - started)
            return
        if self._key and path not in _OPEN and not self._has_key(scope):
            await _send(send, 401, _body_of(_no_key()), (b"www-authenticate", b"Bearer"))
            return
        await self._starlette(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        # One event is for the start, and the next one for the end.
        await receive()
        self.engine.start()
        self.metrics.version.labels(export_version(self.info.version)).set(1)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.engine.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _ask(self, path: str, scope: Scope, receive: Receive, send: Send, watch: Watch | None) -> int:
        """Answer, and end what records the request; returns the status."""
        status, answer = await self._respond(path, scope, receive, send, watch)
        if watch is not None:
            watch.end(status, answer=answer)
        return status

    async def _respond(
        self, path: str, scope: Scope, receive: Receive, send: Send, watch: Watch | None
    ) -> tuple[int, Answer | None]:
        # Before anything is read: a refusal must cost microseconds. A request with a deadline of its own may have the
        # time.
        if self.engine.overloaded and not header(scope, b"x-deadline-ms"):
            self.metrics.shed.inc()
            seconds = b"%d" % max(1, math.ceil(self.engine.wait_s()))
            await _send(send, 503, self._shed, (b"retry-after", seconds))
            return 503, None
        try:
            answer, body = await self._answer(path, scope, receive, watch)
        except ClientDisconnected:
            return 499, None  # nginx's number for a client that is gone
        except Exception as problem:
            status, error = status_of(problem)
            extra: tuple[tuple[bytes, bytes], ...] = ()
            if isinstance(problem, OverloadError):
                if not problem.expired:  # the engine counts those that waited in vain
                    self.metrics.shed.inc()
                extra = ((b"retry-after", b"%d" % max(1, math.ceil(problem.retry_after_s))),)
            if isinstance(problem, UnavailableError):
                extra = ((b"retry-after", b"1"),)
            if status == 401:
                extra = ((b"www-authenticate", b"Bearer"),)
            if status in (413, 415, 431):
                extra = ((b"connection", b"close"),)  # the rest of the body is not read
            if status == 405:
                extra = ((b"allow", b"POST"),)
            await _send(send, status, encode(error), *extra)
            return status, None
        if getattr(answer, "missing_shards", ()):
            self.metrics.partial.inc()
        await _send(send, 200, body, (b"x-export-version", answer.version.encode("latin-1", "replace")))
        return 200, answer

    async def _answer(self, path: str, scope: Scope, receive: Receive, watch: Watch | None) -> tuple[Answer, bytes]:
        """Return an answer and its bytes, within the request's deadline."""
        if self._key and not self._has_key(scope):
            raise _no_key()  # before anything that shows what the export knows, such as the id of a user
        if scope["method"] != "POST":
            raise self._wrong_method(path, scope)
        check_query(scope)
        deadline = read_deadline(scope, config=self.config)
        body = await read_body(scope, receive, config=self.config)
        arrived = arrival(scope)
        # A large body would hold up the event loop, and with it all other connections.
        if len(body) > _LARGE:
            request, candidates = await run_in_threadpool(self._read, path, body)
        else:
            request, candidates = self._read(path, body)
        if watch is not None:
            watch.queue()
        answer = await self.engine.ask(
            request, candidates=candidates, deadline_s=deadline, arrived=arrived, watch=watch
        )
        content = encode(answer.to_json())
        self.engine.check_in_time(arrived=arrived, deadline_s=deadline)  # the last look before it is written
        return answer, content

    def _wrong_method(self, path: str, scope: Scope) -> RefusedRequestError:
        host = header(scope, b"host")
        server = scope.get("server")
        # A client on this machine that names no port has still asked one; a proxy elsewhere has a port of its own.
        if server and server[1] and is_local(host):
            host = f"{host}:{server[1]}"
        ways = curl(path, host=host, body=self._examples[path])
        found = f"{scope['method']:.20} {path}"
        return refused(405, expected=f"POST {path}", found=found, where="request line", ways_out=ways)

    def _read(self, path: str, body: bytes) -> tuple[Question, int]:
        with shown(self._examples[path]):
            request = _READ[path](body, config=self.config)
        return request, self.engine.candidates_of(request)

    def _has_key(self, scope: Scope) -> bool:
        """Return whether a request brings the key, or came through the admin socket, which its owner alone may open."""
        if is_admin(scope):
            return True
        scheme, _, credentials = header(scope, b"authorization").partition(" ")
        given = header(scope, b"x-api-key") or (credentials if scheme.lower() == "bearer" else "")
        # Takes as long whichever byte is wrong, so that no key can be guessed byte by byte.
        return hmac.compare_digest(given.strip().encode("latin-1"), self._key)

    # ---- the other routes

    async def _live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def _ready(self, request: Request) -> Response:
        state: dict[str, object] = {
            "ready": not self.draining,
            "version": self.answerer.info().version,
            "effort": self.engine.ladder.effort.value,
        }
        if self.info.published is not None:
            state["published"] = self.info.published_now()
        if self.pointer != PointerState.GOOD:
            state["pointer"] = self.pointer
        if self._shards is not None:
            state["shards"] = shards = self._shards.states()
            state["ready"] = not self.draining and any(each["state"] == "up" for each in shards)
        return json_response(state, status=200 if state["ready"] else 503)

    async def _metrics(self, request: Request) -> Response:
        self.metrics.show_items(self.answerer.info())
        self.metrics.show_published(self.info)
        content, kind = await run_in_threadpool(self.metrics.page)
        return Response(content, headers={"content-type": kind})

    async def _describe(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    def _routes(self, *, is_admin: bool) -> str:
        """Return the routes of this server, as clients or its operator may ask for them."""
        asked = {"POST /recommend": self.info.can_recommend, "POST /rank": self.info.can_rank}
        shown = [*(name for name, is_there in asked.items() if is_there), "GET /livez, /readyz, /metrics", *_OTHERS]
        if is_admin:
            admin = {"POST /admin/swap": self._swap, "POST /admin/items": self._change}
            shown = [*(name for name, function in admin.items() if function is not None), *shown]
        return ", ".join(shown)

    async def _not_found(self, request: Request, problem: Exception) -> Response:
        status = getattr(problem, "status_code", 404)
        ways = ["see /openapi.json"]
        if request.url.path == "/admin/items" and self._swap is not None and not self.info.item_id:
            ways.append("this export has no catalogue whose items could change: export a run whose schema has [items]")
        error = refused(
            status,
            expected=f"one of {self._routes(is_admin=is_admin(request.scope))}",
            found=f"{request.method} {request.url.path:.80}",
            where="request line",
            ways_out=tuple(ways),
        )
        headers = getattr(problem, "headers", None)  # Allow, with 405
        return json_response(error_json(error, kind="RequestError"), status=status, headers=headers)

    def _admin_routes(self) -> Iterator[Route]:
        if self._swap is not None:
            yield Route("/admin/swap", functools.partial(self._admin_swap, swap=self._swap), methods=["POST"])
        if self._change is not None:
            yield Route("/admin/items", functools.partial(self._admin_items, change=self._change), methods=["POST"])

    async def _admin_swap(self, request: Request, *, swap: Swap) -> Response:
        check_admin(request)
        path, accept_loss = read_swap(await read_body(request.scope, request.receive, config=self.config))
        return json_response({"version": await swap(path, accept_loss)})

    async def _admin_items(self, request: Request, *, change: Change) -> Response:
        check_admin(request)
        data = read_json(await read_body(request.scope, request.receive, config=self.config))
        with shown(self._examples["/admin/items"]):
            changes = ItemChanges.from_json(data)
            if not 0 < len(changes) <= self.config.max_items:
                raise RequestError(
                    expected=f"1 to {self.config.max_items:,} items in one change",
                    found=f"{len(changes):,}",
                    where="request, body",
                    ways_out="put items in 'upsert', or ids in 'delete'" if not changes else "make several changes",
                )
        # In a thread, because a change may compute the vectors of its items.
        return json_response((await run_in_threadpool(change, changes)).to_json())


def status_of(problem: Exception) -> tuple[int, dict[str, object]]:
    """The status of HTTP for an error, and its body as plain data."""
    if isinstance(problem, RefusedRequestError):
        return problem.status, error_json(problem)
    if isinstance(problem, OverloadError | UnavailableError):
        return 503, error_json(problem)
    if isinstance(problem, RequestError | FilterError | DataError | SchemaError | BoundsError):
        return 400, error_json(problem)
    # Nothing that a client can do leads here, so the log gets the whole traceback.
    _log.error("a request failed", exc_info=problem)
    unexpected = ZigguratError(
        expected="an answer",
        found=f"a mistake in the server ({type(problem).__name__})",
        where="server; its log has the whole story",
        ways_out=("ask again", "tell whoever runs this server"),
    )
    return 500, error_json(unexpected, kind="InternalError")


async def _error_response(request: Request, problem: Exception) -> Response:
    if isinstance(problem, ClientDisconnected):
        return Response(status_code=499)
    status, body = status_of(problem)
    close = {"connection": "close"} if status in (413, 415) else None
    return json_response(body, status=status, headers=close)


def _no_key() -> RefusedRequestError:
    return refused(
        401,
        expected="the server's API key",
        found="none, or another one",
        where="request, header Authorization or X-Api-Key",
        ways_out=("Authorization: Bearer KEY", "X-Api-Key: KEY"),
    )


def _body_of(error: ZigguratError) -> bytes:
    return encode(error_json(error))


def _shed_body(config: ServerConfig) -> bytes:
    """Return the answer to requests that are refused before anything of them is read."""
    return _body_of(
        OverloadError(
            expected=f"an answer within {config.deadline_ms:g} ms",
            found="more requests than can be answered in time",
            where="queue",
            ways_out=(
                "ask again after the seconds that Retry-After names",
                *ways_to_more_time(config, needed_s=config.deadline_ms / 1e3),
            ),
        )
    )


async def _send(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = b"%d" % len(body)
    all_headers = [(b"content-type", b"application/json"), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})
