"""A synthetic teacher that drifts: window after window of rows in time, and the best metrics that each window allows.

A model that follows a stream is judged by how near it comes to what could be known *then*. Real streams never tell;
here every window is drawn from known probabilities, as rows of the teacher that stands still are (`teacher.py`), so the
best log loss, NE and AUC of each window follow exactly (`best_metrics.py`). What moves, each part by itself:

    preferences   w and h of every id:  v(t+1) = √(1−r)·v(t) + √r·ε, r = `preference_rate`: a random walk that is pulled
                  back so that it keeps its variance; what can be known stays as much, only what is known grows old:
                  the correlation with n windows ago is (1−r)^(n/2)
    ids           a place of a table is taken by one id after the other, each for `lifetime` windows; the i-th id of
                  place s is i·cardinality + s, with vectors and a popularity of its own, and a place changes hands at
                  a moment of its own. Popularity falls over a life by a factor e^`popularity_decay`
    seasons       the logit moves by `season_logit`·sin(2πt/`season_windows`), and preferences turn by the angle
                  φ = `season_angle`·sin(2πt/`season_windows`) towards others: v cos φ + u sin φ
    covariates    the mean of each z_d walks as preferences do, from 0 to a variance of 1, r = `covariate_rate`: rows
                  change, what a row means does not
    label delay   a positive is known after an exponential delay (mean `delay_s`, never beyond `attribution_s`), a
                  negative when `attribution_s` have passed, no conversion without a click at once: column `label_time`

Row i of window t is row t·window_rows + i of the teacher that stands still, drawn with what has moved by then. So
with all rates 0 the rows are that teacher's, bit for bit.

*Any window alone.* The walk has the Markov property, and is Gaussian: with ρ = √(1−r), the value at the middle of two
that are 2d windows apart is normal, given both, with

    mean  (a + b)·ρ^d / (1 + ρ^2d),     variance  (1 − ρ^2d) / (1 + ρ^2d)

so windows 1, 2, 4, 8 … are drawn one from the other, then middles, until the window is met: 2·log2(t) tables of normal
numbers in place of t (Lévy's construction of Brownian motion; P. Lévy, Processus stochastiques, 1948). Each number has
a generator seeded by (seed, feature, generation, window), so windows are independent files.

Bits: sums and products of FP32 in one order; exponentials, logarithms and powers in FP64, then rounded, as those of
`rows.py` are. Cost beside that of the still teacher's rows: the tables of a window, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ziggurat.arguments import check_arguments
from ziggurat.data.synthetic.best_metrics import BestMetrics, best_metrics
from ziggurat.data.synthetic.rows import BLOCK_ROWS, Moment, RowBlock, SyntheticConfig, centred, id_probabilities
from ziggurat.data.synthetic.teacher import SyntheticTeacher, learnable
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Encoding, Schema
from ziggurat.typed import CachedShare, Count, FloatOrZero, checked

TIME = "time"
LABEL_TIME = "label_time"
_DAY_S = 86_400
_Floats = NDArray[np.float32]


class _Purpose(IntEnum):
    """Last number of a seed, so that streams for different purposes never meet, nor meet those of `rows.py`."""

    GENERATION = 1
    PREFERENCE = 2
    SEASON = 3
    CHANGE_OF_HANDS = 4
    POPULARITY = 5
    COVARIATE = 6
    DELAY = 7


@dataclass(frozen=True, kw_only=True)
@checked
class DriftConfig:
    """Settings of a teacher that drifts; see the module for the meaning of the parts. Rates of 0 stand still.

    Args:
        teacher: the teacher at window 0.
        window_rows: rows of a window.
        window_s: seconds of a window.
        begin: when window 0 begins, 2026-01-01 or 2026-01-01T08:00.
        preference_rate: share of the variance of every vector that is drawn anew from window to window.
        lifetime: windows that an id lives; 0: for ever.
        come_and_go: features whose ids live so long, as C1, L1; () all.
        popularity_decay: logarithm of the factor by which an id's popularity falls over its life.
        season_windows: period of the seasons; 0: none.
        season_logit: amplitude of the logit.
        season_angle: amplitude of the angle by which preferences turn, in radians.
        covariate_rate: share of the variance of the mean of each number that is drawn anew from window to window.
        delay_s: mean delay of a positive, in seconds; 0: labels are known at once, and there is no `label_time`.
        attribution_s: longest delay of a positive, in seconds; then a negative is known.

    Example:
        >>> zg.DriftConfig(preference_rate=0.05, lifetime=10.0, popularity_decay=2.0).window_s
        86400
    """

    teacher: SyntheticConfig = field(default_factory=learnable)
    window_rows: Count = 131_072
    window_s: Count = _DAY_S
    begin: str = "2026-01-01"
    preference_rate: CachedShare = 0.0
    lifetime: FloatOrZero = 0.0
    come_and_go: tuple[str, ...] = ()
    popularity_decay: FloatOrZero = 0.0
    season_windows: FloatOrZero = 0.0
    season_logit: FloatOrZero = 0.0
    season_angle: FloatOrZero = 0.0
    covariate_rate: CachedShare = 0.0
    delay_s: FloatOrZero = 0.0
    attribution_s: Count = 7 * _DAY_S

    def __post_init__(self) -> None:
        if self.window_rows < 2:
            raise _refused("windows of at least 2 rows", str(self.window_rows), "window_rows = 131072")
        if (self.popularity_decay or self.come_and_go) and not self.lifetime:
            found = f"popularity_decay {self.popularity_decay:g}, come_and_go {self.come_and_go}, lifetime 0"
            raise _refused("a lifetime of ids that come and go", found, "lifetime = 10")
        if (self.season_logit or self.season_angle) and not self.season_windows:
            found = f"season_logit {self.season_logit:g}, season_angle {self.season_angle:g}, season_windows 0"
            raise _refused("a period of the seasons", found, "season_windows = 7")
        if self.teacher.even_vectors:
            raise _refused(
                "a teacher of normal vectors: mixtures of even ones, as they move, are not even",
                "teacher.even_vectors",
                "even_vectors = False",
            )
        if self.covariate_rate and not self.teacher.num_dense:
            raise _refused("numbers whose means can move", "teacher.num_dense 0", "covariate_rate = 0")
        self.begin_s  # noqa: B018, it is refused where it is no date

    @property
    def begin_s(self) -> int:
        """Seconds from 1970 to the begin of window 0."""
        try:
            return int(np.datetime64(self.begin, "s").astype(np.int64))
        except ValueError as error:
            raise _refused("a date", repr(self.begin), 'begin = "2026-01-01"') from error


@dataclass(frozen=True, kw_only=True)
class WindowTruth:
    """Known facts of a window.

    Args:
        window: its number.
        name: its begin.
        best: scores of the best possible model on its rows, for each label.
        new_ids: share of rows, in expectation, whose id was not there a window before, for each feature whose ids come
            and go; of lists the share of their ids.
    """

    window: int
    name: str
    best: dict[str, BestMetrics]
    new_ids: dict[str, float]


class DriftingTeacher:
    """Makes windows of rows in order of time, each a pure function of (config, window); see the module.

    Args:
        config: what to make.

    Attributes:
        config: as given.
        still: the teacher of window 0, as it would be without drift.
        labels: names of the label columns.
        come_and_go: features whose ids come and go.

    Example:
        >>> teacher = zg.DriftingTeacher(zg.DriftConfig(window_rows=1_000, preference_rate=0.1))
        >>> teacher.frame(3).height, teacher.name(3)
        (1000, '2026-01-04')
    """

    @check_arguments
    def __init__(self, config: DriftConfig | None = None) -> None:
        self.config = config or DriftConfig()
        self.still = SyntheticTeacher(self.config.teacher)
        self.labels = self.still.labels
        names = self.still.maker.names
        unknown = [name for name in self.config.come_and_go if name not in names]
        if unknown:
            raise _refused(f"features with ids: {', '.join(names)}", ", ".join(unknown), "come_and_go = ()")
        self.come_and_go = (self.config.come_and_go or tuple(names)) if self.config.lifetime else ()
        self._last: tuple[int, Moment] | None = None

    # ------------------------------------------------------------------------------------------------------- windows

    def schema(self, *, encoding: Encoding = Encoding.VOCABULARY) -> Schema:
        """Return the schema of the rows. `identity` tables have the ids of window 0 alone."""
        return replace(self.still.schema(encoding=encoding), time=TIME)

    def name(self, window: int) -> str:
        """Return the begin of a window, as a name of its file that sorts by time."""
        config = self.config
        begin = np.datetime64(config.begin_s + _checked_window(window) * config.window_s, "s")
        is_of_days = config.window_s % _DAY_S == 0 and config.begin_s % _DAY_S == 0
        return str(begin.astype("datetime64[D]")) if is_of_days else str(begin).replace(":", "-")

    def frame(self, window: int) -> pl.DataFrame:
        """Return the rows of a window: `time`, perhaps `label_time` (seconds since 1970), then as the still teacher's.

        Raises:
            ConfigError: the window has a negative number.
        """
        return pl.concat([frame for frame, _, _ in self.parts(window)])

    def parts(self, window: int) -> Iterator[tuple[pl.DataFrame, NDArray[np.float64], NDArray[np.int8]]]:
        """Yield the rows of a window in pieces: frame, (labels, rows) true probabilities, (labels, rows) labels."""
        first_row = _checked_window(window) * self.config.window_rows
        rows = range(first_row, first_row + self.config.window_rows)
        for block, first, last in self.still.blocks(rows, moment=self.moment(window)):
            frame = self.still.frame_of(block, first, last)
            times = self._times(block, first, last, window=window)
            columns = [pl.Series(name, values) for name, values in times.items()]
            yield pl.DataFrame([*columns, *frame]), block.probabilities[:, first:last], block.labels[:, first:last]

    def probabilities(self, window: int) -> NDArray[np.float64]:
        """Return the (labels, rows) true probabilities of a window."""
        return np.concatenate([probabilities for _, probabilities, _ in self.parts(window)], axis=1)

    def truth(self, window: int) -> WindowTruth:
        """Return what is known of a window."""
        drawn = [(probabilities, labels) for _, probabilities, labels in self.parts(window)]
        return self.truth_of(
            window,
            probabilities=np.concatenate([probabilities for probabilities, _ in drawn], axis=1),
            labels=np.concatenate([labels for _, labels in drawn], axis=1),
        )

    def truth_of(self, window: int, *, probabilities: NDArray[np.float64], labels: NDArray[np.int8]) -> WindowTruth:
        """Return what is known of a window from what its `parts` gave, one after the other."""
        best = {name: best_metrics(probabilities[index], labels[index]) for index, name in enumerate(self.labels)}
        return WindowTruth(window=window, name=self.name(window), best=best, new_ids=self.new_ids(window))

    def new_ids(self, window: int) -> dict[str, float]:
        """Return the expected share of ids that were not there a window before, by feature."""
        maker = self.still.maker
        shares = {}
        for name in self.come_and_go:
            index = maker.names.index(name)
            cardinality = maker.cardinalities[index]
            ids = self.moment(window).ids[index]
            if ids is None:  # they stay
                continue
            before = np.zeros(cardinality, dtype=np.int64)
            if window:
                before, _ = self._generations(index, window - 1)
            is_new = ids // cardinality > before[ids % cardinality]
            shares[name] = float(id_probabilities(cardinality, self.config.teacher.zipf_exponent)[is_new].sum())
        return shares

    # --------------------------------------------------------------------------------------------------- what has moved

    def moment(self, window: int) -> Moment:
        """Return what the rows of a window are drawn from."""
        if self._last is not None and self._last[0] == window:
            return self._last[1]
        config = self.config
        season = math.sin(2 * math.pi * window / config.season_windows) if config.season_windows else 0.0
        drawn = [self._ids(index, window, season=season) for index in range(len(self.still.maker.names))]
        moment = Moment(
            tables=tuple(table for table, _ in drawn),
            ids=tuple(ids for _, ids in drawn),
            dense_means=self._dense_means(window),
            bias_shift=config.season_logit * season,
        )
        self._last = (window, moment)
        return moment

    def _ids(self, index: int, window: int, *, season: float) -> tuple[_Floats, NDArray[np.int64] | None]:
        """Return the table of a feature and its ids, the most popular first."""
        if self.still.maker.names[index] not in self.come_and_go:
            return self._vectors(index, 0, window, season=season), None
        cardinality = self.still.maker.cardinalities[index]
        generations, ages = self._generations(index, window)
        table = np.empty((cardinality, self.still.maker.columns), dtype=np.float32)
        popularity = np.empty(cardinality, dtype=np.float32)
        for generation in np.unique(generations).tolist():
            places = np.flatnonzero(generations == generation)
            ranks = self._ranks(index, generation)[places]
            table[places] = self._vectors(index, generation, window, season=season)[ranks]
            falling = (
                np.log(ranks + 1.0) * self.config.teacher.zipf_exponent + self.config.popularity_decay * ages[places]
            )
            popularity[places] = -falling.astype(np.float32)
        order = np.argsort(-popularity, kind="stable")
        return table[order], (generations * cardinality + np.arange(cardinality))[order]

    def _generations(self, index: int, window: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return which id each place of a table has, counted from 0, and the share of its life that is over."""
        rng = self._rng(index, 0, 0, purpose=_Purpose.CHANGE_OF_HANDS)
        lives = window / self.config.lifetime + rng.random(self.still.maker.cardinalities[index])
        generations = np.floor(lives)
        return generations.astype(np.int64), lives - generations

    def _ranks(self, index: int, generation: int) -> NDArray[np.int64]:
        """Return how popular the ids of a generation are when they are young, 0 first, by their places."""
        cardinality = self.still.maker.cardinalities[index]
        if not generation:
            return np.arange(cardinality)
        return self._rng(index, generation, 0, purpose=_Purpose.POPULARITY).permutation(cardinality)

    def _vectors(self, index: int, generation: int, window: int, *, season: float) -> _Floats:
        """Return the vectors of a generation of ids as they are in a window, by rank."""

        def normal(step: int, purpose: _Purpose) -> _Floats:
            rng = self._rng(index, generation, step, purpose=purpose)
            cardinality = self.still.maker.cardinalities[index]
            return centred(rng, cardinality, self.still.maker.columns, self.config.teacher.zipf_exponent)

        # The first id of a generation takes its place a lifetime before the last one does.
        born = max(0, math.floor((generation - 1) * self.config.lifetime))
        start = normal(0, _Purpose.GENERATION) if generation else self.still.maker.still.tables[index]
        vectors = walked(
            start,
            window - born,
            rate=self.config.preference_rate,
            normal=lambda step: normal(step, _Purpose.PREFERENCE),
        )
        angle = self.config.season_angle * season
        if angle:
            others = normal(0, _Purpose.SEASON)
            vectors = _mixed(vectors, math.cos(angle), others, math.sin(angle))
        return vectors

    def _dense_means(self, window: int) -> _Floats:
        num_dense = self.config.teacher.num_dense

        def normal(step: int) -> _Floats:
            return self._rng(0, 0, step, purpose=_Purpose.COVARIATE).standard_normal(num_dense, dtype=np.float32)

        still = np.zeros(num_dense, dtype=np.float32)
        return walked(still, window, rate=self.config.covariate_rate, normal=normal)

    def _rng(self, index: int, generation: int, step: int, *, purpose: _Purpose) -> np.random.Generator:
        return np.random.default_rng((self.config.teacher.seed, index, generation, step, int(purpose)))

    # ---------------------------------------------------------------------------------------------------------- times

    def _times(self, block: RowBlock, first: int, last: int, *, window: int) -> dict[str, NDArray[np.int64]]:
        """Return the columns of time of rows first … last−1 of a block."""
        config = self.config
        rows = np.arange(first, last) + block.number * BLOCK_ROWS - window * config.window_rows
        times = config.begin_s + window * config.window_s + rows * config.window_s // config.window_rows
        if not config.delay_s:
            return {TIME: times}
        uniform = self._rng(0, 0, block.number, purpose=_Purpose.DELAY).random(BLOCK_ROWS)[first:last]
        # By inverse CDF of an exponential distribution that ends at `attribution_s`.
        reach = -math.expm1(-config.attribution_s / config.delay_s)
        delays = np.minimum(-config.delay_s * np.log1p(-uniform * reach), config.attribution_s).astype(np.int64)
        labels = block.labels[:, first:last]
        known_after = np.where(labels[-1] == 1, delays, config.attribution_s)
        if len(labels) == 2:
            known_after = np.where(labels[0] == 1, known_after, 0)
        return {TIME: times, LABEL_TIME: times + known_after}


def walked(start: _Floats, steps: int, *, rate: float, normal: Callable[[int], _Floats]) -> _Floats:
    """Return v after so many steps of v ← √(1−rate)·v + √rate·ε, without the steps between; see the module.

    Args:
        start: v before the first step.
        steps: 0 or more.
        rate: 0 … 1; 0 stands still.
        normal: standard normal numbers like `start`, those of a step that it is given.
    """
    if not rate or not steps:
        return start
    low = start
    low_step = 0
    high = _next(start, normal(1), rate=rate, distance=1)
    high_step = 1
    while high_step < steps:
        distance = high_step
        low = high
        low_step = high_step
        high_step = 2 * high_step
        high = _next(low, normal(high_step), rate=rate, distance=distance)
    while high_step != steps:
        distance = (high_step - low_step) // 2
        middle_step = low_step + distance
        middle = _between(low, high, normal(middle_step), rate=rate, distance=distance)
        if steps < middle_step:
            high = middle
            high_step = middle_step
        else:
            low = middle
            low_step = middle_step
            if low_step == steps:
                return low
    return high


def _next(before: _Floats, normal: _Floats, *, rate: float, distance: int) -> _Floats:
    kept = (1.0 - rate) ** distance  # ρ^2d
    return _mixed(before, math.sqrt(kept), normal, math.sqrt(1.0 - kept))


def _between(low: _Floats, high: _Floats, normal: _Floats, *, rate: float, distance: int) -> _Floats:
    kept = (1.0 - rate) ** distance
    return _mixed(low + high, math.sqrt(kept) / (1.0 + kept), normal, math.sqrt((1.0 - kept) / (1.0 + kept)))


def _mixed(one: _Floats, share: float, other: _Floats, other_share: float) -> _Floats:
    return (one * np.float32(share) + other * np.float32(other_share)).astype(np.float32, copy=False)


def _checked_window(window: int) -> int:
    if window < 0:
        raise ConfigError(
            expected="the number of a window, 0 or more",
            found=str(window),
            where="windows of a DriftingTeacher",
            ways_out="window 0 is the first",
        )
    return window


def _refused(expected: str, found: str, way_out: str) -> ConfigError:
    return ConfigError(expected=expected, found=found, where="DriftConfig", ways_out=way_out)
