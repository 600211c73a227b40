"""Our side where data come from disk: `Trainer.fit` itself, in turns. A worker.

The whole loop runs: shuffled loader with its background thread, step, sample ledger, log, progress. It takes a batch
only when a turn allows it, so that rounds can interleave; the wait for the batch counts.

Settings: `folder`: an `EncodedDataset`; and those of `ours.py` (precision, compile, kernel).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.ours import build, describe, training_config
from benchmarks.worker import Turns, serve
from benchmarks.workload import Workload
from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.data.source import LoaderSource
from ziggurat.features.batch import Batch
from ziggurat.ops.lookup import KernelChoice
from ziggurat.training.trainer import Trainer


class OurTrainer:
    """`Trainer.fit`, held before each batch until it may go on."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        model = build(workload, kernel=KernelChoice(str(settings.get("kernel", KernelChoice.AUTO))))
        config = replace(training_config(workload, settings), epochs=10_000)
        self._scratch = tempfile.TemporaryDirectory()
        dataset = EncodedDataset(str(settings["folder"]))
        self.trainer = Trainer(model, config=config, train=dataset, folder=Path(self._scratch.name) / "run")
        self.info = describe(self.trainer.step)

    def loop(self, turns: Turns) -> None:
        """Train until the harness has seen enough."""
        assert isinstance(self.trainer.feed.source, LoaderSource)
        loader = self.trainer.feed.source.loader
        batches = loader.batches

        def held(*, epoch: int, start_row: int = 0) -> Iterator[Batch]:
            for batch in batches(epoch=epoch, start_row=start_row):
                turns.next_step(float(self.trainer.position.step))
                yield batch

        loader.batches = held  # type: ignore[method-assign]
        self.trainer.fit()


if __name__ == "__main__":
    serve(OurTrainer)
