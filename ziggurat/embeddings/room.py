"""Whether tables fit the memory that there is, before any of it is taken.

    bytes of a table  =  rows · D · 4                  weights (FP32; see ops/row_formats for what other formats take)
                       + rows · 4, or rows · D · 8     state of row-wise Adagrad, or of Adam's two moments
                       + rows · D · 4                  gradients, with `adam_dense` alone: the other rules keep those of
                                                       touched rows

An allocation that is larger than the memory does not fail on Linux: pages are given when they are first written, and
the process is killed in the middle of it, without a word. So the sum is compared before the first page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch

from ziggurat.errors import ConfigError, NoRoomError
from ziggurat.ops.lookup import TableOptimizerKind, state_shapes
from ziggurat.ops.machine.memory import Memory, memory_of, size_text
from ziggurat.ops.row_cache import NO_CACHE, CacheSize
from ziggurat.ops.row_formats import PLAIN, RowFormat

_SHOWN = 3


class TableUse(StrEnum):
    """Uses of tables, which decide what lies in memory beside their weights."""

    SCORING = "scoring"  # nothing
    TRAINING = "training"  # optimizer state, and dense gradients where the rule has them
    STATE = "optimizer state"  # that alone: the weights are there already


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """One table, or what a rank holds of it.

    Args:
        num_rows: rows there.
        dim: columns there.
        optimizer: its update rule.
        element_bytes: of a weight in FP32 or FP64, and of each number of the state.
        row_format: what its rows are kept as.
        cache: of its hot rows in FP32.
    """

    num_rows: int
    dim: int
    optimizer: TableOptimizerKind
    element_bytes: int = 4
    row_format: RowFormat = PLAIN
    cache: CacheSize = NO_CACHE

    @property
    def weight_bytes(self) -> int:
        """The bytes of what lookups read, hot rows in a cache included."""
        if self.row_format.is_plain:
            return self.num_rows * self.dim * self.element_bytes
        cached = self.cache.bytes_for(self.num_rows, row_bytes=4 * self.dim)
        return self.num_rows * self.row_format.row_bytes(self.dim) + cached

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer numbers, those of rows in a cache once more, and of the lower halves of split weights."""
        if self.optimizer.is_dense:  # torch's Adam, over parameters
            return 2 * self.weight_bytes
        shapes = state_shapes(self.optimizer, num_rows=self.num_rows, dim=self.dim).values()
        beside = self.num_rows * self.row_format.beside_bytes(self.dim)
        held = 1.0 if self.row_format.is_plain else 1.0 + self.cache.share
        return int(sum(prod(shape) for shape in shapes) * self.element_bytes * held) + beside

    @property
    def gradient_bytes(self) -> int:
        """The bytes of gradients as large as the table."""
        return self.weight_bytes if self.optimizer.is_dense else 0

    def bytes_for(self, use: TableUse) -> int:
        """All that `use` needs."""
        needs = {
            TableUse.SCORING: self.weight_bytes,
            TableUse.TRAINING: self.weight_bytes + self.state_bytes + self.gradient_bytes,
            TableUse.STATE: self.state_bytes,
        }
        return needs[use]

    def text(self, use: TableUse) -> str:
        """Rows, columns and bytes, in words."""
        kind = "" if self.row_format.is_plain else f"{self.row_format.value} "
        parts = [] if use is TableUse.STATE else [f"{kind}weights {size_text(self.weight_bytes)}"]
        if use is not TableUse.SCORING and self.state_bytes:
            parts.append(f"{self.optimizer.value} state {size_text(self.state_bytes)}")
        if use is TableUse.TRAINING and self.gradient_bytes:
            parts.append(f"gradients {size_text(self.gradient_bytes)}")
        return f"{self.num_rows:,} rows × {self.dim} ({', '.join(parts)})"


def bytes_of(tables: Iterable[TableSize], *, use: TableUse) -> int:
    """All that some tables need."""
    return sum(table.bytes_for(use) for table in tables)


def check_room(tables: Mapping[str, TableSize], *, use: TableUse, device: torch.device, where: str) -> None:
    """Refuse tables that the memory of a device does not hold.

    Args:
        tables: by name, those that lie on this device.
        use: what for.
        device: where; nothing is asked of the meta device.
        where: of the error.

    Raises:
        NoRoomError: they are larger than the memory that is free; names the largest.
    """
    if device.type == "meta":
        return
    memory = memory_of(device)
    need = bytes_of(tables.values(), use=use)
    if need > memory.free_bytes:
        raise no_room(tables, use=use, memory=memory, where=where)


def no_room(
    tables: Mapping[str, TableSize], *, use: TableUse, memory: Memory, where: str, shared: str = ""
) -> ConfigError:
    """The error for tables that do not fit.

    Args:
        tables: by name.
        use: what for.
        memory: what there is.
        where: of the error.
        shared: what more lies in the same memory, in words.
    """
    largest = sorted(tables, key=lambda name: -tables[name].bytes_for(use))
    shown = "; ".join(f"table {name!r}: {tables[name].text(use)}" for name in largest[:_SHOWN])
    more = f"; and {len(largest) - _SHOWN} more" if len(largest) > _SHOWN else ""
    total = size_text(bytes_of(tables.values(), use=use))
    first = tables[largest[0]]
    has_many = first.optimizer.weight_state_bytes > 0
    cheaper = ("--model.embedding.optimizer rowwise_adagrad keeps one number for each row",)
    fewer = ("--tables.weights int8 keeps a row in about a quarter of its bytes, int4 in an eighth",)
    return NoRoomError(
        expected=f"tables that fit {memory.text()}",
        found=f"{total} for {use.value}{shared}: {shown}{more}",
        where=where,
        ways_out=(
            "fewer rows: num_rows of a hashing table, or min_count and max_rows of a vocabulary, in the schema",
            f"fewer columns: --model.embedding-dim, or embedding_dim of the table in the schema (now {first.dim})",
            *(cheaper if has_many and use is not TableUse.SCORING else ()),
            *(fewer if use is TableUse.TRAINING and first.row_format.is_plain else ()),
            "more ranks, each with a part of the rows: torchrun --nproc-per-node N, on more hosts; "
            "`ziggurat plan` says how many",
        ),
    )
