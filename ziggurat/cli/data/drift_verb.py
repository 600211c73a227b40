"""`ziggurat drift`: made data that drifts, window after window, of which the best metrics are known."""

from __future__ import annotations

import argparse
import shlex

from ziggurat.cli.outputs import add_output
from ziggurat.cli.parser import add_verbose
from ziggurat.cli.settings import apply_settings, print_settings, settings_given
from ziggurat.cli.tables import print_line
from ziggurat.cli.verb import Takes, Verb

DRIFT_SUMMARY = "make data that drifts, and say what the best model could reach in every window"
DRIFT_EPILOG = """Preferences that move, ids that come and go, seasons, covariate shift and delayed labels: each is a
setting of its own, by default off. The folder has a Parquet file for each window, the schema, and truth.csv: the best
NE, log loss and AUC of each. The same command with more windows goes on.
examples:
  ziggurat drift --out drifting --windows 30 --preference-rate 0.05
  ziggurat drift --out news --windows 60 --window-rows 1000000 --lifetime 10 --popularity-decay 3
  ziggurat drift --out shop --season-windows 7 --season-logit 0.3 --teacher.conversion-rate 0.1 --delay-s 86400
  ziggurat drift --settings
"""


def add_drift_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags of `drift`; the rest are settings of `DriftConfig`."""
    add_output(parser, "--out", metavar="FOLDER", default="drifting", help="where to write (default: %(default)s)")
    parser.add_argument("--windows", metavar="N", type=int, default=30, help="how many (default: %(default)s)")
    parser.add_argument("--settings", action="store_true", help="list all settings with what they mean, and end")
    add_verbose(parser)


def drift(options: argparse.Namespace, rest: list[str]) -> int:
    """Write the windows, and print what a stream takes."""
    from ziggurat.data.synthetic.drift import DriftConfig
    from ziggurat.runs.drifting import PICTURE, SCHEMA, TRUTH, WINDOWS, write_drifting
    from ziggurat.training.report.progress import show_progress

    config = apply_settings(DriftConfig(), settings_given(rest), listed="ziggurat drift --settings")
    if options.settings:
        print_settings(DriftConfig(), config)
        return 0
    progress = show_progress(verbose=options.verbose)
    written = write_drifting(config, folder=options.out, windows=options.windows, progress=progress)
    there = written.truth.height - written.drawn
    print_line(f"{written.drawn:,} windows drawn" + (f", {there:,} were there" if there else ""))
    print_line(f"what the best model reaches: {written.folder / TRUTH}, {written.folder / PICTURE}")
    by = {3600: "hour", 86_400: "day", 7 * 86_400: "week"}.get(config.window_s, f"rows:{config.window_rows}")
    files = f"{written.folder / WINDOWS}/"
    command = ["stream", "table_dlrm", "--data.train", files, "--schema", str(written.folder / SCHEMA), "--by", by]
    print_line(f"  ziggurat {shlex.join(command)}")
    return 0


DRIFT = Verb(
    name="drift",
    summary=DRIFT_SUMMARY,
    epilog=DRIFT_EPILOG,
    add_arguments=add_drift_arguments,
    run=drift,
    takes=Takes.WORDS,
)
