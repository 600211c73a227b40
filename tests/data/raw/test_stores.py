"""Raw files in stores are read as those of this machine, and never as fewer rows."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from tests.files.flaky_store import Faults, put
from ziggurat.cli.main import main
from ziggurat.data.clustering import cluster_by_session
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.parquet_seal import seal_parquet
from ziggurat.data.raw.source import RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.data.raw.text_source import open_text, read_text
from ziggurat.errors import ConfigError, DataError, MissingFileError
from ziggurat.features.schema import Categorical, Dense, Label, Schema
from ziggurat.files import store_reader
from ziggurat.files.stores import StoreFile
from ziggurat.runs.data_record import raw_file

FRAME = pl.DataFrame(
    {
        "session": [f"s{i % 7}" for i in range(4000)],
        "item": [f"i{i * i % 1013}" for i in range(4000)],
        "price": [i % 97 / 8 for i in range(4000)],
        "click": [int(i % 3 == 0) for i in range(4000)],
    }
)


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getvalue()


def content_of(name: str, folder: Path) -> bytes:
    """The frame as a file of that name."""
    if name == "sealed.parquet":
        FRAME.write_parquet(folder / name, row_group_size=900)
        seal_parquet(folder / name)
        return (folder / name).read_bytes()
    if name.endswith(".parquet"):
        return written(lambda out: FRAME.write_parquet(out, row_group_size=900))
    if name.endswith(".arrow"):
        return written(lambda out: FRAME.write_ipc_stream(out, compat_level=pl.CompatLevel.oldest()))
    if name.endswith(".feather"):
        return written(lambda out: FRAME.write_ipc(out, compression="zstd"))
    text = FRAME.write_csv().encode()
    return gzip.compress(text) if name.endswith(".gz") else text


NAMES = ("a.parquet", "sealed.parquet", "a.arrow", "a.feather", "a.csv", "a.csv.gz")


def rows(path: str | Path | StoreFile) -> pl.DataFrame:
    return pl.concat([chunk.frame for chunk in RawSource(path).frames(chunk_rows=512)])


@pytest.mark.parametrize("name", NAMES)
def test_random_faults_give_all_rows_or_an_error(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(store_reader, "_FIRST_WINDOW_BYTES", 4096)
    content = content_of(name, tmp_path)
    (tmp_path / name).write_bytes(content)
    expected = rows(tmp_path / name)
    url = put(f"d/{name}", content)
    outcomes = []
    for seed in range(12):
        chance = random.Random(f"{name} {seed}")
        put(f"d/{name}", content)
        faults.drop_after = chance.choice([0, 600, 5000])
        faults.most = len(content) * chance.randrange(1, 10) // 10 if seed % 4 == 1 else 0
        changed_at = chance.randrange(len(content) // 2)

        def change(position: int, changed_at: int = changed_at) -> None:
            if position >= changed_at:
                put(f"d/{name}", content[: len(content) // 2])

        faults.on_read = change if seed % 4 == 2 else None
        try:
            assert rows(url).equals(expected)
            outcomes.append("whole")
        except DataError as error:
            outcomes.append("error" if url in error.where else error.where)
    assert outcomes == ["whole", "error", "error", "whole"] * 3


def test_an_object_replaced_between_two_row_groups_is_an_error(faults: Faults) -> None:
    url = put("d/a.parquet", content_of("a.parquet", Path()))
    chunks = RawSource(url).frames(chunk_rows=900)
    next(chunks)
    put("d/a.parquet", content_of("a.parquet", Path()))  # the same bytes, written again
    with pytest.raises(DataError, match="stays as it is"):
        list(chunks)


def test_columns_that_change_places_between_header_and_rows_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    file = open_text(tmp_path / "a.csv", options=TextOptions(), delimiter=",", criteo=False)
    (tmp_path / "a.csv").write_text("b,a\n2,1\n")
    with pytest.raises(DataError, match="header that was read before"):
        list(read_text(file, columns=("a",), numbers=frozenset(), ids=frozenset(), bad_rows=BadRows()))


SCHEMA = Schema(
    features=(Categorical(name="item"), Dense(name="price")), labels=(Label(name="click"),), session="session"
)


def test_prepared_data_is_that_of_local_files(faults: Faults, tmp_path: Path) -> None:
    half = FRAME.height // 2
    for part, frame in enumerate((FRAME[:half], FRAME[half:])):
        frame.write_csv(tmp_path / f"day_{part}.csv")
        put(f"d/day_{part}.csv", (tmp_path / f"day_{part}.csv").read_bytes())
    faults.drop_after = 9000
    split = SplitConfig(by=SplitBy.RANDOM)
    here = prepare(DataConfig(train=(f"{tmp_path}/day_*.csv",), split=split), schema=SCHEMA, folder=tmp_path / "1")
    config = DataConfig(train=("flaky://d/day_*.csv",), split=split)
    there = prepare(config, schema=SCHEMA, folder=tmp_path / "2")
    assert there.train.digest == here.train.digest
    opened = faults.opened
    assert prepare(config, schema=SCHEMA, folder=tmp_path / "2").train.digest == here.train.digest
    assert faults.opened == opened  # kept: the store was asked for versions alone
    put("d/day_1.csv", (tmp_path / "day_1.csv").read_bytes().replace(b"i9", b"i8"))
    assert prepare(config, schema=SCHEMA, folder=tmp_path / "2").train.digest != here.train.digest


def test_copies_are_read_instead_and_change_nothing(faults: Faults, tmp_path: Path) -> None:
    url = put("d/a.csv.gz", content_of("a.csv.gz", tmp_path))
    split = SplitConfig(by=SplitBy.TIME_ORDER)  # reads the files twice
    config = DataConfig(train=(url,), split=split, copies=str(tmp_path / "copies"))
    kept = prepare(config, schema=SCHEMA, folder=tmp_path / "1")
    size = len(content_of("a.csv.gz", tmp_path))
    assert sum(length for _, length in faults.reads) == size
    read = prepare(DataConfig(train=(url,), split=split), schema=SCHEMA, folder=tmp_path / "2")
    assert read.train.digest == kept.train.digest


def test_a_remote_file_is_known_by_the_digest_of_its_bytes(faults: Faults, tmp_path: Path) -> None:
    content = content_of("a.csv", tmp_path)
    (tmp_path / "a.csv").write_bytes(content)
    there, here = raw_file(StoreFile(put("d/a.csv", content))), raw_file(tmp_path / "a.csv")
    assert (there.digest, there.num_bytes, there.path) == (here.digest, here.num_bytes, "flaky://d/a.csv")


def test_commands_take_urls(faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = put("d/log.parquet", content_of("log.parquet", tmp_path))
    assert main(["data", "inspect", url, "--label", "click", "--session", "session"]) == 0
    assert "sessions by session: 4,000 rows in 7 sessions" in capsys.readouterr().out
    done = cluster_by_session([url], session="session", out=tmp_path / "out.parquet")
    assert done.num_rows == FRAME.height
    assert done.bytes_before
    assert main(["data", "cluster-by-session", url, "--session", "session", "--out", "s3://b/out.parquet"]) == 2
    assert "not written" in capsys.readouterr().err


def test_a_path_made_of_a_url_is_told(faults: Faults) -> None:
    with pytest.raises(MissingFileError, match="give a URL as text"):
        RawSource(Path("s3://bucket/x.csv"))
    with pytest.raises(ConfigError, match=r"ends in \.parquet"):
        RawSource(put("d/x.bin", b"hello")).columns()


def test_feather_of_version_one_and_streams_without_an_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(DataError, match="version 1"):
        rows(tmp_path / "old.feather")
    table = pa.table({"a": list(range(100))})
    with pa.ipc.new_stream(tmp_path / "s.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    whole = (tmp_path / "s.arrow").read_bytes()
    assert rows(tmp_path / "s.arrow").height == 100
    (tmp_path / "s.arrow").write_bytes(whole[:-8])
    with pytest.raises(DataError, match="no end of a stream"):
        rows(tmp_path / "s.arrow")
