"""One shard of an index as an ASGI app: it searches its own items, for the version and the state that a question names.

    POST /search      a question (`messages.py`); 409 where that version or state is not here
    GET  /shard       which shard of how many, its versions, and their states
    POST /state       how the items of the shard differ from those that its index was built of
    POST /admin/load  {"export": FOLDER}: hold this version, too; with the API key alone
    GET  /livez       200 while the process runs       GET /readyz   200 when a version is there
    GET  /metrics     for Prometheus

Searches are computed where they arrive, one after the other: each worker in front has at most one question under way,
so what waits is bounded by the number of workers.
"""

from __future__ import annotations

import functools
import hmac
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ziggurat.errors import RequestError, ZigguratError
from ziggurat.retrieval.shard_numbers import check_shard
from ziggurat.retrieval.sharding import ShardChange, ShardIndex
from ziggurat.serving.answering.item_catalogue import CATALOGUE_FILE, ITEMS_FILE, ItemCatalogue
from ziggurat.serving.answering.item_search import INDEX_FILE, ItemSearch
from ziggurat.serving.answering.lacking import no_index
from ziggurat.serving.export.export_folder import open_export, read_manifest
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.reading import ClientDisconnected, header, read_body, read_export, refused
from ziggurat.serving.server.responses import encode, error_json, json_response
from ziggurat.serving.server.shards.messages import STATE, VERSION, decode_change, decode_question, encode_answer
from ziggurat.typed import quoted

_log = logging.getLogger("ziggurat.server")
_MAX_STATES = 8  # of one version: workers follow changes of items within half a second
_KEPT_S = 60.0  # a version that nobody asked about for this long goes, unless it is the newest
_OPEN = ("/livez", "/readyz")
LoadShard = Callable[[Path], tuple[str, ShardIndex]]


def load_shard(folder: Path, *, shard: int, num_shards: int) -> tuple[str, ShardIndex]:
    """The version of an export, and one shard of its index; reads no other files.

    Raises:
        MissingFileError, ExportError: there is no export, or one of the files is damaged.
        RequestError: it has no index.
        ConfigError: there is no such shard.
    """
    check_shard(shard, num_shards)
    export = open_export(folder, only=(INDEX_FILE, CATALOGUE_FILE, ITEMS_FILE))
    if not export.has(INDEX_FILE):
        raise no_index(export.name)
    catalogue = ItemCatalogue.load(export)
    search = ItemSearch.load(export.file(INDEX_FILE), num_items=len(catalogue))
    part = ShardIndex.part_of(search.index, items=catalogue.frame, shard=shard, num_shards=num_shards)
    return export.version, part


@dataclass(kw_only=True, eq=False)
class _LoadedVersion:
    index: ShardIndex
    states: OrderedDict[str, ShardIndex] = field(default_factory=OrderedDict)
    used: float = 0.0


class ShardVersions:
    """The loaded versions of the shard of a process: the one that serves, and during a swap the next one beside it.

    Args:
        load: the version and the shard of the export in a folder.
    """

    def __init__(self, load: LoadShard) -> None:
        self._load = load
        self._versions: dict[str, _LoadedVersion] = {}
        # One load at a time: several workers in front may ask for the same version at once.
        self._loading = threading.Lock()

    def load(self, folder: Path) -> str:
        """Load the version of an export and return its name; nothing happens where it is loaded already."""
        with self._loading:
            if (version := read_manifest(folder).version) not in self._versions:
                version, index = self._load(folder)
                # A new dict, not a changed one: searches read it without the lock.
                _warm_up(index)
                self._versions = {**self._versions, version: _LoadedVersion(index=index)}
                _log.info("a shard holds version %s of %s, %d items", version, quoted(str(folder)), len(index))
            # From here on the time counts in which nobody asks for it.
            self._versions[version].used = time.monotonic()
            self._drop_old()
            return version

    def at(self, version: str, state: str) -> ShardIndex | None:
        """Return the shard of a version with the items of a state ("": as the index was built); None: not here."""
        loaded = self._versions.get(version)
        if loaded is None:
            return None
        loaded.used = time.monotonic()
        if not state:
            return loaded.index
        return loaded.states.get(state)

    def put(self, version: str, state: str, change: ShardChange) -> bool:
        """Apply changed items to a version as a state beside it; return whether the version is loaded."""
        loaded = self._versions.get(version)
        if loaded is None:
            return False
        # Several workers in front send the same state.
        if state not in loaded.states:
            loaded.states[state] = loaded.index.changed(change)
            while len(loaded.states) > _MAX_STATES:
                # The oldest states go first: workers follow changes within half a second.
                loaded.states.popitem(last=False)
        return True

    def about(self, asked: str = "") -> dict[str, dict[str, object]]:
        """Return the versions with their states and numbers of items; the version that is asked for stays."""
        if (loaded := self._versions.get(asked)) is not None:
            loaded.used = time.monotonic()
        return {
            version: {"states": list(each.states), "num_items": len(each.index)}
            for version, each in self._versions.items()
        }

    def _drop_old(self) -> None:
        # Versions stand in the order in which they were loaded.
        newest = list(self._versions)[-1]
        now = time.monotonic()
        self._versions = {
            version: each for version, each in self._versions.items() if version == newest or now - each.used < _KEPT_S
        }


def _warm_up(index: ShardIndex) -> None:
    """Search a few times before the first question, which has a deadline: memory is mapped, kernels are loaded."""
    for num in (1, 8, 64):
        none = (None,) * num
        index.search(torch.zeros(num, index.dim), k=10, filters=none, exclude=none, probes=8)


class ShardApp:
    """The ASGI app of one shard.

    Args:
        versions: that it holds.
        shard: its number, from 0.
        num_shards: of the index.
        config: limits of bodies.
        api_key: if given, requests must bring it.
    """

    def __init__(
        self, versions: ShardVersions, *, shard: int, num_shards: int, config: ServerConfig, api_key: str = ""
    ) -> None:
        self.versions = versions
        self.config = config
        self._about = {"shard": shard, "shards": num_shards}
        self._key = api_key.encode()
        self.metrics = ShardMetrics()
        self._starlette = Starlette(
            routes=[
                Route("/livez", self._live),
                Route("/readyz", self._ready),
                Route("/metrics", self._metrics),
                Route("/shard", self._shard),
                Route("/state", self._state, methods=["POST"]),
                # Only where the config says so, since it loads what a path names.
                *([Route("/admin/load", self._admin_load, methods=["POST"])] if config.admin else []),
            ],
            exception_handlers={ZigguratError: _refused, ClientDisconnected: _refused, 404: _no_route, 405: _no_route},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of ASGI."""
        if scope["type"] == "lifespan":
            # There is nothing to start or to end here, and the protocol wants its answers.
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        if scope["type"] != "http":
            return
        path = scope["path"]
        if self._key and path not in _OPEN and not self._has_key(scope):
            await _answer(send, 401, b"another API key")
            return
        if path == "/search" and scope["method"] == "POST":
            began = time.monotonic()
            status, body = await self._search(scope, receive)
            self.metrics.searched(status, time.monotonic() - began)
            await _answer(send, status, body)
            return
        await self._starlette(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        # Takes as long whichever byte is wrong.
        return hmac.compare_digest(header(scope, b"x-api-key").encode("latin-1"), self._key)

    async def _search(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        try:
            body = await read_body(scope, receive, config=self.config)
            version = header(scope, _VERSION)
            state = header(scope, _STATE)
            index = self.versions.at(version, state)
            if index is None:
                return 409, b"no such state"
            asked = decode_question(body)
            # In the event loop itself: questions are few, and one after the other is what is wanted.
            found = index.search(
                asked.queries, k=asked.k, filters=asked.filters, exclude=asked.exclude, probes=asked.probes
            )
            return 200, encode_answer(found)
        except ClientDisconnected:
            return 499, b""
        except ZigguratError as problem:
            return 400, encode(error_json(problem))
        except Exception:
            _log.exception("a search of a shard failed")
            return 500, b"a mistake in the shard; its log has the whole story"

    async def _live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def _ready(self, request: Request) -> Response:
        is_ready = bool(self.versions.about())
        return json_response({"ready": is_ready} | self._about, status=200 if is_ready else 503)

    async def _metrics(self, request: Request) -> Response:
        content, kind = await run_in_threadpool(self.metrics.page)
        return Response(content, headers={"content-type": kind})

    async def _shard(self, request: Request) -> Response:
        return json_response(self._about | {"versions": self.versions.about(request.headers.get(VERSION, ""))})

    async def _state(self, request: Request) -> Response:
        change = decode_change(await read_body(request.scope, request.receive, config=self.config))
        version = request.headers.get(VERSION, "")
        state = request.headers.get(STATE, "")
        # In a thread, because rows of changed items are indexed, and questions go on meanwhile.
        put = functools.partial(self.versions.put, version, state, change)
        if not await run_in_threadpool(put):
            return json_response({"missing": "version"}, status=409)
        return json_response({"state": state})

    async def _admin_load(self, request: Request) -> Response:
        if not self._key:
            raise refused(
                403,
                expected="a shard that was started with an API key, which /admin/load asks for",
                found="one without a key, which any stranger could have load a folder",
                where="POST /admin/load",
                ways_out=(
                    "--api-key-file FILE, the same for the shards and the server in front",
                    "--watch on both sides",
                ),
            )
        path = read_export(await read_body(request.scope, request.receive, config=self.config))
        return json_response({"version": await run_in_threadpool(self.versions.load, Path(path))})


class ShardMetrics:
    """The figures of one shard."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry = CollectorRegistry()
        self._searches = Counter(
            "ziggurat_shard_searches",
            "Searches of this shard, by status.",
            ("status",),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "ziggurat_shard_search_seconds",
            "Time of searches with status 200.",
            registry=self.registry,
        )
        self.closed = Counter(
            "ziggurat_connections_closed",
            "Connections closed by the server, by reason.",
            ("reason",),
            registry=self.registry,
        )

    def searched(self, status: int, seconds: float) -> None:
        """Count a search."""
        self._searches.labels(str(status)).inc()
        if status == 200:
            self._seconds.observe(seconds)

    def page(self) -> tuple[bytes, str]:
        """The text of /metrics and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST


_VERSION, _STATE = VERSION.lower().encode(), STATE.lower().encode()


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers: Sequence[tuple[bytes, bytes]] = ((b"content-length", b"%d" % len(body)),)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _no_route(request: Request, problem: Exception) -> Response:
    error = refused(
        getattr(problem, "status_code", 404),
        expected="POST /search, POST /state, GET /shard, /livez, /readyz or /metrics of a shard",
        found=f"{request.method} {request.url.path:.80}",
        where="request line",
        ways_out="ask the server that is in front of the shards: `ziggurat serve EXPORT --shard-addresses …`",
    )
    return json_response(error_json(error, kind="RequestError"), status=error.status)


async def _refused(request: Request, problem: Exception) -> Response:
    if not isinstance(problem, ZigguratError):
        return Response(status_code=499)
    status = getattr(problem, "status", 400 if isinstance(problem, RequestError) else 409)
    return json_response(error_json(problem), status=status)
