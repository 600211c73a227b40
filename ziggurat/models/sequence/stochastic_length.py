"""Stochastic length: in training long histories are thinned at random, so that layers over them cost less.

    N the longest history, M = N^(α/2), n events of a history

    n ≤ M                                    all events
    n > M   with probability N^α / n²        all events
            else                             M of them, drawn evenly, in their order

Two histories say nearly the same with and without some of their events, while attention costs n². With α = 2 nothing is
thinned; the paper finds little loss of quality down to 1.6. Evaluation sees all events.

Source: Zhai et al., arXiv 2402.17152, section 3.2, equation 4.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ziggurat.models.contract.step_draw import StepDraw

NEVER_THINNED = 2.0  # α from which on all events remain


def thinned(offsets: Int64[Tensor, "B+1"], *, alpha: float, longest: int) -> Bool[Tensor, "N"]:
    """Which events remain, drawn by torch's generator.

    Args:
        offsets: where histories begin.
        alpha: α.
        longest: N.
    """
    lengths_B, device = offsets.diff(), offsets.device
    most, chance_B = _most_and_chance(lengths_B, alpha=alpha, longest=longest)
    is_thinned_B = (lengths_B > most) & (torch.rand(len(lengths_B), device=device, dtype=torch.float64) >= chance_B)
    total = int(offsets[-1])
    samples_N = torch.arange(len(lengths_B), device=device).repeat_interleave(lengths_B, output_size=total)
    drawn_N = torch.rand(total, device=device, dtype=torch.float64)
    places_N = torch.empty(total, dtype=torch.int64, device=device)
    order_N = torch.argsort(samples_N + drawn_N)  # by sample, inside it at random
    places_N[order_N] = torch.arange(total, device=device)
    return ~is_thinned_B[samples_N] | (places_N - offsets[:-1][samples_N] < most)


def thinned_rows(
    offsets: Int64[Tensor, "B+1"], row_ids: Int64[Tensor, "B"], *, draw: StepDraw, alpha: float, longest: int
) -> Bool[Tensor, "N"]:
    """Which events remain, drawn for each history by its sample: the same on any number of ranks.

    Args:
        offsets: where histories begin.
        row_ids: of the samples.
        draw: of the step.
        alpha: α.
        longest: N.
    """
    lengths_B = offsets.diff()
    most, chance_B = _most_and_chance(lengths_B, alpha=alpha, longest=longest)
    kept_N = torch.ones(int(offsets[-1]), dtype=torch.bool)
    for sample in (lengths_B > most).nonzero().squeeze(1).tolist():
        generator = draw.of_row(int(row_ids[sample]))
        if generator.random() < float(chance_B[sample]):
            continue
        begin, length = int(offsets[sample]), int(lengths_B[sample])
        kept_N[begin : begin + length] = False
        kept_N[begin + torch.from_numpy(generator.choice(length, most, replace=False))] = True
    return kept_N


def _most_and_chance(lengths_B: Tensor, *, alpha: float, longest: int) -> tuple[int, Tensor]:
    """M, and how likely each history keeps all of its events where it has more."""
    chance_B = longest**alpha / lengths_B.clamp(min=1).double().square()
    return max(1, int(longest ** (alpha / 2))), chance_B
