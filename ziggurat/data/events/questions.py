"""Questions: which event of a user is predicted from which events before it, split by split.

    user     e_0  e_1  e_2  e_3  e_4  e_5
    leave one out                    │    │    └─ test: history e_0 … e_4
                                     │    └────── validation: history e_0 … e_3
             └── training: e_3, from e_0 … e_2; on the way each event is predicted from those before it

    by time      │ training ── │ validation │ test     each event of validation and test is a question

A history is all that comes before its question in the log, cut to the latest `max_length` events; nothing that comes
after the question is in it. A training sequence that is longer is cut to its end (`windows = last`), or into
sequences that each begin with the event that the one before ends with (`windows = all`): then every training event but
a user's first is predicted exactly once an epoch.

A user needs two events for a question. Validation asks users with three or more, and training wants two of their own.
Without validation (`valid_fraction = 0`) all events of a user but the last one train, for as many epochs as a run with
validation has shown to be best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from ziggurat.data.events.log import EventLog
from ziggurat.errors import ConfigError
from ziggurat.features.events import TrainingWindows

WITHOUT_VALID = ", all others train; nothing validates"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Events that are predicted, as positions in the log, in the order of users and times.

    Args:
        targets: (Q,) what is predicted.
        begins: (Q,) first event of each history, which ends before the target.
        firsts: (Q,) first event of the user.
    """

    targets: Int64[np.ndarray, " Q"]
    begins: Int64[np.ndarray, " Q"]
    firsts: Int64[np.ndarray, " Q"]

    def rows(self, first: int, last: int) -> Questions:
        """Questions `first` to `last`."""
        some = slice(first, last)
        return Questions(targets=self.targets[some], begins=self.begins[some], firsts=self.firsts[some])


def leave_one_out(
    log: EventLog, *, max_length: int, windows: TrainingWindows, validates: bool = True
) -> tuple[Questions, Questions, Questions]:
    """Questions of training, validation and test: a user's last event is the test, the one before it validates.

    Args:
        log: the events.
        max_length: of a history.
        windows: of training.
        validates: whether the event before the last one validates; else it is trained, and validation has no question.
    """
    bounds = log.bounds()
    firsts = bounds[:-1]
    counts = np.diff(bounds)
    test = _asked(firsts[counts >= 2], bounds[1:][counts >= 2] - 1, max_length=max_length)
    is_asked = (counts >= 3) & validates
    valid = _asked(firsts[is_asked], bounds[1:][is_asked] - 2, max_length=max_length)
    num_later = 2 if validates else 1
    train = _training(firsts, bounds[1:] - num_later, max_length=max_length, windows=windows)
    return train, valid, test


def by_time(
    log: EventLog, *, fractions: tuple[float, float], max_length: int, windows: TrainingWindows
) -> tuple[Questions, Questions, Questions]:
    """Questions of training, validation and test by two times, with about these shares of the events after them.

    Args:
        log: the events.
        fractions: of validation and test.
        max_length: of a history.
        windows: of training.

    Raises:
        ConfigError: too few distinct times.
    """
    valid_from, test_from = time_cuts(log, fractions=fractions)
    total = len(log.times)
    bounds = log.bounds()
    cut = bounds[:-1] + np.bincount(log.users[log.times < valid_from], minlength=log.num_users)
    train = _training(bounds[:-1], cut, max_length=max_length, windows=windows)
    # The first event of a user has no history that it could be asked by.
    later = np.flatnonzero((log.times >= valid_from) & (np.arange(total) > bounds[:-1][log.users]))
    is_test = log.times[later] >= test_from
    parts = [
        _asked(bounds[:-1][log.users[some]], some, max_length=max_length) for some in (later[~is_test], later[is_test])
    ]
    return train, parts[0], parts[1]


def time_cuts(log: EventLog, *, fractions: tuple[float, float]) -> tuple[int, int]:
    """The times from which events are for validation, and for the test: about these shares of them.

    Args:
        log: the events.
        fractions: of validation and test.

    Raises:
        ConfigError: too few distinct times.
    """
    times = np.sort(log.times)
    total = len(times)
    cuts = [times[min(total - 1, round(total * (1 - share)))] for share in (sum(fractions), fractions[1])]
    ends = [int(times[-1]) + 1 if not share else int(cut) for cut, share in zip(cuts, fractions, strict=True)]
    valid_from = ends[0] if fractions[0] else ends[1]
    test_from = ends[1]
    if int(times[0]) >= valid_from or (fractions[0] and valid_from >= test_from):
        raise ConfigError(
            expected="distinct times for training, validation and test",
            found=f"{len(np.unique(times)):,} distinct times of {total:,} events, cut at {valid_from} and {test_from}",
            where="split by time",
            ways_out=("other fractions: --data.split.valid-fraction, --data.split.test-fraction", "leave one out"),
        )
    return valid_from, test_from


def open_questions(log: EventLog, *, max_length: int) -> Questions:
    """Ask what comes after the last event of each user; a target is the place behind that event."""
    bounds = log.bounds()
    return _asked(bounds[:-1], bounds[1:], max_length=max_length)


def _asked(firsts: np.ndarray, targets: np.ndarray, *, max_length: int) -> Questions:
    return Questions(targets=targets, begins=np.maximum(firsts, targets - max_length), firsts=firsts)


def _training(firsts: np.ndarray, ends: np.ndarray, *, max_length: int, windows: TrainingWindows) -> Questions:
    """Sequences of the events `firsts` to `ends` (not included) of each user."""
    enough = ends - firsts >= 2
    firsts = firsts[enough]
    lasts = ends[enough] - 1
    if windows is TrainingWindows.LAST:
        return _asked(firsts, lasts, max_length=max_length)
    counts = -(-(lasts - firsts) // max_length)
    owner = np.repeat(np.arange(len(firsts)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    targets = lasts[owner] - (counts[owner] - 1 - number) * max_length
    return _asked(firsts[owner], targets, max_length=max_length)
