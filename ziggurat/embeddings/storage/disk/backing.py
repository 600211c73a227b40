"""DiskRows: the rows of the tables of one dim in a file, weights and state beside each other, exact.

    fetch   rows ──► on their way to the disk? ──► read ahead? ──► never changed? drawn : read from the file
    store   rows ──► queue ──► thread ──► file                                       (`write_behind.py`)
    announce rows of a coming batch ──► thread reads those that the file has

Numbers are FP32, as they were: training is bit for bit that of tables in memory. The file is sparse: rows that nobody
has changed are a function of seed, table and row (`embeddings/initial_rows.py`), so a table of 10⁹ rows is made in no
time, and what it takes of the disk grows with the rows that a run touches, page by page. Where a row costs a block of
4,096 to draw (`init_draw = "blocks"`), the whole block is written when one of its rows is first asked for.

Safety. The file is scratch, without a name: it goes with the process, however that ends. What a run goes on from is in
its checkpoints alone, which hold the rows that were changed (`touched`), written aside and published by a rename; no
write-back touches them. A kill at any byte of a write-back loses what a run in memory would lose: the steps since the
last checkpoint. Within a process a row that was written in part or overwritten is found by its tag and told; a disk
that refuses (full, gone, read-only) is told by the next call, with what waits kept, so that training stops before it
computes with a wrong row.

Memory: three bits for each row that was ever touched, what waits to be written (a quarter of what is
held, at most 32 MiB, twice while it is written), and what was read ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.embeddings.config import InitialDraw
from ziggurat.embeddings.initial_rows import BLOCK_ROWS, InitialRows
from ziggurat.embeddings.storage.cached.backing import RowBacking
from ziggurat.embeddings.storage.disk.bitmap import RowMarks
from ziggurat.embeddings.storage.disk.unsaved import UnsavedRows
from ziggurat.embeddings.storage.disk.write_behind import RowValues, WriteBehind
from ziggurat.embeddings.storage.table_storage import WEIGHT
from ziggurat.errors import FileError
from ziggurat.ops.lookup import TableOptimizerKind, state_shapes
from ziggurat.ops.row_file import RowFile, RowState, disk_rate
from ziggurat.ops.row_file.file import why_not_cpp


@dataclass(eq=False)
class _Ahead:
    """Rows that were read, or are being read, before they are asked for."""

    rows: Int64[np.ndarray, "N"]
    read: Future[tuple[Float[np.ndarray, "N W"], np.ndarray]]
    stale: Bool[np.ndarray, "N"]  # stored since they were read


class DiskRows(RowBacking):
    """Rows of the tables of one dim in a file.

    Args:
        num_rows: R.
        dim: D.
        folder: on the disk that holds them.

    Raises:
        FileError: from any method: the disk refuses, or gave back other bytes than were written.

    Attributes:
        touched: rows that were ever stored: with those that a cache holds changed, all that a checkpoint has to hold.
        unsaved: rows that were changed since the last checkpoint, with those that a cache knows of.
    """

    def __init__(self, num_rows: int, dim: int, *, folder: str | Path) -> None:
        super().__init__(num_rows, dim)
        self.folder = Path(folder)
        self.touched = RowMarks(num_rows)
        self.unsaved = UnsavedRows(num_rows)
        self._kept = RowMarks(num_rows)  # in the file, or on the way to it
        self._drawn: list[tuple[int, int, InitialRows]] = []  # first row, number of rows, what they begin as
        self._columns: dict[str, slice] = {WEIGHT: slice(0, dim)}
        self._flat: set[str] = set()  # arrays of one number a row
        self._initial_state: dict[str, float] = {}
        self._ahead: _Ahead | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._open()

    @property
    def num_bytes(self) -> int:
        """Marks of rows, if all were touched."""
        # One bit a row in each of three sets of marks: touched, unsaved, kept.
        return 3 * self.num_rows // 8

    @property
    def disk_bytes(self) -> int:
        """The bytes that the file takes now."""
        return self._file.disk_bytes

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(self._columns)

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """Rows get columns for the state; weights that were stored before are written again beside it."""
        before = self._file
        # Only these rows are in the file; all others still are what they began as.
        old = self.touched
        old_keys = len(self._columns)
        # What waits to be written has the old width, and goes to the old file.
        self.flush()
        columns = {WEIGHT: slice(0, self.dim)}
        width = self.dim
        for key, shape in state_shapes(kind, num_rows=self.num_rows, dim=self.dim).items():
            columns[key] = slice(width, width + (shape[1] if len(shape) > 1 else 1))
            width = columns[key].stop
            self._flat |= {key} if len(shape) == 1 else set()
        self._columns = columns
        self._initial_state = {key: kind.initial(key, initial_sum=initial_sum) for key in kind.state_keys}
        self.unsaved.begin(range(self.num_rows))
        # A rule without state: rows are as wide as before, and stay where they are.
        if old_keys == 1 and len(columns) == 1:
            return
        # The new file is empty until the loop below has written every row once more, wider.
        self._kept = RowMarks(self.num_rows)
        self._ahead = None
        self._open()
        for rows in old.parts():
            payload = self._with_state(before.read(rows)[0].view(np.float32)[:, : self.dim])
            self._put(RowValues(rows, payload))
        self.flush()
        # Not earlier: the loop reads from it.
        before.close()

    def draw(self, first_row: int, num_rows: int, initial: InitialRows) -> None:
        """Say what rows begin as: a function of them. Rows that were changed before begin anew.

        Args:
            first_row: of the storage.
            num_rows: how many.
            initial: of the part of a table that these rows are.
        """
        self._begin_as(first_row, num_rows, initial)
        for rows in self._kept.parts(range(first_row, first_row + num_rows)):
            numbers = self.take(rows)
            # Weights alone: the optimizer's numbers stay as they are.
            numbers[:, : self.dim] = self._initial(rows)[:, : self.dim]
            self._put(RowValues(rows, numbers))

    def forget(self, first_row: int, num_rows: int, initial: InitialRows | None) -> None:
        """Let rows begin anew, weights and state; what the file has of them counts for nothing.

        Args:
            first_row: of the storage.
            num_rows: how many.
            initial: of the part of a table that these rows are; None: zeros.
        """
        self._begin_as(first_row, num_rows, initial)
        for marks in (self.touched, self._kept):
            marks.remove(range(first_row, first_row + num_rows))
        self._ahead = None

    def _begin_as(self, first_row: int, num_rows: int, initial: InitialRows | None) -> None:
        last = first_row + num_rows
        self.unsaved.begin(range(first_row, last))
        # A part that is drawn anew takes the place of those that it overlaps.
        kept = [entry for entry in self._drawn if entry[0] >= last or entry[0] + entry[1] <= first_row]
        mine = [] if initial is None else [(first_row, num_rows, initial)]
        self._drawn = sorted([*kept, *mine], key=lambda entry: entry[0])

    def reset(self, first_row: int, num_rows: int, *, key: str, value: float) -> None:
        """Give the rows of one array the number that they begin as.

        Args:
            first_row: of the storage.
            num_rows: how many.
            key: an array of the optimizer's; or the weights, where nothing was drawn.
            value: all of its numbers.
        """
        # Rows that were never stored are not written here: they begin as the rule says, so it has to be that number.
        assert key == WEIGHT or value == self._initial_state[key], (key, value)
        self.unsaved.begin(range(first_row, first_row + num_rows))
        for rows in self.touched.parts(range(first_row, first_row + num_rows)):
            numbers = self.take(rows)
            numbers[:, self._columns[key]] = value
            self._put(RowValues(rows, numbers))

    def fetch(self, rows_N: Int64[Tensor, "N"], *, keys: Sequence[str]) -> dict[str, Float[Tensor, "N *D"]]:
        """See `RowBacking.fetch`."""
        # Sorted and once each: the disk is read forwards, and no row twice.
        rows, order = np.unique(rows_N.numpy(), return_inverse=True)
        found = self.take(rows)
        return {key: self.part(found, key)[torch.from_numpy(order)] for key in keys}

    def store(
        self, rows_N: Int64[Tensor, "N"], values: dict[str, Float[Tensor, "N *D"]], *, step: int | None = None
    ) -> None:
        """See `RowBacking.store`; nothing is rounded."""
        del step
        rows = rows_N.numpy()
        order = np.argsort(rows)
        rows = rows[order]
        if not len(rows):
            return
        # A row is written whole, so columns that are not given have to be read first.
        is_whole = set(values) >= set(self._columns)
        numbers = np.empty((len(rows), self.width), dtype=np.float32) if is_whole else self.take(rows)
        for key, tensor in values.items():
            self.set_part(numbers, key, tensor.detach()[torch.from_numpy(order)])
        self.put(rows, numbers)

    def put(
        self,
        rows: Int64[np.ndarray, "N"],
        numbers: Float[np.ndarray, "N W"],
        *,
        saved: Bool[np.ndarray, "N"] | None = None,
    ) -> None:
        """Replace sorted distinct rows; the numbers are kept, not copied. `saved`: the last checkpoint has these."""
        if len(rows):
            self.touched.add(rows)
            self.unsaved.change(rows if saved is None else rows[~saved])
            self._put(RowValues(rows, numbers))

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """A copy of consecutive rows."""
        return self.part(self.take(np.arange(first_row, first_row + num_rows)), key)

    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace consecutive rows of one array."""
        self.store(torch.arange(first_row, first_row + len(values)), {key: values})

    def limit_waiting(self, num_bytes: int) -> None:
        """Let no more bytes than these wait to be written."""
        self._behind.limit_bytes = num_bytes

    def announce(self, rows_N: Int64[Tensor, "N"]) -> None:
        """Begin to read the rows of a coming batch that the file has."""
        if self._ahead is not None and not self._ahead.read.done():
            return  # the disk is behind: the batch is read when it is asked for
        self._ahead = None  # of the batch before this one
        rows = np.unique(rows_N.numpy())
        # Rows that the file does not have are computed, which needs no time ahead.
        rows = rows[self._kept.has(rows)]
        on_their_way = self._behind.take(rows, out=np.empty((len(rows), self.width), dtype=np.float32))
        # Those that wait to be written are in memory yet.
        rows = rows[~on_their_way]
        if len(rows):
            # Made at the first need: where no batch is announced there is no thread.
            self._reader = self._reader or ThreadPoolExecutor(1, thread_name_prefix="rows-ahead")
            read = self._reader.submit(self._read_file, rows)
            self._ahead = _Ahead(rows, read, stale=np.zeros(len(rows), dtype=bool))

    def flush(self) -> None:
        """Wait until the file has all rows."""
        self._behind.flush()

    def initial(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """Return the initial values of rows."""
        return self.part(self._initial(rows_N.numpy()), key)

    def columns(self, key: str) -> slice:
        """Return the columns of a row that hold the numbers of an array."""
        return self._columns[key]

    def drawn(self, first_row: int) -> InitialRows | None:
        """Return the initial rows drawn for the part of a table that begins at a row."""
        return next((initial for first, _, initial in self._drawn if first == first_row), None)

    def initial_state(self, key: str) -> float:
        """Return the initial value of the optimizer's numbers."""
        return self._initial_state[key]

    def describe(self) -> dict[str, object]:
        """Describe where the rows lie, and how they are read."""
        layout = self._file.layout
        return {
            "folder": str(self.folder),
            "row_bytes_on_disk": layout.unit_bytes // layout.rows_per_unit,
            "direct_io": self._file.is_direct,
            "measured": disk_rate(str(self.folder), payload_bytes=layout.payload_bytes).text(),
            "without C++": why_not_cpp() or "no",
        }

    @property
    def width(self) -> int:
        """W: numbers of a row, state and all."""
        return max(columns.stop for columns in self._columns.values())

    def _open(self) -> None:
        # 4 bytes a number: FP32.
        self._file = RowFile(self.folder, num_rows=self.num_rows, payload_bytes=4 * self.width)
        self._behind = WriteBehind(_Writer(self._file))

    def part(self, numbers: Float[np.ndarray, "N W"], key: str) -> Float[Tensor, "N *D"]:
        """A copy of one array of some rows."""
        columns = numbers[:, self._columns[key]]
        return torch.from_numpy((columns[:, 0] if key in self._flat else columns).copy())

    def set_part(self, numbers: Float[np.ndarray, "N W"], key: str, values: Float[Tensor, "N *D"]) -> None:
        """Replace one array of some rows."""
        columns = self._columns[key]
        numbers[:, columns] = values.detach().numpy().reshape(len(numbers), columns.stop - columns.start)

    def _put(self, values: RowValues) -> None:
        self._kept.add(values.rows)
        if self._ahead is not None:
            # What was read ahead may be older than what is stored now: such rows are taken anew.
            self._ahead.stale |= values.find(self._ahead.rows)[0]
        self._behind.put(values)

    def take(self, rows: Int64[np.ndarray, "N"]) -> Float[np.ndarray, "N W"]:
        """Numbers of sorted distinct rows."""
        out = np.empty((len(rows), self.width), dtype=np.float32)
        missing = ~self._kept.has(rows)
        if missing.any():
            out[missing] = self._begin(rows[missing])
        wanted = np.flatnonzero(~missing)
        if len(wanted):
            part = np.empty((len(wanted), self.width), dtype=np.float32)
            found = self._behind.take(rows[wanted], out=part)
            # = self._take_ahead
            found |= self._take_ahead(rows[wanted], out=part, known=found)
            if not found.all():
                rest = np.flatnonzero(~found)
                values, states = self._read_file(rows[wanted[rest]])
                self._check(rows[wanted[rest]], states)
                part[rest] = values
            out[wanted] = part
        return out

    def _begin(self, rows: Int64[np.ndarray, "N"]) -> Float[np.ndarray, "N W"]:
        """Numbers of rows that the file does not have; blocks that cost a draw are kept whole."""
        blocks = list[Int64[np.ndarray, "N"]]()
        for first, num_rows, initial in self._drawn:
            mine = rows[(rows >= first) & (rows < first + num_rows)]
            if initial.config.init_draw is InitialDraw.ROWS or not len(mine):
                continue
            # From rows of this storage to rows of the whole table, whose blocks are drawn as wholes.
            shift = initial.first_row - first
            for block in np.unique((mine + shift) // BLOCK_ROWS).tolist():
                begin = block * BLOCK_ROWS - shift
                end = (block + 1) * BLOCK_ROWS - shift
                # A table's part may begin or end inside of a block.
                whole = np.arange(max(begin, first), min(end, first + num_rows))
                # Rows of the block that the file has already are newer than their draw.
                blocks.append(whole[~self._kept.has(whole)])
        if not blocks:
            return self._initial(rows)
        out = np.empty((len(rows), self.width), dtype=np.float32)
        done = np.zeros(len(rows), dtype=bool)
        for block in blocks:
            drawn = RowValues(block, self._initial(block))
            hit, at = drawn.find(rows)
            out[hit] = drawn.values[at[hit]]
            done |= hit
            self._put(drawn)
        if not done.all():
            out[~done] = self._initial(rows[~done])
        return out

    def _initial(self, rows: Int64[np.ndarray, "N"]) -> Float[np.ndarray, "N W"]:
        """Return the initial values of rows: drawn weights, zeros where nothing was said; constant state."""
        weight = np.zeros((len(rows), self.dim), dtype=np.float32)
        for first, num_rows, initial in self._drawn:
            mine = (rows >= first) & (rows < first + num_rows)
            if mine.any():
                weight[mine] = initial.take(torch.from_numpy(rows[mine] - first)).numpy()
        return self._with_state(weight)

    def _with_state(self, weight: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N W"]:
        payload = np.empty((len(weight), self.width), dtype=np.float32)
        payload[:, : self.dim] = weight
        for key, value in self._initial_state.items():
            payload[:, self._columns[key]] = value
        return payload

    def _read_file(self, rows: Int64[np.ndarray, "N"]) -> tuple[Float[np.ndarray, "N W"], np.ndarray]:
        payload, states = self._file.read(rows)
        return payload.view(np.float32), states

    def _take_ahead(
        self, rows: Int64[np.ndarray, "N"], *, out: Float[np.ndarray, "N W"], known: Bool[np.ndarray, "N"]
    ) -> Bool[np.ndarray, "N"]:
        """Copy what was read ahead and is still right, but for rows that are known."""
        ahead = self._ahead
        if ahead is None:
            return np.zeros(len(rows), dtype=bool)
        # Waits for the thread; an error of the disk comes out here.
        values, states = ahead.read.result()
        hit, at = RowValues(ahead.rows, values).find(rows)
        # What waits to be written is newer than what was read.
        hit &= ~known & ~ahead.stale[at]
        self._check(rows[hit], states[at[hit]])
        out[hit] = values[at[hit]]
        return hit

    def _check(self, rows: Int64[np.ndarray, "N"], states: np.ndarray) -> None:
        wrong = np.flatnonzero(states != RowState.AS_WRITTEN)
        if len(wrong):
            row = int(rows[wrong[0]])
            state = RowState(int(states[wrong[0]]))
            lost = (
                "a row that was written is gone" if state is RowState.NEVER_WRITTEN else "another row, or half of one"
            )
            raise FileError(
                expected="rows of tables as they were written",
                found=f"{lost}: row {row:,} of {self.num_rows:,} and {len(wrong) - 1:,} others in this read",
                where=str(self.folder),
                ways_out=(
                    "look for disk errors in the system log (dmesg)",
                    "go on from the last checkpoint, which does not use this file: --resume",
                    "name a folder on another disk: --tables.disk FOLDER",
                ),
            )


class _Writer:
    """Writes to the file of rows without holding on to the table that reads it."""

    def __init__(self, file: RowFile) -> None:
        self._file = file

    def __call__(self, values: RowValues) -> None:
        self._file.write(values.rows, values.values.view(np.uint8))
