"""Callbacks: what a training run tells others while it goes on, for trackers such as W&B and MLflow.

    trainer.fit(callbacks=[WandbCallback(project="shop")])       or zg.train_run(config, folder=…, callbacks=[…])

    on_log        each `log_every` steps: loss, learning rate, samples/s
    on_evaluate   after each evaluation of validation data: its metrics
    on_end        once, with the best step, after the best weights came back

A callback sees numbers and changes none: a run with callbacks has the same bits as one without. On many ranks only the
first rank calls them. Whoever wants more than these numbers (steps, weights, checkpoints) writes a hook
(`hooks/hook.py`). The trackers' packages are not required; an adapter whose package is missing says so when it is made,
before anything is trained. metrics.jsonl and TensorBoard are written in any case.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Protocol

from ziggurat.errors import ConfigError


class Callback(Protocol):
    """The methods that a run calls."""

    def on_log(self, step: int, values: dict[str, float]) -> None:
        """Training loss (mean since the last call), learning rate and rate of training."""
        ...

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Validation metrics; those that are not finite are left out."""
        ...

    def on_end(self, step: int, summary: dict[str, float]) -> None:
        """The run is over: `best_step`, `best_value` if there was an evaluation, `steps`."""
        ...


class WandbCallback:
    """Sends a run to Weights & Biases, through its own package `wandb`.

    Args:
        settings: of `wandb.init`: project, name, config …

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, **settings: object) -> None:
        self._run = _imported("wandb").init(**settings)

    def on_log(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers as `train/…`."""
        self._run.log({f"train/{name}": value for name, value in values.items()}, step=step)

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics as `valid/…`."""
        self._run.log({f"valid/{name}": value for name, value in metrics.items()}, step=step)

    def on_end(self, step: int, summary: dict[str, float]) -> None:
        """Into the summary; the run is finished."""
        self._run.summary.update(summary)
        self._run.finish()


class MlflowCallback:
    """Sends a run to MLflow, through its own package `mlflow`.

    Args:
        settings: of `mlflow.start_run`: run_name, experiment_id …

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, **settings: object) -> None:
        self._mlflow = _imported("mlflow")
        self._mlflow.start_run(**settings)

    def on_log(self, step: int, values: dict[str, float]) -> None:
        """Log the numbers as `train.…`."""
        self._log("train", values, step)

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics as `valid.…`; the slash before a label becomes a dot."""
        self._log("valid", metrics, step)

    def on_end(self, step: int, summary: dict[str, float]) -> None:
        """Log the summary as `summary.…`, and end the run."""
        self._log("summary", summary, step)
        self._mlflow.end_run()

    def _log(self, group: str, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(
            {f"{group}.{name}".replace("/", "."): each for name, each in values.items()}, step=step
        )


def _imported(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            expected=f"the package {package}, which sends a run to its tracker",
            found=f"it cannot be imported: {error}",
            where="callbacks of a run",
            ways_out=(
                f"install it: pip install {package}",
                "leave the callback out: metrics.jsonl, TensorBoard and the report are written anyway",
            ),
        ) from error
