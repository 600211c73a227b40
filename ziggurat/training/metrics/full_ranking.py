"""Full ranking: of all items, where does a model that finds items put the one that was liked?

Every positive sample is a question: its user, at its moment. The items of the training data are ranked by the inner
product with their vectors; r is the rank of the sample's own item. Those that the user had before take part as the
schema says (`[items] repeats`, see `features/items.py`).

    full_recall@k     share of questions with r ≤ k
    full_ndcg@k       mean of 1 / log₂(r + 1) where r ≤ k, else 0            (one right answer: the best is 1)
    full_mrr          mean of 1 / r
    full_coverage@k   share of all items that stand among the first k of any question
    full_repeated     share of questions whose item the user had before; the others ask for an item that is new
    full_answered@k   share of questions whose item stands among the first k of the answer that would be given: the same
                      as full_recall@k, unless the target is spared from what answers leave out

Where samples have a group, two metrics are of users, not of questions: what papers on graphs of users and items report
(He et al., SIGIR 2020). A user who asks for n different items has n right answers in one list of 20, on places p:

    full_user_recall@20   mean over users of (items with p ≤ 20) / n
    full_user_ndcg@20     mean over users of Σ 1 / log₂(p + 1) over these, divided by that of the best list

The list of a user is what is ranked for any of the questions: p is r and as many of the user's other items ahead as
were spared in their own questions alone (`repeats`). Where a user's vector differs from question to question there is
no one list: an item has the best of its ranks, and items of equal places stand one behind the other.

Nothing is sampled: metrics against a few drawn negatives order models wrongly (Krichene and Rendle, KDD 2020). An item
that training never saw cannot be found, so its question counts as missed. Sample weights count. Equal scores stand in
the order of the items' rows, as one order is what `full_answered` and coverage need of a list; `mrr` of groups takes
the expected rank instead (`ranking.py`). A score that is not a number finds nothing: its item stands in no list, and
the question that asks for it is missed.

*Had before* are the items of the user's (group's) training samples, and of the splits before the one evaluated; and
those in the sample's own lists that share the item's table (a history). The sample's own item takes part even then,
unless `repeats = "leave_out"`: such a question is missed, as answers miss it.

Cost: 2·D FLOPs for each question and item, in chunks, so that memory does not grow with either; and one pass over the
training data for items and what users had.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from ziggurat.features.inputs import LabelSpec
from ziggurat.features.items import Repeats
from ziggurat.features.schema import Label
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.training.metrics.jackknife import BLOCKS, blocks_of, half_width

DEFAULT_KS = (10, 50, 100)
REPEATED = "full_repeated"
RECALL, ANSWERED = "full_recall", "full_answered"
USER_K = 20
USER_RECALL, USER_NDCG = f"full_user_recall@{USER_K}", f"full_user_ndcg@{USER_K}"
_QUESTIONS, _ITEMS = 512, 65_536  # of one matrix product
_USERS = 16  # of one matrix product where users ask several times: their scores stay in the cache


def full_ranking_names(
    labels: Sequence[Label | LabelSpec], *, ks: Sequence[int] = DEFAULT_KS, has_users: bool = False
) -> list[str]:
    """The names of the metrics, label by label; they end in `/label` where there are several.

    Those of recall come first, with the middle k before the others: it is what a run is judged by.

    Args:
        labels: of the data.
        ks: lengths of lists.
        has_users: whether samples have a group; metrics of users come last.
    """
    middle = sorted(ks)[len(ks) // 2]
    names = [f"full_recall@{k}" for k in (middle, *(k for k in ks if k != middle))]
    names += [f"full_ndcg@{k}" for k in ks] + ["full_mrr"] + [f"full_coverage@{k}" for k in ks] + [REPEATED]
    names += [f"{ANSWERED}@{k}" for k in ks]
    names += [USER_RECALL, USER_NDCG] if has_users else []
    return [f"{name}/{label.name}" if len(labels) > 1 else name for label in labels for name in names]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Users with the item that each is to find, and what each had before.

    Args:
        users: their vectors.
        targets: number of each one's item; -1 where it is not among the items.
        excluded: (question, item) pairs that do not take part, by question.
    """

    users: Float[Tensor, "Q D"]
    targets: Int64[Tensor, "Q"]
    excluded: Int64[Tensor, "E 2"]


def had_targets(targets_Q: NDArray[np.int64], had: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which questions ask for an item that their user had before.

    Args:
        targets_Q: the number of each question's item.
        had: (E, 2) pairs of question and item that the user had.
    """
    is_repeated_Q = np.zeros(len(targets_Q), dtype=bool)
    is_repeated_Q[had[had[:, 1] == targets_Q[had[:, 0]], 0]] = True
    return is_repeated_Q


def left_out(
    targets_Q: NDArray[np.int64], had: NDArray[np.int64], *, repeats: Repeats
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Apply the protocol of repeats to questions.

    Args:
        targets_Q: the number of each question's item.
        had: (E, 2) pairs of question and item that the user had, by question.
        repeats: the protocol.

    Returns:
        The targets, -1 where one cannot be found; and the pairs that do not take part. `rank_all` and
        `ScoredCandidates` spare a target that is among these.
    """
    if not repeats.target_can_win:
        targets_Q = np.where(had_targets(targets_Q, had), -1, targets_Q)
    return targets_Q, had if repeats.answers_leave_out else had[:0]


def rank_all(
    items_ND: Float[Tensor, "N D"], questions: Questions, *, depth: int
) -> tuple[Int64[Tensor, "Q"], Int64[Tensor, "Q depth"]]:
    """The rank of each question's item among all items, from 1 on, and the first items of each question.

    Args:
        items_ND: vectors of all items.
        questions: users and targets.
        depth: items of each list.

    Returns:
        Ranks, 0 where the target is none of the items, or has a score that is not a number; and numbers of items, best
        first, -1 where there are fewer.
    """
    ranks = []
    lists = []
    # One chunk more than there are, so that the last one has an end as well.
    firsts = torch.arange(0, len(questions.users) + _QUESTIONS, _QUESTIONS, device=items_ND.device)
    # Pairs are sorted by question, so that those of a chunk lie together.
    bounds = torch.searchsorted(questions.excluded[:, 0].contiguous(), firsts).tolist()
    for number, first in enumerate(range(0, len(questions.users), _QUESTIONS)):
        some = slice(first, first + _QUESTIONS)
        # Questions count from 0 within a chunk.
        excluded = questions.excluded[bounds[number] : bounds[number + 1]] - questions.excluded.new_tensor([first, 0])
        found = _rank_some(
            items_ND,
            Questions(users=questions.users[some], targets=questions.targets[some], excluded=excluded),
            depth=depth,
        )
        ranks.append(found[0])
        lists.append(found[1])
    if not ranks:
        return questions.targets, questions.targets.new_empty(0, depth)
    return torch.cat(ranks), torch.cat(lists)


def _rank_some(items_ND: Tensor, questions: Questions, *, depth: int) -> tuple[Tensor, Tensor]:
    users_QD = questions.users
    targets_Q = questions.targets
    size = len(questions.users)
    # −1 reads the first item's vector, and is taken out at the end.
    own_Q = targets_Q.clamp(min=0)
    wanted_Q = (users_QD * items_ND[own_Q]).sum(dim=1) if len(items_ND) else users_QD.new_zeros(size)
    better_Q = torch.zeros_like(targets_Q)
    best_QK = users_QD.new_full((size, depth), -torch.inf)
    lists_QK = targets_Q.new_full((size, depth), -1)
    for first in range(0, len(items_ND), _ITEMS):
        part_ND = items_ND[first : first + _ITEMS]
        scores_QN = users_QD @ part_ND.T
        inside = (questions.excluded[:, 1] >= first) & (questions.excluded[:, 1] < first + len(part_ND))
        pairs = questions.excluded[inside]
        # Out of the ranking; a target among them gets its score back below.
        scores_QN[pairs[:, 0], pairs[:, 1] - first] = -torch.inf
        here_Q = ((targets_Q >= first) & (targets_Q < first + len(part_ND))).nonzero().squeeze(1)
        # One number for the target, so that how a matrix product rounds does not move it past itself.
        scores_QN[here_Q, targets_Q[here_Q] - first] = wanted_Q[here_Q]
        scores_QN.masked_fill_(scores_QN.isnan(), -torch.inf)  # sorting would put it first
        places_N = torch.arange(first, first + len(part_ND), device=part_ND.device)
        # Equal scores stand in the order of items, so an earlier one is ahead.
        ahead_QN = (scores_QN == wanted_Q.unsqueeze(1)) & (places_N < own_Q.unsqueeze(1))
        better_Q += ((scores_QN > wanted_Q.unsqueeze(1)) | ahead_QN).sum(dim=1)
        # A stable sort of few keeps the order of equal scores; those of the items before stand first.
        top_QK, at_QK = _first(scores_QN, depth)
        # The best so far stand in front, and the stable sort leaves them there among equals.
        both_QK = torch.cat([best_QK, top_QK], dim=1)
        numbers_QK = torch.cat([lists_QK, torch.where(top_QK > -torch.inf, at_QK + first, -1)], dim=1)
        best_QK, order_QK = both_QK.sort(dim=1, descending=True, stable=True)
        best_QK = best_QK[:, :depth]
        order_QK = order_QK[:, :depth]
        lists_QK = numbers_QK.gather(1, order_QK)
    return torch.where((targets_Q >= 0) & ~wanted_Q.isnan(), better_Q + 1, 0), lists_QK


def rank_of_users(
    items_ND: Float[Tensor, "N D"], questions: Questions, *, users_Q: Int64[Tensor, "Q"], depth: int
) -> tuple[Int64[Tensor, "Q"], Int64[Tensor, "Q depth"]]:
    """`rank_all` of questions whose users ask several times: scores and list of a user are computed once.

    Args:
        items_ND: vectors of all items.
        questions: `users` and `excluded` by user, (U, D) and pairs of user and item; `targets` by question, none of
            them among what its user had.
        users_Q: the user of each question, ascending.
        depth: items of each list.
    """
    targets_Q = questions.targets
    num_users = len(questions.users)
    own_Q = targets_Q.clamp(min=0)
    wanted_Q = (questions.users[users_Q] * items_ND[own_Q]).sum(dim=1)
    better_Q = torch.zeros_like(targets_Q)
    lists_UK = targets_Q.new_full((num_users, depth), -1)
    firsts = torch.arange(0, num_users + _USERS, _USERS, device=items_ND.device)
    bounds_Q = torch.searchsorted(users_Q, firsts).tolist()
    bounds_E = torch.searchsorted(questions.excluded[:, 0].contiguous(), firsts).tolist()
    places_N = torch.arange(len(items_ND), device=items_ND.device)
    for number, first in enumerate(range(0, num_users, _USERS)):
        scores_UN = questions.users[first : first + _USERS] @ items_ND.T
        asked = slice(bounds_Q[number], bounds_Q[number + 1])
        pairs = questions.excluded[bounds_E[number] : bounds_E[number + 1]]
        rows_Q = users_Q[asked] - first
        wanted = wanted_Q[asked].unsqueeze(1)
        is_there = targets_Q[asked] >= 0
        # One number for a target, so that how a matrix product rounds does not move it past itself.
        scores_UN[rows_Q[is_there], own_Q[asked][is_there]] = wanted_Q[asked][is_there]
        scores_UN[pairs[:, 0] - first, pairs[:, 1]] = -torch.inf
        scores_UN.masked_fill_(scores_UN.isnan(), -torch.inf)  # sorting would put it first
        of_question_QN = scores_UN.index_select(0, rows_Q)
        # Ones and zeros as floats, which sum eight times as fast as flags; exact below 2^24 items.
        flags_QN = torch.gt(of_question_QN, wanted, out=torch.empty_like(of_question_QN))
        better = flags_QN.sum(dim=1).long()
        no_worse = torch.ge(of_question_QN, wanted, out=flags_QN).sum(dim=1).long()
        # Equal scores stand in the order of items; of most targets none but the own is equal.
        tied = (no_worse - better > 1).nonzero().squeeze(1)
        ahead = (of_question_QN[tied] == wanted[tied]) & (places_N < own_Q[asked][tied].unsqueeze(1))
        better_Q[asked] = better.index_add(0, tied, ahead.sum(dim=1))
        top_UK, at_UK = _first(scores_UN, depth)
        found_UK = torch.where(top_UK > -torch.inf, at_UK, -1)
        lists_UK[first : first + _USERS, : found_UK.shape[1]] = found_UK
    ranks_Q = torch.where((targets_Q >= 0) & ~wanted_Q.isnan(), better_Q + 1, 0)
    return ranks_Q, lists_UK[users_Q]


def _first(scores_QN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """The best of each row, equal ones by place; `topk` picks any of those that tie at its end, so ties are redone."""
    depth = min(depth, scores_QN.shape[1])
    top_QK, at_QK = scores_QN.topk(depth, dim=1)
    # More items reach the last score of the list than it has places.
    is_tied = (scores_QN >= top_QK[:, -1:]).sum(dim=1) > depth
    is_tied |= (top_QK[:, 1:] == top_QK[:, :-1]).any(dim=1)
    for row in is_tied.nonzero().squeeze(1).tolist():
        top_QK[row], at_QK[row] = (each[:depth] for each in scores_QN[row].sort(descending=True, stable=True))
    return top_QK, at_QK


class FullRankingSums:
    """Adds up the metrics of many questions, of one label or several.

    Args:
        labels: of the data.
        num_items: N.
        ks: lengths of lists.
        repeats: the protocol; it says what answers leave out.
        has_users: whether questions have a user, whom `units_Q` then names.
    """

    def __init__(
        self,
        labels: Sequence[LabelSpec],
        *,
        num_items: int,
        ks: Sequence[int] = DEFAULT_KS,
        repeats: Repeats = Repeats.LEAVE_OUT_BUT_TARGET,
        has_users: bool = False,
    ) -> None:
        self.labels = tuple(labels)
        self.has_users = has_users
        self.ks = tuple(ks)
        self.num_items = num_items
        self.repeats = repeats
        # recalls, ndcgs, mrr, repeated, answered, weight
        self._sums = torch.zeros(len(labels), 3 * len(ks) + 3, dtype=torch.float64)
        self._block_sums = torch.zeros(BLOCKS, *self._sums.shape, dtype=torch.float64)
        self._covered = torch.zeros(len(labels), len(ks), num_items, dtype=torch.bool)
        self._of_users = [_UserSums() for _ in labels]

    def add(
        self,
        ranks_Q: Int64[Tensor, "Q"],
        lists_QK: Int64[Tensor, "Q K"],
        weights_QL: Float[Tensor, "Q L"],
        *,
        is_repeated_Q: Bool[Tensor, "Q"],
        units_Q: Int64[np.ndarray, "Q"] | None = None,
        targets_Q: Int64[np.ndarray, "Q"] | None = None,
    ) -> None:
        """Count some questions.

        Args:
            ranks_Q: of the targets; 0 where there is none.
            lists_QK: first items; -1 where there are fewer.
            weights_QL: of each question for each label; 0 where it is none.
            is_repeated_Q: whether the user had the target before.
            units_Q: who asks, for error bars and metrics of users; None: nobody wants them.
            targets_Q: numbers of the items, -1 where training saw none, for metrics of users.
        """
        # A target that was not found has the rank ∞, and with it the gain 0.
        ranks = torch.where(ranks_Q > 0, ranks_Q.double(), torch.inf)
        gains = 1.0 / torch.log2(ranks + 1.0)
        within = [ranks <= k for k in self.ks]
        columns = [each.double() for each in within] + [torch.where(each, gains, 0.0) for each in within]
        # Where answers leave out what a user had, such a target can never be in one.
        can_be_answered_Q = ~is_repeated_Q if self.repeats.answers_leave_out else torch.ones_like(is_repeated_Q)
        answered = [(each & can_be_answered_Q).double() for each in within]
        values = torch.stack(
            [*columns, 1.0 / ranks, is_repeated_Q.double(), *answered, torch.ones_like(ranks)],
            dim=1,
        )
        self._sums += weights_QL.double().T @ values
        if units_Q is not None:
            blocks_Q = torch.from_numpy(blocks_of(units_Q).astype(np.int64))
            # The same sums by blocks of users, which the error is estimated from.
            self._block_sums.index_add_(0, blocks_Q, weights_QL.double().unsqueeze(2) * values.unsqueeze(1))
        for label in range(len(self.labels)):
            is_asked_Q = weights_QL[:, label] > 0
            if self.has_users and units_Q is not None:
                assert targets_Q is not None, "metrics of users need to know which questions ask for one item"
                # Only one that was had before, and is found all the same, was spared.
                is_spared_Q = is_repeated_Q & self.repeats.answers_leave_out
                rows_Q4 = np.stack([units_Q, targets_Q, ranks_Q.numpy(), is_spared_Q.numpy()], axis=1)
                self._of_users[label].add(rows_Q4[is_asked_Q.numpy()])
            asked = lists_QK[is_asked_Q]
            for index, k in enumerate(self.ks):
                numbers = asked[:, :k].flatten()
                self._covered[label, index, numbers[numbers >= 0]] = True

    def compute(self, *, process_group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """All metrics; NaN without a question. Collective where there is a process group."""
        sums = self._sums
        # Reductions know no bool.
        covered = self._covered.to(torch.uint8)
        if process_group is not None:
            device = torch.device("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")
            sums = sums.to(device)
            covered = covered.to(device)
            with communicating("metrics of full ranking"):
                dist.all_reduce(sums, group=process_group)
                # Covered by any rank is covered.
                dist.all_reduce(covered, op=dist.ReduceOp.MAX, group=process_group)
            sums = sums.cpu()
            covered = covered.cpu()
        found: dict[str, float] = {}
        num = len(self.ks)
        for index, label in enumerate(self.labels):
            weight = float(sums[index, -1])
            means = (sums[index] / weight if weight else sums[index] * torch.nan).tolist()
            shares = [float(each.float().mean()) if weight else float("nan") for each in covered[index]]
            values = dict(zip((f"full_recall@{k}" for k in self.ks), means[:num], strict=True))
            values |= dict(zip((f"full_ndcg@{k}" for k in self.ks), means[num : 2 * num], strict=True))
            values |= {"full_mrr": means[2 * num]}
            values |= dict(zip((f"full_coverage@{k}" for k in self.ks), shares, strict=True))
            values |= {REPEATED: means[2 * num + 1]}
            values |= dict(zip((f"{ANSWERED}@{k}" for k in self.ks), means[2 * num + 2 : 3 * num + 2], strict=True))
            if self.has_users:
                values |= self._of_users[index].means(process_group)
            end = f"/{label.name}" if len(self.labels) > 1 else ""
            found |= {name + end: value for name, value in values.items()}
        return found

    def half_widths(self, *, process_group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return half of the 95 % interval of each mean by name; collective where there is a process group."""
        sums = self._block_sums
        if process_group is not None:
            sums = sums.to("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")
            with communicating("errors of full ranking"):
                dist.all_reduce(sums, group=process_group)
            sums = sums.cpu()
        # The sums without each block in turn: the jackknife.
        without = sums.sum(dim=0) - sums  # (blocks, labels, columns)
        means = (without / without[:, :, -1:]).numpy()
        names = [f"full_recall@{k}" for k in self.ks] + [f"full_ndcg@{k}" for k in self.ks] + ["full_mrr"]
        found: dict[str, float] = {}
        for index, label in enumerate(self.labels):
            end = f"/{label.name}" if len(self.labels) > 1 else ""
            found |= {name + end: half_width(means[:, index, column]) for column, name in enumerate(names)}
        return found


class _UserSums:
    """The items that each user asked for, of one label."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.int64]] = [np.empty((0, 4), np.int64)]

    def add(self, rows_Q4: NDArray[np.int64]) -> None:
        """Count some questions: user, number of the item, its rank (0: it cannot be found), whether it was spared."""
        # User 0 is a missing group: nobody.
        self._rows.append(rows_Q4[rows_Q4[:, 0] != 0])

    def means(self, process_group: dist.ProcessGroup | None) -> dict[str, float]:
        """Return both metrics over all users; collective where there is a process group."""
        rows_Q4 = np.concatenate(self._rows)
        if process_group is not None:
            rows_Q4 = _of_all_ranks(rows_Q4, process_group)
        if not len(rows_Q4):
            return {USER_RECALL: math.nan, USER_NDCG: math.nan}
        users_N, places_N = _places_of_items(rows_Q4)
        is_hit_N = places_N <= USER_K
        gains_N = np.where(is_hit_N, 1.0 / np.log2(places_N + 1.0), 0.0)
        _, number_N, counts_U = np.unique(users_N, return_inverse=True, return_counts=True)
        best_K = np.cumsum(1.0 / np.log2(np.arange(1, USER_K + 1) + 1.0))
        best_U = best_K[np.minimum(counts_U, USER_K) - 1]
        return {
            USER_RECALL: float((np.bincount(number_N, weights=is_hit_N) / counts_U).mean()),
            USER_NDCG: float((np.bincount(number_N, weights=gains_N) / best_U).mean()),
        }


def _places_of_items(rows_Q4: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the user of each item that a user asked for, ascending, and its place in that user's list.

    Args:
        rows_Q4: user, number of the item (-1: unknown), rank (0: it cannot be found), whether it was spared.
    """
    users_Q, targets_Q, ranks_Q, is_spared_Q = rows_Q4.T
    # All places behind the list are alike.
    ranks_Q = np.where((ranks_Q > 0) & (ranks_Q <= USER_K), ranks_Q, USER_K + 1)
    order_Q = np.lexsort((ranks_Q, targets_Q, users_Q))
    is_same_Q = (np.diff(users_Q[order_Q]) == 0) & (np.diff(targets_Q[order_Q]) == 0)
    # Unknown items cannot be told apart: each counts. Of an item that is asked for again the best rank stands first.
    kept_N = order_Q[np.r_[True, ~is_same_Q | (targets_Q[order_Q[1:]] < 0)]]
    users_N = users_Q[kept_N]
    ranks_N = ranks_Q[kept_N]
    is_spared_N = is_spared_Q[kept_N]
    # Of two equal ranks the spared one is ahead: behind the other, it would have counted that one.
    order_N = np.lexsort((1 - is_spared_N, ranks_N, users_N))
    users_N = users_N[order_N]
    before_N = np.cumsum(is_spared_N[order_N]) - is_spared_N[order_N]
    first_N = np.searchsorted(users_N, users_N)
    places_N = ranks_N[order_N] + before_N - before_N[first_N]
    # No two items on one place: each stands behind the one before. One pass for all users, whom no place leads beyond
    # their own span of numbers.
    within_N = np.arange(len(users_N)) - first_N
    span_N = (USER_K + 1) * np.cumsum(within_N == 0)
    behind_N = np.maximum.accumulate(np.minimum(places_N, USER_K + 1) - within_N + span_N)
    return users_N, behind_N - span_N + within_N


def _of_all_ranks(rows_Q4: NDArray[np.int64], group: dist.ProcessGroup) -> NDArray[np.int64]:
    """Return the rows of all ranks, in rank order, on each of them; collective."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    size = torch.tensor([len(rows_Q4)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    with communicating("metrics of users"):
        dist.all_gather(sizes, size, group=group)
        longest = max(int(each) for each in sizes)
        # Collectives need equal shapes: all pad to the longest.
        rows = torch.zeros(longest, 4, dtype=torch.int64, device=device)
        rows[: len(rows_Q4)] = torch.from_numpy(rows_Q4)
        of_ranks = [torch.empty_like(rows) for _ in sizes]
        dist.all_gather(of_ranks, rows, group=group)
    return np.concatenate([each[: int(size)].cpu().numpy() for each, size in zip(of_ranks, sizes, strict=True)])


def has_repeats(metrics: Mapping[str, float]) -> bool:
    """Return whether any target of an evaluation was had before by its user."""
    return any(name.partition("/")[0] == REPEATED and value > 0 for name, value in metrics.items())


def answered_instead(name: str, metrics: Mapping[str, float]) -> float | None:
    """Return what answers reach where a recall of full ranking says something else; None where it does not.

    Args:
        name: of any metric.
        metrics: of the same evaluation.
    """
    metric, at, rest = name.partition("@")
    answered = metrics.get(f"{ANSWERED}@{rest}") if metric == RECALL and at else None
    return None if answered is None or answered == metrics.get(name) or math.isnan(answered) else answered


def repeats_lines(metrics: Mapping[str, float], *, repeats: Repeats) -> list[str]:
    """Say by which protocol items were ranked, how many targets were had before, and whether answers differ.

    Args:
        metrics: of an evaluation; nothing is said of one without full ranking.
        repeats: the protocol.
    """
    lines = []
    for name, share in metrics.items():
        metric, _, label = name.partition("/")
        if metric != REPEATED or math.isnan(share):
            continue
        of_label = f" of {label!r}" if label else ""
        lines.append(
            f"full ranking{of_label}: {repeats.of_evaluation}; {share:.1%} of the targets are repeated, "
            f"{1 - share:.1%} are new; {repeats.of_answers} (repeats = {repeats.value})"
        )
        if share and repeats.answers_leave_out and repeats.target_can_win:
            lines.append(
                f"warning: answers can never hold the {share:.1%} of targets{of_label} that their users had before, "
                'and these metrics count them: in [items] of the schema, repeats = "allow" lets answers repeat items, '
                'repeats = "leave_out" counts such targets as missed'
            )
    return lines


class HadBefore:
    """The items that each group (user) had: pairs of group and item, looked up by group.

    Args:
        pairs: arrays of groups and of numbers of items, of one length each.
    """

    def __init__(self, pairs: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> None:
        parts = list(pairs)
        none = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        groups, items = (np.concatenate(each) for each in zip(*(parts or none), strict=True))
        known = groups != 0  # 0 is a missing group: nobody
        groups = groups[known]
        items = items[known]
        order = np.lexsort((items, groups))
        groups = groups[order]
        items = items[order]
        # The first pair is new whatever it is; of no pair the slice leaves nothing.
        is_new = np.r_[True, (groups[1:] != groups[:-1]) | (items[1:] != items[:-1])][: len(groups)]
        self._groups = groups[is_new]
        self._items = items[is_new]

    def pairs_of(self, groups_Q: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(question, item) of everything that the groups of some questions had, question after question."""
        first = np.searchsorted(self._groups, groups_Q, side="left")
        lengths = np.searchsorted(self._groups, groups_Q, side="right") - first
        starts = np.cumsum(lengths) - lengths
        # The place of each item: where its group begins, and its number within the group.
        places = np.arange(lengths.sum()) + np.repeat(first - starts, lengths)
        return np.repeat(np.arange(len(groups_Q)), lengths), self._items[places]
