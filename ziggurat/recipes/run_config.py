"""RunConfig: one whole run as plain data. Written to `config.json` of every run; `--config FILE` repeats it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.epoch_stream import Shuffle
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.synthetic.teacher import SyntheticConfig
from ziggurat.data.teachers.join import joined_histories, with_teacher_columns
from ziggurat.embeddings.config import PooledDtype
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.features.schema import Schema, schema_to_json, table_of
from ziggurat.models import MODEL_CONFIGS, ModelConfig, TowerModelConfig
from ziggurat.models.build import check_config_class, check_towers, kind_of
from ziggurat.models.contract.reads import finds_items
from ziggurat.parallel.agreement import PATIENCE_S
from ziggurat.parallel.context.choice import Passing
from ziggurat.parallel.dense import DenseParallelism, Reduction
from ziggurat.parallel.device import Device
from ziggurat.parallel.exchange.hierarchical import ReductionRoute
from ziggurat.parallel.exchange.wire import WireConfig
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.plan import Towers
from ziggurat.recipes.events_check import check_events
from ziggurat.recipes.growing_check import check_growing
from ziggurat.recipes.labels_check import check_labels
from ziggurat.recipes.warm_start import WarmStartConfig
from ziggurat.specification import origin_of
from ziggurat.training.config import SelfDistil, TrainingConfig
from ziggurat.training.delayed_feedback import DelayedConfig
from ziggurat.training.delayed_losses import DelayedLoss
from ziggurat.training.distillation import DistilConfig, DistilHead
from ziggurat.training.early_stop import stop_metric
from ziggurat.training.evaluation.first_look import check_blocks
from ziggurat.training.label_weights import LabelWeights
from ziggurat.training.metrics.full_ranking import full_ranking_names
from ziggurat.training.records.run_folder import CONFIG, RunFolder
from ziggurat.typed import CLASS, Count, CountOrNone, Kinds, PositiveFloat, checked


@dataclass(frozen=True, kw_only=True)
@checked
class DatasetConfig:
    """The source of the raw data.

    Args:
        name: a data set that `ziggurat data fetch` knows, "synthetic", or "" for the files in `data.train`.
        source: file or folder to take it from, for data sets that cannot be fetched; "" fetches it.
        rows: rows to generate, for "synthetic".

    Example:
        >>> zg.DatasetConfig(name="movielens-1m").name
        'movielens-1m'
    """

    name: str = ""
    source: str = ""
    rows: int = 1_000_000


@dataclass(frozen=True, kw_only=True)
@checked
class RanksConfig:
    """Settings of how a run that torchrun has started uses its ranks; without torchrun none of them applies.

    Args:
        dense: how the dense network is spread.
        wire: what embeddings and their gradients travel as.
        reduction: what gradients of the dense network travel as.
        reduction_route: how gradients of a copied dense network are summed over hosts: flat, all ranks at once, or
            hierarchical, inside each host first, so that each byte crosses hosts once a host and not once a rank.
        num_parts: parts of a batch in a step, so that the exchange between hosts overlaps with computation.
        exchange: when rows of the next batch travel: plain, when it has its turn; prioritised, those that the present
            step does not touch while it computes, where that is measured to be faster; prioritised_always, without
            measuring. The result has the same bits.
        context: N, consecutive ranks that divide long histories between them, in training and evaluation; 1: none does.
        passing: what travels between them: keys and values, queries, or what takes less time by measured rates.
        tower_size: S, ranks that hold the same towers together; 0: the fastest on `cluster` where that is given,
            else the ranks of a host, if the towers allow it.
        cluster: these machines, as `ziggurat plan --cluster` names them (a name, or a file): predicts the step of every
            tower size and of the flat model, and the start-up report shows them; "" predicts nothing.
        rank_order: file of `ziggurat cluster order`, of this job: process groups, and with them rings of collectives,
            go by the order that it found, and tower groups lie on the hosts that it found; "": host after host as
            torchrun says. Sums are taken in another order; nothing else changes.
        ranks_per_host: L; 0: as torchrun says. Another number lets one machine stand for several hosts, to try things
            out and to count what would cross between them.
        timeout_s: how long a rank waits for the others in a step before it gives up with an error.
        prepare_timeout_s: the same for what one rank does while the others wait: reading and preparing data.
    """

    FORMERLY: ClassVar[Mapping[str, str]] = {"ranks_a_host": "ranks_per_host"}

    dense: DenseParallelism = DenseParallelism.DDP
    wire: WireConfig = field(default_factory=WireConfig)
    reduction: Reduction = Reduction.FP32
    reduction_route: ReductionRoute = ReductionRoute.FLAT
    num_parts: Count = 1
    exchange: Exchange = Exchange.PLAIN
    context: Count = 1
    passing: Passing = Passing.AUTO
    tower_size: CountOrNone = 0
    cluster: str = ""
    rank_order: str = ""
    ranks_per_host: CountOrNone = 0
    timeout_s: PositiveFloat = 300.0
    prepare_timeout_s: PositiveFloat = PATIENCE_S

    @property
    def parallel(self) -> ParallelConfig:
        """The part of these settings that `parallelize` needs."""
        return ParallelConfig(
            dense=self.dense,
            wire=self.wire,
            reduction=self.reduction,
            reduction_route=self.reduction_route,
            num_parts=self.num_parts,
            exchange=self.exchange,
            passing=self.passing,
        )


@dataclass(frozen=True, kw_only=True)
@checked
class RunConfig:
    """Data, model and training of one run.

    Args:
        recipe: the recipe it came from, for people.
        dataset: where raw data comes from.
        teacher: the synthetic teacher, if `dataset.name` is "synthetic".
        data: files, splits, bad rows.
        table_schema: what the columns mean.
        model: any model config, a built-in one or one of your own; `kind` tells which.
        training: everything else.
        distil: what it learns from logged scores of teachers, beside its labels.
        delayed: how a stream learns from labels that come later than their rows.
        label_weights: what labels count in the loss: as the schema says, or learned.
        tables: what the rows of embedding tables are kept as.
        towers: groups of features, each behind a module as `model.tower_module` says; None for a flat model.
        parallel: how the ranks are used, if there are several.
        warm_start: another run whose weights it begins from.
        device: what it computes on; belongs to the machine, so that a run moves between GPUs and CPUs.

    Example:
        >>> schema = zg.Schema(features=(zg.Dense(name="price"),), labels=(zg.Label(name="click"),))
        >>> zg.RunConfig(data=zg.DataConfig(train=("shop.csv",)), table_schema=schema, model=zg.DNNConfig()).summary()
        'dnn on shop.csv'
    """

    recipe: str = ""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    teacher: SyntheticConfig | None = None
    data: DataConfig
    table_schema: Schema
    model: Annotated[ModelConfig, Kinds(MODEL_CONFIGS)]
    training: TrainingConfig = field(default_factory=TrainingConfig)
    distil: DistilConfig = field(default_factory=DistilConfig)
    delayed: DelayedConfig = field(default_factory=DelayedConfig)
    label_weights: LabelWeights = LabelWeights.GIVEN
    tables: TablesConfig = field(default_factory=TablesConfig)
    towers: Towers | None = None
    parallel: RanksConfig = field(default_factory=RanksConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    device: Device = Device.AUTO

    def summary(self) -> str:
        """Model and data in a few words: "dlrm on movielens-1m"."""
        files = [Path(file).name for file in self.data.train]
        more = f" and {len(files) - 3} more files" if len(files) > 3 else ""
        kind = getattr(self.model, "kind", type(self.model).__name__)
        return f"{kind} on {self.dataset.name or ', '.join(files[:3]) + more or 'no data'}"

    def stop_metric(self, *, own: Iterable[str] = ()) -> str:
        """The metric that decides which checkpoint is the best; see `early_stop.stop_metric`."""
        schema = self.table_schema
        has_users = bool(schema.group)
        more = full_ranking_names(schema.labels, has_users=has_users) if finds_items(self.model) else ()
        facts = {"labels": schema.labels, "has_groups": bool(schema.group)}
        return stop_metric(self.training.early_stop, **facts, own=own, more=more)

    def __repr__(self) -> str:
        training = self.training
        return (
            f"RunConfig({self.summary()}, {len(self.table_schema.features)} features, epochs={training.epochs}, "
            f"batch_size={training.loader.batch_size}, learning_rate={training.learning_rate}, seed={training.seed})"
        )

    @property
    def _has_sessions(self) -> bool:
        """Candidates of events are asked together: a question is a session."""
        schema = self.table_schema
        return bool(schema.session or (schema.events is not None and schema.labels))

    def _check_sessions(self) -> None:
        shuffle = self.training.loader.shuffle
        if shuffle in (Shuffle.SESSIONS, Shuffle.SESSION_LANES) and not self._has_sessions:
            raise ConfigError(
                expected=f"a schema with a session, for --training.loader.shuffle {shuffle.value}",
                found="a schema without one",
                where="the schema, [roles] session",
                ways_out=(
                    'write session = "session_id" under [roles] of the schema, the column of yours',
                    "let it be written: ziggurat data inspect FILE --session COLUMN --write-schema FILE",
                    "shuffle rows: --training.loader.shuffle lanes",
                ),
            )

    def check(self, *, metrics: Iterable[str] = ()) -> None:
        """Refuse contradictions between the parts of a run before the first file is read.

        Args:
            metrics: names of the user's own metrics.

        Raises:
            PlanError: the towers do not fit the features of the schema.
            SchemaError: the model learns from events and the schema has none, or the other way round.
            ConfigError: sessions are to be shuffled and the schema has none; tables are not in FP32 and their optimizer
                has dense gradients; a format is given for a table that there is not; the model's config is none, the
                model cannot have towers, their compression does not fit its tables, or there are settings of tower
                modules and no towers; or the evaluation has no such metric as early stop names.
        """
        check_config_class(type(self.model))
        self.distil.check()
        if self.distil.head is not DistilHead.NONE and self.training.self_distil.method is not SelfDistil.NONE:
            raise ConfigError(
                expected="logged teachers, or a model's own earlier weights: the loss of both is not known yet",
                found=f"distil.head {self.distil.head.value} and self-distil {self.training.self_distil.method.value}",
                where="config, distil",
                ways_out=("--distil none", "--self-distil none"),
            )
        is_taught = self.distil.head is not DistilHead.NONE or self.training.self_distil.method is not SelfDistil.NONE
        if self.delayed.loss is not DelayedLoss.NONE and is_taught:
            raise ConfigError(
                expected="a loss of delayed labels, or of distillation: that of both is not known yet",
                found=f"delayed.loss {self.delayed.loss.value} with teachers or earlier weights",
                where="config, delayed",
                ways_out=("leave --delayed.loss out", "--distil none", "--self-distil none"),
            )
        self.label_weights.check(self.table_schema.labels)
        if self.label_weights is not LabelWeights.GIVEN and (is_taught or self.delayed.loss is not DelayedLoss.NONE):
            raise ConfigError(
                expected="learned weights of labels alone: those of teachers and of delayed labels are not known yet",
                found=f"label_weights {self.label_weights.value} with distillation or a loss of delayed labels",
                where="config, label_weights",
                ways_out=(
                    "--label-weights given",
                    "leave --distil, --self-distil and --delayed.loss out",
                ),
            )
        if self.data.teacher and not with_teacher_columns(self.table_schema):
            raise ConfigError(
                expected="a schema with columns that the logged scores are joined as",
                found=f"data.teacher = {self.data.teacher}, and none",
                where="config, data.teacher",
                ways_out=(
                    f"--teacher {self.data.teacher} in its place, which names them",
                    "in Python: with_teacher(config, folder) of ziggurat.runs.teachers.student",
                ),
            )
        if joined_histories(self.table_schema) and not self.data.teacher:
            raise ConfigError(
                expected="a side table, whose vectors the histories of the schema are",
                found="a feature of kind teacher_history, and no data.teacher",
                where="config, data.teacher",
                ways_out=(
                    "let the feature be made: leave it out of the schema, and give --teacher FOLDER "
                    "--teacher-history COLUMN",
                ),
            )
        check_towers(self.model, self.towers)
        schema = self.table_schema
        tables = {table_of(feature) for feature in schema.features} - {""}
        self.tables.check(self.model.embedding, tables=tables)
        check_growing(
            self.table_schema, model=self.model, exchange=self.parallel.exchange, context=self.parallel.context
        )
        check_events(self.table_schema, model=self.model)
        check_labels(self.table_schema, model=self.model)
        check_blocks(self.model, batch_size=self.training.loader.batch_size)
        self._check_sessions()
        if schema.labels:
            self.stop_metric(own=metrics)
        if not isinstance(self.model, TowerModelConfig):
            return
        if self.towers is not None:
            self.towers.check(
                {feature.name: name for feature in self.table_schema.features if (name := table_of(feature))}
            )
            self.model.tower_module.output_dim(self.model.embedding_dim)
        elif self.model.tower_module != type(self.model)().tower_module:
            raise ConfigError(
                expected="towers, or the settings of tower modules as they were",
                found=f"no towers, and {self.model.tower_module}",
                where="model.tower-module",
                ways_out=("give the towers: --towers FILE", "leave model.tower-module and --compression alone"),
            )


def with_model(config: RunConfig, models: Sequence[type[ModelConfig]]) -> RunConfig:
    """The config with the last of these classes as its model; as it is if its model is of one of them already."""
    if not models or type(config.model) in models:
        return config
    return replace(config, model=models[-1]())


def run_config_to_json(config: RunConfig) -> dict[str, Any]:
    """Return the content of `config.json`; the user's own model and kinds of feature have their class beside theirs."""
    data = to_json(config)
    data["table_schema"] = schema_to_json(config.table_schema)
    if type(config.model) not in MODEL_CONFIGS:
        data["model"] = {"kind": config.model.kind, CLASS: origin_of(type(config.model)), **data["model"]}
    return data


def load_config(path: str | Path, *, models: Sequence[type[ModelConfig]] = ()) -> RunConfig:
    """Return the configuration of a run, from its folder or from a config.json.

    Rows that a run keeps in its folder (`raw/train.parquet`, of a table in memory) are named where they are now: they
    move with the run.

    Args:
        path: the folder or the file.
        models: config classes of your own that it may name. A file never makes this function import code.

    Raises:
        ConfigError: a setting that cannot be, or a model that is neither built in nor in `models`.
    """
    path = Path(path)
    file = path if path.suffix == ".json" else path / "config.json"
    for each in models:
        check_config_class(each)
    data = CONFIG.read(file)
    model = data.get("model")
    if isinstance(model, dict) and CLASS in model:
        known = {kind_of(each) for each in (*MODEL_CONFIGS, *models)}
        if model.get("kind") not in known:
            raise _unknown_model(model, file)
        data = {**data, "model": {name: value for name, value in model.items() if name != CLASS}}
    data = _with_fp32_where_unsaid(data)
    return _with_own_rows(from_json(RunConfig, data, where=str(file), kinds=models), folder=file.parent)


def _with_fp32_where_unsaid(data: object) -> object:
    """Return the content of a config.json with `pooled = fp32` where it says nothing.

    Every setting is written down, so a file without this one is older than it, and its run had FP32.
    """
    match data:
        case {"model": {"embedding": dict(embedding), **model}, **rest} if "pooled" not in embedding:
            return {**rest, "model": {**model, "embedding": {**embedding, "pooled": PooledDtype.FP32.value}}}
        case _:
            return data


def _with_own_rows(config: RunConfig, *, folder: Path) -> RunConfig:
    """Return the config with the rows that a run keeps in its folder, where that is now."""
    runs = [RunFolder(folder), RunFolder(folder.parent)]
    # A baseline is trained on the rows of the run whose folder it is in.
    owners = runs if runs[1].baseline == folder else runs[:1]

    def found(text: str) -> str:
        for run in owners:
            own = run.raw.absolute() / Path(text).name
            if Path(text).parent.name == run.raw.name and own.is_file():
                return str(own)
        return text

    files = {name: tuple(map(found, getattr(config.data, name))) for name in ("train", "valid", "test")}
    return replace(config, data=replace(config.data, **files))


def _unknown_model(model: dict[str, object], file: Path) -> ConfigError:
    origin = str(model[CLASS])
    name = origin.rpartition(":")[2].rpartition(".")[2]
    return ConfigError(
        expected="the class of the model's config: code is loaded only when you name it, never because a file does",
        found=f"a model of kind {model.get('kind')!r}, written by {origin}",
        where=f"{file}, setting 'model'",
        ways_out=(
            f"on the command line: --model {origin}",
            f"in Python, after importing the class: load_run(folder, models=({name},))",
        ),
    )
