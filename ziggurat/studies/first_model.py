"""A first model of a table: a few models on a small budget, a table of what they reach, and the best goes on.

    logistic regression ─┐
    factorisation machine┤                                ┌─► FOLDER/candidates/NAME   a run each
    DeepFM ──────────────┤  at most 2.56 million samples  │
    DLRM ────────────────┼───────────── each ─────────────┴─► best by validation ─► FOLDER   its whole training
    DLRM, penalised ─────┤
    DCNv2 ───────────────┘
    gradient-boosted trees   where a library is installed: compared, and never kept (`runs/quality/trees.py`)

Who takes part follows the table: with lists that are read one by one DIN and BST, beside models that sum these lists;
where most validation rows have an id that training never saw, a DLRM that does without this feature; a single feature
has no pairs, so factorisation machines are left out.

No one setting is best: where pairs of ids matter a model that finds them is far above a sum of weights, and where they
do not, or ids are rare, it is below (docs/experiments/2026-11-26-first-model-of-few-rows.md). Which table is which
shows in a minute of training, so it is tried, and logistic regression takes part. Candidates are compared by the
validation metric that decides in their runs; test rows choose nothing.

A candidate that is there already, of a call that ended early, goes on and is not trained again; nor is the best one
where its budget was its whole training.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.embeddings import TableInit
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.labels import linear_model_name, refuse_threshold_of_number
from ziggurat.features.schema import Outcomes, Schema, table_of
from ziggurat.features.schema_checks import refuse_unread_numbers
from ziggurat.files.writing import replacing, replacing_folder
from ziggurat.models import (
    BSTConfig,
    DCNv2Config,
    DeepFMConfig,
    DINConfig,
    DLRMConfig,
    LogisticRegressionConfig,
    MLPConfig,
    ModelConfig,
    build_model,
)
from ziggurat.models.contract.reads import Reads, is_linear, reads_of
from ziggurat.models.dlrm import TopStart
from ziggurat.parallel.job import launched_ranks
from ziggurat.recipes.catalogue import table_model, table_run, with_larger_start
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import RunResult, check_schema_fits, prepare_run, train_run
from ziggurat.runs.quality.baselines import pooled_schema
from ziggurat.runs.quality.trees import NAME as TREES
from ziggurat.runs.quality.trees import TreesResult, boosted_trees, trees_library
from ziggurat.training.early_stop import improves_upwards
from ziggurat.training.evaluation.evaluate import PairsGain
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.training.step.train_step import TrainStep

BUDGET = 2_560_000  # samples of a candidate: fewer, and pairs of thousands of ids have not shown yet
PENALTY = 1e-3
_PROBED_STEPS = 3
_FM_DIM = 8
_FITTED = "dlrm_penalised"
_MOSTLY = 0.5  # of the ids of a feature in validation rows


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model that takes part.

    Args:
        name: its folder below `candidates`.
        config: its whole training.
    """

    name: str
    config: RunConfig

    def within_budget(self, num_rows: int) -> RunConfig:
        """The run that it is compared by, on so many training rows."""
        training = self.config.training
        samples = training.epochs * num_rows
        if samples <= BUDGET:
            return self.config
        steps = max(1, BUDGET // training.loader.batch_size)
        return dataclasses.replace(self.config, training=dataclasses.replace(training, max_steps=steps))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """The result that a candidate reached.

    Args:
        name: of the candidate.
        valid: the metric that decides, on validation rows.
        pairs: what features add together (`PairsGain`); None where that was not measured.
        steps: that were trained.
        best_step: of the weights that were kept.
        seconds: with its evaluations.
        is_linear: whether it is a sum of weights, the floor of the others.
    """

    name: str
    valid: float
    pairs: PairsGain | None
    steps: int
    best_step: int
    seconds: float
    is_linear: bool = False


@dataclass(frozen=True, kw_only=True)
class FirstModel:
    """The best of a few models, and what the others reached.

    Args:
        metric: that decides.
        tried: every candidate, the best first.
        result: of the best one's whole training.
        config: of the same.
        trees: what gradient-boosted trees reach; None without a library, or where they have no part in the metric.
    """

    metric: str
    tried: tuple[Tried, ...]
    result: RunResult
    config: RunConfig
    trees: TreesResult | None = None

    def pairs_text(self, tried: Tried) -> str:
        """Return what pairs add to a candidate, with its interval, or what it is worse than: then they add nothing.

        Pairs are judged on the model alone, and it may gain much over single features that it learned badly.
        """
        if tried.pairs is None:
            return "–"
        if tried.pairs.below_floor:
            return "– (worse than no model)"
        # The candidates are in their order, the best first.
        better = self.tried[: self.tried.index(tried)]
        linear = next((each.name for each in better if each.is_linear), "")
        if linear:
            return f"– (worse than {linear.replace('_', ' ')})"
        return f"{tried.pairs.value:+.4f} ± {tried.pairs.half_width:.4f}"


def candidates_of(
    schema: Schema, *, change: Callable[[RunConfig], RunConfig] = lambda config: config
) -> list[Candidate]:
    """The models that are tried on a table.

    Args:
        schema: of the table.
        change: names the files, and whatever else the candidates have in common.

    Raises:
        ConfigError: models of samples are not what this table needs; says which are.
    """
    refuse_threshold_of_number(schema.labels, where="schema")
    refuse_unread_numbers(schema, where="schema")
    _refuse_other_tables(schema)
    summed = pooled_schema(schema)
    models: dict[str, ModelConfig] = {linear_candidate(schema): LogisticRegressionConfig()}
    if len(schema.features) > 1:
        models["factorisation_machine"] = DeepFMConfig(embedding_dim=_FM_DIM, deep=MLPConfig(hidden_dims=()))
        models["deepfm"] = table_model(DeepFMConfig)
    models["dlrm"] = table_model(DLRMConfig)
    models[_FITTED] = table_model(DLRMConfig)
    models["dcn_v2"] = table_model(DCNv2Config)
    if summed != schema:
        models["din"] = table_model(DINConfig)
        models["bst"] = table_model(BSTConfig)
    found: list[Candidate] = []
    for name, model in models.items():
        config = change(table_run(model, schema if reads_of(model) is Reads.A_HISTORY else summed))
        if name == _FITTED:
            embedding = dataclasses.replace(config.model.embedding, weight_decay=PENALTY)
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, embedding=embedding))
        if name == "dlrm":
            config = _with_larger_start(config)
        if _fits(config):
            found.append(Candidate(name=name, config=config))
    return found


def linear_candidate(schema: Schema) -> str:
    """Return the name of the candidate that is a sum of weights: of linear regression where labels are numbers."""
    return linear_model_name(label.task for label in schema.labels).removeprefix("a ").replace(" ", "_")


def _with_larger_start(config: RunConfig) -> RunConfig:
    """Return a run of a DLRM that starts with the sum of its products, with products large enough to learn from.

    At ±1/√rows a table of hundreds of ids starts so small that its products have hardly a gradient. Pairs show sooner
    with larger starts, and ids that are too rare for pairs learn more noise: validation rows say which it is
    (docs/experiments, "Do larger starts of ids let a DLRM leave the plateau sooner?").
    """
    model = config.model
    is_sum = isinstance(model, DLRMConfig) and model.top_start is TopStart.SUM_OF_PAIRS
    if not is_sum or model.embedding.init is not TableInit.UNIFORM:
        return config
    model = dataclasses.replace(model, embedding=with_larger_start(model.embedding))
    return dataclasses.replace(config, model=model)


def _fits(config: RunConfig) -> bool:
    """Return whether a model can be built for the schema of its run."""
    try:
        check_schema_fits(config)
    except (SchemaError, ConfigError):
        return False
    return True


def without_unknown(candidates: list[Candidate], prepared: PreparedData) -> list[Candidate]:
    """The candidates, and a DLRM without the features whose ids are mostly new in validation rows, if there are any.

    What a model learns of an id is of no use there, and beside it the columns that describe the id learn less.

    Args:
        candidates: as from `candidates_of`.
        prepared: the rows, with validation rows.
    """
    counters = prepared.summary.splits["valid"].features
    new = [
        spec.name
        for spec in prepared.inputs.single
        if counters[spec.name].ids and counters[spec.name].unknown >= _MOSTLY * counters[spec.name].ids
    ]
    plain = next((each for each in candidates if each.name == "dlrm"), None)
    schema = candidates[0].config.table_schema
    features = tuple(feature for feature in schema.features if feature.name not in new)
    if not new or len(features) < 2 or plain is None or schema.items is not None:
        return candidates
    used = {table_of(feature) for feature in features}
    tables = tuple(table for table in schema.tables if table.name in used)
    fewer = dataclasses.replace(schema, features=features, tables=tables)
    shares = tuple(text for text in plain.config.training.unknown_ids if text.partition("=")[0] not in new)
    training = dataclasses.replace(plain.config.training, unknown_ids=shares)
    config = dataclasses.replace(plain.config, table_schema=fewer, training=training)
    return [*candidates, Candidate(name=f"dlrm_without_{'_'.join(new)}", config=config)]


def train_first_model(
    candidates: list[Candidate],
    *,
    folder: str | Path,
    progress: Progress | None = None,
    hooks: Sequence[Hook] = (),
) -> FirstModel:
    """Train every candidate on its budget, then the best one as long as it improves.

    Args:
        candidates: from `candidates_of`, whose configs name the files.
        folder: of the best one's run; the others lie below `candidates` in it.
        progress: says how long it will take, and shows each training.
        hooks: take part in every training; see `training/hooks/hook.py`.

    Raises:
        ConfigError: there are no validation rows, or torchrun started this process.
    """
    shown = progress or NoProgress()
    if launched_ranks() > 1:
        raise ConfigError(
            expected="one process: models are tried on one device",
            found=f"{launched_ranks()} ranks",
            where="training without a recipe",
            ways_out=("leave torchrun out", "name a recipe: torchrun … -m ziggurat train table_dlrm …"),
        )
    prepared = prepare_run(candidates[0].config, progress=shown)
    if prepared.valid is None:
        raise ConfigError(
            expected="validation rows, by which models are compared",
            found="none",
            where=f"the split: {prepared.summary.split}",
            ways_out=("--data.split.valid-fraction 0.1", "name a recipe: ziggurat train table_dlrm …"),
        )
    candidates = without_unknown(candidates, prepared)
    shown.say(_plan(candidates, prepared, progress=shown))
    tried: list[Tried] = []
    told = {f"warning: {warning}" for warning in prepared.summary.warnings}
    said: dict[str, list[str]] = {}
    metric = candidates[0].config.stop_metric()
    is_upwards = True
    for candidate in candidates:
        config = candidate.within_budget(prepared.train.num_rows)
        is_upwards = improves_upwards(dataclasses.replace(config.training.early_stop, metric=metric))
        place = Path(folder) / "candidates" / candidate.name
        begin = time.perf_counter()
        started = (place / "config.json").exists()
        named = _Named(shown, candidate.name)
        result = train_run(config, folder=place, resume=started, progress=named, hooks=hooks)
        said[candidate.name] = named.said
        valid = result.evaluations["valid"].metrics[metric]
        found = Tried(
            name=candidate.name,
            valid=valid,
            pairs=result.evaluations["valid"].pairs,
            steps=result.fit.steps,
            best_step=result.fit.best_step,
            seconds=time.perf_counter() - begin,
            is_linear=is_linear(candidate.config.model),
        )
        tried.append(found)
        shown.say(f"{candidate.name}: valid {metric} {valid:.5f} at step {found.best_step:,} ({found.seconds:.1f} s)")
    # NaN has no place in an order: a candidate that diverged comes last.
    worst = -math.inf if is_upwards else math.inf
    tried.sort(key=lambda each: each.valid if math.isfinite(each.valid) else worst, reverse=is_upwards)
    best = next(candidate for candidate in candidates if candidate.name == tried[0].name)
    training = best.config.training
    grown = boosted_trees(prepared, metric=metric, threads=training.threads, seed=training.seed)
    for line in _trees_lines(grown, best=tried[0], metric=metric, is_upwards=is_upwards):
        shown.say(line)
    shown.say(f"the best goes on: {best.name}")
    # A candidate that its budget did not cut short is taken over instead of trained once more.
    is_whole = best.within_budget(prepared.train.num_rows) == best.config
    if is_whole:
        _take_over(Path(folder) / "candidates" / best.name, Path(folder))
        for line in said[best.name]:
            if line not in told:
                shown.say(line)
    goes_on = _Named(shown, best.name) if is_whole else shown
    result = train_run(best.config, folder=folder, resume=is_whole, progress=goes_on, hooks=hooks)
    return FirstModel(metric=metric, tried=tuple(tried), result=result, config=best.config, trees=grown)


def _trees_lines(grown: TreesResult | None, *, best: Tried, metric: str, is_upwards: bool) -> list[str]:
    """Report what trees reach beside the best candidate, and what that means for the user."""
    if grown is None:
        if trees_library():
            return []
        return [f"{TREES} are not compared: no library is installed (pip install lightgbm, or scikit-learn)"]
    lines = [f"{TREES}: valid {metric} {grown.valid:.5f} with {grown.trees} trees ({grown.seconds:.1f} s)"]
    gain = grown.valid - best.valid if is_upwards else best.valid - grown.valid
    if gain > 0:
        lines.append(
            f"trees are better than {best.name} by {gain:.5f} on validation rows ({grown.library}, its defaults). "
            "ziggurat exports and serves its own models, so the best of them goes on; to serve trees, train them "
            f"with {grown.library.partition(' ')[0]} itself"
        )
    return lines


def _take_over(finished: Path, folder: Path) -> None:
    """Copy a candidate's run to its final folder, so that a copy that is cut off can be made again or resumed.

    The config comes first: it says whose the other files are (`RunFolder.refuse_files_of_others`), and a run is resumed
    by it. A log or checkpoints say that a run has begun (`RunFolder.has_begun`). So they come last, the checkpoints,
    from which a resumed run goes on, by one rename.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = {"config.json": -1, "metrics.jsonl": 1, "checkpoints": 2}
    entries = sorted(finished.iterdir(), key=lambda path: order.get(path.name, 0))
    for entry in entries:
        if entry.name == ".lock":
            continue
        if entry.is_dir():
            with replacing_folder(folder / entry.name) as temporary:
                shutil.copytree(entry, temporary, dirs_exist_ok=True)
        else:
            with replacing(folder / entry.name) as temporary:
                shutil.copy2(entry, temporary)


def _plan(candidates: list[Candidate], prepared: PreparedData, *, progress: Progress) -> str:
    """Say what will be trained, and about how long it takes, by the time of a few steps of each model."""
    rows = prepared.train.num_rows
    total_s = 0.0
    longest_s = 0.0
    for candidate in candidates:
        config = candidate.config
        has_same = config.table_schema == candidates[0].config.table_schema
        data = prepared if has_same else prepare_run(config, progress=progress)
        step_s = _step_seconds(config, data)
        limited = candidate.within_budget(rows)
        total_s += step_s * _most_steps(limited, rows)
        if limited != config:
            longest_s = max(longest_s, step_s * _most_steps(config, rows))
    then = f"the best goes on, in {_about(longest_s)}" if longest_s else "the best is kept"
    names = ", ".join(candidate.name for candidate in candidates)
    most = min(max(candidate.config.training.epochs for candidate in candidates) * rows, BUDGET)
    return (
        f"{len(candidates)} models are tried ({names}), up to {most:,} samples each, in {_about(total_s)}; then {then}"
    )


def _most_steps(config: RunConfig, rows: int) -> int:
    """Steps of a run on so many rows that is not stopped early."""
    training = config.training
    steps = training.epochs * -(-rows // training.loader.batch_size)
    return min(steps, training.max_steps) if training.max_steps else steps


def _step_seconds(config: RunConfig, prepared: PreparedData) -> float:
    """Seconds of a training step, of a few on a model that is thrown away."""
    model = build_model(config.model, prepared.inputs, seed=0)
    step = TrainStep(model, config.training)
    loader = Loader(prepared.train, config=LoaderConfig(batch_size=config.training.loader.batch_size))
    batch = next(iter(loader.batches(epoch=0)))
    step(batch)
    begin = time.perf_counter()
    for _ in range(_PROBED_STEPS):
        step(batch)
    return (time.perf_counter() - begin) / _PROBED_STEPS


def _about(seconds: float) -> str:
    """A duration to plan by."""
    return f"about {max(seconds, 1.0):.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"


def _refuse_other_tables(schema: Schema) -> None:
    if not schema.labels and schema.events is None:
        raise ConfigError(
            expected="a schema with a label: what a model is to predict",
            found="none",
            where="the schema",
            ways_out=(
                "name the column: ziggurat data inspect FILE --label COLUMN --write-schema FILE.toml",
                "for a log of what users did, without a label: add [events] to the schema, and train table_sasrec "
                "(docs/guides/long-histories.md)",
            ),
        )
    needs: Mapping[str, bool] = {
        "ziggurat train table_sasrec": schema.events is not None,
        "ziggurat train table_two_tower": any(label.outcomes is Outcomes.POSITIVE_ONLY for label in schema.labels),
    }
    for command, is_needed in needs.items():
        if is_needed:
            found = {
                "ziggurat train table_sasrec": "a schema with [events]",
                "ziggurat train table_two_tower": 'a label whose outcomes are "positive_only"',
            }[command]
            raise ConfigError(
                expected="a table of samples, for models that are tried one after the other",
                found=found,
                where="the schema",
                ways_out=(f"name the recipe: {command} …", "see the recipes: ziggurat recipes"),
            )


class _Named:
    """Shows phases of one candidate; what its trainer says is a detail, until it is the best.

    Attributes:
        said: the lines that everybody must see of the candidate's training, its warnings among them.
    """

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name
        self.said: list[str] = []

    def begin(self, what: str, *, total: int | None) -> None:
        self._progress.begin(f"{self._name}, {what}", total=total)

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        self._progress.update(done, note=note, total=total)

    def say(self, text: str) -> None:
        """Keep it, and show it to whoever asked for all of it."""
        self.said.append(text)
        self._progress.detail(f"{self._name}, {text}")

    def detail(self, text: str) -> None:
        self._progress.detail(f"{self._name}, {text}")

    def end(self) -> None:
        self._progress.end()


def settings_of_models(changes: Mapping[str, object]) -> list[str]:
    """Settings that belong to one model, and so to no choice between several."""
    return [name for name in changes if name.startswith("model.")]
