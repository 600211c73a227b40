"""S3 as it is spoken over HTTP: a local server of moto, and one in front of it that breaks connections and answers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from ziggurat.cli.main import main
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import DataError, MissingFileError
from ziggurat.features.schema import Categorical, Dense, Label, Schema
from ziggurat.features.schema_io import write_schema
from ziggurat.files import store_reader

boto3 = pytest.importorskip("boto3", reason="needs moto and boto3: make test-bridges")
moto_server = pytest.importorskip("moto.server", reason="needs moto: make test-bridges")

ROWS = 20_000
FRAME = pl.DataFrame(
    {
        "user": [f"u{i * i % 977}" for i in range(ROWS)],
        "price": [i % 89 / 4 for i in range(ROWS)],
        "click": [int(i % 3 == 0) for i in range(ROWS)],
    }
)
SCHEMA = Schema(features=(Categorical(name="user"), Dense(name="price")), labels=(Label(name="click"),))


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on; answers to reads of objects are cut, halved or changed as `faults` says."""

    protocol_version = "HTTP/1.1"
    behind = 0
    faults: dict[str, Any] = {}  # noqa: RUF012

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        there = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=30)
        there.request(self.command, self.path, body, dict(self.headers))
        answer = there.getresponse()
        content = answer.read()
        there.close()
        reads = self.command == "GET" and "Range" in self.headers
        if reads and (then := self.faults.pop("then", None)):
            then()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        if reads and self.faults.get("cut", 0) > 0 and len(content) > 2000:
            self.faults["cut"] -= 1
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A client of a bucket behind the proxy."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    Proxy.behind = server.get_host_and_port()[1]
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        patch.setattr(store_reader, "pause", lambda seconds: None)
        client = boto3.client("s3")
        client.create_bucket(Bucket="shop")
        yield client
    proxy.shutdown()
    server.stop()


@pytest.fixture(autouse=True)
def _no_faults() -> Iterator[None]:
    yield
    Proxy.faults.clear()


def put(client: Any, key: str, folder: Path, frame: pl.DataFrame = FRAME) -> str:
    path = folder / Path(key).name
    frame.write_parquet(path, row_group_size=5000) if key.endswith("parquet") else frame.write_csv(path)
    client.put_object(Bucket="shop", Key=key, Body=path.read_bytes())
    return f"s3://shop/{key}"


def rows(url: str) -> pl.DataFrame:
    return pl.concat([chunk.frame for chunk in RawSource(url).frames()])


def test_globs_folders_and_both_kinds_of_files(bucket: Any, tmp_path: Path) -> None:
    for part in (2, 10):
        put(bucket, f"parts/day_{part}.parquet", tmp_path, FRAME[:part])
    assert [path.name for path in RawSource("s3://shop/parts/*.parquet").paths] == ["day_2.parquet", "day_10.parquet"]
    assert rows("s3://shop/parts").height == 12
    text = rows(put(bucket, "one.csv", tmp_path))
    assert text["user"].equals(FRAME["user"])
    assert rows(put(bucket, "one.parquet", tmp_path)).equals(FRAME)
    with pytest.raises(MissingFileError):
        RawSource("s3://shop/none/*.csv")
    with pytest.raises(MissingFileError):
        RawSource("s3://no-such-bucket/x.csv")


@pytest.mark.parametrize("name", ["cut.csv", "cut.parquet"])
def test_cut_answers_cost_attempts_and_no_rows(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    url = put(bucket, name, tmp_path)
    whole = rows(url)
    Proxy.faults["cut"] = 5
    assert rows(url).equals(whole)
    assert Proxy.faults["cut"] < 5
    Proxy.faults["cut"] = 1 << 30
    monkeypatch.setattr(store_reader, "ATTEMPTS", 2)
    with pytest.raises(DataError, match="times one after the other"):
        rows(url)


@pytest.mark.parametrize("name", ["changed.csv", "changed.parquet"])
def test_an_object_replaced_while_it_is_read_is_an_error(bucket: Any, tmp_path: Path, name: str) -> None:
    url = put(bucket, name, tmp_path)
    Proxy.faults["then"] = lambda: put(bucket, name, tmp_path, FRAME.reverse())
    with pytest.raises(DataError, match="stays as it is"):
        rows(url)


def test_a_run_is_trained_resumed_and_scored_from_a_bucket(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    put(bucket, "train/part_1.csv", tmp_path, FRAME[:1500])
    put(bucket, "train/part_2.csv", tmp_path, FRAME[1500:3000])
    write_schema(SCHEMA, tmp_path / "my.toml")
    bucket.put_object(Bucket="shop", Key="my.toml", Body=(tmp_path / "my.toml").read_bytes())
    run, scores = str(tmp_path / "run"), str(tmp_path / "scores.csv")
    train = ["train", "table_dlrm", "--data.train", "s3://shop/train/*.csv", "--schema", "s3://shop/my.toml"]
    small = ["--dim", "4", "--training.loader.batch-size", "500", "--epochs", "1"]
    assert main([*train, *small, "--out", run]) == 0, capsys.readouterr().err
    assert main(["train", "--resume", "--out", run, "--epochs", "2"]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["evaluate", run, "s3://shop/train/part_2.csv"]) == 0
    assert "s3://shop/train/part_2.csv is data of this run" in "".join(capsys.readouterr())
    assert main(["predict", run, "s3://shop/train/part_1.csv", "--out", scores]) == 0, capsys.readouterr().err
    assert pl.read_csv(scores).height == 1500
    kept = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*.json*"))
    assert b"s3://shop/train/part_1.csv" in kept
    assert b"test-secret" not in kept
