"""Turns of contestants on one device, and the cases that come of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.harness import percentiles
from benchmarks.report import Case
from benchmarks.workload import Workload

Measure = Callable[["Machine"], "list[Case] | str"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is measured on.

    Args:
        device: a GPU; the CPU where only the code is to be shown to work.
        quick: fewer rounds, smaller cases.
    """

    device: torch.device
    quick: bool

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean anything."""
        return self.device.type == "cuda"

    @property
    def rounds(self) -> int:
        """Turns of each contestant."""
        return 3 if self.quick else 11

    def workload(self, *, num_rows: int = 1_000_000, batch_size: int = 65_536) -> Workload:
        """DLRM with 26 tables of 128 columns: as large as the targets say, or tiny."""
        if not self.is_gpu:
            return Workload(dim=16, num_rows=min(num_rows, 1000), batch_size=64, num_batches=2)
        if self.quick:
            return Workload(dim=128, num_rows=min(num_rows, 100_000), batch_size=8192, num_batches=4)
        return Workload(dim=128, num_rows=num_rows, batch_size=batch_size, num_batches=8)

    def wait(self) -> None:
        """Until the device has computed what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], *, repeats: int = 1) -> float:
        """Of one call, over `repeats` of them."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        self.wait()
        return (time.perf_counter() - begin) / repeats


def machine_of(*, quick: bool) -> Machine | str:
    """The GPU; the CPU where there is none and the run is quick; else why there is nothing to measure."""
    if torch.cuda.is_available():
        return Machine(device=torch.device("cuda", torch.cuda.current_device()), quick=quick)
    if quick:
        return Machine(device=torch.device("cpu"), quick=True)
    built = "no GPU" if torch.backends.cuda.is_built() else "torch was built without CUDA"
    return f"{built}; --quick runs tiny cases on the CPU, to show that the code works"


def in_turns(machine: Machine, work: Mapping[str, Callable[[], object]], *, warmups: int = 3) -> dict[str, list[float]]:
    """Seconds of each contestant, one a round; who begins rotates."""
    repeats = 10 if machine.is_gpu else 1
    for each in work.values():
        for _ in range(warmups):
            each()
    found: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for number in range(machine.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(machine.seconds(work[name], repeats=repeats))
    return found


def case(
    machine: Machine,
    name: str,
    ratios: list[float],
    *,
    ours: float,
    peer: float,
    peer_name: str,
    goal: float = 0.0,
    unit: str = "samples/s",
) -> Case:
    """A case of ratios by round; on the CPU its name says so, and it has no goal."""
    low, high = percentiles(ratios)
    return Case(
        name=name if machine.is_gpu else f"{name}_on_the_cpu_no_claim",
        ours=ours,
        peer=peer,
        ratio=statistics.median(ratios),
        ratio_p10=low,
        ratio_p90=high,
        ours_name="ziggurat",
        peer_name=peer_name,
        goal=goal if machine.is_gpu else 0.0,
        unit=unit,
    )


def faster(
    machine: Machine,
    name: str,
    seconds: dict[str, list[float]],
    *,
    peer: str,
    amount: float,
    goal: float = 0.0,
    unit: str = "samples/s",
) -> Case:
    """How much faster contestant "ours" is than another one, with `amount` of work in a call."""
    ours_s, peer_s = seconds["ours"], seconds[peer]
    return case(
        machine,
        name,
        [theirs / mine for mine, theirs in zip(ours_s, peer_s, strict=True)],
        ours=amount / statistics.median(ours_s),
        peer=amount / statistics.median(peer_s),
        peer_name=peer,
        goal=goal,
        unit=unit,
    )
