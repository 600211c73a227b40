"""Messages between supervisor and worker: a line of JSON each, over a pair of sockets. No pickle.

    worker → supervisor   {"ready": LOADED}   {"failed": ERROR}  {"serving": true}  {"draining": true}  {"alive": true}
                          {"swap": FOLDER, "number": 3, "accept_loss": false}
    supervisor → worker   {"serve": true}  {"drain": true}
                          {"swapped": VERSION, "number": 3}  {"refused": ERROR, "number": 3}

An ERROR is an error in four parts with its kind. The end of either process closes its socket, which the other one sees
at once: that is how a dead worker is noticed within a millisecond, and how no worker outlives its supervisor.

A message is sent whole or not at all: bytes that the socket does not take yet wait in this process, and a message
beyond the bound is refused before its first byte. What arrives is not trusted all the same: bytes that are no message
raise `BrokenMessageError`, and the reader then ends its peer instead of itself.
"""

from __future__ import annotations

import json
import socket

from ziggurat import errors
from ziggurat.errors import ZigguratError
from ziggurat.plain import JSON

_MAX_BYTES = 1 << 20  # of one message, and of those that wait to be sent


class BrokenMessageError(ValueError):
    """Bytes of the peer that are no message."""


class Control:
    """One end of the pair.

    Args:
        end: the socket, blocking or not.
    """

    def __init__(self, *, end: socket.socket) -> None:
        self.socket = end
        self._partial = b""
        self._unsent = b""

    @property
    def has_unsent(self) -> bool:
        """Return whether a part of a message still waits to be sent by `flush`."""
        return bool(self._unsent)

    def send(self, **message: object) -> bool:
        """Send a message whole, or none of it; bytes that the socket does not take yet wait for `flush`.

        Returns:
            False where the peer has ended, or has left so much unread that there is no room for the message.
        """
        line = json.dumps(message).encode() + b"\n"
        # Nothing of it is sent: half a message could not be read, and all later ones neither.
        if len(line) > _MAX_BYTES or len(self._unsent) + len(line) > _MAX_BYTES:
            return False
        self._unsent += line
        return self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it; False where the peer has ended."""
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent)
            except (BlockingIOError, InterruptedError):  # the socket is full: the rest waits for `flush`
                return True
            except OSError:  # the peer has ended
                return False
            self._unsent = self._unsent[sent:]
        return True

    def receive(self) -> list[dict[str, JSON]] | None:
        """Return the messages that have arrived (waits for one if the socket blocks); None if the peer has ended.

        Raises:
            BrokenMessageError: the bytes are no messages.
        """
        try:
            data = self.socket.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:  # reset, as a killed process leaves it
            return None
        if not data:
            return None
        # What comes behind the last line end is a message that has not arrived whole.
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _MAX_BYTES:
            raise BrokenMessageError(f"a line of more than {_MAX_BYTES:,} bytes")
        return [_parsed(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def _parsed(line: bytes) -> dict[str, JSON]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as problem:  # nested too deep, for the second
        raise BrokenMessageError(f"{line!r:.80}: {problem!s:.80}") from None
    if not isinstance(message, dict):
        raise BrokenMessageError(f"{line!r:.80}: no object")
    return message


def error_from_json(data: JSON) -> ZigguratError:
    """Return the error again, of its own kind where it is one of `ziggurat.errors`.

    Raises:
        BrokenMessageError: the data is no error in four parts.
    """
    names = ("kind", "expected", "found", "where")
    if not isinstance(data, dict) or not all(isinstance(data.get(name), str) for name in names):
        raise BrokenMessageError(f"{data!r:.80}: no error in four parts")
    ways_out = data.get("ways_out")
    if not isinstance(ways_out, list) or not all(isinstance(way, str) for way in ways_out):
        raise BrokenMessageError(f"{ways_out!r:.80}: no ways out")
    return errors.error_from_json(data)


def in_lines(error: Exception) -> str:
    """Return an error for a log: no line that its parts did not have when they were written (paths may hold any)."""

    def plain(text: str) -> str:
        return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)

    if not isinstance(error, ZigguratError):
        return plain(str(error))
    shown = ZigguratError(
        expected=plain(error.expected),
        found=plain(error.found),
        where=plain(error.where),
        ways_out=tuple(plain(way) for way in error.ways_out),
    )
    return str(shown)
