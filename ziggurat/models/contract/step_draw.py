"""StepDraw: random numbers of one training step that depend on the seed, the step and a sample, and on nothing else.

On any number of ranks, and after a resume, a sample gets the same numbers, whichever thread asks for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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
