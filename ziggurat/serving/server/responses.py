"""Answers as JSON: in ASCII, so that any text of a catalogue or a request can be in them, and without NaN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ziggurat.errors import ZigguratError
from ziggurat.serving.server.control import error_to_json

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def encode(data: Any) -> bytes:
    """Plain data as JSON; ValueError for NaN and infinity, which JSON does not have."""
    return _encode(data).encode("ascii")


def json_response(data: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Plain data as an answer of Starlette."""
    return Response(encode(data), status_code=status, media_type="application/json", headers=headers)


def error_json(error: ZigguratError, *, kind: str = "") -> dict[str, Any]:
    """An error in four parts as plain data."""
    data = error_to_json(error)
    return {"error": data | {"kind": kind or data["kind"]}}
