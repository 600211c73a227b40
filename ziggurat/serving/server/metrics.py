"""What /metrics says, by prometheus-client: of this process, or summed over all workers of a supervisor.

Workers write their figures to small mapped files, one set for each *slot* (a number that a worker gets from the
supervisor and that the next worker gets after its end), so that counters go on after a worker died and the number of
files is bounded by the number of processes. Any worker can answer /metrics for all.
"""

from __future__ import annotations

import math
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.plain import as_number, as_text
from ziggurat.serving.answers import Effort, Info

if TYPE_CHECKING:  # its files are chosen by the environment, so that it is imported after that is set
    from prometheus_client import Counter, Histogram

_LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)  # seconds
_FILES = ("counter", "histogram", "gauge_livesum", "gauge_livemax", "gauge_livemostrecent")  # of a slot
_FILE_BYTES = 1 << 16  # of each at first, as prometheus-client makes them; the figures of a server take less
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # requests of a batch


def share_metrics(*, folder: Path, slot: int) -> None:
    """Let this process's figures go to files of a folder; call before `Metrics` is made, once in a process.

    Args:
        folder: the same for all workers.
        slot: number of this worker; no two living processes may have the same.

    Raises:
        OSError: there is no room for the files; names one.
    """
    from prometheus_client import values

    _reserve(folder, slot=slot)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: slot)


def _reserve(folder: Path, *, slot: int) -> None:
    """Make the files of a slot with blocks of the disk behind every byte, as prometheus-client does not.

    The system kills a process (SIGBUS) that writes into a mapped file for which the disk has no block left: a worker
    would end with the first answer of a new status after the disk became full.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS: the files are then made by prometheus-client
        return
    for kind in _FILES:
        path = folder / f"{kind}_{slot}.db"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _FILE_BYTES)
        except OSError as problem:
            raise OSError(problem.errno, problem.strerror, str(path)) from None
        finally:
            os.close(descriptor)


def forget_metrics(*, folder: Path, slot: int) -> None:
    """Take a dead worker's present figures (length of its queue) out; its counters stay."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(slot, path=str(folder))


class Metrics:
    """The counters, gauges and histograms of one server process."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "ziggurat_requests",
            "Requests answered, by route and status.",
            ("route", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "ziggurat_request_seconds",
            "Time from the request to its answer, of requests answered with 200.",
            ("route",),
            buckets=_LATENCIES,
            registry=registry,
        )
        self._efforts = Counter(
            "ziggurat_answers",
            "Answers, by effort (full, or degraded how).",
            ("effort",),
            registry=registry,
        )
        self._batch = Histogram(
            "ziggurat_batch_requests",
            "Requests computed together.",
            buckets=_SIZES,
            registry=registry,
        )
        self._candidates = Counter("ziggurat_candidates", "Candidates computed.", registry=registry)
        self._computed = Counter("ziggurat_compute_seconds", "Seconds the engine computed.", registry=registry)
        self.shed = Counter(
            "ziggurat_shed",
            "Requests refused since they would be answered too late.",
            registry=registry,
        )
        self.expired = Counter(
            "ziggurat_expired",
            "Requests whose deadline passed before their answer.",
            registry=registry,
        )
        self.closed = Counter(
            "ziggurat_connections_closed",
            "Connections closed by the server, by reason.",
            ("reason",),
            registry=registry,
        )
        # Of workers that live: the queue of a dead one is gone with it.
        self.queue = Gauge(
            "ziggurat_queue_requests",
            "Requests that wait.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.level = Gauge(
            "ziggurat_degradation_level",
            "0: full effort; larger: less.",
            multiprocess_mode="livemax",
            registry=registry,
        )
        self.version = Gauge(
            "ziggurat_export",
            "1 for each worker that serves this version.",
            ("version",),
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.partial = Counter(
            "ziggurat_partial_answers",
            "Answers without the items of some shard.",
            registry=registry,
        )
        self._asked = Counter(
            "ziggurat_shard_questions",
            "Questions to shards, by what became of them.",
            ("shard", "outcome"),
            registry=registry,
        )
        # All workers have the same items, so that one figure says it for all: the latest.
        self._items = {
            name: Gauge(f"ziggurat_{name}", text, registry=registry, multiprocess_mode="livemostrecent")
            for name, text in (
                ("live_items", "Items of the catalogue."),
                ("deleted_items", "Items that were deleted; they keep their numbers."),
                ("unmerged_items", "Items that changed since the clusters of the index were made."),
                ("changes", "Changes of items since the export was made."),
                ("merged_changes", "Changes that are in the clusters of the index."),
                ("journal_bytes", "Bytes of the files that hold the changes."),
                ("last_merge_seconds", "When changes were merged last, in seconds since 1970; 0: never."),
            )
        }
        self._published = {
            name: Gauge(f"ziggurat_published_{name}", text, registry=registry, multiprocess_mode="livemostrecent")
            for name, text in (
                ("version", "Number of the version of a published folder that is served; 0 of any other export."),
                ("created_seconds", "When that version was written, in seconds since 1970; 0: not known."),
                ("watermark_seconds", "Time of the newest row that it was trained on, likewise; 0: not known."),
            )
        }
        self._window_metric = Gauge(
            "ziggurat_published_window_metric",
            "A metric of the window of that version, by the weights before it was trained; NaN: not known.",
            ["metric"],
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._shown_metrics: set[str] = set()
        # labels() looks a child up under a lock, so that those in use are kept.
        self._children: dict[tuple[str, int], Counter] = {}
        self._by_effort = {effort: self._efforts.labels(effort.value) for effort in Effort}
        self._of_route: dict[str, Histogram] = {}

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        child = self._children.get((route, status))
        if child is None:
            child = self._children[route, status] = self._requests.labels(route, str(status))
        child.inc()
        if status == 200:
            if route not in self._of_route:
                self._of_route[route] = self._seconds.labels(route)
            self._of_route[route].observe(seconds)

    def shard_asked(self, shard: int, outcome: str) -> None:
        """Count a question to a shard, by its outcome: answered, or why not."""
        self._asked.labels(str(shard), outcome).inc()

    def observe_batch(self, requests: int, candidates: int, seconds: float, effort: Effort) -> None:
        """Count a batch that was computed."""
        self._batch.observe(requests)
        self._candidates.inc(candidates)
        self._computed.inc(seconds)
        self._by_effort[effort].inc(requests)

    def show_published(self, info: Info) -> None:
        """Take over which version of a published folder an export is."""
        found = info.published
        self._published["version"].set(0 if found is None else found.number)
        self._published["created_seconds"].set(0 if found is None else found.created_s or 0)
        self._published["watermark_seconds"].set(0 if found is None else found.watermark_s or 0)
        known = {} if found is None else {name: value for name, value in found.metrics.items() if value is not None}
        # A version that lacks a metric must not keep the one of the version before.
        self._shown_metrics |= known.keys()
        for name in self._shown_metrics:
            self._window_metric.labels(name).set(known.get(name, math.nan))

    def show_items(self, info: Info) -> None:
        """Take the figures of an export's items over, if it has any."""
        if not info.changes:
            return
        for name in self._items:
            if name == "last_merge_seconds":
                at = as_text(info.changes["last_merge"])
                self._items[name].set(datetime.fromisoformat(at).timestamp() if at else 0)
            else:
                self._items[name].set(as_number(info.changes[name]))

    def page(self) -> tuple[bytes, str]:
        """The text of /metrics and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, values

        if not getattr(values.ValueClass, "_multiprocess", False):
            return generate_latest(self.registry), CONTENT_TYPE_LATEST
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry), CONTENT_TYPE_LATEST
