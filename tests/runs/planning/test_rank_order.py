"""A probe of a job: an order that gains is kept, another is not; a run reads it for its own job alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ziggurat.config import to_json
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.parallel.agreement import Agreement
from ziggurat.parallel.exchange import pair_meter
from ziggurat.planning.rank_order.rank_order import RankOrder
from ziggurat.runs.planning import rank_order as module
from ziggurat.runs.planning.rank_order import OrderProbeConfig, job_machines, probe_order, read_order
from ziggurat.testing.ranks import run_ranks

CONFIG = OrderProbeConfig(measured_bytes=1 << 12, long_bytes=1 << 14, repeats=2)


@contextlib.contextmanager
def emulated(racks: list[int], gain: float):
    """Ranks in racks, by their times, and all-reduces that gain so much in another order than the given one."""
    rack = np.asarray(racks)
    long_ms = np.where(rack[:, None] == rack[None], 8.0, 40.0) * (1 - np.eye(len(racks)))
    latency_ms = 0.1 * (1 - np.eye(len(racks)))
    asked: list[Any] = []

    def measure(orders: Any, **_: object) -> list[float]:
        asked.extend(orders)
        return [100.0, 100.0 / gain]

    with (
        mock.patch.object(module, "measure_pairs", return_value=(latency_ms, long_ms)),
        mock.patch.object(module, "measure_orders", measure),
    ):
        yield asked


def probed(rank: int, racks: list[int], gain: float, path: str, last: str) -> dict[str, Any]:
    with emulated(racks, gain) as asked:
        found = probe_order(CONFIG, last=last)
    if found.is_first:
        found.order.save(path)
    compared = None if found.compared is None else to_json(found.compared)
    return {"order": found.order.order, "why": found.order.why_given, "asked": asked, "compared": compared}


def test_an_order_that_gains_is_kept_and_one_that_does_not_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "order.json")
    good = run_ranks(probed, 4, [0, 1, 0, 1], 2.0, path, "")
    assert all(each == good[0] for each in good)
    assert good[0]["order"] == (0, 1, 3, 2), "a ring that crosses between ranks 0 and 1, and 3 and 2"
    assert good[0]["asked"] == [(0, 1, 2, 3), good[0]["order"]]
    stored = RankOrder.load(path)
    assert (stored.order, stored.measured.gains, stored.why_given) == (good[0]["order"], True, "")

    noise = run_ranks(probed, 4, [0, 1, 0, 1], 1.04, path, "")
    assert noise[0]["order"] == (0, 1, 2, 3)
    assert "an all-reduce took 96.2 ms in the found order, 100.0 in the given one" in noise[0]["why"]
    kept = RankOrder.load(path)
    assert {cost.found_ms / cost.given_ms for cost in kept.costs} == {1.0}


def test_a_probe_again_keeps_a_good_order_and_replaces_a_stale_one(tmp_path: Path) -> None:
    path = str(tmp_path / "order.json")
    first = run_ranks(probed, 4, [0, 1, 0, 1], 2.0, path, "")[0]
    # Another order that is as good: kept, since runs use it.
    other = (0, *reversed(first["order"][1:]))
    RankOrder.load(path).with_order(other).save(path)
    again = run_ranks(probed, 4, [0, 1, 0, 1], 2.0, path, path)[0]
    assert again["order"] == other
    assert not again["compared"]["is_stale"]
    moved = run_ranks(probed, 4, [0, 1, 1, 0], 2.0, path, path)[0]
    assert moved["compared"]["is_stale"]
    assert moved["order"] == (0, 1, 2, 3)
    assert moved["why"] == "no order is cheaper by the measured times"


def refused(rank: int, path: str, changes: dict[str, Any]) -> tuple[Any, ...]:
    with emulated([0, 1, 0, 1], 2.0):
        try:
            found = probe_order(dataclasses.replace(CONFIG, **changes), last=path)
        except ConfigError as error:
            return error.expected, error.found
    return found.order.algorithm, found.order.num_bytes, found.order.valid_days


def test_a_probe_again_is_for_the_collective_of_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "order.json")
    first = run_ranks(probed, 4, [0, 1, 0, 1], 2.0, path, "")[0]
    assert first["why"] == ""
    order = dataclasses.replace(RankOrder.load(path), algorithm="tree", num_bytes=1 << 20, valid_days=30.0)
    order.save(path)
    assert run_ranks(refused, 4, path, {}) == [("tree", 1 << 20, 30.0)] * 4
    assert run_ranks(refused, 4, path, {"valid_days": 2.0}) == [("tree", 1 << 20, 2.0)] * 4
    for changes in ({"algorithm": "ring"}, {"num_bytes": 2 << 20}):
        for expected, found in run_ranks(refused, 4, path, changes):
            assert "tree, 1 MiB" in expected
            assert found in ("ring, 1 MiB", "tree, 2 MiB")


def test_a_stale_verdict_falls_where_the_clock_keeps_the_given_order(tmp_path: Path) -> None:
    path = str(tmp_path / "order.json")
    assert run_ranks(probed, 4, [0, 1, 0, 1], 1.0, path, "")[0]["order"] == (0, 1, 2, 3)
    again = run_ranks(probed, 4, [0, 1, 0, 1], 1.0, path, path)[0]
    assert again["order"] == (0, 1, 2, 3)
    assert not again["compared"]["is_stale"]
    assert "the given order stays: an all-reduce took 100.0 ms" in again["compared"]["reasons"][0]


def addresses(rank: int, ways: dict[str, list[str]]) -> list[str]:
    """The addresses of ranks whose ways to where all meet, and to another host, are these."""

    def way(target: str) -> str:
        return ways.get(target, [""] * 3)[rank]

    agreement = Agreement()
    try:
        with (
            mock.patch.object(pair_meter, "_address", way),
            mock.patch.dict(os.environ, {"MASTER_ADDR": "head"}),
        ):
            return [machine.address for machine in job_machines(agreement)]
    finally:
        agreement.close()


def test_the_host_that_all_meet_at_has_an_address_for_others(tmp_path: Path) -> None:
    """Two ranks on the host "head", whose name leads it to its loopback, and one on another."""
    ways = {"head": ["127.0.0.1", "127.0.0.1", "10.0.0.2"], "10.0.0.2": ["10.0.0.1", "10.0.0.1", "127.0.0.1"]}
    assert run_ranks(addresses, 3, ways) == [["10.0.0.1", "10.0.0.1", "10.0.0.2"]] * 3
    # A job on one machine has no other address.
    assert run_ranks(addresses, 3, {"head": ["127.0.0.1"] * 3}) == [["127.0.0.1"] * 3] * 3


def real(rank: int) -> dict[str, Any]:
    found = probe_order(CONFIG)
    return {"order": found.order.order, "pairs": len(found.order.long_ms), "machines": found.order.machines}


def test_a_probe_of_ranks_that_are_there() -> None:
    found = run_ranks(real, 3)
    assert all(each == found[0] for each in found)
    assert sorted(found[0]["order"]) == [0, 1, 2]
    assert found[0]["pairs"] == 3
    assert len(set(found[0]["machines"])) == 1


def read(rank: int, path: str) -> Any:
    agreement = Agreement()
    try:
        order = read_order(path, agreement)
        return order.order, order.hosts, len(order.long_ms)
    except ZigguratError as error:
        return type(error).__name__, error.found
    finally:
        agreement.close()


def test_a_run_reads_an_order_of_its_job_and_no_other(tmp_path: Path) -> None:
    path = str(tmp_path / "order.json")
    found = run_ranks(probed, 4, [0, 1, 0, 1], 2.0, path, "")[0]
    assert run_ranks(read, 4, path) == [(found["order"], (), 0)] * 4
    for number, (kind, text) in enumerate(run_ranks(read, 3, path)):
        assert (kind, text) == ("ConfigError", "an order of another job: one of 4"), number
    order = RankOrder.load(path)
    dataclasses.replace(order, measured_at="2020-01-01T00:00:00+00:00").save(path)
    assert all("a stale order: one of 2020" in text for _, text in run_ranks(read, 4, path))
    machines = (order.machines[0], dataclasses.replace(order.machines[1], name="elsewhere"), *order.machines[2:])
    dataclasses.replace(order, machines=machines).save(path)
    assert all("an order of another job: rank 1 on" in text for _, text in run_ranks(read, 4, path))
    assert {kind for kind, _ in run_ranks(read, 4, str(tmp_path / "nowhere.json"))} == {"MissingFileError"}


def test_one_process_has_no_order() -> None:
    with pytest.raises(ConfigError, match="three ranks or more"):
        probe_order(CONFIG)
