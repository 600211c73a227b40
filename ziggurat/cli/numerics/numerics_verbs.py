"""`ziggurat numerics …`: number formats of few bits."""

from __future__ import annotations

import argparse

from ziggurat.cli.outputs import add_output
from ziggurat.cli.own_models import add_model_argument, own_models
from ziggurat.cli.runs.importance_verb import check_picture
from ziggurat.cli.tables import print_line, print_table
from ziggurat.cli.verb import Verb

NUMERICS_SUMMARY = "number formats of few bits: what they take, what they hold, what they lose"
NUMERICS_EPILOG = """examples:
  ziggurat numerics formats
  ziggurat numerics formats mx9 mx6 mxfp8_e4m3 --plot formats.png
  ziggurat numerics probe runs/first --measure
  ziggurat numerics dispatch runs/first --measure --out dispatch.json
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

_PROBE_SUMMARY = "error of each format in every dense product of a run, on operands as the run has them"
_PROBE_EPILOG = """Operands are drawn from statistics that the run kept (ziggurat train RECIPE --hook
probe_products), or, with --measure, that are taken now from 16 batches of its training rows; no batch is stored.
A cell is the mean over elements of |out - ref| / |ref|, with ref in FP64, and in brackets what N(0, 1) operands of the
same shapes show: formats look safe on them that are not. The paper takes 0.2 as the most that is safe (LoKA,
arXiv 2605.10886).
examples:
  ziggurat numerics probe runs/first
  ziggurat numerics probe runs/first --measure --kernels bf16,int8,mx6 --json errors.json"""
_DISPATCH_SUMMARY = "choose the fastest kernel that is accurate enough, for every product of a run and each direction"
_DISPATCH_EPILOG = """Errors are measured on operands drawn from statistics of the run (see ziggurat numerics probe),
times in turns on matrices of a step's shapes, on this machine. Of the kernels with an error below 0.2 and a speed-up
above 1.05 the fastest is taken, else FP32. Then the whole network is timed on batches of the run's rows, with FP32 and
with BF16 between its products, and the faster plan is taken: whole bf16 with products in bf16 alone is what --precision
bf16 computes. The file has the reasons, and holds for this model, machine and version.

--for scoring chooses formats of packed weights instead, by which exports score on a CPU: int8, mx6 or mx9 for each
product, or FP32. Times are those of requests of --rows rows.
examples:
  ziggurat numerics dispatch runs/first --out dispatch.json
  ziggurat numerics dispatch runs/first --measure --out dispatch.json
  ziggurat numerics dispatch runs/first --for scoring --rows 64 --out scoring.json"""
_SHOWN_KERNELS = "bf16,int8,fp8_tensorwise,fp8_rowwise,mx9,mx6,mx4"


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
    probe = actions.add_parser("probe", help=_PROBE_SUMMARY, description=_PROBE_SUMMARY, epilog=_PROBE_EPILOG)
    probe.add_argument("run", help="folder of a trained run")
    probe.add_argument("--measure", action="store_true", help="take statistics now, from the run's training rows")
    probe.add_argument(
        "--kernels", metavar="A,B", default=_SHOWN_KERNELS, help="formats to measure (default: %(default)s)"
    )
    add_model_argument(probe)
    add_output(probe, "--json", metavar="FILE", help="write everything there")
    dispatch = actions.add_parser(
        "dispatch", help=_DISPATCH_SUMMARY, description=_DISPATCH_SUMMARY, epilog=_DISPATCH_EPILOG
    )
    dispatch.add_argument("run", help="folder of a trained run")
    dispatch.add_argument("--measure", action="store_true", help="take statistics now, from the run's training rows")
    dispatch.add_argument(
        "--for",
        dest="purpose",
        choices=("training", "scoring"),
        default="training",
        help="kernels of training steps, or packed weights of exports (default: %(default)s)",
    )
    dispatch.add_argument("--rows", metavar="N", type=int, help="rows of a request, of --for scoring (default: 16)")
    add_model_argument(dispatch)
    add_output(dispatch, "--out", metavar="FILE", required=True, help="write the choices and their reasons there")


def numerics(options: argparse.Namespace, rest: list[str]) -> int:
    """Carry out an action of `ziggurat numerics`."""
    del rest
    actions = {"formats": _formats, "probe": _probe, "dispatch": _dispatch}
    return actions[options.action](options)


def _probe(options: argparse.Namespace) -> int:
    """Print the errors of formats in the products of a run."""
    from ziggurat.runs.products import PRODUCT_ERRORS, probe_of_run, product_errors

    kernels = [name for name in options.kernels.split(",") if name]
    record = probe_of_run(options.run, measure=options.measure, models=own_models(options))
    found = product_errors(record, kernels=kernels)
    shown = [name for name in kernels if name not in found.missing]
    print_line(f"{record.model}, step {record.step:,}: {len(record.products)} products, {record.num_passes} batches")
    print_table(found.columns(shown), found.cells(shown))
    for name, lacks in found.missing.items():
        print_line(f"{name}: not here ({lacks})")
    for name, why in record.left_out.items():
        print_line(f"{name}: nothing is kept of it ({why})")
    if options.json:
        PRODUCT_ERRORS.write(options.json, found.to_json())
        print_line(options.json)
    return 0


def _dispatch(options: argparse.Namespace) -> int:
    """Print and write the kernels of a run's products, or the formats of its packed weights."""
    from ziggurat.errors import ConfigError
    from ziggurat.runs.products import dispatch_of_run

    if options.purpose == "scoring":
        return _dispatch_for_scoring(options)
    if options.rows is not None:
        raise ConfigError(
            expected="--rows beside --for scoring: training steps have the rows of the run's batches",
            found=f"--rows {options.rows}",
            where="command line",
            ways_out=("leave --rows out", "choose for scoring: --for scoring"),
        )
    plan = dispatch_of_run(options.run, measure=options.measure, models=own_models(options))
    rows = [
        [module, direction.value, choice.kernel, choice.reason]
        for module, found in plan.choices.items()
        for direction, choice in found.items()
    ]
    print_table(["module", "direction", "kernel", "reason"], rows)
    for name, lacks in plan.missing.items():
        print_line(f"{name}: not here ({lacks})")
    print_line(f"whole: {plan.whole.precision} ({plan.whole.reason})")
    print_line(str(plan.write(options.out)))
    return 0


def _dispatch_for_scoring(options: argparse.Namespace) -> int:
    """Print and write the formats of a run's packed weights."""
    from ziggurat.runs.products import SCORED_ROWS, scoring_plan_of_run

    rows = SCORED_ROWS if options.rows is None else options.rows
    plan = scoring_plan_of_run(options.run, rows=rows, measure=options.measure, models=own_models(options))
    cells = [[module, choice.kernel, choice.reason] for module, choice in plan.choices.items()]
    print_table(["module", "weights", "reason"], cells)
    print_line(f"whole: {plan.whole}")
    print_line(str(plan.write(options.out)))
    return 0


def _formats(options: argparse.Namespace) -> int:
    """Print the table of block formats."""
    from ziggurat.errors import ConfigError
    from ziggurat.files import write_figure
    from ziggurat.numerics import BlockFormat
    from ziggurat.numerics.format_report import COLUMNS, FORMATS, format_figure, measured_formats, report_json
    from ziggurat.training.report.progress import show_progress

    if options.vectors < 1:
        raise ConfigError(
            expected="one vector or more to measure on",
            found=str(options.vectors),
            where="command line, --vectors",
            ways_out="leave --vectors out",
        )
    check_picture(options.plot)
    formats = [BlockFormat.named(name) for name in options.formats] or BlockFormat.listed()
    progress = show_progress()
    progress.begin("vectors", total=options.vectors)
    measured = measured_formats(formats, num_vectors=options.vectors, on_vectors=progress.update)
    progress.end()
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
