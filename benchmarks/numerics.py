"""Claim: formats of few bits lose what independent code measured.

    qsnr       error of formats on normal vectors of unlike sizes, against a table that independent code measured

A part is a function that adds cases to a report, listed in `PARTS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness import chosen, say
from benchmarks.report import Report
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.qsnr import NUM_VECTORS, measure_qsnr

# dB of 10,000 vectors of 1,024 numbers whose sizes are |N(0, 1)|, by independent code.
PUBLISHED_QSNR = {
    "bf16": 55.6,
    "mx9": 46.6,
    "msfp16": 43.0,
    "mxint8": 42.0,
    "int8": 42.1,
    "fp8_e4m3_tensor": 31.5,
    "fp8_e4m3_row": 31.6,
    "fp8_e4m3_128": 31.8,
    "mxfp8_e4m3": 30.5,
    "mxfp6_e2m3": 31.0,
    "mxfp6_e3m2": 25.3,
    "mx6": 28.4,
    "mxfp8_e5m2": 25.3,
    "fp8_e5m2_tensor": 25.6,
    "mxfp4": 18.7,
    "mx4": 15.8,
}
MAX_QSNR_DIFFERENCE = 0.2


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench numerics", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma separated (default: {','.join(PARTS)})")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant that count")
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Measure the parts that are asked for; `quick`: fewer vectors, rounds and models."""
    options = options or parse_options([])
    parts = chosen(options.parts, known=list(PARTS), option="ziggurat bench numerics --parts")
    if quick:
        options.rounds = min(options.rounds, 3)
    report = Report(
        benchmark="numerics",
        claim="Formats of dense products: their error.",
        command=f"ziggurat bench numerics --parts {options.parts} --rounds {options.rounds}",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in parts:
            say(f"  {name}")
            PARTS[name](report, options.rounds, quick)
    finally:
        torch.set_num_threads(threads)
    return report


def measure_formats(report: Report, rounds: int, quick: bool) -> None:
    """Measure the error of formats, and compare it with a table."""
    del rounds
    formats = [BlockFormat.named(name) for name in PUBLISHED_QSNR]
    measured = measure_qsnr(formats, num_vectors=1_500 if quick else NUM_VECTORS)
    rows = ["| format | QSNR, dB | table | difference |", "|---|---:|---:|---:|"]
    for format, found in zip(formats, measured, strict=True):
        published = PUBLISHED_QSNR[format.name]
        difference = found - published
        report.figures.append(
            {
                "name": f"qsnr_{format.name}_normal",
                "ours": found,
                "peer": published,
                "difference": difference,
                "unit": "dB",
                "verdict": "met" if abs(difference) <= MAX_QSNR_DIFFERENCE else "missed",
            }
        )
        rows.append(f"| `{format.name}` | {found:.1f} | {published:.1f} | {difference:+.2f} |")
    report.tables.append("\n".join(rows))


# A part adds its cases to the report; it is told how many turns count, and whether the run is a quick one.
PARTS: dict[str, Callable[[Report, int, bool], None]] = {
    "qsnr": measure_formats,
}
