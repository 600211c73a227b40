"""The benchmark of formats: errors are judged against a table, and a part that is none is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import numerics
from benchmarks.ours import OurContestant
from benchmarks.report import Report
from benchmarks.workload import ModelKind, Workload
from ziggurat.errors import ConfigError
from ziggurat.precision.dispatch import DISPATCH


def test_errors_of_formats_agree_with_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(benchmark="numerics", claim="", command="")
    monkeypatch.setattr(numerics, "PUBLISHED_QSNR", {"mx9": 46.6, "mx6": 30.0})
    options = numerics.parse_options([])
    options.vectors = 500
    numerics.measure_formats(report, options)
    verdicts = {case["name"]: case["verdict"] for case in report.figures}
    assert verdicts == {"qsnr_mx9_normal": "met", "qsnr_mx6_normal": "missed"}


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="qsnr"):
        numerics.run(options=numerics.parse_options(["--parts", "gears"]))


def test_turns_rotate_and_the_first_does_not_count() -> None:
    order = list[str]()

    def step(name: str) -> float:
        order.append(name)
        return float(sum(range(10_000)))

    rates = numerics.rates_in_turns({"a": lambda count: step("a"), "b": lambda count: step("b")}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(found) for name, found in rates.items()} == {"a": 2, "b": 2}


def test_a_contestant_trains_by_the_kernels_that_were_chosen_for_its_model(tmp_path: Path) -> None:
    workload = Workload(batch_size=64, num_rows=100, num_batches=1)
    trained = OurContestant(workload, {"precision": "fp32", "compile": "off"})
    report = Report(benchmark="numerics", claim="", command="")
    path = numerics.plan_of(trained, tmp_path / "dispatch.json", report=report)
    assert DISPATCH.read(path)["model"] == "DLRM"
    assert "kernels of products" in report.notes[0]
    dispatched = OurContestant(workload, {"precision": "dispatch", "dispatch": str(path), "compile": "off"})
    assert dispatched.run(1) == pytest.approx(trained.run(1), rel=0.05)


def test_products_are_counted_in_samples_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(numerics.time, "process_time", lambda: float(next(clock)))
    calls = list[int]()
    rates = numerics.rates_of_products({"one": lambda: calls.append(1)}, batch=16, repeats=5, rounds=2)
    assert rates == {"one": [80.0, 80.0]}  # 5 products of 16 samples in a second
    assert len(calls) == 15


def test_every_layer_batch_and_format_of_scoring_is_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "LAYERS", ((16, 32),))
    monkeypatch.setattr(numerics, "SCORED_BATCHES", (1, 2))
    report = Report(benchmark="numerics", claim="", command="")
    numerics.measure_scoring(report, numerics.parse_options(["--rounds", "1"]))
    names = {case.name for case in report.cases}
    assert names == {f"scoring_{name}_16x32_batch{batch}" for name in numerics.SCORED for batch in (1, 2)}
    assert len(report.tables[0].splitlines()) == 4


def test_every_model_batch_and_format_of_scoring_is_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "MODEL_BATCHES", (1, 2))
    monkeypatch.setattr(numerics, "MODEL_REPEATS", 1)
    small = Workload(model=ModelKind.DLRM, num_batches=1, num_rows=50, batch_size=4)
    monkeypatch.setattr(numerics, "workload_of", lambda model: small)
    report = Report(benchmark="numerics", claim="", command="")
    numerics.measure_models(report, numerics.parse_options(["--rounds", "1", "--models", "dlrm"]))
    names = {case.name for case in report.cases}
    assert names == {f"scoring_dlrm_{name}_batch{batch}" for name in numerics.SCORED for batch in (1, 2)}
    assert len(report.tables[0].splitlines()) == 4
    assert "FP32 in 1 (products of two activations: dot)" in report.notes[0]
