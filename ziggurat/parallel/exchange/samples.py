"""SampleExchange: the samples of a global batch are dealt anew, so that every rank has as much to do as the others.

    rank 0  [a b c]         costs of all samples, to all      rank 0  [a d]
    rank 1  [d e f]    ─►   the same plan on every rank  ─►   rank 1  [b e f]
                            whole samples travel              (in the order of the stream)

Costs follow from lengths, so they are known before anything is computed. Four small steps, each an all-to-all:

    1. number of samples      2. their costs      3. bytes of each message      4. the samples, with all they have

A rank then has its samples in the order in which they were in the global batch (rank after rank), whoever sent them:
nothing depends on time. The loss is divided by the global weight of its labels, so each sample has the weight that it
would have had anywhere: the step is the step that was not balanced, up to the order of sums (samples of a rank are
added up on that rank, then ranks in their order).

All of it lies on the host, in a process group of its own, so that it may run in a thread beside a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from ziggurat.data.balance.cost import SampleCost, lengths_of
from ziggurat.data.balance.partition import Balance, loads_of, partition
from ziggurat.features.batch import Batch
from ziggurat.features.batches.samples import batch_of_parts, concatenate_batches, named_parts, take_samples
from ziggurat.features.inputs import InputSpec
from ziggurat.parallel.exchange.collectives import all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Axis, RankGroup, Topology, own_group

_PURPOSE = "balance: {}"


@dataclass(frozen=True)
class BalancedBatch:
    """The batch of a rank after an exchange of samples, with the loads of all ranks.

    Args:
        batch: its samples.
        loads: (R,) the cost of what each rank got.
        loads_before: (R,) the cost of what each rank brought.
    """

    batch: Batch
    loads: np.ndarray
    loads_before: np.ndarray


class SampleExchange:
    """Distributes the samples of a global batch to ranks by their cost. Constructing and calling are collective.

    Args:
        topology: the ranks.
        traffic: counts the messages.
        inputs: names the lists.
        balance: how samples are distributed.
        cost: of a sample, the same on every rank.
        shares: of each rank; see `partition`.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        traffic: Traffic,
        inputs: InputSpec,
        balance: Balance,
        cost: SampleCost,
        shares: Sequence[float] = (),
    ) -> None:
        self._inputs = inputs
        self._balance = balance
        self._cost = cost
        self._shares = tuple(shares) or None
        self._traffic = traffic
        self._group = own_group(topology, Axis.WORLD, what="balance", backend="gloo")

    @property
    def medium(self) -> str:
        """The medium that samples travel through, in words."""
        if self._group.memory is not None:
            return "memory that the ranks of the host share"
        return f"gloo ({self._group.why_no_memory})" if self._group.why_no_memory else "gloo, between hosts"

    def __call__(self, batch: Batch) -> BalancedBatch:
        """This rank's samples of the global batch, from all ranks.

        Args:
            batch: what this rank brings, in host memory; its size may differ from rank to rank, and be 0.
        """
        group = self._group
        costs = self._cost.of(lengths_of(batch, self._inputs), num_samples=batch.batch_size)
        sizes = [int(part) for part in self._gather(torch.tensor([batch.batch_size]), [1] * group.size, "sizes")]
        all_costs = torch.cat(self._gather(torch.from_numpy(costs), sizes, "costs")).numpy()
        ranks = partition(all_costs, balance=self._balance, num_ranks=group.size, shares=self._shares)
        # `ranks` is of the global batch, rank after rank.
        first = sum(sizes[: group.position])
        mine = ranks[first : first + batch.batch_size]
        parts = [take_samples(batch, torch.from_numpy(np.flatnonzero(mine == rank))) for rank in range(group.size)]
        before = np.repeat(np.arange(group.size), sizes)
        return BalancedBatch(
            batch=concatenate_batches(exchange_samples(parts, group=group, traffic=self._traffic, purpose=_PURPOSE)),
            loads=loads_of(all_costs, ranks, num_ranks=group.size),
            loads_before=loads_of(all_costs, before, num_ranks=group.size),
        )

    def _gather(self, numbers: Tensor, sizes: Sequence[int], what: str) -> list[Tensor]:
        """Send the numbers of this rank to all, and return those of all ranks, in their order."""
        size = self._group.size
        came = all_to_all(
            numbers.repeat(size),
            sent=[numbers.numel()] * size,
            received=sizes,
            group=self._group,
            traffic=self._traffic,
            purpose=_PURPOSE.format(what),
        )
        return list(came.wait().split(list(sizes)))


def exchange_samples(parts: list[Batch], *, group: RankGroup, traffic: Traffic, purpose: str) -> list[Batch]:
    """The samples that each rank has for this one, in the order of ranks; what stays is not copied. Collective.

    Args:
        parts: what this rank has for each rank of the group.
        group: which nothing else uses meanwhile (`own_group`).
        traffic: counts the messages.
        purpose: of messages, with a place for what they hold.
    """
    found = samples_of_ranks(parts, group=group, traffic=traffic, purpose=purpose)
    return [part for part in found if part is not None]


def samples_of_ranks(parts: list[Batch], *, group: RankGroup, traffic: Traffic, purpose: str) -> list[Batch | None]:
    """Do the same as `exchange_samples`, with None for each other rank that had no samples for this one."""
    own = parts[group.position]
    letters = [
        _letter(part) if part.batch_size and rank != group.position else torch.empty(0, dtype=torch.uint8)
        for rank, part in enumerate(parts)
    ]
    sent = [letter.numel() for letter in letters]
    pending_sizes = all_to_all(
        torch.tensor(sent),
        sent=[1] * group.size,
        received=[1] * group.size,
        group=group,
        traffic=traffic,
        purpose=purpose.format("bytes"),
    )
    received = pending_sizes.wait().tolist()
    came = all_to_all(
        torch.cat(letters),
        sent=sent,
        received=received,
        group=group,
        traffic=traffic,
        purpose=purpose.format("samples"),
    )
    found: list[Batch | None] = [
        batch_of_parts(load(text.numpy().tobytes())) if len(text) else None for text in came.wait().split(received)
    ]
    found[group.position] = own
    return found


def _letter(part: Batch) -> Tensor:
    """A batch as bytes."""
    named = {name: value.contiguous() for name, value in named_parts(part).items()}
    # A copy that may be written to: torch warns of tensors over read-only bytes.
    return torch.frombuffer(bytearray(save(named)), dtype=torch.uint8)
