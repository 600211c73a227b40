"""Recommender: an export folder, loaded, answers requests. The one implementation of an answer.

    rec = zg.Recommender.load("exports/films")
    rec.recommend({"user_id": "17"}, k=10, filter="genres:Drama AND NOT year:1995..1999")
    rec.rank({"user_id": "17"}, ["Alien (1979)", "Heat (1995)"])
    rec.scores(frame)                                   as `ziggurat predict`

    request ──► columns of the known user ──► chain: candidates, scores, value (`answering/chain.py`) ──► ids and scores

Bulk (`ziggurat recommend`), the server and the golden check of an export all come through here. Requests are answered
together, each with a user, a filter and a k of its own; what is wrong with one is an error in its place.
Columns that a request leaves out are those of the user's last row in the data, if the user is known, and missing
otherwise; ids that training never saw are unknown, as in `ziggurat predict`. Columns that nothing reads are refused.
`change_items` adds, changes and deletes items in memory; the folder stays as it is.

Equal requests get equal answers, up to rounding in other batches. Nothing that changes an answer is kept between them
(masks of frequent filters are); threads may share it.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ziggurat.arguments import check_arguments
from ziggurat.data.raw.frames import as_polars, is_frame
from ziggurat.data.raw.names import in_terms_of_frame
from ziggurat.data.raw.written_numbers import WrittenColumns, WrittenNumbers
from ziggurat.errors import BoundsError, DataError, RequestError, ZigguratError
from ziggurat.features.schema import column_of
from ziggurat.retrieval.filters import Filter
from ziggurat.serving.answering.chain import Candidates, Chain, Question
from ziggurat.serving.answering.given_items import GivenItems, GivenScores, score_given
from ziggurat.serving.answering.isolated import isolated, or_raise
from ziggurat.serving.answering.item_catalogue import ItemCatalogue, KnownUsers, had_before, sample_numbers, user_notes
from ziggurat.serving.answering.item_search import ItemSearch
from ziggurat.serving.answering.lacking import no_catalogue, no_index, no_ranker
from ziggurat.serving.answering.live_items import ChangedItems, ItemChanges, change_items, info_now
from ziggurat.serving.answering.ranker import Ranker
from ziggurat.serving.answering.sides import encode_frame
from ziggurat.serving.answering.unknown_of_rows import UnknownOfRow, unknown_note
from ziggurat.serving.answers import (
    Effort,
    Info,
    Ranked,
    RankRequest,
    Recommendations,
    RecommendRequest,
    ScoredItem,
    degraded_by,
)
from ziggurat.serving.export.export_folder import ExportFolder, open_export
from ziggurat.serving.export.published_folder import held_folder, is_version
from ziggurat.serving.golden import check_golden
from ziggurat.serving.load_parts import load_parts
from ziggurat.serving.request_rows import canonical_id, in_plain_numbers, refuse_unknown

T = TypeVar("T")


class Recommender:
    """An export that answers: recommends items of its catalogue, and ranks items that are given. Made by `load`.

    Args:
        export: the opened folder.
        chain: what computes.
        users: what is known of users, or None.
        info: what it says of itself.
    """

    def __init__(self, export: ExportFolder, *, chain: Chain, users: KnownUsers | None, info: Info) -> None:
        self.export = export
        self.chain = chain
        # Held by who changes it alone: who answers takes the chain once, and a chain never changes.
        self._changing = threading.Lock()
        self._users = users
        self._info = info
        self._user_columns = tuple(column.name for column in info.user_columns)
        self._item_columns = tuple(column.name for column in info.item_columns)
        # Columns that either model reads as numbers, on both sides, and those of the formula.
        parts = [part for part in (chain.ranker, chain.encoder) if part is not None]
        sides = [side.preprocessing for part in parts for side in (part.users, part.items)]
        features = [each for side in sides if side is not None for each in side.schema.features]
        self._number_columns = {column_of(each) for each in features if each.reads_numbers} | set(chain.numbers)
        self._column_of_user = {
            feature.name: column_of(feature)
            for part in (chain.encoder, chain.ranker)
            if part is not None and part.users.preprocessing is not None
            for feature in part.users.preprocessing.schema.features
        }

    @staticmethod
    @check_arguments
    def load(folder: str | Path, *, models: Sequence[type] = (), check: bool = True) -> Recommender:
        """Load an export.

        Args:
            folder: of the export.
            models: config classes of your own, if its models are of such. A folder never makes this import code.
            check: ask the golden requests, and compare with their answers.

        Raises:
            MissingFileError: there is no export.
            ExportError: a file is damaged, or a golden request is answered in another way; names it.
            ConfigError: a model that is neither built in nor in `models`.
        """
        # Of a published folder, whose stream may go on meanwhile, the version that is read stays until it is read.
        with held_folder(Path(os.path.realpath(folder))) as place:
            export = open_export(place if is_version(place) else folder)
            chain, users, info = load_parts(export, models=models)
        loaded = Recommender(export, chain=chain, users=users, info=info)
        if check:
            loaded.check_golden()
        return loaded

    @property
    def version(self) -> str:
        """16 hex digits that change with anything in the export, and what `ChangesMade.version` adds to them."""
        return self.chain.changes.version(self.export.version)

    @property
    def num_changes(self) -> int:
        """The number of changes of items since the export was made."""
        return self.chain.changes.num

    def __repr__(self) -> str:
        info = self._info
        what = [
            f"{info.num_items:,} items" if info.num_items else "",
            f"retrieval of {info.num_candidates}" if info.can_recommend else "",
            f"ranks by {', '.join(info.labels)}" if info.can_rank else "",
        ]
        return f"Recommender({info.name}: {'; '.join(filter(None, what))}; version {self.version})"

    def recommend(
        self,
        user: Mapping[str, object] | Sequence[Mapping[str, object]],
        *,
        k: int = 10,
        filter: str = "",
        exclude_seen: bool | None = None,
        exclude: Sequence[str] = (),
        explain: bool = False,
    ) -> object:
        """The k best items of the catalogue for a user, or for each of several.

        Args:
            user: raw columns; those left out are the known user's, or missing.
            k: how many items.
            filter: which items may be in the answer; see the guide to filters.
            exclude_seen: leave out what the user has had in the data; None: as the schema of the run says
                (`[items] repeats`, in `info().repeats`).
            exclude: ids of further items to leave out.
            explain: also say how the candidates were found.

        Returns:
            `Recommendations`, or a list of them where `user` is a list.

        Raises:
            RequestError: a column, an id or a filter that cannot be.
        """
        one = isinstance(user, Mapping)
        users = [user] if isinstance(user, Mapping) else user
        if not isinstance(users, Sequence) or not all(isinstance(each, Mapping) for each in users):
            raise RequestError(
                expected="the raw columns of a user as a dict, or a list of such dicts",
                found=f"{user!r:.80} ({type(user).__name__})",
                where="recommend, user",
                ways_out='rec.recommend({"user_id": "17"})',
            )
        requests = [
            RecommendRequest(
                user=dict(each),
                k=k,
                filter=filter,
                exclude_seen=exclude_seen,
                exclude=tuple(exclude),
                explain=explain,
            )
            for each in users
        ]
        answers = or_raise(self.recommend_many(requests))
        return answers[0] if one else answers

    def rank(self, user: Mapping[str, object], items: Sequence[str | Mapping[str, object]] | Any) -> Ranked:
        """Given items, best first, with the score of each task.

        Args:
            user: raw columns, as in `recommend`.
            items: ids of the catalogue, or raw columns of items that need not be in it, also as a frame of one row an
                item; columns left out are those of the item in the catalogue, or missing.

        Raises:
            RequestError: a column or an id that cannot be.
        """
        rows = items
        if is_frame(items):
            rows = as_polars(items, where="rank, items", written=self.chain.settings.written_columns).to_dicts()
        given = tuple(dict(item) if isinstance(item, Mapping) else item for item in rows)
        return or_raise(self.rank_many([RankRequest(user=dict(user), items=given)]))[0]

    def scores(self, frame: object) -> np.ndarray:
        """Scores of whole raw rows in any frame: float32 (rows, labels), as `ziggurat predict` gives them.

        Numbers in columns of text are read as in the files of the run; columns of numbers are taken as they are.
        """
        ranker = self._ranker()
        written = self.chain.settings.written_columns
        rows = as_polars(frame, where="rows to score", written=written)
        try:
            return ranker.score_frame(rows, numbers=written.files).numpy()
        except (DataError, BoundsError) as error:
            raise in_terms_of_frame(error) from error

    def with_numbers(self, user: Mapping[str, Any], *, written: WrittenNumbers) -> dict[str, Any]:
        """Return columns of a user in which texts of numbers are numbers, for texts of other files than the run's.

        Args:
            user: raw columns.
            written: how those files write numbers; columns of which the schema says more are read as it says.

        Raises:
            RequestError: a text that is no number in this way; names the column.
        """
        marks = WrittenColumns(files=written).with_own(self.chain.settings.number_columns)
        return dict(in_plain_numbers(user, columns=self._number_columns, written=marks, even_plain=True))

    def info(self) -> Info:
        """Describe what the export is, and what may be asked of it."""
        return info_now(self._info, self.chain, version=self.version)

    def change_items(self, changes: ItemChanges) -> ChangedItems:
        """Add, change and delete items of the catalogue, in memory; answers that begin from now on know it.

        Args:
            changes: rows to put, ids to delete; all of it is done, or nothing.

        Raises:
            RequestError: a row without an id, a column that is not there, a value that it cannot hold.
        """
        self._catalogue()
        outcome = self.become(lambda chain: change_items(chain, changes))
        return dataclasses.replace(outcome, version=self.version)

    def become(self, change: Callable[[Chain], tuple[Chain, T]]) -> T:
        """Let a function make another chain of the present one, one at a time; returns what else it returns."""
        # A change reads the chain and writes another one; two at once would lose the first.
        with self._changing:
            self.chain, outcome = change(self.chain)
        return outcome

    def check(self, request: RecommendRequest | RankRequest) -> int:
        """Refuse what cannot be answered; return the number of candidates. See `Answerer.check`."""
        # Parsing and look-ups are the check, and their result is thrown away.
        if isinstance(request, RecommendRequest):
            self._question(request)
            # A request for more items than candidates are the rule asks for as many candidates.
            return max(self.chain.settings.num_candidates if self.chain.ranker else request.k, request.k)
        self._ranker()
        self._asker(request.user)
        self._split_items(request)
        return len(request.items)

    def recommend_many(
        self, requests: Sequence[RecommendRequest], *, effort: Effort = Effort.FULL
    ) -> list[Recommendations | ZigguratError]:
        """Answers in the order of the requests; an error stands in the place of its answer."""
        return isolated(lambda asked: self._recommend(asked, effort), requests)

    def rank_many(
        self, requests: Sequence[RankRequest], *, effort: Effort = Effort.FULL
    ) -> list[Ranked | ZigguratError]:
        """Scores for the items of each request; less effort changes nothing, since each item was asked for."""
        del effort
        return isolated(self._rank, requests)

    def item(self, id: str) -> dict[str, object]:
        """The raw columns of an item of the catalogue."""
        catalogue = self._catalogue()
        return catalogue.row(int(catalogue.numbers([id])[0]))

    def users(self, *, limit: int = 100) -> list[str]:
        """Ids of known users, the most active first."""
        return [] if self._users is None else self._users.ids.head(limit).to_list()

    def knows(self, user: Mapping[str, object]) -> bool:
        """Return whether the export knows the user with this id."""
        return self._users is not None and self._users.number(user) >= 0

    def history(self, user: Mapping[str, object], *, limit: int = 100) -> list[str]:
        """Return ids of the items that a user had in the data, the latest first; RequestError for a wrong column."""
        self._check_values(user)
        if self._users is None or self.chain.catalogue is None:
            return []
        return self.chain.catalogue.ids_at(self._users.seen(user)[:limit])

    def explain_item(self, request: RecommendRequest, id: str) -> str:
        """Explain why an item may be in the answer to a request, or may not."""
        # The id first: whoever asks for an item that is not there is told so before anything else.
        number = int(self._catalogue().numbers([id])[0])
        question = self._question(request)
        self._check_values(request.user)
        lines = []
        if self._leaves_out_seen(request) and self._users is not None and number in self._users.seen(request.user):
            said = f"repeats = {self._info.repeats}" if request.exclude_seen is None else "exclude_seen"
            lines.append(f"left out: the user has had it ({said})")
        # 17 and 17.0 name one item, in the catalogue as in requests.
        if canonical_id(id) in {canonical_id(each) for each in request.exclude}:
            lines.append("left out: the request excludes it")
        if question.filter is not None and self.chain.index is not None:
            lines.append(self.chain.index.explain(question.filter, number))
        return "\n".join(lines) or "nothing leaves it out: it is in the answer if enough items are worse"

    def search_and_queries(self, *, num_users: int) -> tuple[ItemSearch, Tensor]:
        """The index, and the vectors of some known users, to measure it with; raises RequestError without either."""
        chain = self.chain
        if chain.index is None or chain.encoder is None or self._users is None or not len(self._users.ids):
            raise RequestError(
                expected="an export with an index, and known users to ask for",
                found="none",
                where=f"export {self.export.name}",
                ways_out="ziggurat export RUN_THAT_FINDS_ITEMS --out FOLDER, without --no-users",
            )
        numbers = sample_numbers(len(self._users.ids), num_users)
        users = encode_frame(chain.encoder.users, self._users.frame[numbers.tolist()])
        return chain.index, chain.encoder.task_vectors(users, torch.arange(len(numbers))).flatten(0, 1)

    def check_golden(self) -> int:
        """Ask the golden requests of the export; raises ExportError where an answer differs. Returns how many."""
        return check_golden(self, self.export)

    # ------------------------------------------------------------------------------------------------------ requests

    def _recommend(self, requests: Sequence[RecommendRequest], effort: Effort) -> list[Recommendations]:
        questions = [self._question(request) for request in requests]
        chain = self.chain  # items may change meanwhile; it knows every number that a question has
        # One plan is made for all of them, and taken out again where nobody asked.
        found = chain.recommend(questions, effort=effort, explain=any(request.explain for request in requests))
        absent = self._catalogue().notes
        return [
            Recommendations(
                items=self._items(each),
                version=chain.changes.version(self.export.version),
                degraded=degraded_by(effort, missing_shards=each.missing),
                notes=(
                    *self.notes(question.filter),
                    *absent(request.exclude),
                    *self._user_notes(request.user, question.unknown),
                    # By popularity the scores are no scores of the user, so that equal ones say nothing.
                    *(() if effort is Effort.POPULAR else _equal_note(each.values.tolist())),
                ),
                plan=each.plan if request.explain else "",
                missing_shards=each.missing,
            )
            for each, question, request in zip(found, questions, requests, strict=True)
        ]

    def _user_notes(self, user: Mapping[str, object], unknown: UnknownOfRow) -> tuple[str, ...]:
        """Return what a request says of its user that nobody knows: an id, and ids in other columns."""
        of_id = None if self._users is None else self._users.id_column
        given = [name for name, column in self._column_of_user.items() if column in user and column != of_id]
        return (*user_notes(user, users=self._users), *unknown_note((unknown,), features=given))

    def notes(self, filter: Filter | str | None) -> tuple[str, ...]:
        """Values in a filter, parsed or as text, that no item has, each with the nearest that some have."""
        index = self.chain.index
        if index is None or not filter:
            return ()
        return index.notes(index.parse(filter) if isinstance(filter, str) else filter)

    def _items(self, found: Candidates) -> tuple[ScoredItem, ...]:
        ids = self._catalogue().ids_at(found.items)
        labels = self.chain.labels
        tasks = found.tasks.tolist()
        products, again = found.further()
        return tuple(
            ScoredItem(
                id=ids[place],
                score=value,
                # Answers of less effort have no scores of tasks, and so fewer than there are labels.
                tasks=dict(zip(labels, tasks[place], strict=False)),
                retrieval=products[place],
                over_arch=again[place],
                position=place,
            )
            for place, value in enumerate(found.values.tolist())
        )

    def _question(self, request: RecommendRequest) -> Question:
        if self.chain.index is None:
            raise no_index(self.export.name)
        question = self._asker(request.user)
        left_out = []
        if self._leaves_out_seen(request):
            left_out += had_before(request.user, users=self._users, catalogue=self._catalogue())
        if request.exclude:
            left_out.append(self._catalogue().known(request.exclude))
        text = request.filter.strip()
        return dataclasses.replace(
            question,
            k=request.k,
            filter=self.chain.index.parse(text) if text else None,
            exclude=torch.cat(left_out) if left_out else None,
        )

    def _leaves_out_seen(self, request: RecommendRequest) -> bool:
        return self._info.exclude_seen if request.exclude_seen is None else request.exclude_seen

    def _asker(self, user: Mapping[str, object]) -> Question:
        """Describe the asker: the columns of the request, completed by what is known of the user."""
        refuse_unknown(user, self._user_columns, what="user")
        user = in_plain_numbers(user, columns=self._number_columns, written=self.chain.settings.written_columns)
        if self._users is None:
            return Question(row=dict(user), k=1)
        number = self._users.number(user)
        if number < 0:
            return Question(row=dict(user), k=1)
        is_plain = len(user) == 1  # the id alone
        # What the request says takes the place of what is known; without that the columns are those encoded ahead.
        return Question(row=self._users.row(number) | dict(user), known=number if is_plain else -1, k=1)

    def _check_values(self, user: Mapping[str, object]) -> None:
        """Refuse what `recommend` and `rank` refuse of a user: unknown columns, and values that no model can read."""
        row = self._asker(user).row
        for part in (self.chain.ranker, self.chain.encoder):
            if part is not None:
                part.encode_users([row])

    def _rank(self, requests: Sequence[RankRequest]) -> list[Ranked]:
        self._ranker()
        askers = [self._asker(request.user) for request in requests]
        given = [self._split_items(request) for request in requests]
        # Taken once, since items may change meanwhile.
        chain = self.chain
        found = score_given(chain, questions=askers, given=given)
        version = chain.changes.version(self.export.version)
        return [
            self._ranked(request, asker, scores, version)
            for request, asker, scores in zip(requests, askers, found, strict=True)
        ]

    def _ranked(self, request: RankRequest, asker: Question, found: GivenScores, version: str) -> Ranked:
        size = len(request.items)
        labels = self.chain.labels
        tasks = found.tasks.tolist()
        values = found.values.tolist()
        nothing = [None] * size
        retrieval = nothing if found.retrieval is None else found.retrieval.tolist()
        over_arch = nothing if found.over_arch is None else found.over_arch.tolist()
        items = tuple(
            ScoredItem(
                id=self._id_of(request.items[place]),
                score=values[place],
                tasks=dict(zip(labels, tasks[place], strict=True)),
                retrieval=retrieval[place],
                over_arch=over_arch[place],
                position=place,
            )
            # Stable, so that of equal values the item that was given first stands first.
            for place in found.values.argsort(descending=True, stable=True).tolist()
        )
        of_items = {spec.name for spec in self._ranker().items.inputs.lookups}
        # Without a catalogue every column is one of rows, and an item of a request may have any of them.
        given = {column for item in request.items if not isinstance(item, str) for column in item}
        of_items |= {name for name, column in self._column_of_user.items() if column in given}
        # Rows that are given whole hold the columns of the user, too.
        of_user = asker.unknown or next(iter(found.unknown), {})
        notes = (
            *self._user_notes(request.user, of_user),
            *unknown_note(found.unknown, features=of_items),
            *_equal_note(values),
        )
        return Ranked(items=items, version=version, notes=notes)

    def _split_items(self, request: RankRequest) -> GivenItems:
        ids = [item for item in request.items if isinstance(item, str)]
        given = {place: item for place, item in enumerate(request.items) if not isinstance(item, str)}
        # In two steps: numbers in texts are read before rows are completed from the catalogue, which has numbers.
        for place, item in given.items():
            refuse_unknown(item, self._item_columns, what="item")
            written = self.chain.settings.written_columns
            given[place] = in_plain_numbers(item, columns=self._number_columns, written=written)
        if given and self.chain.catalogue is not None:
            given = self.chain.catalogue.completed(given, columns=self._item_columns)
        numbers = self._catalogue().numbers(ids) if ids else torch.empty(0, dtype=torch.int64)
        return GivenItems(size=len(request.items), numbers=numbers, rows=given)

    def _id_of(self, item: str | Mapping[str, object]) -> str:
        if isinstance(item, str):
            return item
        catalogue = self.chain.catalogue
        return "" if catalogue is None else canonical_id(item.get(catalogue.columns.id)) or ""

    def _ranker(self) -> Ranker:
        if self.chain.ranker is None:
            raise no_ranker(self.export.name)
        return self.chain.ranker

    def _catalogue(self) -> ItemCatalogue:
        if self.chain.catalogue is None:
            raise no_catalogue(self.export.name, columns=sorted(self._item_columns))
        return self.chain.catalogue


def _equal_note(scores: Sequence[float]) -> tuple[str, ...]:
    """Say that all items of an answer have one score, so that their order says nothing; nothing where they differ."""
    if len(scores) < 2 or any(score != scores[0] for score in scores):
        return ()
    return (f"all {len(scores):,} items have the same score, {scores[0]:.4g}: nothing in the request tells them apart",)
