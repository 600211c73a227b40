"""The part of a search space that belongs to training: one for all models, whatever they state of themselves.

    learning_rate          1e-4 … 1e-2       of the dense network, and of tables with dense gradients
    embedding_l2           1e-6 … 1          the penalty λ on whole tables, where they have dense gradients
    table_learning_rate    1e-3 … 1          of fused tables
    dropout                0 … 0.6           of every MLP of a model
    loader.batch_size      b/2, b, 2b        around the batch that the run has

Ranges are absolute, and not those around what a model was given: a model that was tuned before would start with a
narrower search than the others.
"""

from __future__ import annotations

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.models.contract.search_space import DROPOUT, Choices, Dimension, Floats
from ziggurat.training.config import TrainingConfig


def training_space(training: TrainingConfig, *, tables: EmbeddingConfig) -> tuple[Dimension, ...]:
    """Return the dimensions of training, with names below `TrainingConfig`, and `dropout`.

    Args:
        training: as the run has it.
        tables: of the model; how they learn decides which settings have an effect.
    """
    batch = training.loader.batch_size
    found: list[Dimension] = [Floats("learning_rate", 1e-4, 1e-2, log=True)]
    if tables.optimizer.is_dense:
        found.append(Floats("embedding_l2", 1e-6, 1.0, log=True))
    else:
        found.append(Floats("table_learning_rate", 1e-3, 1.0, log=True))
    found.append(Floats(DROPOUT, 0.0, 0.6))
    found.append(Choices("loader.batch_size", tuple(str(max(1, size)) for size in (batch // 2, batch, 2 * batch))))
    return tuple(found)
