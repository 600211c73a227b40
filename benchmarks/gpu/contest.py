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

_CYCLES_PER_S = 2e9  # of a GPU at its highest clock, about: a slower one is busy for longer
_MAX_BUSY_S = 0.5
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

    def gpu_seconds(self, work: Callable[[], object], *, repeats: int, call_s: float) -> float:
        """Return what one call takes the GPU, by events around `repeats` of them.

        The GPU is kept busy until all calls are given to it, so that the host's time is not part of it. Calls that
        wait for the GPU do not come ahead of it: theirs is the time of the call.

        Args:
            work: the call.
            repeats: how many.
            call_s: about how long the host takes for one.
        """
        busy_s = min(repeats * call_s * 1.5, _MAX_BUSY_S)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.wait()
        torch.cuda._sleep(int(busy_s * _CYCLES_PER_S))
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        self.wait()
        return begin.elapsed_time(end) / 1e3 / repeats


def machine_of(*, quick: bool) -> Machine | str:
    """The GPU; the CPU where there is none and the run is quick; else why there is nothing to measure."""
    if torch.cuda.is_available():
        return Machine(device=torch.device("cuda", torch.cuda.current_device()), quick=quick)
    if quick:
        return Machine(device=torch.device("cpu"), quick=True)
    built = "no GPU" if torch.backends.cuda.is_built() else "torch was built without CUDA"
    return f"{built}; --quick runs tiny cases on the CPU, to show that the code works"


def in_turns(
    machine: Machine,
    work: Mapping[str, Callable[[], object]],
    *,
    warmups: int = 3,
    gpu: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each contestant's calls, one a round; who begins rotates.

    Args:
        machine: with the device.
        work: contestants by name.
        warmups: calls of each before the first round.
        gpu: filled with the GPU's seconds of the same calls, measured after each turn; stays empty on the CPU.
    """
    repeats = 10 if machine.is_gpu else 1
    for each in work.values():
        for _ in range(warmups):
            each()
    found: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for number in range(machine.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(machine.seconds(work[name], repeats=repeats))
            if gpu is not None and machine.is_gpu:
                took = machine.gpu_seconds(work[name], repeats=repeats, call_s=found[name][-1])
                gpu.setdefault(name, []).append(took)
    return found


def kernels(
    machine: Machine,
    name: str,
    work: Mapping[str, Callable[[], object]],
    *,
    peer: str,
    amount: float,
    goal: float = 0.0,
    warmups: int = 3,
) -> list[Case]:
    """Return a case of calls, as a step pays them, and on a GPU one of what they take the GPU (`…_gpu`), with the goal.

    Args:
        machine: with the device.
        name: of the case.
        work: contestants by name, "ours" among them.
        peer: the other's name.
        amount: samples of a call.
        goal: the promised ratio, of kernels.
        warmups: calls of each before the first round.
    """
    on_gpu: dict[str, list[float]] = {}
    calls = in_turns(machine, work, warmups=warmups, gpu=on_gpu)
    found = [faster(machine, name, calls, peer=peer, amount=amount, goal=0.0 if on_gpu else goal)]
    if on_gpu:
        found.append(faster(machine, f"{name}_gpu", on_gpu, peer=peer, amount=amount, goal=goal))
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
