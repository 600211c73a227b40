"""Students of a logged teacher in four worlds: which head gains how much, with a stale and a biased teacher.

    all traffic   16,384 rows a window ─► large model ─► a version after each window ─► scores of later windows, logged
    own traffic    1,536 rows a window ─► score ─► train small model, once, from labels and what the teacher said

The teacher that is stale by k scores window t by its weights of before window t − k. Worlds (`distil_worlds.py`) are
the drift generator, the same with a teacher that is biased, MovieLens-1M by time, and made sessions.

    labels           the student without a teacher
    single           the served logits learn from both, w = 1
    single chosen    w of 0.1, 0.3, 1, 3, 9
    aux              an auxiliary head, w = α = β = 1
    aux from 1/2     the same, whose head starts at 1/2 and not at the mean of its targets
    scaled           an auxiliary head with (α, β, w) out of six
    adapter          the same (α, β, w), with adapter
    vectors          labels, and the teacher's last four vectors of the user as a feature (LoopFM), where it is known
    vectors and aux  these, and an auxiliary head, w = α = β = 1

Settings are chosen by the mean NE of the windows for validation over all seeds; then the windows for the test, later
ones, are read. A seed has rows, teacher, first weights and order of its own; differences are paired by seed. Under Adam
the sizes of a loss cancel out in what the head learns, so w and β are one setting, w·β. Besides, both heads are studied
where the student is as large as its teacher, and where it has four times the rows.

Finished students are kept, one JSON file each in `runs/distil`, in a folder of the settings of their world: a run that
was stopped is taken up. Remove the folder when code has changed.

`ziggurat bench distil [--worlds drift,biased,movielens,sessions] [--runs FOLDER]`, with MovieLens-1M in the cache
(`ziggurat data fetch movielens-1m`)
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.distil_students import MANY, Metrics, Outcome, Seed, Student, mean_of
from benchmarks.distil_worlds import WORLDS, Size, World
from benchmarks.harness import ROOT, chosen, say
from benchmarks.report import Report
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.distillation import DistilConfig, DistilHead

SINGLE = DistilConfig(head=DistilHead.SINGLE_HEAD)
AUX = DistilConfig(head=DistilHead.AUX_HEAD)
WEIGHTS = (0.1, 0.3, 1.0, 3.0, 9.0)
SCALINGS = ((1.0, 1.0, 1.0), (1.0, 1.0, 3.0), (3.0, 1.0, 1.0), (3.0, 1.0, 3.0), (1.0, 3.0, 3.0), (3.0, 3.0, 3.0))


# ---------------------------------------------------------------------------------------------------- finished students


class Kept:
    """Keeps what was measured of teachers and students of a world, one file each.

    Args:
        folder: of these files; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def outcome(self, name: str, make: Callable[[], Outcome]) -> Outcome:
        """Return what is kept by a name, or make and keep it."""
        if self.folder is None:
            return make()
        path = self.folder / f"{name}.json"
        if not path.exists():
            found = make()
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".part")
            partial.write_text(json.dumps(asdict(found)))
            partial.replace(path)
        return Outcome(**json.loads(path.read_text()))


def folder_of(world: World, size: Size, runs: Path) -> Path:
    """Return where finished students of a world are kept: other settings have another folder."""
    settings = (size, world.teacher, world.student, world.teacher_rates, world.student_rates)
    return runs / f"{world.name}-{hashlib.sha256(repr(settings).encode()).hexdigest()[:8]}"


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
    settings: dict[str, str] = field(default_factory=dict)


class Study:
    """Runs the students of a world.

    Args:
        world: that they live in.
        size: of the study.
        kept: has those that are finished.
    """

    def __init__(self, world: World, size: Size, kept: Kept) -> None:
        self.world = world
        self.size = size
        self.kept = kept
        self.seeds = [Seed(world, size, seed) for seed in range(size.seeds)]

    def students(self, which: Student, *, stale: int) -> list[Outcome]:
        """Return what a kind of student reached, by seed."""
        found: list[Outcome] = []
        for seed in self.seeds:
            make = functools.partial(seed.of_student, which, stale)
            age = "" if which == Student() else f"stale_{stale}_"
            found.append(self.kept.outcome(f"{age}{which.name}_seed_{seed.seed}", make))
        return found

    def teachers(self, *, stale: int, times: int = 1) -> list[Metrics]:
        """Return the metrics of the teacher on the student's rows of the test, by seed."""
        name = f"teacher_stale_{stale}_times_{times}"
        return [
            self.kept.outcome(f"{name}_seed_{seed.seed}", functools.partial(seed.of_teacher, stale, times=times)).test
            for seed in self.seeds
        ]

    def condition(self, stale: int) -> Condition:
        """Run all students of a teacher that is so old."""
        singles = {
            each: self.students(Student(distil=each), stale=stale)
            for each in (replace(SINGLE, loss_weight=weight) for weight in WEIGHTS)
        }
        scaled = {
            each: self.students(Student(distil=each), stale=stale)
            for each in (
                replace(AUX, label_scaling=alpha, gradient_scaling=beta, loss_weight=weight)
                for alpha, beta, weight in SCALINGS
            )
        }
        best_single = best_of(singles)
        best_scaled = best_of(scaled)
        with_adapter = Student(distil=replace(best_scaled, adapter=True))
        arms = {
            "labels": self.students(Student(), stale=stale),
            "single": singles[SINGLE],
            "single_chosen": singles[best_single],
            "aux": scaled[AUX],
            "scaled": scaled[best_scaled],
            "adapter": self.students(with_adapter, stale=stale),
        }
        if not stale:
            arms["aux_from_half"] = self.students(Student(distil=AUX, starts_at_half=True), stale=stale)
            if self.world.user:
                arms["vectors"] = self.students(Student(reads_vectors=True), stale=stale)
                arms["vectors_aux"] = self.students(Student(distil=AUX, reads_vectors=True), stale=stale)
        return self._said(
            Condition(
                name=f"{self.world.name}_{stale}",
                teacher=self.teachers(stale=stale),
                arms={arm: [outcome.test for outcome in each] for arm, each in arms.items()},
                settings={
                    "single_chosen": f"w = {best_single.loss_weight:g}",
                    "scaled": f"α = {best_scaled.label_scaling:g}, β = {best_scaled.gradient_scaling:g}, "
                    f"w = {best_scaled.loss_weight:g}",
                },
            )
        )

    def other_students(self) -> list[Condition]:
        """Return what becomes of both heads where the student is as large as its teacher, and where labels are many.

        Both with the teacher that is not stale, and w = α = β = 1.
        """
        found: list[Condition] = []
        for name, plain in (
            ("as_large", Student(is_large=True)),
            ("four_times_the_labels", Student(times_own=MANY)),
        ):
            arms = {
                arm: [outcome.test for outcome in self.students(replace(plain, distil=distil), stale=0)]
                for arm, distil in (("labels", plain.distil), ("single", SINGLE), ("aux", AUX))
            }
            teacher = self.teachers(stale=0, times=plain.times_own)
            found.append(self._said(Condition(name=f"{self.world.name}_{name}", teacher=teacher, arms=arms)))
        return found

    def _said(self, condition: Condition) -> Condition:
        for arm, found in condition.arms.items():
            say(f"{condition.name} {arm}: {mean_of(found)} {condition.settings.get(arm, '')}")
        return condition


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
    room = teacher["auc"] - plain["auc"]
    found["transfer"] = statistics.mean(gains(condition, arm, "auc")) / room if room > 0.0 else None
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
    met = f"; it has met the users of {teacher['known_users']:.1%} of the rows" if "known_users" in teacher else ""
    lines = [
        f"`{condition.name}`: the teacher has an AUC of {teacher['auc']:.4f}, an NE of {teacher['ne']:.4f} and a "
        f"calibration of {teacher['calibration']:.3f}{met}.",
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
        transfer = "" if figure["transfer"] is None else f"{figure['transfer']:.2f}"
        lines.append(
            f"| {arm} | {ours['auc']:.4f} | {figure['auc_gain']:+.4f} ± {figure['auc_gain_sd']:.4f} | "
            f"{figure['auc_p']:.3f} | {transfer} | {ours['ne']:.4f} | {figure['ne_gain']:+.4f} | "
            f"{figure['ne_p']:.3f} | {ours['calibration']:.3f} | {figure['settings']} |"
        )
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------- the report


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """`--worlds`, `--runs`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench distil")
    parser.add_argument("--worlds", default=",".join(WORLDS), help="out of these (default: %(default)s)")
    parser.add_argument("--runs", type=Path, help="folder of finished students (default: runs/distil)")
    return parser.parse_args(list(arguments))


def run(
    *,
    quick: bool = False,
    options: argparse.Namespace | None = None,
    save: Callable[[Report], object] | None = None,
) -> Report:
    """Train teachers, choose settings, and measure students of each world.

    Args:
        quick: fewer windows, rows and seeds.
        options: of `parse_options`.
        save: called with what was found so far after each world but the last.
    """
    options = options or parse_options([])
    wanted = chosen(options.worlds, known=tuple(WORLDS), option="ziggurat bench distil --worlds")
    names = list(dict.fromkeys(wanted))
    runs = options.runs or ROOT / "runs" / ("distil_quick" if quick else "distil")
    is_whole = set(names) == set(WORLDS)
    report = Report(
        benchmark="distil" if is_whole else "_".join(["distil", *names]),
        claim=f"Students of a logged teacher ({', '.join(names)}): single head, auxiliary head, scalings and adapter.",
        command="ziggurat bench distil" if is_whole else f"ziggurat bench distil --worlds {','.join(names)}",
    )
    report.notes.append(
        "gains are means over seeds of the difference to labels alone, ± their standard deviation, p of a paired "
        "t-test; transfer: gain in AUC over (teacher − labels alone), where that is positive"
    )
    found: list[tuple[World, list[Condition], list[Condition]]] = []
    for name in names:
        world = WORLDS[name]
        size = world.quick if quick else world.size
        study = Study(world, size, Kept(folder_of(world, size, runs)))
        conditions = [study.condition(stale) for stale in size.staleness]
        others = study.other_students() if world.others else []
        found.append((world, conditions, others))
        report.notes.append(note_of(world, size))
        report.figures = []
        report.tables = []
        add_figures(report, found)
        if save is not None and name != names[-1]:
            save(report)
    return report


def note_of(world: World, size: Size) -> str:
    """Return what was studied, in a line."""
    tests = size.windows - size.first - size.warm - size.valid
    return (
        f"{world.name}: {world.about}; {size.seeds} seeds, {size.windows} windows of {size.traffic:,} rows, from "
        f"window {size.first} on {size.own:,} of them the student's, in one pass; settings chosen by NE over "
        f"{size.valid} windows of all seeds, measured over {tests} later ones"
    )


def add_figures(report: Report, found: Sequence[tuple[World, list[Condition], list[Condition]]]) -> None:
    """Write ratios first, then every arm, and tables."""
    for world, conditions, others in found:
        report.figures += ratios_of(world, conditions, others)
    lines = ["| ratio of gains in AUC | ours | peer | ratio | p | goal |", "|---|---:|---:|---:|---:|---|"]
    for figure in report.figures:
        goal = f"{figure['goal']} {figure['verdict']}" if "goal" in figure else ""
        shown = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
        gained = f"{figure['ours']:+.4f} | {figure['peer']:+.4f}"
        lines.append(f"| {figure['name']} | {gained} | {shown} | {figure['p']:.3f} | {goal} |")
    report.tables.append("\n".join(lines))
    for _, conditions, others in found:
        for condition in (*conditions, *others):
            report.figures += [figure_of(condition, arm) for arm in condition.arms]
            report.tables.append(table_of(condition))


def ratios_of(world: World, conditions: Sequence[Condition], others: Sequence[Condition]) -> list[dict[str, object]]:
    """Return the ratios of gains of a world, and what is left of gains with its oldest teacher."""
    fresh = conditions[0]
    stalest = conditions[-1]
    name = world.name
    ratio = functools.partial(ratio_figure, goal=2.0)
    found = [
        ratio(f"{name}_aux_head_gain_ratio", fresh, ours="aux", peer="single"),
        ratio(f"{name}_aux_head_gain_ratio_chosen", fresh, ours="scaled", peer="single_chosen"),
        ratio_figure(f"{name}_scalings_gain_ratio", fresh, ours="scaled", peer="aux", goal=1.0),
        ratio_figure(f"{name}_adapter_gain_ratio", fresh, ours="adapter", peer="scaled", goal=1.0),
        ratio_figure(f"{name}_start_gain_ratio", fresh, ours="aux", peer="aux_from_half", goal=1.0),
    ]
    if world.user:
        found.append(ratio_figure(f"{name}_vectors_gain_ratio", fresh, ours="vectors_aux", peer="aux", goal=1.0))
    if len(conditions) > 1:
        found += [
            kept_figure(f"{stalest.name}_{arm}_keeps", fresh, stalest, arm=arm, goal=goal)
            for arm, goal in (("single_chosen", 0.0), ("aux", 0.0), ("scaled", 0.0), ("adapter", 0.7))
        ]
    return found + [ratio(f"{each.name}_aux_head_gain_ratio", each, ours="aux", peer="single") for each in others]
