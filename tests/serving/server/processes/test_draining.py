"""What clients are told while a server ends, pauses, or has no worker: an answer at once, never silence."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.serving.server.running import Running, UnixConnection, running, wait_until, write_export
from ziggurat.errors import ConfigError
from ziggurat.serving.server import serve
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.processes.stand_in import StandIn
from ziggurat.serving.server.serve import bind


class Later:
    """What a call in a thread returned, and when."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(call, *args))
        self._thread.start()

    def _run(self, call: Any, *args: Any) -> None:
        try:
            self.result = call(*args)
        except OSError as problem:
            self.result = problem

    def wait(self) -> Any:
        self._thread.join(timeout=30)
        return self.result


def timed(call: Any, *args: Any) -> tuple[float, Any]:
    start = time.monotonic()
    result = call(*args)
    return time.monotonic() - start, result


def test_who_comes_while_a_server_ends_is_told_so_at_once(tmp_path: Path) -> None:
    with running(tmp_path, export={"base_ms": 4000}, deadline_ms=9000, degrade=False, linger_s=0) as server:
        taken = Later(server.recommend)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        for _ in range(7):
            status, answer = server.recommend()
            assert (status, answer["error"]["kind"]) == (503, "UnavailableError")
        assert taken.result is None, "at once: while what was taken in is still computed"
        assert server.get("/readyz")[0] == 503
        assert (server.get("/livez")[0], json.loads(server.get("/livez")[1])) == (200, {"live": True})
        assert taken.wait()[0] == 200, "what was taken in is answered"
        assert server.process.wait(timeout=20) == 0


def test_what_came_while_all_processes_were_stopped_is_answered_by_who_holds_the_port() -> None:
    with bind("127.0.0.1", 0) as listener, selectors.DefaultSelector() as selector:
        stand_in = StandIn(listener=listener, selector=selector)
        stand_in.turn(on=True)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        wait_until(lambda: selector.select(0))
        stand_in.handle_ready(listener)
        clients[0].sendall(b"POST /recommend HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        for connection in stand_in._deadlines:
            stand_in._deadlines[connection] = (
                0.0  # the process was stopped for longer than the deadline of a connection
            )
        stand_in.turn(on=True)
        for client in clients:  # the second one has asked for nothing yet, and learns at least why its connection ends
            client.settimeout(5)
            assert client.recv(1000).startswith(b"HTTP/1.1 503 ")
            client.close()
        stand_in.end()
        assert not stand_in._deadlines


def test_a_swap_that_loads_ends_with_the_server_and_says_so(tmp_path: Path) -> None:
    with running(tmp_path, drain_s=25) as server:
        slow = write_export(tmp_path / "slow", version="v2", load_s=30)
        swap = Later(server.admin, "/admin/swap", {"export": str(slow)})
        wait_until(lambda: "slow" in server.log.read_text())
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        status, answer = swap.wait()
        assert (status, answer["error"]["found"]) == (409, "one that is ending")
        assert server.process.wait(timeout=15) == 0
        assert time.monotonic() - start < 15, "not all of drain_s"


def test_a_swap_that_outlives_the_worker_that_was_asked_for_it_is_said_to_go_on(tmp_path: Path) -> None:
    with running(tmp_path, spares=0, linger_s=1.2, drain_s=1.4) as server:
        slow = write_export(tmp_path / "slow", version="v2", load_s=3)
        # The worker that holds this connection is asked for both swaps, and ends after the first.
        connection = UnixConnection(server.admin_socket)
        connection.connect()
        other = Later(server.admin, "/admin/swap", {"export": str(tmp_path / "export")})
        wait_until(lambda: "serving version" in server.log.read_text())
        connection.request("POST", "/admin/swap", json.dumps({"export": str(slow)}))
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["error"]["where"]) == (503, "swap")
        connection.close()
        assert other.wait() == (200, {"version": "v1"})
        wait_until(lambda: server.recommend()[1]["version"] == "v2")


def test_a_sighup_while_a_swap_loads_is_done_after_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        slow = write_export(tmp_path / "slow", version="v2", load_s=1)
        swap = Later(server.admin, "/admin/swap", {"export": str(slow)})
        wait_until(lambda: "slow" in server.log.read_text())
        server.process.send_signal(signal.SIGHUP)
        assert swap.wait() == (200, {"version": "v2"})
        wait_until(lambda: server.recommend()[1]["version"] == "v1")


def test_a_swap_whose_worker_is_killed_names_the_export_of_the_swap(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        wait_until(lambda: len(server.workers) == 2)
        before = server.workers
        slow = write_export(tmp_path / "slow", version="v2", load_s=30)
        swap = Later(server.admin, "/admin/swap", {"export": str(slow)})
        wait_until(lambda: len(server.workers) == 3)
        (loading,) = set(server.workers) - set(before)
        os.kill(loading, signal.SIGKILL)
        status, answer = swap.wait()
        assert (status, answer["error"]["where"]) == (409, str(slow))
        assert server.recommend()[1]["version"] == "v1"


def everybody(server: Running, number: int) -> None:
    for pid in (server.process.pid, *server.workers):
        os.kill(pid, number)


def test_a_pause_of_all_processes_ends_none_of_them(tmp_path: Path) -> None:
    with running(tmp_path, workers=2, hang_s=1.0) as server:
        wait_until(lambda: len(server.workers) == 3)
        before = server.workers
        everybody(server, signal.SIGSTOP)
        time.sleep(3)
        everybody(server, signal.SIGCONT)
        wait_until(lambda: "was stopped for" in server.log.read_text())
        time.sleep(1)
        assert (server.workers, server.recommend()[0]) == (before, 200)


def test_without_a_worker_clients_are_told_so_and_a_stopped_one_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, spares=0, hang_s=1.0) as server:
        (pid,) = server.workers
        write_export(server.private_copy, version="v1", load_s=4)  # the next worker takes its time
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.workers and server.workers != [pid])
        (loading,) = server.workers
        os.kill(loading, signal.SIGSTOP)
        time.sleep(1.2)
        took, (status, _) = timed(server.get, "/readyz")
        assert (status, took < 4) == (503, True), "before a worker is there again"
        assert server.get("/livez")[0] == 200
        wait_until(lambda: loading not in server.workers)
        wait_until(lambda: server.recommend()[0] == 200, seconds=20)


@pytest.mark.parametrize(("hard", "expected"), [(resource.RLIM_INFINITY, 4096), (10_000, 4096), (1024, 896), (40, 0)])
def test_connections_fit_into_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch, hard: int, expected: int
) -> None:
    limits = [(min(256, hard) if hard > 0 else 256, hard)]
    monkeypatch.setattr(serve.resource, "getrlimit", lambda which: limits[-1])
    monkeypatch.setattr(serve.resource, "setrlimit", lambda which, pair: limits.append(pair))
    if not expected:
        with pytest.raises(ConfigError, match="a limit of 40"):
            serve.within_open_files(ServerConfig())
        return
    assert serve.within_open_files(ServerConfig()).max_connections == expected
    assert limits[-1][0] == expected + 128


def test_who_asks_after_the_answer_to_a_swap_is_answered_by_the_new_version(tmp_path: Path) -> None:
    exports = [write_export(tmp_path / version, version=version) for version in ("v2", "v3")]
    with running(tmp_path, workers=2, spares=0) as server:
        for export in exports * 2:
            assert server.admin("/admin/swap", {"export": str(export)}) == (200, {"version": export.name})
            assert {server.recommend()[1]["version"] for _ in range(4)} == {export.name}
