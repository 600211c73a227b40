"""Rows of a broker wait until they are needed, enter the journal with their position, and leave no end of records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from tests.runs.stream.test_stream_runs import DAY, SCHEMA, START, config_of
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.brokers import Broker, BrokerAway, Messages, Reader, Subscription
from ziggurat.data.streams.intake import ReceivedRows, Taken
from ziggurat.data.streams.receiving import Receiving
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import DataError, UnavailableError


class _Listed(Subscription):
    """Gives entries of a list; a position is how many were read."""

    def __init__(self, broker: ListedBroker) -> None:
        self._broker = broker

    def read(self, after: str, *, most: int) -> Messages:
        if self._broker.away:
            self._broker.away -= 1
            raise BrokerAway("nobody is there")
        begin = int(after or 0)
        found = [(f"{begin + place}", row) for place, row in enumerate(self._broker.rows[begin : begin + most])]
        return Messages.of(found, position=str(begin + len(found)) if found else after)

    def acknowledge(self, position: str) -> None:
        self._broker.acknowledged.append(position)


class ListedBroker(Broker):
    """A list of entries."""

    name = "listed"

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []
        self.acknowledged: list[str] = []
        self.away = 0

    def add(self, days: Sequence[float], **more: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for day in days:
            at = str(int(START + day * DAY))
            self.rows.append({"user": "u1", "item": "2", "age": "0.5", "click": "1", "at": at} | more)

    def subscribe(self, url: str, *, reader: Reader, after: str) -> Subscription:
        return _Listed(self)


class World:
    """A list, and who receives it."""

    def __init__(self, folder: Path, *, by: str = "day", follows: bool = True, **data: Any) -> None:
        self.broker = ListedBroker()
        self.folder = folder
        self.said: list[str] = []
        self._settings = {"by": by}
        self._follows = follows
        self._data = dataclasses.replace(config_of(Path("unused.csv")).data, **data)
        self.restart()

    def restart(self) -> None:
        config = StreamConfig(**self._settings)
        self.arrivals = Arrivals(self.folder, config=config, data=self._data, schema=SCHEMA)
        self.receiving = Receiving(
            self.broker,
            "listed://here",
            intake=self.arrivals,
            data=self._data,
            reader=Reader(name="me", say=self.said.append),
            follows=self._follows,
        )

    def look(self) -> Taken:
        return self.receiving.look(latest_s=np.inf, told=lambda *_: None)

    def rows_of(self, number: int) -> list[int]:
        """Positions over all rows of a window that is done."""
        chunks = self.arrivals.chunks(self.arrivals.journal.done[number - 1])
        return [int(row) for chunk in chunks for row in chunk.global_rows]


def test_rows_wait_until_one_of_a_later_window_has_come(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.broker.add([0.1, 0.2])
    assert world.look().rows == 2, "the first row shows how time is cut"
    world.broker.add([0.3, 0.4])
    assert world.look().rows == 0
    assert world.arrivals.position == "2"
    world.broker.add([1.1])
    assert world.look().rows == 3
    assert world.arrivals.finish_next(is_over=False)
    assert world.rows_of(1) == [0, 1, 2, 3]


def test_rows_that_waited_are_asked_for_again_by_the_next_start(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.broker.add([0.1])
    world.look()
    world.broker.add([0.2, 0.3])
    assert world.look().rows == 0
    world.restart()
    world.broker.add([1.1])
    assert world.look().rows == 3
    world.arrivals.finish_next(is_over=False)
    assert world.rows_of(1) == [0, 1, 2]


def test_rows_wait_no_longer_than_half_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.broker.add([0.1])
    world.look()
    world.broker.add([0.2])
    assert world.look().rows == 0
    monkeypatch.setattr("ziggurat.data.streams.receiving._LINGER_S", 0.0)
    assert world.look().rows == 1


def test_windows_of_rows_are_full_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, by="rows:4")
    world.broker.add([0.1])
    assert world.look().rows == 1
    world.broker.add([0.2, 0.3])
    assert world.look().rows == 0
    world.broker.add([0.4])
    assert world.look().rows == 3
    assert world.arrivals.finish_next(is_over=False)
    assert world.rows_of(1) == [0, 1, 2, 3]


def test_a_stream_that_is_not_followed_ends_with_what_is_there(tmp_path: Path) -> None:
    world = World(tmp_path, follows=False)
    world.broker.add(np.linspace(0.0, 3.9, 100).tolist())
    assert world.look().rows == 100
    assert len(world.arrivals.journal.open) == 4


def test_only_what_a_window_and_those_before_it_contain_is_acknowledged(tmp_path: Path) -> None:
    world = World(tmp_path)
    for day in range(4):
        world.broker.add([day + 0.1, day + 0.2])
        world.look()
    for number in range(1, 4):
        assert world.arrivals.finish_next(is_over=False)
        world.receiving.acknowledge(number)
        world.receiving.acknowledge(number)
    # Rows of a day come in two parts: the first with the first row of the day, the second with that of the next one.
    assert world.broker.acknowledged == ["2", "4", "6"]


def test_records_of_rows_that_are_gone_become_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    expected: list[list[int]] = []
    for day in range(30):
        for hour in range(3):
            world.broker.add([day + hour / 24])
            world.look()
        if day:
            assert world.arrivals.finish_next(is_over=False)
            expected.append(world.rows_of(day))
            world.receiving.acknowledge(day)
            world.arrivals.forget(day)
        if day % 7 == 3:
            world.restart()
        assert len(world.arrivals.journal.files) <= 6
    assert [row for rows in expected for row in rows] == list(range(len(world.broker.rows) - 3))
    world.broker.add([40.0])
    world.look()
    assert world.arrivals.num_rows == len(world.broker.rows) == 91
    assert world.broker.acknowledged[-1] == "87"


def test_bad_rows_are_named_by_their_entry(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.broker.add([0.1, 0.2])
    world.broker.rows.append({"usr": "u1"})
    with pytest.raises(DataError, match="columns of the schema") as refused:
        world.look()
    assert refused.value.where == "listed://here, entry 2"
    assert "XDEL" not in str(refused.value.ways_out), "this broker is not Redis"
    assert any("take the messages that differ out of the broker" in way for way in refused.value.ways_out)
    world.broker.rows[2] = world.broker.rows[1] | {"at": "soon"}
    world.restart()
    with pytest.raises(DataError) as refused:
        world.look()
    assert refused.value.where == "listed://here, entry 2, column 'at'"
    assert world.arrivals.position == ""

    world = World(tmp_path / "aside", bad_rows=BadRowPolicy.QUARANTINE)
    world.broker.add([0.1, 0.2])
    world.broker.rows.append({"usr": "u1"})
    world.broker.add([0.3, 1.0])
    taken = world.look()
    assert (taken.rows, taken.bad) == (5, 1)
    world.arrivals.finish_next(is_over=False)
    assert world.rows_of(1) == [0, 1, 3], "a bad one keeps its number"


def test_one_message_of_another_type_is_a_bad_row_and_not_those_beside_it(tmp_path: Path) -> None:
    """Its rows entered the journal, and no later start could read them."""
    wrong = {"user": ["u1"], "item": "2", "age": "0.5", "click": "1", "at": str(START)}
    for policy in BadRowPolicy:
        world = World(tmp_path / policy.value, bad_rows=policy)
        for number in range(4):
            row = wrong if number == 1 else {**wrong, "user": "u2"}
            world.broker.rows.append({"json": json.dumps(row)})
        if policy is BadRowPolicy.ERROR:
            with pytest.raises(DataError, match="categorical feature 'user'") as refused:
                world.look()
            assert "entry 1" in refused.value.where
            assert world.arrivals.position == ""
            continue
        taken = world.look()
        assert (taken.rows, taken.bad) == (4, 1)
        assert world.arrivals.finish_next(is_over=True)
        assert world.rows_of(1) == [0, 2, 3]


def test_rows_of_several_kinds_are_numbered_as_they_came(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.broker.add([0.1])
    row = world.broker.rows[0]
    world.broker.rows.append({"json": json.dumps({"user": "u2", "item": 3, "age": 1, "click": 0, "at": START + 5})})
    table = pl.DataFrame([row | {"user": f"u{number}"} for number in range(3)]).to_arrow()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    world.broker.rows.append({"arrow": sink.getvalue().to_pybytes()})  # type: ignore[dict-item]
    world.broker.add([0.2, 1.0])
    assert world.look().rows == 7
    world.arrivals.finish_next(is_over=False)
    assert world.rows_of(1) == [0, 1, 2, 3, 4, 5]
    chunks = world.arrivals.chunks(world.arrivals.journal.done[0])
    users = [user for chunk in chunks for user in chunk.frame["user"]]
    assert users == ["u1", "u2", "u0", "u1", "u2", "u1"]


def test_a_broker_that_is_away_is_asked_again_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.broker.add([0.1])
    world.look()
    world.broker.away = 3
    world.broker.add([1.1])
    for _ in range(3):
        assert world.look().rows == 0
    assert world.look().rows == 1
    assert [line.partition(",")[0].partition(" (")[0] for line in world.said] == [
        "the broker of listed://here does not answer",
        "the broker of listed://here answers again",
    ]
    assert not world.receiving.is_quiet(5.0)
    monkeypatch.setattr("ziggurat.data.streams.receiving._PATIENCE_S", 0.0)
    monkeypatch.setattr("ziggurat.data.streams.receiving._NAP_S", 0.0)
    world = World(tmp_path, follows=False)
    world.broker.away = 3
    with pytest.raises(UnavailableError, match="a broker that answers") as refused:
        world.look()
    assert "redis" not in str(refused.value)


def test_fields_that_nobody_asked_for_and_columns_that_went_away_are_said(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.broker.add([0.1], page="7")
    world.look()
    world.broker.add([0.2] * 1500, page="7")
    for row in world.broker.rows[1:]:
        del row["item"]
    world.look()
    world.look()
    assert world.said == [
        "fields that nothing reads here, left out: page",
        "warning: no message of the last 1,000 has the field 'item'",
    ]


def test_the_order_of_dates_is_that_of_all_rows_that_came_together(tmp_path: Path) -> None:
    """Chunks of the first days of a month show nothing by themselves."""

    def chunk(*days: int) -> RawChunk:
        at = [f"{day:02}/05/2000 08:00" for day in days]
        return RawChunk.of(
            pl.DataFrame({"user": ["u1"] * len(days), "item": ["2"] * len(days), "age": 0.5, "click": 1, "at": at})
        )

    arrivals = Arrivals(tmp_path, config=StreamConfig(by="day"), data=config_of(Path("unused.csv")).data, schema=SCHEMA)
    first = chunk(1, 2)
    second = dataclasses.replace(chunk(13, 14), first_row=2, start=2)
    arrivals.receive(ReceivedRows(name="listed://here", chunks=(first, second), num_read=4, position="4"))
    assert [window.name for window in arrivals.journal.open] == [
        "2000-05-01",
        "2000-05-02",
        "2000-05-13",
        "2000-05-14",
    ]
