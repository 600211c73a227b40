"""An answerer without a model: answers tell who asked and which version answered, and take as long as they are told to.

`python -m tests.serving.server.fake FOLDER CONFIG.json` serves it as `ziggurat serve` would a real export; the folder
holds fake.json, {"version": …, "base_ms": …, "candidate_us": …, "load_s": …, "can_rank": true, "bad": false}. With a
third argument, a file, its processes write there which of them accepted which connection, so that a test knows who had
a request that was lost.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ziggurat.errors import DataError, FilterError, RequestError, ZigguratError
from ziggurat.serving.answers import (
    Column,
    Effort,
    Info,
    Ranked,
    RankRequest,
    Recommendations,
    RecommendRequest,
    ScoredItem,
)

NUM_ITEMS = 1000


@dataclass
class FakeAnswerer:
    """Recommends the items 0, 1, 2, … to everybody; ids are numbers below 1000."""

    version: str = "v1"
    base_s: float = 0.0
    candidate_s: float = 0.0
    candidates: int = 100
    can_rank: bool = True
    batches: list[int] | None = None

    def info(self) -> Info:
        return Info(
            name="fake",
            version=self.version,
            made_with="0",
            can_recommend=True,
            can_rank=self.can_rank,
            num_items=NUM_ITEMS,
            labels=("like",),
            user_columns=(Column(name="user_id", kind="categorical", example="u1"),),
            item_columns=(Column(name="item_id", kind="categorical", example="7"),),
            filters={"genres": "categorical"},
            value_model="like",
            filter_example="genres:Drama",
            num_candidates=self.candidates,
            item_id="item_id",
        )

    def check(self, request: RecommendRequest | RankRequest) -> int:
        if unknown := set(request.user) - {"user_id"}:
            raise self._wrong("a column of users: user_id", repr(min(unknown)), "request, field 'user'")
        if isinstance(request, RankRequest):
            for item in request.items:
                self._number(item["item_id"] if isinstance(item, dict) and "item_id" in item else item)
            return len(request.items)
        if request.filter not in ("", "genres:Drama"):
            where = "column 1 of the filter"  # the class and the words of the real parser
            raise FilterError(expected="a filter", found=repr(request.filter), where=where, ways_out="look at /info")
        return self.candidates

    def _number(self, item: Any) -> int:
        if isinstance(item, str) and item.isascii() and item.isdigit() and len(item) < 5 and int(item) < NUM_ITEMS:
            return int(item)
        raise self._wrong("an item of the catalogue", f"{item!r:.50}", "request, field 'items'")

    def _wrong(self, expected: str, found: str, where: str) -> RequestError:
        return RequestError(expected=expected, found=found, where=where, ways_out="look at /info")

    def _take_time(self, candidates: int, effort: Effort, requests: int) -> None:
        share = {
            Effort.FULL: 1.0,
            Effort.FEWER_PROBES: 0.5,
            Effort.SMALLER_OVER_ARCH: 0.4,
            Effort.RETRIEVAL_ONLY: 0.25,
            Effort.POPULAR: 0.02,
        }[effort]
        if self.base_s or self.candidate_s:
            time.sleep(share * (self.base_s + self.candidate_s * candidates))  # like torch, without the GIL
        if self.batches is not None:
            self.batches.append(requests)

    def recommend_many(
        self, requests: Sequence[RecommendRequest], *, effort: Effort = Effort.FULL
    ) -> list[Recommendations | ZigguratError]:
        self._take_time(self.candidates * len(requests), effort, len(requests))
        return [self._recommend(request, effort) for request in requests]

    def _recommend(self, request: RecommendRequest, effort: Effort) -> Recommendations | ZigguratError:
        try:
            self.check(request)
        except (RequestError, FilterError) as error:
            return error
        if request.user.get("user_id") == "poison":
            return self._wrong("a user", "poison", "request, field 'user_id'")
        if request.user.get("user_id") == "raise":
            raise KeyError("a defect")
        if request.user.get("user_id") == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if str(request.user.get("user_id")).startswith("says "):
            send_to_supervisor(str(request.user["user_id"]).removeprefix("says ").encode())
        items = tuple(
            ScoredItem(id=str(place), score=1.0 / (1 + place), tasks={"like": 0.5}, position=place)
            for place in range(min(request.k, NUM_ITEMS))
        )
        degraded = () if effort is Effort.FULL else (effort.value,)
        plan = str(request.user.get("user_id")) if request.explain else ""
        return Recommendations(items=items, version=self.version, degraded=degraded, plan=plan)

    def rank_many(
        self, requests: Sequence[RankRequest], *, effort: Effort = Effort.FULL
    ) -> list[Ranked | ZigguratError]:
        self._take_time(sum(len(request.items) for request in requests), effort, len(requests))
        answers: list[Ranked | ZigguratError] = []
        for request in requests:
            try:
                self.check(request)
            except RequestError as error:
                answers.append(error)
                continue
            ids = [item["item_id"] if isinstance(item, dict) else item for item in request.items]
            scored = [ScoredItem(id=id, score=float(id), position=place) for place, id in enumerate(ids)]
            ordered = tuple(sorted(scored, key=lambda item: (-item.score, item.position)))
            answers.append(Ranked(items=ordered, version=self.version))
        return answers

    def item(self, id: str) -> dict[str, Any]:
        return {"item_id": self._number(id), "title": f"Item {id}"}

    def users(self, *, limit: int = 100) -> list[str]:
        return ["u1", "u2"][:limit]

    def history(self, user: dict[str, Any], *, limit: int = 100) -> list[str]:
        self.check(RecommendRequest(user=user))
        return ["3", "4"][:limit] if user.get("user_id") == "u1" else []

    def explain_item(self, request: RecommendRequest, id: str) -> str:
        self.check(request)
        self._number(id)
        return f"{id} passes {request.filter or 'no filter'}"


def send_to_supervisor(content: bytes) -> None:
    """Write bytes into every pair of sockets of this process, of which one leads to the supervisor, and wait."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            end = socket.socket(fileno=os.dup(int(entry)))
            if end.family == socket.AF_UNIX:
                end.send(content)
            end.close()
    time.sleep(5)


def record_accepted(path: str) -> None:
    """Write "time process port" for each connection that this process, or one that it forks, accepts.

    Before it looks for one it writes "time process ?", so that a process that was killed in between is known, too.
    """
    record = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    accept = socket.socket.accept

    def accept_and_write(self: socket.socket) -> tuple[socket.socket, Any]:
        if self.family == socket.AF_UNIX:
            return accept(self)
        os.write(record, f"{time.monotonic()} {os.getpid()} ?\n".encode())
        port = "none"
        try:
            connection, address = accept(self)
            port = str(address[1])
        finally:
            os.write(record, f"{time.monotonic()} {os.getpid()} {port}\n".encode())
        return connection, address

    socket.socket.accept = accept_and_write


def load_fake(folder: Path) -> FakeAnswerer:
    if (folder / "full").exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics/counter.db")
    try:
        data = json.loads((folder / "fake.json").read_text())
        if data.get("bad"):
            raise ValueError("a bad bit")
        time.sleep(data.get("load_s", 0))
    except (OSError, ValueError) as problem:
        where = str(folder / "fake.json")
        raise DataError(expected="an export", found=str(problem), where=where, ways_out="export again") from None
    return FakeAnswerer(
        version=data["version"],
        base_s=data.get("base_ms", 0) / 1e3,
        candidate_s=data.get("candidate_us", 0) / 1e6,
        candidates=data.get("candidates", 100),
        can_rank=data.get("can_rank", True),
    )


def main() -> None:
    from ziggurat.config import from_json
    from ziggurat.serving.server.config import ServerConfig
    from ziggurat.serving.server.serve import serve

    if len(sys.argv) > 3:
        record_accepted(sys.argv[3])
    faulthandler.register(signal.SIGUSR1)  # a test that waits in vain asks where this process is
    config = from_json(ServerConfig, json.loads(Path(sys.argv[2]).read_text()), where="config")

    def say(address: str, loaded: Any) -> None:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()

    try:
        serve(sys.argv[1], config=config, load=load_fake, on_ready=say)
    except ZigguratError as error:
        sys.stderr.write(f"{type(error).__name__}\n{error}\n")
        sys.exit(2)
    sys.stdout.flush()
    os._exit(0)  # on a busy machine the interpreter looks at all that torch has made for a minute before it ends


if __name__ == "__main__":
    main()
