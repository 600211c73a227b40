"""The simulator's benchmark: settings read from a committed report, constants fitted without limited links, errors."""

from __future__ import annotations

import json

import pytest

from benchmarks.simulator import GOAL
from benchmarks.simulator_emulated import (
    START,
    emulated_cases,
    emulated_cluster,
    fitted_constants,
    newest_whole_report,
    read_settings,
)
from benchmarks.simulator_published import mlperf_dcn_v2_single, published
from ziggurat.planning.simulator.step_work import step_work
from ziggurat.recipes.catalogue import mlperf_dcn_v2, mlperf_dlrm
from ziggurat.runs.planning.plan_inputs import plan_inputs


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads(newest_whole_report().read_text())


def test_settings_are_ours_on_networks_that_a_cluster_describes(report: dict) -> None:
    settings = read_settings(report)
    assert len(settings) == 36
    assert all("racks" not in setting.name and setting.step_ms > 0 for setting in settings)
    assert sum(setting.is_fitted for setting in settings) == 9
    cluster = emulated_cluster(settings[0].network, START)
    assert cluster.between_bytes_per_s() == pytest.approx(1e9 / 8 * 0.94 / 2)  # two ranks share a link


def test_no_time_on_a_limited_link_is_fitted(report: dict) -> None:
    """Constants stay the same when every limited time is made ten times as long."""
    report = json.loads(json.dumps(report))
    report["runs"] = [run for run in report["runs"] if run["name"].startswith("dlrm_d64")]
    before = fitted_constants(read_settings(report))
    for run in report["runs"]:
        for variant in run["variants"]:
            if run["network"] != "4 ranks on one host":  # has no limited link
                variant["step_ms"]["median"] *= 10
    assert fitted_constants(read_settings(report)) == before


@pytest.mark.slow
def test_the_emulated_data_centre_is_predicted_within_the_goal(report: dict) -> None:
    settings = read_settings(report)
    cases = emulated_cases(settings, fitted_constants(settings))
    unseen = [abs(case["error"]) for case in cases if case["unseen"]]
    assert sum(error <= GOAL for error in unseen) >= 12
    assert sum(unseen) / len(unseen) < GOAL


def test_models_of_the_published_cases_have_their_published_size() -> None:
    """14.75 and 96.18 MFLOP a sample (MLPerf), 204 M rows."""
    for config, flop in ((mlperf_dlrm(), 14.75e6), (mlperf_dcn_v2(), 96.18e6), (mlperf_dcn_v2_single(), 96.18e6)):
        data = plan_inputs(config)
        work = step_work(config.model, data.inputs, batch_size=1, list_lengths=data.list_lengths)
        assert work.flop_per_sample == pytest.approx(flop, rel=0.02)
    assert sum(case.fitted for case in published()) == 1
