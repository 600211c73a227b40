"""Small encoded tables of any size and of every kind of column, for tests.

Every value is a function of the number of its row, so a test can tell from any batch whether each value is still with
the row that it belongs to, however the rows were shuffled, cut or sent around.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from ziggurat.data.encoded.dataset import EncodedDataset, EncodedWriter
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec, VectorHistory, VectorSpec

SAID = VectorHistory(length=2, dim=2, format="bf16", row_words=1)
FULL = InputSpec(
    dense=("price", "age"),
    single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
    jagged=(JaggedSpec(name="tags", table="item"), JaggedSpec(name="history", table="item", ordered=True)),
    vectors=(
        VectorSpec(name="image", dim=3),
        VectorSpec(name="said", dim=5, history=SAID),
        VectorSpec(name="text", dim=1),
    ),
    tables=(TableSpec(name="user", num_rows=1000), TableSpec(name="item", num_rows=1000)),
    labels=(LabelSpec(name="click"), LabelSpec(name="buy")),
    has_weights=True,
    has_groups=True,
)
PLAIN = InputSpec(
    dense=("price",),
    single=(SingleSpec(name="user", table="user"),),
    tables=(TableSpec(name="user", num_rows=1_000_000),),
    labels=(LabelSpec(name="click"),),
)


def plain_table(num_rows: int, *, start: int = 0) -> pa.Table:
    """Make rows of `PLAIN`: user, price and row are all the row's number."""
    rows = np.arange(start, start + num_rows)
    return pa.table(
        {
            "price": rows.astype(np.float32),
            "user": rows.astype(np.int32),
            "label:click": (rows % 2).astype(np.float32),
            "row:": rows,
        }
    )


def list_lengths(row: int) -> tuple[int, int]:
    """Lengths of the two lists of a row of `full_table`: often empty, one huge."""
    return (5000 if row == 7 else row % 4, 0 if row % 3 else row % 5)


def full_table(num_rows: int, *, start: int = 0, with_labels: bool = True) -> pa.Table:
    """Make rows of `FULL`; every value is a function of the row's number."""
    rows = np.arange(start, start + num_rows)
    tags = [[(row + k) % 1000 for k in range(list_lengths(row)[0])] for row in rows.tolist()]
    history = [[(row * 3 + k) % 1000 for k in range(list_lengths(row)[1])] for row in rows.tolist()]
    image = (rows[:, None] + np.array([0.25, 0.5, 0.75])).astype(np.float32)
    columns: dict[str, object] = {
        "price": rows.astype(np.float32),
        "age": (-rows).astype(np.float32),
        "user": (rows % 1000).astype(np.int32),
        "item": ((rows * 7) % 1000).astype(np.int32),
        "tags": pa.array(tags, pa.list_(pa.int32())),
        "history": pa.array(history, pa.list_(pa.int32())),
        "image": pa.FixedSizeListArray.from_arrays(image.ravel(), 3),
        "said": pa.FixedSizeListArray.from_arrays(said_words(rows).ravel(), 3),
        "text": pa.FixedSizeListArray.from_arrays((rows * 0.5).astype(np.float32), 1),
        "group:": rows // 10,
        "row:": rows,
    }
    if with_labels:
        columns["label:click"] = (rows % 2).astype(np.float32)
        columns["label:buy"] = (rows % 5 / 4).astype(np.float32)
        columns["weight:"] = (rows * 0.125).astype(np.float32)
    return pa.table(columns)


def said_words(rows: np.ndarray) -> np.ndarray:
    """Return the packed history of each row, of one vector at most.

    Behind it are bits that are NaNs of all kinds where somebody takes them for floats.
    """
    nans = np.int64(0x7F800001) + rows % 1_000_000
    return np.stack([rows % 2, rows, nans], axis=1).astype(np.int32)


def written(
    folder: Path, table: pa.Table, *, inputs: InputSpec, rows_per_group: int = 100, groups_per_file: int = 3
) -> EncodedDataset:
    """An encoded data set on disk with the rows of `table`."""
    with EncodedWriter(
        folder, inputs, rows_per_group=rows_per_group, rows_per_file=rows_per_group * groups_per_file
    ) as writer:
        writer.append(table)
    return EncodedDataset(folder)
