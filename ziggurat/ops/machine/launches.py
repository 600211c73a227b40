"""How Triton's kernels are launched on each family of GPUs: numbers that change their speed, never a bit.

    numbers       FP32 numbers that a program holds: its tile has numbers / D rows
    warps         of a program
    reads_ahead   rows of a list, or gradients of a run, that are read before the first is added

`launches.json` beside this file has an entry for each family of GPUs that was measured (`sm_80`, `sm_90`, …: the major
number of the compute capability), which says when and on what. All others, and the interpreter, take `DEFAULT`.
`ziggurat bench gpu --tune FILE` times the candidates on the GPU that is there and writes the file again with its
family; doctor and the start-up report say which launches are used.

What changes the order of a sum is no choice and stands beside its kernel: the length of chunks and of the longest run
(`ops/lookup/triton/runs.py`), the lanes that sum a chunk, columns of a product, rows whose gradients are one partial
sum of a bias. Dots, attention and Wukong's norm sum in an order that the compiler picks by these numbers, so they are
not in the table. Kernels of the table let no thread decide: where they sum across threads, the tree is written down
(`_sum_of_columns` in `ops/lookup/triton/update_kernels.py`).

`tests/ops/machine/test_launches.py` holds every candidate to the bits of the default by Triton's interpreter, compiles
it for sm_80, sm_90 and sm_100, and refuses one that spills in a loop or whose code has a sum that threads share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from ziggurat.config import JSON
from ziggurat.errors import DataError
from ziggurat.files import Format, Seal
from ziggurat.ops.kernel_choice import power_of_two

LAUNCHES = Format(
    name="ziggurat.launches",
    what="a table of launches",
    seal=Seal.EDITABLE,
    ways_out=("write it anew: ziggurat bench gpu --tune FILE", "install the package again"),
)
STORED = Path(__file__).with_name("launches.json")
_MAX_ROWS = 256


class LaunchPart(StrEnum):
    """Kernels that are launched alike."""

    LOOKUP = "lookup"
    UPDATE = "update"  # of rows; sorting and the sums of chunks have constants of their own
    MESSAGES = "messages"
    CROSSED = "crossed"  # x + x₀ ⊙ f of cross layers, forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch settings of the kernels of one part.

    Args:
        numbers: FP32 numbers that a program holds; a power of two.
        warps: of a program; a power of two.
        reads_ahead: rows that are read before the first is added; 1 where there are no lists.
    """

    numbers: int
    warps: int
    reads_ahead: int = 1

    def __str__(self) -> str:
        ahead = f", {self.reads_ahead} reads ahead" if self.reads_ahead > 1 else ""
        return f"{self.numbers:,} numbers, {self.warps} warps{ahead}"


DEFAULT = {
    LaunchPart.LOOKUP: Launch(numbers=2048, warps=4, reads_ahead=4),
    LaunchPart.UPDATE: Launch(numbers=2048, warps=4, reads_ahead=4),
    LaunchPart.MESSAGES: Launch(numbers=2048, warps=4),
    LaunchPart.CROSSED: Launch(numbers=2048, warps=4),
}
_TILES = ((2048, 4), (1024, 4), (2048, 8), (4096, 8))  # numbers, warps
_AHEAD = {4: _TILES, 2: _TILES, 8: ((1024, 4),)}  # 2,048 numbers spill: in 4 warps, or in 8 for sm_80
CANDIDATES: dict[LaunchPart, tuple[Launch, ...]] = {
    part: tuple(
        Launch(numbers=numbers, warps=warps, reads_ahead=ahead)
        for ahead, tiles in (_AHEAD if DEFAULT[part].reads_ahead > 1 else {1: _TILES}).items()
        for numbers, warps in tiles
    )
    for part in LaunchPart
}


@dataclass(frozen=True, kw_only=True)
class FamilyLaunches:
    """Launch settings that one family of GPUs takes.

    Args:
        launches: of each part.
        measured: when and on what: date, gpu, torch, triton, and microseconds of each candidate.
    """

    launches: Mapping[LaunchPart, Launch]
    measured: Mapping[str, JSON]


def family_of(device: torch.device) -> str:
    """The family of a device: "sm_90" for every GPU of compute capability 9; "no GPU" for other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "no GPU"
    return f"sm_{torch.cuda.get_device_capability(device)[0]}0"


@functools.cache
def stored_launches() -> dict[str, FamilyLaunches]:
    """The table of the package, by family; read once a process."""
    return read_launches(STORED)


def read_launches(path: Path) -> dict[str, FamilyLaunches]:
    """A table, by family.

    Raises:
        DataError: it is damaged, or has a launch that is no candidate.
    """
    families = {}
    for name, entry in LAUNCHES.read(path)["families"].items():
        launches = {part: _launch(entry, part, where=f"{path}, {name}") for part in LaunchPart}
        if entry["measured"]:  # first tables had the default, too, for families that nobody had measured
            families[name] = FamilyLaunches(launches=launches, measured=entry["measured"])
    return families


def write_launches(path: Path, families: Mapping[str, FamilyLaunches]) -> Path:
    """Write the launches of families of devices as the file that `read_launches` takes; gives its path."""
    entries = {
        name: {"measured": each.measured} | {part.value: dataclasses.asdict(each.launches[part]) for part in LaunchPart}
        for name, each in families.items()
    }
    return LAUNCHES.write(path, {"families": entries})


@functools.cache
def launches_on(device: torch.device) -> Mapping[LaunchPart, Launch]:
    """Return the launch settings of each part on a device; looked up once a process."""
    entry = stored_launches().get(family_of(device))
    return DEFAULT if entry is None else entry.launches


def launch_line(device: torch.device) -> str:
    """Say whether the launches of a device were measured, where, and what they are."""
    family = family_of(device)
    entry = stored_launches().get(family)
    if entry is None:
        launches = DEFAULT
        origin = "nobody measured this family, so it takes the default"
    else:
        launches = entry.launches
        origin = f"measured on {entry.measured.get('gpu', 'a GPU')}, {entry.measured.get('date', 'no date')}"
    same: dict[str, list[str]] = {}
    for part, launch in launches.items():
        same.setdefault(str(launch), []).append(part.value)
    return f"{family}: {origin}; " + "; ".join(f"{', '.join(parts)}: {text}" for text, parts in same.items())


def tile_rows(dim: int, *, numbers: int) -> int:
    """Return how many rows of D numbers a program holds at a time: enough reads in flight, few enough registers."""
    return max(1, min(_MAX_ROWS, numbers // power_of_two(dim, least=1)))


def _launch(entry: Mapping[str, object], part: LaunchPart, *, where: str) -> Launch:
    numbers = entry.get(part.value)
    # Nothing but candidates: a test has held each of them to the bits of the default.
    found = next((each for each in CANDIDATES[part] if dataclasses.asdict(each) == numbers), None)
    if found is None:
        known = " | ".join(str(each) for each in CANDIDATES[part])
        raise DataError(
            expected=f"a launch of {part.value!r} that was proved: {known}",
            found=repr(numbers),
            where=where,
            ways_out=LAUNCHES.ways_out,
        )
    return found
