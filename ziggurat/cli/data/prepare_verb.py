"""`ziggurat prepare`: everything before the training, by one process or by the ranks of a job."""

from __future__ import annotations

import argparse
import os

from ziggurat.cli.parser import add_verbose
from ziggurat.cli.settings import apply_settings, settings_from
from ziggurat.cli.tables import print_line
from ziggurat.cli.verb import Takes, Verb

PREPARE_SUMMARY = "prepare the data of a recipe or config, alone or by many ranks, so that training starts at once"
PREPARE_EPILOG = """Reads, checks, splits, fits and encodes; the result lies in the cache (ZIGGURAT_CACHE), where
`ziggurat train` with the same settings of the data finds it. Ranks share the work, file by file or by parts of large
text files, on any machines that see the cache. What ends early goes on when the same command is given again; what is
finished is not done twice.
examples:
  ziggurat prepare table_dlrm --data.train ratings.parquet --schema my.toml
  ziggurat prepare criteo_dlrm --data.bad-rows quarantine
  torchrun --nproc-per-node 4 -m ziggurat prepare table_dlrm --data.train days/ --schema my.toml
"""


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `prepare`; settings of the data have a dot, as those of `train`."""
    parser.add_argument("recipe", nargs="?", help="name of a recipe (see `ziggurat recipes`)")
    parser.add_argument("--config", metavar="FILE", help="config.json of a run, in place of a recipe")
    parser.add_argument("--schema", metavar="FILE", help="schema (TOML) for the recipes table_*")
    add_verbose(parser)


def prepare(options: argparse.Namespace, rest: list[str]) -> int:
    """Prepare, and print what there is then."""
    from ziggurat.cli.verbs import run_to_train
    from ziggurat.runs.execute import prepare_run
    from ziggurat.training.report.progress import show_progress

    options.resume = options.settings = False
    options.out = ""
    options.model = None
    stored, _ = run_to_train(options)
    config = apply_settings(stored, settings_from(options, rest))
    is_first = os.environ.get("RANK", "0") == "0"
    prepared = prepare_run(
        config,
        progress=show_progress(verbose=options.verbose) if is_first else None,
        num_processes=int(os.environ.get("WORLD_SIZE", "1")),
    )
    if is_first:
        for line in prepared.summary_lines():
            print_line(line)
        print_line("already prepared: nothing was done" if prepared.reused else "prepared")
    return 0


PREPARE = Verb(
    name="prepare",
    summary=PREPARE_SUMMARY,
    epilog=PREPARE_EPILOG,
    add_arguments=add_prepare_arguments,
    run=prepare,
    takes=Takes.WORDS,
)
