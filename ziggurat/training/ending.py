"""How a run ended: what it did, why it makes no further step, and which setting lets it go on."""

from __future__ import annotations

from dataclasses import dataclass

from ziggurat.training.config import TrainingConfig
from ziggurat.training.position import Position


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The result of a finished `fit`.

    Args:
        steps: steps taken in all, resumed ones included.
        best_step: step of the best evaluation, 0 without validation data.
        best_value: the early-stop metric there.
        skipped: steps skipped because of NaN or infinity.
        stopped_early: whether patience ran out.
        end: why it ended, in words.
        samples_per_s: training rate of this process, or of all ranks together (evaluation, checkpoints and first step
            left out); 0 if no step.
        first_step_s: duration of this process's first step: it holds torch.compile, where asked for.
    """

    steps: int
    best_step: int
    best_value: float | None
    skipped: int
    stopped_early: bool
    end: str
    samples_per_s: float
    first_step_s: float

    @staticmethod
    def of(
        position: Position, *, stopped_early: bool, end: str, samples_per_s: float, first_step_s: float
    ) -> FitResult:
        """Return the result of a `fit` that ends at a position."""
        return FitResult(
            steps=position.step,
            best_step=position.best_step,
            best_value=position.best_value,
            skipped=position.skipped,
            stopped_early=stopped_early,
            end=end,
            samples_per_s=samples_per_s,
            first_step_s=first_step_s,
        )

    @property
    def summary(self) -> dict[str, float]:
        """Its numbers, for callbacks."""
        found = {"steps": float(self.steps), "best_step": float(self.best_step)}
        return found | ({} if self.best_value is None else {"best_value": self.best_value})


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Says whether a run at `position` is at its end under `config`, and why.

    Args:
        position: where it stands.
        config: its settings.
        stop_reason: why a hook of a user ended it; "" if none did.
    """

    position: Position
    config: TrainingConfig
    stop_reason: str = ""

    @property
    def is_finished(self) -> bool:
        """True if no step is left."""
        return self.position.finished or self.epochs_are_done

    @property
    def epochs_are_done(self) -> bool:
        """True if all epochs of the window were trained."""
        return self.position.epoch - self.position.window_epoch >= self.config.epochs

    @property
    def max_steps_reached(self) -> bool:
        """True if the limit of steps, if there is one, was reached."""
        return bool(self.config.max_steps) and self.position.step >= self.config.max_steps

    @property
    def no_step_is_left(self) -> bool:
        """True where `fit` has nothing to train, as after steps of one's own, or with a lower limit than before."""
        return self.epochs_are_done or self.max_steps_reached or self.patience_is_out

    @property
    def patience_is_out(self) -> bool:
        """True if early stop ends the run."""
        stop = self.config.early_stop
        is_out = bool(stop.patience) and self.position.not_improved >= stop.patience
        return is_out and self.position.step >= stop.min_steps

    def text(self) -> str:
        """Say why the run ends where it stands, and its best step, in one line; return "" while the run goes on."""
        position = self.position
        metric = self.config.early_stop.metric
        if not self.is_finished:
            return ""
        if self.epochs_are_done:
            reason = f"all epochs done ({self.config.epochs}), {position.step:,} steps"
        elif self.max_steps_reached:
            reason = f"max-steps reached at step {position.step:,}"
        elif self.stop_reason:
            reason = f"ended at step {position.step:,} by a hook: {self.stop_reason}"
        else:
            stop = self.config.early_stop
            since = f", from step {stop.min_steps:,} on" if position.not_improved > stop.patience else ""
            reason = (
                f"early stop at step {position.step:,}: {metric} no better in {position.not_improved} evaluations "
                f"(patience {stop.patience}{since})"
            )
        if position.best_value is None:
            return reason
        best = f"{reason}; best at step {position.best_step:,}, {metric} {position.best_value:.5f}"
        if self.epochs_are_done and position.best_step == position.step and len(position.evaluations) > 1:
            return f"{best}, the last one: train longer ({self.ways_on()})"
        return best

    def ways_on(self) -> str:
        """The settings that let a finished run go on."""
        position = self.position
        ways = []
        if self.epochs_are_done:
            ways.append(f"--training.epochs {position.epoch - position.window_epoch + 1}")
        if self.max_steps_reached:
            ways.append(f"--training.max-steps {2 * position.step}")
        if self.patience_is_out:
            ways.append(f"--training.early-stop.patience {position.not_improved + 1}")
        return " ".join(ways)
