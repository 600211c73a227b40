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


def thinned_rows(
    offsets: Int64[Tensor, "B+1"], keys_B: Int64[Tensor, "B"], *, draw: StepDraw, alpha: float, longest: int
) -> Bool[Tensor, "N"]:
    """Mark the events that remain, drawn for each history by its key: the same on any number of ranks.

    Args:
        offsets: where histories begin.
        keys_B: what is drawn by: the row ids of samples, or the keys of questions.
        draw: of the step.
        alpha: α.
        longest: N.
    """
    lengths_B = offsets.diff()
    most = max(1, int(longest ** (alpha / 2)))
    chance_B = longest**alpha / lengths_B.clamp(min=1).double().square()
    kept_N = torch.ones(int(offsets[-1]), dtype=torch.bool)
    for sample in (lengths_B > most).nonzero().squeeze(1).tolist():
        generator = draw.of_row(int(keys_B[sample]))
        if generator.random() < float(chance_B[sample]):
            continue
        begin = int(offsets[sample])
        length = int(lengths_B[sample])
        kept_N[begin : begin + length] = False
        kept_N[begin + torch.from_numpy(generator.choice(length, most, replace=False))] = True
    return kept_N
