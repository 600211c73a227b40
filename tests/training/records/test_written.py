"""Log and ledger are held to what the newest checkpoint knows of them; the best checkpoint may be lost."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.rank_runs import Case, stored, trainer_of
from ziggurat.errors import CheckpointError
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.checkpoint import CheckpointConfig, Match
from ziggurat.training.config import DamagedRecords, EarlyStopConfig
from ziggurat.training.evaluation.evaluate import Evaluation
from ziggurat.training.position import Position
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.written import WrittenFiles
from ziggurat.training.report.progress import LineProgress, RowsOfAll
from ziggurat.training.trainer import Trainer

CASE = Case()


def interrupted(folder: Path, **changes: object) -> Trainer:
    """A run that has stopped after 5 of its 14 steps, with a checkpoint at each."""
    trainer = trainer_of(CASE, folder, world_size=1, checkpoint_every=1, max_steps=5, **changes)
    trainer.fit()
    return trainer


def resumed(folder: Path, **changes: object) -> tuple[Trainer, str]:
    """Go on to the end, with what was said."""
    trainer = trainer_of(CASE, folder, world_size=1, checkpoint_every=1, **changes)
    text = io.StringIO()
    trainer.progress = LineProgress(text)
    trainer.fit(resume=True)
    return trainer, text.getvalue()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"0.6") + 2 if path.suffix == ".jsonl" else len(content) // 2
    content[at] ^= 1  # another digit, in the log: still JSON
    path.write_bytes(bytes(content))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    interrupted(folder)
    return folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.bin"])
@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damage_stops_a_resume_and_changes_nothing(source: Path, tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    DAMAGE[damage](folder / name)
    before = {path: path.read_bytes() for path in (folder / "metrics.jsonl", folder / "ledger.bin") if path.exists()}
    with pytest.raises(CheckpointError, match="start_new") as caught:
        resumed(folder)
    assert caught.value.where == str(folder / name)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(before) == 2 - (damage == "deleted")


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.bin"])
def test_a_new_file_begins_where_that_was_asked_for(source: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    DAMAGE["flipped"](folder / name)
    trainer, said = resumed(folder, damaged_records=DamagedRecords.START_NEW)
    assert f"{name} is damaged: a new one begins after step 5" in said
    assert (folder / f"{name}.damaged-at-5").is_file()
    written = WrittenFiles(RunFolder(folder))
    state = trainer.store.load(into={}, match=Match.SUBSET).state
    assert written.problems(state["written"], step=trainer.position.step) == []
    assert written.since() == [(name, 5)]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert min(steps) == (6 if name == "metrics.jsonl" else 1)
    resumed(folder, epochs=3)  # and the next one goes on without a word


@pytest.mark.parametrize("tail", ['{"kind": "train", "step": 6, "loss": 1.0}\n{"kind": "tra', '{"kind": "tra'])
def test_what_comes_after_the_checkpoint_is_cut_and_the_rest_keeps_its_bytes(
    source: Path, tmp_path: Path, tail: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(tail)
    _, said = resumed(folder)
    assert "damaged" not in said
    interrupted_bytes = (source / "metrics.jsonl").read_bytes()
    log = (folder / "metrics.jsonl").read_bytes()
    assert log.startswith(interrupted_bytes)
    assert [json.loads(line)["step"] for line in log.splitlines()][-1] == 14


def test_runs_saved_before_there_were_hashes_go_on_unless_the_ledger_ends_early(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    files = WrittenFiles(RunFolder(folder))
    assert files.problems(None, step=5) == []
    (problem,) = files.problems(None, step=9)
    assert "an end at step 5" in problem.found
    DAMAGE["zeroed"](folder / "ledger.bin")
    assert "ledger.bin" in files.problems(None, step=5)[0].where


# ------------------------------------------------------------------------------------------ the best checkpoint


STOP = EarlyStopConfig(metric="auc", min_delta=0.0)


def position(*values: float) -> Position:
    evaluations = [{"step": 10 * (i + 1), "epoch": 0, "metrics": {"auc": value}} for i, value in enumerate(values)]
    return Position(step=10 * len(values), evaluations=evaluations, best_step=10)


def test_a_best_step_is_needed_as_long_as_a_checkpoint_names_it() -> None:
    history = dataclasses.replace(position(0.5, 0.7, 0.6, 0.8), best_step=40)
    assert history.best_steps(None, stop=STOP) == {10, 20, 40}
    assert history.best_steps([25, 40], stop=STOP) == {20, 40}
    assert history.best_steps([30], stop=STOP) == {20, 40}
    assert history.best_steps([12], stop=STOP) == {10, 40}
    assert Position().best_steps([1], stop=STOP) == set()


def worse_and_worse(folder: Path, **changes: object) -> Trainer:
    trainer = trainer_of(
        CASE,
        folder,
        world_size=1,
        evaluate_every=2,
        checkpoint_every=2,
        early_stop=STOP,
        checkpoint=CheckpointConfig(keep=2),
        **changes,
    )
    return trainer


def test_the_best_of_an_older_checkpoint_stays_until_that_one_is_gone(tmp_path: Path) -> None:
    trainer = worse_and_worse(tmp_path / "run")
    values = iter([0.9, 0.5, 0.4, 0.95, 0.3, 0.2, 0.1])

    def evaluated(dataset: object, *, split: str = "") -> Evaluation:
        del dataset, split
        return Evaluation(metrics={"auc": next(values)}, num_rows=1, curves={})

    trainer.evaluate = evaluated  # type: ignore[method-assign]
    seen: dict[int, list[int]] = {}
    save = trainer.store.save

    def saving(step: int, **given: object) -> None:
        save(step, **given)  # type: ignore[arg-type]
        trainer.store.wait()
        seen[step] = trainer.store.steps()

    trainer.store.save = saving  # type: ignore[method-assign,assignment]
    trainer.fit()
    assert 2 in seen[8]  # step 8 is the best now, but the checkpoint of step 6 still names 2
    assert all(set(steps) >= {8} for step, steps in seen.items() if step >= 8)
    assert 2 not in seen[14]


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_without_the_best_weights_the_last_ones_stay_and_that_is_said(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    worse_and_worse(folder, max_steps=6).fit()
    best = max(0, min(int(path.name.split("-")[1]) for path in (folder / "checkpoints").glob("step-*[0-9]")))
    trainer = worse_and_worse(folder, max_steps=6)
    trainer.store.load(into={}, match=Match.SUBSET)
    text = io.StringIO()
    trainer.progress = LineProgress(text)
    lost = folder / f"checkpoints/step-{best:012d}"
    trainer.restore()
    trainer.position.best_step, trainer.position.best_value = best, 0.9
    last = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if how == "deleted":
        shutil.rmtree(lost)
    else:
        (lost / "state.json").write_bytes(b"{}")
    trainer.restore_best()
    assert f"the best weights (step {best}) are lost" in text.getvalue()
    assert all(torch.equal(value, last[name]) for name, value in trainer.model.state_dict().items())


# ------------------------------------------------------------------------------------------------- many ranks


def marks_on_ranks(rank: int, folder: str) -> list[str]:
    """Train in two lives; the second finds log and ledger as the first left them. Then rank 0's ledger is flipped."""
    trainer_of(CASE, folder, world_size=2, checkpoint_every=1, max_steps=3).fit()
    trainer_of(CASE, folder, world_size=2, checkpoint_every=1, max_steps=5).fit(resume=True)
    if rank == 0:
        flip(Path(folder) / "ledger.bin")
    try:
        trainer_of(CASE, folder, world_size=2, checkpoint_every=1).fit(resume=True)
    except CheckpointError as error:
        return [error.found, error.where]
    return []


def test_all_ranks_refuse_a_damaged_ledger(tmp_path: Path) -> None:
    first, second = run_ranks(marks_on_ranks, 2, str(tmp_path / "run"))
    assert first[0] == second[0] == "other content in them"
    assert "ledger.bin" in first[1]
    assert stored(tmp_path / "run")


def test_progress_on_ranks_ends_at_all_rows() -> None:
    text = io.StringIO()
    progress = RowsOfAll(LineProgress(text, every_s=0.0), num_ranks=3, total=100)
    progress.begin("evaluate", total=100)
    for done in (20, 34):
        progress.update(done)
    progress.end()
    assert text.getvalue().splitlines()[-1] == "evaluate: 100/100 (100 %)"
    assert "evaluate: 60/100 (60 %)" in text.getvalue()
