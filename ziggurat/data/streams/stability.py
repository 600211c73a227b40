"""Stability: how far the values of a feature in a window are from those of another, as one number.

    counts      values fall into buckets: 64 of ids by a hash of their row, or 24 of numbers by fixed edges; what is
                missing or unknown has buckets of its own
    PSI         Σ_b (p_b − q_b) · ln(p_b / q_b)        p, q: shares of a bucket in one window and in the other, with
                                                       half a value more in each

The population stability index is 0 for equal shares; below 0.1 is read as no change and above 0.2 as one that needs a
look (Siddiqi, "Credit risk scorecards", 2006). Two samples of n and m values of one distribution have a PSI of about
(B − 1) · (1/n + 1/m) with B buckets (Yurdakul, "Statistical properties of population stability index", 2018), which for
a window of 300 rows is more than 0.2. So that is taken off, and what is below 0 is 0: small windows raise no alarm by
being small.

The edges of numbers are those of the encoded value, which is about −1 to 1 for a standardised number, so they need no
state. Ids share buckets: new ids move the index only by the share that they take of others.

Cost: counts of 67 or 25 buckets a feature and window, whatever the rows; in chunks of 131,072 rows about 15 ns an id
and 30 ns a number of one core, in the thread that encodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int64

from ziggurat.config import from_json, to_json
from ziggurat.errors import CheckpointError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.files import Format, digest_of

COUNTS = Format(
    name="ziggurat.stream_counts",
    what="counts of the values of a stream's windows",
    error=CheckpointError,
    ways_out=("restore the file from a copy", "begin the stream anew: --out ANOTHER_FOLDER"),
)
COUNTS_FILE = "counts.json"  # below the folder of a stream
HISTORY_NUMBER = 1
_DIGEST_DIGITS = 16
_ID_BUCKETS = 64
_HASH = np.uint64(0x9E3779B97F4A7C15)  # 2⁶⁴ divided by the golden ratio
_HALF_EDGES = np.array([0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0])
EDGES = np.concatenate([-_HALF_EDGES[::-1], [0.0], _HALF_EDGES])
ALARM = 0.2


class BucketCounts:
    """Counts the values of a window by feature and bucket.

    Args:
        inputs: features; those of numbers and of ids are counted, vectors and moments are not.
    """

    def __init__(self, inputs: InputSpec) -> None:
        self._numbers = inputs.dense
        self._ids = tuple(spec.name for spec in (*inputs.single, *inputs.jagged))
        self.counts: dict[str, Int64[np.ndarray, " B"]] = {
            name: np.zeros(len(EDGES) + 2, dtype=np.int64) for name in self._numbers
        }
        self.counts |= {name: np.zeros(NUM_RESERVED_ROWS + _ID_BUCKETS, dtype=np.int64) for name in self._ids}

    def add(self, table: pa.Table) -> None:
        """Count encoded rows."""
        for name in self._numbers:
            self.counts[name] += _of_numbers(table.column(name).to_numpy())
        for name in self._ids:
            column = table.column(name)
            values = (
                column
                if not pa.types.is_list(column.type)
                else pa.chunked_array([chunk.flatten() for chunk in column.chunks], type=column.type.value_type)
            )
            self.counts[name] += _of_ids(values.to_numpy())

    def plain(self) -> dict[str, list[int]]:
        """Return the counts as plain data."""
        return {name: counts.tolist() for name, counts in self.counts.items()}


def _of_numbers(values: np.ndarray) -> Int64[np.ndarray, " B"]:
    buckets = np.searchsorted(EDGES, values, side="right")
    buckets[np.isnan(values)] = len(EDGES) + 1
    return np.bincount(buckets, minlength=len(EDGES) + 2)


def _of_ids(values: np.ndarray) -> Int64[np.ndarray, " B"]:
    hashed = (values.astype(np.uint64) * _HASH) >> np.uint64(58)
    # Numbers of growing tables may be negative: they are ids, and not reserved rows.
    is_reserved = (values >= 0) & (values < NUM_RESERVED_ROWS)
    buckets = np.where(is_reserved, values, hashed.astype(np.int64) + NUM_RESERVED_ROWS)
    return np.bincount(buckets, minlength=NUM_RESERVED_ROWS + _ID_BUCKETS)


def stability_index(counts: Sequence[int] | np.ndarray, reference: Sequence[int] | np.ndarray) -> float:
    """Return the PSI of two windows without what chance makes of it; NaN where one has no values.

    Args:
        counts: of the buckets of one feature.
        reference: of the same buckets in the other window.
    """
    ours = np.asarray(counts, dtype=np.float64)
    theirs = np.asarray(reference, dtype=np.float64)
    if not ours.sum() or not theirs.sum():
        return math.nan
    is_used = ours + theirs > 0  # buckets that neither window has anything in make no noise
    p = _shares(ours[is_used])
    q = _shares(theirs[is_used])
    index = float(np.sum((p - q) * np.log(p / q)))
    num_buckets = int(is_used.sum())
    return max(0.0, index - (num_buckets - 1) * float(1.0 / ours.sum() + 1.0 / theirs.sum()))


def _shares(counts: Float64[np.ndarray, " B"]) -> Float64[np.ndarray, " B"]:
    # Half a value more in each bucket: the logarithm of an empty one would be infinite.
    return (counts + 0.5) / (counts.sum() + 0.5 * len(counts))


def stability_indices(counts: Mapping[str, Sequence[int]], reference: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the PSI of each feature that both windows have values of.

    Args:
        counts: of `BucketCounts.plain`.
        reference: of the other window.
    """
    found = {name: stability_index(counts[name], reference[name]) for name in counts if name in reference}
    return {name: value for name, value in found.items() if math.isfinite(value)}


@dataclass(frozen=True, kw_only=True)
class Stability:
    """The population stability index of the features of a window.

    Args:
        history: against the history, by feature.
        before: against the window before.
    """

    history: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)


def digest_of_counts(counts: Mapping[str, Sequence[int]]) -> str:
    """Return what the counts of a window are known by."""
    return digest_of(counts)[:_DIGEST_DIGITS]


@dataclass(kw_only=True)
class WindowCounts:
    """Counts of the windows that others are compared with, as a file beside a stream's journal.

    Args:
        windows: counts by number of a window and by feature.
    """

    windows: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> WindowCounts:
        """Return what is there; nothing where there is no file: `check` says whether there must be one.

        Raises:
            CheckpointError: it is damaged.
        """
        if not path.exists():
            return WindowCounts()
        return from_json(WindowCounts, COUNTS.read(path), where=str(path), error=CheckpointError)

    def check(self, digests: Mapping[int, str], *, path: Path) -> None:
        """Refuse counts that are not those that were kept: shifts would be other ones, or none, without a word.

        Args:
            digests: of the counts of windows by number, as `digest_of_counts` gave them; "" of one without.
            path: of the file.

        Raises:
            CheckpointError: the counts of a window are gone, or are others.
        """
        for number, digest in digests.items():
            counts = self.windows.get(str(number))
            if not digest or (counts is not None and digest_of_counts(counts) == digest):
                continue
            raise CheckpointError(
                expected=f"the counts of window {number:,}, with which later ones are compared, as they were kept",
                found="other counts" if counts is not None else "none" if path.exists() else "no such file",
                where=str(path),
                ways_out=COUNTS.ways_out,
            )

    def add(self, number: int, counts: dict[str, list[int]], *, path: Path, forgotten: int) -> Stability:
        """Keep the counts of a window, and compare it with the history and the window before.

        Args:
            number: of the window.
            counts: of it.
            path: where they are kept, behind the comparison: a window that is opened again compares as it did.
            forgotten: windows that no checkpoint goes back to, whose counts are kept no longer but for the newest's.
        """
        history = self.windows.get(str(HISTORY_NUMBER), {}) if number > HISTORY_NUMBER else {}
        before = self.windows.get(str(number - 1), {})
        found = Stability(history=stability_indices(counts, history), before=stability_indices(counts, before))
        self.windows[str(number)] = counts
        wanted = range(min(forgotten, number - 1), number + 1)
        self.windows = {
            key: value for key, value in self.windows.items() if int(key) in wanted or int(key) == HISTORY_NUMBER
        }
        COUNTS.write(path, to_json(self))
        return found
