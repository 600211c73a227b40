"""Settings of every built-in model by data set: sizes, dropout, and the penalty on tables that `bars` trains with.

On Frappe the baselines are BARS's best configurations (its run logs of Frappe_x1): tables of 10 columns, MLPs of
400-400-400 with batch normalisation, each model's own penalty λ on the tables and dropout. On the other data sets all
models get tables of 16 columns, MLPs of 128, and λ = 0.3: by MovieLens's validation data the best of 0.1, 0.3 and 1 at
random, and better than 0.1 by time, for DCNv2 and for Wukong.

RankMixer has no published figure on any of them: its settings are small ones of its paper's form that nothing has
chosen, where `ziggurat tune` begins.

A model is found by its kind, so a new one needs one entry in each tuple and no name; DIN has none, since none of these
data sets has a history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ziggurat.errors import ConfigError, nearest_names
from ziggurat.models import (
    AFNConfig,
    AttentionConfig,
    AutoIntConfig,
    BilinearKind,
    CrossConfig,
    DCNv2Config,
    DeepFMConfig,
    DHENConfig,
    DHENModule,
    DLRMConfig,
    DNNConfig,
    EDCNConfig,
    FCNConfig,
    FiBiNETConfig,
    FinalMLPConfig,
    FinalNetConfig,
    FMConfig,
    Gates,
    Gating,
    GDCNConfig,
    Interaction,
    LogisticRegressionConfig,
    MaskNetConfig,
    MaskStructure,
    MLPConfig,
    ModelConfig,
    Normalization,
    QNNConfig,
    RankMixerConfig,
    WideDeepConfig,
    WukongConfig,
    XDeepFMConfig,
)
from ziggurat.typed import checked


@dataclass(frozen=True, kw_only=True)
@checked
class ModelSettings:
    """A model for one data set.

    Args:
        model: sizes and dropout; the protocol adds how weights start and how tables learn.
        embedding_l2: λ of the penalty on whole tables; `bars` only.
        rate: factor on both learning rates; `recipe` only.
        published: test AUC of others: mean ± sd of five runs of BARS where it has five, else its single run.
    """

    model: ModelConfig
    embedding_l2: float
    rate: float = 1.0
    published: str = ""


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


def _rankmixer(token_dim: int) -> RankMixerConfig:
    return RankMixerConfig(embedding_dim=16, num_tokens=4, token_dim=token_dim, num_layers=2, expansion=2, dropout=0.2)


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


_DEEP = (400, 400, 400)
_OTHER_MLP = _mlp(128, 128, dropout=0.2)
OTHER_L2 = 0.3

_LOGISTIC_REGRESSION = ModelSettings(model=LogisticRegressionConfig(), embedding_l2=0.01)

FRAPPE = (
    _LOGISTIC_REGRESSION,
    ModelSettings(
        model=DNNConfig(embedding_dim=10, deep=_mlp(*_DEEP, dropout=0.2)),
        embedding_l2=0.05,
        published="0.98404 ± 0.00057",
    ),
    ModelSettings(
        model=DLRMConfig(embedding_dim=10, interaction=Interaction.CAT, top=_mlp(*_DEEP, dropout=0.4)),
        embedding_l2=0.1,
        published="0.9840 (one)",
    ),
    ModelSettings(
        model=DCNv2Config(embedding_dim=10, cross=CrossConfig(num_layers=4), deep=_mlp(*_DEEP, dropout=0.4)),
        embedding_l2=0.05,
        published="0.98382 ± 0.00049",
    ),
    ModelSettings(
        model=DeepFMConfig(embedding_dim=10, deep=_mlp(*_DEEP, dropout=0.2)),
        embedding_l2=0.05,
        published="0.98395 ± 0.00018",
    ),
    ModelSettings(
        model=XDeepFMConfig(embedding_dim=10, cin=(64,), deep=_mlp(*_DEEP, dropout=0.2)),
        embedding_l2=0.1,
        published="0.98414 ± 0.00042",
    ),
    ModelSettings(
        model=AutoIntConfig(
            embedding_dim=10,
            num_layers=5,
            attention=AttentionConfig(dim=128, num_heads=4, layer_norm=True, dropout=0.1),
            deep=_mlp(*_DEEP, dropout=0.1),
        ),
        embedding_l2=0.1,
        published="0.9848 (one)",
    ),
    ModelSettings(
        model=MaskNetConfig(
            embedding_dim=10,
            structure=MaskStructure.PARALLEL,
            num_blocks=3,
            block_dim=50,
            reduction_ratio=2.0,
            field_norm=Normalization.NONE,
            deep=MLPConfig(hidden_dims=_DEEP, dropout=0.1),
        ),
        embedding_l2=0.1,
        published="0.9837 (one)",
    ),
    ModelSettings(
        model=FinalMLPConfig(
            embedding_dim=10,
            first=_mlp(400, dropout=0.4),
            second=_mlp(100, dropout=0.4),
            gate=MLPConfig(hidden_dims=(400,)),
            first_context=("user",),
            second_context=("item",),
            num_heads=5,
        ),
        embedding_l2=0.05,
        published="0.9861 (one)",
    ),
    ModelSettings(
        model=FinalNetConfig(
            embedding_dim=10,
            gating=Gating.FIELDS,
            first=_mlp(400, 400, dropout=0.1),
            second=_mlp(400, dropout=0.1),
        ),
        embedding_l2=0.1,
        published="0.9857 (one)",
    ),
    ModelSettings(model=FMConfig(embedding_dim=10), embedding_l2=5e-6, published="0.9671 (one)"),
    ModelSettings(
        model=WideDeepConfig(embedding_dim=10, deep=_mlp(*_DEEP, dropout=0.6)),
        embedding_l2=0.1,
        published="0.98307 ± 0.00088",
    ),
    ModelSettings(
        model=FiBiNETConfig(
            embedding_dim=10,
            bilinear=BilinearKind.ALL,
            reduction=2,
            deep=_mlp(*_DEEP, dropout=0.3),
        ),
        embedding_l2=0.05,
        published="0.9832 (one)",
    ),
    # BARS has none: as its DCNv2.
    ModelSettings(model=GDCNConfig(embedding_dim=10, num_layers=4, deep=_mlp(*_DEEP, dropout=0.4)), embedding_l2=0.05),
    ModelSettings(
        model=AFNConfig(
            embedding_dim=10,
            num_neurons=1000,
            deep=MLPConfig(hidden_dims=(400,), dropout=0.4),
            beside=MLPConfig(hidden_dims=_DEEP, dropout=0.2),
        ),
        embedding_l2=0.001,
        published="0.98018 ± 0.00151",
    ),
    ModelSettings(
        model=EDCNConfig(
            embedding_dim=10,
            temperature=5.0,
            gates=Gates.SUM_ONE,
            norm=Normalization.BATCH,
            residual=False,
            dropout=0.3,
        ),
        embedding_l2=0.05,
        published="0.9850 (one)",
    ),
    # Its authors have no run on Frappe: layers as on Criteo, the penalty of DCNv2.
    ModelSettings(model=FCNConfig(exponential_layers=3), embedding_l2=0.05),
    # The authors' best run of 16 columns, its test AUC by their log.
    ModelSettings(
        model=QNNConfig(num_layers=2, num_rows=13, norm=Normalization.BATCH),
        embedding_l2=0.1,
        published="0.98621 (one)",
    ),
    ModelSettings(model=_wukong(256, head=400), embedding_l2=0.15, published="0.9868 (paper)"),
    ModelSettings(model=_dhen(256, head=400), embedding_l2=0.15),
    ModelSettings(model=_rankmixer(128), embedding_l2=0.15),
)

_OTHER_MODELS: tuple[ModelConfig, ...] = (
    DNNConfig(deep=_OTHER_MLP),
    DLRMConfig(top=_OTHER_MLP),
    DCNv2Config(cross=CrossConfig(num_layers=3), deep=_OTHER_MLP),
    DeepFMConfig(deep=_OTHER_MLP),
    XDeepFMConfig(cin=(32,), deep=_OTHER_MLP),
    AutoIntConfig(num_layers=2, attention=AttentionConfig(dim=32, num_heads=2, layer_norm=True), deep=_OTHER_MLP),
    MaskNetConfig(structure=MaskStructure.PARALLEL, num_blocks=3, deep=_OTHER_MLP),
    FinalMLPConfig(first=_mlp(128, dropout=0.2), second=_mlp(128, dropout=0.2), num_heads=8),
    FinalNetConfig(first=_OTHER_MLP, second=_mlp(128, dropout=0.2)),
    FMConfig(),
    WideDeepConfig(deep=_OTHER_MLP),
    FiBiNETConfig(bilinear=BilinearKind.ALL, deep=_OTHER_MLP),
    GDCNConfig(deep=_OTHER_MLP),
    AFNConfig(num_neurons=128, deep=_OTHER_MLP, beside=_OTHER_MLP),
    EDCNConfig(norm=Normalization.BATCH, dropout=0.2),
    FCNConfig(),
    QNNConfig(num_layers=2, num_rows=2, norm=Normalization.BATCH),
    _wukong(128, head=128),
    _dhen(128, head=128),
    _rankmixer(64),
)

OTHERS = (
    _LOGISTIC_REGRESSION,
    *(ModelSettings(model=model, embedding_l2=OTHER_L2) for model in _OTHER_MODELS),
)


def nearest_model(kind: str, known: Iterable[str]) -> list[str]:
    """The known kind that a wrong one most likely means, if any: `dcn_v2` for `dcnv2` and `DCN-v2`."""
    return nearest_names(kind, known, most=1)


def settings_named(kind: str, *, among: Sequence[ModelSettings]) -> ModelSettings:
    """The settings of the model of this kind.

    Raises:
        ConfigError: none of them is.
    """
    by_kind = {each.model.kind: each for each in among}
    if kind not in by_kind:
        raise ConfigError(
            expected="models out of " + ", ".join(by_kind),
            found=repr(kind),
            where="ziggurat compare, --models",
            ways_out=(
                *(f"did you mean {near!r}?" for near in nearest_model(kind, by_kind)),
                "separate them by commas: --models dnn,dcn_v2,wukong",
            ),
        )
    return by_kind[kind]
