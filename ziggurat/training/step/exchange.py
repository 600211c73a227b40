"""StepExchange: the prioritised exchange as a training step sees it: chosen, measured, and told about.

What is *exposed* is the time that this rank waits for messages of embeddings with nothing else to do: sizes, ids,
values and gradients, in either exchange. Waiting for a rank that computes longer counts too; it looks the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ziggurat.parallel.exchange.collectives import start_sum
from ziggurat.parallel.parallelize import Parallel
from ziggurat.parallel.prioritised.choice import ExchangeChoice
from ziggurat.parallel.prioritised.exchange import CellCounts, PrioritisedExchange
from ziggurat.parallel.process_groups import communication_device


class StepExchange:
    """Turns the prioritised exchange on and off from step to step, and keeps count.

    Args:
        exchange: of the model.
        parallel: the ranks.
        clips: whether the step needs the norm of all gradients before it updates anything.
    """

    def __init__(self, exchange: PrioritisedExchange, parallel: Parallel, *, clips: bool) -> None:
        self._exchange = exchange
        self._parallel = parallel
        self._choice = ExchangeChoice(parallel.config.exchange, add_up=self._add_up)
        exchange.is_on = self._choice.is_on
        # A norm of all gradients has to be known before the first update: then none may come later.
        exchange.defers = not clips
        self._clips = clips
        self._last = (0, 0.0)
        self._steps = 0
        self._steps_ahead = 0

    @staticmethod
    def of(parallel: Parallel | None, *, clips: bool) -> StepExchange | None:
        """The exchange of ranks that look ahead; None for others."""
        if parallel is None or parallel.prioritised is None:
            return None
        return StepExchange(parallel.prioritised, parallel, clips=clips)

    def count(self, seconds: float) -> None:
        """Hear how long a step took; chooses for the next one. Collective."""
        self._steps += 1
        self._steps_ahead += self._exchange.is_on
        self._choice.count(seconds)
        self._exchange.is_on = self._choice.is_on

    def lines(self) -> dict[str, str]:
        """Return the lines of the start-up report."""
        found = {"exchange": self._parallel.config.exchange.value}
        if self._clips:
            found["exchange, gradients"] = "in one round: clip_norm needs all of them before the update"
        return found

    def since_last(self) -> dict[str, object]:
        """Milliseconds a step that this rank waited for embeddings, and the share of cells that collided."""
        traffic = self._parallel.traffic
        steps = traffic.num_steps
        waited = traffic.waited_s
        before = self._last
        self._last = (steps, waited)
        counts = self._exchange.counts
        self._exchange.counts = CellCounts()
        ahead = self._steps_ahead
        self._steps_ahead = 0
        made = self._steps
        self._steps = 0
        if steps <= before[0]:
            return {}
        found = {
            "exposed_ms": round(1e3 * (waited - before[1]) / (steps - before[0]), 3),
            "prioritised_share": round(ahead / max(made, 1), 4),
            "exchange": self._choice.line or "measuring both",
        }
        if counts.cells:
            found["collisions"] = round(counts.waited / counts.cells, 6)
        return found

    def _add_up(self, numbers: Sequence[float]) -> list[float]:
        world = self._parallel.topology.world
        sums = torch.tensor(numbers, dtype=torch.float64, device=communication_device(world.process_group))
        return start_sum(sums, group=world, purpose="choice of the exchange").wait().tolist()
