"""Items that change in running servers: one journal, several workers, crashes."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

import ziggurat as zg
from tests.serving.shop import Shop
from ziggurat.errors import ExportError, FileError, RequestError
from ziggurat.serving.answering.live_items import ItemChanges
from ziggurat.serving.server.admin_socket import ADMIN
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.changed_items.live import LiveItems
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.processes.control import Control
from ziggurat.serving.server.processes.worker import wait_for_start
from ziggurat.serving.server.reading import RefusedRequestError

USER = {"user_id": "3"}
FRESH = {"item": "fresh", "tags": ["new"], "price": 3}


def live(folder: Path) -> LiveItems:
    found = LiveItems.of(zg.Recommender.load(folder, check=False))
    assert found is not None
    return found


@pytest.fixture
def folder(shop: Shop, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop.export, tmp_path / "films"))


def test_workers_and_restarts_have_the_same_items(folder: Path) -> None:
    first, second = live(folder), live(folder)
    assert first.change(ItemChanges(upsert=(FRESH,))).version.endswith("+1")
    assert second.change(ItemChanges(delete=("i1",))).version.endswith("+2"), "it caught up before"
    with pytest.raises(RequestError):
        second.change(ItemChanges(upsert=({"item": "x", "prise": 1},)))
    assert (first.follow(), second.follow()) == (2, 2), "what cannot be done is not written"
    later = live(folder)
    assert later.follow() == 2
    answers = [each.recommender.recommend(USER, k=50, exclude_seen=False) for each in (first, second, later)]
    assert answers[0].version == answers[1].version == answers[2].version
    assert [item.id for item in answers[0].items] == [item.id for item in answers[2].items]
    assert "i1" not in {item.id for item in answers[2].items}
    content = (path := later.journal.folder / "00000002.json").read_bytes()
    path.write_bytes(content.replace(b"i1", b"i2"))
    with pytest.raises(ExportError, match=r"00000002\.json"):
        live(folder).follow()
    shutil.rmtree(later.journal.folder)
    later.journal.folder.parent.rmdir()
    later.journal.folder.parent.write_text("no folder")
    with pytest.raises(RefusedRequestError, match="journal"):
        first.change(ItemChanges(delete=("i5",)))
    assert first.recommender.item("i5")


def delete(items: LiveItems, *ids: str) -> None:
    """A change for each id."""
    for id in ids:
        items.change(ItemChanges(delete=(id,)))


def undo(error: ExportError | RefusedRequestError) -> None:
    """Do what an error says that is to be done where there is no copy."""
    [way] = [way for way in error.ways_out if "`rm " in way]
    subprocess.run(["bash", "-c", way.split("`")[1]], check=True)


@pytest.mark.parametrize("merged", [0, 1])
def test_a_change_that_is_missing_before_others_is_damage(
    folder: Path, merged: int, caplog: pytest.LogCaptureFixture
) -> None:
    items = live(folder)
    if merged:
        delete(items, "i0")
        assert items.merge()
    delete(items, "i1", "i2", "i3", "i4")
    late, journal = live(folder), items.journal
    assert late.follow() == 4 + merged
    second, copy = journal.path(merged + 2), folder.with_name("copy.json")
    second.rename(copy)
    assert items.follow() == 4 + merged, "who has made it goes on"
    with pytest.raises(ExportError) as refused:
        live(folder).follow()
    assert str(second) == refused.value.where
    assert f"before changes {merged + 3} to {merged + 4}" in refused.value.expected
    copy.rename(second)
    assert live(folder).follow() == 4 + merged
    second.write_text("{")
    with pytest.raises(ExportError, match=second.name) as refused:
        live(folder).follow()
    undo(refused.value)
    assert [*journal.folder.glob("0*.json")] == [journal.path(merged + 1)]
    for _ in range(2):
        late.keep_up()
    assert caplog.text.count(f"change {merged + 4} of items, which this server has made") == 1, "said once"
    with pytest.raises(RefusedRequestError, match="which this server has made") as no_change:
        delete(late, "i5")
    assert no_change.value.status == 409
    assert late.recommender.num_changes == 4 + merged
    again = live(folder)
    assert again.follow() == 1 + merged
    delete(again, "i6")
    assert live(folder).follow() == 2 + merged, "changes that were undone do not come back"


def test_a_spare_has_the_items_of_the_moment_when_it_begins_to_serve(folder: Path) -> None:
    first, spare = live(folder), live(folder)
    spare.follow()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        supervisor, control = Control(end=ours), Control(end=theirs)
        delete(first, "i1")
        supervisor.send(serve=True)
        assert wait_for_start(control, live=spare)
        assert spare.recommender.version == first.recommender.version
        follow, seen = spare.follow, []

        def watched() -> int:
            seen.append(follow())
            if len(seen) == 1:
                delete(first, "i2")
            elif len(seen) == 2:
                supervisor.send(serve=True)
                delete(first, "i3")
            return seen[-1]

        spare.follow = watched  # type: ignore[method-assign]
        assert wait_for_start(control, live=spare, pause_s=0)
        assert seen == [1, 2, 3], "while it waits, and at the end"
        supervisor.send(drain=True)
        assert not wait_for_start(control, live=spare)
        ours.close()
        assert not wait_for_start(control, live=None)


def test_a_full_disk_is_said_as_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = live(folder)

    def full(*_: object) -> bool:
        raise FileError(expected="room", found="No space left on device", where="x", ways_out="y") from OSError(
            errno.ENOSPC, "No space left on device"
        )

    monkeypatch.setattr(items.journal, "write", full)
    with pytest.raises(RefusedRequestError, match="No space left") as refused:
        delete(items, "i1")
    assert (refused.value.status, refused.value.ways_out[0]) == (507, "free space on that disk, and ask again")


def test_items_are_changed_over_http(folder: Path) -> None:
    items, by_port = live(folder), False

    async def ask(path: str, data: object, config: ServerConfig) -> httpx.Response:
        app = ServerApp(answerer=items.recommender, config=config, change=items.change)

        async def by_admin(scope: Any, receive: Any, send: Any) -> None:
            await app(scope | {ADMIN: not by_port}, receive, send)

        transport = httpx.ASGITransport(app=by_admin)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            app.engine.start()
            answer = await http.post(path, json=data)
            await app.engine.close()
            return answer

    def post(path: str, data: object, **settings: Any) -> httpx.Response:
        return asyncio.run(ask(path, data, ServerConfig(deadline_ms=9000, **settings)))

    changed = post("/admin/items", {"upsert": [FRESH], "delete": ["nobody"]})
    assert (changed.status_code, changed.json()["added"], changed.json()["unknown"]) == (200, 1, ["nobody"])
    found = post("/recommend", {"user": USER, "filter": "tags:new"})
    assert [item["id"] for item in found.json()["items"]] == ["fresh"]
    assert found.headers["x-export-version"] == found.json()["version"] == changed.json()["version"]
    nothing = post("/admin/items", {"delete": ["nobody"]}).json()
    assert (nothing["unknown"], nothing["version"]) == (["nobody"], changed.json()["version"]), "nothing changed"
    assert len([*items.journal.folder.glob("0*.json")]) == 1
    for data in ({}, {"upsert": [{}]}, {"upsert": 3}):
        assert (refused := post("/admin/items", data)).status_code == 400
    assert '{"upsert":[{"item":"i' in refused.json()["error"]["ways_out"][-1]
    assert post("/admin/items", {"delete": ["i1"]}, admin=False).status_code == 404
    paths = json.loads(ServerApp(answerer=items.recommender, config=ServerConfig(), change=items.change)._openapi)[
        "paths"
    ]
    examples = paths["/admin/items"]["post"]["requestBody"]["content"]["application/json"]["examples"]
    assert post("/admin/items", examples["put"]["value"]).json()["changed"] == 1
    assert post("/admin/items", examples["delete"]["value"]).json()["deleted"] == 1
    by_port = True
    assert post("/admin/items", {"delete": ["i1"]}).status_code == 403
