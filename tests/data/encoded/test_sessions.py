"""Sessions stay together in a shuffle, and their batches keep what repeats once; nothing else changes."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ziggurat.data.encoded.dataset import EncodedDataset, EncodedWriter, MemoryDataset
from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle
from ziggurat.data.encoded.records import SESSION_COLUMN, encoded_schema, label_column
from ziggurat.data.encoded.sessions import session_lengths
from ziggurat.data.encoded.stored_once import plain_lists, shared_lists, store_once
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.errors import DataError
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.features.schema import Label, MultiHot, Schema
from ziggurat.testing.batches import small_inputs

INPUTS = dataclasses.replace(small_inputs(num_dense=1, num_single=2, num_jagged=3), has_sessions=True)
GROUPS = (FeatureGroup(single=(1,), jagged=(0, 2)),)


def session_table(num_rows: int, *, inputs: InputSpec = INPUTS, seed: int = 0) -> pa.Table:
    """Encoded rows of sessions of 1 to 6 rows; lists and the second row repeat within a session."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, num_rows)
    session = np.repeat(np.arange(1, num_rows + 1), lengths)[:num_rows]
    of_session = [[rng.integers(0, 3, rng.integers(0, 4)).tolist() for _ in inputs.jagged] for _ in range(num_rows + 1)]
    columns = {
        inputs.dense[0]: rng.normal(size=num_rows).astype(np.float32),
        inputs.single[0].name: rng.integers(0, 12, num_rows),
        inputs.single[1].name: session % 5,
        label_column("label0"): rng.integers(0, 2, num_rows).astype(np.float32),
        SESSION_COLUMN: session,
        "row:": np.arange(num_rows),
    }
    columns |= {spec.name: [of_session[each][at] for each in session] for at, spec in enumerate(inputs.jagged)}
    schema = encoded_schema(inputs)
    return pa.table({field.name: pa.array(columns[field.name], type=field.type) for field in schema}, schema=schema)


def loaded(dataset, *, groups=(), rank: int = 0, world_size: int = 1, **settings) -> list:
    config = LoaderConfig(batch_size=16, shuffle_buffer_rows=64, prefetch=0, **settings)
    loader = Loader(dataset, config=config, rank=rank, world_size=world_size)
    loader.groups = groups
    return list(loader.batches(epoch=1))


@pytest.mark.parametrize("shuffle", list(Shuffle))
@pytest.mark.parametrize("world_size", [1, 3])
def test_deduplicated_batches_are_the_plain_ones(shuffle: Shuffle, world_size: int) -> None:
    dataset = MemoryDataset(session_table(200), INPUTS, rows_per_group=23)
    for rank in range(world_size):
        ranks = {"rank": rank, "world_size": world_size, "shuffle": shuffle}
        plain, short = loaded(dataset, **ranks), loaded(dataset, groups=GROUPS, **ranks)
        assert len(plain) == len(short)
        for wanted, found in zip(plain, short, strict=True):
            sought = deduplicate(wanted, GROUPS) if wanted.batch_size else found
            for one, other in ((found.expanded(), wanted), (found, sought)):
                assert one.tensors().keys() == other.tensors().keys()
                for name, tensor in other.tensors().items():
                    assert torch.equal(one.tensors()[name], tensor), name


def test_sessions_stay_together_and_every_row_comes_once(tmp_path: Path) -> None:
    table = session_table(200)
    with EncodedWriter(tmp_path / "data", INPUTS, rows_per_group=50) as writer:
        writer.append(table)
    session = table.column(SESSION_COLUMN).to_numpy()
    orders = []
    for dataset in (MemoryDataset(table, INPUTS, rows_per_group=50), EncodedDataset(tmp_path / "data")):
        rows = torch.cat([batch.row_ids for batch in loaded(dataset, shuffle=Shuffle.SESSIONS)]).numpy()
        assert sorted(rows) == list(range(200))
        together = session[rows]
        cut = sum(len(np.unique(session[start : start + 50])) for start in range(0, 200, 50))
        assert np.count_nonzero(np.diff(together)) + 1 <= cut
        assert not np.array_equal(rows, np.arange(200))
        orders.append(rows)
    assert np.array_equal(*orders)


@pytest.mark.parametrize("shuffle", [Shuffle.SESSIONS, Shuffle.LANES, Shuffle.NONE])
@pytest.mark.parametrize("groups", [(), GROUPS])
def test_lists_that_are_stored_once_come_back(
    tmp_path: Path, shuffle: Shuffle, groups: tuple[FeatureGroup, ...]
) -> None:
    """The folder has a null for each list that equals the one before; rows, digest and batches are those of memory."""
    table = session_table(200)
    memory = MemoryDataset(table, INPUTS, rows_per_group=50)
    with EncodedWriter(tmp_path / "data", INPUTS, rows_per_group=50) as writer:
        writer.append(table)
    dataset = EncodedDataset(tmp_path / "data")
    assert dataset.digest == memory.digest
    stored = pq.read_table(next((tmp_path / "data").glob("*.parquet")))
    assert all(stored.column(spec.name).null_count > 50 for spec in INPUTS.jagged)
    assert dataset.read_group(1).equals(memory.read_group(1))
    shared = dataset.read_shared(1)
    assert shared.column("jagged0").to_pylist() == memory.read_group(1).column("jagged0").to_pylist()
    for rank in range(3):
        settings = {"rank": rank, "world_size": 3, "shuffle": shuffle, "groups": groups}
        for found, wanted in zip(loaded(dataset, **settings), loaded(memory, **settings), strict=True):
            for name, tensor in wanted.tensors().items():
                assert torch.equal(found.tensors()[name], tensor), name


@pytest.mark.parametrize("lists", [[[]], [[1]], [[], [], [1], [1], []], [[1, 2], [1], [1, 2], [1, 2]]])
def test_lists_of_a_row_group_are_stored_once(lists: list[list[int]]) -> None:
    schema = pa.schema([encoded_schema(INPUTS).field("jagged0")])
    plain = pa.table({"jagged0": pa.array(lists, type=schema.field(0).type)}, schema=schema)
    stored = store_once(plain)
    assert stored.column(0).null_count == sum(a == b for a, b in itertools.pairwise(lists))
    assert plain_lists(stored, schema=schema).equals(plain)
    assert shared_lists(stored).column(0).to_pylist() == lists
    if stored.column(0).null_count:
        first = int(np.flatnonzero(stored.column(0).is_null())[0])
        with pytest.raises(ValueError, match="begins with the list of a row before"):
            plain_lists(stored.slice(first), schema=schema)


def test_lanes_of_sessions_keep_them_together_but_at_the_ends_of_a_lane(tmp_path: Path) -> None:
    """A stretch of a lane has whole sessions; ranks read their own row groups, and each row comes once."""
    table = session_table(2048)
    dataset = MemoryDataset(table, INPUTS, rows_per_group=128)
    session = table.column(SESSION_COLUMN).to_numpy()
    config = LoaderConfig(batch_size=256, shuffle=Shuffle.SESSION_LANES, shuffle_buffer_rows=2048, prefetch=0)
    read, found = [], []
    for rank in range(2):
        loader = Loader(dataset, config=config, rank=rank, world_size=2)
        order = loader._order(loader._slices(0), 0)
        read.append({part.group for window in order.windows for part in window.parts})
        found.append(torch.cat([batch.row_ids for batch in loader.batches(epoch=0)]).numpy())
        assert "of this rank" in loader.reading()
    assert len(read[0] & read[1]) <= 1
    rows = np.concatenate(found)
    assert sorted(rows) == list(range(2048))
    num_stretches = 4 * 32  # steps, lanes
    together = session[rows]
    assert np.count_nonzero(np.diff(together)) + 1 <= len(np.unique(session)) + 2 * num_stretches
    assert not np.array_equal(np.sort(rows), rows)
    whole = Loader(dataset, config=dataclasses.replace(config, shuffle=Shuffle.SESSIONS), world_size=2)
    assert "shuffle = session_lanes" in whole.reading()


def test_rows_without_a_session_are_shuffled_each_by_itself() -> None:
    ids = pa.table({SESSION_COLUMN: pa.array([0, 0, 5, 5, 0, 7, 5])})
    assert session_lengths(ids, where="here").tolist() == [1, 1, 2, 1, 1, 1]
    assert session_lengths(ids.slice(0, 0), where="here").tolist() == []


def test_data_without_a_session_cannot_be_shuffled_by_it() -> None:
    inputs = dataclasses.replace(INPUTS, has_sessions=False)
    dataset = MemoryDataset(session_table(20).drop_columns([SESSION_COLUMN]), inputs)
    with pytest.raises(DataError, match="shuffle = buffer"):
        loaded(dataset, shuffle=Shuffle.SESSIONS)


ROWS = 90
SESSIONS = {
    "one that never ends": ["s"] * ROWS,
    "one giant one": ["s" if row % 10 else f"t{row}" for row in range(ROWS)],
    "all different": [f"s{row}" for row in range(ROWS)],
    "nulls": [None if row % 3 else f"s{row // 9}" for row in range(ROWS)],
    "none at all": [None] * ROWS,
    "not a number": [float("nan") if row % 2 else float(row // 9) for row in range(ROWS)],
    "blocks": [f"s{row // 8}" for row in range(ROWS)],
}


@pytest.mark.parametrize("kind", SESSIONS)
@pytest.mark.parametrize("repeats", ["all", "one feature", "none"])
def test_whatever_the_sessions_are_every_row_comes_once(tmp_path: Path, kind: str, repeats: str) -> None:
    same = {"all": (1, 1), "one feature": (1, 90), "none": (90, 90)}[repeats]  # distinct lists in each feature
    distinct = dict(zip(("seen", "bought"), same, strict=True))
    columns = {name: [[row % many, 3] for row in range(ROWS)] for name, many in distinct.items()}
    columns |= {"session": SESSIONS[kind], "click": [row % 2 for row in range(ROWS)]}
    frame = pl.DataFrame(columns, strict=False)
    features = tuple(MultiHot(name=name) for name in distinct)
    schema = Schema(features=features, labels=(Label(name="click"),), session="session")
    encoder = Preprocessing.fit(schema, [RawChunk.of(frame)])
    dataset = MemoryDataset(encoder.encode(RawChunk.of(frame)), encoder.inputs, rows_per_group=40)
    groups = (FeatureGroup(single=(), jagged=(0, 1)), FeatureGroup(single=(), jagged=(0,)))
    plain = loaded(dataset, shuffle=Shuffle.SESSIONS)
    assert sorted(torch.cat([batch.row_ids for batch in plain]).tolist()) == list(range(ROWS))
    for group in groups:
        for wanted, found in zip(plain, loaded(dataset, groups=(group,), shuffle=Shuffle.SESSIONS), strict=True):
            for name, tensor in wanted.tensors().items():
                assert torch.equal(found.expanded().tensors()[name], tensor), name
