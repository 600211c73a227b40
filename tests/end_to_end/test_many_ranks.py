"""A run on several ranks through the command line, as torchrun starts it."""

from __future__ import annotations

import contextlib
import io
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from tests.end_to_end.test_towers import SCHEMA, TOWERS
from ziggurat.cache import cache_folder
from ziggurat.cli.main import main
from ziggurat.parallel.exchange.pair_meter import where_this_rank_is
from ziggurat.planning.rank_order.levels import Level
from ziggurat.planning.rank_order.rank_order import Machine, RankOrder
from ziggurat.runs.load import load_run
from ziggurat.testing.ranks import run_ranks

DATA = ["--data.train", "events.parquet", "--schema", "my.toml"]
FAST = [*SMALL, "--training.precision", "fp32", "--model.embedding.kernel", "torch", "--training.log-every", "1"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests here; kernels that were compiled before are used again."""
    folder = tmp_path_factory.mktemp("cache")
    if (cache_folder() / "kernels").is_dir():
        (folder / "kernels").symlink_to(cache_folder() / "kernels")
    return folder


@pytest.fixture
def place(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(cache))
    events(3000).write_parquet("events.parquet")
    ziggurat.write_schema(SCHEMA, "my.toml", comments=None)
    TOWERS.save("towers.json")
    return tmp_path


def command(rank: int, folder: str, cache: str, commands: list[list[str]]) -> list[int]:
    """Runs on every rank."""
    del rank
    os.chdir(folder)
    os.environ["ZIGGURAT_CACHE"] = cache
    return [main(arguments) for arguments in commands]


def run(world_size: int, place: Path, *arguments: str) -> list[int]:
    """Run a command line on ranks; return the status of each."""
    (statuses,) = run_in_turn(world_size, place, list(arguments))
    return statuses


def run_in_turn(world_size: int, place: Path, *commands: list[str]) -> list[list[int]]:
    """Run command lines one after the other in one start of ranks; return the statuses of each of them."""
    cache = os.environ["ZIGGURAT_CACHE"]
    by_rank = run_ranks(command, world_size, str(place), cache, list(commands), timeout_s=240.0)
    return [list(statuses) for statuses in zip(*by_rank, strict=True)]


def test_the_whole_story(place: Path) -> None:
    towers = ["--towers", "towers.json", "--compression", "4", "--tower-size", "1"]
    start = ["train", "table_dlrm", *DATA, *FAST, *towers, "--training.epochs", "2"]
    assert run(2, place, *start, "--out", "runs/two") == [0, 0]
    folder = place / "runs/two"
    plan = ziggurat.Plan.load(folder / "plan.json")
    assert plan.world_size == 2
    startup = json.loads((folder / "startup.json").read_text())
    assert startup["Ranks"]["ranks"] == "2 ranks on 1 hosts of 2; 2 tower groups of 1"
    assert startup["Ranks"]["tower groups"].startswith("1 ranks, as --parallel.tower-size says; towers cannot spare")
    traffic = json.loads((folder / "traffic.json").read_text())
    assert "Counted on 2 ranks" in (folder / "report.html").read_text()
    assert {"ids", "inter-group all-to-all forward", "inter-group all-to-all backward"} <= {
        row["purpose"] for row in traffic["rows"]
    }
    assert main(["verify", "runs/two"]) == 0
    assert main(["predict", "runs/two", "events.parquet", "--out", "scores.parquet"]) == 0
    alone = pl.read_parquet("scores.parquet")
    assert len(alone) == 3000
    assert run(3, place, "predict", "runs/two", "events.parquet", "--out", "together.parquet") == [0, 0, 0]
    together = pl.read_parquet("together.parquet")
    assert together["row"].equals(alone["row"])
    np.testing.assert_allclose(together["click"], alone["click"], atol=1e-6)
    evaluate = ["evaluate", "runs/two", "events.parquet"]
    evaluate += ["--slices", "item,timestamp", "--slice-min-rows", "40", "--json"]
    assert main([*evaluate, "alone.json"]) == 0
    go_on = ["train", "runs/two", "--resume", "--training.epochs", "3", "--wire", "bf16"]
    assert run_in_turn(2, place, [*evaluate, "together.json"], go_on) == [[0, 0], [0, 0]]
    one, two = (json.loads((place / f"{name}.json").read_text()) for name in ("alone", "together"))
    assert one["num_rows"] == two["num_rows"] == 3000
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-5)
    assert len(one["slices"]) == len(two["slices"]) > 3
    for left, right in zip(one["slices"], two["slices"], strict=True):
        assert left | {"metrics": 0} == right | {"metrics": 0}
        assert right["metrics"] == pytest.approx(left["metrics"], abs=1e-5, nan_ok=True)
    assert ziggurat.Plan.load(folder / "plan.json") == plan
    assert load_run("runs/two").config.parallel.tower_size == 1
    assert main(["verify", "runs/two"]) == 0
    assert load_run("runs/two").config.training.epochs == 3
    assert main(["train", "runs/two", "--resume", "--training.epochs", "4"]) == 0  # on one device
    assert main(["verify", "runs/two"]) == 0


def found_order(path: Path, order: tuple[int, ...] = (0, 3, 2, 1)) -> None:
    """An order for four ranks of this machine, in which ranks 0 and 3, 1 and 2 are found to share a host."""
    times = [1.0, 1.0, 0.1, 0.1, 1.0, 1.0]
    name, address, boot = where_this_rank_is()
    host = Level(name="host", groups=(0, 1, 1, 0), confidence=1.0, by="long messages", inside_ms=0.1, between_ms=1.0)
    RankOrder(
        world_size=4,
        machines=(Machine(name=name, address=address, boot=boot),) * 4,
        measured_at=datetime.now(UTC).isoformat(),
        num_bytes=1 << 20,
        given=(0, 1, 2, 3),
        order=order,
        levels=(host,),
        long_bytes=1 << 20,
        latency_ms=(0.01,) * 6,
        long_ms=tuple(times),
    ).save(path)


def test_an_order_of_ranks_lays_towers_on_the_hosts_that_it_found(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found_order(place / "order.json")
    start = ["train", "table_dlrm", *DATA, *FAST, "--towers", "towers.json", "--training.max-steps", "20"]
    order = ["--rank-order", "order.json"]
    found_order(place / "given.json", order=(0, 1, 2, 3))
    ordered = [*start, *order, "--out", "runs/ordered"]
    plain = [*start, "--parallel.ranks-per-host", "2", "--out", "runs/plain"]
    given = [*start[:-1], "1", "--rank-order", "given.json", "--out", "runs/given"]
    assert run_in_turn(4, place, ordered, plain, given) == [[0] * 4] * 3
    startup = json.loads((place / "runs/ordered/startup.json").read_text())["Ranks"]
    assert startup["ranks"].startswith("4 ranks on 2 hosts of 2; 2 tower groups of 2; ranks by host: host 0: 0, 3")
    assert startup["order of ranks"].startswith("0, 3, 2, 1, found for ring at ")
    assert startup["order of ranks"].endswith("2 hosts as found")
    scores = []
    for name in ("ordered", "plain"):
        assert main(["predict", f"runs/{name}", "events.parquet", "--out", f"{name}.parquet"]) == 0
        scores.append(pl.read_parquet(f"{name}.parquet")["click"])
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)
    # Where no order gains, towers lie on the found hosts all the same.
    startup = json.loads((place / "runs/given/startup.json").read_text())["Ranks"]
    assert "ranks by host: host 0: 0, 3; host 1: 1, 2" in startup["ranks"]
    # The order is of four ranks, and stands in the settings of the run.
    go_on = ["train", "runs/ordered", "--resume", "--training.max-steps", "24"]
    capsys.readouterr()
    assert main(go_on) == 2
    assert '--rank-order "" trains without one' in capsys.readouterr().err
    assert main([*go_on, "--rank-order", ""]) == 0


@pytest.mark.slow
def test_a_run_with_mx9_on_the_wire_goes_on_bit_for_bit(place: Path) -> None:
    start = ["train", "table_dlrm", *DATA, *FAST, "--wire", "mx9"]
    assert run(2, place, *start, "--training.epochs", "2", "--out", "runs/whole") == [0, 0]
    assert run(2, place, *start, "--training.epochs", "1", "--out", "runs/parts") == [0, 0]
    assert run(2, place, "train", "runs/parts", "--resume", "--training.epochs", "2") == [0, 0]
    whole, parts = (load_run(place / "runs" / name) for name in ("whole", "parts"))
    assert whole.step == parts.step
    assert parts.config.parallel.wire.between_towers.name == "mx9"
    left, right = whole.model.state_dict(), parts.model.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    startup = json.loads((place / "runs/whole/startup.json").read_text())
    assert any("mx9" in str(line) for line in startup["Ranks"].values()), startup["Ranks"]
    refused = [*start, "--out", "runs/refused"]
    assert run(2, place, *refused, "--parallel.wire.backward-rounding", "stochastic") == [2, 2]
    assert run(2, place, *refused, "--exchange", "prioritised_always") == [2, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data.train", "nowhere.parquet"],
        pytest.param(["--plan", "plan.json"], marks=pytest.mark.slow),
        pytest.param(["--model.embedding.optimizer", "adam_dense"], marks=pytest.mark.slow),
        ["--towers", "towers.json", "--tower-size", "3"],
    ],
)
def test_what_rank_0_finds_wrong_ends_all_ranks(place: Path, arguments: list[str]) -> None:
    (place / "plan.json").write_text(
        '{"world_size": 2, "tables": [{"table": "item", "placement": "table_wise", "ranks": [0]}]}'
    )
    assert run(2, place, "train", "table_dlrm", *DATA, *FAST, *arguments, "--out", "runs/a") == [2, 2]
    assert not (place / "runs/a/metrics.jsonl").exists()


DIFFERENT: list[tuple[list[str], str]] = [
    (["--training.seed", "9"], "training.seed"),
    (["--model.embedding-dim", "12"], "model.embedding-dim"),
    (["--model.top.hidden-dims", "5"], "model.top.hidden-dims"),
    (["--wire", "bf16"], "parallel.wire.between-towers"),
    (["--dense", "fsdp"], "parallel.dense"),
    (["--training.checkpoint-every", "3"], "training.checkpoint-every"),
    (["--training.loader.batch-size", "77"], "training.loader.batch-size"),
    (["--out", "runs/b"], "--out"),
    (["--plan", "plan.json"], "plan.tables"),
]


def each_with_its_own(rank: int, folder: str, caches: list[str], cases: list[list[str]]) -> list[tuple[int, str]]:
    """Runs on every rank: rank 1 adds the arguments of a case; last, its raw file holds other values."""
    os.chdir(folder)
    os.environ["ZIGGURAT_CACHE"] = caches[0]
    start = ["train", "table_dlrm", *DATA, *FAST]
    found = []
    for extra in cases:
        found.append(said(start + ["--out", "runs/a"] + (extra if rank else [])))
    out = str(Path("runs/a").absolute())
    if rank:
        Path("elsewhere").mkdir()
        os.chdir("elsewhere")
        os.environ["ZIGGURAT_CACHE"] = caches[1]
        events(3000, seed=5).write_parquet("events.parquet")
        ziggurat.write_schema(SCHEMA, "my.toml", comments=None)
    found.append(said([*start, "--out", out]))
    return found


def said(arguments: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as text:
        status = main(arguments)
    return status, text.getvalue().partition("ConfigError")[2]  # without the progress of preparing


def test_ranks_that_were_started_differently_say_so_before_anything_is_read(place: Path) -> None:
    (place / "plan.json").write_text(
        '{"world_size": 2, "tables": [{"table": "item", "placement": "table_wise", "ranks": [0]}]}'
    )
    caches = [os.environ["ZIGGURAT_CACHE"], str(place / "cache of rank 1")]
    cases, names = [extra for extra, _ in DIFFERENT], [name for _, name in DIFFERENT]
    both = run_ranks(each_with_its_own, 2, str(place), caches, cases, timeout_s=240.0)
    assert both[0] == both[1]
    for (status, text), name in zip(both[0], [*names, "data train content"], strict=True):
        assert status == 2
        assert name in text, text
        assert "where:    rank 1 of 2" in text
    assert not (place / "runs/a/metrics.jsonl").exists()


def test_a_plan_needs_ranks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ziggurat.Plan(world_size=2, tables=()).save("plan.json")
    assert main(["train", "table_dlrm", *DATA, "--plan", "plan.json", "--out", "runs/a"]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_logistic_regression_trains_on_ranks(place: Path) -> None:
    start = ["train", "table_logistic_regression", *DATA, *FAST, "--training.epochs", "1"]
    assert run(2, place, *start, "--training.loader.batch-size", "128", "--out", "runs/two") == [0, 0]
    assert main([*start, "--out", "runs/one"]) == 0
    one, two = (load_run(f"runs/{name}").scores(events(20)) for name in ("one", "two"))
    np.testing.assert_allclose(one, two, atol=1e-5)
