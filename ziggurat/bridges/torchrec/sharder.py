"""TowerEmbeddingSharder: puts towers into `DistributedModelParallel(model, plan=…, sharders=[…])`.

A plan of TorchRec says for each table a type of sharding and ranks. Towers ask three things of it, which TorchRec's
own planner knows nothing of, and which are checked here, on every rank, before anything is exchanged:

    the tables of a tower lie in one tower group         its module needs all their columns
    the type is one of table_wise, column_wise, table_row_wise, the last over all ranks of its group
    the process group is the world that the topology has grouped, in the launcher's order

`tower_plan` makes such a plan. Which group a tower is in is free, and changes no number.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from ziggurat.bridges.torchrec.embedding import TowerEmbedding
from ziggurat.bridges.torchrec.sharded import ShardedTowerEmbedding
from ziggurat.bridges.torchrec.shardings import SUPPORTED, TablesInTowers
from ziggurat.errors import PlanError, TopologyError
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import WireConfig
from ziggurat.parallel.topology import Topology


class TowerEmbeddingSharder(BaseEmbeddingSharder[TowerEmbedding]):
    """The sharder that puts a `TowerEmbedding` into TorchRec's `DistributedModelParallel`.

    Args:
        topology: the ranks; its `tower_size` S divides their number.
        fused_params: of TorchRec's fused kernels, as for its own sharders: optimizer, learning rate, …
        wire: formats of the hops; takes the place of TorchRec's `qcomm_codecs_registry`.

    Attributes:
        traffic: bytes and messages of the hops of all modules that were sharded, by kind of link.

    Raises:
        TopologyError: the topology has ranks in another order than the launcher, which TorchRec cannot follow.
    """

    def __init__(
        self, topology: Topology, *, fused_params: dict[str, Any] | None = None, wire: WireConfig | None = None
    ) -> None:
        super().__init__(fused_params=fused_params)
        _refuse_permuted(topology)
        self.topology = topology
        self.wire = wire or WireConfig()
        self.traffic = Traffic(topology)

    def shard(
        self,
        module: TowerEmbedding,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTowerEmbedding:
        """The parallel form of a module; collective over all ranks.

        Args:
            module: on one device.
            params: how to shard each table; not changed.
            env: the process group.
            device: of this rank.
            module_fqn: the module's name in the model.

        Raises:
            PlanError: the plan does not fit the towers.
            TopologyError: the process group is not what the topology has grouped.
        """
        where = f"plan of {module_fqn or 'TowerEmbedding'}"
        self._check_ranks(env)
        groups = self._groups(module, params, where=where)
        tables = TablesInTowers(
            self.topology,
            module=module.ebc,
            table_name_to_parameter_sharding=copy.deepcopy(dict(params)),
            env=env,
            fused_params=self.fused_params,
            device=device or torch.device("cpu"),
            module_fqn=module_fqn,
        )
        return ShardedTowerEmbedding(
            module, tables=tables, groups=groups, topology=self.topology, wire=self.wire, traffic=self.traffic
        )

    def shardable_parameters(self, module: TowerEmbedding) -> dict[str, nn.Parameter]:
        """The tables by name."""
        return {name.split(".")[0]: weight for name, weight in module.ebc.embedding_bags.named_parameters()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """List the sharding types that a planner may choose from."""
        del compute_device_type
        return [kind.value for kind in SUPPORTED]

    @property
    def module_type(self) -> type[TowerEmbedding]:
        """The type of module that this sharder shards."""
        return TowerEmbedding

    def _check_ranks(self, env: ShardingEnv) -> None:
        world = self.topology.world
        same = env.process_group is world.process_group or (world.size == 1 and env.world_size == 1)
        if isinstance(env, ShardingEnv2D) or not same:
            raise TopologyError(
                expected=f"the default process group of {world.size} ranks, which the topology has grouped",
                found=f"{type(env).__name__} of {env.world_size} ranks",
                where="TowerEmbeddingSharder",
                ways_out=(
                    "DistributedModelParallel(model, plan=…, sharders=[…]) without env",
                    "make the topology after init_process_group: Topology.create(tower_size=S)",
                ),
            )

    def _groups(
        self, module: TowerEmbedding, params: Mapping[str, ParameterSharding], *, where: str
    ) -> tuple[int, ...]:
        """The tower group of each tower."""
        size = self.topology.tower_size
        world_size = self.topology.world_size
        configs = {table.name: table for table in module.ebc.embedding_bag_configs()}
        found: dict[str, int] = {}
        for name, table in configs.items():
            sharding = params.get(name)
            kinds = ", ".join(kind.value for kind in SUPPORTED)
            if sharding is None or ShardingType(sharding.sharding_type) not in SUPPORTED:
                raise _plan_error(f"one of {kinds}", sharding and sharding.sharding_type, f"{where}, table {name!r}")
            ranks = list(sharding.ranks or [])
            group = {rank // size for rank in ranks}
            if not ranks or len(group) != 1 or not all(0 <= rank < world_size for rank in ranks):
                raise _plan_error(f"ranks of one tower group of {size}", f"ranks {ranks}", f"{where}, table {name!r}")
            found[name] = group.pop()
            if ShardingType(sharding.sharding_type) is ShardingType.TABLE_ROW_WISE:
                whole = list(range(found[name] * size, (found[name] + 1) * size))
                if ranks != whole:
                    raise _plan_error(f"table_row_wise over ranks {whole}", f"{ranks}", f"{where}, table {name!r}")
                if table.pooling is PoolingType.MEAN:
                    raise _plan_error(
                        "mean pooling of tables that have all rows on one rank (sums alone can be spread)",
                        "table_row_wise",
                        f"{where}, table {name!r}",
                    )
        for tower, names in enumerate(module.towers.towers):
            groups = {module.tables[name]: found[module.tables[name]] for name in names}
            if len(set(groups.values())) > 1:
                raise _plan_error(
                    f"all tables of tower {tower} in one tower group of {size} ranks",
                    ", ".join(f"{table} in group {group}" for table, group in groups.items()),
                    where,
                )
        return tuple(found[module.tables[names[0]]] for names in module.towers.towers)


def _refuse_permuted(topology: Topology) -> None:
    """TorchRec numbers ranks and devices as the launcher does, in exchanges that are not ours."""
    if topology.order == tuple(range(topology.world_size)):
        return
    raise TopologyError(
        expected="ranks in the launcher's order, host after host: TorchRec's exchanges and plans know no other",
        found=topology.describe(),
        where="topology of TowerEmbeddingSharder and tower_plan",
        ways_out=(
            "number the ranks host after host, as torchrun does (Slurm: --distribution=block)",
            "leave `order` and `hosts` out of Topology.create if ranks are numbered so",
            "train with ziggurat itself: parallelize follows any order",
        ),
    )


def _plan_error(expected: str, found: object, where: str) -> PlanError:
    return PlanError(
        expected=expected,
        found=str(found),
        where=where,
        ways_out=(
            "tower_plan(module, topology) makes a plan that fits; pass it to DistributedModelParallel",
            "TorchRec's planner does not know towers: it may place some of a tower's tables elsewhere",
        ),
    )
