"""TableWeights: the weights of all tables, one storage for each embedding dim, named one by one.

Kernels want few large tensors; users and checkpoints want one tensor a table. Both get it: tables of equal dim lie
in one storage (R, D), and each table is a view of its rows. `state_dict` speaks of tables alone
(`<table>.weight`), so a checkpoint does not depend on the grouping or on the kernel.

Weights are drawn for each table from a generator of its own, seeded by (seed, table name): adding, removing or
reordering tables changes no other table's weights.

Random reads of a large storage spend much of their time in the page tables of the processor; 2 MiB pages instead of
4 KiB ones make them about 1.2 times as fast. On Linux the storage asks for them (`madvise(MADV_HUGEPAGE)`), before
its pages are touched.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings.config import EmbeddingConfig, TableInit
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import TableSpec
from ziggurat.features.schema import PADDING_ROW
from ziggurat.ops.lookup import TableOptimizerKind

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlace:
    """Where a table lies: rows first_row … first_row + num_rows - 1 of storage number `storage`."""

    storage: int
    first_row: int
    num_rows: int
    dim: int

    @property
    def rows(self) -> slice:
        """The table's rows in its storage."""
        return slice(self.first_row, self.first_row + self.num_rows)


def place_tables(tables: tuple[TableSpec, ...], *, dim: int) -> dict[str, TablePlace]:
    """Group tables by dim, dims in order of first appearance, tables in the order given."""
    dims = list(dict.fromkeys(table.embedding_dim or dim for table in tables))
    next_row = [0] * len(dims)
    places = {}
    for table in tables:
        storage = dims.index(table.embedding_dim or dim)
        places[table.name] = TablePlace(
            storage=storage, first_row=next_row[storage], num_rows=table.num_rows, dim=dims[storage]
        )
        next_row[storage] += table.num_rows
    return places


class TableWeights(nn.Module):
    """Weights of all tables, grouped by dim.

    Args:
        tables: names, rows and dims.
        config: dims, initial distribution, and whether tables are parameters (`adam_dense`).
        seed: of the initial weights; None leaves them as they are in memory, for tables that are filled or cut next.
    """

    def __init__(self, tables: tuple[TableSpec, ...], *, config: EmbeddingConfig, seed: int | None) -> None:
        super().__init__()
        self.places = place_tables(tables, dim=config.dim)
        self._are_parameters = config.optimizer is TableOptimizerKind.ADAM_DENSE
        # Not buffers: what walks over buffers (snapshots, broadcasts) would take them for small state of the network.
        self._storages: list[Tensor] = []
        self.huge_pages: list[bool] = []
        dims = list(dict.fromkeys(place.dim for place in self.places.values()))
        for index, dim in enumerate(dims):
            num_rows = sum(place.num_rows for place in self.places.values() if place.storage == index)
            self._storages.append(torch.empty(num_rows, dim))
            self.huge_pages.append(advise_huge_pages(self._storages[-1]))
        self.is_drawn = seed is not None
        if seed is not None:
            for name in self.places:
                initialise(self.view(name), name=name, config=config, seed=seed)
        self._tie_parameters()

    @property
    def num_storages(self) -> int:
        """Number of different dims."""
        return len(self._storages)

    def storage(self, index: int) -> Float[Tensor, "R D"]:
        """All tables of one dim, one after the other."""
        return self._storages[index]

    def view(self, name: str) -> Float[Tensor, "rows D"]:
        """The rows of one table, sharing memory with its storage."""
        place = self.places[name]
        return self.storage(place.storage)[place.rows]

    def parameter(self, name: str) -> nn.Parameter:
        """The table as a parameter; only with `adam_dense`."""
        parameter = self._parameters[f"{name}.weight"]
        assert parameter is not None
        return parameter

    def _tie_parameters(self) -> None:
        if not self._are_parameters:
            return
        for name in self.places:
            key = f"{name}.weight"
            known = self._parameters.get(key)
            if known is None:
                # Not register_parameter: it refuses names with dots, which column names may have.
                self._parameters[key] = nn.Parameter(self.view(name))
            else:
                known.data = self.view(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableWeights:
        super()._apply(fn, recurse)
        moved = [fn(storage) for storage in self._storages]
        for storage in moved:
            if storage.dtype not in (torch.float32, torch.float64):
                raise ConfigError(
                    expected="embedding weights in float32 (or float64)",
                    found=str(storage.dtype),
                    where="EmbeddingTables.to",
                    ways_out="keep the weights in float32 and ask the lookup for bfloat16: tables(batch, dtype=…)",
                )
        self._storages = moved
        self._tie_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tie_parameters()  # copy.deepcopy copies parameters apart from the storages

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name in self.places:
            weight = self.parameter(name) if self._are_parameters else self.view(name)
            destination[f"{prefix}{name}.weight"] = weight if keep_vars else weight.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        expected = {f"{prefix}{name}.weight": name for name in self.places}
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in expected]
        for key, name in expected.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            given, mine = state_dict[key], self.view(name)
            if given.shape != mine.shape:
                error_msgs.append(f"table {name!r}: expected shape {tuple(mine.shape)}, found {tuple(given.shape)}")
                continue
            if bool(given[PADDING_ROW].any()):
                error_msgs.append(f"table {name!r}: expected zeros in row {PADDING_ROW} (padding), found other numbers")
                continue
            with torch.no_grad():
                mine.copy_(given)


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for 2 MiB pages under a tensor; True if the system agreed. Advice: refusal costs speed, nothing else."""
    size = tensor.numel() * tensor.element_size()
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu" or size < 2 * _HUGE_PAGE_BYTES:
        return False
    first = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + size - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(_MADV_HUGEPAGE)) == 0


def initialise(weight: Float[Tensor, "rows D"], *, name: str, config: EmbeddingConfig, seed: int) -> None:
    """Draw the weights of one table, in place; the padding row is zero."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    with torch.no_grad():
        if config.init is TableInit.UNIFORM:
            bound = len(weight) ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
        else:
            weight.normal_(0.0, config.init_std, generator=generator)
        weight[PADDING_ROW] = 0.0
