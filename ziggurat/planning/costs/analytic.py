"""Analytic costs: what each way to place a table costs, from bytes, rates and latencies alone. The readable reference.

Symbols: G ranks in hosts of L; a hop joins S ranks (all G for a flat model, a tower group with towers), l of them in
one host; B samples a rank, N = G·B of all ranks; a table has D columns of e bytes, p rows read a sample (all features),
f features; w bytes a number on the wire. A shard in k parts:

                 rows read      columns out (per sample)   ids in        sent inside host        sent between hosts
    table_wise      N·p                f·D                  N·p          out·(l−1)/S             out·(S−l)/S
    column_wise     N·p                f·D/k                N·p          out·(l−1)/S             out·(S−l)/S
    row_wise        N·p/k              f·D   (partial)      N·p/k        out·(l−1)/S             out·(S−l)/S
    table_row_wise  N·p/k              f·D   (partial)      N·p/k        out·(k−1)/k             out/k·(S−l)/S
    data_parallel   N·p/k              f·D   (N/k samples)  –            –  (but gradients of touched rows, and back)

with out = N·f·columns·w. Times of a shard:

    lookup   rows·(D·e + o) / (memory rate · gather efficiency)  +  N·f·D·4 / memory rate
    update   rows·(4·D + 2·(D·e + state) + 2·o) / (memory rate · gather efficiency)          o: overhead of a row
             (a copy updates what all ranks touch: at most N·p rows, and no more than the table has)
    hop      latency + messages + max(inside bytes / inside rate, between bytes / between rate),   there and back

A device's time is the sum over its shards, and a step waits for the slowest device: lookup and send go before one
barrier, receive and update after another. What this leaves out is what a learned cost model knows: that looking up ten
tables in one kernel costs less than ten lookups, and that hot rows stay in caches. Formulas of this kind are those of
TorchRec's planner (`torchrec/distributed/planner`, `ShardPerf`) and of Mudigere et al., arXiv 2104.05158, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
from jaxtyping import Float32

from ziggurat.errors import ConfigError
from ziggurat.placements import Hop, StepBytes
from ziggurat.planning.cluster.cluster import Cluster, Port
from ziggurat.planning.problem import ShardProfile
from ziggurat.typed import Count, checked

_ID_BYTES = 4.0
_MS = 1e3


@dataclass(frozen=True, kw_only=True)
@checked
class HopSettings:
    """Settings of how embeddings travel.

    Args:
        batch_size: B, samples of each rank.
        group_size: S, ranks that the embedding hop joins; 0: all.
        number_bytes: w, of a number on the wire, scales included.
    """

    batch_size: Count
    group_size: int = 0
    number_bytes: float = 4.0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.group_size < 0 or self.number_bytes <= 0:
            raise ConfigError(
                expected="batch_size >= 1, group_size >= 0, number_bytes > 0",
                found=f"{self.batch_size}, {self.group_size}, {self.number_bytes:g}",
                where="HopSettings",
                ways_out="correct the number",
            )


@dataclass(frozen=True, kw_only=True)
class ShardWork:
    """The work that a shard gives its rank in one step. Sums of it are a rank's work; all but times are bytes.

    Args:
        lookup_s: reading rows and pooling them.
        update_s: gradients of rows, and the optimizer.
        ids_inside, ids_between: ids that come from this host, and from others.
        sent_inside, sent_between: columns that go out forward; their gradients come back the same way.
        gathered_inside, gathered_between: gradients of touched rows of copies, which every rank needs.
    """

    lookup_s: float = 0.0
    update_s: float = 0.0
    ids_inside: float = 0.0
    ids_between: float = 0.0
    sent_inside: float = 0.0
    sent_between: float = 0.0
    gathered_inside: float = 0.0
    gathered_between: float = 0.0

    def __add__(self, other: ShardWork) -> ShardWork:
        return ShardWork(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class TableCost:
    """Milliseconds that one table costs the ranks that hold it, by part; of its busiest rank."""

    lookup_ms: float
    ids_ms: float
    exchange_ms: float = field(metadata={"doc": "there and back"})
    update_ms: float
    reduction_ms: float

    @property
    def total_ms(self) -> float:
        """The milliseconds of all parts."""
        return self.lookup_ms + self.ids_ms + self.exchange_ms + self.update_ms + self.reduction_ms


class AnalyticCosts:
    """The formulas of the module's docstring for one cluster.

    Args:
        cluster: rates.
        settings: batch and wire.

    Raises:
        ConfigError: a hop of more ranks than there are.
    """

    def __init__(self, cluster: Cluster, settings: HopSettings) -> None:
        self.cluster = cluster
        self.settings = settings
        self.world_size = cluster.world_size
        self.group_size = settings.group_size or self.world_size
        if self.group_size > self.world_size:
            raise ConfigError(
                expected=f"a hop of at most {self.world_size} ranks",
                found=f"group_size = {self.group_size}",
                where=f"cluster {cluster.name}",
                ways_out="a larger cluster, or a smaller tower_size",
            )
        self.ranks_per_host = min(cluster.devices_per_host, self.group_size)
        self.num_samples = self.world_size * settings.batch_size
        self.hop = Hop(
            world_size=self.world_size,
            group_size=self.group_size,
            ranks_per_host=self.ranks_per_host,
            devices_per_host=min(cluster.devices_per_host, self.world_size),
        )

    def work(self, shard: ShardProfile) -> ShardWork:
        """Return the work that a shard gives its rank."""
        table = shard.table
        device = self.cluster.device
        placement = shard.placement
        rows = self.num_samples * shard.pooling_factor
        touched_here, touched_anywhere = self._touched(shard)
        # A copy serves the samples of its own rank, a shard those of all ranks.
        samples = self.num_samples / shard.num_parts if placement.is_copied else self.num_samples
        out = float(samples * table.num_features * shard.dim)
        gather_per_s = device.memory_bytes_per_s * device.gather_efficiency
        row_bytes = table.row_format.row_bytes(shard.dim)
        state_bytes = table.state_bytes_per_row(shard.dim)
        read = rows * (row_bytes + device.row_overhead_bytes)
        # A copy updates each row that any rank touched once; a shard is priced as if all rows read were different.
        touched = touched_anywhere if placement.is_copied else rows
        updated = rows * 4.0 * shard.dim + touched * 2.0 * (row_bytes + state_bytes + device.row_overhead_bytes)
        # Lists send their lengths along, a number for each sample.
        lists = table.num_features if table.pooling_factor != table.num_features else 0
        step = StepBytes(
            ids=_ID_BYTES * (rows + self.num_samples * lists),
            pooled=out * self.settings.number_bytes,
            copied=(touched_here + touched_anywhere) * (4.0 * shard.dim + _ID_BYTES),
        )
        moved = placement.bytes_moved(step, num_parts=shard.num_parts, hop=self.hop)
        return ShardWork(
            lookup_s=read / gather_per_s + 4.0 * out / device.memory_bytes_per_s,
            update_s=updated / gather_per_s,
            ids_inside=moved.ids[0],
            ids_between=moved.ids[1],
            sent_inside=moved.sent[0],
            sent_between=moved.sent[1],
            gathered_inside=moved.gathered[0],
            gathered_between=moved.gathered[1],
        )

    def hop_s(self, *, inside: float, between: float, group_size: int = 0) -> float:
        """Seconds of one all-to-all, from what the busiest rank moves.

        Args:
            inside: bytes to ranks of its host.
            between: bytes to ranks of other hosts.
            group_size: ranks that take part; 0: those of the embedding hop.
        """
        size = group_size or self.group_size
        if size == 1:
            return 0.0
        same = min(self.cluster.devices_per_host, size)
        return self.transfer_s(inside=inside, between=between, messages=(same - 1, size - same))

    def transfer_s(self, *, inside: float, between: float, messages: tuple[int, int]) -> float:
        """Seconds of an exchange with so many messages inside the host and to other hosts."""
        near = self.cluster.inside
        far = self.cluster.between
        inside_s = near.latency_s + messages[0] * near.message_s + inside / near.effective_bytes_per_s
        if not messages[1]:
            return inside_s
        # Both links carry at the same time.
        return max(inside_s, far.latency_s + messages[1] * far.message_s + between / self.cluster.between_bytes_per_s())

    def all_reduce_s(self, num_bytes: float, *, group_size: int = 0) -> float:
        """Seconds to sum `num_bytes` over ranks: in the host, between hosts on all ports at once, in the host again.

        Where the devices of a host share a port, one ring over all ranks (2·(G−1)/G of the bytes over every link).
        """
        size = group_size or self.world_size
        near = self.cluster.inside
        far = self.cluster.between
        same = min(self.cluster.devices_per_host, size)
        hosts = max(1, size // same)
        if size == 1 or not num_bytes:
            return 0.0
        inside_s = 0.0
        if same > 1:
            inside_s = near.latency_s + 2 * num_bytes * (same - 1) / same / near.effective_bytes_per_s
        if hosts == 1:
            return inside_s
        if far.port is Port.HOST:
            return far.latency_s + 2 * num_bytes * (size - 1) / size / far.effective_bytes_per_s
        sent = 2 * num_bytes / same * (hosts - 1) / hosts
        return inside_s + far.latency_s + 2 * (hosts - 1) * far.message_s + sent / self.cluster.between_bytes_per_s()

    def table_cost(self, shards: Sequence[ShardProfile]) -> TableCost:
        """Return one table's cost on its busiest rank; exchanges count without the latency that all tables share."""
        works = [self.work(shard) for shard in set(shards)]
        worst = max(works, key=lambda each: each.lookup_s + each.update_s)
        return TableCost(
            lookup_ms=_MS * worst.lookup_s,
            ids_ms=_MS * self.moved_s(inside=worst.ids_inside, between=worst.ids_between),
            exchange_ms=2 * _MS * self.moved_s(inside=worst.sent_inside, between=worst.sent_between),
            update_ms=_MS * worst.update_s,
            reduction_ms=_MS * self.moved_s(inside=worst.gathered_inside, between=worst.gathered_between),
        )

    def moved_s(self, *, inside: float, between: float) -> float:
        """Seconds that bytes take on the links, without latency."""
        between_s = between / self.cluster.between_bytes_per_s() if between else 0.0
        return max(inside / self.cluster.inside.effective_bytes_per_s, between_s)

    def _touched(self, shard: ShardProfile) -> tuple[float, float]:
        """Different rows that a rank's own samples touch, and those of all ranks, at most."""
        rows = self.num_samples * shard.table.pooling_factor
        return min(rows / shard.num_parts, shard.num_rows), min(rows, shard.num_rows)


class AnalyticCostModel:
    """`AnalyticCosts` in the form of a `CostModel`: encodings are milliseconds and bytes of shards, and add up.

    Args:
        costs: the formulas.
    """

    def __init__(self, costs: AnalyticCosts) -> None:
        self.costs = costs

    def encode(self, shards: Sequence[ShardProfile]) -> Float32[np.ndarray, "S H"]:
        """`ShardWork` and the count of shards as vectors: milliseconds and megabytes."""
        known: dict[ShardProfile, tuple[float, ...]] = {}
        for shard in shards:
            if shard not in known:
                work = astuple(self.costs.work(shard))
                known[shard] = (*(value * _MS for value in work[:2]), *(value / 1e6 for value in work[2:]), 1.0)
        return np.array([known[shard] for shard in shards], dtype=np.float32).reshape(len(shards), 9)

    def local(self, states: Float32[np.ndarray, "M H"]) -> Float32[np.ndarray, "M K"]:
        """Compute milliseconds (with the launches of a fused lookup and update), bytes by kind and link."""
        launch_ms = np.float32(_MS * 4 * self.costs.cluster.device.launch_s)
        compute = states[:, 0] + states[:, 1] + launch_ms * (states[:, 8] > 0)
        return np.column_stack([compute, states[:, 2:8]]).astype(np.float32)

    def exchange(self, local: Float32[np.ndarray, "N P K"]) -> Float32[np.ndarray, "N P"]:
        """Milliseconds of every device: its work, its ids, and twice the hop; nobody receives less than the mean."""
        costs = self.costs
        near = costs.cluster.inside.effective_bytes_per_s / 1e9  # MB / (GB/s) = ms
        far = costs.cluster.between_bytes_per_s() / 1e9
        # Behind the milliseconds stand pairs (inside, between): of ids, of columns sent, of gradients gathered.
        near_ms = local[:, :, 1::2] / near
        far_ms = local[:, :, 2::2] / far
        moved = np.maximum(near_ms, far_ms) if costs.cluster.hosts > 1 else near_ms
        ids = moved[..., 0]
        sent = moved[..., 1]
        gathered = moved[..., 2]
        sent = np.maximum(sent, sent.mean(axis=1, keepdims=True))
        # Ids are exchanged among all ranks, columns and their gradients within the hop.
        latency_ms = _MS * (
            costs.hop_s(inside=0, between=0) * 2 + costs.hop_s(inside=0, between=0, group_size=costs.world_size)
        )
        return (local[:, :, 0] + ids + 2 * sent + gathered + np.float32(latency_ms)).astype(np.float32)
