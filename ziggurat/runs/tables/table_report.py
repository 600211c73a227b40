"""What `ziggurat tables RUN` says: bytes of each table by tier, how its rows are used, and what a cache of them hits.

Nothing of the model is loaded: bytes follow from the run's settings and the sizes of its tables, and use from a sample
of its training data, read in the order in which the run reads them (`touched_rows.py`). Predicted hits are those of a
cache of the rows touched last, for a share of the rows of one table, or of all tables of a width, which share one cache
(`planning/tiers/miss_ratio.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ziggurat.config import to_json
from ziggurat.embeddings.room import TableSize
from ziggurat.embeddings.storage.host import MAP_BYTES
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.files import Format
from ziggurat.ops.growing.state import map_bytes
from ziggurat.ops.machine.memory import size_text
from ziggurat.ops.row_formats import RowFormat
from ziggurat.planning.simulator.step_work import state_bytes
from ziggurat.planning.tiers.miss_ratio import MissRatioCurve, miss_ratio_curve
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.tables.disk_bytes import bytes_on_disk, held_bytes, held_share, share_on_device
from ziggurat.runs.tables.growth import LoggedGrowth, limits_of, logged_growth
from ziggurat.runs.tables.table_use import WHERE, CacheHits, RowsPlace, TableUse
from ziggurat.runs.tables.touched_rows import TouchedRows
from ziggurat.training.records.log import read_records

SHARES = (0.01, 0.05, 0.1, 0.2)
TABLES = Format(name="ziggurat.tables", what="a report on the tables of a run")
COLUMNS = (
    *("table", "rows × columns", "kept as", "weights", "state", "cache", "map", "disk"),
    *("rows touched", "age", "lookups a sample", *(f"hits at {share:.0%}" for share in SHARES)),
)


@dataclass(frozen=True, kw_only=True)
class TablesReport:
    """All tables of a run.

    Args:
        tables: one entry each, the largest first.
        shared: one entry for all tables of a width and format, where several share a cache.
        num_samples: samples whose touches were counted.
        epochs: of the training data that were read, 1 or 2.
        batch_size: samples of a batch.
        curves: by name, for the plot.
        measured: share of the rows of steps that the run's caches had, as its log says; None: no log, or no cache.
        growing: by table whose ids come and go, what became of them in the sample.
        logged: by table whose ids come and go, what the log says of the whole run.
        measured_held: share of the rows of lookups on a disk that were held, likewise.
        measured_device: share of the rows of batches that the device held of tables on the host, likewise.
        why_not_measured: why one of them is None, for people.
    """

    tables: tuple[TableUse, ...]
    shared: tuple[TableUse, ...]
    num_samples: int
    epochs: int
    batch_size: int
    curves: dict[str, MissRatioCurve] = field(repr=False)
    measured: float | None = None
    growing: dict[str, dict[str, int]] = field(default_factory=dict)
    logged: dict[str, LoggedGrowth] = field(default_factory=dict)
    measured_held: float | None = None
    measured_device: float | None = None
    why_not_measured: str = "no run"

    @property
    def _caches(self) -> tuple[TableUse, ...]:
        """The tables with a cache of their own: tables of a width and format together, or a table alone."""
        return self.shared or self.tables

    def rows(self) -> list[tuple[str, ...]]:
        """The lines of the table, as `COLUMNS` name them."""
        return [each.cells() for each in (*self.tables, *self.shared)]

    def lines(self) -> list[str]:
        """Say what the figures are of."""
        weights = sum(each.weight_bytes for each in self.tables)
        state = sum(each.state_bytes for each in self.tables)
        cache = sum(each.cache_bytes for each in self.tables)
        maps = sum(each.map_bytes for each in self.tables)
        disk = sum(each.disk_bytes for each in self.tables)
        cached = f", cache {size_text(cache)}" if cache else ""
        cached += f", maps of ids {size_text(maps)}" if maps else ""
        # With one epoch the first half of the sample only fills the caches.
        order = "the second epoch" if self.epochs == 2 else "the second half of the sample"
        found = [
            f"bytes     {size_text(weights + state + cache + maps)} of memory: weights {size_text(weights)}, optimizer "
            f"state {size_text(state)}{cached}",
            *self._disk_lines(disk),
            *self._host_lines(),
            f"hits      predicted for {self.num_samples:,} samples of {order}, in batches of {self.batch_size:,}: "
            "rows a step needs that a cache of so many per cent of the rows has, those touched last",
        ]
        if any(hits.error for each in (*self.tables, *self.shared) for hits in each.hits):
            found.append("±         standard error: a share of the rows, chosen by hash, stands for all")
        measures = (
            (RowsPlace.MEMORY, "cache", self.measured),
            (RowsPlace.DISK, "held", self.measured_held),
            (RowsPlace.HOST, "on device", self.measured_device),
        )
        for place, name, measured in measures:
            caches = [each for each in self._caches if each.own_hits is not None and each.place is place]
            own = [f"{each.own_hits.text} ({each.name})" for each in caches if each.own_hits is not None]
            log = self.why_not_measured if measured is None else f"{100 * measured:.1f} % in the log"
            found += [f"{name:<9} the run's own: predicted {', '.join(own)}; measured: {log}"] if own else []
        # A smaller share would be shown as 0 %.
        new = {each.name: each.first_touches for each in self.tables if each.first_touches >= 0.005}
        if new:
            shown = ", ".join(f"{name} {100 * share:.0f} %" for name, share in list(new.items())[:5])
            found.append(f"new rows  that no cache hits, of the rows a step needs: {shown}")
        found.append("age       batches since the rows touched were used last, at the end of the sample: the median")
        for name, counts in self.growing.items():
            share = counts["unknown"] / max(counts["known"] + counts["unknown"], 1)
            log = f"; in the log {self.logged[name].text}" if name in self.logged else ""
            found.append(
                f"growing   {name}: {counts['ids']:,} ids have a row; {counts['new']:,} came and {counts['evicted']:,} "
                f"went; {share:.1%} of the look-ups met an unknown id{log}"
            )
        return found

    def _disk_lines(self, disk_bytes: int) -> list[str]:
        """Say what lies on the disk, where something does."""
        on_disk = [each for each in self.tables if each.disk_bytes]
        if not on_disk:
            return []
        rows = sum(each.num_rows for each in on_disk)
        touched = sum(each.rows_touched for each in on_disk)
        held = sum(each.cache_bytes for each in on_disk)
        return [
            f"disk      {rows:,} rows of {len(on_disk)} tables, {size_text(disk_bytes)} once all were changed "
            f"({touched:,} rows touched in the sample); {size_text(held)} of memory hold rows, each in one place"
        ]

    def _host_lines(self) -> list[str]:
        """Say what lies on the host, where something does."""
        in_host = [each for each in self.tables if each.place is RowsPlace.HOST]
        if not in_host:
            return []
        rows = sum(each.num_rows for each in in_host)
        held = sum(each.cache_bytes for each in in_host)
        whole = sum(each.weight_bytes + each.state_bytes for each in in_host)
        return [
            f"host      {rows:,} rows of {len(in_host)} tables, {size_text(whole)} of the host's memory; "
            f"{size_text(held)} of the device hold rows, and {MAP_BYTES} bytes for each of all rows say where"
        ]

    def to_json(self) -> dict[str, object]:
        """Everything but the curves."""
        return {
            "tables": [to_json(each) for each in self.tables],
            "shared": [to_json(each) for each in self.shared],
            "num_samples": self.num_samples,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "measured_hits": self.measured,
            "growing": self.growing,
            "logged_unknown": {name: each.unknown_share for name, each in self.logged.items()},
            "logged_full": {name: each.full_share for name, each in self.logged.items()},
            "measured_held_hits": self.measured_held,
            "measured_device_hits": self.measured_device,
        }


def measured_hits(log: Path | None, *, name: str) -> float | None:
    """The mean of a share that a run's training log has, over the second half of it; None where it has none.

    Args:
        log: its metrics.jsonl.
        name: cache_hit_rate, of the rows of steps; disk_hit_rate, of those of lookups; device_hit_rate, of batches.
    """
    if log is None:
        return None
    timings = [each.get("timing", {}) for each in read_records(log) if each.get("kind") == "train"]
    rates = [each[name] for each in timings if name in each]
    # In the first half caches are still filling.
    return statistics.fmean(rates[len(rates) // 2 :]) if rates else None


def why_not_measured(log: Path | None, *, log_every: int) -> str:
    """Say why a training log has no rate.

    Args:
        log: its metrics.jsonl, where there may be one.
        log_every: steps between two lines of it.
    """
    steps = [each["step"] for each in read_records(log) if "step" in each] if log is not None else []
    if not steps:
        return "the run has no log"
    if max(steps) < log_every:
        return f"not in the log, which has a line every {log_every:,} steps, and the run has {max(steps):,}"
    return "not in the log"


def tables_report(
    config: RunConfig, touched: TouchedRows, *, names: Sequence[str] = (), log: Path | None = None
) -> TablesReport:
    """The report on a run's tables.

    Args:
        config: of the run.
        touched: rows of a sample of its training data.
        names: of the tables to report; () for all.
        log: the run's metrics.jsonl, where there may be one.

    Raises:
        ConfigError: no such table.
    """
    inputs = touched.inputs
    sizes = table_sizes(config, touched.inputs)
    unknown = sorted(set(names) - sizes.keys())
    if unknown:
        raise ConfigError(
            expected=f"tables of the run: {', '.join(sizes)}",
            found=", ".join(unknown),
            where="command line, --table",
            ways_out="correct the name",
        )
    # Tables that no feature looks up have no rows that are touched.
    used = {spec.table for spec in inputs.lookups}
    chosen = [name for name in (names or sizes) if name in used]
    # By bytes, so that what matters most stands first.
    chosen.sort(key=lambda name: -sizes[name].weight_bytes)
    curves = {name: miss_ratio_curve(touched.trace([name])) for name in chosen}
    tables = tuple(_use(config, [name], name=name, touched=touched, curve=curves[name]) for name in chosen)
    shared = []

    def kind(name: str) -> tuple[int, RowFormat, RowsPlace]:
        # Tables that are alike in these share a cache.
        return sizes[name].dim, sizes[name].row_format, _place(config, name)

    for each in dict.fromkeys(map(kind, chosen)):
        together = [name for name in chosen if kind(name) == each]
        if len(together) > 1:
            name = f"all of {each[0]} columns in {each[1].value}{WHERE[each[2]]}"
            curve = curves[name] = miss_ratio_curve(touched.trace(together))
            shared.append(_use(config, together, name=name, touched=touched, curve=curve))
    return TablesReport(
        tables=tables,
        shared=tuple(shared),
        num_samples=touched.num_samples,
        epochs=touched.epochs,
        batch_size=config.training.loader.batch_size,
        curves=curves,
        growing={name: counts for name, counts in touched.growing.items() if name in chosen},
        logged={} if log is None else logged_growth(log, limits=limits_of(inputs)),
        measured=measured_hits(log, name="cache_hit_rate"),
        measured_held=measured_hits(log, name="disk_hit_rate"),
        measured_device=measured_hits(log, name="device_hit_rate"),
        why_not_measured=why_not_measured(log, log_every=config.training.log_every),
    )


def table_sizes(config: RunConfig, inputs: InputSpec) -> dict[str, TableSize]:
    """Rows, columns, format and optimizer of each table."""
    columns = config.model.table_columns(inputs)
    return {
        table.name: TableSize(
            num_rows=table.num_rows,
            dim=columns[table.name],
            optimizer=config.model.embedding.optimizer,
            row_format=config.tables.format_of(table.name, dim=columns[table.name]),
        )
        for table in inputs.tables
    }


def cache_bytes(config: RunConfig, size: TableSize) -> int:
    """Return the bytes of the cached rows of a table, all of whose rows are as hot as those of other tables."""
    per_row, per_element = state_bytes(size.optimizer)
    # Rows are cached in FP32, whatever the table keeps them in.
    row_bytes = (4 + per_element) * size.dim + per_row
    return config.tables.cache_of(size.row_format).bytes_for(size.num_rows, row_bytes=row_bytes)


def _use(
    config: RunConfig, tables: Sequence[str], *, name: str, touched: TouchedRows, curve: MissRatioCurve
) -> TableUse:
    sizes = table_sizes(config, touched.inputs)
    formats = [sizes[each].row_format for each in tables]
    per_sample = [touched.per_sample(each) for each in tables]
    place = _place(config, tables[0])
    on_disk = place is RowsPlace.DISK
    own = config.tables.cache_of(formats[0]).share
    if place is not RowsPlace.MEMORY:
        own = held_share(config, sizes) if on_disk else share_on_device(config, sizes)
    # Rows on a disk take memory only while they are held, which `cache_bytes` counts.
    in_memory = () if on_disk else tables
    growing = (touched.inputs.table(each).growing for each in tables)
    return TableUse(
        name=name,
        num_rows=sum(sizes[each].num_rows for each in tables),
        dim=sizes[tables[0]].dim,
        row_format=formats[0].value,
        weight_bytes=sum(sizes[each].weight_bytes for each in in_memory),
        state_bytes=sum(sizes[each].state_bytes for each in in_memory),
        cache_bytes=sum(_held_bytes(config, sizes[each], place=place, share=own) for each in tables),
        map_bytes=sum(map_bytes(each) for each in growing if each is not None),
        disk_bytes=sum(bytes_on_disk(sizes[each]) for each in tables) if on_disk else 0,
        rows_touched=sum(touched.rows_touched(each) for each in tables),
        age_batches=float(np.median(np.concatenate([touched.ages(each) for each in tables]))),
        lookups_per_sample=sum(lookups for lookups, _ in per_sample),
        touches_per_sample=sum(touches for _, touches in per_sample),
        hits=tuple(CacheHits.at(curve, share) for share in SHARES),
        own_hits=CacheHits.at(curve, own, has_one_place=on_disk, whole_sets=not on_disk) if own else None,
        first_touches=curve.first_touches,
        place=place,
    )


def _place(config: RunConfig, name: str) -> RowsPlace:
    """Return the place where the rows of a table lie."""
    if config.tables.is_on_disk(name):
        return RowsPlace.DISK
    return RowsPlace.HOST if config.tables.is_in_host(name) else RowsPlace.MEMORY


def _held_bytes(config: RunConfig, size: TableSize, *, place: RowsPlace, share: float) -> int:
    """Return the bytes of rows that are held in front of where all of them lie, and of what says which they are."""
    match place:
        case RowsPlace.DISK:
            return int(share * held_bytes(size))
        case RowsPlace.HOST:
            return int(share * (size.weight_bytes + size.state_bytes)) + MAP_BYTES * size.num_rows
        case RowsPlace.MEMORY:
            return cache_bytes(config, size)
