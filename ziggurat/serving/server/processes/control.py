"""Messages between supervisor and worker: a line of JSON each, over a pair of sockets. No pickle.

    worker → supervisor   {"ready": LOADED}   {"failed": ERROR}  {"serving": true}  {"draining": true}  {"alive": true}
                          {"swap": FOLDER, "number": 3}
    supervisor → worker   {"serve": true}  {"drain": true}
                          {"swapped": VERSION, "number": 3}  {"refused": ERROR, "number": 3}

An ERROR is an error in four parts with its kind. The end of either process closes its socket, which the other one sees
at once: that is how a dead worker is noticed within a millisecond, and how no worker outlives its supervisor.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from ziggurat import errors
from ziggurat.errors import ZigguratError

_MOST_BYTES = 1 << 20


class Control:
    """One end of the pair.

    Args:
        end: the socket; made non-blocking for reading by `receive`.
    """

    def __init__(self, *, end: socket.socket) -> None:
        self.socket = end
        self._rest = b""

    def send(self, **message: Any) -> bool:
        """Send a message; whether the other side is still there."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that are there (waits for one if the socket blocks); None if the other side is gone."""
        try:
            data = self.socket.recv(65536)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        assert len(self._rest) < _MOST_BYTES, "a message between our own processes is short"
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self.socket.close()


def error_to_json(error: ZigguratError) -> dict[str, Any]:
    """An error in four parts as plain data."""
    kind = type(error).__name__
    parts = {"expected": error.expected, "found": error.found, "where": error.where, "ways_out": list(error.ways_out)}
    return {"kind": kind, **parts}


def error_from_json(data: dict[str, Any]) -> ZigguratError:
    """The error again, of its own kind where it is one of `ziggurat.errors`."""
    kind = getattr(errors, data["kind"], ZigguratError)
    parts = {name: data[name] for name in ("expected", "found", "where", "ways_out")}
    return kind(**parts)
