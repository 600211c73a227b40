"""exact_plan: the best plan there is, for small cases with costs that add up.

With a cost a shard, w, placing tables is a mixed-integer linear program (RecShard, Sethi et al., arXiv 2201.10095, does
the same over memory tiers):

    minimise  C
    y_tl ∈ {0, 1}      table t is cut into 2^l parts                      Σ_l y_tl + Σ_o y_to = 1
    z_tld ∈ {0, 1}     one of these parts is on device d                  Σ_d z_tld = 2^l · y_tl
    Σ w_tl z_tld + Σ w_to y_to  ≤  C          on every device d
    Σ bytes_tl z_tld + Σ bytes_to y_to  ≤  room of d

y_to chooses a placement whose devices are fixed. HiGHS solves it through `scipy.optimize.milp`. It proves
a bound, too: the distance of a search to the bound is never less than its distance to the best plan. Cost models that
are not additive have no exact answer here, and are refused. Cost: seconds for 12 tables on four devices; exponential.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from ziggurat.errors import ConfigError, PlanError
from ziggurat.placements import by_columns
from ziggurat.planning.cost_model import device_costs
from ziggurat.planning.problem import Assignment
from ziggurat.planning.search.infeasible import check_room, not_fitting
from ziggurat.planning.search.space import ColumnParts, SearchSpace


@dataclass(frozen=True, kw_only=True)
class ExactPlan:
    """The plan that the solver found.

    Args:
        assignments: one a table.
        cost_ms: of the most expensive device.
        bound_ms: no plan costs less.
    """

    assignments: tuple[Assignment, ...]
    cost_ms: float
    bound_ms: float


def exact_plan(space: SearchSpace, *, time_limit_s: float = 60.0) -> ExactPlan:
    """Solve to optimality, or as near as the time allows.

    Args:
        space: with parts on distinct devices and an additive cost model.
        time_limit_s: for the solver.

    Raises:
        ConfigError: the cost model is not additive.
        PlanError: nothing fits.
    """
    check_room(space.problem)
    _check_additive(space)
    columns = _columns(space)
    lower, upper, matrix = _constraints(space, columns)
    num = len(columns) + 1
    least: Any = np.zeros(num)  # scipy's stubs name only numbers here
    most: Any = np.append(np.ones(num - 1), np.inf)
    objective = np.zeros(num)
    objective[-1] = 1.0
    solved = milp(
        objective,
        integrality=np.append(np.ones(num - 1), 0),
        bounds=Bounds(least, most),
        constraints=LinearConstraint(csr_matrix(matrix), lower, upper),
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-4},
    )
    if solved.x is None:
        largest = max(range(space.num_tables), key=lambda table: space.bytes[space.column_kind[table, 0]])
        raise not_fitting(space.problem, largest, held=np.zeros(space.num_devices))
    assignments = _read(space, columns, solved.x)
    cost = float(space.price(assignments)[0].max())
    return ExactPlan(assignments=tuple(assignments), cost_ms=cost, bound_ms=float(solved.mip_dual_bound))


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A variable: the choice of a cut (device None) or one part of it."""

    table: int
    kind: int
    parts: int
    device: int | None = None
    option: int = -1


def _columns(space: SearchSpace) -> list[_Column]:
    found = []
    for table in range(space.num_tables):
        for level in range(int(space.most_levels[table]) + 1):
            kind = int(space.column_kind[table, level])
            parts = 1 << level
            found.append(_Column(table=table, kind=kind, parts=parts))
            devices = np.flatnonzero(space.allowed[table]).tolist()
            found += [_Column(table=table, kind=kind, parts=parts, device=device) for device in devices]
        for option, (_, kind) in enumerate(space.options[table]):
            found.append(_Column(table=table, kind=kind, parts=0, option=option))
    return found


def _constraints(space: SearchSpace, columns: list[_Column]) -> tuple[Any, Any, np.ndarray]:
    """Rows: one a table, one a cut, cost and bytes a device; bytes in units of the mean room."""
    prices = _prices(space)
    unit = max(1.0, float(space.room.mean()))
    cuts = sorted({column.kind for column in columns if column.parts})
    first_cut = space.num_tables
    first_cost = first_cut + len(cuts)
    first_bytes = first_cost + space.num_devices
    matrix = np.zeros((first_bytes + space.num_devices, len(columns) + 1))
    cut_row = {kind: first_cut + index for index, kind in enumerate(cuts)}
    for index, column in enumerate(columns):
        devices = [] if column.device is None else [column.device]
        if column.device is None:
            matrix[column.table, index] = 1.0
            if column.parts:
                matrix[cut_row[column.kind], index] = -column.parts
            else:
                devices = list(space.options[column.table][column.option][0].devices)
        else:
            matrix[cut_row[column.kind], index] = 1.0
        for device in devices:
            matrix[first_cost + device, index] = prices[column.kind]
            matrix[first_bytes + device, index] = space.bytes[column.kind] / unit
    matrix[first_cost:first_bytes, -1] = -1.0
    upper = np.concatenate([np.ones(first_cut), np.zeros(len(cuts) + space.num_devices), space.room / unit])
    lower = np.concatenate([np.ones(first_cut), np.zeros(len(cuts)), np.full(2 * space.num_devices, -np.inf)])
    return lower, upper, matrix


def _read(space: SearchSpace, columns: list[_Column], values: Float[np.ndarray, " N"]) -> list[Assignment]:
    devices: dict[int, list[int]] = {table: [] for table in range(space.num_tables)}
    options: dict[int, Assignment] = {}
    for column, value in zip(columns, values[:-1], strict=True):
        if value > 0.5 and column.device is not None:
            devices[column.table].append(column.device)
        elif value > 0.5 and column.option >= 0:
            options[column.table] = space.options[column.table][column.option][0]
    found = []
    for table in range(space.num_tables):
        mine = tuple(devices[table])
        placement = by_columns(len(mine))
        found.append(options.get(table) or Assignment(placement=placement, devices=mine))
    return found


def _prices(space: SearchSpace) -> Float[np.ndarray, " S"]:
    """Return the cost of each kind alone."""
    states = np.zeros((len(space.encodings), space.num_devices, space.encodings.shape[1]), dtype=np.float32)
    states[:, 0] = space.encodings
    return device_costs(space.cost_model, states)[:, 0].astype(np.float64)


def _check_additive(space: SearchSpace) -> None:
    if space.parts is not ColumnParts.DISTINCT:
        raise PlanError(
            expected="parts on different devices",
            found=f"parts {space.parts.value}",
            where="exact plan",
            ways_out="SearchSpace(…, parts=ColumnParts.DISTINCT)",
        )
    kinds = space.column_kind[:, 0]
    state = np.zeros((1, space.num_devices, space.encodings.shape[1]), dtype=np.float32)
    state[0, 0] = space.encodings[kinds].sum(axis=0)
    together = device_costs(space.cost_model, state)[0]
    alone = _prices(space)[kinds].sum()
    if abs(together[0] - alone) > 1e-3 * alone or np.abs(together[1:]).max(initial=0.0) > 1e-3 * alone:
        raise ConfigError(
            expected="a cost model whose prices add up, and do not depend on other devices",
            found=f"all tables on one device cost {together[0]:.4g} ms, the sum of each alone is {alone:.4g} ms",
            where="exact plan",
            ways_out=("ziggurat.planning.costs.additive.AdditiveCostModel", "strategy annealing takes any cost model"),
        )
