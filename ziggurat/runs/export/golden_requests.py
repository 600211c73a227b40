"""Requests whose answers an export keeps: whoever loads it asks them again and gets the same."""

from __future__ import annotations

from typing import Any

from ziggurat.features.schema import column_of
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.parity import plain_columns, request_rows
from ziggurat.serving.load_parts import ENCODER, RANKER
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.request_rows import number_of

_GOLDEN_ITEMS = 20


def golden_requests(loaded: Recommender, data: dict[str, RunData], *, number: int) -> list[dict[str, Any]]:
    """Questions about users of the data, and about items as they stand there.

    Args:
        loaded: the export as it is so far.
        data: of the run that encodes and of the run that ranks.
        number: users, and rows, to ask about.
    """
    requests: list[dict[str, Any]] = []
    chain = loaded.chain
    info = loaded.info()
    if chain.index is not None:
        user_columns = {column.name for column in info.user_columns}
        known = loaded.users(limit=number)
        rows = _first_rows(data[ENCODER], number)
        asked = [{chain.settings.user_id: user} for user in known]
        asked += [{name: value for name, value in row.items() if name in user_columns} for row in rows]
        requests += [{"recommend": {"user": user, "k": _GOLDEN_ITEMS}} for user in asked]
    if chain.ranker is not None:
        items = {column_of(each) for each in chain.ranker.schema.features if each.name in chain.ranker.items.names}
        for row in _first_rows(data[RANKER], number):
            user = {name: value for name, value in row.items() if name not in items}
            item = {name: value for name, value in row.items() if name in items}
            requests.append({"rank": {"user": user, "items": [item]}})
    return requests


def _first_rows(data: RunData, number: int) -> list[dict[str, object]]:
    if not number:
        return []
    chunk = next(iter(data.samples(num_rows=64 * number)))
    features = (*data.schema.features, *data.more)
    rows = request_rows(plain_columns(chunk, features).gather_every(64).head(number))
    if chunk.numbers.is_plain:
        return rows
    # Texts of requests are read by the marks of the run's files, which these have no more.
    columns = {column_of(each) for each in features if each.reads_numbers}
    return [
        {name: number_of(value, column=name) if name in columns else value for name, value in row.items()}
        for row in rows
    ]
