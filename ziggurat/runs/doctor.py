"""`ziggurat doctor`: what this machine and installation can do, what is missing, and why."""

from __future__ import annotations

import torch

from ziggurat.cache import cache_folder
from ziggurat.ops.attention.cpp import attention_kernel
from ziggurat.ops.bitmask import bitmask_kernel
from ziggurat.ops.dot import dot_kernel
from ziggurat.ops.fields import fields_kernel
from ziggurat.ops.lookup.choose import kernel_diagnosis
from ziggurat.ops.mask_program import mask_program_kernel
from ziggurat.ops.matmul_rate import measure_ratio
from ziggurat.ops.scan import scan_kernel
from ziggurat.ops.text.choose import text_kernel
from ziggurat.ops.text.reference import NumpyTextKernel
from ziggurat.parallel.device import choose_device
from ziggurat.training.config import Precision
from ziggurat.training.report.startup import StartupReport, machine_lines, version_lines
from ziggurat.training.step.precision_choice import resolve_precision


def diagnose() -> StartupReport:
    """Measure and describe this machine; takes a few seconds (the C++ kernel is built the first time)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rates = measure_ratio(device=device)
    precision, reason = resolve_precision(Precision.AUTO, device=torch.device(device))
    speed = {
        "matrix multiply FP32": f"{rates.fp32:,.0f} GFLOP/s",
        "matrix multiply BF16": f"{rates.bf16:,.0f} GFLOP/s, {rates.ratio:.2f} times FP32",
        "precision auto": f"{precision.value} ({reason})",
    }
    return StartupReport(
        sections={
            "Machine": machine_lines() | {"runs compute on": choose_device().describe(), "cache": str(cache_folder())},
            "Versions": version_lines(),
            "Speed": speed,
            "Embedding kernels": kernel_diagnosis(),
            "Dense kernels": {
                "pairwise dot products": dot_kernel(),
                "combinations of fields": fields_kernel(),
                "attention over sequences": attention_kernel(),
            },
            "Retrieval kernels": {
                "masks of items": bitmask_kernel(),
                "filters": mask_program_kernel(),
                "search of vectors": scan_kernel(),
            },
            "Data kernels": text_kernel_lines(),
        }
    )


def text_kernel_lines() -> dict[str, str]:
    """Which kernel reads text and looks ids up here, and why not the fast one."""
    kernel = text_kernel()
    slower = "; preprocessing is several times slower" if isinstance(kernel, NumpyTextKernel) else ""
    return {"text": f"{kernel.name}{slower}"}
