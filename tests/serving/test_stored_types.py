"""A value is the same whatever type carried it, through `predict`, an export and the JSON of a server, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.data.preprocess.test_stored_types import carriers, drawn
from tests.serving.server.test_app import talk
from ziggurat.features.schema import Encoding, NumericTransform, Table
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.export import ExportConfig
from ziggurat.runs.export.parity import request_rows
from ziggurat.training.config import TrainingConfig

NUM_ROWS = 40
NUM_ASKED = 10  # of them, one request each
TYPES = ("as it is", "text", "dictionary", "int32", "float64", "float32", "decimal", "python")
DENSE = (NumericTransform.STANDARDISE, NumericTransform.QUANTILE, NumericTransform.QUANTILE_BUCKETS)


def columns_of(first: int, number: int) -> dict[str, list[Any]]:
    """Columns of equal length, as `drawn` draws them."""
    found = {}
    for seed in range(first, first + number):
        values = drawn(seed)
        found[f"x{seed}"] = (values * NUM_ROWS)[:NUM_ROWS]
    return found


def schema_of(columns: dict[str, list[Any]], *, seed: int) -> zg.Schema:
    """Each column as a number or an id, drawn; truth values as ids."""
    rng = np.random.default_rng(seed)
    features: list[Any] = [zg.Categorical(name="item")]
    for name, values in columns.items():
        kind = int(rng.integers(3, 5) if isinstance(values[-1], bool) else rng.integers(5))
        if kind < 3:
            features.append(zg.Dense(name=name, transform=DENSE[kind]))
        else:
            features.append(zg.Categorical(name=name, table="buckets" if kind == 4 else name))
    return zg.Schema(
        features=tuple(features),
        labels=(zg.Label(name="like"),),
        tables=(Table(name="buckets", encoding=Encoding.HASHING, num_rows=1000),),
        missing_texts=("-1",),
        items=zg.Items(id="item", features=("item",)),
    )


def frames_of(columns: dict[str, list[Any]]) -> dict[str, pl.DataFrame]:
    """The columns in every type that can carry them; those that a type cannot carry are as they are."""
    carried = {name: carriers(values) for name, values in columns.items()}
    more = {"item": [f"i{row % 7}" for row in range(NUM_ROWS)], "like": [row % 3 == 0 for row in range(NUM_ROWS)]}
    frames = {}
    for kind in TYPES:
        series = [each.get(kind, each["as it is"]).alias(name) for name, each in carried.items()]
        frames[kind] = pl.DataFrame({**more, **{each.name: each for each in series}})
    return frames


def scores_of_server(answerer: zg.Recommender, requests: list[list[dict[str, Any]]]) -> list[list[float]]:
    """The score of each row of each list, through the JSON of /rank."""

    async def body(http: httpx.AsyncClient) -> list[list[float]]:
        found = []
        for rows in requests:
            scores = []
            for row in rows:
                user = {name: value for name, value in row.items() if name not in ("item", "like")}
                answer = await http.post("/rank", content=json.dumps({"user": user, "items": [{"item": row["item"]}]}))
                assert answer.status_code == 200, answer.text
                scores.append(answer.json()["items"][0]["tasks"]["like"])
            found.append(scores)
        return found

    return talk(body, answerer=answerer)  # type: ignore[arg-type]


def check_columns(first: int, number: int, folder: Path) -> int:
    """Carry columns through every type, reader, export and request; return in how many ways a column went."""
    columns = columns_of(first, number)
    frames = frames_of(columns)
    frames["as it is"].write_parquet(folder / "train.parquet")
    model = zg.DCNv2Config(embedding_dim=4, deep=MLPConfig(hidden_dims=(8,)))
    training = TrainingConfig(epochs=1)
    config = RunConfig(
        data=zg.DataConfig(train=(str(folder / "train.parquet"),)),
        table_schema=schema_of(columns, seed=first),
        model=model,
        training=training,
    )
    zg.train_run(config, folder=folder / "run")
    run = zg.load_run(folder / "run")
    expected = run.predict(frames["as it is"])["like"].to_numpy()
    assert np.unique(expected).size > NUM_ROWS // 4
    ways = 0
    for kind, frame in frames.items():
        frame.write_parquet(folder / "x.parquet")
        frame.write_ipc(folder / "x.arrow", compat_level=pl.CompatLevel.oldest())
        frame.write_csv(folder / "x.csv")
        # The zeros of a decimal ("1.50") are text in a text file, and text may be a version.
        for path in ("x.parquet", "x.arrow") if kind == "decimal" else ("x.parquet", "x.arrow", "x.csv"):
            run.predict([str(folder / path)], out=folder / "scores.parquet")
            found = pl.read_parquet(folder / "scores.parquet")["like"].to_numpy()
            np.testing.assert_array_equal(found, expected, err_msg=f"{first}, {kind}, {path}")
            ways += 1
    # The traced network for other programs is not asked here.
    zg.export_run(folder / "run", out=folder / "export", config=ExportConfig(program=False))
    answerer = zg.Recommender.load(folder / "export")
    for kind, frame in frames.items():
        np.testing.assert_allclose(answerer.scores(frame)[:, 0], expected, rtol=0, atol=1e-6, err_msg=kind)
        ways += 1
    plain = frames["as it is"].head(NUM_ASKED).to_dicts()
    requests = [plain, *(request_rows(frame.head(NUM_ASKED)) for frame in frames.values())]
    for scores in scores_of_server(answerer, requests):
        np.testing.assert_allclose(scores, expected[:NUM_ASKED], rtol=0, atol=1e-6, err_msg=str(first))
        ways += 1
    return ways


def test_columns_are_scored_alike_through_predict_exports_and_a_server(tmp_path: Path) -> None:
    assert check_columns(0, 16, tmp_path) == 23 + 8 + 9


@pytest.mark.slow
def test_a_thousand_columns_are_scored_alike_through_predict_exports_and_a_server(tmp_path: Path) -> None:
    for first in range(0, 1000, 40):
        folder = tmp_path / str(first)
        folder.mkdir()
        assert check_columns(first, 40, folder) == 23 + 8 + 9
