"""The hooks that keep the training log: metrics.jsonl, event files of TensorBoard, and callbacks of a user's tracker.

    trainer ─► on_record ─┬─► WriteMetrics    metrics.jsonl, from which the HTML report is made
                          ├─► WriteEvents     tensorboard/, where the package is installed
                          └─► TellCallback    W&B, MLflow, … (`callbacks.py`)

All of them see the same records. The first rank writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ziggurat.training.callbacks import Callback
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.records.log import EventsFile, MetricsFile, why_no_events

if TYPE_CHECKING:
    from ziggurat.training.ending import FitResult
    from ziggurat.training.trainer import Trainer


class WriteMetrics(Hook):
    """Writes metrics.jsonl, which is cut back to the checkpoint where a run goes on."""

    on_every_rank = False

    def __init__(self) -> None:
        self._file: MetricsFile | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Open the file."""
        self._file = MetricsFile(trainer.folder.metrics, resume_step=trainer.resume_step)

    def on_record(self, trainer: Trainer, record: Mapping[str, object], timing: Mapping[str, object]) -> None:
        """Append a line."""
        del trainer
        self._open.append(record, timing=timing)

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Wait until the disk has all lines: the checkpoint holds a hash of them."""
        del trainer
        self._open.flush()

    def close(self) -> None:
        """Close the file."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    @property
    def _open(self) -> MetricsFile:
        if self._file is None:
            raise self.not_begun()
        return self._file


class WriteEvents(Hook):
    """Writes event files of TensorBoard, where its package is installed."""

    on_every_rank = False

    def __init__(self) -> None:
        self._file: EventsFile | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Open a file, and let TensorBoard forget the steps that will be made again."""
        if not why_no_events():
            step = trainer.resume_step
            self._file = EventsFile(trainer.folder.tensorboard, purge_step=None if step is None else step + 1)

    def on_record(self, trainer: Trainer, record: Mapping[str, object], timing: Mapping[str, object]) -> None:
        """Append the numbers."""
        del trainer
        if self._file is not None:
            self._file.append(record, timing=timing)

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Flush."""
        del trainer
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()


class TellCallback(Hook):
    """Tells a callback of a user what is logged.

    Args:
        callback: see `callbacks.py`.
    """

    on_every_rank = False

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def on_record(self, trainer: Trainer, record: Mapping[str, object], timing: Mapping[str, object]) -> None:
        """Tell of the numbers of a training interval or an evaluation."""
        del trainer
        numbers = {
            name: float(value)
            for name, value in {**record, **timing}.items()
            if isinstance(value, int | float) and name != "step"
        }
        step = record["step"]
        if not isinstance(step, int):
            return  # no record of ours: `check_record` refuses it
        if record["kind"] == "train":
            self._callback.on_log(step, numbers)
        elif record["kind"] == "valid":
            self._callback.on_evaluate(step, numbers)

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        """Tell of the end."""
        del trainer
        self._callback.on_end(result.steps, result.summary)

    def __repr__(self) -> str:
        return f"{super().__repr__()} of {type(self._callback).__module__}.{type(self._callback).__qualname__}"
