"""The tries of a study: Optuna's samplers, pruners and storage, and who works on which try.

    OUT/journal.log            all tries of all models, one Optuna study a model; several processes append to it
    OUT/asking.lock            held while a worker counts the tries and takes one, so that a budget is never overrun
    OUT/working/MODEL-K.lock   held by the worker that trains try K; the system gives it back however the worker ends

A try that Optuna has as running and whose lock is free is one that a killed worker left: the next worker takes it over
under the same number, with the same settings, and goes on from its checkpoint. Workers on several machines share a
folder, or a database (`storage`) and a folder.

A sampler is made anew for each try, from the study's seed and the number of tries before it: a study that was
interrupted asks for the same settings as one that was not. A pruner is made anew for each report, for the same reason:
Optuna's Hyperband would count its brackets by the tries that a process happened to see when it first asked.

Samplers see all tries. Under Hyperband Optuna shows each sampler the tries of one bracket only: of 40 tries, with TPE
beginning at its tenth, two thirds would be drawn at random.

Optuna is an extra that is imported where a study begins (decision 12); nothing else of the package needs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError, DataError, MissingDependencyError, ZigguratError
from ziggurat.files import FileLock, locked
from ziggurat.models.contract.search_space import Choices, Dimension, Floats, Integers, Value
from ziggurat.studies.tune_limit import SizeLimits
from ziggurat.studies.tune_space import TuningSpace

ASKING = "asking.lock"
_SPENT = "spent"  # user attributes of a try
_WHY = "why"
_DRAWN = "drawn"
_SQLITE_WAIT_S = 60


class Sampler(StrEnum):
    """Ways to choose the next settings."""

    TPE = "tpe"  # what good tries have more often than others (Bergstra et al. 2011)
    RANDOM = "random"
    QMC = "qmc"  # a Sobol sequence: random, evenly spread


class Pruner(StrEnum):
    """Ways to end a try early."""

    HYPERBAND = "hyperband"  # brackets of successive halving over evaluations (Li et al. 2018)
    MEDIAN = "median"  # worse than the median of the tries before, at the same evaluation
    WILCOXON = "wilcoxon"  # worse than the best try over the same seeds, by a signed-rank test
    NONE = "none"


class Ended(StrEnum):
    """Ways in which a try ended, or did not."""

    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    RUNNING = "running"


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The cost of a try so far, over all workers that trained it.

    Args:
        cpu_s: processor seconds, from before its model is built to its value.
        wall_s: seconds.
        rows: training rows, one pass after the other.
        flops: of steps and evaluations: FLOPs of a row times rows.
        evaluations: of the validation rows; of a complete try one more, of the best weights.
    """

    cpu_s: float = 0.0
    wall_s: float = 0.0
    rows: int = 0
    flops: float = 0.0
    evaluations: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            cpu_s=self.cpu_s + other.cpu_s,
            wall_s=self.wall_s + other.wall_s,
            rows=self.rows + other.rows,
            flops=self.flops + other.flops,
            evaluations=self.evaluations + other.evaluations,
        )


@dataclass(frozen=True, kw_only=True)
class Try:
    """One try of a study, finished or not.

    Args:
        number: from 0, in the order of asking.
        values: of the settings that were asked for.
        value: of the metric; None until it is complete.
        reached: the metric's best value at each evaluation.
        ended: see `Ended`.
        why: it failed or was given up; "" elsewhere.
        spent: on it.
        beyond: draws that lay beyond a limit before this one was within.
    """

    number: int
    values: dict[str, Value]
    value: float | None
    reached: dict[int, float] = field(default_factory=dict)
    ended: Ended
    why: str = ""
    spent: Spent = field(default_factory=Spent)
    beyond: int = 0


@dataclass
class Work:
    """A try that this process trains.

    Args:
        number: of the try.
        values: of its settings.
        before: what other workers spent on it, by seed.
        trial: Optuna's.
        study: Optuna's.
        pruner: returns the pruner of the moment.
        lock: says that this process has it.
        where: the storage, for errors.
    """

    number: int
    values: dict[str, Value]
    before: dict[str, Spent]
    trial: Any
    study: Any
    pruner: Callable[[], Any]
    lock: FileLock
    where: str

    def __post_init__(self) -> None:
        self.spent = dict(self.before)

    def report(self, value: float, *, step: int) -> bool:
        """Write down an intermediate value; return whether the pruner would end the try here."""
        with _as_ours(self.where), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a worker that goes on with a try reports again what is known already
            self.trial.report(value, step)
            # Not `trial.should_prune()`: the study would keep a pruner, by which Optuna hides tries from samplers.
            frozen = self.study.get_trials(deepcopy=False)[self.number]
            return bool(self.pruner().prune(self.study, frozen))

    def note(self, seed: int, spent: Spent) -> None:
        """Write down what one seed of the try has cost: seconds of this worker, all else from its beginning."""
        before = self.before.get(str(seed), Spent())
        now = dataclasses.replace(spent, cpu_s=before.cpu_s + spent.cpu_s, wall_s=before.wall_s + spent.wall_s)
        self.spent[str(seed)] = now
        with _as_ours(self.where):
            self.trial.set_user_attr(_SPENT, {name: vars(each) for name, each in self.spent.items()})

    def complete(self, value: float) -> None:
        """Finish the try with its value."""
        self._tell(value=value, state="COMPLETE")

    def prune(self, why: str) -> None:
        """End the try early; its last intermediate value stands for it, or that it has none."""
        self._tell(state="PRUNED", why=why)

    def fail(self, why: str) -> None:
        """End a try that cannot be trained."""
        self._tell(state="FAIL", why=why)

    def leave(self) -> None:
        """Leave the try to whoever goes on with it."""
        self.lock.release()

    def _tell(self, *, state: str, value: float | None = None, why: str = "") -> None:
        with _as_ours(self.where):
            if why:
                self.trial.set_user_attr(_WHY, why)
            trial_state = getattr(optuna().trial.TrialState, state)
            self.study.tell(self.trial, value, state=trial_state)
        self.lock.release()


class Tries:
    """The tries of one model in a study.

    Args:
        folder: of the whole study.
        model: its name.
        space: of the model.
        higher: whether the metric rises where it improves.
        sampler: of settings.
        pruner: of tries.
        seed: of the sampler.
        storage: URL of a database that Optuna can use; "" for the journal in the folder.
        limits: of the model's size; None: none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        space: TuningSpace,
        higher: bool,
        sampler: Sampler,
        pruner: Pruner,
        seed: int,
        storage: str = "",
        limits: SizeLimits | None = None,
    ) -> None:
        self.model = model
        self.space = space
        self.higher = higher
        self._folder = folder
        self._sampler = sampler
        self._pruner = pruner
        self._seed = seed
        self._limits = limits
        self._where = _without_password(storage) or str(folder / "journal.log")
        with _as_ours(self._where), asking(folder):
            self._study = optuna().create_study(
                storage=_storage(folder, url=storage),
                study_name=model,
                load_if_exists=True,
                direction="maximize" if higher else "minimize",
                pruner=optuna().pruners.NopPruner(),
            )

    def all(self) -> list[Try]:
        """Return every try so far, of all workers."""
        with _as_ours(self._where):
            return [_try_of(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def best(self, tries: Sequence[Try]) -> Try | None:
        """Return the best complete one of these tries, the first of equal ones; None where none is complete."""
        complete = [(each.value, each) for each in tries if each.value is not None]
        sign = 1.0 if self.higher else -1.0
        return max(complete, key=lambda pair: sign * pair[0], default=(None, None))[1]

    def next(
        self, *, may_ask: Callable[[Sequence[Try]], bool], may_go_on: Callable[[Sequence[Try]], bool]
    ) -> Work | None:
        """Take over a try that was left, or ask for a new one; None where there is nothing to do.

        Args:
            may_ask: whether another try may begin, given those that there are; asked while nobody else can ask.
            may_go_on: whether one of those may go on.
        """
        with _as_ours(self._where), asking(self._folder):
            trials = self._study.get_trials(deepcopy=False)
            tries = [_try_of(frozen) for frozen in trials]
            for frozen, each in zip(trials, tries, strict=True):
                if frozen.state.name == "WAITING":
                    # A worker was killed between writing settings down and taking them.
                    return self._ask(number=each.number)
                if each.ended is Ended.RUNNING and may_go_on(tries):
                    lock = self._lock(each.number)
                    if lock.take():
                        return self._take(frozen, lock=lock, number=each.number)
            return self._begin(number=len(trials)) if may_ask(tries) else None

    def _begin(self, *, number: int) -> Work:
        if number == 0:
            self._study.enqueue_trial(self.space.start() if self._limits is None else self._limits.start)
        return self._ask(number=number)

    def _ask(self, *, number: int) -> Work:
        self._study.sampler = self._sampler_of(number)
        trial = self._study.ask()
        # Before anything is suggested: another worker would take a running try without a lock for one that was left.
        lock = self._lock(trial.number)
        if not lock.take():
            raise _held(lock)
        return self._work(trial, lock=lock, before={})

    def _sampler_of(self, number: int) -> Any:
        sampler = _sampler(self._sampler, seed=self._seed, number=number)
        if self._limits is None or number == 0:
            return sampler
        return _limited(sampler, space=self.space, limits=self._limits)

    def _take(self, frozen: Any, *, lock: FileLock, number: int) -> Work:
        # Of a worker that was killed while it asked, a part of the settings may be missing: they are asked for now.
        self._study.sampler = self._sampler_of(number)
        # Optuna has no other way to go on with a try than this class, by the identity that its storage gave it.
        trial = optuna().trial.Trial(self._study, frozen._trial_id)
        return self._work(trial, lock=lock, before=_spent_of(frozen))

    def _work(self, trial: Any, *, lock: FileLock, before: dict[str, Spent]) -> Work:
        values = self.space.ask(lambda dimension: _suggest(trial, dimension))
        return Work(
            number=trial.number,
            values=values,
            before=before,
            trial=trial,
            study=self._study,
            pruner=lambda: _pruner(self._pruner, longest=_longest(self.all())),
            lock=lock,
            where=self._where,
        )

    def _lock(self, number: int) -> FileLock:
        folder = self._folder / "working"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{self.model}-{number}.lock")

    def importances(self) -> dict[str, float]:
        """Return the share of each setting in what tries differ by (PED-ANOVA); {} of too few tries."""
        complete = [each for each in self.all() if each.ended is Ended.COMPLETE]
        if len(complete) < 4 or len({each.value for each in complete}) < 2:
            return {}
        with _as_ours(self._where):
            importance = importlib.import_module("optuna.importance")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that some settings stand in few tries: the guide says it
                    evaluator = importance.PedAnovaImportanceEvaluator()
                    return dict(importance.get_param_importances(self._study, evaluator=evaluator))
            except (ValueError, RuntimeError):  # no setting that all of the best tries have
                return {}


def optuna() -> ModuleType:
    """Return Optuna, with its own lines of progress turned off.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        module = importlib.import_module("optuna")
    except ImportError as error:
        raise MissingDependencyError(
            expected="the package optuna, which samples and prunes tries",
            found=str(error),
            where="importing optuna",
            ways_out=("pip install 'ziggurat-rec[tune]'", "pip install 'optuna>=5,<6'"),
        ) from error
    module.logging.set_verbosity(module.logging.ERROR)
    return module


def _storage(folder: Path, *, url: str) -> Any:
    if url:
        try:
            return optuna().storages.RDBStorage(url, engine_kwargs=_engine_settings(url))
        except Exception as error:  # of SQLAlchemy, or of the driver of whichever database it is
            # SQLAlchemy's name for a server that does not answer, whichever driver says so; of a file it is a bad path.
            is_away = type(error).__name__ == "OperationalError" and not url.startswith("sqlite")
            raise ConfigError(
                expected="URL of a database that SQLAlchemy can open here: sqlite:///FILE, postgresql://…",
                found=_without_password(f"{type(error).__name__}: {error}")[:300],
                where="storage of tries (--storage)",
                ways_out=(
                    *(("give the same command again when the database answers: tries go on",) if is_away else ()),
                    f"a file in the folder of the study: --storage {pasted(f'sqlite:///{folder.absolute()}/study.db')}",
                    "leave --storage out: a journal in that folder, which several processes share too",
                    "install the driver of the database beside Optuna",
                ),
            ) from error
    journal = importlib.import_module("optuna.storages.journal")
    path = folder / "journal.log"
    lock = journal.JournalFileSymlinkLock(str(path))
    backend = journal.JournalFileBackend(str(path), lock_obj=lock)
    lock.acquire()
    try:
        _cut_torn_line(path)
    finally:
        lock.release()
    return optuna().storages.JournalStorage(backend)


def _engine_settings(url: str) -> dict[str, Any]:
    """Let a worker wait for a file that others write to; SQLite's own 5 s are over on a busy disk."""
    return {"connect_args": {"timeout": _SQLITE_WAIT_S}} if url.startswith("sqlite") else {}


def _without_password(text: str) -> str:
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:…@", text)


def _cut_torn_line(path: Path) -> None:
    """Remove the line that a worker did not finish, killed amid it or on a full disk.

    Optuna reads a journal up to such a line, and appends behind it: the line in the middle is then damage. What it
    would have said is said again by whoever goes on with the try.
    """
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _sampler(kind: Sampler, *, seed: int, number: int) -> Any:
    """Return the sampler of one try."""
    samplers = optuna().samplers
    own = _mixed(seed, number)
    makers: dict[Sampler, Callable[[], Any]] = {
        Sampler.TPE: lambda: samplers.TPESampler(seed=own),
        Sampler.RANDOM: lambda: samplers.RandomSampler(seed=own),
        # Of one sequence, whose place the study knows; what stands in some tries only is drawn anew in each.
        Sampler.QMC: lambda: samplers.QMCSampler(
            seed=seed, scramble=True, independent_sampler=samplers.RandomSampler(seed=own)
        ),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a class is experimental
        return makers[kind]()


def _limited(sampler: Any, *, space: TuningSpace, limits: SizeLimits) -> Any:
    """Return a sampler that draws with another one, again and again, until settings are within limits.

    All settings of a try are drawn together, before it has any. What was drawn is written down first: a worker that
    takes the try over has the same settings, whatever others have found meanwhile.
    """

    class Limited(optuna().samplers.BaseSampler):
        """Draws settings together; the methods are those that Optuna calls."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {each.name: _distribution(each) for each in space.dimensions}

        def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
            drawn = trial.user_attrs.get(_DRAWN)
            if drawn is None:
                values, beyond = limits.draw(lambda: self._once(study, trial, search_space))
                drawn = {"values": values, "beyond": beyond}
                # A sampler is given no public way to write to the try that it samples; Optuna's own do this, too.
                study._storage.set_trial_user_attr(trial._trial_id, _DRAWN, drawn)
            return dict(drawn["values"])

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            return sampler.sample_independent(study, trial, param_name, param_distribution)

        def before_trial(self, study: Any, trial: Any) -> None:
            sampler.before_trial(study, trial)

        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            sampler.after_trial(study, trial, state, values)

        def _once(self, study: Any, trial: Any, distributions: dict[str, Any]) -> dict[str, Value]:
            """Draw as `Trial` does: what a sampler draws together, then one by one what it leaves out."""
            together = sampler.sample_relative(study, trial, sampler.infer_relative_search_space(study, trial))

            def draw(dimension: Dimension) -> Value:
                if distributions[dimension.name].single():
                    return dimension.values[0] if isinstance(dimension, Choices) else dimension.low
                if dimension.name in together:
                    return together[dimension.name]
                return sampler.sample_independent(study, trial, dimension.name, distributions[dimension.name])

            return space.ask(draw)

    return Limited()


def _longest(tries: Sequence[Try]) -> int | None:
    """Return the evaluations of the first complete try, of which Hyperband makes its brackets; None before that.

    The same number for all workers and after every stop: no try after the first one can change it.
    """
    for each in tries:
        if each.ended is Ended.RUNNING:
            return None
        if each.ended is Ended.COMPLETE and each.reached:
            return max(each.reached)
    return None


def _pruner(kind: Pruner, *, longest: int | None) -> Any:
    pruners = optuna().pruners
    if kind is Pruner.HYPERBAND and longest is None:
        kind = Pruner.NONE
    makers: dict[Pruner, Callable[[], Any]] = {
        # One more, as Optuna counts it: the logarithm of a power of three may fall below a whole number.
        Pruner.HYPERBAND: lambda: pruners.HyperbandPruner(max_resource=(longest or 0) + 1),
        Pruner.MEDIAN: pruners.MedianPruner,
        Pruner.WILCOXON: pruners.WilcoxonPruner,
        Pruner.NONE: pruners.NopPruner,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return makers[kind]()


def _suggest(trial: Any, dimension: Dimension) -> Value:
    if isinstance(dimension, Choices):
        return trial.suggest_categorical(dimension.name, list(dimension.values))
    if isinstance(dimension, Floats):
        return trial.suggest_float(dimension.name, dimension.low, dimension.high, log=dimension.log)
    assert isinstance(dimension, Integers)
    step = {} if dimension.log else {"step": dimension.step}
    return trial.suggest_int(dimension.name, dimension.low, dimension.high, log=dimension.log, **step)


def _distribution(dimension: Dimension) -> Any:
    """Return the distribution that `_suggest` asks for."""
    distributions = importlib.import_module("optuna.distributions")
    if isinstance(dimension, Choices):
        return distributions.CategoricalDistribution(list(dimension.values))
    if isinstance(dimension, Floats):
        return distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    return distributions.IntDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def _try_of(frozen: Any) -> Try:
    ended = {"COMPLETE": Ended.COMPLETE, "PRUNED": Ended.PRUNED, "FAIL": Ended.FAILED}
    return Try(
        number=frozen.number,
        values=dict(frozen.params),
        value=frozen.value if frozen.state.name == "COMPLETE" else None,
        reached={step: value for step, value in sorted(frozen.intermediate_values.items())},
        ended=ended.get(frozen.state.name, Ended.RUNNING),
        why=frozen.user_attrs.get(_WHY, ""),
        spent=sum(_spent_of(frozen).values(), Spent()),
        beyond=frozen.user_attrs.get(_DRAWN, {}).get("beyond", 0),
    )


def _spent_of(frozen: Any) -> dict[str, Spent]:
    return {seed: Spent(**spent) for seed, spent in frozen.user_attrs.get(_SPENT, {}).items()}


def _mixed(seed: int, number: int) -> int:
    """Return a seed for the sampler of one try, far from those of its neighbours."""
    return (seed * 1_000_003 + number * 7_919) % (1 << 31)


@contextlib.contextmanager
def asking(folder: Path) -> Iterator[None]:
    """Hold what only one worker at a time may hold while it takes a try."""
    with locked(folder / ASKING):
        yield


def _held(lock: FileLock) -> ConfigError:
    return ConfigError(
        expected="a new try that nobody works on",
        found=f"one that {lock.holder()} holds",
        where=str(lock.path),
        ways_out=("give the command again", "give the study a folder of its own: --out FOLDER"),
    )


@contextlib.contextmanager
def _as_ours(where: str) -> Iterator[None]:
    """Say what is wrong with the storage of a study in four parts."""
    try:
        yield
    except (ValueError, KeyError, AssertionError) as error:
        if isinstance(error, ZigguratError):
            raise
        raise DataError(
            expected="the tries of a study as Optuna wrote them, a line each",
            found=f"{type(error).__name__}: {error}"[:200],
            where=where,
            ways_out=(*_up_to_the_damage(where), "restore it from a copy", "begin anew: --out ANOTHER_FOLDER"),
        ) from error
    except optuna().exceptions.StorageInternalError as error:
        cause = error.__cause__ or error
        raise DataError(
            expected="a database that takes and gives tries",
            found=_without_password(f"{type(cause).__name__}: {cause}")[:300],
            where=where,
            ways_out=(
                "give the same command again when the database answers and its disk has room: tries go on",
                "restore it from a copy",
                "begin anew, without a database: leave --storage out, and give --out ANOTHER_FOLDER",
            ),
        ) from error


def _up_to_the_damage(where: str) -> list[str]:
    """Return the way out of a journal whose lines are whole up to one: the tries behind it are made again."""
    path = Path(where)
    if not path.is_file():
        return []
    whole = 0
    for line in path.read_bytes().split(b"\n"):
        try:
            json.loads(line)
        except ValueError:
            break
        whole += 1
    kept = pasted(path.with_name("journal.whole"))
    return [f"keep the {whole} lines before it: head -n {whole} {pasted(path)} > {kept} && mv {kept} {pasted(path)}"]
