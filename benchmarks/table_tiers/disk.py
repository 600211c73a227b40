"""A table of eight times the memory that its process may take for it, on a disk, against the same table in memory.

    limit     RLIMIT_DATA of the process with the disk: what it has before the table is made, and an eighth of the table
    step      one table, D = 64, row-wise Adagrad, one id a sample, 2,048 samples, a network of 64-256-128-1, one thread
    the disk  rows of the filled file are read at random while others are replaced; `limit_ratio` is the share of that
              rate, or of the rate in memory where that is the lower one

Each contestant has a process for the whole measurement, and they take turns; the ratio is the median over rounds. Every
row lies on the disk before the first step. The limit is tried: the process cannot make the table in memory under it.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.harness import percentiles
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer
from ziggurat.embeddings.config import InitialDraw
from ziggurat.embeddings.storage.disk import DiskStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.ops.row_file import rate_while_written
from ziggurat.training.report.progress import Progress

_DIM, _BATCH, _TIMES, _CHUNK, _EXPONENT = 64, 2048, 8, 8_192, 1.05
_ROW_BYTES = 4 * (_DIM + 1)
_BESIDE_BYTES = 96 << 20  # rows that wait to be written, and what a step takes: beside rows that are held
GOALS = {"disk_8x_zipf": 0.6, "disk_8x_uniform": 0.3}
CASES = tuple(GOALS)
_Ids = list[np.ndarray]  # of (B,), one a step


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Args:
        rows: of the table.
        steps: of a turn.
        rounds: that count.
    """

    rows: int = 6_000_000
    steps: int = 15
    rounds: int = 7

    @property
    def limit_bytes(self) -> int:
        """Memory for the table: an eighth of it; more for one so small that buffers alone would not fit."""
        return max(self.rows * _ROW_BYTES // _TIMES, _BESIDE_BYTES + (16 << 20))


QUICK = Size(rows=100_000, steps=2, rounds=2)


class Trained:
    """A table, in memory or on a disk, and a small network behind it.

    Args:
        rows: of the table.
        tables: where it lies.
    """

    def __init__(self, rows: int, tables: TablesConfig) -> None:
        self.inputs = InputSpec(
            tables=(TableSpec(name="id", num_rows=rows),),
            single=(SingleSpec(name="id", table="id"),),
            labels=(LabelSpec(name="y"),),
        )
        config = EmbeddingConfig(dim=_DIM, kernel=KernelChoice.CPP, init_draw=InitialDraw.ROWS)
        self.tables = EmbeddingTables(self.inputs, config, seed=1, make_storage=tables.make_storage(seed=1))
        self.optimizer = TableOptimizer(self.tables)
        widths = ((_DIM, 256), (256, 128))
        layers = [layer for fan in widths for layer in (nn.Linear(*fan), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(128, 1))

    @property
    def storage(self) -> DiskStorage:
        """Of a table on a disk."""
        storage = self.tables.tables.storage(0)
        assert isinstance(storage, DiskStorage)
        return storage

    def train(self, ids: _Ids) -> float:
        """Samples a second over all batches but the last, which is announced alone."""
        batches = [self._batch(each) for each in ids]
        begin = time.perf_counter()
        for now, following in itertools.pairwise(batches):
            pooled = self.tables(now)
            self.tables.announce(following)
            self.net(pooled).square().mean().backward()
            self.optimizer.step(0.01)
        return (len(ids) - 1) * _BATCH / (time.perf_counter() - begin)

    def fill(self) -> None:
        """Put every row on the disk."""
        disk = self.storage.disk
        for first in range(0, disk.num_rows, _CHUNK):
            rows = np.arange(first, min(first + _CHUNK, disk.num_rows))
            disk.put(rows, disk.take(rows))
        disk.flush()

    def disk_rate(self, *, chunks: int = 5, rows: int = 5_000) -> float:
        """Rows a second that are read at random while as many others are replaced, of a filled file."""
        return rate_while_written(self.storage.disk._file, chunks=chunks, num_rows=rows)

    def misses(self) -> tuple[int, int]:
        """Rows that steps have asked for, and those of them that were not held."""
        counts = self.storage.cached.counts
        return counts.rows, counts.rows - counts.hits

    def _batch(self, ids: np.ndarray) -> Batch:
        size = len(ids)
        return dataclasses.replace(
            Batch.empty(self.inputs),
            dense=torch.zeros(size, 0),
            single=torch.from_numpy(ids).view(1, -1),
            labels=torch.zeros(1, size),
            row_ids=torch.arange(size),
        )


# ---------------------------------------------------------------------------------------------------- the processes


def _serve(pipe: Connection, size: Size, folder: str) -> None:
    """Answer `name, arguments` until there are no more; the first answer says how the process stands."""
    torch.set_num_threads(1)
    config, facts = TablesConfig(), {}
    if folder:
        config = TablesConfig(disk=folder, memory=f"{size.limit_bytes - _BESIDE_BYTES >> 10}KiB")
        # threads and code that a first step starts are none of the table's memory
        Trained(5_000, dataclasses.replace(config, memory="10%")).train([np.arange(1, _BATCH + 1)] * 3)
        limit = _data_bytes() + size.limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        facts = {"limit_bytes": limit, "table_in_memory": _fits(size.rows * _ROW_BYTES)}
    made = Trained(size.rows, config)
    if folder:
        made.fill()
    pipe.send(facts)
    while (asked := pipe.recv()) is not None:
        pipe.send(getattr(made, asked[0])(*asked[1]))


def _data_bytes() -> int:
    """Memory of this process that RLIMIT_DATA counts."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def _fits(num_bytes: int) -> bool:
    try:
        torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError:
        return False
    return True


class _Process:
    """One contestant; only one computes at a time."""

    def __init__(self, size: Size, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, size, folder), daemon=True)
        self._process.start()
        theirs.close()
        self.facts = self._pipe.recv()

    def ask(self, name: str, *arguments: object) -> object:
        """The answer of a method of `Trained`."""
        self._pipe.send((name, arguments))
        return self._pipe.recv()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()


# ------------------------------------------------------------------------------------------------------ the measurement


def measure(names: Sequence[str], *, size: Size, progress: Progress) -> list[dict[str, object]]:
    """The figures of each case.

    Args:
        names: out of `CASES`.
        size: how much.
        progress: where to say what happens.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ziggurat-rows-", dir=Path.cwd()))
        progress.say(f"disk: filling a table of {size.rows:,} rows")
        disk = stack.enter_context(_Process(size, folder))
        memory = stack.enter_context(_Process(size, ""))
        return [_case(name, disk, memory, size=size, progress=progress) for name in names]


def _case(name: str, disk: _Process, memory: _Process, *, size: Size, progress: Progress) -> dict[str, object]:
    draw = _Drawn(size, is_uniform=name.endswith("uniform"))
    rates: dict[str, list[float]] = {"disk": [], "memory": []}
    for _ in range(3):  # rows that are asked for often are held
        disk.ask("train", draw.ids(size.steps))
    memory.ask("train", draw.ids(size.steps))
    can = [float(str(disk.ask("disk_rate")))]
    before = np.array(disk.ask("misses"))
    for number in range(size.rounds):
        progress.say(f"{name}: round {number + 1}")
        ids = draw.ids(size.steps)
        turns = [("disk", disk), ("memory", memory)]
        for who, process in turns if number % 2 else turns[::-1]:
            rates[who].append(float(str(process.ask("train", ids))))
    asked, missed = np.array(disk.ask("misses")) - before
    can.append(float(str(disk.ask("disk_rate"))))
    per_sample = missed / (size.rounds * size.steps * _BATCH)
    ours, peer = (statistics.median(rates[who]) for who in ("disk", "memory"))
    allowed = float(min(peer, statistics.fmean(can) / max(per_sample, 1e-9)))
    ratios = [a / b for a, b in zip(rates["disk"], rates["memory"], strict=True)]
    low, high = percentiles(ratios)
    return {
        "name": name,
        "rows": size.rows,
        "table_bytes": size.rows * _ROW_BYTES,
        "limit_for_table_bytes": size.limit_bytes,
        "process": disk.facts,
        "ours": ours,
        "peer": peer,
        "unit": "samples/s",
        "ratio": statistics.median(ratios),
        "ratio_p10": low,
        "ratio_p90": high,
        "goal": GOALS[name],
        "verdict": _verdict(statistics.median(ratios), allowed / peer, goal=GOALS[name]),
        "disk_rows_per_s": can,
        "rows_missed": float(missed / max(asked, 1)),
        "samples_per_s_that_the_disk_allows": allowed,
        "limit_ratio": ours / allowed,
    }


def _verdict(ratio: float, allowed: float, *, goal: float) -> str:
    """Whether a goal is met; a goal above what the disk allows is none for it."""
    if ratio >= goal:
        return "met"
    return "missed" if allowed >= goal else f"the disk allows {allowed:.2f}"


class _Drawn:
    """Ids of batches: uniform, or by Zipf's law over rows in random order."""

    def __init__(self, size: Size, *, is_uniform: bool) -> None:
        self._rows, self._drawn = size.rows, np.random.default_rng(7)
        self._scattered = self._cumulative = None
        if not is_uniform:
            weights = np.arange(1, size.rows, dtype=np.float64) ** -_EXPONENT
            self._cumulative = np.cumsum(weights) / weights.sum()
            self._scattered = self._drawn.permutation(size.rows - 1) + 1

    def ids(self, steps: int) -> _Ids:
        """Of so many steps, and of one that is announced."""
        if self._cumulative is None or self._scattered is None:
            return [self._drawn.integers(1, self._rows, _BATCH) for _ in range(steps + 1)]
        ranks = [np.searchsorted(self._cumulative, self._drawn.random(_BATCH)) for _ in range(steps + 1)]
        return [self._scattered[np.minimum(each, self._rows - 2)] for each in ranks]


def table(found: Sequence[dict[str, object]]) -> str:
    """Markdown: one row a case."""
    lines = [
        "| case | table / limit | disk | memory, rows/s | ratio (p10 to p90) | goal | missed | disk rows/s | of it |",
        "|---|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for each in found:
        number = {key: float(str(value)) for key, value in each.items() if isinstance(value, int | float)}
        rates = each["disk_rows_per_s"]
        assert isinstance(rates, list)
        spread = f"**{number['ratio']:.2f}** ({number['ratio_p10']:.2f} to {number['ratio_p90']:.2f})"
        cells = (
            f"{number['table_bytes'] / number['limit_for_table_bytes']:.1f}",
            f"{number['ours']:,.0f}",
            f"{number['peer']:,.0f}",
            spread,
            f"{each['goal']}: {each['verdict']}",
            f"{number['rows_missed']:.0%}",
            f"{statistics.fmean(rates):,.0f}",
            f"{number['limit_ratio']:.2f}",
        )
        lines.append(f"| {each['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)
