"""`table_dlrm` and `table_dcn_v2` take sizes that fit the rows of their files; what is given explicitly wins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import polars as pl
import pytest

from ziggurat.cli.main import main
from ziggurat.features.schema import Categorical, Label, Schema
from ziggurat.features.schema_io import write_schema
from ziggurat.models import DNNConfig
from ziggurat.recipes.catalogue import (
    DATA_DLRM,
    SMALL_BATCH,
    SMALL_DCN_V2,
    SMALL_DLRM,
    SMALL_ROWS,
    fit_to_rows,
    recipe_named,
    sizes_text,
    table_run,
)
from ziggurat.recipes.run_config import RunConfig

SCHEMA = Schema(labels=(Label(name="click"),), features=(Categorical(name="user"),))


def run_on(path: Path, *, rows: int, recipe: str = "table_dlrm") -> RunConfig:
    pl.select(user=pl.int_range(rows) % 7, click=pl.int_range(rows) % 2).write_parquet(path)
    config = recipe_named(recipe, schema=SCHEMA)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=(str(path),)))


def test_few_rows_get_small_sizes_and_many_rows_large_ones(tmp_path: Path) -> None:
    few = fit_to_rows(run_on(tmp_path / "few.parquet", rows=SMALL_ROWS))
    assert (few.model, few.training.loader.batch_size) == (SMALL_DLRM, SMALL_BATCH)
    assert sizes_text(few) == "those for up to 100,000 rows"
    crossed = fit_to_rows(run_on(tmp_path / "few.parquet", rows=SMALL_ROWS, recipe="table_dcn_v2"))
    assert (crossed.model, crossed.training.loader.batch_size) == (SMALL_DCN_V2, SMALL_BATCH)
    many = run_on(tmp_path / "many.parquet", rows=SMALL_ROWS + 1)
    assert fit_to_rows(many) == many
    assert sizes_text(many) == "those for many rows"


def test_other_runs_keep_their_sizes(tmp_path: Path) -> None:
    few = run_on(tmp_path / "few.parquet", rows=10)
    own = dataclasses.replace(few, model=dataclasses.replace(DATA_DLRM, embedding_dim=12))
    assert fit_to_rows(own) == own
    assert sizes_text(own) == "as given"
    other = table_run(DNNConfig(), SCHEMA)
    assert fit_to_rows(other) == other
    assert sizes_text(other) == ""


def test_what_the_command_line_names_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(tmp_path / "few.parquet", rows=10)
    write_schema(SCHEMA, tmp_path / "my.toml")
    taken = list[RunConfig]()

    class TakenError(Exception):
        pass

    def train_run(config: RunConfig, **_: object) -> None:
        taken.append(config)
        raise TakenError

    monkeypatch.setattr("ziggurat.runs.execute.train_run", train_run)
    files = ["--data.train", str(tmp_path / "few.parquet"), "--schema", str(tmp_path / "my.toml")]
    for given in ([], ["--batch-size", "77", "--model.top.hidden-dims", "5"]):
        with pytest.raises(TakenError):
            main(["train", "table_dlrm", *files, *given])
    first, second = taken
    assert (first.model, first.training.loader.batch_size) == (SMALL_DLRM, SMALL_BATCH)
    assert second.training.loader.batch_size == 77
    assert second.model == dataclasses.replace(SMALL_DLRM, top=dataclasses.replace(SMALL_DLRM.top, hidden_dims=(5,)))
