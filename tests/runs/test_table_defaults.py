"""`table_dlrm` and `table_dcn_v2` take sizes that fit the rows of their files; what is given explicitly wins."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.cli.settings import apply_settings
from ziggurat.cli.verbs import fitted
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, KernelChoice, PooledDtype, TableInit
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.schema import Categorical, Label, Schema
from ziggurat.features.schema_io import write_schema
from ziggurat.models import DLRMConfig, DNNConfig, ModelConfig
from ziggurat.models.dlrm import TopStart
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.row_formats import RowFormat
from ziggurat.recipes.catalogue import (
    DATA_DLRM,
    FEW_BATCH,
    FEW_ROWS,
    LARGER_START,
    MAX_SUMMED,
    MEDIUM_ROWS,
    MILLION_BATCH,
    SMALL_BATCH,
    SMALL_DCN_V2,
    SMALL_DLRM,
    SMALL_ROWS,
    SMALL_SIZES_ROWS,
    fit_to_rows,
    recipe_named,
    sizes_text,
    table_run,
)
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.report.progress import NoProgress

SCHEMA = Schema(labels=(Label(name="click"),), features=(Categorical(name="user"),))


def run_on(path: Path, *, rows: int, recipe: str = "table_dlrm") -> RunConfig:
    pl.select(user=pl.int_range(rows) % 7, click=pl.int_range(rows) % 2).write_parquet(path)
    config = recipe_named(recipe, schema=SCHEMA)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, train=(str(path),)))


def sizes_of(config: RunConfig) -> ModelConfig:
    """The model as the recipe has it, whatever its tables learn by."""
    return dataclasses.replace(config.model, embedding=EmbeddingConfig())


def test_few_rows_get_small_sizes_and_many_rows_large_ones(tmp_path: Path) -> None:
    few = fit_to_rows(run_on(tmp_path / "few.parquet", rows=SMALL_ROWS))
    assert (sizes_of(few), few.training.loader.batch_size) == (SMALL_DLRM, SMALL_BATCH)
    assert sizes_text(few) == "those for up to 1,000,000 rows"
    crossed = fit_to_rows(run_on(tmp_path / "few.parquet", rows=SMALL_ROWS, recipe="table_dcn_v2"))
    assert (sizes_of(crossed), crossed.training.loader.batch_size) == (SMALL_DCN_V2, SMALL_BATCH)
    fewest = fit_to_rows(run_on(tmp_path / "fewest.parquet", rows=FEW_ROWS))
    assert (sizes_of(fewest), fewest.training.loader.batch_size) == (SMALL_DLRM, FEW_BATCH)
    more = fit_to_rows(run_on(tmp_path / "more.parquet", rows=SMALL_ROWS + 1))
    assert (sizes_of(more), more.training.loader.batch_size) == (SMALL_DLRM, MILLION_BATCH)
    more = fit_to_rows(run_on(tmp_path / "more.parquet", rows=SMALL_SIZES_ROWS + 1))
    assert (sizes_of(more), more.training.loader.batch_size) == (DATA_DLRM, LoaderConfig().batch_size)
    assert sizes_text(more) == "those for many rows"
    many = run_on(tmp_path / "many.parquet", rows=MEDIUM_ROWS + 1)
    assert fit_to_rows(many) == many


def test_a_small_dlrm_of_few_features_starts_with_the_sum_of_its_products(tmp_path: Path) -> None:
    few = run_on(tmp_path / "few.parquet", rows=1000)
    starts = list[TopStart]()
    for num_features in (MAX_SUMMED, MAX_SUMMED + 1):
        features = tuple(Categorical(name=f"id_{index}") for index in range(num_features))
        schema = dataclasses.replace(SCHEMA, features=features)
        config = fit_to_rows(dataclasses.replace(few, table_schema=schema))
        assert isinstance(config.model, DLRMConfig)
        starts.append(config.model.top_start)
    assert starts == [TopStart.SUM_OF_PAIRS, TopStart.DRAWN]


@pytest.mark.parametrize("rows", [500, SMALL_ROWS, SMALL_ROWS + 1])
def test_tables_of_few_rows_learn_by_adam_and_have_time_to_find_pairs(rows: int, tmp_path: Path) -> None:
    for recipe in ("table_dlrm", "table_masknet"):
        found = fit_to_rows(run_on(tmp_path / "rows.parquet", rows=rows, recipe=recipe))
        assert found.model.embedding.optimizer is TableOptimizerKind.SPARSE_ADAM
        assert found.training.table_learning_rate == 0.01
        assert found.training.early_stop.patience >= 2
    logistic = fit_to_rows(run_on(tmp_path / "rows.parquet", rows=rows, recipe="table_logistic_regression"))
    assert logistic.model.embedding.optimizer is TableOptimizerKind.ROWWISE_ADAGRAD
    assert (logistic.training.epochs, logistic.training.table_learning_rate) == (20, 0.2)


@pytest.mark.parametrize("rows", [150_000, 300_000, 600_000, SMALL_SIZES_ROWS, SMALL_SIZES_ROWS + 1])
def test_no_run_of_more_rows_stops_before_pairs_of_thousands_of_ids_have_shown(rows: int, tmp_path: Path) -> None:
    """On 300,000 rows validation AUC fell for four passes, 1.2 million samples, before pairs brought it up."""
    training = fit_to_rows(run_on(tmp_path / "rows.parquet", rows=rows)).training
    assert training.early_stop.min_steps * training.loader.batch_size >= 2_500_000
    assert training.epochs * rows * 0.8 >= 2_000_000


def test_600000_rows_have_time_and_starts_to_leave_the_plateau_with_every_seed(tmp_path: Path) -> None:
    """Large sizes in batches of 2,048 ended on the plateau of single features; so did 5,000 steps, with one seed."""
    found = fit_to_rows(run_on(tmp_path / "rows.parquet", rows=600_000))
    assert isinstance(found.model, DLRMConfig)
    assert found.model.embedding_dim == SMALL_DLRM.embedding_dim
    assert found.model.top_start is TopStart.SUM_OF_PAIRS
    assert found.training.loader.batch_size == 512
    assert (found.training.epochs, found.training.early_stop.patience) == (9, 3)
    assert found.training.early_stop.min_steps == 7500
    assert (found.model.embedding.init, found.model.embedding.init_std) == (TableInit.NORMAL, LARGER_START)


@pytest.mark.parametrize("setting", [{"pooled": PooledDtype.FP32}, {"kernel": KernelChoice.TORCH}], ids=str)
def test_what_computes_changes_nothing_of_how_tables_learn(setting: dict[str, Any], tmp_path: Path) -> None:
    for recipe in ("table_dlrm", "table_logistic_regression"):
        plain = run_on(tmp_path / "rows.parquet", rows=500, recipe=recipe)
        embedding = dataclasses.replace(plain.model.embedding, **setting)
        asked = dataclasses.replace(plain, model=dataclasses.replace(plain.model, embedding=embedding))
        found = fit_to_rows(asked)
        learned = dataclasses.replace(fit_to_rows(plain).model.embedding, **setting)
        assert found.model.embedding == learned


def test_other_runs_keep_their_sizes_and_what_they_learn_by(tmp_path: Path) -> None:
    few = run_on(tmp_path / "few.parquet", rows=10)
    own = dataclasses.replace(few, model=dataclasses.replace(DATA_DLRM, embedding_dim=12))
    assert sizes_of(fit_to_rows(own)) == own.model
    assert sizes_text(own) == "as given"
    trained = dataclasses.replace(few, training=dataclasses.replace(few.training, epochs=2))
    assert fit_to_rows(trained) == trained
    with_files = dataclasses.replace(few, tables=TablesConfig(weights=RowFormat.INT8))
    assert fit_to_rows(with_files).model.embedding == few.model.embedding
    given = EmbeddingConfig(optimizer=TableOptimizerKind.SGD)
    by_sgd = fit_to_rows(dataclasses.replace(few, model=dataclasses.replace(few.model, embedding=given)))
    assert by_sgd.model.embedding == given
    assert by_sgd.training.table_learning_rate == few.training.table_learning_rate
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
    sgd = ["--model.embedding.optimizer", "sgd"]
    for given in ([], ["--batch-size", "77", "--model.top.hidden-dims", "5"], sgd):
        assert main(["train", "table_dlrm", *files, *given]) != 0
    first, second, third = taken
    assert (sizes_of(first), first.training.loader.batch_size) == (SMALL_DLRM, FEW_BATCH)
    assert second.training.loader.batch_size == 77
    wanted = dataclasses.replace(SMALL_DLRM, top=dataclasses.replace(SMALL_DLRM.top, hidden_dims=(5,)))
    assert sizes_of(second) == wanted
    assert third.model.embedding.optimizer is TableOptimizerKind.SGD
    assert third.training.table_learning_rate == 0.02  # not that of another optimizer


def test_soft_first_steps_of_logistic_regression_follow_its_batch_size(tmp_path: Path) -> None:
    recipe = run_on(tmp_path / "few.parquet", rows=1000, recipe="table_logistic_regression")
    files = {"data.train": str(tmp_path / "few.parquet")}
    softness: list[float] = []
    for named in ({}, {"training.loader.batch-size": "640"}):
        found = apply_settings(fitted(recipe, files | named), files | named)
        softness.append(found.model.embedding.initial_sum * found.training.loader.batch_size**2)
    assert softness[0] == pytest.approx(36.0)
    assert softness[1] == pytest.approx(36.0)
    own = {"model.embedding.initial-sum": "0.5"}
    assert apply_settings(fitted(recipe, files | own), files | own).model.embedding.initial_sum == 0.5
    kept = zg.fit(
        str(tmp_path / "few.parquet"),
        label="click",
        model=zg.LogisticRegressionConfig(),
        out=str(tmp_path / "run"),
        settings={"training.loader.batch_size": 100, "training.epochs": 1},
        progress=NoProgress(),
    )
    assert kept.config.model.embedding.initial_sum == pytest.approx((6 / 100) ** 2)


def test_a_model_of_the_users_own_is_fitted_to_the_rows_as_the_recipes_model_is(tmp_path: Path) -> None:
    own = importlib.import_module("examples.extensions.matrix_factorisation").MatrixFactorisationConfig()
    few = dataclasses.replace(run_on(tmp_path / "few.parquet", rows=1000), model=own)
    found = fit_to_rows(few)
    assert found.training.loader.batch_size == 64
    assert found.training.epochs > few.training.epochs
    assert found.model.embedding.optimizer is TableOptimizerKind.SPARSE_ADAM
    assert sizes_text(found) == ""
