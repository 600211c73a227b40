"""`ziggurat bench gpu`: without a GPU nothing is claimed, and `--quick` runs the code that a GPU is measured with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu.contest import Machine, machine_of
from benchmarks.gpu.tune import fastest
from benchmarks.report import Report, write_report
from ziggurat.ops.machine.launches import Launch

WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@WITHOUT
def test_without_a_gpu_every_case_is_skipped_with_the_reason() -> None:
    report = gpu.run()
    assert not report.cases
    assert len(report.skipped) == 1
    assert "GPU" in report.skipped[0] or "without CUDA" in report.skipped[0]


def test_a_report_without_a_figure_is_not_put_with_the_committed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.report.ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.report.REPORTS", tmp_path / "benchmarks" / "reports")
    empty = Report(benchmark="gpu", claim="", command="", skipped=["every case: no GPU"])
    assert write_report(empty).is_relative_to(tmp_path / "build")
    measured = replace(empty, figures=[{"name": "one", "seconds": 1.0}])
    assert write_report(measured).is_relative_to(tmp_path / "benchmarks" / "reports")


@WITHOUT
def test_launches_are_not_tuned_without_a_gpu(tmp_path: Path) -> None:
    options = gpu.parse_options(["--tune", str(tmp_path / "launches.json")])
    for quick in (False, True):
        report = gpu.run(quick=quick, options=options)
        assert len(report.skipped) == 1
    assert "timed on a GPU" in report.skipped[0]
    assert not list(tmp_path.iterdir())


def test_the_default_stays_where_no_launch_is_clearly_faster() -> None:
    default, other, slow = (Launch(numbers=numbers, warps=4) for numbers in (2048, 1024, 4096))
    times = {default: [1.0, 2.0, 1.0], other: [0.99, 1.98, 3.0], slow: [2.0, 4.0, 2.0]}
    assert fastest(times, default=default) == default
    times[other] = [0.9, 1.8, 3.0]
    assert fastest(times, default=default) == other


@WITHOUT
@pytest.mark.slow
def test_quick_runs_every_case_on_the_cpu_and_claims_nothing() -> None:
    assert machine_of(quick=True) == Machine(device=torch.device("cpu"), quick=True)
    report = gpu.run(quick=True)
    names = {case.name for case in report.cases}
    wanted = (
        "lookup",
        "update",
        "small_table",
        "dlrm_step_plain_torch",
        "dlrm_step_tuned_torch",
        "loss_curve",
        "resume",
    )
    assert names == {f"{name}_on_the_cpu_no_claim" for name in wanted}
    assert not any(case.goal for case in report.cases)
    found = {case.name.removesuffix("_on_the_cpu_no_claim"): case for case in report.cases}
    assert found["resume"].ratio == 1.0  # the same bits
    assert found["loss_curve"].ours == 0.0
    assert {text.split(":")[0] for text in report.skipped} == {
        *("launches", "sorted_ahead", "fm_norm", "dots", "cross_layers", "messages")
    }
