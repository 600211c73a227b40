"""Errors for what an export has not: an index, a ranker, a catalogue; each says how to make one that has it."""

from __future__ import annotations

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


def no_catalogue(name: str, *, column: str = "COLUMN") -> RequestError:
    """The export of this name knows no items, of which a column is given."""
    return RequestError(
        expected="an export with a catalogue of items",
        found="none",
        where=f"export {name}",
        ways_out=(
            f'give items by their columns: {{"items": [{{"{column}": "…"}}]}}',
            "name the item's features in the schema ([items]), and train and export again",
        ),
    )
