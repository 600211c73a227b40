"""Events: the rows of a file are what users did, and samples are made of them: a history, and what came next.

    [[feature]]
    name = "movie_id"
    kind = "categorical"

    [[feature]]
    name = "rating"
    kind = "categorical"

    [items]
    id = "movie_id"

    [roles]
    group = "user_id"
    time = "timestamp"

    [events]
    actions = ["rating"]
    max_length = 200

The user is the group, the moment is the time, and `[items]` says what was acted on: its id, and further columns that
say something of the item (side information, one value an event). `actions` say what was done with it, `context` what
was known of the user. Columns of all three are categorical features.

Without labels a sample is a question for the next item. With labels it is a candidate to rank:

    [[label]]
    name = "like"
    column = "rating"
    positive_from = 4.0

What becomes of the events is told in `ziggurat/data/events`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ziggurat.config import JSON, to_json
from ziggurat.errors import SchemaError
from ziggurat.features.items import Items
from ziggurat.typed import CountOrNone, Length, checked

if TYPE_CHECKING:
    from ziggurat.features.kinds import Feature

# Features of the samples that are made of events, beside the item: of what came next.
HISTORY = "history"  # items, latest last; what was done with them is in `history_ACTION`
HISTORY_TIMES = "history_times"  # when
ASKED_AT = "asked_at"  # one time: when what came next happened
EARLIER = "earlier"  # items before the history, each once, of validation and test samples: no answer to a question
NEXT_ITEM = "next_item"  # the label, always 1
QUESTION = "question"  # of candidates: which ones were asked together, behind one history
# Extras of a batch whose samples are pieces of histories: where each begins, and how long the whole history is.
PIECE_STARTS, PIECE_LENGTHS = "piece_starts", "piece_lengths"
PIECE_SETS = "piece_sets"  # which of the sets of pieces of its rank a sample belongs to
PIECE_HOMES = "piece_homes"  # the sample of the batch that was cut which a sample answers; -1: none
# Of a history that lacks some of its events: where each one stood in the whole, and how long that was.
HISTORY_PLACES, HISTORY_LENGTHS = "history_places", "history_lengths"


def of_history(name: str) -> str:
    """The list feature that a feature of an event becomes."""
    return f"{HISTORY}_{name}"


class EqualTimes(StrEnum):
    """Ways to treat events of one user at one time."""

    FILE_ORDER = "file_order"  # in the order of the file: what stands above happened before
    REFUSE = "refuse"  # an error


class FutureTimes(StrEnum):
    """Ways to treat events that have not happened yet, by the clock of this machine."""

    REFUSE = "refuse"  # an error: a unit that is not what it seems, or a damaged clock
    ALLOW = "allow"


class TrainingWindows(StrEnum):
    """Choices of which events of a user the training sequences hold."""

    LAST = "last"  # the latest `max_length` + 1 of them: one sequence a user
    ALL = "all"  # all of them, cut into sequences of that length: each event is predicted once


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Events:
    """Settings of how sequences are made of events.

    Args:
        actions: categorical features that say what a user did with the item; a history has them, a question does not.
        max_length: events of the longest history.
        windows: which events a user's training sequences hold; without labels.
        candidates: events of a user that are asked together, each from what came before the first one; with labels.
        context: categorical features of the user or of the request, known before the answer; with labels.
        pool_by: an action whose values have histories of their own, each an equal share of `max_length`; with labels.
        pools: those values; events with another one are in no history.
        window: length of a window of time, in the unit of the times, for --data.split.by windows; with labels.
        min_history: events that a user has before a candidate, in whichever history; with labels.
        reach: events of the user right before a question, among which its history is sought; 0: all; with labels.
        equal_times: whether events of one user may have one time.
        future_times: whether events may lie in the future.

    Example:
        >>> zg.Events(max_length=200).max_length
        200
    """

    actions: tuple[str, ...] = ()
    max_length: Length = 200
    windows: TrainingWindows = TrainingWindows.LAST
    candidates: Length = 10
    context: tuple[str, ...] = ()
    pool_by: str = ""
    pools: tuple[str, ...] = ()
    window: CountOrNone = 0
    min_history: CountOrNone = 0
    reach: CountOrNone = 0
    equal_times: EqualTimes = EqualTimes.FILE_ORDER
    future_times: FutureTimes = FutureTimes.REFUSE

    def __post_init__(self) -> None:
        is_pooled = bool(self.pool_by), bool(self.pools)
        fits = self.pool_by in self.actions and len(set(self.pools)) == len(self.pools) <= self.max_length
        if any(is_pooled) and not (all(is_pooled) and fits):
            raise SchemaError(
                expected="pool_by, one of the actions, and pools, different values of it, for each of which max_length "
                "has an event",
                found=f"pool_by = {self.pool_by!r}, pools = {list(self.pools)}, actions = {list(self.actions)}, "
                f"max_length = {self.max_length}",
                where="schema, events",
                ways_out=('pool_by = "event", pools = ["listen", "like"]', "leave both out: one history of all events"),
            )

    def to_state(self) -> dict[str, JSON]:
        """Plain data that fingerprints are made of: settings of candidates count only where they are used."""
        state = to_json(self)
        plain = to_json(Events())
        used = ("actions", "max_length", "windows", "equal_times", "future_times")
        return {name: value for name, value in state.items() if name in used or value != plain[name]}

    def check(
        self,
        by_name: Mapping[str, Feature],
        *,
        items: Items | None,
        roles: Mapping[str, str],
        taken: Mapping[str, bool],
        labels: Mapping[str, str],
        columns: Mapping[str, str],
    ) -> None:
        """Refuse events that lack a part, or that have one too many.

        Args:
            by_name: every feature.
            items: which features describe the item.
            roles: columns by role: `group`, `time`.
            taken: parts of a schema that events cannot have, and whether they are there.
            labels: the column of every label, by name.
            columns: the column of every feature, by name.

        Raises:
            SchemaError: no item, user or time; a feature that is neither of the item nor of the user nor an action; a
                label that a feature known beforehand gives away; settings of candidates without a label.
        """
        absent = [f"roles: {role}" for role, column in roles.items() if not column]
        absent += [] if items is not None else ["[items]"]
        if items is None or absent or any(taken.values()):
            raise SchemaError(
                expected="events with [items], and with group (the user) and time in [roles]",
                found=", ".join(
                    [*(f"no {name}" for name in absent), *(name for name, is_there in taken.items() if is_there)]
                ),
                where="schema, events",
                ways_out=(
                    '[items] id = "movie_id"; [roles] group = "user_id", time = "timestamp"',
                    "take weight, session and [[extra]] out",
                    "take [events] out: each row is then a sample",
                ),
            )
        _refuse_our_names(by_name, group=roles["group"], labels=labels)
        self._check_features(by_name, items)
        before = {columns[name]: name for name in (*items.features, *self.context)}
        for name, column in labels.items():
            if column in before or column in (roles["time"], roles["group"], *before.values()):
                raise SchemaError(
                    expected="labels of columns that are known after the event alone: what was done with the item",
                    found=f"label {name!r} of column {column!r}, which is also {before.get(column, 'a role')!r}",
                    where="schema, events",
                    ways_out=(
                        "take the feature out of [items] and of context: it would be known only afterwards",
                        'what was done goes into the history: actions = ["rating"]',
                    ),
                )
        names = ("context", "pools", "window", "min_history", "reach")
        given = {name: getattr(self, name) for name in names}
        if not labels and any(given.values()):
            raise SchemaError(
                expected=f"a label, where samples are candidates: {', '.join(given)} are theirs",
                found=", ".join(name for name, value in given.items() if value) + ", and no [[label]]",
                where="schema, events",
                ways_out=(
                    '[[label]] name = "like", column = "rating", positive_from = 4.0',
                    "leave them out: a next-item model is asked for what comes next",
                ),
            )

    def _check_features(self, by_name: Mapping[str, Feature], items: Items) -> None:
        """Each feature is categorical, and has one place."""
        places = (items.features, self.actions, self.context)
        known = [name for place in places for name in place]
        other = [name for name in by_name if name not in known] + [name for name in known if name not in by_name]
        of_known = [by_name[name] for name in known if name in by_name]
        plural = [feature for feature in of_known if not feature.is_id]
        twice = sorted({name for name in known if known.count(name) > 1})
        if other or plural or twice:
            raise SchemaError(
                expected="categorical features alone, each of the item ([items], features), an action or of context",
                found=", ".join(
                    [*(f"{name!r}" for name in other), *(f"{feature.name!r}, {feature.kind}" for feature in plural)]
                )
                or f"{twice}, in more than one place",
                where="schema, events",
                ways_out=(
                    'name what was done with the item: actions = ["rating"]',
                    "name what is known of the item in [items], features",
                    'name what is known of the user: context = ["country"]',
                    "take the feature out",
                ),
            )


def _refuse_our_names(features: Collection[str], *, group: str, labels: Mapping[str, str]) -> None:
    """Samples have columns of our own beside the user, the features and the columns of labels."""
    ours = {HISTORY, HISTORY_TIMES, ASKED_AT, EARLIER, NEXT_ITEM, QUESTION, *map(of_history, features)}
    taken = sorted(ours & {*features, group, *labels, *labels.values()}) or sorted({group} & set(features))
    if taken:
        raise SchemaError(
            expected=f"other names than {', '.join(sorted(ours))}, and a user who is no feature",
            found=", ".join(map(repr, taken)),
            where="schema, events",
            ways_out=(
                'rename the feature, and name its column: name = "seen", column = "history"',
                "rename the column",
            ),
        )
