"""A server of a published folder follows its pointer: forwards, back, past versions that do not load, after deaths."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.pointers import enter
from tests.serving.server.running import Running, running, wait_until, write_export
from ziggurat.errors import ConfigError
from ziggurat.runs.stream import tell_server
from ziggurat.runs.stream.tell_server import ServerToTell
from ziggurat.serving.export.export_folder import identity_of
from ziggurat.serving.export.published_folder import (
    Pointer,
    change_pointer,
    in_use,
    is_published,
    read_pointer,
    roll_back,
    version_folder,
)
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.processes import supervisor
from ziggurat.serving.server.processes.own_folder import OwnFolder
from ziggurat.serving.server.serve import bind


def publish(folder: Path, number: int, **settings: Any) -> None:
    """Publish a version of the fake answerer."""
    place = write_export(version_folder(folder, number), version=f"v{number}", **settings)
    (place / "export.json").write_text("{}")  # what a version is held by
    enter(folder, number)


def lead_to(folder: Path, number: int) -> None:
    def change(pointer: Pointer | None) -> Pointer:
        assert pointer is not None
        return dataclasses.replace(pointer, current=number, held=True)

    change_pointer(folder, change)


def answers(server: Running) -> str:
    return str(server.recommend()[1].get("version"))


def test_a_server_follows_the_pointer_forwards_and_back(tmp_path: Path) -> None:
    live = tmp_path / "export"
    publish(live, 1)
    with running(tmp_path, workers=2, poll_s=0.1, linger_s=0.1) as server:
        assert answers(server) == "v1"
        publish(live, 2)
        wait_until(lambda: answers(server) == "v2")
        # A version that fails its check is refused and said, and the one before stays.
        publish(live, 3, bad=True)
        wait_until(lambda: "is refused, the old version stays" in server.log.read_text())
        # Of two workers one drains after the other: the second of v1 may still answer after the first answer of v2.
        wait_until(lambda: [answers(server) for _ in range(20)] == ["v2"] * 20)
        publish(live, 4)
        wait_until(lambda: answers(server) == "v4")
        lead_to(live, 2)
        wait_until(lambda: answers(server) == "v2")
        # The last worker of the version before may answer this once more.
        wait_until(lambda: server.get("/readyz")[1].count('"v2"') == 1)


def test_a_worker_that_is_replaced_has_the_version_that_is_served(tmp_path: Path) -> None:
    """Although the pointer has gone on to a version that does not load, and the folder of the served one is gone."""
    live = tmp_path / "export"
    publish(live, 1)
    with running(tmp_path, workers=1, spares=0, poll_s=0.1) as server:
        publish(live, 2)
        wait_until(lambda: answers(server) == "v2")
        wait_until(lambda: len(server.workers) == 1)
        publish(live, 3, bad=True)
        wait_until(lambda: "is refused" in server.log.read_text())
        assert in_use(version_folder(live, 2))
        assert not in_use(version_folder(live, 1))
        shutil.rmtree(version_folder(live, 2))
        os.kill(server.workers[0], signal.SIGKILL)
        wait_until(lambda: good(server) == "v2")
    assert not list(live.glob("versions/.ziggurat-served-*"))


def good(server: Running) -> str:
    try:
        status, answer = server.recommend()
    except OSError:
        return ""
    return str(answer["version"]) if status == 200 else ""


def test_a_swap_that_is_asked_for_and_one_that_is_seen_are_one(tmp_path: Path) -> None:
    live = tmp_path / "export"
    publish(live, 1)
    with running(tmp_path, workers=1, poll_s=30) as server:
        before = set(server.workers)
        publish(live, 2)
        assert server.admin("/admin/swap", {"export": str(live)}) == (200, {"version": "v2"})
        # A worker and a spare of the new version; those of the old one have gone.
        wait_until(lambda: len(server.workers) == 2 and not before & set(server.workers))
        workers = set(server.workers)
        assert server.admin("/admin/swap", {"export": str(live)}) == (200, {"version": "v2"})
        assert workers <= set(server.workers)
        assert server.log.read_text().count("loading") == 1
        path = live / "published.json"
        path.write_text(path.read_text().replace('"last": 2', '"last": 3'))
        status, answer = server.admin("/admin/swap", {"export": str(live)})
        assert status == 409
        assert "sha256" in answer["error"]["found"]
        assert answers(server) == "v2"


@pytest.mark.parametrize("door", ["socket", "url"])
def test_a_publisher_tells_a_server_or_asks_it(tmp_path: Path, door: str) -> None:
    """Through the socket at once, although the server looks at the pointer twice an hour; a URL until it has it."""
    live = tmp_path / "export"
    publish(live, 1)
    with running(tmp_path, workers=1, poll_s=1800 if door == "socket" else 0.2) as server:
        place = server.admin_socket if door == "socket" else f"http://127.0.0.1:{server.port}"
        lines: list[str] = []
        told = ServerToTell(place, folder=live, say=lines.append)
        for number in (2, 3):
            publish(live, number)
            publication = read_pointer(live).newest
            told.tell(publication)
            wait_until(lambda: answers(server) == f"v{number}")  # noqa: B023
            wait_until(lambda: len(lines) == number - 1)  # noqa: B023
        told.close()
    assert [line.split(",")[0] for line in lines] == ["served     version 2", "served     version 3"]


@pytest.mark.parametrize("door", ["socket", "url"])
def test_a_stream_that_ends_waits_for_the_answer_to_its_last_version(tmp_path: Path, door: str) -> None:
    live = tmp_path / "export"
    publish(live, 1)
    with running(tmp_path, workers=1, poll_s=1800 if door == "socket" else 0.5) as server:
        lines: list[str] = []
        place = server.admin_socket if door == "socket" else f"http://127.0.0.1:{server.port}"
        told = ServerToTell(place, folder=live, say=lines.append)
        # Slower than the first questions: there is a time in which the stream is over and the server is not yet there.
        publish(live, 2, load_s=0.5)
        told.tell(read_pointer(live).newest)
        told.close()
    assert [line.split(",")[0] for line in lines] == ["served     version 2"]


def test_a_stream_that_ends_before_the_server_has_answered_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tell_server, "_CLOSE_S", 0.3)
    live = tmp_path / "export"
    publish(live, 1)
    lines: list[str] = []
    told = ServerToTell(str(tmp_path / "none.sock"), folder=live, say=lines.append)
    told.tell(read_pointer(live).newest)
    told.close()
    time.sleep(0.5)
    assert len(lines) == 1
    assert "does not answer with version 1: the stream ended before (" in lines[0]


def test_a_server_that_is_gone_or_refuses_is_said(tmp_path: Path) -> None:
    live = tmp_path / "export"
    publish(live, 1)
    lines: list[str] = []
    with running(tmp_path, workers=1, poll_s=1800) as server:
        told = ServerToTell(server.admin_socket, folder=live, say=lines.append)
        publish(live, 2, bad=True)
        told.tell(read_pointer(live).newest)
        wait_until(lambda: bool(lines))
        assert answers(server) == "v1"
    told.tell(read_pointer(live).newest)
    told.tell(dataclasses.replace(read_pointer(live).newest, number=3))
    wait_until(lambda: len(lines) > 1)
    assert all(line.startswith("warning: ") for line in lines)
    assert "a later version came first" in lines[1]
    for wrong in ("http://", str(live)):
        with pytest.raises(ConfigError, match="admin socket"):
            ServerToTell.check(wrong)


def test_no_answer_is_lost_and_none_mixes_versions_while_versions_fly_by(tmp_path: Path) -> None:
    live = tmp_path / "export"
    publish(live, 1)
    seen: list[tuple[int, str]] = []
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            status, answer = server.recommend()
            seen.append((status, str(answer.get("version"))))

    def wait_for(version: str) -> None:
        wait_until(lambda: asker.done() or seen[-1:] == [(200, version)])

    with running(tmp_path, workers=2, poll_s=0.05, linger_s=0.2) as server, ThreadPoolExecutor() as pool:
        asker = pool.submit(ask)
        try:
            for number in range(1, 7):
                if number > 1:
                    publish(live, number, load_s=0.05)
                # The others may fly by before they are loaded.
                if number in (1, 3, 6):
                    wait_for(f"v{number}")
        finally:
            ends.set()
        asker.result()
    assert {status for status, _ in seen} == {200}
    versions = [int(version[1:]) for _, version in seen]
    served = list(dict.fromkeys(versions))
    assert served == sorted(served)
    assert {1, 3, 6} <= set(served)
    # Two workers end one after the other, so for a moment the version that was served before still answers; an older
    # one never does.
    places = [served.index(version) for version in versions]
    newest = itertools.accumulate(places, max)
    assert all(place >= most - 1 for place, most in zip(places, newest, strict=True))


@pytest.mark.parametrize(("harm", "state"), [("torn", "damaged"), ("lost", "gone")])
def test_a_pointer_that_cannot_be_followed_is_said_once_and_in_readyz(tmp_path: Path, harm: str, state: str) -> None:
    live = tmp_path / "export"
    publish(live, 1)
    path = live / "published.json"
    with running(tmp_path, workers=2, poll_s=0.05) as server:

        def states() -> set[str | None]:
            return {json.loads(server.get("/readyz")[1]).get("pointer") for _ in range(10)}

        assert states() == {None}
        content = path.read_bytes()
        if harm == "torn":
            path.write_bytes(content[:-20])
        else:
            path.unlink()
        wait_until(lambda: states() == {state})
        # A worker that starts meanwhile says it too.
        workers = set(server.workers)
        os.kill(server.workers[0], signal.SIGKILL)
        wait_until(lambda: len(set(server.workers) - workers) > 0)
        wait_until(lambda: states() == {state})
        assert server.get("/readyz")[0] == 200
        assert good(server) == "v1"
        assert server.log.read_text().count("cannot be followed, the old version stays") == 1
        assert "is refused" not in server.log.read_text()
        path.write_bytes(content)
        publish(live, 2)
        wait_until(lambda: good(server) == "v2")
        wait_until(lambda: states() == {None})
        assert server.log.read_text().count("is followed again") == 1


def test_a_folder_that_is_rolled_back_by_its_verb_is_followed(tmp_path: Path, monkeypatch: Any) -> None:
    from ziggurat.serving.export import export_folder

    live = tmp_path / "export"
    publish(live, 1)
    publish(live, 2)
    monkeypatch.setattr(export_folder, "open_export", lambda path: path)  # the fake's are no exports
    with running(tmp_path, workers=1, poll_s=0.1) as server:
        assert answers(server) == "v2"
        roll_back(live)
        wait_until(lambda: answers(server) == "v1")
        publish(live, 3)
        time.sleep(0.5)
        assert answers(server) == "v1"
        roll_back(live, to="newest")
        wait_until(lambda: answers(server) == "v3")
    assert is_published(live)
    assert json.loads((live / "published.json").read_text())["current"] == 3


def test_what_is_published_while_a_server_starts_is_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = tmp_path / "export"
    publish(live, 1)
    served = supervisor.served_folder

    def before_another(folder: Path) -> Path:
        place = served(folder)
        publish(live, 2)
        return place

    class BegunError(Exception):
        pass

    def begin() -> None:
        raise BegunError

    monkeypatch.setattr(supervisor, "served_folder", before_another)
    own = OwnFolder(parent=tmp_path, prefix="own-")
    with bind("127.0.0.1", 0) as listener:
        server = supervisor.Supervisor(
            load=Recommender.load, export=live, listener=listener, own=own, config=ServerConfig()
        )
        monkeypatch.setattr(server, "_catch_signals", lambda: None)
        monkeypatch.setattr(server._workers, "excuse_pause", begin)
        with pytest.raises(BegunError):
            server.run()
    own.delete()
    assert server._folder == version_folder(live, 1)
    assert server._last_identity != identity_of(live)
