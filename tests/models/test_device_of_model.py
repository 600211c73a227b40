"""A model computes where its weights are, also where it has none beside its tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

import ziggurat as zg
from tests.models.graph.test_lightgcn import drawn, observed
from ziggurat.embeddings import TableOptimizerKind
from ziggurat.models import LightGCNConfig
from ziggurat.models.contract.model import device_of
from ziggurat.ops.graph import propagation
from ziggurat.ops.graph.graph import Graph
from ziggurat.testing.pretend_cuda import pretend_cuda


def lightgcn(optimizer: TableOptimizerKind, **settings: object) -> LightGCNConfig:
    config = LightGCNConfig(embedding_dim=8, **settings)
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, optimizer=optimizer))


@pytest.fixture
def pretended_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by sums over edges: a pretended GPU has no CSR tensors."""

    def summed(graph: Graph, x_CD: Tensor, *, rows: Tensor | None, base: Tensor | None, scale: float, **other: object):
        del other
        sums_RD = x_CD.new_zeros(graph.num_rows, x_CD.shape[1])
        sums_RD.index_add_(0, graph.rows_of_edges(), graph.weights.unsqueeze(1) * x_CD[graph.columns.long()])
        return scale * ((sums_RD if rows is None else sums_RD[rows]) + (0 if base is None else base))

    monkeypatch.setattr(propagation, "propagate_reference", summed)


@pytest.mark.usefixtures("pretended_products")
@pytest.mark.parametrize("optimizer", [TableOptimizerKind.ADAM_DENSE, TableOptimizerKind.SPARSE_ADAM])
def test_tables_say_where_a_model_without_other_weights_computes(optimizer):
    model, batch = observed(lightgcn(optimizer))
    assert device_of(model) == torch.device("cpu")
    with pretend_cuda() as cuda:
        model = model.to(cuda)
        assert device_of(model) == cuda
        assert model.embed(drawn(model, batch.to(cuda))).named["user"].device == cuda


@pytest.mark.usefixtures("pretended_products")
@pytest.mark.parametrize("settings", [{"num_layers": 0}, {"num_layers": 2}, {"num_layers": 2, "edge_width": 3}])
def test_training_and_evaluation_without_weights_beside_the_tables_are_on_the_gpu(tmp_path: Path, settings):
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"user": rng.integers(0, 20, 300), "item": rng.integers(0, 15, 300), "took": np.ones(300)})
    schema = zg.Schema(
        features=(zg.Categorical(name="user"), zg.Categorical(name="item")),
        labels=(zg.Label(name="took", outcomes="positive_only"),),
        group="user",
        items=zg.Items(id="item"),
    )
    frame.write_parquet(tmp_path / "log.parquet")
    raw = zg.DataConfig(train=(str(tmp_path / "log.parquet"),))
    data = zg.prepare(raw, schema=schema, folder=tmp_path / "data")
    training = zg.TrainingConfig(epochs=1, loader=zg.LoaderConfig(batch_size=64), precision="fp32")
    found = {}
    for kind in ("cpu", "cuda"):
        with pretend_cuda() as cuda:
            model = zg.build_model(lightgcn(TableOptimizerKind.SPARSE_ADAM, **settings), data.inputs, seed=0)
            if kind == "cuda":
                model = model.to(cuda)
            trainer = zg.Trainer(model, config=training, train=data.train, valid=data.valid, folder=tmp_path / kind)
            trainer.fit()
            found[kind] = trainer.evaluate(data.test, split="test").metrics
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-5)
