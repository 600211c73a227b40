"""Feed: one epoch of a data source as the trainer needs it, batch by batch, a step ahead.

    step k      forward   backward   update
    ids k+1            ──────►                    travel while step k computes

Each batch comes with the one after it, because looking up embeddings on many ranks starts with ids that travel to the
ranks that hold the rows. The batch is known long before (sources work ahead), so its ids leave one step early and no
step waits for them. Only ids may do so: they do not depend on weights, and the numbers stay those of one device.

The state of the source is read *after a batch and before the next*: a checkpoint after step k must go on with batch
k + 1, although batch k + 1 has been taken already. After the last batch of an epoch it is read when the source has said
that there is no other, so that its next `iter` begins the next epoch.

Where ranks balance their work, or divide histories (`balancing.py`), a batch is dealt anew two steps early, and what is
below sees the dealt one only. Positions are those of the batches as the source made them.

Negatives that are drawn (`negatives.py`) join a batch when it is taken. Before the step after which the model searches
for harder ones the next batch is not taken ahead: what is drawn for it depends on what is found. Where vocabularies
grow none is: rows are taken from ids between two steps. On one GPU two batches are on their way (`upload.py`).

Our own source makes the same number of steps on every rank. Others may not: there, ranks tell each other every step
whether they have a batch, and one that has none left joins with an empty batch until all are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.data.encoded.loader import Dataset, Shuffle
from ziggurat.data.source import DataSource, LoaderSource, as_source, state_from_json, state_to_json
from ziggurat.errors import CheckpointError, ConfigError, DataError
from ziggurat.features.batch import Batch, validate_batch
from ziggurat.features.events import PIECE_STARTS
from ziggurat.features.inputs import InputSpec
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.training.balancing import Balancer
from ziggurat.training.config import Decay, TrainingConfig
from ziggurat.training.growing.growing_tables import GrowingTables
from ziggurat.training.negatives import DrawnNegatives
from ziggurat.training.position import Position
from ziggurat.training.upload import Upload

T = TypeVar("T")


@dataclass
class Fed:
    """A batch from the source to its step.

    Args:
        given: as the source made it; None: no rank has one, and the epoch is over.
        num_rows: samples over all ranks.
        state: of the source after it.
        is_done: whether this rank's source has no more.
        landed: gives the batch on the device, once it is on its way.
        following: what the source gave after it, known when it is trained.
    """

    given: Batch | None
    num_rows: int
    state: dict[str, Any]
    is_done: bool
    landed: Callable[[], Batch] | None = None
    following: Fed | None = None

    @property
    def batch(self) -> Batch:
        """The batch to train on, on the device."""
        assert self.landed is not None, "it is on its way when it is trained"
        return self.landed()

    @property
    def upcoming(self) -> Batch | None:
        """The batch after it on the device, if it can be made before this one was trained."""
        following = self.following
        return None if following is None or following.landed is None else following.landed()

    @property
    def row_ids(self) -> Int64[Tensor, "B"]:
        """The rows that a step on it trains; pieces of histories that have none are left out."""
        given = self.given
        assert given is not None, "the end of an epoch is not trained"
        return given.row_ids[given.row_ids >= 0] if PIECE_STARTS in given.extras else given.row_ids

    @property
    def is_last(self) -> bool:
        """True if the epoch has no batch after it."""
        return self.following is not None and self.following.given is None


class Gather(Protocol):
    """Collective that gives every rank what each of them says."""

    def __call__(self, value: T, /) -> list[T]:
        """Gather plain data, in rank order."""
        ...


class Feed:
    """The training data of one rank, and where it stands.

    Args:
        train: a source, or a data set, which all ranks then read as `config.loader` says.
        config: epochs, steps, schedule, loader.
        rank: of this process.
        gather: what all ranks say (plain data), in rank order; collective. On one device what this one says.
        balancer: deals samples to ranks; None: they stay where they are.
        shortened: thins the histories of a batch (`Model.shortened`), and makes ids unknown; None: nothing does.
        coupled: samples that no rank may cut (`Model.coupled_samples`). Where there are some, `auto` is the order
            `buffer`: lanes divide a batch among ranks otherwise where it crosses windows, and the last one of an epoch.
        inputs: of the model, by which batches of a source that is not ours are checked; None: they are not.

    Raises:
        ConfigError: a schedule towards an end that the source does not know.
    """

    def __init__(
        self,
        train: Dataset | DataSource,
        *,
        config: TrainingConfig,
        rank: int,
        world_size: int,
        gather: Gather,
        balancer: Balancer | None = None,
        shortened: Callable[..., Batch] | None = None,
        coupled: int = 1,
        inputs: InputSpec | None = None,
    ) -> None:
        loader = config.loader
        if coupled > 1 and loader.shuffle is Shuffle.AUTO:
            loader = replace(loader, shuffle=Shuffle.BUFFER)
        self.source = as_source(
            train, token_budget=config.token_budget, config=loader, rank=rank, world_size=world_size
        )
        self.balancer = balancer
        self._shortened = shortened
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._gather = gather
        self._state: dict[str, Any] = {}
        self._inputs = inputs
        self._has_rows = True
        self._is_checked = False
        self._is_weighted = True  # a batch of this pass had a sample that counts, or nobody can say
        self._waits = False  # this rank's epoch is over, that of another one is not
        # Asked at the beginning of a run, where a position is that of no step.
        if config.schedule.decay in (Decay.LINEAR, Decay.COSINE) and not self.total_steps(Position()):
            raise ConfigError(
                expected="max_steps, or training data that knows how many batches an epoch has (__len__)",
                found=f"{type(self.source).__name__} with schedule.decay = {config.schedule.decay.value}",
                where="training settings, schedule",
                ways_out=("max_steps=…", "schedule.decay constant or plateau"),
            )

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch over all ranks, if the source knows."""
        return getattr(self.source, "num_rows", None)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; 0 if the source does not know."""
        return len(self.source) if isinstance(self.source, Sized) else 0

    def row_in_epoch(self, position: Position) -> int:
        """Rows of the present epoch that all ranks have trained; 0 for sources that keep count themselves."""
        if isinstance(self.source, LoaderSource):
            epochs_done = position.epoch - position.window_epoch
            return position.rows - position.window_rows - epochs_done * self.source.num_rows
        return 0

    def total_steps(self, position: Position) -> int:
        """Steps of the whole run, if nothing stops it early; 0 if the source does not know."""
        epochs = self._config.epochs
        limit = self._config.max_steps
        steps = epochs * self.steps_per_epoch or limit
        if isinstance(self.source, LoaderSource):  # batches may have had another size, on another number of ranks
            # Batches of a budget of tokens have no fixed number of rows, so an epoch has no fixed number of steps.
            if self.source.token_budget:
                return limit
            steps = position.step
            epochs_done = position.epoch - position.window_epoch
            if epochs_done < epochs:
                # In rows, since a run that was resumed on other ranks has made steps of another size.
                steps += self.source.loader.num_steps(start_row=self.row_in_epoch(position))
                steps += (epochs - epochs_done - 1) * self.steps_per_epoch
        return min(steps, limit) if limit else steps

    def epoch(
        self,
        *,
        device: torch.device,
        empty: Batch,
        step: int = 0,
        negatives: DrawnNegatives | None = None,
        growing: GrowingTables | None = None,
    ) -> Iterator[Fed]:
        """The rest of the source's epoch.

        Args:
            device: of the model.
            empty: a batch of no samples.
            step: steps that were made before.
            negatives: draws further samples for each batch.
            growing: gives ids their rows.
        """
        self._has_rows = growing is None
        upload = Upload(device, is_beside=self._world_size == 1 and growing is None)

        def send(fed: Fed, step: int) -> None:
            # Sent before, or the end of the epoch.
            if fed.landed is not None or fed.given is None:
                return
            batch = fed.given if negatives is None else negatives.extended(fed.given, step=step)
            # Ids get their rows for the step that is to come, which is one later than those that were made.
            fed.landed = upload.start(batch if growing is None else growing.admitted(batch, step=step + 1))

        def may_make(step: int) -> bool:
            return growing is None and (negatives is None or not negatives.is_due(step))

        # Set only if a resumed rank was at its end while others were not.
        waits = self._waits
        self._waits = False
        # A rank whose epoch is over has no batch of its own: empty ones, until the others are done, too.
        taken = self._balanced(self._taken(iter(()) if waits else iter(self.source), empty, step=step))
        current = next(taken)
        line = deque[Fed]()
        send(current, step)
        try:
            while current.given is not None:
                # As many as may be on their way at once, and none behind the end.
                while len(line) < upload.depth and not (line and line[-1].given is None):
                    line.append(next(taken))
                step += 1
                for number, coming in enumerate(line, start=step):
                    # In order: a batch behind one that has to wait must wait, too.
                    if not may_make(number):
                        break
                    send(coming, number)
                following = line.popleft()
                current.following = following
                # At the end the state behind it, so that the next `iter` begins the next epoch; else the one after this
                # batch.
                is_done = following.is_done
                self._state = {"source": following.state if is_done else current.state, "is_done": is_done}
                yield current
                # One that had to wait for the step, which is over now.
                send(following, step)
                current = following
        finally:
            # Also where the trainer ends early, with batches that were sent.
            upload.close()

    def timing(self) -> dict[str, float]:
        """Share of time lost to the slowest rank by planned cost, as samples came and as dealt; {} where none are."""
        if self.balancer is None or not self.balancer.balances:
            return {}
        before, after = self.balancer.planned_shares()
        return {"unbalanced_straggler_share": round(before, 6), "planned_straggler_share": round(after, 6)}

    def drain(self) -> None:
        """Wait for what is on its way for steps that will not come."""
        if self.balancer is not None:
            self.balancer.drain()

    def _taken(self, iterator: Iterator[Batch], empty: Batch, *, step: int) -> Iterator[Fed]:
        """The batches of the epoch as the source makes them, changed by `shortened`; the last one is None."""
        while True:
            taken = self._following(iterator, empty)
            if taken.given is not None and self._shortened is not None:
                taken.given = self._shortened(taken.given, draw=StepDraw(self._config.seed, step))
            step += 1
            yield taken
            if taken.given is None:
                return

    def _balanced(self, taken: Iterator[Fed]) -> Iterator[Fed]:
        """The same with the samples that this rank trains, each begun when the one before it is taken away."""
        if self.balancer is None:
            yield from taken
            return
        current = next(taken)
        if current.given is not None:
            self.balancer.start(current.given)
        while current.given is not None:
            following = next(taken)
            # Finished before the next is begun, since both are exchanges of all ranks.
            current.given = self.balancer.finish()
            if following.given is not None:
                self.balancer.start(following.given)
            yield current
            current = following
        yield current

    def _following(self, iterator: Iterator[Batch], empty: Batch) -> Fed:
        """The next batch of the source, empty where only other ranks have one."""
        batch = next(iterator, None)
        # Before another batch is taken: a checkpoint goes on right behind this one.
        state = self.source.state_dict()
        if batch is not None and not isinstance(self.source, LoaderSource):
            self._check(batch)
        elif batch is None and not self._is_weighted and self._world_size == 1:
            raise DataError(
                expected="samples with a weight above 0",
                found="a whole pass of samples whose weights are all 0: nothing is learned of them",
                where=f"training data, {type(self.source).__name__}",
                ways_out=("give weights above 0", "leave Batch.weights out: each sample then counts 1"),
            )
        if isinstance(self.source, LoaderSource):
            return Fed(batch, self.source.step_rows, state, is_done=batch is None)
        # Collective, also on a rank that has no batch left.
        said = self._gather(None if batch is None else batch.batch_size)
        sizes = [size for size in said if size is not None]
        given = empty if batch is None and sizes else batch
        return Fed(given, sum(sizes), state, is_done=batch is None)

    def _check(self, batch: object) -> None:
        """Refuse what a source of the user's own may give, before a step makes numbers of it."""
        if not isinstance(batch, Batch):
            raise DataError(
                expected="a zg.Batch",
                found=type(batch).__name__,
                where=f"training data, {type(self.source).__name__}",
                ways_out="yield zg.Batch(dense=…, single=…, labels=…, row_ids=…): help(zg.Batch) says their shapes",
            )
        if self._inputs is None or (self._is_checked and batch.single.device.type != "cpu"):
            return  # a GPU is asked once: each answer waits for it
        validate_batch(batch, self._inputs, has_rows=self._has_rows, must_have_labels=True)
        weights = batch.weights
        if not self._is_checked:
            self._is_weighted = False
        # A GPU is not asked again: then nobody can say.
        self._is_weighted = self._is_weighted or weights is None or weights.is_cuda or bool((weights > 0).any())
        self._is_checked = True

    def states(self) -> list[object]:
        """Return where all ranks' sources stand after the last step as plain data; [] where `Position.rows` says it."""
        return [] if isinstance(self.source, LoaderSource) else [*self._gather(state_to_json(self._state))]

    @property
    def shuffle(self) -> str:
        """The order of the rows; "" where the source keeps it to itself."""
        return self.source.loader.shuffle.value if isinstance(self.source, LoaderSource) else ""

    def restore(self, position: Position, *, where: str) -> None:
        """Go back to a position.

        Raises:
            CheckpointError: it holds the states of another number of sources.
            ConfigError: it was reached in another order of the rows.
        """
        if isinstance(self.source, LoaderSource):
            self.source.loader.go_on_in(position.shuffle, where=where)
            self.rewind(position)
            return
        known = len(position.sources)
        if known != self._world_size:
            raise CheckpointError(
                expected=f"a state of the training data for each of {self._world_size} ranks",
                found=f"{known} in the checkpoint of step {position.step}",
                where=where,
                ways_out=f"resume on {known} ranks" if known else "pass the data set that the run began with",
            )
        self._state = state_from_json(position.sources[self._rank])
        self.rewind(position)

    def rewind(self, position: Position) -> None:
        """Go back from batches that were taken ahead to the one after the last step of this process."""
        if isinstance(self.source, LoaderSource):
            epoch = position.epoch - position.window_epoch
            self.source.load_state_dict({"epoch": epoch, "row": self.row_in_epoch(position)})
        elif self._state:
            self.source.load_state_dict(self._state["source"])
            # Not at the very beginning of an epoch, where every rank has batches again.
            self._waits = self._state["is_done"] and position.step_in_epoch > 0
