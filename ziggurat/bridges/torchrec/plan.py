"""tower_plan: a sharding plan in TorchRec's form that keeps the tables of every tower in its tower group.

    ShardingPlan({"embeddings": tower_plan(model.embeddings, topology)})

By default `place_tables` balances whole tables over the ranks of their groups. A `Plan` of your own (by hand, from a
JSON file) is translated: table_wise and column_wise as they are, row_wise to TorchRec's table_row_wise, which is over
all ranks of a tower group.

TorchRec's own planner may be used instead with a partitioner that pins tables; whatever the plan, the sharder checks
it.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from torch.distributed.remote_device import _remote_device  # the type of TorchRec's placements
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import column_wise, placement, table_row_wise, table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from ziggurat.bridges.torchrec.embedding import TowerEmbedding
from ziggurat.bridges.torchrec.sharder import TowerEmbeddingSharder
from ziggurat.errors import PlanError
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.planning.placement import place_tables


def tower_plan(
    module: TowerEmbedding,
    topology: Topology,
    *,
    plan: Plan | None = None,
    kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
    device_type: str = "cpu",
) -> EmbeddingModuleShardingPlan:
    """The plan of one module; the same on every rank, without communication.

    Args:
        module: on one device.
        topology: the ranks.
        plan: placements of the tables; None: balanced.
        kernel: of the lookups. With DENSE, which TorchRec's generators of plans take unless told otherwise, your
            own optimizer has to train the tables.
        device_type: "cpu" or "cuda".

    Raises:
        PlanError: the towers do not fit the ranks, or `plan` does not fit the module.
        TopologyError: the topology has ranks in another order than the launcher.
    """
    sharder = TowerEmbeddingSharder(topology)
    if plan is None:
        plan = place_tables(
            module.inputs,
            dim=module.dim,
            world_size=topology.world_size,
            towers=module.towers,
            tower_size=topology.tower_size,
        )
    names = [table.name for table in module.inputs.tables]
    plan.check(tables=module.tables, world_size=topology.world_size, names=names)
    weights = sharder.shardable_parameters(module)
    placements = {entry.table: entry for entry in plan.tables}
    shardings = EmbeddingModuleShardingPlan()
    for name in names:
        entry = placements[name]
        local_size = topology.ranks_per_host
        match entry.placement.torchrec:
            case "table_wise":
                generate = table_wise(rank=entry.ranks[0])
            case "column_wise":
                _check_columns(entry, weights[name].shape[1])
                generate = column_wise(ranks=list(entry.ranks))
            case "table_row_wise":
                generate = table_row_wise(host_index=_group(entry, topology))
                local_size = topology.tower_size
            case _:
                raise PlanError(
                    expected=", ".join(each.name for each in Placement if each.torchrec),
                    found=entry.placement.name,
                    where=f"plan, table {name!r}",
                    ways_out="place it table_wise: TorchRec has no sharding that does the same",
                )
        sharding = generate(weights[name], local_size, topology.world_size, device_type, sharder)
        sharding.compute_kernel = kernel.value
        for rank, shard in zip(entry.ranks, sharding.sharding_spec.shards, strict=True):
            # Where a tower is not a host, TorchRec would number the devices of a host wrongly.
            shard.placement = _remote_device(placement(device_type, rank, topology.ranks_per_host))
        shardings[name] = sharding
    return shardings


def _group(entry: TablePlacement, topology: Topology) -> int:
    size = topology.tower_size
    group = entry.ranks[0] // size
    if entry.ranks != tuple(range(group * size, (group + 1) * size)):
        raise PlanError(
            expected=f"row_wise over all {size} ranks of a tower group, in order",
            found=f"ranks {list(entry.ranks)}",
            where=f"plan, table {entry.table!r}",
            ways_out=("give all ranks of the group", "make the table table_wise or column_wise"),
        )
    return group


def _check_columns(entry: TablePlacement, num_columns: int) -> None:
    width, rest = divmod(num_columns, len(entry.ranks))
    if rest or width % 4:
        raise PlanError(
            expected=f"column_wise over ranks that take a multiple of 4 of the {num_columns} columns each (FBGEMM)",
            found=f"{len(entry.ranks)} ranks",
            where=f"plan, table {entry.table!r}",
            ways_out=("fewer ranks", "make the table table_wise or row_wise"),
        )
