"""From a config to a model: every ranking model by its `kind`, with weights that depend on the seed alone.

Tables, towers and dense network draw from separate streams of the seed: the starting weights of the dense network
depend neither on the kernel of the tables nor on how many rows they have, those of a tower not on the other towers.
Torch's global random state is left as it was.
"""

from __future__ import annotations

import dataclasses
from typing import get_args

import torch

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.autoint import AutoInt, AutoIntConfig, Wide
from ziggurat.models.dcn_v2 import DCNv2, DCNv2Config
from ziggurat.models.deepfm import DeepFM, DeepFMConfig
from ziggurat.models.dhen import DHEN, DHENConfig
from ziggurat.models.din import DIN, DINConfig
from ziggurat.models.dlrm import DLRM, DLRMConfig
from ziggurat.models.dnn import DNN, DNNConfig
from ziggurat.models.finalmlp import FinalMLP, FinalMLPConfig, context_columns
from ziggurat.models.finalnet import FinalNet, FinalNetConfig
from ziggurat.models.logistic_regression import LogisticRegression, LogisticRegressionConfig
from ziggurat.models.masknet import MaskNet, MaskNetConfig
from ziggurat.models.ranking_model import RankingModel
from ziggurat.models.towers import TowerLayer
from ziggurat.models.wukong import Wukong, WukongConfig
from ziggurat.models.xdeepfm import XDeepFM, XDeepFMConfig
from ziggurat.plan import Towers

TowerModelConfig = DLRMConfig | DCNv2Config | DNNConfig | WukongConfig | DHENConfig
FlatModelConfig = (
    LogisticRegressionConfig
    | DeepFMConfig
    | XDeepFMConfig
    | AutoIntConfig
    | MaskNetConfig
    | FinalMLPConfig
    | FinalNetConfig
    | DINConfig
)
ModelConfig = TowerModelConfig | FlatModelConfig


def build_model(
    config: ModelConfig, inputs: InputSpec, *, seed: int, towers: Towers | None = None, draw_tables: bool = True
) -> RankingModel:
    """Build a model with fresh weights.

    Args:
        config: which model, and its settings.
        inputs: what a batch contains; must have at least one label and one feature.
        seed: the same seed gives the same weights, on every machine with the same torch.
        towers: groups of features, each behind a module as `config.tower_module` says; None for a flat model.
        draw_tables: False leaves the tables open and takes no memory for them: they are loaded next, or spread over
            ranks (`parallelize(…, seed=seed)` draws on each rank the part that it holds).

    Raises:
        SchemaError: no label, or no feature.
        ConfigError: settings that contradict each other or the inputs; towers below a model that has no place for them.
        PlanError: the towers do not fit the features.
    """
    _check_inputs(inputs)
    check_towers(config, towers)
    embeddings = _build_tables(config, inputs, seed=seed if draw_tables else None)
    layer = _build_towers(config, inputs, embeddings=embeddings, towers=towers, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match config:
            case DLRMConfig():
                return DLRM(config, inputs=inputs, embeddings=embeddings, towers=layer)
            case DCNv2Config():
                return DCNv2(config, inputs=inputs, embeddings=embeddings, towers=layer)
            case DNNConfig():
                return DNN(config, inputs=inputs, embeddings=embeddings, towers=layer)
            case WukongConfig():
                return Wukong(config, inputs=inputs, embeddings=embeddings, towers=layer)
            case DHENConfig():
                return DHEN(config, inputs=inputs, embeddings=embeddings, towers=layer)
            case LogisticRegressionConfig():
                return LogisticRegression(config, inputs=inputs, embeddings=embeddings)
            case DeepFMConfig():
                return DeepFM(config, inputs=inputs, embeddings=embeddings)
            case XDeepFMConfig():
                return XDeepFM(config, inputs=inputs, embeddings=embeddings)
            case AutoIntConfig():
                return AutoInt(config, inputs=inputs, embeddings=embeddings)
            case MaskNetConfig():
                return MaskNet(config, inputs=inputs, embeddings=embeddings)
            case FinalMLPConfig():
                return FinalMLP(config, inputs=inputs, embeddings=embeddings)
            case FinalNetConfig():
                return FinalNet(config, inputs=inputs, embeddings=embeddings)
            case DINConfig():
                return DIN(config, inputs=inputs, embeddings=embeddings)


def _build_tables(config: ModelConfig, inputs: InputSpec, *, seed: int | None) -> EmbeddingTables:
    dim = len(inputs.labels) if isinstance(config, LogisticRegressionConfig) else table_dim(config)
    default = EmbeddingConfig().dim
    if config.embedding.dim not in (default, dim):
        raise ConfigError(
            expected="the number of columns of tables to be set once, as model.embedding_dim",
            found=f"embedding.dim = {config.embedding.dim}, but the model wants {dim}",
            where=f"settings of model {config.kind!r}",
            ways_out=("set model.embedding-dim", "leave model.embedding.dim alone"),
        )
    if isinstance(config, LogisticRegressionConfig):
        tables = [dataclasses.replace(table, embedding_dim=0) for table in inputs.tables]
    else:
        extra = _extra_columns(config, inputs)
        tables = [
            dataclasses.replace(table, embedding_dim=(table.embedding_dim or dim) + extra[table.name])
            if extra.get(table.name)
            else table
            for table in inputs.tables
        ]
    inputs = dataclasses.replace(inputs, tables=tuple(tables))
    return EmbeddingTables(inputs, dataclasses.replace(config.embedding, dim=dim), seed=seed)


def table_dim(config: ModelConfig) -> int:
    """Columns of a vector in the tables whose width the schema leaves open (a logistic regression: one a label)."""
    match config:
        case LogisticRegressionConfig():
            return 1
        case WukongConfig() | DHENConfig():
            return config.embedding_dim * config.embeddings_per_feature
        case _:
            return config.embedding_dim


def _extra_columns(config: ModelConfig, inputs: InputSpec) -> dict[str, int]:
    """Columns of each table beyond its vectors; see `extra_columns.py`."""
    match config:
        case DeepFMConfig() | XDeepFMConfig():
            return dict.fromkeys((table.name for table in inputs.tables), len(inputs.labels))
        case AutoIntConfig() if config.wide is Wide.LINEAR:
            return dict.fromkeys((table.name for table in inputs.tables), len(inputs.labels))
        case FinalMLPConfig():
            return context_columns(config, inputs)
        case _:
            return {}


def check_towers(config: ModelConfig, towers: Towers | None) -> None:
    """Refuse towers that have nowhere to go.

    Raises:
        ConfigError: the model has no tower variant.
    """
    if towers is not None and not isinstance(config, TowerModelConfig):
        kinds = ", ".join(each.kind for each in get_args(TowerModelConfig))
        raise ConfigError(
            expected=f"a model with an interaction above the towers: {kinds}",
            found=f"{len(towers)} towers with model {config.kind!r}, which needs its embeddings as they are",
            where="towers",
            ways_out=("leave the towers out", "take another model"),
        )


def _build_towers(
    config: ModelConfig, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: Towers | None, seed: int
) -> TowerLayer | None:
    if towers is None or not isinstance(config, TowerModelConfig):
        return None
    return TowerLayer(
        config.tower_module,
        inputs=inputs,
        field_dims=embeddings.field_dims,
        towers=towers,
        dim=config.embedding_dim,
        seed=seed,
    )


def _check_inputs(inputs: InputSpec) -> None:
    if not inputs.labels:
        raise SchemaError(
            expected="at least one label: a model has one logit a label",
            found="none",
            where="the inputs of the model",
            ways_out="add [[labels]] to the schema; `ziggurat data inspect` guesses one",
        )
    if not (inputs.dense or inputs.fields or inputs.vectors):
        raise SchemaError(
            expected="at least one feature",
            found="none",
            where="the inputs of the model",
            ways_out="add features to the schema; `ziggurat data inspect` guesses them",
        )
