"""One graph a step on one GPU: `python -m benchmarks.gpu.graph --out FILE`, about 150 s; a process a part.

    bits          20 steps by a graph against eager ones: losses, verdicts, weights and optimizers bit for bit, with
                  clipping, a batch with NaN, a schedule, dropout, rows in BF16; of DLRM, DCNv2, Wukong, DHEN and DIN
    dlrm_8192     DLRM, 26 tables of 1,000,000 rows, 128 columns, BF16, not compiled: eager steps, the whole step as one
                  graph, what `auto` chooses, torch tuned by hand; in turns. Then with pooled fields in BF16 (`_bf16`)
    dlrm_65536    the same, compiled, 65,536 samples; and forward and backward as graphs (`_two`)
    models        DCNv2, Wukong, DHEN: eagerly and as one graph, batches of 8,192

`wall_ms` is of steps whose batches are on the GPU and whose results are read a step late, as the trainer reads them;
`fed_ms` the same with batches that a thread packs and sends (`training/upload.py`); `host_ms` is what the host takes to
start a step; `gpu_ms` the kernels' own time. The file is written again after each case. A step that cannot be recorded
says why, and which piece of it can. `--tiny` shows on a CPU that the code runs, with steps that are not graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.contest import Machine
from benchmarks.gpu.steps import Tuned
from benchmarks.ours import config_of, inputs_of, to_batch, training_config
from benchmarks.workload import ModelKind, RawBatch, Workload, make_batches
from ziggurat.embeddings import PooledDtype, TableOptimizerKind
from ziggurat.embeddings.storage import LowPrecision, MakeStorage, MemoryStorage
from ziggurat.embeddings.storage.part import TablePart
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import JaggedSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import DINConfig, DLRMConfig, MLPConfig, build_model
from ziggurat.ops.row_formats import RowFormat
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.config import Compile, Precision, StepGraphs, TrainingConfig
from ziggurat.training.state import state_tensors
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.upload import Upload

PARTS = ("bits", "dlrm_8192", "dlrm_65536", "models")
LIMITS_S = {"bits": 50.0, "dlrm_8192": 45.0, "dlrm_65536": 110.0, "models": 60.0}
_ROOT = Path(__file__).resolve().parents[2]
_ROUNDS = 3
_CALLS = 12  # of a contestant in a round
_WARM = 12  # steps until a graph is recorded, and replayed


def _traceback() -> list[str]:
    """Return the lines of the present error's traceback; a report names no folder of a machine."""
    return traceback.format_exc().replace(f"{_ROOT}/", "").splitlines()


class Run:
    """What a part finds, written after each case.

    Args:
        path: the file.
        device: a GPU, or the CPU where nothing is measured.
    """

    def __init__(self, path: Path, *, device: torch.device) -> None:
        self.path = path
        self.device = device
        self.is_gpu = device.type == "cuda"

    def say(self, name: str, **facts: Any) -> None:
        """Keep and print the facts of a case."""
        print(name, json.dumps(facts, default=str)[:3000], flush=True)
        found = json.loads(self.path.read_text()) if self.path.is_file() else {}
        found[name] = facts
        self.path.write_text(json.dumps(found, indent=1, default=str))

    def tried(self, name: str, case: Callable[[], Mapping[str, Any]]) -> None:
        """Make a case; keep what it found, or what ended it."""
        begin_s = time.perf_counter()
        try:
            facts = dict(case())
        except Exception as error:
            facts = {
                "failed": f"{type(error).__name__}: {error}",
                "traceback": _traceback()[-40:],
            }
            if self.is_gpu:
                torch.cuda.empty_cache()
        self.say(name, **facts, case_s=round(time.perf_counter() - begin_s, 1))

    def wait(self) -> None:
        """Until the device has computed what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


class Contestant:
    """A step and batches for it.

    Args:
        run: with the device.
        workload: model and sizes.
        raws: the batches.
        compile_: of the dense network.
        choice: whether the step is one graph.
        pooled: type of the pooled fields.
    """

    def __init__(
        self,
        run: Run,
        workload: Workload,
        raws: list[RawBatch],
        *,
        compile_: Compile,
        choice: StepGraphs,
        pooled: PooledDtype = PooledDtype.FP32,
    ) -> None:
        config = config_of(workload)
        config = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, pooled=pooled))
        model = build_model(config, inputs_of(workload), seed=0, draw_tables=False).to(run.device)
        tables = model.embeddings.tables
        tables.about_to_load()
        torch.manual_seed(0)
        for index in range(tables.num_storages):
            weights = tables.storage(index).tensor()
            assert weights is not None, "in memory"
            with torch.no_grad():
                weights.uniform_(-1e-3, 1e-3)  # on the device: a CPU draws 3 billion numbers for half a minute
        tables.mark_filled()
        model.train()
        settings: dict[str, object] = {"precision": "bf16" if run.is_gpu else "fp32", "compile": compile_.value}
        training = dataclasses.replace(training_config(workload, settings), step_graph=choice)
        self.step = TrainStep(model, training)
        self._host = [to_batch(raw, workload, labels=raw.label_sets[0]) for raw in raws]
        self._there = [batch.to(run.device) for batch in self._host]
        self._numbers = itertools.count()
        self._last: Any = None
        self._upload = Upload(run.device, is_beside=True)
        self._coming: list[Callable[[], Batch]] = []

    def start(self) -> Any:
        """Start a step on batches that are there."""
        number = next(self._numbers)
        upcoming = self._there[(number + 1) % len(self._there)]
        return self.step(self._there[number % len(self._there)], upcoming=upcoming)

    def run(self) -> None:
        """One step, whose result is read after the next one has begun."""
        before = self._last
        self._last = self.start()
        if before is not None:
            assert before.read().finite

    def run_fed(self) -> None:
        """One step, while the batches after it are packed and copied."""
        while len(self._coming) < 3:
            self._coming.append(self._upload.start(self._host[next(self._numbers) % len(self._host)]))
        batch = self._coming.pop(0)()
        before = self._last
        self._last = self.step(batch, upcoming=self._coming[0]())
        if before is not None:
            before.read()

    def facts(self) -> dict[str, Any]:
        """Say what became of the graph."""
        graph = self.step.graph
        if graph is None:
            return {"graph": self.step.no_graph}
        return {"graph": graph.reason or "replayed", "num_replayed": graph.num_replayed, "news": graph.take_news()}


def _wall_ms(run: Run, work: Callable[[], object], *, calls: int) -> float:
    run.wait()
    begin_s = time.perf_counter()
    for _ in range(calls):
        work()
    run.wait()
    return 1e3 * (time.perf_counter() - begin_s) / calls


def _host_ms(run: Run, work: Callable[[], object], *, calls: int = 8) -> float:
    """Return what the host takes to start a call, where it reads nothing."""
    run.wait()
    begin_s = time.perf_counter()
    for _ in range(calls):
        work()
    host_ms = 1e3 * (time.perf_counter() - begin_s) / calls
    run.wait()
    return host_ms


def _kernels(run: Run, work: Callable[[], object], *, calls: int = 3, shown: int = 20) -> dict[str, Any]:
    """Return what the GPU does in a call: milliseconds, kernels, and the longest of them."""
    if not run.is_gpu:
        return {}
    run.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(calls):
                work()
            run.wait()
        events = [each for each in profile.key_averages() if each.self_device_time_total > 0]
    longest = sorted(events, key=lambda each: -each.self_device_time_total)[:shown]
    return {
        "gpu_ms": round(sum(each.self_device_time_total for each in events) / calls / 1e3, 3),
        "kernels": sum(each.count for each in events) / calls,
        "longest_us": {each.key[:70]: round(each.self_device_time_total / calls, 1) for each in longest},
    }


def _in_turns(run: Run, name: str, contest: Mapping[str, Contestant | Tuned], *, size: int) -> None:
    """Time contestants in turns, then look at each by itself."""
    work: dict[str, Callable[[], object]] = {}
    for each, contestant in contest.items():
        begin_s = time.perf_counter()
        try:
            for _ in range(_WARM if run.is_gpu else 2):
                contestant.run()
            run.wait()
        except Exception as error:
            run.say(f"{name}_{each}", failed=str(error), traceback=_traceback()[-60:])
            if isinstance(contestant, Contestant):
                _pieces(run, f"{name}_{each}", contestant)
            continue
        work[each] = contestant.run
        print(name, each, f"warm after {time.perf_counter() - begin_s:.1f} s", flush=True)
    times: dict[str, list[float]] = {each: [] for each in work}
    for _ in range(_ROUNDS):
        for each, call in work.items():
            times[each].append(_wall_ms(run, call, calls=_CALLS if run.is_gpu else 1))
    for each, contestant in contest.items():
        if each not in work:
            continue
        wall_ms = sorted(times[each])[_ROUNDS // 2]
        facts: dict[str, Any] = {"wall_ms": round(wall_ms, 3), "samples_per_s": round(1e3 * size / wall_ms)}
        if "tuned" in times and each != "tuned":
            facts["of_tuned"] = round(sorted(times["tuned"])[_ROUNDS // 2] / wall_ms, 3)
        if isinstance(contestant, Contestant):
            facts |= {"host_ms": round(_host_ms(run, contestant.start), 3), **contestant.facts()}
            for _ in range(4):
                contestant.run_fed()
            facts["fed_ms"] = round(_wall_ms(run, contestant.run_fed, calls=_CALLS if run.is_gpu else 1), 3)
        facts |= _kernels(run, work[each])
        run.say(f"{name}_{each}", **facts, all_wall_ms=[round(one, 3) for one in times[each]])


def _pieces(run: Run, name: str, contestant: Contestant) -> None:
    """Say which pieces of a step that could not be recorded can be."""
    step = contestant.step
    batch = contestant._there[0]
    assert step.late is not None
    late = step.late
    late.ahead.stop()
    kept: dict[str, Tensor] = {}

    def forward_and_backward() -> None:
        with late.watching():
            kept["loss"] = step._forward_backward(batch, None).detach()

    def update() -> None:
        late.decide(kept["loss"], saved=[])

    def piece(work: Callable[[], None], *, before: Callable[[], None] | None) -> dict[str, Any]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if before is not None:
                before()
            work()
            step.zero_grad()
        torch.cuda.synchronize()
        if before is not None:
            before()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        step.zero_grad()
        return {"recorded": True}

    run.tried(f"{name}_piece_forward_backward", lambda: piece(forward_and_backward, before=None))
    step.zero_grad()
    run.tried(f"{name}_piece_update", lambda: piece(update, before=forward_and_backward))
    step.zero_grad()


def _workload(run: Run, size: int, model: ModelKind = ModelKind.DLRM, *, num_rows: int = 1_000_000) -> Workload:
    if not run.is_gpu:
        return Workload(model=model, dim=8, num_rows=50, batch_size=16, num_batches=2)
    return Workload(model=model, dim=128, num_rows=num_rows, batch_size=size, num_batches=4)


def _dlrm(run: Run, name: str, *, size: int, compile_: Compile, contests: Mapping[str, tuple[str, ...]]) -> None:
    """Time DLRM: contests one after the other, by the names of their cases; torch tuned by hand is in all of them."""
    compile_ = compile_ if run.is_gpu else Compile.OFF
    graphs = Compile.CUDA_GRAPHS if run.is_gpu else Compile.OFF
    workload = _workload(run, size)
    raws = make_batches(workload)

    def ours(choice: StepGraphs, how: Compile = compile_, pooled: PooledDtype = PooledDtype.FP32) -> Contestant:
        return Contestant(run, workload, raws, compile_=how, choice=choice, pooled=pooled)

    made: dict[str, Callable[[], Contestant]] = {
        "eager": lambda: ours(StepGraphs.OFF),
        "whole": lambda: ours(_on(run)),
        "auto": lambda: ours(StepGraphs.AUTO),
        "computed": lambda: ours(_on(run), pooled=PooledDtype.COMPUTED),
        "computed_sorted_in_update": lambda: _sorted_in_update(ours(_on(run), pooled=PooledDtype.COMPUTED)),
        "two_graphs": lambda: ours(StepGraphs.OFF, graphs),
        "two_graphs_computed": lambda: ours(StepGraphs.OFF, graphs, pooled=PooledDtype.COMPUTED),
    }
    tuned = Tuned(Machine(device=run.device, quick=False), workload, raws)

    def one(case: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        gc.collect()  # contestants of the contest before hold tables of 13 GB, and point at themselves
        if run.is_gpu:
            torch.cuda.empty_cache()
        contest: dict[str, Contestant | Tuned] = {each: made[each]() for each in names}
        _in_turns(run, case, contest | {"tuned": tuned}, size=workload.batch_size)
        return {}

    for case, names in contests.items():
        run.tried(f"{name}{case}", lambda case=case, names=names: one(f"{name}{case}", names))


def _sorted_in_update(contestant: Contestant) -> Contestant:
    """Let a contestant's graph sort rows in its update, not beside forward and backward pass."""
    late = contestant.step.late
    if late is not None:
        late.ahead.beside = lambda checked, layouts: checked
    return contestant


def _on(run: Run) -> StepGraphs:
    return StepGraphs.ON if run.is_gpu else StepGraphs.OFF


def dlrm_65536(run: Run) -> None:
    """Time DLRM at 65,536 samples, compiled."""
    contests = {
        "": ("whole", "eager"),
        "_bf16": ("computed", "computed_sorted_in_update"),
        "_two": ("two_graphs", "two_graphs_computed"),
    }
    _dlrm(run, "dlrm_65536", size=65_536, compile_=Compile.DEFAULT, contests=contests)


def dlrm_8192(run: Run) -> None:
    """Time DLRM at 8,192 samples, not compiled."""
    contests = {"": ("whole", "eager", "auto"), "_bf16": ("computed", "computed_sorted_in_update")}
    _dlrm(run, "dlrm_8192", size=8192, compile_=Compile.OFF, contests=contests)


def models(run: Run) -> None:
    """Time other models eagerly and as one graph."""
    for kind in (ModelKind.DCN_V2, ModelKind.WUKONG, ModelKind.DHEN):
        run.tried(f"models_{kind.value}", lambda kind=kind: _model(run, kind))


def _model(run: Run, kind: ModelKind) -> Mapping[str, Any]:
    workload = _workload(run, 8192, kind, num_rows=100_000)
    raws = make_batches(workload)
    contest = {
        name: Contestant(run, workload, raws, compile_=Compile.OFF, choice=choice)
        for name, choice in (("whole", _on(run)), ("eager", StepGraphs.OFF))
    }
    _in_turns(run, kind.value, contest, size=workload.batch_size)
    return {}


def bits(run: Run) -> None:
    """Compare steps by a graph with eager ones."""
    inputs = small_inputs(num_dense=13, num_single=20, num_jagged=0)
    mlp = MLPConfig(hidden_dims=(128, 64))
    dlrm = DLRMConfig(embedding_dim=32, bottom=mlp, top=mlp)
    dropped = dataclasses.replace(dlrm, top=dataclasses.replace(mlp, dropout=0.2))
    dense_tables = dataclasses.replace(dlrm.embedding, optimizer=TableOptimizerKind.ADAM_DENSE)
    cases: dict[str, tuple[Any, dict[str, Any], MakeStorage]] = {
        "dlrm": (dlrm, {}, MemoryStorage),
        "dropout": (dropped, {"clip_norm": 0.1}, MemoryStorage),
        "bf16_rows": (dlrm, {"clip_norm": 0.1}, LowPrecision(row_format=RowFormat.BF16)),
        "average": (dataclasses.replace(dlrm, embedding=dense_tables), {"weight_average": 0.9}, MemoryStorage),
    }
    for kind in (ModelKind.DCN_V2, ModelKind.WUKONG, ModelKind.DHEN):
        cases[kind.value] = (config_of(Workload(model=kind, dim=32)), {"clip_norm": 0.1}, MemoryStorage)
    for name, (config, changes, make_storage) in cases.items():
        run.tried(
            f"bits_{name}",
            lambda config=config, changes=changes, make=make_storage: _same(run, config, inputs, changes, make),
        )
    clicks = JaggedSpec(name="clicks", table=inputs.tables[0].name, pooling=Pooling.NONE, ordered=True)
    listed = dataclasses.replace(inputs, jagged=(clicks,))
    pooled = dataclasses.replace(inputs, jagged=(dataclasses.replace(clicks, pooling=Pooling.MEAN, ordered=False),))
    run.tried("bits_fallback", lambda: _same(run, dropped, inputs, {}, MemoryStorage, is_waiting=True))
    run.tried("bits_lists", lambda: _same(run, dlrm, pooled, {}, MemoryStorage))
    run.tried("bits_din", lambda: _same(run, DINConfig(embedding_dim=32), listed, {}, MemoryStorage))


def _waiting(loss: Callable[[Any, Batch], Any]) -> Callable[[Any, Batch], Any]:
    """Make of a loss one that waits for the device, which no graph can hold."""

    def waits(outputs: Any, batch: Batch) -> Any:
        sums = loss(outputs, batch)
        sums.total.sum().item()
        return sums

    return waits


def _same(
    run: Run,
    config: Any,
    inputs: Any,
    changes: dict[str, Any],
    make_storage: MakeStorage,
    *,
    is_waiting: bool = False,
) -> Mapping[str, Any]:
    found = {}
    told = {}
    for choice in (StepGraphs.OFF, StepGraphs.ON, StepGraphs.AUTO):
        torch.manual_seed(5)
        model = build_model(config, inputs, seed=0, make_storage=make_storage).to(run.device)
        model.train()
        precision = Precision.BF16 if run.is_gpu else Precision.FP32
        if not run.is_gpu and choice is StepGraphs.ON:
            continue
        settings = TrainingConfig(precision=precision, step_graph=StepGraphs.AUTO)
        try:
            step = TrainStep(model, dataclasses.replace(settings, step_graph=choice, **changes))
        except Exception as error:
            told[choice.value] = f"{type(error).__name__}: {error}"
            continue
        if is_waiting:
            step._loss = _waiting(step._loss)
            if choice is StepGraphs.ON:
                continue
        results = []
        for number in range(24):
            batch = random_batch(inputs, 512 if run.is_gpu else 8, seed=number).to(run.device)
            if number == 14:
                batch.dense[3, 1] = torch.nan
            results.append(step(batch, factor=1.0 / (1 + number)))
        read = [result.read() for result in results]
        verdicts = [(each.loss if each.finite else "nan", each.finite, each.first_bad) for each in read]
        state = {name: _numbers(value) for name, value in state_tensors(step).items()}
        found[choice.value] = verdicts, state, torch.rand(4, device=run.device).tolist()
        graph = step.graph
        told[choice.value] = {
            "replayed": 0 if graph is None else graph.num_replayed,
            "why_not": step.no_graph if graph is None else graph.reason,
            "last_loss": verdicts[-1][0],
            "skipped": sum(not each.finite for each in read),
        }
    eager = found["off"]
    for choice, (verdicts, state, drawn) in found.items():
        if choice == "off":
            continue
        unlike = [name for name, value in eager[1].items() if not torch.equal(value, state[name])]
        told[choice] |= {
            "same_verdicts": verdicts == eager[0],
            "first_unlike_step": next(
                (k for k, pair in enumerate(zip(verdicts, eager[0], strict=True)) if pair[0] != pair[1]), None
            ),
            "unlike_tensors": {name: _difference(eager[1][name], state[name]) for name in unlike[:10]},
            "tensors": len(eager[1]),
            "same_generator": drawn == eager[2],
        }
    return told


def _difference(one: Tensor, other: Tensor) -> dict[str, Any]:
    """Say how many numbers of two tensors differ, and by how much."""
    apart = (one.double() - other.double()).abs()
    return {"numbers": int((one != other).sum()), "of": one.numel(), "most": float(apart.max())}


def _numbers(value: Tensor) -> Tensor:
    """Copy a tensor of a run's state to the host, whole."""
    if isinstance(value, TablePart):
        return torch.cat([value.rows.read(first, count).cpu() for first, count in value.rows.chunks()])
    return value.detach().cpu().clone()


WORK: dict[str, Callable[[Run], None]] = {
    "bits": bits,
    "dlrm_65536": dlrm_65536,
    "dlrm_8192": dlrm_8192,
    "models": models,
}


def main() -> None:
    """Run all parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--one", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=200.0, help="no part begins after so long")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.one is not None:
        device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
        WORK[options.one](Run(options.out, device=device))
        sys.stdout.flush()
        os._exit(0)  # what a process gives back piece by piece at its end takes a GPU seconds
    begin_s = time.perf_counter()
    for part in [part for part in PARTS if part in options.parts.split(",")]:
        past_s = time.perf_counter() - begin_s
        if past_s > options.seconds:
            print(f"{part}: not begun after {past_s:.0f} s", flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.gpu.graph", "--out", str(options.out), "--one", part]
        limit_s = min(LIMITS_S[part], options.seconds + 20 - past_s)
        try:
            done = subprocess.run([*command, *(["--tiny"] if options.tiny else [])], timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"{part}: stopped at its limit of {limit_s:.0f} s", flush=True)
        else:
            print(f"{part}: exit {done.returncode}, {time.perf_counter() - begin_s:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
