"""The data sets that models are compared on, as runs without a model.

Each fixes files, split and schema:

frappe             Frappe_x1 as BARS splits it (202,027 / 57,722 / 28,860 rows); needs its files once, see
                   `data/datasets/frappe.py`
movielens          MovieLens-1M by time: the latest tenth is test data, the tenth before it validation data;
                   like = rating of 4 or more
movielens-random   MovieLens-1M at random 8:1:1, ratings of 3 dropped, like = 4 or more: the easier form in which
                   papers report it (AutoInt and later)
synthetic          a teacher whose best reachable metrics are known (`data/synthetic/teacher.py`)
synthetic-300k, synthetic-1m, synthetic-10m
                   a teacher whose interactions reach order six (`six_orders`), and so many rows of it: 92 % train,
                   3 % validate, 5 % are the test
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import polars as pl

from ziggurat.cache import cache_folder
from ziggurat.data.datasets import fetch, schema_for
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.synthetic.teacher import SyntheticConfig, SyntheticTeacher, six_orders
from ziggurat.errors import ConfigError
from ziggurat.files import replacing
from ziggurat.models import DNNConfig
from ziggurat.recipes.run_config import DatasetConfig, RunConfig

# Few ids, each seen often, so that one pass over half a million rows teaches pairs and triples, not only single ids.
TEACHER = SyntheticConfig(
    num_dense=4,
    cardinalities=(8, 10, 12, 16, 20, 24, 28, 32),
    zipf_exponent=0.3,
    num_groups=2,
    hidden_dim=2,
    third_order_share=0.2,
)


class ComparedData(StrEnum):
    """A data set to compare models on; see the module docstring."""

    FRAPPE = "frappe"
    MOVIELENS = "movielens"
    MOVIELENS_RANDOM = "movielens-random"
    SYNTHETIC = "synthetic"
    SYNTHETIC_300K = "synthetic-300k"
    SYNTHETIC_1M = "synthetic-1m"
    SYNTHETIC_10M = "synthetic-10m"


ROWS_OF_SIX_ORDERS = {
    ComparedData.SYNTHETIC_300K: 300_000,
    ComparedData.SYNTHETIC_1M: 1_000_000,
    ComparedData.SYNTHETIC_10M: 10_000_000,
}
USUAL_ROWS = 1_000_000  # of the data set `synthetic`


def check_rows(data: object, rows: int) -> None:
    """Refuse a number of rows for data that has its own: it would have no effect.

    Args:
        data: what is compared on.
        rows: as asked for; 0 for none.

    Raises:
        ConfigError: rows of another data set than `synthetic`.
    """
    if rows and data is not ComparedData.SYNTHETIC:
        raise ConfigError(
            expected="--rows with data synthetic: all other data has its rows",
            found=f"{rows:,} rows of {data.value if isinstance(data, ComparedData) else 'data of your own'}",
            where="command line, --rows",
            ways_out=("leave --rows out", f"the teacher of pairs and triples: synthetic, --rows {rows}"),
        )


def data_run(data: ComparedData, *, source: str = "", rows: int = USUAL_ROWS) -> RunConfig:
    """A run with everything but its model and training settings.

    Args:
        data: which.
        source: a folder or file to take it from; "" for the cache or the default source.
        rows: of `synthetic`.
    """
    model = DNNConfig()
    match data:
        case ComparedData.FRAPPE:
            return RunConfig(
                dataset=DatasetConfig(name="frappe", source=source),
                data=DataConfig(split=SplitConfig(by=SplitBy.FILES)),
                table_schema=schema_for("frappe"),
                model=model,
            )
        case ComparedData.MOVIELENS:
            split = SplitConfig(by=SplitBy.TIME, valid_fraction=0.1, test_fraction=0.1)
            return RunConfig(
                dataset=DatasetConfig(name="movielens-1m", source=source),
                data=DataConfig(split=split),
                table_schema=schema_for("movielens-1m"),
                model=model,
            )
        case ComparedData.MOVIELENS_RANDOM:
            split = SplitConfig(by=SplitBy.RANDOM, valid_fraction=0.1, test_fraction=0.1)
            return RunConfig(
                data=DataConfig(train=(str(ratings_without_three(source)),), split=split),
                table_schema=schema_for("movielens-1m"),
                model=model,
            )
        case ComparedData.SYNTHETIC:
            split = SplitConfig(by=SplitBy.RANDOM, valid_fraction=0.05, test_fraction=0.1)
            return RunConfig(
                dataset=DatasetConfig(name="synthetic", rows=rows),
                teacher=TEACHER,
                data=DataConfig(split=split),
                table_schema=SyntheticTeacher(TEACHER).schema(),
                model=model,
            )
        case _:
            teacher = six_orders()
            return RunConfig(
                dataset=DatasetConfig(name="synthetic", rows=ROWS_OF_SIX_ORDERS[data]),
                teacher=teacher,
                data=DataConfig(split=SplitConfig(by=SplitBy.RANDOM, valid_fraction=0.03, test_fraction=0.05)),
                table_schema=SyntheticTeacher(teacher).schema(),
                model=model,
            )


def ratings_without_three(source: str = "") -> Path:
    """MovieLens-1M's ratings without those of 3, which say neither like nor dislike; written to the cache once."""
    path = cache_folder() / "movielens-1m-without-3" / "ratings.parquet"
    if not path.exists():
        ratings = pl.read_parquet(fetch("movielens-1m", source=source or None))
        with replacing(path) as temporary:
            ratings.filter(pl.col("rating") != 3).write_parquet(temporary)
    return path
