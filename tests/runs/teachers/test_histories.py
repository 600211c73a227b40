"""Histories of a teacher's vectors: only what was before a row, the same in training, scoring and serving."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from time import time as now

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.config import to_json
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.teachers import history
from ziggurat.data.teachers.history import HistoryIndex, index_of, keys_of
from ziggurat.data.teachers.join import joined_histories
from ziggurat.data.teachers.side_table import TeacherVersion, VersionFolder, example_ids, versions_in
from ziggurat.errors import ConfigError, DataError, RequestError, SchemaError
from ziggurat.features.inputs import HistoryPooling, VectorHistory, VectorSpec
from ziggurat.files import Format
from ziggurat.models.blocks.vector_histories import HistoryPool
from ziggurat.models.contract.model import Embedded, Model, Outputs
from ziggurat.ops.lookup import KernelChoice
from ziggurat.ops.row_formats import RowFormat
from ziggurat.ops.vector_histories import pack_histories, row_words_of, unpack_histories
from ziggurat.precision import Precision
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.teachers.log import log_teacher
from ziggurat.runs.teachers.student import TeacherHistoryConfig, with_teacher
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.distillation import DistilConfig, DistilHead

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
    labels=(zg.Label(name="click"),),
    time="at",
)
FIRST = 1_767_225_600  # 2026-01-01


def rows(count: int = 400, *, seconds: int = 360, first: int = 0) -> pl.DataFrame:
    n = pl.int_range(count, eager=True)
    frame = pl.DataFrame({"user": n * 7 % 20, "item": n * 11 % 25})
    return frame.with_columns(click=(n * 13 % 5 == 0).cast(pl.Int64), at=FIRST + first + n * seconds)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    zg.write_schema(SCHEMA, "my.toml")
    return tmp_path


def logged(
    frame: pl.DataFrame,
    vectors: np.ndarray,
    *,
    watermark: float,
    version: str,
    format: str = "bf16",
    parts: int = 1,
) -> None:
    """Log vectors of examples by hand."""
    facts = TeacherVersion(
        teacher="seer",
        version=version,
        labels=("click",),
        are_probabilities=(True,),
        example_columns=("user", "item", "at"),
        watermark=watermark,
        is_calendar=True,
        vectors=format,
        vector_dim=vectors.shape[1],
        history_key="user",
    )
    chunk = RawChunk.of(frame)
    ids = example_ids(chunk, facts.example_columns)
    coded = RowFormat.named(format).encode(torch.from_numpy(vectors).float())
    bytes_NC = coded.reshape(-1).view(torch.uint8).reshape(len(coded), -1).numpy()
    version_folder = VersionFolder.begin("teacher", facts)
    keys = keys_of(chunk, "user")
    times = frame["at"].to_numpy().astype(np.float64)
    for part in np.array_split(np.random.default_rng(3).permutation(len(frame)), parts):
        logits = np.zeros((len(part), 1), dtype=np.float32)
        version_folder.write_part(ids[part], logits, bytes_NC[part], keys=keys[part], times=times[part])


def student_config(*, file: str = "new.parquet", head: DistilHead = DistilHead.NONE) -> zg.RunConfig:
    embedding = zg.EmbeddingConfig(kernel=KernelChoice.TORCH)
    config = zg.table_run(zg.DNNConfig(embedding_dim=4, embedding=embedding), SCHEMA)
    split = zg.SplitConfig(by=zg.SplitBy.TIME, valid_fraction=0.1, test_fraction=0.1)
    training = replace(config.training, threads=1, precision=Precision.FP32)
    return replace(
        config, data=replace(config.data, train=(file,), split=split), training=training, distil=DistilConfig(head=head)
    )


def with_history(config: zg.RunConfig, *, length: int = 4) -> zg.RunConfig:
    return with_teacher(config, "teacher", history=TeacherHistoryConfig(key="user", length=length))


def histories(config: zg.RunConfig) -> list[np.ndarray]:
    """The vectors of each row of the raw file, latest first."""
    prepared = prepare_run(config)
    [spec] = prepared.preprocessing.inputs.vector_histories
    assert spec.history is not None
    found: dict[int, np.ndarray] = {}
    for dataset in filter(None, (prepared.train, prepared.valid, prepared.test)):
        for index in range(len(dataset.group_sizes)):
            table = dataset.read_group(index)
            words = table.column(spec.name).combine_chunks().flatten().to_numpy().reshape(table.num_rows, -1)
            vectors, is_there = unpack_histories(torch.from_numpy(words.copy()), history=spec.history)
            for row, vector, there in zip(table.column("row:").to_pylist(), vectors, is_there, strict=True):
                found[row] = vector[there].numpy()
    return [found[row] for row in range(len(found))]


def scores_of(run: zg.Run, data: object) -> np.ndarray:
    found = run.predict(data)
    assert isinstance(found, pl.DataFrame)
    return found["click"].to_numpy()


def expected(
    new: pl.DataFrame, versions: list[tuple[pl.DataFrame, np.ndarray, float]], *, length: int
) -> list[list[list[float]]]:
    """The definition, row by row: versions newest first."""
    answers = []
    for user, at in zip(new["user"], new["at"], strict=True):
        best: dict[tuple[int, int, int], list[float]] = {}
        for frame, vectors, watermark in versions:
            if watermark >= at:
                continue
            for owner, item, time, vector in zip(frame["user"], frame["item"], frame["at"], vectors, strict=True):
                if owner == user and int(time) < int(at):
                    best.setdefault((time, owner, item), vector.tolist())
        latest = sorted(best, reverse=True)[:length]
        answers.append([best[key] for key in latest])
    return answers


@pytest.mark.parametrize("parts", [1, 3])
def test_a_row_gets_the_last_vectors_of_its_user_before_it(folder: Path, parts: int) -> None:
    old, new = rows(200), rows(300, seconds=500)
    new.write_parquet("new.parquet")
    vectors = np.arange(400, dtype=np.float32).reshape(200, 2) / 2  # exact in BF16 up to 128
    later = -vectors[:150]
    logged(old, vectors, watermark=FIRST - 1.0, version="first", parts=parts)
    logged(old[:150], later, watermark=FIRST + 40_000.0, version="second", parts=parts)
    found = histories(with_history(student_config()))
    rounded = torch.from_numpy(vectors).bfloat16().float().numpy()
    wanted = expected(new, [(old[:150], -rounded[:150], FIRST + 40_000.0), (old, rounded, FIRST - 1.0)], length=4)
    assert [each.tolist() for each in found] == wanted
    assert any(len(each) == 4 for each in wanted)
    assert any(len(each) == 0 for each in wanted)


def test_vectors_that_hold_the_labels_do_not_leak(folder: Path) -> None:
    """A teacher that has seen a row, or scored it, gives the row nothing of it; nor does one that knows the future."""
    new = rows(400, seconds=1)  # 20 rows a second apart for each user
    new.write_parquet("new.parquet")
    answers = new["click"].to_numpy().astype(np.float32)[:, None] * 2 - 1
    logged(new, answers, watermark=FIRST + 200.0, version="seer")
    found = histories(with_history(student_config(), length=3))
    assert all(len(each) == 0 for each in found[:201])  # the version may know their answers
    for row in range(201, 400):
        own = [n for n in range(row) if new["user"][n] == new["user"][row]][::-1][:3]
        assert found[row][:, 0].tolist() == answers[own, 0].tolist()


def test_examples_of_the_same_second_are_left_out(folder: Path) -> None:
    new = pl.DataFrame(
        {"user": [1] * 40, "item": list(range(40)), "click": [0, 1] * 20, "at": [FIRST + 9] * 20 + [FIRST + 10] * 20}
    )
    new.write_parquet("new.parquet")
    logged(new, np.arange(40, dtype=np.float32)[:, None], watermark=FIRST + 8.0, version="one")
    config = student_config()
    config = replace(config, data=replace(config.data, split=zg.SplitConfig(by=zg.SplitBy.RANDOM)))
    found = histories(with_history(config, length=30))
    assert [len(each) for each in found] == [0] * 20 + [20] * 20


def teacher_run() -> zg.Run:
    rows(seconds=180).write_parquet("old.parquet")
    embedding = zg.EmbeddingConfig(kernel=KernelChoice.TORCH)
    config = zg.table_run(zg.DNNConfig(embedding_dim=4, embedding=embedding), SCHEMA)
    data = replace(config.data, train=("old.parquet",))
    training = replace(config.training, threads=1, precision=Precision.FP32)
    zg.train_run(replace(config, data=data, training=training), folder="big")
    return zg.load_run("big")


@pytest.mark.parametrize(("head", "vectors"), [(DistilHead.NONE, "bf16"), (DistilHead.AUX_HEAD, "int8")])
def test_a_student_scores_files_as_it_scored_its_own_rows(folder: Path, head: DistilHead, vectors: str) -> None:
    new = rows(first=180 * 400)
    new.write_parquet("new.parquet")
    log_teacher(teacher_run(), ["old.parquet", "new.parquet"], out="teacher", vectors=vectors, history="user")
    zg.train_run(with_history(student_config(head=head)), folder="student")
    run = zg.load_run("student")
    own = run.evaluate_split("test")
    new[360:].write_parquet("test.parquet")
    given = run.evaluate(["test.parquet"])
    assert given.metrics["log_loss"] == pytest.approx(own.metrics["log_loss"], abs=1e-6)
    scores = scores_of(run, new[360:])
    assert scores == pytest.approx(scores_of(run, ["test.parquet"]), abs=1e-7)
    assert len(set(scores.tolist())) > 1


@pytest.mark.parametrize("vectors", ["bf16", pytest.param("int8", marks=pytest.mark.slow)])
def test_an_export_knows_the_history_of_its_users(folder: Path, vectors: str) -> None:
    """Requests that bring no vectors are scored by those of the table, as rows of now are by the side table."""
    new = rows(first=180 * 400)
    new.write_parquet("new.parquet")
    log_teacher(teacher_run(), ["old.parquet", "new.parquet"], out="teacher", vectors=vectors, history="user")
    zg.train_run(with_history(student_config()), folder="student")
    zg.export_run("student", out="served")
    served = zg.Recommender.load("served")
    run = zg.load_run("student")
    asked = pl.DataFrame({"user": range(22), "item": range(22), "at": [FIRST + 10**7] * 22})
    wanted = scores_of(run, asked)
    requests = asked.select("user", "item").to_dicts()
    ranker = served.chain.needed_ranker
    found = ranker.score_rows(requests)[:, 0].numpy()
    assert found == pytest.approx(wanted, abs=1e-6)
    [feature] = joined_histories(ranker.schema)
    none = ranker.score_rows([{**row, feature.column: []} for row in requests])[:, 0].numpy()
    assert np.abs(none - found)[:20].max() > 1e-4  # the history of known users counts
    assert none[20:] == pytest.approx(found[20:], abs=1e-7)  # strangers have none
    own = [[0.5] * feature.dim] * 2
    given = ranker.score_rows([{**row, feature.column: own} for row in requests])[:, 0].numpy()
    assert np.abs(given - found)[:20].max() > 1e-4


def test_an_index_is_made_again_when_parts_come_and_a_damaged_one_is_refused(folder: Path) -> None:
    old = rows(200)
    vectors = np.ones((200, 1), dtype=np.float32)
    logged(old, vectors, watermark=FIRST - 1.0, version="one")
    [version] = versions_in("teacher")
    index = index_of(version)
    assert len(index.keys) == 200
    logged(rows(100, first=10**6), np.ones((100, 1), dtype=np.float32), watermark=FIRST - 1.0, version="one")
    assert len(index_of(version).keys) == 300
    [made] = version.path.glob("by_user-*")  # that of fewer parts is gone
    shutil.copytree("teacher", "copy")
    [copy] = versions_in("copy")
    vectors_file = copy.path / made.name / "vectors.npy"
    content = bytearray(vectors_file.read_bytes())
    content[-1] ^= 1
    vectors_file.write_bytes(bytes(content))
    with pytest.raises(DataError, match="made again from the parts"):
        index_of(copy)
    shutil.rmtree(copy.path / made.name)
    assert len(index_of(copy).keys) == 300


@pytest.mark.usefixtures("folder")
def test_what_a_killed_process_left_of_an_index_goes_with_the_next_one() -> None:
    logged(rows(200), np.ones((200, 1), dtype=np.float32), watermark=FIRST - 1.0, version="left")
    [version] = versions_in("teacher")
    dead = 999_999_999  # no process has such a number
    digest = "0123456789abcdef"
    old = now() - 7_200.0
    left = [
        version.path / f".{name}.{dead}.{'a' * 8}.tmp"
        for name in (f"by_user-{digest}", f"part-00003.by_user-{digest}", f"by_user-{digest[::-1]}")
    ]
    others = [
        version.path / f".by_user-{digest}.{os.getpid()}.{'b' * 8}.tmp",  # of a process that lives
        version.path / f".by_user-notes.{dead}.{'c' * 8}.tmp",  # of nobody who writes indices
        version.path / f"by_user-{digest}.tmp",
    ]
    fresh = version.path / f".by_user-{digest}.{dead}.{'d' * 8}.tmp"  # perhaps of another machine
    for each in (*left, *others, fresh):
        each.mkdir()
        (each / "keys.npy").write_bytes(b"half")
        for path in () if each == fresh else (each / "keys.npy", each):
            os.utime(path, (old, old))
    index_of(version)
    assert not any(each.exists() for each in left)
    assert all((each / "keys.npy").read_bytes() == b"half" for each in (*others, fresh))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    owners=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=30),
    asked=st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 14)), min_size=1, max_size=10),
    length=st.integers(1, 6),
)
def test_latest_is_what_a_loop_finds(
    owners: list[tuple[int, int]], asked: list[tuple[int, int]], length: int, tmp_path: Path
) -> None:
    order = sorted(range(len(owners)), key=lambda at: owners[at])
    index = HistoryIndex(
        version=VersionFolder(tmp_path, None),  # type: ignore[arg-type]
        keys=np.array([owners[at][0] + 1 for at in order], dtype=np.uint64),
        times=np.array([float(owners[at][1]) for at in order]),
        examples=np.arange(len(owners), dtype=np.uint64),
        vectors=np.zeros((len(owners), 1), dtype=np.uint8),
    )
    keys = np.array([key + 1 for key, _ in asked], dtype=np.uint64)
    places, is_there = index.latest(keys, np.array([float(time) for _, time in asked]), length=length)
    for row, (key, time) in enumerate(asked):
        own = [place for place, at in enumerate(order) if owners[at][0] == key and owners[at][1] < time]
        assert places[row][is_there[row]].tolist() == own[::-1][:length]


@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("dim", [1, 5, 8])
def test_packed_vectors_come_back_as_their_format_holds_them(format: str, dim: int) -> None:
    history = VectorHistory(length=3, dim=dim, format=format, row_words=row_words_of(format, dim))
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(7, 3, dim, generator=generator)
    lengths = torch.tensor([0, 1, 2, 3, 3, 0, 1])
    words = pack_histories(vectors, lengths, history=history)
    assert words.shape == (7, history.words)
    found, is_there = unpack_histories(words, history=history)
    assert is_there.sum(dim=1).tolist() == lengths.tolist()
    row_format = RowFormat.named(format)
    rounded = row_format.decode(row_format.encode(vectors.reshape(-1, dim)), dim=dim).reshape(7, 3, dim)
    assert torch.equal(found, rounded * is_there.unsqueeze(2))
    assert torch.equal(pack_histories(found, lengths, history=history), words)  # and once more: the same bits
    assert pack_histories(vectors[:0], lengths[:0], history=history).shape == (0, history.words)


@pytest.mark.parametrize("pooling", HistoryPooling)
def test_a_pool_is_what_a_loop_computes(pooling: HistoryPooling) -> None:
    history = VectorHistory(length=4, dim=6, format="bf16", row_words=3, pooling=pooling)
    torch.manual_seed(0)
    pool = HistoryPool(history, query_dim=5)
    query = torch.randn(6, 5)
    vectors = torch.randn(6, 4, 6).bfloat16().float()
    lengths = torch.tensor([0, 1, 2, 3, 4, 2])
    found = pool(pack_histories(vectors, lengths, history=history), query)
    assert found.shape == (6, history.pooled_dim)
    for row, num in enumerate(lengths.tolist()):
        own = [(v - v.mean()) / (v.var(unbiased=False) + 1e-5).sqrt() for v in vectors[row, :num]]
        mean = sum(own) / num if num else torch.zeros(6)
        parts = [mean]
        if pooling is HistoryPooling.ATTENTION:
            assert pool.query is not None
            assert pool.key is not None
            assert pool.places is not None
            asked = pool.query.weight @ query[row] + pool.query.bias
            scores = [(pool.key.weight @ v) @ asked / 4 + pool.places[at] for at, v in enumerate(own)]
            weights = [score.exp() / sum(each.exp() for each in scores) for score in scores]
            parts.insert(0, sum((w * v for w, v in zip(weights, own, strict=True)), torch.zeros(6)))
        wanted = torch.cat([*parts, torch.tensor([np.log1p(num) / np.log1p(4)])])
        assert torch.allclose(found[row], wanted.float(), atol=1e-5)


def test_a_model_that_does_not_pool_histories_refuses_them() -> None:
    class Own(Model):
        def forward_dense(self, embedded: Embedded) -> Outputs:
            return self.as_outputs(embedded.fields[:, :1])

    class Pooling(Own):
        pools_histories = True

    plain = small_inputs(num_single=2)
    history = VectorHistory(length=3, dim=4, format="bf16", row_words=2)
    inputs = replace(plain, vectors=(VectorSpec(name="said", dim=history.pooled_dim, history=history),))
    embeddings = zg.build_model(zg.DNNConfig(embedding_dim=4), plain, seed=0).embeddings
    with pytest.raises(ConfigError, match="pools histories"):
        Own(inputs, embeddings=embeddings)
    batch = random_batch(plain, 5)
    words = pack_histories(torch.randn(5, 3, 4), torch.tensor([0, 1, 2, 3, 3]), history=history)
    model = Pooling(inputs, embeddings=embeddings)
    found = model.vectors_of(model.embed(replace(batch, vectors={"said": words})))
    assert found["said"].shape == (5, history.pooled_dim)


def test_what_cannot_be_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows().write_parquet("new.parquet")
    run = teacher_run()
    with pytest.raises(ConfigError, match="--vectors none"):
        log_teacher(run, ["old.parquet"], out="teacher", vectors="none", history="user")
    log_teacher(run, ["old.parquet"], out="plain")
    with pytest.raises(DataError, match="no users"):
        with_teacher(student_config(), "plain", history=TeacherHistoryConfig(key="user"))
    log_teacher(run, ["old.parquet"], out="teacher", history="user")
    with pytest.raises(DataError, match="--teacher-history user"):
        with_teacher(student_config(), "teacher", history=TeacherHistoryConfig(key="item"))
    with pytest.raises(ConfigError, match="neither --distil nor --teacher-history"):
        with_teacher(student_config(), "teacher")
    words = ["table_dnn", "--data.train", "new.parquet", "--schema", "my.toml", "--teacher-history", "user"]
    assert main(["train", *words]) != 0
    assert "and no --teacher" in capsys.readouterr().err
    for flag, value in (("--teacher-history-length", "3"), ("--teacher-history-pooling", "mean")):
        for verb in ("train", "stream"):
            assert main([verb, *words[:-2], flag, value]) == 2
            assert f"found: {flag} {value}, and no --teacher-history" in " ".join(capsys.readouterr().err.split())


def test_the_commands_of_the_guide_train_and_serve_a_student(folder: Path) -> None:
    new = rows(first=180 * 400)
    new.write_parquet("new.parquet")
    teacher_run()
    assert main(["teacher", "log", "big", "old.parquet", "new.parquet", "--out", "teacher", "--history", "user"]) == 0
    words = ["--teacher", "teacher", "--teacher-history", "user", "--teacher-history-length", "3"]
    few = ["--training.epochs", "1", "--training.threads", "1", "--model.embedding.kernel", "torch"]
    data = ["--data.train", "new.parquet", "--schema", "my.toml", "--out", "student"]
    assert main(["train", "table_dnn", *data, *words, *few, "--teacher-history-pooling", "mean"]) == 0
    [feature] = joined_histories(zg.load_run("student").preprocessing.schema)
    assert (feature.length, feature.pooling) == (3, HistoryPooling.MEAN)
    assert "training rows have one, of" in Path("student/startup.json").read_text()
    assert main(["predict", "student", "new.parquet", "--out", "scores.parquet"]) == 0
    assert main(["evaluate", "student", "new.parquet"]) == 0
    assert main(["export", "student", "--out", "served"]) == 0
    assert main(["train", "--resume", "student"]) == 0


@pytest.mark.parametrize("harm", ["remove", "flip", "add"])
def test_who_scores_by_histories_refuses_a_table_that_is_not_as_it_was_logged(
    folder: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    new = rows(first=180 * 400)
    new.write_parquet("new.parquet")
    logged(rows(200, seconds=360), np.ones((200, 2), dtype=np.float32), watermark=FIRST - 1.0, version="one")
    config = with_history(student_config())
    zg.train_run(replace(config, training=replace(config.training, epochs=1)), folder="student")
    [version] = versions_in("teacher")
    [part] = version.parts
    shutil.copytree("teacher", "kept")
    if harm == "remove":
        part.unlink()
    elif harm == "add":
        shutil.copy(part, part.with_name("part-00001.parquet"))
    else:
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(bytes(content))
        shutil.rmtree(next(version.path.glob("by_user-*")))  # its vectors are read once more
    history._opened.cache_clear()
    for words in (["evaluate", "student", "new.parquet"], ["predict", "student", "new.parquet", "--out", "a.parquet"]):
        assert main(words) == 2
        assert "teacher/seer/one/part-0000" in capsys.readouterr().err
    shutil.rmtree("teacher")
    shutil.copytree("kept", "teacher")
    assert main(["evaluate", "student", "new.parquet"]) == 0


def test_who_scores_by_histories_is_told_of_parts_without_digests(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows(first=180 * 400).write_parquet("new.parquet")
    logged(rows(200, seconds=360), np.ones((200, 2), dtype=np.float32), watermark=FIRST - 1.0, version="one")
    config = with_history(student_config())
    zg.train_run(replace(config, training=replace(config.training, epochs=1)), folder="student")
    run = zg.load_run("student")
    before = scores_of(run, ["new.parquet"])
    assert "digests" not in caplog.text
    [version] = versions_in("teacher")
    former = Format(name="ziggurat.teacher", what="a version")
    former.write(version.path / "version.json", {"facts": to_json(version.facts)})
    assert scores_of(run, ["new.parquet"]).tolist() == before.tolist()
    assert "seer/one without digests" in caplog.text


def test_days_before_the_13th_are_read_as_other_rows_show_them(folder: Path) -> None:
    """A chunk, a file or a frame of 05/06/2026 alone shows nothing; its other rows do, or those of the run."""
    date = pl.from_epoch("at").dt.strftime("%d/%m/%Y %H:%M:%S")
    old = rows(200, seconds=360)  # from the 1st of January on
    new = rows(400, seconds=3_600, first=86_400)  # to the 18th
    logged(old, np.arange(400, dtype=np.float32).reshape(200, 2) / 2, watermark=FIRST - 1.0, version="one")
    table = new.with_columns(at=date, tag=pl.lit("a"))
    table.write_csv("new.csv")
    config = student_config(file="new.csv")
    embedding = zg.EmbeddingConfig(kernel=KernelChoice.TORCH)
    config = replace(config, model=zg.DNNConfig(embedding_dim=4, embedding=embedding))
    # The teacher knows examples by user, item and time, which text writes in another way; histories are by user alone.
    zg.train_run(with_history(config), folder="student")
    run = zg.load_run("student")
    whole = scores_of(run, ["new.csv"])
    table[:200].write_csv("first.csv")
    assert scores_of(run, ["first.csv"]) == pytest.approx(whole[:200], abs=1e-7)
    assert scores_of(run, table[:200]) == pytest.approx(whole[:200], abs=1e-7)
    by_number = new.with_columns(at=pl.from_epoch("at"))
    assert whole == pytest.approx(scores_of(run, by_number), abs=1e-7)
    zg.export_run("student", out="served")
    # Without the files of the run nothing shows it any more, but for what is scored.
    Path("new.csv").unlink()
    assert scores_of(run, table) == pytest.approx(whole, abs=1e-7)
    with pytest.raises(ConfigError, match="day or the month") as refused:
        scores_of(run, ["first.csv"])
    assert any("year first" in way for way in refused.value.ways_out)


def test_vectors_are_logged_with_the_times_that_all_given_files_show(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    date = pl.from_epoch("at").dt.strftime("%d/%m/%Y %H:%M:%S")
    run = teacher_run()
    new = rows(400, seconds=3_600, first=86_400)
    new[:200].with_columns(at=date).write_csv("first.csv")
    new[200:].with_columns(at=date).write_csv("second.csv")
    monkeypatch.setattr("ziggurat.runs.teachers.log.CHUNK_ROWS", 64)
    version = VersionFolder.open(log_teacher(run, ["first.csv", "second.csv"], out="teacher", history="user").path)
    times = np.concatenate([version.owners_of(part)[2] for part in version.parts])
    assert sorted(times.tolist()) == new["at"].to_list()


def test_a_request_answers_whatever_vectors_it_brings(folder: Path) -> None:
    """Right, or an error with four parts: never a mistake of the server, and never NaN."""
    rows(first=180 * 400).write_parquet("new.parquet")
    old = rows(200)
    vectors = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    logged(old, vectors, watermark=FIRST - 1.0, version="one")
    config = with_history(student_config())
    zg.train_run(replace(config, training=replace(config.training, epochs=1)), folder="student")
    zg.export_run("student", out="served")
    served = zg.Recommender.load("served")
    column = "teacher:seer:vectors"

    def score(**user: object) -> float:
        [item] = served.rank({"item": 3, **user}, [{"item": 3}]).items
        return item.score

    none = score(user=7, **{column: []})
    assert score(user=7) != none
    assert score(user=7, **{column: None}) == score(user=7)
    assert score(user=7, **{column: [[1.0, 2.0]] * 10_000}) == score(user=7, **{column: [[1.0, 2.0]] * 4})
    assert np.isfinite(score(user=7, **{column: [[1e15, -1e15]]}))
    for broken in (
        [[1e16, 1.0]],
        [[1e39, 1.0]],
        [["nan", 1.0]],
        [["1e400", 1.0]],
        [[None, 1.0]],
        [[1.0]],
        [[]],
        [None],
        7,
    ):
        with pytest.raises(RequestError, match=r"vectors|numbers") as error:
            score(user=7, **{column: broken})
        assert column in error.value.where
    frame = pl.DataFrame({"user": [7], "item": [3], column: [[[1e20, 1.0]]]})
    with pytest.raises(SchemaError, match=r"at most 1e\+15"):
        served.chain.needed_ranker.packed.preprocessing.encode(RawChunk.of(frame), with_labels=False)
