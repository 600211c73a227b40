"""A table optimizer from outside the package: its equation, every storage, checkpoints, plans, and ranks."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.embeddings import test_low_precision as on_tables
from tests.parallel.in_turn import in_turn
from tests.parallel.test_parity import TOWERS, check, inputs, placed
from ziggurat.config import from_json, override, to_json
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer, TableOptimizerKind
from ziggurat.embeddings.storage import MemoryStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, NumericsError, PlanError
from ziggurat.ops.lookup import Step, SummedGradient, TorchKernel
from ziggurat.ops.lookup.choose import BatchShape
from ziggurat.ops.table_optimizers import RowChange, TouchedRows
from ziggurat.parallel.tables.sharded_tables import _check_cuts
from ziggurat.parallel.tables.shards import cut_tables
from ziggurat.placements import Placement
from ziggurat.planning.problem import PlanningProblem
from ziggurat.planning.simulator.step_work import table_profiles
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.step.late import LateStep


@pytest.fixture(scope="module")
def lion() -> Iterator[TableOptimizerKind]:
    """The optimizer, listed while these tests run: others of this process ask for all that are listed."""
    yield TableOptimizerKind.add(importlib.import_module("examples.extensions.lion").LION)
    del TableOptimizerKind._members["lion"]


def make(kind: TableOptimizerKind, **kept: Any) -> EmbeddingTables:
    config = EmbeddingConfig(dim=16, optimizer=kind, kernel=KernelChoice.TORCH, weight_decay=0.01, beta2=0.99)
    made = TablesConfig(**kept).make_storage(seed=7)
    return EmbeddingTables(on_tables.MIXED, config, seed=5, make_storage=made)


@pytest.mark.parametrize("late", [None, True, False])
def test_it_is_the_equation_row_by_row(lion: TableOptimizerKind, late: bool | None) -> None:
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(9, 3, generator=draw)
    momentum = torch.randn(9, 3, generator=draw)
    rows = torch.tensor([4, 2, 7])
    grad = torch.randn(3, 3, generator=draw)
    wanted = {"weight": weight.clone(), "momentum": momentum.clone()}
    rule = EmbeddingConfig(optimizer=lion, weight_decay=0.1, beta2=0.99).rule
    for place, row in enumerate(rows.tolist()):
        for column in range(3):
            w = float(weight[row, column])
            m = float(momentum[row, column])
            g = 0.5 * float(grad[place, column])
            if late is not False:
                moved = w - 0.03 * (math.copysign(1.0, 0.9 * m + 0.1 * g) + 0.1 * w)
                wanted["weight"][row, column] = moved
                wanted["momentum"][row, column] = 0.99 * m + 0.01 * g
    applies = None if late is None else torch.tensor(late)
    numbers: dict[str, Any] = {"learning_rate": 0.03, "scale": 0.5}
    if late is not None:
        numbers = {name: torch.tensor(number) for name, number in numbers.items()}
    step = Step(rule=rule, number=3, applies=applies, **numbers)
    summed = SummedGradient(rows=rows, sums=grad)
    TorchKernel().apply(weight, state={"momentum": momentum}, gradient=summed, step=step)
    assert torch.allclose(weight, wanted["weight"], atol=1e-6)
    assert torch.allclose(momentum, wanted["momentum"], atol=1e-6)


@pytest.mark.parametrize("kept", [{}, {"weights": "bf16"}, {"weights": "int8", "cache": 0.3}, {"disk": "."}])
def test_every_storage_keeps_its_state(lion: TableOptimizerKind, kept: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint of any storage goes on bit for bit; storages of exact rows agree with memory bit for bit."""
    if "disk" in kept:
        kept = {"disk": str(tmp_path)}

    def state(tables: EmbeddingTables, optimizer: TableOptimizer) -> dict[str, torch.Tensor]:
        return tables.state_dict() | {f"state.{name}": value for name, value in optimizer.state_dict().items()}

    first, again, plain = (make(lion, **each) for each in (kept, kept, {}))
    optimizers = [TableOptimizer(tables) for tables in (first, again, plain)]
    on_tables.train(first, optimizers[0])
    with CheckpointStore(tmp_path / "checkpoints") as store:
        store.save(1, tensors=state(first, optimizers[0]), state={})
    into = state(again, optimizers[1])
    assert any(name.endswith("user.momentum") for name in into)
    again.tables.about_to_load()
    CheckpointStore(tmp_path / "checkpoints").load(into=into)
    optimizers[1].load_state_dict({key[6:]: value for key, value in into.items() if key.startswith("state.")})
    more = range(4, 6)
    found = [on_tables.train(first, optimizers[0], steps=more), on_tables.train(again, optimizers[1], steps=more)]
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    if "weights" not in kept:
        on_tables.train(plain, optimizers[2], steps=range(6))
        assert torch.equal(first.table("user"), plain.table("user"))


def test_kernels_that_do_not_know_it_say_so(lion: TableOptimizerKind) -> None:
    config = EmbeddingConfig(dim=16, optimizer=lion, kernel=KernelChoice.CPP)
    with pytest.raises(ConfigError, match="it does not know the rule of lion"):
        EmbeddingTables(on_tables.MIXED, config, seed=5).choose_kernel(BatchShape())
    chosen = EmbeddingTables(on_tables.MIXED, EmbeddingConfig(dim=16, optimizer=lion), seed=5)
    on_tables.train(chosen, TableOptimizer(chosen))
    assert chosen.kernel_name is KernelChoice.TORCH


def test_settings_and_planners_take_it(lion: TableOptimizerKind) -> None:
    config = override(EmbeddingConfig(), {"optimizer": "lion"})
    assert config.optimizer is lion
    assert from_json(EmbeddingConfig, to_json(config), where="test") == config
    assert pickle.loads(pickle.dumps(config)) == config
    profile = table_profiles(inputs(), dims={"user": 8}, optimizer=lion, list_lengths={})[0]
    assert (profile.optimizer_bytes_per_row, profile.optimizer_bytes_per_element) == (0, 4)


def check_with_extension(rank: int, plan: dict[str, Any], case: dict[str, Any]) -> None:
    """Runs on every rank, whose process has to import the optimizer before it reads settings."""
    importlib.import_module("examples.extensions.lion")
    check(rank, plan, case)


def test_four_ranks_equal_one_device_flat_and_above_towers(lion: TableOptimizerKind) -> None:
    cases = [
        (
            to_json(placed(4, Placement(kind))),
            {"optimizer": lion.name, "fields": 1e-6 if kind == "row_wise" else 0.0},
        )
        for kind in ("row_wise", "column_wise", "data_parallel")
    ]
    towers = {"optimizer": lion.name, "tower_modules": True, "fields": 1e-6}
    cases.append((to_json(placed(4, Placement("table_wise"), TOWERS, 2)), towers))
    run_ranks(in_turn, 4, check_with_extension, cases)


@pytest.mark.parametrize(
    ("damage", "message"),
    [("forgets", "each array that it declares"), ("padding", "which is padding"), ("neighbours", "depend on others")],
)
def test_a_rule_that_breaks_a_promise_is_refused(lion: TableOptimizerKind, damage: str, message: str) -> None:
    class Damaged(type(lion)):
        name = "damaged"

        def change(self, rows: TouchedRows) -> RowChange:
            made = super().change(rows)
            if damage == "forgets":
                return RowChange(direction=made.direction, factor=made.factor)
            direction = made.direction + 1 if damage == "padding" else made.direction * len(rows.grad)
            return RowChange(direction=direction, factor=made.factor, state=made.state)

    with pytest.raises(ConfigError, match=message):
        TableOptimizer(make(Damaged()))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        ("nan direction", NumericsError, r"factor · direction .*the gradients are finite"),
        ("infinite factor", NumericsError, r"factor · direction \(factor -inf\)"),
        ("overflow", NumericsError, r"factor · direction \(factor -1e\+38\)"),
        ("nan state", NumericsError, r"infinity in momentum (.|\n)*Damaged\.change in a step with \d+ rows, step 3"),
        ("infinite state", NumericsError, "infinity in momentum"),
        ("no state", ConfigError, r"expected: .*momentum: \(\d+, 16\)[^\n]*\nfound: *momentum: nothing"),
        ("other shape", ConfigError, r"found: *direction: \(1, 16\)"),
        ("other dtype", ConfigError, r"found: *direction: .*float64"),
        ("other factor", ConfigError, r"found: *factor: \(2,\)"),
        ("nothing", ConfigError, r"found: *NoneType"),
        ("raises", ConfigError, r"found: *KeyError: 'lost'(.|\n)*test_table_optimizer\.py:\d+"),
    ],
)
@pytest.mark.parametrize("kept", [{}, {"weights": "int8"}])
def test_a_rule_that_breaks_a_promise_later_writes_nothing(
    lion: TableOptimizerKind, kept: dict[str, Any], damage: str, error: type[Exception], message: str
) -> None:
    class Damaged(type(lion)):
        name = "damaged"

        def change(self, rows: TouchedRows) -> RowChange:
            made = super().change(rows)
            if rows.step.number < 3:
                return made
            direction = made.direction
            momentum = made.state["momentum"]
            never = made.factor
            match damage:
                case "nan direction":
                    return dataclasses.replace(made, direction=direction / 0.0 * 0.0)
                case "infinite factor":
                    return dataclasses.replace(made, factor=-math.inf)
                case "overflow":
                    return dataclasses.replace(made, direction=direction * 9.0, factor=-1e38)
                case "nan state":
                    return dataclasses.replace(made, state={"momentum": momentum * math.nan})
                case "infinite state":
                    return dataclasses.replace(made, state={"momentum": momentum + math.inf})
                case "no state":
                    return dataclasses.replace(made, state={})
                case "other shape":
                    return dataclasses.replace(made, direction=direction[:1])
                case "other dtype":
                    return dataclasses.replace(made, direction=direction.double())
                case "other factor":
                    return dataclasses.replace(made, factor=torch.tensor([never, never]))
                case "nothing":
                    return None  # type: ignore[return-value]
                case _:
                    raise KeyError("lost")

    tables = make(Damaged(), **kept)
    optimizer = TableOptimizer(tables)
    on_tables.train(tables, optimizer, steps=range(2))
    before = [tables.table(name).clone() for name in tables.tables.places]
    momenta = [value.clone() for name, value in optimizer.state_dict().items() if name.endswith(".momentum")]
    with pytest.raises(error, match=message):
        on_tables.train(tables, optimizer, steps=range(2, 3))
    assert all(map(torch.equal, [tables.table(name) for name in tables.tables.places], before))
    now = [value for name, value in optimizer.state_dict().items() if name.endswith(".momentum")]
    assert all(map(torch.equal, now, momenta))


def test_infinity_that_stood_in_the_state_before_may_stay(lion: TableOptimizerKind) -> None:
    """A smallest number so far begins with infinity; rows that have not had one keep it."""

    class Smallest(TableOptimizerKind):
        name = "smallest"
        row_state = ("least",)

        def change(self, rows: TouchedRows) -> RowChange:
            sizes = rows.grad.abs().amax(dim=1)
            least = torch.where(sizes > 0.05, torch.minimum(rows.state["least"], sizes), rows.state["least"])
            return RowChange(direction=rows.grad, factor=-0.1, state={"least": least})

        def initial(self, key: str, *, initial_sum: float) -> float:
            return math.inf

    tables = make(Smallest())
    optimizer = TableOptimizer(tables)
    on_tables.train(tables, optimizer, steps=range(2))
    least = torch.cat([value for name, value in optimizer.state_dict().items() if name.endswith("least")])
    assert bool(least.isfinite().any())


def test_a_gpu_waits_for_the_steps_of_a_rule_in_torch_alone(lion: TableOptimizerKind) -> None:
    """What a host does not wait for, it cannot look at."""
    device = torch.device("cuda")
    of_torch: Any = SimpleNamespace(embeddings=make(lion), looks_up_drawn_rows=False)
    assert "the rule of lion" in LateStep.why_not(of_torch, device=device)
    compiled: Any = SimpleNamespace(embeddings=make(TableOptimizerKind.SPARSE_ADAM), looks_up_drawn_rows=False)
    assert not LateStep.why_not(compiled, device=device)


def test_the_optimizer_of_the_guide_keeps_its_promises() -> None:
    guide = Path("docs/guides/extending.md").read_text()
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "TableOptimizerKind" in each)
    known = dict(TableOptimizerKind._members)
    try:
        exec(code, {})
        tables = make(TableOptimizerKind("floored_adagrad"))
        on_tables.train(tables, TableOptimizer(tables))
        floored = TableOptimizerKind("floored_adagrad")
        profile = table_profiles(inputs(), dims={"user": 8}, optimizer=floored, list_lengths={})[0]
        problem = PlanningProblem(tables=(profile,), num_devices=4, memory_bytes=(1 << 20,), placements=(*Placement,))
        assert problem.column_parts(0) == (1,)
        shards = cut_tables(placed(4, Placement("column_wise")), inputs(), dim=8)
        with pytest.raises(PlanError, match="keeps rows whole, for table optimizer floored_adagrad"):
            _check_cuts(shards, EmbeddingConfig(optimizer=floored), MemoryStorage)
    finally:
        TableOptimizerKind._members.clear()
        TableOptimizerKind._members.update(known)
