"""Data that feeds training: sessions stored, read and computed once. A claim a file; this one puts them together.

    data_sessions    recd_storage, recd_read, recd_step   what repeats within a session (docs/guides/sessions.md)
    data_loading     prepare_polars, load_…               from text to Parquet, from Parquet to batches
    data_balance     balance_plan, balance_simulated_…, balance_step   samples dealt to ranks (docs/guides/balancing.md)

A further file of cases is a module with `add_options(parser)` and `cases(quick=…, options=…, report=…)`, named in
`PARTS`; it appends its cases to the report.
"""

from __future__ import annotations

import argparse
import importlib

from benchmarks.harness import chosen
from benchmarks.report import Report

PARTS = ("data_sessions", "data_loading", "data_balance")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Options of this benchmark alone, and of its parts."""
    parser = argparse.ArgumentParser(prog="ziggurat bench data")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    for part in PARTS:
        importlib.import_module(f"benchmarks.{part}").add_options(parser)
    return parser.parse_args(arguments)


def run(*, quick: bool, options: argparse.Namespace) -> Report:
    """The cases of every part."""
    parts = chosen(options.parts, known=PARTS, option="ziggurat bench data --parts")
    report = Report(
        benchmark="data",
        claim="What repeats in a session is kept once, and ranks have equal work: against the same without.",
        command="ziggurat bench data",
    )
    for part in parts:
        importlib.import_module(f"benchmarks.{part}").cases(quick=quick, options=options, report=report)
    return report
