"""DiskStorage: tables whose rows lie on a disk, with those that were asked for last in memory.

    lookup   distinct rows of the batch ──► held in memory, else read ──► small table ──► any kernel
    update   the same rows, most of them held ──► the rule ──► held, changed ──► written when another takes the place

Bit for bit the training of tables in memory, with every kernel: rows are FP32 wherever they lie. `backing.py` says what
happens on the disk, and why a kill does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage.budget import MemoryBudget
from ziggurat.embeddings.storage.disk.backing import DiskRows
from ziggurat.embeddings.storage.disk.bitmap import MarkedRows
from ziggurat.embeddings.storage.disk.cache import CacheCounts, CachedRows
from ziggurat.embeddings.storage.disk.write_behind import MAX_WAITING_BYTES, MIN_WAITING_BYTES
from ziggurat.embeddings.storage.table_storage import WEIGHT, TableStorage, state_keys
from ziggurat.ops.lookup import LookupKernel, Step, SummedGradient, TableOptimizerKind

HELD_BESIDE_BYTES = 9  # of a held row: which row it is, and whether it was changed


def waiting_bytes(held_bytes: int) -> int:
    """Return the bytes that may wait to be written, for so many bytes of rows held; as much again is being written."""
    return max(MIN_WAITING_BYTES, min(MAX_WAITING_BYTES, held_bytes // 4))


def most_waiting(held_bytes: int, *, num_storages: int) -> int:
    """Bytes that wait to be written and are being written, at most, however some storages share what is held."""
    # Twice: bytes that wait, and as many that are being written.
    least, most = (2 * num_storages * each for each in (MIN_WAITING_BYTES, MAX_WAITING_BYTES))
    return min(most, held_bytes // 2 + least)


def held_room(num_bytes: int, *, num_storages: int) -> int:
    """The bytes of rows that may be held where so many are for these and for `most_waiting`; 0 or less: none."""
    least, most = (2 * num_storages * each for each in (MIN_WAITING_BYTES, MAX_WAITING_BYTES))
    # Solves held + `most_waiting(held)` = num_bytes: the smaller waiting there is the larger room here.
    return max(num_bytes - most, int((num_bytes - least) / 1.5))


def room_for(held_bytes: int, *, num_storages: int) -> int:
    """The fewest bytes whose `held_room` is so many."""
    least, most = (2 * num_storages * each for each in (MIN_WAITING_BYTES, MAX_WAITING_BYTES))
    return min(held_bytes + most, -(-3 * held_bytes // 2) + least)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTables:
    """Makes storages on a disk: what `make_storage` wants.

    Args:
        folder: on the disk that holds the rows.
        budget: memory for rows that are held.
    """

    folder: str
    budget: MemoryBudget

    def __call__(self, num_rows: int, dim: int) -> TableStorage:
        """An empty storage."""
        return DiskStorage(DiskRows(num_rows, dim, folder=self.folder), budget=self.budget)


class DiskStorage(TableStorage):
    """Tables of one dim on a disk.

    Args:
        disk: their rows.
        budget: memory for rows that are held.

    Attributes:
        disk: their rows.
        num_places: how many rows are held; None: as the budget says.
    """

    num_places: int | None = None

    def __init__(self, disk: DiskRows, *, budget: MemoryBudget) -> None:
        super().__init__(disk.num_rows, disk.dim)
        self.disk = disk
        self._budget = budget
        self._cached: CachedRows | None = None
        budget.join(self)

    @property
    def cached(self) -> CachedRows:
        """Rows that are held; made at the first use, when it is known what state they have."""
        if self._cached is None:
            self._cached = CachedRows(self.disk, num_places=self.num_places or self._budget.places(self))
            self.disk.limit_waiting(waiting_bytes(self._cached.num_bytes))
        return self._cached

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that kernels compute with: float32."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    @property
    def held_row_bytes(self) -> int:
        """The bytes of a row that is held."""
        return 4 * self.disk.width + HELD_BESIDE_BYTES

    @property
    def num_bytes(self) -> int:
        """The bytes of memory: rows that are held, and marks of rows."""
        return self.cached.num_bytes + self.disk.num_bytes

    @property
    def is_sparse(self) -> bool:
        """Rows that nobody changed are a function, and are left out of checkpoints."""
        return True

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """See `TableStorage.add_state`."""
        self.flush()
        self.disk.add_state(kind, initial_sum=initial_sum)
        self._cached = None  # its places are as wide as a row with its old state

    def draw(self, first_row: int, num_rows: int, *, initial: InitialRows) -> None:
        """Keep the function: nothing is drawn before it is asked for."""
        self.flush()
        # `empty` loses changes, and the places hold rows of other tables, too: hence the flush before.
        self.cached.empty()
        self.disk.draw(first_row, num_rows, initial)

    def reset(self, first_row: int, num_rows: int, *, key: str, value: float) -> None:
        """Give the rows of one array a number that all of them begin as."""
        self.flush()
        self.cached.empty()
        self.disk.reset(first_row, num_rows, key=key, value=value)

    def forget(self, first_row: int, num_rows: int, *, initial: InitialRows | None) -> None:
        """Let rows begin anew, optimizer state and all, at no cost: a checkpoint is about to be loaded.

        Args:
            first_row: of the storage.
            num_rows: how many.
            initial: what their weights begin as; None: zeros.
        """
        # Without a flush: the changes of these rows are what shall be lost.
        self.cached.drop(range(first_row, first_row + num_rows))
        self.disk.forget(first_row, num_rows, initial)

    def changed_rows(self, rows: range) -> MarkedRows:
        """Those that were ever changed, in order, wherever they lie: all that a checkpoint has to hold."""
        # A row that changes in memory leaves its mark on the disk only when it leaves, or now.
        self.cached.tell(rows)
        return MarkedRows(self.disk.touched, rows)

    def unsaved_rows(self, rows: range) -> MarkedRows:
        """Those that were changed since the last checkpoint of the table whose rows these are."""
        self.cached.tell(rows)
        return self.disk.unsaved.among(rows)

    def saved(self, rows: range, *, name: str) -> None:
        """A checkpoint of this name has the rows of a table as they are."""
        self.disk.unsaved.saved(rows, name=name)
        self.cached.saved(rows)

    def look(self, rows: Int64[np.ndarray, "N"]) -> Float[np.ndarray, "N W"]:
        """Weights and state of sorted distinct rows; what is held stays as it is."""
        return self.cached.look(rows)

    def hold(self, rows: Int64[np.ndarray, "N"], numbers: Float[np.ndarray, "N W"]) -> None:
        """Replace weights and state of sorted distinct rows, and hold them; the disk gets those without a place."""
        self.cached.put(rows, numbers)

    def flush(self) -> None:
        """Give all changed rows to the disk."""
        if self._cached is not None:
            self._cached.flush()

    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """See `TableStorage.gather`."""
        rows, inverse = np.unique(rows_N.numpy(), return_inverse=True)
        return self.disk.part(self.cached.take(rows, counts=True), key)[torch.from_numpy(inverse)]

    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace some rows; those that are not held go to the disk."""
        order = np.argsort(rows_N.numpy())
        rows = rows_N.numpy()[order]
        # In pieces, since whole rows are copied: weights and state of a row lie side by side, whichever is replaced.
        for some in np.array_split(np.arange(len(rows)), -(-len(rows) // 262_144) or 1):
            numbers = self.cached.look(rows[some])
            self.disk.set_part(numbers, key, values.detach()[torch.from_numpy(order[some])])
            self.cached.replace(rows[some], numbers)

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """A copy of consecutive rows."""
        return self.disk.part(self.cached.look(np.arange(first_row, first_row + num_rows)), key)

    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace consecutive rows of one array."""
        self.scatter(torch.arange(first_row, first_row + len(values)), values, key=key)

    def apply(self, kernel: LookupKernel, *, gradient: SummedGradient, step: Step) -> None:
        """Apply the rule to the rows of a summed gradient: weights and state are taken and put back together."""
        if len(gradient.rows) == 0:
            return
        rows, order = np.unique(gradient.rows.numpy(), return_inverse=True)
        numbers = self.cached.take(rows)
        keys = state_keys(step.rule.kind)
        weight = self.disk.part(numbers, WEIGHT)
        state = {key: self.disk.part(numbers, key) for key in keys}
        renamed = SummedGradient(rows=torch.from_numpy(order), sums=gradient.sums)
        kernel.apply(weight, state=state, gradient=renamed, step=step)
        for key, values in {WEIGHT: weight, **state}.items():
            self.disk.set_part(numbers, key, values)
        self.cached.put(rows, numbers)

    def announce(self, rows_N: Int64[Tensor, "N"]) -> None:
        """Begin to read the rows of a coming batch that are not held."""
        rows = np.unique(rows_N.numpy())
        rows = rows[(rows >= 0) & (rows < self.num_rows)]  # others are told by the lookup
        self.disk.announce(torch.from_numpy(self.cached.missing(rows)))

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Stay; see `TableStorage.move`."""
        super().move(fn)

    def describe(self) -> dict[str, object]:
        """Describe where the rows lie and how many are held, for the start-up report."""
        cached = self.cached
        held = self._budget.held_text(self, num_places=cached.num_places, num_bytes=cached.num_bytes)
        return {"rows": "disk", **self.disk.describe(), "held_in_memory": held}


def held_facts(storages: Iterable[DiskStorage]) -> dict[str, float]:
    """Return, for a training log, the share of the rows of lookups since the last call that were held; {} for none."""
    rows = hits = 0
    for storage in storages:
        counts = storage.cached.counts
        storage.cached.counts = CacheCounts()
        rows = rows + counts.rows
        hits = hits + counts.hits
    return {"disk_hit_rate": round(hits / rows, 6)} if rows else {}
