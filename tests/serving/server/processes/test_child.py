"""Children of a process: their messages, their ends, silence, pauses, and when the next one may start."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serving.server.running import wait_until
from ziggurat.serving.server.processes import child as child_module
from ziggurat.serving.server.processes.child import Backoff, Child, Children
from ziggurat.serving.server.processes.control import BrokenMessageError, Control


class Owner:
    """Writes down what it is told of its children."""

    def __init__(self, *, hang_s: float = 60.0) -> None:
        self.messages: list[dict[str, Any]] = []
        self.exits: list[int] = []
        self.children: Children[Child] = Children(hang_s=hang_s, on_message=self._take, on_exit=self._exit)

    def _take(self, child: Child, message: dict[str, Any]) -> None:
        if "wrong" in message:
            raise BrokenMessageError("wrong")
        self.messages.append(message)

    def _exit(self, child: Child, code: int) -> None:
        assert child not in self.children
        self.exits.append(code)

    def start(self, run: Callable[[Control], int], **settings: Any) -> Child:
        child = Child()
        self.children.fork(child, run, **settings)
        return child

    def turn(self) -> bool:
        for child in list(self.children):
            self.children.read_messages(child)
        return True

    def until_exit(self) -> int:
        wait_until(lambda: self.turn() and self.exits)
        return self.exits.pop()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.children.end()


def wait_for_end(control: Control) -> int:
    """Be a child that ends with status 7 when its parent's end of the socket closes."""
    while control.receive() is not None:
        pass
    return 7


def test_a_child_says_what_it_does_and_its_exit_code_follows(owner: Owner) -> None:
    def run(control: Control) -> int:
        control.send(ready=True)
        return 3

    owner.start(run)
    assert owner.until_exit() == 3
    assert owner.messages == [{"ready": True}]
    assert not owner.children


def test_a_child_may_be_started_again(owner: Owner) -> None:
    child = owner.start(lambda control: 1)
    owner.until_exit()
    owner.children.fork(child, lambda control: 2)
    assert owner.until_exit() == 2


def test_a_child_that_raises_ends_with_status_1_and_its_last_duty_done(owner: Owner) -> None:
    reader, writer = os.pipe()

    def run(control: Control) -> int:
        raise RuntimeError("boom")

    owner.start(run, at_end=lambda: os.write(writer, b"done") and None)
    assert owner.until_exit() == 1
    assert os.read(reader, 10) == b"done"
    os.close(reader)
    os.close(writer)


def test_a_child_ends_with_its_parent_although_siblings_were_forked_later(owner: Owner) -> None:
    first = owner.start(wait_for_end)
    owner.start(wait_for_end)
    first.control.close()  # as the end of this process would do it
    status: list[int] = []

    def has_ended() -> bool:
        pid, code = os.waitpid(first.pid, os.WNOHANG)
        status.append(code)
        return pid == first.pid

    wait_until(has_ended)
    assert os.waitstatus_to_exitcode(status[-1]) == 7
    owner.children._running.remove(first)


@pytest.mark.parametrize("content", [b"no JSON\n", b'{"wrong": 1}\n'])
def test_a_child_that_sends_what_is_no_message_is_killed(
    owner: Owner, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    def run(control: Control) -> int:
        control.socket.sendall(content)
        return wait_for_end(control)

    child = owner.start(run)
    with caplog.at_level(logging.ERROR, "ziggurat.server"):
        assert owner.until_exit() == -signal.SIGKILL
    assert f"process {child.pid} sends what is no message; it is killed" in caplog.text


def test_a_silent_child_is_killed_once_it_may_be_called_hung(caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner(hang_s=0.2)
    child = owner.start(wait_for_end)
    owner.children.kill_if_silent(child)
    assert not caplog.text
    time.sleep(0.25)
    with caplog.at_level(logging.ERROR, "ziggurat.server"):
        for _ in range(3):
            owner.children.kill_if_silent(child)
    assert caplog.text.count("shows no sign of life; it is killed") == 1
    assert owner.until_exit() == -signal.SIGKILL


def test_a_stopped_child_is_killed_and_one_that_only_waits_is_not() -> None:
    owner = Owner(hang_s=0.2)
    stopped = owner.start(wait_for_end)
    waiting = owner.start(wait_for_end)
    os.kill(stopped.pid, signal.SIGSTOP)

    def is_killed() -> bool:
        for child in owner.children:
            owner.children.kill_if_stopped(child)
        return owner.turn() and bool(owner.exits)

    wait_until(is_killed)
    assert list(owner.children) == [waiting]
    owner.children.end()
    assert owner.exits == [-signal.SIGKILL], "who ends all of them is told of none"


def test_a_pause_of_the_parent_is_no_silence_of_a_child(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner(hang_s=1.0)
    child = owner.start(wait_for_end)
    assert owner.children.excuse_pause() == 0
    now = time.monotonic()
    monkeypatch.setattr(child_module.time, "monotonic", lambda: now + 100)
    assert owner.children.excuse_pause() == pytest.approx(100, abs=1)
    owner.children.kill_if_silent(child)
    monkeypatch.undo()
    assert not caplog.text
    assert owner.turn()
    assert child in owner.children
    owner.children.end()


def test_the_pause_before_the_next_start_doubles_up_to_half_a_minute() -> None:
    backoff = Backoff()
    assert backoff.is_over
    pauses = []
    for _ in range(11):
        backoff.fail()
        pauses.append(backoff.pause_s)
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert pauses[-2:] == [30, 30]
    assert not backoff.is_over
    backoff.succeed()
    backoff.fail()
    assert backoff.pause_s == 0.1
    wait_until(lambda: backoff.is_over)
