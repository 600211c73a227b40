"""Messages between processes: whole or not at all, and nothing that arrives is trusted."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.serving.server.running import running
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.serving.server.processes.control import BrokenMessageError, Control, error_from_json


def pair() -> tuple[Control, Control]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return Control(end=ours), Control(end=theirs)


def test_a_message_longer_than_the_sockets_room_arrives_whole() -> None:
    sender, receiver = pair()
    long = "a" * 800_000
    assert sender.send(swap=long, number=1)
    assert sender.has_unsent, "more than a socket takes at once"
    assert sender.send(alive=True)
    found = []
    while len(found) < 2:
        found += receiver.receive() or []
        assert sender.flush()
    assert found == [{"swap": long, "number": 1}, {"alive": True}]


def test_a_message_beyond_the_bound_is_refused_before_its_first_byte() -> None:
    sender, receiver = pair()
    assert not sender.send(swap="a" * 2_000_000, number=1)
    assert sender.send(alive=True)
    assert receiver.receive() == [{"alive": True}]


@pytest.mark.parametrize("content", [b"{\n", b"[]\n", b"\xff\n", b'{"a": 1}{"b": 2}\n', b"[" * 60_000 + b"\n"])
def test_bytes_that_are_no_message_raise(content: bytes) -> None:
    sender, receiver = pair()
    sender.socket.sendall(content)
    with pytest.raises(BrokenMessageError):
        receiver.receive()


def test_an_error_goes_there_and_back_and_what_is_none_raises() -> None:
    error = ConfigError(expected="a", found="b", where="c", ways_out=("d", "e"))
    back = error_from_json(error.to_json())
    assert (type(back), str(back)) == (ConfigError, str(error))
    good = error.to_json()
    assert type(error_from_json(good | {"kind": "Sequence"})) is ZigguratError, "a name of the module, no error"
    for bad in (None, [], {}, good | {"found": 3}, good | {"ways_out": "d"}, good | {"ways_out": [1]}):
        with pytest.raises(BrokenMessageError):
            error_from_json(bad)


def test_a_swap_to_a_path_beyond_all_paths_ends_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        status, answer = server.admin("/admin/swap", {"export": "a" * 220_000})
        assert (status, answer["error"]["where"]) == (400, "request, body")
        assert server.recommend()[0] == 200


BROKEN = ("no JSON", '{"ready": {"version": 3}}', '{"failed": 3}', '{"swap": 3, "number": "x"}', '{"other": 1}')


def test_a_worker_that_sends_what_is_no_message_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, spares=0) as server:
        for content in BROKEN:
            with pytest.raises(OSError):  # noqa: PT011 - the answer is lost with its worker
                server.recommend(user={"user_id": f"says {content}\n"})
            assert server.recommend()[0] == 200, "connections wait until another worker is there"
        assert server.log.read_text().count("what is no message; it is killed") == len(BROKEN)
