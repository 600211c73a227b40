"""What the reports say of a run on many ranks: before it, who holds what and how it travels; after it, what travelled.

Nothing here is estimated: placements are those that run, bytes and messages were counted where they were handed over.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ziggurat.parallel.agreement import Agreement
from ziggurat.parallel.context.choice import Passing
from ziggurat.parallel.dense import DenseParallelism, route_line
from ziggurat.parallel.parallelize import Parallel
from ziggurat.parallel.process_groups import copy_engines_line
from ziggurat.parallel.topology import Axis, Topology

_DENSE = {
    DenseParallelism.DDP: "copied on every rank, gradients all-reduced in buckets during the backward pass",
    DenseParallelism.FSDP: "weights, gradients and optimizer state in parts, one a rank",
    DenseParallelism.HSDP: "in parts inside a host, copied across hosts",
}


def rank_sections(parallel: Parallel, *, overlaps: list[str], compute: torch.dtype) -> dict[str, dict[str, str]]:
    """Sections of the start-up report: ranks, links, overlap, and the plan.

    Args:
        parallel: what `parallelize` returned.
        overlaps: what travels while something is computed.
        compute: what the dense network and tower modules compute in.
    """
    spread = parallel.spread
    topology = parallel.topology
    config = parallel.config
    lines = {
        "ranks": topology.describe(),
        "ranks of one host": _host_link(topology),
        **_context(topology, config.passing),
        "dense network": f"{config.dense.value}: {_DENSE[config.dense]}; reduced as {config.reduction.value}",
        **route_line(config.reduction_route, how=config.dense, topology=topology),
    }
    towers = parallel.fields.towers
    if towers is not None:
        lines["wire in a tower group"] = spread.hop.describe(torch.float32)
        lines["wire between towers"] = towers.hop.describe(towers.computed_dtype(compute))
    else:
        lines["wire in a tower group"] = "not used: a flat model has one hop"
        lines["wire between towers"] = spread.hop.describe(torch.float32)
    lines |= dict(f"overlap, {line}".split(": ", 1) for line in overlaps)
    if topology.world.process_group is not None:
        lines["hops by copy engines"] = copy_engines_line()
    plan: dict[str, str] = {}
    for name, shards in spread.tables.shards.items():
        mib = 4 * shards[0].table_rows * shards[0].table_columns / 2**20
        ranks = ", ".join(str(shard.rank) for shard in shards)
        plan[name] = f"{shards[0].placement}, rank {ranks}, {mib:,.2f} MiB"
    return {"Ranks": lines, "Plan": plan}


def _context(topology: Topology, passing: Passing) -> dict[str, str]:
    """Say which ranks divide histories, if any do."""
    size = topology.context.size
    if size == 1:
        return {}
    ways = {Passing.AUTO: "keys or queries, whichever is faster by measured rates", Passing.KEYS: "keys and values"}
    return {"histories": f"divided between {size} ranks; between them travel {ways.get(passing, 'queries')}"}


def _host_link(topology: Topology) -> str:
    """Say how ranks of one host exchange embeddings and gradients."""
    groups = [topology.axes[axis] for axis in (Axis.WORLD, Axis.TOWER)]
    if any(group.memory is not None for group in groups):
        return "through shared memory"
    reason = next((group.why_no_memory for group in groups if group.why_no_memory), "")
    return f"through torch.distributed, slower: {reason}" if reason else "through torch.distributed"


def traffic_report(parallel: Parallel, agreement: Agreement) -> dict[str, object]:
    """Report what all ranks together have sent in training steps since the start of this process; collective.

    Returns:
        `steps`, and for each purpose and kind of link the bytes and messages in all and a step.
    """
    totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for rows in agreement.gather(parallel.traffic.report()):
        for row in rows:
            total = totals[row["purpose"], row["link"]]
            total[0] += row["bytes"]
            total[1] += row["messages"]
    steps = parallel.traffic.num_steps
    return {
        "steps": steps,
        "ranks": parallel.topology.world_size,
        "rows": [
            {
                "purpose": purpose,
                "link": link,
                "bytes": num_bytes,
                "messages": num_messages,
                "bytes_per_step": round(num_bytes / max(steps, 1)),
                "messages_per_step": round(num_messages / max(steps, 1), 1),
            }
            for (purpose, link), (num_bytes, num_messages) in sorted(totals.items())
        ],
    }
