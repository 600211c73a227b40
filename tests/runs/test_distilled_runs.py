"""Runs that learn from logged scores: served as without, resumed with their heads, refused where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError
from ziggurat.features.items import Items
from ziggurat.models.costs.model_cost import flops_per_sample
from ziggurat.runs.execute import prepare_run
from ziggurat.runs.teachers.student import mean_targets
from ziggurat.serving.export.export_folder import open_export
from ziggurat.serving.export.packed_model import load_model
from ziggurat.serving.load_parts import RANKER
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


class Operations(TorchDispatchMode):
    """Writes down what is computed, with shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(each.shape) for each in args if isinstance(each, torch.Tensor)]
        self.names.append(f"{func} {shapes}")
        return func(*args, **(kwargs or {}))


def served_work(model: zg.Model, batch: zg.Batch) -> tuple[int, int, list[str]]:
    """FLOPs, weights, and operations of a request."""
    with torch.no_grad(), Operations() as seen:
        model(batch)
    return flops_per_sample(model).total, sum(each.numel() for each in model.state_dict().values()), seen.names


def test_a_student_costs_in_service_what_a_run_without_a_teacher_does(folder: Path) -> None:
    """The same FLOPs, weights and operations one by one: of the run that is loaded, and of its export."""
    served = replace(SCHEMA, items=Items(id="item", features=("item",)))
    zg.write_schema(served, "my.toml")
    assert train("plain", "--epochs", "1") == 0
    taught = ["--distil", "aux-head", "--distil.adapter", "true", "--distil.label-scaling", "2"]
    assert train("taught", "--epochs", "1", *taught) == 0
    runs = [zg.load_run(each) for each in ("plain", "taught")]
    batches = [run.preprocessing.batch(rows(8).drop("click", "teacher")) for run in runs]
    plain, student = (served_work(run.model, batch) for run, batch in zip(runs, batches, strict=True))
    assert len(plain[2]) > 10
    assert student == plain
    exported: list[zg.Model] = []
    for name in ("plain", "taught"):
        out = folder / f"{name}-export"
        zg.export_run(name, out=out, config=zg.ExportConfig(golden=2, parity_rows=100))
        exported.append(load_model(open_export(out), RANKER).model)
    assert served_work(exported[1], batches[0]) == served_work(exported[0], batches[0])
    sizes = [{path.name: path.stat().st_size for path in (folder / f"{each}-export/ranker").iterdir()} for each in
             ("plain", "taught")]  # fmt: skip
    assert sizes[0].keys() == sizes[1].keys()
    assert sum(sizes[1].values()) == pytest.approx(sum(sizes[0].values()), rel=1e-3)


def test_heads_start_at_the_mean_of_the_targets_that_are_known(folder: Path) -> None:
    config = zg.table_run(zg.DNNConfig(embedding_dim=4), SCHEMA)
    data = replace(config.data, train=("taught.parquet",))
    prepared = prepare_run(replace(config, data=data))
    scaled = DistilConfig(head=DistilHead.AUX_HEAD, label_scaling=2.0)
    dataset = prepared.train
    scores = np.concatenate([dataset.read_group(each).column("extra:teacher").to_numpy() for each in range(1)])
    known = scores[~np.isnan(scores)]
    assert mean_targets(scaled, dataset)["teacher"][0] == pytest.approx(np.minimum(2 * known, 1).mean(), rel=1e-5)
    assert mean_targets(DistilConfig(head=DistilHead.SINGLE_HEAD), dataset) == {}


def test_a_stream_learns_from_a_column_of_its_files(folder: Path) -> None:
    zg.write_schema(replace(SCHEMA, time="at"), "timed.toml")
    rows().with_columns(at=pl.int_range(600) * 600 + 1_767_225_600).write_parquet("timed.parquet")
    given = ["--schema", "timed.toml", "--data.train", "timed.parquet", "--threads", "1", "--dim", "4", *SPARE]
    assert main(["stream", "table_dnn", *given, "--out", "plain"]) == 0
    assert (
        main(["stream", "table_dnn", *given, "--out", "live", "--distil", "aux-head", "--training.log-every", "1"]) == 0
    )
    assert '"teacher_share": 0.7' in (folder / "live" / "metrics.jsonl").read_text()
    plain, taught = (zg.load_run(each).model.state_dict() for each in ("plain", "live"))
    assert plain.keys() == taught.keys()
    assert not all(torch.equal(value, taught[name]) for name, value in plain.items())


def test_a_loss_of_ones_own_is_not_dropped_silently(folder: Path) -> None:
    config = zg.table_run(zg.DNNConfig(), SCHEMA)
    config = replace(config, distil=DistilConfig(head=DistilHead.SINGLE_HEAD))
    with pytest.raises(ConfigError, match="loss"):
        zg.train_run(config, folder="own", data=rows(), loss=lambda outputs, batch: outputs)  # pyright: ignore
