"""Permutation importance: how much worse a trained model gets when it no longer knows a feature.

    baseline   metric on the samples as they are                              auc 0.781
    permuted   the same samples, one feature dealt out anew among them        auc 0.702  0.699  0.704    (rounds)
    importance baseline − permuted, mean ± standard deviation over rounds     0.0793 ± 0.0025

(Breiman, Random Forests, 2001, section 10; Fisher, Rudin & Dominici, JMLR 2019, call it model reliance.) For metrics
that fall as models improve it is permuted − baseline, so a positive number always means that the model needs the
feature, and a number near 0 that it does without. The model is not trained again: it says what this model reads, not
what another one could make of the data.

Two features that tell the same share their importance: permute one, and the model reads the other. Permute them
together (`groups`), and what they tell in common appears. And a permuted row may be one that cannot be (a child with
a driver's licence), so a large importance can rest on samples that never occur. Lists that describe the same events
keep their lengths: their values are dealt out among the events of all samples.

The samples are `samples` of the evaluated rows, drawn at random, all at once in memory: 8 bytes a number and id.
Cost: rounds × features passes of the model over them, and one for the baseline. On many ranks each holds the samples
and scores its part of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pyarrow as pa
import torch

from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.errors import ConfigError, DataError, nearest_names
from ziggurat.features.batch import Batch
from ziggurat.features.batches.permutation import feature_names, permuted
from ziggurat.files import Format
from ziggurat.training.config import AUTO_METRIC
from ziggurat.training.early_stop import stop_metric
from ziggurat.training.evaluation.evaluate import evaluate_batches
from ziggurat.training.metrics.accumulator import metric_names
from ziggurat.training.metrics.metric import has_direction, higher_is_better
from ziggurat.training.report.plots import importance_figure
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ziggurat.runs.load import Run

IMPORTANCE = Format(name="ziggurat.importance", what="the importance of a run's features")
COLUMNS = ("feature", "importance", "± sd over rounds", "permuted metric")


@dataclass(frozen=True, kw_only=True)
@checked
class ImportanceConfig:
    """Settings of what to permute, how often, and what to measure.

    Args:
        metric: any of the evaluation with a direction; `auto`: the one that training stops by.
        rounds: permutations of each feature.
        samples: rows to take, drawn at random where there are more; 0: all of them, in memory.
        seed: of the sample and of the permutations.
        features: names of those to permute; () for all.
        groups: features to permute together, by a name of yours; each leaves the list of single ones.

    Example:
        >>> zg.ImportanceConfig(rounds=3, features=("price",)).rounds
        3
    """

    metric: str = AUTO_METRIC
    rounds: int = 5
    samples: int = 65_536
    seed: int = 0
    features: tuple[str, ...] = ()
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.samples < 0 or self.seed < 0:
            raise ConfigError(
                expected="rounds >= 1, samples >= 0, seed >= 0",
                found=f"rounds = {self.rounds}, samples = {self.samples}, seed = {self.seed}",
                where="ImportanceConfig",
                ways_out="correct the number",
            )


@dataclass(frozen=True, kw_only=True)
class FeatureImportance:
    """One feature, or one group of features, permuted in several rounds.

    Args:
        name: of the feature or group.
        features: that were permuted together.
        permuted: the metric of each round.
        losses: what each round cost, above 0 where the metric got worse.
    """

    name: str
    features: tuple[str, ...]
    permuted: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The importance: mean loss over rounds."""
        return statistics.fmean(self.losses)

    @property
    def sd(self) -> float:
        """Sample standard deviation over rounds; NaN for one round."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else math.nan


@dataclass(frozen=True, kw_only=True)
class Importance:
    """The importance of a run's features.

    Args:
        metric: what was measured.
        baseline: its value on the samples as they are.
        rows: which rows, in words.
        num_samples: samples that were used.
        num_rows: rows that they were drawn from.
        rounds: permutations of each feature.
        seed: of the sample and of the permutations.
        features: most important first.
    """

    metric: str
    baseline: float
    rows: str
    num_samples: int
    num_rows: int
    rounds: int
    seed: int
    features: tuple[FeatureImportance, ...]

    @property
    def summary(self) -> str:
        """Baseline and samples, in one line."""
        drawn = "all" if self.num_samples == self.num_rows else f"drawn at random from {self.num_rows:,}"
        return (
            f"{self.metric} {self.baseline:.5f} before permuting, {self.num_samples:,} samples of {self.rows} "
            f"({drawn}), {self.rounds} round{'s' if self.rounds > 1 else ''}, seed {self.seed}"
        )

    def table(self) -> list[tuple[str, ...]]:
        """Cells under `COLUMNS`, most important first."""
        return [
            (
                each.name,
                f"{each.mean:+.5f}",
                f"{each.sd:.5f}" if math.isfinite(each.sd) else "–",
                f"{statistics.fmean(each.permuted):.5f}",
            )
            for each in self.features
        ]

    def frame(self) -> pl.DataFrame:
        """One line a feature: name, importance, its standard deviation, and the metric of the permuted samples."""
        kinds = {"feature": pl.String, "importance": pl.Float64, "sd": pl.Float64, "permuted": pl.Float64}
        rows = [(each.name, each.mean, each.sd, statistics.fmean(each.permuted)) for each in self.features]
        return pl.DataFrame(rows, schema=kinds, orient="row")

    def plot(self, *, most: int = 30) -> Figure:
        """Bars with standard deviations, as in the report.

        Args:
            most: features to show.
        """
        shown = self.features[:most]
        bars = [(each.name, each.mean, 0.0 if math.isnan(each.sd) else each.sd) for each in shown]
        more = f", {most} of {len(self.features)} features" if len(self.features) > most else ""
        worse = "fall" if higher_is_better(self.metric) else "rise"
        return importance_figure(bars, title=f"Permutation importance{more}", unit=f"{worse} of {self.metric}")

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return to_json(self)

    def __repr__(self) -> str:
        width = max((len(each.name) for each in self.features), default=0)
        lines = [f"    {name:<{width}}  {mean} ± {sd}" for name, mean, sd, _ in self.table()]
        return "\n".join([f"Importance({self.summary}", *lines]) + ")"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.table())
        return f"<p>{escape(self.summary)}</p><table><tr>{head}</tr>{rows}</table>"


def order_of(num_samples: int, *, name: str, round_number: int, seed: int) -> np.ndarray:
    """The permutation of a feature (or group) in a round; no other feature's permutations change it."""
    return np.random.default_rng((seed, round_number, *name.encode())).permutation(num_samples)


def importance_of(
    run: Run, tables: Iterable[pa.Table], *, rows: str, config: ImportanceConfig, progress: Progress | None = None
) -> Importance:
    """Permute the features of a run; see the module's docstring.

    Args:
        run: trained.
        tables: encoded rows with labels, all of them, the same on every rank.
        rows: what they are, in words.
        config: what to permute.
        progress: where to show it.

    Raises:
        ConfigError: no such metric or feature, a feature in two groups.
        DataError: the metric is undefined on these rows.
    """
    progress = progress or NoProgress()
    metric = _metric(run, config)
    parts = _parts(run, config)
    sample, num_rows = _sampled(run, tables, config)
    # Lists of the same events have to be dealt out together.
    joined = run.model.joined_lists
    progress.begin("importance", total=1 + config.rounds * len(parts))
    baseline = _metrics(run, sample)[metric]
    if not math.isfinite(baseline):
        raise DataError(
            expected=f"rows on which {metric} is defined: with both labels, for AUC",
            found=f"{baseline} on {sample.batch_size:,} samples of {num_rows:,} rows",
            where=rows,
            ways_out=("evaluate other rows", "take more samples", "another metric: log_loss"),
        )
    # Above 0 means worse for every metric.
    sign = 1.0 if higher_is_better(metric) else -1.0
    done = 1
    found = []
    for name, features in parts.items():
        values: list[float] = []
        for round_number in range(config.rounds):
            progress.update(done, note=name)
            order = order_of(sample.batch_size, name=name, round_number=round_number, seed=config.seed)
            changed = permuted(
                sample, inputs=run.model.inputs, features=features, order=torch.from_numpy(order), joined=joined
            )
            values.append(_metrics(run, changed)[metric])
            done += 1
        losses = tuple(sign * (baseline - value) for value in values)
        found.append(FeatureImportance(name=name, features=features, permuted=tuple(values), losses=losses))
    progress.update(done)
    progress.end()
    return Importance(
        metric=metric,
        baseline=baseline,
        rows=rows,
        num_samples=sample.batch_size,
        num_rows=num_rows,
        rounds=config.rounds,
        seed=config.seed,
        features=tuple(sorted(found, key=lambda each: -each.mean)),
    )


def _metric(run: Run, config: ImportanceConfig) -> str:
    inputs = run.model.inputs
    if not metric_names(inputs.labels, has_groups=inputs.has_groups):
        raise ConfigError(
            expected="a run whose labels an evaluation without full ranking can judge",
            found=f"{run.config.model.kind}, of which full ranking alone says how good it is",
            where="importance",
            ways_out=(
                f"how good it is, by full ranking: ziggurat evaluate {pasted(run.folder)} --split test",
                "train a model with a label to predict, whose importance can be asked for: "
                "ziggurat data inspect FILE --label COLUMN --write-schema my.toml",
            ),
        )
    if config.metric == AUTO_METRIC:
        stop = run.config.training.early_stop
        known = metric_names(inputs.labels, has_groups=inputs.has_groups)
        if stop.metric in (AUTO_METRIC, *known):
            return stop_metric(stop, labels=inputs.labels, has_groups=inputs.has_groups)
        return known[0]  # training stopped by a metric of the user's own, which is code and not in the folder
    known = [name for name in metric_names(inputs.labels, has_groups=inputs.has_groups) if has_direction(name)]
    if config.metric not in known:
        near = [name for name in known if name.partition("/")[0] == config.metric]
        near = near or [*nearest_names(config.metric, known), known[0]]
        raise ConfigError(
            expected="a metric of the evaluation with a direction: " + ", ".join(known),
            found=repr(config.metric),
            where="importance, metric",
            ways_out=[f"--metric {pasted(name)}" for name in dict.fromkeys(near)],
        )
    return config.metric


def _parts(run: Run, config: ImportanceConfig) -> dict[str, tuple[str, ...]]:
    """Return what is permuted together, by name: the groups, then the features in none of them."""
    known = feature_names(run.model.inputs)
    groups = {name: tuple(members) for name, members in config.groups.items()}
    grouped = [name for members in groups.values() for name in members]
    asked = config.features or tuple(name for name in known if name not in grouped)
    unknown = [name for name in (*grouped, *asked) if name not in known]
    # A group of one feature may bear its name, since both mean the same.
    taken = [name for name in groups if name in known and groups[name] != (name,)]
    twice = [name for name in known if (*grouped, *asked).count(name) > 1]
    if unknown or twice or taken or not all(groups.values()):
        problem = f"{', '.join(map(repr, unknown))}: no such feature" if unknown else ""
        problem = problem or (f"{', '.join(twice)}: named twice" if twice else "")
        problem = problem or (f"{', '.join(taken)}: a group with the name of a feature" if taken else "an empty group")
        raise ConfigError(
            expected="every feature once, alone or in one group, out of " + ", ".join(known),
            found=problem,
            where="importance",
            ways_out=(
                *(f"did you mean {near!r}?" for name in unknown[:1] for near in nearest_names(name, known)),
                "correct the names",
            ),
        )
    return groups | {name: (name,) for name in asked}


def _sampled(run: Run, tables: Iterable[pa.Table], config: ImportanceConfig) -> tuple[Batch, int]:
    """Some of the rows, in their order, each with the same chance; and how many there are.

    Every row draws a number; those with the smallest stay. Memory: twice the sample and one table.
    """
    rng = np.random.default_rng(config.seed)
    kept: list[pa.Table] = []
    keys = np.empty(0)
    num_rows = 0
    for table in tables:
        num_rows += len(table)
        kept.append(table)
        # One number a row, also for rows that will go: the draw does not depend on the size of the tables.
        keys = np.concatenate([keys, rng.random(len(table))])
        # Sorting at twice the sample, not at every table, keeps it rare.
        if config.samples and len(keys) > 2 * config.samples:
            kept, keys = _smallest(kept, keys, config.samples)
    if config.samples and len(keys) > config.samples:
        kept, keys = _smallest(kept, keys, config.samples)
    if not num_rows:
        raise DataError(
            expected="rows to permute features in", found="none", where="importance", ways_out="name other data"
        )
    return table_to_batch(pa.concat_tables(kept).combine_chunks(), run.model.inputs), num_rows


def _smallest(tables: Sequence[pa.Table], keys: np.ndarray, count: int) -> tuple[list[pa.Table], np.ndarray]:
    # np.argpartition gives the smallest in any order, and rows are to stay in theirs.
    places = np.sort(np.argpartition(keys, count)[:count])
    return [pa.concat_tables(tables).take(pa.array(places)).combine_chunks()], keys[places]


def _metrics(run: Run, sample: Batch) -> dict[str, float]:
    team = run.team
    batches = _own_batches(run, sample)
    found = evaluate_batches(run.model, batches, inputs=run.model.inputs, process_group=team.process_group)
    return found.metrics


def _own_batches(run: Run, sample: Batch) -> Iterator[Batch]:
    """This rank's share of each global batch; every rank has the same number of them."""
    settings = run.config.training
    team = run.team
    size = (settings.evaluation_batch_size or 4 * settings.loader.batch_size) * team.world_size
    for start in range(0, sample.batch_size, size):
        count = min(size, sample.batch_size - start)
        first, last = (start + count * (team.rank + end) // team.world_size for end in (0, 1))
        yield sample.rows(first, last)
