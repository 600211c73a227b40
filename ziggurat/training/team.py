"""Team: what differs between a run on one device and a run on many ranks, so that the trainer need not ask.

    rank 0         progress, metrics.jsonl, TensorBoard, ledger, results
    other ranks    nothing of that; they compute, and save their part of checkpoints
    decisions      (is there a checkpoint, precision, kernel) are made on rank 0 and told to all: a file system or a
                   stopwatch may tell each rank something else

On one device every question has the obvious answer and nothing is sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from ziggurat.config import JSON, flattened
from ziggurat.data.encoded.dataset import dataset_facts
from ziggurat.data.encoded.ledger import Ledger
from ziggurat.data.encoded.loader import Dataset
from ziggurat.data.source import DataSource
from ziggurat.embeddings import BatchShape
from ziggurat.features.batch import Batch
from ziggurat.models import Model
from ziggurat.models.contract.model import device_of
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.agreement import Agreement, require_equal
from ziggurat.parallel.context.attention import context_attention_of
from ziggurat.parallel.context.choice import ContextRates
from ziggurat.parallel.parallelize import Parallel
from ziggurat.precision.choice import resolve_precision
from ziggurat.training.balancing import balancer_of
from ziggurat.training.config import Precision, TrainingConfig
from ziggurat.training.feed import Feed
from ziggurat.training.growing.growing_tables import GrowingTables
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.records.run_folder import RunFolder
from ziggurat.training.records.shared_ledger import SharedLedger
from ziggurat.training.report.progress import NoProgress, Progress, RowsOfAll
from ziggurat.training.step.own_loss import LossFunction
from ziggurat.training.step.results import OVERFLOW
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.unknown_ids import UnknownIds, parse_shares

T = TypeVar("T")

_RATES = "context_rates"
_PATIENCE_S = 1800.0  # a kernel is measured, a report written: minutes


class Team:
    """The differences between a run on one device and a run on many ranks.

    Args:
        parallel: the ranks; None, or one of them, is one device.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, parallel: Parallel | None) -> None:
        self.parallel = parallel
        self.world_size = 1 if parallel is None else parallel.topology.world_size
        self.rank = 0 if parallel is None else parallel.topology.rank
        self._agreement = Agreement(patience_s=_PATIENCE_S) if self.world_size > 1 else None
        self._kernels: list[KernelChoice] = []
        if self._agreement is not None:
            self.end_with_topology(self._agreement.close)

    def end_with_topology(self, action: Callable[[], None]) -> None:
        """Call this when the topology of the ranks is closed; never on one device."""
        if self.parallel is not None:
            self.parallel.topology.ending.add(action)

    @property
    def is_first(self) -> bool:
        """True on the rank that writes."""
        return self.rank == 0

    @property
    def suffix(self) -> str:
        """The suffix that tells apart the files that every rank writes; empty on one device."""
        return f"_rank{self.rank}" if self.world_size > 1 else ""

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """All ranks; None on one device."""
        return None if self.parallel is None else self.parallel.topology.world.process_group

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; its result, or its error, on every rank."""
        return action() if self._agreement is None else self._agreement.on_first(action)

    def require_same_run(
        self, config: TrainingConfig, *, datasets: Mapping[str, object], folder: Path, named: Mapping[str, str]
    ) -> None:
        """Compare what every rank is about to train; collective.

        Raises:
            ConfigError: something differs, on every rank; names it, the ranks and their values.
        """
        if self._agreement is None:
            return
        facts = flattened(config, prefix="training") | dataset_facts(datasets)
        # Sums are rounded otherwise by another number of threads, and copies of one network would drift apart.
        facts |= {"folder": str(folder.absolute()), "cpu threads": str(torch.get_num_threads())}
        facts |= named
        facts["version torch"] = torch.__version__
        require_equal(facts, where="before the first step")

    def require_same_hooks(self, hooks: Sequence[Hook]) -> None:
        """Compare the hooks that every rank calls; collective. One that is missing on a rank may wait for ever.

        Raises:
            ConfigError: they differ, on every rank.
        """
        if self._agreement is not None:
            names = ", ".join(repr(hook) for hook in hooks if hook.on_every_rank)
            require_equal({"hooks": names}, where="before the first step")

    def progress(self, progress: Progress | None) -> Progress:
        """Return the progress display of this rank."""
        return progress if progress is not None and self.is_first else NoProgress()

    def progress_of_all(self, progress: Progress, *, total: int | None) -> Progress:
        """Shows rows of all ranks where this rank counts its own; they go on in step."""
        if total is None or self.world_size == 1:
            return progress
        return RowsOfAll(progress, num_ranks=self.world_size, total=total)

    def train_step(self, model: Model, config: TrainingConfig, *, loss: LossFunction | None = None) -> TrainStep:
        """The step, in one precision and with one lookup kernel on all ranks."""
        agreement = self._agreement
        if agreement is None or self.parallel is None:
            return TrainStep(model, config, parallel=self.parallel, loss=loss)
        device = device_of(model)
        chosen, reason = self.on_first(lambda: _named(resolve_precision(config.precision, device=device)))
        config = dataclasses.replace(config, precision=Precision(chosen))
        self._agree_on_kernel(agreement, model, BatchShape(batch_size=config.loader.batch_size))
        step = TrainStep(model, config, parallel=self.parallel, loss=loss)
        step.precision_reason = reason
        step.warm_up()
        # What was sent while the step warmed up is no traffic of the run.
        self.parallel.traffic.reset()
        return step

    def kernel_name(self, model: Model) -> KernelChoice:
        """Return the kernel that looks up embeddings, the same on all ranks."""
        embeddings = model.embeddings
        names = embeddings.kernel_names if self._agreement is None else self._kernels
        return KernelChoice(names[0]) if names else embeddings.config.kernel

    def ledger(self, folder: RunFolder) -> Ledger | SharedLedger:
        """The sample ledger."""
        if self._agreement is None or self.parallel is None:
            return Ledger(folder.ledger)
        return SharedLedger(folder.ledger, topology=self.parallel.topology)

    def traffic_paused(self) -> contextlib.AbstractContextManager[None]:
        """Count no traffic inside."""
        return contextlib.nullcontext() if self.parallel is None else self.parallel.traffic.paused()

    def gather(self, value: T) -> list[T]:
        """Gather each rank's value (plain data), in rank order."""
        return [value] if self._agreement is None else self._agreement.gather(value)

    def meet(self, what: str, value: str = "") -> list[str]:
        """Gather each rank's text where every rank is in the call `what`; collective.

        Raises:
            ConfigError: a rank is in another call, on every rank; names the calls.
        """
        return [value] if self._agreement is None else self._agreement.gather(value, what=what)

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order."""
        return [mine] if self._agreement is None else self._agreement.gather_bytes(mine)

    def growing(self, model: Model, *, seed: int) -> GrowingTables | None:
        """The growing vocabularies of a model; None where it has none."""
        gather = self.gather_bytes if self.world_size > 1 else None
        growing = GrowingTables(model, seed=seed, gather=gather, rank=self.rank)
        return growing if growing.is_any else None

    def context_rates(self, model: Model) -> dict[str, JSON]:
        """Return the rates by which each rank chose what travels of divided histories, for a checkpoint. Collective.

        Ranks that divide the same histories have the same rates; each such group has measured its own.
        """
        attention = context_attention_of(model)
        if attention is None:
            return {}
        rates: list[JSON] = [*self.gather(None if attention.rates is None else attention.rates.to_json())]
        return {_RATES: rates} if any(rates) else {}

    def restore_context_rates(self, model: Model, state: Mapping[str, object]) -> None:
        """Choose by the rates of a checkpoint, so that a resumed run adds up in the order of one never stopped."""
        attention = context_attention_of(model)
        kept = state.get(_RATES)
        of_ranks: list[object] = []
        if isinstance(kept, dict):  # once there was one group's
            of_ranks = [kept] * self.world_size
        elif isinstance(kept, list):
            of_ranks = kept
        if attention is None or len(of_ranks) != self.world_size:
            return
        mine = of_ranks[self.rank]
        if isinstance(mine, dict) and mine:
            attention.use_rates(ContextRates.from_json(mine))

    def feed(self, train: Dataset | DataSource, model: Model, config: TrainingConfig) -> Feed:
        """The training data of this rank, its samples dealt as the settings say."""
        balancer = balancer_of(config, model=model, parallel=self.parallel)
        unknown = UnknownIds(shares=parse_shares(config.unknown_ids, inputs=model.inputs), inputs=model.inputs)

        def changed(batch: Batch, *, draw: StepDraw) -> Batch:
            return unknown.applied(model.shortened(batch, draw=draw), draw=draw)

        return Feed(
            train,
            config=config,
            rank=self.rank,
            world_size=self.world_size,
            gather=self.gather,
            balancer=balancer,
            shortened=changed,
            coupled=model.coupled_samples,
            inputs=model.inputs,
        )

    def drain(self, model: Model, *, feed: Feed) -> None:
        """Receive what was sent ahead for steps that will not come."""
        feed.drain()
        model.embeddings.drain()

    def first_bad(self, mine: str) -> str:
        """Name what is not finite, as given by the first rank that can tell."""
        if self._agreement is None:
            return mine
        named = [f"{text} on rank {rank}" for rank, text in enumerate(self._agreement.gather(mine)) if text != OVERFLOW]
        return named[0] if named else mine

    def _agree_on_kernel(self, agreement: Agreement, model: Model, shape: BatchShape) -> None:
        embeddings = model.embeddings
        embeddings.choose_kernel(shape)
        found = agreement.gather([name.value for name in embeddings.kernel_names])
        # A rank without tables names none, so the first name is that of the first rank that has some.
        self._kernels = [KernelChoice(name) for names in found for name in names]
        if self._kernels:
            embeddings.use_kernel(self._kernels[0])


def _named(resolved: tuple[Precision, str]) -> tuple[str, str]:
    """Return a precision by its name, as it travels between ranks, and the reason for it."""
    return resolved[0].name, resolved[1]
