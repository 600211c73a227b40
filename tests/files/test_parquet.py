"""A Parquet file that cannot be written is one error, and nothing is printed beside it when the writer is collected."""

from __future__ import annotations

import gc
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ziggurat.files.parquet import ParquetFile, write_table


class _Broken:
    """A file that a full disk does not let close."""

    def close(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("kind", "said"), [(ParquetFile, 0), (pq.ParquetWriter, 1)])
def test_the_end_of_a_writer_says_nothing_of_what_its_caller_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[pq.ParquetWriter], said: int
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    table = pa.table({"x": [1, 2, 3]})
    writer = kind(tmp_path / "x.parquet", table.schema)
    writer.write_table(table)
    writer.file_handle = _Broken()
    del writer
    gc.collect()
    assert len(heard) == said


def test_an_error_of_closing_reaches_the_caller(tmp_path: Path) -> None:
    writer = ParquetFile(tmp_path / "x.parquet", pa.table({"x": [1]}).schema)
    writer.file_handle = _Broken()
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_a_file_whose_first_bytes_cannot_be_written_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[Any] = []

    def refuses(sink: Any, *arguments: Any, **named: Any) -> None:
        files.append(sink)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pq.core._parquet, "ParquetWriter", refuses)
    with pytest.raises(OSError, match="Input/output error"):
        write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "x.parquet")
    gc.collect()
    assert [file.closed for file in files] == [True]  # else Arrow closes it, and prints what the disk says against it
    assert not (tmp_path / "x.parquet").exists()


def test_no_part_of_a_table_is_left_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    table = pa.table({"x": np.random.default_rng(0).random(10_000)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no room behind the first bytes of a file
    try:
        with pytest.raises(OSError, match="File too large"):
            write_table(table, tmp_path / "x.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()
    assert not heard
    assert not (tmp_path / "x.parquet").exists()
