"""Towers inside TorchRec's DistributedModelParallel compute what one device computes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchrec", reason="TorchRec is not installed here: `make test-bridges` runs these tests")

import torch.distributed.checkpoint as dcp
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from tests.bridges.torchrec_models import (
    CROSS,
    IDENTITY,
    LINEAR,
    NUM_ROWS,
    SGD,
    TOWERS,
    ManyRanks,
    OneDevice,
    SmallModel,
    assert_close,
    even_cuts,
    on_ranks,
    part_of,
    parts_of,
    random_batch,
    table_configs,
)
from ziggurat.bridges.torchrec import TowerEmbedding, TowerEmbeddingSharder, tower_plan
from ziggurat.errors import ConfigError, DataError, PlanError, TopologyError
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement

CONFIGS = {"identity": IDENTITY, "linear": LINEAR, "cross": CROSS}


def _train(rank: int, many: ManyRanks, one: OneDevice, *, cuts: list[int], first_limit: float = 1e-6) -> None:
    bounds = [0, *cuts, NUM_ROWS]
    mine = slice(bounds[rank], bounds[rank + 1])
    for step in range(4):
        batch = random_batch(NUM_ROWS, seed=step)
        part = part_of(batch, bounds[rank], bounds[rank + 1])
        if step == 0:
            with torch.no_grad():
                found = torch.cat([many.model.module.embeddings(part.sparse)])
                assert_close("fields", found, one.model.embeddings(batch.sparse)[mine], first_limit)
        wanted = one.step(batch)[mine]
        assert_close(f"logits of step {step}", many.step(part), wanted, 1e-6)
    many.assert_like(one.model, limit=1e-6)


def _same_as_one_device(rank: int, tower_size: int, names: list[str], cuts: list[int]) -> None:
    for name in names:
        # FBGEMM and torch round means differently, and sums the same.
        model = SmallModel(CONFIGS[name], mean=name != "identity")
        many = ManyRanks(model, tower_size=tower_size)
        _train(rank, many, OneDevice(model), cuts=cuts, first_limit=0.0 if name == "identity" else 1e-6)


@pytest.mark.parametrize("tower_size", [1, 2, 4])
def test_training_is_that_of_one_device(tower_size: int) -> None:
    on_ranks(_same_as_one_device, 4, tower_size, list(CONFIGS), even_cuts(NUM_ROWS, 4))


def test_one_and_two_ranks() -> None:
    on_ranks(_same_as_one_device, 1, 1, ["identity", "linear"], [])
    on_ranks(_same_as_one_device, 2, 1, ["identity", "linear"], even_cuts(NUM_ROWS, 2))


@pytest.mark.parametrize("tower_size", [1, 2, 4])
def test_batches_of_different_sizes(tower_size: int) -> None:
    on_ranks(_same_as_one_device, 4, tower_size, ["identity", "linear"], [3, 4, 11])
    on_ranks(_same_as_one_device, 4, tower_size, ["linear"], [3, 3, 16])


def _cut_tables(rank: int, tower_size: int) -> None:
    kinds = [Placement.ROW_WISE, Placement.COLUMN_WISE, Placement.TABLE_WISE]
    shell = Plan(world_size=4, tables=(), towers=TOWERS, tower_size=tower_size)
    model = SmallModel(LINEAR, mean=False)
    home = {model.embeddings.tables[name]: t for t, names in enumerate(TOWERS.towers) for name in names}
    tables = []
    for index, (table, tower) in enumerate(sorted(home.items())):
        ranks, kind = tuple(shell.tower_ranks(tower)), kinds[index % 3]
        ranks = ranks if kind is not Placement.TABLE_WISE else ranks[-1:]
        tables.append(TablePlacement(table=table, placement=kind, ranks=ranks))
    plan = Plan(world_size=4, tables=tuple(tables), towers=TOWERS, tower_size=tower_size)
    # Not row-wise Adagrad: TorchRec keeps one number a row for each piece of a row that is cut.
    many, one = ManyRanks(model, tower_size=tower_size, plan=plan, tables=SGD), OneDevice(model, tables=SGD)
    _train(rank, many, one, cuts=[3, 4, 11])


@pytest.mark.parametrize("tower_size", [1, 2, 4])
def test_tables_cut_by_rows_and_columns_inside_a_tower(tower_size: int) -> None:
    on_ranks(_cut_tables, 4, tower_size)


def _placed_elsewhere(rank: int, ranks: dict[str, int]) -> None:
    model = SmallModel(LINEAR)
    topology = Topology.create(tower_size=2)
    sharder = TowerEmbeddingSharder(topology)
    weights = sharder.shardable_parameters(model.embeddings)
    plan = EmbeddingModuleShardingPlan()
    for name, weight in weights.items():
        plan[name] = table_wise(rank=ranks[name], compute_kernel="fused")(weight, 2, 4, "cpu", sharder)
    before = copy.deepcopy(plan)
    many = ManyRanks(model, tower_size=2, sharding=plan)
    assert plan == before
    one = OneDevice(model)
    for step in range(3):
        batch = random_batch(NUM_ROWS, seed=step)
        found = many.step(parts_of(batch, even_cuts(NUM_ROWS, 4))[rank])
        assert_close("logits", found, one.step(batch)[4 * rank : 4 * rank + 4], 1e-6)
    assert plan == before


def test_the_order_of_towers_is_that_of_the_model_wherever_they_are() -> None:
    # towers 0, 1, 2, 3 in groups 1, 0, 1, 1; rank 1 without a table
    on_ranks(_placed_elsewhere, 4, {"t3": 2, "t0": 3, "t1": 0, "t2": 2, "t5": 2, "t4": 3})


def _pipelined(rank: int, tower_size: int) -> None:
    model = SmallModel(LINEAR)
    many, one = ManyRanks(model, tower_size=tower_size), OneDevice(model)
    batches = [random_batch(NUM_ROWS, seed=seed) for seed in range(5)]
    parts = iter([part_of(batch, 4 * rank, 4 * rank + 4) for batch in batches])
    pipeline = TrainPipelineSparseDist(many.model, many.optimizer, torch.device("cpu"))
    logits = []
    while True:
        try:
            logits.append(pipeline.progress(parts).detach())
        except StopIteration:
            break
    assert [type(module).__name__ for module in pipeline._pipelined_modules] == ["ShardedTowerEmbedding"]
    assert len(logits) == len(batches)
    for found, batch in zip(logits, batches, strict=True):
        wanted = one.step(batch)[4 * rank : 4 * rank + 4]
        assert_close("logits", found, wanted, 1e-6)


@pytest.mark.parametrize("tower_size", [2])
def test_pipelines_of_torchrec(tower_size: int) -> None:
    on_ranks(_pipelined, 4, tower_size)


def _load(rank: int, tower_size: int) -> None:
    model, other = SmallModel(LINEAR), SmallModel(LINEAR)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 1.0
    many = ManyRanks(model, tower_size=tower_size)
    many.assert_like(model, limit=0.0)
    saved = {name: copy.deepcopy(value) for name, value in many.model.state_dict().items()}
    found = many.model.load_state_dict(other.state_dict())  # whole tables and all towers, from one device
    assert not found.missing_keys
    assert not found.unexpected_keys
    many.assert_like(other, limit=0.0)
    many.model.load_state_dict(dict(saved))  # TorchRec renames the keys of what it is given
    many.assert_like(model, limit=0.0)
    broken = {name: value for name, value in saved.items() if "modules_of_towers" not in name}
    with pytest.raises(RuntimeError, match="Missing key"):
        many.model.load_state_dict(broken)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        many.model.load_state_dict({**saved, "embeddings.nothing": torch.zeros(1)})


@pytest.mark.parametrize("tower_size", [1, 2])
def test_state_dicts_load(tower_size: int) -> None:
    on_ranks(_load, 4, tower_size)


def _state(many: ManyRanks) -> dict[str, object]:
    return {"model": many.model.state_dict(), "optimizer": many.model.fused_optimizer.state_dict()}


def _save_checkpoint(rank: int, folder: str) -> None:
    model = SmallModel(LINEAR)
    many = ManyRanks(model, tower_size=2)
    for step in range(2):
        batch = random_batch(NUM_ROWS, seed=step)
        many.step(parts_of(batch, even_cuts(NUM_ROWS, 4))[rank])
    dcp.save(_state(many), checkpoint_id=folder)


def _resume_checkpoint(rank: int, folder: str, tower_size: int) -> None:
    world_size = dist.get_world_size()
    one, fresh = OneDevice(SmallModel(LINEAR)), SmallModel(LINEAR)
    for step in range(2):
        one.step(random_batch(NUM_ROWS, seed=step))
    with torch.no_grad():
        for weight in fresh.parameters():
            weight += 1.0
    many = ManyRanks(fresh, tower_size=tower_size)
    state = _state(many)
    dcp.load(state, checkpoint_id=folder)
    many.model.load_state_dict(state["model"])
    many.model.fused_optimizer.load_state_dict(state["optimizer"])
    many.assert_like(one.model, limit=1e-6)
    for step in range(2, 5):  # with the state of the optimizer
        batch = random_batch(NUM_ROWS, seed=step)
        many.step(parts_of(batch, even_cuts(NUM_ROWS, world_size))[rank])
        one.step(batch)
    many.assert_like(one.model, limit=1e-6)


def test_checkpoints_of_other_worlds_and_towers(tmp_path: Path) -> None:
    on_ranks(_save_checkpoint, 4, str(tmp_path))
    on_ranks(_resume_checkpoint, 2, str(tmp_path), 1)
    on_ranks(_resume_checkpoint, 4, str(tmp_path), 4)
    on_ranks(_resume_checkpoint, 1, str(tmp_path), 1)


def _from_meta(rank: int) -> None:
    model = SmallModel(LINEAR, device="meta")
    many = ManyRanks(model, tower_size=2)
    own = {name: value for name, value in many.model.state_dict().items() if "modules_of_towers" in name}
    assert own
    for name, value in own.items():
        assert torch.equal(value, SmallModel(LINEAR).state_dict()[name])
    part = part_of(random_batch(NUM_ROWS, seed=0), 4 * rank, 4 * rank + 4)
    assert many.step(part).isfinite().all()


def test_tables_on_the_meta_device() -> None:
    on_ranks(_from_meta, 4)


def _counts(rank: int) -> dict[str, int]:
    model = SmallModel(LINEAR)
    config = WireConfig(between_towers=WireFormat.BF16)
    many, one = ManyRanks(model, tower_size=2, wire=config), OneDevice(model)
    batch = random_batch(NUM_ROWS, seed=0)
    found = many.step(parts_of(batch, even_cuts(NUM_ROWS, 4))[rank])
    wanted = one.step(batch)[4 * rank : 4 * rank + 4]
    assert_close("logits", found, wanted, 1e-2)
    assert not torch.equal(found, wanted)
    return {str(entry["purpose"]): int(entry["bytes"]) for entry in many.sharder.traffic.report()}


def test_bytes_of_both_hops_are_counted() -> None:
    for rank, found in enumerate(on_ranks(_counts, 4)):
        # Outputs of N / 2 = 8 numbers, one a feature and one a tower: 3 + 3 | 3 + 2 fields; 4 samples a rank, BF16.
        mine, other = [(48, 40), (40, 48)][rank // 2]
        assert found["inter-group all-to-all forward"] == 4 * mine * 2
        assert found["inter-group all-to-all backward"] == 4 * other * 2
        assert found["intra-group all-to-all forward"] + found["intra-group all-to-all backward"] > 0


def _refused(rank: int) -> None:
    del rank
    model = SmallModel(LINEAR)
    plan = tower_plan(model.embeddings, Topology.create(tower_size=1))
    plan["t0"], plan["t4"] = copy.deepcopy(plan["t4"]), copy.deepcopy(plan["t0"])
    with pytest.raises(PlanError, match=r"all tables of tower 0 in one tower group"):
        ManyRanks(model, tower_size=1, sharding=plan)
    plan["t0"].sharding_type = "data_parallel"
    with pytest.raises(PlanError, match=r"table_wise, column_wise, table_row_wise"):
        ManyRanks(model, tower_size=1, sharding=plan)
    columns = TablePlacement(table="t2", placement=Placement.COLUMN_WISE, ranks=(0, 1))
    others = tuple(TablePlacement(table=f"t{i}", ranks=(0,)) for i in (0, 1, 3, 4, 5))
    whole = Plan(world_size=2, tables=(*others, columns), towers=TOWERS, tower_size=2)
    small = TowerEmbedding(EmbeddingBagCollection(tables=table_configs(mean=True, dim=4)), TOWERS)
    with pytest.raises(PlanError, match=r"multiple of 4"):
        tower_plan(small, Topology.create(tower_size=2), plan=whole)
    rows = TablePlacement(table="t2", placement=Placement.ROW_WISE, ranks=(0, 1))
    whole = Plan(world_size=2, tables=(*others, rows), towers=TOWERS, tower_size=2)
    with pytest.raises(PlanError, match=r"mean pooling"):
        ManyRanks(model, tower_size=2, plan=whole)
    many = ManyRanks(SmallModel(IDENTITY), tower_size=2)
    uneven = KeyedJaggedTensor(
        keys=["f0", "f1", "g1", "f2", "f3", "f4", "f5"],
        values=torch.arange(8),
        lengths=torch.ones(8, dtype=torch.int32),
        stride_per_key_per_rank=[[2], *[[1]] * 6],
        inverse_indices=(["f0"], torch.zeros(1, 2, dtype=torch.int64)),
    )
    with pytest.raises(DataError, match="one batch size for all features"):
        many.model.module.embeddings(uneven)


def test_what_cannot_work_is_refused_before_the_first_step() -> None:
    on_ranks(_refused, 2)


def _permuted(rank: int, given: dict[str, list[int]]) -> None:
    del rank
    module, topology = SmallModel(LINEAR).embeddings, Topology.create(tower_size=1, **given)
    for make in (lambda: tower_plan(module, topology), lambda: TowerEmbeddingSharder(topology)):
        with pytest.raises(TopologyError, match="launcher's order") as refused:
            make()
        assert "host 0: 0, 2" in str(refused.value)


def test_permuted_ranks_are_refused() -> None:
    on_ranks(_permuted, 4, {"order": [0, 2, 1, 3], "hosts": [0, 1, 0, 1]})
    on_ranks(_permuted, 4, {"hosts": [0, 1, 0, 1]})  # as hosts report themselves under a cyclic numbering


def test_one_device_is_refused_what_does_not_fit() -> None:
    model = SmallModel(LINEAR)
    with pytest.raises(ConfigError, match="EmbeddingBagCollection"):
        TowerEmbedding(model.embeddings, TOWERS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="compression"):
        TowerEmbedding(model.embeddings.ebc, TOWERS, TowerModuleConfig(compression=3.0))
