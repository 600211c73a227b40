"""Swaps, drains, SIGHUP, SIGSTOP and dead workers interleaved at random, under load (`make chaos-serve`).

The answers of a client that asks all the while are looked at:

- an answer is whole, and of a version that was served at that time: nothing silent;
- a request that a living worker took is answered (a worker that is killed takes its requests with it);
- the server says nothing raw, and ends with status 0 and without processes or folders left.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.serving.server.running import Running, running, wait_until, write_export

RAW = ("Traceback", "JSONDecodeError", "AssertionError", "Exception ignored", "Task exception")
QUICK = {"workers": 2, "hang_s": 1.0, "linger_s": 0.05, "drain_s": 5, "deadline_ms": 9000, "degrade": False}


@dataclass
class Client:
    """Asks without a pause, one connection after the other, and remembers what came back."""

    server: Running
    statuses: Counter[Any] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    allowed: set[str] = field(default_factory=set)
    killing: float = 0.0  # until then a lost answer may be that of a killed worker
    ended: bool = False

    def run(self) -> None:
        while not self.ended:
            began = time.monotonic()
            try:
                status, answer = self.server.recommend()
            except (OSError, ValueError, http.client.HTTPException) as problem:
                self.statuses["lost"] += 1
                if began > self.killing and not self.ended:
                    self.wrong.append(f"lost after {time.monotonic() - began:.2f} s: {problem!r}")
                continue
            self.statuses[status] += 1
            if status == 200 and (answer["version"] not in self.allowed or len(answer["items"]) != 3):
                self.wrong.append(f"version {answer['version']} of {sorted(self.allowed)}")
            elif status not in (200, 503) or (status == 503 and not answer["error"]["ways_out"]):
                self.wrong.append(f"{status} {answer}")


class Chaos:
    """Random things that happen to one server; each is an interleaving with what still goes on."""

    def __init__(self, server: Running, client: Client, *, draws: random.Random) -> None:
        self.server, self.client, self.draws = server, client, draws
        self.counts: Counter[str] = Counter()
        self.stopped: list[tuple[float, int]] = []
        self.swaps: list[threading.Thread] = []
        self.number = 0

    def step(self) -> None:
        """Do one thing, after a moment of random length."""
        actions = (self.swap, self.bad_swap, self.hang_up, self.kill, self.stop, self.pause, self.garbage, self.replace)
        action = self.draws.choices(actions, weights=(3, 2, 3, 3, 2, 1, 2, 2))[0]
        self.counts[action.__name__] += 1
        action()
        time.sleep(self.draws.random() ** 3 * 0.2)
        self.go_on()

    def go_on(self, *, at_once: bool = False) -> None:
        """Let stopped processes go on whose time has come."""
        due = [each for each in self.stopped if at_once or each[0] < time.monotonic()]
        for each in due:
            self.stopped.remove(each)
            signalled(each[1], signal.SIGCONT)

    def swap(self) -> None:
        self.number += 1
        version = f"s{self.number}"
        folder = write_export(self.server.folder / f"swap{self.number % 50}", version=version)
        self.client.allowed.add(version)
        self._ask(folder)

    def bad_swap(self) -> None:
        kinds = ({"bad": True}, {"can_rank": False}, {"version": "slow", "load_s": 0.3})
        kind = self.draws.choice(kinds)
        self.client.allowed.add("slow")
        self._ask(write_export(self.server.folder / f"bad{self.draws.randrange(5)}", **kind))

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
        self.number += 1
        self.client.allowed.add(f"r{self.number}")
        new = write_export(self.server.folder / "new", version=f"r{self.number}")
        old = self.server.folder / f"old{self.number}"
        (self.server.folder / "export").rename(old)
        new.rename(self.server.folder / "export")

    def hang_up(self) -> None:
        self.server.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        if workers := self.server.workers:
            self.client.killing = time.monotonic() + 3
            signalled(self.draws.choice(workers), signal.SIGKILL)

    def stop(self) -> None:
        if workers := self.server.workers:
            pid = self.draws.choice(workers)
            self.client.killing = time.monotonic() + 5  # it may be killed for it
            self.stopped.append((time.monotonic() + self.draws.random() * 2, pid))
            signalled(pid, signal.SIGSTOP)

    def pause(self) -> None:
        """All processes, as Ctrl-Z and a frozen cgroup do it; none may be killed for that."""
        self.client.killing = time.monotonic() + 5  # a worker that was stopped before may be
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


def one_life(folder: Path, *, seed: int, steps: int) -> tuple[Counter[str], Counter[Any], list[str]]:
    """A server from its start to a SIGTERM in the middle of everything; counts, statuses, and what was wrong."""
    draws = random.Random(seed)
    with running(folder, **QUICK) as server:
        client = Client(server, allowed={"v1"})
        thread = threading.Thread(target=client.run, daemon=True)
        thread.start()
        chaos = Chaos(server, client, draws=draws)
        for _ in range(steps):
            chaos.step()
            if server.process.poll() is not None:
                client.wrong.append(f"the server ended with status {server.process.returncode}")
                break
        chaos.go_on(at_once=True)
        if draws.random() < 0.5:  # else SIGTERM comes in the middle of swaps
            with contextlib.suppress(AssertionError):
                wait_until(lambda: server.recommend()[0] == 200, seconds=15)
        client.killing = time.monotonic() + 60
        client.ended = True
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(timeout=30)
        thread.join(timeout=30)
        wrong = list(client.wrong)
        if status != 0:
            wrong.append(f"SIGTERM: status {status}")
        text = server.log.read_text()
        wrong += [f"raw: {word} in the log" for word in RAW if word in text]
        wrong += [f"left behind: {each.name}" for each in folder.iterdir() if each.name.startswith(".ziggurat")]
        if server.workers_left():
            wrong.append("processes left")
    return chaos.counts, client.statuses, wrong


def test_thirty_things_that_happen_to_a_server(tmp_path: Path) -> None:
    _, statuses, wrong = one_life(tmp_path, seed=1, steps=30)
    assert not wrong, wrong
    assert statuses[200] > 0


@pytest.mark.slow
@pytest.mark.chaos
def test_ten_thousand_things_that_happen_to_servers(tmp_path: Path) -> None:
    """`make chaos-serve`: 100 servers, 100 random things each."""
    counts: Counter[str] = Counter()
    statuses: Counter[Any] = Counter()
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        happened, answered, wrong = one_life(folder, seed=seed, steps=100)
        counts += happened
        statuses += answered
        print(f"server {seed}: {dict(happened)}, answers {dict(answered)}", flush=True)
        assert not wrong, (seed, wrong)
    print(f"{sum(count for name, count in counts.items() if ' ' not in name):,} things: {counts}, answers {statuses}")
