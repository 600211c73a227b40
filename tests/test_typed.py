"""Typed: wrong values in dataclasses are errors in four parts, whoever makes them."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
import pytest

import ziggurat
from ziggurat.config import from_json, override
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.errors import CheckpointError, ConfigError, PlanError
from ziggurat.features.inputs import InputSpec, SingleSpec, TableSpec
from ziggurat.models import DLRMConfig
from ziggurat.models.contract.model import Model
from ziggurat.plan import Plan, TablePlacement
from ziggurat.planning.cluster.catalogue import named_cluster
from ziggurat.retrieval.item_index import ItemIndexConfig
from ziggurat.retrieval.vectors import Kept, VectorIndexConfig
from ziggurat.studies.compare import CompareConfig
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.scaling_runs import ScaleConfig
from ziggurat.training.config import TrainingConfig
from ziggurat.training.position import Position
from ziggurat.typed import Count, Fraction, Kinds, PositiveFloat, Reader, checked, fits


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TrainingConfig(epochs="3"), "TrainingConfig, setting 'epochs'"),  # type: ignore[arg-type]
        (lambda: TrainingConfig(learning_rate="0.1"), "a number"),  # type: ignore[arg-type]
        (lambda: TrainingConfig(learning_rate=float("nan")), "a number"),
        (lambda: TrainingConfig(precision="bf61"), 'did you mean "bf16"?'),  # type: ignore[arg-type]
        (lambda: TrainingConfig(loader=3), "a group of settings (LoaderConfig)"),  # type: ignore[arg-type]
        (lambda: LoaderConfig(batch_size=10**15), "batch_size"),
        (lambda: LoaderConfig(batch_size=True), "a whole number"),
        (lambda: TrainingConfig(threads=100_000), "0 to 1,024 (more than a machine has cores)"),
        (lambda: LoaderConfig(read_threads=100_000), "0 to 1,024 (more than a machine has cores)"),
        (
            lambda: CompareConfig(data=ComparedData.SYNTHETIC, models=("dnn", "dlrm"), threads=100_000),
            "1 to 1,024 (more than a machine has cores)",
        ),
        (lambda: ScaleConfig(threads=100_000), "1 to 1,024 (more than a machine has cores)"),
        (lambda: DLRMConfig(embedding_dim=10**15), "a wider row is no embedding"),
        (lambda: DLRMConfig(embedding_dim=0), "embedding_dim"),
        (lambda: DataConfig(train=(pl.DataFrame({"a": [1, 2]}),)), "write_parquet"),  # type: ignore[arg-type]
        (lambda: DataConfig(train="data.csv"), "a list"),  # type: ignore[arg-type]
        (lambda: named_cluster("h100x1000000000"), "ranks"),
    ],
)
def test_wrong_values_in_python_have_four_parts(make, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert words in str(raised.value)
    assert raised.value.ways_out


def test_values_that_are_meant_are_converted() -> None:
    split = SplitConfig(by="time", valid_fraction=np.float64(0.25), seed=np.int64(3))  # type: ignore[arg-type]
    assert split.by is SplitBy.TIME
    assert type(split.seed) is int
    assert DataConfig(train=[Path("a.csv")]).train == ("a.csv",)  # type: ignore[arg-type]
    assert TrainingConfig(learning_rate=1).learning_rate == 1.0
    assert dataclasses.replace(split, by=SplitBy.RANDOM).by is SplitBy.RANDOM


def test_bounds_hold_for_files_and_the_command_line_too() -> None:
    with pytest.raises(ConfigError, match=r"run\.json, setting 'embedding_dim'"):
        from_json(DLRMConfig, {"kind": "dlrm", "embedding_dim": 10**15}, where=r"run.json")
    with pytest.raises(ConfigError, match="command line, setting 'embedding-dim'"):
        override(DLRMConfig(), {"embedding-dim": "1000000000000"})


def test_inputs_with_wrong_keys_and_values_are_named() -> None:
    good = {"single": [{"name": "u", "table": "u"}], "tables": [{"name": "u", "num_rows": 5}]}
    wanted = InputSpec(single=(SingleSpec(name="u", table="u"),), tables=(TableSpec(name="u", num_rows=5),))
    assert from_json(InputSpec, good, where="inputs.json") == wanted
    for wrong in (
        {"single": [{"name": "u"}]},
        {"single": [{"name": "u", "table": 3}]},
        {"tables": [{"name": "u", "num_rows": -5}]},
        {"tables": [{"name": "u", "num_rows": 1 << 50}]},
        {"tables": {"u": 5}},
        {"more": []},
        [],
    ):
        with pytest.raises(ConfigError, match=r"inputs\.json"):
            from_json(InputSpec, wrong, where="inputs.json")


@pytest.mark.parametrize("state", [None, [], {"step": "8"}, {"step": None}, {"steps": 8}, {"step": 1 << 70}])
def test_a_position_that_is_none_is_a_checkpoint_error(state: object) -> None:
    assert Position.from_json(Position(step=8, evaluations=[{"step": 4, "auc": 0.5}]).to_json()).step == 8
    with pytest.raises(CheckpointError, match="the checkpoint's state"):
        Position.from_json(state)


@pytest.mark.parametrize("ranks", [0, -1, 10**8, 10**9, 1 << 70])
def test_plans_of_impossible_worlds_are_refused_at_once(ranks: int, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="world_size"):
        Plan(world_size=ranks, tables=(), towers=ziggurat.Towers(towers=(("a",),)))
    (tmp_path / "plan.json").write_text(f'{{"world_size": {ranks}, "tables": []}}')
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_ranks_of_tables_are_whole_numbers() -> None:
    with pytest.raises(PlanError, match="ranks"):
        TablePlacement(table="u", ranks=("0",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "hint",
    [
        int,
        float,
        bool,
        str,
        Count,
        Fraction,
        PositiveFloat,
        SplitBy,
        LoaderConfig,
        Any,
        int | None,
        str | int | None,
        tuple[int, ...],
        tuple[Any, ...],
        tuple[int, str],
        list[int],
        dict[str, Any],
        Literal["a", 1],
        Annotated[Model, Kinds((DLRMConfig,))],
    ],
)
def test_what_fits_at_a_glance_is_read_as_it_is(hint: Any) -> None:
    class Text(str):
        pass

    values = [0, 1, -1, 2**63, -(2**63), 2**64, 0.5, 1.0, 2.0, math.nan, math.inf, True, None, "a", "time", Text("a")]
    values += [np.int64(3), np.float64(0.5), SplitBy.TIME, LoaderConfig(), DLRMConfig(), (), (1, 2), (1, "a"), (True,)]
    values += [[1], [], {"a": 1}, {}, (None,), object(), pl.DataFrame()]
    reader, glance = Reader(where="here"), fits(hint)
    num_fitting = 0
    for value in values:
        if glance(value):
            num_fitting += 1
            assert reader.read(hint, value) is value
    assert (
        num_fitting
        or typing.get_origin(hint) in (list, dict, Literal, Annotated, types.UnionType)
        or hint == tuple[int, str]
    )


def test_checked_above_dataclass_is_refused() -> None:
    with pytest.raises(TypeError, match="below"):

        @checked
        @dataclasses.dataclass(frozen=True)
        class Wrong:
            size: int = 0


def test_settings_of_indexes_are_read_and_checked() -> None:
    assert VectorIndexConfig(kept="none").kept is Kept.NONE  # type: ignore[arg-type]
    for wrong in ({"probes": -1}, {"num_clusters": -3}, {"first_pass": "of"}, {"kept": "bf16"}):
        with pytest.raises(ConfigError):
            VectorIndexConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        ItemIndexConfig(cache_bytes=-5)
