"""Encoded data sets: what goes in comes out, damage is found and named, and a folder is whole or absent."""

from __future__ import annotations

import itertools
import json
import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.encoded import part_files
from ziggurat.data.encoded.dataset import EncodedDataset, EncodedWriter, MemoryDataset
from ziggurat.data.encoded.records import encoded_schema, gather_segments, table_to_batch
from ziggurat.errors import BoundsError, DataError, MissingFileError
from ziggurat.features.batch import validate_batch
from ziggurat.features.inputs import InputSpec, JaggedSpec, TableSpec
from ziggurat.files import digest_of
from ziggurat.testing.encoded_examples import FULL, PLAIN, full_table, plain_table, written


def whole(dataset) -> pa.Table:
    groups = [dataset.read_group(index) for index in range(len(dataset.group_sizes))]
    return pa.concat_tables(groups) if groups else encoded_schema(dataset.inputs).empty_table()


@settings(deadline=None, max_examples=20)
@given(
    pieces=st.lists(st.integers(0, 60), max_size=6),
    rows_per_group=st.integers(1, 50),
    groups_per_file=st.integers(1, 4),
)
def test_rows_come_back_in_order_however_they_were_appended(tmp_path_factory, pieces, rows_per_group, groups_per_file):
    folder = tmp_path_factory.mktemp("encoded") / "data"
    with EncodedWriter(
        folder, FULL, rows_per_group=rows_per_group, rows_per_file=rows_per_group * groups_per_file
    ) as writer:
        start = 0
        for rows in pieces:
            writer.append(full_table(rows, start=start))
            start += rows
    dataset = EncodedDataset(folder)
    assert dataset.inputs == FULL
    assert dataset.num_rows == start == sum(dataset.group_sizes)
    assert all(size == rows_per_group for size in dataset.group_sizes[:-1])
    expected = full_table(start)
    found = whole(dataset)
    for name in expected.column_names:
        assert found.column(name).to_pylist() == expected.column(name).to_pylist(), name
    assert len(list(folder.glob("*.parquet"))) == -(-len(dataset.group_sizes) // groups_per_file)
    assert sorted(folder.parent.iterdir()) == [folder]  # nothing temporary left


def test_parquet_files_are_plain_and_readable_by_others(tmp_path):
    written(tmp_path / "data", full_table(20), inputs=FULL)
    table = pq.read_table(tmp_path / "data" / "part-00000.parquet")
    assert table.column_names == encoded_schema(FULL).names
    assert table.column("user").type == pa.int32()


def test_batch_of_a_table_has_every_value_in_its_place():
    batch = validate_batch(table_to_batch(full_table(9), FULL), FULL)
    assert batch.dense.tolist() == [[row, -row] for row in range(9)]
    assert batch.single.tolist() == [list(range(9)), [row * 7 for row in range(9)]]
    assert batch.single.dtype == torch.int64
    assert batch.labels.tolist() == [[row % 2, row % 5 / 4] for row in range(9)]
    assert batch.weights.tolist() == [row / 8 for row in range(9)]
    assert batch.groups.tolist() == [0] * 9
    assert batch.vectors["image"].tolist() == [[row + 0.25, row + 0.5, row + 0.75] for row in range(9)]
    assert batch.vectors["text"].tolist() == [[row / 2] for row in range(9)]
    lists = full_table(9)
    expected = lists.column("tags").to_pylist() + lists.column("history").to_pylist()
    cuts = batch.jagged.offsets.tolist()
    values = batch.jagged.values.tolist()
    assert [values[a:b] for a, b in itertools.pairwise(cuts)] == expected


def test_batch_of_no_rows():
    batch = validate_batch(table_to_batch(full_table(0), FULL), FULL)
    assert batch.batch_size == 0
    assert batch.single.shape == (2, 0)
    assert batch.vectors["image"].shape == (0, 3)


def test_batch_of_nothing_but_lists():
    inputs = InputSpec(jagged=(JaggedSpec(name="tags", table="t"),), tables=(TableSpec(name="t", num_rows=9),))
    table = pa.table({"tags": pa.array([[1, 2], [], [3]], pa.list_(pa.int32())), "row:": [0, 1, 2]})
    batch = validate_batch(table_to_batch(table, inputs), inputs)
    assert batch.jagged.offsets.tolist() == [0, 2, 2, 3]
    assert batch.labels.shape == (3, 0)


def test_sliced_and_chunked_tables_are_read_right():
    table = pa.concat_tables([full_table(10), full_table(20, start=10).slice(5, 10), full_table(9, start=25)]).slice(
        3, 28
    )
    rows = table.column("row:").to_pylist()
    batch = table_to_batch(table, FULL)
    assert batch.row_ids.tolist() == rows
    alone = table_to_batch(pa.Table.from_pylist(table.to_pylist(), schema=table.schema), FULL)
    assert torch.equal(batch.jagged.values, alone.jagged.values)
    assert torch.equal(batch.vectors["image"], alone.vectors["image"])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=20))
def test_gather_segments_equals_a_loop(segments):
    values = np.arange(50, dtype=np.int32)
    starts = np.array([start for start, _ in segments], dtype=np.int64)
    lengths = np.array([length for _, length in segments], dtype=np.int64)
    expected = [value for start, length in segments for value in values[start : start + length].tolist()]
    assert gather_segments(values, starts, lengths).tolist() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["user"]), "'user'"),
        (lambda table: table.set_column(1, "user", table.column("user").cast(pa.int64())), "int64"),
        (lambda table: table.set_column(1, "user", pa.array([None] * table.num_rows, pa.int32())), "5 nulls"),
        (lambda table: table.append_column("user", table.column("user")), "2 of that name"),
    ],
)
def test_table_that_does_not_fit_is_refused(tmp_path, change, message):
    table = change(plain_table(5))
    with pytest.raises(DataError, match=message):
        table_to_batch(table, PLAIN)
    writer = EncodedWriter(tmp_path / "data", PLAIN)
    with pytest.raises(DataError, match=message):
        writer.append(table)
    writer.abort()


def test_null_inside_a_list_is_refused():
    table = full_table(3)
    tags = pa.array([[1], [None], []], pa.list_(pa.int32()))
    with pytest.raises(DataError, match="1 nulls"):
        table_to_batch(table.set_column(table.column_names.index("tags"), "tags", tags), FULL)


def test_labelled_and_unlabelled_tables_do_not_mix(tmp_path):
    writer = EncodedWriter(tmp_path / "data", FULL)
    writer.append(full_table(3))
    with pytest.raises(DataError, match="labels in all tables or in none"):
        writer.append(full_table(3, with_labels=False))
    writer.abort()
    assert not list(tmp_path.iterdir())
    unlabelled = written(tmp_path / "other", full_table(3, with_labels=False), inputs=FULL)
    assert not unlabelled.with_labels


def test_failure_while_writing_leaves_nothing(tmp_path):
    def write_and_fail() -> None:
        with EncodedWriter(tmp_path / "data", PLAIN, rows_per_group=10) as writer:
            writer.append(plain_table(100))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_not_overwritten(tmp_path):
    written(tmp_path / "data", plain_table(10), inputs=PLAIN)
    with pytest.raises(DataError, match="it exists"):
        EncodedWriter(tmp_path / "data", PLAIN)
    assert EncodedDataset(tmp_path / "data").num_rows == 10


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact") / "data"
    written(folder, full_table(400), inputs=FULL, rows_per_group=50, groups_per_file=4)
    return folder


def damage_in(folder) -> DataError | None:
    try:
        whole(EncodedDataset(folder))
    except DataError as error:
        return error
    return None


def test_every_flipped_bit_is_found_and_named_or_harmless(intact, tmp_path):
    expected = whole(EncodedDataset(intact))
    generator = random.Random(0)
    found = harmless = 0
    for trial in range(100):
        folder = tmp_path / str(trial)
        shutil.copytree(intact, folder)
        path = generator.choice(sorted(folder.iterdir()))
        content = bytearray(path.read_bytes())
        bit = generator.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        damage = damage_in(folder)
        if damage is None:
            assert whole(EncodedDataset(folder)).equals(expected), f"silent damage: {path.name} bit {bit}"
            harmless += 1
        else:
            assert path.name in damage.where
            found += 1
        shutil.rmtree(folder)
    assert found > 70, (found, harmless)


def test_damaged_row_group_is_named_and_the_others_still_read(intact, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(intact, folder)
    path = folder / "part-00001.parquet"
    metadata = pq.ParquetFile(path).metadata
    column = metadata.row_group(2).column(2)
    start = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(path.read_bytes())
    content[start + column.total_compressed_size - 3] ^= 8
    path.write_bytes(content)
    dataset = EncodedDataset(folder)
    with pytest.raises(DataError, match=r"part-00001\.parquet, row group 2"):
        dataset.read_group(6)
    assert dataset.read_group(5).num_rows == 50
    assert dataset.read_group(7).num_rows == 50


@pytest.mark.parametrize("keep", [0, 3, 500, -1])
def test_truncated_file_is_found_on_opening(intact, tmp_path, keep):
    folder = tmp_path / "data"
    shutil.copytree(intact, folder)
    path = folder / "part-00000.parquet"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"part-00000\.parquet"):
        EncodedDataset(folder)


def test_swapped_and_missing_files_are_found_on_opening(intact, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(intact, folder)
    first, second = folder / "part-00000.parquet", folder / "part-00001.parquet"
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(DataError, match=r"part-00000\.parquet"):
        EncodedDataset(folder)
    first.unlink()
    with pytest.raises(MissingFileError, match=r"part-00000\.parquet"):
        EncodedDataset(folder)
    with pytest.raises(MissingFileError, match=r"manifest\.json"):
        EncodedDataset(tmp_path / "nowhere")


def test_manifest_of_another_format_is_refused(intact, tmp_path):

    folder = tmp_path / "data"
    shutil.copytree(intact, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["version"] = 99
    manifest["sha256"] = digest_of(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="version 99"):
        EncodedDataset(folder)


def test_memory_dataset_equals_the_one_on_disk(tmp_path):
    table = full_table(230)
    stored = written(tmp_path / "data", table, inputs=FULL, rows_per_group=50)
    memory = MemoryDataset(table, FULL, rows_per_group=50)
    assert memory.group_sizes == stored.group_sizes
    assert whole(memory).equals(whole(stored))
    assert memory.num_rows == stored.num_rows
    assert memory.row_sum == stored.row_sum


def test_memory_dataset_numbers_its_rows():
    dataset = MemoryDataset(plain_table(5).drop_columns(["row:"]), PLAIN)
    assert dataset.read_group(0).column("row:").to_pylist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("column", "wrong", "error", "words"),
    [
        ("user", pa.array([0, 1, 1_000_000], pa.int32()), BoundsError, "user"),
        ("user", pa.array([0, -1, 2], pa.int32()), BoundsError, "user"),
        ("price", pa.array([1.0, float("nan"), 2.0], pa.float32()), DataError, "finite dense values"),
        ("label:click", pa.array([0.0, 2.0, 1.0], pa.float32()), DataError, "label 'click'"),
        ("price", pa.array([1.0, None, 2.0], pa.float32()), DataError, "without nulls"),
    ],
)
def test_rows_that_were_made_by_hand_are_looked_at_before_a_kernel_reads_them(column, wrong, error, words):
    table = encoded_schema(PLAIN).empty_table().schema
    made = plain_table(3)
    arrays = [wrong if name == column else made.column(name) for name in table.names]
    for schema in (table, None):
        by_hand = pa.Table.from_arrays(arrays, schema=schema, names=None if schema is not None else table.names)
        with pytest.raises(error, match=words):
            MemoryDataset(by_hand, PLAIN)


def test_a_disk_that_fails_in_a_writer_s_thread_leaves_no_folder(tmp_path, monkeypatch):
    class Full:
        def write_table(self, *_: object, **__: object) -> None:
            raise OSError("No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(part_files, "_writer", lambda path, schema: Full())

    def write() -> None:
        with EncodedWriter(tmp_path / "data", PLAIN, rows_per_group=5, rows_per_file=10) as writer:
            for start in range(0, 200, 10):
                writer.append(plain_table(10, start=start))

    with pytest.raises(OSError, match="No space left"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_files_written_at_the_same_time_hold_the_rows_in_their_order(tmp_path):
    with EncodedWriter(tmp_path / "data", PLAIN, rows_per_group=5, rows_per_file=10) as writer:
        for start in range(0, 203, 7):
            writer.append(plain_table(7, start=start))
    dataset = EncodedDataset(tmp_path / "data")
    rows = [row for group in range(len(dataset.group_sizes)) for row in dataset.read_group(group)["row:"].to_pylist()]
    assert rows == list(range(203))
    assert len(list((tmp_path / "data").glob("part-*"))) == 21


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_the_digest_does_not_depend_on_how_rows_came(tmp_path, cut):
    """Values behind a slice are no part of it, whatever lies there in memory."""
    table = full_table(63)
    with EncodedWriter(tmp_path / "data", FULL, rows_per_group=21) as writer:
        for first in range(0, 63, cut):
            writer.append(table.slice(first, cut))
    assert EncodedDataset(tmp_path / "data").digest == MemoryDataset(table, FULL, rows_per_group=21).digest
