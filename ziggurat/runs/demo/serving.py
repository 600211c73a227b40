"""The demo of serving: encoders and a ranker on MovieLens-1M, exported to one folder, behind a server that is asked.

    movielens_two_tower ─┐
                         ├─► export ─► ziggurat serve (a process of its own) ─► /recommend, one user after the other
    movielens_dcn_v2  ───┘

Times are those of a client on the same machine, from the first byte sent to the last one read, one request at a time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ziggurat.errors import DataError
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.execute import train_run
from ziggurat.runs.export.make import export_run
from ziggurat.training.report.progress import Progress

RETRIEVER = "movielens_two_tower"
RANKER = "movielens_dcn_v2"
QUESTIONS = (
    ({"user_id": "17"}, ""),
    ({"user_id": "17"}, "genres:Drama AND NOT year:1995..1999"),
    ({"user_id": "4169"}, "genres:Comedy OR genres:Musical"),
    ({"gender": "F", "age": "25"}, "year:>=1998"),
)
_START_LIMIT_S = 120.0
_ADDRESS = re.compile(r"http://[^\s/]+/?")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question to the server, and what came back.

    Args:
        user: raw columns of the user.
        filter: which items may be in the answer; "" for all.
        items: ids, best first.
        scores: of the items.
    """

    user: Mapping[str, object]
    filter: str
    items: tuple[str, ...]
    scores: tuple[float, ...]


def export_for_serving(folder: Path, *, progress: Progress) -> Path:
    """Train both runs (those that are finished stay) and export them together; returns the folder of the export."""
    for name in (RETRIEVER, RANKER):
        progress.say(f"\n{name}")
        run = folder / name
        train_run(recipe_named(name), folder=run, resume=(run / "config.json").exists(), progress=progress)
    export = folder / "exports" / "films"
    progress.say("\nexport")
    export_run(folder / RETRIEVER, ranker=folder / RANKER, out=export, progress=progress)
    return export


@contextlib.contextmanager
def served(export: Path) -> Iterator[str]:
    """A server of the export on a free port of this machine; gives its address, and ends the server afterwards.

    Raises:
        DataError: it did not start; with what it said.
    """
    command = [sys.executable, "-m", "ziggurat", "serve", str(export), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said: list[str] = []
    found = threading.Event()
    address = ""

    def read() -> None:
        nonlocal address
        for line in process.stdout or ():  # there is one: it is a pipe
            said.append(line)
            match = _ADDRESS.search(line)
            if match and not address:
                address = match[0].rstrip("/")
                found.set()
        found.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        found.wait(_START_LIMIT_S)
        if not address:
            raise DataError(
                expected=f"a server within {_START_LIMIT_S:g} s",
                found="".join(said[-20:]).strip()[-1500:] or "no word from it",
                where=" ".join(command),
                ways_out=("run this command by itself", "see docs/guides/server.md"),
            )
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(address: str, *, k: int = 5) -> list[Answer]:
    """The answers of a server to the questions of the demo."""
    with _connection(address) as connection:
        return [_answer(connection, user=user, filter_text=text, k=k) for user, text in QUESTIONS]


def latencies_ms(address: str, *, users: Sequence[str], k: int = 10) -> list[float]:
    """Measure how long the server takes to answer for each of these users, one after the other on one connection."""
    spent = []
    with _connection(address) as connection:
        for user in users:
            begin = time.perf_counter()
            _answer(connection, user={"user_id": user}, filter_text="", k=k)
            spent.append(1e3 * (time.perf_counter() - begin))
    return spent


@contextlib.contextmanager
def _connection(address: str) -> Iterator[http.client.HTTPConnection]:
    place = urlsplit(address)
    with contextlib.closing(http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)) as connection:
        yield connection


def _answer(connection: http.client.HTTPConnection, *, user: Mapping[str, object], filter_text: str, k: int) -> Answer:
    body = {"user": user, "k": k} | ({"filter": filter_text} if filter_text else {})
    connection.request("POST", "/recommend", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise DataError(
            expected="an answer with status 200",
            found=f"status {response.status}: {content[:500].decode(errors='replace')}",
            where=f"/recommend, {json.dumps(body)}",
            ways_out="see docs/guides/server.md",
        )
    items = json.loads(content)["items"]
    return Answer(
        user=user,
        filter=filter_text,
        items=tuple(item["id"] for item in items),
        scores=tuple(item["score"] for item in items),
    )
