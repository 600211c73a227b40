"""Deduplicated batches on many ranks: slices travel, not samples.

    plain features   ids of B samples   ──► exchange ──► pooled (B, ·) ──────────────────►┐
    group 0          ids of U₀ slices   ──► exchange ──► pooled (U₀, ·) ──► inverse ─────►├──► pooled (B, T)
    group 1          ids of U₁ slices   ──► exchange ──► pooled (U₁, ·) ──► inverse ─────►┘

To the ranks that hold tables a group is a smaller batch of other features. So each group has an exchange of its own, an
ordinary `ShardedEmbeddings` over the same tables with the fields of the group; ids and vectors of a group, there and
back, shrink by its factor B/U. Gradients of samples are summed for slices before they travel.

With towers the exchanges end in a tower group, and slices go on from there (`PooledParts`, `parallel/tower_slices.py`).
A tower that has features of several parts computes on samples, so its ranks need to know the slice of each sample of
their peers: 4 bytes a sample and group, sent to those that need it while embeddings are looked up.

All ranks deduplicate the same groups: `training/repeats.py` decides alike on all of them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.embeddings.contract import EmbeddingsWrapper
from ziggurat.features.batch import Batch
from ziggurat.features.batches.packed import HostCopy
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.ops.repeat import expand
from ziggurat.parallel.exchange.collectives import Pending, all_to_all
from ziggurat.parallel.exchange.in_flight import InFlight, Message
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.tables.embeddings import ShardedEmbeddings, SpreadEmbeddings
from ziggurat.parallel.tables.ids import Positions, batch_of_rows
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Towers

MIXED = -1  # in place of a part: a tower that has features of several parts
PLAIN = 0  # the part of the features that are in no group; group g is part g + 1


def parts_of_towers(towers: Towers, inputs: InputSpec, groups: Sequence[FeatureGroup]) -> tuple[int, ...]:
    """Return, for each tower, the part of a batch that all its pooled features are in, or `MIXED`."""
    part_of = {spec.name: PLAIN for spec in inputs.fields}
    for number, group in enumerate(groups):
        names = [inputs.single[at].name for at in group.single] + [inputs.jagged[at].name for at in group.jagged]
        part_of |= {name: number + 1 for name in names if name in part_of}
    found = [{part_of[name] for name in tower if name in part_of} for tower in towers.towers]
    return tuple(parts.pop() if len(parts) == 1 else MIXED for parts in found)


@dataclass(frozen=True)
class PooledParts:
    """The features that a tower group has pooled for the samples of its peers, of a batch with slices.

    Args:
        groups: of the batch.
        pooled: (ΣB, ·) plain features, then (ΣU, ·) of each group; columns of the features of this group's towers.
        columns: of each part, where each feature is.
        sizes: rows that each rank has of each part, by part and rank.
        inverses: (B,) the slice of each sample of this rank, by group.
        peer_inverses: (ΣB,) the row of `pooled` of each sample of the peers, by group; None where no tower here mixes.
    """

    groups: tuple[FeatureGroup, ...]
    pooled: list[Tensor]
    columns: list[dict[str, slice]]
    sizes: list[list[int]]
    inverses: list[Int64[Tensor, "B"]]
    peer_inverses: list[Int64[Tensor, "R"] | None]


class RepeatedExchange:
    """The exchanges of plain features and of each group, for batches with the same groups.

    Args:
        inputs: of the whole model.
        groups: of the batches.
        make: makes the exchange of some fields over the tables of the model.
        towers: of the plan; None for a flat model.
        topology: the ranks.
        traffic: counts messages.
    """

    def __init__(
        self,
        inputs: InputSpec,
        groups: tuple[FeatureGroup, ...],
        *,
        make: Callable[[InputSpec], ShardedEmbeddings],
        towers: Towers | None,
        topology: Topology,
        traffic: Traffic,
    ) -> None:
        self._groups = groups
        self._topology = topology
        self._traffic = traffic
        in_groups = [(set(group.single), set(group.jagged)) for group in groups]
        plain = [at for at in range(len(inputs.single)) if not any(at in single for single, _ in in_groups)]
        # Lists need no selection: the batch's own lists are those of plain features already.
        self._plain = Positions(torch.tensor(plain, dtype=torch.int64))
        jagged = [at for at in range(len(inputs.jagged)) if not any(at in lists for _, lists in in_groups)]
        parts = [FeatureGroup(single=tuple(plain), jagged=tuple(jagged)), *groups]
        self.exchanges = [
            make(
                replace(
                    inputs,
                    single=tuple(inputs.single[at] for at in part.single),
                    jagged=tuple(inputs.jagged[at] for at in part.jagged),
                )
            )
            for part in parts
        ]
        self._names = [spec.name for spec in inputs.fields]
        self._needs = _needs(towers, inputs, groups, topology=topology)

    def split(self, batch: Batch) -> list[Batch]:
        """The samples with their plain features, then the slices of each group; each with its copy on the host."""
        parts = self._parts(batch)
        kept = batch.on_host
        if kept is None or kept is batch:
            return parts
        copies = zip(parts, self._parts(kept), strict=True)
        return [replace(part, host=HostCopy(copy, part.single, part.jagged)) for part, copy in copies]

    def _parts(self, batch: Batch) -> list[Batch]:
        plain = batch_of_rows(batch.single[self._plain.on(batch.single.device)], batch.jagged, size=batch.batch_size)
        return [plain, *(batch_of_rows(group.single, group.jagged, size=group.num_slices) for group in batch.repeated)]

    def start(self, batch: Batch, parts: list[Batch]) -> InFlight:
        """Look up the parts of a batch of a flat model, and send; collective."""
        # All are sent before any is waited for.
        lookups = [exchange.start_lookup(part) for exchange, part in zip(self.exchanges, parts, strict=True)]
        messages = [
            Message(each.hop, one.token, one.transfer) for each, one in zip(self.exchanges, lookups, strict=True)
        ]
        return InFlight(messages, lambda arrived: self._joined(arrived, batch))

    def forward(self, batch: Batch, parts: list[Batch]) -> Float[Tensor, "B T"]:
        """Pooled embeddings of a flat model, in the order of the fields; collective."""
        lookups = [exchange.start_lookup(part) for exchange, part in zip(self.exchanges, parts, strict=True)]
        arrived = [exchange.finish_lookup(one) for exchange, one in zip(self.exchanges, lookups, strict=True)]
        return self._joined(arrived, batch)

    def for_towers(self, batch: Batch, parts: list[Batch]) -> PooledParts:
        """Pooled embeddings of this group's towers, part by part; collective."""
        lookups = [exchange.start_lookup(part) for exchange, part in zip(self.exchanges, parts, strict=True)]
        sizes = [list(one.ids.sizes) for one in lookups]
        # Between the sending and the waiting: these few numbers travel beside the embeddings.
        pending = self._send_inverses(batch, sizes[PLAIN])
        pooled = [exchange.finish_lookup(one) for exchange, one in zip(self.exchanges, lookups, strict=True)]
        return PooledParts(
            groups=self._groups,
            pooled=pooled,
            columns=[_columns(exchange) for exchange in self.exchanges],
            sizes=sizes,
            inverses=[group.inverse for group in batch.repeated],
            peer_inverses=self._peer_inverses(pending, sizes),
        )

    def _joined(self, arrived: list[Tensor], batch: Batch) -> Tensor:
        found: dict[str, Tensor] = {}
        for number, (exchange, pooled) in enumerate(zip(self.exchanges, arrived, strict=True)):
            # Part 0 is of samples already; part g + 1 belongs to group g.
            values = expand(pooled, batch.repeated[number - 1].inverse) if number else pooled
            names = [spec.name for spec in exchange.inputs.fields]
            found |= dict(zip(names, values.split(exchange.field_dims, dim=1), strict=True))
        return torch.cat([found[name] for name in self._names], dim=1)

    def _send_inverses(self, batch: Batch, sizes: list[int]) -> Pending | None:
        """The slices of this rank's samples, to the peers whose towers compute on samples of slices."""
        if not any(map(any, self._needs)):
            return None
        peers = self._topology.peers
        own = self._needs[self._topology.group_index]
        inverses = [[g.inverse for g, is_needed in zip(batch.repeated, needs, strict=True) if is_needed]
                    for needs in self._needs]  # fmt: skip
        # A number of slices fits 32 bits, and half as many bytes travel.
        pieces = [inverse.to(torch.int32) for each in inverses for inverse in each]
        return all_to_all(
            torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int32, device=batch.single.device),
            sent=[batch.batch_size * len(each) for each in inverses],
            received=[sizes[rank] * sum(own) for rank in peers.ranks],
            group=peers,
            traffic=self._traffic,
            purpose="slices of samples",
        )

    def _peer_inverses(self, pending: Pending | None, sizes: list[list[int]]) -> list[Tensor | None]:
        """Return where the slices of all peers' samples are among the slices of all peers."""
        found: list[Tensor | None] = [None] * len(self._groups)
        if pending is None:
            return found
        ranks = self._topology.peers.ranks
        own = self._needs[self._topology.group_index]
        needed = [number for number, is_needed in enumerate(own) if is_needed]
        pieces = iter(pending.wait().split([sizes[PLAIN][rank] for rank in ranks for _ in needed]))
        by_peer = [[next(pieces) for _ in needed] for _ in ranks]
        for place, number in enumerate(needed):
            # Slices of a peer lie behind those of the peers before it.
            begins = itertools.accumulate((sizes[number + 1][rank] for rank in ranks), initial=0)
            # Not strict: `accumulate` gives the end of the last peer as well.
            shifted = [each[place].to(torch.int64) + begin for each, begin in zip(by_peer, begins, strict=False)]
            found[number] = torch.cat(shifted)
        return found


class Deduplicated(EmbeddingsWrapper):
    """Looks up batches with slices part by part, and leaves plain ones to what it wraps. Methods are collective.

    Args:
        inner: looks up plain batches.
        spread: the exchange over all fields, of which those of the parts are made.
        towers: of the plan; None for a flat model.
        topology: the ranks.
        traffic: counts messages.
    """

    def __init__(
        self,
        inner: SpreadEmbeddings,
        *,
        spread: ShardedEmbeddings,
        towers: Towers | None,
        topology: Topology,
        traffic: Traffic,
    ) -> None:
        super().__init__(inner)
        self._plain = (inner,)  # in tuples: not submodules
        self._spread = (spread,)
        self._towers = towers
        self._topology = topology
        self._traffic = traffic
        self._repeated: dict[tuple[FeatureGroup, ...], RepeatedExchange] = {}
        self._announced: deque[tuple[Batch, list[Batch]]] = deque()

    def forward(self, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B T"] | PooledParts:
        """Pooled embeddings; with towers, of a batch with slices, part by part for the samples of all peers."""
        if not batch.repeated:
            return super().forward(batch, dtype=dtype)
        # The exchange of parts reads rows that a deferred update may still hold back.
        self.settle()
        exchange, parts = self._take_parts(batch)
        if self._towers is None:
            return exchange.forward(batch, parts).to(dtype)
        found = exchange.for_towers(batch, parts)
        return replace(found, pooled=[pooled.to(dtype) for pooled in found.pooled])

    def start(self, batch: Batch) -> InFlight:
        """The first half of `forward`, of a flat model: look up and send over the last hop. See `pipeline.py`."""
        if not batch.repeated:
            return self._plain[0].start(batch)
        exchange, parts = self._take_parts(batch)
        return exchange.start(batch, parts)

    def announce(self, *batches: Batch) -> None:
        """Tell how many ids will come, of samples and of slices."""
        for batch in batches:
            if not batch.repeated:
                super().announce(batch)
                continue
            exchange = self._exchange(batch)
            parts = exchange.split(batch)
            self._announced.append((batch, parts))
            for each, part in zip(exchange.exchanges, parts, strict=True):
                each.announce(part)

    def send_ids(self) -> None:
        """Send the ids of the batches that were announced."""
        # Every rank in this order, plain batches first: messages are told apart by it.
        self._plain[0].send_ids()
        for each in self._exchanges():
            each.send_ids()

    def send_ahead(self, upcoming: Batch | None) -> None:
        """Send what can be sent of the batches that were announced, before the backward pass."""
        self._plain[0].send_ahead(upcoming)
        # Groups have no look-ahead: of them ids alone can be sent.
        for each in self._exchanges():
            each.send_ids()

    def drain(self) -> None:
        """Receive and forget what was sent ahead for batches that will not come."""
        super().drain()
        self._announced.clear()
        for each in self._exchanges():
            each.drain()

    def _exchange(self, batch: Batch) -> RepeatedExchange:
        """The exchanges of a batch with these groups, made once."""
        groups = tuple(group.features for group in batch.repeated)
        if groups not in self._repeated:
            self._repeated[groups] = RepeatedExchange(
                self.inputs,
                groups,
                make=self._spread[0].of_fields,
                towers=self._towers,
                topology=self._topology,
                traffic=self._traffic,
            )
        return self._repeated[groups]

    def _take_parts(self, batch: Batch) -> tuple[RepeatedExchange, list[Batch]]:
        """The exchanges of a batch with slices, and its parts; those that were announced are on their way."""
        exchange = self._exchange(batch)
        # By identity, and only the first: batches come in the order in which they were announced.
        is_next = self._announced and self._announced[0][0] is batch
        return exchange, self._announced.popleft()[1] if is_next else exchange.split(batch)

    def _exchanges(self) -> list[ShardedEmbeddings]:
        return [each for exchange in self._repeated.values() for each in exchange.exchanges]


def _columns(exchange: ShardedEmbeddings) -> dict[str, slice]:
    """Return the columns of each feature in what an exchange gives."""
    begins = itertools.accumulate(exchange.field_dims, initial=0)
    places = zip(exchange.field_names, begins, exchange.field_dims, strict=False)
    return {name: slice(begin, begin + dim) for name, begin, dim in places}


def _needs(
    towers: Towers | None, inputs: InputSpec, groups: Sequence[FeatureGroup], *, topology: Topology
) -> list[list[bool]]:
    """Say for each tower group and each group of features whether a tower there computes on samples of its slices."""
    if towers is None:
        return []
    parts = parts_of_towers(towers, inputs, groups)
    names = [
        {inputs.single[at].name for at in group.single} | {inputs.jagged[at].name for at in group.jagged}
        for group in groups
    ]
    # Un-pooled lists are no business of towers.
    names = [each & {spec.name for spec in inputs.fields} for each in names]
    mixed = [
        [towers.towers[t] for t in topology.towers_of(group, num_towers=len(towers)) if parts[t] == MIXED]
        for group in range(topology.num_groups)
    ]
    return [[any(each & set(tower) for tower in of_group) for each in names] for of_group in mixed]
