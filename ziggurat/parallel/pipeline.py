"""Pipeline: a training step in two halves, so that the exchange between hosts runs while something is computed.

The last hop (all ranks for a flat model, peers for towers) is the slow one. Cut the batch in two parts and the graph at
that hop; then, with A below the hop (lookup, intra-group, tower module) and B above it (interaction, loss, and back):

    compute   A₁ ── A₂ ── B₁ ── B₂ ── A₁ back ── A₂ back ── update
    wire         hop₁ ─── hop₂ ─ hop₁ back ── hop₂ back
                                      dense gradients ──
    ids                 of the next batch ──

The gradients of the parts add up to those of the batch, because each part's loss is divided by the global weight: the
step is the same step, up to the order of sums.

Cost: twice the messages; smaller matrix products. It pays where the wire is a bottleneck, so it is a choice
(`num_parts`), not a rule; one part still sends ids ahead and overlaps the dense reduction with the backward pass.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.models import Embedded, Model, Outputs
from ziggurat.parallel.dense import unreduced
from ziggurat.parallel.exchange.in_flight import InFlight
from ziggurat.parallel.parallelize import Parallel


@dataclass
class _Part:
    """A part of the batch between the two sides of the last hop."""

    batch: Batch
    in_flight: InFlight


class Pipeline:
    """Forward and backward passes of a parallel model; gradients are then ready for the optimizers.

    Args:
        model: made parallel.
        parallel: what `parallelize` returned.
        num_parts: parts of a batch; 1 does not cut.
    """

    def __init__(self, model: Model, parallel: Parallel, *, num_parts: int = 2) -> None:
        self._model = model
        self._parallel = parallel
        self._embeddings = parallel.embeddings
        self._fields = parallel.fields
        is_cut = num_parts > 1 and parallel.spread.can_start and parallel.prioritised is None
        self.num_parts = num_parts if is_cut else 1
        self._ahead: tuple[Batch, list[Batch]] | None = None

    def overlaps(self) -> list[str]:
        """List what runs at the same time as what, for the start-up report."""
        lines = ["ids of the next batch: with this batch's forward and backward pass"]
        if self.num_parts > 1:
            lines.append(f"last hop of embeddings: with computation, in {self.num_parts} parts of a batch")
        elif not self._parallel.spread.can_start:
            lines.append("last hop of embeddings: with nothing (means of row-wise tables are finished after it)")
        else:
            lines.append("last hop of embeddings: with nothing (one part)")
        if self._parallel.prioritised is not None:
            lines[-1] = f"{lines[-1].split(':')[0]}: {self._prioritised_line()}"
        in_memory = self._parallel.topology.world.memory is not None
        when = "with nothing (one sum in shared memory, at the end)" if in_memory else "with the backward pass"
        lines.append(f"gradients of the dense network: {when}")
        return lines

    def _prioritised_line(self) -> str:
        hop = "last hop of embeddings" if self._fields.towers is None else "hop inside a tower group"
        return (
            f"{hop} in two rounds, where both exchanges are measured and this one is faster: rows that the step before "
            "does not touch with its backward pass, their gradients with the next forward pass"
        )

    def step(
        self,
        batch: Batch,
        *,
        loss_of: Callable[[Outputs, Batch], Tensor],
        autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        upcoming: Batch | None = None,
        look: Callable[[Embedded, Batch], None] | None = None,
    ) -> Tensor:
        """Forward and backward passes of one batch; collective.

        Args:
            batch: of this rank.
            loss_of: this rank's share of the global loss, from the model's outputs and the samples they belong to.
            autocast: entered anew for the forward pass of each part. Autocast keeps what it made of a weight until it
                is left; one context around all parts would take the first part's weights for the second, and FSDP has
                gathered others by then.
            upcoming: the next batch, whose ids are sent now.
            look: called with what was looked up, before the dense network reads it; for batches in one part.

        Returns:
            This rank's share of the loss, without a graph.
        """
        parts = self._take(batch)
        self._announce(upcoming)
        if self.num_parts == 1:
            with autocast():
                embedded = self._model.embed(parts[0])
                if look is not None:
                    look(embedded, parts[0])
                outputs = self._model.dense_outputs(embedded)
            loss = loss_of(outputs, parts[0])
            self._embeddings.send_ahead(None if self._ahead is None else self._ahead[1][0])
            loss.backward()
            return loss.detach()
        assert look is None, "batches in one part"
        with autocast():
            started = [_Part(part, self._fields.start(part)) for part in parts]
        self._embeddings.send_ids()
        losses = []
        for index, part in enumerate(started):
            is_last = index == len(started) - 1
            # The last part's backward pass reduces the gradients of all parts at once.
            with contextlib.nullcontext() if is_last else unreduced(self._model.slots.network):
                losses.append(self._above(part, loss_of, autocast=autocast))
        for part in started:
            part.in_flight.backward()
        if self._fields.towers is not None:
            self._fields.towers.reduce_gradients()
        return torch.stack(losses).sum()

    # --------------------------------------------------------------------------------------------- the parts of a step

    def _above(
        self,
        part: _Part,
        loss_of: Callable[[Outputs, Batch], Tensor],
        *,
        autocast: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> Tensor:
        """Dense network and loss, there and back; sends the gradient over the last hop."""
        values = part.in_flight.receive()
        fields = part.in_flight.join(values)
        with autocast(), self._fields.arrived(fields):
            outputs = self._model.dense_outputs(self._model.embed(part.batch))
        loss = loss_of(outputs, part.batch)
        loss.backward()
        part.in_flight.send_gradients(values)
        return loss.detach()

    def _take(self, batch: Batch) -> list[Batch]:
        """The parts of a batch; their ids are on their way already if the batch was announced."""
        if self._ahead is not None and self._ahead[0] is batch:
            parts = self._ahead[1]
            self._ahead = None
            return parts
        self._ahead = None
        parts = self._cut(batch)
        self._embeddings.drain()  # others were announced, or nothing was
        self._embeddings.announce(*parts)
        self._embeddings.send_ids()
        return parts

    def _announce(self, batch: Batch | None) -> None:
        """Send the sizes of the next batch's ids; the ids follow when everybody has had time to do the same."""
        if batch is not None:
            self._ahead = (batch, self._cut(batch))
            self._embeddings.announce(*self._ahead[1])

    def _cut(self, batch: Batch) -> list[Batch]:
        return cut_batch(batch, self.num_parts, coupled=self._model.coupled_in(batch))


def cut_batch(batch: Batch, num_parts: int, *, coupled: int = 1) -> list[Batch]:
    """Parts of a batch, as even as possible; features that are read as lists are copied, the rest are views.

    Args:
        batch: to be cut.
        num_parts: parts; some are empty where there are fewer blocks.
        coupled: consecutive samples that stay together.
    """
    if num_parts == 1:
        return [batch]
    size = batch.batch_size
    blocks = -(-size // coupled)
    bounds = [min(blocks * index // num_parts * coupled, size) for index in range(num_parts + 1)]
    return [batch.rows(first, last) for first, last in itertools.pairwise(bounds)]
