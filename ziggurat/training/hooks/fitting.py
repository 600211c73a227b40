"""The hooks that make `fit` out of steps: when to evaluate, to end and to save, and which weights stay.

    step ─► due? evaluate ─► all epochs, all steps, or out of patience? end ─► due, best or over? save
    end  ─► load the best weights

Each is taken out or changed by a hook that derives from it:

    class OnlyTheLast(RestoreBest):
        def on_end(self, trainer, result): ...

    trainer.fit(hooks=[OnlyTheLast()])        ends with the weights of the last step
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat.training.hooks.hook import Hook

if TYPE_CHECKING:
    from ziggurat.training.ending import FitResult
    from ziggurat.training.evaluation.evaluate import Evaluation
    from ziggurat.training.judging import MadeStep
    from ziggurat.training.trainer import Trainer


class AfterSteps(Hook):
    """Does something after each step, and where a pass has none: of an empty data set, or where no step is left."""

    def after(self, trainer: Trainer, *, is_last: bool) -> None:
        """Do it.

        Args:
            trainer: of the run.
            is_last: whether the pass over the data has no further batch.
        """
        raise NotImplementedError

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """Do it after a step."""
        self.after(trainer, is_last=made.is_last)

    def on_window(self, trainer: Trainer) -> None:
        """Do it after a pass without a step."""
        if not trainer.steps_of_pass:
            self.after(trainer, is_last=trainer.position.step_in_epoch == 0)


class EvaluateWhenDue(AfterSteps):
    """Evaluates the validation data each `evaluate_every` steps, or at the end of each epoch, and where a run ends."""

    def after(self, trainer: Trainer, *, is_last: bool) -> None:
        """Evaluate if it is due."""
        every = trainer.config.evaluate_every
        is_due = trainer.position.step % every == 0 if every else is_last
        if not trainer.steps_of_pass and trainer.position.is_evaluated:
            return
        if trainer.valid is not None and (is_due or trainer.is_at_limit):
            trainer.validate(is_extra=not is_due)


class EndWhenDone(AfterSteps):
    """Ends a run at its last epoch, at `max_steps`, or when patience is out."""

    def after(self, trainer: Trainer, *, is_last: bool) -> None:
        """Say whether the run is over."""
        del is_last
        trainer.agree_to_stop()  # before any rank saves, which all do together
        is_over = trainer.is_at_limit or trainer.ending.patience_is_out or bool(trainer.stop_reason)
        trainer.position.finished = is_over

    def on_window(self, trainer: Trainer) -> None:
        """Say it again: a hook may have ended training at the end of a pass."""
        self.after(trainer, is_last=True)


class SaveWhenDue(AfterSteps):
    """Saves each `checkpoint_every` steps, at the end of each epoch, the best weights, and the last ones."""

    def __init__(self) -> None:
        self._is_best = False

    def on_start(self, trainer: Trainer) -> None:
        """Forget another run."""
        self._is_best = False

    def on_evaluate(self, trainer: Trainer, evaluation: Evaluation, *, is_best: bool) -> None:
        """Remember the best weights until they are saved."""
        del evaluation
        self._is_best = is_best

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """Save after a step that is not the last one of a pass."""
        if not made.is_last:
            self.after(trainer, is_last=False)

    def on_window(self, trainer: Trainer) -> None:
        """Save after a pass, and after what other hooks record and decide there, so that the checkpoint knows of it."""
        self.after(trainer, is_last=trainer.position.step_in_epoch == 0)

    def after(self, trainer: Trainer, *, is_last: bool) -> None:
        """Save if it is due."""
        every = trainer.config.checkpoint_every
        is_due = bool(every) and trainer.position.step % every == 0
        if is_due or is_last or self._is_best or trainer.position.finished:
            trainer.save(pinned=self._is_best)
        self._is_best = False


class RestoreBest(Hook):
    """Loads the best weights when training is over."""

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        """Load them."""
        del result
        trainer.restore_best()
