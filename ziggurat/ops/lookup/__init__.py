"""Embedding lookup and exact update: one interface (`kernel.py`), a torch reference, FBGEMM, C++ and Triton."""

from ziggurat.ops.lookup.kernel import (
    GradientPart,
    KernelChoice,
    KernelSetting,
    LookupKernel,
    Step,
    SummedGradient,
    UpdateRule,
    state_shapes,
)
from ziggurat.ops.lookup.layout import FieldKind, FieldSlot, LookupLayout, Lookups
from ziggurat.ops.lookup.reference import TorchKernel
from ziggurat.ops.table_optimizers import TableOptimizerKind

__all__ = [
    "FieldKind",
    "FieldSlot",
    "GradientPart",
    "KernelChoice",
    "KernelSetting",
    "LookupKernel",
    "LookupLayout",
    "Lookups",
    "Step",
    "SummedGradient",
    "TableOptimizerKind",
    "TorchKernel",
    "UpdateRule",
    "state_shapes",
]
