"""Hook: an object that a training run calls at fixed moments of its life, ours or a user's.

    on_start ─► on_step ─► on_step ─► … ─► on_window ─► … ─► on_end ─► close
                   │ on_record        each line of the training log
                   │ on_evaluate      validation data were evaluated
                   │ on_scored        a window of a stream was scored, and is not trained yet
                   │ on_labelled      the labels of a window that was scored before are complete
                   │ on_checkpoint    a checkpoint is about to be written

    class Slowest(Hook):
        def on_step(self, trainer, made): ...

    zg.fit(frame, label="bought", hooks=[Slowest()])     trainer.fit(hooks=[…])     zg.train_run(config, …, hooks=[…])

The trainer makes steps and knows how to evaluate, to save and to load. *When* it does so is said by hooks of ours
(`fitting.py`), and what is kept of it by others (`writers.py`); they have no method that a user's hook does not have. A
hook that derives from one of ours takes its place. In the order of a run: the log, the best weights, hooks of the
user, then evaluation, the end and checkpoints. So a user's `on_step` sees weights before they are evaluated, and a
user's `on_end` sees the best ones.

A hook is called on every rank, at the same step, and may therefore call what all ranks do together
(`trainer.evaluate`, `trainer.save`); where it does so on some ranks only, all raise an error that names hook and
moment. `trainer.stop` on one rank ends training on all, after the same step. A hook that writes files or talks to a
server sets `on_every_rank = False`, and is then called on the first rank alone. A module that is imported by
`ziggurat --extension` lists a hook by `Hook.add`, and `ziggurat train --hook NAME` takes it. Hooks live in one
process and may see several runs one after another: `on_start` begins anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ziggurat.errors import ConfigError, ZigguratError, comes_of_signal, frames_of_user, nearest_names
from ziggurat.specification import Specification

if TYPE_CHECKING:
    from ziggurat.training.ending import FitResult
    from ziggurat.training.evaluation.evaluate import Evaluation
    from ziggurat.training.judging import MadeStep
    from ziggurat.training.records.windows import WindowRecord
    from ziggurat.training.trainer import Trainer

_MAX_FRAMES = 5  # of an error in a hook: its own come first, what it calls of others' after them
_MAX_NESTED = 4  # calls of one moment of a hook within each other: one that looks for its own calls needs one or two
_WAYS_OUT_OF_ITSELF = {
    "on_checkpoint": "leave trainer.save() out of on_checkpoint: the checkpoint is written right after it",
    "on_evaluate": "trainer.evaluate(trainer.valid) in place of trainer.validate(): it leads to no other moment",
    "on_record": 'act on lines of one kind, which its own calls do not write: if record["kind"] != "train": return',
}


class Hook(Specification, kind="hook"):
    """Does nothing at each moment of a run. Derive from it, and define the methods that are needed.

    Attributes:
        name: what `--hook` calls it; hooks that are only passed as objects need none.
        on_every_rank: False: called on the first rank alone.
        may_stop: whether it may call `trainer.stop`, so that ranks ask each other after each step; any of yours may.
    """

    name: str = ""
    on_every_rank: ClassVar[bool] = True
    may_stop: ClassVar[bool] = False

    def on_start(self, trainer: Trainer) -> None:
        """Begin: weights are drawn or loaded, and no step of this call of `fit` is made yet."""

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """See a step that was made; `made.loss` waits for a GPU that still computes it."""

    def on_window(self, trainer: Trainer) -> None:
        """See the end of a pass over the training data: of an epoch, or of the window given to `steps`.

        Also where `fit` begins with no step left, after steps of one's own or with a lower limit than before.
        """

    def on_record(self, trainer: Trainer, record: Mapping[str, object], timing: Mapping[str, object]) -> None:
        """See a line of the training log.

        Args:
            trainer: of the run.
            record: holds `kind` (`train`, `valid`, `skipped`) and `step`, and numbers by name.
            timing: what depends on the clock.
        """

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation, *, is_best: bool) -> None:
        """See an evaluation of the validation data, and whether it is the best so far."""

    def on_scored(self, trainer: Trainer, record: WindowRecord) -> None:
        """See the score of a window of a stream, before its first row is trained; `trainer.stop` leaves it untrained.

        Its line is in windows.jsonl by then. The history has a record without metrics. A stream that was killed behind
        the line does not call again; one that goes on from before it scores the window again, and does. Where labels
        come in records of their own, behind the end of a window, its record has no metrics yet, and no line.
        """

    def on_labelled(self, trainer: Trainer, record: WindowRecord) -> None:
        """See the metrics of a window of a stream whose labels came later than its score; its line is there by then."""

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Bring to the disk what belongs to the present step: its checkpoint is written next, and resume begins there.

        The checkpoint is complete when `on_checkpoint` or `on_end` is called the next time.
        """

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        """See the end of training that did not fail."""

    def close(self) -> None:
        """Give back what is held; called last, also where training failed."""

    def not_begun(self) -> ConfigError:
        """Return the error for a moment that comes without `on_start` before it: an override left `super` out."""
        name = type(self).__name__
        return ConfigError(
            expected="on_start before any other moment of a run",
            found=f"a moment before it, or an on_start of {name} that does not call the one that it overrides",
            where=repr(self),
            ways_out=(
                "def on_start(self, trainer): super().on_start(trainer)",
                f"pass it to a run, which calls on_start first: trainer.fit(hooks=[{name}(…)])",
            ),
        )

    def try_out(self) -> None:
        """Refuse a method that no moment calls, and one that does not take what its moment gives.

        Raises:
            ConfigError: there is one, as after a slip of the pen.
        """
        # An attribute of the class begins with the same letters.
        moments = [name for name in vars(Hook) if name.startswith("on_") and name != "on_every_rank"]
        for name in (*moments, "close"):
            self._check_parameters(name)
        for name in dir(type(self)):
            if name.startswith("on_") and not hasattr(Hook, name):
                raise ConfigError(
                    expected=f"methods for the moments of a run: {', '.join(moments)}, close",
                    found=f"{type(self).__name__}.{name}, which nothing would call",
                    where=repr(self),
                    ways_out=[
                        *(f"def {near}(self, …)" for near in nearest_names(name, moments, most=1)),
                        f"a name that does not begin with on_: def _{name}(self, …)",
                    ],
                )

    def _check_parameters(self, moment: str) -> None:
        """Refuse a method that cannot be called as its moment calls it."""
        method = getattr(self, moment)
        parameters = list(inspect.signature(getattr(Hook, moment)).parameters.values())
        # Without `self`: the method is bound, and the one of `Hook` is not.
        given = [each for each in parameters[1:] if each.kind is not each.KEYWORD_ONLY]
        named = {each.name: None for each in parameters if each.kind is each.KEYWORD_ONLY}
        found = ""
        if not callable(method):
            found = f"{moment} = {method!r:.80}, which cannot be called"
        elif inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            found = f"async def {moment}, which nothing would wait for"
        elif inspect.isgeneratorfunction(method):
            found = f"{moment} with a yield: a generator, of which nothing would run a line"
        else:
            signature = inspect.signature(method)
            try:
                signature.bind(*given, **named)
            except TypeError as problem:
                found = f"{moment}{str(signature).partition(' ->')[0]}: {problem}"
        if found:
            stars = ["*"] if named else []
            wanted = ", ".join(["self", *(each.name for each in given), *stars, *named])
            raise ConfigError(
                expected=f"def {moment}({wanted})",
                found=found,
                where=f"the hook {self!r}",
                ways_out=(
                    f"def {moment}({wanted}): …",
                    f"leave {moment} out: a hook defines the moments that it needs",
                ),
            )

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}"


class Hooks:
    """The hooks of one run on one rank, called in their order.

    Args:
        hooks: of all ranks.
        trainer: that they are called with.
        is_first: whether this rank is the first.

    Attributes:
        has_own: some are a user's, or ours that may end training.
    """

    def __init__(self, hooks: Sequence[Hook], *, trainer: Trainer, is_first: bool) -> None:
        self._trainer = trainer
        # Asked of all hooks, also of those that this rank does not call: ranks have to agree on it.
        self.has_own = any(_is_of_user(hook) or hook.may_stop for hook in hooks)
        self._hooks = [hook for hook in hooks if is_first or hook.on_every_rank]
        self._calling = list[str]()  # hooks that are being called, and their moments; a hook may lead to another's call

    @property
    def calling(self) -> str:
        """The hook that is being called now, and its moment; "" outside of all hooks."""
        return self._calling[-1] if self._calling else ""

    def on_start(self) -> None:
        """Call `Hook.on_start`."""
        self._call("on_start")
        self._trainer.meet_after("on_start")

    def on_step(self, made: MadeStep) -> None:
        """Call `Hook.on_step`."""
        self._call("on_step", made)

    def on_window(self) -> None:
        """Call `Hook.on_window`."""
        self._call("on_window")
        self._trainer.meet_after("on_window")

    def on_record(self, record: Mapping[str, object], timing: Mapping[str, object]) -> None:
        """Call `Hook.on_record`."""
        self._call("on_record", record, timing)

    def on_evaluate(self, evaluation: Evaluation, *, is_best: bool) -> None:
        """Call `Hook.on_evaluate`."""
        self._call("on_evaluate", evaluation, is_best=is_best)
        self._trainer.meet_after("on_evaluate")

    def on_scored(self, record: WindowRecord) -> None:
        """Call `Hook.on_scored`; where one of them ends the run, on all ranks."""
        self._call("on_scored", record)
        # Here and not after the next step: what a hook wants left untrained must not take part in one.
        self._trainer.agree_to_stop(moment="on_scored")

    def on_labelled(self, record: WindowRecord) -> None:
        """Call `Hook.on_labelled`; where one of them ends the run, on all ranks."""
        self._call("on_labelled", record)
        self._trainer.agree_to_stop(moment="on_labelled")

    def on_checkpoint(self) -> None:
        """Call `Hook.on_checkpoint`."""
        self._call("on_checkpoint")
        self._trainer.meet_after("on_checkpoint")

    def on_end(self, result: FitResult) -> None:
        """Call `Hook.on_end`."""
        self._call("on_end", result)
        self._trainer.meet_after("on_end")

    def close(self) -> None:
        """Call `close` of every hook, also where one of them raises; the first error is raised at the end."""
        first: Exception | SystemExit | None = None
        # All of them, since each may hold something that nobody else gives back.
        for hook in self._hooks:
            self._calling.append(f"{hook!r}, close")
            try:
                hook.close()
            except SystemExit as error:
                first = first or (error if comes_of_signal(error) else self._ended(hook, "close", error))
            except Exception as error:
                self._name(hook, "close", error)
                first = first or error
            finally:
                self._calling.pop()
        if first is not None:
            raise first

    def _call(self, moment: str, *arguments: object, **named: object) -> None:
        for hook in self._hooks:
            place = f"{hook!r}, {moment}"
            if self._calling.count(place) == _MAX_NESTED:
                raise self._leads_to_itself(hook, moment)
            self._calling.append(place)
            try:
                getattr(hook, moment)(self._trainer, *arguments, **named)
            except SystemExit as error:  # or the run would end without a word, as if it were done
                if comes_of_signal(error):
                    raise
                raise self._ended(hook, moment, error) from error
            except Exception as error:
                self._name(hook, moment, error)
                raise
            finally:
                self._calling.pop()

    def _leads_to_itself(self, hook: Hook, moment: str) -> ConfigError:
        """Return the error for a moment of a hook whose calls lead to the same moment, and so on without an end."""
        # The latest of the same calls: from there on the cycle repeats.
        latest = max(index for index, place in enumerate(self._calling) if place == f"{hook!r}, {moment}")
        cycle = [place.rpartition(", ")[2] for place in self._calling[latest:]]
        return ConfigError(
            expected="hooks whose calls do not lead back to the moment that they are made in",
            found=f"{' → '.join([*cycle, moment])}, {_MAX_NESTED} times one within the other",
            where=f"the hook {hook!r}, {moment}, at step {self._trainer.position.step:,}",
            ways_out=tuple(_WAYS_OUT_OF_ITSELF[each] for each in dict.fromkeys(cycle) if each in _WAYS_OUT_OF_ITSELF),
        )

    def _ended(self, hook: Hook, moment: str, error: SystemExit) -> ConfigError:
        """Return the error for a hook that ended the program."""
        refused = ConfigError(
            expected="hooks that do not end the program",
            found=f"SystemExit: {error}",
            where=f"the hook {hook!r}, {moment}, at step {self._trainer.position.step:,}",
            ways_out=(
                'trainer.stop("a reason") ends training after the present step, and keeps its result',
                "raise an error that says what is wrong",
            ),
        )
        # As `raise … from` would do, which is not possible here: it is raised later.
        refused.__cause__ = error
        return refused

    def _name(self, hook: Hook, moment: str, error: Exception) -> None:
        """Add to an error of a user's hook which hook it is, and when; a command line says it in four parts."""
        if not _is_of_user(hook):
            return
        place = f"the hook {hook!r}, {moment}, at step {self._trainer.position.step:,}"
        note = f"raised by {place}"
        # The same error may come by twice, where calls of hooks are nested.
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        if isinstance(error, ZigguratError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return  # they say more than which line of the hook it was
        # Frames of ours say nothing to whoever wrote the hook.
        lines = frames_of_user(error)[:_MAX_FRAMES]
        error.in_four_parts = ConfigError(  # pyright: ignore[reportAttributeAccessIssue]
            expected="a hook that comes back from every moment of a run",
            found=f"{type(error).__name__}: {error}",
            where=", ".join([place, *lines]),
            ways_out=("correct the hook", "leave the hook out"),
        )


def _is_of_user(hook: Hook) -> bool:
    return not type(hook).__module__.startswith("ziggurat.")


def hooks_named(names: Sequence[str]) -> tuple[Hook, ...]:
    """Return listed hooks by name.

    Raises:
        ConfigError: there is none of a name.
    """
    import ziggurat.training.hooks.probe_products  # noqa: F401  it lists a hook of ours

    known = {hook.name: hook for hook in Hook}
    for name in names:
        if name not in known:
            raise ConfigError(
                expected="a hook that a module lists: " + ", ".join(known),
                found=repr(name),
                where=f"command line, --hook {name}",
                ways_out=[
                    *(f"--hook {near}" for near in nearest_names(name, known, most=2)),
                    "import the module that lists it by Hook.add: ziggurat --extension MODULE train …",
                ],
            )
    return tuple(known[name] for name in names)


def check_hooks(hooks: Sequence[object], *, where: str = "argument 'hooks'") -> tuple[Hook, ...]:
    """Return hooks of a user, if that is what they are.

    Raises:
        ConfigError: one is a class, a callback or something else, or has a method that nothing calls.
    """
    found: list[Hook] = []
    for hook in hooks:
        if isinstance(hook, Hook):
            hook.try_out()
            found.append(hook)
            continue
        name = hook.__name__ if isinstance(hook, type) else type(hook).__name__
        ways = [f"derive from it: class {name}(Hook), from ziggurat.training.hooks.hook import Hook"]
        if isinstance(hook, type) and issubclass(hook, Hook):
            ways = [f"make one: hooks=[{name}()]"]
        elif hasattr(hook, "on_log"):
            ways = [f"it is a callback: callbacks=[{name}(…)]", *ways]
        raise ConfigError(
            expected="objects that derive from ziggurat.training.hooks.hook.Hook",
            found=f"the class {name}" if isinstance(hook, type) else f"an object of {name}",
            where=where,
            ways_out=ways,
        )
    return tuple(found)


def with_own(defaults: Sequence[Hook], own: Sequence[Hook]) -> tuple[Hook, ...]:
    """Return hooks of ours, each replaced by those of the user that derive from its class."""
    found: list[Hook] = []
    for default in defaults:
        # Several of the user's may take the place of one of ours.
        found += [hook for hook in own if isinstance(hook, type(default))] or [default]
    return tuple(found)
