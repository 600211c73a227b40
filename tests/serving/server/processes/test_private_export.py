"""What is served cannot change under the server, and workers of a generation have one version."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.serving.server.running import Running, running, wait_until, write_export
from ziggurat.errors import ExportError
from ziggurat.serving.server.processes import private_export
from ziggurat.serving.server.processes.private_export import PrivateExports


def hidden(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.name.startswith(".")]


def versions(server: Running, number: int = 12) -> set[str]:
    return {server.recommend()[1]["version"] for _ in range(number)}


def test_an_export_that_is_replaced_is_not_seen_until_a_swap(tmp_path: Path) -> None:
    with running(tmp_path, workers=2, spares=0) as server:
        wait_until(lambda: len(server.workers) == 2)
        export = tmp_path / "export"
        export.rename(tmp_path / "older")
        write_export(export, version="v2")
        first = server.workers[0]
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(server.workers) == 2 and first not in server.workers)
        wait_until(lambda: "another one takes its place" in server.log.read_text())
        assert versions(server) == {"v1"}, "the one that took its place has loaded the same"
        assert len(hidden(tmp_path)) == 1
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: versions(server, 1) == {"v2"})
        wait_until(lambda: [*(tmp_path / hidden(tmp_path)[0]).glob("*/*/fake.json")] != [])
    assert not hidden(tmp_path)


def test_an_export_that_is_overwritten_in_place_is_not_seen_either(tmp_path: Path) -> None:
    with running(tmp_path, spares=0) as server:
        write_export(tmp_path / "export", version="v2")
        (first,) = server.workers
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: first not in server.workers and server.recommend()[0] == 200)
        assert versions(server, 3) == {"v1"}
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: versions(server, 1) == {"v2"})


def test_a_worker_that_loads_another_version_does_not_serve(tmp_path: Path) -> None:
    with running(tmp_path, workers=2, spares=0) as server:
        wait_until(lambda: len(server.workers) == 2)
        write_export(server.private_copy, version="v2")
        os.kill(server.workers[0], signal.SIGKILL)
        wait_until(lambda: "the export was replaced while it is served" in server.log.read_text())
        # The other worker answers, unless it had not loaded yet either: then nobody does.
        answers = [server.recommend() for _ in range(12)]
        assert {body["version"] for status, body in answers if status == 200} <= {"v1"}
        assert {status for status, _ in answers} <= {200, 503}


def test_a_worker_that_has_loaded_later_changes_of_items_takes_a_dead_ones_place(tmp_path: Path) -> None:
    with running(tmp_path, spares=0) as server:
        # As a real answerer names it, which has read a journal of three changes beside the same export.
        write_export(server.private_copy, version="v1+3")
        (first,) = server.workers
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: first not in server.workers and server.recommend()[0] == 200)
        assert versions(server, 3) == {"v1+3"}
        figures = [line for line in server.get("/metrics")[1].splitlines() if line.startswith("ziggurat_export{")]
        assert len(figures) == 1, "one line for all workers of an export"
        assert "+3" not in figures[0]


def test_a_copy_has_files_of_its_own(tmp_path: Path) -> None:
    source = write_export(tmp_path / "films")
    (source / "items").mkdir()
    (source / "items" / "a.bin").write_bytes(bytes(1000))
    (source / "link").symlink_to("items/a.bin")
    copies = PrivateExports()
    export = copies.of(source, generation=1)
    place = export.make()
    assert place.name == "films"
    assert export.make() == place, "made once"
    with (source / "items" / "a.bin").open("r+b") as file:
        file.write(b"new")
    assert (place / "items" / "a.bin").read_bytes() == bytes(1000)
    assert (place / "link").is_symlink(), "for who loads it to refuse"
    error = ExportError(expected="a", found="b", where=str(place / "x"), ways_out=f"rm {place}")
    named = export.of_source(error)
    assert (named.where, named.ways_out, type(named)) == (str(source / "x"), (f"rm {source}",), ExportError)
    later = copies.of(source, generation=2).make()
    copies.keep([2])
    assert (place.exists(), later.exists()) == (False, True)
    copies.delete()
    assert not hidden(tmp_path)


def test_without_room_for_twice_its_bytes_an_export_is_linked_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_export(tmp_path / "films")
    (source / "a.bin").write_bytes(bytes(1000))
    monkeypatch.setattr(private_export, "_shared", lambda source, to: False)
    monkeypatch.setattr(private_export.shutil, "disk_usage", lambda path: SimpleNamespace(free=2000))
    copies = PrivateExports()
    linked = copies.of(source, generation=1).make()
    assert (linked / "a.bin").samefile(source / "a.bin")
    assert "2,000 bytes are free, too few for a copy of 1,017" in caplog.text

    def no_link(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "links to files of others are forbidden")

    monkeypatch.setattr(private_export.os, "link", no_link)
    copied = copies.of(source, generation=2).make()
    assert not (copied / "a.bin").samefile(source / "a.bin")
    copies.delete()


def test_without_room_for_a_copy_the_export_itself_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_export(tmp_path / "a\nforged" / "films")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(private_export, "OwnFolder", read_only)
    assert PrivateExports().of(source, generation=1).make() == source
    assert "Read-only file system" in caplog.text
    assert "\nforged" not in caplog.text, "a line of the log is the server's"
    monkeypatch.undo()
    monkeypatch.setattr(private_export.shutil, "copyfile", read_only)
    monkeypatch.setattr(private_export, "_shared", lambda source, to: False)
    caplog.clear()
    copies = PrivateExports()
    assert copies.of(source, generation=1).make() == source
    assert "Read-only file system" in caplog.text
    copies.delete()
