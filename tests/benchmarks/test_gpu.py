"""`ziggurat bench gpu`: without a GPU nothing is claimed, and `--quick` runs the code that a GPU is measured with."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import recipes, session
from benchmarks.gpu.contest import Machine, case, machine_of
from benchmarks.gpu.tune import fastest
from benchmarks.report import Case, Report, write_report
from ziggurat.ops.machine.launches import Launch
from ziggurat.recipes.next_item import EVENTS_HSTU

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


@WITHOUT
def test_what_was_found_is_saved_after_each_case_and_a_case_that_fails_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(machine: Machine) -> list[Case]:
        raise ValueError("on purpose")

    def measures(machine: Machine) -> list[Case]:
        return [case(machine, "one", [2.0], ours=2.0, peer=1.0, peer_name="torch")]

    monkeypatch.setattr(gpu, "PARTS", {"a": lambda: iter([("bad", fails)]), "b": lambda: iter([("good", measures)])})
    saved: list[tuple[int, int]] = []
    with pytest.raises(ExceptionGroup) as error:
        gpu.run(quick=True, save=lambda report: saved.append((len(report.cases), len(report.skipped))))
    assert saved == [(0, 1), (1, 1)]
    assert isinstance(error.value.exceptions[0], ValueError)
    options = gpu.parse_options(["--parts", "good"])
    report = gpu.run(quick=True, options=options)
    assert report.benchmark == "gpu_good"
    assert [each.ours for each in report.cases] == [2.0]


def test_a_part_that_does_not_exist_is_refused_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse_options(["--parts", "dots,dotz"])
    assert "no such parts: dotz" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        session.main(["out", "--parts", "lookup"])
    assert "no such parts: lookup" in capsys.readouterr().err


def test_a_session_survives_parts_that_fail_or_hang_and_keeps_what_they_wrote(tmp_path: Path) -> None:
    hang = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    writes = f"open({str(tmp_path / 'works.json')!r}, 'w').write('[1]'); print('found')"
    chosen = [
        session.Part(name="fails", arguments=("-c", "raise SystemExit('on purpose')"), limit_s=30),
        session.Part(name="hangs", arguments=("-c", hang), limit_s=1.5),
        session.Part(name="works", arguments=("-c", writes), limit_s=30),
    ]
    begin = time.monotonic()
    assert session.run_parts(chosen, out=tmp_path, seconds=100) == 1
    assert time.monotonic() - begin < 30
    found = json.loads((tmp_path / "session.json").read_text())
    assert found["fails"]["exit"] == 1
    assert "on purpose" in found["fails"]["output"]
    assert str(found["hangs"]["exit"]).startswith("killed after")
    assert found["hangs"]["output"] == "begun\n"
    assert found["works"]["exit"] == 0
    assert found["works"]["report"] == [1]
    assert (tmp_path / "works.log").read_text() == "found\n"
    assert session.run_parts(chosen[:1], out=tmp_path, seconds=0) == 1
    assert json.loads((tmp_path / "session.json").read_text()) == {"fails": {"left_out": True}}


def test_a_session_runs_the_tests_that_need_a_gpu(tmp_path: Path) -> None:
    tests = next(part for part in session.parts(tmp_path) if part.name == "tests")
    assert "tests/gpu" in tests.arguments


def test_the_recipe_that_is_timed_is_the_one_of_the_catalogue() -> None:
    assert recipes.MOVIELENS_HSTU == EVENTS_HSTU


def test_steps_of_the_recipes_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["recipes", "--tiny", "--out", str(out), "--cases", "din,movielens_hstu,nobody"])
    recipes.main()
    found = json.loads(out.read_text())
    assert found["din"]["samples"] == 16
    assert found["movielens_hstu"]["samples"] == 4
    assert "nobody" in found["nobody"]["failed"]
