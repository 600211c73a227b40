"""Specification: one object that answers every question about one member of a kind (a placement, a row format, …).

An enum only names its members; what they mean then lies in `if`s all over the package, and a new member is an edit of
every one of them. A specification carries its meaning. Other code asks the object, never *which* object it is:

    class Placement(Specification, kind="placement"):    the kind: the questions, and what most members answer
    class RowWise(Placement): name = "row_wise"; …       a member: its answers, in a file of its own
    Placement.add(RowWise())                             listed once

    Placement("row_wise")           the member; as an attribute Placement.ROW_WISE
    list(Placement)                 all members, in the order of their listing
    str(member) == member.name      in plans, configs, files and on command lines a member is its name

A member is one object: it is compared by identity and keeps it through `copy`, `pickle` and other processes. A package
of the user's own adds members in the same way; a process that reads their names has to have imported that package.

Where each use has settings of its own (every feature of a schema has a name and a column), the object is made by who
uses it, and a kind lists classes: a `Family` of frozen dataclasses, told apart by their field `kind`.
"""

from __future__ import annotations

import re
import traceback
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from ziggurat.errors import ConfigError, ZigguratError

S = TypeVar("S", bound="Specification")
F = TypeVar("F", bound="Family")
R = TypeVar("R")


class _Kind(ABCMeta):
    """Lets a kind be iterated over and looked up by name, as an enum is: `list(Placement)`, `Placement("row_wise")`."""

    _members: dict[str, Any]

    def __call__(cls: Any, *arguments: Any, **named: Any) -> Any:
        if "_members" in vars(cls):  # a kind, which has no instances of its own
            return cls.named(*arguments, **named)
        # Python's own error names the methods alone, and not where it is said what they have to answer.
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise ConfigError(
                expected=f"a {cls.kind} that has {', '.join(missing)}",
                found="none of them" if len(missing) > 1 else "none",
                where=_path_of(cls),
                ways_out=f"define {', '.join(missing)}; docs/guides/extending.md says what they answer",
            )
        return super().__call__(*arguments, **named)

    if TYPE_CHECKING:  # `add` makes members attributes of their kind

        def __getattr__(cls: type[S], name: str) -> S: ...  # type: ignore[misc]

    def __iter__(cls: type[S]) -> Iterator[S]:  # type: ignore[misc]
        return iter(tuple(cls._members.values()))

    def __len__(cls) -> int:
        return len(cls._members)


class Specification(metaclass=_Kind):
    """A member of a kind. See the module's docstring.

    Attributes:
        name: what plans, configs, files and command lines call it.
        kind: what all members are, for messages.
    """

    name: str
    kind: ClassVar[str]
    _members: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, *, kind: str = "", **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if kind:
            cls.kind = kind
            cls._members = {}

    @classmethod
    def add(cls: type[S], member: S) -> S:
        """List a member, so that it is found by its name; returns it.

        A member from outside the package is tried out first, with something small: here its author reads the message.

        Raises:
            ConfigError: another member has that name, the name is no word, or it breaks a promise of its kind.
        """
        if isinstance(member, type):
            raise ConfigError(
                expected=f"a {cls.kind}, an object",
                found=f"the class {member.__name__}",
                where=f"{cls.__name__}.add",
                ways_out=f"make one: {cls.__name__}.add({member.__name__}())",
            )
        _check_derives(type(member), cls, found=f"an object of {type(member).__name__}", what=cls.kind)
        _check_name(getattr(member, "name", None), attribute="name", what=cls.kind, where=_path_of(type(member)))
        if not type(member).__module__.startswith("ziggurat."):
            expected = f"a {cls.kind} that answers when it is tried out with something small"
            answer_of(member.try_out, expected=expected, where=_path_of(type(member)))
        known = cls._members.get(member.name)
        if known is not None:
            _refuse_another(type(known), type(member), name=member.name, what=cls.kind, where=f"{cls.__name__}.add")
        if known is not None and type(known) is type(member):
            if vars(known) != vars(member):
                raise ConfigError(
                    expected=f"another name than {member.name!r}, which a {cls.kind} with other settings has",
                    found=", ".join(f"{name} = {value!r}" for name, value in vars(member).items() if name != "name"),
                    where=f"{cls.__name__}.add",
                    ways_out=f"give it a name of its own, such as {member.name}_2",
                )
            member = known
        # Else it is new, or the same class was defined again, as by a cell of a notebook that ran twice.
        cls._members[member.name] = member
        setattr(cls, member.name.upper(), member)
        return member

    def try_out(self) -> None:
        """Ask the member something small, and refuse it where the answer breaks a promise of its kind.

        Raises:
            ConfigError: it does.
        """

    @classmethod
    def named(cls: type[S], name: str) -> S:
        """Return the member of a name.

        Raises:
            ValueError: no member has it.
        """
        if name not in cls._members:
            raise ValueError(f"{name!r} is no {cls.kind}; there are {', '.join(cls._members)}")
        return cls._members[name]

    @property
    def value(self) -> str:
        """The name, as an enum's member would call it."""
        return self.name

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    def __copy__(self: S) -> S:
        return self

    def __deepcopy__(self: S, memo: dict[int, object]) -> S:
        return self

    def __reduce__(self) -> tuple[Callable[..., Specification], tuple[type[Specification], str]]:
        return _member, (type(self), self.name)


class Family:
    """Dataclasses of which there are kinds, each a class that is listed once and found by its field `kind`.

        class Feature(Family, family="kind of feature"): the questions, and what most kinds answer
        class Dense(Feature): kind: Literal["dense"] = "dense"; …   a kind: its settings and its answers
        Feature.add(Dense)                               listed once

    A field that takes a `Feature` reads a dict by its `kind` (`typed.py`).
    """

    kind: str
    family: ClassVar[str]
    _kinds: ClassVar[dict[str, type]]

    def __init_subclass__(cls, *, family: str = "", **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if family:
            cls.family = family
            cls._kinds = {}

    @classmethod
    def add(cls, member: type[F]) -> type[F]:
        """List a class, so that it is found by its kind; returns it, so that it may stand above the class.

        A class from outside the package is tried out first, as a member of a `Specification` is.

        Raises:
            ConfigError: another class has that kind, it is no word, or the class breaks a promise.
        """
        if not isinstance(member, type):
            raise ConfigError(
                expected=f"the class of a {cls.family}",
                found=f"an object of {type(member).__name__}",
                where=f"{cls.__name__}.add",
                ways_out=f"list its class: {cls.__name__}.add({type(member).__name__})",
            )
        _check_derives(member, cls, found=f"the class {member.__name__}", what=cls.family)
        where = _path_of(member)
        _check_name(member.kind, attribute="kind", what=cls.family, where=where)
        if "__dataclass_fields__" not in vars(member):
            raise ConfigError(
                expected=f"a {cls.family} that is a frozen dataclass, whose fields are its settings",
                found="a class that only derives from one",
                where=where,
                ways_out="write @dataclass(frozen=True, kw_only=True) above the class, below what adds it",
            )
        if not member.__module__.startswith("ziggurat."):
            expected = f"a {cls.family} that answers when it is tried out with something small"
            answer_of(member.try_out, expected=expected, where=where)
        known = cls._kinds.get(member.kind)
        if known is not None:  # the same class may be defined again, as by a cell of a notebook that ran twice
            _refuse_another(known, member, name=member.kind, what=cls.family, where=f"{cls.__name__}.add")
        cls._kinds[member.kind] = member
        return member

    @classmethod
    def try_out(cls) -> None:
        """Ask the class something small, and refuse it where the answer breaks a promise.

        Raises:
            ConfigError: it does.
        """

    @classmethod
    def kinds(cls: type[F]) -> Mapping[str, type[F]]:
        """Return the listed classes by their kind, in the order of their listing."""
        return dict(cls._kinds)


def _check_derives(member: type, kind: type, *, found: str, what: str) -> None:
    """Refuse a class that derives from no kind, or from another one."""
    if issubclass(member, kind):
        return
    raise ConfigError(
        expected=f"a {what}, which derives from {_path_of(kind)}",
        found=found,
        where=f"{kind.__name__}.add",
        ways_out=(
            f"derive from it: class {member.__name__}({kind.__name__})",
            "list it by the `add` of the kind that it derives from; docs/guides/extending.md has all",
        ),
    )


def _check_name(name: object, *, attribute: str, what: str, where: str) -> None:
    """Refuse a name that cannot stand in a file, in the name of an attribute and on a command line."""
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z]\w*", name):
        return
    raise ConfigError(
        expected=f"a {what} whose {attribute} is a word of letters, digits and underscores",
        found=f"no {attribute}" if name is None else repr(name),
        where=where,
        ways_out=f'{attribute} = "my_{what.replace(" ", "_")}" in the class',
    )


def answer_of(ask: Callable[[], R], *, expected: str, where: str) -> R:
    """Ask code that may come from outside the package, and return its answer.

    Args:
        ask: calls it.
        expected: what it was asked for, for the message.
        where: what was asked, for the message.

    Raises:
        ConfigError: it failed with an error that is none of the package. Without memory, its error is left as it is.
    """
    try:
        return ask()
    except (ZigguratError, MemoryError):
        raise
    except Exception as error:  # code of a user's may fail in any way
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which need not be imported here
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            expected=expected,
            found=f"{type(error).__name__}: {error}",
            where=f"{where}, at {last.filename}:{last.lineno}",
            ways_out="correct it; docs/guides/extending.md says what it is asked, and what it promises",
        ) from error


def _refuse_another(known: type, other: type, *, name: str, what: str, where: str) -> None:
    """Refuse a class that takes the name of another one."""
    if _path_of(known) == _path_of(other):
        return
    raise ConfigError(
        expected=f"a {what} with a name of its own",
        found=f"{_path_of(other)} and {_path_of(known)}, both named {name!r}",
        where=where,
        ways_out="give one of them another name",
    )


def origin_of(cls: type[object]) -> str:
    """Return the origin of a class, as `--model` takes it."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _path_of(cls: type) -> str:
    """Return the module and the name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _member(cls: type[S], name: str) -> S:
    """Find a member again in another process, which has imported its class by now."""
    return cls.named(name)
