"""RunConfig: one whole run as plain data. Written to `config.json` of every run; `--config FILE` repeats it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ziggurat.data.prepare import DataConfig
from ziggurat.data.synthetic import SyntheticConfig
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Schema, table_of
from ziggurat.models import DCNv2Config, DLRMConfig, DNNConfig, LogisticRegressionConfig
from ziggurat.models.build import check_towers
from ziggurat.plan import Towers
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
        towers: groups of features, each behind a module as `model.tower_module` says; None for a flat model.
    """

    recipe: str = ""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    teacher: SyntheticConfig | None = None
    data: DataConfig
    table_schema: Schema
    model: DLRMConfig | DCNv2Config | DNNConfig | LogisticRegressionConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    towers: Towers | None = None

    def check(self) -> None:
        """Refuse contradictions between the parts of a run before the first file is read.

        Raises:
            PlanError: the towers do not fit the features of the schema.
            ConfigError: the model cannot have towers, their compression does not fit its tables, or there are settings
                of tower modules and no towers.
        """
        check_towers(self.model, self.towers)
        if isinstance(self.model, LogisticRegressionConfig):
            return
        if self.towers is not None:
            self.towers.check(
                {feature.name: name for feature in self.table_schema.features if (name := table_of(feature))}
            )
            self.model.tower_module.output_dim(self.model.embedding_dim)
        elif self.model.tower_module != type(self.model)().tower_module:
            raise ConfigError(
                expected="towers, or the settings of tower modules as they were",
                found=f"no towers, and {self.model.tower_module}",
                where="model.tower-module",
                ways_out=("give the towers: --towers FILE", "leave model.tower-module and --compression alone"),
            )
