"""What a lookup kernel does: the interface that the torch, FBGEMM and C++ implementations share.

A training step of embedding tables has three parts, and none of them is dense in the number of rows R:

    lookup          out[b, f] = Σ_{r in rows(f, b)} w_r            (divided by the list's length for mean pooling)
    sum_gradients   g_r       = Σ_{(f, b) that read r} dL/dout[b, f]   for each of the U distinct rows of the batch
    apply           w_r, state_r ← rule(w_r, state_r, scale · g_r)     once for each distinct row

Summing before applying is what makes the update *exact*: adaptive rules are not linear, so applying the rule once for
each occurrence of a row would give another result. `update` does the last two in one go, without writing g anywhere.

Contract of every kernel, checked by tests/ops:
    - each distinct row is updated exactly once, its gradient summed in one fixed order: the result has the same bits
      for any number of threads and on every repeat;
    - row 0 of every table (padding) is never updated;
    - `update` equals `sum_gradients` followed by `apply`.
Kernels agree with each other up to the rounding of float32 sums.

Which rules there are is said in `ops/table_optimizers/`, one file each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ziggurat.ops.lookup.layout import LookupLayout, Lookups
from ziggurat.ops.table_optimizers import TableOptimizerKind


class KernelChoice(StrEnum):
    """Choice of the implementation that looks up and updates."""

    AUTO = "auto"  # the fastest exact one, measured on this machine
    TORCH = "torch"  # the reference, on every device
    FBGEMM = "fbgemm"  # fbgemm-gpu's operators, CPU
    CPP = "cpp"  # our C++, compiled on first use, CPU
    TRITON = "triton"  # our Triton kernels, CUDA devices


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """A rule and its constants; see `ops/table_optimizers/` for the formulas.

    Args:
        kind: which rule.
        eps: ε.
        weight_decay: λ.
        beta1: β₁ of sparse Adam.
        beta2: β₂ of sparse Adam.
    """

    kind: TableOptimizerKind
    eps: float = 1e-8
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One application of a rule.

    Args:
        rule: the rule.
        learning_rate: η.
        scale: factor on the summed gradient, before the rule (gradient clipping, loss scaling).
        number: t, 1 at the first step; only Adam uses it.
        applies: () bool on the device of the tables: where it is False the step writes nothing. None: it applies.

    Numbers may be scalar tensors on the device of the tables where `applies` is given: the host then does not know
    them, and a kernel must not ask (`training/step/late.py`).
    """

    rule: UpdateRule
    learning_rate: float | Tensor
    scale: float | Tensor = 1.0
    number: int | Tensor = 1
    applies: Bool[Tensor, ""] | None = None

    @property
    def number_on_host(self) -> int:
        """The number, for storages whose steps the host waits for."""
        assert isinstance(self.number, int), "tables that a GPU updates without the host lie in its memory"
        return self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPart:
    """Gradient that one backward pass left for one storage.

    Args:
        layout: the fields that were looked up.
        lookups: the rows that they read.
        grad: (B, T) gradient of the output, contiguous, in the dtype of the weights (or bfloat16 as it came, where the
            kernel reads that), already divided by the list lengths for mean-pooled fields (`LookupKernel.prepare`).
    """

    layout: LookupLayout
    lookups: Lookups
    grad: Float[Tensor, "B T"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedGradient:
    """The gradient of a storage, rows without one left out.

    Where the host does not wait for a device it cannot know U. There are then as many rows as lookups, the ones that
    are too many are row 0 of the storage, which is padding, and their sums are zero (`reference.sums_of_fixed_size`):
    an update that names it any number of times changes nothing.

    Args:
        rows: (U,) distinct rows of the storage, padding left out.
        sums: (U, D) their gradients.
    """

    rows: Int64[Tensor, "U"]
    sums: Float[Tensor, "U D"]


@dataclass(frozen=True, kw_only=True)
class KernelSetting:
    """Setting that a kernel is asked to serve.

    Args:
        layouts: one for each storage; those without fields are never looked up.
        rule: how rows are updated.
        dtype: of the weights.
        device: of the weights.
        has_few_bits: whether some storages keep rows in few bits, which C++ alone reads and writes where they lie.
    """

    layouts: tuple[LookupLayout, ...]
    rule: UpdateRule
    dtype: torch.dtype
    device: torch.device
    has_few_bits: bool = False


class LookupKernel(Protocol):
    """An implementation of lookups and exact updates. `weight` is a storage of shape (R, D), float32."""

    @property
    def choice(self) -> KernelChoice:
        """The name under which users choose it."""
        ...

    def why_not(self, setting: KernelSetting) -> str:
        """Say why this kernel cannot serve a setting exactly, or return "" if it can."""
        ...

    def lookup(
        self, weight: Float[Tensor, "R D"], *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """Write the fields of `layout` into their columns of `out` (float32 or bfloat16, contiguous).

        Raises:
            BoundsError: a row is outside its table.
        """
        ...

    def prepare(
        self, grad: Float[Tensor, "B T"], *, layouts: Sequence[LookupLayout], lookups: Lookups, dtype: torch.dtype
    ) -> Float[Tensor, "B T"]:
        """The gradient of an output, float32 or bfloat16, as `GradientPart` wants it: contiguous, in `dtype`, divided
        by the list lengths for mean-pooled fields. A copy only where something has to change; a kernel that reads
        bfloat16 may leave it.
        """
        ...

    def sum_gradients(self, parts: Sequence[GradientPart]) -> SummedGradient:
        """Sum the gradients of equal rows over all parts, which all read the same storage."""
        ...

    def apply(
        self, weight: Float[Tensor, "R D"], *, state: dict[str, Tensor], gradient: SummedGradient, step: Step
    ) -> None:
        """Apply the rule to the rows of `gradient`, in place."""
        ...

    def update(
        self, weight: Float[Tensor, "R D"], *, state: dict[str, Tensor], parts: Sequence[GradientPart], step: Step
    ) -> None:
        """`sum_gradients`, then `apply`, in place."""
        ...


def state_shapes(kind: TableOptimizerKind, *, num_rows: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a rule's state for a storage of (num_rows, dim)."""
    of_rows = dict.fromkeys(kind.row_state, (num_rows,))
    return {**of_rows, **dict.fromkeys(kind.weight_state, (num_rows, dim))}
