"""The time of a request's arrival, which its deadline counts from: when its last byte reached this machine.

A busy process reads a connection some time after the kernel has received it; under load that is most of the time that
a client waits. The kernel knows it: `TCP_INFO` says how many milliseconds ago the last bytes came (Linux, 2 µs a
question; `struct tcp_info` in linux/tcp.h). Elsewhere, and on the admin socket, a request arrives when it is read.
"""

from __future__ import annotations

import socket
import struct
import time
from asyncio.trsock import TransportSocket
from typing import Any

from starlette.types import Scope

_ARRIVED = "ziggurat.arrived"  # key of a request's scope
_LAST_RECEIVED = 52  # byte of `tcpi_last_data_recv`
_MILLISECONDS = struct.Struct("=I")
_TCP_INFO = getattr(socket, "TCP_INFO", None)


def note_arrival(scope: Any, connection: TransportSocket) -> None:
    """Write into a request's scope when it arrived, after its last byte was read.

    Args:
        scope: of the request, as uvicorn has it: a typed dict, which has no key of ours.
        connection: socket from which it was read, as asyncio gives it.
    """
    now = time.monotonic()
    scope[_ARRIVED] = now - _unread_s(connection)


def arrival(scope: Scope) -> float:
    """Return when a request arrived, by `time.monotonic`; now, where nobody has noted it."""
    return scope.get(_ARRIVED) or time.monotonic()


def _unread_s(connection: TransportSocket) -> float:
    """Return the seconds for which the last bytes of a connection waited in the kernel; 0 where it does not say."""
    if _TCP_INFO is None or connection.family == socket.AF_UNIX:
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LAST_RECEIVED + _MILLISECONDS.size)
    except OSError:  # closed meanwhile
        return 0.0
    if len(info) < _LAST_RECEIVED + _MILLISECONDS.size:
        return 0.0
    return _MILLISECONDS.unpack_from(info, _LAST_RECEIVED)[0] / 1e3
