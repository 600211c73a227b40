"""Quantile buckets: a number becomes one of `num_buckets` rows of a table, with as many training rows in each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat.features.transforms.transform import Learns, NumericTransform

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64


class QuantileBuckets(NumericTransform):
    """Replace a number by its bucket."""

    name = "quantile_buckets"
    learns = Learns.QUANTILES
    is_bucketed = True

    def quantiles(self, sample: Float64[np.ndarray, " K"], *, num_buckets: int) -> Float64[np.ndarray, " Q"]:
        """Return the edges between buckets, at the i/num_buckets quantiles."""
        import numpy as np

        return np.unique(np.quantile(sample, np.arange(1, num_buckets) / num_buckets))
