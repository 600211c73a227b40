"""Settings of every model for each data set, and the variants that a comparison tries.

On Frappe the baselines are BARS's best configurations (its run logs of Frappe_x1): tables of 10 columns, MLPs of
400-400-400 with batch normalisation, each model's own penalty λ on the tables and dropout. On the other data sets all
models get tables of 16 columns, MLPs of 128, and λ = 0.3: by MovieLens's validation data the best of 0.1, 0.3 and 1 at
random, and better than 0.1 by time, for DCNv2 and for Wukong.

A fair comparison gives each model the same number of tries. `variant` makes the k-th: the same change of λ and dropout
for every model, in one order, the settings themselves first:

    k        0    1    2     3      4      5     6      7     8
    λ ·      1    2    0.5   1      1      2     0.5    4     0.25
    dropout  0    0    0    +0.1   −0.1   +0.1  +0.1    0     0

Where models are trained as a recipe says, the factor is one of both learning rates instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ziggurat.errors import ConfigError
from ziggurat.models import (
    AutoIntConfig,
    CrossConfig,
    DCNv2Config,
    DeepFMConfig,
    DHENConfig,
    DHENModule,
    DLRMConfig,
    DNNConfig,
    FinalMLPConfig,
    FinalNetConfig,
    Interaction,
    LogisticRegressionConfig,
    MaskNetConfig,
    MLPConfig,
    ModelConfig,
    Normalization,
    WukongConfig,
    XDeepFMConfig,
)
from ziggurat.models.blocks.interactions.self_attention import AttentionConfig
from ziggurat.models.build import kind_of
from ziggurat.models.finalnet import Gating
from ziggurat.models.masknet import MaskStructure
from ziggurat.studies.compare_data import ComparedData
from ziggurat.studies.compare_own import OwnData, own_models
from ziggurat.typed import checked

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


@dataclass(frozen=True, kw_only=True)
@checked
class ModelSettings:
    """A model for one data set.

    Args:
        model: sizes and dropout; the protocol adds how weights start and how tables learn.
        embedding_l2: λ of the penalty on whole tables; `bars` only.
        rate: factor on both learning rates; `recipe` only.
    """

    model: ModelConfig
    embedding_l2: float
    rate: float = 1.0


def settings_of_all(
    names: Sequence[str], data: ComparedData | OwnData, *, own: Sequence[type[Any]] = ()
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
    makers = FRAPPE if data is ComparedData.FRAPPE else OTHERS
    if name not in makers:
        raise ConfigError(
            expected="models out of " + ", ".join(makers),
            found=repr(name),
            where="ziggurat compare, --models",
            ways_out="separate them by commas: --models dnn,dcn_v2,wukong",
        )
    return makers[name]()


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


def _shift_dropout(config: Any, shift: float) -> Any:
    """Every MLP's dropout moved by `shift`, kept within 0 … 0.8."""
    if isinstance(config, MLPConfig):
        return replace(config, dropout=round(min(0.8, max(0.0, config.dropout + shift)), 6)) if shift else config
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return config
    entries = {entry.name: getattr(config, entry.name) for entry in dataclasses.fields(config) if entry.init}
    changed = {name: _shift_dropout(value, shift) for name, value in entries.items()}
    return replace(config, **{name: value for name, value in changed.items() if value is not entries[name]})


def _mlp(*hidden_dims: int, dropout: float) -> MLPConfig:
    return MLPConfig(hidden_dims=hidden_dims, normalization=Normalization.BATCH, dropout=dropout)


def _wukong(width: int, *, head: int) -> WukongConfig:
    return WukongConfig(
        embedding_dim=16,
        num_layers=2,
        num_fm=(8,),
        num_linear=(8,),
        rank=(8,),
        mlp=_mlp(width, dropout=0.4),
        head=_mlp(head, dropout=0.4),
        norm=Normalization.BATCH,
        input_norm=Normalization.BATCH,
    )


def _dhen(width: int, *, head: int) -> DHENConfig:
    return DHENConfig(
        embedding_dim=16,
        num_layers=2,
        modules=(DHENModule.DOT, DHENModule.LINEAR),
        num_outputs=(8,),
        mlp=_mlp(width, dropout=0.4),
        head=_mlp(head, dropout=0.4),
        norm=Normalization.BATCH,
        input_norm=Normalization.BATCH,
    )


_OTHER_MLP = _mlp(128, 128, dropout=0.2)
_OTHER_L2 = 0.3


def _other(model: ModelConfig) -> ModelSettings:
    return ModelSettings(model=model, embedding_l2=_OTHER_L2)


def _frappe_dnn() -> ModelSettings:
    return ModelSettings(model=DNNConfig(embedding_dim=10, deep=_mlp(400, 400, 400, dropout=0.2)), embedding_l2=0.05)


def _frappe_dlrm() -> ModelSettings:
    model = DLRMConfig(embedding_dim=10, interaction=Interaction.CAT, top=_mlp(400, 400, 400, dropout=0.4))
    return ModelSettings(model=model, embedding_l2=0.1)


def _frappe_dcn_v2() -> ModelSettings:
    model = DCNv2Config(embedding_dim=10, cross=CrossConfig(num_layers=4), deep=_mlp(400, 400, 400, dropout=0.4))
    return ModelSettings(model=model, embedding_l2=0.05)


def _frappe_deepfm() -> ModelSettings:
    return ModelSettings(model=DeepFMConfig(embedding_dim=10, deep=_mlp(400, 400, 400, dropout=0.2)), embedding_l2=0.05)


def _frappe_xdeepfm() -> ModelSettings:
    model = XDeepFMConfig(embedding_dim=10, cin=(64,), deep=_mlp(400, 400, 400, dropout=0.2))
    return ModelSettings(model=model, embedding_l2=0.1)


def _frappe_autoint() -> ModelSettings:
    attention = AttentionConfig(dim=128, num_heads=4, layer_norm=True, dropout=0.1)
    model = AutoIntConfig(embedding_dim=10, num_layers=5, attention=attention, deep=_mlp(400, 400, 400, dropout=0.1))
    return ModelSettings(model=model, embedding_l2=0.1)


def _frappe_masknet() -> ModelSettings:
    model = MaskNetConfig(
        embedding_dim=10,
        structure=MaskStructure.PARALLEL,
        num_blocks=3,
        block_dim=50,
        reduction_ratio=2.0,
        field_norm=Normalization.NONE,
        deep=MLPConfig(hidden_dims=(400, 400, 400), dropout=0.1),
    )
    return ModelSettings(model=model, embedding_l2=0.1)


def _frappe_finalmlp() -> ModelSettings:
    model = FinalMLPConfig(
        embedding_dim=10,
        first=_mlp(400, dropout=0.4),
        second=_mlp(100, dropout=0.4),
        gate=MLPConfig(hidden_dims=(400,)),
        first_context=("user",),
        second_context=("item",),
        num_heads=5,
    )
    return ModelSettings(model=model, embedding_l2=0.05)


def _frappe_finalnet() -> ModelSettings:
    model = FinalNetConfig(
        embedding_dim=10,
        gating=Gating.FIELDS,
        first=_mlp(400, 400, dropout=0.1),
        second=_mlp(400, dropout=0.1),
    )
    return ModelSettings(model=model, embedding_l2=0.1)


def _frappe_wukong() -> ModelSettings:
    return ModelSettings(model=_wukong(256, head=400), embedding_l2=0.15)


def _frappe_dhen() -> ModelSettings:
    return ModelSettings(model=_dhen(256, head=400), embedding_l2=0.15)


def _other_dnn() -> ModelSettings:
    return _other(DNNConfig(deep=_OTHER_MLP))


def _other_dlrm() -> ModelSettings:
    return _other(DLRMConfig(top=_OTHER_MLP))


def _other_dcn_v2() -> ModelSettings:
    return _other(DCNv2Config(cross=CrossConfig(num_layers=3), deep=_OTHER_MLP))


def _other_deepfm() -> ModelSettings:
    return _other(DeepFMConfig(deep=_OTHER_MLP))


def _other_xdeepfm() -> ModelSettings:
    return _other(XDeepFMConfig(cin=(32,), deep=_OTHER_MLP))


def _other_autoint() -> ModelSettings:
    attention = AttentionConfig(dim=32, num_heads=2, layer_norm=True)
    return _other(AutoIntConfig(num_layers=2, attention=attention, deep=_OTHER_MLP))


def _other_masknet() -> ModelSettings:
    return _other(MaskNetConfig(structure=MaskStructure.PARALLEL, num_blocks=3, deep=_OTHER_MLP))


def _other_finalmlp() -> ModelSettings:
    return _other(FinalMLPConfig(first=_mlp(128, dropout=0.2), second=_mlp(128, dropout=0.2), num_heads=8))


def _other_finalnet() -> ModelSettings:
    return _other(FinalNetConfig(first=_OTHER_MLP, second=_mlp(128, dropout=0.2)))


def _other_wukong() -> ModelSettings:
    return _other(_wukong(128, head=128))


def _other_dhen() -> ModelSettings:
    return _other(_dhen(128, head=128))


def _logistic_regression() -> ModelSettings:
    return ModelSettings(model=LogisticRegressionConfig(), embedding_l2=0.01)


FRAPPE: dict[str, Callable[[], ModelSettings]] = {
    "logistic_regression": _logistic_regression,
    "dnn": _frappe_dnn,
    "dlrm": _frappe_dlrm,
    "dcn_v2": _frappe_dcn_v2,
    "deepfm": _frappe_deepfm,
    "xdeepfm": _frappe_xdeepfm,
    "autoint": _frappe_autoint,
    "masknet": _frappe_masknet,
    "finalmlp": _frappe_finalmlp,
    "finalnet": _frappe_finalnet,
    "wukong": _frappe_wukong,
    "dhen": _frappe_dhen,
}

OTHERS: dict[str, Callable[[], ModelSettings]] = {
    "logistic_regression": _logistic_regression,
    "dnn": _other_dnn,
    "dlrm": _other_dlrm,
    "dcn_v2": _other_dcn_v2,
    "deepfm": _other_deepfm,
    "xdeepfm": _other_xdeepfm,
    "autoint": _other_autoint,
    "masknet": _other_masknet,
    "finalmlp": _other_finalmlp,
    "finalnet": _other_finalnet,
    "wukong": _other_wukong,
    "dhen": _other_dhen,
}
