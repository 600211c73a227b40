"""Schemas as TOML files: written by `ziggurat data inspect`, edited by hand, read back exactly.

A schema file has one block for each feature, label and table, and one for the roles. What has its default value is
left out, so a file says only what was decided:

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

Above the first block, `missing = ["NULL", "?"]` says which texts mean that there is no value; left out, those of
`schema.MISSING_TEXTS` do, and `missing = []` takes every text as it is.

Every key is checked against the dataclasses of `schema.py`: an unknown key, a value of the wrong type or an unknown
choice is an error that names the file, the block and the nearest valid name. `schema_from_toml(schema_to_toml(s)) == s`
for every schema. Needs neither torch nor polars.
"""

from __future__ import annotations

import difflib
import os
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from pathlib import Path

import tomlkit
from tomlkit.items import AoT, Item

from ziggurat.errors import DataError, MissingFileError, SchemaError, ZigguratError
from ziggurat.features.schema import (
    MISSING_TEXTS,
    Categorical,
    Dense,
    Feature,
    Label,
    MultiHot,
    Schema,
    Sequence,
    Table,
    Vector,
    column_of,
)
from ziggurat.files import write_text

KINDS: dict[str, type[Feature]] = {
    "dense": Dense,
    "categorical": Categorical,
    "multi_hot": MultiHot,
    "sequence": Sequence,
    "vector": Vector,
}
ROLES = ("weight", "group", "session", "time")
BLOCKS = ("missing", "feature", "label", "table", "roles")
_COMMENT_WIDTH = 116


def read_schema(path: str | os.PathLike[str]) -> Schema:
    """The schema in the TOML file `path`.

    Raises:
        MissingFileError: there is no such file.
        SchemaError: it is not TOML, or not a schema; names file, block and key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingFileError(
            expected="a schema file in TOML",
            found="no such file",
            where=str(path),
            ways_out=(
                f"let Ziggurat guess one: ziggurat data inspect YOUR_DATA --write-schema {path}",
                "correct the path",
            ),
        ) from None
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise SchemaError(
            expected="a schema file in TOML, encoded as UTF-8",
            found=str(error),
            where=str(path),
            ways_out="name a text file; `ziggurat data inspect DATA --write-schema FILE` writes one",
        ) from None
    return schema_from_toml(text, str(path))


def write_schema(schema: Schema, path: str | os.PathLike[str], *, comments: Mapping[str, str] | None = None) -> Path:
    """Write `schema` as TOML, atomically (temporary file, then rename); returns the path.

    Args:
        schema: what to write.
        path: the file; its folder is made.
        comments: see `schema_to_toml`.

    Raises:
        DataError: the file cannot be written.
    """
    return write_text(path, schema_to_toml(schema, comments=comments), error=DataError)


def schema_to_toml(schema: Schema, *, comments: Mapping[str, str] | None = None) -> str:
    """The TOML text of a schema, defaults left out.

    Args:
        schema: what to write.
        comments: explanations by raw column, written above the first block that reads the column. Those of columns
            that the schema does not read are listed at the end; the one under "" opens the file.
    """
    pending = dict(comments or {})
    lines = [_comment(pending.pop("", "")) + _missing_text(schema.missing_texts)]
    blocks: list[tuple[str, Feature | Label | Table]] = [("feature", feature) for feature in schema.features]
    blocks += [("label", label) for label in schema.labels]
    blocks += [("table", table) for table in schema.tables]
    for name, item in blocks:
        comment = "" if isinstance(item, Table) else pending.pop(column_of(item), "")
        lines.append(_comment(comment) + _block_text(name, item))
    roles = {role: getattr(schema, role) for role in ROLES if getattr(schema, role)}
    if roles:
        notes = {role: pending.pop(column, "") for role, column in roles.items()}
        lines.append(_roles_text(roles, notes))
    if pending:
        rest = [_comment(f"  {column}: {text}") for column, text in pending.items()]
        lines.append("".join([_comment("Columns that no block reads:"), *rest]))
    return "\n\n".join(line.rstrip() for line in lines if line) + "\n"


def schema_from_toml(text: str, where: str) -> Schema:
    """The schema in TOML text; `where` (usually the file) opens the location in errors.

    Raises:
        SchemaError: names `where`, block and key, with the nearest valid name.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SchemaError(
            expected="valid TOML",
            found=str(error),
            where=where,
            ways_out=("correct the line", 'text needs quotes: name = "user_id"', "a block opens with [[feature]]"),
        ) from None
    _refuse_unknown(data, BLOCKS, where=f"{where}, top level", what="block")
    features = tuple(_read_feature(entry, place) for entry, place in _entries(data, "feature", where))
    labels = tuple(_read_item(Label, entry, place) for entry, place in _entries(data, "label", where))
    tables = tuple(_read_item(Table, entry, place) for entry, place in _entries(data, "table", where))
    missing, roles = _read_missing(data, where), _read_roles(data, where)
    return _located(
        where, lambda: Schema(features=features, labels=labels, tables=tables, missing_texts=missing, **roles)
    )


# ---------------------------------------------------------------------------------------------------------- writing


def _block_text(name: str, item: Feature | Label | Table) -> str:
    """One `[[name]]` block: the name, the kind, then whatever is not the default."""
    table = tomlkit.table()
    table.add("name", _plain(item.name))
    if not isinstance(item, Label | Table):
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


def _plain(value: object) -> Item:
    return tomlkit.item(value.value if isinstance(value, StrEnum) else value)


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
            found=f"{block} = {_quoted(blocks)}" if not isinstance(blocks, dict) else f"[{block}], in single brackets",
            where=where,
            ways_out=f"write [[{block}]] in double brackets: there can be many",
        )
    for number, entry in enumerate(blocks, start=1):
        name = entry.get("name")
        yield entry, f"{where}, {block} {name!r}" if isinstance(name, str) else f"{where}, {block} number {number}"


def _read_feature(entry: dict[str, object], where: str) -> Feature:
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise SchemaError(
            expected=f"kind = one of {', '.join(KINDS)}",
            found=f"kind = {_quoted(kind)}" if "kind" in entry else "no kind",
            where=where,
            ways_out=_nearest(str(kind), KINDS, instead='add kind = "categorical" or another of these'),
        )
    return _read_item(KINDS[kind], entry, where)


_ItemT = typing.TypeVar("_ItemT", bound=Feature | Label | Table)


def _read_item(cls: type[_ItemT], entry: dict[str, object], where: str) -> _ItemT:
    known = {item.name: item for item in fields(cls)}
    _refuse_unknown(entry, known, where=where, what="key")
    for name, item in known.items():
        if item.default is MISSING and name not in entry:
            raise SchemaError(
                expected=f"a value for {name!r}",
                found=f"a block without {name!r}",
                where=where,
                ways_out=f"add {name} = {_example(item)}",
            )
    hints = typing.get_type_hints(cls)
    values: dict[str, typing.Any] = {
        name: _read_value(value, hints[name], f"{where}, key {name!r}") for name, value in entry.items()
    }
    return _located(where.split(", ")[0], lambda: cls(**values))


def _read_missing(data: Mapping[str, object], where: str) -> tuple[str, ...]:
    texts = data.get("missing", list(MISSING_TEXTS))
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return tuple(texts)
    raise SchemaError(
        expected="a list of texts that mean no value",
        found=f"missing = {_quoted(texts)}",
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
            found=f"roles = {_quoted(roles)}",
            where=where,
            ways_out='write [roles], in single brackets, and below it lines like time = "timestamp"',
        )
    _refuse_unknown(roles, ROLES, where=place, what="role")
    if roles.get("session"):
        raise SchemaError(
            expected="no session under [roles]: no model and no sampler reads it yet",
            found=f"session = {_quoted(roles['session'])}",
            where=place,
            ways_out=("take the line out", "to rank within a session, name it as the group: group = ..."),
        )
    return {role: str(_read_value(value, str, f"{place}, key {role!r}")) for role, value in roles.items()}


def _read_value(value: object, kind: object, where: str) -> object:
    """`value` as the annotated type; a whole number is taken for a float, nothing else is converted."""
    if typing.get_origin(kind) is types.UnionType:  # only `X | None`, and TOML has no null
        kind = next(option for option in typing.get_args(kind) if option is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return value
    assert isinstance(kind, type)
    if issubclass(kind, StrEnum):
        choices = [member.value for member in kind]
        if isinstance(value, str) and value in choices:
            return kind(value)
        raise SchemaError(
            expected=f"one of {', '.join(choices)}",
            found=_quoted(value),
            where=where,
            ways_out=_nearest(str(value), choices, instead=f'use one of these words, in quotes: "{choices[0]}"'),
        )
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is kind:
        return value
    words = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
    raise SchemaError(
        expected=words[kind],
        found=f"{_quoted(value)} ({type(value).__name__})",
        where=where,
        ways_out="correct the value",
    )


def _refuse_unknown(data: Iterable[str], known: Iterable[str], *, where: str, what: str) -> None:
    known = list(known)
    for name in data:
        if name not in known:
            raise SchemaError(
                expected=f"only these {what}s: {', '.join(known)}",
                found=f"unknown {what} {name!r}",
                where=where,
                ways_out=_nearest(name, known, instead=f"remove {name!r}"),
            )


def _nearest(name: str, known: Iterable[str], *, instead: str) -> tuple[str, ...]:
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return (f'did you mean "{close[0]}"?', instead) if close else (instead,)


_ResultT = typing.TypeVar("_ResultT")


def _located(where: str, make: typing.Callable[[], _ResultT]) -> _ResultT:
    """`make()`, with `where` put before the location of a SchemaError that it raises."""
    try:
        return make()
    except ZigguratError as error:
        raise SchemaError(
            expected=error.expected, found=error.found, where=f"{where}, {error.where}", ways_out=error.ways_out
        ) from None


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _example(item: Field[typing.Any]) -> str:
    return "64" if item.name == "dim" else '"…"'
