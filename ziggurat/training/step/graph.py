"""StepGraph: the whole step of a full batch on one GPU, recorded once as a CUDA graph and started by one call.

    batch k   ─copy─► buffers that stay ─► bounds, lookup, forward, loss, backward, clip, optimizers ─► verdict
    host      a few calls               └────────────────── one graph, one call ─────────────────┘

A step launches some 200 kernels, and at a few milliseconds of work the GPU waits for the host that launches them. A
graph holds all of them with their arguments. So everything that differs from step to step lies on the device before
the graph starts: the batch in buffers of its own, the learning rates, Adam's step number, whether the step applies
(`late.py`). What a graph computes are the same kernels in the same order, so the bits are those of eager steps, and
nothing that a run keeps depends on which steps were made by a graph. Dropout and the noise of rounding go on in the
generator's order: torch counts its draws on the device.

    first steps    eagerly: kernels are compiled and compared, optimizers make their state (`auto`: and are timed)
    one step       eagerly, on the buffers and the queue of the graph: whatever is made once for these is made
    next step      recorded and started; afterwards started only

A graph has fixed shapes: it is recorded for the shape that has come often enough, and the last batch of an epoch is
computed eagerly. So is every step whose kernels depend on what the host knows of a batch: `why_no_graph` says which.
Lists that are pooled lie in a buffer with room for a quarter more rows than the first batches had; what is behind
their rows is padding, which no list reads. A batch that needs more is stepped eagerly. With a clipped norm their number
has to be the same every time: the order of that one sum depends on it, and with it the last bit of the factor.

Cost: the graph keeps its own memory for what a step computes in between, beside that of eager steps.

Source: CUDA graphs in torch: Ng and others, pytorch.org/blog/accelerating-pytorch-with-cuda-graphs, 2021.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ziggurat.embeddings.sorted_ahead import SortedAhead
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.models import Model
from ziggurat.training.config import SelfDistil, StepGraphs, TrainingConfig

_FIRST_STEPS = 2  # eager ones of a shape before the graph is prepared
_TIMED_STEPS = 5  # of each kind, where both are timed
_MAX_SHAPES = 32  # of batches that are waited for to come again
_MAX_RATIO = 1.02  # of the graph's time and the eager steps', beyond which `auto` stays eager

_ROWS_OF_LISTS = "jagged.values"  # as `Batch.tensors` names them
_ROOM = 1.25  # of the rows of lists of the first batches
_ROOM_STEP = 1024

Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]


def why_no_graph(model: Model, config: TrainingConfig, *, waits: str, has_own_loss: bool) -> str:
    """Say why no step of a run can be a graph, or return "" where full batches can.

    Args:
        model: on its device.
        config: of the run.
        waits: why the host waits for each step; "" where it does not.
        has_own_loss: whether the loss is a function of the user's.
    """
    if config.step_graph is StepGraphs.OFF:
        return "step_graph is off"
    if waits:
        return waits
    if config.self_distil.method is not SelfDistil.NONE:
        return "the weight of second views differs from step to step (self-distillation)"
    inputs = model.inputs
    if any(table.growing is not None for table in inputs.tables):
        return "ids take their rows between two steps"
    if model.embeddings.tables.in_host:
        return "rows of tables in the host's memory travel before each step"
    lists = [spec.name for spec in (*inputs.sequences, *inputs.moments)]
    if lists:
        shown = ", ".join(lists[:4]) + (" …" if len(lists) > 4 else "")
        return f"lists that are read event by event ({shown}) have other sizes in every batch"
    own = _own_code(model, has_own_loss=has_own_loss)
    if own and config.step_graph is StepGraphs.AUTO:
        return f"{own} may count steps in Python, which a graph does not run again (--training.step-graph on)"
    return ""


def _own_code(model: Model, *, has_own_loss: bool) -> str:
    """Name code of the user's that a step runs; "" where there is none."""
    if has_own_loss:
        return "a loss of one's own"
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.partition(".")[0] not in ("ziggurat", "torch"):
            return f"{kind.__name__} ({name or 'the model'})"
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return f"a hook of {name or 'the model'}"
    rule = type(model.embeddings.config.optimizer)
    return "" if rule.__module__.startswith("ziggurat.") else f"the table optimizer {rule.__name__}"


class StepGraph:
    """Makes the device's part of a step by a graph where it can.

    Args:
        work: the device's part of an eager step: takes a batch, gives the packed verdict.
        forget: drops what a step that failed half-way has left on the host.
        ahead: sorts rows of the next batch beside eager steps; a graph sorts them itself.
        device: the GPU.
        choice: `auto` times eager steps and the graph, and keeps the faster; `on` keeps the graph.
        has_room: lists that are pooled may have any number of rows up to a quarter more than the first batches'.

    Attributes:
        reason: why steps are made eagerly although a graph was to be recorded; "" while nothing speaks against one.
        num_replayed: steps that were made by the graph.
    """

    def __init__(
        self,
        work: Callable[[Batch], Tensor],
        *,
        forget: Callable[[], None],
        ahead: SortedAhead,
        device: torch.device,
        choice: StepGraphs,
        has_room: bool = False,
    ) -> None:
        self._work = work
        self._forget = forget
        self._ahead = ahead
        self._was_ahead = ahead.is_on
        self._device = device
        self._is_timed = choice is StepGraphs.AUTO
        self._must = choice is StepGraphs.ON
        self._has_room = has_room
        self._longest = 0  # rows of lists of the batches so far
        # Timed steps come on top: the first ones compile kernels, and say nothing of later ones.
        self._num_first = _FIRST_STEPS + (_TIMED_STEPS if self._is_timed else 0)
        self._seen: dict[Signature, int] = {}
        self._recorded: _Recorded | None = None
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._news: list[str] = []
        self.reason = ""
        self.num_replayed = 0

    def take_news(self) -> list[str]:
        """Return what has been decided since the last call, for people."""
        news = self._news
        self._news = []
        return news

    def step(self, batch: Batch) -> Tensor | None:
        """Make the device's part of a step; None: this one is to be made eagerly.

        Args:
            batch: on the device, its tensors there for as long as the step takes.

        Raises:
            ConfigError: the step cannot be recorded, and the run insists on a graph.
        """
        # A batch without samples is made by ranks or at the end, and has no shape worth a graph.
        if self.reason or not batch.batch_size:
            return None
        if batch.repeated or batch.sequences:
            self._drop("lists are kept once for samples that share them, and have other sizes in every batch")
            return None
        signature = _signature(batch, has_room=self._has_room)
        recorded = self._recorded
        if recorded is None:
            # Until the graph is recorded: its buffers get room by the longest of these.
            self._longest = max(self._longest, batch.jagged.values.numel())
            return self._first(batch, signature)
        if recorded.signature != signature or not recorded.has_room_for(batch):
            return None
        numbers = recorded.numbers
        if numbers is None:
            try:
                numbers = recorded.record(self._work)
            except Exception as error:  # a kernel or Python code that cannot be recorded: the step is still to be made
                # What it left of gradients belongs to no step.
                self._forget()
                self._drop(f"the step could not be recorded as a CUDA graph ({type(error).__name__}: {error})", error)
                return None
            self._mark("recording")
        else:
            self._choose()
            # The choice may just have dropped the graph.
            if self._recorded is None:
                return None
            self._mark("graph")
        self.num_replayed += 1
        recorded.replay(batch)
        return numbers

    def _first(self, batch: Batch, signature: Signature) -> Tensor | None:
        """Let the first steps of a shape be made eagerly, and make the one before the recording on its buffers."""
        count = self._seen.get(signature, 0)
        self._seen[signature] = count + 1
        if count < self._num_first:
            self._mark("eager" if count >= _FIRST_STEPS else "first")
            if not count:
                # From here on the peak is that of whole steps, without what loading took.
                torch.cuda.reset_peak_memory_stats(self._device)
            if len(self._seen) > _MAX_SHAPES:
                self._drop(f"{_MAX_SHAPES} batches had as many shapes: lists have other sizes each time")
            return None
        if not self._must and (lacking := self._lacking_memory()):
            self._drop(lacking)
            return None
        self._was_ahead = self._ahead.is_on
        # A graph reads its own buffers, which the next batch is not in yet: rows are sorted inside of the step.
        self._ahead.stop()
        self._ahead.is_within = True
        # Rounded up, so that the room does not depend on single rows.
        room = -(-int(_ROOM * self._longest) // _ROOM_STEP) * _ROOM_STEP if self._has_room else 0
        self._recorded = _Recorded(batch, signature, room=room, device=self._device)
        self._mark("rehearsal")
        return self._recorded.rehearse(batch, self._work)

    def _lacking_memory(self) -> str:
        """Say why the GPU has no memory for a graph beside eager steps and evaluations; "" where it has."""
        used = torch.cuda.memory_allocated(self._device)
        step = torch.cuda.max_memory_allocated(self._device) - used
        # Memory that torch has reserved and does not use is free for it, too.
        free = torch.cuda.mem_get_info(self._device)[0] + torch.cuda.memory_reserved(self._device) - used
        # Twice: a graph keeps its own memory beside that of eager steps.
        if 2 * step <= free:
            return ""
        most = f"{step / 2**30:.1f} GiB that a step takes for a while, and eager steps take them too"
        return f"a CUDA graph would keep the {most}: {free / 2**30:.1f} GiB are free (--training.step-graph on)"

    def _mark(self, kind: str) -> None:
        """Note when the device begins a step, until enough steps are timed."""
        # One mark more than steps: each time lies between two of them.
        if self._is_timed and self._num_graph_marks() <= _TIMED_STEPS:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((kind, event))

    def _num_graph_marks(self) -> int:
        return sum(kind == "graph" for kind, _ in self._marks)

    def _choose(self) -> None:
        """Keep the graph or not, once steps of both kinds have been timed; the host does not wait for it."""
        # Asked, not waited for: the device may be some steps behind the host.
        if not self._is_timed or self._num_graph_marks() <= _TIMED_STEPS or not self._marks[-1][1].query():
            return
        self._is_timed = False
        pairs = zip(self._marks, self._marks[1:], strict=False)
        # From the beginning of one step to that of the next: the time of the first.
        times = [(kind, begin.elapsed_time(end)) for (kind, begin), (_, end) in pairs]
        # The shortest of each kind, as everything that disturbs a step makes it longer.
        eager_ms = min(time_ms for kind, time_ms in times if kind == "eager")
        graph_ms = min(time_ms for kind, time_ms in times if kind == "graph")
        self._marks.clear()
        figures = f"{graph_ms:.2f} ms, eagerly {eager_ms:.2f}"
        if graph_ms > _MAX_RATIO * eager_ms:
            self._drop(f"one CUDA graph was slower ({figures})")
        else:
            self._news.append(f"full batches are one CUDA graph: {figures} a step")

    def _drop(self, reason: str, error: Exception | None = None) -> None:
        """Make all further steps eagerly.

        Raises:
            ConfigError: the run insists on a graph.
        """
        self.reason = reason
        if self._recorded is not None:
            # As it was before the graph: eager steps sort the next batch beside them.
            self._ahead.is_on = self._was_ahead
            self._ahead.is_within = False
        self._recorded = None
        self._is_timed = False
        self._marks.clear()
        self._news.append(f"steps are made eagerly: {reason}")
        if self._must:
            raise ConfigError(
                expected="steps that can be recorded as one CUDA graph",
                found=reason,
                where="training settings, step-graph",
                ways_out=(
                    "--training.step-graph auto (steps without a graph are made eagerly)",
                    "--training.step-graph off",
                ),
            ) from error


class _Recorded:
    """Buffers of one shape of batches, and the graph that reads them.

    Args:
        batch: of the shape, on the device.
        signature: the shape.
        room: rows of lists that the buffers have room for; 0: exactly those of the batch.
        device: the GPU.

    Attributes:
        numbers: the verdict that the graph writes; None before it is recorded.
    """

    def __init__(self, batch: Batch, signature: Signature, *, room: int, device: torch.device) -> None:
        self.signature = signature
        self.numbers: Tensor | None = None
        self._filled = torch.zeros((), dtype=torch.int64, device=device)  # rows of lists that hold some, with `room`
        self._batch = batch.map(lambda tensor: tensor.clone() if tensor.device.type == device.type else tensor)
        if room:
            rows = torch.zeros(room, dtype=batch.jagged.values.dtype, device=device)
            lists = JaggedRows(rows, self._batch.jagged.offsets, filled=self._filled)
            self._batch = replace(self._batch, jagged=lists)
        self._room = room
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()
        self._device = device

    def has_room_for(self, batch: Batch) -> bool:
        """Return whether the rows of a batch's lists fit."""
        return not self._room or batch.jagged.values.numel() <= self._room

    def rehearse(self, batch: Batch, work: Callable[[Batch], Tensor]) -> Tensor:
        """Make a step eagerly, as it will be recorded."""
        self._fill(batch)
        computing = torch.cuda.current_stream(self._device)
        # The queue of the graph waits until the buffers are filled, which happens on the present one.
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            numbers = work(self._batch)
        computing.wait_stream(self._stream)
        # Made on another queue, it must not be given back to the allocator while the present one reads it.
        numbers.record_stream(computing)
        return numbers

    def record(self, work: Callable[[Batch], Tensor]) -> Tensor:
        """Record a step; nothing is computed. Return the verdict that the graph will write."""
        computing = torch.cuda.current_stream(self._device)
        cause: Exception | None = None
        try:
            # Other threads bring batches meanwhile, and may ask the driver for memory: that must not end a recording.
            # The outer queue is the present one: torch does not come back to it where a recording fails.
            with (
                torch.cuda.stream(computing),
                torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    numbers = work(self._batch)
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            _free_generator(self._device)
            raise (cause or error) from None  # the end of a recording that failed raises an error that says nothing
        self.numbers = numbers
        return numbers

    def replay(self, batch: Batch) -> None:
        """Make a step by the graph, which writes `numbers`."""
        self._fill(batch)
        self._graph.replay()

    @torch.no_grad()
    def _fill(self, batch: Batch) -> None:
        """Copy a batch into the buffers."""
        mine = self._batch.tensors()
        # Numbers of rows are for the host alone, and an empty tensor has nothing to copy.
        theirs = {name: tensor for name, tensor in batch.tensors().items() if name != "row_ids" and tensor.numel()}
        into = {name: mine[name] for name in theirs}
        if self._room:
            num_rows = batch.jagged.values.numel()
            lists = self._batch.jagged
            into |= {_ROWS_OF_LISTS: lists.values[:num_rows]} if num_rows else {}
            # Rows of an earlier batch lie behind; row 0 is padding, which reads as zeros.
            lists.values[num_rows:].zero_()
            self._filled.fill_(num_rows)
        torch._foreach_copy_(list(into.values()), list(theirs.values()), non_blocking=True)


def _signature(batch: Batch, *, has_room: bool) -> Signature:
    """Return the shapes of a batch; where a graph has room for rows of lists, their number does not count."""
    tensors = batch.tensors().items()
    return tuple(
        (name, tensor.shape, tensor.dtype) for name, tensor in tensors if not (has_room and name == _ROWS_OF_LISTS)
    )


def _free_generator(device: torch.device) -> None:
    """Let torch draw random numbers again after a recording that failed, which leaves the generator to the graph."""
    with contextlib.suppress(Exception):  # a torch that cleans up by itself, or has no such call
        generator: object = torch.cuda.default_generators[device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())
