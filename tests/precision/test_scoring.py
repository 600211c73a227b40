"""Precisions that a finished run is scored in: each says so itself, one from outside as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.errors import ConfigError
from ziggurat.precision import PLAIN, USUAL, NativeArithmetic, Precision
from ziggurat.runs.load import _refuse_other_precisions
from ziggurat.training.config import TrainingConfig
from ziggurat.training.records.run_folder import RunFolder


class Outside(Precision):
    """FP32 by an arithmetic of one's own; not listed."""

    name = "outside"
    arithmetic = NativeArithmetic()


@pytest.mark.parametrize("precision", [*Precision, Outside()], ids=str)
def test_a_run_is_scored_in_what_says_so(precision: Precision, tmp_path: Path) -> None:
    assert precision.can_score is (precision.name not in ("auto", "tf32", "bf16", "dispatch"))
    if precision.can_score:
        _refuse_other_precisions(precision, RunFolder(tmp_path))
        return
    with pytest.raises(ConfigError) as refused:
        _refuse_other_precisions(precision, RunFolder(tmp_path))
    ways = str(refused.value)
    assert "--precision fp32, which is what leaving it out means" in ways
    assert ("--precision bf16_emulated: products of BF16 operands" in ways) is (precision.name == "bf16")


def test_what_emulates_a_precision_is_one_that_scores() -> None:
    named = {each.emulated_by for each in Precision} - {""}
    assert named == {"bf16_emulated"}
    assert all(Precision(name).can_score for name in named)


def test_the_usual_precision_is_measured_and_the_plain_one_is_fp32() -> None:
    assert TrainingConfig().precision is USUAL
    assert USUAL.is_measured
    assert [str(each) for each in Precision if each.is_plain] == [str(PLAIN)] == ["fp32"]
