"""One training step: forward, loss, backward, guard, clip, update. The trainer and the benchmarks run this very code.

    embed: lookup (FP32 tables), towers (eager) ─► forward_dense (eager or compiled) ─► loss (FP32)
                                 └─────────── FP32 or BF16 ───────────┘           │ backward
    dense gradients ──┐                                                           ▼
    table gradients ──┴─► all finite? ─► clip the global norm ─► dense optimizer, table optimizer

On many ranks the same step runs on each, with its own samples: what it adds up over ranks stands in `world_sums.py`,
gradients are summed by whatever holds the weights (`parallel/`), and every rank comes to the same verdict.

A step passes through three records, each made by whoever knows the most of it, and handed on as it is:

    source ──► Fed (`feed.py`)          the batch as it was given, on its way to the device, and the one after it
                 │ TrainStep
                 ▼
               StepResult (`results.py`)  loss, verdict, Σ g² and busy seconds, summed over ranks; on a GPU
                 │                        `LateResult` is its future, which the judge reads a step later
                 ▼
               MadeStep (`judging.py`)    both with number, epoch, time and log line, for the judge and for hooks

Tables are not updated inside the backward pass: the backward records the gradient of each lookup, and the table
optimizer applies the exact, deduplicated update afterwards. That costs nothing (the gradient exists anyway) and makes
three promises possible: a step with a NaN touches no weight, clipping counts the tables, gradients can be accumulated.
BF16 means autocast of the dense network: weights, gradients of weights and optimizer state stay FP32.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ziggurat.embeddings import TableOptimizer
from ziggurat.errors import ConfigError, ZigguratError
from ziggurat.features.batch import Batch
from ziggurat.models import Embedded, LossSums, Model, Outputs
from ziggurat.models.blocks.batch_norm import BatchNorm, refuse_lone_sample
from ziggurat.models.contract.losses import take_bad_loss
from ziggurat.models.contract.model import device_of
from ziggurat.models.contract.outputs_check import checked_outputs
from ziggurat.models.converted import dispatched_arithmetics, take_precision
from ziggurat.ops.machine.allocator import keep_freed_memory
from ziggurat.parallel.dense import DenseForward, DenseParallelism, ShardedNetwork, compute_copies
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.parallelize import Parallel
from ziggurat.parallel.pipeline import Pipeline
from ziggurat.parallel.tables.optimizer import ShardedTableOptimizer
from ziggurat.precision import PLAIN, DenseProducts
from ziggurat.precision.choice import resolve_precision
from ziggurat.precision.dispatch import DispatchPlan
from ziggurat.training.config import Compile, DenseOptimizer, StepGraphs, TrainingConfig
from ziggurat.training.step.compiled import compiled_dense
from ziggurat.training.step.exchange import StepExchange
from ziggurat.training.step.graph import StepGraph, why_no_graph
from ziggurat.training.step.late import LateStep
from ziggurat.training.step.own_loss import LossFunction, checked_sums, loss_name, refuse_unweighted
from ziggurat.training.step.results import OVERFLOW, LateResult, StepResult
from ziggurat.training.step.self_distillation import SelfDistillation
from ziggurat.training.step.weight_average import weight_average
from ziggurat.training.step.world_sums import WorldSums, local

ACTIVATIONS = "activations"
"""Name in `TrainStep.products_in_few_bits` of BF16 activations of a dispatch, and products that are torch's own."""


class TrainStep:
    """Model, optimizers and precision bound together; call it with a batch.

    Args:
        model: on its device.
        config: training settings; `precision` AUTO is resolved here (see `precision` and `precision_reason`).
        parallel: the ranks, if `parallelize` has spread the model; all of them construct and call together.
        loss: minimised instead of `model.loss`; see `own_loss.py`.

    Attributes:
        activations: precision of what lies between products: that of the run, or of the file of a dispatch.
        late: what decides on the device, on one GPU.
        graph: makes steps of full batches by one CUDA graph; None where `no_graph` says why not.
        self_distillation: teaches the model by its earlier weights; its `begin` comes before each step. None: labels
            alone do.

    On the CPU the process keeps freed memory from here on (`ops/machine/allocator.py`; `memory` says what was done).
    On one GPU the host does not wait for a step, and its result is read later (`late.py`); `waits` says why it does.
    """

    def __init__(
        self,
        model: Model,
        config: TrainingConfig,
        *,
        parallel: Parallel | None = None,
        loss: LossFunction | None = None,
    ) -> None:
        self.model = model
        self._loss: LossFunction = loss or model.loss
        self._loss_name = loss_name(loss) or f"of {type(model).__name__}"
        self._is_first = True  # until a batch with samples has shown what network and loss give
        self.config = config
        self.parallel = parallel
        _check_compile(config, model=model, parallel=parallel)
        self.device = device_of(model)
        self.precision, self.precision_reason = resolve_precision(config.precision, device=self.device)
        self.precision.use(self.device)
        self.products = take_precision(
            model, self.precision, is_parallel=parallel is not None, dispatch=config.dispatch
        )
        self.activations = self.precision
        if self.precision.is_dispatched:
            self.activations = DispatchPlan.activations_of(config.dispatch)
        self._dispatched = dispatched_arithmetics(model)
        self.memory = keep_freed_memory() if self.device.type == "cpu" else "torch's allocator for this device"
        if isinstance(model.slots.network, ShardedNetwork):
            model.slots.network.reshard()  # optimizers hold parts, also where the model has been evaluated before
        self.dense_named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._dense = list(self.dense_named.values())
        fused = not model.embeddings.has_dense_gradients
        self._whole_tables = [] if fused else list(model.embeddings.parameters())
        self.dense_optimizer = _dense_optimizer(self._dense, config, tables=self._whole_tables) if self._dense else None
        self.table_optimizer: TableOptimizer | ShardedTableOptimizer | None = None
        if parallel is not None:
            self.table_optimizer = parallel.table_optimizer(model)
        elif fused:
            self.table_optimizer = TableOptimizer(model.embeddings)
        _check_forget(config, model=model)
        self._world = WorldSums(parallel, self.dense_named)
        self._pipeline = None if parallel is None else Pipeline(model, parallel, num_parts=parallel.config.num_parts)
        self.exchange = StepExchange.of(parallel, clips=bool(config.clip_norm))
        if config.embedding_l2 and not self._whole_tables:
            raise ConfigError(
                expected="dense-gradient tables, because embedding_l2 acts on whole tables at every step",
                found=f"embedding_l2 = {config.embedding_l2} with fused tables",
                where="training settings, embedding-l2",
                ways_out=("--model.embedding.optimizer adam_dense", "--training.embedding-l2 0"),
            )
        self.self_distillation = SelfDistillation.of(model, config, parallel=parallel)
        self.average = weight_average(model, config, fused=fused, is_spread=parallel is not None)
        # Such as running means: a forward pass changes them, and a step that is refused must give them back.
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]
        self._full_size = model.trained_rows(config.loader.batch_size)
        self._forward_dense = model.dense_outputs
        self.waits = "ranks agree on every step" if parallel else LateStep.why_not(model, device=self.device)
        self.no_graph = why_no_graph(model, config, waits=self.waits, has_own_loss=loss is not None)
        self._compile = config.compile
        if config.compile is Compile.CUDA_GRAPHS and not self.no_graph:
            self._compile = Compile.DEFAULT  # one graph holds the whole step, and graphs do not nest
        model.slots.expands_lists = config.compile is not Compile.OFF
        if parallel is None:
            self._forward_dense = compiled_dense(model.trained_dense, self._compile, device=self.device)
        elif config.compile is not Compile.OFF:
            eager = model.trained_dense
            compiled = compiled_dense(eager, config.compile, device=self.device)
            compute_copies(model.slots.network, _FullBatches(eager, compiled, size=self._full_size))
        # On one device the loss divides by its own weight, so there is nothing to compare.
        self._is_weight_checked = parallel is None
        self._news: list[str] = []
        if config.compile is not Compile.OFF:
            self._news.append("the first step compiles the dense network: 10 to 110 s, 2 to 5 s from the cache")
        self.late: LateStep | None = None
        if not self.waits:
            optimizers = {"dense_optimizer": self.dense_optimizer, "table_optimizer": self.table_optimizer}
            self.late = LateStep(model, config, named=self.dense_named, average=self.average, **optimizers)
        if config.step_graph is StepGraphs.ON and self.no_graph:
            raise ConfigError(
                expected="--training.step-graph auto or off, or a run whose full batches can be one CUDA graph",
                found=self.no_graph,
                where="training settings, step-graph",
                ways_out="--training.step-graph auto",
            )
        self.graph: StepGraph | None = None
        if self.late is not None and not self.no_graph:
            self.graph = self._new_graph(self.late)

    def _new_graph(self, late: LateStep) -> StepGraph:
        return StepGraph(
            partial(self._on_device, late),
            forget=self.zero_grad,
            ahead=late.ahead,
            device=self.device,
            choice=self.config.step_graph,
            has_room=bool(self.model.inputs.jagged) and not self.config.clip_norm,
        )

    def __call__(self, batch: Batch, *, factor: float = 1.0, upcoming: Batch | None = None) -> StepResult | LateResult:
        """Train on one batch.

        Args:
            batch: on the model's device.
            factor: multiplies both learning rates (see `schedule`).
            upcoming: the batch of the next step, if it is known: on many ranks its ids are sent meanwhile, and a disk
                reads its rows.
        """
        if self.self_distillation is not None:
            self.self_distillation.require_begun()
        if self.late is not None:
            return self._step_late(self.late, batch, factor=factor, upcoming=upcoming)
        with communicating("gradients of the dense network"):  # torch raises its own errors there
            return self._step(batch, factor=factor, upcoming=upcoming)

    def _step(self, batch: Batch, *, factor: float, upcoming: Batch | None) -> StepResult:
        if self._buffers:
            torch._foreach_copy_(self._saved_buffers, self._buffers)
        start_s = time.perf_counter()
        begin_s = time.thread_time()  # of this thread: it stands still while the thread waits for other ranks
        # Here the host waits for the device.
        loss = float(self._forward_backward(batch, upcoming).detach())
        # The clock of a thread says nothing about a GPU, which works by itself.
        busy_s = time.thread_time() - begin_s if self.device.type == "cpu" else 0.0
        result, scale = self._guard(loss, busy_s=busy_s)
        if self.parallel is not None:
            self.parallel.traffic.num_steps += 1
        if not result.finite:
            # Before buffers and gradients go: they are what it looks at.
            first_bad = self._first_bad(result.loss)
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._saved_buffers)
            self.zero_grad()
            return replace(result, first_bad=first_bad)
        self._update(factor=factor, scale=scale)
        if self.exchange is not None:
            self.exchange.count(time.perf_counter() - start_s)
        return result

    def _step_late(self, late: LateStep, batch: Batch, *, factor: float, upcoming: Batch | None) -> LateResult:
        late.set_rates(factor)
        numbers = None if self.graph is None else self.graph.step(batch)
        if numbers is None:
            numbers = self._on_device(late, batch, upcoming)
        return late.send(numbers, batch)

    def _on_device(self, late: LateStep, batch: Batch, upcoming: Batch | None = None) -> Tensor:
        """Make the device's part of a step that the host does not wait for; return its packed verdict."""
        if self._buffers:
            torch._foreach_copy_(self._saved_buffers, self._buffers)
        with late.watching():
            loss = self._forward_backward(batch, upcoming).detach()
        numbers = late.decide(loss, saved=self._saved_buffers)
        self.zero_grad()
        return numbers

    def forget(self, share: float) -> None:
        """Forget a share of what row-wise Adagrad has summed up; collective.

        Args:
            share: 0 to 1.
        """
        assert self.table_optimizer is not None, "refused by `_check_forget`"
        self.settle()
        self.table_optimizer.forget(share)

    def settle(self) -> None:
        """Complete the last update, before anything reads tables as a whole; collective, and free where it is."""
        if self.late is not None:
            self.late.settle()
        self.model.embeddings.settle()

    def facts(self) -> dict[str, object]:
        """Return what the exchange between ranks, the embeddings and a student did since the last call, for the log."""
        found = self.exchange.since_last() if self.exchange is not None else {}
        student = self.model.student
        return found | self.model.embeddings.facts() | ({} if student is None else student.facts())

    def take_news(self) -> list[str]:
        """Return what has been decided about steps since the last call, for people."""
        news = self._news
        self._news = []
        for arithmetic in self._dispatched:
            news += arithmetic.take_news()
        return news if self.graph is None else news + self.graph.take_news()

    def products_in_few_bits(self) -> dict[str, float]:
        """Return the products of a dispatch that are not in FP32: largest measured error by module, ∞ if unknown.

        BF16 activations are one more, `ACTIVATIONS`, with the error 0: they are the last to go back.
        """
        found = {each.module: each.error for each in self._dispatched if each.is_in_few_bits}
        if self.precision.is_dispatched and self.activations.dtype is not torch.float32:
            found[ACTIVATIONS] = 0.0
        return found

    def send_back(self, names: Collection[str]) -> None:
        """Compute products of a dispatch in FP32 from here on; call between steps, alike on all ranks.

        Args:
            names: among those of `products_in_few_bits`; others are passed over.
        """
        gone = [each for each in self._dispatched if each.module in names and each.is_in_few_bits]
        for each in gone:
            each.send_back()
        if ACTIVATIONS in names:
            self.activations = PLAIN
        if self.late is not None and self.graph is not None and names:
            self.graph = self._new_graph(self.late)  # the one that was recorded has the kernels of before

    def zero_grad(self) -> None:
        """Forget all gradients."""
        # None and not zeros: it tells a weight that nothing used.
        for parameter in self._dense:
            parameter.grad = None
        if self.table_optimizer is not None:
            self.table_optimizer.zero_grad()

    def outputs(self, batch: Batch) -> Outputs:
        """Forward pass in the step's precision; full batches run the compiled network, others the eager one."""
        if batch.batch_size == 1 and self.model.training:
            refuse_lone_sample(self.model, where="the batch of this step")
        full = batch.batch_size == self._full_size
        with self._autocast():  # of the tower modules too; `embed` leaves the lookup out
            embedded = self.model.embed(batch)
            if self.self_distillation is not None:
                self.self_distillation.look(embedded, batch)
            if not full or self.config.compile is Compile.OFF:
                return self.model.dense_outputs(embedded)
            for sequence in embedded.sequences.values():
                torch._dynamo.maybe_mark_dynamic(sequence.values, 0)  # lists of a batch have any number of rows
            for found in embedded.named.values():
                # Offsets of lists have one more than there are samples.
                if found.dim() and found.shape[0] not in (batch.batch_size, batch.batch_size + 1):
                    torch._dynamo.maybe_mark_dynamic(found, 0)  # so has what was found of them
            return self._forward_dense(embedded)

    def overlaps(self) -> list[str]:
        """List what travels while something is computed, on many ranks."""
        return [*(self._pipeline.overlaps() if self._pipeline else []), "loss weights: with the forward pass"]

    def warm_up(self) -> None:
        """One forward and backward pass without samples; changes nothing that a run depends on; collective.

        FSDP and the exchanges set themselves up in their first pass. After this, the first step of a resumed run does
        the same as the same step of a run that was never stopped.
        """
        try:
            self._forward_backward(Batch.empty(self.model.inputs).to(self.device))
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError) as error:
            if isinstance(error, ZigguratError) or type(self.model).__module__.startswith("ziggurat."):
                raise
            raise ConfigError(
                expected="a model that takes a batch without samples, with which ranks set themselves up",
                found=f"{type(error).__name__}: {error}",
                where=f"forward or backward pass of {type(self.model).__name__}, B = 0",
                ways_out=(
                    "say each size: x.reshape(len(x), fields, dim), for torch cannot infer -1 from nothing",
                    "train on one device",
                ),
            ) from error
        self.zero_grad()

    def _forward_backward(self, batch: Batch, upcoming: Batch | None = None) -> Tensor:
        if self._pipeline is not None:
            weight = self._world.start_weight(self.model.loss_weight(batch))

            def loss_of(outputs: Outputs, part: Batch) -> Tensor:
                sums = self._sums(outputs, part)
                self._check_weight(sums, part)
                return sums.mean(weight.wait())  # this part's share of the global loss

            look = None if self.self_distillation is None else self.self_distillation.look
            return self._pipeline.step(batch, loss_of=loss_of, autocast=self._autocast, upcoming=upcoming, look=look)
        self.model.embeddings.begin(batch)
        outputs = self.outputs(batch)
        if upcoming is not None:
            self.model.embeddings.announce(upcoming)  # its rows travel meanwhile
            if self.late is not None:
                self.late.ahead.announce(upcoming)
        loss = self._sums(outputs, batch).mean()
        if loss.requires_grad:
            loss.backward()
        if self._whole_tables and self.config.embedding_l2:
            gradients = [table.grad for table in self._whole_tables if table.grad is not None]
            tables = [table.detach() for table in self._whole_tables if table.grad is not None]
            # The gradient of ½ · embedding_l2 · ‖table‖².
            torch._foreach_add_(gradients, tables, alpha=self.config.embedding_l2)
        return loss

    def _sums(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Return the loss sums to minimise, with second views of the batch where there are any."""
        sums = self._sums_of_labels(outputs, batch)
        return sums if self.self_distillation is None else self.self_distillation.mixed(sums, outputs, batch)

    def _sums_of_labels(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Return the loss sums of the labels; the first time, check that network and loss give what a step can use."""
        if not self._is_first or not batch.batch_size:
            return self._loss(outputs, batch)
        where = f"forward_dense of {type(self.model).__name__}"
        outputs = checked_outputs(outputs, model=self.model, num_samples=batch.batch_size, where=where)
        sums = checked_sums(self._loss(outputs, batch), batch, name=self._loss_name)
        refuse_unweighted(sums, batch, model=self.model, name=self._loss_name)
        self._is_first = False
        return sums

    def _check_weight(self, sums: LossSums, batch: Batch) -> None:
        """Once: the weight that ranks add up ahead must be the one that the loss divides by."""
        if self._is_weight_checked:
            return
        expected = self.model.loss_weight(batch)
        if expected.shape != sums.weight.shape or not torch.allclose(expected, sums.weight.detach()):
            raise ConfigError(
                expected=f"loss_weight(batch) of the model to be the weight of its loss, {sums.weight.tolist()}",
                found=str(expected.tolist()),
                where=f"model {type(self.model).__name__}, on several ranks",
                ways_out="make the loss a method of the model, and override loss_weight beside it",
            )
        self._is_weight_checked = bool(expected.any())  # a batch without samples proves nothing

    def _guard(self, loss: float, *, busy_s: float) -> tuple[StepResult, float]:
        """Return the result of all ranks, and the factor that clips the gradients."""
        squared = float(self._world.squared_norm())
        tables = self.table_optimizer
        finite = True
        if tables is not None and self.config.clip_norm:
            squared += float(tables.grad_norm_squared())  # not finite if any gradient is not
        bound = None
        if isinstance(tables, ShardedTableOptimizer) and not self.config.clip_norm:
            bound = tables.bound()
        if tables is not None and not self.config.clip_norm and bound is None:
            finite = tables.all_finite()
        result = self._world.totals(loss=loss, squared=squared, finite=finite, busy_s=busy_s, bound=bound)
        if result is None:  # the sums themselves have to tell
            assert tables is not None, "their gradients are bounded"
            finite = tables.all_finite()
            result = self._world.totals(loss=loss, squared=squared, finite=finite, busy_s=busy_s)
            assert result is not None, "nothing is to be proved"
        if result.finite and self.config.clip_norm:
            # The small term is that of torch's `clip_grad_norm_`.
            return result, min(1.0, self.config.clip_norm / (result.squared**0.5 + 1e-6))
        return result, 1.0

    def _update(self, *, factor: float, scale: float) -> None:
        for parameter in self._dense:  # a weight that nothing used: zero, as on many ranks, so that its state exists
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if scale != 1.0:
            # Each rank scales its own part, all by the same factor.
            gradients = [local(parameter.grad) for parameter in self._dense if parameter.grad is not None]
            torch._foreach_mul_(gradients, scale)
            if self.table_optimizer is not None:
                self.table_optimizer.scale_grad(scale)
        if self.dense_optimizer is not None:
            for group in self.dense_optimizer.param_groups:
                group["lr"] = self.config.learning_rate * factor
            self.dense_optimizer.step()
        if self.table_optimizer is not None:
            self.table_optimizer.step(self.config.table_learning_rate * factor)
        self.zero_grad()
        if self.average is not None:
            self.average.update()

    def _first_bad(self, loss: float) -> str:
        # In the order of causes: a bad weight spoils everything that comes after it.
        for name, parameter in self.dense_named.items():
            if not bool(local(parameter.detach()).isfinite().all()):
                return f"weight {name}"
        for module in self.model.modules():
            if isinstance(module, DenseProducts) and (overflow := module.arithmetic.take_overflow()):
                return overflow
        if bad_loss := take_bad_loss(self.model.inputs):
            return bad_loss
        for name, parameter in self.dense_named.items():
            if parameter.grad is not None and not bool(local(parameter.grad).isfinite().all()):
                return f"gradient of {name}"
        if self.table_optimizer is not None and not self.table_optimizer.all_finite():
            return "gradient of the embedding tables"
        return "loss" if not math.isfinite(loss) else OVERFLOW

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return self.activations.autocast(self.device)


class _FullBatches:
    """The compiled network for training on full batches; the eager one for the last of an epoch, and for evaluation."""

    def __init__(self, eager: DenseForward, compiled: DenseForward, *, size: int) -> None:
        self._eager = eager
        self._compiled = compiled
        self._size = size

    def __call__(self, embedded: Embedded) -> Outputs:
        if embedded.dense.shape[0] != self._size or not torch.is_grad_enabled():
            return self._eager(embedded)
        for sequence in embedded.sequences.values():
            torch._dynamo.maybe_mark_dynamic(sequence.values, 0)
        return self._compiled(embedded)


def _check_forget(config: TrainingConfig, *, model: Model) -> None:
    """Refuse to forget sums that no table optimizer keeps."""
    kind = model.embeddings.config.optimizer
    if config.forget and (model.embeddings.has_dense_gradients or not kind.mean_squares):
        raise ConfigError(
            expected="a table optimizer that sums squared gradients up for ever, rowwise_adagrad",
            found=f"{kind.value}, which forgets by itself or keeps no sums",
            where=f"training settings, forget = {config.forget}",
            ways_out=("--training.forget 0", "--model.embedding.optimizer rowwise_adagrad"),
        )


def _check_compile(config: TrainingConfig, *, model: Model, parallel: Parallel | None) -> None:
    """Allow copies of the network, whose reductions are hooks on weights; neither FSDP nor a batch in parts.

    Batch norms wait for other ranks inside the network, which a compiled one cannot.

    Raises:
        ConfigError: it would have no effect, or an untested one.
    """
    if config.compile is Compile.OFF or parallel is None:
        return
    how = parallel.config.dense
    parts = parallel.config.num_parts
    if how is not DenseParallelism.DDP or parts > 1:
        raise ConfigError(
            expected="--training.compile off, or --dense ddp with the batch in one part",
            found=f"{config.compile.value} with {how.value}, {parts} parts",
            where=f"training settings, compile, with {parallel.topology.world_size} ranks",
            ways_out=("--training.compile off", "--dense ddp --parallel.num-parts 1"),
        )
    norms = [n for n, module in model.named_modules() if isinstance(module, BatchNorm) and module.world_sum is not None]
    if norms:
        raise ConfigError(
            expected="--training.compile off with batch normalisation, which adds up over ranks inside the network",
            found=f"{config.compile.value}, batch norm at {norms[0]}",
            where=f"training settings, compile, with {parallel.topology.world_size} ranks",
            ways_out="--training.compile off",
        )


def no_fused_adagrad(device: torch.device) -> str:
    """Say why torch's fused Adagrad cannot update a weight on the device, in torch's words; "" where it can."""
    weight = nn.Parameter(torch.zeros(1, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        torch.optim.Adagrad([weight], fused=True).step()
    except RuntimeError as error:
        return str(error)
    return ""


def _dense_optimizer(
    parameters: list[nn.Parameter], config: TrainingConfig, *, tables: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Torch's own optimizers, in their fused form: one kernel for all whole weights, one for all that are in parts.

    `tables` are those of `parameters` that weight decay leaves alone: `embedding_l2` is their penalty.
    """
    if config.optimizer is DenseOptimizer.ADAGRAD and (found := no_fused_adagrad(parameters[0].device)):
        raise ConfigError(
            expected="a torch whose fused Adagrad computes on GPUs (2.13's does)",
            found=f"torch {torch.__version__}: {found}",
            where="training settings, optimizer, on a GPU",
            ways_out=("--training.optimizer adam (or adamw, sgd)", "install torch 2.13", "--device cpu"),
        )
    rate = config.learning_rate
    decay = config.weight_decay
    betas = (config.beta1, config.beta2)
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    parts = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    # Torch's fused SGD and Adagrad do not know parts of weights; its one-kernel-a-step form (`foreach`) does.
    fused_parts = config.optimizer in (DenseOptimizer.ADAM, DenseOptimizer.ADAMW)
    groups: list[dict[str, Any]] = [{"params": whole}] if whole else []
    if decay and tables:
        # By identity: `in` would compare weights element by element.
        ids = {id(table) for table in tables}
        decayed, kept = ([each for each in whole if (id(each) in ids) is of_table] for of_table in (False, True))
        both = ({"params": decayed}, {"params": kept, "weight_decay": 0.0})
        groups = [group for group in both if group["params"]]
    if parts:
        groups.append({"params": parts, "fused": fused_parts, "foreach": not fused_parts})
    # What a graph needs: the fused form keeps its step number on the device either way, so the bits are the same.
    on_gpu = parameters[0].device.type == "cuda"
    match config.optimizer:
        case DenseOptimizer.ADAM:
            return torch.optim.Adam(groups, lr=rate, betas=betas, weight_decay=decay, fused=True, capturable=on_gpu)
        case DenseOptimizer.ADAMW:
            return torch.optim.AdamW(groups, lr=rate, betas=betas, weight_decay=decay, fused=True, capturable=on_gpu)
        case DenseOptimizer.ADAGRAD:
            return torch.optim.Adagrad(groups, lr=rate, weight_decay=decay, fused=True)
        case DenseOptimizer.SGD:
            return torch.optim.SGD(groups, lr=rate, weight_decay=decay, fused=True)
