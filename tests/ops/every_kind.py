"""Compile Triton's kernels for every kind of setting that their callers take, by those callers.

    python -m tests.ops.every_kind PART ARCHITECTURE          90 is sm_90

`test_triton_every_width.py` compiles kernels of tables for every width, with one setting of what a step may be. Here
are those settings, each with each other: what of a step lies on the device (an eager step, a late one, a recorded
one), sums that are there already, decay, roundings, gradients, fields with and without lists, ids of 32 and 64 bits,
columns at odd places. Beside tables: messages of every format, dtype and width; cross layers, gated norms and
propagation in every form; the shapes of `ziggurat bench gpu`. Launches compile and do nothing (`compiled_launches.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any

import torch
from torch import Tensor

from tests.ops.compiled_launches import compiled_only
from tests.ops.lookup_problems import KINDS, Problem, make_layout, make_problem
from ziggurat.ops.gated_norm import Beside, GatedNormForm, gated_norm_triton
from ziggurat.ops.graph.edge_sampling import EdgeSampling, EdgeStrategy
from ziggurat.ops.graph.graph import Graph
from ziggurat.ops.graph.triton import propagate_triton
from ziggurat.ops.interactions.cross_triton import add_crossed, add_crossed_backward
from ziggurat.ops.interactions.dot import DotShape
from ziggurat.ops.interactions.dot_triton import candidates_of, interaction_backward_triton, interaction_triton
from ziggurat.ops.interactions.fm_norm import _LAUNCHES, fm_norm_triton
from ziggurat.ops.lookup import FieldKind, GradientPart, Step, UpdateRule
from ziggurat.ops.lookup.kernel import SummedGradient
from ziggurat.ops.lookup.layout import Lookups
from ziggurat.ops.lookup.triton import TritonKernel
from ziggurat.ops.machine.launches import CANDIDATES, LaunchPart
from ziggurat.ops.row_formats import RowFormat, RowNoise, RowOrigin
from ziggurat.ops.wire import WireCode, WirePlaces, pack, unpack
from ziggurat.parallel.exchange.packing import RowsForRank, places_of
from ziggurat.parallel.exchange.wire import Wire, WireFormat

WIDTHS = (1, 3, 8, 10, 16, 50, 64, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16)
FORMATS = (RowFormat.FP32, RowFormat.BF16, RowFormat.INT8, RowFormat.INT4)
SINGLE = [(FieldKind.SINGLE, 0), (FieldKind.SINGLE, 1)]
LISTS = [*SINGLE, (FieldKind.SUM, 1), (FieldKind.MEAN, 2)]


def steps() -> list[Step]:
    """A step of each rule: with numbers of the host, as a late step has them, and as one with a scale of the clip."""
    found = []
    for kind, decay in itertools.product(KINDS, (0.0, 0.01)):
        eager = Step(rule=UpdateRule(kind=kind, weight_decay=decay), learning_rate=0.1, scale=0.5, number=3)
        late = dataclasses.replace(
            eager, learning_rate=torch.tensor(0.1), number=torch.tensor(3), applies=torch.tensor(True)
        )
        found += [eager, late, dataclasses.replace(late, scale=torch.tensor(0.5))]
    return found


def of_tables() -> None:
    """Every kind of update of one width; of all widths every kind of read, and the updates of a late step."""
    kernel = TritonKernel()
    for fields in (SINGLE, LISTS):
        problem = make_problem(make_layout(dim=10, table_rows=[40, 9, 3], fields=fields), sizes=(40,))
        halves = RowFormat.BF16.encode(problem.weight)
        noise = RowNoise([RowOrigin(table="a", first_row=0, num_rows=52)], seed=1)
        sums = SummedGradient(rows=torch.arange(5), sums=torch.zeros(5, 10))
        for step, dtype in itertools.product(steps(), DTYPES):
            parts = _in(dtype, problem.parts())
            state = problem.state(step.rule.kind)
            for weight, own in ((problem.weight, None), (halves, None), (halves, noise)):
                kernel.update(weight, state=state, parts=parts, step=step, noise=own)
                if dtype is torch.float32:
                    kernel.apply(weight, state=state, gradient=sums, step=step, noise=own)
    few = make_problem(make_layout(dim=10, table_rows=[9], fields=[(FieldKind.SINGLE, 0)]), sizes=(9,))
    for step, dtype in itertools.product(steps(), DTYPES):  # too few lookups for a long run
        kernel.update(few.weight, state=few.state(step.rule.kind), parts=_in(dtype, few.parts()), step=step)
    # A batch on a GPU has ids of 32 bits; what a caller of these functions hands over may have 64.
    places = ((0, torch.int32), (1, torch.int64))
    for dim, fields, (gap, ids) in itertools.product(WIDTHS, (SINGLE, LISTS), places):
        layout = make_layout(dim=dim, table_rows=[40, 9, 3], fields=fields, gap=gap)
        problem = make_problem(layout, sizes=(40, 7))  # two batches: sources are written
        batches = tuple(_with_ids(each, ids) for each in problem.batches)
        problem = dataclasses.replace(problem, batches=batches)
        for row_format, dtype in itertools.product(FORMATS, DTYPES):
            if row_format.for_columns(dim) is not row_format:
                continue
            out = torch.zeros(40, layout.width, dtype=dtype)
            checked = dataclasses.replace(batches[0], are_checked=True)
            rows = row_format.encode(problem.weight)
            kernel.lookup(rows, layout=layout, lookups=checked, out=out, row_format=row_format)
        for dtype in DTYPES:
            kernel.sums_of_fixed_size(_in(dtype, problem.parts()))
            kernel.are_finite_sums(_in(dtype, problem.parts()))
            kernel.prepare(problem.grads[0].to(dtype), layouts=[layout], lookups=batches[0], dtype=torch.float32)
        if fields is LISTS and not gap:
            _late_updates(kernel, problem)
    for size in (1, 7, 33, 300, 5000, 70_000, 600_000):  # how far a search goes is a constant of kernels that sort
        for fields in ([(FieldKind.SINGLE, 0)], [(FieldKind.SUM, 0)]):
            problem = make_problem(make_layout(dim=8, table_rows=[9], fields=fields), sizes=(size,), longest=2)
            kernel.sums_of_fixed_size(problem.parts())


def _late_updates(kernel: TritonKernel, problem: Problem) -> None:
    """Updates of rows in FP32, and of BF16 rounded at random, as a step on one GPU asks for them."""
    noise = RowNoise([RowOrigin(table="a", first_row=0, num_rows=52)], seed=1)
    halves = RowFormat.BF16.encode(problem.weight)
    for kind, dtype in itertools.product(KINDS, DTYPES):
        late = Step(
            rule=UpdateRule(kind=kind),
            learning_rate=torch.tensor(0.1),
            scale=torch.tensor(0.5),
            number=torch.tensor(3),
            applies=torch.tensor(True),
        )
        for weight, own in ((problem.weight, None), (halves, noise)):
            parts = _in(dtype, problem.parts())
            kernel.update(weight, state=problem.state(kind), parts=parts, step=late, noise=own)


def _in(dtype: torch.dtype, parts: list[GradientPart]) -> list[GradientPart]:
    return [dataclasses.replace(part, grad=part.grad.to(dtype)) for part in parts]


def _with_ids(lookups: Lookups, dtype: torch.dtype) -> Lookups:
    rows = {name: getattr(lookups, name).to(dtype) for name in ("single", "values", "offsets")}
    return dataclasses.replace(lookups, **rows)


def of_messages() -> None:
    """Both directions in every format, dtype and width; with fields of 128 columns by every launch."""
    for wire, width, dtype in itertools.product(WireFormat, WIDTHS, (*DTYPES, torch.float16)):
        matrix = torch.zeros(9, 3 * width, dtype=dtype)
        code = wire.kernel_code(dtype)
        if not code:
            continue
        parts = [RowsForRank(Wire(wire, (width, width)), start, 3, (0, width)) for start in (0, 3)]
        places = places_of(parts, device=matrix.device)
        # Launches other than the first are for GPUs on which they were timed, with fields of 128 columns.
        for launch in CANDIDATES[LaunchPart.MESSAGES][: 1 if width != 128 else None]:
            _there_and_back(matrix, WireCode(code), places, launch)


def _there_and_back(matrix: Tensor, code: WireCode, places: WirePlaces, launch: Any) -> None:
    message = pack(matrix, code, places=places, launch=launch)
    unpack(message, code, places=places, out=torch.zeros_like(matrix), launch=launch)


def of_networks() -> None:
    """Cross layers, gated norms, propagation, dots and Wukong's norm."""
    for dtype, dim, launch in itertools.product(
        (*DTYPES, torch.float16), (48, 70, 3456), CANDIDATES[LaunchPart.CROSSED]
    ):
        x, x0 = torch.zeros(2, 20, dim)
        factor = torch.zeros(20, dim, dtype=dtype)
        for needs_cast in (False, True):
            add_crossed(x, x0, factor, needs_cast=needs_cast, launch=launch)
        for first in (None, torch.zeros_like(x)):
            add_crossed_backward(x, x0, factor, first_Bd=first)
    forms = itertools.product(
        Beside, (False, True), (False, True), (False, True), (*DTYPES, torch.float16), (50, 64, 512)
    )
    for beside, activates, is_affine, is_gated, dtype, dim in forms:
        if not is_gated and (activates or beside is not Beside.NOTHING):
            continue
        leaves: list[Tensor | None] = [torch.zeros(9, dim, dtype=dtype).requires_grad_() for _ in range(2)]
        leaves += [torch.zeros(dim).requires_grad_() if is_affine else None for _ in range(2)]
        if not is_gated:
            leaves[0] = None
        form = GatedNormForm(eps=1e-6, activates=activates, beside=beside)
        gated_norm_triton(*leaves, form=form).float().sum().backward()
    graph = Graph(
        offsets=torch.arange(6), columns=torch.zeros(5, dtype=torch.int32), weights=torch.ones(5), num_columns=5
    )
    samplings = [None] + [
        EdgeSampling(width=width, strategy=strategy, rescales=rescales, seed=seed)
        for width, strategy, rescales, seed in itertools.product((1, 7), EdgeStrategy, (False, True), (0, 7919))
    ]
    for sampling, dtype, has_rows, has_base in itertools.product(samplings, DTYPES, (False, True), (False, True)):
        for of_x, dim in itertools.product(DTYPES, (10, 64)) if sampling is None else ((dtype, 64),):
            propagate_triton(
                graph,
                torch.zeros(5, dim, dtype=of_x),
                rows=torch.arange(3) if has_rows else None,
                base=torch.zeros(3 if has_rows else 5, dim) if has_base else None,
                scale=0.5,
                dtype=dtype,
                sampling=sampling,
            )
    shape = DotShape(27, 128, passed=128, padding=1)  # of `ziggurat bench gpu`
    for of_first, of_rest, dtype in itertools.product(DTYPES, DTYPES, DTYPES):
        pieces = [torch.zeros(9, 128, dtype=of_first), torch.zeros(9, 26 * 128, dtype=of_rest)]
        for launch in candidates_of(27, 128, dtype=dtype).values():
            interaction_triton(pieces, shape=shape, dtype=dtype, launch=launch)
            gradient = torch.zeros(9, shape.width, dtype=dtype)
            interaction_backward_triton(pieces, shape=shape, gradient_BW=gradient, launch=launch)
    for dtype, launch in itertools.product((*DTYPES, torch.float16), _LAUNCHES.values()):
        sizes = ((9, 40, 128), (40, 8), (320,), (320,))
        inputs = [torch.zeros(each, dtype=dtype) for each in sizes]
        fm_norm_triton(inputs, torch.zeros(9, 320, dtype=dtype), eps=1e-5, launch=launch)


PARTS = {"tables": of_tables, "messages": of_messages, "networks": of_networks}


def main(part: str, architecture: int) -> None:
    """Compile one part."""
    with compiled_only(architecture) as asked:
        PARTS[part]()
    print(f"sm_{architecture}, {part}: {asked.total} specialisations ({asked})")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
