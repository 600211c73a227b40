"""How the Triton kernels of attention are launched: sizes of tiles, warps of a program, stages of its loads.

A kernel of attention holds a tile of rows (queries) and goes through tiles of columns (keys), or the other way round.
What is fastest depends on the width of heads, the dtype and whether there are biases, so the table below has an entry
for each part and kind. These numbers change the order in which products are summed, so they change last bits; on one
machine they are constants, and a result has the same bits on repeat.

`benchmarks/attention_gpu.py` times the candidates on the GPU that is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch

from ziggurat.ops.kernel_choice import power_of_two


class AttentionPart(StrEnum):
    """Kernels of attention that are launched alike."""

    FORWARD = "forward"
    QUERIES = "queries"  # backward, dQ
    KEYS = "keys"  # backward, dK and dV
    BIASES = "biases"  # backward, dw_pos and dw_time; rows and columns are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunch:
    """Say how one kernel is launched.

    Args:
        rows: queries of a tile; a power of two, 16 at least.
        columns: keys of a tile; the same.
        warps: of a program.
        stages: tiles that are loaded ahead, the one that is computed among them.
        registers: of a thread, at most, so that more programs are on a multiprocessor; None: as many as it takes.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None

    def __str__(self) -> str:
        said = f"{self.rows} x {self.columns}, {self.warps} warps, {self.stages} stages"
        return said if self.registers is None else f"{said}, {self.registers} registers"

    @property
    def options(self) -> dict[str, int]:
        """Options of Triton's compiler."""
        of_registers = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | of_registers


class AttentionKind(NamedTuple):
    """Name what decides, besides the part, how a kernel is launched."""

    products: str  # "half": BF16 or FP16; "tf32", "ieee": FP32
    width: int  # of a head, padded: 16, 32, 64, 128, 256
    is_biased: bool


def kind_of(dtype: torch.dtype, *, width: int, is_biased: bool, precision: str) -> AttentionKind:
    """The kind of a problem.

    Args:
        dtype: of q, k and v.
        width: of a head of q, k or v, the larger one.
        is_biased: by position or time.
        precision: of products of FP32: "tf32" or "ieee".
    """
    products = precision if dtype is torch.float32 else "half"
    return AttentionKind(products, power_of_two(width), is_biased)


HOPPER_BYTES = 227 * 1024  # of sm_90; sm_80 has 163 KB, sm_86, sm_89 and sm_120 have 99 KB
_SCRATCH_BYTES = 16 * 1024  # sums over warps, weights on their way from registers into a product
# Of the process, not of a thread: autograd goes through the backward pass of a GPU in a thread of its own.
_TRIED: dict[AttentionPart, AttentionLaunch] = {}


@contextmanager
def launched_as(tried: dict[AttentionPart, AttentionLaunch]) -> Iterator[None]:
    """Launch some parts otherwise than the table says, in all threads, for whoever measures or tests launches.

    Args:
        tried: of the parts that are meant, for every kind.
    """
    before = dict(_TRIED)
    _TRIED.update(tried)
    try:
        yield
    finally:
        _TRIED.clear()
        _TRIED.update(before)


def launch_of(part: AttentionPart, kind: AttentionKind, *, shared_bytes: int = HOPPER_BYTES) -> AttentionLaunch:
    """Return how a part is launched for a kind of problem.

    Args:
        part: the kernel.
        kind: of the problem.
        shared_bytes: shared memory that a program may have; where the table's launch needs more, fewer stages are
            loaded ahead, then tiles are halved.
    """
    # What is being measured may be a launch that does not fit: it is taken as it is.
    tried = _TRIED.get(part)
    if tried is not None:
        return tried
    launch = _of_table(part, kind)
    while needed_bytes(part, kind, launch) > shared_bytes:
        if launch.stages > 1:
            launch = replace(launch, stages=launch.stages - 1)
        elif launch.rows > 16 or launch.columns > 16:
            launch = replace(launch, rows=max(16, launch.rows // 2), columns=max(16, launch.columns // 2))
        else:
            return launch
    return launch


def needed_bytes(part: AttentionPart, kind: AttentionKind, launch: AttentionLaunch) -> int:
    """Return the shared memory of a program, at most: tiles that stay, tiles that are loaded ahead, and scratch."""
    row_bytes = kind.width * (2 if kind.products == "half" else 4)
    staying = launch.rows
    passing = launch.columns
    if part is AttentionPart.KEYS:
        staying, passing = passing, staying
    # Forward keeps queries; backward keeps their gradients beside them, or keys and values.
    num_staying = 1 if part is AttentionPart.FORWARD else 2
    scratch = max(launch.rows * launch.columns * 2, _SCRATCH_BYTES)
    return row_bytes * (num_staying * staying + launch.stages * 2 * passing) + scratch


def _of_table(part: AttentionPart, kind: AttentionKind) -> AttentionLaunch:
    if kind.products == "ieee":
        return _ieee(part, kind)
    # Measured by `benchmarks/attention_gpu.py` on an H100 (2026-11-27): heads of 64 and 32 with biases, of 128 without;
    # before, heads of 64 without. What stands for other kinds is that of the next one that was measured.
    wide = kind.width >= 128
    if kind.width > 128 or kind.products == "tf32":
        return AttentionLaunch(rows=64 if kind.width <= 64 else 32, columns=32, warps=4, stages=2)
    if kind.is_biased:
        return _biased(part, is_wide=wide, is_narrow=kind.width <= 32)
    if part is AttentionPart.FORWARD:
        if wide:
            return AttentionLaunch(rows=128, columns=64, warps=8, stages=2, registers=128)
        return AttentionLaunch(rows=128, columns=64, warps=4, stages=3)
    return AttentionLaunch(rows=64, columns=64, warps=4, stages=2)


def _biased(part: AttentionPart, *, is_wide: bool, is_narrow: bool) -> AttentionLaunch:
    """Return the launch of half-precision products with biases, for heads of at most 128 numbers."""
    if is_wide:  # not timed on a GPU
        if part is AttentionPart.FORWARD:
            return AttentionLaunch(rows=128, columns=64, warps=8, stages=2)
        return AttentionLaunch(rows=32 if part is AttentionPart.KEYS else 64, columns=64, warps=8, stages=2)
    if part is AttentionPart.BIASES:
        if is_narrow:
            # Tiles of 32 are a tenth faster at 200 events, but no tensor core of Hopper multiplies them in one go.
            return AttentionLaunch(rows=64, columns=64, warps=8, stages=1, registers=128)
        return AttentionLaunch(rows=64, columns=64, warps=8, stages=2)
    if part is AttentionPart.KEYS:
        if is_narrow:
            return AttentionLaunch(rows=32, columns=64, warps=4, stages=2, registers=168)
        return AttentionLaunch(rows=64, columns=64, warps=4, stages=2)
    # Three programs a multiprocessor hide each other's waits; with all the registers they ask for there are two.
    return AttentionLaunch(rows=64, columns=64, warps=4, stages=2, registers=168)


def _ieee(part: AttentionPart, kind: AttentionKind) -> AttentionLaunch:
    """Products of FP32 by the arithmetic units: small tiles, whose sums stay in registers."""
    tile = 32 if kind.width <= 128 else 16
    return AttentionLaunch(rows=tile, columns=tile, warps=4, stages=1 if part is AttentionPart.BIASES else 2)
