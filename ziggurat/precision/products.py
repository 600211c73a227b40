"""Modules whose dense products go through an arithmetic, which can be exchanged before training.

    class Scores(DenseProducts):                          derive from it instead of nn.Module
        def forward(self, left, right):
            return self.arithmetic.matmul(left, right)    instead of torch.bmm(left, right)

`Linear` is `nn.Linear` with this property: built, initialised, saved and counted like one. A module that reads the
weight of a `Linear` past its forward pass asks `its_arithmetic` first, and takes a fused kernel for native products
alone.

Which arithmetic a module has is not part of a checkpoint: it is a setting of the run, as autocast is.
`ziggurat.models.converted.convert` exchanges it in a whole model and proves that no product was missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, TypeAlias

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.precision.arithmetic import NATIVE, Arithmetic

Shapes: TypeAlias = dict[str, dict[str, list[int]]]  # of weights: by module, by name in it
Settings: TypeAlias = dict[str, str]  # of a model, by the names that flags have: model.top.activation, relu


class DenseProducts(nn.Module):
    """A module that computes its dense products through `self.arithmetic`.

    Attributes:
        arithmetic: native unless the model was converted.
        native_products: why products that the module itself computes stay native whatever the arithmetic of the
            model; "" where none do. Those of its submodules do not count.
    """

    arithmetic: Arithmetic = NATIVE
    native_products: ClassVar[str] = ""


class Linear(DenseProducts, nn.Linear):
    """A linear map x Wᵀ + b. See `nn.Linear` for arguments and initialisation."""

    def forward(self, input: Float[Tensor, "*B i"]) -> Float[Tensor, "*B o"]:
        """Compute x Wᵀ + b."""
        return self.arithmetic.linear(input, self.weight, self.bias)

    def padded(self, inputs: Float[Tensor, "*B i+p"]) -> Float[Tensor, "*B o"]:
        """Compute x Wᵀ + b of inputs that end in p columns of zeros, which make a product faster."""
        if self.arithmetic.holds_weight:  # it was packed without them
            return self.arithmetic.linear(inputs[..., : self.in_features], self.weight, self.bias)
        padding = inputs.shape[-1] - self.in_features
        weight = F.pad(self.weight, (0, padding)) if padding else self.weight
        return self.arithmetic.linear(inputs, weight, self.bias)


def products_of(model: nn.Module) -> dict[str, DenseProducts]:
    """Return the modules of a model that compute dense products through an arithmetic, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DenseProducts)}


def shapes_of_products(model: nn.Module) -> Shapes:
    """Return the shapes of the weights of all modules with dense products, plain linear maps too, by their names.

    Two models of the same classes and names differ in them where they differ in a size.
    """
    return {
        name: {weight: list(each.shape) for weight, each in module.named_parameters(recurse=False)}
        for name, module in model.named_modules()
        if isinstance(module, DenseProducts | nn.Linear)
    }


@contextmanager
def exchanged(modules: Mapping[str, DenseProducts], arithmetic_of: Callable[[str], Arithmetic]) -> Iterator[None]:
    """Let modules compute in other arithmetics within, by their name."""
    own = {name: module.__dict__.get("arithmetic") for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.arithmetic = arithmetic_of(name)
        yield
    finally:
        for name, module in modules.items():
            arithmetic = own[name]
            if arithmetic is not None:
                module.arithmetic = arithmetic
            elif "arithmetic" in module.__dict__:
                del module.arithmetic  # back to that of the class


def its_arithmetic(layers: Iterable[nn.Module]) -> Arithmetic:
    """Return the arithmetic that layers share, of those that have one; native where there is none.

    A fused operation over several layers asks this. Layers that differ give the first that is not native, so that
    no fused kernel is taken; each layer then computes with its own.
    """
    found = [layer.arithmetic for layer in layers if isinstance(layer, DenseProducts)]
    return next((each for each in found if not each.is_native), NATIVE)
