"""The Triton kernels of embedding tables as sm_90 runs them: nothing spills, and rows move 16 bytes at a time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.ops.lookup.assembly import Assembly, assemble
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two
from ziggurat.ops.lookup.triton.kernel import BOUNDED, LOOKUP_KERNELS
from ziggurat.ops.lookup.triton.runs import LONG_RUN, UPDATE_KERNELS, chunk_lanes
from ziggurat.ops.machine import launches
from ziggurat.ops.row_formats import RowFormat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or is_interpreted(), reason="no package triton, or it is interpreted"
    ),
    pytest.mark.parametrize("dim", [64, 96, 128, 256]),
]


def sizes(dim: int) -> dict[str, int]:
    return {"dim": dim, "padded_dim": power_of_two(dim, least=1), "align": 16}


def tile_rows(dim: int) -> int:
    """Of the default; other launches are in tests/ops/machine/test_launches.py."""
    return launches.tile_rows(dim, numbers=launches.DEFAULT[launches.LaunchPart.LOOKUP].numbers)


@pytest.mark.parametrize("stored", ["*fp32", "*i16"])
@pytest.mark.parametrize("has_lists", [False, True])
def test_lookup(dim: int, stored: str, has_lists: bool, tmp_path: Path) -> None:
    pointers = dict.fromkeys(("slots", "single", "values", "offsets"), "*i64")
    types = {"weight": stored, "out": "*bf16", "flag": "*i32", "width": "i32:16", **pointers}
    types |= dict.fromkeys(("batch_size", "num_offsets", "num_values", "least_values"), "i32")
    constants = {**sizes(dim), "samples": tile_rows(dim), "has_lists": has_lists, "unroll": 4}
    constants |= {"row_format": "numbers", "row_bytes": 4 * dim}
    found = assemble(kernels_of(LOOKUP_KERNELS).lookup_kernel, tmp_path, types=types, constants=constants)
    assert found.spilled_bytes == 0
    row_bytes = (4 if stored == "*fp32" else 2) * tile_rows(dim) * power_of_two(dim) // 128  # of a thread
    assert found.wide("LDG") == row_bytes // 16 * (4 if has_lists else 1)
    assert found.wide("STG") >= 1
    assert is_wide(found, "STG", but=("STG.E",))  # the flag


@pytest.mark.parametrize("row_format", [RowFormat.INT8, RowFormat.INT4])
def test_lookup_of_codes(dim: int, row_format: RowFormat, tmp_path: Path) -> None:
    """A row begins at a multiple of 4 bytes, so 4 bytes are read at a time."""
    pointers = dict.fromkeys(("slots", "single", "values", "offsets"), "*i64")
    types = {"weight": "*u8", "out": "*bf16", "flag": "*i32", "width": "i32:16", **pointers}
    types |= dict.fromkeys(("batch_size", "num_offsets", "num_values", "least_values"), "i32")
    constants: dict[str, Any] = {**sizes(dim), "samples": tile_rows(dim), "has_lists": False, "unroll": 4}
    constants |= {"row_format": row_format.value, "row_bytes": row_format.row_bytes(dim)}
    kernel = kernels_of(LOOKUP_KERNELS).lookup_kernel
    found = assemble(kernel, tmp_path, types=types, constants=constants, enable_fp_fusion=False)
    assert found.spilled_bytes == 0
    assert is_wide(found, "STG", but=("STG.E",))
    numbers = tile_rows(dim) * power_of_two(dim) // 128  # of a thread
    assert found.accesses["LDG.E"] >= numbers * (1 if row_format is RowFormat.INT8 else 0.5) // 4, found


@pytest.mark.parametrize("rule", ["sum", "sgd", "adagrad", "adam"])
@pytest.mark.parametrize("rounding", ["none", "stochastic"])
def test_apply(dim: int, rule: str, rounding: str, tmp_path: Path) -> None:
    if rule == "sum" and rounding != "none":
        pytest.skip("sums are not rounded")
    numbers = ("learning_rate", "scale", "eps", "weight_decay", "rest1", "rest2")
    integers = ("rows", "sources", "starts", "num_runs", "first_chunks")
    types: dict[str, str] = {**dict.fromkeys(numbers, "fp32"), **dict.fromkeys(integers, "*i32")}
    types |= dict.fromkeys(("first_state", "second_state", "partials", "sums"), "*fp32")
    types |= {"weight": "*fp32" if rounding == "none" else "*i16", "vectors": "*bf16", "applies": "*i1"}
    types |= {"summed_rows": "*i64", "origins": "*i64", "num_origins": "i32", "step_number": "i32", "most_runs": "i32"}
    flags = dict.fromkeys(("size_there", "scale_there", "applies_there", "number_there"), False)
    constants: dict[str, Any] = {**sizes(dim), **flags, "rule": rule, "rounding": rounding, "is_summed": False}
    constants |= {"has_decay": True, "has_long": True, "long_run": LONG_RUN, "tile": tile_rows(dim), "unroll": 4}
    kernel = kernels_of(UPDATE_KERNELS).apply_kernel
    found = assemble(kernel, tmp_path, types=types, constants=constants, enable_fp_fusion=False)
    assert found.spilled_bytes == 0
    assert found.wide("LDG") >= 4 + 4 + (rule != "sum")  # gradients, sums of long runs, weights
    assert is_wide(found, "STG", but=("STG.E.64",) if rule == "sum" else ("STG.E",))  # numbers of rows; Adagrad's sum


@pytest.mark.parametrize("stored", ["*fp32", "*bf16"])
@pytest.mark.parametrize("has_lists", [False, True])
def test_check_of_gradients(dim: int, stored: str, has_lists: bool, tmp_path: Path) -> None:
    types = {"grad": stored, "verdict": "*i1", "batch_size": "i32", "width": "i32:16", "bound": "fp32"}
    types |= dict.fromkeys(("slots", "single", "offsets"), "*i64")
    samples = launches.tile_rows(dim, numbers=BOUNDED.numbers)
    constants = {**sizes(dim), "samples": samples, "has_lists": has_lists}
    kernel = kernels_of(UPDATE_KERNELS).bounded_kernel
    found = assemble(kernel, tmp_path, types=types, constants=constants, num_warps=BOUNDED.warps)
    assert found.spilled_bytes == 0
    row_bytes = (4 if stored == "*fp32" else 2) * samples * power_of_two(dim) // (32 * BOUNDED.warps)  # of a thread
    assert found.wide("LDG") == row_bytes // 16


def test_sums_of_long_runs(dim: int, tmp_path: Path) -> None:
    types = {"vectors": "*bf16", "partials": "*fp32"} | dict.fromkeys(("sources", "pieces", "num_chunks"), "*i32")
    constants = {**sizes(dim), "tile": chunk_lanes(dim)}
    kernels = kernels_of(UPDATE_KERNELS)
    found = assemble(kernels.partials_kernel, tmp_path, types=types, constants=constants)
    assert found.spilled_bytes == 0
    assert found.wide("LDG")
    combine = {name: each for name, each in constants.items() if name != "align"}
    found = assemble(kernels.combine_kernel, tmp_path, types=types, constants=combine)
    assert found.spilled_bytes == 0
    assert found.wide("LDG")


def is_wide(found: Assembly, kind: str, *, but: tuple[str, ...]) -> bool:
    """Whether every access of a kind moves 16 bytes, but those named."""
    return all(name.endswith(".128") or name in but for name in found.accesses if name.startswith(kind))
