"""Judge: what a trainer does with the result of a step: sums of losses, the log, a batch that is not finite.

    CPU      step k ─► result k ─► judged
    GPU      step k ─► step k+1 ─► result k ─► judged          the host never waits for the step that it has just begun

A result is judged under the step that it belongs to: its loss joins the sums of that step, and a log line says the
step, the rows and the learning rate as they were then. Evaluations and checkpoints judge everything before they begin,
so a run that is resumed has the same log, whatever computed it. A batch stays in memory until its step was judged.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.training.config import NonFinite, TrainingConfig
from ziggurat.training.position import Position
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.report.progress import Progress
from ziggurat.training.safety_valve import SafetyValve
from ziggurat.training.step.non_finite import dump_batch, has_bad_number, non_finite_error
from ziggurat.training.step.results import LateResult, StepResult
from ziggurat.training.team import Team

_STEADY_STEPS = 100  # finite ones, in a row or not, after which a step that is not is an exception
_MAX_GROWTH = 10.0  # of the loss since the first step


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeStep:
    """A step that was made.

    Args:
        result: what it found, perhaps not known yet.
        batch: that it trained.
        step: its number, from 1.
        epoch: its epoch, from 0.
        num_rows: samples of all ranks.
        seconds: from the step before it, without evaluations and checkpoints between; on a GPU, until it was queued.
        is_last: whether the pass over the data has no step after it.
        line: what the log says of it beside the loss; None where no line is due.
    """

    result: StepResult | LateResult
    batch: Batch
    step: int
    epoch: int
    num_rows: int
    seconds: float
    is_last: bool
    line: dict[str, object] | None

    @property
    def loss(self) -> float:
        """Mean loss of the batch before the update; waits for a GPU that still computes it."""
        return self.result.loss


class Judge:
    """Judges the steps of one run, in their order.

    Args:
        team: the ranks.
        config: what to do with a batch that is not finite.
        inputs: of the model.
        folder: of the run.
        progress: where to say what was skipped.
        timing: what the log says of time, asked for when a line is written.
        write: writes a record with its timing into the log.
        valve: sends products of a dispatch back to FP32; None where there is no dispatch.

    Attributes:
        loss: of the step that was judged last; NaN before the first.
    """

    def __init__(
        self,
        team: Team,
        *,
        config: TrainingConfig,
        inputs: InputSpec,
        folder: RunFolder,
        progress: Progress,
        timing: Callable[[], dict[str, object]],
        write: Callable[[dict[str, object], dict[str, object]], None],
        valve: SafetyValve | None = None,
    ) -> None:
        self._team = team
        self._config = config
        self._inputs = inputs
        self._folder = folder
        self._progress = progress
        self._timing = timing
        self._write = write
        self._valve = valve
        self._made: deque[MadeStep] = deque()
        self._num_finite = 0
        self._first_loss = 0.0
        self._last_loss = 0.0
        self.loss = float("nan")

    def take(self, made: MadeStep) -> None:
        """A step was made."""
        self._made.append(made)

    def judge(self, position: Position, *, all_of_them: bool = False) -> None:
        """Judge the steps whose results are known without waiting for the newest one, or all of them.

        Args:
            position: of the run; sums of losses and skipped steps are counted there.
            all_of_them: the newest one too, however long it takes.

        Raises:
            NumericsError: NaN or infinity, with `non_finite` STOP; the batch is dumped.
        """
        kept = 0 if all_of_them or not self._made or isinstance(self._made[-1].result, StepResult) else 1
        while len(self._made) > kept:
            made = self._made.popleft()
            result = made.result.read()
            self.loss = result.loss
            if result.finite:
                self._note_finite(result.loss)
                self._ask_valve(made, result)
                position.loss_sum += result.loss * made.num_rows
                position.loss_rows += made.num_rows
            else:
                first_bad = self._on_non_finite(made, result)
                position.skipped += 1
                self._write({"kind": "skipped", "step": made.step, "first_bad": first_bad}, {})
            if made.line is not None and position.loss_rows:
                loss = position.loss_sum / position.loss_rows
                self._write(made.line | {"loss": loss}, self._timing())
                position.loss_sum = 0.0
                position.loss_rows = 0

    def _on_non_finite(self, made: MadeStep, result: StepResult) -> str:
        """Keep the batch and say so, or raise; the first bad tensor of all ranks."""
        name = f"step_{made.step:09d}{self._team.suffix}.safetensors"
        path = dump_batch(made.batch, self._folder.non_finite / name, self._inputs)
        first_bad = self._team.first_bad(result.first_bad)
        of_batch = False
        if self._valve is not None or self._config.non_finite is NonFinite.STOP:
            of_batch = any(self._team.gather(has_bad_number(made.batch)))
        was_sent_back = not of_batch and self._ask_valve(made, result)
        if self._config.non_finite is NonFinite.SKIP or was_sent_back:
            self._progress.say(f"step {made.step:,} skipped: {first_bad} is not finite; batch kept in {path}")
            return first_bad
        raise non_finite_error(
            loss=result.loss,
            first_bad=first_bad,
            step=made.step,
            epoch=made.epoch + 1,
            path=path,
            can_skip=of_batch or self._is_steady,
        )

    def _ask_valve(self, made: MadeStep, result: StepResult) -> bool:
        """Let the safety valve judge a step; return whether it sent products back to FP32."""
        done = "" if self._valve is None else self._valve.judge(result.loss, is_finite=result.finite)
        if done:
            self._progress.say(f"dispatch, step {made.step:,}: {done}")
            self._write({"kind": "products", "step": made.step, "sent_back": done}, {})
        return bool(done)

    def _note_finite(self, loss: float) -> None:
        if self._num_finite == 0:
            self._first_loss = loss
        self._num_finite += 1
        self._last_loss = loss

    @property
    def _is_steady(self) -> bool:
        """True if steps were finite for long, and their loss did not grow: the weights are in order.

        Else they are the likely reason, and each batch after this one would be skipped as well.
        """
        grown = abs(self._last_loss) > _MAX_GROWTH * max(abs(self._first_loss), 1.0)
        return self._num_finite >= _STEADY_STEPS and not grown
