"""Bytes that cross hosts are counted, and are those of the paper's cost formulas."""

from __future__ import annotations

import pytest

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import DLRMConfig, build_model
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.models.tower_modules import TowerModuleConfig, TowerModuleKind
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.parallel.wire import WireConfig, WireFormat
from ziggurat.plan import Towers
from ziggurat.planning.placement import place_tables
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks

NUM_FIELDS, DIM, BATCH = 8, 16, 12


def traffic_of_a_step(rank: int, compression: float, wire: str) -> dict[str, tuple[int, int]]:
    """Bytes and messages of one forward and backward pass on hosts of two ranks: (host, cross_host) by purpose."""
    inputs = InputSpec(
        single=tuple(SingleSpec(name=f"f{i}", table=f"t{i}") for i in range(NUM_FIELDS)),
        tables=tuple(TableSpec(name=f"t{i}", num_rows=20) for i in range(NUM_FIELDS)),
        labels=(LabelSpec(name="click"),),
    )
    towers = None
    if compression:
        half = NUM_FIELDS // 2
        names = [f"f{i}" for i in range(NUM_FIELDS)]
        towers = Towers(towers=(tuple(names[:half]), tuple(names[half:])))
    config = DLRMConfig(
        embedding_dim=DIM,
        embedding=EmbeddingConfig(dim=DIM, kernel=KernelChoice.TORCH),
        top=MLPConfig(hidden_dims=(4,)),
        bottom=MLPConfig(hidden_dims=(4,)),
        tower_module=TowerModuleConfig(kind=TowerModuleKind.LINEAR, compression=compression or 1.0),
    )
    model = build_model(config, inputs, seed=0, towers=towers)
    plan = place_tables(inputs, dim=DIM, world_size=4, towers=towers)
    topology = Topology.create(tower_size=plan.ranks_a_group, ranks_a_host=2)
    wires = WireConfig(between_towers=WireFormat(wire))
    parallel = parallelize(model, plan, topology, config=ParallelConfig(wire=wires))
    model(random_batch(inputs, BATCH, seed=rank)).sum().backward()
    counted: dict[str, tuple[int, int]] = {}
    for row in parallel.traffic.report():
        host, cross = counted.get(str(row["purpose"]), (0, 0))
        number = int(row["bytes"])
        counted[str(row["purpose"])] = (host + number, cross) if row["link"] == "host" else (host, cross + number)
        if row["purpose"] == "peer hop forward":
            assert row["messages"] == 1
        if row["purpose"] == "embeddings forward" and row["link"] == "cross_host":
            assert row["messages"] == 2
    return counted


def test_flat_exchange() -> None:
    numbers = BATCH * NUM_FIELDS * DIM
    for counted in run_ranks(traffic_of_a_step, 4, 0.0, "fp32"):
        for direction in ("embeddings forward", "embeddings backward"):
            assert counted[direction] == (numbers * 4 // 4, numbers * 4 * 2 // 4)
        assert counted["ids"] == (BATCH * 2 * 4, BATCH * 4 * 4)  # 32 bits for each of two features of each other rank


@pytest.mark.parametrize(("compression", "wire", "num_bytes"), [(1.0, "fp32", 4), (4.0, "fp32", 4), (4.0, "bf16", 2)])
def test_towers_send_less_between_hosts(compression: float, wire: str, num_bytes: int) -> None:
    numbers = BATCH * NUM_FIELDS * DIM
    for counted in run_ranks(traffic_of_a_step, 4, compression, wire):
        for direction in ("forward", "backward"):
            # B·F·N·e·(S−1)/S inside the tower group, with S = 2
            assert counted[f"tower hop {direction}"] == (numbers * 4 // 2, 0)
            # B·F·N·e·(T−1)/T / compression between groups, with T = 2
            assert counted[f"peer hop {direction}"] == (0, int(numbers * num_bytes / compression) // 2)


def test_int8_costs_a_scale_for_each_field_of_a_sample() -> None:
    numbers = BATCH * NUM_FIELDS * DIM // 2
    for counted in run_ranks(traffic_of_a_step, 4, 1.0, "int8"):
        assert counted["peer hop forward"] == (0, numbers + numbers // DIM * 2)
