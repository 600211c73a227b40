"""Lookup and update of tables against the rate of a copy, and a tiny table against uniform ids."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.gpu.contest import Machine, Measure, case, in_turns
from benchmarks.ours import inputs_of
from benchmarks.report import Case
from benchmarks.workload import Workload
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, TableOptimizer
from ziggurat.features.batch import Batch
from ziggurat.ops.machine.matmul_rate import copy_gb_per_s

GOAL_LOOKUP, GOAL_UPDATE, GOAL_SMALL = 0.75, 0.5, 1 / 1.2
_STATE_BYTES = 8  # row-wise Adagrad's number, read and written


def cases() -> Iterator[tuple[str, Measure]]:
    """Names and what measures them."""
    yield "lookup and update", against_copies
    yield "small_table", against_uniform_ids


class Tables:
    """Tables of one width on a device, and batches for them.

    Args:
        machine: with the device.
        workload: numbers of tables, rows and samples.
        rows_read: ids are below this; 0: of the whole table.
    """

    def __init__(self, machine: Machine, workload: Workload, *, rows_read: int = 0) -> None:
        inputs = inputs_of(workload)
        self.dim, self.num_lookups = workload.dim, workload.batch_size * len(inputs.single)
        self.tables = EmbeddingTables(inputs, EmbeddingConfig(dim=workload.dim), seed=None)
        self.tables.to(machine.device)
        self.tables.tables.draw(0)
        self.optimizer = TableOptimizer(self.tables)
        generator = torch.Generator().manual_seed(0)
        shape = (len(inputs.single), workload.batch_size)
        single = torch.randint(1, rows_read or workload.num_rows, shape, generator=generator)
        self.distinct = sum(len(torch.unique(rows)) for rows in single)
        size = workload.batch_size
        host = Batch(
            dense=torch.zeros(size, 0),
            single=single,
            labels=torch.zeros(size, 0),
            row_ids=torch.arange(size),
        )
        self.batch = host.to(machine.device)
        self.dtype = torch.bfloat16 if machine.is_gpu else torch.float32
        self.gradient = torch.randn(size, self.tables(self.batch, dtype=self.dtype).shape[1]).to(machine.device)
        self.gradient = self.gradient.to(self.dtype)

    @torch.no_grad()
    def look_up(self) -> torch.Tensor:
        """All rows, in the dtype that the network computes in."""
        return self.tables(self.batch, dtype=self.dtype)

    def record(self) -> None:
        """A gradient, to be applied."""
        self.tables(self.batch, dtype=self.dtype).backward(self.gradient)

    def update(self) -> None:
        """Apply it, each row once."""
        self.optimizer.step(0.01)

    @property
    def lookup_bytes(self) -> int:
        """Rows that are read, ids, and what is written."""
        return self.num_lookups * (self.dim * (4 + self.dtype.itemsize) + self.batch.single.element_size())

    @property
    def update_bytes(self) -> int:
        """The gradient that is read, and distinct rows that are read and written."""
        return self.num_lookups * self.dim * self.dtype.itemsize + self.distinct * (8 * self.dim + _STATE_BYTES)


def against_copies(machine: Machine) -> list[Case]:
    """Bytes a second of both against a copy, which is measured before each turn."""
    tables = Tables(machine, machine.workload())
    found: dict[str, list[float]] = {"lookup": [], "update": [], "copy": []}
    on_gpu: dict[str, list[float]] = {"lookup": [], "update": []}
    for _ in range(3):
        tables.look_up()
        tables.record()
        tables.update()
    for _ in range(machine.rounds):
        size = 1 << 30 if machine.is_gpu else 1 << 24
        found["copy"].append(copy_gb_per_s(device=str(machine.device), num_bytes=size))
        call_s = machine.seconds(tables.look_up)
        found["lookup"].append(tables.lookup_bytes / call_s / 1e9)
        if machine.is_gpu:
            took = machine.gpu_seconds(tables.look_up, repeats=10, call_s=call_s)
            on_gpu["lookup"].append(tables.lookup_bytes / took / 1e9)
        tables.record()
        call_s = machine.seconds(tables.update)
        found["update"].append(tables.update_bytes / call_s / 1e9)
        if machine.is_gpu:
            tables.record()
            took = machine.gpu_seconds(tables.update, repeats=1, call_s=call_s)
            on_gpu["update"].append(tables.update_bytes / took / 1e9)
    cases = []
    for name, goal in (("lookup", GOAL_LOOKUP), ("update", GOAL_UPDATE)):
        copy = statistics.median(found["copy"])
        for label, rates in ((name, found[name]), (f"{name}_gpu", on_gpu[name])):
            if rates:
                shares = [mine / rate for mine, rate in zip(rates, found["copy"], strict=True)]
                mine = statistics.median(rates)
                aim = goal if label.endswith("_gpu") else 0.0  # kernels are promised; calls have the host's time, too
                cases.append(
                    case(machine, label, shares, ours=mine, peer=copy, peer_name="a copy", goal=aim, unit="GB/s")
                )
    return cases


def against_uniform_ids(machine: Machine) -> list[Case]:
    """Lookup and update where every table has 3 rows against uniform ids of large tables."""
    rows = 3 + 1  # and padding
    large, small = machine.workload(), machine.workload()
    contest = {"uniform": Tables(machine, large), "ours": Tables(machine, small, rows_read=rows)}

    def step(tables: Tables) -> None:
        tables.record()
        tables.update()

    seconds = in_turns(machine, {name: lambda each=each: step(each) for name, each in contest.items()})
    ratios = [uniform / tiny for uniform, tiny in zip(seconds["uniform"], seconds["ours"], strict=True)]
    amount = contest["ours"].num_lookups / len(contest["ours"].tables.inputs.single)
    return [
        case(
            machine,
            "small_table",
            ratios,
            ours=amount / statistics.median(seconds["ours"]),
            peer=amount / statistics.median(seconds["uniform"]),
            peer_name="uniform ids of large tables",
            goal=GOAL_SMALL,
        )
    ]
