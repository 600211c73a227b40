"""Kernels that may compute one dense product, and formats of which only the error is known.

    fp32             torch's product                                          everywhere
    bf16             operands rounded to BF16, summed in FP32                 fast with AVX512_BF16, AMX, on GPUs
    int8             integers, a scale for each row of a sum (`int8.py`)      torch._int_mm: VNNI, tensor cores
    fp8_tensorwise   E4M3, one scale a matrix                                 torch._scaled_mm
    fp8_rowwise      E4M3, a scale for each row of a sum                      torch._scaled_mm
    mx9, mxfp8, …    each precision in blocks: operands are rounded, the product is FP32: an error, and no speed

A kernel takes FP32 matrices and gives an FP32 matrix, so its time holds the conversion of operands, as a step has it.
Between products whose activations are BF16 (`product`), operands and results are BF16 instead.
A kernel of one's own derives from `ProductKernel` and is listed by `ProductKernel.add`; dispatch then measures it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.precision.arithmetic import RoundedArithmetic
from ziggurat.precision.in_blocks import BlockArithmetic
from ziggurat.precision.int8 import int8_product
from ziggurat.precision.precision import Precision
from ziggurat.specification import Specification

_E4M3_MAX = 448.0


class ProductKernel(Specification, kind="product kernel"):
    """Computes the product of two FP32 matrices in some format. See the module's docstring.

    Attributes:
        is_fast: its time is that of the format; False: operands are only rounded, to know the error.
        holds: which magnitudes its format holds, for people.
    """

    FP32: ClassVar[ProductKernel]
    is_fast: ClassVar[bool] = True
    holds: str = "the format holds 3.4e+38, as its FP32 sums do"

    def available(self, device: torch.device) -> str:
        """Return what a device lacks to run it; "" if it can."""
        return ""

    def refuses(self, left: tuple[int, ...], right: tuple[int, ...]) -> str:
        """Return why it cannot multiply matrices of these shapes; "" if it can."""
        return ""

    def prepared(self, operand: Tensor) -> Tensor:
        """Return an operand in the form that `multiply` makes of it first, which it takes as well.

        An operand of several products is then converted once. Only for kernels that take all shapes.
        """
        return operand

    @abstractmethod
    def multiply(self, left: Float[Tensor, "*B m k"], right: Float[Tensor, "*B k n"]) -> Float[Tensor, "*B m n"]:
        """Multiply; leading dims are broadcast."""

    def product(self, left: Tensor, right: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply operands that may be BF16, and return a matrix of a dtype."""
        return self.multiply(left.float(), right.float()).to(dtype)

    def try_out(self) -> None:
        """Multiply small matrices on the CPU, where the kernel is available there.

        Raises:
            ConfigError: a product has another shape or dtype, or is no nearer to FP32's than zeros are; an operand was
                changed; or prepared operands give another product.
        """
        device = torch.device("cpu")
        lacks = self.available(device)
        if not isinstance(lacks, str):
            raise self._broken("what a device lacks, in words, or an empty text", repr(lacks), "available")
        if not lacks:
            self._try_shape((32, 64), (64, 48))
            self._try_shape((3, 32, 64), (3, 64, 48))

    def _try_shape(self, left_shape: tuple[int, ...], right_shape: tuple[int, ...]) -> None:
        refused = self.refuses(left_shape, right_shape)
        if not isinstance(refused, str):
            raise self._broken("why shapes are refused, in words, or an empty text", repr(refused), "refuses")
        if refused:
            return
        draw = torch.Generator().manual_seed(0)
        left = torch.randn(left_shape, generator=draw)
        right = torch.randn(right_shape, generator=draw)
        wanted = torch.matmul(left, right)
        # Operands of the product, in the form that each method is given them.
        for dtype, method in ((torch.float32, "multiply"), (torch.bfloat16, "product")):
            operands = [left.to(dtype), right.to(dtype)]
            given = [each.clone() for each in operands]
            found = self.multiply(*given) if method == "multiply" else self.product(*given, dtype=dtype)
            if found.shape != wanted.shape or found.dtype != dtype:
                expected = f"{tuple(wanted.shape)} of {dtype}"
                raise self._broken(expected, f"{tuple(found.shape)} of {found.dtype}", method)
            if not all(torch.equal(each, operand) for each, operand in zip(given, operands, strict=True)):
                raise self._broken("operands as they were: weights are among them", "one changed in place", method)
            error = float((found.float() - wanted).norm() / wanted.norm())
            if not error < 1:  # not "error >= 1": NaN is refused, too
                expected = "a product nearer to that of FP32 than zeros are"
                raise self._broken(expected, f"an error of {error:.3g}", method)
        # Dispatch prepares operands where a kernel takes all shapes.
        if type(self).refuses is ProductKernel.refuses:
            prepared = self.multiply(self.prepared(left), self.prepared(right))
            if not torch.equal(prepared, self.multiply(left, right)):
                raise self._broken("the same product of prepared operands", "another one", "prepared")

    def _broken(self, expected: str, found: str, method: str) -> ConfigError:
        return ConfigError(
            expected=expected,
            found=found,
            where=f"{type(self).__name__}.{method} of the product kernel {self.name!r}",
            ways_out="correct it; docs/guides/extending.md says what it is asked, and what it promises",
        )


class _FP32(ProductKernel):
    name = "fp32"

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left, right)


class _BF16(ProductKernel):
    name = "bf16"

    def prepared(self, operand: Tensor) -> Tensor:
        return operand.bfloat16()

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left.bfloat16(), right.bfloat16()).float()

    def product(self, left: Tensor, right: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply operands that may be BF16, and return a matrix of a dtype."""
        return torch.matmul(left.bfloat16(), right.bfloat16()).to(dtype)


class _TwoDims(ProductKernel):
    """A kernel of torch's that multiplies two matrices, with scales for rows of the left and columns of the right."""

    multiple: ClassVar[int] = 1  # of k and n

    def refuses(self, left: tuple[int, ...], right: tuple[int, ...]) -> str:
        """Return why it cannot multiply matrices of these shapes; "" if it can."""
        if len(left) > 2 or len(right) > 2:
            return "no batches of matrices"
        for width in (*left[-1:], *right[-1:]):
            if width % self.multiple:
                return f"width {width} is no multiple of {self.multiple}"
        return ""

    def available(self, device: torch.device) -> str:
        """Try it on small matrices: which of torch's kernels a processor or GPU has is not written anywhere."""
        try:
            product = self.multiply(torch.ones(32, 32, device=device), torch.ones(32, 32, device=device))
        except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
            return str(error).splitlines()[0][:200]
        return "" if bool((product - 32).abs().max() < 1) else "the kernel, whose results are wrong here"


class _Int8(_TwoDims):
    name = "int8"
    multiple = 8
    holds = "the format holds 127 times an FP32 scale"

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return int8_product(left, right, dtype=torch.float32)

    def product(self, left: Tensor, right: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Multiply operands that may be BF16, and return a matrix of a dtype."""
        return int8_product(left, right, dtype=dtype)


class _Fp8Tensorwise(_TwoDims):
    name = "fp8_tensorwise"
    multiple = 16
    holds = "the format holds 448 times an FP32 scale"

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        left_scale = _scales(left, dim=None, most=_E4M3_MAX)
        right_scale = _scales(right, dim=None, most=_E4M3_MAX)
        return _scaled_product(left, right, left_scale, right_scale, dtype=torch.float32)


class _Fp8Rowwise(_TwoDims):
    name = "fp8_rowwise"
    multiple = 16
    holds = "the format holds 448 times an FP32 scale"

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        left_scales = _scales(left, dim=1, most=_E4M3_MAX)
        right_scales = _scales(right, dim=0, most=_E4M3_MAX)
        # GPUs give scaled rows as BF16 alone.
        dtype = torch.bfloat16 if left.is_cuda else torch.float32
        return _scaled_product(left, right, left_scales, right_scales, dtype=dtype).float()


class _InBlocks(ProductKernel):
    """Rounds operands as a precision in blocks does."""

    is_fast = False

    def __init__(self, arithmetic: RoundedArithmetic, *, name: str) -> None:
        self.name = name
        self._arithmetic = arithmetic
        if isinstance(arithmetic, BlockArithmetic):
            largest = arithmetic.format.element.largest
            scaled = " times a scale" if arithmetic.format.has_scale else ""
            self.holds = f"the format holds {largest:.4g}{scaled}"

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(self._arithmetic.rounded(left, dim=-1), self._arithmetic.rounded(right, dim=-2))


def _scales(operand: Tensor, *, dim: int | None, most: float) -> Tensor:
    """Return the numbers to divide an operand by, so that the largest of it, or of each row along a dim, is `most`."""
    largest = operand.abs().amax() if dim is None else operand.abs().amax(dim=dim, keepdim=True)
    # Not "largest > 0": NaN is to be found in the product, and no number that NaN becomes.
    return torch.where(largest == 0, 1.0, largest / most)


def _scaled_product(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, *, dtype: torch.dtype
) -> Tensor:
    left_fp8 = (left / left_scales).to(torch.float8_e4m3fn)
    right_fp8 = (right / right_scales).t().contiguous().to(torch.float8_e4m3fn).t()  # columns lie side by side
    return torch._scaled_mm(left_fp8, right_fp8, scale_a=left_scales, scale_b=right_scales, out_dtype=dtype)


FP32 = ProductKernel.add(_FP32())
for _kernel in (_BF16(), _Int8(), _Fp8Tensorwise(), _Fp8Rowwise()):
    ProductKernel.add(_kernel)


def list_emulated_kernels() -> None:
    """List a kernel for each precision that rounds operands and has none yet, as one from outside the package."""
    listed = {id(kernel._arithmetic) for kernel in ProductKernel if isinstance(kernel, _InBlocks)}
    for precision in Precision:
        if isinstance(precision.arithmetic, RoundedArithmetic) and id(precision.arithmetic) not in listed:
            is_taken = precision.name in {each.name for each in ProductKernel}
            name = f"{precision.name}_emulated" if is_taken else precision.name
            ProductKernel.add(_InBlocks(precision.arithmetic, name=name))


list_emulated_kernels()
