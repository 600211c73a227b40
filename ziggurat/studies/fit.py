"""fit: a table in, a trained run out, in one line; what it does is what the commands do that `data inspect` prints.

    zg.fit(frame, label="bought")
        │
        ├─ inspect_file(frame, label)                    schema, guessed
        ├─ OUT/raw/train.parquet                         rows of a table in memory; files stay where they are
        ├─ train auto --data.train … --schema …          a few models are tried, the best goes on
        └─ load_run(OUT)                                 evaluate, predict, importance, …

With a `model` none is tried: that one is trained, with the settings that its recipe `table_*` has for so many rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ziggurat.arguments import check_arguments
from ziggurat.commands import in_python
from ziggurat.config import override
from ziggurat.data.inspect.inspect_file import Inspection, inspect_file
from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.data.raw.frames import is_frame
from ziggurat.errors import ConfigError, SchemaError, ZigguratError
from ziggurat.features.schema import Schema
from ziggurat.models import MODEL_CONFIGS, ModelConfig, NextItemConfig
from ziggurat.recipes.catalogue import fit_to_rows, table_run, with_soft_start
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.execute import train_run
from ziggurat.runs.kept_frames import SPLITS, frames_by_split, keep_frames, with_kept_frames
from ziggurat.runs.load import Run, load_run
from ziggurat.runs.warm_start.parent import require_run
from ziggurat.studies.first_model import candidates_of, settings_of_models, train_first_model
from ziggurat.training.hooks.hook import Hook, check_hooks
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.report.progress import Progress, show_progress

_ARGUMENTS = ("label", "positive", "out")
# Recipes that errors name, and the configs that stand for them here.
_RECIPE = r"ziggurat train table_(\w+)(?: …)?|(?<=train )table_(\w+)"
_CONFIGS = {each.__dataclass_fields__["kind"].default: each.__name__ for each in MODEL_CONFIGS}


@contextmanager
def _in_words_of_fit() -> Iterator[None]:
    """Name the arguments of `fit` in errors that were written for a command line."""
    try:
        yield
    except ZigguratError as error:
        where = error.where.replace("command line, setting", "fit, argument 'settings',")
        error.where = _in_python(where)
        error.ways_out = tuple(_in_python(way) for way in error.ways_out)
        raise


@check_arguments
@_in_words_of_fit()
def fit(
    data: object,
    label: str = "",
    *,
    positive: str = "",
    out: str | Path | None = None,
    model: ModelConfig | None = None,
    schema: Schema | None = None,
    valid: object = None,
    test: object = None,
    settings: Mapping[str, object] | None = None,
    progress: Progress | None = None,
    hooks: Sequence[Hook] = (),
    warm_start: Run | str | Path | None = None,
) -> Run:
    """Train a first model of a table, and return its run.

    Args:
        data: a frame (polars, pandas, Arrow, a dict of columns), which is kept with the run; or files, as in
            `DataConfig.train`.
        label: the column to predict; "" guesses.
        positive: the value of the label that is the positive ("yes"), all others are not; "" guesses, of two values.
        out: folder of the run; None: the next of runs/fit, runs/fit-2, … that is not there.
        model: trains this one; None tries a few, and trains the best by validation.
        schema: what the columns mean; None guesses, as `inspect_file` does.
        valid: of the same kind as `data`; None: a share of its rows, the latest where there is a time.
        test: likewise.
        settings: as those of `ziggurat train`, without the dashes: {"data.thousands": "comma", "training.epochs": 5}.
        progress: where to show progress; None: a bar, or lines, on standard error. `NoProgress()` shows nothing.
        hooks: take part in every training; see `training/hooks/hook.py`.
        warm_start: a run whose weights this one begins from; its model and schema too, unless others are given.

    Raises:
        ConfigError: `out` holds a run; or data that is neither a frame nor files.
        SchemaError: there is no such column, or no label was found.
        DataError: the table cannot be read, or cannot be trained on.

    Example:
        >>> frame = {"user": ["ann", "bob"] * 200, "price": range(400), "bought": [1, 0, 0, 1] * 100}
        >>> run = zg.fit(frame, label="bought", model=zg.LogisticRegressionConfig(), progress=silent)
        >>> run.scores({"user": ["ann", "bob"], "price": [3, 3]}).shape
        (2, 1)
    """
    progress = show_progress() if progress is None else progress
    own_hooks = check_hooks(hooks, where="fit, argument 'hooks'")
    texts = {} if settings is None else {name: str(value) for name, value in settings.items()}
    given = {split: each for split, each in zip(SPLITS, (data, valid, test), strict=True) if each is not None}
    _check(given)
    if warm_start is not None:
        folder = Path(warm_start.folder if isinstance(warm_start, Run) else warm_start)
        require_run(folder)
        parent = warm_start.config if isinstance(warm_start, Run) else load_config(folder, models=_kinds(model))
        warm_start = folder
        model = parent.model if model is None else model
        schema = parent.table_schema if schema is None else schema
    if model is None and (of_model := settings_of_models(texts)):
        raise ConfigError(
            expected="settings that all models have, where the best of several is looked for",
            found=", ".join(of_model),
            where="fit, argument 'settings'",
            ways_out=("name the model, which takes them: model=zg.DLRMConfig()", f"leave {of_model[0]} out"),
        )
    if model is None and schema is not None and not schema.labels and schema.events is None:
        raise SchemaError(
            expected="a schema with a label: the column to predict",
            found="none",
            where="fit, argument 'schema'",
            ways_out=(
                'dataclasses.replace(schema, labels=(zg.Label(name="COLUMN"),))',
                'leave schema out, and name the column: label="COLUMN"',
            ),
        )
    if schema is None:
        found = _inspected(data, label=label, positive=positive)
        table_schema = found.schema
    else:
        found = None
        table_schema = schema
    if schema is not None and label and label not in {each.column or each.name for each in schema.labels}:
        raise SchemaError(
            expected=f"a schema with the label {label!r}",
            found=", ".join(each.name for each in schema.labels) or "no label",
            where="fit, arguments 'label' and 'schema'",
            ways_out=("leave label out: the schema says it", "leave schema out: it is guessed"),
        )
    if schema is not None and positive:
        said = f"zg.Label(name=…, positive={json.dumps(positive, ensure_ascii=False)})"
        raise SchemaError(
            expected="either a schema, or the positive of a label that is guessed",
            found=f"both, the positive {positive!r}",
            where="fit, arguments 'positive' and 'schema'",
            ways_out=(
                f"leave positive out, and say it in the schema: {said}",
                "leave schema out: it is guessed",
            ),
        )
    run = RunFolder(Path(out) if out is not None else _next_folder(Path("runs")))
    run.refuse_old_run()
    run.refuse_files_of_others()
    run.refuse_unwritable()
    progress.say(f"run: {run.path}")
    frames = frames_by_split(given) if is_frame(data) else None
    if frames is not None:
        keep_frames(frames, run=run)

    def with_data(config: RunConfig) -> RunConfig:
        if frames is not None:
            config = with_kept_frames(config, frames, run=run)
        else:
            files = {split: _names(each) for split, each in given.items()}
            split = dataclasses.replace(config.data.split, by=SplitBy.FILES) if len(given) > 1 else config.data.split
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, split=split, **files))
        # What the rows decide follows data and model; a setting of training replaces its own value alone.
        said = {name: text for name, text in texts.items() if not name.startswith("training.")}
        by_rows = override(fit_to_rows(override(config, _settings(found) | said)), texts)
        return override(with_soft_start(by_rows), texts)

    if model is None and table_schema.events is not None:
        raise ConfigError(
            expected="a model of events: none is chosen by itself",
            found="a schema with [events]",
            where="fit, argument 'model'",
            ways_out="fit(data, model=zg.NextItemConfig())",
        )
    if model is None:
        candidates = candidates_of(table_schema, change=with_data)
        train_first_model(candidates, folder=run.path, progress=progress, hooks=own_hooks)
        return load_run(run.path)
    config = with_data(table_run(model, table_schema))
    train_run(config, folder=run.path, progress=progress, hooks=own_hooks, warm_start=warm_start)
    return load_run(run.path, models=_kinds(model))


def _kinds(model: ModelConfig | None) -> tuple[type[ModelConfig], ...]:
    """Return the class of a model of the user's own."""
    return () if model is None or type(model) in MODEL_CONFIGS else (type(model),)


def _in_python(text: str) -> str:
    """Turn the words of a command line into those of `fit`; commands that do something else stay as they are."""
    text = text.removesuffix("; for a trained run --bad-rows quarantine")
    text = text.replace("name the recipe", "name the model").replace("name a recipe", "name a model")
    text = re.sub(_RECIPE, _as_model, text)
    return in_python(text, arguments=_ARGUMENTS, settings="settings")


def _as_model(found: re.Match[str]) -> str:
    config = _CONFIGS.get(found[1] or found[2], NextItemConfig.__name__)
    return f"model=zg.{config}()"


def _inspected(data: object, *, label: str, positive: str) -> Inspection:
    """The guess for a table, or for the first of its files, which must have found a label."""
    first = data[0] if isinstance(data, Sequence) and not isinstance(data, str) else data
    found = inspect_file(first, label=label, positive=positive)
    if found.schema.labels or found.schema.events is not None:
        return found
    raise SchemaError(
        expected="a column to predict",
        found="none that looks like one, of " + ", ".join(column.column for column in found.columns[:30]),
        where="fit, argument 'label'",
        ways_out=('name it: fit(data, label="COLUMN")', "say more with a schema: fit(data, schema=zg.Schema(…))"),
    )


def _check(given: dict[str, object]) -> None:
    """Refuse what is neither a frame nor files, and both together."""
    for split, data in given.items():
        name = "data" if split == "train" else split
        names = [data] if isinstance(data, str | os.PathLike) else data
        are_files = (
            isinstance(names, Sequence) and bool(names) and all(isinstance(it, str | os.PathLike) for it in names)
        )
        if not is_frame(data) and not are_files:
            raise ConfigError(
                expected="a frame (polars, pandas, Arrow, a dict of columns), or names of files",
                found=type(data).__name__,
                where=f"fit, argument {name!r}",
                ways_out=('zg.fit(frame, label="bought")', 'zg.fit("shop.parquet", label="bought")'),
            )
    if len({is_frame(data) for data in given.values()}) > 1:
        raise ConfigError(
            expected="frames for all splits, or files for all",
            found=", ".join(f"{split}: {'a frame' if is_frame(data) else 'files'}" for split, data in given.items()),
            where="fit, arguments 'data', 'valid' and 'test'",
            ways_out="read the files into frames: polars.read_parquet(FILE)",
        )


def _names(data: Any) -> tuple[str, ...]:
    return (os.fspath(data),) if isinstance(data, str | os.PathLike) else tuple(map(os.fspath, data))


def _settings(found: Inspection | None) -> dict[str, str]:
    """Return the guess of how a text file is read, as settings of a run."""
    words = () if found is None else found.settings()
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def _next_folder(parent: Path) -> Path:
    """The first of fit, fit-2, … that is not there."""
    names = itertools.chain(["fit"], (f"fit-{number}" for number in itertools.count(2)))
    return next(parent / name for name in names if not (parent / name).exists())
