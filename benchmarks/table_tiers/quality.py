"""Test AUC of runs with tables in few bits behind a cache, against FP32 of the same seed: the same data and order.

    difference    AUC of the variant less that of FP32, a seed; their mean over seeds
    sd            of FP32's AUC over seeds: what a seed changes; the claim is |mean difference| ≤ sd

Finished runs are read, not trained again. Seeds are the outer loop: all variants have as many when time is over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.next_item.subjects import refuse_others
from benchmarks.table_tiers.reported import Reported, ReportedSeeds
from benchmarks.table_tiers.subjects import CASES, VARIANTS, Variant, config_of, settings_of, subject_and_variant
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.runs.execute import train_run
from ziggurat.training.records.run_folder import EVALUATION, RunFolder
from ziggurat.training.report.progress import Progress

_MIN_SEEDS = 3  # fewer decide nothing


@dataclass(kw_only=True)
class Found:
    """Test AUC of one variant and of FP32, by seed.

    Args:
        subject: that was trained, out of `SUBJECTS`.
        variant: which.
        ours: by seed.
        plain: by seed.
        reported: seeds whose `ours` is an earlier report's.
        epochs: fewer than the subject's; 0: the subject's.
    """

    subject: str
    variant: Variant
    ours: dict[int, float] = field(default_factory=dict)
    plain: dict[int, float] = field(default_factory=dict)
    reported: tuple[int, ...] = ()
    epochs: int = 0

    @property
    def differences(self) -> list[float]:
        """Of the seeds that both have."""
        return [self.ours[seed] - self.plain[seed] for seed in sorted(self.ours) if seed in self.plain]

    def summary(self) -> dict[str, object]:
        """The figures of the case."""
        different = self.differences
        deviation = statistics.stdev(self.plain.values()) if len(self.plain) > 1 else None
        mean = statistics.fmean(different) if different else None
        is_within = None if mean is None or deviation is None else abs(mean) <= deviation
        is_within = is_within if len(different) >= _MIN_SEEDS else None
        verdict = "" if is_within is None or not self.variant.promised else ("met" if is_within else "missed")
        return {
            "recipe": self.subject,
            "seeds": len(different),
            "seed_numbers": sorted(self.ours),
            "seed_numbers_fp32": sorted(self.plain),
            "seeds_of_earlier_report": list(self.reported),
            "auc": [self.ours[seed] for seed in sorted(self.ours)],
            "auc_fp32": [self.plain[seed] for seed in sorted(self.plain)],
            "auc_difference": mean,
            "auc_differences": different,
            "auc_difference_sd": statistics.stdev(different) if len(different) > 1 else None,
            "sd_of_seeds": deviation,
            "within_one_sd": is_within,
            "verdict": verdict,
            "settings": settings_of(self.subject, self.variant, epochs=self.epochs),
        }


def collect(
    cases: Sequence[str],
    *,
    seeds: int,
    out: Path,
    until: float,
    epochs: int,
    progress: Progress,
    reported: Reported | None = None,
) -> tuple[dict[str, Found], list[str]]:
    """All variants, seed by seed, each beside FP32 of its width.

    Args:
        cases: names of cases.
        seeds: 1 … so many.
        out: folder of the runs.
        until: no training starts after this time.
        epochs: see `config_of`.
        progress: where to say what happens.
        reported: an earlier report. Its seeds are neither trained nor read from `out`; its cases that are not in
            `cases` are found as they are.

    Returns:
        What was found, by the name of the case, and what is missing.

    Raises:
        ConfigError: a run that is there has other settings than the subject.
    """
    known, left = reported.seeds if reported else {}, []
    every = [case for case in CASES if case in cases or case in known]
    found = {case: _begun(case, known.get(case), epochs=epochs) for case in every}
    for seed in range(1, seeds + 1):
        for case in cases:
            each = found[case]
            plain = Variant(dim=each.variant.dim, tables=TablesConfig())
            for kept, variant, folder in (
                (each.plain, plain, f"{each.subject}_d{plain.dim}_fp32_seed{seed}"),
                (each.ours, each.variant, f"{case.removesuffix('_auc')}_seed{seed}"),
            ):
                if seed in kept:
                    continue
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


def _begun(case: str, reported: ReportedSeeds | None, *, epochs: int) -> Found:
    """A case with the seeds that an earlier report has."""
    subject, name = subject_and_variant(case)
    found = Found(subject=subject, variant=VARIANTS[name], epochs=epochs)
    if reported is not None:
        found.ours, found.plain, found.reported = reported.ours, reported.plain, tuple(reported.ours)
    return found


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
