"""The C++ kernel: `ziggurat/ops/csrc/lookup.cpp` behind the interface that all kernels share.

Why one more kernel. At one lookup a sample and field, sorting and memory latency are the whole cost, and neither
torch operations nor FBGEMM's CPU kernel (which runs in one thread) get at them: this one sorts eight bytes a lookup
in the cache, sums and updates in one walk that prefetches what it will need, and uses all of torch's threads. The
cost of a call from Python is a few microseconds.

Exactly defined like the reference; the order of float32 sums is fixed by the batch alone (see lookup.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import DataError
from ziggurat.ops.lookup.cpp_library import CPart, CRule, load_library
from ziggurat.ops.lookup.gradient import prepare_gradient
from ziggurat.ops.lookup.kernel import (
    GradientPart,
    KernelChoice,
    KernelSetting,
    Step,
    SummedGradient,
)
from ziggurat.ops.lookup.layout import LookupLayout, Lookups, check_rows
from ziggurat.ops.lookup.reference import TorchKernel


class CppKernel:
    """Lookup and exact update in compiled C++, on the CPU.

    Args:
        library: the loaded library; compiled and loaded unless given.

    Raises:
        MissingDependencyError: the library cannot be compiled or loaded.
    """

    choice = KernelChoice.CPP

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library = library or load_library()
        self._workspace: int | None = self._library.ziggurat_workspace_new()

    def __del__(self) -> None:
        # Not there where the constructor has failed.
        workspace = getattr(self, "_workspace", None)
        # Forgotten before it is freed, so that it is freed once.
        self._workspace = None
        if workspace:
            self._library.ziggurat_workspace_delete(workspace)

    def __deepcopy__(self, memo: dict[int, object]) -> CppKernel:
        return CppKernel(self._library)  # a workspace of its own; buffers hold nothing between calls

    @property
    def workspace(self) -> int | None:
        """The address of the buffers of sorting, for C++ that walks over rows of another kind."""
        return self._workspace

    def why_not(self, setting: KernelSetting) -> str:
        """See `LookupKernel.why_not`."""
        if setting.device.type != "cpu":
            return f"the tables are on {setting.device.type!r}, and it runs on the CPU"
        if setting.dtype != torch.float32:
            return f"the tables are {setting.dtype}, and it works in float32"
        largest = max((slot.num_rows for layout in setting.layouts for slot in layout.slots), default=0)
        # A lookup is sorted as eight bytes: its row and its place, in 32 bits each.
        if largest >= 2**31:
            return f"a table has {largest} rows, and it counts to 2^31"
        kind = setting.rule.kind
        return f"it does not know the rule of {kind}" if kind.cpp_code is None and not kind.is_dense else ""

    def lookup(
        self, weight: Float[Tensor, "R D"], *, layout: LookupLayout, lookups: Lookups, out: Float[Tensor, "B T"]
    ) -> None:
        """See `LookupKernel.lookup`."""
        part = part_of(layout, lookups)
        status = self._library.ziggurat_lookup(
            weight.data_ptr(),
            ctypes.byref(part),
            layout.dim,
            out.data_ptr(),
            # The library sums in FP32 and rounds once, when it writes.
            out.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        if status:
            refuse_rows(layout, lookups)

    def prepare(
        self, grad: Float[Tensor, "B T"], *, layouts: Sequence[LookupLayout], lookups: Lookups, dtype: torch.dtype
    ) -> Float[Tensor, "B T"]:
        """See `LookupKernel.prepare`."""
        if dtype != torch.float32 or not any(layout.has_mean for layout in layouts):
            return prepare_gradient(grad, layouts=layouts, lookups=lookups, dtype=dtype)
        whole = grad.to(dtype).contiguous()
        # The caller's gradient stays as it is; a copy of it may be changed in place.
        prepared = torch.empty_like(whole) if whole.data_ptr() == grad.data_ptr() else whole
        for layout in layouts:
            status = self._library.ziggurat_divide_means(
                ctypes.byref(part_of(layout, lookups)),
                layout.dim,
                whole.data_ptr(),
                prepared.data_ptr(),
                torch.get_num_threads(),
            )
            if status:
                check_rows(layout, lookups)
        return prepared

    def sum_gradients(self, parts: Sequence[GradientPart]) -> SummedGradient:
        """See `LookupKernel.sum_gradients`."""
        if is_too_large(parts):
            # The reference's sums, at the speed of torch: what C++ counts would overflow.
            return TorchKernel().sum_gradients(parts)
        # What was sorted stays in the workspace, where the next call finds it.
        num_unique = self._sort(parts)
        dim = parts[0].layout.dim
        rows = torch.empty(num_unique, dtype=torch.int64)
        sums = torch.empty(num_unique, dim)
        self._library.ziggurat_sum(self._workspace, dim, rows.data_ptr(), sums.data_ptr(), torch.get_num_threads())
        return SummedGradient(rows=rows, sums=sums)

    def distinct_rows(self, parts: Sequence[GradientPart]) -> Int64[Tensor, "U"] | None:
        """The rows of `sum_gradients`, without their sums; `update_places` may follow. None: too many for it."""
        if is_too_large(parts):
            return None
        # The walk over these rows waits in the workspace for `update_places`.
        rows = torch.empty(self._sort(parts), dtype=torch.int64)
        self._library.ziggurat_sorted_rows(self._workspace, rows.data_ptr(), torch.get_num_threads())
        return rows

    def update_places(
        self, weight: Float[Tensor, "C D"], *, state: dict[str, Tensor], places_U: Int64[Tensor, "U"], step: Step
    ) -> None:
        """`update` right after `distinct_rows`, of rows that lie elsewhere than their numbers say.

        Args:
            weight: where they lie.
            state: of the rule, at the same places.
            places_U: the place of each of the rows that `distinct_rows` gave; the parts' gradients still exist.
            step: the rule, its learning rate and step.
        """
        self._library.ziggurat_update_places(
            self._workspace,
            weight.data_ptr(),
            *state_pointers(state),
            weight.shape[1],
            places_U.data_ptr(),
            ctypes.byref(rule_of(step)),
            torch.get_num_threads(),
        )

    def _sort(self, parts: Sequence[GradientPart]) -> int:
        """Sort the lookups of some parts; how many distinct rows they have."""
        num_unique = ctypes.c_int64()
        # Asked at every call: a user may change it between steps.
        threads = torch.get_num_threads()
        status = self._library.ziggurat_sort(
            self._workspace, parts_of(parts), len(parts), ctypes.byref(num_unique), threads
        )
        if status:
            refuse_any(parts)
        return num_unique.value

    def apply(
        self, weight: Float[Tensor, "R D"], *, state: dict[str, Tensor], gradient: SummedGradient, step: Step
    ) -> None:
        """See `LookupKernel.apply`."""
        self._library.ziggurat_apply(
            weight.data_ptr(),
            *state_pointers(state),
            weight.shape[1],
            gradient.rows.data_ptr(),
            gradient.sums.data_ptr(),
            len(gradient.rows),
            ctypes.byref(rule_of(step)),
            torch.get_num_threads(),
        )

    def update(
        self, weight: Float[Tensor, "R D"], *, state: dict[str, Tensor], parts: Sequence[GradientPart], step: Step
    ) -> None:
        """See `LookupKernel.update`."""
        if is_too_large(parts):
            self.apply(weight, state=state, gradient=self.sum_gradients(parts), step=step)
            return
        status = self._library.ziggurat_update(
            self._workspace,
            parts_of(parts),
            len(parts),
            weight.data_ptr(),
            *state_pointers(state),
            weight.shape[1],
            ctypes.byref(rule_of(step)),
            torch.get_num_threads(),
        )
        if status:
            refuse_any(parts)


def part_of(layout: LookupLayout, lookups: Lookups, grad: Tensor | None = None) -> CPart:
    """Describe a lookup or a gradient for C++; the tensors have to outlive the description."""
    size = lookups.batch_size
    single = lookups.single
    offsets = lookups.offsets
    if (
        single.shape[0] < layout.num_single
        or single.shape[1] != size
        or offsets.numel() <= layout.num_jagged * size
        or not single.dtype == lookups.values.dtype == offsets.dtype == torch.int64
    ):
        raise DataError(
            expected=f"int64 rows of shape ({layout.num_single}, {size}) and {layout.num_jagged * size + 1} offsets",
            found=f"{single.dtype} rows of shape {tuple(single.shape)} and {offsets.numel()} offsets",
            where="batch.single, batch.jagged",
            ways_out="check batches made by hand with ziggurat.features.batch.validate_batch",
        )
    return CPart(
        layout.packed.data_ptr(),
        len(layout.slots),
        single.data_ptr(),
        lookups.values.data_ptr(),
        offsets.data_ptr(),
        lookups.values.numel(),
        size,
        layout.width,
        None if grad is None else grad.data_ptr(),
    )


def parts_of(parts: Sequence[GradientPart]) -> ctypes.Array[CPart]:
    """The gradients of a step, for C++."""
    return (CPart * len(parts))(*(part_of(part.layout, part.lookups, part.grad) for part in parts))


def is_too_large(parts: Sequence[GradientPart]) -> bool:
    """Return whether gradients have more numbers than the C++ walk counts."""
    return sum(part.grad.numel() for part in parts) >= 2**32


def state_pointers(state: dict[str, Tensor]) -> tuple[int | None, int | None]:
    """Return the addresses of the arrays of an optimizer, for C++."""
    # In the order of the rule's state keys; a rule has none, one or two.
    pointers: list[int | None] = [tensor.data_ptr() for tensor in state.values()]
    first, second, *_ = [*pointers, None, None]
    return first, second


def rule_of(step: Step) -> CRule:
    """The rule of a step with its constants, for C++."""
    rule = step.rule
    assert rule.kind.cpp_code is not None, rule.kind
    return CRule(
        rule.kind.cpp_code,
        rule.kind.step_size(step),
        step.scale,
        rule.eps,
        rule.weight_decay,
        rule.beta1,
        rule.beta2,
    )


def refuse_any(parts: Sequence[GradientPart]) -> None:
    """Raise what the reference says of rows of a gradient that C++ has refused."""
    for part in parts:
        check_rows(part.layout, part.lookups)
    raise AssertionError("the kernel refused rows that the reference accepts")


def refuse_rows(layout: LookupLayout, lookups: Lookups) -> None:
    """Raise what the reference says of rows that C++ has refused."""
    check_rows(layout, lookups)
    raise AssertionError("the kernel refused rows that the reference accepts")
