"""Which formula should order answers? Tried on validation likes through the whole chain, and chosen by NDCG@k.

    retrieval                              as if there were no ranker: what every other formula has to beat
    over_arch                              where the run that retrieves has one
    like                                   each task alone
    base + w * log(like)                   base: the better of the first two; weights on a grid
    base + w * log(like) + v * log(buy)    several tasks: one weight after the other, two rounds; `retrieval_like`, the
                                           inner product with the vector of a task, is weighted likewise, without log

A ranker says who likes what among what people chose to look at; it was never shown what nobody chose. Alone it may
order worse than the inner product that found its candidates, and then a product with a ranker loses to one without.

w is a multiple (`MULTIPLES`) of σ(base) / σ(log(task)), the mean spreads among the candidates of a question, so that
the grid fits vectors of any length and tasks of any rate. A label that is a number is taken as it is, without log.

NDCG@k is that of full ranking: 1 / log₂(rank + 1) of the item that was liked, 0 behind k, the mean over likes. The best
formula is taken if it is ahead of `retrieval` by more than one standard error of the mean difference (users drawn, not
likes: those of one user hang together); else `retrieval` is, since the simpler of two equals is the better one
(Breiman et al., Classification and Regression Trees, 1984, section 3.4.3).

Cost: that of the candidates' scores (`held_out_likes.py`); 4,000 likes of 500 candidates take 20 ms a formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from ziggurat.features.inputs import LabelSpec
from ziggurat.runs.export.held_out_likes import HeldOutLikes, ScoredCandidates
from ziggurat.serving.answering.chain import OVER_ARCH, RETRIEVAL
from ziggurat.serving.value_model.formula import LOWEST, ValueModel
from ziggurat.typed import Count

MULTIPLES = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0)
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One formula and what it does.

    Args:
        formula: of the value model.
        ndcg: the mean over all questions.
        gain: of `ndcg` over that of `retrieval`.
        error: standard error of `gain`; 0 for `retrieval` itself.
    """

    formula: str
    ndcg: float
    gain: float
    error: float


@dataclass(frozen=True, kw_only=True)
class ValueFit:
    """The formulas that were tried, and the one that was chosen.

    Args:
        tried: in the order of the module's docstring; the first one is `retrieval`.
        formula: the chosen one.
        k: of NDCG@k.
        num_questions: likes that were asked.
        num_all: likes of the split.
        num_users: who asked.
        seed: of the sample.
        split: how the rows were split.
        costs_ms: of a request, by what is done.
    """

    tried: tuple[Tried, ...]
    formula: str
    k: Count
    num_questions: int
    num_all: int
    num_users: int
    seed: int
    split: str = ""
    costs_ms: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> Tried:
        """The formula with the highest NDCG, chosen or not."""
        return max(self.tried, key=lambda each: each.ndcg)

    @property
    def chosen(self) -> Tried:
        """The figures of the chosen formula."""
        return next(each for each in self.tried if each.formula == self.formula)

    def to_json(self) -> dict[str, object]:
        """Everything as plain data."""
        return {
            "formula": self.formula,
            "how": "fitted",
            "metric": f"ndcg@{self.k} of full ranking",
            "split": self.split,
            "likes": self.num_questions,
            "likes_of_split": self.num_all,
            "users": self.num_users,
            "seed": self.seed,
            "ms_a_request": dict(self.costs_ms),
            "tried": [dict(vars(each)) for each in self.tried],
        }

    def lines(self) -> list[str]:
        """The table for people, the chosen formula marked, and what follows from it."""
        of = "all" if self.num_questions == self.num_all else f"{self.num_questions:,} of {self.num_all:,}"
        seed = "" if self.num_questions == self.num_all else f", seed {self.seed}"
        width = max(len(each.formula) for each in self.tried)
        rows = [
            f"value formulas on {of} validation likes of {self.num_users:,} users{seed}; whole chain, all items ranked",
            f"    {'formula':{width}}   NDCG@{self.k}   over retrieval alone",
        ]
        for each in self.tried:
            mark = "  ►" if each.formula == self.formula else "   "
            gain = "" if each is self.tried[0] else f"{each.gain:+.4f} ± {each.error:.4f}"
            rows.append(f"{mark} {each.formula:{width}}   {each.ndcg:7.4f}   {gain}".rstrip())
        return [*rows, self.verdict()]

    def verdict(self) -> str:
        """Say which formula was chosen and why, in a sentence, and what the ranker costs."""
        costs = ""
        if self.costs_ms:
            costs = "; a request takes " + ", ".join(f"{ms:.1f} ms {what}" for what, ms in self.costs_ms.items())
            costs += " (processor time)"
        if self.formula != RETRIEVAL:
            gain = f"{self.chosen.gain / max(self.tried[0].ndcg, 1e-12):+.1%}"
            return f"order: {self.formula} (NDCG@{self.k} {gain} over retrieval alone){costs}"
        if len(self.tried) == 1:
            return f"order: {RETRIEVAL}{costs}"
        best = max(self.tried[1:], key=lambda each: each.ndcg)
        return (
            f"order: {RETRIEVAL}. What scores its candidates does not help here: the best of it, {best.formula}, is "
            f"ahead by {best.gain:+.4f} ± {best.error:.4f}, no more than chance gives; answers show the scores{costs}"
        )


def fit_value(
    likes: HeldOutLikes, candidates: ScoredCandidates, *, labels: Sequence[LabelSpec], k: int = 10, seed: int = 0
) -> ValueFit:
    """Try formulas, and choose.

    Args:
        likes: questions with their weights and users.
        candidates: scored by all parts.
        labels: tasks of the ranker; none without one.
        k: of NDCG@k.
        seed: of the sample, for the record.
    """
    trial = _Trial(likes, candidates, k=k)
    bases = [name for name in (RETRIEVAL, OVER_ARCH) if name in candidates.scores]
    base = max(bases, key=trial.ndcg)
    for label in labels:
        trial.ndcg(quoted(label.name))
    terms = [*map(quoted, candidates.of_tasks), *map(_term, labels)]
    if base == OVER_ARCH:
        terms = [RETRIEVAL, *terms]
    elif OVER_ARCH in bases:
        terms = [OVER_ARCH, *terms]
    _search_weights(trial, base=base, terms=terms)
    tried = tuple(trial.tried())
    best = max(tried, key=lambda each: each.ndcg)
    return ValueFit(
        tried=tried,
        formula=best.formula if best.gain > best.error else RETRIEVAL,
        k=k,
        num_questions=len(likes.questions),
        num_all=likes.num_all,
        num_users=likes.num_users,
        seed=seed,
    )


def quoted(name: str) -> str:
    """A label as formulas name it."""
    return name if name.isidentifier() else f'"{name}"'


class _Trial:
    """Formulas that were tried, each once.

    Args:
        likes: questions with their weights and users.
        candidates: of the questions.
        k: of NDCG@k.
    """

    def __init__(self, likes: HeldOutLikes, candidates: ScoredCandidates, *, k: int) -> None:
        self._likes = likes
        self._candidates = candidates
        self._k = k
        self._gains: dict[str, Float64[np.ndarray, " Q"]] = {}

    def values(self, formula: str) -> Float64[Tensor, "Q C"]:
        """Return the values that a formula gives all candidates."""
        return ValueModel(formula, names=tuple(self._candidates.scores))(self._candidates.scores)

    def ndcg(self, formula: str) -> float:
        """NDCG@k of a formula, which is kept."""
        if formula not in self._gains:
            ranks = self._candidates.ranks(self.values(formula)).double()
            gains = torch.where((ranks > 0) & (ranks <= self._k), 1.0 / torch.log2(ranks + 1.0), 0.0)
            self._gains[formula] = gains.numpy()
        return float(np.average(self._gains[formula], weights=self._likes.weights))

    def spread(self, formula: str) -> float:
        """The standard deviation of a formula among the candidates of a question, the mean over questions."""
        values = self.values(formula)
        is_there = (self._candidates.items >= 0) & (values > LOWEST)
        number = is_there.sum(dim=1).clamp(min=1)
        values = torch.where(is_there, values, 0.0)
        means = (values.sum(dim=1) / number).unsqueeze(1)
        squares = torch.where(is_there, (values - means) ** 2, 0.0).sum(dim=1) / number
        return float(squares.sqrt().mean())

    def tried(self) -> list[Tried]:
        """All of them with their gains over `retrieval`."""
        weights = self._likes.weights
        users = np.unique(self._likes.groups, return_inverse=True)[1]
        reference = self._gains[RETRIEVAL]
        found = []
        for formula in self._gains:
            difference = self._gains[formula] - reference
            gain = float(np.average(difference, weights=weights))
            # Likes of one user hang together, so that the error is that of the sums of users.
            of_users = np.bincount(users, weights=weights * (difference - gain))
            error = float(np.sqrt((of_users**2).sum()) / weights.sum())
            found.append(Tried(formula=formula, ndcg=self.ndcg(formula), gain=gain, error=error))
        return found


def _search_weights(trial: _Trial, *, base: str, terms: Sequence[str]) -> None:
    """Weights of the terms, one after the other with the others as they are; twice if there are several."""
    spreads = {name: trial.spread(name) for name in (base, *terms)}
    terms = [term for term in terms if spreads[term] > 0 and np.isfinite(spreads[term])]
    chosen: dict[str, float] = {}
    for _ in range(_ROUNDS if len(terms) > 1 else 1):
        for term in terms:
            scale = spreads[base] / spreads[term]
            weights = [0.0, *(float(f"{multiple * scale:.2g}") for multiple in MULTIPLES)]
            formulas = {_formula(base, chosen | {term: weight}): weight for weight in weights}
            chosen[term] = formulas[max(formulas, key=trial.ndcg)]


def _formula(base: str, weights: dict[str, float]) -> str:
    return " + ".join([base, *(f"{weight:g} * {term}" for term, weight in weights.items() if weight)])


def _term(label: LabelSpec) -> str:
    return label.task.value_term(quoted(label.name))
