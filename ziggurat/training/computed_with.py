"""What a run was computed with, and in what two runs differ that are compared.

    precision   bf16                      kernel    cpp            threads   2
    machine     AMD EPYC, 2 cores …       device    cpu            torch     2.13.0+cpu …

None of it is a setting of the model, and each changes numbers a little: sums are rounded in another order, BF16 keeps
eight bits. So a comparison names what differs, and a part of the difference may come from it. It is read from the
start-up report of the process that trained last; what a report of an older version does not hold is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ziggurat.training.records.run_folder import STARTUP, RunFolder
from ziggurat.training.report.startup import PACKAGES

_MACHINE = ("machine", "device", "python", "ziggurat", *PACKAGES)


def computed_with(run: RunFolder) -> dict[str, str]:
    """Precision, kernel, threads, machine and versions of a run; what is not known is left out."""
    sections = STARTUP.read(run.startup) if run.startup.exists() else {}
    machine = sections.get("Machine", {})
    training = sections.get("Training", {})
    instructions, _, threads = machine.get("cpu kernels", "").rpartition(", ")
    found = {
        "precision": training.get("precision", "").partition(" ")[0],
        "torch.compile": training.get("torch.compile", "").partition(" ")[0],
        "kernel": sections.get("Embedding kernels", {}).get("kernel", ""),
        "threads": re.sub(r"\D", "", threads),
        "instructions": instructions,
    }
    found |= {name: str(machine.get(name, "")) for name in _MACHINE}
    return {name: value for name, value in found.items() if value}


def differing(runs: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Each fact in which runs differ, with the values that it has, in the order of the runs; unknown ones count not."""
    found: dict[str, tuple[str, ...]] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = tuple(dict.fromkeys(run[name] for run in runs if name in run))
        if len(values) > 1:
            found[name] = values
    return found


def difference_notes(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence for each fact in which runs differ."""
    return [
        f"{name} differs ({'; '.join(values)}): a part of the difference may come from it"
        for name, values in differing(runs).items()
    ]
