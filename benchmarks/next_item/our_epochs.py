"""Our side: `Trainer.fit` of a next-item recipe, in turns. A worker.

Settings: `recipe`, `batch_size`, `threads`. All else is as the recipe says: loader with its thread, step, ledger, log.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.our_trainer import OurTrainer
from benchmarks.worker import serve
from benchmarks.workload import Workload
from ziggurat.embeddings import BatchShape
from ziggurat.models import build_model
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.execute import prepare_run
from ziggurat.training.trainer import Trainer


class OurEpochs(OurTrainer):
    """The trainer of a recipe, held before each batch until it may go on; it never evaluates."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        del workload  # the recipe's data
        config = recipe_named(str(settings["recipe"]))
        loader = replace(config.training.loader, batch_size=int(str(settings["batch_size"])))
        training = replace(config.training, epochs=10_000, evaluate_every=10**9, loader=loader)
        training = replace(training, threads=int(str(settings["threads"])))
        prepared = prepare_run(config)
        model = build_model(config.model, prepared.inputs, seed=0)
        model.embeddings.choose_kernel(BatchShape(batch_size=loader.batch_size))
        self._scratch = tempfile.TemporaryDirectory()
        self.trainer = Trainer(model, config=training, train=prepared.train, folder=Path(self._scratch.name) / "run")
        step = self.trainer.step
        self.info = {"precision": step.precision.value, "reason": step.precision_reason}


if __name__ == "__main__":
    serve(OurEpochs)
