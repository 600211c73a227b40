"""`ziggurat serve` as a function: bind the address, start the supervisor, say what is being served.

    serve("exports/films", config=ServerConfig(port=8080), load=Recommender.load)      # until SIGTERM or Ctrl-C

The port is bound before anything is loaded, so that a taken port is known at once, and clients that come early wait in
the kernel's queue instead of being refused.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import resource
import secrets
import shlex
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.errors import ConfigError, FileError, MissingDependencyError, MissingFileError
from ziggurat.files import read_text
from ziggurat.serving.answers import Answerer
from ziggurat.serving.server.admin_socket import bind_admin, remove_socket
from ziggurat.serving.server.config import BACKLOG, ServerConfig
from ziggurat.serving.server.processes.before_forks import prepare_forks
from ziggurat.serving.server.processes.own_folder import OwnFolder
from ziggurat.serving.server.tracing import check_export

if TYPE_CHECKING:
    from ziggurat.serving.server.processes.worker import Loaded
    from ziggurat.serving.server.shards.process import ShardKeeper

_log = logging.getLogger("ziggurat.server")
_OTHER_FILES = 128  # of a process, beside its connections
_MIN_CONNECTIONS = 16
_NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client")


def check_packages() -> None:
    """Raise MissingDependencyError if the packages of the extra `serve` are not there."""
    from importlib.util import find_spec

    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            expected=f"the packages of the extra 'serve': {', '.join(_NEEDED)}",
            found=f"no {', no '.join(missing)}",
            where="this Python",
            ways_out="pip install 'ziggurat-rec[serve]'",
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address.

    Args:
        host: name or address.
        port: 0 for a free one.

    Raises:
        ConfigError: the port is taken or forbidden, or the host is none of this machine's.
    """
    ways: tuple[str, ...] = ("--host 127.0.0.1 for this machine alone, --host 0.0.0.0 for all its addresses",)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # Else the port of a server that ended just now stays taken for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            ways = (f"end what listens there (`ss -ltnp 'sport = :{port}'` shows it)", f"--port {port + 1}", "--port 0")
        elif problem.errno in (errno.EACCES, errno.EPERM):
            ways = ("--port 8080: ports below 1024 need a privilege",)
        raise ConfigError(
            expected="an address to listen on",
            found=f"{problem.strerror or problem}",
            where=f"{host}:{port}",
            ways_out=ways,
        ) from None
    listener.setblocking(False)
    return listener


def within_open_files(config: ServerConfig) -> ServerConfig:
    """Return settings whose connections fit into the files that a process may open; asks the system for more first.

    Raises:
        ConfigError: there is no room for connections at all.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.max_connections + _OTHER_FILES
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = soft - _OTHER_FILES
    if room >= config.max_connections:
        return config
    if room < _MIN_CONNECTIONS:
        raise ConfigError(
            expected=f"at least {_OTHER_FILES + _MIN_CONNECTIONS} open files for each process",
            found=f"a limit of {hard}",
            where="this shell's limits (ulimit -n)",
            ways_out=("start the server from a shell with a higher limit (ulimit -Hn shows it)",),
        )
    _log.warning("%d connections at once instead of %d: ulimit -n is %d", room, config.max_connections, soft)
    return replace(config, max_connections=room)


def address_of(listener: socket.socket) -> str:
    """The address that a browser on this machine can open."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def read_api_key(path: str) -> str:
    """The key in a file, without the spaces around it; "" for no file."""
    if not path:
        return ""
    key = read_text(path, max_bytes=4096).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            expected="an API key of ASCII characters in one line",
            found="an empty file" if not key else "other characters",
            where=path,
            ways_out=f"python3 -c 'import secrets; print(secrets.token_urlsafe())' > {path}",
        )
    return key


def serve(
    export: str | Path,
    *,
    config: ServerConfig,
    load: Callable[[Path], Answerer],
    api_key: str = "",
    on_ready: Callable[[str, Loaded], None] = lambda address, loaded: None,
) -> None:
    """Serve an export until SIGTERM or SIGINT.

    Args:
        export: folder of the export, or a link to it.
        config: addresses and limits.
        load: makes the answerer of a folder: `Recommender.load`. Its module should be imported already: what is
            imported before the first fork, no worker waits for.
        api_key: "" for none.
        on_ready: called with the address and what is served when the first worker accepts requests.

    Raises:
        ConfigError: the address cannot be listened on.
        ZigguratError: the export cannot be loaded.
    """
    check_packages()
    folder = Path(export)
    if not folder.is_dir():
        raise MissingFileError(
            expected="the folder of an export",
            found="no such folder",
            where=str(folder),
            ways_out=("ziggurat export RUN --out FOLDER makes one", "check the path"),
        )
    from ziggurat.serving.server.processes.supervisor import Supervisor

    if config.trace:
        check_export()
    if not logging.getLogger("ziggurat.server").handlers:
        _log_to_stderr()
    config = within_open_files(config)
    listener = bind(config.host, config.port)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        address = address_of(listener)
        own = _own_folder()
        stack.callback(own.delete)
        admin = None
        if config.admin:
            path = Path(config.admin_socket) if config.admin_socket else own.path / "admin.sock"
            admin = bind_admin(path)
            stack.callback(admin.close)
            stack.callback(remove_socket, path)
            _log.info("admin routes: curl --unix-socket %s localhost/admin/…", shlex.quote(str(path)))
        keeper = None
        if config.shards > 1 or config.shard_addresses:
            load, keeper = _with_shards(load, config, api_key, seen=own.path / "seen")
        supervisor = Supervisor(
            load=load,
            export=folder,
            listener=listener,
            admin=admin,
            own=own,
            config=config,
            api_key=api_key,
            on_ready=lambda loaded: on_ready(address, loaded),
        )
        supervisor.keeper = keeper
        # Right before the first fork: what is imported later, each worker imports for itself.
        prepare_forks()
        supervisor.run()


def _own_folder() -> OwnFolder:
    """Return a folder for what the processes of a server share; those of servers that were killed go."""
    parent = Path(tempfile.gettempdir())
    try:
        return OwnFolder(parent=parent, prefix=f"ziggurat-serve-{os.geteuid()}-")
    except OSError as problem:
        raise FileError(
            expected="a folder for what the processes of the server share",
            found=problem.strerror or str(problem),
            where=str(parent),
            ways_out=("free space there", "name another folder: TMPDIR=FOLDER ziggurat serve …"),
        ) from None


def _with_shards(
    load: Callable[[Path], Answerer], config: ServerConfig, api_key: str, *, seen: Path
) -> tuple[Callable[[Path], Answerer], ShardKeeper | None]:
    """Return the loader of an export whose searches go to shards, and the keeper that runs those of this machine."""
    from ziggurat.serving.server.shards.client import ShardSettings
    from ziggurat.serving.server.shards.front import load_front
    from ziggurat.serving.server.shards.process import ShardKeeper

    keeper = None
    addresses = tuple(each.strip() for each in config.shard_addresses.split(",") if each.strip())
    if not addresses:
        listeners = {shard: bind("127.0.0.1", 0) for shard in range(config.shards)}
        addresses = tuple(address_of(each).removeprefix("http://") for each in listeners.values())
        own = replace(config, admin=True, watch=False)  # they load what the server in front of them asks them to
        api_key = api_key or secrets.token_urlsafe()  # nobody else is to have them load a folder
        keeper = ShardKeeper(listeners, num_shards=config.shards, config=own, api_key=api_key)
    settings = ShardSettings(addresses=addresses, deadline_s=config.shard_deadline_ms / 1e3, api_key=api_key)
    settings.check()
    return functools.partial(load_front, load=load, settings=settings, seen=seen), keeper


def serve_shard(
    export: str | Path,
    *,
    shard: int,
    num_shards: int,
    config: ServerConfig,
    api_key: str = "",
    on_ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve one shard of the index of an export to servers elsewhere, until SIGTERM or SIGINT.

    Args:
        export: folder of the export, or a link to it.
        shard: from 0.
        num_shards: of the index.
        config: address and limits.
        api_key: "" for none.
        on_ready: called with the address when the shard is there.

    Raises:
        ConfigError: there is no such shard, or the address cannot be listened on.
        ZigguratError: the export cannot be loaded.
    """
    check_packages()
    from ziggurat.retrieval.shard_numbers import check_shard
    from ziggurat.serving.server.shards.process import ShardKeeper, keep_shard

    check_shard(shard, num_shards)
    config = within_open_files(config)
    if not logging.getLogger("ziggurat.server").handlers:
        _log_to_stderr()
    listener = bind(config.host, config.port)
    try:
        keeper = ShardKeeper({shard: listener}, num_shards=num_shards, config=config, api_key=api_key)
        prepare_forks()
        keep_shard(keeper, Path(export), on_ready=lambda: on_ready(address_of(listener)))
    finally:
        listener.close()


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    for name in ("ziggurat.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if name == "ziggurat.server" else logging.ERROR)  # uvicorn warns of every bad byte
        logger.propagate = False  # the root logger would say it again
