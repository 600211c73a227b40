"""Test AUC of runs with tables in few bits behind a cache, against FP32 of the same seed: the same data and order.

    difference    AUC of the variant less that of FP32, a seed; their mean over seeds
    sd            of FP32's AUC over seeds: what a seed changes; the claim is |mean difference| ≤ sd

Finished runs are read, not trained again. Seeds are the outer loop: all variants have as many when time is over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.next_item.subjects import refuse_others
from benchmarks.quality import seeded
from benchmarks.table_tiers.subjects import SUBJECTS, VARIANTS, Variant, subject_and_variant
from ziggurat.config import override
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import train_run
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.report.progress import Progress

_LEAST_SEEDS = 3  # fewer decide nothing


@dataclass(kw_only=True)
class Found:
    """Test AUC of one variant and of FP32, by seed.

    Args:
        subject: that was trained, out of `SUBJECTS`.
        variant: which.
        ours: by seed.
        plain: by seed.
    """

    subject: str
    variant: Variant
    ours: dict[int, float] = field(default_factory=dict)
    plain: dict[int, float] = field(default_factory=dict)

    @property
    def differences(self) -> list[float]:
        """Of the seeds that both have."""
        return [self.ours[seed] - self.plain[seed] for seed in self.ours if seed in self.plain]

    def summary(self) -> dict[str, object]:
        """The figures of the case."""
        different = self.differences
        deviation = statistics.stdev(self.plain.values()) if len(self.plain) > 1 else None
        mean = statistics.fmean(different) if different else None
        is_within = None if mean is None or deviation is None else abs(mean) <= deviation
        is_within = is_within if len(different) >= _LEAST_SEEDS else None
        verdict = "" if is_within is None or not self.variant.promised else ("met" if is_within else "missed")
        return {
            "recipe": self.subject,
            "seeds": len(different),
            "auc": list(self.ours.values()),
            "auc_fp32": list(self.plain.values()),
            "auc_difference": mean,
            "auc_differences": different,
            "auc_difference_sd": statistics.stdev(different) if len(different) > 1 else None,
            "sd_of_seeds": deviation,
            "within_one_sd": is_within,
            "verdict": verdict,
        }


def config_of(subject: str, variant: Variant, seed: int, *, epochs: int = 0) -> RunConfig:
    """The run of one seed.

    Args:
        subject: its name.
        variant: of its tables.
        seed: of weights, order and rounding.
        epochs: fewer than the subject's, to try things out; 0: the subject's.
    """
    config = seeded(SUBJECTS[subject](), seed)
    changes = {"model.embedding-dim": str(variant.dim)} | ({"training.epochs": str(epochs)} if epochs else {})
    return replace(override(config, changes), tables=variant.tables)


def collect(
    cases: Sequence[str], *, seeds: int, out: Path, until: float, epochs: int, progress: Progress
) -> tuple[dict[str, Found], list[str]]:
    """All variants, seed by seed, each beside FP32 of its width.

    Args:
        cases: names of cases.
        seeds: 1 … so many.
        out: folder of the runs.
        until: no training starts after this time.
        epochs: see `config_of`.
        progress: where to say what happens.

    Returns:
        What was found, by the name of the case, and what is missing.

    Raises:
        ConfigError: a run that is there has other settings than the subject.
    """
    found, left = {}, []
    for case in cases:
        subject, name = subject_and_variant(case)
        found[case] = Found(subject=subject, variant=VARIANTS[name])
    for seed in range(1, seeds + 1):
        for case, each in found.items():
            plain = Variant(dim=each.variant.dim, tables=TablesConfig())
            for kept, variant, folder in (
                (each.plain, plain, f"{each.subject}_d{plain.dim}_fp32_seed{seed}"),
                (each.ours, each.variant, f"{case.removesuffix('_auc')}_seed{seed}"),
            ):
                run, config = RunFolder(out / folder), config_of(each.subject, variant, seed, epochs=epochs)
                refuse_others(run, config)
                if not run.evaluation("test").exists():
                    if time.time() >= until:
                        left.append(folder)
                        continue
                    progress.say(f"\n{folder}")
                    train_run(config, folder=run.path, resume=run.config.exists(), progress=progress)
                kept[seed] = EVALUATION.read(run.evaluation("test"))["metrics"]["auc"]
    return found, list(dict.fromkeys(left))


def table(found: dict[str, Found]) -> str:
    """Markdown: one row a case."""
    lines = ["| case | seeds | test AUC | FP32 | difference | sd of seeds | |", "|---|---:|---:|---:|---:|---:|---|"]
    for name, each in found.items():
        figures, seeds = each.summary(), len(each.differences)
        if not seeds:
            lines.append(f"| {name} | 0 | – | – | – | – | |")
            continue
        ours, plain = statistics.fmean(each.ours.values()), statistics.fmean(each.plain.values())
        deviation = figures["sd_of_seeds"]
        shown = "–" if deviation is None else f"{deviation:.5f}"
        cells = f"{ours:.5f} | {plain:.5f} | {statistics.fmean(each.differences):+.5f} | {shown}"
        lines.append(f"| {name} | {seeds} | {cells} | {figures['verdict']} |")
    return "\n".join(lines)
