"""The chain of an answer: candidates from the index, scores from the ranker, one value each, the best first.

    users (B rows) ──► vectors ──► index ──► OverArch ──► ranker ──► value model ──► order
                                   2,000 a user  500        (pairs in one batch)       of equal values the earlier item

`Chain` knows tensors and numbers of items; requests, ids and errors are the recommender's (`recommender.py`). How much
of it is computed is said by an `Effort`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import polars as pl
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

from ziggurat.config import from_json, to_json
from ziggurat.data.raw.written_numbers import PLAIN_NUMBERS, WrittenColumns, WrittenNumbers
from ziggurat.errors import ExportError
from ziggurat.features.items import Repeats
from ziggurat.features.number_marks import NumberColumn
from ziggurat.files import Format
from ziggurat.retrieval.filters import Filter
from ziggurat.serving.answering.item_catalogue import ItemCatalogue
from ziggurat.serving.answering.item_search import LESS, ItemSearch
from ziggurat.serving.answering.lacking import no_catalogue, no_index, no_ranker
from ziggurat.serving.answering.ranker import Ranker
from ziggurat.serving.answering.rescorer import Rescorer
from ziggurat.serving.answering.sides import EncodedSide
from ziggurat.serving.answering.stages import stage
from ziggurat.serving.answering.unknown_of_rows import UnknownOfRow, unknown_of_rows
from ziggurat.serving.answering.vector_encoder import VectorEncoder
from ziggurat.serving.answers import Effort
from ziggurat.serving.export.export_folder import WAYS_OUT
from ziggurat.serving.value_model.formula import ValueModel
from ziggurat.typed import Count

CHAIN_FILE = "chain.json"
CHAIN = Format(name="ziggurat.export_chain", what="the chain of an export", error=ExportError, ways_out=WAYS_OUT)
# Names in formulas.
RETRIEVAL = "retrieval"
OVER_ARCH = "over_arch"
_ASKED = "that is asked"


@dataclass(frozen=True, kw_only=True)
class ChainSettings:
    """The content of chain.json.

    Args:
        formula: of the value model.
        num_candidates: items that index or OverArch give the ranker, for answers of no more items than that.
        num_over_arch: items that the index gives the OverArch, where there is one.
        user_id: column with the user's id, or "".
        repeats: of the run that retrieves: whether answers leave out what a user had, where a request does not say.
        written: the way in which the files of the run write numbers, and so requests those in their texts.
        number_columns: columns whose numbers are written in another way.
    """

    formula: str
    num_candidates: Count = 500
    num_over_arch: Count = 2000
    user_id: str = ""
    repeats: Repeats = Repeats.LEAVE_OUT_BUT_TARGET
    written: WrittenNumbers = PLAIN_NUMBERS
    number_columns: tuple[NumberColumn, ...] = ()

    @property
    def written_columns(self) -> WrittenColumns:
        """The way in which the numbers of each column are written in texts."""
        return WrittenColumns(files=self.written).with_own(self.number_columns)

    @staticmethod
    def read(path: Path) -> ChainSettings:
        """Read the file; raises ExportError."""
        return from_json(ChainSettings, CHAIN.read(path), where=str(path), error=ExportError)

    def write(self, path: Path) -> None:
        """Write the file."""
        CHAIN.write(path, to_json(self))


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question that is asked about one user.

    Args:
        row: raw columns of the user.
        known: number of the known user whose columns these are, or -1.
        k: items wanted.
        filter: parsed or as text; None for all items.
        exclude: numbers of items to leave out.
        unknown: gets the ids of the row that training did not know, by feature, when models have read it.
    """

    row: Mapping[str, object]
    known: int = -1
    k: int
    filter: Filter | None = None
    exclude: Tensor | None = None
    unknown: UnknownOfRow = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Items of one user with what was computed for them, best first.

    Args:
        items: (n,) numbers in the catalogue.
        values: (n,) what they are ordered by.
        tasks: (n, L) scores of the ranker, or (n, 0).
        retrieval: (n,) inner products, or None.
        over_arch: (n,) scores of the OverArch, or None.
        of_tasks: (n, V) inner products with the vector of each task, where each has its own; `retrieval` is their mean.
        plan: how they were found.
        missing: shards of the index that gave no answer.
    """

    items: Int64[Tensor, "n"]
    values: Float64[Tensor, "n"]
    tasks: Float32[Tensor, "n L"]
    retrieval: Float32[Tensor, "n"] | None = None
    over_arch: Float32[Tensor, "n"] | None = None
    of_tasks: Float32[Tensor, "n V"] | None = None
    plan: str = ""
    missing: tuple[int, ...] = ()

    def further(self) -> tuple[list[float | None], list[float | None]]:
        """Inner products and scores of the OverArch as lists; None for each item where there are none."""
        none: list[float | None] = [None] * len(self.items)
        products = none if self.retrieval is None else self.retrieval.tolist()
        return products, none if self.over_arch is None else self.over_arch.tolist()


@dataclass(frozen=True, kw_only=True)
class KnownSides:
    """Known users, encoded ahead; None where they are not."""

    ranker: EncodedSide | None = None
    encoder: EncodedSide | None = None


@dataclass(frozen=True, kw_only=True)
class ChangesMade:
    """The changes of the items since the export was made.

    Args:
        num: changes that were made.
        num_merged: those of them that are in the clusters of the index.
        merged_at_s: when, in seconds since 1970; 0: never.
        journal_bytes: of the files that hold the changes; 0 where they are in memory alone.
    """

    num: int = 0
    num_merged: int = 0
    merged_at_s: float = 0.0
    journal_bytes: int = 0

    def version(self, export: str) -> str:
        """The version of answers: that of the export, behind a + the changes, behind a point those that are merged."""
        merged = f".{self.num_merged}" if self.num_merged else ""
        return f"{export}+{self.num}{merged}" if self.num else export


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The parts of an answer; `ranker` alone ranks, `encoder` and `index` alone retrieve.

    Args:
        settings: candidates and formula.
        catalogue: the items, or None.
        ranker: scores of tasks, or None.
        encoder: vectors of users, or None.
        index: of the items' vectors, or None.
        rescorer: the OverArch over what the index finds, or None.
        value: the formula.
        numbers: columns of the catalogue that the formula reads.
        known: the known users as ranker and encoder read them, so that a request that gives no more than an id costs
            no encoding; empty where they are too many.
        changes: of the items since the export was made.
    """

    settings: ChainSettings
    catalogue: ItemCatalogue | None
    ranker: Ranker | None
    encoder: VectorEncoder | None
    index: ItemSearch | None
    value: ValueModel
    rescorer: Rescorer | None = None
    numbers: dict[str, Tensor] = field(default_factory=dict)
    known: KnownSides = field(default_factory=lambda: KnownSides())
    changes: ChangesMade = field(default_factory=lambda: ChangesMade())

    @property
    def labels(self) -> tuple[str, ...]:
        """Tasks of the ranker."""
        return () if self.ranker is None else self.ranker.labels

    @property
    def needed_catalogue(self) -> ItemCatalogue:
        """The items, for whoever cannot do without; raises RequestError where there are none."""
        if self.catalogue is None:
            raise no_catalogue(_ASKED)
        return self.catalogue

    @property
    def needed_index(self) -> ItemSearch:
        """The index, for whoever cannot do without; raises RequestError where there is none."""
        if self.index is None:
            raise no_index(_ASKED)
        return self.index

    @property
    def needed_encoder(self) -> VectorEncoder:
        """The encoder, for whoever cannot do without; raises RequestError where there is none."""
        if self.encoder is None:
            raise no_index(_ASKED)  # an export has both or neither
        return self.encoder

    @property
    def needed_ranker(self) -> Ranker:
        """The ranker, for whoever cannot do without; raises RequestError where there is none."""
        if self.ranker is None:
            raise no_ranker(_ASKED)
        return self.ranker

    def recommend(self, questions: Sequence[Question], *, effort: Effort, explain: bool) -> list[Candidates]:
        """The best items of each question.

        Raises:
            ZigguratError: one of them cannot be answered; nobody is then.
        """
        if effort is Effort.POPULAR:
            return self._popular(questions)
        by_value = effort is not Effort.RETRIEVAL_ONLY
        # The least effort shows no scores of the ranker, so none are computed below, either.
        orders = self.orders_by_tasks or not by_value
        found = self.candidates(questions, effort=effort, with_tasks=orders)
        best = [
            self._ordered(each, k=question.k, by_value=by_value)
            for each, question in zip(found, questions, strict=True)
        ]
        if not orders and self.ranker is not None:  # tasks are shown, and order nothing
            scores = self.rank(questions, [each.items for each in best])
            best = [replace(each, tasks=mine) for each, mine in zip(best, scores, strict=True)]
        return best if explain else [replace(each, plan="") for each in best]

    @property
    def orders_by_tasks(self) -> bool:
        """True if the formula names a score of the ranker, which is then computed for all candidates."""
        return bool(self.value.names & set(self.labels))

    def candidates(
        self, questions: Sequence[Question], *, effort: Effort = Effort.FULL, with_tasks: bool = True
    ) -> list[Candidates]:
        """Return what the formula orders: the items of each question with the scores of all parts, in no order.

        Args:
            questions: whose `k` may ask for more candidates than the settings do.
            effort: anything but popular items.
            with_tasks: let the ranker score them.
        """
        index = self.needed_index
        # Without a question there is nothing to encode, and the shape still has a place for tasks.
        vectors = self.task_vectors(questions) if questions else torch.empty(0, 1, 0)
        wanted = [self._num_found(question.k, effort) for question in questions]
        items, products, plans, missing = self._found(questions, vectors, wanted, effort)
        of_tasks: list[Tensor | None] = [None] * len(items)
        if self.encoder is not None and self.encoder.tasks:
            for i, mine in enumerate(items):
                of_tasks[i] = index.vectors_of(mine) @ vectors[i].T
            # Of several vectors the mean product is what orders candidates, and what an answer shows.
            products = [each.mean(dim=1) for each in of_tasks if each is not None]
        is_whole = effort is not Effort.RETRIEVAL_ONLY
        again: list[Tensor | None] = [None] * len(items)
        if self.rescorer is not None and is_whole:
            scores = self.rescorer.scores(vectors[:, 0], items)
            for i, question in enumerate(questions):
                best = _best(items[i], scores[i], self._num_ranked(question.k, effort))
                items[i], products[i], again[i] = items[i][best], products[i][best], scores[i][best]
        if self.ranker is None or not is_whole or not with_tasks:
            tasks = [torch.empty(len(mine), 0) for mine in items]
        else:
            tasks = self.rank(questions, items)
        return [
            Candidates(
                items=items[i],
                values=products[i].double(),
                tasks=tasks[i],
                retrieval=products[i],
                over_arch=again[i],
                of_tasks=of_tasks[i],
                plan=plans[i],
                missing=missing[i],
            )
            for i in range(len(questions))
        ]

    @stage("search")
    def _found(
        self, questions: Sequence[Question], vectors_BVD: Tensor, wanted: Sequence[int], effort: Effort
    ) -> tuple[list[Int64[Tensor, "_"]], list[Float32[Tensor, "_"]], list[str], list[tuple[int, ...]]]:
        """Items, their inner products, the plan, and the shards that gave no answer, of each question.

        Questions that want as many items are searched for together: how far an index looks follows from how many are
        wanted, and an answer must not depend on who else asks. All vectors of a user ask in the same search, as many
        items each; what any of them finds is found, and inner products are those of the first.
        """
        if not questions:
            return [], [], [], []
        num_items = len(self.needed_catalogue)
        index = self.needed_index
        answers: dict[int, tuple[Tensor, Tensor, str, tuple[int, ...]]] = {}
        for most in set(wanted):
            places = [place for place, each in enumerate(wanted) if each == most]
            num = vectors_BVD.shape[1]
            asked = [questions[place] for place in places for _ in range(num)]
            found = index.search(
                vectors_BVD[places].flatten(0, 1),
                k=min(most, num_items),
                filters=[question.filter for question in asked],
                exclude=[question.exclude for question in asked],
                fewer_probes=effort is not Effort.FULL,
            )
            for row, place in enumerate(places):
                numbers = found.items[row * num : (row + 1) * num]
                scores = found.scores[row * num : (row + 1) * num]
                # Where fewer pass than are wanted, −1 stands behind them.
                mine = numbers[numbers >= 0]
                best = scores[numbers >= 0]
                if num > 1:
                    # Several vectors of a user may find the same item.
                    mine = mine.unique()
                    best = scores[0]
                answers[place] = mine, best, found.plans[row * num], found.missing
        items, products, plans, missing = zip(*(answers[place] for place in range(len(questions))), strict=True)
        return list(items), list(products), list(plans), list(missing)

    def _num_found(self, k: int, effort: Effort) -> int:
        """Items that the index looks for."""
        least = self._num_ranked(k, effort)
        if self.rescorer is None or effort is Effort.RETRIEVAL_ONLY:
            return least
        share = LESS * LESS if effort is Effort.SMALLER_OVER_ARCH else _share(effort)
        return max(self.settings.num_over_arch // share, least)

    def _num_ranked(self, k: int, effort: Effort) -> int:
        """Items that the ranker scores; those of the answer without one."""
        return k if self.ranker is None else max(self.settings.num_candidates // _share(effort), k)

    @stage("user vectors")
    def user_vectors(self, questions: Sequence[Question]) -> Float32[Tensor, "B D"]:
        """The vector of the user of each question, the mean where each task has its own."""
        encoder = self.needed_encoder
        return encoder.user_vectors(*self._users(encoder, questions, self.known.encoder))

    @stage("user vectors")
    def task_vectors(self, questions: Sequence[Question]) -> Float32[Tensor, "B V D"]:
        """All vectors of the user of each question: one, or one for each task."""
        encoder = self.needed_encoder
        return encoder.task_vectors(*self._users(encoder, questions, self.known.encoder))

    @stage("ranker")
    def rank(self, questions: Sequence[Question], items: Sequence[Tensor]) -> list[Float32[Tensor, "n L"]]:
        """Scores of the tasks, for some items of the catalogue and each user."""
        ranker = self.needed_ranker
        counts = torch.tensor([len(mine) for mine in items])
        users, numbers = self._users(ranker, questions, self.known.ranker)
        # Users as often as they have items, so that both sides are flat lists of pairs.
        pairs = (numbers.repeat_interleave(counts), torch.cat(list(items)))
        return list(ranker.score_pairs(users, pairs=pairs).split(counts.tolist()))

    def _users(
        self, part: Ranker | VectorEncoder, questions: Sequence[Question], known: EncodedSide | None
    ) -> tuple[EncodedSide, Int64[Tensor, "B"]]:
        """Encoded users, and which of them asks each question."""
        # Where each request gives an id alone, its columns are those that were encoded ahead.
        if known is not None and all(question.known >= 0 for question in questions):
            return known, torch.tensor([question.known for question in questions])
        users = part.encode_users([question.row for question in questions])
        for question, unknown in zip(questions, unknown_of_rows(users.batch, users.inputs), strict=True):
            question.unknown.update(unknown)
        return users, torch.arange(len(questions))

    def _ordered(self, found: Candidates, *, k: int, by_value: bool) -> Candidates:
        """The best k of some candidates, by value; of equal ones the earlier item."""
        # By number first: the stable sort of values then leaves equal ones in the order of the catalogue.
        items, order = found.items.sort()
        tasks = found.tasks[order]
        named = {RETRIEVAL: found.retrieval, OVER_ARCH: found.over_arch} | self.products_of_tasks(found.of_tasks)
        further = {name: column[order] for name, column in named.items() if column is not None}
        values = self.values(items, tasks, further) if by_value else found.values[order]
        best = values.argsort(descending=True, stable=True)[:k]
        return Candidates(
            items=items[best],
            values=values[best],
            tasks=tasks[best],
            retrieval=further[RETRIEVAL][best],
            over_arch=further[OVER_ARCH][best] if OVER_ARCH in further else None,
            plan=found.plan,
            missing=found.missing,
        )

    def values(self, items: Tensor, tasks: Tensor, further: Mapping[str, Tensor]) -> Float64[Tensor, "n"]:
        """The value of items of the catalogue.

        Args:
            items: their numbers.
            tasks: scores of the ranker.
            further: `retrieval` and `over_arch`, where the formula names them.
        """
        scores = {name: tasks[:, index] for index, name in enumerate(self.labels[: tasks.shape[1]])}
        scores |= {name: column[items] for name, column in self.numbers.items()}
        return self.value(scores | dict(further))

    def products_of_tasks(self, of_tasks: Float32[Tensor, "n V"] | None) -> dict[str, Tensor | None]:
        """Inner products with the vector of each task by their names in formulas; none where tasks share one."""
        if of_tasks is None or self.encoder is None:
            return {}
        return dict(zip(self.encoder.tasks, of_tasks.unbind(dim=1), strict=True))

    def _popular(self, questions: Sequence[Question]) -> list[Candidates]:
        """The most frequent items that pass; no model is asked."""
        events_of_items = self.needed_catalogue.events
        # Stable, so that of equally frequent items the earlier one comes first.
        order = np.argsort(-events_of_items, kind="stable")
        passing = self.needed_index.passing(
            filters=[question.filter for question in questions], exclude=[question.exclude for question in questions]
        )
        found = []
        for question, mask in zip(questions, passing, strict=True):
            # The mask is by item, and has to be brought into the order of frequency.
            items = torch.from_numpy(order[mask.numpy()[order]][: question.k].astype(np.int64))
            events = torch.from_numpy(events_of_items.astype(np.float64))[items]
            found.append(Candidates(items=items, values=events, tasks=torch.empty(len(items), 0)))
        return found


def numbers_of(frame: pl.DataFrame, *, names: Sequence[str]) -> dict[str, Tensor]:
    """Columns of a catalogue as numbers that a formula can read; NaN where one is missing."""
    # A copy: torch wants memory that may be written, and that of polars may not.
    return {name: torch.from_numpy(frame[name].cast(pl.Float64).to_numpy().copy()) for name in names}


def numeric_names(frame: pl.DataFrame, *, taken: Sequence[str] = ()) -> list[str]:
    """Columns of a catalogue that are numbers, and whose names are free."""
    taken = (*taken, RETRIEVAL, OVER_ARCH)
    return [name for name, kind in frame.schema.items() if kind.is_numeric() and name not in taken]


def _share(effort: Effort) -> int:
    return 1 if effort is Effort.FULL else LESS


def _best(items: Tensor, scores: Tensor, most: int) -> Int64[Tensor, "_"]:
    """Places of the best, of equal ones the item that is earlier in the catalogue."""
    by_item = items.argsort()
    return by_item[scores[by_item].argsort(descending=True, stable=True)[:most]]
