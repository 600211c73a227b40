"""All attacks, within one limit of time: `python -m tests.attacks --seconds 840`, or `make attack`.

    files     damaged files of a run, loaded, verified and resumed                          tests/attacks/files.py
    faults    verbs on a disk that is full or broken, and given again on what they left     tests/attacks/faults.py
    leftovers verbs that are killed, or read what is damaged                                tests/attacks/leftovers.py
    ranks     jobs in which a rank differs, is killed, or stands still                      tests/attacks/ranks.py
    parity    random configurations on one to four ranks against an FP64 reference          tests/attacks/parity.py

One table: class, tried; *found* (an error in four parts), *equal* (the same values, or rebuilt and said), *accepted*
(valid content that was put there with its checksum made good); and what must not be: *silent* (other values without a
word), *crashed* (any other error), *hung*. The exit code is 1 if there is one of those; each is printed with its draw.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from tests.attacks import faults, files, leftovers, parity, ranks
from tests.attacks.files import DEFECTS, Case

COLUMNS = ("found", "equal", "accepted", *DEFECTS)
_PARITY = {"equal": "same", "different": "silent", "refused": "found", "crashed": "crashed"}
_SHARES = (
    ("files", 0.25),
    ("faults", 0.2),
    ("leftovers", 0.2),
    ("ranks", 0.15),
    ("parity", 0.2),
)  # of the time; what one leaves over goes to the next


def attack_parity(*, seed: int, seconds: float) -> list[Case]:
    """Random configurations, ten at a time, on one to four ranks in turn."""
    end, cases, step = time.monotonic() + seconds, list[Case](), 0
    while time.monotonic() < end:
        world_size = 1 + step % 4
        first = 1_000_000 * (seed + 1) + parity.CHUNK * step
        drawn = [parity.draw(first + each, world_size=world_size) for each in range(parity.CHUNK)]
        for case, outcome, words in parity.attack(drawn):
            target = f"parity, {world_size} rank{'s' if world_size > 1 else ''}"
            hung = outcome == "crashed" and "no answer" in words
            cases.append(Case(case.seed, target, str(case), "hung" if hung else _PARITY[outcome], words))
        step += 1
    return cases


def table(cases: list[Case]) -> str:
    """Markdown, as in docs/reliability.md."""
    lines = ["| class | tried | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for target in (*sorted({case.target for case in cases}), "all"):
        held = Counter(case.outcome for case in cases if target in (case.target, "all"))
        held["equal"] = held["same"] + held["rebuilt"]
        lines.append(
            f"| {target} | {held.total() - held['equal']} | " + " | ".join(f"{held[c]}" for c in COLUMNS) + " |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Attack, print every defect and the table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=840.0, help="start no case after this long")
    parser.add_argument("--out", type=Path, default=Path("runs/attack.json"))
    options = parser.parse_args(arguments)
    begin, cases, share = time.monotonic(), list[Case](), 0.0
    for name, part in _SHARES:
        share += part
        left = share * options.seconds - (time.monotonic() - begin)
        print(f"{name}: {left:.0f} s", flush=True)
        if name == "parity":
            cases += attack_parity(seed=options.seed, seconds=left)
        else:
            module = {"files": files, "faults": faults, "leftovers": leftovers, "ranks": ranks}[name]
            cases += module.attack(count=10**9, seed=options.seed, seconds=left)
    bad = [case for case in cases if case.outcome in DEFECTS]
    for case in bad:
        print(f"{case.target}, {case.number}, {case.what}: {case.outcome}\n  {case.detail[-1500:]}")
    print(f"seed {options.seed}, {time.monotonic() - begin:.0f} s\n{table(cases)}")
    record = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.platform(), "seed": options.seed}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**record, "cases": [asdict(case) for case in cases]}, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    # Under its own name, so that children see the same classes, and none of them runs this file again as its main one.
    from tests.attacks import __main__ as mine

    sys.modules["__main__"].__spec__, sys.modules["__main__"].__file__ = None, None

    sys.exit(mine.main())
