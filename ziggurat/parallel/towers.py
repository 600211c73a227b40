"""TowerTransform: one global exchange of embeddings becomes one inside a tower group and one between peers.

Luo et al., "Disaggregated Multi-Tower: Topology-aware Modeling Technique for Efficient Large-Scale Recommendation",
arXiv 2403.00877 (MLSys 2024): SPTT, the semantic-preserving tower transform, and TM, the tower module between its hops.
The paper calls (d) the tower hop and (f) the peer hop.
G ranks, tower groups of S, T = G/S groups; rank r = t·S + s; B samples a rank, N numbers a feature:

    step                         group           tensor on rank (t, s)                           where
    (a) ids to owners            world, G        rows of its tables for all G·B samples          tables/ids.py
    (b) lookup and pooling       –               [S, T, B, F_r·N]     samples in peer order      ShardedTables.lookup
    (c) peer permute             –               nothing to do: made on the ids                  Topology.peer_order
    (d) intra-group all-to-all   tower, S        [S_dst, T·B, F_r·N] ─► S_src blocks             ShardedEmbeddings.hop
    (e) shuffle to tower order   –               [T, B, F_t·N]        all features of its towers  BlockExchange.blocks
    TM  tower module             –               [T, B, F_t·N] ─► [T, B, O_t]                    here
    (f) inter-group all-to-all   peers, T        [T_dst, B, O_t] ─► [B, ΣO]                      here

Why nothing changes: (c) to (f) are one permutation of blocks in two moves, block (t, s) → (t', s') going to (t, s') in
(d) and to (t', s') in (f). With identity modules and whole tables the result is the flat one bit for bit, and the
backward pass is the same permutation, transposed.

What it saves: only (f) leaves the tower group, B·ΣO·(T−1)/T numbers a rank, against B·F·N·(1−L/G) of the flat exchange
on hosts of L ranks: less by the compression ratio, in T−1 messages instead of G−L.

A batch with slices passes part by part: towers whose features repeat together compute on slices and send slices
(`tower_slices.py`).

Several towers may share a group (T_towers a multiple of G/S); each keeps its own module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.features.jagged import FeatureGroup
from ziggurat.models.towers.layer import TowerLayer, pooled_towers
from ziggurat.models.towers.modules import IdentityTower
from ziggurat.parallel.dense import Reduction, replicate
from ziggurat.parallel.exchange.blocks import Block, BlockExchange
from ziggurat.parallel.exchange.collectives import start_sum
from ziggurat.parallel.exchange.in_flight import InFlight, Message
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import WireConfig
from ziggurat.parallel.tables.embeddings import Flow, ShardedEmbeddings
from ziggurat.parallel.tables.repeated import PooledParts
from ziggurat.parallel.topology import Axis, Lane, Topology
from ziggurat.parallel.tower_slices import SliceHops, TowerShape
from ziggurat.plan import Towers

_TOWER_GRADIENTS = "tower module gradients"


class OwnTowers(nn.Module):
    """The modules of the towers of this rank's group.

    Args:
        modules: by the number of the tower.
        input_dims: columns that each takes.
    """

    def __init__(self, modules: dict[int, nn.Module], *, input_dims: list[int]) -> None:
        super().__init__()
        self.modules_of_towers = nn.ModuleDict({str(tower): module for tower, module in modules.items()})
        self._input_dims = input_dims

    def forward(self, pooled: Float[Tensor, "R T"] | list[Tensor]) -> Float[Tensor, "R O"] | list[Tensor]:
        """Outputs of the towers side by side; of inputs that are given tower by tower, outputs tower by tower."""
        is_list = isinstance(pooled, list)
        pieces = pooled if is_list else pooled.split(self._input_dims, dim=1)
        outputs = [module(piece) for module, piece in zip(self.modules_of_towers.values(), pieces, strict=True)]
        if is_list:
            return outputs
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


class TowerTransform:
    """Tower modules and the inter-group all-to-all; `SpreadFields` calls it behind the lookup of many ranks.

    Weights stay those of the model's layer, of which this rank keeps its own modules. Ranks of a tower group have the
    same towers: gradients of their modules are summed there, not by all.

    Args:
        layer: the towers of the model; None to change only the way (identity modules, and the fields come out in the
            flat model's order).
        towers: the grouping.
        embeddings: what comes before.
        topology: the ranks.
        wire: formats of the hops.
        reduction: what gradients of tower modules travel as.
        traffic: counts messages.
        flow: sizes of the batches under way.
    """

    def __init__(
        self,
        layer: TowerLayer | None,
        *,
        towers: Towers,
        embeddings: ShardedEmbeddings,
        field_dims: dict[str, int],
        topology: Topology,
        wire: WireConfig,
        reduction: Reduction,
        traffic: Traffic,
        flow: Flow,
    ) -> None:
        self._topology = topology
        self._reduction = reduction
        self._traffic = traffic
        self._flow = flow
        self.towers = towers
        pooled = pooled_towers(towers, embeddings.inputs)
        input_field_dims = [[field_dims[name] for name in tower] for tower in pooled]
        # Identity modules give out what they take in.
        output_field_dims = input_field_dims
        if layer is not None:
            output_field_dims = [list(layer.module(t).output_field_dims) for t in range(len(towers))]
        own = topology.towers_of(topology.group_index, num_towers=len(towers))
        if layer is not None:
            layer.keep(own)
        modules: dict[int, nn.Module] = {
            tower: IdentityTower(input_field_dims[tower]) if layer is None else layer.module(tower) for tower in own
        }
        self._own = OwnTowers(modules, input_dims=[sum(input_field_dims[tower]) for tower in own])
        # What the lookup leaves on this rank is what its towers read, no column more.
        assert sum(sum(input_field_dims[tower]) for tower in own) == embeddings.output_dim
        widths = []
        starts = {}
        named = {}
        for group in range(topology.num_groups):
            column = 0
            towers_of_group = topology.towers_of(group, num_towers=len(towers))
            for tower in towers_of_group:
                for index, dim in enumerate(output_field_dims[tower]):
                    starts[tower, index] = Block(dim, ((group, column),))
                    column += dim
                if layer is None:
                    named |= {name: (tower, index) for index, name in enumerate(pooled[tower])}
            widths.append([dim for t in towers_of_group for dim in output_field_dims[t]])
        # Without modules the fields are put back where the flat model has them; with them tower stands behind tower.
        order = list(starts) if layer is not None else [named[spec.name] for spec in embeddings.inputs.fields]
        blocks = [starts[field] for field in order]
        self.field_dims = tuple(block.width for block in blocks)
        self.output_dim = sum(self.field_dims)
        self._make_hop = lambda widths, blocks: BlockExchange(
            topology.peers,
            widths=widths,
            blocks=blocks,
            wire=wire.between_towers,
            backward_rounding=wire.backward_rounding,
            traffic=traffic,
            purpose="inter-group all-to-all",
        )
        # The hop of whole batches; those of batches that repeat are made when such a batch comes.
        self.hop = self._make_hop(widths, blocks)
        self._shape = TowerShape(towers, embeddings.inputs, pooled, output_field_dims, order, topology)
        self._slice_hops: dict[tuple[FeatureGroup, ...], SliceHops] = {}
        self._group = topology.lane(Axis.TOWER, Lane.DENSE)
        self._run = replicate(
            self._own, group=self._group, reduction=reduction, traffic=traffic, purpose=_TOWER_GRADIENTS
        )

    def computed_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the modules' output type where the dense network computes in `compute`, one for all towers of a model.

        Every module ends with products, which autocast brings to `compute`; identity modules pass on what was looked
        up, FP32.
        """
        is_identity = all(isinstance(module, IdentityTower) for module in self._own.modules_of_towers.values())
        return torch.float32 if is_identity else compute

    def __call__(self, pooled_RT: Float[Tensor, "R T"] | PooledParts) -> Float[Tensor, "B X"]:
        """Compute this group's towers for all peers' samples, and return all towers for this rank's samples."""
        return self._start(pooled_RT, run=self._run).wait()

    def start(self, pooled_RT: Float[Tensor, "R T"] | PooledParts) -> InFlight:
        """Compute and send, the first half of a call; `reduce_gradients` follows the backward passes."""
        return self._start(pooled_RT, run=self._own)

    def reduce_gradients(self) -> None:
        """Sum the gradients of tower modules inside their group: one message, on fast links."""
        if self._group.process_group is None:
            return
        gradients = [p.grad for p in self._own.parameters() if p.grad is not None]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        flat = flat.to(torch.bfloat16) if self._reduction is Reduction.BF16 else flat
        self._traffic.count_reduction(_TOWER_GRADIENTS, num_bytes=flat.numel() * flat.element_size())
        start_sum(flat, group=self._group, purpose=_TOWER_GRADIENTS).wait()
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))

    def slice_hops(self, groups: tuple[FeatureGroup, ...]) -> SliceHops:
        """The hops of batches with these groups of features that repeat, made once."""
        if groups not in self._slice_hops:
            self._slice_hops[groups] = SliceHops(self._shape, groups, make_hop=self._make_hop)
        return self._slice_hops[groups]

    def _start(self, pooled_RT: Float[Tensor, "R T"] | PooledParts, *, run: Callable[..., Any]) -> InFlight:
        if isinstance(pooled_RT, PooledParts):
            return self.slice_hops(pooled_RT.groups).start(pooled_RT, run=run)
        # Read now: the batches under way may have other sizes by the time the outputs have arrived.
        sizes = self._peer_sizes()
        outputs = run(pooled_RT)
        token, transfer = self.hop.start(outputs, rows_sent=sizes, num_rows=sizes[self._topology.peers.position])
        return InFlight([Message(self.hop, token, transfer)], lambda arrived: arrived[0])

    def _peer_sizes(self) -> list[int]:
        return [self._flow.sizes[rank] for rank in self._topology.peers.ranks]
