"""`ziggurat plan` and `ziggurat simulate`: their arguments, and what they print."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, model_words, own_models
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Takes, Verb

if TYPE_CHECKING:
    from ziggurat.recipes.run_config import RunConfig
    from ziggurat.runs.planning.plan_run import PlannedRun, PlanRequest

PLAN_SUMMARY = "place a model's tables on a cluster, explain each place, and predict the step; needs no GPU, no ranks"
PLAN_EPILOG = """The cluster is a name (h100x64: 64 devices, 8 a host; a100xN, v100xN, local) or a file;
`ziggurat cluster show h100x64` prints its constants. Settings of the run count: --training.loader.batch-size (of a
rank), --parallel.wire.between-towers, --model.embedding-dim … Examples:
  ziggurat plan movielens_dlrm --cluster h100x64
  ziggurat plan mlperf_dlrm --cluster h100x16 --compare
  ziggurat plan mlperf_dlrm --cluster h100x8 --memory-limit 8GiB
  ziggurat plan mlperf_dlrm --cluster h100x64 --memory-limit 2GiB --tiers
  ziggurat plan mlperf_dlrm --cluster cluster.toml --towers towers.json --save plan.json
  torchrun --nproc-per-node 8 -m ziggurat train mlperf_dlrm --plan plan.json
"""
SIMULATE_SUMMARY = "predict the step of a model, flat and with towers, as its cluster grows"
SIMULATE_EPILOG = """Braces count hosts of 8 devices, doubled from the first to the last. Examples:
  ziggurat simulate mlperf_dcn_v2 --cluster 'a100x{2..128}' --plot growth.png
  ziggurat simulate mlperf_dlrm --cluster h100x64 h100x512 --compression 4
"""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ziggurat plan`."""
    _add_shared(parser)
    parser.add_argument("--cluster", metavar="NAME", required=True, help="h100x64, local, cluster.toml …")
    parser.add_argument("--towers", metavar="FILE", help="towers.json: towers and tables are planned together")
    parser.add_argument("--compare", action="store_true", help="against every baseline")
    parser.add_argument(
        "--costs",
        metavar="FILE",
        default="",
        help="prices of tables, learned by `ziggurat cluster probe`",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="BYTES",
        default="",
        help="what tables with their optimizer state may take on a device (20GiB): chooses the format of each table",
    )
    parser.add_argument(
        "--tiers",
        action="store_true",
        help="in place of a plan: machines needed with memory of hosts and disks below that of devices, and without",
    )
    add_output(parser, "--save", metavar="FILE", help="write plan.json, for ziggurat train --plan")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ziggurat simulate`."""
    _add_shared(parser)
    parser.add_argument("--cluster", metavar="NAME", required=True, nargs="+", help="names, or a range a100x{2..128}")
    parser.add_argument("--towers", metavar="FILE", help="towers.json (default: neighbours, a block a host)")
    add_output(parser, "--plot", metavar="FILE", help="write stacked bars there (.png or .svg)")


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="recipe", help="a recipe, a config.json, or the folder of a run")
    parser.add_argument("--schema", metavar="FILE", help="schema (TOML) for the recipes table_*")
    parser.add_argument("--compression", metavar="X", help="short for --model.tower-module.compression")
    add_model_argument(parser, about="config class of a model of your own, in the place of the recipe's model")
    parser.add_argument(
        "--rows", metavar="TABLE=N", action="append", default=[], help="ids of a table, where no data says it"
    )
    parser.add_argument(
        "--list-length", metavar="FEATURE=X", action="append", default=[], help="mean ids a sample of a list"
    )
    parser.add_argument("--budget-s", metavar="S", type=float, default=3.0, help="of a search (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the search (default: %(default)s)")


def plan(options: argparse.Namespace, rest: list[str]) -> int:
    """Plan a run for a cluster, print the report, and save what was asked for."""
    from ziggurat.planning.cluster.catalogue import find_cluster
    from ziggurat.planning.plan_report import PlanReport
    from ziggurat.runs.planning.plan_run import plan_run

    config = _config(options, rest)
    request = dataclasses.replace(_request(options), costs=options.costs, memory_limit=options.memory_limit)
    if options.tiers:
        return _machines(config, options, request)
    found = plan_run(config, find_cluster(options.cluster), request=request)
    report = PlanReport(found.planned)
    _print_rows(report.table())
    for line in (*report.lines(), *_flat_lines(found), *(f"note      {note}" for note in found.notes)):
        print_line(line)
    _print_formats(found)
    if not found.planned.settled:
        print_line(
            "search    cut short: tables still gained by moving when its time was over; give it more: --budget-s "
            f"{4 * options.budget_s:g}"
        )
    if options.compare:
        from ziggurat.planning.plan_comparison import compare_plans

        _print_rows(compare_plans(found.planned, seed=options.seed))
    if options.save:
        found.planned.plan.save(options.save)
        ranks = found.planned.plan.world_size
        words = [*rest, *_table_words(found)]
        print_line(f"plan      {options.save}, to be executed by {ranks} ranks: {train_command(options, words)}")
    return 0


def _machines(config: RunConfig, options: argparse.Namespace, request: PlanRequest) -> int:
    """Print what numbers of machines do with tiers below memory of devices."""
    from ziggurat.errors import ConfigError
    from ziggurat.planning.cluster.catalogue import find_cluster
    from ziggurat.runs.planning.machines import COLUMNS, machines_report

    given = {"--save": options.save, "--compare": options.compare, "--costs": options.costs}
    without = [flag for flag, value in given.items() if value]
    if without:
        raise ConfigError(
            expected="--tiers, which makes no plan, or what belongs to one",
            found=f"--tiers and {', '.join(without)}",
            where="command line, --tiers",
            ways_out=("leave --tiers out", f"leave {', '.join(without)} out"),
        )
    report = machines_report(config, find_cluster(options.cluster), request=request)
    print_table(COLUMNS, report.rows())
    for line in report.lines():
        print_line(line)
    return 0


def _print_formats(found: PlannedRun) -> None:
    """Formats that a limit of memory chose, why, and what their prediction leaves out."""
    if not found.formats:
        return
    for name, line in found.formats.items():
        print_line(f"formats   {name}: {line}")
    print_line(
        "note      formats alone are chosen, for what all devices hold together: no rows are cached, or lie in the "
        "memory of the host or on a disk (--tiers says what those would do), and that rows in few bits are decoded is "
        "not in the predicted step"
    )


def _table_words(found: PlannedRun) -> list[str]:
    """Return the words that give tables the formats that a limit of memory chose."""
    if not found.formats:
        return []
    formats = found.planned.model.tables.by_table
    return ["--tables.by-table", ",".join(f"{name}={each.value}" for name, each in formats.items())]


def train_command(options: argparse.Namespace, rest: Sequence[str]) -> str:
    """Return the command that trains the planned run: the same recipe or config, with the same settings."""
    words = ["ziggurat", "train"]
    if Path(options.run).is_dir():
        words += ["--config", str(Path(options.run) / "config.json")]
    else:
        words += ["--config", options.run] if options.run.endswith(".json") else [options.run]
    given = {"--schema": options.schema, "--towers": options.towers, "--compression": options.compression}
    words += [word for flag, value in given.items() if value for word in (flag, value)]
    return f"torchrun … -m {shlex.join([*words, *model_words(options), *rest, '--plan', options.save])}"


def simulate(options: argparse.Namespace, rest: list[str]) -> int:
    """Steps as the cluster grows, as a table and a plot."""
    from ziggurat.runs.planning.cluster_range import clusters_named
    from ziggurat.runs.planning.plan_run import simulate_run
    from ziggurat.runs.planning.simulation_report import CUT_SHORT, plot_simulation, simulation_table

    config = _config(options, rest, needs_towers=False)
    steps = list(simulate_run(config, clusters_named(options.cluster), request=_request(options)))
    _print_rows(simulation_table(steps))
    for step in steps:
        if step.timeline is None:
            print_line(f"{step.cluster.world_size} devices, {step.kind}: does not fit: {step.note}")
    print_line(
        f"note: each step is of the best plan that searches of {options.budget_s:g} s found, not of a proven optimum; "
        "apart: by how many ms two of them differ. Steps that differ by less than their searches do, or whose search "
        f"was {CUT_SHORT}, are called no gain. A longer --budget-s, or another --seed, tells."
    )
    if any(not step.settled for step in steps):
        print_line(
            f"note: {CUT_SHORT}: the time was over while tables still gained by moving; the step may be shorter. "
            f"Give it more: --budget-s {4 * options.budget_s:g}"
        )
    if options.plot:
        plot_simulation(steps, Path(options.plot), title=options.run)
        print_line(f"plot {options.plot}")
    return 0


def _config(options: argparse.Namespace, rest: list[str], *, needs_towers: bool = True) -> RunConfig:
    """The run that the command line names, with its settings and towers."""
    from ziggurat.cli.settings import apply_settings, settings_given
    from ziggurat.config import override
    from ziggurat.plan import Towers
    from ziggurat.recipes.catalogue import recipe_named
    from ziggurat.recipes.run_config import load_config, with_model

    schema = None
    if options.schema:
        from ziggurat.features.schema_io import read_schema

        schema = read_schema(options.schema)
    is_file = Path(options.run).is_dir() or options.run.endswith(".json")
    models = own_models(options)
    config = load_config(options.run, models=models) if is_file else recipe_named(options.run, schema=schema)
    config = apply_settings(with_model(config, models), settings_given(rest))
    if options.towers:
        config = dataclasses.replace(config, towers=Towers.load(options.towers))
    if options.compression is not None:
        if config.towers is None and needs_towers:
            raise _no_towers()
        config = override(config, {"model.tower-module.compression": options.compression})
    return config


def _request(options: argparse.Namespace) -> PlanRequest:
    from ziggurat.runs.planning.plan_run import PlanRequest

    return PlanRequest(
        budget_s=options.budget_s,
        seed=options.seed,
        rows={name: int(value) for name, value in _pairs(options.rows, flag="--rows")},
        list_lengths=dict(_pairs(options.list_length, flag="--list-length")),
        folder=Path(options.run) if Path(options.run).is_dir() else None,
    )


def _pairs(words: Sequence[str], *, flag: str) -> Iterable[tuple[str, float]]:
    from ziggurat.errors import ConfigError

    for word in words:
        name, equals, value = word.partition("=")
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            number = 0.0
        if not equals or number <= 0:
            raise ConfigError(
                expected=f"{flag} NAME=NUMBER, above 0", found=repr(word), where="command line", ways_out="correct it"
            )
        yield name, number


def _no_towers() -> Exception:
    from ziggurat.errors import ConfigError

    return ConfigError(
        expected="towers to compress",
        found="none",
        where="command line, --compression",
        ways_out=("add --towers FILE", "leave --compression out"),
    )


def _flat_lines(found: PlannedRun) -> list[str]:
    """Describe what the same model without towers would do."""
    planned = found.planned
    flat = found.flat
    if planned.plan.towers is None:
        return []
    if flat is None:
        return ["flat      without towers the model does not fit"]
    step_ms = 1e3 * planned.timeline.step_s
    flat_ms = 1e3 * flat.timeline.step_s
    sizes = planned.sizes_tried
    none_gains = "slower: no tower size that was tried gains here" if len(sizes) > 1 else "slower: they do not pay here"
    verdict = "faster" if step_ms < flat_ms else none_gains
    lines = [f"flat      {flat_ms:.2f} ms without towers; with them {flat_ms / step_ms:.2f} times as fast ({verdict})"]
    if len(sizes) > 1:
        shown = ", ".join(each.describe() for each in sizes)
        chosen = f"{planned.plan.ranks_per_group} ranks is chosen, the shortest"
        lines.append(f"sizes     steps with tower groups of {shown}; {chosen}")
    return lines


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    """A table whose first row is its heading."""
    print_table(rows[0], rows[1:])


PLAN = Verb(
    name="plan",
    summary=PLAN_SUMMARY,
    epilog=PLAN_EPILOG,
    add_arguments=add_plan_arguments,
    run=plan,
    takes=Takes.WORDS,
)

SIMULATE = Verb(
    name="simulate",
    summary=SIMULATE_SUMMARY,
    epilog=SIMULATE_EPILOG,
    add_arguments=add_simulate_arguments,
    run=simulate,
    takes=Takes.WORDS,
)
