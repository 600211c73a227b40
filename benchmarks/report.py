"""Reports: one JSON, one Markdown page and one plot for each benchmark, in a folder a machine and date.

JSON: {"benchmark", "claim", "machine", "versions", "commit", "date", "command", "cases": [{"name", "ours", "peer",
"ratio", "ratio_p10", "ratio_p90", "limit_ratio", "goal", …}], "contestants": [...], "skipped": [...], "notes": [...]}.
`ours` and `peer` are medians (samples/s unless `unit` says otherwise), `ratio` the median of ratios round by round,
`limit_ratio` the share of the machine's matrix-multiply limit that ours reaches (null where that is no limit).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.harness import ROOT, Measured, percentiles, say
from benchmarks.machine import describe_run, machine_slug

Contestant = tuple[str, Sequence[float]]  # name, and rates by round

REPORTS = ROOT / "benchmarks" / "reports"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison.

    Args:
        goal: the ratio that the project promises; 0: none.
        limit_ratio: None where the matrix-multiply limit says nothing.
    """

    name: str
    ours: float
    peer: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    ours_name: str
    peer_name: str
    goal: float = 0.0
    limit_ratio: float | None = None
    unit: str = "samples/s"

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        return "" if not self.goal else ("met" if self.ratio >= self.goal else "missed")


def compare(
    name: str,
    results: dict[str, Measured],
    *,
    ours: str,
    peer: str,
    goal: float = 0.0,
    limit: float | None = None,
    by_cpu: bool = False,
) -> Case:
    """Make a case from two contestants of one interleaved run; it names both with their versions.

    Args:
        name: of the case.
        results: of `measure`.
        ours: name of our contestant.
        peer: name of the other.
        goal: the promised ratio.
        limit: samples/s that the machine's matrix products allow.
        by_cpu: compare samples per CPU second, where other processes share the cores.
    """
    mine = results[ours]
    theirs = results[peer]
    case = by_round(
        name,
        ours=(mine.versioned_name, mine.cpu_rates if by_cpu else mine.rates),
        peer=(theirs.versioned_name, theirs.cpu_rates if by_cpu else theirs.rates),
        goal=goal,
        unit="samples/CPU s" if by_cpu else "samples/s",
    )
    return replace(case, limit_ratio=results[ours].rate / limit if limit else None)


def by_round(
    name: str,
    *,
    ours: Contestant,
    peer: Contestant,
    goal: float = 0.0,
    unit: str = "samples/s",
    smaller_is_better: bool = False,
) -> Case:
    """A case from rates of the same rounds.

    Args:
        name: of the case.
        ours: name and rates of our contestant.
        peer: those of the other.
        goal: the promised ratio.
        unit: of the rates.
        smaller_is_better: they are seconds or bytes: the ratio says how many times fewer ours are.
    """
    mine = ours[1]
    theirs = peer[1]
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    if smaller_is_better:
        ratios = [1.0 / ratio for ratio in ratios]
    low, high = percentiles(ratios)
    return Case(
        name=name,
        ours=statistics.median(mine),
        peer=statistics.median(theirs),
        ratio=statistics.median(ratios),
        ratio_p10=low,
        ratio_p90=high,
        ours_name=ours[0],
        peer_name=peer[0],
        goal=goal,
        unit=unit,
    )


@dataclass(kw_only=True)
class Report:
    """What a benchmark found.

    Args:
        benchmark: short name, also the file name.
        claim: one sentence: what is compared with what.
        command: reproduces it.
        limits: samples/s by group, drawn into the plot.
        plots: further plots: file name and what draws it.
        tables: further Markdown tables.
        figures: cases that are no comparison of rates, each with its "name"; in JSON they stand behind the others.
    """

    benchmark: str
    claim: str
    command: str
    cases: list[Case] = field(default_factory=list)
    contestants: list[Measured] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, object] = field(default_factory=dict)
    plots: list[tuple[str, Callable[[Path], None]]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    figures: list[dict[str, object]] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Plain data, with machine, versions, commit and date."""
        return {
            "benchmark": self.benchmark,
            "claim": self.claim,
            **describe_run(),
            "command": self.command,
            "cases": [*(asdict(case) | {"verdict": case.verdict} for case in self.cases), *self.figures],
            "limits_samples_per_s": self.limits,
            "contestants": [measured.to_json() for measured in self.contestants],
            "skipped": self.skipped,
            "notes": self.notes,
            **self.extra,
        }


def write_report(report: Report, *, json_path: str = "", quick: bool = False) -> Path:
    """Write JSON, Markdown and plot; returns the Markdown file.

    Args:
        report: what to write.
        json_path: also write the JSON there.
        quick: the report goes to `build/`: it is not to be quoted. So does one that measured nothing.
    """
    data = report.to_json()
    measured = report.cases or report.figures or report.contestants
    quick = quick or not measured  # what measured nothing adds no report to the committed ones
    parent = ROOT / "build" / "benchmarks" / "reports" if quick else REPORTS
    folder = parent / f"{machine_slug(data['machine'])}-{data['date']}"  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1)  # settings name files in the checkout and beside it, wherever that is
    text = text.replace(f"{ROOT}/", "").replace(f"{ROOT.parent}/", "../")
    for path in (folder / f"{report.benchmark}.json", *([Path(json_path)] if json_path else [])):
        path.write_text(text + "\n")
    if report.contestants:
        plot_rates(report, folder / f"{report.benchmark}.png")
    for name, draw in report.plots:
        draw(folder / name)
    page = folder / f"{report.benchmark}.md"
    page.write_text(to_markdown(report, data))
    say(f"  wrote {page.relative_to(ROOT)}")
    return page


def to_markdown(report: Report, data: dict) -> str:
    """The page."""
    machine, versions = data["machine"], data["versions"]
    instructions = ", ".join(machine["instructions"]) or "no vector extension"
    lines = [f"# {report.benchmark}", "", report.claim, ""]
    lines += [
        f"- machine: {machine['cpu']} (family/model {machine['family_model']}), {machine['cores']} cores, "
        f"{machine['cache']}, {machine['memory_gib']} GiB, {instructions}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- commit {data['commit']}, {data['date']}; reproduce: `{report.command}`",
        "",
    ]
    if report.cases:
        lines += ["| case | ours | peer | ratio (p10 to p90) | goal | of the limit |", "|---|---:|---:|---:|---:|---:|"]
        lines += [_case_row(case) for case in report.cases] + [""]
        versions_of_peers = dict.fromkeys(f"- {case.peer_name}" for case in report.cases)
        lines += ["Peers:", "", *versions_of_peers, ""]
    for table in report.tables:
        lines += [table, ""]
    lines += [f"![{name}]({name})\n" for name, _ in report.plots]
    if report.contestants:
        lines += [f"![rates]({report.benchmark}.png)", ""]
        lines += ["| contestant | samples/s | p10 | p90 | first step | peak memory |", "|---|---:|---:|---:|---:|---:|"]
        lines += [_contestant_row(measured) for measured in report.contestants] + [""]
    for title, entries in (("Skipped", report.skipped), ("Notes", report.notes)):
        if entries:
            lines += [f"{title}:", "", *(f"- {entry}" for entry in entries), ""]
    if report.contestants:
        busiest = max(max(measured.others_cpu_share, default=0.0) for measured in report.contestants)
        lines += [f"Other processes took at most {busiest:.0%} of the machine's CPU time during a turn.", ""]
    return "\n".join(lines)


def _case_row(case: Case) -> str:
    goal = f"{case.goal:g} {case.verdict}" if case.goal else ""
    limit = "" if case.limit_ratio is None else f"{case.limit_ratio:.2f}"
    ratio = f"**{case.ratio:.2f}** ({case.ratio_p10:.2f} to {case.ratio_p90:.2f})"
    unit = "" if case.unit == "samples/s" else f" {case.unit}"
    return f"| {case.name} | {short(case.ours)}{unit} | {short(case.peer)}{unit} | {ratio} | {goal} | {limit} |"


def _contestant_row(measured: Measured) -> str:
    low, high = percentiles(measured.rates)
    if measured.entry.name.startswith("peak "):
        flop = float(str(measured.info["flop_per_step"])) / 1e9
        rates = " | ".join(f"{short(rate * flop)} GFLOP/s" for rate in (measured.rate, low, high))
        return f"| {measured.entry.group_name}: {measured.entry.name} | {rates} | | |"
    memory = f"{measured.peak_rss_bytes / 2**30:.2f} GiB"
    name = f"{measured.entry.group_name}: {measured.entry.name}"
    return (
        f"| {name} | {short(measured.rate)} | {short(low)} | {short(high)} | {measured.first_step_s:.1f} s | {memory} |"
    )


def short(value: float) -> str:
    """A number with three significant digits and thousands marked: 34,200 · 1.27."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    rounded = round(value, 2 - math.floor(math.log10(abs(value))))
    return f"{rounded:,.{digits}f}"


def plot_rates(report: Report, path: Path) -> None:
    """Bars of the median rates with p10 to p90, a panel a workload, the limit as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, list[Measured]] = {}
    for measured in report.contestants:
        if not measured.entry.name.startswith("peak "):
            panels.setdefault(measured.entry.group_name, []).append(measured)
    heights = [0.35 * len(panel) + 0.8 for panel in panels.values()]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, (name, panel) in zip(axes[:, 0], panels.items(), strict=True):
        rates = [measured.rate for measured in panel]
        bounds = [percentiles(measured.rates) for measured in panel]
        errors = [
            [max(0.0, rate - low) for rate, (low, _) in zip(rates, bounds, strict=True)],
            [max(0.0, high - rate) for rate, (_, high) in zip(rates, bounds, strict=True)],
        ]
        colours = ["#1f6f8b" if m.entry.module == "benchmarks.ours" else "#b8b8b8" for m in panel]
        places = range(len(panel))
        axis.barh(places, rates, xerr=errors, color=colours, error_kw={"elinewidth": 1, "ecolor": "#333333"})
        axis.set_yticks(places, [measured.entry.name for measured in panel])
        axis.invert_yaxis()
        axis.set_title(name, loc="left", fontsize=10)
        if name in report.limits:
            axis.axvline(report.limits[name], color="#aa3333", linestyle="--", linewidth=1)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("samples/s (median; p10 to p90); dashed: matrix-multiply limit")
    figure.savefig(path, dpi=130)
    plt.close(figure)
