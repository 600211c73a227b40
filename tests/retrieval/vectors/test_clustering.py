"""k-means in two levels: as good as plain k-means, and without clusters that are empty."""

from __future__ import annotations

import torch

from ziggurat.retrieval.vectors import clustering
from ziggurat.retrieval.vectors.clustering import cluster


def blobs(num: int, *, num_blobs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    centres = 5 * torch.randn(num_blobs, 8, generator=generator)
    return centres[torch.randint(0, num_blobs, (num,), generator=generator)] + torch.randn(num, 8, generator=generator)


def squared_error(vectors: torch.Tensor, centroids: torch.Tensor, labels: torch.Tensor) -> float:
    return float((vectors - centroids[labels]).square().sum(1).mean())


def test_two_levels_are_about_as_good_as_plain_k_means() -> None:
    vectors = blobs(20_000, num_blobs=200)
    found = cluster(vectors, num_clusters=400)
    plain = clustering._means(vectors[:10_000], 400, torch.Generator().manual_seed(0))
    error = squared_error(vectors, plain, clustering._nearest(vectors, plain))
    assert squared_error(vectors, *found) < 1.05 * error


def test_every_cluster_has_vectors_and_its_mean() -> None:
    for vectors in (blobs(5000, num_blobs=3), torch.ones(1000, 2), blobs(500, num_blobs=9)):
        centroids, labels = cluster(vectors, num_clusters=400)
        assert labels.unique().tolist() == list(range(len(centroids)))
        means = torch.zeros_like(centroids).index_add_(0, labels, vectors) / torch.bincount(labels).unsqueeze(1)
        torch.testing.assert_close(centroids, means, rtol=1e-4, atol=1e-4)


def test_shares_add_up() -> None:
    sizes = torch.tensor([5, 0, 1, 994])
    assert clustering._shares(sizes, 10).sum() == 10
    assert clustering._shares(sizes, 1000).tolist() == sizes.tolist()
