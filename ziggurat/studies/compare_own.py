"""Data and settings of one's own to compare models on: a recipe, its schema, and what the command line changes.

    ziggurat compare table --data.train shop.csv --schema my.toml --models dnn,dcn_v2 --epochs 2 --dim 32

Every model gets the data, split, tables and training settings of the recipe. `--training.…` and `--data.…` hold for all
of them; `--model.…` for those that have such a setting, and at least one must. Sizes that differ between models are
those of the recipes `table_…`, and the recipe's own model keeps its own.

What is compared is the metric that training stops by, if the command line names one, else that of the first label: AUC,
or RMSE for numbers; of event logs the hit rate at 10 among all items.

`ziggurat compare sequences` is `movielens_hstu` under another name. Beside a next-item model the published ones can be
named: sasrec, gsasrec, esasrec, hstu_research, stu, … (`recipes/next_item.py`). Rankers named beside them are asked
another question of the same log (`compare_questions.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ziggurat.config import override, settings
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema import Schema, Task
from ziggurat.models import MODEL_CONFIGS, ModelConfig
from ziggurat.models.build import kind_of
from ziggurat.models.sequence.next_item import NextItemConfig
from ziggurat.parallel.device import Device
from ziggurat.recipes.catalogue import fit_to_rows, table_model
from ziggurat.recipes.history_rankers import history_rankers
from ziggurat.recipes.model_settings import nearest_model
from ziggurat.recipes.next_item import next_item_variants
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training import metrics
from ziggurat.training.delayed_losses import DelayedLoss
from ziggurat.training.distillation import DistilHead
from ziggurat.training.metrics.accumulator import has_metrics
from ziggurat.training.metrics.metric import Metric, deciding, loss_metric

_METRIC_SETTING = "training.early_stop.metric"


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """The data and settings that a recipe, a config or a table of one's own gives to every model of a comparison.

    Args:
        name: in folders and titles.
        run: data, schema, model and training, with the settings that hold for all models.
        model_changes: settings of models, dotted path below `model` to text.
        training_changes: settings of training, dotted path below `training` to text; `run` has them already.
        metric: what decides; "" for that of the first label.
    """

    name: str
    run: RunConfig
    model_changes: tuple[tuple[str, str], ...] = ()
    training_changes: Mapping[str, str] = field(default_factory=dict)
    metric: str = ""

    def __post_init__(self) -> None:
        refuse_what_runs_do_not_follow(self.run)


def refuse_what_runs_do_not_follow(run: RunConfig) -> None:
    """Refuse settings that the runs of a comparison, of tuning and of scaling would leave out without a word.

    Raises:
        ConfigError: the model is to learn from teachers, from late labels, from another run or in towers, or on a GPU.
    """
    idle = {
        "--distil none": run.distil.head is not DistilHead.NONE,
        "--delayed.loss none": run.delayed.loss is not DelayedLoss.NONE,
        "--warm-start.run ''": bool(run.warm_start.run),
        "--towers none": run.towers is not None,
        "--device cpu": run.device is Device.CUDA,
    }
    ways = [way for way, is_set in idle.items() if is_set]
    if ways:
        found = ", ".join(way.split()[0].removeprefix("--").replace("-", "_") for way in ways)
        raise ConfigError(
            expected="a run whose models learn from labels alone, from drawn weights, flat and on the CPU",
            found=f"settings of {found}",
            where="data and settings of a comparison, of tuning or of scaling",
            ways_out=(
                f"compare without them: {' '.join(ways)}",
                "train each with `ziggurat train`, and set the finished runs side by side: ziggurat compare RUN RUN",
            ),
        )


def settings_for_rows(data: OwnData) -> str:
    """Say that a study trains by settings for many rows, where `ziggurat train` would take others for these few.

    Returns:
        "" where the settings are those of `train`, or were given.
    """
    try:
        fitted = fit_to_rows(data.run).training
    except DataError:  # said where the files are read
        return ""
    given = data.run.training
    if fitted == given:
        return ""
    flags = (
        f"--batch-size {fitted.loader.batch_size} --epochs {fitted.epochs} --patience {fitted.early_stop.patience} "
        f"--training.early-stop.min-steps {fitted.early_stop.min_steps}"
    )
    return (
        f"all models are trained by settings for many rows: batches of {given.loader.batch_size:,}, {given.epochs} "
        f"epochs; for so few rows `ziggurat train` takes others: {flags}, and sparse Adam on tables"
    )


def own_data(run: RunConfig, changes: Mapping[str, str], *, name: str = "") -> OwnData:
    """The data and settings that a recipe and the command line give.

    Args:
        run: of a recipe.
        changes: settings as `override` takes them.
        name: "" for that of the recipe, or of the file for a table.

    Raises:
        ConfigError: a setting that cannot be.
    """
    plain = {path.replace("-", "_"): text for path, text in changes.items()}
    of_models = {path.removeprefix("model."): text for path, text in plain.items() if path.startswith("model.")}
    others = {path: text for path, text in plain.items() if not path.startswith("model.")}
    run = override(run, others)
    files = run.data.train
    is_table = run.recipe.startswith("table_") and bool(files)
    name = name or (Path(files[0]).name.split(".")[0] if is_table else run.recipe) or "run"
    training = {path.removeprefix("training."): text for path, text in others.items() if path.startswith("training.")}
    return OwnData(
        name=name,
        run=run,
        model_changes=tuple(of_models.items()),
        training_changes=training,
        metric=plain.get(_METRIC_SETTING, ""),
    )


def own_models(
    names: Sequence[str], own_data: OwnData, *, own: Sequence[type[ModelConfig]] = ()
) -> dict[str, ModelConfig]:
    """Settings of the named models: the recipe's width and tables, each model's own sizes, then the changes.

    Args:
        names: kinds of built-in models, of the recipe's own, and of `own`.
        own_data: what to compare on.
        own: config classes of your own.

    Raises:
        ConfigError: no such model, or a setting that none of the models has.
    """
    first = own_data.run.model
    known = {kind_of(each): table_model(each) for each in MODEL_CONFIGS} | {kind_of(each): each() for each in own}
    known[first.kind] = first
    if isinstance(first, NextItemConfig):
        known |= next_item_variants(first)
    if own_data.run.table_schema.events is not None and own_data.run.table_schema.labels:
        known |= {
            name: model for name, model in history_rankers(own_data.run.table_schema).items() if name != first.kind
        }
    for name in names:
        if name not in known:
            raise ConfigError(
                expected="models out of " + ", ".join(known),
                found=repr(name),
                where="ziggurat compare, --models",
                ways_out=(
                    *(f"did you mean {near!r}?" for near in nearest_model(name, known)),
                    "separate them by commas: --models dnn,dcn_v2,wukong",
                ),
            )
    models = {name: _like(known[name], first) for name in names}
    for path, text in own_data.model_changes:
        having = [name for name, model in models.items() if _has(model, path)]
        if not having:
            override(next(iter(models.values())), {path: text}, where=f"command line, --model.{path}")  # says what is
        for name in having:
            models[name] = override(models[name], {path: text})
    return models


def main_metric(schema: Schema) -> str:
    """Choose the metric to judge by: AUC of the first label, RMSE if it is a number; hit rate at 10 of a next item."""
    if schema.events is not None and not schema.labels:
        return metrics.OF_RANKING
    return _of_first_label(schema, deciding)


def main_loss(schema: Schema) -> str:
    """Name what falls by a law as models grow: the log loss of the first label, or its RMSE if it is a number."""
    return _of_first_label(schema, loss_metric)


def _of_first_label(schema: Schema, choose: Callable[[Task], Metric]) -> str:
    first = next(filter(has_metrics, schema.labels), schema.labels[0])
    name = choose(first.task).name
    return name if len(schema.labels) == 1 else f"{name}/{first.name}"


def _like(model: ModelConfig, first: ModelConfig) -> ModelConfig:
    """The same width and kind of tables as another model's, where both have one."""
    if type(model) is type(first):
        return model
    same = {name: getattr(first, name) for name in ("embedding_dim", "embedding") if _both_have(model, first, name)}
    return dataclasses.replace(model, **same)


def _both_have(model: ModelConfig, other: ModelConfig, name: str) -> bool:
    return all(name in {entry.name for entry in dataclasses.fields(each) if entry.init} for each in (model, other))


def _has(model: ModelConfig, path: str) -> bool:
    return path.replace("_", "-") in {each for each, _, _ in settings(model)}
