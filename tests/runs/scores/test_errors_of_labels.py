"""Errors of the label of rows to evaluate speak of the label, and no way out turns it round."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import polars as pl
import pytest

import ziggurat as zg
from tests.serving.shop import SETTINGS
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import DataError, SchemaError
from ziggurat.models import LogisticRegressionConfig
from ziggurat.runs.load import Run

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="channel"), zg.Dense(name="price")),
    labels=(zg.Label(name="cancelled", positive="yes", negative="no"),),
)
ROWS = pl.DataFrame(
    {"channel": ["web", "app"] * 100, "price": [1.0, 2.0, 3.0, 4.0] * 50, "cancelled": ["yes", "no", "no", "yes"] * 50}
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose label is yes or no."""
    place = tmp_path_factory.mktemp("labels")
    model = LogisticRegressionConfig(embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
    config = zg.RunConfig(data=zg.DataConfig(), table_schema=SCHEMA, model=model, training=SETTINGS)
    zg.train_run(config, folder=place / "run", data=ROWS)
    return zg.load_run(place / "run")


def test_rows_without_the_label_are_refused_in_words_of_the_label(run: Run, tmp_path: Path) -> None:
    for ask in (run.evaluate, run.importance):
        with pytest.raises(SchemaError, match="a column 'cancelled', the label 'cancelled' of the run") as absent:
            ask(ROWS.drop("cancelled"))
        assert "channel' to" not in str(absent.value), "a feature is not the label"
        for never in ("empty", "train again", "--"):
            assert never not in str(absent.value)
        assert "run.predict(frame)" in str(absent.value)
    with pytest.raises(SchemaError, match="rename 'canceled' to 'cancelled'"):
        run.evaluate(ROWS.rename({"cancelled": "canceled"}))
    ROWS.drop("cancelled").write_csv(tmp_path / "rows.csv")
    with pytest.raises(SchemaError, match="the label 'cancelled' of the run") as absent:
        run.evaluate([tmp_path / "rows.csv"])
    assert "channel' to" not in str(absent.value)


def test_zero_and_one_for_yes_and_no_have_a_way_out_that_keeps_their_meaning(run: Run, tmp_path: Path) -> None:
    expected = run.evaluate(ROWS).metrics
    truth = ROWS.with_columns(pl.col("cancelled") == "yes")
    for given in (truth, truth.with_columns(pl.col("cancelled").cast(pl.Int64)), truth.to_pandas()):
        with pytest.raises(DataError, match="'yes' or 'no', for label 'cancelled'") as wrong:
            run.evaluate(given)
        assert "negative" not in str(wrong.value)
        assert "--" not in str(wrong.value)
        pandas, polars = (way.split(": ", 1)[1] for way in wrong.value.ways_out[:2])
        frame = given if isinstance(given, pl.DataFrame) else pl.from_pandas(given)
        assert run.evaluate(eval(polars, {"frame": frame, "pl": pl})).metrics == expected  # noqa: S307
        names = {"frame": frame.to_pandas(), "pd": pd}
        exec(pandas, names)
        assert run.evaluate(names["frame"]).metrics == expected
    truth.with_columns(pl.col("cancelled").cast(pl.Int64)).write_csv(tmp_path / "rows.csv")
    with pytest.raises(DataError, match="write 'yes' and 'no' into the column") as wrong:
        run.evaluate([tmp_path / "rows.csv"])
    assert "negative" not in str(wrong.value)


def test_rows_whose_label_is_empty_are_named_with_a_way_to_leave_them_out(run: Run) -> None:
    frame = ROWS.with_columns(cancelled=pl.when(pl.int_range(200) > 20).then("cancelled"))
    with pytest.raises(DataError, match=r"found:    nothing: it is empty") as empty:
        run.evaluate(frame)
    for way in empty.value.ways_out[:2]:
        table = frame.to_pandas() if "pandas" in way else frame
        assert run.evaluate(eval(way.split(": ", 1)[1], {"frame": table})).num_rows == 179  # noqa: S307
