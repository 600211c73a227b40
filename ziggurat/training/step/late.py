"""LateStep: guard, clip and update on a GPU that the host never waits for.

    host     step k: launch forward, backward, guard, update ─► step k+1: launch … ─► read the verdict of step k
    device             ──────────── step k ────────────────────────────── step k+1 ──────────
                        loss, finite?, norm ─► scale ─► update where finite ─► 4 + W numbers to locked memory

On the CPU the host reads loss, norm and finiteness between backward pass and update, and decides. Asked of a GPU each
of these questions empties its queue, and the GPU stands still until the host has launched more. Here the device
decides: the norm, the factor that clips, the learning rates, Adam's step number and the flag that lets the update
happen are scalars on the device, and a step that is not finite writes what was there before. What the host wants to
know travels behind the step, and is read a step later, when it has long arrived.

The promises are those of `train_step.py`: a step with a NaN touches no weight, clipping counts the tables, each loss
stands under its own step. Two things differ. A run that stops at such a step has trained the step after it already
(and saved nothing since). And a NaN in the gradient of a list of padding alone, which no row would take, counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from ziggurat.embeddings import TableOptimizer
from ziggurat.embeddings.faults import RowFaults, raise_fault
from ziggurat.embeddings.storage import LowPrecisionStorage, MemoryStorage
from ziggurat.embeddings.storage.host import HostStorage
from ziggurat.embeddings.tables import whole_tables
from ziggurat.features.batch import Batch
from ziggurat.models import Model
from ziggurat.training.config import TrainingConfig
from ziggurat.training.step.results import OVERFLOW, LateResult, StepResult
from ziggurat.training.step.weight_average import WeightAverage


class LateStep:
    """The part of a step on one GPU that follows the backward pass.

    Args:
        model: on the GPU.
        config: rates, and the norm to clip at.
        named: the dense weights.
        dense_optimizer: of torch, fused; None for a model without dense weights.
        table_optimizer: None for tables with dense gradients, which are among `named`.
        average: of the weights, if the run keeps one.

    Attributes:
        ahead: rows of the next batch, checked and sorted while this one is computed.
    """

    def __init__(
        self,
        model: Model,
        config: TrainingConfig,
        *,
        named: Mapping[str, nn.Parameter],
        dense_optimizer: torch.optim.Optimizer | None,
        table_optimizer: TableOptimizer | None,
        average: WeightAverage | None = None,
    ) -> None:
        self._tables = whole_tables(model.embeddings)
        self._config = config
        self._named = dict(named)
        self._dense = dense_optimizer
        self._table_optimizer = table_optimizer
        self._average = average
        device = self._tables.tables.device
        self._faults = RowFaults(self._tables, knows_rows=not model.looks_up_drawn_rows)
        self.ahead = self._faults.ahead
        # On the device: a recorded graph reads the rates of a step there, and not the numbers of its recording.
        self._rates = torch.zeros(2, device=device)
        self._factor = 0.0  # that the rates were made with
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._yes = torch.ones((), dtype=torch.bool, device=device)
        self._last: LateResult | None = None

    @staticmethod
    def why_not(model: Model, *, device: torch.device) -> str:
        """Say why steps of this run wait for the device, or return "" where they need not."""
        if device.type != "cuda":
            return "the CPU computes"
        rule = model.embeddings.config.optimizer
        if rule.is_in_torch_alone:
            return f"the rule of {rule} is in torch alone, and the host looks at its numbers before they are written"
        tables = model.embeddings.tables
        kinds = {type(tables.storage(index)) for index in range(tables.num_storages)}
        other = sorted(kind.__name__ for kind in kinds - {MemoryStorage, LowPrecisionStorage, HostStorage})
        if HostStorage in kinds and model.looks_up_drawn_rows:
            return "the model draws rows in a step, which tables in the host's memory have not sent ahead"
        return f"tables in {', '.join(other)} find their rows on the host" if other else ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, lookups leave the check of their rows to the device."""
        self._faults.lower()
        self.ahead.begin()
        for storage in self._tables.tables.in_host:
            storage.faults = self._faults.flag
        self._tables.tables.faults = self._faults
        try:
            yield
        finally:
            self._tables.tables.faults = None

    def set_rates(self, factor: float) -> None:
        """Put the learning rates of a step onto the device, where `decide` reads them.

        Args:
            factor: of the schedule, on both.
        """
        # A schedule that stands still writes nothing: each fill is a launch.
        if factor != self._factor:
            dense_rate, table_rate = self._rates.unbind()
            dense_rate.fill_(self._config.learning_rate * factor)
            table_rate.fill_(self._config.table_learning_rate * factor)
            self._factor = factor

    def decide(self, loss: Tensor, *, saved: Sequence[Tensor]) -> Tensor:
        """Guard, clip and update; return the message to the host. What differs from step to step is on the device.

        Args:
            loss: of the batch, detached.
            saved: what the model's floating-point buffers held before the forward pass.
        """
        # Weights that this batch did not touch, too: a verdict names weights by their places in this list.
        for parameter in self._named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self._named.values() if parameter.grad is not None]
        norms_W = torch.stack(torch._foreach_norm(gradients)) if gradients else self._rates[:0]
        # One number says both whether all are finite, and by how much to clip.
        squared = norms_W.square().sum().double()
        tables = self._yes
        if self._config.clip_norm:
            self.ahead.join()  # the norm is of the sums over equal rows
        if self._table_optimizer is not None and self._config.clip_norm:
            of_tables = self._table_optimizer.norm_squared_on_device()
            squared = squared + of_tables
            tables = of_tables.isfinite()
        elif self._table_optimizer is not None:
            tables = self._table_optimizer.are_finite_on_device()
        # Rows that no table has raise the flag: what was computed with them must change nothing.
        applies = loss.isfinite() & squared.isfinite() & tables & ~self._faults.flag
        scale = self._clip(gradients, squared) if self._config.clip_norm else None
        self._update(scale=scale, applies=applies)
        # The forward pass has moved running statistics already; a step that does not apply takes them back.
        for buffer, before in zip(self._buffers, saved, strict=True):
            buffer.copy_(torch.where(applies, buffer, before))
        if self._average is not None:
            self._average.update_where(applies)
        # One tensor of all, so that one copy takes them to the host; `_settle` reads them in this order.
        flags = torch.stack([loss.float(), applies.float(), self._faults.flag.float(), tables.float()])
        return torch.cat([flags, norms_W.float()])

    def send(self, numbers: Tensor, batch: Batch) -> LateResult:
        """Count a step that was decided on, and send its message to the host.

        Args:
            numbers: what `decide` gave; may be written again by the next step.
            batch: of the step; kept until the message is read.
        """
        if self._table_optimizer is not None:
            # As if it applied; `_settle` takes the count back where it did not.
            self._table_optimizer.count()
        into, arrived = _sent(numbers)
        self._last = LateResult(into, arrived=arrived, batch=batch, settle=self._settle)
        return self._last

    def settle(self) -> None:
        """Read the result of the last step: afterwards the host knows how many steps there were."""
        if self._last is not None:
            self._last.read()
            self._last = None

    def _clip(self, gradients: list[Tensor], squared: Tensor) -> Tensor:
        scale = (self._config.clip_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0).float()
        if gradients:
            torch._foreach_mul_(gradients, scale)
        return scale

    def _update(self, *, scale: Tensor | None, applies: Tensor) -> None:
        dense_rate, table_rate = self._rates.unbind()
        if self._dense is not None:
            for group in self._dense.param_groups:
                group["lr"] = dense_rate
            # Fused optimizers of torch read it on the device, and leave their weights where it is 1.
            self._dense.found_inf = (~applies).float()  # type: ignore[attr-defined]  # as torch's GradScaler does it
            self._dense.step()
        # Rows are sorted on a queue of their own, which must have come to its end.
        self.ahead.join()
        if self._table_optimizer is not None:
            self._table_optimizer.step_where(applies, lr=table_rate, scale=scale)

    def _settle(self, numbers: Float32[Tensor, "4+W"], batch: Batch) -> StepResult:
        """Return the result of a step whose message has arrived.

        Raises:
            BoundsError: a row of the batch lies outside its table.
        """
        loss, applies, has_fault, tables, *norms = numbers.tolist()
        if not applies and self._table_optimizer is not None:
            self._table_optimizer.take_back()
        if has_fault:
            raise_fault(self._tables, batch)
        first_bad = "" if applies else self._first_bad(loss, norms=norms, tables=bool(tables))
        return StepResult(loss=loss, finite=bool(applies), first_bad=first_bad, busy_s=LateResult.busy_s)

    def _first_bad(self, loss: float, *, norms: Sequence[float], tables: bool) -> str:
        """Name the tensor that made a step fail.

        Args:
            loss: of the batch.
            norms: of the gradient of each weight.
            tables: whether gradients of the tables are finite.
        """
        for name, parameter in self._named.items():
            if not bool(parameter.detach().isfinite().all()):
                return f"weight {name}"
        for name, norm in zip(self._named, norms, strict=True):
            if not math.isfinite(norm):
                return f"gradient of {name}"
        if not tables:
            return "gradient of the embedding tables"
        return "loss" if not math.isfinite(loss) else OVERFLOW


def _sent(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Send a few numbers to the host: the memory that they are to arrive in, and the event that says when."""
    into = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    into.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    # Behind the copy on the same queue: when it has happened the numbers are there.
    arrived.record()
    return into, arrived
