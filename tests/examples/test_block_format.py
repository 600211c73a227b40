"""A block format from outside the package: rounded, packed, reported, trained and scored by the kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

from tests.numerics.tensors import hard_numbers, same_bits
from tests.parallel.test_parity import build, inputs
from tests.precision.test_dispatch import product_of
from ziggurat.cli.main import main
from ziggurat.config import from_json
from ziggurat.numerics import BlockFormat, quantise, quantise_reference
from ziggurat.numerics.kernel import quantise_fast
from ziggurat.numerics.linear import linear, linear_reference, pack_linear
from ziggurat.numerics.packing import pack, unpack
from ziggurat.numerics.probe import Direction, ProbeRecord
from ziggurat.numerics.qsnr import measure_qsnr
from ziggurat.precision import Precision
from ziggurat.precision.kernels import ProductKernel
from ziggurat.runs.products import product_errors
from ziggurat.testing.batches import random_batch
from ziggurat.training.config import TrainingConfig
from ziggurat.training.step.train_step import TrainStep


@pytest.fixture(scope="module")
def seven_bits() -> Iterator[BlockFormat]:
    """The format, listed while these tests run: others of this process ask for all that are listed."""
    module = importlib.import_module("examples.extensions.seven_bits")
    # A test of this process may have taken them off the lists since the module was imported.
    Precision.add(module.SEVEN_BIT_PRODUCTS)
    yield BlockFormat.add(module.SEVEN_BITS)
    del BlockFormat._listed["seven_bits"]
    del Precision._members["seven_bits"]


def test_its_error_lies_between_those_of_its_neighbours(seven_bits: BlockFormat) -> None:
    assert seven_bits.bits_per_element == 7
    mx6, own, mx9 = measure_qsnr([BlockFormat.named("mx6"), seven_bits, BlockFormat.named("mx9")], num_vectors=500)
    assert own - mx6 == pytest.approx(6.02, abs=0.3)
    assert mx9 - own == pytest.approx(2 * 6.02, abs=0.3)


def test_kernels_take_it_to_the_bit(seven_bits: BlockFormat) -> None:
    x = hard_numbers(seven_bits, 9, 40, seed=0)
    for axis in (0, 1):
        fast = quantise_fast(x, seven_bits, axis)
        reference = quantise_reference(x, seven_bits, axis)
        assert same_bits(quantise(x, seven_bits, axis), reference)
        assert fast is None or same_bits(fast, reference)
    packed = pack(x[:, :32], seven_bits, axis=1)
    assert packed.rows.shape == (9, 32 * 7 // 8)
    assert same_bits(unpack(packed), quantise_reference(x[:, :32], seven_bits, axis=1))


def test_a_layer_is_scored_in_its_integers(seven_bits: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 48, generator=generator)
    x = torch.randn(9, 48, generator=generator)
    map = pack_linear(weight, seven_bits)
    assert not map.is_wide
    assert same_bits(linear(x, map), linear_reference(x, map))
    wanted = x @ quantise(weight, seven_bits, 1).T
    assert (linear(x, map) - wanted).norm() < 0.01 * wanted.norm()


def test_a_step_takes_it_by_name(seven_bits: BlockFormat) -> None:
    del seven_bits
    config = from_json(TrainingConfig, {"precision": "seven_bits"}, where="test")
    step = TrainStep(build(towers=None, optimizer="rowwise_adagrad"), config)
    assert step.products == "seven_bits in 5 modules"
    batch = random_batch(inputs(), 64, seed=1)
    losses = [float(step(batch).loss) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_errors_of_its_products_are_measured_whenever_it_was_listed(seven_bits: BlockFormat) -> None:
    assert "seven_bits" not in {kernel.name for kernel in ProductKernel}  # these were listed before it
    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    record = ProbeRecord(model="DNN", products={"layer": product_of(rows, rows[:48].T.contiguous())})
    found = product_errors(record, kernels=("mx6", "seven_bits", "mx9")).errors["layer"][Direction.FORWARD]
    assert found["mx9"].error < found["seven_bits"].error < found["mx6"].error
    del ProductKernel._members["seven_bits"]


def test_the_report_of_formats_has_it(seven_bits: BlockFormat, capsys: pytest.CaptureFixture[str]) -> None:
    del seven_bits
    assert main(["numerics", "formats", "seven_bits", "mx6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("seven_bits" in line and "an example" in line for line in lines)
