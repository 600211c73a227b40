"""Claim: the simulator's steps against measured and published ones, each with its error.

    emulated    steps of the committed `towers` report (emulated data centre, 36 settings of ours) against predictions
                for the same plans; constants of this machine are fitted to nine of its times *without limited links*
                (compute alone), so no time on a limited link is seen before it is predicted
    published   rates of TorchRec, HugeCTR and the towers paper on GPUs, against the named clusters; one constant
                (device.step_s) was set to one of them, marked "set to it"

Nothing is timed: it runs anywhere, in about two minutes.

Options: --report FILE (towers.json to predict; default: the newest committed one of all networks)
--budget-s S (of each search)
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Report, short
from benchmarks.simulator_emulated import emulated_cases, fitted_constants, newest_whole_report, read_settings
from benchmarks.simulator_published import published_cases

GOAL, GOAL_SETTINGS = 0.15, 12


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of this benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="ziggurat bench simulator", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--report", default="", help="towers.json whose steps are predicted")
    parser.add_argument("--budget-s", type=float, default=3.0, help="of each search (default: %(default)g)")
    return parser.parse_args(list(arguments))


def run(*, quick: bool, options: argparse.Namespace | None = None) -> Report:
    """Predict and compare."""
    options = options or parse_options([])
    path = Path(options.report) if options.report else newest_whole_report()
    settings = read_settings(json.loads(path.read_text()))
    constants = fitted_constants(settings)
    cases = emulated_cases(settings, constants)
    cases += published_cases(budget_s=0.2 if quick else options.budget_s)
    limited = [case for case in cases if case["group"] == "emulated" and not case["fitted"]]
    unseen = [case for case in limited if case["unseen"]]
    within = [case for case in unseen if abs(case["error"]) <= GOAL]
    errors = [abs(case["error"]) for case in unseen]
    verdict = "met" if len(within) >= GOAL_SETTINGS else "missed"
    report = Report(
        benchmark="simulator",
        claim="Steps of the simulator against measured and published ones.",
        command="ziggurat bench simulator",
        extra={"cases": cases, "constants": constants, "of_report": path.parent.name},
    )
    report.notes += [
        f"emulated: {len(within)} of {len(unseen)} settings none of whose times was fitted are within {GOAL:.0%} "
        f"(goal: at least {GOAL_SETTINGS}, {verdict}); median error {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%}; {len(limited) - len(unseen)} further settings, whose compute-alone time was "
        f"fitted, are within {max(abs(case['error']) for case in limited if not case['unseen']):.1%}",
        "constants fitted: " + ", ".join(f"{name} {short(value)}" for name, value in constants.items()),
        f"measured steps: {path.parent.name}/towers.json",
    ]
    report.tables += [_table(cases, "emulated"), _table(cases, "published")]
    report.plots.append(("simulator.png", lambda target: _plot(cases, target)))
    return report


def _table(cases: list[dict[str, Any]], group: str) -> str:
    chosen = [case for case in cases if case["group"] == group]
    known = "measured" if group == "emulated" else "published"
    lines = [
        f"{group.capitalize()}:",
        "",
        f"| case | {known} | predicted | error | fitted | note |",
        "|---|---:|---:|---:|---|---|",
    ]
    for case in chosen:
        fitted = "set to it" if case["fitted"] else ""
        lines.append(
            f"| {case['name']} | {short(case['known'])} {case['unit']} | {short(case['predicted'])} {case['unit']} "
            f"| {case['error']:+.1%} | {fitted} | {case['note']} |"
        )
    return "\n".join(lines)


def _plot(cases: list[dict[str, Any]], path: Path) -> None:
    """Predicted over measured steps of the emulated data centre, with the band of the goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5.2, 4.6), layout="constrained")
    shown = [case for case in cases if case["group"] == "emulated"]
    low, high = min(case["known"] for case in shown) * 0.8, max(case["known"] for case in shown) * 1.25
    axis.fill_between([low, high], [low * (1 - GOAL), high * (1 - GOAL)], [low * (1 + GOAL), high * (1 + GOAL)],
                      color="#dddddd", label=f"within {GOAL:.0%}")  # fmt: skip
    axis.plot([low, high], [low, high], color="#666666", linewidth=1)
    for name, colour in (("flat", "#d1495b"), ("compression", "#1f6f8b")):
        points = [case for case in shown if name in case["name"]]
        label = "flat" if name == "flat" else "towers"
        axis.scatter([c["known"] for c in points], [c["predicted"] for c in points], s=18, color=colour, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("measured ms a step")
    axis.set_ylabel("predicted ms a step")
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
