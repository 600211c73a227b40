"""Statistics, targets, table and plots of the tower quality benchmark; see `tower_quality.py`.

Every cell is one way to train a subject: (strategy, compression), with the test AUC of each seed. A tower cell is
compared with the flat model, and a learned partition with the naive one, seed by seed: the same seed starts from the
same tables and reads the same order of rows, so part of the noise cancels in the difference.

A target about "everywhere" is judged strictly, difference by difference; where one is missed by less than its own
standard error, the verdict says `within noise` rather than `missed`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FLAT = "flat"
LEARNED, NAIVE = "coherent", "naive"
MAX_COMPRESSION = 4  # up to which towers are to be as good as flat
CLEAR_COMPRESSION = 8  # at which the learned partition is to be clearly better on planted groups
COLOURS = {"coherent": "#1f6f8b", "naive": "#b8b8b8", "diverse": "#c98a2b"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Finished runs of one way to train.

    Args:
        subject: data set and model.
        strategy: of the partition; "flat" for none.
        compression: N / D; 1 for flat.
        auc: test AUC by seed.
    """

    subject: str
    strategy: str
    compression: int
    auc: Mapping[int, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.fmean(self.auc.values())

    @property
    def sd(self) -> float:
        """Sample standard deviation over seeds; NaN with one."""
        return deviation(list(self.auc.values()))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences seed by seed.

    Args:
        values: one a common seed.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, cell: Cell, other: Cell) -> Difference:
        """`cell` less `other`, for the seeds that both have."""
        return cls(values=tuple(cell.auc[seed] - other.auc[seed] for seed in sorted(cell.auc.keys() & other.auc)))

    @property
    def mean(self) -> float:
        """Over seeds; NaN without any."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def sd(self) -> float:
        """Sample standard deviation over seeds; NaN with fewer than two."""
        return deviation(self.values)

    @property
    def standard_error(self) -> float:
        """Of the mean."""
        return self.sd / math.sqrt(len(self.values)) if self.values else math.nan

    def text(self) -> str:
        """`+0.00012 ± 0.00034`."""
        return f"{self.mean:+.5f}{plus_minus(self.sd)}" if self.values else ""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One promise and what became of it.

    Args:
        name: what is promised.
        found: the figures.
        verdict: met, within noise, missed, or not measured.
    """

    name: str
    found: str
    verdict: str


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; NaN with fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def plus_minus(sd: float) -> str:
    """` ± 0.00034`, or nothing where one seed has no deviation."""
    return "" if math.isnan(sd) else f" ± {sd:.5f}"


def cell_of(cells: Sequence[Cell], subject: str, strategy: str, compression: int) -> Cell:
    """The cell, empty if nothing of it was trained."""
    for cell in cells:
        if (cell.subject, cell.strategy, cell.compression) == (subject, strategy, compression):
            return cell
    return Cell(subject=subject, strategy=strategy, compression=compression)


def targets(cells: Sequence[Cell], *, planted: Sequence[str]) -> list[Target]:
    """All targets of the benchmark.

    Args:
        cells: with one finished run or more each.
        planted: subjects whose groups were planted.
    """
    subjects = list(dict.fromkeys(cell.subject for cell in cells))
    found = [
        as_good_as_flat(cell, cell_of(cells, cell.subject, FLAT, 1))
        for cell in cells
        if cell.strategy == LEARNED and cell.compression <= MAX_COMPRESSION
    ]
    found += [
        no_worse_than_naive(cell, cell_of(cells, cell.subject, NAIVE, cell.compression))
        for cell in cells
        if cell.strategy == LEARNED and cell.compression > 1
    ]
    for subject in subjects:
        if subject in planted:
            learned, naive = (cell_of(cells, subject, name, CLEAR_COMPRESSION) for name in (LEARNED, NAIVE))
            found.append(clearly_better(learned, naive))
    return found


def as_good_as_flat(cell: Cell, flat: Cell) -> Target:
    """Mean of the towers at most one standard deviation (over seeds of the flat model) below that of flat."""
    name = f"{cell.subject}: towers within 1 sd of flat at compression {cell.compression}"
    if len(flat.auc) < 2 or not cell.auc:
        return Target(name=name, found="", verdict="not measured")
    met = cell.mean >= flat.mean - flat.sd
    return Target(
        name=name,
        found=f"{cell.mean:.5f} (flat {flat.mean:.5f}, sd {flat.sd:.5f})",
        verdict="met" if met else "missed",
    )


def no_worse_than_naive(cell: Cell, naive: Cell) -> Target:
    """The mean difference of learned and naive is not negative."""
    name = f"{cell.subject}: learned ≥ naive at compression {cell.compression}"
    difference = Difference.of(cell, naive)
    if not difference.values:
        return Target(name=name, found="", verdict="not measured")
    if difference.mean >= 0:
        verdict = "met"
    else:
        verdict = "within noise" if -difference.mean <= difference.standard_error else "missed"
    return Target(name=name, found=difference.text(), verdict=verdict)


def clearly_better(cell: Cell, naive: Cell) -> Target:
    """The mean difference is more than two standard deviations: of the differences, and of either cell."""
    name = f"{cell.subject}: learned better than naive by more than 2 sd at compression {cell.compression}"
    difference = Difference.of(cell, naive)
    if len(difference.values) < 2:
        return Target(name=name, found="", verdict="not measured")
    largest = max(difference.sd, cell.sd, naive.sd)
    found = f"{difference.text()}, largest sd {largest:.5f}"
    return Target(name=name, found=found, verdict="met" if difference.mean > 2 * largest else "missed")


def cells_table(cells: Sequence[Cell]) -> str:
    """Markdown: one row a cell, tower cells beside flat and naive."""
    lines = [
        "| subject | strategy | compression | seeds | test AUC | less flat, by seed | less naive, by seed |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for cell in cells:
        flat = naive = ""
        if cell.strategy != FLAT:
            flat = Difference.of(cell, cell_of(cells, cell.subject, FLAT, 1)).text()
        if cell.strategy not in (FLAT, NAIVE):
            naive = Difference.of(cell, cell_of(cells, cell.subject, NAIVE, cell.compression)).text()
        compression = "" if cell.strategy == FLAT else f"{cell.compression}"
        auc = f"{cell.mean:.5f}{plus_minus(cell.sd)}"
        lines.append(
            f"| {cell.subject} | {cell.strategy} | {compression} | {len(cell.auc)} | {auc} | {flat} | {naive} |"
        )
    return "\n".join(lines)


def targets_table(found: Sequence[Target]) -> str:
    """Markdown: one row a target."""
    lines = ["| target | found | |", "|---|---|---|"]
    lines += [f"| {target.name} | {target.found} | {target.verdict} |" for target in found]
    return "\n".join(lines)


def plot_auc(cells: Sequence[Cell], path: Path, *, best: Mapping[str, float]) -> None:
    """Test AUC over compression, a panel a subject, a line a strategy, flat ± sd as a band.

    Args:
        cells: with one finished run or more each.
        path: of the picture.
        best: the best reachable AUC of subjects where it is known.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    subjects = list(dict.fromkeys(cell.subject for cell in cells))
    figure, axes = plt.subplots(
        1, len(subjects), figsize=(4.2 * len(subjects) + 0.4, 3.8), squeeze=False, layout="constrained"
    )
    for axis, subject in zip(axes[0], subjects, strict=True):
        mine = [cell for cell in cells if cell.subject == subject]
        flat = cell_of(mine, subject, FLAT, 1)
        if flat.auc:
            axis.axhline(flat.mean, color="#333333", linewidth=1, label="flat ± sd")
            if len(flat.auc) > 1:
                axis.axhspan(flat.mean - flat.sd, flat.mean + flat.sd, color="#333333", alpha=0.12, linewidth=0)
        for offset, (strategy, colour) in enumerate(COLOURS.items()):
            line = sorted((cell for cell in mine if cell.strategy == strategy), key=lambda cell: cell.compression)
            if line:
                places = [cell.compression * 1.03 ** (offset - 1) for cell in line]  # side by side, not on top
                errors = [0.0 if math.isnan(cell.sd) else cell.sd for cell in line]
                means = [cell.mean for cell in line]
                axis.errorbar(places, means, yerr=errors, color=colour, marker="o", capsize=3, label=strategy)
        if subject in best:
            axis.axhline(best[subject], color="#aa3333", linestyle="--", linewidth=1, label="best reachable")
        axis.set_xscale("log", base=2)
        ticks = sorted({cell.compression for cell in mine})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_title(subject, loc="left", fontsize=10)
        axis.set_xlabel("compression N / D")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    axes[0, 0].set_ylabel("test AUC (mean ± sd over seeds)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_differences(cells: Sequence[Cell], path: Path) -> None:
    """Learned less naive by seed: a dot a seed, the mean as a line; a panel a subject."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    pairs = [
        (cell, Difference.of(cell, cell_of(cells, cell.subject, NAIVE, cell.compression)))
        for cell in cells
        if cell.strategy == LEARNED
    ]
    pairs = [(cell, difference) for cell, difference in pairs if difference.values]
    subjects = list(dict.fromkeys(cell.subject for cell, _ in pairs)) or [""]
    figure, axes = plt.subplots(
        1, len(subjects), figsize=(4.2 * len(subjects) + 0.4, 3.4), squeeze=False, layout="constrained"
    )
    for axis, subject in zip(axes[0], subjects, strict=True):
        mine = sorted((pair for pair in pairs if pair[0].subject == subject), key=lambda pair: pair[0].compression)
        axis.axhline(0, color="#333333", linewidth=1)
        for place, (_, difference) in enumerate(mine):
            axis.plot([place] * len(difference.values), difference.values, "o", color="#7fb3c4", markersize=5)
            axis.plot([place - 0.2, place + 0.2], [difference.mean] * 2, color="#1f6f8b", linewidth=2)
        axis.set_xticks(range(len(mine)), [str(cell.compression) for cell, _ in mine])
        axis.set_title(subject, loc="left", fontsize=10)
        axis.set_xlabel("compression N / D")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("test AUC, learned less naive")
    figure.savefig(path, dpi=130)
    plt.close(figure)
