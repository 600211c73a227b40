"""Warm start: a run begins from the weights of another one.

    parent's checkpoint, vocabularies        the run: drawn weights, own vocabularies
    ├─ dense weights ── by name and shape ─► unless they read other fields, or fields in another order (layout.py)
    ├─ tables ── rows by raw id (matches.py), block by block ─► ids that are new keep the vectors they were drawn
    ├─ unknown and missing rows ───────────► those of the run
    └─ optimizers, if asked for ───────────► beside each weight and row that was taken

Everything else begins anew: position, ledger, random numbers, schedule. What was taken, what not and why is a section
of the start-up report, and stands in warm_start.json with the digest of the checkpoint and the runs that the parent
began from in turn. A checkpoint of step 0 is written before the first step, so that a run that is killed and resumed
needs its parent no more.

Memory: the ids of one table of both runs (`matches.py`), and 64 MiB of its rows at a time. Cost: the checkpoint of the
parent is read twice, once to verify it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.config import flattened
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.embeddings.storage import TablePart
from ziggurat.embeddings.storage.table_storage import WEIGHT
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import MISSING_ROW, NUM_RESERVED_ROWS, UNKNOWN_ROW, Schema, table_of
from ziggurat.ops.to_device import to_device
from ziggurat.recipes.run_config import RunConfig
from ziggurat.recipes.warm_start import OtherDims
from ziggurat.runs.quality.below_chance import some_rows
from ziggurat.runs.warm_start.layout import have_columns_of_other_labels, reasons_not_to_take
from ziggurat.runs.warm_start.matches import RowMatch, match_rows
from ziggurat.runs.warm_start.parent import Parent
from ziggurat.training.records.run_folder import Ancestor
from ziggurat.training.trainer import Trainer

_MODEL = "model."
_LIVE = "live."
_DENSE_OPTIMIZER = "dense_optimizer."
_TABLE_OPTIMIZER = "table_optimizer."
_TABLES = "embeddings.tables."
_SHOWN = 6
_NUMBERS_AT_ONCE = 1 << 20
_KEPT_ROWS = np.array([UNKNOWN_ROW, MISSING_ROW], dtype=np.int64)


class TakenTable(TypedDict):
    """Counts of a table that begins from that of the parent."""

    table: str
    ids: int
    taken: int
    new: int
    gone: int
    how: str
    share_of_lookups: NotRequired[float]


class WarmStartRecord(TypedDict):
    """Holds the content of warm_start.json."""

    ancestors: list[Ancestor]
    lines: dict[str, str]
    tables: list[TakenTable]
    dense_taken: list[str]
    dense_not_taken: dict[str, str]


@dataclass(kw_only=True)
class _Dense:
    """Dense weights that were taken, and those that were not, with the reason."""

    taken: list[str] = field(default_factory=list)
    not_taken: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


def take_weights(parent: Parent, trainer: Trainer, *, config: RunConfig, prepared: PreparedData) -> WarmStartRecord:
    """Let a run that has made no step begin from the weights of its parent. Collective.

    Args:
        parent: open, of a model of the same kind.
        trainer: of the run.
        config: of the run.
        prepared: its data.

    Raises:
        ConfigError: no row, or no weight of a model without tables, could be taken; a table has another number of
            columns, and `warm_start.dims` does not say what becomes of it. Nothing was changed then.
    """
    into = trainer.state.tensors()
    mine = prepared.inputs
    matches = _matches(parent, prepared, mine)
    columns = config.model.table_columns(mine)
    fresh = _other_dims(parent, matches, config=config, inputs=mine, columns=columns)
    _refuse_no_overlap(parent, matches, fresh=fresh, inputs=mine)
    dense = _take_dense(parent, into, config=config, inputs=mine)
    tables = [match for match in matches if match.table not in fresh]
    for match in tables:
        _take_rows(parent, into, match, optimizers=config.warm_start.optimizers)
        if match.grown is not None and trainer.growing is not None:
            trainer.growing.begin_with(match.table, match.grown.numbers, frequency=match.grown.frequency)
    if config.warm_start.optimizers and trainer.step.table_optimizer is not None:
        steps = torch.zeros((), dtype=torch.int64)
        if parent.shape(f"{_TABLE_OPTIMIZER}step") is not None:
            parent.read({f"{_TABLE_OPTIMIZER}step": steps})
        own = trainer.step.table_optimizer.state_dict()
        trainer.step.table_optimizer.load_state_dict({**own, "step": steps})
    looked_at = some_rows(prepared.train)
    schema = prepared.preprocessing.schema
    counted = [_counted(match, looked_at, schema=schema) for match in tables if not match.why_not]
    return WarmStartRecord(
        ancestors=[parent.ancestor(), *parent.ancestors],
        lines=_lines(parent, matches, counted=counted, fresh=fresh, dense=dense, config=config, prepared=prepared),
        tables=counted,
        dense_taken=dense.taken,
        dense_not_taken=dense.not_taken,
    )


def _matches(parent: Parent, prepared: PreparedData, inputs: InputSpec) -> list[RowMatch]:
    """Match the rows of each table that both have."""
    theirs = {table.name for table in parent.inputs.tables}
    return [
        match_rows(
            table.name,
            mine=prepared.preprocessing,
            theirs=parent.preprocessing,
            frequency=parent.frequency.get(table.name),
        )
        for table in inputs.tables
        if table.name in theirs
    ]


def _other_dims(
    parent: Parent, matches: list[RowMatch], *, config: RunConfig, inputs: InputSpec, columns: Mapping[str, int]
) -> dict[str, str]:
    """Return tables that begin as they were drawn, as their columns are others, with the reason.

    Raises:
        ConfigError: nothing was said of such tables, or their columns are not those of one vector.
    """
    found: dict[str, str] = {}
    of_other_labels = have_columns_of_other_labels(config, inputs, theirs=parent.inputs)
    for match in matches:
        before = _columns_of(parent, match.table)
        now = columns[match.table]
        if before == now and match.table not in of_other_labels:
            continue
        if config.warm_start.dims is OtherDims.FRESH:
            why = "the labels are others" if before == now else f"{before} columns before, {now} now"
            found[match.table] = f"{why}: the table begins as it was drawn"
            continue
        if match.table in of_other_labels:
            raise ConfigError(
                expected=f"the labels of the parent in their order: {_labels_of(parent.inputs)}; a row of table "
                f"{match.table!r} has a column for each of them",
                found=_labels_of(inputs),
                where=f"{parent.folder}, --warm-start",
                ways_out=(
                    "take the labels of the parent: leave --schema out, or write them as they were",
                    "let such tables begin as they are drawn: --warm-start.dims fresh",
                ),
            )
        table = next(table for table in parent.inputs.tables if table.name == match.table)
        dim = getattr(parent.config.model, "embedding_dim", 0)
        is_one_vector = before == (table.embedding_dim or dim)
        if config.warm_start.dims is OtherDims.CUT and is_one_vector:
            continue
        is_cut = config.warm_start.dims is OtherDims.CUT
        more = f", and {parent.config.model.kind!r} keeps more than one vector in a row" if is_cut else ""
        ways = [f"keep the columns: --model.embedding-dim {dim}"]
        ways += [] if is_cut or not is_one_vector else ["take those that both have: --warm-start.dims cut"]
        ways.append("let such tables begin as they are drawn: --warm-start.dims fresh")
        raise ConfigError(
            expected=f"{before} columns of table {match.table!r}, as in the parent",
            found=f"{now}{more}",
            where=f"{parent.folder}, --warm-start",
            ways_out=ways,
        )
    return found


def _labels_of(inputs: InputSpec) -> str:
    return ", ".join(f"{label.name} ({label.task})" for label in inputs.labels)


def _columns_of(parent: Parent, table: str) -> int:
    return parent.known_shape(f"{_MODEL}{_TABLES}{table}.weight")[1]


def _refuse_no_overlap(parent: Parent, matches: list[RowMatch], *, fresh: Collection[str], inputs: InputSpec) -> None:
    """Refuse a parent of which no row can be taken: whoever names it expects that its ids are known."""
    if not inputs.tables or any(match.num_taken for match in matches if match.table not in fresh):
        return
    if fresh:  # whoever says that tables begin anew expects it
        return
    reasons = [f"table {match.table!r}: {match.why_not or 'no id is in both'}" for match in matches]
    theirs = ", ".join(table.name for table in parent.inputs.tables[:_SHOWN])
    raise ConfigError(
        expected="a table with an id that the parent has too",
        found="; ".join(reasons[:_SHOWN]) or f"no table of the same name: the parent has {theirs or 'none'}",
        where=f"{parent.folder}, --warm-start",
        ways_out=(
            "compare how the ids of both files are written (7 and u7 are two ids)",
            "give tables the names of the parent's: [[tables]] in the schema",
            "begin from weights that are drawn: leave --warm-start out",
        ),
    )


def _take_dense(parent: Parent, into: Mapping[str, Tensor], *, config: RunConfig, inputs: InputSpec) -> _Dense:
    """Take dense weights and buffers by name and shape, and what the optimizer keeps of them where it is asked for."""
    found = _Dense()
    names = [name.removeprefix(_MODEL) for name in into if name.startswith(_MODEL)]
    reasons = reasons_not_to_take(config, inputs, names=names, parent=parent.config, theirs=parent.inputs)
    wanted: dict[str, Tensor] = {}
    live: dict[str, Tensor] = {}
    for name in names:
        if name.startswith(_TABLES):
            continue
        stored = f"{_MODEL}{name}"
        shape = parent.shape(stored)
        reason = reasons.get("", reasons.get(name, ""))
        if shape is None:
            reason = "the parent has none"
        elif shape != tuple(into[stored].shape):
            reason = f"{_shape_text(shape)} before, {_shape_text(into[stored].shape)} now"
        if reason:
            found.not_taken[name] = reason
            continue
        found.taken.append(name)
        wanted[stored] = into[stored]
        if f"{_LIVE}{name}" in into:
            live[stored] = into[f"{_LIVE}{name}"]
        for each in into if config.warm_start.optimizers else ():
            if each.startswith(f"{_DENSE_OPTIMIZER}{name}.") and parent.shape(each) == tuple(into[each].shape):
                wanted[each] = into[each]
    if inputs.tables or found.taken:
        parent.read(wanted)
        parent.read(live)
        known = {f"{_MODEL}{name}" for name in names}
        found.gone = sorted(
            name.removeprefix(_MODEL)
            for name in parent.reader.manifest.named
            if name.startswith(_MODEL) and not name.startswith(f"{_MODEL}{_TABLES}") and name not in known
        )
        return found
    raise ConfigError(
        expected="a weight of the same name and shape as in the parent",
        found="; ".join(f"{name}: {why}" for name, why in list(found.not_taken.items())[:_SHOWN]),
        where=f"{parent.folder}, --warm-start",
        ways_out=("train on the features of the parent", "begin from weights that are drawn: leave --warm-start out"),
    )


def _take_rows(parent: Parent, into: Mapping[str, Tensor], match: RowMatch, *, optimizers: bool) -> None:
    """Take the rows of a table, and what its optimizer keeps of them where it is asked for."""
    weight = f"{_TABLES}{match.table}.weight"
    sources = {f"{_MODEL}{weight}": f"{_MODEL}{weight}", f"{_LIVE}{weight}": f"{_MODEL}{weight}"}
    if optimizers:
        beside = (f"{_DENSE_OPTIMIZER}{weight}.", f"{_TABLE_OPTIMIZER}{match.table}.")
        sources |= {name: name for name in into if name.startswith(beside) and into[name].dim()}
    for name, source in sources.items():
        if name not in into or parent.shape(source) is None:
            continue  # this rank has no part of the table, or the rule keeps nothing of that name
        is_state = name.startswith(_TABLE_OPTIMIZER)
        key = name.rpartition(".")[2] if is_state else WEIGHT
        for theirs, mine in ((_KEPT_ROWS, _KEPT_ROWS), (match.theirs, match.mine)):
            for chosen, values in parent.blocks(source, theirs, key=key):
                write_rows(into[name], torch.from_numpy(mine[chosen]), values)
    steps = f"{_DENSE_OPTIMIZER}{weight}.step"  # one number a table
    if optimizers and steps in into and parent.shape(steps) == ():
        parent.read({steps: into[steps]})


@torch.no_grad()
def write_rows(target: Tensor, rows_N: Int64[Tensor, "N"], values: Tensor) -> None:
    """Replace those rows of a table that a tensor, or a part of the table, has; columns that both have.

    Args:
        target: a table in memory, or a `TablePart`.
        rows_N: of the whole table, each once.
        values: (N, D) or (N,) their numbers, for the first columns of the whole table.
    """
    if not isinstance(target, TablePart):
        rows_N = to_device(rows_N, target.device)
        values = to_device(values, target.device)
        if values.dim() == 2 and values.shape[1] != target.shape[1]:
            width = min(values.shape[1], target.shape[1])
            target[rows_N, :width] = values[:, :width]
            return
        target[rows_N] = values
        return
    held = target.rows
    storage = held.storage
    first_row, *columns = target.offsets
    here_N = (rows_N >= first_row) & (rows_N < first_row + held.num_rows)
    if not bool(here_N.any()):
        return
    local = to_device(rows_N[here_N] - first_row + held.first_row, storage.device)
    values = to_device(values[here_N], storage.device)
    if columns:
        width = held.shape[1]
        values = values[:, columns[0] : columns[0] + width]
        if values.shape[1] < width:
            whole = storage.gather(local, key=held.key)
            whole[:, : values.shape[1]] = values
            values = whole
    storage.scatter(local, values, key=held.key)


def _counted(match: RowMatch, looked_at: pa.Table, *, schema: Schema) -> TakenTable:
    """Count what was taken of a table, and the look-ups of some training rows that meet it."""
    found = TakenTable(
        table=match.table,
        ids=match.num_mine,
        taken=match.num_taken,
        new=match.num_mine - match.num_taken,
        gone=match.num_gone,
        how=match.how,
    )
    num_lookups = 0
    num_met = 0
    for feature in schema.features:
        if table_of(feature) != match.table or feature.name not in looked_at.column_names:
            continue
        rows = _flat(looked_at.column(feature.name))
        rows = rows[rows >= NUM_RESERVED_ROWS]
        num_lookups += len(rows)
        num_met += _num_met(rows, match)
    if num_lookups:
        found["share_of_lookups"] = num_met / num_lookups
    return found


def _num_met(rows: Int64[np.ndarray, " N"], match: RowMatch) -> int:
    """Count look-ups of rows, or of ids where the table grows, that meet a row which was taken."""
    if match.grown is None:
        is_taken = np.zeros(int(match.mine.max(initial=0)) + 1, dtype=bool)
        is_taken[match.mine] = True
        return int(np.count_nonzero(is_taken[rows[rows < len(is_taken)]]))
    if not len(rows):
        return 0
    # The few that are looked up are sorted, and not the many that the table begins with.
    looked_up, counts = np.unique(rows, return_counts=True)
    is_met = np.zeros(len(looked_up), dtype=bool)
    for first in range(0, len(match.grown.numbers), _NUMBERS_AT_ONCE):
        numbers = match.grown.numbers[first : first + _NUMBERS_AT_ONCE]
        places = np.minimum(np.searchsorted(looked_up, numbers), len(looked_up) - 1)
        is_met[places[looked_up[places] == numbers]] = True
    return int(counts[is_met].sum())


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    """Return the rows of a feature, lists one after the other."""
    whole = column.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], type=whole.type)
    return (whole.flatten() if pa.types.is_list(whole.type) else whole).to_numpy(zero_copy_only=False)


def _shape_text(shape: Collection[int]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def _lines(
    parent: Parent,
    matches: list[RowMatch],
    *,
    counted: list[TakenTable],
    fresh: Mapping[str, str],
    dense: _Dense,
    config: RunConfig,
    prepared: PreparedData,
) -> dict[str, str]:
    """Say what was taken, what not and why."""
    origin = parent.ancestor()
    lines = {"from": f"{origin['run']}, step {origin['step']:,}, checkpoint {origin['digest'][:12]}"}
    for number, each in enumerate(parent.ancestors, start=1):
        lines[f"{number} before"] = f"{each['run']}, step {each['step']:,}, checkpoint {each['digest'][:12]}"
    for each in counted:
        gone = f", {each['gone']:,} of the parent's gone" if each["gone"] else ""
        share = each["taken"] / each["ids"] if each["ids"] else 0.0
        met = f"; {each['share_of_lookups']:.1%} of look-ups meet one" if "share_of_lookups" in each else ""
        lines[f"rows of {each['table']}"] = (
            f"{each['taken']:,} of {each['ids']:,} taken ({share:.1%}) {each['how']}, {each['new']:,} new{gone}{met}"
        )
    for match in matches:
        if why := fresh.get(match.table) or match.why_not:
            lines[f"rows of {match.table}"] = f"none: {why}"
    mine = [feature.name for feature in prepared.preprocessing.schema.features]
    theirs = [feature.name for feature in parent.preprocessing.schema.features]
    for what, names in (
        ("new features", [name for name in mine if name not in theirs]),
        ("features gone", [name for name in theirs if name not in mine]),
    ):
        if names:
            lines[what] = ", ".join(names)
    lines["dense weights"] = f"{len(dense.taken)} of {len(dense.taken) + len(dense.not_taken)} taken"
    by_reason: dict[str, list[str]] = {}
    for name, why in dense.not_taken.items():
        by_reason.setdefault(why, []).append(name)
    for number, (why, names) in enumerate(by_reason.items(), start=1):
        lines[f"not taken {number}"] = f"{_listed(names)}: {why}"
    if dense.gone:
        lines["without a place"] = f"{_listed(dense.gone)}, of the parent"
    if other := _other_settings(parent, config):
        lines["another network"] = f"{_listed(other)}: its weights were trained in the parent's"
    if moved := _moved_numbers(parent, prepared):
        lines["numbers"] = f"their statistics are those of the new data: {', '.join(moved)}"
    lines["optimizers"] = (
        "those of the parent, where its weights were taken" if config.warm_start.optimizers else "anew"
    )
    return lines


def _listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _other_settings(parent: Parent, config: RunConfig) -> list[str]:
    """Name the settings of the network in which a run differs from its parent; shapes do not show all of them."""
    theirs = flattened(parent.config.model)
    mine = flattened(config.model)
    # Tables have lines of their own, and a start is not drawn where weights are taken.
    names = [name for name in mine if name != "init" and not name.startswith("embedding")]
    return [
        f"{name} {mine[name]} in place of {theirs.get(name, 'none')}"
        for name in names
        if mine[name] != theirs.get(name)
    ]


def _moved_numbers(parent: Parent, prepared: PreparedData) -> list[str]:
    """Name the numbers that a model now reads on another scale than the parent did."""
    before = parent.preprocessing.numbers
    now = prepared.preprocessing.numbers
    return [name for name in now if name in before and not now[name].is_close(before[name])][: 4 * _SHOWN]
