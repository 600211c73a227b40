"""Pooled fields in BF16 (`pooled = computed`): every model learns from them as it does under BF16 anyway."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.embeddings.test_repeated import GROUPS, inputs_of, repeating
from tests.models.test_every_model import CONFIGS, RICH
from ziggurat.embeddings import (
    EmbeddingConfig,
    EmbeddingTables,
    KernelChoice,
    PooledDtype,
    TableOptimizer,
    TableOptimizerKind,
)
from ziggurat.features.batch import Batch
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.models import Model, build_model
from ziggurat.models.contract.losses import loss_of
from ziggurat.testing.batches import random_batch
from ziggurat.testing.pretend_cuda import pretend_cuda

SOME = ("dlrm-dot-bottom_mlp", "dcn_v2-parallel-full", "wukong-optimized")
some_configs = pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
SGD = EmbeddingConfig(dim=4, optimizer=TableOptimizerKind.SGD, kernel=KernelChoice.TORCH)
BATCHES = [random_batch(RICH, 256, seed=seed) for seed in (1, 2, 3)]
BATCH = BATCHES[0]


def built(name: str, pooled: PooledDtype, settings: EmbeddingConfig = SGD) -> Model:
    embedding = dataclasses.replace(settings, pooled=pooled)
    return build_model(dataclasses.replace(CONFIGS[name], embedding=embedding), RICH, seed=0).eval()


def changes(model: Model, batch: Batch = BATCH, *, is_bf16: bool) -> Tensor:
    """Return what a step of plain SGD takes from all tables, flat."""
    before = [model.embeddings.table(name).clone() for name in model.embeddings.tables.places]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
        logits = model(batch)
    loss_of(logits, batch.labels, inputs=RICH).backward()
    TableOptimizer(model.embeddings).step(1.0)
    after = [model.embeddings.table(name) for name in model.embeddings.tables.places]
    return torch.cat([(a - b).flatten() for a, b in zip(before, after, strict=True)])


@some_configs
def test_rounding_pooled_fields_costs_no_more_than_bf16_itself(name: str) -> None:
    # The best of three batches: one ReLU that rounding takes over zero changes the error of its batch threefold.
    smallest = [
        min(_error(name, pooled, batch) for batch in BATCHES) for pooled in (PooledDtype.FP32, PooledDtype.COMPUTED)
    ]
    assert smallest[1] <= 2 * smallest[0] + 2.0**-6, smallest


def _error(name: str, pooled: PooledDtype, batch: Batch) -> float:
    """Return how far a step under BF16 is from one in FP32, relative to it."""
    exact = changes(built(name, PooledDtype.FP32), batch, is_bf16=False)
    return float((changes(built(name, pooled), batch, is_bf16=True) - exact).norm() / exact.norm())


@pytest.mark.parametrize("optimizer", [TableOptimizerKind.SGD, TableOptimizerKind.ADAM_DENSE])
def test_fields_are_bf16_under_autocast_alone_and_round_the_same_sums(optimizer: TableOptimizerKind) -> None:
    settings = dataclasses.replace(SGD, optimizer=optimizer)
    model, exact = (built("dnn", pooled, settings) for pooled in (PooledDtype.COMPUTED, PooledDtype.FP32))
    plain = exact.fields(BATCH)
    assert torch.equal(model.fields(BATCH), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model.fields(BATCH)
        assert exact.fields(BATCH).dtype is torch.float32
    assert rounded.dtype is torch.bfloat16
    assert torch.equal(rounded, plain.bfloat16())


def test_gradients_of_slices_are_summed_in_fp32() -> None:
    inputs = inputs_of()
    plain, found = repeating(inputs, num_sessions=5, size=230), []
    for batch in (plain, deduplicate(plain, GROUPS)):
        tables = EmbeddingTables(inputs, dataclasses.replace(SGD, pooled=PooledDtype.COMPUTED))
        out = tables(batch, dtype=torch.bfloat16)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).bfloat16())
        TableOptimizer(tables).step(1.0)
        found.append([out.detach(), *(tables.table(table.name) for table in inputs.tables)])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_auto_is_the_default_and_rounds_on_a_gpu_alone() -> None:
    assert EmbeddingConfig().pooled is PooledDtype.AUTO
    model = built("dnn", PooledDtype.AUTO)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.fields(BATCH).dtype is torch.float32
    with pretend_cuda() as device:
        assert built("dnn", PooledDtype.AUTO).to(device).rounds_pooled
        assert not built("dnn", PooledDtype.FP32).to(device).rounds_pooled


def test_float16_autocast_is_not_bf16() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        assert built("dnn", PooledDtype.COMPUTED).fields(BATCH).dtype is torch.float32
