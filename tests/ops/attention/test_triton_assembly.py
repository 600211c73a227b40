"""The kernels of attention as GPUs run them: each default compiles, multiplies by tensor cores and loads ahead."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

from tests.ops.lookup.assembly import compiled
from tests.ops.triton_runs import LAUNCHING_NOTHING, run_python
from ziggurat.ops.attention.launches import HOPPER_BYTES, AttentionPart, kind_of, launch_of, launched_as
from ziggurat.ops.attention.triton import ATTENTION_KERNELS
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or is_interpreted(), reason="no package triton, or it is interpreted"
    ),
]
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def built(
    part: AttentionPart,
    *,
    architecture: int = 90,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    form: str = "silu",
    is_biased: bool = False,
    has_targets: bool = False,
    precision: str = "ieee",
    shared_bytes: int = HOPPER_BYTES,
) -> Any:
    """A part as it is launched, compiled."""
    kernel = getattr(kernels_of(ATTENTION_KERNELS), f"{part.value}_kernel")
    launch = launch_of(
        part, kind_of(dtype, width=dim, is_biased=is_biased, precision=precision), shared_bytes=shared_bytes
    )
    numbers = dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), POINTERS[dtype])
    floats = ("lse", "delta", "d_places", "d_columns", "d_own", "d_time", "w_pos", "w_time", "borders")
    integers = ("offsets", "query_offsets", "targets", "spans", "query_times", "key_times", "limits", "bounds")
    sizes = ("time_tiles", "sequences", "tiles", "lead", "pieces", "context", "reach", "half")
    strides = [f"{name}_{axis}" for name in ("q", "k", "v", "out", "grad") for axis in ("row", "head")]
    types = numbers | dict.fromkeys(floats, "*fp32") | dict.fromkeys(integers, "*i64") | dict.fromkeys(sizes, "i32")
    types |= dict.fromkeys(("scale", "inverse"), "fp32") | dict.fromkeys(strides, "i32:16")
    buckets = 129 if is_biased else 0
    constants: dict[str, Any] = {
        "heads": 4,
        "dim": dim,
        "value_dim": dim,
        "padded": power_of_two(dim),
        "padded_value": power_of_two(dim),
        "has_targets": has_targets,
        "has_spans": False,
        "has_pos": is_biased,
        "has_time": is_biased,
        "buckets": buckets,
        "form": form,
        "precision": precision,
        "rows_tile": launch.rows,
        "columns_tile": launch.columns,
        "times_tile": min(launch.rows, launch.columns),
        "tile": launch.rows,
        "padded_buckets": power_of_two(max(1, buckets)),
        "of_targets": False,
    }
    return compiled(
        kernel,
        types=types,
        constants={name: value for name, value in constants.items() if name in kernel.arg_names},
        architecture=architecture,
        **launch.options,
    )


SMALL = 99 * 1024
LARGE_HEADS = [
    ("ieee", torch.float32, 128),
    ("ieee", torch.float32, 256),
    ("tf32", torch.float32, 64),
    ("half", torch.bfloat16, 128),
    ("half", torch.bfloat16, 256),
]


@pytest.mark.parametrize(("precision", "dtype", "dim"), LARGE_HEADS)
@pytest.mark.parametrize("part", list(AttentionPart))
def test_launches_fit_into_the_shared_memory_of_small_gpus(
    part: AttentionPart, precision: str, dtype: torch.dtype, dim: int
) -> None:
    options = {"dim": dim, "dtype": dtype, "precision": "ieee" if precision == "half" else precision}
    found = built(part, architecture=86, is_biased=part is AttentionPart.BIASES, shared_bytes=SMALL, **options)
    assert found.metadata.shared <= SMALL


@pytest.mark.parametrize("part", [AttentionPart.FORWARD, AttentionPart.QUERIES, AttentionPart.KEYS])
@pytest.mark.parametrize(("architecture", "dim"), [(80, 64), (90, 64), (90, 128), (100, 128)])
def test_bf16_is_multiplied_by_tensor_cores_from_loads_ahead(part: AttentionPart, architecture: int, dim: int) -> None:
    text = built(part, architecture=architecture, dim=dim).asm["ptx"]
    assert PRODUCTS[architecture] in text
    assert "cp.async.cg.shared.global" in text  # 16 bytes at a time
    assert "atom." not in text


@pytest.mark.parametrize("part", list(AttentionPart))
@pytest.mark.parametrize("form", ["silu", "softmax"])
def test_biases_are_read_where_they_are_added(part: AttentionPart, form: str) -> None:
    text = built(part, form=form, is_biased=True, has_targets=True, dim=32).asm["ptx"]
    assert "wgmma.mma_async" in text
    if form == "silu":  # softmax has a number of each row
        assert not re.search(r"cp\.async\.ca\.shared\.global \[[^]]*\], \[[^]]*\], 0x4", text)
    assert "atom." not in text


@pytest.mark.parametrize("part", [AttentionPart.FORWARD, AttentionPart.QUERIES, AttentionPart.KEYS])
def test_biases_are_exchanged_between_no_threads(part: AttentionPart) -> None:
    launch = launch_of(part, kind_of(torch.bfloat16, width=64, is_biased=True, precision="ieee"))
    with launched_as({part: launch}):
        biased, plain = (built(part, is_biased=is_biased) for is_biased in (True, False))
    exchanges = [each.asm["ttgir"].count("ttg.convert_layout") for each in (biased, plain)]
    assert exchanges[0] <= exchanges[1]
    barriers = [each.asm["ptx"].count("bar.sync") for each in (biased, plain)]
    assert barriers[0] <= barriers[1]


@pytest.mark.parametrize("part", list(AttentionPart))
@pytest.mark.parametrize(("precision", "dim"), [("ieee", 32), ("tf32", 64)])
def test_fp32_is_multiplied_as_torch_is_set(part: AttentionPart, precision: str, dim: int) -> None:
    text = built(part, dtype=torch.float32, precision=precision, is_biased=part is AttentionPart.BIASES, dim=dim).asm[
        "ptx"
    ]
    assert ("wgmma" in text or "mma.sync" in text) is (precision == "tf32")


LAUNCHED = """
from ziggurat.features.jagged import offsets_of
from ziggurat.ops.attention.launches import AttentionLaunch, AttentionPart, launched_as
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout
from ziggurat.ops.attention.triton import attention_triton_backward_op, attention_triton_op, triton_inputs

lengths = torch.tensor([300, 1, 64])
total = int(lengths.sum())
q, k, v, grad = (torch.zeros(total, 2, 32, dtype=torch.bfloat16) for _ in range(4))
times = torch.arange(total)
bias = AttentionBias(w_pos=torch.zeros(599), w_time=torch.zeros(20), query_times=times, key_times=times)
layout = JaggedLayout(offsets=offsets_of(lengths), num_targets=torch.tensor([3, 0, 9]), longest=300)
inputs = triton_inputs(layout, bias, form=AttentionForm.SILU, scale=0.2, divisor=300.0)
bounded = AttentionLaunch(rows=64, columns=64, warps=4, stages=2, registers=168)
with launched_as(dict.fromkeys(AttentionPart, bounded)):
    out, lse = attention_triton_op(q, k, v, *inputs)
    attention_triton_backward_op(grad, out, lse, q, k, v, *inputs)
kernels = {"bounds", "forward", "queries", "keys", "biases", "places"}
assert set(compiled) == {f"{name}_kernel" for name in kernels}, compiled
"""


def test_all_kernels_are_compiled_by_the_call_that_launches_them() -> None:
    done = run_python("-c", LAUNCHING_NOTHING + LAUNCHED, interpreted=False)
    assert done.returncode == 0, done.stderr
