"""Tables of which a checkpoint holds the rows that were changed: those on a disk.

The other rows are a function, whose settings are kept in the manifest. Changed rows lie in two ordinary tensors a rank
and table, checked, hashed and published like all others:

    rows.<step>.<rank>.<n>.ids       (N,)    rows of the whole table
    rows.<step>.<rank>.<n>.numbers   (N, W)  their weights and state, one row after the other

and the manifest says of each table's name which columns of which of them are its own. So a table of 10⁹ rows of which a
run has changed a million takes what a million rows take, and goes into tables in memory, on a disk, on any ranks.

They lie in a file of their own, `rows-<step>-<rank>.safetensors`. A later checkpoint that finds this one writes
what was changed since and takes the file as it is (`earlier.py`): its parts lie over those before, row by row.

A save costs what these rows cost: those that are held in memory are taken from there and stay there, changed as they
are; the others are read in the order of the file. `filling.py` reads them back.

Rows are read from the disk while they are written to the checkpoint, so such a save is done when `save` returns,
whatever the mode: a copy that training cannot touch would have to be in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ziggurat.config import from_json, to_json
from ziggurat.embeddings.config import EmbeddingConfig, InitialDraw, TableInit
from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage import TablePart
from ziggurat.embeddings.storage.disk import DiskStorage, MarkedRows
from ziggurat.embeddings.storage.part import StoredRows
from ziggurat.embeddings.storage.table_storage import WEIGHT
from ziggurat.errors import CheckpointError
from ziggurat.parallel.tables.table_shard import TableShard

if TYPE_CHECKING:
    from ziggurat.training.checkpoint.manifest import StoredTensor

PREFIX = "rows."
_PIECE_ROWS = 65_536  # in memory at once while they are written


@dataclass(frozen=True, kw_only=True)
class RowsPart:
    """The place of some rows of a tensor.

    Args:
        stored: what the names of the two tensors begin with.
        columns: of the stored numbers: first, and one after the last.
        first_column: of the whole table, that the first of them is.
    """

    stored: str
    columns: tuple[int, int]
    first_column: int = 0


@dataclass(frozen=True, kw_only=True)
class SparseTensor:
    """A tensor of which some rows are stored; the others are what they began as.

    Args:
        shape: of the whole tensor.
        value: what all other rows hold, if that is one number.
        table: otherwise these name the function; see `InitialRows`.
        parts: later ones lie over earlier ones.
    """

    shape: tuple[int, ...]
    value: float = 0.0
    table: str = ""
    seed: int = 0
    init: TableInit = TableInit.UNIFORM
    init_std: float = 0.0
    init_draw: InitialDraw = InitialDraw.BLOCKS
    parts: tuple[RowsPart, ...] = field(default=())

    @property
    def dtype(self) -> torch.dtype:
        """Rows on a disk are FP32."""
        return torch.float32

    def initial(self) -> InitialRows | None:
        """Return the initial rows of the whole table; None for one number."""
        if not self.table:
            return None
        config = EmbeddingConfig(init=self.init, init_std=self.init_std, init_draw=self.init_draw)
        return InitialRows(table=self.table, shape=(self.shape[0], self.shape[1]), config=config, seed=self.seed)


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, TablePart]]:
    """Tensors to be saved whole, and tables on a disk."""
    sparse: dict[str, TablePart] = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, TablePart) and tensor.rows.storage.is_sparse
    }
    return {name: tensor for name, tensor in tensors.items() if name not in sparse}, sparse


@dataclass(frozen=True)
class RowsToSave:
    """The rows of tables on a disk that a rank saves.

    Args:
        tensors: ids and numbers, read when they are written.
        entries: what the manifest says of this rank's parts, by name.
    """

    tensors: dict[str, Tensor]
    entries: dict[str, SparseTensor]

    def to_json(self) -> dict[str, object]:
        """Return the entries as JSON for the other ranks."""
        return {name: to_json(entry) for name, entry in self.entries.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class TablePlace:
    """The place of the rows of a table that this rank saves.

    Args:
        storage: that holds them.
        rows: of the storage.
        shift: what makes rows of the whole table of them.
        stored: what the names of the two tensors begin with.
    """

    storage: DiskStorage
    rows: range
    shift: int
    stored: str


def table_places(sparse: Mapping[str, TablePart], *, step: int, rank: int) -> dict[str, TablePlace]:
    """Return the place of the rows of each name; weights and state of a table have one place.

    Args:
        sparse: by name.
        step: of the checkpoint.
        rank: of this process.
    """
    places = dict[tuple[int, int], TablePlace]()
    found = dict[str, TablePlace]()
    for name, part in sparse.items():
        rows = part.rows
        storage = disk_storage(rows)
        place = id(storage), rows.first_row
        if place not in places:
            places[place] = TablePlace(
                storage=storage,
                rows=range(rows.first_row, rows.first_row + rows.num_rows),
                shift=part.offsets[0] - rows.first_row,
                stored=f"{PREFIX}{step}.{rank}.{len(places)}",
            )
        found[name] = places[place]
    return found


def disk_storage(rows: StoredRows) -> DiskStorage:
    """Return the storage of rows that `split` found on a disk.

    Raises:
        CheckpointError: another storage says that it is sparse.
    """
    if isinstance(rows.storage, DiskStorage):
        return rows.storage
    raise CheckpointError(
        expected="rows on a disk, of which a checkpoint holds those that have changed",
        found=f"{type(rows.storage).__name__}, whose is_sparse is true",
        where="checkpoint",
        ways_out="is_sparse = False in the storage: a checkpoint then holds all of its rows",
    )


def rows_to_save(sparse: Mapping[str, TablePart], places: Mapping[str, TablePlace], *, whole: bool) -> RowsToSave:
    """Choose the rows of this rank's tables on a disk that a checkpoint writes.

    Args:
        sparse: by name.
        places: what `table_places` says of them.
        whole: all that were ever changed; else those since the last checkpoint.
    """
    tensors = dict[str, Tensor]()
    entries = dict[str, SparseTensor]()
    # Weights and state of a table share a place, and are written once.
    for place in dict.fromkeys(places.values()):
        chosen = place.storage.changed_rows(place.rows) if whole else place.storage.unsaved_rows(place.rows)
        if len(chosen):
            tensors |= _streams(place.stored, storage=place.storage, rows=chosen, shift=place.shift)
    for name, part in sparse.items():
        place = places[name]
        columns = place.storage.disk.columns(part.rows.key)
        first_column = part.offsets[1] if len(part.offsets) > 1 else 0
        mine = RowsPart(stored=place.stored, columns=(columns.start, columns.stop), first_column=first_column)
        entries[name] = entry_of(part, parts=(mine,) if f"{place.stored}.ids" in tensors else ())
    return RowsToSave(tensors, entries)


def merged(replies: Sequence[Mapping[str, object]]) -> dict[str, SparseTensor]:
    """Merge the entries of all ranks, given as JSON, into those of the manifest."""
    found: dict[str, SparseTensor] = {}
    for reply in replies:
        for name, entry in entries_from_json(reply).items():
            before = found.get(name)
            parts = (
                entry.parts if before is None else (*before.parts, *(p for p in entry.parts if p not in before.parts))
            )
            found[name] = SparseTensor(**{**vars(entry), "parts": parts})
    return found


def check_rows(sparse: Mapping[str, SparseTensor], tensors: Mapping[str, StoredTensor]) -> None:
    """Rows of tables lie in tensors that are there, of one length, within their table.

    Args:
        sparse: what a manifest says of rows.
        tensors: its `StoredTensor`s.

    Raises:
        ValueError: they do not.
    """
    for name, entry in sparse.items():
        _require(name not in tensors, f"{name!r} is stored whole and in rows")
        _require(len(entry.shape) in (1, 2) and all(size >= 0 for size in entry.shape), f"{name!r} is no table")
        _require(not entry.table or len(entry.shape) == 2, f"{name!r} is drawn, and has one number a row")
        for part in entry.parts:
            ids, numbers = (tensors.get(f"{part.stored}.{what}") for what in ("ids", "numbers"))
            if ids is None or numbers is None:
                raise ValueError(f"rows of {name!r} are missing")
            fits = ids.dtype == torch.int64 and numbers.dtype == torch.float32 and len(numbers.shape) == 2
            _require(fits and ids.shape == numbers.shape[:1], f"rows of {name!r} do not fit each other")
            # `CheckpointReader.rows_of` reads ids and numbers piece beside piece.
            pieces = [{(it.offsets[0], it.sizes[0]) for it in tensor.chunks} for tensor in (ids, numbers)]
            whole = all(it.sizes[1] == numbers.shape[1] for it in numbers.chunks)
            _require(whole and pieces[0] == pieces[1], f"rows of {name!r} are cut in two ways")
            first, last = part.columns
            _require(0 <= first < last <= numbers.shape[1], f"columns of {name!r} lie outside of its rows")
            width = entry.shape[1] if len(entry.shape) > 1 else 1
            _require(0 <= part.first_column <= width - (last - first), f"{name!r} is narrower than its rows")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def entries_from_json(data: Mapping[str, object]) -> dict[str, SparseTensor]:
    """Read what `to_json` wrote.

    Raises:
        ValueError: something else.
    """
    try:
        return {name: from_json(SparseTensor, entry, where=name) for name, entry in data.items()}
    except CheckpointError:
        raise
    except Exception as error:
        raise ValueError(str(error)) from error


def entry_of(part: TablePart, *, parts: tuple[RowsPart, ...] = ()) -> SparseTensor:
    """Return the manifest's entry of a name: what its rows began as, and the parts that lie over that."""
    storage = disk_storage(part.rows)
    shape = tuple(part.shape)
    if part.rows.key != WEIGHT:
        return SparseTensor(shape=shape, value=storage.disk.initial_state(part.rows.key), parts=parts)
    initial = storage.disk.drawn(part.rows.first_row)
    if initial is None:
        return SparseTensor(shape=shape, parts=parts)
    config = initial.config
    return SparseTensor(
        shape=shape,
        table=initial.table,
        seed=initial.seed,
        init=config.init,
        init_std=config.init_std,
        init_draw=config.init_draw,
        parts=parts,
    )


def _streams(name: str, *, storage: DiskStorage, rows: MarkedRows, shift: int) -> dict[str, Tensor]:
    """Two tensors that are read piece by piece when they are written."""

    def ids(first: int, count: int) -> Tensor:
        return torch.from_numpy(rows.take(first, count) + shift)

    def numbers(first: int, count: int) -> Tensor:
        return torch.from_numpy(storage.look(rows.take(first, count)))

    return {
        f"{name}.ids": _stream(ids, shape=(len(rows),), dtype=torch.int64),
        f"{name}.numbers": _stream(numbers, shape=(len(rows), storage.disk.width), dtype=torch.float32),
    }


class _Stream:
    """Rows that a function reads; stands where `StoredRows` stands in a `TableShard`."""

    def __init__(self, read: Callable[[int, int], Tensor], *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.read = read
        self.shape = shape
        # As much of a storage as is asked of one that is about to be saved.
        self.storage = SimpleNamespace(dtype=dtype, device=torch.device("cpu"), is_sparse=False)

    def tensor(self) -> None:
        """There is none."""

    def chunks(self) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each piece."""
        for first in range(0, self.shape[0], _PIECE_ROWS):
            yield first, min(_PIECE_ROWS, self.shape[0] - first)


def _stream(read: Callable[[int, int], Tensor], *, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    rows: Any = _Stream(read, shape=shape, dtype=dtype)
    return TableShard.of(rows, offsets=(0,) * len(shape), shape=shape)
