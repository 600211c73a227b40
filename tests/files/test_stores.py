"""Files in stores: found by URL and glob, read whole or not at all, whatever the connection does."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest

from tests.files.flaky_store import Faults, put
from ziggurat.errors import ConfigError, DataError, FileError, MissingDependencyError, MissingFileError
from ziggurat.files import read_text, store_reader, stores, write_text
from ziggurat.files.stores import StoreFile, files_at, is_url, local_path

CONTENT = np.random.default_rng(1).bytes(300_000)


@pytest.mark.parametrize("in_order", [False, True])
def test_goes_on_at_the_byte_where_a_connection_broke(faults: Faults, in_order: bool) -> None:
    url = put("b/x.bin", CONTENT)
    faults.drop_after = 70_000
    with StoreFile(url).open(in_order=in_order) as file:
        assert file.read() == CONTENT
    assert sum(length for _, length in faults.reads) == len(CONTENT)  # no byte was asked for twice
    assert faults.opened == 5


def test_half_an_object_is_an_error(faults: Faults) -> None:
    url = put("b/x.bin", CONTENT)
    faults.most = 150_000
    with StoreFile(url).open() as file, pytest.raises(DataError) as raised:
        file.read()
    assert "150,000 of 300,000 bytes" in raised.value.found
    assert "byte 150,000" in raised.value.where


def test_waits_longer_each_time_and_gives_up(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(store_reader, "pause", waits.append)
    url = put("b/x.bin", CONTENT)

    def broken(position: int) -> None:
        raise ConnectionResetError("no route")

    faults.on_read = broken
    with StoreFile(url).open() as file, pytest.raises(DataError, match="no route, 8 times"):
        file.read()
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 16]


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT[:100_000], CONTENT + b"more"])
@pytest.mark.parametrize("drop_after", [0, 60_000])
def test_an_object_that_changes_while_it_is_read_is_an_error(faults: Faults, content: bytes, drop_after: int) -> None:
    url = put("b/x.bin", CONTENT)
    faults.drop_after = drop_after

    def change(position: int) -> None:
        if position >= 50_000:
            faults.on_read = None
            put("b/x.bin", content)

    faults.on_read = change
    with StoreFile(url).open(in_order=True) as file, pytest.raises(DataError, match="stays as it is"):
        list(iter(lambda: file.read(30_000), b""))


def test_bytes_are_compared_with_the_stated_md5(faults: Faults) -> None:
    faults.etag = "md5"
    url = put("b/x.bin", CONTENT)
    with StoreFile(url).open(in_order=True) as file:
        assert file.read() == CONTENT
    faults.flip = 1
    with StoreFile(url).open(in_order=True) as file, pytest.raises(DataError, match="MD5"):
        file.read()


def test_an_etag_that_is_no_md5_is_told(faults: Faults) -> None:
    faults.etag = "opaque"
    url = put("opaque/x.bin", CONTENT)
    for _ in range(2):
        faults.reads.clear()
        with StoreFile(url).open(in_order=True) as file:
            assert file.read() == CONTENT
    assert sum(length for _, length in faults.reads) == len(CONTENT)  # known by then: not read again


def replace(name: str, position: int) -> None:
    put(name, b"new")


def test_what_random_faults_leave_is_the_bytes_or_an_error(faults: Faults) -> None:
    outcomes = []
    for seed in range(60):
        chance = random.Random(seed)
        content = CONTENT[: chance.choice([0, 1, 7, 4096, 65_537, 200_000])]
        url = put(f"r/{seed}.bin", content)
        faults.most = chance.choice([0, 0, 1, 3000, len(content)])
        faults.drop_after = chance.choice([0, 1000, 50_000]) if len(content) > 100 else 0
        faults.on_read = functools.partial(replace, f"r/{seed}.bin") if seed % 7 == 0 else None
        size = chance.choice([1 << 20, 4096, 999])
        got = b""
        try:
            with StoreFile(url).open(in_order=chance.random() < 0.5) as file:
                while part := file.read(size):
                    got += part
                file.verify()
            assert got == content
            outcomes.append("whole")
        except DataError:
            outcomes.append("error")
    assert {*outcomes} == {"whole", "error"}


def test_a_large_read_is_made_in_parts(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_reader, "_PART_BYTES", 10_000)
    url = put("b/x.bin", CONTENT)
    faults.drop_after = 7000
    with StoreFile(url).open() as file:
        file.seek(3)
        assert file.read(250_000) == CONTENT[3:250_003]
        assert file.tell() == 250_003
        assert file.read() == CONTENT[250_003:]


def test_globs_folders_and_slow_listings(faults: Faults) -> None:
    for name in ("d/day_1.csv", "d/day_10.csv", "d/readme.txt", "d/deep/day_2.csv", "d/[x].csv"):
        put(name, b"a\n1\n")

    def names(url: str) -> list[str]:
        found = files_at(url, is_wanted=lambda name: name.endswith(".csv"))
        return sorted(str(file).removeprefix("flaky://d/") for file in found)

    faults.failing_lists = 2
    assert names("flaky://d") == ["[x].csv", "day_1.csv", "day_10.csv"]
    assert names("flaky://d/day_?.csv") == ["day_1.csv"]
    assert names("flaky://d/day_[!2].csv") == ["day_1.csv"]
    assert names("flaky://d/**/day_*.csv") == ["day_1.csv", "day_10.csv", "deep/day_2.csv"]
    assert names("flaky://d/*/day_*.csv") == ["deep/day_2.csv"]
    assert names("flaky://d/day_1.csv") == ["day_1.csv"]
    assert names("flaky://nothing/*.csv") == []
    faults.failing_lists = 99
    with pytest.raises(DataError, match="list the folder"):
        names("flaky://d/*.csv")


def test_missing_and_forbidden_objects_are_told_at_once(faults: Faults) -> None:
    with pytest.raises(MissingFileError):
        StoreFile("flaky://b/none.csv").open()
    url = put("b/x.csv", b"x")

    def forbid(position: int) -> None:
        raise PermissionError("ACCESS_DENIED")

    faults.on_read = forbid
    with StoreFile(url).open() as file, pytest.raises(DataError, match="AWS_ACCESS_KEY_ID"):
        file.read()
    assert faults.opened == 1
    with pytest.raises(MissingDependencyError, match="nosuch://"):
        StoreFile("nosuch://b/x.csv").open()


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hidden@bucket/x.csv",
        "s3://bucket/x.csv?secret_key=hidden",
        "abfs://box@account.dfs.core.windows.net/x?account_key=hidden",
        "https://example.invalid/x.csv?X-Amz-Signature=hidden",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        StoreFile(url).open()
    assert "hidden" not in str(raised.value)
    assert "AWS_SECRET_ACCESS_KEY" in str(raised.value)


def test_options_of_s3_come_from_the_url_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []
    monkeypatch.setattr("pyarrow.fs.S3FileSystem", lambda **options: made.append(options))
    for name in stores._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    stores._opened("s3://one/x?endpoint_override=http://localhost:9000&region=eu-central-1&anonymous=true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    stores._opened("s3://one/day_?.csv")
    first, second = made
    assert (first["endpoint_override"], first["scheme"], first["region"]) == ("localhost:9000", "http", "eu-central-1")
    assert first["anonymous"] is True
    assert (second["endpoint_override"], second["anonymous"]) == ("minio:9000", False)


def test_a_copy_is_kept_where_it_is_asked_for(faults: Faults, tmp_path: Path) -> None:
    url = put("b/x.bin", CONTENT)
    file = StoreFile(url, str(tmp_path / "copies"))
    for _ in range(2):
        with file.open() as opened:
            assert opened.read() == CONTENT
    assert sum(length for _, length in faults.reads) == len(CONTENT)
    put("b/x.bin", b"another")
    with file.open() as opened:
        assert opened.read() == b"another"
    faults.most = 3
    put("b/x.bin", b"a third one")
    with pytest.raises(DataError):
        file.open()
    assert len(list((tmp_path / "copies").iterdir())) == 2  # nothing of the third one


def test_small_files_are_read_from_stores_and_never_written_there(faults: Faults) -> None:
    url = put("b/schema.toml", b"x = 1\n")
    assert read_text(url) == "x = 1\n"
    with pytest.raises(DataError, match="at most 3 bytes"):
        read_text(url, max_bytes=3)
    for out in (url, Path("s3://bucket/out.parquet")):
        with pytest.raises(FileError, match="not written"):
            write_text(out, "x")


def test_what_is_a_url() -> None:
    assert is_url("s3://b/x")
    assert not any(map(is_url, ["/a/b", "a:b", "C:\\x", "s3:/b", Path("s3://b/x")]))
    assert local_path("file:///a/b%20c.csv") == "/a/b c.csv"
    assert local_path("s3://b/x") == "s3://b/x"
