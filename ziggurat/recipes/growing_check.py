"""What growing vocabularies do not go with, refused before the first file is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat.errors import ConfigError
from ziggurat.features.schema import Encoding
from ziggurat.models.contract.reads import finds_items
from ziggurat.parallel.prioritised.choice import Exchange

if TYPE_CHECKING:
    from ziggurat.recipes.run_config import RunConfig

_OTHER = 'give the tables another encoding: "vocabulary" or "hashing"'


def check_growing(config: RunConfig) -> None:
    """Refuse settings that growing tables do not go with.

    Raises:
        ConfigError: a model that finds items, events, an optimizer with dense gradients, rows sent ahead, or histories
            that ranks divide.
    """
    tables = [table.name for table in config.table_schema.tables if table.encoding is Encoding.GROWING]
    if not tables:
        return
    if finds_items(config.model) or config.table_schema.events is not None:
        _refuse(
            tables,
            expected="a model that scores samples: its items need no rows but those of the batch",
            found=f"model {config.model.kind!r}, which finds items among all of them"
            if config.table_schema.events is None
            else "a schema with [events], whose sequences are made of a fixed catalogue",
            ways_out=(_OTHER, "train a ranker: ziggurat train table_dlrm"),
        )
    if config.model.embedding.optimizer.is_dense:
        _refuse(
            tables,
            expected="an optimizer of touched rows: a row that changes its id begins anew",
            found=f"--model.embedding.optimizer {config.model.embedding.optimizer}",
            ways_out=("--model.embedding.optimizer rowwise_adagrad (or sgd, sparse_adam)", _OTHER),
        )
    if config.parallel.exchange is not Exchange.PLAIN or config.parallel.context > 1:
        _refuse(
            tables,
            expected="plain exchange and whole histories: rows are known when the step before is done, not earlier",
            found=f"--parallel.exchange {config.parallel.exchange.value}, --parallel.context {config.parallel.context}",
            ways_out=("leave both out", _OTHER),
        )


def _refuse(tables: list[str], *, expected: str, found: str, ways_out: tuple[str, ...]) -> None:
    where = f"growing table {', '.join(map(repr, tables[:5]))} of the schema"
    raise ConfigError(expected=expected, found=found, where=where, ways_out=ways_out)
