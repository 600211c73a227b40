"""Precision: what the dense network of a run computes in. Weights and optimizer state stay FP32 (master weights).

    activations    autocast to `dtype`, or FP32
    products       torch's own in that dtype, or an `arithmetic` of the precision's own
    backends       what FP32 products may read on a GPU (TF32)

The rest of the package asks a precision, and never which one it is: whether a device has it, what a step runs under,
what the planner counts a product as. A precision of your own derives from `Precision` and is listed by `Precision.add`
(docs/guides/extending.md); `--training.precision NAME` then takes it.
"""

from __future__ import annotations

import contextlib
from typing import ClassVar

import torch

from ziggurat.precision.arithmetic import Arithmetic
from ziggurat.specification import Specification


class Precision(Specification, kind="precision"):
    """The precision that the dense network computes in. See the module's docstring.

    Attributes:
        dtype: of activations and of native products.
        arithmetic: of dense products; None: torch's own.
        is_measured: stands for another precision, the faster one of those that a measurement compares.
        is_dispatched: a file says by which kernel each product is computed (`dispatch.py`).
        is_plain: FP32 throughout, as published figures were computed.
        emulated_by: the precision that multiplies as this one does, with FP32 activations; "" if there is none.
        reads_tf32: FP32 products on a GPU read 10 bits of the mantissa.
        counts_as: the format of products whose rate of a device the planner takes, "fp32" or "bf16".
    """

    AUTO: ClassVar[Precision]
    FP32: ClassVar[Precision]
    TF32: ClassVar[Precision]
    BF16: ClassVar[Precision]
    DISPATCH: ClassVar[Precision]

    dtype: ClassVar[torch.dtype] = torch.float32
    arithmetic: Arithmetic | None = None
    is_measured: ClassVar[bool] = False
    is_dispatched: ClassVar[bool] = False
    is_plain: ClassVar[bool] = False
    emulated_by: ClassVar[str] = ""
    reads_tf32: ClassVar[bool] = False
    counts_as: ClassVar[str] = "fp32"

    @property
    def can_score(self) -> bool:
        """True if a finished run is scored in it as it is: FP32, or products of an arithmetic of its own.

        Autocast, TF32 and measurements belong to training; a dispatched one asks for the kernels that a run keeps.
        """
        return self.is_plain or self.arithmetic is not None

    def lacks(self, device: torch.device) -> str:
        """Return what a device lacks to compute in it; "" if it can."""
        return ""

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return what the forward pass runs under."""
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    def use(self, device: torch.device) -> None:
        """Let products of FP32 matrices on a GPU read what a run asks for; other processes and the CPU stay."""
        if device.type == "cuda":
            torch.backends.cuda.matmul.fp32_precision = "tf32" if self.reads_tf32 else "ieee"


class _Auto(Precision):
    """BF16 where this machine multiplies at least 1.3 times faster in it, decided once a machine; else FP32."""

    name = "auto"
    is_measured = True


class _FP32(Precision):
    """FP32 throughout."""

    name = "fp32"
    is_plain = True


class _TF32(Precision):
    """FP32 whose products read 10 bits of the mantissa, on the tensor cores of a GPU; never chosen by itself."""

    name = "tf32"
    reads_tf32 = True

    def lacks(self, device: torch.device) -> str:
        """Return what a device lacks to compute in it; "" if it can."""
        return "" if device.type == "cuda" else "a GPU, whose tensor cores read FP32 numbers so"


class _BF16(Precision):
    """BF16 activations and products, summed in FP32, by autocast."""

    name = "bf16"
    dtype = torch.bfloat16
    emulated_by = "bf16_emulated"
    counts_as = "bf16"


class _Dispatch(Precision):
    """FP32 whose products are computed by the kernels that a file names."""

    name = "dispatch"
    is_dispatched = True


AUTO = Precision.add(_Auto())
FP32 = Precision.add(_FP32())
TF32 = Precision.add(_TF32())
BF16 = Precision.add(_BF16())
DISPATCH = Precision.add(_Dispatch())
PLAIN = FP32  # of published figures, and of finished runs
USUAL = AUTO  # of a run unless told otherwise
