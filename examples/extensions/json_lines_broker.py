"""Add a broker: a folder into which others append lines of JSON, read as a stream of messages.

Log shippers write such folders: each writer appends objects, a line each, to a file of the hour, and begins a new one.
The verb `stream` reads whole files, and would wait until a file of text is at rest; here each line is a message as soon
as its line feed is there.

    lines://host/var/log/clicks                 host is left empty for this machine: lines:///var/log/clicks

    import json_lines_broker                    # lists it; on the command line:

    ziggurat --extension json_lines_broker stream table_dlrm --data.train lines:///var/log/clicks --schema my.toml

A position is the name of a file and a number of bytes of it. Files are read in the order of their names, each to its
end before the next; so a writer begins a new file when the one before ends with a line feed and is closed. A file that
was removed or cut before its end was read, or ends in half a line while there is a next one, is an error that names it.
`acknowledge` writes the position into the folder, for whoever removes old files.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ziggurat.data.streams.brokers import Broker, Messages, Reader, Subscription, Waiting
from ziggurat.errors import DataError, MissingFileError
from ziggurat.files import write_text

_BLOCK_BYTES = 4 << 20


class _Lines(Subscription):
    """One reader of a folder."""

    def __init__(self, folder: Path, *, reader: Reader) -> None:
        self._folder = folder
        self._reader = reader

    def read(self, after: str, *, most: int) -> Messages:
        """Return the lines right behind a position."""
        name, begun = _parts(after)
        files = self._files(since=name)
        for path in files:
            begin = begun if path.name == name else 0
            with path.open("rb") as file:
                file.seek(begin)
                block = file.read(_BLOCK_BYTES)
            # The last piece is a line that is still written, or empty.
            lines = block.split(b"\n")[:-1][:most]
            if block and not lines and (path != files[-1] or len(block) == _BLOCK_BYTES):
                raise DataError(
                    expected=f"lines of at most {_BLOCK_BYTES:,} bytes, and a line feed at the end of each file",
                    found=f"{len(block):,} bytes without one",
                    where=f"{path}, byte {begin}",
                    ways_out=("end the line",),
                )
            if lines:
                ends = [begin]
                for line in lines:
                    ends.append(ends[-1] + len(line) + 1)
                ids = [f"{path.name}:{place}" for place in ends[:-1]]
                return Messages(ids=ids, columns={"json": lines}, position=f"{path.name} {ends[-1]}")
        return Messages(position=after)

    def acknowledge(self, position: str) -> None:
        """Write the position down beside the files."""
        write_text(self._folder / "acknowledged.txt", position + "\n")

    def waiting(self, after: str) -> Waiting:
        """Return how far a position is behind; lines are not counted."""
        name, begun = _parts(after)
        rest = sum(path.stat().st_size for path in self._files(since=name)) - begun
        return Waiting(messages=0 if rest == 0 else None)

    def _files(self, *, since: str) -> list[Path]:
        """Return the files from a name on."""
        return [path for path in sorted(self._folder.glob("*.jsonl")) if path.name >= since]


class JsonLinesFolder(Broker):
    """A folder of files of JSON lines that grow."""

    name = "lines"

    def subscribe(self, url: str, *, reader: Reader, after: str) -> Subscription:
        """Open the folder."""
        folder = Path(unquote(urlsplit(url).path))
        if not folder.is_dir():
            raise MissingFileError(
                expected="a folder of files of JSON lines",
                found="none",
                where=str(folder),
                ways_out=("make it: writers add files to it later",),
            )
        name, begun = _parts(after)
        known = folder / name
        if name and not (known.exists() and known.stat().st_size >= begun):
            raise DataError(
                expected=f"{name} with at least {begun:,} bytes, up to which lines were read",
                found=f"{known.stat().st_size:,} bytes" if known.exists() else "no such file",
                where=str(folder),
                ways_out=("restore the file", "begin the stream anew: --out ANOTHER_FOLDER"),
            )
        return _Lines(folder, reader=reader)


def _parts(position: str) -> tuple[str, int]:
    name, _, begun = position.partition(" ")
    return name, int(begun or 0)


LINES = Broker.add(JsonLinesFolder())
