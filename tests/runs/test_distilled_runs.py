"""Runs that learn from logged scores: served as without, resumed with their heads, refused where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.distillation import DistilConfig, DistilHead

# Nothing is measured at the start.
SPARE = ("--model.embedding.kernel", "torch", "--precision", "fp32")
SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
    labels=(zg.Label(name="click"),),
    extras=(zg.Extra(name="teacher"),),
)


def rows(count: int = 600) -> pl.DataFrame:
    n = pl.int_range(count, eager=True)
    frame = pl.DataFrame({"user": n * 7 % 40, "item": n * 11 % 25})
    return frame.with_columns(
        click=(n * 13 % 5 == 0).cast(pl.Int64),
        teacher=pl.when(n % 4 == 0).then(None).otherwise(pl.col("user") / 50).cast(pl.Float32),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    zg.write_schema(SCHEMA, "my.toml")
    rows().write_parquet("taught.parquet")
    return tmp_path


def train(out: str, *more: str) -> int:
    given = ["--schema", "my.toml", "--data.train", "taught.parquet", "--out", out, "--threads", "1", "--dim", "4"]
    return main(["train", "table_dnn", *given, "--batch-size", "64", "--training.log-every", "1", *SPARE, *more])


def test_a_student_serves_what_a_run_without_a_teacher_does(folder: Path) -> None:
    """With w = 0 the teacher changes no bit, and nothing of it is in a run that is loaded."""
    assert train("plain", "--epochs", "1") == 0
    none = ["--distil", "aux-head", "--distil.loss-weight", "0"]
    assert train("student", "--epochs", "1", *none) == 0
    plain, student = (zg.load_run(each).model.state_dict() for each in ("plain", "student"))
    assert plain.keys() == student.keys()
    assert all(torch.equal(value, student[name]) for name, value in plain.items())
    saved = CheckpointStore(folder / "student" / "checkpoints").load()
    assert any(name.startswith("model.student.heads.") for name in saved.tensors)
    assert train("taught", "--epochs", "1", "--distil", "aux-head", "--distil.adapter", "true") == 0
    taught = zg.load_run("taught").model.state_dict()
    assert taught.keys() == plain.keys()
    assert not all(torch.equal(value, taught[name]) for name, value in plain.items())
    log = (folder / "taught" / "metrics.jsonl").read_text()
    assert '"teacher_share"' in log
    assert '"distil_loss"' in log


def test_a_resumed_student_ends_with_the_same_bits(folder: Path) -> None:
    taught = ["--distil", "aux-head", "--distil.adapter", "true", "--distil.gradient-scaling", "3"]
    assert train("whole", "--epochs", "2", *taught) == 0
    assert train("parts", "--epochs", "1", *taught) == 0
    assert main(["train", "parts", "--resume", "--epochs", "2"]) == 0
    whole, parts = (CheckpointStore(folder / each / "checkpoints").load() for each in ("whole", "parts"))
    assert whole.tensors.keys() == parts.tensors.keys()
    assert all(torch.equal(value, parts.tensors[name]) for name, value in whole.tensors.items())


def test_what_cannot_learn_from_a_teacher_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "table_logistic_regression", "--schema", "my.toml", "--data.train", "taught.parquet",
                 "--out", "linear", "--distil", "aux-head"]) != 0  # fmt: skip
    assert "LogisticRegression" in capsys.readouterr().err
    assert train("twice", "--distil", "both-heads") != 0
    assert "single_head" in capsys.readouterr().err
    assert train("both", "--distil", "aux-head", "--self-distil", "smc2") == 2
    assert "--self-distil none" in capsys.readouterr().err
    assert train("begun", "--epochs", "1", "--distil", "single-head") == 0
    assert main(["train", "begun", "--resume", "--epochs", "2", "--distil", "aux-head"]) != 0
    assert "distil.head" in capsys.readouterr().err


def test_a_stream_refuses_what_it_would_not_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zg.write_schema(replace(SCHEMA, time="at"), "timed.toml")
    rows().with_columns(at=pl.int_range(600) + 1_767_225_600).write_parquet("timed.parquet")
    given = ["--schema", "timed.toml", "--data.train", "timed.parquet", "--distil.head", "aux-head", "--out", "live"]
    assert main(["stream", "table_dnn", *given]) == 2
    assert "--distil.head" in capsys.readouterr().err
    assert not (folder / "live").exists()


def test_a_loss_of_ones_own_is_not_dropped_silently(folder: Path) -> None:
    config = zg.table_run(zg.DNNConfig(), SCHEMA)
    config = replace(config, distil=DistilConfig(head=DistilHead.SINGLE_HEAD))
    with pytest.raises(ConfigError, match="loss"):
        zg.train_run(config, folder="own", data=rows(), loss=lambda outputs, batch: outputs)  # pyright: ignore
