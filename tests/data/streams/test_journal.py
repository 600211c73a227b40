"""A journal that is read again is the one that was written, whenever its writer died, and grows with what changes."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.streams import journal as module
from ziggurat.data.streams.journal import ArrivedFile, Change, Journal, JournalFile, Piece, Window
from ziggurat.data.streams.windows import Clock, StreamConfig
from ziggurat.errors import CheckpointError
from ziggurat.features.label_state import LabelState


def empty() -> Journal:
    return Journal(config=StreamConfig(by="hour"), reading="abc")


def file_change(number: int, *, keys: list[int], late: int = 0) -> Change:
    part = f"{number:05}.parquet"
    file = ArrivedFile(
        path=f"{number}.csv",
        place=f"/{number}.csv",
        num_bytes=number,
        tag="1",
        sha256=f"{number:064x}",
        first_row=0,
        rows=len(keys) + late,
    )
    pieces = [Piece(file=number, part=part, group=group, rows=2) for group in range(len(keys) + late)]
    return Change(
        clock=Clock(column="at", per_second=1, seen=957_139_200) if number == 0 else None,
        file=file,
        arrived=[
            Window(key=key, name=f"w{key}", rows=2, pieces=[piece]) for key, piece in zip(keys, pieces, strict=False)
        ],
        late=pieces[len(keys) :],
        newest={str(key): float(key) for key in keys},
    )


def test_lessons_of_a_window_go_by_state_unless_an_earlier_version_has_called_it_done() -> None:
    """A window that an earlier version has begun to train keeps the order in which it did."""
    states = [LabelState.ASSUMED, LabelState.KNOWN, LabelState.ASSUMED, LabelState.KNOWN]
    pieces = [Piece(file=0, part="a", group=group, rows=1, state=state) for group, state in enumerate(states)]
    for by_state, expected in ((True, [1, 3, 0, 2]), (False, [0, 1, 2, 3])):
        journal = empty()
        journal.apply(Change(arrived=[Window(key=1, name="w1")], lessons={"1": pieces}))
        journal.apply(Change(is_done=True, by_state=by_state))
        assert [piece.group for piece in journal.done[0].lessons] == expected


@st.composite
def changes(draw: st.DrawFn) -> list[list[Change]]:
    """Transactions that may follow each other."""
    found: list[list[Change]] = []
    journal = empty()
    for number in range(draw(st.integers(1, 12))):
        first = journal.done[-1].key + 1 if journal.done else 0
        group = [file_change(number, keys=sorted(draw(st.sets(st.integers(first, first + 4), max_size=3))))]
        if journal.done:
            group.append(file_change(number, keys=[], late=draw(st.integers(0, 2))))
        for change in group:
            journal.apply(copy.deepcopy(change))
        while journal.open and draw(st.booleans()):
            change = Change(is_done=True, done_until=float(journal.open[0].key))
            journal.apply(copy.deepcopy(change))
            group.append(change)
        if draw(st.booleans()):
            copies = [dataclasses.replace(journal.files[-1], path=f"again-{number}")]
            group.append(Change(copies=copies, num_dealt=number, dropped=1, forgotten=len(journal.done)))
            journal.apply(copy.deepcopy(group[-1]))
        found.append(group)
    return found


@settings(max_examples=60, deadline=None)
@given(changes(), st.data())
def test_what_is_read_again_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, transactions: list[list[Change]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MIN_BYTES", data.draw(st.sampled_from([0, 1 << 16])))
        kept = JournalFile(folder)
        journal = empty()
        for group in transactions:
            for change in group:
                journal.apply(copy.deepcopy(change))
            kept.write(journal, group, durable=False)
            assert JournalFile(folder).read() == journal
            if data.draw(st.booleans()):  # another process goes on
                kept = JournalFile(folder)
                read = kept.read()
                assert read is not None
                journal = read


def test_a_line_that_a_kill_has_torn_never_was(tmp_path: Path) -> None:
    kept = JournalFile(tmp_path)
    journal = empty()
    states: list[Journal] = []
    for number in range(3):
        change = file_change(number, keys=[number])
        journal.apply(change)
        kept.write(journal, [change])
        states.append(copy.deepcopy(journal))
    lines = (tmp_path / "stream.jsonl").read_bytes()
    second = lines.index(b"\n") + 1
    again = kept
    for end in range(second + 1, len(lines) - 1):
        (tmp_path / "stream.jsonl").write_bytes(lines[:end])
        again = JournalFile(tmp_path)
        assert again.read() == states[1]
    change = file_change(2, keys=[7])
    again.write(states[1], [])  # what is torn is gone before a line comes behind it
    states[1].apply(change)
    again.write(states[1], [change])
    assert JournalFile(tmp_path).read() == states[1]


def test_a_kill_between_state_and_lines_makes_no_change_twice(tmp_path: Path) -> None:
    kept = JournalFile(tmp_path)
    journal = empty()
    for number in range(3):
        change = file_change(number, keys=[number])
        journal.apply(change)
        kept.write(journal, [change])
    lines = (tmp_path / "stream.jsonl").read_bytes()
    again = JournalFile(tmp_path)
    assert again.read() == journal
    again.write(journal, [Change()])  # writes the state anew
    (tmp_path / "stream.jsonl").write_bytes(lines)
    assert JournalFile(tmp_path).read() == journal


def test_damage_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    kept = JournalFile(tmp_path)
    journal = empty()
    for number in range(4):
        change = file_change(number, keys=[number])
        journal.apply(change)
        kept.write(journal, [change])
    path = tmp_path / "stream.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0].replace("1.csv", "9.csv") + lines[1])
    with pytest.raises(CheckpointError, match="line 1"):
        JournalFile(tmp_path).read()
    path.write_text(lines[0] + lines[2])
    with pytest.raises(CheckpointError, match="lines are missing"):
        JournalFile(tmp_path).read()


def test_the_bytes_of_many_files_are_in_proportion_to_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(num_files: int) -> int:
        total = 0
        append = module.append_line
        write = module.JOURNAL.write

        def counted_append(path: Path, line: str, *, durable: bool = True) -> None:
            nonlocal total
            total += len(line)
            append(path, line, durable=durable)

        class Counted:
            def write(self, path: Path, content: object) -> None:
                nonlocal total
                write(path, content)
                total += path.stat().st_size

        folder = tmp_path / str(num_files)
        folder.mkdir()
        kept = JournalFile(folder)
        journal = empty()
        with monkeypatch.context() as patch:
            patch.setattr(module, "append_line", counted_append)
            patch.setattr(module, "JOURNAL", Counted())
            patch.setattr(module, "_MIN_BYTES", 1000)
            for number in range(num_files):
                change = file_change(number, keys=[number // 24])
                journal.apply(change)
                kept.write(journal, [change], durable=False)
        return total

    few, many = written(100), written(800)
    assert many < 8 * 2.5 * few
    assert many < 800 * 2500
