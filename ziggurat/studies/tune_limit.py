"""The most that a row of a search may cost: FLOPs of a sample, or parameters.

    --max-flops-per-sample 2x     twice those of the settings as given: each model has a limit of its own
    --max-flops-per-sample 8e5    the same number for all models: none of them is better for being larger
    --max-parameters 1e6          likewise, tables and dense network together

Spaces reach models several times as large as the settings as given, and a try costs what its model costs. Settings that
lie beyond a limit are no tries: they are drawn again, before anything is trained or counted as a try. FLOPs are those
of a forward pass, as in the report's column "FLOPs a sample"; only shapes are needed to count them, neither tables nor,
but for the lengths of histories, rows.

Optuna's constraints are no help here: they tell TPE which tries broke a constraint, and so need tries that did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import Model, build_model, num_parameters
from ziggurat.models.contract.search_space import Choices, Value
from ziggurat.studies.tune_space import TuningSpace, nearest

MOST_DRAWS = 20  # for one try; the last one is then shrunk
_STEPS = 64  # from settings to the lower ends of their ranges
_NOT_OF_THE_MODEL = ("training.", "dropout")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most of something that a sample may cost.

    Args:
        number: of FLOPs or parameters, or of times those of the settings as given.
        is_multiple: whether it is times.
    """

    number: float
    is_multiple: bool

    @staticmethod
    def parse(text: str, *, flag: str) -> Limit | None:
        """Return the limit that a text says; None of "".

        Raises:
            ConfigError: it is neither a number nor a multiple, or not above 0.
        """
        text = text.strip()
        if not text:
            return None
        try:
            number = float(text.removesuffix("x"))
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise ConfigError(
                expected="a multiple of the settings as given, such as 2x, or a number, such as 8e5",
                found=repr(text),
                where=f"command line, {flag}",
                ways_out=(f"{flag} 2x", f"{flag} 8e5"),
            )
        return Limit(number=number, is_multiple=text.endswith("x"))

    def __str__(self) -> str:
        return f"{self.number:.15g}x" if self.is_multiple else f"{self.number:.15g}"

    def of(self, given: float) -> float:
        """Return the number of this limit, where settings as given have so many."""
        return self.number * given if self.is_multiple else self.number


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """One limit of one model, as a number."""

    name: str
    flag: str
    most: float
    count: Callable[[Model], float]


class SizeLimits:
    """The limits of one model's search.

    Args:
        space: of the model.
        inputs: what the model reads.
        count_flops: returns those of a sample, forward.
        flops: of a sample, forward; None: no limit.
        parameters: of tables and dense network; None: no limit.

    Raises:
        ConfigError: no settings of the space are within them.
    """

    def __init__(
        self,
        space: TuningSpace,
        *,
        inputs: InputSpec,
        count_flops: Callable[[Model], float],
        flops: Limit | None,
        parameters: Limit | None,
    ) -> None:
        self.space = space
        self._inputs = inputs
        self._known: dict[tuple[tuple[str, Value], ...], bool] = {}
        kinds: list[tuple[str, str, Limit | None, Callable[[Model], float]]] = [
            ("FLOPs a sample", "--max-flops-per-sample", flops, count_flops),
            ("parameters", "--max-parameters", parameters, lambda model: num_parameters(model).total),
        ]
        self._bounds = [
            _Bound(name=name, flag=flag, count=count, most=limit.of(self._given(limit, count)))
            for name, flag, limit, count in kinds
            if limit is not None
        ]
        self.start = self._start()

    @property
    def numbers(self) -> dict[str, float]:
        """The limits as numbers, by what they count."""
        return {bound.name: bound.most for bound in self._bounds}

    def allow(self, values: Mapping[str, Value]) -> bool:
        """Return whether settings are within the limits; those of which no model can be built are for a try to say."""
        key = tuple((name, value) for name, value in values.items() if not name.startswith(_NOT_OF_THE_MODEL))
        if key not in self._known:
            self._known[key] = self._first_broken(values) is None
        return self._known[key]

    def draw(self, draw: Callable[[], dict[str, Value]]) -> tuple[dict[str, Value], int]:
        """Return the first of several draws that is within the limits, and how many were not.

        After `MOST_DRAWS`, the last one is shrunk, or the settings of the first try are: a search never hangs here.

        Args:
            draw: returns settings, others at each call.
        """
        if not self._bounds:
            return draw(), 0
        values: dict[str, Value] = {}
        for beyond in range(MOST_DRAWS):
            values = draw()
            if self.allow(values):
                return values, beyond
        return self.shrunk(values) or dict(self.start), MOST_DRAWS

    def shrunk(self, values: Mapping[str, Value]) -> dict[str, Value] | None:
        """Return settings with all sizes of the model moved by one share towards their lower ends, as far as need be.

        Choices, of which none is the lower end, stay. None: the lower ends themselves are beyond a limit.
        """
        if self.allow(values):
            return dict(values)
        if not self.allow(self._moved(values, share=1.0)):
            return None
        beyond, within = 0, _STEPS
        while within - beyond > 1:
            middle = (beyond + within) // 2
            if self.allow(self._moved(values, share=middle / _STEPS)):
                within = middle
            else:
                beyond = middle
        return self._moved(values, share=within / _STEPS)

    def _moved(self, values: Mapping[str, Value], *, share: float) -> dict[str, Value]:
        by_name = {each.name: each for each in self.space.dimensions}
        moved: dict[str, Value] = {}
        for name, value in values.items():
            dimension = by_name[name]
            if isinstance(dimension, Choices) or isinstance(value, str) or name.startswith(_NOT_OF_THE_MODEL):
                moved[name] = value
            else:
                moved[name] = nearest(dimension, value + share * (dimension.low - value))
        return moved

    def _given(self, limit: Limit, count: Callable[[Model], float]) -> float:
        """Return what the settings as given have of something, where the limit is a multiple of it."""
        if not limit.is_multiple:
            return 0.0
        return count(build_model(self.space.model, self._inputs, seed=0, draw_tables=False))

    def _first_broken(self, values: Mapping[str, Value]) -> tuple[_Bound, float] | None:
        try:
            model, _ = self.space.apply(values)
            built = build_model(model, self._inputs, seed=0, draw_tables=False)
        except (ConfigError, SchemaError):
            return None
        counted = [(bound, bound.count(built)) for bound in self._bounds]
        return next(((bound, number) for bound, number in counted if number > bound.most), None)

    def _start(self) -> dict[str, Value]:
        """Return the settings of the first try: those as given, shrunk where they are beyond a limit."""
        start = self.shrunk(self.space.start())
        if start is not None:
            return start
        least = self._moved(self.space.start(), share=1.0)
        broken = self._first_broken(least)
        assert broken is not None, "settings that are beyond a limit have a number"
        bound, number = broken
        kind = self.space.model.kind
        raise ConfigError(
            expected=f"a limit that a model of the search space of {kind} keeps",
            found=f"{bound.flag} of {bound.most:,.0f}, where its smallest settings, with choices as given, have "
            f"{number:,.0f} {bound.name}",
            where=f"search space of {kind}, before anything is trained",
            ways_out=(
                f"{bound.flag} {math.ceil(number)}, or more",
                "smaller sizes in its space: --space NAME=LOW..HIGH, or a smaller choice: --fix NAME=VALUE",
                f"leave {kind} out of --models",
            ),
        )
