"""`ziggurat doctor`: what this machine and installation can do, what is missing, and why."""

from __future__ import annotations

import torch

from ziggurat.cache import cache_folder
from ziggurat.ops.dot import dot_kernel
from ziggurat.ops.fields import fields_kernel
from ziggurat.ops.lookup.choose import kernel_diagnosis
from ziggurat.ops.matmul_rate import matmul_gflop_per_s
from ziggurat.ops.text.kernel import text_kernel
from ziggurat.ops.text.reference import NumpyTextKernel
from ziggurat.training.startup import StartupReport, machine_lines, version_lines
from ziggurat.training.step import MIN_BF16_SPEEDUP


def diagnose() -> StartupReport:
    """Measure and describe; takes a few seconds (the C++ kernel is built the first time)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fp32 = matmul_gflop_per_s(torch.float32, device=device)
    bf16 = matmul_gflop_per_s(torch.bfloat16, device=device)
    verdict = "pays: precision auto uses it" if bf16 >= MIN_BF16_SPEEDUP * fp32 else "does not pay: auto stays FP32"
    speed = {
        "matrix multiply FP32": f"{fp32:,.0f} GFLOP/s",
        "matrix multiply BF16": f"{bf16:,.0f} GFLOP/s ({verdict})",
    }
    return StartupReport(
        sections={
            "Machine": machine_lines() | {"cache": str(cache_folder())},
            "Versions": version_lines(),
            "Speed": speed,
            "Embedding kernels": kernel_diagnosis(),
            "Dense kernels": {"pairwise dot products": dot_kernel(), "combinations of fields": fields_kernel()},
            "Data kernels": text_kernel_lines(),
        }
    )


def text_kernel_lines() -> dict[str, str]:
    """Which kernel reads text and looks ids up here, and why not the fast one."""
    kernel = text_kernel()
    slower = "; preprocessing is several times slower" if isinstance(kernel, NumpyTextKernel) else ""
    return {"text": f"{kernel.name}{slower}"}
