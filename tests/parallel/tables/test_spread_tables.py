"""Tables with rows over hosts, copies on every rank, and all placements mixed: each equals one device.

Uneven everything: rows that do not divide, ranks without rows, ranks without samples, features without rows, one huge
list.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.test_parity import TOWERS, build, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.errors import BoundsError, PlanError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.tables.buckets import sort_into_buckets
from ziggurat.parallel.tables.shards import Shard
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

TABLES = [table.name for table in inputs().tables]


def lopsided(size: int) -> Batch:
    """One sample has all the words, nobody has genres, everybody reads the same shop."""
    batch = random_batch(inputs(), size, seed=4)
    batch.single[2] = 4
    tags = torch.arange(size) % 2
    words = torch.zeros(size, dtype=torch.int64)
    words[size // 2] = 2500
    lengths = torch.cat([torch.zeros(size, dtype=torch.int64), tags, words])
    values = torch.cat([torch.full((int(tags.sum()),), 3), torch.arange(2500) % 40])
    jagged = JaggedRows(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    return dataclasses.replace(batch, jagged=jagged)


def check(rank: int, cases: list[dict[str, Any]]) -> None:
    """Several cases, one after the other, in one group of processes."""
    del rank
    for case in cases:
        plan = from_json(Plan, case["plan"], where="test")
        towers = plan.towers if case.get("modules") else None
        size = case.get("batch_size", 13)
        assert_same_as_single_device(
            lambda towers=towers, case=case: build(towers=towers, optimizer=case.get("optimizer", "rowwise_adagrad")),
            plan,
            batch=lopsided(size) if case.get("lopsided") else random_batch(inputs(), size, seed=1),
            config=ParallelConfig(dense=DenseParallelism(case.get("dense", "ddp"))),
            tolerance=Tolerance(fields=1e-6, others=1e-5 if case.get("lopsided") else 1e-6),
            cuts=case.get("cuts"),
            num_parts=case.get("num_parts", 1),
            ranks_per_host=case.get("ranks_per_host", 0),
            hosts=case.get("hosts", ()),
        )


def mixed(world_size: int, hosts: int = 1) -> Plan:
    """A table of every placement."""
    everybody = tuple(range(world_size))
    last_host = everybody[-(world_size // hosts) :]
    kinds = {
        "user": (Placement.TABLE_ROW_WISE, last_host[::-1]),
        "item": (Placement.DATA_PARALLEL, everybody),
        "shop": (Placement.ROW_WISE, everybody),
        "genres": (Placement.TABLE_WISE, (world_size - 1,)),
        "words": (Placement.COLUMN_WISE, everybody[:2]),
    }
    tables = tuple(TablePlacement(table=name, placement=kind, ranks=ranks) for name, (kind, ranks) in kinds.items())
    return Plan(world_size=world_size, tables=tables)


def over_a_host(host: int) -> Plan:
    """Four ranks, two hosts: every table over the rows of one of them."""
    ranks = (2 * host, 2 * host + 1)
    kind = Placement.TABLE_ROW_WISE
    return Plan(world_size=4, tables=tuple(TablePlacement(table=name, placement=kind, ranks=ranks) for name in TABLES))


def test_sums_inside_a_host_equal_one_device() -> None:
    run_ranks(
        check,
        4,
        [
            {"plan": to_json(over_a_host(1)), "ranks_per_host": 2},
            {"plan": to_json(over_a_host(0)), "ranks_per_host": 2, "num_parts": 2},
            {"plan": to_json(mixed(4, hosts=2)), "ranks_per_host": 2, "cuts": [0, 12, 12]},
            {"plan": to_json(mixed(4, hosts=2)), "ranks_per_host": 2, "lopsided": True},
        ],
    )


def test_neighbouring_ranks_on_different_hosts_equal_one_device() -> None:
    towers = to_json(placed(4, Placement.TABLE_ROW_WISE, TOWERS, 2))
    run_ranks(
        check,
        4,
        [
            {"plan": to_json(mixed(4, hosts=2)), "hosts": [0, 1, 0, 1]},
            {"plan": to_json(over_a_host(1)), "hosts": [0, 1, 1, 0], "dense": "hsdp"},
            {"plan": towers, "modules": True, "hosts": [0, 1, 0, 1], "num_parts": 2},
            {"plan": to_json(mixed(4, hosts=2)), "hosts": [0, 1, 1, 0], "dense": "fsdp"},
        ],
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_placements_mixed_and_uneven(world_size: int) -> None:
    plan = to_json(mixed(world_size))
    cases = [
        {"plan": plan, "cuts": [1] if world_size == 2 else [1, 1, 12]},
        {"plan": plan, "lopsided": True},
        {"plan": plan, "batch_size": 1, "cuts": [0] * (world_size - 1)},
        {"plan": plan, "num_parts": 2},
        {"plan": plan, "optimizer": "sgd"},
    ]
    run_ranks(check, world_size, cases)


@pytest.mark.parametrize("kind", [Placement.DATA_PARALLEL, Placement.TABLE_ROW_WISE])
def test_with_towers(kind: Placement) -> None:
    cases = [
        {"plan": to_json(placed(4, kind, TOWERS, size)), "modules": True, "ranks_per_host": host, **more}
        for size, host, more in ((1, 2, {}), (2, 2, {"num_parts": 2}), (4, 4, {}), (2, 2, {"lopsided": True}))
    ]
    run_ranks(check, 4, cases)


@pytest.mark.parametrize("optimizer", ["sgd", "sparse_adam"])
def test_copies_under_other_rules(optimizer: str) -> None:
    run_ranks(check, 2, [{"plan": to_json(placed(2, Placement.DATA_PARALLEL)), "optimizer": optimizer}])


def test_a_rank_may_have_no_rows() -> None:
    plan = placed(4, Placement.ROW_WISE)  # the 5 rows of "shop" lie on ranks 0 to 2, two a rank
    run_ranks(check, 4, [{"plan": to_json(plan), "lopsided": True}])


# ------------------------------------------------------------------------------------------------------------- refusals


def refusal(rank: int, plan: Any, ranks_per_host: int) -> str:
    del rank
    chosen = from_json(Plan, plan, where="test")
    topology = Topology.create(tower_size=chosen.ranks_per_group, ranks_per_host=ranks_per_host)
    try:
        parallelize(build(towers=None, optimizer="sgd"), chosen, topology)
    except PlanError as error:
        return str(error)
    return ""


def test_table_row_wise_over_two_hosts_is_refused_on_all_ranks() -> None:
    plan = to_json(placed(4, Placement.TABLE_ROW_WISE))
    for text in run_ranks(refusal, 4, plan, 2):
        assert "on hosts [0, 1]" in text
        assert "row_wise" in text


def test_copies_on_some_ranks_are_refused() -> None:
    entry = TablePlacement(table="user", placement=Placement.DATA_PARALLEL, ranks=(0, 1))
    with pytest.raises(PlanError, match=r"all ranks that look the table up, \[0, 1, 2, 3\]"):
        Plan(world_size=4, tables=(entry,))
    Plan(world_size=4, tables=(entry,), towers=TOWERS, tower_size=2)
    with pytest.raises(PlanError, match="data_parallel"):
        Plan(world_size=4, tables=(dataclasses.replace(entry, ranks=(1, 2)),), towers=TOWERS, tower_size=2)


@pytest.mark.parametrize("kind", list(Placement))
def test_rows_outside_of_a_table_are_refused_before_they_travel(kind: Placement) -> None:
    """Also those that 32 bits would turn into rows of the table."""
    model, plan = build(towers=None, optimizer="sgd"), placed(1, kind)
    parallelize(model, plan, Topology.create())
    for row in (23, -1, 2**31 - 1, 2**31, 2**32 + 7, -(2**32) + 7, 2**62):  # the table has rows 0 to 22
        batch = random_batch(inputs(), 5)
        batch.single[0, 3] = row
        with pytest.raises(BoundsError, match=rf"row {row}\n[\s\S]*'user', sample 3"):
            model(batch)
        batch = random_batch(inputs(), 5, seed=1)
        words = batch.jagged.offsets[2 * 5 :]
        sample = int(words.diff().nonzero()[-1])
        batch.jagged.values[int(words[sample])] = row + 40 if row == 23 else row  # of 40 rows
        with pytest.raises(BoundsError, match=rf"'words', sample {sample}"):
            model(batch)


# -------------------------------------------------------------------------------------------------------------- buckets


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(3, 40),
    num_ranks=st.integers(1, 7),
    lengths=st.lists(st.integers(0, 5), max_size=6),
    seed=st.integers(0, 1000),
)
def test_buckets_hold_what_masks_would_select(num_rows: int, num_ranks: int, lengths: list[int], seed: int) -> None:
    entry = TablePlacement(table="t", placement=Placement.ROW_WISE, ranks=tuple(range(num_ranks))[::-1])
    shards = shards_of(entry, num_rows)
    rows = torch.randint(num_rows, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    buckets = sort_into_buckets(rows, torch.tensor(lengths, dtype=torch.int64), shards=shards)
    assert sum(shard.num_rows for shard in shards) == num_rows
    for shard in shards:
        wanted_rows, wanted_lengths = [], []
        for sample in rows.split(lengths):
            inside = sample[(sample >= shard.first_row) & (sample < shard.first_row + shard.num_rows)]
            wanted_rows += (inside - shard.first_row + shard.num_padding).tolist()
            wanted_lengths.append(len(inside))
        assert buckets[shard.rank].rows.tolist() == wanted_rows
        assert buckets[shard.rank].lengths.tolist() == wanted_lengths


def shards_of(entry: TablePlacement, num_rows: int) -> tuple[Shard, ...]:
    from ziggurat.features.inputs import InputSpec, TableSpec
    from ziggurat.parallel.tables.shards import cut_tables

    plan = Plan(world_size=len(entry.ranks), tables=(entry,))
    return cut_tables(plan, InputSpec(tables=(TableSpec(name="t", num_rows=num_rows),)), dim=4)["t"]


# -------------------------------------------------------------------------------------------------------------- traffic

BATCH, DIM = 12, 8
WIRES = {"fp32": 4, "bf16": 2}


def traffic_of_a_step(rank: int, plan: Any, wire: str) -> dict[str, list[int]]:
    """Bytes that one rank sends in a step, by purpose: inside the host, between hosts. Two ranks a host."""
    chosen = from_json(Plan, plan, where="test")
    topology = Topology.create(ranks_per_host=2)
    model = build(towers=None, optimizer="rowwise_adagrad")
    config = ParallelConfig(wire=WireConfig(between_towers=WireFormat(wire)))
    parallel = parallelize(model, chosen, topology, config=config)
    model(random_batch(inputs(), BATCH, seed=rank)).sum().backward()
    parallel.table_optimizer(model).step(0.1)
    model.embeddings.sequence(random_batch(inputs(), BATCH, seed=rank), "words")[0].sum().backward()
    counted: dict[str, list[int]] = {}
    for row in parallel.traffic.report():
        link = {"host": 0, "cross_host": 1}.get(str(row["link"]))
        if link is not None:
            counted.setdefault(str(row["purpose"]), [0, 0])[link] += int(row["bytes"])
    return counted


@pytest.mark.parametrize("wire", list(WIRES))
def test_bytes_of_sums_inside_a_host(wire: str) -> None:
    """Between hosts a spread table costs what a whole one costs; its partial sums stay inside the host."""
    size, fields = WIRES[wire], 6
    for rank, counted in enumerate(run_ranks(traffic_of_a_step, 4, to_json(over_a_host(0)), wire)):
        for way in ("forward", "backward"):
            # R·F·D·(k−1)/k of partial sums in FP32 for the samples of R = 4·B, over k = 2 ranks
            inside = 4 * BATCH * fields * DIM * 4 // 2 if rank < 2 else 0
            assert counted.get(f"host sums {way}", [0, 0]) == [inside, 0]
        # D/2 columns of every field to the other rank of the host and to the two of the other host
        half = BATCH * fields * (DIM // 2) * size
        forward, backward = counted.get("embeddings forward", [0, 0]), counted["embeddings backward"]
        assert forward == ([half, 2 * half] if rank < 2 else [0, 0])
        # gradients of this rank's samples, half to each rank of host 0
        assert backward == ([half, 0] if rank < 2 else [0, 2 * half])


def distinct(rank: int, name: str) -> set[int]:
    """Rows of a table that a rank reads, padding left out."""
    batch, spec = random_batch(inputs(), BATCH, seed=rank), inputs()
    rows: set[int] = set()
    for index, single in enumerate(spec.single):
        rows |= set(batch.single[index].tolist()) if single.table == name else set()
    for index, jagged in enumerate(spec.jagged):
        first, last = batch.jagged.offsets[index * BATCH], batch.jagged.offsets[(index + 1) * BATCH]
        rows |= set(batch.jagged.values[int(first) : int(last)].tolist()) if jagged.table == name else set()
    return rows - {0}


def test_bytes_of_copied_tables() -> None:
    """Only distinct rows travel: to their owner r mod S, and from it to everybody, 4·(D+1) bytes each."""
    ranks = range(4)
    first_row = dict(zip(TABLES, [0, 23, 40, 45, 56], strict=True))  # all tables lie in one storage
    read = [{first_row[name] + row for name in TABLES for row in distinct(rank, name)} for rank in ranks]
    together = set().union(*read)
    for rank, counted in enumerate(
        run_ranks(traffic_of_a_step, 4, to_json(placed(4, Placement.DATA_PARALLEL)), "fp32")
    ):
        away = sum(1 for row in read[rank] if row % 4 != rank)
        owned = sum(1 for row in together if row % 4 == rank)
        assert sum(counted["copied tables to owners"]) == away * (DIM + 1) * 4
        assert sum(counted["copied tables to all"]) == 3 * owned * (DIM + 1) * 4
        assert not {"ids", "embeddings forward", "sequence ids"} & counted.keys()


def test_bytes_of_sequences() -> None:
    for rank, counted in enumerate(run_ranks(traffic_of_a_step, 4, to_json(placed(4, Placement.ROW_WISE)), "bf16")):
        batch = random_batch(inputs(), BATCH, seed=rank)
        words = batch.jagged.values[int(batch.jagged.offsets[2 * BATCH]) :]
        away = int((words.div(10, rounding_mode="floor") != rank).sum())  # 40 rows, 10 a rank
        assert sum(counted["sequence ids"]) == 4 * away
        assert sum(counted["sequence backward"]) == 2 * DIM * away
