"""KeptReader: the name under which a folder reads from a broker, and how far it has acknowledged.

A broker gives each entry to one reader of a group, so a name must belong to one folder for good: it is machine, folder
and a random number, kept in `stream/reader.json` before the broker hears it. A folder that lies elsewhere than it did
was moved or copied. It gets a new name, and the one before is kept as a former one: if the first folder still reads,
both see each other, and what a folder that was moved had left is its own again.

How far was acknowledged is written before the broker hears it, too: entries up to there may be so, those behind are
not.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from ziggurat.config import from_json, to_json
from ziggurat.data.streams.brokers import broker_of
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.files import Format
from ziggurat.plain import as_group

ROWS_READER = "reader.json"
LABELS_READER = "label_reader.json"
READER = Format(
    name="ziggurat.stream_reader",
    what="the name under which a stream reads from a broker",
    error=CheckpointError,
    ways_out=("restore the folder from a copy", "begin the stream anew in another folder"),
)


@dataclass(frozen=True, kw_only=True)
class _Record:
    name: str
    place: str
    former: tuple[str, ...] = ()
    acknowledged: str = ""
    url: str = ""


class KeptReader:
    """The reader of a broker that this folder is.

    Args:
        folder: of the stream's journal; the file is made at once.
        file: its name: the rows of a stream have one, and its labels another.
    """

    def __init__(self, folder: Path, *, file: str = ROWS_READER) -> None:
        self._path = folder / file
        place = f"{socket.gethostname()}:{folder.parent.absolute()}"
        found: _Record | None = None
        if self._path.exists():
            found = from_json(_Record, READER.read(self._path), where=str(self._path), error=CheckpointError)
        if found is None or found.place != place:
            former = () if found is None else (found.name, *found.former)
            name = f"ziggurat:{place}:{secrets.token_hex(4)}"
            acknowledged = "" if found is None else found.acknowledged
            url = "" if found is None else found.url
            found = _Record(name=name, place=place, former=former, acknowledged=acknowledged, url=url)
        self._record = found
        self.keep()

    @property
    def url(self) -> str:
        """Return the URL of the messages of labels; "" of rows, whose URL is in the config of the run."""
        return self._record.url

    def keep(self) -> None:
        """Write it down."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        READER.write(self._path, as_group(to_json(self._record)))

    def read_from(self, url: str, *, has_position: bool) -> None:
        """Write down which messages of labels positions belong to.

        Args:
            url: of the stream.
            has_position: whether messages were taken before.

        Raises:
            ConfigError: these were those of another stream.
        """
        before = self._record.url
        if has_position and before:
            refuse_other_messages(before, url, kept_in=self._path, flag="--labels")
        self._record = replace(self._record, url=url)
        self.keep()

    def acknowledge(self, position: str) -> None:
        """Write down that entries up to a position may be acknowledged from now on."""
        if position != self._record.acknowledged:
            self._record = replace(self._record, acknowledged=position)
            self.keep()

    @property
    def name(self) -> str:
        """The name of this folder."""
        return self._record.name

    @property
    def former(self) -> tuple[str, ...]:
        """Names that it had elsewhere."""
        return self._record.former

    @property
    def acknowledged(self) -> str:
        """The position up to which entries may be acknowledged."""
        return self._record.acknowledged


def refuse_other_messages(before: str, given: str, *, kept_in: Path, flag: str) -> None:
    """Refuse a stream of messages in the place of another one: a position in the one says nothing of the other.

    Args:
        before: URL that a stream read from.
        given: URL that it is to read from now.
        kept_in: the file that says which it was.
        flag: that names them.

    Raises:
        ConfigError: they are not the same.
    """
    first = broker_of((before,), flag=flag)
    second = broker_of((given,), flag=flag)
    assert first is not None, "a URL of a broker"
    assert second is not None, "a URL of a broker"
    stream = first.stream_of(before)
    other = second.stream_of(given)
    if first is second and stream == other:
        return
    raise ConfigError(
        expected=f"the messages of {stream}, as before: positions in them are those of the stream",
        found=f"{other}, in {given}",
        where=f"{kept_in}, {flag}",
        ways_out=(f"{flag} {before}", "begin another stream: --out ANOTHER_FOLDER"),
    )
