"""Schemas as TOML files: written by `ziggurat data inspect`, edited by hand, read back exactly.

A schema file has one block for each feature, label and table, one for the roles, and one for the items. What has its
default value is left out, so a file says only what was decided:

    # 6,040 distinct whole numbers in 1,000,209 rows, like an id
    [[feature]]
    name = "user_id"
    kind = "categorical"

    [[label]]
    name = "like"
    column = "rating"
    positive_from = 4.0

    [[table]]
    name = "user_id"
    min_count = 5

    [roles]
    group = "user_id"
    time = "timestamp"

    [items]
    id = "movie_id"
    features = ["movie_id", "genres"]

A block `[[extra]]` names a column that a loss reads; see `extras.py`. A block `[[number]]` says how the numbers of one
column of text are written; see `number_marks.py`. A file whose rows are events of users has a block
`[events]` as well; see `events.py`.

Above the first block, `missing = ["NULL", "?"]` says which texts mean that there is no value; left out, those of
`schema.MISSING_TEXTS` do, and `missing = []` takes every text as it is.

Every key is checked against the dataclasses of `schema.py` and `kinds/`: an unknown key, a value of the wrong type or
an unknown choice is an error that names the file, the block and the nearest valid name.
`schema_from_toml(schema_to_toml(s)) == s` for every schema. Needs neither torch nor polars.
"""

from __future__ import annotations

import os
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import StrEnum
from pathlib import Path

import tomlkit
from tomlkit.items import AoT, Item

from ziggurat.arguments import check_arguments
from ziggurat.commands import pasted
from ziggurat.errors import DataError, SchemaError, ZigguratError, nearest_names
from ziggurat.features.events import Events
from ziggurat.features.items import Items, Repeats
from ziggurat.features.labels import refuse_threshold_of_number
from ziggurat.features.schema import (
    MISSING_TEXTS,
    Extra,
    Feature,
    Label,
    NumberColumn,
    Schema,
    Table,
    column_of,
)
from ziggurat.features.schema_checks import refuse_unread_numbers
from ziggurat.files import check_version, parse_toml, read_text, write_text
from ziggurat.specification import Specification
from ziggurat.typed import Reader, extension_way, nearest, quoted

ROLES = ("weight", "group", "session", "time")
BLOCKS = ("missing", "feature", "label", "table", "extra", "number", "roles", "items", "events")
VERSION = 1  # of the file; `version = 1` may stand at its top
_COMMENT_WIDTH = 116


@check_arguments
def read_schema(path: str | os.PathLike[str]) -> Schema:
    """The schema in the TOML file `path`.

    Raises:
        MissingFileError: there is no such file.
        SchemaError: it is not TOML, or not a schema; names file, block and key.

    Example:
        >>> schema = zg.Schema(features=(zg.Dense(name="price"),), labels=(zg.Label(name="click"),))
        >>> zg.read_schema(zg.write_schema(schema, "shop.toml")) == schema
        True
    """
    text = read_text(
        path,
        what="a schema file in TOML",
        error=SchemaError,
        ways_out=(
            f"let Ziggurat guess one: ziggurat data inspect YOUR_DATA --write-schema {pasted(os.fspath(path))}",
            "name a text file, or correct the path",
        ),
    )
    return schema_from_toml(text, os.fspath(path))


@check_arguments
def write_schema(schema: Schema, path: str | os.PathLike[str], *, comments: Mapping[str, str] | None = None) -> Path:
    """Write `schema` as TOML, atomically (temporary file, then rename); returns the path.

    Args:
        schema: what to write.
        path: the file; its folder is made.
        comments: see `schema_to_toml`.

    Raises:
        DataError: the file cannot be written.

    Example:
        >>> schema = zg.Schema(features=(zg.Dense(name="price"),), labels=(zg.Label(name="click"),))
        >>> zg.write_schema(schema, "shop.toml").name
        'shop.toml'
    """
    return write_text(path, schema_to_toml(schema, comments=comments), error=DataError)


def schema_to_toml(schema: Schema, *, comments: Mapping[str, str] | None = None) -> str:
    """The TOML text of a schema, defaults left out.

    Args:
        schema: what to write.
        comments: explanations by raw column, written above the first block that reads the column. Those of columns
            that the schema does not read are listed at the end; the one under "" opens the file.
    """
    # Those that no block has taken stand at the end, so that nothing that was found is lost.
    pending = dict(comments or {})
    lines = [_comment(pending.pop("", "")) + _missing_text(schema.missing_texts)]
    blocks: list[tuple[str, Feature | Label | Table | Extra]] = [("feature", feature) for feature in schema.features]
    blocks += [("label", label) for label in schema.labels]
    blocks += [("table", table) for table in schema.tables]
    blocks += [("extra", extra) for extra in schema.extras]
    for name, item in blocks:
        comment = "" if isinstance(item, Table) else pending.pop(column_of(item), "")
        lines.append(_comment(comment) + _block_text(name, item))
    lines += [_block_text("number", each) for each in schema.numbers]
    roles = {role: getattr(schema, role) for role in ROLES if getattr(schema, role)}
    if roles:
        notes = {role: pending.pop(column, "") for role, column in roles.items()}
        lines.append(_roles_text(roles, notes))
    if schema.items is not None:
        lines.append(_items_text(schema.items))
    if schema.events is not None:
        lines.append(_events_text(schema.events))
    if pending:
        rest = [_comment(f"  {column}: {text}") for column, text in pending.items()]
        lines.append("".join([_comment("Columns that no block reads:"), *rest]))
    return "\n\n".join(line.rstrip() for line in lines if line) + "\n"


def schema_from_toml(text: str, where: str) -> Schema:
    """The schema in TOML text; `where` (usually the file) opens the location in errors.

    Raises:
        SchemaError: names `where`, block and key, with the nearest valid name.
    """
    ways_out = ("correct the line", 'text needs quotes: name = "user_id"', "a block opens with [[feature]]")
    data = parse_toml(text, where=where, error=SchemaError, ways_out=ways_out)
    # First: a newer file may have blocks that would be called unknown.
    check_version(data, VERSION, where=where, what="a schema", error=SchemaError)
    _refuse_unknown(data, BLOCKS, where=f"{where}, top level", what="block")
    features = tuple(_read_feature(entry, place) for entry, place in _entries(data, "feature", where))
    labels = tuple(_read_item(Label, entry, place) for entry, place in _entries(data, "label", where))
    # Here and not in the label: the error names the file.
    refuse_threshold_of_number(labels, where=where)
    tables = tuple(_read_item(Table, entry, place) for entry, place in _entries(data, "table", where))
    extras = tuple(_read_item(Extra, entry, place) for entry, place in _entries(data, "extra", where))
    numbers = tuple(_read_item(NumberColumn, entry, place) for entry, place in _entries(data, "number", where))
    missing = _read_missing(data, where)
    roles = _read_roles(data, where)
    items = _read_block(Items, data, "items", where=where, example='id = "movie_id", features = ["year"]')
    given = {"labels": labels, "tables": tables, "extras": extras, "numbers": numbers, "missing_texts": missing}
    given |= {"items": items, **roles}
    given["events"] = _read_block(Events, data, "events", where=where, example='actions = ["rating"], max_length = 200')
    # What does not go together is found only by the schema as a whole, which knows no file.
    schema = _located(where, lambda: Schema(features=features, **given))
    refuse_unread_numbers(schema, where=where)
    return schema


# ---------------------------------------------------------------------------------------------------------- writing


def _block_text(name: str, item: Feature | Label | Table | Extra | NumberColumn) -> str:
    """One `[[name]]` block: the name, the kind, then whatever is not the default."""
    table = tomlkit.table()
    if not isinstance(item, NumberColumn):
        table.add("name", _plain(item.name))
    if isinstance(item, Feature):
        table.add("kind", _plain(item.kind))
    for entry in fields(item):
        value = getattr(item, entry.name)
        if entry.name not in ("name", "kind") and (entry.default is MISSING or value != entry.default):
            table.add(entry.name, _plain(value))
    document = tomlkit.document()
    document.append(name, AoT([table]))
    return document.as_string().strip()


def _missing_text(texts: tuple[str, ...]) -> str:
    """The line `missing = [...]`, where it is not the default."""
    return "" if texts == MISSING_TEXTS else f"missing = {tomlkit.item(list(texts)).as_string()}\n"


def _roles_text(roles: Mapping[str, str], notes: Mapping[str, str]) -> str:
    lines = [f"{_comment(notes[role])}{role} = {_plain(column).as_string()}\n" for role, column in roles.items()]
    return "".join(["[roles]\n", *lines])


def _items_text(items: Items) -> str:
    names = tomlkit.item(list(items.features)).as_string()
    text = f"[items]\nid = {_plain(items.id).as_string()}\nfeatures = {names}\n"
    is_default = items.repeats is Repeats.LEAVE_OUT_BUT_TARGET
    return text if is_default else f"{text}repeats = {_plain(items.repeats).as_string()}\n"


def _events_text(events: Events) -> str:
    changed = [entry for entry in fields(Events) if getattr(events, entry.name) != entry.default]
    lines = [f"{entry.name} = {_plain(getattr(events, entry.name)).as_string()}\n" for entry in changed]
    return "".join(["[events]\n", *lines])


def _plain(value: object) -> Item:
    if isinstance(value, StrEnum | Specification):
        return tomlkit.item(value.value)
    return tomlkit.item(list(value) if isinstance(value, tuple) else value)


def _comment(text: str) -> str:
    """`text` as comment lines of at most 118 characters, or ""; control characters become spaces."""
    clean = "".join(character if character.isprintable() else " " for character in text)
    indent = " " * (len(clean) - len(clean.lstrip()))
    lines = textwrap.wrap(clean.strip(), _COMMENT_WIDTH, initial_indent=indent, subsequent_indent=indent * 2)
    return "".join(f"# {line}\n" for line in lines)


# ---------------------------------------------------------------------------------------------------------- reading


def _entries(data: Mapping[str, object], block: str, where: str) -> Iterable[tuple[dict[str, object], str]]:
    """Each `[[block]]` with its place, for errors: the name if it has one, else its number."""
    blocks = data.get(block, [])
    if not isinstance(blocks, list) or not all(isinstance(entry, dict) for entry in blocks):
        raise SchemaError(
            expected=f"blocks that open with [[{block}]]",
            found=f"{block} = {quoted(blocks)}" if not isinstance(blocks, dict) else f"[{block}], in single brackets",
            where=where,
            ways_out=f"write [[{block}]] in double brackets: there can be many",
        )
    for number, entry in enumerate(blocks, start=1):
        name = entry.get("column" if block == "number" else "name")
        yield entry, f"{where}, {block} {name!r}" if isinstance(name, str) else f"{where}, {block} number {number}"


def _read_feature(entry: dict[str, object], where: str) -> Feature:
    kinds = Feature.kinds()
    kind = entry.get("kind")
    if "kind" not in entry:
        known = {field.name for feature in kinds.values() for field in fields(feature)}
        for name in entry:
            if name not in known and nearest_names(name, ["kind"], cutoff=0.5):
                raise SchemaError(
                    expected=f"a key kind, one of {', '.join(kinds)}",
                    found=f"unknown key {name!r}",
                    where=f"{where}, key {name!r}",
                    ways_out=f"write kind = {quoted(entry[name])}: that is the nearest key",
                )
    if not isinstance(kind, str) or kind not in kinds:
        raise SchemaError(
            expected=f"kind = one of {', '.join(kinds)}",
            found=f"kind = {quoted(kind)}" if "kind" in entry else "no kind",
            where=where,
            ways_out=(
                *nearest(str(kind), kinds, instead='add kind = "categorical" or another of these'),
                *([extension_way(Feature.family)] if isinstance(kind, str) else []),
            ),
        )
    return _read_item(kinds[kind], entry, where)


_ItemT = typing.TypeVar("_ItemT", bound=Feature | Label | Table | Extra | NumberColumn)
_BlockT = typing.TypeVar("_BlockT", Items, Events)


def _read_item(cls: type[_ItemT], entry: dict[str, object], where: str) -> _ItemT:
    try:
        return Reader(where=where, noun="key", error=SchemaError).build(cls, entry)
    except SchemaError as error:
        if error.where.startswith(where):
            raise
        return _located(where.split(", ")[0], lambda: _again(error))


def _again(error: ZigguratError) -> typing.NoReturn:
    raise error


def _read_missing(data: Mapping[str, object], where: str) -> tuple[str, ...]:
    texts = data.get("missing", list(MISSING_TEXTS))
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return tuple(texts)
    raise SchemaError(
        expected="a list of texts that mean no value",
        found=f"missing = {quoted(texts)}",
        where=where,
        ways_out=(
            'missing = ["NULL", "?"]',
            "missing = []",
            "leave it out: " + ", ".join(MISSING_TEXTS) + " are missing",
        ),
    )


def _read_roles(data: Mapping[str, object], where: str) -> dict[str, str]:
    roles = data.get("roles", {})
    place = f"{where}, [roles]"
    if not isinstance(roles, dict):
        raise SchemaError(
            expected="one block that opens with [roles]",
            found=f"roles = {quoted(roles)}",
            where=where,
            ways_out='write [roles], in single brackets, and below it lines like time = "timestamp"',
        )
    _refuse_unknown(roles, ROLES, where=place, what="role")
    return {
        role: Reader(where=place, noun="key", error=SchemaError).read(str, value, role) for role, value in roles.items()
    }


def _read_block(
    kind: type[_BlockT], data: Mapping[str, object], name: str, *, where: str, example: str
) -> _BlockT | None:
    """The block [name] of a schema, if it is there; the example is what its error says to write below the name."""
    if name not in data:
        return None
    if not isinstance(data[name], dict):
        raise SchemaError(
            expected=f"one block that opens with [{name}]",
            found=f"{name} = {quoted(data[name])}",
            where=where,
            ways_out=f"write [{name}], in single brackets, and below it {example}",
        )
    return Reader(where=f"{where}, [{name}]", noun="key", error=SchemaError).build(kind, data[name])


def _refuse_unknown(data: Iterable[str], known: Iterable[str], *, where: str, what: str) -> None:
    known = list(known)
    for name in data:
        if name not in known:
            raise SchemaError(
                expected=f"only these {what}s: {', '.join(known)}",
                found=f"unknown {what} {name!r}",
                where=where,
                ways_out=(*_other_places(name, known), *nearest(name, known, instead=f"remove {name!r}")),
            )


def _other_places(name: str, known: Sequence[str]) -> list[str]:
    """Say which blocks of a schema have a key that stands in another place."""
    if name in ROLES and name not in known:
        return [f"write it below a line [roles]: {name} = …"]
    if name in {entry.name for entry in fields(Label)}:
        return ["write it below the [[label]] that it belongs to"]
    return []


_ResultT = typing.TypeVar("_ResultT")


def _located(where: str, make: typing.Callable[[], _ResultT]) -> _ResultT:
    """`make()`, with `where` put before the location of a SchemaError that it raises."""
    try:
        return make()
    except ZigguratError as error:
        raise SchemaError(
            expected=error.expected, found=error.found, where=f"{where}, {error.where}", ways_out=error.ways_out
        ) from None
