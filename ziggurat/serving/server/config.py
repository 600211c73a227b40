"""The settings of a server: addresses, processes, deadlines, and bounds of everything that a client can make grow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from ziggurat.errors import ConfigError
from ziggurat.retrieval.shard_numbers import MAX_SHARDS
from ziggurat.serving.answers import MAX_K, MAX_RANKED
from ziggurat.typed import Range, ThreadsOrNone, checked

BACKLOG = 2048  # connections that the kernel holds until a worker takes them
LONGEST_PATH = 4096  # PATH_MAX of Linux
_LONG = "an hour"
Seconds = Annotated[float, Range(0, 3600, _LONG, open="least")]
Milliseconds = Annotated[float, Range(0, 600_000, "ten minutes", open="least")]


@dataclass(frozen=True, kw_only=True)
@checked
class ServerConfig:
    """Settings of a server.

    Args:
        host: address to listen on; 127.0.0.1 is reached from this machine alone.
        port: 0 takes a free one.
        workers: processes that answer; they map the same index, and each has models of its own.
        spares: further processes that have loaded the export and wait to take the place of one that died.
        threads: threads of each worker's computation; 0: the cores shared out among the workers.
        deadline_ms: time from a request's arrival to its answer, unless its header X-Deadline-Ms says otherwise.
        max_deadline_ms: most that a header may ask for.
        max_queue: requests that wait in one worker at most.
        max_batch_candidates: candidates computed together at most; fewer where they would take long.
        degrade: answer with less effort under load, before refusing; the answer says so.
        max_body_bytes: of a request.
        max_header_bytes: of a request line with its headers.
        max_items: items of one ranking request.
        max_k: items of one answer.
        max_connections: open ones of one worker; further ones are closed, but for those of the admin socket.
        receive_timeout_s: a request must have arrived whole after this time, whatever trickles in.
        send_timeout_s: a client must have taken its answer after this time.
        keep_alive_s: an idle connection is closed after this time.
        drain_s: requests in work may take this long after SIGTERM or a swap.
        linger_s: while draining, idle connections stay open this long, for requests that are on their way.
        hang_s: a worker that shows no sign of life for this long is killed and replaced.
        shards: processes of this machine among which the index is divided; 1: each worker searches itself.
        shard_addresses: host:port of shards that run elsewhere, in their order, with commas between; "": none.
        shard_deadline_ms: time for the answer of a shard; without those that are late, the answer says so.
        watch: load a new version when the export's folder (a link, say) changes.
        poll_s: seconds between two looks at which version of a published folder is current; such a folder is followed
            without `watch`.
        trace: record requests for OpenTelemetry, and send them by OTLP where its own variables say.
        show_columns: columns of items that /items and /history show, with commas between; "": all of the catalogue.
        admin: take POST /admin/swap and /admin/items, through the admin socket alone.
        admin_socket: path of the admin socket; "": one in a folder of the server's own, which it names at its start.
        hosts: names that a request's header Host may have beside addresses and localhost, with commas between; "": any
            where other machines may ask or there is an API key, none where this machine alone may.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8080
    workers: Annotated[int, Range(1, 256)] = 1
    spares: Annotated[int, Range(0, 16)] = 1
    threads: ThreadsOrNone = 0
    deadline_ms: Milliseconds = 200.0
    max_deadline_ms: Milliseconds = 10_000.0
    max_queue: Annotated[int, Range(1, 1_000_000)] = 2048
    max_batch_candidates: Annotated[int, Range(1, 100_000_000)] = 100_000
    degrade: bool = True
    max_body_bytes: Annotated[int, Range(1024, 1 << 30)] = 1 << 20
    max_header_bytes: Annotated[int, Range(1024, 1 << 20)] = 32 << 10
    max_items: Annotated[int, Range(1, MAX_RANKED)] = 5000
    max_k: Annotated[int, Range(1, MAX_K)] = 1000
    max_connections: Annotated[int, Range(1, 100_000)] = 4096
    receive_timeout_s: Seconds = 8.0
    send_timeout_s: Seconds = 10.0
    keep_alive_s: Seconds = 30.0
    drain_s: Seconds = 30.0
    linger_s: Annotated[float, Range(0, 3600, _LONG)] = 1.0
    hang_s: Seconds = 20.0
    shards: Annotated[int, Range(1, MAX_SHARDS)] = 1
    shard_addresses: str = ""
    shard_deadline_ms: Milliseconds = 100.0
    watch: bool = False
    poll_s: Seconds = 1.0
    trace: bool = False
    show_columns: str = ""
    admin: bool = True
    admin_socket: str = ""
    hosts: str = ""

    def __post_init__(self) -> None:
        if self.deadline_ms > self.max_deadline_ms:
            raise ConfigError(
                expected=f"a deadline of at most max_deadline_ms = {self.max_deadline_ms:g}",
                found=f"deadline_ms = {self.deadline_ms:g}",
                where="ServerConfig",
                ways_out=("a smaller deadline_ms", "a larger max_deadline_ms"),
            )

        if self.shards > 1 and self.shard_addresses:
            raise ConfigError(
                expected="shards of this machine, or addresses of shards that run elsewhere",
                found=f"shards = {self.shards}, and shard_addresses = {self.shard_addresses!r:.80}",
                where="ServerConfig",
                ways_out=("--shards N alone: the server starts them", "--shard-addresses alone: they run already"),
            )

    @property
    def threads_of_worker(self) -> int:
        """Threads that one worker, or one shard, computes with."""
        processes = self.workers + (self.shards if self.shards > 1 else 0)
        return self.threads or max(1, len(os.sched_getaffinity(0)) // processes)
