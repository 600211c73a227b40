"""An older commit's step beside today's: where its files come from, what is compared; nothing is timed."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks import against
from benchmarks.harness import ROOT, Entry, Measured
from benchmarks.workload import ModelKind, Workload
from ziggurat.errors import ConfigError

IN_GIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not IN_GIT, reason="this is no checkout of git")
def test_the_files_of_a_commit_are_its_own() -> None:
    folder = against.checkout("HEAD")
    shown = subprocess.run(["git", "show", "HEAD:benchmarks/ours.py"], cwd=ROOT, capture_output=True, check=True)
    assert (folder / "benchmarks" / "ours.py").read_bytes() == shown.stdout
    assert not (folder / ".git").exists()
    places = [entry.root for entry in against.entries(Workload(), older=folder)]
    assert places == [ROOT, folder, folder]
    with pytest.raises(ConfigError, match="git log --oneline"):
        against.checkout("no-such-commit")


def test_cases_are_ratios_by_round_of_cpu_seconds_and_of_the_clock() -> None:
    rates = {against.TODAY: [30.0, 11.0], against.OLDER: [20.0, 10.0], against.AGAIN: [20.0, 10.0]}
    results = {
        name: Measured(
            entry=Entry(name=name, module="benchmarks.ours"),
            info={},
            build_s=1.0,
            first_step_s=1.0,
            rates=[each / 2 for each in found[::-1]],
            cpu_rates=found,
        )
        for name, found in rates.items()
    }
    by_cpu, by_clock, again = against.cases(Workload(), results)
    assert (by_cpu.ratio, by_cpu.verdict) == (pytest.approx(1.3), "met")
    assert (by_clock.ratio, by_clock.verdict, by_clock.ours) == (pytest.approx(1.3), "", 10.25)
    assert (again.ratio, again.verdict) == (1.0, "")


def test_workloads_are_named_and_a_quick_run_can_have_each() -> None:
    names = [workload.case for workload in against.workloads(quick=False)]
    assert names == ["dlrm_d16", "dlrm_d16_multi_hot", "dcn_v2_d16"]
    assert [workload.case for workload in against.workloads(quick=True)] == names[:1]
    for name in names:
        options = against.parse_options(["--cases", name])
        assert [workload.case for workload in against.workloads(options.cases, quick=True)] == [name]
    assert against.parse_options([]).cases is None
    with pytest.raises(ConfigError, match="dcn_v2_d16"):
        against.workloads("hstu", quick=True)


def test_workers_of_older_commits_hear_of_no_newer_setting() -> None:
    assert Workload().to_json() == {"model": "dlrm"}
    asked = Workload(model=ModelKind.DCN_V2, dim=8, teacher=True)
    assert Workload.from_json(json.loads(json.dumps(asked.to_json()))) == asked
