"""Attention over histories of real lengths, on one core: against padded torch, and against the machine's products.

Forward and backward of one layer's attention, BF16, ours and torch in turns, each at lengths that are all equal, and at
lengths as users have them (log-normal). Torch pads to the longest: scaled_dot_product_attention with a causal mask for
softmax; for SiLU two einsums with the same biases, which is what a layer without a kernel does. Cutting the result
into jagged rows again is not counted.

`mfalcon_4096_256`: 256 candidates behind a remembered history of 4,096 events, against the plain forward of both.

The second question is the share of the machine's BF16 product rate (`ops/machine/matmul_rate.py`, before each turn)
that our attention reaches, counting only pairs that see each other. Its cases have `share_of_products` in their names,
and their `ratio` is that share.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from benchmarks.harness import percentiles, say
from benchmarks.next_item.remembered import remembered_case
from benchmarks.report import Case, Report
from ziggurat.features.jagged import offsets_of
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, JaggedLayout, attended_pairs
from ziggurat.ops.attention.time_buckets import time_buckets
from ziggurat.ops.machine.matmul_rate import matmul_gflop_per_s

GOAL_SHARE = 0.5
BUCKETS = 129


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One shape of histories.

    Args:
        name: of its cases.
        lengths: of the histories.
        heads: H.
        dim: d, of queries, keys and values.
        form: of the weights.
        with_bias: relative position and time are added to the scores.
        goal_share: of the product rate; 0: none.
    """

    name: str
    lengths: list[int]
    heads: int
    dim: int
    form: AttentionForm
    with_bias: bool = False
    goal_share: float = 0.0


def settings(*, quick: bool) -> list[Setting]:
    """Histories of MovieLens-1M's kind, and long ones."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.exp(torch.randn(16 if quick else 64, generator=generator) * 0.9 + 4.6).clamp(1, 200).int().tolist()
    found = []
    for form in (AttentionForm.SILU, AttentionForm.SOFTMAX):
        found.append(Setting(name=f"{form.value}_users_200", lengths=drawn, heads=2, dim=32, form=form))
        for length in (1024,) if quick else (1024, 4096):
            shape = {"lengths": [length], "heads": 4096 // length, "form": form, "goal_share": GOAL_SHARE}
            found.append(Setting(name=f"{form.value}_{length}_dim_64", dim=64, **shape))  # type: ignore[arg-type]
            found.append(Setting(name=f"{form.value}_{length}_dim_128", dim=128, **shape))  # type: ignore[arg-type]
    biased = {"heads": 2, "dim": 32, "form": AttentionForm.SILU, "with_bias": True}
    found.append(Setting(name="silu_bias_users_200", lengths=drawn, **biased))  # type: ignore[arg-type]
    found.append(Setting(name="silu_bias_1024_dim_32", lengths=[1024], **biased))  # type: ignore[arg-type]
    return found


class Contest:
    """The same problem for both: jagged rows for ours, padded ones for torch.

    Args:
        setting: what to draw.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, lengths = setting, torch.tensor(setting.lengths)
        generator = torch.Generator().manual_seed(1)
        self.layout, total, most = JaggedLayout(offsets=offsets_of(lengths)), int(lengths.sum()), int(lengths.max())
        shape = (total, setting.heads, setting.dim)
        rows = [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]
        self.inside = torch.arange(most) < lengths[:, None]
        times = torch.randint(0, 3 * 10**7, (total,), generator=generator)
        self.times = torch.cat([part.sort().values for part in times.split(setting.lengths)])
        self.weights = [torch.randn(size, generator=generator).requires_grad_() for size in (2 * most - 1, BUCKETS)]
        self.ours = [each.clone().requires_grad_() for each in rows[:3]]
        self.padded = [self._pad(each).transpose(1, 2).contiguous().requires_grad_() for each in rows[:3]]
        self.grads = rows[3], self._pad(rows[3]).transpose(1, 2).contiguous()
        self.most, self.scale = most, setting.dim**-0.5

    def _pad(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(*self.inside.shape, *rows.shape[1:])
        padded[self.inside] = rows
        return padded

    def run_ours(self) -> list[Tensor]:
        """The result, and the gradients of all inputs."""
        setting, bias = self.setting, None
        if setting.with_bias:
            w_pos, w_time = self.weights
            bias = AttentionBias(w_pos=w_pos, w_time=w_time, query_times=self.times, key_times=self.times)
        divisor = 1.0 if setting.form is AttentionForm.SOFTMAX else float(self.most)
        options = {"layout": self.layout, "form": setting.form, "scale": self.scale, "divisor": divisor, "bias": bias}
        result = jagged_attention(*self.ours, **options)  # type: ignore[arg-type]
        return [result, *torch.autograd.grad(result, self._leaves(self.ours), self.grads[0])]

    def run_torch(self) -> list[Tensor]:
        """The same, padded."""
        q, k, v = self.padded
        if self.setting.form is AttentionForm.SOFTMAX:
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            scores = torch.einsum("bhmd,bhnd->bhmn", q, k) * self.scale
            if self.setting.with_bias:
                scores = scores + self._padded_bias()[:, None].to(scores.dtype)
            seen = torch.ones(self.most, self.most, dtype=torch.bool).tril() & self.inside[:, None, None, :]
            activated = F.silu(scores) if self.setting.form is AttentionForm.SILU else F.relu(scores)
            result = torch.einsum("bhmn,bhnd->bhmd", activated / self.most * seen, v)
        return [result, *torch.autograd.grad(result, self._leaves(self.padded), self.grads[1])]

    def _padded_bias(self) -> Tensor:
        w_pos, w_time = self.weights
        places = torch.arange(self.most)
        times = self._pad(self.times)
        apart = times[:, :, None] - times[:, None, :]
        by_time = w_time[time_buckets(apart, num_buckets=BUCKETS)]
        return w_pos[places[None, :] - places[:, None] + self.most - 1] + by_time

    def _leaves(self, qkv: list[Tensor]) -> list[Tensor]:
        return [*qkv, *(self.weights if self.setting.with_bias else [])]

    def check(self) -> None:
        """Both compute the same, up to BF16's rounding."""
        found, expected = self.run_ours()[0].float(), self.run_torch()[0].transpose(1, 2)[self.inside].float()
        error = float((found - expected).detach().abs().max() / expected.detach().abs().max())
        assert error < 0.05, f"{self.setting.name}: ours and torch differ by {error:.3f} of the largest number"

    def gflop(self) -> float:
        """Forward and backward, of the pairs that see each other."""
        return 14e-9 * attended_pairs(self.layout) * self.setting.heads * self.setting.dim


def measure(setting: Setting, *, rounds: int) -> list[Case]:
    """A case against torch, and one against the machine's products."""
    say(f"  {setting.name}")
    contest = Contest(setting)
    contest.check()
    products, times = [], []
    for _ in range(rounds):
        products.append(matmul_gflop_per_s(torch.bfloat16, budget_s=0.02))
        times.append((_seconds(contest.run_ours), _seconds(contest.run_torch)))
    ours_s, torch_s = (statistics.median(each) for each in zip(*times, strict=True))
    shares = [contest.gflop() / mine / product for (mine, _), product in zip(times, products, strict=True)]
    ratios, histories = [theirs / mine for mine, theirs in times], len(setting.lengths)
    rate = contest.gflop() / ours_s
    return [
        _case(setting.name, histories / ours_s, histories / torch_s, ratios, peer="padded torch", unit="histories/s"),
        _case(
            *(f"{setting.name}_share_of_products", rate, statistics.median(products), shares),
            peer="matrix products, BF16",
            unit="GFLOP/s",
            goal=setting.goal_share,
        ),
    ]


def _case(
    name: str, ours: float, peer_rate: float, ratios: list[float], *, peer: str, unit: str, goal: float = 0.0
) -> Case:
    low, high = percentiles(ratios)
    return Case(
        name=name,
        ours=ours,
        peer=peer_rate,
        ratio=statistics.median(ratios),
        ratio_p10=low,
        ratio_p90=high,
        ours_name="jagged_attention",
        peer_name=peer,
        goal=goal,
        unit=unit,
    )


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time of one batch of histories.

    Args:
        lengths: of the histories.
        seconds: forward and backward.
        pairs: that see each other.
        padded: pairs of the same batch, padded to its longest history.
    """

    lengths: list[int]
    seconds: float
    pairs: int
    padded: int

    def note(self) -> str:
        """For the report."""
        return (
            f"{len(self.lengths)} histories, longest {max(self.lengths)}: {self.seconds * 1e9 / self.pairs:.2f} ns a "
            f"pair, forward and backward; {self.pairs:,} pairs (padded: {self.padded:,})"
        )


def cost_by_pairs(*, rounds: int) -> list[Cost]:
    """Whether time follows Σ n² of the real lengths: one long history among many short ones, and equal ones."""
    costs = []
    mixes = ([256], [512], [1024], [2048], [4096], [2048, *[64] * 63], [4096, *[128] * 31], [1024] * 4, [256] * 64)
    for lengths in mixes:
        contest = Contest(Setting(name="", lengths=lengths, heads=1, dim=64, form=AttentionForm.SILU))
        taken = statistics.median(_seconds(contest.run_ours) for _ in range(rounds))
        padded = len(lengths) * max(lengths) ** 2 // 2
        costs.append(Cost(lengths=lengths, seconds=taken, pairs=attended_pairs(contest.layout), padded=padded))
    return costs


def plot_costs(costs: list[Cost], path: Path) -> None:
    """Time over pairs that see each other, and over those of a padded batch."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, marker, pairs in (
        ("pairs that see each other", "o", [each.pairs for each in costs]),
        ("pairs of the padded batch", "x", [each.padded for each in costs]),
    ):
        axes.scatter(pairs, [1e3 * each.seconds for each in costs], marker=marker, label=label)
    rate = statistics.median(each.seconds / each.pairs for each in costs)
    ends = [min(each.pairs for each in costs), max(each.padded for each in costs)]
    axes.plot(ends, [1e3 * rate * end for end in ends], color="grey", lw=1, label=f"{rate * 1e9:.1f} ns a pair")
    axes.set(xscale="log", yscale="log", xlabel="pairs", ylabel="ms, forward and backward", title="One head of 64")
    axes.legend()
    figure.savefig(path, dpi=120)


def run(*, quick: bool = False) -> Report:
    """Measure every setting."""
    torch.set_num_threads(1)
    report = Report(
        benchmark="attention",
        claim="Attention over histories, forward and backward, BF16, one core: against padded torch and products.",
        command="ziggurat bench attention",
    )
    for setting in settings(quick=quick):
        report.cases += measure(setting, rounds=3 if quick else 7)
    size = {"events": 512, "candidates": 64} if quick else {}
    report.cases.append(remembered_case(rounds=3 if quick else 7, **size))
    costs = cost_by_pairs(rounds=3 if quick else 7)
    report.notes += [each.note() for each in costs]
    report.plots.append(("attention_cost.png", partial(plot_costs, costs)))
    return report
