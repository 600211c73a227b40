"""One rank's result, or its error, reaches all ranks; a rank that is gone is named."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch.distributed as dist

from ziggurat.errors import PlanError, TopologyError, ZigguratError
from ziggurat.parallel.agreement import Agreement
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.process_groups import meeting_group
from ziggurat.testing.ranks import RankFailure, run_ranks


def results(rank: int) -> list[Any]:
    agreement = Agreement()
    first = agreement.on_first(lambda: {"rows": [rank, "é"]})
    return [first, agreement.everywhere(lambda: rank * 10), agreement.gather("x" * rank)]


def test_results_reach_all_ranks() -> None:
    assert run_ranks(results, 3) == [[{"rows": [0, "é"]}, [0, 10, 20], ["", "x", "xx"]]] * 3


def failure(rank: int, bad_rank: int, kind: str) -> tuple[str, str]:
    def act() -> None:
        if rank == bad_rank:
            if kind == "plan":
                raise PlanError(expected="a plan", found="none", where="plan.json", ways_out="write one")
            raise KeyError("column")

    try:
        Agreement().everywhere(act)
    except (ZigguratError, KeyError) as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_an_error_on_one_rank_is_raised_on_all_with_its_four_parts(bad_rank: int) -> None:
    for rank, (kind, text) in enumerate(run_ranks(failure, 3, bad_rank, "plan")):
        assert kind == "PlanError"
        assert "write one" in text
        assert (f"rank {bad_rank}: plan.json" in text) is (rank != bad_rank)


def test_an_unexpected_error_stays_itself_on_its_rank_and_names_the_rank_on_others() -> None:
    (kind, _), (other_kind, text) = run_ranks(failure, 2, 0, "bug")
    assert (kind, other_kind) == ("KeyError", "TopologyError")
    assert "KeyError: 'column'" in text
    assert "rank 0" in text


def survive(rank: int) -> str:
    """Rank 1 dies; what the others find."""
    agreement = Agreement()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        agreement.gather(rank)
    except TopologyError as error:
        raise AssertionError(f"said: {error}") from error
    return "nothing"


def test_a_killed_rank_fails_the_others_at_once() -> None:
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(survive, 2)


def test_alone_everything_is_a_plain_call() -> None:
    agreement = Agreement()
    assert (agreement.rank, agreement.world_size, agreement.is_first) == (0, 1, True)
    assert agreement.on_first(lambda: 3) == 3
    assert agreement.gather("a") == ["a"]
    with pytest.raises(ZeroDivisionError):
        agreement.everywhere(lambda: 1 // 0)


def test_only_errors_of_connections_become_topology_errors() -> None:
    with pytest.raises(TopologyError, match="Connection closed by peer") as lost, communicating("ids"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
    assert "pair.cc" not in str(lost.value)
    with pytest.raises(TopologyError) as late, communicating("ids"):
        raise RuntimeError("[/a/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 300ms for recv operation")
    assert late.value.found == "Timed out waiting 300ms for recv operation"
    with pytest.raises(TopologyError, match="ids"), communicating("ids"):
        raise dist.DistBackendError("NCCL communicator was aborted")
    with pytest.raises(RuntimeError, match="shapes") as caught, communicating("ids"):
        raise RuntimeError("shapes do not match")
    assert type(caught.value) is RuntimeError


def meeting(rank: int) -> str:
    try:
        meeting_group([0], timeout_s=30.0)
    except TopologyError as error:
        return str(error)
    meeting_group([0], timeout_s=30.0)  # alone on rank 0, as the way out says
    return ""


def test_a_rank_that_is_not_asked_to_a_meeting_is_told_so() -> None:
    asked, other = run_ranks(meeting, 2)
    assert asked == ""
    assert "name this rank, too" in other
