"""anneal: simulated annealing over plans, many candidates at a time.

A change that makes a plan worse by x ms is accepted with probability exp(−x / T), and T falls from some per cent of the
cost to a few hundredths of one. C plans walk side by side (`chains.py`); each is offered a batch of random changes, and
takes the *first* that passes, so that a batch is worth about as much as trying them one after the other:

    offers  ▢ ▢ ▢ ▢ ▢ ▢ ▢ ▢      estimate all  ──►  first that passes  ──►  price it exactly  ──►  accept?
                                 max over devices                            same threshold

Only devices that a change touches are looked at again (`CostModel.local`), and the exchange, which sees all devices, is
estimated where the cost model can (`EstimatingCostModel`). What does not fit costs a fine a byte; the best plan that
fits is kept. From time to time the worst plans become copies of the best (population annealing). The last tenth accepts
no loss.

References: Kirkpatrick, Gelatt, Vecchi, *Optimization by simulated annealing* (1983); delayed acceptance: Christen
and Fox (2005). Cost: measured in docs/guides/planning.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float, Float32, Int

from ziggurat.planning.cost_model import EstimatingCostModel
from ziggurat.planning.problem import Assignment
from ziggurat.planning.search.chains import Candidates, Chains
from ziggurat.planning.search.space import ColumnParts, SearchSpace, Shard
from ziggurat.typed import checked

_SMALL = 1e-6


@dataclass(frozen=True, kw_only=True)
@checked
class AnnealingConfig:
    """Settings of simulated annealing. The defaults were chosen on other tasks than those of the published benchmark.

    Args:
        num_chains: C, plans side by side; 0: by the number of devices.
        num_offers: candidates that are priced together, over all chains.
        hot: temperature at the start, as a share of the cost · (devices / tables)²: with few tables a single move
            changes much.
        cold: temperature at the end, as a share of the plan's cost.
        focus: share of changes that start on the most expensive device.
        fine: cost of a missing share of a device's memory, as a multiple of the plan's cost; four times as much at the
            end as at the start.
        num_exchanges: how often the worst chains become copies of the best.
        spread_weight: weight of the mean over devices of a steep power of their cost, which tells plans with the same
            maximum apart.
    """

    num_chains: int = 0
    num_offers: int = 576
    hot: float = 0.6
    cold: float = 0.0004
    focus: float = 0.3
    fine: float = 1.0
    num_exchanges: int = 12
    spread_weight: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits after which a search stops.

    Args:
        seconds: of `clock`; ignored with a number of evaluations.
        evaluations: candidates; 0: by time. A search with a fixed number always finds the same plan.
        clock: what seconds are read from.
        began: what the clock showed at the start; None: when annealing begins.
    """

    seconds: float = 1.0
    evaluations: int = 0
    clock: Callable[[], float] = time.perf_counter
    began: float | None = None


@dataclass(kw_only=True)
class Best:
    """The best plan so far, and how it was found.

    Args:
        cost_ms: inf if nothing fits.
        assignments: None where parts may be anywhere.
        shards: the same as parts, for tables without option.
        overflow_bytes: least that did not fit, where nothing fits.
        history: (seconds, ms) of every improvement.
    """

    cost_ms: float = np.inf
    assignments: list[Assignment] | None = None
    shards: tuple[Shard, ...] = ()
    overflow_bytes: float = np.inf
    evaluations: int = 0
    history: list[tuple[float, float]] = field(default_factory=list)


class Anneal(Protocol):
    """The signature of an annealer: plans to start from, to the best plan found and what annealed, in words."""

    def __call__(
        self, space: SearchSpace, starts: list[list[Assignment]], *, seed: int, budget: Budget
    ) -> tuple[Best, str]:
        """Anneal until the budget is spent; the cost is inf if nothing fits."""
        ...


def anneal_in_numpy(
    space: SearchSpace,
    starts: list[list[Assignment]],
    *,
    seed: int,
    budget: Budget,
    config: AnnealingConfig | None = None,
) -> tuple[Best, str]:
    """Our own annealer (`Annealer`), for every cost model and every placement."""
    annealer = Annealer(space, starts, config=config or AnnealingConfig(), seed=seed)
    return annealer.best_plan(annealer.run(budget)), "numpy"


class Annealer:
    """Chains with their states, prices and temperature.

    Args:
        space: the problem.
        starts: plans to start from, reused in turn if there are fewer than chains.
        config: how to anneal.
        seed: of all randomness.
    """

    def __init__(
        self, space: SearchSpace, starts: list[list[Assignment]], *, config: AnnealingConfig, seed: int
    ) -> None:
        self.space = space
        self.config = config
        num = config.num_chains or (24 if space.num_devices <= 16 else 2)
        self.rng = np.random.default_rng(seed)
        self.chains = Chains(space, [starts[i % len(starts)] for i in range(num)], rng=self.rng)
        # A row of zeros behind the last kind: the index −1, no kind, adds nothing.
        self._encodings = np.vstack([space.encodings, np.zeros_like(space.encodings[:1])])
        self._bytes = np.append(space.bytes, 0.0)
        cost_model = space.cost_model
        self._estimate = cost_model.estimate if isinstance(cost_model, EstimatingCostModel) else None
        self.states = np.zeros((num, space.num_devices, space.encodings.shape[1]), dtype=np.float32)
        self.held = np.zeros((num, space.num_devices))
        self.refresh()
        self.scale = float(np.median(self.device_ms.max(axis=1)))
        self._severity = 1.0
        self._mean_room = max(1.0, float(space.room.mean()))
        self._fine = self._fine_of(space.overflow(self.held))

    def refresh(self) -> None:
        """Sum all states anew: differences of float32 numbers drift."""
        for chain in range(len(self.states)):
            self.states[chain], self.held[chain] = self.space.sum_kinds(*self.chains.kinds(chain))
        num, devices, width = self.states.shape
        local = self.space.cost_model.local(self.states.reshape(num * devices, width))
        self.local = np.ascontiguousarray(local.reshape(num, devices, -1))
        self.device_ms = self.space.cost_model.exchange(self.local)
        self.guess = self._estimate(self.local) if self._estimate else self._objective(self.device_ms)

    def run(self, budget: Budget) -> Best:
        """Anneal until the budget is spent."""
        best = Best()
        step = 0
        exchanges = 1
        began = budget.clock() if budget.began is None else budget.began
        hot = self.config.hot * min(1.0, self.space.num_devices / self.space.num_tables) ** 2
        for chain in range(len(self.states)):
            self._record(best, chain, 0.0)
        while True:
            spent = budget.clock() - began
            done = best.evaluations / budget.evaluations if budget.evaluations else spent / max(budget.seconds, 1e-9)
            if done >= 1.0:
                return best
            config = self.config
            share = min(1.0, done / 0.9)
            # The last tenth accepts no loss.
            warmth = hot * min(1.0, config.cold / hot) ** share if done < 0.9 else 1e-9
            accepted = self.step(warmth * self.scale)
            best.evaluations += max(1, config.num_offers // len(self.states)) * len(self.states)
            for chain in accepted:
                self._record(best, chain, spent)
            step += 1
            if step % 200 == 0:
                self.refresh()
                self._fine = self._fine_of(self.space.overflow(self.held))
            if done * (config.num_exchanges + 1) >= exchanges:
                self._copy_the_best()
                self._severity = 1.0 + 3.0 * done
                self._fine = self._fine_of(self.space.overflow(self.held))
                exchanges += 1

    def step(self, temperature: float) -> list[int]:
        """Offer every chain a batch of changes; returns the chains that took one."""
        num = max(1, self.config.num_offers // len(self.states))
        found = self.chains.propose(num, worst=self.device_ms.argmax(axis=1), focus=self.config.focus)
        chain = found.chain
        delta = self._encodings[found.plus] - self._encodings[found.minus]
        row_chain = chain[found.row]
        local = self.space.cost_model.local(self.states[row_chain, found.device] + delta)
        offers = self.local[chain]
        offers[found.row, found.device] = local
        fine = self._fines(found)
        guess = self._estimate(offers) if self._estimate else self._objective(self.space.cost_model.exchange(offers))
        # A loss of x passes with probability exp(−x / T): the draw comes before x, and judges the guess and the exact
        # price.
        threshold = -temperature * np.log(self.rng.random(len(chain)))
        gain = guess - self.guess[chain] + fine - self._fine[chain]
        passes = (found.valid & (gain < threshold)).reshape(len(self.states), num)
        # The first that passes, not the cheapest: a batch is then worth about as much as single offers one after the
        # other.
        first = passes.argmax(axis=1) + np.arange(len(self.states)) * num
        chosen = first[passes.any(axis=1)]
        if not len(chosen):
            return []
        device_ms = self.space.cost_model.exchange(offers[chosen])
        exact = self._objective(device_ms) - self._objective(self.device_ms[chain[chosen]])
        good = exact + fine[chosen] - self._fine[chain[chosen]] < threshold[chosen]
        chosen = chosen[good]
        device_ms = device_ms[good]
        self._take(found, chosen, offers=offers, delta=delta)
        mine = chain[chosen]
        self.device_ms[mine] = device_ms
        self.guess[mine] = guess[chosen]
        self._fine[mine] = fine[chosen]
        return mine.tolist()

    def _take(self, found: Candidates, chosen: Int[np.ndarray, " A"], *, offers: np.ndarray, delta: np.ndarray) -> None:
        wanted = np.zeros(len(found.chain), dtype=bool)
        wanted[chosen] = True
        rows = np.flatnonzero(wanted[found.row])
        where = found.chain[found.row[rows]], found.device[rows]
        self.states[where] += delta[rows]
        self.held[where] += self._bytes[found.plus[rows]] - self._bytes[found.minus[rows]]
        self.local[found.chain[chosen]] = offers[chosen]
        for index in chosen.tolist():
            self.chains.apply(found, index)

    def _fines(self, found: Candidates) -> Float[np.ndarray, " N"]:
        """Compute the cost for each candidate of the bytes that do not fit."""
        chain = found.chain[found.row]
        before = self.held[chain, found.device]
        after = before + self._bytes[found.plus] - self._bytes[found.minus]
        room = self.space.room[found.device]
        over = np.maximum(after - room, 0.0) - np.maximum(before - room, 0.0)
        changed = np.bincount(found.row, weights=over, minlength=len(found.chain))
        return self._fine_of(self.space.overflow(self.held)[found.chain] + changed)

    def _fine_of(self, overflow: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        missing = overflow / self._mean_room
        # 0.01: the last bytes that do not fit must still cost something.
        return self.scale * self.config.fine * self._severity * np.where(overflow > _SMALL, missing + 0.01, 0.0)

    def _objective(self, device_ms: Float32[np.ndarray, "N P"]) -> Float32[np.ndarray, " N"]:
        most = device_ms.max(axis=1)
        weight = self.config.spread_weight
        if not weight:
            return most
        return most * (1.0 + weight * ((device_ms / most[:, None]) ** 16).mean(axis=1))

    def _record(self, best: Best, chain: int, spent: float) -> None:
        over = float(self.space.overflow(self.held[chain]))
        if over > _SMALL:
            best.overflow_bytes = min(best.overflow_bytes, over)
            return
        cost = float(self.device_ms[chain].max())
        if cost >= best.cost_ms - _SMALL:
            return
        best.cost_ms = cost
        best.overflow_bytes = 0.0
        best.history.append((spent, cost))
        self._saved = self.chains.snapshot(chain)

    def best_plan(self, best: Best) -> Best:
        """Fill in the plan that `run` found best."""
        if np.isfinite(best.cost_ms):
            self.chains.restore(0, self._saved)
            if self.space.parts is ColumnParts.DISTINCT:
                best.assignments = self.chains.assignments(0)
            best.shards = shards_of(self.chains, 0)
        return best

    def _copy_the_best(self) -> None:
        cost = self.device_ms.max(axis=1) + self._fine
        order = np.argsort(cost, kind="stable")
        num = len(order) // 4
        for source, target in zip(order[:num].tolist(), order[len(order) - num :].tolist(), strict=True):
            self.chains.copy(source=source, target=target)
            for array in (self.states, self.held, self.local, self.device_ms, self.guess, self._fine):
                array[target] = array[source]


def shards_of(chains: Chains, chain: int) -> tuple[Shard, ...]:
    """One plan as parts; options with fixed devices are left out."""
    used = np.flatnonzero(chains.device[chain] >= 0)
    return tuple(
        Shard(table=int(chains.slot_table[slot]), level=int(level), device=int(device))
        for slot, level, device in zip(used, chains.level[chain, used], chains.device[chain, used], strict=True)
    )
