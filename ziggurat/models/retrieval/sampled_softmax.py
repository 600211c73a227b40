"""Sampled softmax: each positive sample against the items of its block, as if against all items.

The wanted loss of user u and item i is −ln softmax over all items. Over a sample of items, one that is drawn often is
pushed away often, so its score is corrected by what it was drawn with (logQ; Yi et al., RecSys 2019, eq. 4 to 6;
Bengio and Senécal 2008):

    block of n consecutive samples: users u_1 … u_n, items i_1 … i_n
    s_bj = ⟨u_b, i_j⟩ / τ − ln Q(i_j)             Q(i) = n · p(i)     p: share of i among all training samples
    loss_b = ln Σ_j exp(s_bj) − s_bb              over j = b and all j that are no false negative of b

A *false negative* is an item that the user is known to like: the item of sample b itself, and those of the positive
samples of the same user in the block. They are left out of the sum.

Q is how often an item is expected among the candidates, so that 1 / Q counts it once. With m items drawn uniformly of N
beside those of the block Q(i) = n·p(i) + m / N (Yang et al., WWW 2020); without those of the block it is m / N, which
drops out. A mined negative is a candidate for certain: Q = 1 (see `contract/negatives.py`).

Blocks, not batches: consecutive samples of a fixed number form a block, whatever the batch. Ranks that share a global
batch in slices of whole blocks see the same blocks as one device would, so the loss does not depend on their number.

Cost: 2·n²·D FLOPs a block, and n² numbers for scores and mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The items that samples are compared with, and who knows them. C = n + m candidates a block, Z blocks.

    Args:
        rows: of the candidates in the item's table, -1 for none; the first n are those of the samples.
        groups: the user of each sample, 0 where unknown; None where no sample has one.
        is_positive: samples whose user likes their item.
        log_q: ln Q of each candidate; None for no correction.
        takes_block: whether the items of other samples are negatives; if not, those drawn alone.
    """

    rows: Int64[Tensor, "Z C"]
    groups: Int64[Tensor, "Z n"] | None
    is_positive: Bool[Tensor, "Z n"]
    log_q: Float[Tensor, "Z C"] | None
    takes_block: bool = True


def corrected(scores_ZnC: Float[Tensor, "Z n C"], pool: Pool) -> Float[Tensor, "Z n C"]:
    """Scores less ln Q; minus infinity for candidates that are no negatives of a sample, but for its own item.

    The loss of a sample is the logarithm of the sum of their exponentials, less the score of its own item.

    Args:
        scores_ZnC: ⟨u, i⟩ / τ of each sample with each candidate of its block, FP32.
        pool: the candidates.
    """
    if pool.log_q is not None:
        scores_ZnC = scores_ZnC - pool.log_q.unsqueeze(1)
    return scores_ZnC.masked_fill(false_negatives(pool), -torch.inf)


def false_negatives(pool: Pool) -> Bool[Tensor, "Z n C"]:
    """Candidates that are no negatives of a sample: those of its item, or of one that its user likes; and no item.

    The sample's own place is False: there its item is the positive one.
    """
    num_samples = pool.is_positive.shape[1]
    same_ZnC = pool.rows[:, :num_samples, None] == pool.rows[:, None, :]
    # −1 is no item.
    found_ZnC = same_ZnC | (pool.rows < 0).unsqueeze(1)
    own = torch.eye(num_samples, pool.rows.shape[1], dtype=torch.bool, device=pool.rows.device)
    if pool.groups is not None:
        found_ZnC = found_ZnC | _liked(pool.groups, pool.is_positive, same_ZnC)
    if not pool.takes_block:
        found_ZnC = found_ZnC | (torch.arange(pool.rows.shape[1], device=pool.rows.device) < num_samples)
    return found_ZnC & ~own


def _liked(
    groups_Zn: Int64[Tensor, "Z n"], is_positive_Zn: Bool[Tensor, "Z n"], same_ZnC: Bool[Tensor, "Z n C"]
) -> Bool[Tensor, "Z n C"]:
    """Candidates whose item the user of a sample likes in the block.

    The first sample with the same user or item stands for all of them, so that one table of n × n says who likes what.
    """
    num_blocks, num_samples, num_candidates = same_ZnC.shape
    same_user_Znn = (groups_Zn[:, :, None] == groups_Zn[:, None, :]) & (groups_Zn != 0).unsqueeze(2)
    # A sample of no known user is a user of its own.
    same_user_Znn = same_user_Znn | torch.eye(num_samples, dtype=torch.bool, device=groups_Zn.device)
    # The place of the largest is that of the first True.
    user_Zn = same_user_Znn.byte().argmax(dim=2)
    item_ZC = same_ZnC.byte().argmax(dim=1)
    likes_Zn2 = torch.zeros(num_blocks, num_samples**2, dtype=torch.uint8, device=user_Zn.device)
    places_Zn = user_Zn * num_samples + item_ZC[:, :num_samples]
    likes_Zn2 = likes_Zn2.scatter_reduce(1, places_Zn, is_positive_Zn.byte(), "amax")
    likes_Znn = likes_Zn2.view(num_blocks, num_samples, num_samples)
    of_user_Znn = likes_Znn.gather(1, user_Zn.unsqueeze(2).expand_as(likes_Znn))
    of_item_ZnC = of_user_Znn.gather(2, item_ZC.unsqueeze(1).expand(-1, num_samples, num_candidates))
    return of_item_ZnC.bool() & same_ZnC.any(dim=1, keepdim=True)


def in_blocks(values: Tensor, size: int, *, fill: float = 0) -> Tensor:
    """(B, …) as (Z, size, …): blocks of consecutive samples, the last one filled up with `fill`."""
    missing = -len(values) % size
    if missing:
        values = torch.cat([values, values.new_full((missing, *values.shape[1:]), fill)])
    return values.view(len(values) // size, size, *values.shape[1:])
