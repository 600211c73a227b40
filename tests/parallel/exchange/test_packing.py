"""Messages by Triton: the bits of torch's, by Triton's interpreter or on a GPU; and the kernels compiled for sm_90."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.ops.lookup.assembly import assemble
from tests.ops.triton_runs import run_python
from ziggurat.ops.columns import Columns
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of
from ziggurat.ops.machine.launches import DEFAULT, LaunchPart, tile_rows
from ziggurat.ops.wire.triton import WIRE_KERNELS, why_not_triton
from ziggurat.parallel.exchange.packing import HopPacking
from ziggurat.parallel.exchange.wire import Wire, WireFormat

HAS_TRITON = importlib.util.find_spec("triton") is not None
CASES = ["-m", "tests.parallel.exchange.packing_cases"]


@pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernels cannot be interpreted")
@pytest.mark.slow
def test_messages_have_the_bits_of_torch_under_the_interpreter() -> None:
    done = run_python(*CASES, "cpu", interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="no CUDA device, or no package triton")
def test_messages_have_the_bits_of_torch_on_a_gpu() -> None:
    done = run_python(*CASES, "cuda", interpreted=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_a_cpu_torch_makes_messages() -> None:
    values = torch.ones(3, 4)
    if not why_not_triton(values):
        pytest.skip("Triton runs here")
    wires, moves = [Wire(WireFormat.INT8, (4,))], [Columns(0, 0, 0, 4)]
    packing = HopPacking(wires, wires, position=0, moves=moves, has_sums=False)
    assert packing.pack_values(values, [3]) is None
    assert packing.pack_gradient(values) is None
    assert packing.unpack_gradient(wires[0].encode(values), [3], dtype=torch.float32) is None

    def receive() -> torch.Tensor:
        raise AssertionError("nothing is received for a kernel that does not run")

    assert packing.unpack_values(receive, like=values[:, :0], num_rows=3, width=4) is None


@pytest.mark.skipif(not HAS_TRITON or is_interpreted(), reason="no package triton, or it is interpreted")
@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("code", "item"), [("int8", "*i8"), ("fp8", "*u8"), ("bf16", "*i16")])
def test_nothing_spills_and_16_bytes_move_at_a_time(width: int, code: str, item: str, tmp_path: Path) -> None:
    rows = tile_rows(width, numbers=DEFAULT[LaunchPart.MESSAGES].numbers)
    types = {"matrix": "*fp32", "fields": "*i64", "numbers": item, "scales": "*i16", "matrix_pitch": "i32:16"}
    constants = {"code": code, "align": 16, "rows": rows, "padded": width}
    kernels, narrow = kernels_of(WIRE_KERNELS), ("STG.E.U16",)  # scales
    options = {"types": types, "constants": constants, "enable_fp_fusion": False}
    packed, unpacked = (assemble(each, tmp_path, **options) for each in (kernels.pack_kernel, kernels.unpack_kernel))
    for found, reads, writes in ((packed, 4, 2 if code == "bf16" else 1), (unpacked, 2 if code == "bf16" else 1, 4)):
        assert found.spilled_bytes == 0
        assert found.wide("LDG") == reads, found  # 16 numbers a thread
        assert found.wide("STG") == writes, found
        assert all(name.endswith(".128") or name in narrow for name in found.accesses if name.startswith("STG"))
