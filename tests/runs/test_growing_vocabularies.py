"""Growing tables from the schema to scores: what is refused, and that every door reads the map of the checkpoint."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.data.preprocess.fit.leaks import _id_score
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.data.preprocess.values.grown import GrownVocabulary
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import CheckpointError, ConfigError, DataError, SchemaError
from ziggurat.features.growing import Evict
from ziggurat.features.schema import Encoding, Schema, Table
from ziggurat.features.schema_io import schema_from_toml, schema_to_toml
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.serving.recommender import Recommender


def schema_of(**changes: object) -> Schema:
    table = Table(name="user", encoding=Encoding.GROWING, num_rows=20, min_count=2, **changes)  # type: ignore[arg-type]
    return Schema(
        features=(zg.Categorical(name="user"), zg.MultiHot(name="tags", table="user"), zg.Dense(name="age")),
        labels=(zg.Label(name="click"),),
        tables=(table,),
        time="ts",
    )


def events(num_rows: int) -> pl.DataFrame:
    rng, ts = np.random.default_rng(0), np.arange(num_rows)
    users = rng.zipf(1.3, num_rows) % 300 + ts // 40
    return pl.DataFrame(
        {
            "user": [None if i % 97 == 0 else f"u{user}" for i, user in enumerate(users)],
            "tags": [[f"u{x}" for x in rng.integers(0, 30, rng.integers(0, 3))] for _ in ts],
            "age": rng.normal(size=num_rows),
            "click": (rng.random(num_rows) < 0.2 + 0.6 * (users % 2)).astype(int),
            "ts": ts,
        }
    )


def test_settings_that_do_not_go_together_are_refused() -> None:
    schema = schema_of(evict=Evict.OLDEST)
    assert schema_from_toml(schema_to_toml(schema), "test") == schema
    with pytest.raises(SchemaError, match="evict with encoding 'growing' only"):
        Table(name="t", evict=Evict.NEVER)
    with pytest.raises(SchemaError, match="no max_rows for a growing table"):
        schema_of(max_rows=4)
    with pytest.raises(SchemaError, match="num_rows >= 1"):
        Table(name="t", encoding=Encoding.GROWING)
    config = recipe_named("table_dlrm", schema=schema)
    for setting, found in {
        "model.embedding.optimizer": ("adam_dense", "adam_dense"),
        "parallel.exchange": ("prioritised", "--parallel.exchange prioritised"),
    }.items():
        with pytest.raises(ConfigError, match=re.escape(found[1])):
            override(config, {setting: found[0]}).check()
    with pytest.raises(ConfigError, match="finds items"):
        dataclasses.replace(recipe_named("movielens_two_tower"), table_schema=schema).check()


def test_a_grown_vocabulary_is_saved_and_found_damaged(tmp_path: Path) -> None:
    fitted = Preprocessing.fit(schema_of(), [RawChunk.of(events(50))])
    numbers = fitted.batch({"user": ["u1", None, "u2"], "tags": [[], ["u2"], []], "age": [0.0] * 3}).single[0]
    assert int(numbers[0]) > 1000
    assert int(numbers[1]) == 2
    grown = fitted.with_grown({"user": GrownVocabulary.of(numbers[[2]].numpy())})
    assert grown.fingerprint == fitted.fingerprint
    save_preprocessing(grown, tmp_path / "p")
    loaded = load_preprocessing(tmp_path / "p")
    batch = loaded.batch({"user": ["u1", None, "u2"], "tags": [[], ["u2"], []], "age": [0.0] * 3})
    assert batch.single[0].tolist() == [1, 2, 3]
    assert batch.jagged.values.tolist() == [3]
    assert fitted.with_grown({"user": GrownVocabulary.of(np.empty(0, np.int32))}).batch(
        {"user": ["u1", None, "u2"], "tags": [[], [], []], "age": [0.0] * 3}
    ).single[0].tolist() == [1, 2, 1]
    file = tmp_path / "p" / "grown_000.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="SHA-256"):
        load_preprocessing(tmp_path / "p")


def test_numbers_of_31_bits_are_refused_where_raw_data_is_given_those_of_62(tmp_path: Path) -> None:
    fitted = Preprocessing.fit(schema_of(), [RawChunk.of(events(50))])
    older = GrownVocabulary.of(np.array([2**31 - 1, 77]))
    with pytest.raises(CheckpointError, match=r"31 bits for all 2 of its ids") as refused:
        fitted.with_grown({"user": older}, where="runs/a/checkpoints")
    assert refused.value.where == "runs/a/checkpoints"


def test_a_file_of_numbers_of_31_bits_says_what_helps(tmp_path: Path) -> None:
    fitted = Preprocessing.fit(schema_of(), [RawChunk.of(events(50))])
    older = GrownVocabulary(numbers=np.array([5, 77], np.int32), table_rows=np.array([3, 4], np.int32))
    fitted.grown["user"] = older
    save_preprocessing(fitted, tmp_path / "p")
    with pytest.raises(CheckpointError, match="31 bits") as refused:
        load_preprocessing(tmp_path / "p")
    assert refused.value.where.endswith("grown_000.parquet")
    assert "train the run again" in refused.value.ways_out[0]
    assert "copy the file again" not in refused.value.ways_out, "every copy has these numbers"


@pytest.mark.slow
def test_a_run_with_numbers_of_31_bits_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    events(200).write_parquet(tmp_path / "events.parquet")
    config = recipe_named("table_dlrm", schema=schema_of())
    config = dataclasses.replace(config, data=zg.DataConfig(train=(str(tmp_path / "events.parquet"),)))
    tiny = {"model.bottom.hidden-dims": "4", "model.top.hidden-dims": "4", "training.epochs": "1"}
    config = override(config, tiny | {"training.early-stop.patience": "0"})
    with monkeypatch.context() as before:
        for module in ("preprocessing", "build"):
            before.setattr(f"ziggurat.data.preprocess.{module}.NUM_NUMBERS", 2**31 - 4)
        train_run(config, folder=tmp_path / "run")
    with pytest.raises(CheckpointError, match="numbers of 31 bits"):
        load_run(tmp_path / "run")
    more = override(config, {"training.epochs": "2"})
    with pytest.raises(DataError, match="31 bits"):
        train_run(more, folder=tmp_path / "run", resume=True)
    (tmp_path / "run" / "data.json").unlink()
    with pytest.raises(CheckpointError, match="31 bits"):
        train_run(more, folder=tmp_path / "run", resume=True)


def test_leaks_are_looked_for_without_memory_for_every_number() -> None:
    import pyarrow as pa

    ids, more, labels = np.array([5, 9, 5, 7]), np.array([9, 5, 8]), np.array([1.0, 0.0, 1.0, 0.0])
    small = _id_score((pa.array(ids), pa.array(more)), labels)
    large = _id_score((pa.array(ids + 2_000_000_000), pa.array(more + 2_000_000_000)), labels)
    assert small.tolist() == large.tolist()


@pytest.mark.slow
def test_every_door_reads_the_map_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    frame = events(1200)
    frame.write_parquet(tmp_path / "events.parquet")
    config = recipe_named("table_dlrm", schema=schema_of())
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, train=(str(tmp_path / "events.parquet"),))
    )
    settings = {"model.bottom.hidden-dims": "8", "model.top.hidden-dims": "8", "training.epochs": "2"}
    result = train_run(override(config, settings | {"training.loader.batch-size": "64"}), folder=tmp_path / "run")
    wanted = result.evaluations["test"].metrics
    run = load_run(tmp_path / "run")
    assert len(run.preprocessing.grown["user"]) == 20
    test = frame.tail(run.evaluate_split("test").num_rows)
    assert run.evaluate_split("test").metrics == wanted
    assert run.evaluate(test).metrics == wanted
    assert run.importance(split="test").baseline == run.importance(test).baseline
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "export")]) == 0
    rows = test.drop("click", "ts").head(20)
    served = Recommender.load(tmp_path / "export").scores(rows)
    np.testing.assert_allclose(np.asarray(served).reshape(-1), run.scores(rows).reshape(-1), atol=1e-6)
