"""Add a hook by window: ends a stream in front of a window that is scored far worse than those before it.

    $ ziggurat --extension window_alarm stream table_dlrm --data.train clicks/ --schema my.toml --hook window_alarm

The score of a window is there before its first row is trained. A window whose log loss, over that of always saying its
share of positives (NE), is far above the median of the last ones is more often broken (a column that went missing, ids
of another system) than surprising, and a model that has learned it serves it to everybody. So the stream ends there,
with a checkpoint of the window before, and says why. Given again, the same command trains the window: whoever gives it
has looked.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from ziggurat.errors import ConfigError
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.records.windows import read_windows

if TYPE_CHECKING:
    from ziggurat.training.records.windows import WindowRecord
    from ziggurat.training.trainer import Trainer

_LEAST_WINDOWS = 3  # before them a median says nothing


class WindowAlarm(Hook):
    """Ends a stream in front of a window whose score is far worse than the last ones.

    Args:
        metric: lower is better.
        factor: of the median, from which on a score is far worse.
        num_windows: that the median is of.
    """

    name = "window_alarm"
    on_every_rank = False  # the first rank has windows.jsonl, and its stop is that of all

    def __init__(self, *, metric: str = "ne", factor: float = 1.5, num_windows: int = 8) -> None:
        if factor <= 1 or num_windows < _LEAST_WINDOWS:
            raise ConfigError(
                expected=f"a factor above 1, and at least {_LEAST_WINDOWS} windows",
                found=f"factor = {factor}, num_windows = {num_windows}",
                where="WindowAlarm",
                ways_out='WindowAlarm(metric="ne", factor=1.5, num_windows=8)',
            )
        self.metric = metric
        self.factor = factor
        self.num_windows = num_windows

    def on_scored(self, trainer: Trainer, record: WindowRecord) -> None:
        """Compare the window's score with the median of those before it."""
        now = record.metrics.get(self.metric)
        earlier = [each.metrics.get(self.metric) for each in read_windows(trainer.folder.windows)[:-1]]
        known = [value for value in earlier if value is not None][-self.num_windows :]
        if now is None or len(known) < _LEAST_WINDOWS:
            return
        usual = statistics.median(known)
        if now > self.factor * usual:
            worse = f"{now:.3f}, {now / usual:.1f} times the median of {usual:.3f}"
            trainer.stop(f"{self.metric} of {record.name} is {worse}")


WINDOW_ALARM = Hook.add(WindowAlarm())
