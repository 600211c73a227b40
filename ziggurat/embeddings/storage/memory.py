"""MemoryStorage: tables as tensors in the memory of one device. Kernels read and write them in place.

Memory is taken at the first use, not when the storage is made: a model that is about to be spread over ranks never
takes the memory of its whole tables, and tables that are moved to a device before they are drawn are made there.

Random reads of a large table spend much of their time in the page tables of the processor; 2 MiB pages instead of
4 KiB ones make them about 1.2 times as fast. On Linux the storage asks for them (`madvise(MADV_HUGEPAGE)`), before
its pages are touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.config import InitialDraw
from ziggurat.embeddings.counted_rows import counted_pieces
from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage.table_storage import WEIGHT, TableStorage, state_keys
from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import (
    GradientPart,
    LookupKernel,
    LookupLayout,
    Lookups,
    Step,
    SummedGradient,
    TableOptimizerKind,
    state_shapes,
)
from ziggurat.ops.machine.huge_pages import advise_huge_pages
from ziggurat.ops.row_formats import PLAIN, RowFormat


class MemoryStorage(TableStorage):
    """Tables in the memory of one device.

    Args:
        num_rows: R.
        dim: D.
        device: where.
        dtype: float32, or float64 for tests of exactness.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_rows, dim)
        self._device = torch.device(device)
        self._dtype = dtype
        self._weight: Tensor | None = None
        self._huge_pages = False
        self._state: dict[str, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and state."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device of weights and state."""
        return self._device

    @property
    def row_format(self) -> RowFormat:
        """Numbers as they are."""
        return PLAIN

    @property
    def num_bytes(self) -> int:
        """The bytes of weights and state, taken or still to be taken."""
        numbers = self.num_rows * self.dim + sum(tensor.numel() for tensor in self._state.values())
        return numbers * self._dtype.itemsize

    @property
    def weight(self) -> Float[Tensor, "R D"]:
        """The weights; takes their memory at the first use."""
        if self._weight is None:
            # Not filled: a draw or a load writes every row, and pages are taken when it does.
            self._weight = torch.empty(self.num_rows, self.dim, dtype=self._dtype, device=self._device)
            self._huge_pages = advise_huge_pages(self._weight)
        return self._weight

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """See `TableStorage.add_state`."""
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        self._state = new_state(kind, num_rows=self.num_rows, dim=self.dim, like=empty, initial_sum=initial_sum)

    def tensor(self, key: str = WEIGHT) -> Tensor:
        """The whole array, sharing memory."""
        return self.weight if key == WEIGHT else self._state[key]

    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """See `TableStorage.gather`."""
        return self.tensor(key).index_select(0, rows_N)

    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """See `TableStorage.scatter`."""
        self.tensor(key).index_copy_(0, rows_N, values)

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """A view of the rows, which copies nothing."""
        return self.tensor(key)[first_row : first_row + num_rows]

    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """See `TableStorage.write`."""
        self.tensor(key)[first_row : first_row + len(values)].copy_(values)

    def draw(self, first_row: int, num_rows: int, *, initial: InitialRows) -> None:
        """See `TableStorage.draw`; rows that count are made on the device."""
        if self._device.type == "cpu" or initial.config.init_draw is not InitialDraw.ROWS:
            super().draw(first_row, num_rows, initial=initial)
            return
        for first, values in counted_pieces(initial, range(num_rows), device=self._device):
            self.write(first_row + first, values)

    def lookup(
        self, kernel: LookupKernel, *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """The kernel reads the tables themselves."""
        kernel.lookup(self.weight, layout=layout, lookups=lookups, out=out)

    def update(self, kernel: LookupKernel, *, parts: Sequence[GradientPart], step: Step) -> None:
        """The kernel sums and applies in one go, in place."""
        kernel.update(self.weight, state=self._state_of(step), parts=parts, step=step)

    def apply(self, kernel: LookupKernel, *, gradient: SummedGradient, step: Step) -> None:
        """The kernel applies in place."""
        kernel.apply(self.weight, state=self._state_of(step), gradient=gradient, step=step)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move weights and state.

        Raises:
            ConfigError: to a dtype that the update rules are not exact in.
        """
        # What `fn` does to device and dtype shows only on a tensor; it is asked before anything is changed.
        probe = fn(torch.empty(0, dtype=self._dtype, device=self._device))
        if probe.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                expected="embedding weights in float32 (or float64)",
                found=str(probe.dtype),
                where="EmbeddingTables.to",
                ways_out="keep the weights in float32 and ask the lookup for bfloat16: tables(batch, dtype=…)",
            )
        self._dtype = probe.dtype
        self._device = probe.device
        if self._weight is not None:
            self._weight = fn(self._weight)
        self._state = {key: fn(tensor) for key, tensor in self._state.items()}

    def describe(self) -> dict[str, object]:
        """Say whether the system gave huge pages."""
        return {"huge_pages": self._huge_pages, "device": str(self._device)}

    def _state_of(self, step: Step) -> dict[str, Tensor]:
        """Return the state that the rule of a step needs; a plain gradient step on rows cut by columns needs none."""
        return {key: self._state[key] for key in state_keys(step.rule.kind)}


def new_state(
    kind: TableOptimizerKind, *, num_rows: int, dim: int, like: Tensor, initial_sum: float
) -> dict[str, Tensor]:
    """Return what an optimizer keeps of rows, at its initial values.

    Args:
        kind: which optimizer.
        num_rows: R.
        dim: D.
        like: a tensor of the dtype and on the device that they shall have.
        initial_sum: of row-wise Adagrad's accumulator.
    """
    state = {}
    for key, shape in state_shapes(kind, num_rows=num_rows, dim=dim).items():
        tensor = like.new_empty(shape)
        # Before `fill_`: the system chooses the size of a page when it is first touched.
        advise_huge_pages(tensor)
        state[key] = tensor.fill_(kind.initial(key, initial_sum=initial_sum))
    return state
