"""RunConfig: one whole run as plain data. Written to `config.json` of every run; `--config FILE` repeats it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ziggurat.data.prepare import DataConfig
from ziggurat.data.synthetic import SyntheticConfig
from ziggurat.features.schema import Schema
from ziggurat.models import DCNv2Config, DLRMConfig, DNNConfig, LogisticRegressionConfig
from ziggurat.training.config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """Where the raw data comes from.

    Args:
        name: a data set that `ziggurat data fetch` knows, "synthetic", or "" for the files in `data.train`.
        source: file or folder to take it from, for data sets that cannot be fetched; "" fetches it.
        rows: rows to generate, for "synthetic".
    """

    name: str = ""
    source: str = ""
    rows: int = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Data, model and training of one run.

    Args:
        recipe: the recipe it came from, for people.
        dataset: where raw data comes from.
        teacher: the synthetic teacher, if `dataset.name` is "synthetic".
        data: files, splits, bad rows.
        table_schema: what the columns mean.
        model: any model config; `kind` tells which.
        training: everything else.
    """

    recipe: str = ""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    teacher: SyntheticConfig | None = None
    data: DataConfig
    table_schema: Schema
    model: DLRMConfig | DCNv2Config | DNNConfig | LogisticRegressionConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
