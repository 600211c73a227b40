"""Recipes of public data with two labels: who earns more and who never married, what is clicked and what is bought.

Sizes, columns, batches and rates are those of torch-rechub's published tables: columns of 4 numbers and experts of 16
on Census-Income (so that MMoE's eight experts have as many weights as a shared bottom of 117), columns of 5 and experts
of 64, 32 and 16 on AliExpress. What differs: tables learn by sparse Adam, validation data chooses the epoch (there, on
AliExpress, the test file did), and amounts of money enter by their logarithm.

The shared bottom is MMoE with one expert, which needs no gate.
"""

from __future__ import annotations

from dataclasses import replace

from ziggurat.data.datasets import schema_for
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.models import ESMMConfig, MLPConfig, MMoEConfig, PLEConfig
from ziggurat.recipes.protocols import SPARSE_TABLES
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.training.config import EarlyStopConfig, TrainingConfig

_HEAD = MLPConfig(hidden_dims=(8,))


def census_shared_bottom() -> RunConfig:
    """A shared bottom on Census-Income: earns over 50,000, never married. Needs --dataset.source FOLDER."""
    expert = MLPConfig(hidden_dims=(117,))
    return _census("shared_bottom", MMoEConfig(num_experts=1, expert=expert, head=_HEAD))


def census_mmoe() -> RunConfig:
    """MMoE on Census-Income: earns over 50,000, never married. Needs --dataset.source FOLDER."""
    return _census("mmoe", MMoEConfig(num_experts=8, expert=MLPConfig(hidden_dims=(16,)), head=_HEAD))


def census_ple() -> RunConfig:
    """PLE on Census-Income: earns over 50,000, never married. Needs --dataset.source FOLDER."""
    expert = MLPConfig(hidden_dims=(16,))
    model = PLEConfig(num_levels=1, num_own_experts=2, num_shared_experts=1, expert=expert, head=_HEAD)
    return _census("ple", model)


def aliexpress_shared_bottom() -> RunConfig:
    """A shared bottom on AliExpress NL: clicked, bought. Needs --dataset.source FOLDER."""
    expert = MLPConfig(hidden_dims=(192, 96, 48))
    return _aliexpress("shared_bottom", MMoEConfig(num_experts=1, expert=expert, head=_HEAD))


def aliexpress_mmoe() -> RunConfig:
    """MMoE on AliExpress NL: clicked, bought. Needs --dataset.source FOLDER."""
    return _aliexpress("mmoe", MMoEConfig(num_experts=3, expert=MLPConfig(hidden_dims=(64, 32, 16)), head=_HEAD))


def aliexpress_ple() -> RunConfig:
    """PLE on AliExpress NL: clicked, bought. Needs --dataset.source FOLDER."""
    expert = MLPConfig(hidden_dims=(64, 32, 16))
    model = PLEConfig(num_levels=1, num_own_experts=1, num_shared_experts=1, expert=expert, head=_HEAD)
    return _aliexpress("ple", model)


def aliexpress_esmm() -> RunConfig:
    """ESMM on AliExpress NL: clicked, then bought. Needs --dataset.source FOLDER."""
    return _aliexpress("esmm", ESMMConfig(deep=MLPConfig(hidden_dims=(64, 32, 16))))


SEVERAL_LABELS_RECIPES = (
    census_shared_bottom,
    census_mmoe,
    census_ple,
    aliexpress_shared_bottom,
    aliexpress_mmoe,
    aliexpress_ple,
    aliexpress_esmm,
)


def _census(name: str, model: MMoEConfig | PLEConfig) -> RunConfig:
    training = _training(epochs=30, batch_size=1024)
    return _run(f"census_{name}", replace(model, embedding_dim=4), data="census-income", training=training)


def _aliexpress(name: str, model: MMoEConfig | PLEConfig | ESMMConfig) -> RunConfig:
    training = _training(epochs=5, batch_size=10_240)
    return _run(f"aliexpress_{name}", replace(model, embedding_dim=5), data="aliexpress-nl", training=training)


def _training(*, epochs: int, batch_size: int) -> TrainingConfig:
    return TrainingConfig(
        epochs=epochs,
        learning_rate=1e-3,
        table_learning_rate=1e-3,
        early_stop=EarlyStopConfig(patience=3),
        loader=LoaderConfig(batch_size=batch_size),
    )


def _run(recipe: str, model: MMoEConfig | PLEConfig | ESMMConfig, *, data: str, training: TrainingConfig) -> RunConfig:
    return RunConfig(
        recipe=recipe,
        dataset=DatasetConfig(name=data),
        data=DataConfig(split=SplitConfig(by=SplitBy.FILES)),
        table_schema=schema_for(data),
        model=replace(model, embedding=SPARSE_TABLES),
        training=training,
    )
