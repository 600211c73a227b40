"""Attention over jagged sequences on the GPU that is there: right, tuned, against flash attention of equal lengths.

    check    every form, mask, bias and dtype against the reference in FP64: largest error as a share of the largest
             number, and whether a second call gives the same bits
    tune     candidates of launches, part by part; compiled by several processes first (--workers)
    time     ours and torch's scaled_dot_product_attention (softmax; the same lengths, heads and widths) in turns,
             each a CUDA graph that is replayed; stacks of layers

    python -m benchmarks.attention_gpu [--check] [--tune] [--time] [--out FILE]     all three, if none is named

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
from dataclasses import dataclass, field
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
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    dim: int
    is_biased: bool = False
    form: AttentionForm = AttentionForm.SILU
    dtype: torch.dtype = torch.bfloat16
    targets: int = 0


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
)
TUNED = (SHAPES[1], SHAPES[2], SHAPES[4])


def candidates(part: AttentionPart, shape: Shape) -> list[AttentionLaunch]:
    """Launches that are tried."""
    if part is AttentionPart.FORWARD:
        tiles = [(128, 64, 8, 2), (64, 64, 4, 2)]
        tiles += [(64, 64, 8, 2), (64, 32, 4, 2)] if shape.is_biased else [(128, 64, 8, 3), (128, 128, 8, 2)]
    elif part is AttentionPart.QUERIES:
        tiles = [(64, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2)]
        tiles += [(64, 32, 4, 2)] if shape.is_biased else [(128, 32, 8, 2)]
    elif part is AttentionPart.KEYS:
        tiles = [(32, 128, 8, 2), (64, 64, 8, 2)]
        tiles += [(32, 64, 4, 2), (32, 64, 8, 2)] if shape.is_biased else [(64, 128, 8, 2), (64, 64, 4, 2)]
    else:
        tiles = [(64, 64, 8, 2), (64, 64, 8, 1), (64, 64, 4, 1), (32, 32, 4, 2)]
    return [AttentionLaunch(rows=a, columns=b, warps=warps, stages=stages) for a, b, warps, stages in tiles]


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
    (AttentionForm.SILU, torch.bfloat16, 64, True),
    (AttentionForm.SILU, torch.float32, 32, True),
    (AttentionForm.SOFTMAX, torch.bfloat16, 64, False),
    (AttentionForm.SOFTMAX, torch.float16, 25, True),
    (AttentionForm.RELU, torch.float16, 128, False),
)


def check(results: Results, *, workers: int) -> None:
    """Every form against the reference in FP64, in several processes, as each case has kernels of its own."""
    command = [sys.executable, "-m", "benchmarks.attention_gpu", "--check-some"]
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


def check_some(worker: int, workers: int) -> None:
    """Say a share of the cases, a line of JSON each."""
    cases = [(checked, kind) for checked in _CHECKED for kind in _KINDS]
    for index, ((name, *given), (form, dtype, dim, is_biased)) in enumerate(cases):
        if index % workers != worker:
            continue
        case = f"{name}, {form.value}, {str(dtype)[6:]} {dim}{', biases' if is_biased else ''}"
        try:
            worst, is_same = _errors(_checked_layout(*given), form, dtype, dim, is_biased)
        except Exception as error:  # one case that fails must not hide the others
            print(json.dumps({"case": case, "failed": f"{type(error).__name__}: {str(error)[:300]}"}), flush=True)
            continue
        limit = 2e-5 if dtype is torch.float32 else 0.02
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


def trials() -> list[tuple[Shape, AttentionPart, AttentionLaunch]]:
    """All that is tried."""
    return [
        (shape, part, each) for shape in TUNED for part in parts_of_shape(shape) for each in candidates(part, shape)
    ]


def compile_some(worker: int, workers: int) -> None:
    """Compile a share of the candidates into Triton's cache on disk, by running each once."""
    problems: dict[str, tuple[Problem, tuple[Tensor, Tensor]]] = {}
    for index, (shape, part, launch) in enumerate(trials()):
        if index % workers != worker:
            continue
        try:
            if shape.name not in problems:
                problem = Problem(shape)
                problems[shape.name] = problem, (torch.zeros_like(problem.q), torch.zeros(0, 0, device=DEVICE))
            problem, found = problems[shape.name]
            with launched_as({part: launch}):
                problem.forward() if part is AttentionPart.FORWARD else problem.backward(found)
        except Exception as error:  # what does not fit the chip is no candidate
            print(f"  worker {worker}: {part} {launch}: {type(error).__name__}", flush=True)


def tune(results: Results, *, workers: int) -> dict[str, dict[AttentionPart, AttentionLaunch]]:
    """Time every candidate, one part at a time; the best launches of each shape."""
    begin = time.time()
    command = [sys.executable, "-m", "benchmarks.attention_gpu", "--compile"]
    running = [subprocess.Popen([*command, str(worker), str(workers)]) for worker in range(workers)]
    for each in running:
        each.wait()
    print(f"compiled {len(trials())} candidates in {time.time() - begin:.1f} s", flush=True)
    best: dict[str, dict[AttentionPart, AttentionLaunch]] = {}
    for shape in TUNED:
        problem = Problem(shape)
        found = problem.forward()
        best[shape.name] = {}
        for part in parts_of_shape(shape):
            times: dict[AttentionLaunch, float] = {}
            for launch in candidates(part, shape):
                try:
                    with launched_as({**best[shape.name], part: launch}):
                        is_forward = part is AttentionPart.FORWARD
                        replay = graphed(problem.forward if is_forward else partial(problem.backward, found))
                    times[launch] = milliseconds({"ours": replay}, rounds=5, budget_ms=3.0)["ours"]
                except Exception as error:
                    print(f"  {part} {launch}: {type(error).__name__}: {str(error)[:120]}", flush=True)
                    torch.cuda.synchronize()
            if not times:
                continue
            best[shape.name][part] = min(times, key=lambda each: times[each])
            listed = {str(each): round(spent, 4) for each, spent in sorted(times.items(), key=lambda pair: pair[1])}
            results.add("tune", f"{shape.name} / {part.value}", listed)
    return best


# -- time --------------------------------------------------------------------------------------------------------------


def time_all(results: Results, best: dict[str, dict[AttentionPart, AttentionLaunch]]) -> None:
    """Ours against flash of the same lengths, and stacks of layers."""
    for shape in SHAPES:
        alike = next((each for each in TUNED if _alike(each, shape)), shape)
        launches = best.get(alike.name, {})
        try:
            results.add("time", shape.name, _contest(Problem(shape), launches))
        except Exception as error:
            results.add("time", shape.name, {"failed": f"{type(error).__name__}: {str(error)[:300]}"})
    for name, function in (
        ("five STU layers, forward", _stu_forward),
        ("three STU layers", _stu_step),
        ("HSTU 2 x 50", _hstu_step),
        ("five STU layers, forward, compiled", partial(_stu_forward, is_compiled=True)),
        ("three STU layers, compiled", partial(_stu_step, is_compiled=True)),
    ):
        try:
            results.add("time", name, function())
        except Exception as error:
            results.add("time", name, {"failed": f"{type(error).__name__}: {str(error)[:300]}"})


def _alike(one: Shape, other: Shape) -> bool:
    return (one.dim, one.is_biased, one.dtype) == (other.dim, other.is_biased, other.dtype)


def _contest(problem: Problem, launches: dict[AttentionPart, AttentionLaunch]) -> dict[str, Any]:
    shape = problem.shape
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
    return {"ms": round(spent, 3), "events": int(lengths.sum()), "goal ms": 9.3}


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
    return {"ms": round(spent, 3), "users/s": round(users / spent * 1e3, 1), "events": len(events)}


def main() -> None:
    """Run the parts that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path, default=Path("attention_gpu.json"))
    parser.add_argument("--compile", type=int, nargs=2)
    parser.add_argument("--check-some", type=int, nargs=2)
    chosen = parser.parse_args()
    if chosen.check_some:
        check_some(*chosen.check_some)
        return
    if chosen.compile:
        compile_some(*chosen.compile)
        return
    is_all = not (chosen.check or chosen.tune or chosen.time)
    results = Results(chosen.out)
    results.add("machine", "gpu", {"name": torch.cuda.get_device_name(), "torch": torch.__version__})
    begin = time.time()
    best: dict[str, dict[AttentionPart, AttentionLaunch]] = {}
    if chosen.tune or is_all:
        best = tune(results, workers=chosen.workers)
        print(f"-- tuned after {time.time() - begin:.0f} s", flush=True)
    if chosen.time or is_all:
        time_all(results, best)
        print(f"-- timed after {time.time() - begin:.0f} s", flush=True)
    if chosen.check or is_all:
        check(results, workers=chosen.workers)
        print(f"-- checked after {time.time() - begin:.0f} s", flush=True)
    results.repeat()


if __name__ == "__main__":
    main()
