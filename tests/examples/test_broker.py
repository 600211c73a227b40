"""A broker from outside the package: the bits of the same rows from a file, in lives that end and go on."""

from __future__ import annotations

import gzip
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.stream.test_stream_runs import SCHEMA, content_of, events, same, weights_of
from ziggurat.cli.main import main
from ziggurat.data.streams.brokers import Broker, Reader
from ziggurat.data.streams.journal import JournalFile
from ziggurat.errors import ConfigError, DataError, MissingFileError
from ziggurat.features.schema_io import schema_to_toml

MODULE = "examples.extensions.json_lines_broker"


@pytest.fixture
def lines() -> Iterator[Any]:
    """The broker, listed while a test runs."""
    yield Broker.add(importlib.import_module(MODULE).LINES)
    Broker._members.pop("lines", None)


def write(folder: Path, name: str, rows: list[dict[str, Any]], *, rest: str = "") -> None:
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.write(rest)


def test_lines_that_are_appended_train_what_a_file_of_them_does(
    lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(schema_to_toml(SCHEMA))
    frame = events(240, days=4).sort("at")
    # Nobody knows the number of rows of a gzip file either, so the recipe has the same sizes.
    with gzip.open("all.csv.gz", "wb") as file:
        frame.write_csv(file)
    rows = frame.to_dicts()
    folder = tmp_path / "clicks"
    folder.mkdir()
    words = ["--extension", MODULE, "stream", "table_dlrm", "--schema", "my.toml", "--batch-size", "32"]
    words += ["--training.threads", "1", "--training.precision", "fp32"]
    live = [*words, "--data.train", f"lines://{folder}", "--out", "runs/live"]
    write(folder, "00.jsonl", rows[:100], rest='{"user": "u')
    assert main(live) == 0
    first = (folder / "acknowledged.txt").read_text()
    assert first.startswith("00.jsonl ")
    # The line that was half written is a row of its own later; a day that was open at the end was done by then.
    journal = JournalFile(Path("runs/live/stream")).read()
    assert journal is not None
    assert journal.files[-1].position + "\n" == first
    Path("runs/live").rename("runs/half")

    (folder / "00.jsonl").write_text("")
    write(folder, "00.jsonl", rows[:100])
    write(folder, "01.jsonl", rows[100:])
    assert main(live) == 0
    assert main([*words, "--data.train", "all.csv.gz", "--out", "runs/file"]) == 0
    assert content_of(Path("runs/live")) == content_of(Path("runs/file"))
    assert same(weights_of(Path("runs/live")), weights_of(Path("runs/file")))
    assert Path("runs/live/ledger.bin").read_bytes() == Path("runs/file/ledger.bin").read_bytes()


def test_positions_give_the_same_lines_again_and_what_is_gone_is_refused(lines: Any, tmp_path: Path) -> None:
    reader = Reader(name="me")
    url = f"lines://{tmp_path}"
    write(tmp_path, "00.jsonl", [{"n": 1}, {"n": 2}, {"n": 3}], rest='{"n"')
    source = lines.subscribe(url, reader=reader, after="")
    first = source.read("", most=2)
    assert list(first.columns["json"]) == [b'{"n": 1}', b'{"n": 2}']
    assert list(source.read(first.position, most=9).columns["json"]) == [b'{"n": 3}']
    end = source.read(first.position, most=9).position
    assert source.read(end, most=9).position == end
    assert source.waiting(end).messages is None
    write(tmp_path, "01.jsonl", [{"n": 5}])
    with pytest.raises(DataError, match="a line feed at the end"):
        source.read(end, most=9)
    write(tmp_path, "00.jsonl", [], rest=": 4}\n")
    assert list(source.read(end, most=9).columns["json"]) == [b'{"n": 4}']
    (tmp_path / "00.jsonl").write_text("")
    with pytest.raises(DataError, match="at least"):
        lines.subscribe(url, reader=reader, after=end)
    with pytest.raises(MissingFileError):
        lines.subscribe("lines:///none/of/this", reader=reader, after="")


def test_a_broker_that_answers_nothing_is_refused_where_it_is_added() -> None:
    class Half(Broker):
        name = "half"

    with pytest.raises(ConfigError, match="subscribe"):
        Broker.add(Half())
