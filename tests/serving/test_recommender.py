"""Answers of a loaded export: equal to a plain computation by the two runs, whoever asks and however."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import numpy as np
import polars as pl
import pytest

import ziggurat as zg
from tests.serving.shop import NUM_ITEMS, Shop
from tests.serving.test_export_folder import reseal
from ziggurat.errors import ExportError, RequestError, ZigguratError
from ziggurat.files import Format
from ziggurat.serving import load_parts
from ziggurat.serving.answering import ranker
from ziggurat.serving.answering.chain import ChainSettings
from ziggurat.serving.answers import Column, Effort, RankRequest, Recommendations, RecommendRequest
from ziggurat.serving.value_model.formula import ValueModel

USER_COLUMNS, ITEM_COLUMNS = ("user_id", "age", "history"), ("item", "tags", "price")


def last_user(shop: Shop, user: int) -> dict[str, Any]:
    return shop.events.filter(pl.col("user_id") == user).sort("timestamp")[-1].select(USER_COLUMNS).row(0, named=True)


def catalogue(shop: Shop) -> pl.DataFrame:
    last = shop.events.sort("timestamp").unique("item", keep="last", maintain_order=True)
    return last.sort("item").select(*ITEM_COLUMNS, "title")


def by_hand(shop: Shop, user: dict[str, Any], *, k: int, left_out: set[str], candidates: int = 12) -> list[Any]:
    """(id, score) of the best items, by whole rows through the runs themselves."""
    items = catalogue(shop)
    rows = items.with_columns(
        pl.lit(user.get("user_id"), dtype=pl.Int64).alias("user_id"),
        pl.lit(user.get("age"), dtype=pl.Int64).alias("age"),
        pl.Series("history", [user.get("history")] * items.height, dtype=pl.List(pl.String)),
    )
    encoder, ranker = zg.load_run(shop.two_tower), zg.load_run(shop.ranker)
    batch = encoder.preprocessing.batch(rows)
    model: Any = encoder.model
    products = (model.user_vectors(batch) * model.item_vectors(batch)).sum(1).detach().numpy()
    scores = ranker.scores(rows)[:, 0]
    allowed = [index for index, name in enumerate(items["item"]) if name not in left_out]
    chosen = sorted(allowed, key=lambda index: (-products[index], index))[:candidates]
    best = sorted(chosen, key=lambda index: (-scores[index], index))[:k]
    return [(items["item"][index], float(scores[index])) for index in best]


def assert_same(answer: Recommendations, expected: list[Any]) -> None:
    assert [item.id for item in answer.items] == [name for name, _ in expected]
    np.testing.assert_allclose([item.score for item in answer.items], [score for _, score in expected], atol=1e-6)


def test_recommendations_are_those_of_the_runs(shop: Shop, loaded: zg.Recommender) -> None:
    for user in (3, 44):
        seen = set(shop.events.filter(pl.col("user_id") == user)["item"])
        answer = loaded.recommend({"user_id": user}, k=5)
        assert_same(answer, by_hand(shop, last_user(shop, user), k=5, left_out=seen))
        assert answer.version == loaded.version
        assert answer.degraded == ()
    everything = loaded.recommend({"user_id": 3}, k=1000, exclude_seen=False)
    assert len(everything.items) == NUM_ITEMS
    assert_same(everything, by_hand(shop, last_user(shop, 3), k=NUM_ITEMS, left_out=set(), candidates=NUM_ITEMS))


def test_users_are_known_by_any_form_of_their_id(shop: Shop, loaded: zg.Recommender) -> None:
    expected = loaded.recommend({"user_id": 17}, k=4)
    for form in ("17", 17.0, "17.0"):
        assert loaded.recommend({"user_id": form}, k=4) == expected
    assert_same(loaded.recommend(last_user(shop, 17), k=4), [(item.id, item.score) for item in expected.items])


def test_what_nobody_knows_is_missing(shop: Shop, loaded: zg.Recommender) -> None:
    for user in ({}, {"user_id": None}, {"user_id": "nobody"}, {"user_id": 10**9, "age": 33, "history": ["i1", "no"]}):
        given = user if not isinstance(user.get("user_id"), str) else {"user_id": 10**8}
        assert_same(loaded.recommend(user, k=6), by_hand(shop, given, k=6, left_out=set()))
    changed = last_user(shop, 5) | {"age": None}
    seen = set(shop.events.filter(pl.col("user_id") == 5)["item"])
    assert_same(loaded.recommend({"user_id": 5, "age": None}, k=6), by_hand(shop, changed, k=6, left_out=seen))


def test_items_are_left_out(shop: Shop, loaded: zg.Recommender) -> None:
    history = loaded.history({"user_id": 8})
    of_user = shop.events.filter(pl.col("user_id") == 8).sort("timestamp", descending=True)["item"]
    assert history == of_user.unique(maintain_order=True).to_list()
    assert not set(history) & {item.id for item in loaded.recommend({"user_id": 8}, k=40).items}
    first = loaded.recommend({"user_id": 8}, k=1).items[0].id
    again = loaded.recommend({"user_id": 8}, k=40, exclude=[first, "never heard of"])
    assert first not in {item.id for item in again.items}
    request = RecommendRequest(user={"user_id": 8}, exclude=(first,))
    assert "has had it" in loaded.explain_item(request, history[0])
    assert "excludes" in loaded.explain_item(request, first)
    assert loaded.history({"user_id": "nobody"}) == []
    activity = shop.events["user_id"].value_counts(sort=True)
    assert loaded.users(limit=1)[0] in set(
        activity.filter(pl.col("count") == activity["count"].max())["user_id"].cast(str)
    )


def test_ranking_gives_the_scores_of_predict(shop: Shop, loaded: zg.Recommender) -> None:
    run, user = zg.load_run(shop.ranker), last_user(shop, 21)
    items = catalogue(shop).head(9)
    rows = items.with_columns(
        user_id=pl.lit(21), age=pl.lit(user["age"]), history=pl.Series([user["history"]] * 9, dtype=pl.List(pl.String))
    )
    expected = run.predict(rows)["like"].to_numpy()
    by_id = loaded.rank({"user_id": 21}, items["item"].to_list())
    by_row = loaded.rank({"user_id": 21}, items.select(ITEM_COLUMNS).to_dicts())
    mixed = loaded.rank({"user_id": 21}, [items["item"][0], *items.select(ITEM_COLUMNS).to_dicts()[1:]])
    for answer in (by_id, by_row, mixed):
        scores = {item.position: item.tasks["like"] for item in answer.items}
        np.testing.assert_allclose([scores[place] for place in range(9)], expected, atol=1e-6)
        assert [item.id for item in answer.items] == [items["item"][item.position] for item in answer.items]
        assert [item.score for item in answer.items] == sorted((item.score for item in answer.items), reverse=True)
    np.testing.assert_allclose(loaded.scores(rows)[:, 0], expected, atol=1e-6)
    new = loaded.rank({}, [{"item": "brand new", "price": "3.5"}, {"tags": None}])
    assert {item.id for item in new.items} == {"brand new", ""}
    assert new.notes == ("unknown ids: item 1 of 2 (50.0%)",)
    lists = loaded.rank({}, [{"item": items["item"][0], "tags": ["no such tag", "nor this"]}])
    assert lists.notes == ("unknown ids: tags 2 of 2 (100.0%)",)
    assert not by_row.notes
    asker = {"user_id": 21, "history": [items["item"][0], "never seen"]}
    note = ("unknown ids: history 1 of 2 (50.0%)",)
    for answer in (
        loaded.recommend(asker, k=3),
        loaded.rank(asker, items["item"].to_list()),
        loaded.rank(asker, items.select(ITEM_COLUMNS).to_dicts()),
    ):
        assert answer.notes == note
    assert not loaded.recommend({"user_id": 21}, k=3).notes
    assert not loaded.recommend(asker | {"history": [items["item"][0]]}, k=3).notes


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda rec: rec.recommend({"user": 1}), "user_id"),
        (lambda rec: rec.recommend({"item": "i3"}), "'item'"),
        (lambda rec: rec.recommend({"age": "old"}), "'age'"),
        (lambda rec: rec.recommend({"age": [3]}), "'age'"),
        (lambda rec: rec.recommend({"age": 1e300}), "age"),
        (lambda rec: rec.recommend({"user_id": {"a": 1}}), "'user_id'"),
        (lambda rec: rec.recommend({"history": "i3"}), "list"),
        (lambda rec: rec.recommend({"user_id": 1}, k=0), "'k'"),
        (lambda rec: rec.rank({"user_id": 1}, ["no such item", "i3"]), "no such item"),
        (lambda rec: rec.rank({"user_id": 1}, [{"prize": 3}]), "price"),
        (lambda rec: rec.item("no such item"), "no such item"),
        (lambda rec: rec.rank({"user_id": 1}, []), "name at least one item"),
    ],
)
def test_what_cannot_be_is_named(loaded: zg.Recommender, ask: Any, said: str) -> None:
    with pytest.raises(ZigguratError) as caught:
        ask(loaded)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("ask", "where"),
    [
        (lambda rec, **user: rec.recommend(user, k=2), "request, user, column 'age'"),
        (lambda rec, **user: rec.rank(user, ["i1"]), "request, user, column 'age'"),
        (lambda rec, **user: rec.rank(user, ["i1", {"item": "new", "price": 3}]), "request, user, column 'age'"),
        (
            lambda rec, age: rec.rank({}, ["i1", {"item": "i2"}, {"item": "new", "price": age}]),
            "request, item 2 (counted from 0), column 'price'",
        ),
    ],
)
def test_a_number_beyond_32_bits_is_named_by_its_place_in_the_request(
    loaded: zg.Recommender, ask: Any, where: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ask(loaded, age=1e39)
    assert caught.value.where == where
    assert caught.value.found == "'1e+39'"
    assert caught.value.ways_out == ("correct the value", "leave the column out: it is then missing")
    ask(loaded, age=30)
    ask(loaded, age=None)  # as one that is left out


def test_rows_are_counted_through_all_parts_that_are_scored_together(
    loaded: zg.Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranker, "CHUNK_PAIRS", 2)
    with pytest.raises(RequestError, match=r"item 3 \(counted from 0\), column 'price'"):
        loaded.rank({}, [{"item": f"new {i}", "price": 1e39 if i == 3 else 1} for i in range(5)])


def test_one_bad_request_spoils_no_other(loaded: zg.Recommender) -> None:
    good = [RecommendRequest(user={"user_id": user}, k=3) for user in range(5)]
    bad = RecommendRequest(user={"age": 1e300})
    answers = loaded.recommend_many([*good[:2], bad, *good[2:]])
    assert isinstance(answers[2], ZigguratError)
    alone = [loaded.recommend_many([request])[0] for request in good]
    for found, expected in zip([*answers[:2], *answers[3:]], alone, strict=True):
        assert isinstance(found, Recommendations)
        assert isinstance(expected, Recommendations)
        assert_same(found, [(item.id, item.score) for item in expected.items])
    ranks = loaded.rank_many([RankRequest(user={}, items=("none",)), RankRequest(user={}, items=("i1",))])
    assert isinstance(ranks[0], RequestError)
    assert not isinstance(ranks[1], ZigguratError)
    assert loaded.recommend_many([]) == []
    assert loaded.check(good[0]) == 12
    with pytest.raises(RequestError):
        loaded.check(RankRequest(user={"what": 1}, items=("i1",)))


def test_values_that_no_item_has_are_noted(loaded: zg.Recommender) -> None:
    answers = loaded.recommend_many(
        [RecommendRequest(user={}, filter=text) for text in ("title:'Item numbre 3'", "price:>=0", "")]
    )
    assert isinstance(answers[0], Recommendations)
    assert answers[0].items == ()
    assert answers[0].notes[0].startswith("no item has title:'Item numbre 3'; the nearest is 'Item number 3")
    assert answers[0].to_json()["notes"] == list(answers[0].notes)
    assert all(isinstance(each, Recommendations) and each.notes == () for each in answers[1:])
    excluded = loaded.recommend({}, exclude=["i1", "nope", "noone"]).notes
    assert excluded == ("exclude: there is no item of the id 'nope', nor of 1 more of the excluded ids",)
    assert loaded.recommend({}, exclude=["i1"]).notes == ()


def test_an_unknown_user_is_noted(loaded: zg.Recommender) -> None:
    unknown = ("user: user_id 'nobody' is none of the known users; what the request says counts alone",)
    known = loaded.users(limit=1)[0]
    for user, notes in (({"user_id": "nobody"}, unknown), ({"user_id": known}, ()), ({"user_id": None}, ()), ({}, ())):
        for answer in (loaded.recommend(user, k=2), loaded.rank(user, ["i1", "i2"])):
            assert answer.notes == notes
            assert answer.to_json().get("notes", []) == list(notes)


def test_given_items_are_completed_from_the_catalogue(loaded: zg.Recommender) -> None:
    """Features of the model and columns that only the value model reads, but for what the request says itself."""
    import torch

    numbers = {"number": torch.arange(NUM_ITEMS, dtype=torch.float64)}
    value = ValueModel("number * like", names=("like", "retrieval", "number"))
    frame = loaded.chain.catalogue.frame.with_columns(number=pl.int_range(NUM_ITEMS))
    whole = dataclasses.replace(loaded.chain.catalogue.columns)
    chain = dataclasses.replace(
        loaded.chain, value=value, numbers=numbers, catalogue=type(loaded.chain.catalogue)(frame, columns=whole)
    )
    info = dataclasses.replace(
        loaded.info(), item_columns=(*loaded.info().item_columns, Column(name="number", kind="dense"))
    )
    changed = zg.Recommender(loaded.export, chain=chain, users=loaded._users, info=info)
    by_id = {item.id: item for item in changed.rank({"user_id": 3}, ["i3", "i4"]).items}
    given = changed.rank({"user_id": 3}, [{"item": "i3"}, {"item": "i4", "price": None, "number": "2"}, {"item": "x"}])
    found = {item.id: item for item in given.items}
    assert found["i3"].score == pytest.approx(by_id["i3"].score, rel=1e-6)
    assert found["i3"].tasks["like"] == pytest.approx(by_id["i3"].tasks["like"], abs=1e-6)
    assert found["i4"].score == pytest.approx(2 * found["i4"].tasks["like"], rel=1e-6)
    assert found["i4"].tasks["like"] != pytest.approx(by_id["i4"].tasks["like"], abs=1e-6)
    for wrong in ("1_000", "١٢", [3], "many"):
        with pytest.raises(RequestError, match="'number'"):
            changed.rank({}, [{"item": "i3", "number": wrong}])
        with pytest.raises(RequestError, match="'age'"):
            changed.recommend({"age": wrong})


def test_less_effort_is_said(shop: Shop, loaded: zg.Recommender) -> None:
    request = RecommendRequest(user={"user_id": 9}, k=4)
    for effort in (Effort.FEWER_PROBES, Effort.RETRIEVAL_ONLY, Effort.POPULAR):
        answer = loaded.recommend_many([request], effort=effort)[0]
        assert isinstance(answer, Recommendations)
        assert answer.degraded == (effort.value,)
        assert len(answer.items) == 4
    counts = shop.events["item"].value_counts()
    seen = set(shop.events.filter(pl.col("user_id") == 9)["item"])
    popular = counts.filter(~pl.col("item").is_in(list(seen))).sort(["count", "item"], descending=[True, False])
    assert [item.id for item in answer.items] == popular["item"].head(4).to_list()
    assert [item.score for item in answer.items] == popular["count"].head(4).to_list()


def test_a_value_model_orders(loaded: zg.Recommender) -> None:
    names = ("like", "retrieval", "price")
    value = ValueModel("price * (like + 1) if retrieval > -9 else 0", names=names)
    prices = loaded.chain.catalogue.frame["price"].to_numpy()
    import torch

    chain = dataclasses.replace(loaded.chain, value=value, numbers={"price": torch.from_numpy(prices.copy())})
    changed = zg.Recommender(loaded.export, chain=chain, users=loaded._users, info=loaded.info())
    answer = changed.recommend({"user_id": 2}, k=12, exclude_seen=False)
    for item in answer.items:
        price = loaded.item(item.id)["price"]
        assert item.score == pytest.approx(price * (item.tasks["like"] + 1), rel=1e-6)
    assert [item.score for item in answer.items] == sorted((item.score for item in answer.items), reverse=True)


def test_a_ranking_has_the_values_of_recommendations(loaded: zg.Recommender) -> None:
    value = ValueModel("like ** 0.5 + 0.1 * retrieval if like > 0.02 else 0", names=("like", "retrieval"))
    chain = dataclasses.replace(loaded.chain, value=value)
    changed = zg.Recommender(loaded.export, chain=chain, users=loaded._users, info=loaded.info())
    for user in ({"user_id": 2}, {"user_id": 2, "age": 77}):
        answer = changed.recommend(user, k=12, exclude_seen=False)
        ids = [item.id for item in answer.items]
        rows = [{name: loaded.item(id)[name] for name in ITEM_COLUMNS} for id in ids]
        for given in (ids, rows, [*ids[:5], *rows[5:]]):
            ranked = changed.rank(user, given)
            assert [item.id for item in ranked.items] == ids
            for found, expected in zip(ranked.items, answer.items, strict=True):
                assert found.score == pytest.approx(expected.score, rel=1e-5)
                assert found.retrieval == pytest.approx(expected.retrieval, rel=1e-5, abs=1e-6)


def test_a_formula_over_vectors_needs_an_encoder(shop: Shop, tmp_path: Any) -> None:
    zg.export_run(shop.ranker, out=tmp_path / "ranker", config=zg.ExportConfig(program=False, golden=0))
    settings = ChainSettings.read(tmp_path / "ranker/chain.json")
    dataclasses.replace(settings, formula="like + retrieval").write(tmp_path / "ranker/chain.json")
    reseal(tmp_path / "ranker")
    with pytest.raises(ExportError, match="retrieval"):
        zg.Recommender.load(tmp_path / "ranker")


def test_less_effort_never_searches_more(loaded: zg.Recommender, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    search = loaded.chain.index.search

    def watched(*args: Any, fewer_probes: bool, **more: Any) -> Any:
        tried.append(fewer_probes)
        return search(*args, fewer_probes=fewer_probes, **more)

    monkeypatch.setattr(loaded.chain.index, "search", watched)
    for effort in (Effort.FULL, Effort.FEWER_PROBES, Effort.RETRIEVAL_ONLY):
        loaded.recommend_many([RecommendRequest(user={"user_id": 9})], effort=effort)
    assert tried == [False, True, True]


def test_recall_is_measured_for_more_users_than_are_encoded(
    shop: Shop, loaded: zg.Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = loaded.search_and_queries(num_users=7)
    monkeypatch.setattr(load_parts, "_MAX_ENCODED", 10)
    many = zg.Recommender.load(shop.export)
    assert many.chain.known.encoder is None
    _, queries = many.search_and_queries(num_users=7)
    np.testing.assert_allclose(queries, expected, atol=1e-6)


def test_it_says_what_it_is(loaded: zg.Recommender, shop: Shop) -> None:
    info = loaded.info()
    assert json.loads(json.dumps(info.to_json()))["num_items"] == NUM_ITEMS
    assert [column.name for column in info.user_columns] == list(USER_COLUMNS)
    assert [column.name for column in info.item_columns] == list(ITEM_COLUMNS)
    assert info.can_recommend
    assert info.can_rank
    assert info.labels == ("like",)
    assert loaded.item("i3")["title"] == "Item number 3"
    assert "retrieval of 12" in repr(loaded)
    assert loaded.check_golden() == 6
    assert len(info.examples) == 6


def test_another_answer_than_the_golden_one_is_refused(shop: Shop, tmp_path: Any) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(shop.export, copy)
    form = Format(name="ziggurat.export_golden", what="golden")
    content = form.read(copy / "golden.json")
    content["requests"][0]["items"][0][1] += 0.01
    form.write(copy / "golden.json", content)
    with pytest.raises(ExportError, match=r"golden\.json"):
        zg.Recommender.load(copy)
    version = reseal(copy)
    with pytest.raises(ExportError, match="instead of"):
        zg.Recommender.load(copy)
    assert zg.Recommender.load(copy, check=False).version == version


@pytest.mark.parametrize("effort", list(Effort))
def test_an_answer_does_not_depend_on_who_else_asks(shop: Shop, effort: Effort):
    export = zg.Recommender.load(shop.export)
    mine = [RecommendRequest(user={"user_id": user}, k=1, exclude_seen=False) for user in range(8)]
    other = RecommendRequest(user={"user_id": 9}, k=NUM_ITEMS, exclude_seen=False)
    together = export.recommend_many([*mine, other], effort=effort)
    for alone, among in zip(mine, together, strict=False):
        (answer,) = export.recommend_many([alone], effort=effort)
        assert isinstance(answer, Recommendations)
        assert isinstance(among, Recommendations)
        assert [item.id for item in answer.items] == [item.id for item in among.items]
