"""Losses of next-item models: every event of a history is a question whose answer is the event after it.

    s⁺ = ⟨x_i, v_{i+1}⟩ / τ       s_c = ⟨x_i, v_c⟩ / τ       c: candidates, the same for all questions of a batch

    softmax   ln(e^{s⁺ − ln Q⁺} + Σ_c e^{s_c − ln Q_c}) − (s⁺ − ln Q⁺)      Q: how often a candidate is expected (logQ)
    gbce      −(β ln σ(s⁺) + Σ_c ln σ(−s_c)) / (1 + C)      β = α (t (1 − 1/α) + 1/α),  α = C / (N − 1)

With all N items as candidates the softmax is full, and nothing is corrected. A candidate that is the answer itself (a
collision) counts in no sum. Candidates are shared, so products of matrices score them all: 2·P·C·D FLOPs for P
questions, and P·C numbers of memory. They are drawn once for all questions of a batch, or anew for each so many that
follow each other, which costs G draws of C rows and lets a step see many more items:

    questions   x_1 … x_g │ x_{g+1} … x_{2g} │ …        C candidates of their own for each g: (G, g, D) · (G, D, C)

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
from torch.autograd.function import once_differentiable

from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.ops.to_device import to_device


class NextItemLoss(StrEnum):
    """Choices of the loss of the questions that is minimised."""

    SOFTMAX = "softmax"
    GBCE = "gbce"


class NextItemNegatives(StrEnum):
    """Choices of the items that an answer is told apart from."""

    UNIFORM = "uniform"  # drawn, each item as likely as any other
    IN_BATCH = "in_batch"  # answers of other questions of the batch: popular items more often
    MIXED = "mixed"  # one half each
    ALL = "all"  # every item: the full softmax


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Items that answers are told apart from.

    Args:
        vectors: v_c, draw after draw.
        rows: of the item's table.
        num_draws: G; the questions are shared out among the draws in their order, ⌈P/G⌉ or fewer each.
        log_q: ln Q of each row of the table, for one draw; None for no correction.
        calibration: β of gBCE.
    """

    vectors: Float[Tensor, "GC D"]
    rows: Int64[Tensor, "GC"]
    num_draws: int = 1
    log_q: Float[Tensor, "R"] | None = None
    calibration: float = 1.0


def draws_of(num_questions: int, *, negatives: NextItemNegatives, questions_per_draw: int) -> int:
    """Return the number of draws of candidates for the questions of a batch.

    Args:
        num_questions: P.
        negatives: where they come from; ALL needs no second draw.
        questions_per_draw: g; 0: all questions share one.
    """
    if not questions_per_draw or negatives is NextItemNegatives.ALL:
        return 1
    return max(1, -(-num_questions // questions_per_draw))


def draw_candidates(
    answers_N: Int64[Tensor, "N"],
    *,
    num_rows: int,
    negatives: NextItemNegatives,
    num_negatives: int,
    num_draws: int = 1,
) -> Int64[Tensor, "GC"]:
    """Rows of candidates, draw after draw, by torch's generator.

    Args:
        answers_N: rows of the events of a batch.
        num_rows: of the item's table, reserved ones included.
        negatives: where they come from.
        num_negatives: how many a draw; all items with ALL.
        num_draws: G.
    """
    device = answers_N.device
    if negatives is NextItemNegatives.ALL:
        return torch.arange(NUM_RESERVED_ROWS, num_rows, device=device)
    shares = {NextItemNegatives.UNIFORM: 0, NextItemNegatives.MIXED: num_negatives // 2}
    # An empty batch has no answers to take candidates from.
    num_own = shares.get(negatives, num_negatives) if len(answers_N) else 0
    # Drawn on the host and sent: a run draws the same candidates with and without a GPU.
    places = torch.randint(max(1, len(answers_N)), (num_draws, num_own))
    size = (num_draws, num_negatives - num_own)
    # An upper bound above the lower one, also where a table has no items.
    uniform = torch.randint(NUM_RESERVED_ROWS, max(NUM_RESERVED_ROWS + 1, num_rows), size)
    return torch.cat([answers_N[to_device(places, device)], to_device(uniform, device)], dim=1).flatten()


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
    # What training never saw counts as seen once: its ln would be −∞.
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
    # At t = 1 it is α, at t = 0 it is 1.
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
    num_questions = len(rows_P)
    num_draws = candidates.num_draws
    share = -(-num_questions // num_draws)
    # The last draw may have fewer questions; zeros fill it up, and their losses are cut off.
    missing = num_draws * share - num_questions
    scaled_PD = states_PD * scale
    own_P = (scaled_PD * answers_PD).sum(dim=1)
    drawn_GC = candidates.rows.view(num_draws, -1)
    states_GSD = F.pad(scaled_PD, (0, 0, 0, missing)).unflatten(0, (num_draws, share))
    vectors_GCD = candidates.vectors.unflatten(0, (num_draws, -1))
    # A candidate that is the answer counts in no sum: it would be pushed away and pulled at once.
    is_answer_GSC = F.pad(rows_P, (0, missing)).view(num_draws, share, 1) == drawn_GC.unsqueeze(1)
    if loss is NextItemLoss.SOFTMAX:
        log_q_GC = None
        if candidates.log_q is not None:
            own_P = own_P - candidates.log_q[rows_P]
            log_q_GC = candidates.log_q[drawn_GC]
        own_GS = F.pad(own_P, (0, missing)).view(num_draws, share)
        return _SoftmaxLosses.apply(states_GSD, vectors_GCD, own_GS, is_answer_GSC, log_q_GC).flatten()[:num_questions]
    scores_GSC = torch.bmm(states_GSD, vectors_GCD.transpose(1, 2)).masked_fill(is_answer_GSC, -torch.inf)
    # −ln σ(−s) = softplus(s); of −∞ it is 0, so collisions add nothing.
    wrong_P = F.softplus(scores_GSC).sum(dim=2).flatten()[:num_questions]
    return (candidates.calibration * F.softplus(-own_P) + wrong_P) / (1 + drawn_GC.shape[1])


class _SoftmaxLosses(torch.autograd.Function):
    """ln(e^{s⁺} + Σ_c e^{s_c}) − s⁺ of each question, over one buffer of scores that become shares of the sum.

    Autograd's own keeps five buffers of P·C numbers and passes over them 14 times; this keeps one and passes 8 times.
    """

    @staticmethod
    def forward(
        ctx: SavedCtx,
        states_GSD: Tensor,
        vectors_GCD: Tensor,
        own_GS: Tensor,
        is_answer_GSC: Tensor,
        log_q_GC: Tensor | None,
    ) -> Tensor:
        shares_GSC = torch.bmm(states_GSD, vectors_GCD.transpose(1, 2))
        if log_q_GC is not None:
            shares_GSC -= log_q_GC.unsqueeze(1)
        shares_GSC.masked_fill_(is_answer_GSC, -torch.inf)
        # The largest of all terms, the answer's among them: no exponential overflows.
        top_GS1 = torch.maximum(shares_GSC.amax(dim=2), own_GS).unsqueeze(2)
        # In place from here on: this is the one buffer of P·C numbers that there is.
        shares_GSC.sub_(top_GS1).exp_()
        own_GS1 = (own_GS.unsqueeze(2) - top_GS1).exp_()
        total_GS1 = shares_GSC.sum(dim=2, keepdim=True) + own_GS1
        shares_GSC /= total_GS1
        ctx.save_for_backward(states_GSD, vectors_GCD, shares_GSC, (own_GS1 / total_GS1).squeeze(2))
        return (total_GS1.log() + top_GS1).squeeze(2) - own_GS

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedCtx, grad_GS: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states_GSD, vectors_GCD, shares_GSC, own_share_GS = ctx.saved_tensors
        slopes_GSC = shares_GSC * grad_GS.unsqueeze(2)
        of_states = torch.bmm(slopes_GSC, vectors_GCD)
        of_vectors = torch.bmm(slopes_GSC.transpose(1, 2), states_GSD)
        # ∂/∂s⁺ of ln Σ − s⁺ is the answer's share less 1.
        return of_states, of_vectors, (own_share_GS - 1.0) * grad_GS, None, None
