"""Labels that are numbers, several labels beside each other, and labels that are known of some rows only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import DataError, SchemaError
from ziggurat.features.schema import MissingLabel, Task
from ziggurat.models import Model, Outputs
from ziggurat.recipes.catalogue import table_run
from ziggurat.recipes.run_config import load_config, run_config_to_json
from ziggurat.runs.export import ExportConfig
from ziggurat.training.config import EarlyStopConfig, TrainingConfig
from ziggurat.training.label_gradients import drowned_labels, far_labels
from ziggurat.training.metrics.accumulator import r2
from ziggurat.training.metrics.suspicion import suspicious
from ziggurat.training.records.run_folder import CONFIG

ROWS = 4000
CLICK = zg.Label(name="click")
DWELL = zg.Label(name="dwell", task=Task.REGRESSION)


def rows() -> pl.DataFrame:
    """A shop: clicks, and times in milliseconds of mean 40,000 and deviation 12,812 that follow from user and item."""
    draw = np.random.default_rng(3)
    user, item = draw.integers(20, size=ROWS), draw.integers(15, size=ROWS)
    signal = draw.normal(size=20)[user] + draw.normal(size=15)[item] + draw.normal(scale=0.3, size=ROWS)
    signal = (signal - signal.mean()) / signal.std()
    click = (draw.random(ROWS) < 1 / (1 + np.exp(-2 * signal))).astype(np.int64)
    return pl.DataFrame({"user": user, "item": item, "click": click, "dwell": 40_000 + 12_812 * signal})


def schema_of(*labels: zg.Label) -> zg.Schema:
    return zg.Schema(features=(zg.Categorical(name="user"), zg.Categorical(name="item")), labels=labels)


def run_of(folder: Path, frame: pl.DataFrame, *labels: zg.Label) -> zg.RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(folder / "rows.parquet")
    config = table_run(zg.LogisticRegressionConfig(), schema_of(*labels))
    loader = replace(config.training.loader, batch_size=128)
    stop = EarlyStopConfig(patience=0)
    return replace(
        config,
        data=replace(config.data, train=(str(folder / "rows.parquet"),)),
        training=TrainingConfig(epochs=2, threads=1, loader=loader, early_stop=stop, table_learning_rate=0.1),
    )


@pytest.mark.parametrize("model", [zg.LogisticRegressionConfig(), zg.DLRMConfig(embedding_dim=4), zg.MaskNetConfig()])
def test_a_time_in_milliseconds_is_learned_and_never_worse_than_its_mean(tmp_path: Path, model) -> None:
    frame = rows()
    config = replace(run_of(tmp_path, frame, DWELL), model=model)
    result = zg.train_run(config, folder=tmp_path / "run")
    found = result.evaluations["test"].metrics
    assert found["rmse"] < 0.75 * 12_812
    assert found["r2"] == pytest.approx(1 - (found["rmse"] / 12_812) ** 2, abs=0.05)
    scores = zg.load_run(tmp_path / "run").scores(frame.select("user", "item"))
    assert abs(float(np.mean(scores)) - 40_000) < 2_000


@pytest.mark.parametrize("labels", [(DWELL,), (CLICK, DWELL)], ids=["alone", "beside a click"])
def test_a_number_around_a_thousand_million_is_learned_and_judged_as_it_stands(tmp_path: Path, labels) -> None:
    """FP32 keeps the multiples of 64 of it: one value for all labels, and one for all answers."""
    frame = rows().with_columns(dwell=1e9 + (pl.col("dwell") - 40_000) / 12_812)
    result = zg.train_run(run_of(tmp_path, frame, *labels), folder=tmp_path / "run")
    found = result.evaluations["test"].metrics
    of_dwell = {name: found[name if len(labels) == 1 else f"{name}/dwell"] for name in ("rmse", "mae", "r2")}
    assert of_dwell["rmse"] < 0.75
    assert of_dwell["r2"] > 0.5
    run = zg.load_run(tmp_path / "run")
    answers = run.predict(frame.select("user", "item"))["dwell"].to_numpy()
    again = run.evaluate(frame)
    truth = frame["dwell"].to_numpy()
    rmse = float(np.sqrt(np.mean((answers - truth) ** 2)))
    name = "rmse" if len(labels) == 1 else "rmse/dwell"
    assert again.metrics[name] == pytest.approx(rmse, rel=1e-6)


def test_labels_that_are_numbers_reach_a_batch_with_all_their_digits(tmp_path: Path) -> None:
    frame = rows().with_columns(dwell=1e9 + pl.int_range(pl.len()) % 3 - 1)
    frame.write_parquet(tmp_path / "rows.parquet")
    data = zg.prepare(
        DataConfig(train=(str(tmp_path / "rows.parquet"),)), schema=schema_of(CLICK, DWELL), folder=tmp_path / "data"
    )
    (label,) = data.inputs.labels[1:]
    assert label.offset == pytest.approx(1e9, abs=0.1)
    assert label.scale == pytest.approx((2 / 3) ** 0.5, rel=0.02)
    seen = []
    for batch in zg.Loader(data.train, config=zg.LoaderConfig(batch_size=100)).batches(epoch=0):
        kept = frame[batch.row_ids.numpy()]
        assert batch.labels[:, 1].tolist() == kept["dwell"].to_list()
        assert batch.labels[:, 0].tolist() == kept["click"].to_list()
        seen.append(batch.batch_size)
    assert sum(seen) == data.train.num_rows


def test_before_the_first_step_every_answer_is_about_the_mean_of_the_training_rows(tmp_path: Path) -> None:
    preprocessing = Preprocessing.fit(schema_of(DWELL), [RawChunk.of(rows())])
    (label,) = preprocessing.inputs.labels
    assert (label.offset, label.scale) == (pytest.approx(40_000), pytest.approx(12_812))
    model = zg.build_model(zg.DLRMConfig(embedding_dim=4), preprocessing.inputs, seed=0)
    scores = model(preprocessing.batch(rows().head(50)))
    assert (scores - 40_000).abs().max() < 12_812
    save_preprocessing(preprocessing, tmp_path / "preprocessing")
    assert load_preprocessing(tmp_path / "preprocessing").inputs == preprocessing.inputs


def test_a_number_in_large_units_takes_nothing_from_a_click_beside_it(tmp_path: Path) -> None:
    frame = rows().with_columns(stars=(pl.col("dwell") - 40_000) / 12_812)
    stars = zg.Label(name="stars", task=Task.REGRESSION)
    found: list[float] = []
    for labels in ((CLICK, stars), (CLICK, DWELL)):
        config = replace(run_of(tmp_path, frame, *labels), model=zg.DLRMConfig(embedding_dim=4))
        result = zg.train_run(config, folder=tmp_path / labels[1].name)
        found.append(result.evaluations["test"].metrics["auc/click"])
    assert found[0] == pytest.approx(found[1], abs=2e-3)
    assert found[1] > 0.75


def test_a_model_of_ones_own_that_computes_the_units_of_a_number_is_told(tmp_path: Path) -> None:
    own, data = model_and_rows(DWELL, folder=tmp_path)
    assert far_labels(own, data.train) == []
    with patch.object(type(own), "as_outputs", lambda self, computed, named=None: Outputs(logits=computed)):
        (line,) = far_labels(own, data.train)
    assert "label 'dwell' is 40,0" in line
    assert "self.as_outputs(x)" in line
    clicks, rows_of_clicks = model_and_rows(CLICK, folder=tmp_path)
    assert far_labels(clicks, rows_of_clicks.train) == []


def model_and_rows(*labels: zg.Label, folder: Path) -> tuple[Model, PreparedData]:
    rows().write_parquet(folder / "rows.parquet")
    data = zg.prepare(
        DataConfig(train=(str(folder / "rows.parquet"),)), schema=schema_of(*labels), folder=folder / "prepared"
    )
    return zg.build_model(zg.DLRMConfig(embedding_dim=4), data.inputs, seed=0), data


def test_a_label_whose_gradient_is_twenty_times_anothers_is_named(tmp_path: Path) -> None:
    model, data = model_and_rows(CLICK, DWELL, folder=tmp_path)
    assert drowned_labels(model, data.train) == []
    assert model.training
    heavy, data = model_and_rows(CLICK, replace(DWELL, weight=200.0), folder=tmp_path)
    (line,) = drowned_labels(heavy, data.train)
    assert "label 'dwell' is" in line
    assert "give label 'dwell' a smaller weight" in line


def test_a_label_that_is_known_of_some_rows_keeps_the_others_for_its_neighbours(tmp_path: Path) -> None:
    bought = pl.when(pl.col("click") == 1).then(pl.int_range(pl.len()) % 3 == 0).cast(pl.Int64)
    frame = rows().with_columns(buy=bought)
    buy = zg.Label(name="buy", missing=MissingLabel.LEFT_OUT)
    result = zg.train_run(run_of(tmp_path, frame, CLICK, buy), folder=tmp_path / "run")
    data = zg.prepare(
        DataConfig(train=(str(tmp_path / "rows.parquet"),)), schema=schema_of(CLICK, buy), folder=tmp_path / "prepared"
    )
    assert sum(each.rows for each in data.summary.splits.values()) == ROWS
    assert not data.summary.quarantined
    assert {"auc/click", "auc/buy"} <= set(result.evaluations["test"].metrics)
    with pytest.raises(DataError, match="left_out"):
        zg.prepare(
            DataConfig(train=(str(tmp_path / "rows.parquet"),)),
            schema=schema_of(CLICK, zg.Label(name="buy")),
            folder=tmp_path / "refused",
        )


@pytest.mark.parametrize("cells", [["1", "", "0"], [1.0, None, 0.0], ["yes", None, "no"]])
def test_an_empty_cell_of_a_label_is_left_out_and_a_wrong_one_is_not(cells: list[object]) -> None:
    label = zg.Label(name="buy", missing=MissingLabel.LEFT_OUT)
    wrong: object = 2.0
    if cells[0] == "yes":
        label, wrong = replace(label, positive="yes", negative="no"), "perhaps"
    elif isinstance(cells[0], str):
        wrong = "2"
    schema = zg.Schema(features=(zg.Categorical(name="user"),), labels=(label,))
    frame = pl.DataFrame({"user": [1, 2, 3], "buy": cells})
    batch = Preprocessing.fit(schema, [RawChunk.of(frame)]).batch(frame, with_labels=True)
    assert batch.labels[:, 0].nan_to_num(-1.0).tolist() == [1.0, -1.0, 0.0]
    bad = pl.DataFrame({"user": [1, 2, 3], "buy": [cells[0], cells[1], wrong]})
    with pytest.raises(DataError, match=r"perhaps|2"):
        Preprocessing.fit(schema, [RawChunk.of(bad)])


def test_the_mean_of_a_label_is_that_of_the_rows_that_have_it() -> None:
    schema = zg.Schema(
        features=(zg.Categorical(name="user"),),
        labels=(zg.Label(name="stars", task=Task.REGRESSION, missing=MissingLabel.LEFT_OUT),),
    )
    frame = pl.DataFrame({"user": [1, 2, 3], "stars": [1.0, None, 5.0]})
    (label,) = Preprocessing.fit(schema, [RawChunk.of(frame)]).inputs.labels
    assert (label.offset, label.scale) == (3.0, 2.0)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf")])
def test_impossible_weights_of_labels_are_refused(weight: float) -> None:
    with pytest.raises(SchemaError, match="a weight above 0"):
        zg.Label(name="click", weight=weight)


def test_fingerprints_of_binary_labels_stay_those_of_before() -> None:
    state = schema_of(CLICK).to_state()
    assert not {"weight", "missing"} & set(state["labels"][0])


def test_r2_is_the_explained_share_of_the_variance_and_below_zero_it_is_said() -> None:
    labels = [1.0, 2.0, 3.0, 6.0]
    assert r2([3.0] * 4, labels) == 0.0
    assert r2(labels, labels) == 1.0
    assert np.isnan(r2([1.0, 2.0], [3.0, 3.0]))
    (line,) = suspicious({"r2": -0.2, "rmse": 3.0}, split="test")
    assert "worse than always saying the mean" in line


@pytest.mark.parametrize("labels", [(DWELL,), (CLICK, DWELL)], ids=["alone", "beside a click"])
def test_an_export_answers_numbers_with_all_their_digits(tmp_path: Path, labels: tuple[zg.Label, ...]) -> None:
    frame = rows().with_columns(dwell=1e9 + (pl.col("dwell") - 40_000) / 12_812)
    config = run_of(tmp_path, frame, *labels)
    config = replace(config, table_schema=replace(config.table_schema, items=zg.Items(id="item", features=("item",))))
    zg.train_run(config, folder=tmp_path / "run")
    value = "" if len(labels) == 1 else "dwell"
    zg.export_run(tmp_path / "run", out=tmp_path / "export", config=ExportConfig(value=value, compiled=False))
    answering = zg.Recommender.load(tmp_path / "export")
    run = zg.load_run(tmp_path / "run")
    expected = run.predict(pl.DataFrame({"user": [3, 3, 3], "item": [1, 5, 7]}))["dwell"].to_list()
    for items in (["1", "5", "7"], ["1", {"item": 5}, "7"], [{"item": 1}, {"item": 5}, {"item": 7}]):
        ranked = answering.rank({"user": 3}, items)
        found = {int(item.id): item.tasks["dwell"] for item in ranked.items}
        assert [found[item] for item in (1, 5, 7)] == pytest.approx(expected, rel=0, abs=1e-4)


def test_a_threshold_of_a_number_is_refused_of_new_runs_and_loaded_of_old_ones(tmp_path: Path) -> None:
    schema = zg.Schema(features=(zg.Categorical(name="user"),), labels=(replace(DWELL, positive_from=4.0),))
    config = table_run(zg.LogisticRegressionConfig(), schema)
    with pytest.raises(SchemaError, match=r"positive_from = 4, task = 'regression'") as wrong:
        zg.train_run(config, folder=tmp_path / "run", data=rows())
    assert not (tmp_path / "run" / "config.json").exists()
    with pytest.raises(SchemaError, match="positive_from"):
        zg.fit(rows(), schema=schema, out=tmp_path / "fit")
    assert "take positive_from out" in wrong.value.ways_out[1]
    (tmp_path / "old").mkdir()
    CONFIG.write(tmp_path / "old" / "config.json", run_config_to_json(config))
    assert load_config(tmp_path / "old").table_schema == schema
