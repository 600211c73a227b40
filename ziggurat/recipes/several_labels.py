"""Recipes of public data with two labels: who earns more and who never married, what is clicked and what is bought.

Sizes, batches and rates are those of the code behind published tables: torch-rechub's example on Census-Income (columns
of 4 numbers, experts of 16, a shared bottom of 117), MTReclib's on AliExpress (columns of 128, experts of 512 and 256,
dropout 0.2). What differs there and here:

    Census-Income   Adam with a weight decay of 1e-4, patience of 30 epochs, numbers between 0 and 1; here none, 3,
                    standardised, amounts of money by their logarithm
    AliExpress      Adam with a weight decay of 1e-6, the test file chooses the epoch, numbers through a linear map into
                    128, PLE's second level has experts of 256; here none, validation rows, numbers as they are, 512
    both            tables learn by sparse Adam here

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
_SHOP_EXPERT = MLPConfig(hidden_dims=(512, 256), dropout=0.2)
_SHOP_HEAD = MLPConfig(hidden_dims=(128, 64), dropout=0.2)


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
    model = PLEConfig(num_levels=2, num_own_experts=2, num_shared_experts=1, expert=expert, head=_HEAD)
    return _census("ple", model)


def aliexpress_shared_bottom() -> RunConfig:
    """A shared bottom on AliExpress NL: clicked, bought. Needs --dataset.source FOLDER."""
    return _aliexpress("shared_bottom", MMoEConfig(num_experts=1, expert=_SHOP_EXPERT, head=_SHOP_HEAD))


def aliexpress_mmoe() -> RunConfig:
    """MMoE on AliExpress NL: clicked, bought. Needs --dataset.source FOLDER."""
    return _aliexpress("mmoe", MMoEConfig(num_experts=8, expert=_SHOP_EXPERT, head=_SHOP_HEAD))


def aliexpress_ple() -> RunConfig:
    """PLE on AliExpress NL: clicked, bought. Needs --dataset.source FOLDER."""
    expert = MLPConfig(hidden_dims=(512,), dropout=0.2)
    model = PLEConfig(num_levels=2, num_own_experts=4, num_shared_experts=4, expert=expert, head=_SHOP_HEAD)
    return _aliexpress("ple", model)


def aliexpress_esmm() -> RunConfig:
    """ESMM on AliExpress NL: clicked, then bought. Needs --dataset.source FOLDER."""
    return _aliexpress("esmm", ESMMConfig(deep=_SHOP_EXPERT))


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
    training = _training(epochs=50, batch_size=2048)
    return _run(f"aliexpress_{name}", replace(model, embedding_dim=128), data="aliexpress-nl", training=training)


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
