"""Checks of the names in a schema: how many columns there are, and how they are called."""

from __future__ import annotations

from collections import Counter

from ziggurat.errors import SchemaError

# Every feature costs time before training begins (about 8 ms), and so many are one list that was written wide.
MAX_FEATURES = 20_000


def refuse_too_many_columns(count: int, *, what: str, where: str) -> None:
    """Raise SchemaError for more columns than a schema may have features."""
    if count > MAX_FEATURES:
        raise SchemaError(
            expected=f"at most {MAX_FEATURES:,} {what}",
            found=f"{count:,}",
            where=where,
            ways_out=(
                "keep the columns that matter: a file may have any number that the schema does not name",
                "write columns that mean the same (tag_1, tag_2, …) as one list column, a multi_hot feature",
            ),
        )


def refuse_doubles(what: str, names: list[str]) -> None:
    """Raise SchemaError for a name that is empty, or that two of them have."""
    doubles = sorted(name for name, count in Counter(names).items() if count > 1)
    if doubles or "" in names:
        raise SchemaError(
            expected=f"every {what} to have a name of its own",
            found=f"{doubles or 'an empty name'} more than once" if doubles else "an empty name",
            where=f"schema, {what}s",
            ways_out=f"rename one {what}; `column` can still name the same column twice",
        )


def refuse_our_columns(names: list[str]) -> None:
    """Encoded data has columns of our own beside the features: `row:`, `group:`, `weight:`, `label:NAME`."""
    ours = [name for name in names if name in ("row:", "group:", "weight:") or name.startswith("label:")]
    if ours:
        raise SchemaError(
            expected="features that are not called row:, group:, weight: or label:…, as our own columns are",
            found=", ".join(map(repr, ours[:5])),
            where="schema, features",
            ways_out='rename the feature, and name its column: name = "row", column = "row:"',
        )
