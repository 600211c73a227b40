"""compiled: annealing as compiled code, for cost models whose prices are small networks (`NetworkCostModel`).

    search(problem, cost_model, config=SearchConfig(anneal=compiled))

It serves the published benchmark, whose cost model has this form; plans of users are priced by formulas or by set
models with rows on several devices, which the readable annealing searches.

The reference (`ziggurat/planning/search/annealing.py`) offers hundreds of changes to many plans at once, because
numpy pays for every call. The kernel (`plan_chain.cpp`) offers one change to one plan, and a changed plan is what the
next one sees:

    limit = cost now − T · log u       drawn before anything is priced
    change ─► bytes ─► local network of the changed devices ─► exchange, remembered ─► exchange, exactly ─► take it?
                    ✗ too slow even with the                 ✗ too slow by more than
                      least exchange seen so far               its usual error

so most candidates cost a small part of a price. The rules of plans and the fine for what does not fit are those of the
reference; what differs is that chains run one after the other, and that two parts of a table on one device may be put
together in place where parts may be anywhere. With a number of evaluations the same machine always finds the same plan.

`why_not` says what keeps a search from using it: a cost model without networks, placements with fixed devices
(row-wise, copies), numbers of devices that do not form groups, or no compiler.

Cost: measured in docs/guides/planning.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from benchmarks.compiled_annealing.plan_chain import (
    ChainNetworks,
    ChainProblem,
    ChainSettings,
    ChainSlots,
    anneal_chain,
    why_no_chain,
)
from ziggurat.planning.cost_model import CostModel
from ziggurat.planning.problem import Assignment
from ziggurat.planning.search.annealing import Best, Budget, anneal_in_numpy, shards_of
from ziggurat.planning.search.chains import Chains
from ziggurat.planning.search.space import ColumnParts, SearchSpace


@dataclass(frozen=True, kw_only=True)
class NetworkForm:
    """Prices as dense layers with ReLU between them, which a compiled search can evaluate by itself.

        local ms     = layers(relu(state[:W] + bias))              of each device
        sums         = state[sum_place], rounded                   of each device
        start        = local ms + together(sums of the group)
        device's ms  = start + apart(sums of the group, start − first start of the group)

    A group is the whole plan, or else G neighbours in the order of their sums. The cost is that of the most expensive
    device, as always. Layers are pairs of (in, out) weights and (out,) biases, in float32.

    Args:
        bias: (W,) of the first numbers of a state.
        local: from (W,) to (1,) ms.
        sum_place: place of the sum in the state.
        together: from (G,) to (G,) ms.
        apart: from (2 G,) to (G,) ms.
    """

    bias: Float32[np.ndarray, " W"]
    local: Sequence[tuple[np.ndarray, np.ndarray]]
    sum_place: int
    together: Sequence[tuple[np.ndarray, np.ndarray]]
    apart: Sequence[tuple[np.ndarray, np.ndarray]]

    @property
    def group(self) -> int:
        """G, devices that the exchange networks see."""
        return int(self.together[-1][1].size)


@runtime_checkable
class NetworkCostModel(CostModel, Protocol):
    """A cost model that consists of small networks, and hands them out: the search then runs as compiled code."""

    def networks(self) -> NetworkForm:
        """The networks, which give the same prices as `local` and `exchange`."""
        ...


@dataclass(frozen=True, kw_only=True)
class NetworkAnnealingConfig:
    """How the kernel anneals. The defaults were chosen on drawn tasks, not on those of the published benchmark.

    Args:
        num_chains: annealings one after the other, which share the budget.
        hot: temperature at the start, as a share of the cost · (devices / tables)².
        cold: temperature at the end, as a share of the cost.
        focus: share of changes that start on the most expensive device.
        fine: cost of a missing share of a device's memory, as a multiple of the plan's cost.
        slack: a candidate whose estimate misses its limit by less than so many times the usual error is priced.
    """

    num_chains: int = 6
    hot: float = 0.6
    cold: float = 0.0004
    focus: float = 0.6
    fine: float = 1.0
    slack: float = 1.0


def why_not(space: SearchSpace) -> str:
    """Why the kernel cannot search this space; "" if it can. Builds the kernel if nothing else is in the way."""
    if not isinstance(space.cost_model, NetworkCostModel):
        return "the cost model has no networks"
    if any(space.options):
        return "placements with fixed devices"
    group = space.cost_model.networks().group
    if space.num_devices % group:
        return f"{space.num_devices} devices are no groups of {group}"
    return why_no_chain()


def compiled(
    space: SearchSpace,
    starts: list[list[Assignment]],
    *,
    seed: int,
    budget: Budget,
    config: NetworkAnnealingConfig | None = None,
) -> tuple[Best, str]:
    """Anneal as compiled code where that is possible, else as the reference does; see `Anneal`."""
    reason = why_not(space)
    if reason:
        best, _ = anneal_in_numpy(space, starts, seed=seed, budget=budget)
        return best, f"numpy: {reason}"
    return anneal_networks(space, starts, config=config or NetworkAnnealingConfig(), seed=seed, budget=budget), "C++"


def anneal_networks(
    space: SearchSpace, starts: list[list[Assignment]], *, config: NetworkAnnealingConfig, seed: int, budget: Budget
) -> Best:
    """Anneal until the budget is spent; `why_not(space)` must be "".

    Args:
        space: the problem.
        starts: plans to start from, used in turn.
        config: how to anneal.
        seed: of all randomness.
        budget: when to stop.

    Returns:
        The best plan; its cost is inf if none fits.
    """
    assert isinstance(space.cost_model, NetworkCostModel)
    chains = Chains(space, starts, rng=np.random.default_rng(seed))
    began = budget.clock() if budget.began is None else budget.began
    settings = ChainSettings(
        seed=seed,
        num_chains=config.num_chains,
        evaluations=budget.evaluations,
        spent=lambda: (budget.clock() - began) / max(budget.seconds, 1e-9),
        hot=config.hot,
        cold=config.cold,
        focus=config.focus,
        fine=config.fine,
        slack=config.slack,
    )
    given = ChainSlots(device=chains.device, level=chains.level, count=chains.count)
    found = anneal_chain(chain_networks(space.cost_model.networks()), _arrays(space), starts=given, settings=settings)
    best = Best(cost_ms=found.cost_ms, overflow_bytes=found.overflow_bytes, evaluations=found.num_evaluations)
    seconds = budget.clock() - began if budget.evaluations else budget.seconds
    best.history = [(share * seconds, cost) for share, cost in found.history]
    if np.isfinite(found.cost_ms):
        chains.device[0], chains.level[0], chains.count[0] = found.slots.device, found.slots.level, found.slots.count
        best.shards = shards_of(chains, 0)
        if space.parts is ColumnParts.DISTINCT:
            best.assignments = chains.assignments(0)
    return best


def chain_networks(form: NetworkForm) -> ChainNetworks:
    """The networks as the kernel takes them."""
    return ChainNetworks(
        bias=form.bias, local=form.local, sum_place=form.sum_place, together=form.together, apart=form.apart
    )


def _arrays(space: SearchSpace) -> ChainProblem:
    return ChainProblem(
        encodings=space.encodings,
        bytes=space.bytes,
        column_kind=space.column_kind,
        most_levels=space.most_levels,
        allowed=space.allowed,
        room=space.room,
        is_distinct=space.parts is ColumnParts.DISTINCT,
    )
