"""The embeddings of a feature with the raw ids that they belong to: for nearest neighbours, pictures, other models.

    run.embeddings("movie_id")                                         polars: id (text), vector (D float32)
    ziggurat embeddings runs/first movie_id --out movies.parquet

Ids are canonical texts (`data/preprocess/values/cells.py`: 7, 7.0 and "7" are "7"), most frequent in training first;
those of an identity table are its row numbers. The rows of unknown and missing ids belong to no id and are left out.
A hashed table keeps no ids, and several share a row: it is refused. Features that share a table have the same
embeddings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import torch

from ziggurat.embeddings.weights import TableWeights
from ziggurat.errors import ConfigError
from ziggurat.features.schema import NUM_RESERVED_ROWS, Encoding, table_of
from ziggurat.parallel.tables.sharded_tables import tables_of

if TYPE_CHECKING:
    from ziggurat.runs.load import Run


def ids_of_table(run: Run, table: str) -> pl.Series:
    """The raw ids of a table's rows, but for the reserved ones, in the order of the rows.

    Raises:
        ConfigError: they are hashed.
    """
    if table in run.preprocessing.vocabularies:
        return run.preprocessing.vocabularies[table].ids
    settings = run.preprocessing.schema.table(table)
    if settings.encoding is Encoding.IDENTITY:
        return pl.int_range(settings.num_rows, eager=True).cast(pl.String)
    raise ConfigError(
        expected="a table whose ids are known: one with a vocabulary, or of whole numbers (identity)",
        found=f"table {table!r}, whose ids are hashed",
        where=f"{run.folder}, ids of items",
        ways_out="train with the vocabulary encoding, which keeps the ids",
    )


def embeddings_of(run: Run, feature: str) -> pl.DataFrame:
    """Ids and vectors of a feature, of a run on one device; see the module's docstring.

    Raises:
        ConfigError: no such feature, one without ids, or one whose ids are hashed.
    """
    schema = run.preprocessing.schema
    tables = {each.name: name for each in schema.features if (name := table_of(each))}
    name = tables.get(feature, "")
    vocabulary = run.preprocessing.vocabularies.get(name)
    is_identity = bool(name) and vocabulary is None and schema.table(name).encoding is Encoding.IDENTITY
    weights = next((each for each in tables_of(run.model) if isinstance(each, TableWeights)), None)
    if weights is None or name not in weights.places or (vocabulary is None and not is_identity):
        known = [each for each, table in tables.items() if table in run.preprocessing.vocabularies]
        why = "its ids are hashed or are buckets of numbers" if name else "no such feature with ids"
        raise ConfigError(
            expected=f"a feature whose ids are known: {', '.join(known) or 'this run has none'}",
            found=f"{feature!r}: {why if weights is not None else 'the run is spread over ranks'}",
            where=f"{run.folder}, embeddings",
            ways_out=("name one of these features", "train with the vocabulary encoding, which keeps the ids"),
        )
    vectors = weights.view(name)[NUM_RESERVED_ROWS:].to("cpu", torch.float32).numpy()
    ids = ids_of_table(run, name)
    kind = pl.Array(pl.Float32, vectors.shape[1])
    return pl.DataFrame({"id": ids, "vector": pl.Series(vectors, dtype=kind)})
