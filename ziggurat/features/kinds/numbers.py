"""Numbers that are fitted: the transforms of a number before it reaches the model, and who asks for one.

What is computed stands in `data/preprocess/values/numeric.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class NumericTransform(StrEnum):
    """Transforms of a number before it reaches the model."""

    IDENTITY = "identity"
    LOG1P = "log1p"  # sign(x)·ln(1+|x|)
    STANDARDISE = "standardise"  # (x − mean) / sd of the training data
    LOG1P_STANDARDISE = "log1p_standardise"
    QUANTILE = "quantile"  # rank in the training data, uniform in [0, 1]
    QUANTILE_BUCKETS = "quantile_buckets"  # becomes a categorical field of num_buckets rows
    CRITEO_BUCKETS = "criteo_buckets"  # floor(ln(x)²) for x > 2, else int(x); a categorical field with a vocabulary

    @property
    def makes_rows(self) -> bool:
        """True if the feature becomes a field with an embedding table, instead of a number."""
        return self.is_bucketed or self.makes_ids

    @property
    def makes_ids(self) -> bool:
        """True if numbers become ids that a vocabulary counts."""
        return self is NumericTransform.CRITEO_BUCKETS

    @property
    def is_bucketed(self) -> bool:
        """True if numbers become rows between fitted edges."""
        return self is NumericTransform.QUANTILE_BUCKETS

    @property
    def is_standardised(self) -> bool:
        """True if mean and standard deviation are fitted."""
        return self in (NumericTransform.STANDARDISE, NumericTransform.LOG1P_STANDARDISE)

    @property
    def is_logarithmic(self) -> bool:
        """True if the logarithm is taken first."""
        return self in (NumericTransform.LOG1P, NumericTransform.LOG1P_STANDARDISE)

    @property
    def is_ranked(self) -> bool:
        """True if a number becomes its rank."""
        return self is NumericTransform.QUANTILE

    @property
    def has_quantiles(self) -> bool:
        """True if quantiles are fitted."""
        return self.is_ranked or self.is_bucketed

    @property
    def standardised(self) -> NumericTransform | None:
        """The same transform, standardised; None where it is, or where there is none."""
        if self is NumericTransform.IDENTITY:
            return NumericTransform.STANDARDISE
        return NumericTransform.LOG1P_STANDARDISE if self is NumericTransform.LOG1P else None


class FittedNumbers(Protocol):
    """A column of numbers of which something is learned from the training rows."""

    @property
    def name(self) -> str:
        """The feature, or the encoded column of a label."""
        ...

    @property
    def transform(self) -> NumericTransform:
        """Say what becomes of a number."""
        ...

    @property
    def missing(self) -> float:
        """Give the number that stands for a missing one, before the transform."""
        ...

    @property
    def num_buckets(self) -> int:
        """Buckets between quantiles, for a transform that has them."""
        ...


@dataclass(frozen=True, kw_only=True)
class NumberFit:
    """A column of numbers of which something is learned: a label, or what a feature makes of its cells."""

    name: str
    transform: NumericTransform
    missing: float = 0.0
    num_buckets: int = 64
