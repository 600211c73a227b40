"""One training step: forward, loss, backward, guard, clip, update. The trainer and the benchmarks run this very code.

    lookup (FP32 tables) ─► towers, if any (eager) ─► interact (eager or compiled) ─► loss (FP32)
                            └───────── FP32 or BF16 ─────────┘   │ backward
    dense gradients ──┐                                          ▼
    table gradients ──┴─► all finite? ─► clip the global norm ─► dense optimizer, table optimizer

Tables are not updated inside the backward pass: the backward records the gradient of each lookup, and the table
optimizer applies the exact, deduplicated update afterwards. That costs nothing (the gradient exists anyway) and makes
three promises possible: a step with a NaN touches no weight, clipping counts the tables, gradients can be accumulated.
BF16 means autocast of the dense network: weights, gradients of weights and optimizer state stay FP32.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ziggurat.cache import cache_folder
from ziggurat.embeddings import TableOptimizer
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models import RankingModel
from ziggurat.ops.allocator import keep_freed_memory
from ziggurat.ops.matmul_rate import matmul_gflop_per_s
from ziggurat.training.config import Compile, DenseOptimizer, Precision, TrainingConfig
from ziggurat.training.losses import loss_of

MIN_BF16_SPEEDUP = 1.3


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step reports.

    Args:
        loss: mean loss of the batch, before the update.
        finite: False if loss or a gradient was NaN or infinite; then nothing was updated.
        first_bad: the first tensor that was not finite, "" if none.
    """

    loss: float
    finite: bool
    first_bad: str = ""


def resolve_precision(wanted: Precision, *, device: torch.device) -> tuple[Precision, str]:
    """What AUTO means on this device, with the reason for the start-up report."""
    if wanted is not Precision.AUTO:
        return wanted, "as asked"
    fp32 = matmul_gflop_per_s(torch.float32, device=str(device))
    bf16 = matmul_gflop_per_s(torch.bfloat16, device=str(device))
    chosen = Precision.BF16 if bf16 >= MIN_BF16_SPEEDUP * fp32 else Precision.FP32
    return chosen, f"measured here: FP32 {fp32:.0f}, BF16 {bf16:.0f} GFLOP/s"


class TrainStep:
    """Model, optimizers and precision bound together; call it with a batch.

    Args:
        model: on its device.
        config: training settings; `precision` AUTO is resolved here (see `precision` and `precision_reason`).

    On the CPU the process keeps freed memory from here on (see `ziggurat.ops.allocator`; `memory` says what was done).
    """

    def __init__(self, model: RankingModel, config: TrainingConfig) -> None:
        self.model = model
        self.config = config
        self.device = next(model.parameters()).device if any(True for _ in model.parameters()) else torch.device("cpu")
        self.precision, self.precision_reason = resolve_precision(config.precision, device=self.device)
        self.memory = keep_freed_memory() if self.device.type == "cpu" else "torch's allocator for this device"
        self.dense_named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._dense = list(self.dense_named.values())
        self.dense_optimizer = _dense_optimizer(self._dense, config) if self._dense else None
        fused = not model.embeddings.has_dense_gradients
        self.table_optimizer: TableOptimizer | None = TableOptimizer(model.embeddings) if fused else None
        self._whole_tables = [] if fused else list(model.embeddings.parameters())
        if config.embedding_l2 and not self._whole_tables:
            raise ConfigError(
                expected="dense-gradient tables, because embedding_l2 acts on whole tables at every step",
                found=f"embedding_l2 = {config.embedding_l2} with fused tables",
                where="training settings, embedding-l2",
                ways_out=("--model.embedding.optimizer adam_dense", "--training.embedding-l2 0"),
            )
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]
        self._interact = compiled_interact(model, config.compile)

    def __call__(self, batch: Batch, *, factor: float = 1.0) -> StepResult:
        """Train on one batch.

        Args:
            batch: on the model's device.
            factor: multiplies both learning rates (see `schedule`).
        """
        if self._buffers:
            torch._foreach_copy_(self._saved_buffers, self._buffers)
        loss = self._forward_backward(batch)
        value = float(loss.detach())
        scale, finite = self._guard(value)
        if not finite:
            result = StepResult(loss=value, finite=False, first_bad=self._first_bad(value))
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._saved_buffers)
            self.zero_grad()
            return result
        self._update(factor=factor, scale=scale)
        return StepResult(loss=value, finite=True)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._dense:
            parameter.grad = None
        if self.table_optimizer is not None:
            self.table_optimizer.zero_grad()

    def logits(self, batch: Batch) -> Tensor:
        """Forward pass in the step's precision; full batches run the compiled network, others the eager one."""
        full = batch.batch_size == self.config.loader.batch_size
        interact = self._interact if full else self.model.interact
        with self._autocast():  # of the tower modules too; `fields` leaves the lookup out
            return interact(batch.dense, self.model.fields(batch), batch.vectors).float()

    def _forward_backward(self, batch: Batch) -> Tensor:
        loss = loss_of(self.logits(batch), batch.labels, batch.weights, inputs=self.model.inputs)
        if loss.requires_grad:
            loss.backward()
        if self._whole_tables and self.config.embedding_l2:
            gradients = [table.grad for table in self._whole_tables if table.grad is not None]
            tables = [table.detach() for table in self._whole_tables if table.grad is not None]
            torch._foreach_add_(gradients, tables, alpha=self.config.embedding_l2)
        return loss

    def _guard(self, loss: float) -> tuple[float, bool]:
        """Factor that clips the gradients, and whether everything is finite."""
        gradients = [parameter.grad for parameter in self._dense if parameter.grad is not None]
        squared = torch.stack(torch._foreach_norm(gradients)).square().sum() if gradients else torch.zeros(())
        tables = self.table_optimizer
        if self.config.clip_norm:
            total = float(squared) + (float(tables.grad_norm_squared()) if tables is not None else 0.0)
            finite = _is_finite(loss) and _is_finite(total)
            return min(1.0, self.config.clip_norm / (total**0.5 + 1e-6)) if finite else 1.0, finite
        finite = _is_finite(loss) and _is_finite(float(squared)) and (tables is None or tables.all_finite())
        return 1.0, finite

    def _update(self, *, factor: float, scale: float) -> None:
        if scale != 1.0:
            torch._foreach_mul_([parameter.grad for parameter in self._dense if parameter.grad is not None], scale)
            if self.table_optimizer is not None:
                self.table_optimizer.scale_grad(scale)
        if self.dense_optimizer is not None:
            for group in self.dense_optimizer.param_groups:
                group["lr"] = self.config.learning_rate * factor
            self.dense_optimizer.step()
        if self.table_optimizer is not None:
            self.table_optimizer.step(self.config.table_learning_rate * factor)
        self.zero_grad()

    def _first_bad(self, loss: float) -> str:
        for name, parameter in self.dense_named.items():
            if not bool(parameter.isfinite().all()):
                return f"weight {name}"
        for name, parameter in self.dense_named.items():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return f"gradient of {name}"
        if self.table_optimizer is not None and not self.table_optimizer.all_finite():
            return "gradient of the embedding tables"
        return "loss" if not _is_finite(loss) else "norm of all gradients (overflow)"

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.precision is Precision.BF16:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()


def compiled_interact(model: RankingModel, mode: Compile) -> Callable[..., Tensor]:
    """The dense network of a model, compiled as asked; artifacts are cached for the next process."""
    if mode is Compile.OFF:
        return model.interact
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    inductor_mode = "max-autotune-no-cudagraphs" if mode is Compile.MAX_AUTOTUNE else None
    return torch.compile(model.interact, fullgraph=True, dynamic=False, mode=inductor_mode)


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def _dense_optimizer(parameters: list[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """Torch's own optimizers, in their fused form (one kernel for all parameters)."""
    rate, decay = config.learning_rate, config.weight_decay
    match config.optimizer:
        case DenseOptimizer.ADAM:
            return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, fused=True)
        case DenseOptimizer.ADAMW:
            return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
        case DenseOptimizer.ADAGRAD:
            return torch.optim.Adagrad(parameters, lr=rate, weight_decay=decay, fused=True)
        case DenseOptimizer.SGD:
            return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, fused=True)
