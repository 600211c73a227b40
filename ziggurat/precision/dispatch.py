"""Dispatch: for each product, the fastest kernel that is accurate enough, as a plan in a file.

    probe of a run ─► errors and times of kernels, here ─► dispatch.json ─► --training.dispatch FILE

Forward product, input gradient and weight gradient choose apart: the fastest kernel of those with an error below
`MAX_ERROR` and a speed-up above `MIN_SPEEDUP`, else that of the activations (LoKA, arXiv 2605.10886, "Dispatch"). A
module with several products chooses once for all of them: the largest error counts, and the smallest speed-up.

Activations between products are chosen too, for the whole network, because a kernel that is given FP32 and gives FP32
pays two conversions that neighbours in BF16 do not pay. There are up to three plans:

    fp32              activations FP32; a kernel converts its operands, and its result is FP32
    bf16              BF16 autocast; products are torch's own, but in FP32 where BF16's error is not below `MAX_ERROR`
    bf16, and others  the same, with other kernels where they are faster than BF16's product of BF16 operands

The fastest one of them, as the whole network's forward and backward pass is timed (`models/dispatch_times.py`), goes to
the file with the times. A fused kernel of a module, which a kernel of one product takes away, counts there. "bf16"
with no product in FP32 is what `--precision bf16` computes, to the bit. BF16 activations need a known error of every
product.

Times hold for one machine, errors and times for one model, its sizes and its settings, so the file names machine and
versions, and the model with the shapes of its weights and the settings of its network; another is refused. Settings
count because errors are those of the operands that a network has: behind a hard swish, a norm or dropout products are
given other numbers, and pass back other gradients, than behind a ReLU of the same width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError
from ziggurat.files import Format
from ziggurat.numerics.probe import Direction, ProbeRecord
from ziggurat.precision.arithmetic import NATIVE, Arithmetic, ArithmeticByDirection
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.kernels import ProductKernel
from ziggurat.precision.precision import Precision
from ziggurat.precision.product_errors import KernelError, measure_errors, measure_speedups
from ziggurat.precision.products import Settings, Shapes
from ziggurat.typed import Reader

MAX_ERROR = 0.2
MIN_SPEEDUP = 1.05
_ACTIVATIONS = ("fp32", "bf16")
_TOLD_SETTINGS = 3  # more of them are counted in an error
_NOT_DRAWN = KernelError(error=math.inf, normal_error=math.nan, why="it does not take matrices of drawn operands")
_WAYS_OUT = (
    "make one here: ziggurat numerics dispatch RUN --out dispatch.json",
    "--training.precision fp32, without --training.dispatch",
)


def _with_fp32_activations(facts: Any) -> Any:
    whole = {"precision": "fp32", "reason": "version 1 of the file had no other"}
    choices = {
        module: {each: choice | {"error": None} for each, choice in found.items()}
        for module, found in facts["choices"].items()
    }
    return facts | {"whole": whole, "choices": choices}


def _without_shapes(facts: Any) -> Any:
    return facts | {"shapes": None}


def without_settings(facts: Any) -> Any:
    """Read a plan of products of a version that kept no settings, of whichever format: they are not known."""
    return facts | {"settings": None}


DISPATCH = Format(
    name="ziggurat.dispatch",
    what="a dispatch of dense products",
    version=4,
    migrations={1: _with_fp32_activations, 2: _without_shapes, 3: without_settings},
    ways_out=_WAYS_OUT,
    error=ConfigError,
)


@dataclass(frozen=True, kw_only=True)
class KernelMeasured:
    """A kernel in one direction of a module.

    Args:
        error: mean relative error; infinite where it overflows or cannot multiply the shapes.
        speedup: over the kernel of the activations, FP32 or BF16.
        why: the error is infinite; "" where it is not.
    """

    error: float
    speedup: float
    why: str = ""

    def and_worse(self, other: KernelMeasured) -> KernelMeasured:
        """Return the kernel in two products of the module, by the worse of their numbers."""
        return KernelMeasured(
            error=max(self.error, other.error), speedup=min(self.speedup, other.speedup), why=self.why or other.why
        )

    def text(self) -> str:
        """Say error and time, or why there are none."""
        return self.why or f"error {self.error:.2g}, {self.speedup:.2f} times as fast"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel for one direction of a module.

    Args:
        kernel: its name.
        reason: for people.
        error: that was measured; None where none was.
    """

    kernel: str
    reason: str
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Whole:
    """The precision of a network between its products.

    Args:
        precision: name of a precision without an arithmetic of its own: "fp32" or "bf16".
        reason: for people.
    """

    precision: str
    reason: str


FP32_ACTIVATIONS = Whole(precision="fp32", reason="whole networks were not timed")


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Kernels of a model's products.

    Args:
        model: its class.
        machine: facts that times hold for, by name.
        choices: by module and direction.
        missing: kernels that are not here, and why.
        whole: what the network computes in between its products.
        shapes: of the weights of the model; None where they are not known (files of versions 1 and 2).
        settings: of its network, by flag; None where they are not known (files of versions 1 to 3, and models that
            `build_model` did not make).
    """

    model: str
    machine: dict[str, str]
    choices: dict[str, dict[Direction, Choice]]
    missing: dict[str, str]
    whole: Whole = FP32_ACTIVATIONS
    shapes: Shapes | None = None
    settings: Settings | None = None

    def arithmetic(self, module: str, *, is_scored: bool = False) -> Arithmetic:
        """Return the arithmetic of a module: torch's own, where all directions are as the activations.

        Args:
            module: its name.
            is_scored: the network runs without autocast, so that BF16 products of a network in BF16 need their kernel.
        """
        kernels = {each: ProductKernel.named(choice.kernel) for each, choice in self.choices.get(module, {}).items()}
        # A score is computed without autocast: products see FP32 operands whatever the plan's activations are.
        of_activations = ProductKernel.FP32.name if is_scored else self.whole.precision
        if all(kernel.name == of_activations for kernel in kernels.values()):
            return NATIVE
        errors = [choice.error for choice in self.choices[module].values() if choice.error is not None]
        return DispatchedArithmetic(kernels, module=module, error=max(errors, default=math.inf))

    def counts(self) -> Counter[str]:
        """Return in how many directions of products there is which kernel."""
        return Counter(choice.kernel for found in self.choices.values() for choice in found.values())

    def write(self, path: str | Path) -> Path:
        """Write a file."""
        choices = {
            module: {
                each.value: {"kernel": choice.kernel, "reason": choice.reason, "error": choice.error}
                for each, choice in found.items()
            }
            for module, found in self.choices.items()
        }
        whole = {"precision": self.whole.precision, "reason": self.whole.reason}
        facts = {
            "model": self.model,
            "machine": self.machine,
            "whole": whole,
            "missing": self.missing,
            "choices": choices,
            "shapes": self.shapes,
            "settings": self.settings,
        }
        return DISPATCH.write(path, facts)

    @classmethod
    def activations_of(cls, path: str | Path) -> Precision:
        """Return the precision of a file's activations."""
        return Precision(cls._of_file(path).whole.precision)

    @classmethod
    def exchanges_products(cls, path: str | Path) -> bool:
        """Return whether a file lets any product be computed by another kernel than that of the activations."""
        plan = cls._of_file(path)
        of_activations = plan.whole.precision
        return any(choice.kernel != of_activations for found in plan.choices.values() for choice in found.values())

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        model: str,
        shapes: Shapes,
        settings: Settings | None = None,
        device: torch.device,
    ) -> DispatchPlan:
        """Read a file, if it is of this model, this machine and these versions.

        Args:
            path: of the file.
            model: class of the model.
            shapes: of the weights of its modules with products, from `shapes_of_products`.
            settings: of its network, from `network_settings`; None: not known, and not compared.
            device: of the model.

        Raises:
            MissingFileError: there is none.
            ConfigError: it is damaged, or of something else, which the message names.
        """
        plan = cls._of_file(path)
        where = f"{path}"
        if not plan.choices:
            raise _refusal(f"kernels for products of {model}", "none: nothing would be computed otherwise", where)
        refuse_unlike(
            plan.model,
            machine=plan.machine,
            shapes=plan.shapes,
            settings=plan.settings,
            modules=plan.choices.keys(),
            model=model,
            of_model=shapes,
            settings_of_model=settings,
            may_be_set=True,
            device=device,
            where=where,
            command="ziggurat numerics dispatch RUN --measure --out dispatch.json",
            ways_out=_WAYS_OUT,
        )
        return plan

    @classmethod
    def _of_file(cls, path: str | Path) -> DispatchPlan:
        """Read a file of any model and machine.

        Raises:
            MissingFileError: there is none.
            ConfigError: it is damaged, or something in it is not what `write` writes; names the key.
        """
        reader = Reader(where=f"{path}", noun="key", error=ConfigError, ways_out=_WAYS_OUT)
        content = reader.read(_Content, DISPATCH.read(path))
        for module, found in content.choices.items():
            for direction, choice in found.items():
                place = f"choices.{module}.{direction}"
                if direction not in set(Direction):
                    raise reader.wrong(place, f"one of {', '.join(Direction)}", direction)
                if choice.kernel not in {kernel.name for kernel in ProductKernel}:
                    known = ", ".join(kernel.name for kernel in ProductKernel)
                    outside = (
                        "a kernel from outside the package is listed by its module: ziggurat --extension MODULE VERB …"
                    )
                    raise reader.wrong(f"{place}.kernel", f"a kernel: {known}", choice.kernel, outside)
        if content.whole.precision not in _ACTIVATIONS:
            raise reader.wrong("whole.precision", " or ".join(_ACTIVATIONS), content.whole.precision)
        choices = {
            module: {Direction(each): choice for each, choice in found.items()}
            for module, found in content.choices.items()
        }
        return cls(
            model=content.model,
            machine=content.machine,
            choices=choices,
            missing=content.missing,
            whole=content.whole,
            shapes=content.shapes,
            settings=content.settings,
        )


@dataclass(frozen=True, kw_only=True)
class _Content:
    """The content of a file, as its newest version has it."""

    model: str
    machine: dict[str, str]
    whole: Whole
    missing: dict[str, str]
    choices: dict[str, dict[str, Choice]]
    shapes: Shapes | None
    settings: Settings | None


def refuse_unlike(
    planned: str,
    *,
    machine: Mapping[str, str],
    shapes: Shapes | None,
    settings: Settings | None,
    modules: Set[str],
    model: str,
    of_model: Shapes,
    settings_of_model: Settings | None,
    may_be_set: bool,
    device: torch.device,
    where: str,
    command: str,
    ways_out: tuple[str, ...],
) -> None:
    """Refuse a plan of products that is of another model, other sizes or settings, another machine or other versions.

    Args:
        planned: class of the model that the plan is of.
        machine: facts that its times hold for.
        shapes: of the weights of its model; None where they are not known.
        settings: of the network of its model; None where they are not known.
        modules: that it chooses for. Modules without a choice keep the product of their activations.
        model: class of the model that is to compute by it.
        of_model: shapes of the weights of that.
        settings_of_model: of the network of that; None where they are not known.
        may_be_set: whether that model can still be given other settings, as one that is about to be trained.
        device: of that.
        where: the file.
        command: that makes one of a run of the model.
        ways_out: of the file.

    Raises:
        ConfigError: names what is unlike.
    """
    if planned != model or not modules <= of_model.keys():
        unknown = ", ".join(sorted(modules - of_model.keys())[:3])
        raise ConfigError(
            expected=f"a dispatch of {model}",
            found=f"of {planned}" + (f", with {unknown}" * bool(unknown)),
            where=where,
            ways_out=ways_out,
        )
    for name, here in machine_facts(device).items():
        if machine.get(name) != here:
            raise ConfigError(
                expected=f"a dispatch that was measured with {name} {here}",
                found=f"{machine.get(name)}",
                where=where,
                ways_out=ways_out,
            )
    if shapes is not None:
        _refuse_other_shapes(shapes, of_model, model=model, where=where, command=command, ways_out=ways_out)
    if settings is not None and settings_of_model is not None:
        _refuse_other_settings(
            settings,
            settings_of_model,
            model=model,
            where=where,
            command=command,
            may_be_set=may_be_set,
            ways_out=ways_out,
        )


def _refuse_other_shapes(
    of_file: Shapes, of_model: Shapes, *, model: str, where: str, command: str, ways_out: tuple[str, ...]
) -> None:
    """Refuse a file of a model with other weights, by the first that differs, in the order of the model."""
    for module in dict.fromkeys((*of_model, *of_file)):
        here = of_model.get(module)
        there = of_file.get(module)
        if here == there:
            continue
        raise ConfigError(
            expected=f"a dispatch of {model} with these sizes: {_module_text(module, here)}",
            found=_module_text(module, there),
            where=where,
            ways_out=(f"make one of a run of this model: {command}", *ways_out[1:]),
        )


def _refuse_other_settings(
    of_file: Settings,
    of_model: Settings,
    *,
    model: str,
    where: str,
    command: str,
    may_be_set: bool,
    ways_out: tuple[str, ...],
) -> None:
    """Refuse a file of a model with other settings, and name them, in the order of the model."""
    different = [name for name in dict.fromkeys((*of_model, *of_file)) if of_model.get(name) != of_file.get(name)]
    if not different:
        return
    flags = [f"--{name} {pasted(of_file[name])}" for name in different if of_file.get(name) not in (None, "", "None")]
    can_be_set = may_be_set and len(flags) == len(different) <= _TOLD_SETTINGS
    raise ConfigError(
        expected=f"a dispatch of {model} with these settings: {_settings_text(different, of_model)}",
        found=_settings_text(different, of_file),
        where=where,
        ways_out=(
            f"make one of a run of this model: {command}",
            *((f"train the model that the file is of: {' '.join(flags)}",) if can_be_set else ()),
            *ways_out[1:],
        ),
    )


def _settings_text(names: Sequence[str], settings: Mapping[str, str]) -> str:
    """Name the first settings with their values, and count the others."""
    told = [f"{name} {settings[name] or 'empty'}" if name in settings else f"no {name}" for name in names]
    others = f" and {len(told) - _TOLD_SETTINGS} more" if len(told) > _TOLD_SETTINGS else ""
    return ", ".join(told[:_TOLD_SETTINGS]) + others


def _module_text(module: str, shapes: Mapping[str, Sequence[int]] | None) -> str:
    """Name a module with the shapes of its weights."""
    if shapes is None:
        return f"no {module}"
    weights = ", ".join(f"{name} {'×'.join(map(str, shape)) or 'a number'}" for name, shape in shapes.items())
    return f"{module} with {weights or 'no weights'}"


class DispatchedArithmetic(ArithmeticByDirection):
    """Computes each direction by a kernel of its own.

    Under autocast operands may have its dtype, and products get it.

    Args:
        kernels: by direction; FP32 where there is none.
        module: whose products these are, for messages.
        error: the largest of its kernels' errors that was measured.
    """

    name = "dispatch"

    def __init__(
        self, kernels: Mapping[Direction, ProductKernel], *, module: str = "", error: float = math.inf
    ) -> None:
        self._kernels = {each: kernels.get(each, ProductKernel.FP32) for each in Direction}
        self.module = module
        self.error = error
        self._said = set[str]()
        self._news = list[str]()

    @property
    def is_in_few_bits(self) -> bool:
        """True while a direction is computed by another kernel than FP32."""
        return any(kernel is not ProductKernel.FP32 for kernel in self._kernels.values())

    def send_back(self) -> None:
        """Compute all directions in FP32 from here on, in copies of the module too."""
        self._kernels = dict.fromkeys(Direction, ProductKernel.FP32)

    def take_news(self) -> list[str]:
        """Return which products were computed in FP32 since the last call, each reason once; not those compiled."""
        news = self._news
        self._news = []
        return news

    def multiply(self, direction: Direction, left: Tensor, right: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply by the kernel of a direction, or in FP32 where it does not take the shapes (a last, small batch)."""
        kernel = self._kernels[direction]
        if why := kernel.refuses(tuple(left.shape), tuple(right.shape)):
            # What is compiled may change nothing outside of itself.
            if not torch.compiler.is_compiling():
                self._say(f"{self.module}, {direction.value.replace('_', ' ')}: FP32 in place of {kernel}, {why}")
            kernel = ProductKernel.FP32
        if torch.compiler.is_compiling():
            return _product_when_compiled(left, right, kernel.name, dtype)
        return kernel.product(left, right, dtype=dtype)

    def prepared(self, operand: Tensor, first: Direction, second: Direction) -> Tensor:
        """Return an operand as the kernel of both directions takes it, converted once; as it is where they differ."""
        kernel = self._kernels[first]
        # A kernel that may refuse a shape would leave an operand converted for nothing, and FP32 could not take it
        # back.
        takes_all_shapes = type(kernel).refuses is ProductKernel.refuses
        return kernel.prepared(operand) if kernel is self._kernels[second] and takes_all_shapes else operand

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._news.append(f"dispatch: {line}")

    def matmul(self, left: Float[Tensor, "*B m k"], right: Float[Tensor, "*B k n"]) -> Float[Tensor, "*B m n"]:
        """Multiply matrices; leading dims are broadcast."""
        device = left.device.type
        if not torch.is_autocast_enabled(device):
            return self.product(left, right, dtype=left.dtype)
        dtype = torch.get_autocast_dtype(device)
        # Autocast would let a kernel in FP32 multiply numbers of its own dtype.
        with torch.autocast(device, enabled=False):
            return self.product(left, right, dtype=dtype)


@torch.library.custom_op("ziggurat::dispatched_product", mutates_args=())
def _product_when_compiled(left: Tensor, right: Tensor, kernel: str, dtype: torch.dtype) -> Tensor:
    """Multiply by a kernel; one operation to torch.compile, which would sum small products in another order."""
    # `contiguous`: the strides must be those that the fake below promises.
    return ProductKernel.named(kernel).product(left, right, dtype=dtype).contiguous()


@_product_when_compiled.register_fake
def _(left: Tensor, right: Tensor, kernel: str, dtype: torch.dtype) -> Tensor:
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    return left.new_empty((*batch, left.shape[-2], right.shape[-1]), dtype=dtype)


def choose(measured: Mapping[str, KernelMeasured], *, activations: str = "fp32") -> Choice:
    """Choose the fastest kernel that is accurate enough; that of the activations where none is, or FP32.

    Args:
        measured: by name of the kernel, speed-ups over the kernel of the activations.
        activations: name of the kernel that multiplies them as they are, "fp32" or "bf16".
    """
    fp32 = ProductKernel.FP32.name
    safe = {name: each for name, each in measured.items() if each.error < MAX_ERROR and each.speedup > MIN_SPEEDUP}
    if safe:
        best = max(safe, key=lambda name: safe[name].speedup)
        reason = (
            f"{safe[best].speedup:.2f} times as fast as {activations}, which the activations are in, with an error of "
            f"{safe[best].error:.2g}; the fastest whose error is below {MAX_ERROR} "
            f"({_told(measured, best, activations)})"
        )
        # JSON has no infinity: an error that is not finite is written as null.
        return Choice(kernel=best, reason=reason, error=_finite(safe[best].error))
    own = measured.get(activations)
    # BF16 is what these activations are multiplied in if nothing is done, so its error must be low, too.
    if activations != fp32 and own is not None and own.error >= MAX_ERROR:
        told = _told(measured, fp32, activations)
        reason = f"the error of {activations} is not below {MAX_ERROR} ({own.why or f'{own.error:.2g}'}; {told})"
        return Choice(kernel=fp32, reason=reason, error=0.0)
    error = 0.0 if own is None else _finite(own.error)
    reason = (
        f"the activations are in {activations}, and no kernel with an error below {MAX_ERROR} is more than "
        f"{MIN_SPEEDUP} times as fast as its own ({_told(measured, activations)})"
    )
    return Choice(kernel=activations, reason=reason, error=error)


def _told(measured: Mapping[str, KernelMeasured], *known: str) -> str:
    """Say error and time of all kernels but those that a reason names already."""
    others = [f"{name}: {each.text()}" for name, each in measured.items() if name not in known]
    return ", ".join(others) or "no other could be measured"


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def plan_dispatch(
    record: ProbeRecord,
    *,
    device: torch.device,
    seed: int = 0,
    seconds_of: Callable[[Sequence[DispatchPlan]], Sequence[float]] | None = None,
    shapes: Shapes | None = None,
    settings: Settings | None = None,
    folder: str | Path = "RUN",
) -> DispatchPlan:
    """Measure fast kernels in all products of a record, and choose.

    Args:
        record: statistics of a model's products.
        device: to measure on.
        seed: of the draws.
        seconds_of: times the whole network by each of a few plans; None: activations stay FP32.
        shapes: of the weights of the model, which models that are to compute by the plan are compared with.
        settings: of its network, compared likewise.
        folder: of the run that the record is of, for errors.

    Raises:
        ConfigError: the record is of no product: there is nothing to choose.
    """
    if not record.products:
        raise ConfigError(
            expected="statistics of a model's dense products",
            found=f"none: {record.num_passes} batches were looked at until step {record.step:,}",
            where=f"the probe of a run of {record.model}",
            ways_out=(
                f"take them now: ziggurat numerics dispatch {pasted(folder)} --measure --out dispatch.json",
                "train for more steps: the hook probe_products looks at every 100th; in Python, fewer: "
                "zg.fit(…, hooks=[ProbeProducts(every=10)])",
            ),
        )
    fast = [kernel for kernel in ProductKernel if kernel.is_fast]
    missing = {kernel.name: lacks for kernel in fast if (lacks := kernel.available(device))}
    here = [kernel for kernel in fast if kernel.name not in missing]
    why_no_bf16 = _why_no_bf16_activations(record, missing)
    by_activations: dict[str, _Measured] = {"fp32": {}}
    if seconds_of is not None and not why_no_bf16:
        by_activations["bf16"] = {}
    for product in record.products.values():
        for direction in Direction:
            errors = measure_errors(product, direction, here, device=device, seed=seed)
            operands = product.shapes(direction)
            for activations, measured in by_activations.items():
                dtype = Precision(activations).dtype
                speedups = measure_speedups(operands, here, device=device, dtype=dtype)
                # Several products of a module are told apart by what stands behind #.
                module = measured.setdefault(product.name.partition("#")[0], {each: {} for each in Direction})
                found = module[direction]
                for kernel in here:
                    of_kernel = errors.get(kernel.name, _NOT_DRAWN)
                    now = KernelMeasured(
                        error=of_kernel.error,
                        speedup=speedups.get(kernel.name, 0.0),
                        why=kernel.refuses(*operands) or of_kernel.why,
                    )
                    # The first product of a module is compared with itself, which changes nothing.
                    found[kernel.name] = found.get(kernel.name, now).and_worse(now)
    plans = [
        DispatchPlan(
            model=record.model,
            machine=machine_facts(device),
            choices=_choices(measured, activations=activations),
            missing=missing,
            whole=Whole(precision=activations, reason=""),
            shapes=shapes,
            settings=settings,
        )
        for activations, measured in by_activations.items()
    ]
    if "bf16" in by_activations:
        # The third plan: what other kernels save in a product, conversions may cost between products.
        alone = _without_others(plans[-1], by_activations["bf16"])
        # By their kernels: the same ones for other reasons are the same network, timed twice.
        if _kernels(alone) != _kernels(plans[-1]):
            plans.append(alone)
    if seconds_of is None or len(plans) == 1:
        why = why_no_bf16 if seconds_of is not None else FP32_ACTIVATIONS.reason
        return replace(plans[0], whole=Whole(precision="fp32", reason=why))
    seconds = seconds_of(plans)
    told = "; ".join(f"{_title(plan)} {1e3 * each:.1f} ms" for plan, each in zip(plans, seconds, strict=True))
    best = plans[min(range(len(plans)), key=lambda index: seconds[index])]
    reason = f"the fastest whole network, forward and backward ({told})"
    return replace(best, whole=Whole(precision=best.whole.precision, reason=reason))


_Measured = dict[str, dict[Direction, dict[str, KernelMeasured]]]


def _choices(measured: _Measured, *, activations: str) -> dict[str, dict[Direction, Choice]]:
    return {
        module: {direction: choose(found, activations=activations) for direction, found in directions.items()}
        for module, directions in measured.items()
    }


def _without_others(plan: DispatchPlan, measured: _Measured) -> DispatchPlan:
    """Return a plan whose products are all BF16, or FP32 where that is not accurate enough."""
    kernels = (ProductKernel.FP32.name, "bf16")
    bf16_alone = {
        module: {each: {name: found[name] for name in kernels} for each, found in directions.items()}
        for module, directions in measured.items()
    }
    return replace(plan, choices=_choices(bf16_alone, activations="bf16"))


def _kernels(plan: DispatchPlan) -> dict[tuple[str, Direction], str]:
    return {(module, each): choice.kernel for module, found in plan.choices.items() for each, choice in found.items()}


def _why_no_bf16_activations(record: ProbeRecord, missing: Mapping[str, str]) -> str:
    if "bf16" in missing:
        return f"BF16 is not here ({missing['bf16']})"
    if record.left_out:
        names = ", ".join(list(record.left_out)[:3])
        return f"errors of {len(record.left_out)} products in BF16 are not known ({names})"
    return ""


def _title(plan: DispatchPlan) -> str:
    kernels = ", ".join(f"{name} in {count}" for name, count in plan.counts().items())
    return f"activations {plan.whole.precision}, products {kernels}:"


def _refusal(expected: str, found: str, where: str) -> ConfigError:
    return ConfigError(expected=expected, found=found, where=where, ways_out=_WAYS_OUT)
