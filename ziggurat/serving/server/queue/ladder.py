"""The degradation ladder: how much effort an answer gets, by how full the time of the queue is.

    pressure = wait / deadline                  ▲ from UP on: one step down in effort, at once
                                                │ up to DOWN for a while: one step back up
    full → fewer_probes → smaller_over_arch → retrieval_only → popular → (refused with 503)
                          where there is one  where a ranker or an OverArch is left out

Steps down are quick, since a queue fills within milliseconds. Steps up wait, since less effort makes the queue short
and so looks calm: a step up that has to be taken back within a second doubles the wait before the next one (from 0.2 up
to 3.2 seconds), so that a lasting load does not change the effort with every batch. So for at most that long after a
load, answers may have less effort although nothing waits; a server without requests steps up, too. The answer names the
effort in `degraded`; how often each was chosen stands in /metrics.
"""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.serving.answers import Effort, Info

UP = 0.5
DOWN = 0.15
_STEP_S = 0.02  # between two steps down
_HOLD_S = 0.2  # of calm before a step up; doubled by each step up that was taken back
_MAX_HOLD_S = 3.2
_SOON_S = 1.0  # a step up that is taken back within this time came too early
LADDER = (Effort.FULL, Effort.FEWER_PROBES, Effort.SMALLER_OVER_ARCH, Effort.RETRIEVAL_ONLY, Effort.POPULAR)


def steps_for(info: Info) -> tuple[Effort, ...]:
    """The steps that make a difference to an export: it retrieves, and has an OverArch or a ranker to leave out."""
    if not info.can_recommend:
        return LADDER[:1]
    useless = set() if info.num_over_arch else {Effort.SMALLER_OVER_ARCH}
    if not (info.can_rank or info.num_over_arch):
        useless.add(Effort.RETRIEVAL_ONLY)
    return tuple(step for step in LADDER if step not in useless)


class Ladder:
    """The effort of the next batch, from the pressure of the queue.

    Args:
        steps: from the most effort to the least; one step alone never changes.
    """

    def __init__(self, *, steps: Sequence[Effort] = LADDER) -> None:
        self.steps = tuple(steps)
        self.level = 0
        self._hold_s = _HOLD_S
        self._down = self._up = float("-inf")  # when the last step was
        self._calm_since: float | None = None

    @property
    def effort(self) -> Effort:
        """The effort that holds now."""
        return self.steps[self.level]

    @property
    def hold_s(self) -> float:
        """The seconds of calm needed before the next step up."""
        return min(self._hold_s, _MAX_HOLD_S)

    def feel(self, pressure: float, *, now: float) -> Effort:
        """The effort for a batch that is taken now.

        Args:
            pressure: what requests have waited, or will after the next batch, as a share of the deadline.
            now: monotonic seconds.
        """
        if pressure > DOWN:
            self._calm_since = None
            if pressure >= UP and now - self._down >= _STEP_S and self.level + 1 < len(self.steps):
                if now - self._up > _SOON_S:
                    self._hold_s = _HOLD_S
                elif self._up > self._down:
                    self._hold_s = min(2 * self._hold_s, _MAX_HOLD_S)
                self.level = self.level + 1
                self._down = now
        elif self._calm_since is None:
            self._calm_since = now
        elif self.level and now - self._calm_since >= self._hold_s:
            steps = int((now - self._calm_since) / self._hold_s)  # more than one after a time without requests
            self.level = max(self.level - steps, 0)
            self._up = now
            self._calm_since = now
        return self.effort
