"""Training tower models: the same step, exact updates below the towers, BF16, and the start-up report."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.training.test_step import MODEL, SGD, one_batch
from tests.training.tiny import tiny_dataset
from ziggurat.embeddings import EmbeddingConfig, TableOptimizerKind
from ziggurat.models import RankingModel, TowerModuleConfig, TowerModuleKind, build_model
from ziggurat.plan import Towers
from ziggurat.training.config import Compile, Precision
from ziggurat.training.report.startup import startup_report
from ziggurat.training.step.train_step import TrainStep

TOWERS = Towers(towers=(("tags", "user"), ("item",)), strategy="by hand")
KINDS = list(TowerModuleKind)


def tower_model(kind: TowerModuleKind, *, optimizer=TableOptimizerKind.SGD, towers: Towers | None = TOWERS):
    compression = 1.0 if kind is TowerModuleKind.IDENTITY else 2.0
    module = TowerModuleConfig(kind=kind, compression=compression)
    config = replace(MODEL, embedding=EmbeddingConfig(optimizer=optimizer), tower_module=module)
    return build_model(config, tiny_dataset(1).inputs, seed=0, towers=towers)


def weights(model: RankingModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_fused_tables_below_towers_equal_plain_torch(kind: TowerModuleKind) -> None:
    fused, dense = tower_model(kind), tower_model(kind, optimizer=TableOptimizerKind.ADAM_DENSE)
    batch = one_batch()
    step = TrainStep(fused, replace(SGD, clip_norm=0.5))
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.5)
    for _ in range(3):
        assert step(batch).finite
        loss = torch.nn.functional.binary_cross_entropy_with_logits(dense(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5)
        optimizer.step()
    left, right = weights(fused), weights(dense)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_moves_every_weight_of_every_tower(kind: TowerModuleKind) -> None:
    model = tower_model(kind)
    before = weights(model)
    TrainStep(model, SGD)(one_batch())
    same = [name for name, value in weights(model).items() if torch.equal(value, before[name])]
    assert not same


def test_a_step_with_nan_moves_nothing() -> None:
    model = tower_model(TowerModuleKind.FM)
    batch = one_batch()
    before = weights(model)
    result = TrainStep(model, SGD)(replace(batch, dense=batch.dense * float("nan")))
    assert not result.finite
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def test_bf16_covers_the_tower_modules_and_not_the_lookup() -> None:
    model = tower_model(TowerModuleKind.LINEAR)
    assert model.towers is not None
    seen: list[torch.dtype] = []
    model.embeddings.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    model.towers.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    before = weights(model)
    assert TrainStep(model, replace(SGD, precision=Precision.BF16))(one_batch()).finite
    assert seen == [torch.float32, torch.bfloat16]
    after = weights(model)
    assert all(value.dtype == torch.float32 for value in after.values())
    assert not torch.equal(after["embeddings.tables.user.weight"], before["embeddings.tables.user.weight"])


def test_startup_report_shows_the_towers() -> None:
    step = TrainStep(tower_model(TowerModuleKind.LINEAR), replace(SGD, compile=Compile.DEFAULT))
    sections = startup_report(step, data={}).sections
    assert sections["Towers"] == {
        "grouping": "2 towers, strategy by hand",
        "module": "linear, compression N / D = 2, c = 1, p = 0",
        "all towers": "12 numbers in, 6 out, compression 2.00",
        "tower 0": "tags, user: 8 numbers in, 4 out, compression 2.00, 16 weights",
        "tower 1": "item: 4 numbers in, 2 out, compression 2.00, 8 weights",
    }
    assert "tower modules run eagerly" in sections["Training"]["torch.compile"]
    assert "tower 1" in startup_report(step, data={}).text()
    flat = TrainStep(tower_model(TowerModuleKind.IDENTITY, towers=None), SGD)
    assert "Towers" not in startup_report(flat, data={}).sections
