"""Broker: the protocol by which a stream reads messages, so that another broker is one file.

    --data.train redis://host:6379/clicks
                 └─┬─┘ names a Broker ─► subscribe ─► Subscription: read, acknowledge, waiting, close

Every row is to be trained once, whatever dies. The protocol asks little of a broker for that, since the folder of the
run is what decides:

    position      a text that says up to where messages were read. It is written into the journal of the stream in the
                  same moment as the rows, whole or not at all
    read          gives the messages right behind a position, in an order that stays. Asked again with the same
                  position, it gives the same messages again
    acknowledge   says that a checkpoint on the disk contains all rows up to a position. It may come twice, or late,
                  or never, if a process dies: then the position in the journal says which rows are known

So a message that was read and whose rows are in no journal is read again, and one that is in the journal is not, though
the broker may believe that it is still open. A broker that can no longer give what lies right behind a position must
say so by an error; passing over messages quietly is the only thing that it may not do.

A message is one row: its fields are columns by name, and their values texts, as cells of a CSV file are. A field that
is absent or empty is a missing value. A message with the only field `json` is an object of JSON with the columns; one
with the only field `arrow` is an Arrow stream, of as many rows as it has (`messages.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ziggurat.errors import ConfigError
from ziggurat.specification import Specification

Cell = str | bytes | None


class BrokerAway(Exception):  # noqa: N818  it is no error: who waits long enough never sees one
    """The broker does not answer now, and may do so again: whoever reads tries again from the position that it has.

    Args:
        text: the broker's own words, or those of the connection.
        ways_out: what else may be wrong than that it is away.
    """

    def __init__(self, text: str, *, ways_out: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.ways_out = tuple(ways_out)


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages in their order.

    Args:
        ids: of each, for people and for errors.
        columns: fields by name, with a cell for each message; None where a message has no such field.
        position: behind the last of them; of no messages what was asked for.
        lost: messages before these that the broker no longer has, where the user wants them counted.
    """

    ids: Sequence[str] = ()
    columns: Mapping[str, Sequence[Cell]] = field(default_factory=dict)
    position: str = ""
    lost: int = 0

    @staticmethod
    def of(entries: Iterable[tuple[str, Mapping[str, Cell]]], *, position: str) -> Messages:
        """Return messages that are given one by one, as (id, fields).

        Args:
            entries: the messages.
            position: behind the last one.
        """
        listed = list(entries)
        names = dict.fromkeys(name for _, fields in listed for name in fields)
        columns = {name: [fields.get(name) for _, fields in listed] for name in names}
        return Messages(ids=[id for id, _ in listed], columns=columns, position=position)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The distance of a reader from the newest message.

    Args:
        messages: that are not read yet; None where the broker cannot tell.
        behind_s: seconds between the newest message and the last one that was read; None likewise.
    """

    messages: int | None = None
    behind_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The reader of a stream: the run of one folder.

    Args:
        name: of this folder, unlike that of any other.
        former: names that the folder had where it lay before.
        covered: position up to which all rows are in a checkpoint of the run; "" before the first one.
        say: shows a line to the user.
        is_asked: whether somebody asks the process to end; whoever waits gives up then.
    """

    name: str
    former: tuple[str, ...] = ()
    covered: str = ""
    say: Callable[[str], None] = lambda line: None
    is_asked: Callable[[], bool] = lambda: False


class Subscription(ABC):
    """A reader's connection to the messages of a broker."""

    @abstractmethod
    def read(self, after: str, *, most: int) -> Messages:
        """Return the messages right behind a position; none if there are none now.

        Args:
            after: position of the journal; "" before the first message.
            most: messages at most.

        Raises:
            BrokerAway: the broker does not answer now.
            ZigguratError: it will not give them, whoever waits.
        """

    @abstractmethod
    def acknowledge(self, position: str) -> None:
        """Tell the broker that all rows up to a position are in a checkpoint.

        Raises:
            BrokerAway: the broker does not answer now.
        """

    def waiting(self, after: str) -> Waiting:
        """Return how far a reader at a position is behind.

        Raises:
            BrokerAway: the broker does not answer now.
        """
        del after
        return Waiting()

    def close(self) -> None:  # noqa: B027  many have nothing to end
        """End the connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Broker(Specification, kind="broker"):
    """Connects a stream to a message broker, which the scheme of a URL names.

    Attributes:
        name: scheme of its URLs.
        schemes: further ones.
    """

    schemes: tuple[str, ...] = ()

    @abstractmethod
    def subscribe(self, url: str, *, reader: Reader, after: str) -> Subscription:
        """Connect, and make sure that a reader at a position can go on.

        Args:
            url: as the user gave it.
            reader: who reads.
            after: position of its journal; "" before the first message.

        Raises:
            ConfigError, DataError: it cannot, whoever waits.
            BrokerAway: the broker does not answer now.
        """

    def stream_of(self, url: str) -> str:
        """Return what a position belongs to: the same for all URLs that name the same messages, and for no others.

        Where the broker is, and options of reading, are no part of it.

        Args:
            url: as the user gave it.
        """
        return urlsplit(url).path.strip("/")

    def server_of(self, url: str) -> str:
        """Return the server that has the messages: the same for all URLs that name it.

        Args:
            url: as the user gave it.
        """
        return urlsplit(url).netloc

    def group_of(self, url: str) -> str:
        """Return the name under which the broker keeps how far messages were read; "" where it has none.

        Args:
            url: as the user gave it.
        """
        del url
        return ""

    def check(self, url: str) -> None:
        """Refuse a URL that cannot be right, before anything is connected to.

        Raises:
            ConfigError: it cannot.
        """

    def how_to_remove(self, url: str, *, id: str = "") -> str:
        """Return how a user takes messages out that a stream refuses, for its errors.

        Args:
            url: as the user gave it.
            id: of the message, where it is one.
        """
        del url, id
        return "take the messages that differ out of the broker"

    def how_to_begin_anew(self, url: str) -> str:
        """Return how a user has all messages read again by a new run, for errors.

        Args:
            url: as the user gave it.
        """
        del url
        return "begin anew: --out ANOTHER_FOLDER"

    def how_to_try(self, url: str) -> str:
        """Return how a user sees by hand whether the broker answers, for errors; "" where nothing is known.

        Args:
            url: as the user gave it.
        """
        del url
        return ""

    def try_out(self) -> None:
        """Ask for what every broker has to say."""
        if not isinstance(self.schemes, tuple):
            raise ConfigError(
                expected="a broker whose schemes are a tuple of texts",
                found=repr(self.schemes),
                where=type(self).__name__,
                ways_out='schemes = ("redis", "rediss")',
            )


@dataclass(frozen=True, kw_only=True)
class Address:
    """A URL of a broker in parts, without secrets.

    Args:
        url: all of it.
        parts: of it.
        options: behind the question mark.
    """

    url: str
    parts: SplitResult
    options: Mapping[str, str]

    @staticmethod
    def of(url: str, *, known: Mapping[str, str], secrets: str) -> Address:
        """Return the parts of a URL.

        Args:
            url: of a broker.
            known: options that there are, with what they mean.
            secrets: where passwords come from instead, for the error.

        Raises:
            ConfigError: it is none, has a password in it, or an option that there is not.
        """
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError(
                expected="a URL of a broker",
                found=f"one that cannot be read: {error}",
                where=url,
                ways_out="an address of IPv6 stands in brackets: redis://[::1]:6379/clicks",
            ) from error
        if parts.password is not None:
            raise ConfigError(
                expected="a URL without a password: it is kept in the folder of the run",
                found="a password in it",
                where=f"{parts.scheme}://…@{parts.hostname}{parts.path}",
                ways_out=(secrets, "make a new password: this one stands in the history of your shell"),
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        for name in options:
            if name not in known:
                # Without what stands behind the question mark: it may be a password.
                raise ConfigError(
                    expected=f"options {', '.join(known)}",
                    found=repr(name),
                    where=url.partition("?")[0],
                    ways_out=[f"?{each}=… {meaning}" for each, meaning in known.items()],
                )
        return Address(url=url, parts=parts, options=options)


def _scheme(text: object) -> str:
    return str(text).partition("://")[0].lower() if "://" in str(text) else ""


def is_broker(text: object) -> bool:
    """Return whether a path is the URL of a broker."""
    scheme = _scheme(text)
    return bool(scheme) and any(scheme in (each.name, *each.schemes) for each in Broker)


def broker_of(paths: Sequence[str], *, flag: str = "--data.train") -> Broker | None:
    """Return the broker that a stream reads from; None if it reads files.

    Args:
        paths: files, folders and URLs of a stream.
        flag: that names them, for errors.

    Raises:
        ConfigError: a broker beside something else, or a URL that cannot be right.
    """
    found = [path for path in paths if is_broker(path)]
    if not found:
        return None
    if len(paths) > 1:
        raise ConfigError(
            expected="one stream of a broker, or files",
            found=", ".join(paths),
            where=flag,
            ways_out=(
                f"{flag} {found[0]} alone",
                "let producers send all of them to one stream: they are taken in its order",
            ),
        )
    scheme = _scheme(found[0])
    broker = next(each for each in Broker if scheme in (each.name, *each.schemes))
    broker.check(found[0])
    return broker
