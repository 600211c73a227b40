"""A published folder while others publish, prune, roll back and read: nobody is led to what is gone, or refused."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.serving.pointers import enter
from ziggurat.serving.export import export_folder, published_folder
from ziggurat.serving.export.published_folder import (
    Lease,
    Pointer,
    held_folder,
    in_use,
    newest_number,
    prune,
    publishing,
    read_pointer,
    refuse_other_folder,
    roll_back,
    version_folder,
)


def publish(folder: Path, number: int) -> None:
    """Publish a version that has a manifest and nothing else."""
    place = version_folder(folder, number)
    place.mkdir(parents=True)
    (place / "export.json").write_text("{}")
    enter(folder, number)


def numbers(folder: Path) -> list[int]:
    return [each.number for each in read_pointer(folder).versions]


@pytest.fixture
def live(tmp_path: Path) -> Path:
    folder = tmp_path / "live"
    for number in (1, 2, 3):
        publish(folder, number)
    return folder


def test_a_version_that_is_taken_while_it_is_pruned_is_held_or_known_to_be_gone(
    live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = published_folder.change_pointer
    leases: list[Lease] = []
    reader = threading.Thread(target=lambda: leases.append(Lease(version_folder(live, 1))))

    def before_it_goes(folder: Path, made: object) -> Pointer:
        pointer = change(folder, made)
        reader.start()
        reader.join(0.2)  # it waits until the version is gone
        return pointer

    monkeypatch.setattr(published_folder, "change_pointer", before_it_goes)
    assert prune(live, keep=2) == [1]
    reader.join()
    assert not leases[0].is_held
    assert not version_folder(live, 1).exists()


def test_a_version_that_is_held_stays(live: Path) -> None:
    lease = Lease(version_folder(live, 1))
    assert lease.is_held
    assert in_use(version_folder(live, 1))
    assert prune(live, keep=1) == [2]
    assert numbers(live) == [1, 3]
    lease.release()
    assert not in_use(version_folder(live, 1))
    assert prune(live, keep=1) == [1]
    assert [path.name for path in (live / "versions").iterdir()] == ["000003"]


def test_a_reader_waits_for_who_looks_whether_a_version_is_held(live: Path) -> None:
    """For an instant the publisher has the lock; a reader that gave up then would hold nothing, without a word."""
    with published_folder._unused(version_folder(live, 3)):
        leases: list[Lease] = []
        reader = threading.Thread(target=lambda: leases.append(Lease(version_folder(live, 3))))
        reader.start()
        reader.join(0.1)
    reader.join()
    assert leases[0].is_held
    leases[0].release()


def test_who_was_led_to_a_version_that_went_meanwhile_is_led_on(live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = published_folder.served_folder

    def before_newer_ones(folder: Path) -> Path:
        monkeypatch.setattr(published_folder, "served_folder", served)
        place = served(folder)
        publish(live, 4)
        publish(live, 5)
        prune(live, keep=1)
        return place

    monkeypatch.setattr(published_folder, "served_folder", before_newer_ones)
    with held_folder(live) as place:
        assert place == version_folder(live, 5)
        assert in_use(place)
    assert not in_use(place)


@pytest.mark.parametrize("to", ["", "newest"])
def test_a_stream_publishes_while_the_files_of_a_version_are_read_to_roll_back(
    live: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Reading them takes as long as they are large; a stream that waited for the pointer meanwhile would end."""
    monkeypatch.setattr(published_folder, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(export_folder, "open_export", lambda path: publish(live, 4))
    before, after = roll_back(live, to=to)
    assert before.current == 4
    assert (after.current, after.held) == ((4, False) if to else (2, True))
    assert numbers(live) == [1, 2, 3, 4]


def test_a_pointer_that_was_being_written_when_its_publisher_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    live = tmp_path / "live"
    (live / "versions").mkdir(parents=True)
    left = live / f".published.json.{os.getpid()}.0123abcd.tmp"
    left.write_text("{")
    refuse_other_folder(live)
    with publishing(live):
        publish(live, 1)
    refuse_other_folder(live)
    assert numbers(live) == [1]


def test_a_first_pointer_that_comes_while_a_folder_is_looked_at_is_no_other_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "live"
    (live / "versions").mkdir(parents=True)
    look = os.listdir

    def behind_another(folder: Path) -> list[str]:
        monkeypatch.setattr(os, "listdir", look)
        publish(live, 1)
        return look(folder)

    monkeypatch.setattr(os, "listdir", behind_another)
    refuse_other_folder(live)


def test_versions_that_come_with_their_pointer_meanwhile_are_not_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "live"
    live.mkdir()
    listed = published_folder._listed

    def behind_another(folder: Path) -> list[str]:
        monkeypatch.setattr(published_folder, "_listed", listed)
        publish(live, 1)
        publish(live, 2)
        return listed(folder)

    monkeypatch.setattr(published_folder, "_listed", behind_another)
    assert published_folder._gone_pointer(live) is None


def test_a_publisher_that_is_killed_while_it_removes_a_version_leaves_none_without_its_manifest(
    live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a folder is nobody's: it would stay, and stand where the next version is to lie."""
    place = version_folder(live, 4)  # its publisher was killed before the pointer moved
    place.mkdir()
    (place / "export.json").write_text("{}")
    (place / "weights").write_text("…")

    def killed(path: Path, **settings: object) -> None:
        (Path(path) / "export.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            publishing(live).__enter__()
    assert not place.exists()
    with publishing(live):
        assert newest_number(live) == 3
        publish(live, 4)
    assert sorted(path.name for path in (live / "versions").iterdir()) == ["000001", "000002", "000003", "000004"]
