"""Parts of a side table: what a version was logged in is read, or refused; nothing of it changes without a word."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ziggurat.data.teachers import history, part_list, side_table
from ziggurat.data.teachers.history import index_of
from ziggurat.data.teachers.join import facts_of_teacher
from ziggurat.data.teachers.part_list import PartList
from ziggurat.data.teachers.side_table import (
    VERSION,
    TeacherVersion,
    VersionFolder,
    unchecked_note,
    versions_in,
)
from ziggurat.errors import DataError, ZigguratError
from ziggurat.files import Format

FACTS = TeacherVersion(
    teacher="seer",
    version="one",
    labels=("click",),
    are_probabilities=(True,),
    example_columns=("user", "at"),
    watermark=7.0,
    is_calendar=True,
    vectors="bf16",
    vector_dim=2,
    history_key="user",
)
FORMER = Format(name="ziggurat.teacher", what="a version of a teacher")


def write(version: VersionFolder, seed: int, *, rows: int = 5) -> Path:
    rng = np.random.default_rng(seed)
    return version.write_part(
        rng.integers(0, 1 << 60, size=(rows, 2), dtype=np.uint64),
        rng.normal(size=(rows, 1)).astype(np.float32),
        rng.integers(0, 255, size=(rows, 4), dtype=np.uint8),
        keys=rng.integers(1, 9, size=rows, dtype=np.uint64),
        times=rng.normal(size=rows),
    )


def table(folder: Path, *, facts: TeacherVersion = FACTS, parts: int = 2, first: int = 0) -> VersionFolder:
    version = VersionFolder.begin(folder, facts)
    for seed in range(first, first + parts):
        write(version, seed)
    return version


def as_former(version: VersionFolder) -> None:
    """Describe a version as a Ziggurat did that listed no parts."""
    content = json.loads((version.path / "version.json").read_text())
    FORMER.write(version.path / "version.json", {"facts": content["facts"]})


def forget() -> None:
    """Remember no more of any file than a process does that begins."""
    for each in (history._opened, part_list._digest, side_table._known_description):
        each.cache_clear()


def all_of(folder: Path) -> list[object]:
    """All that students, streams and loggers read of a side table."""
    forget()
    found: list[object] = [facts_of_teacher(str(folder))]
    for version in versions_in(folder):
        found.append(version.facts)
        order, logits = version.logits()
        found += [order.order.tolist(), logits.tobytes(), len(version.index())]
        for part in version.parts:
            ids, keys, times = version.owners_of(part)
            found += [part.name, version.vectors_of(part).tobytes(), ids.tobytes(), keys.tobytes(), times.tobytes()]
        index = index_of(version)
        found += [np.array(each).tobytes() for each in (index.keys, index.times, index.examples, index.vectors)]
    return found


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A side table of two versions, with their vectors by user."""
    folder = tmp_path_factory.mktemp("whole") / "teacher"
    table(folder)
    table(folder, facts=replace(FACTS, version="two", watermark=9.0), parts=1, first=7)
    (folder / "seer/one/lock").write_text("process 1 on a machine")
    all_of(folder)
    return folder


def flips_of(whole: Path) -> int:
    return sum(path.stat().st_size for path in files_of(whole))


def check_flip(whole: Path, place: int, mask: int) -> bool:
    """Change a byte, read all, put the byte back; return whether that was refused."""
    before = all_of(whole)
    for path in files_of(whole):
        size = path.stat().st_size
        if place >= size:
            place -= size
            continue
        content = path.read_bytes()
        path.write_bytes(content[:place] + bytes([content[place] ^ mask]) + content[place + 1 :])
        found: list[object] | ZigguratError
        try:
            found = all_of(whole)
        except ZigguratError as error:
            found = error
        finally:
            path.write_bytes(content)
        if isinstance(found, ZigguratError):
            assert all((found.expected, found.found, found.where, found.ways_out))
            return True
        assert found == before, f"{path.name}, byte {place}"
        return False
    raise AssertionError("no such byte")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_byte_that_flips_is_refused_or_changes_nothing_that_is_read(whole: Path, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, flips_of(whole) - 1))
    check_flip(whole, place, data.draw(st.integers(1, 255)))


@pytest.mark.slow
def test_every_fifth_byte_that_flips_is_refused_or_changes_nothing_that_is_read(whole: Path) -> None:
    places = range(0, flips_of(whole), 5)
    refused = sum(check_flip(whole, place, 1 << place % 8) for place in places)
    print(f"\n{refused:,} of {len(places):,} flips refused")
    assert refused > 0.9 * len(places)


def remove(path: Path) -> None:
    path.unlink()


def add(path: Path) -> None:
    shutil.copy(path, path.with_name("part-00002.parquet"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def exchange(path: Path) -> None:
    shutil.copy(path.with_name("part-00000.parquet"), path)


def take_from_another_version(path: Path) -> None:
    shutil.copy(path.parents[1] / "two/part-00000.parquet", path)


def take_description_of_another_version(path: Path) -> None:
    shutil.copy(path.parents[1] / "two/version.json", path.parent)


def remove_description(path: Path) -> None:
    (path.parent / "version.json").unlink()


def log_again(folder: Path) -> None:
    """Begin as whoever logs does."""
    forget()
    version = VersionFolder.begin(folder, FACTS)
    version.settle()
    version.index()


HARMS = [remove, add, truncate, exchange, take_from_another_version]
HARMS += [take_description_of_another_version, remove_description]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("use", [all_of, log_again])
def test_parts_that_are_not_those_that_were_logged_are_refused(
    whole: Path, tmp_path: Path, harm: Callable[[Path], None], use: Callable[[Path], object]
) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(whole, folder)
    harm(folder / "seer/one/part-00001.parquet")
    with pytest.raises(DataError, match="seer/one") as refused:
        use(folder)
    assert refused.value.ways_out
    shutil.rmtree(folder / "seer/one")
    shutil.copytree(whole / "seer/one", folder / "seer/one")  # a copy is restored
    assert len(all_of(folder)) == len(all_of(whole))


def test_a_part_that_was_added_is_taken_out_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(whole, folder)
    before = all_of(folder)
    add(folder / "seer/one/part-00001.parquet")
    with pytest.raises(DataError, match="mv ") as refused:
        all_of(folder)
    assert str(folder / "seer/one/part-00002.parquet") in refused.value.ways_out[0]
    (folder / "seer/one/part-00002.parquet").rename(tmp_path / "elsewhere")
    assert all_of(folder) == before


def test_a_version_is_done_without_by_the_way_out(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(whole, folder)
    remove(folder / "seer/one/part-00001.parquet")
    with pytest.raises(DataError, match="do without this version") as refused:
        all_of(folder)
    (way,) = [way for way in refused.value.ways_out if "do without" in way]
    command = way.partition(": ")[2].replace("ELSEWHERE", str(tmp_path / "elsewhere"))
    subprocess.run(["sh", "-c", command], check=True)
    assert [each.facts.version for each in versions_in(folder)] == ["two"]
    all_of(folder)


class KilledError(Exception):
    pass


def moments_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Yield what lets the process die at the first, second, … step by which a file gets its name."""
    for number in range(99):
        left = number

        def die(source: os.PathLike[str], target: os.PathLike[str], real: Callable[..., None] = os.replace) -> None:
            nonlocal left
            if left == 0:
                raise KilledError
            left -= 1
            real(source, target)

        yield lambda die=die: monkeypatch.setattr("ziggurat.files.writing.os.replace", die)


def test_who_is_killed_at_any_step_of_a_part_leaves_a_table_that_is_read_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the part, or without it; logged again, the folder has the bytes of one that nobody killed."""
    table(tmp_path / "expected", parts=3)
    expected = {path.name: path.read_bytes() for path in files_of(tmp_path / "expected")}
    counts: list[int] = []
    for number, arm in enumerate(moments_of(monkeypatch)):
        folder = tmp_path / f"cut-{number}"
        version = table(folder, parts=2)
        with monkeypatch.context():
            arm()
            try:
                write(version, 2)
                break
            except KilledError:
                pass
            finally:
                monkeypatch.undo()
        forget()
        (read,) = versions_in(folder)
        counts.append(len(read.logits()[0]))
        again = VersionFolder.begin(folder, FACTS)
        again.settle()
        assert len(again.index()) == counts[-1]
        if counts[-1] == 10:
            write(again, 2)
        assert {path.name: path.read_bytes() for path in files_of(folder)} == expected
    assert counts == [10, 10, 15]  # before it is next, before it has its name, before it is a part


def test_a_part_that_is_next_and_another_is_refused(tmp_path: Path) -> None:
    version = table(tmp_path, parts=2)
    kept = version._list()
    assert kept.parts is not None
    version._write_list(PartList(parts=kept.parts[:1], next=kept.parts[1]))
    assert len(version.logits()[0]) == 10
    shutil.copy(version.parts[0], version.parts[1])
    forget()
    with pytest.raises(DataError, match="another content"):
        version.logits()
    with pytest.raises(DataError, match="another content"):
        version.settle()


def test_what_killed_loggers_left_is_removed_by_the_next(tmp_path: Path) -> None:
    version = table(tmp_path, parts=1)
    begun = version.path / ".part-00001.parquet.99.0123abcd.tmp"
    begun.write_text("half of a part")
    (version.path / ".version.json.99.0123abcd.tmp").write_text("{")
    mine = version.path / "part-notes.txt"
    mine.write_text("not ours")
    version.settle()
    assert sorted(path.name for path in version.path.iterdir()) == ["part-00000.parquet", mine.name, "version.json"]


def test_a_version_that_was_logged_without_digests_opens_and_is_named(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(whole, folder)
    before = all_of(folder)[1:]
    for version in versions_in(folder):
        as_former(version)
    assert all_of(folder)[1:] == before
    assert facts_of_teacher(str(folder))[0] == [
        "seer/one",
        [[path.name, path.stat().st_size] for path in files_of(folder / "seer/one") if path.suffix == ".parquet"],
    ]  # the fingerprint of before: data that was prepared with it is found again
    note = unchecked_note(versions_in(folder))
    assert "seer/one, seer/two without digests" in note
    # A part that is gone is not missed: that is why it is said.
    (folder / "seer/one/part-00001.parquet").unlink()
    assert len(versions_in(folder)[0].index()) == 5
    assert VersionFolder.begin(folder, FACTS).settle() == 1
    write(versions_in(folder)[0], 1)
    assert all_of(folder)[1:] == before
    assert unchecked_note(versions_in(folder)) == unchecked_note(versions_in(folder)[1:]) != ""
    assert VERSION.version_of(folder / "seer/one/version.json") == 2
    (folder / "seer/one/part-00000.parquet").unlink()
    with pytest.raises(DataError, match="it is gone"):
        all_of(folder)


def test_a_damaged_part_without_a_digest_is_not_listed(tmp_path: Path) -> None:
    version = table(tmp_path, parts=1)
    as_former(version)
    content = bytearray(version.parts[0].read_bytes())
    content[len(content) // 3] ^= 0xFF
    version.parts[0].write_bytes(content)
    forget()
    with pytest.raises(DataError, match="part-00000"):
        version.settle()
    assert not version.is_checked


@pytest.mark.parametrize("moment", ["_mapped", "sha256_of"])
def test_an_index_that_another_process_takes_away_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As one does whose student reads a part more, or less: it removes what is of other parts than its own."""
    version = table(tmp_path / "teacher")
    wanted = index_of(version)
    [folder] = version.path.glob("by_user-*")
    forget()
    read = getattr(history, moment)

    def behind_another(*arguments: object, **settings: object) -> object:
        monkeypatch.setattr(history, moment, read)
        shutil.rmtree(folder)
        return read(*arguments, **settings)

    monkeypatch.setattr(history, moment, behind_another)
    found = index_of(version)
    assert np.array_equal(found.keys, wanted.keys)
    assert np.array_equal(found.vectors, wanted.vectors)
