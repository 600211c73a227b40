"""`ziggurat bench gpu --tune FILE`: time every candidate launch on the GPU that is there, and write the table with it.

    lookup     26 fields of single rows and 4 of lists, one storage, rows by a Zipf law, written in BF16
    update     row-wise Adagrad of the same lookups from gradients in BF16; the sort is the same for all
    messages   26 fields of 128 columns in FP8, packed and unpacked
    crossed    the forward pass of one cross layer, 3,456 columns

Candidates take turns, round by round. The one whose median ratio to the default is smallest is taken, and the default
stays where no candidate is 2 % faster. All of them give the same bits (`tests/ops/machine/test_launches.py`), so that
a table changes no run. FILE keeps its entries of other families, and a family that it does not have yet joins it: give
the table of the package, `ziggurat/ops/machine/launches.json`, to take part in what everybody gets.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contest import Machine, in_turns
from benchmarks.harness import say
from ziggurat.ops.interactions.cross_triton import add_crossed
from ziggurat.ops.lookup import FieldKind, GradientPart, LookupLayout, Step, TableOptimizerKind, UpdateRule
from ziggurat.ops.lookup.choose import BatchShape, synthetic_lookups
from ziggurat.ops.lookup.layout import FieldSlot
from ziggurat.ops.lookup.triton import TritonKernel
from ziggurat.ops.machine.launches import (
    CANDIDATES,
    DEFAULT,
    STORED,
    FamilyLaunches,
    Launch,
    LaunchPart,
    family_of,
    read_launches,
    write_launches,
)
from ziggurat.ops.wire import WireCode, pack, unpack
from ziggurat.parallel.exchange.packing import RowsForRank, places_of
from ziggurat.parallel.exchange.wire import Wire, WireFormat

_WORTH = 0.98  # of the default's time: less is noise
_Work = Callable[[Launch], object]


def write_tuned(machine: Machine, path: Path) -> str:
    """Measure, write the table, and say what was taken."""
    entry, family = tuned(machine), family_of(machine.device)
    table = read_launches(path if path.is_file() else STORED)
    write_launches(path, table | {family: entry})
    taken = "; ".join(f"{part.value}: {launch}" for part, launch in entry.launches.items())
    return f"{family} is in {path}: {taken}"


def tuned(machine: Machine) -> FamilyLaunches:
    """The fastest launch of each part, with the microseconds of all."""
    launches, times = dict[LaunchPart, Launch](), dict[str, dict[str, float]]()
    for part, make in _PARTS.items():
        say(f"  launches of {part.value}")
        work = make(machine)
        calls = {str(launch): functools.partial(work, launch) for launch in CANDIDATES[part]}
        on_gpu: dict[str, list[float]] = {}
        seconds = in_turns(machine, calls, warmups=3 if machine.is_gpu else 0, gpu=on_gpu)
        seconds = on_gpu or seconds
        launches[part] = fastest(dict(zip(CANDIDATES[part], seconds.values(), strict=True)), default=DEFAULT[part])
        times[part.value] = {name: round(1e6 * statistics.median(each), 1) for name, each in seconds.items()}
    return FamilyLaunches(launches=launches, measured=_facts(machine) | {"microseconds": times})


def fastest(seconds: Mapping[Launch, list[float]], *, default: Launch) -> Launch:
    """The launch with the smallest median ratio to the default, round by round; none is 2 % faster: the default."""
    ratios = {
        launch: statistics.median(mine / base for mine, base in zip(found, seconds[default], strict=True))
        for launch, found in seconds.items()
    }
    best = min(ratios, key=lambda launch: ratios[launch])
    return best if ratios[best] <= _WORTH else default


def _facts(machine: Machine) -> dict[str, Any]:
    name = torch.cuda.get_device_properties(machine.device).name if machine.is_gpu else "none"
    return {
        "gpu": name,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
    }


class _Tables:
    """One storage with what looks it up and updates it."""

    def __init__(self, machine: Machine) -> None:
        dim, rows, size = (128, 1_000_000, 65_536) if machine.is_gpu and not machine.quick else (16, 500, 8)
        num_single, num_lists = (26, 4) if machine.is_gpu else (2, 1)
        kinds = [FieldKind.SINGLE] * num_single + [FieldKind.SUM] * num_lists
        slots = tuple(
            FieldSlot(
                name=f"f{number}",
                kind=kind,
                index=number if kind is FieldKind.SINGLE else number - num_single,
                table=f"t{number}",
                first_row=number * rows,
                num_rows=rows,
                column=number * dim,
            )
            for number, kind in enumerate(kinds)
        )
        self.layout = LookupLayout(dim=dim, width=len(slots) * dim, slots=slots)
        generator = torch.Generator().manual_seed(0)
        lookups = synthetic_lookups(self.layout, shape=BatchShape(batch_size=size), generator=generator)
        moved = {name: getattr(lookups, name).to(machine.device) for name in ("single", "values", "offsets")}
        self.lookups = dataclasses.replace(lookups, **moved)
        self.weight = torch.zeros(len(slots) * rows, dim, device=machine.device)
        self.state = {"sum": torch.ones(len(self.weight), device=machine.device)}
        self.out = torch.zeros(size, self.layout.width, device=machine.device, dtype=torch.bfloat16)
        self.step = Step(rule=UpdateRule(kind=TableOptimizerKind.ROWWISE_ADAGRAD), learning_rate=1e-3)
        self._kernels: dict[tuple[LaunchPart, Launch], TritonKernel] = {}

    def kernel(self, part: LaunchPart, launch: Launch) -> TritonKernel:
        """A kernel for each launch, which keeps what it has copied to the device."""
        if (part, launch) not in self._kernels:
            self._kernels[part, launch] = TritonKernel(launches=DEFAULT | {part: launch})
        return self._kernels[part, launch]

    def look_up(self, launch: Launch) -> None:
        """Write all fields."""
        kernel = self.kernel(LaunchPart.LOOKUP, launch)
        kernel.lookup(self.weight, layout=self.layout, lookups=self.lookups, out=self.out)

    def update(self, launch: Launch) -> None:
        """Apply a gradient, which is the last output: what numbers stand there costs nothing."""
        part = GradientPart(layout=self.layout, lookups=self.lookups, grad=self.out)
        kernel = self.kernel(LaunchPart.UPDATE, launch)
        kernel.update(self.weight, state=self.state, parts=[part], step=self.step)


def _messages(machine: Machine) -> _Work:
    rows, width = (65_536, 128) if machine.is_gpu and not machine.quick else (16, 16)
    matrix = torch.randn(rows, 26 * width, device=machine.device)
    part = RowsForRank(Wire(WireFormat.FP8, (width,) * 26), 0, rows, tuple(range(0, 26 * width, width)))
    places, back = places_of([part], device=machine.device), torch.empty_like(matrix)

    def work(launch: Launch) -> object:
        message = pack(matrix, WireCode.FP8, places=places, launch=launch)
        return unpack(message, WireCode.FP8, places=places, out=back, launch=launch)

    return work


def _crossed(machine: Machine) -> _Work:
    size, dim = (65_536, 3_456) if machine.is_gpu and not machine.quick else (64, 48)
    crossed, inputs = torch.randn(2, size, dim, device=machine.device)
    factor = torch.randn(size, dim, device=machine.device, dtype=torch.bfloat16)
    return lambda launch: add_crossed(crossed, inputs, factor, needs_cast=True, launch=launch)


_PARTS: dict[LaunchPart, Callable[[Machine], _Work]] = {
    LaunchPart.LOOKUP: lambda machine: _Tables(machine).look_up,
    LaunchPart.UPDATE: lambda machine: _Tables(machine).update,
    LaunchPart.MESSAGES: _messages,
    LaunchPart.CROSSED: _crossed,
}
