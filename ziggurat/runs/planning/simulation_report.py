"""What a simulation shows: the parts of a step, in a few kinds, as numbers and as stacked bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ziggurat.files import write_figure
from ziggurat.planning.simulator.timeline import Timeline
from ziggurat.runs.planning.plan_run import SimulatedStep

_KIND_OF_PART = {
    "lookup": "tables",
    "update of tables": "tables",
    "dense network": "dense",
    "bottom network": "dense",
    "optimizers": "dense",
    "tower modules": "towers",
    "wait: exchange": "exchange",
    "wait: inter-group all-to-all": "exchange",
    "wait: intra-group all-to-all": "intra-group",
    "wait: dense gradients": "reduction",
    "wait: tower gradients": "reduction",
    "wait: gradients of copies": "reduction",
    "wait: ids": "ids",
}
PARTS = ("tables", "towers", "dense", "intra-group", "exchange", "reduction", "ids", "rest")
CUT_SHORT = "cut short"
_COLOURS = ("#5b8c5a", "#a3c585", "#1f6f8b", "#f2c14e", "#d1495b", "#8d6a9f", "#5f6c7b", "#c8c8c8")


def step_parts(timeline: Timeline) -> dict[str, float]:
    """Add up the milliseconds of a step by kind; those of links are what computation does not hide."""
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for name, value in timeline.parts_ms().items():
        parts[_KIND_OF_PART.get(name, "rest")] += value
    return parts


def simulation_table(steps: Sequence[SimulatedStep]) -> list[tuple[str, ...]]:
    """Heading and one line a step that fits: milliseconds by kind, million samples a second, gain over the flat model.

    Kinds of time that no step spends are left out. `apart` is how far two independent searches of the line's plan ended
    apart, in ms. A ratio of two steps is called a gain where the searches of both ended by themselves, and the steps
    differ by more than their searches.
    """
    fitting = [step for step in steps if step.timeline is not None]
    parts = [step_parts(step.timeline) for step in fitting if step.timeline is not None]
    names = [name for name in PARTS if any(each[name] >= 0.005 for each in parts)]
    rows: list[tuple[str, ...]] = [("devices", "model", "ms", *names, "M/s", "apart", "gain")]
    flat: dict[int, tuple[float, SimulatedStep]] = {}
    for step, each in zip(fitting, parts, strict=True):
        step_ms = sum(each.values())
        size = step.cluster.world_size
        if step.kind == "flat":
            flat[size] = step_ms, step
        gain = ""
        if step.kind == "towers" and size in flat:
            flat_ms, flat_step = flat[size]
            is_clear = abs(flat_ms - step_ms) > step.apart_ms + flat_step.apart_ms
            gain = f"{flat_ms / step_ms:.2f}" if is_clear and step.settled and flat_step.settled else "–"
        model = step.note or step.kind
        cells = (f"{each[name]:.2f}" for name in names)
        rate = f"{step.samples_per_s / 1e6:,.1f}"
        rows.append((f"{size}", model, f"{step_ms:.2f}", *cells, rate, _apart(step), gain))
    return rows


def _apart(step: SimulatedStep) -> str:
    if not step.settled:
        return CUT_SHORT
    return f"{step.apart_ms:.2f}" if math.isfinite(step.apart_ms) else "one search"


def plot_simulation(steps: Sequence[SimulatedStep], path: Path, *, title: str) -> None:
    """Draw stacked bars: for each size of the cluster the flat model, and towers beside it.

    Args:
        steps: of `simulate_run`.
        path: .png or .svg.
        title: above the plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fitting = [step for step in steps if step.timeline is not None]
    sizes = list(dict.fromkeys(step.cluster.name for step in steps))
    figure, axis = plt.subplots(figsize=(1.2 * len(sizes) + 3.0, 4.2), layout="constrained")
    for step in steps:
        if step.timeline is None:
            continue
        place = sizes.index(step.cluster.name) + (-0.2 if step.kind == "flat" else 0.2)
        bottom = 0.0
        for (name, value), colour in zip(step_parts(step.timeline).items(), _COLOURS, strict=True):
            label = name if step is fitting[0] else None
            hatch = "//" if step.kind == "towers" else None
            axis.bar(place, value, 0.36, bottom=bottom, color=colour, label=label, hatch=hatch, edgecolor="white")
            bottom += value
    names = {step.cluster.name: step.cluster.world_size for step in steps}
    axis.set_xticks(range(len(sizes)), [str(names[name]) for name in sizes])
    axis.set_xlabel(f"devices ({steps[0].cluster.device.name}, {steps[0].cluster.devices_per_host} a host)")
    axis.set_ylabel("ms a step, predicted")
    axis.set_title(f"{title}: flat (left) and towers (right, hatched)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    write_figure(figure, path, dpi=110)
    plt.close(figure)
