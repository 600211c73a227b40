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

A part in memory is one chunk, read and filled in place. Rows in another storage are several, each read when it is
written and written when it was read (`write`), so that no more than one is in memory.

The three methods with double underscores are torch's protocol for such tensors (`torch.distributed._checkpointable`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ziggurat.embeddings.storage import StoredRows, TablePart


class TableShard(TablePart):
    """A part of a table by its place; its shape is the whole table's. For checkpoints only: it takes no operations."""

    @property
    def is_in_place(self) -> bool:
        """True if the part is one tensor that a load may fill in place."""
        return self.rows.tensor() is not None

    def write(self, offsets: tuple[int, ...], values: Tensor) -> None:
        """Replace a box of the table that lies in this part, at `offsets` of the whole table."""
        first, *columns = (offset - own for offset, own in zip(offsets, self.offsets, strict=True))
        if tuple(values.shape[1:]) != self.rows.shape[1:]:  # some columns only
            rows = self.rows.read(first, len(values)).clone()
            rows[:, columns[0] : columns[0] + values.shape[1]] = values
            values = rows
        self.rows.write(first, values)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return the items that a save writes."""
        del object
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the chunks that a load fills."""
        first, *others = self.offsets
        tail = self.rows.shape[1:]
        if 0 in tail:
            return []
        return [
            ChunkStorageMetadata(offsets=torch.Size((first + row, *others)), sizes=torch.Size((count, *tail)))
            for row, count in self.rows.chunks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The numbers of a chunk."""
        assert index.offset is not None
        row = index.offset[0] - self.offsets[0]
        return self.rows.read(row, dict(self.rows.chunks())[row])


def table_shard(rows: StoredRows, *, offsets: tuple[int, ...], shape: tuple[int, ...]) -> TableShard:
    """Wrap a part of a table.

    Args:
        rows: the part of this rank.
        offsets: where it begins in the table.
        shape: of the table.
    """
    return TableShard.of(rows, offsets=offsets, shape=shape)


def as_shard(tensor: Tensor) -> Tensor:
    """Return what torch.distributed.checkpoint can save and load: a `TablePart` as a shard, all else as it is."""
    if isinstance(tensor, TablePart) and not isinstance(tensor, TableShard):
        return table_shard(tensor.rows, offsets=tensor.offsets, shape=tuple(tensor.shape))
    return tensor
