"""Small proxies as they stand in front of servers: one that says nothing of whom it asks for, one that adds headers.

`Proxy(behind, kind)` listens at a port of its own and forwards request by request. PLAIN does what nginx's
`proxy_pass` does when nothing else is set: HTTP/1.0 to the server, its address as Host, `Connection: close`, no header
about the client. FORWARDING speaks HTTP/1.1, passes the client's Host, and adds X-Forwarded-For, X-Real-IP, Forwarded.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import StrEnum


class Kind(StrEnum):
    PLAIN = "plain"
    FORWARDING = "forwarding"


class Proxy:
    """One proxy in a thread for each connection; a context manager."""

    def __init__(self, behind: int, kind: Kind) -> None:
        self.behind = behind
        self.kind = kind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as read, contextlib.suppress(OSError):
            first = read.readline().split()
            headers: dict[str, str] = {}
            while line := read.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            body = read.read(int(headers.get("content-length", "0")))
            with socket.create_connection(("127.0.0.1", self.behind)) as server:
                server.sendall(self._head(first[0].decode(), first[1].decode(), headers) + body)
                while data := server.recv(65536):
                    client.sendall(data)

    def _head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        version = "HTTP/1.0" if self.kind is Kind.PLAIN else "HTTP/1.1"
        kept = {name: value for name, value in headers.items() if name not in ("connection", "host")}
        kept["connection"] = "close"
        kept["host"] = f"127.0.0.1:{self.behind}" if self.kind is Kind.PLAIN else headers.get("host", "")
        if self.kind is Kind.FORWARDING:
            kept |= {"x-forwarded-for": "203.0.113.7", "x-real-ip": "203.0.113.7", "forwarded": "for=203.0.113.7"}
        lines = [f"{method} {path} {version}", *(f"{name}: {value}" for name, value in kept.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")
