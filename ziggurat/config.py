"""Configs: frozen dataclasses to JSON and back, and overrides from the command line.

Every run writes its whole configuration as JSON and can be repeated from it. The types are the schema: a config is a
tree of frozen dataclasses whose fields are numbers, strings, booleans, enums, tuples, values by name, `None` or other
configs. A union of configs (`DLRMConfig | DCNv2Config`) is told apart by a `kind: Literal[...]` field, never by a class
name. Classes of the user's own join it where the caller names them (`kinds=`); no file makes this code import anything.

    to_json(RunConfig(...))                       -> {"training": {"epochs": 2, …}, "model": {"kind": "dlrm", …}}
    from_json(RunConfig, data, where="run.json")  -> RunConfig(...)
    override(config, {"training.epochs": "3", "model.embedding-dim": "32"})

Unknown names, wrong types and impossible values are `ConfigError`s that name the dotted path and the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError, ZigguratError, nearest_names
from ziggurat.plain import JSON as JSON
from ziggurat.specification import Specification
from ziggurat.typed import Hint, Range, Reader, fields_of, hints_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C")
D = TypeVar("D", bound="DataclassInstance")
N = TypeVar("N", int, float)
# Short names of the usual settings, as flags of the command line, and in place of the full names in errors.
SHORT_NAMES: dict[str, tuple[str, ...]] = {
    "epochs": ("training.epochs",),
    "lr": ("training.learning-rate",),
    "table-lr": ("training.table-learning-rate",),
    "batch-size": ("training.loader.batch-size",),
    "dim": ("model.embedding-dim",),
    "seed": ("training.seed", "training.loader.seed"),
    "precision": ("training.precision",),
    "threads": ("training.threads",),
    "patience": ("training.early-stop.patience",),
    "self-distil": ("training.self-distil.method",),
}
_IN_A_FILE = "table-schema."  # a schema is a file of its own
_SETTINGS = ("see all settings with `ziggurat train RECIPE --settings`",)


def to_json(value: object) -> Any:
    """The plain-data form of a config (dicts, lists, strings, numbers), ready for `json.dumps`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in fields_of(type(value))}
    if isinstance(value, enum.Enum | Specification):
        return value.value
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    assert value is None or isinstance(value, str | int | float | bool), f"{type(value)} cannot be in a config"
    return value


def from_json(
    cls: type[C],
    data: object,
    *,
    where: str,
    error: type[ZigguratError] = ConfigError,
    kinds: Sequence[type] = (),
) -> C:
    """Rebuild a config of type `cls` from plain data.

    Args:
        cls: the dataclass to build.
        data: what `to_json` made, after a trip through a file.
        where: names the file in errors.
        error: the kind of error.
        kinds: dataclasses of the user's own, which a field that takes several kinds may hold, too.

    Raises:
        error: unknown name, missing value, wrong type or impossible value; names the dotted path.
    """
    ways_out = _SETTINGS if error is ConfigError else ()
    return Reader(where=where, error=error, ways_out=ways_out, kinds=tuple(kinds)).read(cls, data)


def override(
    config: D, changes: Mapping[str, str], *, where: str = "command line", also: Mapping[str, str] | None = None
) -> D:
    """A copy of `config` with some values replaced by text, as the command line gives it.

    Args:
        config: a frozen dataclass.
        changes: dotted path (dashes or underscores) to text. Tuples are comma separated, and so are named values
            (`user_id=int8,item_id=bf16`); `none` is None; a share of one may be in per cent (`5%`).
        where: names the origin in errors.
        also: what else a path is called, for errors: "training.epochs" → "--epochs".

    Raises:
        ConfigError: unknown path or text that is not of the field's type.
    """
    names = {path: f"{path} ({also[path]})" if also and path in also else path for path in changes}
    named = {path: (names[path], text) for path, text in changes.items()}
    return _override(config, named, where=where, root=config)


def settings(config: DataclassInstance, *, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every leaf of a config as (dotted path with dashes, type, value), for `--help`."""
    hints = typing.get_type_hints(type(config))
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        path = f"{prefix}{entry.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from settings(value, prefix=f"{path}.")
        elif entry.init and typing.get_origin(hints[entry.name]) is not Literal:
            yield path, _type_name(hints[entry.name]), _shown(value)


def flattened(value: object, *, prefix: str = "") -> dict[str, str]:
    """Every leaf of a config (or of plain data) as dotted path with dashes to JSON text: what two configs compare by.

    Lists of plain values are one leaf, lists of groups are numbered (`features.3.name`); `kind` and `None` count.
    """
    leaves: dict[str, str] = {}

    def walk(path: str, data: object) -> None:
        if isinstance(data, dict) and data:
            for name, item in data.items():
                walk(f"{path}.{name.replace('_', '-')}" if path else name.replace("_", "-"), item)
        elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
            for position, item in enumerate(data):
                walk(f"{path}.{position}" if path else str(position), item)
        else:
            leaves[path] = json.dumps(data, ensure_ascii=False)

    walk(prefix, value if isinstance(value, dict) else to_json(value))
    return leaves


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={_shown(item)}" for name, item in value.items())
    if isinstance(value, tuple):
        return (" | " if any(isinstance(item, tuple) for item in value) else ",").join(_shown(item) for item in value)
    return value.value if isinstance(value, enum.Enum | Specification) else str(value)


def nearest_settings(path: str, known: Sequence[str], *, most: int = 3) -> list[str]:
    """Return the full names that a wrong name of a setting may mean, the likeliest first.

    First the meaning of a short name ("lr"), then names with the same last part ("training.batch-size" means
    "training.loader.batch-size"), then those that are spelt alike, as a whole or in their last part.

    Args:
        path: that is not known, with dashes or underscores.
        known: full names with dashes.
        most: how many to return.
    """
    path = path.replace("_", "-").strip("-")
    last = path.rpartition(".")[2]
    known = [each for each in known if not each.startswith(_IN_A_FILE)]
    by_last: dict[str, list[str]] = {}
    for each in known:
        by_last.setdefault(each.rpartition(".")[2], []).append(each)
    same = by_last.get(last, [])
    alike = [each for match in nearest_names(last, by_last, most=most, cutoff=0.7) for each in by_last[match]]
    # Names of one group are alike by the name of the group alone, so the last parts must be alike as well.
    whole = [
        each
        for each in nearest_names(path, known, most=most, cutoff=0.7)
        if nearest_names(last, [each.rpartition(".")[2]], cutoff=0.5)
    ]
    shorts = [last] if last in SHORT_NAMES else nearest_names(last, SHORT_NAMES, most=1, cutoff=0.7)
    meant = [full for short in shorts for full in SHORT_NAMES[short] if full in known]
    exact = meant if last in SHORT_NAMES else []
    same = sorted(same, key=lambda each: whole.index(each) if each in whole else most)
    first = whole[:1] if "." in path and not same else []
    return list(dict.fromkeys([*exact, *first, *same, *alike, *meant, *whole]))[:most]


def _override(config: D, changes: Mapping[str, tuple[str, str]], *, where: str, root: DataclassInstance) -> D:
    """All changes of one group at once, so that their order does not matter to its checks.

    Args:
        config: the group.
        changes: path below the group to (path below the root, text).
        where: names the origin in errors.
        root: the whole config, for the names that errors propose.
    """
    if not changes:
        return config
    hints = hints_of(type(config))
    reader = Reader(where=where)
    names = [entry.name for entry in fields_of(type(config))]
    below: dict[str, dict[str, tuple[str, str]]] = {}
    values: dict[str, object] = {}
    for path, (full, text) in changes.items():
        head, _, rest = path.replace("-", "_").partition(".")
        if head not in names:
            raise _unknown(full, text, names, where=where, root=root)
        if not rest:
            values[head] = reader.read(hints[head], _parse(hints[head], text, path=full, where=where), full)
        elif dataclasses.is_dataclass(getattr(config, head)):
            below.setdefault(head, {})[rest] = (full, text)
        else:
            raise _wrong(full, f"no dot after {head!r}: it is {_type_name(hints[head])}", text, where)
    values |= {head: _override(getattr(config, head), inner, where=where, root=root) for head, inner in below.items()}
    # An error of several changes together is blamed on the first of them.
    full = next(iter(changes.values()))[0]
    return reader.construct(lambda: dataclasses.replace(config, **values), full)


def _parse(hint: Hint, text: str, *, path: str, where: str) -> object:
    """Turn command-line text into a value of the hinted type."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Annotated:
        is_share = arguments[0] is float and any(isinstance(each, Range) and each.most == 1 for each in arguments[1:])
        if is_share and text.endswith("%"):
            return _number(float, text[:-1].strip(), path=path, where=where) / 100
        return _parse(arguments[0], text, path=path, where=where)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and text.lower() == "none":
            return None
        chosen = [argument for argument in arguments if argument is not type(None)]
        return _parse(chosen[0], text, path=path, where=where)
    if origin is tuple:
        items = [item.strip() for item in text.strip("()[] ").split(",") if item.strip()]
        return tuple(_parse(arguments[0], item, path=path, where=where) for item in items)
    if origin is dict:
        return {name: _parse(arguments[1], value, path=path, where=where) for name, value in _named(text, path, where)}
    if hint is bool:
        if text.lower() in ("true", "yes", "1", "on"):
            return True
        if text.lower() in ("false", "no", "0", "off"):
            return False
        raise _wrong(path, "true or false", text, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum | Specification):
        return text  # the reader makes a member of it
    if hint is int or hint is float:
        return _number(hint, text, path=path, where=where)
    if hint is str:
        return text
    raise _group(hint, text, path=path, where=where)


def _number(hint: type[N], text: str, *, path: str, where: str) -> N:
    try:
        number = hint(text.replace("_", ""))
    except ValueError:
        raise _wrong(path, "a whole number" if hint is int else "a number", text, where) from None
    if math.isinf(number) and text.strip("+- ").lower() not in ("inf", "infinity"):  # 1e400 is beyond 64 bits
        raise _wrong(path, "a number that 64 bits hold, at most 1.8e308", text, where)
    return number


def _group(hint: object, text: str, *, path: str, where: str) -> ConfigError:
    """Return the error for a value that is given to a group of settings: its own settings are the ways out."""
    dotted = path.partition(" ")[0]
    entries = dataclasses.fields(hint) if dataclasses.is_dataclass(hint) else ()
    names = [entry.name.replace("_", "-") for entry in entries]
    return ConfigError(
        expected=f"a dotted path to a single value: {dotted} is a group of settings",
        found=repr(text),
        where=f"{where}, setting {path!r}",
        ways_out=[
            *(f"did you mean --{dotted}.{name} {pasted(text)}?" for name in names[:1]),
            *([f"name one of its settings: {', '.join(f'--{dotted}.{name}' for name in names)}"] if names else []),
            *_SETTINGS,
        ],
    )


def _named(text: str, path: str, where: str) -> Iterator[tuple[str, str]]:
    """Names and texts of "a=x,b=y"; a name may hold any sign but a comma."""
    names = set[str]()
    for item in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = item.rpartition("=")
        name = name.strip()
        # Twice is a slip of the hand, and nobody could tell which one was meant.
        if not (equals and name) or name in names:
            raise _wrong(path, "NAME=VALUE,NAME=VALUE, each name once", text, where)
        names.add(name)
        yield name, value.strip()


def _type_name(hint: object) -> str:
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"list of NAME={_type_name(arguments[1])}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if isinstance(hint, type) and issubclass(hint, enum.Enum | Specification):
        return "|".join(str(member.value) for member in hint)
    return "none" if hint is type(None) else getattr(hint, "__name__", str(hint))


def _unknown(path: str, text: str, names: Sequence[str], *, where: str, root: DataclassInstance) -> ConfigError:
    """Return the error for a name that no setting has; the nearest full names are its ways out."""
    near = nearest_settings(path.partition(" ")[0], [each for each, _, _ in settings(root)])
    return ConfigError(
        expected="one of " + ", ".join(name.replace("_", "-") for name in names),
        found=repr(path),
        where=f"{where}, setting {path!r}",
        ways_out=[*(f"did you mean --{each} {pasted(text)}?" for each in near), *_SETTINGS],
    )


def _wrong(path: str, expected: str, found: str, where: str) -> ConfigError:
    return ConfigError(expected=expected, found=found, where=f"{where}, setting {path!r}", ways_out="correct the value")
