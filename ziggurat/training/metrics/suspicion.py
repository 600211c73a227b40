"""Results that are rather a mistake than a success: an AUC above 0.99, or below 0.5 (worse than a coin)."""

from __future__ import annotations

from collections.abc import Mapping

_TOO_GOOD = 0.99
_COIN = 0.5


def suspicious(metrics: Mapping[str, float], *, split: str) -> list[str]:
    """Sentences on the AUCs of an evaluation that need a second look; NaN (undefined) is none of them.

    Args:
        metrics: name to value, as `Evaluation.metrics`.
        split: whose rows they were, for the sentence.
    """
    lines: list[str] = []
    for name, value in metrics.items():
        if name.partition("/")[0] != "auc":
            continue
        if value > _TOO_GOOD:
            why = "hardly any real task allows that: does a feature tell the label, or is a row in both splits?"
            lines.append(f"{split} {name} is {value:.5f}: {why}")
        elif value < _COIN:
            why = "worse than chance: is the label turned round, or does this split differ from the training rows?"
            lines.append(f"{split} {name} is {value:.5f}: {why}")
    return lines
