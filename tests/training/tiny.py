"""A tiny learnable data set in memory, and small models on it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS


def tiny_inputs(*, labels: tuple[str, ...] = ("click",)) -> InputSpec:
    return InputSpec(
        dense=("price", "age"),
        single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
        jagged=(JaggedSpec(name="tags", table="tags"),),
        tables=(
            TableSpec(name="user", num_rows=40 + NUM_RESERVED_ROWS),
            TableSpec(name="item", num_rows=20 + NUM_RESERVED_ROWS),
            TableSpec(name="tags", num_rows=10 + NUM_RESERVED_ROWS),
        ),
        labels=tuple(LabelSpec(name=name) for name in labels),
        has_groups=True,
    )


def tiny_dataset(
    num_rows: int, *, seed: int = 0, nan_row: int | None = None, labels: tuple[str, ...] = ("click",)
) -> MemoryDataset:
    """Labels follow from user, item and price, so that a model can learn them."""
    rng = np.random.default_rng(seed)
    price = rng.normal(size=num_rows).astype(np.float32)
    if nan_row is not None:
        price[nan_row] = 0.0
    user = rng.integers(0, 40, num_rows)
    item = rng.integers(0, 20, num_rows)
    logit = 2.0 * (user % 2) + 2.0 * (item % 3 == 0) - 2.0 + price
    tags = [rng.integers(0, 10, rng.integers(0, 4)) + NUM_RESERVED_ROWS for _ in range(num_rows)]
    columns: dict[str, pa.Array] = {
        "price": pa.array(price),
        "age": pa.array(rng.normal(size=num_rows).astype(np.float32)),
        "user": pa.array((user + NUM_RESERVED_ROWS).astype(np.int32)),
        "item": pa.array((item + NUM_RESERVED_ROWS).astype(np.int32)),
        "tags": pa.array([list(map(int, row)) for row in tags], type=pa.list_(pa.int32())),
    }
    for name in labels:
        columns[f"label:{name}"] = pa.array((rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(np.float32))
    columns["group:"] = pa.array(user.astype(np.int64))
    columns["row:"] = pa.array(np.arange(num_rows, dtype=np.int64))
    dataset = MemoryDataset(pa.table(columns), tiny_inputs(labels=labels), rows_per_group=64)
    if nan_row is not None:  # put in afterwards, as a fault of memory would be: a data set with one is refused
        price[nan_row] = np.nan
        at = dataset._table.column_names.index("price")
        dataset._table = dataset._table.set_column(at, dataset._table.schema.field(at), pa.array(price))
    return dataset
