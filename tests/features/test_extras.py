"""Extra columns: from a raw file through encoded data and every loader to the loss; absent where scores are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.embeddings import KernelChoice
from ziggurat.errors import DataError, SchemaError
from ziggurat.features.batches.samples import concatenate_batches, take_samples
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema_io import schema_from_toml, schema_to_toml
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.negatives import _marked

EXTRAS = (zg.Extra(name="teacher", column="old score"), zg.Extra(name="hidden", dim=3))
SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user"), zg.MultiHot(name="tags"), zg.Vector(name="text", dim=2)),
    labels=(zg.Label(name="click"),),
    extras=EXTRAS,
)


def rows(num_rows: int) -> pl.DataFrame:
    """Every fifth row has no teacher, every seventh no hidden vector."""
    draw = np.random.default_rng(0)
    scores = draw.normal(size=num_rows).astype(np.float32)
    hidden = draw.normal(size=(num_rows, 3)).astype(np.float32)
    return pl.DataFrame(
        {
            "user": draw.integers(0, 9, num_rows),
            "tags": [["a", "b"][: i % 3] for i in range(num_rows)],
            "text": [[i / num_rows, -1.0] for i in range(num_rows)],
            "click": draw.integers(0, 2, num_rows),
            "old score": pl.Series([None if i % 5 == 0 else float(x) for i, x in enumerate(scores)], dtype=pl.Float32),
            "hidden": [None if i % 7 == 0 else each.tolist() for i, each in enumerate(hidden)],
        }
    )


def wanted(frame: pl.DataFrame, row_ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    chosen = frame[row_ids.numpy()]
    hidden = [[np.nan] * 3 if each is None else each for each in chosen["hidden"].to_list()]
    return chosen["old score"].fill_null(float("nan")).to_numpy(), np.array(hidden, dtype=np.float32)


def check(batch: zg.Batch, frame: pl.DataFrame) -> None:
    teacher, hidden = wanted(frame, batch.row_ids)
    np.testing.assert_array_equal(batch.extras["teacher"].numpy(), teacher)
    np.testing.assert_array_equal(batch.extras["hidden"].numpy(), hidden)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[zg.PreparedData, Path]:
    folder = tmp_path_factory.mktemp("extras")
    rows(400).write_parquet(folder / "rows.parquet")
    config = zg.DataConfig(train=(str(folder / "rows.parquet"),))
    return zg.prepare(config, schema=SCHEMA, folder=folder / "prepared"), folder


def test_toml_and_json_keep_them_and_other_schemas_know_nothing_of_them() -> None:
    text = schema_to_toml(SCHEMA)
    assert '[[extra]]\nname = "teacher"\ncolumn = "old score"' in text
    assert schema_from_toml(text, "test") == SCHEMA
    assert from_json(zg.Schema, to_json(SCHEMA), where="test") == SCHEMA
    without = zg.Schema(features=SCHEMA.features, labels=SCHEMA.labels)
    assert "extras" not in without.to_state()
    assert SCHEMA.columns == without.columns == without.training_columns
    assert SCHEMA.training_columns[-2:] == ("old score", "hidden")


@pytest.mark.parametrize("name", ["", "piece_starts", "negatives.candidates"])
def test_names_that_batches_need_are_refused(name: str) -> None:
    with pytest.raises(SchemaError, match="name"):
        zg.Schema(features=SCHEMA.features, extras=(zg.Extra(name=name),))


def test_two_of_one_name_and_a_feature_called_like_their_column_are_refused() -> None:
    with pytest.raises(SchemaError, match="every extra to have a name of its own"):
        zg.Schema(features=SCHEMA.features, extras=(EXTRAS[0], EXTRAS[0]))
    with pytest.raises(SchemaError, match="extra:teacher"):
        zg.Schema(features=(zg.Dense(name="extra:teacher"),), extras=EXTRAS)
    assert zg.Schema(features=(zg.Dense(name="extra:teacher"),)).columns == ("extra:teacher",)


def test_every_batch_of_a_loader_has_those_of_its_rows(prepared: tuple[zg.PreparedData, Path]) -> None:
    data, _ = prepared
    frame = rows(400)
    seen = []
    for batch in Loader(data.train, config=LoaderConfig(batch_size=64, seed=4)).batches(epoch=0):
        check(batch, frame)
        seen += batch.row_ids.tolist()
    assert len(seen) == data.train.num_rows
    empty = zg.Batch.empty(data.inputs)
    assert {name: tuple(each.shape) for name, each in empty.extras.items()} == {"teacher": (0,), "hidden": (0, 3)}


def test_a_batch_of_a_table_and_its_parts_have_them() -> None:
    frame = rows(40)
    preprocessing = Preprocessing.fit(SCHEMA, [RawChunk.of(frame)])
    batch = preprocessing.batch(frame, with_labels=True)
    check(batch, frame)
    check(batch.rows(3, 20), frame)
    mixed = concatenate_batches([take_samples(batch, torch.tensor([7, 1])), take_samples(batch, torch.tensor([5]))])
    check(mixed, frame)
    assert "extras.teacher" in batch.tensors()
    assert set(_marked(batch, batch.row_ids).extras) == {"teacher", "hidden", "negatives.candidates"}
    again = table_to_batch(preprocessing.encode(RawChunk.of(frame)), preprocessing.inputs)
    check(again, frame)


def test_scores_need_none_and_have_none() -> None:
    frame = rows(40)
    preprocessing = Preprocessing.fit(SCHEMA, [RawChunk.of(frame)])
    features = frame.drop("click", "old score", "hidden")
    assert preprocessing.batch(features).extras == {}
    with pytest.raises(SchemaError, match="old score"):
        preprocessing.batch(features.with_columns(click=1), with_labels=True)
    chunk = RawChunk.of(features.with_columns(click=1))
    evaluated = table_to_batch(preprocessing.encode(chunk, needs_extras=False), preprocessing.inputs)
    assert evaluated.extras["teacher"].isnan().all()
    assert evaluated.extras["hidden"].isnan().all()


def test_what_is_no_number_is_a_bad_row_with_its_place() -> None:
    frame = rows(10).with_columns(pl.lit("high").alias("old score"))
    with pytest.raises(DataError, match=r"high"):
        Preprocessing.fit(SCHEMA, [RawChunk.of(frame)])
    with pytest.raises(DataError, match="vector of 3 numbers"):
        Preprocessing.fit(SCHEMA, [RawChunk.of(rows(10).with_columns(hidden=[1.0, 2.0]))])


def test_random_batches_have_them() -> None:
    inputs = Preprocessing.fit(SCHEMA, [RawChunk.of(rows(10))]).inputs
    assert from_json(InputSpec, to_json(inputs), where="test") == inputs
    assert random_batch(inputs, 5).extras["hidden"].shape == (5, 3)


def distilled(outputs: zg.Outputs, batch: zg.Batch) -> zg.LossSums:
    """Squared distance to the teacher's scores, where it has one."""
    teacher = batch.extras["teacher"]
    known = ~teacher.isnan()
    errors = torch.where(known, outputs.logits.float().squeeze(1) - teacher, 0.0).square()
    return zg.LossSums(total=errors.sum().view(1), weight=known.float().sum().view(1))


def test_a_run_learns_what_a_teacher_said(prepared: tuple[zg.PreparedData, Path], tmp_path: Path) -> None:
    """Labels are noise here, so only the teacher's scores can be learned: the mean of each user's."""
    _, folder = prepared
    frame = rows(3000).with_columns((pl.col("user") / 2 - 2).cast(pl.Float32).alias("old score"))
    frame.write_parquet(folder / "taught.parquet")
    data = zg.prepare(zg.DataConfig(train=(str(folder / "taught.parquet"),)), schema=SCHEMA, folder=folder / "prepared")
    model = zg.build_model(zg.DLRMConfig(embedding_dim=4), data.inputs, seed=0)
    config = zg.TrainingConfig(
        epochs=4, learning_rate=0.02, table_learning_rate=0.1, loader=LoaderConfig(batch_size=64)
    )
    trainer = zg.Trainer(model, config=config, train=data.train, folder=tmp_path / "run", loss=distilled)
    trainer.fit()
    batch = data.preprocessing.batch(frame.head(200))
    with torch.no_grad():
        scores = model(batch).squeeze(1)
    truth = torch.tensor(frame["old score"].head(200).to_list())
    assert float((scores - truth).abs().mean()) < 0.1


class Taught(zg.DLRM):
    """A model whose loss is the distance to a teacher."""

    def loss(self, outputs: zg.Outputs, batch: zg.Batch) -> zg.LossSums:
        return distilled(outputs, batch)

    def loss_weight(self, batch: zg.Batch) -> torch.Tensor:
        return (~batch.extras["teacher"].isnan()).float().sum().view(1)


def check_ranks(rank: int) -> None:
    """Runs on every rank."""
    frame = rows(13)
    preprocessing = Preprocessing.fit(SCHEMA, [RawChunk.of(frame)])

    def build() -> zg.Model:
        config = zg.DLRMConfig(embedding_dim=4, embedding=zg.EmbeddingConfig(kernel=KernelChoice.TORCH))
        model = zg.build_model(config, preprocessing.inputs, seed=3)
        model.__class__ = Taught
        return model

    ranks = (0, 1, 2, 3)
    tables = tuple(TablePlacement(table=name, placement=Placement.ROW_WISE, ranks=ranks) for name in ("user", "tags"))
    assert_same_as_single_device(
        build,
        Plan(world_size=4, tables=tables),
        batch=preprocessing.batch(frame, with_labels=True),
        tolerance=Tolerance(fields=1e-6, others=3e-6),
    )


def test_four_ranks_learn_from_them_as_one_device_does() -> None:
    run_ranks(check_ranks, 4)


def test_verbs_that_score_ask_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    schema = zg.Schema(
        features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
        labels=(zg.Label(name="click"),),
        items=zg.Items(id="item"),
        extras=EXTRAS[:1],
    )
    zg.write_schema(schema, "my.toml")
    frame = rows(1000).with_columns(item=pl.int_range(1000) % 11).select("user", "item", "click", "old score")
    frame.write_csv("taught.csv")
    frame.drop("old score").write_csv("plain.csv")
    given = ["--schema", "my.toml", "--out", "runs/a", "--threads", "1", "--epochs", "1", "--data.train"]
    assert main(["train", "table_dlrm", "--model.embedding-dim", "4", *given, "taught.csv"]) == 0
    assert main(["evaluate", "runs/a", "plain.csv"]) == 0
    assert main(["predict", "runs/a", "plain.csv", "--out", "scores.csv"]) == 0
    assert main(["export", "runs/a", "--out", "export", "--allow"]) == 0
    assert zg.Recommender.load(Path("export")).rank({"user": 3}, ["5"]).items[0].id == "5"
    with pytest.raises(SchemaError, match="old score"):
        zg.prepare(zg.DataConfig(train=("plain.csv",)), schema=schema, folder=tmp_path / "prepared")
