"""first_look: what can be said of an export before its runs are loaded: paths, columns, labels, the formula's syntax.

Models, tables and raw rows take minutes to load and read; a misspelt option should take a second. Everything that is
refused here would be refused later, too, by the code that needs it: this look is early, not another rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from ziggurat.config import from_json
from ziggurat.data.catalogue import item_columns
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import Schema, column_of
from ziggurat.models.build import ModelConfig
from ziggurat.models.contract.reads import finds_items
from ziggurat.models.retrieval.over_arch import OverArchKind
from ziggurat.models.retrieval.two_tower_choices import UserVectors
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.data_paths import located
from ziggurat.runs.execute import raw_files
from ziggurat.runs.export.histories_of_ranker import refuse_absent
from ziggurat.runs.export.value_choice import AUTO
from ziggurat.serving.answering.chain import OVER_ARCH, RETRIEVAL
from ziggurat.serving.value_model.formula import ValueModel
from ziggurat.training.records.run_folder import INPUTS, RunFolder
from ziggurat.training.report.progress import Progress
from ziggurat.typed import nearest


@dataclass(frozen=True, kw_only=True)
class RunsSeen:
    """The facts about an export that the folders of the runs give.

    Args:
        scores: what a formula may name beside columns of the catalogue: labels of the ranker, products of vectors.
        schemas: of the runs, the one that retrieves first.
        raw: the raw files of the first run.
    """

    scores: tuple[str, ...]
    schemas: tuple[Schema, ...]
    raw: RawSource


def look_at_runs(
    run: str | Path, *, ranker: str | Path | None, models: Sequence[type[ModelConfig]], progress: Progress
) -> RunsSeen:
    """Return what the runs are, and the raw files of the first.

    Args:
        run: folder of the run.
        ranker: folder of the ranking run, or None.
        models: config classes of the caller's own.
        progress: says what is fetched.

    Raises:
        MissingFileError: a run or a raw file is not there.
        ConfigError: the second run is none that ranks, or none that ranks what the first finds.
    """
    folders = [Path(each) for each in (run, ranker) if each is not None]
    configs = [load_config(folder, models=models) for folder in folders]
    if ranker is not None and finds_items(configs[1].model):
        raise ConfigError(
            expected="a ranking run",
            found=f"{ranker}, whose scores are inner products",
            where="ziggurat export, --ranker",
            ways_out="name the run of a ranking model: dlrm, dcn_v2, …",
        )
    source = _source(configs[0], folders[0], progress)
    if len(configs) > 1 and configs[1].table_schema.events is not None:
        where = f"ziggurat export {run} --ranker {ranker}"
        refuse_absent(*(config.table_schema for config in configs), columns=source.columns(), where=where)
    scores: list[str] = []
    for folder, config in zip(folders, configs, strict=True):
        labels = [label.name for label in _inputs(folder).labels]
        scores += _products(config.model, labels) if finds_items(config.model) else labels
    schemas = tuple(config.table_schema for config in configs)
    return RunsSeen(scores=tuple(scores), schemas=schemas, raw=source)


def check_asked(seen: RunsSeen, *, value: str, keep: Sequence[str], items: Sequence[str]) -> None:
    """Refuse options that cannot be fulfilled.

    Args:
        seen: of the runs.
        value: the formula, "auto" or "".
        keep: further columns of the catalogue.
        items: files of a catalogue of the user's own, or none.

    Raises:
        MissingFileError: a file of items is not there.
        ConfigError: a column to keep is not there, or the formula cannot be read or names what nothing has.
    """
    source = RawSource(list(items)) if items else seen.raw
    where = str(source.paths[0]) if items else "the raw files of the run"
    there = list(source.columns())
    for name in keep:
        if name not in there:
            raise ConfigError(
                expected=f"columns to keep that are there: {', '.join(there[:40])}",
                found=repr(name),
                where=f"{where}, --keep",
                ways_out=nearest(name, there, instead="leave it out"),
            )
    if value not in ("", AUTO):
        described = [schema for schema in seen.schemas if schema.items is not None]
        of_items = [name for schema in described for name in item_columns(schema)]
        kept = there if items and not keep else [*of_items, *keep]
        numbers = _numeric(source, schemas=seen.schemas, names=kept) if described else []
        ValueModel(value, names=dict.fromkeys((*seen.scores, *numbers)), where="--value")


def _products(model: object, labels: Sequence[str]) -> list[str]:
    """List what formulas may name of a model that retrieves."""
    has_over_arch = getattr(getattr(model, "over_arch", None), "kind", OverArchKind.NONE) is not OverArchKind.NONE
    of_tasks = getattr(model, "user_vectors", UserVectors.SHARED) is not UserVectors.SHARED
    names = [RETRIEVAL, OVER_ARCH] if has_over_arch else [RETRIEVAL]
    return [*names, *(f"retrieval_{label}" for label in labels if of_tasks)]


def _numeric(source: RawSource, *, schemas: Sequence[Schema], names: Sequence[str]) -> list[str]:
    """Those columns that may be numbers in a catalogue, as `typed_columns` makes it."""
    # From the end, so that of several features that read a column the first one counts.
    features = {column_of(each): each for schema in reversed(schemas) for each in reversed(schema.features)}
    kinds = source.columns()
    is_text = source.is_text(source.paths[0])
    found = []
    for name in names:
        kind = kinds.get(name)
        feature = features.get(name)
        is_number = kind is not None and kind.is_numeric()
        may_be = kind == pl.String and (is_text if feature is None else feature.reads_numbers)
        if is_number or may_be:
            found.append(name)
    return found


def _inputs(folder: Path) -> InputSpec:
    path = RunFolder(folder).inputs
    return from_json(InputSpec, INPUTS.read(path), where=str(path))


def _source(config: RunConfig, folder: Path, progress: Progress) -> RawSource:
    data = raw_files(located(config, folder=folder), progress=progress)
    return RawSource(list(data.train), format=data.format, text=data.text)
