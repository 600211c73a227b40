"""Compile the kernels of embedding tables for every row format, width, dtype and kind of field that a table can have.

A compiler fails on single specialisations: Triton 3.6 compiled lookups of lists in INT8 at D = 64 and 256, not at 96
and 128. So nothing here is a sample: each test compiles one kernel at every width, for three families of GPUs, with the
launches that the family takes.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ops.lookup.assembly import compiled
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two
from ziggurat.ops.lookup.triton.kernel import BOUNDED, LOOKUP_KERNELS
from ziggurat.ops.lookup.triton.runs import CHUNK, LONG_RUN, UPDATE_KERNELS, chunk_lanes
from ziggurat.ops.machine.launches import DEFAULT, Launch, LaunchPart, stored_launches, tile_rows
from ziggurat.ops.row_formats import RowFormat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or is_interpreted(), reason="no package triton, or it is interpreted"
    ),
    pytest.mark.parametrize("architecture", [80, 90, 100]),
]

WIDTHS = (2, 3, 8, 10, 16, 24, 32, 50, 64, 96, 128, 256)  # of recipes, of benchmarks and of the cases of tests
STORED = {
    RowFormat.FP32: ("numbers", "*fp32"),
    RowFormat.BF16: ("numbers", "*i16"),
    RowFormat.INT8: ("int8", "*u8"),
    RowFormat.INT4: ("int4", "*u8"),
}


def sizes(dim: int) -> dict[str, int]:
    """Return the constants that follow from a width; columns of a table of one width are multiples of it."""
    return {"dim": dim, "padded_dim": power_of_two(dim, least=2), "align": min(16, dim & -dim)}


def launch_of(part: LaunchPart, architecture: int) -> Launch:
    """Return what the family takes: measured, or the default."""
    family = stored_launches().get(f"sm_{architecture}")
    return (DEFAULT if family is None else family.launches)[part]


def lookups() -> Iterator[tuple[int, RowFormat, bool, str]]:
    """Return every width, format, kind of field and dtype of the result; INT8 and INT4 where they save bytes."""
    for dim, row_format, has_lists, out in itertools.product(WIDTHS, STORED, (False, True), ("*bf16", "*fp32")):
        if row_format.for_columns(dim) is row_format:
            yield dim, row_format, has_lists, out


@pytest.mark.parametrize("row_format", STORED, ids=str)
def test_lookups(row_format: RowFormat, architecture: int) -> None:
    launch = launch_of(LaunchPart.LOOKUP, architecture)
    code, stored = STORED[row_format]
    for dim, each, has_lists, out in lookups():
        if each is not row_format:
            continue
        types = dict.fromkeys(("slots", "single", "values", "offsets"), "*i64")
        types |= {"weight": stored, "out": out, "flag": "*i32", "width": "i32"}
        types |= dict.fromkeys(("batch_size", "num_offsets", "num_values", "least_values"), "i32")
        constants: dict[str, Any] = sizes(dim) | {"has_lists": has_lists, "unroll": launch.reads_ahead}
        constants |= {"samples": tile_rows(dim, numbers=launch.numbers)}
        constants |= {"row_format": code, "row_bytes": row_format.row_bytes(dim)}
        compiled(
            kernels_of(LOOKUP_KERNELS).lookup_kernel,
            types=types,
            constants=constants,
            architecture=architecture,
            num_warps=launch.warps,
            enable_fp_fusion=not row_format.keeps_rows_whole,
        )


def test_gradients_are_checked(architecture: int) -> None:
    for dim, grad, has_lists in itertools.product(WIDTHS, ("*bf16", "*fp32"), (False, True)):
        types = {"grad": grad, "verdict": "*i1", "batch_size": "i32", "width": "i32", "bound": "fp32"}
        types |= dict.fromkeys(("slots", "single", "offsets"), "*i64")
        constants = sizes(dim) | {"samples": tile_rows(dim, numbers=BOUNDED.numbers), "has_lists": has_lists}
        check = kernels_of(UPDATE_KERNELS).bounded_kernel
        compiled(check, types=types, constants=constants, architecture=architecture, num_warps=BOUNDED.warps)


def test_means_are_divided_and_long_runs_are_summed(architecture: int) -> None:
    launch = launch_of(LaunchPart.LOOKUP, architecture)
    for dim in WIDTHS:
        constants = sizes(dim) | {"samples": tile_rows(dim, numbers=launch.numbers)}
        types = {"slots": "*i64", "offsets": "*i64", "grad": "*fp32", "batch_size": "i32", "width": "i32"}
        divide = kernels_of(LOOKUP_KERNELS).divide_means_kernel
        compiled(divide, types=types, constants=constants, architecture=architecture, num_warps=launch.warps)
        kernels = kernels_of(UPDATE_KERNELS)
        constants = sizes(dim) | {"tile": chunk_lanes(dim)}
        types = {"partials": "*fp32"} | dict.fromkeys(("sources", "pieces", "num_chunks"), "*i32")
        for vectors in ("*bf16", "*fp32"):
            own = types | {"vectors": vectors}
            compiled(kernels.partials_kernel, types=own, constants=constants, architecture=architecture)
        combine = {name: each for name, each in constants.items() if name != "align"}
        compiled(kernels.combine_kernel, types=types, constants=combine, architecture=architecture)


def test_sorted_lookups_are_cut_into_runs(architecture: int) -> None:
    kernels = kernels_of(UPDATE_KERNELS)
    for rows, sources, has_long in itertools.product(("*i32", "*i64"), ("*i32", "*i64"), (False, True)):
        none = "i32" if rows == "*i32" else "i64"
        constants: dict[str, Any] = {"has_long": has_long, "long_run": LONG_RUN, "chunk": CHUNK, "block": 512}
        types = dict.fromkeys(("ends", "counts", "lasts", "starts", "first_chunks", "pieces"), "*i32")
        types |= {"rows": rows, "rows_of_runs": rows, "order": "*i64", "sources": sources, "sorted_sources": sources}
        types |= {"num_lookups": "i32", "none": none}
        types |= {"slots": "*i64", "batch_size": "i32", "width": "i32", "first_source": "i32"}
        counting = constants | {"steps": 7}
        compiled(kernels.count_kernel, types=types, constants=counting, architecture=architecture)
        for has_sources in (False, True):
            own = constants | {"has_sources": has_sources, "align": 16}
            compiled(kernels.cut_kernel, types=types, constants=own, architecture=architecture)


@pytest.mark.parametrize("rounding", ["none", "stochastic"])
@pytest.mark.parametrize("rule", ["sum", "sgd", "adagrad", "adam"])
def test_updates(rule: str, rounding: str, architecture: int) -> None:
    if rule == "sum" and rounding != "none":
        pytest.skip("sums are not rounded")
    launch = launch_of(LaunchPart.UPDATE, architecture)
    numbers = ("learning_rate", "scale", "eps", "weight_decay", "rest1", "rest2")
    integers = ("rows", "sources", "starts", "num_runs", "first_chunks")
    types: dict[str, str] = {**dict.fromkeys(numbers, "fp32"), **dict.fromkeys(integers, "*i32")}
    types |= dict.fromkeys(("first_state", "second_state", "partials", "sums"), "*fp32")
    types |= {"weight": "*fp32" if rounding == "none" else "*i16", "applies": "*i1"}
    types |= {"summed_rows": "*i64", "origins": "*i64", "num_origins": "i32", "step_number": "i32", "most_runs": "i32"}
    flags = dict.fromkeys(("size_there", "scale_there", "applies_there", "number_there"), False)
    for dim, vectors in itertools.product(WIDTHS, ("*bf16", "*fp32")):
        constants: dict[str, Any] = {**sizes(dim), **flags, "rule": rule, "rounding": rounding, "is_summed": False}
        constants |= {"has_decay": True, "has_long": True, "long_run": LONG_RUN, "unroll": launch.reads_ahead}
        constants |= {"tile": tile_rows(dim, numbers=launch.numbers)}
        compiled(
            kernels_of(UPDATE_KERNELS).apply_kernel,
            types=types | {"vectors": vectors},
            constants=constants,
            architecture=architecture,
            num_warps=launch.warps,
            enable_fp_fusion=False,
        )
