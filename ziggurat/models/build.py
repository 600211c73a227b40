"""From a config to a model, with weights that depend on the seed alone.

A config is data, and builds its model: any frozen dataclass that fulfils `ModelConfig` will do, a built-in one
(`MODEL_CONFIGS`) or one of your own.

Tables, towers and dense network draw from separate streams of the seed: the starting weights of the dense network
depend neither on the kernel of the tables nor on how many rows they have, those of a tower not on the other towers.
Torch's global random state is left as it was.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, get_args, runtime_checkable

import torch
from torch.overrides import TorchFunctionMode

from ziggurat.arguments import check_arguments
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.embeddings.storage import MakeStorage, MemoryStorage
from ziggurat.errors import ConfigError, NoRoomError, SchemaError
from ziggurat.features.inputs import InputSpec, JaggedSpec
from ziggurat.features.schema import Pooling
from ziggurat.models.afn import AFNConfig
from ziggurat.models.autoint import AutoIntConfig
from ziggurat.models.contract.model import Model
from ziggurat.models.dcn_v2 import DCNv2Config
from ziggurat.models.deepfm import DeepFMConfig
from ziggurat.models.dhen import DHENConfig
from ziggurat.models.din import DINConfig
from ziggurat.models.dlrm import DLRMConfig
from ziggurat.models.dnn import DNNConfig
from ziggurat.models.edcn import EDCNConfig
from ziggurat.models.esmm import ESMMConfig
from ziggurat.models.fcn import FCNConfig
from ziggurat.models.fibinet import FiBiNETConfig
from ziggurat.models.finalmlp import FinalMLPConfig
from ziggurat.models.finalnet import FinalNetConfig
from ziggurat.models.fm import FMConfig
from ziggurat.models.gdcn import GDCNConfig
from ziggurat.models.graph.lightgcn import LightGCNConfig
from ziggurat.models.logistic_regression import LogisticRegressionConfig
from ziggurat.models.masknet import MaskNetConfig
from ziggurat.models.mmoe import MMoEConfig
from ziggurat.models.pepnet import PEPNetConfig
from ziggurat.models.ple import PLEConfig
from ziggurat.models.qnn import QNNConfig
from ziggurat.models.retrieval.two_tower import TwoTowerConfig
from ziggurat.models.sequence.next_item import NextItemConfig
from ziggurat.models.sequence.ranker import SequenceRankerConfig
from ziggurat.models.sequence.rankers.bst import BSTConfig
from ziggurat.models.sequence.rankers.dien import DIENConfig
from ziggurat.models.sequence.rankers.onetrans import OneTransConfig
from ziggurat.models.sequence.rankers.rankmixer import RankMixerConfig
from ziggurat.models.sequence.rankers.transact import TransActConfig
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.models.wide_deep import WideDeepConfig
from ziggurat.models.wukong import WukongConfig
from ziggurat.models.xdeepfm import XDeepFMConfig
from ziggurat.ops.dispatched import OpArgs, OpKwargs
from ziggurat.ops.machine.memory import host_memory, size_text
from ziggurat.ops.own_draws import OwnDraws
from ziggurat.plan import Towers


class ModelConfig(Protocol):
    """Settings of a model, as a frozen dataclass that builds it.

    A model that takes towers has `tower_module` and `embedding_dim` as well (`TowerModelConfig`). A model that reads
    lists un-pooled although their schema pools them (DIN's histories) names them in a method
    `unpooled(inputs) -> tuple[str, ...]`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def kind(self) -> str:
        """The model's name in files and on the command line."""
        ...

    @property
    def embedding(self) -> EmbeddingConfig:
        """Settings of the tables."""
        ...

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table, by name; see `InputSpec.table_columns`."""
        ...

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None) -> Model:
        """The model, on tables with these columns; torch's random state is seeded.

        Args:
            inputs: what a batch contains.
            embeddings: the tables.
            towers: groups of features behind modules; None for a flat model, and always for a config without
                `tower_module`.
        """
        ...


@runtime_checkable
class TowerModelConfig(ModelConfig, Protocol):
    """A config whose model takes towers."""

    @property
    def embedding_dim(self) -> int:
        """N, columns of the tables, from which the width of compressed fields follows."""
        ...

    @property
    def tower_module(self) -> TowerModuleConfig:
        """The settings of what towers compute."""
        ...


BuiltInConfig = (
    DLRMConfig
    | DCNv2Config
    | DNNConfig
    | WukongConfig
    | DHENConfig
    | LogisticRegressionConfig
    | DeepFMConfig
    | XDeepFMConfig
    | AutoIntConfig
    | MaskNetConfig
    | FinalMLPConfig
    | FinalNetConfig
    | FMConfig
    | WideDeepConfig
    | FiBiNETConfig
    | GDCNConfig
    | AFNConfig
    | EDCNConfig
    | FCNConfig
    | QNNConfig
    | MMoEConfig
    | PLEConfig
    | PEPNetConfig
    | ESMMConfig
    | DINConfig
    | DIENConfig
    | BSTConfig
    | TransActConfig
    | RankMixerConfig
    | OneTransConfig
    | TwoTowerConfig
    | LightGCNConfig
    | NextItemConfig
    | SequenceRankerConfig
)
# The union above is the one list of models: whatever needs all of them follows from it.
MODEL_CONFIGS: tuple[type[BuiltInConfig], ...] = get_args(BuiltInConfig)


def kind_of(cls: type[ModelConfig]) -> str:
    """The name of a config's class in files and on the command line."""
    return cls.__dataclass_fields__["kind"].default


def check_config_class(cls: type[Any]) -> None:
    """Refuse a class of the user's own that cannot be the config of a model in a run.

    Raises:
        ConfigError: it is no frozen dataclass, has no `kind` of its own, or lacks a part of `ModelConfig`.
    """
    if cls in MODEL_CONFIGS:
        return
    fields = getattr(cls, "__dataclass_fields__", {})
    kind = fields["kind"].default if "kind" in fields else None
    built_in = [kind_of(each) for each in MODEL_CONFIGS]
    wrong = ""
    if not isinstance(cls, type) or not fields or not cls.__dataclass_params__.frozen:
        wrong = "no frozen dataclass"
    elif not isinstance(kind, str) or not kind:
        wrong = "no field `kind` with a name as its default"
    elif kind in built_in:
        wrong = f"kind {kind!r}, which a built-in model has"
    elif "embedding" not in fields:
        wrong = "no field `embedding` with the settings of tables"
    else:
        wrong = ", ".join(f"no method {name!r}" for name in ("table_columns", "build") if not hasattr(cls, name))
    if wrong:
        raise ConfigError(
            expected="a frozen dataclass with kind, embedding, table_columns and build",
            found=wrong,
            where=f"{getattr(cls, '__module__', '')}:{getattr(cls, '__qualname__', cls)}",
            ways_out=(*_configs_beside(cls), "see docs/guides/own-model.md", 'kind: str = "my_model"'),
        )


def _configs_beside(cls: type[Any]) -> list[str]:
    """Return the ways out of a model that was named in place of its config: the configs that stand in its file."""
    name = getattr(cls, "__module__", "")
    beside = vars(sys.modules[name]).items() if isinstance(cls, type) and name in sys.modules else ()
    return [
        f"name the config: {name}:{each_name}"
        for each_name, each in beside
        if isinstance(each, type) and each is not cls and each.__module__ == name and _is_config_class(each)
    ]


def _is_config_class(cls: type[Any]) -> bool:
    return all(hasattr(cls, name) for name in ("__dataclass_fields__", "table_columns", "build"))


@check_arguments
def build_model(
    config: ModelConfig,
    inputs: InputSpec,
    *,
    seed: int,
    towers: Towers | None = None,
    draw_tables: bool = True,
    make_storage: MakeStorage = MemoryStorage,
) -> Model:
    """Build a model with fresh weights.

    Args:
        config: which model, and its settings.
        inputs: what a batch contains; must have at least one label and one feature.
        seed: the same seed gives the same weights, on every machine with the same torch.
        towers: groups of features, each behind a module as `config.tower_module` says; None for a flat model.
        draw_tables: False leaves the tables open and takes no memory for them: they are loaded next, or spread over
            ranks (`parallelize(…, seed=seed)` draws on each rank the part that it holds).
        make_storage: makes what holds the rows of the tables.

    Raises:
        SchemaError: no label, or no feature.
        ConfigError: settings that contradict each other or the inputs; towers below a model that has no place for them;
            tables or a dense network that the memory does not hold.
        PlanError: the towers do not fit the features.

    Example:
        >>> from ziggurat.testing.batches import random_batch, small_inputs
        >>> inputs = small_inputs()
        >>> model = zg.build_model(zg.DCNv2Config(embedding_dim=4), inputs, seed=0)
        >>> model(random_batch(inputs, 5)).shape
        torch.Size([5, 1])
    """
    _check_inputs(inputs)
    check_towers(config, towers)
    inputs = _unpool(config, inputs)
    embeddings = _build_tables(config, inputs, seed=seed if draw_tables else None, make_storage=make_storage)
    # Towers have generators of their own: the draws of the network start from the seed with and without them.
    with _DenseRoom(config.kind), OwnDraws(seed):
        layer = _build_towers(config, inputs, embeddings=embeddings, towers=towers, seed=seed)
        model = config.build(inputs, embeddings=embeddings, towers=layer)
    model.built_from = config
    return model


def _unpool(config: ModelConfig, inputs: InputSpec) -> InputSpec:
    """The inputs as the model reads them: with the lists that its config wants un-pooled."""
    named = getattr(config, "unpooled", None)
    names = set() if named is None else set(named(inputs))
    if not names:
        return inputs
    jagged: tuple[JaggedSpec, ...] = tuple(
        dataclasses.replace(spec, pooling=Pooling.NONE) if spec.name in names else spec for spec in inputs.jagged
    )
    return dataclasses.replace(inputs, jagged=jagged)


def _build_tables(
    config: ModelConfig, inputs: InputSpec, *, seed: int | None, make_storage: MakeStorage
) -> EmbeddingTables:
    columns = config.table_columns(inputs)
    open_dims = [columns[table.name] for table in inputs.tables if not table.embedding_dim]
    given = config.embedding.dim
    default = EmbeddingConfig().dim
    wanted = getattr(config, "embedding_dim", given)
    if given not in (default, wanted, *open_dims):
        raise ConfigError(
            expected="the number of columns of tables to be set once, as model.embedding_dim",
            found=f"embedding.dim = {given}, but the model wants {wanted}",
            where=f"settings of model {config.kind!r}",
            ways_out=("set model.embedding-dim", "leave model.embedding.dim alone"),
        )
    tables = tuple(dataclasses.replace(table, embedding_dim=columns[table.name]) for table in inputs.tables)
    # The width of most tables that the schema leaves open; the others say theirs.
    dim = max(set(open_dims), key=open_dims.count) if open_dims else wanted
    return EmbeddingTables(
        dataclasses.replace(inputs, tables=tables),
        dataclasses.replace(config.embedding, dim=dim),
        seed=seed,
        make_storage=make_storage,
    )


def check_towers(config: ModelConfig, towers: Towers | None) -> None:
    """Refuse towers that have nowhere to go.

    Raises:
        ConfigError: the model has no tower variant.
    """
    if towers is not None and not isinstance(config, TowerModelConfig):
        kinds = ", ".join(each().kind for each in MODEL_CONFIGS if isinstance(each(), TowerModelConfig))
        built_in = [kind_of(each) for each in MODEL_CONFIGS]
        raise ConfigError(
            expected=f"a model with an interaction above the towers: {kinds}",
            found=f"{len(towers)} towers with model {config.kind!r}, which needs its embeddings as they are",
            where="towers",
            ways_out=(
                *([] if config.kind in built_in else [_for_towers(config)]),
                "leave the towers out",
                "take another model",
            ),
        )


def _for_towers(config: ModelConfig) -> str:
    """Return the way out of a config of the user's own that has no place for towers."""
    missing = [
        text
        for name, text in (
            ("embedding_dim", "embedding_dim: int"),
            ("tower_module", "tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)"),
        )
        if not hasattr(config, name)
    ]
    return (
        f"give {type(config).__name__} {' and '.join(missing)}, and pass `towers` on to the model "
        "(docs/guides/own-model.md)"
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
            ways_out=(
                "add a [[label]] block to the schema; `ziggurat data inspect` guesses one",
                "where each row is something that was chosen, for table_two_tower or table_lightgcn: "
                'pl.read_parquet("log.parquet").with_columns(chosen=1.0).write_parquet("chosen.parquet"), and a '
                '[[label]] block with name = "chosen" and outcomes = "positive_only"',
            ),
        )
    if not (inputs.dense or inputs.lookups or inputs.vectors):
        raise SchemaError(
            expected="at least one feature",
            found="none",
            where="the inputs of the model",
            ways_out="add features to the schema; `ziggurat data inspect` guesses them",
        )


class _DenseRoom(TorchFunctionMode):
    """Adds up the weights that a model makes of its network, and refuses those that the memory does not hold.

    Args:
        kind: of the model, for the error.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self._taken = 0
        self._memory = host_memory()

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> object:
        """Look at the size of what is about to be made."""
        kwargs = kwargs or {}
        # Parameters are made of it (and filled later), so it is counted before any memory is touched.
        if func is torch.empty:
            shape = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            self._taken += 4 * math.prod(shape)
            if self._taken > self._memory.free_bytes:
                raise NoRoomError(
                    expected=f"a dense network that fits {self._memory.text()}",
                    found=f"more than {size_text(self._taken)} of weights; the last layer has "
                    f"{' × '.join(f'{size:,}' for size in shape)}",
                    where=f"settings of model {self._kind!r}, before memory is taken for it",
                    ways_out=(
                        "narrower layers: hidden-dims of the MLPs",
                        "fewer columns for each table: --model.embedding-dim",
                        "fewer features",
                    ),
                )
        return func(*args, **kwargs)
