"""Where the fields of a model read rows and write columns: one layout for each storage of its tables."""

from __future__ import annotations

from dataclasses import replace

from ziggurat.embeddings.weights import TableWeights
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec
from ziggurat.features.schema import Pooling
from ziggurat.ops.lookup import FieldKind, FieldSlot, LookupLayout


def field_layouts(inputs: InputSpec, tables: TableWeights) -> list[LookupLayout]:
    """One layout for each storage, all writing into one output."""
    slots: list[list[FieldSlot]] = [[] for _ in range(tables.num_storages)]
    column = 0
    positions = {spec.name: index for specs in (inputs.single, inputs.jagged) for index, spec in enumerate(specs)}
    for spec in inputs.fields:
        index = positions[spec.name]
        slots[tables.places[spec.table].storage].append(field_slot(spec, index=index, column=column, tables=tables))
        column += tables.places[spec.table].dim
    dims = [tables.storage(index).dim for index in range(tables.num_storages)]
    return [LookupLayout(dim=dim, width=column, slots=tuple(mine)) for dim, mine in zip(dims, slots, strict=True)]


def every_layout(inputs: InputSpec, tables: TableWeights) -> list[LookupLayout]:
    """`field_layouts` with the lists that are not pooled, too: all rows that a batch names. Columns mean nothing."""
    layouts = field_layouts(inputs, tables)
    for index, spec in enumerate(inputs.jagged):
        if spec.pooling is Pooling.NONE:
            slot = field_slot(spec, index=index, column=0, tables=tables)
            at = tables.places[spec.table].storage
            layouts[at] = replace(layouts[at], slots=(*layouts[at].slots, slot))
    return layouts


def field_slot(spec: SingleSpec | JaggedSpec, *, index: int, column: int, tables: TableWeights) -> FieldSlot:
    """Return where one field reads and writes.

    Args:
        spec: the field.
        index: among the single fields, or among the lists.
        column: of the output, its first.
        tables: where they lie.
    """
    if isinstance(spec, SingleSpec):
        kind = FieldKind.SINGLE
    else:
        kind = FieldKind.MEAN if spec.pooling is Pooling.MEAN else FieldKind.SUM
    place = tables.places[spec.table]
    return FieldSlot(
        name=spec.name,
        kind=kind,
        index=index,
        table=spec.table,
        first_row=place.first_row,
        num_rows=place.num_rows,
        column=column,
    )
