"""Dense Adam: tables are ordinary parameters, and torch's Adam moves every row at every step. For small tables."""

from __future__ import annotations

from ziggurat.ops.table_optimizers.table_optimizer import TableOptimizerKind


class AdamDense(TableOptimizerKind):
    """torch's Adam over whole tables, whose gradients are dense."""

    name = "adam_dense"
    is_dense = True

    @property
    def weight_state_bytes(self) -> int:
        """Bytes of both moments, which are torch's and no arrays of a storage."""
        return 8
