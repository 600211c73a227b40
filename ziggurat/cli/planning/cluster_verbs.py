"""`ziggurat cluster …`: descriptions of machines, probes of them (`probe_verbs.py`), orders (`order_verb.py`)."""

from __future__ import annotations

import argparse

from ziggurat.cli.outputs import add_output
from ziggurat.cli.planning.order_verb import ORDER_EPILOG, ORDER_SUMMARY, add_order_arguments, order
from ziggurat.cli.planning.probe_verbs import PROBE_EPILOG, PROBE_SUMMARY, add_probe_arguments, probe
from ziggurat.cli.verb import Verb
from ziggurat.commands import pasted

CLUSTER_SUMMARY = "machines as a planner sees them: their constants, and where each comes from"

CLUSTER_EPILOG = """examples:
  ziggurat cluster show h100x64
  ziggurat cluster probe --minutes 10
  torchrun --nproc-per-node 4 -m ziggurat cluster order --out order.json
"""


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `ziggurat cluster`."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    summary = "print the constants of a cluster with their sources, or write them as TOML"
    show = actions.add_parser(
        "show",
        help=summary,
        description=summary,
        epilog="Names: v100xN, a100xN, h100xN (N devices, 8 a host), local (this machine), or a file cluster.toml.\n"
        'A file may begin with like = "h100x64" and hold only what differs.\n'
        "examples:\n  ziggurat cluster show h100x64\n  ziggurat cluster show h100x64 --out cluster.toml",
    )
    show.add_argument("name", help="h100x64, local, cluster.toml …")
    add_output(show, "--out", metavar="FILE", help="write it there as TOML, to be edited")
    add_probe_arguments(actions.add_parser("probe", help=PROBE_SUMMARY, description=PROBE_SUMMARY, epilog=PROBE_EPILOG))
    add_order_arguments(actions.add_parser("order", help=ORDER_SUMMARY, description=ORDER_SUMMARY, epilog=ORDER_EPILOG))


def cluster(options: argparse.Namespace, rest: list[str]) -> int:
    """`cluster show`, `cluster probe` and `cluster order`."""
    del rest
    actions = {"show": _show, "probe": probe, "order": order}
    return actions[options.action](options)


def _show(options: argparse.Namespace) -> int:
    from ziggurat.cli.tables import print_line, print_table
    from ziggurat.planning.cluster.catalogue import find_cluster

    found = find_cluster(options.name)
    if options.out:
        found.save(options.out)
        print_line(f"written to {options.out}; plan with it: ziggurat plan RECIPE --cluster {pasted(options.out)}")
        return 0
    print_line(found.describe() + "\n")
    print_table(
        ("constant", "value", "origin", "source"),
        [(each.name, each.shown, each.origin.value, each.source) for each in found.constants()],
    )
    return 0


CLUSTER = Verb(
    name="cluster",
    summary=CLUSTER_SUMMARY,
    epilog=CLUSTER_EPILOG,
    add_arguments=add_cluster_arguments,
    run=cluster,
)
