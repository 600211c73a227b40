"""Numeric transform: what becomes of a number before it reaches a model, and what has to be learned for it.

    cells ──► numbers ──`before`──► numbers ──`learns` from the training rows──► `apply` ──► a number
                                                                             └─► edges   ──► a row of a table
                      └─`bucket_ids`──► ids, which a vocabulary counts ────────────────────► a row of a table

One object says all of it, so training, exports and servers compute the same bits. The arithmetic over many rows (exact
sums, samples, logarithms that are the same on every processor) is the reader's, `data/preprocess/values/numeric.py`; a
transform says which of it is wanted. One of your own derives from `NumericTransform` and is listed by
`NumericTransform.add` (docs/guides/extending.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol

from ziggurat.errors import ConfigError
from ziggurat.specification import Specification

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64, Int64


class Learns(StrEnum):
    """Choices of what a transform learns from the training rows."""

    NOTHING = "nothing"
    MOMENTS = "moments"  # mean and standard deviation, of exact sums
    QUANTILES = "quantiles"  # what `quantiles` says of a sample


class Logarithms(Protocol):
    """Logarithms that are the same bits on every processor; those of NumPy are not."""

    def log(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return ln x."""
        ...

    def log1p(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        """Return ln(1 + x)."""
        ...


class Learned(Protocol):
    """Statistics of one column of numbers, after `before`."""

    @property
    def mean(self) -> float:
        """The mean; 0 where moments are not learned."""
        ...

    @property
    def sd(self) -> float:
        """The standard deviation; 1 for a constant, and where moments are not learned."""
        ...

    @property
    def quantiles(self) -> tuple[float, ...]:
        """Numbers that `NumericTransform.quantiles` made; empty where they are not learned."""
        ...


class _PlainLogarithms:
    """NumPy's logarithms: whether a transform keeps its promises does not hang on their last bit."""

    def log(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        import numpy as np

        return np.log(values)

    def log1p(self, values: Float64[np.ndarray, " N"]) -> Float64[np.ndarray, " N"]:
        import numpy as np

        return np.log1p(values)


@dataclass(frozen=True, kw_only=True)
class _TriedOut:
    """Statistics that a transform is tried out with."""

    mean: float
    sd: float
    quantiles: tuple[float, ...]


class NumericTransform(Specification, kind="numeric transform"):
    """Say what becomes of a number. See the module's docstring.

    Attributes:
        learns: from the training rows.
        makes_ids: a number becomes an id that a vocabulary counts, by `bucket_ids`.
        is_bucketed: a number becomes a row, by how many of the learned quantiles are not above it.
        standardised_as: name of the same transform, standardised, which 32 bits spoil less; "" for none.
    """

    learns: ClassVar[Learns] = Learns.NOTHING
    makes_ids: ClassVar[bool] = False
    is_bucketed: ClassVar[bool] = False
    standardised_as: ClassVar[str] = ""

    def before(self, values: Float64[np.ndarray, " N"], logarithms: Logarithms) -> Float64[np.ndarray, " N"]:
        """Return the numbers that are learned from, and go on; each depends on itself alone.

        Args:
            values: finite numbers.
            logarithms: in the place of NumPy's, which depend on the processor. So do its exp, sin and pow;
                +, −, ×, ÷, sqrt, abs, floor and comparisons do not.
        """
        del logarithms
        return values

    def quantiles(self, sample: Float64[np.ndarray, " K"], *, num_buckets: int) -> Float64[np.ndarray, " Q"]:
        """Return rising numbers that are learned from a sample of the training rows.

        Args:
            sample: some numbers, at least one.
            num_buckets: as the schema says, for transforms that make buckets.
        """
        raise NotImplementedError(f"{self} learns no quantiles")

    def apply(self, values: Float64[np.ndarray, " N"], learned: Learned) -> Float64[np.ndarray, " N"]:
        """Return the numbers that a model reads, of numbers that `before` returned."""
        if self.learns is Learns.MOMENTS:
            return (values - learned.mean) / learned.sd
        return values

    def bucket_ids(self, values: Float64[np.ndarray, " N"], logarithms: Logarithms) -> Int64[np.ndarray, " N"]:
        """Return the number of the bucket of each number; of NaN any."""
        raise NotImplementedError(f"{self} makes no ids")

    def raw_step(self, number: float, *, step: float) -> float:
        """Return how far two raw numbers lie apart that are `step` apart around `number` after the transform."""
        del number
        return step

    @property
    def makes_rows(self) -> bool:
        """True if the feature becomes a field with an embedding table, instead of a number."""
        return self.is_bucketed or self.makes_ids

    @property
    def standardised(self) -> NumericTransform | None:
        """The same transform, standardised; None where it is, or where there is none."""
        return NumericTransform.named(self.standardised_as) if self.standardised_as else None

    def try_out(self) -> None:
        """Ask for a few numbers together and one by one."""
        import numpy as np

        where = f"numeric transform {self}, {type(self).__module__}.{type(self).__qualname__}"
        plain = _PlainLogarithms()
        values = np.concatenate([np.linspace(-7.0, 7.0, 57), [0.0, 1e-9, 1e6, -1e6, 1e30, -1e30]])
        quantiles: tuple[float, ...] = (-1.0, 0.0, 2.0)
        if self.learns is Learns.QUANTILES:
            found = self.quantiles(values, num_buckets=4)
            is_rising = isinstance(found, np.ndarray) and found.ndim == 1 and bool(np.all(np.diff(found) >= 0))
            if not is_rising or (self.is_bucketed and len(found) > 3):
                raise ConfigError(
                    expected="rising numbers; for a transform that makes buckets one fewer than num_buckets at most",
                    found=f"{found!r}, for 4 buckets",
                    where=f"{where}.quantiles",
                    ways_out="return np.unique(np.quantile(sample, np.arange(1, num_buckets) / num_buckets))",
                )
            quantiles = tuple(found.tolist())
        learned = _TriedOut(mean=0.5, sd=2.0, quantiles=quantiles)

        def transformed(some: np.ndarray) -> np.ndarray:
            if self.makes_ids:
                return self.bucket_ids(some, plain)
            return some if self.is_bucketed else self.apply(self.before(some, plain), learned)

        together = transformed(values)
        dtype = np.dtype(np.int64 if self.makes_ids else np.float64)
        is_right = isinstance(together, np.ndarray) and together.shape == values.shape and together.dtype == dtype
        if not is_right or not np.isfinite(together).all():
            if not isinstance(together, np.ndarray):
                problem = type(together).__name__
            elif not is_right:
                problem = f"{together.size} of {together.dtype}, for {len(values)}"
            else:
                first = int(np.flatnonzero(~np.isfinite(together))[0])
                problem = f"{float(together[first])} of {float(values[first])}"
            raise ConfigError(
                expected=f"as many finite numbers as there were, of {dtype}",
                found=problem,
                where=f"{where}.{'bucket_ids' if self.makes_ids else 'before and .apply'}",
                ways_out="say what becomes of numbers below 0, as np.copysign(np.sqrt(np.abs(values)), values) does",
            )
        alone = np.concatenate([transformed(values[index : index + 1]) for index in range(len(values))])
        # By their bits, since −0 equals 0.
        differ = np.flatnonzero(alone.view(np.int64) != together.view(np.int64))
        if len(differ) and not self.makes_ids:
            first = int(differ[0])
            raise ConfigError(
                expected="numbers that depend on themselves alone: a server transforms them one by one",
                found=f"{float(values[first])!r} becomes {together[first]!r} among others and {alone[first]!r} alone",
                where=f"{where}.before and .apply",
                ways_out=("statistics of the training rows: learns = Learns.MOMENTS", "logarithms: `logarithms.log`"),
            )
