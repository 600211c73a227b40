"""A run whose tables no memory holds ends before its data is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, FileError, MissingFileError
from ziggurat.features.schema import Categorical, Dense, Encoding, Label, Schema, Table
from ziggurat.models import DLRMConfig, FinalMLPConfig, ModelConfig, PEPNetConfig
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import train_run


def test_rows_that_the_schema_names_are_compared_with_memory_first(tmp_path: Path) -> None:
    schema = Schema(
        labels=(Label(name="click"),),
        tables=(Table(name="user", encoding=Encoding.HASHING, num_rows=10**12),),
        features=(Categorical(name="user", table="user"),),
    )
    data = DataConfig(train=(str(tmp_path / "absent.parquet"),))
    with pytest.raises(ConfigError, match="before data is read") as caught:
        train_run(RunConfig(data=data, table_schema=schema, model=DLRMConfig()), folder=tmp_path / "run")
    assert "'user': 1,000,000,000,003 rows" in caught.value.found
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("num_rows", [0, 10**12])
@pytest.mark.parametrize(
    "model", [FinalMLPConfig(first_context=("user", "age")), PEPNetConfig(domain=("shop",), prior=("user", "age"))]
)
def test_a_model_may_name_features_before_data_is_read(model: ModelConfig, num_rows: int, tmp_path: Path) -> None:
    encoding = Encoding.HASHING if num_rows else Encoding.VOCABULARY
    schema = Schema(
        labels=(Label(name="click"),),
        tables=(Table(name="user", encoding=encoding, num_rows=num_rows),),
        features=(Categorical(name="user", table="user"), Categorical(name="shop"), Dense(name="age")),
    )
    config = RunConfig(data=DataConfig(train=(str(tmp_path / "absent.parquet"),)), table_schema=schema, model=model)
    with pytest.raises(ConfigError if num_rows else MissingFileError) as caught:
        train_run(config, folder=tmp_path / "run")
    if num_rows:
        assert "'user': 1,000,000,000,003 rows" in caught.value.found


@pytest.mark.parametrize("folder", ["absent/folder", "a_file"])
def test_a_disk_that_takes_no_files_is_refused_before_data_is_read(folder: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("of another kind")
    features = (Categorical(name="user"), Categorical(name="item"))
    schema = Schema(labels=(Label(name="click"),), features=features)
    data = DataConfig(train=(str(tmp_path / "absent.parquet"),))

    def refused(disk: Path) -> Exception:
        config = RunConfig(data=data, table_schema=schema, model=DLRMConfig(), tables=TablesConfig(disk=str(disk)))
        with pytest.raises((FileError, MissingFileError)) as caught:
            train_run(config, folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return caught.value

    error = refused(tmp_path / folder)
    assert isinstance(error, FileError)
    assert error.where == str(tmp_path / folder)
    assert "--tables.disk FOLDER" in error.ways_out[-1]
    assert isinstance(refused(tmp_path), MissingFileError)  # of the data
