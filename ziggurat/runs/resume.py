"""What a resumed run goes on with: everything as it was stored, but for settings that may change.

    settings      those of config.json; what is given must equal them, or be one of `MAY_CHANGE`
    auto          precision, kernel, threads and the type of pooled fields of the first start stay; an `auto` that the
                  schema, the data or the machine decides (metric, split, ids made unknown, device) is compared as what
                  it comes to
    vocabularies  those of preprocessing/; the data must still have them, row for row (data_record.py)
    weights       the newest intact checkpoint

All of this is compared before anything in the folder is written: a good run stays good whatever it is resumed with.
"""

from __future__ import annotations

from dataclasses import replace

from ziggurat.commands import pasted
from ziggurat.data.encoded.loader import Shuffle
from ziggurat.data.preprocess.splits import SplitBy
from ziggurat.embeddings.config import PooledDtype
from ziggurat.embeddings.tables_config import AUTO, TablesConfig
from ziggurat.errors import ConfigError, MissingFileError
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.device import Device, choose_device
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.data_paths import located, with_absolute_paths
from ziggurat.runs.fingerprint import Difference, differences, fingerprint
from ziggurat.training.checkpoint import CheckpointStore, Match
from ziggurat.training.config import AS_VALIDATION, AUTO_METRIC
from ziggurat.training.position import Position
from ziggurat.training.records.run_folder import RunFolder

MAY_CHANGE = (
    # how long, how often, and when to stop
    "training.epochs",
    "training.max-steps",
    "training.early-stop.patience",
    "training.early-stop.min-delta",
    "training.early-stop.min-steps",
    "training.evaluate-every",
    "training.evaluation-batch-size",
    "training.checkpoint-every",
    "training.checkpoint",
    "training.log-every",
    "training.non-finite",
    "training.damaged-records",
    # where rows lie, with the same numbers
    "tables.disk",
    "tables.in-memory",
    "tables.memory",
    "tables.device-memory",
    # what computes: other sums are rounded otherwise, and mean the same
    "training.threads",
    "training.precision",
    "training.dispatch",  # its content is compared apart (`dispatched.py`)
    "training.compile",
    "training.step-graph",
    "device",
    "training.loader.prefetch",
    "training.loader.read-threads",
    "training.loader.batch-size",
    "model.embedding.kernel",
    "parallel",
    # where the same data lies; its content is compared apart
    "data.train",
    "data.copies",
    "data.valid",
    "data.test",
    "data.bad-rows",
    "data.bad-row-budget",
    "dataset.source",
)
_SHOWN = 8


def config_to_resume(
    run: RunFolder, given: RunConfig, *, again: str = "", by: str = "--resume"
) -> tuple[RunConfig, list[Difference]]:
    """The config to go on with, and what changes in it.

    Args:
        run: its folder, with a config.json.
        given: what the resumed run was asked for.
        again: the command that goes on as it was; "": that of a training run.
        by: what asks to go on, for errors.

    Raises:
        ConfigError: a setting differs that may not change; names it with both values.
        MissingFileError: the raw data cannot be found any more.
    """
    again = again or f"ziggurat train {pasted(run.path)} --resume"
    stored = load_config(run.path, models=(type(given.model),))
    given = _as_stored_where_auto(given, stored)
    same_place = [getattr(given.data, name) == getattr(stored.data, name) for name in ("train", "valid", "test")]
    # Files that moved together with the run are taken where they lie now, on both sides of the comparison.
    if all(same_place) and given.dataset.source == stored.dataset.source:
        stored = located(stored, folder=run.path)
        given = replace(given, data=replace(given.data, **_files(stored)), dataset=stored.dataset)
    given = with_absolute_paths(given)
    before, after = (fingerprint(config, versions=False) for config in (stored, given))
    other = differences(before, after, ignore=MAY_CHANGE)
    if of_schema := [it for it in other if it.setting.startswith("table-schema")]:
        raise _other_schema(run, of_schema, again=again, by=by)
    if other:
        raise ConfigError(
            expected="the settings that the run was started with (epochs, patience, intervals and ranks may change)",
            found=_listed(other),
            where=f"{run.config}, {by}",
            ways_out=(
                f"leave them out: what is not given is taken from the run ({again})",
                f"start a new run with these settings: --out ANOTHER_FOLDER{_without(by)}",
            ),
        )
    return given, differences(before, after)


def _listed(found: list[Difference]) -> str:
    lines = [f"{it.setting}: {it.first or 'none'} in the run, {it.second or 'none'} given" for it in found]
    return "; ".join([*lines[:_SHOWN], *([f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])])


def _without(by: str) -> str:
    return f", without {by}" if by.startswith("--") else ""


def _other_schema(run: RunFolder, found: list[Difference], *, again: str, by: str) -> ConfigError:
    return ConfigError(
        expected="the schema that the run was started with: its vocabularies and weights belong to it",
        found=f"another schema; {_listed(found)}",
        where=f"{run.config}, {by}",
        ways_out=(
            f"leave --schema out: the run keeps its own ({again})",
            f"start a new run with this schema: --out ANOTHER_FOLDER{_without(by)}",
        ),
    )


def sources_text(run: RunFolder, changes: list[Difference]) -> str:
    """Say what is taken from where, for the person who resumes."""
    weights = "weights of its newest intact checkpoint" if any(run.checkpoints.glob("step-*")) else "no checkpoint"
    lines = [
        f"resuming {run.path}: settings and schema of its {run.config.name}, vocabularies of its "
        f"{run.preprocessing.name}/, {weights}"
    ]
    lines += [f"  changed: {it.setting} {it.first or 'none'} → {it.second or 'none'}" for it in changes]
    if any((it.setting, it.second) == ("device", f'"{Device.AUTO}"') for it in changes):
        lines.append(f"  this machine computes on {choose_device().describe()}")
    return "\n".join(lines)


def _as_stored_where_auto(given: RunConfig, stored: RunConfig) -> RunConfig:
    training = given.training
    embedding = given.model.embedding
    labels = given.table_schema.labels
    if training.precision.is_measured:
        training = replace(training, precision=stored.training.precision)
    if not training.threads:
        training = replace(training, threads=stored.training.threads)
    if training.loader.shuffle is Shuffle.AUTO:
        training = replace(training, loader=replace(training.loader, shuffle=stored.training.loader.shuffle))
    if training.early_stop.metric == AUTO_METRIC and labels:
        metric = given.stop_metric()
        if stored.training.early_stop.metric in (metric, AUTO_METRIC):
            metric = stored.training.early_stop.metric
        training = replace(training, early_stop=replace(training.early_stop, metric=metric))
    if training.unknown_ids == (AS_VALIDATION,):  # the data of the first start said which; before there was none
        training = replace(training, unknown_ids=stored.training.unknown_ids)
    if embedding.kernel is KernelChoice.AUTO:
        embedding = replace(embedding, kernel=stored.model.embedding.kernel)
    if embedding.pooled is PooledDtype.AUTO:  # runs from before `auto` was the default had FP32
        embedding = replace(embedding, pooled=stored.model.embedding.pooled)
    data = given.data
    device = given.device
    schema = given.table_schema
    if stored.table_schema.items is None:  # older than items, and its model reads none
        schema = replace(schema, items=None)
    tables = given.tables
    if tables.memory_limit and tables.memory_limit == stored.tables.memory_limit:  # it chose formats at the first start
        cache = tables.cache or stored.tables.cache
        formats = stored.tables.by_table | tables.by_table
        places = {}
        if tables.disk:
            memory = stored.tables.memory if tables.memory == TablesConfig.memory else tables.memory
            places = {"in_memory": tables.in_memory or stored.tables.in_memory, "memory": memory}
        elif tables.device_memory == AUTO:
            device_memory = stored.tables.device_memory or AUTO
            places = {"in_memory": tables.in_memory or stored.tables.in_memory, "device_memory": device_memory}
        tables = replace(tables, by_table=formats, cache=cache, **places)
    if data.split.by is SplitBy.AUTO:
        data = replace(data, split=replace(data.split, by=stored.data.split.by, column=stored.data.split.column))
    if device is Device.AUTO and choose_device().device.type == stored.device:
        device = stored.device
    model = replace(given.model, embedding=embedding)
    return replace(given, training=training, model=model, data=data, device=device, table_schema=schema, tables=tables)


def _files(config: RunConfig) -> dict[str, tuple[str, ...]]:
    return {name: getattr(config.data, name) for name in ("train", "valid", "test")}


def checkpoints_of(run: RunFolder, config: RunConfig) -> CheckpointStore:
    """The checkpoints of a run that has some.

    Raises:
        MissingFileError: it has none yet.
    """
    store = CheckpointStore(run.checkpoints, config=config.training.checkpoint)
    if not store.steps():
        raise MissingFileError(
            expected="a run with a checkpoint",
            found="none yet",
            where=str(run.checkpoints),
            ways_out=f"train it first, or go on: ziggurat train {pasted(run.path)} --resume",
        )
    return store


def best_step(store: CheckpointStore) -> int:
    """The best step that the newest intact checkpoint knows of, or its own step where nothing was evaluated."""
    newest = store.load(into={}, match=Match.SUBSET)
    return Position.from_json(newest.state.get("position")).best_step or newest.step
