"""Whether the parts of tables that ranks hold fit the memory of their machines, before any of it is taken.

Ranks of one machine share its memory, so what they need is added up: each rank tells its machine, what its parts need
and what is free, and every rank compares. A rank on a GPU has that memory to itself. All ranks raise the same error.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.embeddings.room import TableSize, TableUse, bytes_of, no_room
from ziggurat.embeddings.storage import MakeStorage, MemoryStorage, cache_of, format_of
from ziggurat.files.boot import boot_id
from ziggurat.ops.machine.memory import Memory, memory_of, size_text
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.tables.shards import RankShare
from ziggurat.parallel.topology import Topology


def check_room_of_ranks(
    shares: Sequence[RankShare],
    *,
    config: EmbeddingConfig,
    topology: Topology,
    device: torch.device,
    make_storage: MakeStorage = MemoryStorage,
) -> None:
    """Refuse parts of tables that a machine's memory does not hold; collective.

    Args:
        shares: of every rank, by place.
        config: update rule.
        topology: the ranks.
        device: of this rank.
        make_storage: makes what holds the rows, and says in how many bytes.

    Raises:
        ConfigError: on every rank; names the machine's ranks and the largest parts.
    """
    if device.type == "meta":
        return
    memory = memory_of(device)
    sizes = [sizes_of(share, config, make_storage=make_storage) for share in shares]
    need = bytes_of(sizes[topology.rank].values(), use=TableUse.TRAINING)
    told = [_memory_id(device), topology.rank, need, memory.free_bytes, memory.total_bytes]
    rows = _gathered(told)
    for machine in dict.fromkeys(row[0] for row in rows):
        here = [(rank, row) for rank, row in enumerate(rows) if row[0] == machine]
        free = min(row[3] for _, row in here)
        total = min(row[4] for _, row in here)
        all_need = sum(row[2] for _, row in here)
        if all_need <= free:
            continue
        worst, row = max(here, key=lambda each: each[1][2])
        others = f", and {size_text(all_need - row[2])} on the other ranks of that machine" if len(here) > 1 else ""
        ranks = ", ".join(str(rank) for rank, _ in here[:8]) + (", …" if len(here) > 8 else "")
        raise no_room(
            sizes[row[1]],
            use=TableUse.TRAINING,
            memory=Memory(total_bytes=total, free_bytes=free, owner=f"memory of {_plural(here)} {ranks}"),
            where=f"parts of tables on rank {worst}, before memory is taken for them",
            shared=others,
        )


def sizes_of(
    share: RankShare, config: EmbeddingConfig, *, make_storage: MakeStorage = MemoryStorage
) -> dict[str, TableSize]:
    """Rows and columns that a rank holds in memory, with the padding row in front of a block."""
    shards = [shard for group in share.groups for shard in group.shards]
    formats = [format_of(make_storage, table=shard.table, dim=shard.num_columns) for shard in shards]
    return {
        shard.table: TableSize(
            num_rows=shard.num_rows + shard.num_padding,
            dim=shard.num_columns,
            optimizer=config.optimizer,
            row_format=row_format,
            cache=cache_of(make_storage, table=shard.table, dim=shard.num_columns),
        )
        for shard, row_format in zip(shards, formats, strict=True)
        if row_format is not None
    }


def _memory_id(device: torch.device) -> int:
    """A number for the memory that a rank takes: equal for ranks that share it."""
    text = f"{platform.node()} {boot_id()} {device if device.type == 'cuda' else 'host'}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _gathered(told: list[int]) -> list[list[int]]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [told]
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor(told, dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with communicating("comparison of tables with the memory of all machines"):
        dist.all_gather(rows, mine)
    return [[int(number) for number in row] for row in rows]


def _plural(ranks: Sequence[object]) -> str:
    return "rank" if len(ranks) == 1 else "ranks"
