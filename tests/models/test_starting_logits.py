"""Every built-in model starts near the mean, or the base rate, however many columns of numbers there are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.embeddings.embedding_inputs import MIXED, make_batch
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec, LabelSpec
from ziggurat.features.schema import Task
from ziggurat.models import (
    MODEL_CONFIGS,
    DeepFMConfig,
    DLRMConfig,
    ESMMConfig,
    MLPConfig,
    ModelConfig,
    NumericInput,
    QNNConfig,
    build_model,
)
from ziggurat.models.build import kind_of
from ziggurat.models.contract.reads import Reads, ranks_rows, reads_of
from ziggurat.models.dlrm import TopStart
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.config import TrainingConfig
from ziggurat.training.step.train_step import TrainStep

RANKERS = {kind_of(cls): cls() for cls in MODEL_CONFIGS if ranks_rows(cls())}
NO_MLP = MLPConfig(hidden_dims=())
CONFIGS: dict[str, ModelConfig] = {
    **RANKERS,
    "factorisation machine": DeepFMConfig(embedding_dim=8, deep=NO_MLP),
    "dlrm of pairs": DLRMConfig(numeric=NumericInput.FIELDS, top_start=TopStart.SUM_OF_PAIRS),
}
# Samples with lists, which some models cannot do without.
LISTS = dataclasses.replace(
    MIXED, tables=tuple(dataclasses.replace(table, embedding_dim=0) for table in MIXED.tables), labels=()
)
ROWS = 2816
TRAINED = 2560
BATCH = 64


def of_lists(config: ModelConfig) -> bool:
    return reads_of(config) is Reads.A_HISTORY


def columns_of(num_columns: int, size: int) -> torch.Tensor:
    """Correlated numbers with mean 0 and deviation 1, as sensors give."""
    draw = torch.Generator().manual_seed(num_columns)
    common = torch.randn(size, 3, generator=draw) @ torch.randn(3, num_columns, generator=draw)
    numbers = torch.randn(size, num_columns, generator=draw) + 0.6 * common
    return (numbers - numbers.mean(dim=0)) / numbers.std(dim=0)


@pytest.mark.parametrize("num_columns", [5, 30, 100])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_model_starts_near_the_mean(name: str, num_columns: int) -> None:
    inputs = dataclasses.replace(
        LISTS, dense=tuple(f"n{index}" for index in range(num_columns)), labels=(LabelSpec(name="like"),)
    )
    batch = dataclasses.replace(make_batch(inputs, size=192, seed=0), dense=columns_of(num_columns, 192))
    for seed in (0, 1):
        model = build_model(CONFIGS[name], inputs, seed=seed).eval()
        with torch.no_grad():
            logits = model(batch)
        assert float(logits.std()) < 1.0
        # A constant is what the bias of the output learns first.
        assert abs(float(logits.mean())) < 1.5


def sensor_rows(num_columns: int) -> tuple[InputSpec, Batch]:
    """Rows of numbers and four ids, whose label is a sum of them, one product, and noise."""
    inputs = small_inputs(num_dense=num_columns, num_single=4, num_jagged=0)
    inputs = dataclasses.replace(inputs, labels=(LabelSpec(name="heat", task=Task.REGRESSION, offset=20.0, scale=4.0),))
    batch = random_batch(inputs, ROWS)
    numbers = columns_of(num_columns, ROWS)
    draw = torch.Generator().manual_seed(0)
    heat = numbers @ torch.randn(num_columns, generator=draw)
    heat = heat / heat.std() + 0.5 * numbers[:, 0] * numbers[:, 1] + 0.5 * torch.randn(ROWS, generator=draw)
    heat = (heat - heat.mean()) / heat.std()
    return inputs, dataclasses.replace(batch, dense=numbers, labels=20.0 + 4.0 * heat.unsqueeze(1))


@pytest.mark.parametrize(
    "num_columns", [30, pytest.param(5, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [name for name, config in CONFIGS.items() if not of_lists(config) and not isinstance(config, ESMMConfig)],
)
def test_one_pass_ends_below_the_mean(name: str, num_columns: int) -> None:
    inputs, rows = sensor_rows(num_columns)
    config = CONFIGS[name]
    if isinstance(config, QNNConfig) and num_columns == 100:
        # As its page says: 1,664 numbers a row give it 55 million weights, which 2,560 rows do not determine.
        config = dataclasses.replace(config, numeric=NumericInput.BOTTOM_MLP)
    model = build_model(config, inputs, seed=0)
    step = TrainStep(model, TrainingConfig())
    for first in range(0, TRAINED, BATCH):
        step(rows.rows(first, first + BATCH))
    rest = rows.rows(TRAINED, ROWS)
    with torch.no_grad():
        # In units of the label's variance: always saying the mean has 1.
        loss = float(((model.eval()(rest) - rest.labels) / 4.0).square().mean())
    assert loss < 1.0
