"""Whom a request believes to ask: the headers that decide it, held to RFC 9112, and the names that are this server's.

A page that somebody reads in a browser can have its own name lead to 127.0.0.1 (DNS rebinding), and then ask a server
that listens on this machine alone, from this machine. Its requests still say the page's name in the header Host. So a
server that no other machine reaches, and that asks for no key, answers to addresses, to localhost and to names that it
was told, and to no other. A name is needed for the trick: an address in Host is always good.

Headers that two programs can read in two ways are refused, since a proxy in front may be the other one: two Hosts, a
Host that is none, a Transfer-Encoding beside `chunked`, HTTP/0.9.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import httptools

from ziggurat.serving.server.config import ServerConfig

_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._~-]{1,253})(:[0-9]{0,5})?")
_HOST_WAYS = ("send one header Host, as HTTP/1.1 demands",)
_CODING_WAYS = ("send Transfer-Encoding: chunked, and the body as it is", "send Content-Length, and the body as it is")
_OLD_CODING_WAYS = ("send Content-Length", "send Transfer-Encoding: chunked by HTTP/1.1")
_VERSION_WAYS = ("ask by HTTP/1.1",)
_VERSIONS = ("1.0", "1.1")


@dataclass(frozen=True, kw_only=True)
class WrongHead:
    """The reason why the headers of a request are refused.

    Args:
        status: of HTTP, with its phrase.
        found: what is wrong.
        ways_out: what to do instead.
    """

    status: bytes
    found: str
    ways_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The names that a server answers to.

    Args:
        names: in small letters, beside localhost; None: any.
    """

    names: frozenset[str] | None

    @staticmethod
    def of(config: ServerConfig, *, has_key: bool) -> Hosts:
        """Return the names by the settings of a server.

        Args:
            config: of the server.
            has_key: requests need an API key, which no page of another site has.
        """
        names = frozenset(name.strip().lower() for name in config.hosts.split(",") if name.strip())
        if names or (is_local(config.host) and not has_key):
            return Hosts(names=names)
        return Hosts(names=None)

    def wrong_head(
        self, version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]], *, is_admin: bool
    ) -> WrongHead | None:
        """Return why the head of a request is refused, or None.

        Args:
            version: of HTTP.
            url: of the request line.
            headers: with names in small letters.
            is_admin: it came through the admin socket, which no page reaches.
        """
        if version not in _VERSIONS:
            found = f"HTTP/{version}, which is neither 1.0 nor 1.1"
            return WrongHead(status=b"400 Bad Request", found=found, ways_out=_VERSION_WAYS)
        codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            found = "Transfer-Encoding with HTTP/1.0"
            return WrongHead(status=b"400 Bad Request", found=found, ways_out=_OLD_CODING_WAYS)
        if codings not in ([], [b"chunked"]):
            found = f"Transfer-Encoding {shown(b', '.join(codings))}"
            return WrongHead(status=b"501 Not Implemented", found=found, ways_out=_CODING_WAYS)
        given = [value.strip() for name, value in headers if name == b"host"]
        if len(given) > 1 or (not given and version == "1.1"):
            found = f"{len(given) or 'no'} headers Host"
            return WrongHead(status=b"400 Bad Request", found=found, ways_out=_HOST_WAYS)
        if authority := httptools.parse_url(url).host:  # "GET http://name/path": the name counts (RFC 9112, 3.2.2)
            given.append(authority)
        for each in given:
            if (match := _HOST.fullmatch(each)) is None:
                return WrongHead(status=b"400 Bad Request", found=f"Host {shown(each)}", ways_out=_HOST_WAYS)
            if not is_admin and not self._knows(match[1].decode()):
                return _not_ours(match[1].decode())
        return None

    def _knows(self, host: str) -> bool:
        # A name may be written out to the root, with a point at its end.
        name = host.lower().removesuffix(".")
        return self.names is None or name == "localhost" or name in self.names or _is_address(name)


def is_local(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(host: str) -> bool:
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def shown(value: bytes) -> str:
    """Return a header's name or value for messages."""
    return repr(value.decode("latin-1"))[:80]


def _not_ours(host: str) -> WrongHead:
    ways = (
        f"tell the server that it has this name: --server.hosts {host:.80}",
        "ask 127.0.0.1 or localhost",
        "let requests bring a key: --api-key-file FILE",
    )
    return WrongHead(status=b"421 Misdirected Request", found=f"Host {host:.80}, no name of this server", ways_out=ways)
