"""Our side where data come from disk: `Trainer.fit` itself, in turns. A worker.

The whole loop runs: shuffled loader with its background thread, step, sample ledger, log, progress. It runs in a
thread of its own and takes a batch only when a turn has given it leave, so that rounds can interleave.

Settings: `folder`: an `EncodedDataset`; and those of `ours.py` (precision, compile, kernel).
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.ours import build, describe, training_config
from benchmarks.worker import serve
from benchmarks.workload import Workload
from ziggurat.data.encoded import EncodedDataset
from ziggurat.features.batch import Batch
from ziggurat.ops.lookup import KernelChoice
from ziggurat.training.trainer import Trainer


class OurTrainer:
    """A running `Trainer.fit`, held at each batch until it may go on."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        from dataclasses import replace

        model = build(workload, kernel=KernelChoice(str(settings.get("kernel", KernelChoice.AUTO))))
        config = replace(training_config(workload, settings), epochs=10_000)
        self._scratch = tempfile.TemporaryDirectory()
        dataset = EncodedDataset(str(settings["folder"]))
        self.trainer = Trainer(model, config=config, train=dataset, folder=Path(self._scratch.name) / "run")
        self._leave, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._hold_batches()
        threading.Thread(target=self._fit, daemon=True).start()
        self.info = describe(self.trainer.step)

    def run(self, steps: int) -> float:
        """Let the trainer take so many steps; returns the step it is at."""
        self._leave.release(steps)
        for _ in range(steps):
            self._done.acquire()
            if self._failure is not None:
                raise self._failure
        return float(self.trainer.position.step)

    def _hold_batches(self) -> None:
        """Make the trainer's loader wait for leave before each batch, and tell when it comes back for the next."""
        batches = self.trainer.loader.batches
        waiting = threading.Event()

        def held(*, epoch: int, start_step: int = 0) -> Iterator[Batch]:
            for batch in batches(epoch=epoch, start_step=start_step):
                if waiting.is_set():
                    self._done.release()
                waiting.set()
                self._leave.acquire()
                yield batch

        self.trainer.loader.batches = held  # type: ignore[method-assign]

    def _fit(self) -> None:
        try:
            self.trainer.fit()
        except BaseException as error:
            self._failure = error
            self._done.release()


if __name__ == "__main__":
    serve(OurTrainer)
