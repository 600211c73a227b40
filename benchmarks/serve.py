"""The server against its module without one, and against a plain FastAPI server of the same module.

Three questions, for requests to rank 20 and 100 items by a DCNv2 of MovieLens-1M:

- *overhead*: median time of a request alone, over HTTP, less that of the module for the same requests (promise: 1 ms),
  called without a pause, and with the pauses that HTTP makes: a processor that waited computes more slowly;
- *throughput*: requests a second with 128 always on their way, against the module with batches of 64 (promise: 0.8);
- *against FastAPI*: the highest rate of requests at random times of which 99 % are answered within the limit (promise:
  three times FastAPI's).

All processes stand ready for the whole run and take turns; only one works at a time. The load comes from this process,
so that on a machine of two cores it takes a part of them from every server alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import PEER_PYTHON, ROOT, say
from benchmarks.http_load import Shots, Target, fire, keep_asking
from benchmarks.report import Case, Report
from ziggurat.errors import MissingFileError

BUILT = ROOT / "build" / "benchmarks" / "serve"
LIMIT_S = 0.1
_JSON = b"content-type: application/json\r\n"  # FastAPI asks for it
PROMISED_MS = 1.0
ITEMS = (20, 100)
_PATIENT = ("--deadline-ms", "5000", "--server.degrade", "false", "--server.max-deadline-ms", "10000")
_PROMPT = ("--deadline-ms", str(1000 * LIMIT_S), "--server.degrade", "false")


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of this benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="ziggurat bench serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--export", default="", help="an export that ranks (default: one is made of MovieLens-1M)")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--items", default=",".join(map(str, ITEMS)), help="items of a request (default: %(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="leave FastAPI out")
    return parser.parse_args(list(arguments))


def export_of_films() -> Path:
    """An export of a ranker of MovieLens-1M with its catalogue, made once."""
    folder = BUILT / "films"
    if (folder / "export.json").is_file():
        return folder
    say("  training movielens_two_tower and movielens_dcn_v2 for one epoch each, and exporting them")
    for recipe in ("movielens_two_tower", "movielens_dcn_v2"):
        _ziggurat("train", recipe, "--epochs", "1", "--out", str(BUILT / recipe))
    ranker = ("--ranker", str(BUILT / "movielens_dcn_v2"))
    further = ("--value", "like", "--parity-rows", "2000")  # the ranker orders, so that all candidates go through it
    _ziggurat("export", str(BUILT / "movielens_two_tower"), *ranker, "--out", str(folder), *further)
    return folder


def _ziggurat(*arguments: str) -> None:
    command = [sys.executable, "-m", "ziggurat", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment())


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@dataclass(kw_only=True)
class Bare:
    """The module in a process of its own.

    Args:
        process: `benchmarks.serve_bare`.
        bodies: requests that all contestants get.
    """

    process: subprocess.Popen[str]
    bodies: tuple[bytes, ...]

    def measure(self, *, batch: int, seconds: float, pause_s: float = 0.0) -> dict[str, float]:
        """Requests a second, and the median time of a batch, each after a pause."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"batch": batch, "seconds": seconds, "pause_s": pause_s}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextmanager
def bare_module(export: Path, items: int) -> Iterator[Bare]:
    """The module without a server, until the block ends."""
    command = [str(PEER_PYTHON), "-m", "benchmarks.serve_bare", str(export), str(items)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=_environment(), cwd=ROOT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the module could not be loaded; its error stands above"
        data = json.loads(line)
        try:
            yield Bare(process=process, bodies=tuple(json.dumps(each).encode() for each in data))
        finally:
            process.kill()


@contextmanager
def server(command: Callable[[int], list[str]], *, wait_for: str) -> Iterator[int]:
    """A server on a free port until the block ends; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(command(port), env=_environment(), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not _answers(f"http://127.0.0.1:{port}{wait_for}"):
            assert time.monotonic() < end, "a server did not start"
            assert process.poll() is None, "a server ended at once"
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


def ours(export: Path, settings: Sequence[str]) -> Callable[[int], list[str]]:
    """The command of our server."""
    more = ("--threads", "1", "--server.spares", "0", *settings)
    return lambda port: [str(PEER_PYTHON), "-m", "ziggurat", "serve", str(export), "--port", str(port), *more]


def fastapi(export: Path) -> Callable[[int], list[str]]:
    """The command of the plain server."""
    return lambda port: [str(PEER_PYTHON), "-m", "benchmarks.peers.fastapi_server", str(export), str(port)]


def overhead(bare: Bare, port: int, *, rounds: int, items: int) -> list[Case]:
    """Median time of a request over HTTP less that of the module: without a pause, and with those that HTTP makes."""
    target, found = Target(port=port, path="/rank", bodies=bare.bodies, headers=_JSON), []
    for _ in range(rounds + 1):
        alone = bare.measure(batch=1, seconds=0.8)["median_s"]
        over_http = asyncio.run(keep_asking(target, in_flight=1, seconds=0.8)).percentile(50)
        paced = bare.measure(batch=1, seconds=0.8, pause_s=max(over_http - alone, 0.0))["median_s"]
        found.append((1e3 * (over_http - alone), 1e3 * (over_http - paced)))
    cases = []
    for place, how in enumerate(("", ", over the module at that pace")):
        middle, low, high = _spread([each[place] for each in found[1:]])
        say(f"  {items} items: overhead {middle:.2f} ms ({low:.2f} to {high:.2f}){how} of {1e3 * alone:.2f} ms")
        cases.append(
            Case(
                name=f"HTTP overhead of a request alone, {items} items (p50){how}, against the promise",
                **_as_promised(middle, low, high),
                ours_name="server",
                peer_name="promise",
                goal=1.0,
                unit="ms",
            )
        )
    return cases


def _as_promised(middle: float, low: float, high: float) -> dict[str, float]:
    ratios = {name: PROMISED_MS / max(value, 1e-6) for name, value in (("ratio", middle), ("ratio_p10", high))}
    return {"ours": middle, "peer": PROMISED_MS, **ratios, "ratio_p90": PROMISED_MS / max(low, 1e-6)}


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def throughput(bare: Bare, port: int, *, rounds: int, items: int) -> Case:
    """Requests a second over HTTP against the module's with batches."""
    target, pairs = Target(port=port, path="/rank", bodies=bare.bodies, headers=_JSON), []
    for _ in range(rounds + 1):
        alone = bare.measure(batch=64, seconds=1.0)["per_s"]
        shots = asyncio.run(keep_asking(target, in_flight=128, seconds=1.5))
        assert shots.count(200) == len(shots.shots), shots.statuses
        pairs.append((shots.count(200) / _busy(shots), alone))
    middle, low, high = _spread([mine / other for mine, other in pairs[1:]])
    say(f"  {items} items: {pairs[-1][0]:.0f} requests/s over HTTP, {pairs[-1][1]:.0f} without")
    return Case(
        name=f"throughput over HTTP against the module in batches of 64, {items} items",
        ours=statistics.median(mine for mine, _ in pairs[1:]),
        peer=statistics.median(other for _, other in pairs[1:]),
        ratio=middle,
        ratio_p10=low,
        ratio_p90=high,
        ours_name="server",
        peer_name="module",
        goal=0.8,
        unit="requests/s",
    )


def _busy(shots: Shots) -> float:
    """Seconds from the first request to the last answer."""
    return max(shot.due + shot.seconds for shot in shots.shots) - min(shot.due for shot in shots.shots)


def highest_rate(target: Target, *, start: float, seconds: float) -> float:
    """Requests a second of which 99 % are answered within the limit."""

    def holds(rate: float, seed: int) -> bool:
        shots = asyncio.run(fire(target, rate=rate, seconds=seconds, seed=seed, connections=512))
        good = sum(shot.status == 200 and shot.seconds <= LIMIT_S for shot in shots.shots)
        time.sleep(0.3)
        return good >= 0.99 * len(shots.shots)

    low, high = 0.0, start
    while holds(high, int(high)):
        low, high = high, 1.4 * high
    if not low:
        while high > 1 and not holds(high, int(high)):
            high /= 1.4
        low, high = high, 1.4 * high
    for step in range(3):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle, step) else (low, middle)
    return low


def against_fastapi(bare: Bare, ports: tuple[int, int], *, rounds: int, items: int) -> Case:
    """The highest rates of both servers, round by round."""
    pairs = []
    for _ in range(rounds):
        targets = [Target(port=port, path="/rank", bodies=bare.bodies, headers=_JSON) for port in ports]
        pairs.append(tuple(highest_rate(target, start=60.0, seconds=2.0) for target in targets))
        say(f"  {items} items: {pairs[-1][0]:.0f} requests/s, FastAPI {pairs[-1][1]:.0f}")
    middle, low, high = _spread([mine / other for mine, other in pairs])
    return Case(
        name=f"rate with 99 % of answers within {1e3 * LIMIT_S:.0f} ms, {items} items",
        ours=statistics.median(mine for mine, _ in pairs),
        peer=statistics.median(other for _, other in pairs),
        ratio=middle,
        ratio_p10=low,
        ratio_p90=high,
        ours_name="server",
        peer_name="FastAPI",
        goal=3.0,
        unit="requests/s",
    )


def run(*, quick: bool, options: argparse.Namespace | None = None) -> Report:
    """Measure everything; returns the report."""
    options = options or parse_options([])
    if not PEER_PYTHON.is_file():
        raise MissingFileError(
            expected="the benchmarks' environment",
            found="none",
            where=str(PEER_PYTHON),
            ways_out="bash benchmarks/setup.sh",
        )
    export = Path(options.export) if options.export else export_of_films()
    rounds = options.rounds or (2 if quick else 5)
    report = Report(
        benchmark="serve",
        claim="The server against the ranker without one, and against a plain FastAPI server of the same ranker.",
        command="ziggurat bench serve",
        notes=[
            "One worker of one thread; the load comes from a third process on the same cores.",
            "FastAPI computes each request alone in its threads; model and preprocessing are the same.",
        ],
    )
    for items in map(int, options.items.split(",")):
        with ExitStack() as stack:
            bare = stack.enter_context(bare_module(export, items))
            patient = stack.enter_context(server(ours(export, _PATIENT), wait_for="/readyz"))
            report.cases.extend(overhead(bare, patient, rounds=rounds, items=items))
            report.cases.append(throughput(bare, patient, rounds=rounds, items=items))
        if options.no_peer:
            continue
        with ExitStack() as stack:
            bare = stack.enter_context(bare_module(export, items))
            prompt = stack.enter_context(server(ours(export, _PROMPT), wait_for="/readyz"))
            plain = stack.enter_context(server(fastapi(export), wait_for="/openapi.json"))
            report.cases.append(against_fastapi(bare, (prompt, plain), rounds=min(rounds, 3), items=items))
    return report
