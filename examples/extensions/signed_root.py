"""Add a numeric transform: the square root that keeps the sign, standardised.

A balance, a change of a price or a difference of two counts has large values on both sides of 0. A logarithm spends
most of its range on numbers near 0; the root of a count has the same scatter wherever the count lies (Anscombe, 1948):

    value = (r − mean) / sd,  r = sign(x)·√|x|         mean, sd: of r in the training rows

    import signed_root                          # lists it; on the command line: --extension signed_root

    [[feature]]
    name = "balance"
    kind = "dense"
    transform = "signed_root"

√ is rounded correctly on every processor, so training, exports and servers have the same bits. Of logarithms NumPy does
not promise that; `before` gets those that do.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from ziggurat.features.transforms import Learns, Logarithms, NumericTransform


class SignedRoot(NumericTransform):
    """Take the square root that keeps the sign, and standardise it."""

    name = "signed_root"
    learns = Learns.MOMENTS

    def before(self, values: Float64[np.ndarray, " N"], logarithms: Logarithms) -> Float64[np.ndarray, " N"]:
        """Return the roots, whose mean and deviation are learned."""
        del logarithms
        return np.copysign(np.sqrt(np.abs(values)), values)


SIGNED_ROOT = NumericTransform.add(SignedRoot())
