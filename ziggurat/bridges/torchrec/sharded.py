"""ShardedTowerEmbedding: what `DistributedModelParallel` runs in the place of a `TowerEmbedding`.

G ranks, tower groups of S, T = G/S groups; rank r = t·S + s; B samples a rank; steps as in ziggurat/parallel/towers.py:

    input_dist    (a) ids to the owners of the tables, samples in peer order        TorchRec, ahead in its pipelines
    compute       (b) lookup and pooling                    [S, T, B, columns]      TorchRec's fused kernels
    output_dist   (d, e) intra-group all-to-all             [T·B, own towers]       BlockExchange
                  tower modules                             [T·B, own outputs]      DDP inside the tower group
                  (f) inter-group all-to-all                [B, Σ O_t]              BlockExchange, waited for when used

Gradients are TorchRec's means: the dense network's are averaged over G ranks by its DDP, so all others have to be
divided by G, too. The inter-group exchange sums what T peers send and divides by T; DDP of the tower modules divides
by S; the intra-group one sums, and embeddings divide by S. (Where `set_gradient_division(False)` of TorchRec was
called, embeddings get the plain sum, as they do there.)

State dict: the names of `TowerEmbedding`. Tables as TorchRec shards them; of the tower modules those of this rank's
group alone, the same on all its ranks.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import KJTList, ShardedEmbeddingModule
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.distributed.types import LazyAwaitable
from torchrec.distributed.utils import append_prefix
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ziggurat.bridges.torchrec.embedding import TowerEmbedding
from ziggurat.bridges.torchrec.shardings import LookedUp, TablesInTowers
from ziggurat.errors import DataError
from ziggurat.models.towers.layer import build_tower_module
from ziggurat.parallel.exchange.blocks import Block, BlockExchange, Transfer
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import WireConfig
from ziggurat.parallel.topology import Topology
from ziggurat.parallel.towers import OwnTowers


class ShardedTowerEmbedding(ShardedEmbeddingModule, FusedOptimizerModule):
    """The sharded form of a `TowerEmbedding`, which `DistributedModelParallel` runs in its place.

    Made by `TowerEmbeddingSharder`, which checks the plan.

    Args:
        module: on one device; not changed. Weights are taken from it unless they are on the meta device.
        tables: its tables, sharded.
        groups: the tower group of each tower.
        topology: the ranks.
        wire: formats of the hops.
        traffic: counts messages.
    """

    def __init__(
        self,
        module: TowerEmbedding,
        *,
        tables: TablesInTowers,
        groups: tuple[int, ...],
        topology: Topology,
        wire: WireConfig,
        traffic: Traffic,
    ) -> None:
        super().__init__()
        self._topology = topology
        self.field_dims = module.field_dims
        self.output_dim = module.output_dim
        self._num_towers = len(groups)
        self._tables = tables
        if module.ebc.device.type != "meta":  # TorchRec would draw new ones
            tables.load_state_dict(module.ebc.state_dict(), strict=False)
        own = [tower for tower, group in enumerate(groups) if group == topology.group_index]
        layer = module.tower_layer
        input_dims = [layer.module(tower).input_dim for tower in own]
        self._own = OwnTowers({tower: _module_of(module, tower) for tower in own}, input_dims=input_dims)
        self._own.to(tables._device)
        self._run = [_replicated(self._own, topology)]  # in a list: not a second set of names
        self._own_output_dim = sum(layer.module(tower).output_dim for tower in own)
        self._tower_hop = _tower_hop(
            module, tables.columns_by_rank(), own, topology=topology, wire=wire, traffic=traffic
        )
        self._peer_hop = _peer_hop(module, groups, topology=topology, wire=wire, traffic=traffic)

    # --------------------------------------------------------------------------------- what TorchRec calls in a step

    def create_context(self) -> EmbeddingBagCollectionContext:
        """Create the context that travels from `input_dist` to `output_dist` of one batch."""
        return self._tables.create_context()

    def input_dist(self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor) -> object:
        """Step (a): an awaitable of an awaitable of the ids of this rank's tables.

        Raises:
            DataError: the batch size differs between features.
        """
        if features.variable_stride_per_key():
            raise DataError(
                expected="a KeyedJaggedTensor with one batch size for all features (it may differ between ranks)",
                found="one batch size a feature (variable_stride_per_key)",
                where="TowerEmbedding",
                ways_out="repeat the samples, so that every feature has one entry a sample",
            )
        return self._tables.input_dist(ctx, features)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[Tensor]:
        """Step (b): pooled embeddings (ΣB, columns) of this rank's tables, one tensor a type of sharding."""
        return self._tables.compute(ctx, dist_input)

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]) -> LazyAwaitable[Tensor]:
        """Steps (d) to (f); the inter-group all-to-all is under way when this returns."""
        sizes = ctx.sharding_contexts[0].batch_size_per_rank
        topology = self._topology
        num_groups = self._topology.num_groups
        columns = [pooled for pooled in output if pooled.shape[1]]
        if columns:
            pooled_RC = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        else:  # no tables on this rank, which still has to take part in both directions
            empty = torch.empty(sum(sizes), 0, device=output[0].device)
            pooled_RC = empty.requires_grad_(torch.is_grad_enabled())
        per_place = [sum(sizes[place :: topology.tower_size]) for place in range(topology.tower_size)]
        of_peers = [sizes[rank] for rank in topology.peers.ranks]
        inputs_RT = self._tower_hop(pooled_RC, rows_sent=per_place, num_rows=per_place[topology.tower.position])
        divided = get_gradient_division()
        inputs_RT = _ScaleGradient.apply(inputs_RT, 1 / topology.tower_size if divided else num_groups)
        outputs_RO = self._run[0](inputs_RT) if self._own_output_dim else inputs_RT
        outputs_RO = _ScaleGradient.apply(outputs_RO, 1 / num_groups)
        token, transfer = self._peer_hop.start(outputs_RO, rows_sent=of_peers, num_rows=sizes[topology.rank])
        return _Arriving(token, transfer)

    def prefetch(self, dist_input: object, forward_stream: object = None, ctx: object = None) -> None:
        """Fetch rows into the cache of the fused kernel, where TorchRec's pipelines ask for it."""
        self._tables.prefetch(dist_input, forward_stream, ctx)

    # ----------------------------------------------------------------------------- what TorchRec asks about weights

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer that is fused into the lookups."""
        return CombinedOptimizer([("ebc", self._tables.fused_optimizer)])

    @property
    def unsharded_module_type(self) -> type[TowerEmbedding]:
        """The type of module that this module was made from."""
        return TowerEmbedding

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This module alone: what is inside is not data parallel, nor pipelined for itself."""
        del memo, remove_duplicate
        yield prefix, self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Tables, and tower modules of this rank's group."""
        del remove_duplicate
        yield from self._tables.named_parameters(append_prefix(prefix, "ebc"), recurse)
        yield from self._own.named_parameters(append_prefix(prefix, "tower_layer"), recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the tables by name."""
        del remove_duplicate
        yield from self._tables.named_buffers(append_prefix(prefix, "ebc"), recurse)

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The weights under the names of the model on one device; collective, as TorchRec's."""
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        self._tables.state_dict(destination=destination, prefix=f"{prefix}ebc.", keep_vars=keep_vars)
        self._own.state_dict(destination=destination, prefix=f"{prefix}tower_layer.", keep_vars=keep_vars)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Take what `state_dict` gave, here or on one device (whole tables, all tower modules).

        Raises:
            RuntimeError: as torch does, for names that are missing or unknown if `strict`, and for other shapes.
        """
        del assign
        others = tuple(
            f"tower_layer.modules_of_towers.{tower}."
            for tower in range(self._num_towers)
            if str(tower) not in self._own.modules_of_towers
        )
        of_tables = {name.removeprefix("ebc."): value for name, value in state_dict.items() if name.startswith("ebc.")}
        of_towers = {
            name.removeprefix("tower_layer."): value
            for name, value in state_dict.items()
            if not name.startswith(("ebc.", *others))
        }
        tables = self._tables.load_state_dict(of_tables, strict=strict)
        towers = self._own.load_state_dict(of_towers, strict=strict)
        return _IncompatibleKeys(
            [f"ebc.{name}" for name in tables.missing_keys] + [f"tower_layer.{name}" for name in towers.missing_keys],
            [f"ebc.{name}" for name in tables.unexpected_keys] + list(towers.unexpected_keys),
        )


class _Arriving(LazyAwaitable[Tensor]):
    """The output of the towers, on its way from the peers."""

    def __init__(self, token: Tensor, transfer: Transfer) -> None:
        super().__init__()
        self._token = token
        self._transfer = transfer

    def _wait_impl(self) -> Float[Tensor, "B X"]:
        return self._transfer.exchange.finish(self._token, self._transfer)


class _ScaleGradient(torch.autograd.Function):
    """The values as they are, and their gradient times a number."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


def _module_of(module: TowerEmbedding, tower: int) -> nn.Module:
    """A copy of a tower module; from the meta device the fresh weights that one device would have."""
    found = module.tower_layer.module(tower)
    if any(weight.is_meta for weight in found.parameters()):
        return build_tower_module(
            module.tower_layer.config, field_dims=found.field_dims, dim=module.dim, tower=tower, seed=module.seed
        )
    return copy.deepcopy(found)


def _replicated(own: OwnTowers, topology: Topology) -> nn.Module:
    """Return the module to call, so that gradients are averaged inside the tower group."""
    has_weights = any(weight.requires_grad for weight in own.parameters())
    if topology.tower.process_group is None or not has_weights:
        return own
    return DistributedDataParallel(
        own, process_group=topology.tower.process_group, gradient_as_bucket_view=True, forward_sync_buffers=False
    )


def _tower_hop(
    module: TowerEmbedding,
    columns_by_rank: list[list[LookedUp]],
    own: list[int],
    *,
    topology: Topology,
    wire: WireConfig,
    traffic: Traffic,
) -> BlockExchange:
    """Everything of this group's towers, for the samples of this rank's peers, in the order of the towers."""
    members = [columns_by_rank[rank] for rank in topology.tower.ranks]
    blocks: list[Block] = []
    for name in (name for tower in own for name in module.towers.towers[tower]):
        sources: dict[tuple[int, int], list[tuple[int, int]]] = {}  # rows of a table lie on several members: summed
        for member, columns in enumerate(members):
            for piece in columns:
                if piece.name == name:
                    sources.setdefault((piece.first_column, piece.width), []).append((member, piece.column))
        blocks += [Block(width, tuple(sources[first, width])) for first, width in sorted(sources)]
    return BlockExchange(
        topology.tower,
        widths=[[piece.width for piece in columns] for columns in members],
        blocks=blocks,
        wire=wire.in_tower,
        backward_rounding=wire.backward_rounding,
        traffic=traffic,
        purpose="intra-group all-to-all",
    )


def _peer_hop(
    module: TowerEmbedding, groups: tuple[int, ...], *, topology: Topology, wire: WireConfig, traffic: Traffic
) -> BlockExchange:
    """The outputs of all towers, in their order, for the samples of this rank."""
    widths: list[list[int]] = [[] for _ in range(topology.num_groups)]
    blocks: list[Block] = []
    for tower, group in enumerate(groups):
        for dim in module.tower_layer.module(tower).output_field_dims:
            blocks.append(Block(dim, ((group, sum(widths[group])),)))
            widths[group].append(dim)
    return BlockExchange(
        topology.peers,
        widths=widths,
        blocks=blocks,
        wire=wire.between_towers,
        backward_rounding=wire.backward_rounding,
        traffic=traffic,
        purpose="inter-group all-to-all",
    )
