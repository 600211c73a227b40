"""Permutation importance equals permutations made by hand, for every built-in model and every kind of feature."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

import ziggurat
from tests.end_to_end.test_main_job import SMALL
from tests.parallel.test_parity import inputs as parity_inputs
from tests.parallel.test_parity_of_models import CONFIGS
from ziggurat.cli.main import main
from ziggurat.data.encoded.records import encoded_schema, table_to_batch
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.batches.permutation import feature_names
from ziggurat.features.inputs import InputSpec, VectorSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import BuiltInConfig, build_model
from ziggurat.recipes.catalogue import table_run
from ziggurat.runs.load import load_run
from ziggurat.runs.quality.importance import IMPORTANCE, ImportanceConfig, _own_batches, importance_of, order_of
from ziggurat.training.evaluation.evaluate import evaluate_batches
from ziggurat.training.team import Team

SCHEMA = ziggurat.Schema(
    features=(
        ziggurat.Categorical(name="decides"),
        ziggurat.Categorical(name="noise"),
        ziggurat.Dense(name="price"),
        ziggurat.MultiHot(name="tags"),
        ziggurat.Vector(name="image", dim=2),
    ),
    labels=(ziggurat.Label(name="click"),),
    weight="weight",
    group="group",
)
TINY = ["--dim", "4", "--model.deep.hidden-dims", "8", "--table-lr", "0.3", "--lr", "0.01", "--precision", "fp32"]


def rows(num_rows: int, *, seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    decides, price = rng.integers(0, 20, num_rows), rng.lognormal(2, 1, num_rows)
    return pl.DataFrame(
        {
            "decides": decides,
            "noise": rng.integers(0, 3, num_rows),
            "price": price,
            "tags": [[f"t{tag}" for tag in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(num_rows)],
            "image": pl.Series(rng.normal(size=(num_rows, 2)).astype(np.float32), dtype=pl.List(pl.Float32)),
            "weight": rng.uniform(0.5, 2.0, num_rows),
            "group": rng.integers(0, 9, num_rows),
            "click": (rng.random(num_rows) < np.where(decides % 2 == 0, 0.9, 0.1)).astype(np.int8),
        },
        strict=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("importance")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("ZIGGURAT_CACHE", str(place / "cache"))
        rows(3000).write_parquet("rows.parquet")
        ziggurat.write_schema(SCHEMA, "my.toml")
        command = ["train", "table_dnn", "--data.train", "rows.parquet", "--schema", "my.toml", "--out", "runs/a"]
        assert main([*command, "--epochs", "3", *SMALL, *TINY]) == 0
        yield place


def test_what_decides_is_important_and_noise_is_not(trained: Path) -> None:
    run = load_run("runs/a")
    found = run.importance(rows(4000, seed=5), config=ImportanceConfig(rounds=3))
    by_name = {each.name: each for each in found.features}
    assert found.features[0].name == "decides"
    assert by_name["decides"].mean > 0.25  # AUC 0.9 becomes that of a coin
    assert all(abs(by_name[name].mean) < 0.02 for name in ("noise", "price", "tags", "image"))
    assert found.baseline > 0.85
    assert found.num_samples == found.num_rows == 4000
    rising = run.importance(rows(4000, seed=5), config=ImportanceConfig(rounds=1, metric="log_loss"))
    assert rising.features[0].name == "decides"
    assert rising.features[0].mean > 0.2


def test_it_equals_columns_shuffled_by_hand(trained: Path) -> None:
    """Through raw data: a frame whose column was shuffled, encoded and evaluated again."""
    run, frame = load_run("runs/a"), rows(900, seed=7)
    groups = {"pair": ("price", "tags")}
    for groups_of, names in (({}, SCHEMA.features), (groups, ())):
        config = ImportanceConfig(rounds=2, seed=3, metric="gauc", groups=groups_of)
        found = {each.name: each for each in run.importance(frame, config=config).features}
        baseline = run.evaluate(frame).metrics["gauc"]
        for name in (*(feature.name for feature in names), *groups_of):
            for number in range(2):
                order = order_of(len(frame), name=name, round_number=number, seed=3)
                columns = groups_of.get(name, (name,))
                shuffled = frame.with_columns(frame[column].gather(order) for column in columns)
                assert run.evaluate(shuffled).metrics["gauc"] == found[name].permuted[number], name
                assert found[name].losses[number] == baseline - found[name].permuted[number]
        assert {"price", "tags"} <= found.keys() or groups_of
        assert "price" not in found or not groups_of


def pretend_run(config: BuiltInConfig, inputs: InputSpec) -> Any:
    model = build_model(config, inputs, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.3)
    settings = table_run(config, SCHEMA)
    return SimpleNamespace(model=model, config=settings, team=Team(None))


def encoded_table(inputs: InputSpec, num_rows: int) -> pa.Table:
    rng = np.random.default_rng(4)
    size = {table.name: table.num_rows for table in inputs.tables}
    columns: dict[str, Any] = {name: rng.normal(size=num_rows) for name in inputs.dense}
    columns |= {spec.name: rng.integers(0, size[spec.table], num_rows) for spec in inputs.single}
    for spec in inputs.jagged:
        columns[spec.name] = [rng.integers(0, size[spec.table], length) for length in rng.integers(0, 5, num_rows)]
    columns |= {spec.name: list(rng.normal(size=(num_rows, spec.dim)).astype(np.float32)) for spec in inputs.vectors}
    columns |= {f"label:{label.name}": rng.integers(0, 2, num_rows) for label in inputs.labels}
    columns |= {"weight:": rng.random(num_rows), "group:": rng.integers(0, 9, num_rows), "row:": np.arange(num_rows)}
    schema = encoded_schema(inputs)
    return pa.table({entry.name: pa.array(columns[entry.name], type=entry.type) for entry in schema}, schema=schema)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_every_model_and_every_kind_of_feature(config: BuiltInConfig) -> None:
    """Encoded columns taken in another order: numbers, ids, lists that are pooled or read one by one, vectors."""
    inputs = dataclasses.replace(parity_inputs(), vectors=(VectorSpec(name="image", dim=3),))
    if config.kind == "din":
        jagged = [dataclasses.replace(each, pooling=Pooling.NONE, ordered=True) for each in inputs.jagged[1:2]]
        inputs = dataclasses.replace(inputs, jagged=(inputs.jagged[0], *jagged, inputs.jagged[2]))
        assert inputs.sequences
    table = encoded_table(inputs, 70)
    run = pretend_run(config, inputs)
    asked = ImportanceConfig(
        rounds=1, metric=f"log_loss/{inputs.labels[0].name}" if len(inputs.labels) > 1 else "log_loss"
    )
    found = {
        each.name: each
        for each in importance_of(run, [table.slice(0, 30), table.slice(30)], rows="", config=asked).features
    }
    assert found.keys() == set(feature_names(inputs))
    for name in feature_names(inputs):
        order = order_of(70, name=name, round_number=0, seed=0)
        place = table.schema.get_field_index(name)
        shuffled = table.set_column(place, table.schema.field(place), table.column(name).take(pa.array(order)))
        by_hand = evaluate_batches(run.model, [table_to_batch(shuffled, inputs)], inputs=inputs)
        assert found[name].permuted[0] == by_hand.metrics[asked.metric], name
    assert sum(each.losses[0] != 0.0 for each in found.values()) >= len(found) - 1  # they are read


def test_a_sample_is_drawn_whatever_the_chunks(trained: Path) -> None:
    run, frame = load_run("runs/a"), rows(1000, seed=8)
    config = ImportanceConfig(rounds=1, samples=90, features=("decides",), metric="log_loss")
    found = run.importance(frame, config=config)
    assert (found.num_samples, found.num_rows) == (90, 1000)
    inputs = run.model.inputs
    table = encoded_table(inputs, 500)
    chunked = [[table], [table.slice(start, 37) for start in range(0, 500, 37)]]
    one, other = (importance_of(run, chunks, rows="", config=config) for chunks in chunked)
    assert one == other
    kept = np.sort(np.argsort(np.random.default_rng(0).random(500))[:90])
    by_hand = evaluate_batches(run.model, [table_to_batch(table.take(pa.array(kept)), inputs)], inputs=inputs)
    assert one.baseline == by_hand.metrics["log_loss"]


def test_ranks_share_the_samples(trained: Path) -> None:
    """Every rank has the same number of batches, and together they have each sample once."""
    run = load_run("runs/a")
    sample = table_to_batch(encoded_table(run.model.inputs, 2050), run.model.inputs)
    shares = []
    for rank in range(3):
        team = SimpleNamespace(rank=rank, world_size=3)
        shares.append([each.row_ids for each in _own_batches(dataclasses.replace(run, team=team), sample)])  # type: ignore[arg-type]
    assert len({len(share) for share in shares}) == 1
    assert sorted(torch.cat([rows for share in shares for rows in share]).tolist()) == list(range(2050))


def test_the_command_writes_what_it_shows(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", "x.json", "--csv", "x.csv", "--plot", "x.svg"]
    assert main(["importance", "runs/a", "--rounds", "2", "--group", "both=price,tags", *files]) == 0
    shown, stored = capsys.readouterr().out, IMPORTANCE.read("x.json")
    assert "auc 0.9" in shown
    assert "296 samples of the run's valid rows (all), 2 rounds, seed 0" in shown
    table = pl.read_csv("x.csv")
    assert table["feature"].to_list() == [each["name"] for each in stored["features"]]
    assert set(table["feature"]) == {"decides", "noise", "image", "both"}
    assert f"{table['importance'][0]:+.5f}" in shown
    assert ">decides<" in Path("x.svg").read_text()
    found = load_run("runs/a").importance(split="test", config=ImportanceConfig(rounds=1))
    assert found.rows == "the run's test rows"
    assert "<td>decides</td>" in found._repr_html_()
    assert "decides" in repr(found)
    assert json.loads(json.dumps(found.to_json()))["rounds"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metric", "ack"], "auc"),
        (["--metric", "calibration"], "direction"),
        (["--features", "decide"], "did you mean 'decides'?"),
        (["--features", "price", "--group", "x=price,tags"], "named twice"),
        (["--group", "price,tags"], "NAME=A,B"),
        (["--group", "noise=price"], "a group with the name of a feature"),
        (["--towers"], "a flat run"),
        (["--rounds", "0"], "rounds >= 1"),
        (["--plot", "x.gif"], ".svg"),
        (["--data", "rows.parquet", "--split", "test"], "either"),
    ],
)
def test_what_cannot_be_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["importance", "runs/a", *arguments]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "ways out" in shown


def test_labels_that_are_all_equal_are_refused(trained: Path) -> None:
    with pytest.raises(DataError, match="both labels"):
        load_run("runs/a").importance(rows(50).with_columns(click=pl.lit(0)))
    with pytest.raises(ConfigError, match="a frame"):
        load_run("runs/a").importance(7)
