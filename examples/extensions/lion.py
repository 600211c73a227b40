"""Add a table optimizer: Lion, on the rows that a step touches.

The sign of an interpolated momentum decides the direction, so every weight of a touched row moves by η, whatever the
size of its gradient, and one number is kept for each weight (Adam keeps two):

    u ← sign(β₁·m + (1−β₁)·g) + λ·w        m ← β₂·m + (1−β₂)·g        w ← w − η·u

The decay λ·w is decoupled: it does not go through the sign. A row that is not touched keeps its momentum, as sparse
Adam does it. The paper takes β₁ = 0.9, β₂ = 0.99, and a rate 3 to 10 times smaller than Adam's.

Reference: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023 (arXiv 2302.06675), algorithm 2.

    import lion                                 # lists it; settings may then say --model.embedding.optimizer lion
"""

from __future__ import annotations

import torch

from ziggurat.ops.table_optimizers import RowChange, TableOptimizerKind, TouchedRows


class Lion(TableOptimizerKind):
    """The sign of a momentum, which is kept for each weight."""

    name = "lion"
    weight_state = ("momentum",)
    decays_gradient = False

    def change(self, rows: TouchedRows) -> RowChange:
        """Go against the sign of the momentum, and move it."""
        rule = rows.step.rule
        momentum = rows.state["momentum"]
        direction = torch.lerp(momentum, rows.grad, 1 - rule.beta1).sign()
        if rule.weight_decay:
            direction = direction + rule.weight_decay * rows.weight()
        return RowChange(
            direction=direction,
            factor=-rows.step.learning_rate,
            state={"momentum": torch.lerp(momentum, rows.grad, 1 - rule.beta2)},
        )


LION = TableOptimizerKind.add(Lion())
