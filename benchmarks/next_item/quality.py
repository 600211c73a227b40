"""Runs of next-item recipes over seeds: train what is missing, read what is finished, and say mean and deviation.

Seeds of an earlier report count beside those of runs. It has the NDCG@10 of its seeds as mean and deviation alone;
those of all seeds follow exactly, with n seeds of mean m and k of mean μ, from

    Σ (x − mean)²  =  (n − 1) sd²  +  Σ_k (x − μ)²  +  (m − μ)² n k / (n + k)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.next_item.reported import Reported, ReportedSeeds
from benchmarks.next_item.subjects import SUBJECTS, Subject, config_of, folder_of, refuse_others, settings_of
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.execute import train_run
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.records.run_folder import EVALUATION
from ziggurat.training.report.progress import Progress

HIT, GAIN = "full_recall@10", "full_ndcg@10"


@dataclass(kw_only=True)
class Found:
    """Test metrics of the finished seeds of one subject.

    Args:
        subject: which.
        reported: seeds of an earlier report; None: none.
        epochs: fewer than the recipe's; 0: the recipe's.
        precision: of runs, as each chose it.
        test: of runs, by seed.
        valid: likewise, of the weights that were kept.
    """

    subject: Subject
    reported: ReportedSeeds | None = None
    epochs: int = 0
    precision: set[str] = field(default_factory=set)
    test: dict[int, dict[str, float]] = field(default_factory=dict)
    valid: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def hits(self) -> dict[int, float]:
        """HR@10 of the test by seed, reported ones included."""
        return self._by_seed(self.reported.hr10 if self.reported else (), self.test)

    @property
    def gains(self) -> tuple[float | None, float | None]:
        """Mean and deviation of NDCG@10, reported seeds included; None where there are too few."""
        own, reported = [run[GAIN] for run in self.test.values()], self.reported
        if reported is None:
            return _mean_std(own)
        if not own:
            return reported.ndcg10_mean, reported.ndcg10_std
        return pooled(own, count=len(reported.hr10), mean=reported.ndcg10_mean, std=reported.ndcg10_std or 0.0)

    def summary(self) -> dict[str, object]:
        """The figures of the case, for the report's JSON."""
        hits, (gain, gain_std) = self.hits, self.gains
        hit, hit_std = _mean_std(list(hits.values()))
        return {
            "recipe": self.subject.recipe,
            "seeds": len(hits),
            "seed_numbers": list(hits),
            "seeds_of_earlier_report": list(self.reported.seeds) if self.reported else [],
            "hr10_mean": hit,
            "hr10_std": hit_std,
            "ndcg10_mean": gain,
            "ndcg10_std": gain_std,
            "valid_hr10": list(self._by_seed(self.reported.valid_hr10 if self.reported else (), self.valid).values()),
            "hr10": list(hits.values()),
            "goal_hr10": self.subject.hit or None,
            "goal_ndcg10": self.subject.gain or None,
            "published": self.subject.published,
            "precision": sorted(self.precision | set(self.reported.precision if self.reported else ())),
            "settings": settings_of(self.subject, epochs=self.epochs),
        }

    def _by_seed(self, reported: Sequence[float], runs: dict[int, dict[str, float]]) -> dict[int, float]:
        known = dict(zip(self.reported.seeds, reported, strict=True)) if self.reported else {}
        return dict(sorted((known | {seed: run[HIT] for seed, run in runs.items()}).items()))


def pooled(values: Sequence[float], *, count: int, mean: float, std: float) -> tuple[float, float]:
    """Mean and sample deviation of values and of others that are known by these figures alone.

    Args:
        values: at least one.
        count: how many others, at least one.
        mean: theirs.
        std: their sample deviation; 0 for a single one.
    """
    own, total = statistics.fmean(values), count + len(values)
    squares = (count - 1) * std**2 + sum((value - own) ** 2 for value in values)
    squares += (mean - own) ** 2 * count * len(values) / total
    return (count * mean + len(values) * own) / total, (squares / (total - 1)) ** 0.5


def collect(
    names: Sequence[str],
    *,
    seeds: int,
    out: Path,
    until: float,
    epochs: int,
    progress: Progress,
    reported: Reported | None = None,
) -> tuple[dict[str, Found], list[str]]:
    """All subjects, seed by seed, so that each has as many seeds as any other when time is over.

    Args:
        names: of subjects.
        seeds: 1 … so many.
        out: folder of the runs.
        until: no training starts after this time.
        epochs: see `config_of`.
        progress: where to say what happens.
        reported: an earlier report. Its seeds are neither trained nor read from `out`; its cases that are not in
            `names` are found as they are.

    Returns:
        What was found, and what is missing.

    Raises:
        ConfigError: a run that is there has other settings than the recipe.
    """
    known = reported.cases if reported else {}
    every = [name for name in SUBJECTS if name in names or name in known]
    found, left = {name: Found(subject=SUBJECTS[name], reported=known.get(name), epochs=epochs) for name in every}, []
    for seed in range(1, seeds + 1):
        for name in names:
            if seed in found[name].hits:
                continue
            run, config = folder_of(name, seed, out=out), config_of(SUBJECTS[name], seed, epochs=epochs)
            refuse_others(run, config)
            if not run.evaluation("test").exists():
                if time.time() >= until:
                    left.append(f"{name}, seed {seed}")
                    continue
                progress.say(f"\n{name}, seed {seed}")
                train_run(config, folder=run.path, resume=run.config.exists(), progress=progress)
            found[name].precision.add(load_config(run.path).training.precision.value)
            for split, kept in (("test", found[name].test), ("valid", found[name].valid)):
                kept[seed] = EVALUATION.read(run.evaluation(split))["metrics"]
    return found, left


def table(found: dict[str, Found]) -> str:
    """Markdown: one row a subject that is compared with published figures."""
    lines = ["| case | seeds | HR@10 | NDCG@10 | goal | published |", "|---|---:|---:|---:|---:|---|"]
    for name, each in found.items():
        subject = each.subject
        if not subject.against:
            goal = f"{subject.hit}" + (f" / {subject.gain}" if subject.gain else "")
            lines.append(f"| {name} | {len(each.hits)} | {_measured(each)} | {goal} | {subject.published} |")
    return "\n".join(lines)


def differences(found: dict[str, Found]) -> dict[str, dict[int, float]]:
    """HR@10 less that of the subject that a subject is compared with, by seed that both have."""
    by_case = {}
    for name, each in found.items():
        if each.subject.against:
            other = found[each.subject.against].hits if each.subject.against in found else {}
            by_case[name] = {seed: hit - other[seed] for seed, hit in each.hits.items() if seed in other}
    return by_case


def difference_table(found: dict[str, Found]) -> str:
    """Markdown: one row an ablation; "" without any."""
    by_case = differences(found)
    if not by_case:
        return ""
    lines = ["| case | what is added to scores | seeds | HR@10 | NDCG@10 | HR@10 less that of | seed by seed |"]
    lines.append("|---|---|---:|---:|---:|---|---|")
    for name, apart in by_case.items():
        each = found[name]
        other, shown = each.subject.against, "–"
        if apart:
            paired = paired_difference(list(apart.values()), [0.0] * len(apart))
            shown = f"{paired.mean:+.4f}" + (f" ± {paired.sd:.4f}, p {paired.t_p:.2g}" if len(apart) > 1 else "")
        by_seed = ", ".join(f"{seed}: {value:+.4f}" for seed, value in apart.items()) or "no common seed"
        cells = [name, each.subject.about, str(len(each.hits)), _measured(each), f"{other}: {shown}", by_seed]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(found: Found) -> str:
    """The cells of HR@10 and NDCG@10."""
    return " | ".join(_shown(*each) for each in (_mean_std(list(found.hits.values())), found.gains))


def _mean_std(values: Sequence[float]) -> tuple[float | None, float | None]:
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def _shown(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.4f}" if deviation is None else f"{mean:.4f} ± {deviation:.4f}"
