"""Entries of a real server of Redis are read once and in order, whatever dies between two reads."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.streams.brokers.redis_server import RedisServer, Wire, require_server, servers, url_of
from ziggurat.data.streams.brokers import REDIS, BrokerAway, Messages, Reader, Subscription, broker_of
from ziggurat.data.streams.brokers.redis_streams import _columns
from ziggurat.errors import ConfigError, DataError, ZigguratError

_keys = itertools.count()
DEAD_S = 0.5


@pytest.fixture(scope="module", params=range(2), ids=["first-server", "second-server"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    require_server()
    if request.param >= len(servers()):
        pytest.skip("only one server of Redis on this machine")
    with RedisServer(tmp_path_factory.mktemp("redis"), program=servers()[request.param]) as made:
        yield made


@pytest.fixture
def key(server: RedisServer) -> str:
    return f"clicks-{next(_keys)}"


def add(server: RedisServer, key: str, *numbers: int) -> list[str]:
    with server.client() as client:
        pipeline = client.pipeline(transaction=False)
        for number in numbers:
            pipeline.xadd(key, {"n": number})
        return [id.decode() for id in pipeline.execute()]


def numbers_of(messages: Messages) -> list[int]:
    return [int(cell) for cell in messages.columns.get("n", ()) if cell is not None]


def subscribed(server: RedisServer, key: str, *, after: str = "", name: str = "me", **more: Any) -> Subscription:
    covered = more.pop("covered", "")
    former = tuple(f"ziggurat:{each}" for each in more.pop("former", ()))
    said = more.pop("said", None)
    say = said.append if said is not None else lambda line: None
    reader = Reader(name=f"ziggurat:{name}", former=former, covered=covered, say=say)
    url = server.url(key, takeover_s=DEAD_S, **more)
    return REDIS.subscribe(url, reader=reader, after=after)


def rest(source: Subscription, after: str = "", *, most: int = 1000) -> tuple[list[int], str]:
    """Everything from a position on, and the position behind it."""
    found: list[int] = []
    while True:
        messages = source.read(after, most=most)
        if not messages.ids and messages.position == after:
            return found, after
        found += numbers_of(messages)
        after = messages.position


def pending(server: RedisServer, key: str) -> dict[str, int]:
    with server.client() as client:
        found = client.xinfo_consumers(key, "ziggurat")
    return {each["name"].decode(): each["pending"] for each in found}


def test_entries_come_in_order_and_are_pending_until_a_checkpoint_has_them(server: RedisServer, key: str) -> None:
    ids = add(server, key, *range(10))
    with subscribed(server, key) as source:
        first = source.read("", most=4)
        assert list(first.ids) == ids[:4]
        found, end = rest(source, first.position, most=3)
        assert numbers_of(first) + found == list(range(10))
        assert source.waiting(first.position).messages == (6 if server.counts_entries else None)
        assert source.waiting(end).messages == 0
        assert pending(server, key) == {"ziggurat:me": 10}
        source.acknowledge(first.position)
        source.acknowledge(first.position)
        assert pending(server, key) == {"ziggurat:me": 6}
        source.acknowledge(end)
        assert pending(server, key) == {"ziggurat:me": 0}


def test_what_no_journal_has_is_read_again_and_what_one_has_is_not(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    with subscribed(server, key) as source:
        journal = source.read("", most=4).position
        assert len(rest(source, journal)[0]) == 6
    add(server, key, 10, 11)
    with subscribed(server, key, after=journal) as source:
        assert rest(source, journal)[0] == list(range(4, 12))
    with subscribed(server, key) as source:  # a journal that was lost before the first checkpoint
        assert rest(source)[0] == list(range(12))


def test_a_copy_of_the_folder_from_before_reads_acknowledged_entries_again(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    with subscribed(server, key) as source:
        old = source.read("", most=4).position
        source.acknowledge(rest(source, old)[1])
    with subscribed(server, key, after=old, covered=old) as source:
        assert rest(source, old)[0] == [4, 5, 6, 7, 8, 9]


def test_entries_whose_delivery_was_cut_off_come_again(server: RedisServer, key: str) -> None:
    add(server, key, *range(2000))
    wire = Wire(server.port)
    reader = Reader(name="ziggurat:cut")
    source = REDIS.subscribe(url_of(wire.port, key, takeover_s=DEAD_S), reader=reader, after="")
    after = ""
    taken: list[int] = []
    cuts = 0
    wire.cut_after(300)
    while True:
        try:
            messages = source.read(after, most=150)
        except BrokerAway:
            cuts += 1
            continue
        if not messages.ids:
            break
        taken += numbers_of(messages)
        after = messages.position
        if cuts < 5:
            wire.cut_after(200 + 700 * cuts)
    assert cuts >= 5
    assert taken == list(range(2000))
    source.close()
    wire.close()


def test_a_second_trainer_in_the_group_is_refused_while_the_first_one_lives(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    with subscribed(server, key, name="first") as first:
        rest(first)
        with pytest.raises(DataError, match="one trainer in the group") as refused:
            subscribed(server, key, name="second")
        assert "ziggurat:first, with 10 entries" in refused.value.found
        time.sleep(2 * DEAD_S)  # it reads nothing, and shows that it lives
        with pytest.raises(DataError, match="one trainer in the group"):
            subscribed(server, key, name="second")
        with subscribed(server, key, name="second", group="another") as second:
            assert rest(second)[0] == list(range(10))


def test_what_a_dead_trainer_left_is_taken_over_and_its_folder_is_refused(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    first = subscribed(server, key, name="first")
    begin = first.read("", most=3).position
    _, end = rest(first, begin)
    first.acknowledge(begin)
    first.close()
    add(server, key, 10, 11)
    said: list[str] = []
    with subscribed(server, key, name="second", said=said) as second:
        found, after = rest(second)
        assert found == list(range(3, 12)), "what the first had acknowledged is in its checkpoints"
        assert pending(server, key) == {"ziggurat:second": 9}
    assert any("takes over from ziggurat:first: 7 entries" in line for line in said), said
    time.sleep(DEAD_S)
    with pytest.raises(DataError, match="still its own") as refused:
        subscribed(server, key, name="first", after=end, covered=begin)
    assert refused.value.found.startswith("7 of them") or "9 of them" in refused.value.found
    with subscribed(server, key, name="second", after=after) as second:  # the one that took over goes on
        second.acknowledge(after)
        assert pending(server, key)["ziggurat:second"] == 0


def test_a_folder_that_moved_takes_back_what_is_its_own(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    first = subscribed(server, key, name="here")
    begin = first.read("", most=3).position
    first.acknowledge(begin)
    journal = first.read(begin, most=4).position
    rest(first, journal)
    first.close()
    with subscribed(server, key, name="there", former=["here"], after=journal, covered=begin) as moved:
        assert rest(moved, journal)[0] == [7, 8, 9]
        assert pending(server, key) == {"ziggurat:there": 7}


def test_entries_that_somebody_else_took_in_between_are_missed_at_once(server: RedisServer, key: str) -> None:
    add(server, key, 0, 1)
    with subscribed(server, key) as source:
        _, after = rest(source)
        add(server, key, 2, 3, 4)
        with server.client() as client:
            client.xreadgroup("ziggurat", "by hand", {key: ">"}, count=2)
        found, after = rest(source, after)
        assert found == [2, 3, 4], "who reads once and no more is dead"
        assert pending(server, key) == {"ziggurat:me": 5, "by hand": 0}
        add(server, key, 5, 6, 7)
        with server.client() as client:
            _, entries = client.xreadgroup("ziggurat", "by hand", {key: ">"}, count=2)[0]
            client.xack(key, "ziggurat", *[id for id, _ in entries])
        with pytest.raises(DataError, match="still its own") as refused:
            rest(source, after)
        assert refused.value.found == "2 of them were given to or acknowledged by others: by hand"


def test_unread_entries_that_were_trimmed_are_an_error_or_counted(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    with subscribed(server, key) as source:
        _, after = rest(source)
    add(server, key, *range(10, 30))
    with server.client() as client:
        client.xtrim(key, maxlen=5, approximate=False)
    said: list[str] = []
    if not server.counts_entries:
        with subscribed(server, key, after=after, said=said) as source:
            assert rest(source, after)[0] == [25, 26, 27, 28, 29]
        assert any("this server does not say" in line for line in said)
        return
    with subscribed(server, key, after=after) as source, pytest.raises(DataError, match="15 of them were trimmed"):
        source.read(after, most=100)
    with subscribed(server, key, after=after, trimmed="count") as source:
        messages = source.read(after, most=100)
        assert (messages.lost, numbers_of(messages)) == (15, [25, 26, 27, 28, 29])
        assert source.read(messages.position, most=100).lost == 0


def test_entries_that_were_read_may_be_trimmed(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    with subscribed(server, key) as source:
        _, after = rest(source)
        with server.client() as client:
            client.xtrim(key, maxlen=0, approximate=False)
        add(server, key, 10)
        assert rest(source, after)[0] == [10]


def test_pending_entries_that_were_trimmed_are_an_error_or_counted(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    with subscribed(server, key) as source:
        rest(source)
    with server.client() as client:
        client.xtrim(key, maxlen=4, approximate=False)
    with subscribed(server, key) as source, pytest.raises(DataError, match="6 of them were trimmed"):
        source.read("", most=100)
    with subscribed(server, key, trimmed="count") as source:
        lost = 0
        after = ""
        found: list[int] = []
        while (messages := source.read(after, most=3)).position != after:
            lost += messages.lost
            found += numbers_of(messages)
            after = messages.position
        assert (lost, found) == (6, [6, 7, 8, 9])


def test_an_emptied_or_older_stream_is_refused(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    with subscribed(server, key) as source:
        _, after = rest(source)
    with server.client() as client:
        client.delete(key)
        with pytest.raises(DataError, match="it was deleted"):
            subscribed(server, key, after=after)
        client.xadd(key, {"n": 0}, id="5-0")  # as in a copy from long ago
        client.xgroup_create(key, "ziggurat", id="0")
        with pytest.raises(DataError, match="restored from an older copy") as refused:
            subscribed(server, key, after=after)
        # The way out that it names.
        command = re.search(r"redis-cli -h \S+ -p \d+ (XSETID .*)$", "\n".join(refused.value.ways_out), re.MULTILINE)
        assert command is not None
        client.execute_command(*command[1].split())
    add(server, key, 10)
    with subscribed(server, key, after=after, trimmed="count") as source:
        assert rest(source, after)[0] == [10]
    with server.client() as client:
        client.xgroup_destroy(key, "ziggurat")
    with pytest.raises(DataError, match="the consumer group 'ziggurat'") as gone:
        subscribed(server, key, after=after)
    made = re.search(r"redis-cli -h \S+ -p \d+ (XGROUP CREATE \S+ ziggurat \d+-\d+)", "\n".join(gone.value.ways_out))
    assert made is not None
    with server.client() as client:
        client.execute_command(*made[1].split())
    subscribed(server, key, after=after, trimmed="count").close()


def test_a_stream_that_is_emptied_while_it_is_read_is_refused(server: RedisServer, key: str) -> None:
    add(server, key, *range(10))
    with subscribed(server, key) as source:
        _, after = rest(source)
        with server.client() as client:
            client.delete(key)
        with pytest.raises(DataError, match="goes on behind entry") as gone:
            source.read(after, most=10)
        add(server, key, 10)
        with pytest.raises(DataError, match="the consumer group"):
            source.read(after, most=10)
        with server.client() as client:
            client.delete(key)
    with pytest.raises(DataError, match="it was deleted"):
        subscribed(server, key, after=after)
    carry_out(server, gone.value.ways_out[1])
    add(server, key, 11)
    with subscribed(server, key, after=after) as source:
        assert rest(source, after)[0] == [11]


def carry_out(server: RedisServer, way_out: str) -> None:
    """Execute the commands of redis-cli that stand behind the colon of a way out."""
    with server.client() as client:
        for command in way_out.rpartition(": ")[2].split("; "):
            words = shlex.split(command)
            assert words[:5] == ["redis-cli", "-h", "127.0.0.1", "-p", str(server.port)]
            client.execute_command(*words[5:])


def test_a_group_that_is_removed_while_it_is_read_is_made_again_by_what_the_error_says(
    server: RedisServer, key: str
) -> None:
    add(server, key, *range(10))
    with subscribed(server, key) as source:
        messages = source.read("", most=4)
        with server.client() as client:
            client.xgroup_destroy(key, "ziggurat")
        with pytest.raises(DataError, match="the consumer group") as refused:
            rest(source, messages.position)
    carry_out(server, refused.value.ways_out[1])
    with subscribed(server, key, after=messages.position) as source:
        assert rest(source, messages.position)[0] == list(range(4, 10))


@pytest.mark.parametrize("state", ["read-only", "out of memory"])
def test_a_server_that_takes_no_writes_for_a_while_is_away(server: RedisServer, key: str, state: str) -> None:
    """The client cuts the codes off these replies, so that a stream ended where it could have waited."""
    away, back = {
        "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        "out of memory": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    }[state]
    add(server, key, *range(10))
    with subscribed(server, key) as source, server.client() as client:
        messages = source.read("", most=4)
        client.execute_command(*away)
        try:
            with pytest.raises(BrokerAway) as asked:
                source.read(messages.position, most=10)
        finally:
            client.execute_command(*back)
        assert str(asked.value).startswith("READONLY" if state == "read-only" else "OOM")
        assert any("maxmemory" in way for way in asked.value.ways_out) == (state == "out of memory")
        assert rest(source, messages.position)[0] == list(range(4, 10))


def test_wrong_names_and_words_are_refused_by_name(server: RedisServer, key: str) -> None:
    add(server, key, 1)
    with pytest.raises(DataError, match="a stream that is there") as refused:
        subscribed(server, f"{key}s")
    assert any(refused_way.endswith(f"/{key}") for refused_way in refused.value.ways_out)
    with server.client() as client:
        client.set(f"{key}-text", "hello")
    with pytest.raises(DataError, match="another type"):
        subscribed(server, f"{key}-text")
    for url, expected in (
        ("redis://:hunter2@localhost/clicks", "without a password"),
        ("redis://localhost/clicks?grup=a", "options group"),
        ("redis://localhost/clicks?password=hunter2", "options group"),
        ("redis://[::1:6379/clicks", "a URL of a broker"),
        ("redis://localhost/", "host and stream"),
        ("redis://localhost:port/clicks", "numbers"),
        ("redis://localhost/clicks?takeover-s=0", "takeover-s"),
        ("redis://localhost/clicks?trimmed=maybe", "trimmed=error"),
    ):
        with pytest.raises(ConfigError, match=expected) as wrong:
            broker_of([url])
        assert "hunter2" not in str(wrong.value)
    with pytest.raises(ConfigError, match="one stream of a broker, or files"):
        broker_of(["redis://localhost/clicks", "a.parquet"])
    assert broker_of(["s3://bucket/clicks", "a.parquet"]) is None


def test_passwords_come_from_the_variable_of_redis_cli_or_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer(tmp_path, words=("--requirepass", "right")) as server:
        with server.client(password="right") as client:
            client.xadd("clicks", {"n": 1})
        for given_password in ("", "wrong"):
            monkeypatch.setenv("REDISCLI_AUTH", given_password)
            with pytest.raises(ConfigError, match="lets the default user read 'clicks'"):
                subscribed(server, "clicks")
        monkeypatch.setenv("REDISCLI_AUTH", "right")
        with subscribed(server, "clicks") as source:
            assert rest(source)[0] == [1]
        monkeypatch.delenv("REDISCLI_AUTH")
        (tmp_path / "password").write_text("right\n")
        with subscribed(server, "clicks", password_file=tmp_path / "password") as source:
            assert rest(source)[0] == [1]


def test_a_user_who_is_allowed_what_the_error_names_reads_acknowledges_and_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: RedisServer, key: str
) -> None:
    add(server, key, 1, 2)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "bob", "on", ">right")
        monkeypatch.setenv("REDISCLI_AUTH", "right")
        url = f"redis://bob@127.0.0.1:{server.port}/{key}?takeover-s={DEAD_S}"
        with pytest.raises(ConfigError, match="lets user 'bob' read") as refused:
            REDIS.subscribe(url, reader=Reader(name="ziggurat:a"), after="")
        (command,) = re.findall(r"redis-cli -h \S+ -p \d+ (ACL .*)", "\n".join(refused.value.ways_out))
        client.execute_command(*shlex.split(command))
    with REDIS.subscribe(url, reader=Reader(name="ziggurat:a"), after="") as first:
        numbers, position = rest(first)
        assert numbers == [1, 2]
        first.acknowledge(position)
    add(server, key, 3)
    with REDIS.subscribe(url, reader=Reader(name="ziggurat:a"), after=position) as first:
        assert rest(first, position)[0] == [3]
    time.sleep(DEAD_S + 0.1)
    with REDIS.subscribe(url, reader=Reader(name="ziggurat:b"), after="") as second:
        assert rest(second)[0] == [3]


def test_no_server_is_one_that_is_away() -> None:
    pytest.importorskip("redis")
    for scheme in ("redis", "rediss"):
        with pytest.raises(BrokerAway) as away:
            REDIS.subscribe(f"{scheme}://127.0.0.1:1/clicks", reader=Reader(name="ziggurat:me"), after="")
        assert any("TLS" in way for way in away.value.ways_out) == (scheme == "rediss")


def test_a_server_that_is_killed_and_started_again_goes_on(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        add(server, "clicks", *range(100))
        with subscribed(server, "clicks") as source:
            messages = source.read("", most=30)
            server.kill()
            with pytest.raises(BrokerAway):
                source.read(messages.position, most=30)
            server.start()
            add(server, "clicks", 100)
            assert rest(source, messages.position)[0] == list(range(30, 101))


@dataclasses.dataclass
class World:
    """A stream, the journal of who reads it, and what was checked of both so far."""

    server: RedisServer
    key: str
    wire: Wire
    added: int = 0
    journal: str = ""
    covered: str = ""
    kept: list[int] = dataclasses.field(default_factory=list)
    source: Subscription | None = None
    after: str = ""
    read: list[int] = dataclasses.field(default_factory=list)

    def do(self, action: str, size: int) -> None:
        if action == "add":
            add(self.server, self.key, *range(self.added, self.added + size))
            self.added += size
        elif action == "die":
            if self.source is not None:
                self.source.close()
            self.source = None
        elif action == "cut":
            self.wire.cut_after(size * 40)
        elif action == "journal":
            self.kept += self.read
            self.read = []
            self.journal = self.after
        else:
            self._with_source(action, size)

    def _with_source(self, action: str, size: int) -> None:
        try:
            if self.source is None:
                self.read = []
                self.after = self.journal
                reader = Reader(name="ziggurat:world", covered=self.covered)
                url = url_of(self.wire.port, self.key, takeover_s=DEAD_S)
                self.source = REDIS.subscribe(url, reader=reader, after=self.journal)
            if action == "read":
                messages = self.source.read(self.after, most=size)
                self.read += numbers_of(messages)
                self.after = messages.position
            else:
                self.covered = self.journal
                self.source.acknowledge(self.journal)
        except BrokerAway:
            pass


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["add", "read", "read", "journal", "die", "cut", "acknowledge"]), st.integers(1, 30)),
        max_size=40,
    )
)
def test_every_entry_enters_the_journal_once_whatever_happens(server: RedisServer, actions: list[Any]) -> None:
    world = World(server=server, key=f"clicks-{next(_keys)}", wire=Wire(server.port))
    world.do("add", 1)
    for action, size in actions:
        world.do(action, size)
        assert world.kept == list(range(len(world.kept)))
    world.wire._left = None
    while len(world.kept) < world.added:
        world.do("read", 100)
        world.do("journal", 1)
    assert world.kept == list(range(world.added))
    world.do("acknowledge", 1)
    assert pending(server, world.key) == {"ziggurat:world": 0}
    world.do("die", 1)
    world.wire.close()


FIELDS = st.dictionaries(st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=3), min_size=1)


@settings(deadline=None)
@given(entries=st.lists(FIELDS, max_size=12))
def test_columns_are_those_of_the_entries_one_by_one(entries: list[dict[bytes, bytes]]) -> None:
    reply = [[b"1-0", [cell for pair in each.items() for cell in pair]] for each in entries]
    slow = Messages.of((("1-0", {name.decode(): cell for name, cell in each.items()}) for each in entries), position="")
    fast = _columns(reply)
    assert {name: list(cells) for name, cells in fast.items()} == {n: list(c) for n, c in slow.columns.items()}


def test_errors_have_four_parts(server: RedisServer) -> None:
    with pytest.raises(ZigguratError) as refused:
        subscribed(server, "none-of-this-name")
    assert refused.value.expected
    assert refused.value.found
    assert refused.value.where
    assert refused.value.ways_out
