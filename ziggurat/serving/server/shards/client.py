"""Questions to all shards of an index at once, with a deadline for each, and checks of their health.

    ask ──► send to every shard that is well ──► read the answers as they come, until the deadline ──► found

A shard that refuses, ends, or is late three times in a row is *down*: it is not asked any more, so it costs no
request its deadline. A thread checks the health of shards: once a second of those that are well, more often of those
that are down; it lets them load the version that is asked for (on this machine) and sends them the changed items. A
shard that has both is up again, and part of the next answer. A shard that goes down soon after it came up waits longer
and longer, up to five seconds.

One thread asks at a time (the engine's); health and state may be read from any.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.retrieval.sharding import PartFound
from ziggurat.serving.answering.shards import ShardItems, ShardQuestion
from ziggurat.serving.server.processes.child import Backoff
from ziggurat.serving.server.shards.messages import (
    STATE,
    VERSION,
    decode_answer,
    encode_change,
    encode_question,
)

_log = logging.getLogger("ziggurat.server")
LATE, DEAD, BEHIND, OTHER, STARTING = "late", "dead", "behind", "another version", "starting"
_MAX_LATE = 3  # answers in a row
_CHECK_S = 1.0  # between two checks of a shard
_MAX_PAUSE_S = 5.0  # before a broken shard is asked again
_START_S = 0.1  # between two looks at shards that load
_HEALTH_S = 1.0  # to answer a check
_CHANGE_S = 30.0  # to take in changed items
_LOAD_S = 600.0  # to load a version
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_BROKEN = (OSError, http.client.HTTPException)


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Settings for asking shards.

    Args:
        addresses: host:port of each shard, in their order.
        deadline_s: of one search.
        wait_s: for all shards to load a version.
        api_key: that they ask for, or "".
    """

    addresses: tuple[str, ...]
    deadline_s: float = 0.1
    wait_s: float = 60.0
    api_key: str = ""

    def check(self) -> None:
        """Refuse what is no address; raises ConfigError."""
        for each in self.addresses:
            _parse(each)


@dataclass(kw_only=True, eq=False)
class _Shard:
    number: int
    host: str
    port: int
    idle: list[http.client.HTTPConnection] = field(default_factory=list)
    down: str = STARTING  # why it is not asked; "" if it is
    late: int = 0
    backoff: Backoff = field(default_factory=lambda: Backoff(max_pause_s=_MAX_PAUSE_S))
    next_check: float = 0.0
    up_since: float = 0.0
    wanted: ShardItems = field(default_factory=ShardItems)


class ShardClient:
    """All shards of one version of an export.

    Args:
        settings: where they are.
        version: of the export.
        export: its folder, for shards of this machine to load.
        observe: called with the number of a shard and what became of a question to it.
    """

    def __init__(
        self,
        settings: ShardSettings,
        *,
        version: str,
        export: Path,
        observe: Callable[[int, str], None] = lambda shard, outcome: None,
    ) -> None:
        self.settings = settings
        self.version = version
        self.observe = observe
        self._export = export
        places = [_parse(each) for each in settings.addresses]
        self._shards = [_Shard(number=i, host=host, port=port) for i, (host, port) in enumerate(places)]
        self._wake = threading.Event()
        self._closed = False
        # A daemon: a check that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run_health_checks, name="shards", daemon=True)

    @property
    def num_shards(self) -> int:
        """Shards of the index."""
        return len(self._shards)

    def connect(self, *, strict: bool) -> None:
        """Wait until the shards have loaded the version, then start the checks of their health.

        Args:
            strict: all of them must; else those that can be reached, of which there must be one.

        Raises:
            ConfigError: a shard is another one, or has not loaded the version in time; names it.
        """
        end = time.monotonic() + self.settings.wait_s
        while missing := [shard for shard in self._shards if shard.down]:
            for shard in missing:
                self._check_health(shard)
            if not (missing := [shard for shard in self._shards if shard.down]):
                break
            if time.monotonic() > end:
                if strict or len(missing) == len(self._shards):
                    raise self._unavailable(missing[0])
                _log.warning("begin without shard(s) %s", ", ".join(f"{each.number}: {each.down}" for each in missing))
                break
            time.sleep(_START_S)
        # Only here: while it starts, a wrong address is an error of this call.
        self._thread.start()

    def close(self) -> None:
        """Stop the checks, and close all connections."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        for shard in self._shards:
            while shard.idle:
                shard.idle.pop().close()

    def states(self) -> list[dict[str, object]]:
        """Return number, address and state of each shard: "up", or why it is not asked."""
        return [
            {"shard": each.number, "address": f"{each.host}:{each.port}", "state": each.down or "up"}
            for each in self._shards
        ]

    def ask(self, question: ShardQuestion, *, items: Sequence[ShardItems]) -> list[PartFound | str]:
        """Ask each shard, and return what it finds or why it gives no answer; see `Scatter.ask`."""
        body = encode_question(question)
        end = time.monotonic() + self.settings.deadline_s
        asked: dict[int, http.client.HTTPConnection] = {}
        # Shards that are down are not asked, and their reason stands in the place of an answer.
        found: list[PartFound | str] = [shard.down for shard in self._shards]
        # All are asked before the first answer is read, so that they search at the same time.
        for shard, wanted in zip(self._shards, items, strict=True):
            # Also of one that is down: the checks send it these items before it is up again.
            shard.wanted = wanted
            if not shard.down:
                try:
                    asked[shard.number] = self._send(shard, body, wanted)
                except _BROKEN as problem:
                    found[shard.number] = self._note_failure(shard, problem)
        for number, connection in asked.items():
            found[number] = self._receive(self._shards[number], connection, body, end)
        for shard, each in zip(self._shards, found, strict=True):
            self.observe(shard.number, each if isinstance(each, str) else "answered")
        return found

    def prepare(self, items: Sequence[ShardItems]) -> None:
        """Send changed items to the shards; see `Scatter.prepare`."""
        for shard, wanted in zip(self._shards, items, strict=True):
            is_new = wanted.id != shard.wanted.id
            shard.wanted = wanted
            if is_new and not shard.down:
                try:
                    self._put(shard, wanted)
                except (*_BROKEN, ValueError) as problem:
                    _log.warning("shard %d does not know of changed items yet: %s", shard.number, problem)
                    # It would answer from items of before.
                    self._mark_down(shard, BEHIND)

    # ---- one question

    def _headers(self, wanted: ShardItems) -> dict[str, str]:
        headers = {VERSION: self.version, STATE: wanted.id, "Content-Type": "application/octet-stream"}
        return headers | ({"X-Api-Key": self.settings.api_key} if self.settings.api_key else {})

    def _send(self, shard: _Shard, body: bytes, wanted: ShardItems) -> http.client.HTTPConnection:
        """Send a question; over a new connection where the one that was kept was closed meanwhile."""
        if shard.idle:
            connection = shard.idle.pop()
            try:
                connection.request("POST", "/search", body, self._headers(wanted))
            except _BROKEN:
                connection.close()
            else:
                return connection
        connection = http.client.HTTPConnection(shard.host, shard.port, timeout=self.settings.deadline_s)
        try:
            connection.request("POST", "/search", body, self._headers(wanted))
        except _BROKEN:
            connection.close()
            raise
        return connection

    def _receive(
        self, shard: _Shard, connection: http.client.HTTPConnection, body: bytes, end: float, *, again: bool = True
    ) -> PartFound | str:
        try:
            status, content = _answer_of(connection, end)
        except TimeoutError:
            # Its late answer would else be read as that to the next question.
            connection.close()
            shard.late += 1
            if shard.late >= _MAX_LATE:
                self._mark_down(shard, LATE)
            return LATE
        except _BROKEN as problem:
            connection.close()
            if again and isinstance(problem, http.client.RemoteDisconnected):  # it may have been closed as idle
                try:
                    return self._receive(shard, self._send(shard, body, shard.wanted), body, end, again=False)
                except _BROKEN as worse:
                    problem = worse
            return self._note_failure(shard, problem)
        # Only a connection whose answer was read to its end can be used again.
        shard.idle.append(connection)
        if status == 409:
            return self._mark_down(shard, BEHIND)
        try:
            if status != 200:
                raise ConfigError(expected="an answer", found=f"{status} {content[:300]!r}", where="", ways_out=())
            answer = decode_answer(content)
        except ZigguratError as problem:
            _log.error("shard %d refuses a question: %s", shard.number, problem.found)
            return "refused"
        shard.late = 0
        return answer

    def _note_failure(self, shard: _Shard, problem: Exception) -> str:
        _log.warning("shard %d at %s:%d gives no answer: %r", shard.number, shard.host, shard.port, problem)
        return self._mark_down(shard, DEAD)

    def _mark_down(self, shard: _Shard, why: str) -> str:
        now = time.monotonic()
        # It was up for a while, so this failure is not one of the series before.
        if shard.up_since and now - shard.up_since > _MAX_PAUSE_S:
            shard.backoff.succeed()
        shard.backoff.fail()
        shard.down = why
        # A shard that is behind only needs the changes.
        shard.next_check = now + (0.0 if why == BEHIND else shard.backoff.pause_s)
        # Connections to a process that is gone, or will be, are of no use.
        while shard.idle:
            shard.idle.pop().close()
        self._wake.set()
        return why

    # ---- health

    def _run_health_checks(self) -> None:
        while not self._closed:
            now = time.monotonic()
            for shard in self._shards:
                if shard.next_check <= now and not self._closed:
                    self._check_health(shard)
            first = min(shard.next_check for shard in self._shards)
            # Not 0, or a shard that is due at once would keep the loop spinning.
            self._wake.wait(max(0.01, first - time.monotonic()))
            self._wake.clear()

    def _check_health(self, shard: _Shard) -> None:
        """Check a shard, send it what it lacks, and decide whether it is asked."""
        was_down = shard.down
        try:
            about = json.loads(self._call(shard, "GET", "/shard", _HEALTH_S))
            self._check(shard, about)
            if self.version not in about["versions"]:
                self._load(shard)
            elif shard.wanted.id and shard.wanted.id not in about["versions"][self.version]["states"]:
                self._put(shard, shard.wanted)
        except TimeoutError:
            if was_down:  # one that is up may be busy: its next answers decide
                shard.down = LATE
        except ConfigError:
            # While the server starts, a wrong address ends it; later, that shard is asked no more.
            if not self._thread.is_alive():
                raise
            shard.down = "another shard"
        except (*_BROKEN, ValueError, KeyError) as problem:
            if not was_down:
                self._note_failure(shard, problem)
            else:
                shard.down = OTHER if isinstance(problem, _OtherVersionError) else DEAD
        else:
            if was_down:
                if shard.up_since:
                    _log.info("shard %d at %s:%d is there again", shard.number, shard.host, shard.port)
                    shard.late = _MAX_LATE - 1  # until it has answered once
                shard.up_since = time.monotonic()
                shard.down = ""
        pause_s = _CHECK_S
        if shard.down:
            pause_s = shard.backoff.pause_s or _START_S  # it may never have been up
        shard.next_check = time.monotonic() + pause_s

    def _check(self, shard: _Shard, about: dict[str, object]) -> None:
        if (about["shard"], about["shards"]) != (shard.number, self.num_shards):
            raise ConfigError(
                expected=f"shard {shard.number} of {self.num_shards}",
                found=f"shard {about['shard']} of {about['shards']}",
                where=f"{shard.host}:{shard.port}",
                ways_out="name the addresses in the order of the shards: --shard-addresses of 0, of 1, …",
            )

    def _load(self, shard: _Shard) -> None:
        """Let a shard of this machine load the version; one of another machine follows its own path."""
        if shard.host not in _THIS_MACHINE:
            raise _OtherVersionError(f"no version {self.version}")
        body = json.dumps({"export": str(self._export)}).encode()
        try:
            self._call(shard, "POST", "/admin/load", _LOAD_S, body=body)
        except ValueError as problem:
            raise _OtherVersionError(str(problem)) from None

    def _put(self, shard: _Shard, wanted: ShardItems) -> None:
        if wanted.change is not None:
            self._call(shard, "POST", "/state", _CHANGE_S, body=encode_change(wanted.change), wanted=wanted)

    def _call(
        self,
        shard: _Shard,
        method: str,
        path: str,
        seconds: float,
        *,
        body: bytes = b"",
        wanted: ShardItems | None = None,
    ) -> bytes:
        """Return the body of an answer with status 200, over a new connection; raises ValueError for another status."""
        connection = http.client.HTTPConnection(shard.host, shard.port, timeout=seconds)
        try:
            # Without items of its own a check names the state of none.
            headers = self._headers(wanted or ShardItems())
            if method == "POST" and wanted is None:
                headers |= {"Content-Type": "application/json"}
            connection.request(method, path, body or None, headers)
            status, content = _answer_of(connection, time.monotonic() + seconds)
        finally:
            connection.close()
        if status != 200:
            raise ValueError(f"{method} {path}: {status} {content[:300].decode(errors='replace')}")
        return content

    def _unavailable(self, shard: _Shard) -> ConfigError:
        return ConfigError(
            expected=f"all {self.num_shards} shards with version {self.version} of {self._export}",
            found=f"shard {shard.number}: {shard.down}, after {self.settings.wait_s:g} s",
            where=f"{shard.host}:{shard.port}",
            ways_out=(
                f"start it where it belongs: ziggurat serve {pasted(self._export)} "
                f"--shard {shard.number}/{self.num_shards} --port {shard.port}",
                "let it follow the same link: --watch on both sides",
                "look into its log",
            ),
        )


class _OtherVersionError(ValueError):
    """A shard is well, and has another version."""


def _answer_of(connection: http.client.HTTPConnection, end: float) -> tuple[int, bytes]:
    """Return status and body of an answer that must arrive before `end`; what has arrived is read in any case."""
    # Not with the timeout of the connection, which would begin anew with each piece of the answer.
    if connection.sock is not None:
        # Never 0, which would mean that the socket does not block at all.
        connection.sock.settimeout(max(end - time.monotonic(), 0.002))
    answer = connection.getresponse()
    return answer.status, answer.read()


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            expected="addresses of shards as host:port, with commas between them",
            found=f"{address!r:.80}",
            where="--shard-addresses",
            ways_out="--shard-addresses 10.0.0.1:9000,10.0.0.2:9000",
        )
    return host, int(port)
