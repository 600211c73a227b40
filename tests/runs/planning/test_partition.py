"""From a trained run to towers: groups planted in data are found, loads are those of the run, errors teach."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import ziggurat
from tests.end_to_end.test_main_job import events
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.synthetic.teacher import SyntheticConfig, SyntheticTeacher
from ziggurat.embeddings.room import TableSize
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema import Categorical, Dense, Label, MultiHot, Schema, Table
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.plan import Towers
from ziggurat.planning.towers.partitioner import TowerPartitionConfig
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.planning.partition import (
    EmbeddingProbeConfig,
    comparable_fields,
    partition_run,
    probe_run,
    table_bytes,
)
from ziggurat.testing.batches import random_batch

TEACHER = SyntheticConfig(
    num_dense=1,
    cardinalities=(6, 5, 7, 6, 5, 7),
    num_groups=2,
    hidden_dim=1,
    dense_share=0.02,
    first_order_share=0.1,
    second_order_share=0.9,
    third_order_share=0.0,
    logit_sd=3.0,
    click_rate=0.5,
    zipf_exponent=0.1,
)
SMALL = {
    "training.loader.batch-size": "256",
    "training.threads": "1",
    "training.precision": "fp32",
    "model.embedding.kernel": "torch",
    "model.embedding-dim": "8",
}
SCHEMA = Schema(
    features=(
        Categorical(name="user_id"),
        Categorical(name="item", table="items"),
        Categorical(name="last", column="item", table="items"),
        Dense(name="price"),
        MultiHot(name="tags"),
    ),
    labels=(Label(name="click"),),
    tables=(Table(name="items"), Table(name="tags", embedding_dim=4)),
    time="timestamp",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("partition")
        patch.chdir(folder)
        patch.setenv("ZIGGURAT_CACHE", str(folder / "cache"))
        events(900).write_parquet("events.parquet")
        yield folder


@pytest.fixture(scope="module")
def planted(place: Path) -> Path:
    """A DLRM that learned data with two planted groups."""
    config = dataclasses.replace(
        recipe_named("synthetic_dlrm"),
        teacher=TEACHER,
        table_schema=SyntheticTeacher(TEACHER).schema(),
        dataset=DatasetConfig(name="synthetic", rows=30_000),
    )
    small = {"model.bottom.hidden-dims": "16", "model.top.hidden-dims": "32", "training.schedule.warmup-steps": "20"}
    config = override(config, {**SMALL, **small, "training.epochs": "3"})
    return train_run(config, folder=place / "planted").folder


def mixed(place: Path, recipe: RunConfig, name: str) -> Path:
    """One epoch over a small table with a list, a shared table, and tables of two widths."""
    data = DataConfig(train=("events.parquet",), split=SplitConfig(by=SplitBy.TIME))
    config = override(dataclasses.replace(recipe, data=data), {**SMALL, "training.epochs": "1"})
    return train_run(config, folder=place / name).folder


@pytest.fixture(scope="module")
def dlrm(place: Path) -> Path:
    """A DLRM with a list, a shared table, and tables of two widths."""
    return mixed(place, recipe_named("table_dlrm", schema=SCHEMA), "dlrm")


def test_planted_groups_of_the_data_are_found_by_the_command(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = planted.parent / "found" / "towers.json"
    assert main(["towers", "partition", str(planted), "--towers", "2", "--out", str(out)]) == 0
    groups = frozenset(map(frozenset, SyntheticTeacher(TEACHER).groups))
    assert frozenset(map(frozenset, Towers.load(out).towers)) == groups
    assert "<svg" in out.with_suffix(".svg").read_text()
    shown = capsys.readouterr()
    assert "coherent: within" in shown.out
    assert "naive: within" in shown.out
    assert "note:" not in shown.err


def test_the_towers_of_a_run_train(planted: Path) -> None:
    assert main(["towers", "partition", str(planted), "--towers", "3", "--samples", "500"]) == 0
    arguments = ["--config", str(planted / "config.json"), "--towers", "towers.json", "--training.epochs=1"]
    assert main(["train", *arguments, "--out", "runs/towers"]) == 0
    assert load_run("runs/towers").model.towers is not None


def test_a_recipe_on_own_data_is_trained_first_and_not_again(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ziggurat.write_schema(SCHEMA, "my.toml")
    small = ["--batch-size", "256", "--epochs", "1", "--dim", "8", "--threads", "1", "--precision", "fp32"]
    command = ["towers", "partition", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", *small]
    settings = ["--partition.num-towers", "2", "--partition.refine", "none", "--run", "runs/probe", "--out", "own.json"]
    assert main([*command, *settings]) == 0
    assert load_run("runs/probe").config.training.epochs == 1
    assert {name for tower in Towers.load("own.json").towers for name in tower} == {"user_id", "item", "last", "tags"}
    written = (place / "runs/probe/metrics.jsonl").read_text()
    assert main([*command, *settings, "--probe.batch-size", "64"]) == 0
    assert (place / "runs/probe/metrics.jsonl").read_text() == written
    # the run's data lies elsewhere now
    shutil.copy("events.parquet", "moved.parquet")
    monkeypatch.setattr("ziggurat.runs.planning.partition.prepare_run", seen := Seen())
    main(["towers", "partition", "runs/probe", "--towers", "2", "--data.train", "moved.parquet"])
    assert seen.files == [(str(place / "moved.parquet"),)]
    capsys.readouterr()
    assert main(["towers", "partition", "runs/probe", "--towers", "2", "--epochs", "3"]) == 2
    assert "--training.epochs" in capsys.readouterr().err


class Seen:
    """Stands for `prepare_run`; notes which files were asked for."""

    def __init__(self) -> None:
        self.files: list[tuple[str, ...]] = []

    def __call__(self, config: RunConfig, **given: object) -> Any:
        self.files.append(config.data.train)
        return prepare_run(config)


def test_every_setting_is_listed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["towers", "partition", "table_dlrm", "--settings", "--towers", "3", "--epochs", "9"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("--")}
    assert rows["--partition.num-towers"].split()[1:4] == ["int", "2", "3"]
    assert rows["--training.epochs"].split()[1:4] == ["int", "3", "9"]
    for name in ("--partition.plane.dim", "--probe.batch-size", "--data.separator"):
        assert len(rows[name].split()) > 3, name
    assert main(["towers", "partition", "table_dlrm", "--towers", "3", "--partition.restart", "1"]) == 2
    shown = capsys.readouterr().err
    assert "did you mean --partition.restarts?" in shown
    assert "towers partition table_dlrm --settings" in shown
    assert main(["towers", "partition", "table_dlrm"]) == 2
    assert "--towers 4" in capsys.readouterr().err


def test_errors_name_the_way_out(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--towers", "7"], "ask for 6 towers or fewer"),
        (["--towers", "2", "--memory-limit-bytes", "300"], "optimizer state included"),
        (["--towers", "2", "--samples", "0"], "num_samples"),
    ):
        assert main(["towers", "partition", str(planted), *arguments, "--out", "never.json"]) == 2
        assert words in capsys.readouterr().err
    assert not Path("never.json").exists()


def test_loads_are_those_of_the_run(dlrm: Path) -> None:
    run = load_run(dlrm)
    probe = probe_run(run, config=EmbeddingProbeConfig(batch_size=100))
    loads = {feature.name: feature for feature in probe.features}
    assert list(loads) == [spec.name for spec in run.model.inputs.fields]
    train = pl.read_parquet("events.parquet").sort("timestamp").head(probe.num_samples)
    assert 600 < probe.num_samples < 900
    assert loads["tags"].lookups == pytest.approx(train["tags"].list.len().mean())
    assert loads["user_id"].lookups == 1
    assert (loads["tags"].dim, loads["user_id"].dim) == (4, 8)
    assert loads["item"].table_bytes == loads["last"].table_bytes
    rows = run.model.inputs.table("items").num_rows
    assert loads["item"].table_bytes == rows * (8 + 1) * 4  # row-wise Adagrad: a number a row
    assert float(probe.interactions[0, 1]) <= 1
    names = [feature.name for feature in probe.features]
    both = probe.interactions[names.index("item"), names.index("last")]
    assert float(both) == pytest.approx(1.0)  # the same vector twice
    assert probe.note == ""
    towers = partition_run(run.folder, config=TowerPartitionConfig(num_towers=2)).towers
    towers.check({feature.name: feature.table for feature in probe.features})


def test_the_sample_is_as_large_as_asked_for_and_repeats(planted: Path) -> None:
    run = load_run(planted)
    config = EmbeddingProbeConfig(num_samples=1000, batch_size=256)
    first, second = (probe_run(run, config=config) for _ in range(2))
    assert first.num_samples == 1024
    assert first.interactions.equal(second.interactions)
    assert probe_run(run, config=EmbeddingProbeConfig(num_samples=10)).num_samples == 10
    other = probe_run(run, config=dataclasses.replace(config, seed=1))
    assert not other.interactions.equal(first.interactions)


def test_fields_are_compared_where_the_model_multiplies_them(dlrm: Path) -> None:
    run = load_run(dlrm)
    batch = random_batch(run.model.inputs, batch_size=5, seed=0)
    with torch.no_grad():
        pooled_BT = run.model.embeddings(batch)
        fields_BFD = comparable_fields(run.model, pooled_BT)
    assert fields_BFD.shape == (5, 4, 8)
    assert fields_BFD[:, 0].equal(pooled_BT[:, :8])
    projection = next(m for m in run.model.modules() if isinstance(m, torch.nn.Linear) and m.in_features == 4)
    torch.testing.assert_close(fields_BFD[:, 3], pooled_BT[:, 24:] @ projection.weight.T)


def test_a_model_without_products_says_that_cosines_mean_little(place: Path) -> None:
    run = load_run(mixed(place, recipe_named("table_dcn_v2", schema=SCHEMA), "dcn"))
    probe = probe_run(run)
    assert "DLRM" in probe.note
    assert probe.interactions.shape == (4, 4)


def test_other_raw_data_are_refused(dlrm: Path, place: Path) -> None:
    path = place / "events.parquet"
    content = path.read_bytes()
    events(900, seed=1).write_parquet(path)
    try:
        with pytest.raises(DataError, match="trained on"):
            partition_run(dlrm, config=TowerPartitionConfig())
    finally:
        path.write_bytes(content)


def test_bytes_of_a_table_count_the_state() -> None:
    sizes = {kind: table_bytes(TableSize(num_rows=10, dim=4, optimizer=kind)) for kind in TableOptimizerKind}
    assert sizes == {
        TableOptimizerKind.SGD: 160,
        TableOptimizerKind.ROWWISE_ADAGRAD: 200,
        TableOptimizerKind.SPARSE_ADAM: 480,
        TableOptimizerKind.ADAM_DENSE: 480,
    }


def test_impossible_probes_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_samples"):
        EmbeddingProbeConfig(num_samples=0)
