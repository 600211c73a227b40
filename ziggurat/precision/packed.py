"""Products by a weight that was packed once: scoring in INT8, MX6 or MX9 on a CPU.

    training     every product rounds both operands to a format, forward and backward     `in_blocks.py`
    scoring      x W'ᵀ + b, W' integers of few bits, x rounded to integers row by row      here

Each module has an arithmetic of its own, which holds the module's weight as `numerics/linear.py` lays it out. What the
module itself keeps as `weight` are the same numbers in FP32, and `linear` does not read them. A product of two
activations (fields with fields, queries with keys) has no weight to pack, and is torch's own.

Between two layers activations are FP32: the next layer rounds each row by its largest magnitude, which is known when
all of the row is. So a chain of layers converts each number once a layer, inside the kernel, and copies nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.linear import PackedChain, PackedLinear, linear, linear_chain, pack_linear
from ziggurat.precision.arithmetic import Arithmetic
from ziggurat.precision.kernels import ProductKernel


class PackedArithmetic(Arithmetic):
    """Multiplies activations by one packed weight, without gradients. See the module's docstring.

    Args:
        map: the weight, and the bias.
        module: whose weight it is, for messages.
    """

    holds_weight = True

    def __init__(self, map: PackedLinear, *, module: str = "") -> None:
        self.name = f"packed {map.format}"
        self.map = map
        self._module = module
        # The chain that was asked for last, and of which layers: an MLP asks for the same one at each batch.
        self._chain: tuple[tuple[Arithmetic, ...], bool, PackedChain] | None = None

    def matmul(self, left: Float[Tensor, "*B m k"], right: Float[Tensor, "*B k n"]) -> Float[Tensor, "*B m n"]:
        """Multiply two activations, in FP32."""
        return torch.matmul(left, right)

    def linear(
        self, inputs: Float[Tensor, "*B i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None
    ) -> Float[Tensor, "*B o"]:
        """Compute x W'ᵀ + b by the packed weight and bias, which are those that the module was packed with.

        Raises:
            ConfigError: a gradient is wanted of the result, or the inputs are not on a CPU.
        """
        if inputs.is_meta:  # shapes alone: FLOPs are counted, or products watched
            return inputs.new_empty(*inputs.shape[:-1], self.map.outputs)
        if inputs.requires_grad and torch.is_grad_enabled():
            raise self._refusal(
                "a forward pass under torch.no_grad(): weights in few bits are for scoring", "gradients"
            )
        if inputs.device.type != "cpu":
            raise self._refusal("activations on a CPU, whose integers it multiplies", f"{inputs.device}")
        return linear(inputs, self.map)

    def relu_chain(
        self, following: Sequence[Arithmetic], *, relu_last: bool
    ) -> Callable[[Float[Tensor, "B i"]], Float[Tensor, "B o"] | None] | None:
        """Return what multiplies by all the packed weights in one call. See `Arithmetic.relu_chain`."""
        layers = (self, *following)
        known = self._chain
        if known is None or known[0] != layers or known[1] != relu_last:
            maps = tuple(each.map for each in layers if isinstance(each, PackedArithmetic))
            if len(maps) < len(layers):
                return None
            known = self._chain = (layers, relu_last, PackedChain(maps=maps, relu_last=relu_last))
        return functools.partial(_chained, chain=known[2])

    def _refusal(self, expected: str, found: str) -> ConfigError:
        return ConfigError(
            expected=expected,
            found=found,
            where=f"products of {self._module or 'a module'} in {self.map.format}",
            ways_out=(
                "score under torch.no_grad(), on the CPU",
                "train or compute elsewhere by the run that this one was packed from",
            ),
        )


def _chained(inputs: Float[Tensor, "B i"], *, chain: PackedChain) -> Float[Tensor, "B o"] | None:
    """Multiply by all weights of a chain; None where each layer has to be asked, as it may refuse its input."""
    if inputs.dim() != 2 or inputs.dtype is not torch.float32 or inputs.device.type != "cpu":
        return None
    if inputs.requires_grad and torch.is_grad_enabled():
        return None
    return linear_chain(inputs, chain)


class PackedKernel(ProductKernel):
    """Multiplies by the right matrix as a packed weight, to know the error of a format; packing is in no score's time.

    Args:
        format: of the weight.
    """

    is_fast = False

    def __init__(self, format: BlockFormat) -> None:
        self.name = format.name
        self.holds = f"the format holds {format.element.largest:.4g} times a scale"
        self._format = format

    def multiply(self, left: Float[Tensor, "m k"], right: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        """Multiply two matrices."""
        return linear(left, pack_linear(right.mT, self._format))
