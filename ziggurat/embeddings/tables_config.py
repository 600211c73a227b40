"""TablesConfig: what the rows of a run's tables are kept as."""

from __future__ import annotations

from dataclasses import dataclass

from ziggurat.embeddings.config import EmbeddingConfig
from ziggurat.embeddings.storage import MakeStorage, MemoryStorage
from ziggurat.embeddings.storage.low_precision import LowPrecision
from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.row_formats import Rounding, RowFormat
from ziggurat.typed import checked


@dataclass(frozen=True, kw_only=True)
@checked
class TablesConfig:
    """What the rows of all embedding tables of a run are kept as, while they are trained and when they are read.

    Args:
        weights: the format of rows; see docs/guides/tables-larger-than-memory.md. Tables so narrow that it would save
            nothing keep FP32.
        rounding: how an update is rounded to the format; split_bf16 and fp32 round nothing.
    """

    weights: RowFormat = RowFormat.FP32
    rounding: Rounding = Rounding.STOCHASTIC

    def make_storage(self, *, seed: int, is_trained: bool = True) -> MakeStorage:
        """What makes the storages of a model's tables.

        Args:
            seed: of the run, from which random rounding follows.
            is_trained: False for tables that are only read.
        """
        if self.weights is RowFormat.FP32:
            return MemoryStorage
        return LowPrecision(row_format=self.weights, rounding=self.rounding, seed=seed, is_trained=is_trained)

    def check(self, embedding: EmbeddingConfig) -> None:
        """Refuse an optimizer that needs tables in FP32.

        Args:
            embedding: how the tables learn.

        Raises:
            ConfigError: tables would be parameters with dense gradients.
        """
        if self.weights is not RowFormat.FP32 and embedding.optimizer is TableOptimizerKind.ADAM_DENSE:
            raise ConfigError(
                expected="an optimizer of touched rows, for tables that are not kept in FP32",
                found=f"--tables.weights {self.weights.value} with {embedding.optimizer.value}, which has a gradient "
                "for every row of every table",
                where="tables.weights",
                ways_out=(
                    "--model.embedding.optimizer rowwise_adagrad (or sgd, sparse_adam)",
                    "leave --tables.weights out",
                ),
            )
