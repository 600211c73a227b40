"""Conversion: exchange the arithmetic of a model's dense products, and prove that none was missed.

    converted = convert(model, arithmetic)               every product
    converted = convert(model, lambda name, module: …)   an arithmetic for each module, by its name

It runs on one device, before `parallelize`. Each `DenseProducts` of the model, those of tower modules too, gets its
arithmetic. A plain `nn.Linear`, of a model of one's own, becomes a `Linear` with the same weights under the same name.

*Proof.* The dense network then runs once on shapes alone, as it does when its FLOPs are counted, while every matrix
product that torch starts is watched. A product outside of `DenseProducts` (`nn.MultiheadAttention`, `x @ w` in a
module of one's own) is refused with the names of the modules, instead of leaving a part of the network in another
format than the rest. What a module declares as native (`native_products`) is reported.

The loss is not converted, nor are embeddings: scores of sampled softmax and lookups stay in FP32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.models.contract.model import Model, device_of
from ziggurat.models.costs.model_cost import Run, dense_run, on_shapes, run_apart
from ziggurat.models.network_settings import network_settings
from ziggurat.ops.dispatched import OpArgs, OpKwargs
from ziggurat.precision.arithmetic import Arithmetic
from ziggurat.precision.dispatch import DispatchedArithmetic, DispatchPlan
from ziggurat.precision.precision import Precision
from ziggurat.precision.products import DenseProducts, Linear, products_of, shapes_of_products

Choose = Callable[[str, nn.Module], Arithmetic]
"""From the name of a module in its model, and the module, to the arithmetic of its products."""

_PRODUCTS = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
    torch.ops.aten.mv,
    torch.ops.aten.addmv,
    torch.ops.aten.dot,
    torch.ops.aten.convolution,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._native_multi_head_attention,
}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Modules that a conversion reached or left native.

    Args:
        modules: name of each module with products, and the name of its arithmetic.
        native: modules that keep products of their own native, and why.
    """

    modules: dict[str, str]
    native: dict[str, str]

    def line(self) -> str:
        """Return a line for reports: "tf32 in 12 modules, native in 1 (attention …)"."""
        parts = [f"{name} in {count} modules" for name, count in Counter(self.modules.values()).items()]
        parts += [f"native in {count} ({why})" for why, count in Counter(self.native.values()).items()]
        return ", ".join(parts)


def convert(model: Model, arithmetic: Arithmetic | Choose) -> Converted:
    """Let the dense products of a model be computed in another arithmetic, in place.

    Args:
        model: on one device; built, not yet parallel.
        arithmetic: of all products (`Arithmetic.of_module` gives each module its own), or what chooses one for each
            module.

    Returns:
        Which modules got which.

    Raises:
        ConfigError: a product is computed outside of `DenseProducts`, and so cannot be reached; names the modules.
            The model is then as it was.
    """
    choose = _chooser(arithmetic)
    # First, so that what was a plain linear map gets an arithmetic like all others.
    replaced = _take_plain_linears(model)
    reached = products_of(model)
    before = {name: module.arithmetic for name, module in reached.items()}
    chosen = {name: choose(name, module) for name, module in reached.items()}
    # Each arithmetic once, however many modules share it.
    tried = [arithmetic] if isinstance(arithmetic, Arithmetic) else chosen.values()
    for each in {id(each): each for each in tried}.values():
        check_arithmetic(each)
    for name, module in reached.items():
        module.arithmetic = chosen[name]
    # Asked of the converted model: products of an arithmetic are told from others by running it.
    missed, native = unreached_products(model)
    if missed:
        for name, module in reached.items():
            module.arithmetic = before[name]
        for name, module in replaced.items():
            model.set_submodule(name, module)
        raise _not_reached(model, missed)
    return Converted(modules={name: module.arithmetic.name for name, module in reached.items()}, native=native)


def take_precision(
    model: Model, precision: Precision, *, is_parallel: bool = False, dispatch: str = "", is_scored: bool = False
) -> str:
    """Convert a model to the arithmetic of a precision, where it has one and the model does not compute in it yet.

    Args:
        model: to train. A model that was converted by `convert` and trains in a precision without an arithmetic of its
            own stays as it is.
        precision: of the run.
        is_parallel: whether `parallelize` was there before.
        dispatch: file of the kernels, for a precision that is dispatched.
        is_scored: the model is scored, without autocast, and not trained.

    Returns:
        A line for reports; "" where products are torch's own.

    Raises:
        ConfigError: the model is parallel already, a product cannot be reached, or the file is of another model or
            machine.
    """
    if precision.is_dispatched:
        return _take_dispatch(model, dispatch, is_parallel=is_parallel, is_scored=is_scored)
    products = products_of(model).values()
    wanted = precision.arithmetic
    if wanted is None:
        names = Counter(module.arithmetic.name for module in products if not module.arithmetic.is_native)
        return ", ".join(f"{name} in {count} modules" for name, count in names.items())
    if products and all(module.arithmetic.of_module("") == wanted for module in products):
        return f"{wanted.name} in {len(products)} modules"
    if is_parallel:
        raise ConfigError(
            expected=f"a model whose products were converted to {precision} before it was made parallel",
            found="a parallel model that computes them natively",
            where="training settings, precision",
            ways_out=(
                "before parallelize: from ziggurat.models.converted import take_precision; "
                f"from ziggurat.precision import Precision; take_precision(model, Precision({precision.name!r}))",
                "from ziggurat.precision import Precision; TrainingConfig(precision=Precision.FP32)",
            ),
        )
    return convert(model, wanted).line()


def _take_dispatch(model: Model, path: str, *, is_parallel: bool, is_scored: bool) -> str:
    """Let each module of a model multiply by the kernels of a file, before it is parallel."""
    activations = "" if is_scored else f"activations in {DispatchPlan.activations_of(path)}; "
    modules = products_of(model)
    if is_parallel:
        counts = Counter(module.arithmetic.name for module in modules.values())
        if DispatchedArithmetic.name in counts or not DispatchPlan.exchanges_products(path):
            return activations + ", ".join(f"{name} in {count} modules" for name, count in counts.items())
        raise ConfigError(
            expected="a model whose products were converted before it was made parallel",
            found="a parallel model that computes them natively",
            where="training settings, precision dispatch",
            ways_out=(
                "before parallelize: from ziggurat.models.converted import take_precision; from ziggurat.precision "
                f"import Precision; take_precision(model, Precision.DISPATCH, dispatch={path!r})",
                "--training.precision fp32, without --training.dispatch",
            ),
        )
    device = device_of(model)
    settings = network_settings(model)
    plan = DispatchPlan.read(
        path, model=type(model).__name__, shapes=shapes_of_products(model), settings=settings, device=device
    )
    lacks = [name for name, found in (("sizes", plan.shapes), ("settings", plan.settings)) if found is None]
    unknown = f"; for which {' and '.join(lacks)} of the network it holds, the file does not say" if lacks else ""
    if plan.settings is not None and settings is None:
        unknown = "; the settings of the network are not known, as build_model did not make it: they may be others"
    converted = convert(model, lambda name, module: plan.arithmetic(name, is_scored=is_scored))
    for arithmetic in dispatched_arithmetics(model):
        arithmetic.take_news()  # of the trial products of the conversion
    return activations + converted.line() + unknown


def dispatched_arithmetics(model: Model) -> list[DispatchedArithmetic]:
    """Return the arithmetics of a model that compute by kernels of a file."""
    found = [module.arithmetic for module in products_of(model).values()]
    return [each for each in found if isinstance(each, DispatchedArithmetic)]


def unreached_products(model: Model) -> tuple[dict[str, str], dict[str, str]]:
    """Run the dense network and the towers on shapes, and return which modules multiply past their arithmetic.

    Returns:
        Class of each module that does so without saying why, by its name; and the reasons of those that say why.
    """
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    found = dict[int, nn.Module]()
    for module, run in runs_on_shapes(model):
        found |= on_shapes(module, lambda device, module=module, run=run: _watched(module, run, device))
    missed = dict[str, str]()
    native = dict[str, str]()
    for each in found.values():
        name = names.get(id(each), type(each).__name__) or type(each).__name__
        why = each.native_products if isinstance(each, DenseProducts) else ""
        if why:
            native[name] = why
        else:
            missed[name] = type(each).__name__
    return missed, native


def runs_on_shapes(model: Model) -> list[tuple[nn.Module, Run]]:
    """Return what runs the dense network and the towers of a model, each with the module whose weights it reads."""
    runs: list[tuple[nn.Module, Run]] = [(model, dense_run(model))]
    towers = model.towers
    if towers is not None:
        width = towers.input_dim
        runs.append((towers, lambda size, device: towers(torch.zeros(size, width, device=device))))
    return runs


def _chooser(arithmetic: Arithmetic | Choose) -> Choose:
    """Return what chooses an arithmetic for each module."""
    if isinstance(arithmetic, Arithmetic):
        return lambda name, module: arithmetic.of_module(name)
    if isinstance(arithmetic, type) or not callable(arithmetic):
        raise ConfigError(
            expected="an Arithmetic, or a function from the name of a module and the module to one",
            found=f"the class {arithmetic.__name__}" if isinstance(arithmetic, type) else type(arithmetic).__name__,
            where="conversion of dense products",
            ways_out="an object: arithmetic = MyArithmetic(), with parentheses",
        )
    return arithmetic


@torch.enable_grad()  # whoever packs a model for scoring wants no gradients meanwhile
def check_arithmetic(arithmetic: Arithmetic) -> None:
    """Try an arithmetic on small matrices, forward and backward.

    Raises:
        ConfigError: it is none; it fails; or a product has another shape or dtype than torch's, or no gradient.
    """
    # Whoever converts a model without gradients, to score it, asks for no other arithmetic.
    with torch.inference_mode(False), torch.enable_grad():
        _try_products(arithmetic)


def _try_products(arithmetic: Arithmetic) -> None:
    left = torch.ones(2, 3, requires_grad=True)
    right = torch.ones(3, 4, requires_grad=True)
    problem = ""
    try:
        product = arithmetic.matmul(left, right)
        if tuple(product.shape) != (2, 4) or product.dtype is not torch.float32:
            problem = f"shape {tuple(product.shape)}, {product.dtype}"
        elif not product.requires_grad:
            problem = "a product without gradient"
        else:
            product.sum().backward()
            for name, operand in (("left", left), ("right", right)):
                if operand.grad is None or operand.grad.shape != operand.shape:
                    problem = f"no gradient of the {name} operand"
    except ZigguratError as error:
        problem = error.found
    except Exception as error:  # code of the user's own may fail in any way
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if problem:
        raise ConfigError(
            expected="of FP32 matrices (2, 3) and (3, 4) an FP32 product (2, 4), with gradients of both",
            found=problem,
            where=f"arithmetic {getattr(arithmetic, 'name', type(arithmetic).__name__)!r}",
            ways_out=(
                "correct matmul; or rounded(operand, *, dim), which returns the operand in its own shape and dtype",
                "precision fp32, which rounds nothing",
            ),
        )


def _take_plain_linears(model: Model) -> dict[str, nn.Module]:
    """Put a `Linear` in the place of each plain `nn.Linear`, and return what stood there."""
    plain = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for name, module in plain.items():
        # On the meta device: it takes the weights of the old one and allocates none.
        linear = Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
        linear.weight = module.weight
        linear.bias = module.bias
        linear.train(module.training)
        model.set_submodule(name, linear)
    return dict(plain)


def _watched(module: nn.Module, run: Run, device: torch.device) -> dict[int, nn.Module]:
    """Return the modules that started a product outside of an arithmetic, by their identity."""
    watch = _Watch(root=module)
    with torch.no_grad(), watch.modules(), watch:
        run_apart(module, run, size=2, device=device)
    return watch.found


class _Watch(TorchDispatchMode):
    """Notes which module is running when torch starts a product, unless its arithmetic does."""

    def __init__(self, *, root: nn.Module) -> None:
        super().__init__()
        self.root = root
        self.found: dict[int, nn.Module] = {}
        self._running: list[nn.Module] = [root]
        self._inside = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> object:
        if not self._inside and func.overloadpacket in _PRODUCTS:
            self.found[id(self._running[-1])] = self._running[-1]
        return func(*args, **(kwargs or {}))

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Follow which module runs, and when an arithmetic does."""
        hooks = []
        watched = [module for module in self.root.modules() if isinstance(module, DenseProducts)]
        # Only what stands in the object itself: a class attribute is not to be put back as one of the object.
        own = [module.__dict__.get("arithmetic") for module in watched]
        for module in self.root.modules():
            hooks.append(module.register_forward_pre_hook(self._enter))
            # Also after an error, or the stack of running modules would be wrong from there on.
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        for module in watched:
            module.arithmetic = _Noted(module.arithmetic, watch=self)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for module, arithmetic in zip(watched, own, strict=True):
                if arithmetic is None:
                    del module.arithmetic
                else:
                    module.arithmetic = arithmetic

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Take what is started within for a product of an arithmetic."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _enter(self, module: nn.Module, inputs: object) -> None:
        self._running.append(module)

    def _leave(self, module: nn.Module, inputs: object, outputs: object) -> None:
        self._running.pop()


class _Noted(Arithmetic):
    """Computes as another arithmetic does, and tells a watch when."""

    name = "watched"

    def __init__(self, arithmetic: Arithmetic, *, watch: _Watch) -> None:
        self._arithmetic = arithmetic
        self._watch = watch
        self.holds_weight = arithmetic.holds_weight

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        with self._watch.inside():
            return self._arithmetic.matmul(left, right)

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with self._watch.inside():
            return self._arithmetic.linear(inputs, weight, bias)


def _not_reached(model: Model, missed: dict[str, str]) -> ConfigError:
    some = list(missed.items())[:5]
    names = ", ".join(f"{name} ({kind})" for name, kind in some)
    return ConfigError(
        expected="every dense product of the model to go through an arithmetic",
        found=f"{len(missed)} modules that multiply by themselves: {names}{', …' if len(missed) > len(some) else ''}",
        where=f"conversion of {type(model).__name__}",
        ways_out=(
            "derive the module from ziggurat.precision.DenseProducts, and call self.arithmetic.matmul or .linear",
            "ziggurat.precision.Linear instead of F.linear with a weight of your own",
            'native_products = "why" in the class, where its products are to stay as they are',
        ),
    )
