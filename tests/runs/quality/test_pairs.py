"""What pairs of features add: nothing to a model that is a sum, much to one that reads them, and runs say so."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

import ziggurat as zg
from benchmarks.first_model_sets import taste
from ziggurat.cli.main import main
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Task
from ziggurat.features.schema_io import write_schema
from ziggurat.models import DeepFMConfig, LogisticRegressionConfig, MLPConfig, build_model
from ziggurat.recipes.catalogue import table_run
from ziggurat.runs.quality.pairs import fitted_too_long, gain_of_pairs, plateau_text
from ziggurat.testing.encoded_examples import FULL, full_table
from ziggurat.training.evaluation.evaluate import PairsGain
from ziggurat.training.records.run_folder import RunFolder, read_evaluation

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")), labels=(zg.Label(name="click"),)
)


def dataset(num_rows: int) -> tuple[MemoryDataset, InputSpec]:
    """Rows of two ids whose label is 1 where both are even or both odd."""
    draw = np.random.default_rng(0)
    names = ("user", "item")
    inputs = InputSpec(
        single=tuple(SingleSpec(name=name, table=name) for name in names),
        tables=tuple(TableSpec(name=name, num_rows=13) for name in names),
        labels=(LabelSpec(name="click"),),
    )
    rows = {name: draw.integers(3, 13, size=num_rows).astype(np.int32) for name in names}
    click = (rows["user"] + rows["item"]) % 2 == 0
    table = pa.table({**rows, "label:click": click.astype(np.float32)})
    return MemoryDataset(table, inputs), inputs


def test_a_sum_of_single_features_gains_nothing_and_pairs_do() -> None:
    rows, inputs = dataset(3000)
    single = build_model(LogisticRegressionConfig(), inputs, seed=0)
    with torch.no_grad():
        gain = gain_of_pairs(single, rows)
    assert gain is not None
    assert (gain.value, gain.half_width, gain.is_nothing) == (0.0, 0.0, True)

    machine = build_model(DeepFMConfig(embedding_dim=4, deep=MLPConfig(hidden_dims=())), inputs, seed=0)
    with torch.no_grad():
        for name in ("user", "item"):
            signs = (torch.arange(13) % 2 * 2 - 1).float()
            rows_of = torch.zeros(13, 5)
            rows_of[:, 0] = signs
            machine.embeddings.tables.rows(name).write(0, rows_of)
    gain = gain_of_pairs(machine, rows)
    assert gain is not None
    assert gain.value > 0.4
    assert not gain.is_nothing


def test_a_model_that_is_worse_than_no_model_gains_nothing_by_pairs() -> None:
    rows, inputs = dataset(3000)
    inputs = replace(inputs, labels=(replace(inputs.labels[0], task=Task.REGRESSION, offset=0.5, scale=0.5),))
    machine = build_model(DeepFMConfig(embedding_dim=4, deep=MLPConfig(hidden_dims=())), inputs, seed=0)
    for size, is_below in ((0.7, False), (7.0, True)):
        with torch.no_grad():
            for name in ("user", "item"):
                rows_of = torch.zeros(13, 5)
                rows_of[:, 0] = (torch.arange(13) % 2 * 2 - 1).float() * size
                machine.embeddings.tables.rows(name).write(0, rows_of)
        gain = gain_of_pairs(machine, MemoryDataset(rows.read_group(0), inputs))
        assert gain is not None
        assert (gain.metric, gain.below_floor) == ("r2", is_below)
    # It has a warning of its own.
    nothing = PairsGain(metric="r2", value=-0.1, half_width=0.01, num_rows=3000, below_floor=True)
    assert plateau_text(nothing, config=table_run(zg.DLRMConfig(), SCHEMA), losses=[1.0] * 4, num_rows=4000) == ""


def test_lists_numbers_and_vectors_of_a_sum_gain_nothing_either() -> None:
    table = full_table(5000)
    draw = np.random.default_rng(0)
    for name in ("price", "age", "label:buy", "text"):
        values = draw.integers(2, size=5000) if name == "label:buy" else draw.normal(size=5000)
        column = pa.array(values.astype(np.float32))
        if name == "text":
            column = pa.FixedSizeListArray.from_arrays(column, 1)
        table = table.set_column(table.column_names.index(name), name, column)
    image = pa.FixedSizeListArray.from_arrays(draw.normal(size=15_000).astype(np.float32), 3)
    table = table.set_column(table.column_names.index("image"), "image", image)
    single = build_model(LogisticRegressionConfig(), FULL, seed=0)
    gain = gain_of_pairs(single, MemoryDataset(table, FULL))
    assert gain is not None
    assert abs(gain.value) <= 1e-6
    assert gain.half_width <= 1e-5


def test_few_rows_prove_nothing() -> None:
    rows, inputs = dataset(900)
    assert gain_of_pairs(build_model(LogisticRegressionConfig(), inputs, seed=0), rows) is None


def test_the_sentence_names_what_is_missing_and_is_silent_where_pairs_add_something() -> None:
    config = table_run(zg.DLRMConfig(), SCHEMA)
    nothing = PairsGain(metric="auc", value=0.001, half_width=0.002, num_rows=3000)
    text = plateau_text(nothing, config=config, losses=[0.69, 0.68, 0.67, 0.66], num_rows=4000)
    assert "the loss of training still falls (0.6700 to 0.6600)" in text
    assert "--model.embedding.optimizer sparse_adam" in text
    assert "--model.top-start sum_of_pairs" in text
    flat = plateau_text(nothing, config=config, losses=[0.66] * 4, num_rows=4000)
    assert "still falls" not in flat
    some = replace(nothing, value=0.01)
    assert plateau_text(some, config=config, losses=[0.69] * 4, num_rows=4000) == ""
    unsure = replace(nothing, half_width=0.02)
    assert plateau_text(unsure, config=config, losses=[0.69] * 4, num_rows=4000) == ""


def test_a_training_that_learned_its_rows_by_heart_is_not_on_the_plateau() -> None:
    steps = range(100, 2100, 100)
    falling = [(step, 0.69 - 0.0002 * max(0, step - 300)) for step in steps]
    assert fitted_too_long(falling, best_step=300)
    assert not fitted_too_long(falling, best_step=2000), "the last step is the best: nothing came after it"
    flat = [(step, 0.69 - 0.00002 * step) for step in steps]
    assert not fitted_too_long(flat, best_step=300), "a loss that hardly falls has not left the plateau"
    assert not fitted_too_long([], best_step=0)
    nothing = PairsGain(metric="auc", value=0.001, half_width=0.002, num_rows=3000, fitted_too_long=True)
    losses = [loss for _, loss in falling]
    text = plateau_text(nothing, config=table_run(zg.DLRMConfig(), SCHEMA), losses=losses, num_rows=4000)
    assert "plateau" not in text
    assert "holds for the training rows alone" in text
    assert "Train longer" not in text


def trained(*settings: str, out: str) -> None:
    given = ["--data.train", "rows.parquet", "--schema", "my.toml", "--threads", "1", "--seed", "0", "--out", out]
    assert main(["train", "table_dlrm", *given, *settings]) == 0


STOPPED = (
    *("--epochs", "1", "--model.embedding.optimizer", "rowwise_adagrad", "--model.top-start", "drawn"),
    *("--training.table-learning-rate", "0.02"),
)


@pytest.fixture
def taste_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subject = taste()
    subject.frame.write_parquet("rows.parquet")
    write_schema(subject.schema, Path("my.toml"))


@pytest.mark.usefixtures("taste_rows")
def test_a_run_that_is_stopped_on_the_plateau_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trained(*STOPPED, out="stopped")
    shown = capsys.readouterr()
    assert "still on the plateau of single features" in shown.out + shown.err
    kept = read_evaluation(RunFolder(Path("stopped")).evaluation("valid"))["pairs"]
    assert kept["value"] + kept["half_width"] <= 0.005
    assert "still on the plateau of single features" in Path("stopped/report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("taste_rows")
def test_the_settings_that_the_sentence_names_lead_off_the_plateau(capsys: pytest.CaptureFixture[str]) -> None:
    trained(*STOPPED, out="stopped")
    shown = capsys.readouterr()
    sentence = next(line for line in (shown.out + shown.err).splitlines() if "plateau of single features" in line)
    named = sentence.partition("larger steps: ")[2].partition("; or let")[0]
    trained(*shlex.split(named), out="longer")
    shown = capsys.readouterr()
    assert "plateau of single features" not in shown.out + shown.err
    assert read_evaluation(RunFolder(Path("longer")).evaluation("valid"))["pairs"]["value"] > 0.05
    assert "pairs of features add auc +0." in Path("longer/report.html").read_text()
