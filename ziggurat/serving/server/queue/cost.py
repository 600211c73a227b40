"""How long a batch takes: time = fixed + slope · candidates, fitted to the last batches by least squares.

A mean time per request would be wrong twice: one request alone pays the fixed part (calls, kernels' starts) in full, a
batch of a hundred shares it. A server that multiplies the first mean by the length of its queue refuses bursts which it
could answer. The line needs batches of different sizes; `Engine.warm_up` gives it some before the first request.

Old batches count less and less (each by `_KEPT` of what it counted at the next one), so the line follows the machine.
`predict` returns the line's value times the largest of the last ratios measured / predicted (at most 3, shrinking from
batch to batch), so that a noisy machine refuses earlier instead of answering late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Weight of a batch after the next one: about the last 30 count, so that the line follows the machine.
_KEPT = 0.97
_CALM = 0.98  # by how much an excess over the prediction counts less with each later batch
_MAX_RISE = 0.5  # of the excess, by one batch: a pause of the machine is no new speed
# However long a batch took, no more is feared of the next one than three times the line.
_MAX_EXCESS = 3.0


@dataclass(kw_only=True)
class CostLine:
    """A line through (candidates, seconds) of the last batches.

    Attributes:
        excess: factor by which recent batches took longer than the line says, 1 or more.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    excess: float = 1.0
    _fitted: tuple[float, float] | None = field(default=None, repr=False, compare=False)

    def observe(self, candidates: float, seconds: float) -> None:
        """Take in a batch that was measured."""
        # Not before the line has seen some batches.
        if self.weight > 3 and (expected := self._at(candidates)) > 0:
            calmer = 1 + (self.excess - 1) * _CALM
            self.excess = min(_MAX_EXCESS, max(calmer, min(seconds / expected, calmer + _MAX_RISE)))
        for name, value in (
            ("weight", 1.0),
            ("x", candidates),
            ("y", seconds),
            ("xx", candidates * candidates),
            ("xy", candidates * seconds),
        ):
            setattr(self, name, getattr(self, name) * _KEPT + value)
        self._fitted = None

    def line(self) -> tuple[float, float]:
        """Fixed seconds of a batch, and seconds of one more candidate; both 0 before the first batch."""
        fitted = self._fitted
        if fitted is None:  # asked several times for each request, fitted once for each batch
            fitted = self._fitted = self._fit()
        return fitted

    def _fit(self) -> tuple[float, float]:
        if not self.weight:
            return 0.0, 0.0
        mean_x = self.x / self.weight
        mean_y = self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        if spread <= 1e-6 * mean_x * mean_x or spread <= 0:
            return mean_y / 2, mean_y / 2 / max(mean_x, 1.0)  # batches of one size: half of the time is taken for fixed
        slope = (self.xy / self.weight - mean_x * mean_y) / spread
        # Not so steep that a batch of nothing would take less than no time.
        slope = min(max(slope, 0.0), mean_y / max(mean_x, 1e-9))
        return max(mean_y - slope * mean_x, 0.0), slope

    def _at(self, candidates: float) -> float:
        fixed, slope = self.line()
        return fixed + slope * candidates

    def predict(self, candidates: float, *, batches: int = 1) -> float:
        """Seconds that so many candidates in so many batches will take."""
        fixed, slope = self.line()
        return self.excess * (batches * fixed + slope * candidates)

    def candidates_within(self, seconds: float) -> float:
        """Return how many candidates one batch may have to be done in time; infinite before the first batch."""
        fixed, slope = self.line()
        if slope <= 0:
            return float("inf") if fixed < seconds else 1.0
        return max((seconds / self.excess - fixed) / slope, 1.0)
