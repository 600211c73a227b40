"""The engine: a bounded queue with deadlines in front of one thread that computes batches.

    ask ─► wait too long? ─yes─► OverloadError (503, Retry-After), in microseconds
             │no
           queue (≤ max_queue) ─► batch: one kind, oldest first, as many candidates as a share of the deadline allows
                                   └► thread: answerer.recommend_many / rank_many  ─► one call back to the event loop

A batch starts as soon as the thread is free: it never waits for company, since under load company is there. A batch has
candidates, not requests, for its size: ranking 1,000 items costs what 1,000 requests for one item cost. A request whose
deadline passed while it waited is not computed any more, and an answer that is there after its deadline is not given:
its client learns that it was late, and asks elsewhere. The time of a request begins when its last byte reached this
machine, so what it waited before this process read it counts, too. If the answerer fails on a whole batch, its requests
are computed one by one, so that only the guilty one fails; for the next seconds the engine is *careful*, and requests
are checked before they join a batch (a check costs as much as the HTTP around it, and good requests need none).

The wait of a new request = the rest of the running batch + the queue's candidates on the line of `cost.py`, in batches
of whole requests. To this comes its own batch, and what lately passed between an answer and its delivery: an event loop
with hundreds of connections is late.
Estimate and answer are for one effort; `ladder.py` chooses it before each batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ziggurat.errors import ZigguratError
from ziggurat.serving.answering.stages import collected
from ziggurat.serving.answers import Answerer, Effort, Ranked, RankRequest, Recommendations, RecommendRequest
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.metrics import Metrics
from ziggurat.serving.server.queue.cost import CostLine
from ziggurat.serving.server.queue.ladder import LADDER, Ladder, steps_for
from ziggurat.serving.server.tracing import Watch

_log = logging.getLogger("ziggurat.server")
Request = RecommendRequest | RankRequest
Answer = Recommendations | Ranked
_SHARE_OF_DEADLINE = 0.25  # of one batch: a request waits for the running batch, then for its own
_MAX_SHARE = 0.4  # where the fixed part of a batch is large: up to this share, to spread it over more candidates
_FIXED_PARTS = 4.0  # a batch may take so many times its fixed part
_WARM_UP_S = 2.0
_CAREFUL_S = 10.0  # after a bad request was found in a batch
_NEW_DELIVERY = 0.2  # weight of the last delivery in their mean time


class OverloadError(ZigguratError, RuntimeError):
    """A request was refused for lack of time or room; says when to come again.

    Attributes:
        retry_after_s: seconds after which the queue will have room.
        expired: it was taken into the queue, and its deadline passed there.
    """

    retry_after_s: float = 1.0
    expired: bool = False


@dataclass(kw_only=True, eq=False)
class _Job:
    request: Request
    candidates: int
    arrived: float  # at this machine
    queued: float  # by this process
    deadline: float
    future: asyncio.Future[Answer]
    watch: Watch | None


@dataclass(kw_only=True)
class _Running:
    """The batch that is being computed: when it began, and how long it should take."""

    since: float = 0.0
    expected_s: float = 0.0


@dataclass(kw_only=True)
class _Queue:
    jobs: deque[_Job] = field(default_factory=deque)
    candidates: dict[type, int] = field(default_factory=lambda: {RecommendRequest: 0, RankRequest: 0})
    counts: dict[type, int] = field(default_factory=lambda: {RecommendRequest: 0, RankRequest: 0})
    # How many times requests of a kind follow one of the other kind: a batch ends there, whatever room it has.
    runs: dict[type, int] = field(default_factory=lambda: {RecommendRequest: 0, RankRequest: 0})
    running: _Running | None = None
    idle: bool = False
    closing: bool = False

    def append(self, job: _Job) -> None:
        """Add a job behind the others; sums are kept, because an estimate is asked for at every request."""
        kind = type(job.request)
        if not self.jobs or type(self.jobs[-1].request) is not kind:
            self.runs[kind] += 1
        self.jobs.append(job)
        self.candidates[kind] += job.candidates
        self.counts[kind] += 1

    def popleft(self) -> _Job:
        """Take the oldest job."""
        job = self.jobs.popleft()
        kind = type(job.request)
        self.candidates[kind] -= job.candidates
        self.counts[kind] -= 1
        if not self.jobs or type(self.jobs[0].request) is not kind:
            self.runs[kind] -= 1
        return job


class Engine:
    """One answerer behind a bounded queue; made and asked in one event loop.

    Args:
        answerer: computes answers; called from one thread.
        config: deadlines and bounds.
        metrics: counters and histograms to fill.
        prepare_thread: called first in the thread that computes (threads of torch are set for each thread).
    """

    _loop: asyncio.AbstractEventLoop  # that asks, from `start` on

    def __init__(
        self,
        *,
        answerer: Answerer,
        config: ServerConfig,
        metrics: Metrics,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.answerer = answerer
        self.config = config
        self.metrics = metrics
        self._prepare_thread = prepare_thread
        info = answerer.info()
        self._num_candidates = info.num_candidates
        # One step alone is never left, so that every answer has full effort.
        self.ladder = Ladder(steps=steps_for(info) if config.degrade else LADDER[:1])
        self._costs: dict[tuple[type, Effort], CostLine] = {
            (kind, effort): CostLine() for kind in (RecommendRequest, RankRequest) for effort in Effort
        }
        self._deadline_s = config.deadline_ms / 1e3
        self._queue = _Queue()
        self._lock = threading.Lock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._careful_until = 0.0
        self._delivery_s = 0.0  # lately, from an answer to the event loop that gives it to its client
        # A daemon: a batch that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._compute_for_ever, name="engine", daemon=True)

    # ---- in the event loop

    def start(self) -> None:
        """Begin to compute, for the event loop that calls this."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End after the requests that wait were answered."""
        with self._lock:
            self._queue.closing = True
        self._wake.put(None)
        # The thread ends with its batch; a join would keep the event loop from giving the answers out.
        while self._thread.is_alive():
            await asyncio.sleep(0.005)

    @property
    def computing_s(self) -> float:
        """Seconds since the batch that is being computed began; 0 if none is."""
        running = self._queue.running
        return 0.0 if running is None else time.monotonic() - running.since

    def wait_s(self) -> float:
        """Estimated seconds until a request that came now would begin to be computed."""
        queue = self._queue
        now = time.monotonic()
        running = queue.running
        wait = 0.0
        if running is not None:
            passed = now - running.since
            wait = max(running.expected_s - passed, 0.1 * passed)  # late already: it will take somewhat longer still
        return wait + sum(self._waiting_s(kind) for kind in queue.counts)

    @property
    def overloaded(self) -> bool:
        """True if a request with the default deadline would be refused now; costs next to nothing."""
        queue = self._queue
        # With an empty queue nobody is refused: a wrong estimate could else refuse all, and never be corrected.
        return bool(queue.jobs) and (
            len(queue.jobs) >= self.config.max_queue or self.wait_s() + self._delivery_s > self._deadline_s
        )

    def candidates_of(self, request: Request) -> int:
        """Count the candidates of a request; raise RequestError for one that cannot be answered, while careful."""
        if time.monotonic() < self._careful_until:
            try:
                return self.answerer.check(request)
            except ZigguratError:
                # Each further bad request keeps the engine careful for longer.
                self._careful_until = time.monotonic() + _CAREFUL_S
                raise
        if isinstance(request, RankRequest):
            return len(request.items)
        # At least `k` items have to be found and scored, even where fewer candidates are the rule.
        return max(self._num_candidates, request.k)

    async def ask(
        self,
        request: Request,
        *,
        candidates: int,
        deadline_s: float | None = None,
        arrived: float | None = None,
        watch: Watch | None = None,
    ) -> Answer:
        """The answer to one request.

        Args:
            request: what is asked.
            candidates: what `candidates_of` said of it.
            deadline_s: seconds from the request's arrival; None for the server's.
            arrived: when its last byte came, by `time.monotonic`; None for now.
            watch: records the request, if it is traced.

        Raises:
            OverloadError: it could not be answered in time.
            RequestError: it cannot be answered at all.
        """
        candidates = max(candidates, 1)
        now = time.monotonic()
        arrived = now if arrived is None else arrived
        allowed = self._deadline_s if deadline_s is None else deadline_s
        # Refused before it waits: an answer that would come too late only delays those behind it.
        self._admit(request, candidates, allowed, passed=now - arrived)
        future = self._loop.create_future()
        job = _Job(
            request=request,
            candidates=candidates,
            arrived=arrived,
            queued=now,
            deadline=arrived + allowed,
            future=future,
            watch=watch,
        )
        with self._lock:
            self._queue.append(job)
            # Only a thread that waits is woken: wake-ups that nobody takes would pile up.
            wake = self._queue.idle
            self._queue.idle = False
        if wake:
            self._wake.put(None)
        return await job.future

    def check_in_time(self, *, arrived: float, deadline_s: float | None) -> None:
        """Refuse to give an answer that is there.

        Args:
            arrived: when its request came, by `time.monotonic`.
            deadline_s: seconds from then; None for the server's.

        Raises:
            OverloadError: its deadline has passed.
        """
        allowed = self._deadline_s if deadline_s is None else deadline_s
        passed = time.monotonic() - arrived
        if passed > allowed:
            self.metrics.expired.inc()
            raise self._too_late(allowed, passed, where="answer")

    def _admit(self, request: Request, candidates: int, allowed: float, *, passed: float) -> None:
        queue = self._queue
        if queue.closing:
            raise _refusal("a server that takes requests", "one that is ending", "server", ways=("ask another server",))
        if len(queue.jobs) >= self.config.max_queue:
            found = f"{len(queue.jobs):,} requests that wait already"
            raise _refusal(
                f"fewer than {self.config.max_queue:,} requests in the queue",
                found,
                "queue",
                ways=(f"if the server is yours, start it with --server.max-queue {2 * self.config.max_queue}",),
                retry_after_s=self.wait_s(),
            )
        if passed > allowed:
            self.metrics.expired.inc()
            raise self._too_late(allowed, passed, where="connection")
        with self._lock:  # both of one state of the queue
            wait = self.wait_s()
            own = self._own_s(type(request), candidates)
        total = passed + wait + own + self._delivery_s
        if wait and total > allowed:  # a request that finds nothing before it is always tried
            found = f"{_milliseconds(total)} ms, of which {_milliseconds(wait)} ms in the queue"
            ways = ways_to_more_time(self.config, needed_s=total)
            raise _refusal(_in_time(allowed), found, "queue", ways=ways, retry_after_s=total - allowed)

    def _too_late(self, allowed_s: float, passed_s: float, *, where: str) -> OverloadError:
        """Return the error of a request whose deadline passed at one of its stages."""
        found = _TOO_LATE[where].format(_milliseconds(passed_s))
        ways = ways_to_more_time(self.config, needed_s=passed_s)
        error = _refusal(_in_time(allowed_s), found, where, ways=ways, retry_after_s=0.5)
        error.expired = True
        return error

    def _cost(self, kind: type) -> CostLine:
        return self._costs[kind, _effort_of(kind, self.ladder.effort)]

    def _most_candidates(self, cost: CostLine) -> float:
        fixed, _ = cost.line()
        # Where a batch costs much whatever is in it, larger ones share that, as long as the deadline allows.
        longer = min(_FIXED_PARTS * fixed, _MAX_SHARE * self._deadline_s)
        bound = cost.candidates_within(max(_SHARE_OF_DEADLINE * self._deadline_s, longer))
        return min(bound, float(self.config.max_batch_candidates))

    def _waiting_s(self, kind: type, *, behind_next: bool = False) -> float:
        """Seconds that the requests of a kind in the queue take, or those of them that the next batch leaves there."""
        candidates = float(self._queue.candidates[kind])
        count = self._queue.counts[kind]
        if behind_next and count:
            # The next batch takes as many as fit, and one request at least.
            taken = min(self._requests_in_a_batch(kind, candidates / count), count)
            candidates -= taken * candidates / count
            count -= taken
        if count <= 0:
            return 0.0
        return self._cost(kind).predict(candidates, batches=self._num_batches(kind, count, candidates))

    def _requests_in_a_batch(self, kind: type, mean_candidates: float) -> int:
        """Return how many requests of so many candidates a batch takes: whole ones, and one at least."""
        return max(int(self._most_candidates(self._cost(kind)) / max(mean_candidates, 1.0)), 1)

    def _num_batches(self, kind: type, count: int, candidates: float) -> int:
        """Return how many batches `count` requests take, where requests of the other kind stand between them."""
        runs = min(max(self._queue.runs[kind], 1), count)
        return runs * math.ceil(count / runs / self._requests_in_a_batch(kind, candidates / count))

    def _own_s(self, kind: type, candidates: int) -> float:
        """Return by how much the end of a new request's batch lies behind the end of the requests that wait now.

        An answer is there when all of its batch is computed. Where requests wait, those that come next will fill the
        batch, so it is taken for full; the first one that waits is taken for itself alone, and those behind it are
        refused where a full batch would be late.
        """
        cost = self._cost(kind)
        queue = self._queue
        if not queue.jobs:
            return cost.predict(candidates)
        joins = type(queue.jobs[-1].request) is kind
        count = 1 + (queue.counts[kind] if joins else 0)
        total = float(candidates + (queue.candidates[kind] if joins else 0))
        mean = total / count
        in_last_run = math.ceil(count / queue.runs[kind]) if joins else 1
        places = -in_last_run % self._requests_in_a_batch(kind, mean)
        end = cost.predict(total + places * mean, batches=self._num_batches(kind, count, total))
        return end - (self._waiting_s(kind) if joins else 0.0)

    # ---- in the thread that computes

    def _compute_for_ever(self) -> None:
        # The number of threads of torch is a setting of each thread, so it is made in this one.
        self._prepare_thread()
        was_idle = True
        while True:
            with self._lock:
                batch, effort = self._take(was_idle=was_idle)
                if not batch and self._queue.closing:
                    return
                self._queue.idle = was_idle = not batch
            if not batch:
                with contextlib.suppress(Empty):  # without requests, too, the ladder is climbed again
                    # At the lowest step nothing changes with time, and the thread may sleep until a request comes.
                    self._wake.get(timeout=self.ladder.hold_s if self.ladder.level else None)
                continue
            try:
                self._compute(batch, effort)
            finally:
                self._queue.running = None

    def _take(self, *, was_idle: bool) -> tuple[list[_Job], Effort]:
        """The next batch, called under the lock: the oldest requests, of one kind, within the size of a batch."""
        queue = self._queue
        now = time.monotonic()
        effort = self.ladder.feel(self._pressure(now, was_idle=was_idle), now=now)
        self.metrics.queue.set(len(queue.jobs))
        self.metrics.level.set(self.ladder.level)
        if not queue.jobs:
            return [], effort
        kind = type(queue.jobs[0].request)
        effort = _effort_of(kind, effort)
        cost = self._costs[kind, effort]
        most = self._most_candidates(cost)
        batch: list[_Job] = []
        taken = 0
        # Only from the front, so that no request is overtaken by those of the other kind.
        while queue.jobs and type(queue.jobs[0].request) is kind:
            job = queue.jobs[0]
            # The first one is taken whatever its size, or nothing ever would.
            if batch and taken + job.candidates > most:
                break
            batch.append(queue.popleft())
            taken += job.candidates
        queue.running = _Running(since=now, expected_s=cost.predict(taken))
        return batch, effort

    def _pressure(self, now: float, *, was_idle: bool) -> float:
        """Return the share of the deadline the oldest request has waited, or those beyond the next batch will wait.

        Time in which the thread had nothing to do counts not: the machine was late, and no less effort would help.
        """
        queue = self._queue
        wait = now - queue.jobs[0].queued if queue.jobs and not was_idle else 0.0
        rest = sum(self._waiting_s(kind, behind_next=True) for kind in queue.counts)
        return max(wait, rest) / self._deadline_s

    def _compute(self, batch: list[_Job], effort: Effort) -> None:
        started = time.monotonic()
        # Left out before they are computed: nobody waits for their answers any more.
        late = [job for job in batch if job.deadline < started or job.future.cancelled()]
        if late:
            dropped = set(map(id, late))
            batch = [job for job in batch if id(job) not in dropped]
        watched = [job.watch for job in batch if job.watch is not None]
        began_ns = time.time_ns()
        with collected(bool(watched)) as stages:
            answers = self._answers([job.request for job in batch], effort) if batch else []
        seconds = time.monotonic() - started
        if batch:
            candidates = sum(job.candidates for job in batch)
            self._costs[type(batch[0].request), effort].observe(candidates, seconds)
            self.metrics.observe_batch(len(batch), candidates, seconds, effort)
            for watch in watched:
                about = {"requests": len(batch), "candidates": candidates, "effort": effort.value}
                watch.batch(began_ns, stages=stages, about=about)
        # One by one its requests took much longer than a batch, so for a while they are checked before they join one.
        if len(batch) > 1 and any(isinstance(answer, Exception) for answer in answers):
            self._careful_until = time.monotonic() + _CAREFUL_S
        self.metrics.expired.inc(sum(not job.future.cancelled() for job in late))
        errors = [self._too_late(job.deadline - job.arrived, started - job.arrived, where="queue") for job in late]
        pairs = [*zip(batch, answers, strict=True), *zip(late, errors, strict=True)]
        # Futures belong to the event loop, and may be completed in its thread only.
        self._loop.call_soon_threadsafe(self._deliver, pairs, time.monotonic())

    def _deliver(self, pairs: Sequence[tuple[_Job, Answer | Exception]], done: float) -> None:
        """Give answers to those who wait, in the event loop; an answer after its deadline is an error."""
        now = time.monotonic()
        self._delivery_s += _NEW_DELIVERY * (now - done - self._delivery_s)
        for job, answer in pairs:
            # Its client has gone, and the future was cancelled.
            if job.future.done():
                continue
            if isinstance(answer, Exception):
                job.future.set_exception(answer)
            elif now > job.deadline:
                self.metrics.expired.inc()
                late = self._too_late(job.deadline - job.arrived, now - job.arrived, where="computation")
                job.future.set_exception(late)
            else:
                job.future.set_result(answer)

    def _answers(self, requests: Sequence[Request], effort: Effort) -> list[Answer | Exception]:
        try:
            return self._ask_answerer(requests, effort)
        except Exception as problem:
            if len(requests) == 1:
                _log.exception("an answerer failed on one request")
                return [problem]
        # Again one by one: a single bad request is found, and the others get their answers.
        return [self._answers([request], effort)[0] for request in requests]

    def _ask_answerer(self, requests: Sequence[Request], effort: Effort) -> list[Answer | Exception]:
        recommends = [each for each in requests if isinstance(each, RecommendRequest)]
        ranks = [each for each in requests if isinstance(each, RankRequest)]
        if recommends:  # requests of one batch are of one kind
            answers = self.answerer.recommend_many(recommends, effort=effort)
        else:
            answers = self.answerer.rank_many(ranks, effort=effort)
        assert len(answers) == len(requests), "an answerer gives as many answers as it is asked for"
        return list(answers)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Compute some batches of each effort before the first request, so that costs are known and caches warm.

        Args:
            requests: examples; requests that cannot be answered are passed over.
        """
        end = time.monotonic() + _WARM_UP_S
        alone: dict[type, float] = {}  # seconds of one request that finds nothing before it
        for kind in (RecommendRequest, RankRequest):
            known: list[tuple[Request, int]] = []
            for request in requests:
                if isinstance(request, kind):
                    try:
                        known.append((request, max(self.answerer.check(request), 1)))
                    except ZigguratError:
                        continue
            if not known:
                continue
            for effort in dict.fromkeys(_effort_of(kind, step) for step in self.ladder.steps):
                # Two sizes twice, then others: a line needs different ones, and the time may run out.
                for position, size in enumerate((1, 8, 1, 8, 2, 4)):
                    if position and time.monotonic() > end:
                        break
                    chosen = [known[index % len(known)] for index in range(size)]
                    started = time.monotonic()
                    self._ask_answerer([request for request, _ in chosen], effort)
                    seconds = time.monotonic() - started
                    self._costs[kind, effort].observe(sum(count for _, count in chosen), seconds)
                    if size == 1:
                        alone[kind] = min(seconds, alone.get(kind, seconds))
        # The first batches of a process are slow, which says nothing of later ones.
        for key, cost in self._costs.items():
            self._costs[key] = dataclasses.replace(cost, excess=1.0)
        for kind, seconds in alone.items():
            if seconds > self._deadline_s:
                route = "/rank" if kind is RankRequest else "/recommend"
                _log.warning(
                    "%s takes %s ms for one request alone, and its deadline is %.10g ms: start with --deadline-ms %d",
                    *(route, _milliseconds(seconds), self._deadline_s * 1e3, math.ceil(3 * seconds) * 1000),
                )


def _effort_of(kind: type, effort: Effort) -> Effort:
    """The effort that a batch of a kind gets: each item to rank was asked for, so ranking never gets less."""
    return Effort.FULL if kind is RankRequest else effort


def ways_to_more_time(config: ServerConfig, *, needed_s: float) -> tuple[str, ...]:
    """Say how a request gets more time than it had: by its client, and by whoever runs the server.

    Args:
        config: of the server.
        needed_s: seconds that it would have taken; twice as many are proposed.
    """
    # Rounded up to tenths of a second, and to no less than twice the present deadline.
    milliseconds = max(math.ceil(20 * needed_s) * 100, math.ceil(2 * config.deadline_ms))
    if milliseconds > config.max_deadline_ms:
        return ("if the server is yours, start it with more --workers, or on a machine that does less beside it",)
    return (
        f"allow more time in a header, X-Deadline-Ms: {milliseconds}",
        f"if the server is yours, start it with --deadline-ms {milliseconds}; it has {config.deadline_ms:g} now",
    )


def _refusal(
    expected: str, found: str, where: str, *, ways: Sequence[str], retry_after_s: float = 1.0
) -> OverloadError:
    error = OverloadError(
        expected=expected,
        found=found,
        where=where,
        ways_out=("ask again after the seconds that Retry-After names", *ways),
    )
    error.retry_after_s = retry_after_s
    return error


_TOO_LATE = {
    "connection": "{} ms until it could be read",
    "queue": "{} ms in the queue",
    "computation": "one after {} ms",
    "answer": "one after {} ms",
}


def _milliseconds(seconds: float) -> str:
    """Return a duration in whole milliseconds, or, where these would say little, with two digits."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2g}" if milliseconds < 10 else f"{milliseconds:.0f}"


def _in_time(allowed_s: float) -> str:
    """Say what a deadline asks for, in the milliseconds that the client wrote."""
    # A difference of two clock readings carries their rounding: microseconds are kept, and of less three digits.
    milliseconds = allowed_s * 1e3
    shown = f"{round(milliseconds, 3):.12g}" if milliseconds >= 1e-3 else f"{milliseconds:.3g}"
    return f"an answer within {shown} ms"
