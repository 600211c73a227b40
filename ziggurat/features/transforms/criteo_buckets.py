"""Criteo's buckets: ⌊ln(x)²⌋ for x > 2, else x cut to an integer; an id like any other, with a vocabulary.

The 3 Idiots' winning solution of the 2014 Criteo challenge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat.features.transforms.transform import Logarithms, NumericTransform

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64, Int64


class CriteoBuckets(NumericTransform):
    """Replace a number by an id that a vocabulary counts."""

    name = "criteo_buckets"
    makes_ids = True

    def bucket_ids(self, values: Float64[np.ndarray, " N"], logarithms: Logarithms) -> Int64[np.ndarray, " N"]:
        """Return bucket numbers; meaningless where NaN."""
        import numpy as np

        values = np.nan_to_num(values, nan=0.0)
        large = values > 2
        of_large = logarithms.log(np.where(large, values, 3.0))
        squared = np.floor(of_large * of_large)
        return np.where(large, squared, np.clip(np.trunc(values), -(2.0**62), 2.0**62)).astype(np.int64)
