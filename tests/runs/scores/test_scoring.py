"""Scoring: files or frames in, the same out; kept columns, unknown ids, and rows that were trained on."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch

import ziggurat
from tests.end_to_end.test_main_job import SMALL, events
from ziggurat.cli.main import main
from ziggurat.data.raw.source import FileFormat
from ziggurat.data.raw.written_numbers import DecimalMark
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.models.converted import take_precision
from ziggurat.precision import Precision
from ziggurat.runs.data_record import DataRecord, known_files
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.scores.scoring import FileReading
from ziggurat.studies.compare_finished import compare_finished
from ziggurat.training.records.run_folder import STARTUP, RunFolder, read_evaluation
from ziggurat.training.report.progress import NoProgress

SCHEMA = ziggurat.Schema(
    features=(
        ziggurat.Categorical(name="user_id"),
        ziggurat.Categorical(name="item"),
        ziggurat.Dense(name="price"),
    ),
    labels=(ziggurat.Label(name="click"),),
    time="timestamp",
)
TINY = ["--model.top.hidden-dims", "8", "--model.bottom.hidden-dims", "8", "--model.embedding-dim", "4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with data, and a finished run of one epoch in runs/a. Tests write under names of their own."""
    place = tmp_path_factory.mktemp("scoring")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("ZIGGURAT_CACHE", str(place / "cache"))
        events(3000).write_parquet("events.parquet")
        ziggurat.write_schema(SCHEMA, "my.toml")
        train = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/a"]
        assert main([*train, "--training.epochs", "1", *SMALL, *TINY]) == 0
        yield place


def today(num_rows: int = 500) -> pl.DataFrame:
    """Rows that were not trained on, 100 users and one item of them new."""
    new = events(num_rows, seed=3)
    user = pl.when(pl.int_range(pl.len()) < 100).then(pl.col("user_id") + 10_000).otherwise(pl.col("user_id"))
    item = pl.when(pl.int_range(pl.len()) == 7).then(pl.lit("never")).otherwise(pl.col("item"))
    return new.with_columns(user_id=user, item=item)


def test_a_run_is_evaluated_with_rounded_products(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = load_run("runs/a")
    cast = load_run("runs/a", precision=Precision("mx4"))
    by_hand = load_run("runs/a")
    take_precision(by_hand.model, Precision("mx4"))
    found = cast.evaluate_split("test").metrics
    assert found == by_hand.evaluate_split("test").metrics
    assert found["log_loss"] != plain.evaluate_split("test").metrics["log_loss"]
    assert load_run("runs/a", precision=Precision.FP32).evaluate_split("test").metrics == (
        plain.evaluate_split("test").metrics
    )
    assert main(["evaluate", "runs/a", "--split", "test", "--precision", "mx4", "--json", "mx4.json"]) == 0
    assert "dense products in mx4" in capsys.readouterr().out
    written = read_evaluation(Path("mx4.json"))
    assert written["precision"] == "mx4"
    assert written["metrics"] == found


def test_a_run_that_was_trained_in_few_bits_says_once_that_it_is_scored_in_fp32(
    trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = ["train", "table_dlrm", "--data.train", "events.parquet", "--schema", "my.toml", "--out", "runs/in_mx9"]
    assert main([*train, "--training.epochs", "1", "--precision", "mx9", *SMALL, *TINY]) == 0
    caplog.clear()
    today().write_parquet("today.parquet")
    split = ["evaluate", "runs/in_mx9", "--split", "test"]
    for name in ("mx9", "fp32"):
        assert main([*split, "--precision", name]) == 0
        assert "was trained with products" not in caplog.text
    for verb in (split, ["predict", "runs/in_mx9", "today.parquet", "--out", "scores.csv"]):
        assert main(verb) == 0
        said = [
            each for each in caplog.messages if "computed in FP32; the run was trained with products in mx9" in each
        ]
        assert len(said) == 1
        assert "evaluate --precision mx9" in said[0]
    load_run("runs/a")
    assert not [each for each in caplog.messages if each.startswith("a: ")]


def test_precisions_that_score_nothing_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = ["evaluate", "runs/a", "--split", "test", "--precision"]
    for name, way_out in (("bf16", "bf16_emulated"), ("tf32", "--precision fp32"), ("mx99", 'did you mean "mx9"')):
        assert main([*split, name]) == 2
        assert way_out in capsys.readouterr().err
    assert main([*split, "mx9", "--report"]) == 2
    assert "leave --report out" in capsys.readouterr().err


def test_a_frame_comes_back_as_its_kind(trained: Path) -> None:
    run, frame = load_run("runs/a"), today()
    expected = run.scores(frame)[:, 0]
    scored = run.predict(frame, keep=("user_id", "tags"))
    assert scored.columns == ["row", "user_id", "tags", "click"]
    assert scored["row"].to_list() == list(range(500))
    assert scored["user_id"].equals(frame["user_id"])
    assert scored["tags"].equals(frame["tags"])
    np.testing.assert_array_equal(scored["click"].to_numpy(), expected)
    arrow = run.predict(frame.to_arrow(), keep="item")
    assert isinstance(arrow, pa.Table)
    assert arrow["item"].to_pylist() == frame["item"].to_list()
    as_dict = run.predict(frame.to_dict(as_series=False))
    assert list(as_dict) == ["row", "click"]
    np.testing.assert_array_equal(np.float32(as_dict["click"]), expected)
    np.testing.assert_array_equal(run.scores(frame.to_dict(as_series=False))[:, 0], expected)
    assert run.predict(frame.clear(), keep=("item",)).schema == scored.clear().select("row").schema | {
        "item": pl.String(),
        "click": pl.Float32(),
    }
    with pytest.raises(DataError, match="a frame of polars or pandas"):
        run.predict(type("Thing", (), {"columns": ["a"]})())


def test_unknown_ids_of_frames_are_said_call_by_call(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, frame = load_run("runs/a"), today()
    known = events(20)
    said = "unknown ids: user_id 100 of 500 (20.0%), item 1 of 500 (0.2%)"
    for call in (run.scores, run.predict, run.evaluate):
        caplog.clear()
        call(frame)
        assert caplog.messages == [said], call
        caplog.clear()
        call(known)
        assert not caplog.messages, call


def test_a_frame_of_pandas_keeps_its_index(trained: Path) -> None:
    pandas = pytest.importorskip("pandas")
    run, frame = load_run("runs/a"), today(50)
    given = frame.to_pandas().set_index(pandas.Index([f"r{row}" for row in range(50)], name="key"))
    scored = run.predict(given, keep=("user_id",))
    assert isinstance(scored, pandas.DataFrame)
    assert list(scored.columns) == ["row", "user_id", "click"]
    assert scored.index.equals(given.index)
    assert (scored["user_id"] == given["user_id"]).all()
    np.testing.assert_array_equal(scored["click"].to_numpy(), run.scores(frame)[:, 0])
    assert run.evaluate(given).metrics == run.evaluate(frame).metrics


def test_bad_rows_that_are_put_aside_do_not_shift_kept_columns(trained: Path) -> None:
    run = load_run("runs/a")
    frame = today(20).with_columns(price=pl.Series([1.0, float("inf")] * 10))
    scored = run.predict(frame, keep=("user_id",), bad_rows=ziggurat.DataConfig(train=("x",)).bad_rows.QUARANTINE)
    assert scored["row"].to_list() == list(range(0, 20, 2))
    assert scored["user_id"].to_list() == frame["user_id"].to_list()[::2]


def test_every_verb_that_scores_counts_the_rows_that_it_puts_aside(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = today(50).drop("tags")
    good.write_csv("with_bad.csv")
    with Path("with_bad.csv").open("a") as file:
        file.write("1,2\n")
    commands = (
        ("predict", "runs/a", "with_bad.csv", "--out", "with_bad_scores.csv"),
        ("evaluate", "runs/a", "with_bad.csv"),
        ("importance", "runs/a", "--data", "with_bad.csv", "--rounds", "1"),
    )
    for command in commands:
        assert main([*command, "--bad-rows", "quarantine"]) == 0
        said = capsys.readouterr()
        found = re.search(r"1 row put aside: (\S+)", said.out + said.err)
        assert found, command
        assert json.loads(Path(found[1]).read_text())["found"] == "1,2"
    good.write_csv("with_bad.csv")
    assert main([*commands[0], "--bad-rows", "quarantine"]) == 0
    said = capsys.readouterr()
    assert "put aside" not in said.out + said.err


def test_a_text_file_stays_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids with leading zeros and numbers as they are written come back as they came, over several files."""
    frame = today().drop("tags").with_columns(user_id=pl.format("00{}", "user_id"), price=pl.format("{}0", "price"))
    frame.slice(0, 300).write_csv("today_1.csv")
    frame.slice(300).write_csv("today_2.csv")
    predict = ["predict", "runs/a", "today_1.csv", "today_2.csv", "--keep", "user_id, price,click"]
    assert main([*predict, "--out", "scores.csv"]) == 0
    said = capsys.readouterr().out
    assert "500 rows scored into scores.csv" in said
    found = pl.read_csv("scores.csv", infer_schema=False)
    assert found.columns == ["row", "user_id", "price", "click", "click_score"]
    assert found["row"].to_list() == [str(row) for row in range(500)]
    assert found["user_id"].equals(frame["user_id"])
    assert found["price"].equals(frame["price"])
    assert main([*predict, "--out", "scores.parquet"]) == 0
    scores = pl.read_parquet("scores.parquet")
    assert scores.columns == found.columns
    np.testing.assert_array_equal(found["click_score"].cast(pl.Float32), scores["click_score"])
    assert main([*predict, "--out", "scores.tsv"]) == 0
    assert pl.read_csv("scores.tsv", separator="\t", infer_schema=False).equals(found)


def test_unknown_ids_are_counted_feature_by_feature(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    today().write_parquet("today.parquet")
    events(3000).write_parquet("known.parquet")
    for verb in (["predict", "--out", "scores.parquet"], ["evaluate"]):
        assert main([verb[0], "runs/a", "today.parquet", *verb[1:]]) == 0
        assert "unknown ids: user_id 100 of 500 (20.0%), item 1 of 500 (0.2%)\n" in capsys.readouterr().out
    assert main(["predict", "runs/a", "known.parquet", "--out", "scores.parquet"]) == 0
    assert "unknown ids: none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keep", "out", "words"),
    [
        (("users",), "a.csv", "did you mean 'user_id'|user_id"),
        (("user_id", "user_id"), "a.csv", "each named once"),
        (("tags",), "a.csv", "plain columns"),
        ((), "scores.xlsx", "ends in .parquet, .csv or .tsv"),
        ((), "scores.csv.gz", "ends in .parquet, .csv or .tsv"),
    ],
)
def test_what_cannot_be_written_is_refused_first(trained: Path, keep: tuple[str, ...], out: str, words: str) -> None:
    run = load_run("runs/a")
    with pytest.raises((ConfigError, SchemaError), match=words) as found:
        run.predict(today(), keep=keep, out=out)
    assert "ways out:" in str(found.value)
    assert not Path(out).exists()


def test_what_is_no_data_is_refused(trained: Path) -> None:
    run = load_run("runs/a")
    for wrong in (5, None, [1]):
        with pytest.raises(ConfigError, match="names of files"):
            run.predict(wrong)
    with pytest.raises(ConfigError, match="a RunConfig"):
        ziggurat.train_run("std.csv", folder="runs/wrong")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words", [["evaluate", "runs/a", "nolabel.csv"], ["quantise", "runs/a", "--data", "nolabel.csv"]]
)
def test_files_without_a_label_are_refused_in_the_terms_of_a_run(
    trained: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    today().select("user_id", "item", "price", clicks="click").write_csv("nolabel.csv")
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "expected: a column 'click', the label 'click' of the run" in said
    for way_out in ("rename 'clicks' to 'click'", "ziggurat predict runs/a FILE", "--split test"):
        assert way_out in said
    assert "schema" not in said


def test_files_without_a_feature_are_refused_in_the_terms_of_a_run(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    today().select("user_id", "item", "click", "timestamp", prices="price").write_csv("nofeature.csv")
    for words in (["evaluate", "runs/a", "nofeature.csv"], ["predict", "runs/a", "nofeature.csv", "--out", "s.csv"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "expected: a column 'price', which the run was trained on" in said
        for way_out in ("rename 'prices' to 'price' in the file", "add the column", "train again without the feature"):
            assert way_out in said
        assert "in the schema" not in said
    with pytest.raises(SchemaError, match="train again without the feature"):
        load_run("runs/a").predict(today().drop("price"))
    today().select("click", prices="price").write_csv("nofeatures.csv")
    assert main(["predict", "runs/a", "nofeatures.csv", "--out", "s.csv"]) == 2
    said = capsys.readouterr().err
    assert "expected: columns 'user_id', 'item', 'price', which the run was trained on" in said
    assert "1. rename 'prices' to 'price' in the file" in said
    assert "train again without these features" in said
    with pytest.raises(SchemaError, match="columns 'user_id', 'item', 'price', which the run"):
        load_run("runs/a").predict(today().select("click"))


def test_scores_never_replace_the_data(trained: Path, tmp_path: Path) -> None:
    run = load_run("runs/a")
    source = Path(run.config.data.train[0])
    mine = tmp_path / source.name
    mine.write_bytes(source.read_bytes())
    for out, words in ((mine, "that is scored"), (source, "of the run")):
        before = out.read_bytes()
        with pytest.raises(ConfigError, match=words):
            run.predict([str(mine)], out=out)
        assert out.read_bytes() == before


def test_evaluation_of_trained_rows_says_so(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("events.parquet", "copy.parquet")  # a copy holds the same rows
    today().write_parquet("today.parquet")
    for file in ("events.parquet", "copy.parquet", "co*.parquet"):
        assert main(["evaluate", "runs/a", file]) == 0
        said = " ".join("".join(capsys.readouterr()).split())
        assert "is data of this run: 2,400 of the 3,000 rows of that data were trained on" in said
        assert "ziggurat evaluate runs/a --split test" in said
    assert main(["evaluate", "runs/a", "today.parquet"]) == 0
    assert "data of this run" not in "".join(capsys.readouterr())
    Path("near.parquet").write_bytes(Path("events.parquet").read_bytes()[:-1] + b"x")  # the same size, another content
    record = DataRecord.load(RunFolder(Path("runs/a")).data)
    assert known_files(record, [Path("near.parquet"), Path("gone.parquet")]) == []
    assert known_files(None, [Path("events.parquet")]) == []


def test_roles_of_files_that_were_split_before(trained: Path) -> None:
    events(900, seed=1).write_parquet("train.parquet")
    events(300, seed=2).write_parquet("valid.parquet")
    events(301, seed=4).write_parquet("test.parquet")
    files = [f"--data.{name}={name}.parquet" for name in ("train", "valid", "test")]
    command = ["train", "table_dlrm", *files, "--data.split.by", "files", "--schema", "my.toml", "--out", "runs/files"]
    assert main([*command, "--training.epochs", "1", *SMALL, *TINY]) == 0
    record = DataRecord.load(RunFolder(Path("runs/files")).data)
    known = known_files(record, [Path(f"{name}.parquet") for name in ("train", "valid", "test")])
    assert [(each.path.stem, each.role) for each in known] == [("train", "train"), ("valid", "valid")]
    said = [each.warning(Path("runs/files")) for each in known]
    assert "all of it was trained on" in said[0]
    assert "it chose the best step" in said[1]


def test_a_split_of_the_run_gives_the_metrics_of_its_end(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("valid", "test"):
        assert main(["evaluate", "runs/a", "--split", split, "--json", "split.json"]) == 0
        found = json.loads(Path("split.json").read_text())
        stored = json.loads(RunFolder(Path("runs/a")).evaluation(split).read_text())
        assert found["metrics"] == stored["metrics"]
        assert found["num_rows"] == stored["num_rows"] == 300
    assert load_run("runs/a").evaluate_split("train").num_rows == 2400
    capsys.readouterr()
    for arguments, words in (
        (["runs/a"], "neither"),
        (["runs/a", "events.parquet", "--split", "test"], "both"),
    ):
        assert main(["evaluate", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_split_of_other_data_is_refused(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run("runs/a")
    events(3000, seed=9).write_parquet("events.parquet")
    try:
        with pytest.raises(DataError, match="data train content") as found:
            run.evaluate_split("test")
        assert "the run's own test rows" in found.value.where
        assert "--resume" not in str(found.value)
    finally:
        events(3000).write_parquet("events.parquet")


def test_embeddings_are_the_rows_of_their_ids(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run("runs/a")
    found = run.embeddings("item")
    assert sorted(found["id"]) == sorted(set(events(3000)["item"][:2400]))
    assert found.schema["vector"] == pl.Array(pl.Float32, 4)
    vocabulary = run.preprocessing.batch({"user_id": [1], "item": ["i17"], "price": [1.0]})
    row = vocabulary.single[[spec.name for spec in run.model.inputs.single].index("item"), 0]
    table = dict(run.model.named_modules())["embeddings"].table("item")
    np.testing.assert_array_equal(found.filter(pl.col("id") == "i17")["vector"][0], table[row].detach())
    assert main(["embeddings", "runs/a", "item", "--out", "items.parquet"]) == 0
    assert pl.read_parquet("items.parquet").equals(found)
    assert main(["embeddings", "runs/a", "item", "--out", "items.tsv"]) == 0
    text = pl.read_csv("items.tsv", separator="\t")
    assert text.columns == ["id", "vector_0", "vector_1", "vector_2", "vector_3"]
    np.testing.assert_array_equal(text.drop("id").cast(pl.Float32).to_numpy(), found["vector"].to_numpy())
    assert "60 ids with 4 numbers each" in capsys.readouterr().out
    for name in ("price", "nothing"):
        assert main(["embeddings", "runs/a", name, "--out", "none.parquet"]) == 2
        assert "a feature whose ids are known: user_id, item" in capsys.readouterr().err
    assert not Path("none.parquet").exists()


def test_runs_configs_and_results_show_themselves_in_short(trained: Path) -> None:
    run, frame = load_run("runs/a"), today(50)
    test = json.loads(RunFolder(Path("runs/a")).evaluation("test").read_text())["metrics"]
    assert repr(run).startswith("Run('runs/a', dlrm on events.parquet, step ")
    assert f"test: auc {test['auc']:.5f}" in repr(run)
    assert len(repr(run)) < 600
    assert f"<td>{test['auc']:.5f}</td>" in run._repr_html_()
    assert repr(run.config).startswith("RunConfig(dlrm on events.parquet, 3 features, epochs=1, batch_size=256")
    assert repr(run.preprocessing.batch(frame)).startswith("Batch(50 samples on cpu: dense (50, 1), single (2, 50)")
    inspection = ziggurat.inspect_file("events.parquet")
    assert repr(inspection).startswith("Inspection(3,000 rows, 6 columns, ")
    assert "    user_id: categorical" in repr(inspection)
    assert "<td>user_id</td>" in inspection._repr_html_()
    prepared = prepare_run(run.config)
    assert repr(prepared).startswith(f"PreparedData({str(prepared.folder)!r}\n    rows: train ")
    result = train_run(run.config, folder="runs/a", resume=True)
    assert repr(result).startswith("RunResult('runs/a', all epochs done (1), ")
    assert f"test: auc {test['auc']:.5f}" in repr(result)
    assert f"<td>{test['auc']:.5f}</td>" in result._repr_html_()
    evaluation = run.evaluate(frame)
    assert repr(evaluation).startswith(f"Evaluation(50 rows: auc {evaluation.metrics['auc']:.5f}")
    assert f"<td>auc</td><td>{evaluation.metrics['auc']:.5f}</td>" in evaluation._repr_html_()


def test_runs_that_are_compared_say_what_they_were_computed_with(trained: Path) -> None:
    shutil.copytree("runs/a", "runs/other")
    file = RunFolder(Path("runs/other")).config
    state = json.loads(file.read_text())
    settings = state.get("payload", state)
    mine = settings["model"]["embedding"]["kernel"]
    theirs = "torch" if mine != "torch" else "cpp"
    settings["model"]["embedding"]["kernel"] = theirs
    one = settings["training"]["precision"]
    other = "fp32" if one == "bf16" else "bf16"
    settings["training"] |= {"threads": 2, "precision": other}
    state.pop("sha256")  # as the way out of the error says
    file.write_text(json.dumps(state))
    said = "\n".join(compare_finished([Path("runs/a"), Path("runs/other")]).notes)
    assert f"the kernels of the embeddings differ ({mine}, {theirs})" in said
    assert "training.threads differs (1, 2)" in said
    assert f"training.precision differs ({one}, {other})" in said
    startup = RunFolder(Path("runs/other")).startup
    report = STARTUP.read(startup)
    report["Machine"] |= {"torch": "1.0", "ziggurat": "0.0.1"}
    STARTUP.write(startup, report)
    record = DataRecord.load(RunFolder(Path("runs/other")).data)
    assert record is not None
    splits = {each.name: each for each in record.splits}
    changed = dataclasses.replace(splits["train"], digest="0123456789abcdef")
    dataclasses.replace(record, splits=(changed, splits["valid"], splits["test"])).save(
        RunFolder(Path("runs/other")).data
    )
    said = "\n".join(compare_finished([Path("runs/a"), Path("runs/other")]).notes)
    assert f"torch differs ({torch.__version__}; 1.0)" in said
    assert f"ziggurat differs ({ziggurat.__version__}; 0.0.1)" in said
    assert "data train content differs" in said
    assert "0123456789ab" in said
    moved = dataclasses.replace(splits["test"], digest="0123456789abcdef")
    dataclasses.replace(record, splits=(splits["train"], splits["valid"], moved)).save(
        RunFolder(Path("runs/other")).data
    )
    with pytest.raises(ConfigError, match="other test rows"):
        compare_finished([Path("runs/a"), Path("runs/other")])
    shutil.copytree("runs/a", "runs/same")
    assert "differ" not in "\n".join(compare_finished([Path("runs/a"), Path("runs/same")]).notes)


def test_files_are_read_as_those_of_the_run_or_as_the_command_line_says(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = today(50).drop("tags")
    frame.write_csv("plain.csv")
    commas = frame.with_columns(price=pl.col("price").cast(pl.String).str.replace(".", ",", literal=True))
    commas.write_csv("office.dat", separator=";")
    predict = ["predict", "runs/a", "--out", "read.parquet"]
    told = ["--data.separator", "semicolon", "--data.decimal", "comma", "--data.format", "csv"]
    assert main([*predict, "plain.csv"]) == 0
    expected = pl.read_parquet("read.parquet")
    assert main([*predict, "office.dat", *told]) == 0
    assert pl.read_parquet("read.parquet").equals(expected)
    assert main(["evaluate", "runs/a", "office.dat", *told]) == 0
    run = load_run("runs/a")
    reading = FileReading(separator=";", decimal=DecimalMark.COMMA, format=FileFormat.CSV)
    assert dataclasses.replace(run, reading=reading).predict(["office.dat"]).equals(expected)
    capsys.readouterr()
    for arguments, words in (
        ([*predict, "office.dat"], "--data.format csv"),
        ([*predict, "office.dat", "--data.format", "csv"], "--data.separator semicolon"),
        ([*predict, "office.dat", *told[:2], "--data.format", "csv"], "--data.decimal comma"),
        ([*predict, "plain.csv", "--data.seperator", ";"], "did you mean --data.separator?"),
        ([*predict, "plain.csv", "--data.bad-rows", "quarantine"], "--bad-rows quarantine"),
        (["evaluate", "runs/a", "--split", "test", *told[:2]], "leave out --data.separator"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--data.list-separator", "--data.list_separator"])
def test_reading_is_told_with_dashes_or_underscores(trained: Path, flag: str) -> None:
    lists = today(20).with_columns(pl.col("tags").cast(pl.List(pl.String)).list.join("|"))
    lists.write_csv("lists.csv")
    assert main(["predict", "runs/a", "lists.csv", "--out", "lists.parquet", flag, "pipe"]) == 0
    today(20).write_parquet("as_lists.parquet")
    assert pl.read_parquet("lists.parquet").equals(load_run("runs/a").predict(["as_lists.parquet"]))


def test_a_run_reads_other_files_as_its_own(trained: Path) -> None:
    frame = events(600).drop("tags")
    frame.write_csv("own.csv", separator=";")
    train = ["train", "table_dlrm", "--data.train", "own.csv", "--schema", "my.toml", "--out", "runs/semicolons"]
    assert main([*train, "--data.separator", "semicolon", *SMALL, *TINY]) == 0
    frame.head(20).write_csv("new.csv", separator=";")
    assert main(["predict", "runs/semicolons", "new.csv", "--out", "new.parquet"]) == 0


def test_json_lines_are_scored_as_the_same_rows_of_parquet(trained: Path) -> None:
    run = load_run("runs/a")
    frame = today(50)
    frame.write_parquet("same.parquet")
    frame.write_ndjson("same.jsonl")
    assert run.predict(["same.jsonl"], keep=("user_id",)).equals(run.predict(["same.parquet"], keep=("user_id",)))
    whole = frame.with_columns(price=pl.lit(2), user_id=pl.lit(1))
    whole.write_parquet("whole.parquet")
    whole.with_columns(price=pl.lit(2.5)).write_parquet("fractions.parquet")
    with pytest.raises(DataError, match="Float64, with fractions"):
        run.predict(["whole.parquet", "fractions.parquet"], keep=("price",))


def test_a_run_reads_numbers_as_those_that_it_was_trained_on(trained: Path) -> None:
    frame = events(600).drop("tags").with_columns(price=(1 + pl.col("price").abs()) * 1000)
    german = [f"{each:,.6f}".translate(str.maketrans(",.", ".,")) for each in frame["price"]]
    frame = frame.with_columns(price=pl.Series([round(each, 6) for each in frame["price"]]))
    frame.with_columns(price=pl.Series(german)).write_csv("german.csv", separator=";")
    inspection = ziggurat.inspect_file("german.csv")
    told = ["--data.separator", "semicolon", "--data.decimal", "comma", "--data.thousands", "point"]
    assert list(inspection.settings()) == told
    assert inspection.schema.feature("price").kind == "dense"
    train = ["train", "table_dlrm", "--data.train", "german.csv", "--schema", "my.toml", "--out", "runs/german"]
    assert main([*train, *told, *SMALL, *TINY]) == 0
    frame.write_parquet("plain.parquet")
    run = load_run("runs/german")
    assert run.predict(["german.csv"]).equals(run.predict(["plain.parquet"]))
    assert run.evaluate(["german.csv"]).metrics == run.evaluate(["plain.parquet"]).metrics
    as_texts = pl.read_csv("german.csv", separator=";", infer_schema=False)
    assert run.predict(as_texts).equals(run.predict(["plain.parquet"]))


def test_without_a_label_inspect_asks_for_one(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events(100).select("user_id", "item").write_csv("bare.csv")
    assert main(["data", "inspect", "bare.csv", "--write-schema", "bare.toml"]) == 0
    shown = capsys.readouterr().out
    assert "ziggurat data inspect bare.csv --label COLUMN --write-schema bare.toml" in shown
    assert "ziggurat train" not in shown


def test_train_rows_without_all_their_negatives_are_said(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(NoProgress):
        def say(self, text: str) -> None:
            told.append(text)

    told: list[str] = []
    monkeypatch.chdir(trained)
    run = load_run(trained / "runs" / "a")
    run.evaluate_split("train", progress=Told())
    inputs = run.preprocessing.inputs
    monkeypatch.setattr(
        run.preprocessing,
        "inputs",
        dataclasses.replace(inputs, labels=(dataclasses.replace(inputs.labels[0], negative_rate=0.1),)),
    )
    run.evaluate_split("test", progress=Told())
    assert not [text for text in told if "negative_rate" in text]
    run.evaluate_split("train", progress=Told())
    assert [text for text in told if text.startswith("warning: the train rows hold 0.1 of their negatives")]


def test_an_undefined_metric_is_null_in_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    today().with_columns(pl.lit(1).alias("click")).write_parquet("ones.parquet")
    assert main(["evaluate", "runs/a", "ones.parquet", "--json", "ones.json"]) == 0

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    found = json.loads(Path("ones.json").read_text(), parse_constant=refuse)
    assert found["metrics"]["auc"] is None
    assert np.isnan(read_evaluation(Path("ones.json"))["metrics"]["auc"])
