"""`precision auto` decides once a machine: noise decides nothing, and equal commands give equal precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ziggurat.errors import ConfigError
from ziggurat.ops.machine.matmul_rate import MatmulRates, measure_ratio
from ziggurat.precision.choice import resolve_precision, whole_products
from ziggurat.training.config import Precision

CPU = torch.device("cpu")


def measured(*ratios: float) -> Callable[[], MatmulRates]:
    """Measurements of these ratios, in order; an error when there are no more."""
    left: Iterator[float] = iter(ratios)
    return lambda: MatmulRates(fp32=100.0, bf16=100.0 * (ratio := next(left)), ratio=ratio, turns=15)


def test_a_decision_is_kept_whatever_is_measured_later(tmp_path: Path) -> None:
    first, reason = resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path, measure=measured(2.0, 2.1, 1.9))
    assert first is Precision.BF16
    assert "kept for the next starts" in reason
    for _ in range(3):  # nothing is measured any more: there is nothing left to measure
        again, reason = resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path, measure=measured())
        assert again is Precision.BF16
        assert "decided before" in reason


def test_one_disturbed_measurement_decides_nothing(tmp_path: Path) -> None:
    ratios = (0.7, 2.1, 2.0)
    chosen, _ = resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path / "a", measure=measured(*ratios))
    assert chosen is Precision.BF16
    near = (1.35, 1.2, 1.31, 1.2, 1.22, 1.1, 1.25, 1.4)  # the first three alone would say BF16
    chosen, reason = resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path / "b", measure=measured(*near))
    assert chosen is Precision.FP32
    assert "1.2" in reason


def test_the_first_of_two_processes_decides_for_both(tmp_path: Path) -> None:
    def while_another_decides() -> MatmulRates:
        resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path, measure=measured(2.0, 2.0, 2.0))
        return MatmulRates(fp32=100.0, bf16=50.0, ratio=0.5, turns=15)

    chosen, reason = resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path, measure=while_another_decides)
    assert chosen is Precision.BF16
    assert "decided before" in reason


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"precision": "auto"}', '{"precision": "fp64"}', "\0" * 50])
def test_a_damaged_decision_is_taken_anew(tmp_path: Path, content: str) -> None:
    resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path, measure=measured(2.0, 2.0, 2.0))
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    chosen, _ = resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path, measure=measured(0.5, 0.5, 0.5))
    assert chosen is Precision.FP32
    assert resolve_precision(Precision.AUTO, device=CPU, folder=tmp_path, measure=measured())[0] is Precision.FP32


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "precision"
    chosen, reason = resolve_precision(Precision.AUTO, device=CPU, folder=folder, measure=measured(2.0, 2.0, 2.0))
    assert chosen is Precision.BF16
    assert "could not be kept" in reason


def test_asked_for_is_asked_for() -> None:
    assert resolve_precision(Precision.BF16, device=CPU, measure=measured()) == (Precision.BF16, "as asked")


def test_tf32_needs_a_gpu_and_is_the_gpus_alone() -> None:
    with pytest.raises(ConfigError, match="for precision tf32, a GPU"):
        resolve_precision(Precision.TF32, device=CPU)
    cuda, products = torch.device("cuda"), torch.backends.cuda.matmul
    assert resolve_precision(Precision.TF32, device=cuda) == (Precision.TF32, "as asked")
    before = products.fp32_precision
    try:
        Precision.TF32.use(CPU)
        assert products.fp32_precision == before
        for precision, expected in ((Precision.TF32, "tf32"), (Precision.BF16, "ieee")):
            precision.use(cuda)
            assert products.fp32_precision == expected
            with whole_products():
                assert products.fp32_precision == "ieee"
            assert products.fp32_precision == expected
    finally:
        products.fp32_precision = before


def test_rates_are_measured_in_turns() -> None:
    rates = measure_ratio(size=64, turns=5)
    assert rates.turns == 5
    assert min(rates.fp32, rates.bf16, rates.ratio) > 0
