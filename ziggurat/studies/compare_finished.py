"""Finished runs side by side: their test metrics, what differs between their settings, and whether it is by chance.

    runs/a ─┐   same rows, split and labels?  no ──► an error that names what differs
    runs/b ─┴─► evaluations/test.json, config.json, metrics.jsonl ──► metrics, settings that differ, notes
                test rows scored again, where they are still prepared ──► DeLong's test, or paired squared errors

Runs may be compared if they were evaluated on the same test rows: the same raw files or data set, split, bad rows and
labels. Another precision, kernel, number of threads or ranks, machine, version of a library, or other training rows
make the comparison less clean, and are said. No run is trained, and nothing is written into their folders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ziggurat.commands import pasted
from ziggurat.config import flattened
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.files import Format
from ziggurat.models.build import ModelConfig
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.data_record import DataRecord, Rounding
from ziggurat.runs.fingerprint import Difference
from ziggurat.runs.load import load_run
from ziggurat.runs.planning.plan_inputs import prepared_data
from ziggurat.studies.compare_own import main_metric
from ziggurat.studies.compare_report import p_text
from ziggurat.studies.compare_runs import RECORD, label_index
from ziggurat.studies.compare_statistics import row_test_of
from ziggurat.training.computed_with import computed_with, difference_notes, differing
from ziggurat.training.early_stop import best_of
from ziggurat.training.evaluation.evaluate import ordered_batches, scores_of
from ziggurat.training.metrics.metric import OverRows, higher_is_better, metric_of, shown_name
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import RunFolder, read_evaluation

_SAID = ("training.precision", "training.threads", "training.loader.batch-size", "parallel")
_NAMES_ONLY = ("recipe",)
_EXECUTION = ("data.rows-per-group", "data.bad-row-budget", "data.rows-a-group")


FINISHED = Format(name="ziggurat.compared_runs", what="finished runs side by side")


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A finished run, as its folder describes it.

    Args:
        name: the folder as given.
        config: of the run.
        test: test metrics.
        valid: validation metrics.
        num_rows: test rows.
        best_step: step of the weights that were evaluated; 0 if nothing was validated.
        computed_with: precision, machine, versions, as far as known.
        content: digests of its rows and vocabularies, as far as known.
    """

    name: str
    config: RunConfig
    test: dict[str, float]
    valid: dict[str, float]
    num_rows: int
    best_step: int
    computed_with: Mapping[str, str] = field(default_factory=dict)
    content: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RowsTest:
    """The difference of two runs on the same test rows.

    Args:
        first: name of a run.
        second: name of another.
        difference: of the metric, first minus second (for RMSE of the mean squared errors).
        error: its standard error over test rows.
        p: two-sided.
    """

    first: str
    second: str
    difference: float
    error: float
    p: float


@dataclass(frozen=True, kw_only=True)
class FinishedComparison:
    """Runs side by side.

    Args:
        runs: in the order given.
        metric: what they are judged by.
        settings: settings in which they differ: name, and the value of each run.
        tests: for every pair of runs; empty where the test rows are not prepared any more.
        notes: what makes the comparison less clean.
    """

    runs: tuple[FinishedRun, ...]
    metric: str
    settings: tuple[tuple[str, ...], ...]
    tests: tuple[RowsTest, ...]
    notes: tuple[str, ...]

    def tables(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Headings and cells: metrics, tests, settings."""
        sign = -1.0 if higher_is_better(self.metric) else 1.0
        names = list(dict.fromkeys(name for run in self.runs for name in run.test))
        names.sort(key=lambda name: name != self.metric)
        rows = [
            (
                run.name,
                run.config.model.kind,
                *(_number(run.test.get(name)) for name in names),
                f"{run.best_step:,}" if run.best_step else "",
            )
            for run in sorted(self.runs, key=lambda each: sign * each.test.get(self.metric, math.nan))
        ]
        yield ("run", "model", *(f"test {shown_name(name)}" for name in names), "best step"), rows
        tests = [
            (f"{each.first} − {each.second}", f"{each.difference:+.5f} ± {each.error:.5f}", p_text(each.p))
            for each in self.tests
        ]
        what = "mean squared error" if _by_errors(self.metric) else f"test {shown_name(self.metric)}"
        yield ("pair", f"difference of {what}, ± standard error over rows", "p"), tests
        yield ("setting that differs", *(run.name for run in self.runs)), [tuple(row) for row in self.settings]

    def to_json(self) -> dict[str, object]:
        """The comparison as plain data."""
        return {
            "metric": self.metric,
            "runs": [
                {
                    "run": each.name,
                    "num_rows": each.num_rows,
                    "test": each.test,
                    "valid": each.valid,
                    "best_step": each.best_step,
                }
                for each in self.runs
            ],
            "settings": [list(row) for row in self.settings],
            "tests": [dataclasses.asdict(each) for each in self.tests],
            "notes": list(self.notes),
        }


def compare_finished(folders: Sequence[Path], *, models: Sequence[type[ModelConfig]] = ()) -> FinishedComparison:
    """Put finished runs side by side.

    Raises:
        ConfigError: one run alone, or runs on different data.
        MissingFileError: a folder is no run, or its run has no test metrics.
    """
    if len(folders) < 2 or len(set(folders)) < len(folders):
        raise ConfigError(
            expected="folders of two runs or more, each named once",
            found=", ".join(map(str, folders)),
            where="command line",
            ways_out="ziggurat compare runs/first runs/second",
        )
    runs = tuple(_finished(folder, models) for folder in folders)
    leaves = [_compared(run.config) for run in runs]
    for run, other in zip(runs[1:], leaves[1:], strict=True):
        _refuse_other_data(runs[0], leaves[0], run, other)
    _refuse_other_vocabulary(folders, runs)
    names = list(dict.fromkeys(name for each in leaves for name in each if not _is_data(name)))
    rows = [(name, *(each.get(name, "–").strip('"') for each in leaves)) for name in names]
    settings = tuple(row for row in rows if len(set(row[1:])) > 1)
    metric = main_metric(runs[0].config.table_schema)
    data = prepared_data(runs[0].config)
    tests = () if data is None else tuple(_tests(folders, runs, data=data, metric=metric, models=models))
    return FinishedComparison(
        runs=runs, metric=metric, settings=settings, tests=tests, notes=_notes(settings, runs, tested=bool(tests))
    )


def _refuse_run_of_a_study(folder: Path) -> None:
    """Refuse a run that a comparison or a study trained: it keeps no preprocessing, so nothing can be asked of it.

    Raises:
        ConfigError: names a command that trains the same run to be kept.
    """
    if (folder / RECORD).exists():
        config = pasted(RunFolder(folder).config)
        raise ConfigError(
            expected="runs of `ziggurat train`",
            found="a run of a comparison, of tuning or of scaling, whose figures stand in the report of that study",
            where=str(folder),
            ways_out=(
                f"train it as a run of its own: ziggurat train --config {config} --out runs/own",
                "name the models in one comparison: ziggurat compare DATA --models A,B",
            ),
        )


def _finished(folder: Path, models: Sequence[type[ModelConfig]]) -> FinishedRun:
    _refuse_run_of_a_study(folder)
    run = RunFolder(folder)
    config = load_config(folder, models=models)
    ways_out = f"finish it: ziggurat train {pasted(folder)} --resume"
    if run.products.exists():
        ways_out = "pack it again, judged on its own rows: ziggurat quantise RUN --products mx6 --out FOLDER"
    if not run.evaluation("test").exists():
        raise MissingFileError(
            expected="test metrics of a finished run",
            found="none",
            where=str(run.evaluation("test")),
            ways_out=ways_out,
        )
    test = read_evaluation(run.evaluation("test"))
    valid = read_evaluation(run.evaluation("valid")) if run.evaluation("valid").exists() else {"metrics": {}}
    records = [record for record in read_records(run.metrics) if record["kind"] == "valid"]
    metric = config.training.early_stop.metric
    known = [record for record in records if record.get(metric) is not None]
    best = best_of(((record["step"], record[metric]) for record in known), stop=config.training.early_stop)
    return FinishedRun(
        name=str(folder),
        config=config,
        test=test["metrics"],
        valid=valid["metrics"],
        num_rows=test["num_rows"],
        best_step=best,
        computed_with=computed_with(run),
        content=_content_of(run),
    )


def _compared(config: RunConfig) -> dict[str, str]:
    """Settings as text, without names that mean nothing."""
    return {
        name: value
        for name, value in flattened(config).items()
        if name not in _NAMES_ONLY and name not in _EXECUTION and not name.startswith("model.embedding.kernel")
    }


def _is_data(name: str) -> bool:
    return name.startswith(("data.", "dataset.", "table-schema.", "teacher"))


def _refuse_other_data(first: FinishedRun, mine: dict[str, str], other: FinishedRun, theirs: dict[str, str]) -> None:
    """The same rows must have been tested: files, split, labels; features may differ."""
    decisive = ("data.", "dataset.", "teacher", "table-schema.labels", "table-schema.time", "table-schema.weight")
    different = [
        Difference(setting=name, first=mine.get(name, ""), second=theirs.get(name, ""))
        for name in dict.fromkeys([*mine, *theirs])
        if name.startswith(decisive) and name != "dataset.source" and mine.get(name) != theirs.get(name)
    ]
    if different:
        raise _other_data((first, other), "; ".join(map(str, different[:4])))
    name = "data test content"
    same_schema = first.config.table_schema == other.config.table_schema
    if same_schema and name in differing([_comparable(first.content), _comparable(other.content)]):
        raise _other_data((first, other), "the same schema and files, and other test rows: a file changed in between")
    if first.num_rows != other.num_rows:
        raise _other_data((first, other), f"{first.num_rows:,} and {other.num_rows:,} test rows")


def _content_of(run: RunFolder) -> dict[str, str]:
    """Return what the run's rows hold; digests of values that followed the processor say nothing of another run's."""
    record = DataRecord.load(run.data)
    if record is None:
        return {}
    is_exact = record.rounding is Rounding.EXACT
    return {name: value for name, value in record.facts().items() if is_exact or not name.endswith(" content")}


def _comparable(content: Mapping[str, str]) -> dict[str, str]:
    """Digests of values; data that was prepared before there were any has one of its files, which says nothing."""
    return {name: value for name, value in content.items() if not value.startswith("manifest ")}


def _other_data(runs: Sequence[FinishedRun], found: str) -> ConfigError:
    return ConfigError(
        expected="runs that were tested on the same rows",
        found=found,
        where=", ".join(run.name for run in runs),
        ways_out=(
            "train one of them on the data and split of the other",
            "evaluate both on the same file: ziggurat evaluate RUN FILE --json FILE",
        ),
    )


def _by_errors(name: str) -> bool:
    """Return whether the test of a metric compares squared errors."""
    metric = metric_of(name)
    return metric is not None and metric.over_rows is OverRows.SQUARED_ERRORS


def _refuse_other_vocabulary(folders: Sequence[Path], runs: Sequence[FinishedRun]) -> None:
    """Equal schemas that were fitted to other values: the files changed between the runs."""
    found: dict[str, Preprocessing] = {}
    for folder, run in zip(folders, runs, strict=True):
        schema = str(run.config.table_schema)
        path = RunFolder(folder).preprocessing
        fitted = load_preprocessing(path)
        if found.setdefault(schema, fitted).difference(fitted):
            raise _other_data(runs, "the same schema, fitted to different training rows: a file changed in between")


def _tests(
    folders: Sequence[Path],
    runs: Sequence[FinishedRun],
    *,
    data: PreparedData,
    metric: str,
    models: Sequence[type[ModelConfig]] = (),
) -> Iterator[RowsTest]:
    """Tests over rows for every pair; nothing where rows are weighted or runs have other inputs."""
    row_test = row_test_of(metric)
    same_features = len({str(run.config.table_schema) for run in runs}) == 1
    if row_test is None or data.test is None or not same_features or runs[0].config.table_schema.weight:
        return
    parts: list[Any] = []
    for folder in folders:
        run = load_run(folder, models=models)
        if run.preprocessing.difference(data.preprocessing):
            return
        label = label_index(metric, run.model.inputs)
        kept = [
            (batch.labels[:, label].numpy(), scores[:, label])
            for batch, scores in scores_of(run.model, ordered_batches(data.test, batch_size=16_384).batches(epoch=0))
        ]
        labels, scores = (np.concatenate(each) for each in zip(*kept, strict=True))
        known = ~np.isnan(labels)
        parts.append(row_test.parts([scores[known]], labels[known]))
    for index, first in enumerate(runs):
        for other in range(index + 1, len(runs)):
            difference, error, p = row_test.compare(parts[index], parts[other])
            yield RowsTest(first=first.name, second=runs[other].name, difference=difference, error=error, p=p)


def _notes(settings: Sequence[tuple[str, ...]], runs: Sequence[FinishedRun], *, tested: bool) -> tuple[str, ...]:
    notes = [
        f"{name} differs ({', '.join(values)}): a part of the difference may come from it"
        for name, *values in settings
        if name.startswith(_SAID)
    ]
    kernels = [str(run.config.model.embedding.kernel) for run in runs if hasattr(run.config.model, "embedding")]
    if len(set(kernels)) > 1:
        notes.append(f"the kernels of the embeddings differ ({', '.join(kernels)}): sums are rounded in another order")
    apart = ("precision", "threads", "kernel")  # said above, by their settings
    notes += difference_notes(
        [{name: value for name, value in run.computed_with.items() if name not in apart} for run in runs]
    )
    if len({str(run.config.table_schema) for run in runs}) == 1:
        rows = differing([_comparable(run.content) for run in runs])
        notes += [
            f"{name} differs ({', '.join(value[:12] for value in values)}): the runs were trained on other rows"
            for name, values in rows.items()
            if name.startswith(("data train", "data valid"))
        ]
    if not any(name.endswith("seed") for name, *_ in settings) and len(runs) > 1:
        notes.append("one run of each: another seed may turn the order; ziggurat compare RECIPE --seeds 5 tells")
    if not tested:
        notes.append("no test over rows: the test rows are not prepared on this machine, are weighted, or differ")
    return tuple(notes)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"
