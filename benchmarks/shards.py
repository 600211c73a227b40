"""Search of an index by one process, by one shard behind HTTP, and by two: queries a second and the time of a batch.

Ours alone, since what is asked is what a division costs and brings: the first contestant is the search in the process
that asks. Each shard is a process of one thread; the contestants take turns in this one. On a machine of two cores, two
shards and the process that asks share them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Report
from benchmarks.retrieval_data import make_vectors
from ziggurat.retrieval.item_index import ItemIndex
from ziggurat.retrieval.sharding import ShardIndex
from ziggurat.serving.answering.shards import ShardQuestion, Shards
from ziggurat.serving.export.aligned_tensors import load_aligned, save_aligned
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.connections import DrainingServer, uvicorn_config
from ziggurat.serving.server.serve import bind
from ziggurat.serving.server.shards.app import ShardApp, ShardVersions
from ziggurat.serving.server.shards.client import ShardClient, ShardSettings

_VERSION, _K = "benchmark", 100


class _OneVersion(ShardVersions):
    def __init__(self, index: ShardIndex) -> None:
        super().__init__(lambda folder: (_VERSION, index))
        self._index = index

    def at(self, version: str, state: str) -> ShardIndex | None:
        return self._index

    def about(self, asked: str = "") -> dict[str, Any]:
        return {_VERSION: {"states": [], "num_items": len(self._index)}}


def _be_shard(path: str, shard: int, num_shards: int, ports: Any) -> None:
    torch.set_num_threads(1)
    index = ItemIndex.from_state(load_aligned(Path(path)))
    part = ShardIndex.part_of(index, items=None, shard=shard, num_shards=num_shards)
    del index
    config = ServerConfig(max_body_bytes=1 << 30)
    app = ShardApp(_OneVersion(part), shard=shard, num_shards=num_shards, config=config)
    listener = bind("127.0.0.1", 0)
    settings = uvicorn_config(app, config=config, metrics=app.metrics)  # type: ignore[arg-type]
    ports.put((num_shards, shard, listener.getsockname()[1]))
    asyncio.run(DrainingServer(settings, limits=config, listener=listener).serve())


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench shards", description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=11)
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """All contestants; `quick`: few items."""
    options = options or parse_options([])
    items, rounds = (20_000, 3) if quick else (options.items, options.rounds)
    torch.set_num_threads(1)
    vectors, queries = (torch.from_numpy(each) for each in make_vectors(items, options.dim, num_queries=512))
    index = ItemIndex.build(vectors)
    report = Report(
        benchmark="shards",
        claim=f"Search of {items:,} vectors of {options.dim} numbers, k = {_K}: in one process, and by shards.",
        command=f"ziggurat bench shards --items {options.items} --dim {options.dim} --rounds {options.rounds}",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.safetensors"
        save_aligned(index.state_dict(), path)
        processes, found = _start(path)
        try:
            contestants = {"in the process": _alone(index)} | {
                f"{num} shard{'s' * (num > 1)}": _sharded(index, ports) for num, ports in found.items()
            }
            times = {
                (name, size): _times(ask, queries, size, rounds)
                for size in (1, 64)
                for name, ask in contestants.items()
            }
        finally:
            for each in processes:
                each.kill()
    rows = ["| contestant | batch | ms, median | ms, p90 | queries/s |", "|---|---|---|---|---|"]
    for (name, size), each in times.items():
        middle, late = statistics.median(each), statistics.quantiles(each, n=10)[-1]
        rows.append(f"| {name} | {size} | {1e3 * middle:.2f} | {1e3 * late:.2f} | {size / middle:,.0f} |")
        report.extra[f"{name}, batch {size}"] = {"median_s": middle, "p90_s": late}
    report.tables.append("\n".join(rows))
    return report


def _start(path: Path) -> tuple[list[Any], dict[int, list[int]]]:
    context = multiprocessing.get_context("spawn")
    queue, processes = context.Queue(), []
    for num in (1, 2):
        for shard in range(num):
            process = context.Process(target=_be_shard, args=(str(path), shard, num, queue), daemon=True)
            process.start()
            processes.append(process)
    found: dict[int, list[int]] = {1: [0], 2: [0, 0]}
    for _ in processes:
        num, shard, port = queue.get(timeout=120)
        found[num][shard] = port
    return processes, found


Ask = Callable[[torch.Tensor], None]


def _alone(index: ItemIndex) -> Ask:
    def ask(queries: torch.Tensor) -> None:
        index.search(queries, k=_K)

    return ask


def _sharded(index: ItemIndex, ports: Sequence[int]) -> Ask:
    settings = ShardSettings(addresses=tuple(f"127.0.0.1:{port}" for port in ports), deadline_s=30)
    client = ShardClient(settings, version=_VERSION, export=Path("."))
    client.connect(strict=True)
    shards, probes = Shards(client, order=index.vectors.stored_order), index.vectors.probes_for(_K)

    def ask(queries: torch.Tensor) -> None:
        none = (None,) * len(queries)
        found = shards.search(ShardQuestion(queries=queries, k=_K, filters=none, exclude=none, probes=probes))
        assert not found.missing

    return ask


def _times(ask: Ask, queries: torch.Tensor, size: int, rounds: int) -> list[float]:
    """Seconds of single batches."""
    for some in queries[: 4 * size].split(size):
        ask(some)
    times = []
    for _ in range(rounds):
        for some in queries[: max(64, 4 * size)].split(size):
            began = time.perf_counter()
            ask(some)
            times.append(time.perf_counter() - began)
    return times
