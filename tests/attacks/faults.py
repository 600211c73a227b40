"""Attack writing: let a write, flush, fsync, close, rename or open of a verb fail as full and broken disks do.

    python -m tests.attacks.faults --count 300 --seed 0

Each case runs one verb of the command line in a fresh copy of a folder with data and runs, and lets the n-th call that
writes below it fail, once or from then on (`faults.cpp`, in front of libc, so that libraries in every language meet
it). A verb that ends with an error is given again without the fault, on what it left. What may come out:

    found      an error in four parts; given again, the verb makes what it makes on a sound disk
    same       what it makes on a sound disk, whatever failed (a log that nobody needs, a lock)
    silent     status 0 and another result, or another result when it is given again
    crashed    a traceback, an error without its parts, a signal
    hung       no end in time

The last three are defects.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.attacks.files import Case, run_attack

TIME_LIMIT_S = 120.0
_SETTINGS = (
    *("--training.epochs", "2", "--training.loader.batch-size", "64", "--training.checkpoint-every", "3"),
    *("--model.top.hidden-dims", "8", "--model.bottom.hidden-dims", "8", "--model.embedding-dim", "4"),
    *("--training.precision", "fp32", "--model.embedding.kernel", "torch", "--training.learning-rate", "0.01"),
)
_DATA = ("--data.train", "log.parquet", "--schema", "my.toml")
_TRAIN = ("train", "table_dlrm", *_DATA, *_SETTINGS)


@dataclass(frozen=True)
class Verb:
    """A command line, and what it makes."""

    arguments: tuple[str, ...]
    result: Callable[[], Any]


def _sha(*names: str) -> list[str]:
    return [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in names]


def _run(folder: str) -> Any:
    from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
    from ziggurat.training.checkpoint import CheckpointStore, Match
    from ziggurat.training.records.log import read_records

    last = CheckpointStore(Path(folder) / "checkpoints").load(None, into=None, match=Match.SUBSET)
    weights = {name: hashlib.sha256(bytes(value.numpy().tobytes())).hexdigest() for name, value in last.tensors.items()}
    log = [{k: v for k, v in each.items() if k != "timing"} for each in read_records(Path(folder) / "metrics.jsonl")]
    return [weights, log, _sha(f"{folder}/ledger.bin"), load_preprocessing(Path(folder) / "preprocessing").fingerprint]


def _export() -> Any:
    from ziggurat.serving.export.export_folder import open_export

    files = open_export("ex").manifest.files
    return sorted([name, entry.sha256] for name, entry in files.items() if not name.endswith(".pt2"))


def _prepared() -> Any:
    from ziggurat.recipes.run_config import load_config
    from ziggurat.runs.execute import prepare_run

    prepared = prepare_run(load_config("run"))
    datasets = (prepared.train, prepared.valid, prepared.test)
    return [prepared.preprocessing.fingerprint, [each.digest for each in datasets if each is not None]]


def _evaluated() -> Any:
    return {name: value for name, value in json.loads(Path("out.json").read_text()).items() if "metric" in name}


def _frame(name: str) -> str:
    import polars as pl

    return hashlib.sha256(pl.read_parquet(name).write_csv().encode()).hexdigest()


def _embeddings() -> Any:
    import polars as pl

    return pl.read_parquet("vectors.parquet").to_dict(as_series=False)


VERBS: dict[str, Verb] = {
    "train": Verb((*_TRAIN, "--out", "new"), lambda: _run("new")),
    "resume": Verb(("train", "run", "--resume", "--training.epochs", "3"), lambda: _run("run")),
    "prepare": Verb(("prepare", "table_dlrm", *_DATA), _prepared),
    "cluster": Verb(
        ("data", "cluster-by-session", "log.parquet", "--session", "user_id", "--out", "clustered.parquet"),
        lambda: _sha("clustered.parquet"),
    ),
    "inspect": Verb(("data", "inspect", "log.parquet", "--write-schema", "guess.toml"), lambda: _sha("guess.toml")),
    "predict": Verb(("predict", "run", "log.parquet", "--out", "out.csv"), lambda: _sha("out.csv")),
    "predict parquet": Verb(("predict", "run", "log.parquet", "--out", "out.parquet"), lambda: _sha("out.parquet")),
    "evaluate": Verb(("evaluate", "run", "log.parquet", "--json", "out.json"), _evaluated),
    "embeddings": Verb(("embeddings", "run", "user_id", "--out", "vectors.parquet"), _embeddings),
    "export": Verb(("export", "run", "--out", "ex"), _export),
    "report": Verb(("report", "run"), lambda: Path("run/report.html").stat().st_size > 0),
}


def make_victim(folder: Path) -> None:
    """Data, a schema and a run, with what they put into the cache but prepared data."""
    import polars as pl

    import ziggurat
    from ziggurat.cli.main import main

    rows = pl.int_range(600, eager=True)
    frame = pl.DataFrame({"user_id": rows * 7 % 40, "item": "m" + (rows * 11 % 25).cast(pl.String)})
    price = (rows % 13).cast(pl.Float64) / 4
    frame = frame.with_columns(price=price, timestamp=978_300_000 + 60 * rows, click=(rows * 5 % 7 < 3).cast(pl.Int64))
    frame.write_parquet("log.parquet")
    schema = ziggurat.Schema(
        features=(
            ziggurat.Categorical(name="user_id"),
            ziggurat.Categorical(name="item"),
            ziggurat.Dense(name="price"),
        ),
        labels=(ziggurat.Label(name="click"),),
        time="timestamp",
    )
    ziggurat.write_schema(schema, "my.toml")
    assert main([*_TRAIN, "--out", "run"]) == 0
    shutil.rmtree("cache/prepared")


# ------------------------------------------------------------------------------------- inside, with the faults in front


def _forked(place: Path, action: Callable[[], int], *, limit_s: float) -> tuple[int | None, str]:
    """The status of `action` in a child (None: it did not end, negative: a signal), and what it wrote."""
    output = place.with_name("output.txt")
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            os.chdir(place)
            os.environ["ZIGGURAT_CACHE"] = str(place / "cache")
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
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
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(code), output.read_text(errors="replace")
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, output.read_text(errors="replace")


def _verb(place: Path, name: str, faults: ctypes.CDLL, fault: tuple[int, int, int]) -> tuple[int | None, str, Any, int]:
    """Run a verb in a child; its status, what it said, what it made (None unless its status is 0), matching calls."""
    found = place.with_name("found.json")
    found.unlink(missing_ok=True)

    def action() -> int:
        from ziggurat.cli.main import main

        first, last, number = fault
        arguments = VERBS[name].arguments
        if name == "train" and (Path("new/metrics.jsonl").exists() or list(Path("new/checkpoints").glob("step-*"))):
            arguments = ("train", "new", "--resume")
        faults.faults_arm(os.fsencode(f"{place}/"), ctypes.c_long(first), ctypes.c_long(last), number)
        status = main(list(arguments))
        calls = faults.faults_count()
        faults.faults_arm(b"", ctypes.c_long(-1), ctypes.c_long(-1), 0)
        result = VERBS[name].result() if status == 0 else None
        found.write_text(json.dumps([result, calls]))
        return status

    status, said = _forked(place, action, limit_s=TIME_LIMIT_S)
    result, calls = json.loads(found.read_text()) if found.exists() else (None, 0)
    return status, said, result, calls


def _inside(options: argparse.Namespace) -> None:
    """Try the cases, each a line of JSON on standard output."""
    import ziggurat.cli.main  # before the first fork, so that children need not
    import ziggurat.runs.export.make
    import ziggurat.runs.load  # noqa: F401

    faults = ctypes.CDLL(options.inside)
    root = Path(options.folder)
    victim, place = root / "victim", root / "case"
    victim.mkdir()
    status, said = _forked(victim, lambda: make_victim(victim) or 0, limit_s=600)
    assert status == 0, said
    none = (-1, -1, 0)
    sound: dict[str, tuple[Any, int]] = {}
    names = list(VERBS)
    end = time.monotonic() + options.seconds
    for number in range(options.count):
        if time.monotonic() > end:
            return
        name = names[number % len(names)]
        draw = random.Random(f"{options.seed}/{number}")
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(victim, place)
        if name not in sound:
            status, said, result, calls = _verb(place, name, faults, none)
            assert status == 0, f"{name} on a sound disk: {said}"
            sound[name] = result, calls
            shutil.rmtree(place)
            shutil.copytree(victim, place)
        expected, calls = sound[name]
        first = draw.randrange(max(calls, 1))
        once = draw.random() < 0.5
        code = draw.choice([errno.ENOSPC, errno.EIO, errno.EDQUOT])
        what = f"call {first} of {calls} {'fails' if once else 'and all later ones fail'}: {os.strerror(code)}"
        status, said, result, _ = _verb(place, name, faults, (first, first if once else -1, code))
        outcome = _outcome(status, said, same=result == expected)
        if outcome == "found":
            status, again, result, _ = _verb(place, name, faults, none)
            if status != 0 or result != expected:
                outcome = "hung" if status is None else "silent" if status == 0 else "crashed"
                said = f"{said}\n--- given again: {again}"
        print(json.dumps(asdict(Case(number, f"faults, {name}", what, outcome, said[-3000:]))), flush=True)


def _outcome(status: int | None, said: str, *, same: bool) -> str:
    if status is None:
        return "hung"
    if status < 0 or "Traceback (most recent call last)" in said:
        return "crashed"
    if status == 0:
        return "same" if same else "silent"
    return "found" if "expected:" in said and "ways out:" in said else "crashed"


# ------------------------------------------------------------------------------------------------------------ outside


def attack(*, count: int, seed: int, seconds: float) -> list[Case]:
    """Try `count` cases, or as many as fit in `seconds`; in a process of its own, in front of which the faults are."""
    with tempfile.TemporaryDirectory() as name:
        library = Path(name) / "faults.so"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run(["g++", "-std=c++17", "-fPIC", "-shared", "-o", library, source, "-ldl"], check=True)
        command = [sys.executable, "-m", "tests.attacks.faults", "--inside", str(library), "--folder", name]
        command += ["--count", str(count), "--seed", str(seed), "--seconds", str(seconds)]
        environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Case(**json.loads(line)) for line in done.stdout.splitlines()]


def main(arguments: list[str] | None = None) -> int:
    """Attack, print every defect and the table."""
    return run_attack(attack, arguments, doc=__doc__, count=300, shown=1500)


if __name__ == "__main__":
    if "--inside" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--inside", required=True)
        parser.add_argument("--folder", required=True)
        parser.add_argument("--count", type=int, required=True)
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--seconds", type=float, required=True)
        _inside(parser.parse_args())
    else:
        sys.exit(main())
