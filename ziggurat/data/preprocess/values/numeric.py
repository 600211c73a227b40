"""Numeric features: what is fitted on the training data, and what happens to each number.

    identity            x
    log1p               sign(x)·ln(1 + |x|)
    standardise         (x − mean) / sd                       after log1p for log1p_standardise
    quantile            rank in the training data, in [0, 1]  linear between 1,001 quantiles; ties get the middle rank
    quantile_buckets    row 3 + number of bucket edges <= x   edges at the i/num_buckets quantiles
    criteo_buckets      ⌊ln(x)²⌋ for x > 2, else x cut to an integer; an id like any other, with a vocabulary

A missing number becomes `missing` before the transform, in fitting as in encoding; in the two transforms that make
rows it goes to the missing row instead. A constant feature has sd 1.

Fitting does not depend on how the rows come, in which chunks, order or parts: mean and sd are those of exact sums
(`ops/exact_sums.py`), quantiles come from the 262,144 training rows whose number hashes lowest (all rows, if there are
no more): the same rows whatever the order, standard error of a rank at most 0.001. So what parts of the data have
learnt (`NumericParts`) adds up to what all rows would have taught, bit for bit.

Nor does it depend on the processor: all of this is additions, multiplications and divisions, each rounded by itself,
and logarithms that are made of these (`ops/logarithm.py`). So is what becomes of a number when it is encoded.

Criteo's buckets: the 3 Idiots' winning solution of the 2014 Criteo challenge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ziggurat.data.preprocess.values.cells import LARGEST_FLOAT32
from ziggurat.features.hashing import mix
from ziggurat.features.kinds import FittedNumbers
from ziggurat.features.schema import MISSING_ROW, NUM_RESERVED_ROWS
from ziggurat.ops import logarithm
from ziggurat.ops.exact_sums import ExactSums, exact_sums

NUM_QUANTILES = 1001
SAMPLE_ROWS = 1 << 18
_CLOSE = 1e-7  # of the largest statistic of a feature; a float of 32 bits is rounded by 6e-8 at most


@dataclass(frozen=True, kw_only=True)
class NumericState:
    """Statistics fitted for one column of numbers.

    Args:
        feature: its name.
        mean: of the training values (after log1p, where the transform has it); standardising transforms only.
        sd: standard deviation of the same, 1 if they are constant.
        quantiles: NUM_QUANTILES quantiles from 0 to 1, or the bucket edges, rising.
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


def log1p(values: np.ndarray) -> np.ndarray:
    """The logarithm that keeps the sign, sign(x)·ln(1 + |x|)."""
    return np.copysign(logarithm.log1p(np.abs(values)), values)


def to_floats(values: np.ndarray, feature: FittedNumbers, state: NumericState) -> np.ndarray:
    """(N,) float32 numbers of a feature whose transform makes no rows; always finite.

    Args:
        values: (N,) float64, NaN where missing.
        feature: its transform and what stands for missing numbers.
        state: fitted on the training data.
    """
    values = _filled(values, feature.missing)
    if feature.transform.is_logarithmic:
        values = log1p(values)
    if feature.transform.is_standardised:
        values = (values - state.mean) / state.sd
    elif feature.transform.is_ranked:
        values = _ranks(values, np.array(state.quantiles))
    return np.clip(values, -LARGEST_FLOAT32, LARGEST_FLOAT32).astype(np.float32)


def to_bucket_rows(values: np.ndarray, state: NumericState) -> np.ndarray:
    """(N,) int32 rows of a feature with quantile buckets."""
    rows = np.searchsorted(np.array(state.quantiles), values, side="right").astype(np.int32) + NUM_RESERVED_ROWS
    return np.where(np.isnan(values), MISSING_ROW, rows).astype(np.int32)


def criteo_buckets(values: np.ndarray) -> np.ndarray:
    """(N,) int64 bucket numbers ⌊ln(x)²⌋ for x > 2, else x cut to an integer; meaningless where NaN."""
    values = np.nan_to_num(values, nan=0.0)
    large = values > 2
    logarithms = logarithm.log(np.where(large, values, 3.0))
    squared = np.floor(logarithms * logarithms)
    return np.where(large, squared, np.clip(np.trunc(values), -(2.0**62), 2.0**62)).astype(np.int64)


def _filled(values: np.ndarray, missing: float) -> np.ndarray:
    """The numbers, with `missing` in the place of NaN."""
    absent = np.isnan(values)
    if not absent.any():
        return values
    values = values.copy()
    np.copyto(values, missing, where=absent)
    return values


def _ranks(values: np.ndarray, quantiles: np.ndarray) -> np.ndarray:
    if len(quantiles) == 0:
        return np.zeros_like(values)
    levels = np.linspace(0.0, 1.0, len(quantiles))
    from_below = _interpolated(values, quantiles, levels)
    from_above = -_interpolated(-values, -quantiles[::-1], -levels[::-1])
    return (from_below + from_above) / 2


def _interpolated(values: np.ndarray, places: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return what `np.interp` does; a compiler may fuse its product and sum, and must not here."""
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
        self._sums = {item.name: ExactSums() for item in features if item.transform.is_standardised}
        sampled = tuple(item.name for item in features if item.transform.has_quantiles)
        self._sample = _RowSample(names=sampled)

    def add(self, values: Mapping[str, np.ndarray], *, global_rows: np.ndarray) -> None:
        """Take a chunk: (N,) float64 values of every column of numbers (NaN where missing), and the rows' numbers."""
        prepared: dict[str, np.ndarray] = {}
        for feature in self._features:
            if not (feature.transform.is_standardised or feature.transform.has_quantiles):
                continue  # nothing is learned of it
            column = values[feature.name]
            if not feature.transform.makes_rows:
                column = _filled(column, feature.missing)
            if feature.name in self._sums:
                self._sums[feature.name] += exact_sums(log1p(column) if feature.transform.is_logarithmic else column)
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
        if not feature.transform.has_quantiles:
            return NumericState(feature=feature.name)
        values = self._sample.finish()[1][feature.name]
        values = values[~np.isnan(values)]
        if len(values) == 0:
            return NumericState(feature=feature.name)
        if feature.transform.is_ranked:
            quantiles = np.quantile(values, np.linspace(0.0, 1.0, NUM_QUANTILES))
            quantiles = np.maximum.accumulate(quantiles)
        else:
            quantiles = np.unique(np.quantile(values, np.arange(1, feature.num_buckets) / feature.num_buckets))
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
        low = keys <= self._limit
        self._keys = np.concatenate([self._keys, keys[low]])
        for name in self.names:
            self.values[name] = np.concatenate([self.values[name], values[name][low]])
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
