"""`ziggurat cluster probe`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ziggurat.planning.costs.learned import Accuracy
    from ziggurat.runs.probe import ProbeResult

PROBE_SUMMARY = "measure this machine, or the job that torchrun started, and learn what plans cost on it"
PROBE_EPILOG = """Writes FILE (measurements) and beside it NAME.cost.json and NAME.cost.safetensors (the cost model).
Interrupted or called again, it goes on where it stopped. Examples:
  ziggurat cluster probe --minutes 10
  torchrun --standalone --nproc-per-node 4 -m ziggurat cluster probe --out runs/four.json
"""


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ziggurat cluster probe`."""
    parser.add_argument(
        "--minutes", metavar="M", type=float, default=10.0, help="of measuring; 0 only learns (default: %(default)g)"
    )
    parser.add_argument("--out", metavar="FILE", default="runs/probe.json", help="default: %(default)s")
    parser.add_argument(
        "--samples",
        metavar="N",
        type=int,
        default=2048,
        help="samples of all ranks in a step: the cost model is for these (default: %(default)s)",
    )


def probe(options: argparse.Namespace) -> int:
    """Measure, learn, and say what was found."""
    import dataclasses

    from ziggurat.planning.costs.probe_tables import DrawConfig
    from ziggurat.runs.probe import ProbeConfig
    from ziggurat.runs.probe import probe as run_probe
    from ziggurat.training.progress import show_progress

    draw = dataclasses.replace(DrawConfig(), num_samples=options.samples)
    config = ProbeConfig(minutes=options.minutes, draw=draw)
    result = run_probe(config, options.out, progress=show_progress())
    if result.is_first:
        _print(result, options.out)
    return 0


def _print(result: ProbeResult, out: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ziggurat.runs.probe import cost_model_path

    console, found = Console(), result.measurements
    table = Table("measured", "value", box=box.SIMPLE)
    table.add_row("machine", f"{found.machine}; {found.ranks} ranks, {found.ranks_a_host} a host")
    if found.memory is not None:
        table.add_row("copying, one thread", f"{found.memory.copy_bytes_per_s / 1e9:.1f} GB/s")
        table.add_row("rows of 256 bytes at random", f"{found.memory.gather_bytes_per_s / 1e9:.1f} GB/s")
    for link in dict.fromkeys(each.link for each in found.links):
        mine = sorted((each for each in found.links if each.link == link), key=lambda each: each.num_bytes)
        rate = mine[-1].num_bytes / mine[-1].ms / 1e6
        table.add_row(f"link, {link}", f"{1e3 * mine[0].ms:.0f} µs for {mine[0].num_bytes} bytes, {rate:.2f} GB/s")
    table.add_row("groups of tables, exchanges", f"{len(found.lookups):,}, {len(found.exchanges):,} ({found.clock})")
    console.print(table, markup=False)
    if result.judge is None:
        console.print("too few groups to learn from: run it again, it goes on", markup=False)
        return
    card = result.judge.card
    table = Table("cost model, on held-out cases", "cases", "MAPE", "rank correlation", box=box.SIMPLE)
    rows: tuple[tuple[str, Accuracy | None], ...] = (
        ("lookup and update, groups of known tables", card.groups),
        ("lookup and update, tables never seen", card.tables),
        ("forward exchange", card.forward),
        ("backward exchange", card.backward),
    )
    for name, accuracy in rows:
        if accuracy is not None:
            numbers = (f"{accuracy.num_cases}", f"{100 * accuracy.mape:.1f} %", f"{accuracy.rank_correlation:.4f}")
            table.add_row(name, *numbers)
    console.print(table, markup=False)
    console.print(f"{out}, {cost_model_path(out)}.json, .safetensors", soft_wrap=True, markup=False)
