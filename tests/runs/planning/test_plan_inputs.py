"""What a planner knows of a recipe's data: counted where data was prepared, else from the schema or published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.features.schema import Categorical, Label, MultiHot, Schema, Table
from ziggurat.parallel.exchange.wire import WireFormat
from ziggurat.planning.cluster.catalogue import named_cluster
from ziggurat.planning.simulator.step_simulator import MatmulFormat
from ziggurat.recipes.catalogue import mlperf_dcn_v2, mlperf_dlrm, recipe_named
from ziggurat.runs.planning.plan_inputs import plan_inputs
from ziggurat.runs.planning.plan_run import matmul_format, neighbours, wire_bytes
from ziggurat.training.config import Precision


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))


def test_mlperf_has_its_published_size() -> None:
    found = plan_inputs(mlperf_dlrm())
    assert sum(table.num_rows - 3 for table in found.inputs.tables) == 204_184_588
    assert not found.notes
    lists = plan_inputs(mlperf_dcn_v2())
    assert sum(lists.list_lengths.values()) == 214


def test_published_sizes_are_used_and_said() -> None:
    found = plan_inputs(recipe_named("movielens_dlrm"))
    assert found.inputs.table("movie_id").num_rows == 3_706 + 3
    assert any("published" in note for note in found.notes)
    assert found.list_lengths == {"genres": 10.0}
    given = plan_inputs(recipe_named("movielens_dlrm"), rows={"movie_id": 10}, list_lengths={"genres": 2.0})
    assert given.inputs.table("movie_id").num_rows == 13
    assert given.list_lengths == {"genres": 2.0}


def test_prepared_data_is_counted(tmp_path: Path) -> None:
    schema = Schema(features=(Categorical(name="shop"), MultiHot(name="tags")), labels=(Label(name="click"),))
    frame = pl.DataFrame(
        {"shop": [f"s{i % 7}" for i in range(100)], "tags": [["x", "y"], ["x"]] * 50, "click": [0, 1] * 50}
    )
    frame.write_parquet(tmp_path / "rows.parquet")
    config = recipe_named("table_dlrm", schema=schema)
    split = replace(config.data.split, valid_fraction=0.0, test_fraction=0.0)
    data = DataConfig(train=(str(tmp_path / "rows.parquet"),), split=split)
    config = replace(config, data=data)
    prepare(data, schema=schema, folder=tmp_path / "cache" / "prepared")
    found = plan_inputs(config)
    assert found.inputs.table("shop").num_rows == 7 + 3
    assert found.list_lengths == {"tags": pytest.approx(1.5)}
    assert not found.notes


def test_a_capped_vocabulary_is_its_cap() -> None:
    schema = Schema(
        features=(Categorical(name="shop"),), labels=(Label(name="click"),), tables=(Table(name="shop", max_rows=500),)
    )
    found = plan_inputs(recipe_named("table_dlrm", schema=schema))
    assert found.inputs.table("shop").num_rows == 503


def test_neighbours_keep_shared_tables_together() -> None:
    towers = neighbours(plan_inputs(mlperf_dlrm()).inputs, most=12)
    assert len(towers) == 8
    assert [name for tower in towers.towers for name in tower] == [f"C{index}" for index in range(1, 27)]
    assert len(neighbours(plan_inputs(mlperf_dlrm()).inputs, most=128)) == 16


def test_settings_are_translated() -> None:
    assert [wire_bytes(wire) for wire in (WireFormat.FP32, WireFormat.BF16, WireFormat.INT8)] == [4.0, 2.0, 1.03125]
    assert wire_bytes(WireFormat.FP32, computed=torch.bfloat16) == 2.0  # as it travels, not as it is called
    assert matmul_format(Precision.AUTO, named_cluster("h100x8")) is MatmulFormat.BF16
    assert matmul_format(Precision.AUTO, named_cluster("v100x8")) is MatmulFormat.FP32
    assert matmul_format(Precision.FP32, named_cluster("h100x8")) is MatmulFormat.FP32
