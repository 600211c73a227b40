"""Training with vocabularies that grow: resumed bit for bit, on many ranks as on one device, rows drawn anew."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.training.rank_runs import NUM_ROWS, TABLES, stored, training_config
from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.preprocess.grown_dataset import GrownDataset
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.embeddings.growing.growing_batches import GrowingBatches
from ziggurat.embeddings.growing.new_rows import NewRows, first_vectors
from ziggurat.features.growing import Evict, Growing
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS, UNKNOWN_ROW
from ziggurat.models import DLRMConfig, MLPConfig, build_model
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.tables.sharded_tables import tables_of
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.trainer import Trainer

CUT = "cut"
GROWING = {
    "user": Growing(num_ids=30, admit_after=2),
    "tags": Growing(num_ids=5, evict=Evict.OLDEST),
}


def growing_dataset(num_rows: int, *, seed: int = 0) -> MemoryDataset:
    """Numbers of users, few of them often, for 30 rows, alike in their lower halves; and of 10 tags for 5."""
    plain = tiny_dataset(num_rows, seed=seed)
    tables = tuple(
        dataclasses.replace(spec, growing=growing, num_rows=growing.num_ids + NUM_RESERVED_ROWS)
        if (growing := GROWING.get(spec.name))
        else spec
        for spec in plain.inputs.tables
    )
    users = np.random.default_rng(seed + 9).zipf(1.3, num_rows) % 1000 * (1 << 51) + NUM_RESERVED_ROWS
    table = pa.concat_tables([plain.read_group(index) for index in range(len(plain.group_sizes))])
    table = table.set_column(table.column_names.index("user"), "user", pa.array(users.astype(np.int64)))
    tags = table.column("tags").cast(pa.list_(pa.int64()))
    table = table.set_column(table.column_names.index("tags"), "tags", tags)
    return MemoryDataset(table, dataclasses.replace(plain.inputs, tables=tables), rows_per_group=64)


def growing_trainer(folder: Path, *, world_size: int = 1, placement: str = "row_wise", **changes: Any) -> Trainer:
    train = growing_dataset(NUM_ROWS)
    config = DLRMConfig(
        embedding_dim=8,
        bottom=MLPConfig(hidden_dims=(9,)),
        top=MLPConfig(hidden_dims=(7,)),
        embedding=EmbeddingConfig(kernel=KernelChoice.TORCH, initial_sum=0.5),
    )
    model = build_model(config, train.inputs, seed=3, draw_tables=world_size == 1)
    parallel = None
    if world_size > 1:
        how, ranks = Placement(placement), tuple(range(world_size))
        tables = tuple(
            TablePlacement(table=name, placement=how, ranks=ranks if how is not Placement.TABLE_WISE else ranks[-1:])
            for name in TABLES
        )
        parallel = parallelize(model, Plan(world_size=world_size, tables=tables), Topology.create(), seed=3)
    settings = training_config(world_size, **changes)
    return Trainer(
        model, config=settings, train=train, valid=growing_dataset(101, seed=1), folder=folder, parallel=parallel
    )


def train(rank: int, world_size: int, folder: str, placements: list[str]) -> None:
    del rank
    for placement in placements:
        growing_trainer(Path(folder) / placement, world_size=world_size, placement=placement).fit()
    growing_trainer(Path(folder) / CUT, world_size=world_size, max_steps=4).fit()


def log(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "timing"} for line in lines]


def test_a_run_that_grows_goes_on_bit_for_bit(tmp_path: Path) -> None:
    growing_trainer(tmp_path / "whole", epochs=1).fit()
    growing_trainer(tmp_path / "cut", epochs=1, max_steps=4).fit()
    growing_trainer(tmp_path / "cut", epochs=1).fit(resume=True)
    whole, cut = stored(tmp_path / "whole"), stored(tmp_path / "cut")
    assert {name for name in whole if name.startswith("growing.user")} == {
        f"growing.user.{part}" for part in ("rows", "numbers", "queue", "sketch")
    }
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert np.array_equal(value, cut[name]), name
    trained = [line for line in log(tmp_path / "whole") if line["kind"] == "train"]
    assert sum(line["growing/user/evicted"] for line in trained) > 5
    assert all(line["growing/user/known"] + line["growing/user/unknown"] in (13, 64) for line in trained)
    assert log(tmp_path / "whole")[-3:] == log(tmp_path / "cut")[-3:]


@pytest.mark.slow
def test_ranks_decide_as_one_device_does(tmp_path: Path) -> None:
    growing_trainer(tmp_path / "one").fit()
    placements = [each.value for each in (Placement.ROW_WISE, Placement.COLUMN_WISE, Placement.DATA_PARALLEL)]
    run_ranks(train, 2, 2, str(tmp_path), placements, timeout_s=240.0)
    growing_trainer(tmp_path / CUT).fit(resume=True)  # on one device what two ranks have begun
    alone = stored(tmp_path / "one")
    for placement in [*placements, CUT]:
        together = stored(tmp_path / placement)
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            if name.startswith("growing."):
                assert np.array_equal(together[name], value), (placement, name)
            else:
                np.testing.assert_allclose(together[name], value, rtol=3e-4, atol=3e-4, err_msg=f"{placement} {name}")


def test_a_row_that_changes_its_id_begins_anew_and_no_other_moves(tmp_path: Path) -> None:
    trainer = growing_trainer(tmp_path, max_steps=6)
    trainer.fit()
    (weights,) = tables_of(trainer.model)
    before = {name: value.clone() for name, value in weights.state_dict().items()}
    state = {name: value.clone() for name, value in trainer.step.table_optimizer.state_dict().items()}
    new = NewRows(table="user", ids=np.array([77, 5], np.uint64), rows=torch.tensor([4, 9]))
    weights.renew(new, seed=3)
    other = NewRows(table="user", ids=new.ids[::-1].copy(), rows=new.rows)
    shape, config = (33, 8), weights.config
    assert torch.equal(weights.view("user")[[4, 9]], first_vectors(new, shape=shape, config=config, seed=3))
    assert torch.equal(weights.view("user")[[9, 4]], first_vectors(other, shape=shape, config=config, seed=3))
    for name, value in weights.state_dict().items():
        rows = [row for row in range(len(value)) if name != "user.weight" or row not in (4, 9)]
        assert torch.equal(value[rows], before[name][rows]), name
    for name, value in trainer.step.table_optimizer.state_dict().items():
        if name == "user.sum":
            assert value[[4, 9]].tolist() == [0.5, 0.5]
            value[[4, 9]] = state[name][[4, 9]]
        assert torch.equal(value, state[name]), name


def test_batches_keep_reserved_rows_and_frozen_maps_agree() -> None:
    dataset = growing_dataset(40)
    inputs: InputSpec = dataset.inputs
    batches = GrowingBatches(inputs)
    table = dataset.read_group(0)
    batch = table_to_batch(table, inputs)
    batch.single[0, :3] = torch.tensor([0, 1, 2])
    for step in (1, 2):
        renamed, _ = batches.admitted(batch, step=step)
    assert renamed.single[0, :3].tolist() == [0, 1, 2]
    assert torch.equal(renamed.single[1], batch.single[1]), "no growing table"
    assert torch.equal(renamed.single, batches.frozen(batch).single)
    assert torch.equal(renamed.jagged.values, batches.frozen(batch).jagged.values)
    assert int(renamed.single[0].max()) < 33
    assert (renamed.single[0] == UNKNOWN_ROW).any()
    read = table_to_batch(GrownDataset(dataset, batches.grown()).read_group(0), inputs)
    assert torch.equal(read.single[:, 3:], renamed.single[:, 3:])
    assert torch.equal(read.jagged.values, renamed.jagged.values)
