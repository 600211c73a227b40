"""An export with an OverArch: what it answers is what its run computes, in each effort, with a ranker and without."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.serving.shop import SCHEMA, SETTINGS, Shop, events
from tests.serving.test_export_folder import reseal
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.errors import ConfigError, ExportError
from ziggurat.models import EncoderConfig, MLPConfig, TwoTowerConfig
from ziggurat.models.retrieval.over_arch import OverArchConfig, OverArchKind
from ziggurat.serving.answering.live_items import ItemChanges, change_items
from ziggurat.serving.answering.rescorer import OVER_ARCH_FILE
from ziggurat.serving.answers import Effort, RecommendRequest
from ziggurat.serving.export.aligned_tensors import load_aligned, save_aligned
from ziggurat.serving.server.queue.ladder import steps_for

SMALL, TABLES = MLPConfig(hidden_dims=(8,)), EmbeddingConfig(kernel=KernelChoice.TORCH)
SIZES = {"golden": 1, "program": False, "parity_rows": 200}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shop: Shop) -> Path:
    """A run with an OverArch that has learned enough to change the order; exports without and with a ranker."""
    place = tmp_path_factory.mktemp("over_arch")
    events(400).write_parquet(place / "events.parquet")
    encoder = EncoderConfig(hidden=SMALL)
    over_arch = OverArchConfig(
        kind=OverArchKind.MIXTURE_OF_LOGITS, hidden=8, user_components=2, item_components=2, component_dim=4
    )
    model = TwoTowerConfig(
        embedding_dim=4, output_dim=8, negatives_block=64, user=encoder, item=encoder, embedding=TABLES,
        over_arch=over_arch,
    )  # fmt: skip
    fast = dataclasses.replace(SETTINGS, learning_rate=0.05, loader=zg.LoaderConfig(batch_size=128), epochs=2)
    data = zg.DataConfig(train=(str(place / "events.parquet"),))
    zg.train_run(zg.RunConfig(data=data, table_schema=SCHEMA, model=model, training=fast), folder=place / "two_tower")
    config = zg.ExportConfig(value="over_arch", num_candidates=8, num_over_arch=20, **SIZES)
    zg.export_run(place / "two_tower", out=place / "alone", config=config)
    config = dataclasses.replace(config, value="like + 2 * over_arch + retrieval")
    zg.export_run(place / "two_tower", ranker=shop.ranker, out=place / "whole", config=config)
    return place


def by_hand(folder: Path, frame: pl.DataFrame, user: int) -> dict[str, tuple[float, float]]:
    """Inner product and score of the OverArch of every item for a user, by the run itself, the best product first."""
    run = zg.load_run(folder)
    last = frame.filter(pl.col("user_id") == user).sort("timestamp")[-1].select("user_id", "age", "history").row(0)
    items = frame.sort("timestamp").unique("item", keep="last", maintain_order=True).sort("item")
    rows = items.with_columns(
        user_id=pl.lit(last[0]),
        age=pl.lit(last[1]),
        history=pl.Series([last[2]] * items.height, dtype=pl.List(pl.String)),
    )
    batch, model = run.preprocessing.batch(rows), run.model
    with torch.no_grad():
        users, vectors = model.user_vectors(batch), model.item_vectors(batch)
        over: Any = model.over_arch
        again = over.scores(over.user_parts(users[:1]), over.item_parts(vectors)[None], weights=over.pair_weights())[0]
    products = (users * vectors).sum(1)
    order = products.argsort(descending=True, stable=True).tolist()
    return {items["item"][i]: (float(products[i]), float(again[i])) for i in order}


def test_found_items_are_ordered_anew(place: Path):
    frame = pl.read_parquet(place / "events.parquet")
    loaded, changed = zg.Recommender.load(place / "alone"), 0
    assert loaded.info().num_over_arch == 20
    for user in range(3):
        known = by_hand(place / "two_tower", frame, user)
        answer = loaded.recommend({"user_id": user}, k=6, exclude_seen=False)
        wanted = sorted(list(known)[:20], key=lambda item: -known[item][1])[:6]
        assert [item.id for item in answer.items] == wanted
        assert [item.score for item in answer.items] == pytest.approx([known[item][1] for item in wanted], abs=1e-5)
        assert [item.over_arch for item in answer.items] == [item.score for item in answer.items]
        assert [item.retrieval for item in answer.items] == pytest.approx([known[item][0] for item in wanted], abs=1e-5)
        changed += any(abs(known[item][0] - known[item][1]) > 1e-4 for item in wanted)
    assert changed, "the OverArch says nothing of its own: nothing was compared"


def test_the_ranker_sees_what_the_over_arch_chose(place: Path):
    frame = pl.read_parquet(place / "events.parquet")
    loaded = zg.Recommender.load(place / "whole")
    known = by_hand(place / "two_tower", frame, 3)
    chosen = sorted(list(known)[:20], key=lambda item: -known[item][1])[:8]
    answer = loaded.recommend({"user_id": 3}, k=8, exclude_seen=False)
    assert {item.id for item in answer.items} == set(chosen)
    for item in answer.items:
        assert item.score == pytest.approx(item.tasks["like"] + 2 * item.over_arch + item.retrieval, abs=1e-5)
    ranked = loaded.rank({"user_id": 3}, [item.id for item in answer.items])
    assert [item.id for item in ranked.items] == [item.id for item in answer.items]
    given = {name: value for name, value in loaded.item(chosen[0]).items() if name in ("item", "tags", "price")}
    of_columns = loaded.rank({"user_id": 3}, [given, chosen[0]])
    scores = {item.position: item.score for item in of_columns.items}
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert of_columns.items[0].over_arch == pytest.approx(known[chosen[0]][1], abs=1e-5)


def test_changed_items_are_scored_as_they_are_now(place: Path):
    chain = zg.Recommender.load(place / "alone").chain
    item = {"item": "new", "tags": ["t1"], "price": 3.0}
    changed, _ = change_items(chain, ItemChanges(upsert=(item, {"item": chain.catalogue.ids[2], "price": 99.0})))
    vectors = changed.encoder.item_vectors(changed.catalogue.frame)
    assert torch.allclose(changed.rescorer.parts, changed.encoder.over_arch.item_parts(vectors), atol=1e-6)
    assert len(changed.rescorer.parts) == len(chain.rescorer.parts) + 1
    assert not torch.equal(changed.rescorer.parts[2], chain.rescorer.parts[2])


def test_less_effort_scores_fewer_items(place: Path):
    loaded = zg.Recommender.load(place / "whole")
    assert steps_for(loaded.info()) == tuple(Effort)
    request = RecommendRequest(user={"user_id": 3}, k=2, exclude_seen=False)
    found = {}
    chain = loaded.chain
    for effort in Effort:
        (answer,) = loaded.recommend_many([request], effort=effort)
        found[effort] = [(item.over_arch, bool(item.tasks)) for item in answer.items]
        assert answer.degraded == (() if effort is Effort.FULL else (effort.value,))
    assert found[Effort.RETRIEVAL_ONLY] == found[Effort.POPULAR] == [(None, False)] * 2
    for effort, looked_for, ranked in (
        (Effort.FULL, 20, 8),
        (Effort.FEWER_PROBES, 5, 2),
        (Effort.SMALLER_OVER_ARCH, 2, 2),
        (Effort.RETRIEVAL_ONLY, 2, 2),
    ):
        assert chain._num_found(2, effort) == looked_for
        assert chain._num_ranked(2, effort) == ranked


def test_what_does_not_fit_is_named(place: Path, shop: Shop, tmp_path: Path):
    with pytest.raises(ConfigError, match="over_arch"):
        zg.export_run(shop.ranker, out=tmp_path / "export", config=zg.ExportConfig(value="over_arch", **SIZES))
    folder = place / "alone"
    whole = load_aligned(folder / OVER_ARCH_FILE)["parts"].clone()
    save_aligned({"parts": whole[:-1]}, folder / OVER_ARCH_FILE)
    reseal(folder)
    with pytest.raises(ExportError, match=r"over_arch\.safetensors"):
        zg.Recommender.load(folder)
