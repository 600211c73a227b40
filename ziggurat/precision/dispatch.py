"""Dispatch: for each product, the fastest kernel that is accurate enough, as a plan in a file.

    probe of a run ─► errors and times of kernels, here ─► dispatch.json ─► --training.dispatch FILE

Forward product, input gradient and weight gradient choose apart: the fastest kernel of those with an error below
`MAX_ERROR` and a speed-up above `MIN_SPEEDUP`, else FP32 (LoKA, arXiv 2605.10886, "Dispatch"). A module with several
products chooses once for all of them: the largest error counts, and the smallest speed-up. Times are those of single
products, conversion of operands included; a fused kernel of the module, which another kernel than FP32 takes away, is
not among them.

Times hold for one machine and errors for one model, so the file names both, and the versions; another is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ziggurat.errors import ConfigError
from ziggurat.files import Format
from ziggurat.numerics.probe import Direction, ProbeRecord
from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.precision.arithmetic import NATIVE, Arithmetic
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.kernels import ProductKernel
from ziggurat.precision.product_errors import measure_errors, measure_speedups

MAX_ERROR = 0.2
MIN_SPEEDUP = 1.05
_WAYS_OUT = (
    "make one here: ziggurat numerics dispatch RUN --out dispatch.json",
    "--training.precision fp32, without --training.dispatch",
)
DISPATCH = Format(name="ziggurat.dispatch", what="a dispatch of dense products", ways_out=_WAYS_OUT, error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class KernelMeasured:
    """A kernel in one direction of a module.

    Args:
        error: mean relative error; infinite where it cannot multiply the shapes.
        speedup: over FP32.
    """

    error: float
    speedup: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel for one direction of a module.

    Args:
        kernel: its name.
        reason: for people.
    """

    kernel: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Kernels of a model's products.

    Args:
        model: its class.
        machine: facts that times hold for, by name.
        choices: by module and direction.
        missing: kernels that are not here, and why.
    """

    model: str
    machine: dict[str, str]
    choices: dict[str, dict[Direction, Choice]]
    missing: dict[str, str]

    def arithmetic(self, module: str) -> Arithmetic:
        """Return the arithmetic of a module: torch's own, where all directions are FP32."""
        kernels = {each: ProductKernel.named(choice.kernel) for each, choice in self.choices.get(module, {}).items()}
        if all(kernel is ProductKernel.FP32 for kernel in kernels.values()):
            return NATIVE
        return DispatchedArithmetic(kernels, module=module)

    def write(self, path: str | Path) -> Path:
        """Write a file."""
        choices = {
            module: {each.value: {"kernel": choice.kernel, "reason": choice.reason} for each, choice in found.items()}
            for module, found in self.choices.items()
        }
        facts = {"model": self.model, "machine": self.machine, "missing": self.missing, "choices": choices}
        return DISPATCH.write(path, facts)

    @staticmethod
    def takes_fast_kernels(path: str | Path) -> bool:
        """Return whether a file lets any product be computed by another kernel than FP32."""
        choices = DISPATCH.read(path)["choices"].values()
        return any(each["kernel"] != ProductKernel.FP32.name for found in choices for each in found.values())

    @classmethod
    def read(cls, path: str | Path, *, model: str, modules: set[str], device: torch.device) -> DispatchPlan:
        """Read a file, if it is of this model, this machine and these versions.

        Args:
            path: of the file.
            model: class of the model.
            modules: names of its modules with products.
            device: of the model.

        Raises:
            MissingFileError: there is none.
            ConfigError: it is damaged, or of something else, which the message names.
        """
        facts = DISPATCH.read(path)
        choices = {
            module: {Direction(each): Choice(**choice) for each, choice in found.items()}
            for module, found in facts["choices"].items()
        }
        plan = cls(model=facts["model"], machine=facts["machine"], choices=choices, missing=facts["missing"])
        where = f"{path}"
        if not choices:
            raise _refusal(f"kernels for products of {model}", "none: nothing would be computed otherwise", where)
        if plan.model != model or not choices.keys() <= modules:
            unknown = ", ".join(sorted(choices.keys() - modules)[:3])
            raise _refusal(f"a dispatch of {model}", f"of {plan.model}" + (f", with {unknown}" * bool(unknown)), where)
        for name, here in machine_facts(device).items():
            if plan.machine.get(name) != here:
                raise _refusal(f"a dispatch that was measured with {name} {here}", f"{plan.machine.get(name)}", where)
        return plan


class DispatchedArithmetic(Arithmetic):
    """Computes each direction by a kernel of its own.

    Args:
        kernels: by direction; FP32 where there is none.
        module: whose products these are, for messages.
    """

    name = "dispatch"

    def __init__(self, kernels: Mapping[Direction, ProductKernel], *, module: str = "") -> None:
        self._kernels = {each: kernels.get(each, ProductKernel.FP32) for each in Direction}
        self._module = module
        self._said = set[str]()
        self._news = list[str]()

    def take_news(self) -> list[str]:
        """Return which products were computed in FP32 since the last call, each reason once; not those compiled."""
        news = self._news
        self._news = []
        return news

    def multiply(self, direction: Direction, left: Tensor, right: Tensor) -> Tensor:
        """Multiply by the kernel of a direction, or in FP32 where it does not take the shapes (a last, small batch)."""
        kernel = self._kernels[direction]
        if why := kernel.refuses(tuple(left.shape), tuple(right.shape)):
            # What is compiled may change nothing outside of itself.
            if not torch.compiler.is_compiling():
                self._say(f"{self._module}, {direction.value.replace('_', ' ')}: FP32 in place of {kernel}, {why}")
            kernel = ProductKernel.FP32
        return kernel.multiply(left, right)

    def prepared(self, operand: Tensor, first: Direction, second: Direction) -> Tensor:
        """Return an operand as the kernel of both directions takes it, converted once; as it is where they differ."""
        kernel = self._kernels[first]
        takes_all_shapes = type(kernel).refuses is ProductKernel.refuses
        return kernel.prepared(operand) if kernel is self._kernels[second] and takes_all_shapes else operand

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._news.append(f"dispatch: {line}")

    def matmul(self, left: Float[Tensor, "*B m k"], right: Float[Tensor, "*B k n"]) -> Float[Tensor, "*B m n"]:
        """Multiply matrices; leading dims are broadcast."""
        return _DispatchedProduct.apply(left, right, self)


class _DispatchedCtx(SavedCtx, Protocol):
    arithmetic: DispatchedArithmetic


class _DispatchedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _DispatchedCtx, left: Tensor, right: Tensor, arithmetic: DispatchedArithmetic) -> Tensor:
        left = arithmetic.prepared(left, Direction.FORWARD, Direction.WEIGHT_GRADIENT)
        right = arithmetic.prepared(right, Direction.FORWARD, Direction.INPUT_GRADIENT)
        ctx.save_for_backward(left, right)
        ctx.arithmetic = arithmetic
        return arithmetic.multiply(Direction.FORWARD, left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx: _DispatchedCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        left, right = ctx.saved_tensors
        multiply = ctx.arithmetic.multiply
        gradient = ctx.arithmetic.prepared(gradient, Direction.INPUT_GRADIENT, Direction.WEIGHT_GRADIENT)
        of_left = of_right = None
        if ctx.needs_input_grad[0]:
            of_left = multiply(Direction.INPUT_GRADIENT, gradient, right.mT).sum_to_size(left.shape)
        if ctx.needs_input_grad[1]:
            of_right = multiply(Direction.WEIGHT_GRADIENT, left.mT, gradient).sum_to_size(right.shape)
        return of_left, of_right, None


def choose(measured: Mapping[str, KernelMeasured]) -> Choice:
    """Choose the fastest kernel that is accurate enough; FP32 where there is none."""
    safe = {name: each for name, each in measured.items() if each.error < MAX_ERROR and each.speedup > MIN_SPEEDUP}
    told = ", ".join(
        f"{name}: error {each.error:.2g}, {each.speedup:.2f} times as fast"
        for name, each in measured.items()
        if name != ProductKernel.FP32.name
    )
    if not safe:
        return Choice(kernel=ProductKernel.FP32.name, reason=f"no kernel is safe and faster ({told or 'none is here'})")
    best = max(safe, key=lambda name: safe[name].speedup)
    return Choice(kernel=best, reason=f"the fastest with an error below {MAX_ERROR} ({told})")


def plan_dispatch(record: ProbeRecord, *, device: torch.device, seed: int = 0) -> DispatchPlan:
    """Measure fast kernels in all products of a record, and choose.

    Args:
        record: statistics of a model's products.
        device: to measure on.
        seed: of the draws.

    Raises:
        ConfigError: the record is of no product: there is nothing to choose.
    """
    if not record.products:
        raise ConfigError(
            expected="statistics of a model's dense products",
            found=f"none: {record.num_passes} batches were looked at until step {record.step:,}",
            where=f"the probe of a run of {record.model}",
            ways_out=(
                "take them now: ziggurat numerics dispatch RUN --measure --out dispatch.json",
                "train with ProbeProducts(every=10): the hook looks at every 100th step by default",
            ),
        )
    fast = [kernel for kernel in ProductKernel if kernel.is_fast]
    missing = {kernel.name: lacks for kernel in fast if (lacks := kernel.available(device))}
    here = [kernel for kernel in fast if kernel.name not in missing]
    measured = dict[str, dict[Direction, dict[str, KernelMeasured]]]()
    for product in record.products.values():
        module = measured.setdefault(product.name.partition("#")[0], {each: {} for each in Direction})
        for direction, found in module.items():
            errors = measure_errors(product, direction, here, device=device, seed=seed)
            speedups = measure_speedups(product.shapes(direction), here, device=device)
            for kernel in here:
                error = errors[kernel.name].error if kernel.name in errors else math.inf
                each = KernelMeasured(error=error, speedup=speedups.get(kernel.name, 0.0))
                before = found.get(kernel.name, each)
                found[kernel.name] = KernelMeasured(
                    error=max(before.error, each.error), speedup=min(before.speedup, each.speedup)
                )
    choices = {
        module: {direction: choose(found) for direction, found in directions.items()}
        for module, directions in measured.items()
    }
    return DispatchPlan(model=record.model, machine=machine_facts(device), choices=choices, missing=missing)


def _refusal(expected: str, found: str, where: str) -> ConfigError:
    return ConfigError(expected=expected, found=found, where=where, ways_out=_WAYS_OUT)
