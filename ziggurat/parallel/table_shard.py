"""TableShard: a part of a table that knows where in the table it lies, for checkpoints.

Checkpoints speak of whole tables by name. A rank saves and loads its part; torch.distributed.checkpoint puts parts
together, whatever the number of ranks and the placements at saving and at loading were:

    saved on 4 ranks, row_wise        loaded on 2, column_wise
    ┌──────────┐ rank 0               ┌─────┬─────┐
    ├──────────┤ rank 1               │     │     │
    ├──────────┤ rank 2               │  0  │  1  │
    ├──────────┤ rank 3               │     │     │
    └──────────┘                      └─────┴─────┘

Two ranks may hold the same part (row-wise optimizer state of a table that is cut by columns): one of them saves it.

The three methods with double underscores are torch's protocol for such tensors (`torch.distributed._checkpointable`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class TableShard(Tensor):
    """Shares memory with the part; its shape is the whole table's. For checkpoints only: it takes no operations.

    Attributes:
        part: the numbers that this rank holds.
        offsets: where the part's first number lies in the table.
    """

    part: Tensor
    offsets: tuple[int, ...]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Shape and place."""
        del tensor_contents
        return f"TableShard({tuple(self.part.shape)} at {self.offsets} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only `detach` has a meaning."""
        del types, kwargs
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"a TableShard is for checkpoints only; use its `part` for {func}")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What a save writes."""
        del object
        if self.part.numel() == 0:
            return []
        data = TensorWriteData(chunk=self._chunk, properties=TensorProperties(dtype=self.part.dtype), size=self.shape)
        return [WriteItem(index=MetadataIndex(fqn, self._chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What a load fills."""
        return [self._chunk] if self.part.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The numbers."""
        del index
        return self.part

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.part.shape)


def table_shard(part: Tensor, *, offsets: tuple[int, ...], shape: tuple[int, ...]) -> TableShard:
    """Wrap a part of a table.

    Args:
        part: the numbers of this rank.
        offsets: where they begin in the table.
        shape: of the table.
    """
    assert all(o + n <= whole for o, n, whole in zip(offsets, part.shape, shape, strict=True)), (offsets, shape)
    shard = Tensor._make_wrapper_subclass(TableShard, shape, dtype=part.dtype, device=part.device)  # type: ignore[attr-defined]
    shard.part, shard.offsets = part, offsets
    return shard
