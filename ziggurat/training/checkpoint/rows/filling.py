"""Rows of tables that a checkpoint holds some of, read back into tables on a disk and in memory.

    disk      weights and state of a row in one go ──► held in memory, as if a step had changed them
              ──► the disk, for those that find no place
    memory    what all rows began as, then those of the checkpoint over it, array by array

So a load into tables on a disk costs what the rows of the checkpoint cost, each of them once, however large the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage import StoredRows, TablePart
from ziggurat.embeddings.storage.disk import DiskStorage
from ziggurat.embeddings.storage.table_storage import WEIGHT
from ziggurat.training.checkpoint.rows.sparse import RowsPart, SparseTensor, disk_storage

Pieces = Callable[[str], Iterator[tuple[Int64[Tensor, "N"], Tensor]]]  # stored → ids with numbers, piece by piece
_Target = tuple[TablePart, SparseTensor]


def fill_all(
    tensors: Mapping[str, Tensor], sparse: Mapping[str, SparseTensor], *, pieces: Pieces, name: str = ""
) -> None:
    """Give tensors, and parts of tables, the rows that a checkpoint has of them.

    Args:
        tensors: in memory, or `TablePart`s, by name.
        sparse: what the manifest says of each of the names.
        pieces: reads the two tensors of a part.
        name: of the checkpoint, for tables on a disk of which it has weights and state: they remember it.
    """
    on_disk: dict[tuple[int, int, int, int], list[_Target]] = {}
    for each, tensor in tensors.items():
        if isinstance(tensor, TablePart) and isinstance(tensor.rows.storage, DiskStorage):
            rows = tensor.rows
            place = id(rows.storage), rows.first_row, rows.num_rows, tensor.offsets[0]
            on_disk.setdefault(place, []).append((tensor, sparse[each]))
        else:
            _fill(tensor, sparse[each], pieces=pieces)
    for targets in on_disk.values():
        _begin_on_disk(targets)
    for targets in on_disk.values():
        _fill_on_disk(targets, pieces=pieces)
        rows = targets[0][0].rows
        if _is_whole(targets):
            disk_storage(rows).saved(range(rows.first_row, rows.first_row + rows.num_rows), name=name)


def _is_whole(targets: list[_Target]) -> bool:
    """Return True if a checkpoint has weights and state of the rows."""
    storage = disk_storage(targets[0][0].rows)
    return {part.rows.key for part, _ in targets} == set(storage.disk.keys)


def _begin_on_disk(targets: list[_Target]) -> None:
    """Let rows on a disk be what they began as; those that were changed before are forgotten where all is loaded."""
    rows = targets[0][0].rows
    storage = disk_storage(rows)
    if not _is_whole(targets):
        storage.disk.unsaved.begin(range(rows.first_row, rows.first_row + rows.num_rows))
        for part, stored in targets:
            _begin(part.rows, stored, offsets=part.offsets, shape=part.rows.shape)
        return
    (weight,) = (target for target in targets if target[0].rows.key == WEIGHT)
    initial = _initial(weight[1], offsets=weight[0].offsets, shape=weight[0].rows.shape)
    storage.forget(rows.first_row, rows.num_rows, initial=initial)


def _fill_on_disk(targets: list[_Target], *, pieces: Pieces) -> None:
    rows = targets[0][0].rows
    first_row = targets[0][0].offsets[0]
    storage = disk_storage(rows)
    # Each part once, though weights and state both name it, and in order: later ones lie over earlier ones.
    for name in dict.fromkeys(part.stored for _, stored in targets for part in stored.parts):
        boxes = [box for target, stored in targets for part in stored.parts if part.stored == name
                 for box in _boxes(target, part)]  # fmt: skip
        given = np.zeros(storage.disk.width, dtype=bool)
        for mine, _ in boxes:
            given[mine] = True
        for ids, numbers in pieces(name):
            local, chosen = np.unique(ids.numpy() - first_row, return_index=True)
            inside = (local >= 0) & (local < rows.num_rows)
            local = local[inside] + rows.first_row
            found = numbers.numpy()[chosen[inside]]
            if not len(local) or not boxes:
                continue
            # Where the checkpoint has every column nothing needs to be read first.
            whole = np.empty((len(local), storage.disk.width), dtype=np.float32) if given.all() else storage.look(local)
            for mine, theirs in boxes:
                whole[:, mine] = found[:, theirs]
            storage.hold(local, whole)


def _boxes(target: TablePart, part: RowsPart) -> Iterator[tuple[slice, slice]]:
    """Columns of a row of the storage, and the columns of the stored numbers that belong there."""
    own = disk_storage(target.rows).disk.columns(target.rows.key)
    offset = target.offsets[1] if len(target.offsets) > 1 else 0
    begin = max(part.first_column, offset)
    end = min(part.first_column + part.columns[1] - part.columns[0], offset + own.stop - own.start)
    if begin < end:
        at = part.columns[0] - part.first_column
        yield slice(own.start + begin - offset, own.start + end - offset), slice(begin + at, end + at)


def _fill(tensor: Tensor, stored: SparseTensor, *, pieces: Pieces) -> None:
    rows = tensor.rows if isinstance(tensor, TablePart) else None
    offsets = tensor.offsets if isinstance(tensor, TablePart) else (0,) * tensor.dim()
    shape = rows.shape if rows is not None else tuple(tensor.shape)
    _begin(tensor if rows is None else rows, stored, offsets=offsets, shape=shape)
    for part in stored.parts:
        for ids, numbers in pieces(part.stored):
            mine = (ids >= offsets[0]) & (ids < offsets[0] + shape[0])
            local = ids[mine] - offsets[0]
            found = numbers[mine, part.columns[0] : part.columns[1]]
            if not len(local):
                continue
            if len(shape) == 1:
                found = found[:, 0]
            else:
                first = part.first_column
                last = part.first_column + found.shape[1]
                begin = max(first, offsets[1])
                end = min(last, offsets[1] + shape[1])
                if begin >= end:
                    continue
                found = found[:, begin - first : end - first]
                if end - begin < shape[1]:  # some columns of the part
                    whole = tensor[local] if rows is None else _gather(rows, local)
                    whole[:, begin - offsets[1] : end - offsets[1]] = found
                    found = whole
            if rows is None:
                tensor.index_copy_(0, local, found)
            else:
                rows.storage.scatter(local + rows.first_row, found, key=rows.key)


def _gather(rows: StoredRows, local: Int64[Tensor, "N"]) -> Tensor:
    return rows.storage.gather(local + rows.first_row, key=rows.key)


def _begin(
    target: Tensor | StoredRows, stored: SparseTensor, *, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Give all rows what they began as."""
    initial = _initial(stored, offsets=offsets, shape=shape)
    if isinstance(target, StoredRows):
        if initial is not None:
            target.draw(initial)
            return
        if isinstance(target.storage, DiskStorage):
            target.storage.reset(target.first_row, target.num_rows, key=target.key, value=stored.value)
            return
        for first, count in target.chunks():
            target.write(first, torch.full((count, *shape[1:]), stored.value))
    elif initial is None:
        target.fill_(stored.value)
    else:
        for first, values in initial.chunks(range(shape[0])):
            target[first : first + len(values)] = values


def _initial(stored: SparseTensor, *, offsets: tuple[int, ...], shape: tuple[int, ...]) -> InitialRows | None:
    """Return the initial rows of a part of a table; None for one number."""
    initial = stored.initial()
    if initial is None or len(shape) != 2:
        return initial
    return replace(initial, first_row=offsets[0], first_column=offsets[1], num_columns=shape[1])
