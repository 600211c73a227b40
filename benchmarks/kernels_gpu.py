"""Kernels on one GPU against their bytes and against torch, every launch that might be faster, search, a whole step.

    python -m benchmarks.kernels_gpu --out FILE            all parts, each in a process of its own, about 90 s
    python -m benchmarks.kernels_gpu --out FILE --parts dots_bf16,fm_norm

    copy      the rate of a copy in memory: what bytes are held against
    finite    the check that tables stay finite
    dots_…    DLRM's interaction of 27 fields of 128 columns, forward and backward, 65,536 samples, for three pairs of
              dtypes of the pieces
    fm_norm   Wukong's products and norm, 40 fields of 128 columns, rank 8
    tables    lookup and update of 26 tables of 1,000,000 rows, ids by a Zipf law, and what an update consists of
    search    1, 64 and 1,024 queries among 1,000,000 vectors of 64 numbers
    recipes   steps of DCNv2, Wukong, DHEN, DIN and HSTU, nothing compiled (`benchmarks/gpu/recipes.py`)
    step      a DLRM step, compiled; its forward and backward pass, and the whole of it, as CUDA graphs; its time

The file is written again after each case. Kernels are timed by events around calls that follow each other; each is held
to a reference first (FP64, or the bits of the default launch). Compilation is done before, by all parts at once. Needs
neither polars nor FBGEMM; `--tiny` shows on a CPU, by Triton's interpreter, that the code runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ziggurat.ops.interactions.dot import pair_places
from ziggurat.ops.interactions.dot_interaction import DotShape, dot_interaction_reference
from ziggurat.ops.interactions.dot_triton import (
    DotLaunch,
    candidates_of,
    interaction_backward_triton,
    interaction_triton,
)
from ziggurat.ops.interactions.fm_norm import FMLaunch, fm_norm_reference, fm_norm_triton
from ziggurat.ops.lookup import FieldKind, GradientPart, LookupLayout, Lookups, Step, TableOptimizerKind, UpdateRule
from ziggurat.ops.lookup.choose import BatchShape, synthetic_lookups
from ziggurat.ops.lookup.gradient import are_finite_sums
from ziggurat.ops.lookup.layout import FieldSlot
from ziggurat.ops.lookup.sorted_reads import PlannedRead
from ziggurat.ops.lookup.triton import TritonKernel, runs
from ziggurat.ops.lookup.triton import kernel as triton_kernel
from ziggurat.ops.lookup.triton.runs import chunk_sums
from ziggurat.ops.machine.launches import DEFAULT, Launch, LaunchPart, launches_on
from ziggurat.ops.machine.matmul_rate import copy_gb_per_s
from ziggurat.retrieval.vectors import clustering

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
PARTS = ("copy", "search", "tables", "fm_norm", "dots_mixed", "dots_bf16", "dots_fp32", "finite", "recipes", "step")
COMPILED = ("search", "tables", "fm_norm", "dots_mixed", "dots_bf16", "dots_fp32")  # at once, before any is timed
LIMIT_S = 25.0  # of a part
MODELS = ("recipes", "step")  # parts that build and compile models
MODELS_LIMIT_S = 60.0  # of each of these
COMPILE_LIMIT_S = 30.0  # of all parts, side by side
_ROUNDS = 8  # of k-means


class Run:
    """What a part measures, written after each case.

    Args:
        path: the file.
        size: samples.
        device: a GPU, or the CPU where nothing is measured.
        only_compiles: call each case once and write nothing, so that Triton's cache has its kernels.
    """

    def __init__(self, path: Path, *, size: int, device: torch.device, only_compiles: bool = False) -> None:
        self.path = path
        self.size = size
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.is_timed = self.is_gpu and not only_compiles
        self.only_compiles = only_compiles
        self.copy_gb_per_s = copy_gb_per_s(device=str(device), num_bytes=1 << 30 if self.is_gpu else 1 << 16)

    def say(self, name: str, **facts: Any) -> None:
        """Keep and print the facts of a case."""
        if self.only_compiles:
            return
        print(name, json.dumps(facts), flush=True)
        found = json.loads(self.path.read_text()) if self.path.is_file() else {}
        found[name] = facts
        self.path.write_text(json.dumps(found, indent=1))

    def ms(self, work: Callable[[], object], *, calls: int = 10) -> float:
        """Return the median milliseconds of a call, by events between calls that follow each other."""
        if not self.is_timed:
            work()
            return math.nan
        for _ in range(2):
            work()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))

    def compare(
        self,
        name: str,
        candidates: Mapping[str, Callable[[], object]],
        *,
        bytes_moved: float,
        torchs: Callable[[], object] | None = None,
        **facts: Any,
    ) -> None:
        """Time candidates, the first of which is the default, and torch's operations, and say which is best."""
        times: dict[str, float] = {}
        failed: dict[str, str] = {}
        for each, work in candidates.items():
            try:
                times[each] = round(self.ms(work), 4)
            except Exception as error:  # a launch that does not compile, or does not fit: the others go on
                failed[each] = repr(error)[:200]
        allowed_ms = bytes_moved / self.copy_gb_per_s / 1e6
        best = min(times, key=lambda each: times[each], default="")
        torch_ms = None if torchs is None else round(self.ms(torchs), 4)
        default_ms = times.get(next(iter(candidates)))
        self.say(
            name,
            default_ms=default_ms,
            best=best,
            best_ms=times.get(best),
            torch_ms=torch_ms,
            bytes_allow_ms=round(allowed_ms, 4),
            best_share_of_copy=round(allowed_ms / times[best], 3) if best else None,
            candidates=times,
            failed=failed,
            **facts,
        )


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return ‖found − exact‖ / ‖exact‖ in FP64."""
    exact = exact.double()
    return float(torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact))


def dot_launches(dtype: torch.dtype) -> dict[str, DotLaunch]:
    """Name launches of dots, the first of those in use first."""
    found = candidates_of(27, 128, dtype=dtype)
    own = next(iter(found.values()))
    more: tuple[tuple[int, int, int, int, str], ...] = ((8, 4, 3, 128, "ieee"), (8, 2, 2, 128, "ieee"))
    if dtype is FP32:
        more = ((1, 4, 1, 32, "tf32x3"), (4, 4, 2, 32, "tf32x3"), (8, 4, 2, 64, "tf32x3"))
    for samples, warps, stages, chunk, precision in more:
        launch = dataclasses.replace(own, samples=samples, warps=warps, stages=stages, chunk=chunk, precision=precision)
        found[f"{launch}, {precision}"] = launch
    return found


def dots_bf16(run: Run) -> None:
    """Time forward and backward of fields in BF16."""
    dots_of(run, "bf16", kinds=(BF16, BF16), dtype=BF16)


def dots_mixed(run: Run) -> None:
    """Time forward and backward of pooled fields in FP32, and products in BF16."""
    dots_of(run, "bf16_fp32", kinds=(BF16, FP32), dtype=BF16)


def dots_fp32(run: Run) -> None:
    """Time forward and backward of fields in FP32."""
    dots_of(run, "fp32", kinds=(FP32, FP32), dtype=FP32)


def dots_of(run: Run, name: str, *, kinds: tuple[torch.dtype, torch.dtype], dtype: torch.dtype) -> None:
    """Time forward and backward for two pieces of some dtypes, and a result of another."""
    num_fields, dim = 27, 128
    shape = DotShape(num_fields, dim, passed=dim, padding=1)
    places = pair_places(num_fields, device=run.device)
    pieces = [
        torch.randn(run.size, dim, device=run.device).to(kinds[0]),
        torch.randn(run.size, (num_fields - 1) * dim, device=run.device).to(kinds[1]),
    ]
    upstream = torch.randn(run.size, shape.width, device=run.device).to(dtype)
    few = [piece[:256] for piece in pieces]
    exact = [piece.to(dtype).double().requires_grad_() for piece in few]
    wanted = dot_interaction_reference(exact, shape=shape, dtype=FP64, places=places)
    gradients = torch.autograd.grad(wanted, exact, upstream[:256].double())
    read = sum(piece.numel() * piece.itemsize for piece in pieces)
    rows = run.size * shape.width * dtype.itemsize
    forward = dot_launches(dtype)
    errors = {}
    for each, launch in forward.items():
        try:
            found = interaction_triton(few, shape=shape, dtype=dtype, launch=launch)
            errors[each] = relative_error(found, wanted.detach())
        except Exception as error:
            errors[each] = repr(error)[:80]
    run.compare(
        f"dots_forward_{name}",
        {
            each: functools.partial(interaction_triton, pieces, shape=shape, dtype=dtype, launch=launch)
            for each, launch in forward.items()
        },
        torchs=lambda: dot_interaction_reference(pieces, shape=shape, dtype=dtype, places=places),
        bytes_moved=read + rows,
        errors=errors,
    )
    backward = dot_launches(dtype)
    errors = {}
    for each, launch in backward.items():
        try:
            found = interaction_backward_triton(few, shape=shape, gradient_BW=upstream[:256], launch=launch)
            errors[each] = max(relative_error(a, b) for a, b in zip(found, gradients, strict=True))
        except Exception as error:
            errors[each] = repr(error)[:80]
    leaves = [piece.detach().requires_grad_() for piece in pieces]
    row = dot_interaction_reference(leaves, shape=shape, dtype=dtype, places=places)
    run.compare(
        f"dots_backward_{name}",
        {
            each: functools.partial(
                interaction_backward_triton, pieces, shape=shape, gradient_BW=upstream, launch=launch
            )
            for each, launch in backward.items()
        },
        torchs=lambda: torch.autograd.grad(row, leaves, upstream, retain_graph=True),
        bytes_moved=2 * read + rows,
        errors=errors,
    )


def fm_launches() -> dict[str, FMLaunch]:
    """Name launches of Wukong's norm, the one in use first."""
    sizes = ((1, 4, 1), (8, 4, 3), (8, 2, 2), (1, 2, 1), (16, 4, 2), (16, 8, 3))
    found = [FMLaunch(samples=samples, warps=warps, stages=stages) for samples, warps, stages in sizes]
    return {str(each): each for each in found}


def fm_norm(run: Run) -> None:
    """Time the forward pass in BF16; in FP32 the one in use alone, since FP32 products by Triton spill."""
    num_fields, dim, rank = 40, 128, 8
    for name, dtype in (("bf16", BF16), ("fp32", FP32)):
        shapes = ((run.size, num_fields, dim), (num_fields, rank), (num_fields * rank,), (num_fields * rank,))
        inputs = [torch.randn(shape, device=run.device).to(dtype) for shape in shapes]
        out = torch.empty(run.size, num_fields * rank, device=run.device, dtype=dtype)
        few = [inputs[0][:256], *inputs[1:]]
        exact = [each.double() for each in few]
        wanted = fm_norm_reference(exact[0], exact[1], scale_P=exact[2], shift_P=exact[3], eps=1e-5)
        launches = fm_launches() if dtype is BF16 else dict(itertools.islice(fm_launches().items(), 1))
        errors = {}
        for each, launch in launches.items():
            try:
                fm_norm_triton(few, out, eps=1e-5, launch=launch)
                errors[each] = relative_error(out[: len(few[0])], wanted)
            except Exception as error:
                errors[each] = repr(error)[:80]

        def torchs(inputs: list[Tensor] = inputs) -> Tensor:
            return fm_norm_reference(inputs[0], inputs[1], scale_P=inputs[2], shift_P=inputs[3], eps=1e-5)

        errors["torch"] = relative_error(torchs(few), wanted)
        run.compare(
            f"fm_norm_{name}",
            {
                each: functools.partial(fm_norm_triton, inputs, out, eps=1e-5, launch=launch)
                for each, launch in launches.items()
            },
            torchs=torchs,
            bytes_moved=(inputs[0].numel() + out.numel()) * dtype.itemsize,
            errors=errors,
        )


class Tables:
    """26 fields of one row a sample, each of a table of its own, and a gradient.

    Args:
        run: with sizes.
        rows: of a table.
    """

    def __init__(self, run: Run, *, rows: int) -> None:
        dim, num = 128, 26
        slots = tuple(
            FieldSlot(
                name=f"f{number}",
                kind=FieldKind.SINGLE,
                index=number,
                table=f"t{number}",
                first_row=number * rows,
                num_rows=rows,
                column=number * dim,
            )
            for number in range(num)
        )
        self.layout = LookupLayout(dim=dim, width=num * dim, slots=slots)
        draw = torch.Generator().manual_seed(0)
        drawn = synthetic_lookups(self.layout, shape=BatchShape(batch_size=run.size), generator=draw)
        self.distinct = sum(len(torch.unique(each)) for each in drawn.single)
        moved = {name: getattr(drawn, name).to(run.device, torch.int32) for name in ("single", "values")}
        self.lookups = dataclasses.replace(drawn, **moved, offsets=drawn.offsets.to(run.device), are_checked=True)
        self.weight = torch.randn(num * rows, dim, device=run.device)
        self.state = {"sum": torch.ones(len(self.weight), device=run.device)}
        rate, applies = torch.tensor(1e-3, device=run.device), torch.tensor(True, device=run.device)
        rule = UpdateRule(kind=TableOptimizerKind.ROWWISE_ADAGRAD)
        self.step = Step(rule=rule, learning_rate=rate, applies=applies)
        self.gradient = torch.randn(run.size, self.layout.width, device=run.device)

    def part(self, grad: Tensor, lookups: Lookups | None = None) -> GradientPart:
        """Join a gradient and what was looked up."""
        return GradientPart(layout=self.layout, lookups=lookups or self.lookups, grad=grad)

    def sorted_lookups(self) -> Lookups:
        """Return the same lookups with their rows sorted."""
        kernel = TritonKernel()
        found = kernel.sorted_reads([PlannedRead(layout=self.layout, lookups=self.lookups)])
        assert found is not None
        return dataclasses.replace(self.lookups, sorted_reads=(found,))


def finite(run: Run) -> None:
    """Time the check of a gradient, for every tile."""
    tables = Tables(run, rows=1000)
    tiles = ((4096, 4), (2048, 4), (1024, 2), (4096, 8), (8192, 8), (8192, 4), (16384, 8))
    for name, dtype in (("fp32", FP32), ("bf16", BF16)):
        grad = tables.gradient.to(dtype)
        parts, broken = [tables.part(grad)], [tables.part(grad.clone())]
        broken[0].grad[run.size // 2, 777] = math.nan
        kernel = TritonKernel()

        def check(launch: Launch, parts: list[GradientPart] = parts, kernel: TritonKernel = kernel) -> Tensor:
            triton_kernel.BOUNDED = launch
            return kernel.are_finite_sums(parts)

        launches = {f"{numbers}, {warps}": Launch(numbers=numbers, warps=warps) for numbers, warps in tiles}
        right = {
            each: [bool(check(launch)), bool(check(launch, broken))] == [True, False]
            for each, launch in launches.items()
        }
        run.compare(
            f"finite_{name}",
            {each: functools.partial(check, launch) for each, launch in launches.items()},
            torchs=lambda parts=parts: are_finite_sums(parts),
            bytes_moved=grad.numel() * dtype.itemsize,
            right=right,
        )


def tables(run: Run) -> None:
    """Time lookup and update for every launch, and the pieces of an update."""
    rows = 1_000_000 if run.size > 1000 else 100  # few where candidates are compiled alone
    mine = Tables(run, rows=rows)
    tiles = ((2048, 4, 4), (1024, 4, 2), (2048, 4, 2), (1024, 2, 2))
    launches = [Launch(numbers=numbers, warps=warps, reads_ahead=ahead) for numbers, warps, ahead in tiles]
    dim, num_lookups = 128, 26 * run.size
    out = torch.empty(run.size, mine.layout.width, device=run.device, dtype=BF16)

    def look_up(kernel: TritonKernel) -> None:
        kernel.lookup(mine.weight, layout=mine.layout, lookups=mine.lookups, out=out)

    kernels = [TritonKernel(launches=DEFAULT | {LaunchPart.LOOKUP: each}) for each in launches]
    run.compare(
        "lookup_bf16",
        {str(each): functools.partial(look_up, kernel) for each, kernel in zip(launches, kernels, strict=True)},
        bytes_moved=mine.distinct * dim * 4 + num_lookups * (dim * 2 + 4),
        distinct_rows=mine.distinct,
    )
    for name, dtype in (("fp32", FP32), ("bf16", BF16)):
        updates(run, mine, name, mine.gradient.to(dtype), tiles=tiles)


def updates(run: Run, mine: Tables, name: str, grad: Tensor, *, tiles: tuple[tuple[int, int, int], ...]) -> None:
    """Time updates from a gradient, for every launch, with rows that are sorted already and without."""
    dim, num_lookups = 128, 26 * run.size
    ahead = mine.sorted_lookups()
    launches = [Launch(numbers=numbers, warps=warps, reads_ahead=reads) for numbers, warps, reads in tiles]
    moved = num_lookups * dim * grad.itemsize + mine.distinct * (8 * dim + 8)
    before = mine.weight[:100_000].clone(), mine.state["sum"][:100_000].clone()
    bits: list[Tensor] = []
    same: dict[str, bool | str] = {}
    work: dict[str, Callable[[], object]] = {}
    for launch in launches:
        kernel = TritonKernel(launches=DEFAULT | {LaunchPart.UPDATE: launch})
        update = functools.partial(
            kernel.update, mine.weight, state=mine.state, parts=[mine.part(grad, ahead)], step=mine.step
        )
        try:
            update()
            bits.append(mine.weight[:100_000].clone())
            same[str(launch)] = torch.equal(bits[0], bits[-1])
        except Exception as error:
            same[str(launch)] = repr(error)[:80]
        mine.weight[:100_000], mine.state["sum"][:100_000] = before
        work[str(launch)] = update
    run.compare(f"update_sorted_ahead_{name}", work, bytes_moved=moved, same_bits=same)
    kernel = TritonKernel()
    parts = [mine.part(grad)]
    run.compare(
        f"update_with_sort_{name}",
        {"as it is": lambda: kernel.update(mine.weight, state=mine.state, parts=parts, step=mine.step)},
        bytes_moved=moved,
    )
    sorted_runs = ahead.sorted_reads[0].made
    run.say(
        f"update_pieces_{name}",
        sort_ms=round(run.ms(mine.sorted_lookups), 4),
        long_runs_ms=round(run.ms(lambda: chunk_sums(sorted_runs, grad.view(-1), dim=dim)), 4),
        launches_of_parts=str(launches_on(run.device)),
        **_profiled(run, mine.sorted_lookups, shown=20),
    )
    lengths: dict[str, Callable[[], object]] = {}
    for longest, chunk in ((runs.LONG_RUN, runs.CHUNK), (256, 256), (64, 256), (16, 256), (16, 128), (8, 128)):
        for tile in ((1024, 4, 2), (2048, 4, 2)):
            launch = Launch(numbers=tile[0], warps=tile[1], reads_ahead=tile[2])
            lengths[f"runs of {longest}, chunks of {chunk}, {launch}"] = functools.partial(
                _update_with_runs_of, mine, parts, longest=longest, chunk=chunk, launch=launch
            )
    run.compare(f"update_runs_{name}", lengths, bytes_moved=moved)


def _update_with_runs_of(
    tables: Tables, parts: list[GradientPart], *, longest: int, chunk: int, launch: Launch
) -> None:
    """Sort and update with another longest run and another length of chunks."""
    kept = (runs.LONG_RUN, runs.CHUNK)
    runs.LONG_RUN = longest
    runs.CHUNK = chunk
    try:
        kernel = TritonKernel(launches=DEFAULT | {LaunchPart.UPDATE: launch})
        kernel.update(tables.weight, state=tables.state, parts=parts, step=tables.step)
    finally:
        runs.LONG_RUN, runs.CHUNK = kept


def search(run: Run) -> None:
    """Time searches, hold their answers to those of torch's products, then vary blocks, then time masks."""
    from ziggurat.ops.bitmask import full_mask
    from ziggurat.ops.scan import triton as scan_triton

    num = 1_000_000 if run.is_gpu else 2000
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(1000, 64, generator=draw)
    vectors = centres[torch.randint(0, 1000, (num,), generator=draw)] + torch.randn(num, 64, generator=draw)
    index = _index_of(run, vectors)
    lower = vectors.to(run.device, BF16)
    asked: dict[int, Tensor] = {}
    for size in (1, 64, 1024) if run.is_gpu else (1, 3):
        queries = vectors[torch.randint(0, num, (size,), generator=draw)] + 0.1 * torch.randn(size, 64, generator=draw)
        asked[size] = queries.to(run.device)

    def wall_ms(work: Callable[[], object]) -> float:
        if not run.is_timed:
            work()
            return math.nan
        for _ in range(5):
            work()
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start_s))
        return round(statistics.median(times), 4)

    for size, queries in asked.items():

        def torchs(queries: Tensor = queries) -> object:
            return (queries.to(BF16) @ lower.t()).topk(100, dim=1)

        found = index.search(queries, k=100)
        again = index.search(queries, k=100)
        few = queries[:64]
        exact = (few @ vectors.to(run.device).t()).topk(100, dim=1).indices
        numbers = index.order[found.positions[:64].clamp(min=0)]
        hits = (numbers.unsqueeze(2) == exact.unsqueeze(1)).any(-1).float().mean()
        run.say(
            f"search_{size}",
            ms=wall_ms(functools.partial(index.search, queries, k=100)),
            torch_ms=wall_ms(torchs),
            recall_at_100=round(float(hits), 4),
            same_bits=torch.equal(found.scores, again.scores) and torch.equal(found.positions, again.positions),
            **_profiled(run, functools.partial(index.search, queries, k=100)),
        )
    changes: dict[int, tuple[dict[str, int], ...]] = {
        1: ({"_SMALL_BLOCK": 128}, {"_SMALL_BLOCK": 512}, {"_SMALL_BLOCK": 1024}, {"_MERGED_OTHERS": 64}),
        64: ({"_FEWEST_QUERIES": 64}, {"_FEWEST_QUERIES": 64, "_SMALL_BLOCK": 512}, {"_FEW_QUERIES": 0}),
        1024: ({"_FEW_QUERIES": 1024}, {"_FEW_QUERIES": 1024, "_BLOCK": 512}),
    }
    for size, several in changes.items():
        for change in several if run.is_gpu else ():
            kept = {name: getattr(scan_triton, name) for name in change}
            expected = index.search(asked[size], k=100)
            for name, value in change.items():
                setattr(scan_triton, name, value)
            index._cached.pop("graphs", None)
            try:
                found = index.search(asked[size], k=100)
                facts = _profiled(run, functools.partial(index.search, asked[size], k=100), shown=4)
                facts["ms"] = wall_ms(functools.partial(index.search, asked[size], k=100))
                facts["same_answers"] = torch.equal(found.scores, expected.scores)
            except Exception as error:
                facts = {"failed": repr(error)[:200]}
            for name, value in kept.items():
                setattr(scan_triton, name, value)
            index._cached.pop("graphs", None)
            run.say(f"search_{size}, {', '.join(f'{name} {value}' for name, value in change.items())}", **facts)
    mask = full_mask(num, device=run.device)
    mask[: len(mask) // 2] = 0
    for size, queries in asked.items():
        masked = functools.partial(index.search, queries, k=100, masks=mask)
        run.say(
            f"search_masked_{size}",
            ms=wall_ms(masked),
            mask_each_ms=wall_ms(functools.partial(index.search, queries, k=100, masks=[mask] * size)),
            **_profiled(run, masked),
        )


def _index_of(run: Run, vectors: Tensor) -> Any:
    """Build the index; on a GPU its clusters are found there, which takes the CPU most of the time of a build."""
    from ziggurat.retrieval.vectors import VectorIndex
    from ziggurat.retrieval.vectors import index as index_module

    begin_s = time.perf_counter()
    by_cpu = index_module.cluster
    index_module.cluster = functools.partial(_cluster_on, run.device)
    try:
        index = VectorIndex.build(vectors)
    finally:
        index_module.cluster = by_cpu
    run.say("search_build", seconds=round(time.perf_counter() - begin_s, 2), clusters=index.num_clusters)
    return index.to(run.device)


def _cluster_on(device: torch.device, vectors: Tensor, *, num_clusters: int, seed: int) -> clustering.Clusters:
    """Cluster by plain k-means: a GPU compares all vectors with all centres in less time than a CPU does with a few."""
    draw = torch.Generator().manual_seed(seed)
    moved = vectors.to(device)
    centroids = moved[torch.randperm(len(vectors), generator=draw)[:num_clusters].to(device)]
    for _ in range(_ROUNDS):
        centroids = clustering._update(moved, clustering._nearest(moved, centroids), centroids)
    labels = clustering._nearest(moved, centroids)
    return clustering._without_empty(vectors, labels.cpu(), num_clusters)


def _profiled(run: Run, work: Callable[[], object], *, calls: int = 5, shown: int = 12) -> dict[str, Any]:
    """Return what the GPU does in a call: milliseconds, launches, and the longest kernels."""
    if not run.is_timed:
        if run.is_gpu:
            work()
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    events = [each for each in profile.key_averages() if each.device_type.name == "CUDA"]
    longest = sorted(events, key=lambda each: -each.self_device_time_total)[:shown]
    return {
        "gpu_ms": round(sum(each.self_device_time_total for each in events) / calls / 1e3, 4),
        "launches": sum(each.count for each in events) / calls,
        "kernels_us": {
            each.key[:60]: [round(each.self_device_time_total / calls, 1), each.count / calls] for each in longest
        },
    }


def _fed(train: Any, upload: Any, batches: list[Any]) -> Callable[[], object]:
    """Return what trains the next batch, while the one after it is on its way, as the trainer feeds its steps."""
    numbers = itertools.count()
    coming = [upload.start(batches[next(numbers) % len(batches)]) for _ in range(2)]

    def one() -> object:
        coming.append(upload.start(batches[next(numbers) % len(batches)]))
        batch = coming.pop(0)()
        return train(batch, upcoming=coming[0]())

    return one


def step(run: Run) -> None:
    """Time whole steps, which are compiled first."""
    from benchmarks.ours import build, to_batch, training_config
    from benchmarks.workload import Workload, make_batches
    from ziggurat.ops.lookup import KernelChoice
    from ziggurat.ops.machine import measured_choice
    from ziggurat.training.step.train_step import TrainStep
    from ziggurat.training.upload import Upload

    workload = Workload(dim=128, num_rows=1_000_000, batch_size=run.size, num_batches=4)
    if not run.is_gpu:
        workload = Workload(dim=16, num_rows=200, batch_size=run.size, num_batches=2)
    raws = make_batches(workload)
    batches = [to_batch(raw, workload, labels=raw.label_sets[0]) for raw in raws]
    steps: dict[str, Callable[[], object]] = {}
    # Eagerly; forward and backward pass as graphs; the whole step as one.
    modes = {"default": ("default", "off"), "cuda_graphs": ("cuda_graphs", "off"), "one_graph": ("default", "on")}
    for name, (compile_, step_graph) in (modes if run.is_gpu else {"off": ("off", "off")}).items():
        model = build(workload, kernel=KernelChoice.AUTO).to(run.device)
        settings: dict[str, object] = {"precision": "bf16" if run.is_gpu else "fp32", "compile": compile_}
        settings["step_graph"] = step_graph
        train = TrainStep(model, training_config(workload, settings))
        upload = Upload(run.device, is_beside=True)
        steps[name] = _fed(train, upload, batches)
        for _ in range(4):
            steps[name]()
    for name, one in steps.items():
        for _ in range(3):
            one()
        if run.is_gpu:
            torch.cuda.synchronize()
        begin_s, calls = time.perf_counter(), 30 if run.is_gpu else 1
        for _ in range(calls):
            one()
        if run.is_gpu:
            torch.cuda.synchronize()
        wall_s = (time.perf_counter() - begin_s) / calls
        run.say(
            f"step_{name}",
            wall_ms=round(1e3 * wall_s, 3),
            samples_per_s=round(run.size / wall_s),
            choices={each: str(answer) for each, answer in measured_choice.answers().items()},
            **_profiled(run, one, shown=40),
        )


def recipes(run: Run) -> None:
    """Time steps of other models."""
    from benchmarks.gpu.recipes import CASES, measured

    for name, make in CASES.items():
        try:
            facts = measured(make(is_tiny=not run.is_gpu), run.device, steps=15 if run.is_gpu else 1)
        except Exception as error:  # the next model is timed all the same
            facts = {"failed": repr(error)[:400]}
        run.say(f"recipe_{name}", **facts)


def copy(run: Run) -> None:
    """Say what bytes are held against."""
    name = torch.cuda.get_device_properties(run.device).name if run.is_gpu else "no GPU"
    run.say("copy", gb_per_s=round(run.copy_gb_per_s), gpu=name, torch=torch.__version__)


WORK: dict[str, Callable[[Run], None]] = {
    "copy": copy,
    "finite": finite,
    "dots_mixed": dots_mixed,
    "dots_bf16": dots_bf16,
    "dots_fp32": dots_fp32,
    "fm_norm": fm_norm,
    "tables": tables,
    "search": search,
    "recipes": recipes,
    "step": step,
}


def _commands(options: argparse.Namespace, part: str, *more: str) -> list[str]:
    tiny = ["--tiny"] if options.tiny else []
    return [sys.executable, "-m", "benchmarks.kernels_gpu", "--out", str(options.out), "--one", part, *tiny, *more]


def _everything(options: argparse.Namespace) -> Iterator[str]:
    """Run each part in a process of its own; what a part could not do is said, and the next goes on."""
    parts = [part for part in PARTS if part in options.parts.split(",")]
    begin_s = time.perf_counter()
    beside = {part: subprocess.Popen(_commands(options, part, "--only-compile")) for part in parts if part in COMPILED}
    try:
        for part, process in beside.items():
            try:
                process.wait(timeout=max(1.0, COMPILE_LIMIT_S - (time.perf_counter() - begin_s)))
            except subprocess.TimeoutExpired:  # what it compiled stays in Triton's cache
                process.kill()
                process.wait()
                yield f"{part}: not compiled in {COMPILE_LIMIT_S:.0f} s; the rest is, as it is timed"
            else:
                yield f"{part}: compiled after {time.perf_counter() - begin_s:.0f} s"
    finally:
        # Whoever ends this process early must not be left with others that take the GPU from what comes next.
        for process in beside.values():
            process.kill()
    for part in parts:
        limit_s = MODELS_LIMIT_S if part in MODELS else LIMIT_S
        if options.tiny:
            limit_s = None  # Triton's interpreter takes minutes
        try:
            done = subprocess.run(_commands(options, part), timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            yield f"{part}: stopped at its limit; the cases that it had finished are in the file"
        else:
            yield f"{part}: exit {done.returncode} after {time.perf_counter() - begin_s:.0f} s"


def main() -> None:
    """Run all parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--one", choices=PARTS)
    parser.add_argument("--only-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.one is None:
        # `timeout` ends this process by SIGTERM: as an exception, it ends the processes of parts too.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        for line in _everything(options):
            print(line, flush=True)
        return
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)
    size = 65_536
    if options.only_compile:
        size = 256
    if options.tiny:
        size = 16
    try:
        WORK[options.one](Run(options.out, size=size, device=device, only_compiles=options.only_compile))
    except Exception:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
