"""Ratios, reports and the judgement of loss curves; nothing is timed."""

import json
import os
import sys

import numpy as np
import pytest
import torch

from benchmarks import machine
from benchmarks.harness import Entry, Measured, WorkerError, _expect_same_network, paired_ratio, percentiles
from benchmarks.limits import Bf16Probe
from benchmarks.loss_curves import agreement
from benchmarks.report import Report, compare, short, to_markdown
from benchmarks.worker import Turns, serve
from benchmarks.workload import Workload


def measured(name: str, rates: list[float], **info: object) -> Measured:
    return Measured(
        entry=Entry(name=name, module="benchmarks.ours"),
        info=info,
        build_s=1.0,
        first_step_s=0.5,
        rates=rates,
        cpu_rates=rates,
        others_cpu_share=[0.01] * len(rates),
    )


def test_ratio_is_the_median_of_ratios_round_by_round():
    # A drift that hits both sides cancels; the ratio of medians would be 2.0 here, too, but with 40 % error bars.
    ours, peer = measured("a", [20.0, 10.0, 40.0]), measured("b", [10.0, 5.0, 20.0])
    assert paired_ratio(ours, peer) == {"median": 2.0, "p10": 2.0, "p90": 2.0}


def test_percentiles():
    assert percentiles([3.0]) == (3.0, 3.0)
    assert percentiles([float(value) for value in range(11)]) == pytest.approx((1.0, 9.0))


def test_networks_of_different_size_are_refused():
    with pytest.raises(WorkerError, match="different networks"):
        _expect_same_network(
            {"a": measured("a", [1.0], num_dense_parameters=3), "b": measured("b", [1.0], num_dense_parameters=4)}
        )


def test_report_has_what_the_json_promises(monkeypatch):
    monkeypatch.setattr(machine, "describe_versions", lambda: {"torch": "0"})
    results = {"ours": measured("ours", [30.0, 31.0]), "peer": measured("peer", [10.0, 10.0])}
    case = compare("speed", results, ours="ours", peer="peer", goal=4.0, limit=61.0)
    report = Report(benchmark="toy", claim="toy", command="none", cases=[case], contestants=list(results.values()))
    monkeypatch.setattr("benchmarks.report.describe_run", lambda: machine.describe_run())
    data = json.loads(json.dumps(report.to_json()))
    assert {"machine", "versions", "commit", "date", "cases", "contestants"} <= data.keys()
    found = data["cases"][0]
    assert (found["ours"], found["peer"], found["ratio"]) == (30.5, 10.0, pytest.approx(3.05))
    assert found["limit_ratio"] == pytest.approx(0.5)
    assert found["verdict"] == "missed"
    assert "| speed | 30.5 | 10.0 | **3.05**" in to_markdown(report, data)


def test_a_case_names_its_peer_with_the_versions_that_ran(monkeypatch):
    ours, peer = measured("ours", [30.0]), measured("TorchRec: FP32 eager", [10.0])
    ours.cpu_rates, peer.cpu_rates = [20.0], [10.0]
    peer.versions = {"torchrec": "1.9.2", "torch": "2.14.1"}
    case = compare("speed", {"ours": ours, "peer": peer}, ours="ours", peer="peer", by_cpu=True)
    assert (case.ours_name, case.peer_name) == ("ours", "TorchRec: FP32 eager (torchrec 1.9.2, torch 2.14.1)")
    assert (case.ratio, case.unit) == (2.0, "samples/CPU s")
    monkeypatch.setattr("benchmarks.report.describe_run", lambda: machine.describe_run() | {"versions": {}})
    report = Report(benchmark="toy", claim="toy", command="none", cases=[case], contestants=[ours, peer])
    data = report.to_json()
    assert data["contestants"][1]["versions"] == {"torchrec": "1.9.2", "torch": "2.14.1"}
    assert "- TorchRec: FP32 eager (torchrec 1.9.2, torch 2.14.1)\n" in to_markdown(report, data)


def test_the_machine_is_described_without_names_of_hosts_or_folders():
    text = json.dumps(machine.describe_machine())
    assert "/" not in text.replace("family_model", "").replace(machine.describe_machine()["family_model"], "")


NUMBERS = [(34_217.0, "34,200"), (1.2345, "1.23"), (0.0123, "0.0123"), (0.0, "0.0"), (9_999.0, "10,000")]


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_short(value, text):
    assert short(value) == text


def test_bf16_pays_only_if_it_is_clearly_faster():
    assert Bf16Probe(fp32_gflop_per_s=90.0, bf16_gflop_per_s=200.0).pays
    assert not Bf16Probe(fp32_gflop_per_s=90.0, bf16_gflop_per_s=1.0).pays


def test_loss_curves_that_differ_only_by_seed_agree_and_a_worse_one_does_not():
    generator = np.random.default_rng(0)
    base = 0.5 + 0.3 * np.exp(-np.arange(40) / 10)
    reference = base + 1e-3 * generator.standard_normal((3, 40))
    same = base + 1e-3 * generator.standard_normal((3, 40))
    assert agreement(same, reference).passes
    assert not agreement(same + 0.004, reference).passes


class Doubler:
    """A contestant whose value is twice its steps."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        self.info: dict[str, object] = {"kind": "toy", "settings": settings}

    def run(self, steps: int) -> float:
        if steps > 100:
            raise ValueError("too many")
        return 2.0 * steps


class Looper:
    """A contestant with a loop of its own, whose value is the steps it has taken in all."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        self.info: dict[str, object] = {"kind": "loop"}

    def loop(self, turns: Turns) -> None:
        for taken in range(1000):
            turns.next_step(float(taken))


def talk(contestant, commands, tmp_path, monkeypatch):
    """What a worker answers."""
    build = {"op": "build", "workload": Workload().to_json(), "settings": {"a": 1}, "first_steps": 1}
    replies = tmp_path / "replies"
    real = os.dup(1)
    monkeypatch.setattr(sys, "stdin", iter([json.dumps(command) for command in (build, *commands)]))
    with replies.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            serve(contestant)
        except SystemExit:
            pass
        finally:
            os.dup2(real, 1)
    return [json.loads(line) for line in replies.read_text().splitlines()]


def test_worker_answers_over_pipes_and_reports_errors(tmp_path, monkeypatch):
    commands = [{"op": "run", "steps": 4}, {"op": "run", "steps": 101}]
    built, ran, failed = talk(Doubler, commands, tmp_path, monkeypatch)
    assert built["info"] == {"kind": "toy", "settings": {"a": 1}}
    assert built["versions"]["torch"] == torch.__version__
    assert ran["value"] == 8.0
    assert failed["error"] == "ValueError: too many"


def test_a_contestant_with_its_own_loop_takes_exactly_the_steps_of_each_turn(tmp_path, monkeypatch):
    commands = [{"op": "run", "steps": 4}, {"op": "run", "steps": 2}]
    built, *turns = talk(Looper, commands, tmp_path, monkeypatch)
    assert built["info"] == {"kind": "loop"}
    assert "first_step_s" in built
    assert [turn["value"] for turn in turns] == [5.0, 7.0]


def test_versions_are_described_without_the_environment_of_peers(tmp_path):
    found = machine.describe_versions(tmp_path / "nowhere" / "python")
    assert {"python", "torch", "numpy"} <= found.keys()
    assert "torchrec" not in found
