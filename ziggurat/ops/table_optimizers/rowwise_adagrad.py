"""Row-wise Adagrad: m ← m + mean_j(g_j²);  w ← w − η·g / (√m + ε), with one number m a row.

What large systems use: almost no state, and a rate for each row that falls with what the row has learned.

Reference: Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning recommendation
models", ISCA 2022, section 4.1.
"""

from __future__ import annotations

from ziggurat.ops.table_optimizers.table_optimizer import RowChange, TableOptimizerKind, TouchedRows


class RowwiseAdagrad(TableOptimizerKind):
    """Adagrad with one number of state a row."""

    name = "rowwise_adagrad"
    row_state = ("sum",)
    mean_squares = "sum"
    cpp_code = 1
    triton_rule = "adagrad"
    fbgemm_rule = "rowwise_adagrad"

    def change(self, rows: TouchedRows) -> RowChange:
        """Divide by the root of the accumulated mean squares."""
        accumulated = rows.state["sum"] + rows.grad.square().mean(dim=1)
        factor = -rows.step.learning_rate / (accumulated.sqrt() + rows.step.rule.eps)
        return RowChange(direction=rows.grad * factor.unsqueeze(1), state={"sum": accumulated})

    def initial(self, key: str, *, initial_sum: float) -> float:
        """Return what the settings say: a positive number softens the first steps."""
        del key
        return initial_sum
