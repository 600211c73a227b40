"""Runs on ranks by the command line, with --context and without: trained, stopped, resumed, evaluated and asked."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import polars as pl
import pytest
import torch

from tests.runs.scores.test_next_items import SCHEMA, SETTINGS, events, weights
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.runs.load import load_run
from ziggurat.testing.ranks import run_ranks

RANKED = """
[[label]]
name = "known"
column = "verb"
positive = "seen"
"""
DATA = ["--data.train", "events.parquet", "--schema"]
SIZES = ["--training.learning-rate", "0.02", "--training.loader.batch-size", "16", "--training.evaluate-every", "4"]


def commands(rank: int, folder: str, cases: list[list[str]]) -> list[tuple[int, str]]:
    """Runs on every rank: exit status and errors of each command."""
    del rank
    os.chdir(folder)
    found = []
    for case in cases:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            status = main(case)
        found.append((status, text.getvalue()))
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("next.toml").write_text(SCHEMA)
    verb = pl.when(pl.int_range(0, pl.len()) % 3 == 0).then(pl.lit("left")).otherwise(pl.lit("seen"))
    events(users=60, seed=0).with_columns(verb=verb).write_parquet("events.parquet")
    Path("ranked.toml").write_text(SCHEMA + RANKED)
    return tmp_path


def all_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_next_item_runs_on_four_ranks_are_resumed(place: Path) -> None:
    """With the negatives that recipes draw, which a resumed run once looked up where tables held nothing yet."""
    start = ["train", "table_hstu", *DATA, "next.toml", *SETTINGS, *SIZES, "--training.loader.batch-size", "4"]
    cases = [
        [*start, "--training.max-steps", "5", "--out", "whole"],
        [*start, "--training.max-steps", "3", "--out", "parts"],
        ["train", "parts", "--resume", "--training.max-steps", "5"],
        [*start, "--training.max-steps", "3", "--out", "divided", "--context", "2", "--training.checkpoint-every", "2"],
        ["train", "divided", "--resume", "--training.max-steps", "5"],
    ]
    for found in run_ranks(commands, 4, str(place), cases, timeout_s=150.0):
        assert [status for status, _ in found] == [0] * len(cases), [text for status, text in found if status]
    assert all_equal(weights(place / "whole", 5), weights(place / "parts", 5))
    assert load_run("divided").config.parallel.context == 2
    saved = [weights(place / "divided", step) for step in (4, 5)]
    assert saved[0].keys() == saved[1].keys()
    assert not all_equal(*saved)


@pytest.mark.slow
def test_a_divided_run_is_resumed_and_answers_as_on_one_device(place: Path) -> None:
    draws = ["--model.negatives", "in_batch", "--model.stochastic-length", "1.5"]
    start = ["train", "table_hstu", *DATA, "next.toml", *SETTINGS, *SIZES, *draws, "--training.epochs", "2"]
    # What travels is said: by `auto` each run would choose it by rates of its own, and sum in that order.
    start += ["--context", "2", "--parallel.passing", "pass_q", "--exchange", "prioritised"]
    ranker = ["train", "table_sequence_ranker", *DATA, "ranked.toml", "--model.embedding-dim", "8", *SIZES]
    ranker += ["--model.num-layers", "1", "--model.embedding.kernel", "torch", "--training.epochs", "1"]
    ranker += ["--model.stochastic-length", "1.5", "--context", "2", "--training.precision", "fp32"]
    cases = [
        [*start, "--out", "whole"],
        [*start, "--training.max-steps", "4", "--out", "parts"],
        ["train", "parts", "--resume", "--training.max-steps", "0"],
        [*start, "--training.max-steps", "4", "--out", "other"],
        ["train", "other", "--resume", "--training.max-steps", "0", "--context", "1"],
        [*ranker, "--out", "ranker"],
        ["evaluate", "whole", "--split", "test", "--json", "whole.json"],
        ["evaluate", "ranker", "--split", "valid", "--json", "ranker.json"],
        ["predict", "whole", "events.parquet", "--out", "next.parquet"],
        ["predict", "ranker", "events.parquet", "--out", "scores.parquet"],
    ]
    for found in run_ranks(commands, 2, str(place), cases, timeout_s=1200.0):
        assert [status for status, _ in found] == [0] * len(cases), [text for status, text in found if status]
    steps = load_run("whole").step
    assert all_equal(weights(place / "whole", steps), weights(place / "parts", steps))
    assert json.loads(Path("whole/startup.json").read_text())["Ranks"]["histories"].startswith(
        "divided between 2 ranks"
    )
    for run, split, out in (("whole", "test", "next"), ("ranker", "valid", "scores")):
        assert main(["evaluate", run, "--split", split, "--json", "alone.json"]) == 0
        one, two = (json.loads(Path(f"{name}.json").read_text()) for name in ("alone", run))
        assert two["num_rows"] == one["num_rows"]
        assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-6, nan_ok=True)
        assert main(["predict", run, "events.parquet", "--out", "alone.parquet"]) == 0
        left, right = pl.read_parquet("alone.parquet"), pl.read_parquet(f"{out}.parquet")
        assert left.drop(pl.selectors.float()).equals(right.drop(pl.selectors.float()))
        for name in left.select(pl.selectors.float()).columns:
            assert ((left[name] - right[name]).abs() < 1e-5).all()
    # On one device --context has nobody to divide with.
    with contextlib.redirect_stderr(io.StringIO()) as text:
        assert main(["train", "whole", "--resume", "--training.epochs", "3"]) == 2
    assert "--context 1" in text.getvalue()
    assert main(["train", "whole", "--resume", "--training.epochs", "3", "--context", "1"]) == 0
