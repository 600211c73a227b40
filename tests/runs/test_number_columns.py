"""Columns whose numbers are written in ways of their own: from the file to training, scores, exports and requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.serving.shop import SETTINGS
from ziggurat.cli.main import main
from ziggurat.data.raw.written_numbers import DecimalMark
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import DataError, RequestError, SchemaError
from ziggurat.features.schema_io import schema_from_toml
from ziggurat.files import read_text
from ziggurat.models import MLPConfig
from ziggurat.serving.answering.live_items import ItemChanges

TOML = """
[[feature]]
name = "user_id"
kind = "categorical"

[[feature]]
name = "income"
kind = "dense"

[[feature]]
name = "item"
kind = "categorical"

[[feature]]
name = "price"
kind = "dense"

[[feature]]
name = "discount"
kind = "dense"

[[feature]]
name = "age"
kind = "dense"

[[label]]
name = "spent"
task = "regression"

[[extra]]
name = "teacher"

[[number]]
column = "income"
decimal = "comma"
thousands = "point"

[[number]]
column = "price"
thousands = "comma"
signs = "strip"

[[number]]
column = "discount"
signs = "strip"

[[number]]
column = "spent"
thousands = "apostrophe"

[[number]]
column = "teacher"
thousands = "comma"

[[number]]
column = "weight"
signs = "strip"

[roles]
group = "user_id"
weight = "weight"

[items]
id = "item"
features = ["item", "price", "discount"]
"""
FORMS = {
    "income": lambda value: f"{value:,.1f}".translate(str.maketrans(",.", ".,")),
    "price": lambda value: f"${value:,.2f}",
    "discount": lambda value: f"{100 * value:g} %",
    "spent": lambda value: f"{value:,.1f}".replace(",", "'"),
    "teacher": lambda value: f"{value:,.1f}",
    "weight": lambda value: f"{100 * value:g}%",
    "age": lambda value: f"{value:.1f}".replace(".", ","),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pl.DataFrame, pl.DataFrame]:
    """Rows with numbers, the same rows with texts, and a run on a file of the latter with its export."""
    place = tmp_path_factory.mktemp("numbers")
    draw = np.random.default_rng(0)
    user = draw.integers(0, 30, 500)
    item = draw.integers(0, 20, 500)
    rows = pl.DataFrame({"user_id": user, "income": 900.0 + 150 * user, "item": [f"i{each}" for each in item]})
    rows = rows.with_columns(
        price=pl.Series(500.25 + 100 * item),
        discount=pl.Series(item % 4 / 4),
        age=pl.Series(20.5 + user % 7),
        spent=pl.Series(1000.5 + 10.0 * user + 5.0 * item),
        teacher=pl.Series(1200.5 + item),
        weight=pl.Series(0.5 + (user % 2) / 4),
    )
    texts = rows.with_columns(pl.col(name).map_elements(form, pl.String) for name, form in FORMS.items())
    texts.write_csv(place / "events.csv", separator=";")
    (place / "schema.toml").write_text(TOML)
    config = zg.RunConfig(
        data=zg.DataConfig(train=(str(place / "events.csv"),), separator=";", decimal=DecimalMark.COMMA),
        table_schema=zg.read_schema(place / "schema.toml"),
        model=zg.DCNv2Config(
            embedding_dim=4,
            deep=MLPConfig(hidden_dims=(8,)),
            embedding=EmbeddingConfig(kernel=KernelChoice.TORCH),
        ),
        training=SETTINGS,
    )
    zg.train_run(config, folder=place / "run")
    zg.export_run(place / "run", out=place / "export", config=zg.ExportConfig(golden=4, program=False))
    return place, rows, texts


def test_every_number_is_what_was_written(made: tuple[Path, pl.DataFrame, pl.DataFrame]) -> None:
    place, rows, texts = made
    schema = zg.read_schema(place / "schema.toml")
    config = zg.DataConfig(train=(str(place / "events.csv"),), separator=";", decimal=DecimalMark.COMMA)
    data = zg.prepare(config, schema=schema, folder=place / "prepared")
    (chunk,) = config.source(config.train).frames(columns=schema.training_columns)
    assert chunk.frame["price"].to_list() == texts["price"].to_list()
    encoded = data.preprocessing.encode(chunk)
    for name, column in {"spent": "label:spent", "teacher": "extra:teacher", "weight": "weight:"}.items():
        assert encoded[column].to_numpy() == pytest.approx(rows[name].to_numpy(), abs=1e-4), name
    others = data.preprocessing.encode(type(chunk).of(rows))
    for name in ("income", "price", "discount", "age"):
        assert encoded[name].to_numpy() == pytest.approx(others[name].to_numpy(), abs=1e-6), name
        assert len(np.unique(encoded[name].to_numpy())) > 3


def test_files_frames_dicts_and_requests_are_read_as_the_schema_says(
    made: tuple[Path, pl.DataFrame, pl.DataFrame],
) -> None:
    place, rows, texts = made
    run = zg.load_run(place / "run")
    rec = zg.Recommender.load(place / "export")
    of_rows = run.predict(rows)
    of_file = run.predict([str(place / "events.csv")])
    assert isinstance(of_rows, pl.DataFrame)
    assert isinstance(of_file, pl.DataFrame)
    expected = of_rows["spent"].to_numpy()
    assert of_file["spent"].to_numpy() == pytest.approx(expected, rel=1e-5)
    head = texts.head(40)
    for scorer in (run, rec):
        for given in (head, rows.head(40), head.to_pandas(), head.to_dict(as_series=False)):
            assert scorer.scores(given)[:, 0] == pytest.approx(expected[:40], rel=1e-5)
    mixed = head.head(2).to_dict(as_series=False)
    mixed["income"] = [rows["income"][0], mixed["income"][1]]
    mixed["price"] = [mixed["price"][0], rows["price"][1]]
    assert run.scores(mixed)[:, 0] == pytest.approx(expected[:2], rel=1e-5)
    metrics = run.evaluate(texts).metrics
    assert metrics == pytest.approx(run.evaluate(rows).metrics, rel=1e-5)
    assert run.importance(texts).baseline == pytest.approx(run.importance(rows).baseline, rel=1e-5)
    for number in range(0, 40, 9):
        row = texts.row(number, named=True)
        user = {name: row[name] for name in ("user_id", "income", "age")}
        item = {name: row[name] for name in ("item", "price", "discount")}
        of_text = rec.rank(user, [item]).items[0].score
        assert rec.rank({"user_id": row["user_id"]}, [row["item"]]).items[0].score == pytest.approx(of_text, rel=1e-5)
        assert of_text == pytest.approx(expected[number], rel=1e-5)
    assert rec.check_golden() == 4


def test_items_of_an_export_are_numbers_and_change_by_the_same_marks(
    made: tuple[Path, pl.DataFrame, pl.DataFrame],
) -> None:
    place, rows, _ = made
    rec = zg.Recommender.load(place / "export")
    item = rows.row(0, named=True)
    assert rec.item(item["item"])["price"] == item["price"]
    assert rec.item(item["item"])["discount"] == item["discount"]
    rec.change_items(ItemChanges(upsert=({"item": "new", "price": "$1,234.50", "discount": "12%"},)))
    assert (rec.item("new")["price"], rec.item("new")["discount"]) == (1234.5, 0.12)
    with pytest.raises(RequestError, match="a comma between thousands"):
        rec.rank({"user_id": 1}, [{"item": "i1", "price": "1.234,5"}])
    with pytest.raises(RequestError, match="a comma before the fraction"):
        rec.rank({"user_id": 1, "age": "20.5"}, ["i1"])


def test_a_text_of_another_way_is_a_bad_row(made: tuple[Path, pl.DataFrame, pl.DataFrame]) -> None:
    place, _, texts = made
    run = zg.load_run(place / "run")
    wrong = texts.head(3).with_columns(income=pl.lit("1,200.5"))
    with pytest.raises(DataError, match=r"a point between thousands[\s\S]*row 0, column 'income'"):
        run.predict(wrong)


def test_the_block_is_named_where_a_file_is_written_otherwise(
    made: tuple[Path, pl.DataFrame, pl.DataFrame], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, rows, texts = made
    texts = texts.with_columns(income=rows["income"].map_elements(lambda each: f"{each:,.2f}", pl.String))
    path = tmp_path / "otherwise.csv"
    texts.write_csv(path, separator=";")
    flags = ["--data.decimal", "point", "--data.thousands", "comma"]
    assert main(["predict", str(place / "run"), str(path), "--out", str(tmp_path / "out.csv"), *flags]) == 2
    said = capsys.readouterr()
    assert "--data.decimal, --data.thousands counts for the other columns" in said.out
    assert "'income'" in said.out
    assert "correct the [[number]] of the column to" in said.err
    assert "--data.decimal" not in said.err
    # The line of Python for the schema of a trained run leads to the numbers that were meant.
    (line,) = [each for each in said.err.splitlines() if ".write_parquet(" in each]
    code = line[line.index("df.with_columns") :].replace("'numbers.parquet'", f"'{tmp_path / 'numbers.parquet'}'")
    eval(code, {"df": pl.read_csv(path, infer_schema=False, separator=";"), "pl": pl})  # noqa: S307  it is the line that the error printed
    assert pl.read_parquet(tmp_path / "numbers.parquet")["income"].to_list() == rows["income"].to_list()


def test_the_schema_of_a_run_keeps_them_and_one_without_is_as_before(
    made: tuple[Path, pl.DataFrame, pl.DataFrame],
) -> None:
    place, _, _ = made
    schema = zg.read_schema(place / "schema.toml")
    assert zg.load_run(place / "run").preprocessing.schema.numbers == schema.numbers
    assert len(schema.numbers) == 6
    text = read_text(zg.write_schema(schema, place / "again.toml"), what="a schema", error=SchemaError, ways_out=())
    assert schema_from_toml(text, "again.toml") == schema
    plain = zg.Schema(features=(zg.Dense(name="price"),))
    assert "numbers" not in plain.to_state()
    assert "[[number]]" not in zg.write_schema(plain, place / "plain.toml").read_text()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ('[[number]]\ncolumn = "prise"', 'column = "price": that is the nearest name'),
        ('[[number]]\ncolumn = "user_id"', "take the block out"),
        ('[[number]]\ncolumn = "price"\ndecimal = "comma"\nthousands = "comma"', "two marks"),
        ('[[number]]\ncolumn = "price"\n[[number]]\ncolumn = "price"', "more than once"),
        ('[[number]]\ncolumn = "price"\n[[number]]\ncolumn = "price"', "remove the others"),
        ('[[number]]\ncolumn = "price"\ndecimals = "comma"', "decimal"),
        ('[[number]]\nname = "price"', "column"),
    ],
)
def test_a_block_that_does_nothing_is_refused(block: str, message: str) -> None:
    text = '[[feature]]\nname = "user_id"\nkind = "categorical"\n[[feature]]\nname = "price"\nkind = "dense"\n'
    with pytest.raises(SchemaError) as refused:
        schema_from_toml(text + block, "my.toml")
    assert message in str(refused.value)
    assert "my.toml" in str(refused.value)


def test_inspect_writes_them_for_columns_that_differ_and_training_reads_by_them(tmp_path: Path) -> None:
    values = [1000.5 + row * 37 for row in range(300)]
    english = [f"{each:,.1f}" for each in values]
    german = [each.translate(str.maketrans(",.", ".,")) for each in english]
    columns = {"click": [row % 2 for row in range(300)], "one": german, "two": german, "odd": english}
    columns |= {
        "three": german,
        "four": german,
        "fee": [f"${each:,.2f}" for each in values],
        "plain": [str(each) for each in values],
    }
    pl.DataFrame(columns).write_csv(tmp_path / "t.csv", separator=";")
    found = zg.inspect_file(tmp_path / "t.csv")
    assert {each.column: each.thousands.value for each in found.schema.numbers} == {
        "odd": "comma",
        "fee": "comma",
        "plain": "none",
    }
    notes = [each for each in found.warnings if "another way" in each]
    assert [each.partition(":")[0] for each in notes] == ["'odd'", "'fee'", "'plain'"]
    written = zg.write_schema(found.schema, tmp_path / "my.toml", comments=found.explanations)
    schema = zg.read_schema(written)
    assert schema == found.schema
    numbers = found.numbers
    config = zg.DataConfig(
        train=(str(tmp_path / "t.csv"),), separator=";", decimal=numbers.decimal, thousands=numbers.thousands
    )
    data = zg.prepare(config, schema=schema, folder=tmp_path / "prepared")
    (chunk,) = config.source(config.train).frames(columns=schema.columns)
    encoded = data.preprocessing.encode(chunk)
    assert len({tuple(encoded[name].to_pylist()) for name in columns if name != "click"}) == 1
    of_frame = zg.inspect_file(pl.DataFrame(columns).drop("plain"))
    assert of_frame.schema.numbers == found.schema.numbers[:2]


def test_an_error_names_the_block_that_reads_the_column_and_it_does(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    texts = ["1,200", "950", "12,345"] * 4
    pl.DataFrame({"x": texts, "y": ["3.5"] * 12, "click": [0, 1] * 6}).write_csv(path)
    toml = '[[feature]]\nname = "x"\nkind = "dense"\n[[feature]]\nname = "y"\nkind = "dense"\n'
    toml += '[[label]]\nname = "click"\n'
    config = zg.DataConfig(train=(str(path),))
    with pytest.raises(DataError) as refused:
        zg.prepare(config, schema=schema_from_toml(toml, "a"), folder=tmp_path / "prepared")
    (way,) = [each for each in refused.value.ways_out if "[[number]]" in each and "'1,200' is 1200" in each]
    block = way[way.index("[[number]]") :].replace(", and below it ", "\n").replace(" and ", "\n")
    data = zg.prepare(config, schema=schema_from_toml(toml + block, "b"), folder=tmp_path / "prepared")
    (chunk,) = config.source(config.train).frames(columns=["x", "y", "click"])
    plain = type(chunk).of(pl.DataFrame({"x": [1200.0, 950.0, 12345.0] * 4, "y": [3.5] * 12, "click": [0, 1] * 6}))
    assert data.preprocessing.encode(chunk)["x"].equals(data.preprocessing.encode(plain)["x"])
