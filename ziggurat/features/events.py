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
say something of the item (side information, one value an event). `actions` say what was done with it. Columns of both
are categorical features. What becomes of the events is told in `ziggurat/data/events`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ziggurat.errors import SchemaError
from ziggurat.features.items import Items
from ziggurat.typed import Length, checked

# Features of the samples that are made of events, beside the item: of what came next.
HISTORY = "history"  # items, latest last; what was done with them is in `history_ACTION`
HISTORY_TIMES = "history_times"  # when
ASKED_AT = "asked_at"  # one time: when what came next happened
EARLIER = "earlier"  # items before the history, each once, of validation and test samples: no answer to a question
NEXT_ITEM = "next_item"  # the label, always 1


def of_history(name: str) -> str:
    """The list feature that a feature of an event becomes."""
    return f"{HISTORY}_{name}"


class EqualTimes(StrEnum):
    """What events of one user at one time are."""

    FILE_ORDER = "file_order"  # in the order of the file: what stands above happened before
    REFUSE = "refuse"  # an error


class FutureTimes(StrEnum):
    """What events are that have not happened yet, by the clock of this machine."""

    REFUSE = "refuse"  # an error: a unit that is not what it seems, or a damaged clock
    ALLOW = "allow"


class TrainingWindows(StrEnum):
    """Which of its events a user's training sequences hold."""

    LAST = "last"  # the latest `max_length` + 1 of them: one sequence a user
    ALL = "all"  # all of them, cut into sequences of that length: each event is predicted once


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class Events:
    """How sequences are made of events.

    Args:
        actions: categorical features that say what a user did with the item; a history has them, a question does not.
        max_length: events of the longest history.
        windows: which events a user's training sequences hold.
        equal_times: whether events of one user may have one time.
        future_times: whether events may lie in the future.
    """

    actions: tuple[str, ...] = ()
    max_length: Length = 200
    windows: TrainingWindows = TrainingWindows.LAST
    equal_times: EqualTimes = EqualTimes.FILE_ORDER
    future_times: FutureTimes = FutureTimes.REFUSE

    def check(
        self, kinds: Mapping[str, str], *, items: Items | None, roles: Mapping[str, str], taken: Mapping[str, bool]
    ) -> None:
        """Refuse events that lack a part, or that have one too many.

        Args:
            kinds: the kind of every feature, by name.
            items: which features describe the item.
            roles: columns by role: `group`, `time`.
            taken: parts of a schema that events cannot have, and whether they are there.

        Raises:
            SchemaError: no item, user or time; a feature that is neither of the item nor an action; a label.
        """
        absent = [f"roles: {role}" for role, column in roles.items() if not column]
        absent += [] if items is not None else ["[items]"]
        if absent or any(taken.values()):
            raise SchemaError(
                expected="events with [items], and with group (the user) and time in [roles]; the label is what "
                "comes next",
                found=", ".join(
                    [*(f"no {name}" for name in absent), *(name for name, is_there in taken.items() if is_there)]
                ),
                where="schema, events",
                ways_out=(
                    '[items] id = "movie_id"; [roles] group = "user_id", time = "timestamp"',
                    "take labels, weight and session out",
                    "take [events] out: each row is then a sample",
                ),
            )
        assert items is not None
        _refuse_our_names(kinds, group=roles["group"])
        known = (*items.features, *self.actions)
        other = [name for name in kinds if name not in known] + [name for name in self.actions if name not in kinds]
        plural = [name for name in known if name in kinds and kinds[name] != "categorical"]
        if other or plural or set(self.actions) & set(items.features):
            raise SchemaError(
                expected="categorical features alone, each of the item ([items], features) or an action",
                found=", ".join([*(f"{name!r}" for name in other), *(f"{name!r}, {kinds[name]}" for name in plural)])
                or f"{sorted(set(self.actions) & set(items.features))}, which are both",
                where="schema, events",
                ways_out=(
                    'name what was done with the item: actions = ["rating"]',
                    "name what is known of the item in [items], features",
                    "take the feature out",
                ),
            )


def _refuse_our_names(kinds: Mapping[str, str], *, group: str) -> None:
    """Samples have columns of our own beside the user and the features."""
    ours = {HISTORY, HISTORY_TIMES, ASKED_AT, EARLIER, NEXT_ITEM, *map(of_history, kinds)}
    taken = sorted(ours & {*kinds, group}) or sorted({group} & set(kinds))
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
