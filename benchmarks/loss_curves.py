"""Claim: the recommended settings lose nothing: same loss curve as FP32 eager, within the noise of the seed.

The synthetic teacher's rows, each seen once, in the same order; three seeds for the starting weights. Loss before each
update, averaged over windows of 25 steps. Compared with

    reference   ours, FP32, eager, the torch lookup kernel: the slow, readable twin of every fast part
    TorchRec    its FP32 eager training with the same optimizers and rates: an implementation that shares no code

Noise is the standard deviation between seeds in a window, pooled over both sides and all windows. A curve passes if
its mean over seeds differs from the reference's by less than 3 standard errors in at least 95 % of the windows, and by
less than 0.001 over the last quarter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Entry, Worker, say
from benchmarks.report import Case, Report
from benchmarks.train import OURS, TORCHREC, compile_cache
from benchmarks.workload import ModelKind, Workload

WINDOW, THREADS = 25, 2
REFERENCE, RECOMMENDED, PEER = "ours: FP32 eager, torch kernel", "ours: recommended", "TorchRec: FP32 eager"
SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    REFERENCE: (OURS, {"precision": "fp32", "compile": "off", "kernel": "torch"}),
    RECOMMENDED: (OURS, {}),
    PEER: (TORCHREC, {}),
}
LAST_QUARTER_TOLERANCE = 0.001


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far a mean curve is from the reference's."""

    share_within_noise: float
    last_quarter_difference: float

    @property
    def passes(self) -> bool:
        """The criterion of the module docstring."""
        return self.share_within_noise >= 0.95 and abs(self.last_quarter_difference) < LAST_QUARTER_TOLERANCE


def run(*, quick: bool = False) -> Report:
    """Train every curve and compare."""
    steps, seeds = (100, 2) if quick else (400, 3)
    report = Report(
        benchmark="loss_curves",
        claim=f"Training loss of DLRM D=16 over {steps * 2048:,} rows of the synthetic teacher, {seeds} seeds.",
        command="ziggurat bench loss_curves",
    )
    workload = Workload(
        model=ModelKind.DLRM, teacher=True, num_batches=steps, learning_rate=1e-3, table_learning_rate=0.02
    )
    curves = {name: np.stack([train(name, replace(workload, seed=seed)) for seed in range(seeds)]) for name in SETTINGS}
    for name, setting in ((RECOMMENDED, "default"), (PEER, "torchrec")):
        found = agreement(curves[name], curves[REFERENCE])
        last = slice(3 * curves[name].shape[1] // 4, None)
        mine, reference = curves[name][:, last].mean(), curves[REFERENCE][:, last].mean()
        report.cases.append(
            Case(
                name=f"{workload.case}_fp32_eager_{setting}",  # the ratio: share of windows within noise
                ours=float(mine),
                peer=float(reference),
                ratio=found.share_within_noise,
                ratio_p10=found.share_within_noise,
                ratio_p90=found.share_within_noise,
                ours_name=name,
                peer_name=REFERENCE,
                goal=0.95 if name == RECOMMENDED else 0.0,
                unit="loss, last quarter",
            )
        )
        verdict = "passes" if found.passes else "FAILS"
        report.notes.append(f"{name}: last quarter differs by {found.last_quarter_difference:+.5f}: {verdict}")
    report.extra["curves"] = {name: np.round(curve, 5).tolist() for name, curve in curves.items()}
    report.plots.append(("loss_curves.png", lambda path: plot(curves, path)))
    return report


def train(name: str, workload: Workload) -> np.ndarray:
    """Loss by window of one run."""
    module, settings = SETTINGS[name]
    say(f"  {name}, seed {workload.seed}")
    entry = Entry(name=name, module=module, workload=workload, settings=settings, env=compile_cache("ours"))
    with Worker(entry, threads=THREADS, first_steps=0) as worker:
        losses = worker.losses(workload.num_batches)
    return np.array(losses).reshape(-1, WINDOW).mean(axis=1)


def agreement(curves: np.ndarray, reference: np.ndarray) -> Agreement:
    """Compare two sets of curves (seeds, windows)."""
    seeds = reference.shape[0]
    difference = curves.mean(axis=0) - reference.mean(axis=0)
    variance = (reference.var(axis=0, ddof=1).mean() + curves.var(axis=0, ddof=1).mean()) / 2.0
    noise = np.sqrt(variance * 2.0 / seeds)
    last = slice(3 * len(difference) // 4, None)
    return Agreement(
        share_within_noise=float((np.abs(difference) <= 3.0 * noise).mean()),
        last_quarter_difference=float(difference[last].mean()),
    )


def plot(curves: dict[str, np.ndarray], path: Path) -> None:
    """Mean over seeds with the range between them; below, the difference to the reference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[2, 1], layout="constrained")
    reference = curves[REFERENCE].mean(axis=0)
    for (name, curve), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        steps = (np.arange(curve.shape[1]) + 1) * WINDOW
        (line,) = above.plot(steps, curve.mean(axis=0), style, label=name)
        above.fill_between(steps, curve.min(axis=0), curve.max(axis=0), color=line.get_color(), alpha=0.15)
        below.plot(steps, curve.mean(axis=0) - reference, style, color=line.get_color())
    above.set_ylabel("training loss")
    above.legend(frameon=False)
    below.set_ylabel("difference of means")
    below.set_xlabel("step (batch 2048)")
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
