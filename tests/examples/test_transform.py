"""A numeric transform from outside the package: the same bits in training, exports, requests and on ranks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.numeric import NumericFitter, to_floats
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.kinds import Dense
from ziggurat.features.transforms import Learns, NumericTransform
from ziggurat.models import build_model
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.runs.load import load_run
from ziggurat.serving.request_rows import frame_of
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

MODULE = "examples.extensions.signed_root"


@pytest.fixture
def signed_root() -> Iterator[NumericTransform]:
    """The transform, listed while a test runs: others of this process ask for all that are listed."""
    yield NumericTransform.add(importlib.import_module(MODULE).SIGNED_ROOT)
    del NumericTransform._members["signed_root"]


def rows_of(transform: NumericTransform, values: list[float | None]) -> np.ndarray:
    schema = zg.Schema(features=(Dense(name="x", transform=transform, missing=4.0),))
    chunk = RawChunk.of(pl.DataFrame({"x": pl.Series(values, dtype=pl.Float64)}))
    return Preprocessing.fit(schema, [chunk]).batch(chunk.frame).dense[:, 0].numpy()


def test_it_is_the_standardised_root_with_its_sign(signed_root: NumericTransform) -> None:
    values = [0.0, 1.0, -9.0, 1e4, None]
    roots = np.array([0.0, 1.0, -3.0, 100.0, 2.0])
    assert np.array_equal(rows_of(signed_root, values), ((roots - roots.mean()) / roots.std()).astype(np.float32))


class _Third(NumericTransform):
    name = "third"

    def before(self, values: Any, logarithms: Any) -> Any:
        return values / 3


@pytest.mark.parametrize(
    ("part", "answer", "message"),
    [
        ("before", lambda self, values, logarithms: np.sqrt(np.maximum(values, 0) - 1), "found:    nan of -7.0\n"),
        ("before", lambda self, values, logarithms: values - values.mean(), "depend on themselves alone"),
        ("before", lambda self, values, logarithms: values.astype(np.float32), "found:    63 of float32, for 63\n"),
        ("before", lambda self, values, logarithms: values[:3], "found:    3 of float64, for 63\n"),
        ("before", lambda self, values, logarithms: logarithms.log2(values), "has no attribute 'log2'"),
        ("learns", Learns.QUANTILES, "learns no quantiles"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_one_that_breaks_a_promise_is_refused_where_it_is_added(part: str, answer: Any, message: str) -> None:
    broken = type("Broken", (_Third,), {part: answer, "__module__": __name__})
    with pytest.raises(ConfigError, match=message):
        NumericTransform.add(broken())
    assert "third" not in NumericTransform._members


def test_a_later_answer_that_is_none_is_refused_with_its_place() -> None:
    class Late(_Third):
        def before(self, values: Any, logarithms: Any) -> Any:
            return np.where(values == 7.0, np.nan, values)

    feature = Dense(name="x", transform=Late())
    state = NumericFitter((feature,)).finish()["x"]
    with pytest.raises(ConfigError, match=r"NaN of (.|\n)*Late\.before"):
        to_floats(np.array([1.0, 7.0]), feature, state)


class _Halves(NumericTransform):
    name = "halves"
    learns = Learns.QUANTILES
    is_bucketed = True

    def quantiles(self, sample: Any, *, num_buckets: int) -> Any:
        return np.unique([np.median(sample)])


class _Sign(NumericTransform):
    name = "sign"
    makes_ids = True

    def bucket_ids(self, values: Any, logarithms: Any) -> Any:
        return np.sign(np.nan_to_num(values)).astype(np.int64)


@pytest.mark.parametrize(
    ("transform", "expected"), [(_Halves(), [3, 3, 4, 4, 2]), (_Sign(), [4, 5, 3, 3, 2])], ids=["buckets", "ids"]
)
def test_numbers_may_become_rows(transform: NumericTransform, expected: list[int]) -> None:
    NumericTransform.add(transform)
    try:
        schema = zg.Schema(features=(Dense(name="x", transform=transform, num_buckets=2),))
        chunk = RawChunk.of(pl.DataFrame({"x": [-5.0, 0.0, 2.0, 9.0, None]}))
        assert Preprocessing.fit(schema, [chunk]).batch(chunk.frame).single[0].tolist() == expected
    finally:
        del NumericTransform._members[transform.name]


def test_a_transform_that_nobody_listed_is_refused_with_the_way_to_list_it() -> None:
    with pytest.raises(SchemaError, match="--extension MODULE"):
        Dense(name="x", transform="signed_root")  # type: ignore[arg-type]


def sales(num_rows: int) -> pl.DataFrame:
    draw = np.random.default_rng(0)
    change = draw.normal(0, 40, num_rows) ** 3 / 100
    click = draw.random(num_rows) < 1 / (1 + np.exp(-np.cbrt(change) / 4))
    cells = [None if index % 50 == 7 else value for index, value in enumerate(change.tolist())]
    return pl.DataFrame({"item": draw.integers(0, 12, num_rows), "change": cells, "click": click.astype(np.int8)})


def schema_with(transform: NumericTransform) -> zg.Schema:
    return zg.Schema(
        features=(zg.Categorical(name="item"), zg.Dense(name="change", transform=transform)),
        labels=(zg.Label(name="click"),),
        items=zg.Items(id="item", features=("item",)),
    )


def test_training_export_and_requests_have_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed_root: NumericTransform
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    zg.write_schema(schema_with(signed_root), "my.toml")
    assert 'transform = "signed_root"' in Path("my.toml").read_text()
    frame = sales(2_000)
    frame.write_parquet("sales.parquet")
    known = ["--extension", MODULE]
    given = ["--data.train", "sales.parquet", "--schema", "my.toml", "--out", "runs/a", "--threads", "1"]
    settings = ["--model.embedding-dim", "4", "--epochs", "2", "--training.loader.batch-size", "64"]
    assert main([*known, "train", "table_dlrm", *given, *settings]) == 0
    assert main([*known, "predict", "runs/a", "sales.parquet", "--out", "scores.parquet"]) == 0
    assert main([*known, "export", "runs/a", "--out", "export"]) == 0
    trained = load_run(Path("runs/a")).preprocessing
    recommender = zg.Recommender.load(Path("export"))
    served = recommender.chain.ranker.packed.preprocessing
    rows = frame.select("item", "change").head(200).to_dicts()
    of_request = served.batch(frame_of(rows, served.schema)).dense
    of_run = trained.batch(frame.head(200)).dense
    assert of_run.numpy().tobytes() == of_request.numpy().tobytes()
    alone = [served.batch(frame_of([row], served.schema)).dense[0, 0].item() for row in rows[:20]]
    assert alone == of_run[:20, 0].tolist()
    scores = pl.read_parquet("scores.parquet")["click"].to_list()
    for row, score in zip(rows[:5], scores, strict=False):
        (ranked,) = recommender.rank({"change": row["change"]}, [str(row["item"])]).items
        assert abs(ranked.tasks["click"] - score) < 1e-6


def check_ranks(rank: int) -> None:
    """Runs on every rank, whose process imports the transform before it reads a schema."""
    schema = schema_with(importlib.import_module(MODULE).SIGNED_ROOT)
    chunk = RawChunk.of(sales(40))
    preprocessing = Preprocessing.fit(schema, [chunk])
    batch = preprocessing.batch(chunk.frame, with_labels=True)
    config = zg.DLRMConfig(embedding_dim=4, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
    table = TablePlacement(table="item", placement=Placement.ROW_WISE, ranks=(0, 1))
    assert_same_as_single_device(
        lambda: build_model(config, preprocessing.inputs, seed=3),
        Plan(world_size=2, tables=(table,)),
        batch=batch,
        tolerance=Tolerance(fields=1e-6, others=3e-6),
    )


def test_two_ranks_equal_one_device() -> None:
    run_ranks(check_ranks, 2)
