"""The guide "From a click log of your own to a server of your own": all its commands run in order, to an answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "your-own-log.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), re.S | re.M)


def commands() -> Iterator[str]:
    """Each command with the lines of its here-document."""
    for block in blocks("console"):
        yield from (part.strip("\n") for part in re.split(r"^\$ ", block, flags=re.M) if part.strip())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def serving(command: str, *, folder: Path, environment: dict[str, str], port: int) -> Iterator[None]:
    server = subprocess.Popen(["/bin/sh", "-c", f"exec {command}"], cwd=folder, env=environment)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://localhost:{port}/readyz", timeout=5)
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_every_command_of_the_guide_runs(tmp_path: Path) -> None:
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": scripts + os.pathsep + os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(GUIDE.parents[2]), *sys.path]),
        "ZIGGURAT_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    port = free_port()
    (tmp_path / "make_clicks.py").write_text(blocks("python")[0])
    subprocess.run([sys.executable, "make_clicks.py"], cwd=tmp_path, env=environment, check=True, timeout=120)

    def run(command: str) -> str:
        done = subprocess.run(
            command.replace(":8080", f":{port}"),
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    before = []
    served = []
    for command in commands():
        (served if served or command.startswith("ziggurat serve") else before).append(command)
    assert [command.split()[1] for command in before if command.startswith("ziggurat")] == [
        *("data", "train", "report", "importance", "train", "export")
    ]
    for command in before:
        run(command)
    assert (tmp_path / "runs" / "ranker" / "report.html").exists()
    serve, *questions = served
    command = serve.removesuffix("&").replace("8080", str(port)) + " --deadline-ms 10000"  # a busy machine answers late
    with serving(command, folder=tmp_path, environment=environment, port=port):
        answers = [json.loads(run(question)) for question in questions]
    plain, filtered, ranked = answers
    assert len(plain["items"]) == 5
    assert filtered["items"]
    assert {int(item["id"][1:]) % 4 for item in filtered["items"]} == {1}, "films, as the log was made"
    assert {item["id"] for item in ranked["items"]} == {"i3", "i12"}
