"""What is asked of an exported folder and what it answers: plain data, JSON in and out.

    RecommendRequest(user, k, filter, …) ──►                ──► Recommendations(items, version, degraded, plan)
                                             an Answerer
    RankRequest(user, items)             ──►                ──► Ranked(items, version, degraded)

`Answerer` is what stands in front of a server: `Recommender` is one, and a test may have a small one of its own. It
takes several requests at once, each of another user with a filter and a k of its own, and gives each an answer or an
error: one bad request spoils no other one.

*Degradation*: a server that has not enough time asks for less `Effort`. Every answer says in `degraded` what was left
out for that reason; an empty tuple is the full answer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol, TypeVar

from ziggurat.errors import RequestError, ZigguratError
from ziggurat.features.items import Repeats
from ziggurat.plain import JSON
from ziggurat.serving.export.published_folder import Publication
from ziggurat.typed import Range, Reader, checked

MAX_K = 10_000
MAX_RANKED = 100_000
_REASON = "more than one request may ask for"
Answered = TypeVar("Answered")
_checked = functools.partial(checked, error=RequestError)


class Effort(StrEnum):
    """The amount of computation for an answer, from the most to the least."""

    FULL = "full"  # retrieval with all probes, then the ranker over all candidates
    FEWER_PROBES = "fewer_probes"  # a quarter of the probes and of the candidates
    SMALLER_OVER_ARCH = "smaller_over_arch"  # and a sixteenth of the items that the OverArch scores, not a quarter
    RETRIEVAL_ONLY = "retrieval_only"  # and neither OverArch nor ranker: the order of retrieval
    POPULAR = "popular"  # no model: the most frequent items that pass the filter


@dataclass(frozen=True, kw_only=True)
@_checked
class RecommendRequest:
    """A question for the best items of the catalogue.

    Args:
        user: raw columns of the user and the context; those left out are missing.
        k: how many items.
        filter: which items may be in the answer, in the language of filters; "" for all.
        exclude_seen: leave out what the user had in the data that the export was made from; None: as the schema of the
            run says (`[items] repeats`).
        exclude: ids of further items to leave out.
        explain: also say how the candidates were found.
    """

    user: dict[str, object]
    k: Annotated[int, Range(1, MAX_K, _REASON)] = 10
    filter: str = ""
    exclude_seen: bool | None = None
    exclude: tuple[str, ...] = ()
    explain: bool = False

    @staticmethod
    def from_json(data: object, *, where: str = "request") -> RecommendRequest:
        """A request from plain data.

        Raises:
            RequestError: an unknown field, or a value that cannot be; names it.
        """
        return _request(RecommendRequest, data, where)


@dataclass(frozen=True, kw_only=True)
@_checked
class RankRequest:
    """A question for the scores of given items.

    Args:
        user: raw columns of the user and the context.
        items: ids of items in the catalogue, or dicts with the raw columns of items, which need not be in it; what a
            dict leaves out of an item that is in it, stands there.
    """

    user: dict[str, object]
    items: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.items) <= MAX_RANKED:
            raise RequestError(
                expected=f"1 to {MAX_RANKED:,} items to rank",
                found=f"{len(self.items):,}",
                where="request, field 'items'",
                ways_out=("name at least one item",) if not self.items else ("ask several times",),
            )
        for position, item in enumerate(self.items):
            if not isinstance(item, (str, dict)):  # a union of types costs a microsecond an item
                raise RequestError(
                    expected="the id of an item as text, or an object with its columns",
                    found=f"{item!r:.80} ({type(item).__name__})",
                    where=f"request, field 'items[{position}]'",
                    ways_out=(f'"{item!s:.40}"', "an object: columns of the item by name"),
                )

    @staticmethod
    def from_json(data: object, *, where: str = "request") -> RankRequest:
        """A request from plain data; raises RequestError."""
        return _request(RankRequest, data, where)


def _request(cls: type[Answered], data: object, where: str) -> Answered:
    reader = Reader(where=where, noun="field", error=RequestError)
    if not isinstance(data, dict):
        raise reader.wrong("", "an object with the fields of a request", data)
    return reader.build(cls, data)


@dataclass(kw_only=True, slots=True)  # not frozen: answers have thousands of them, and a frozen one takes twice as long
class ScoredItem:
    """One item of an answer.

    Args:
        id: as in the catalogue; "" for an item that was given by its columns without an id.
        score: what the answer is ordered by: the value model's, larger is better.
        tasks: the score of each task of the ranker, by the name of its label.
        retrieval: the inner product of the vectors of user and item; None where neither search nor formula needed it.
        over_arch: the score of the OverArch; None where there is none, or where nothing needed it.
        position: where the item stood in a `RankRequest`; in recommendations its place, from 0.
    """

    id: str
    score: float
    tasks: dict[str, float] = field(default_factory=dict)
    retrieval: float | None = None
    over_arch: float | None = None
    position: int = 0

    def to_json(self) -> dict[str, object]:
        """The item as plain data."""
        data: dict[str, object] = {"id": self.id, "score": self.score, "tasks": self.tasks, "position": self.position}
        if self.retrieval is not None:
            data["retrieval"] = self.retrieval
        if self.over_arch is not None:
            data["over_arch"] = self.over_arch
        return data


@dataclass(frozen=True, kw_only=True)
class Recommendations:
    """The best items for one user, best first; fewer than k where fewer pass the filter.

    Args:
        items: best first; of equal scores the item earlier in the catalogue first.
        version: of the export that answered.
        degraded: what was left out for lack of time; empty for the full answer.
        notes: values in the filter that no item has, each with the nearest that some have, and excluded ids of no
            item: most often typing errors; and that the user is not known.
        plan: how the candidates were found, if `explain` asked for it.
        missing_shards: shards of the index that gave no answer in time: none of their items is here, and `degraded`
            says so, too.
    """

    items: tuple[ScoredItem, ...]
    version: str
    degraded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    plan: str = ""
    missing_shards: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The answer as plain data; notes, missing shards and plan where there are any."""
        more = {"notes": list(self.notes)} if self.notes else {}
        more |= {"missing_shards": list(self.missing_shards)} if self.missing_shards else {}
        return _answer(self.items, self.version, self.degraded) | more | ({"plan": self.plan} if self.plan else {})


def degraded_by(effort: Effort, *, missing_shards: Sequence[int] = ()) -> tuple[str, ...]:
    """Return the entries of an answer's `degraded`, by its effort and by the shards that it does without."""
    less = () if effort is Effort.FULL else (effort.value,)
    return (*less, "missing_shards") if missing_shards else less


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """Given items with their scores, best first.

    Args:
        items: best first; `position` says where each stood in the request.
        version: of the export that answered.
        degraded, notes: as in `Recommendations`.
    """

    items: tuple[ScoredItem, ...]
    version: str
    degraded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The answer as plain data; notes where there are any."""
        more = {"notes": list(self.notes)} if self.notes else {}
        return _answer(self.items, self.version, self.degraded) | more


def _answer(items: Sequence[ScoredItem], version: str, degraded: tuple[str, ...]) -> dict[str, object]:
    return {"items": [item.to_json() for item in items], "version": version, "degraded": list(degraded)}


def export_version(version: str) -> str:
    """Return the version of the export in that of an answer, "7839b515948819c7" of "7839b515948819c7+1203.1200".

    What stands behind it counts the items that changed since (`ChangesMade.version`).
    """
    return version.partition("+")[0]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A raw column that requests may have.

    Args:
        name: of the column.
        kind: dense, categorical, multi_hot, sequence or vector.
        example: a value from the data that the export was made from, for documentation.
    """

    name: str
    kind: str
    example: object = None


@dataclass(frozen=True, kw_only=True)
class Info:
    """A description of an export and of what may be asked of it.

    Args:
        name: of its folder.
        version: 16 hex digits that change with anything in the export.
        made_with: version of Ziggurat that wrote it.
        can_recommend: it has a catalogue with an index.
        can_rank: it has a ranker.
        num_items: in the catalogue; 0 without one.
        labels: the tasks of the ranker.
        user_columns: raw columns of users and context.
        item_columns: raw columns of items.
        filters: attributes that filters may use, with their kinds.
        value_model: the formula that orders answers.
        filter_example: a filter that works on this catalogue, or "".
        num_candidates: items that retrieval gives the ranker for an answer of few items.
        user_id: column with the user's id, or "".
        item_id: column with the item's id, or "" without a catalogue.
        num_over_arch: items that the OverArch scores before, 0 without one.
        repeats: protocol for what a user had before, in the run's evaluation and in answers; see `features/items.py`.
        exclude_seen: whether answers leave out what a user had, where a request does not say.
        products: format of the weights of dense products, by part: {"ranker": "mx6"}; see `models/packed.py`.
        examples: requests that it answers, as plain data: {"recommend": {…}} or {"rank": {…}}.
        changes: of the items since the export was made, as plain data: live_items, deleted_items, unmerged_items,
            changes, merged_changes, journal_bytes, last_merge (UTC, "" if there was none); empty without a catalogue.
        published: the version of a published folder that it is; None of an export that no stream has published.
    """

    name: str
    version: str
    made_with: str
    can_recommend: bool
    can_rank: bool
    num_items: int = 0
    labels: tuple[str, ...] = ()
    user_columns: tuple[Column, ...] = ()
    item_columns: tuple[Column, ...] = ()
    filters: dict[str, str] = field(default_factory=dict)
    value_model: str = ""
    filter_example: str = ""
    num_candidates: int = 0
    user_id: str = ""
    item_id: str = ""
    num_over_arch: int = 0
    repeats: str = Repeats.LEAVE_OUT_BUT_TARGET.value
    exclude_seen: bool = True
    products: dict[str, str] = field(default_factory=dict)
    examples: tuple[dict[str, object], ...] = ()
    changes: dict[str, JSON] = field(default_factory=dict)
    published: Publication | None = None

    def published_now(self) -> dict[str, JSON]:
        """Return number, window, watermark and age of a published version as plain data; {} of any other export."""
        return {} if self.published is None else self.published.facts(now_s=time.time())

    def to_json(self) -> dict[str, object]:
        """The description as plain data."""
        data: dict[str, object] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        columns = {
            name: [{"name": each.name, "kind": each.kind, "example": each.example} for each in listed]
            for name, listed in (("user_columns", self.user_columns), ("item_columns", self.item_columns))
        }
        lists = {"labels": list(self.labels), "examples": list(self.examples)}
        return data | columns | lists | {"published": self.published_now()}


class Answerer(Protocol):
    """Answers a server's requests: loaded once, without state between requests, safe to call from several threads."""

    def info(self) -> Info:
        """Describe what the export is, and what may be asked of it."""
        ...

    def check(self, request: RecommendRequest | RankRequest) -> int:
        """Refuse a request before it waits in a queue; return its number of candidates, which its cost grows with.

        Raises:
            RequestError: it cannot be answered: an unknown item, a filter with a mistake, a wrong column.
        """
        ...

    def recommend_many(
        self, requests: Sequence[RecommendRequest], *, effort: Effort = Effort.FULL
    ) -> list[Recommendations | ZigguratError]:
        """Answers in the order of the requests, computed together; an error stands in the place of its answer."""
        ...

    def rank_many(
        self, requests: Sequence[RankRequest], *, effort: Effort = Effort.FULL
    ) -> list[Ranked | ZigguratError]:
        """Scores for the items of each request, computed together."""
        ...

    def item(self, id: str) -> dict[str, object]:
        """The raw columns of an item of the catalogue; RequestError if there is none of that id."""
        ...

    def users(self, *, limit: int = 100) -> list[str]:
        """Ids of users that the export knows, the most active first; for a page to choose from."""
        ...

    def history(self, user: Mapping[str, object], *, limit: int = 100) -> list[str]:
        """Ids of the items that a user had in the data, the latest first."""
        ...

    def explain_item(self, request: RecommendRequest, id: str) -> str:
        """Explain why an item is in an answer, or is not: seen already, excluded, filtered (and by which term)."""
        ...
