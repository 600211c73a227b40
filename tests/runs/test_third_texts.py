"""Texts of a label that are neither its positive nor its usual negative count as 0, and that is said once."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

import ziggurat as zg
from tests.serving.shop import SETTINGS
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import DataError
from ziggurat.models import MLPConfig

NOTE = "label 'bought': 60 of 600 rows (10.00%) are neither 'yes' nor 'no', such as 'maybe', 'later'"


def _rows() -> pl.DataFrame:
    said = ["yes", "no", "no", "yes", "no", "no", "no", "no", "no", "maybe"] * 60
    said[9] = "later"
    return pl.DataFrame(
        {"user": [row * 7 % 30 for row in range(600)], "price": [row % 9 for row in range(600)]}
    ).with_columns(bought=pl.Series(said))


def _schema(*, negative: str = "") -> zg.Schema:
    features = (zg.Categorical(name="user"), zg.Dense(name="price"))
    return zg.Schema(features=features, labels=(zg.Label(name="bought", positive="yes", negative=negative),))


def test_training_and_evaluation_say_how_many_rows_have_a_third_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _rows().write_csv(tmp_path / "t.csv")
    config = zg.RunConfig(
        data=zg.DataConfig(train=(str(tmp_path / "t.csv"),)),
        table_schema=_schema(),
        model=zg.DLRMConfig(
            embedding_dim=4,
            bottom=MLPConfig(hidden_dims=(4,)),
            top=MLPConfig(hidden_dims=(4,)),
            embedding=EmbeddingConfig(kernel=KernelChoice.TORCH),
        ),
        training=SETTINGS,
    )
    result = zg.train_run(config, folder=tmp_path / "run")
    assert result is not None
    data = zg.prepare(config.data, schema=_schema(), folder=tmp_path / "prepared")
    assert [each.partition(":")[0] for each in data.summary.warnings if NOTE in each] == ["label 'bought'"]
    caplog.clear()
    run = zg.load_run(tmp_path / "run")
    run.evaluate(_rows())
    assert caplog.text.count(NOTE) == 1
    assert 'negative = "no" in the [[label]] makes them bad rows' in caplog.text
    caplog.clear()
    run.evaluate(_rows().filter(pl.col("bought").is_in(["yes", "no"])))
    run.predict(_rows())
    assert "neither" not in caplog.text


def test_the_way_out_makes_them_bad_rows(tmp_path: Path) -> None:
    _rows().write_csv(tmp_path / "t.csv")
    data = zg.DataConfig(train=(str(tmp_path / "t.csv"),), bad_rows=BadRowPolicy.QUARANTINE)
    found = zg.prepare(data, schema=_schema(negative="no"), folder=tmp_path / "prepared").summary
    assert sum(found.quarantined.values()) == 60
    assert not any("neither" in each for each in found.warnings)


def test_a_label_of_two_texts_says_nothing_and_of_many_all_are_counted(tmp_path: Path) -> None:
    rows = _rows().with_columns(bought=pl.Series(["yes", "no"] * 300))
    rows.write_csv(tmp_path / "two.csv")
    two = zg.prepare(zg.DataConfig(train=(str(tmp_path / "two.csv"),)), schema=_schema(), folder=tmp_path / "a")
    assert not any("neither" in each for each in two.summary.warnings)
    rows.with_columns(bought=pl.Series(["yes"] + [f"n{row}" for row in range(599)])).write_csv(tmp_path / "many.csv")
    many = zg.prepare(zg.DataConfig(train=(str(tmp_path / "many.csv"),)), schema=_schema(), folder=tmp_path / "b")
    (note,) = [each for each in many.summary.warnings if "neither" in each]
    assert "label 'bought': 598 of 600 rows" in note


def test_a_blank_label_is_no_negative(tmp_path: Path) -> None:
    _rows().with_columns(bought=pl.Series(["yes", "no", " "] * 200)).write_csv(tmp_path / "t.csv")
    with pytest.raises(DataError, match="nothing"):
        zg.prepare(zg.DataConfig(train=(str(tmp_path / "t.csv"),)), schema=_schema(), folder=tmp_path / "prepared")
