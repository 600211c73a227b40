"""Ids that are made unknown in training: as often as asked, for the same samples on any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.schema import UNKNOWN_ROW
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.config import EarlyStopConfig, TrainingConfig
from ziggurat.training.ending import Ending
from ziggurat.training.position import Position
from ziggurat.training.unknown_ids import UnknownIds, parse_shares

INPUTS = small_inputs(num_single=3)


def batch_of(size: int) -> Batch:
    batch = random_batch(INPUTS, size)
    return replace(batch, single=batch.single.clamp(min=3), row_ids=torch.arange(size) * 7)


def test_a_share_of_the_ids_of_the_named_features_is_unknown_and_nothing_else_changes() -> None:
    batch = batch_of(4000)
    unknown = UnknownIds(shares={"single0": 0.25, "single2": 0.5}, inputs=INPUTS)
    found = unknown.applied(batch, draw=StepDraw(3, 10))
    share_S = (found.single == UNKNOWN_ROW).float().mean(dim=1)
    torch.testing.assert_close(share_S, torch.tensor([0.25, 0.0, 0.5]), atol=0.03, rtol=0)
    kept = found.single != UNKNOWN_ROW
    assert torch.equal(found.single[kept], batch.single[kept])
    assert found.jagged is batch.jagged
    both = ((found.single[0] == UNKNOWN_ROW) & (found.single[2] == UNKNOWN_ROW)).float().mean()
    assert float(both) == pytest.approx(0.125, abs=0.03)  # features are drawn apart


def test_a_sample_gets_the_same_draw_on_any_rank_and_another_one_in_another_step() -> None:
    batch = batch_of(200)
    unknown = UnknownIds(shares={"single1": 0.5}, inputs=INPUTS)
    whole = unknown.applied(batch, draw=StepDraw(0, 4)).single
    halves = [unknown.applied(batch.rows(*part), draw=StepDraw(0, 4)).single for part in ((0, 90), (90, 200))]
    assert torch.equal(torch.cat(halves, dim=1), whole)
    assert not torch.equal(unknown.applied(batch, draw=StepDraw(0, 5)).single, whole)
    assert not torch.equal(unknown.applied(batch, draw=StepDraw(1, 4)).single, whole)


@pytest.mark.parametrize("entry", ["single0", "single0=1", "single0=-0.1", "other=0.1", "single0=much"])
def test_what_is_no_share_of_a_feature_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="FEATURE=SHARE"):
        parse_shares((entry,), inputs=INPUTS)
    assert parse_shares(("single0=0.1", "single2=0"), inputs=INPUTS) == {"single0": 0.1, "single2": 0.0}


def test_patience_ends_a_run_only_after_its_least_number_of_steps() -> None:
    config = TrainingConfig(epochs=9, early_stop=EarlyStopConfig(patience=2, min_steps=100))
    early = Ending(position=Position(step=99, not_improved=4), config=config)
    late = Ending(position=Position(step=100, not_improved=4), config=config)
    assert (early.patience_is_out, late.patience_is_out) == (False, True)


def test_a_run_whose_last_evaluation_is_its_best_is_told_to_train_longer() -> None:
    seen = [{"step": 5, "epoch": 1, "metrics": {"auc": 0.6}}, {"step": 9, "epoch": 2, "metrics": {"auc": 0.7}}]
    config = TrainingConfig(epochs=2, early_stop=EarlyStopConfig(metric="auc"))
    facts = {"epoch": 2, "step": 9, "best_value": 0.7, "evaluations": seen}
    assert (
        Ending(position=Position(**facts, best_step=9), config=config)
        .text()
        .endswith("the last one: train longer (--training.epochs 3)")
    )
    assert "train longer" not in Ending(position=Position(**facts, best_step=5), config=config).text()
