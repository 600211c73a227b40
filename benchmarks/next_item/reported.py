"""Seeds that an earlier report of `sequences` has: taken up from its JSON, so that nobody trains them again.

Of each case are read "recipe", "hr10" and "valid_hr10" (one value a seed), "seed_numbers" (without: 1 … n),
"ndcg10_mean" and "ndcg10_std" over those seeds, and "settings" and "precision", which the oldest reports do not tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.earlier_report import EarlierReport, read_earlier, same_settings
from benchmarks.next_item.subjects import SUBJECTS, settings_of
from benchmarks.report import Case


@dataclass(frozen=True, kw_only=True)
class ReportedSeeds:
    """What a report says of one case.

    Args:
        recipe: that was trained.
        hr10: of the test, one a seed.
        valid_hr10: of the weights that were kept.
        ndcg10_mean: of the test, over these seeds.
        ndcg10_std: likewise; None: one seed.
        seed_numbers: which seeds; (): 1 … n.
        precision: that runs chose; (): not told.
    """

    recipe: str
    hr10: tuple[float, ...]
    valid_hr10: tuple[float, ...]
    ndcg10_mean: float
    ndcg10_std: float | None = None
    seed_numbers: tuple[int, ...] = ()
    precision: tuple[str, ...] = ()

    @property
    def seeds(self) -> tuple[int, ...]:
        """Their numbers."""
        return self.seed_numbers or tuple(range(1, len(self.hr10) + 1))


@dataclass(frozen=True, kw_only=True)
class Reported:
    """An earlier report.

    Args:
        origin: where it is, the commit that it was measured at, and when.
        cases: seeds by case; cases of which it has any.
        unchecked: cases whose settings it does not tell.
        speed: its comparisons of speed.
    """

    origin: str
    cases: dict[str, ReportedSeeds]
    unchecked: tuple[str, ...]
    speed: tuple[Case, ...]

    def notes(self) -> list[str]:
        """What of a new report is this one's, and what is not known of it."""
        taken = [f"{name} {', '.join(map(str, each.seeds))}" for name, each in self.cases.items()]
        found = [f"seeds taken up from {self.origin}, not trained again: {'; '.join(taken) or 'none'}"]
        if self.unchecked:
            found.append(f"that report does not tell settings of {', '.join(self.unchecked)}: recipes' names compared")
        return found


def read_report(path: Path) -> Reported:
    """The seeds of a report.

    Raises:
        ConfigError: no such file, no report of this benchmark, a case with another recipe or other settings, or with
            values that are not one a seed.
    """
    report = read_earlier(path, benchmark="sequences")
    cases, unchecked, speed = {}, [], []
    for number, case in enumerate(report.data["cases"]):
        where = f"{path}: cases[{number}]"
        if "ratio" in case:
            speed.append(report.take(Case, case, where=where))
        elif case.get("hr10"):
            name = str(case.get("name"))
            cases[name] = _seeds_of(report, name, case, where=where)
            if "settings" not in case:
                unchecked.append(name)
    return Reported(
        origin=report.origin,
        cases=cases,
        unchecked=tuple(unchecked),
        speed=tuple(speed),
    )


def _seeds_of(report: EarlierReport, name: str, case: Mapping[str, Any], *, where: str) -> ReportedSeeds:
    subject, found = SUBJECTS.get(name), report.take(ReportedSeeds, case, where=where)
    if subject is None or found.recipe != subject.recipe:
        wanted = f"the recipe {subject.recipe}" if subject else f"a case out of {', '.join(SUBJECTS)}"
        raise report.refused(f"{name}, recipe {found.recipe}", where=where, expected=wanted)
    if "settings" in case and not same_settings(case["settings"], settings_of(subject), where=f"{where}.settings"):
        raise report.refused("other settings", where=f"{where}.settings", expected=f"{name} as it is trained today")
    counts = [len(each) for each in (set(found.seeds), found.hr10, found.valid_hr10)]
    if len(set(counts)) > 1:
        shown = f"{counts[0]} different seeds, {counts[1]} and {counts[2]} values"
        raise report.refused(shown, where=where, expected="a value of hr10 and of valid_hr10 for each seed")
    if others := [value for value in (*found.hr10, *found.valid_hr10, found.ndcg10_mean) if not 0 <= value <= 1]:
        raise report.refused(str(others[0]), where=where, expected="shares between 0 and 1")
    return found
