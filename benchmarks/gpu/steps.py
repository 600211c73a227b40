"""A training step of DLRM on one device: ours, plain torch, and torch as an expert tunes it by hand.

    ours     `TrainStep` with the recipes' settings, compiled, batches that a thread and a queue of their own bring;
             after its first steps one CUDA graph
    plain    26 nn.EmbeddingBag with sparse gradients, Adagrad on them, Adam on the rest (`peers/plain_torch.py`), FP32
    tuned    one table of all rows, pinned int32 ids copied ahead, BF16, torch.compile, fused Adam; row-wise Adagrad
             occurrence by occurrence, which needs no sort (and is not exact where ids repeat); as one CUDA graph

The loss is read back every tenth step, as logs want it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.gpu.contest import Machine, Measure, case, faster, in_turns
from benchmarks.ours import build, to_batch, training_config
from benchmarks.peers.plain_torch import PlainModel
from benchmarks.report import Case
from benchmarks.workload import RawBatch, Workload, make_batches
from ziggurat.features.batch import Batch
from ziggurat.ops.lookup import KernelChoice
from ziggurat.training.config import StepGraphs
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.upload import Upload

GOAL_PLAIN, GOAL_TUNED, GOAL_LAUNCHES = 3.0, 1.3, 5
_READ_EVERY = 10
_FIRST_STEPS = 20  # until a step is one graph, and that was found to be faster


def cases() -> Iterator[tuple[str, Measure]]:
    """Names and what measures them."""
    yield "dlrm_step", against_torch
    yield "sorted_ahead", sorted_ahead
    yield "launches", launches


def our_settings(machine: Machine) -> dict[str, object]:
    """On a GPU BF16, compiled; on the CPU what costs no time to set up."""
    return {"precision": "bf16", "compile": "default"} if machine.is_gpu else {"precision": "fp32", "compile": "off"}


class Ours:
    """`TrainStep` and batches in host memory.

    Args:
        machine: with the device.
        workload: model and sizes.
        raws: the batches.
        step_graph: whether a step is one CUDA graph.
    """

    def __init__(
        self, machine: Machine, workload: Workload, raws: list[RawBatch], *, step_graph: StepGraphs = StepGraphs.AUTO
    ) -> None:
        model = build(workload, kernel=KernelChoice.AUTO).to(machine.device)
        settings = our_settings(machine) | {"step_graph": step_graph.value}
        self.step = TrainStep(model, training_config(workload, settings))
        self._batches = [to_batch(raw, workload, labels=raw.label_sets[0]) for raw in raws]
        self._upload = Upload(machine.device, is_beside=True)  # as the trainer brings them: beside the step
        self._numbers = itertools.count()
        self._coming = [self._next() for _ in range(self._upload.depth)]

    def _next(self) -> Callable[[], Batch]:
        return self._upload.start(self._batches[next(self._numbers) % len(self._batches)])

    def run(self) -> object:
        """One step, while the batches after it are copied."""
        self._coming.append(self._next())
        batch = self._coming.pop(0)()
        return self.step(batch, upcoming=self._coming[0]())


class Plain:
    """Torch as most write it.

    Args:
        machine: with the device.
        workload: model and sizes.
        raws: the batches.
    """

    def __init__(self, machine: Machine, workload: Workload, raws: list[RawBatch]) -> None:
        torch.manual_seed(0)
        with torch.device(machine.device):
            self.model = PlainModel(workload)
        dense = [value for name, value in self.model.named_parameters() if not name.startswith("tables.")]
        self._optimizers = (
            torch.optim.Adam(dense, lr=workload.learning_rate),
            torch.optim.Adagrad(self.model.tables.parameters(), lr=workload.table_learning_rate),
        )
        self._batches = [
            (*map(torch.from_numpy, (raw.dense, raw.label_sets[0])), [torch.from_numpy(ids) for ids in raw.ids])
            for raw in raws
        ]
        self._device, self._number = machine.device, 0

    def run(self) -> object:
        """One step."""
        dense, labels, ids = self._batches[self._number % len(self._batches)]
        logits = self.model(dense.to(self._device), [each.to(self._device) for each in ids])
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(self._device))
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        self._number += 1
        return float(loss) if self._number % _READ_EVERY == 0 else None


class Tuned:
    """Torch as an expert tunes it; see the module's docstring.

    Args:
        machine: with the device.
        workload: model and sizes.
        raws: the batches.
    """

    def __init__(self, machine: Machine, workload: Workload, raws: list[RawBatch]) -> None:
        torch.manual_seed(0)
        device, self._machine = machine.device, machine
        num_tables, rows = len(workload.lengths), workload.num_rows
        with torch.device(device):
            self._table = torch.empty(num_tables * rows, workload.dim).uniform_(-(rows**-0.5), rows**-0.5)
            self._state = torch.zeros(num_tables * rows)
            network = PlainModel(_without_tables(workload))
            self._dense = torch.zeros(workload.batch_size, workload.num_dense)
            self._labels = torch.zeros(workload.batch_size)
            self._ids = torch.zeros(workload.batch_size, num_tables, dtype=torch.int32)
        self._network, self._rate = network, workload.table_learning_rate
        weights = [value for name, value in network.named_parameters() if not name.startswith("tables.")]
        self._optimizer = torch.optim.Adam(weights, lr=workload.learning_rate, fused=True, capturable=machine.is_gpu)
        first = np.arange(num_tables) * rows
        ids = [(np.concatenate(raw.ids, axis=1) + first).astype(np.int32) for raw in raws]
        host = [(torch.from_numpy(raw.dense), torch.from_numpy(raw.label_sets[0])) for raw in raws]
        self._batches = [
            tuple(each.pin_memory() if machine.is_gpu else each for each in (*pair, torch.from_numpy(rows)))
            for pair, rows in zip(host, ids, strict=True)
        ]
        self._copies = torch.cuda.Stream() if machine.is_gpu else None
        self._forward = torch.compile(self._loss) if machine.is_gpu else self._loss
        self._number, self._result = 0, torch.zeros(())
        self._graph = self._captured() if machine.is_gpu else None

    def _loss(self, pooled_BFD: Tensor, dense: Tensor, labels: Tensor) -> Tensor:
        network = self._network
        bottom = network.bottom(dense)
        fields = torch.cat([bottom.unsqueeze(1), pooled_BFD.to(bottom.dtype)], dim=1)
        dots = torch.bmm(fields, fields.transpose(1, 2))[:, network.rows, network.columns]
        logits = network.top(torch.cat([bottom, dots], dim=1)).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)

    def _compute(self) -> None:
        ids = self._ids.view(-1)
        pooled = self._table[ids].view(*self._ids.shape, -1).requires_grad_()
        with torch.autocast(self._machine.device.type, dtype=torch.bfloat16, enabled=self._machine.is_gpu):
            loss = self._forward(pooled, self._dense, self._labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        assert pooled.grad is not None
        gradient = pooled.grad.view(len(ids), -1)
        self._state.index_add_(0, ids, gradient.square().mean(1))
        scale = (self._state[ids].sqrt() + 1e-8).reciprocal().mul_(-self._rate)
        self._table.index_add_(0, ids, gradient * scale.unsqueeze(1))
        self._result = loss.detach()

    def _captured(self) -> Any:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._compute()
        return graph

    def run(self) -> object:
        """One step; the copy of its batch waits for the step before, on a stream of its own."""
        dense, labels, ids = self._batches[self._number % len(self._batches)]
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            for target, source in ((self._dense, dense), (self._labels, labels), (self._ids, ids)):
                target.copy_(source, non_blocking=True)
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)
        if self._graph is None:
            self._compute()
        else:
            self._graph.replay()
        self._number += 1
        return float(self._result) if self._number % _READ_EVERY == 0 else None


def _without_tables(workload: Workload) -> Workload:
    """The same network with tables of one row."""
    return replace(workload, num_rows=1)


def against_torch(machine: Machine) -> list[Case]:
    """Ours against both, in turns."""
    workload = machine.workload()
    raws = make_batches(workload)
    contest = {name: make(machine, workload, raws) for name, make in _CONTESTANTS.items()}
    warmups = _FIRST_STEPS if machine.is_gpu else 3
    seconds = in_turns(machine, {name: each.run for name, each in contest.items()}, warmups=warmups)
    size = workload.batch_size
    return [
        faster(machine, "dlrm_step_plain_torch", seconds, peer="plain", amount=size, goal=GOAL_PLAIN),
        faster(machine, "dlrm_step_tuned_torch", seconds, peer="tuned", amount=size, goal=GOAL_TUNED),
    ]


_CONTESTANTS: dict[str, Callable[[Machine, Workload, list[RawBatch]], Any]] = {
    "ours": Ours,
    "plain": Plain,
    "tuned": Tuned,
}


def sorted_ahead(machine: Machine) -> list[Case] | str:
    """Rows checked and sorted on a queue of their own while the step before computes, against in lookup and update.

    Steps are eager here: a graph sorts rows beside its own step.
    """
    if not machine.is_gpu:
        return "a CPU sorts rows in its updates"
    workload = machine.workload()
    raws = make_batches(workload)
    names = ("ours", "in the update")
    contest = {name: Ours(machine, workload, raws, step_graph=StepGraphs.OFF) for name in names}
    assert contest["in the update"].step.late is not None
    contest["in the update"].step.late.ahead.is_on = False
    seconds = in_turns(machine, {name: each.run for name, each in contest.items()})
    return [faster(machine, "sorted_ahead", seconds, peer="in the update", amount=workload.batch_size)]


def launches(machine: Machine) -> list[Case] | str:
    """Kernels and graphs that the host starts in a step, after warm-up."""
    if not machine.is_gpu:
        return "the host starts kernels on a GPU alone"
    workload = machine.workload()
    ours = Ours(machine, workload, make_batches(workload))
    for _ in range(_FIRST_STEPS):
        ours.run()
    machine.wait()
    steps = 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(steps):
            ours.run()
        machine.wait()
    counts = {each.key: each.count for each in profile.key_averages()}
    started = sum(count for name, count in counts.items() if "Launch" in name and name.startswith(("cuda", "cu")))
    mean = started / steps
    allowed = [GOAL_LAUNCHES / mean if mean else 1.0]
    return [
        case(
            machine,
            "launches",
            allowed,
            ours=mean,
            peer=GOAL_LAUNCHES,
            peer_name="what is allowed",
            goal=1.0,
            unit="launches a step",
        )
    ]
