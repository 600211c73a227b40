"""Files: atomic, checksummed, versioned; and a reader that nothing holds up."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ziggurat.errors import ConfigError, DataError, FileError, MissingFileError, ZigguratError
from ziggurat.files import (
    MAX_DEPTH,
    FileLock,
    Format,
    Seal,
    locked,
    parse_json,
    parse_toml,
    read_bytes,
    remove_left_behind,
    replacing,
    replacing_folder,
    take_away,
    write_text,
    writing,
)
from ziggurat.files.parts import PartsFolder

CARD = Format(name="ziggurat.test_card", what="a card", seal=Seal.EDITABLE, error=ConfigError)


def test_content_comes_back_as_it_was(tmp_path: Path) -> None:
    content = {"a": 1, "b": [1.5, None, True, "ä\udc80"], "c": {"1": float("inf")}}
    CARD.write(tmp_path / "card.json", content)
    assert CARD.read(tmp_path / "card.json") == content
    CARD.write(tmp_path / "list.json", [1, 2])
    assert CARD.read(tmp_path / "list.json") == [1, 2]


def test_a_digest_does_not_depend_on_spelling(tmp_path: Path) -> None:
    path = CARD.write(tmp_path / "card.json", {3: "three", 12: "twelve", "x": (1, 2)})
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    assert CARD.read(path) == {"3": "three", "12": "twelve", "x": [1, 2]}


def test_every_flipped_bit_of_a_required_seal_is_found() -> None:
    sealed = Format(name="ziggurat.test_sealed", what="a sealed card")
    text = sealed.encode({"rows": 17, "name": "user"})
    for index in range(len(text) * 8):
        flipped = bytearray(text)
        flipped[index // 8] ^= 1 << index % 8
        try:
            read = sealed.decode(bytes(flipped), where="card.json")
        except DataError:
            continue
        assert read == {"rows": 17, "name": "user"}, bytes(flipped)


def test_an_edit_is_accepted_without_the_checksum_and_named_with_it(tmp_path: Path) -> None:
    path = CARD.write(tmp_path / "card.json", {"rows": 17})
    data = json.loads(path.read_text()) | {"rows": 18}
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as raised:
        CARD.read(path)
    assert 'delete its line "sha256"' in raised.value.ways_out[0]
    del data["sha256"]
    path.write_text(json.dumps(data))
    assert CARD.read(path) == {"rows": 18}


def test_versions_are_migrated_one_by_one_and_newer_ones_refused() -> None:
    third = Format(
        name="ziggurat.test_card",
        what="a card",
        version=3,
        migrations={0: lambda it: it["payload"], 2: lambda it: it | {"third": True}},
        seal=Seal.EDITABLE,
    )
    assert third.decode(b'{"payload": {"rows": 1}}', where="x") == {"rows": 1, "third": True}
    assert third.decode(CARD.encode({"rows": 1}), where="x") == {"rows": 1, "third": True}
    with pytest.raises(ConfigError) as raised:
        CARD.decode(third.encode({"rows": 1}), where="card.json")
    assert "version 3" in raised.value.found
    assert "update Ziggurat" in raised.value.ways_out
    with pytest.raises(DataError, match="version 0"):
        third.decode(b'{"rows": 1}', where="x")  # the migration does not find its key
    with pytest.raises(ConfigError, match="format 'other'"):
        CARD.decode(b'{"format": "other", "version": 1}', where="x")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 500 + "]" * 500,
        '{"a":' * 100_000,
        "1" * 5_000,
        "-1" + "0" * 500,
        "1e999",
        '{"a": 1, "a": 2}',
        b"\xff\xfe",
        "",
        "nonsense",
    ],
)
def test_json_out_of_bounds_is_an_error_in_four_parts(text: str | bytes) -> None:
    with pytest.raises(DataError) as raised:
        parse_json(text, where="x.json")
    assert len(raised.value.found) < 500


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000,
        "a = " + "[" * 200 + "]" * 200,
        "a = " + "1" * 5_000,
        "a = " + "1" * 1_000,
        "a = 1e999",
        ".".join("a" * 100_000) + " = 1",
        "[" + ".".join(f"a{i}" for i in range(MAX_DEPTH + 2)) + "]",
        "a = 1\na = 2",
    ],
)
def test_toml_out_of_bounds_is_an_error_in_four_parts(text: str) -> None:
    with pytest.raises(DataError) as raised:
        parse_toml(text, where="x.toml")
    assert len(raised.value.found) < 500


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, found in (
        ("/dev/zero", "a device"),
        (tmp_path / "pipe", "a pipe"),
        (tmp_path, "a folder"),
        ("/proc/self/smaps", "more"),
    ):
        with pytest.raises(DataError) as raised:
            read_bytes(path, max_bytes=100)
        assert raised.value.found == found
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"1,099,511,627,776 bytes"):
        read_bytes(tmp_path / "sparse")
    with pytest.raises(DataError):
        read_bytes("zero\0byte")
    with pytest.raises(MissingFileError):
        read_bytes(tmp_path / "none")
    with pytest.raises(MissingFileError):
        read_bytes("/dev/null/none")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = write_text(tmp_path / "new" / "a.txt", "old")

    def half_written(problem: Exception) -> None:
        with replacing(path) as temporary:
            temporary.write_text("new")
            raise problem

    with pytest.raises(KeyError):
        half_written(KeyError())
    with pytest.raises(FileError, match="no room"):
        half_written(OSError(28, "no room"))
    assert path.read_text() == "old"
    assert [each.name for each in path.parent.iterdir()] == ["a.txt"]
    (tmp_path / "folder").mkdir()
    for wrong in (tmp_path / "folder", path / "below"):
        with pytest.raises(FileError):
            write_text(wrong, "text")


def test_a_link_stays_a_link_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"
    write_text("/dev/null", "text")
    assert Path("/dev/null").is_char_device()


def test_a_folder_is_at_its_path_at_every_instant_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before or after any call that changes a name, the old folder or the new one is there, whole."""
    folder = tmp_path / "data"

    def write(text: str) -> None:
        with replacing_folder(folder) as temporary:
            (temporary / "text").write_text(text)
            (temporary / "more").write_text(text)

    def killing(real: Any, moment: int) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > moment:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        return call

    write("old")
    moment = calls = 0
    found: dict[str, str] = {}
    for moment in range(30):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", killing(Path.rename, moment))
            patch.setattr(writing.shutil, "rmtree", killing(shutil.rmtree, moment))
            patch.setattr(writing, "_exchanged", killing(writing._exchanged, moment))
            patch.setattr(writing, "sync", killing(writing.sync, moment))
            with contextlib.suppress(KeyboardInterrupt):
                write("new")
        found = {path.name: path.read_text() for path in folder.iterdir()}
        assert found in ({"text": "old", "more": "old"}, {"text": "new", "more": "new"}), moment
        if calls <= moment:
            break
        write("old")
    assert calls <= moment
    assert found["text"] == "new"


def test_where_folders_cannot_be_exchanged_the_old_one_steps_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_exchanged", lambda one, other: False)
    for text in ("old", "new"):
        with replacing_folder(tmp_path / "data") as temporary:
            (temporary / "text").write_text(text)
    assert (tmp_path / "data" / "text").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_link_to_a_folder_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "text").write_text("first")
    (tmp_path / "data").symlink_to("first")
    with replacing_folder(tmp_path / "data") as temporary:
        (temporary / "text").write_text("new")
    assert (tmp_path / "data" / "text").read_text() == "new"
    assert (tmp_path / "first" / "text").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "first"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with replacing_folder(tmp_path / "deep" / "data") as temporary:
            (temporary / "part").write_text(text)
        assert (tmp_path / "deep" / "data" / "part").read_text() == text

    def half_written() -> None:
        with replacing_folder(tmp_path / "deep" / "data") as temporary:
            (temporary / "part").write_text("third")
            raise OSError(28, "no room")

    with pytest.raises(ZigguratError):
        half_written()
    assert (tmp_path / "deep" / "data" / "part").read_text() == "second"
    assert len(list((tmp_path / "deep").iterdir())) == 1


def test_what_a_killed_writer_left_is_removed_by_the_next_one_an_hour_later(tmp_path: Path) -> None:
    """Of the same file, of a process that is gone, and nothing else."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    old = time.time() - 7200
    names = {
        "left": f".scores.csv.{gone.pid}.0123abcd.tmp",
        "new": f".scores.csv.{gone.pid}.4567abcd.tmp",
        "of one that runs": f".scores.csv.{os.getppid()}.0123abcd.tmp",
        "of another file": f".other.csv.{gone.pid}.0123abcd.tmp",
        "of somebody else": ".scores.csv.tmp",
    }
    for name in names.values():
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (old, old))
    os.utime(tmp_path / names["new"])
    folder = tmp_path / f".scores.csv.{gone.pid}.89ababcd.tmp"
    folder.mkdir()
    os.utime(folder, (old, old))
    with replacing(tmp_path / "scores.csv") as temporary:
        temporary.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"scores.csv", folder.name, *names.values()} - {names["left"]}
    remove_left_behind(tmp_path / "scores.csv", is_alone=True)
    assert {path.name for path in tmp_path.iterdir()} == {
        "scores.csv",
        names["of another file"],
        names["of somebody else"],
    }


def test_a_folder_that_another_process_makes_meanwhile_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def behind_another(path: Path, target: Path) -> Path:
        if not (tmp_path / "data").exists():
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "text").write_text("theirs")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", behind_another)
    with replacing_folder(tmp_path / "data") as temporary:
        (temporary / "text").write_text("ours")
    assert (tmp_path / "data" / "text").read_text() == "ours"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_the_name_of_a_folder_goes_before_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "text").write_text("whole")
    remove = shutil.rmtree
    seen: list[bool] = []

    def look(path: Path, **settings: Any) -> None:
        seen.append(folder.exists())
        remove(path, **settings)

    monkeypatch.setattr(shutil, "rmtree", look)
    take_away(folder)
    assert seen == [False]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_given_back_in_the_moment_it_is_tried_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened has no name any more by the time it is locked, and nobody holds the one that comes then."""
    other = FileLock(tmp_path / "lock")
    assert other.take()
    lock = fcntl.flock

    def behind_its_end(descriptor: int, how: int) -> None:
        other.release()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", behind_its_end)
    mine = FileLock(tmp_path / "lock")
    assert mine.take()
    assert not FileLock(tmp_path / "lock").take()
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_held_inside_a_block_and_given_back_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def busy(holder: str) -> FileError:
        return FileError(expected="one", found=f"two: {holder}", where=str(path), ways_out=("wait",))

    def fail_inside() -> None:
        with locked(path, busy=busy):
            assert not FileLock(path).take()
            with pytest.raises(FileError, match=f"two: process {os.getpid()} on "), locked(path, busy=busy):
                pytest.fail("held twice")
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileError, match="to write lock"), locked(tmp_path / "nowhere" / "lock", busy=busy):
        pytest.fail("held without a folder")


def test_a_lock_that_is_waited_for_says_so_once(tmp_path: Path) -> None:
    other = FileLock(tmp_path / "lock")
    assert other.take()
    said = []

    def waiting() -> None:
        said.append("waiting")
        other.release()

    with locked(tmp_path / "lock", waiting=waiting):
        assert not other.take()
    assert said == ["waiting"]


def test_a_folder_of_parts_that_another_process_removes_in_this_moment_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = FileLock.take

    def behind_its_end(lock: FileLock) -> bool:
        monkeypatch.setattr(FileLock, "take", take)
        lock.path.parent.rmdir()
        return take(lock)

    monkeypatch.setattr(FileLock, "take", behind_its_end)
    form = Format(name="ziggurat.test_parts", what="a note of parts")
    folder = PartsFolder(
        tmp_path / "lists.parts", question={"of": 1}, what="lists", asked=form, note=form, say=lambda text: None
    )
    with folder as parts:
        parts.write(0, b"content")
        assert parts.read(0) == b"content"
