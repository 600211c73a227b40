"""Claim: formats of few bits lose what independent code measured, and dispatch is no slower than the best precision.

    qsnr       error of formats on normal vectors of unlike sizes, against a table that independent code measured
    step       a training step whose products are rounded, as a multiple of the time of an FP32 step
    dispatch   a training step by dispatch of its products, against the fastest single precision
    probe      what the statistics of products cost, as a share of a step at the interval that the hook has by default
    scoring    a linear layer whose weights are integers in blocks, against torch's in FP32, at batches of 1 to 64
    models     a whole model with packed products, lookups and all, against FP32, at batches of 1, 16 and 64
    rounding   GB/s of rounding a large tensor along each axis, against a copy of the same bytes into a new tensor
    mods       LoKA's options of models, each alone and together: five seeds on Frappe, quality and step time (minutes)
    int8       training by INT8 products: five seeds on Frappe, quality (minutes)
    few_bits   MX9 on the synthetic teacher (longer)
    frappe     MX9 on Frappe with as many seeds as are asked for (hours)
    histories  MX9 in HSTU on MovieLens-1M: HR@10 (hours)

The last five are run only where they are named: `--source FOLDER` says where Frappe's files are.

Steps are those of the benchmark models (`workload.py`), 2,048 samples on one thread. All contestants of a model live in
one process and take turns of one step, in an order that rotates; a ratio is the median over rounds. What is counted is
CPU time, because on a core that is shared the clock tells the time of others.

A part is a function that adds cases to a report, listed in `PARTS`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.harness import chosen, percentiles, say
from benchmarks.numerics_quality import (
    measure_few_bits,
    measure_frappe,
    measure_histories,
    measure_int8,
    measure_mods,
)
from benchmarks.ours import OurContestant
from benchmarks.report import Report, by_round
from benchmarks.workload import ModelKind, Workload
from ziggurat.models.dispatch_times import seconds_of_plans
from ziggurat.models.packed import pack_products
from ziggurat.models.probed import ModelProbe
from ziggurat.numerics import BlockFormat, quantise
from ziggurat.numerics.linear import linear, pack_linear
from ziggurat.numerics.qsnr import NUM_VECTORS, measure_qsnr
from ziggurat.precision.dispatch import plan_dispatch
from ziggurat.training.hooks.probe_products import ProbeProducts

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
MODELS = (ModelKind.DLRM.value, ModelKind.DCN_V2.value, ModelKind.WUKONG.value)
ROUNDED = ("mx9", "mx6", "fp8_rowwise", "bf16_emulated")
SINGLE = ("fp32", "bf16")
MAX_ROUNDED_TIME = 1.6
MIN_DISPATCH_SPEED = 0.98
MAX_PROBE_SHARE = 0.01
PROBED_BATCHES = 4
SCORED = ("int8", "mx6", "mx9")
LAYERS = ((256, 512), (512, 1024), (1024, 1024), (2048, 512))  # outputs, inputs
SCORED_BATCHES = (1, 4, 16, 64)
SCORING_REPEATS = 640  # of a batch of one; a turn has as many samples at any batch
MIN_SCORING_SPEED = 1.3
ROUNDED_FORMATS = ("mx9", "mxfp8_e4m3")
ROUNDED_SHAPES = ((256, 512), (4096, 1024), (8192, 1024))
ROUNDED_BYTES = 2**25  # in a turn, at any shape
MIN_ROUNDING_RATE = 8.0  # GB/s a core, or the limit of the memory:
MIN_SHARE_OF_COPY = 0.9
MODEL_BATCHES = (1, 16, 64)
MODEL_REPEATS = 64  # of a batch of one
UNIT = "samples/CPU s"


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of this benchmark."""
    parser = argparse.ArgumentParser(prog="ziggurat bench numerics", description=__doc__)
    usual = ",".join(name for name in PARTS if name not in LONG_PARTS)
    parser.add_argument("--parts", default=usual, help=f"comma separated, of {', '.join(PARTS)} (default: {usual})")
    parser.add_argument("--seeds", type=int, default=5, help=f"of {', '.join(LONG_PARTS)} (default: %(default)s)")
    parser.add_argument("--source", default="", help="folder of Frappe's published files, of mods, int8 and frappe")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each contestant that count")
    models = ",".join(MODELS)
    parser.add_argument(
        "--models",
        default=models,
        help=f"whose steps are timed, and that few_bits trains, comma separated (default: {models})",
    )
    options = parser.parse_args(arguments)
    options.models = chosen(options.models, known=MODELS, option="ziggurat bench numerics --models")
    options.vectors = NUM_VECTORS
    return options


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Measure the parts that are asked for; `quick`: fewer vectors, rounds and models."""
    options = options or parse_options([])
    parts = chosen(options.parts, known=list(PARTS), option="ziggurat bench numerics --parts")
    if quick:
        options.rounds = min(options.rounds, 3)
        options.seeds = 1
        options.models = options.models[:1]
        options.vectors = 1_500
    report = Report(
        benchmark="numerics",
        claim="Formats of dense products: error, time of a training step, dispatch, and the cost of a probe.",
        command=f"ziggurat bench numerics --parts {options.parts} --models {','.join(options.models)} "
        f"--rounds {options.rounds}" + (f" --seeds {options.seeds}" if {*parts} & {*LONG_PARTS} else ""),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in parts:
            say(f"  {name}")
            PARTS[name](report, options)
    finally:
        torch.set_num_threads(threads)
    return report


def measure_formats(report: Report, options: argparse.Namespace) -> None:
    """Measure the error of formats, and compare it with a table."""
    formats = [BlockFormat.named(name) for name in PUBLISHED_QSNR]
    measured = measure_qsnr(formats, num_vectors=options.vectors)
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


def measure_steps(report: Report, options: argparse.Namespace) -> None:
    """Measure training steps with rounded products against FP32 steps."""
    for model in options.models:
        workload = workload_of(model)
        contestants = {name: contestant(workload, precision=name) for name in ("fp32", *ROUNDED)}
        rates = rates_in_turns({name: each.run for name, each in contestants.items()}, rounds=options.rounds)
        for name in ROUNDED:
            case = by_round(
                f"{model}_step_{name}",
                ours=(name, rates[name]),
                peer=("fp32", rates["fp32"]),
                goal=1 / MAX_ROUNDED_TIME,
                unit=UNIT,
            )
            report.cases.append(case)
            say(f"  {case.name}: {1 / case.ratio:.2f} times the time of FP32 {case.verdict}")


def measure_dispatch(report: Report, options: argparse.Namespace) -> None:
    """Measure training steps by dispatch against those of the fastest single precision."""
    for model in options.models:
        workload = workload_of(model)
        contestants = {name: contestant(workload, precision=name) for name in SINGLE}
        with tempfile.TemporaryDirectory() as folder:
            path = plan_of(contestants["fp32"], Path(folder) / "dispatch.json", report=report)
            contestants["dispatch"] = contestant(workload, precision="dispatch", dispatch=str(path))
        # The same program twice: what their ratio differs from 1 by is the error of this measurement.
        contestants["fp32 again"] = contestant(workload, precision="fp32")
        rates = rates_in_turns({name: each.run for name, each in contestants.items()}, rounds=options.rounds)
        best = max(SINGLE, key=lambda name: statistics.median(rates[name]))
        for name, ours, peer, goal in (
            (f"{model}_dispatch_speed", "dispatch", best, MIN_DISPATCH_SPEED),
            (f"{model}_fp32_again_speed", "fp32 again", "fp32", 0.0),
        ):
            case = by_round(name, ours=(ours, rates[ours]), peer=(peer, rates[peer]), goal=goal, unit=UNIT)
            report.cases.append(case)
            say(f"  {case.name}: {case.ratio:.3f} of {peer} {case.verdict}")


def measure_probe(report: Report, options: argparse.Namespace) -> None:
    """Measure what a look at all products costs, as a share of the steps from one look to the next."""
    every = ProbeProducts().every
    for model in options.models:
        trained = contestant(workload_of(model), precision="fp32")
        probe = ModelProbe(trained.model)

        def look(count: int, probe: ModelProbe = probe, trained: OurContestant = trained) -> float:
            for _ in range(count):
                probe.take(trained.batches[0][0])
            return 0.0

        rates = rates_in_turns({"step": trained.run, "probe": look}, rounds=options.rounds)
        shares = [step / looked / every for step, looked in zip(rates["step"], rates["probe"], strict=True)]
        low, high = percentiles(shares)
        share = statistics.median(shares)
        verdict = "met" if share <= MAX_PROBE_SHARE else "missed"
        report.figures.append(
            {
                "name": f"{model}_probe_share",
                "ours": share,
                "p10": low,
                "p90": high,
                "limit": MAX_PROBE_SHARE,
                "every": every,
                "unit": "of the CPU time of steps",
                "verdict": verdict,
            }
        )
        report.notes.append(f"{model}: a probe each {every} steps costs {share:.2%} of them ({verdict})")
        say(f"  {report.notes[-1]}")


def measure_scoring(report: Report, options: argparse.Namespace) -> None:
    """Measure linear layers in few bits against torch's in FP32, in turns of many repeats each.

    The first product of a turn may find its weights in memory; the others find them in the nearest cache that holds
    them, as a server does that scores with one network.
    """
    generator = torch.Generator().manual_seed(0)
    rows = ["| outputs × inputs | batch | FP32, µs | " + " | ".join(f"`{name}`" for name in SCORED) + " |"]
    rows.append("|---|---:|---:" + "|---:" * len(SCORED) + "|")
    for outputs, inputs in LAYERS:
        weight = torch.randn(outputs, inputs, generator=generator)
        bias = torch.randn(outputs, generator=generator)
        packed = {name: pack_linear(weight, BlockFormat.named(name), bias=bias) for name in SCORED}
        for batch in SCORED_BATCHES:
            x = torch.randn(batch, inputs, generator=generator)
            products: dict[str, Callable[[], object]] = {
                "fp32": functools.partial(torch.nn.functional.linear, x, weight, bias)
            }
            for name, map in packed.items():
                products[name] = functools.partial(linear, x, map)
            cells = scoring_cells(
                report,
                products,
                case=f"scoring_{{}}_{outputs}x{inputs}_batch{batch}".format,
                batch=batch,
                repeats=max(1, SCORING_REPEATS // batch),
                rounds=options.rounds,
            )
            rows.append(f"| {outputs} × {inputs} | {batch} | {cells} |")
            say(f"  {rows[-1]}")
    report.tables.append("\n".join(rows))


def measure_models(report: Report, options: argparse.Namespace) -> None:
    """Measure scores of whole models with packed products against FP32, in turns of many repeats each."""
    rows = ["| model | batch | FP32, µs | " + " | ".join(f"`{name}`" for name in SCORED) + " |"]
    rows.append("|---|---:|---:" + "|---:" * len(SCORED) + "|")
    for kind in options.models:
        workload = workload_of(kind)
        contestants = {name: contestant(workload, precision="fp32") for name in ("fp32", *SCORED)}
        packed = [pack_products(contestants[name].model, BlockFormat.named(name)) for name in SCORED]
        report.notes += [f"{kind}: {each.line()}" for each in packed]
        samples = contestants["fp32"].batches[0][0]
        for each in contestants.values():
            each.model.eval()
        for batch in MODEL_BATCHES:
            rows_of_batch = samples.rows(0, batch)
            products = {name: functools.partial(each.model, rows_of_batch) for name, each in contestants.items()}
            cells = scoring_cells(
                report,
                products,
                case=f"scoring_{kind}_{{}}_batch{batch}".format,
                batch=batch,
                repeats=max(1, MODEL_REPEATS // batch),
                rounds=options.rounds,
            )
            rows.append(f"| {kind} | {batch} | {cells} |")
            say(f"  {rows[-1]}")
    report.tables.append("\n".join(rows))


def scoring_cells(
    report: Report,
    products: Mapping[str, Callable[[], object]],
    *,
    case: Callable[[str], str],
    batch: int,
    repeats: int,
    rounds: int,
) -> str:
    """Measure products of a batch against that in FP32, add a case each, and return the cells of a table's row.

    Args:
        report: takes the cases.
        products: by format, and "fp32".
        case: gives the name of a case from that of a format.
        batch: rows of a product.
        repeats: of a product in a turn.
        rounds: of turns.
    """
    with torch.inference_mode():
        rates = rates_of_products(products, batch=batch, repeats=repeats, rounds=rounds)
    speeds = list[str]()
    for name in SCORED:
        found = by_round(
            case(name),
            ours=(name, rates[name]),
            peer=("fp32", rates["fp32"]),
            goal=MIN_SCORING_SPEED,
            unit=UNIT,
        )
        report.cases.append(found)
        speeds.append(f"{found.ratio:.2f}")
    fp32_us = batch / statistics.median(rates["fp32"]) * 1e6
    return " | ".join([f"{fp32_us:.0f}", *speeds])


def rates_of_products(
    products: Mapping[str, Callable[[], object]], *, batch: int, repeats: int, rounds: int
) -> dict[str, list[float]]:
    """Return samples a CPU second of products, by round; they take turns of as many repeats as they are told."""

    def repeated(product: Callable[[], object], count: int) -> float:
        for _ in range(count * repeats):
            product()
        return 0.0

    actions = {name: functools.partial(repeated, product) for name, product in products.items()}
    rates = rates_in_turns(actions, rounds=rounds)
    # Those rates are of the batches of training steps.
    factor = repeats * batch / Workload().batch_size
    return {name: [rate * factor for rate in each] for name, each in rates.items()}


def measure_rounding(report: Report, options: argparse.Namespace) -> None:
    """Measure the rate of rounding against that of a copy, whose result is a new tensor, too."""
    rows = ["| tensor | along | clone, GB/s | " + " | ".join(f"`{name}`" for name in ROUNDED_FORMATS) + " |"]
    rows.append("|---|---|---:" + "|---:" * len(ROUNDED_FORMATS) + "|")
    generator = torch.Generator().manual_seed(0)
    for shape in ROUNDED_SHAPES:
        x = torch.randn(shape, generator=generator)
        for axis in (0, 1):
            products: dict[str, Callable[[], object]] = {"clone": x.clone}
            for name in ROUNDED_FORMATS:
                products[name] = functools.partial(quantise, x, BlockFormat.named(name), axis)
            repeats = max(1, ROUNDED_BYTES // (4 * x.numel()))
            seconds = rates_of_products(products, batch=1, repeats=repeats, rounds=options.rounds)
            rates = {name: [4e-9 * x.numel() * each for each in found] for name, found in seconds.items()}
            cells = [f"{statistics.median(rates['clone']):.1f}"]
            for name in ROUNDED_FORMATS:
                shares = [ours / clone for ours, clone in zip(rates[name], rates["clone"], strict=True)]
                rate = statistics.median(rates[name])
                share = statistics.median(shares)
                report.figures.append(
                    {
                        "name": f"rounding_{name}_{'×'.join(map(str, shape))}_axis{axis}",
                        "ours": rate,
                        "of_a_copy": share,
                        "goal": MIN_ROUNDING_RATE,
                        "unit": "GB/s of CPU time",
                        "verdict": "met" if rate >= MIN_ROUNDING_RATE or share >= MIN_SHARE_OF_COPY else "missed",
                    }
                )
                cells.append(f"{rate:.1f} ({share:.2f} of the copy)")
            rows.append(f"| {shape[0]:,} × {shape[1]:,} | axis {axis} | {' | '.join(cells)} |")
            say(f"  {rows[-1]}")
    report.tables.append("\n".join(rows))


def workload_of(model: str) -> Workload:
    """Return what a model trains on: few batches and small tables, since all contestants live in one process."""
    return Workload(model=ModelKind(model), num_batches=4, num_rows=20_000)


def contestant(workload: Workload, **settings: object) -> OurContestant:
    """Build a contestant that computes eagerly."""
    return OurContestant(workload, {"compile": "off", **settings})


def plan_of(trained: OurContestant, path: Path, *, report: Report) -> Path:
    """Probe a model on a few batches, choose kernels for its products, and write the choices."""
    probe = ModelProbe(trained.model)
    for label_sets in trained.batches[:PROBED_BATCHES]:
        probe.take(label_sets[0])
    batches = [label_sets[0] for label_sets in trained.batches[:PROBED_BATCHES]]
    plan = plan_dispatch(
        probe.record,
        device=torch.device("cpu"),
        seconds_of=lambda plans: seconds_of_plans(trained.model, plans, batches=batches),
    )
    chosen_kernels = ", ".join(f"{name} in {count}" for name, count in plan.counts().items())
    missing = "; ".join(f"{name}: {why}" for name, why in plan.missing.items()) or "none"
    report.notes.append(
        f"{plan.model}: whole {plan.whole.precision} ({plan.whole.reason}); kernels of products and directions: "
        f"{chosen_kernels}; missing: {missing}"
    )
    say(f"  {report.notes[-1]}")
    return plan.write(path)


def rates_in_turns(actions: Mapping[str, Callable[[int], float]], *, rounds: int) -> dict[str, list[float]]:
    """Run contestants one step at a time, in an order that rotates; return samples a CPU second, by round.

    Args:
        actions: make as many steps as they are told.
        rounds: that count; one before them warms up.
    """
    rates: dict[str, list[float]] = {name: [] for name in actions}
    names = list(actions)
    for number in range(1 + rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            begin_s = time.process_time()
            actions[name](1)
            seconds = time.process_time() - begin_s
            if number:
                rates[name].append(Workload().batch_size / seconds)
    return rates


# A part adds its cases to the report, by the options of the command line.
PARTS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "qsnr": measure_formats,
    "step": measure_steps,
    "dispatch": measure_dispatch,
    "probe": measure_probe,
    "scoring": measure_scoring,
    "models": measure_models,
    "rounding": measure_rounding,
    "mods": measure_mods,
    "int8": measure_int8,
    "few_bits": measure_few_bits,
    "frappe": measure_frappe,
    "histories": measure_histories,
}
LONG_PARTS = ("mods", "int8", "few_bits", "frappe", "histories")
