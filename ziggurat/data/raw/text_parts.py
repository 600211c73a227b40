"""TextParts: one large text file in parts that are read on their own, each from the start of a line to the end of one.

    rank 0   ├ header ┤ row⏎ row⏎ … row⏎ │                         bytes 0 … 999, rows 0 … 6
    rank 1                               │ row⏎ row⏎ … row⏎        bytes 1,000 …,  rows 7 …

Problem: numbers of rows and lines count from the start of the file, and inside quotes a line feed ends nothing. Where a
part begins can only be known by someone who has seen everything before it.

Idea: one look at the bytes counts the line feeds of each part, and looks for a quote. In a file without quotes every
line is a row, good or bad, so that the rows of a part are its line feeds, and errors name the right lines. A file with
a quote in it is not cut, and neither are gzip files, which can be read from their start alone. A part ends behind a
line that is not blank: blank lines end a file, and are bad rows elsewhere.

Cost: 0.2 to 0.5 s a GB from the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """Some lines of a text file.

    Args:
        first_byte: where its first line starts.
        last_byte: behind its last line.
        first_row: number of its first row in the file.
        num_rows: its rows, bad ones included; None for the last part, whose blank lines at the end are no rows.
    """

    first_byte: int
    last_byte: int
    first_row: int
    num_rows: int | None


def cut_text(path: Path, *, header_bytes: int, quote: bytes, num_parts: int) -> tuple[TextPart, ...]:
    """The parts of a plain text file, about equally large; none if a quote occurs in it, or if one is all it has.

    Args:
        path: the file.
        header_bytes: what stands before its first row.
        quote: the byte that may enclose line feeds; empty if none does.
        num_parts: at most so many.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        cuts = [header_bytes]
        for index in range(1, num_parts):
            place = _behind_a_line(file, header_bytes + (size - header_bytes) * index // num_parts)
            if cuts[-1] < place < size:
                cuts.append(place)
        if len(cuts) == 1:
            return ()
        parts: list[TextPart] = []
        row = 0
        for first, last in zip(cuts, [*cuts[1:], size], strict=True):
            num_lines = _count_lines(file, first, last, quote=quote)
            if num_lines is None:
                return ()
            num_rows = None if last == size else num_lines
            parts.append(TextPart(first_byte=first, last_byte=last, first_row=row, num_rows=num_rows))
            row += num_lines
    return tuple(parts)


def _behind_a_line(file: BinaryIO, place: int) -> int:
    """The end of the first line that starts behind `place` and is not blank; 0 if it is not near."""
    file.seek(place)
    data = file.read(_READ_BYTES)
    start = data.find(b"\n") + 1
    while start:
        end = data.find(b"\n", start) + 1
        if data[start:end].strip(b"\r\n"):
            return place + end
        start = end
    return 0


def _count_lines(file: BinaryIO, first: int, last: int, *, quote: bytes) -> int | None:
    """Line feeds of some bytes; None if there is a quote among them."""
    file.seek(first)
    num_lines = 0
    while first < last and (data := file.read(min(_READ_BYTES, last - first))):
        if quote and quote in data:
            return None
        num_lines += data.count(b"\n")
        first += len(data)
    return num_lines
