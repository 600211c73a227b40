"""Statistics of operands equal plain formulas over all rows, and draws have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ziggurat.errors import DataError, MissingFileError
from ziggurat.numerics.probe import Direction, MatrixNormal, Moments, ProbeRecord, ProductStatistics
from ziggurat.numerics.probe.matrix_normal import FULL_SIDE, MOMENTUM
from ziggurat.numerics.probe.moments import FULL_WIDTH, RANK
from ziggurat.numerics.probe.record import newest_probe


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def correlated(num_rows: int, width: int) -> Tensor:
    """Rows with means and with scales from 0.01 to 100, mixed."""
    generator = seeded(width)
    scales = torch.logspace(-2, 2, width)
    mix = torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator) / width**0.5
    return (torch.randn(num_rows, width, generator=generator) * scales) @ mix + scales


def test_moments_of_batches_are_those_of_all_rows() -> None:
    rows = correlated(1000, 40)
    moments = Moments(40)
    for batch in rows.split([1, 7, 500, 0, 492]):
        moments.update(batch)
    assert moments.count == 1000
    torch.testing.assert_close(moments.mean, rows.mean(dim=0), rtol=1e-4, atol=1e-4)
    wanted = rows.double().t().cov()
    error = (moments.covariance() - wanted).abs() / torch.outer(wanted.diag(), wanted.diag()).sqrt()
    assert float(error.max()) < 1e-4


def test_features_of_small_variance_are_drawn_with_it() -> None:
    # Variances from e^-12 to e^12, correlated: the small ones are far below FP32's resolution of the largest.
    scales = torch.linspace(-6, 6, 40, dtype=torch.float64).exp()
    mix = torch.randn(40, 40, generator=seeded(1), dtype=torch.float64) * scales
    rows = (torch.randn(4096, 40, generator=seeded(2), dtype=torch.float64) @ mix).float()
    moments = Moments(40)
    moments.update(rows)
    drawn = moments.sample(20_000, generator=seeded(3)).double()
    # The variance of 20,000 draws is within 1 %, with four times that for 40 features.
    assert float((drawn.var(dim=0) / rows.double().var(dim=0) - 1).abs().max()) < 0.04


def test_wide_moments_keep_variances_whole_and_leading_covariances() -> None:
    width = FULL_WIDTH + 64
    generator = seeded()
    loadings = torch.randn(RANK // 2, width, generator=generator)
    rows = 5 * torch.randn(900, RANK // 2, generator=generator) @ loadings
    rows += 0.1 * torch.randn(900, width, generator=generator) + 3
    moments = Moments(width)
    for batch in rows.split(100):
        moments.update(batch)
    wanted = rows.double().t().cov()
    found = moments.covariance()
    torch.testing.assert_close(found.diag(), wanted.diag().float(), rtol=1e-3, atol=1e-3)
    assert float((found - wanted).norm() / wanted.norm()) < 0.01
    assert sum(each.numel() for each in moments.tensors().values()) == 1 + (RANK + 2) * width


@pytest.mark.parametrize("width", [24, FULL_WIDTH + 8])
def test_drawn_rows_have_the_moments(width: int) -> None:
    rows = correlated(300, width)  # fewer than features, in one case: the covariance is singular
    moments = Moments(width)
    moments.update(rows)
    drawn = moments.sample(20_000, generator=seeded(1))
    deviation = moments.covariance().diag().sqrt()
    assert float(((drawn.mean(dim=0) - moments.mean) / deviation).abs().max()) < 0.05
    error = (drawn.t().cov() - moments.covariance()) / torch.outer(deviation, deviation)
    assert float(error.abs().max()) < 0.06


def plain_flip_flop(weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas by inverses, in FP64."""
    mean = weights[0].double()
    num_rows, num_columns = mean.shape
    rows, columns = torch.eye(num_rows, dtype=torch.float64), torch.eye(num_columns, dtype=torch.float64)
    for index, weight in enumerate(weights[1:]):
        centred = weight.double() - mean
        if not index:
            columns = centred.square().mean() * columns
        mean = MOMENTUM * mean + (1 - MOMENTUM) * weight.double()
        ridge = 1e-6 * columns.trace() / num_columns
        estimate = centred @ (columns + ridge * torch.eye(num_columns)).inverse() @ centred.t() / num_columns
        rows = MOMENTUM * rows + (1 - MOMENTUM) * estimate
        ridge = 1e-6 * rows.trace() / num_rows
        estimate = centred.t() @ (rows + ridge * torch.eye(num_rows)).inverse() @ centred / num_rows
        columns = MOMENTUM * columns + (1 - MOMENTUM) * estimate
        scale = rows.trace() / num_rows
        rows, columns = rows / scale, columns * scale
    return mean, rows, columns


def test_flip_flop_is_the_formula_and_finds_planted_factors() -> None:
    generator = seeded()
    of_rows = torch.diag(torch.tensor([1.0, 4.0, 0.25, 1.0]))
    of_columns = 0.01 * (torch.eye(5) + 0.8 * torch.ones(5, 5))
    centre = torch.randn(4, 5, generator=generator)
    left, right = torch.linalg.cholesky(of_rows), torch.linalg.cholesky(of_columns)
    weights = [centre + left @ torch.randn(4, 5, generator=generator) @ right.t() for _ in range(400)]
    found = MatrixNormal(4, 5)
    for weight in weights[:8]:
        found.update(weight)
    mean, rows, columns = plain_flip_flop(weights[:8])
    torch.testing.assert_close(found.mean, mean.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.kron(found.rows, found.columns), torch.kron(rows, columns).float(), rtol=1e-3, atol=1e-5
    )
    for weight in weights[8:]:
        found.update(weight)
    planted = torch.kron(of_rows, of_columns)
    assert float((torch.kron(found.rows, found.columns) - planted).norm() / planted.norm()) < 0.35
    drawn = torch.stack([found.sample(generator=generator) for _ in range(4000)]).flatten(1)
    of_draws = drawn.t().cov()
    kept = torch.kron(found.rows, found.columns)
    assert float((of_draws - kept).norm() / kept.norm()) < 0.1


def test_weight_that_never_changed_is_drawn_as_it_is() -> None:
    weight = torch.randn(6, FULL_SIDE + 3)
    found = MatrixNormal(6, FULL_SIDE + 3)
    found.update(weight)
    found.update(weight)
    assert found.sample(generator=seeded()).equal(weight)
    assert found.columns.dim() == 1  # the wide side keeps a diagonal


def test_shapes_and_draws_of_the_three_products() -> None:
    left, right = torch.randn(64, 8), torch.randn(8, 5)
    product = ProductStatistics.of("layer", left, right, weights=(False, True), shapes=((1024, 8), (8, 5)))
    product.update(left, right)
    product.update_gradient(torch.randn(64, 5))
    assert product.shapes(Direction.INPUT_GRADIENT) == ((1024, 5), (5, 8))
    assert product.shapes(Direction.WEIGHT_GRADIENT) == ((8, 1024), (1024, 5))
    for direction in Direction:
        first, second = product.operands(direction, generator=seeded())
        assert (first @ second).shape == {"f": (512, 5), "i": (512, 8), "w": (8, 5)}[direction.value[0]]
        plain = product.normal_operands(direction, generator=seeded())
        assert plain[0].shape == first.shape
        assert plain[1].shape == second.shape
    assert not product.fits(torch.randn(64, 9), torch.randn(9, 5))


def test_record_is_read_as_it_was_written_and_damage_is_refused(tmp_path: Path) -> None:
    left, right = torch.randn(64, 8), torch.randn(8, 5)
    product = ProductStatistics.of("layer", left, right, weights=(False, True), shapes=((1024, 8), (8, 5)))
    product.update(left, right)
    product.update_gradient(torch.randn(64, 5))
    record = ProbeRecord(model="dnn", step=7, num_passes=1, products={"layer": product}, left_out={"other": "why"})
    record.write(tmp_path)
    again = newest_probe(tmp_path)
    assert (again.model, again.step, again.num_passes, again.left_out) == ("dnn", 7, 1, {"other": "why"})
    for direction in Direction:
        for before, after in zip(
            product.operands(direction, generator=seeded()),
            again.products["layer"].operands(direction, generator=seeded()),
            strict=True,
        ):
            assert before.equal(after)
    tensors = tmp_path / "step_000000007.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="sha256"):
        newest_probe(tmp_path)
    with pytest.raises(MissingFileError, match="numerics probe"):
        newest_probe(tmp_path / "none")
