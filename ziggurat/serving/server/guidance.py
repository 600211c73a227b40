"""Ways out for clients: requests in JSON that this export answers, on the address that was asked.

Errors of plain data know the fields of a request, but neither the columns of the export nor where the server listens.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ziggurat.errors import RequestError
from ziggurat.serving.answers import Column, Info
from ziggurat.serving.server.openapi import example_changes, example_ranking, example_request
from ziggurat.serving.server.responses import encode

_MAX_CHARACTERS = 200  # of the columns of one user or item
_ADDRESS = re.compile(r"[A-Za-z0-9._-]{1,100}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Bodies of requests as JSON text, of a few columns each.

    Args:
        recommend: of /recommend.
        rank: of /rank.
        items: of /admin/items.
    """

    recommend: str
    rank: str
    items: str

    @staticmethod
    def of(info: Info) -> Examples:
        """The examples of an export."""
        info = _with_golden_values(info)
        few = dataclasses.replace(
            info,
            user_columns=_few(info.user_columns, first=info.user_id),
            item_columns=_few(info.item_columns, first=info.item_id),
        )
        changes = example_changes(few)
        return Examples(recommend=_text(example_request(few)), rank=_text(example_ranking(few)), items=_text(changes))


@contextmanager
def shown(example: str) -> Iterator[None]:
    """Add an example to the ways out of errors that are raised meanwhile."""
    try:
        yield
    except RequestError as error:
        raise RequestError(
            expected=error.expected,
            found=error.found,
            where=error.where,
            ways_out=(*error.ways_out, f"for example: {example}"),
        ) from None


def curl(path: str, *, host: str, body: str) -> str:
    """A command that asks a server.

    Args:
        path: of the route.
        host: as the client named the server, with its port; left out if it is no address.
        body: JSON.
    """
    quoted = body.replace("'", "'\\''")
    return f"curl -s {host if _ADDRESS.fullmatch(host) else 'HOST:PORT'}{path} -d '{quoted}'"


def _with_golden_values(info: Info) -> Info:
    """Return the facts of an export without a catalogue with a value for each column, by which few are chosen."""
    if any(column.example is not None for column in (*info.user_columns, *info.item_columns)):
        return info
    values = example_ranking(info)["user"]
    assert isinstance(values, dict), "an object of columns"
    columns = tuple(dataclasses.replace(column, example=values.get(column.name)) for column in info.user_columns)
    return dataclasses.replace(info, user_columns=columns, item_columns=())


def _few(columns: tuple[Column, ...], *, first: str) -> tuple[Column, ...]:
    """The column of the id and as many others as are short together."""
    kept: list[Column] = []
    room = _MAX_CHARACTERS
    for column in sorted(columns, key=lambda column: column.name != first):
        if column.example is None:
            continue
        room -= len(_text({column.name: column.example}))
        if kept and room < 0:
            break
        kept.append(column)
    return tuple(kept)


def _text(data: object) -> str:
    return encode(data).decode()
