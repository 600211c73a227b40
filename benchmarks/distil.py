"""Students of a logged teacher over the drift generator: which head gains how much, with a stale and a biased teacher.

    all traffic   16,384 rows a window ─► large model ─► a version after each window ─► scores of later windows, logged
    own traffic    1,536 rows a window ─► score ─► train small model, once, from labels and what the teacher said

The teacher that is stale by k scores window t by its weights of before window t − k. *Drifting*: it is trained on all
rows of each window. *Biased*: the rows that are not the student's come from another domain: ids of two features mean
something else there, and three of four negatives are left out, so that its probabilities are too high.

    labels           the student without a teacher
    single           the served logits learn from both, w = 1
    single chosen    w of 0.1, 0.3, 1, 3
    aux              an auxiliary head, w = α = β = 1
    aux from 1/2     the same, whose head starts at 1/2 and not at the mean of its targets
    scaled           an auxiliary head with (α, β, w) out of six
    adapter          the same (α, β, w), with adapter

Settings are chosen by the mean NE of the windows for validation over all seeds; then the windows for the test, later
ones, are read. A seed is a world of its own: rows, teacher, first weights and order; differences are paired by seed.
Under Adam the sizes of a loss cancel out in what the head learns, so w and β are one setting, w·β.

What a stream joins, and when, is tested and not measured here: windows are in memory, each with the scores that a
stream would have joined (`ziggurat stream --teacher`).

`ziggurat bench distil`
"""

from __future__ import annotations

import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pyarrow as pa
import torch
from numpy.typing import NDArray

import ziggurat as zg
from benchmarks.harness import say
from benchmarks.report import Report
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.encoded.records import encoded_schema, extra_column, table_to_batch
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.features.schema import Encoding
from ziggurat.models import Model
from ziggurat.models.dcn_v2 import CrossConfig
from ziggurat.precision import Precision
from ziggurat.runs.teachers.student import mean_targets
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.config import TrainingConfig
from ziggurat.training.distillation import DistilConfig, DistilHead, teach
from ziggurat.training.metrics.functions import auc, calibration, normalised_entropy
from ziggurat.training.trainer import Trainer

LABEL = "label"
CARDINALITIES = (20, 40, 60, 100, 200, 400)
CLICK_RATE = 0.1
OTHERS_MEAN = ("C4", "C6")  # features whose ids mean something else in the other domain
KEPT_NEGATIVES = 0.25  # of the other domain
TEACHER = zg.DCNv2Config(embedding_dim=16, deep=zg.MLPConfig(hidden_dims=(64, 32)))
STUDENT = zg.DCNv2Config(
    embedding_dim=4, cross=CrossConfig(num_layers=1), deep=zg.MLPConfig(hidden_dims=(16,)), numeric=TEACHER.numeric
)
NONE = DistilConfig()
SINGLE = DistilConfig(head=DistilHead.SINGLE_HEAD)
AUX = DistilConfig(head=DistilHead.AUX_HEAD)
WEIGHTS = (0.1, 0.3, 1.0, 3.0)
SCALINGS = ((1.0, 1.0, 1.0), (1.0, 1.0, 3.0), (3.0, 1.0, 1.0), (3.0, 1.0, 3.0), (1.0, 3.0, 3.0), (3.0, 3.0, 3.0))

Metrics = dict[str, float]
Scores = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the study.

    Args:
        seeds: worlds.
        windows: of a world.
        first: window that the student begins with.
        warm: its windows that nothing is measured on.
        valid: windows after these, by which settings are chosen; those behind them are for the test.
        traffic: rows of a window that the teacher is trained on.
        own: rows of them that are the student's.
        staleness: windows, of the drifting teacher and of the biased one.
        batch_size: of the student.
    """

    seeds: int = 5
    windows: int = 22
    first: int = 8
    warm: int = 2
    valid: int = 4
    traffic: int = 16_384
    own: int = 1_536
    staleness: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1, 3, 7), (0, 7))
    batch_size: int = 128


@dataclass(frozen=True, kw_only=True)
class World:
    """The data of a seed.

    Args:
        seed: of everything.
        preprocessing: of its rows.
        frames: all rows of each window.
        own: encoded rows of the student, for each window.
    """

    seed: int
    preprocessing: Preprocessing
    frames: list[pl.DataFrame]
    own: list[pa.Table]

    def labels(self, window: int) -> NDArray[np.float32]:
        """Return the labels of the student's rows."""
        return self.own[window].column(f"label:{LABEL}").to_numpy()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Mean metrics of a student over the windows for validation and for the test."""

    valid: Metrics
    test: Metrics


def world_of(seed: int, size: Size) -> World:
    """Draw the windows of a seed: preferences that move, and a rate of clicks that goes up and down."""
    made = zg.SyntheticConfig(
        num_dense=4,
        cardinalities=CARDINALITIES,
        click_rate=CLICK_RATE,
        dense_share=0.1,
        first_order_share=0.4,
        second_order_share=0.5,
        third_order_share=0.0,
        seed=seed,
    )
    drift = zg.DriftConfig(
        teacher=made, window_rows=size.traffic, preference_rate=0.02, season_windows=12.0, season_logit=0.3
    )
    generator = zg.DriftingTeacher(drift)
    no_score = pl.lit(None, dtype=pl.Float32)
    frames = [generator.frame(window).with_columns(teacher=no_score) for window in range(size.windows)]
    schema = replace(generator.schema(encoding=Encoding.IDENTITY), extras=(zg.Extra(name="teacher"),))
    preprocessing = Preprocessing.fit(schema, [RawChunk.of(frames[0])])
    own = [encoded(preprocessing, frame[: size.own]) for frame in frames]
    return World(seed=seed, preprocessing=preprocessing, frames=frames, own=own)


def encoded(preprocessing: Preprocessing, frame: pl.DataFrame) -> pa.Table:
    """Encode rows."""
    return preprocessing.encode(RawChunk.of(frame)).combine_chunks()


def of_another_domain(frame: pl.DataFrame, *, seed: int, window: int) -> pl.DataFrame:
    """Return rows as another domain has them: ids that mean something else, and fewer negatives."""
    columns: list[pl.Series] = []
    for name in OTHERS_MEAN:
        index = int(name[1:]) - 1
        meaning = np.random.default_rng((seed, index)).permutation(CARDINALITIES[index])
        columns.append(pl.Series(name, meaning[frame[name].to_numpy()].astype(np.int32)))
    drawn = np.random.default_rng((seed, window, 1)).random(frame.height)
    is_kept = (frame[LABEL].to_numpy() == 1) | (drawn < KEPT_NEGATIVES)
    return frame.with_columns(columns).filter(pl.Series(is_kept))


def training(seed: int, *, learning_rate: float, batch_size: int) -> TrainingConfig:
    """Settings of one pass, without anything that is measured or chosen at the start."""
    return TrainingConfig(
        epochs=1,
        seed=seed,
        threads=1,
        learning_rate=learning_rate,
        table_learning_rate=0.2 if batch_size > 128 else 0.05,
        precision=Precision.FP32,
        log_every=100_000,
        loader=LoaderConfig(batch_size=batch_size, seed=seed, shuffle_buffer_rows=100_000),
    )


def built(config: zg.DCNv2Config, world: World) -> Model:
    """Build a model whose scores start at the rate of clicks."""
    model = zg.build_model(config, world.preprocessing.inputs, seed=world.seed)
    with torch.no_grad():
        model.output_biases()[0].add_(math.log(CLICK_RATE / (1.0 - CLICK_RATE)))
    return model


def stream(
    model: Model,
    windows: Sequence[pa.Table],
    *,
    config: TrainingConfig,
    before: Callable[[int], None],
    loss: Callable[..., object] | None = None,
) -> None:
    """Train windows one after the other, once; `before` is called with the number of each before it is trained."""
    inputs = model.inputs
    empty = MemoryDataset(encoded_schema(inputs).empty_table(), inputs)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, config=config, train=empty, folder=folder, loss=loss)  # pyright: ignore[reportArgumentType]
        with trainer.over_windows():
            for number, table in enumerate(windows):
                before(number)
                for _ in trainer.steps(MemoryDataset(table, inputs)):
                    pass


@torch.no_grad()
def scores_of(model: Model, table: pa.Table) -> Scores:
    """Return the probabilities of rows."""
    was_training = model.training
    model.eval()
    logits = model(table_to_batch(table, model.inputs)).float()
    model.train(was_training)
    return torch.sigmoid(logits)[:, 0].numpy()


def teacher_scores(world: World, size: Size, *, is_biased: bool, staleness: Sequence[int]) -> dict[int, list[Scores]]:
    """Train a teacher over all windows, and return what it says of the student's rows, by staleness and window."""
    tables: list[pa.Table] = []
    for window, frame in enumerate(world.frames):
        if is_biased:
            other = of_another_domain(frame[size.own :], seed=world.seed, window=window)
            frame = pl.concat([frame[: size.own], other])
        tables.append(encoded(world.preprocessing, frame))
    model = built(TEACHER, world)
    none = np.empty(0, dtype=np.float32)
    found = {stale: [none] * size.windows for stale in staleness}

    def before(window: int) -> None:
        for stale in staleness:
            if size.first <= window + stale < size.windows:
                found[stale][window + stale] = scores_of(model, world.own[window + stale])

    stream(model, tables, config=training(world.seed, learning_rate=0.002, batch_size=512), before=before)
    return found


def measured(scores: Scores, labels: NDArray[np.float32]) -> Metrics:
    """Return the metrics of a window."""
    return {
        "auc": auc(scores, labels),
        "ne": normalised_entropy(scores, labels),
        "calibration": calibration(scores, labels),
    }


def mean_of(found: Sequence[Metrics]) -> Metrics:
    """Return the means over windows."""
    return {name: statistics.mean(each[name] for each in found) for name in found[0]}


def outcome_of(world: World, size: Size, of_window: Callable[[int], Scores]) -> Outcome:
    """Return the metrics of scores over the windows that are measured."""
    begin = size.first + size.warm
    found = [measured(of_window(window), world.labels(window)) for window in range(begin, size.windows)]
    return Outcome(valid=mean_of(found[: size.valid]), test=mean_of(found[size.valid :]))


def student(
    world: World,
    size: Size,
    distil: DistilConfig,
    told: Sequence[Scores] | None,
    *,
    model_config: zg.DCNv2Config = STUDENT,
    starts_at_half: bool = False,
) -> Outcome:
    """Stream a student over its windows, each scored before it is trained."""
    model = built(model_config, world)
    tables = [_with_scores(world.own[at], told[at] if told else None) for at in range(size.first, size.windows)]
    means = mean_targets(distil, MemoryDataset(tables[0], model.inputs))
    taught = teach(model, distil, seed=world.seed, mean_targets=means)
    if starts_at_half and taught is not None:
        for head in taught.heads.modules():
            if isinstance(head, torch.nn.Linear):
                torch.nn.init.zeros_(head.bias)
    scores: dict[int, Scores] = {}

    def before(number: int) -> None:
        scores[size.first + number] = scores_of(model, tables[number])

    config = training(world.seed, learning_rate=0.005, batch_size=size.batch_size)
    stream(model, tables, config=config, before=before, loss=None if taught is None else taught.loss)
    return outcome_of(world, size, scores.__getitem__)


def _with_scores(table: pa.Table, scores: Scores | None) -> pa.Table:
    if scores is None:
        return table
    name = extra_column("teacher")
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), pa.array(scores.astype(np.float32)))


# ---------------------------------------------------------------------------------------------------------- the study


def best_of(tried: Mapping[DistilConfig, Sequence[Outcome]]) -> DistilConfig:
    """Return the settings with the lowest mean NE of the windows for validation."""
    return min(tried, key=lambda each: statistics.mean(outcome.valid["ne"] for outcome in tried[each]))


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A teacher, and what students of it reached.

    Args:
        name: for figures, such as biased_7.
        teacher: metrics of its scores, by seed.
        arms: metrics of students for the test, by seed.
        settings: what was chosen, by arm.
    """

    name: str
    teacher: list[Metrics]
    arms: dict[str, list[Metrics]]
    settings: dict[str, str]


def studied(
    name: str, worlds: Sequence[World], size: Size, *, told: Sequence[list[Scores]], plain: Sequence[Outcome]
) -> Condition:
    """Run all students of one teacher over all worlds."""

    def outcomes(distil: DistilConfig, *, starts_at_half: bool = False) -> list[Outcome]:
        return [
            student(world, size, distil, scores, starts_at_half=starts_at_half)
            for world, scores in zip(worlds, told, strict=True)
        ]

    singles = {each: outcomes(each) for each in (replace(SINGLE, loss_weight=weight) for weight in WEIGHTS)}
    scaled = {
        each: outcomes(each)
        for each in (
            replace(AUX, label_scaling=alpha, gradient_scaling=beta, loss_weight=weight)
            for alpha, beta, weight in SCALINGS
        )
    }
    best_single = best_of(singles)
    best_scaled = best_of(scaled)
    arms = {
        "labels": list(plain),
        "single": singles[SINGLE],
        "single_chosen": singles[best_single],
        "aux": scaled[AUX],
        "scaled": scaled[best_scaled],
        "adapter": outcomes(replace(best_scaled, adapter=True)),
    }
    if name.endswith("_0"):
        arms["aux_from_half"] = outcomes(AUX, starts_at_half=True)
    begin = size.first + size.warm + size.valid
    teacher = [
        mean_of([measured(scores[window], world.labels(window)) for window in range(begin, size.windows)])
        for world, scores in zip(worlds, told, strict=True)
    ]
    found = Condition(
        name=name,
        teacher=teacher,
        arms={arm: [outcome.test for outcome in each] for arm, each in arms.items()},
        settings={
            "single_chosen": f"w = {best_single.loss_weight:g}",
            "scaled": f"α = {best_scaled.label_scaling:g}, β = {best_scaled.gradient_scaling:g}, "
            f"w = {best_scaled.loss_weight:g}",
        },
    )
    for arm in arms:
        say(f"{name} {arm}: {mean_of(found.arms[arm])} {found.settings.get(arm, '')}")
    return found


def gains(condition: Condition, arm: str, metric: str) -> list[float]:
    """Return what an arm has more than labels alone, by seed; of NE, what it has less."""
    sign = -1.0 if metric == "ne" else 1.0
    pairs = zip(condition.arms[arm], condition.arms["labels"], strict=True)
    return [sign * (ours[metric] - theirs[metric]) for ours, theirs in pairs]


def figure_of(condition: Condition, arm: str) -> dict[str, object]:
    """Return the numbers of one arm."""
    ours = mean_of(condition.arms[arm])
    plain = mean_of(condition.arms["labels"])
    teacher = mean_of(condition.teacher)
    found: dict[str, object] = {"name": f"{condition.name}_{arm}", **ours, "teacher_auc": teacher["auc"]}
    if arm == "labels":
        return found
    for metric in ("auc", "ne"):
        theirs = [each[metric] for each in condition.arms["labels"]]
        difference = paired_difference([each[metric] for each in condition.arms[arm]], theirs)
        found |= {
            f"{metric}_gain": statistics.mean(gains(condition, arm, metric)),
            f"{metric}_gain_sd": difference.sd,
            f"{metric}_p": difference.t_p,
        }
    found["transfer"] = statistics.mean(gains(condition, arm, "auc")) / (teacher["auc"] - plain["auc"])
    found["calibration_shift"] = ours["calibration"] / plain["calibration"] - 1.0
    found["settings"] = condition.settings.get("scaled" if arm == "adapter" else arm, "")
    return found


def ratio_figure(name: str, condition: Condition, *, ours: str, peer: str, goal: float) -> dict[str, object]:
    """Return the ratio of two gains in AUC, and whether their difference could be chance."""
    mine = gains(condition, ours, "auc")
    theirs = gains(condition, peer, "auc")
    ours_mean = statistics.mean(mine)
    peer_mean = statistics.mean(theirs)
    is_met = ours_mean > 0.0 and ours_mean >= goal * peer_mean
    return {
        "name": name,
        "ours": ours_mean,
        "peer": peer_mean,
        "ratio": ours_mean / peer_mean if peer_mean > 0.0 else None,  # of a loss there is no multiple
        "p": paired_difference(mine, theirs).t_p,
        "goal": goal,
        "verdict": "met" if is_met else "missed",
    }


def kept_figure(name: str, fresh: Condition, stale: Condition, *, arm: str, goal: float) -> dict[str, object]:
    """Return which part of its gain in AUC an arm keeps with a teacher that is stale."""
    before = gains(fresh, arm, "auc")
    after = gains(stale, arm, "auc")
    kept = statistics.mean(after) / statistics.mean(before)
    figure: dict[str, object] = {"name": name, "ours": statistics.mean(after), "peer": statistics.mean(before)}
    figure |= {"ratio": kept, "p": paired_difference(after, before).t_p}
    return figure | ({"goal": goal, "verdict": "met" if kept >= goal else "missed"} if goal else {})


def table_of(condition: Condition) -> str:
    """Return a Markdown table of all arms."""
    teacher = mean_of(condition.teacher)
    lines = [
        f"`{condition.name}`: the teacher has an AUC of {teacher['auc']:.4f}, an NE of {teacher['ne']:.4f} and a "
        f"calibration of {teacher['calibration']:.3f}.",
        "",
        "| learns from | AUC | gain ± sd | p | transfer | NE | gain | p | calibration | settings |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for arm, found in condition.arms.items():
        ours = mean_of(found)
        if arm == "labels":
            lines.append(f"| labels | {ours['auc']:.4f} | | | | {ours['ne']:.4f} | | | {ours['calibration']:.3f} | |")
            continue
        figure = figure_of(condition, arm)
        lines.append(
            f"| {arm} | {ours['auc']:.4f} | {figure['auc_gain']:+.4f} ± {figure['auc_gain_sd']:.4f} | "
            f"{figure['auc_p']:.3f} | {figure['transfer']:.2f} | {ours['ne']:.4f} | {figure['ne_gain']:+.4f} | "
            f"{figure['ne_p']:.3f} | {ours['calibration']:.3f} | {figure['settings']} |"
        )
    return "\n".join(lines)


def other_students(worlds: Sequence[World], size: Size, told: Sequence[list[Scores]]) -> list[Condition]:
    """Return what becomes of both heads where the student is as large as its teacher, and where labels are not scarce.

    Both with the teacher that drifts and is not stale, and w = α = β = 1.
    """
    many = replace(size, own=4 * size.own)
    richer = [
        replace(world, own=[encoded(world.preprocessing, frame[: many.own]) for frame in world.frames])
        for world in worlds
    ]
    told_more = [teacher_scores(world, many, is_biased=False, staleness=(0,))[0] for world in richer]
    found: list[Condition] = []
    for name, where, which, scores, config in (
        ("as_large", worlds, size, told, TEACHER),
        ("four_times_the_labels", richer, many, told_more, STUDENT),
    ):
        pairs = list(zip(where, scores, strict=True))
        arms = {
            arm: [student(world, which, distil, each, model_config=config).test for world, each in pairs]
            for arm, distil in (("labels", NONE), ("single", SINGLE), ("aux", AUX))
        }
        begin = size.first + size.warm + size.valid
        teacher = [
            mean_of([measured(each[window], world.labels(window)) for window in range(begin, size.windows)])
            for world, each in pairs
        ]
        found.append(Condition(name=name, teacher=teacher, arms=arms, settings={}))
        say(f"{name}: " + ", ".join(f"{arm} {mean_of(each)}" for arm, each in arms.items()))
    return found


def run(*, quick: bool = False) -> Report:
    """Make worlds, train teachers, choose settings, and measure students."""
    size = Size()
    if quick:
        size = Size(seeds=2, windows=11, first=3, warm=1, valid=2, traffic=4_096, own=512, staleness=((0, 2), (0,)))
    worlds = [world_of(seed, size) for seed in range(size.seeds)]
    told = {
        kind: [teacher_scores(world, size, is_biased=is_biased, staleness=staleness) for world in worlds]
        for kind, is_biased, staleness in (("drift", False, size.staleness[0]), ("biased", True, size.staleness[1]))
    }
    say("teachers are trained")
    plain = [student(world, size, NONE, None) for world in worlds]
    conditions = {
        f"{kind}_{stale}": studied(
            f"{kind}_{stale}", worlds, size, told=[scores[stale] for scores in by_world], plain=plain
        )
        for kind, by_world in told.items()
        for stale in by_world[0]
    }
    others = other_students(worlds, size, [scores[0] for scores in told["drift"]])
    tests = size.windows - size.first - size.warm - size.valid
    report = Report(
        benchmark="distil",
        claim="Students of a logged teacher on the drift generator: single head, auxiliary head, scalings and adapter.",
        command="ziggurat bench distil",
    )
    report.notes += [
        f"{size.seeds} seeds; windows of {size.traffic:,} rows, {size.own:,} of them the student's, in one pass; "
        f"settings chosen by NE over {size.valid} windows of all seeds, measured over {tests} later ones",
        "gains are means over seeds of the difference to labels alone, ± their standard deviation, p of a paired "
        "t-test; transfer: gain in AUC over (teacher − labels alone)",
    ]
    add_figures(report, conditions, others)
    return report


def add_figures(report: Report, conditions: Mapping[str, Condition], others: Sequence[Condition]) -> None:
    """Write ratios first, then every arm, and tables."""
    ratio = functools.partial(ratio_figure, goal=2.0)
    for kind in ("drift", "biased"):
        fresh = conditions[f"{kind}_0"]
        report.figures += [
            ratio(f"{kind}_aux_head_gain_ratio", fresh, ours="aux", peer="single"),
            ratio(f"{kind}_aux_head_gain_ratio_chosen", fresh, ours="scaled", peer="single_chosen"),
            ratio_figure(f"{kind}_scalings_gain_ratio", fresh, ours="scaled", peer="aux", goal=1.0),
            ratio_figure(f"{kind}_adapter_gain_ratio", fresh, ours="adapter", peer="scaled", goal=1.0),
            ratio_figure(f"{kind}_start_gain_ratio", fresh, ours="aux", peer="aux_from_half", goal=1.0),
        ]
        stale = list(conditions)[-1] if kind == "biased" else [name for name in conditions if name.startswith(kind)][-1]
        for arm, goal in (("single_chosen", 0.0), ("aux", 0.0), ("scaled", 0.0), ("adapter", 0.7)):
            name = f"{stale}_{arm}_keeps"
            report.figures.append(kept_figure(name, fresh, conditions[stale], arm=arm, goal=goal))
    report.figures += [ratio(f"{each.name}_aux_head_gain_ratio", each, ours="aux", peer="single") for each in others]
    lines = ["| ratio of gains in AUC | ours | peer | ratio | p | goal |", "|---|---:|---:|---:|---:|---|"]
    for figure in report.figures:
        goal = f"{figure['goal']} {figure['verdict']}" if "goal" in figure else ""
        shown = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
        gained = f"{figure['ours']:+.4f} | {figure['peer']:+.4f}"
        lines.append(f"| {figure['name']} | {gained} | {shown} | {figure['p']:.3f} | {goal} |")
    report.tables.append("\n".join(lines))
    for condition in (*conditions.values(), *others):
        report.figures += [figure_of(condition, arm) for arm in condition.arms]
        report.tables.append(table_of(condition))
