"""The engine: batches by candidates, deadlines, refusals, the ladder; no HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.serving.server.fake import FakeAnswerer
from ziggurat.errors import FilterError, RequestError
from ziggurat.serving.answers import Effort, RankRequest, RecommendRequest
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.metrics import Metrics
from ziggurat.serving.server.queue.cost import CostLine
from ziggurat.serving.server.queue.engine import Engine, OverloadError, _Job
from ziggurat.serving.server.queue.ladder import LADDER, Ladder, steps_for

USER = RecommendRequest(user={"user_id": "u1"}, k=2)


def run(body: Callable[[Engine], Awaitable[Any]], answerer: FakeAnswerer, **settings: Any) -> Any:
    async def whole() -> Any:
        engine = Engine(answerer=answerer, config=ServerConfig(**settings), metrics=Metrics())
        engine.start()
        try:
            return await body(engine)
        finally:
            await engine.close()

    return asyncio.run(whole())


def ask(engine: Engine, request: Any, **more: Any) -> Awaitable[Any]:
    return engine.ask(request, candidates=engine.candidates_of(request), **more)


def test_requests_that_wait_are_computed_together_in_their_order() -> None:
    answerer = FakeAnswerer(base_s=0.01, batches=[])

    async def body(engine: Engine) -> list[Any]:
        requests = [RecommendRequest(user={"user_id": f"u{number}"}, explain=True) for number in range(20)]
        return await asyncio.gather(*(ask(engine, request) for request in requests))

    answers = run(body, answerer, deadline_ms=1000, degrade=False)
    assert [answer.plan for answer in answers] == [f"u{number}" for number in range(20)]
    assert answerer.batches is not None
    assert sum(answerer.batches) == 20
    assert len(answerer.batches) <= 3


def test_a_batch_has_no_more_candidates_than_it_may() -> None:
    answerer = FakeAnswerer(base_s=0.001, candidates=100, batches=[])

    async def body(engine: Engine) -> None:
        await asyncio.gather(*(ask(engine, USER) for _ in range(40)))

    run(body, answerer, deadline_ms=2000, max_batch_candidates=500)
    assert answerer.batches is not None
    assert max(answerer.batches) == 5


def test_kinds_are_not_mixed() -> None:
    answerer = FakeAnswerer(base_s=0.005)
    rank = RankRequest(user={}, items=("3", "5"))

    async def body(engine: Engine) -> list[Any]:
        return await asyncio.gather(*(ask(engine, each) for each in (USER, rank, USER, rank)))

    answers = run(body, answerer, deadline_ms=2000)
    assert [len(answer.items) for answer in answers] == [2, 2, 2, 2]
    assert [answers[1].items[0].id, answers[0].items[0].id] == ["5", "0"]


@pytest.mark.parametrize(("user", "error"), [("poison", RequestError), ("raise", KeyError)])
def test_one_bad_request_spoils_no_other_of_its_batch(user: str, error: type[Exception]) -> None:
    async def body(engine: Engine) -> list[Any]:
        bad = RecommendRequest(user={"user_id": user})
        asked = (ask(engine, each) for each in (USER, USER, bad, USER))
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = run(body, FakeAnswerer(base_s=0.01), deadline_ms=2000)
    assert isinstance(answers[2], error)
    assert [len(answer.items) for answer in (answers[0], answers[1], answers[3])] == [2, 2, 2]


def test_after_a_bad_request_others_are_checked_before_they_join_a_batch() -> None:
    bad = RecommendRequest(user={"user_id": "u1"}, filter="genres:")

    async def body(engine: Engine) -> None:
        assert engine.candidates_of(bad) == 100, "nothing is checked yet"
        await asyncio.gather(*(ask(engine, each) for each in (USER, USER, bad, USER)), return_exceptions=True)
        with pytest.raises(FilterError, match="column 1"):
            engine.candidates_of(bad)
        assert engine.candidates_of(USER) == 100

    run(body, FakeAnswerer(base_s=0.01), deadline_ms=2000)


def test_requests_that_would_be_late_are_refused_and_say_when_to_come_again() -> None:
    answerer = FakeAnswerer(base_s=0.02, candidate_s=1e-4, candidates=100)  # 30 ms alone, 10 ms a further one

    async def body(engine: Engine) -> list[Any]:
        engine.warm_up([USER])
        return await asyncio.gather(*(ask(engine, USER) for _ in range(200)), return_exceptions=True)

    answers = run(body, answerer, deadline_ms=300, degrade=False)
    refused = [answer for answer in answers if isinstance(answer, OverloadError)]
    assert 5 <= len(answers) - len(refused) <= 40
    assert all(error.retry_after_s > 0 for error in refused)


def test_a_deadline_of_its_own_is_kept() -> None:
    async def body(engine: Engine) -> list[Any]:
        engine.warm_up([USER])
        busy = [asyncio.ensure_future(ask(engine, USER)) for _ in range(6)]
        await asyncio.sleep(0.005)
        hurried = asyncio.gather(ask(engine, USER, deadline_s=0.02), return_exceptions=True)
        patient = ask(engine, USER, deadline_s=5)
        return [(await hurried)[0], await patient, *(await asyncio.gather(*busy))]

    answers = run(body, FakeAnswerer(base_s=0.1), deadline_ms=2000, degrade=False)
    assert isinstance(answers[0], OverloadError)
    assert answers[1].version == "v1"


def test_a_request_whose_deadline_passed_in_the_queue_is_not_computed() -> None:
    answerer = FakeAnswerer(base_s=0.1, batches=[])

    async def body(engine: Engine) -> Any:
        first = asyncio.ensure_future(ask(engine, USER))
        await asyncio.sleep(0.01)  # costs are unknown: nothing is refused yet
        second = asyncio.gather(ask(engine, USER, deadline_s=0.05), return_exceptions=True)
        await first
        return (await second)[0]

    late = run(body, answerer, deadline_ms=1000, degrade=False)
    assert isinstance(late, OverloadError)
    assert answerer.batches == [1]


def test_an_answer_after_its_deadline_is_not_given(caplog: pytest.LogCaptureFixture) -> None:
    async def body(engine: Engine) -> tuple[Any, str]:
        engine.warm_up([USER])
        answer = (await asyncio.gather(ask(engine, USER), return_exceptions=True))[0]
        return answer, engine.metrics.page()[0].decode()

    late, counted = run(body, FakeAnswerer(base_s=0.1), deadline_ms=20, degrade=False)
    assert isinstance(late, OverloadError)
    assert (late.expected, late.where) == ("an answer within 20 ms", "computation")
    assert late.found.startswith("one after 1")
    assert late.expired
    assert "ziggurat_expired_total 1.0" in counted
    assert "/recommend takes 10" in caplog.text, "said at the start"
    assert re.fullmatch(r"allow more time in a header, X-Deadline-Ms: [2-9]00", late.ways_out[1])
    setting = re.search(r"start it with --deadline-ms (\d+); it has 20 now", late.ways_out[2])
    assert setting is not None
    in_time = run(body, FakeAnswerer(base_s=0.1), deadline_ms=float(setting[1]), degrade=False)[0]
    assert in_time.version == "v1"


def test_the_queue_is_bounded() -> None:
    async def body(engine: Engine) -> list[Any]:
        return await asyncio.gather(*(ask(engine, USER) for _ in range(20)), return_exceptions=True)

    answers = run(body, FakeAnswerer(base_s=0.05), deadline_ms=10_000, max_queue=7)
    refused = [answer for answer in answers if isinstance(answer, OverloadError)]
    assert len(refused) == 13
    assert refused[0].ways_out[1] == "if the server is yours, start it with --server.max-queue 14"
    assert not any("eadline" in way for way in refused[0].ways_out)


def test_closing_answers_what_waits() -> None:
    async def body(engine: Engine) -> list[Any]:
        asked = [asyncio.ensure_future(ask(engine, USER)) for _ in range(5)]
        await asyncio.sleep(0.01)
        await engine.close()
        late = await asyncio.gather(ask(engine, USER), return_exceptions=True)
        return [*[await each for each in asked], *late]

    answers = run(body, FakeAnswerer(base_s=0.05), deadline_ms=5000)
    assert [answer.version for answer in answers[:5]] == ["v1"] * 5
    assert isinstance(answers[5], OverloadError)


def test_answers_get_less_effort_under_load_and_say_so() -> None:
    async def body(engine: Engine) -> tuple[list[Any], Any]:
        engine.warm_up([USER])
        answers = await asyncio.gather(*(ask(engine, USER) for _ in range(120)), return_exceptions=True)
        await asyncio.sleep(1.0)  # calm
        return answers, await ask(engine, USER)

    answers, last = run(body, FakeAnswerer(candidate_s=5e-5, candidates=100), deadline_ms=400)
    kinds = {answer.degraded for answer in answers if not isinstance(answer, Exception)}
    assert kinds & {("fewer_probes",), ("retrieval_only",), ("popular",)}
    assert last.degraded == ()


def test_the_ladder_goes_down_at_once_and_up_after_a_calm_time() -> None:
    ladder = Ladder(steps=[step for step in LADDER if step is not Effort.SMALLER_OVER_ARCH])
    assert ladder.feel(0.4, now=10.0) is Effort.FULL
    assert ladder.feel(0.9, now=10.1) is Effort.FEWER_PROBES
    assert ladder.feel(0.9, now=10.11) is Effort.FEWER_PROBES, "one step in 20 ms"
    assert ladder.feel(0.9, now=10.2) is Effort.RETRIEVAL_ONLY
    assert ladder.feel(0.0, now=10.3) is Effort.RETRIEVAL_ONLY
    assert ladder.feel(0.3, now=10.4) is Effort.RETRIEVAL_ONLY, "not calm: the time begins anew"
    assert ladder.feel(0.0, now=10.5) is Effort.RETRIEVAL_ONLY
    assert ladder.feel(0.0, now=10.72) is Effort.FEWER_PROBES
    assert ladder.feel(0.0, now=10.8) is Effort.FEWER_PROBES
    assert ladder.feel(0.9, now=10.9) is Effort.RETRIEVAL_ONLY, "the step up was too early"
    assert ladder.feel(0.0, now=11.0) is Effort.RETRIEVAL_ONLY
    assert ladder.feel(0.0, now=11.3) is Effort.RETRIEVAL_ONLY, "so that the next one waits longer"
    assert ladder.feel(0.0, now=11.41) is Effort.FEWER_PROBES
    assert ladder.feel(0.0, now=60.0) is Effort.FULL, "a time without requests is a calm one"


def test_ranking_is_never_counted_as_less_effort() -> None:
    async def body(engine: Engine) -> str:
        engine.ladder.level, engine.ladder._down = 1, float("inf")
        engine.ladder._hold_s = float("inf")
        assert (await ask(engine, USER)).degraded == ("fewer_probes",)
        await ask(engine, RankRequest(user={}, items=("3",)))
        return engine.metrics.page()[0].decode()

    text = run(body, FakeAnswerer(), deadline_ms=2000)
    assert 'ziggurat_answers_total{effort="fewer_probes"} 1.0' in text
    assert 'ziggurat_answers_total{effort="full"} 1.0' in text


def test_one_request_of_many_candidates_is_no_queue() -> None:
    """A batch that takes long by itself: as many batches as requests are expected, not one for each candidate."""

    async def body(engine: Engine) -> tuple[list[Any], list[float]]:
        for line in engine._costs.values():
            for candidates in (100, 100, 800):
                line.observe(candidates, 0.1)
        waits: list[float] = []

        async def second() -> Any:
            waits.append(engine.wait_s())
            return await ask(engine, USER)

        return await asyncio.gather(ask(engine, USER), second()), waits

    answers, waits = run(body, FakeAnswerer(candidates=100), deadline_ms=240)
    assert answers[0].degraded == ()
    assert 0 < waits[0] <= 0.2


def filled(kinds: Sequence[type], *, sizes: dict[type, int], fixed: float, slope: float) -> Engine:
    """Return an engine that computes nothing, with requests in its queue and lines of costs that are known."""
    engine = Engine(answerer=FakeAnswerer(), config=ServerConfig(deadline_ms=150, degrade=False), metrics=Metrics())
    for line in engine._costs.values():
        for candidates in (100, 400, 200):
            line.observe(candidates, fixed + slope * candidates)
    for kind in kinds:
        put(engine, kind, sizes[kind])
    return engine


def put(engine: Engine, kind: type, size: int) -> None:
    request: Any = USER if kind is RecommendRequest else RankRequest(user={}, items=("1",) * size)
    never: Any = None
    engine._queue.append(
        _Job(request=request, candidates=size, arrived=0.0, queued=0.0, deadline=1e9, future=never, watch=None)
    )


def packed_s(engine: Engine) -> float:
    """Return the seconds of the batches that the queue is taken in, by the true line of costs."""
    seconds = 0.0
    while engine._queue.jobs:
        _, effort = engine._take(was_idle=True)
        assert effort is Effort.FULL
        assert engine._queue.running is not None
        seconds += engine._queue.running.expected_s
    engine._queue.running = None
    assert not any((*engine._queue.counts.values(), *engine._queue.candidates.values(), *engine._queue.runs.values()))
    return seconds


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize(("size", "slope"), [(100, 1e-4), (117, 1e-4), (299, 1e-4), (400, 2e-4), (1, 1e-6)])
def test_the_wait_is_that_of_batches_of_whole_requests(count: int, size: int, slope: float) -> None:
    """A batch with room for 2.6 requests has two: by candidates alone a third of those taken in would be late."""
    engine = filled([RecommendRequest] * count, sizes={RecommendRequest: size}, fixed=0.01, slope=slope)
    expected = engine.wait_s()
    assert packed_s(engine) == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("size", [100, 117, 299])
def test_a_new_request_is_answered_at_the_end_of_a_full_batch(count: int, size: int) -> None:
    sizes = {RecommendRequest: size}
    engine = filled([RecommendRequest] * count, sizes=sizes, fixed=0.01, slope=1e-4)
    expected = engine.wait_s() + engine._own_s(RecommendRequest, size)
    in_a_batch = engine._requests_in_a_batch(RecommendRequest, size)
    put(engine, RecommendRequest, size)
    for _ in range(-(count + 1) % in_a_batch):
        put(engine, RecommendRequest, size)
    assert packed_s(engine) == pytest.approx(expected)
    # Alone in an empty queue it is taken for what it takes itself.
    assert engine._own_s(RecommendRequest, size) == pytest.approx(0.01 + 1e-4 * size)


@pytest.mark.parametrize("seed", range(20))
def test_the_wait_counts_batches_that_end_where_the_other_kind_begins(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {RecommendRequest: draw.choice([50, 100, 130]), RankRequest: draw.choice([10, 100, 500])}
    kinds = [draw.choice([RecommendRequest, RankRequest]) for _ in range(draw.randint(2, 40))]
    engine = filled(kinds, sizes=sizes, fixed=0.01, slope=1e-4)
    expected = engine.wait_s()
    assert packed_s(engine) == pytest.approx(expected, rel=0.25)
    # In turns each request is a batch of its own.
    in_turns = filled([RecommendRequest, RankRequest] * 10, sizes=sizes, fixed=0.01, slope=1e-4)
    expected = in_turns.wait_s()
    assert packed_s(in_turns) == pytest.approx(expected) == 20 * 0.01 + 1e-3 * sum(sizes.values())


@pytest.mark.parametrize(("was_idle", "effort"), [(True, Effort.FULL), (False, Effort.FEWER_PROBES)])
def test_a_machine_that_pauses_is_no_queue(was_idle: bool, effort: Effort) -> None:
    """What counts is the wait for other batches, not that for an idle thread to wake."""

    async def body() -> Effort:
        engine = Engine(answerer=FakeAnswerer(), config=ServerConfig(), metrics=Metrics())
        engine._loop = asyncio.get_running_loop()
        asked = asyncio.ensure_future(ask(engine, USER))
        await asyncio.sleep(0)
        engine._queue.jobs[0].queued -= 0.15
        found = engine._take(was_idle=was_idle)[1]
        asked.cancel()
        return found

    assert asyncio.run(body()) is effort


def test_the_effort_rises_without_requests_and_metrics_say_so() -> None:
    async def body(engine: Engine) -> str:
        while not engine._queue.idle:
            await asyncio.sleep(0.001)
        engine.ladder.level, engine.ladder._calm_since, engine.ladder._hold_s = 2, None, 0.05
        assert (await ask(engine, USER)).degraded == ("retrieval_only",)
        for _ in range(500):
            if "ziggurat_degradation_level 0.0" in (text := engine.metrics.page()[0].decode()):
                break
            await asyncio.sleep(0.01)
        return text

    assert "ziggurat_degradation_level 0.0" in run(body, FakeAnswerer(), deadline_ms=2000)


def test_steps_that_change_nothing_are_left_out() -> None:
    info = FakeAnswerer().info()
    assert steps_for(dataclasses.replace(info, num_over_arch=100)) == LADDER
    assert steps_for(info) == tuple(step for step in LADDER if step is not Effort.SMALLER_OVER_ARCH)
    assert Effort.RETRIEVAL_ONLY not in steps_for(dataclasses.replace(info, can_rank=False))
    assert steps_for(dataclasses.replace(info, can_recommend=False)) == (Effort.FULL,)


def test_the_line_of_costs_is_found_and_follows() -> None:
    cost = CostLine()
    assert cost.predict(1000) == 0
    for candidates in (100, 800, 100, 400, 1600):
        cost.observe(candidates, 0.002 + candidates * 1e-5)
    assert cost.predict(1000) == pytest.approx(0.012, rel=1e-3)
    assert cost.predict(1000, batches=3) == pytest.approx(0.016, rel=1e-3)
    assert cost.candidates_within(0.012) == pytest.approx(1000, rel=1e-3)
    for candidates in (100, 800, 400) * 60:
        cost.observe(candidates, 0.004 + candidates * 2e-5)
    assert cost.predict(1000) == pytest.approx(0.024, rel=0.1)


def test_batches_of_one_size_still_give_a_cost() -> None:
    cost = CostLine()
    for _ in range(5):
        cost.observe(100, 0.01)
    assert cost.predict(100) == pytest.approx(0.01)
    assert 0.01 < cost.predict(1000) < 0.1
