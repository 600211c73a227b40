"""The INT8 kernel has the bits of its reference, and what is not finite becomes NaN in the products that read it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ziggurat.precision.int8 import codes, codes_reference, int8_product, scaled_reference
from ziggurat.precision.kernels import ProductKernel

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def operand(rows: int, columns: int, *, dtype: torch.dtype, hard: bool = True) -> Tensor:
    """Draw numbers of unlike sizes; with zeros, tiny, huge and non-finite ones where it is to be hard."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(columns, generator=generator).exp()
    if hard and rows > 5 and columns > 5:
        x[0] = 0.0
        x[:, 1] = 0.0
        x[2] *= 1e-42
        x[:, 3] *= 1e-42
        x[2, 3] = 1e-45
        x[3, 4] = 3e38
        x[4, 5] = float("nan")
        x[5, 2] = float("inf")
    return x.to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(64, 48), (33, 270), (1, 8), (300, 7), (0, 8)])
def test_codes_and_scales_are_those_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = operand(*shape, dtype=dtype)
    for each in (x, x.t(), x[:, ::2]):
        for dim in (0, 1):
            if not each.shape[dim]:
                continue
            found, scales = codes(each, dim=dim)
            wanted, wanted_scales = codes_reference(each, dim=dim)
            assert found.equal(wanted)
            assert scales.view(torch.int32).equal(wanted_scales.view(torch.int32)) or scales.allclose(
                wanted_scales, rtol=0, atol=0, equal_nan=True
            )


@DTYPES
def test_the_product_is_that_of_the_reference(dtype: torch.dtype) -> None:
    left = operand(64, 48, dtype=dtype)
    right = operand(24, 48, dtype=torch.float32, hard=False).t()
    left_codes, of_rows = codes_reference(left, dim=1)
    right_codes, of_columns = codes_reference(right, dim=0)
    wanted = scaled_reference(torch._int_mm(left_codes, right_codes), of_rows, of_columns).to(dtype)
    found = int8_product(left, right, dtype=dtype)
    assert found.dtype is dtype
    assert found.allclose(wanted, rtol=0, atol=0, equal_nan=True)
    is_nan = found.isnan().all(dim=1)
    assert is_nan.nonzero().flatten().tolist() == [4, 5]  # whose rows hold NaN and infinity, and no other
    assert not found[~is_nan].isnan().any()


@pytest.mark.parametrize("name", ["int8", "fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_found_in_the_product(name: str, bad: float) -> None:
    kernel = ProductKernel.named(name)
    if kernel.available(torch.device("cpu")):
        pytest.skip(f"no {name} here")
    left = torch.randn(32, 32)
    left[3, 7] = bad
    assert not kernel.multiply(left, torch.randn(32, 32))[3].isfinite().all()
