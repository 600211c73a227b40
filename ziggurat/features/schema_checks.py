"""Checks of a schema: how many columns there are, how they are called, and which settings of a table go together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ziggurat.errors import SchemaError, nearest_names
from ziggurat.features.growing import MAX_SIGHTINGS, Evict

if TYPE_CHECKING:
    from ziggurat.features.schema import Schema, Table

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


def refuse_doubles(what: str, names: list[str], *, ways_out: tuple[str, ...] = ()) -> None:
    """Raise SchemaError for a name that is empty, or that two of them have.

    Args:
        what: has the names.
        names: of all of them.
        ways_out: those of what cannot be renamed.
    """
    doubles = sorted(name for name, count in Counter(names).items() if count > 1)
    if doubles or "" in names:
        raise SchemaError(
            expected=f"every {what} to have a name of its own",
            found=f"{doubles or 'an empty name'} more than once" if doubles else "an empty name",
            where=f"schema, {what}s",
            ways_out=ways_out or f"rename one {what}; `column` can still name the same column twice",
        )


def refuse_our_columns(names: list[str], *, extras: list[str]) -> None:
    """Refuse features called as other encoded columns are: `row:`, `group:`, `weight:`, `label:NAME`, `extra:NAME`."""
    taken = {"row:", "group:", "weight:", *(f"extra:{name}" for name in extras)}
    ours = [name for name in names if name in taken or name.startswith("label:")]
    if ours:
        raise SchemaError(
            expected="features that are not called row:, group:, weight:, label:… or extra:…, as our own columns are",
            found=", ".join(map(repr, ours[:5])),
            where="schema, features",
            ways_out='rename the feature, and name its column: name = "row", column = "row:"',
        )


def refuse_unread_numbers(schema: Schema, *, where: str) -> None:
    """Refuse settings of the numbers of a column that nothing reads as numbers: they would do nothing, without a word.

    It is asked where a schema is new: one that was made of another may have lost features and kept their columns.

    Args:
        schema: that is new.
        where: opens the location in the error.

    Raises:
        SchemaError: names the column.
    """
    known = schema.number_columns
    for each in schema.numbers:
        if each.column in known:
            continue
        near = nearest_names(each.column, known, most=1)
        raise SchemaError(
            expected=f"a column that is read as numbers: {', '.join(known[:30]) or 'the schema has none'}",
            found=repr(each.column),
            where=f"{where}, number {each.column!r}",
            ways_out=(
                *(f'column = "{name}": that is the nearest name' for name in near),
                f"take the block out: no feature, label, extra or weight reads numbers from {each.column!r}",
            ),
        )


def refuse_impossible_table(table: Table) -> None:
    """Raise SchemaError for settings of a table that do not go together."""
    where = f"table {table.name!r}"
    encoding = table.encoding.value
    if encoding == "vocabulary" and table.num_rows:
        raise SchemaError(
            expected="no num_rows for a vocabulary table: its size is fitted",
            found=f"num_rows = {table.num_rows}",
            where=where,
            ways_out=("use max_rows to cap the vocabulary", 'set encoding = "hashing" or "identity"'),
        )
    if encoding != "vocabulary" and table.num_rows < 1:
        raise SchemaError(
            expected=f"num_rows >= 1 for encoding {encoding!r}",
            found=f"num_rows = {table.num_rows}",
            where=where,
            ways_out=("add num_rows = N to the table", 'set encoding = "vocabulary" to fit the size'),
        )
    if table.min_count < 1 or table.max_rows < 0 or table.embedding_dim < 0:
        raise SchemaError(
            expected="min_count >= 1, max_rows >= 0, embedding_dim >= 0",
            found=f"min_count={table.min_count}, max_rows={table.max_rows}, embedding_dim={table.embedding_dim}",
            where=where,
            ways_out="correct the number",
        )
    if encoding == "growing" and (table.min_count > MAX_SIGHTINGS or table.max_rows):
        raise SchemaError(
            expected=f"min_count <= {MAX_SIGHTINGS} and no max_rows for a growing table",
            found=f"min_count={table.min_count}, max_rows={table.max_rows}",
            where=where,
            ways_out=("num_rows is the limit of a growing table", f"min_count = {MAX_SIGHTINGS} or less"),
        )
    if encoding != "growing" and table.evict is not Evict.LEAST_FREQUENT:
        raise SchemaError(
            expected="evict with encoding 'growing' only: no other table lets ids go",
            found=f"evict = {table.evict.value!r} with encoding {encoding!r}",
            where=where,
            ways_out=('set encoding = "growing", with num_rows', "take evict out"),
        )
