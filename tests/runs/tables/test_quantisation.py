"""What a run costs in few bits: held to metrics of scores that the test computes itself, and to bytes by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.runs.test_low_precision_runs import config_of
from tests.serving.shop import Shop
from ziggurat.cli.main import main
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.ops.row_formats import RowFormat
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.tables.quantisation import (
    FormatCost,
    QuantisationConfig,
    QuantisationReport,
    quantisation_report,
)
from ziggurat.training.evaluation.evaluate import ordered_batches, scores_of
from ziggurat.training.metrics.functions import auc, log_loss


def scored(folder: Path, tables: TablesConfig | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scores and labels of the validation rows."""
    run = load_run(folder, tables=tables)
    batches = ordered_batches(run._rows(run._prepared("valid", None), "valid"), batch_size=64).batches(epoch=0)
    pairs = [(scores[:, 0], batch.labels[:, 0].numpy()) for batch, scores in scores_of(run.model, batches)]
    scores, labels = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return scores.astype(np.float64), labels


def test_costs_are_those_of_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    train_run(config_of("fp32", epochs=1), folder=folder)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    capsys.readouterr()
    arguments = ["--formats", "int8,int4", "--by-table", "--json", str(tmp_path / "a.json")]
    assert main(["quantise", str(folder), *arguments, "--plot", str(tmp_path / "a.svg")]) == 0
    shown = capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before, "nothing is written"
    assert (tmp_path / "a.svg").stat().st_size > 1000
    found = json.loads((tmp_path / "a.json").read_text())
    scores, labels = scored(folder)
    run = load_run(folder)
    places = run.model.embeddings.tables.places
    assert found["run"]["metrics"]["auc"] == pytest.approx(auc(scores, labels), abs=1e-9)
    assert found["run"]["weight_bytes"] == sum(4 * place.dim * place.num_rows for place in places.values())
    assert [(each["row_format"], each["table"]) for each in found["tried"][:2]] == [("int8", ""), ("int4", "")]
    assert {each["table"] for each in found["tried"][2:]} == set(places)
    for each in (*found["tried"][:2], found["tried"][3]):
        row_format = RowFormat(each["row_format"])
        one = {"by_table": {each["table"]: row_format}} if each["table"] else {"weights": row_format}
        others, _ = scored(folder, TablesConfig(**one))
        assert each["metrics"]["log_loss"] == pytest.approx(log_loss(others, labels), abs=1e-9)
        assert each["changes"]["auc"] == pytest.approx(auc(others, labels) - auc(scores, labels), abs=1e-9)
        (largest,), (error,) = each["largest_change"].values(), each["log_loss_error"].values()
        assert largest == pytest.approx(np.abs(others - scores).max(), abs=1e-7)
        losses = [-np.log(np.where(labels == 1, p, 1 - p)) for p in (others, scores)]
        assert error == pytest.approx((losses[0] - losses[1]).std() / len(labels) ** 0.5, rel=1e-3)
        chosen = [places[each["table"]]] if each["table"] else places.values()
        assert each["weight_bytes"] == sum(place.num_rows * row_format.row_bytes(place.dim) for place in chosen)
    assert "largest change of a score" in shown
    assert "int4" in shown


def test_what_cannot_be_tried_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for formats in ((), (RowFormat.FP32,), (RowFormat.SPLIT_BF16,)):
        with pytest.raises(ConfigError, match="fewer bits"):
            QuantisationConfig(formats=formats)
    assert main(["quantise", "nowhere", "--data", "a.csv", "--split", "test"]) == 2
    assert "leave --split out" in capsys.readouterr().err
    with pytest.raises(MissingFileError, match=r"config\.json"):
        quantisation_report(tmp_path)


def test_tables_of_a_run_with_a_cache_stay_exact_where_one_is_tried() -> None:
    from ziggurat.config import override
    from ziggurat.runs.tables.quantisation import rounded_tables

    config = override(config_of("int8"), {"tables.cache": "0.1"})
    assert rounded_tables(config, RowFormat.INT4, table="C1") == TablesConfig(by_table={"C1": RowFormat.INT4})
    assert rounded_tables(config, RowFormat.INT4, table="") == TablesConfig(weights=RowFormat.INT4)
    kept = rounded_tables(config_of("int8"), RowFormat.INT4, table="C1")
    assert kept == TablesConfig(weights=RowFormat.INT8, by_table={"C1": RowFormat.INT4})


def test_a_format_is_named_where_an_export_takes_all_of_its_metrics() -> None:
    def named(run: dict[str, float], changes: dict[str, float]) -> str:
        tried = FormatCost(row_format="int4", table="", weight_bytes=1, metrics=run, changes=changes)
        whole = replace(tried, row_format="", changes={})
        sizes = {"labels": tuple(run), "table_bytes": {}, "shapes": {}, "num_rows": 1, "step": 1, "rows": ""}
        return QuantisationReport(run=whole, tried=(tried,), **sizes).within

    both = {"auc/like": 0.7, "rmse/price": 20.0}
    assert named(both, {"auc/like": -9e-5, "rmse/price": 1.9e-3}) == "int4"
    assert named(both, {"auc/like": -1.1e-4, "rmse/price": 0.0}) == ""
    assert named(both, {"auc/like": 0.0, "rmse/price": 2.1e-3}) == ""
    assert named(both, {"auc/like": 5e-4, "rmse/price": -1.0}) == "int4"
    assert named({"rmse": 20.0}, {"rmse": 1.9e-3}) == "int4", "a label that is a number alone"
    assert named({"full_ndcg@10": 0.3}, {"full_ndcg@10": 0.0}) == ""


def test_a_two_tower_run_is_ranked_with_its_rounded_tables(shop: Shop) -> None:
    found = quantisation_report(shop.two_tower, config=QuantisationConfig(formats=(RowFormat.INT8, RowFormat.INT4)))
    ndcg = "full_ndcg@10"
    for cost in found.tried:
        rounded = load_run(shop.two_tower, tables=TablesConfig(weights=RowFormat(cost.row_format)))
        expected = rounded.evaluate_split("valid").metrics[ndcg]
        assert cost.metrics[ndcg] == pytest.approx(expected, abs=1e-12)
        assert cost.changes[ndcg] == pytest.approx(expected - found.run.metrics[ndcg], abs=1e-12)
    assert found.tried[-1].changes[ndcg] != 0, "in INT4 some items change places"
