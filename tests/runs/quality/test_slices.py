"""Metrics by slice equal those of a file that holds the slice's rows and no others."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from ziggurat.cli.main import main
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.runs.load import load_run
from ziggurat.runs.quality.slices import SliceConfig

SCHEMA = ziggurat.Schema(
    features=(ziggurat.Categorical(name="user", column="user_id"), ziggurat.Dense(name="price")),
    labels=(ziggurat.Label(name="click"),),
    group="item",
)
TINY = ["--model.top.hidden-dims", "8", "--model.bottom.hidden-dims", "8", "--model.embedding-dim", "4"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished run, and rows to evaluate: strange users, two shops, a bad row."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    events(2000).drop("tags").write_parquet("events.parquet")
    ziggurat.write_schema(SCHEMA, "my.toml")
    train = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a"]
    assert main([*train, "--training.epochs", "1", *SMALL, *TINY]) == 0
    rows = (
        events(1200, seed=3)
        .drop("tags")
        .with_row_index("k")
        .with_columns(
            user_id=pl.when(pl.col("k") % 7 == 0).then(pl.col("user_id") + 1000).otherwise(pl.col("user_id")),
            shop=pl.when(pl.col("k") % 3 == 0)
            .then(pl.lit("north"))
            .when(pl.col("k") % 50 == 1)
            .then(None)
            .otherwise(pl.format("s{}", pl.col("k") % 5)),
            click=pl.when(pl.col("k") == 700).then(9).otherwise(pl.col("click")),  # a bad row
        )
    )
    rows.write_parquet("today.parquet")
    rows.with_columns(pl.col("shop").fill_null("")).write_csv("today.csv")
    return tmp_path


def test_a_slice_is_a_file_of_its_rows(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run("runs/a")
    rows = pl.read_parquet("today.parquet").filter(pl.col("k") != 700)
    known = pl.col("user_id").is_in(pl.read_parquet("events.parquet")["user_id"].unique().implode())
    slices = SliceConfig(columns=("user", "shop"), top=3, min_rows=30)
    found = run.evaluate(["today.parquet"], slices=slices, bad_rows=BadRowPolicy.QUARANTINE)
    by_name = {(each.column, each.value): each for each in found.slices}
    counts = rows["shop"].value_counts(sort=True).drop_nulls()
    own = counts.sort(["count", "shop"], descending=[True, False]).head(3)["shop"].to_list()
    expected = {
        ("user", "known"): rows.filter(known),
        ("user", "unknown"): rows.filter(~known),
        **{("shop", f"= {shop}"): rows.filter(pl.col("shop") == shop) for shop in own},
        ("shop", f"others ({rows['shop'].n_unique() - 3} values)"): rows.filter(
            ~pl.col("shop").is_in(own) | pl.col("shop").is_null()
        ),
    }
    assert own[0] == "north"
    assert set(expected) <= set(by_name)
    for name, part in expected.items():
        part.write_parquet("part.parquet")
        alone = load_run("runs/a").evaluate(["part.parquet"])
        assert by_name[name].num_rows == alone.num_rows == len(part), name
        assert by_name[name].metrics == pytest.approx(alone.metrics, abs=1e-6, nan_ok=True), name
    from_text = run.evaluate(["today.csv"], slices=slices, bad_rows=BadRowPolicy.QUARANTINE)
    assert [(s.value, s.num_rows) for s in from_text.slices] == [(s.value, s.num_rows) for s in found.slices]

    command = ["evaluate", "runs/a", "part.parquet", "--slices", "shop", "--slice-min-rows", "10", "--json", "x.json"]
    capsys.readouterr()
    assert main([*command, "--report"]) == 0
    stored = json.loads(Path("x.json").read_text())["slices"]
    shown, page = capsys.readouterr().out, Path("runs/a/report.html").read_text()
    assert len(stored) > 1
    for each in stored:
        assert f"{each['metrics']['log_loss']:.5f}" in shown
        assert f"{each['metrics']['log_loss']:.5f}" in page
    assert "Slices, evaluated" in page


def test_what_cannot_be_sliced_by_is_refused(place: Path) -> None:
    run = load_run("runs/a")
    pl.read_parquet("events.parquet").with_columns(l=pl.concat_list("user_id")).write_parquet("lists.parquet")
    with pytest.raises(ConfigError, match="one value a row"):
        run.evaluate(["lists.parquet"], slices=["l"])
    with pytest.raises(ConfigError, match="different columns"):
        run.evaluate(["lists.parquet"], slices=["item", "item"])
    with pytest.raises(SchemaError, match="shopp"):
        run.evaluate(["today.parquet"], slices=["shopp"])
