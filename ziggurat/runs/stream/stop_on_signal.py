"""StopOnSignal: end a stream without an error at SIGTERM or Ctrl-C, after its present step and with a checkpoint.

A second signal of either kind ends it at once, as a kill would: nothing is lost but the steps since the last
checkpoint, which are made again.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

from ziggurat.files.streams import say
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.trainer import Trainer

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(Hook):
    """Ends training after the present step once a signal has come, inside of a `with` block on the main thread."""

    may_stop = True
    on_every_rank = False  # a launcher tells all ranks, one after the other: the first decides for all of them

    def __init__(self) -> None:
        self.is_asked = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            try:
                self._before[number] = signal.signal(number, self._on_signal)
            except ValueError:  # another thread than the main one gets no signals
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_handlers()

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """End training if somebody has asked for it."""
        del made
        if self.is_asked:
            trainer.stop("asked to end")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.is_asked = True
        self._restore_handlers()
        say("\nthe stream ends after the present step, with a checkpoint; a second signal ends it at once\n")

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # what `signal.signal` gave
        self._before = {}
