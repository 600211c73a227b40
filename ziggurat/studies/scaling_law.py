"""Laws of scaling: which of three a few losses follow as compute grows, and how sure that is.

    no gain     L(x) = b                      more compute changes nothing
    power       L(x) = b · x^(−c)             every factor of compute takes the same share of what is left
    saturating  L(x) = a + b · x^(−c)         a part a stays, whatever the compute

L is the loss above the best that is reachable, where that is known (a made teacher), else the loss itself. x is the
compute of a size over that of the smallest. A law of the first kind is a power law with c = 0 and one of the second a
saturating one with a = 0: a richer law always fits as well, so the fit says nothing. Each size is therefore *left out
in turn*, the laws are fitted to the others, and judged by how far off they predict it. Ends count as well, where a law
has to extrapolate.

All errors are those of log L, so a size at which little is left counts as much as one where much is. The power law is a
straight line there. For a saturating law c is searched on a grid; a and b follow from it by least squares of
relative errors, a, b ≥ 0.

**What is said.** All of it is repeated on every draw of the bootstrap (`scaling_draws.py`), so there is a share of
draws in which a law predicts best, and a band of 90 % of everything fitted.

1. The band of the power law's exponent holds 0: *no gain*.
2. The saturating law predicts better than the power law in 90 % of the draws: *saturating*.
3. Otherwise, if a floor a of more than half of what the largest size has left is outside of its band: *power*.
4. Otherwise the two *cannot be told apart*: the losses agree with both.

Where sizes lie off the fitted law by more than their scatter explains, by a factor f (Birge's ratio, χ² of a degree of
freedom, if above 1), bands are f times as wide: whole numbers of layers, and laws that hold about, make more of a point
than seeds and rows do. Where f is above 3 for all three, *none of the laws describes the sizes*: a curve may fall off a
cliff and be level behind it, as that of a model whose first layers each reach another order of products.

**Two models.** Draws share their test rows, so exponents are subtracted draw by draw: 90 % of the differences are the
band, and p is twice the smaller share of draws on one side of 0. The exponents compared are those of the power law, the
mean slopes over the range measured, whichever law is supported.

Whose end is lower is another question than whose curve is steeper, and one of a single size: the losses at the largest
sizes are divided, and log ratios tested by Welch's t. Their variance is that of the seeds *of that size*, which may
scatter more than others do, and that of drawing other test rows for both models together. It takes two seeds or more.

The Wukong paper fits y = −100 + 99.56 · x^(−0.00071) to its seven points (y: relative loss in percent, x: GFLOP a
sample; the sign of the exponent is missing in print): a saturating law with a = −100 fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ziggurat.errors import DataError

MIN_SIZES = 5  # a saturating law has three numbers, and one size is left out
SURE = 0.9
FAR_OFF = 3.0  # standard errors
_EXPONENTS = np.geomspace(0.02, 4.0, 160)
_GRID_POINTS = 60
_LEAST_VARIANCE = 1e-18  # of runs that are alike to the last bit

_Floats = NDArray[np.float64]


class Law(StrEnum):
    """Laws of scaling, simplest first; see the module docstring."""

    NO_GAIN = "no gain"
    POWER = "power"
    SATURATING = "saturating"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Fitted laws a + b · x^(−c), one a draw: arrays (draws,).

    Args:
        floor: a.
        scale: b.
        exponent: c.
    """

    floor: _Floats
    scale: _Floats
    exponent: _Floats

    def __call__(self, x: _Floats) -> _Floats:
        """Return (draws, len(x)): the loss of each at each x."""
        return self.floor[:, None] + self.scale[:, None] * x[None, :] ** -self.exponent[:, None]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value, and the ends of its band of 90 %."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the band's width, relative to the value."""
        return (self.high - self.low) / 2.0 / abs(self.value) if self.value else float("inf")


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Hold the errors of a law that predicts sizes that were left out.

    Args:
        error: root of the mean square error of log L: 0.05 is 5 % of the loss.
        in_standard_errors: the same, over the standard error of a size.
        best_share: share of draws in which this law predicts best.
    """

    error: float
    in_standard_errors: float
    best_share: float


@dataclass(frozen=True, kw_only=True)
class FittedLaws:
    """Three laws through the sizes of one model, and which of them the losses support.

    Args:
        supported: one law, or those that cannot be told apart.
        predicted: of sizes left out, by the name of the law.
        exponent: of the power law: the mean slope.
        saturating_exponent: c of the saturating law.
        floor: a of the saturating law.
        scale: b of the power law, at the smallest size.
        saturating_scale: b of the saturating law.
        off_by: how far sizes lie off the supported law, in standard errors; above 1, bands are that much wider.
        is_described: False if sizes lie more than 3 standard errors off every law.
        grid: compute over the smallest, at which the curve stands.
        curve: of the simplest law supported.
        low: lower end of its band.
        high: upper end.
    """

    supported: tuple[Law, ...]
    predicted: dict[Law, Predicted]
    exponent: Interval
    saturating_exponent: Interval
    floor: Interval
    scale: float
    saturating_scale: float
    off_by: float
    is_described: bool
    grid: tuple[float, ...]
    curve: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def says(self) -> str:
        """The finding, in words."""
        if not self.is_described:
            return f"none of the laws describes the sizes, which lie {self.off_by:.1f} standard errors off"
        if self.supported == (Law.NO_GAIN,):
            return "no gain from compute is shown"
        if len(self.supported) == 1:
            return f"{self.supported[0]} law"
        return f"{' and '.join(self.supported)} law cannot be told apart"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The exponent of one model less that of another: the mean, its band of 90 %, and p of no difference."""

    first: str
    second: str
    exponent: Interval
    p: float


@dataclass(frozen=True, kw_only=True)
class LossRatio:
    """The loss of one model over that of another, each at its largest size: the ratio, its band of 90 %, and p of 1.

    Args:
        first: one model.
        second: the other.
        flops: of a sample, of the first and of the second.
        ratio: first over second, with its band.
        p: two-sided, that they are alike; not corrected for other pairs.
    """

    first: str
    second: str
    flops: tuple[int, int]
    ratio: Interval
    p: float


@dataclass(frozen=True, kw_only=True)
class LargestSize:
    """The losses of a model at its largest size.

    Args:
        name: of the model.
        flops: of a sample.
        runs: (seeds,) mean loss of each run, all positive.
        rows: (draws,) geometric mean over the runs, on drawn test rows.
    """

    name: str
    flops: int
    runs: _Floats
    rows: _Floats


def fit(law: Law, x: _Floats, y: _Floats) -> Curves:
    """Fit a law to every draw.

    Args:
        law: which.
        x: (sizes,) compute over the smallest, all positive.
        y: (draws, sizes) losses, all positive.
    """
    logs = np.log(y)
    zeros = np.zeros(len(y))
    if law is Law.NO_GAIN:
        return Curves(floor=zeros, scale=np.exp(logs.mean(axis=1)), exponent=zeros)
    steps = np.log(x) - np.log(x).mean()
    slope = logs @ steps / (steps @ steps)
    power = Curves(floor=zeros, scale=np.exp(logs.mean(axis=1) - slope * np.log(x).mean()), exponent=-slope)
    return power if law is Law.POWER else _saturating(x, y, power)


def _saturating(x: _Floats, y: _Floats, power: Curves) -> Curves:
    """Fit a + b·x^(−c) with a, b > 0 by relative least squares; the power law where no such fit is nearer."""
    weights = 1.0 / y
    powers = x[None, :] ** -_EXPONENTS[:, None]
    # Normal equations of two numbers, for all draws and exponents: weights·y = 1 is to be a·weights + b·weights·powers.
    ww = (weights**2).sum(axis=1)[:, None]
    wu = weights**2 @ powers.T
    uu = weights**2 @ (powers**2).T
    w1 = weights.sum(axis=1)[:, None]
    u1 = weights @ powers.T
    determinant = np.maximum(ww * uu - wu**2, 1e-300)
    a = (w1 * uu - u1 * wu) / determinant
    b = (u1 * ww - w1 * wu) / determinant
    errors = np.where((a > 0) & (b > 0), x.size - a * w1 - b * u1, np.inf)
    best = errors.argmin(axis=1)
    draws = np.arange(len(y))
    # At a = 0 it is the power law, fitted in logarithms as that is.
    nearer = errors[draws, best] < ((power(x) * weights - 1.0) ** 2).sum(axis=1)
    return Curves(
        floor=np.where(nearer, a[draws, best], power.floor),
        scale=np.where(nearer, b[draws, best], power.scale),
        exponent=np.where(nearer, _EXPONENTS[best], power.exponent),
    )


def left_out_errors(law: Law, x: _Floats, y: _Floats) -> _Floats:
    """Return (draws, sizes): log of what a law predicts of each size from the others, less log of its loss."""
    errors = np.empty_like(y)
    for index in range(x.size):
        others = np.arange(x.size) != index
        predicted = fit(law, x[others], y[:, others])(x[index : index + 1])[:, 0]
        errors[:, index] = np.log(predicted) - np.log(y[:, index])
    return errors


def compare_laws(compute: Sequence[float], means: _Floats, draws: _Floats) -> FittedLaws:
    """Fit all three laws, and say which the losses support.

    Args:
        compute: of each size, ascending.
        means: (sizes,) loss of each.
        draws: (draws, sizes) of the bootstrap.

    Raises:
        DataError: fewer than five sizes, or compute that does not grow.
    """
    x = np.asarray(compute, dtype=np.float64)
    if x.size < MIN_SIZES or (np.diff(x) <= 0).any() or x.min() <= 0:
        raise DataError(
            expected=f"losses of {MIN_SIZES} sizes or more, of growing compute: a saturating law has three numbers, "
            "and one size is left out",
            found=", ".join(f"{each:g}" for each in x),
            where="laws of scaling",
            ways_out=f"measure more sizes: --points {MIN_SIZES}",
        )
    x = x / x[0]
    point = means[None, :]
    scatter = _scatter(draws)
    fitted = {law: fit(law, x, point) for law in Law}
    drawn = {law: fit(law, x, draws) for law in Law}

    off_by = {law: _off_by(fitted[law], x, point, scatter=scatter, numbers=count) for law, count in _NUMBERS.items()}
    slope = _interval(fitted[Law.POWER].exponent, drawn[Law.POWER].exponent, widened=off_by[Law.POWER])
    of_floor = _interval(fitted[Law.SATURATING].floor, drawn[Law.SATURATING].floor, widened=off_by[Law.SATURATING])

    errors = {law: left_out_errors(law, x, draws) for law in Law}
    squares = np.stack([(each**2).mean(axis=1) for each in errors.values()])
    # Where a floor of 0 makes a saturating law a power law, the simpler one is the better.
    best = squares.argmin(axis=0)
    of_means = {law: left_out_errors(law, x, point)[0] for law in Law}
    predicted = {
        law: Predicted(
            error=float((of_means[law] ** 2).mean() ** 0.5),
            in_standard_errors=float(((of_means[law] / scatter) ** 2).mean() ** 0.5),
            best_share=float((best == index).mean()),
        )
        for index, law in enumerate(Law)
    }

    floor_wins = float((squares[2] < squares[1]).mean())
    if slope.low <= 0.0:
        supported: tuple[Law, ...] = (Law.NO_GAIN,)
    elif floor_wins >= SURE:
        supported = (Law.SATURATING,)
    elif of_floor.high <= 0.5 * float(means[-1]):
        supported = (Law.POWER,)
    else:
        supported = (Law.POWER, Law.SATURATING)

    shown = supported[0]
    grid = np.geomspace(1.0, x[-1], _GRID_POINTS)
    curve = np.log(fitted[shown](grid)[0])
    around = (np.log(np.maximum(drawn[shown](grid), 1e-300)) - curve) * off_by[shown]
    low, high = np.quantile(around, [0.05, 0.95], axis=0)
    return FittedLaws(
        supported=supported,
        predicted=predicted,
        exponent=slope,
        saturating_exponent=_interval(
            fitted[Law.SATURATING].exponent, drawn[Law.SATURATING].exponent, widened=off_by[Law.SATURATING]
        ),
        floor=of_floor,
        scale=float(fitted[Law.POWER].scale[0]),
        saturating_scale=float(fitted[Law.SATURATING].scale[0]),
        off_by=off_by[shown],
        is_described=min(off_by.values()) <= FAR_OFF,
        grid=tuple(grid.tolist()),
        curve=tuple(np.exp(curve).tolist()),
        low=tuple(np.exp(curve + low).tolist()),
        high=tuple(np.exp(curve + high).tolist()),
    )


_NUMBERS = {Law.NO_GAIN: 1, Law.POWER: 2, Law.SATURATING: 3}


def _scatter(draws: _Floats) -> _Floats:
    """Return (sizes,): the standard error of log L of each size, never 0."""
    return np.maximum(np.log(draws).std(axis=0), 1e-9)


def _off_by(curves: Curves, x: _Floats, means: _Floats, *, scatter: _Floats, numbers: int) -> float:
    """Return Birge's ratio of a law through the means: 1 where their scatter explains how far off they lie."""
    off = (np.log(curves(x)) - np.log(means))[0] / scatter
    return max(1.0, float((off @ off / (x.size - numbers)) ** 0.5))


def _interval(value: _Floats, drawn: _Floats, *, widened: float) -> Interval:
    low, high = np.quantile((drawn - value[0]) * widened, [0.05, 0.95])
    return Interval(value=float(value[0]), low=float(value[0] + low), high=float(value[0] + high))


def exponent_difference(
    first: tuple[str, Sequence[float], _Floats, _Floats], second: tuple[str, Sequence[float], _Floats, _Floats]
) -> Difference:
    """Test the difference of two models' exponents; see the module docstring.

    Args:
        first: name, compute, means and draws of one model, as `compare_laws` takes them.
        second: those of another, of the same draws of rows.
    """
    names = []
    values = []
    drawn = []
    for name, compute, means, draws in (first, second):
        x = np.asarray(compute, dtype=np.float64) / compute[0]
        curves = fit(Law.POWER, x, means[None, :])
        widened = _off_by(curves, x, means[None, :], scatter=_scatter(draws), numbers=_NUMBERS[Law.POWER])
        value = curves.exponent[0]
        names.append(name)
        values.append(float(value))
        drawn.append(value + (fit(Law.POWER, x, draws).exponent - value) * widened)
    difference = values[0] - values[1]
    differences = drawn[0] - drawn[1]
    low, high = np.quantile(differences, [0.05, 0.95])
    # One more on either side: of so many draws, no p is smaller than that.
    sides = [(int((differences <= 0).sum()) + 1), (int((differences >= 0).sum()) + 1)]
    p = min(1.0, 2.0 * min(sides) / (differences.size + 1))
    interval = Interval(value=difference, low=float(low), high=float(high))
    return Difference(first=names[0], second=names[1], exponent=interval, p=p)


def largest_ratio(first: LargestSize, second: LargestSize) -> LossRatio:
    """Test whether one model's loss at its largest size is another's; see the module docstring.

    Args:
        first: of one model, of two runs or more.
        second: of another, on the same draws of rows.
    """
    logs = [np.log(each.runs) for each in (first, second)]
    difference = float(logs[0].mean() - logs[1].mean())
    of_seeds = [float(each.var(ddof=1) / each.size) for each in logs]
    of_rows = float(np.log(first.rows / second.rows).var(ddof=1))
    variance = sum(of_seeds) + of_rows
    error = max(variance, _LEAST_VARIANCE) ** 0.5
    # Welch and Satterthwaite; what drawing rows adds is known well.
    freedom = variance**2 / max(
        sum(each**2 / (size.size - 1) for each, size in zip(of_seeds, logs, strict=True)), _LEAST_VARIANCE**2
    )
    half = float(stats.t.ppf(0.95, freedom)) * error
    interval = Interval(
        value=float(np.exp(difference)), low=float(np.exp(difference - half)), high=float(np.exp(difference + half))
    )
    p = 2.0 * float(stats.t.sf(abs(difference) / error, freedom))
    return LossRatio(
        first=first.name, second=second.name, flops=(first.flops, second.flops), ratio=interval, p=min(1.0, p)
    )
