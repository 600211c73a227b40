"""A run that nobody names is called after its recipe and its table, so that two tables do not meet in one folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from tests.runs.test_resume import SCHEMA, TINY
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.recipes.catalogue import RECIPES
from ziggurat.training.records.run_folder import default_folder


@pytest.mark.parametrize(
    ("train", "folder"),
    [
        ("", "runs/table_dlrm"),
        ("shop.csv", "runs/table_dlrm_shop"),
        ("/data/day 1/clicks.2024.csv.gz,other.csv", "runs/table_dlrm_clicks"),
        ("logs/2024/*.parquet", "runs/table_dlrm_2024"),
        ("s3://bucket/clicks/", "runs/table_dlrm_clicks"),
        ("Käufe.csv", "runs/table_dlrm_Käufe"),
        ("*.csv", "runs/table_dlrm"),
        ("../shop.csv", "runs/table_dlrm_shop"),
        ("..", "runs/table_dlrm"),
    ],
)
def test_names(train: str, folder: str) -> None:
    assert default_folder("table_dlrm", train=train) == Path(folder)


def test_two_tables_have_two_runs_and_one_that_is_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    ziggurat.write_schema(SCHEMA, "my.toml")
    for seed, name in enumerate(("shop.parquet", "films.parquet")):
        events(600, seed=seed).write_parquet(name)
        words = ["--data.train", name, "--schema", "my.toml", "--training.epochs", "1", *SMALL, *TINY]
        assert main(["train", "table_dlrm", *words]) == 0
    assert {path.name for path in Path("runs").iterdir()} == {"table_dlrm_shop", "table_dlrm_films"}
    capsys.readouterr()
    again = ["train", "table_dlrm", "--data.train", "shop.parquet", "--schema", "my.toml"]
    assert main(again) == 2
    said = capsys.readouterr().err
    assert re.search(r"found: +a run that was started before, table_dlrm, on \S+/shop.parquet\n", said)
    assert "--resume" in said


def test_a_recipe_that_is_misspelt_names_the_closest_first_and_all_of_them_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "movielens_dlmr"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("expected: a recipe, such as movielens_dlrm")
    assert "1. did you mean 'movielens_dlrm'?" in lines[5]
    assert all(recipe.__name__ in lines[-1] for recipe in RECIPES)


def test_a_short_setting_that_is_misspelt_is_named_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "movielens_dlrm", "--epochz", "3"]) == 2
    said = capsys.readouterr().err
    assert "1. did you mean --epochs?" in said
    assert "2. did you mean --training.epochs?" in said
