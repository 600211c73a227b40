"""Attack writing: let a write, flush, close, rename, mkdir or open of a verb fail as full and broken disks do.

    python -m tests.attacks.faults --count 1000 --seed 0

Each case runs one verb of the command line (`verbs.py`) in a fresh copy of a folder with data, runs and exports, and
lets the n-th call below it fail (`faults.cpp`, in front of libc, so that libraries in every language meet it): no room,
an error of the disk, a quota, a write that is cut short, an interrupted call, no descriptor left; once, or from then
on. A verb that ends with an error is given again without the fault, on what it left. What may come out:

    found      an error in four parts; given again, the verb makes what it makes on a sound disk
    same       what it makes on a sound disk, whatever failed (a log that nobody needs, a lock)
    rebuilt    status 0 and another result, and the verb says so (an older checkpoint in the place of a damaged one)
    silent     status 0 and another result, another result when it is given again, or something of the user's is changed
    crashed    a traceback, an error without its parts, a signal, what a destructor prints
    hung       no end in time

The last three are defects. All cases are children of one warm process that has imported everything and computed
nothing, so a case takes a fraction of a second. The calls of each verb are counted first, on a sound disk.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fnmatch
import hashlib
import importlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.attacks.files import Case, run_attack
from tests.attacks.verbs import VERBS, Verb, make_victim, verbs_in_turn
from ziggurat.training.report.progress import show_progress

TIME_LIMIT_S = 240.0
WRITE, FLUSH, CLOSE, NAME, OPEN, READ = (1 << bit for bit in range(6))
ALL_WRITES = WRITE | FLUSH | CLOSE | NAME | OPEN
_FAIL, _SHORT, _SHORT_THEN_FAIL, KILL = range(4)
_NUM_KINDS = 6
_OLD = b"what the user had here\n"
# What a verb says that goes on with less than it was given: an older checkpoint, in the place of the best one.
_SAYS_DAMAGE = re.compile(r"is damaged and was skipped|\(step [\d,]+\) is lost; that of step")
RAW = (
    "Traceback (most recent call last)",
    "Exception ignored",
    "Error ignored",
    "terminate called",
    "panicked at",
    "Fatal Python error",
)


class _State(ctypes.Structure):
    """The memory that `faults.cpp` maps; `State` there has the same layout."""

    _fields_ = (
        ("counted", ctypes.c_long * _NUM_KINDS),
        ("matched", ctypes.c_long),
        ("first", ctypes.c_long),
        ("last", ctypes.c_long),
        ("kinds", ctypes.c_int),
        ("number", ctypes.c_int),
        ("how", ctypes.c_int),
        ("folder", ctypes.c_char * 4096),
    )


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What fails.

    Args:
        name: as it is shown.
        kinds: of calls that are counted and fail.
        number: errno.
        how: fails at once, after half of the bytes, or kills the process.
        once: one call fails; else all later ones, too.
    """

    name: str
    kinds: int
    number: int = 0
    how: int = _FAIL
    once: bool = True


FAULTS = (
    Fault(name="no space, from then on", kinds=ALL_WRITES, number=errno.ENOSPC, once=False),
    Fault(name="no space, once", kinds=ALL_WRITES, number=errno.ENOSPC),
    Fault(name="half of a write, then no space", kinds=WRITE, number=errno.ENOSPC, how=_SHORT_THEN_FAIL, once=False),
    Fault(name="disk error, once", kinds=ALL_WRITES, number=errno.EIO),
    Fault(name="disk error, from then on", kinds=ALL_WRITES, number=errno.EIO, once=False),
    Fault(name="disk error of a flush", kinds=FLUSH | CLOSE, number=errno.EIO),
    Fault(name="quota, from then on", kinds=ALL_WRITES, number=errno.EDQUOT, once=False),
    Fault(name="short write", kinds=WRITE, how=_SHORT),
    Fault(name="interrupted call", kinds=WRITE | OPEN, number=errno.EINTR),
    Fault(name="no descriptor, once", kinds=OPEN | READ, number=errno.EMFILE),
    Fault(name="no descriptor, from then on", kinds=OPEN | READ, number=errno.EMFILE, once=False),
    Fault(name="folder or name refused", kinds=NAME, number=errno.EACCES),
)


class Disk:
    """The faults of the processes that load the library."""

    def __init__(self, state: Path) -> None:
        with state.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(_State))
        self._state = _State.from_buffer(self._memory)

    def arm(self, folder: Path, fault: Fault | None, *, first: int = -1) -> None:
        """Count the calls below a folder from now on, and let the fault happen at one of them."""
        state = self._state
        state.folder = b""
        state.counted[:] = [0] * _NUM_KINDS
        state.matched = 0
        state.first = first if fault else -1
        state.last = first if fault and fault.once else -1
        state.kinds = fault.kinds if fault else 0
        state.number = fault.number if fault else 0
        state.how = fault.how if fault else 0
        state.folder = os.fsencode(f"{folder}/")

    def rest(self) -> tuple[int, ...]:
        """Count and fail nothing any more; return the calls of each kind until now."""
        self._state.folder = b""
        return tuple(self._state.counted)

    @property
    def has_failed(self) -> bool:
        """True if the call was reached that fails."""
        return 0 <= self._state.first < self._state.matched


# ------------------------------------------------------------------------------------- inside, with the faults in front


def _forked(place: Path, action: Callable[[], int], *, limit_s: float) -> tuple[int | None, str]:
    """Return the status of `action` in a child (None: it did not end, negative: a signal), and what it wrote."""
    output = place.with_name("output.txt")
    output.write_bytes(b"")
    child = os.fork()
    if not child:
        status = 1
        os.setpgid(0, 0)
        with contextlib.suppress(BaseException):
            os.chdir(place)
            (place / "tmp").mkdir(exist_ok=True)
            os.environ["ZIGGURAT_CACHE"] = str(place / "cache")
            os.environ["TMPDIR"] = str(place / "tmp")
            tempfile.tempdir = None
            descriptor = os.open(output, os.O_WRONLY | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            try:
                status = action()
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
        os._exit(status)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    end = time.monotonic() + limit_s
    status: int | None = None
    while time.monotonic() < end:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(0.005)
    with contextlib.suppress(OSError):  # it, or what it started
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status, output.read_text(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a verb ended: its status, what it said, what it made (None unless its status is 0), calls of each kind."""

    status: int | None
    said: str
    result: Any
    calls: tuple[int, ...]


class Bench:
    """A folder, copies of it, and verbs that run in the copies."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.disk = disk
        self.victim = root / "victim"
        self.place = root / "case"
        self.modules: set[str] = set()
        self._files: dict[str, str] = {}

    def make(self) -> None:
        """Fill the folder that is copied for each case."""
        self.victim.mkdir()
        status, said = _forked(self.victim, lambda: make_victim() or 0, limit_s=600)
        assert status == 0, said
        shutil.rmtree(self.victim / "tmp")
        self._files = files_of(self.victim)

    def copy(self, *, old: tuple[str, ...] = ()) -> None:
        """Put a fresh copy in place, with something older of the user's at some paths."""
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.victim, self.place, symlinks=True)
        for name in old:
            if Path(name).suffix:
                (self.place / name).write_bytes(_OLD)
            else:
                shutil.copytree(self.victim / "films", self.place / name)

    def run(self, name: str, fault: Fault | None = None, *, first: int = -1, again: bool = False) -> Ended:
        """Run a verb in the copy, with a fault."""
        verb = VERBS[name]
        made = self.place.with_name("made.json")
        made.unlink(missing_ok=True)

        def action() -> int:
            from ziggurat.cli.main import main

            arguments = verb.again() if again and verb.again else verb.arguments
            beside = 0
            if verb.beside:
                server = os.getpid()
                beside = os.fork()
                if not beside:
                    verb.beside(server)
                    os._exit(0)
            self.disk.arm(self.place, fault, first=first)
            status = main(list(arguments))
            calls = self.disk.rest()
            if beside and status:
                os.kill(beside, signal.SIGKILL)
            if beside:
                os.waitpid(beside, 0)
            result = verb.result() if status == 0 else None
            made.write_text(json.dumps([result, calls, sorted(sys.modules)]))
            return status

        status, said = _forked(self.place, action, limit_s=TIME_LIMIT_S)
        self.disk.rest()
        result, calls, modules = json.loads(made.read_text()) if made.exists() else (None, (0,) * _NUM_KINDS, ())
        self.modules.update(modules)
        return Ended(status=status, said=said, result=result, calls=tuple(calls))

    def result(self, name: str) -> Any:
        """Return what lies in the copy as the result of a verb; a text where it cannot be read."""
        made = self.place.with_name("made.json")
        made.unlink(missing_ok=True)
        status, said = _forked(
            self.place, lambda: made.write_text(json.dumps(VERBS[name].result())) and 0, limit_s=TIME_LIMIT_S
        )
        return json.loads(made.read_text()) if status == 0 else said

    def warm_up(self) -> None:
        """Import what verbs have imported until now, so that children need not."""
        for name in sorted(self.modules - set(sys.modules)):
            with contextlib.suppress(Exception):
                importlib.import_module(name)

    def changed(self, verb: Verb) -> list[str]:
        """Return files of the user that a verb has changed or deleted and may not."""
        now = files_of(self.place)
        names = [name for name, digest in self._files.items() if now.get(name) != digest]
        may = ("cache/*", "tmp/*", *verb.writes)
        return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in may)]


def files_of(folder: Path) -> dict[str, str]:
    """Return the digests of all files below a folder, by their paths there."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def outcome_of(ended: Ended, *, same: bool) -> str:
    """Return how one run of a verb ended, in a word of the table."""
    if ended.status is None:
        return "hung"
    if ended.status < 0 or any(each in ended.said for each in RAW):
        return "crashed"
    if ended.status == 0 and not same:
        return "rebuilt" if _SAYS_DAMAGE.search(ended.said) else "silent"
    if ended.status == 0:
        return "same"
    return "found" if "expected:" in ended.said and "ways out:" in ended.said else "crashed"


def _cases(bench: Bench, options: argparse.Namespace) -> Iterator[Case]:
    names = verbs_in_turn(options.verbs)
    sound: dict[str, Ended] = {}
    end = time.monotonic() + options.seconds
    for number in range(options.count):
        if time.monotonic() > end:
            return
        name = names[number % len(names)]
        verb = VERBS[name]
        draw = random.Random(f"{options.seed}/{number}")
        if name not in sound:
            bench.copy()
            sound[name] = bench.run(name)
            assert sound[name].status == 0, f"{name} on a sound disk: {sound[name].said}"
            bench.warm_up()
        expected = sound[name].result
        fault = draw.choice(FAULTS)
        calls = sum(count for kind, count in enumerate(sound[name].calls) if fault.kinds >> kind & 1)
        first = draw.randrange(max(calls, 1))
        old = verb.out if draw.random() < 0.5 else ()
        what = f"{fault.name}, call {first} of {calls}{', over an older file' if old else ''}"
        bench.copy(old=old)
        ended = bench.run(name, fault, first=first)
        outcome = outcome_of(ended, same=verb.is_same(ended.result, expected))
        said = ended.said
        if changed := bench.changed(verb):
            outcome = "silent"
            said = f"changed or deleted: {changed}\n{said}"
        if old and ended.status and (lost := _lost(bench, name, expected)):
            outcome = "silent"
            said = f"what was there is gone, and the new is not whole: {lost}\n{said}"
        if outcome == "found":
            again = bench.run(name, again=True)
            if again.status != 0 or not verb.is_same(again.result, expected):
                outcome = outcome_of(again, same=verb.is_same(again.result, expected))
                outcome = "crashed" if outcome == "found" else outcome
                said = f"{said}\n--- given again: {again.said}"
        yield Case(number, f"faults, {name}", what, outcome, said[-3000:])


def _lost(bench: Bench, name: str, expected: Any) -> list[str]:
    """Return the paths at which neither what was there lies, nor the whole new result."""
    verb = VERBS[name]
    changed = [each for each in verb.out if not _is_old(bench, each)]
    if not changed or bench.result(name) == expected:
        return []
    if len(verb.out) == 1:
        return changed
    # One of several files may be new already; each is whole in itself.
    return [each for each in changed if not (bench.place / each).exists() or not (bench.place / each).stat().st_size]


def _is_old(bench: Bench, name: str) -> bool:
    path = bench.place / name
    if Path(name).suffix:
        return path.is_file() and path.read_bytes() == _OLD
    return path.is_dir() and files_of(path) == files_of(bench.victim / "films")


def bench_inside(options: argparse.Namespace) -> Bench:
    """Import what all verbs need, and fill the folder that is copied for each case."""
    from ziggurat.training.report import page

    # Drawing writes nothing, and takes most of the time of a small training.
    page.figure_svg = lambda figure: "<svg/>"
    root = Path(options.folder)
    bench = Bench(root, Disk(root / "state"))
    bench.make()
    return bench


# ------------------------------------------------------------------------------------------------------------ outside


@contextlib.contextmanager
def fast_folder() -> Iterator[Path]:
    """Give a folder in memory where there is one: a flush costs nothing there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None, prefix="attack-") as name:
        yield Path(name)


def behind_faults(module: str, *, count: int, seed: int, seconds: float, verbs: str) -> list[Case]:
    """Run a module with the faults in front of libc, in a process of its own; return the cases that it prints."""
    arguments = ["--count", str(count), "--seed", str(seed), "--seconds", str(seconds), "--verbs", verbs]
    with fast_folder() as folder:
        library = folder / "faults.so"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run(["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-o", library, source, "-ldl"], check=True)
        state = folder / "state"
        state.write_bytes(bytes(ctypes.sizeof(_State)))
        command = [sys.executable, "-m", module, "--inside", "--folder", str(folder), *arguments]
        environment = {**os.environ, "LD_PRELOAD": str(library), "FAULTS_STATE": str(state), "OMP_NUM_THREADS": "1"}
        shown = show_progress()
        shown.begin(module.rpartition(".")[2], total=count)
        found = list[Case]()
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                found.append(Case(**json.loads(line)))
                shown.update(len(found), note=found[-1].target)
        shown.end()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        return found


def inside_options() -> argparse.Namespace:
    """Read the command line of the process behind the faults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--folder", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--verbs", default="")
    return parser.parse_args()


def print_cases(cases: Callable[[Bench, argparse.Namespace], Iterator[Case]]) -> None:
    """Try the cases in the process behind the faults, and print each for the one that started it."""
    options = inside_options()
    for case in cases(bench_inside(options), options):
        print(json.dumps(asdict(case)), flush=True)


def attack(*, count: int, seed: int, seconds: float, verbs: str = "") -> list[Case]:
    """Try `count` cases, or as many as fit in `seconds`."""
    return behind_faults("tests.attacks.faults", count=count, seed=seed, seconds=seconds, verbs=verbs)


def main(arguments: list[str] | None = None) -> int:
    """Attack, print every defect and the table."""
    return run_attack(attack, arguments, doc=__doc__, count=1000, shown=1500)


if __name__ == "__main__":
    if "--inside" in sys.argv:
        print_cases(_cases)
    else:
        sys.exit(main())
