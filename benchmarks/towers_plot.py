"""Tables and plot of the towers benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.report import short


def cases_table(cases: list[dict[str, Any]]) -> str:
    """One row a case."""
    lines = [
        "| case | TorchRec flat | our flat | towers | TorchRec / towers (p10 to p90) | goal | our flat / towers "
        "| limit | towers / limit | MB between hosts, flat → towers |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_row(case) for case in cases if "towers_ms" in case]
    flat = [case for case in cases if "towers_ms" not in case]
    if flat:
        lines += ["", "| case | TorchRec flat | our flat | ratio (p10 to p90) | goal |", "|---|---:|---:|---:|---:|"]
        lines += [
            f"| {case['name']} | {case['flat_torchrec_ms']:.1f} ms | {case['flat_ms']:.1f} ms | {_ratio(case)} "
            f"| {_goal(case['goal'], case['verdict'])} |"
            for case in flat
        ]
    return "\n".join(lines)


def profile_table(runs: list[dict[str, Any]]) -> str:
    """Where the milliseconds of a step go, on rank 0, links limited; one column a variant."""
    parts = []
    for run in runs:
        variants = [each for each in run["variants"] if each["profile"]]
        if not variants:
            continue
        phases = {each["name"]: each["profile"]["phases_ms_of_rank_0"] for each in variants}
        names = list(dict.fromkeys(phase for found in phases.values() for phase in found))
        lines = [f"Where a step's time goes, {run['name']} ({run['network']}), ms on rank 0:", ""]
        lines += [f"| phase | {' | '.join(phases)} |", f"|---|{'---:|' * len(phases)}"]
        for name in names:
            cells = " | ".join(f"{found[name]:.1f}" if name in found else "" for found in phases.values())
            lines.append(f"| {name} | {cells} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def plot_steps(cases: list[dict[str, Any]], path: Path) -> None:
    """Step times of every case as bars, its limit as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [case for case in cases if "towers_ms" in case]
    figure, axis = plt.subplots(figsize=(9, 0.55 * len(shown) + 1.2), layout="constrained")
    bars = (("flat_torchrec_ms", "TorchRec flat", "#b8b8b8"), ("flat_ms", "ours, flat", "#7fb3c4"),
            ("towers_ms", "ours, towers", "#1f6f8b"))  # fmt: skip
    for offset, (key, label, colour) in enumerate(bars):
        places = [index + 0.27 * (offset - 1) for index in range(len(shown))]
        axis.barh(places, [case[key] for case in shown], height=0.25, color=colour, label=label)
    for index, case in enumerate(shown):
        axis.plot([case["limit_ms"]] * 2, [index + 0.13, index + 0.42], color="#aa3333", linewidth=1.5)
    axis.plot([], [], color="#aa3333", label="limit of towers: compute alone, or bytes over rate")
    axis.set_yticks(range(len(shown)), [case["name"] for case in shown], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms a step (median)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _row(case: dict[str, Any]) -> str:
    flat_mb, towers_mb = (sum(case["cross_host_bytes"][kind].values()) / 1e6 for kind in ("flat", "towers"))
    return (
        f"| {case['name']} | {short(case['flat_torchrec_ms'])} ms | {short(case['flat_ms'])} ms "
        f"| {short(case['towers_ms'])} ms | {_ratio(case)} | {_goal(case['goal'], case['verdict'])} "
        f"| {case['ratio_flat']:.2f} {_goal(case['goal_flat'], case['verdict_flat'])} | {short(case['limit_ms'])} ms "
        f"| {case['limit_factor']:.2f} | {flat_mb:.2f} → {towers_mb:.2f} |"
    )


def _ratio(case: dict[str, Any]) -> str:
    return f"**{case['ratio']:.2f}** ({case['ratio_p10']:.2f} to {case['ratio_p90']:.2f})"


def _goal(goal: float, verdict: str) -> str:
    return f"{goal:g} {verdict}" if goal else ""
