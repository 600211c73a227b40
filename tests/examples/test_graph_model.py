"""A model over a graph from outside the package: its matrix, its loss and gradients, and a run by the command line."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat as zg
from tests.end_to_end.test_lightgcn import START, metrics_of, place  # noqa: F401  # a fixture
from tests.models.graph.test_lightgcn import ITEMS, USERS, drawn, edges, inputs
from ziggurat.cli.main import main
from ziggurat.models import build_model
from ziggurat.models.graph.lightgcn import NEGATIVES
from ziggurat.testing.batches import random_batch

extension: Any = importlib.import_module("examples.extensions.self_loops")
MODEL = "examples.extensions.self_loops:SelfLoopsConfig"


def test_its_loss_and_vectors_are_those_of_the_renormalised_matrix_in_fp64() -> None:
    model = build_model(extension.SelfLoopsConfig(embedding_dim=16, num_layers=2, l2=0.0), inputs(), seed=0)
    batch = random_batch(inputs(), 40, seed=0)
    model.observe([batch])
    batch = drawn(model, batch)
    a = torch.zeros(USERS + ITEMS, USERS + ITEMS, dtype=torch.float64)
    for user, item in edges(batch):
        a[user, USERS + item] = a[USERS + item, user] = 1.0
    has_edge = a.sum(1) > 0
    assert 0 < int((~has_edge).sum()) < len(a)
    a += torch.diag(has_edge.double())
    root = a.sum(1).clamp(min=1).rsqrt()
    a = root[:, None] * a * root
    tables = [model.embeddings.table(name).double().requires_grad_() for name in ("user", "item")]
    x = torch.cat(tables)
    means = (x + a @ x + a @ a @ x) / 3
    users, items = batch.single
    user, item, negative = (means[nodes] for nodes in (users, USERS + items, USERS + batch.extras[NEGATIVES]))
    weights = batch.labels[:, 0] * batch.weights * (batch.single >= 3).all(dim=0)
    margins = (user * (negative - item)).sum(1)
    wanted = (torch.nn.functional.softplus(margins) * weights).sum() / weights.sum()
    found = model.loss(model.forward_dense(model.embed(batch)), batch).mean()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    wanted.backward()
    found.backward()
    for name, table in zip(("user", "item"), tables, strict=True):
        gradient = model.embeddings.tables.parameter(name).grad
        torch.testing.assert_close(gradient.double(), table.grad, rtol=1e-4, atol=1e-6)
    # A node without an edge has the mean vector of all that have one, and no loop.
    with torch.no_grad():
        of_users = means[:USERS].clone()
        of_users[~has_edge[:USERS]] = of_users[has_edge[:USERS]].mean(dim=0)
        of_users[0] = 0.0  # padding
        answers = model.user_vectors(batch)
    torch.testing.assert_close(answers.double(), of_users[users], rtol=1e-4, atol=1e-6)


def test_the_command_line_trains_exports_and_asks_it(place: Path) -> None:  # noqa: F811
    assert main([*START, "--model", MODEL, "--epochs", "4", "--out", "runs/a"]) == 0
    assert metrics_of("runs/a/evaluations/test.json")["full_user_recall@20"] > 0.7
    run = zg.load_run("runs/a", models=(extension.SelfLoopsConfig,))
    assert type(run.model).__name__ == "SelfLoops"
    assert main(["export", "runs/a", "--model", MODEL, "--out", "exports/a"]) == 0
    exported = zg.Recommender.load("exports/a", models=(extension.SelfLoopsConfig,))
    assert len(exported.recommend({"user": 7}, k=5).items) == 5
