"""Quantile: the rank of a number among the training rows, in [0, 1]; linear between quantiles, ties get the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat.features.transforms.transform import Learned, Learns, NumericTransform

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64

NUM_QUANTILES = 1001


class Quantile(NumericTransform):
    """Replace a number by its rank."""

    name = "quantile"
    learns = Learns.QUANTILES

    def quantiles(self, sample: Float64[np.ndarray, " K"], *, num_buckets: int) -> Float64[np.ndarray, " Q"]:
        """Return NUM_QUANTILES quantiles from 0 to 1."""
        import numpy as np

        del num_buckets
        return np.maximum.accumulate(np.quantile(sample, np.linspace(0.0, 1.0, NUM_QUANTILES)))

    def apply(self, values: Float64[np.ndarray, " N"], learned: Learned) -> Float64[np.ndarray, " N"]:
        """Return ranks; 0 where the training rows had no number."""
        import numpy as np

        quantiles = np.array(learned.quantiles)
        if len(quantiles) == 0:
            return np.zeros_like(values)
        levels = np.linspace(0.0, 1.0, len(quantiles))
        from_below = _interpolated(values, quantiles, levels)
        from_above = -_interpolated(-values, -quantiles[::-1], -levels[::-1])
        return (from_below + from_above) / 2


def _interpolated(values: np.ndarray, places: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return what `np.interp` does; a compiler may fuse its product and sum, and must not here."""
    import numpy as np

    last = len(places) - 1
    at = np.searchsorted(places, values, side="right") - 1  # the last place <= the value; -1: there is none
    low = np.clip(at, 0, max(last - 1, 0))
    high = np.minimum(low + 1, last)
    width = places[high] - places[low]
    rise = levels[high] - levels[low]
    slope = np.divide(rise, width, out=np.zeros_like(width), where=width > 0)
    between = slope * (values - places[low]) + levels[low]
    found = np.where(places[np.clip(at, 0, last)] == values, levels[np.clip(at, 0, last)], between)
    found = np.where(at < 0, levels[0], found)
    return np.where(at >= last, levels[last], found)
