"""Bytes that cross hosts are counted, and are those of the paper's cost formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import DLRMConfig, build_model
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.models.towers.modules import TowerModuleConfig, TowerModuleKind
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import DenseParallelism, Reduction
from ziggurat.parallel.exchange import collectives
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.pipeline import Pipeline
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Towers
from ziggurat.planning.placement import place_tables
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.ranks import run_ranks

NUM_FIELDS, DIM, BATCH = 8, 16, 12


def traffic_of_a_step(
    rank: int, compression: float, wire: str, hosts: tuple[int, ...] = (0, 0, 1, 1)
) -> dict[str, tuple[int, int]]:
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
    topology = Topology.create(tower_size=plan.ranks_per_group, hosts=hosts)
    wires = WireConfig(between_towers=WireFormat(wire))
    parallel = parallelize(model, plan, topology, config=ParallelConfig(wire=wires))
    model(random_batch(inputs, BATCH, seed=rank)).sum().backward()
    counted: dict[str, tuple[int, int]] = {}
    for row in parallel.traffic.report():
        host, cross = counted.get(str(row["purpose"]), (0, 0))
        number = int(row["bytes"])
        counted[str(row["purpose"])] = (host + number, cross) if row["link"] == "host" else (host, cross + number)
        if row["purpose"] == "inter-group all-to-all forward":
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


@pytest.mark.slow
def test_bytes_that_cross_hosts_do_not_depend_on_how_ranks_are_numbered() -> None:
    for compression in (0.0, 4.0):
        neighbours = run_ranks(traffic_of_a_step, 4, compression, "fp32", timeout_s=240.0)
        in_turn = run_ranks(traffic_of_a_step, 4, compression, "fp32", (0, 1, 0, 1), timeout_s=240.0)
        assert neighbours[0] == in_turn[0]
        assert in_turn == in_turn[:1] * 4


@pytest.mark.parametrize(("compression", "wire", "num_bytes"), [(1.0, "fp32", 4), (4.0, "fp32", 4), (4.0, "bf16", 2)])
def test_towers_send_less_between_hosts(compression: float, wire: str, num_bytes: int) -> None:
    numbers = BATCH * NUM_FIELDS * DIM
    for counted in run_ranks(traffic_of_a_step, 4, compression, wire):
        for direction in ("forward", "backward"):
            # B·F·N·e·(S−1)/S inside the tower group, with S = 2
            assert counted[f"intra-group all-to-all {direction}"] == (numbers * 4 // 2, 0)
            # B·F·N·e·(T−1)/T / compression between groups, with T = 2
            assert counted[f"inter-group all-to-all {direction}"] == (0, int(numbers * num_bytes / compression) // 2)


def test_int8_costs_a_scale_for_each_field_of_a_sample() -> None:
    numbers = BATCH * NUM_FIELDS * DIM // 2
    for counted in run_ranks(traffic_of_a_step, 4, 1.0, "int8"):
        assert counted["inter-group all-to-all forward"] == (0, numbers + numbers // DIM * 2)


@pytest.mark.parametrize(("wire", "bits"), [("mx9", 9), pytest.param("mx6", 6, marks=pytest.mark.slow)])
def test_formats_in_blocks_cost_their_bits(wire: str, bits: int) -> None:
    """Fields of 16 numbers are whole blocks, and 12 samples a multiple of 16 bytes."""
    numbers = BATCH * NUM_FIELDS * DIM // 2
    for counted in run_ranks(traffic_of_a_step, 4, 1.0, wire):
        for direction in ("forward", "backward"):
            assert counted[f"inter-group all-to-all {direction}"] == (0, numbers * bits // 8)


# ------------------------------------------------------------------------------------------------------ dense network


def recorded_step(rank: int, dense: str, reduction: str, num_parts: int) -> tuple[dict[str, int], dict[str, int]]:
    """What was counted in a step, and what a recorder between FSDP and torch.distributed saw; hosts of two ranks."""
    kinds = {"_ALL_GATHER": "gathered", "_REDUCE_SCATTER": "scattered"}
    seen: dict[str, int] = {"gathered": 0, "scattered": 0, "all-reduced": 0}

    def recorded(name: str, original: Any) -> Any:
        def call(output: Any, *inputs: Any, **more: Any) -> Any:
            kind = kinds.get(name, "all-reduced")
            moved = inputs[0] if kind == "scattered" else output
            seen[kind] += moved.numel() * moved.element_size()
            return original(output, *inputs, **more)

        return call

    inputs = small_inputs()
    mlp = MLPConfig(hidden_dims=(4,))
    model = build_model(DLRMConfig(embedding_dim=DIM, top=mlp, bottom=mlp), inputs, seed=0)
    plan = place_tables(inputs, dim=DIM, world_size=4)
    config = ParallelConfig(dense=DenseParallelism(dense), reduction=Reduction(reduction))
    parallel = parallelize(model, plan, Topology.create(ranks_a_host=2), config=config)  # by its old name
    pipeline = Pipeline(model, parallel, num_parts=num_parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", recorded("all_reduce", dist.all_reduce))
        for name in kinds:
            patch.setattr(collectives, name, recorded(name, getattr(collectives, name)))
        pipeline.step(random_batch(inputs, BATCH, seed=rank), loss_of=lambda outputs, _: outputs.logits.sum())
    return {str(row["purpose"]): int(row["bytes"]) for row in parallel.traffic.report()}, seen


def traffic_of_dense_networks(rank: int) -> list[Any]:
    cases = [("fsdp", "fp32", 1), ("fsdp", "bf16", 2), ("hsdp", "fp32", 1), ("hsdp", "bf16", 2)]
    return [(case, *recorded_step(rank, *case)) for case in cases]


def test_weights_in_parts_are_gathered_and_counted() -> None:
    for results in run_ranks(traffic_of_dense_networks, 4):
        for (dense, reduction, num_parts), counted, seen in results:
            assert counted["dense weights"] == seen["gathered"] > 0
            assert counted["dense gradients"] == seen["scattered"]
            assert counted.get("dense gradients between hosts", 0) == seen["all-reduced"]
            assert bool(seen["all-reduced"]) == (dense == "hsdp")
            # A gather for each part, in FP32; gradients are summed once, in FP32 or BF16.
            ratio = num_parts * (2 if reduction == "bf16" else 1)
            assert seen["gathered"] == ratio * seen["scattered"]


def tower_reductions(rank: int) -> list[dict[str, int]]:
    """Bytes of tower modules' gradients, in one part and in two, as FP32 and as BF16."""
    inputs = small_inputs(num_single=4, num_jagged=0)
    towers = Towers(towers=(("single0", "single1"), ("single2", "single3")))
    found = []
    for num_parts in (1, 2):
        for reduction in Reduction:
            config = DLRMConfig(embedding_dim=DIM, tower_module=TowerModuleConfig(compression=2.0))
            model = build_model(config, inputs, seed=0, towers=towers)
            plan = place_tables(inputs, dim=DIM, world_size=4, towers=towers)
            topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=2)
            parallel = parallelize(model, plan, topology, config=ParallelConfig(reduction=reduction))
            pipeline = Pipeline(model, parallel, num_parts=num_parts)
            pipeline.step(random_batch(inputs, BATCH, seed=rank), loss_of=lambda outputs, _: outputs.logits.sum())
            bytes_by_purpose = {str(row["purpose"]): int(row["bytes"]) for row in parallel.traffic.report()}
            found.append({"bytes": bytes_by_purpose["tower module gradients"]})
    return found


def test_tower_modules_are_reduced_as_asked_in_any_number_of_parts() -> None:
    weights = 2 * DIM * DIM // 2  # of two fields
    for found in run_ranks(tower_reductions, 4):
        assert [each["bytes"] for each in found] == [4 * weights, 2 * weights] * 2
