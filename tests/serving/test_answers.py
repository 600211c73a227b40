"""Requests and answers as plain data: what cannot be asked is refused by name, whoever makes it."""

from __future__ import annotations

import json

import pytest

from ziggurat.errors import RequestError
from ziggurat.serving.answers import MAX_K, RankRequest, Recommendations, RecommendRequest, ScoredItem


def test_request_from_json() -> None:
    request = RecommendRequest.from_json({"user": {"user_id": "17"}, "k": 3, "exclude": ["m1"]})
    assert request == RecommendRequest(user={"user_id": "17"}, k=3, exclude=("m1",))
    assert RankRequest.from_json({"user": {}, "items": ["m1", {"genres": ["Drama"]}]}).items[0] == "m1"


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ([1], "request"),
        ({}, "'user'"),
        ({"user": "17"}, "'user'"),
        ({"user": {}, "k": 0}, "'k'"),
        ({"user": {}, "k": MAX_K + 1}, "'k'"),
        ({"user": {}, "k": True}, "'k'"),
        ({"user": {}, "filter": ["a"]}, "'filter'"),
        ({"user": {}, "exclude": "m1"}, "'exclude'"),
        ({"user": {}, "kk": 3}, "'kk'"),
    ],
)
def test_wrong_field_is_named(data: object, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        RecommendRequest.from_json(data)
    assert place in str(caught.value)


@pytest.mark.parametrize("items", [[], [3], [None], "m1"])
def test_wrong_items_are_refused(items: object) -> None:
    with pytest.raises(RequestError, match="items"):
        RankRequest.from_json({"user": {}, "items": items})


def test_answer_to_json() -> None:
    answer = Recommendations(items=(ScoredItem(id="m1", score=0.5, tasks={"like": 0.5}),), version="v", plan="exact")
    data = json.loads(json.dumps(answer.to_json()))
    assert data["items"] == [{"id": "m1", "score": 0.5, "tasks": {"like": 0.5}, "position": 0}]
    assert data["version"] == "v"
    assert data["degraded"] == []
    assert data["plan"] == "exact"
