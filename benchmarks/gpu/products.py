"""Interactions of fields and messages by Triton against torch's operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.contest import Machine, Measure, kernels
from benchmarks.report import Case
from ziggurat.errors import MissingDependencyError
from ziggurat.ops.interactions import cross, cross_triton, dot_triton
from ziggurat.ops.interactions.dot import pair_places
from ziggurat.ops.interactions.dot_interaction import DotShape, dot_interaction, dot_interaction_reference
from ziggurat.ops.interactions.fm_norm import FMKernel, fm_norm
from ziggurat.ops.wire import WireCode, pack, why_not_triton
from ziggurat.parallel.exchange.packing import RowsForRank, places_of
from ziggurat.parallel.exchange.wire import Wire, WireFormat, encode_pieces

GOAL_FM_NORM = 1.3


def cases() -> Iterator[tuple[str, Measure]]:
    """Names and what measures them."""
    yield "fm_norm", fm_norm_against_eager
    yield "dots", dots_against_eager
    yield "cross_layers", cross_against_eager
    yield "messages", messages_against_eager


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
    contest = {"ours": lambda: work(FMKernel.TRITON), "torch": lambda: work(FMKernel.TORCH)}
    return kernels(machine, "fm_norm", contest, peer="torch", amount=batch, goal=GOAL_FM_NORM)


def dots_against_eager(machine: Machine) -> list[Case] | str:
    """DLRM's interaction of 27 fields, forward and backward, BF16."""
    batch, dim = (65_536, 128) if machine.is_gpu and not machine.quick else (64, 16)
    shape, dtype = DotShape(27, dim, passed=dim, padding=1), torch.bfloat16
    pieces = [torch.randn(batch, width, device=machine.device, dtype=dtype) for width in (dim, 26 * dim)]
    if reason := dot_triton.why_not_triton(pieces, num_fields=27, dim=dim):
        return reason
    leaves = [piece.requires_grad_() for piece in pieces]
    options = {"shape": shape, "dtype": dtype, "places": pair_places(27, device=machine.device)}
    upstream = torch.randn(batch, shape.width, device=machine.device, dtype=dtype)
    forms = {"ours": dot_interaction, "torch": dot_interaction_reference}
    work = {
        name: lambda form=form: torch.autograd.grad(form(leaves, **options), leaves, upstream)
        for name, form in forms.items()
    }
    return kernels(machine, "dots", work, peer="torch", amount=batch)


def cross_against_eager(machine: Machine) -> list[Case] | str:
    """Three cross layers of DCNv2, rank 512, forward and backward, products in BF16."""
    batch, dim, rank = (65_536, 3_456, 512) if machine.is_gpu and not machine.quick else (64, 48, 8)
    inputs = torch.randn(batch, dim, device=machine.device).requires_grad_()
    if reason := cross_triton.why_not_triton(inputs, torch.bfloat16):
        return reason
    shapes = {"downs": (rank, dim), "ups": (dim, rank), "biases": (dim,)}
    weights = {
        name: [torch.randn(each, device=machine.device).mul_(dim**-0.5).requires_grad_() for _ in range(3)]
        for name, each in shapes.items()
    }
    leaves = [inputs, *weights["downs"], *weights["ups"], *weights["biases"]]
    upstream = torch.randn_like(inputs)

    def work(form: Callable[..., torch.Tensor]) -> object:
        with torch.autocast(machine.device.type, dtype=torch.bfloat16):
            crossed = form(inputs, **weights)
        return torch.autograd.grad(crossed, leaves, upstream)

    forms = {"ours": cross.cross_layers, "torch": cross.cross_layers_reference}
    contest = {name: lambda form=form: work(form) for name, form in forms.items()}
    return kernels(machine, "cross_layers", contest, peer="torch", amount=batch)


def messages_against_eager(machine: Machine) -> list[Case] | str:
    """Messages in FP8 to 8 ranks, 26 fields of 128 columns, from a matrix whose columns are in another order."""
    rows, width = (8192, 128) if machine.is_gpu and not machine.quick else (16, 16)
    gradient = torch.randn(rows, 26 * width, device=machine.device)
    if reason := why_not_triton(gradient):
        return reason
    owners = [list(range(rank, 26, 8)) for rank in range(8)]
    wires = [Wire(WireFormat.FP8, (width,) * len(fields)) for fields in owners]
    parts = [
        RowsForRank(wire, 0, rows, tuple(field * width for field in fields))
        for wire, fields in zip(wires, owners, strict=True)
    ]
    places, fields_BFD = places_of(parts, device=machine.device), gradient.view(rows, 26, width)
    sizes = [rows * wire.num_columns for wire in wires]

    def by_torch() -> torch.Tensor:
        numbers = torch.cat([fields_BFD[:, fields].reshape(-1) for fields in owners])
        return encode_pieces(wires, numbers, sizes=sizes)

    work = {"ours": lambda: pack(gradient, WireCode.FP8, places=places), "torch": by_torch}
    return kernels(machine, "messages", work, peer="torch", amount=rows)
