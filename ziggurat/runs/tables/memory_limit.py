"""Formats for the tables of a run, so that they fit `tables.memory_limit`: chosen before the first step, and said why.

    sizes, lookups, hits of caches ──► TierProblem ──► choose_rungs ──► tables.by_table and tables.cache
    rows a second of --tables.disk,       │                       └──► tables.in_memory and tables.memory,
    bytes a second to the device   ───────┘                            or tables.device_memory

The run's config then names the format and the place of every table, so that it repeats, and goes on, without choosing
again: what a disk or a link gives is another figure each time. The choice is in `planning/tiers`; how it weighs time
against rounding is in `planning/tiers/rungs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ziggurat.data.encoded.loader import Dataset
from ziggurat.embeddings.tables_config import AUTO, TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.ops.growing.state import map_bytes
from ziggurat.ops.machine.matmul_rate import link_bytes_per_s
from ziggurat.ops.machine.memory import size_of_text, size_text, unit_missing
from ziggurat.ops.row_file import disk_rate
from ziggurat.parallel.device import choose_device
from ziggurat.planning.simulator.step_work import state_bytes
from ziggurat.planning.tiers.choice import Choice, TierProblem, choose_rungs
from ziggurat.planning.tiers.miss_ratio import miss_ratio_curve
from ziggurat.planning.tiers.rungs import HostLink, Place, Rung, TieredTable
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.tables.touched_rows import touched_rows

SETTING = "--tables.memory-limit"
_SHOWN = 12
_SAMPLES = 200_000  # whose touched rows say what caches hit
_SHARES = (0.0, 0.01, 0.05, 0.1, 0.2)  # of rows in a cache, where the settings name none
_HELD_SHARES = (0.0, 0.01, 0.05, 0.2, 0.5)  # of rows on a disk; what is left of the limit then holds more
_FP32 = Rung()


def with_rungs(
    config: RunConfig, dataset: Dataset, *, list_lengths: Mapping[str, float], num_ranks: int = 1
) -> tuple[RunConfig, dict[str, str]]:
    """The config with a format for every table, and lines for the start-up report; as it is without a limit.

    Args:
        config: of the run.
        dataset: the training rows. A sample of them is read if tables do not fit in FP32, to see what caches hit.
        list_lengths: mean rows a sample, of features that are lists.
        num_ranks: of the job.

    Raises:
        ConfigError: nothing fits the limit; the optimizer has dense gradients; or there are several ranks, and a limit
            or tables on the host.
    """
    limit = config.tables.memory_limit
    if config.tables.device_memory and num_ranks > 1:
        raise ConfigError(
            expected="one process: on ranks nobody tells the host which rows to send to its device",
            found=f"{num_ranks} ranks",
            where="--tables.device-memory",
            ways_out=("leave --tables.device-memory out: each rank holds its part of the rows", "train on one GPU"),
        )
    if not limit:
        return config, {}
    if num_ranks > 1:
        raise ConfigError(
            expected="one process, whose tables fit the limit",
            found=f"{num_ranks} ranks, whose parts of tables the plan decides",
            where=SETTING,
            ways_out=(
                "let the plan choose: `ziggurat plan RECIPE --cluster FILE --memory-limit 4GiB` names the format of "
                "every table, to be given as --tables.by-table",
                f"leave {SETTING} out",
            ),
        )
    limit_bytes = size_of_text(limit, where=SETTING)
    problem = tier_problem(config, dataset.inputs, list_lengths=list_lengths, limit_bytes=limit_bytes)
    # A sample of the rows takes time to read: only where something has to be chosen by it.
    if config.tables.cache or sum(table.num_bytes(_FP32) for table in problem.tables) > limit_bytes:
        problem = _with_tiers(problem, config, dataset)
    choice = choose_rungs(problem, way_out=unit_missing(limit, setting=SETTING))
    formats = {name: rung.row_format for name, rung in choice.rungs.items()}
    tables = replace(config.tables, by_table=formats, cache=choice.cache_share)
    if tables.disk or tables.device_memory:
        below = {name for name, rung in choice.rungs.items() if rung.is_below}
        exact = tuple(name for name, each in formats.items() if each.is_plain and name not in below)
        held = f"{choice.held_bytes}B" if below else ""
        if tables.disk:
            tables = replace(tables, in_memory=exact, memory=held or TablesConfig.memory)
        else:
            tables = replace(tables, in_memory=exact if below else (), device_memory=held)
    return replace(config, tables=tables), rung_lines(problem, choice)


def _with_tiers(problem: TierProblem, config: RunConfig, dataset: Dataset) -> TierProblem:
    """The problem with caches of hot rows, of the share that the settings name or one of several; with disk or host."""
    touched = touched_rows(dataset, loader=config.training.loader, samples=_SAMPLES)
    tables = tuple(replace(table, curve=miss_ratio_curve(touched.trace([table.name]))) for table in problem.tables)
    shares = (config.tables.cache,) if config.tables.cache else _SHARES
    folder = config.tables.disk
    if not folder and not config.tables.device_memory:
        return replace(problem, tables=tables, cache_shares=shares)
    is_chosen = all(table.fixed is not None for table in tables)
    if not is_chosen:
        _refuse_two_sizes(config.tables)
    link = None if folder else HostLink(bytes_per_s=link_bytes_per_s(choose_device(config.device).device))

    def with_below(table: TieredTable) -> TieredTable:
        is_below = config.tables.is_on_disk(table.name) or config.tables.is_in_host(table.name)
        here = Place.BELOW if is_below else Place.MEMORY
        place = here if is_chosen or table.name in config.tables.in_memory else Place.ANYWHERE
        # A rate for each table, since rows of other widths take other time.
        rate = disk_rate(folder, payload_bytes=table.row_bytes) if folder else None
        return replace(table, disk=rate, link=link, place=place)

    return replace(problem, tables=tuple(map(with_below, tables)), cache_shares=shares, held_shares=_HELD_SHARES)


def _refuse_two_sizes(tables: TablesConfig) -> None:
    """Refuse a size for rows that are held beside the limit, which says it.

    Raises:
        ConfigError: for those of a disk, or of the host.
    """
    setting = "--tables.memory"
    given = tables.memory
    unsaid = TablesConfig.memory
    way = "leave --tables.memory out"
    if not tables.disk:
        setting = "--tables.device-memory"
        given = tables.device_memory
        unsaid = AUTO
        way = f"--tables.device-memory {AUTO}"
    if given != unsaid:
        place = "disk" if tables.disk else "host"
        raise ConfigError(
            expected=f"{SETTING}, which says how many rows of the {place} are held, or {setting}",
            found=f"{SETTING} {tables.memory_limit} and {setting} {given}",
            where=setting.removeprefix("--"),
            ways_out=(way, f"leave {SETTING} out: then all tables in fp32 lie on the {place}"),
        )


def tier_problem(
    config: RunConfig, inputs: InputSpec, *, list_lengths: Mapping[str, float], limit_bytes: int
) -> TierProblem:
    """Return the input of the choice: the tables of a model, with the formats that the settings allow.

    Args:
        config: of the run; formats that it names stay, and `tables.weights` is the highest of the others.
        inputs: with the rows of each table.
        list_lengths: mean rows a sample, of features that are lists.
        limit_bytes: for all tables together.

    Raises:
        ConfigError: the optimizer has dense gradients, so that no table can be in fewer bits.
    """
    embedding = config.model.embedding
    columns = config.model.table_columns(inputs)
    config.tables.check(embedding, tables=columns)
    limit = SETTING if config.tables.memory_limit else "--memory-limit"  # of a run, or of a plan
    TablesConfig.check_touched_rows(embedding, setting=limit.removeprefix("--"))
    per_row, per_element = state_bytes(embedding.optimizer)
    tables = tuple(
        TieredTable(
            name=table.name,
            num_rows=table.num_rows,
            dim=columns[table.name],
            state_bytes=per_row + columns[table.name] * per_element,
            lookups=sum(list_lengths.get(spec.name, 1.0) for spec in inputs.lookups if spec.table == table.name),
            fixed=config.tables.by_table.get(table.name),
            policy=config.tables.cache_policy,
            map_bytes=0 if table.growing is None else map_bytes(table.growing),
        )
        for table in inputs.tables
    )
    highest = config.tables.weights.without_beside
    return TierProblem(tables=tables, limit_bytes=limit_bytes, formats=(highest, *highest.less_precise()))


def rung_lines(problem: TierProblem, choice: Choice) -> dict[str, str]:
    """Say what was chosen and why, for people: the tables that leave FP32, those that save most first."""
    whole = sum(table.num_bytes(_FP32) for table in problem.tables)
    limit = size_text(choice.limit_bytes)
    together = ""
    if problem.devices:
        limit = (
            f"{size_text(choice.limit_bytes / problem.devices)} on each of {problem.devices} devices, {limit} together"
        )
        together = " on all of them"
    lines = {
        "limit": f"{limit}; tables take {size_text(choice.num_bytes)}{together} with their optimizer state, "
        f"{size_text(whole)} in FP32",
    }
    if whole <= choice.limit_bytes and all(rung == _FP32 for rung in choice.rungs.values()):
        return lines | {"why": "all tables fit in FP32, which is exact"}
    lines["why"] = (
        f"the formats that fit at the least predicted cost: lookups and updates take {choice.time_ratio:.2f} times as "
        "long as in FP32, and rounding falls on tables that are looked up least for their bytes"
    )
    if choice.held_bytes:
        in_host = any(rung.is_in_host for rung in choice.rungs.values())
        lines["host" if in_host else "disk"] = _below_line(problem, choice)
    saved = {table: table.num_bytes(_FP32) - table.num_bytes(choice.rungs[table.name]) for table in problem.tables}
    lower = sorted((table for table in problem.tables if saved[table]), key=lambda table: -saved[table])
    for table in lower[:_SHOWN]:
        asked = ", as --tables.by-table asks" if table.fixed is not None else ""
        rung = choice.rungs[table.name]
        hits = f", {1 - table.misses(rung):.0%} of the rows of a step in the cache" if rung.cache_share else ""
        place = "host" if rung.is_in_host else "disk"
        hits += f", {table.rows_below(rung):.3g} of them from the {place}" if rung.is_below else ""
        lines[table.name] = (
            f"{rung.text}{asked}: {size_text(table.num_bytes(rung))}, in FP32 "
            f"{size_text(table.num_bytes(_FP32))}; {table.num_rows:,} rows × {table.dim}, {table.lookups:.3g} lookups "
            f"a sample{hits}"
        )
    rest = lower[_SHOWN:]
    if rest:
        formats = {choice.rungs[table.name].text for table in rest}
        lines[f"{len(rest)} more"] = f"{', '.join(sorted(formats))}: save {size_text(sum(saved[t] for t in rest))}"
    kept = [table for table in problem.tables if not saved[table]]
    if kept:
        lines[f"{len(kept)} in FP32"] = size_text(sum(table.num_bytes(_FP32) for table in kept))
    return lines


def _below_line(problem: TierProblem, choice: Choice) -> str:
    """Say what lies on the disk or the host, and the rate of samples that this allows."""
    tables = [table for table in problem.tables if choice.rungs[table.name].is_below]
    pace = f"{1 / choice.below_s:,.0f} samples/s at most" if choice.below_s else "no limit"
    missed = sum(table.rows_below(choice.rungs[table.name]) for table in tables)
    begin = f"{len(tables)} of {len(problem.tables)} tables, exact: {size_text(choice.held_bytes)} of rows held, "
    link = tables[0].link
    if link is not None:
        whole = sum(table.num_rows * table.row_bytes for table in tables)
        return (
            f"{begin}{size_text(whole)} of the host's memory; a sample sends and takes back {missed:.3g} rows, which "
            f"this way allows for {pace} ({link.text()})"
        )
    rates = [table.disk for table in tables if table.disk is not None]
    slowest = min(rates, key=lambda rate: rate.read_rows_per_s, default=None)
    on_disk = sum(table.disk_bytes for table in tables)
    return (
        f"{begin}up to {size_text(on_disk)} of disk; a sample reads and writes {missed:.3g} rows, which this disk "
        f"allows for {pace}" + (f" ({slowest.text()})" if slowest is not None else "")
    )
