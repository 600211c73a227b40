"""What a step computes on a GPU: the losses of the CPU, and the same bits after a stop as without one."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.contest import Machine, Measure, case
from benchmarks.ours import build, to_batch, training_config
from benchmarks.report import Case
from benchmarks.workload import Workload, make_batches
from ziggurat.features.batch import Batch
from ziggurat.ops.lookup import KernelChoice
from ziggurat.testing.rounding import move_by_units
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode
from ziggurat.training.state import prepare_to_load, restore_state, snapshot_tensors
from ziggurat.training.step.train_step import TrainStep

_MOVED_RUNS = 3
_SMALL = Workload(dim=16, num_rows=1000, batch_size=256, learning_rate=1e-3)


def cases() -> Iterator[tuple[str, Measure]]:
    """Names and what measures them."""
    yield "loss_curve", loss_curve
    yield "resume", resume


def _batches(machine: Machine) -> tuple[Workload, list[Batch]]:
    workload = dataclasses.replace(_SMALL, num_batches=8 if machine.quick else 64)
    return workload, [to_batch(raw, workload, labels=raw.label_sets[0]) for raw in make_batches(workload)]


def _step(workload: Workload, device: torch.device) -> TrainStep:
    model = build(workload, kernel=KernelChoice.TORCH if device.type == "cpu" else KernelChoice.AUTO).to(device)
    return TrainStep(model, training_config(workload, {"precision": "fp32", "compile": "off"}))


def loss_curve(machine: Machine) -> list[Case]:
    """Return the largest difference of a loss, against how far CPU runs are apart that round otherwise.

    A GPU may round every sum and product otherwise. So do runs whose samples stand in another order, and runs whose
    weights begin one unit of the last place away, up or down at random: the largest difference of those to the plain
    run is the noise, and a GPU may be ten times as far.
    """
    workload, batches = _batches(machine)
    cpu = torch.device("cpu")
    turned = [each.take(torch.arange(each.batch_size - 1, -1, -1)) for each in batches]
    plain = _curve(_step(workload, cpu), batches, cpu)
    others = [_curve(_step(workload, cpu), turned, cpu)]
    for seed in range(_MOVED_RUNS):
        step = _step(workload, cpu)
        move_by_units(step.model, seed=seed)
        others.append(_curve(step, batches, cpu))
    found = _curve(_step(workload, machine.device), batches, machine.device)
    noise = max(_apart(plain, other) for other in others)
    apart = _apart(plain, found)
    allowed = 10 * noise
    share = allowed / max(apart, 1e-12)
    return [
        case(
            machine,
            "loss_curve",
            [share],
            ours=apart,
            peer=allowed,
            peer_name="10 times the noise of rounding on a CPU",
            goal=1.0,
            unit="largest difference of a loss",
        )
    ]


def _curve(step: TrainStep, batches: list[Batch], device: torch.device) -> list[float]:
    return [float(step(batch.to(device)).loss) for batch in batches]


def _apart(one: list[float], other: list[float]) -> float:
    return max(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True))


def resume(machine: Machine) -> list[Case]:
    """Weights after all steps, and after a stop, a checkpoint and a new start in the middle: every bit."""
    workload, batches = _batches(machine)
    middle = len(batches) // 2
    whole, first = _step(workload, machine.device), _step(workload, machine.device)
    for batch in batches:
        whole(batch.to(machine.device))
    for batch in batches[:middle]:
        first(batch.to(machine.device))
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder), config=CheckpointConfig(mode=SaveMode.SYNC))
        store.save(middle, tensors=snapshot_tensors(first), state={})
        second = _step(workload, machine.device)
        prepare_to_load(second)
        into = snapshot_tensors(second)
        store.load(into=into)
        restore_state(second, into)
    for batch in batches[middle:]:
        second(batch.to(machine.device))
    ends = [step.model.state_dict() for step in (whole, second)]
    same = sum(bool(torch.equal(ends[0][name], ends[1][name])) for name in ends[0])
    return [
        case(
            machine,
            "resume",
            [same / len(ends[0])],
            ours=same,
            peer=len(ends[0]),
            peer_name="all tensors",
            goal=1.0,
            unit="tensors with the same bits",
        )
    ]
