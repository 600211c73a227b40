"""`ziggurat cluster probe`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ziggurat.cli.parser import add_verbose
from ziggurat.commands import pasted

if TYPE_CHECKING:
    from ziggurat.planning.costs.learned import Accuracy
    from ziggurat.planning.costs.measurements import DiskMeasurement
    from ziggurat.runs.planning.probe import ProbeResult

PROBE_SUMMARY = "measure this machine, or the job that torchrun started, and learn what plans cost on it"
PROBE_EPILOG = """Writes FILE (measurements) and beside it NAME.cost.json and NAME.cost.safetensors (the cost model).
Interrupted or called again, it goes on where it stopped. --disk measures a disk as tables on it use it; --cluster puts
that into a cluster's file, for ziggurat plan --tiers. Examples:
  ziggurat cluster probe --minutes 10
  ziggurat cluster probe --minutes 0 --disk /mnt/nvme --cluster cluster.toml
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
    parser.add_argument("--disk", metavar="FOLDER", default="", help="measure the disk that this folder lies on, too")
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        default="",
        help="cluster.toml that is to say what the disk gives; without such a file it is made, of this machine",
    )
    add_verbose(parser)


def probe(options: argparse.Namespace) -> int:
    """Measure, learn, and say what was found."""
    import dataclasses

    from ziggurat.errors import ConfigError
    from ziggurat.planning.costs.probe_tables import DrawConfig
    from ziggurat.runs.planning.probe import ProbeConfig
    from ziggurat.runs.planning.probe import probe as run_probe
    from ziggurat.training.report.progress import show_progress

    if options.cluster and not options.disk:
        raise ConfigError(
            expected="--disk FOLDER beside --cluster, which is told what that disk gives",
            found=f"--cluster {options.cluster} alone",
            where="command line, --cluster",
            ways_out=("--disk FOLDER", "leave --cluster out"),
        )
    draw = dataclasses.replace(DrawConfig(), num_samples=options.samples)
    config = ProbeConfig(minutes=options.minutes, draw=draw, disk=options.disk)
    result = run_probe(config, options.out, progress=show_progress(verbose=options.verbose))
    if result.is_first:
        _print(result, options.out)
        _save_cluster(result, options.cluster)
    return 0


def _save_cluster(result: ProbeResult, path: str) -> None:
    from ziggurat.cli.tables import print_line
    from ziggurat.runs.planning.disk_probe import save_with_disk

    found = result.measurements
    if path and found.disk is not None:
        save_with_disk(path, found.disk, ranks_per_host=found.ranks_per_host)
        print_line(f"{path}: plan with it: ziggurat plan RECIPE --cluster {pasted(path)} --tiers")


def _print(result: ProbeResult, out: str) -> None:
    from ziggurat.cli.tables import print_line, print_table
    from ziggurat.runs.planning.probe import cost_model_path

    found = result.measurements
    measured = [("machine", f"{found.machine}; {found.ranks} ranks, {found.ranks_per_host} a host")]
    if found.memory is not None:
        measured.append(("copying, one thread", f"{found.memory.copy_bytes_per_s / 1e9:.1f} GB/s"))
        measured.append(("rows of 256 bytes at random", f"{found.memory.gather_bytes_per_s / 1e9:.1f} GB/s"))
    if found.disk is not None:
        disk = found.disk
        measured.append((f"disk, rows of {disk.row_bytes} bytes", _disk_text(disk.read_rows_per_s, disk)))
        measured.append(("disk, rows replaced", _disk_text(disk.written_rows_per_s, disk)))
    for link in dict.fromkeys(each.link for each in found.links):
        mine = sorted((each for each in found.links if each.link == link), key=lambda each: each.num_bytes)
        rate = mine[-1].num_bytes / mine[-1].ms / 1e6
        value = f"{1e3 * mine[0].ms:.0f} µs for {mine[0].num_bytes} bytes, {rate:.2f} GB/s"
        measured.append((f"link, {link}", value))
    measured.append(
        ("groups of tables, exchanges", f"{len(found.lookups):,}, {len(found.exchanges):,} ({found.clock})")
    )
    print_table(("measured", "value"), measured)
    if result.cost_model is None:
        print_line("too few groups to learn from: run it again, it goes on")
        return
    card = result.cost_model.card
    lines = []
    rows: tuple[tuple[str, Accuracy | None], ...] = (
        ("lookup and update, groups of known tables", card.groups),
        ("lookup and update, tables never seen", card.tables),
        ("forward exchange", card.forward),
        ("backward exchange", card.backward),
    )
    for name, accuracy in rows:
        if accuracy is not None:
            numbers = (f"{accuracy.num_cases}", f"{100 * accuracy.mape:.1f} %", f"{accuracy.rank_correlation:.4f}")
            lines.append((name, *numbers))
    print_table(("cost model, on held-out cases", "cases", "MAPE", "rank correlation"), lines)
    print_line(f"{out}, {cost_model_path(out)}.json, .safetensors")


def _disk_text(rows_per_s: float, disk: DiskMeasurement) -> str:
    """Rows a second, with the bytes of their pages."""
    moved = rows_per_s * disk.moved_bytes / 1e9
    way = "past the page cache" if disk.is_direct else "pages dropped after use"
    return f"{rows_per_s:,.0f} rows/s at random, {moved:.3g} GB/s of pages, {way}"
