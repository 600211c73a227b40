"""Swaps, drains, SIGHUP, SIGSTOP and dead workers interleaved at random, under load (`make chaos-serve`).

Clients ask all the while, and each answer and each loss is looked at:

- an answer is whole, and of a version that the server said it serves, at that time: nothing silent;
- a request is lost only with the process that had accepted its connection, and only if that process was killed, by us
  or by the server because we had stopped it. Who accepted it is read from what the server's processes write down, so no
  time near a kill is an excuse;
- the server says nothing raw, and ends with status 0 and without processes or folders left.

    python -m tests.serving.server.processes.test_chaos FOLDER FIRST LAST       lives of these seeds, a line each
"""

from __future__ import annotations

import bisect
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.serving.server.running import Running, running, wait_until, write_export

RAW = ("Traceback", "JSONDecodeError", "AssertionError", "Exception ignored", "Task exception")
QUICK = {"workers": 2, "hang_s": 1.0, "linger_s": 0.05, "drain_s": 5, "deadline_ms": 9000, "degrade": False}
NUM_CLIENTS = 3
PAUSE_S = 0.01  # of a client, so that the workers of a swap get time to load
OVERLAP_S = 10.0  # a worker of the version before may have been stopped when it was told to take no more connections
DAY_S = 86_400


@dataclass
class Lost:
    """A request without a whole answer: when it was lost, the port of its connection, and how."""

    began: float
    ended: float
    port: int
    problem: str


@dataclass
class Answered:
    """An answer with 200: when its request began and ended (seconds since 1970), and of which version it is."""

    began: float
    ended: float
    version: str


@dataclass
class Client:
    """Asks all the while, one connection after the other, and remembers what came back."""

    port: int
    statuses: Counter[Any] = field(default_factory=Counter)
    answers: list[Answered] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended: bool = False

    def run(self) -> None:
        while not self.ended:
            self.ask()
            time.sleep(PAUSE_S)

    def ask(self) -> None:
        began = time.monotonic()
        since = time.time()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        port = 0
        try:
            connection.connect()
            port = connection.sock.getsockname()[1]
            connection.request("POST", "/recommend", '{"user": {"user_id": "u1"}, "k": 3}')
            response = connection.getresponse()
            status = response.status
            answer = json.load(response)
        except (OSError, ValueError, http.client.HTTPException) as problem:
            if not self.ended:  # after the last SIGTERM nobody listens
                self.statuses["lost"] += 1
                ended = time.monotonic()
                self.lost.append(Lost(began, ended, port, f"from port {port} after {ended - began:.2f} s: {problem!r}"))
            return
        finally:
            connection.close()
        self.statuses[status] += 1
        if status == 200:
            self.answers.append(Answered(since, time.time(), answer["version"]))
            if len(answer["items"]) != 3:
                self.wrong.append(f"a part of an answer: {answer}")
        elif status != 503 or not answer["error"]["ways_out"]:
            self.wrong.append(f"{status} {answer}")


class Chaos:
    """Random things that happen to one server; each is an interleaving with what still goes on."""

    def __init__(self, server: Running, *, draws: random.Random) -> None:
        self.server = server
        self.draws = draws
        self.counts: Counter[str] = Counter()
        self.killed: set[int] = set()
        self.stopped: list[tuple[float, int]] = []
        self.swaps: list[threading.Thread] = []
        self.number = 0

    def step(self) -> None:
        """Do one thing, after a moment of random length, which is now and then long enough for a swap."""
        weights = {
            self.swap: 3,
            self.bad_swap: 2,
            self.hang_up: 3,
            self.kill: 3,
            self.stop: 2,
            self.pause: 1,
            self.garbage: 2,
            self.replace: 2,
            self.overwrite: 1,
        }
        action = self.draws.choices([*weights], weights=[*weights.values()])[0]
        self.counts[action.__name__] += 1
        action()
        is_calm = self.draws.random() < 0.15
        time.sleep(self.draws.random() if is_calm else self.draws.random() ** 3 * 0.2)
        self.go_on()

    def go_on(self, *, at_once: bool = False) -> None:
        """Let stopped processes go on whose time has come."""
        due = [each for each in self.stopped if at_once or each[0] < time.monotonic()]
        for each in due:
            self.stopped.remove(each)
            signalled(each[1], signal.SIGCONT)

    def _another(self, letter: str) -> str:
        """Return a version that no export had before."""
        self.number += 1
        return f"{letter}{self.number}"

    def swap(self) -> None:
        version = self._another("s")
        base_ms = self.draws.choice((0, 2, 20))
        self._ask(write_export(self.server.folder / f"swap{self.number % 50}", version=version, base_ms=base_ms))

    def bad_swap(self) -> None:
        kinds = ({"bad": True}, {"can_rank": False}, {"load_s": 0.3})
        kind = self.draws.choice(kinds)
        folder = self.server.folder / f"bad{self.draws.randrange(5)}"
        self._ask(write_export(folder, version=self._another("b"), **kind))

    def _ask(self, folder: Path) -> None:
        def ask() -> None:
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                status, _ = self.server.admin("/admin/swap", {"export": str(folder)})
                self.counts[f"swap {status}"] += 1

        self.swaps = [each for each in self.swaps if each.is_alive()]
        self.swaps.append(threading.Thread(target=ask, daemon=True))
        self.swaps[-1].start()

    def replace(self) -> None:
        """Another export over the folder of the command, as `ziggurat export --out` puts it there."""
        version = self._another("r")
        new = write_export(self.server.folder / "new", version=version, base_ms=self.draws.choice((0, 2, 20)))
        old = self.server.folder / f"old{self.number}"
        (self.server.folder / "export").rename(old)
        new.rename(self.server.folder / "export")
        shutil.rmtree(old)

    def overwrite(self) -> None:
        """Another export into the files of the command's folder, as `cp` and `rsync --inplace` put it there."""
        write_export(self.server.folder / "export", version=self._another("o"))

    def hang_up(self) -> None:
        self.server.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        if workers := self.server.workers:
            pid = self.draws.choice(workers)
            self.killed.add(pid)
            signalled(pid, signal.SIGKILL)

    def stop(self) -> None:
        if workers := self.server.workers:
            pid = self.draws.choice(workers)
            self.stopped.append((time.monotonic() + self.draws.random() * 2, pid))
            signalled(pid, signal.SIGSTOP)

    def pause(self) -> None:
        """All processes, as Ctrl-Z and a frozen cgroup do it; none may be killed for that."""
        pids = [self.server.process.pid, *self.server.workers]
        for pid in pids:
            signalled(pid, signal.SIGSTOP)
        time.sleep(self.draws.random() * 1.5)
        for pid in pids:
            signalled(pid, signal.SIGCONT)

    def garbage(self) -> None:
        """Bytes that are no request, and a connection that ends in the middle of one."""
        contents = (b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"POST /recommend HTTP/1.1\r\nHo")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.server.port), timeout=1) as end:
            end.sendall(self.draws.choice(contents))


def signalled(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Accepted:
    """Who accepted which connection, as the server's processes wrote it down."""

    def __init__(self, record: Path) -> None:
        self._by_port: dict[str, list[tuple[float, int]]] = {}
        self._unfinished: dict[int, float] = {}  # processes whose last word is that they look for a connection
        for line in record.read_text().splitlines():
            when, pid, port = line.split()
            if port == "?":
                self._unfinished[int(pid)] = float(when)
            else:
                self._unfinished.pop(int(pid), None)
                self._by_port.setdefault(port, []).append((float(when), int(pid)))

    def by(self, lost: Lost) -> int | None:
        """Return the process that accepted a connection; None if none did."""
        for when, pid in self._by_port.get(str(lost.port), []):
            if when >= lost.began:
                return pid
        for pid, when in self._unfinished.items():
            if lost.began - 1.0 < when < lost.ended:  # it was killed before it could write down what it accepted
                del self._unfinished[pid]
                return pid
        return None


def wrong_losses(losses: Sequence[Lost], *, record: Path, log: str, killed: set[int]) -> tuple[Counter[str], list[str]]:
    """Count losses by their cause; those of a process that went on are wrong.

    Args:
        losses: of all clients.
        record: what the server's processes wrote down.
        log: of the server, which names the workers that it killed because they were stopped, or got no time.
        killed: processes that were killed from outside.
    """
    accepted = Accepted(record)
    silent = {int(pid) for pid in re.findall(r"worker (\d+) (?:shows no sign of life|is stopped)", log)}
    causes: Counter[str] = Counter()
    wrong: list[str] = []
    for each in losses:
        pid = accepted.by(each)
        if pid in killed:
            causes["lost with a worker that was killed"] += 1
        elif pid in silent:
            causes["lost with a worker that the server killed for its silence"] += 1
        else:
            wrong.append(f"lost {each.problem}, accepted by {pid}, which nobody killed")
    return causes, wrong


def wrong_versions(answers: Sequence[Answered], *, log: str, start: float) -> list[str]:
    """Return the answers of versions that the server did not say it served when they were asked for."""
    begins = [start]
    versions = ["v1"]
    for clock, version in re.findall(r"^(\d\d:\d\d:\d\d) \w+ serving version (\S+) of", log, re.MULTILINE):
        hours, minutes, seconds = map(int, clock.split(":"))
        of_day = datetime.fromtimestamp(begins[-1])
        passed_s = hours * 3600 + minutes * 60 + seconds - (of_day.hour * 3600 + of_day.minute * 60 + of_day.second)
        begins.append(int(begins[-1]) + passed_s % DAY_S)
        versions.append(version)
    wrong = []
    for each in answers:
        first = bisect.bisect_right(begins, each.began - OVERLAP_S) - 1
        last = bisect.bisect_right(begins, each.ended + 2.0)  # new workers answer before the supervisor has said so
        if each.version not in versions[max(first, 0) : last]:
            wrong.append(f"an answer of {each.version}, while {versions[max(first, 0) : last]} were served")
    return wrong


@dataclass
class Life:
    """A server's life: what happened, what was answered, what was wrong."""

    counts: Counter[str]
    statuses: Counter[Any]
    causes: Counter[str]
    versions: int
    wrong: list[str]


def one_life(folder: Path, *, seed: int, steps: int) -> Life:
    """Run a server from its start to a SIGTERM in the middle of everything."""
    draws = random.Random(seed)
    start = time.time()
    record = folder / "accepted"
    with running(folder, accepted=record, export={"base_ms": 2}, **QUICK) as server:
        clients = [Client(server.port) for _ in range(NUM_CLIENTS)]
        threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        chaos = Chaos(server, draws=draws)
        wrong: list[str] = []
        for _ in range(steps):
            chaos.step()
            if server.process.poll() is not None:
                wrong.append(f"the server ended with status {server.process.returncode}")
                break
        chaos.go_on(at_once=True)
        if draws.random() < 0.5:  # else SIGTERM comes in the middle of swaps
            wrong += unlike_after_calm(server)
        for client in clients:
            client.ended = True
        server.process.send_signal(signal.SIGTERM)
        status = ended(server)
        for thread in threads:
            thread.join(timeout=30)
        log = server.log.read_text()
        if status != 0:
            wrong.append(f"SIGTERM: status {status}\n{log[-4000:]}")
        wrong += [f"raw: {word} in the log" for word in RAW if word in log]
        wrong += [f"left behind: {each.name}" for each in folder.iterdir() if each.name.startswith(".ziggurat")]
        if server.workers_left():
            wrong.append("processes left")
    lost = [each for client in clients for each in client.lost]
    answers = [each for client in clients for each in client.answers]
    causes, wrongly_lost = wrong_losses(lost, record=record, log=log, killed=chaos.killed)
    wrong += [each for client in clients for each in client.wrong]
    wrong += wrongly_lost
    wrong += wrong_versions(answers, log=log, start=start)
    statuses: Counter[Any] = Counter()
    for client in clients:
        statuses += client.statuses
    return Life(chaos.counts, statuses, causes, len({each.version for each in answers}), wrong)


def ended(server: Running) -> int | None:
    """Return the status that a server ends with; None, and where it is in its log, if it does not."""
    try:
        return server.process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        for pid in (server.process.pid, *server.workers):
            signalled(pid, signal.SIGUSR1)
        time.sleep(2)
        server.process.kill()
        return None


def unlike_after_calm(server: Running) -> list[str]:
    """Wait until nothing goes on any more; all workers then have one version, or it is wrong."""
    seen: set[str] = set()

    def is_one() -> bool:
        seen.clear()
        answers = [server.recommend() for _ in range(12)]
        seen.update(answer["version"] for status, answer in answers if status == 200)
        return len(seen) == 1 and all(status == 200 for status, _ in answers)

    try:
        wait_until(is_one, seconds=30)
    except (AssertionError, OSError, ValueError) as problem:
        return [f"half a minute after everything: versions {sorted(seen)}, {problem!r}"]
    return []


def test_a_loss_is_excused_by_what_happened_to_its_process_alone(tmp_path: Path) -> None:
    record = tmp_path / "accepted"
    record.write_text("1.0 11 ?\n1.0 11 4000\n5.0 12 4000\n6.0 13 4001\n7.0 13 ?\n")
    log = "10:00:00 ERROR worker 13 shows no sign of life; it is killed\n"

    def judged(began: float, port: int) -> int:
        return len(wrong_losses([Lost(began, began + 2.5, port, "x")], record=record, log=log, killed={12})[1])

    assert judged(4.0, 4000) == 0, "the second connection from this port was accepted by 12, which was killed"
    assert judged(0.5, 4000) == 1, "the first one by 11, which nobody killed"
    assert judged(4.0, 4001) == 0
    assert judged(4.0, 4002) == 1, "nobody accepted it"
    assert judged(6.0, 4002) == 0, "13 may have accepted it when it was killed"


def test_an_answer_of_a_version_that_is_served_no_more_is_wrong() -> None:
    start = datetime(2026, 1, 1, 9, 0).timestamp()
    log = "09:01:00 INFO serving version s1 of 'a'\n09:02:00 INFO serving version s2 of 'b'\n"

    def judged(seconds: float, version: str) -> int:
        return len(wrong_versions([Answered(start + seconds, start + seconds, version)], log=log, start=start))

    assert [judged(30, version) for version in ("v1", "s1", "s2")] == [0, 1, 1]
    assert [judged(61, version) for version in ("v1", "s1", "s2")] == [0, 0, 1]
    assert [judged(200, version) for version in ("v1", "s1", "s2")] == [1, 1, 0]


def test_thirty_things_that_happen_to_a_server(tmp_path: Path) -> None:
    life = one_life(tmp_path, seed=1, steps=30)
    assert not life.wrong, life.wrong
    assert life.statuses[200] > 0


def lives(folder: Path, *, seeds: Sequence[int], steps: int = 250) -> list[str]:
    """Run the lives of some seeds, say what happened in each, and return what was wrong."""
    counts: Counter[str] = Counter()
    statuses: Counter[Any] = Counter()
    causes: Counter[str] = Counter()
    wrong: list[str] = []
    versions = 0
    for seed in seeds:
        place = folder / str(seed)
        place.mkdir(parents=True)
        began = time.monotonic()
        life = one_life(place, seed=seed, steps=steps)
        counts += life.counts
        statuses += life.statuses
        causes += life.causes
        versions += life.versions
        wrong += [f"server {seed}: {each}" for each in life.wrong]
        took = time.monotonic() - began
        print(f"server {seed}: {took:.0f} s, {life.versions} versions, answers {dict(life.statuses)}", flush=True)
        if life.wrong:
            print(*life.wrong, sep="\n", flush=True)
        else:
            shutil.rmtree(place)
    things = sum(count for name, count in counts.items() if " " not in name)
    print(f"{things:,} things that happened to {len(seeds)} servers: {dict(counts)}")
    print(f"{versions} versions answered, {dict(statuses)}; {dict(causes)}; wrong: {len(wrong)}")
    return wrong


@pytest.mark.slow
@pytest.mark.chaos
def test_ten_thousand_things_that_happen_to_servers(tmp_path: Path) -> None:
    """`make chaos-serve`: 40 servers, 250 random things each."""
    wrong = lives(tmp_path, seeds=range(40))
    assert not wrong, wrong[:20]


if __name__ == "__main__":
    sys.exit(bool(lives(Path(sys.argv[1]), seeds=range(int(sys.argv[2]), int(sys.argv[3]) + 1))))
