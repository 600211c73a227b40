"""Sparse Adam: a ← β₁a + (1−β₁)g;  v ← β₂v + (1−β₂)g²;  w ← w − η·√(1−β₂ᵗ)/(1−β₁ᵗ) · a / (√v + ε).

The moments of a row decay only when the row is touched (as `torch.optim.SparseAdam` does it), so this differs from
dense Adam, which moves every row at every step.

Reference: Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015, algorithm 1 and section 2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ziggurat.ops.table_optimizers.table_optimizer import RowChange, TableOptimizerKind, TouchedRows

if TYPE_CHECKING:
    from ziggurat.ops.lookup.kernel import Step


class SparseAdam(TableOptimizerKind):
    """Adam on the rows of the batch alone."""

    name = "sparse_adam"
    weight_state = ("exp_avg", "exp_avg_sq")
    cpp_code = 2
    triton_rule = "adam"

    def change(self, rows: TouchedRows) -> RowChange:
        """Move both moments, and divide one by the root of the other."""
        rule = rows.step.rule
        first = torch.lerp(rows.state["exp_avg"], rows.grad, 1 - rule.beta1)
        second = torch.lerp(rows.state["exp_avg_sq"], rows.grad.square(), 1 - rule.beta2)
        return RowChange(
            direction=first / (second.sqrt() + rule.eps),
            factor=-self.step_size(rows.step),
            state={"exp_avg": first, "exp_avg_sq": second},
        )

    def step_size(self, step: Step) -> float | Tensor:
        """Return the learning rate with the correction of both moments' bias, η·√(1−β₂ᵗ)/(1−β₁ᵗ)."""
        number = step.number.double() if isinstance(step.number, Tensor) else step.number
        first = 1.0 - step.rule.beta1**number
        second = 1.0 - step.rule.beta2**number
        if isinstance(second, Tensor):
            return (step.learning_rate * second.sqrt() / first).float()
        return step.learning_rate * math.sqrt(second) / first
