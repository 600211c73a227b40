"""The benchmark of versions of TorchRec: who takes part, what is compared, and what an absent environment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import peer_versions
from benchmarks.harness import NEWEST_PEERS, PEERS, Entry, Measured, RoundsConfig
from benchmarks.workload import Workload
from ziggurat.errors import ConfigError, MissingDependencyError


def test_ours_and_torchrec_run_in_both_environments_and_cases_name_the_version() -> None:
    entries = peer_versions.entries(Workload())
    assert [(entry.name, entry.venv) for entry in entries] == [
        ("ours, pinned", PEERS),
        ("TorchRec, pinned", PEERS),
        ("ours, newest", NEWEST_PEERS),
        ("TorchRec, newest", NEWEST_PEERS),
    ]
    versions = ({}, {"torchrec": "1.8.0"}, {}, {"torchrec": "1.9.2"})
    rates = ([30.0], [20.0], [30.0], [25.0])
    results = {
        entry.name: Measured(
            entry=entry, info={}, build_s=1.0, first_step_s=1.0, rates=rate, cpu_rates=rate, versions=version
        )
        for entry, rate, version in zip(entries, rates, versions, strict=True)
    }
    cases = {case.name: case for case in peer_versions.cases(Workload(), results)}
    assert cases["dlrm_d16_torchrec_1.8.0_cpu_seconds"].ratio == 1.5
    assert cases["dlrm_d16_torchrec_1.9.2_clock"].ratio == 1.2
    assert cases["dlrm_d16_torchrec_newest_over_pinned_cpu_seconds"].ratio == 1.25
    assert cases["dlrm_d16_ours_newest_over_pinned_cpu_seconds"].ratio == 1.0
    assert "torchrec 1.9.2" in cases["dlrm_d16_torchrec_1.9.2_clock"].peer_name


def test_cases_are_chosen_by_name_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_versions, "_expect_environment", lambda name, *, venv: None)
    measured: list[str] = []

    def note(entries: list[Entry], config: RoundsConfig) -> dict[str, Measured]:
        measured.append(entries[0].workload.case)
        return {}

    monkeypatch.setattr(peer_versions, "measure", note)
    monkeypatch.setattr(peer_versions, "cases", lambda workload, results: [])
    report = peer_versions.run(options=peer_versions.parse_options(["--cases", "dcn_v2_d64,dlrm_d16", "--rounds", "3"]))
    assert measured == ["dcn_v2_d64", "dlrm_d16"]
    assert report.command == "ziggurat bench peer_versions --rounds 3 --cases dcn_v2_d64,dlrm_d16"
    with pytest.raises(ConfigError, match="dcn_v2_d64"):
        peer_versions.run(options=peer_versions.parse_options(["--cases", "dcn_d64"]))


def test_a_missing_environment_is_named_with_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_versions, "ROOT", tmp_path)
    with pytest.raises(MissingDependencyError) as caught:
        peer_versions.run(quick=True)
    assert caught.value.ways_out == ("bash benchmarks/setup.sh",)
    (tmp_path / PEERS / "bin").mkdir(parents=True)
    (tmp_path / PEERS / "bin" / "python").touch()
    with pytest.raises(MissingDependencyError) as caught:
        peer_versions.run(quick=True)
    assert caught.value.ways_out == ("bash benchmarks/setup.sh newest",)
