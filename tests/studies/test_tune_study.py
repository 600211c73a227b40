"""Tries without training: budgets of several workers, tries that were left, storages, and what is damaged."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from ziggurat.errors import ConfigError, DataError, MissingDependencyError
from ziggurat.models import DNNConfig
from ziggurat.models.contract.search_space import Choices, Floats, Integers
from ziggurat.studies import tune_study
from ziggurat.studies.tune_space import TuningSpace
from ziggurat.studies.tune_study import Ended, Pruner, Sampler, Spent, Tries, Work, optuna
from ziggurat.training.config import TrainingConfig

pytest.importorskip("optuna")

SPACE = TuningSpace(
    model=DNNConfig(embedding_dim=8),
    training=TrainingConfig(),
    dimensions=(
        Choices("model.embedding_dim", ("4", "8")),
        Integers("model.deep.width", 8, 64, log=True),
        Floats("training.learning_rate", 1e-4, 1e-2, log=True),
        Floats("dropout", 0.0, 0.5, only=("model.embedding_dim", ("8",))),
    ),
)


def tries(folder: Path, *, sampler: Sampler = Sampler.TPE, pruner: Pruner = Pruner.NONE, storage: str = "") -> Tries:
    return Tries(folder, model="dnn", space=SPACE, higher=True, sampler=sampler, pruner=pruner, seed=3, storage=storage)


def take(found: Tries, *, budget: int = 100) -> Work | None:
    return found.next(may_ask=lambda made: len(made) < budget, may_go_on=lambda made: True)


def value_of(work: Work) -> float:
    return 0.5 + float(work.values["training.learning_rate"]) * 10


def make(found: Tries, *, number: int) -> None:
    for _ in range(number):
        work = take(found)
        assert work is not None
        work.note(3, Spent(cpu_s=1.0, wall_s=2.0, rows=10, flops=5.0, evaluations=1))
        work.report(value_of(work), step=1)
        work.complete(value_of(work))


def test_the_first_try_is_what_was_given_and_the_others_lie_in_the_space(tmp_path: Path) -> None:
    found = tries(tmp_path)
    make(found, number=6)
    first, *others = found.all()
    assert first.values == {
        "model.embedding_dim": "8",
        "model.deep.width": 23,  # the default has two widths, so the middle
        "training.learning_rate": 1e-3,
        "dropout": 0.0,
    }
    assert {"dropout" in each.values for each in others} <= {True, False}
    for each in others:
        assert ("dropout" in each.values) == (each.values["model.embedding_dim"] == "8")
        for dimension in SPACE.dimensions:
            assert dimension.name not in each.values or dimension.holds(each.values[dimension.name])
    assert all(each.spent == Spent(cpu_s=1.0, wall_s=2.0, rows=10, flops=5.0, evaluations=1) for each in found.all())


@pytest.mark.parametrize("sampler", list(Sampler))
def test_a_study_that_was_stopped_asks_for_what_one_in_one_piece_does(tmp_path: Path, sampler: Sampler) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    make(tries(tmp_path / "whole", sampler=sampler), number=13)
    make(tries(tmp_path / "parts", sampler=sampler), number=11)
    make(tries(tmp_path / "parts", sampler=sampler), number=2)
    one = [each.values for each in tries(tmp_path / "whole", sampler=sampler).all()]
    assert one == [each.values for each in tries(tmp_path / "parts", sampler=sampler).all()]
    assert len({str(each) for each in one}) == 13


def test_two_workers_share_a_budget_and_no_try(tmp_path: Path) -> None:
    first = tries(tmp_path)
    second = tries(tmp_path)
    taken = [take(worker, budget=3) for worker in (first, second, first)]
    assert [work.number for work in taken if work] == [0, 1, 2]
    assert take(first, budget=3) is None  # all three are being trained by somebody
    assert take(second, budget=3) is None
    for work in taken:
        assert work is not None
        work.complete(0.5)
    assert [each.ended for each in second.all()] == [Ended.COMPLETE] * 3


def test_a_try_that_was_left_is_taken_over_with_its_settings_and_what_it_cost(tmp_path: Path) -> None:
    left = take(tries(tmp_path))
    assert left is not None
    left.note(3, Spent(cpu_s=1.0, wall_s=2.0, rows=10, flops=5.0, evaluations=1))
    left.report(0.6, step=1)
    left.leave()  # what the system does where a worker is killed
    other = tries(tmp_path)
    work = take(other)
    assert work is not None
    assert (work.number, work.values) == (0, left.values)
    work.report(0.9, step=1)  # known already: the first value stays
    work.report(0.7, step=2)
    work.note(3, Spent(cpu_s=4.0, wall_s=8.0, rows=20, flops=9.0, evaluations=2))
    work.complete(0.7)
    (done,) = other.all()
    assert done.reached == {1: 0.6, 2: 0.7}
    # Seconds of both workers; rows, FLOPs and evaluations are counted from the begin of the try.
    assert done.spent == Spent(cpu_s=5.0, wall_s=10.0, rows=20, flops=9.0, evaluations=2)


def test_a_try_is_not_taken_over_where_nothing_may_be_spent_on_it(tmp_path: Path) -> None:
    found = tries(tmp_path)
    left = take(found)
    assert left is not None
    left.leave()
    assert found.next(may_ask=lambda made: False, may_go_on=lambda made: False) is None
    assert found.all()[0].ended is Ended.RUNNING


def test_a_bad_try_is_pruned_and_keeps_its_last_value(tmp_path: Path) -> None:
    found = tries(tmp_path, pruner=Pruner.MEDIAN)
    for _ in range(6):
        work = take(found)
        assert work is not None
        assert not work.report(0.9, step=1)
        work.complete(0.9)
    bad = take(found)
    assert bad is not None
    assert bad.report(0.1, step=1)
    bad.prune("")
    assert found.all()[-1].ended is Ended.PRUNED
    assert found.all()[-1].reached == {1: 0.1}


def evaluated(found: Tries, *, evaluations: int, number: int = 1) -> None:
    """Make complete tries that hear nobody's advice to end."""
    for _ in range(number):
        work = take(found)
        assert work is not None
        for step in range(1, evaluations + 1):
            work.report(value_of(work), step=step)
        work.complete(value_of(work))


def test_a_pruner_hides_no_tries_from_a_sampler(tmp_path: Path) -> None:
    for pruner in (Pruner.NONE, Pruner.HYPERBAND):
        (tmp_path / pruner).mkdir()
        evaluated(tries(tmp_path / pruner, pruner=pruner), evaluations=9, number=14)
    shown, hidden = ([each.values for each in tries(tmp_path / name).all()] for name in (Pruner.NONE, Pruner.HYPERBAND))
    assert shown == hidden


def test_brackets_of_hyperband_are_those_of_the_first_complete_try(tmp_path: Path) -> None:
    found = tries(tmp_path, pruner=Pruner.HYPERBAND)
    first = take(found)
    second = take(found)
    assert first is not None
    assert second is not None
    # Of two workers the one with the second try is done first: brackets wait for the first one.
    second.report(0.5, step=100)
    second.complete(0.5)
    assert type(first.pruner()).__name__ == "NopPruner"
    first.report(0.6, step=9)
    first.complete(0.6)
    evaluated(found, evaluations=30)
    for process in (found, tries(tmp_path, pruner=Pruner.HYPERBAND)):
        work = take(process)
        assert work is not None
        pruner = work.pruner()
        work.trial.report(0.5, 1)
        pruner.prune(work.study, work.study.get_trials(deepcopy=False)[work.number])
        assert pruner._n_brackets == 3  # of 9 evaluations: from 1, from 3, from 9 on


def test_wilcoxon_prunes_over_seeds(tmp_path: Path) -> None:
    found = tries(tmp_path, pruner=Pruner.WILCOXON)
    best = take(found)
    assert best is not None
    for seed in range(8):
        best.report(0.9 + 0.001 * seed, step=seed)
    best.complete(0.9)
    bad = take(found)
    assert bad is not None
    assert any([bad.report(0.5 + 0.002 * seed, step=seed) for seed in range(8)])


def test_tries_without_a_value(tmp_path: Path) -> None:
    found = tries(tmp_path)
    for end in (lambda work: work.fail("cannot be"), lambda work: work.prune("diverged")):
        work = take(found)
        assert work is not None
        end(work)
    assert [(each.ended, each.why, each.value) for each in found.all()] == [
        (Ended.FAILED, "cannot be", None),
        (Ended.PRUNED, "diverged", None),
    ]


def test_tries_in_a_database(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    make(tries(tmp_path, storage=storage), number=3)
    found = tries(tmp_path, storage=storage).all()
    assert [each.number for each in found] == [0, 1, 2]
    assert not (tmp_path / "journal.log").exists()


@pytest.mark.parametrize("storage", ["nonsense", "sqlite:////no/such/folder/study.db", "oracle+nothing://x"])
def test_a_database_that_cannot_be_opened_is_named_and_the_way_out_works(tmp_path: Path, storage: str) -> None:
    with pytest.raises(ConfigError, match="--storage") as caught:
        tries(tmp_path, storage=storage)
    way = caught.value.ways_out[0].partition("--storage ")[2]
    assert tries(tmp_path, storage=way).all() == []


def test_a_database_that_does_not_answer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exc = importlib.import_module("sqlalchemy.exc")

    def refuse(url: str, **settings: object) -> None:
        raise exc.OperationalError("SELECT 1", {}, OSError("connection refused"))

    monkeypatch.setattr(optuna().storages, "RDBStorage", refuse)
    with pytest.raises(ConfigError, match="connection refused") as caught:
        tries(tmp_path, storage="postgresql://me:secret@somewhere/tries")
    assert caught.value.ways_out[0] == "give the same command again when the database answers: tries go on"
    with pytest.raises(ConfigError) as of_a_file:
        tries(tmp_path, storage="sqlite:////no/such/folder/study.db")
    assert "--storage sqlite" in of_a_file.value.ways_out[0]


def test_a_database_that_is_damaged_is_named_and_keeps_its_password(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    found = tries(tmp_path, storage=f"sqlite:///{path}")
    make(found, number=2)
    path.write_bytes(path.read_bytes()[:100] + b"\0" * 8000)
    with pytest.raises(DataError, match="that takes and gives tries") as caught:
        make(found, number=1)
    assert caught.value.where.endswith("study.db")
    with pytest.raises(ConfigError) as refused:
        tries(tmp_path, storage="postgresql+nothing://me:secret@somewhere/tries")
    assert "secret" not in str(refused.value)


def test_importance_names_what_values_follow(tmp_path: Path) -> None:
    found = tries(tmp_path, sampler=Sampler.RANDOM)
    assert found.importances() == {}
    make(found, number=30)
    shares = found.importances()
    assert max(shares, key=lambda name: shares[name]) == "training.learning_rate"


def test_a_damaged_journal_is_named_and_its_way_out_works(tmp_path: Path) -> None:
    make(tries(tmp_path), number=3)
    journal = tmp_path / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-4]) + b"{torn\n" + b"".join(lines[-4:]))
    with pytest.raises(DataError, match="as Optuna wrote them") as caught:
        tries(tmp_path).all()
    command = re.sub("^.*?: ", "", caught.value.ways_out[0], count=1)
    subprocess.run(command, shell=True, check=True)
    assert len(tries(tmp_path).all()) == 3
    make(tries(tmp_path), number=2)


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_line_that_a_worker_did_not_finish_is_no_damage(tmp_path: Path, cut: int) -> None:
    make(tries(tmp_path), number=3)
    journal = tmp_path / "journal.log"
    journal.write_bytes(journal.read_bytes()[:-cut])
    found = tries(tmp_path)
    # The try whose end was being written is there to be finished.
    make(found, number=2)
    assert [each.ended for each in found.all()] == [Ended.COMPLETE] * 4
    assert [each.ended for each in tries(tmp_path).all()] == [Ended.COMPLETE] * 4
    assert journal.read_bytes().endswith(b"\n")


def test_optuna_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(tune_study.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"ziggurat-rec\[tune\]"):
        optuna()
    monkeypatch.undo()
    assert importlib.import_module("optuna") is optuna()
