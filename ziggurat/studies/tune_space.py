"""The search space of one model in a study: what it states, what training adds, what the command line changes.

    model.…       what the config of the model states (`models/contract/search_space.py`)
    training.…    one for all models (`training/search_space.py`)
    dropout       of every MLP of the model, likewise

`--space NAME=VALUES` narrows a dimension or adds one of any other setting; `--fix NAME=VALUE` takes one out:

    training.learning_rate=1e-4..1e-2       a range; ends are included
    model.num_layers=2,3,4                  some values; of a setting that is a list: 400,400|256,128
    model.num_layers=2                      one value, which is `--fix`
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ziggurat.commands import pasted
from ziggurat.config import settings
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.models import ModelConfig
from ziggurat.models.contract.search_space import (
    DROPOUT,
    Choices,
    Dimension,
    Floats,
    Integers,
    Value,
    given_value,
    is_asked,
    space_of,
    with_values,
)
from ziggurat.training.config import TrainingConfig
from ziggurat.training.search_space import training_space

_MODEL = "model."
_TRAINING = "training."
_LOG_FROM = 10.0  # a new range of so many times its lower end is searched by factors


@dataclass(frozen=True, kw_only=True)
class TuningSpace:
    """The dimensions of one model, and what it has where nothing is searched.

    Args:
        model: its settings as given, with what was fixed.
        training: likewise.
        dimensions: with names as users write them, those of `only` too.
    """

    model: ModelConfig
    training: TrainingConfig
    dimensions: tuple[Dimension, ...]

    def ask(self, suggest: Callable[[Dimension], Value]) -> dict[str, Value]:
        """Return a value for every dimension that matters beside those before it."""
        values: dict[str, Value] = {}
        for dimension in self.dimensions:
            if self._is_asked(dimension, values):
                values[dimension.name] = suggest(dimension)
        return values

    def apply(self, values: Mapping[str, Value]) -> tuple[ModelConfig, TrainingConfig]:
        """Return the settings of model and training with these values.

        Raises:
            ConfigError: they contradict each other.
        """
        of_model: dict[str, Value] = {}
        of_training: dict[str, Value] = {}
        for name, value in values.items():
            if name.startswith(_TRAINING):
                of_training[name.removeprefix(_TRAINING)] = value
            else:
                of_model[name.removeprefix(_MODEL)] = value
        where = "search space of " + self.model.kind
        model = with_values(self.model, of_model, where=where)
        return model, with_values(self.training, of_training, where=where)

    def start(self) -> dict[str, Value]:
        """Return the settings as given, each moved to the nearest value of its dimension."""
        return self.ask(lambda dimension: nearest(dimension, self.given(dimension.name)))

    def moved(self, start: Mapping[str, Value] | None = None) -> dict[str, tuple[Value | None, Value]]:
        """Return what `start` does not have as given: the value as given (None: no single one) and that of `start`.

        Args:
            start: the settings of the first try, where they are not `start()`.
        """
        pairs = {name: (self.given(name), value) for name, value in (start or self.start()).items()}
        return {name: pair for name, pair in pairs.items() if str(pair[0]) != str(pair[1])}

    def largest(self) -> dict[str, Value]:
        """Return the value of every dimension that takes the most memory."""
        return self.ask(lambda dimension: dimension.largest)

    def given(self, name: str) -> Value | None:
        """Return the value of a dimension in the settings as given; None where it has no single one."""
        if name.startswith(_TRAINING):
            return given_value(self.training, name.removeprefix(_TRAINING))
        return given_value(self.model, name.removeprefix(_MODEL))

    def to_json(self) -> list[dict[str, object]]:
        """Return the space as plain data, by which two studies are told apart."""
        data = [{"is": type(each).__name__, **dataclasses.asdict(each)} for each in self.dimensions]
        return json.loads(json.dumps(data))  # lists for tuples, as a file has them

    def _is_asked(self, dimension: Dimension, values: Mapping[str, Value]) -> bool:
        if dimension.only is None:
            return True
        return is_asked(
            dataclasses.replace(dimension, only=(_below(dimension.only[0]), dimension.only[1])),
            {_below(name): value for name, value in values.items()},
            config=self.model,
        )


def tuning_space(
    model: ModelConfig, training: TrainingConfig, *, narrowed: Sequence[str] = (), fixed: Sequence[str] = ()
) -> TuningSpace:
    """Return the space of one model.

    Args:
        model: its settings as given.
        training: of the run, without its seed.
        narrowed: `NAME=VALUES`, those that this model has.
        fixed: `NAME=VALUE`, likewise.

    Raises:
        ConfigError: no values, or impossible ones.
    """
    of_model = tuple(_renamed(each, _MODEL) for each in space_of(model))
    of_training = tuple(
        each if each.name == DROPOUT else _renamed(each, _TRAINING)
        for each in training_space(training, tables=model.embedding)
        if each.name != DROPOUT or given_value(model, DROPOUT) is not None
    )
    space = TuningSpace(model=model, training=training, dimensions=(*of_model, *of_training))
    for text in narrowed:
        name, values = _split(text, flag="--space")
        space = _narrow(space, name, values)
    for text in fixed:
        name, value = _split(text, flag="--fix")
        space = _fix(space, name, value, flag="--fix")
    return space


def for_model(texts: Sequence[str], model: ModelConfig, training: TrainingConfig) -> tuple[str, ...]:
    """Return those of `NAME=VALUES` whose setting this model, or training, has."""
    known = _known(model, training)
    return tuple(text for text in texts if text.partition("=")[0].strip().replace("-", "_") in known)


def refuse_unknown(texts: Sequence[str], models: Mapping[str, ModelConfig], training: TrainingConfig) -> None:
    """Refuse a name that none of the models has.

    Raises:
        ConfigError: there is one.
    """
    known = dict.fromkeys(name for model in models.values() for name in _known(model, training))
    for text in texts:
        name = text.partition("=")[0].strip().replace("-", "_")
        if name not in known:
            of_space = [each.name for model in models.values() for each in tuning_space(model, training).dimensions]
            near = [*nearest_names(name, of_space, most=2), *nearest_names(name, list(known), most=1)]
            raise ConfigError(
                expected=f"a setting of {', '.join(models)}, or of training",
                found=repr(name),
                where=f"command line: {text}",
                ways_out=(
                    *(f"did you mean {each}?" for each in dict.fromkeys(near)),
                    "see the names that are searched: ziggurat tune … --show-space",
                ),
            )


def nearest(dimension: Dimension, value: Value | None) -> Value:
    """Return the value of a dimension that is nearest to what a config has."""
    if isinstance(dimension, Choices):
        return str(value) if value is not None and dimension.holds(value) else _nearest_choice(dimension, value)
    number = _number(value)
    if number is None:
        number = math.sqrt(dimension.low * dimension.high) if dimension.log else (dimension.low + dimension.high) / 2
    number = min(max(number, dimension.low), dimension.high)
    if isinstance(dimension, Floats):
        return number
    return dimension.low + dimension.step * round((number - dimension.low) / dimension.step)


def _nearest_choice(dimension: Choices, value: Value | None) -> str:
    number = _number(value)
    numbers = (
        [(abs(found - number), text) for text in dimension.values if (found := _number(text)) is not None]
        if (number is not None)
        else []
    )
    return min(numbers)[1] if numbers else dimension.values[0]


def _number(value: Value | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _narrow(space: TuningSpace, name: str, text: str) -> TuningSpace:
    """Return the space with other values of one setting."""
    present = {each.name: each for each in space.dimensions}
    where = f"command line, --space {name}={text}"
    parts = [part.strip() for part in (text.split("|") if "|" in text or _is_list(space, name) else text.split(","))]
    if ".." not in text and len(parts) == 1:
        return _fix(space, name, text, flag="--space")
    old = present.get(name)
    only = None if old is None else old.only
    if ".." in text:
        dimension = _range(space, name, text, old=old, where=where)
    else:
        for part in parts:
            _try(space, name, part, where=where)
        dimension = Choices(name, tuple(dict.fromkeys(parts)), only=only)
    if old is None:
        return dataclasses.replace(space, dimensions=(*space.dimensions, dimension))
    return dataclasses.replace(
        space, dimensions=tuple(dimension if each.name == name else each for each in space.dimensions)
    )


def _range(space: TuningSpace, name: str, text: str, *, old: Dimension | None, where: str) -> Dimension:
    given = space.given(name)
    whole = isinstance(old, Integers) or (not isinstance(old, Floats) and isinstance(given, int))
    low_text, _, high_text = text.partition("..")
    number_of = int if whole else float
    try:
        low = number_of(low_text)
        high = number_of(high_text)
        is_range = not low > high
    except ValueError:
        low = high = 0
        is_range = False
    if isinstance(given, str) or (isinstance(old, Choices) and given is None):
        shown = old.values[:2] if isinstance(old, Choices) else (str(given),)
        raise ConfigError(
            expected="some values: this setting is no number that has a range",
            found=repr(text),
            where=where,
            ways_out=f"--space {name}={','.join(shown)}",
        )
    if not is_range:
        number = 1 if given is None else given
        raise ConfigError(
            expected="LOW..HIGH, two whole numbers" if whole else "LOW..HIGH, two numbers",
            found=repr(text),
            where=where,
            ways_out=f"for example: --space {name}={number}..{2 * number}",
        )
    _try(space, name, str(low), where=where)
    _try(space, name, str(high), where=where)
    log = old.log if isinstance(old, Integers | Floats) else low > 0 and high / low >= _LOG_FROM
    only = None if old is None else old.only
    if whole:
        step = old.step if isinstance(old, Integers) and not (high - low) % old.step else 1
        return Integers(name, int(low), int(high), log=log and low > 0, step=1 if log and low > 0 else step, only=only)
    return Floats(name, low, high, log=log and low > 0, only=only)


def _fix(space: TuningSpace, name: str, value: str, *, flag: str) -> TuningSpace:
    """Return the space without a dimension, and settings with this value."""
    model, training = _try(space, name, value, where=f"command line, {flag} {name}={value}")
    return TuningSpace(
        model=model, training=training, dimensions=tuple(each for each in space.dimensions if each.name != name)
    )


def _try(space: TuningSpace, name: str, value: str, *, where: str) -> tuple[ModelConfig, TrainingConfig]:
    """Return the settings with one value of the command line.

    Raises:
        ConfigError: it is not of the setting's type, or not possible there.
    """
    try:
        return space.apply({name: value})
    except (ConfigError, ValueError) as error:
        raise ConfigError(
            expected=getattr(error, "expected", "a number"),
            found=getattr(error, "found", repr(value)),
            where=where,
            ways_out=getattr(error, "ways_out", ("correct the value",)),
        ) from error


def _split(text: str, *, flag: str) -> tuple[str, str]:
    name, equals, values = text.partition("=")
    if not (equals and name.strip() and values.strip()):
        raise ConfigError(
            expected="NAME=VALUES",
            found=repr(text),
            where=f"command line, {flag}",
            ways_out=(f"{flag} {pasted('training.learning_rate=1e-4..1e-2')}", f"{flag} model.embedding_dim=16"),
        )
    return name.strip().replace("-", "_"), values.strip()


def _is_list(space: TuningSpace, name: str) -> bool:
    """Return whether a setting takes several values itself, so that commas do not separate choices."""
    given = space.given(name)
    return isinstance(given, str) and "," in given


def _known(model: ModelConfig, training: TrainingConfig) -> set[str]:
    """Return every name that a dimension of this model may have."""
    names = {f"{_MODEL}{path.replace('-', '_')}" for path, _, _ in settings(model)}
    names |= {f"{_TRAINING}{path.replace('-', '_')}" for path, _, _ in settings(training)}
    names |= {f"{_MODEL}{each.name}" for each in space_of(model)}
    return names | {DROPOUT}


def _below(name: str) -> str:
    return name.removeprefix(_MODEL)


def _renamed(dimension: Dimension, prefix: str) -> Dimension:
    only = None if dimension.only is None else (f"{prefix}{dimension.only[0]}", dimension.only[1])
    return dataclasses.replace(dimension, name=f"{prefix}{dimension.name}", only=only)
