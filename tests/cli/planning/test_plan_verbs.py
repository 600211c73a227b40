"""`ziggurat plan`, `simulate` and `cluster`: what they print, write and refuse."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ziggurat.cli.main import main
from ziggurat.plan import Plan, Towers
from ziggurat.planning.cluster.catalogue import load_cluster
from ziggurat.runs.planning.plan_run import SimulatedStep
from ziggurat.runs.planning.simulation_report import simulation_table

QUICK = ("--budget-s", "0.1")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty folder, no data on this machine, a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def test_a_plan_without_data_gpu_or_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "movielens_dlrm", "--cluster", "h100x64", "--compare", "--save", "plan.json", *QUICK]) == 0
    shown = capsys.readouterr().out
    for word in (
        "user_id",
        "6,043 × 16",
        "next best",
        "samples/s",
        "imbalance",
        "published numbers of ids",
        "row_wise",
    ):
        assert word in shown, word
    plan = Plan.load("plan.json")
    assert plan.world_size == 64
    assert {entry.table for entry in plan.tables} >= {"user_id", "movie_id", "genres"}


def test_towers_and_tables_are_planned_together(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"C{index}" for index in range(1, 27)]
    Towers(towers=(tuple(names[:13]), tuple(names[13:]))).save("towers.json")
    arguments = ["plan", "mlperf_dlrm", "--cluster", "h100x16", "--towers", "towers.json", "--compression", "4"]
    assert main([*arguments, "--save", "plan.json", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "2 towers in groups of" in shown
    assert re.search(r"flat +[\d.]+ ms without towers", shown)
    plan = Plan.load("plan.json")
    assert plan.towers is not None
    homes = {entry.table: set(entry.ranks) for entry in plan.tables}
    assert homes["C1"] <= set(plan.tower_ranks(0))
    assert homes["C26"] <= set(plan.tower_ranks(1))


def test_settings_and_sizes_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "user_id=5000000", "--list-length", "genres=2.1"]
    settings = ["--model.embedding-dim", "32", "--training.loader.batch-size=512"]
    assert main(["plan", "movielens_dlrm", "--cluster", "a100x8", *sizes, *settings, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "5,000,003 × 32" in shown
    assert "512 samples a rank" in shown
    assert "assumed ids a sample" not in shown


def test_the_printed_command_trains_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text('[[feature]]\nkind = "categorical"\nname = "shop"\n\n[[label]]\nname = "click"\n')
    arguments = ["plan", "table_dnn", "--schema", "my.toml", "--cluster", "h100x8", "--rows", "shop=1000"]
    assert main([*arguments, "--model.embedding-dim", "32", "--save", "plan.json", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "ziggurat train table_dnn --schema my.toml --model.embedding-dim 32 --plan plan.json" in shown


def test_a_cluster_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "show", "h100x16", "--out", "cluster.toml"]) == 0
    assert load_cluster("cluster.toml").world_size == 16
    assert main(["plan", "mlperf_dlrm", "--cluster", "cluster.toml", *QUICK]) == 0
    assert "2 hosts × 8 H100" in capsys.readouterr().out


def test_cluster_show_says_where_constants_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "show", "a100x16"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"device\.memory_bytes_per_s +1,555 GB/s +published +NVIDIA data sheet", shown)
    assert re.search(r"between\.efficiency +0\.7 +assumed", shown)


def test_what_does_not_fit_is_said_in_four_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlperf_dlrm", "--cluster", "v100x2", *QUICK]) == 2
    shown = capsys.readouterr().err
    for part in ("PlanError", "expected: ", "found:    ", "where:    ", "ways out:\n  1. ", "C"):
        assert part in shown
    assert "GiB" in shown or "GB" in shown or "bytes" in shown


def test_simulation_prints_and_plots(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "mlperf_dlrm", "--cluster", "h100x{1..4}", "--compression", "4", "--plot", "growth.png"]
    assert main([*arguments, *QUICK]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if re.match(r" *\d+ +(flat|\d towers)", line)]
    assert [(row[0], row[1]) for row in rows] == [
        ("8", "flat"),
        ("16", "flat"),
        ("16", "2"),
        ("32", "flat"),
        ("32", "4"),
    ]
    assert shown.split("devices")[1].split()[:2] == ["model", "ms"]
    assert all(float(row[2 if row[1] == "flat" else 5]) >= 7.0 for row in rows)  # the program's own time
    assert "not of a proven optimum" in shown
    assert Path("growth.png").read_bytes().startswith(b"\x89PNG")


def test_a_ratio_of_searches_cut_short_is_called_no_gain(capsys: pytest.CaptureFixture[str]) -> None:
    features = "".join(f'[[feature]]\nname = "f{index}"\nkind = "categorical"\n' for index in range(4))
    Path("my.toml").write_text(features + '[[label]]\nname = "click"\n')
    rows = [word for index in range(4) for word in ("--rows", f"f{index}=1000")]
    arguments = ["table_dnn", "--schema", "my.toml", "--cluster", "h100x16", *rows, "--budget-s"]
    assert main(["simulate", *arguments, "1e-6"]) == 0
    shown = capsys.readouterr().out
    flat, towers = (line for line in shown.splitlines() if re.match(r" *16 ", line))
    assert flat.endswith("cut short")
    assert re.search(r"cut short +–$", towers)
    assert "--budget-s 4e-06" in shown
    assert main(["plan", *arguments, "1e-6"]) == 0
    assert "cut short" in capsys.readouterr().out
    assert main(["simulate", *arguments, "1.5"]) == 0
    shown = capsys.readouterr().out
    assert "cut short:" not in shown
    assert re.search(r"^ *16 +flat .* \d\.\d\d$", shown, re.M)


def test_a_gain_is_called_one_only_beyond_what_searches_differ_by() -> None:
    cluster: Any = SimpleNamespace(world_size=16)

    def steps(flat_ms: float, towers_ms: float, **changes: Any) -> list[SimulatedStep]:
        made = []
        for kind, ms in (("flat", flat_ms), ("towers", towers_ms)):
            timeline: Any = SimpleNamespace(parts_ms=lambda ms=ms: {"lookup": ms})
            step = SimulatedStep(cluster=cluster, kind=kind, timeline=timeline, apart_ms=0.2)
            made.append(dataclasses.replace(step, **(changes if kind == "towers" else {})))
        return made

    def gain(made: list[SimulatedStep]) -> str:
        return simulation_table(made)[2][-1]

    assert gain(steps(8.0, 7.0)) == "1.14"
    assert gain(steps(7.0, 8.0)) == "0.88"
    assert gain(steps(7.3, 7.0)) == "–"  # 0.3 ms, and the searches differ by 0.2 each
    assert gain(steps(8.0, 7.0, settled=False)) == "–"
    assert gain(steps(8.0, 7.0, apart_ms=math.inf)) == "–"


def test_a_simulation_goes_on_where_a_size_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "mlperf_dlrm", "--cluster", "v100x2", "v100x16", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert re.search(r"16 +flat +[\d.]+", shown)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "mlperf_dlmr", "--cluster", "h100x8"], "did you mean 'mlperf_dlrm'"),
        (["plan", "mlperf_dlrm", "--cluster", "h10x8"], "did you mean"),
        (["plan", "mlperf_dlrm", "--cluster", "nowhere.toml"], "cluster show"),
        (["plan", "mlperf_dlrm", "--cluster", "h100x8", "--rows", "C99=3"], "C99"),
        (["plan", "mlperf_dlrm", "--cluster", "h100x8", "--rows", "C1"], "NAME=NUMBER"),
        (["plan", "mlperf_dlrm", "--cluster", "h100x8", "--list-length", "C1=3"], "C1"),
        (["plan", "mlperf_dlrm", "--cluster", "h100x8", "--compression", "4"], "--towers FILE"),
        (["plan", "movielens_logistic_regression", "--cluster", "h100x8"], "one device is enough"),
        (["plan", "mlperf_dlrm", "--cluster", "h100x8", "--model.dim", "4"], "embedding"),
        (["plan", "table_dlrm", "--cluster", "h100x8"], "data inspect"),
        (["simulate", "mlperf_dlrm", "--cluster", "h100x{8..2}"], "smaller number first"),
        (["cluster", "show", "h100"], "h100x64"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "ways out:\n  1. " in shown
    assert words in shown


def test_a_vocabulary_of_unknown_size_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text('[[feature]]\nkind = "categorical"\nname = "shop"\n\n[[label]]\nname = "click"\n')
    arguments = ["plan", "table_dlrm", "--schema", "my.toml", "--cluster", "h100x8", *QUICK]
    assert main(arguments) == 2
    assert "--rows shop=1000000" in capsys.readouterr().err
    assert main([*arguments, "--rows", "shop=1000000", "--model.interaction", "cat"]) == 0
    assert "1,000,003 × 16" in capsys.readouterr().out


def test_a_plan_by_measured_costs(capsys: pytest.CaptureFixture[str]) -> None:
    costs = Path(__file__).parents[3] / "benchmarks" / "costs" / "amd-epyc-25-1-2-cores.json"
    command = ["plan", "movielens_dlrm", "--cluster", "localx4", "--costs", str(costs), *QUICK]
    samples = "--training.loader.batch-size"
    assert main([*command, samples, "512", "--save", "plan.json"]) == 0
    shown = capsys.readouterr().out
    assert "costs learned on" in shown
    assert "2,048 samples a step" in shown
    assert {entry.placement.value for entry in Plan.load("plan.json").tables} <= {"table_wise", "column_wise"}

    assert main([*command, samples, "100"]) == 2
    refused = capsys.readouterr().err
    assert "expected: costs of 400 samples a step: 100 a rank on 4 ranks" in refused
    assert "--training.loader.batch-size 512" in refused

    Towers(towers=(("user_id", "gender", "age", "occupation", "zip_code"), ("movie_id", "genres", "year"))).save(
        "t.json"
    )
    assert main([*command, samples, "512", "--towers", "t.json"]) == 2
    assert "found:    2 towers" in capsys.readouterr().err
