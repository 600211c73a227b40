"""Shards behind a server: the same answers, whatever is late, dead, changed or swapped; shards run in threads here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.serving.server.fake import FakeAnswerer
from tests.serving.server.running import wait_until
from tests.serving.shop import Shop
from ziggurat.errors import ConfigError, ExportError, RequestError, UnavailableError
from ziggurat.retrieval.sharding import ShardIndex
from ziggurat.serving.answering.live_items import ItemChanges
from ziggurat.serving.answering.shards import ShardQuestion
from ziggurat.serving.answers import Effort, RecommendRequest
from ziggurat.serving.export.export_folder import open_export, seal_export
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.changed_items.live import LiveItems
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.connections import DrainingServer, uvicorn_config
from ziggurat.serving.server.serve import bind
from ziggurat.serving.server.shards import client
from ziggurat.serving.server.shards.app import ShardApp, ShardVersions, load_shard
from ziggurat.serving.server.shards.client import ShardSettings
from ziggurat.serving.server.shards.front import load_front, shards_of
from ziggurat.serving.server.shards.messages import decode_answer, decode_question, encode_question

NUM_SHARDS = 2
ASKED = [
    {"user": {"user_id": user}, "k": k, "filter": text, "exclude_seen": seen, "exclude": ("i1", "i2")}
    for user, k, text, seen in [
        ("3", 5, "", True),
        ("17", 40, "", False),
        ("nobody", 7, "price:>=4", False),
        ("5", 3, "NOT tags:t1 AND price:>=2", True),
        ("5", 3, "tags:t1", False),
    ]
]
REQUESTS = [RecommendRequest(**each) for each in ASKED]
FRESH = {"item": "fresh", "tags": ["new"], "price": 3}


class SlowVersions(ShardVersions):
    """Versions whose searches may take a while longer."""

    delay_s = 0.0
    asked = 0

    def at(self, version: str, state: str) -> ShardIndex | None:
        self.asked += 1
        time.sleep(self.delay_s)
        return super().at(version, state)


KEY = "what shards and fronts have in common"


class RunningShard:
    """A shard in a thread of this process."""

    def __init__(self, export: Path, shard: int, *, port: int = 0, api_key: str = KEY) -> None:
        config = ServerConfig(linger_s=0, drain_s=0.1, max_body_bytes=1 << 30)
        self.versions = SlowVersions(functools.partial(load_shard, shard=shard, num_shards=NUM_SHARDS))
        self.versions.load(export)
        self.app = ShardApp(self.versions, shard=shard, num_shards=NUM_SHARDS, config=config, api_key=api_key)
        listener = bind("127.0.0.1", port)
        self.port = listener.getsockname()[1]
        settings = uvicorn_config(self.app, config=config, metrics=self.app.metrics, has_key=bool(api_key))  # type: ignore[arg-type]
        self.server = DrainingServer(settings, limits=config, listener=listener)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.server.listener.close()


@dataclasses.dataclass
class Cluster:
    """Shards of an export, and recommenders in front of them."""

    export: Path
    shards: list[RunningShard]
    seen: Path
    fronts: list[Recommender] = dataclasses.field(default_factory=list)

    def front(self, export: Path | None = None, **more: Any) -> Recommender:
        addresses = tuple(f"127.0.0.1:{each.port}" for each in self.shards)
        settings = ShardSettings(addresses=addresses, **{"api_key": KEY} | more)
        load = functools.partial(Recommender.load, check=False)
        self.fronts.append(load_front(export or self.export, load=load, settings=settings, seen=self.seen))
        return self.fronts[-1]

    def end(self) -> None:
        for front in self.fronts:
            asking = shards_of(front)
            assert asking is not None
            asking.close()
        for shard in self.shards:
            shard.end()


@pytest.fixture
def cluster(shop: Shop, tmp_path: Path) -> Iterator[Cluster]:
    export = Path(shutil.copytree(shop.export, tmp_path / "films"))
    made = Cluster(export, [RunningShard(export, shard) for shard in range(NUM_SHARDS)], tmp_path)
    yield made
    made.end()


def other_version(export: Path, folder: Path) -> Path:
    """The same export under another version."""
    shutil.copytree(export, folder)
    (folder / "golden.json").unlink()
    manifest = open_export(export).manifest
    seal_export(folder, sources=(), facts={}, made_with=manifest.made_with)
    return folder


def states(front: Recommender) -> list[str]:
    asking = shards_of(front)
    assert asking is not None
    return [each["state"] for each in asking.states()]


def shard_of(recommender: Recommender, id: str) -> int:
    return int(recommender.chain.catalogue.numbers([id])[0]) % NUM_SHARDS  # type: ignore[union-attr]


def test_a_sharded_export_answers_as_the_whole_one(cluster: Cluster) -> None:
    whole, front = Recommender.load(cluster.export), cluster.front(deadline_s=5)
    for effort in Effort:
        assert front.recommend_many(REQUESTS, effort=effort) == whole.recommend_many(REQUESTS, effort=effort)
    plan = front.recommend({"user_id": "3"}, filter="price:>=4", explain=True).plan
    assert plan.startswith("shard 0: ")
    assert "; shard 1: " in plan
    assert front.explain_item(REQUESTS[3], "i3") == whole.explain_item(REQUESTS[3], "i3")
    assert front.rank({"user_id": "3"}, ["i1", "i3"]) == whole.rank({"user_id": "3"}, ["i1", "i3"])


def test_changed_items_reach_their_shards_and_survive_them(cluster: Cluster) -> None:
    whole, fronts = Recommender.load(cluster.export), [cluster.front(deadline_s=5) for _ in range(2)]
    steps = [
        ItemChanges(upsert=(FRESH, {"item": "i5", "price": 1}), delete=("i7", "i8")),
        ItemChanges(upsert=({"item": "i8", "price": 9}, FRESH | {"price": 4}), delete=("i9",)),
    ]
    for step in steps:
        outcomes = [each.change_items(step) for each in (whole, *fronts)]
        assert outcomes[0] == outcomes[1] == outcomes[2]
        for front in fronts:
            assert front.recommend_many(REQUESTS) == whole.recommend_many(REQUESTS)
    assert [item.id for item in fronts[0].recommend({"user_id": "3"}, filter="tags:new").items] == ["fresh"]
    assert [len(next(iter(each.versions.about().values()))["states"]) for each in cluster.shards] == [2, 2], (
        "two processes name the same items alike"
    )
    port = cluster.shards[0].port
    cluster.shards[0].end()
    cluster.shards[0] = RunningShard(cluster.export, 0, port=port)
    wait_until(lambda: fronts[1].recommend_many(REQUESTS) == whole.recommend_many(REQUESTS))


def test_shards_are_told_what_was_merged_before_they_were_there(cluster: Cluster) -> None:
    whole = LiveItems.of(Recommender.load(cluster.export, check=False))
    assert whole is not None
    whole.change(ItemChanges(upsert=(FRESH, {"item": "i5", "price": 1}), delete=("i7", "i8")))
    earlier = LiveItems.of(cluster.front(deadline_s=5))
    assert earlier is not None
    earlier.follow()
    whole.change(ItemChanges(upsert=({"item": "i8", "price": 9}, {"item": "gone"}), delete=("i9",)))
    whole.change(ItemChanges(delete=("gone",)))
    assert whole.merge()
    whole.change(ItemChanges(upsert=(FRESH | {"price": 4},), delete=("i10",)))
    later = LiveItems.of(cluster.front(deadline_s=5))
    assert later is not None
    for each in (earlier, later):
        assert each.follow() == 4
        assert each.recommender.recommend_many(REQUESTS) == whole.recommender.recommend_many(REQUESTS)
        assert not each.merge(), "shards hold what differs from the export"


def test_a_late_shard_is_left_out_and_said_to_be(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_LATE", 2)
    front, slow = cluster.front(deadline_s=0.7), cluster.shards[1].versions
    whole = front.recommend({"user_id": "3"}, k=40)
    slow.delay_s = 1.0
    answers = [front.recommend({"user_id": "3"}, k=40) for _ in range(2)]
    for answer in answers:
        assert answer.missing_shards == (1,)
        assert answer.degraded == ("missing_shards",)
        assert answer.to_json()["missing_shards"] == [1]
        assert {shard_of(front, item.id) for item in answer.items} == {0}
        kept = [item.id for item in whole.items if shard_of(front, item.id) == 0]
        assert [item.id for item in answer.items if item.id in kept] == kept
    assert states(front) == ["up", "late"]
    asked = slow.asked
    assert front.recommend({"user_id": "3"}, k=40).missing_shards == (1,)
    assert slow.asked == asked, "a shard that is down is not asked"
    slow.delay_s = 0.0
    wait_until(lambda: front.recommend({"user_id": "3"}, k=40) == whole)
    assert states(front) == ["up", "up"]


def test_dead_shards_are_left_out_until_they_are_back(cluster: Cluster) -> None:
    front = cluster.front(deadline_s=5)
    whole = front.recommend({"user_id": "3"}, k=40)
    port = cluster.shards[0].port
    cluster.shards[0].end()
    assert front.recommend({"user_id": "3"}, k=40).missing_shards == (0,)
    assert states(front)[0] != "up"
    with pytest.raises(ConfigError, match="shard 0: dead"):
        cluster.front(other_version(cluster.export, cluster.seen / "next"), wait_s=0.2)
    late = cluster.front(wait_s=0.2)  # a worker of a version that all shards held begins without one
    assert late.recommend({"user_id": "3"}, k=40).missing_shards == (0,)
    cluster.shards[1].end()
    wait_until(lambda: states(front)[1] != "up")
    with pytest.raises(UnavailableError, match="shard 1"):
        front.recommend({"user_id": "3"})
    answer = asyncio.run(ask(front, "/recommend"))
    assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "UnavailableError")
    assert answer.headers["retry-after"] == "1"
    assert asyncio.run(ask(front, "/readyz")).status_code == 503
    assert asyncio.run(ask(front, "/rank")).status_code == 200, "no search is needed"
    second = cluster.shards[1].port
    cluster.shards = [RunningShard(cluster.export, 0, port=port), RunningShard(cluster.export, 1, port=second)]
    wait_until(lambda: states(front) == states(late) == ["up", "up"])
    assert front.recommend({"user_id": "3"}, k=40) == late.recommend({"user_id": "3"}, k=40) == whole


async def ask(front: Recommender, path: str) -> httpx.Response:
    app = ServerApp(answerer=front, config=ServerConfig(deadline_ms=9000))
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
    body = {"/recommend": {"user": {"user_id": "3"}, "k": 40}, "/rank": {"user": {}, "items": ["i1"]}}.get(path)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        app.engine.start()
        answer = await (http.post(path, json=body) if body else http.get(path))
        await app.engine.close()
    return answer


def test_the_server_says_which_shards_are_there(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_LATE", 1)
    front = cluster.front(deadline_s=0.7)
    cluster.shards[0].versions.delay_s = 1.0
    app = ServerApp(answerer=front, config=ServerConfig(deadline_ms=9000))

    async def talk() -> tuple[list[Any], Any, str]:
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            app.engine.start()
            answers = [await http.post("/recommend", json={"user": {"user_id": "3"}}) for _ in range(3)]
            ready, figures = await http.get("/readyz"), await http.get("/metrics")
            await app.engine.close()
        return [each.json() for each in answers], ready, figures.text

    answers, ready, figures = asyncio.run(talk())
    assert [each["missing_shards"] for each in answers] == [[0]] * 3
    assert ready.status_code == 200
    assert [each["state"] for each in ready.json()["shards"]] == ["late", "up"]
    assert "ziggurat_partial_answers_total 3.0" in figures
    assert 'ziggurat_shard_questions_total{outcome="late",shard="0"} 3.0' in figures
    assert 'ziggurat_shard_questions_total{outcome="answered",shard="1"} 3.0' in figures


def test_versions_stand_side_by_side_and_no_answer_mixes_them(cluster: Cluster, tmp_path: Path) -> None:
    old = cluster.front(deadline_s=5)
    new = cluster.front(other_version(cluster.export, tmp_path / "next"), deadline_s=5)
    assert old.version != new.version
    for _ in range(2):
        answers = [each.recommend({"user_id": "3"}, k=40) for each in (old, new)]
        assert [each.version for each in answers] == [old.version, new.version]
        assert answers[0].items == answers[1].items
        assert not answers[0].missing_shards + answers[1].missing_shards
    held = cluster.shards[0].versions
    assert set(held.about()) == {old.version, new.version}
    held._versions[old.version].used -= 100
    held.load(tmp_path / "next")
    assert set(held.about()) == {new.version}, "what nobody asks about any more goes"
    answer = old.recommend({"user_id": "3"}, k=40)
    assert answer.missing_shards == (0,), "a shard that lacks the version gives no answer of another one"
    wait_until(lambda: not old.recommend({"user_id": "3"}, k=40).missing_shards)


def test_a_version_that_a_shard_cannot_load_is_refused(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = other_version(cluster.export, tmp_path / "next")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(client, "_THIS_MACHINE", ())  # shards of other machines must follow by themselves
        with pytest.raises(ConfigError, match="another version"):
            cluster.front(following, wait_s=0.2)
    cluster.shards.reverse()
    with pytest.raises(ConfigError, match="shard 0 of 2"):
        cluster.front(wait_s=0.2)
    cluster.shards.reverse()
    index = next((tmp_path / "next" / "items").glob("index*"))
    content = bytearray(index.read_bytes())
    content[-1] ^= 1
    index.write_bytes(content)
    with pytest.raises(ExportError, match=index.name):
        cluster.shards[0].versions.load(tmp_path / "next")
    with pytest.raises(ConfigError, match="host:port"):
        ShardSettings(addresses=("localhost",)).check()


def test_shards_ask_for_their_key(shop: Shop, tmp_path: Path) -> None:
    shards = [RunningShard(shop.export, shard, api_key="secret") for shard in range(NUM_SHARDS)]
    cluster = Cluster(shop.export, shards, tmp_path)
    with pytest.raises(ConfigError, match="shard 0"):
        cluster.front(wait_s=0.1)
    assert not cluster.front(api_key="secret", deadline_s=5).recommend({"user_id": "3"}).missing_shards
    cluster.end()


def test_damaged_messages_are_refused() -> None:
    question = ShardQuestion(
        queries=torch.randn(2, 4), k=3, filters=["a:b", None], exclude=[torch.tensor([7]), None], probes=2
    )
    content = encode_question(question)
    again = decode_question(content)
    assert torch.equal(again.queries, question.queries)
    assert (again.k, again.filters, again.probes, [each is not None and each.tolist() for each in again.exclude]) == (
        *(3, ["a:b", None], 2),
        [[7], []],
    )
    generator, silent = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        place = int(torch.randint(len(content), (), generator=generator))
        broken = bytearray(content)
        broken[place] ^= 1 << int(torch.randint(8, (), generator=generator))
        with contextlib.suppress(RequestError):
            decode_question(bytes(broken[: place or None] if place % 3 == 0 else broken))
            silent += 1  # a flipped bit of a number is another number
    assert silent < 200
    for wrong in (b"", content, b'{"k": 1}'):
        with pytest.raises(RequestError, match="shard"):
            decode_answer(wrong)


def test_shards_search_for_recommenders_alone(tmp_path: Path) -> None:
    settings = ShardSettings(addresses=("127.0.0.1:1",))
    with pytest.raises(ConfigError, match="FakeAnswerer"):
        load_front(tmp_path, load=lambda folder: FakeAnswerer(), settings=settings, seen=tmp_path)
