"""The vector index: exact where it looks everywhere, the same after saving, and loud about bad input."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from ziggurat.errors import ConfigError, DataError
from ziggurat.ops.bitmask import pack_mask
from ziggurat.ops.scan import Found
from ziggurat.retrieval.vectors import FirstPass, Kept, VectorIndex, VectorIndexConfig, recall_of
from ziggurat.testing.pretend_cuda import pretend_cuda


def clustered(num: int, dim: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(60, dim, generator=generator)
    vectors = centres[torch.randint(0, 60, (num,), generator=generator)]
    return torch.nn.functional.normalize(vectors + 0.6 * torch.randn(num, dim, generator=generator), dim=1)


@pytest.fixture(scope="module")
def index() -> VectorIndex:
    return VectorIndex.build(clustered(6000, 24), config=VectorIndexConfig(kept=Kept.FLOAT32, num_clusters=64))


def test_positions_lead_back_to_the_vectors(index: VectorIndex) -> None:
    assert index.order.sort().values.tolist() == list(range(6000))
    assert torch.equal(index.vectors(torch.arange(6000)), clustered(6000, 24)[index.order])


@pytest.mark.parametrize("share", [None, 0.5, 0.01])
def test_all_clusters_with_kept_vectors_give_the_exact_answer(index: VectorIndex, share: float | None) -> None:
    queries = clustered(30, 24, seed=1)
    passes = torch.ones(30, 6000, dtype=torch.bool) if share is None else torch.rand(30, 6000) < share
    masks = None if share is None else pack_mask(passes)
    scores = (queries @ index.vectors(torch.arange(6000)).t()).masked_fill(~passes, -torch.inf)
    truth = scores.topk(50)
    exact = index.exact(queries, k=50, masks=masks)
    torch.testing.assert_close(exact.scores, truth.values)
    found = index.search(queries, k=50, masks=masks, probes=64, rerank=200)
    torch.testing.assert_close(found.scores, truth.values)
    assert recall_of(found.positions, exact.positions) == 1.0


def test_few_clusters_find_most_and_reranking_finds_more(index: VectorIndex) -> None:
    queries = clustered(100, 24, seed=1)
    exact = index.exact(queries, k=20).positions
    plain = recall_of(index.search(queries, k=20, probes=16, rerank=0).positions, exact)
    better = recall_of(index.search(queries, k=20, probes=16).positions, exact)
    assert 0.9 < plain < better


def test_tune_finds_the_fewest_probes(index: VectorIndex) -> None:
    queries = clustered(100, 24, seed=2)
    probes = index.tune(queries, k=20, recall=0.95)
    exact = index.exact(queries, k=20).positions
    assert index.default_probes == probes < 64
    assert recall_of(index.search(queries, k=20).positions, exact) >= 0.95
    assert recall_of(index.search(queries, k=20, probes=probes - 1).positions, exact) < 0.95
    untuned = VectorIndex()
    untuned.load_state_dict(index.state_dict())
    assert untuned.tuned_k == 20
    untuned.default_probes = 0
    assert [index.probes_for(k) for k in (1, 20)] == [probes, probes]
    assert index.probes_for(21) == max(probes, untuned.probes_for(21)), "a larger k was never tried"
    assert index.probes_for(6000) == index.num_clusters
    index.default_probes = 5
    assert index.probes_for(6000) == 5, "said, not tuned"
    index.default_probes = 0


def test_a_block_of_rows_answers_as_the_rows_do(index: VectorIndex) -> None:
    queries, rows = clustered(5, 24, seed=3), torch.arange(0, 6000, 7)
    block, direct = index.row_block(rows), index.scan_rows(queries, k=9, rows=[rows] * 5)
    found = block.search(queries, k=9)
    assert torch.equal(found.positions, direct.positions)
    assert torch.equal(found.scores, direct.scores)
    assert block.num_bytes() < index.num_bytes() / 3


def test_a_saved_index_answers_alike(index: VectorIndex) -> None:
    loaded = VectorIndex()
    loaded.load_state_dict(load(save(index.state_dict())))
    queries = clustered(5, 24, seed=4)
    before, after = index.search(queries, k=7), loaded.search(queries, k=7)
    assert torch.equal(before.positions, after.positions)
    assert torch.equal(before.scores, after.scores)
    assert loaded.dim == 24


def test_the_same_seed_gives_the_same_index() -> None:
    vectors = clustered(3000, 16)
    first, second = (VectorIndex.build(vectors).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_memory_without_kept_vectors_is_small() -> None:
    index = VectorIndex.build(torch.randn(20_000, 64), config=VectorIndexConfig(num_clusters=100))
    assert index.num_bytes() / 20_000 / 64 < 1.2


def test_an_index_answers_alike_on_another_device() -> None:
    index = VectorIndex.build(clustered(500, 12), config=VectorIndexConfig(kept=Kept.FLOAT32, num_clusters=9))
    queries, masks, rows = clustered(4, 12, seed=5), pack_mask(torch.rand(4, 500) < 0.3), torch.arange(0, 500, 3)

    def answers(*given: torch.Tensor) -> list[Found]:
        queries, masks, rows = given
        return [
            index.search(queries, k=7, probes=3),
            index.search(queries, k=7, masks=masks, probes=2),
            index.search(queries, k=7, masks=[None, *masks[1:]]),
            index.exact(queries, k=7, masks=masks),
            index.scan_rows(queries, k=4, rows=[rows, rows, rows, None]),
            index.row_block(rows).search(queries, k=9),
        ]

    before = answers(queries, masks, rows)
    with pretend_cuda() as device:
        index.to(device)
        after = answers(queries.to(device), masks.to(device), rows.to(device))
        found = [Found(*(each.cpu() for each in one)) for one in after]
        for wrong in ({"queries": queries}, {"queries": queries.to(device), "masks": masks}):
            with pytest.raises(DataError, match="on the device of the index, cuda:0"):
                index.search(**wrong, k=1)  # type: ignore[arg-type]
    for first, second in zip(before, found, strict=True):
        assert torch.equal(first.positions, second.positions)
        torch.testing.assert_close(first.scores, second.scores)


@pytest.mark.parametrize("num", [0, 1, 2, 65])
def test_small_catalogues_are_answered_whole(num: int) -> None:
    vectors = torch.ones(num, 3)  # all alike: the smaller position comes first
    found = VectorIndex.build(vectors).search(torch.ones(2, 3), k=70)
    assert found.positions[0].tolist() == [*range(num), *[-1] * (70 - num)]
    assert bool(torch.isneginf(found.scores[:, num:]).all())


def test_bad_vectors_and_questions_are_refused(index: VectorIndex) -> None:
    vectors = torch.randn(10, 4)
    vectors[3, 2] = torch.nan
    with pytest.raises(DataError, match="row 3"):
        VectorIndex.build(vectors)
    with pytest.raises(DataError, match="one column"):
        VectorIndex.build(torch.zeros(3, 0))
    with pytest.raises(DataError, match="floating-point"):
        VectorIndex.build(torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(DataError, match="24 numbers"):
        index.search(torch.randn(1, 23), k=1)
    for k in (0, 10**12, True, 2.5):
        with pytest.raises(ConfigError, match="from 1 to"):
            index.search(torch.randn(1, 24), k=k)
    for probes in (-1, 1.5, True):
        with pytest.raises(ConfigError, match="probes from 0"):
            index.search(torch.randn(1, 24), k=1, probes=probes)
    for size in (1e-38, 1e38):
        with pytest.raises(DataError, match="row 0"):
            VectorIndex.build(torch.full((3, 4), size))
    with pytest.raises(ConfigError, match="94 words"):
        index.search(torch.randn(1, 24), k=1, masks=torch.zeros(93, dtype=torch.int64))
    with pytest.raises(ConfigError, match="kept vectors"):
        VectorIndex.build(torch.randn(9, 4)).search(torch.randn(1, 4), k=1, rerank=5)


def test_the_upper_bits_are_read_first_where_that_finds_the_best() -> None:
    vectors, queries = clustered(17_000, 24), clustered(50, 24, seed=1)
    index = VectorIndex.build(vectors, config=VectorIndexConfig(num_clusters=32))
    assert 150 <= index.candidate_percent <= 800
    everything = index.search(queries, k=20, probes=32, candidates=0).positions
    assert torch.equal(everything, index.exact(queries, k=20).positions)
    assert recall_of(index.search(queries, k=20, probes=32).positions, everything) >= 0.99
    vectors = 1 + 0.02 * vectors  # all alike in their upper bits
    assert VectorIndex.build(vectors, config=VectorIndexConfig(num_clusters=32)).candidate_percent == 0
    off = VectorIndexConfig(num_clusters=32, first_pass=FirstPass.OFF)
    assert VectorIndex.build(vectors, config=off).candidate_percent == 0


def test_an_index_that_was_saved_with_whole_rows_is_read(index: VectorIndex) -> None:
    state = index.state_dict()
    for name in ("", "centroid_"):
        planes = [state.pop(f"{name}{plane}") for plane in ("upper", "lower")]
        upper, lower = (torch.cat([plane & 15, plane >> 4], 1) for plane in planes)
        state[f"{name}codes"] = 16 * upper + lower
    state["sizes"] = state["sizes"][:2]
    loaded, queries = VectorIndex(), clustered(5, 24, seed=4)
    loaded.load_state_dict(state)
    before, after = index.search(queries, k=7), loaded.search(queries, k=7)
    assert torch.equal(before.positions, after.positions)
    assert torch.equal(before.scores, after.scores)
