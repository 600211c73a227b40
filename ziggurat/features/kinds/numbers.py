"""Numbers that are fitted: what a kind of feature says of a column of which something is learned.

What a transform is, `features/transforms/` says; what is fitted, `data/preprocess/values/numeric.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ziggurat.features.transforms import NumericTransform


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
