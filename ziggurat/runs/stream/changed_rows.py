"""Find the rows of a model's tables that have changed since a version was published, and gather them from all ranks.

Marked: a step changes the rows that its batch looks up, and no others, so the rows of each batch are marked as it is
trained: one byte a row, and about a nanosecond a look-up. A row of a new id is among them, since an id gets its row
when a batch brings it.

Compared: where that does not hold (a cache that rounds what it lets go, tables with dense gradients, averages of
weights), and after a start, when nobody has marked, the rows are compared bit by bit with those of the version before.

On ranks each marks the rows of its own samples, by their place in the whole table; the union is what has changed,
wherever the rows lie. Parts of tables are put together as checkpoints put them together: by their offsets.

    rank 0  batch ─► marks ─┐             ┌─► rows of its part ─┐
    rank 1  batch ─► marks ─┴─ union ─► rows                    ├─► rank 0: (rows), (rows, D)
                                          └─► rows of its part ─┘

Cost: an exchange of a bit a row; then of the changed rows, to all ranks (`Team.gather_bytes`), some MB at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ziggurat.embeddings.storage import TablePart, reader
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import PADDING_ROW
from ziggurat.models import Model
from ziggurat.parallel.tables.sharded_tables import tables_of
from ziggurat.serving.export.deltas import ChangedRows
from ziggurat.training.team import Team

_CHUNK_BYTES = 32 << 20  # of rows that are sent, or compared, at a time
_TABLES = "embeddings.tables."
_WEIGHT = ".weight"


class RowMarks:
    """Marks rows of tables that batches look up.

    Args:
        inputs: of the model.
    """

    def __init__(self, inputs: InputSpec) -> None:
        self._inputs = inputs
        self._marks = {table.name: np.zeros(table.num_rows, dtype=np.bool_) for table in inputs.tables}

    def add(self, batch: Batch) -> None:
        """Mark the rows of a batch; from the host's copy where there is one, so that nobody waits for a device."""
        batch = batch.on_host or batch
        for spec, rows in zip(self._inputs.single, batch.single.cpu().numpy(), strict=True):
            self._marks[spec.table][rows] = True
        if not self._inputs.jagged:
            return
        # Without writing lists out for each sample that shares them: the rows are the same.
        for index, spec in enumerate(self._inputs.jagged):
            self._marks[spec.table][batch.lists(index)[0].values.cpu().numpy()] = True

    def clear(self) -> None:
        """Forget all marks."""
        for marks in self._marks.values():
            marks[:] = False

    def rows(self, team: Team) -> dict[str, Int64[np.ndarray, " N"]]:
        """Return the rows that any rank has marked, by table; collective."""
        found: dict[str, Int64[np.ndarray, " N"]] = {}
        for name, marks in self._marks.items():
            marked = np.zeros(len(marks), dtype=np.bool_)
            for theirs in team.gather_bytes(np.packbits(marks).tobytes()):
                marked |= np.unpackbits(np.frombuffer(theirs, dtype=np.uint8), count=len(marks)).astype(np.bool_)
            marked[PADDING_ROW] = False
            found[name] = np.flatnonzero(marked)
        return found


def are_marks_enough(model: Model) -> bool:
    """Return whether a step changes only rows that its batch looks up."""
    if model.embeddings.config.optimizer.is_dense:
        return False
    return not any(cache.changes_others for tables in tables_of(model) for cache in tables.caches)


def table_names(inputs: InputSpec) -> dict[str, str]:
    """Return the name of each table's weights in a state dict, by table."""
    return {table.name: f"{_TABLES}{table.name}{_WEIGHT}" for table in inputs.tables}


@dataclass(frozen=True, kw_only=True)
class _Box:
    """The part of a table that a rank holds.

    Args:
        first_row: of the whole table.
        num_rows: of the part.
        first_column: of the whole table.
        num_columns: of the part.
        width: columns of the whole table.
    """

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    width: int

    @staticmethod
    def of(value: Tensor | None) -> _Box | None:
        """Return the place of a part; None where a rank has none."""
        if value is None:
            return None
        width = value.shape[1]
        if not isinstance(value, TablePart):
            return _Box(first_row=0, num_rows=value.shape[0], first_column=0, num_columns=width, width=width)
        rows, columns = value.rows.shape
        first_row, first_column = value.offsets
        return _Box(first_row=first_row, num_rows=rows, first_column=first_column, num_columns=columns, width=width)

    def own(self, rows: Int64[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        """Mark the rows of the whole table that lie in the part."""
        return (rows >= self.first_row) & (rows < self.first_row + self.num_rows)


def gathered_rows(team: Team, value: Tensor | None, rows: Int64[np.ndarray, " N"]) -> ChangedRows | None:
    """Return rows of a table on the first rank, from the parts of all; None on the others. Collective.

    Args:
        team: the ranks.
        value: this rank's part, as a state dict has it; None where it has none.
        rows: of the whole table, rising; the same on all ranks.
    """
    box = _Box.of(value)
    boxes = [each if each is None else _Box(**each) for each in team.gather(None if box is None else vars(box))]
    dim = next(each.width for each in boxes if each is not None)
    # Copies of a part are sent once, by the first rank that has them.
    is_mine = box is not None and boxes.index(box) == team.rank
    out = torch.empty(len(rows), dim) if team.is_first else None
    step = max(1, _CHUNK_BYTES // (4 * dim))
    for first in range(0, len(rows), step):
        chunk = rows[first : first + step]
        mine = b""
        if is_mine and box is not None and value is not None:
            own = chunk[box.own(chunk)] - box.first_row
            if team.world_size == 1 and out is not None:
                out[first : first + len(chunk)] = _take(value, own)
                continue
            mine = _take(value, own).contiguous().numpy().tobytes()
        if team.world_size == 1:
            continue
        parts = team.gather_bytes(mine)
        if out is None:
            continue
        for place, part in zip(boxes, parts, strict=True):
            if place is None or not part:
                continue
            values = torch.frombuffer(bytearray(part), dtype=torch.float32).view(-1, place.num_columns)
            where = torch.from_numpy(first + np.flatnonzero(place.own(chunk)))
            out[where, place.first_column : place.first_column + place.num_columns] = values
    if out is None:
        return None
    return ChangedRows(rows=torch.from_numpy(rows.astype(np.int64)), values=out)


def _take(value: Tensor, rows: Int64[np.ndarray, " N"]) -> Tensor:
    """Some rows of a part, on the host, in FP32."""
    indices = torch.from_numpy(rows)
    if not isinstance(value, TablePart):
        return value.detach()[indices.to(value.device)].float().cpu()
    stored = value.rows
    if len(rows) and len(rows) == int(rows[-1]) - int(rows[0]) + 1:  # consecutive, as where a whole table is read
        return stored.read(int(rows[0]), len(rows)).float().cpu()
    storage = stored.storage
    return storage.gather((indices + stored.first_row).to(storage.device)).float().cpu()


def all_rows(num_rows: int) -> Int64[np.ndarray, " N"]:
    """Return all rows of a table."""
    return np.arange(num_rows, dtype=np.int64)


def gathered_dense(team: Team, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all weights and buffers on the first rank, and nothing on the others. Collective.

    Args:
        team: the ranks.
        tensors: without tables; parts of one rank alone, as of towers, may be missing on others.
    """
    whole = {name: _whole(value) for name, value in tensors.items()}
    names = team.gather(list(whole))
    found = whole if team.is_first else {}
    for name in dict.fromkeys(name for theirs in names for name in theirs):
        owner = next(rank for rank, theirs in enumerate(names) if name in theirs)
        if owner == 0:
            continue
        mine = whole[name] if team.rank == owner else None
        facts = team.gather(None if mine is None else [str(mine.dtype).removeprefix("torch."), list(mine.shape)])
        content = b"" if mine is None else mine.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts = team.gather_bytes(content)
        described = facts[owner]
        if team.is_first and described is not None:
            dtype, shape = str(described[0]), [int(each) for each in described[1]]
            found[name] = torch.frombuffer(bytearray(parts[owner]), dtype=getattr(torch, dtype)).view(shape)
    return found


def _whole(value: Tensor) -> Tensor:
    # A sharded weight (FSDP) is put together by torch; it is collective, and names come in one order on all ranks.
    full = getattr(value, "full_tensor", None)
    return (value if full is None else full()).detach().cpu()


def different_rows(now: Callable[[int, int], Tensor], before: Tensor) -> Int64[np.ndarray, " N"]:
    """Return the rows of a table whose bits differ from those of an earlier version.

    Args:
        now: reads rows (first, number).
        before: the table then, or fewer rows of it; FP32.
    """
    found: list[Int64[np.ndarray, " N"]] = []
    for first, count in _chunks(len(before), width=before.shape[1]):
        one = now(first, count).float().cpu().contiguous().view(torch.int32)
        other = before[first : first + count].contiguous().view(torch.int32)
        found.append(first + torch.nonzero((one != other).any(dim=1)).view(-1).numpy())
    return np.concatenate([np.empty(0, dtype=np.int64), *found])


def _chunks(num_rows: int, *, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // (4 * width))
    for first in range(0, num_rows, step):
        yield first, min(step, num_rows - first)


def reader_of(value: Tensor) -> Callable[[int, int], Tensor]:
    """Return a function that reads rows (first, number) of a whole table on one device."""
    return reader(value.detach())
