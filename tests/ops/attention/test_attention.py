"""Jagged attention: the reference against the equation, every path of the kernel against the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ziggurat.ops.attention.cpp as cpp
from tests.ops.attention.jagged_problems import Problem, random_problem
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.jagged import offsets_of
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.cpp import AttentionPath, attention_kernel
from ziggurat.ops.attention.problem import (
    AttentionBias,
    AttentionForm,
    AttentionMask,
    JaggedLayout,
    attended_pairs,
    parts_of,
    visible,
)
from ziggurat.ops.attention.reference import jagged_attention_reference
from ziggurat.ops.attention.time_buckets import bucket_begins, bucket_cells, bucket_limits, time_buckets
from ziggurat.ops.cpp_build import CppLibrary

needs_kernel = pytest.mark.skipif(not attention_kernel().startswith("C++"), reason=attention_kernel())


def paths() -> list[AttentionPath]:
    return [path for path in AttentionPath if path <= cpp.best_path()]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of any result, as a share of the largest number of it.

    Of 0.1 at least; of 10 for gradients of biases, which are sums over all pairs, and may cancel.
    """
    pairs = [pair for pair in zip(found, expected, strict=True) if pair[1].numel()]
    least = [10.0 if b.dim() == 1 else 0.1 for _, b in pairs]
    errors = [
        float((a - b).abs().max() / b.abs().max().clamp(min=low)) for (a, b), low in zip(pairs, least, strict=True)
    ]
    return max([0.0, *errors])


@needs_kernel
@pytest.mark.parametrize("seed", range(40))
def test_every_path_is_near_the_reference_in_fp64(seed: int) -> None:
    problem = random_problem(seed)
    exact = problem.solve(jagged_attention_reference, dtype=torch.float64)
    for path in paths():
        if path is not AttentionPath.AVX512_BF16:
            found = problem.solve(jagged_attention, dtype=torch.float32, path=path)
            assert worst(found, exact) < 5e-6, path


@needs_kernel
@pytest.mark.parametrize("seed", range(40, 60))
def test_bf16_is_within_two_roundings(seed: int) -> None:
    problem = random_problem(seed).rounded()
    exact = problem.solve(jagged_attention_reference, dtype=torch.float64)
    for path in (AttentionPath.PLAIN, cpp.best_path()):
        found = problem.solve(jagged_attention, dtype=torch.bfloat16, path=path)
        assert worst(found, exact) < 0.02, path  # 2⁻⁸ is one rounding


@pytest.mark.parametrize("form", list(AttentionForm))
def test_reference_is_the_equation(form: AttentionForm) -> None:
    """Written down once more, number by number, with what sees what from the drawing of `problem.py`."""
    length, context, num_targets, reach, divisor = 9, 2, 3, 3, 1.0 if form is AttentionForm.SOFTMAX else 4.0
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, 1, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    w_pos, w_time = torch.randn(2 * length - 1).double(), torch.randn(20).double()
    times = torch.tensor([5, 5, 90, 100, 1000, 4000, 4001, 4001, 9000])
    layout = JaggedLayout(
        offsets=torch.tensor([0, length]),
        num_targets=torch.tensor([num_targets]),
        mask=AttentionMask(context=context, max_attention_length=reach),
    )
    bias = AttentionBias(w_pos=w_pos, w_time=w_time, query_times=times, key_times=times)
    found = jagged_attention_reference(q, k, v, layout=layout, form=form, scale=0.5, divisor=divisor, bias=bias)
    sees = {
        **{0: range(6), 1: range(6), 2: [0, 1, 2], 3: [0, 1, 2, 3], 4: [0, 1, 2, 3, 4], 5: [2, 3, 4, 5]},
        **{6: [3, 4, 5, 6], 7: [3, 4, 5, 7], 8: [3, 4, 5, 8]},
    }
    for i, columns in sees.items():
        weights = []
        for j in columns:
            place = length - 1 + min(j, 6) - min(i, 6)
            bucket = min(19, math.floor(math.log(max(1, abs(int(times[i] - times[j])))) / 0.301))
            score = 0.5 * float(q[i, 0] @ k[j, 0]) + float(w_pos[place]) + float(w_time[bucket])
            silu = score / (1 + math.exp(-score)) / divisor
            weights.append({"silu": silu, "relu": max(0.0, score) / divisor, "softmax": math.exp(score)}[form.value])
        total = sum(weights) if form is AttentionForm.SOFTMAX else 1.0
        expected = sum(weight / total * v[j, 0] for weight, j in zip(weights, columns, strict=True))
        torch.testing.assert_close(found[i, 0], expected, rtol=1e-6, atol=1e-9)
    assert attended_pairs(layout) == sum(len(list(columns)) for columns in sees.values())


@needs_kernel
def test_the_same_bits_on_repeat_for_any_threads_and_whoever_else_is_in_the_batch() -> None:
    problem = _long(num=3)
    before = torch.get_num_threads()
    try:
        solved = []
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            solved.append(problem.solve(jagged_attention, dtype=torch.float32))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in solved[1:] for a, b in zip(solved[0], other, strict=True))
    begin, end = problem.layout.offsets[1:3].tolist()
    alone = replace(
        problem,
        qkv=tuple(each[begin:end] for each in problem.qkv),
        grad=problem.grad[begin:end],
        layout=JaggedLayout(offsets=torch.tensor([0, end - begin])),
        times=tuple(each[begin:end] for each in problem.times or ()),
    ).solve(jagged_attention, dtype=torch.float32)
    for whole, part in list(zip(solved[0], alone, strict=True))[:4]:
        assert torch.equal(whole[begin:end], part)


def _long(*, num: int) -> Problem:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([700, 500, 129][:num])
    total = int(lengths.sum())
    q, k, v, grad = (torch.randn(total, 2, 16, generator=generator) for _ in range(4))
    times = torch.randint(0, 10**8, (total,), generator=generator).sort().values
    return Problem(
        qkv=(q, k, v),
        grad=grad,
        layout=JaggedLayout(offsets=offsets_of(lengths)),
        form=AttentionForm.SILU,
        divisor=100.0,
        w_pos=torch.randn(1399, generator=generator),
        w_time=torch.randn(129, generator=generator),
        times=(times, times),
    )


@needs_kernel
def test_one_huge_sequence_is_near_the_reference() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3000, 1, 8, generator=generator) for _ in range(3))
    layout = JaggedLayout(offsets=torch.tensor([0, 3000]))
    options = {"layout": layout, "scale": 0.3, "divisor": 3000.0, "form": AttentionForm.SILU}
    exact = jagged_attention_reference(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(jagged_attention(q, k, v, **options).double(), exact, rtol=1e-4, atol=1e-6)


@needs_kernel
def test_views_of_one_projection_need_no_copy() -> None:
    projected = torch.randn(20, 2, 24)
    q, k, v = projected.split(8, dim=2)
    options = {"layout": JaggedLayout(offsets=torch.tensor([0, 20])), "scale": 1.0, "form": AttentionForm.SOFTMAX}
    expected = jagged_attention(q.contiguous(), k.contiguous(), v.contiguous(), **options)
    assert torch.equal(jagged_attention(q, k, v, **options), expected)


@needs_kernel
def test_is_a_sound_custom_op_and_stays_whole_in_a_compiled_graph() -> None:
    q, k, v = (torch.randn(9, 1, 4, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 4, 9])
    arguments = (
        q,
        k,
        v,
        offsets,
        None,
        None,
        torch.randn(9, requires_grad=True),
        *[None] * 4,
        1.0,
        5.0,
        False,
        0,
        0,
        -1,
    )
    torch.library.opcheck(cpp.attention_op, arguments, test_utils=("test_schema", "test_faketensor"))

    def function(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        layout = JaggedLayout(offsets=offsets)
        return jagged_attention(q * 2, k, v, layout=layout, form=AttentionForm.SILU, scale=1.0, divisor=5.0).square()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    found, expected = compiled(q, k, v, offsets), function(q, k, v, offsets)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(each.sum(), (q, k, v)) for each in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_buckets_are_the_logarithm() -> None:
    exact = torch.tensor([0, 1, 2, 3, 59, 3600, 86_400, 10**9, 10**12, 10**18])
    expected = [min(128, math.floor(math.log(max(1, int(each))) / 0.301)) for each in exact]
    assert time_buckets(exact, num_buckets=129).tolist() == expected
    assert time_buckets(-exact, num_buckets=129).tolist() == expected
    assert time_buckets(exact, num_buckets=4).max() == 3


def test_cells_find_the_same_bucket_at_every_border() -> None:
    begins = bucket_begins(129)
    around = torch.cat(
        [begins, torch.nextafter(begins, begins * 0), torch.nextafter(begins, begins * 2), torch.ones(1)]
    )
    buckets, thresholds = bucket_cells(129)
    cells = (around.view(torch.int32) >> 20) - (127 << 3)
    found = buckets[cells] + (around >= thresholds[cells])
    assert torch.equal(found, torch.bucketize(around, begins, right=True).int())


@pytest.mark.parametrize("num_buckets", [1, 2, 20, 129, 160])
def test_limits_are_the_shortest_duration_of_each_bucket(num_buckets: int) -> None:
    """A bucket that no whole number lies in begins where the next one does."""
    limits = bucket_limits(num_buckets)
    most = torch.iinfo(torch.int64).max
    is_there = limits < most
    bucket = torch.arange(1, num_buckets)
    assert (time_buckets(limits, num_buckets=num_buckets) >= bucket)[is_there].all()
    assert (time_buckets(limits - 1, num_buckets=num_buckets) < bucket)[is_there].all()
    assert is_there.sum() == min(num_buckets - 1, 145)


@needs_kernel
@pytest.mark.parametrize("num_buckets", [1, 2, 40, 63, 64, 65, 100, 127, 128, 129, 146])
def test_every_path_counts_each_duration_in_its_bucket(num_buckets: int) -> None:
    """Scores are weights of buckets and each pair adds 1 to the gradient of its own: counts, exact in FP32."""
    borders = bucket_begins(146).double().long()
    generator = torch.Generator().manual_seed(num_buckets)
    for most in (10**6, 2**28, 2**40, 2**54, 2**62):
        near = (borders[borders < most, None] + torch.arange(-1, 2)).flatten().clamp(min=0)
        drawn = torch.randint(0, most, (200,), generator=generator).double().pow(torch.rand(200, generator=generator))
        durations = torch.cat([near, drawn.long(), torch.tensor([0, 1])])
        durations = durations[torch.randperm(len(durations), generator=generator)]
        if most == 2**40:
            durations = durations.sort(descending=True).values
        count, asked = len(durations), torch.tensor([2**62])
        layout = JaggedLayout(offsets=torch.tensor([0, count]), query_offsets=torch.tensor([0, 1]))
        expected = torch.bincount(time_buckets(durations, num_buckets=num_buckets), minlength=num_buckets)
        for path in paths():
            w_time = torch.linspace(1, 2, num_buckets).requires_grad_()
            bias = AttentionBias(w_time=w_time, query_times=asked, key_times=asked - durations)
            zeros, ones = torch.zeros(1, 1, 2), torch.ones(count, 1, 1)
            sizes = {"form": AttentionForm.RELU, "scale": 1.0, "divisor": 1.0, "layout": layout, "bias": bias}
            found = jagged_attention(zeros, torch.zeros(count, 1, 2), ones, path=path, **sizes)
            (counted,) = torch.autograd.grad(found.sum(), w_time)
            assert torch.equal(counted.long(), expected), (path, most)
            torch.testing.assert_close(found.detach().sum(), w_time.detach() @ expected.float(), rtol=1e-5, atol=0.0)


def test_targets_see_no_other_target() -> None:
    layout = JaggedLayout(offsets=torch.tensor([0, 6]), num_targets=torch.tensor([2]))
    seen = visible(parts_of(layout)[0], mask=AttentionMask()).dense(6)
    assert seen[4:].tolist() == [[True] * 4 + [True, False], [True] * 4 + [False, True]]
    assert not seen[:4, 4:].any()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"offsets": torch.tensor([0, 3])}, "from 0 to 5"),
        ({"offsets": torch.tensor([0, 4, 3, 5])}, "never fall"),
        ({"offsets": torch.tensor([0.0, 5.0])}, "int64"),
        ({"num_targets": torch.tensor([6])}, "num_targets"),
        ({"num_targets": torch.tensor([1, 1])}, "num_targets"),
        ({"query_offsets": torch.tensor([0, 4])}, "query_offsets"),
        ({"query_offsets": torch.tensor([0, 2, 5])}, "query_offsets"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_does_not_fit_together_is_refused_before_it_is_read(change: dict, word: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(5, 1, 2, dtype=dtype) for _ in range(3))
    layout = JaggedLayout(**({"offsets": torch.tensor([0, 5])} | change))
    with pytest.raises(DataError, match=word):
        jagged_attention(q, k, v, layout=layout, form=AttentionForm.SILU, scale=1.0, divisor=2.0)


def test_biases_that_do_not_fit_are_refused() -> None:
    q, k, v = (torch.randn(5, 1, 2) for _ in range(3))
    times, w_time = torch.arange(5), torch.zeros(4)
    for bias, word in (
        (AttentionBias(w_pos=torch.zeros(7)), "at most R = 4"),
        (AttentionBias(w_time=w_time), "query_times"),
        (AttentionBias(w_time=w_time, query_times=times, key_times=times[:3]), "key_times"),
        (AttentionBias(w_time=w_time, query_times=times, key_times=times.float()), "int64"),
    ):
        with pytest.raises(DataError, match=word):
            jagged_attention(
                *(q, k, v),
                layout=JaggedLayout(offsets=torch.tensor([0, 5])),
                form=AttentionForm.SILU,
                scale=1.0,
                divisor=2.0,
                bias=bias,
            )


@pytest.mark.parametrize(("form", "divisor"), [("silu", 0.0), ("silu", math.nan), ("softmax", 3.0)])
def test_divisors_that_mean_nothing_are_refused(form: str, divisor: float) -> None:
    q = torch.randn(1, 1, 2)
    layout = JaggedLayout(offsets=torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="divisor"):
        jagged_attention(q, q, q, layout=layout, form=AttentionForm(form), scale=1.0, divisor=divisor)


def test_without_a_compiler_the_reference_serves_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "_LIBRARY", CppLibrary.missing("no g++"))
    q = torch.randn(4, 1, 2)
    options = {"layout": JaggedLayout(offsets=torch.tensor([0, 4])), "form": AttentionForm.SOFTMAX, "scale": 1.0}
    assert torch.equal(jagged_attention(q, q, q, **options), jagged_attention_reference(q, q, q, **options))
    assert "slower" in attention_kernel()
    assert "no g++" in attention_kernel()
