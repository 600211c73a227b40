"""Learning-rate schedule: a factor on the base rates, as a pure function of the step and of past evaluations.

    warm-up    factor = (step + 1) / warmup_steps                     for step < warmup_steps
    linear     factor = 1 + (final − 1)·t                             t = progress after the warm-up, 0 … 1
    cosine     factor = final + (1 − final)·(1 + cos(π t)) / 2
    plateau    factor = plateau_factor ^ (evaluations that did not improve), lr never below `minimum`
    inverse    factor = 1 / √(1 + s / decay_steps)                    s = steps after the warm-up
    halving    factor = final + (1 − final) · 2 ^ (−s / decay_steps)

The last two need no end, so a stream may have them. A window of data after the first multiplies with a warm-up of its
own where `rewarm_steps` says so: what an optimizer knows of gradients is of the window before.

Being pure, it needs no state of its own in a checkpoint: step and history of evaluations are there anyway.
"""

from __future__ import annotations

import math

from ziggurat.training.config import Decay, ScheduleConfig


def learning_rate_factor(
    config: ScheduleConfig,
    *,
    step: int,
    total_steps: int,
    reductions: int,
    learning_rate: float,
    step_in_window: int | None = None,
) -> float:
    """Factor on the base learning rates at `step` (0-based).

    Args:
        config: the schedule.
        step: steps already taken.
        total_steps: steps of the whole run, for linear and cosine.
        reductions: evaluations that did not improve, for plateau.
        learning_rate: the base rate, for plateau's minimum.
        step_in_window: steps already taken in this window of data; None in the first one.
    """
    factor = _factor(config, step=step, total_steps=total_steps, reductions=reductions, learning_rate=learning_rate)
    if step_in_window is None or step_in_window >= config.rewarm_steps:
        return factor
    return factor * (step_in_window + 1) / config.rewarm_steps


def _factor(config: ScheduleConfig, *, step: int, total_steps: int, reductions: int, learning_rate: float) -> float:
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.decay is Decay.CONSTANT or (step < config.warmup_steps and config.decay is not Decay.PLATEAU):
        return warm
    if config.decay is Decay.PLATEAU:
        return warm * max(config.plateau_factor**reductions, min(1.0, config.minimum / learning_rate))
    since = step - config.warmup_steps
    if config.decay is Decay.INVERSE_SQRT:
        return 1.0 / math.sqrt(1.0 + since / config.decay_steps)
    if config.decay is Decay.HALVING:
        return config.final_factor + (1.0 - config.final_factor) * 2.0 ** (-since / config.decay_steps)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps))
    if config.decay is Decay.LINEAR:
        return 1.0 + (config.final_factor - 1.0) * progress
    return config.final_factor + (1.0 - config.final_factor) * (1.0 + math.cos(math.pi * progress)) / 2.0
