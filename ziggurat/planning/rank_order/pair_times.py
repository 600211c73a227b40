"""PairTimes: what a short and a long message takes between any two ranks. Plain numbers, measured or made up.

    ms of n bytes  =  latency  +  n · (ms of a long message − latency) / bytes of it

A measured matrix is symmetric: half of a message there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ziggurat.errors import PlanError

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PairTimes:
    """Times between pairs of ranks; constructing checks them.

    Args:
        latency_ms: (N, N) of a message of a few bytes.
        long_ms: (N, N) of a message of `long_bytes`.
        long_bytes: of a long message.

    Raises:
        PlanError: they are no matrices of one size, not symmetric, or hold what is no time.
    """

    latency_ms: Matrix
    long_ms: Matrix
    long_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        size = len(self.latency_ms)
        for name, matrix in (("latency", self.latency_ms), ("long messages", self.long_ms)):
            if matrix.shape != (size, size) or size < 2:
                raise _no_times(f"times of {name} of the shape {matrix.shape}")
            apart = matrix[~np.eye(size, dtype=bool)]
            if not (np.isfinite(apart).all() and (apart > 0).all()):
                raise _no_times(f"{name} between {apart.min():g} and {apart.max():g} ms")
            if not np.allclose(matrix, matrix.T):
                raise _no_times(f"times of {name} that differ with the direction")

    @property
    def num_ranks(self) -> int:
        """N."""
        return len(self.latency_ms)

    def ms(self, num_bytes: float) -> Matrix:
        """Return what a message of so many bytes takes between any two ranks, (N, N); 0 from a rank to itself."""
        # A long message that was faster than a short one is noise, and costs nothing more.
        slope = np.maximum(self.long_ms - self.latency_ms, 0.0) / self.long_bytes
        found = self.latency_ms + slope * num_bytes
        np.fill_diagonal(found, 0.0)
        return found

    def upper(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return latencies and times of long messages of all pairs i < j, row after row, to four digits."""
        at = np.triu_indices(self.num_ranks, 1)
        return _rounded(self.latency_ms[at]), _rounded(self.long_ms[at])

    @staticmethod
    def from_upper(
        latency_ms: Sequence[float], long_ms: Sequence[float], *, num_ranks: int, long_bytes: int
    ) -> PairTimes:
        """Make the matrices from what `upper` gave.

        Raises:
            PlanError: there are more or fewer numbers than pairs.
        """
        pairs = num_ranks * (num_ranks - 1) // 2
        if not len(latency_ms) == len(long_ms) == pairs:
            raise _no_times(f"{len(latency_ms)} and {len(long_ms)} times of {pairs} pairs")
        return PairTimes(
            latency_ms=_symmetric(latency_ms, num_ranks), long_ms=_symmetric(long_ms, num_ranks), long_bytes=long_bytes
        )


def _symmetric(upper: Sequence[float], size: int) -> Matrix:
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size, 1)] = upper
    return matrix + matrix.T


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values)


def _no_times(found: str) -> PlanError:
    return PlanError(
        expected="times above 0 between any two of two ranks or more, the same in both directions",
        found=found,
        where="times between pairs of ranks",
        ways_out="measure them: torchrun … -m ziggurat cluster order --out order.json",
    )
