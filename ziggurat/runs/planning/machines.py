"""The machines that a run needs, with tiers of memory below its devices and without: `ziggurat plan --tiers`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ziggurat.ops.machine.memory import size_of_text, size_text
from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.planning.plan_model import ModelToPlace, PlanSettings, memory_ledger, plan_model
from ziggurat.planning.tiers.machines import ZIPF, TieredStep, Tiers, UsedTable, fewest_hosts, tiered_steps
from ziggurat.planning.tiers.miss_ratio import miss_ratio_curve
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.planning.plan_inputs import plan_inputs, prepared_data
from ziggurat.runs.planning.plan_run import PlanRequest, model_to_place, plan_settings
from ziggurat.runs.tables.touched_rows import touched_rows

COLUMNS = ("hosts", "rows lie in", "devices hold", "hosts hold", "rows a sample of", "step", "samples/s")
_EQUAL = 1.1  # steps that differ by less count as equal
_SAMPLES = 200_000
_ROOMY = 1 << 42
_BUDGETS = (1, 4)  # times of the search, until no table gains by moving alone


@dataclass(frozen=True, kw_only=True)
class MachinesReport:
    """Steps of numbers of hosts, by tiers, and what they rest on.

    Args:
        steps: see `tiered_steps`.
        cluster: whose machines.
        table_bytes: of all tables.
        room_bytes: of a device, for tables.
        notes: in words.
    """

    steps: tuple[TieredStep, ...]
    cluster: Cluster
    table_bytes: int
    room_bytes: int
    notes: tuple[str, ...]

    def rows(self) -> list[tuple[str, ...]]:
        """The lines of the table, as `COLUMNS` name them."""
        return [_cells(each) for each in self.steps]

    def lines(self) -> Iterator[str]:
        """The answer: machines with the disk and without, at an equal step."""
        yield (
            f"tables    {size_text(self.table_bytes)} with optimizer state; a device has room for "
            f"{size_text(self.room_bytes)}, a host for {size_text(self.cluster.below.memory_bytes)}, its disks for "
            f"{size_text(self.cluster.below.disk_bytes)}"
        )
        alone = next((each for each in self.steps if each.tiers is Tiers.DEVICES and each.fits), None)
        if alone is None:
            yield "machines  memory of devices alone holds the tables on no number of hosts that a cluster may have"
        else:
            yield f"machines  {_hosts(alone)} with memory of devices alone: {1e3 * alone.step_s:.2f} ms a step"
        for tiers in dict.fromkeys(each.tiers for each in self.steps if each.tiers is not Tiers.DEVICES):
            least = next((each for each in self.steps if each.tiers is tiers and each.fits), None)
            most_s = _EQUAL * alone.step_s if alone is not None else float("inf")
            equal = fewest_hosts(self.steps, tiers, most_s=most_s)
            found = "none" if equal is None else f"{_hosts(equal)} ({1e3 * equal.step_s:.2f} ms)"
            fewest = (
                "" if least is None else f"; the fewest that hold them: {least.hosts} ({1e3 * least.step_s:.2f} ms)"
            )
            yield f"machines  with {tiers.value}, at a step within {_EQUAL - 1:.0%} of that: {found}{fewest}"
        yield from (f"note      {note}" for note in self.notes)


def machines_report(config: RunConfig, cluster: Cluster, *, request: PlanRequest) -> MachinesReport:
    """Report how different numbers of machines perform with each set of tiers.

    Args:
        config: of the run.
        cluster: whose machines, and the most hosts to be shown.
        request: sizes that the user knows better, the limit of memory for tables on a device.

    Raises:
        ConfigError: sizes that nobody knows.
        PlanError: there is nothing to place.
    """
    config.check()
    data = plan_inputs(config, folder=request.folder, rows=request.rows, list_lengths=request.list_lengths)
    model = model_to_place(config, data)
    base = _BaseSteps(model, plan_settings(config, cluster, request))
    prepared = prepared_data(config)
    curves = {}
    if prepared is not None:
        touched = touched_rows(prepared.train, loader=config.training.loader, samples=_SAMPLES)
        known = {table.name for table in touched.inputs.tables if table.num_rows}
        curves = {name: miss_ratio_curve(touched.trace([name])) for name in known}
    tables = [UsedTable(profile=each, curve=curves.get(each.name)) for each in model.work.tables]
    room = max(0, cluster.device.memory_bytes - memory_ledger(model.work, cluster).total)
    if request.memory_limit:
        room = min(room, size_of_text(request.memory_limit, where="--memory-limit"))
    batch_size = config.training.loader.batch_size
    steps = tiered_steps(tables, cluster, batch_size=batch_size, room_bytes=room, step_s=base.step_s)
    source = (
        f"misses follow from {_SAMPLES:,} samples of the prepared data"
        if curves
        else f"no data is prepared here: ids are taken to follow Zipf's law with exponent {ZIPF}"
    )
    return MachinesReport(
        steps=tuple(steps),
        cluster=cluster,
        table_bytes=sum(table.num_bytes for table in tables),
        room_bytes=room,
        notes=(
            *data.notes,
            source,
            *base.notes(),
            "every tier holds the same share of each table, tables may be cut anywhere, and nothing hides behind "
            "computing; devices that hold the hot rows of their hosts are a prediction: ranks here train tables in "
            "their own memory, or on disks (--tables.disk)",
        ),
    )


class _BaseSteps:
    """Steps of clusters whose devices have room for all tables.

    More devices are more places for a table, so a search that is long enough for four hosts may be cut short on eight,
    whose step then looks longer than it is. Such a search is repeated with more time.

    Args:
        model: to be planned.
        settings: with the time of the first search.
    """

    def __init__(self, model: ModelToPlace, settings: PlanSettings) -> None:
        self._model = model
        self._settings = settings
        tables = sum(each.bytes_of(num_rows=each.num_rows, dim=each.dim) for each in model.work.tables)
        self._plenty = max(_ROOMY, 8 * tables)
        self._cut_short: list[int] = []

    def step_s(self, cluster: Cluster) -> float:
        """The shortest that searches found."""
        # So much memory is no figure of any source.
        roomy = replace(cluster, device=replace(cluster.device, memory_bytes=self._plenty), sources=())
        found = []
        # A search that its time cut short is made again with more of it, until one settles.
        for longer in _BUDGETS:
            settings = replace(self._settings, budget_s=longer * self._settings.budget_s)
            planned = plan_model(self._model, roomy, settings=settings)
            found.append(planned.timeline.step_s)
            if planned.settled:
                break
        else:
            self._cut_short.append(cluster.hosts)
        return min(found)

    def notes(self) -> list[str]:
        """List in words what the steps rest on."""
        same = (
            "a device has as many samples whatever the number of hosts, so that a step of more hosts may be longer, "
            "when more of what it exchanges goes between hosts: compare samples/s"
        )
        if not self._cut_short:
            return [same]
        hosts = ", ".join(map(str, self._cut_short))
        budget_s = _BUDGETS[-1] * self._settings.budget_s
        short = f"of {hosts} hosts: the searches were cut short, and the step may be shorter; more time: --budget-s"
        return [same, f"{short} {budget_s:g}"]


def _hosts(step: TieredStep) -> str:
    return f"{step.hosts} host{'s' if step.hosts > 1 else ''}"


def _cells(step: TieredStep) -> tuple[str, ...]:
    if not step.fits:
        return (str(step.hosts), step.tiers.value, f"{step.device_share:.1%}", "", "", "does not fit", "")
    read = [f"{step.host_rows:.3g} hosts"] if step.tiers is not Tiers.DEVICES else []
    read += [f"{step.disk_rows:.3g} disk"] if step.tiers is Tiers.DISKS else []
    return (
        str(step.hosts),
        step.tiers.value,
        f"{step.device_share:.1%}",
        f"{step.host_share:.1%}" if step.tiers is not Tiers.DEVICES else "",
        ", ".join(read),
        f"{1e3 * step.step_s:.2f} ms",
        f"{step.samples_per_s:,.0f}",
    )
