"""Random problems for attention over jagged sequences, and their gradients."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ziggurat.features.jagged import offsets_of
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, AttentionMask, JaggedLayout, Spans

LENGTHS = (0, 1, 2, 15, 16, 17, 33, 47, 48, 49, 63, 64, 65, 70, 130)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What `jagged_attention` takes, and a gradient of its result."""

    qkv: tuple[Tensor, Tensor, Tensor]
    layout: JaggedLayout
    form: AttentionForm
    divisor: float
    w_pos: Tensor | None = None
    w_time: Tensor | None = None
    times: tuple[Tensor, Tensor] | None = None
    grad: Tensor

    def solve(self, function: Any, *, dtype: torch.dtype, **options: Any) -> list[Tensor]:
        """The result and the gradients of q, k, v and the biases, in FP64."""
        leaves = [each.to(dtype).requires_grad_() for each in self.qkv]
        of_biases = torch.float64 if dtype is torch.float64 else torch.float32
        biases = [None if each is None else each.to(of_biases).requires_grad_() for each in (self.w_pos, self.w_time)]
        times = self.times or (None, None)
        bias = AttentionBias(w_pos=biases[0], w_time=biases[1], query_times=times[0], key_times=times[1])
        scale = self.qkv[0].shape[2] ** -0.5
        settings = {"layout": self.layout, "form": self.form, "scale": scale, "divisor": self.divisor, "bias": bias}
        result = function(*leaves, **settings, **options)
        leaves += [each for each in biases if each is not None]
        found = torch.autograd.grad(result, leaves, self.grad.to(result.dtype), allow_unused=True)
        pairs = zip(found, leaves, strict=True)
        gradients = [torch.zeros_like(leaf) if each is None else each for each, leaf in pairs]
        return [each.detach().double() for each in (result, *gradients)]

    def rounded(self) -> Problem:
        """The same with numbers that BF16 has."""
        qkv = tuple(each.bfloat16().float() for each in self.qkv)
        return replace(self, qkv=qkv, grad=self.grad.bfloat16().float())


def random_problem(seed: int) -> Problem:
    """Any lengths, heads, dims, masks, targets, cached keys and biases."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size = draw.choice([0, 1, 2, 5])
    lengths = torch.tensor([draw.choice([*LENGTHS, draw.randint(0, 200)]) for _ in range(size)], dtype=torch.int64)
    asked = _at_most(lengths, draw) if draw.random() < 0.4 else None
    layout = JaggedLayout(
        offsets=offsets_of(lengths),
        query_offsets=None if asked is None else offsets_of(asked),
        num_targets=_at_most(lengths, draw) if draw.random() < 0.5 else None,
        mask=AttentionMask(context=draw.choice([0, 0, 1, 3]), max_attention_length=draw.choice([0, 0, 1, 5, 64])),
    )
    keys, queries = int(layout.offsets[-1]), int(layout.of_queries[-1])
    heads, dim, value_dim = draw.choice([1, 2, 3]), draw.choice([1, 3, 8, 25, 64, 128]), draw.choice([1, 8, 25, 64])
    shapes = ((queries, heads, dim), (keys, heads, dim), (keys, heads, value_dim), (queries, heads, value_dim))
    *qkv, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    form = draw.choice(list(AttentionForm))
    reach = max(1, int(lengths.max()) if size else 1) + draw.choice([0, 3])
    return Problem(
        qkv=(qkv[0], qkv[1], qkv[2]),
        grad=grad,
        layout=layout,
        form=form,
        divisor=1.0 if form is AttentionForm.SOFTMAX else 10.0,
        w_pos=torch.randn(2 * reach - 1, generator=generator) if draw.random() < 0.5 else None,
        w_time=torch.randn(draw.choice([2, 20, 129]), generator=generator) if draw.random() < 0.6 else None,
        times=_times(layout, draw, generator),
    )


def _at_most(lengths: Tensor, draw: random.Random) -> Tensor:
    return torch.tensor([draw.randint(0, int(length)) for length in lengths], dtype=torch.int64)


def _times(layout: JaggedLayout, draw: random.Random, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Times of queries and keys; rising in most cases, equal ones among them."""
    keys, queries = int(layout.offsets[-1]), int(layout.of_queries[-1])
    times = torch.randint(0, 10 ** draw.choice([2, 6, 12]), (keys,), generator=generator)
    if draw.random() < 0.6 and keys:
        times = torch.cat([part.sort().values for part in times.split(layout.offsets.diff().tolist())])
    if layout.query_offsets is None and draw.random() < 0.7:
        return times, times
    return torch.randint(0, 10**9, (queries,), generator=generator), times


def cut_problem(problem: Problem, seed: int) -> list[tuple[Tensor, Tensor, JaggedLayout]]:
    """The same work in parts: rows of queries, rows of keys, and the layout of each; every pair is in one of them."""
    draw, layout = random.Random(seed), problem.layout
    lengths, asked = layout.offsets.diff().tolist(), layout.of_queries.diff().tolist()
    cuts = draw.randint(1, 4)
    # The same fractions cut all sequences, so that part c of queries and keys is one call.
    edges = [sorted(draw.randint(0, length) for _ in range(cuts)) for length in lengths]
    key_edges = [[0, *edge, length] for edge, length in zip(edges, lengths, strict=True)]
    query_edges = [[0, *sorted(draw.randint(0, num) for _ in range(cuts)), num] for num in asked]
    parts = []
    for row_part in range(cuts + 1):
        for key_part in range(cuts + 1):
            queries = [(edge[row_part], edge[row_part + 1]) for edge in query_edges]
            keys = [(edge[key_part], edge[key_part + 1]) for edge in key_edges]
            counts = [torch.tensor([b - a for a, b in each], dtype=torch.int64) for each in (queries, keys)]
            spans = Spans(
                query_starts=torch.tensor(
                    [a + n - m for (a, _), n, m in zip(queries, lengths, asked, strict=True)], dtype=torch.int64
                ),
                key_starts=torch.tensor([a for a, _ in keys], dtype=torch.int64),
                lengths=torch.tensor(lengths, dtype=torch.int64),
            )
            part = replace(layout, offsets=offsets_of(counts[1]), query_offsets=offsets_of(counts[0]), spans=spans)
            rows = _rows(layout.of_queries, queries)
            parts.append((rows, _rows(layout.offsets, keys), part))
    return parts


def _rows(offsets: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    begins = offsets.tolist()
    found = [torch.arange(begins[b] + first, begins[b] + last) for b, (first, last) in enumerate(spans)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *found])
