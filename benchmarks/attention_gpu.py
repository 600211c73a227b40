"""Attention over jagged sequences on the GPU that is there: right, tuned, against flash attention of equal lengths.

    check    every form, mask, bias and dtype against the reference in FP64: largest error as a share of the largest
             number, and whether a second call gives the same bits
    tune     candidates of launches, part by part; compiled by several processes first (--workers)
    time     ours and torch's scaled_dot_product_attention (softmax; the same lengths, heads and widths) in turns,
             each a CUDA graph that is replayed; stacks of layers

    python -m benchmarks.attention_gpu [--check] [--tune] [--time] [--out FILE]     all three, if none is named
    python -m benchmarks.attention_gpu --tune --time --only biased                  biased BF16 shapes alone: a minute
    python -m benchmarks.attention_gpu --tune --time --only wide                    heads of 128, and stacks of them

Results are written after each case. Needs torch, Triton and numpy, nothing else of the package's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ziggurat.features.jagged import offsets_of
from ziggurat.models.sequence.layers.hstu import HSTULayer, hstu_research, stu
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.ops.attention.launches import AttentionLaunch, AttentionPart, launched_as
from ziggurat.ops.attention.problem import (
    AttentionBias,
    AttentionForm,
    AttentionMask,
    JaggedLayout,
    Spans,
    attended_pairs,
)
from ziggurat.ops.attention.reference import jagged_attention_reference
from ziggurat.ops.attention.triton import (
    attention_triton_backward_op,
    attention_triton_op,
    jagged_attention_triton,
    triton_inputs,
)

BUCKETS = 129
DEVICE = "cuda"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch of sequences.

    Args:
        name: of its cases.
        lengths: events of each sequence.
        heads: H.
        dim: d and d_v.
        is_biased: position and time.
        form: of the weights.
        dtype: of q, k and v.
        targets: candidates at the end of each sequence.
        precision: of products of FP32, as torch is set.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    dim: int
    is_biased: bool = False
    form: AttentionForm = AttentionForm.SILU
    dtype: torch.dtype = torch.bfloat16
    targets: int = 0
    precision: str = "ieee"


SHAPES = (
    Shape(name="16 x 2048, 4 x 64", lengths=(2048,) * 16, heads=4, dim=64),
    Shape(name="16 x 2048, 4 x 64, biases", lengths=(2048,) * 16, heads=4, dim=64, is_biased=True),
    Shape(name="16 x 2048, 4 x 128", lengths=(2048,) * 16, heads=4, dim=128),
    Shape(name="128 x 200, 2 x 32", lengths=(200,) * 128, heads=2, dim=32),
    Shape(name="128 x 200, 2 x 32, biases", lengths=(200,) * 128, heads=2, dim=32, is_biased=True),
    Shape(name="4 x 8192, 4 x 64", lengths=(8192,) * 4, heads=4, dim=64),
    Shape(name="4 x 8192, 4 x 64, biases", lengths=(8192,) * 4, heads=4, dim=64, is_biased=True),
    Shape(name="16 x 2048, 4 x 64, softmax", lengths=(2048,) * 16, heads=4, dim=64, form=AttentionForm.SOFTMAX),
    Shape(
        name="128 x 200, 2 x 32, biases, FP32",
        lengths=(200,) * 128,
        heads=2,
        dim=32,
        is_biased=True,
        dtype=torch.float32,
    ),
    Shape(
        name="16 x 2048, 4 x 64, TF32",
        lengths=(2048,) * 16,
        heads=4,
        dim=64,
        dtype=torch.float32,
        precision="tf32",
    ),
)
TUNED = (SHAPES[1], SHAPES[2], SHAPES[4])
BIASED = tuple(shape for shape in SHAPES if shape.is_biased and shape.dtype is torch.bfloat16)
WITNESS = (700, 1, 64, 129)  # lengths at which each candidate is held to the reference


def candidates(part: AttentionPart, shape: Shape) -> list[AttentionLaunch]:
    """Launches that are tried: rows, columns, warps, stages, and registers of a thread at most."""
    tiles: list[tuple[int, int, int, int, int | None]]
    if part is AttentionPart.FORWARD:
        tiles = [(128, 64, 8, 2, None), (64, 64, 4, 2, None)]
        if shape.is_biased:
            tiles += [(64, 64, 4, 2, 168), (64, 32, 4, 2, None), (64, 32, 4, 2, 128), (128, 64, 8, 2, 128)]
        else:
            tiles += [(128, 64, 8, 3, None), (128, 64, 8, 2, 128), (128, 128, 8, 2, None)]
    elif part is AttentionPart.QUERIES:
        tiles = [(64, 64, 8, 2, None), (64, 64, 4, 2, None)]
        if shape.is_biased:
            tiles += [(64, 64, 4, 2, 168), (64, 64, 8, 2, 128), (64, 32, 4, 2, 168), (64, 32, 4, 2, 128)]
        else:
            tiles += [(64, 64, 8, 2, 128), (128, 64, 8, 2, None), (128, 32, 8, 2, None)]
    elif part is AttentionPart.KEYS:
        tiles = [(32, 128, 8, 2, None), (64, 64, 8, 2, None)]
        if shape.is_biased:
            tiles += [(64, 64, 4, 2, None), (64, 64, 8, 2, 128), (32, 64, 4, 2, 168), (32, 64, 4, 2, 128)]
        else:
            tiles += [(64, 128, 8, 2, None), (64, 64, 8, 1, None), (64, 64, 4, 2, None)]
    else:
        tiles = [(64, 64, 8, 1, None), (64, 64, 8, 2, None), (64, 64, 8, 1, 128), (64, 64, 4, 1, None)]
        tiles += [(32, 32, 4, 2, 128), (32, 32, 4, 2, None)]
    return [
        AttentionLaunch(rows=rows, columns=columns, warps=warps, stages=stages, registers=registers)
        for rows, columns, warps, stages, registers in tiles
    ]


class Problem:
    """Tensors of a shape.

    Args:
        shape: what to draw.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        generator = torch.Generator(DEVICE).manual_seed(0)
        total, longest = sum(shape.lengths), max(shape.lengths)
        size = (total, shape.heads, shape.dim)
        drawn = [torch.randn(size, generator=generator, device=DEVICE).to(shape.dtype) for _ in range(4)]
        self.q, self.k, self.v = (each.requires_grad_() for each in drawn[:3])
        self.grad = drawn[3]
        lengths = torch.tensor(shape.lengths)
        targets = torch.full_like(lengths, shape.targets).to(DEVICE) if shape.targets else None
        self.layout = JaggedLayout(offsets=offsets_of(lengths).to(DEVICE), num_targets=targets, longest=longest)
        self.bias = AttentionBias()
        if shape.is_biased:
            # Gaps between events as people make them: minutes within a session, days between sessions.
            gaps = torch.exp(torch.randn(total, generator=generator, device=DEVICE) * 3.0 + 5.0).long() + 1
            times = torch.cat([part.cumsum(0) for part in gaps.split(list(shape.lengths))])
            w_pos = torch.randn(2 * longest - 1, generator=generator, device=DEVICE).requires_grad_()
            w_time = torch.randn(BUCKETS, generator=generator, device=DEVICE).requires_grad_()
            self.bias = AttentionBias(w_pos=w_pos, w_time=w_time, query_times=times, key_times=times)
        self.divisor = 1.0 if shape.form is AttentionForm.SOFTMAX else float(longest)
        self.inputs = triton_inputs(
            self.layout, self.bias, form=shape.form, scale=shape.dim**-0.5, divisor=self.divisor
        )

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor]:
        """Results."""
        return attention_triton_op(self.q, self.k, self.v, *self.inputs)

    @torch.no_grad()
    def backward(self, found: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Gradients of all inputs."""
        return attention_triton_backward_op(self.grad, *found, self.q, self.k, self.v, *self.inputs)

    def both(self) -> tuple[Tensor, ...]:
        """Results and gradients."""
        return self.backward(self.forward())

    def expected(self) -> list[Tensor]:
        """Results and gradients by the reference, in FP64."""
        leaves = [each.detach().double().requires_grad_() for each in (self.q, self.k, self.v)]
        weights = [each for each in (self.bias.w_pos, self.bias.w_time) if each is not None]
        weights = [each.detach().double().requires_grad_() for each in weights]
        bias = self.bias
        if weights:
            bias = replace(bias, w_pos=weights[0], w_time=weights[1])
        scale = self.shape.dim**-0.5
        options = {"layout": self.layout, "form": self.shape.form, "scale": scale, "divisor": self.divisor}
        out = jagged_attention_reference(*leaves, **options, bias=bias)
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *weights], self.grad.double())]

    def error(self, expected: list[Tensor]) -> float:
        """The largest error of results and gradients, as a share of the largest number of each."""
        found = self.forward()
        return max(
            float((one.double() - other).abs().max() / other.abs().max())
            for one, other in zip([found[0], *self.backward(found)], expected, strict=False)
        )

    def tflop(self) -> float:
        """Of the forward pass, for the pairs that see each other."""
        layout = JaggedLayout(offsets=self.layout.offsets.cpu())
        return 4e-12 * attended_pairs(layout) * self.shape.heads * self.shape.dim


def graphed(function: Callable[[], object]) -> Callable[[], None]:
    """A function as a CUDA graph to replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def milliseconds(
    replays: dict[str, Callable[[], None]], *, rounds: int = 15, budget_ms: float = 6.0
) -> dict[str, float]:
    """Median time of each function; they take turns."""
    counts = {}
    for name, replay in replays.items():
        replay()
        counts[name] = max(1, min(50, int(budget_ms / max(1e-3, _span(replay, 2)))))
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name].append(_span(replay, counts[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def _span(replay: Callable[[], None], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


@dataclass
class Results:
    """What was found, written to a file after each case.

    Args:
        path: of the file.
        found: by part and case.
    """

    path: Path
    found: dict[str, Any] = field(default_factory=dict)

    def add(self, part: str, case: str, values: dict[str, Any], *, is_said: bool = True) -> None:
        """Keep a case, and say it."""
        self.found.setdefault(part, {})[case] = values
        self.path.write_text(json.dumps(self.found, indent=1))
        if is_said:
            print(_line(part, case, values), flush=True)

    def repeat(self) -> None:
        """Say again what matters: whoever sees the end of the output sees it all."""
        checked = self.found.get("check", {})
        is_right = [each.get("verdict") == "ok" for each in checked.values()]
        print(f"[check] {sum(is_right)} of {len(is_right)} right")
        for part in ("tune", "time"):
            for case, values in self.found.get(part, {}).items():
                print(_line(part, case, values))


def _line(part: str, case: str, values: dict[str, Any]) -> str:
    shown = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())
    return f"[{part}] {case}: {'  '.join(shown)}"


# -- check -------------------------------------------------------------------------------------------------------------

_CHECKED = (
    # name, lengths, queries, targets, context, window, parts
    ("causal", (700, 1, 0, 64, 129), None, None, 0, 0, False),
    ("window, context", (500, 63, 300), None, None, 3, 100, False),
    ("targets", (400, 130, 5), None, (70, 2, 5), 0, 0, False),
    ("targets, window, context", (400, 130, 5), None, (70, 2, 5), 2, 64, False),
    ("remembered", (600, 90), (70, 3), (70, 2), 0, 0, False),
    ("parts", (300, 200), (250, 170), (20, 0), 0, 150, True),
)


_KINDS = (
    # form, dtype, dim, biases, precision of products of FP32, and the largest error, as a share of the largest number
    (AttentionForm.SILU, torch.bfloat16, 64, True, "ieee", 0.02),
    (AttentionForm.SILU, torch.float32, 32, True, "ieee", 2e-5),
    (AttentionForm.SILU, torch.float32, 64, True, "tf32", 4e-3),
    (AttentionForm.SOFTMAX, torch.bfloat16, 64, False, "ieee", 0.02),
    (AttentionForm.SOFTMAX, torch.float16, 25, True, "ieee", 0.02),
    (AttentionForm.RELU, torch.float16, 128, False, "ieee", 0.02),
)


def check(results: Results, *, workers: int, only: str) -> None:
    """Every form against the reference in FP64, in several processes, as each case has kernels of its own."""
    command = [sys.executable, "-m", "benchmarks.attention_gpu", "--only", only, "--check-some"]
    running = [
        subprocess.Popen([*command, str(worker), str(workers)], stdout=subprocess.PIPE, text=True)
        for worker in range(workers)
    ]
    for each in running:
        output, _ = each.communicate()
        for line in output.splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                case = found.pop("case")
                results.add("check", case, found, is_said=found.get("verdict") != "ok")


def check_some(worker: int, workers: int, *, is_biased: bool) -> None:
    """Say a share of the cases, a line of JSON each; those with biases alone, if so asked."""
    cases = [(checked, kind) for checked in _CHECKED for kind in _KINDS if kind[3] or not is_biased]
    for index, ((name, *given), (form, dtype, dim, is_biased, precision, limit)) in enumerate(cases):
        if index % workers != worker:
            continue
        torch.backends.cuda.matmul.fp32_precision = precision
        said = "tf32" if precision == "tf32" else str(dtype)[6:]
        case = f"{name}, {form.value}, {said} {dim}{', biases' if is_biased else ''}"
        try:
            worst, is_same = _errors(_checked_layout(*given), form, dtype, dim, is_biased)
        except Exception as error:  # one case that fails must not hide the others
            print(json.dumps({"case": case, "failed": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)
            continue
        verdict = "ok" if max(worst.values()) < limit and is_same else "WRONG"
        print(json.dumps({"case": case, "verdict": verdict, "same bits": is_same, **worst}), flush=True)


def _checked_layout(
    lengths: tuple[int, ...],
    asked: tuple[int, ...] | None,
    targets: tuple[int, ...] | None,
    context: int,
    window: int,
    is_part: bool,
) -> JaggedLayout:
    keys = torch.tensor(lengths)
    spans = None
    if is_part:  # the keys are the middle of longer sequences, the queries their end
        starts = torch.full_like(keys, 37)
        whole = starts + keys + 100
        query_starts = whole - torch.tensor(asked)
        spans = Spans(query_starts=query_starts.to(DEVICE), key_starts=starts.to(DEVICE), lengths=whole.to(DEVICE))
    return JaggedLayout(
        offsets=offsets_of(keys).to(DEVICE),
        query_offsets=None if asked is None else offsets_of(torch.tensor(asked)).to(DEVICE),
        num_targets=None if targets is None else torch.tensor(targets).to(DEVICE),
        mask=AttentionMask(context=context, max_attention_length=window),
        spans=spans,
    )


def _errors(
    layout: JaggedLayout, form: AttentionForm, dtype: torch.dtype, dim: int, is_biased: bool
) -> tuple[dict[str, float], bool]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    keys, queries = int(layout.offsets[-1]), int(layout.of_queries[-1])
    heads = 3
    drawn = [
        torch.randn(size, heads, dim, generator=generator, device=DEVICE).to(dtype)
        for size in (queries, keys, keys, queries)
    ]
    weights: list[Tensor] = []
    times = [None, None]
    if is_biased:
        weights = [torch.randn(2 * 701 - 1, generator=generator, device=DEVICE)]
        weights += [torch.randn(BUCKETS, generator=generator, device=DEVICE)]
        # Rising within each sequence, but for one that is not: tiles of few buckets, and of all.
        times = [torch.arange(size, device=DEVICE) * 1000 for size in (queries, keys)]
        times = [each + torch.randint(0, 900, each.shape, generator=generator, device=DEVICE) for each in times]
        times[1][:40] = times[1][:40].flip(0)
    divisor = 1.0 if form is AttentionForm.SOFTMAX else 50.0

    def solve(function: Callable[..., Tensor], exact: torch.dtype | None) -> list[Tensor]:
        leaves = [(each if exact is None else each.to(exact)).detach().requires_grad_() for each in drawn[:3]]
        given = [(each if exact is None else each.to(exact)).detach().requires_grad_() for each in weights]
        bias = AttentionBias()
        if is_biased:
            bias = AttentionBias(w_pos=given[0], w_time=given[1], query_times=times[0], key_times=times[1])
        out = function(*leaves, layout=layout, form=form, scale=dim**-0.5, divisor=divisor, bias=bias)
        grads = torch.autograd.grad(out, [*leaves, *given], drawn[3].to(out.dtype))
        return [each.detach() for each in (out, *grads)]

    found = solve(jagged_attention_triton, None)
    again = solve(jagged_attention_triton, None)
    expected = solve(jagged_attention_reference, torch.float64)
    names = ("out", "dq", "dk", "dv", "dw_pos", "dw_time")
    worst = {}
    for name, one, other in zip(names, found, expected, strict=False):
        # Gradients of biases are sums over all pairs, and may cancel.
        least = 10.0 if name.startswith("dw") else 0.1
        worst[name] = float((one.double() - other).abs().max() / other.abs().max().clamp(min=least))
        if worst[name] != worst[name]:
            worst[name] = float("inf")
    return worst, all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


# -- tune --------------------------------------------------------------------------------------------------------------


def parts_of_shape(shape: Shape) -> list[AttentionPart]:
    """The kernels that a shape needs."""
    return [part for part in AttentionPart if shape.is_biased or part is not AttentionPart.BIASES]


def rounds_of(shape: Shape) -> list[dict[AttentionPart, AttentionLaunch]]:
    """Candidates of all parts side by side, so that a run of both passes compiles one of each."""
    listed = {part: candidates(part, shape) for part in parts_of_shape(shape)}
    most = max(len(each) for each in listed.values())
    return [{part: each[index % len(each)] for part, each in listed.items()} for index in range(most)]


def compile_some(worker: int, workers: int, shapes: tuple[Shape, ...]) -> None:
    """Compile a share of the candidates into Triton's cache on disk, by running each once on short sequences."""
    rounds = [(shape, launches) for shape in shapes for launches in rounds_of(shape)]
    for shape, launches in rounds[worker::workers]:
        problem = Problem(replace(shape, lengths=WITNESS))
        for part in [None, *launches]:  # all at once; one by one where one of them does not fit the chip
            try:
                with launched_as(launches if part is None else {part: launches[part]}):
                    problem.both()
                if part is None:
                    break
            except Exception as error:
                print(f"  worker {worker}: {part} {launches}: {type(error).__name__}", flush=True)


def distinct(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """The first of those shapes that take the same kernels."""
    return tuple(shape for index, shape in enumerate(shapes) if not any(_alike(shape, each) for each in shapes[:index]))


def tune(
    results: Results, shapes: tuple[Shape, ...], *, workers: int, only: str
) -> dict[str, dict[AttentionPart, AttentionLaunch]]:
    """Hold every candidate to the reference and time it, one part at a time; the best launches of each shape."""
    begin = time.time()
    command = [sys.executable, "-m", "benchmarks.attention_gpu", "--only", only, "--compile"]
    running = [subprocess.Popen([*command, str(worker), str(workers)]) for worker in range(workers)]
    for each in running:
        each.wait()
    print(f"compiled in {time.time() - begin:.1f} s", flush=True)
    best: dict[str, dict[AttentionPart, AttentionLaunch]] = {}
    for shape in shapes:
        problem = Problem(shape)
        witness = Problem(replace(shape, lengths=WITNESS))
        expected = witness.expected()
        found = problem.forward()
        best[shape.name] = {}
        for part in parts_of_shape(shape):
            times: dict[AttentionLaunch, float] = {}
            said: dict[str, Any] = {}
            for launch in candidates(part, shape):
                try:
                    with launched_as({**best[shape.name], part: launch}):
                        error = witness.error(expected)
                        if error > 0.02:
                            said[str(launch)] = f"WRONG by {error:.2g}"
                            continue
                        is_forward = part is AttentionPart.FORWARD
                        replay = graphed(problem.forward if is_forward else partial(problem.backward, found))
                    times[launch] = milliseconds({"ours": replay}, rounds=5, budget_ms=3.0)["ours"]
                    said[str(launch)] = round(times[launch], 4)
                except Exception as error:
                    said[str(launch)] = f"{type(error).__name__}: {str(error)[:120]}"
                    torch.cuda.synchronize()
            if times:
                best[shape.name][part] = min(times, key=lambda each: times[each])
            results.add("tune", f"{shape.name} / {part.value}", said)
        with launched_as(best[shape.name]):
            results.add("tune", f"{shape.name} / kernels", kernel_times(problem.both))
    return best


def kernel_times(function: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each kernel of a function."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(5):
            function()
        torch.cuda.synchronize()
    spent = {each.key[:60]: each.self_device_time_total / 5e3 for each in profiled.key_averages()}
    return {name: round(each, 4) for name, each in sorted(spent.items(), key=lambda pair: -pair[1]) if each > 5e-4}


# -- time --------------------------------------------------------------------------------------------------------------


def time_all(
    results: Results,
    shapes: tuple[Shape, ...],
    stacks: tuple[tuple[str, int, Callable[[], dict[str, Any]]], ...],
    best: dict[str, dict[AttentionPart, AttentionLaunch]],
) -> None:
    """Ours against flash of the same lengths, and stacks of layers."""
    for shape in shapes:
        alike = next((each for each in SHAPES if each.name in best and _alike(each, shape)), shape)
        launches = best.get(alike.name, {})
        try:
            results.add("time", shape.name, _contest(Problem(shape), launches))
        except Exception as error:
            results.add("time", shape.name, {"failed": f"{type(error).__name__}: {str(error)[:300]}"})
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for name, width, function in stacks:
        alike = next((each for each in SHAPES if each.name in best and each.dim == width), None)
        try:
            with launched_as({} if alike is None else best[alike.name]):
                results.add("time", name, function())
        except Exception as error:
            results.add("time", name, {"failed": f"{type(error).__name__}: {str(error)[:300]}"})


def _alike(one: Shape, other: Shape) -> bool:
    kinds = [(each.heads, each.dim, each.is_biased, each.dtype, each.precision) for each in (one, other)]
    return kinds[0] == kinds[1]


def _contest(problem: Problem, launches: dict[AttentionPart, AttentionLaunch]) -> dict[str, Any]:
    shape = problem.shape
    torch.backends.cuda.matmul.fp32_precision = shape.precision
    size = (len(shape.lengths), shape.lengths[0], shape.heads, shape.dim)
    dtype = torch.bfloat16 if shape.dtype is torch.float32 else shape.dtype
    padded = [
        each.detach().to(dtype).reshape(size).transpose(1, 2).contiguous().requires_grad_()
        for each in (problem.q, problem.k, problem.v)
    ]
    grad = problem.grad.to(dtype).reshape(size).transpose(1, 2).contiguous()

    def flash() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*padded, is_causal=True)

    def flash_both() -> object:
        return torch.autograd.grad(flash(), padded, grad)

    with launched_as(launches):
        replays = {"forward": graphed(problem.forward), "both": graphed(problem.both)}
    with torch.no_grad():
        replays["flash forward"] = graphed(flash)
    replays["flash both"] = graphed(flash_both)
    times = milliseconds(replays)
    tflop = problem.tflop()
    return {
        **{f"{name} ms": round(spent, 4) for name, spent in times.items()},
        "forward TFLOP/s": round(tflop / times["forward"] * 1e3, 1),
        "both TFLOP/s": round(3.5 * tflop / times["both"] * 1e3, 1),
        "of flash, forward": round(times["flash forward"] / times["forward"], 3),
        "of flash, both": round(times["flash both"] / times["both"], 3),
    }


def _stack(
    layers: int, lengths: Tensor, *, is_research: bool
) -> tuple[SequenceStack, Tensor, Callable[[Tensor], Tensor]]:
    """Layers, events, and the function from events to events."""
    longest = int(lengths.max())
    torch.manual_seed(0)
    made = []
    for _ in range(layers):
        config = (
            hstu_research(dim=50, max_length=longest, num_heads=1, dropout=0.0)
            if is_research
            else stu(dim=512, max_length=longest, num_heads=4, head_dim=128)
        )
        made.append(HSTULayer(config))
    stack = SequenceStack(made).to(DEVICE)
    total = int(lengths.sum())
    events = torch.randn(total, 50 if is_research else 512, device=DEVICE)
    times = torch.randint(0, 10**7, (total,), device=DEVICE).sort().values if is_research else None
    places = stack.places_of(offsets_of(lengths).to(DEVICE), times=times, longest=longest)
    return stack, events, partial(stack, places=places)


def _stu_forward(*, is_compiled: bool = False) -> dict[str, Any]:
    """Five layers of 4 x 128 and 512: 32 users, about 99,000 events and candidates."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2048, 4097, (32,), generator=generator)
    lengths = (lengths * (99_000 / int(lengths.sum()))).int().long()
    _, events, function = _stack(5, lengths, is_research=False)
    if is_compiled:
        function = torch.compile(function, dynamic=False)
    events = events.bfloat16()

    def run() -> Tensor:
        with torch.no_grad(), torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False):
            return function(events)

    spent = milliseconds({"ours": graphed(run)}, rounds=5)["ours"]
    kernels = kernel_times(run)
    return {"ms": round(spent, 3), "events": int(lengths.sum()), "goal ms": 9.3, "kernels": kernels}


def _stu_step(*, is_compiled: bool = False) -> dict[str, Any]:
    """Three layers of 4 x 128 and 512, 16 histories of 4,086 events, forward and backward."""
    stack, events, function = _stack(3, torch.full((16,), 4086), is_research=False)
    return _both(stack, events, torch.compile(function, dynamic=False) if is_compiled else function, users=16)


def _hstu_step() -> dict[str, Any]:
    """Two layers of 50, 128 histories of 1 to 200 events with both biases, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(128, generator=generator) * 0.9 + 4.6).clamp(1, 200).long()
    return _both(*_stack(2, lengths, is_research=True), users=128)


def _both(stack: SequenceStack, events: Tensor, function: Callable[[Tensor], Tensor], *, users: int) -> dict[str, Any]:
    weights = list(stack.parameters())

    def run() -> object:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, cache_enabled=False):
            out = function(events)
        return torch.autograd.grad(out.float().square().sum(), weights)

    spent = milliseconds({"ours": graphed(run)}, rounds=5)["ours"]
    kernels = kernel_times(run)
    return {
        "ms": round(spent, 3),
        "users/s": round(users / spent * 1e3, 1),
        "events": len(events),
        "kernels": kernels,
    }


STACKS = (
    # name, width of heads, padded, and the case
    ("HSTU 2 x 50", 64, _hstu_step),
    ("five STU layers, forward", 128, _stu_forward),
    ("five STU layers, forward, compiled", 128, partial(_stu_forward, is_compiled=True)),
    ("three STU layers", 128, _stu_step),
    ("three STU layers, compiled", 128, partial(_stu_step, is_compiled=True)),
)
ONLY = {
    # shapes whose launches are tuned, shapes that are timed, stacks
    "all": (TUNED, SHAPES, STACKS),
    "biased": (distinct(BIASED), BIASED, STACKS[:1]),
    "wide": (SHAPES[2:3], SHAPES[2:3], STACKS[1:]),
}


def main() -> None:
    """Run the parts that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--only", choices=ONLY, default="all")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("attention_gpu.json"))
    parser.add_argument("--compile", type=int, nargs=2)
    parser.add_argument("--check-some", type=int, nargs=2)
    chosen = parser.parse_args()
    tuned, timed, stacks = ONLY[chosen.only]
    if chosen.check_some:
        check_some(*chosen.check_some, is_biased=chosen.only == "biased")
        return
    if chosen.compile:
        compile_some(chosen.compile[0], chosen.compile[1], tuned)
        return
    is_all = not (chosen.check or chosen.tune or chosen.time)
    results = Results(chosen.out)
    results.add("machine", "gpu", {"name": torch.cuda.get_device_name(), "torch": torch.__version__})
    begin = time.time()
    best: dict[str, dict[AttentionPart, AttentionLaunch]] = {}
    if chosen.tune or is_all:
        best = tune(results, tuned, workers=chosen.workers, only=chosen.only)
        print(f"-- tuned after {time.time() - begin:.0f} s", flush=True)
    if chosen.time or is_all:
        time_all(results, timed, stacks, best)
        print(f"-- timed after {time.time() - begin:.0f} s", flush=True)
    if chosen.check or is_all:
        check(results, workers=chosen.workers, only=chosen.only)
        print(f"-- checked after {time.time() - begin:.0f} s", flush=True)
    results.repeat()


if __name__ == "__main__":
    main()
