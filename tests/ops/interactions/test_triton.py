"""Dot products and cross layers by Triton: parity by its interpreter (`make test-triton`) or on a GPU, and assembly."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.lookup.assembly import assemble
from tests.ops.triton_runs import run_python
from ziggurat.ops.interactions.cross_triton import CROSS_KERNELS
from ziggurat.ops.interactions.dot_triton import DOT_KERNELS, candidates_of, why_not_triton
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two

HAS_TRITON = importlib.util.find_spec("triton") is not None
CASES = ["-m", "tests.ops.interactions.triton_cases"]
needs_compiler = pytest.mark.skipif(
    not HAS_TRITON or is_interpreted(), reason="no package triton, or it is interpreted"
)


@pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernels cannot be interpreted")
@pytest.mark.slow
def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    done = run_python(*CASES, "cpu", interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="no CUDA device, or no package triton")
def test_kernels_equal_the_reference_on_a_gpu() -> None:
    done = run_python(*CASES, "cuda", interpreted=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_fields_on_a_cpu_are_not_for_triton() -> None:
    reason = why_not_triton([torch.zeros(2, 24)], num_fields=3, dim=8)
    if not reason:
        pytest.skip("Triton runs here")
    assert "triton" in reason or "cpu" in reason


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("num_fields", "dim"), [(27, 64), (27, 128), (40, 128), (64, 128)])
@pytest.mark.parametrize("stored", ["*bf16", "*fp32"])
def test_dots_do_not_spill_and_fields_move_16_bytes_at_a_time(
    num_fields: int, dim: int, stored: str, tmp_path: Path
) -> None:
    pointers = ("first", "second", "row", "gradient", "first_gradient", "second_gradient")
    types: dict[str, str] = dict.fromkeys(pointers, stored) | dict.fromkeys(("first_pitch", "second_pitch"), "i32:16")
    types["batch_size"] = "i32"
    constants: dict[str, Any] = {
        "num_first": 1,
        "num_fields": num_fields,
        "dim": dim,
        "passed": dim,
        "padding": 1,
        "padded_padding": 1,
    }
    constants |= {"in_bf16": stored == "*bf16", "interpreted": False, "padded_fields": power_of_two(num_fields)}
    dtype = torch.bfloat16 if stored == "*bf16" else torch.float32
    constants |= {"padded_passed": dim}
    kernels = kernels_of(DOT_KERNELS)
    both = ((kernels.interaction_kernel, False), (kernels.interaction_backward_kernel, True))
    candidates = candidates_of(num_fields, dim, dtype=dtype).values()
    for (kernel, is_backward), launch in itertools.product(both, candidates):
        launched = dataclasses.asdict(launch)
        options = {"num_stages": 1, "num_warps": launched.pop("warps")}
        found = assemble(kernel, tmp_path, types=types, constants=constants | launched, **options)
        assert found.spilled_bytes == 0
        threads = 32 * launch.warps
        # Rows behind the last field are not read.
        read = -(-min(num_fields, 32) * launch.chunk * dtype.itemsize // (threads * 16))
        assert (found.wide("LDG") if launch.stages == 1 else found.wide("LDGSTS")) >= read, found
        assert found.wide("STG") >= is_backward, found


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("stored", ["*bf16", "*fp32"])
def test_cross_layers_do_not_spill_and_move_16_bytes_at_a_time(stored: str, tmp_path: Path) -> None:
    types = dict.fromkeys(("crossed", "inputs", "out", "gradient", "first", "partials"), "*fp32")
    types |= dict.fromkeys(("factor", "cast", "of_factor"), stored)
    types |= {"count": "i32:16", "size": "i32", "dim": "i32:16"}
    kernels, flags = kernels_of(CROSS_KERNELS), {"interpreted": False}
    sizes = {"rows": 16, "columns": 128, "tiles": 16}
    for kernel, constants in (
        (kernels.add_crossed_kernel, {"has_cast": True, "tile": 2048}),
        (kernels.add_crossed_backward_kernel, {"is_first": False, **sizes}),
    ):
        found = assemble(kernel, tmp_path, types=types, constants=flags | constants)
        assert found.spilled_bytes == 0
        wide = found.wide("LDG") + found.wide("STG")
        narrow = sum(count for name, count in found.accesses.items() if name[:3] in ("LDG", "STG")) - wide
        assert wide >= 16
        assert narrow <= 1, found  # sums of the bias
