"""`ziggurat doctor`: what this machine and installation can do, what is missing, and why."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

import torch

from ziggurat.cache import cache_folder, compiled_code_line
from ziggurat.numerics.kernel import block_format_kernel
from ziggurat.ops.attention.cpp import attention_kernel
from ziggurat.ops.bitmask import bitmask_kernel
from ziggurat.ops.graph.propagation import propagation_kernel
from ziggurat.ops.interactions.dot import dot_kernel
from ziggurat.ops.interactions.fields import fields_kernel
from ziggurat.ops.kernel_choice import kernels_or_reason
from ziggurat.ops.lookup.choose import kernel_diagnosis
from ziggurat.ops.machine.launches import launch_line
from ziggurat.ops.machine.matmul_rate import copy_gb_per_s, fp8_gflop_per_s, matmul_gflop_per_s, measure_ratio
from ziggurat.ops.machine.measured_choice import kept_line
from ziggurat.ops.machine.tested_torch import untested_torch_section
from ziggurat.ops.mask_program import mask_program_kernel
from ziggurat.ops.scan import scan_kernel
from ziggurat.ops.text.choose import text_kernel
from ziggurat.ops.text.reference import NumpyTextKernel
from ziggurat.parallel.device import choose_device
from ziggurat.parallel.process_groups import nccl_version
from ziggurat.precision import USUAL
from ziggurat.precision.choice import resolve_precision
from ziggurat.training.report.startup import StartupReport, machine_lines, version_lines

_LARGE = 4096  # side of a product that keeps a large GPU busy


def diagnose() -> StartupReport:
    """Measure and describe this machine; takes a few seconds (the C++ kernel is built the first time)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rates = measure_ratio(device=device)
    precision, reason = resolve_precision(USUAL, device=torch.device(device))
    speed = {
        "matrix multiply FP32": f"{rates.fp32:,.0f} GFLOP/s",
        "matrix multiply BF16": f"{rates.bf16:,.0f} GFLOP/s, {rates.ratio:.2f} times FP32",
        "precision auto": f"{precision.value} ({reason})",
    }
    return StartupReport(
        sections={
            "Machine": machine_lines() | {"runs compute on": choose_device().describe(), "cache": str(cache_folder())},
            "Versions": version_lines(),
            **untested_torch_section(),
            "Speed": speed,
            "GPU": gpu_lines(),
            "Embedding kernels": kernel_diagnosis(),
            "Dense kernels": {
                "pairwise dot products": dot_kernel(),
                "combinations of fields": fields_kernel(),
                "attention over sequences": attention_kernel(),
                "rounding to block formats": block_format_kernel(),
            },
            "Retrieval kernels": {
                "masks of items": bitmask_kernel(),
                "products over graphs": propagation_kernel(),
                "filters": mask_program_kernel(),
                "search of vectors": scan_kernel(),
            },
            "Data kernels": text_kernel_lines(),
        }
    )


# `python -m benchmarks.gpu.graph --parts dlrm_65536`; docs/guides/gpus.md has the others.
_MEASURED_STEPS = (
    "DLRM, 65,536 samples, 26 tables of 128 columns, BF16, one graph: 3.07 ms on an NVIDIA H100 80GB HBM3, "
    "torch 2.11 (2026-11-27); on this GPU: ziggurat bench gpu; on several GPUs: nowhere yet"
)


def gpu_lines() -> dict[str, str]:
    """Memory, rates and libraries of the GPU that this process would compute on; what it has not, with the reason."""
    lines = {"triton": kernels_or_reason("triton")[1] or f"triton {importlib.metadata.version('triton')}"}
    lines["compiled kernels are kept"] = compiled_code_line()
    lines["NCCL"] = nccl_version()
    if not torch.cuda.is_available():
        return {"GPU": choose_device().reason, **lines}
    free, total = torch.cuda.mem_get_info()
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Measured one by one below: where this GPU cannot give one of them, the others are shown all the same.
    rates = {
        "copies in memory": lambda: f"{copy_gb_per_s(device='cuda', num_bytes=_copied(free)):,.0f} GB/s, both ways",
        "products BF16": lambda: _rate(matmul_gflop_per_s(torch.bfloat16, device="cuda", size=_LARGE)),
        "products FP8": lambda: _rate(fp8_gflop_per_s(device="cuda", size=_LARGE)),
        "products FP32": lambda: _rate(matmul_gflop_per_s(torch.float32, device="cuda", size=_LARGE)),
    }
    return {
        "GPU": f"{facts.name}, {facts.multi_processor_count} multiprocessors, sm_{facts.major}{facts.minor}",
        "memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free",
        "CUDA": f"{torch.version.cuda}, the one that torch was built with",
        **{name: _measured(measure) for name, measure in rates.items()},
        "launches of Triton's kernels": launch_line(torch.device("cuda", torch.cuda.current_device())),
        "faster of kernel and torch": kept_line(torch.device("cuda", torch.cuda.current_device())),
        "steps that were measured": _MEASURED_STEPS,
        "products FP32 in TF32": f"{torch.backends.cuda.matmul.allow_tf32}, as torch is set",
        **lines,
    }


def _copied(free_bytes: int) -> int:
    """Bytes to copy for a rate: more than any cache holds, and no more than an eighth of what is free."""
    return max(1 << 20, min(1 << 30, free_bytes // 8))


def _measured(measure: Callable[[], str]) -> str:
    """A rate, or why there is none."""
    try:
        return measure()
    except (RuntimeError, NotImplementedError) as error:
        return f"none: {(str(error).splitlines() or [type(error).__name__])[0]}"


def _rate(gflop_per_s: float) -> str:
    return f"{gflop_per_s / 1e3:,.1f} TFLOP/s"


def text_kernel_lines() -> dict[str, str]:
    """Say which kernel reads text and looks ids up here, and why it is not the fast one."""
    kernel = text_kernel()
    slower = "; preprocessing is several times slower" if isinstance(kernel, NumpyTextKernel) else ""
    return {"text": f"{kernel.name}{slower}"}
