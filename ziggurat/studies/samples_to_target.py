"""Samples to a target: how many samples runs had trained on when an evaluation first reached a target.

    run      seed   samples   best           mean and CV over seeds: what MLPerf states of its references
    runs/0   0      20,480    0.812
    runs/1   1      never     0.743

Evaluations happen at steps, so a count is that of the first evaluation that reached the target: the truth lies up to
`training.evaluate_every` steps before it. A run that never did so has no count, and then there is no mean.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ziggurat.errors import ConfigError
from ziggurat.recipes.run_config import load_config
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class SamplesToTarget:
    """The samples that one run needed.

    Args:
        run: its folder.
        seed: of its training.
        samples: trained on at the first evaluation that reached the target; None: none did.
        best: the best value of the metric.
    """

    run: str
    seed: int
    samples: int | None
    best: float


def samples_to_target(
    runs: Sequence[str | Path], *, metric: str, target: float, ranks: int = 1
) -> tuple[SamplesToTarget, ...]:
    """Return the samples that each run needed until its validation metric was at least the target.

    Args:
        runs: folders of finished runs.
        metric: as evaluations have it: `auc`.
        target: to reach.
        ranks: that each run had: a step has so many batches.

    Raises:
        ConfigError: no such metric in a run's evaluations, or no rank.
    """
    if ranks < 1:
        raise ConfigError(
            expected="at least one rank", found=str(ranks), where="--ranks", ways_out="as torchrun had: --ranks 4"
        )
    return tuple(_needed(Path(run), metric=metric, target=target, ranks=ranks) for run in runs)


def mean_and_variation(found: Sequence[SamplesToTarget]) -> tuple[float, float] | None:
    """Mean of the counts and standard deviation over it; None where a run did not reach the target."""
    counts = [each.samples for each in found if each.samples is not None]
    if not counts or len(counts) < len(found):
        return None
    mean = statistics.fmean(counts)
    return mean, (statistics.stdev(counts) / mean if len(counts) > 1 else 0.0)


def target_json(found: Sequence[SamplesToTarget], *, metric: str, target: float) -> dict[str, object]:
    """Return the samples that runs needed as plain data, with mean and variation where all reached the target.

    Args:
        found: of each run.
        metric: that was to reach the target.
        target: to reach.
    """
    mean, variation = mean_and_variation(found) or (None, None)
    runs = [dataclasses.asdict(each) for each in found]
    return {"metric": metric, "target": target, "runs": runs, "mean": mean, "variation": variation}


def target_of(text: str) -> tuple[str, float]:
    """Metric and value of a text like `auc=0.62`.

    Raises:
        ConfigError: it is none.
    """
    metric, _, value = text.partition("=")
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not metric.strip() or not math.isfinite(found):
        raise ConfigError(
            expected="a metric and the value to reach",
            found=repr(text),
            where="--target",
            ways_out=("--target auc=0.62", "--target full_recall@10=0.3"),
        )
    return metric.strip(), found


def target_table(found: Sequence[SamplesToTarget]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows for people: a row for each run, then mean and variation."""
    rows = [
        (each.run, str(each.seed), "never" if each.samples is None else f"{each.samples:,}", f"{each.best:.4f}")
        for each in found
    ]
    if len(found) > 1:
        spread = mean_and_variation(found)
        text = "–, since a run never reached it" if spread is None else f"{spread[0]:,.0f} ± {spread[1]:.0%}"
        rows.append(("mean", "", text, ""))
    return ("run", "seed", "samples to target", "best"), rows


def _needed(run: Path, *, metric: str, target: float, ranks: int) -> SamplesToTarget:
    config = load_config(run)
    records = [each for each in read_records(RunFolder(run).metrics) if each.get("kind") == "valid"]
    values = [(int(each["step"]), float(each[metric])) for each in records if each.get(metric) is not None]
    if not values:
        raise ConfigError(
            expected=f"evaluations of validation data with {metric!r}",
            found=", ".join(sorted(records[0])) if records else "no evaluation",
            where=str(RunFolder(run).metrics),
            ways_out=("name a metric that the run has", "evaluate more often: --training.evaluate-every 100"),
        )
    size = config.training.loader.batch_size * ranks
    reached = next((step for step, value in values if value >= target), None)
    return SamplesToTarget(
        run=str(run),
        seed=config.training.seed,
        samples=None if reached is None else reached * size,
        best=max(value for _, value in values),
    )
