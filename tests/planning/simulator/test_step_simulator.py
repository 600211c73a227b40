"""Timelines: starts by hand, waits that add up to the step, what overlap and faster links must do, towers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.clusters import round_cluster
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.models import DCNv2Config, DLRMConfig, MLPConfig, TowerModuleConfig, build_model
from ziggurat.models.costs.model_cost import flops_per_sample, num_parameters
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.plan import Plan, Towers
from ziggurat.planning.cluster.catalogue import named_cluster
from ziggurat.planning.cluster.cluster import Cluster, Launch
from ziggurat.planning.placement import place_tables
from ziggurat.planning.simulator.step_simulator import MatmulFormat, Overlap, StepSettings, StepSimulator
from ziggurat.planning.simulator.step_work import StepWork, state_bytes, step_work
from ziggurat.planning.simulator.timeline import Resource, SimulatedTask, Span, Timeline, run_tasks

NAMES = tuple("abcdefgh")
INPUTS = InputSpec(
    dense=("x", "y"),
    single=tuple(SingleSpec(name=name, table=name) for name in NAMES[:7]),
    jagged=(JaggedSpec(name="h", table="h"),),
    tables=tuple(TableSpec(name=name, num_rows=50_000_000) for name in NAMES),  # nothing of that size is made
    labels=(LabelSpec(name="label"),),
)
TOWERS = Towers(towers=(NAMES[:4], NAMES[4:]))


def work(*, towers: bool = False, compression: float = 1.0, batch_size: int = 256) -> StepWork:
    small, module = MLPConfig(hidden_dims=(32,)), TowerModuleConfig(compression=compression)
    config = DLRMConfig(embedding_dim=16, bottom=small, top=small, tower_module=module)
    grouping = TOWERS if towers else None
    return step_work(config, INPUTS, batch_size=batch_size, towers=grouping, list_lengths={"h": 5.0})


def plan(cluster: Cluster, *, towers: bool = False) -> Plan:
    grouping = TOWERS if towers else None
    size = cluster.world_size // 2 if towers else 0
    return place_tables(INPUTS, dim=16, world_size=cluster.world_size, towers=grouping, tower_size=size)


def step_s(cluster: Cluster, *, towers: bool = False, compression: float = 1.0, **settings: object) -> float:
    return timeline(cluster, towers=towers, compression=compression, **settings).step_s


def timeline(cluster: Cluster, *, towers: bool = False, compression: float = 1.0, **settings: object) -> Timeline:
    chosen = StepSettings(**settings)  # type: ignore[arg-type]
    simulator = StepSimulator(cluster, work(towers=towers, compression=compression), settings=chosen)
    return simulator.timeline(plan(cluster, towers=towers))


def test_tasks_start_when_resource_and_needs_allow() -> None:
    tasks = [
        SimulatedTask("lookup", Resource.COMPUTE, 2.0),
        SimulatedTask("hop", Resource.BETWEEN, 3.0, (0,)),
        SimulatedTask("bottom", Resource.COMPUTE, 1.0),
        SimulatedTask("top", Resource.COMPUTE, 4.0, (1,)),
        SimulatedTask("late", Resource.BETWEEN, 5.0, (2,)),
    ]
    spans = run_tasks(tasks)
    assert [(span.start_s, span.end_s) for span in spans] == [(0, 2), (2, 5), (2, 3), (5, 9), (5, 10)]
    found = Timeline(spans, named_cluster("h100x8"))
    assert found.step_s == 10
    assert found.parts_ms() == pytest.approx(
        {"lookup": 2e3, "bottom": 1e3, "wait: hop": 2e3, "top": 4e3, "wait: late": 1e3}
    )
    assert found.busy_s(Resource.BETWEEN) == pytest.approx(8.0)


@given(st.lists(st.tuples(st.sampled_from(list(Resource)), st.floats(0, 5)), min_size=1, max_size=12))
def test_parts_add_up_to_the_step(drawn: list[tuple[Resource, float]]) -> None:
    tasks = [
        SimulatedTask(f"{index}", resource, seconds, (index - 1,) if index else ())
        for index, (resource, seconds) in enumerate(drawn)
    ]
    found = Timeline(run_tasks(tasks), named_cluster("h100x8"))
    assert sum(found.parts_ms().values()) == pytest.approx(1e3 * found.step_s, abs=1e-6)


def test_work_is_that_of_the_model() -> None:
    config = DCNv2Config(embedding_dim=16, tower_module=TowerModuleConfig())
    small = replace(INPUTS, tables=tuple(replace(table, num_rows=10) for table in INPUTS.tables))
    for towers in (None, TOWERS):
        model = build_model(config, small, seed=0, towers=towers)
        found = step_work(config, INPUTS, batch_size=8, towers=towers)
        assert found.flop_per_sample == flops_per_sample(model).total
        in_towers = sum(tower.network.num_parameters for tower in found.towers)
        assert found.num_dense_parameters + in_towers == num_parameters(model).dense
    assert [table.num_rows for table in found.tables] == [50_000_000] * 8


def test_optimizer_state_is_counted() -> None:
    assert state_bytes(TableOptimizerKind.ROWWISE_ADAGRAD) == (4, 0)
    assert state_bytes(TableOptimizerKind.SPARSE_ADAM) == (0, 8)
    assert state_bytes(TableOptimizerKind.ADAM_DENSE) == (0, 8)
    assert state_bytes(TableOptimizerKind.SGD) == (0, 0)


@pytest.mark.parametrize("towers", [False, True])
@pytest.mark.parametrize("name", ["a100x16", "h100x64", "localx4"])
def test_parts_of_a_step_add_up(name: str, towers: bool) -> None:
    found = timeline(named_cluster(name), towers=towers)
    assert sum(found.parts_ms().values()) == pytest.approx(1e3 * found.step_s)
    assert found.samples_per_s(256) == pytest.approx(256 * found.cluster.world_size / found.step_s)


@pytest.mark.parametrize("towers", [False, True])
def test_more_overlap_is_never_slower(towers: bool) -> None:
    cluster = round_cluster()
    steps = [step_s(cluster, towers=towers, overlap=overlap) for overlap in Overlap]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


@pytest.mark.parametrize("towers", [False, True])
@pytest.mark.parametrize("faster", ["inside", "between", "memory", "matmul", "launch", "packing"])
def test_a_faster_machine_is_never_slower(towers: bool, faster: str) -> None:
    slow = round_cluster(device={"launch_s": 1e-5})
    link = {"bytes_per_s": 1e9} if faster in ("inside", "between") else {}
    device = {
        "memory": {"memory_bytes_per_s": 1e10},
        "matmul": {"fp32_flop_per_s": 1e13},
        "packing": {"packing_bytes_per_s": 1e13},
    }.get(faster, {})
    launch = {"launch_s": 1e-7 if faster == "launch" else 1e-5}
    fast = round_cluster(device={**launch, **device}, **({faster: link} if link else {}))
    assert step_s(fast, towers=towers) <= step_s(slow, towers=towers)


def test_two_parts_hide_a_slow_hop() -> None:
    cluster = round_cluster(device={"fp32_flop_per_s": 3e9})
    assert step_s(cluster, num_parts=2) < step_s(cluster, num_parts=1)
    assert step_s(cluster, num_parts=2, overlap=Overlap.NONE) == step_s(cluster, overlap=Overlap.NONE)


def test_towers_pay_where_links_between_hosts_are_slow() -> None:
    slow, fast = round_cluster(), round_cluster(between={"bytes_per_s": 1e8})
    assert step_s(slow, towers=True, compression=4.0) < 0.8 * step_s(slow)
    gain = [step_s(cluster) / step_s(cluster, towers=True, compression=4.0) for cluster in (slow, fast)]
    assert gain[0] > gain[1]
    more = [step_s(slow, towers=True, compression=compression) for compression in (1.0, 2.0, 4.0, 8.0)]
    assert more == sorted(more, reverse=True)


def test_formats_change_what_they_should() -> None:
    cluster = named_cluster("a100x16")
    plain = timeline(cluster)
    half = timeline(cluster, between_bytes=2.0)
    assert half.busy_s(Resource.BETWEEN) < plain.busy_s(Resource.BETWEEN)
    heavy = StepSimulator(cluster, work(batch_size=65_536), settings=StepSettings())
    quick = StepSimulator(cluster, work(batch_size=65_536), settings=StepSettings(matmul=MatmulFormat.TF32))
    assert quick.timeline(plan(cluster)).step_s < heavy.timeline(plan(cluster)).step_s


def test_a_program_that_runs_ahead_sets_a_floor_and_one_that_does_not_adds() -> None:
    ahead = round_cluster(device={"step_s": 100.0, "launch": Launch.AHEAD})
    inline = round_cluster(device={"step_s": 100.0})
    assert step_s(ahead) == pytest.approx(100.0)
    own = step_s(round_cluster())
    assert 100.0 < step_s(inline) <= 100.0 + own  # ids of the next batch travel meanwhile
    assert step_s(inline, overlap=Overlap.NONE) == pytest.approx(100.0 + step_s(round_cluster(), overlap=Overlap.NONE))
    assert timeline(ahead).parts_ms()["rest"] > 0


def test_a_plan_for_other_ranks_is_refused() -> None:
    cluster = round_cluster()
    with pytest.raises(ConfigError, match="4 ranks"):
        StepSimulator(cluster, work()).timeline(plan(round_cluster(hosts=1)))


def test_an_unbalanced_plan_takes_longer() -> None:
    cluster = round_cluster()
    balanced = plan(cluster)
    piled = replace(balanced, tables=tuple(replace(entry, ranks=(0,)) for entry in balanced.tables))
    simulator = StepSimulator(cluster, work())
    assert simulator.timeline(piled).step_s > 1.5 * simulator.timeline(balanced).step_s


def test_one_rank_waits_for_nobody() -> None:
    found = timeline(named_cluster("a100x1"))
    assert not [name for name in found.parts_ms() if name.startswith("wait")]
    assert isinstance(found.spans[0], Span)
