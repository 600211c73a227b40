"""Plots of the benchmark `tables`: bytes against what they cost in AUC, and the speed of a step by format."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.report import Case
from benchmarks.table_tiers.memory import MemoryCase
from benchmarks.table_tiers.quality import Found
from ziggurat.ops.row_cache import CachePolicy
from ziggurat.ops.row_formats import RowFormat

_DRAWN = "movielens_dlrm"  # the curve over cache sizes is its; others are in the table
_COLOURS = {RowFormat.INT8: "tab:blue", RowFormat.INT4: "tab:orange"}


def plot_quality(found: Mapping[str, Found], path: Path) -> None:
    """Times smaller than FP32 against the difference of AUC on MovieLens-1M: a point a case, a bar of one sd."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0.0, color="grey", linewidth=0.8)
    for name, each in found.items():
        tables, different = each.variant.tables, each.differences
        if not different or each.subject != _DRAWN:
            continue
        kind = {"row_format": tables.weights, "cache": tables.cache, "policy": tables.cache_policy}
        size = MemoryCase(dim=each.variant.dim, goal=0.0, **kind).measure()
        sd = statistics.stdev(each.plain.values()) if len(each.plain) > 1 else 0.0
        x, y, nearest = float(str(size["ratio"])), statistics.fmean(different), "nearest" in name
        marker = "x" if nearest else ("o" if each.variant.dim == 64 else "s")
        colour = _COLOURS[tables.weights]
        axes.errorbar(x, y, yerr=sd, marker=marker, color=colour, ecolor="lightgrey", capsize=3)
        kinds = (", nearest" if nearest else "") + (", lfu" if tables.cache_policy is CachePolicy.LFU else "")
        label = f"{tables.weights.value}, {tables.cache:.0%}{kinds}"
        turned = {"rotation": -60, "va": "top"} if nearest else {"rotation": 60, "va": "bottom"}
        axes.annotate(label, (x, y), textcoords="offset points", xytext=(3, -3 if nearest else 3), fontsize=8, **turned)
    axes.margins(x=0.1, y=0.2)
    axes.set_xlabel("times smaller than FP32, cache and optimizer state counted")
    axes.set_ylabel("test AUC − FP32 of the same seed (bar: sd of FP32)")
    axes.set_title("Tables in few bits behind a cache: memory and AUC on MovieLens-1M")
    figure.savefig(path, dpi=110)


def plot_speed(cases: Sequence[Case], path: Path) -> None:
    """The rate of a whole step over that with FP32 tables: a bar a case, from p10 to p90 of the rounds."""
    figure = Figure(figsize=(7.5, 0.5 * len(cases) + 1.5), layout="constrained")
    axes = figure.subplots()
    names = [case.name.removesuffix("_speed") for case in cases]
    ratios = [case.ratio for case in cases]
    below = [case.ratio - case.ratio_p10 for case in cases]
    above = [case.ratio_p90 - case.ratio for case in cases]
    axes.barh(names, ratios, xerr=(below, above), color="tab:blue", ecolor="grey", capsize=3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    for position, case in enumerate(cases):
        if case.goal:
            axes.plot([case.goal] * 2, [position - 0.4, position + 0.4], color="tab:red")
    axes.invert_yaxis()
    axes.set_xlabel("samples a second over those with FP32 tables in memory (red: goal)")
    figure.savefig(path, dpi=110)
