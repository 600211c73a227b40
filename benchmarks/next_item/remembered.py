"""Candidates behind a history that is remembered (M-FALCON) against the plain forward of both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import percentiles
from benchmarks.report import Case
from ziggurat.models.sequence.layers.hstu import HSTULayer, hstu_research
from ziggurat.models.sequence.layers.stack import SequenceStack

EVENTS, CANDIDATES, GOAL = 4_096, 256, 5.0
_DIM, _HEADS, _LAYERS = 64, 2, 2


class Remembered:
    """One user with a long history, and candidates at one moment."""

    def __init__(self, *, events: int, candidates: int) -> None:
        generator = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        config = hstu_research(dim=_DIM, max_length=events + 1, num_heads=_HEADS)
        self.stack = SequenceStack([HSTULayer(config) for _ in range(_LAYERS)]).eval()
        self.events, self.candidates = (torch.randn(count, _DIM, generator=generator) for count in (events, candidates))
        self.times = torch.randint(1, 10**4, (events,), generator=generator).cumsum(0)
        self.asked = self.times[-1:] + 60
        self.offsets = torch.tensor([0, candidates])
        with torch.no_grad():
            _, self.histories = self.stack.remember(self.events, offsets=torch.tensor([0, events]), times=self.times)

    def plain(self) -> Tensor:
        """Outputs of the candidates by the forward of history and candidates."""
        events, candidates = len(self.events), len(self.candidates)
        places = self.stack.places_of(
            torch.tensor([0, events + candidates]),
            times=torch.cat([self.times, self.asked.expand(candidates)]),
            num_targets=torch.tensor([candidates]),
        )
        with torch.no_grad():
            return self.stack(torch.cat([self.events, self.candidates]), places=places)[events:]

    def cached(self) -> Tensor:
        """The same behind the remembered history."""
        with torch.no_grad():
            return self.stack.score(
                self.candidates, offsets=self.offsets, histories=self.histories, asked_at=self.asked
            )


def remembered_case(*, rounds: int, events: int = EVENTS, candidates: int = CANDIDATES) -> Case:
    """Candidates a second, remembered and plain, in turns.

    Args:
        rounds: turns of each.
        events: of the history.
        candidates: scored at once.
    """
    subject = Remembered(events=events, candidates=candidates)
    # The history's last event is asked at its own time when it is remembered, and at the candidates' in no forward.
    torch.testing.assert_close(subject.cached(), subject.plain(), rtol=1e-4, atol=1e-4)
    times = [(_seconds(subject.cached), _seconds(subject.plain)) for _ in range(rounds)]
    ratios = [theirs / mine for mine, theirs in times]
    mine, theirs = (statistics.median(each) for each in zip(*times, strict=True))
    low, high = percentiles(ratios)
    return Case(
        name=f"mfalcon_{events}_{candidates}",
        ours=candidates / mine,
        peer=candidates / theirs,
        ratio=statistics.median(ratios),
        ratio_p10=low,
        ratio_p90=high,
        ours_name="score behind remembered histories",
        peer_name="plain forward",
        goal=GOAL if (events, candidates) == (EVENTS, CANDIDATES) else 0.0,
        unit="candidates/s",
    )


def _seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
