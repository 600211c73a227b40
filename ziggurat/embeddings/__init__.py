"""Embedding tables, their exact optimizers, and the choice of kernel."""

from ziggurat.embeddings.config import EmbeddingConfig, PooledDtype, TableInit
from ziggurat.embeddings.optimizer import TableOptimizer
from ziggurat.embeddings.tables import EmbeddingTables
from ziggurat.ops.lookup import KernelChoice, TableOptimizerKind
from ziggurat.ops.lookup.choose import BatchShape, kernel_diagnosis

__all__ = [
    "BatchShape",
    "EmbeddingConfig",
    "EmbeddingTables",
    "KernelChoice",
    "PooledDtype",
    "TableInit",
    "TableOptimizer",
    "TableOptimizerKind",
    "kernel_diagnosis",
]
