"""RedisStreams: read a stream of Redis in a consumer group, every entry once.

    redis://host:6379/clicks?group=ziggurat
                      └ key   └ consumer group: made at the first entry if it is absent

    XREADGROUP … >     entries that nobody was given yet; they are pending under our name until they are acknowledged
    XRANGE (after D    entries up to D, the last that the group has delivered, which did not reach the journal: the
                       process died, or the connection was cut while they were on their way. After each connection
    XAUTOCLAIM         takes over what a reader that is dead left pending
    XACK               entries up to what the newest checkpoint contains

Which entries are known is decided by the journal of the run, and not by the group: ids of entries only rise, so a
position is the id of the last entry, and with it the number of entries that were ever added up to it. What a group says
is compared with that at every connection, and what was added, kept and trimmed at every read, in one transaction with
it:

    last id of the stream < position            it was emptied, or restored from an older copy: refused
    no such group, though rows were taken       likewise
    entries behind the position were trimmed    an error that counts them; ?trimmed=count goes on and says so
    another reader is alive in the group        refused: each would get a part. A reader shows that it lives every few
                                                seconds, also while a window is trained for an hour
    another reader is dead                      what it left pending is taken over, by a folder that begins; a folder
                                                that was taken over is refused: its rows are trained elsewhere
    entries between position and next one       that were given to someone else: refused

A consumer is called after machine, folder and a random number that the folder keeps. A folder that was moved or copied
gets a new one, so that a copy is told from the run that goes on.

What neither side can see: entries that were added and removed by XDEL before they were read, and on servers before 7.0,
which do not count entries, how many were trimmed (said, where there may be some).

Reference: redis.io, "Redis Streams", and the pages of these commands. Needs Redis 6.2. Cost: one round trip a read.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ziggurat.data.streams.brokers.broker import (
    Address,
    Broker,
    BrokerAway,
    Cell,
    Messages,
    Reader,
    Subscription,
    Waiting,
)
from ziggurat.errors import ConfigError, DataError, MissingDependencyError, ZigguratError, nearest_names
from ziggurat.files import read_text

_OPTIONS = {
    "group": "consumer group (ziggurat)",
    "start": "where a new group begins: 0, the first entry (the default); $, behind the last one; or an id",
    "db": "number of the data base (0)",
    "trimmed": "error or count: what becomes of a stream whose unread entries were trimmed (error)",
    "takeover-s": "seconds without a sign of life after which a reader is dead (30)",
    "password-file": "file with the password",
}
_SECRETS = "set REDISCLI_AUTH, as redis-cli reads it, or name a file: ?password-file=/run/secrets/redis"
_ANEW = "begin anew in a group of its own: --out ANOTHER_FOLDER, and ?group=ANOTHER in the URL"
_COMMANDS = ("xreadgroup", "xrange", "xack", "xpending", "xautoclaim", "xgroup", "xinfo", "multi", "exec")
_TIMEOUT_S = 10.0  # for an answer
_REPLY_BYTES = 16 << 20  # of a reply to a read, about
_FIRST_COUNT = 256  # entries of the first read, from which their size is known
_PAGE = 5_000  # ids of a page
_LARGEST = "18446744073709551615-0"
_NOW_AWAY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "UNBLOCKED", "MISCONF", "OOM")
# The client takes the code from the front of these replies, and makes a class of it.
_CODES = {
    "AskError": "ASK",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}
_CLOCK_STEP_S = 0.05
_NAME = "ziggurat:"  # of our readers begins so


@dataclass(frozen=True, order=True)
class EntryId:
    """The id of an entry: milliseconds, and a number among those of one millisecond."""

    ms: int = 0
    number: int = 0

    @staticmethod
    def of(text: str | bytes) -> EntryId:
        """Return the id that a text is."""
        text = text if isinstance(text, str) else text.decode()
        ms, _, number = text.partition("-")
        return EntryId(int(ms), int(number or 0))

    @property
    def before(self) -> EntryId:
        """The largest id that is smaller."""
        if self.number:
            return EntryId(self.ms, self.number - 1)
        return EntryId(self.ms - 1, (1 << 64) - 1) if self.ms else self

    def __str__(self) -> str:
        return f"{self.ms}-{self.number}"


@dataclass(frozen=True, kw_only=True)
class _Position:
    """A position in a stream.

    Args:
        last: the last entry that was read.
        added: entries that were ever added up to it; None where the server does not count them.
    """

    last: EntryId
    added: int | None = None

    @staticmethod
    def of(text: str) -> _Position | None:
        if not text:
            return None
        last, _, added = text.partition(" ")
        return _Position(last=EntryId.of(last), added=int(added) if added else None)

    def __str__(self) -> str:
        return f"{self.last}" + ("" if self.added is None else f" {self.added}")


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings of a URL."""

    url: str
    host: str
    port: int
    is_encrypted: bool
    user: str
    key: str
    db: int
    group: str
    start: str
    counts_trimmed: bool
    takeover_s: float
    password_file: str

    @staticmethod
    def of(url: str) -> _Settings:
        address = Address.of(url, known=_OPTIONS, secrets=_SECRETS)
        options = address.options
        parts = address.parts

        def refuse(expected: str, found: str, *ways: str) -> ConfigError:
            return ConfigError(expected=expected, found=found, where=url, ways_out=ways)

        key = unquote(parts.path.removeprefix("/"))
        if not parts.hostname or not key:
            raise refuse(
                "host and stream", "no stream" if parts.hostname else "no host", "redis://localhost:6379/clicks"
            )
        try:
            port = parts.port or 6379
            db = int(options.get("db", "0"))
            takeover_s = float(options.get("takeover-s", "30"))
            start = options.get("start", "0")
            if start != "$":
                EntryId.of(start)
        except ValueError as error:
            ways = "?db=0&takeover-s=30&start=0"
            raise refuse("numbers as port, db, takeover-s and start", str(error), ways) from error
        if not 0.5 <= takeover_s < 1e6 or db < 0:
            raise refuse("takeover-s of at least 0.5 s, and db from 0 on", f"{takeover_s:g} and {db}", "?takeover-s=30")
        trimmed = options.get("trimmed", "error")
        if trimmed not in ("error", "count"):
            raise refuse("trimmed=error or trimmed=count", f"trimmed={trimmed}", "?trimmed=count")
        return _Settings(
            url=url,
            host=parts.hostname,
            port=port,
            is_encrypted=parts.scheme.lower() == "rediss",
            user=unquote(parts.username or ""),
            key=key,
            db=db,
            group=options.get("group") or "ziggurat",
            start=start,
            counts_trimmed=trimmed == "count",
            takeover_s=takeover_s,
            password_file=options.get("password-file", ""),
        )

    @property
    def cli(self) -> str:
        """Return redis-cli with what it needs to reach this server and data base; it reads REDISCLI_AUTH itself."""
        words = ["redis-cli", "-h", self.host, "-p", str(self.port)]
        words += ["-n", str(self.db)] if self.db else []
        words += ["--user", self.user] if self.user else []
        words += ["--tls"] if self.is_encrypted else []
        return shlex.join(words)


def _acl(settings: _Settings) -> str:
    """Return the command by which another user allows this one what a reader asks for."""
    allowed = [*_COMMANDS, *(["select"] if settings.db else [])]
    words = ["ACL", "SETUSER", settings.user or "default", f"~{settings.key}", *(f"+{each}" for each in allowed)]
    return f"{replace(settings, user='').cli} {shlex.join(words)}"


class RedisStreams(Broker):
    """Streams of Redis, read in a consumer group."""

    name = "redis"
    schemes = ("rediss",)

    def stream_of(self, url: str) -> str:
        """Return the key, and the number of its data base."""
        settings = _Settings.of(url)
        return f"{settings.key} of data base {settings.db}" if settings.db else settings.key

    def server_of(self, url: str) -> str:
        """Return the address of the host, by which `localhost` and `127.0.0.1` are one, and the port."""
        settings = _Settings.of(url)
        try:
            found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        except OSError:
            return f"{settings.host}:{settings.port}"
        # A host may have addresses of both families: that of the first by number is the same whoever looks it up.
        return f"{min(str(address[0]) for *_, address in found)}:{settings.port}"

    def group_of(self, url: str) -> str:
        """Return the consumer group."""
        return _Settings.of(url).group

    def check(self, url: str) -> None:
        """Refuse a URL that cannot be right, and a machine without the client."""
        _Settings.of(url)
        _client_package(url)

    def how_to_remove(self, url: str, *, id: str = "") -> str:
        """Return the command that deletes an entry."""
        settings = _Settings.of(url)
        command = f"{settings.cli} XDEL {shlex.quote(settings.key)} {id or 'ID'}"
        return f"take {'the entry' if id else 'entries that differ'} out of the stream: {command}"

    def how_to_begin_anew(self, url: str) -> str:
        """Return what gives a run a group of its own."""
        return _ANEW

    def how_to_try(self, url: str) -> str:
        """Return the command that a server answers."""
        return f"try it by hand: {_Settings.of(url).cli} PING"

    def subscribe(self, url: str, *, reader: Reader, after: str) -> Subscription:
        """Connect, look at stream and group, and take over what a dead reader left."""
        made = _RedisSubscription(_Settings.of(url), reader=reader)
        try:
            made.join(after)
        except BaseException:
            made.close()
            raise
        return made


def _client_package(url: str) -> Any:
    try:
        import redis
    except ImportError as error:
        raise MissingDependencyError(
            expected="the package redis, a client of Redis",
            found="it is not installed",
            where=url,
            ways_out=('pip install "ziggurat-rec[redis]"', "pip install redis hiredis"),
        ) from error
    return redis


@dataclass(frozen=True, kw_only=True)
class _State:
    """The state of a stream, by its own account.

    Args:
        last: the newest id that it has ever given.
        first: its oldest entry; None of an empty one.
        length: its entries.
        added: entries that were ever added; None before Redis 7.0.
    """

    last: EntryId
    first: EntryId | None
    length: int
    added: int | None

    @staticmethod
    def of(reply: Sequence[Any]) -> _State:
        found = _pairs(reply)
        first = found.get("first-entry")
        return _State(
            last=EntryId.of(found["last-generated-id"]),
            first=EntryId.of(first[0]) if first else None,
            length=int(found["length"]),
            added=int(found["entries-added"]) if "entries-added" in found else None,
        )


class _RedisSubscription(Subscription):
    """One reader of a group."""

    def __init__(self, settings: _Settings, *, reader: Reader) -> None:
        self._settings = settings
        self._reader = reader
        self._redis = _client_package(settings.url)
        self._client = self._connected()
        self._has_joined = False
        self._claims = False  # entries are read that are pending under our name, of a folder that begins
        self._delivered = EntryId()  # entries up to here were delivered, to us, and did not all arrive
        self._last_read: EntryId | None = None  # what was asked for last lies behind it; None: from the beginning on
        self._floor = EntryId()  # entries up to here were given to others, before a folder began
        self._count = _FIRST_COUNT
        self._acknowledged = ""
        self._has_warned = False
        self._ending = threading.Event()
        self._pulse: threading.Thread | None = None

    def _connected(self) -> Any:
        settings = self._settings
        password = os.environ.get("REDISCLI_AUTH")
        if settings.password_file:
            password = read_text(Path(settings.password_file).expanduser(), error=ConfigError).strip()
        client = self._redis.Redis(
            host=settings.host,
            port=settings.port,
            db=settings.db,
            username=settings.user or None,
            password=password or None,
            ssl=settings.is_encrypted,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            socket_keepalive=True,
            protocol=2,
            # We try again ourselves, from a position that is known.
            retry=self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
        )
        # Replies as they come: a dict for each entry would take most of the time of a read.
        client.response_callbacks.clear()
        return client

    # ------------------------------------------------------------------------------------------------------- asking

    def _ask(self, *command: Any) -> Any:
        return self._asked(lambda: self._client.execute_command(*command))

    def _ask_at_once(self, *commands: Sequence[Any]) -> list[Any]:
        """Return the replies to commands that are executed together, with nothing in between."""
        with self._client.pipeline(transaction=True) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            return self._asked(pipeline.execute)

    def _asked(self, ask: Any) -> Any:
        errors = self._redis.exceptions
        settings = self._settings
        try:
            return ask()
        except (errors.AuthenticationError, errors.NoPermissionError) as error:
            who = f"user {settings.user!r}" if settings.user else "the default user"
            raise ConfigError(
                expected=f"that the broker lets {who} read {settings.key!r}",
                found=_first_line(error),
                where=settings.url,
                ways_out=(
                    _SECRETS,
                    "name the user in the URL: redis://alice@host/stream",
                    f"have an administrator allow what a reader needs: {_acl(settings)}",
                ),
            ) from error
        except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
            self._has_joined = False
            ways_out = ("a server that speaks no TLS: redis:// in place of rediss://",) if settings.is_encrypted else ()
            raise BrokerAway(_first_line(error), ways_out=ways_out) from error
        except errors.ResponseError as error:
            text = f"{_CODES.get(type(error).__name__, '')} {_first_line(error)}".strip()
            if text.startswith(_NOW_AWAY):
                self._has_joined = False
                raise BrokerAway(text, ways_out=self._ways_to_memory() if text.startswith("OOM") else ()) from error
            raise self._refusal(text) from error

    def _ways_to_memory(self) -> tuple[str, ...]:
        return (
            f"give the server more memory: {self._settings.cli} CONFIG SET maxmemory BYTES",
            "trim streams whose entries all groups have acknowledged: XTRIM",
        )

    def _refusal(self, text: str) -> ZigguratError:
        """Return the error for a reply that waiting does not help."""
        settings = self._settings
        if "no such key" in text:
            return self._no_stream() if self._last_read is None else self._gone(self._last_read)
        if text.startswith("WRONGTYPE"):
            return DataError(
                expected="a stream",
                found=f"a key of another type: {settings.key!r}",
                where=settings.url,
                ways_out=(
                    "name a key that XADD has made",
                    f"{settings.cli} TYPE {shlex.quote(settings.key)} says what a key is",
                ),
            )
        if text.startswith("NOGROUP"):
            return self._no_group(text, last=str(self._last_read or settings.start))
        if text.startswith(("MOVED", "ASK")):
            return ConfigError(
                expected="the server that has the stream",
                found=f"one of a cluster that does not: {text}",
                where=settings.url,
                ways_out=("name the server that it says",),
            )
        if "unknown command" in text.lower():
            return ConfigError(
                expected="Redis 6.2 or newer", found=text, where=settings.url, ways_out=("take a newer server",)
            )
        return DataError(
            expected="an answer",
            found=text,
            where=settings.url,
            ways_out=(
                "read the log of the server",
                f"try it by hand: {settings.cli} XINFO STREAM {shlex.quote(settings.key)}",
            ),
        )

    def _gone(self, last: EntryId) -> ZigguratError:
        """Return the error for a stream that was deleted behind an entry that was read."""
        settings = self._settings
        key = shlex.quote(settings.key)
        return self._set_back(
            expected=f"a stream that goes on behind entry {last}, the last one that was read",
            found=f"no key {settings.key!r}: it was deleted",
            way_out="if producers lost nothing, make it anew and let it go on behind that entry: "
            f"{settings.cli} XGROUP CREATE {key} {shlex.quote(settings.group)} {last} MKSTREAM; "
            f"{settings.cli} XSETID {key} {last}",
        )

    def _set_back(self, *, expected: str, found: str, way_out: str) -> ZigguratError:
        """Return the error for a stream or a group that is behind what was read of it.

        Args:
            expected: what there would be.
            found: what there is.
            way_out: how it goes on if no entry was lost.
        """
        return DataError(
            expected=expected,
            found=found,
            where=self._settings.url,
            ways_out=(
                "restore the broker from a newer copy",
                way_out,
                "begin the stream anew in another folder: --out ANOTHER_FOLDER",
            ),
        )

    def _no_stream(self) -> ZigguratError:
        settings = self._settings
        others = self._streams()
        near = nearest_names(settings.key, others)
        found = f"no key {settings.key!r}" + (f"; streams are {', '.join(others[:10])}" if others else "")
        return DataError(
            expected="a stream that is there; one that was emptied has lost its entries",
            found=found,
            where=settings.url,
            ways_out=(
                *(f"name another one: redis://{settings.host}:{settings.port}/{name}" for name in near),
                f"make it before its first entry: {settings.cli} XGROUP CREATE {shlex.quote(settings.key)} "
                f"{shlex.quote(settings.group)} 0 MKSTREAM",
                "another data base of the server: ?db=1",
            ),
        )

    def _streams(self) -> list[str]:
        """Names of a few streams of the server, for an error."""
        try:
            reply = self._client.execute_command("SCAN", "0", "TYPE", "stream", "COUNT", "10000")
        except (self._redis.exceptions.RedisError, OSError):
            return []
        return sorted(name.decode(errors="replace") for name in reply[1])[:100]

    def _no_group(self, text: str, *, last: str) -> ZigguratError:
        settings = self._settings
        return self._set_back(
            expected=f"the consumer group {settings.group!r}, in which entries were read",
            found=f"none ({text}): the stream was emptied or made anew, or somebody has removed the group",
            way_out="if no entry was lost, make the group at the last entry that was read, and give the command again: "
            f"{settings.cli} XGROUP CREATE {shlex.quote(settings.key)} {shlex.quote(settings.group)} {last}",
        )

    # ------------------------------------------------------------------------------------------------------ joining

    def join(self, after: str) -> None:
        """Compare the stream and its group with the journal, and take over what a dead reader left."""
        settings = self._settings
        position = _Position.of(after)
        self._last_read = None if position is None else position.last
        key = settings.key
        group = settings.group
        state = _State.of(self._ask("XINFO", "STREAM", key))
        self._refuse_older(state, position)
        groups = {_text(each["name"]): each for each in map(_pairs, self._ask("XINFO", "GROUPS", key))}
        if group not in groups:
            if position is not None:
                raise self._no_group("NOGROUP", last=str(position.last))
            self._make_group()
            groups = {_text(each["name"]): each for each in map(_pairs, self._ask("XINFO", "GROUPS", key))}
        delivered = EntryId.of(groups[group]["last-delivered-id"])
        # The first sign of life: two that come at the same time see each other below.
        self._ask(*self._sign_of_life)
        dead = self._others()
        if dead and position is not None:
            self._refuse_taken_over(position, dead=dead)
        claimed = self._claim(dead) if dead else 0
        if dead and position is not None:
            self._refuse_others_part(position.last, delivered, names=[self._reader.name], dead=dead)
        if position is None:
            self._claims = True
            if dead:
                self._say_takeover(dead, claimed=claimed, delivered=delivered)
        self._delivered = delivered
        self._has_joined = True
        for name, pending in self._pending_by_reader().items():
            if name in dead and not pending and name.startswith(_NAME):
                self._ask("XGROUP", "DELCONSUMER", key, group, name)
        if self._pulse is None:
            self._pulse = threading.Thread(target=self._show_life, name="ziggurat-redis-life", daemon=True)
            self._pulse.start()

    def _make_group(self) -> None:
        settings = self._settings
        try:
            self._ask("XGROUP", "CREATE", settings.key, settings.group, settings.start)
        except DataError as error:
            if "BUSYGROUP" not in error.found:  # somebody else has made it in this moment
                raise

    @property
    def _sign_of_life(self) -> tuple[str, ...]:
        """A read of what is pending under our name behind the largest id: nothing, but it shows that we live."""
        settings = self._settings
        words = ("XREADGROUP", "GROUP", settings.group, self._reader.name, "COUNT", "1")
        return (*words, "STREAMS", settings.key, _LARGEST)

    def _show_life(self) -> None:
        """Show every few seconds that this reader lives, while others train or wait; in a thread of its own."""
        client = None
        while not self._ending.wait(self._settings.takeover_s / 6):
            try:
                client = client or self._connected()
                client.execute_command(*self._sign_of_life)
            except (self._redis.exceptions.RedisError, OSError, ZigguratError):
                client = None  # whoever reads says that the broker is away
        if client is not None:
            client.close()

    def _readers(self) -> dict[str, dict[str, Any]]:
        reply = self._ask("XINFO", "CONSUMERS", self._settings.key, self._settings.group)
        return {_text(each["name"]): each for each in map(_pairs, reply)}

    def _pending_by_reader(self) -> dict[str, int]:
        return {name: int(each["pending"]) for name, each in self._readers().items()}

    def _others(self) -> list[str]:
        """Return the names of other readers, all of which are dead; waits until that is known.

        Raises:
            DataError: one of them lives.
        """
        begin = time.monotonic()
        # The moment of the last sign of life by our clock lies between two bounds: a reply may take long.
        seen: dict[str, float] = {}
        has_said = False
        while True:
            now = time.monotonic()
            others = {name: each for name, each in self._readers().items() if name != self._reader.name}
            later = time.monotonic()
            young: list[str] = []
            for name, each in others.items():
                idle_s = int(each["idle"]) / 1000
                # A sign of life since we look; the server's clock has steps.
                if now - idle_s > min(seen.setdefault(name, later - idle_s), begin) + _CLOCK_STEP_S:
                    raise self._lives(name, pending=int(each["pending"]))
                if idle_s < self._settings.takeover_s:
                    young.append(name)
            if not young:
                return list(others)
            if self._reader.is_asked():
                self._has_joined = False
                raise BrokerAway("asked to end")
            if not has_said:
                names = ", ".join(young)
                self._reader.say(f"waiting whether {names} is alive, at most {self._settings.takeover_s:g} s")
                has_said = True
            time.sleep(min(0.25, self._settings.takeover_s / 10))
            self._ask(*self._sign_of_life)  # another one may be waiting for us

    def _lives(self, name: str, *, pending: int) -> ZigguratError:
        settings = self._settings
        return DataError(
            expected=f"one trainer in the group {settings.group!r}: a second one would get a part of the entries",
            found=f"another one that is alive: {name}, with {pending:,} entries that it has not acknowledged",
            where=settings.url,
            ways_out=(
                "end that one, and give this command again: what it left is taken over",
                "read all entries in a group of your own: ?group=ANOTHER",
            ),
        )

    def _claim(self, dead: Sequence[str]) -> int:
        """Take over all entries that dead readers left pending; return how many."""
        settings = self._settings
        idle_ms = str(int(settings.takeover_s * 1000))
        held = sum(count for name, count in self._pending_by_reader().items() if name in dead)
        cursor = "0-0"
        while held:
            words = ("XAUTOCLAIM", settings.key, settings.group, self._reader.name, idle_ms, cursor)
            reply = self._ask(*words, "COUNT", str(_PAGE), "JUSTID")
            cursor = _text(reply[0])
            if cursor == "0-0":
                break
        left = sum(count for name, count in self._pending_by_reader().items() if name in dead)
        return held - left

    def _say_takeover(self, dead: Sequence[str], *, claimed: int, delivered: EntryId) -> None:
        self._reader.say(
            f"takes over from {', '.join(dead)}: {claimed:,} entries that were not acknowledged. Those that were, of "
            f"all up to {delivered}, are in its checkpoints and not in this stream"
        )

    def _refuse_taken_over(self, position: _Position, *, dead: Sequence[str]) -> None:
        """Refuse to go on where entries that this folder has read, and would train, are no longer pending for it."""
        names = [self._reader.name, *(name for name in self._reader.former if name in dead)]
        covered = _Position.of(self._acknowledged or self._reader.covered)
        if covered is None:
            # Nothing was acknowledged, so all that it has read since it began is pending.
            first = min(next(self._pending_of(name, EntryId(), position.last), position.last) for name in names)
            self._refuse_others_part(first.before, position.last, names=names, dead=dead)
        else:
            self._refuse_others_part(covered.last, position.last, names=names, dead=dead)

    def _refuse_others_part(self, after: EntryId, until: EntryId, *, names: Sequence[str], dead: Sequence[str]) -> None:
        """Refuse a stretch of the stream of which some entries are not pending under certain names."""
        mine = sum(1 for name in names for _ in self._pending_of(name, after, until))
        there = sum(1 for _ in self._there(after, until))
        if there <= mine:
            return
        raise DataError(
            expected="that all entries which this folder has read, and not yet a checkpoint of, are still its own",
            found=f"{there - mine:,} of them were given to or acknowledged by others: {', '.join(dead)}",
            where=self._settings.url,
            ways_out=(
                "go on with the folder of the reader that took over: this one's rows are trained there",
                _ANEW,
            ),
        )

    def _pending_of(self, name: str, after: EntryId, until: EntryId) -> Iterator[EntryId]:
        """Give the ids that are pending under a name."""
        settings = self._settings
        while True:
            words = ("XPENDING", settings.key, settings.group, f"({after}", str(until), str(_PAGE))
            page = self._ask(*words, name)
            for each in page:
                yield EntryId.of(each[0])
            if len(page) < _PAGE:
                return
            after = EntryId.of(page[-1][0])

    def _there(self, after: EntryId, until: EntryId) -> Iterator[EntryId]:
        """Give the ids of entries that the stream still has."""
        while True:
            page = self._ask("XRANGE", self._settings.key, f"({after}", str(until), "COUNT", str(_PAGE))
            for each in page:
                yield EntryId.of(each[0])
            if len(page) < _PAGE:
                return
            after = EntryId.of(page[-1][0])

    def _refuse_older(self, state: _State, position: _Position | None) -> None:
        """Refuse a stream that has not reached what was read of it."""
        if position is None or state.last >= position.last:
            return
        settings = self._settings
        raise self._set_back(
            expected=f"a stream that goes on behind entry {position.last}, the last one that was read",
            found=f"one whose last entry is {state.last}: it was emptied, or restored from an older copy",
            way_out="if producers lost nothing, let it go on behind that entry: "
            f"{settings.cli} XSETID {shlex.quote(settings.key)} {position.last}",
        )

    # ------------------------------------------------------------------------------------------------------ reading

    def read(self, after: str, *, most: int) -> Messages:
        """Return the entries right behind a position."""
        if not self._has_joined:
            self.join(after)
        with _uncollected():
            return self._next(after, most=most)

    def _next(self, after: str, *, most: int) -> Messages:
        settings = self._settings
        position = _Position.of(after)
        last = EntryId() if position is None else position.last
        self._last_read = None if position is None else last
        look = ("XINFO", "STREAM", settings.key)
        while True:
            count = str(min(most, self._count))
            group = ("XREADGROUP", "GROUP", settings.group, self._reader.name, "COUNT", count, "STREAMS", settings.key)
            if self._claims:
                reply = self._ask_at_once(look, (*group, str(last)))
                if found := _entries(reply[1]):
                    return self._claimed(found, position=position, state=_State.of(reply[0]))
                # All that was pending is read. What else was delivered before is acknowledged, by another reader.
                self._claims = False
                self._floor = max(self._floor, self._delivered)
                self._delivered = EntryId()
            is_behind = last < self._delivered
            read = ("XRANGE", settings.key, f"({last}", str(self._delivered), "COUNT", count)
            reply = self._ask_at_once(look, read if is_behind else (*group, ">"))
            state = _State.of(reply[0])
            self._refuse_older(state, position)
            lost = self._lost(state, position)
            found = list(reply[1]) if is_behind else _entries(reply[1])
            if is_behind and not found:
                self._delivered = EntryId()
                continue
            # Entries that are known come again where the group was made anew, or the broker has forgotten what it gave.
            is_known = bool(found) and EntryId.of(found[0][0]) <= last
            new = [each for each in found if EntryId.of(each[0]) > last] if is_known else found
            if found and not new:
                continue
            if not is_behind and new and self._has_gap(max(last, self._floor), EntryId.of(new[0][0])):
                self._take_gap(max(last, self._floor), EntryId.of(new[0][0]).before)
                self._delivered = EntryId.of(new[-1][0])
                continue
            return self._messages(new, position=position, state=state, lost=lost)

    def _claimed(self, entries: Sequence[Any], *, position: _Position | None, state: _State) -> Messages:
        """Return entries that are pending under our name; those that the stream no longer has come without fields."""
        there = [each for each in entries if each[1] is not None]
        gone = [EntryId.of(each[0]) for each in entries if each[1] is None]
        # Trimming takes the oldest: one that is gone while an older one is there was taken out on purpose, by XDEL.
        lost = sum(1 for each in gone if state.first is None or each < state.first)
        if lost and not self._settings.counts_trimmed:
            raise self._refuse_trimmed(lost, EntryId() if position is None else position.last)
        messages = self._messages(there, position=position, state=None, lost=lost)
        return replace(messages, position=str(_Position(last=EntryId.of(entries[-1][0]))))

    def _has_gap(self, low: EntryId, first: EntryId) -> bool:
        """Return whether there are entries between what we know and what we were given."""
        return bool(self._ask("XRANGE", self._settings.key, f"({low}", f"({first}", "COUNT", "1"))

    def _take_gap(self, low: EntryId, high: EntryId) -> None:
        """Make sure that entries which we were not given are ours: a reader that is gone had them, or they got lost."""
        dead = self._others()
        if dead:
            self._claim(dead)
            self._refuse_others_part(low, high, names=[self._reader.name], dead=dead)

    def _lost(self, state: _State, position: _Position | None) -> int:
        """Return how many entries behind a position were trimmed.

        Raises:
            DataError: some were, and nobody said that they shall be counted.
        """
        if position is None or (state.first is not None and state.first <= position.last):
            return 0  # trimming takes the oldest: as one up to the position is there, so are all behind it
        if state.added is None or position.added is None:
            if state.last > position.last and not self._has_warned:
                self._has_warned = True
                self._reader.say(
                    f"warning: {self._settings.key} was trimmed up to or behind {position.last}, which was read last; "
                    "whether unread entries were lost, this server does not say (Redis 7.0 does)"
                )
            return 0
        lost = state.added - state.length - position.added
        if lost <= 0:
            return 0
        if not self._settings.counts_trimmed:
            raise self._refuse_trimmed(lost, position.last)
        return lost

    def _refuse_trimmed(self, lost: int, after: EntryId) -> ZigguratError:
        return DataError(
            expected=f"all entries behind {after}, the last one that was read",
            found=f"{lost:,} of them were trimmed (MAXLEN, MINID) or deleted before they were read",
            where=self._settings.url,
            ways_out=(
                "go on without them, counted: ?trimmed=count behind the URL",
                "keep more: a larger MAXLEN where entries are added, at least what comes while a window is trained",
                "restore the broker from a copy that has them",
            ),
        )

    def _messages(
        self, entries: Sequence[Any], *, position: _Position | None, state: _State | None, lost: int = 0
    ) -> Messages:
        """Return entries as messages, and the position behind them."""
        ids = [each[0].decode() for each in entries]
        if entries:
            size = sum(sum(map(len, each[1])) + 64 for each in entries[:100]) / len(entries[:100])
            self._count = max(1, int(_REPLY_BYTES / size))
        last = EntryId.of(ids[-1]) if ids else (EntryId() if position is None else position.last)
        added: int | None = None
        if state is not None and state.added is not None:
            if last == state.last:
                added = state.added
            elif position is None and self._floor == EntryId():
                added = state.added - state.length + len(ids)
            elif position is not None and position.added is not None:
                added = position.added + lost + len(ids)
        if not ids and not lost and position is not None:
            added = position.added
        behind = "" if not ids and position is None else str(_Position(last=last, added=added))
        return Messages(ids=ids, columns=_columns(entries), position=behind, lost=lost)

    def acknowledge(self, position: str) -> None:
        """Acknowledge all entries up to a position that are pending under our name."""
        known = _Position.of(position)
        if known is None or position == self._acknowledged:
            return
        settings = self._settings
        after = EntryId()
        while True:
            words = ("XPENDING", settings.key, settings.group, f"({after}", str(known.last), str(_PAGE))
            page = [each[0] for each in self._ask(*words, self._reader.name)]
            if page:
                self._ask("XACK", settings.key, settings.group, *page)
                after = EntryId.of(page[-1])
            if len(page) < _PAGE:
                break
        self._acknowledged = position

    def waiting(self, after: str) -> Waiting:
        """Return how many entries are behind a position, and how much older than the newest it is."""
        position = _Position.of(after)
        state = _State.of(self._ask("XINFO", "STREAM", self._settings.key))
        if position is None:
            return Waiting(messages=state.length)
        count = None if state.added is None or position.added is None else max(state.added - position.added, 0)
        if state.last <= position.last:
            return Waiting(messages=0, behind_s=0.0)
        return Waiting(messages=count, behind_s=(state.last.ms - position.last.ms) / 1000)

    def close(self) -> None:
        """End the connection; what is pending stays so."""
        self._ending.set()
        if self._pulse is not None:
            self._pulse.join(1.0)
        self._client.close()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Leave Python's collector of cycles off: a reply is a million objects without one, and it looks at them all."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _entries(reply: Any) -> list[Any]:
    """Return the entries of a reply about one stream."""
    return list(reply[0][1]) if reply else []


def _columns(entries: Sequence[Any]) -> dict[str, Sequence[Cell]]:
    """Return the fields of entries as columns."""
    if not entries:
        return {}
    width = len(entries[0][1])
    if all(len(each[1]) == width for each in entries):
        flat = list(itertools.chain.from_iterable([each[1] for each in entries]))
        names = flat[:width:2]
        # Where all entries have the same names in the same places, which is usual, nothing is looked up.
        is_alike = all(flat[2 * place :: width].count(name) == len(entries) for place, name in enumerate(names))
        if is_alike and len(set(names)) == len(names):
            return {_text(name): flat[2 * place + 1 :: width] for place, name in enumerate(names)}
    columns: dict[str, list[Cell]] = {}
    for index, (_, fields) in enumerate(entries):
        for name, value in zip(fields[::2], fields[1::2], strict=True):
            text = _text(name)
            if text not in columns:
                columns[text] = [None] * len(entries)
            columns[text][index] = value
    return dict(columns)


def _pairs(reply: Sequence[Any]) -> dict[str, Any]:
    return {_text(name): value for name, value in zip(reply[::2], reply[1::2], strict=True)}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _first_line(error: BaseException) -> str:
    text = str(error).partition("\n")[0]
    # Of commands that are executed together, the client says which one it was.
    return text.rpartition("caused error: ")[2] or type(error).__name__
