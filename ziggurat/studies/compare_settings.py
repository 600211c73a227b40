"""Settings of the models that a comparison trains (`recipes/model_settings.py`), and the variants that it tries.

A fair comparison gives each model the same number of tries. `variant` makes the k-th: the same change of λ and dropout
for every model, in one order, the settings themselves first:

    k        0    1    2     3      4      5     6      7     8
    λ ·      1    2    0.5   1      1      2     0.5    4     0.25
    dropout  0    0    0    +0.1   −0.1   +0.1  +0.1    0     0

Where models are trained as a recipe says, the factor is one of both learning rates instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

from ziggurat.models import MLPConfig, ModelConfig
from ziggurat.models.build import kind_of
from ziggurat.recipes.model_settings import FRAPPE, OTHER_L2, OTHERS, ModelSettings, settings_named
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_own import OwnData, own_models

VARIANTS = (
    (1.0, 0.0),
    (2.0, 0.0),
    (0.5, 0.0),
    (1.0, 0.1),
    (1.0, -0.1),
    (2.0, 0.1),
    (0.5, 0.1),
    (4.0, 0.0),
    (0.25, 0.0),
)


def settings_of_all(
    names: Sequence[str], data: ComparedData | OwnData, *, own: Sequence[type[ModelConfig]] = ()
) -> dict[str, ModelSettings]:
    """The settings of each named model on a data set; of a class in `own` its defaults.

    Raises:
        ConfigError: no such model, or a changed setting that none of them has.
    """
    if isinstance(data, OwnData):
        return {name: _other(model) for name, model in own_models(names, data, own=own).items()}
    mine = {kind_of(each): each for each in own}
    return {name: _other(mine[name]()) if name in mine else settings_of(name, data) for name in names}


def settings_of(name: str, data: ComparedData) -> ModelSettings:
    """The settings of the model called `name` on a data set.

    Raises:
        ConfigError: no such model.
    """
    return settings_named(name, among=FRAPPE if data is ComparedData.FRAPPE else OTHERS)


def variant(settings: ModelSettings, index: int, *, of_rates: bool = False) -> ModelSettings:
    """The `index`-th variant, as the module docstring lists them; 0 is the settings themselves.

    Args:
        settings: of the model.
        index: k.
        of_rates: whether the factor is one of learning rates (protocol `recipe`) and not of λ.
    """
    factor, shift = VARIANTS[index]
    model = _shift_dropout(settings.model, shift)
    if of_rates:
        return replace(settings, model=model, rate=factor)
    return replace(settings, model=model, embedding_l2=round(settings.embedding_l2 * factor, 9))


def _shift_dropout(config: object, shift: float) -> object:
    """Every MLP's dropout moved by `shift`, kept within 0 … 0.8."""
    if isinstance(config, MLPConfig):
        return replace(config, dropout=round(min(0.8, max(0.0, config.dropout + shift)), 6)) if shift else config
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return config
    entries = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config) if entry.init}
    changed = {name: _shift_dropout(value, shift) for name, value in entries.items()}
    return replace(config, **{name: value for name, value in changed.items() if value is not entries[name]})


def _other(model: ModelConfig) -> ModelSettings:
    return ModelSettings(model=model, embedding_l2=OTHER_L2)
