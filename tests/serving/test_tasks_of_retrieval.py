"""Retrieval with a vector for each task: one search finds what a search for each finds, and formulas weigh them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.serving.shop import SCHEMA, SETTINGS, Shop, events
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.features.batch import Batch
from ziggurat.models import EncoderConfig, MLPConfig, TwoTowerConfig, UserVectors
from ziggurat.runs.execute import prepare_run
from ziggurat.serving.answering.chain import Question
from ziggurat.serving.export.export_folder import open_export
from ziggurat.serving.value_model.formula import ValueModel
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.evaluation.full_ranking_pass import FullRanking

WEIGHTED = "retrieval_like + 0.5 * retrieval_love"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shop: Shop) -> Path:
    """A run with a vector for likes and one for loves, and its export."""
    del shop  # its cache
    place = tmp_path_factory.mktemp("tasks")
    draw = np.random.default_rng(3)
    frame = events(600).with_columns(love=pl.col("like") * pl.Series(draw.integers(0, 2, 600)))
    frame.write_parquet(place / "events.parquet")
    encoder = EncoderConfig(hidden=MLPConfig(hidden_dims=(8,)))
    model = TwoTowerConfig(
        embedding_dim=4, output_dim=8, negatives_block=64, user=encoder, item=encoder,
        user_vectors=UserVectors.PER_TASK, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH),
    )  # fmt: skip
    schema = dataclasses.replace(SCHEMA, labels=(zg.Label(name="like"), zg.Label(name="love")))
    fast = dataclasses.replace(SETTINGS, learning_rate=0.05, loader=zg.LoaderConfig(batch_size=128), epochs=2)
    data = zg.DataConfig(train=(str(place / "events.parquet"),))
    zg.train_run(zg.RunConfig(data=data, table_schema=schema, model=model, training=fast), folder=place / "run")
    config = zg.ExportConfig(golden=1, program=False, parity_rows=100, num_candidates=5)
    zg.export_run(place / "run", out=place / "export", config=config)
    return place


def test_one_search_finds_what_a_search_for_each_task_finds(place: Path) -> None:
    chain = zg.Recommender.load(place / "export").chain
    assert chain.index is not None
    exclude = torch.tensor([1, 4, 9])
    parsed = chain.index.parse("price:>=5")
    questions = [
        Question(row={"user_id": user, "age": 20 + user, "history": ["i3", "i5"]}, k=6, filter=wanted, exclude=left_out)
        for user, wanted, left_out in [(1, None, None), (2, parsed, exclude), (3, None, exclude)]
    ]
    found, vectors = chain.candidates(questions), chain.task_vectors(questions)
    assert vectors.shape == (3, 2, 8)
    for each, question, mine in zip(found, questions, vectors, strict=True):
        alone = [
            chain.index.search(user.unsqueeze(0), k=6, filters=[question.filter], exclude=[question.exclude])
            for user in mine
        ]
        union = torch.cat([answers.items.flatten() for answers in alone]).unique()
        assert each.items.tolist() == union[union >= 0].tolist()
        assert 6 <= len(each.items) <= 12
        assert each.of_tasks is not None
        for task, answers in enumerate(alone):
            at = torch.searchsorted(each.items, answers.items[0])
            torch.testing.assert_close(each.of_tasks[at, task], answers.scores[0])
        torch.testing.assert_close(each.retrieval, each.of_tasks.mean(1))


def test_answers_are_ordered_by_the_formula_over_tasks(place: Path) -> None:
    rec, run = zg.Recommender.load(place / "export"), zg.load_run(place / "run")
    value = ValueModel(WEIGHTED, names=("retrieval", "retrieval_like", "retrieval_love"))
    rec.chain = dataclasses.replace(rec.chain, value=value)
    user = {"user_id": 7, "age": 30, "history": ["i1"]}
    answer = rec.recommend(user, k=40, exclude_seen=False)
    rows = pl.DataFrame([rec.item(item.id) | {"user_id": 7, "age": 30, "history": ["i1"]} for item in answer.items])
    batch = run.preprocessing.batch(rows)
    products = torch.einsum("bvd,bd->bv", run.model.task_vectors(batch), run.model.item_vectors(batch))
    values = (products[:, 0] + 0.5 * products[:, 1]).tolist()
    assert [item.score for item in answer.items] == pytest.approx(values, abs=1e-5)
    assert values == sorted(values, reverse=True)
    assert len(answer.items) == 40


def test_formulas_weigh_tasks_and_rankings_are_of_each_task(place: Path) -> None:
    facts = open_export(place / "export").manifest.facts["value"]
    assert facts["how"] == "fitted"
    assert any("retrieval_love" in each["formula"] for each in facts["tried"])
    run = zg.load_run(place / "run")
    found, prepared = run.evaluate_split("test").metrics, prepare_run(run.config)
    ranking = FullRanking(prepared.train, before=(prepared.valid,))
    for task, name in enumerate(("like", "love")):
        asked = ranking.begin(OneTask(run.model, task))
        for batch in ordered_batches(prepared.test, batch_size=50).batches(epoch=0):
            asked.update(batch)
        alone = {key: value for key, value in asked.compute().items() if key.endswith(f"/{name}")}
        assert alone == pytest.approx({key: found[key] for key in alone})
    assert found["full_mrr/like"] != found["full_mrr/love"]


class OneTask(torch.nn.Module):
    """A model of one vector a user: that of one task."""

    def __init__(self, model: Any, task: int) -> None:
        super().__init__()
        self.inputs, self.item_vectors, self.weight = (
            model.inputs,
            model.item_vectors,
            torch.nn.Parameter(torch.ones(1)),
        )
        self._vectors, self._task = model.task_vectors, task

    def user_vectors(self, batch: Batch) -> torch.Tensor:
        """Those of the task."""
        return self._vectors(batch)[:, self._task]
