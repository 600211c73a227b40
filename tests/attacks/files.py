"""Attack every small file: flipped bits, cut ends, zeros, lost keys, wrong types, huge values, deep nesting, devices.

    python -m tests.attacks.files --count 300 --seed 0

Each case damages one file of a fresh copy of a run (with its cache, plans and schemas), and loads it in a process of
its own with a limit on time and memory. What may come out:

    found      an error in four parts
    rebuilt    a cache that was made again, and said so
    same       what was loaded equals what was written: the damage met a space, or a file that is not read
    accepted   another valid value in a file that people write, or whose checksum the attack made good: nobody can know
    silent     another value, and no word of it
    crashed    any other exception, or the end of the process
    hung       no answer in time

The last three are defects: the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ziggurat.config import from_json
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing, save_preprocessing
from ziggurat.errors import CheckpointError, ZigguratError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema_io import read_schema, write_schema
from ziggurat.files import digest_of, sha256_of
from ziggurat.plan import Plan, Towers
from ziggurat.planning.cluster.catalogue import load_cluster, named_cluster
from ziggurat.planning.costs.learned import LearnedCostModel
from ziggurat.planning.costs.measurements import Measurements
from ziggurat.recipes.run_config import load_config
from ziggurat.runs.execute import prepare_run, train_run
from ziggurat.runs.verify import verify_run
from ziggurat.studies.compare_runs import RECORD_FORMAT, RunRecord
from ziggurat.testing.ranks import preload
from ziggurat.training.checkpoint import CheckpointStore, Match
from ziggurat.training.position import Position
from ziggurat.training.records.log import read_records
from ziggurat.training.records.run_folder import CONFIG, EVALUATION, INPUTS

OUTCOMES = ("found", "rebuilt", "same", "accepted", "silent", "crashed", "hung")
DEFECTS = ("silent", "crashed", "hung")
TIME_LIMIT_S = 30.0
MEMORY_LIMIT = 6 << 30
RELEASED = Path(__file__).parents[1] / "end_to_end" / "released" / "c0ca678"
_CHECKPOINT = Path("run/checkpoints/step-000000000008")
_NEWEST = "new/checkpoints/step-000000000007"
_WRITTEN = (
    *("new/metrics.jsonl", "new/ledger.bin", f"{_NEWEST}/rank-00000.safetensors", f"{_NEWEST}/state.json"),
    *("new/metrics.jsonl", "new/ledger.bin", f"{_NEWEST}/manifest.json"),
)


# ------------------------------------------------------------------------------------------------------ what is loaded


def _checkpoint() -> Any:
    store = CheckpointStore(Path("run/checkpoints"))
    loaded = store.load(8, into=None, match=Match.SUBSET)
    tensors = {name: value.tolist() for name, value in (loaded.tensors or {}).items()}
    return Position.from_json(loaded.state.get("position")), tensors


def _prepared() -> Any:
    prepared = prepare_run(load_config("run"))
    rows = [prepared.train.read_group(0).to_pydict(), prepared.test.read_group(0).to_pydict()]  # type: ignore[union-attr]
    return ("rebuilt" if prepared.note or not prepared.reused else "", rows)


def _verified() -> Any:
    verdict = verify_run("new")
    if any("DAMAGED" in line for line in verdict.lines):
        text = "\n".join(verdict.lines)
        assert "expected:" in text, text
        raise CheckpointError(expected="a run that verifies", found=text, where="new", ways_out="as each line says")
    return verdict.good


def _resumed() -> Any:
    """What a run ends with that goes on from here for another epoch."""
    config = load_config("new")
    longer = dataclasses.replace(config, training=dataclasses.replace(config.training, epochs=2))
    train_run(longer, folder="new", resume=True)
    last = CheckpointStore(Path("new/checkpoints")).load(None, into=None, match=Match.SUBSET)
    log = [{k: v for k, v in record.items() if k != "timing"} for record in read_records(Path("new/metrics.jsonl"))]
    weights = {name: value.tolist() for name, value in (last.tensors or {}).items()}
    return log, sha256_of(Path("new/ledger.bin")), digest_of(weights)


def _learned() -> Any:
    cost_model = LearnedCostModel.load("learned")
    return cost_model.card, {name: value.tolist() for name, value in cost_model.weights.items()}


LOADERS: dict[str, tuple[tuple[str, ...], Callable[[], Any]]] = {
    "config": (("run/config.json",), lambda: load_config("run")),
    "inputs": (("run/inputs.json",), lambda: from_json(InputSpec, INPUTS.read("run/inputs.json"), where="inputs")),
    "plan": (("run/plan.json",), lambda: Plan.load("run/plan.json")),
    "towers": (("towers.json",), lambda: Towers.load("towers.json")),
    "schema": (("schema.toml",), lambda: read_schema("schema.toml")),
    "cluster": (("cluster.toml",), lambda: load_cluster("cluster.toml")),
    "measurements": (("measurements.json",), lambda: Measurements.load("measurements.json")),
    "learned costs": (("learned.json", "learned.safetensors"), _learned),
    "compared run": (("compared/run.json",), lambda: RunRecord.load(Path("compared"))),
    "evaluation": (("run/evaluations/test.json",), lambda: EVALUATION.read("run/evaluations/test.json")),
    "preprocessing": (
        ("run/preprocessing/preprocessing.json", "run/preprocessing/vocabulary_000.parquet"),
        lambda: load_preprocessing(Path("run/preprocessing")).fingerprint,
    ),
    "checkpoint": (
        tuple(
            str(_CHECKPOINT / name) for name in ("manifest.json", "SHA256SUMS", "state.json", "rank-00000.safetensors")
        ),
        _checkpoint,
    ),
    "verify": (_WRITTEN, _verified),
    "resume": (_WRITTEN, _resumed),
    "prepared cache": (("prepared.json", "train/manifest.json", "train/part-00000.parquet"), _prepared),
}
EDITABLE = ("config", "plan", "towers", "schema", "cluster")


def make_victim(folder: Path) -> None:
    """What the released version wrote, in the present formats, and a cache of prepared data."""
    shutil.copytree(RELEASED, folder, dirs_exist_ok=True)
    with _inside(folder):
        CONFIG.write("run/config.json", CONFIG.read("run/config.json"))
        INPUTS.write("run/inputs.json", INPUTS.read("run/inputs.json"))
        EVALUATION.write("run/evaluations/test.json", EVALUATION.read("run/evaluations/test.json"))
        Plan.load("run/plan.json").save("run/plan.json")
        RECORD_FORMAT.write("compared/run.json", RECORD_FORMAT.read("compared/run.json"))
        Towers.load("towers.json").save("towers.json")
        write_schema(read_schema("schema.toml"), "schema.toml")
        named_cluster("h100x8").save("cluster.toml")
        Measurements.load("measurements.json").save("measurements.json")
        LearnedCostModel.load("learned").save("learned")
        save_preprocessing(load_preprocessing(Path("run/preprocessing")), Path("run/preprocessing"))
        config = load_config("run")
        prepare_run(config)
        training = dataclasses.replace(config.training, epochs=1, checkpoint_every=3, log_every=1)
        train_run(dataclasses.replace(config, training=training), folder="new")  # with hashes of log and ledger


@contextlib.contextmanager
def _inside(folder: Path) -> Any:
    before = Path.cwd()
    os.chdir(folder)
    os.environ["ZIGGURAT_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        os.chdir(before)


# ----------------------------------------------------------------------------------------------------------- mutations


def _flip(content: bytes, draw: random.Random) -> bytes:
    if not content:
        return b"\1"
    place = draw.randrange(len(content) * 8)
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def _zero(content: bytes, draw: random.Random) -> bytes:
    first = draw.randrange(len(content) + 1)
    last = min(len(content), first + draw.choice([1, 16, 512, 4096]))
    return content[:first] + bytes(last - first) + content[last:]


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bit flip": _flip,
    "cut": lambda content, draw: content[: draw.randrange(len(content) + 1)],
    "zeros": _zero,
    "nesting": lambda content, draw: draw.choice([b"[" * 100_000, b'{"a":' * 100_000, b"a = " + b"[" * 100_000]),
    "digits": lambda content, draw: draw.choice([b'{"a": ' + b"9" * 5000 + b"}", b"a = " + b"9" * 5000]),
    "noise": lambda content, draw: draw.randbytes(draw.choice([0, 1, 100, 10_000])),
}
SPECIAL = ("device", "pipe", "folder", "sparse", "missing", "locked name")
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, "", "x" * 10_000, "\x00", [], {}, -1, 0, 1 << 31, 1 << 63, 10**15, 10**18, 10**30, 1e300, -0.0),
    *(float("nan"), float("inf"), [[[]]], {"kind": "none"}, [1, "a", None], "1", 1.5, "../../etc/passwd", "/dev/zero"),
)


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, item in items for found in [(*path, key), *_places(item, (*path, key))]]


def _edited(data: Any, kind: str, draw: random.Random) -> Any:
    """The same data with a key less, more, or another value, somewhere."""
    places = [path for path in _places(data) if path[0] not in ("sha256",)]
    if not places:
        return data
    *above, key = draw.choice(places)
    inner = data
    for step in above:
        inner = inner[step]
    if kind == "lost key":
        del inner[key]
    elif kind == "new key" and isinstance(inner, dict):
        inner[draw.choice(["extra", "", "kind", str(key) + "s"])] = draw.choice(ODD_VALUES)
    else:
        inner[key] = draw.choice(ODD_VALUES)
    return data


def _reseal(path: Path, data: Any) -> bytes:
    if isinstance(data, dict) and "sha256" in data:
        data["sha256"] = digest_of({name: value for name, value in data.items() if name != "sha256"})
    return json.dumps(data).encode()


def _reseal_checkpoint(folder: Path) -> None:
    """Make the checksums of a checkpoint good again: an attack by somebody who knows the format."""
    text = (folder / "manifest.json").read_bytes()
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        manifest = json.loads(text)
        state = (folder / "state.json").read_bytes()
        manifest["files"]["state.json"] = {"size_bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
        text = json.dumps(manifest).encode()
        (folder / "manifest.json").write_bytes(text)
        lines = [f"{hashlib.sha256(text).hexdigest()}  manifest.json\n"]
        lines += [f"{entry['sha256']}  {name}\n" for name, entry in manifest["files"].items()]
        (folder / "SHA256SUMS").write_text("".join(lines))


def damage(folder: Path, target: str, draw: random.Random) -> tuple[str, bool]:
    """Damage one file of a target; returns what was done, and whether the checksum was made good."""
    name = draw.choice(LOADERS[target][0])
    path = folder / name if target != "prepared cache" else next((folder / "cache" / "prepared").glob(f"*/{name}"))
    is_json = path.suffix == ".json"
    kinds = [*BYTES, *SPECIAL, *(["lost key", "new key", "other value"] * 4 if is_json else [])]
    kind = draw.choice(kinds)
    content = path.read_bytes()
    crafted = False
    if kind in BYTES:
        path.write_bytes(BYTES[kind](content, draw))
    elif kind in SPECIAL:
        path.unlink()
        if kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        elif kind == "locked name":
            path.symlink_to(path)
    else:
        data = _edited(json.loads(content), kind, draw)
        crafted = draw.random() < 0.7
        path.write_bytes(_reseal(path, data) if crafted else json.dumps(data).encode())
        if crafted and target == "checkpoint":
            _reseal_checkpoint(folder / _CHECKPOINT)
    return f"{name}: {kind}{', checksum made good' if crafted else ''}", crafted


# ---------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One case and what came of it."""

    number: int
    target: str
    what: str
    outcome: str
    detail: str


def _load(folder: str, target: str, reply: Connection) -> None:
    """In the child: load within limits, and send (kind, text)."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with _inside(Path(folder)):
        try:
            value = LOADERS[target][1]()
        except ZigguratError as error:
            parts = (error.expected, error.found, error.where, *error.ways_out)
            whole = all(isinstance(part, str) and part for part in parts) and len(str(error)) < 20_000
            reply.send(("found" if whole else "crashed", str(error)[:500]))
        except BaseException:
            reply.send(("crashed", traceback.format_exc()[-1500:]))
        else:
            reply.send(("value", repr(value)))


def _ask(folder: Path, target: str, *, limit_s: float) -> tuple[str, str]:
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_load, args=(str(folder), target, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        if not mine.poll(limit_s):
            return "hung", f"no answer in {limit_s:.0f} s"
        return mine.recv()
    except EOFError:
        child.join(5)
        return "crashed", f"the process ended with {child.exitcode}"
    finally:
        child.kill()
        child.join()
        mine.close()


def attack(*, count: int, seed: int, seconds: float, targets: tuple[str, ...] = tuple(LOADERS)) -> list[Case]:
    """Try `count` cases, or as many as fit in `seconds`."""
    preload()
    end = time.monotonic() + seconds
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as name:
        victim, place = Path(name) / "victim", Path(name) / "case"
        make_victim(victim)
        shutil.copytree(victim, place, symlinks=True)
        before = {}
        for target in targets:
            kind, before[target] = _ask(place, target, limit_s=120)
            assert kind == "value", f"{target} cannot be loaded before any damage: {before[target]}"
        for number in range(count):
            if time.monotonic() > end:
                break
            draw = random.Random(f"{seed}/{number}")
            target = targets[number % len(targets)]
            shutil.rmtree(place)
            shutil.copytree(victim, place, symlinks=True)
            what, crafted = damage(place, target, draw)
            kind, text = _ask(place, target, limit_s=TIME_LIMIT_S)
            if kind == "value":
                kind = _judge(target, text, before[target], crafted=crafted)
            cases.append(Case(number, target, what, kind, text if kind in DEFECTS else ""))
    return cases


def _judge(target: str, value: str, before: str, *, crafted: bool) -> str:
    if target == "prepared cache":  # the rows must be the same, whether they were there or made again
        same = value.partition(",")[2] == before.partition(",")[2]
        return ("rebuilt" if value.startswith("('rebuilt'") else "same") if same else "silent"
    if target == "compared run" and value == "None":
        return "rebuilt"  # a run without a record is evaluated again
    if value == before:
        return "same"
    return "accepted" if crafted or target in EDITABLE else "silent"


def table(cases: list[Case]) -> str:
    """Counts by class of file, as in docs/reliability.md."""
    lines = [f"{'class':<16}{'tried':>8}" + "".join(f"{name:>10}" for name in OUTCOMES)]
    for target in (*dict.fromkeys(case.target for case in cases), "all"):
        found = Counter(case.outcome for case in cases if target in (case.target, "all"))
        lines.append(f"{target:<16}{found.total():>8}" + "".join(f"{found[name]:>10}" for name in OUTCOMES))
    return "\n".join(lines)


def run_attack(
    attack: Callable[..., list[Case]], arguments: list[str] | None, *, doc: str | None, count: int, shown: int
) -> int:
    """Attack as the command line says, print every defect (so many last characters of it) and the table."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after this long")
    options = parser.parse_args(arguments)
    cases = attack(count=options.count, seed=options.seed, seconds=options.seconds)
    bad = [case for case in cases if case.outcome in DEFECTS]
    for case in bad:
        print(f"case {case.number}, {case.target}, {case.what}: {case.outcome}\n  {case.detail[-shown:]}")
    print(f"seed {options.seed}, {len(cases)} of {options.count} cases")
    print(table(cases))
    return 1 if bad else 0


def main(arguments: list[str] | None = None) -> int:
    """Attack, print every defect and the table."""
    return run_attack(attack, arguments, doc=__doc__, count=300, shown=700)


if __name__ == "__main__":
    # Under its own name, so that children see the same classes, and none of them runs this file again as its main one.
    from tests.attacks import files

    sys.modules["__main__"].__spec__, sys.modules["__main__"].__file__ = None, None

    sys.exit(files.main())
