"""LabelIntake: the messages of a broker that are records of labels, for rows that wait for them.

    XADD bought '*' impression e17 bought_at 1764240000            a positive; with the field of the label, what it says

A record waits in the broker until the first row has come, which shows in which unit times are. It is needed for as long
as its row is, and while its row may still come: whoever takes over the rows that were not acknowledged needs their
labels, so these are acknowledged behind them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ziggurat.data.preprocess.values.times import readable_times
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.awaiting_labels import AwaitingLabels
from ziggurat.data.streams.intake import ReceivedRows, Taken
from ziggurat.data.streams.journal import Journal
from ziggurat.data.streams.windows import Cut


class LabelIntake:
    """Takes records of labels into the journal of a stream.

    Args:
        arrivals: of its rows.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    @property
    def received_columns(self) -> tuple[str, ...]:
        """Return the columns of a record."""
        return self._awaiting.record_columns

    @property
    def default_cells(self) -> Mapping[str, str]:
        """Return the label of a record without one: it is a positive."""
        awaiting = self._awaiting
        return {awaiting.record_columns[-1]: awaiting.positive_cell}

    @property
    def position(self) -> str:
        """The position of the broker behind the labels that were received; "" before the first."""
        files = self._journal.label_files
        return files[-1].position if files else ""

    @property
    def can_receive(self) -> bool:
        """Return whether a row has come, and shown how times are read."""
        return self._arrivals.cut is not None

    def would_finish(self, chunk: RawChunk) -> bool:
        """Return whether records that are not taken may close a window, or complete the labels of one."""
        cut = self._cut
        clock = cut.clock
        column = chunk.frame[self._awaiting.record_columns[1]]
        times = readable_times(column, order=clock.date_order, is_date=clock.is_date)
        return self._awaiting.would_settle(times, cut=cut)

    def has_enough(self) -> bool:
        """Return whether labels have come behind the end of the oldest window that is open."""
        return self._awaiting.have_labels_passed(cut=self._arrivals.cut)

    def receive(self, rows: ReceivedRows, *, latest_s: float = np.inf) -> Taken:
        """Take records, and the position behind them with them."""
        arrived = self._awaiting.receive(rows, cut=self._cut, latest_s=latest_s)
        return Taken(
            bad=arrived.bad,
            lost_labels=arrived.lost,
            label_files=1,
            labels=arrived.rows,
            bad_labels=arrived.bad,
        )

    def covered(self, number: int) -> str:
        """Return the position up to which no row behind a window, nor one that may still come, needs a label."""
        count = self._journal.labels_covered(number)
        return self._journal.label_files[count - 1].position if count else ""

    @property
    def _journal(self) -> Journal:
        return self._arrivals.journal

    @property
    def _awaiting(self) -> AwaitingLabels:
        awaiting = self._arrivals.awaiting
        assert awaiting is not None, "labels have records of their own"
        return awaiting

    @property
    def _cut(self) -> Cut:
        cut = self._arrivals.cut
        assert cut is not None, "a row has come before"
        return cut
