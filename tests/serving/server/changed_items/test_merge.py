"""Changes of items merged while workers answer: the same items for all of them, after any crash."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import ziggurat as zg
from tests.serving.server.changed_items.test_live import USER, live
from tests.serving.shop import Shop
from tests.serving.test_live_items import FILTERS, anew, random_change
from ziggurat.errors import ExportError, ZigguratError
from ziggurat.serving.answering.live_items import ItemChanges
from ziggurat.serving.answers import RankRequest, RecommendRequest
from ziggurat.serving.server.changed_items.live import LiveItems, MergePolicy
from ziggurat.serving.server.metrics import Metrics


@pytest.fixture
def folder(shop: Shop, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shop.export, tmp_path / "films"))


def answers(recommender: zg.Recommender) -> list[list[tuple[str, float]]]:
    """Items and scores of every filter; the whole catalogue is searched."""
    requests = [RecommendRequest(user=USER, k=60, filter=text, exclude_seen=False) for text in FILTERS]
    found = recommender.recommend_many(requests)
    assert not [each for each in found if isinstance(each, ZigguratError)]
    return [[(item.id, round(item.score, 5)) for item in each.items] for each in found]  # type: ignore[union-attr]


def bytes_of(items: LiveItems) -> int:
    """Bytes of the journal, as they are shown."""
    return items.recommender.info().changes["journal_bytes"]


def rebuilt(recommender: zg.Recommender, folder: Path) -> list[list[tuple[str, float]]]:
    """What an index of the same items would answer that was made at once."""
    other = zg.Recommender.load(folder, check=False)
    other.chain = anew(recommender)
    return answers(other)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_merged_items_are_those_of_a_new_index(folder: Path, seed: int) -> None:
    draw, workers = random.Random(seed), [live(folder), live(folder)]
    plain = zg.Recommender.load(folder, check=False)
    merges = 0
    for step in range(14 if seed else 10):
        worker = draw.choice(workers)
        if draw.random() < 0.3:
            merges += worker.merge()
            assert not list(worker.journal.folder.glob("0*.json"))
        else:
            change = random_change(draw)
            worker.change(change)
            plain.change_items(change)
        if step % 5 == 4:
            later = live(folder)
            for each in (*workers, later):
                each.follow()
            expected = answers(plain)
            assert expected == rebuilt(plain, folder)
            for each in (*workers, later):
                assert answers(each.recommender) == expected, step
            assert len({each.recommender.version for each in (*workers, later)}) == 1
            named = [RankRequest(user=USER, items=(expected[0][0][0], expected[0][-1][0]))]
            scores = [each.rank_many(named)[0].items for each in (plain, later.recommender)]  # type: ignore[union-attr]
            assert [item.score for item in scores[0]] == pytest.approx([item.score for item in scores[1]], abs=1e-5)
    assert merges > 0
    assert len(list(workers[0].journal.folder.glob("merged-*"))) == 1


def test_many_changes_are_merged_in_the_background_while_answers_go_on(folder: Path) -> None:
    items = live(folder)
    items.policy = MergePolicy(least_items=5, share=0.1)
    items.change(ItemChanges(delete=("i1", "i2")))
    items.follow()
    assert items._merging is None, "too few"
    stop, problems, asked = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            found = items.recommender.recommend_many([RecommendRequest(user=USER, k=50, filter="price:>0")])
            problems.extend(each for each in found if isinstance(each, Exception) or not each.items)
            asked.append(items.recommender.chain.changes.num_merged)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        rows = tuple({"item": f"n{number}", "price": number, "tags": ["new"]} for number in range(6))
        items.change(ItemChanges(upsert=rows))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (asked[-1:] != [2] or bytes_of(items)):
            items.follow()
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert problems == []
    assert set(asked) == {0, 2}
    figures = items.recommender.info().changes
    assert figures.pop("last_merge") > "2026"
    assert figures == {
        "live_items": 44,
        "deleted_items": 2,
        "unmerged_items": 0,
        "changes": 2,
        "merged_changes": 2,
        "journal_bytes": 0,
    }
    items.change(ItemChanges(delete=("n0",)))
    figures = items.recommender.info().changes
    assert (figures["unmerged_items"], figures["journal_bytes"] > 100) == (1, True)
    assert items.recommender.version.endswith("+3.2")
    metrics = Metrics()
    metrics.show_items(items.recommender.info())
    page = metrics.page()[0].decode()
    assert "ziggurat_live_items 43.0" in page
    assert "ziggurat_deleted_items 3.0" in page


def test_all_items_may_go(folder: Path) -> None:
    items = live(folder)
    items.change(ItemChanges(delete=tuple(f"i{number}" for number in range(40))))
    assert items.merge()
    later = live(folder)
    later.follow()
    for each in (items, later):
        assert each.recommender.recommend(USER, k=5, exclude_seen=False).items == ()
        each.follow()
    later.change(ItemChanges(upsert=({"item": "i3", "price": 1.0},)))
    items.follow()
    assert answers(items.recommender) == answers(later.recommender)
    assert [id for id, _ in answers(items.recommender)[0]] == ["i3"]


def test_damaged_merged_items_are_refused_by_name(folder: Path) -> None:
    items = live(folder)
    items.change(ItemChanges(delete=("i1",)))
    items.merge()
    path = items.journal.merged_path(1) / "items" / "index.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ExportError, match=r"merged-00000001/items/index\.safetensors"):
        live(folder).follow()
    assert "i1" not in {id for id, _ in answers(items.recommender)[0]}, "who has it goes on"


class Dies(BaseException):
    """The process is dead: nothing that stands in `finally` happens on the disk any more."""


NAMES = ("fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir", "chmod")


def run_until(call: int, work: Callable[[], Any]) -> bool:
    """Do something in a process that dies before its system call of this number; whether it came so far."""
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def before(*given: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > call:
                raise Dies
            return real(*given, **options)

        return before

    patches = [mock.patch.object(os, name, dying(getattr(os, name))) for name in NAMES]
    try:
        for patch in patches:
            patch.start()
        work()
    except Dies:
        return True
    finally:
        for patch in patches:
            patch.stop()
    return False


def killed_at_calls(folder: Path, *, stride: int) -> int:
    """Die before every `stride`th system call of a change and a merge; the number of deaths."""
    first = live(folder)
    first.change(ItemChanges(delete=("i1",)))
    first.merge()
    first.change(ItemChanges(upsert=({"item": "new", "price": 1.0, "tags": ["t1"]},)))
    states = {2: answers(first.recommender)}
    start = shutil.copytree(first.journal.folder, folder.with_name("start"))
    third = ItemChanges(delete=("i2",), upsert=({"item": "i3", "price": 2.0},))
    first.change(third)
    states[3] = answers(first.recommender)
    deaths = 0
    while True:
        shutil.rmtree(first.journal.folder)
        shutil.copytree(start, first.journal.folder)
        worker, other, done = live(folder), live(folder), []
        other.follow()

        def work(worker: LiveItems = worker, done: list[int] = done) -> None:
            worker.change(third)
            done.append(3)
            worker.merge()

        died = run_until(deaths * stride, work)
        later = live(folder)
        number = later.follow()
        assert number in ({3} if done else {2, 3})
        assert other.follow() == number
        for each in (later, other):
            assert answers(each.recommender) == states[number]
        if number == 2:
            later.change(third)
        later.change(ItemChanges(upsert=({"item": "new", "tags": ["t2"]},)))
        assert later.merge()
        names = {path.name for path in later.journal.folder.iterdir()}
        assert names == {"lock", "merging", "merged-00000004"}, "what the dead one left is gone"
        assert other.follow() == 4
        assert answers(other.recommender) == answers(later.recommender)
        if not died:
            return deaths
        deaths += 1


def test_a_crash_in_a_change_or_a_merge_leaves_the_state_before_or_after(folder: Path) -> None:
    assert killed_at_calls(folder, stride=16) > 1


@pytest.mark.slow
def test_a_crash_at_any_system_call_leaves_the_state_before_or_after(folder: Path) -> None:
    assert killed_at_calls(folder, stride=1) > 30


def change_and_merge(folder: str, seed: int, log: str) -> None:
    """Change and merge items for ever, and note every change that was answered."""
    items, draw = live(Path(folder)), random.Random(seed)
    with open(log, "a") as file:
        while True:
            change = random_change(draw)
            items.change(change)
            file.write(json.dumps(change.to_json()) + "\n")
            file.flush()
            if draw.random() < 0.4:
                items.merge()


@pytest.mark.slow
@pytest.mark.chaos
def test_killed_thirty_times_while_changing_and_merging(folder: Path, tmp_path: Path) -> None:
    """`make chaos-serve`: kill -9 at random times; every change that was answered is there, one more at most."""
    plain, draw, total = zg.Recommender.load(folder, check=False), random.Random(0), 0
    for seed in range(30):
        log = tmp_path / f"{seed}.jsonl"
        process = multiprocessing.get_context("forkserver").Process(
            target=change_and_merge, args=(str(folder), seed, str(log))
        )
        process.start()
        while not log.exists():
            time.sleep(0.01)
        time.sleep(draw.uniform(0.02, 0.6))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        done = [ItemChanges.from_json(json.loads(line)) for line in log.read_text().splitlines()]
        again = random.Random(seed)  # the change that was under way
        expected = [random_change(again)]
        for _ in done:
            if again.random() < 0.4:
                pass
            expected.append(random_change(again))
        later = live(folder)
        number = later.follow()
        for change in expected[:-1]:
            plain.change_items(change)  # one that changes nothing has no number
        assert number - plain.num_changes in (0, 1)
        if number > plain.num_changes:
            plain.change_items(expected[-1])
        total += len(done)
        assert answers(later.recommender) == answers(plain), seed
    print(f"30 kills, {total} changes")
