"""The file of an order: of one job, refused by name elsewhere and when it is stale; lines for other launchers."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from ziggurat.errors import ConfigError
from ziggurat.planning.rank_order.algorithms import CollectiveAlgorithm
from ziggurat.planning.rank_order.plots import write_picture
from ziggurat.planning.rank_order.rank_order import Machine, MeasuredOrders, OrderNow, RankOrder, compare, make_order

from .networks import network

ORDERED = [each.name for each in CollectiveAlgorithm if each.depends_on_order]
HOSTS = (0, 1, 0, 1)
MACHINES = tuple(Machine(name=f"vm{host}", address=f"10.0.0.{host + 1}", boot=f"boot{host}") for host in HOSTS)
NOW = datetime(2026, 3, 1, tzinfo=UTC)


def found(**changes: object) -> RankOrder:
    order = make_order(network(HOSTS, HOSTS), MACHINES, now=NOW)
    return dataclasses.replace(order, **changes)


def test_an_order_is_found_with_its_hosts_and_costs(tmp_path: Path) -> None:
    order = found()
    assert order.order in ((0, 2, 1, 3), (0, 2, 3, 1))
    assert order.hosts == HOSTS
    by_name = {cost.algorithm: cost for cost in order.costs}
    assert by_name["ring"].found_ms < by_name["ring"].given_ms / 1.5
    assert by_name["all_to_all"].found_ms == by_name["all_to_all"].given_ms
    order.save(tmp_path / "order.json")
    assert RankOrder.load(tmp_path / "order.json") == order
    assert json.loads((tmp_path / "order.json").read_text())["format"] == "ziggurat.rank_order"


def test_ranks_with_a_host_each_are_known_to_have_one() -> None:
    machines = [Machine(name=f"vm{rank}", address=f"10.0.0.{rank}") for rank in range(4)]
    order = make_order(network(range(4), HOSTS), machines)
    assert order.hosts == (0, 1, 2, 3)
    assert make_order(network(range(4), [0] * 4, noise=0.0), [Machine(name="vm")] * 4).hosts == ()


def test_an_order_of_its_job_is_taken() -> None:
    found().check_job(MACHINES, where="order.json", now=NOW + timedelta(days=6.9))


@pytest.mark.parametrize(
    ("rank", "changes", "message"),
    [
        (2, {"address": "10.0.0.9"}, "an order of another job: rank 2 on vm0 (10.0.0.9)"),
        (1, {"name": "vm7"}, "an order of another job: rank 1 on vm7 (10.0.0.2)"),
        (3, {"boot": "later"}, "a stale order: the machine was started anew"),
    ],
)
def test_an_order_of_another_job_is_refused_by_name(rank: int, changes: dict[str, str], message: str) -> None:
    machines = list(MACHINES)
    machines[rank] = dataclasses.replace(machines[rank], **changes)
    with pytest.raises(ConfigError) as refused:
        found().check_job(machines, where="order.json", now=NOW)
    assert message in refused.value.found
    assert refused.value.where == "order.json"


def test_another_number_of_ranks_and_an_old_file_are_refused() -> None:
    with pytest.raises(ConfigError, match="an order of another job: one of 4"):
        found().check_job(MACHINES[:2], where="order.json", now=NOW)
    with pytest.raises(ConfigError, match=r"a stale order: one of 2026-03-01.* 7\.5 days ago"):
        found().check_job(MACHINES, where="order.json", now=NOW + timedelta(days=7.5))
    found(valid_days=30.0).check_job(MACHINES, where="order.json", now=NOW + timedelta(days=29))


@pytest.mark.parametrize(
    "changes", [{"order": (1, 0, 2, 3)}, {"order": (0, 1, 1, 3)}, {"given": (0, 1, 2)}, {"machines": MACHINES[:3]}]
)
def test_an_order_that_is_none_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="order of ranks"):
        found(**changes)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    found().save(path)
    path.write_text(path.read_text().replace("vm1", "vm2"))
    with pytest.raises(ConfigError, match="sha256"):
        RankOrder.load(path)


def test_hosts_for_other_launchers_have_the_order() -> None:
    order = found(order=(0, 2, 3, 1))
    assert order.host_lines(form="mpi") == ["10.0.0.1 slots=2", "10.0.0.2 slots=2"]
    assert order.host_lines(form="ports", port=12400) == [
        "10.0.0.1 12400",
        "10.0.0.1 12401",
        "10.0.0.2 12400",
        "10.0.0.2 12401",
    ]


def test_an_order_is_taken_only_if_it_gains_by_the_clock() -> None:
    assert MeasuredOrders(num_bytes=1, given_ms=20.0, found_ms=10.0).gains
    assert not MeasuredOrders(num_bytes=1, given_ms=10.0, found_ms=9.6).gains
    assert not MeasuredOrders(num_bytes=1, given_ms=10.0, found_ms=10.3).gains


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_makes_no_order(seed: int) -> None:
    """Two racks one after the other: no ring crosses more seldom, whatever pairs were a little faster."""
    racks = [0, 0, 0, 0, 1, 1, 1, 1]
    machines = [Machine(name=f"vm{rank}") for rank in range(8)]
    pairs = network(range(8), racks, noise=0.2, seed=seed)
    order = make_order(pairs, machines)
    assert order.order == tuple(range(8))
    assert order.why_given == "no order crosses between hosts and racks more seldom"
    # Ranks of a host that are apart are put together all the same.
    assert make_order(network(HOSTS, [0] * 4, seed=seed), MACHINES).order != (0, 1, 2, 3)


@pytest.mark.parametrize("algorithm", ORDERED)
def test_an_order_is_never_dearer_than_the_launch(algorithm: str) -> None:
    """Ranks of two hosts in turns: halving and doubling sends most to the rank N/2 places on, which is on its host."""
    generator = np.random.default_rng(0)
    for seed in range(12):
        hosts = generator.permutation([0, 1] * int(generator.integers(2, 4))).tolist()
        pairs = network(hosts, [0] * len(hosts), noise=0.05, seed=seed)
        order = make_order(pairs, [Machine(name=f"vm{host}") for host in hosts], algorithm=algorithm)
        cost = next(cost for cost in order.costs if cost.algorithm == algorithm)
        assert cost.found_ms <= cost.given_ms, hosts
    in_turns = make_order(network(HOSTS, [0] * 4), MACHINES, algorithm="halving_doubling")
    assert in_turns.order == (0, 1, 2, 3)
    assert in_turns.why_given == "no order that keeps ranks of a host together is cheaper"
    # Towers lie on hosts all the same, and a run says so.
    assert in_turns.hosts == HOSTS
    assert in_turns.describe().startswith("host after host as found, else as given (no order that keeps")


@pytest.mark.parametrize("algorithm", [name for name in ORDERED if name != "ring"])
def test_noise_makes_no_order_that_nothing_times(algorithm: str) -> None:
    machines = [Machine(name=f"vm{rank}") for rank in range(6)]
    order = make_order(network(range(6), [0] * 6, noise=0.1), machines, algorithm=algorithm)
    assert not order.levels
    assert order.order == tuple(range(6))
    assert order.why_given == "no hosts or racks are sure, and what is gained may be noise"


def test_one_slow_link_is_gone_around_without_levels() -> None:
    machines = [Machine(name=f"vm{rank}") for rank in range(6)]
    slow = network(range(6), [0] * 6, noise=0.1)
    for one, other in ((0, 2), (2, 0)):
        slow.long_ms[one, other] *= 20
    order = make_order(slow, machines, algorithm="halving_doubling")
    assert order.why_given == ""
    assert order.order.index(2) != 2


def test_a_verdict_has_regard_to_the_order_that_is_written() -> None:
    last = found()
    stale = OrderNow(is_stale=True, reasons=("it costs 2.00 times",), slower_pairs=0, faster_pairs=0)
    kept = dataclasses.replace(last, why_given="an all-reduce took longer in the found order")
    stays = stale.after(kept, last.order)
    assert not stays.is_stale
    assert stays.reasons == ("the given order stays: an all-reduce took longer in the found order",)
    assert dataclasses.replace(stale, other_hosts=True).after(kept, last.order).is_stale
    assert stale.after(last, (0, 1, 2, 3)) == stale
    good = dataclasses.replace(stale, is_stale=False)
    replaced = good.after(kept, (0, 1, 2, 3))
    assert replaced.is_stale
    assert replaced.reasons == ("an all-reduce took longer in the found order",)


def test_lines_with_slots_cannot_take_ranks_of_a_host_apart() -> None:
    with pytest.raises(ConfigError, match="takes ranks of a host apart") as refused:
        found(order=(0, 1, 2, 3)).host_lines(form="mpi")
    assert "--hostfile-form ports" in refused.value.ways_out[0]
    assert len(found(order=(0, 1, 2, 3)).host_lines(form="ports")) == 4


def test_an_order_becomes_stale_when_the_network_changes() -> None:
    last = found()
    again = make_order(network(HOSTS, HOSTS, seed=5), MACHINES)
    assert not compare(last, again).is_stale
    # Rank 2's host was moved to the other rack: rank 2 is near ranks 1 and 3 now.
    moved = make_order(network(range(4), (0, 1, 1, 0)), MACHINES)
    verdict = compare(dataclasses.replace(last, levels=moved.levels), moved)
    assert verdict.is_stale
    assert "times what the best order of the newer probe does" in verdict.reasons[0]
    assert verdict.slower_pairs > 0
    assert verdict.faster_pairs > 0


def test_other_hosts_make_an_order_stale() -> None:
    last = found()
    machines = [dataclasses.replace(MACHINES[0], address=f"10.0.0.{rank % 3}") for rank in range(4)]
    verdict = compare(last, make_order(network(HOSTS, HOSTS), machines))
    assert verdict.is_stale
    assert verdict.reasons == ("the ranks that are near each other as on one host are others",)


def test_the_matrix_and_a_picture_are_written(tmp_path: Path) -> None:
    order = found()
    order.write_matrix(tmp_path / "order.csv")
    lines = (tmp_path / "order.csv").read_text().splitlines()
    assert lines[0] == "rank,other,latency_ms,long_ms"
    assert len(lines) == 1 + 6
    assert lines[1].startswith("0,1,0.1,")
    write_picture(order, tmp_path / "order.svg")
    text = (tmp_path / "order.svg").read_text()
    assert "The order that was found" in text
    assert "2 × host (1.00)" in text
    write_picture(make_order(network(range(4), [0] * 4, noise=0.0), MACHINES), tmp_path / "flat.svg")
    assert "Kept: no order is better" in (tmp_path / "flat.svg").read_text()
