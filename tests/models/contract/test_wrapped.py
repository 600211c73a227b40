"""A plain module under `wrap` computes what it did, trains as by hand, is saved, and is refused where it cannot be."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models.contract.plain_module import Lookups, Plain, list_inputs
from tests.training.tiny import tiny_dataset
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, TableOptimizer, TableOptimizerKind
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models import Embedded, TowerLayer, flops_per_sample, wrap
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.plan import Towers
from ziggurat.testing.batches import random_batch
from ziggurat.training.config import DenseOptimizer, Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.trainer import Trainer

CONFIG = TrainingConfig(
    optimizer=DenseOptimizer.SGD, learning_rate=0.1, table_learning_rate=0.1, precision=Precision.FP32
)


def test_training_equals_a_loop_written_by_hand() -> None:
    by_hand, module = Plain(list_inputs()), Plain(list_inputs())
    tables, dense = TableOptimizer(by_hand.lookups.tables), torch.optim.SGD(by_hand.parameters(), lr=0.1)
    model = wrap(module)
    step = TrainStep(model, CONFIG)
    for number in range(3):
        batch = random_batch(list_inputs(), 13, seed=number)
        torch.testing.assert_close(model(batch), by_hand(batch), rtol=1e-6, atol=1e-6)
        losses = F.binary_cross_entropy_with_logits(by_hand(batch), batch.labels, reduction="none")[:, 0]
        assert batch.weights is not None
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        loss.backward()
        tables.step(0.1)
        dense.step()
        dense.zero_grad()
        assert step(batch).loss == pytest.approx(loss.item(), rel=1e-6)
    for name, weight in by_hand.named_parameters():
        torch.testing.assert_close(model.get_parameter(f"network.{name}"), weight, rtol=1e-6, atol=1e-7)
    for name in ("user", "shop", "words"):
        torch.testing.assert_close(
            model.embeddings.table(name), by_hand.lookups.tables.table(name), rtol=1e-6, atol=1e-7
        )


def test_tables_are_below_embeddings_only_and_flops_are_those_of_the_module() -> None:
    config = EmbeddingConfig(dim=8, optimizer=TableOptimizerKind.ADAM_DENSE)  # tables are parameters then
    module = Plain(list_inputs())
    module.lookups.tables = EmbeddingTables(list_inputs(), config, seed=None)
    model = wrap(module)
    dense = {"network.temperature", "network.mlp.weight", "network.mlp.bias"}
    assert {name for name, _ in model.named_parameters() if not name.startswith("embeddings.")} == dense
    assert flops_per_sample(model).forward == 2 * module.mlp.in_features  # tables are open: no row is read


def test_a_compiled_graph_gives_the_same() -> None:
    model = wrap(Plain(list_inputs()))
    compiled = torch.compile(model.forward_dense, fullgraph=True, dynamic=False, backend="eager")
    for seed in range(2):
        batch = random_batch(list_inputs(), 13, seed=seed)
        assert torch.equal(compiled(model.embed(batch)).logits, model(batch))


class Flat(nn.Module):
    """Reads pooled fields of the tiny data set."""

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        spec = tiny_dataset(4).inputs
        self.anything = EmbeddingTables(spec, EmbeddingConfig(dim=4), seed=seed)
        self.top = nn.Linear(len(spec.dense) + self.anything.output_dim, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.top(torch.cat([batch.dense, self.anything(batch)], dim=1))


def test_a_checkpoint_is_loaded_into_a_new_module(tmp_path: Path) -> None:
    train = tiny_dataset(64)
    config = dataclasses.replace(CONFIG, max_steps=1, threads=1)
    trained, new = wrap(Flat(seed=1)), wrap(Flat(seed=2))
    Trainer(trained, config=config, train=train, folder=tmp_path).fit()
    batch = random_batch(trained.inputs, 5)
    assert not torch.equal(new(batch), trained(batch))
    assert Trainer(new, config=config, train=train, folder=tmp_path).restore()
    assert torch.equal(new(batch), trained(batch))


def two_tables() -> nn.Module:
    module = Plain(list_inputs())
    module.more = Lookups(list_inputs(), seed=1)
    return module


def reference() -> nn.Module:
    module = Plain(list_inputs())
    vars(module)["look_up"] = module.lookups.tables.unpooled
    return module


def tower_layer() -> nn.Module:
    module = Plain(list_inputs())
    spec, dims = list_inputs(), module.lookups.tables.field_dims
    towers = Towers(towers=(("user", "item"), ("shop", "genres", "tags", "words")))
    module.towers = TowerLayer(TowerModuleConfig(), inputs=spec, field_dims=dims, towers=towers, dim=8, seed=0)
    return module


def wrapped_before() -> nn.Module:
    module = Plain(list_inputs())
    wrap(module)
    return module


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: nn.Linear(2, 1), "found:    none"),
        (two_tables, "'lookups.tables', 'more.tables'"),
        (lambda: wrap(Plain(list_inputs())), "a Model, which needs no wrapping"),
        (lambda: Lookups(list_inputs(), seed=0).tables, "wrap the module that looks them up"),
        (lambda: Plain(dataclasses.replace(list_inputs(), labels=())), "at least one label"),
        (wrapped_before, "wrapped already, at 'lookups.tables'"),
        (reference, "a reference to them in look_up"),
        (tower_layer, "TowerLayer at 'towers'"),
    ],
)
def test_modules_that_cannot_be_wrapped_are_refused(make: Callable[[], nn.Module], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        wrap(make())


def test_lookups_past_the_batch_are_refused() -> None:
    module = Plain(list_inputs())
    tables = module.lookups
    model, batch = wrap(module), random_batch(list_inputs(), 4)
    with pytest.raises(ConfigError, match=r"model = zg\.wrap\(module\)"):
        module(batch)
    forms = {
        "another Batch": lambda given: tables.tables(copy.copy(given)),
        "found:    'genres'": lambda given: tables.tables.unpooled(given, "genres"),
        "vectors": lambda given: tables.tables.vectors("user", given.single[0]),
        "table": lambda given: tables.tables.table("user"),
        r"found:    shape \(4,\)": lambda given: given.dense[:, 0],
        "found:    dict": lambda given: {"logits": given.dense[:, :1]},
    }
    for found, forward in forms.items():
        module.forward = forward
        with pytest.raises(ConfigError, match=found):
            model(batch)


def test_a_forward_pass_without_its_batch_or_its_stand_in_is_refused() -> None:
    model = wrap(Plain(list_inputs()))
    embedded = model.embed(random_batch(list_inputs(), 13, seed=0))
    fewer = {name: value for name, value in vars(embedded).items() if name != "batch"}
    with pytest.raises(ConfigError, match=r"model\.forward_dense\(model\.embed\(batch\)\)"):
        model.forward_dense(Embedded(**fewer))
    model.network.lookups.tables = nn.Identity()
    with pytest.raises(ConfigError, match=r"leave the submodule 'lookups\.tables'"):
        model.forward_dense(embedded)
