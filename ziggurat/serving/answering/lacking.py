"""Errors for what an export has not: an index, a ranker, a catalogue; each says how to make one that has it."""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.errors import RequestError


def no_index(name: str) -> RequestError:
    """The export of this name ranks only."""
    return RequestError(
        expected="an export with an index of items",
        found="one that ranks given items only",
        where=f"export {name}",
        ways_out=(
            'rank: {"user": {…}, "items": ["…"]}',
            "ziggurat export RUN_THAT_FINDS_ITEMS --ranker RUN --out FOLDER",
        ),
    )


def no_ranker(name: str) -> RequestError:
    """The export of this name retrieves only."""
    return RequestError(
        expected="an export with a ranker",
        found="one that retrieves only",
        where=f"export {name}",
        ways_out="ziggurat export RUN_THAT_FINDS_ITEMS --ranker RUN --out FOLDER",
    )


def no_catalogue(name: str, *, columns: Sequence[str] = ()) -> RequestError:
    """The export of this name knows no items, which are given by columns: those of rows of its data."""
    named = f" ({', '.join(columns)})" if columns else ""
    return RequestError(
        expected="an export with a catalogue of items",
        found="none",
        where=f"export {name}",
        ways_out=(
            f'give items by their columns{named}, and not by ids: rank(user, [{{"COLUMN": "…"}}]), or over HTTP '
            '"items": [{"COLUMN": "…"}]',
            "name the item's features in the schema ([items]), and train and export again",
        ),
    )
