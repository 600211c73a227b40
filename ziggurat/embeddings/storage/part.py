"""StoredRows and TablePart: rows of a storage as checkpoints see them, and read and write them in chunks.

A state dict maps names to tensors. Tables in memory give views of themselves. Tables elsewhere cannot: a `TablePart`
stands in their place, a tensor by type, shape and dtype without numbers of its own, that says where its rows lie.
Whoever saves or loads goes through `chunks`, one piece in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch._ops import OpOverload

from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage.table_storage import WEIGHT, TableStorage
from ziggurat.ops.dispatched import OpArgs, OpKwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows:
    """Consecutive rows of one array of a storage.

    Args:
        storage: where they lie.
        first_row: of the storage.
        num_rows: how many.
        key: which array: the weights, or something of the optimizer's.
    """

    storage: TableStorage
    first_row: int
    num_rows: int
    key: str = WEIGHT

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, D), or (rows,) for one number a row."""
        # No rows are read: only the shape is wanted, wherever they lie.
        tail = self.storage.read(0, 0, key=self.key).shape[1:]
        return (self.num_rows, *tail)

    def tensor(self) -> Tensor | None:
        """The rows, sharing memory, where the storage is one tensor."""
        whole = self.storage.tensor(self.key)
        return None if whole is None else whole[self.first_row : self.first_row + self.num_rows]

    def without(self, num_rows: int) -> StoredRows:
        """The same without the first few."""
        return StoredRows(
            storage=self.storage,
            first_row=self.first_row + num_rows,
            num_rows=self.num_rows - num_rows,
            key=self.key,
        )

    def draw(self, initial: InitialRows) -> None:
        """Give the rows their initial weights."""
        self.storage.draw(self.first_row, self.num_rows, initial=initial)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """First row, counted from this part's own, and number of rows of each piece; one piece in memory."""
        # A view of a tensor takes no memory, however long.
        step = self.num_rows if self.tensor() is not None else self.storage.chunk_rows
        for first in range(0, self.num_rows, max(step, 1)):
            yield first, min(step, self.num_rows - first)

    def read(self, first: int, num_rows: int) -> Tensor:
        """Some rows, counted from this part's own first one; may share memory."""
        return self.storage.read(self.first_row + first, num_rows, key=self.key)

    def write(self, first: int, values: Tensor) -> None:
        """Replace some rows, counted from this part's own first one."""
        self.storage.write(self.first_row + first, values, key=self.key)


class TablePart(Tensor):
    """Rows of a table by name and place, for state dicts and checkpoints. It takes no operations.

    Attributes:
        rows: where the numbers lie.
        offsets: where the first of them lies in the whole table.
    """

    rows: StoredRows
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, rows: StoredRows, *, offsets: tuple[int, ...] = (), shape: tuple[int, ...] = ()) -> Self:
        """Wrap rows; the whole table unless `offsets` and the table's `shape` say otherwise."""
        shape = shape or rows.shape
        offsets = offsets or (0,) * len(rows.shape)
        assert all(o + n <= whole for o, n, whole in zip(offsets, rows.shape, shape, strict=True)), (offsets, shape)
        storage = rows.storage
        part = Tensor._make_wrapper_subclass(cls, shape, dtype=storage.dtype, device=storage.device)
        part.rows = rows
        part.offsets = offsets
        return part

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Shape and place."""
        del tensor_contents
        return f"{type(self).__name__}({self.rows.shape} at {self.offsets} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> object:
        """Only `detach` has a meaning."""
        del types, kwargs
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"a {cls.__name__} is for checkpoints only; read its `rows` for {func}")


def reader(tensor: Tensor) -> Callable[[int, int], Tensor]:
    """Return a function that reads rows (first, number) of what a state dict holds: a tensor, or a `TablePart`."""
    return tensor.rows.read if isinstance(tensor, TablePart) else partial(tensor.narrow, 0)


def table_tensor(rows: StoredRows) -> Tensor:
    """Rows of a whole table for a state dict: a view where they are in memory, else a `TablePart`."""
    tensor = rows.tensor()
    return TablePart.of(rows) if tensor is None else tensor
