"""Answers as bytes: with orjson and without it the same data, and never NaN."""

from __future__ import annotations

import json
import math

import pytest

from ziggurat.serving.server import responses

DATA = {
    "items": [{"id": "Amélie \U0001f3ac", "score": 0.1, "tasks": {"like": 1e-300, "größe": -3.0e38}, "position": 3}],
    "version": 'a"\\\n\u2028',
    "nothing": None,
    "half a pair": "\ud800",
    "whole": 12345678901234567890,
}


@pytest.mark.parametrize("names", [("items",), ("version",), ("nothing",), ("half a pair",), tuple(DATA)])
@pytest.mark.parametrize("has_orjson", [True, False])
def test_both_encoders_write_the_same_data(
    names: tuple[str, ...], has_orjson: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_orjson:
        monkeypatch.setattr(responses, "orjson", pytest.importorskip("orjson"))
    else:
        monkeypatch.setattr(responses, "orjson", None)
    data = {name: DATA[name] for name in names}
    assert json.loads(responses.encode(data)) == data


@pytest.mark.parametrize("has_orjson", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_has_not_is_refused(value: float, has_orjson: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "orjson", pytest.importorskip("orjson") if has_orjson else None)
    with pytest.raises(ValueError, match="Out of range"):
        responses.encode({"score": value})
