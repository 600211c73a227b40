"""Shards of an index: the answers of all of them together against those of the whole, changes included."""

from __future__ import annotations

import polars as pl
import pytest
import torch
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.ops.bitmask import pack_mask
from ziggurat.retrieval.item_index import ItemIndex, ItemIndexConfig
from ziggurat.retrieval.sharding import PartFound, ShardChange, ShardIndex, is_of_shard, merged
from ziggurat.retrieval.vectors import VectorIndexConfig
from ziggurat.retrieval.vectors.index import Kept

NUM_QUERIES = 5
FILTERS = [None, "group:a", "NOT group:a", "group IN (a, c)", None]


def lines(num: int) -> pl.DataFrame:
    return pl.DataFrame({"group": [["a", "b", "c"][i % 3] for i in range(num)]})


def draw(seed: int, *, kept: Kept) -> tuple[ItemIndex, list[ShardIndex], Tensor, int]:
    """An index with many equal vectors, its shards, queries, and a k."""
    torch.manual_seed(seed)
    num, dim, num_shards, k = (int(torch.randint(1, most, ())) for most in (300, 20, 6, 20))
    vectors = torch.randn(num, dim)
    vectors[num // 2 :] = vectors[: num - num // 2].clone()
    config = ItemIndexConfig(vectors=VectorIndexConfig(kept=kept))
    index = ItemIndex.build(vectors, items=lines(num), config=config)
    shards = [
        ShardIndex.part_of(index, items=lines(num), shard=shard, num_shards=num_shards) for shard in range(num_shards)
    ]
    return index, shards, torch.randn(NUM_QUERIES, dim), k


@pytest.mark.parametrize("kept", [Kept.NONE, Kept.FLOAT32])
@pytest.mark.parametrize("seed", range(6))
def test_shards_together_answer_as_the_whole_does(seed: int, kept: Kept) -> None:
    index, shards, queries, k = draw(seed, kept=kept)
    exclude = [torch.tensor([0]), None, None, torch.arange(len(index) // 2), None]
    assert sum(map(len, shards)) == len(index)
    for probes in (2, max(1, index.vectors.num_clusters)):
        asked = {"k": k, "filters": FILTERS, "exclude": exclude, "probes": probes}
        whole = index.search(queries, **asked)
        found = merged([shard.search(queries, **asked) for shard in shards], order=index.vectors.stored_order, k=k)
        passing = [index.passing(wanted, exclude=seen) for wanted, seen in zip(FILTERS, exclude, strict=True)]
        exact = index.vectors.exact(queries, k=k, masks=pack_mask(torch.stack(passing)[:, index.vectors.order]))
        assert (found.scores >= whole.scores).all(), "no shard misses what the whole finds"
        is_exact = torch.isclose(whole.scores, exact.scores, atol=1e-5).all(1)
        assert torch.equal(found.positions[is_exact], whole.items[is_exact])
        assert torch.equal(found.scores[is_exact], whole.scores[is_exact]), "bit for bit"


def changed(index: ItemIndex, shards: list[ShardIndex], *, seed: int) -> list[ShardIndex]:
    """Put 20 items, half of them new, and delete 10, in the whole and in the shards."""
    torch.manual_seed(seed)
    known = torch.randperm(len(index))
    gone, old = known[:10], known[10:20]
    numbers = torch.cat([old, torch.arange(len(index), len(index) + 10)])
    vectors, rows = torch.randn(20, index.vectors.dim), lines(20)
    index.delete(gone)
    index.update(old, vectors[:10], items=rows[:10])
    index.add(vectors[10:], items=rows[10:])
    after = []
    for shard, each in enumerate(shards):
        own = is_of_shard(numbers, shard=shard, num_shards=len(shards))
        change = ShardChange(
            numbers=numbers[own],
            vectors=vectors[own],
            items=rows.filter(pl.Series(own.numpy())),
            gone=gone[is_of_shard(gone, shard=shard, num_shards=len(shards))],
        )
        after.append(each.changed(change))
    return after


def test_shards_with_changed_items_answer_as_the_whole_does() -> None:
    index = ItemIndex.build(torch.randn(200, 8), items=lines(200))
    shards = [ShardIndex.part_of(index, items=lines(200), shard=shard, num_shards=3) for shard in range(3)]
    before = [len(each) for each in shards]
    after = changed(index, shards, seed=3)
    asked = {"k": 12, "filters": FILTERS, "exclude": [None] * NUM_QUERIES, "probes": index.vectors.num_clusters}
    queries = torch.randn(NUM_QUERIES, 8)
    whole = index.search(queries, **asked)
    found = merged([each.search(queries, **asked) for each in after], order=index.vectors.stored_order, k=12)
    assert (found.scores >= whole.scores).all()
    same = (found.scores == whole.scores).all(1)
    assert same.sum() >= NUM_QUERIES - 1
    assert torch.equal(found.positions[same], whole.items[same])
    assert [len(each) for each in shards] == before, "a shard that was changed is another one"
    assert sum(map(len, after)) == len(index) == 200


def test_the_rest_answers_without_a_shard() -> None:
    index, shards, queries, k = draw(1, kept=Kept.FLOAT32)
    none = [None] * NUM_QUERIES
    parts: list[PartFound] = [each.search(queries, k=k, filters=none, exclude=none, probes=10**6) for each in shards]
    found = merged(parts[1:], order=index.vectors.stored_order, k=k)
    there = found.positions[found.positions >= 0]
    assert len(there)
    assert not is_of_shard(there, shard=0, num_shards=len(shards)).any()


@pytest.mark.parametrize(("shard", "num_shards"), [(2, 2), (-1, 2), (0, 0), (0, 257)])
def test_a_shard_that_cannot_be_is_refused(shard: int, num_shards: int) -> None:
    index = ItemIndex.build(torch.randn(4, 2))
    with pytest.raises(ConfigError, match="shard"):
        ShardIndex.part_of(index, items=None, shard=shard, num_shards=num_shards)


def test_more_shards_than_items_are_no_harm() -> None:
    index = ItemIndex.build(torch.randn(2, 3))
    shards = [ShardIndex.part_of(index, items=None, shard=shard, num_shards=5) for shard in range(5)]
    asked = {"k": 3, "filters": [None], "exclude": [torch.tensor([1])], "probes": 4}
    found = merged([each.search(torch.ones(1, 3), **asked) for each in shards], order=index.vectors.stored_order, k=3)
    assert found.positions.tolist() == [[0, -1, -1]]
