"""Interactions are the mean |cosine|, whatever the batches; what has no cosine does not count."""

from __future__ import annotations

import pytest
import torch

from ziggurat.errors import DataError, NumericsError
from ziggurat.planning.towers import affinity as interactions
from ziggurat.planning.towers.affinity import InteractionSums, pad_fields


def reference(fields_BFD: torch.Tensor) -> torch.Tensor:
    """One pair and one sample at a time."""
    num_features = fields_BFD.shape[1]
    matrix = torch.eye(num_features, dtype=torch.float64)
    for i in range(num_features):
        for j in range(num_features):
            values = [
                abs(float(torch.nn.functional.cosine_similarity(a[i].double(), a[j].double(), dim=0)))
                for a in fields_BFD
                if a[i].any() and a[j].any()
            ]
            if i != j:
                matrix[i, j] = sum(values) / len(values) if values else 0.0
    return matrix


def random_fields(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_mean_of_absolute_cosines_over_samples_that_have_both() -> None:
    fields_BFD = random_fields(40, 5, 8)
    fields_BFD[::3, 1] = 0  # empty lists
    fields_BFD[:, 4] = 0
    fields_BFD[:20, 2] = -3 * fields_BFD[:20, 3]
    sums = InteractionSums(5)
    sums.add(fields_BFD)
    torch.testing.assert_close(sums.matrix, reference(fields_BFD), atol=1e-6, rtol=0)
    assert float(sums.matrix[2, 3]) > 0.5
    assert not sums.matrix[4, :4].any()
    assert sums.num_samples == 40


def test_batches_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fields_BFD = random_fields(50, 6, 4)
    whole, parts = InteractionSums(6), InteractionSums(6)
    whole.add(fields_BFD)
    monkeypatch.setattr(interactions, "_CHUNK_NUMBERS", 100)
    for batch in (fields_BFD[:0], fields_BFD[:1], fields_BFD[1:30], fields_BFD[30:]):
        parts.add(batch)
    torch.testing.assert_close(whole.matrix, parts.matrix, atol=1e-7, rtol=0)


def test_scale_of_an_embedding_does_not_matter() -> None:
    fields_BFD = random_fields(20, 3, 4)
    left, right = InteractionSums(3), InteractionSums(3)
    left.add(fields_BFD)
    right.add(fields_BFD * torch.tensor([1e-12, 1.0, 1e12]).view(3, 1))
    torch.testing.assert_close(left.matrix, right.matrix, atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    fields_BFD = random_fields(4, 3, 2)
    fields_BFD[2, 1, 0] = value
    with pytest.raises(NumericsError, match="finite embeddings"):
        InteractionSums(3).add(fields_BFD)


def test_no_sample_is_an_error() -> None:
    with pytest.raises(DataError, match="at least one sample"):
        _ = InteractionSums(3).matrix


def test_narrow_fields_are_filled_with_zeros() -> None:
    pooled_BT = random_fields(3, 6)
    padded_BFD = pad_fields(pooled_BT, field_dims=(4, 2))
    assert padded_BFD.shape == (3, 2, 4)
    assert padded_BFD[:, 0].equal(pooled_BT[:, :4])
    assert padded_BFD[:, 1, :2].equal(pooled_BT[:, 4:])
    assert not padded_BFD[:, 1, 2:].any()
    assert pad_fields(pooled_BT, field_dims=(3, 3)).data_ptr() == pooled_BT.data_ptr()
