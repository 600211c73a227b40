"""Windows of data under one trainer: by their number, in one open folder, with vocabularies that go on growing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.growing.test_growing_runs import growing_dataset, growing_trainer
from tests.training.hooks.test_hooks import WINDOWS, log_of, same, trainer_in, weights_of
from tests.training.tiny import tiny_dataset
from ziggurat.training.hooks.fitting import SaveWhenDue
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.judging import MadeStep
from ziggurat.training.trainer import Trainer


def test_ids_that_a_window_brought_keep_their_rows_in_the_next(tmp_path: Path) -> None:
    trainer = growing_trainer(tmp_path, epochs=1)
    trainer.fit()
    assert trainer.growing is not None
    before = trainer.growing.grown()["user"].numbers
    assert len(before) > 10
    seen: list[np.ndarray] = []

    class LooksAtOnce(Hook):
        def on_step(self, trainer: Trainer, made: MadeStep) -> None:
            assert trainer.growing is not None
            seen.append(trainer.growing.grown()["user"].numbers)

    for _ in trainer.steps(growing_dataset(64, seed=5), hooks=[LooksAtOnce()]):
        pass
    assert np.isin(before, seen[0]).mean() > 0.5, "a window begins with the ids of the one before"


class Dies(Hook):
    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if made.step == self.stop_at:
            trainer.store.wait()
            raise KeyboardInterrupt


def stream(folder: Path, *, resume: bool = False, stop_at: int = 0) -> tuple[Trainer, list[int]]:
    """Train three windows once each, those alone that are left; return which were given."""
    trainer = trainer_in(folder, train=tiny_dataset(0), valid=tiny_dataset(128), checkpoint_every=3)
    if resume:
        trainer.restore()
    given: list[int] = []
    with trainer.over_windows(hooks=[SaveWhenDue(), Dies(stop_at)]):
        position = trainer.position
        is_done = position.epoch > position.window_epoch or not position.window
        for number in range(position.window + is_done, 4):
            given.append(number)
            for _ in trainer.steps(WINDOWS[number - 1], number=number):
                pass
    return trainer, given


@pytest.mark.parametrize("stop_at", [1, 3, 4, 6, 8, 9, 12])
def test_windows_that_are_behind_a_checkpoint_are_not_given_again(tmp_path: Path, stop_at: int) -> None:
    whole, given = stream(tmp_path / "whole")
    assert (given, whole.position.step, whole.position.window) == ([1, 2, 3], 12, 3)
    with pytest.raises(KeyboardInterrupt):
        stream(tmp_path / "cut", stop_at=stop_at)
    # What ends a window is saved behind its last step, where this hook has died.
    saved = max(step for step in (0, 3, 4, 6, 8, 9, 12) if step < stop_at or (step == stop_at and step % 4))
    resumed, given = stream(tmp_path / "cut", resume=True)
    assert given == list(range(saved // 4 + 1, 4))
    assert same(weights_of(whole), weights_of(resumed))
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    assert (tmp_path / "cut/ledger.bin").read_bytes() == (tmp_path / "whole/ledger.bin").read_bytes()


def test_a_stream_is_the_same_windows_by_fit(tmp_path: Path) -> None:
    streamed, _ = stream(tmp_path / "streamed")
    fitted = trainer_in(tmp_path / "fitted", train=WINDOWS[0], epochs=1)
    for _ in fitted.steps():
        pass
    for window in WINDOWS[1:]:
        for _ in fitted.steps(window):
            pass
    assert same(weights_of(streamed), weights_of(fitted))
