"""Log1p: sign(x)·ln(1 + |x|), which brings far extremes near; alone, or standardised after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat.features.transforms.transform import Learns, Logarithms, NumericTransform

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64


class Log1p(NumericTransform):
    """Take the logarithm that keeps the sign."""

    name = "log1p"
    standardised_as = "log1p_standardise"

    def before(self, values: Float64[np.ndarray, " N"], logarithms: Logarithms) -> Float64[np.ndarray, " N"]:
        """Return sign(x)·ln(1 + |x|)."""
        import numpy as np

        return np.copysign(logarithms.log1p(np.abs(values)), values)

    def raw_step(self, number: float, *, step: float) -> float:
        """Return the step times the slope of the exponential."""
        import numpy as np

        return step * float(np.exp(min(abs(number), 700.0)))


class Log1pStandardise(Log1p):
    """Take the logarithm, and standardise it."""

    name = "log1p_standardise"
    learns = Learns.MOMENTS
    standardised_as = ""
