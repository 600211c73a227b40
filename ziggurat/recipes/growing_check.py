"""What growing vocabularies do not go with, refused before the first file is read."""

from __future__ import annotations

from ziggurat.errors import ConfigError
from ziggurat.features.schema import Encoding, Schema
from ziggurat.models import ModelConfig
from ziggurat.models.contract.reads import finds_items
from ziggurat.parallel.prioritised.choice import Exchange

_OTHER = 'give the tables another encoding: "vocabulary" or "hashing"'


def check_growing(schema: Schema, *, model: ModelConfig, exchange: Exchange, context: int) -> None:
    """Refuse settings that growing tables do not go with.

    Args:
        schema: of the run.
        model: its config.
        exchange: between ranks.
        context: ranks that divide histories.

    Raises:
        ConfigError: a model that finds items, events, an optimizer with dense gradients, rows sent ahead, or histories
            that ranks divide.
    """
    tables = [table.name for table in schema.tables if table.encoding is Encoding.GROWING]
    if not tables:
        return
    if finds_items(model) or schema.events is not None:
        _refuse(
            tables,
            expected="a model that scores samples: its items need no rows but those of the batch",
            found=f"model {model.kind!r}, which finds items among all of them"
            if schema.events is None
            else "a schema with [events], whose sequences are made of a fixed catalogue",
            ways_out=(_OTHER, "train a ranker: ziggurat train table_dlrm"),
        )
    if model.embedding.optimizer.is_dense:
        _refuse(
            tables,
            expected="an optimizer of touched rows: a row that changes its id begins anew",
            found=f"--model.embedding.optimizer {model.embedding.optimizer}",
            ways_out=("--model.embedding.optimizer rowwise_adagrad (or sgd, sparse_adam)", _OTHER),
        )
    if exchange is not Exchange.PLAIN or context > 1:
        _refuse(
            tables,
            expected="plain exchange and whole histories: rows are known when the step before is done, not earlier",
            found=f"--parallel.exchange {exchange.value}, --parallel.context {context}",
            ways_out=("leave both out", _OTHER),
        )


def _refuse(tables: list[str], *, expected: str, found: str, ways_out: tuple[str, ...]) -> None:
    where = f"growing table {', '.join(map(repr, tables[:5]))} of the schema"
    raise ConfigError(expected=expected, found=found, where=where, ways_out=ways_out)
