"""first_look: what can be said of an export before its runs are loaded: paths, columns, labels, the formula's syntax.

Models, tables and raw rows take minutes to load and read; a misspelt option should take a second. Everything that is
refused here would be refused later, too, by the code that needs it: this look is early, not another rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ziggurat.config import from_json
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.data_paths import located
from ziggurat.runs.execute import raw_files
from ziggurat.runs.export.value_choice import AUTO
from ziggurat.serving.answering.chain import OVER_ARCH, RETRIEVAL
from ziggurat.serving.value_model.formula import ValueModel
from ziggurat.training.records.run_folder import INPUTS, RunFolder
from ziggurat.training.report.progress import Progress
from ziggurat.typed import nearest


def look_at_runs(
    run: str | Path, *, ranker: str | Path | None, models: Sequence[type[Any]], progress: Progress
) -> tuple[list[str], list[str]]:
    """The labels of the runs, and the columns of the first one's raw files.

    Args:
        run: folder of the run.
        ranker: folder of the ranking run, or None.
        models: config classes of the caller's own.
        progress: says what is fetched.

    Raises:
        MissingFileError: a run or a raw file is not there.
        ConfigError: the second run is none that ranks.
    """
    folders = [Path(each) for each in (run, ranker) if each is not None]
    configs = [load_config(folder, models=models) for folder in folders]
    if ranker is not None and getattr(configs[1].model, "finds_items", False):
        raise ConfigError(
            expected="a ranking run",
            found=f"{ranker}, whose scores are inner products",
            where="ziggurat export, --ranker",
            ways_out="name the run of a ranking model: dlrm, dcn_v2, …",
        )
    labels = [label.name for folder in folders for label in _inputs(folder).labels]
    return labels, list(_source(configs[0], folders[0], progress).columns())


def check_asked(
    *, value: str, labels: Sequence[str], keep: Sequence[str], items: Sequence[str], columns: Sequence[str]
) -> None:
    """Refuse options that cannot be fulfilled.

    Args:
        value: the formula, "auto" or "".
        labels: of the runs.
        keep: further columns of the catalogue.
        items: files of a catalogue of the user's own, or none.
        columns: of the run's raw files.

    Raises:
        MissingFileError: a file of items is not there.
        ConfigError: a column to keep is not there, or the formula cannot be read or names what nothing has.
    """
    if items:
        source = RawSource(list(items))
        where, there = str(source.paths[0]), list(source.columns())
    else:
        where, there = "the raw files of the run", list(columns)
    for name in keep:
        if name not in there:
            raise ConfigError(
                expected=f"columns to keep that are there: {', '.join(there[:40])}",
                found=repr(name),
                where=f"{where}, --keep",
                ways_out=nearest(name, there, instead="leave it out"),
            )
    if value not in ("", AUTO):
        of_tasks = [f"retrieval_{label}" for label in labels]
        ValueModel(value, names=dict.fromkeys((*labels, RETRIEVAL, OVER_ARCH, *of_tasks, *there)), where="--value")


def _inputs(folder: Path) -> InputSpec:
    path = RunFolder(folder).inputs
    return from_json(InputSpec, INPUTS.read(path), where=str(path))


def _source(config: RunConfig, folder: Path, progress: Progress) -> RawSource:
    data = raw_files(located(config, folder=folder), progress=progress)
    return RawSource(list(data.train), format=data.format, text=data.text)
