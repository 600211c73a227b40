"""The door for who runs the server: a socket in the file system, which no network and no proxy reaches.

    ziggurat serve exports/films --server.admin-socket films.sock
    curl --unix-socket films.sock localhost/admin/swap -d '{"export": "exports/films-2"}'

`/admin/swap` and `/admin/items` are answered there and nowhere else. A port cannot tell its operator from a stranger
behind a proxy: a request that nginx forwards comes from 127.0.0.1 and may carry no header that says so. Who may open
the socket, the file's permissions say: its owner alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.errors import ConfigError

if TYPE_CHECKING:  # the parent of a server needs no framework of the web
    from starlette.types import Scope

ADMIN = "ziggurat.admin"  # key of a request's scope that came through the socket
_LONGEST = 107  # bytes of the path of a socket, by the kernel
_BACKLOG = 16


def bind_admin(path: Path) -> socket.socket:
    """Return a socket that listens at a path, for the owner alone.

    Args:
        path: what a killed server left there is replaced.

    Raises:
        ConfigError: another server listens there, something else is there, or the system refuses.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if len(os.fsencode(path)) > _LONGEST:
            raise _refused(
                path, f"{len(os.fsencode(path))} bytes", "a shorter path, such as --server.admin-socket a.sock"
            )
        _remove_dead(path)
        # By the mask, so that the file is the owner's from its first instant; a chmod would come after it.
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as problem:
        listener.close()
        raise _refused(
            path, problem.strerror or str(problem), "--server.admin-socket PATH in a folder of yours"
        ) from None
    except ConfigError:
        listener.close()
        raise
    return listener


def remove_socket(path: Path) -> None:
    """Remove the socket of a server that ends; where something else is there now, that stays."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()


def is_admin(scope: Scope) -> bool:
    """Return whether a request came through the socket."""
    return bool(scope.get(ADMIN))


def _remove_dead(path: Path) -> None:
    """Remove a socket that nobody listens at any more."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise _refused(path, "something else, which stays", "name a path where nothing is")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        # A server that hangs takes no connection either, and this one is not to wait for it.
        trial.settimeout(1)
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:  # nobody listens: a killed server left it
            path.unlink()
            return
        except OSError as problem:
            raise _refused(path, f"a socket that cannot be tried: {problem}", "name another path") from None
    raise _refused(path, "another server listens there", "end that server, or name another path")


def _refused(path: Path, found: str, way: str) -> ConfigError:
    return ConfigError(
        expected=f"a path of at most {_LONGEST} bytes for the admin socket, where nothing is yet",
        found=found,
        where=f"--server.admin-socket {path}",
        ways_out=(way, "--server.admin false: no admin routes"),
    )
