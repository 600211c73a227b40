"""Files that older releases wrote are read, resumed and evaluated by today's code; see released/*/README.md."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from safetensors.torch import load_file

import ziggurat
import ziggurat.data.encoded.dataset
from tests.training.checkpoint.checkpoint_cases import assert_same
from tests.training.checkpoint.rows.disk_tables import Tables, generations, manifest_of
from ziggurat.cli.main import main
from ziggurat.data.datasets.fetch import is_complete
from ziggurat.data.preprocess.prepared import open_prepared
from ziggurat.data.streams.arrivals import Arrivals
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema_io import read_schema, write_schema
from ziggurat.files import sha256_of
from ziggurat.planning.cluster.catalogue import load_cluster, named_cluster
from ziggurat.planning.costs.learned import LearnedCostModel
from ziggurat.planning.costs.measurements import Measurements
from ziggurat.recipes.run_config import load_config
from ziggurat.studies.compare_runs import RunRecord
from ziggurat.training.checkpoint import CheckpointStore

RELEASED = Path(__file__).parent / "released"
FIRST = RELEASED / "c0ca678"


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what c0ca678 wrote, as the working folder."""
    shutil.copytree(FIRST, tmp_path / "first")
    monkeypatch.chdir(tmp_path / "first")
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "first"


def test_a_run_scores_as_it_did(first: Path) -> None:
    assert main(["predict", "run", "data.csv", "--out", "again.parquet"]) == 0
    before, now = (pl.read_parquet(first / name) for name in ("scores.parquet", "again.parquet"))
    assert before["row"].equals(now["row"])
    np.testing.assert_allclose(now["like"].to_numpy(), before["like"].to_numpy(), rtol=0, atol=1e-6)
    assert main(["verify", "run"]) == 0
    assert main(["report", "run"]) == 0


def test_a_run_is_resumed_and_written_in_the_present_formats(first: Path) -> None:
    assert main(["train", "run", "--resume", "--training.epochs", "3"]) == 0
    for name in ("config", "inputs", "startup", "evaluations/test"):
        data = json.loads((first / "run" / f"{name}.json").read_text())
        assert data["format"].startswith("ziggurat."), name
        assert data["version"] >= 1, name
    assert load_config("run").training.epochs == 3


def test_plain_files_are_read(first: Path) -> None:
    towers = ziggurat.Towers.load("towers.json")
    assert towers.towers == (("user",), ("item", "tags"))
    plan = ziggurat.Plan.load("run/plan.json")
    assert (plan.world_size, plan.towers) == (2, towers)
    assert [feature.name for feature in read_schema("schema.toml").features] == ["user", "item", "tags", "age"]
    assert load_config("run").table_schema.features == read_schema("schema.toml").features
    cluster, now = load_cluster("cluster.toml"), named_cluster("h100x8")
    assert replace(cluster, below=now.below, sources=now.sources) == now  # what lies below devices came later
    assert Measurements.load("measurements.json").lookups[0].total_ms == 1.5
    assert LearnedCostModel.load("learned").card.num_samples == 64
    assert (record := RunRecord.load(Path("compared"))) is not None
    assert record.cost.step_flops == 300
    prepared = open_prepared(Path("prepared"), fingerprint=_fingerprint(first), reused=True)
    assert prepared.train.num_rows == 320
    assert prepared.train.read_group(0).num_rows == 320


def test_what_is_loaded_is_saved_in_the_present_formats_and_loaded_again(first: Path) -> None:
    plan = ziggurat.Plan.load("run/plan.json")
    plan.save("plan.json")
    assert ziggurat.Plan.load("plan.json") == plan
    cost = LearnedCostModel.load("learned")
    cost.save("new/learned")
    assert LearnedCostModel.load("new/learned").card == cost.card
    measured = Measurements.load("measurements.json")
    measured.save("new/measurements.json")
    assert Measurements.load("new/measurements.json") == measured
    schema = read_schema("schema.toml")
    assert read_schema(write_schema(schema, "new/schema.toml")) == schema
    cluster = load_cluster("cluster.toml")
    cluster.save("new/cluster.toml")
    assert load_cluster("new/cluster.toml") == cluster


def test_old_checksums_are_still_checked(first: Path) -> None:
    for name, load in (
        ("prepared/prepared.json", lambda: open_prepared(Path("prepared"), fingerprint="", reused=True)),
        ("prepared/train/manifest.json", lambda: ziggurat.data.encoded.dataset.EncodedDataset(Path("prepared/train"))),
    ):
        text = Path(name).read_text()
        Path(name).write_text(text.replace("320", "321", 1))
        with pytest.raises(DataError, match="sha256 differs"):
            load()
    weights = Path("learned.safetensors")
    LearnedCostModel.load("learned").save("learned")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    with pytest.raises(ConfigError, match="do not belong"):
        LearnedCostModel.load("learned")


def test_a_fetched_data_set_is_still_complete(tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(b"rows")
    manifest = {"version": 1, "origin": "", "members": {}, "files": {"part": {"sha256": sha256_of(b"rows"), "rows": 1}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert is_complete(tmp_path)


def _fingerprint(folder: Path) -> str:
    return json.loads((folder / "prepared" / "prepared.json").read_text())["payload"]["fingerprint"]


def test_a_run_on_events_is_judged_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its label did not say that it is always 1: full ranking alone judges it all the same.

    Its scores were divided by the temperature; now they are inner products, as those of an export.
    """
    shutil.copytree(RELEASED / "5a883c5", tmp_path / "events")
    monkeypatch.chdir(tmp_path / "events")
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    run = ziggurat.load_run("run")
    before, now = pl.read_csv("next.csv"), run.predict("events.csv")
    assert before.select("user", "rank", "film").equals(now.select("user", "rank", "film").cast({"rank": pl.Int64}))
    temperature = json.loads(Path("run/config.json").read_text())["model"]["temperature"]
    np.testing.assert_allclose(now["score"], before["score"] * temperature, atol=1e-6)
    metrics = json.loads(Path("run/evaluations/test.json").read_text())["metrics"]
    found = run.evaluate_split("test").metrics
    assert {name: found[name] for name in metrics} == pytest.approx(metrics, abs=1e-6)
    # Which it did not say yet.
    of_users = {"full_user_recall@20", "full_user_ndcg@20"}
    assert found.keys() - metrics.keys() == {"full_repeated", *(f"full_answered@{k}" for k in (10, 50, 100)), *of_users}
    fingerprint = json.loads(Path("prepared/prepared.json").read_text())["fingerprint"]
    assert open_prepared(Path("prepared"), fingerprint=fingerprint, reused=True).inputs == run.preprocessing.inputs


def test_a_checkpoint_of_tables_on_a_disk_loads_and_the_next_one_has_the_present_format(tmp_path: Path) -> None:
    shutil.copytree(RELEASED / "88d5b4d", tmp_path / "disk")
    folder, expected = tmp_path / "disk" / "checkpoints", load_file(tmp_path / "disk" / "whole.safetensors")
    store = CheckpointStore(folder)
    store.verify(1)
    assert_same(store.load().tensors, expected)
    tables = Tables(tmp_path)
    assert store.load(into=tables.tensors()).step == 1
    for step in (2, 3):  # the first is whole, the next one takes its file
        store.save(step, tensors=tables.tensors(), state={})
        assert generations(manifest_of(folder, step)) == [2]
        assert_same(store.load(step).tensors, expected)
        assert json.loads((folder / f"step-{step:012d}" / "manifest.json").read_text())["format_version"] == 3


def test_a_stream_goes_on_with_the_journal_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RELEASED / "df241ef", tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    schema = ziggurat.Schema(
        features=(ziggurat.Categorical(name="user"),), labels=(ziggurat.Label(name="click"),), time="at"
    )

    def opened() -> Arrivals:
        data = ziggurat.DataConfig(train=("x",))
        return Arrivals(Path("stream"), config=StreamConfig(), data=data, schema=schema)

    arrivals = opened()
    assert [window.rows for window in arrivals.journal.done] == [1, 3 + 1]  # the second with a row that came late
    assert [window.late for window in arrivals.journal.done] == [0, 1]
    taken = arrivals.take([Path("a.csv"), Path("b.csv"), Path("c.csv")])
    assert (taken.files, taken.rows, taken.late) == (1, 3, 0)
    assert arrivals.finish_next(is_over=False)
    again = opened()
    assert again.journal == arrivals.journal
    users = [user for chunk in again.chunks(again.journal.done[2]) for user in chunk.frame["user"]]
    assert users == ["a2", "c2"]
