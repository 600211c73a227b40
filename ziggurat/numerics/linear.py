"""Multiply by weights kept as integers in blocks, for scoring on a CPU: fewer bytes to read, more sums a cycle.

    weight (O, I)  ──►  panels of 16 outputs  ──►  blocks of 16 inputs: integers, and a power of two for each output
                        narrow: 8 bits                MX4, MX6, MXINT8, MSFP up to 7 bits; INT8, with a scale an output
                        wide: 16 bits                 MX9, whose integers of 7 bits are shifted by their microexponents
    x (B, I)       ──►  integers, with one scale a row:  127 levels above zero (narrow), 32,767 (wide)

    y[b, o]  =  scale[b] · Σ over blocks of 2^e[o, block] · (exact sum of 16 integer products)  + bias[o]

A block of MX is shifted to its lowest microexponent here, once: MX6's 4 bits become integers up to 30, MX9's 7 bits up
to 254. So a product is integers throughout, which AVX-512 VNNI multiplies 64 (narrow) or 32 (wide) an instruction,
against 16 of FP32. The weights are those that `quantise` gives, to the bit, but for blocks of weights below 2^-119,
which are zero.

Rounding activations is the price: within half a step of the largest magnitude of a row over 127, or over 32,767. A row
with a number that is not finite gives NaN.

`linear_reference` defines the numbers; the kernel (`ops/csrc/packed_linear.cpp`) gives the same bits. `linear_chain` is
an MLP in one call: of one row, a layer takes less time than the way to it through Python and torch.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, byref, c_int64, c_void_p, pointer
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from ziggurat.errors import ConfigError, NumericsError
from ziggurat.numerics import blocks
from ziggurat.numerics.block_format import BlockFormat, Scope
from ziggurat.numerics.blocks import Blocks
from ziggurat.numerics.packing import Packed, blocks_of_bits
from ziggurat.numerics.quantise import refuse_what_does_not_fit
from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.ops.kernel_choice import library_for

SOURCE = CppSource(
    path=Path(__file__).parents[1] / "ops" / "csrc" / "packed_linear.cpp",
    flags=("-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-w"),
    depends_on=torch.__version__,  # whose OpenMP it shares
    without="go on without: torch computes the same numbers, slower",
)
_LANES = 16
_BLOCK = 16
_NARROW_MOST = 127
# MX9's 7 bits shifted by a microexponent of one.
_WIDE_MOST = 2 * 127
# VNNI multiplies unsigned by signed bytes: codes are moved above zero, and the kernel takes it off again.
_OFFSET = 128
_MAX_INPUTS = 2**16  # the sum over all of them fits 32 bits
_MIN_LARGEST = 1e-30
_EXPONENT_BIAS = 127


class CLinear(Structure):
    """The struct `Linear` of packed_linear.cpp."""

    _fields_ = (
        ("codes", c_void_p),
        ("exponents", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("num_blocks", c_int64),
        ("is_wide", c_int64),
    )


@dataclass(frozen=True, kw_only=True)
class PackedLinear:
    """A linear map whose weight is integers in blocks.

    Args:
        format: of the weight.
        codes: by panel, block, step, output and input; UINT8 with 128 added (narrow), or INT16 (wide).
        exponents: of the blocks' powers of two, with 127 added as FP32 has them; None where outputs have one scale.
        scales: of outputs, P · 16 with those that fill up the last panel; None where blocks have powers of two.
        bias: of outputs, FP32, or None.
        outputs: O.
        inputs: I.
    """

    format: BlockFormat
    codes: Tensor
    exponents: UInt8[Tensor, "P m 16"] | None
    scales: Float[Tensor, "_"] | None
    bias: Float[Tensor, "O"] | None
    outputs: int
    inputs: int

    @property
    def is_wide(self) -> bool:
        """True if weights take 16 bits, and activations have 32,767 levels."""
        return self.codes.dtype is torch.int16

    @property
    def num_bytes(self) -> int:
        """The bytes that a product reads of the weight."""
        parts = (self.codes, self.exponents, self.scales)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @functools.cached_property
    def c_linear(self) -> CLinear:
        """Describe the map to C++; the struct points into these tensors."""
        return CLinear(
            codes=self.codes.data_ptr(),
            exponents=None if self.exponents is None else self.exponents.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            outputs=self.outputs,
            inputs=self.inputs,
            num_blocks=self.codes.shape[1],
            is_wide=self.is_wide,
        )

    @functools.cached_property
    def c_pointer(self) -> object:
        """The pointer to that struct, which every product of the map is given."""
        return byref(self.c_linear)


def pack_linear(
    weight: Float[Tensor, "O I"],
    format: BlockFormat,
    *,
    bias: Float[Tensor, "O"] | None = None,
    name: str = "the weight",
) -> PackedLinear:
    """Round a weight to a format along its inputs, and lay it out for `linear`.

    Args:
        weight: finite numbers on a CPU, of outputs and inputs, as `torch.nn.Linear` has them.
        format: of integers: in blocks with a power of two whose length is a multiple of 16, or with one FP32 scale an
            output.
        bias: of outputs.
        name: of the weight, for messages.

    Raises:
        ConfigError: the format is none of these, or the weight is no matrix of 1 to 65,536 inputs.
        NumericsError: a weight is infinite or NaN.
    """
    if not is_packed_format(format):
        raise ConfigError(
            expected="a format of integers of at most 8 bits: in blocks of a multiple of 16 numbers with a power of "
            "two, or with one FP32 scale a row",
            found=f"{format}",
            where=f"{name}, to score in few bits",
            ways_out=("take mx6: BlockFormat.named('mx6')", "or mx9 or int8: BlockFormat.named('int8')"),
        )
    if weight.dim() != 2 or not 1 <= weight.shape[1] <= _MAX_INPUTS or not weight.shape[0]:
        raise ConfigError(
            expected=f"a matrix of at least one output and 1 to {_MAX_INPUTS:,} inputs",
            found=f"shape {tuple(weight.shape)}",
            where=f"{name}, to score in few bits",
            ways_out="leave this product in FP32: torch.nn.functional.linear",
        )
    rows = weight.detach().float().cpu()
    refuse_what_does_not_fit(rows, format, name=name)
    if rows.isnan().any():
        raise NumericsError(
            expected=f"finite weights to score in {format}",
            found=f"NaN, {int(rows.isnan().sum()):,} times",
            where=f"{name}, {tuple(rows.shape)}",
            ways_out="take weights of a step before: a checkpoint of the run whose loss was finite",
        )
    return _laid_out(blocks.encode(rows, format), format, inputs=rows.shape[1], bias=bias)


def linear_of_bits(packed: Packed, *, bias: Float[Tensor, "O"] | None = None) -> PackedLinear:
    """Lay a weight that is stored in the bits of its format out for `linear`: what `pack_linear` gave, bit by bit.

    Args:
        packed: `pack(weight, format, 1)` of a weight that `pack_linear` takes.
        bias: of outputs.
    """
    return _laid_out(blocks_of_bits(packed), packed.format, inputs=packed.shape[1], bias=bias)


def _laid_out(coded: Blocks, format: BlockFormat, *, inputs: int, bias: Float[Tensor, "O"] | None) -> PackedLinear:
    """Lay the coded rows of a weight out in panels and steps."""
    most = _largest_integer(format)
    outputs = len(coded.elements)
    integers = torch.where(coded.signs, -coded.elements, coded.elements)
    exponents = None
    scales = None
    assert coded.scales is not None  # formats without scales have no integers here
    if format.has_power_of_two_scales:
        if coded.seconds is not None:
            # A microexponent τ lowers its pair by 2^-τ: shifting up by what is missing brings all to the lowest one.
            shifts = format.max_second - coded.seconds
            integers = integers << shifts.repeat_interleave(format.k2, dim=-1)
        # Integers count units of the lowest microexponent from here on, so the block's exponent is that much lower.
        units = coded.scales - format.max_second * (format.d2 > 0) + _lowest_exponent(format)
        # A long block is several of 16 with the same scale; from bits, one that is the whole of a row may be shorter.
        exponents = (units + _EXPONENT_BIAS).repeat_interleave(-(-integers.shape[-1] // _BLOCK), dim=-1)
    else:
        scales = blocks.scale_bits_of(coded.scales[:, 0]) * 2.0 ** _lowest_exponent(format)
    in_blocks = _in_blocks(integers.flatten(1)[:, :inputs])
    if exponents is not None:
        exponents = exponents[:, : in_blocks.shape[1]]
        # Exponents below 1 are no normal FP32 numbers; a zero block takes a harmless one.
        is_zero = ((in_blocks == 0).all(dim=-1)) | (exponents < 1)
        in_blocks = torch.where(is_zero.unsqueeze(-1), 0, in_blocks)
        exponents = torch.where(is_zero, _EXPONENT_BIAS, exponents)
    # Panels have 16 outputs; those that fill up the last are zeros, and cut off again.
    fill = -outputs % _LANES
    in_blocks = torch.nn.functional.pad(in_blocks, (0, 0, 0, 0, 0, fill))
    # Inputs that one lane of VNNI multiplies and adds at once: two of 16 bits, four of 8.
    each_step = 2 if most > _NARROW_MOST else 4
    # panel, lane, block, step, input of the step -> panel, block, step, lane, input of the step
    laid = in_blocks.view(-1, _LANES, in_blocks.shape[1], _BLOCK // each_step, each_step).permute(0, 2, 3, 1, 4)
    codes = laid.to(torch.int16) if most > _NARROW_MOST else (laid + _OFFSET).to(torch.uint8)
    if exponents is not None:
        filled = torch.nn.functional.pad(exponents, (0, 0, 0, fill), value=_EXPONENT_BIAS)
        exponents = filled.view(-1, _LANES, filled.shape[1]).transpose(1, 2).to(torch.uint8).contiguous()
    if scales is not None:
        scales = torch.nn.functional.pad(scales, (0, fill)).contiguous()
    return PackedLinear(
        format=format,
        codes=codes.contiguous(),
        exponents=exponents,
        scales=scales,
        bias=None if bias is None else bias.detach().float().cpu().contiguous(),
        outputs=outputs,
        inputs=inputs,
    )


def linear(x: Float[Tensor, "*B I"], map: PackedLinear, *, library: CppLibrary | None = None) -> Float[Tensor, "*B O"]:
    """Return x times the transposed weight, plus the bias; without gradients.

    Args:
        x: on a CPU.
        map: what it is multiplied by.
        library: a build of the kernel, for tests.

    Raises:
        ConfigError: x has another number of inputs.
    """
    shape = x.shape
    if shape[-1] != map.inputs:
        raise _other_inputs(x, map)
    built = library_for(x, library or _LIBRARY)
    if built is None:
        return linear_reference(x, map)
    # Asked first: of a small layer, conversions that change nothing would take a fifth of its time.
    if x.dtype is not torch.float32 or not x.is_contiguous():
        x = x.detach().to(torch.float32).contiguous()
    # By its two sizes, which most inputs have: unpacking a shape takes longer than the smallest products.
    out = torch.empty(shape[0], map.outputs) if len(shape) == 2 else torch.empty((*shape[:-1], map.outputs))
    batch = shape[0] if len(shape) == 2 else x.numel() // map.inputs
    built.ziggurat_linear(map.c_pointer, x.data_ptr(), batch, out.data_ptr(), torch.get_num_threads())
    return out


@dataclass(frozen=True, kw_only=True)
class PackedChain:
    """Linear maps one after the other, with ReLU in between.

    Args:
        maps: first to last.
        relu_last: whether ReLU follows the last one, too.
    """

    maps: tuple[PackedLinear, ...]
    relu_last: bool

    @functools.cached_property
    def c_pointers(self) -> object:
        """The pointers to the maps for C++."""
        return (POINTER(CLinear) * len(self.maps))(*(pointer(map.c_linear) for map in self.maps))


def linear_chain(
    x: Float[Tensor, "B I"], chain: PackedChain, *, library: CppLibrary | None = None
) -> Float[Tensor, "B O"]:
    """Return what the maps of a chain make of x, without gradients: the bits of `linear` and ReLU in turns.

    Args:
        x: FP32 on a CPU, of as many columns as the first map has inputs, or more, which are not read.
        chain: of maps whose inputs are as many as the outputs before.
        library: a build of the kernel, for tests.

    Raises:
        ConfigError: x has fewer columns.
    """
    if x.shape[1] < chain.maps[0].inputs:
        raise _other_inputs(x, chain.maps[0])
    built = library_for(x, library or _LIBRARY)
    if built is None:
        return linear_chain_reference(x, chain)
    if x.stride(1) != 1:
        x = x.contiguous()
    batch = x.shape[0]
    out = torch.empty(batch, chain.maps[-1].outputs)
    built.ziggurat_linear_chain(
        chain.c_pointers,
        len(chain.maps),
        chain.relu_last,
        x.data_ptr(),
        batch,
        x.stride(0),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def linear_chain_reference(x: Float[Tensor, "B I"], chain: PackedChain) -> Float[Tensor, "B O"]:
    """Compute the result that `linear_chain` must equal."""
    hidden = x[:, : chain.maps[0].inputs]
    for index, map in enumerate(chain.maps):
        hidden = linear_reference(hidden, map)
        if chain.relu_last or index + 1 < len(chain.maps):
            hidden = hidden.relu()
    return hidden


def _other_inputs(x: Tensor, map: PackedLinear) -> ConfigError:
    return ConfigError(
        expected=f"{map.inputs} inputs, as the weight has",
        found=f"{x.shape[-1]}, of a tensor {tuple(x.shape)}",
        where="a product in few bits",
        ways_out="pack the weight of the layer that takes this input: pack_linear(layer.weight, format)",
    )


def linear_reference(x: Float[Tensor, "*B I"], map: PackedLinear) -> Float[Tensor, "*B O"]:
    """Compute the result that `linear` must equal."""
    # A tensor: torch computes a number over a tensor by its reciprocal, which rounds twice.
    most = torch.tensor(32767.0 if map.is_wide else float(_NARROW_MOST))
    rows = x.detach().float().reshape(-1, map.inputs)
    largest = rows.abs().amax(dim=1, keepdim=True)
    is_finite = largest.isfinite()
    largest = largest.clamp(min=_MIN_LARGEST)
    scales = torch.where(is_finite, largest / most, torch.nan)
    integers = torch.where(is_finite, (rows * (most / largest)).round(), 0.0)
    x_blocks = _in_blocks(integers).double()  # whose products and sums are exact in FP64
    weights = integers_of(map).double()
    if map.exponents is None:
        assert map.scales is not None
        sums = torch.einsum("bmk,omk->bo", x_blocks, weights).float() * map.scales[: map.outputs]
    else:
        powers = torch.exp2(map.exponents.double() - _EXPONENT_BIAS).float().transpose(1, 2).flatten(0, 1)
        sums = torch.zeros(len(rows), map.outputs)
        for block in range(weights.shape[1]):  # FP32 sums in this order
            exact = x_blocks[:, block] @ weights[:, block].T
            sums = sums + exact.float() * powers[: map.outputs, block]
    y = sums * scales
    if map.bias is not None:
        y = y + map.bias
    return y.view(*x.shape[:-1], map.outputs)


def integers_of(map: PackedLinear) -> Int64[Tensor, "O m 16"]:
    """Return the integers of a weight, in blocks."""
    codes = map.codes.long() - (0 if map.is_wide else _OFFSET)
    # Back from panels, blocks and steps to outputs and inputs; filling outputs are cut off.
    return codes.permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[: map.outputs]


def is_packed_format(format: BlockFormat) -> bool:
    """Return whether weights of a format are integers of few bits that `pack_linear` takes."""
    return _largest_integer(format) <= _WIDE_MOST


def _largest_integer(format: BlockFormat) -> int:
    """Return the largest integer that a weight of a format becomes here; above `_WIDE_MOST` where it is none."""
    element = format.element
    has_row_scale = format.k1 is Scope.AXIS and format.d1 and not format.has_power_of_two_scales and not format.d2
    has_blocks = isinstance(format.k1, int) and format.k1 % _BLOCK == 0 and format.has_power_of_two_scales
    if not element.is_integer or not (has_row_scale or has_blocks):
        return _WIDE_MOST + 1
    most = element.code(element.largest) << (format.max_second if format.d2 else 0)
    return most if has_blocks or most <= _NARROW_MOST else _WIDE_MOST + 1


def _lowest_exponent(format: BlockFormat) -> int:
    """Return the exponent of the power of two that integers are multiples of, below their scales."""
    return format.element.min_exponent - format.element.fraction_bits


def _in_blocks(rows: Tensor) -> Tensor:
    """Cut rows into blocks of 16, the last of which is filled up with zeros."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))


def declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    library.ziggurat_linear_path.restype = c_int64
    library.ziggurat_linear_path.argtypes = []
    library.ziggurat_linear.restype = None
    library.ziggurat_linear.argtypes = [POINTER(CLinear), c_void_p, c_int64, c_void_p, c_int64]
    library.ziggurat_linear_chain.restype = None
    library.ziggurat_linear_chain.argtypes = [
        *(POINTER(POINTER(CLinear)), c_int64, c_int64),
        *(c_void_p, c_int64, c_int64),
        *(c_void_p, c_int64),
    ]


_LIBRARY = CppLibrary(SOURCE, declare=declare)
