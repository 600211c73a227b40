"""Items by vector and filter: every plan, every change, against a plain list of items."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load, save

from ziggurat.errors import ConfigError, DataError, FilterError
from ziggurat.retrieval import main_search, planner
from ziggurat.retrieval.item_index import ItemIndex, ItemIndexConfig
from ziggurat.retrieval.planner import PlanKind, Planner
from ziggurat.retrieval.vectors import VectorIndexConfig

CONFIG = ItemIndexConfig(vectors=VectorIndexConfig(num_clusters=20, kept="float32"))  # type: ignore[arg-type]
FILTERS = {
    None: lambda line: True,
    "lang:de": lambda line: line["lang"] == "de",
    "year:1990..1994 AND NOT lang:fr": lambda line: 1990 <= line["year"] <= 1994 and line["lang"] != "fr",
    "year:1999": lambda line: line["year"] == 1999,
    "lang:de OR year:>=1995": lambda line: line["lang"] == "de" or line["year"] >= 1995,
}


def frame(num: int, seed: int) -> pl.DataFrame:
    draw = random.Random(seed)
    return pl.DataFrame(
        {
            "lang": [draw.choice(["de", "en", "fr"]) for _ in range(num)],
            "year": [draw.randint(1990, 1999) for _ in range(num)],
        }
    )


class Plain:
    """The same by lists."""

    def __init__(self) -> None:
        self.vectors: dict[int, torch.Tensor] = {}
        self.lines: dict[int, dict] = {}

    def put(self, numbers: list[int], vectors: torch.Tensor, lines: pl.DataFrame) -> None:
        for number, vector, line in zip(numbers, vectors, lines.to_dicts(), strict=True):
            self.vectors[number], self.lines[number] = vector, line

    def search(self, query: torch.Tensor, *, k: int, wanted: str | None, seen: list[int]) -> list[int]:
        passing = [n for n in self.vectors if FILTERS[wanted](self.lines[n]) and n not in seen]
        scores = {number: float((self.vectors[number] * query).sum()) for number in passing}
        best = sorted(passing, key=lambda number: -scores[number])[:k]
        return best + [-1] * (k - len(best))

    def catalogue(self, num: int) -> pl.DataFrame:
        return pl.DataFrame([self.lines.get(number, {"lang": "de", "year": 1990}) for number in range(num)])


def agrees(index: ItemIndex, plain: Plain, *, draw: random.Random, k: int = 10) -> bool:
    queries = torch.randn(4, 8, generator=torch.Generator().manual_seed(draw.randrange(10**6)))
    wanted = [draw.choice(list(FILTERS)) for _ in range(4)]
    seen = [draw.choice([None, torch.tensor([0, 5, 10**6]), torch.arange(30)]) for _ in range(4)]
    answers = index.search(queries, k=k, filters=wanted, exclude=seen, probes=10**6)
    expected = [
        plain.search(query, k=k, wanted=own, seen=[] if gone is None else gone.tolist())
        for query, own, gone in zip(queries, wanted, seen, strict=True)
    ]
    return answers.items.tolist() == expected


@pytest.mark.parametrize("seed", range(6))
def test_changes_are_seen_at_once_and_survive_a_merge(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    vectors, lines, plain = torch.randn(300, 8, generator=generator), frame(300, seed), Plain()
    plain.put(list(range(300)), vectors, lines)
    index = ItemIndex.build(vectors, items=lines, config=CONFIG)
    older: ItemIndex | None = None
    for step in range(10):
        num = draw.randint(1, 20)
        vectors, lines = torch.randn(num, 8, generator=generator), frame(num, 100 * seed + step)
        match draw.choice(["add", "update", "delete", "merge"]):
            case "add":
                plain.put(index.add(vectors, items=lines).tolist(), vectors, lines)
            case "update":
                numbers = draw.sample(range(300), num)
                index.update(torch.tensor(numbers), vectors, items=lines)
                plain.put(numbers, vectors, lines)
            case "delete":
                numbers = draw.sample(range(300), num)
                index.delete(numbers)
                for number in numbers:
                    plain.vectors.pop(number, None)
            case "merge":
                older, index = index, index.merged(plain.catalogue(index._live.next_number))
                assert index._live.fresh is None
        assert agrees(index, plain, draw=draw), step
        assert len(index) == len(plain.vectors)
    if older is not None and older.version < index.version:
        with pytest.raises(ConfigError, match="merged from"):
            index.catch_up(older)


def test_a_merged_index_catches_up_with_what_changed_meanwhile() -> None:
    index, draw = ItemIndex.build(torch.randn(200, 8), items=frame(200, 0), config=CONFIG), random.Random(0)
    merged = index.merged(frame(200, 0))
    new = index.add(torch.randn(7, 8), items=frame(7, 1))
    index.delete([3, int(new[0])])
    index.update(torch.tensor([4]), torch.randn(1, 8), items=frame(1, 2))
    merged.catch_up(index)
    queries, wanted = torch.randn(5, 8), [draw.choice(list(FILTERS)) for _ in range(5)]
    first, second = (each.search(queries, k=9, filters=wanted, probes=99) for each in (index, merged))
    assert torch.equal(first.items, second.items)
    assert merged.version == index.version == 3


def test_a_merged_index_looks_into_the_same_share_of_its_clusters() -> None:
    index = ItemIndex.build(torch.randn(400, 8))
    index.vectors.keep_tuned(20, k=10)
    index.add(torch.randn(3200, 8))
    merged = index.merged()
    assert merged.vectors.num_clusters == pytest.approx(3 * index.vectors.num_clusters, rel=0.1)
    assert merged.vectors.probes_for(10) == pytest.approx(60, rel=0.1)
    assert merged.vectors.tuned_k == 10


@pytest.mark.parametrize("kind", [PlanKind.CLUSTERS, PlanKind.ROWS, PlanKind.BLOCK, PlanKind.POST_FILTER])
def test_every_plan_gives_the_same_answer(kind: PlanKind, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)  # one draw in twenty-five leaves too little after the filter of `post_filter`
    vectors, lines, plain = torch.randn(3000, 8), frame(3000, 0), Plain()
    plain.put(list(range(3000)), vectors, lines)
    index = ItemIndex.build(vectors, items=lines, config=CONFIG)
    monkeypatch.setattr(planner, "_LISTED_NS", 1e9 if kind is PlanKind.CLUSTERS else 1e-9)
    monkeypatch.setattr(planner, "_EXACT_BONUS", 1e-9 if kind is PlanKind.CLUSTERS else 1e9)
    monkeypatch.setattr(main_search, "_BLOCK_USES", 1 if kind is PlanKind.BLOCK else 99)
    if kind is PlanKind.POST_FILTER:
        monkeypatch.setattr(planner, "_POST_FILTER_ROWS", 0)
        monkeypatch.setattr(planner, "_POST_FILTER_SHARE", 0.2)
    queries = torch.randn(3, 8)
    # With 19 of 20 clusters read, only what is in the last could be missed: nothing of these.
    answers = index.search(queries, k=10, filters=["lang:de"] * 3, probes=7 if kind is PlanKind.CLUSTERS else 20)
    assert {plan.kind for plan in answers.plans} == {kind}
    for query, items in zip(queries, answers.items.tolist(), strict=True):
        expected = plain.search(query, k=10, wanted="lang:de", seen=[])
        assert len(set(items) & set(expected)) >= (8 if kind is PlanKind.CLUSTERS else 10)


def test_a_post_filter_that_gives_too_little_is_replaced_by_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(2000, 8)
    query = torch.randn(1, 8)
    near = (vectors @ query[0]).argsort(descending=True)[:400]
    lines = frame(2000, 0).with_columns(lang=pl.lit("de"))
    lines[near.tolist(), "lang"] = "fr"  # most pass, but none of the nearest
    index = ItemIndex.build(vectors, items=lines, config=CONFIG)
    monkeypatch.setattr(planner, "_POST_FILTER_ROWS", 0)
    answers = index.search(query, k=10, filters=["lang:de"], probes=20)
    scores = (vectors @ query[0]).index_fill(0, near, -torch.inf)
    assert answers.items[0].tolist() == scores.topk(10).indices.tolist()
    assert answers.plans[0].kind is not PlanKind.POST_FILTER


def test_the_planner_reads_more_clusters_for_filters_that_let_less_pass() -> None:
    own = Planner(num_rows=1_000_000, num_clusters=4000, row_bytes=64)
    plans = [own.filtered(k=100, probes=40, passing=passing, cached=False) for passing in (900_000, 100_000, 10_000, 9)]
    assert [plan.kind for plan in plans] == [PlanKind.CLUSTERS, PlanKind.CLUSTERS, PlanKind.ROWS, PlanKind.ROWS]
    assert 40 <= plans[0].probes < plans[1].probes < 400
    assert "10.000% pass, 160 clusters" in str(plans[1])


def test_frequent_filters_are_cached_within_bounds() -> None:
    index = ItemIndex.build(torch.randn(2000, 8), items=frame(2000, 0), config=ItemIndexConfig(cache_bytes=40_000))
    query = torch.randn(1, 8)
    first, second = (index.search(query, k=5, filters=["lang:de AND year:1999"]) for _ in range(2))
    assert torch.equal(first.items, second.items)
    assert second.plans[0].kind is PlanKind.BLOCK
    for year in range(1990, 2000):
        for lang in ("de", "en", "fr"):
            for _ in range(3):
                index.search(query, k=5, filters=[f"lang:{lang} AND year:{year}"])
    assert 0 < index.cache.num_bytes <= 40_000
    assert index.cache.num_bytes == sum(each.num_bytes() for each in index.cache._kept.values())


@pytest.mark.parametrize("kept", ["none", "float32"])
def test_a_batch_of_cached_and_other_filters_answers_as_each_alone(kept: str) -> None:
    vectors = torch.randn(600, 8, generator=torch.Generator().manual_seed(3))
    config = ItemIndexConfig(vectors=VectorIndexConfig(num_clusters=20, kept=kept))  # type: ignore[arg-type]
    index = ItemIndex.build(vectors, items=frame(600, seed=1), config=config)
    wanted = ["year:1999 AND lang:de", None, "year:1990 AND lang:fr", "year:>=1991", "year:1999 AND lang:de"]
    queries = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
    index.search(queries, k=9, filters=wanted)
    for some in ([0, 1, 2, 3, 4], [0, 2, 4]):
        together = index.search(queries[some], k=9, filters=[wanted[i] for i in some])
        assert PlanKind.BLOCK in {plan.kind for plan in together.plans}
        for at, i in enumerate(some):
            alone = index.search(queries[i : i + 1], k=9, filters=[wanted[i]])
            assert torch.equal(alone.items[0], together.items[at])
            assert torch.equal(alone.scores[0], together.scores[at])


def test_queries_of_another_width_are_refused_for_a_cached_filter_too() -> None:
    index = ItemIndex.build(torch.randn(600, 8), items=frame(600, seed=1))
    index.search(torch.randn(2, 8), k=3, filters=["year:1999"] * 2)
    answers = index.search(torch.randn(2, 8), k=3, filters=["year:1999"] * 2)
    assert {plan.kind for plan in answers.plans} == {PlanKind.BLOCK}
    for queries in (torch.randn(2, 4), torch.randn(2, 9)):
        with pytest.raises(DataError, match="queries of 8 numbers"):
            index.search(queries, k=3, filters=["year:1999"] * 2)
    for k in (0, 2**21):
        with pytest.raises(ConfigError, match="k from 1"):
            index.search(torch.randn(2, 8), k=k, filters=["year:1999"] * 2)


def test_a_saved_index_answers_alike_and_items_not_merged_are_refused() -> None:
    index = ItemIndex.build(torch.randn(200, 8), items=frame(200, 0), config=CONFIG)
    index.delete([0, 7])
    loaded = ItemIndex.from_state(load(save(index.state_dict())))
    queries = torch.randn(3, 8)
    first, second = (each.search(queries, k=200, filters=[None, "lang:de", None]) for each in (index, loaded))
    assert torch.equal(first.items, second.items)
    assert torch.equal(first.scores, second.scores)
    assert not torch.isin(torch.tensor([0, 7]), first.items).any()
    index.add(torch.randn(1, 8), items=frame(1, 0))
    with pytest.raises(ConfigError, match="merged"):
        index.state_dict()


def test_explanations_speak_of_the_item_as_it_is() -> None:
    index = ItemIndex.build(torch.randn(20, 8), items=frame(20, 0).with_columns(lang=pl.lit("de")), config=CONFIG)
    assert "de" in index.explain("lang:de", 3)
    index.update(torch.tensor([3]), torch.randn(1, 8), items=pl.DataFrame({"lang": ["en"], "year": [1990]}))
    assert "en" in index.explain("lang:de", 3)
    index.delete([4])
    assert index.explain("lang:de", 4) == "item 4 is deleted"


def test_what_cannot_be_is_refused() -> None:
    index = ItemIndex.build(torch.randn(20, 8), items=frame(20, 0), config=CONFIG)
    query = torch.randn(1, 8)
    with pytest.raises(FilterError):
        index.search(query, k=1, filters=["lang:"])
    with pytest.raises(ConfigError, match="one for each of 1"):
        index.search(query, k=1, filters="lang:de")
    with pytest.raises(DataError, match="a line for each"):
        index.add(torch.randn(2, 8), items=frame(1, 0))
    with pytest.raises(DataError, match="-1"):
        index.delete([-1])
    with pytest.raises(DataError, match="twice"):
        index.update(torch.tensor([1, 1]), torch.randn(2, 8), items=frame(2, 0))
    with pytest.raises(DataError, match="lines of all"):
        index.merged(frame(19, 0))
    with pytest.raises(DataError, match="one line for each"):
        ItemIndex.build(torch.randn(3, 2), items=frame(2, 0))
    with pytest.raises(ConfigError, match="vectors alone"):
        ItemIndex.build(torch.randn(3, 8)).search(query, k=1, filters=["lang:de"])


def test_arrays_of_other_libraries_are_vectors_too() -> None:
    array = np.random.default_rng(0).normal(size=(50, 4))
    index = ItemIndex.build(torch.from_numpy(array).float())
    expected = index.search(torch.from_numpy(array[:3]).float(), k=5).items
    for vectors in (array, array.astype(np.float32), pl.Series(array), array.tolist()):
        assert ItemIndex.build(vectors).search(array[:3], k=5).items.equal(expected)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match="as a tensor or an array"):
        ItemIndex.build("vectors.npy")  # pyright: ignore[reportArgumentType]


def test_vectors_of_whole_numbers_are_led_to_floats_of_their_own_library() -> None:
    vectors: Any = np.ones((3, 4), dtype=np.int64)
    with pytest.raises(DataError) as raised:
        ItemIndex.build(vectors)
    assert any('vectors.astype("float32")' in way for way in raised.value.ways_out)
    assert len(ItemIndex.build(vectors.astype("float32")).search(torch.ones(1, 4), k=2).items[0]) == 2
