"""Parts of a text file: together they are the file, to the row, the line and the fault."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ziggurat.data.raw.bad_rows import BadRowPolicy, BadRows
from ziggurat.data.raw.source import FileFormat, RawSource
from ziggurat.data.raw.text_blocks import TextOptions
from ziggurat.data.raw.text_parts import TextPart

TEXT = TextOptions(max_record_bytes=64, block_bytes=128)


def rows_of(path: Path, *, parts: list[TextPart | None], folder: Path) -> tuple[list[tuple], list[tuple]]:
    """Rows with their numbers and lines, and every fault, of a file that is read part by part."""
    rows: list[tuple] = []
    bad_rows = BadRows(BadRowPolicy.QUARANTINE, folder=folder)
    start = 0
    with bad_rows:
        for part in parts:
            source = RawSource(path, text=TEXT, bad_rows=bad_rows, part=part)
            for chunk in source.frames(ids=["b"], chunk_rows=3):
                lines = chunk.lines if chunk.lines is not None else np.zeros(0)
                values = zip(chunk.column("a"), chunk.column("b"), strict=True)
                rows += zip((chunk.global_rows + start).tolist(), lines.tolist(), values, strict=True)
            start += source.num_read
    notes = [json.loads(line) for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return rows, [(note["row"], note["line"]) for note in notes]  # what a line that is too long is called may differ


def some_text(random: np.random.Generator, *, line_end: bytes) -> bytes:
    lines = [b"a,b"]
    for index in range(int(random.integers(3, 40))):
        kind = random.integers(12)
        if kind == 0:
            lines += [b""] * int(random.integers(1, 4))
        elif kind == 1:
            lines.append(b"x" * int(random.integers(60, 400)))
        elif kind == 2:
            lines.append(b"1,2,3")
        elif kind == 3:
            lines.append(b"\xff,1")
        else:
            lines.append(f"{index},{random.integers(1000)}".encode())
    return line_end.join(lines) + line_end * int(random.integers(4))


@pytest.mark.parametrize("seed", range(12))
def test_parts_are_the_file(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    path = tmp_path / "log.csv"
    path.write_bytes(some_text(random, line_end=(b"\n", b"\r\n")[seed % 2]))
    whole = rows_of(path, parts=[None], folder=tmp_path / "whole")
    for num_parts in (2, 3, 7):
        parts = RawSource(path, text=TEXT).parts_of(path, num_parts=num_parts)
        assert len(parts) <= num_parts
        if parts:
            found = rows_of(path, parts=list(parts), folder=tmp_path / f"{num_parts}")
            assert found == whole


def test_what_cannot_be_cut_is_not(tmp_path: Path) -> None:
    plain = "a,b\n" + "1,2\n" * 100
    for name, text, is_cut in (
        ("plain.csv", plain, True),
        ("quoted.csv", plain + '"1\n",2\n', False),
        ("one_line.csv", "a,b\n" + "1" * 500 + ",2", False),
        ("header.csv", "a,b\n", False),
    ):
        path = tmp_path / name
        path.write_text(text)
        assert bool(RawSource(path).parts_of(path, num_parts=4)) is is_cut, name
    criteo = tmp_path / "quoted.tsv"
    criteo.write_text(("1\t" + "2\t" * 13 + '"\t' * 25 + "x\n") * 50)
    assert RawSource(criteo, format=FileFormat.CRITEO).parts_of(criteo, num_parts=3)
