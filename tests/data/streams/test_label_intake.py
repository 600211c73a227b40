"""Messages with labels wait until they are needed, enter the journal with their position, and are covered with rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.data.streams.test_receiving import ListedBroker
from tests.runs.stream.test_stream_runs import DAY, SCHEMA, START, config_of
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.brokers import Reader
from ziggurat.data.streams.intake import Taken
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.label_intake import LabelIntake
from ziggurat.data.streams.receiving import Receiving
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import DataError

DELAY = DelayConfig(policy=LabelDelay.WAIT, column="known", key="id", attribution_s=DAY)


class World:
    """A list of rows, one of labels, and who receives both."""

    def __init__(self, folder: Path) -> None:
        self.rows = ListedBroker()
        self.labels = ListedBroker()
        self.folder = folder
        self.restart()

    def restart(self) -> None:
        data = config_of(Path("unused.csv")).data
        self.arrivals = Arrivals(self.folder, config=StreamConfig(by="day", delay=DELAY), data=data, schema=SCHEMA)
        self.intake = LabelIntake(self.arrivals)
        self.receivings = [
            Receiving(broker, "listed://here", intake=intake, data=data, reader=Reader(name="me"), follows=True)
            for broker, intake in ((self.rows, self.arrivals), (self.labels, self.intake))
        ]

    def add(self, *, rows: Sequence[float] = (), labels: Sequence[float] = (), **more: str) -> None:
        """Rows that are called after their moments, in days; labels of rows of these moments, an hour behind them."""
        for day in rows:
            self.rows.add([day], id=f"e{day}")
        for day in labels:
            self.labels.rows.append({"id": f"e{day}", "known": str(int(START + day * DAY + 3600))} | more)

    def look(self) -> tuple[Taken, Taken]:
        rows, labels = self.receivings
        found = rows.look(latest_s=np.inf, told=lambda *_: None)
        taken = labels.look(latest_s=np.inf, told=lambda *_: None) if self.intake.can_receive else Taken()
        return found, taken


def test_labels_stay_in_the_broker_until_a_row_has_shown_the_unit_of_times(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add(labels=[0.1])
    assert world.look() == (Taken(), Taken())
    world.add(rows=[0.1, 1.1], labels=[1.1])
    rows, labels = world.look()
    assert (rows.rows, labels.labels) == (2, 2)


def test_labels_wait_in_memory_until_they_end_a_window_or_complete_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add(rows=[0.1, 0.2])
    world.look()
    world.add(labels=[0.1, 0.2])
    assert world.look()[1].labels == 0
    world.add(rows=[1.1])
    world.look()
    assert world.intake.position == ""
    world.add(labels=[1.1])
    assert world.look()[1].labels == 3, "a label of the next day ends the first one"
    world.arrivals.close_windows()
    assert world.arrivals.finish_next(is_over=False)
    assert world.arrivals.truth(1) is None
    world.add(labels=[1.15])  # not yet an attribution window behind the newest row of the first day
    assert world.look()[1].labels == 0
    world.add(labels=[1.3])
    assert world.look()[1].labels == 2
    world.arrivals.close_windows()
    truth = world.arrivals.truth(1)
    assert truth is not None
    assert truth.is_positive.tolist() == [True, True]


def test_labels_that_waited_in_memory_are_asked_for_again_by_the_next_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add(rows=[0.1])
    world.look()
    world.add(labels=[0.1])
    world.look()
    world.restart()
    world.add(rows=[1.1], labels=[1.1])
    assert world.look()[1].labels == 2
    world.restart()
    assert world.intake.position == "2"
    assert world.look()[1].labels == 0


def test_a_label_without_a_value_is_a_positive_and_an_empty_one_is_bad(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.add(rows=[0.1, 0.2, 1.1])
    world.add(labels=[0.1])
    world.add(labels=[0.2], click="0")
    world.add(labels=[1.3])
    world.look()
    world.arrivals.close_windows()
    assert world.arrivals.finish_next(is_over=False)
    truth = world.arrivals.truth(1)
    assert truth is not None
    assert truth.is_positive.tolist() == [True, False]
    world.add(labels=[1.4], click="")
    world.look()
    with pytest.raises(DataError, match="entry 3"):
        world.receivings[1].flush(latest_s=np.inf)


def test_records_of_received_labels_are_few_and_cover_what_no_row_needs(tmp_path: Path) -> None:
    world = World(tmp_path)
    for day in range(12):
        for part in (0.1, 0.5):
            world.add(rows=[day + part], labels=[day + part])
            world.look()
            for receiving in world.receivings:
                receiving.flush(latest_s=np.inf)
            world.arrivals.close_windows()
            while world.arrivals.finish_next(is_over=False):
                pass
        done = len(world.arrivals.journal.done)
        world.arrivals.forget(max(0, done - 1))
        if day > 4:
            journal = world.arrivals.journal
            assert len(journal.label_files) <= 10
            assert len(journal.logs) <= 20
            # All labels of the rows of this day and of two before may be needed, and no others.
            assert 2 * (day - 3) <= int(world.intake.covered(done)) <= 2 * day
            assert int(world.arrivals.covered(done)) <= int(world.intake.covered(done)) + 1
    numbers = world.arrivals.journal.num_label_files
    world.restart()
    assert world.arrivals.journal.num_label_files == numbers == 24
    assert dataclasses.asdict(world.arrivals.journal)["num_labels_folded"] > 10
