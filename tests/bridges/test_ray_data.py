"""Preparing with Ray Data: what one machine fits and encodes, bit for bit; errors in four parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import DataError
from ziggurat.features.schema import Categorical, Dense, Label, MultiHot, NumericTransform, Schema, Table

ray = pytest.importorskip("ray", reason="needs ray[data]: make test-bridges")
pytest.importorskip("ray.data", reason="needs ray[data]: make test-bridges")

SCHEMA = Schema(
    features=(
        Dense(name="price", transform=NumericTransform.LOG1P_STANDARDISE),
        Dense(name="rank", column="price", transform=NumericTransform.QUANTILE),
        Categorical(name="user"),
        MultiHot(name="tags"),
    ),
    labels=(Label(name="click"),),
    tables=(Table(name="user", min_count=2),),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Five files of 200 rows; Ray runs meanwhile."""
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("raw")
    paths = []
    for index in range(5):
        table = pa.table(
            {
                "price": rng.lognormal(size=200),
                "user": rng.zipf(1.3, 200) % 50,
                "tags": [[f"t{value}" for value in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(200)],
                "click": rng.integers(0, 2, 200),
            }
        )
        pq.write_table(table, folder / f"{index}.parquet")
        paths.append(str(folder / f"{index}.parquet"))
    places = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, runtime_env={"env_vars": places})
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    try:
        yield paths
    finally:
        ray.shutdown()


def test_ray_prepares_what_one_machine_prepares(files: list[str], tmp_path: Path) -> None:
    from ziggurat.bridges.ray_data import fit, transform, with_row_numbers, write_encoded

    chunks = list(RawSource(files).frames())
    expected = Preprocessing.fit(SCHEMA, chunks)
    rows = with_row_numbers(ray.data.read_parquet(files, override_num_blocks=5))
    preprocessing = fit(rows, schema=SCHEMA)
    assert preprocessing.fingerprint == expected.fingerprint
    encoded = pa.concat_tables(ray.get(transform(rows, preprocessing=preprocessing).to_arrow_refs()))
    alone = pa.concat_tables([expected.encode(chunk) for chunk in chunks])
    assert encoded.sort_by("row:").to_pylist() == alone.to_pylist()
    dataset = write_encoded(
        rows, folder=tmp_path / "train", preprocessing=preprocessing, rows_per_group=100, rows_per_file=300
    )
    assert dataset.num_rows == 1000
    back = pa.concat_tables([dataset.read_group(index) for index in range(len(dataset.group_sizes))])
    assert back.to_pylist() == alone.to_pylist()
    assert EncodedDataset(tmp_path / "train").row_sum == dataset.row_sum
    with pytest.raises(DataError, match="does not exist yet"):
        write_encoded(rows, folder=tmp_path / "train", preprocessing=preprocessing)


def test_faults_are_told(files: list[str], tmp_path: Path) -> None:
    from ziggurat.bridges.ray_data import fit, write_encoded

    rows = ray.data.from_arrow(pa.table({"price": [1.0], "user": ["a"], "tags": [["x"]], "click": [3.0], "row": [0]}))
    with pytest.raises(Exception, match="0 or 1, for binary label 'click'"):
        fit(rows, schema=SCHEMA)
    good = ray.data.from_arrow(pa.table({"price": [1.0], "user": ["a"], "tags": [["x"]], "click": [1.0], "row": [0]}))
    preprocessing = fit(good, schema=SCHEMA)
    with pytest.raises(Exception, match="0 or 1, for binary label 'click'"):
        write_encoded(rows, folder=tmp_path / "train", preprocessing=preprocessing)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="at least one row"):
        fit(good.filter(lambda row: row["row"] > 5), schema=SCHEMA)
