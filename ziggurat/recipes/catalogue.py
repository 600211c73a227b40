"""Recipes: complete runs as functions. Calling one returns a `RunConfig`; nothing runs until `train_run` is called.

A data set has one function from a model to its run; `RECIPES` joins them with models and names the results
`DATA_KIND`. `table_*` and `criteo_*` exist for every built-in model (`MODEL_CONFIGS`), the others for models whose
sizes were tried there. `table_run` takes a model of your own. The first line of each docstring is what `ziggurat
recipes` prints.

`*_bars_*` follow the BARS/FuxiCTR protocol to the letter; the others train as large systems do (row-wise Adagrad on
touched rows). `protocols.py` says what that means, and why the two are never compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ziggurat import precision
from ziggurat.arguments import check_arguments
from ziggurat.data.datasets import schema_for
from ziggurat.data.datasets.criteo import mlperf_schema
from ziggurat.data.encoded.epoch_stream import Shuffle
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.source import FileFormat, RawSource
from ziggurat.data.streams.brokers import is_broker
from ziggurat.data.synthetic.teacher import SyntheticTeacher, learnable
from ziggurat.embeddings import EmbeddingConfig, TableInit
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.features.schema import Encoding, Schema
from ziggurat.models import (
    MODEL_CONFIGS,
    CrossConfig,
    DCNv2Config,
    DeepFMConfig,
    DLRMConfig,
    Init,
    LogisticRegressionConfig,
    MLPConfig,
    ModelConfig,
    TwoTowerConfig,
)
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.build import BuiltInConfig, kind_of
from ziggurat.models.contract.reads import Reads, finds_items, is_linear, ranks_rows, reads_of
from ziggurat.models.dcn_v2 import CrossKind, Structure
from ziggurat.models.dlrm import TopStart
from ziggurat.parallel.job import launched_ranks
from ziggurat.recipes.graph import gowalla_lightgcn, pairs_training
from ziggurat.recipes.model_settings import FRAPPE, settings_named
from ziggurat.recipes.next_item import NEXT_ITEM_RECIPES, NEXT_ITEM_TABLE_RECIPES, Recipe
from ziggurat.recipes.protocols import SPARSE_TABLES, bars_tables, bars_training
from ziggurat.recipes.rankers import RANKER_RECIPES
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.recipes.several_labels import SEVERAL_LABELS_RECIPES
from ziggurat.training import metrics
from ziggurat.training.config import AS_VALIDATION, Decay, EarlyStopConfig, ScheduleConfig, TrainingConfig

DATA_DLRM = DLRMConfig(bottom=MLPConfig(hidden_dims=(512, 256)), top=MLPConfig(hidden_dims=(512, 256)))
DATA_DCN_V2 = DCNv2Config(deep=MLPConfig(hidden_dims=(512, 256)))
DATA_TWO_TOWER = TwoTowerConfig(temperature=0.05)
SMALL_ROWS, SMALL_BATCH = 100_000, 256
SMALL_DLRM = DLRMConfig(
    embedding_dim=8,
    bottom=MLPConfig(hidden_dims=(64, 32)),
    top=MLPConfig(hidden_dims=(64, 32)),
    top_start=TopStart.SUM_OF_PAIRS,
)
SMALL_DCN_V2 = DCNv2Config(embedding_dim=8, deep=MLPConfig(hidden_dims=(64, 32)))
SMALL_DEEPFM = DeepFMConfig(embedding_dim=8, deep=MLPConfig(hidden_dims=(64, 32)))
MAX_SUMMED = 8  # features of a small DLRM that starts with the sum of its products
FEW_ROWS, FEW_BATCH = 10_000, 64
SMALL_SIZES_ROWS, MILLION_BATCH = 1_000_000, 512
MEDIUM_ROWS = 2_000_000
_MIN_STEPS, _MAX_STEPS = 1_500, 2_500  # of small data: before patience counts, and as many as the epochs amount to
# Of more rows, before patience counts: pairs of thousands of ids need as many samples to show, and more ids more.
_MIN_SAMPLES, _MAX_MIN_SAMPLES = 2_560_000, 3_840_000
_MIN_PASSES = 6.4  # over all rows, between these two
_MILLION_STEPS = 10_000
LARGER_START = 0.05  # standard deviation of ids whose products are summed from the first step on
_SMALL_PATIENCE, _MEDIUM_PATIENCE, _MEDIUM_EPOCHS = 3, 2, 5
_SMALL_EPOCHS, _MILLION_EPOCHS = (20, 40), (5, 20)
_ADAM_RATE, _ADAM_DECAY = 0.01, 1e-5
_SOFT_SAMPLES = 6  # of logistic regression: gradients of single samples that an id's accumulator starts with
_SIZES: dict[type[ModelConfig], tuple[ModelConfig, ModelConfig]] = {
    DLRMConfig: (SMALL_DLRM, DATA_DLRM),
    DCNv2Config: (SMALL_DCN_V2, DATA_DCN_V2),
    DeepFMConfig: (SMALL_DEEPFM, DeepFMConfig()),
}


def _recipe(data: str, model: ModelConfig, *, run: Callable[[ModelConfig], RunConfig], about: str) -> Recipe:
    """The recipe `DATA_KIND` of a built-in model: `run` with this model; `about` is its docstring, {} the model."""
    name = f"{data}_{model.kind}"

    def recipe() -> RunConfig:
        return replace(run(model), recipe=name)

    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = about.format(type(model).__name__.removesuffix("Config"))
    return recipe


def _movielens(model: ModelConfig) -> RunConfig:
    training = TrainingConfig(
        epochs=5,
        learning_rate=1e-3,
        table_learning_rate=0.02,
        early_stop=EarlyStopConfig(metric=metrics.USUAL, patience=1),
        loader=LoaderConfig(batch_size=2048),
    )
    return RunConfig(
        dataset=DatasetConfig(name="movielens-1m"),
        data=DataConfig(split=SplitConfig(by=SplitBy.TIME, valid_fraction=0.1, test_fraction=0.1)),
        table_schema=schema_for("movielens-1m"),
        model=model,
        training=_faster_tables_alone(training, model),
    )


def _movielens_histories(model: ModelConfig) -> RunConfig:
    training = TrainingConfig(
        epochs=3,
        learning_rate=1e-3,
        table_learning_rate=0.02,
        early_stop=EarlyStopConfig(patience=1),
        loader=LoaderConfig(batch_size=1024),
    )
    name = "movielens-1m-histories"
    return replace(
        _movielens(model), dataset=DatasetConfig(name=name), table_schema=schema_for(name), training=training
    )


def _frappe(model: ModelConfig) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(name="frappe"),
        data=DataConfig(split=SplitConfig(by=SplitBy.FILES)),
        table_schema=schema_for("frappe"),
        model=model,
        training=TrainingConfig(epochs=10, early_stop=EarlyStopConfig(metric=metrics.USUAL, patience=2)),
    )


def _frappe_bars(model: ModelConfig) -> RunConfig:
    l2 = settings_named(model.kind, among=FRAPPE).embedding_l2
    started = replace(model, init=Init.XAVIER_NORMAL, embedding=bars_tables())
    return replace(_frappe(started), training=bars_training(embedding_l2=l2))


def _synthetic(model: ModelConfig) -> RunConfig:
    teacher = learnable()
    return RunConfig(
        dataset=DatasetConfig(name="synthetic", rows=2_000_000),
        teacher=teacher,
        data=DataConfig(split=SplitConfig(by=SplitBy.RANDOM, valid_fraction=0.05, test_fraction=0.1)),
        table_schema=SyntheticTeacher(teacher).schema(),
        model=model,
        training=TrainingConfig(epochs=2, schedule=ScheduleConfig(warmup_steps=200, decay=Decay.LINEAR)),
    )


def _criteo(model: ModelConfig) -> RunConfig:
    split = SplitConfig(by=SplitBy.TIME_ORDER, valid_fraction=0.05, test_fraction=0.05)
    return RunConfig(
        data=DataConfig(format=FileFormat.CRITEO, split=split),
        table_schema=schema_for("criteo-kaggle"),
        model=model,
        training=TrainingConfig(
            epochs=1, schedule=ScheduleConfig(warmup_steps=500), checkpoint_every=2000, evaluate_every=5000
        ),
    )


def _faster_tables_alone(training: TrainingConfig, model: ModelConfig) -> TrainingConfig:
    """Logistic regression learns by its tables alone, and they take larger steps."""
    return replace(training, table_learning_rate=0.1) if is_linear(model) else training


def mlperf_dlrm() -> RunConfig:
    """DLRM as in MLPerf, on Criteo 1TB: 26 tables, 204 M rows × 128 (97 GiB). To be planned, or --data.train FILES."""
    return RunConfig(
        recipe="mlperf_dlrm",
        data=DataConfig(format=FileFormat.CRITEO, split=SplitConfig(by=SplitBy.TIME_ORDER)),
        table_schema=mlperf_schema(),
        model=DLRMConfig(
            embedding_dim=128,
            bottom=MLPConfig(hidden_dims=(512, 256)),
            top=MLPConfig(hidden_dims=(1024, 1024, 512, 256)),
        ),
        training=TrainingConfig(epochs=1, loader=LoaderConfig(batch_size=8192)),
    )


def mlperf_dcn_v2() -> RunConfig:
    """DLRM-DCNv2 as in MLPerf: the same tables, lists of 1 to 100 ids. To be planned, or --data.train PARQUET."""
    model = DCNv2Config(
        embedding_dim=128,
        structure=Structure.STACKED,
        cross=CrossConfig(num_layers=3, kind=CrossKind.LOW_RANK, rank=512),
        deep=MLPConfig(hidden_dims=(1024, 1024, 512, 256)),
        numeric=NumericInput.BOTTOM_MLP,
        bottom=MLPConfig(hidden_dims=(512, 256)),
    )
    return replace(
        mlperf_dlrm(),
        recipe="mlperf_dcn_v2",
        data=DataConfig(split=SplitConfig(by=SplitBy.FILES)),
        table_schema=mlperf_schema(multi_hot=True),
        model=model,
    )


def table_model(cls: type[BuiltInConfig]) -> ModelConfig:
    """Sizes of a built-in model on a table of unknown size."""
    return next((each for each in (DATA_DLRM, DATA_DCN_V2) if type(each) is cls), None) or cls()


@check_arguments
def table_run(model: ModelConfig, schema: Schema, *, recipe: str = "") -> RunConfig:
    """Any model, a built-in one or one of your own, on any table: split by time if there is one, mostly three epochs.

    Args:
        model: its settings.
        schema: of the table.
        recipe: its name in files; "": `table_` and the model's kind.

    Example:
        >>> schema = zg.Schema(features=(zg.Dense(name="price"),), labels=(zg.Label(name="click"),))
        >>> zg.table_run(zg.DLRMConfig(embedding_dim=8), schema).recipe
        'table_dlrm'
    """
    split = SplitConfig(by=SplitBy.TIME if schema.time else SplitBy.RANDOM)
    # Candidates of events are asked together: a batch has whole questions, so that a history is computed once.
    has_questions = schema.events is not None and bool(schema.labels)
    loader = LoaderConfig(shuffle=Shuffle.SESSION_LANES, batch_size=1024) if has_questions else LoaderConfig()
    training = TrainingConfig(
        epochs=3,
        early_stop=EarlyStopConfig(patience=1),
        loader=loader,
        unknown_ids=() if schema.events is not None or finds_items(model) else (AS_VALIDATION,),
        start_at_base_rate=schema.events is None and not finds_items(model),
    )
    if reads_of(model) is Reads.PAIRS:
        training = pairs_training(schema)
    return RunConfig(
        recipe=recipe or f"table_{model.kind}",
        data=DataConfig(split=split),
        table_schema=schema,
        model=model,
        training=_faster_tables_alone(training, model),
    )


def fit_to_rows(config: RunConfig) -> RunConfig:
    """The run of a `table_*` recipe with sizes and training for the rows of its files; any other config as it is.

    Rows are counted in Parquet and estimated in plain text; nobody knows them in gzip, or of a broker, which keeps the
    settings for many rows. What they were chosen by stands in docs/experiments, "Which optimizer and patience for a
    first model of few rows?", "Which sizes for a table of few rows?" and "Does the training of a table of 300,000 rows
    stop on the plateau of single features?", and the same of 600,000 and 1,500,000.

        rows            sizes, batch               tables                          epochs, patience
        to 10,000       small, 64                  sparse Adam at 0.01             2,500 steps (20 to 40 epochs), 3
        to 100,000      small, 256                 sparse Adam at 0.01             the same
        to 1,000,000    small, 512                 sparse Adam at 0.01             10,000 steps (5 to 20 epochs), 3
        to 2,000,000    large, 2,048               sparse Adam at 0.01             5, 2
        more            large, 2,048               row-wise Adagrad at 0.02        3, 1

    A small DLRM of up to eight features starts with the sum of its products (`TopStart`); of more, products are so many
    that the sum would learn noise first. From 100,000 to a million rows the ids of one that has it start at
    N(0, 0.05²): at ±1/√rows products of thousands of ids have hardly a gradient.

    What the config has of its own stays: another model than that of the recipe its sizes, another optimizer of tables
    its rate. Tables that grow, or lie in few bits or on a disk, keep row-wise Adagrad.

    Raises:
        DataError: a file of the training data is absent or cannot be read.
    """
    if not _is_fitted(config) or not config.data.train or any(map(is_broker, config.data.train)):
        return config
    rows = RawSource(config.data.train, format=config.data.format, text=config.data.text).num_rows_hint()
    if rows is None or rows > MEDIUM_ROWS:
        return config
    if is_linear(config.model):
        return logistic_run(config, rows=rows)
    small, large = _SIZES.get(type(config.model), (None, None))
    model = small if rows <= SMALL_SIZES_ROWS and small is not None and config.model == large else config.model
    if model == SMALL_DLRM and len(config.table_schema.features) > MAX_SUMMED:
        model = replace(SMALL_DLRM, top_start=TopStart.DRAWN)
    training = _training_for(rows, config.training)
    if _learns_by_default(config):
        embedding = replace(model.embedding, optimizer=SPARSE_TABLES.optimizer, weight_decay=_ADAM_DECAY)
        if model == SMALL_DLRM and rows > SMALL_ROWS:
            embedding = with_larger_start(embedding)
        model = replace(model, embedding=embedding)
        training = replace(training, table_learning_rate=_ADAM_RATE)
    return replace(config, model=model, training=training)


def with_larger_start(embedding: EmbeddingConfig) -> EmbeddingConfig:
    """Return tables whose ids start large enough that their products have a gradient."""
    return replace(embedding, init=TableInit.NORMAL, init_std=LARGER_START)


def _is_fitted(config: RunConfig) -> bool:
    """Return whether a run is one of a recipe whose settings follow the rows."""
    recipe = f"table_{getattr(config.model, 'kind', '')}"
    # A model of the user's own takes the place of the recipe's, whose name stays.
    is_of_table = config.recipe == recipe or (reads_of(config.model) is None and config.recipe.startswith("table_"))
    if not ranks_rows(config.model) or not is_of_table or config.table_schema.events is not None:
        return False
    training = config.training
    default = table_run(config.model, config.table_schema).training
    of_rows = ("epochs", "max_steps", "early_stop", "learning_rate", "table_learning_rate")
    is_default = all(getattr(training, name) == getattr(default, name) for name in of_rows)
    return is_default and training.loader.batch_size == default.loader.batch_size


def _learns_by_default(config: RunConfig) -> bool:
    """Return whether nobody said how tables are kept and learn."""
    grows = any(table.encoding is Encoding.GROWING for table in config.table_schema.tables)
    return not grows and config.tables == TablesConfig() and _is_plain(config.model.embedding)


def _is_plain(embedding: EmbeddingConfig) -> bool:
    """Return whether tables learn as they do by default, whatever computes them and rounds their sums."""
    default = EmbeddingConfig()
    return replace(embedding, kernel=default.kernel, pooled=default.pooled) == default


def _training_for(rows: int, training: TrainingConfig) -> TrainingConfig:
    """The training of a ranker on so many rows, which are the rows of all splits."""
    patience = _SMALL_PATIENCE
    if rows > SMALL_SIZES_ROWS:
        batch_size = training.loader.batch_size
        epochs = _MEDIUM_EPOCHS
        patience = _MEDIUM_PATIENCE
        least_steps = _MIN_SAMPLES // batch_size
    elif rows > SMALL_ROWS:
        batch_size = MILLION_BATCH
        fewest, most = _MILLION_EPOCHS
        epochs = min(max(-(-_MILLION_STEPS * batch_size // rows), fewest), most)
        least_samples = min(max(int(_MIN_PASSES * rows), _MIN_SAMPLES), _MAX_MIN_SAMPLES)
        least_steps = least_samples // batch_size
    else:
        batch_size = FEW_BATCH if rows <= FEW_ROWS else SMALL_BATCH
        fewest, most = _SMALL_EPOCHS
        epochs = min(max(-(-_MAX_STEPS * batch_size // max(rows, 1)), fewest), most)
        least_steps = _MIN_STEPS
    return replace(
        training,
        epochs=epochs,
        early_stop=replace(training.early_stop, patience=patience, min_steps=least_steps),
        loader=replace(training.loader, batch_size=batch_size),
    )


def logistic_run(config: RunConfig, *, rows: int, epochs: int = 20) -> RunConfig:
    """Return a run of logistic regression with settings for so many rows: passes of 300 to 600 steps, in FP32.

    A sum of weights has one optimum, so what matters is to come near it before early stop ends the run: numbers learn
    by 0.01 (at the rate of a network, 0.001, ids had learned their noise before numbers had learned anything), ids by
    0.2 with soft first steps. Measured beside scikit-learn's `LogisticRegression` (docs/experiments, "Is our logistic
    regression as good as scikit-learn's?").

    Args:
        config: of a linear model; its threads, seed and metric stay.
        rows: to train on.
        epochs: at most; validation ends it earlier.
    """
    smallest = 64
    largest = 4096
    steps = 300
    batch_size = smallest
    while batch_size < largest and 2 * batch_size * steps <= rows:
        batch_size *= 2
    given = config.training
    training = TrainingConfig(
        epochs=epochs,
        unknown_ids=given.unknown_ids,
        start_at_base_rate=given.start_at_base_rate,
        learning_rate=1e-2,
        table_learning_rate=0.2,
        precision=precision.PLAIN,
        threads=given.threads,
        seed=given.seed,
        early_stop=replace(given.early_stop, patience=2, min_steps=0, min_delta=1e-6),
        loader=LoaderConfig(batch_size=batch_size, seed=given.loader.seed),
    )
    model = config.model
    if _is_plain(model.embedding):
        embedding = replace(model.embedding, initial_sum=_soft_start(batch_size * launched_ranks()))
        model = replace(model, embedding=embedding)
    return replace(config, model=model, training=training)


def _soft_start(batch_size: int) -> float:
    """Return the accumulator that ids of a linear model start with, for a batch of all ranks together.

    Row-wise Adagrad moves an id by the whole rate when it is first seen, however little one sample says. The gradient
    of a sample is at most 1 / batch; with the square of six of them an id that is seen once moves by a sixth of the
    rate at most, and one that is seen a hundred times by nearly all of it.
    """
    return (_SOFT_SAMPLES / batch_size) ** 2


def with_soft_start(config: RunConfig) -> RunConfig:
    """Return a run of `logistic_run` with the soft first steps of its batch size; any other run as it is.

    Args:
        config: perhaps with another batch size than that of `logistic_run`.
    """
    embedding = config.model.embedding
    is_plain = _is_plain(replace(embedding, initial_sum=0.0))
    if not is_linear(config.model) or not embedding.initial_sum or not is_plain:
        return config
    soft = replace(embedding, initial_sum=_soft_start(config.training.loader.batch_size * launched_ranks()))
    return replace(config, model=replace(config.model, embedding=soft))


def sizes_text(config: RunConfig) -> str:
    """Describe the sizes of a `table_*` recipe that has several, for the start-up report; return "" for other runs."""
    sizes = _SIZES.get(type(config.model))
    if sizes is None or config.recipe != f"table_{config.model.kind}":
        return ""
    small, large = sizes
    if _same_sizes(config.model, small):
        return f"those for up to {SMALL_SIZES_ROWS:,} rows"
    return "those for many rows" if _same_sizes(config.model, large) else "as given"


def _same_sizes(one: ModelConfig, other: ModelConfig) -> bool:
    """Do two models have the same columns and hidden layers?"""
    names = ("embedding_dim", "bottom", "top", "deep")
    return all(getattr(one, name, None) == getattr(other, name, None) for name in names)


def _table_recipe(cls: type[BuiltInConfig]) -> Callable[[Schema], RunConfig]:
    """The recipe `table_KIND` of a built-in model."""

    def recipe(schema: Schema) -> RunConfig:
        return table_run(table_model(cls), schema)

    name = cls.__name__.removesuffix("Config")
    recipe.__name__ = recipe.__qualname__ = f"table_{kind_of(cls)}"
    recipe.__doc__ = f"{name} on any table of yours{cls.reads.wanted}: --data.train FILE --schema my.toml."
    return recipe


_MOVIELENS = "{} on MovieLens-1M, time split, like = rating of 4 or more."
_MOVIELENS_HISTORIES = "{}, users and movies as vectors, on MovieLens-1M with what each user liked before, time split."
_BARS = "{} on Frappe_x1 by the BARS protocol%s. Needs --dataset.source FOLDER."
_FRAPPE = "{} on Frappe with row-wise Adagrad. Needs --dataset.source FOLDER."
_SYNTHETIC = "{} on a synthetic teacher whose best reachable AUC is known."
_CRITEO = "{} on a Criteo Kaggle or 1TB file of yours: --data.train train.txt. One pass, with warm-up."

MOVIELENS_MODELS = (
    (
        DLRMConfig(bottom=MLPConfig(hidden_dims=(64,)), top=MLPConfig(hidden_dims=(256, 128), dropout=0.2)),
        _MOVIELENS,
    ),
    (DCNv2Config(deep=MLPConfig(hidden_dims=(256, 128), dropout=0.2), cross=CrossConfig(num_layers=2)), _MOVIELENS),
    (LogisticRegressionConfig(), "Logistic regression on MovieLens-1M: the floor."),
)
BARS_MODELS = (
    ("dcn_v2", _BARS % " (published test AUC 0.98382 ± 0.00049)"),
    ("dlrm", _BARS.replace("{}", "{} (concatenation)") % ""),
    ("dnn", _BARS % " (published test AUC 0.98404 ± 0.00057)"),
)

RECIPES: tuple[Callable[..., RunConfig], ...] = (
    *(_recipe("movielens", model, run=_movielens, about=about) for model, about in MOVIELENS_MODELS),
    _recipe("movielens", DATA_TWO_TOWER, run=_movielens_histories, about=_MOVIELENS_HISTORIES),
    *NEXT_ITEM_RECIPES,
    *RANKER_RECIPES,
    *SEVERAL_LABELS_RECIPES,
    *(
        _recipe("frappe_bars", settings_named(kind, among=FRAPPE).model, run=_frappe_bars, about=about)
        for kind, about in BARS_MODELS
    ),
    *(_recipe("frappe", model, run=_frappe, about=_FRAPPE) for model in (DATA_DLRM, DATA_DCN_V2)),
    *(_recipe("criteo", table_model(cls), run=_criteo, about=_CRITEO) for cls in MODEL_CONFIGS if cls.reads.is_any_row),
    mlperf_dlrm,
    mlperf_dcn_v2,
    *(_recipe("synthetic", model, run=_synthetic, about=_SYNTHETIC) for model in (DATA_DLRM, DATA_DCN_V2)),
    *(_table_recipe(cls) for cls in MODEL_CONFIGS if cls.reads is not Reads.NEXT_ITEMS),
    *NEXT_ITEM_TABLE_RECIPES,
    gowalla_lightgcn,
)


@check_arguments
def recipe_named(name: str, *, schema: Schema | None = None) -> RunConfig:
    """The config of the recipe called `name`.

    Args:
        name: see `RECIPES`.
        schema: for `table_*` recipes, which need one; replaces the schema of the others.

    Example:
        >>> zg.recipe_named("movielens_dlrm").dataset.name
        'movielens-1m'
    """
    by_name = {recipe.__name__: recipe for recipe in RECIPES}
    if name not in by_name:
        # `dlrm` alone is the model of a recipe: of the user's own table first.
        near = [each for each in by_name if each.endswith(f"_{name.lower().replace('-', '_')}")]
        near.sort(key=lambda each: not each.startswith("table_"))
        near = near[:3] or nearest_names(name, by_name)
        raise ConfigError(
            expected="a recipe" + (", such as " + ", ".join(near) if near else ""),
            found=repr(name),
            where="command line",
            ways_out=[
                *(f"did you mean {match!r}?" for match in near),
                f"see what each of the {len(by_name)} trains: ziggurat recipes ({', '.join(by_name)})",
            ],
        )
    if name.startswith("table_"):
        if schema is None:
            raise ConfigError(
                expected="a schema",
                found="none",
                where=f"recipe {name}",
                ways_out=("guess one: ziggurat data inspect FILE --write-schema my.toml", "then: --schema my.toml"),
            )
        return by_name[name](schema)
    config = by_name[name]()
    return config if schema is None else replace(config, table_schema=schema)
