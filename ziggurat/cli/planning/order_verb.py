"""`ziggurat cluster order`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ziggurat.cli.outputs import add_output
from ziggurat.cli.parser import add_verbose
from ziggurat.commands import pasted
from ziggurat.errors import ConfigError

if TYPE_CHECKING:
    from ziggurat.planning.rank_order.levels import Level
    from ziggurat.planning.rank_order.rank_order import OrderNow, RankOrder

ORDER_SUMMARY = "find hosts, racks and a good order of ranks of the job that torchrun started, by measuring all pairs"
ORDER_EPILOG = """Writes FILE (json), and beside it times of all pairs (.csv) and a picture (.png: heat maps, tree).
Use it in the same job, without a relaunch: torchrun … -m ziggurat train … --rank-order FILE. --again measures anew and
compares with FILE: an order that is still good stays. Examples, each after torchrun --nnodes 4 --nproc-per-node 8 … -m:
  ziggurat cluster order --out order.json
  ziggurat cluster order --out order.json --again
  ziggurat cluster order --hostfile hosts.txt
"""
HOSTFILE_FORMS = ("mpi", "ports")
_MAX_SHOWN = 32
_NO_END = 1e6  # MiB or days


def add_order_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `ziggurat cluster order`."""
    add_output(parser, "--out", metavar="FILE", suffix=".json", default="order.json", help="default: %(default)s")
    parser.add_argument(
        "--for",
        dest="algorithm",
        metavar="COLLECTIVE",
        default="",
        help="ring, halving_doubling, tree, double_tree, or one of your own "
        "(default: ring, as gloo and NCCL sum large buffers)",
    )
    parser.add_argument(
        "--mib", metavar="M", type=float, default=None, help="of the buffer of every rank (default: 16)"
    )
    parser.add_argument(
        "--days", metavar="D", type=float, default=None, help="how long runs may use the order (default: 7)"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="compare with the order in FILE; keep it if it is good. --for, --mib and --days are then those of FILE",
    )
    add_output(
        parser,
        "--hostfile",
        metavar="FILE",
        default="",
        help="also write the hosts in this order, for MPI and others",
    )
    parser.add_argument(
        "--hostfile-form",
        metavar="FORM",
        choices=HOSTFILE_FORMS,
        default=HOSTFILE_FORMS[0],
        help='mpi: "address slots=2"; ports: "address port", a line a rank, as for LightGBM (default: %(default)s)',
    )
    add_verbose(parser)


def order(options: argparse.Namespace) -> int:
    """Measure, find, write, and say what was found."""
    from ziggurat.files import write_text
    from ziggurat.runs.planning.rank_order import OrderProbeConfig, probe_order
    from ziggurat.training.report.progress import show_progress

    config = OrderProbeConfig(
        algorithm=options.algorithm,
        num_bytes=math.ceil(_above_zero("--mib", options.mib, 16.0) * 2**20),
        valid_days=_above_zero("--days", options.days, 7.0),
    )
    progress = show_progress(verbose=options.verbose)
    probed = probe_order(config, last=options.out if options.again else "", progress=progress)
    if not probed.is_first:
        return 0
    _write(probed.order, Path(options.out))
    if probed.compared is not None:
        _print_compared(probed.compared, probed.order, options.out)
    _print(probed.order, options)
    # Last: where a file of hosts cannot say the order, all else is written and shown.
    if options.hostfile:
        write_text(options.hostfile, "\n".join(probed.order.host_lines(form=options.hostfile_form)) + "\n")
    return 0


def _above_zero(flag: str, value: float | None, default: float) -> float:
    """Return the value of a flag; 0 where it was not given, which leaves the default to the probe."""
    if value is None:
        return 0.0
    if 0 < value < _NO_END:
        return value
    raise ConfigError(
        expected=f"a number above 0 and below {_NO_END:,.0f}",
        found=f"{value:g}",
        where=flag,
        ways_out=(f"leave it out: {default:g}", f"{flag} {default:g}"),
    )


def _write(found: RankOrder, out: Path) -> None:
    from ziggurat.planning.rank_order.plots import write_picture

    found.save(out)
    found.write_matrix(out.with_suffix(".csv"))
    write_picture(found, out.with_suffix(".png"))


def _print_compared(compared: OrderNow, found: RankOrder, out: str) -> None:
    from ziggurat.cli.tables import print_line

    verdict = "STALE, replaced" if compared.is_stale else "still good"
    print_line(f"the order in {out}: {verdict}: {'; '.join(compared.reasons)}")
    pairs = found.world_size * (found.world_size - 1) // 2
    slower = f"{compared.slower_pairs:,} take twice as long as then or more"
    faster = f"{compared.faster_pairs:,} half as long or less"
    print_line(f"of {pairs:,} pairs, {slower}, {faster}")


def _print(found: RankOrder, options: argparse.Namespace) -> None:
    from ziggurat.cli.tables import print_line, print_table
    from ziggurat.planning.rank_order.algorithms import CollectiveAlgorithm

    rows = [_level_row(level) for level in found.levels]
    if rows:
        print_table(("level", "groups", "confidence", "ms inside", "ms between", "seen in"), rows)
    else:
        print_line("no hosts or racks: all ranks are about equally far from each other")
    print_table(
        ("collective", "cost, given order", "found order", ""),
        [
            (
                cost.algorithm,
                f"{cost.given_ms:,.1f}",
                f"{cost.found_ms:,.1f}",
                f"{cost.given_ms / cost.found_ms:.2f} ×"
                if CollectiveAlgorithm.named(cost.algorithm).depends_on_order
                else "no order helps: every pair communicates in each",
            )
            for cost in found.costs
        ],
    )
    if found.measured is not None:
        measured = found.measured
        both = f"{measured.given_ms:.1f} ms in the given order, {measured.found_ms:.1f} ms in the found one"
        print_line(f"all-reduce of {measured.num_bytes / 2**20:g} MiB, measured: {both}")
    shown = ", ".join(map(str, found.order[:_MAX_SHOWN])) + (" …" if found.world_size > _MAX_SHOWN else "")
    kept = f" (as given: {found.why_given})" if found.why_given else ""
    print_line(f"order: {shown}{kept}")
    out = Path(options.out)
    print_line(f"{out}, {out.with_suffix('.csv')}, {out.with_suffix('.png')}")
    print_line(f"use it: torchrun … -m ziggurat train … --rank-order {pasted(out)}")


def _level_row(level: Level) -> tuple[str, ...]:
    confidence = f"{level.confidence:.3f}" + ("" if level.is_used else ", too low: not used")
    inside = f"{level.inside_ms:.2f}" if level.inside_ms else ""
    return level.name, f"{level.num_groups}", confidence, inside, f"{level.between_ms:.2f}", level.by
