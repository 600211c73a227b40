"""Random lookup problems, and what a kernel has to give for them, computed densely in float64, row by row."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ziggurat.errors import MissingDependencyError
from ziggurat.ops.lookup import (
    FieldKind,
    FieldSlot,
    GradientPart,
    KernelChoice,
    KernelSetting,
    LookupKernel,
    LookupLayout,
    Lookups,
    Step,
    TableOptimizerKind,
    TorchKernel,
    UpdateRule,
    state_shapes,
)
from ziggurat.ops.lookup.cpp import CppKernel
from ziggurat.ops.lookup.fbgemm import FbgemmKernel
from ziggurat.ops.lookup.gradient import prepare_gradient
from ziggurat.ops.lookup.sorted_reads import PlannedRead, SortsAhead

MAKERS = {KernelChoice.TORCH: TorchKernel, KernelChoice.CPP: CppKernel, KernelChoice.FBGEMM: FbgemmKernel}
KERNELS = pytest.mark.parametrize("choice", [KernelChoice.TORCH, KernelChoice.CPP, KernelChoice.FBGEMM])
KINDS = (TableOptimizerKind.SGD, TableOptimizerKind.ROWWISE_ADAGRAD, TableOptimizerKind.SPARSE_ADAM)


def kernel_or_skip(choice: KernelChoice) -> LookupKernel:
    try:
        return MAKERS[choice]()
    except MissingDependencyError as error:
        pytest.skip(f"kernel {choice.value}: {error.found}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One storage, one layout, one or more batches with gradients of their outputs."""

    layout: LookupLayout
    weight: Tensor
    batches: tuple[Lookups, ...]
    grads: tuple[Tensor, ...]

    def parts(self) -> list[GradientPart]:
        return [
            GradientPart(
                layout=self.layout,
                lookups=lookups,
                grad=prepare_gradient(grad, layouts=[self.layout], lookups=lookups, dtype=torch.float32),
            )
            for lookups, grad in zip(self.batches, self.grads, strict=True)
        ]

    def sorted_ahead(self, kernel: SortsAhead) -> Problem:
        """The same with lookups whose rows the kernel has sorted before there are gradients."""
        made = kernel.sorted_reads([PlannedRead(layout=self.layout, lookups=lookups) for lookups in self.batches])
        found = () if made is None else (made,)
        batches = tuple(dataclasses.replace(lookups, sorted_reads=found) for lookups in self.batches)
        return dataclasses.replace(self, batches=batches)

    def state(self, kind: TableOptimizerKind) -> dict[str, Tensor]:
        shapes = state_shapes(kind, num_rows=len(self.weight), dim=self.layout.dim)
        generator = torch.Generator().manual_seed(1)
        return {name: torch.rand(shape, generator=generator) * 0.1 for name, shape in shapes.items()}

    def setting(self, rule: UpdateRule) -> KernelSetting:
        return KernelSetting(layouts=(self.layout,), rule=rule, dtype=torch.float32, device=torch.device("cpu"))

    def expected_output(self, lookups: Lookups) -> Tensor:
        """(B, T), columns of other layouts zero."""
        weight = self.weight.double()
        out = torch.zeros(lookups.batch_size, self.layout.width, dtype=torch.float64)
        for slot in self.layout.slots:
            for sample in range(lookups.batch_size):
                rows = rows_of(lookups, slot, sample)
                total = weight[[slot.first_row + row for row in rows]].sum(0)
                if slot.kind is FieldKind.MEAN and rows:
                    total = total / len(rows)
                out[sample, slot.column : slot.column + self.layout.dim] = total
        return out

    def expected_gradient(self) -> tuple[Tensor, Tensor, Tensor]:
        """(R, D) summed gradient, (R, D) sum of magnitudes (for tolerances), (R,) how often each row was read."""
        gradient = torch.zeros(self.weight.shape, dtype=torch.float64)
        size, count = gradient.clone(), torch.zeros(len(gradient), dtype=torch.int64)
        for lookups, grad in zip(self.batches, self.grads, strict=True):
            for slot in self.layout.slots:
                for sample in range(lookups.batch_size):
                    rows = rows_of(lookups, slot, sample)
                    vector = grad[sample, slot.column : slot.column + self.layout.dim].double()
                    if slot.kind is FieldKind.MEAN and rows:
                        vector = vector / len(rows)
                    for row in rows:
                        if row:
                            gradient[slot.first_row + row] += vector
                            size[slot.first_row + row] += vector.abs()
                            count[slot.first_row + row] += 1
        return gradient, size, count


def rows_of(lookups: Lookups, slot: FieldSlot, sample: int) -> list[int]:
    if slot.kind is FieldKind.SINGLE:
        return [int(lookups.single[slot.index, sample])]
    first = slot.index * lookups.batch_size + sample
    return lookups.values[int(lookups.offsets[first]) : int(lookups.offsets[first + 1])].tolist()


def dense_update(weight: Tensor, state: dict[str, Tensor], gradient: Tensor, touched: Tensor, step: Step) -> None:
    """The rules of kernel.py for one row after the other, on float64 copies, in place."""
    rule = step.rule
    for row in touched.nonzero().flatten().tolist():
        grad = gradient[row] * step.scale + rule.weight_decay * weight[row]
        if rule.kind is TableOptimizerKind.SGD:
            weight[row] -= step.learning_rate * grad
        elif rule.kind is TableOptimizerKind.ROWWISE_ADAGRAD:
            state["sum"][row] += grad.square().mean()
            weight[row] -= step.learning_rate * grad / (math.sqrt(float(state["sum"][row])) + rule.eps)
        else:
            first = rule.beta1 * state["exp_avg"][row] + (1 - rule.beta1) * grad
            second = rule.beta2 * state["exp_avg_sq"][row] + (1 - rule.beta2) * grad.square()
            state["exp_avg"][row], state["exp_avg_sq"][row] = first, second
            correction = math.sqrt(1 - rule.beta2**step.number) / (1 - rule.beta1**step.number)
            weight[row] -= step.learning_rate * correction * first / (second.sqrt() + rule.eps)


def make_lookups(
    layout: LookupLayout, *, size: int, longest: int, generator: torch.Generator, skew: bool = False
) -> Lookups:
    """Random rows, padding and every list length (0 too) among them; `skew` sends nearly all to one row."""

    def draw(count: int, num_rows: int) -> Tensor:
        rows = torch.randint(0, num_rows, (count,), generator=generator)
        return torch.where(torch.rand(count, generator=generator) < 0.9, min(1, num_rows - 1), rows) if skew else rows

    single = torch.zeros(len(layout.single), size, dtype=torch.int64)
    for slot in layout.single:
        single[slot.index] = draw(size, slot.num_rows)
    values, lengths = [], []
    for slot in layout.jagged:
        length = torch.randint(0, longest + 1, (size,), generator=generator)
        lengths.append(length)
        values.append(draw(int(length.sum()), slot.num_rows))
    zero = torch.zeros(1, dtype=torch.int64)
    return Lookups(
        batch_size=size,
        single=single,
        values=torch.cat(values) if values else zero[:0],
        offsets=torch.cat([zero, torch.cat(lengths).cumsum(0)]) if lengths else zero,
    )


def make_layout(*, dim: int, table_rows: list[int], fields: list[tuple[FieldKind, int]], gap: int = 0) -> LookupLayout:
    """A layout of fields (kind, table), single ones first; `gap` columns before each field belong to others."""
    fields = [field for field in fields if field[0] is FieldKind.SINGLE] + [
        field for field in fields if field[0] is not FieldKind.SINGLE
    ]
    num_single = sum(kind is FieldKind.SINGLE for kind, _ in fields)
    slots = tuple(
        FieldSlot(
            name=f"field{position}",
            kind=kind,
            index=position if kind is FieldKind.SINGLE else position - num_single,
            table=f"table{table}",
            first_row=sum(table_rows[:table]),
            num_rows=table_rows[table],
            column=position * (dim + gap) + gap,
        )
        for position, (kind, table) in enumerate(fields)
    )
    return LookupLayout(dim=dim, width=len(fields) * (dim + gap), slots=slots)


def make_problem(
    layout: LookupLayout, *, sizes: tuple[int, ...], longest: int = 4, seed: int = 0, skew: bool = False
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    num_rows = max(slot.first_row + slot.num_rows for slot in layout.slots)
    weight = torch.randn(num_rows, layout.dim, generator=generator)
    for slot in layout.slots:
        weight[slot.first_row] = 0.0
    batches = tuple(make_lookups(layout, size=n, longest=longest, generator=generator, skew=skew) for n in sizes)
    grads = tuple(torch.randn(n, layout.width, generator=generator) for n in sizes)
    return Problem(layout=layout, weight=weight, batches=batches, grads=grads)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small problems with all the odd cases: empty batches and lists, tables of one row, shared tables, odd dims."""
    dim = draw(st.sampled_from([1, 3, 4, 8, 16, 64, 128]))
    table_rows = draw(st.lists(st.sampled_from([1, 2, 5, 300, 3000]), min_size=1, max_size=3))
    field = st.tuples(st.sampled_from(list(FieldKind)), st.integers(0, len(table_rows) - 1))
    layout = make_layout(
        dim=dim,
        table_rows=table_rows,
        fields=draw(st.lists(field, min_size=1, max_size=5)),
        gap=draw(st.sampled_from([0, 0, 2])),
    )
    sizes = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 13]), min_size=1, max_size=3)))
    return make_problem(
        layout,
        sizes=sizes,
        longest=draw(st.sampled_from([0, 1, 6])),
        seed=draw(st.integers(0, 2**16)),
        skew=draw(st.booleans()),
    )
