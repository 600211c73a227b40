"""Hooks are called at their moments and change no bit; ours can be replaced; one trainer takes window after window."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.rank_runs import Case, trainer_of
from tests.training.tiny import tiny_dataset, tiny_inputs
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.errors import ConfigError
from ziggurat.models import DNNConfig, MLPConfig, build_model
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.callbacks import Callback
from ziggurat.training.config import EarlyStopConfig, Precision, TrainingConfig
from ziggurat.training.ending import FitResult
from ziggurat.training.evaluation.evaluate import Evaluation
from ziggurat.training.hooks.fitting import EvaluateWhenDue, RestoreBest
from ziggurat.training.hooks.hook import Hook, hooks_named
from ziggurat.training.hooks.probe_products import ProbeProducts
from ziggurat.training.hooks.writers import WriteMetrics
from ziggurat.training.judging import MadeStep
from ziggurat.training.report.progress import LineProgress
from ziggurat.training.trainer import Trainer

CONFIG = TrainingConfig(
    epochs=2,
    log_every=2,
    threads=1,
    precision=Precision.FP32,
    learning_rate=0.01,
    loader=LoaderConfig(batch_size=64, shuffle_buffer_rows=100),
)
WINDOWS = tuple(tiny_dataset(256, seed=seed) for seed in (0, 2, 3))


class Heard(Hook):
    """Remembers what it is called with."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, int]] = []
        self.losses: list[float] = []
        self.bests: list[bool] = []
        self.is_closed = False

    def on_start(self, trainer: Trainer) -> None:
        self.moments.append(("start", trainer.position.step))

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        assert made.step == trainer.position.step
        self.losses.append(made.loss)
        self.moments.append(("step", made.step))

    def on_window(self, trainer: Trainer) -> None:
        self.moments.append(("window", trainer.position.step))

    def on_record(self, trainer: Trainer, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        del trainer, timing
        self.moments.append((f"record {record['kind']}", record["step"]))

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation, *, is_best: bool) -> None:
        assert evaluation.num_rows == 128
        self.bests.append(is_best)
        self.moments.append(("evaluate", trainer.position.step))

    def on_checkpoint(self, trainer: Trainer) -> None:
        self.moments.append(("checkpoint", trainer.position.step))

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        del trainer
        self.moments.append(("end", result.steps))

    def close(self) -> None:
        self.is_closed = True


def trainer_in(folder: Path, *, train: Any = None, valid: Any = None, **changes: Any) -> Trainer:
    model = build_model(
        DNNConfig(embedding_dim=4, deep=MLPConfig(hidden_dims=(8,), dropout=0.2)), tiny_inputs(), seed=0
    )
    train = tiny_dataset(256) if train is None else train
    valid = tiny_dataset(128, seed=1) if valid is None else valid
    return Trainer(model, config=replace(CONFIG, **changes), train=train, valid=valid, folder=folder)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(second[name], value) for name, value in first.items())


def log_of(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "timing"} for line in lines]


def test_a_hook_is_called_at_every_moment_of_a_run_and_changes_no_bit(tmp_path: Path) -> None:
    heard = Heard()
    with_hook = trainer_in(tmp_path / "a")
    with_hook.fit(hooks=[heard])
    without = trainer_in(tmp_path / "b")
    without.fit()
    assert same(weights_of(with_hook), weights_of(without))
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")
    one_epoch = lambda first: [  # noqa: E731
        ("step", first),
        ("record train", first + 1),
        ("step", first + 1),
        ("step", first + 2),
        ("record train", first + 3),
        ("step", first + 3),
        ("record valid", first + 3),
        ("evaluate", first + 3),
        ("window", first + 3),
        ("checkpoint", first + 3),
    ]
    assert heard.moments == [("start", 0), *one_epoch(1), *one_epoch(5), ("end", 8)]
    assert heard.bests[0]
    assert heard.is_closed
    logged = [line["loss"] for line in log_of(tmp_path / "a") if line["kind"] == "train"]
    assert logged == [sum(heard.losses[start : start + 2]) / 2 for start in range(0, 8, 2)]


def test_a_hook_may_save_before_the_first_step(tmp_path: Path) -> None:
    class SavesAtOnce(Hook):
        def on_start(self, trainer: Trainer) -> None:
            trainer.save()
            self.steps = trainer.store.steps()

    hook = SavesAtOnce()
    trainer = trainer_in(tmp_path / "a", max_steps=1)
    trainer.fit(hooks=[hook])
    trainer.store.wait()
    assert 0 in {*hook.steps, *trainer.store.steps()}


@pytest.mark.parametrize("ours", [WriteMetrics, ProbeProducts])
def test_a_hook_that_forgets_to_begin_says_what_is_missing(ours: type[Hook], tmp_path: Path) -> None:
    class Forgets(ours):
        def on_start(self, trainer: Trainer) -> None:
            del trainer

    class Remembers(ours):
        def on_start(self, trainer: Trainer) -> None:
            super().on_start(trainer)

    with pytest.raises(ConfigError, match=r"Forgets that does not call(.|\n)*super\(\).on_start\(trainer\)"):
        trainer_in(tmp_path / "a", max_steps=2).fit(hooks=[Forgets()])
    assert trainer_in(tmp_path / "b", max_steps=2).fit(hooks=[Remembers()]).steps == 2


def test_a_hook_of_the_users_takes_the_place_of_the_one_that_it_derives_from(tmp_path: Path) -> None:
    class KeepLast(RestoreBest):
        def on_end(self, trainer: Trainer, result: FitResult) -> None:
            pass

    class AtEvenSteps(EvaluateWhenDue):
        def after(self, trainer: Trainer, *, is_last: bool) -> None:
            if trainer.position.step % 2 == 0:
                trainer.validate()

    worse = EarlyStopConfig(metric="auc", min_delta=10.0)  # the first evaluation stays the best
    last = trainer_in(tmp_path / "last", early_stop=worse, evaluate_every=2)
    last.fit(hooks=[KeepLast()])
    best = trainer_in(tmp_path / "best", early_stop=worse)
    best.fit(hooks=[AtEvenSteps()])
    assert log_of(tmp_path / "last") == log_of(tmp_path / "best")
    stored = last.store.load().tensors
    assert same({f"model.{name}": value for name, value in weights_of(last).items()}, stored)
    assert not same(weights_of(last), weights_of(best))
    assert same({f"model.{name}": value for name, value in weights_of(best).items()}, best.store.load(2).tensors)


def test_a_hook_ends_training_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    class Enough(Hook):
        def on_step(self, trainer: Trainer, made: MadeStep) -> None:
            if made.step == 3:
                trainer.stop("three are enough")

    result = trainer_in(tmp_path / "run").fit(hooks=[Enough()])
    assert result.steps == 3
    assert result.end.startswith("ended at step 3 by a hook: three are enough")
    resumed = trainer_in(tmp_path / "run")
    assert resumed.fit(resume=True).steps == 8
    whole = trainer_in(tmp_path / "whole")
    whole.fit()
    assert same(weights_of(whole), weights_of(resumed))


class Notes(Hook):
    """Writes a line at the end of each pass; dies behind the checkpoint of one, or ends training at it."""

    def __init__(self, *, dies_behind: int = 0, stops_at: int = 0) -> None:
        self.dies_behind = dies_behind
        self.stops_at = stops_at

    def on_window(self, trainer: Trainer) -> None:
        trainer.record({"kind": "note", "epoch": trainer.position.epoch})
        if trainer.position.epoch == self.stops_at:
            trainer.stop("enough")

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if self.dies_behind and made.epoch == self.dies_behind:
            trainer.store.wait()
            raise KeyboardInterrupt


def test_a_line_of_the_end_of_a_pass_is_in_the_checkpoint_of_it(tmp_path: Path) -> None:
    trainer_in(tmp_path / "whole", epochs=3).fit(hooks=[Notes()])
    with pytest.raises(KeyboardInterrupt):
        trainer_in(tmp_path / "cut", epochs=3).fit(hooks=[Notes(dies_behind=2)])
    trainer_in(tmp_path / "cut", epochs=3).fit(resume=True, hooks=[Notes()])
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    assert [line["epoch"] for line in log_of(tmp_path / "cut") if line["kind"] == "note"] == [1, 2, 3]


def test_a_hook_that_ends_training_at_the_end_of_a_pass_lets_no_further_step_be_made(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, epochs=3)
    result = trainer.fit(hooks=[Notes(stops_at=2)])
    assert (result.steps, trainer.position.epoch, trainer.position.step_in_epoch) == (8, 2, 0)


def test_an_error_of_a_hook_names_it_and_every_hook_is_closed(tmp_path: Path) -> None:
    class Broken(Hook):
        def on_step(self, trainer: Trainer, made: MadeStep) -> None:
            raise RuntimeError("as on a bad day")

    heard = Heard()
    with pytest.raises(RuntimeError, match="as on a bad day") as caught:
        trainer_in(tmp_path / "run").fit(hooks=[Broken(), heard])
    assert "Broken, on_step, at step 1" in caught.value.__notes__[0]
    assert heard.is_closed
    assert heard.moments == [("start", 0)]


def test_what_is_no_hook_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    class Callback:
        def on_log(self, step: int, values: dict[str, float]) -> None: ...

    for wrong, way in ((Heard, r"hooks=\[Heard\(\)\]"), (Callback(), r"callbacks=\["), (print, "derive from it")):
        with pytest.raises(ConfigError, match=way):
            trainer_in(tmp_path / "run").fit(hooks=[wrong])  # type: ignore[list-item]
    assert not (tmp_path / "run").exists()

    class Slip(Hook):
        name = "slip"

        def on_steps(self, trainer: Trainer, made: MadeStep) -> None: ...

    for refused in (lambda: trainer_in(tmp_path / "run").fit(hooks=[Slip()]), lambda: Hook.add(Slip())):
        with pytest.raises(ConfigError, match=r"Slip\.on_steps, which nothing would call") as caught:
            refused()
        assert "def on_step(self, …)" in str(caught.value)
    with pytest.raises(ConfigError, match="--extension MODULE"):
        hooks_named(["no_such_hook"])


class Exits(Hook):
    def __init__(self, moment: str) -> None:
        self._moment = moment

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if self._moment == "on_step" and made.step == 3:
            sys.exit(0)

    def close(self) -> None:
        if self._moment == "close":
            raise SystemExit


class NoStep(Hook):
    def on_step(self, trainer: Trainer) -> None:  # type: ignore[override]
        del trainer


class NoBest(Hook):
    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation) -> None:  # type: ignore[override]
        del trainer, evaluation


class Waits(Hook):
    async def on_window(self, trainer: Trainer) -> None:  # type: ignore[override]
        del trainer


class Yields(Hook):
    def on_window(self, trainer: Trainer) -> Any:
        yield trainer


class NoMethod(Hook):
    close = 3  # type: ignore[assignment]


class TakesAll(Hook):
    def on_step(self, *args: Any) -> None:
        del args

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation, **named: Any) -> None:
        del trainer, evaluation, named


@pytest.mark.parametrize(
    ("hook", "wanted", "found"),
    [
        (NoStep(), "def on_step(self, trainer, made)", "on_step(trainer: 'Trainer'): too many positional arguments"),
        (NoBest(), "def on_evaluate(self, trainer, evaluation, *, is_best)", "unexpected keyword argument 'is_best'"),
        (Waits(), "def on_window(self, trainer)", "async def on_window, which nothing would wait for"),
        (Yields(), "def on_window(self, trainer)", "on_window with a yield: a generator"),
        (NoMethod(), "def close(self)", "close = 3, which cannot be called"),
    ],
)
def test_a_hook_that_does_not_take_what_its_moment_gives_is_refused_before_training(
    tmp_path: Path, hook: Hook, wanted: str, found: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_of(Case(), str(tmp_path / "run"), world_size=1).fit(hooks=[hook])
    assert caught.value.expected == wanted
    assert found in caught.value.found
    assert caught.value.ways_out[0] == f"{wanted}: …"
    TakesAll().try_out()


@pytest.mark.parametrize(("moment", "step"), [("on_step", 3), ("close", 8)])
def test_a_hook_that_ends_the_program_is_named(tmp_path: Path, moment: str, step: int) -> None:
    with pytest.raises(ConfigError, match="SystemExit") as caught:
        trainer_in(tmp_path / "run").fit(hooks=[Exits(moment)])
    assert caught.value.where == f"the hook tests.training.hooks.test_hooks.Exits, {moment}, at step {step}"
    assert caught.value.ways_out[0].startswith("trainer.stop(")


class Signalled(Exits):
    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if self._moment == "on_step" and made.step == 3:
            signal.raise_signal(signal.SIGUSR1)

    def close(self) -> None:
        if self._moment == "close":
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("moment", ["on_step", "close"])
def test_a_signal_that_ends_the_program_is_not_said_of_the_hook_in_which_it_came(tmp_path: Path, moment: str) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(143))
    try:
        with pytest.raises(SystemExit) as caught:
            trainer_in(tmp_path / "run").fit(hooks=[Signalled(moment)])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value.code == 143


def test_a_callback_that_ends_the_program_is_named(tmp_path: Path) -> None:
    class ExitingTracker(Callback):
        def on_log(self, step: int, values: dict[str, float]) -> None:
            sys.exit("no more")

        def on_evaluate(self, step: int, metrics: dict[str, float]) -> None: ...

        def on_end(self, step: int, summary: dict[str, float]) -> None: ...

    with pytest.raises(ConfigError, match="SystemExit: no more") as caught:
        trainer_in(tmp_path / "run").fit(callbacks=[ExitingTracker()])
    assert "ExitingTracker, on_record, at step 2" in caught.value.where


class Records(Hook):
    """Adds a line to the log at the second step."""

    def __init__(self, record: Any, timing: Any = None) -> None:
        self._record = record
        self._timing = timing

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if made.step == 2:
            trainer.record(self._record, self._timing)


_ENDLESS: list[Any] = []
_ENDLESS.append(_ENDLESS)


@pytest.mark.parametrize(
    ("record", "timing", "about"),
    [
        ({"kind": "mine", "step": "x"}, None, "'step'"),
        ({"kind": "mine", "step": -1}, None, "'step'"),
        ({"kind": "mine", "step": 3}, None, "'step'"),  # a run that goes on would cut it away
        ({"kind": "mine", "step": True}, None, "'step'"),
        ({"kind": "mine", "value": torch.ones(2)}, None, "argument 'record', 'value'"),
        ({"kind": "mine", "value": {"a": {1, 2}}}, None, "argument 'record', 'value'"),
        ({"kind": "mine", "value": 10**400}, None, "argument 'record', 'value'"),
        ({"kind": "mine", "value": "\udc80"}, None, "argument 'record', 'value'"),
        ({"kind": "mine", "value": _ENDLESS}, None, "argument 'record', 'value'"),
        ({"kind": "mine"}, {"wait": object()}, "argument 'timing', 'wait'"),
        ({"kind": "mine"}, 1.0, "argument 'timing'"),
        ({"kind": "mine", 3: 1.0}, None, "argument 'record'"),
        ([("kind", "mine")], None, "argument 'record'"),
        ({"kind": "train", "loss": "x"}, None, "'kind'"),
        ({"kind": 3}, None, "'kind'"),
        ({"value": 1.0}, None, "'kind'"),
    ],
)
def test_a_line_that_the_log_cannot_hold_is_refused_when_it_is_given(
    tmp_path: Path, record: Any, timing: Any, about: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer_in(tmp_path / "run").fit(hooks=[Records(record, timing)])
    assert caught.value.where == f"Trainer.record, {about}, at step 2"
    assert caught.value.ways_out


def test_a_line_of_the_users_is_in_the_log(tmp_path: Path) -> None:
    line = {"kind": "mine", "step": 1, "value": torch.ones(2).tolist(), "name": "ü", "of": {"a": None}}
    trainer_in(tmp_path / "run").fit(hooks=[Records(line)])
    assert line in log_of(tmp_path / "run")


# ---------------------------------------------------------------------------------------------------- windows


def test_steps_are_those_of_fit(tmp_path: Path) -> None:
    whole = trainer_in(tmp_path / "fit")
    whole.fit(hooks=[_KeepLast()])
    own = trainer_in(tmp_path / "own")
    losses = []
    for _ in range(CONFIG.epochs):
        losses += [made.loss for made in own.steps()]
        own.validate()
    assert len(losses) == 8
    assert same(weights_of(whole), weights_of(own))
    assert [line for line in log_of(tmp_path / "fit") if line["kind"] == "train"] == log_of(tmp_path / "own")
    assert (tmp_path / "fit/ledger.bin").read_bytes() == (tmp_path / "own/ledger.bin").read_bytes()


class _KeepLast(RestoreBest):
    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        pass


def test_a_loop_that_ends_early_goes_on_with_the_next_batch_and_from_its_own_checkpoint(tmp_path: Path) -> None:
    whole = trainer_in(tmp_path / "whole")
    list(whole.steps())
    cut = trainer_in(tmp_path / "cut")
    for made in cut.steps():
        if made.step == 2:
            break
    cut.save()
    assert [made.step for made in cut.steps()] == [3, 4]
    assert same(weights_of(whole), weights_of(cut))
    resumed = trainer_in(tmp_path / "cut")
    assert resumed.restore()
    assert [made.step for made in resumed.steps()] == [3, 4]
    assert same(weights_of(whole), weights_of(resumed))
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")


def over_windows(folder: Path, *, resume: bool = False, stop_at: int = 0) -> Trainer:
    """Train three windows one after the other, each validated on the one after it."""

    class Dies(Hook):
        def on_step(self, trainer: Trainer, made: MadeStep) -> None:
            if made.step == stop_at:
                trainer.store.wait()
                raise KeyboardInterrupt

    trainer = trainer_in(folder, train=WINDOWS[0], valid=tiny_dataset(128, seed=10), checkpoint_every=3)
    trainer.fit(resume=resume, hooks=[Dies()])
    for number in (1, 2):
        trainer.fit(train=WINDOWS[number], valid=tiny_dataset(128, seed=10 + number), hooks=[Dies()])
    return trainer


@pytest.mark.parametrize("stop_at", [4, 9, 13, 17, 22])
def test_windows_follow_one_another_and_a_killed_script_ends_with_the_same_bits(tmp_path: Path, stop_at: int) -> None:
    whole = over_windows(tmp_path / "whole")
    assert whole.position.step == 24
    assert whole.position.window == 2
    assert [entry["step"] for entry in whole.position.evaluations] == [20, 24]
    with pytest.raises(KeyboardInterrupt):
        over_windows(tmp_path / "cut", stop_at=stop_at)
    resumed = over_windows(tmp_path / "cut", resume=True)
    assert same(weights_of(whole), weights_of(resumed))
    assert log_of(tmp_path / "cut") == log_of(tmp_path / "whole")
    assert (tmp_path / "cut/ledger.bin").read_bytes() == (tmp_path / "whole/ledger.bin").read_bytes()


def test_a_window_trains_what_a_trainer_of_its_own_would(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run", train=WINDOWS[0], epochs=1)
    trainer.fit(hooks=[_KeepLast()])
    rows = [made.batch.row_ids.tolist() for made in trainer.steps(WINDOWS[1])]
    alone = trainer_in(tmp_path / "alone", train=WINDOWS[1], epochs=1)
    assert rows == [made.batch.row_ids.tolist() for made in alone.steps()]


# ------------------------------------------------------------------------------------------------------ ranks


class OnRanks(Hook):
    def __init__(self) -> None:
        self.steps = 0
        self.auc = 0.0

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        self.steps += 1
        if made.step == 2:
            self.auc = trainer.evaluate(trainer.valid).metrics["auc"]
        if made.step == 5:
            trainer.stop("enough")


class OnFirst(OnRanks):
    on_every_rank = False

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        del trainer, made
        self.steps += 1


def check_ranks(rank: int, world_size: int, folder: str) -> tuple[int, int, float, int]:
    del rank
    everywhere = OnRanks()
    first = OnFirst()
    trainer = trainer_of(Case(), folder, world_size=world_size)
    result = trainer.fit(hooks=[everywhere, first])
    return everywhere.steps, first.steps, everywhere.auc, result.steps


def test_hooks_are_called_on_every_rank_or_on_the_first(tmp_path: Path) -> None:
    found = run_ranks(check_ranks, 2, 2, str(tmp_path / "two"))
    alone = check_ranks(0, 1, str(tmp_path / "one"))
    assert [(each[0], each[1], each[3]) for each in found] == [(5, 5, 5), (5, 0, 5)]
    assert found[0][2] == found[1][2] == pytest.approx(alone[2], abs=1e-6)


class OnOne(Hook):
    """Asks to stop on one rank alone, as a clock or a signal does, at its step or while it is evaluated."""

    def __init__(self, rank: int, moment: str) -> None:
        self.rank = rank
        self.moment = moment

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        if self.moment == "step" and made.step == 3 and trainer.team.rank == self.rank:
            trainer.stop(f"rank {self.rank} has enough")

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation, *, is_best: bool) -> None:
        if self.moment == "evaluate" and trainer.team.rank == self.rank:
            trainer.stop(f"rank {self.rank} has enough")


class OnFirstAlone(OnOne):
    on_every_rank = False


def stops_on_all(rank: int, world_size: int, folder: str) -> list[tuple[int, str]]:
    del rank
    found = []
    for hook in (OnOne(1, "step"), OnOne(0, "evaluate"), OnFirstAlone(0, "step")):
        trainer = trainer_of(Case(), f"{folder}/{len(found)}", world_size=world_size)
        result = trainer.fit(hooks=[hook])
        found.append((result.steps, trainer.stop_reason))
    return found


def test_a_hook_that_ends_training_on_one_rank_ends_it_on_all_after_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(stops_on_all, 2, 2, str(tmp_path))
    assert first == second
    assert [each[1] for each in first] == ["rank 1 has enough", "rank 0 has enough", "rank 0 has enough"]
    assert (first[0][0], first[2][0]) == (3, 3)


def refuses_others(rank: int, folder: str) -> None:
    trainer = trainer_of(Case(), folder, world_size=2)
    with pytest.raises(ConfigError, match="hooks"):
        trainer.fit(hooks=[OnRanks()] if rank else [])


def test_ranks_with_different_hooks_are_refused(tmp_path: Path) -> None:
    run_ranks(refuses_others, 2, str(tmp_path / "run"))


class Together(Hook):
    """Makes a call that all ranks must make, on the second rank alone, or on the first alone."""

    def __init__(self, moment: str, call: str) -> None:
        self.moment = moment
        self.call = call
        self.is_done = False

    def do(self, moment: str, trainer: Trainer) -> None:
        if self.moment != moment or self.is_done or trainer.team.rank != int(self.on_every_rank):
            return
        self.is_done = True
        calls = {
            "save": trainer.save,
            "validate": trainer.validate,
            "evaluate": lambda: trainer.evaluate(trainer.valid),
            "gather": lambda: trainer.team.gather(1),
        }
        calls[self.call]()

    def on_start(self, trainer: Trainer) -> None:
        self.do("on_start", trainer)

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        self.trainer = trainer
        if made.step == 2:
            self.do("on_step", trainer)

    def on_window(self, trainer: Trainer) -> None:
        self.do("on_window", trainer)

    def on_record(self, trainer: Trainer, record: Mapping[str, object], timing: Mapping[str, object]) -> None:
        self.do("on_record", trainer)

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation, *, is_best: bool) -> None:
        self.do("on_evaluate", trainer)

    def on_checkpoint(self, trainer: Trainer) -> None:
        self.do("on_checkpoint", trainer)

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        self.do("on_end", trainer)

    def close(self) -> None:
        self.do("close", self.trainer)


class FirstTogether(Together):
    on_every_rank = False


ON_ONE = (
    *((Together, moment, "evaluate") for moment in ("on_start", "on_window", "on_record", "on_evaluate")),
    *((Together, moment, "evaluate") for moment in ("on_checkpoint", "on_end", "close")),
    *((kind, "on_step", call) for kind in (Together, FirstTogether) for call in ("save", "validate", "gather")),
)


def calls_on_one(rank: int, folder: str) -> list[str]:
    del rank
    found = []
    for number, (kind, moment, call) in enumerate(ON_ONE):
        trainer = trainer_of(Case(), f"{folder}/{number}", world_size=2)
        with pytest.raises(ConfigError) as caught:
            trainer.fit(hooks=[kind(moment, call)])
        found.append(str(caught.value))
    return found


def test_a_call_of_all_ranks_that_a_hook_makes_on_one_rank_is_refused_and_named_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(calls_on_one, 2, str(tmp_path), timeout_s=100.0)
    assert first == second
    for text, (kind, moment, call) in zip(first, ON_ONE, strict=True):
        who = "rank 0" if kind is FirstTogether else "rank 1"
        said = f"{who}: trainer.{call}, called by the hook {__name__}.{kind.__name__}, {moment}, at step"
        assert (f"{who}: an exchange of its own" if call == "gather" else said) in text, text


class StopsLate(Hook):
    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        trainer.stop("too late")


def test_a_stop_when_training_is_over_says_that_it_has_no_effect(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run")
    text = io.StringIO()
    trainer.progress = LineProgress(text)
    trainer.fit(hooks=[StopsLate()])
    assert "trainer.stop('too late') in on_end has no effect: training is over" in text.getvalue()
    assert trainer.stop_reason == ""


class Calls(Hook):
    """Makes a call of the trainer at one of its moments."""

    def __init__(self, moment: str, call: Callable[[Trainer], object]) -> None:
        self.moment = moment
        self.call = call
        self.num_calls = 0

    def _make(self, moment: str, trainer: Trainer) -> None:
        if moment == self.moment:
            self.num_calls += 1
            self.call(trainer)

    def on_start(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        del made
        self._make("on_step", trainer)

    def on_record(self, trainer: Trainer, record: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        del timing
        self._make("on_record", trainer)
        if record["kind"] == "train":
            self._make("on_record of train", trainer)

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation, *, is_best: bool) -> None:
        del evaluation, is_best
        self._make("on_evaluate", trainer)

    def on_checkpoint(self, trainer: Trainer) -> None:
        self._make("on_checkpoint", trainer)

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        del result
        self._make("on_end", trainer)

    def close(self) -> None:
        self._make("close", self.trainer)


def record_mine(trainer: Trainer) -> None:
    trainer.record({"kind": "mine", "value": 1.0})


def validate_and_save(trainer: Trainer) -> None:
    trainer.validate()
    trainer.save()


@pytest.mark.parametrize(
    ("moment", "call", "cycle", "way_out"),
    [
        ("on_checkpoint", Trainer.save, "on_checkpoint → on_checkpoint", ("on_end", Trainer.save)),
        ("on_evaluate", Trainer.validate, "on_evaluate → on_evaluate", ("on_evaluate", lambda t: t.evaluate(t.valid))),
        ("on_record", record_mine, "on_record → on_record", ("on_record of train", record_mine)),
        ("on_record", Trainer.validate, "on_record → on_record", ("on_record of train", Trainer.validate)),
        ("on_evaluate", validate_and_save, "on_evaluate → on_evaluate", ("on_evaluate", Trainer.save)),
    ],
)
def test_a_hook_that_leads_to_its_own_moment_without_an_end_is_refused_and_its_way_out_trains(
    tmp_path: Path,
    moment: str,
    call: Callable[[Trainer], object],
    cycle: str,
    way_out: tuple[str, Callable[[Trainer], object]],
) -> None:
    hook = Calls(moment, call)
    with pytest.raises(ConfigError, match=f"found: +{cycle}, 4 times") as refused:
        trainer_in(tmp_path / "refused").fit(hooks=[hook])
    assert hook.num_calls == 4
    assert f"Calls, {moment}, at step" in refused.value.where
    assert len(refused.value.__notes__) == len(set(refused.value.__notes__))
    assert refused.value.ways_out
    other = Calls(*way_out)
    assert trainer_in(tmp_path / "way_out").fit(hooks=[other]).steps == 8
    assert other.num_calls


@pytest.mark.parametrize("call", [Trainer.fit, Trainer.steps, lambda trainer: trainer.over_windows().__enter__()])
def test_steps_within_a_step_are_refused(tmp_path: Path, call: Callable[[Trainer], object]) -> None:
    with pytest.raises(ConfigError, match=r"a call of trainer\.(fit|steps|over_windows) in a hook") as refused:
        trainer_in(tmp_path).fit(hooks=[Calls("on_step", call)])
    assert "Calls, on_step, at step 1" in refused.value.where


@pytest.mark.parametrize("call", [Trainer.save, Trainer.validate, record_mine])
def test_what_writes_to_the_log_is_refused_in_close_and_done_in_on_end(
    tmp_path: Path, call: Callable[[Trainer], object]
) -> None:
    with pytest.raises(ConfigError, match="before the log of the run is closed"):
        trainer_in(tmp_path / "close").fit(hooks=[Calls("close", call)])
    assert trainer_in(tmp_path / "end").fit(hooks=[Calls("on_end", call)]).steps == 8


def test_a_checkpoint_of_the_end_is_whole_or_its_error_told_when_training_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_in(tmp_path / "whole")
    for _ in trainer.steps(hooks=[Calls("on_end", Trainer.save)]):
        pass
    assert trainer.store.steps() == [4]
    failing = trainer_in(tmp_path / "failing")

    def save_in_vain(trainer: Trainer) -> None:
        trainer.save()
        monkeypatch.setattr(trainer.store, "_error", OSError("the disk is full"))

    with pytest.raises(OSError, match="the disk is full"):
        failing.fit(hooks=[Calls("on_end", save_in_vain)])
