"""Identity and standardise: x, and (x − mean) / sd of the training rows."""

from __future__ import annotations

from ziggurat.features.transforms.transform import Learns, NumericTransform


class Identity(NumericTransform):
    """Leave the number as it is."""

    name = "identity"
    standardised_as = "standardise"


class Standardise(NumericTransform):
    """Subtract the mean, and divide by the standard deviation."""

    name = "standardise"
    learns = Learns.MOMENTS
