"""TableWeights: the weights of all tables, one storage for each dim and kind of rows, named one by one.

Kernels want few large tables; users and checkpoints want one tensor a table. Both get it: tables of equal dim that are
kept alike lie in one `TableStorage` of (R, D), and each table is a range of its rows. `state_dict` speaks of tables
alone (`<table>.weight`), so a checkpoint does not depend on the grouping, on the storage or on the kernel.

Tables begin *open*, without numbers, if no seed is given. They are then drawn (`draw`) or loaded (`mark_filled` says
so) before the first lookup: nothing is drawn that a checkpoint overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings.config import EmbeddingConfig
from ziggurat.embeddings.growing.new_rows import NewRows, first_vectors
from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.room import TableSize, TableUse, check_room
from ziggurat.embeddings.storage import WEIGHT, MakeStorage, MemoryStorage, StoredRows, TableStorage, cache_of, maker_of
from ziggurat.embeddings.storage.cached import CachedStorage
from ziggurat.embeddings.storage.disk import DiskStorage
from ziggurat.embeddings.storage.host import HostStorage
from ziggurat.embeddings.storage.part import reader, table_tensor
from ziggurat.embeddings.storage.table_storage import state_keys
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import TableSpec
from ziggurat.features.schema import PADDING_ROW
from ziggurat.ops.lookup import LookupLayout, Lookups
from ziggurat.ops.row_formats import PLAIN, RowFormat, RowOrigin
from ziggurat.ops.to_device import to_device


class RowChecks(Protocol):
    """Checks of rows that do not ask a device whether they are in their tables; see `faults.py`."""

    def checked(self, lookups: Lookups, layouts: Sequence[LookupLayout]) -> Lookups:
        """Return the same lookups with every row in its table."""
        ...

    def list_read(self, batch: Batch, position: int) -> Lookups | None:
        """Return the rows of a list that is not pooled as they were announced; None: nobody announced them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlace:
    """Place of a table: rows first_row … first_row + num_rows - 1 of storage number `storage`."""

    storage: int
    first_row: int
    num_rows: int
    dim: int

    @property
    def rows(self) -> slice:
        """The table's rows in its storage."""
        return slice(self.first_row, self.first_row + self.num_rows)


def group_tables(
    tables: tuple[TableSpec, ...], *, dim: int, make_storage: MakeStorage = MemoryStorage
) -> tuple[dict[str, TablePlace], list[TableStorage]]:
    """Group tables by dim and by what makes their storage, both in order of first appearance; and the empty storages.

    Args:
        tables: in the order that they have in their storage.
        dim: columns of tables that name no number of their own.
        make_storage: makes what holds the rows.
    """
    next_row: list[int] = []
    kinds: list[tuple[int, MakeStorage]] = []
    places = {}
    for table in tables:
        columns = table.embedding_dim or dim
        kind = columns, maker_of(make_storage, table=table.name, dim=columns)
        # A list, not a dictionary: what makes storages need not be hashable.
        if kind not in kinds:
            kinds.append(kind)
            next_row.append(0)
        storage = kinds.index(kind)
        places[table.name] = TablePlace(
            storage=storage, first_row=next_row[storage], num_rows=table.num_rows, dim=columns
        )
        next_row[storage] += table.num_rows
    return places, [maker(rows, columns) for (columns, maker), rows in zip(kinds, next_row, strict=True)]


class TableWeights(nn.Module):
    """Weights of all tables, grouped by dim and by what they are kept as.

    Args:
        tables: names, rows and dims.
        config: dims, initial distribution, and whether tables are parameters (`adam_dense`).
        seed: of the initial weights; None leaves the tables open.
        make_storage: makes what holds the rows of one dim; a `StorageByTable` for some tables others.

    Raises:
        ConfigError: tables that are parameters, in a storage that is not one tensor.
    """

    def __init__(
        self,
        tables: tuple[TableSpec, ...],
        *,
        config: EmbeddingConfig,
        seed: int | None,
        make_storage: MakeStorage = MemoryStorage,
    ) -> None:
        super().__init__()
        self.config = config
        self.make_storage = make_storage
        self._are_parameters = config.optimizer.is_dense
        # Not buffers: what walks over buffers (snapshots, broadcasts) would take them for small state of the network.
        self.places, self._storages = group_tables(tables, dim=config.dim, make_storage=make_storage)
        self.name_rows({name: RowOrigin(table=name, first_row=0, num_rows=0) for name in self.places})
        self.is_open = True
        self.faults: RowChecks | None = None  # who checks rows where a GPU is not asked
        self._has_room = False
        self._tie_parameters()
        if seed is not None:
            self.draw(seed)

    @property
    def num_storages(self) -> int:
        """Number of storages: of different dims and kinds of rows."""
        return len(self._storages)

    @property
    def storages(self) -> tuple[TableStorage, ...]:
        """All of them."""
        return tuple(self._storages)

    @property
    def device(self) -> torch.device:
        """The device where kernels find the rows."""
        return self._storages[0].device if self._storages else torch.device("cpu")

    def storage(self, index: int) -> TableStorage:
        """All tables of one dim that are kept alike, one after the other."""
        return self._storages[index]

    def tables_of(self, index: int) -> list[str]:
        """Names of the tables of a storage, in the order of their rows."""
        return [name for name, place in self.places.items() if place.storage == index]

    def rows(self, name: str, *, key: str = WEIGHT) -> StoredRows:
        """The rows of one table, to read and write in chunks.

        Raises:
            ConfigError: at the first call: the memory does not hold the tables.
        """
        if not self._has_room:
            # Memory is taken at the first touch of rows, and this is it; the question is asked once.
            self.check_room(TableUse.SCORING)
            self._has_room = True
        place = self.places[name]
        return StoredRows(
            storage=self.storage(place.storage), first_row=place.first_row, num_rows=place.num_rows, key=key
        )

    def name_rows(self, origins: Mapping[str, RowOrigin]) -> None:
        """Tell storages which rows and columns of whole tables theirs are.

        Args:
            origins: row and column of each whole table where the table here begins; places in storages are filled in.
        """
        named: list[list[RowOrigin]] = [[] for _ in self._storages]
        for name, place in self.places.items():
            origin = replace(origins[name], first_row=place.first_row, num_rows=place.num_rows)
            named[place.storage].append(origin)
        for storage, mine in zip(self._storages, named, strict=True):
            storage.name_rows(mine)

    @property
    def sizes(self) -> dict[str, TableSize]:
        """Rows and columns of the tables that lie in the memory of their device."""
        return self._sizes(lambda storage: storage.row_format)

    def _sizes(self, format_of: Callable[[TableStorage], RowFormat | None]) -> dict[str, TableSize]:
        """Rows and columns of tables, but for those whose storage has no format."""
        found = dict[str, TableSize]()
        for name, place in self.places.items():
            storage = self._storages[place.storage]
            row_format = format_of(storage)
            if row_format is not None:
                found[name] = TableSize(
                    num_rows=place.num_rows,
                    dim=place.dim,
                    optimizer=self.config.optimizer,
                    element_bytes=storage.dtype.itemsize,
                    row_format=row_format,
                    cache=cache_of(self.make_storage, table=name, dim=place.dim),
                )
        return found

    def check_room(self, use: TableUse) -> None:
        """Refuse tables that are larger than the memory, before it is taken.

        Raises:
            ConfigError: with the largest tables, their bytes and the memory that is free.
        """
        where = "embedding tables, before memory is taken for them"
        check_room(self.sizes, use=use, device=self.device, where=where)
        # Tables behind the device's memory have no format of their own: on the host they are plain FP32.
        in_host = self._sizes(lambda storage: PLAIN if isinstance(storage, HostStorage) else None)
        check_room(in_host, use=use, device=torch.device("cpu"), where=where)

    def view(self, name: str) -> Float[Tensor, "rows D"]:
        """The rows of one table: sharing memory with a storage in memory, else a copy."""
        rows = self.rows(name)
        tensor = rows.tensor()
        return rows.read(0, rows.num_rows) if tensor is None else tensor

    def parameter(self, name: str) -> nn.Parameter:
        """The table as a parameter; only with `adam_dense`."""
        parameter = self._parameters[f"{name}.weight"]
        if parameter is None:
            raise KeyError(name)
        return parameter

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Draw all tables, by seed and name (`initial_rows.py`)."""
        self.about_to_load()
        for name, place in self.places.items():
            shape = place.num_rows, place.dim
            self.rows(name).draw(InitialRows(table=name, shape=shape, config=self.config, seed=seed))
        self.mark_filled()

    @property
    def caches(self) -> list[CachedStorage]:
        """The storages that keep hot rows in a cache."""
        return [storage for storage in self._storages if isinstance(storage, CachedStorage)]

    @property
    def on_disk(self) -> list[DiskStorage]:
        """The storages whose rows lie on a disk."""
        return [storage for storage in self._storages if isinstance(storage, DiskStorage)]

    @property
    def in_host(self) -> list[HostStorage]:
        """The storages whose rows lie in the memory of the host, behind that of the device."""
        return [storage for storage in self._storages if isinstance(storage, HostStorage)]

    def about_to_load(self) -> None:
        """Tell storages that all rows are about to be written."""
        for storage in self._storages:
            storage.about_to_load()

    def renew(self, new: NewRows, *, seed: int) -> None:
        """Draw the rows of new ids of a growing table, and begin with the optimizer's numbers of them anew."""
        place = self.places[new.table]
        values = first_vectors(new, shape=(place.num_rows, place.dim), config=self.config, seed=seed)
        self.replace_rows(new.table, new.rows, values)

    @torch.no_grad()
    def replace_rows(self, name: str, rows_N: Int64[Tensor, "N"], values_ND: Float[Tensor, "N D"]) -> None:
        """Give some rows of a table other weights, and the optimizer's numbers of them their initial values.

        Args:
            name: of the table.
            rows_N: of the table, each named once.
            values_ND: their weights.
        """
        place = self.places[name]
        storage = self.storage(place.storage)
        rows_N = to_device(rows_N + place.first_row, storage.device)
        storage.scatter(rows_N, to_device(values_ND, storage.device))
        for key in state_keys(self.config.optimizer):
            # No rows are read: only type and shape are wanted.
            like = storage.read(0, 0, key=key)
            initial = self.config.optimizer.initial(key, initial_sum=self.config.initial_sum)
            # A row of a new id must not go on with the sums of the id that it had before.
            storage.scatter(rows_N, like.new_full((len(rows_N), *like.shape[1:]), initial), key=key)

    def mark_filled(self) -> None:
        """The tables have been drawn or loaded: lookups may begin."""
        self.is_open = False

    def checked(self, lookups: Lookups, layouts: Sequence[LookupLayout]) -> Lookups:
        """The same lookups; where the host does not wait for the device, with rows that the device has checked."""
        return lookups if self.faults is None else self.faults.checked(lookups, layouts)

    def check_filled(self) -> None:
        """Refuse to read tables that were neither drawn nor loaded.

        Raises:
            ConfigError: they are open.
        """
        if self.is_open:
            raise ConfigError(
                expected="tables that were drawn or loaded",
                found="open ones, whose memory holds nothing",
                where="EmbeddingTables",
                ways_out=(
                    "model.embeddings.tables.draw(seed)",
                    "load a checkpoint, then model.embeddings.tables.mark_filled()",
                    "build the model with a seed and without draw_tables=False",
                ),
            )

    def _tie_parameters(self) -> None:
        if not self._are_parameters:
            return
        for name in self.places:
            key = f"{name}.weight"
            known = self._parameters.get(key)
            tensor = self.rows(name).tensor()
            if tensor is None:
                raise ConfigError(
                    expected="tables in memory for dense gradients",
                    found=type(self.storage(self.places[name].storage)).__name__,
                    where="EmbeddingConfig.optimizer = adam_dense",
                    ways_out=(
                        "choose an optimizer of touched rows: rowwise_adagrad, sgd or sparse_adam",
                        "keep rows in FP32: --tables.weights fp32",
                    ),
                )
            if known is None:
                # Not register_parameter: it refuses names with dots, which column names may have.
                self._parameters[key] = nn.Parameter(tensor)
            else:
                # The same parameter object: optimizers and other modules hold on to it.
                known.data = tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableWeights:
        super()._apply(fn, recurse)
        for storage in self._storages:
            # After torch's own move, which knows nothing of storages; parameters are then views of the new ones.
            storage.move(fn)
        self._tie_parameters()
        return self

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._tie_parameters()  # copy.deepcopy copies parameters apart from the storages

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        for name in self.places:
            weight = self.parameter(name) if self._are_parameters else table_tensor(self.rows(name))
            destination[f"{prefix}{name}.weight"] = weight if keep_vars else weight.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        prefix: str,
        local_metadata: dict[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = {f"{prefix}{name}.weight": name for name in self.places}
        # torch looks for keys of submodules and parameters, and tables are mostly neither.
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in expected]
        num_filled = 0
        self.about_to_load()
        for key, name in expected.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            given = state_dict[key]
            mine = self.rows(name)
            if tuple(given.shape) != mine.shape:
                error_msgs.append(f"table {name!r}: expected shape {mine.shape}, found {tuple(given.shape)}")
                continue
            read = reader(given)
            # Padding is read like any row: numbers in it would be added to every shorter list.
            if bool(read(PADDING_ROW, 1).any()):
                error_msgs.append(f"table {name!r}: expected zeros in row {PADDING_ROW} (padding), found other numbers")
                continue
            with torch.no_grad():
                for first, count in mine.chunks():
                    mine.write(first, read(first, count))
            num_filled += 1
        # Otherwise the tables stay open, and the first lookup refuses.
        if num_filled == len(expected):
            self.mark_filled()
