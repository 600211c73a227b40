"""What towers cost in quality: test AUC of tower models against the flat model, over compression and partition.

    planted groups   synthetic: 16 features in 4 groups; only features of one group interact
    MovieLens-1M     time split
    Frappe_x1        its own split

    flat seed 0 ─► probe on training rows ─► partition: coherent (learned), naive, diverse ─► towers, same seeds as flat

Every contestant of a subject has the same data, tables, network above the towers and settings; seeds change starting
weights, dropout and order, never the splits. Settings were chosen on validation data (docs/experiments); test data
is read once a run, at its end.

Finished runs are kept in `runs/tower_quality`, in folders named after what was trained and a hash of the whole
configuration, and not trained again: the benchmark can be stopped and taken up, and `--minutes` stops it. The work is
in the order of its weight for the targets, and the report names what is left.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.harness import ROOT
from benchmarks.quality import seeded, with_source
from benchmarks.report import Report
from benchmarks.tower_quality_subjects import SUBJECTS, Subject
from benchmarks.tower_quality_table import (
    FLAT,
    Cell,
    cells_table,
    plot_auc,
    plot_differences,
    targets,
    targets_table,
)
from ziggurat.config import to_json
from ziggurat.data.synthetic.teacher import SyntheticTeacher
from ziggurat.ops.lookup import KernelChoice
from ziggurat.plan import Towers
from ziggurat.planning.towers.partitioner import TowerPartitionConfig, TowerStrategy
from ziggurat.recipes.run_config import RanksConfig, RunConfig, load_config
from ziggurat.runs.execute import train_run
from ziggurat.runs.planning.partition import partition_run
from ziggurat.training.config import Precision
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.report.progress import Progress, show_progress

SEEDS = 5
_BEST_AUC_ROWS = 200_000


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training.

    Args:
        subject: its key.
        strategy: of the partition, or "flat".
        compression: N / D.
        seed: of weights and order.
    """

    subject: str
    strategy: str
    compression: int
    seed: int

    @property
    def stem(self) -> str:
        """What the names of its folders begin with."""
        return f"{self.strategy}_c{self.compression}_seed{self.seed}"

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.subject}, {self.strategy}, compression {self.compression}, seed {self.seed}"


@dataclass(kw_only=True)
class Results:
    """What is finished.

    Args:
        metrics: test metrics by job.
        valid_auc: of the weights that were kept, by job.
        towers: by subject and strategy.
        left: jobs for which there was no time.
    """

    metrics: dict[Job, dict[str, float]] = field(default_factory=dict)
    valid_auc: dict[Job, float] = field(default_factory=dict)
    towers: dict[tuple[str, str], Towers] = field(default_factory=dict)
    left: list[Job] = field(default_factory=list)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """`--minutes N`: start no training after so long, and report what is there (0: no limit)."""
    parser = argparse.ArgumentParser(prog="ziggurat bench tower-quality")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no training after so long")
    return parser.parse_args(list(arguments))


def work(subjects: Sequence[Subject], *, seeds: int) -> Iterator[Job]:
    """All trainings, round by round; inside a round all cells of a seed, so that what is finished can be compared."""
    for number in range(max(len(subject.rounds) for subject in subjects)):
        for subject in subjects:
            for seed in range(seeds):
                for cells_of_round in subject.rounds[number : number + 1]:
                    for strategy, compression in cells_of_round:
                        yield Job(subject=subject.key, strategy=strategy, compression=compression, seed=seed)


def config_of(subject: Subject, job: Job, *, towers: Towers | None) -> RunConfig:
    """The run of one job."""
    config = subject.config
    if towers is not None:
        module = replace(subject.module, compression=job.compression)
        config = replace(config, towers=towers, model=replace(config.model, tower_module=module))
    return seeded(with_source(config, frappe_files()), job.seed)


def frappe_files() -> Path:
    """Where the published files are expected: beside the checkout."""
    return ROOT.parent / "shared" / "data" / "frappe"


def folder_of(job: Job, config: RunConfig, *, out: Path) -> Path:
    """Where the run of `config` is, or will be: a folder that another configuration never has.

    A configuration that was written before a setting existed counts as having its default.
    """
    wanted = comparable(config)
    for path in folders_of(job, out=out):
        if comparable(load_config(path)) == wanted:
            return path
    digest = hashlib.sha256(json.dumps(to_json(wanted), sort_keys=True).encode()).hexdigest()[:10]
    return out / job.subject / f"{job.stem}_{digest}"


def folders_of(job: Job, *, out: Path) -> list[Path]:
    """Runs of the job that have begun, with these settings or others."""
    return [path.parent for path in sorted((out / job.subject).glob(f"{job.stem}_*/config.json"))]


def comparable(config: RunConfig) -> RunConfig:
    """Without what a run chooses when it starts (kernel, precision) and without what only many ranks use."""
    embedding = replace(config.model.embedding, kernel=KernelChoice.AUTO)
    return replace(
        config,
        model=replace(config.model, embedding=embedding),
        training=replace(config.training, precision=Precision.AUTO),
        parallel=RanksConfig(),
        data=replace(config.data, train=(), valid=(), test=()),
    )


def measure(job: Job, config: RunConfig, *, out: Path, progress: Progress) -> tuple[dict[str, float], float]:
    """Test metrics and validation AUC of one job: trained, or as they were written when it was."""
    run = RunFolder(folder_of(job, config, out=out))
    if not run.evaluation("test").exists():
        progress.say(f"\n{job.name}")
        train_run(config, folder=run.path, resume=run.config.exists(), progress=progress)
    test, valid = (EVALUATION.read(run.evaluation(split))["metrics"] for split in ("test", "valid"))
    return test, float(valid["auc"])


def partition(subject: Subject, strategy: str, *, out: Path, progress: Progress) -> Towers:
    """Towers from the embeddings of the subject's flat model (or its probe's), seed 0, on training rows."""
    flat = Job(subject=subject.key, strategy=FLAT, compression=1, seed=0)
    config = config_of(subject, flat, towers=None)
    if subject.probe is not None:
        flat = replace(flat, strategy="probe")
        config = seeded(with_source(subject.probe, frappe_files()), 0)
    measure(flat, config, out=out, progress=progress)
    settings = TowerPartitionConfig(num_towers=subject.num_towers, strategy=TowerStrategy(strategy))
    return partition_run(folder_of(flat, config, out=out), config=settings, progress=progress).towers


def train_all(subjects: Sequence[Subject], *, seeds: int, out: Path, minutes: float) -> Results:
    """Work through all jobs, until the time is over."""
    results, progress = Results(), show_progress()
    by_key = {subject.key: subject for subject in subjects}
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    for job in work(subjects, seeds=seeds):
        subject, towers = by_key[job.subject], None
        is_late = time.monotonic() > end
        if is_late and not any(RunFolder(path).evaluation("test").exists() for path in folders_of(job, out=out)):
            results.left.append(job)
            continue
        if job.strategy != FLAT:
            key = (job.subject, job.strategy)
            if key not in results.towers:
                results.towers[key] = partition(subject, job.strategy, out=out, progress=progress)
            towers = results.towers[key]
        config = config_of(subject, job, towers=towers)
        if is_late and not RunFolder(folder_of(job, config, out=out)).evaluation("test").exists():
            results.left.append(job)
            continue
        results.metrics[job], results.valid_auc[job] = measure(job, config, out=out, progress=progress)
    return results


def cells(results: Results, subjects: Sequence[Subject]) -> list[Cell]:
    """Finished jobs, seed by seed in cells; flat first, then by strategy and compression."""
    names = {subject.key: subject.name for subject in subjects}
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for job, metrics in results.metrics.items():
        found.setdefault((job.subject, job.strategy, job.compression), {})[job.seed] = metrics["auc"]
    order = [subject.key for subject in subjects]
    keys = sorted(found, key=lambda key: (order.index(key[0]), key[1] != FLAT, key[1], key[2]))
    return [
        Cell(
            subject=names[subject],
            strategy=strategy,
            compression=compression,
            auc=found[subject, strategy, compression],
        )
        for subject, strategy, compression in keys
    ]


def planted_notes(results: Results, subjects: Sequence[Subject]) -> list[str]:
    """Whether the learned partitions are the groups that were planted."""
    notes = []
    for subject in subjects:
        towers = results.towers.get((subject.key, "coherent"))
        if subject.config.teacher is None or towers is None:
            continue
        planted = {frozenset(group) for group in SyntheticTeacher(subject.config.teacher).groups}
        recovered = len(planted & {frozenset(tower) for tower in towers.towers})
        notes.append(f"{subject.name}: {recovered} of {len(planted)} planted groups recovered by the learned partition")
    return notes


def left_over(jobs: Sequence[Job]) -> list[str]:
    """What was not trained, a line a cell."""
    seeds: dict[str, list[str]] = {}
    for job in jobs:
        seeds.setdefault(f"{job.subject}, {job.strategy}, compression {job.compression}", []).append(str(job.seed))
    return [f"{cell}: no time for seeds {', '.join(numbers)}" for cell, numbers in seeds.items()]


def best_auc(subjects: Sequence[Subject]) -> dict[str, float]:
    """The best reachable AUC of synthetic subjects."""
    return {
        subject.name: SyntheticTeacher(subject.config.teacher).best_metrics(range(_BEST_AUC_ROWS)).auc
        for subject in subjects
        if subject.config.teacher is not None
    }


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Everything (one seed, the first round if quick)."""
    options = options or parse_options([])
    subjects = [each for each in SUBJECTS if each.config.dataset.name != "frappe" or frappe_files().is_dir()]
    if quick:
        subjects = [replace(subject, rounds=subject.rounds[:1]) for subject in subjects]
    report = Report(
        benchmark="tower_quality",
        claim="Test AUC of tower models against the flat model, mean ± standard deviation over seeds on fixed splits.",
        command="ziggurat bench tower-quality",
    )
    if len(subjects) < len(SUBJECTS):
        report.skipped.append("Frappe: the published files are not at ../shared/data/frappe")
    out = ROOT / "runs" / "tower_quality"
    results = train_all(subjects, seeds=1 if quick else SEEDS, out=out, minutes=options.minutes)
    table, best = cells(results, subjects), best_auc(subjects)
    planted = [subject.name for subject in subjects if subject.config.teacher is not None]
    found = targets(table, planted=planted)
    report.tables += [cells_table(table), "Targets:", targets_table(found)]
    report.plots.append(("tower_quality.png", lambda path: plot_auc(table, path, best=best)))
    report.plots.append(("tower_quality_differences.png", lambda path: plot_differences(table, path)))
    report.notes += [f"{subject.name}: {subject.note}" for subject in subjects]
    report.notes += [f"{name}: best reachable AUC {value:.5f}" for name, value in best.items()]
    report.notes += planted_notes(results, subjects)
    report.skipped += left_over(results.left)
    report.extra = {
        "targets": [asdict(target) for target in found],
        "runs": [asdict(job) | {"valid_auc": results.valid_auc[job], "test": m} for job, m in results.metrics.items()],
        "towers": {f"{key} {strategy}": to_json(towers) for (key, strategy), towers in results.towers.items()},
        "configs": {subject.key: to_json(subject.config) for subject in subjects},
        "modules": {subject.key: to_json(subject.module) for subject in subjects},
    }
    return report
