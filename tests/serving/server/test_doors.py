"""Who gets in where: the admin socket, proxies that add no header, folders of servers that were killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.server.proxies import Kind, Proxy
from tests.serving.server.running import Running, running, wait_until
from ziggurat.errors import ConfigError
from ziggurat.serving.server.admin_socket import bind_admin, remove_socket
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.hosts import Hosts
from ziggurat.serving.server.processes.own_folder import OwnFolder

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{behind}; }} }}
}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("doors"), spares=0, deadline_ms=5000) as server:
        yield server


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def through_nginx(server: Running, folder: Path) -> Running:
    """The same server, behind nginx as its own documentation sets it up."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    settings = folder / "nginx.conf"
    settings.write_text(NGINX.format(folder=folder, port=port, behind=server.port))
    process = subprocess.Popen([program, "-p", str(folder), "-c", str(settings)], text=True)

    def listens() -> bool:
        with socket.socket() as trial:
            return trial.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens)
    return Running(process=process, port=port, folder=server.folder, log=server.log)


def test_admin_routes_are_closed_behind_a_proxy_that_adds_no_header(server: Running, tmp_path: Path) -> None:
    proxy = through_nginx(server, tmp_path)
    try:
        assert proxy.recommend()[0] == 200
        status, answer = proxy.post("/admin/swap", {"export": str(server.folder / "export")})
        assert (status, answer["error"]["found"]) == (403, "one through a port")
    finally:
        proxy.process.terminate()
        proxy.process.wait(timeout=10)


@pytest.mark.parametrize("kind", list(Kind))
def test_admin_routes_are_closed_behind_any_proxy_and_the_others_are_open(server: Running, kind: Kind) -> None:
    with Proxy(server.port, kind) as proxy:
        behind = Running(process=server.process, port=proxy.port, folder=server.folder, log=server.log)
        status, answer = behind.recommend()
        assert (status, len(answer["items"])) == (200, 3)
        assert behind.get("/readyz")[0] == 200
        status, answer = behind.post("/admin/swap", {"export": str(server.folder / "export")})
        assert (status, answer["error"]["found"]) == (403, "one through a port")
        status, _ = behind.post("/recommend", {"user": {"user_id": "u1"}}, Host="evil.example")
        assert status == (200 if kind is Kind.PLAIN else 421), "the name that the server was asked by"


def test_admin_routes_are_open_through_the_socket_alone(server: Running) -> None:
    body = {"export": str(server.folder / "export")}
    assert server.post("/admin/swap", body)[0] == 403
    assert server.admin("/admin/swap", body) == (200, {"version": "v1"})
    socket_mode = Path(server.admin_socket).stat().st_mode
    assert (stat.S_ISSOCK(socket_mode), socket_mode & 0o077) == (True, 0), "its owner alone opens it"


def test_who_fills_the_port_does_not_shut_out_the_operator(tmp_path: Path) -> None:
    with running(tmp_path, spares=0, max_connections=3) as server:
        clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
        try:
            clients[-1].settimeout(10)
            assert clients[-1].recv(1000).startswith(b"HTTP/1.1 503 "), "the port is full"
            assert server.admin("/admin/swap", {"export": str(server.folder / "export")}) == (200, {"version": "v1"})
        finally:
            for client in clients:
                client.close()


def test_names_that_a_server_answers_to() -> None:
    def status(config: ServerConfig, host: bytes, *, has_key: bool = False) -> bytes:
        wrong = Hosts.of(config, has_key=has_key).wrong_head("1.1", b"/", [(b"host", host)], is_admin=False)
        return b"" if wrong is None else wrong.status[:3]

    local, named = ServerConfig(), ServerConfig(hosts="films.example, Other.example")
    assert [status(local, host) for host in (b"localhost", b"127.0.0.1:80", b"[::1]", b"evil.example")] == [
        *([b""] * 3),
        b"421",
    ]
    assert status(local, b"films.example", has_key=True) == b"", "a page of another site has no key"
    assert status(ServerConfig(host="0.0.0.0"), b"films.example") == b"", "other machines may ask anyway"
    assert [status(named, host) for host in (b"films.example:80", b"other.example.", b"evil")] == [b"", b"", b"421"]
    assert status(ServerConfig(host="0.0.0.0", hosts="films.example"), b"evil.example") == b"421"


def test_a_socket_that_a_killed_server_left_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    path = Path(os.path.relpath(tmp_path / "a.sock"))
    bind_admin(path).close()
    again = bind_admin(path)
    with pytest.raises(ConfigError, match="another server listens there"):
        bind_admin(path)
    again.close()
    remove_socket(path)
    path.write_text("a file")
    remove_socket(path)
    with pytest.raises(ConfigError, match="something else, which stays"):
        bind_admin(path)
    assert path.read_text() == "a file"
    with pytest.raises(ConfigError, match="200 bytes"):
        bind_admin(Path("a" * 200))


def test_folders_of_killed_servers_go_and_those_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "ours-stranger").mkdir()
    living = OwnFolder(parent=tmp_path, prefix="ours-")
    killed = OwnFolder(parent=tmp_path, prefix="ours-")
    (killed.path / "metrics").mkdir()
    killed.release()
    third = OwnFolder(parent=tmp_path, prefix="ours-")
    assert {each.name for each in tmp_path.iterdir()} == {"ours-stranger", living.path.name, third.path.name}
    third.delete_if_last()
    living.delete()
    assert [each.name for each in tmp_path.iterdir()] == ["ours-stranger"]


def test_a_folder_that_somebody_deleted_is_made_again_and_never_behind_a_link(tmp_path: Path) -> None:
    own = OwnFolder(parent=tmp_path, prefix="ours-")
    assert not own.make_again()
    shutil.rmtree(own.path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    own.path.symlink_to(elsewhere)
    with pytest.raises(FileExistsError):
        own.make_again()
    own.path.unlink()
    assert own.make_again()
    assert not own.make_again()
    assert own.path.stat().st_mode & 0o077 == 0
    OwnFolder(parent=tmp_path, prefix="ours-").delete()
    assert own.path.is_dir(), "its lock is held, as that of the first one was"
    locked = os.open(own.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):  # systemd-tmpfiles passes over it
        fcntl.flock(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(locked)
    own.delete()
    assert (list(tmp_path.iterdir()), list(elsewhere.iterdir())) == ([elsewhere], [])


def test_a_server_outlives_the_deletion_of_its_folder(tmp_path: Path) -> None:
    with running(tmp_path, spares=0) as server:
        own = Path(server.admin_socket).parent
        (first,) = server.workers
        shutil.rmtree(own)
        wait_until(lambda: "was deleted, and is made again" in server.log.read_text())
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: first not in server.workers and server.recommend()[0] == 200)
        assert server.get("/metrics")[0] == 200
    assert not own.exists()


def test_a_killed_server_leaves_no_folder_behind(tmp_path: Path) -> None:
    with running(tmp_path, linger_s=0) as server:
        own = Path(server.admin_socket).parent
        assert own.is_dir()
        server.process.kill()
        wait_until(lambda: not own.exists())
