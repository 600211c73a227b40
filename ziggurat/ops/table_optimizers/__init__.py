"""Table optimizers: how embedding tables learn. One file each; this is the one list of them.

An optimizer of your own derives from `TableOptimizerKind` and is listed by `TableOptimizerKind.add`
(docs/guides/extending.md).
"""

from __future__ import annotations

from ziggurat.ops.table_optimizers.adam_dense import AdamDense
from ziggurat.ops.table_optimizers.rowwise_adagrad import RowwiseAdagrad
from ziggurat.ops.table_optimizers.sgd import Sgd
from ziggurat.ops.table_optimizers.sparse_adam import SparseAdam
from ziggurat.ops.table_optimizers.table_optimizer import RowChange, TableOptimizerKind, TouchedRows

USUAL = TableOptimizerKind.add(RowwiseAdagrad())  # what tables learn by unless told otherwise
PLAIN_RULE = TableOptimizerKind.add(Sgd())  # a plain gradient step, in which other rules can be written
TableOptimizerKind.add(SparseAdam())
TableOptimizerKind.add(AdamDense())

__all__ = ["PLAIN_RULE", "USUAL", "RowChange", "TableOptimizerKind", "TouchedRows"]
