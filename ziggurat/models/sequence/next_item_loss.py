"""Losses of next-item models: every event of a history is a question whose answer is the event after it.

    s⁺ = ⟨x_i, v_{i+1}⟩ / τ       s_c = ⟨x_i, v_c⟩ / τ       c: candidates, the same for all questions of a batch

    softmax   ln(e^{s⁺ − ln Q⁺} + Σ_c e^{s_c − ln Q_c}) − (s⁺ − ln Q⁺)      Q: how often a candidate is expected (logQ)
    gbce      −(β ln σ(s⁺) + Σ_c ln σ(−s_c)) / (1 + C)      β = α (t (1 − 1/α) + 1/α),  α = C / (N − 1)

With all N items as candidates the softmax is full, and nothing is corrected. A candidate that is the answer itself (a
collision) counts in no sum. Candidates are shared, so one product of matrices scores them all: 2·P·C·D FLOPs for P
questions, and P·C numbers of memory.

Sources: logQ: Bengio and Senécal 2008; Yi et al., RecSys 2019. gBCE: Petrov and Macdonald, "gSASRec", RecSys 2023,
arXiv 2308.07192, equations 12 and 15; t = 0 is plain BCE, t = 1 calibrates scores fully.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.features.schema import NUM_RESERVED_ROWS


class NextItemLoss(StrEnum):
    """Which loss of the questions is minimised."""

    SOFTMAX = "softmax"
    GBCE = "gbce"


class NextItemNegatives(StrEnum):
    """Which items an answer is told apart from."""

    UNIFORM = "uniform"  # drawn, each item as likely as any other
    IN_BATCH = "in_batch"  # answers of other questions of the batch: popular items more often
    MIXED = "mixed"  # one half each
    ALL = "all"  # every item: the full softmax


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Items that answers are told apart from.

    Args:
        vectors: v_c.
        rows: of the item's table.
        log_q: ln Q of each row of the table; None for no correction.
        calibration: β of gBCE.
    """

    vectors: Float[Tensor, "C D"]
    rows: Int64[Tensor, "C"]
    log_q: Float[Tensor, "R"] | None = None
    calibration: float = 1.0


def draw_candidates(
    answers_N: Int64[Tensor, "N"], *, num_rows: int, negatives: NextItemNegatives, num_negatives: int
) -> Int64[Tensor, "C"]:
    """Rows of candidates, by torch's generator.

    Args:
        answers_N: rows of the events of a batch.
        num_rows: of the item's table, reserved ones included.
        negatives: where they come from.
        num_negatives: how many; all items with ALL.
    """
    device = answers_N.device
    if negatives is NextItemNegatives.ALL:
        return torch.arange(NUM_RESERVED_ROWS, num_rows, device=device)
    shares = {NextItemNegatives.UNIFORM: 0, NextItemNegatives.MIXED: num_negatives // 2}
    num_own = shares.get(negatives, num_negatives) if len(answers_N) else 0
    places = torch.randint(max(1, len(answers_N)), (num_own,))
    uniform = torch.randint(NUM_RESERVED_ROWS, max(NUM_RESERVED_ROWS + 1, num_rows), (num_negatives - num_own,))
    return torch.cat([answers_N[places.to(device)], uniform.to(device)])


def log_expected(
    counts_R: Int64[Tensor, "R"], *, num_candidates: int, negatives: NextItemNegatives
) -> Float[Tensor, "R"] | None:
    """The ln of how often each row is expected among candidates; None where all are equal.

    Args:
        counts_R: training events of each row of the item's table.
        num_candidates: C.
        negatives: where they come from.
    """
    if negatives in (NextItemNegatives.ALL, NextItemNegatives.UNIFORM):
        return None
    shares_R = counts_R.clamp(min=1).float() / counts_R.sum().clamp(min=1)
    if negatives is NextItemNegatives.IN_BATCH:
        return (num_candidates * shares_R).log()
    num_own = num_candidates // 2
    return (num_own * shares_R + (num_candidates - num_own) / max(1, len(counts_R) - NUM_RESERVED_ROWS)).log()


def gbce_calibration(*, num_candidates: int, num_items: int, t: float) -> float:
    """β, the exponent of the answer's probability.

    Args:
        num_candidates: C.
        num_items: N.
        t: 0 for plain BCE, 1 for scores that are fully calibrated.
    """
    alpha = min(1.0, num_candidates / max(1, num_items - 1))
    return alpha * (t * (1.0 - 1.0 / alpha) + 1.0 / alpha)


def next_item_losses(
    states_PD: Float[Tensor, "P D"],
    answers_PD: Float[Tensor, "P D"],
    rows_P: Int64[Tensor, "P"],
    *,
    candidates: Candidates,
    scale: Float[Tensor, "1"],
    loss: NextItemLoss,
) -> Float[Tensor, "P"]:
    """The loss of each question.

    Args:
        states_PD: x_i.
        answers_PD: v_{i+1}.
        rows_P: of the answers in the item's table.
        candidates: what answers are told apart from.
        scale: 1 / τ.
        loss: which.
    """
    own_P = (states_PD * answers_PD).sum(dim=1) * scale
    scores_PC = (states_PD @ candidates.vectors.T) * scale
    if loss is NextItemLoss.SOFTMAX and candidates.log_q is not None:
        own_P = own_P - candidates.log_q[rows_P]
        scores_PC = scores_PC - candidates.log_q[candidates.rows]
    scores_PC = scores_PC.masked_fill(rows_P.unsqueeze(1) == candidates.rows, -torch.inf)
    if loss is NextItemLoss.SOFTMAX:
        return torch.logaddexp(own_P, scores_PC.logsumexp(dim=1)) - own_P
    wrong_P = F.softplus(scores_PC).sum(dim=1)
    return (candidates.calibration * F.softplus(-own_P) + wrong_P) / (1 + len(candidates.rows))
