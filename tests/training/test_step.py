"""One step: clipping, whole-table L2 and both table modes against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, TableOptimizerKind
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models import DLRMConfig, MLPConfig, RankingModel, build_model
from ziggurat.models.contract.losses import loss_of
from ziggurat.training.config import DenseOptimizer, Precision, TrainingConfig
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.step.train_step import TrainStep

DENSE_TABLES = EmbeddingConfig(optimizer=TableOptimizerKind.ADAM_DENSE)
MODEL = DLRMConfig(embedding_dim=4, bottom=MLPConfig(hidden_dims=(8,)), top=MLPConfig(hidden_dims=(8,)))
SGD = TrainingConfig(
    optimizer=DenseOptimizer.SGD,
    learning_rate=0.5,
    table_learning_rate=0.5,
    precision=Precision.FP32,
    loader=LoaderConfig(batch_size=64),
)


def one_batch(num_rows: int = 64) -> Batch:
    return next(iter(ordered_batches(tiny_dataset(num_rows), batch_size=num_rows).batches(epoch=0)))


def model_with(kind: TableOptimizerKind) -> RankingModel:
    config = replace(MODEL, embedding=EmbeddingConfig(optimizer=kind))
    return build_model(config, tiny_dataset(1).inputs, seed=0)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_fused_sgd_equals_dense_sgd_also_when_clipped(clip_norm: float) -> None:
    config = replace(SGD, clip_norm=clip_norm)
    fused, dense = model_with(TableOptimizerKind.SGD), model_with(TableOptimizerKind.ADAM_DENSE)
    batch = one_batch()
    for model in (fused, dense):
        step = TrainStep(model, config)
        for _ in range(3):
            assert step(batch).finite
    left, right = fused.state_dict(), dense.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-5, atol=1e-6, msg=name)


def test_clip_and_whole_table_l2_equal_torch() -> None:
    l2, clip_norm = 0.3, 0.4
    model, plain = model_with(TableOptimizerKind.ADAM_DENSE), model_with(TableOptimizerKind.ADAM_DENSE)
    batch = one_batch()
    TrainStep(model, replace(SGD, clip_norm=clip_norm, embedding_l2=l2))(batch)
    loss = loss_of(plain(batch), batch.labels, batch.weights, inputs=plain.inputs)
    loss = loss + l2 / 2 * sum(table.square().sum() for table in plain.embeddings.parameters())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
    assert norm > clip_norm
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("optimizer", [DenseOptimizer.SGD, DenseOptimizer.ADAMW])
def test_weight_decay_is_of_the_dense_network_alone(optimizer: DenseOptimizer) -> None:
    """Of tables with dense gradients, too, rows that no sample has stay as they are; the network equals torch's."""
    decay, batch = 0.1, one_batch()
    model, plain = model_with(TableOptimizerKind.ADAM_DENSE), model_with(TableOptimizerKind.ADAM_DENSE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    TrainStep(model, replace(SGD, optimizer=optimizer, learning_rate=0.01, weight_decay=decay))(batch)
    loss_of(plain(batch), batch.labels, batch.weights, inputs=plain.inputs).backward()
    tables = list(plain.embeddings.parameters())
    dense = [each for each in plain.parameters() if all(each is not table for table in tables)]
    torch_optimizer = torch.optim.SGD if optimizer is DenseOptimizer.SGD else torch.optim.AdamW
    torch_optimizer(dense, lr=0.01, weight_decay=decay).step()
    torch_optimizer(tables, lr=0.01, weight_decay=0.0).step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-7, msg=name)
    users = "embeddings.tables.user.weight"
    unknown = 1  # a row that no sample has
    assert torch.equal(model.state_dict()[users][unknown], before[users][unknown])
    assert before[users][unknown].any()


def test_betas_are_those_of_adam() -> None:
    model, plain = model_with(TableOptimizerKind.ADAM_DENSE), model_with(TableOptimizerKind.ADAM_DENSE)
    config = replace(SGD, optimizer=DenseOptimizer.ADAM, learning_rate=0.01, beta1=0.5, beta2=0.7)
    step, theirs = TrainStep(model, config), torch.optim.Adam(plain.parameters(), lr=0.01, betas=(0.5, 0.7))
    for size in (64, 40, 16):
        batch = one_batch(size)
        step(batch)
        theirs.zero_grad()
        loss_of(plain(batch), batch.labels, batch.weights, inputs=plain.inputs).backward()
        theirs.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_betas_of_an_optimizer_that_has_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="adam or adamw"):
        replace(SGD, beta2=0.98)


def test_whole_table_l2_needs_dense_gradients() -> None:
    with pytest.raises(ConfigError, match="adam_dense"):
        TrainStep(model_with(TableOptimizerKind.ROWWISE_ADAGRAD), replace(SGD, embedding_l2=0.1))


def test_bf16_keeps_fp32_weights_and_stays_close() -> None:
    batch = one_batch()
    losses = {}
    for precision in (Precision.FP32, Precision.BF16):
        model = model_with(TableOptimizerKind.ROWWISE_ADAGRAD)
        step = TrainStep(model, replace(SGD, precision=precision, learning_rate=0.05))
        losses[precision] = [step(batch).loss for _ in range(5)]
        assert all(value.dtype is torch.float32 for value in model.state_dict().values())
    assert losses[Precision.BF16] != losses[Precision.FP32]
    assert losses[Precision.BF16] == pytest.approx(losses[Precision.FP32], abs=0.02)


def test_the_schedule_factor_scales_both_rates() -> None:
    still = model_with(TableOptimizerKind.ROWWISE_ADAGRAD)
    before = {name: value.clone() for name, value in still.state_dict().items()}
    TrainStep(still, SGD)(one_batch(), factor=0.0)
    for name, value in still.state_dict().items():
        assert torch.equal(before[name], value), name


def test_empty_batch_changes_nothing() -> None:
    model = model_with(TableOptimizerKind.ROWWISE_ADAGRAD)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    empty = one_batch(1)
    empty = replace(
        empty,
        dense=empty.dense[:0],
        single=empty.single[:, :0],
        jagged=replace(empty.jagged, values=empty.jagged.values[:0], offsets=empty.jagged.offsets[:1]),
        labels=empty.labels[:0],
        groups=None,
        row_ids=empty.row_ids[:0],
    )
    result = TrainStep(model, SGD)(empty)
    assert result.finite
    assert result.loss == 0.0
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value), name
