"""Search space: the settings of a config that are worth tuning, and the values that a search may give them.

A config states its own beside its fields, so a model of a user's brings it in the file that the model is in:

    @dataclass(frozen=True, kw_only=True)
    class MyConfig:
        search: ClassVar[tuple[Dimension, ...]] = (
            Integers("num_layers", 1, 4),
            *layers("deep", width=(64, 512), depth=(1, 3)),
            Choices("kind", ("full", "low_rank")),
            Integers("rank", 8, 64, log=True, only=("kind", ("low_rank",))),
        )

A name is the dotted path of a setting below the config. Two names stand for more than one field:

    deep.width, deep.depth   of an MLP: `hidden_dims` is so many layers of that width
    dropout                  of a whole model: that of every MLP in it, and its own where it has one

A dimension with `only` is asked for where the setting that it names has one of these values, and stays as it is
elsewhere; that setting stands before it. Values are text where they are set, as on the command line, so that a config
reads and checks them as it does there; `Choices` of a tuple are therefore "400,400".

A config that states nothing is searched by its field types alone (`derived`): widths of MLPs, and columns of tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ziggurat.config import override
from ziggurat.errors import ConfigError
from ziggurat.models.blocks.mlp import MLPConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")

DROPOUT = "dropout"
Value = int | float | str
# The name of another dimension, and the values of it that a dimension is asked for at.
Only = tuple[str, tuple[Value, ...]]


@dataclass(frozen=True)
class Integers:
    """Whole numbers from `low` to `high`, both included.

    Args:
        name: of the setting.
        low: the least.
        high: the largest.
        log: whether a doubling counts the same everywhere.
        step: their distance; 1 with `log`.
        only: where it is asked for; see the module docstring.
    """

    name: str
    low: int
    high: int
    log: bool = False
    step: int = 1
    only: Only | None = None

    def __post_init__(self) -> None:
        wrong = self.low > self.high or self.step < 1 or (self.log and (self.low < 1 or self.step != 1))
        if wrong or (self.high - self.low) % self.step:
            raise _impossible(self, "low ≤ high, whole steps between them, and low of 1 or more with log")

    @property
    def largest(self) -> Value:
        """The value that takes the most memory."""
        return self.high

    def holds(self, value: Value) -> bool:
        """Return whether a value is one of these."""
        if isinstance(value, str) or value != int(value):
            return False
        return self.low <= value <= self.high and not (int(value) - self.low) % self.step

    def text(self) -> str:
        """Say which values there are."""
        return f"{self.low} … {self.high}" + (f", in steps of {self.step}" if self.step > 1 else "")


@dataclass(frozen=True)
class Floats:
    """Numbers from `low` to `high`.

    Args:
        name: of the setting.
        low: the least.
        high: the largest.
        log: whether a factor counts the same everywhere.
        only: where it is asked for; see the module docstring.
    """

    name: str
    low: float
    high: float
    log: bool = False
    only: Only | None = None

    def __post_init__(self) -> None:
        if not self.low <= self.high or (self.log and self.low <= 0):
            raise _impossible(self, "low ≤ high, and low above 0 with log")

    @property
    def largest(self) -> Value:
        """The value that takes the most memory."""
        return self.high

    def holds(self, value: Value) -> bool:
        """Return whether a value is one of these."""
        return not isinstance(value, str) and self.low <= value <= self.high

    def text(self) -> str:
        """Say which values there are."""
        return f"{self.low:g} … {self.high:g}"


@dataclass(frozen=True)
class Choices:
    """Some values, in no order; text, as the command line takes it.

    Args:
        name: of the setting.
        values: to choose from.
        only: where it is asked for; see the module docstring.
    """

    name: str
    values: tuple[str, ...]
    only: Only | None = None

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) != len(self.values):
            raise _impossible(self, "one value or more, each of them once")

    @property
    def largest(self) -> Value:
        """The value that takes the most memory: the last of those with the largest numbers in it."""
        return max(self.values, key=_size_of)

    def holds(self, value: Value) -> bool:
        """Return whether a value is one of these."""
        return str(value) in self.values

    def text(self) -> str:
        """Say which values there are."""
        return " | ".join(self.values)


Dimension = Integers | Floats | Choices


def layers(path: str, *, width: tuple[int, int], depth: tuple[int, int]) -> tuple[Dimension, Dimension]:
    """Return the dimensions of an MLP whose layers are all of one width.

    Args:
        path: of the MLP below the config.
        width: the least and the largest.
        depth: the fewest layers, and the most.
    """
    return Integers(f"{path}.width", *width, log=True), Integers(f"{path}.depth", *depth)


def space_of(config: DataclassInstance) -> tuple[Dimension, ...]:
    """Return the dimensions that a config states, or those derived from its fields."""
    stated = getattr(type(config), "search", None)
    return derived(config) if stated is None else tuple(stated)


def derived(config: DataclassInstance) -> tuple[Dimension, ...]:
    """Return the dimensions of a config that states none.

    The width of every MLP that has layers goes from a quarter to twice of what it is, its depth from 1 to one more than
    it is, and `embedding_dim`, where there is one, is half, once or twice of what it is. Nothing else has a range that
    its type says; settings of tables and towers are no part of it.
    """
    found: list[Dimension] = []
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if entry.name == "embedding_dim" and isinstance(value, int) and value > 1:
            found.append(Choices(entry.name, tuple(str(size) for size in (value // 2, value, 2 * value))))
        elif isinstance(value, MLPConfig) and value.hidden_dims:
            widest = max(value.hidden_dims)
            width = (max(1, widest // 4), 2 * widest)
            found += layers(entry.name, width=width, depth=(1, len(value.hidden_dims) + 1))
    return tuple(found)


def given_value(config: DataclassInstance, name: str) -> Value | None:
    """Return what a config has for a dimension; None where it has no single value for it.

    Raises:
        KeyError: the config has no such setting.
    """
    if name == DROPOUT:
        return max(_dropouts(config), default=None)
    owner, _, last = name.rpartition(".")
    holder = _at(config, owner)
    if isinstance(holder, MLPConfig) and last in ("width", "depth"):
        if last == "depth":
            return len(holder.hidden_dims)
        return holder.hidden_dims[0] if len(set(holder.hidden_dims)) == 1 else None
    value = _at(config, name)
    if isinstance(value, tuple):
        if len(value) == 1 and isinstance(value[0], int | float):
            return value[0]
        return ",".join(str(getattr(item, "value", item)) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, int | float) else str(getattr(value, "value", value))


def with_values(config: C, values: Mapping[str, Value], *, where: str = "search space") -> C:
    """Return the config with these values.

    Args:
        config: of a model.
        values: by the names of dimensions.
        where: names the origin in errors.

    Raises:
        ConfigError: no such setting, or not of its type, or settings that contradict each other.
    """
    changes: dict[str, str] = {}
    of_layers: dict[str, dict[str, int]] = {}
    dropout: float | None = None
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        if name == DROPOUT:
            dropout = float(value)
        elif last in ("width", "depth") and _is_mlp(config, owner):
            of_layers.setdefault(owner, {})[last] = int(value)
        else:
            changes[name] = repr(value) if isinstance(value, float) else str(value)
    for owner, sizes in of_layers.items():
        mlp = _at(config, owner)
        assert isinstance(mlp, MLPConfig)
        present = mlp.hidden_dims
        width = sizes.get("width", present[0] if present else 1)
        depth = sizes.get("depth", len(present))
        changes[f"{owner}.hidden_dims"] = ",".join([str(width)] * depth)
    config = override(config, changes, where=where)
    return config if dropout is None else _with_dropout(config, dropout)


def is_asked(dimension: Dimension, values: Mapping[str, Value], *, config: DataclassInstance) -> bool:
    """Return whether a dimension matters beside these values, and what the config has where they say nothing."""
    if dimension.only is None:
        return True
    name, wanted = dimension.only
    value = values[name] if name in values else given_value(config, name)
    return str(value) in map(str, wanted)


def _with_dropout(config: C, dropout: float) -> C:
    """Return the config with this dropout in every MLP, and as the dropout of its own that it may have."""
    changed: dict[str, object] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if isinstance(value, MLPConfig):
            changed[entry.name] = dataclasses.replace(value, dropout=dropout)
        elif entry.name == DROPOUT:
            changed[entry.name] = dropout
    return dataclasses.replace(config, **changed)


def _dropouts(config: DataclassInstance) -> Iterator[float]:
    """Yield each dropout that `with_values` sets."""
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if isinstance(value, MLPConfig):
            yield value.dropout
        elif entry.name == DROPOUT:
            yield value


def _is_mlp(config: DataclassInstance, path: str) -> bool:
    try:
        return isinstance(_at(config, path), MLPConfig)
    except KeyError:
        return False


def _at(config: object, path: str) -> object:
    """Return what stands at a dotted path."""
    for name in filter(None, path.replace("-", "_").split(".")):
        if not dataclasses.is_dataclass(config) or name not in {entry.name for entry in dataclasses.fields(config)}:
            raise KeyError(path)
        config = getattr(config, name)
    return config


def _size_of(text: str) -> float:
    """Return the sum of the numbers in a text, or how many names stand in it."""
    parts = text.split(",")
    try:
        return sum(float(part) for part in parts)
    except ValueError:
        return len(parts)


def _impossible(dimension: Integers | Floats | Choices, expected: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=repr(dimension),
        where=f"search space, {dimension.name}",
        ways_out="correct the range",
    )


def names_of(space: Sequence[Dimension]) -> tuple[str, ...]:
    """Return the names of dimensions."""
    return tuple(dimension.name for dimension in space)
