"""TableStorage: the one door to the rows of embedding tables, wherever these lie.

Models, exchanges, optimizers and checkpoints need five things of tables and nothing else:

    lookup    rows of a batch ──► pooled vectors                       every step, forward
    update    output gradients ──► each touched row, once              every step, backward
    apply     summed gradients ──► each touched row, once              every step, where ranks have exchanged sums
    read      rows first … first + n - 1, as a tensor                  checkpoints, export, initial weights
    write     the same, the other way                                  loads, initial weights

A storage holds the tables of one dim, one after the other: a weight of (R, D), and what the optimizer keeps for each
row ("sum" of row-wise Adagrad, "exp_avg" and "exp_avg_sq" of sparse Adam). Weight and state of a row belong together,
because whatever moves rows (a cache, a disk) has to move both.

`MemoryStorage` hands its tensors straight to the kernel. Any other storage gives four methods (`gather`, `scatter`,
`read`, `write`) and is exact with every kernel: the rows that a batch needs are gathered into a small table, the
kernel works on that, and changed rows are scattered back:

    rows of the batch    7 3 7 9      distinct   3 7 9      small table (3, D)
                                      inverse    1 0 1 2    what the kernel looks up there

Cost of that path: one sort of the batch's rows and two copies of U·D numbers for U distinct rows; nothing depends on R.
In a step on a GPU that the host does not wait for, nobody knows U: rows are gathered as often as they occur.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import (
    FieldKind,
    GradientPart,
    LookupKernel,
    LookupLayout,
    Lookups,
    Step,
    SummedGradient,
    TableOptimizerKind,
)
from ziggurat.ops.lookup.layout import check_rows
from ziggurat.ops.lookup.reference import jagged_rows, pool_fields, single_rows
from ziggurat.ops.lookup.triton import sums_without_waiting
from ziggurat.ops.row_formats import RowFormat, RowOrigin

WEIGHT = "weight"  # name of the weights among the arrays of a storage
CHUNK_BYTES = 16 << 20  # of the pieces in which checkpoints read and write


class TableStorage(ABC):
    """Rows of the tables of one dim: weights, and the optimizer's numbers of each row.

    Args:
        num_rows: R, of all its tables.
        dim: D.

    Attributes:
        num_rows: R.
        dim: D.
    """

    def __init__(self, num_rows: int, dim: int) -> None:
        self.num_rows = num_rows
        self.dim = dim

    # ------------------------------------------------------------------------------------------ what a storage gives

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers that kernels compute with, whatever they are stored as."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device where kernels find the rows that they asked for."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of weights and state in all."""

    @abstractmethod
    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """Have room for an optimizer's numbers of every row, at their initial values; forgets earlier ones.

        Args:
            kind: which optimizer; `state_shapes` names its arrays.
            initial_sum: of row-wise Adagrad's accumulator.
        """

    @abstractmethod
    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """A copy of some rows of one array: (N, D), or (N,) where it has one number a row."""

    @abstractmethod
    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace some rows, each named once."""

    @abstractmethod
    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """Consecutive rows of one array. May share memory with the storage: copy before changing."""

    @abstractmethod
    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace consecutive rows of one array."""

    def tensor(self, key: str = WEIGHT) -> Tensor | None:
        """The whole array, sharing memory, if it is one tensor that may be changed in place; else None."""
        del key
        return None

    @property
    def extra_keys(self) -> tuple[str, ...]:
        """Further arrays of one number a row that a resumed run needs, beside those of the optimizer."""
        return ()

    def about_to_load(self) -> None:  # noqa: B027  # most storages have nothing to prepare
        """Learn that all rows are about to be written."""

    def draw(self, first_row: int, num_rows: int, *, initial: InitialRows) -> None:
        """Give rows their initial weights.

        Args:
            first_row: of the storage.
            num_rows: how many.
            initial: weights of the part of a table that these rows are.
        """
        for first, values in initial.chunks(range(num_rows)):
            self.write(first_row + first, values)

    @property
    def is_sparse(self) -> bool:
        """True if rows that nobody changed are a function of their numbers, and left out of checkpoints."""
        return False

    @property
    def awaits_batches(self) -> bool:
        """True if batches are announced, and begun, so that their rows are where kernels read them."""
        return False

    def announce(self, rows_N: Int64[Tensor, "N"]) -> None:
        """Learn which rows a coming batch needs; a slow storage may begin to read them."""
        del rows_N

    def begin(self) -> None:  # noqa: B027  # most storages have nothing to prepare
        """Learn that a training step on the batch that was announced last begins."""

    def name_rows(self, origins: Sequence[RowOrigin]) -> None:
        """Learn which rows of which tables these are; a storage that rounds at random asks for it.

        Args:
            origins: of consecutive rows, in the order of the storage.
        """
        del origins

    @property
    def row_format(self) -> RowFormat | None:
        """The format of rows in the memory of `device`; None for a storage that takes other memory than that."""
        return None

    def looked_up(self, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """The weights of some rows as lookups read them: those of `gather`, unless the format keeps more."""
        return self.gather(rows_N)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move the tensors as `nn.Module.to` does; a storage that stays where it is refuses another device or dtype.

        Raises:
            ConfigError: the storage cannot move there.
        """
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        if (probe.dtype, probe.device) != (self.dtype, self.device):
            raise ConfigError(
                expected=f"tables of {type(self).__name__} to stay {self.dtype} on {self.device}",
                found=f"{probe.dtype} on {probe.device}",
                where="EmbeddingTables.to",
                ways_out="make the tables with the storage for that device: EmbeddingTables(…, make_storage=…)",
            )

    def describe(self) -> dict[str, object]:
        """Return what the start-up report says beside rows and columns."""
        return {}

    # ----------------------------------------------------------------------------------------- what follows from it

    @property
    def chunk_rows(self) -> int:
        """Rows of the pieces in which a checkpoint reads and writes this storage."""
        return max(1, CHUNK_BYTES // (self.dim * self.dtype.itemsize))

    def lookup(
        self, kernel: LookupKernel, *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """Pool the fields of `layout` into their columns of `out`; see `LookupKernel.lookup`.

        Raises:
            BoundsError: a row is outside its table.
        """
        check_rows(layout, lookups)
        size = lookups.batch_size
        num_single = len(layout.single)
        if size == 0 or not layout.slots:
            return
        if lookups.are_checked:
            pool_fields(layout, lookups, out=out, take=self.looked_up, add=self._added)
            return
        nothing = torch.empty(0, dtype=torch.int64, device=lookups.single.device)
        single_SB = single_rows(layout, lookups) if layout.single else nothing.view(0, size)
        listed, lengths_JB = jagged_rows(layout, lookups) if layout.jagged else (nothing, nothing.view(0, size))
        distinct, inverse = torch.unique(torch.cat([single_SB.reshape(-1), listed]), return_inverse=True)
        small = self.looked_up(distinct if len(distinct) else nothing.new_zeros(1))
        slots = tuple(
            dataclasses.replace(
                slot,
                index=position if slot.kind is FieldKind.SINGLE else position - num_single,
                first_row=0,
                num_rows=len(small),
            )
            for position, slot in enumerate(layout.slots)
        )
        renamed = Lookups(
            batch_size=size,
            single=inverse[: single_SB.numel()].view(num_single, size),
            values=inverse[single_SB.numel() :],
            offsets=F.pad(lengths_JB.reshape(-1).cumsum(0), (1, 0)),
        )
        kernel.lookup(small, layout=dataclasses.replace(layout, slots=slots), lookups=renamed, out=out)

    @property
    def changes_others(self) -> bool:
        """True if an update changes further rows than those that it names; see `changed_with`."""
        return False

    def changed_with(self, rows_U: Int64[Tensor, "U"]) -> Int64[Tensor, "N"]:
        """Return other rows that an update of these changes as well; most storages have none.

        Args:
            rows_U: distinct, without padding.
        """
        return rows_U[:0]

    def begin_update(self, kernel: LookupKernel, *, parts: Sequence[GradientPart], number: int) -> None:  # noqa: B027
        """Prepare an update that is made in two halves; most storages have nothing to prepare.

        Args:
            kernel: of the update.
            parts: of both halves; gradients may still be on their way.
            number: of the step.
        """

    def update(self, kernel: LookupKernel, *, parts: Sequence[GradientPart], step: Step) -> None:
        """Sum the gradients of equal rows and apply the rule to each once; see `LookupKernel.update`."""
        is_late = step.applies is not None or parts[0].lookups.are_checked
        summed = sums_without_waiting(kernel, parts) if is_late else kernel.sum_gradients(parts)
        self.apply(kernel, gradient=summed, step=step)

    def apply(self, kernel: LookupKernel, *, gradient: SummedGradient, step: Step) -> None:
        """Apply the rule to the rows of a summed gradient; see `LookupKernel.apply`."""
        rows = gradient.rows
        if len(rows) == 0:
            return
        arrays = {key: self.gather(rows, key=key) for key in (WEIGHT, *state_keys(step.rule.kind))}
        weight = arrays[WEIGHT]
        renamed = SummedGradient(rows=torch.arange(len(rows), device=rows.device), sums=gradient.sums)
        state = {key: values for key, values in arrays.items() if key != WEIGHT}
        kernel.apply(weight, state=state, gradient=renamed, step=step)
        for key, values in arrays.items():
            self.scatter(rows, values, key=key)

    def _added(self, rows_N: Int64[Tensor, "N"], offsets: Int64[Tensor, "L+1"]) -> Float[Tensor, "L D"]:
        """Sums of lists of rows, each read as often as it occurs."""
        if not len(rows_N):
            return torch.zeros(len(offsets) - 1, self.dim, dtype=self.dtype, device=self.device)
        places = torch.arange(len(rows_N), device=rows_N.device)
        return F.embedding_bag(places, self.looked_up(rows_N), offsets, mode="sum", include_last_offset=True)


MakeStorage = Callable[[int, int], TableStorage]  # (num_rows, dim) → an empty storage


def state_keys(kind: TableOptimizerKind) -> tuple[str, ...]:
    """Names of what an optimizer keeps for each row."""
    return kind.state_keys
