"""The plane reproduces distances that fit one, and is the same for the same seed."""

from __future__ import annotations

import pytest
import torch

from ziggurat.errors import ConfigError
from ziggurat.planning.towers.plane import PlaneConfig, classical_scaling, learn_plane


def distances_of(points: torch.Tensor) -> torch.Tensor:
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def random_points(num: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_distances_that_fit_are_reproduced(dim: int) -> None:
    distances = distances_of(random_points(20, dim))
    plane = learn_plane(distances, config=PlaneConfig(dim=dim))
    assert plane.coordinates.shape == (20, dim)
    assert plane.stress < 1e-5
    torch.testing.assert_close(distances_of(plane.coordinates), distances, atol=1e-4, rtol=0)


def test_it_lowers_the_stress_of_its_starts_and_repeats() -> None:
    distances = distances_of(random_points(30, 8))
    start = classical_scaling(distances, dim=2)
    stress = float(((distances_of(start) - distances).square().sum() / distances.square().sum()).sqrt())
    plane = learn_plane(distances, seed=3)
    again = learn_plane(distances, seed=3)
    assert plane.stress < 0.7 * stress
    assert plane.coordinates.equal(again.coordinates)
    shown = distances_of(plane.coordinates)
    assert float(((shown - distances).square().sum() / distances.square().sum()).sqrt()) == pytest.approx(plane.stress)


def test_classical_scaling_is_exact_in_enough_dimensions() -> None:
    distances = distances_of(random_points(12, 5))
    torch.testing.assert_close(distances_of(classical_scaling(distances, dim=5)), distances)
    wide = classical_scaling(distances, dim=40)
    assert wide.shape == (12, 40)
    torch.testing.assert_close(distances_of(wide), distances, atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_features", [1, 2, 5])
def test_features_at_one_point_stay_finite(num_features: int) -> None:
    zero = torch.zeros(num_features, num_features, dtype=torch.float64)
    assert not learn_plane(zero).coordinates.any()
    one = 1 - torch.eye(num_features, dtype=torch.float64)
    one[-1, :-1] = one[:-1, -1] = 0
    plane = learn_plane(one)
    assert bool(torch.isfinite(plane.coordinates).all())


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="dim >= 1"):
        PlaneConfig(dim=0)
