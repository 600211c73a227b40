"""Make the exchange of a parallel model prioritised, and refuse what would not be exact."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.parallel.exchange.blocks import Block
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import Rounding, Wire, WireConfig, WireFormat
from ziggurat.parallel.prioritised.cells import CellField, MemberCells, common_unit
from ziggurat.parallel.prioritised.exchange import PrioritisedExchange
from ziggurat.parallel.prioritised.hop import CellExchange
from ziggurat.parallel.prioritised.lists import ListHop, Lists
from ziggurat.parallel.tables.embeddings import ShardedEmbeddings
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.topology import Axis, Topology, own_group

_PLAIN = "--parallel.exchange plain"


def prioritise(
    embeddings: ShardedEmbeddings, *, topology: Topology, wire: WireConfig, traffic: Traffic, num_parts: int
) -> PrioritisedExchange:
    """Wrap spread tables in an exchange that looks ahead; collective.

    Args:
        embeddings: of the model.
        topology: the ranks.
        wire: formats of the hops.
        traffic: counts messages.
        num_parts: parts of a batch in a step.

    Raises:
        ConfigError: a setting with which the exchange would not be the plain one bit for bit.
    """
    is_flat = topology.num_groups == 1
    format_ = wire.between_towers if is_flat else wire.in_tower
    _check(embeddings, topology=topology, format_=format_, rounding=wire.backward_rounding, num_parts=num_parts)
    tables = embeddings.tables
    hop = embeddings.hop
    targets = _targets(hop.blocks)
    group = topology.tower
    shares = [tables.shares[rank] for rank in group.ranks]
    unit = common_unit([block.width for block in hop.blocks] + [f.shard.num_columns for s in shares for f in s.fields])
    members = [
        MemberCells(
            tuple(
                CellField(
                    width=share.shard.num_columns, column=share.column, target=targets.get((member, share.column), -1)
                )
                for share in each.fields
            ),
            unit,
        )
        for member, each in enumerate(shares)
    ]
    cells = CellExchange(
        group,
        behind=own_group(topology, Axis.TOWER, what="exchange embeddings behind the step"),
        members=members,
        output_dim=hop.output_dim,
        wire=Wire(format_, (unit,)),
        traffic=traffic,
        purpose="embeddings" if is_flat else "intra-group all-to-all",
    )
    lists = Lists(
        tables,
        sequences=embeddings.list_exchange,
        features=_list_hops(tables, topology=topology, format_=wire.between_towers, traffic=traffic)
        if not wire.between_towers.packs_rows
        else {},
    )
    exchange = PrioritisedExchange(embeddings, hop=cells, lists=lists, local_columns=_local_columns(targets))
    tables.note_rows = exchange.note

    def check_settled() -> None:
        if not exchange.is_settled:
            raise ConfigError(
                expected="an update of tables that is complete",
                found="gradients of the last step that are still on their way",
                where=f"weights of tables, with {_PLAIN.replace('plain', 'prioritised')}",
                ways_out=("call settle() of the TrainStep on all ranks first, as the Trainer does", _PLAIN),
            )

    tables.check_settled = check_settled
    return exchange


def _check(
    embeddings: ShardedEmbeddings, *, topology: Topology, format_: WireFormat, rounding: Rounding, num_parts: int
) -> None:
    placements = {parts[0].placement for parts in embeddings.tables.shards.values()}
    where = "ranks, exchange = prioritised"
    if num_parts > 1:
        raise ConfigError(
            expected="a batch in one part: both ways hide the same hop",
            found=f"num_parts = {num_parts}",
            where=where,
            ways_out=("--parallel.num-parts 1", _PLAIN),
        )
    if format_.packs_rows:
        able = ", ".join(each.name for each in WireFormat if not each.packs_rows)
        raise ConfigError(
            expected=f"a wire of {able} for the hop from tables to samples, which sends parts of rows",
            found=format_.value,
            where=where,
            ways_out=("--parallel.wire.between-towers bf16 (with towers: --parallel.wire.in-tower bf16)", _PLAIN),
        )
    if rounding is Rounding.STOCHASTIC and not format_.is_exact(torch.float32):
        raise ConfigError(
            expected="gradients that are rounded to nearest: noise depends on the order of messages",
            found=f"backward_rounding = {rounding.value}",
            where=where,
            ways_out=("--parallel.wire.backward-rounding nearest", _PLAIN),
        )
    summed_in_host = sorted(each.name for each in placements if each.sums_in_host)
    if topology.groups_span_hosts and summed_in_host:
        raise ConfigError(
            expected="tables that are not summed inside a host before they travel",
            found=f"tables placed {', '.join(summed_in_host)}",
            where=where,
            ways_out=("place them row_wise", _PLAIN),
        )


def _list_hops(
    tables: ShardedTables, *, topology: Topology, format_: WireFormat, traffic: Traffic
) -> dict[str, ListHop]:
    """The hop of every un-pooled feature whose table is not copied on every rank."""
    inputs = tables.inputs
    found = {}
    wanted = [spec for spec in inputs.sequences if not tables.shards[spec.table][0].placement.is_copied]
    if not wanted:
        return {}
    behind = own_group(topology, Axis.WORLD, what="exchange vectors of lists behind the step")
    for spec in wanted:
        shards = tables.shards[spec.table]
        unit = shards[0].num_columns
        is_cut = shards[0].placement.cuts_columns
        fields = {
            shard.rank: (CellField(width=unit, column=0, target=shard.first_column if is_cut else 0),)
            for shard in shards
        }
        hop = CellExchange(
            topology.world,
            behind=behind,
            members=[MemberCells(fields.get(rank, ()), unit) for rank in topology.world.ranks],
            output_dim=shards[0].table_columns,
            wire=Wire(format_, (unit,)),
            traffic=traffic,
            purpose="sequence",
        )
        # Rows and columns: copies are looked up without a hop.
        groups = tables.mine.groups[:2]
        mine = next((at for at, group in enumerate(groups) if any(s.table == spec.table for s in group.shards)), -1)
        index = [each.name for each in inputs.jagged].index(spec.name)
        found[spec.name] = ListHop(spec, index, hop, shards, mine)
    return found


def _targets(blocks: list[Block]) -> dict[tuple[int, int], int]:
    """Map each column of a member to the column where it comes out."""
    found: dict[tuple[int, int], int] = {}
    begins = itertools.accumulate((block.width for block in blocks), initial=0)
    # `accumulate` gives one more, the end of the last.
    for block, begin in zip(blocks, begins, strict=False):
        for member, first in block.sources:
            found |= {(member, first + index): begin + index for index in range(block.width)}
    return found


def _local_columns(targets: dict[tuple[int, int], int]) -> Int64[Tensor, "L"]:
    """Return where columns of copied tables come out, in the order in which they are looked up."""
    columns = sorted(column for member, column in targets if member == Block.LOCAL)
    return torch.tensor([targets[Block.LOCAL, column] for column in columns], dtype=torch.int64)
