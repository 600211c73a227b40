"""Job: ranks that live in the hosts of a network for a whole benchmark, commanded together through pipes.

    parent ── {"op": "run", "name": …, "steps": 5} ──► every rank      one JSON object a line, the same for all
           ◄── {"seconds": …} ───────────────────────  every rank      several jobs can take turns: the others sleep

Ranks find each other as under torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
with GLOO_SOCKET_IFNAME naming the emulated link.

A rank that raises answers with its traceback, one that dies closes its pipe, one that hangs does not answer in time: in
all three cases the others are killed, since they wait for it, and the error names the rank with the end of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.datacentre.network import Network, PlainNetwork
from ziggurat.errors import TopologyError

ROOT = Path(__file__).resolve().parents[2]
_LOG_LINES = 25
_LOGS = "ziggurat-job-"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to start.

    Args:
        name: for messages.
        python: interpreter of the ranks.
        module: run as `python -m module`; ends in `serve_ranks(build)`.
        settings: given to `build` on every rank, as JSON.
        env: further environment variables.
        timeout_s: for each command.
        threads: intra-op threads of a rank.
        hosts: the host of every rank, equally many ranks on each; () puts ranks host after host, as torchrun does.
    """

    name: str
    python: str
    module: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 180.0
    threads: int = 1
    hosts: tuple[int, ...] = ()


class Job:
    """The processes of one job; a context manager.

    Args:
        spec: what to start.
        network: where.

    Attributes:
        infos: what `build` told of itself, by rank.
    """

    def __init__(self, spec: JobSpec, network: Network | PlainNetwork) -> None:
        self.spec, self._network = spec, network
        _remove_logs_of_the_dead()
        self._logs = tempfile.TemporaryDirectory(prefix=f"{_LOGS}{os.getpid()}-")
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._received: list[bytes] = []
        try:
            port = str(network.free_port())
            for rank in range(network.config.num_ranks):
                self._ranks.append(self._start(rank, port))
            self._received = [b""] * len(self._ranks)
            self.infos = self.ask({"op": "build", "settings": dict(spec.settings), "timeout_s": spec.timeout_s})
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def ask(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a command to all ranks and wait for all answers.

        Returns:
            Answers in rank order.

        Raises:
            TopologyError: a rank raised, died or hung. The job is dead then.
        """
        line = (json.dumps(dict(command)) + "\n").encode()
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead: reading says so, with its log
                rank.stdin.write(line)
                rank.stdin.flush()
        try:
            return self._answers(str(command["op"]))
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """Let the ranks leave the job together, then make sure of it."""
        for rank in self._ranks:
            if rank.stdin is not None and not rank.stdin.closed:
                rank.stdin.close()
        deadline = time.monotonic() + 10
        for rank in self._ranks:
            try:
                rank.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
        self.kill()

    def kill(self) -> None:
        """End everything now."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._logs.cleanup()

    # ------------------------------------------------------------------------------------------------------- inside

    def _start(self, rank: int, port: str) -> subprocess.Popen[bytes]:
        config = self._network.config
        hosts = self._hosts
        host = hosts[rank]
        env = {
            **os.environ,
            **self.spec.env,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": str(self.spec.threads),
            "RANK": str(rank),
            "WORLD_SIZE": str(config.num_ranks),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(config.ranks_per_host),
            "MASTER_ADDR": self._network.address(hosts[0]),
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": self._network.interface,
        }
        words = [self.spec.python, "-m", self.spec.module]
        with self._log(rank).open("w") as log:
            return subprocess.Popen(
                self._network.command(host, words),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=env,
            )

    @property
    def _hosts(self) -> tuple[int, ...]:
        """The host of every rank."""
        config = self._network.config
        return self.spec.hosts or tuple(rank // config.ranks_per_host for rank in range(config.num_ranks))

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"

    def _answers(self, operation: str) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        failures: dict[int, tuple[float, str]] = {}
        deadline = time.monotonic() + self.spec.timeout_s
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                selector.register(rank.stdout, selectors.EVENT_READ, number)
            while len(answers) + len(failures) < len(self._ranks):
                # One failure soon makes others fail: give them a moment, then name the first.
                ready = selector.select(0.3 if failures else max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for key, _ in ready:
                    number = key.data
                    answer = self._read(number)
                    if answer is None:
                        continue
                    selector.unregister(key.fileobj)
                    if "error" in answer:
                        failures[number] = (float(answer["when"]), str(answer["error"]))
                    else:
                        answers[number] = answer
        silent = [number for number in range(len(self._ranks)) if number not in answers and number not in failures]
        if failures:
            first = min(failures, key=lambda number: failures[number][0])
            text = failures[first][1]
            if silent and "Timed out" in text:  # the rank that waited is not the one that hangs
                raise self._failure(silent[0], operation, f"no answer of ranks {silent}; rank {first}: {text}")
            raise self._failure(first, operation, text)
        if silent:
            raise self._failure(silent[0], operation, f"no answer of ranks {silent} in {self.spec.timeout_s:g} s")
        return [answers[number] for number in range(len(self._ranks))]

    def _read(self, number: int) -> dict[str, Any] | None:
        """The answer of a rank, once its line is complete."""
        pipe = self._ranks[number].stdout
        assert pipe is not None
        data = os.read(pipe.fileno(), 1 << 20)
        if not data:
            code = self._ranks[number].wait()
            return {"error": f"the process ended with code {code}", "when": 0.0}
        self._received[number] += data
        if not data.endswith(b"\n"):
            return None
        line, self._received[number] = self._received[number], b""
        return json.loads(line)

    def _failure(self, rank: int, operation: str, found: str) -> TopologyError:
        tail = self._log(rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        log = "".join(f"\n          | {line}" for line in tail)
        return TopologyError(
            expected=f"an answer of every rank of {self.spec.name!r} to {operation!r}",
            found=f"rank {rank}: {found}{log}",
            where=f"host {self._hosts[rank]}, {self.spec.module}",
            ways_out=("correct what the log says", "--plain runs the ranks without emulated links"),
        )


def _remove_logs_of_the_dead() -> None:
    """Logs of predecessors that were killed: the one thing that the kernel does not remove."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_LOGS}*"):
        pid = folder.name.removeprefix(_LOGS).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
