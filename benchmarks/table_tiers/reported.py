"""What an earlier report of `tables` has: AUC by seed, which counts beside new seeds, and cases not measured anew.

Of each case of AUC are read "recipe", "auc" and "auc_fp32" (one value a seed), "seed_numbers" and "seed_numbers_fp32"
(without: 1 … n), and "settings", which the oldest reports do not tell. Other cases stand as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.earlier_report import EarlierReport, read_earlier, same_settings
from benchmarks.report import Case
from benchmarks.table_tiers import subjects


@dataclass(frozen=True, kw_only=True)
class ReportedSeeds:
    """What a report says of one case of AUC.

    Args:
        recipe: the subject that was trained.
        auc: of the test, one a seed.
        auc_fp32: likewise, with tables in FP32.
        seed_numbers: which seeds `auc` has; (): 1 … n.
        seed_numbers_fp32: likewise.
    """

    recipe: str
    auc: tuple[float, ...]
    auc_fp32: tuple[float, ...]
    seed_numbers: tuple[int, ...] = ()
    seed_numbers_fp32: tuple[int, ...] = ()

    @property
    def ours(self) -> dict[int, float]:
        """By seed."""
        return dict(zip(self.seed_numbers or range(1, len(self.auc) + 1), self.auc, strict=True))

    @property
    def plain(self) -> dict[int, float]:
        """By seed, in FP32."""
        return dict(zip(self.seed_numbers_fp32 or range(1, len(self.auc_fp32) + 1), self.auc_fp32, strict=True))


@dataclass(frozen=True, kw_only=True)
class Reported:
    """An earlier report.

    Args:
        report: as it was read.
        seeds: by case of AUC.
        others: other cases by name, as they are.
        unchecked: cases of AUC whose settings it does not tell.
    """

    report: EarlierReport
    seeds: dict[str, ReportedSeeds]
    others: dict[str, dict[str, Any]]
    unchecked: tuple[str, ...]

    def kept(self, cases: Collection[str], *, measured: Collection[str]) -> list[dict[str, Any]]:
        """Those of some cases that are not measured anew."""
        return [case for name, case in self.others.items() if name in cases and name not in measured]

    def speeds(self, cases: Collection[str], *, measured: Collection[str]) -> list[tuple[Case, float]]:
        """The same as comparisons, each with the share of the step that tables take."""
        kept = self.kept(cases, measured=measured)
        found = [self.report.take(Case, case, where=f"{self.report.file}: {case['name']}") for case in kept]
        return [(case, float(self.report.data.get(f"table_share {case.name}", "nan"))) for case in found]

    def notes(self, measured: Collection[str]) -> list[str]:
        """What of a new report is this one's, and what is not known of it."""
        taken = "; ".join(f"{name} {', '.join(map(str, each.ours))}" for name, each in self.seeds.items())
        found = [f"seeds taken up from {self.report.origin}, not trained again: {taken or 'none'}"]
        if kept := [name for name in self.others if name not in measured]:
            found.append(f"that report's, not measured again: {', '.join(kept)}")
        if self.unchecked:
            found.append(f"that report does not tell settings of {', '.join(self.unchecked)}: names compared")
        return found


def read_report(path: Path) -> Reported:
    """The cases of a report.

    Raises:
        ConfigError: no such file, no report of this benchmark, a case of AUC of something else or with other settings,
            or with values that are not one a seed.
    """
    report = read_earlier(path, benchmark="tables")
    seeds, others, unchecked = {}, {}, []
    for number, case in enumerate(report.data["cases"]):
        name, where = str(case.get("name")), f"{path}: cases[{number}]"
        if "auc" not in case:
            others[name] = case
            continue
        seeds[name] = _seeds_of(report, name, case, where=where)
        if "settings" not in case:
            unchecked.append(name)
    return Reported(report=report, seeds=seeds, others=others, unchecked=tuple(unchecked))


def _seeds_of(report: EarlierReport, name: str, case: Mapping[str, Any], *, where: str) -> ReportedSeeds:
    if name not in subjects.CASES:
        raise report.refused(name, where=where, expected=f"a case of AUC out of {', '.join(subjects.CASES)}")
    subject, variant = subjects.subject_and_variant(name)
    found = report.take(ReportedSeeds, case, where=where)
    if found.recipe != subject:
        raise report.refused(f"{name} of {found.recipe}", where=where, expected=f"one of {subject}")
    today = subjects.settings_of(subject, subjects.VARIANTS[variant])
    if "settings" in case and not same_settings(case["settings"], today, where=f"{where}.settings"):
        raise report.refused("other settings", where=f"{where}.settings", expected=f"{name} as it is trained today")
    for numbers, values in ((found.seed_numbers, found.auc), (found.seed_numbers_fp32, found.auc_fp32)):
        if numbers and len(set(numbers)) != len(values):
            shown = f"{len(set(numbers))} different seeds, {len(values)} values"
            raise report.refused(shown, where=where, expected="a value for each seed")
        if others := [value for value in values if not 0 <= value <= 1]:
            raise report.refused(str(others[0]), where=where, expected="AUC between 0 and 1")
    return found
