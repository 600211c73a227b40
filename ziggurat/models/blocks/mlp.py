"""Multi-layer perceptron, and how the weights of a dense network start.

One hidden layer is

    h = dropout(activation(normalise(W x + b)))

and an MLP is a chain of them, optionally closed by a plain linear layer (`output_dim`), optionally activated. This is
the one building block that every ranking model shares: DLRM's bottom and top, the deep half of DCNv2, a DNN whole.

Batch normalisation (`batch_norm.py`) divides by the standard deviation over the batch, on many ranks over that of all
of them; layer normalisation (arXiv 1607.06450) looks at one sample alone.

Cost: 2·in·out FLOPs a layer and sample forward, twice that backward. ReLU works in place: neither the linear layer
before it nor batch normalisation needs its own output for the backward pass, so the copy is not made. Matrix products
like rows that start at a multiple of 32 bytes: who puts the input together anyway (DLRM's 367 columns) adds
`padding_columns` columns of zeros to it, and the first layer's weight gets them too, for the product only. At batch
2048, 367 by 512, two threads of a Zen 3, forward and backward: 14.4 ms instead of 16.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.models.blocks.batch_norm import BatchNorm
from ziggurat.models.blocks.block_norm import BlockNorm
from ziggurat.models.blocks.without_gradient import without_gradient
from ziggurat.ops.dropout import dropout, relu_dropout_
from ziggurat.precision.products import Linear
from ziggurat.typed import Dim, Fraction, checked

# FP32 numbers in 32 bytes; narrower products gain less than the wider row costs.
_PADDED_TO, _MIN_PADDED = 8, 128
_LOW_START = 0.1


class Activation(StrEnum):
    """Elementwise function after each hidden layer."""

    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"
    TANH = "tanh"
    HARD_SWISH = "hard_swish"  # x · ReLU6(x + 3) / 6: SiLU of straight pieces
    IDENTITY = "identity"  # none


class Normalization(StrEnum):
    """Choices of what stands between a hidden layer's linear map and its activation."""

    NONE = "none"
    BATCH = "batch"
    LAYER = "layer"
    BLOCK = "block"  # of 256 columns each, without weights (`block_norm.py`)


class Init(StrEnum):
    """Ways to start the weights of every linear map of a dense network (embeddings have their own setting)."""

    TORCH = "torch"  # nn.Linear's own: weight and bias uniform in ± 1/sqrt(in)
    XAVIER_NORMAL = "xavier_normal"  # weight N(0, 2/(in + out)), bias 0 (Glorot and Bengio 2010); what BARS uses


@dataclass(frozen=True, kw_only=True)
@checked
class MLPConfig:
    """The hidden layers of an MLP.

    Args:
        hidden_dims: width of each hidden layer, first to last; () for none.
        activation: after each hidden layer.
        normalization: before each activation.
        dropout: probability of zeroing a hidden unit, after the activation.
        bias: whether hidden layers add one. The layer that closes an MLP does as well, unless its result is logits,
            which keep theirs.

    Example:
        >>> zg.MLPConfig(hidden_dims=(64, 32)).hidden_dims
        (64, 32)
    """

    hidden_dims: tuple[Dim, ...] = (512, 256)
    activation: Activation = Activation.RELU
    normalization: Normalization = Normalization.NONE
    dropout: Fraction = 0.0
    bias: bool = True


class MLP(nn.Module):
    """Hidden layers as in `MLPConfig`, then an optional linear output layer.

    Args:
        input_dim: width of the input.
        config: the hidden layers.
        output_dim: width of the closing linear layer, or None to end with the last hidden layer.
        output_activation: after the closing layer, or None.
        output_bias: whether the closing layer adds a bias.

    Attributes:
        output_dim: width of what `forward` returns.
    """

    def __init__(
        self,
        input_dim: int,
        *,
        config: MLPConfig,
        output_dim: int | None = None,
        output_activation: Activation | None = None,
        output_bias: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.output_activation = output_activation
        dims = (input_dim, *config.hidden_dims)
        linears = [Linear(wide, narrow, bias=config.bias) for wide, narrow in itertools.pairwise(dims)]
        self.layers = nn.ModuleList(linears)
        # A list of its own beside the layers: with and without norms, weights of layers have the same names.
        self.norms = nn.ModuleList()
        if config.normalization is not Normalization.NONE:
            self.norms.extend(norm_of_width(config.normalization, dim) for dim in config.hidden_dims)
        if config.normalization is Normalization.BATCH:
            for linear in linears:
                without_gradient(linear.bias)  # the mean over the batch takes it out again
        self.output = None if output_dim is None else Linear(dims[-1], output_dim, bias=output_bias)
        self.output_dim = dims[-1] if output_dim is None else output_dim
        is_relu = config.activation is Activation.RELU and output_activation in (None, Activation.RELU)
        self._is_relu_chain = is_relu and config.normalization is Normalization.NONE

    @property
    def output_bias(self) -> nn.Parameter | None:
        """The bias of the closing linear layer; None where there is no such layer, or it adds none."""
        return None if self.output is None else self.output.bias

    def forward(self, inputs_BI: Float[Tensor, "B I"]) -> Float[Tensor, "B O"]:
        """Apply every layer; the input may end in `padding_columns` columns of zeros."""
        if not self.training:
            outputs_BO = self._at_once(inputs_BI)
            if outputs_BO is not None:
                return outputs_BO
        hidden_BH = inputs_BI
        for index, layer in enumerate(self.layers):
            # Only the input of the whole may be padded: between layers nobody adds columns.
            hidden_BH = _padded_linear(hidden_BH, layer) if index == 0 else layer(hidden_BH)
            if len(self.norms):
                hidden_BH = self.norms[index](hidden_BH)
            if self.config.activation is Activation.RELU:
                # In one pass and in place: the linear map's output is nobody else's.
                hidden_BH = relu_dropout_(hidden_BH, p=self.config.dropout, training=self.training)
            else:
                hidden_BH = activate(hidden_BH, self.config.activation)
                hidden_BH = dropout(hidden_BH, p=self.config.dropout, training=self.training)
        if self.output is not None:
            hidden_BH = self.output(hidden_BH)
        if self.output_activation is not None:
            hidden_BH = activate(hidden_BH, self.output_activation)
        return hidden_BH

    def _at_once(self, inputs_BI: Float[Tensor, "B I"]) -> Float[Tensor, "B O"] | None:
        """Return what all layers make of an input, where their arithmetic computes them in one call; else None."""
        if not self._is_relu_chain:
            return None
        for layer in self.layers:
            # One look is enough for torch's own products, which pay for it at each batch.
            if isinstance(layer, Linear) and layer.arithmetic.is_native:
                return None
            break
        modules = [*self.layers] if self.output is None else [*self.layers, self.output]
        layers = [layer for layer in modules if isinstance(layer, Linear)]
        if len(layers) < len(modules) or not layers:
            return None
        relu_last = self.output is None or self.output_activation is not None
        chain = layers[0].arithmetic.relu_chain([layer.arithmetic for layer in layers[1:]], relu_last=relu_last)
        # Who listens to a layer (a teacher's vectors are what enters the last one) hears it only if it is called.
        if chain is None or any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
            return None
        _check_padding(inputs_BI, layers[0].in_features)
        return chain(inputs_BI)


def forgets_constants(config: MLPConfig) -> bool:
    """Return whether a constant that is added to all inputs of an MLP changes nothing: the mean over a batch goes.

    Biases whose numbers reach nothing but such an MLP have no gradient (`without_gradient.py`).
    """
    return config.normalization is Normalization.BATCH and len(config.hidden_dims) > 0


def padding_columns(input_dim: int) -> int:
    """Columns of zeros that make an MLP faster if its input ends in them; 0 where that does not pay."""
    return -input_dim % _PADDED_TO if input_dim >= _MIN_PADDED else 0


def _padded_linear(inputs_BI: Tensor, linear: nn.Module) -> Tensor:
    if not isinstance(linear, Linear):
        return linear(inputs_BI)  # a map that knows no padding takes columns as they are, or refuses them
    padding = inputs_BI.shape[1] - linear.in_features
    if not padding:
        return linear(inputs_BI)
    _check_padding(inputs_BI, linear.in_features)
    return linear.padded(inputs_BI)


def _check_padding(inputs_BI: Tensor, in_features: int) -> None:
    """Hold columns of zeros at the end of an input to their number."""
    padding = inputs_BI.shape[1] - in_features
    assert padding in (0, padding_columns(in_features)), f"{inputs_BI.shape[1]} columns for {in_features}"


def activate(inputs: Tensor, activation: Activation) -> Tensor:
    """Apply an activation to the fresh output of a linear map or normalisation (ReLU overwrites it)."""
    match activation:
        case Activation.RELU:
            return F.relu_(inputs)
        case Activation.GELU:
            return F.gelu(inputs)
        case Activation.SILU:
            return F.silu(inputs)
        case Activation.TANH:
            return inputs.tanh()
        case Activation.HARD_SWISH:
            return F.hardswish(inputs)
        case Activation.IDENTITY:
            return inputs


def norm_of_width(kind: Normalization, width: int, *, eps: float = 1e-5) -> nn.Module:
    """Return a norm over the batch (batch), or over the columns of each sample (layer), or over blocks of them."""
    match kind:
        case Normalization.BATCH:
            return BatchNorm(width, eps=eps)
        case Normalization.BLOCK:
            return BlockNorm(eps=eps)
        case _:
            return nn.LayerNorm(width, eps=eps)


def start_sum_low(linear: nn.Linear) -> None:
    """Scale the start of a linear map from inputs to logits down to a tenth: a model then starts near the mean.

    Layers need drawn weights to differ from one another; a sum of weights learns as well from 0. As torch draws it, a
    logit has a standard deviation of 0.58 from it alone, which training first has to take back. `initialise` draws it
    anew where the model wants another start than torch's.
    """
    with torch.no_grad():
        linear.weight.mul_(_LOW_START)
        if linear.bias is not None:
            linear.bias.mul_(_LOW_START)


@runtime_checkable
class InitialisesItself(Protocol):
    """A module with weights outside `nn.Linear`."""

    def initialise_own(self, init: Init) -> None:
        """Set the starting weights of this module's own parameters."""
        ...


def initialise(modules: Iterable[nn.Module], init: Init) -> None:
    """Set the starting weights of all linear maps below `modules`.

    Each `nn.Linear` keeps torch's own start for `Init.TORCH`; modules that hold weights in another form implement
    `InitialisesItself`.
    """
    for root in modules:
        for module in root.modules():
            if isinstance(module, InitialisesItself):
                module.initialise_own(init)
            elif isinstance(module, nn.Linear) and init is Init.XAVIER_NORMAL:
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
