"""A whole training step of DLRM with tables in few bits, against the same step with tables in FP32, in turns.

    D = 128   26 tables, 0.8 GB, MLPerf's lists four times as long (823 ids a sample), so that lookups and updates take
              half of the step or more; ids by Zipf 1.05 or uniform
    D = 64    the same with MLPerf's lists (214 ids a sample), tables of 0.4 GB, by Zipf
    share     of the step with FP32 that lookups and updates take: 1 − without tables / with them, round by round

All models of a group live in one process and take turns of one thread; a rate is samples a CPU second, which other
processes disturb less than the clock, and a ratio is the median over rounds of our rate over that with FP32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.harness import percentiles
from benchmarks.ours import FixedPooled, config_of, inputs_of, training_config, with_label_sets
from benchmarks.report import Case
from benchmarks.workload import RESERVED_ROWS, Workload, make_batches
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.batch import Batch
from ziggurat.models import build_model
from ziggurat.ops.lookup import KernelChoice
from ziggurat.ops.row_formats import RowFormat
from ziggurat.training.report.progress import Progress
from ziggurat.training.step.train_step import TrainStep

_PLAIN, _WITHOUT = "fp32", "without tables"


@dataclass(frozen=True, kw_only=True)
class SpeedCase:
    """Tables in few bits in one workload.

    Args:
        dim: columns.
        tables: what they are kept as.
        is_uniform: ids are uniform, and not by Zipf 1.05.
        goal: the rate over that of FP32 that is wanted; 0: none.
    """

    dim: int
    tables: TablesConfig
    is_uniform: bool = False
    goal: float = 0.0


def _case(dim: int, row_format: RowFormat, *, cache: float = 0.0, goal: float = 0.0) -> SpeedCase:
    return SpeedCase(dim=dim, tables=TablesConfig(weights=row_format, cache=cache), goal=goal)


CASES = {
    "dlrm_d128_bf16_speed": _case(128, RowFormat.BF16, goal=1.15),
    "dlrm_d128_split_bf16_speed": _case(128, RowFormat.SPLIT_BF16, goal=1.15),
    "dlrm_d128_int4_cache1_speed": _case(128, RowFormat.INT4, cache=0.01),
    "dlrm_d64_int8_cache5_speed": _case(64, RowFormat.INT8, cache=0.05, goal=0.9),
    "dlrm_d128_int4_speed": _case(128, RowFormat.INT4),
    "dlrm_d64_int8_speed": _case(64, RowFormat.INT8),
}
CASES |= {
    name.replace("_speed", "_uniform_speed"): replace(CASES[name], is_uniform=True)
    for name in ("dlrm_d128_bf16_speed", "dlrm_d128_split_bf16_speed")
}


@dataclass(kw_only=True)
class Group:
    """What the cases of one workload found.

    Args:
        workload: that was trained.
        seconds: CPU seconds of a step, a round, by contestant: names of cases, FP32, and FP32 without tables.
    """

    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def table_share(self) -> float:
        """Of the step with FP32."""
        pairs = zip(self.seconds[_WITHOUT], self.seconds[_PLAIN], strict=True)
        return 1.0 - statistics.median(without / plain for without, plain in pairs)

    def case(self, name: str) -> Case:
        """One of its cases."""
        rates = {each: [self.workload.batch_size / s for s in times] for each, times in self.seconds.items()}
        ratios = [ours / plain for ours, plain in zip(rates[name], rates[_PLAIN], strict=True)]
        low, high = percentiles(ratios)
        return Case(
            name=name,
            ours=statistics.median(rates[name]),
            peer=statistics.median(rates[_PLAIN]),
            ratio=statistics.median(ratios),
            ratio_p10=low,
            ratio_p90=high,
            ours_name=name,
            peer_name="FP32 tables in memory",
            unit="samples/CPU s",
            goal=CASES[name].goal,
        )


def measure(names: Sequence[str], *, quick: bool, progress: Progress) -> list[Group]:
    """All cases, those of one workload in turns.

    Args:
        names: of cases.
        quick: small tables and few rounds.
        progress: where to say what happens.
    """
    groups: dict[tuple[int, bool], dict[str, TablesConfig]] = {}
    for name in names:
        case = CASES[name]
        groups.setdefault((case.dim, case.is_uniform), {})[name] = case.tables
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [
            _measure_group(_workload(dim, is_uniform=is_uniform, quick=quick), kinds, quick=quick, progress=progress)
            for (dim, is_uniform), kinds in groups.items()
        ]
    finally:
        torch.set_num_threads(threads)


def _workload(dim: int, *, is_uniform: bool, quick: bool) -> Workload:
    return Workload(
        dim=dim,
        multi_hot=True,
        num_rows=2_000 if quick else 60_000,
        batch_size=128 if quick else 512,
        list_scale=4 if dim == 128 else 1,
        num_batches=2 if quick else 16,
        zipf_exponent=0.0 if is_uniform else 1.05,
    )


def _measure_group(workload: Workload, kinds: Mapping[str, TablesConfig], *, quick: bool, progress: Progress) -> Group:
    batches = [with_label_sets(raw, workload)[0] for raw in make_batches(workload)]
    steps = {name: _step(workload, tables) for name, tables in {_PLAIN: TablesConfig(), **kinds}.items()}
    steps[_WITHOUT] = _step(replace(workload, num_rows=RESERVED_ROWS + 1), TablesConfig())
    with torch.no_grad():
        pooled = [steps[_PLAIN].model.embeddings(batch) for batch in batches[:4]]
    steps[_WITHOUT].model.embeddings = FixedPooled(pooled)  # type: ignore[assignment]
    turns = {name: _turn(step, batches, num_steps=1 if quick else 3) for name, step in steps.items()}
    group = Group(workload=workload, seconds={name: [] for name in turns})
    for turn in turns.values():
        turn()
    names = list(turns)
    for number in range(2 if quick else 15):
        progress.say(f"speed: {', '.join(kinds)}, round {number + 1}")
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            group.seconds[name].append(turns[name]())
    return group


def _step(workload: Workload, tables: TablesConfig) -> TrainStep:
    model = build_model(
        config_of(workload, kernel=KernelChoice.CPP),
        inputs_of(workload),
        seed=workload.seed,
        make_storage=tables.make_storage(seed=workload.seed),
    )
    step = TrainStep(model, training_config(workload, {}))
    model.train()
    return step


def _turn(step: TrainStep, batches: Sequence[Batch], *, num_steps: int) -> Callable[[], float]:
    """What takes some steps and says the seconds of one."""
    taken = 0

    def turn() -> float:
        nonlocal taken
        begin = time.thread_time()
        for _ in range(num_steps):
            step(batches[taken % len(batches)])
            taken += 1
        return (time.thread_time() - begin) / num_steps

    return turn
