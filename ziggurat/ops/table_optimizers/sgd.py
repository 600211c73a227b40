"""SGD: w ← w − η·g, without state."""

from __future__ import annotations

from ziggurat.ops.table_optimizers.table_optimizer import RowChange, TableOptimizerKind, TouchedRows


class Sgd(TableOptimizerKind):
    """A plain gradient step, which keeps nothing."""

    name = "sgd"
    cpp_code = 0
    triton_rule = "sgd"
    fbgemm_rule = "sgd"

    def change(self, rows: TouchedRows) -> RowChange:
        """Go against the gradient."""
        return RowChange(direction=rows.grad, factor=-rows.step.learning_rate)
