"""Numeric features: what is fitted on the training data, and what happens to each number.

    raw numbers ──► missing ones filled ──► `before` ──► exact sums, or a sample ──► `NumericState` ──► `apply`

What these steps are, the transform says (`features/transforms/`); here they are taken over all rows.

A missing number becomes `missing` before the transform, in fitting as in encoding; in the two transforms that make
rows it goes to the missing row instead. A constant feature has sd 1.

Fitting does not depend on how the rows come, in which chunks, order or parts: mean and sd are those of exact sums
(`ops/exact_sums.py`), quantiles come from the 262,144 training rows whose number hashes lowest (all rows, if there are
no more): the same rows whatever the order, standard error of a rank at most 0.001. So what parts of the data have
learnt (`NumericParts`) adds up to what all rows would have taught, bit for bit.

Nor does it depend on the processor: all of this is additions, multiplications and divisions, each rounded by itself,
and logarithms that are made of these (`ops/logarithm.py`). So is what becomes of a number when it is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ziggurat.data.preprocess.values.cells import LARGEST_FLOAT32
from ziggurat.errors import ConfigError
from ziggurat.features.hashing import mix
from ziggurat.features.kinds import FittedNumbers
from ziggurat.features.schema import MISSING_ROW, NUM_RESERVED_ROWS
from ziggurat.features.transforms import Learns, NumericTransform
from ziggurat.ops import logarithm
from ziggurat.ops.exact_sums import ExactSums, exact_sums
from ziggurat.specification import answer_of

SAMPLE_ROWS = 1 << 18
_CLOSE = 1e-7  # of the largest statistic of a feature; a float of 32 bits is rounded by 6e-8 at most


@dataclass(frozen=True, kw_only=True)
class NumericState:
    """Statistics fitted for one column of numbers.

    Args:
        feature: its name.
        mean: of the training values (after log1p, where the transform has it); standardising transforms only.
        sd: standard deviation of the same, 1 if they are constant.
        quantiles: what the transform learned of a sample, rising: quantiles from 0 to 1, or the edges of buckets.
    """

    feature: str
    mean: float = 0.0
    sd: float = 1.0
    quantiles: tuple[float, ...] = ()

    def is_close(self, other: NumericState) -> bool:
        """Return whether another fit of the same rows may have given the other one; its numbers were rounded anew.

        Versions before took logarithms by the processor's own instructions, and read a float of 32 bits as the number
        that it stores in place of the decimal that it was written from: both move a statistic by less than `_CLOSE`.
        """
        moments = (self.mean, self.sd), (other.mean, other.sd)
        return _are_close(*moments) and _are_close(self.quantiles, other.quantiles)


def _are_close(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    if len(first) != len(second):
        return False
    largest = max(map(abs, first), default=0.0)
    return all(abs(one - other) <= _CLOSE * largest for one, other in zip(first, second, strict=True))


def to_floats(values: np.ndarray, feature: FittedNumbers, state: NumericState) -> np.ndarray:
    """(N,) float32 numbers of a feature whose transform makes no rows; always finite.

    Args:
        values: (N,) float64, NaN where missing.
        feature: its transform and what stands for missing numbers.
        state: fitted on the training data.
    """
    values = _before(_filled(values, feature.missing), feature.transform)
    values = feature.transform.apply(values, state)
    # The cast would make infinity of a larger number.
    return np.clip(values, -LARGEST_FLOAT32, LARGEST_FLOAT32).astype(np.float32)


def to_bucket_rows(values: np.ndarray, state: NumericState) -> np.ndarray:
    """(N,) int32 rows of a feature with quantile buckets."""
    rows = np.searchsorted(np.array(state.quantiles), values, side="right").astype(np.int32) + NUM_RESERVED_ROWS
    return np.where(np.isnan(values), MISSING_ROW, rows).astype(np.int32)


def _filled(values: np.ndarray, missing: float) -> np.ndarray:
    """The numbers, with `missing` in the place of NaN."""
    absent = np.isnan(values)
    if not absent.any():
        return values
    values = values.copy()
    np.copyto(values, missing, where=absent)
    return values


def _before(values: np.ndarray, transform: NumericTransform) -> np.ndarray:
    """Return what is learned from and goes on, and refuse an answer that is none.

    Raises:
        ConfigError: the transform failed, or returned other than one float64 for each number.
    """
    # Our own answer as promised; only transforms from outside are checked.
    if type(transform).__module__.startswith("ziggurat."):
        return transform.before(values, logarithm)
    where = f"numeric transform {transform}, {type(transform).__module__}.{type(transform).__qualname__}.before"
    expected = f"{len(values)} numbers of float64, none of them NaN"
    found = answer_of(lambda: transform.before(values, logarithm), expected=expected, where=where)
    if not isinstance(found, np.ndarray) or found.shape != values.shape or found.dtype != np.float64:
        raise _no_numbers(expected, f"{type(found).__name__} {getattr(found, 'shape', '')}", where)
    if np.isnan(found).any():
        raise _no_numbers(expected, f"NaN of {values[np.isnan(found)][0]!r}", where)
    return found


def _no_numbers(expected: str, found: str, where: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=found,
        where=where,
        ways_out="say what becomes of every finite number; docs/guides/extending.md shows how",
    )


@dataclass(frozen=True, kw_only=True)
class NumericParts:
    """Statistics of the columns of numbers learnt from some rows; they add up to those of all rows.

    Args:
        sums: by feature, of those that are standardised.
        sample_keys: (K,) uint64 hashes of the numbers of the sampled rows.
        sample: by feature, of those with quantiles: (K,) float64 values in these rows.
    """

    sums: Mapping[str, ExactSums]
    sample_keys: np.ndarray
    sample: Mapping[str, np.ndarray]


class NumericFitter:
    """Fits all columns of numbers over chunks, in any order of the rows.

    Args:
        features: the numbers that the schema fits, of features and of labels.
    """

    def __init__(self, features: tuple[FittedNumbers, ...]) -> None:
        self._features = features
        self._sums = {item.name: ExactSums() for item in features if item.transform.learns is Learns.MOMENTS}
        sampled = tuple(item.name for item in features if item.transform.learns is Learns.QUANTILES)
        self._sample = _RowSample(names=sampled)

    def add(self, values: Mapping[str, np.ndarray], *, global_rows: np.ndarray) -> None:
        """Take a chunk: (N,) float64 values of every column of numbers (NaN where missing), and the rows' numbers."""
        prepared: dict[str, np.ndarray] = {}
        for feature in self._features:
            if feature.transform.learns is Learns.NOTHING:
                continue
            column = values[feature.name]
            if not feature.transform.makes_rows:
                column = _before(_filled(column, feature.missing), feature.transform)
            if feature.name in self._sums:
                self._sums[feature.name] += exact_sums(column)
            prepared[feature.name] = column
        self._sample.add(prepared, keys=mix(global_rows.astype(np.uint64)))

    def parts(self) -> NumericParts:
        """Return the parts learnt from the rows so far."""
        keys, values = self._sample.finish()
        return NumericParts(sums=dict(self._sums), sample_keys=keys, sample=dict(values))

    def absorb(self, parts: NumericParts) -> None:
        """Take what other rows have taught another fitter of the same features."""
        for name, sums in parts.sums.items():
            self._sums[name] += sums
        self._sample.add(parts.sample, keys=parts.sample_keys)

    def finish(self) -> dict[str, NumericState]:
        """The state of every column of numbers."""
        return {feature.name: self._state(feature) for feature in self._features}

    def _state(self, feature: FittedNumbers) -> NumericState:
        if feature.name in self._sums:
            sums = self._sums[feature.name]
            # Rounding of the logarithm alone leaves a constant column with a tiny deviation.
            is_constant = sums.deviation <= 1e-12 * max(abs(sums.mean), 1e-300)
            return NumericState(feature=feature.name, mean=sums.mean, sd=1.0 if is_constant else sums.deviation)
        if feature.transform.learns is not Learns.QUANTILES:
            return NumericState(feature=feature.name)
        values = self._sample.finish()[1][feature.name]
        values = values[~np.isnan(values)]
        if len(values) == 0:
            return NumericState(feature=feature.name)
        quantiles = feature.transform.quantiles(values, num_buckets=feature.num_buckets)
        return NumericState(feature=feature.name, quantiles=tuple(quantiles.tolist()))


@dataclass
class _RowSample:
    """The values of the SAMPLE_ROWS rows whose number hashes lowest."""

    names: tuple[str, ...]
    values: dict[str, np.ndarray] = field(default_factory=dict)
    _keys: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    _limit: np.uint64 = field(default_factory=lambda: np.uint64(0xFFFFFFFFFFFFFFFF))

    def __post_init__(self) -> None:
        self.values = {name: np.empty(0) for name in self.names}

    def add(self, values: Mapping[str, np.ndarray], *, keys: np.ndarray) -> None:
        if not self.names:
            return
        # What hashes above the limit can no longer be among the lowest.
        low = keys <= self._limit
        self._keys = np.concatenate([self._keys, keys[low]])
        for name in self.names:
            self.values[name] = np.concatenate([self.values[name], values[name][low]])
        # Not before it is twice as large: a cut sorts out as many rows as it keeps.
        if len(self._keys) > 2 * SAMPLE_ROWS:
            self._cut()

    def finish(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if len(self._keys) > SAMPLE_ROWS:
            self._cut()
        return self._keys, self.values

    def _cut(self) -> None:
        kept = np.sort(np.argpartition(self._keys, SAMPLE_ROWS - 1)[:SAMPLE_ROWS])
        self._keys = self._keys[kept]
        self._limit = self._keys.max()
        self.values = {name: column[kept] for name, column in self.values.items()}
