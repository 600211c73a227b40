"""`ziggurat serve --shards 2` for real: shards that die, hang and are swapped while clients ask."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.server.running import ROOT, Running, wait_until
from tests.serving.server.test_shards import other_version
from tests.serving.shop import Shop
from ziggurat.serving.recommender import Recommender

pytestmark = pytest.mark.slow
QUICK = ["--deadline-ms", "9000", "--server.spares", "0", "--server.hang-s", "1.5", "--server.linger-s", "0.2"]


def start(folder: Path, *arguments: str) -> Running:
    log = folder / f"log-{len(list(folder.glob('log*')))}.txt"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ziggurat", "serve", *arguments, "--port", "0", "--threads", "1"]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"(?:routes: http://| at )127\.0\.0\.1:(\d+)", line):
            return Running(process=process, port=int(found[1]), folder=folder, log=log)
    raise AssertionError(log.read_text())


@pytest.fixture
def server(shop: Shop, tmp_path: Path) -> Iterator[Running]:
    export = shutil.copytree(shop.export, tmp_path / "films")
    running = start(tmp_path, str(export), "--shards", "2", *QUICK)
    yield running
    running.process.terminate()
    running.process.wait(timeout=60)


def missing(server: Running) -> list[int]:
    status, answer = server.post("/recommend", {"user": {"user_id": "3"}, "k": 40})
    assert status == 200, answer
    return answer.get("missing_shards", [])


def test_shards_that_end_or_hang_are_replaced_and_swapped_together(server: Running) -> None:
    export = server.folder / "films"
    whole = Recommender.load(export).recommend({"user_id": "3"}, k=40)

    def items() -> Any:
        return [item["id"] for item in server.post("/recommend", {"user": {"user_id": "3"}, "k": 40})[1]["items"]]

    wait_until(lambda: not missing(server))
    assert items() == [item.id for item in whole.items]
    first, second = sorted(server.workers)[:2]
    for pid, number, shard in ((first, signal.SIGKILL, 0), (second, signal.SIGSTOP, 1)):
        os.kill(pid, number)
        wait_until(lambda shard=shard: missing(server) == [shard])
        wait_until(lambda: not missing(server), seconds=20)
        assert pid not in server.workers
    changed = server.admin("/admin/items", {"upsert": [{"item": "fresh", "tags": ["new"]}]})
    assert (changed[0], changed[1]["added"]) == (200, 1)
    asked = {"user": {"user_id": "3"}, "filter": "tags:new"}
    assert [item["id"] for item in server.post("/recommend", asked)[1]["items"]] == ["fresh"]
    following = other_version(export, server.folder / "next")
    status, answer = server.admin("/admin/swap", {"export": str(following)})
    assert (status, answer["version"]) == (200, Recommender.load(following).version)
    assert not missing(server)
    status, answer = server.admin("/admin/swap", {"export": str(server.folder)})
    assert status == 409
    assert items() == [item.id for item in whole.items]
    wait_until(lambda: len(server.workers) == 3)  # two shards and a worker
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=60)
    assert not server.workers_left()


def test_shards_elsewhere_follow_the_link(shop: Shop, tmp_path: Path) -> None:
    shutil.copytree(shop.export, tmp_path / "v1")
    link = tmp_path / "current"
    link.symlink_to("v1")
    shards = [start(tmp_path, str(link), "--shard", f"{shard}/2", "--watch", *QUICK) for shard in range(2)]
    addresses = ",".join(f"127.0.0.1:{each.port}" for each in shards)
    front = start(tmp_path, str(link), "--shard-addresses", addresses, "--watch", *QUICK)
    try:
        wait_until(lambda: not missing(front))
        following = other_version(tmp_path / "v1", tmp_path / "v2")
        new = tmp_path / "new"
        new.symlink_to("v2")
        new.rename(link)
        version = Recommender.load(following).version
        wait_until(lambda: version in front.get("/readyz")[1], seconds=30)
        assert not missing(front)
        (worker,) = shards[0].workers
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: missing(front) == [0])
        wait_until(lambda: not missing(front), seconds=20)
    finally:
        for each in (front, *shards):
            each.process.terminate()
            each.process.wait(timeout=60)
    assert not front.workers_left()
