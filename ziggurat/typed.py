"""Typed: plain data into dataclasses, and the one check of the values that stand in their fields.

The annotations are the schema. What a person, a file or a caller gives for a field becomes what its annotation says, or
an error in four parts names the field:

    int, float, str, bool    as they are; a whole number is taken for a float, numpy's numbers for Python's, a path for
                             text; no text for a number, no NaN, nothing beyond 64 bits
    Count, Dim, Length, …    whole numbers with bounds (`Range`): what no machine holds is refused before it is tried
    StrEnum, Specification   a member, or its text
    tuple[X, ...]            a tuple or a list of X;  dict[str, X], list[X] likewise
    X | None                 None, or X
    dataclass                one, or a dict with its fields; of a union the one whose `kind` is given
    Family                   one of its classes, or a dict with the fields of the one whose `kind` is given
    Annotated[P, Kinds(…)]   any dataclass that fulfils P; from a dict the one of these whose `kind` is given

A dataclass that renamed a field keeps `FORMERLY: ClassVar[Mapping[str, str]]`, old name to new: files with the old name
are read.

`@checked`, below `@dataclass`, does this for every instance, whoever makes it; `Reader` does it for files, and
`ziggurat.config` for the command line. Annotations that are none of these (arrays, functions, protocols) pass.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import os
import sys
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, overload

from ziggurat.errors import ConfigError, ZigguratError, nearest_names
from ziggurat.specification import Family, Specification

# Beside `kind` in a file: the module and the class that wrote it. No setting is called by a keyword of Python.
CLASS = "class"
T = TypeVar("T")
# An annotation as it stands at run time: a class, or one of the many forms of `typing`, which have no class in common.
Hint: TypeAlias = object
Check: TypeAlias = typing.Callable[[object], bool]


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both included unless `open` names one; `reason` says where the upper one comes from."""

    least: float
    most: float
    reason: str = ""
    open: Literal["", "least", "most"] = ""

    def holds(self, value: float) -> bool:
        """Return True if a number lies within the range."""
        above = value > self.least if self.open == "least" else value >= self.least
        return above and (value < self.most if self.open == "most" else value <= self.most)

    def expected(self, value: float) -> tuple[str, str]:
        """Say what a number outside the range should have been, and the way out."""
        least, most = (f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in (self.least, self.most))
        is_low = value <= self.least
        low = "above " if self.open == "least" else "from "
        high = "below " if self.open == "most" else ""
        if is_low and self.most >= _ENDLESS:
            return f"a number {low}{least}" + ("" if self.open == "least" else " on"), _way_out(low, least, "or more")
        reason = "" if is_low or not self.reason else f" ({self.reason})"
        text = f"a number {low}{least} to {high}{most}{reason}"
        return text, _way_out(low, least, "or more") if is_low else _way_out(high, most, "or less")


def _way_out(side: str, bound: str, direction: str) -> str:
    return f"set it to a number {side}{bound}" if side in ("above ", "below ") else f"set it to {bound} {direction}"


_ANYTHING = (Any, object)  # annotations that every value fits, so that none of a long list is looked at
_ENDLESS = 1 << 40  # nobody looks for a bound up there


# One list of what is sensible, from data, from memory and from sense.
Dim = Annotated[int, Range(1, 1 << 20, "a wider row is no embedding")]
DimOrDefault = Annotated[int, Range(0, 1 << 20, "a wider row is no embedding")]
Rows = Annotated[int, Range(0, 1 << 40, "a table of more rows fits no cluster")]
Count = Annotated[int, Range(1, 1 << 40, "more than can be counted through")]
CountOrNone = Annotated[int, Range(0, 1 << 40, "more than can be counted through")]
Threads = Annotated[int, Range(1, 1024, "more than a machine has cores")]
ThreadsOrNone = Annotated[int, Range(0, 1024, "more than a machine has cores")]
Length = Annotated[int, Range(1, 1 << 20, "longer lists than any sample has")]
Buckets = Annotated[int, Range(1, 1 << 20, "more than quantiles can be told apart")]
Ranks = Annotated[int, Range(1, 1 << 17, "the largest jobs have 100,000 ranks")]
Rank = Annotated[int, Range(0, (1 << 17) - 1, "the largest jobs have 100,000 ranks")]
_64_BITS = Range(-(1 << 63), (1 << 64) - 1, "64 bits")
_FLOAT32_MOST = 3.4028234663852886e38
PositiveFloat = Annotated[float, Range(0, sys.float_info.max, "what 64 bits hold", open="least")]
FloatOrZero = Annotated[float, Range(0, sys.float_info.max, "what 64 bits hold")]
Fraction = Annotated[float, Range(0, 1, open="most")]
Share = Annotated[float, Range(0, 1, open="least")]
CachedShare = Annotated[float, Range(0, 1, "a cache of all rows")]
Float32 = Annotated[float, Range(-_FLOAT32_MOST, _FLOAT32_MOST, "what a float32 holds")]


class NotANumber(enum.StrEnum):
    """The choice whether NaN may stand where a float is wanted."""

    REFUSED = "refused"  # in settings
    ALLOWED = "allowed"  # in results: a metric that is undefined


@dataclass(frozen=True)
class Kinds:
    """Dataclasses that a dict may become where a field takes any that fulfils a protocol; `kind` tells which."""

    classes: tuple[type, ...]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Plain data to typed values; every error is of the caller's kind and names the place.

    Args:
        where: opens the place: a file, or the class that is made.
        noun: what a field is called: "setting", "key".
        error: the kind of error.
        ways_out: added to those of an unknown or impossible value.
        nan: whether NaN is a number here.
        kinds: further dataclasses, of the user's own, for fields that take `Kinds`.
    """

    where: str
    noun: str = "setting"
    error: type[ZigguratError] = ConfigError
    ways_out: tuple[str, ...] = ()
    nan: NotANumber = NotANumber.REFUSED
    kinds: tuple[type, ...] = ()

    @overload
    def read(self, hint: type[T], data: object, path: str = "") -> T: ...

    @overload
    def read(self, hint: Hint, data: object, path: str = "") -> object: ...

    def read(self, hint: Hint, data: object, path: str = "") -> object:
        """`data` as the annotation says; returns it unchanged where it already is."""
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if origin is Annotated:
            kinds = [each.classes for each in arguments[1:] if isinstance(each, Kinds)]
            if kinds:
                return self._kind((*kinds[0], *self.kinds), data, path)
            value = self.read(arguments[0], data, path)
            for bounds in arguments[1:]:
                if isinstance(bounds, Range) and isinstance(value, int | float):
                    self._check_range(value, bounds, path)
            return value
        if origin in (Union, types.UnionType):
            return self._union(arguments, data, path)
        if origin is Literal:
            if any(isinstance(data, type(each)) and data == each for each in arguments):  # a frame has an == of its own
                return data
            raise self.wrong(path, " or ".join(map(repr, arguments)), data)
        if origin in (tuple, list):
            return self._items(origin, arguments, data, path)
        if origin is dict:
            if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
                raise self.wrong(path, "a group of names with values", data)
            return {name: self.read(arguments[1], item, f"{path}.{name}") for name, item in data.items()}
        if isinstance(hint, type) and issubclass(hint, enum.Enum | Specification):
            return self._member(hint, data, path)
        if isinstance(hint, type) and issubclass(hint, Family) and "_kinds" in vars(hint):
            return data if isinstance(data, hint) else self._of_family(hint, data, path)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return data if isinstance(data, hint) else self.build(hint, data, path)
        if isinstance(hint, type) and hint in (int, float, bool, str):
            return self._plain(hint, data, path)
        return data

    def build(self, cls: type[T], data: object, path: str = "") -> T:
        """An instance of the dataclass `cls` from a dict."""
        if not isinstance(data, dict):
            raise self.wrong(path, f"a group of {self.noun}s ({cls.__name__})", data)
        hints = hints_of(cls)
        known = {entry.name: entry for entry in fields_of(cls)}
        # Files of versions before have the old names; where both stand, the old one is refused as unknown.
        formerly = getattr(cls, "FORMERLY", {})
        data = {
            formerly[name] if name in formerly and formerly[name] not in data else name: data[name] for name in data
        }
        for name in data:
            if name not in known:
                below = _groups_with(str(name), cls)
                raise self.unknown(f"{path}.{name}".lstrip("."), str(name), list(known), groups=below)
        for name, entry in known.items():
            if name not in data and entry.default is dataclasses.MISSING is entry.default_factory:
                raise self.error(
                    expected=f"a value for {name!r}",
                    found=f"a block without {name!r}",
                    where=self.place(path),
                    ways_out=self._added(name, _base(hints[name])),
                )
        values = {name: self.read(hints[name], item, f"{path}.{name}".lstrip(".")) for name, item in data.items()}
        return self.construct(lambda: cls(**values), path or cls.__name__)

    def _added(self, name: str, kind: Hint) -> str:
        """Say how a missing value is written: in TOML a setting, in JSON a field."""
        if self.noun != "field":
            return f"add {name} = " + ("64" if kind in (int, float) else '"…"')
        shown = {int: "1", float: "1", dict: "{…}", tuple: "[…]", list: "[…]"}
        return f'add "{name}": ' + shown.get(typing.get_origin(kind) or kind, '"…"')

    def construct(self, make: typing.Callable[[], T], path: str) -> T:
        """`make()`; what Python raises because the values do not go together becomes an error with the place."""
        try:
            return make()
        except ZigguratError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as problem:
            raise self.wrong(path, "values that go together", f"{type(problem).__name__}: {problem}") from problem

    def place(self, path: str) -> str:
        """Say where a field is, for people."""
        return f"{self.where}, {self.noun} {path!r}" if path else self.where

    def wrong(self, path: str, expected: str, found: object, *ways_out: str) -> ZigguratError:
        """The error for a value that cannot be."""
        shown = found if isinstance(found, str) and "Error: " in found else f"{quoted(found)} ({type(found).__name__})"
        ways = (*ways_out, "correct the value", *self.ways_out)
        return self.error(expected=expected, found=shown, where=self.place(path), ways_out=ways)

    def unknown(self, path: str, name: str, known: list[str], *, groups: list[str]) -> ZigguratError:
        """The error for a name that is no field; it may be one of a group below."""
        places = [f"write it into the group {group!r}, which has a {self.noun} of that name" for group in groups]
        return self.error(
            expected=f"only these {self.noun}s: {', '.join(known)}",
            found=f"unknown {self.noun} {name!r:.80}",
            where=self.place(path),
            ways_out=(*places, *nearest(name, known, instead=f"remove {name!r:.80}"), *self.ways_out),
        )

    def _check_range(self, value: float, bounds: Range, path: str) -> None:
        if not bounds.holds(value):
            expected, way_out = bounds.expected(value)
            raise self.error(expected=expected, found=quoted(value), where=self.place(path), ways_out=way_out)

    def _plain(self, hint: type, data: object, path: str) -> object:
        words = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
        if hint is str:
            if isinstance(data, str | os.PathLike):
                return data if isinstance(data, str) else os.fsdecode(data)
            if hasattr(data, "columns"):
                way = (
                    "train on the frame: zg.fit(frame, label=…), or zg.train_run(config, folder=…, data=frame)",
                    'write the frame to a file and name it: frame.write_parquet("data.parquet")',
                )
                raise self.error(
                    expected="the name of a file",
                    found=f"a {type(data).__name__} of {quoted(getattr(data, 'shape', '?'))}",
                    where=self.place(path),
                    ways_out=way,
                )
        elif hint is bool and isinstance(data, bool):
            return data
        elif hint is int and isinstance(data, numbers.Integral) and not isinstance(data, bool):
            self._check_range(int(data), _64_BITS, path)
            return int(data)
        elif hint is float and isinstance(data, numbers.Real) and not isinstance(data, bool):
            if isinstance(data, numbers.Integral):
                self._check_range(int(data), _64_BITS, path)
            if math.isnan(data) and self.nan is NotANumber.REFUSED:
                raise self.wrong(path, "a number", data)
            return data if isinstance(data, float) else float(data)
        raise self.wrong(path, words[hint], data)

    def _items(self, origin: type, arguments: tuple[Hint, ...], data: object, path: str) -> object:
        if not isinstance(data, list | tuple):
            raise self.wrong(path, "a list", data)
        if origin is list or arguments[-1] is Ellipsis:
            hints = (arguments[0],) * len(data)
        elif len(arguments) == len(data):
            hints = arguments
        else:
            raise self.wrong(path, f"a list of {len(arguments)}", data)
        items = [self.read(hint, item, f"{path}[{i}]") for i, (hint, item) in enumerate(zip(hints, data, strict=True))]
        # Nothing was converted: the caller's own object stays, which `checked` then need not set again.
        if type(data) is origin and all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return origin(items)

    def _member(self, hint: type[enum.Enum | Specification], data: object, path: str) -> enum.Enum | Specification:
        try:
            if isinstance(data, hint):
                return data
            if not isinstance(data, str):  # a frame would be compared with every member, each in its own way
                raise ValueError(data)
            return hint.named(data) if issubclass(hint, Specification) else hint(data)
        except ValueError:
            choices = [str(member.value) for member in hint]
            other_words = getattr(hint, "other_words", dict)()
            near = nearest(
                other_words.get(str(data).lower(), str(data)),
                choices,
                instead=f"use one of these words (in a file in quotes): {', '.join(choices)}",
            )
            if issubclass(hint, Specification):
                near = (*near, extension_way(hint.kind))
            raise self.error(
                expected="one of " + ", ".join(choices), found=quoted(data), where=self.place(path), ways_out=near
            ) from None

    def _union(self, arguments: tuple[Hint, ...], data: object, path: str) -> object:
        if data is None and type(None) in arguments:
            return None
        members = [argument for argument in arguments if argument is not type(None)]
        if len(members) == 1:
            return self.read(members[0], data, path)
        configs = tuple(each for each in members if isinstance(each, type) and dataclasses.is_dataclass(each))
        if len(configs) < len(members):
            return data
        return self._kind(configs, data, path)

    def _kind(self, members: tuple[type, ...], data: object, path: str) -> object:
        if dataclasses.is_dataclass(data) and not isinstance(data, type):
            return data  # a member, or a config of the user's own
        # The default of `kind` is the one value that its Literal allows.
        kinds = {member.__dataclass_fields__["kind"].default: member for member in members}
        kind = data.get("kind") if isinstance(data, dict) else data
        if not isinstance(kind, str) or kind not in kinds:
            near = nearest(str(kind), list(kinds), instead="name the kind")
            raise self.wrong(f"{path}.kind".lstrip("."), "one of " + ", ".join(sorted(kinds)), kind, *near)
        return self.build(kinds[kind], data, path)

    def _of_family(self, family: type[Family], data: object, path: str) -> Family:
        """Build the member of a family that the `kind` of a dict names."""
        known = family.kinds()
        kind = data.get("kind") if isinstance(data, dict) else data
        origin = ""
        if isinstance(data, dict) and CLASS in data:
            origin = str(data[CLASS])
            data = {name: value for name, value in data.items() if name != CLASS}
        if isinstance(kind, str) and kind in known:
            return self.build(known[kind], data, path)
        path = f"{path}.kind".lstrip(".")
        expected = "one of " + ", ".join(sorted(known))
        if not isinstance(kind, str) or not kind:
            raise self.wrong(path, expected, kind, "name the kind", extension_way(family.family))
        # The file is whole, so no other copy of it helps: a module is missing, or a letter is wrong.
        raise self.error(
            expected=expected,
            found=quoted(kind) + (f", written by {origin}" if origin else ""),
            where=self.place(path),
            ways_out=(
                *(f"did you mean {quoted(near)}?" for near in nearest_names(kind, known)),
                extension_way(family.family, origin=origin),
            ),
        )


def extension_way(what: str, *, origin: str = "") -> str:
    """Say how a name becomes known that a module of the user's own adds.

    Args:
        what: the kind of thing.
        origin: module and class that wrote the name, where a file tells.
    """
    module = origin.partition(":")[0]
    if module in ("", "__main__"):
        return f"ziggurat --extension MODULE …, or import MODULE, if that adds a {what} of this name"
    return f"ziggurat --extension {module} …, or in Python import {module}, which adds this {what}"


def checked(cls: type[T], *, error: type[ZigguratError] = ConfigError) -> type[T]:
    """Class decorator, below `@dataclass`: check and convert every field of every instance before `__post_init__`.

    Raises:
        TypeError: it stands above `@dataclass`, whose `__init__` would not call it.
    """
    if "__dataclass_fields__" in vars(cls):
        raise TypeError(f"@checked stands above @dataclass of {cls.__qualname__}: put it below")
    own = getattr(cls, "__post_init__", None)

    def check_and_go_on(self: object) -> None:
        for name, hint, fits in _checks_of(type(self)):
            value = getattr(self, name)
            if not fits(value):  # most values are what they should be, and reading one costs microseconds
                read = Reader(where=type(self).__name__, error=error).read(hint, value, name)
                if read is not value:
                    object.__setattr__(self, name, read)
        if own is not None:
            own(self)

    made: Any = cls
    made.__post_init__ = check_and_go_on
    return cls


@functools.cache
def _checks_of(cls: type) -> tuple[tuple[str, Hint, Check], ...]:
    hints = hints_of(cls)
    return tuple((each.name, hints[each.name], fits(hints[each.name])) for each in fields_of(cls))


def fits(hint: Hint) -> Check:
    """Return a quick check whether `Reader.read` would return a value as it is: True is certain, False means ask it."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Annotated and not any(isinstance(each, Kinds) for each in arguments):
        plain = fits(arguments[0])
        bounds = [each for each in arguments[1:] if isinstance(each, Range)]
        if not bounds:
            return plain
        return lambda value: (
            plain(value) and isinstance(value, int | float) and all(each.holds(value) for each in bounds)
        )
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        one = fits(arguments[0] if arguments[1] is type(None) else arguments[1])
        return lambda value: value is None or one(value)
    if origin is tuple and arguments[-1] is Ellipsis:
        if arguments[0] in _ANYTHING:
            return lambda value: type(value) is tuple
        each_fits = fits(arguments[0])
        return lambda value: type(value) is tuple and all(map(each_fits, value))
    if hint is int:
        return lambda value: type(value) is int and _64_BITS.least <= value <= _64_BITS.most
    if hint is float:
        return lambda value: type(value) is float and value == value
    if hint in (bool, str):
        return lambda value: type(value) is hint
    if isinstance(hint, type) and (issubclass(hint, enum.Enum | Specification) or dataclasses.is_dataclass(hint)):
        return lambda value: isinstance(value, hint)
    return lambda value: hint in _ANYTHING


def fields_of(cls: type) -> tuple[dataclasses.Field[object], ...]:
    """Return the fields of a dataclass that are given when one is made; those that it works out itself are none."""
    return tuple(entry for entry in dataclasses.fields(cls) if entry.init)


@functools.cache
def hints_of(cls: type) -> dict[str, Hint]:
    """The annotations of a dataclass, with their bounds."""
    return typing.get_type_hints(cls, include_extras=True)


def nearest(name: str, known: typing.Iterable[str], *, instead: str) -> tuple[str, ...]:
    """Say the ways out of a wrong name: the nearest known name, and `instead`."""
    close = nearest_names(name, known, most=1, cutoff=0.5)
    return (f'did you mean "{close[0]}"?', instead) if close else (instead,)


def _groups_with(name: str, cls: type) -> list[str]:
    """Return the dotted names of the groups below a dataclass that have a field of this name, the nearest first."""
    found: list[str] = []
    left = [("", cls)]
    for path, each in left:
        hints = hints_of(each)
        if path and name.replace("-", "_") in {entry.name for entry in fields_of(each)}:
            found.append(path)
        for entry in fields_of(each):
            hint = _base(hints[entry.name])
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                left.append((f"{path}.{entry.name}".lstrip("."), hint))
    return found


def quoted(value: object) -> str:
    """A value for a message, in at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, or endless nesting
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _base(hint: Hint) -> Hint:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
