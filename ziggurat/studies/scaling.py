"""Growing a model: width, depth and rank together, to a given amount of compute.

`grow(config, inputs, factor)` gives the settings whose FLOPs a sample are nearest to `factor` times those of `config`:

    wukong   section 3.8 of the paper: first more layers (each doubles the order of the products), then n_F, n_L, the
             rank k and the MLP of every layer together, by one factor s. The embeddings stay as wide as they are.
    dcn_v2   first more cross layers, up to 4 (more never helped in the Wukong paper's search), then the deep network
             wider. A cross layer is d × d, so it cannot grow by itself.
    dlrm     its only part that can grow is the MLPs: the top MLP and, where there are numbers, the bottom MLP wider.
    dnn      the MLP wider.

Compute is what `flops_per_sample` counts of a forward pass (a test compares with torch's own counter). The factor s is
found by bisection; sizes are whole numbers, so the FLOPs met are a few percent off the target, and the report shows
those that were met. Parameters of tables do not change: what grows is the dense network, as in the paper's figure 1.

Cost of finding the settings: a few dozen models are built without their tables, milliseconds each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import (
    BuiltInConfig,
    DCNv2Config,
    DLRMConfig,
    DNNConfig,
    MLPConfig,
    WukongConfig,
    build_model,
    flops_per_sample,
)

MAX_WUKONG_LAYERS = 8
MAX_CROSS_LAYERS = 4
_MAX_WIDTH = 4096.0


@functools.lru_cache(maxsize=1024)  # searches for widths come to the same settings again
def forward_flops(config: BuiltInConfig, inputs: InputSpec) -> int:
    """FLOPs of a forward pass of one sample."""
    return flops_per_sample(build_model(config, inputs, seed=0, draw_tables=False)).forward


def grow(config: BuiltInConfig, inputs: InputSpec, *, factor: float) -> BuiltInConfig:
    """Settings with `factor` times the FLOPs of `config`, as near as whole numbers allow.

    Args:
        config: the smallest model.
        inputs: what it reads.
        factor: 1 or more.

    Raises:
        ConfigError: the factor is below 1, or no rule says how this model grows.
    """
    if factor < 1.0:
        raise ConfigError(
            expected="a factor of 1 or more: models grow from their smallest settings",
            found=str(factor),
            where="grow",
            ways_out="start from smaller settings",
        )
    target = factor * forward_flops(config, inputs)
    match config:
        case WukongConfig():
            return _grow_wukong(config, inputs, target=target)
        case DCNv2Config():
            return _grow_dcn_v2(config, inputs, target=target)
        case DLRMConfig():
            return _widen(lambda s: replace(config, top=widened(config.top, s), bottom=widened(config.bottom, s)))(
                inputs, target
            )
        case DNNConfig():
            return _widen(lambda s: replace(config, deep=widened(config.deep, s)))(inputs, target)
        case _:
            raise ConfigError(
                expected="a model with a rule of growth: wukong, dcn_v2, dlrm, dnn",
                found=config.kind,
                where="grow",
                ways_out="scale one of these",
            )


def widened(mlp: MLPConfig, factor: float) -> MLPConfig:
    """The same hidden layers, each `factor` times as wide."""
    return replace(mlp, hidden_dims=tuple(max(1, round(width * factor)) for width in mlp.hidden_dims))


def _grow_wukong(config: WukongConfig, inputs: InputSpec, *, target: float) -> BuiltInConfig:
    """Layers first, while they fit; then everything in a layer together."""
    assert len({len(each) for each in (config.num_fm, config.num_linear, config.rank)}) == 1, "equal layers"
    layers = config.num_layers
    while layers < MAX_WUKONG_LAYERS and forward_flops(replace(config, num_layers=layers + 1), inputs) <= target:
        layers += 1
    deep = replace(config, num_layers=layers)

    def wider(s: float) -> BuiltInConfig:
        def times(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(max(1, round(size * s)) for size in sizes)

        return replace(
            deep,
            num_fm=times(deep.num_fm),
            num_linear=times(deep.num_linear),
            rank=times(deep.rank),
            mlp=widened(deep.mlp, s),
        )

    return _widen(wider)(inputs, target)


def _grow_dcn_v2(config: DCNv2Config, inputs: InputSpec, *, target: float) -> BuiltInConfig:
    """Cross layers first, while they fit; then the deep network."""

    def crossed(layers: int) -> DCNv2Config:
        return replace(config, cross=replace(config.cross, num_layers=layers))

    layers = config.cross.num_layers
    while layers < MAX_CROSS_LAYERS and forward_flops(crossed(layers + 1), inputs) <= target:
        layers += 1
    deep = crossed(layers)
    return _widen(lambda s: replace(deep, deep=widened(deep.deep, s)))(inputs, target)


def _widen(wider: Callable[[float], BuiltInConfig]) -> Callable[[InputSpec, float], BuiltInConfig]:
    """Bisect the factor of widths between 1 and 4096 until the FLOPs meet a target."""

    def found(inputs: InputSpec, target: float) -> BuiltInConfig:
        low = 1.0
        high = 2.0
        while high < _MAX_WIDTH and forward_flops(wider(high), inputs) < target:
            low = high
            high = high * 2.0
        if forward_flops(wider(low), inputs) >= target:
            return wider(low)
        # The factors are at most 2 apart, so 12 halvings of their logarithm leave 0.02 %.
        for _ in range(12):
            middle = (low * high) ** 0.5
            if forward_flops(wider(middle), inputs) < target:
                low = middle
            else:
                high = middle
        return min((wider(low), wider(high)), key=lambda each: abs(forward_flops(each, inputs) - target))

    return found
