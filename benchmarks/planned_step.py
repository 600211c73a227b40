"""One step of a plan's tables on real ranks, for measuring plans: ids there, lookup, vectors back, exact update.

Each rank reads the *processor time* that the step took from it. On a machine with fewer cores than ranks the wall shows
who waited for a core; processor time shows what each rank, with a core of its own, would be busy with, and the rank
that is busy longest is what a step waits for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ziggurat.config import from_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.agreement import Agreement
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import WireConfig
from ziggurat.parallel.tables.embeddings import Flow, ShardedEmbeddings
from ziggurat.parallel.tables.optimizer import ShardedTableOptimizer
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Plan
from ziggurat.planning.costs.probe_tables import DrawConfig, TableDraw, draw_pool

PARTS = ("ids, lookup, sending", "receiving", "backward", "update")


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Tables of one task: drawn like those of a probe, with other seeds, then given columns.

    Args:
        draw: tables; one pool is one task.
        first_pool: pools from here on are those of the suite.
    """

    draw: DrawConfig
    first_pool: int = 1000

    def tables(self, task: int) -> list[tuple[TableDraw, int]]:
        """The tables of a task with their columns."""
        pool = draw_pool(self.draw, self.first_pool + task)
        dims = np.random.default_rng([self.draw.seed, 3, task]).choice(self.draw.dims, size=len(pool)).tolist()
        return list(zip(pool, dims, strict=True))


def inputs_of(tables: list[tuple[TableDraw, int]]) -> InputSpec:
    """A feature a table."""
    names = [table.profile.name for table, _ in tables]
    single = [name for name, (table, _) in zip(names, tables, strict=True) if table.lengths is None]
    return InputSpec(
        single=tuple(SingleSpec(name=name, table=name) for name in single),
        jagged=tuple(JaggedSpec(name=n, table=n, pooling=Pooling.SUM) for n in names if n not in single),
        tables=tuple(
            TableSpec(name=table.profile.name, num_rows=table.profile.num_rows, embedding_dim=dim)
            for table, dim in tables
        ),
    )


def batch_of(tables: list[tuple[TableDraw, int]], index: int, samples: slice) -> Batch:
    """Some samples of one drawn batch."""
    single = [table.rows[index][samples] for table, _ in tables if table.lengths is None]
    lengths, values = [], []
    for table, _ in tables:
        if table.lengths is not None:
            ends = np.concatenate([[0], np.cumsum(table.lengths[index])])
            lengths.append(table.lengths[index][samples])
            values.append(table.rows[index][ends[samples.start] : ends[samples.stop]])
    size = samples.stop - samples.start
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]) if lengths else np.zeros(1)
    jagged = JaggedRows(
        torch.from_numpy(np.concatenate(values) if values else np.zeros(0, np.int64)),
        torch.from_numpy(offsets.astype(np.int64)),
    )
    nothing = torch.empty(size, 0)
    rows = torch.from_numpy(np.stack(single) if single else np.zeros((0, size), np.int64))
    return Batch(dense=nothing, single=rows, jagged=jagged, labels=nothing, row_ids=torch.arange(size))


class PlannedStep:
    """A plan's tables on this rank, and its step.

    Args:
        tables: of the task.
        plan: where they go.
        topology: the ranks.
    """

    def __init__(self, tables: list[tuple[TableDraw, int]], plan: Plan, topology: Topology) -> None:
        config, traffic = EmbeddingConfig(kernel=KernelChoice.CPP), Traffic(topology)
        self._agreement = Agreement()  # its messages hold ranks together between the parts
        mine = ShardedTables(inputs_of(tables), config, plan=plan, topology=topology, seed=0)
        self._embeddings = ShardedEmbeddings(
            mine, plan=plan, topology=topology, wire=WireConfig(), traffic=traffic, flow=Flow()
        )
        self._optimizer = ShardedTableOptimizer(self._embeddings, topology=topology, traffic=traffic)

    def run(self, batch: Batch) -> tuple[float, ...]:
        """Milliseconds of this rank's processor for each of `PARTS`, which all ranks begin together."""
        embeddings, times = self._embeddings, []
        self._agreement.gather(0)
        start = time.process_time()
        in_flight = embeddings.start(batch)
        times.append(time.process_time() - start)
        self._agreement.gather(0)
        start = time.process_time()
        out = in_flight.wait()
        times.append(time.process_time() - start)
        self._agreement.gather(0)
        start = time.process_time()
        out.backward(out.detach())
        times.append(time.process_time() - start)
        self._agreement.gather(0)
        start = time.process_time()
        self._optimizer.step(1e-3)
        times.append(time.process_time() - start)
        return tuple(1e3 * taken for taken in times)


def measure_plans(rank: int, suite: Any, task: int, plans: list[Any], rounds: int) -> list[list[float]]:
    """On every rank: milliseconds of each plan's parts; of each batch the fewest over the rounds, then their mean."""
    config = from_json(SuiteConfig, suite, where="suite")
    tables, topology = config.tables(task), Topology.create()
    size = config.draw.num_samples // topology.world_size
    mine = slice(rank * size, (rank + 1) * size)
    batches = [batch_of(tables, index, mine) for index in range(config.draw.num_batches)]
    steps = [PlannedStep(tables, from_json(Plan, plan, where="plan"), topology) for plan in plans]
    best = np.full((len(plans), len(batches), len(PARTS)), np.inf)
    for _ in range(1 + rounds):
        for number, step in enumerate(steps):
            for index, batch in enumerate(batches):
                best[number, index] = np.minimum(best[number, index], step.run(batch))
    return best.mean(axis=1).tolist()
