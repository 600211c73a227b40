"""How TorchRec's shardings look up ids for towers: samples in peer order, tower groups of any size.

TorchRec shards the tables of a collection by type of sharding; each type has an exchange of ids, a lookup, and an
exchange of embeddings. Three of its types are kept, and inside them only the first exchange changes:

    table_wise, column_wise     flat all-to-all of ids; ours asks for the samples in peer order (`stagger`), which
                                makes step (c) of the tower transform free, see ziggurat/parallel/towers.py
    table_row_wise              rows of a table over the ranks of a host: peer order already, but "host" is one size
                                for the whole process (LOCAL_WORLD_SIZE); ours takes the tower group

The exchange of embeddings is not TorchRec's: `ShardedTowerEmbedding` replaces it by two hops. What it has to know is
which columns of which features each rank looks up, in the order of its lookup: `columns_by_rank`.

Written against TorchRec 1.8.0, whose interfaces for this are public classes but no promise.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import (
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingInfo,
    group_tables,
)
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding, TwRwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ziggurat.parallel.topology import Topology

SUPPORTED = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_ROW_WISE)


@dataclass(frozen=True)
class LookedUp:
    """Columns that a rank looks up for one feature.

    Args:
        name: of the feature.
        first_column: of the table.
        width: number of columns.
        column: where they begin in what the rank looks up.
    """

    name: str
    first_column: int
    width: int
    column: int


class PeerOrderIds(BaseSparseFeaturesDist):
    """Ids to the ranks that have their tables; what arrives has its samples in peer order.

    Args:
        process_group: all ranks.
        features_per_rank: how many features each rank looks up.
        num_groups: T, tower groups.
    """

    def __init__(self, process_group: ProcessGroup, *, features_per_rank: list[int], num_groups: int) -> None:
        super().__init__()
        self._exchange = KJTAllToAll(pg=process_group, splits=features_per_rank, stagger=num_groups)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """An awaitable of an awaitable of the ids of this rank's features, for the samples of all ranks."""
        return self._exchange(sparse_features)


class TableWiseInTowers(TwPooledEmbeddingSharding):
    """Tables whole on one rank."""

    topology: Topology

    def create_input_dist(self, device: torch.device | None = None) -> PeerOrderIds:
        """The exchange of ids."""
        del device
        return PeerOrderIds(self._pg, features_per_rank=self.features_per_rank(), num_groups=self.topology.num_groups)


class ColumnWiseInTowers(CwPooledEmbeddingSharding):
    """Columns of a table over ranks."""

    topology: Topology

    def create_input_dist(self, device: torch.device | None = None) -> PeerOrderIds:
        """The exchange of ids."""
        del device
        return PeerOrderIds(self._pg, features_per_rank=self.features_per_rank(), num_groups=self.topology.num_groups)


class RowWiseInTowers(TwRwPooledEmbeddingSharding):
    """Rows of a table over all ranks of a tower group.

    Args:
        infos: tables and where they go.
        env: all ranks.
        device: of the tables.
        topology: the tower groups.
    """

    def __init__(
        self, infos: list[EmbeddingShardingInfo], env: ShardingEnv, device: torch.device | None, *, topology: Topology
    ) -> None:
        # Not that of the parent, which would make process groups of the size of LOCAL_WORLD_SIZE.
        EmbeddingSharding.__init__(self, qcomm_codecs_registry=None)
        self._env = env
        self._pg = env.process_group
        self._device = device
        self._is_2D_parallel = False
        self._need_pos = False
        self._has_feature_processor = False
        self._world_size = env.world_size
        self._rank = env.rank
        self._local_size = topology.tower_size
        self._intra_pg = topology.tower.process_group
        self._cross_pg = topology.peers.process_group
        self._grouped_embedding_configs_per_rank = group_tables(self._shard(infos))
        self._grouped_embedding_configs_per_node = self._grouped_embedding_configs_per_rank[:: self._local_size]

    def create_input_dist(self, device: torch.device | None = None) -> TwRwSparseFeaturesDist:
        """The exchange of ids, each to the rank of the tower group that has its row."""
        return TwRwSparseFeaturesDist(
            pg=self._pg,
            local_size=self._local_size,
            features_per_rank=self._features_per_rank(self._grouped_embedding_configs_per_rank),
            feature_hash_sizes=self._get_feature_hash_sizes(),
            device=device if device is not None else self._device,
        )


class TablesInTowers(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection with these shardings; its exchange of embeddings is not used.

    Args:
        topology: the tower groups.
        arguments: of `ShardedEmbeddingBagCollection`.
    """

    def __init__(self, topology: Topology, **arguments: Any) -> None:
        object.__setattr__(self, "_topology", topology)  # the parent's __init__ makes the shardings
        super().__init__(**arguments)

    def create_embedding_bag_sharding(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: object = None,
    ) -> EmbeddingSharding:
        """The sharding of all tables of one type."""
        del qcomm_codecs_registry
        topology: Topology = self._topology
        kind = ShardingType(sharding_infos[0].param_sharding.sharding_type)
        if kind is ShardingType.TABLE_ROW_WISE:
            return RowWiseInTowers(sharding_infos, env, device, topology=topology)
        if kind is ShardingType.TABLE_WISE:
            sharding = TableWiseInTowers(sharding_infos, env, device)
        else:
            assert kind is ShardingType.COLUMN_WISE, kind
            sharding = ColumnWiseInTowers(sharding_infos, env, device, permute_embeddings=permute_embeddings)
        sharding.topology = topology
        return sharding

    def columns_by_rank(self) -> list[list[LookedUp]]:
        """List the columns that every rank looks up, in the order of its lookups side by side."""
        found: list[list[LookedUp]] = []
        for rank in range(self._env.world_size):
            column = 0
            mine = []
            for sharding in self._embedding_shardings:
                for group in sharding._grouped_embedding_configs_per_rank[rank]:
                    for table in group.embedding_tables:
                        first = table.local_metadata.shard_offsets[1] if table.local_metadata is not None else 0
                        for name in table.embedding_names:
                            mine.append(LookedUp(name, first, table.local_cols, column))
                            column += table.local_cols
            found.append(mine)
        return found
