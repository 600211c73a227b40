"""A gradient-boosting job of LightGBM, data-parallel over its own sockets, launched by a file of hosts.

    hosts.txt          10.77.0.1 12400       a line a machine; LightGBM's rank is the number of its line, so the order
                       10.77.0.3 12400       of the lines is the order of ranks
                       …

LightGBM sums histograms by recursive halving: the first messages, half of a histogram, go N/2 ranks far. So the file is
written by `ziggurat cluster order --for halving_doubling --hostfile hosts.txt --hostfile-form ports`. Every machine has
its own rows, whatever its rank, so that all orders train on the same (`benchmarks/boosting_rank.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.datacentre.network import Network, PlainNetwork
from ziggurat.errors import TopologyError

ROOT = Path(__file__).resolve().parents[2]
PORT = 12400
_TIMEOUT_S = 300.0


def why_not() -> str:
    """Return why it cannot be measured; "" if it can."""
    if importlib.util.find_spec("lightgbm") is None:
        return "LightGBM is not installed (the extra `trees`)"
    return ""


def train_ms(network: Network | PlainNetwork, *, lines: list[str], folder: Path) -> tuple[float, list[float]]:
    """Train once, all machines at the same time.

    Args:
        network: hosts, one machine in each.
        lines: of the file of hosts.
        folder: for that file.

    Returns:
        Milliseconds of a tree on the slowest machine, and scores of the model for some rows.
    """
    hosts = folder / "hosts.txt"
    hosts.write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "OMP_NUM_THREADS": "1"}
    started = []
    for host in range(network.config.hosts):
        words = [sys.executable, "-m", "benchmarks.boosting_rank", str(hosts), str(host)]
        process = subprocess.Popen(
            network.command(host, words), stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        started.append(process)
    try:
        answers = [process.communicate(timeout=_TIMEOUT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    # LightGBM speaks on standard output, too.
    found = [json.loads(line) for answer in answers for line in answer.splitlines() if line.startswith("{")]
    if len(found) != network.config.hosts:
        raise TopologyError(
            expected=f"an answer of all {network.config.hosts} machines of LightGBM",
            found=f"{len(found)} answers; exit codes {[process.returncode for process in started]}",
            where="a gradient-boosting job by a file of hosts",
            ways_out=("look at what the machines printed above", "--cases without boosting leaves it out"),
        )
    return max(each["ms"] for each in found), found[0]["scores"]
