"""Ziggurat: topology-aware recommendation models in PyTorch. This file is the table of contents of the public API.

Names load on first use, so that `import ziggurat` and `ziggurat --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ziggurat.data.encoded.loader import Loader as Loader
    from ziggurat.data.encoded.loader import LoaderConfig as LoaderConfig
    from ziggurat.data.inspect.inspect_file import inspect_file as inspect_file
    from ziggurat.data.preprocess.data_config import DataConfig as DataConfig
    from ziggurat.data.preprocess.prepare import prepare as prepare
    from ziggurat.data.preprocess.splits import SplitBy as SplitBy
    from ziggurat.data.preprocess.splits import SplitConfig as SplitConfig
    from ziggurat.data.source import DataSource as DataSource
    from ziggurat.embeddings import EmbeddingConfig as EmbeddingConfig
    from ziggurat.embeddings import EmbeddingTables as EmbeddingTables
    from ziggurat.errors import ZigguratError as ZigguratError
    from ziggurat.features.batch import Batch as Batch
    from ziggurat.features.events import Events as Events
    from ziggurat.features.inputs import InputSpec as InputSpec
    from ziggurat.features.items import Items as Items
    from ziggurat.features.schema import Categorical as Categorical
    from ziggurat.features.schema import Dense as Dense
    from ziggurat.features.schema import Extra as Extra
    from ziggurat.features.schema import Label as Label
    from ziggurat.features.schema import Moments as Moments
    from ziggurat.features.schema import MultiHot as MultiHot
    from ziggurat.features.schema import Schema as Schema
    from ziggurat.features.schema import Sequence as Sequence
    from ziggurat.features.schema import Table as Table
    from ziggurat.features.schema import Vector as Vector
    from ziggurat.features.schema_io import read_schema as read_schema
    from ziggurat.features.schema_io import write_schema as write_schema
    from ziggurat.models import BST as BST
    from ziggurat.models import DHEN as DHEN
    from ziggurat.models import DIEN as DIEN
    from ziggurat.models import DIN as DIN
    from ziggurat.models import DLRM as DLRM
    from ziggurat.models import DNN as DNN
    from ziggurat.models import MODEL_CONFIGS as MODEL_CONFIGS
    from ziggurat.models import AutoInt as AutoInt
    from ziggurat.models import AutoIntConfig as AutoIntConfig
    from ziggurat.models import BSTConfig as BSTConfig
    from ziggurat.models import DCNv2 as DCNv2
    from ziggurat.models import DCNv2Config as DCNv2Config
    from ziggurat.models import DeepFM as DeepFM
    from ziggurat.models import DeepFMConfig as DeepFMConfig
    from ziggurat.models import DHENConfig as DHENConfig
    from ziggurat.models import DIENConfig as DIENConfig
    from ziggurat.models import DINConfig as DINConfig
    from ziggurat.models import DLRMConfig as DLRMConfig
    from ziggurat.models import DNNConfig as DNNConfig
    from ziggurat.models import Embedded as Embedded
    from ziggurat.models import FinalMLP as FinalMLP
    from ziggurat.models import FinalMLPConfig as FinalMLPConfig
    from ziggurat.models import FinalNet as FinalNet
    from ziggurat.models import FinalNetConfig as FinalNetConfig
    from ziggurat.models import HistoryInput as HistoryInput
    from ziggurat.models import LogisticRegression as LogisticRegression
    from ziggurat.models import LogisticRegressionConfig as LogisticRegressionConfig
    from ziggurat.models import LossSums as LossSums
    from ziggurat.models import MaskNet as MaskNet
    from ziggurat.models import MaskNetConfig as MaskNetConfig
    from ziggurat.models import MLPConfig as MLPConfig
    from ziggurat.models import Model as Model
    from ziggurat.models import ModelConfig as ModelConfig
    from ziggurat.models import NextItem as NextItem
    from ziggurat.models import NextItemConfig as NextItemConfig
    from ziggurat.models import OneTrans as OneTrans
    from ziggurat.models import OneTransConfig as OneTransConfig
    from ziggurat.models import Outputs as Outputs
    from ziggurat.models import RankMixer as RankMixer
    from ziggurat.models import RankMixerConfig as RankMixerConfig
    from ziggurat.models import SequenceRanker as SequenceRanker
    from ziggurat.models import SequenceRankerConfig as SequenceRankerConfig
    from ziggurat.models import TowerLayer as TowerLayer
    from ziggurat.models import TowerModuleConfig as TowerModuleConfig
    from ziggurat.models import TowerModuleKind as TowerModuleKind
    from ziggurat.models import TransAct as TransAct
    from ziggurat.models import TransActConfig as TransActConfig
    from ziggurat.models import TwoTower as TwoTower
    from ziggurat.models import TwoTowerConfig as TwoTowerConfig
    from ziggurat.models import Unpooled as Unpooled
    from ziggurat.models import Wukong as Wukong
    from ziggurat.models import WukongConfig as WukongConfig
    from ziggurat.models import XDeepFM as XDeepFM
    from ziggurat.models import XDeepFMConfig as XDeepFMConfig
    from ziggurat.models import build_model as build_model
    from ziggurat.models import loss_sums as loss_sums
    from ziggurat.models import wrap as wrap
    from ziggurat.parallel.parallelize import ParallelConfig as ParallelConfig
    from ziggurat.parallel.parallelize import parallelize as parallelize
    from ziggurat.parallel.topology import Topology as Topology
    from ziggurat.plan import Plan as Plan
    from ziggurat.plan import Towers as Towers
    from ziggurat.planning.placement import place_tables as place_tables
    from ziggurat.recipes.catalogue import recipe_named as recipe_named
    from ziggurat.recipes.catalogue import table_run as table_run
    from ziggurat.recipes.run_config import DatasetConfig as DatasetConfig
    from ziggurat.recipes.run_config import RunConfig as RunConfig
    from ziggurat.runs.execute import train_run as train_run
    from ziggurat.runs.export import ExportConfig as ExportConfig
    from ziggurat.runs.export import export_run as export_run
    from ziggurat.runs.load import Run as Run
    from ziggurat.runs.load import load_run as load_run
    from ziggurat.runs.quality.importance import ImportanceConfig as ImportanceConfig
    from ziggurat.serving.recommender import Recommender as Recommender
    from ziggurat.studies.fit import fit as fit
    from ziggurat.training.config import TrainingConfig as TrainingConfig
    from ziggurat.training.report.progress import show_progress as show_progress
    from ziggurat.training.trainer import Trainer as Trainer

_HOMES = {
    "ziggurat.data.source": ("DataSource",),
    "ziggurat.features.inputs": ("InputSpec",),
    "ziggurat.features.batch": ("Batch",),
    "ziggurat.data.inspect.inspect_file": ("inspect_file",),
    "ziggurat.data.encoded.loader": ("Loader", "LoaderConfig"),
    "ziggurat.data.preprocess.prepare": ("DataConfig", "prepare"),
    "ziggurat.data.preprocess.splits": ("SplitBy", "SplitConfig"),
    "ziggurat.embeddings": (
        "EmbeddingConfig",
        "EmbeddingTables",
    ),
    "ziggurat.errors": ("ZigguratError",),
    "ziggurat.features.events": ("Events",),
    "ziggurat.features.items": ("Items",),
    "ziggurat.features.schema": (
        "Categorical",
        "Dense",
        "Extra",
        "Label",
        "Moments",
        "MultiHot",
        "Schema",
        "Sequence",
        "Table",
        "Vector",
    ),
    "ziggurat.features.schema_io": ("read_schema", "write_schema"),
    "ziggurat.models": (
        "AutoIntConfig",
        "DeepFMConfig",
        "DINConfig",
        "FinalMLPConfig",
        "FinalNetConfig",
        "MaskNetConfig",
        "XDeepFMConfig",
        "BST",
        "BSTConfig",
        "DIEN",
        "DIENConfig",
        "HistoryInput",
        "OneTrans",
        "OneTransConfig",
        "RankMixer",
        "RankMixerConfig",
        "TransAct",
        "TransActConfig",
        "NextItem",
        "NextItemConfig",
        "SequenceRanker",
        "SequenceRankerConfig",
        "TwoTower",
        "TwoTowerConfig",
        "DCNv2Config",
        "DHENConfig",
        "DLRMConfig",
        "DNNConfig",
        "LogisticRegressionConfig",
        "TowerModuleConfig",
        "TowerModuleKind",
        "WukongConfig",
        "build_model",
        "AutoInt",
        "DCNv2",
        "DHEN",
        "DIN",
        "DLRM",
        "DNN",
        "DeepFM",
        "FinalMLP",
        "FinalNet",
        "LogisticRegression",
        "MaskNet",
        "Wukong",
        "XDeepFM",
        "Embedded",
        "LossSums",
        "MLPConfig",
        "MODEL_CONFIGS",
        "Model",
        "ModelConfig",
        "Outputs",
        "TowerLayer",
        "Unpooled",
        "loss_sums",
        "wrap",
    ),
    "ziggurat.parallel.parallelize": ("ParallelConfig", "parallelize"),
    "ziggurat.parallel.topology": ("Topology",),
    "ziggurat.plan": ("Plan", "Towers"),
    "ziggurat.planning.placement": ("place_tables",),
    "ziggurat.recipes.catalogue": (
        "recipe_named",
        "table_run",
    ),
    "ziggurat.runs.execute": ("train_run",),
    "ziggurat.runs.export": ("ExportConfig", "export_run"),
    "ziggurat.runs.quality.importance": ("ImportanceConfig",),
    "ziggurat.runs.load": ("Run", "load_run"),
    "ziggurat.recipes.run_config": ("DatasetConfig", "RunConfig"),
    "ziggurat.serving.recommender": ("Recommender",),
    "ziggurat.studies.fit": ("fit",),
    "ziggurat.training.config": ("TrainingConfig",),
    "ziggurat.training.report.progress": ("show_progress",),
    "ziggurat.training.trainer": ("Trainer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ziggurat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*_HOME_OF, "__version__"]
