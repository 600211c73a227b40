"""Add a training hook: what steps 10 to 14 of a run spend their time on, by torch.profiler.

    $ ziggurat --extension profiler_hook train movielens_dlrm --hook profile_steps
    $ head runs/movielens_dlrm/profile/rank0.txt         the operations that took the most time
    chrome://tracing, or ui.perfetto.dev                 opens runs/movielens_dlrm/profile/rank0.json

    zg.fit(frame, label="bought", hooks=[ProfileSteps(first=100, last=109)])

Every rank profiles itself and writes files of its own, so that the ranks of one step can be laid side by side. The
numbers of the run stay as they are; the profiled steps take longer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from ziggurat.errors import ConfigError
from ziggurat.training.hooks.hook import Hook

if TYPE_CHECKING:
    from ziggurat.training.judging import MadeStep
    from ziggurat.training.trainer import Trainer

_ROWS = 25  # of the table


class ProfileSteps(Hook):
    """Profiles some steps of a run.

    Args:
        first: the first step that is profiled, from 1.
        last: the last one.
    """

    name = "profile_steps"

    def __init__(self, *, first: int = 10, last: int = 14) -> None:
        if not 1 <= first <= last:
            raise ConfigError(
                expected="1 <= first <= last",
                found=f"first = {first}, last = {last}",
                where="ProfileSteps",
                ways_out="ProfileSteps(first=10, last=14)",
            )
        self.first = first
        self.last = last
        self._profiler: profile | None = None
        self._path = Path()

    def on_start(self, trainer: Trainer) -> None:
        """Say where files go; profile from the start if the first step is meant."""
        self._path = trainer.folder.path / "profile" / f"rank{trainer.team.rank}"
        self._start_before(trainer.position.step + 1)

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """End after the last step, or begin before the first."""
        if self._profiler is not None and made.step >= self.last:
            if trainer.step.device.type == "cuda":
                torch.cuda.synchronize()  # its kernels are not done when the host is
            self.close()
        self._start_before(made.step + 1)

    def close(self) -> None:
        """Write what was profiled; a run that ended before the last step has a part of it."""
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return
        profiler.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._path.with_suffix(".json")))
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS)
        self._path.with_suffix(".txt").write_text(table, encoding="utf-8")

    def _start_before(self, step: int) -> None:
        if step == self.first and self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities)
            self._profiler.start()


PROFILE_STEPS = Hook.add(ProfileSteps())
