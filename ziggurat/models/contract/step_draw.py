"""StepDraw: random numbers of one training step that depend on the seed, the step and a sample, and on nothing else.

On any number of ranks, and after a resume, a sample gets the same numbers, whichever thread asks for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64

from ziggurat.features.hashing import mix


class StepDraw(NamedTuple):
    """The random numbers of one training step.

    Args:
        seed: of the run.
        step: made before it.
    """

    seed: int
    step: int

    def of_row(self, row_id: int) -> np.random.Generator:
        """A generator for one sample.

        Args:
            row_id: of the sample (`Batch.row_ids`), or what else names it on any number of ranks.
        """
        return np.random.default_rng([self.seed, self.step, row_id & (2**63 - 1)])

    def hashes(
        self, row_ids_B: Int64[np.ndarray, "B"], *, purposes_P: Int64[np.ndarray, "P"]
    ) -> UInt64[np.ndarray, "P B"]:
        """Return 64 random bits for each sample and each purpose.

        Args:
            row_ids_B: of the samples (`Batch.row_ids`).
            purposes_P: numbers of what the bits are for; two purposes have bits of their own.
        """
        of_step = mix(np.array([self.seed & (2**63 - 1)], dtype=np.uint64)) ^ np.uint64(self.step)
        of_purposes_P1 = mix(of_step + purposes_P.astype(np.uint64))[:, np.newaxis]
        return mix(row_ids_B.astype(np.uint64) ^ of_purposes_P1)
