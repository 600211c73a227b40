"""Wukong's products and norm in one kernel against torch's operations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.contest import Machine, Measure, faster, in_turns
from benchmarks.report import Case
from ziggurat.errors import MissingDependencyError
from ziggurat.ops.interactions.fm_norm import FMKernel, fm_norm

GOAL_FM_NORM = 1.3


def cases() -> Iterator[tuple[str, Measure]]:
    """Names and what measures them."""
    yield "fm_norm", fm_norm_against_eager


def fm_norm_against_eager(machine: Machine) -> list[Case] | str:
    """The fused kernel against torch, forward, BF16."""
    batch, fields, dim, rank = (65_536, 40, 128, 8) if machine.is_gpu and not machine.quick else (64, 40, 16, 8)
    dtype = torch.bfloat16 if machine.is_gpu else torch.float32
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(batch, fields, dim, generator=generator).to(machine.device, dtype)
    weight = torch.randn(fields, rank, generator=generator).to(machine.device, dtype)
    scale = torch.ones(fields * rank, device=machine.device, dtype=dtype)
    norm = {"scale_P": scale, "shift_P": torch.zeros_like(scale), "eps": 1e-5}

    def work(kernel: FMKernel) -> torch.Tensor:
        with torch.no_grad():
            return fm_norm(values, weight, kernel=kernel, **norm)

    try:
        work(FMKernel.TRITON)
    except MissingDependencyError as error:
        return str(error.found)
    seconds = in_turns(machine, {"ours": lambda: work(FMKernel.TRITON), "torch": lambda: work(FMKernel.TORCH)})
    return [faster(machine, "fm_norm", seconds, peer="torch", amount=batch, goal=GOAL_FM_NORM)]
