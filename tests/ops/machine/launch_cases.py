"""Every candidate of the table of launches against the default, bit for bit; run by test_launches.py.

TRITON_INTERPRET=1 python -m tests.ops.machine.launch_cases cpu
python -m tests.ops.machine.launch_cases cuda
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.contest import Machine
from benchmarks.gpu.tune import tuned, write_tuned
from tests.ops.lookup import triton_cases
from tests.ops.lookup.triton_cases import FIELDS, TABLES, equal, looked_up, moved, steps, updated
from tests.ops.lookup_problems import Problem, make_layout, make_problem
from ziggurat.ops.interactions.cross_triton import add_crossed
from ziggurat.ops.lookup.triton import TritonKernel, runs
from ziggurat.ops.machine.launches import CANDIDATES, DEFAULT, Launch, LaunchPart, family_of, read_launches
from ziggurat.ops.wire import WireCode, pack, unpack
from ziggurat.parallel.exchange.packing import RowsForRank, places_of
from ziggurat.parallel.exchange.wire import Wire, WireFormat


def case_tables() -> None:
    """Lookups, sums, fused and two-step updates of every rule: lists, long runs, widths beside powers of two."""
    for dim in (3, 96):
        layout = make_layout(dim=dim, table_rows=TABLES, fields=FIELDS)
        problem = moved(make_problem(layout, sizes=(24,), skew=True, seed=dim, longest=9))
        wanted = _of_tables(TritonKernel(launches=DEFAULT), problem)
        for lookup, update in zip(CANDIDATES[LaunchPart.LOOKUP], CANDIDATES[LaunchPart.UPDATE], strict=True):
            chosen = dict(DEFAULT) | {LaunchPart.LOOKUP: lookup, LaunchPart.UPDATE: update}
            equal(_of_tables(TritonKernel(launches=chosen), problem), wanted)


def _of_tables(kernel: TritonKernel, problem: Problem) -> tuple[Tensor, ...]:
    found = [looked_up(kernel, problem, problem.batches[0]), kernel.sum_gradients(problem.parts()).sums]
    for step in steps():
        found += [*updated(kernel, problem, step), *updated(kernel, problem, step, fused=False)]
    return tuple(found)


def case_messages() -> None:
    """Both directions in every format."""
    device, width = triton_cases.DEVICE, 24
    rows = torch.randn(70, 2 * width, generator=torch.Generator().manual_seed(0)).to(device)
    for wire in WireFormat:
        kernel_code = wire.kernel_code(rows.dtype)
        if not kernel_code:
            continue
        parts = [RowsForRank(Wire(wire, (width, width)), 0, 70, (0, width))]
        places, code, found = places_of(parts, device=device), WireCode(kernel_code), []
        for launch in _flat(LaunchPart.MESSAGES):
            message = pack(rows, code, places=places, launch=launch)
            back = unpack(message, code, places=places, out=torch.zeros_like(rows), launch=launch)
            found.append((message, back))
        for each in found[1:]:
            equal(each, found[0])


def case_crossed() -> None:
    """The forward pass of cross layers, with a product in BF16 behind it."""
    drawn = torch.randn(3, 90, 70, generator=torch.Generator().manual_seed(0)).to(triton_cases.DEVICE)
    x, x0, factor = drawn[0], drawn[1], drawn[2].bfloat16()
    found = [add_crossed(x, x0, factor, needs_cast=True, launch=launch) for launch in _flat(LaunchPart.CROSSED)]
    for each in found[1:]:
        equal(each, found[0])


def case_tuner() -> None:
    """`ziggurat bench gpu --tune` runs every candidate of every part, and its table is read again."""
    machine = Machine(device=triton_cases.DEVICE, quick=True)
    entry = tuned(machine)
    assert entry.measured is not None
    for part in LaunchPart:
        assert entry.launches[part] in CANDIDATES[part]
        assert len(entry.measured["microseconds"][part.value]) == len(CANDIDATES[part])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches.json"
        assert "lookup" in write_tuned(machine, path)
        assert family_of(machine.device) in read_launches(path)


def _flat(part: LaunchPart) -> Iterator[Launch]:
    yield DEFAULT[part]
    yield from CANDIDATES[part][1:]


def main(device: str) -> None:
    """Run all cases."""
    triton_cases.DEVICE = torch.device(device)
    if device == "cpu":
        runs.CHUNK = 16
        runs.LONG_RUN = 20
    for case in (case_tables, case_messages, case_crossed, case_tuner):
        case()
        print(case.__name__, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
