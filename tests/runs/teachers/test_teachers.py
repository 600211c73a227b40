"""Teachers: logged once an example, joined only where they cannot know the answer, refused where they do not fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.config import to_json
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.teachers.side_table import TeacherVersion, VersionFolder, example_ids, versions_in
from ziggurat.errors import ConfigError, DataError, SchemaError
from ziggurat.files import Format
from ziggurat.ops.lookup import KernelChoice
from ziggurat.precision import Precision
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.teachers.log import log_teacher, vectors_of_part
from ziggurat.runs.teachers.student import with_teacher
from ziggurat.training.distillation import DistilConfig, DistilHead
from ziggurat.training.report.progress import NoProgress

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
    labels=(zg.Label(name="click"),),
    time="at",
)
DAY = 86_400
FIRST = 1_767_225_600  # 2026-01-01


def rows(count: int = 400, *, first_day: int = 0) -> pl.DataFrame:
    """Ten rows an hour from a day on."""
    n = pl.int_range(count, eager=True)
    frame = pl.DataFrame({"user": n * 7 % 40, "item": n * 11 % 25})
    return frame.with_columns(click=(n * 13 % 5 == 0).cast(pl.Int64), at=FIRST + first_day * DAY + n * 360)


class SaidProgress(NoProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    zg.write_schema(SCHEMA, "my.toml")
    return tmp_path


def big_run(
    *,
    split: zg.SplitConfig | None = None,
    frame: pl.DataFrame | None = None,
    bad_rows: BadRowPolicy = BadRowPolicy.ERROR,
) -> zg.Run:
    """A trained teacher, whose data ends with the first 400 rows."""
    (rows() if frame is None else frame).write_parquet("old.parquet")
    embedding = zg.EmbeddingConfig(kernel=KernelChoice.TORCH)
    config = zg.table_run(zg.DNNConfig(embedding_dim=4, embedding=embedding), SCHEMA)
    data = replace(config.data, train=("old.parquet",), **({} if split is None else {"split": split}))
    data = replace(data, bad_rows=bad_rows)
    training = replace(config.training, threads=1, precision=Precision.FP32)
    zg.train_run(replace(config, data=data, training=training), folder="big")
    return zg.load_run("big")


def knows(answers: pl.DataFrame, *, watermark: float, version: str, logit: float = 9.0) -> None:
    """Log a teacher that knows the answers of some examples."""
    facts = TeacherVersion(
        teacher="seer",
        version=version,
        labels=("click",),
        are_probabilities=(True,),
        example_columns=("user", "at"),
        watermark=watermark,
        is_calendar=True,
    )
    ids = example_ids(RawChunk.of(answers), facts.example_columns)
    logits = np.where(answers["click"].to_numpy() == 1, logit, -logit).astype(np.float32).reshape(-1, 1)
    VersionFolder.begin("teacher", facts).write_part(ids, logits, None)


def student_config(*, file: str = "new.parquet", head: DistilHead = DistilHead.AUX_HEAD) -> zg.RunConfig:
    config = zg.table_run(zg.DNNConfig(embedding_dim=4), SCHEMA)
    split = zg.SplitConfig(by=zg.SplitBy.TIME, valid_fraction=0.1, test_fraction=0.1)
    data = replace(config.data, train=(file,), split=split)
    return replace(config, data=data, distil=DistilConfig(head=head), training=replace(config.training, threads=1))


def joined(config: zg.RunConfig) -> pl.DataFrame:
    """The rows of all splits with what was joined to them, in the order of the raw file."""
    prepared = prepare_run(config)
    tables = [
        pl.from_arrow(dataset.read_group(index))
        for dataset in (prepared.train, prepared.valid, prepared.test)
        if dataset is not None
        for index in range(len(dataset.group_sizes))
    ]
    found = pl.concat([each for each in tables if isinstance(each, pl.DataFrame)]).sort("row:")
    return found.select("label:click", p=pl.col("extra:teacher_seer_click").fill_nan(None),
                        age=pl.col("extra:teacher_seer_age").fill_nan(None))  # fmt: skip


def test_a_teacher_that_knows_the_answers_does_not_leak_from_the_future(folder: Path) -> None:
    """A version whose watermark is at an example or behind it is passed over, though it has scored it."""
    new = rows()
    new.write_parquet("new.parquet")
    times = new["at"].to_numpy()
    knows(new, watermark=float(times[100]), version="early", logit=1.0)
    knows(new, watermark=float(times[250]), version="late")
    found = joined(with_teacher(student_config(), "teacher"))
    assert found["p"][:101].is_null().all()  # row 100 is as late as the newest row of the early version
    early = found[101:251]
    assert early["p"].to_numpy() == pytest.approx(np.where(early["label:click"] == 1, 0.7310586, 0.2689414), abs=1e-5)
    late = found[251:]
    assert late["p"].to_numpy() == pytest.approx(np.where(late["label:click"] == 1, 0.9998766, 0.0001234), abs=1e-5)
    assert late["age"].to_numpy() == pytest.approx(times[251:] - times[250])
    assert early["age"].to_numpy() == pytest.approx(times[101:251] - times[100])


def test_examples_that_no_version_has_scored_have_no_teacher(folder: Path) -> None:
    new = rows()
    new.write_csv("new.csv")  # text gives the same example ids
    knows(new[::2], watermark=FIRST - 1, version="one")
    found = joined(with_teacher(student_config(file="new.csv"), "teacher"))
    assert found["p"].is_null().to_list() == [index % 2 == 1 for index in range(400)]


def test_milliseconds_are_no_later_than_seconds(folder: Path) -> None:
    new = rows()
    new.with_columns(pl.col("at") * 1000).write_parquet("new.parquet")
    knows(new.with_columns(pl.col("at") * 1000), watermark=FIRST + 100 * 360, version="one")
    found = joined(with_teacher(student_config(), "teacher"))
    assert found["p"].is_null().sum() == 101


def test_files_of_days_before_the_13th_have_the_order_of_dates_that_the_others_show(folder: Path) -> None:
    """The order of 11/01/2026 stands in another file, for the watermark and for the join, as for the split."""
    date = pl.from_epoch("at").dt.strftime("%d/%m/%Y %H:%M:%S")
    for name, first_day in (("11", 10), ("15", 14)):
        rows(240, first_day=first_day).with_columns(at=date).write_csv(f"{name}.csv")
    config = zg.table_run(
        zg.DNNConfig(embedding_dim=4, embedding=zg.EmbeddingConfig(kernel=KernelChoice.TORCH)), SCHEMA
    )
    data = replace(config.data, train=("11.csv", "15.csv"))
    zg.train_run(replace(config, data=data, training=replace(config.training, threads=1, epochs=1)), folder="big")
    logged = log_teacher(zg.load_run("big"), ["11.csv"], out="teacher", vectors="none")
    at = FIRST + np.concatenate([10 * DAY + np.arange(240) * 360, 14 * DAY + np.arange(240) * 360])
    assert logged.facts.watermark in at[-100:]
    knows(rows(240, first_day=10).with_columns(at=date), watermark=FIRST + 10 * DAY + 99 * 360, version="one")
    student = student_config()
    student = replace(student, data=replace(student.data, train=("11.csv", "15.csv")))
    found = joined(with_teacher(student, "teacher"))
    assert found["p"].is_null().to_list() == [True] * 100 + [False] * 140 + [True] * 240


def test_a_teacher_is_logged_once_an_example_and_taught_by(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = big_run()
    new = rows(300, first_day=3)
    pl.concat([new, new[:50]]).write_parquet("new.parquet")
    assert main(["teacher", "log", "big", "new.parquet", "--out", "teacher"]) == 0
    said = capsys.readouterr().out
    assert "300 scored, 50 rows" in said
    assert "2026-01-02 11:54:00" in said  # row 359 of 400: later ones are its test rows
    assert main(["teacher", "log", "big", "new.parquet", "--out", "teacher"]) == 0
    assert "0 scored, 350 rows" in capsys.readouterr().out
    version = versions_in("teacher")[0]
    index, logits = version.logits()
    is_known, at = index.find(example_ids(RawChunk.of(new), version.facts.example_columns))
    assert is_known.all()
    scores = run.scores(new.select("user", "item"))
    np.testing.assert_allclose(1 / (1 + np.exp(-logits[at])), scores, atol=1e-6)
    given = ["--schema", "my.toml", "--data.train", "new.parquet", "--out", "small", "--threads", "1", "--dim", "4"]
    given += ["--model.embedding.kernel", "torch", "--precision", "fp32"]  # nothing is measured at the start
    assert main(["train", "table_dnn", *given, "--teacher", "teacher", "--distil", "aux-head", "--verbose"]) == 0
    said = capsys.readouterr()
    assert "100.0% of" in said.out + said.err
    assert main(["evaluate", "small", "new.parquet"]) == 0  # files have no column of the teacher
    assert main(["train", "small", "--resume", "--epochs", "2"]) == 0


def test_logging_goes_on_where_its_parts_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed behind a part: what is in it is not scored again, and the whole is that of one pass."""
    run = big_run()
    rows(300, first_day=3).write_parquet("new.parquet")
    monkeypatch.setattr("ziggurat.runs.teachers.log.CHUNK_ROWS", 64)
    whole = log_teacher(run, ["new.parquet"], out="whole", vectors="int8", rows_per_part=64)
    written: list[Path] = []
    write = VersionFolder.write_part

    def dying(self: VersionFolder, *args: object) -> Path:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(write(self, *args))  # pyright: ignore[reportArgumentType]
        return written[-1]

    monkeypatch.setattr(VersionFolder, "write_part", dying)
    with pytest.raises(KeyboardInterrupt):
        log_teacher(run, ["new.parquet"], out="parts", vectors="int8", rows_per_part=64)
    monkeypatch.setattr(VersionFolder, "write_part", write)
    again = log_teacher(run, ["new.parquet"], out="parts", vectors="int8", rows_per_part=64)
    assert (again.num_known, again.num_new) == (128, 300 - 128)
    for one, other in zip(VersionFolder.open(whole.path).parts, VersionFolder.open(again.path).parts, strict=True):
        assert pl.read_parquet(one).equals(pl.read_parquet(other))


@pytest.mark.parametrize(("format", "tolerance"), [("bf16", 0.01), ("int8", 0.02)])
def test_vectors_are_the_final_representation(folder: Path, format: str, tolerance: float) -> None:
    run = big_run()
    rows(60, first_day=3).write_parquet("new.parquet")
    logged = log_teacher(run, ["new.parquet"], out="teacher", vectors=format)
    version = VersionFolder.open(logged.path)
    vectors = vectors_of_part(version, version.parts[0])
    output = run.model.closing_maps()[0]
    _, logits = version.logits()
    np.testing.assert_allclose(output(vectors).detach().numpy(), logits, atol=tolerance)


def test_the_watermark_is_that_of_rows_that_the_run_has_seen(folder: Path) -> None:
    """Test rows are later than it, in a split by time."""
    run = big_run(split=zg.SplitConfig(by=zg.SplitBy.TIME, valid_fraction=0.1, test_fraction=0.2))
    rows(20, first_day=3).write_parquet("new.parquet")
    logged = log_teacher(run, ["new.parquet"], out="teacher")
    assert logged.facts.watermark == rows()["at"][319]


def test_rows_that_were_put_aside_in_training_do_not_stop_the_watermark(folder: Path) -> None:
    text = rows().write_csv().splitlines(keepends=True)
    text.insert(7, "1,2\n")  # a row of two fields
    text.insert(20, "1,2,1,soon\n")
    Path("old.csv").write_text("".join(text))
    config = zg.table_run(zg.DNNConfig(embedding_dim=4), SCHEMA)
    split = zg.SplitConfig(by=zg.SplitBy.TIME, valid_fraction=0.1, test_fraction=0.2)
    data = replace(config.data, train=("old.csv",), bad_rows=BadRowPolicy.QUARANTINE, split=split)
    zg.train_run(replace(config, data=data, training=replace(config.training, threads=1)), folder="big")
    logged = log_teacher(zg.load_run("big"), "old.csv", out="teacher", bad_rows=BadRowPolicy.QUARANTINE)
    assert logged.facts.watermark == rows()["at"][319]
    assert logged.num_new == 401  # the row without a time that can be read is scored too


def test_a_run_whose_rows_have_no_time_needs_a_watermark_that_is_named(folder: Path) -> None:
    timeless = rows().with_columns(at=pl.lit(None, dtype=pl.Int64))
    split = zg.SplitConfig(by=zg.SplitBy.RANDOM)
    run = big_run(split=split, frame=timeless, bad_rows=BadRowPolicy.QUARANTINE)
    rows(20, first_day=3).write_parquet("new.parquet")
    with pytest.raises(DataError, match="no row whose 'at' can be read") as refused:
        log_teacher(run, ["new.parquet"], out="teacher")
    assert any("--watermark" in way for way in refused.value.ways_out)
    assert log_teacher(run, ["new.parquet"], out="teacher", watermark="2026-01-31T18:00").num_new == 20


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    new = rows()
    new.write_parquet("new.parquet")
    with pytest.raises(ConfigError, match="--distil aux-head"):
        with_teacher(student_config(head=DistilHead.NONE), "teacher")
    with pytest.raises(FileNotFoundError, match="teacher log"):
        with_teacher(student_config(), "teacher")
    knows(new, watermark=FIRST, version="one")
    other = replace(student_config(), table_schema=replace(SCHEMA, labels=(zg.Label(name="like", column="click"),)))
    with pytest.raises(SchemaError, match="like"):
        with_teacher(other, "teacher")
    with pytest.raises(SchemaError, match="time"):
        with_teacher(replace(student_config(), table_schema=replace(SCHEMA, time="")), "teacher")
    new.drop("user").with_columns(user_id=new["user"]).write_parquet("renamed.parquet")
    renamed = replace(SCHEMA, features=(zg.Categorical(name="user", column="user_id"), SCHEMA.features[1]))
    config = replace(student_config(file="renamed.parquet"), table_schema=renamed)
    with pytest.raises(SchemaError, match="known by"):
        prepare_run(with_teacher(config, "teacher"))


def test_a_damaged_part_is_named(folder: Path) -> None:
    new = rows()
    new.write_parquet("new.parquet")
    knows(new, watermark=FIRST, version="one")
    part = versions_in("teacher")[0].parts[0]
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 0xFF
    part.write_bytes(content)
    with pytest.raises(DataError, match="part-00000"):
        versions_in("teacher")[0].logits()
    (part.parent / "version.json").write_text("{")
    with pytest.raises(DataError, match=r"version\.json"):
        versions_in("teacher")


def _remove(part: Path) -> None:
    part.unlink()


def _flip(part: Path) -> None:
    content = bytearray(part.read_bytes())
    content[-20] ^= 1  # of the footer, which pages' checksums say nothing of
    part.write_bytes(content)


def _add(part: Path) -> None:
    shutil.copy(part, part.with_name("part-00001.parquet"))


@pytest.mark.parametrize("harm", [_remove, _flip, _add])
def test_a_student_is_not_trained_by_a_table_that_is_not_as_it_was_logged(
    folder: Path, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    new = rows()
    new.write_parquet("new.parquet")
    knows(new, watermark=FIRST - 1, version="one")
    part = versions_in("teacher")[0].parts[0]
    shutil.copytree("teacher", "kept")
    harm(part)
    given = ["train", "table_dnn", "--schema", "my.toml", "--data.train", "new.parquet", "--out", "small"]
    given += ["--threads", "1", "--dim", "4", "--epochs", "1", "--teacher", "teacher", "--distil", "aux-head"]
    given += ["--model.embedding.kernel", "torch", "--precision", "fp32"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "teacher/seer/one/part-0000" in said
    assert "ways out" in said
    shutil.rmtree("teacher")
    shutil.copytree("kept", "teacher")
    assert main(given) == 0


def test_parts_of_before_there_were_digests_are_named_when_a_student_is_trained(folder: Path) -> None:
    new = rows()
    new.write_parquet("new.parquet")
    knows(new, watermark=FIRST - 1, version="one")
    version = versions_in("teacher")[0]
    former = Format(name="ziggurat.teacher", what="a version")
    former.write(version.path / "version.json", {"facts": to_json(version.facts)})
    progress = SaidProgress()
    prepare_run(with_teacher(student_config(), "teacher"), progress=progress)
    assert [line for line in progress.said if "seer/one without digests" in line]
    version.settle()
    again = SaidProgress()
    prepare_run(with_teacher(student_config(), "teacher"), progress=again)
    assert not [line for line in again.said if "digests" in line]


def test_logging_says_that_it_lists_parts_of_before_there_were_digests(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = big_run()
    rows(100, first_day=3).write_parquet("new.parquet")
    logged = log_teacher(run, ["new.parquet"], out="teacher")
    former = Format(name="ziggurat.teacher", what="a version")
    former.write(logged.path / "version.json", {"facts": to_json(logged.facts)})
    assert main(["teacher", "log", "big", "new.parquet", "--out", "teacher"]) == 0
    said = capsys.readouterr()
    assert "0 scored, 100 rows" in said.out
    assert "1 part of an older Ziggurat had no digest" in said.err
    assert VersionFolder.open(logged.path).is_checked
