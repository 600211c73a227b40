"""Compute the loss of each test row of a run over the best that is reachable, in nats.

    teacher known    KL(p* ‖ p) = p*·ln(p*/p) + (1−p*)·ln((1−p*)/(1−p))      p* of the teacher, p of the model
    else             −ln p of the label that was drawn: the log loss

Given a row, its label is drawn with probability p*. The log loss of a model is on average over labels the entropy of p*
and KL(p* ‖ p); the first is what no model gets below, the second what is left to gain. Taking the second from p* itself
leaves out the luck of the labels, which is far more than what large models differ by. All in FP64; p is what the run
has stored in FP32.

Which rows are the test, the split says by their numbers, so p* is made row block by row block in bounded memory; the
labels made with it must be those that the runs were tested on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ziggurat.data.preprocess.splits import SPLITS, Split, SplitBy, Splitter
from ziggurat.data.synthetic.rows import BLOCK_ROWS
from ziggurat.data.synthetic.teacher import SyntheticTeacher
from ziggurat.errors import DataError
from ziggurat.recipes.run_config import RunConfig

_NEAR = 1e-7  # as near to 0 and 1 as FP32 tells scores apart from 1

_Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BestReachable:
    """The true probabilities of the test rows.

    Args:
        probabilities: (rows,) p*, in file order.
        log_loss: mean entropy of them: what no model gets below, on average over labels.
    """

    probabilities: _Floats
    log_loss: float


def best_of_test(run: RunConfig, labels: NDArray[np.float32]) -> BestReachable | None:
    """Return what the teacher of a run's data knows of its test rows; None for data without a teacher.

    Args:
        run: whose data it is.
        labels: (rows,) of the test rows, as a run has stored them.

    Raises:
        DataError: the teacher makes other labels.
    """
    is_made = run.dataset.name == "synthetic" and run.teacher is not None
    if not is_made or run.data.split.by is not SplitBy.RANDOM or len(run.table_schema.labels) > 1:
        return None
    assert run.teacher is not None
    splitter = Splitter(config=run.data.split)
    probabilities = []
    made = []
    for block, first, last in SyntheticTeacher(run.teacher).blocks(run.dataset.rows):
        rows = np.arange(first, last)
        mine = rows[splitter.assign_random(rows + block.number * BLOCK_ROWS) == SPLITS.index(Split.TEST)]
        probabilities.append(block.probabilities[0, mine])
        made.append(block.labels[0, mine])
    if not np.array_equal(np.concatenate(made), labels.astype(np.int8)):
        raise DataError(
            expected="test rows with the labels that their teacher makes",
            found=f"{labels.size:,} rows with others",
            where="best reachable loss of made data",
            ways_out="begin anew, with rows of the present teacher: --out FOLDER",
        )
    p = np.concatenate(probabilities)
    entropies = -(p * np.log(p) + (1.0 - p) * np.log1p(-p))
    return BestReachable(probabilities=p, log_loss=float(entropies.mean()))


def row_losses(scores: NDArray[np.float32], labels: NDArray[np.float32], best: BestReachable | None) -> _Floats:
    """Return (rows,) the loss of each row over the best reachable, or its log loss where that is unknown."""
    p = np.clip(scores.astype(np.float64), _NEAR, 1.0 - _NEAR)
    if best is None:
        return -(labels * np.log(p) + (1.0 - labels) * np.log1p(-p))
    true = best.probabilities
    return true * (np.log(true) - np.log(p)) + (1.0 - true) * (np.log1p(-true) - np.log1p(-p))
