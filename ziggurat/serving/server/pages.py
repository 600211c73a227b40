"""The web page and what it reads: users to pick, their history, items, why an item was filtered.

The page is one HTML file with a script and a style of its own, packaged; nothing is fetched from elsewhere, and the
browser is told so (Content-Security-Policy). What it shows comes from routes that anyone with the API
key may use, if there is one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ziggurat.errors import RequestError
from ziggurat.plain import JSON, as_group
from ziggurat.serving.answers import Answerer
from ziggurat.serving.plain_values import plain
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.reading import check_query, read_body, read_json, recommend_of, refused_as
from ziggurat.serving.server.responses import json_response

_FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_MAX_USERS = 100  # as many as a list on a page is read
_MAX_HISTORY = 50


def page_routes(*, answerer: Answerer, config: ServerConfig) -> list[Route]:
    """The routes of the page.

    Args:
        answerer: whose items and users it shows.
        config: limits of bodies.
    """
    pages = _Pages(answerer=answerer, config=config)
    return [
        *(Route(path, _file(name, kind)) for path, (name, kind) in _FILES.items()),
        Route("/info", _alone(pages.info)),
        Route("/users", _alone(pages.users)),
        Route("/items", _alone(pages.items), methods=["POST"]),
        _any_text(Route("/items/{id:path}", _alone(pages.item))),
        Route("/history", _alone(pages.history), methods=["POST"]),
        Route("/explain", _alone(pages.explain), methods=["POST"]),
    ]


def _alone(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Let a route refuse parameters in the address, which it would not read."""

    async def answered(request: Request) -> Response:
        check_query(request.scope)
        return await answer(request)

    return answered


def _any_text(route: Route) -> Route:
    """Let the last part of a route's path be any text: Starlette's own pattern ends at a line end."""
    prefix = route.path.partition("{")[0]
    route.path_regex = re.compile(f"{re.escape(prefix)}(?P<id>.*)\\Z", re.DOTALL)
    return route


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    # Read once: the page of a server that runs goes with its code, whatever is installed meanwhile.
    content = resources.files("ziggurat.serving.server").joinpath("page", name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, media_type=kind, headers=_SECURITY)

    return serve


class _Pages:
    def __init__(self, *, answerer: Answerer, config: ServerConfig) -> None:
        self.answerer = answerer
        self.config = config
        self._columns = frozenset(name.strip() for name in config.show_columns.split(",") if name.strip())
        self._limits = {"max_k": config.max_k, "max_items": config.max_items, "deadline_ms": config.deadline_ms}

    async def info(self, request: Request) -> Response:
        return json_response(as_group(plain(self.answerer.info().to_json())) | {"limits": self._limits})

    async def users(self, request: Request) -> Response:
        return json_response({"users": await run_in_threadpool(self.answerer.users, limit=_MAX_USERS)})

    async def item(self, request: Request) -> Response:
        id = request.path_params["id"]
        try:
            # In a thread, since reading a catalogue must not hold up the event loop.
            columns = await run_in_threadpool(self.answerer.item, id)
        except RequestError as error:
            raise refused_as(404, error) from None
        return json_response({"id": id, "columns": self._shown(columns)})

    def _shown(self, columns: dict[str, object]) -> JSON:
        """Return the columns of an item that clients are to see."""
        if not self._columns:
            return plain(columns)
        return plain({name: value for name, value in columns.items() if name in self._columns})

    async def items(self, request: Request) -> Response:
        ids = (await self._read(request, {"ids"}))["ids"]
        texts = [id for id in ids if isinstance(id, str)] if isinstance(ids, list) else []
        if not isinstance(ids, list) or len(ids) > self.config.max_k or len(texts) < len(ids):
            raise _wrong(f'{{"ids": ["17", …]}}, at most {self.config.max_k:,}', ids)
        return json_response({"items": await run_in_threadpool(self._columns_of, texts)})

    async def history(self, request: Request) -> Response:
        data = await self._read(request, {"user"})
        user = data["user"]
        if not isinstance(user, dict):
            raise _wrong('{"user": {"user_id": "17"}}', data)
        found = await run_in_threadpool(self._history, user)
        return json_response({"items": found})

    def _history(self, user: Mapping[str, object]) -> list[dict[str, object]]:
        return self._columns_of(self.answerer.history(user, limit=_MAX_HISTORY))

    def _columns_of(self, ids: Sequence[str]) -> list[dict[str, object]]:
        """Items with their columns; without columns those that the catalogue has not."""
        found = []
        for id in ids:
            with contextlib.suppress(RequestError):
                found.append({"id": id, "columns": self._shown(self.answerer.item(id))})
                continue
            found.append({"id": id, "columns": {}})
        return found

    async def explain(self, request: Request) -> Response:
        data = await self._read(request, {"request", "item"})
        if not isinstance(data["item"], str):
            raise _wrong('{"request": {"user": {…}, "filter": "…"}, "item": "17"}', data)
        question = recommend_of(data["request"], config=self.config)
        explanation = await run_in_threadpool(self.answerer.explain_item, question, data["item"])
        return json_response({"item": data["item"], "explanation": explanation})

    async def _read(self, request: Request, fields: set[str]) -> dict[str, JSON]:
        data = read_json(await read_body(request.scope, request.receive, config=self.config))
        if not isinstance(data, dict) or set(data) != fields:
            raise _wrong("an object with " + " and ".join(sorted(fields)), data)
        return data


def _wrong(expected: str, data: object) -> RequestError:
    return RequestError(expected=expected, found=f"{data!r:.80}", where="request, body", ways_out="see /openapi.json")
