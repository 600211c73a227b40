"""Attack what is left behind: kill a verb at any call that writes, damage a file of what lies there, and go on.

    python -m tests.attacks.leftovers --count 1000 --seed 0

Half of the cases kill a verb (`verbs.py`) with SIGKILL at its n-th write (half of which arrives), flush, close, rename,
mkdir or open, damage one file of what it left or none, and give the verb again. The others damage one file of what is
finished (a run, an export, prepared data, the cache) and let a verb read it. Damage is a flipped bit, an end that is
cut off, an empty file, two files that are exchanged, an older version. What may come out:

    same       what the verb makes where nothing was killed and nothing is damaged
    rebuilt    status 0 and another result, and the verb says so: an older checkpoint in the place of the damaged one
    found      an error in four parts
    silent     status 0 and another result
    crashed    a traceback, an error without its parts, a signal; an error after a kill where nothing was damaged
    hung       no end in time

The last three are defects.
"""

from __future__ import annotations

import argparse
import fnmatch
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.attacks.faults import (
    ALL_WRITES,
    KILL,
    Bench,
    Ended,
    Fault,
    behind_faults,
    files_of,
    outcome_of,
    print_cases,
)
from tests.attacks.files import Case, run_attack
from tests.attacks.verbs import VERBS, verbs_in_turn

_KILLED = Fault(name="killed", kinds=ALL_WRITES, how=KILL)
# Patterns of finished files, and the verbs that read them.
_READERS = (
    ("films/*", ("recommend", "recommend", "recommend", "recommend", "index recall", "serve")),
    ("run/*", ("predict", "predict parquet", "evaluate", "embeddings", "predict", "evaluate", "embeddings")),
    ("run/*", ("quantise", "importance", "tables", "resume", "report", "export", "towers partition", "plan")),
    ("retrieval/*", ("export retrieval", "export retrieval")),
    ("cache/prepared/*", ("tables", "importance", "quantise", "prepare", "tables", "importance", "quantise")),
    ("cache/*", ("recommend", "tables", "train", "report --baseline")),
)
DAMAGES = ("bit flip", "cut", "empty", "exchanged", "older version")


def damage(folder: Path, names: list[str], draw: random.Random, *, older: Path) -> str:
    """Damage one of some files below a folder; return what was done, "" where nothing changed.

    Args:
        folder: in which the files lie.
        names: their paths there.
        draw: random numbers.
        older: a folder with older files of the same names.
    """
    names = sorted(names)
    name = draw.choice(names)
    kind = draw.choice(DAMAGES)
    path = folder / name
    content = path.read_bytes()
    if kind == "older version" and not (older / name).is_file():
        kind = "exchanged"
    if kind == "bit flip" and content:
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        new = bytes(changed)
    elif kind == "cut" and content:
        new = content[: draw.randrange(len(content))]
    elif kind == "exchanged":
        alike = [each for each in names if each != name and Path(each).suffix == path.suffix] or names
        other = folder / draw.choice(alike)
        new = other.read_bytes()
        other.write_bytes(content)
    elif kind == "older version":
        new = (older / name).read_bytes()
    else:
        new = b""
    path.write_bytes(new)
    return f"{name}: {kind}" if new != content else ""


def _expected(bench: Bench, sound: dict[str, Ended], name: str) -> Ended:
    """Return how a verb ends where nothing is wrong, from the first time that it is asked for."""
    if name not in sound:
        bench.copy()
        sound[name] = bench.run(name)
        assert sound[name].status == 0, f"{name} with nothing wrong: {sound[name].said}"
        bench.warm_up()
    return sound[name]


def _cases(bench: Bench, options: argparse.Namespace) -> Iterator[Case]:
    names = verbs_in_turn(options.verbs)
    readers = [(pattern, name) for pattern, verbs in _READERS for name in verbs if name in names]
    sound: dict[str, Ended] = {}
    end = time.monotonic() + options.seconds
    for number in range(options.count):
        if time.monotonic() > end:
            return
        draw = random.Random(f"{options.seed}/{number}")
        if number % 2 and readers:
            yield _read_damaged(bench, sound, number, draw, *readers[number // 2 % len(readers)])
        else:
            yield _killed(bench, sound, number, draw, names[number // 2 % len(names)])


def _killed(bench: Bench, sound: dict[str, Ended], number: int, draw: random.Random, name: str) -> Case:
    """Kill a verb, damage what it left or not, and give it again."""
    expected = _expected(bench, sound, name)
    calls = sum(count for kind, count in enumerate(expected.calls) if ALL_WRITES >> kind & 1)
    first = draw.randrange(max(calls, 1))
    bench.copy()
    before = files_of(bench.place)
    bench.run(name, _KILLED, first=first)
    left = [each for each, digest in files_of(bench.place).items() if before.get(each) != digest]
    damaged = ""
    if left and draw.random() < 0.6:
        damaged = damage(bench.place, left, draw, older=bench.victim)
    again = bench.run(name, again=True)
    outcome = outcome_of(again, same=VERBS[name].is_same(again.result, expected.result))
    if outcome == "found" and not damaged:
        outcome = "crashed"
    what = f"killed at call {first} of {calls}, {damaged or 'not damaged'}"
    return Case(number, f"leftovers, {name}", what, outcome, again.said[-3000:])


def _read_damaged(
    bench: Bench, sound: dict[str, Ended], number: int, draw: random.Random, pattern: str, name: str
) -> Case:
    """Damage a file that is finished, and let a verb read it."""
    expected = _expected(bench, sound, name)
    bench.copy()
    if "prepared" in pattern:
        assert bench.run("prepare").status == 0
    names = [each for each in files_of(bench.place) if fnmatch.fnmatch(each, pattern) and each != "run/report.html"]
    damaged = damage(bench.place, names, draw, older=bench.victim)
    ended = bench.run(name)
    outcome = outcome_of(ended, same=VERBS[name].is_same(ended.result, expected.result))
    what = f"{damaged or 'not damaged'}, read by {name}"
    return Case(number, f"damaged {pattern}", what, outcome, ended.said[-3000:])


def attack(*, count: int, seed: int, seconds: float, verbs: str = "") -> list[Case]:
    """Try `count` cases, or as many as fit in `seconds`."""
    return behind_faults("tests.attacks.leftovers", count=count, seed=seed, seconds=seconds, verbs=verbs)


def main(arguments: list[str] | None = None) -> int:
    """Attack, print every defect and the table."""
    return run_attack(attack, arguments, doc=__doc__, count=1000, shown=1500)


if __name__ == "__main__":
    if "--inside" in sys.argv:
        print_cases(_cases)
    else:
        sys.exit(main())
