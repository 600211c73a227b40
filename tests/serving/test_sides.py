"""Users and items that were encoded apart join to the batch of whole rows, bit for bit; requests read as files do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.serving.shop import SCHEMA, events
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import RequestError
from ziggurat.serving.answering.sides import Side, encode_frame, join
from ziggurat.serving.request_rows import canonical_id, frame_of

WIDE = zg.Schema(
    features=(
        zg.Vector(name="look", dim=3),
        zg.Dense(name="age"),
        zg.MultiHot(name="tags"),
        zg.Categorical(name="item"),
        zg.Dense(name="price", transform="quantile_buckets", num_buckets=4),
        zg.Categorical(name="user_id"),
        zg.Sequence(name="history", table="item", max_length=2),
        zg.Vector(name="taste", dim=2),
    ),
    labels=(zg.Label(name="like"),),
    group="user_id",
)
SIDES = {"user_id", "age", "history", "taste"}


def wide(num_rows: int, seed: int) -> pl.DataFrame:
    draw = np.random.default_rng(seed)
    frame = events(num_rows, seed=seed)
    holes = pl.Series(draw.random(num_rows) < 0.2)
    frame = frame.with_columns(
        pl.when(holes.to_frame("h")["h"]).then(None).otherwise(pl.col(name)).alias(name)
        for name in ("age", "item", "tags", "history")
    )
    return frame.with_columns(
        look=pl.Series(draw.normal(size=(num_rows, 3)).tolist()),
        taste=pl.Series(draw.normal(size=(num_rows, 2)).tolist()),
    )


@pytest.mark.parametrize("names", [SIDES, set(), {feature.name for feature in WIDE.features}])
def test_joined_sides_are_whole_rows(names: set[str]) -> None:
    preprocessing = Preprocessing.fit(WIDE, [RawChunk.of(wide(300, 0))])
    rows = wide(50, 5)
    users = Side(preprocessing, names=names)
    items = Side(preprocessing, names={feature.name for feature in WIDE.features} - names)
    draw = np.random.default_rng(1)
    u, i = draw.integers(0, 50, 200), draw.integers(0, 50, 200)
    mine = {feature.name for feature in WIDE.features if feature.name in names}
    whole = pl.concat(
        [rows[u].select(sorted(mine)), rows[i].select(sorted({f.name for f in WIDE.features} - mine))], how="horizontal"
    )
    expected = preprocessing.batch(whole)
    found = join(
        preprocessing.inputs,
        users=encode_frame(users, rows),
        items=encode_frame(items, rows),
        pairs=(torch.from_numpy(u), torch.from_numpy(i)),
    )
    for name, tensor in expected.tensors().items():
        if name not in ("groups", "row_ids"):
            assert torch.equal(found.tensors()[name], tensor), name


def test_no_pairs_are_an_empty_batch() -> None:
    preprocessing = Preprocessing.fit(SCHEMA, [RawChunk.of(events(100))])
    sides = [encode_frame(Side(preprocessing, names=names), events(5)) for names in ({"user_id", "age", "history"},)]
    items = encode_frame(Side(preprocessing, names={"item", "tags", "price"}), events(5))
    nobody = torch.empty(0, dtype=torch.int64)
    assert join(preprocessing.inputs, users=sides[0], items=items, pairs=(nobody, nobody)).batch_size == 0


def test_rows_of_requests_are_encoded_as_rows_of_files() -> None:
    raw, schema = events(200), SCHEMA
    preprocessing = Preprocessing.fit(schema, [RawChunk.of(raw)])
    expected = preprocessing.batch(raw)
    forms: list[dict[str, Any]] = raw.to_dicts()
    for index, row in enumerate(forms):
        row["user_id"] = [row["user_id"], str(row["user_id"]), float(row["user_id"]), f"{row['user_id']}.0"][index % 4]
        row["age"] = [row["age"], f" {row['age']} ", float(row["age"])][index % 3]
    found = preprocessing.batch(frame_of(forms, schema))
    for name, tensor in expected.tensors().items():
        if name not in ("groups", "row_ids"):
            assert torch.equal(found.tensors()[name], tensor), name


def test_ids_have_one_text() -> None:
    assert [canonical_id(value) for value in (7, 7.0, "7", "7.0", "-0.0", True, 7.5, "007", "", None, math.nan)] == [
        *("7", "7", "7", "7", "0", "true", "7.5", "007", None, None, None)
    ]
    series = pl.Series(["7.0", "--7.0", "-7.0", "x.0", "7.00", ".0", "٣.0", "1.0.0"])
    from ziggurat.data.preprocess.values.cells import canonical_text

    texts = canonical_text(series)
    assert texts is not None
    assert [canonical_id(value) for value in series] == texts.to_list()


@pytest.mark.parametrize(
    "value", [object(), {"a": 1}, [1], math.inf, 10**400, "x" * 20_000, "\ud800"], ids=lambda value: str(type(value))
)
def test_what_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="user_id"):
        frame_of([{"user_id": value}], SCHEMA)


@pytest.mark.parametrize("value", ["x", [1], {}, 10**400, object()])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="age"):
        frame_of([{"age": value}], SCHEMA)


def test_pairs_have_the_moments_of_their_users() -> None:
    from ziggurat.features.batch import Batch
    from ziggurat.features.inputs import InputSpec, MomentsSpec
    from ziggurat.features.jagged import moments_group
    from ziggurat.serving.answering.sides import EncodedSide, join

    inputs = InputSpec(moments=(MomentsSpec(name="at", max_length=3),))
    plain = Batch(
        dense=torch.empty(2, 0),
        single=torch.empty(0, 2, dtype=torch.int64),
        labels=torch.empty(2, 0),
        row_ids=torch.arange(2),
    )
    times = moments_group(torch.tensor([5, 7, 9]), torch.tensor([0, 1, 3]))
    users = EncodedSide(inputs=inputs, batch=dataclasses.replace(plain, sequences={"at": times}))
    items = EncodedSide(inputs=InputSpec(), batch=plain)
    pairs = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1])
    found = join(inputs, users=users, items=items, pairs=pairs).sequences["at"]
    assert found.values["time"].tolist() == [7, 9, 5, 7, 9]
    assert found.offsets.tolist() == [0, 2, 3, 5]
