"""One GPU: lookups against the rate of its memory, a training step against plain and tuned torch, and what is true.

    lookup, update          bytes a second against a measured copy; single ids of 26 tables, as many as fit
    small_table             a table of 3 rows against uniform ids of the same lookups
    dlrm_step_*             DLRM, 26 tables: our TrainStep against torch as most write it, and as an expert tunes it
    sorted_ahead            the same step with rows sorted while the step before computes, and in the update
    fm_norm                 Wukong's fused kernel against torch's operations
    dots, cross_layers      interactions of DLRM and DCNv2 against torch's operations, forward and backward
    messages                what ranks send, in FP8, against torch's operations
    launches                kernels and graphs that a step of ours starts
    loss_curve              the same batches on the CPU and on the GPU
    resume                  saved in the middle, loaded, trained on: the same bits

`NAME_gpu` is what the same calls take the GPU, by events, without the host's time. What is found is written after each
case. `--parts` chooses some; `python -m benchmarks.gpu.session OUT` gives each part a process and a limit of its own.

Contestants take turns, round by round, in this process (a GPU drifts with its clock, too); a ratio is the median of
the rounds' ratios. Where there is no GPU every case is skipped, with the reason; `--quick` then runs tiny cases on the
CPU, to show that this code works, and says so in every name: nothing of it is to be quoted.

`--tune FILE` measures none of these: it times the candidate launches of Triton's kernels and writes a table of them
(`tune.py`). Needs neither polars nor FBGEMM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu import lookups, products, steps, truth
from benchmarks.gpu.contest import Machine, Measure, machine_of
from benchmarks.harness import say
from benchmarks.report import Report

PARTS = {"products": products.cases, "truth": truth.cases, "lookups": lookups.cases, "steps": steps.cases}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of this benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="ziggurat bench gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tune", type=Path, metavar="FILE", help="time launches of kernels and write their table there"
    )
    parser.add_argument(
        "--parts", default="", metavar="NAMES", help=f"parts or cases alone, separated by commas: {', '.join(PARTS)}"
    )
    options = parser.parse_args(arguments)
    options.parts = tuple(name for name in options.parts.split(",") if name)
    known = {*PARTS, *(name for part in PARTS.values() for name, _ in part())}
    if unknown := sorted(set(options.parts) - known):
        parser.error(f"no such parts: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return options


def run(
    *,
    quick: bool = False,
    options: argparse.Namespace | None = None,
    save: Callable[[Report], object] | None = None,
) -> Report:
    """Measure every case, or say why not; a case that fails stands among those left out, and is raised at the end.

    Args:
        quick: fewer rounds, smaller cases.
        options: of `parse_options`.
        save: called with what was found so far after each case, so that a run that is stopped leaves it.

    Raises:
        ExceptionGroup: of cases that failed.
    """
    parts = () if options is None else options.parts
    report = Report(
        benchmark="_".join(("gpu", *parts)).replace(" ", "_"),
        claim="One GPU: lookups against its memory, a step against plain and tuned torch, the same losses and bits.",
        command=f"ziggurat bench gpu --parts {','.join(parts)}" if parts else "ziggurat bench gpu",
    )
    machine = machine_of(quick=quick)
    if isinstance(machine, str):
        report.skipped.append(f"every case: {machine}")
        return report
    report.extra["gpu"] = _facts(machine)
    if options is not None and options.tune is not None:
        return _tuned(report, machine, options.tune)
    if machine.device.type == "cpu":
        report.notes.append("there is no GPU: tiny cases on the CPU show that this code works; no figure is a claim")
    failures: list[Exception] = []
    for name, measure in _chosen(parts):
        say(f"  {name}")
        try:
            found = measure(machine)
        except Exception as error:
            report.skipped.append(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            if not isinstance(error, torch.OutOfMemoryError):
                failures.append(error)
        else:
            if isinstance(found, str):
                report.skipped.append(f"{name}: {found}")
            else:
                report.cases += found
        if save is not None:
            save(report)
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()
    if failures:
        raise ExceptionGroup("cases of `ziggurat bench gpu` failed", failures)
    return report


def _chosen(names: Sequence[str]) -> Iterator[tuple[str, Measure]]:
    """Return all cases, or those of parts and cases that were named."""
    for part, make in PARTS.items():
        for name, measure in make():
            if not names or part in names or name in names:
                yield name, measure


def _tuned(report: Report, machine: Machine, path: Path) -> Report:
    from benchmarks.gpu.tune import write_tuned
    from ziggurat.ops.lookup.choose import is_available
    from ziggurat.ops.lookup.kernel import KernelChoice

    if not machine.is_gpu or not is_available(KernelChoice.TRITON):
        report.skipped.append("launches of kernels: they are timed on a GPU with the package triton alone; no file")
    else:
        report.notes.append(write_tuned(machine, path))
    return report


def _facts(machine: Machine) -> dict[str, object]:
    if machine.device.type == "cpu":
        return {"name": "none"}
    facts = torch.cuda.get_device_properties(machine.device)
    return {"name": facts.name, "memory_bytes": facts.total_memory, "cuda": torch.version.cuda}
