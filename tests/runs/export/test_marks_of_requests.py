"""Texts of numbers in requests are read as those in the files of the run: decimal commas, marks between thousands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.serving.shop import SETTINGS
from ziggurat.data.raw.written_numbers import DecimalMark, ThousandsMark, WrittenColumns, WrittenNumbers
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import DataError, RequestError
from ziggurat.features.items import Items
from ziggurat.models import MLPConfig
from ziggurat.serving.answering.chain import ChainSettings
from ziggurat.serving.answering.live_items import ItemChanges
from ziggurat.serving.request_rows import in_plain_numbers

SCHEMA = zg.Schema(
    features=(
        zg.Categorical(name="user_id"),
        zg.Dense(name="income"),
        zg.Categorical(name="item"),
        zg.Dense(name="price"),
    ),
    labels=(zg.Label(name="like"),),
    group="user_id",
    items=Items(id="item", features=("item", "price")),
)
GERMAN = WrittenNumbers(decimal=DecimalMark.COMMA, thousands=ThousandsMark.POINT)


def german(value: float) -> str:
    """The number as in 1.234,5."""
    return f"{value:,.1f}".translate(str.maketrans(",.", ".,"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, zg.Recommender, pl.DataFrame]:
    """A run on a German file, its export, and the rows."""
    place = tmp_path_factory.mktemp("german")
    draw = np.random.default_rng(0)
    user = draw.integers(0, 30, 600)
    item = draw.integers(0, 20, 600)
    income = 900.0 + 150 * user
    price = 500.5 + 100 * item
    like = ((income > 3000) ^ (price > 1500)).astype(int)
    rows = pl.DataFrame({"user_id": user, "income": income, "item": [f"i{each}" for each in item], "price": price})
    rows = rows.with_columns(like=pl.Series(like))
    written = rows.with_columns(pl.col(name).map_elements(german, pl.String) for name in ("income", "price"))
    written.write_csv(place / "events.csv", separator=";")
    tables = EmbeddingConfig(kernel=KernelChoice.TORCH)
    model = zg.DCNv2Config(embedding_dim=4, deep=MLPConfig(hidden_dims=(8,)), embedding=tables)
    data = zg.DataConfig(
        train=(str(place / "events.csv"),),
        separator=";",
        decimal=DecimalMark.COMMA,
        thousands=ThousandsMark.POINT,
    )
    zg.train_run(zg.RunConfig(data=data, table_schema=SCHEMA, model=model, training=SETTINGS), folder=place / "run")
    zg.export_run(place / "run", out=place / "export", config=zg.ExportConfig(golden=4, program=False))
    return place, zg.Recommender.load(place / "export"), rows


def test_a_known_user_is_scored_as_in_the_run(exported: tuple[Path, zg.Recommender, pl.DataFrame]) -> None:
    place, rec, rows = exported
    scores = zg.load_run(place / "run").predict([str(place / "events.csv")])["like"].to_numpy()
    for number in range(0, 40, 7):
        row = rows.row(number, named=True)
        by_id = rec.rank({"user_id": row["user_id"]}, [row["item"]]).items[0].score
        in_text = rec.rank(
            {"user_id": row["user_id"], "income": german(row["income"])},
            [{"item": row["item"], "price": german(row["price"])}],
        )
        in_json = rec.rank({"user_id": row["user_id"], "income": row["income"]}, [row["item"]])
        assert by_id == pytest.approx(scores[number], abs=1e-6)
        assert in_text.items[0].score == pytest.approx(scores[number], abs=1e-6)
        assert in_json.items[0].score == pytest.approx(scores[number], abs=1e-6)


def test_frames_and_dicts_are_read_as_the_files_of_the_run(exported: tuple[Path, zg.Recommender, pl.DataFrame]) -> None:
    place, rec, rows = exported
    run = zg.load_run(place / "run")
    some = rows.head(40).drop("like").with_columns(income=pl.lit(1200.0), price=pl.Series([1500.5, 1.5] * 20))
    written = some.with_columns(pl.col(name).map_elements(german, pl.String) for name in ("income", "price"))
    assert written["income"][0] == "1.200,0"
    written = written.with_columns(income=pl.lit("1.200"))
    predicted = run.predict(written)
    of_numbers = run.predict(some)
    assert isinstance(predicted, pl.DataFrame)
    assert isinstance(of_numbers, pl.DataFrame)
    expected = predicted["like"].to_numpy()
    assert of_numbers["like"].to_numpy() == pytest.approx(expected, abs=1e-6), "numbers stay as they are"
    for scorer in (run, rec):
        for given in (some, written, written.to_pandas(), written.to_dict(as_series=False)):
            assert scorer.scores(given)[:, 0] == pytest.approx(expected, abs=1e-6)
    ranked = rec.rank({"user_id": 1, "income": "1.200"}, written.select("item", "price").head(1))
    plain = rec.rank({"user_id": 1, "income": 1200}, some.select("item", "price").head(1))
    assert ranked.items[0].score == plain.items[0].score


def test_what_a_frame_cannot_have_is_refused_in_words_of_python(
    exported: tuple[Path, zg.Recommender, pl.DataFrame],
) -> None:
    place, rec, rows = exported
    run = zg.load_run(place / "run")
    texts = rows.head(3).with_columns(price=pl.Series(["1.5", "2.5", "3.5"]))
    for ask in (run.scores, rec.scores, run.predict, run.evaluate, run.importance):
        with pytest.raises(DataError, match="a comma before the fraction") as refused:
            ask(texts)
        assert "row 0, column 'price'" in refused.value.where
        assert "give the column as numbers" in str(refused.value)
        assert "--data" not in str(refused.value)
        assert "schema" not in str(refused.value)
    for way_out in (texts.with_columns(pl.col("price").cast(pl.Float64)), texts.with_columns(price=None)):
        assert run.scores(way_out).shape == (3, 1)


def test_a_text_that_the_files_could_not_have_is_refused(exported: tuple[Path, zg.Recommender, pl.DataFrame]) -> None:
    _, rec, _ = exported
    with pytest.raises(RequestError, match="a comma before the fraction") as refused:
        rec.rank({"user_id": 1, "income": "1018.5"}, ["i3"])
    assert refused.value.where == "request, column 'income'"
    with pytest.raises(RequestError, match="'price'"):
        rec.rank({"user_id": 1}, [{"item": "i3", "price": "12,5.0"}])
    assert rec.rank({"user_id": 1, "income": ""}, ["i3"]).items, "missing, as ever"


def test_a_truth_value_is_one_or_zero_in_a_column_of_numbers(
    exported: tuple[Path, zg.Recommender, pl.DataFrame],
) -> None:
    _, rec, _ = exported
    asked = [rec.rank({"user_id": 1, "income": income}, ["i3"]).items[0].score for income in (True, 1, "true", 0)]
    assert asked[0] == asked[1] == asked[2] != asked[3]


def test_a_zero_before_a_mark_between_thousands_is_refused_by_a_run_and_its_export(
    exported: tuple[Path, zg.Recommender, pl.DataFrame],
) -> None:
    place, rec, rows = exported
    run = zg.load_run(place / "run")
    for text in ("0.500", "00.500", "000.500", "1.12.345"):
        with pytest.raises(RequestError, match="'price'"):
            rec.rank({"user_id": 1}, [{"item": "i3", "price": text}])
        texts = rows.head(1).with_columns(price=pl.lit(text), income=pl.lit("1.200"))
        for ask in (run.scores, rec.scores):
            with pytest.raises(DataError, match="column 'price'"):
                ask(texts)


def test_texts_of_other_files_than_the_runs_are_numbers_by_their_own_marks(
    exported: tuple[Path, zg.Recommender, pl.DataFrame],
) -> None:
    _, rec, _ = exported
    row = {"user_id": "1.5", "income": "1200.5"}
    assert rec.with_numbers(row, written=WrittenNumbers()) == {"user_id": "1.5", "income": 1200.5}
    with pytest.raises(RequestError, match="'income'"):
        rec.with_numbers({"income": "1.200,5"}, written=WrittenNumbers())


def test_examples_of_an_export_are_requests_that_it_answers(
    exported: tuple[Path, zg.Recommender, pl.DataFrame],
) -> None:
    _, rec, _ = exported
    example = {column.name: column.example for column in rec.info().user_columns if column.example is not None}
    assert isinstance(example["income"], float)
    assert rec.rank(example, ["i3"]).items
    assert rec.check_golden() == 4


def test_items_that_change_are_read_by_the_same_marks(exported: tuple[Path, zg.Recommender, pl.DataFrame]) -> None:
    place, _, _ = exported
    rec = zg.Recommender.load(place / "export")
    rec.change_items(ItemChanges(upsert=({"item": "new", "price": "1.234,5"},)))
    assert rec.item("new")["price"] == 1234.5
    with pytest.raises(RequestError, match="a comma before the fraction"):
        rec.change_items(ItemChanges(upsert=({"item": "new", "price": "1234.5"},)))


def test_marks_stand_in_the_export_and_plain_ones_are_the_default(
    exported: tuple[Path, zg.Recommender, pl.DataFrame], tmp_path: Path
) -> None:
    _, rec, _ = exported
    assert rec.chain.settings.written == GERMAN
    ChainSettings(formula="like", written=GERMAN).write(tmp_path / "chain.json")
    assert ChainSettings.read(tmp_path / "chain.json").written == GERMAN
    row = {"age": "1.5", "name": "a"}
    assert in_plain_numbers(row, columns={"age"}, written=WrittenColumns()) is row
    german = WrittenColumns(files=GERMAN)
    assert in_plain_numbers({"age": "1.500"}, columns={"age"}, written=german) == {"age": 1500.0}
