"""`ziggurat numerics …`: number formats of few bits."""

from __future__ import annotations

import argparse

from ziggurat.cli.outputs import add_output
from ziggurat.cli.runs.importance_verb import check_picture
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Verb

NUMERICS_SUMMARY = "number formats of few bits: what they take, what they hold, what they lose"
NUMERICS_EPILOG = """examples:
  ziggurat numerics formats
  ziggurat numerics formats mx9 mx6 mxfp8_e4m3 --plot formats.png
"""

_FORMATS_SUMMARY = "table of block formats: bits, blocks, range, and the error that is measured now"
_FORMATS_EPILOG = """The paper on shared microexponents (arXiv 2302.08007) and OCP's MX formats 1.0 both say MX, and
mean different formats: mx9, mx6 and mx4 are the paper's (integers in blocks of 16, with one more bit for each pair);
mxfp8, mxfp6, mxfp4 and mxint8 are OCP's (blocks of 32, one level). QSNR is -10 log10 of noise over signal, of normal
vectors of 1,024 numbers whose standard deviations are |N(0, 1)|, as the paper measures it; 6.02 dB are one bit.
examples:
  ziggurat numerics formats
  ziggurat numerics formats mx9 mxfp8_e4m3 --vectors 1000
  ziggurat numerics formats --plot formats.png --json formats.json"""


def add_numerics_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `ziggurat numerics`."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    formats = actions.add_parser("formats", help=_FORMATS_SUMMARY, description=_FORMATS_SUMMARY, epilog=_FORMATS_EPILOG)
    formats.add_argument("formats", metavar="format", nargs="*", help="only these (default: all)")
    formats.add_argument(
        "--vectors", metavar="N", type=int, default=10_000, help="vectors to measure on (default: %(default)s)"
    )
    add_output(formats, "--json", metavar="FILE", help="write everything there")
    add_output(formats, "--plot", metavar="FILE", help="draw error against bits there (.png, .svg or .pdf)")


def numerics(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the table of block formats."""
    del rest
    from ziggurat.errors import ConfigError
    from ziggurat.files import write_figure
    from ziggurat.numerics import BlockFormat
    from ziggurat.numerics.format_report import COLUMNS, FORMATS, format_figure, measured_formats, report_json

    if options.vectors < 1:
        raise ConfigError(
            expected="one vector or more to measure on",
            found=str(options.vectors),
            where="command line, --vectors",
            ways_out="leave --vectors out",
        )
    check_picture(options.plot)
    formats = [BlockFormat.named(name) for name in options.formats] or BlockFormat.listed()
    measured = measured_formats(formats, num_vectors=options.vectors)
    print_table(COLUMNS, [each.cells() for each in measured])
    print_line("mx9, mx6 and mx4 are the paper's MX (2302.08007); mxfp8, mxfp6, mxfp4 and mxint8 are OCP's MX 1.0.")
    if options.json:
        FORMATS.write(options.json, report_json(measured, num_vectors=options.vectors))
        print_line(options.json)
    if options.plot:
        write_figure(format_figure(measured), options.plot)
        print_line(options.plot)
    return 0


NUMERICS = Verb(
    name="numerics",
    summary=NUMERICS_SUMMARY,
    epilog=NUMERICS_EPILOG,
    add_arguments=add_numerics_arguments,
    run=numerics,
)
