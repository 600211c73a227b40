"""`ziggurat doctor` on machines with and without a GPU: what there is, and why the rest is not."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ziggurat.ops.machine import tested_torch
from ziggurat.runs import doctor


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_every_line_says_why() -> None:
    lines = doctor.gpu_lines()
    assert lines["GPU"] in ("no GPU", "torch was built without CUDA")
    assert set(lines) == {"GPU", "triton", "compiled kernels are kept", "NCCL"}
    assert all(lines.values())


def test_a_gpu_is_described_and_what_it_cannot_do_has_a_reason() -> None:
    facts = SimpleNamespace(name="H200", multi_processor_count=132, major=9, minor=0)
    cuda = mock.patch.multiple(
        "torch.cuda",
        is_available=lambda: True,
        mem_get_info=lambda: (120 << 30, 139 << 30),
        current_device=lambda: 0,
        get_device_properties=lambda device: facts,
        get_device_capability=lambda device: (9, 0),
    )
    rates = mock.patch.multiple(
        doctor,
        copy_gb_per_s=lambda *, device, num_bytes: 4300.0 if num_bytes == 1 << 30 else 0.0,
        matmul_gflop_per_s=lambda dtype, *, device, size: 700_000.0 if dtype is torch.bfloat16 else 50_000.0,
        fp8_gflop_per_s=mock.Mock(side_effect=RuntimeError("torch._scaled_mm needs sm_89\nat line 3")),
    )
    with cuda, rates:
        lines = doctor.gpu_lines()
    assert lines["GPU"] == "H200, 132 multiprocessors, sm_90"
    assert lines["launches of Triton's kernels"].startswith("sm_90: measured on NVIDIA H200, 2026")
    assert lines["memory"] == "139.0 GiB, 120.0 GiB free"
    assert lines["copies in memory"] == "4,300 GB/s, both ways"
    assert (lines["products BF16"], lines["products FP32"]) == ("700.0 TFLOP/s", "50.0 TFLOP/s")
    assert lines["products FP8"] == "none: torch._scaled_mm needs sm_89"
    assert "3.07 ms on an NVIDIA H100" in lines["steps that were measured"]
    assert "several GPUs: nowhere" in lines["steps that were measured"]


def test_an_untested_torch_is_a_section_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kernel_diagnosis", "text_kernel_lines", "gpu_lines"):
        monkeypatch.setattr(doctor, name, dict)  # what is measured and built is not the question
    for name in ("dot_kernel", "fields_kernel", "attention_kernel", "bitmask_kernel", "mask_program_kernel"):
        monkeypatch.setattr(doctor, name, str)
    monkeypatch.setattr(doctor, "scan_kernel", str)
    monkeypatch.setattr(doctor, "measure_ratio", lambda *, device: SimpleNamespace(fp32=1.0, bf16=1.0, ratio=1.0))
    assert "Versions that no test ran with" not in doctor.diagnose().sections
    monkeypatch.setattr(tested_torch, "NEWEST_TESTED", (2, 10))
    lines = doctor.diagnose().sections["Versions that no test ran with"]
    assert lines["found"] == f"torch {torch.__version__}, newer than every tested one"
