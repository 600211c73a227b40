"""LowPrecisionStorage: tables that are trained in BF16, split BF16, INT8 or INT4.

    lookup    distinct rows of the batch ──► FP32, as many as the batch has ──► pooled
    update    rows of the gradient ──► FP32 ──► the exact rule ──► rounded, and kept

With the C++ kernel neither is written anywhere: rows are decoded where they are added, and one at a time where they are
updated (`ops/row_formats/cpp.py`). With Triton's on CUDA devices (`ops/lookup/triton`) neither is for BF16; rows of
codes are decoded where they are added, and by torch for updates. There is no FP32
copy of a table at any time: the rows of a batch alone are ever numbers. The optimizer's state stays FP32. An update is
rounded at random by default, with noise that is a function of (seed, table, step, row, column)
(`ops/row_formats/noise.py`): a run repeats bit for bit, goes on bit for bit from a checkpoint, and rows are rounded
alike wherever a plan puts them.

What is read and written in chunks (initial weights, checkpoints) is FP32, rounded to the nearest when it is written.
Rows that were read from the same format come back as the same numbers, so a checkpoint holds no codes, and fits tables
of any format.

The formats are in `ops/row_formats`; arXiv 2010.11305 trains in INT8 and INT4, arXiv 2005.04680 in split BF16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.embeddings.storage.memory import MemoryStorage, new_state
from ziggurat.embeddings.storage.table_storage import WEIGHT, TableStorage, state_keys
from ziggurat.ops.lookup import (
    GradientPart,
    KernelChoice,
    LookupKernel,
    LookupLayout,
    Lookups,
    Step,
    SummedGradient,
    TableOptimizerKind,
)
from ziggurat.ops.lookup.cpp import CppKernel, is_too_large
from ziggurat.ops.lookup.triton import TritonKernel
from ziggurat.ops.machine.huge_pages import advise_huge_pages
from ziggurat.ops.row_formats import Rounding, RowFormat, RowNoise, RowOrigin
from ziggurat.ops.row_formats.cpp import PackedRows, apply_rows, lookup_rows, update_rows, why_not_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecision:
    """Makes storages of a row format: what `make_storage` wants.

    Args:
        row_format: what rows are kept as. Tables so narrow that it would save nothing keep FP32 (INT8 of one column
            takes five bytes).
        rounding: of updates.
        seed: of the random numbers of updates.
        is_trained: False leaves out what only updates need: the lower halves of split BF16.
    """

    row_format: RowFormat
    rounding: Rounding = Rounding.STOCHASTIC
    seed: int = 0
    is_trained: bool = True

    def __call__(self, num_rows: int, dim: int) -> TableStorage:
        """An empty storage."""
        if self.format_of(dim).is_plain:
            return MemoryStorage(num_rows, dim)
        return LowPrecisionStorage(num_rows, dim, settings=self)

    def format_of(self, dim: int) -> RowFormat:
        """Return the format in which rows of so many columns are kept."""
        return self.row_format.for_columns(dim)


class LowPrecisionStorage(TableStorage):
    """Tables of one dim in the memory of one device, in few bits, trained.

    Args:
        num_rows: R.
        dim: D.
        settings: format, rounding and seed.

    Raises:
        ConfigError: a row format that compiled code does not know breaks a promise of `RowFormat`.
    """

    def __init__(self, num_rows: int, dim: int, *, settings: LowPrecision) -> None:
        super().__init__(num_rows, dim)
        if not settings.row_format.cpp_code:  # one of the user's own, which no test of ours has tried
            settings.row_format.check(dim)
        self.settings = settings
        self._device = torch.device("cpu")
        self._arrays: tuple[Tensor, Tensor | None] | None = None
        self._state: dict[str, Tensor] = {}
        self._noise = RowNoise((), seed=settings.seed)

    @property
    def row_format(self) -> RowFormat:
        """The format in which rows are kept."""
        return self.settings.row_format

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that kernels compute with: float32."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The device of rows and state."""
        return self._device

    @property
    def num_bytes(self) -> int:
        """The bytes of rows, lower halves and state, taken or still to be taken."""
        beside = self.row_format.beside_bytes(self.dim) if self.settings.is_trained else 0
        rows = self.num_rows * (self.row_format.row_bytes(self.dim) + beside)
        return rows + sum(tensor.nbytes for tensor in self._state.values())

    def name_rows(self, origins: Sequence[RowOrigin]) -> None:
        """See `TableStorage.name_rows`."""
        self._noise = RowNoise(origins, seed=self.settings.seed)

    def add_state(self, kind: TableOptimizerKind, *, initial_sum: float = 0.0) -> None:
        """See `TableStorage.add_state`."""
        empty = torch.empty(0, device=self._device)
        self._state = new_state(kind, num_rows=self.num_rows, dim=self.dim, like=empty, initial_sum=initial_sum)

    def tensor(self, key: str = WEIGHT) -> Tensor | None:
        """The optimizer's arrays are tensors; weights in few bits are none that may be changed in place."""
        return None if key == WEIGHT else self._state[key]

    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """Some rows, as updates see them."""
        if key != WEIGHT:
            return self._state[key].index_select(0, rows_N)
        rows, lower = self._kept()
        return self._decoded(rows.index_select(0, rows_N), None if lower is None else lower.index_select(0, rows_N))

    def looked_up(self, rows_N: Int64[Tensor, "N"]) -> Float[Tensor, "N D"]:
        """Some rows, as lookups read them."""
        return self.row_format.checked_decode(self._kept()[0].index_select(0, rows_N), dim=self.dim)

    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace some rows, rounded to the nearest."""
        if key == WEIGHT:
            self.keep(rows_N, values, words_N=None)
        else:
            self._state[key].index_copy_(0, rows_N, values)

    def read(self, first_row: int, num_rows: int, *, key: str = WEIGHT) -> Float[Tensor, "N *D"]:
        """Consecutive rows: a copy of weights, a view of the optimizer's numbers."""
        chosen = slice(first_row, first_row + num_rows)
        if key != WEIGHT:
            return self._state[key][chosen]
        rows, lower = self._kept()
        return self._decoded(rows[chosen], None if lower is None else lower[chosen])

    def write(self, first_row: int, values: Float[Tensor, "N *D"], *, key: str = WEIGHT) -> None:
        """Replace consecutive rows, rounded to the nearest."""
        if key != WEIGHT:
            self._state[key][first_row : first_row + len(values)].copy_(values)
            return
        chosen = slice(first_row, first_row + len(values))
        # Lower halves are there for split BF16 alone, and only in training.
        for kept, new in zip(self._kept(), self._encoded(values.to(self._device), words_N=None), strict=True):
            if kept is not None and new is not None:
                kept[chosen] = new

    def write_packed(self, first_row: int, rows: Tensor) -> None:
        """Replace consecutive rows by others that are in the format already: (N, W) of it, BF16 as bfloat16."""
        kept, lower = self._kept()
        assert lower is None, "rows are not all that is kept of their numbers"
        kept[first_row : first_row + len(rows)] = rows.view(kept.dtype)

    def lookup(
        self, kernel: LookupKernel, *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """Pool rows where they lie with the C++ kernel, and with Triton's; otherwise decode them first."""
        if isinstance(kernel, TritonKernel) and self.row_format.triton_layout:
            kernel.lookup(self._kept()[0], layout=layout, lookups=lookups, out=out, row_format=self.row_format)
        elif not self._has_fast_rows(kernel):
            super().lookup(kernel, layout=layout, lookups=lookups, out=out)
        elif lookups.batch_size and layout.slots:
            lookup_rows(self._kept()[0], self.row_format, layout=layout, lookups=lookups, out=out)

    def update(self, kernel: LookupKernel, *, parts: Sequence[GradientPart], step: Step) -> None:
        """Sum and apply in one walk with the C++ kernel, or in BF16 with Triton's, in place; otherwise one by one."""
        if isinstance(kernel, TritonKernel) and self.row_format.is_updated_by_triton:
            kernel.update(self._kept()[0], state=self._state_of(step), parts=parts, step=step, noise=self.noise)
        elif isinstance(kernel, CppKernel) and self._has_fast_rows(kernel) and not is_too_large(parts):
            update_rows(self._packed(step), kernel=kernel, parts=parts, step=step)
        else:
            super().update(kernel, parts=parts, step=step)

    def apply(self, kernel: LookupKernel, *, gradient: SummedGradient, step: Step) -> None:
        """Apply the rule to the rows of a summed gradient in FP32, and round each once."""
        rows = gradient.rows
        if len(rows) == 0:
            return
        if isinstance(kernel, TritonKernel) and self.row_format.is_updated_by_triton:
            halves = self._kept()[0]
            state = self._state_of(step)
            kernel.apply(halves, state=state, gradient=gradient, step=step, noise=self.noise)
            return
        if self._has_fast_rows(kernel):
            apply_rows(self._packed(step), gradient=gradient, step=step)
            return
        # Noise of this step's number: the same whenever and wherever the row is rounded in it.
        words = self.words(rows, step=step.number_on_host if step.applies is None else step.number)
        weight = self.gather(rows)
        state = {key: self.gather(rows, key=key) for key in state_keys(step.rule.kind)}
        # The kernel gets a table of these rows alone, so the i-th sum belongs to its row i.
        renamed = SummedGradient(rows=torch.arange(len(rows), device=rows.device), sums=gradient.sums)
        kernel.apply(weight, state=state, gradient=renamed, step=step)
        self.keep(rows, weight, words_N=words, applies=step.applies)
        for key, values in state.items():
            self._state[key].index_copy_(0, rows, values)

    @property
    def packed(self) -> PackedRows:
        """The rows as they are kept, for compiled code."""
        rows, lower = self._kept()
        return PackedRows(row_format=self.row_format, dim=self.dim, rows=rows, lower=lower)

    @property
    def noise(self) -> RowNoise | None:
        """The noise of the rows; None where nothing is rounded at random."""
        return self._noise if self._rounds_at_random else None

    def words(self, rows_N: Int64[Tensor, "N"], *, step: int | Tensor) -> Int64[Tensor, "N"] | None:
        """Noise for rounding some rows in a step; None where nothing is rounded at random."""
        return self._noise.words(rows_N, step=step) if self._rounds_at_random else None

    def keep(
        self,
        rows_N: Int64[Tensor, "N"],
        values: Float[Tensor, "N D"],
        *,
        words_N: Int64[Tensor, "N"] | None,
        applies: Bool[Tensor, ""] | None = None,
    ) -> None:
        """Replace the weights of some rows, rounded by noise or to the nearest; none where `applies` is false."""
        for kept, new in zip(self._kept(), self._encoded(values, words_N=words_N), strict=True):
            if kept is not None and new is not None:
                # The device decides whether the step applies; a row that stays is written as it was.
                new = new if applies is None else torch.where(applies, new, kept.index_select(0, rows_N))
                kept.index_copy_(0, rows_N, new)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move rows and state to another device; refuse another dtype, as storages elsewhere do."""
        # What `fn` does shows only on a tensor; one without numbers costs nothing.
        device = fn(torch.empty(0, device=self._device)).device
        # Refused there, for every storage in the same words.
        if fn(torch.empty(0, device=self._device)).dtype != self.dtype:
            super().move(fn)
        self._device = device
        if self._arrays is not None:
            rows, lower = self._arrays
            self._arrays = rows.to(device), None if lower is None else lower.to(device)
        self._state = {key: tensor.to(device) for key, tensor in self._state.items()}

    def describe(self) -> dict[str, object]:
        """Format, rounding and bytes, for the start-up report."""
        return {
            "rows": self.row_format.value,
            "rounding": self.settings.rounding.value if self.row_format.rounds else "none",
            "row_bytes": self.row_format.row_bytes(self.dim),
            "without C++": why_not_rows() or ("no" if self.row_format.cpp_code else "it does not know the format"),
            "device": str(self._device),
        }

    def _has_fast_rows(self, kernel: LookupKernel) -> bool:
        """Return True if compiled code reads and writes rows themselves: with the C++ kernel, if it can be built."""
        if self.row_format.cpp_code == 0:
            return False
        return kernel.choice is KernelChoice.CPP and self._device.type == "cpu" and not why_not_rows()

    @property
    def _rounds_at_random(self) -> bool:
        return self.settings.rounding is Rounding.STOCHASTIC and self.row_format.rounds

    def _packed(self, step: Step) -> PackedRows:
        """The rows and what an update of them needs, for compiled code."""
        return dataclasses.replace(self.packed, state=self._state_of(step), noise=self.noise)

    def _state_of(self, step: Step) -> dict[str, Tensor]:
        return {key: self._state[key] for key in state_keys(step.rule.kind)}

    def _kept(self) -> tuple[Tensor, Tensor | None]:
        """The rows, and the lower halves where there are any; takes their memory at the first use."""
        if self._arrays is None:
            shape = self.num_rows, self.row_format.width(self.dim)
            rows = torch.empty(shape, dtype=self.row_format.dtype, device=self._device)
            advise_huge_pages(rows)
            lower = None
            if self.row_format.has_beside and self.settings.is_trained:
                lower = rows.new_empty(self.num_rows, self.dim)
                advise_huge_pages(lower)
            self._arrays = rows, lower
        return self._arrays

    def _decoded(self, rows: Tensor, lower: Tensor | None) -> Float[Tensor, "N D"]:
        return self.row_format.checked_decode_trained(rows, lower, dim=self.dim)

    def _encoded(self, values: Tensor, *, words_N: Int64[Tensor, "N"] | None) -> tuple[Tensor, Tensor | None]:
        return self.row_format.checked_encode_trained(values, words_N=words_N)
