"""Add a verb: `ziggurat curve RUN` draws what a run has logged as a line of blocks in the terminal.

    $ ziggurat curve runs/first
    loss   0.6931 ▇█▆▅▄▄▃▃▃▂▂▂▂▁▁▁▁ 0.5412    steps 50 to 2,500
    auc    0.6120 ▁▃▄▅▆▆▇▇█ 0.7581            steps 250 to 2,250

A package makes it known by an entry point; `ziggurat --help` then lists it like any other:

    [project.entry-points."ziggurat.verbs"]
    curve = "curve_verb:CURVE"
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from ziggurat.cli.tables import print_line
from ziggurat.cli.verb import Verb
from ziggurat.errors import MissingFileError

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--metric", default="auc", help="of the evaluations on validation rows (default: %(default)s)")


def curve(options: argparse.Namespace, rest: list[str]) -> int:
    """Print a line for the loss, and one for a metric."""
    del rest
    from ziggurat.training.records.log import read_records
    from ziggurat.training.records.run_folder import RunFolder

    log = RunFolder(Path(options.run)).metrics
    if not log.is_file():
        raise MissingFileError(
            expected="the log of a run", found="no such file", where=str(log), ways_out="name the folder of a run"
        )
    records = read_records(log)
    losses = [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]
    values = [
        (record["step"], record[options.metric])
        for record in records
        if record["kind"] == "valid" and record.get(options.metric) is not None
    ]
    for name, points in (("loss", losses), (options.metric, values)):
        if points:
            print_line(f"{name:<6} {line_of(points)}")
    return 0


def line_of(points: Sequence[tuple[int, float]]) -> str:
    """Return first value, blocks and last value of a curve, and its steps; means where it is longer than a line."""
    numbers = [value for _, value in points]
    per_block = math.ceil(len(numbers) / _WIDTH)
    means = [
        math.fsum(numbers[start : start + per_block]) / len(numbers[start : start + per_block])
        for start in range(0, len(numbers), per_block)
    ]
    low = min(means)
    span = (max(means) - low) or 1.0
    blocks = "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)
    return f"{numbers[0]:.4f} {blocks} {numbers[-1]:.4f}    steps {points[0][0]:,} to {points[-1][0]:,}"


CURVE = Verb(
    name="curve",
    summary="draw the loss and a metric of a run in the terminal",
    epilog="example:\n  ziggurat curve runs/first --metric log_loss",
    add_arguments=add_arguments,
    run=curve,
)
