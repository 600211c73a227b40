"""Steps of models beside DLRM on one GPU: samples a second, and the share of a step in which the GPU works.

    python -m benchmarks.gpu.recipes --out FILE [--cases dcn_v2,din] [--seconds 55]

    dcn_v2, wukong, dhen   Criteo's shape, 26 tables of 100,000 rows of 64 numbers, 16,384 samples
    din                    three fields and a history of up to 100 clicks, 100,000 items, 16,384 samples
    hstu                   next item, two layers of 128 numbers, histories of up to 200 events, 256 users
    movielens_hstu         the model of the recipe `movielens_hstu`, 3,706 films, its batch of 64 users

Each model trains on a few made batches as the trainer feeds it: in BF16, nothing compiled, each batch copied beside the
step before. The file is written again after each case, and no case begins after `--seconds`. Needs neither polars nor
FBGEMM; `--tiny` shows on a CPU that the code runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ours import build as build_workload
from benchmarks.ours import inputs_of, to_batch
from benchmarks.workload import ModelKind, Workload, make_batches
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, TableOptimizerKind
from ziggurat.embeddings.config import TableInit
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, MomentsSpec, SingleSpec, TableSpec
from ziggurat.features.items import Items
from ziggurat.features.jagged import moments_group, offsets_of
from ziggurat.features.schema import Outcomes, Pooling
from ziggurat.models import DINConfig, Model, NextItemConfig, build_model
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.ops.lookup import KernelChoice
from ziggurat.training.config import Compile, Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.upload import Upload

MOVIELENS_HSTU = NextItemConfig(
    embedding_dim=50,
    layers=LayerPreset.HSTU,
    embedding=EmbeddingConfig(optimizer=TableOptimizerKind.ADAM_DENSE, init=TableInit.NORMAL, init_std=0.02),
)
_FIRST_ROW = 3  # rows before it are kept for padding, unknown and missing ids


@dataclass(frozen=True)
class Subject:
    """A model and the batches that it trains on."""

    model: Model
    batches: list[Batch]


def _criteo(kind: ModelKind, *, is_tiny: bool) -> Subject:
    """Return a model of Criteo's shape."""
    workload = Workload(model=kind, dim=64, batch_size=16_384, num_rows=100_000, num_batches=3)
    if is_tiny:
        workload = replace(workload, dim=16, batch_size=16, num_rows=100)
    batches = [to_batch(raw, workload, labels=raw.label_sets[0]) for raw in make_batches(workload)]
    assert len(batches[0].single) == len(inputs_of(workload).single)
    return Subject(build_workload(workload, kernel=KernelChoice.AUTO), batches)


def _lengths(size: int, *, most: int, draw: torch.Generator) -> Tensor:
    """Draw lengths of histories as event logs have them: log-normal, half of them below a third of the longest."""
    middle = torch.tensor(most / 3).log()
    return torch.exp(middle + 0.8 * torch.randn(size, generator=draw)).clamp(1, most).long()


def _rows(count: int, *, num_rows: int, draw: torch.Generator) -> Tensor:
    """Draw rows by a law of Zipf's kind: small numbers are frequent."""
    share = torch.rand(count, generator=draw).pow(3)
    return _FIRST_ROW + (share * (num_rows - _FIRST_ROW)).long()


def _din(*, is_tiny: bool) -> Subject:
    """Return DIN on a history of clicks."""
    size = 16 if is_tiny else 16_384
    most = 8 if is_tiny else 100
    num_rows = 50 if is_tiny else 100_000
    names = ("user", "item", "shop")
    inputs = InputSpec(
        dense=("age",),
        single=tuple(SingleSpec(name=name, table=name) for name in names),
        jagged=(JaggedSpec(name="clicks", table="item", pooling=Pooling.NONE, ordered=True),),
        tables=tuple(TableSpec(name=name, num_rows=num_rows) for name in names),
        labels=(LabelSpec(name="click"),),
    )
    batches = []
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        lengths = _lengths(size, most=most, draw=draw)
        batches.append(
            Batch(
                dense=torch.randn(size, 1, generator=draw),
                single=torch.stack([_rows(size, num_rows=num_rows, draw=draw) for _ in names]),
                jagged=JaggedRows(_rows(int(lengths.sum()), num_rows=num_rows, draw=draw), offsets_of(lengths)),
                labels=torch.randint(2, (size, 1), generator=draw).float(),
                row_ids=torch.arange(size),
            )
        )
    return Subject(build_model(DINConfig(embedding_dim=64, embedding=EmbeddingConfig(dim=64)), inputs, seed=0), batches)


def _next_item(config: NextItemConfig, *, size: int, most: int, num_items: int) -> Subject:
    """Return a next-item model on histories of items and their times."""
    num_rows = num_items + _FIRST_ROW
    inputs = InputSpec(
        single=(SingleSpec(name="item", table="item"),),
        jagged=(JaggedSpec(name="history", table="item", pooling=Pooling.NONE, ordered=True, max_length=most),),
        moments=(MomentsSpec(name="history_times", max_length=most), MomentsSpec(name="asked_at", max_length=1)),
        tables=(TableSpec(name="item", num_rows=num_rows),),
        labels=(LabelSpec(name="next_item", outcomes=Outcomes.POSITIVE_ONLY),),
        items=Items(id="item", features=("item",)),
    )
    batches = []
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        lengths = _lengths(size, most=most, draw=draw)
        total = int(lengths.sum())
        times = torch.randint(1, 100_000, (total,), generator=draw).cumsum(0)
        asked = int(times[-1]) + torch.randint(1, 100_000, (size,), generator=draw)
        batches.append(
            Batch(
                dense=torch.empty(size, 0),
                single=_rows(size, num_rows=num_rows, draw=draw).unsqueeze(0),
                jagged=JaggedRows(_rows(total, num_rows=num_rows, draw=draw), offsets_of(lengths)),
                sequences={
                    "history_times": moments_group(times, offsets_of(lengths)),
                    "asked_at": moments_group(asked, torch.arange(size + 1)),
                },
                labels=torch.ones(size, 1),
                row_ids=torch.arange(size),
            )
        )
    model: Any = build_model(config, inputs, seed=0)
    model.observe(batches)
    return Subject(model, batches)


def _hstu(*, is_tiny: bool) -> Subject:
    """Return HSTU of 128 numbers."""
    config = NextItemConfig(embedding_dim=16 if is_tiny else 128, layers=LayerPreset.HSTU)
    sizes = {"size": 4, "most": 8, "num_items": 50} if is_tiny else {"size": 256, "most": 200, "num_items": 100_000}
    return _next_item(config, **sizes)


def _movielens_hstu(*, is_tiny: bool) -> Subject:
    """Return the model of the recipe, which `tests/benchmarks/test_gpu.py` holds to it: its module needs polars."""
    sizes = {"size": 4, "most": 8, "num_items": 50} if is_tiny else {"size": 64, "most": 200, "num_items": 3706}
    return _next_item(MOVIELENS_HSTU, **sizes)


CASES: dict[str, Callable[..., Subject]] = {
    "movielens_hstu": _movielens_hstu,
    "hstu": _hstu,
    "din": _din,
    "dcn_v2": lambda *, is_tiny: _criteo(ModelKind.DCN_V2, is_tiny=is_tiny),
    "wukong": lambda *, is_tiny: _criteo(ModelKind.WUKONG, is_tiny=is_tiny),
    "dhen": lambda *, is_tiny: _criteo(ModelKind.DHEN, is_tiny=is_tiny),
}


def measured(subject: Subject, device: torch.device, *, steps: int) -> dict[str, Any]:
    """Train for some steps, and return what a step takes and which kernels take longest.

    Args:
        subject: what is trained.
        device: a GPU, or the CPU where nothing is measured.
        steps: timed; twenty come before on a GPU, after which those of one shape are one CUDA graph, if that is faster.
    """
    is_gpu = device.type == "cuda"
    size = subject.batches[0].batch_size
    config = TrainingConfig(
        loader=LoaderConfig(batch_size=size),
        precision=Precision.BF16 if is_gpu else Precision.FP32,
        compile=Compile.OFF,
    )
    train = TrainStep(subject.model.to(device), config)
    upload = Upload(device, is_beside=True)
    turn = itertools.cycle(subject.batches)
    coming = [upload.start(next(turn)) for _ in range(2)]

    def one() -> None:
        coming.append(upload.start(next(turn)))
        batch = coming.pop(0)()
        train(batch, upcoming=coming[0]())

    def wait() -> None:
        if is_gpu:
            torch.cuda.synchronize()

    for _ in range(20 if is_gpu else 4):
        one()
    spans = []
    for _ in range(3):
        wait()
        begin_s = time.perf_counter()
        for _ in range(steps):
            one()
        wait()
        spans.append((time.perf_counter() - begin_s) / steps)
    wall_s = statistics.median(spans)
    facts: dict[str, Any] = {"samples": size, "wall_ms": round(1e3 * wall_s, 3), "samples_per_s": round(size / wall_s)}
    if is_gpu:
        facts |= _profiled(one, steps=5)
        facts["gpu_share"] = round(facts["gpu_ms"] / facts["wall_ms"], 3)
        facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return facts


def _profiled(one: Callable[[], object], *, steps: int) -> dict[str, Any]:
    """Return what the GPU does in a step: milliseconds, launches, and the longest kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            one()
        torch.cuda.synchronize()
    events = [each for each in profile.key_averages() if each.device_type.name == "CUDA"]
    longest = sorted(events, key=lambda each: -each.self_device_time_total)[:15]
    return {
        "gpu_ms": round(sum(each.self_device_time_total for each in events) / steps / 1e3, 4),
        "launches": sum(each.count for each in events) / steps,
        "kernels_us": {
            each.key[:80]: [round(each.self_device_time_total / steps, 1), each.count / steps] for each in longest
        },
    }


def main() -> None:
    """Run the cases that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=55.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    begin_s = time.perf_counter()
    found: dict[str, Any] = {"torch": torch.__version__, "gpu": "none"}
    if not options.tiny:
        found["gpu"] = torch.cuda.get_device_name(device)
    for name in options.cases.split(","):
        if time.perf_counter() - begin_s > options.seconds:
            found[name] = {"left out": f"began after {options.seconds:.0f} s"}
        else:
            try:
                subject = CASES[name](is_tiny=options.tiny)
                found[name] = measured(subject, device, steps=1 if options.tiny else 15)
            except Exception as error:  # the next model is timed all the same
                found[name] = {"failed": repr(error)[:400]}
        print(name, json.dumps(found[name]), flush=True)
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
