"""Bodies and headers of requests, within bounds: bytes, depth, items, time.

What is beyond a bound is an error in four parts with a status of its own: 413 for too much, 415 for an encoding that
is not read, 400 for the rest. A body is refused by its Content-Length before any of it is read, or, sent in chunks, as
soon as it is too long.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope

from ziggurat.errors import RequestError, ZigguratError
from ziggurat.files import parse_json
from ziggurat.plain import JSON
from ziggurat.serving.answers import RankRequest, RecommendRequest
from ziggurat.serving.server.admin_socket import is_admin
from ziggurat.serving.server.config import LONGEST_PATH, ServerConfig

Question = TypeVar("Question", RecommendRequest, RankRequest)
_ADMIN_WAYS = (
    "where the server runs: curl --unix-socket PATH localhost/admin/…; the server names the path at its start",
    "choose the path: --server.admin-socket PATH",
    "for another version of the export: send SIGHUP to the server, or start it with --watch",
)
_JSON_WAYS = ("send a JSON object; /openapi.json has examples",)


class RefusedRequestError(RequestError):
    """A request that a server refuses with a status of its own.

    Attributes:
        status: of HTTP.
    """

    status: int = 400


def refused(
    status: int, *, expected: str, found: str, where: str, ways_out: str | tuple[str, ...]
) -> RefusedRequestError:
    """An error in four parts with a status."""
    error = RefusedRequestError(expected=expected, found=found, where=where, ways_out=ways_out)
    error.status = status
    return error


def refused_as(status: int, error: ZigguratError) -> RefusedRequestError:
    """The same error with a status."""
    expected = error.expected
    found = error.found
    where = error.where
    ways_out = error.ways_out
    return refused(status, expected=expected, found=found, where=where, ways_out=ways_out)


def check_admin(request: Request) -> None:
    """Let through what came by the admin socket.

    Raises:
        RefusedRequestError: it came by a port, which strangers may reach through a proxy.
    """
    if not is_admin(request.scope):
        raise refused(
            403,
            expected="a request through the admin socket",
            found="one through a port",
            where=f"POST {request.url.path}",
            ways_out=_ADMIN_WAYS,
        )


def check_query(scope: Scope) -> None:
    """Refuse what stands behind a question mark, which nothing reads: `/users?limit=5`, or `/items/what?` for an id.

    Raises:
        RefusedRequestError: there is something.
    """
    query = scope["query_string"].decode("latin-1")
    if query:
        raise refused(
            400,
            expected=f"{scope['path']:.80} alone, without parameters in the address",
            found=f"?{query:.80}",
            where="request line",
            ways_out=(
                "leave it out; settings of a request stand in its body: see /openapi.json",
                "in an id, write %3F for a question mark",
            ),
        )


class ClientDisconnected(Exception):  # noqa: N818 - not an error: no client is left to read one
    """A client closed its connection before its request had arrived."""


def header(scope: Scope, name: bytes) -> str:
    """A header of a request as text, or ""."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return ""


async def read_body(scope: Scope, receive: Receive, *, config: ServerConfig) -> bytes:
    """The body of a request.

    Raises:
        RefusedRequestError: it is too long, or compressed.
        ClientDisconnected: the client left.
    """
    most = config.max_body_bytes
    if (encoding := header(scope, b"content-encoding")) and encoding.lower() != "identity":
        raise refused(
            415,
            expected="a body as it is",
            found=f"Content-Encoding: {encoding:.40}",
            where="request, header Content-Encoding",
            ways_out="send the JSON uncompressed",
        )
    declared = header(scope, b"content-length")
    # 20 digits are beyond any bound, and int() of a million of them takes long.
    if declared.isdigit() and int(declared[:20]) > most:
        raise _too_long(most, f"{int(declared[:20]):,} bytes")
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > most:
            raise _too_long(most, f"more than {most:,} bytes")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def read_swap(body: bytes) -> tuple[str, bool]:
    """Return the folder that {"export": FOLDER} names, and its "accept_loss"; raises RequestError."""
    data = read_json(body)
    accept_loss = data.pop("accept_loss", False) if isinstance(data, dict) else False
    if not isinstance(accept_loss, bool):
        raise RequestError(
            expected='"accept_loss": true or false',
            found=f"{accept_loss!r:.80}",
            where="request, body",
            ways_out="true: take an export that answers less than the one that is served",
        )
    return _export_of(data), accept_loss


def read_export(body: bytes) -> str:
    """Return the folder that {"export": FOLDER} names; raises RequestError."""
    return _export_of(read_json(body))


def _export_of(data: JSON) -> str:
    path = data.get("export") if isinstance(data, dict) and set(data) == {"export"} else None
    if not isinstance(path, str) or not 0 < len(path) <= LONGEST_PATH:
        raise RequestError(
            expected=f'{{"export": "FOLDER"}}, a path of at most {LONGEST_PATH:,} characters',
            found=f"{data!r:.80}",
            where="request, body",
            ways_out="name the folder of an export on the server's machine",
        )
    return path


def _too_long(most: int, found: str) -> RefusedRequestError:
    return refused(
        413,
        expected=f"a body of at most {most:,} bytes",
        found=found,
        where="request, body",
        ways_out=("send fewer items in one request", "start the server with a larger --server.max-body-bytes"),
    )


def read_json(body: bytes) -> JSON:
    """Return a body as plain data: no key twice, nothing nested too deep, no number out of reach, no NaN."""
    data = parse_json(body, where="request, body", error=RequestError, ways_out=_JSON_WAYS)
    if (b"NaN" in body or b"Infinity" in body) and _has_no_number(data):  # Python's parser takes them, JSON has none
        raise RequestError(
            expected="valid JSON",
            found="NaN or Infinity, which JSON does not have",
            where="request, body",
            ways_out=("null for a value that is missing", *_JSON_WAYS),
        )
    return data


def _has_no_number(data: object) -> bool:
    """Return whether a float in plain data is not finite."""
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return True
        if isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return False


def read_recommend(body: bytes, *, config: ServerConfig) -> RecommendRequest:
    """Return a body as a request for recommendations; raises RequestError."""
    return recommend_of(read_json(body), config=config)


def recommend_of(data: JSON, *, config: ServerConfig) -> RecommendRequest:
    """Return plain data as a request for recommendations within the server's bounds; raises RequestError."""
    k = data.get("k") if isinstance(data, dict) else None
    # 10.0 is an integer of JSON Schema, and some languages write no other.
    if isinstance(data, dict) and isinstance(k, float) and k.is_integer():
        k = int(k)
        data = {**data, "k": k}
    if type(k) is int and not 1 <= k <= config.max_k:
        raise _not_so_many(f"1 to {config.max_k:,}", k, "k")
    request = _build(RecommendRequest, data)
    if len(request.exclude) > config.max_items:
        raise _not_so_many(f"at most {config.max_items:,} ids", len(request.exclude), "exclude")
    return request


def read_rank(body: bytes, *, config: ServerConfig) -> RankRequest:
    """A body as a request for a ranking; raises RequestError."""
    data = read_json(body)
    items = data.get("items") if isinstance(data, dict) else None
    if isinstance(items, list) and not 1 <= len(items) <= config.max_items:
        raise _not_so_many(f"1 to {config.max_items:,} items", len(items), "items")
    return _build(RankRequest, data)


def _build(cls: type[Question], data: JSON) -> Question:
    """A request of plain data: by its constructor, which checks once, or, where that fails, by what explains best."""
    if not isinstance(data, dict):
        return cls.from_json(data)
    try:
        # Not yet typed: the constructor checks what it is given, and names what is wrong.
        given: dict[str, Any] = {name: tuple(value) if type(value) is list else value for name, value in data.items()}
        return cls(**given)
    except (TypeError, AttributeError, ZigguratError):
        return cls.from_json(data)


def _not_so_many(expected: str, found: int, name: str) -> RequestError:
    few = ("ask for at least one",)
    return RequestError(
        expected=expected,
        found=f"{found:,}",
        where=f"request, field {name!r}",
        ways_out=few if found < 1 else ("ask for fewer", "ask several times"),
    )


def read_deadline(scope: Scope, *, config: ServerConfig) -> float | None:
    """Seconds that the header X-Deadline-Ms allows, or None without one; raises RequestError."""
    text = header(scope, b"x-deadline-ms")
    if not text and all(name != b"x-deadline-ms" for name, _ in scope["headers"]):
        return None
    given = {value for name, value in scope["headers"] if name == b"x-deadline-ms"}
    if len(given) > 1:
        raise RequestError(
            expected="one deadline",
            found=" and ".join(sorted(repr(value.decode("latin-1")[:40]) for value in given)[:3]),
            where="request, header X-Deadline-Ms",
            ways_out=("X-Deadline-Ms: 100", "leave the header out"),
        )
    try:
        # float() takes 1_000, which is no number elsewhere.
        value = float(text) if len(text) < 20 and "_" not in text else float("nan")
    except ValueError:
        value = float("nan")
    if not 0 < value <= config.max_deadline_ms:
        raise RequestError(
            expected=f"milliseconds, above 0 and at most {config.max_deadline_ms:g}",
            found=repr(text[:40]),
            where="request, header X-Deadline-Ms",
            ways_out=("X-Deadline-Ms: 100", "leave the header out"),
        )
    return value / 1e3
