"""place_tables: every table whole on one rank, so that no rank has much more to look up than another.

Greedy, the largest first, each to the rank with the least so far (longest processing time first, Graham 1969: at most
4/3 of the best possible). The load of a table is what its features make a rank read and send in a step,

    load = Σ over its features of (mean list length · D  +  D)          numbers read, and numbers sent

and ties go to the rank with the fewest bytes. With towers a table goes to a rank of its tower's group.
"""

from __future__ import annotations

from collections.abc import Mapping

from ziggurat.arguments import check_arguments
from ziggurat.features.inputs import InputSpec
from ziggurat.placements import by_columns
from ziggurat.plan import Plan, TablePlacement, Towers


@check_arguments
def place_tables(
    inputs: InputSpec,
    *,
    dim: int,
    world_size: int,
    towers: Towers | None = None,
    tower_size: int = 0,
    list_lengths: Mapping[str, float] | None = None,
) -> Plan:
    """A balanced table-wise plan; the same on every rank that asks with the same arguments.

    Args:
        inputs: features and tables.
        dim: columns of tables that name no number of their own.
        world_size: ranks.
        towers: groups of features; None for a flat model.
        tower_size: S; 0 chooses the smallest that the towers allow.
        list_lengths: mean number of rows a sample, by feature; 1 where not given.

    Raises:
        PlanError: the towers do not fit the features or the ranks.

    Example:
        >>> from ziggurat.testing.batches import small_inputs
        >>> zg.place_tables(small_inputs(), dim=8, world_size=2).world_size
        2
    """
    shell = Plan(world_size=world_size, tables=(), towers=towers, tower_size=tower_size)
    homes = {field.table: range(world_size) for field in inputs.lookups}
    if towers is not None:
        towers.check({field.name: field.table for field in inputs.lookups})
        group = {name: shell.tower_ranks(index) for index, tower in enumerate(towers.towers) for name in tower}
        homes = {field.table: group[field.name] for field in inputs.lookups}
    lengths = list_lengths or {}
    loads = {table.name: 0.0 for table in inputs.tables}
    sizes = {table.name: table.num_rows * (table.embedding_dim or dim) for table in inputs.tables}
    for field in inputs.lookups:
        columns = inputs.table(field.table).embedding_dim or dim
        loads[field.table] += columns * (1.0 + lengths.get(field.name, 1.0))
    load_of = [0.0] * world_size
    size_of = [0] * world_size
    chosen: dict[str, int] = {}
    # The name comes last: every rank that asks must find the same order.
    for name in sorted(loads, key=lambda name: (-loads[name], -sizes[name], name)):
        rank = min(homes.get(name, range(world_size)), key=lambda rank: (load_of[rank], size_of[rank], rank))
        load_of[rank] += loads[name]
        size_of[rank] += sizes[name]
        chosen[name] = rank
    tables = tuple(
        TablePlacement(table=table.name, placement=by_columns(1), ranks=(chosen[table.name],))
        for table in inputs.tables
    )
    return Plan(world_size=world_size, tables=tables, towers=towers, tower_size=tower_size)
