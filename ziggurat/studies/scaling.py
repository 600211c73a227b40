"""Growing a model to a given amount of compute.

`grow(config, inputs, factor)` gives the settings whose FLOPs a sample are nearest to `factor` times those of `config`.
How a model grows, its config says (`models/contract/growth.py`): first deeper, while that fits; then every width by one
factor s, found by bisection. Sizes are whole numbers, so the FLOPs met are a few percent off the target, and the report
shows those that were met. Compute is what `flops_per_sample` counts of a forward pass (a test compares with torch's own
counter); of models that read histories it is that of the mean sample (`counted_flops.py`). Parameters of tables do not
change, but for models whose events are the columns of their tables.

Cost of finding the settings: a few dozen models are built without their tables, milliseconds each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import MODEL_CONFIGS, BuiltInConfig, build_model, flops_per_sample
from ziggurat.models.build import kind_of
from ziggurat.models.contract.growth import Grows

_MAX_WIDTH = 4096.0


def growing_models() -> dict[str, type[BuiltInConfig]]:
    """Return the configs of all built-in models that say how they grow, by the names of the models."""
    return {kind_of(cls): cls for cls in MODEL_CONFIGS if isinstance(cls, type) and issubclass(cls, Grows)}


@functools.lru_cache(maxsize=1024)  # searches for widths come to the same settings again
def forward_flops(config: BuiltInConfig, inputs: InputSpec) -> int:
    """Count the FLOPs of a forward pass of one sample."""
    return flops_per_sample(build_model(config, inputs, seed=0, draw_tables=False)).forward


def grow(
    config: BuiltInConfig, inputs: InputSpec, *, factor: float, flops: Callable[[BuiltInConfig], int] | None = None
) -> BuiltInConfig:
    """Return settings with `factor` times the FLOPs of `config`, as near as whole numbers allow.

    Args:
        config: the smallest model; one of your own too, if it says how it grows.
        inputs: what it reads.
        factor: 1 or more.
        flops: returns those of a sample, forward; None: `forward_flops`, without histories.

    Raises:
        ConfigError: the factor is below 1, or the model does not say how it grows, or a layer more costs nothing.
    """
    if factor < 1.0:
        raise ConfigError(
            expected="a factor of 1 or more: models grow from their smallest settings",
            found=str(factor),
            where="grow",
            ways_out="start from smaller settings",
        )
    if not isinstance(config, Grows):
        raise ConfigError(
            expected="a model with a rule of growth: " + ", ".join(growing_models()),
            found=config.kind,
            where="grow",
            ways_out=(
                "scale one of these",
                "give the config methods smallest, deeper and wider (ziggurat.models.contract.growth.Grows)",
            ),
        )
    count = flops or functools.partial(forward_flops, inputs=inputs)
    cost = count(config)
    target = factor * cost
    deep: Grows = config
    while (deeper := deep.deeper()) is not None:
        more = count(_built(deeper))
        if more <= cost:
            raise ConfigError(
                expected="a `deeper` that adds FLOPs, or returns None where no more layers are tried",
                found=f"{more:,} FLOPs a sample after {cost:,}",
                where=f"{type(config).__name__}.deeper",
                ways_out=("return the settings with one more layer", "return None at the most layers that are tried"),
            )
        if more > target:
            break
        deep = deeper
        cost = more
    return _widened_to(target, lambda s: _built(deep.wider(s)), count=count)


def _built(config: Grows) -> BuiltInConfig:
    """Return the config as one that builds a model, which every config is that grows."""
    return cast(BuiltInConfig, config)


def _widened_to(
    target: float, wider: Callable[[float], BuiltInConfig], *, count: Callable[[BuiltInConfig], int]
) -> BuiltInConfig:
    """Bisect the factor of widths between 1 and 4096 until the FLOPs meet a target."""
    low = 1.0
    high = 2.0
    while high < _MAX_WIDTH and count(wider(high)) < target:
        low = high
        high = high * 2.0
    if count(wider(low)) >= target:
        return wider(low)
    # The factors are at most 2 apart, so 12 halvings of their logarithm leave 0.02 %.
    for _ in range(12):
        middle = (low * high) ** 0.5
        if count(wider(middle)) < target:
            low = middle
        else:
            high = middle
    return min((wider(low), wider(high)), key=lambda each: abs(count(each) - target))
