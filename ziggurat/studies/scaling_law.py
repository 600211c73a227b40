"""The law of scaling, loss = a + b · x^(−c), fitted to a few points, with a band of confidence.

    x  compute of a sample, relative to the smallest model        a  what no amount of compute removes
    c  the exponent: a factor of 2^(1/c) in compute halves what is above a

For a given c the law is linear in (a, b), so least squares gives them exactly; c is searched on a grid of logarithms
and refined by Brent's method (scipy). b < 0 would be a loss that rises; then the best constant is reported, with b = 0.

The band is a bootstrap: from the runs of every point as many are drawn with replacement, the law is fitted to their
means, and at each x the 5 % and 95 % quantiles of the fitted laws are the band. With a single run a point there is
nothing to draw from; then residuals of the fit are drawn instead. Few points and one exponent make wide bands: that is
the truth about them.

The Wukong paper fits y = −100 + 99.56 · x^(−0.00071) to its seven points (y: relative loss in percent, x: GFLOP a
sample; the sign of the exponent is missing in print), which is this law with a = −100 fixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from ziggurat.errors import DataError

MIN_POINTS = 4
_EXPONENTS = np.geomspace(1e-3, 4.0, 120)


@dataclass(frozen=True, kw_only=True)
class ScalingLaw:
    """loss = a + b · x^(−c).

    Args:
        a: limit of the loss.
        b: what compute can remove, at x = 1.
        c: the exponent.
    """

    a: float
    b: float
    c: float

    def __call__(self, x: NDArray[np.floating] | Sequence[float]) -> NDArray[np.float64]:
        """The loss at each x."""
        return self.a + self.b * np.asarray(x, dtype=np.float64) ** -self.c


@dataclass(frozen=True, kw_only=True)
class FittedLaw:
    """A law and what the bootstrap says of it.

    Args:
        law: fitted to the means of the points.
        exponents: 5 % and 95 % quantile of c.
        grid: x at which the band is given.
        low: 5 % quantile of the loss at each x of the grid.
        high: 95 % quantile.
    """

    law: ScalingLaw
    exponents: tuple[float, float]
    grid: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def fit_law(x: Sequence[float], losses: Sequence[float]) -> ScalingLaw:
    """Least squares over a, b ≥ 0 and c.

    Raises:
        DataError: fewer than three different x, or an x that is not positive.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    if len(set(xs.tolist())) < 3 or (xs <= 0).any() or xs.shape != ys.shape:
        raise DataError(
            expected="losses at three or more different amounts of compute, all positive",
            found=f"x = {xs.tolist()}, {ys.size} losses",
            where="fit of a scaling law",
            ways_out="measure more points",
        )
    errors = [_linear(xs, ys, c)[1] for c in _EXPONENTS]
    best = int(np.argmin(errors))
    low, high = (np.log(_EXPONENTS[max(0, min(best + step, _EXPONENTS.size - 1))]) for step in (-1, 1))
    found = minimize_scalar(
        lambda exponent: _linear(xs, ys, float(np.exp(exponent)))[1], bounds=(low, high), options={"xatol": 1e-9}
    )
    return _linear(xs, ys, float(np.exp(found.x)))[0]


def doubt_of(x: Sequence[float], losses: Sequence[float], *, law: ScalingLaw) -> str:
    """Say why a fitted exponent means nothing, or return "" if no reason is found.

    Three points determine a, b and c exactly, whatever they are; an exponent at an end of the range that is searched is
    that end's and not the data's; and losses that rise somewhere follow no falling law.

    Args:
        x: compute of each point, ascending.
        losses: mean loss of each.
        law: fitted to them.
    """
    if len(set(x)) < MIN_POINTS:
        return f"{len(set(x))} points determine three numbers exactly: measure {MIN_POINTS} sizes or more"
    if any(later >= earlier for earlier, later in itertools.pairwise(losses)):
        return "the loss does not fall at every step: more seeds, or more data"
    if law.b == 0.0 or not 1.02 * _EXPONENTS[0] < law.c < 0.98 * _EXPONENTS[-1]:
        return "the exponent lies at the end of the range that is searched"
    return ""


def _linear(x: NDArray[np.float64], y: NDArray[np.float64], c: float) -> tuple[ScalingLaw, float]:
    """Best a and b ≥ 0 for a given c, and the squared error."""
    powers = x**-c
    spread = powers - powers.mean()
    b = max(0.0, float(spread @ (y - y.mean()) / max(float(spread @ spread), 1e-300)))
    law = ScalingLaw(a=float(y.mean() - b * powers.mean()), b=b, c=c)
    return law, float(((law(x) - y) ** 2).sum())


def fit_with_band(x: Sequence[float], runs: Sequence[Sequence[float]], *, draws: int = 400, seed: int = 0) -> FittedLaw:
    """Fit the means of the runs at each x, and bootstrap.

    Args:
        x: compute of each point.
        runs: losses of the runs at each point.
        draws: of the bootstrap.
        seed: of the bootstrap.
    """
    means = [float(np.mean(each)) for each in runs]
    law = fit_law(x, means)
    residuals = np.asarray(means) - law(x)
    single = any(len(each) < 2 for each in runs)
    rng = np.random.default_rng(seed)
    grid = np.geomspace(min(x), max(x), 60)
    laws = []
    for _ in range(draws):
        # A point of one run has no spread of its own: the residuals of the fit stand in for it.
        if single:
            drawn = law(x) + rng.choice(residuals, size=len(means))
        else:
            drawn = np.asarray([np.mean(rng.choice(np.asarray(each), size=len(each))) for each in runs])
        laws.append(fit_law(x, drawn.tolist()))
    curves = np.stack([each(grid) for each in laws])
    low, high = np.quantile(curves, [0.05, 0.95], axis=0)
    exponents = np.quantile([each.c for each in laws], [0.05, 0.95])
    return FittedLaw(
        law=law,
        exponents=(float(exponents[0]), float(exponents[1])),
        grid=tuple(grid.tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
    )
