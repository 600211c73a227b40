"""Items that change while an export answers, against exports that were made of the changed items."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.serving.shop import Shop
from ziggurat.errors import RequestError
from ziggurat.serving.answering.chain import Chain, ChangesMade
from ziggurat.serving.answering.item_search import ItemSearch
from ziggurat.serving.answering.live_items import ItemChanges, change_items, folded
from ziggurat.serving.answers import Effort, RankRequest, RecommendRequest

USER = {"user_id": "3"}
FILTERS = ("", "tags:t1", "price:<10", "tags:new OR price:<5", "NOT tags:t2 AND price:>=8", 'title:"Item number 7"')


@pytest.fixture
def own(shop: Shop) -> zg.Recommender:
    """A recommender of the test's own, since it changes."""
    return zg.Recommender.load(shop.export, check=False)


def ids(rec: zg.Recommender, **options: Any) -> list[str]:
    return [item.id for item in rec.recommend(USER, **({"k": 100, "exclude_seen": False} | options)).items]


def test_items_come_change_and_go(own: zg.Recommender) -> None:
    before = own.recommend(USER, k=5, exclude_seen=False)
    outcome = own.change_items(
        ItemChanges(upsert=({"item": "fresh", "tags": ["new"], "price": 3},), delete=(before.items[0].id, "nobody"))
    )
    assert (outcome.added, outcome.changed, outcome.deleted, outcome.unknown) == (1, 0, 1, ("nobody",))
    assert outcome.version == own.version == f"{before.version}+1"
    assert own.info().num_items == outcome.num_items == 40
    assert ids(own, filter="tags:new") == ["fresh"]
    assert own.recommend(USER, filter="tags:new").notes == (), "an item has this value now"
    assert own.recommend(USER, filter="tags:newer").notes
    assert before.items[0].id not in ids(own)
    assert own.item("fresh") == {"item": "fresh", "tags": ["new"], "price": 3.0, "title": None}
    for gone in (before.items[0].id,):
        with pytest.raises(RequestError, match="ids of items"):
            own.rank(USER, [gone])
        with pytest.raises(RequestError, match="ids of items"):
            own.item(gone)
    assert "passes" in own.explain_item(RecommendRequest(user=USER, filter="tags:new"), "fresh")
    second = before.items[1]
    own.change_items(ItemChanges(upsert=({"item": second.id, "tags": ["new"]},)))
    assert own.item(second.id)["title"] == own.item(second.id)["title"] is not None, "columns that are left out stay"
    assert sorted(ids(own, filter="tags:new")) == sorted(["fresh", second.id])
    own.change_items(ItemChanges(delete=("fresh",)))
    own.change_items(ItemChanges(upsert=({"item": "fresh", "price": 3.0},)))
    assert own.item("fresh")["tags"] is None, "what was deleted begins anew"
    assert ids(own, filter="tags:new") == [second.id]


def test_scores_are_those_of_the_columns(own: zg.Recommender) -> None:
    row = {"item": "fresh", "tags": ["t1", "t2"], "price": 3.5}
    by_columns = own.rank(USER, [row]).items[0]
    own.change_items(ItemChanges(upsert=(row, {"item": "i7", "price": 99.0})))
    by_id = own.rank(USER, ["fresh", "i3"]).items
    found = {item.id: item for item in own.recommend(USER, k=100, exclude_seen=False).items}
    assert found["fresh"].score == pytest.approx(by_columns.score, abs=1e-6)
    assert next(item for item in by_id if item.id == "fresh").score == pytest.approx(by_columns.score, abs=1e-6)
    changed = own.rank(USER, ["i7", {"item": "i7"}]).items
    assert changed[0].score == pytest.approx(changed[1].score, abs=1e-6)


def test_what_users_had_stays_excluded(own: zg.Recommender) -> None:
    had = own.history(USER, limit=1)[0]
    own.change_items(ItemChanges(upsert=({"item": had, "price": 0.5},)))
    assert had not in ids(own, exclude_seen=True)
    own.change_items(ItemChanges(delete=(had,)))
    own.change_items(ItemChanges(upsert=({"item": had, "price": 0.5},)))
    assert had not in ids(own, exclude_seen=True)
    assert had in ids(own)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"upsert": [{"price": 3}]}, "column 'item'"),
        ({"upsert": [{"item": "a", "prise": 3}]}, 'did you mean "price"'),
        ({"upsert": [{"item": "a", "price": "cheap"}]}, "column 'price'"),
        ({"upsert": [{"item": "a", "tags": "t1"}]}, "a list"),
        ({"upsert": [{"item": "a", "tags": [{}]}]}, "column 'tags'"),
        ({"upsert": [{"item": "a"}, {"item": "a"}]}, "several times"),
        ({"upsert": {"item": "a"}}, "a list"),
        ({"delete": [3]}, "text"),
        ({"remove": ["i1"]}, "unknown field"),
        ([], "an object"),
    ],
)
def test_wrong_changes_are_refused_and_change_nothing(own: zg.Recommender, changes: Any, said: str) -> None:
    before = ids(own)
    with pytest.raises(RequestError) as raised:
        own.change_items(ItemChanges.from_json(changes))
    assert said in str(raised.value)
    assert (ids(own), own.num_changes) == (before, 0)


def random_change(draw: random.Random) -> ItemChanges:
    names = [f"i{draw.randrange(44)}" for _ in range(draw.randrange(4))]
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        row: dict[str, Any] = {"item": name}
        if draw.random() < 0.7:
            row["price"] = draw.choice([1, 4.5, "9", None, 20])
        if draw.random() < 0.7:
            row["tags"] = draw.choice([["t1"], ["new", "t2"], [], None])
        if draw.random() < 0.3:
            row["title"] = f"Item number {draw.randrange(9)}"
        rows.append(row)
    return ItemChanges(upsert=tuple(rows), delete=tuple(f"i{draw.randrange(44)}" for _ in range(draw.randrange(3))))


def anew(rec: zg.Recommender) -> Chain:
    """The chain of the same catalogue, encoded and indexed from the beginning, without the deleted items."""
    chain = rec.chain
    assert chain.catalogue is not None
    assert chain.encoder is not None
    assert chain.ranker is not None
    index = ItemSearch.build(chain.encoder.item_vectors(chain.catalogue.frame), items=chain.catalogue.frame)
    index = index.changed(
        torch.empty(0, dtype=torch.int64),
        vectors=torch.empty(0, 8),
        items=chain.catalogue.frame[:0],
        gone=chain.catalogue.gone.nonzero()[0].tolist(),
    )
    ranker = type(chain.ranker)(chain.ranker.packed, item_columns=chain.catalogue.columns.features)
    ranker.encode_items(chain.catalogue.frame)
    return dataclasses.replace(chain, index=index, ranker=ranker)


def test_random_changes_are_what_a_new_index_would_be(shop: Shop, own: zg.Recommender) -> None:
    draw, done = random.Random(0), []
    for step in range(24):
        done.append(random_change(draw))
        own.change_items(done[-1])
        if step % 8 != 7:
            continue
        at_once = zg.Recommender.load(shop.export, check=False)
        changes, went = folded(done, id_column="item")
        at_once.become(lambda chain, changes=changes, went=went: change_items(chain, changes, went=went))
        for each in (own, at_once):
            each.become(lambda chain, num=step: (dataclasses.replace(chain, changes=ChangesMade(num=num)), None))
        first, second = own.chain.catalogue, at_once.chain.catalogue
        assert first is not None
        assert second is not None
        assert first.ids.to_list() == second.ids.to_list(), "numbers are the same"
        assert first.gone.tolist() == second.gone.tolist()
        rebuilt = zg.Recommender.load(shop.export, check=False)
        rebuilt.chain = anew(own)
        for text in FILTERS:
            for effort in (Effort.FULL, Effort.POPULAR):
                request = RecommendRequest(user=USER, k=30, filter=text, exclude_seen=bool(step % 3))
                mine, once, new = (each.recommend_many([request], effort=effort)[0] for each in (own, at_once, rebuilt))
                assert [(item.id, round(item.score, 5)) for item in mine.items] == [  # type: ignore[union-attr]
                    (item.id, round(item.score, 5))
                    for item in new.items  # type: ignore[union-attr]
                ]
                assert [item.id for item in mine.items] == [item.id for item in once.items]  # type: ignore[union-attr]
        assert own.version == at_once.version


def test_answers_hold_together_while_items_change(own: zg.Recommender) -> None:
    stop, problems = threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            names = ["i1", "i2", *([] if own.num_changes == 0 else ["extra0"])]
            answers: list[Any] = own.rank_many([RankRequest(user=USER, items=tuple(names))])
            answers += own.recommend_many([RecommendRequest(user=USER, k=50, filter="price:>0", exclude_seen=False)])
            problems.extend(each for each in answers if isinstance(each, Exception))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(10):
            own.change_items(ItemChanges(upsert=({"item": f"extra{step}", "price": step, "tags": ["t1"]},)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == []
    assert len(ids(own, filter="tags:t1 AND price:>=0", k=200)) >= 5
    assert pl.Series(ids(own)).is_unique().all()
