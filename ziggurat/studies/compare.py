"""Compare models: the same data, the same protocol, the same budget; chosen by validation data, test data read last.

    for each model:   K variants, seed 0  ──►  the best by validation  ──►  seeds 0 … S−1  ──►  test, once a run
                      (`--trials K`)                                        (`--seeds S`)

Every run lives in a folder of its own, OUT/<data>-<protocol>/<model>/variant<k>_seed<s>. A comparison that is stopped
or killed goes on where it was when it is called again; finished runs are read, not repeated. Asking for more seeds or
more models later trains what is missing. A run that was made with other settings than those asked for is an error, not
a silent reuse, and so is a folder that holds runs of another protocol.

Its result is means and sample standard deviations over seeds, costs, and for every pair of models the paired difference
with its tests (`compare_statistics.py`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.prepare import PreparedData
from ziggurat.errors import ConfigError
from ziggurat.recipes.protocols import (
    Protocol,
    averaged,
    bars_model,
    bars_training,
    require_one_protocol,
    scale_model,
    scale_training,
)
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run
from ziggurat.studies.compare_data import ComparedData, data_run
from ziggurat.studies.compare_runs import RunRecord, RunRequest, finish_run, test_scores
from ziggurat.studies.compare_settings import VARIANTS, ModelSettings, settings_of, variant
from ziggurat.studies.compare_statistics import PairedDifference, delong, paired_difference, placements
from ziggurat.training.progress import NoProgress, Progress


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What to compare.

    Args:
        data: the data set.
        models: names, as `compare_settings.py` lists them.
        seeds: S, runs of each chosen model.
        trials: K, variants of each model that validation data chooses from; 1: the settings as they are.
        protocol: how all of them are trained.
        source: folder or file of the raw data; "" for the cache or the default source.
        rows: of the synthetic data.
        threads: of each run; sums depend on it.
        max_epochs: fewer epochs than the protocol's, for trying things out; 0: the protocol's.
    """

    data: ComparedData
    models: tuple[str, ...]
    seeds: int = 5
    trials: int = 1
    protocol: Protocol = Protocol.BARS
    source: str = ""
    rows: int = 1_000_000
    threads: int = 1
    max_epochs: int = 0

    def __post_init__(self) -> None:
        doubled = len(set(self.models)) != len(self.models)
        fits = self.models and not doubled and self.seeds >= 1 and 1 <= self.trials <= len(VARIANTS)
        if not fits or self.threads < 1 or self.max_epochs < 0:
            raise ConfigError(
                expected=f"models, each named once; seeds >= 1, trials of 1 … {len(VARIANTS)}, threads >= 1",
                found=f"models = {','.join(self.models)}, seeds = {self.seeds}, trials = {self.trials}, "
                f"threads = {self.threads}, max_epochs = {self.max_epochs}",
                where="settings of a comparison",
                ways_out="correct the number or the list",
            )


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """One model's place in a comparison.

    Args:
        name: of the model.
        variant: the variant that validation data chose.
        trials: validation AUC of every variant tried.
        runs: one record a seed.
        folders: of the runs.
    """

    name: str
    variant: int
    trials: dict[int, float]
    runs: tuple[RunRecord, ...]
    folders: tuple[Path, ...]

    def values(self, metric: str, *, split: str = "test") -> list[float]:
        """A metric of every seed."""
        return [(run.test if split == "test" else run.valid)[metric] for run in self.runs]

    def mean_sd(self, metric: str, *, split: str = "test") -> tuple[float, float]:
        """Mean and sample standard deviation over seeds (NaN for one seed)."""
        values = self.values(metric, split=split)
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison found.

    Args:
        config: what was asked for.
        models: in the order asked for.
        differences: first minus second test AUC, for every pair (first, second) in that order.
    """

    config: CompareConfig
    models: tuple[ComparedModel, ...]
    differences: dict[tuple[str, str], PairedDifference] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data: everything but the folders."""
        return {
            "config": {key: _plain(value) for key, value in dataclasses.asdict(self.config).items()},
            "models": [
                {"name": m.name, "variant": m.variant, "trials": m.trials, "runs": [run.to_json() for run in m.runs]}
                for m in self.models
            ],
            "differences": [
                {"first": first, "second": second}
                | {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in dataclasses.asdict(d).items()}
                for (first, second), d in self.differences.items()
            ],
        }


def compare(config: CompareConfig, *, out: str | Path, progress: Progress | None = None) -> Comparison:
    """Run what is missing, and put everything together.

    Args:
        config: what to compare.
        out: folder of all comparisons.
        progress: where to show it.

    Raises:
        ConfigError: unknown model; runs of other settings or of another protocol in the folder.
    """
    progress = progress or NoProgress()
    base = data_run(config.data, source=config.source, rows=config.rows)
    chosen = {name: settings_of(name, config.data) for name in config.models}  # unknown names fail before any work
    data = prepare_run(base, progress=progress)
    torch.set_num_threads(config.threads)
    place = _Place(config, base=base, folder=Path(out) / f"{config.data.value}-{config.protocol.value}", data=data)
    place.refuse_other_protocols()
    models = []
    for number, (name, settings) in enumerate(chosen.items(), start=1):
        progress.say(f"[{number}/{len(chosen)}] {name}")
        models.append(_compare_one(place, name, settings, progress=progress))
    return Comparison(config=config, models=tuple(models), differences=differences(models))


def differences(models: Sequence[ComparedModel]) -> dict[tuple[str, str], PairedDifference]:
    """Paired differences of test AUC between all models, over seeds and over rows."""
    parts = {}
    for model in models:
        loaded = [test_scores(folder) for folder in model.folders]
        parts[model.name] = placements([scores for scores, _ in loaded], loaded[0][1])
    found = {}
    for index, first in enumerate(models):
        for second in models[index + 1 :]:
            _, error, p = delong(parts[first.name], parts[second.name])
            over_seeds = paired_difference(first.values("auc"), second.values("auc"))
            found[first.name, second.name] = dataclasses.replace(over_seeds, rows_p=p, rows_error=error)
    return found


class _Place:
    """Folder and data of one comparison."""

    def __init__(self, config: CompareConfig, *, base: RunConfig, folder: Path, data: PreparedData) -> None:
        self.config, self.base, self.folder, self.data = config, base, folder, data

    def request(self, name: str, settings: ModelSettings, *, index: int, seed: int) -> RunRequest:
        """The run of one variant and seed."""
        config = self.config
        if config.protocol is Protocol.SCALE:
            model, training = scale_model(settings.model), scale_training(num_rows=self.data.train.num_rows)
        else:
            model, training = bars_model(settings.model), bars_training(embedding_l2=settings.embedding_l2)
            training = averaged(training) if config.protocol is Protocol.BARS_AVERAGED else training
        loader: LoaderConfig = dataclasses.replace(training.loader, seed=seed)
        training = dataclasses.replace(training, seed=seed, threads=config.threads, loader=loader)
        if config.max_epochs:
            training = dataclasses.replace(training, epochs=min(training.epochs, config.max_epochs))
        run = dataclasses.replace(
            self.base, recipe=f"compare_{config.data.value}_{name}", model=model, training=training
        )
        return RunRequest(
            model=name, variant=index, config=run, folder=self.folder / name / f"variant{index}_seed{seed}"
        )

    def refuse_other_protocols(self) -> None:
        """Runs of another protocol must not have come into this folder."""
        found = []
        for path in sorted(self.folder.glob("*/*/run.json")):
            record = RunRecord.load(path.parent)
            if record is not None and record.protocol != self.config.protocol.value:
                found.append(f"{path.parent}: {record.protocol}")
        if found:
            raise ConfigError(
                expected=f"runs of the protocol {self.config.protocol.value} alone",
                found="; ".join(found[:3]),
                where=str(self.folder),
                ways_out=("move them away", "choose another folder: --out FOLDER"),
            )


def _compare_one(place: _Place, name: str, settings: ModelSettings, *, progress: Progress) -> ComparedModel:
    config = place.config
    trials: dict[int, float] = {}
    if config.trials > 1:
        for index in range(config.trials):
            request = place.request(name, variant(settings, index), index=index, seed=0)
            progress.say(f"{name}: variant {index + 1} of {config.trials}, by validation data")
            record = finish_run(request, data=place.data, read_test=False, progress=progress)
            trials[index] = record.valid["auc"]
    index = max(trials, key=lambda key: trials[key], default=0)
    requests = [place.request(name, variant(settings, index), index=index, seed=seed) for seed in range(config.seeds)]
    require_one_protocol([(name, request.config) for request in requests])
    runs = []
    for number, request in enumerate(requests, start=1):
        progress.say(f"{name}: seed {number} of {config.seeds}")
        runs.append(finish_run(request, data=place.data, read_test=True, progress=progress))
    folders = tuple(request.folder for request in requests)
    return ComparedModel(name=name, variant=index, trials=trials, runs=tuple(runs), folders=folders)


def _plain(value: Any) -> Any:
    return getattr(value, "value", list(value) if isinstance(value, tuple) else value)
