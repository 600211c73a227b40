"""FBGEMM's table-batched embedding operators (`fbgemm-gpu-cpu`, or `fbgemm-gpu`) behind the shared interface.

The operators of `SplitTableBatchedEmbeddingBagsCodegen` are called directly, on our storage: one forward for all
fields of a dim, one exact fused backward with row-wise Adagrad or SGD. They run when the update is due, so weights
change in `TableOptimizer.step`, not in the backward pass. FBGEMM is imported here and nowhere else.

What was measured of version 1.8 on the CPU, and what is done about each point:

    weight decay and stochastic rounding are silently ignored     weight decay: not eligible; rounding: never asked for
    tables that serve several features, FP16 weights,             not eligible (another kernel is exact and faster)
      element-wise Adagrad: slow scalar paths
    Adam and others: not supported                                not eligible
    mean pooling ignores weights of samples                       sums only; means are divided before and after
    one thread, whatever torch is told                            nothing; the measurement of `auto` sees it
    dims that are not multiples of 4                              not eligible
    the padding row is trained like any other                     its weight and state are put back to zero
    several backward passes before one update                     the reference sums them, then one exact update

Only pooled or single lookups are fused; norms and clipping sum with the reference.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import MissingDependencyError
from ziggurat.ops.lookup.gradient import prepare_gradient
from ziggurat.ops.lookup.kernel import (
    GradientPart,
    KernelChoice,
    KernelSetting,
    Step,
    SummedGradient,
)
from ziggurat.ops.lookup.layout import LookupLayout, Lookups, check_rows, mean_scale
from ziggurat.ops.lookup.reference import TorchKernel

_OPERATORS = (
    "split_embedding_codegen_forward_cpu",
    "split_embedding_backward_codegen_rowwise_adagrad_cpu",
    "split_embedding_backward_codegen_sgd_cpu",
)
_POOLING_SUM = 0
_OUTPUT_FLOAT32 = 0


def import_operators() -> None:
    """Import FBGEMM, so that its operators are in `torch.ops.fbgemm`.

    Raises:
        MissingDependencyError: it is absent, was built for another torch, or lacks an operator; with the reason.
    """
    reason = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.fbgemm, name)]
    if reason or missing:
        raise MissingDependencyError(
            expected="fbgemm-gpu-cpu (or fbgemm-gpu) of the version that belongs to this torch",
            found=reason or f"an installation without {', '.join(missing)}",
            where=f"importing fbgemm_gpu with torch {torch.__version__}",
            ways_out=(
                "pip install 'ziggurat-rec[fbgemm-cpu]' (or [fbgemm-cuda])",
                'choose kernel = "auto", "cpp" or "torch": none of them needs FBGEMM',
            ),
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """A layout in FBGEMM's terms."""

    layout: LookupLayout
    weights_offsets: Tensor  # (F,) first number of each field's table in the storage
    weights_placements: Tensor  # (F,) 0: host memory
    output_offsets: Tensor  # (F + 1,) columns
    hash_size_cumsum: Tensor  # (F + 1,) rows of the tables before each field's, then of all
    row_bits: int
    first_rows: Tensor  # (F,) first row of each field's table, its padding row


class FbgemmKernel:
    """Lookup and exact update with FBGEMM's CPU operators.

    Raises:
        MissingDependencyError: FBGEMM cannot be used here.
    """

    choice = KernelChoice.FBGEMM

    def __init__(self) -> None:
        import_operators()
        self._reference = TorchKernel()
        self._plans: dict[LookupLayout, _Plan] = {}

    def why_not(self, setting: KernelSetting) -> str:
        """See `LookupKernel.why_not`."""
        rule = setting.rule
        if setting.device.type != "cpu":
            return f"the tables are on {setting.device.type!r}, and these are its CPU operators"
        if setting.dtype != torch.float32:
            return f"the tables are {setting.dtype}; only float32 is fast and exact in FBGEMM on the CPU"
        if not rule.kind.fbgemm_rule:
            return f"FBGEMM on the CPU has no exact {rule.kind.value!r}"
        if rule.weight_decay:
            return "FBGEMM on the CPU ignores weight_decay"
        for layout in setting.layouts:
            tables = [slot.table for slot in layout.slots]
            shared = sorted(table for table, count in Counter(tables).items() if count > 1)
            if shared:
                return f"table {shared[0]!r} serves several features, a slow path of FBGEMM on the CPU"
            if layout.slots and layout.dim % 4:
                return f"dim {layout.dim} is not a multiple of 4"
            if sum(slot.num_rows for slot in layout.slots) >= 2**31:
                return "the tables of one dim have 2^31 rows or more"
        return ""

    def lookup(
        self, weight: Float[Tensor, "R D"], *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """See `LookupKernel.lookup`."""
        check_rows(layout, lookups)
        size = lookups.batch_size
        if size == 0 or not layout.slots:
            return
        plan = self._plan(layout)
        values, offsets = _feature_major(layout, lookups)
        pooled_BFD = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            weight.view(-1),
            plan.weights_offsets,
            plan.output_offsets,
            len(layout.slots) * layout.dim,
            plan.hash_size_cumsum,
            values,
            offsets,
            _POOLING_SUM,
            None,  # weights of lookups; an empty tensor would be read
            _OUTPUT_FLOAT32,
        ).view(size, len(layout.slots), layout.dim)
        if layout.has_mean:
            pooled_BFD = pooled_BFD * mean_scale(layout, lookups, dtype=weight.dtype).unsqueeze(-1)
        if layout.is_dense_block:
            out.view(size, -1, layout.dim).copy_(pooled_BFD)
            return
        for position, slot in enumerate(layout.slots):
            out[:, slot.column : slot.column + layout.dim] = pooled_BFD[:, position]

    def prepare(
        self, grad: Float[Tensor, "B T"], *, layouts: Sequence[LookupLayout], lookups: Lookups, dtype: torch.dtype
    ) -> Float[Tensor, "B T"]:
        """See `LookupKernel.prepare`."""
        return prepare_gradient(grad, layouts=layouts, lookups=lookups, dtype=dtype)

    def sum_gradients(self, parts: Sequence[GradientPart]) -> SummedGradient:
        """See `LookupKernel.sum_gradients`; the reference does it, since FBGEMM sums only while it updates."""
        return self._reference.sum_gradients(parts)

    def apply(
        self, weight: Float[Tensor, "R D"], *, state: dict[str, Tensor], gradient: SummedGradient, step: Step
    ) -> None:
        """See `LookupKernel.apply`; done by the reference."""
        self._reference.apply(weight, state=state, gradient=gradient, step=step)

    def update(
        self, weight: Float[Tensor, "R D"], *, state: dict[str, Tensor], parts: Sequence[GradientPart], step: Step
    ) -> None:
        """See `LookupKernel.update`."""
        part = parts[0]
        layout = part.layout
        lookups = part.lookups
        # One call updates at once: a row in two parts would be updated twice, each time with half of its gradient.
        if len(parts) > 1 or lookups.batch_size == 0:
            self._reference.update(weight, state=state, parts=parts, step=step)
            return
        plan = self._plan(layout)
        values, offsets = _feature_major(layout, lookups)
        grad = part.grad
        if not layout.is_dense_block:
            grad = torch.cat([grad[:, slot.column : slot.column + layout.dim] for slot in layout.slots], dim=1)
        # Multiplied here, since FBGEMM's update has no factor.
        if step.scale != 1.0:
            grad = grad * step.scale
        shared = (
            grad,
            weight.view(-1),
            plan.weights_placements,
            plan.weights_offsets,
            plan.output_offsets,
            layout.dim,
            plan.hash_size_cumsum,
            plan.row_bits,
            values,
            offsets,
            _POOLING_SUM,
            None,  # weights of lookups; an empty tensor would be read
            False,  # stochastic rounding
        )
        learning_rate = torch.tensor(step.learning_rate)
        if step.rule.kind.fbgemm_rule == "rowwise_adagrad":
            # A copy, since indexing by a tensor makes one: FBGEMM trains the padding row too, and it is put back below.
            padding_sums = state["sum"][plan.first_rows]
            torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
                *shared,
                state["sum"],
                plan.weights_placements,
                plan.first_rows,
                learning_rate,
                eps=step.rule.eps,
            )
            state["sum"][plan.first_rows] = padding_sums
        else:
            torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(*shared, learning_rate)
        # Padding reads as zeros, whatever FBGEMM has added to it.
        weight[plan.first_rows] = 0.0

    def _plan(self, layout: LookupLayout) -> _Plan:
        known = self._plans.get(layout)
        if known is None:
            known = self._plans[layout] = _make_plan(layout)
        return known


def _make_plan(layout: LookupLayout) -> _Plan:
    num_fields = len(layout.slots)
    first_rows = torch.tensor([slot.first_row for slot in layout.slots])
    sizes = [0, *itertools.accumulate(slot.num_rows for slot in layout.slots)]
    return _Plan(
        layout=layout,
        # In numbers, not rows: FBGEMM sees the storage flat.
        weights_offsets=first_rows * layout.dim,
        weights_placements=torch.zeros(num_fields, dtype=torch.int32),
        output_offsets=torch.arange(num_fields + 1, dtype=torch.int32) * layout.dim,
        hash_size_cumsum=torch.tensor(sizes),
        row_bits=max(sizes[-1], 1).bit_length() + 1,
        first_rows=first_rows,
    )


def _feature_major(layout: LookupLayout, lookups: Lookups) -> tuple[Int64[Tensor, "N"], Int64[Tensor, "F*B+1"]]:
    """All rows of a layout, field after field, with offsets for every (field, sample)."""
    size = lookups.batch_size
    parts = []
    lengths = []
    if layout.single:
        indices = [slot.index for slot in layout.single]
        # Where the fields are all there, in order, no row is copied.
        whole = indices == list(range(len(lookups.single)))
        parts.append((lookups.single if whole else lookups.single[indices]).reshape(-1))
        if not layout.jagged:
            # Lists of one row each.
            return parts[0], torch.arange(len(parts[0]) + 1)
        lengths.append(torch.ones(len(parts[0]), dtype=torch.int64))
    num_jagged = (lookups.offsets.numel() - 1) // size
    if len(layout.jagged) == num_jagged:
        if not layout.single:
            return lookups.values, lookups.offsets
        parts.append(lookups.values)
        lengths.append(lookups.offsets.diff())
    else:
        parts += [lookups.rows(slot) for slot in layout.jagged]
        lengths += [lookups.lengths(slot) for slot in layout.jagged]
    return torch.cat(parts), F.pad(torch.cat(lengths).cumsum(0), (1, 0))
